"""The kernel select_pages against the reference, on random and on adversarial input."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ops
from kvjax.kernels_pallas.score import score_pages
from kvjax.kernels_pallas.select import histogram, select_pages, threshold
from kvjax.numerics.selection import PackedSelection, reduce_scores, unpack
from tests.kernels.conftest import ON_GPU, on_gpu
from tests.kernels.inputs import boxes, normal, spans_of

pytestmark = pytest.mark.usefixtures("kernels")


def paged(B, K, G, P, D, unit, R, pending_slots, room, dtype, kind):
    """Arguments of select_pages, with spans of tokens and counts of each row that are at the
    edges.
    """
    # In numpy: each operation of jax on an array is a program.
    low, high = map(np.array, boxes(B, K, P, D, dtype))
    keys = np.array(3 * normal(7, B, K, R, D, dtype=dtype))
    q, S = np.array(normal(2, B, K, G, D, dtype=dtype).astype(jnp.float32)), P * unit
    span = spans_of(
        B,
        (0, S),
        (1, S - 1),
        (S // 2 + 3, S // 2 + room * unit),
        (0, room * unit + 1),
        (33, 33),
        (0, -5),
    )
    wait = spans_of(
        B,
        (0, pending_slots),
        (0, 0),
        (pending_slots - 1, pending_slots),
        (0, 1),
        (2, pending_slots - 2),
        (1, -3),
    )
    count = np.resize([room, room - 1, room, 1, room, 0], B).astype(np.int32)
    if kind == "equal":
        low, high, keys = np.ones_like(low), np.ones_like(high), np.ones_like(keys)
    elif kind == "few pages":
        for corner in (low, high):
            corner[:] = corner[:, :, :1]
            corner[:, :, 1::3] = 0
            corner[:, :, 2::5] = 1
    elif kind == "peaked":
        q *= 300
    elif kind == "flat":
        q *= 1e-6
    elif kind == "infinite":  # of a page -inf for all heads, of another +inf for one
        q[..., 0] = 1
        q[..., 1] = 0.5
        q[:, :, 0, 1] = -0.5
        for corner in (low, high):
            corner[:, :, 1, 0] = -np.inf
            corner[:, :, 2, :2] = [-np.inf, 0]
        keys[:, :, :unit, 0] = -np.inf
    elif kind == "poison":  # past the spans
        first = np.arange(P)[None, None, :, None] * unit
        start, stop = (np.asarray(end)[:, None, None, None] for end in span)
        outside = (first + unit <= start) | (first >= stop)
        low = np.where(outside, np.asarray(np.nan, dtype), low)
        high = np.where(outside, np.asarray(np.inf, dtype), high)
        slot = np.arange(R)[None, None, :, None]
        start, stop = (np.asarray(end)[:, None, None, None] for end in wait)
        keys = np.where((slot < start) | (slot >= stop), np.asarray(np.nan, dtype), keys)
    return q, low, high, span, (keys, *wait), count


def token_pages(start, stop, pages, unit):
    """bool[B, 1, 1, pages]: which have a token in [start, stop)."""
    tokens = np.arange(pages * unit)[None]
    inside = (tokens >= np.asarray(start)[:, None]) & (tokens < np.asarray(stop)[:, None])
    return inside.reshape(-1, 1, 1, pages, unit).any(-1)


KINDS = ("normal", "equal", "few pages", "peaked", "flat", "infinite", "poison")
# Of more heads than a kernel sums at once, in the simulator: the selection itself is the same.
KINDS_OF_MANY_HEADS = ("normal", "infinite", "poison")


@pytest.mark.parametrize(
    ("B", "K", "G", "P", "D", "unit", "R", "pending_slots", "room", "dtype", "config"),
    [
        (6, 1, 2, 67, 64, 16, 79, 48, 20, jnp.bfloat16, select_pages.Config(blocks=1)),
        (6, 1, 12, 35, 256, 16, 79, 48, 20, jnp.bfloat16, select_pages.Config(blocks=1)),
        (
            1,
            1,
            1,
            4200,
            64,
            16,
            16,
            16,
            900,
            jnp.bfloat16,
            select_pages.Config(blocks=1, unroll=1),
        ),  # in steps
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (6, 1, 6, 35, 256, 16, 79, 48, 20, jnp.bfloat16, select_pages.Config(blocks=1)),
                (
                    1,
                    2,
                    4,
                    520,
                    128,
                    16,
                    287,
                    272,
                    127,
                    jnp.bfloat16,
                    select_pages.Config(blocks=2, tiles=2),
                ),
                (
                    2,
                    1,
                    8,
                    100,
                    64,
                    32,
                    40,
                    32,
                    50,
                    jnp.float16,
                    select_pages.Config(blocks=1, unroll=1, warpgroups=2),
                ),
                (
                    2,
                    1,
                    5,
                    5,
                    128,
                    32,
                    33,
                    32,
                    6,
                    jnp.bfloat16,
                    select_pages.Config(blocks=4, tiles=3),
                ),
            )
        ),
        *(
            pytest.param(*sizes, jnp.bfloat16, None, marks=on_gpu)
            for sizes in (
                *(
                    (1, 8, 4, 8176, 128, 16, 287, 272, 127),
                    (1, 8, 4, 1016, 128, 32, 159, 32, 56),
                ),
                *(
                    (6, 2, 8, 5023, 128, 16, 300, 288, 300),
                    (1, 2, 4, 1 << 18, 128, 16, 287, 272, 1000),
                ),
            )
        ),
        *(
            pytest.param(6, 3, G, 2081, 64, 48, 100, 96, 200, jnp.float16, None, marks=on_gpu)
            for G in (*range(1, 9), 12, 16)
        ),
    ],
)
def test_select_pages_chooses_what_top_k_grouped_does_of_the_scores(
    B, K, G, P, D, unit, R, pending_slots, room, dtype, config, monkeypatch, bypass_cache
):
    if B == 6:  # bins of so few are counted again as those of many, or ranked
        monkeypatch.setattr(threshold, "LISTED", 8)
    how = dict(unit=unit, scale=D**-0.5, pending_slots=pending_slots)
    run = jax.jit(
        lambda *args, group_reduce: select_pages.select_pages(
            *args, group_reduce, room, **how, local=3, config=config
        ),
        static_argnames="group_reduce",
    )
    score = jax.jit(partial(score_pages.score_pages, scale=D**-0.5))
    reference = jax.jit(partial(ops.top_k, k=room, implementation="xla"))
    pools = {
        "normal": ("mean_softmax", "per_head")
        if B == 6
        else ("max_softmax", "mean_score", "per_head")
    }
    products = jax.jit(
        partial(jnp.einsum, "bkgd,bksd->bkgs", preferred_element_type=jnp.float32)
    )
    pooled = jax.jit(reduce_scores, static_argnums=1)
    for kind in KINDS if G <= 8 or ON_GPU else KINDS_OF_MANY_HEADS:
        if kind == "infinite" and P < 3:
            continue
        q, low, high, span, (keys, *wait), count = paged(
            B, K, G, P, D, unit, R, pending_slots, room, dtype, kind
        )
        slot = np.arange(pending_slots)[None, None, None]
        start, stop = (np.asarray(end)[:, None, None, None] for end in wait)
        there = (slot >= start) & (slot < stop)
        exact = np.asarray(products(q.astype(dtype), keys[:, :, :pending_slots]))
        exact = np.where(there, exact * D**-0.5, -np.inf).astype(np.float32)
        exact = exact.reshape(B, K, G, pending_slots // unit, unit)
        parts = [
            (score(q, low, high), token_pages(*span, P, unit)),  # the same products
            (exact.max(axis=-1), token_pages(*wait, pending_slots // unit, unit)),
        ]
        for group_reduce in pools.get(kind, ("mean_softmax",)):
            pending = keys, wait[0], wait[1] + 3
            slots, found = (
                np.asarray(a)
                for a in unpack(
                    PackedSelection(
                        *run(q, low, high, span, pending, count, group_reduce=group_reduce)
                    )
                )
            )
            ranks = np.asarray(pooled(parts, group_reduce))
            want = reference(ranks, np.concatenate([ok for _, ok in parts], axis=-1))
            wanted = np.asarray(want.valid) & (
                np.arange(room) < np.asarray(count)[:, None, None, None]
            )
            np.testing.assert_array_equal(
                found.sum(-1), wanted.sum(-1), err_msg=f"{kind}, {group_reduce}"
            )
            ranks = np.nan_to_num(ranks, nan=-np.inf)
            for row in np.ndindex(found.shape[:3]):
                got, best = slots[row][found[row]], np.asarray(want.slots)[row][wanted[row]]
                assert np.unique(got).size == got.size
                if kind in ("equal", "few pages"):
                    assert set(got) == set(best), f"{kind}, {group_reduce}"
                # Ranks within rounding may be taken for each other.
                ours, theirs = (ranks[row][s] for s in (got, best))
                close = partial(
                    np.testing.assert_allclose,
                    rtol=1e-5,
                    atol=1e-4,
                    err_msg=f"{kind}, {group_reduce}",
                )
                close(np.sort(ours), np.sort(theirs))
                if got.size:
                    close(ours[-1], theirs[-1])
                    if kind == "equal":
                        assert got[-1] == best[-1]


@pytest.mark.skipif(ON_GPU, reason="it counts what the simulator does")
@pytest.mark.parametrize("centre", [-40.0, -3.0, 3.0])
def test_scores_of_either_sign_are_counted_once(centre, monkeypatch, bypass_cache):
    counted, find = [], histogram.find_bin
    monkeypatch.setattr(
        histogram, "find_bin", lambda *args, **how: counted.append(args) or find(*args, **how)
    )
    q, low, _, span, pending, count = paged(
        1, 1, 1, 1000, 64, 16, 16, 16, 100, jnp.bfloat16, "normal"
    )
    q[:] = 0
    q[..., 0] = 1
    low[..., 0] += centre
    run = partial(
        select_pages.select_pages,
        unit=16,
        scale=1.0,
        pending_slots=16,
        config=select_pages.Config(blocks=1),
    )
    jax.block_until_ready(run(q, low, low, span, pending, count, "mean_score", 100))
    assert len(counted) == (2 if centre == -40 else 1)  # below -32 is one bin


@pytest.mark.thorough
def test_select_pages_chooses_alike_each_time_and_takes_vmap():
    q, *corners, span, pending, count = paged(
        2, 1, 2, 30, 64, 16, 40, 32, 9, jnp.bfloat16, "normal"
    )
    config = select_pages.Config(blocks=1)

    def run(q, low, high, span, pending, count):
        how = dict(unit=16, scale=0.1, pending_slots=32, config=config)
        return select_pages.select_pages(
            q, low, high, span, pending, count, "mean_softmax", 9, **how
        )

    args = q, *corners, span, pending, count
    want = jax.jit(run)(*args)
    apart = jax.jit(jax.vmap(lambda *a: run(*jax.tree.map(lambda x: x[None], a))))(*args)
    for got, expected in zip(apart, want, strict=True):
        np.testing.assert_array_equal(got[:, 0], expected)
    numbers = (-4, 470), (2, 30), 8  # of all rows
    arrays = jax.tree.map(lambda n: jnp.full(2, n, jnp.int32), numbers)
    for one, each in zip(
        *(
            jax.jit(lambda q, n=n: run(q, *corners, n[0], (pending[0], *n[1]), n[2]))(q)
            for n in (numbers, arrays)
        ),
        strict=True,
    ):
        np.testing.assert_array_equal(one, each)
