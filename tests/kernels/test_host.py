"""The kernels host_rows and host_append against the references, on random and on adversarial
input.
"""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from benchmarks import throughput
from kvjax import CacheSpec, HostOffload, generation, ops, presets
from kvjax.kernels_pallas.host import host_append, host_rows
from kvjax.memory import CONCURRENT, to_host
from tests.kernels.conftest import ON_GPU, on_gpu
from tests.kernels.inputs import normal, of_pages

pytestmark = pytest.mark.usefixtures("kernels")


def on_host(*shape, dtype=jnp.bfloat16):
    return to_host(normal(7, *shape, dtype=dtype))


@pytest.mark.parametrize(
    ("B", "K", "P", "N", "row", "dtype", "config"),
    [
        (2, 3, 17, 9, (2, 4, 8), jnp.bfloat16, None),
        (1, 2, 5, 7, (3, 1, 4), jnp.float32, host_rows.Config(3, 1)),
        (1, 1, 3, 40, (2, 1, 96), jnp.float16, host_rows.Config(1, 1, 2)),
        *(
            pytest.param(
                1,
                8,
                65536,
                N,
                (2, 1, 128),
                jnp.bfloat16,
                host_rows.Config(ahead, w),
                marks=on_gpu,
            )
            for N in (1, 512, 2049)
            for ahead in (1, 2, 4, 8)
            for w in (1, 8)
        ),
        pytest.param(2, 8, 4096, 300, (2, 32, 128), jnp.bfloat16, None, marks=on_gpu),
        pytest.param(
            1,
            8,
            65536,
            2049,
            (2, 1, 128),
            jnp.bfloat16,
            host_rows.Config(4, 2, 32),
            marks=on_gpu,
        ),
    ],
)
def test_rows_of_the_host_equal_the_references(B, K, P, N, row, dtype, config):
    x = on_host(B, K, P, *row, dtype=dtype)
    index = np.random.default_rng(0).integers(0, P, (B, K, N)).astype(np.int32)
    index.reshape(-1)[::4] = np.resize([-1, P, 0, P - 1, 1 << 30], index.size)[::4]
    got = jax.jit(partial(host_rows.host_rows, config=config))(x, jnp.asarray(index))
    want = jax.jit(partial(ops.host_rows, implementation="xla"))(x, jnp.asarray(index))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        by_row = np.asarray(theirs, np.float32).reshape(B, K, N, *row[1:])
        assert not by_row[(index < 0) | (index >= P)].any()
        assert ours.sharding.memory_kind != "pinned_host"
    found = index[-1, -1]
    n = int(np.argmax((found >= 0) & (found < P)))
    for part, ours in enumerate(got):
        read = np.asarray(ours).reshape(B, K, N, *row[1:])[-1, -1, n]
        np.testing.assert_array_equal(read, np.asarray(x)[-1, -1, found[n], part])


@pytest.mark.parametrize(
    ("B", "K", "P", "N", "M", "row", "R", "dtype", "config"),
    [
        (3, 2, 40, 36, 37, (2, 2, 64), 9, jnp.bfloat16, None),
        (3, 1, 9, 5, 8, (2, 4, 64), 7, jnp.bfloat16, host_rows.Config(3, 1, 2)),
        (
            2,
            2,
            5,
            4,
            5,
            (2, 1, 64),
            3,
            jnp.float16,
            host_rows.Config(1, 1),
        ),  # no warp has a row for itself
        *(
            pytest.param(
                3, 8, 4096, 56, 57, (2, 32, 128), 159, jnp.bfloat16, config, marks=on_gpu
            )
            for config in (None, host_rows.BESIDE, host_rows.Config(4, 4, 7))
        ),
        pytest.param(
            1,
            8,
            4096,
            2046,
            2047,
            (2, 1, 128),
            300,
            jnp.bfloat16,
            host_rows.BESIDE,
            marks=on_gpu,
        ),
        pytest.param(1, 2, 4096, 16, 20, (2, 16, 64), 47, jnp.float16, None, marks=on_gpu),
    ],
)
def test_heads_recall_rows_where_they_are_or_keep_what_they_have(
    B, K, P, N, M, row, R, dtype, config
):
    (parts, Z, D), rng = row, np.random.default_rng(0)
    x = on_host(B, K, P, *row, dtype=dtype)
    index = rng.integers(-1, P, (B, K, N)).astype(np.int32)
    index.reshape(-1)[::4] = np.resize([P, P + 1, P + R - 1, -5], index.size)[::4]
    edge = jnp.asarray(np.resize([P + R - 1, -1, P + 1], B).astype(np.int32))
    mode = rng.integers(0, 3, (B, K))
    mode[0, 0] = 1
    there = np.stack(
        [rng.permutation(P)[:M] if M <= P else np.resize(-1, M) for _ in range(B * K)]
    ).astype(np.int32)
    there = there.reshape(B, K, M)
    there[..., ::5] = -1
    # What is held is not what x has, to be told from it, and what is ready neither.
    held, ready, recent = (
        tuple(normal(s + i, B, K, n, D, dtype=dtype) for i in range(parts))
        for s, n in ((20, M * Z), (40, M * Z), (30, R))
    )
    args = (
        x,
        jnp.asarray(index),
        edge,
        jnp.asarray(mode == 1),
        (jnp.asarray(there), held),
        recent,
    )
    kernel = jax.jit(partial(host_rows.recall, config=config))
    read = jax.jit(partial(ops.host_rows_first, implementation="xla"))(*args)
    anew = [np.array(a).reshape(B, K, M, Z, D) for a in read]
    if math.prod(row) * 2 % 512 == 0:
        for b, k, n in np.ndindex(B, K, N):
            for m in np.flatnonzero((there[b, k] == index[b, k, n]) & (index[b, k, n] >= 0)):
                for new, kept in zip(anew, held, strict=True):
                    new[b, k, n] = np.asarray(kept)[b, k, m * Z : (m + 1) * Z]
    anew = [a.reshape(B, K, M * Z, D) for a in anew]
    for ours, theirs in zip(kernel(*args), anew, strict=True):
        assert ours.sharding.memory_kind != "pinned_host"
        np.testing.assert_array_equal(np.asarray(ours)[mode == 1], theirs[mode == 1])

    which = jnp.asarray(mode == 2)
    rest = kernel(*args, (which, ready))
    for ours, *sources in zip(rest, held, anew, ready, strict=True):
        np.testing.assert_array_equal(
            ours, np.choose(mode[..., None, None], [np.asarray(a) for a in sources])
        )
    theirs = jax.jit(partial(ops.host_rows_rest, implementation="xla"))(*args, (which, read))
    for ours, kept, new in zip(theirs, held, read, strict=True):
        np.testing.assert_array_equal(ours, jnp.where((mode > 0)[..., None, None], new, kept))
    if config is None and B == 3:
        both = jax.tree.map(lambda a: jnp.stack([a, a[::-1]]), (*args[1:], (which, ready)))
        apart = jax.jit(jax.vmap(partial(host_rows.recall, x)))(*both)
        for ours, theirs in zip(apart, rest, strict=True):
            np.testing.assert_array_equal(ours[0], theirs)


@pytest.mark.parametrize(
    ("B", "K", "P", "n", "row", "dtype", "config"),
    [
        (7, 2, 11, 4, (2, 8), jnp.bfloat16, host_append.DEFAULT),
        (7, 1, 5, 5, (1, 96), jnp.float16, host_rows.Config(3, 2)),
        *(
            pytest.param(
                7, 8, 4096, n, row, jnp.bfloat16, host_rows.Config(ahead, 2), marks=on_gpu
            )
            for n, row in ((32, (1, 128)), (8, (32, 128)), (4096, (1, 64)))
            for ahead in (1, 4)
        ),
    ],
)
def test_rows_appended_to_the_host_are_the_references(B, K, P, n, row, dtype, config):
    new = [normal(s, B, K, n, *row, dtype=dtype) for s in (1, 2)]
    at = jnp.asarray(np.resize([0, P - n, P - n + 1, P - 1, P + 1, 1, 2], B).astype(np.int32))
    count = jnp.asarray(np.resize([n, n, n, n, n, 0, n - 1], B).astype(np.int32))
    reference = jax.jit(partial(ops.host_append, implementation="xla"), donate_argnums=0)
    want = reference(on_host(B, K, P, 2, *row, dtype=dtype), new, at, count)
    x = on_host(B, K, P, 2, *row, dtype=dtype)
    place = x.unsafe_buffer_pointer()
    got = jax.jit(partial(host_append.host_append, config=config), donate_argnums=0)(
        x, new, at, count
    )
    np.testing.assert_array_equal(got, want)
    assert got.sharding.memory_kind == want.sharding.memory_kind == "pinned_host"
    if ON_GPU:
        assert got.unsafe_buffer_pointer() == place, "it was copied"


def test_an_array_of_the_host_stays_there_through_loops_and_vmap_of_the_kernels():
    x, new = (
        on_host(1, 2, 9, 2, 1, 64),
        [normal(s, 1, 2, 2, 1, 64, dtype=jnp.bfloat16) for s in (1, 2)],
    )
    two = jnp.full(1, 2, jnp.int32)

    @jax.jit
    def through(x):
        def step(x, i):
            x = host_append.host_append(x, new, jnp.full(1, 2 * i), two)
            return x, host_rows.host_rows(x, jnp.full((1, 2, 2), 2 * i + 1))

        return jax.lax.scan(step, x, jnp.arange(3))

    after, read = through(x)
    assert after.sharding.memory_kind == "pinned_host"
    written = jnp.tile(jnp.stack(new, axis=3), (1, 1, 3, 1, 1, 1))
    np.testing.assert_array_equal(np.asarray(after)[:, :, :6], written)
    np.testing.assert_array_equal(np.asarray(after)[:, :, 6:], np.asarray(x)[:, :, 6:])
    for n, part in enumerate(read):
        np.testing.assert_array_equal(
            part, np.broadcast_to(written[None, :, :, 1, n], part.shape)
        )

    both, index = (
        to_host(jnp.stack([normal(7, *x.shape, dtype=x.dtype)] * 2)),
        jnp.full((2, 1, 2, 3), 3).at[1].set(-1),
    )
    rows = jax.jit(jax.vmap(host_rows.host_rows))(both, index)
    filled = jax.jit(jax.vmap(host_append.host_append, in_axes=(0, None, 0, None)))(
        both, new, jnp.array([[1], [8]]), two
    )
    for i, at in enumerate((1, 8)):
        for ours, theirs in zip(rows, ops.host_rows(x, index[i]), strict=True):
            np.testing.assert_array_equal(ours[i], theirs)
        want = jax.jit(ops.host_append)(x, new, jnp.array([at]), two)
        np.testing.assert_array_equal(np.asarray(filled)[i], want)


@on_gpu
@pytest.mark.parametrize("page", [1, 16])
def test_the_host_store_is_the_same_with_and_without_its_kernels(page, monkeypatch):
    spec = CacheSpec(
        batch=2, q_heads=4, kv_heads=2, head_dim=64, capacity=300, dtype=jnp.bfloat16
    )
    store, new = (
        HostOffload(page=page),
        [normal(s, 2, 2, 48, 64, dtype=jnp.bfloat16) for s in (1, 2)],
    )
    pages = jnp.asarray([[[[0, 2, 1]], [[2, 1, 0]]], [[[0, 0, 0]], [[1, 2, 0]]]], jnp.int32)
    selection = of_pages(pages, pages > 0, page)

    def run():
        append = jax.jit(lambda *args: store.append(*args), donate_argnums=0)
        st = store.init(spec, 96)
        for counts in ([32, 0], [16, 32], [48, 48], [0, 48]):
            st = append(st, *new, jnp.array(counts))
        return st.k, st.v, jax.jit(lambda st: store.gather(st, selection))(st)

    want = run()
    monkeypatch.setattr(ops.op, "_unmeasured", lambda kernel: None)
    with ops.explained() as ran:
        got = run()
    assert {call.op: str(call) for call in ran} == {
        "host_rows": "mosaic",
        "host_append": "mosaic",
    }
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("blocks", [0, 1, 3, 7, 64])
@pytest.mark.parametrize("jobs", [1, 5, 6, 7, 400])
def test_blocks_that_take_turns_do_all_jobs_and_none_is_idle(jobs, blocks):
    many, turns = host_rows.blocks_of(jobs, 6, host_rows.Config(blocks=blocks))
    assert many * turns * 6 >= jobs > (many * turns - many) * 6
    assert (many - 1) * 6 < jobs
    assert many <= blocks or not blocks
    assert turns == 1 or many == blocks


@on_gpu
@pytest.mark.parametrize(
    "policies",
    [presets.freekv(128, sink=16, local=16, tau=t) for t in (-1.0, 0.5, 2.0)]
    + [
        presets.fier(128, sink=4, local=16, store="host"),
        presets.quest(128),
        presets.logquant(),
    ],
)
def test_tokens_are_the_same_with_kernels_beside_each_other(policies, monkeypatch):
    """XLA orders kernels by the arrays that they declare as read and written, also in place."""
    shape = replace(throughput.SHAPES["llama-3.2-1b"], layers=4, windows=(), vocab_size=512)
    model = throughput.random_model(shape)
    prompt = np.random.default_rng(0).integers(0, 512, (2, 700), dtype=np.int32)
    found = []
    for options in (None, CONCURRENT):
        how = {
            "static_argnames": "measure",
            "donate_argnames": "cache",
            "compiler_options": options,
        }
        monkeypatch.setattr(
            "kvjax.generation.streaming.decode_loop",
            jax.jit(generation.loops.decode_loop.__wrapped__, **how),
        )
        cache = kvjax.init(policies, model.spec(batch=2, capacity=1024), layers=4)
        found.append(generation.generate(model, cache, prompt, max_new_tokens=200).tokens)
    np.testing.assert_array_equal(*found)
