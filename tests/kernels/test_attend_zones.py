"""The kernel attend_zones against the reference, on random and on adversarial input."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import CacheSpec, Fifo, Retrieval, Step, ops
from kvjax.kernels_pallas.attend import attend_slots, attend_zones
from kvjax.kernels_pallas.attend.softmax import SIZES
from kvjax.numerics.partial import Logits, Span
from kvjax.numerics.selection import PackedSelection, Selection
from kvjax.selectors import MinMaxPages
from tests.kernels.conftest import on_gpu
from tests.kernels.inputs import normal, relative

pytestmark = pytest.mark.usefixtures("kernels")


def zones_of(B, K, G, H, S, R, A, D, M, local, dtype, counts=None):
    """A step's arguments. Rows of the batch have, in turn: all zones filled; a short recent
    block, and a sink that is seen in part; nothing but one local token; nothing. First slots of
    `recent` may be selected, the last are local."""
    rng = np.random.default_rng(3)
    q, k, v = (
        normal(0, B, K, G, D, dtype=dtype),
        *(normal(s, B, K, S, D, dtype=dtype) for s in (1, 2)),
    )
    stop = np.resize([R, R // 2, 1, 0], B).astype(np.int32)
    start = np.maximum(stop - local, 0)
    spare = np.resize([R - local, max(R // 2 - local, 0), 0, 0], B)
    picked = np.stack([rng.permutation(S + R - local)[:M] for _ in range(B * K * H)]).reshape(
        B, K, H, M
    )
    count = np.resize([M, M // 3, 0, 0] if counts is None else counts, B)[:, None, None, None]
    valid = (np.arange(M) < count) & (picked < S + spare[:, None, None, None])
    spans = [
        Span(
            *(normal(s, B, K, R, D, dtype=dtype) for s in (4, 5)),
            jnp.asarray(start),
            jnp.asarray(stop),
        ),
        None,
    ]
    if A:
        ends = (
            jnp.asarray(np.resize(x, B).astype(np.int32))
            for x in ([0, min(1, A), A, 0], [A, A, A, 0])
        )
        spans[1] = Span(*(normal(s, B, K, A, D, dtype=dtype) for s in (6, 7)), *ends)
    return q, k, v, Selection(jnp.asarray(picked, jnp.int32), jnp.asarray(valid)), *spans


def zones_kernel(local, config=None, scale=0.125):
    def run(q, k, v, selection, recent, sink, more=None):
        return attend_zones.attend_zones(
            q, k, v, *selection, recent, sink, local, more, scale=scale, config=config
        )

    return run


@pytest.mark.parametrize(
    ("B", "K", "G", "H", "S", "R", "A", "D", "M", "local", "dtype", "config"),
    [
        (4, 1, 4, 1, 90, 40, 5, 64, 60, 33, jnp.bfloat16, attend_slots.Config(2, 1)),
        (
            2,
            1,
            5,
            1,
            150,
            70,
            0,
            128,
            130,
            1,
            jnp.float16,
            attend_slots.Config(1, 1),
        ),  # a loop, no sink
        (4, 1, 12, 1, 90, 40, 5, 96, 60, 33, jnp.bfloat16, attend_slots.Config(1, 1)),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (
                    4,
                    2,
                    4,
                    4,
                    50,
                    20,
                    1,
                    64,
                    33,
                    7,
                    jnp.bfloat16,
                    None,
                ),  # a choice for each head
                (2, 1, 8, 1, 300, 60, 4, 256, 200, 16, jnp.bfloat16, None),
                (
                    1,
                    1,
                    2,
                    1,
                    2000,
                    256,
                    4,
                    128,
                    1788,
                    256,
                    jnp.bfloat16,
                    attend_slots.Config(8, 2),
                ),
                (1, 1, 4, 1, 64, 31, 0, 64, 0, 16, jnp.bfloat16, None),  # nothing is chosen
                *((4, 1, 18, 2, 60, 20, 4, D, 33, 7, jnp.bfloat16, None) for D in SIZES),
            )
        ),
        *(
            pytest.param(
                4, 3, G, 1, 5000, 300, 4, 128, 1000, 200, jnp.bfloat16, None, marks=on_gpu
            )
            for G in (1, 3, 8)
        ),
        *(
            pytest.param(4, 3, 4, 4, 5000, 300, 0, D, 777, 1, jnp.float16, None, marks=on_gpu)
            for D in SIZES
        ),
        *(
            pytest.param(4, 3, G, 1, 5000, 300, 4, 128, 777, 1, jnp.float16, None, marks=on_gpu)
            for G in (9, 12, 16)
        ),
        *(
            pytest.param(
                1,
                8,
                4,
                1,
                131072,
                256,
                0,
                128,
                2047,
                1,
                jnp.bfloat16,
                attend_slots.Config(b, w),
                marks=on_gpu,
            )
            for b in (1, 2, 4, 8)
            for w in (1, 2)
        ),
        pytest.param(
            8, 8, 4, 1, 32768, 512, 4, 128, 1788, 256, jnp.bfloat16, None, marks=on_gpu
        ),
    ],
)
def test_attention_over_zones_equals_the_reference(
    B, K, G, H, S, R, A, D, M, local, dtype, config
):
    args = zones_of(B, K, G, H, S, R, A, D, M, local, dtype)
    reference = jax.jit(
        partial(ops.attend_zones, local=local, logits=Logits(0.125), implementation="xla")
    )
    got, want = (
        jax.jit(zones_kernel(local, config))(*args),
        reference(args[0].astype(jnp.float32), *args[1:]),
    )
    assert got.dtype == dtype
    # Weights are rounded to the dtype of the values, and so is the result.
    assert relative(got, want) < float(jnp.finfo(dtype).eps)
    if B == 4:
        assert not np.asarray(got[3], np.float32).any(), "attention over nothing is zero"


def test_part_over_zones_has_its_log_sum():
    args = zones_of(4, 1, 4, 1, 90, 40, 5, 64, 60, 33, jnp.bfloat16)
    config = attend_slots.Config(2, 1)
    run = partial(attend_zones.attend_zones, local=33, scale=0.125, part=True, config=config)
    got = jax.jit(lambda q, k, v, chosen, *zones: run(q, k, v, *chosen, *zones))(*args)
    want = jax.jit(
        partial(
            ops.attend_zones, local=33, logits=Logits(0.125), part=True, implementation="xla"
        )
    )(*args)
    assert got[0].dtype == jnp.float32
    assert relative(got[0], want.out) < float(jnp.finfo(jnp.bfloat16).eps)
    np.testing.assert_allclose(got[1], want.lse, rtol=1e-5, atol=1e-5)


def test_attention_over_zones_reads_nothing_that_is_not_attended_to():
    q, k, v, selection, recent, sink = zones_of(
        4, 1, 2, 1, 60, 30, 4, 64, 40, 9, jnp.bfloat16, [30, 20, 0, 0]
    )
    run = jax.jit(zones_kernel(9))
    want = run(q, k, v, selection, recent, sink)

    def poison(a, seen):
        return jnp.where(jnp.asarray(seen)[..., None], a, jnp.nan).astype(a.dtype)

    slots, valid = (np.asarray(a) for a in selection)
    chosen = np.zeros((4, 1, 90), bool)
    for b in range(4):
        chosen[b, 0, slots[b, 0, 0][valid[b, 0, 0]]] = True
    others = [(a, chosen[:, :, 60:] | np.asarray(a.mask(1))[:, :, 0]) for a in (recent,)] + [
        (sink, sink.mask(1)[:, :, 0])
    ]
    recent_, sink_ = (
        a._replace(k=poison(a.k, seen), v=poison(a.v, seen)) for a, seen in others
    )
    got = run(
        q, poison(k, chosen[:, :, :60]), poison(v, chosen[:, :, :60]), selection, recent_, sink_
    )
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(
        run(q, k, v, selection, recent._replace(start=jnp.zeros(4, jnp.int32)), sink), want
    )
    far = Selection(jnp.where(selection.valid, selection.slots, 10**9), selection.valid)
    np.testing.assert_array_equal(run(q, k, v, far, recent, sink), want)
    ordered = Selection(
        *(jnp.take_along_axis(a, jnp.argsort(~selection.valid), axis=-1) for a in far)
    )
    counted = PackedSelection(ordered.slots, jnp.sum(ordered.valid, axis=-1, dtype=jnp.int32))
    np.testing.assert_array_equal(
        run(q, k, v, counted, recent, sink), run(q, k, v, ordered, recent, sink)
    )
    f32 = run(q.astype(jnp.float32), k, v, selection, recent, sink)
    assert f32.dtype == jnp.float32
    np.testing.assert_array_equal(f32.astype(jnp.bfloat16), want)


def test_attention_over_zones_reads_two_arrays_as_one():
    q, k, v, *rest = zones_of(4, 1, 2, 1, 60, 30, 4, 64, 40, 9, jnp.bfloat16)
    (k, more_k), (v, more_v) = ((a[:, :, :30], a[:, :, 30:]) for a in (k, v))
    run, whole = (
        zones_kernel(9),
        (jnp.concatenate([k, more_k], axis=2), jnp.concatenate([v, more_v], axis=2)),
    )
    want = jax.jit(run)(q, *whole, *rest)
    np.testing.assert_array_equal(jax.jit(run)(q, k, v, *rest, (more_k, more_v)), want)
    over = jax.jit(jax.vmap(run, in_axes=(0, *6 * [None])))(
        jnp.stack([q, -q]), k, v, *rest, (more_k, more_v)
    )
    np.testing.assert_array_equal(over[0], want)
    reference = jax.jit(
        partial(ops.attend_zones, local=9, logits=Logits(0.125), implementation="xla")
    )
    two = reference(q, k, v, *rest, more=(more_k, more_v))
    np.testing.assert_array_equal(two, reference(q, *whole, *rest))


def test_attention_over_zones_takes_vmap():
    args = zones_of(1, 2, 2, 1, 40, 20, 3, 64, 20, 6, jnp.bfloat16)
    run = zones_kernel(6)
    over = jax.jit(jax.vmap(run, in_axes=(0, *5 * [None])))(
        jnp.stack([args[0], -args[0]]), *args[1:]
    )
    np.testing.assert_array_equal(over[0], jax.jit(run)(*args))


def test_a_step_of_retrieval_is_the_same_with_the_kernel_of_zones(monkeypatch):
    """Ragged rows, one with nothing but its local tokens, within a window and without."""
    spec = CacheSpec(
        batch=3, q_heads=4, kv_heads=2, head_dim=64, capacity=200, dtype=jnp.bfloat16
    )
    chooses = {"selector": MinMaxPages(page=4), "demote": Fifo(leave=8)}
    policy = Retrieval(**chooses, budget=40, sink=3, local=6, dense_below=20)
    k, v = (normal(s, 3, 2, 101, 64, dtype=jnp.bfloat16) for s in (1, 2))
    q, lengths = normal(0, 3, 2, 2, 64, dtype=jnp.bfloat16), jnp.asarray([101, 17, 2])
    state = jax.jit(lambda k, v: policy.prefill(policy.init(spec), k, v, lengths))(k, v)
    for window in (None, 50):
        want, _, info = jax.jit(
            lambda *args, w=window: policy.attend(*args, Step(Logits(0.125), w))
        )(state, q)
        with monkeypatch.context() as m:
            m.setattr(
                ops,
                "attend_zones",
                lambda *args, logits, **_: zones_kernel(args[-1], scale=logits.scale)(
                    *args[:-1]
                ),
            )
            got, *_ = jax.jit(
                lambda *args, w=window: policy.attend(*args, Step(Logits(0.125), w))
            )(state, q)
        assert relative(got, want) < float(jnp.finfo(jnp.bfloat16).eps)
        if window is None:
            np.testing.assert_array_equal(
                info.attended, np.repeat([[37], [17], [2]], 2, axis=1)
            )
