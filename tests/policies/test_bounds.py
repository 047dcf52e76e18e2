"""Which tokens a step attends to, one token below each bound of a method, at it, and one above.

A row is decoded token by token, so every length is tried on both sides of each bound, and each
setting that is a bound has three values. Values are unit vectors: the output of a step is the
weight of each token, and the tokens of weight above 0 are those that it attends to. A rule in
plain Python says which they must be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, Evicting, Fifo, Full, Retrieval
from kvjax.evictors import (
    HeavyHitter,
    KeyNorm,
    LastQuery,
    Observation,
    Sliding,
    ValueWeighted,
)
from kvjax.selectors import Exact

LENGTH = 40
DIMS = 64
SPEC = CacheSpec(
    batch=1, q_heads=1, kv_heads=1, head_dim=DIMS, capacity=DIMS, dtype=jnp.float32
)
NEAR = (-1, 0, 1)  # one below a bound, at it, and one above
Tokens = set[int]
Rule = Callable[[int], Tokens]  # the tokens of a row of so many

attend = jax.jit(kvjax.attention, static_argnames=("first_chunk", "window"))


class Row(NamedTuple):
    policy: Any
    strengths: np.ndarray  # f32[LENGTH], the logit of each token for every query
    rule: Rule
    window: int | None = None  # of the model's layer
    small: int = 0  # first tokens whose values are a thousandth as long


def newest(length: int, count: int) -> Tokens:
    return set(range(max(length - count, 0), length))


def best(strengths: np.ndarray, among: Tokens, count: int) -> Tokens:
    """The strongest of some tokens."""
    return set(sorted(among, key=lambda token: -strengths[token])[: max(count, 0)])


def mixed(*weak: int) -> np.ndarray:
    """Strengths in no order; the `weak` tokens are the weakest."""
    strengths = np.random.default_rng(0).permutation(LENGTH) / LENGTH
    strengths[list(weak)] -= 3
    return strengths.astype(np.float32)


def steps(row: Row, first: int = 1) -> dict[int, Tokens]:
    """The tokens attended to after each length; the `first` tokens are a prompt."""
    k = np.zeros((1, LENGTH, 1, DIMS), np.float32)
    k[0, :, 0, 0] = row.strengths
    q = np.zeros_like(k)
    q[..., 0] = DIMS**0.5
    v = np.eye(LENGTH, DIMS, dtype=np.float32)[None, :, None]
    v[:, : row.small] /= 1000

    def piece(start: int, end: int) -> list[np.ndarray]:
        return [x[:, start:end] for x in (q, k, v)]

    cache = kvjax.init_layer(row.policy, SPEC)
    _, cache = attend(cache, *piece(0, first), first_chunk=True, window=row.window)
    found = dict[int, Tokens]()
    for length in range(first + 1, LENGTH + 1):
        out, cache = attend(cache, *piece(length - 1, length), window=row.window)
        found[length] = set(np.flatnonzero(np.asarray(out)[0, 0, 0]).tolist())
    return found


# ------------------------------------------------------------------ rows of the table


def sliding(sink: int, budget: int) -> Row:
    def rule(length: int) -> Tokens:
        return set(range(min(sink, length))) | newest(length, budget - sink)

    return Row(Evicting(evictor=Sliding(sink=sink), budget=budget), mixed(), rule)


def window(tokens: int) -> Row:
    return Row(Full(), mixed(), lambda length: newest(length, tokens), window=tokens)


def retrieval(
    *, sink: int = 2, local: int = 4, budget: int = 12, leave: int = 4, dense_below: int = 0
) -> Row:
    """Sink and local window are the weakest tokens, so that only their bounds keep them."""
    policy = Retrieval(
        selector=Exact(),
        budget=budget,
        sink=sink,
        local=local,
        demote=Fifo(leave=leave),
        dense_below=dense_below,
    )
    strengths = mixed(*range(sink)) - 2 * (np.arange(LENGTH) / LENGTH).astype(np.float32)

    def rule(length: int) -> Tokens:
        if length < dense_below:
            return newest(length, length)
        always = set(range(min(sink, length))) | newest(length, local)
        others = newest(length, length) - always
        return always | best(strengths, others, budget - len(always))

    return Row(policy, strengths, rule)


def heavy_hitter(recent: int, budget: int) -> Row:
    """The first tokens draw nearly all attention, so the recent ones stay by their bound alone."""
    share = recent / budget
    strengths = np.where(np.arange(LENGTH) < budget - recent, 3.0, -3.0).astype(np.float32)

    def rule(length: int) -> Tokens:
        hitters = newest(min(length, budget - recent), length)
        return hitters | newest(length, recent)

    return Row(Evicting(evictor=HeavyHitter(recent=share), budget=budget), strengths, rule)


def last_query(budget: int) -> Row:
    strengths = mixed()

    def rule(length: int) -> Tokens:
        held = Tokens()
        for token in range(length):
            if len(held) == budget:
                held.remove(min(held, key=lambda one: strengths[one]))
            held.add(token)
        return held

    return Row(Evicting(evictor=LastQuery(), budget=budget), strengths, rule)


def several(budget: int, every: int) -> Row:
    """`every` tokens leave at once, those with the longest keys."""
    strengths = mixed() + 1

    def rule(length: int) -> Tokens:
        held = Tokens()
        for token in range(length):
            if len(held) == budget:
                held -= best(strengths, held, every)
            held.add(token)
        return held

    return Row(Evicting(evictor=KeyNorm(), budget=budget, every=every), strengths, rule)


TABLE: dict[str, Row] = {}
for near in NEAR:
    TABLE |= {
        f"sliding sink {1 + near}": sliding(1 + near, 8),
        f"sliding budget {8 + near}": sliding(2, 8 + near),
        f"window {8 + near}": window(8 + near),
        f"retrieval sink {2 + near}": retrieval(sink=2 + near),
        f"retrieval local {4 + near}": retrieval(local=4 + near),
        f"retrieval budget {13 + near}": retrieval(budget=13 + near),
        f"retrieval leave {4 + near}": retrieval(leave=4 + near),
        f"retrieval dense_below {20 + near}": retrieval(dense_below=20 + near),
        f"heavy hitter recent {4 + near}": heavy_hitter(4 + near, 8),
        f"heavy hitter budget {8 + near}": heavy_hitter(4, 8 + near),
        f"last query budget {8 + near}": last_query(8 + near),
        f"every {2 + near} of 8": several(8, 2 + near),
        f"every 7 of {9 + near}": several(9 + near, 7),
    }
TABLE["retrieval of sink and local alone"] = retrieval(sink=2, local=4, budget=6)
TABLE["retrieval with one more"] = retrieval(sink=2, local=4, budget=7)


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", TABLE)
def test_a_step_attends_to_the_tokens_of_the_rule_at_every_length(name: str) -> None:
    row = TABLE[name]
    wanted = {length: row.rule(length) for length in range(2, LENGTH + 1)}
    assert steps(row) == wanted


@pytest.mark.parametrize("sink", [0, 1, 2, 3])
def test_the_sink_of_weighted_values_stays_though_they_are_small(sink: int) -> None:
    """Of six first tokens with small values, which leave before all others."""
    budget = 10
    evictor = ValueWeighted(evictor=HeavyHitter(recent=0.0), sink=sink)
    policy = Evicting(evictor=evictor, budget=budget)
    row = Row(policy, np.zeros(LENGTH, np.float32), lambda _: Tokens(), small=6)
    for length, attended in steps(row).items():
        first = {token for token in attended if token < 6}
        if length >= budget + 6 - sink:
            assert first == set(range(sink))


@pytest.mark.parametrize("tokens", [3, 4, 5, 6])
def test_the_window_of_an_observation_is_at_most_half_of_the_slots(tokens: int) -> None:
    """One below the half, at it, one and two above; the last tokens are the weakest."""
    budget, prompt = 8, 30
    strengths = mixed(*range(prompt - 6, prompt))
    evictor = Observation(window=tokens, kernel_size=1)
    row = Row(Evicting(evictor=evictor, budget=budget), strengths, lambda length: Tokens())
    last = min(tokens, budget // 2)
    kept = newest(prompt, last)
    kept |= best(strengths, newest(prompt, prompt) - kept, budget - last)
    # The first step's token takes the slot of the weakest that was voted for.
    weakest = min(kept - newest(prompt, last), key=lambda token: strengths[token])
    assert steps(row, first=prompt)[prompt + 1] == kept - {weakest} | {prompt}


@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_the_neighbours_of_a_voted_token_stay_on_both_sides(kernel: int) -> None:
    prompt, voted = 30, 12
    strengths = np.full(LENGTH, -3, np.float32)
    strengths[voted] = 3
    evictor = Observation(window=2, kernel_size=kernel)
    row = Row(Evicting(evictor=evictor, budget=2 + kernel + 1), strengths, lambda _: Tokens())
    kept = steps(row, first=prompt)[prompt + 1]
    around = set(range(voted - kernel // 2, voted + kernel // 2 + 1))
    assert around | newest(prompt + 1, 3) <= kept
    assert len(kept) == 2 + kernel + 1


@pytest.mark.parametrize("excess", NEAR)
def test_a_cache_of_at_most_dense_capacity_attends_to_all(excess: int) -> None:
    row = retrieval()
    policy = replace(row.policy, dense_capacity=32)
    spec = replace(SPEC, capacity=32 + excess)
    cache = kvjax.init(policy, spec, layers=1)
    assert (cache.layers[0].policy == policy) == (excess > 0)


@pytest.mark.parametrize(("sink", "local"), [(0, 3), (1, 4), (2, 5)])
def test_tokens_are_as_they_came_in_the_sink_and_the_recent_block(
    sink: int, local: int
) -> None:
    """Of a cache of codes: a chunk leaves when `local` tokens stay behind it."""
    leave = 8
    policy = kvjax.Compressed(
        store=kvjax.Quantized(bits=2, key_group=8),
        sink=sink,
        local=local,
        demote=Fifo(leave=leave),
    )
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=(1, LENGTH, 1, DIMS)).astype(np.float32) for _ in range(3))
    cache = kvjax.init_layer(policy, SPEC)
    _, cache = attend(cache, *(x[:, :1] for x in (q, k, v)), first_chunk=True)
    for length in range(2, LENGTH + 1):
        _, cache = attend(cache, *(x[:, length - 1 : length] for x in (q, k, v)))
        coded = max(length - sink - local, 0) // leave * leave
        assert int(cache.state.store.count[0]) == coded, length
