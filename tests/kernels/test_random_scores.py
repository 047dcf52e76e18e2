"""The kernels that select, on scores that crowd where bins end: nothing is left out, listed
twice or unwritten.

Keys of scores are counted by bins (`threshold.FIRST_BINS`), and the bin of the last place once
more by bits. So most scores of a row are in one bin here, some at its end, and the last place
is often among those. A number always names the same rows; KVJAX_FUZZ=2000:2600 runs the rows of
these numbers.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ops
from kvjax.kernels_pallas.select import select_1bit, top_k, top_k_grouped
from kvjax.numerics.selection import reduce_scores
from tests.kernels.test_select_1bit import choice

pytestmark = pytest.mark.usefixtures("kernels")

ENDS = (0.125, -0.125, -32.0, 32.0, 8.0, 1.0, -1.0, 0.0, -256.0, 2.0**-8)
RULES = ("mean_softmax", "max_softmax", "mean_score", "per_head")
STORED = 32  # tokens behind the codes of `select_1bit`, of which none is scored here
first, _, end = os.environ.get("KVJAX_FUZZ", "0:60").partition(":")
QUICK = (
    0,
    25,
)  # in every run of the suite; 25 fails where a bin that is counted by bits reaches over the next ones
NUMBERS = [
    pytest.param(n, marks=() if n in QUICK else pytest.mark.thorough)
    for n in range(int(first), int(end))
]


def crowded(rng, n):
    """n scores around one end of a bin, and a count whose last place is among those nearest to
    it.
    """
    at = float(rng.choice(ENDS))
    below, near, above = rng.multinomial(n, rng.dirichlet([3, 1, 1]))
    width = 10 ** rng.uniform(-4, -1.5) * (abs(at) + 0.01)
    low = at - abs(at) * rng.uniform(0.02, 1.9) - 2 * width
    high = at + abs(at) * rng.uniform(0.005, 0.5) + 2 * width
    scores = [rng.uniform(low, at - width, below), at + rng.uniform(-width, width, near)]
    scores = np.concatenate([*scores, rng.uniform(at + width, high, above)])
    return rng.permutation(scores).astype(np.float16).astype(np.float32), int(
        above + rng.integers(1, near + 2)
    )


def plain(rng, n):
    """n scores of a random kind, and any count."""
    kinds = [
        lambda: rng.standard_normal(n) * 10 ** rng.uniform(-4, 3),
        lambda: np.full(n, rng.choice(ENDS)),
        lambda: rng.choice(rng.standard_normal(3) * 10, n),
        lambda: np.sort(rng.standard_normal(n)),
        lambda: -rng.exponential(30, n),
        lambda: np.where(rng.random(n) < 0.3, -np.inf, rng.standard_normal(n)),
        lambda: np.minimum(rng.lognormal(0, 3, n), 6e4),
    ]
    return kinds[rng.integers(len(kinds))]().astype(np.float16).astype(np.float32), int(
        rng.integers(1, n)
    )


def rows(rng, n, heads):
    """Scores f32[1, 1, heads, n] of heads that are alike or not, and a count."""
    draws = [crowded if rng.random() < 0.7 else plain for _ in range(heads)]
    drawn = [draw(rng, n) for draw in draws]
    scores = [drawn[0][0]] * heads if rng.random() < 0.6 else [one for one, _ in drawn]
    return np.stack(scores)[None, None], drawn[0][1]


def check_chosen(ranks, slots, found):
    """The first `found` of each row's slots are different, and rank as the best of `ranks`."""
    for rank, row, n in zip(ranks, slots, found, strict=True):
        row, best = row[:n], np.sort(rank)[::-1][:n]
        assert np.unique(row).size == n
        np.testing.assert_allclose(np.sort(rank[row])[::-1], best, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("number", NUMBERS)
def test_select_1bit_lists_the_best_of_crowded_scores(number):
    rng = np.random.default_rng(number)
    heads, n, rule = (
        int(rng.integers(1, 5)),
        int(rng.integers(200, 6000)),
        str(rng.choice(RULES)),
    )
    scores, count = rows(rng, n, heads)
    count = min(count, n, 3000)
    room, blocks = int(rng.integers(count, min(n, 3000) + 1)), int(rng.integers(1, 3))
    q, ix, *_ = choice(1, 1, heads, STORED, 64, 32, 4, 8, jnp.bfloat16, "normal")
    config = select_1bit.Config(blocks=blocks, unroll=int(rng.integers(1, 3)))
    waiting = jnp.asarray(scores), 0, n
    chosen = select_1bit.select_1bit(
        q, *ix, (0, 0), waiting, count, rule, room, scale=1.0, config=config
    )
    parts = [(jnp.asarray(scores), jnp.ones((1, 1, 1, n), bool))]
    ranks = scores if rule == "per_head" else reduce_scores(parts, rule)
    slots, found = (np.asarray(a) for a in chosen)
    finite = np.isfinite(np.asarray(ranks)).all()
    assert (found == count).all() if finite else (found <= count).all()
    slots = slots.reshape(-1, room) - STORED
    check_chosen(
        np.asarray(ranks).reshape(-1, n), slots, np.broadcast_to(found.reshape(-1), len(slots))
    )


@pytest.mark.parametrize("number", NUMBERS)
def test_top_k_grouped_lists_the_best_of_crowded_scores(number):
    rng = np.random.default_rng(number)
    heads, n, rule = (
        int(rng.integers(1, 5)),
        int(rng.integers(70, 2500)),
        str(rng.choice(RULES[:3])),
    )
    scores, k = rows(rng, n, heads)
    k, parts = min(k, n), [(jnp.asarray(scores), jnp.ones((1, 1, 1, n), bool))]
    config = top_k.Config(blocks=1 + n % 2)
    slots, valid = jax.jit(
        top_k_grouped.top_k_grouped, static_argnums=(1, 2), static_argnames="config"
    )(parts, rule, k, config=config)
    np.testing.assert_array_equal(
        valid, ops.top_k_grouped(parts, rule, k, implementation="xla").valid
    )
    ranks, valid = (
        np.asarray(reduce_scores(parts, rule)).reshape(-1, n),
        np.asarray(valid).reshape(-1, k),
    )
    check_chosen(
        ranks,
        [row[v] for row, v in zip(np.asarray(slots).reshape(-1, k), valid, strict=True)],
        valid.sum(1),
    )
