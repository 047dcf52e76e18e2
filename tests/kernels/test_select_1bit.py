"""The kernel select_1bit against the reference, on random and on adversarial input."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ops
from kvjax.kernels_pallas.score import score_1bit
from kvjax.kernels_pallas.select import select_1bit, threshold
from kvjax.numerics.quant import OneBit
from kvjax.numerics.selection import PackedSelection, reduce_scores, unpack
from tests.kernels.conftest import ON_GPU, on_gpu
from tests.kernels.inputs import index, normal, spans_of

pytestmark = pytest.mark.usefixtures("kernels")


def choice(B, K, G, S, D, group, W, room, dtype, kind):
    """Arguments of select_1bit, with spans and counts of each row that are at the edges."""
    # In numpy: each operation of jax on an array is a program.
    q = np.array(normal(1, B, K, G, D, dtype=dtype).astype(jnp.float32))
    ix = OneBit(*map(np.array, index(B, K, S, D, group, dtype)))
    scores = np.array(normal(2, B, K, G, W))
    span = spans_of(
        B, (0, S), (1, S - 1), (S // 2, S // 2 + room), (0, room + 1), (3, 3), (0, -5)
    )
    wait = spans_of(B, (0, W), (0, 0), (W - 1, W), (0, 1), (2, W - 2), (1, -3))
    count = np.resize([room, room - 1, room, 1, room, 0], B).astype(np.int32)
    if kind == "equal":
        ix = OneBit(np.zeros_like(ix.bits), np.ones_like(ix.scale), np.ones_like(ix.zero))
        scores[:] = 0
    elif kind == "few keys":
        for a in ix:
            a[:] = a[:, :, :1]
        ix.bits[:, :, 1::3] = 255
        ix.bits[:, :, 2::5] = 0
    elif kind == "peaked":
        q *= 300
        scores *= 300
    elif kind == "flat":
        q *= 1e-6
        scores *= 1e-6
    elif kind == "coarse":  # some 500: f16 has two numbers to 1 there
        q[..., 0] = 1
        scores += 6000 * D**-0.5
        ix.zero[..., 0] = 6000
    elif (
        kind == "infinite"
    ):  # of a unit's keys -inf for all heads, of another's +inf for one head
        q[..., 0] = 1
        q[..., 1] = 0.5
        q[:, :, 0, 1] = -0.5
        ix.zero[:, :, 1, 0] = -np.inf
        ix.zero[:, :, 2, :2] = [-np.inf, 0]
        if B > 1:
            ix.zero[0, :, 0, 0] = np.inf
        scores[..., 1::2] = -np.inf
    elif kind == "poison":  # past the spans
        slot = np.arange(S // group)[None, None, :, None] * group
        start, stop = (np.asarray(end)[:, None, None, None] for end in span)
        outside = (slot + group <= start) | (slot >= stop)
        ix = ix._replace(
            zero=np.where(outside, np.asarray(np.nan, dtype), ix.zero),
            scale=np.where(outside, np.asarray(np.inf, dtype), ix.scale),
        )
        slot = np.arange(W)[None, None, None]
        start, stop = (np.asarray(end)[:, None, None, None] for end in wait)
        scores = np.where((slot < start) | (slot >= stop), np.float32(np.nan), scores)
    return q, ix, span, (scores, *wait), count


@partial(jax.jit, static_argnames="group_reduce")
def ranks_in_half(parts, group_reduce):
    """`reduce_scores` of scores in f16, but softmaxes by the sums of what they were: scores, in
    f16, valid of a part."""
    halves, valid = ([part[i] for part in parts] for i in (1, 2))
    halves = [half.astype(jnp.float32) for half in halves]
    if "softmax" not in group_reduce:
        return reduce_scores(list(zip(halves, valid, strict=True)), group_reduce)
    whole, half = (
        jnp.concatenate(
            [jnp.where(ok, a, -jnp.inf) for a, ok in zip(which, valid, strict=True)], axis=-1
        )
        for which in ([part[0] for part in parts], halves)
    )
    total = jax.nn.logsumexp(whole, axis=-1, keepdims=True)
    shares = half - jnp.where(jnp.isneginf(total), 0.0, total)
    if group_reduce == "max_softmax":
        return jnp.max(shares, axis=2, keepdims=True)
    return jax.nn.logsumexp(shares, axis=2, keepdims=True) - jnp.log(float(whole.shape[2]))


KINDS = ("normal", "equal", "few keys", "peaked", "flat", "coarse", "infinite", "poison")


def kinds_of(G, config):
    """In the simulator, what another form of the first case can get wrong: scores, if a kernel
    sums more heads than at once, or the selection, if it goes through a row in steps.
    """
    if ON_GPU:
        return KINDS
    if G > 8:
        return ("normal", "infinite", "poison")
    if config is not None and not config.cluster:
        return ("normal", "equal", "few keys", "coarse")
    return KINDS


@pytest.mark.parametrize(
    ("B", "K", "G", "S", "D", "group", "W", "room", "dtype", "config"),
    [
        (6, 1, 2, 224, 128, 32, 7, 40, jnp.bfloat16, select_1bit.Config(blocks=1, units=3)),
        (6, 1, 2, 4192, 64, 32, 7, 40, jnp.bfloat16, select_1bit.Config(blocks=2, cluster=0)),
        (6, 1, 12, 128, 256, 32, 7, 40, jnp.bfloat16, select_1bit.Config(blocks=1, units=3)),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (6, 1, 6, 128, 256, 32, 7, 40, jnp.bfloat16, select_1bit.Config(1, units=3)),
                (1, 1, 16, 4160, 64, 64, 9, 77, jnp.float16, select_1bit.Config(3, 1, 0)),
                (
                    1,
                    1,
                    4,
                    8224,
                    128,
                    32,
                    5,
                    900,
                    jnp.bfloat16,
                    select_1bit.Config(blocks=1, unroll=2, units=16),
                ),
                (
                    1,
                    2,
                    4,
                    8192,
                    128,
                    32,
                    255,
                    1000,
                    jnp.bfloat16,
                    select_1bit.Config(blocks=2, units=13, stages=4),
                ),
                (
                    2,
                    1,
                    8,
                    4160,
                    64,
                    64,
                    9,
                    77,
                    jnp.float16,
                    select_1bit.Config(blocks=1, unroll=1, units=9, stages=8),
                ),
                # Four steps, the last with what waits; of 300 wanted lists have room for what
                # counts, of 4000 not.
                (
                    1,
                    1,
                    4,
                    11 << 12,
                    64,
                    64,
                    5,
                    300,
                    jnp.bfloat16,
                    select_1bit.Config(blocks=1, unroll=3),
                ),
                (
                    1,
                    1,
                    4,
                    11 << 12,
                    64,
                    64,
                    5,
                    4000,
                    jnp.bfloat16,
                    select_1bit.Config(blocks=1, unroll=3),
                ),
                (1, 1, 3, 4096 + 32, 128, 4128, 4, 4095, jnp.bfloat16, None),
                (
                    2,
                    1,
                    5,
                    64,
                    64,
                    32,
                    1,
                    65,
                    jnp.bfloat16,
                    select_1bit.Config(blocks=4, units=2, stages=2),
                ),
                (
                    1,
                    1,
                    4,
                    160,
                    128,
                    32,
                    8,
                    60,
                    jnp.bfloat16,
                    select_1bit.Config(blocks=16, units=2),
                ),
                (
                    1,
                    1,
                    8,
                    4160,
                    64,
                    64,
                    9,
                    77,
                    jnp.float16,
                    select_1bit.Config(blocks=1, unroll=2, cluster=0),
                ),
                (
                    1,
                    1,
                    5,
                    4160,
                    64,
                    64,
                    9,
                    77,
                    jnp.float16,
                    select_1bit.Config(blocks=3, unroll=1, cluster=0),
                ),
                (
                    1,
                    1,
                    4,
                    11 << 12,
                    64,
                    64,
                    5,
                    4000,
                    jnp.bfloat16,
                    select_1bit.Config(3, unroll=2, cluster=0),
                ),
            )
        ),
        *(
            pytest.param(*sizes, jnp.bfloat16, None, marks=on_gpu)
            for sizes in (
                *((1, 8, 4, 130816, 128, 32, 256, 2048), (1, 8, 4, 131072, 128, 32, 256, 2047)),
                *((6, 2, 8, 5024, 128, 32, 257, 300), (1, 2, 4, 1 << 20, 128, 32, 512, 4000)),
            )
        ),
        *(
            pytest.param(6, 3, G, 2080, 64, 32, 33, 200, jnp.float16, None, marks=on_gpu)
            for G in (*range(1, 9), 12, 16)
        ),
    ],
)
def test_select_1bit_chooses_what_top_k_grouped_does_of_the_scores(
    B, K, G, S, D, group, W, room, dtype, config, monkeypatch, bypass_cache
):
    if B == 6 or room == 300:  # bins of so few are counted again as those of many, or ranked
        monkeypatch.setattr(threshold, "LISTED", 8)
    run = jax.jit(
        lambda q, ix, *args, group_reduce: select_1bit.select_1bit(
            q, *ix, *args, group_reduce, room, scale=D**-0.5, config=config
        ),
        static_argnames="group_reduce",
    )
    score = jax.jit(lambda q, ix: score_1bit.score_1bit(q, *ix, scale=D**-0.5))
    reference = jax.jit(partial(ops.top_k, k=room, implementation="xla"))
    pools = {
        "normal": ("mean_softmax", "per_head")
        if B == 6
        else ("max_softmax", "mean_score", "per_head")
    }
    pools["coarse"] = ("mean_score",)
    for kind in kinds_of(G, config):
        if kind == "infinite" and S // group < 3:
            continue
        q, ix, span, pending, count = choice(B, K, G, S, D, group, W, room, dtype, kind)
        scores = np.asarray(score(q, ix))  # the same products
        with np.errstate(over="ignore"):
            half_scores, late = (a.astype(np.float16) for a in (scores, pending[0]))
        parts = []
        for part, half, ends in (
            (scores, half_scores, span),
            (late.astype(np.float32), late, pending[1:]),
        ):
            slot = np.arange(part.shape[3])[None]
            valid = (slot >= np.asarray(ends[0])[:, None]) & (
                slot < np.asarray(ends[1])[:, None]
            )
            parts.append((part, half, valid[:, None, None]))
        for group_reduce in pools.get(kind, ("mean_softmax",)):
            slots, found = (
                np.asarray(a)
                for a in unpack(
                    PackedSelection(
                        *run(q, ix, span, pending, count, group_reduce=group_reduce)
                    )
                )
            )
            ranks = np.asarray(ranks_in_half(parts, group_reduce=group_reduce))
            want = reference(ranks, np.concatenate([ok for *_, ok in parts], axis=-1))
            wanted = np.asarray(want.valid) & (
                np.arange(room) < np.asarray(count)[:, None, None, None]
            )
            np.testing.assert_array_equal(
                found.sum(-1), wanted.sum(-1), err_msg=f"{kind}, {group_reduce}"
            )
            for row in np.ndindex(found.shape[:3]):
                got, best = slots[row][found[row]], np.asarray(want.slots)[row][wanted[row]]
                assert np.unique(got).size == got.size
                if kind in ("equal", "few keys", "coarse"):
                    assert set(got) == set(best), f"{kind}, {group_reduce}"
                # Ranks within rounding may be taken for each other.
                both = (np.nan_to_num(np.sort(ranks[row][s]), nan=-np.inf) for s in (got, best))
                np.testing.assert_allclose(
                    *both, rtol=1e-5, atol=1e-4, err_msg=f"{kind}, {group_reduce}"
                )


@pytest.mark.parametrize(
    ("G", "D", "R", "pending_slots", "dtype", "group_reduce"),
    [
        (3, 64, 44, 37, jnp.float16, "mean_softmax"),
        (10, 64, 20, 19, jnp.bfloat16, "mean_softmax"),
        pytest.param(4, 128, 20, 19, jnp.bfloat16, "per_head", marks=pytest.mark.thorough),
        *(
            pytest.param(G, 128, 256, 255, jnp.bfloat16, "mean_softmax", marks=on_gpu)
            for G in (1, 4, 8, 12, 16)
        ),
    ],
)
def test_select_1bit_scores_keys_that_wait_as_they_are(
    G, D, R, pending_slots, dtype, group_reduce
):
    q, ix, span, pending, count = choice(2, 3, G, 96, D, 32, pending_slots, 33, dtype, "normal")
    keys = 4 * normal(7, 2, 3, R, D, dtype=dtype)  # some are chosen
    exact = (
        jnp.einsum("bkgd,bksd->bkgs", q.astype(dtype), keys, preferred_element_type=jnp.float32)
        * 0.3
    )

    def run(first, pending_slots=None, local=0, numbers=None):
        begin, end, n = numbers or (span, (pending[1], pending[2] + local), count)
        config = select_1bit.Config(blocks=1)
        return select_1bit.select_1bit(
            q,
            *ix,
            begin,
            (first, *end),
            n,
            group_reduce,
            33,
            scale=0.3,
            pending_slots=pending_slots,
            local=local,
            config=config,
        )

    got, want = (
        unpack(PackedSelection(*made))
        for made in (
            jax.jit(partial(run, pending_slots=pending_slots, local=3))(keys),
            jax.jit(run)(exact[..., :pending_slots]),
        )
    )
    np.testing.assert_array_equal(got.valid, want.valid)
    for row in np.ndindex(got.valid.shape[:3]):
        ours, theirs = (
            set(np.asarray(s.slots)[row][np.asarray(s.valid)[row]].tolist())
            for s in (got, want)
        )
        assert ours == theirs
    assert (np.asarray(got.slots)[np.asarray(got.valid)] >= 96).any()
    if G == 3:
        again = jax.jit(jax.vmap(partial(run, pending_slots=pending_slots)))(
            jnp.stack([keys, keys])
        )
        np.testing.assert_array_equal(
            again[1][1],
            PackedSelection(*jax.jit(partial(run, pending_slots=pending_slots))(keys)).found,
        )
        late = (0, 0), (0, R), 33  # past the first `pending_slots` nothing waits
        all_of, first_of = (
            jax.jit(partial(run, pending_slots=w, numbers=late))(a)[0]
            for a, w in ((keys, pending_slots), (exact[..., :pending_slots], None))
        )
        np.testing.assert_array_equal(np.sort(all_of, axis=-1), np.sort(first_of, axis=-1))
        numbers = (-4, 90), (2, 30), 31  # of all rows
        arrays = jax.tree.map(lambda n: jnp.full(2, n, jnp.int32), numbers)
        for one, each in zip(
            *(
                jax.jit(partial(run, pending_slots=pending_slots, numbers=n))(keys)
                for n in (numbers, arrays)
            ),
            strict=True,
        ):
            np.testing.assert_array_equal(one, each)


# Scores in f16, by the bins of `threshold.FIRST_BINS`: most lie in one that is counted again by
# bits, where the last place is in the last part of it. That part has room for keys of the next
# bins too, which were counted as larger.
WIDE_BINS = {
    "score, the middle": ("per_head", (-0.1, 0.1), [0.125, 0.12524414], (0.12609863, 0.1405)),
    "score, the lowest": (
        "per_head",
        (-60.0, -33.0),
        [-31.984375, -31.890625],
        (-31.8125, -28.5),
    ),
    "score, the highest": ("per_head", (32.0, 40.0), [50.0, 50.03125], (50.5, 60.0)),
    "sum": ("mean_softmax", (-50.0, -44.0), [-42.96875], (-42.9375, -42.78125)),
    "log": ("max_softmax", (-200.0, -178.0), [-177.375, -177.25], (-177.0, -158.0)),
}


FORMS = [
    "registers",
    *(pytest.param(form, marks=pytest.mark.thorough) for form in ("lists", "parts")),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", WIDE_BINS)
def test_select_1bit_finds_a_last_place_at_the_end_of_a_wide_bin(case, form):
    group_reduce, lower, edges, higher = WIDE_BINS[case]
    n = 1 if form == "registers" else 6  # rows of more than 4096 keys are read in steps
    rng, top = np.random.default_rng(0), max(0.0, higher[1] + 1)
    parts = (
        rng.uniform(*lower, 500 * n),
        np.resize(edges, 100 * n),
        rng.uniform(*higher, 150 * n),
        [top],
    )
    scores = rng.permutation(np.concatenate(parts)).astype(np.float16).astype(np.float32)
    room, W, S = 250 * n, scores.size, 32
    count = 150 * n + 1 + 60 * n
    best = np.lexsort((np.arange(W), -scores))[:count]
    q, ix, *_ = choice(1, 1, 2, S, 64, 32, 4, 8, jnp.bfloat16, "normal")
    waiting = jnp.broadcast_to(jnp.asarray(scores), (1, 1, 2, W)), 0, W
    config = (
        select_1bit.Config(2, unroll=1, cluster=0)
        if form == "parts"
        else select_1bit.Config(1, unroll=1)
    )
    slots, found = select_1bit.select_1bit(
        q, *ix, (0, 0), waiting, count, group_reduce, room, scale=1.0, config=config
    )
    np.testing.assert_array_equal(found, count)
    for row in np.asarray(slots).reshape(-1, room):
        np.testing.assert_array_equal(np.sort(row[:count]), np.sort(best) + S)


@pytest.mark.thorough
def test_select_1bit_chooses_alike_each_time_and_takes_vmap():
    q, ix, span, pending, count = choice(2, 1, 2, 96, 64, 32, 5, 20, jnp.bfloat16, "normal")
    config = select_1bit.Config(blocks=1)

    def run(q, ix, span, pending, count):
        return select_1bit.select_1bit(
            q, *ix, span, pending, count, "mean_softmax", 20, scale=0.1, config=config
        )

    args = q, ix, span, pending, count
    want = jax.jit(run)(*args)
    apart = jax.jit(jax.vmap(lambda *a: run(*jax.tree.map(lambda x: x[None], a))))(*args)
    for got, expected in zip(apart, want, strict=True):
        np.testing.assert_array_equal(got[:, 0], expected)
    shared = jax.jit(jax.vmap(lambda q: run(q, *args[1:])))(jnp.stack([q, -q]))
    for got, expected in zip(shared, want, strict=True):
        np.testing.assert_array_equal(got[0], expected)
