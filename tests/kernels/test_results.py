"""What the kernels give is what their references give, on random and on adversarial input.

Their bodies are PTX, which interpret mode does not run: without a GPU the simulator runs them, at small sizes. With one
(JAX_PLATFORMS=cuda, jax >= 0.11, compute capability 9.0) the same tests and larger sizes run on it.
"""

import math
from dataclasses import replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kvjax.kernels_pallas import (
    _choice,
    _common,
    attend_quantized,
    attend_slots,
    attend_span,
    attend_zones,
    collide,
    host_append,
    host_rows,
    most_voted,
    put_token,
    rerank,
    score_1bit,
    score_pages,
    select_1bit,
    select_4bit,
    select_pages,
    top_k,
    top_k_grouped,
)

import kvjax
from kvjax import CacheSpec, Fifo, HostOffload, Retrieval, generation, ops, presets
from kvjax.blocks import Block
from kvjax.evaluate import throughput
from kvjax.memory import CONCURRENT, to_host
from kvjax.partial import Span, attention_logits
from kvjax.quant import OneBit, QuantArray, quantize, quantize_1bit
from kvjax.rotate import SUBSPACE, encode, lloyd_max, rotate, turned
from kvjax.selection import Candidates, PackedSelection, Selection, expand_units, reduce_scores
from kvjax.selectors import MinMaxPages
from tests.kernels.conftest import ON_GPU, on_gpu

pytestmark = pytest.mark.usefixtures("kernels")


@lru_cache(maxsize=4)  # the sizes for a GPU take seconds
def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype))


def relative(got, want):
    got, want = (np.asarray(a, np.float64) for a in (got, want))
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


# ------------------------------------------------------------------------------------------------------------- top_k


def inputs(rows, U, k, seed=0):
    """Name, scores and valid of one row each kind that a selection must get right."""
    rng = np.random.default_rng(seed)
    normal, all_valid = rng.standard_normal((rows, U), np.float32), np.ones((rows, U), bool)
    counts = np.resize([0, 1, k - 1, k, k + 1, U - 1], rows)
    upto = np.arange(U)[None] < counts[:, None]
    extreme = normal.copy()
    extreme[:, ::7], extreme[:, 1::5], extreme[:, 3::11] = np.inf, -np.inf, np.nan
    yield "normal", normal, all_valid
    yield "counts, NaN past them", np.where(upto, normal, np.nan), upto
    yield "all equal", np.ones_like(normal), all_valid
    yield "few values", np.round(normal), all_valid
    yield "infinities and NaN", extreme, rng.random((rows, U)) < 0.8
    yield "rising", np.sort(normal, axis=1), all_valid
    yield "falling", -np.sort(-normal, axis=1), all_valid
    yield "last bits differ", (1 + np.float32(2**-23) * rng.integers(0, 3, (rows, U))).astype(np.float32), all_valid


@pytest.mark.parametrize(
    ("rows", "U", "k", "blocks"),
    [
        (6, 600, 100, 2),
        pytest.param(1, 5000, 1000, 1, marks=pytest.mark.thorough),
        pytest.param(1, 40000, 4096, 2, marks=pytest.mark.thorough),
        pytest.param(2, 5000, 5, 4, marks=pytest.mark.thorough),
        *(pytest.param(3, 70000, 1500, blocks, marks=on_gpu) for blocks in (1, 2, 4, 8)),
        *(
            pytest.param(*sizes, None, marks=on_gpu)
            for sizes in (
                *((8, 131072, 2048), (8, 131328, 2048), (3, 5000, 100), (2, 300001, 4096)),
                *((1, 17, 5), (1, 1, 1), (40, 2049, 2048), (70, 1000, 1000)),
            )
        ),
    ],
)
def test_top_k_equals_its_reference(rows, U, k, blocks):
    config = blocks and top_k.Config(blocks=blocks)
    run = jax.jit(partial(top_k.top_k, k=k, config=config))
    reference = jax.jit(partial(ops.top_k, k=k, implementation="xla"))
    for name, scores, valid in inputs(rows, U, k):
        scores, valid = jnp.asarray(scores), jnp.asarray(valid)
        slots, found = run(scores, valid)
        want = reference(scores, valid)
        np.testing.assert_array_equal(slots, want.slots, err_msg=name)
        np.testing.assert_array_equal(found, want.valid, err_msg=name)


@pytest.mark.thorough
def test_top_k_takes_16_bits_any_rank_and_vmap():
    scores = normal(0, 2, 1, 2, 99, dtype=jnp.bfloat16)
    valid = jnp.asarray((np.arange(99) < 70)[None, None, None])
    want = jax.jit(partial(ops.top_k, k=10, implementation="xla"))(scores, valid)
    run = partial(top_k.top_k, k=10, config=top_k.Config(blocks=1))
    for f in (lambda s: run(s, valid), jax.vmap(lambda s: run(s, valid[0]))):
        np.testing.assert_array_equal(jax.jit(f)(scores)[0], want.slots)


# ------------------------------------------------------------------------------------------------------ top_k_grouped


def parts_of(B, K, G, sizes, kind, seed=0):
    """Scores in which no two units of a row have ranks within rounding, unless `kind` makes them equal."""
    rng = np.random.default_rng(seed)
    U = sum(sizes)
    steps = np.argsort(rng.random((B, K, 1, U)), axis=-1).astype(np.float32) / 64
    scores = steps * np.linspace(1, 2, G, dtype=np.float32)[:, None] + rng.standard_normal((B, K, G, 1), np.float32)
    valid = rng.random((B, K if kind == "poison" else 1, 1, U)) < 0.7
    if kind == "equal":
        scores[:] = 1
    elif kind == "poison":
        scores = np.where(valid, scores, np.nan)
    elif kind == "infinite":
        scores[..., ::9] = -np.inf
    elif kind == "far apart":
        scores[:, :, 0] += 500
        scores[:, :, -1] -= 500
    elif kind == "few valid":
        valid = np.broadcast_to(np.arange(U) < 3, valid.shape).copy()
        valid[0] = False
    edges = np.cumsum(sizes)[:-1]
    split = (np.split(a.astype(a.dtype), edges, axis=-1) for a in (scores, valid))
    return [(jnp.asarray(s), jnp.asarray(v)) for s, v in zip(*split, strict=True)]


@pytest.mark.parametrize(
    ("B", "K", "G", "sizes", "k", "blocks"),
    [
        (2, 1, 4, (400, 22), 30, 2),
        pytest.param(1, 2, 3, (1001,), 50, 1, marks=pytest.mark.thorough),
        pytest.param(1, 2, 3, (401, 3, 64), 50, 1, marks=pytest.mark.thorough),
        pytest.param(1, 1, 8, (40000, 64), 700, 2, marks=pytest.mark.thorough),
        *(
            pytest.param(*sizes, None, marks=on_gpu)
            for sizes in (
                *((1, 8, 4, (131072, 512), 2048), (1, 8, 4, (130560, 512), 2048), (2, 3, 8, (5000, 257), 300)),
                (1, 2, 4, (1 << 20, 512), 4096),
            )
        ),
    ],
)
def test_top_k_grouped_chooses_what_its_reference_does(B, K, G, sizes, k, blocks):
    config = blocks and top_k.Config(blocks=blocks)
    run = jax.jit(partial(top_k_grouped.top_k_grouped, k=k, config=config), static_argnums=1)
    reference = jax.jit(partial(ops.top_k_grouped, k=k, implementation="xla"), static_argnums=1)
    pooled = jax.jit(reduce_scores, static_argnums=1)
    pools = {"spread": ("mean_softmax", "mean_score")} if B > 1 else {"spread": ("mean_softmax", "max_softmax")}
    for kind in ("spread", "equal", "poison", "infinite", "far apart", "few valid"):
        parts = parts_of(B, K, G, sizes, kind)
        for group_reduce in pools.get(kind, ("mean_softmax",)):
            slots, found = run(parts, group_reduce)
            want = reference(parts, group_reduce)
            np.testing.assert_array_equal(found, want.valid, err_msg=kind)
            slots = np.asarray(slots)
            assert all(np.unique(row).size == k for row in slots.reshape(-1, k))
            # Ranks within rounding may stand in another order; what is chosen must rank as what the reference chose.
            ranks = np.asarray(pooled(parts, group_reduce))
            both = (np.take_along_axis(ranks, np.asarray(s), -1) for s in (slots, want.slots))
            got, best = (np.where(want.valid, rank, 0) for rank in both)
            np.testing.assert_allclose(got, best, rtol=1e-5, atol=1e-4, err_msg=kind)
            if kind == "equal":
                np.testing.assert_array_equal(slots, want.slots)


def test_top_k_grouped_has_a_choice_for_each_head_and_takes_vmap():
    parts = parts_of(2, 1, 2, (59, 5), "spread")
    run = partial(top_k_grouped.top_k_grouped, group_reduce="per_head", k=7, config=top_k.Config(blocks=1))
    want = jax.jit(partial(ops.top_k_grouped, group_reduce="per_head", k=7, implementation="xla"))(parts)
    np.testing.assert_array_equal(jax.jit(run)(parts)[0], want.slots)
    apart = jax.jit(jax.vmap(run))([tuple(a[:, None] for a in part) for part in parts])
    np.testing.assert_array_equal(apart[0][:, 0], want.slots)


# ----------------------------------------------------------------------------------------------------------- collide


def ballot(B, K, G, S, D, T, kind, most=0.8):
    """Queries whose patterns have scores exact in f32, patterns of keys, counts of the first keys of a row, limits up
    to a share of them."""
    rng, N = np.random.default_rng(S), D // 8
    q = np.round(rng.standard_normal((B, K, G, D), np.float32) * 64) / 64
    ids = rng.integers(0, 256, (B, K, S, N), np.uint8)
    stored = np.resize([S, 0, 1, S - 1], B)
    if kind == "ties":
        q = np.round(q)
        q[..., ::3] = 0
        q[0, 0, 0] = -0.0
        ids = ids % 5 * 51
    elif kind == "close":  # sums of 24 bits that differ in the last but one
        q = (rng.integers(1, 8, q.shape) * 2.0**-12).astype(np.float32)
        q[..., 3::8] = rng.choice([-4095, 4094, 1], q[..., 3::8].shape)
    elif kind == "infinite":
        q[..., 2::16] = np.inf
    elif kind == "one pattern":
        ids[:] = 255
    kept = np.arange(S)[None] < stored[:, None]
    counts = np.zeros((B, K, N, 256), np.int32)
    b, k, s, n = np.indices(ids.shape)
    np.add.at(counts, (b, k, n, ids), kept[b, s].astype(np.int32))
    limits = np.ceil(stored[:, None] * np.linspace(0.01, most, T)).astype(np.int32)
    return tuple(map(jnp.asarray, (q, ids, counts, limits)))


@pytest.mark.parametrize(
    ("B", "K", "G", "S", "D", "T", "config"),
    [
        (2, 2, 4, 548, 128, 6, collide.Config(2, 1, 4, 2, 1)),
        (1, 1, 8, 132, 64, 31, collide.Config(3, 1, 1, 2, 1)),
        (1, 1, 1, 556, 128, 3, collide.Config(1, 1, 4, 1)),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (1, 1, 1, 4, 128, 1, None),
                (1, 1, 5, 260, 128, 6, collide.Config(2, 1, 1, 2, 1)),
                (4, 1, 3, 2052, 128, 6, collide.Config(5, 2, 2, 2)),
                (1, 2, 5, 1028, 128, 15, collide.Config(2, 4, 4, 2)),
                (1, 1, 6, 1024, 64, 6, collide.Config(1, 1, 4, 2)),
                (1, 1, 2, 9004, 128, 6, collide.Config(2, 8, 4, 1)),
                (1, 1, 1, 3000, 128, 6, collide.Config(33, 1, 2, 3)),
            )
        ),
        *(
            pytest.param(*sizes, None, marks=on_gpu)
            for sizes in (
                (1, 8, 4, 131072, 128, 6),
                (1, 8, 1, 131072, 128, 6),
                (2, 8, 1, 33028, 128, 6),
                (8, 8, 8, 4096, 64, 31),
            )
        ),
    ],
)
def test_collide_equals_its_reference(B, K, G, S, D, T, config):
    run = jax.jit(partial(collide.collide, config=config))
    reference = jax.jit(partial(ops.collide, implementation="xla"))
    for kind in ("random", "ties", "close", "infinite", "one pattern"):
        for most in (0.2, 0.8):  # below half no pattern of a score below 0 earns any
            args = ballot(B, K, G, S, D, T, kind, most)
            np.testing.assert_array_equal(run(*args), reference(*args), err_msg=f"{kind}, {most}")


@pytest.mark.parametrize("D", [64, pytest.param(128, marks=pytest.mark.thorough)])
def test_collide_rotates_queries(D):
    q, *rest = ballot(2, 1, 3, 132, D, 3, "random")
    q = jnp.round(q) if D == 64 else normal(9, 2, 1, 3, D)  # what a head of 64 comes to is exact
    got = jax.jit(partial(collide.collide, turned=turned(D, 5), config=collide.Config(1, 1, 1)))(q, *rest)
    want = np.asarray(ops.collide(q, *rest, seed=5, implementation="xla"))
    assert (got != want).mean() <= (0 if D == 64 else 0.02)


@pytest.mark.thorough
def test_collide_takes_vmap():
    q, *rest = ballot(2, 1, 2, 64, 64, 3, "random")
    many = jnp.stack([q, -q])
    run = partial(collide.collide, config=collide.Config(2, 1, 1, 2))
    got = jax.jit(jax.vmap(lambda q: run(q, *rest)))(many)
    want = jnp.stack([ops.collide(q, *rest, implementation="xla") for q in many])
    np.testing.assert_array_equal(got, want)


# -------------------------------------------------------------------------------------------------------- most_voted


@pytest.mark.parametrize(
    ("B", "K", "G", "S", "room", "config"),
    [
        (6, 1, 2, 1040, 130, most_voted.Config(2, 2)),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (6, 2, 1, 8208, 2000, most_voted.Config(8, 4)),
                (1, 1, 1, 16, 1, most_voted.Config(8, 4)),
                (6, 1, 1, 4112, 4112, most_voted.Config(1, 2)),
                (2, 1, 3, 20000, 999, None),
                (1, 1, 1, 33008, 999, most_voted.Config(2, 8)),
                (6, 1, 1, 4112, 777, most_voted.Config(16, 2)),
            )
        ),
        *(
            pytest.param(*sizes, None, marks=on_gpu)
            for sizes in ((1, 8, 4, 131072, 13108), (6, 8, 1, 33008, 6000), (1, 1, 1, 1 << 20, 104858))
        ),
    ],
)
def test_most_voted_equals_its_reference(B, K, G, S, room, config):
    rng = np.random.default_rng(S)
    length = jnp.asarray(np.resize([S, S + 9, 0, 1, S - 5, room], B), jnp.int32)
    count = jnp.asarray(np.resize([room, room // 2, 3, room + 5, 0, 1], B), jnp.int32)
    run = jax.jit(partial(most_voted.most_voted, room=room, last=3, config=config))
    reference = jax.jit(partial(ops.most_voted, room=room, last=3, implementation="xla"))
    stop = jnp.asarray(np.resize([0, 9, 2, 50, 40, 3], B), jnp.int32)
    for values, fill in (
        ([0, 1, 2], None),
        ([7], (room, 2, stop)),
        ([0, 255], (count + 20, jnp.asarray([1], jnp.int32), stop)),
        (range(97), None),
        (range(256), (room // 2, jnp.minimum(stop, 4), stop)),
    ):
        votes = jnp.asarray(rng.choice(np.array(values, np.uint8), (B, K, G, S)))
        for got, want in zip(
            run(votes, length, count, fill=fill), reference(votes, length, count, fill=fill), strict=True
        ):
            np.testing.assert_array_equal(got, want, err_msg=str(values))


@pytest.mark.thorough
def test_most_voted_takes_vmap():
    votes = jnp.asarray(np.random.default_rng(0).integers(0, 9, (3, 2, 1, 2, 48)), jnp.uint8)
    length, count = jnp.full(2, 48, jnp.int32), jnp.asarray([[5, 9], [0, 48], [48, 1]], jnp.int32)
    got = jax.jit(jax.vmap(lambda v, n: most_voted.most_voted(v, length, n, 20)))(votes, count)
    for i in range(3):
        want = ops.most_voted(votes[i], length, count[i], 20, implementation="xla")
        for ours, theirs in zip(got, want, strict=True):
            np.testing.assert_array_equal(ours[i], theirs)


# ------------------------------------------------------------------------------------------------------------ rerank

CENTRES = tuple(lloyd_max(SUBSPACE)[1].tolist())


@pytest.mark.parametrize(
    ("B", "K", "G", "S", "D", "M", "config"),
    [
        (2, 1, 3, 50, 128, 130, rerank.Config(1)),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (1, 2, 1, 7, 64, 513, rerank.Config(4)),
                (1, 1, 1, 1, 128, 1, rerank.Config(2)),
                (1, 1, 40, 70, 64, 1500, rerank.Config(8)),
                (1, 1, 8, 300, 64, 256, None),
            )
        ),
        *(
            pytest.param(*sizes, None, marks=on_gpu)
            for sizes in ((1, 8, 1, 131072, 128, 6554), (2, 8, 4, 33000, 128, 3301), (8, 8, 8, 4096, 64, 409))
        ),
    ],
)
def test_rerank_equals_its_reference(B, K, G, S, D, M, config):
    k = normal(S, B, K, S, D).at[:, :, ::5].set(0.0).at[:, :, 1::7].multiply(1e4)
    keys = jax.jit(encode)(k)
    keys = keys._replace(sizes=keys.sizes.at[:, :, ::3].set(255))
    slots = jnp.asarray(np.random.default_rng(M).integers(-3, S + 3, (B, K, G, M)), jnp.int32)
    args = normal(1, B, K, G, D), keys, PackedSelection(slots, jnp.full((B, K, G), M))
    got = jax.jit(partial(rerank.rerank, centres=CENTRES, scale=0.3, config=config))(args[0], *keys, slots)
    want = jax.jit(partial(ops.rerank, scale=0.3, implementation="xla"))(*args)
    # Sums of D products in f32, in another order.
    size = jax.jit(partial(ops.rerank, scale=0.3, implementation="xla"))(
        jnp.abs(args[0]), keys._replace(signs=jnp.full_like(keys.signs, 255)), args[2]
    )
    assert (np.abs(np.asarray(got - want)) <= 16 * np.finfo(np.float32).eps * np.asarray(size)).all()


@pytest.mark.thorough
def test_rerank_takes_vmap():
    keys = jax.jit(encode)(normal(0, 1, 2, 30, 64))
    q, slots = normal(1, 3, 1, 2, 2, 64), jnp.arange(20).reshape(1, 1, 1, 20) + jnp.zeros((1, 2, 2, 1), jnp.int32)
    got = jax.jit(jax.vmap(lambda q: rerank.rerank(q, *keys, slots, centres=CENTRES, scale=1.0)))(q)
    picked = PackedSelection(slots, jnp.full((1, 2, 2), 20))
    want = jnp.stack([ops.rerank(x, keys, picked, scale=1.0, implementation="xla") for x in q])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


# --------------------------------------------------------------------------------------------------------- select_4bit


def reranked(B, K, G, S, D, M, R, dtype, kind):
    """Arguments of select_4bit but the room, with spans and counts of each row that are at the edges."""
    rng = np.random.default_rng(M)
    q, k = normal(1, B, K, G, D), normal(0, B, K, S, D)
    late = (2 * normal(2, B, K, R, D)).astype(dtype)
    if kind == "equal":
        k, late = jnp.zeros_like(k), jnp.zeros_like(late)
    slots = jnp.asarray(np.sort(rng.permuted(np.tile(np.arange(S), (B, K, G, 1)), axis=-1)[..., :M]), jnp.int32)
    found = jnp.asarray(np.resize([M, M - 1, 0, 1, M], (B, K, G)), jnp.int32)
    start, stop = spans_of(B, (0, R), (0, 5), (3, R + 9), (2, R - 2), (5, 4), (-2, 3))
    if kind == "poison":  # past the spans
        slot = jnp.arange(R)[None, :]
        outside = (slot < start[:, None]) | (slot >= stop[:, None] - 3)
        late = jnp.where(outside[:, None, :, None], jnp.nan, late)
    return q, jax.jit(encode)(rotate(k, 3)), PackedSelection(slots, found), (late, start, stop)


@pytest.mark.parametrize(
    ("B", "K", "G", "S", "D", "M", "R", "wide", "room", "dtype", "config"),
    [
        (6, 1, 2, 200, 128, 150, 40, 37, 50, jnp.bfloat16, select_4bit.Config(blocks=1, unroll=1, warpgroups=1)),
        (1, 2, 1, 90, 64, 33, 20, 20, 40, jnp.float16, select_4bit.Config(blocks=2, unroll=1)),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (2, 1, 1, 5000, 128, 4200, 300, 259, 900, jnp.bfloat16, select_4bit.Config(blocks=1, unroll=1)),
                (1, 1, 8, 64, 64, 64, 8, 3, 67, jnp.bfloat16, None),
            )
        ),
        *(
            pytest.param(*sizes, jnp.bfloat16, None, marks=on_gpu)
            for sizes in (
                *((1, 8, 1, 131072, 128, 13108, 383, 256, 1916), (6, 2, 4, 33000, 128, 6000, 383, 255, 2047)),
                *((1, 8, 1, 1 << 20, 128, 104858, 383, 256, 1916), (8, 8, 8, 4096, 64, 2500, 129, 128, 500)),
            )
        ),
    ],
)
def test_select_4bit_chooses_what_its_reference_does(B, K, G, S, D, M, R, wide, room, dtype, config):
    how = {"scale": D**-0.5, "wide": wide, "last": 3}

    def run(q, keys, *rest):
        mine = {"centres": CENTRES, "turned": turned(D, 3), "config": config}
        return select_4bit.select_4bit(q, *keys, *rest, room, **mine, **how)

    count = jnp.asarray(np.resize([room, 1, room + 9, 5, 0, room], B), jnp.int32)
    for kind in ("normal", "equal", "poison"):
        q, keys, candidates, pending = reranked(B, K, G, S, D, M, R, dtype, kind)
        args = q, keys, candidates, pending, count
        got = PackedSelection(*jax.jit(run)(*args))
        among = Candidates(span=(0, S), pending=pending, limit=count, room=room, pending_slots=wide, local=3)
        reference = jax.jit(partial(ops.select_4bit, seed=3, scale=how["scale"], implementation="xla"))
        want = reference(q, keys, candidates, among)
        np.testing.assert_array_equal(got.found, want.found, err_msg=kind)
        estimates = np.asarray(ops.rerank(rotate(q, 3), keys, candidates, scale=how["scale"], implementation="xla"))
        exact = np.asarray(attention_logits(q, pending[0], how["scale"]))
        for row in np.ndindex(B, K, G):
            scores = np.full(S + R, np.nan, np.float32)
            scores[np.asarray(candidates.slots)[row]] = estimates[row]
            scores[S:] = exact[row]
            ours, theirs = (np.asarray(p.slots)[row][: np.asarray(want.found)[row]] for p in (got, want))
            assert np.unique(ours).size == ours.size
            if kind == "equal":
                assert set(ours) == set(theirs)
            ours, theirs = (np.sort(scores[slots]) for slots in (ours, theirs))
            np.testing.assert_allclose(ours, theirs, rtol=2**-10, atol=2**-13, err_msg=kind)  # of f16


@pytest.mark.thorough
def test_select_4bit_takes_vmap_and_numbers_for_all_rows():
    q, keys, candidates, (late, *_) = reranked(2, 1, 2, 80, 64, 60, 12, jnp.bfloat16, "normal")
    how = {"centres": CENTRES, "scale": 0.1, "turned": 6, "wide": 12, "last": 1}

    def run(q, start=0, stop=11, count=9):
        config = select_4bit.Config(blocks=1, unroll=1)
        return select_4bit.select_4bit(q, *keys, candidates, (late, start, stop), count, 20, config=config, **how)

    many = jax.jit(jax.vmap(run))(jnp.stack([q, -q]))
    for i, one in enumerate((q, -q)):
        arrays = (jnp.full(2, n, jnp.int32) for n in (0, 11, 9))
        for got, want in zip(many, jax.jit(run)(one, *arrays), strict=True):
            np.testing.assert_array_equal(got[i], want)


# ------------------------------------------------------------------------------------------------------- score_1bit


def index(B, K, S, D, group, dtype, seed=0):
    k = normal(seed, B, K, S, D) * (1 + np.arange(D) % 5).astype(np.float32)[None, None, None]
    return jax.jit(partial(quantize_1bit, group=group, dtype=dtype))(k)


@pytest.mark.parametrize(
    ("B", "K", "G", "S", "D", "group", "dtype"),
    [
        (2, 1, 5, 672, 128, 32, jnp.bfloat16),
        (1, 1, 4, 1056, 64, 96, jnp.bfloat16),
        (1, 1, 3, 288, 128, 32, jnp.float16),
        pytest.param(1, 2, 8, 192, 64, 64, jnp.float16, marks=pytest.mark.thorough),
        pytest.param(1, 2, 4, 576, 128, 64, jnp.bfloat16, marks=pytest.mark.thorough),
        *(pytest.param(2, 3, G, 2080, 128, 32, jnp.bfloat16, marks=on_gpu) for G in range(1, 9)),
        *(pytest.param(1, 2, G, 992, 64, 32, jnp.float16, marks=on_gpu) for G in (1, 4, 8)),
        *(
            pytest.param(*sizes, dtype, marks=on_gpu)
            for sizes in ((1, 1, 4, 32, 128, 32), (1, 2, 4, 4096, 128, 128), (1, 1, 4, 256, 128, 256))
            for dtype in (jnp.bfloat16, jnp.float16)
        ),
        pytest.param(1, 8, 4, 32768, 128, 32, jnp.bfloat16, marks=on_gpu),
    ],
)
def test_scores_equal_the_reference(B, K, G, S, D, group, dtype):
    ix = index(B, K, S, D, group, dtype)
    q = normal(1, B, K, G, D, dtype=dtype).astype(jnp.float32)
    want = jax.jit(partial(ops.score_1bit, scale=D**-0.5, implementation="xla"))(q, ix)
    for config in (None, score_1bit.Config(units=3, stages=2), score_1bit.Config(units=11, stages=8)):
        got = jax.jit(partial(score_1bit.score_1bit, scale=D**-0.5, config=config))(q, *ix)
        # Each product of query and step is rounded once to 16 bits, and so is each query times scale.
        assert relative(got, want) < 2 * float(jnp.finfo(dtype).eps)


@pytest.mark.thorough
def test_scores_of_equal_keys_are_exact_and_other_rows_do_not_matter():
    k = jnp.asarray(np.broadcast_to(normal(0, 2, 2, 1, 128, dtype=jnp.bfloat16), (2, 2, 96, 128)))
    ix = jax.jit(partial(quantize_1bit, group=32))(k)
    q = jnp.asarray(np.random.default_rng(1).integers(-3, 4, (2, 2, 4, 128)).astype(np.float32))
    run = jax.jit(lambda q, ix: score_1bit.score_1bit(q, *ix, scale=1.0))
    got = run(q, ix)
    want = np.einsum("bkgd,bksd->bkgs", np.asarray(q, np.float64), np.asarray(k, np.float64))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    poisoned = OneBit(ix.bits, ix.scale.at[1].set(jnp.nan), ix.zero.at[1, :, 1:].set(jnp.inf))
    np.testing.assert_array_equal(run(q, poisoned)[0], got[0])


@pytest.mark.thorough
def test_scores_of_queries_times_a_power_of_two_are_so_many_times_as_large():
    ix, q = index(1, 1, 64, 128, 32, jnp.bfloat16), normal(1, 1, 1, 4, 128, dtype=jnp.bfloat16)
    run = jax.jit(lambda q, ix: score_1bit.score_1bit(q, *ix, scale=1.0))
    for factor in (2.0**50, 2.0**-30):  # of the operands of products the powers are 64 to -63
        np.testing.assert_array_equal(run(q * jnp.asarray(factor, q.dtype), ix), run(q, ix) * factor)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("G", [4, 5])
def test_scores_are_finite_where_those_of_the_reference_are(G, dtype):
    ix, q = index(1, 1, 320, 128, 32, dtype), normal(1, 1, 1, G, 128, dtype=dtype).astype(jnp.float32)
    step = ix.scale.at[0, 0, 1, 5].set(jnp.inf).at[0, 0, 4, 7].set(jnp.nan)
    ix = ix._replace(scale=step, zero=ix.zero.at[0, 0, 7, 3].set(-jnp.inf).at[0, 0, 8, 3].set(jnp.nan))
    for queries in (q, q.at[0, 0, 2, 9].set(jnp.inf)):
        got = jax.jit(lambda q, ix: score_1bit.score_1bit(q, *ix, scale=0.1))(queries, ix)
        want = jax.jit(partial(ops.score_1bit, scale=0.1, implementation="xla"))(queries, ix)
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))


@pytest.mark.thorough
def test_scores_take_vmap():
    ix, q = index(2, 1, 64, 64, 32, jnp.bfloat16), normal(1, 2, 1, 2, 64)
    run = partial(score_1bit.score_1bit, scale=0.1)
    whole = jax.jit(run)(q, *ix)
    apart = jax.jit(jax.vmap(lambda *a: run(*(x[None] for x in a))[0]))(q, *ix)
    np.testing.assert_array_equal(apart, whole)
    shared = jax.jit(jax.vmap(lambda q: run(q, *ix)))(jnp.stack([q, -q]))
    np.testing.assert_array_equal(shared[0], whole)


# --------------------------------------------------------------------------------------------------------- select_1bit


def choice(B, K, G, S, D, group, W, room, dtype, kind):
    """Arguments of select_1bit, with spans and counts of each row that are at the edges."""
    q, ix = normal(1, B, K, G, D, dtype=dtype).astype(jnp.float32), index(B, K, S, D, group, dtype)
    scores = normal(2, B, K, G, W)
    span = spans_of(B, (0, S), (1, S - 1), (S // 2, S // 2 + room), (0, room + 1), (3, 3), (0, -5))
    wait = spans_of(B, (0, W), (0, 0), (W - 1, W), (0, 1), (2, W - 2), (1, -3))
    count = jnp.asarray(np.resize([room, room - 1, room, 1, room, 0], B).astype(np.int32))
    if kind == "equal":
        ix, scores = OneBit(jnp.zeros_like(ix.bits), *(jnp.ones_like(a) for a in ix[1:])), jnp.zeros_like(scores)
    elif kind == "few keys":
        ix = OneBit(ix.bits * 0 + ix.bits[:, :, :1], *(a * 0 + a[:, :, :1] for a in ix[1:]))
        ix = ix._replace(bits=ix.bits.at[:, :, 1::3].set(255).at[:, :, 2::5].set(0))
    elif kind == "peaked":
        q, scores = q * 300, scores * 300
    elif kind == "flat":
        q, scores = q * 1e-6, scores * 1e-6
    elif kind == "coarse":  # some 500: f16 has two numbers to 1 there
        q, scores = q.at[..., 0].set(1.0), scores + 6000 * D**-0.5
        ix = ix._replace(zero=ix.zero.at[..., 0].set(6000))
    elif kind == "infinite":  # of a unit's keys -inf for all heads, of another's +inf for one head
        q = q.at[..., 0].set(1.0).at[..., 1].set(0.5).at[:, :, 0, 1].set(-0.5)
        zero = ix.zero.at[:, :, 1, 0].set(-jnp.inf).at[:, :, 2, :2].set(jnp.array([-jnp.inf, 0.0], dtype))
        ix = ix._replace(zero=zero.at[0, :, 0, 0].set(jnp.inf) if B > 1 else zero)
        scores = scores.at[..., 1::2].set(-jnp.inf)
    elif kind == "poison":  # past the spans
        slot = jnp.arange(S // group)[None, None, :, None] * group
        outside = (slot + group <= span[0][:, None, None, None]) | (slot >= span[1][:, None, None, None])
        ix = ix._replace(zero=jnp.where(outside, jnp.nan, ix.zero), scale=jnp.where(outside, jnp.inf, ix.scale))
        slot = jnp.arange(W)[None, None, None]
        outside = (slot < wait[0][:, None, None, None]) | (slot >= wait[1][:, None, None, None])
        scores = jnp.where(outside, jnp.nan, scores)
    return q, ix, span, (scores, *wait), count


@partial(jax.jit, static_argnames="group_reduce")
def ranks_in_half(parts, group_reduce):
    """`reduce_scores` of scores in f16, but softmaxes by the sums of what they were: scores, in f16, valid of a
    part."""
    halves, valid = ([part[i] for part in parts] for i in (1, 2))
    halves = [half.astype(jnp.float32) for half in halves]
    if "softmax" not in group_reduce:
        return reduce_scores(list(zip(halves, valid, strict=True)), group_reduce)
    whole, half = (
        jnp.concatenate([jnp.where(ok, a, -jnp.inf) for a, ok in zip(which, valid, strict=True)], axis=-1)
        for which in ([part[0] for part in parts], halves)
    )
    total = jax.nn.logsumexp(whole, axis=-1, keepdims=True)
    shares = half - jnp.where(jnp.isneginf(total), 0.0, total)
    if group_reduce == "max_softmax":
        return jnp.max(shares, axis=2, keepdims=True)
    return jax.nn.logsumexp(shares, axis=2, keepdims=True) - jnp.log(float(whole.shape[2]))


KINDS = ("normal", "equal", "few keys", "peaked", "flat", "coarse", "infinite", "poison")


@pytest.mark.parametrize(
    ("B", "K", "G", "S", "D", "group", "W", "room", "dtype", "config"),
    [
        (6, 1, 2, 224, 128, 32, 7, 40, jnp.bfloat16, select_1bit.Config(blocks=1, units=3)),
        (1, 1, 4, 8224, 128, 32, 5, 900, jnp.bfloat16, select_1bit.Config(blocks=1, unroll=2, units=16)),  # in steps
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (1, 2, 4, 8192, 128, 32, 255, 1000, jnp.bfloat16, select_1bit.Config(blocks=2, units=13, stages=4)),
                (2, 1, 8, 4160, 64, 64, 9, 77, jnp.float16, select_1bit.Config(blocks=1, unroll=1, units=9, stages=8)),
                # Four steps, the last with what waits; of 300 wanted lists have room for what counts, of 4000 not.
                (1, 1, 4, 11 << 12, 64, 64, 5, 300, jnp.bfloat16, select_1bit.Config(blocks=1, unroll=3)),
                (1, 1, 4, 11 << 12, 64, 64, 5, 4000, jnp.bfloat16, select_1bit.Config(blocks=1, unroll=3)),
                (1, 1, 3, 4096 + 32, 128, 4128, 4, 4095, jnp.bfloat16, None),
                (2, 1, 5, 64, 64, 32, 1, 65, jnp.bfloat16, select_1bit.Config(blocks=4, units=2, stages=2)),
                (1, 1, 4, 160, 128, 32, 8, 60, jnp.bfloat16, select_1bit.Config(blocks=16, units=2)),
            )
        ),
        *(
            pytest.param(*sizes, jnp.bfloat16, None, marks=on_gpu)
            for sizes in (
                *((1, 8, 4, 130816, 128, 32, 256, 2048), (1, 8, 4, 131072, 128, 32, 256, 2047)),
                *((6, 2, 8, 5024, 128, 32, 257, 300), (1, 2, 4, 1 << 20, 128, 32, 512, 4000)),
            )
        ),
        *(pytest.param(6, 3, G, 2080, 64, 32, 33, 200, jnp.float16, None, marks=on_gpu) for G in range(1, 9)),
    ],
)
def test_select_1bit_chooses_what_top_k_grouped_does_of_the_scores(
    B, K, G, S, D, group, W, room, dtype, config, monkeypatch, traced_anew
):
    if B == 6 or room == 300:  # bins of so few are counted again as those of many, or ranked
        monkeypatch.setattr(_choice, "LISTED", 8)
    run = jax.jit(
        lambda q, ix, *args, group_reduce: select_1bit.select_1bit(
            q, *ix, *args, group_reduce, room, scale=D**-0.5, config=config
        ),
        static_argnames="group_reduce",
    )
    score = jax.jit(lambda q, ix: score_1bit.score_1bit(q, *ix, scale=D**-0.5))
    reference = jax.jit(partial(ops.top_k, k=room, implementation="xla"))
    pools = {"normal": ("mean_softmax", "per_head") if B == 6 else ("max_softmax", "mean_score", "per_head")}
    pools["coarse"] = ("mean_score",)
    for kind in KINDS:
        if kind == "infinite" and S // group < 3:
            continue
        q, ix, span, pending, count = choice(B, K, G, S, D, group, W, room, dtype, kind)
        scores = score(q, ix)  # the same products
        parts, late = [], pending[0].astype(jnp.float16)
        for part, half, ends in (
            (scores, scores.astype(jnp.float16), span),
            (late.astype(jnp.float32), late, pending[1:]),
        ):
            slot = np.arange(part.shape[3])[None]
            valid = (slot >= np.asarray(ends[0])[:, None]) & (slot < np.asarray(ends[1])[:, None])
            parts.append((part, half, jnp.asarray(valid)[:, None, None]))
        for group_reduce in pools.get(kind, ("mean_softmax",)):
            slots, found = (
                np.asarray(a)
                for a in PackedSelection(*run(q, ix, span, pending, count, group_reduce=group_reduce)).selection
            )
            ranks = np.asarray(ranks_in_half(parts, group_reduce=group_reduce))
            want = reference(ranks, jnp.concatenate([ok for *_, ok in parts], axis=-1))
            wanted = np.asarray(want.valid) & (np.arange(room) < np.asarray(count)[:, None, None, None])
            np.testing.assert_array_equal(found.sum(-1), wanted.sum(-1), err_msg=f"{kind}, {group_reduce}")
            for row in np.ndindex(found.shape[:3]):
                got, best = slots[row][found[row]], np.asarray(want.slots)[row][wanted[row]]
                assert np.unique(got).size == got.size
                if kind in ("equal", "few keys", "coarse"):
                    assert set(got) == set(best), f"{kind}, {group_reduce}"
                # Ranks within rounding may be taken for each other.
                both = (np.nan_to_num(np.sort(ranks[row][s]), nan=-np.inf) for s in (got, best))
                np.testing.assert_allclose(*both, rtol=1e-5, atol=1e-4, err_msg=f"{kind}, {group_reduce}")


@pytest.mark.parametrize(
    ("G", "D", "R", "wide", "dtype", "group_reduce"),
    [
        (3, 64, 44, 37, jnp.float16, "mean_softmax"),
        pytest.param(4, 128, 20, 19, jnp.bfloat16, "per_head", marks=pytest.mark.thorough),
        *(pytest.param(G, 128, 256, 255, jnp.bfloat16, "mean_softmax", marks=on_gpu) for G in (1, 4, 8)),
    ],
)
def test_select_1bit_scores_keys_that_wait_as_they_are(G, D, R, wide, dtype, group_reduce):
    q, ix, span, pending, count = choice(2, 3, G, 96, D, 32, wide, 33, dtype, "normal")
    keys = 4 * normal(7, 2, 3, R, D, dtype=dtype)  # some are chosen
    exact = jnp.einsum("bkgd,bksd->bkgs", q.astype(dtype), keys, preferred_element_type=jnp.float32) * 0.3

    def run(first, wide=None, last=0, numbers=None):
        begin, end, n = numbers or (span, (pending[1], pending[2] + last), count)
        config = select_1bit.Config(blocks=1)
        return select_1bit.select_1bit(
            q, *ix, begin, (first, *end), n, group_reduce, 33, scale=0.3, wide=wide, last=last, config=config
        )

    got, want = (
        PackedSelection(*made).selection
        for made in (jax.jit(partial(run, wide=wide, last=3))(keys), jax.jit(run)(exact[..., :wide]))
    )
    np.testing.assert_array_equal(got.valid, want.valid)
    for row in np.ndindex(got.valid.shape[:3]):
        ours, theirs = (set(np.asarray(s.slots)[row][np.asarray(s.valid)[row]].tolist()) for s in (got, want))
        assert ours == theirs
    assert (np.asarray(got.slots)[np.asarray(got.valid)] >= 96).any()
    if G == 3:
        again = jax.jit(jax.vmap(partial(run, wide=wide)))(jnp.stack([keys, keys]))
        np.testing.assert_array_equal(again[1][1], PackedSelection(*jax.jit(partial(run, wide=wide))(keys)).found)
        late = (0, 0), (0, R), 33  # past the first `wide` nothing waits
        all_of, first_of = (
            jax.jit(partial(run, wide=w, numbers=late))(a)[0] for a, w in ((keys, wide), (exact[..., :wide], None))
        )
        np.testing.assert_array_equal(np.sort(all_of, axis=-1), np.sort(first_of, axis=-1))
        numbers = (-4, 90), (2, 30), 31  # of all rows
        arrays = jax.tree.map(lambda n: jnp.full(2, n, jnp.int32), numbers)
        for one, each in zip(
            *(jax.jit(partial(run, wide=wide, numbers=n))(keys) for n in (numbers, arrays)), strict=True
        ):
            np.testing.assert_array_equal(one, each)


@pytest.mark.thorough
def test_select_1bit_chooses_alike_each_time_and_takes_vmap():
    q, ix, span, pending, count = choice(2, 1, 2, 96, 64, 32, 5, 20, jnp.bfloat16, "normal")
    config = select_1bit.Config(blocks=1)

    def run(q, ix, span, pending, count):
        return select_1bit.select_1bit(q, *ix, span, pending, count, "mean_softmax", 20, scale=0.1, config=config)

    args = q, ix, span, pending, count
    want = jax.jit(run)(*args)
    apart = jax.jit(jax.vmap(lambda *a: run(*jax.tree.map(lambda x: x[None], a))))(*args)
    for got, expected in zip(apart, want, strict=True):
        np.testing.assert_array_equal(got[:, 0], expected)
    shared = jax.jit(jax.vmap(lambda q: run(q, *args[1:])))(jnp.stack([q, -q]))
    for got, expected in zip(shared, want, strict=True):
        np.testing.assert_array_equal(got[0], expected)


# ------------------------------------------------------------------------------------------------------- score_pages


def boxes(B, K, P, D, dtype):
    corners = np.sort([normal(seed, B, K, P, D) for seed in (0, 1)], axis=0)
    return tuple(jnp.asarray(a.astype(dtype)) for a in corners)


@pytest.mark.parametrize(
    ("B", "K", "G", "P", "D", "dtype", "config"),
    [
        (2, 1, 5, 70, 128, jnp.bfloat16, None),
        pytest.param(1, 2, 8, 33, 64, jnp.float16, score_pages.Config(1, 2), marks=pytest.mark.thorough),
        *(pytest.param(2, 3, G, 1001, 128, jnp.bfloat16, None, marks=on_gpu) for G in range(1, 9)),
        *(pytest.param(1, 2, 4, P, 64, jnp.float16, None, marks=on_gpu) for P in (1, 15, 16, 17, 4096)),
        pytest.param(1, 8, 4, 8192, 128, jnp.bfloat16, None, marks=on_gpu),
    ],
)
def test_scores_of_pages_equal_the_reference(B, K, G, P, D, dtype, config):
    low, high = boxes(B, K, P, D, dtype)
    q = normal(2, B, K, G, D, dtype=dtype)
    got = jax.jit(partial(score_pages.score_pages, scale=0.1, config=config))(q, low, high)
    want = jax.jit(partial(ops.score_pages, scale=0.1, implementation="xla"))(q, low, high)
    assert relative(got, want) < 1e-6


def test_a_page_of_nan_scores_only_itself_also_under_vmap():
    low, high = boxes(1, 1, 20, 64, jnp.bfloat16)
    q = normal(2, 1, 1, 2, 64)
    run = partial(score_pages.score_pages, scale=0.1)
    lows = jnp.stack([low, low.at[:, :, 7].set(jnp.nan)])
    highs = jnp.stack([high, high.at[:, :, 9].set(jnp.inf)])
    want, got = jax.jit(jax.vmap(run, in_axes=(None, 0, 0)))(q, lows, highs)
    others = np.setdiff1d(np.arange(20), [7, 9])
    np.testing.assert_array_equal(got[..., others], want[..., others])
    assert not np.isfinite(got[..., [7, 9]]).any()


# -------------------------------------------------------------------------------------------------------- select_pages


def paged(B, K, G, P, D, unit, R, wide, room, dtype, kind):
    """Arguments of select_pages, with spans of tokens and counts of each row that are at the edges."""
    (low, high), keys = boxes(B, K, P, D, dtype), 3 * normal(7, B, K, R, D, dtype=dtype)
    q, S = normal(2, B, K, G, D, dtype=dtype).astype(jnp.float32), P * unit
    span = spans_of(B, (0, S), (1, S - 1), (S // 2 + 3, S // 2 + room * unit), (0, room * unit + 1), (33, 33), (0, -5))
    wait = spans_of(B, (0, wide), (0, 0), (wide - 1, wide), (0, 1), (2, wide - 2), (1, -3))
    count = jnp.asarray(np.resize([room, room - 1, room, 1, room, 0], B).astype(np.int32))
    if kind == "equal":
        low, high, keys = jnp.ones_like(low), jnp.ones_like(high), jnp.ones_like(keys)
    elif kind == "few pages":
        low, high = (a * 0 + a[:, :, :1] for a in (low, high))
        low, high = (a.at[:, :, 1::3].set(0).at[:, :, 2::5].set(1) for a in (low, high))
    elif kind == "peaked":
        q = q * 300
    elif kind == "flat":
        q = q * 1e-6
    elif kind == "infinite":  # of a page -inf for all heads, of another +inf for one
        q = q.at[..., 0].set(1.0).at[..., 1].set(0.5).at[:, :, 0, 1].set(-0.5)
        low = low.at[:, :, 1, 0].set(-jnp.inf).at[:, :, 2, :2].set(jnp.array([-jnp.inf, 0.0], dtype))
        high = high.at[:, :, 1, 0].set(-jnp.inf).at[:, :, 2, :2].set(jnp.array([-jnp.inf, 0.0], dtype))
        keys = keys.at[:, :, :unit, 0].set(-jnp.inf)
    elif kind == "poison":  # past the spans
        first = jnp.arange(P)[None, None, :, None] * unit
        outside = (first + unit <= span[0][:, None, None, None]) | (first >= span[1][:, None, None, None])
        low, high = jnp.where(outside, jnp.nan, low), jnp.where(outside, jnp.inf, high)
        slot = jnp.arange(R)[None, None, :, None]
        outside = (slot < wait[0][:, None, None, None]) | (slot >= wait[1][:, None, None, None])
        keys = jnp.where(outside, jnp.nan, keys)
    return q, low, high, span, (keys, *wait), count


def token_pages(start, stop, pages, unit):
    """bool[B, 1, 1, pages]: which have a token in [start, stop)."""
    tokens = np.arange(pages * unit)[None]
    inside = (tokens >= np.asarray(start)[:, None]) & (tokens < np.asarray(stop)[:, None])
    return jnp.asarray(inside.reshape(-1, 1, 1, pages, unit).any(-1))


@pytest.mark.parametrize(
    ("B", "K", "G", "P", "D", "unit", "R", "wide", "room", "dtype", "config"),
    [
        (6, 1, 2, 67, 64, 16, 79, 48, 20, jnp.bfloat16, select_pages.Config(blocks=1)),
        (1, 1, 1, 4200, 64, 16, 16, 16, 900, jnp.bfloat16, select_pages.Config(blocks=1, unroll=1)),  # in steps
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (1, 2, 4, 520, 128, 16, 287, 272, 127, jnp.bfloat16, select_pages.Config(blocks=2, tiles=2)),
                (2, 1, 8, 100, 64, 32, 40, 32, 50, jnp.float16, select_pages.Config(blocks=1, unroll=1, warpgroups=2)),
                (2, 1, 5, 5, 128, 32, 33, 32, 6, jnp.bfloat16, select_pages.Config(blocks=4, tiles=3)),
            )
        ),
        *(
            pytest.param(*sizes, jnp.bfloat16, None, marks=on_gpu)
            for sizes in (
                *((1, 8, 4, 8176, 128, 16, 287, 272, 127), (1, 8, 4, 1016, 128, 32, 159, 32, 56)),
                *((6, 2, 8, 5023, 128, 16, 300, 288, 300), (1, 2, 4, 1 << 18, 128, 16, 287, 272, 1000)),
            )
        ),
        *(pytest.param(6, 3, G, 2081, 64, 48, 100, 96, 200, jnp.float16, None, marks=on_gpu) for G in range(1, 9)),
    ],
)
def test_select_pages_chooses_what_top_k_grouped_does_of_the_scores(
    B, K, G, P, D, unit, R, wide, room, dtype, config, monkeypatch, traced_anew
):
    if B == 6:  # bins of so few are counted again as those of many, or ranked
        monkeypatch.setattr(_choice, "LISTED", 8)
    how = dict(unit=unit, scale=D**-0.5, wide=wide)
    run = jax.jit(
        lambda *args, group_reduce: select_pages.select_pages(*args, group_reduce, room, **how, last=3, config=config),
        static_argnames="group_reduce",
    )
    score = jax.jit(partial(score_pages.score_pages, scale=D**-0.5))
    reference = jax.jit(partial(ops.top_k, k=room, implementation="xla"))
    pools = {"normal": ("mean_softmax", "per_head") if B == 6 else ("max_softmax", "mean_score", "per_head")}
    for kind in ("normal", "equal", "few pages", "peaked", "flat", "infinite", "poison"):
        if kind == "infinite" and P < 3:
            continue
        q, low, high, span, (keys, *wait), count = paged(B, K, G, P, D, unit, R, wide, room, dtype, kind)
        slot = jnp.arange(wide)[None, None, None]
        there = (slot >= wait[0][:, None, None, None]) & (slot < wait[1][:, None, None, None])
        exact = jnp.einsum("bkgd,bksd->bkgs", q.astype(dtype), keys[:, :, :wide], preferred_element_type=jnp.float32)
        exact = jnp.where(there, exact * D**-0.5, -jnp.inf).reshape(B, K, G, wide // unit, unit)
        parts = [
            (score(q, low, high), token_pages(*span, P, unit)),  # the same products
            (jnp.max(exact, axis=-1), token_pages(*wait, wide // unit, unit)),
        ]
        for group_reduce in pools.get(kind, ("mean_softmax",)):
            pending = keys, wait[0], wait[1] + 3
            slots, found = (
                np.asarray(a)
                for a in PackedSelection(*run(q, low, high, span, pending, count, group_reduce=group_reduce)).selection
            )
            ranks = np.asarray(reduce_scores(parts, group_reduce))
            want = reference(ranks, jnp.concatenate([ok for _, ok in parts], axis=-1))
            wanted = np.asarray(want.valid) & (np.arange(room) < np.asarray(count)[:, None, None, None])
            np.testing.assert_array_equal(found.sum(-1), wanted.sum(-1), err_msg=f"{kind}, {group_reduce}")
            ranks = np.nan_to_num(ranks, nan=-np.inf)
            for row in np.ndindex(found.shape[:3]):
                got, best = slots[row][found[row]], np.asarray(want.slots)[row][wanted[row]]
                assert np.unique(got).size == got.size
                if kind in ("equal", "few pages"):
                    assert set(got) == set(best), f"{kind}, {group_reduce}"
                # Ranks within rounding may be taken for each other.
                ours, theirs = (ranks[row][s] for s in (got, best))
                close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4, err_msg=f"{kind}, {group_reduce}")
                close(np.sort(ours), np.sort(theirs))
                if got.size:
                    close(ours[-1], theirs[-1])
                    if kind == "equal":
                        assert got[-1] == best[-1]


@pytest.mark.skipif(ON_GPU, reason="it counts what the simulator does")
@pytest.mark.parametrize("centre", [-40.0, -3.0, 3.0])
def test_scores_of_either_sign_are_counted_once(centre, monkeypatch, traced_anew):
    counted, find = [], top_k.find_bin
    monkeypatch.setattr(top_k, "find_bin", lambda *args, **how: counted.append(args) or find(*args, **how))
    q, low, _, span, pending, count = paged(1, 1, 1, 1000, 64, 16, 16, 16, 100, jnp.bfloat16, "normal")
    q, low = jnp.zeros_like(q).at[..., 0].set(1), low.at[..., 0].add(centre)
    run = partial(select_pages.select_pages, unit=16, scale=1.0, wide=16, config=select_pages.Config(blocks=1))
    jax.block_until_ready(run(q, low, low, span, pending, count, "mean_score", 100))
    assert len(counted) == (2 if centre == -40 else 1)  # below -32 is one bin


@pytest.mark.thorough
def test_select_pages_chooses_alike_each_time_and_takes_vmap():
    q, *corners, span, pending, count = paged(2, 1, 2, 30, 64, 16, 40, 32, 9, jnp.bfloat16, "normal")
    config = select_pages.Config(blocks=1)

    def run(q, low, high, span, pending, count):
        how = dict(unit=16, scale=0.1, wide=32, config=config)
        return select_pages.select_pages(q, low, high, span, pending, count, "mean_softmax", 9, **how)

    args = q, *corners, span, pending, count
    want = jax.jit(run)(*args)
    apart = jax.jit(jax.vmap(lambda *a: run(*jax.tree.map(lambda x: x[None], a))))(*args)
    for got, expected in zip(apart, want, strict=True):
        np.testing.assert_array_equal(got[:, 0], expected)
    numbers = (-4, 470), (2, 30), 8  # of all rows
    arrays = jax.tree.map(lambda n: jnp.full(2, n, jnp.int32), numbers)
    for one, each in zip(
        *(jax.jit(lambda q, n=n: run(q, *corners, n[0], (pending[0], *n[1]), n[2]))(q) for n in (numbers, arrays)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, each)


# ------------------------------------------------------------------------------------------------------ attend_slots


def attended(B, K, G, H, S, D, M, dtype, counts):
    q, k, v = normal(0, B, K, G, D, dtype=dtype), *(normal(s, B, K, S, D, dtype=dtype) for s in (1, 2))
    slots = jnp.asarray(np.random.default_rng(3).integers(0, S, (B, K, H, M)).astype(np.int32))
    count = np.resize(counts, (B, K, H, 1))
    return q, k, v, Selection(slots, jnp.asarray(np.arange(M) < count))


def assert_attends(args, config=None, scale=0.125):
    q, k, v, selection = args
    run = jax.jit(partial(attend_slots.attend_slots, scale=scale, config=config))
    out, lse = run(q, k, v, *selection)
    want = jax.jit(partial(ops.attend_slots, scale=scale, implementation="xla"))(q, k, v, selection)
    # Weights are rounded to the dtype of the values, each once.
    assert relative(out, want.out) < float(jnp.finfo(k.dtype).eps)
    np.testing.assert_allclose(lse, want.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("B", "K", "G", "H", "S", "D", "M", "dtype", "config"),
    [
        (1, 6, 4, 1, 300, 64, 130, jnp.bfloat16, attend_slots.Config(2, 1)),  # a step of each warp
        (1, 2, 5, 1, 300, 128, 300, jnp.float16, attend_slots.Config(1, 1)),  # a loop
        (2, 1, 4, 4, 50, 64, 33, jnp.bfloat16, None),
        pytest.param(1, 1, 8, 1, 500, 256, 200, jnp.bfloat16, None, marks=pytest.mark.thorough),
        pytest.param(1, 1, 2, 1, 2000, 128, 2048, jnp.bfloat16, attend_slots.Config(8, 2), marks=pytest.mark.thorough),
        *(pytest.param(2, 3, G, 1, 5000, 128, 1000, jnp.bfloat16, None, marks=on_gpu) for G in range(1, 9)),
        *(pytest.param(2, 3, 4, 1, 5000, D, 777, jnp.float16, None, marks=on_gpu) for D in (64, 128, 256)),
        *(
            pytest.param(1, 8, 4, 1, 131072, 128, 2048, jnp.bfloat16, attend_slots.Config(b, w), marks=on_gpu)
            for b in (1, 2, 4, 8)
            for w in (1, 2)
        ),
        pytest.param(8, 8, 4, 1, 32768, 128, 4096, jnp.bfloat16, None, marks=on_gpu),
        pytest.param(1, 8, 8, 8, 32768, 128, 2048, jnp.bfloat16, None, marks=on_gpu),
    ],
)
def test_attention_over_slots_equals_the_reference(B, K, G, H, S, D, M, dtype, config):
    assert_attends(attended(B, K, G, H, S, D, M, dtype, [M, 0, 1, 31, 32, 33]), config)


def test_attention_over_slots_reads_nothing_that_is_not_valid():
    q, k, v, (slots, valid) = attended(1, 2, 2, 1, 100, 64, 40, jnp.bfloat16, [7, 40])
    used = jnp.where(valid, slots % 50, 50 + slots % 50)
    poisoned = [a.at[:, :, 50:].set(jnp.nan) for a in (k, v)]
    run = jax.jit(partial(attend_slots.attend_slots, scale=0.125))
    for name, slots_, keys, values in (
        ("poison", used, *poisoned),
        ("out of range", jnp.where(valid, used, 10**9), k, v),
        ("clipped", jnp.where(valid, used, -5), k, v),
    ):
        for got, want in zip(run(q, keys, values, slots_, valid), run(q, k, v, used, valid), strict=True):
            np.testing.assert_array_equal(got, want, err_msg=name)


def test_attention_over_equal_and_over_far_apart_keys():
    q, k, v, selection = attended(1, 1, 4, 1, 64, 64, 64, jnp.bfloat16, [64])
    same = jnp.broadcast_to(k[:, :, :1], k.shape)
    selection = Selection(jnp.arange(64, dtype=jnp.int32)[None, None, None], selection.valid)
    out, _ = jax.jit(partial(attend_slots.attend_slots, scale=0.125))(q, same, v, *selection)
    mean = np.mean(np.asarray(v, np.float32), axis=2)  # equal keys: the mean of the values
    np.testing.assert_allclose(out, np.broadcast_to(mean[:, :, None], out.shape), atol=2e-6)
    assert_attends((q * 40, k, v, selection))  # scores of hundreds: one key has all the weight


def test_attention_over_slots_takes_vmap():
    q, k, v, (slots, valid) = attended(1, 2, 2, 1, 40, 64, 20, jnp.bfloat16, [20, 9])
    run = partial(attend_slots.attend_slots, scale=0.1)
    over = jax.jit(jax.vmap(run, in_axes=(0, None, None, None, None)))
    for got, want in zip(
        over(jnp.stack([q, -q]), k, v, slots, valid), jax.jit(run)(q, k, v, slots, valid), strict=True
    ):
        np.testing.assert_array_equal(got[0], want)


@pytest.mark.skipif(ON_GPU, reason="of the simulator")
@pytest.mark.parametrize("barrier", ["block_barrier", "cluster_barrier", "warp_barrier"])
def test_the_simulator_sees_that_a_barrier_is_missing(barrier, monkeypatch):
    q, k, v, (slots, valid) = attended(1, 1, 2, 1, 40, 64, 140, jnp.bfloat16, [140])
    config = attend_slots.Config(2 if barrier == "cluster_barrier" else 1, 1)
    run = jax.jit(partial(attend_slots.attend_slots, scale=0.1, config=config))
    monkeypatch.setattr(_common, barrier, lambda: None)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"races|may still read"):
        jax.block_until_ready(run(q, k, v, slots, valid))


@pytest.mark.skipif(ON_GPU, reason="of the simulator")
def test_the_simulator_sees_that_a_block_arrives_before_it_has_written(monkeypatch):
    arrive, wait, early = _common.cluster_arrive, _common.cluster_wait, []

    def wait_and_arrive_at_the_next():
        wait()
        arrive()
        early.append(True)

    monkeypatch.setattr(_common, "cluster_arrive", lambda: None if early else arrive())
    monkeypatch.setattr(_common, "cluster_wait", wait_and_arrive_at_the_next)
    run = jax.jit(partial(top_k.top_k, k=20, config=top_k.Config(blocks=2)))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"races|may still read"):
        jax.block_until_ready(run(normal(0, 1, 300), jnp.ones((1, 300), bool)))


# ------------------------------------------------------------------------------------------------------ attend_zones


def zones_of(B, K, G, H, S, R, A, D, M, local, dtype, counts=None):
    """A step's arguments. Rows of the batch have, in turn: all zones filled; a short recent block, and a sink that is
    seen in part; nothing but one local token; nothing. First slots of `recent` may be chosen, the last are local."""
    rng = np.random.default_rng(3)
    q, k, v = normal(0, B, K, G, D, dtype=dtype), *(normal(s, B, K, S, D, dtype=dtype) for s in (1, 2))
    stop = np.resize([R, R // 2, 1, 0], B).astype(np.int32)
    start = np.maximum(stop - local, 0)
    spare = np.resize([R - local, max(R // 2 - local, 0), 0, 0], B)
    picked = np.stack([rng.permutation(S + R - local)[:M] for _ in range(B * K * H)]).reshape(B, K, H, M)
    count = np.resize([M, M // 3, 0, 0] if counts is None else counts, B)[:, None, None, None]
    valid = (np.arange(M) < count) & (picked < S + spare[:, None, None, None])
    spans = [Span(*(normal(s, B, K, R, D, dtype=dtype) for s in (4, 5)), jnp.asarray(start), jnp.asarray(stop)), None]
    if A:
        ends = (jnp.asarray(np.resize(x, B).astype(np.int32)) for x in ([0, min(1, A), A, 0], [A, A, A, 0]))
        spans[1] = Span(*(normal(s, B, K, A, D, dtype=dtype) for s in (6, 7)), *ends)
    return q, k, v, Selection(jnp.asarray(picked, jnp.int32), jnp.asarray(valid)), *spans


def zones_kernel(local, config=None, scale=0.125):
    def run(q, k, v, selection, recent, sink, more=None):
        return attend_zones.attend_zones(q, k, v, *selection, recent, sink, local, more, scale=scale, config=config)

    return run


@pytest.mark.parametrize(
    ("B", "K", "G", "H", "S", "R", "A", "D", "M", "local", "dtype", "config"),
    [
        (4, 1, 4, 1, 90, 40, 5, 64, 60, 33, jnp.bfloat16, attend_slots.Config(2, 1)),
        (2, 1, 5, 1, 150, 70, 0, 128, 130, 1, jnp.float16, attend_slots.Config(1, 1)),  # a loop, no sink
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (4, 2, 4, 4, 50, 20, 1, 64, 33, 7, jnp.bfloat16, None),  # a choice for each head
                (2, 1, 8, 1, 300, 60, 4, 256, 200, 16, jnp.bfloat16, None),
                (1, 1, 2, 1, 2000, 256, 4, 128, 1788, 256, jnp.bfloat16, attend_slots.Config(8, 2)),
                (1, 1, 4, 1, 64, 31, 0, 64, 0, 16, jnp.bfloat16, None),  # nothing is chosen
            )
        ),
        *(pytest.param(4, 3, G, 1, 5000, 300, 4, 128, 1000, 200, jnp.bfloat16, None, marks=on_gpu) for G in (1, 3, 8)),
        *(pytest.param(4, 3, 4, 4, 5000, 300, 0, D, 777, 1, jnp.float16, None, marks=on_gpu) for D in (64, 128, 256)),
        *(
            pytest.param(
                1, 8, 4, 1, 131072, 256, 0, 128, 2047, 1, jnp.bfloat16, attend_slots.Config(b, w), marks=on_gpu
            )
            for b in (1, 2, 4, 8)
            for w in (1, 2)
        ),
        pytest.param(8, 8, 4, 1, 32768, 512, 4, 128, 1788, 256, jnp.bfloat16, None, marks=on_gpu),
    ],
)
def test_attention_over_zones_equals_the_reference(B, K, G, H, S, R, A, D, M, local, dtype, config):
    args = zones_of(B, K, G, H, S, R, A, D, M, local, dtype)
    reference = jax.jit(partial(ops.attend_zones, local=local, scale=0.125, implementation="xla"))
    got, want = jax.jit(zones_kernel(local, config))(*args), reference(args[0].astype(jnp.float32), *args[1:])
    assert got.dtype == dtype
    # Weights are rounded to the dtype of the values, and so is the result.
    assert relative(got, want) < float(jnp.finfo(dtype).eps)
    if B == 4:
        assert not np.asarray(got[3], np.float32).any(), "attention over nothing is zero"


def test_attention_over_zones_reads_nothing_that_is_not_attended_to():
    q, k, v, selection, recent, sink = zones_of(4, 1, 2, 1, 60, 30, 4, 64, 40, 9, jnp.bfloat16, [30, 20, 0, 0])
    run = jax.jit(zones_kernel(9))
    want = run(q, k, v, selection, recent, sink)

    def poison(a, seen):
        return jnp.where(jnp.asarray(seen)[..., None], a, jnp.nan).astype(a.dtype)

    slots, valid = (np.asarray(a) for a in selection)
    chosen = np.zeros((4, 1, 90), bool)
    for b in range(4):
        chosen[b, 0, slots[b, 0, 0][valid[b, 0, 0]]] = True
    others = [(a, chosen[:, :, 60:] | np.asarray(a.mask)[:, None]) for a in (recent,)] + [(sink, sink.mask[:, None])]
    recent_, sink_ = (a._replace(k=poison(a.k, seen), v=poison(a.v, seen)) for a, seen in others)
    got = run(q, poison(k, chosen[:, :, :60]), poison(v, chosen[:, :, :60]), selection, recent_, sink_)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(run(q, k, v, selection, recent._replace(start=jnp.zeros(4, jnp.int32)), sink), want)
    far = Selection(jnp.where(selection.valid, selection.slots, 10**9), selection.valid)
    np.testing.assert_array_equal(run(q, k, v, far, recent, sink), want)
    ordered = Selection(*(jnp.take_along_axis(a, jnp.argsort(~selection.valid), axis=-1) for a in far))
    counted = PackedSelection(ordered.slots, jnp.sum(ordered.valid, axis=-1, dtype=jnp.int32))
    np.testing.assert_array_equal(run(q, k, v, counted, recent, sink), run(q, k, v, ordered, recent, sink))
    f32 = run(q.astype(jnp.float32), k, v, selection, recent, sink)
    assert f32.dtype == jnp.float32
    np.testing.assert_array_equal(f32.astype(jnp.bfloat16), want)


def test_attention_over_zones_reads_two_arrays_as_one():
    q, k, v, *rest = zones_of(4, 1, 2, 1, 60, 30, 4, 64, 40, 9, jnp.bfloat16)
    (k, more_k), (v, more_v) = ((a[:, :, :30], a[:, :, 30:]) for a in (k, v))
    run, whole = zones_kernel(9), (jnp.concatenate([k, more_k], axis=2), jnp.concatenate([v, more_v], axis=2))
    want = jax.jit(run)(q, *whole, *rest)
    np.testing.assert_array_equal(jax.jit(run)(q, k, v, *rest, (more_k, more_v)), want)
    over = jax.jit(jax.vmap(run, in_axes=(0, *6 * [None])))(jnp.stack([q, -q]), k, v, *rest, (more_k, more_v))
    np.testing.assert_array_equal(over[0], want)
    reference = jax.jit(partial(ops.attend_zones, local=9, scale=0.125, implementation="xla"))
    two = reference(q, k, v, *rest, more=(more_k, more_v))
    np.testing.assert_array_equal(two, reference(q, *whole, *rest))


def test_attention_over_zones_takes_vmap():
    args = zones_of(1, 2, 2, 1, 40, 20, 3, 64, 20, 6, jnp.bfloat16)
    run = zones_kernel(6)
    over = jax.jit(jax.vmap(run, in_axes=(0, *5 * [None])))(jnp.stack([args[0], -args[0]]), *args[1:])
    np.testing.assert_array_equal(over[0], jax.jit(run)(*args))


def test_a_step_of_retrieval_is_the_same_with_the_kernel_of_zones(monkeypatch):
    """Ragged rows, one with nothing but its local tokens, within a window and without."""
    spec = CacheSpec(batch=3, q_heads=4, kv_heads=2, head_dim=64, capacity=200, dtype=jnp.bfloat16)
    chooses = {"selector": MinMaxPages(page=4), "demote": Fifo(leave=8)}
    policy = Retrieval(**chooses, budget=40, sink=3, local=6, dense_below=20)
    k, v = (normal(s, 3, 101, 2, 64, dtype=jnp.bfloat16) for s in (1, 2))
    q, lengths = normal(0, 3, 4, 64, dtype=jnp.bfloat16), jnp.asarray([101, 17, 2])
    state = jax.jit(lambda k, v: policy.prefill(policy.init(spec), k, v, lengths))(k, v)
    for window in (None, 50):
        want, _, info = jax.jit(lambda *args, w=window: policy.attend(*args, scale=0.125, window=w))(state, q)
        with monkeypatch.context() as m:
            m.setattr(ops, "attend_zones", lambda *args, scale: zones_kernel(args[-1], scale=scale)(*args[:-1]))
            got, *_ = jax.jit(lambda *args, w=window: policy.attend(*args, scale=0.125, window=w))(state, q)
        assert relative(got, want) < float(jnp.finfo(jnp.bfloat16).eps)
        if window is None:
            np.testing.assert_array_equal(info.attended, np.repeat([[37], [17], [2]], 2, axis=1))


# ------------------------------------------------------------------------------------------------------- attend_span


def spans_of(B, *spans):
    return tuple(jnp.asarray(np.resize(ends, B).astype(np.int32)) for ends in zip(*spans, strict=True))


BIG = [(0, 131040), (0, 0), (5, 131000), (64, 65)]


def span_of(B, K, S, D, dtype, *spans):
    """Keys outside of the span are NaN, values infinite."""
    k, v = (np.array(normal(seed, B, K, S, D, dtype=dtype)) for seed in (1, 2))
    start, stop = spans_of(B, *spans)
    for kept, poison in ((k, np.nan), (v, np.inf)):
        for b in range(B):
            kept[b, :, : start[b]] = kept[b, :, max(stop[b], start[b]) :] = poison
    return Span(jnp.asarray(k), jnp.asarray(v), start, stop)


def attend_in_span(q, span, config=None, scale=0.125):
    return jax.jit(partial(attend_span.attend_span, scale=scale, config=config))(q, *span)


def over_span(q, span, scale=0.125):
    """The reference, of finite values."""
    finite = span._replace(v=jnp.where(jnp.isinf(span.v), jnp.zeros((), span.v.dtype), span.v))
    return jax.jit(partial(ops.attend_span, scale=scale, implementation="xla"))(q, finite)


@pytest.mark.parametrize(
    ("B", "K", "G", "S", "D", "dtypes", "spans", "config"),
    [
        # Rows with more than the stages hold, from a slot that begins no tile; with none, by both ends; with one.
        (4, 1, 4, 300, 128, "bf", [(3, 300), (9, 9), (9, 4), (17, 18)], attend_span.Config(2, stages=2, keys=16)),
        (2, 2, 1, 150, 64, "hh", [(0, 150), (1, 65)], attend_span.Config(1, stages=1)),
        (1, 1, 8, 150, 64, "bb", [(5, 133)], attend_span.Config(2, warpgroups=2)),
        pytest.param(2, 1, 4, 200, 128, "hb", [(0, 200), (100, 163)], None, marks=pytest.mark.thorough),
        pytest.param(1, 1, 3, 150, 256, "bb", [(5, 149)], None, marks=pytest.mark.thorough),
        *(pytest.param(4, 2, G, 131072, 128, "bb", BIG, None, marks=on_gpu) for G in range(1, 9)),
        *(pytest.param(4, 2, 4, 131072, D, "hh", BIG, None, marks=on_gpu) for D in (64, 128, 256)),
        pytest.param(8, 8, 4, 32768, 128, "bb", [(0, 32768)], None, marks=on_gpu),
    ],
)
def test_attention_over_a_span_equals_the_reference(B, K, G, S, D, dtypes, spans, config):
    kept, queries = ({"b": jnp.bfloat16, "h": jnp.float16, "f": jnp.float32}[x] for x in dtypes)
    q, span = normal(0, B, K, G, D, dtype=queries), span_of(B, K, S, D, kept, *spans)
    got, want = attend_in_span(q, span, config), over_span(q, span)
    assert got.dtype == want.dtype == queries
    # Weights are rounded to the dtype of the values, each once, and the result to that of the queries.
    assert relative(got, want) < float(jnp.finfo(kept).eps) + float(jnp.finfo(queries).eps)
    np.testing.assert_array_equal(np.asarray(got)[np.asarray(span.size) == 0], 0)


def test_attention_over_a_span_takes_ends_out_of_range_far_apart_scores_and_vmap():
    q, config = 40 * normal(0, 2, 1, 2, 64, dtype=jnp.bfloat16), attend_span.Config(1)
    span = span_of(2, 1, 40, 64, jnp.bfloat16, (0, 40), (7, 40))
    want = attend_in_span(q, span, config)
    assert relative(want, over_span(q, span)) < 1e-2  # scores of hundreds: one key has all the weight
    beyond = span._replace(start=jnp.array([-9, 7], jnp.int32), stop=jnp.array([41, 1 << 30], jnp.int32))
    np.testing.assert_array_equal(attend_in_span(q, beyond, config), want)
    run = partial(attend_span.attend_span, scale=0.125, config=config)
    apart = jax.jit(jax.vmap(lambda *a: run(*jax.tree.map(lambda x: x[None], a))))(q, *span)
    np.testing.assert_array_equal(apart[:, 0], want)


# -------------------------------------------------------------------------------------------------- attend_quantized


def quantized(B, K, Q, S, D, bits, tokens, channels, value_channels):
    q, k, v = normal(0, B, K, Q, D, dtype=jnp.bfloat16), *(normal(seed, B, K, S, D) for seed in (1, 2))
    keys = jax.jit(lambda k: quantize(k, bits[0], tokens=tokens, channels=channels))(k)
    return q, keys, jax.jit(lambda v: quantize(v, bits[1], channels=value_channels))(v)


@pytest.mark.parametrize(
    ("B", "K", "Q", "S", "D", "bits", "groups", "spans", "config"),
    [
        # LogQuant's groups, over a unit of three products of which the last is in part a group's.
        (1, 1, 4, 210, 128, (2, 2), (42, 1, 64), [(0, 200)], attend_quantized.Config(2, stages=3)),
        (3, 1, 8, 120, 64, (2, 4), (1, 32, 32), [(0, 120), (5, 5), (70, 71)], attend_quantized.Config(1)),
        pytest.param(2, 1, 3, 256, 128, (4, 2), (32, 1, 32), [(0, 256), (31, 33)], None, marks=pytest.mark.thorough),
        pytest.param(
            1, 2, 1, 192, 64, (2, 2), (64, 1, 16), [(1, 190)], attend_quantized.Config(2, 2), marks=pytest.mark.thorough
        ),
        pytest.param(  # value scales of a unit are no multiple of 16 bytes
            1,
            1,
            2,
            105,
            64,
            (2, 2),
            (21, 1, 64),
            [(0, 99)],
            attend_quantized.Config(1, 1, 2),
            marks=pytest.mark.thorough,
        ),
        *(
            pytest.param(4, 2, Q, 131040, 128, bits, groups, BIG, None, marks=on_gpu)
            for Q, bits in ((4, (2, 2)), (8, (4, 4)), (1, (2, 4)), (3, (4, 2)))
            for groups in ((42, 1, 64), (32, 1, 32), (1, 64, 64))
        ),
        pytest.param(8, 8, 4, 32768, 64, (2, 2), (32, 1, 32), [(0, 32768)], None, marks=on_gpu),
    ],
)
def test_attention_over_codes_equals_the_reference(B, K, Q, S, D, bits, groups, spans, config):
    q, keys, values = quantized(B, K, Q, S, D, bits, *groups)
    span = spans_of(B, *spans)
    out, lse = jax.jit(partial(attend_quantized.attend_quantized, scale=0.1, config=config))(q, keys, values, *span)
    reference = jax.jit(partial(ops.attend_quantized, scale=0.1, implementation="xla"))
    want, doubled = (reference(x, keys, values, *span) for x in (q, 2 * q))
    # Queries and weights times scales, and keys by token, are rounded to bf16, each once.
    assert relative(out, want.out) < 4e-3
    # So a score is a sum of D terms q_i k_i with errors of up to 2^-8 each, 0.43 of it in root mean square (uniform in
    # half a unit of the last bit), and off by 0.43 * 2^-8 |q| scale, as keys are normal. Of lse that is averaged by the
    # weights p, sum p^2 = exp(lse of scores twice as large - 2 lse). Three and a half deviations are 1.5; keys of a
    # group share what they are off by, hence the least.
    together = np.exp(0.5 * np.asarray(doubled.lse) - np.where(np.isneginf(want.lse), 0, want.lse))
    of_scores = 1.5 * 2**-8 * 0.1 * np.linalg.norm(np.asarray(q, np.float32), axis=-1)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want.lse))
    off = np.abs(np.where(np.isneginf(lse), 0, lse - want.lse))
    assert (off <= np.maximum(of_scores * together, 1e-3)).all(), (off / np.maximum(of_scores * together, 1e-3)).max()


@pytest.mark.parametrize(
    ("D", "bits", "R", "spans", "dtype"),
    [
        (128, 2, 30, [(3, 100), (0, 0), (126, 126)], jnp.bfloat16),
        pytest.param(64, 4, 17, [(0, 126), (40, 41), (7, 7)], jnp.float32, marks=pytest.mark.thorough),
    ],
)
def test_attention_over_codes_takes_a_zone_of_exact_keys(D, bits, R, spans, dtype):
    q, keys, values = quantized(3, 1, 4, 126, D, (bits, bits), 42, 1, 32)
    zone = [normal(seed, 3, 1, R, D, dtype=jnp.bfloat16) for seed in (3, 4)]
    args = q.astype(dtype), keys, values, *spans_of(3, *spans), Span(*zone, *spans_of(3, (0, R), (2, 19), (5, 5)))
    config = attend_quantized.Config(2, 1)
    got = jax.jit(partial(attend_quantized.attend_quantized, scale=-0.1, config=config))(*args)
    want = jax.jit(partial(ops.attend_quantized_zones, scale=-0.1, implementation="xla"))(*args, None)
    assert got.dtype == want.dtype == dtype
    assert relative(got, want) < 4e-3 + (dtype == jnp.bfloat16) * 4e-3
    np.testing.assert_array_equal(got[2], np.zeros((1, 4, D)))  # nothing to attend to


def test_attention_over_codes_reads_nothing_outside_of_its_span_and_takes_vmap():
    q, keys, values = quantized(2, 1, 2, 126, 64, (2, 2), 42, 1, 32)
    span = spans_of(2, (42, 84))
    run = partial(attend_quantized.attend_quantized, scale=0.1, config=attend_quantized.Config(1))
    want = jax.jit(run)(q, keys, values, *span)

    def poisoned(code, first, last):
        scales = code.scales.at[:, :, :first].set(0x7FFF7FFF).at[:, :, last:].set(0x7FFF7FFF)  # NaN
        return QuantArray(code.codes, scales)

    for got, expected in zip(jax.jit(run)(q, poisoned(keys, 1, 2), poisoned(values, 42, 84), *span), want, strict=True):
        np.testing.assert_array_equal(got, expected)
    whole = (q, keys, values, *span)
    apart = jax.jit(jax.vmap(lambda *a: run(*jax.tree.map(lambda x: x[None], a))))(*whole)
    for got, expected in zip(apart, want, strict=True):
        np.testing.assert_allclose(got[:, 0], expected, rtol=1e-6)


# --------------------------------------------------------------------------------------------------------- put_token


def token_of(B, K, slots, D, dtype):
    """A step's arguments. Rows have, in turn: room everywhere; a full first zone; no room; no token; a lost one."""
    counts = [np.resize([n - 1, n, n, 0, n], B).astype(np.int32) for n in slots]
    counts[-1] = np.resize([0, slots[-1] - 1, slots[-1], 1, slots[-1]], B).astype(np.int32)
    zones = [
        Block(*(normal(2 * i + s, B, K, n, D, dtype=dtype) for s in range(2)), jnp.asarray(count))
        for i, (n, count) in enumerate(zip(slots, counts, strict=True))
    ]
    active = jnp.asarray(np.resize([True, True, True, False, True], B))
    return zones, *(normal(s, B, K, 1, D) for s in (8, 9)), active, jnp.asarray(np.arange(B) == 4)


def put_by_kernel(zones, *rest):
    made, overflow = put_token.put_token([(zone.k, zone.v, zone.count) for zone in zones], *rest)
    return [Block(*zone) for zone in made], overflow


@pytest.mark.parametrize(
    ("B", "K", "slots", "D", "dtype"),
    [
        (5, 3, (2, 5), 128, jnp.bfloat16),
        (2, 5, (4,), 8, jnp.float32),
        pytest.param(9, 8, (4, 383), 128, jnp.bfloat16, marks=on_gpu),
        pytest.param(1, 8, (256,), 256, jnp.float16, marks=on_gpu),
    ],
)
def test_a_token_is_put_where_the_reference_puts_it(B, K, slots, D, dtype):
    args = token_of(B, K, slots, D, dtype)
    want = jax.jit(partial(ops.put_token, implementation="xla"))(*args)
    zones = jax.tree.map(jnp.copy, args[0])
    places = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(zones)]
    got = jax.jit(put_by_kernel, donate_argnums=0)(zones, *args[1:])
    jax.tree.map(np.testing.assert_array_equal, got, want)
    if ON_GPU:
        assert [a.unsafe_buffer_pointer() for a in jax.tree.leaves(got[0])] == places, "it was copied"


def test_a_token_is_put_under_vmap_and_has_the_references_derivative(monkeypatch):
    args = token_of(2, 1, (3,), 64, jnp.float32)
    two = jax.tree.map(lambda a: jnp.stack([a, a[::-1]]), args)
    got = jax.jit(jax.vmap(put_by_kernel))(*two)
    for i in range(2):
        want = ops.put_token(*jax.tree.map(lambda a, i=i: a[i], two), implementation="xla")
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda a, i=i: a[i], got), want)
    zones, *rest = args

    def total(k, implementation):
        (zone,), _ = ops.put_token(zones, k, *rest[1:], implementation=implementation)
        return jnp.sum(zone.k**2)

    monkeypatch.setattr(ops.op, "_unmeasured", lambda kernel: None)
    for k in (rest[0], 2 * rest[0]):
        np.testing.assert_allclose(*(jax.jit(jax.grad(partial(total, implementation=i)))(k) for i in (None, "xla")))


# ------------------------------------------------------------------------------------------- host_rows, host_append


def on_host(*shape, dtype=jnp.bfloat16):
    return to_host(normal(7, *shape, dtype=dtype))


@pytest.mark.parametrize(
    ("B", "K", "P", "N", "row", "dtype", "config"),
    [
        (2, 3, 17, 9, (2, 4, 8), jnp.bfloat16, None),
        (1, 2, 5, 7, (3, 4), jnp.float32, host_rows.Config(3, 1)),
        (1, 1, 3, 4, (2, 1, 96), jnp.float16, host_rows.Config(1, 4)),
        *(
            pytest.param(1, 8, 65536, N, (2, 1, 128), jnp.bfloat16, host_rows.Config(ahead, w), marks=on_gpu)
            for N in (1, 512, 2049)
            for ahead in (1, 2, 4, 8)
            for w in (1, 8)
        ),
        pytest.param(2, 8, 4096, 300, (2, 32, 128), jnp.bfloat16, None, marks=on_gpu),
    ],
)
def test_rows_of_the_host_equal_the_references(B, K, P, N, row, dtype, config):
    x = on_host(B, K, P, *row, dtype=dtype)
    index = np.random.default_rng(0).integers(0, P, (B, K, N)).astype(np.int32)
    index.reshape(-1)[::4] = np.resize([-1, P, 0, P - 1, 1 << 30], index.size)[::4]
    got = jax.jit(partial(host_rows.host_rows, config=config))(x, jnp.asarray(index))
    want = jax.jit(partial(ops.host_rows, implementation="xla"))(x, jnp.asarray(index))
    np.testing.assert_array_equal(got, want)
    assert not np.asarray(want, np.float32)[(index < 0) | (index >= P)].any()
    assert got.sharding.memory_kind != "pinned_host"


@pytest.mark.parametrize(
    ("B", "K", "P", "N", "M", "row", "R", "dtype", "config", "blocks"),
    [
        (3, 2, 40, 36, 37, (2, 2, 64), 9, jnp.bfloat16, None, None),
        (3, 1, 9, 5, 8, (2, 4, 64), 7, jnp.bfloat16, host_rows.Config(3, 1), 2),
        (2, 2, 5, 4, 5, (2, 1, 64), 3, jnp.float16, host_rows.Config(1, 1), None),  # no warp has a row for itself
        *(
            pytest.param(3, 8, 4096, 56, 57, (2, 32, 128), 159, jnp.bfloat16, config, blocks, marks=on_gpu)
            for config, blocks in ((None, None), host_rows.BESIDE, (host_rows.Config(4, 4), 7))
        ),
        pytest.param(1, 8, 4096, 2046, 2047, (2, 1, 128), 300, jnp.bfloat16, *host_rows.BESIDE, marks=on_gpu),
        pytest.param(1, 2, 4096, 16, 20, (2, 16, 64), 47, jnp.float16, None, None, marks=on_gpu),
    ],
)
def test_heads_recall_rows_where_they_are_or_keep_what_they_have(B, K, P, N, M, row, R, dtype, config, blocks):
    (parts, Z, D), rng = row, np.random.default_rng(0)
    x = on_host(B, K, P, *row, dtype=dtype)
    index = rng.integers(-1, P, (B, K, N)).astype(np.int32)
    index.reshape(-1)[::4] = np.resize([P, P + 1, P + R - 1, -5], index.size)[::4]
    edge = jnp.asarray(np.resize([P + R - 1, -1, P + 1], B).astype(np.int32))
    mode = rng.integers(0, 3, (B, K))
    mode[0, 0] = 1
    there = np.stack([rng.permutation(P)[:M] if M <= P else np.resize(-1, M) for _ in range(B * K)]).astype(np.int32)
    there = there.reshape(B, K, M)
    there[..., ::5] = -1
    # What is held is not what x has, to be told from it, and what is ready neither.
    held, ready, recent = (
        tuple(normal(s + i, B, K, n, D, dtype=dtype) for i in range(parts))
        for s, n in ((20, M * Z), (40, M * Z), (30, R))
    )
    args = x, jnp.asarray(index), edge, jnp.asarray(mode == 1), (jnp.asarray(there), held), recent
    kernel = jax.jit(partial(host_rows.recall, config=config, blocks=blocks))
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
        np.testing.assert_array_equal(ours, np.choose(mode[..., None, None], [np.asarray(a) for a in sources]))
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
            pytest.param(7, 8, 4096, n, row, jnp.bfloat16, host_rows.Config(ahead, 2), marks=on_gpu)
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
    got = jax.jit(partial(host_append.host_append, config=config), donate_argnums=0)(x, new, at, count)
    np.testing.assert_array_equal(got, want)
    assert got.sharding.memory_kind == want.sharding.memory_kind == "pinned_host"
    if ON_GPU:
        assert got.unsafe_buffer_pointer() == place, "it was copied"


def test_an_array_of_the_host_stays_there_through_loops_and_vmap_of_the_kernels():
    x, new = on_host(1, 2, 9, 2, 1, 64), [normal(s, 1, 2, 2, 1, 64, dtype=jnp.bfloat16) for s in (1, 2)]
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
    np.testing.assert_array_equal(read, np.broadcast_to(written[None, :, :, 1:2], read.shape))

    both, index = to_host(jnp.stack([normal(7, *x.shape, dtype=x.dtype)] * 2)), jnp.full((2, 1, 2, 3), 3).at[1].set(-1)
    rows = jax.jit(jax.vmap(host_rows.host_rows))(both, index)
    filled = jax.jit(jax.vmap(host_append.host_append, in_axes=(0, None, 0, None)))(
        both, new, jnp.array([[1], [8]]), two
    )
    for i, at in enumerate((1, 8)):
        np.testing.assert_array_equal(rows[i], ops.host_rows(x, index[i]))
        want = jax.jit(ops.host_append)(x, new, jnp.array([at]), two)
        np.testing.assert_array_equal(np.asarray(filled)[i], want)


@on_gpu
@pytest.mark.parametrize("page", [1, 16])
def test_the_host_store_is_the_same_with_and_without_its_kernels(page, monkeypatch):
    spec = CacheSpec(batch=2, q_heads=4, kv_heads=2, head_dim=64, capacity=300, dtype=jnp.bfloat16)
    store, new = HostOffload(page=page), [normal(s, 2, 2, 48, 64, dtype=jnp.bfloat16) for s in (1, 2)]
    pages = jnp.asarray([[[[0, 2, 1]], [[2, 1, 0]]], [[[0, 0, 0]], [[1, 2, 0]]]], jnp.int32)
    selection = expand_units(Selection(pages, pages > 0), page)

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
    assert {call.op: str(call) for call in ran} == {"host_rows": "mosaic", "host_append": "mosaic"}
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@on_gpu
@pytest.mark.parametrize(
    "policies",
    [presets.freekv(128, sink=16, local=16, tau=t) for t in (-1.0, 0.5, 2.0)]
    + [presets.fier(128, sink=4, local=16, host=True), presets.quest(128), presets.logquant()],
)
def test_tokens_are_the_same_with_kernels_beside_each_other(policies, monkeypatch):
    """XLA orders kernels by the arrays that they say they read and write, and so in place too."""
    shape = replace(throughput.SHAPES["llama-3.2-1b"], layers=4, windows=(), vocab_size=512)
    model = throughput.random_model(shape)
    prompt = np.random.default_rng(0).integers(0, 512, (2, 700), dtype=np.int32)
    found = []
    for options in (None, CONCURRENT):
        how = {"static_argnames": ("room", "measure"), "donate_argnames": "cache", "compiler_options": options}
        monkeypatch.setattr(generation, "_decode_loop", jax.jit(generation._decode_loop.__wrapped__, **how))
        cache = kvjax.init(policies, model.spec(batch=2, capacity=1024), layers=4)
        found.append(generation.generate(model, cache, prompt, max_new_tokens=200).tokens)
    np.testing.assert_array_equal(*found)
