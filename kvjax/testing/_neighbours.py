"""The law of independent rows: what a row returns depends on its own calls alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np

from kvjax.attention import decode
from kvjax.cache.cache import LayerCache
from kvjax.cache.editing import insert, rollback, truncate
from kvjax.cache.flushing import flush
from kvjax.policies import Policy
from kvjax.spec import CacheSpec
from kvjax.testing._anatomy import core, has_history, require, sink
from kvjax.testing._drive import (
    CHUNK,
    Tokens,
    fill,
    new_cache,
    prefill_chunk,
    ragged_lengths,
    random_tokens,
)
from kvjax.testing._expect import assert_same

CALLS = (
    ("step", 1),
    ("step", 1),
    ("step", 1),
    ("decode", 3),
    ("step", 1),
    ("prompt", 2),
    ("step", 1),
    ("decode", 2),
    ("step", 1),
)
"""The calls in which the first row takes tokens, and how many. After the second one its recent
block is full.
"""

MORE = {"step": 1, "decode": 5, "prompt": 7}  # tokens that a neighbour takes in a call

_decode = jax.jit(decode, static_argnames=("window", "scale", "flush"))
_flush = jax.jit(flush)
_rollback = jax.jit(rollback)
_truncate = jax.jit(truncate)


@dataclasses.dataclass
class Rows:
    """A cache, and the tokens that each of its rows has come to."""

    cache: LayerCache
    tokens: Tokens
    lengths: np.ndarray  # i[B]

    def take(self, kind: str, count: np.ndarray, **settings: bool) -> np.ndarray:
        """The outputs f32[B, T, N, D] of one call, in which each row takes its next `count`
        i[B] tokens.
        """
        run, T = (prefill_chunk, CHUNK) if kind == "prompt" else (_decode, MORE[kind])
        chunk = self.tokens.at(self.lengths[:, None] + np.arange(T))
        out, cache = run(self.cache, *chunk, lengths=count, **settings)
        assert isinstance(cache, LayerCache)
        self.cache = cache
        self.lengths = self.lengths + count
        return np.asarray(out, np.float32)


def row_ignores_calls_of_other_rows(policy: Policy, spec: CacheSpec) -> None:
    """A row returns the same to the bit as if its neighbours took no tokens, in each of its
    calls and between them.

    Its calls are steps, several tokens in one step, and prompts. Neighbours do the same, and
    are flushed, replaced, rolled back and shortened.
    """
    require(spec.batch > 1, "a cache of one row has no neighbours")
    tokens = random_tokens(spec, 28)
    first = np.arange(spec.batch) == 0

    def outputs(
        start: np.ndarray, between: Callable[[Rows], None], beside: str
    ) -> list[np.ndarray]:
        cache, _ = fill(new_cache(policy, spec), tokens, start)
        rows = Rows(cache, tokens, start)
        outs = []
        for kind, count in CALLS:
            others = MORE[kind] if kind == beside else 0
            outs.append(rows.take(kind, np.where(first, count, others))[0, :count])
            between(rows)
        return outs

    alone = outputs(
        np.where(first, _lengths(policy, spec, "none"), 0), lambda rows: None, "none"
    )
    for verb, between in _between(policy, spec, tokens, ~first).items():
        found = outputs(_lengths(policy, spec, verb), between, verb)
        for (kind, _), out, want in zip(CALLS, found, alone, strict=True):
            assert_same(
                out, want, f"{verb} of a neighbour changes the next {kind} of a row: its output"
            )


def _between(
    policy: Policy, spec: CacheSpec, tokens: Tokens, others: np.ndarray
) -> dict[str, Callable[[Rows], None]]:
    """By verb, what the rows `others` bool[B] do between two calls of the first row."""
    before = CHUNK // 2
    one = Tokens(*(a[:1] for a in (tokens.q, tokens.k, tokens.v)))

    def take(kind: str) -> Callable[[Rows], None]:
        return lambda rows: (rows.take(kind, MORE[kind] * others), None)[1]

    def flush_full(rows: Rows) -> None:
        rows.take("step", others.astype(np.int32))
        rows.cache = _flush(rows.cache)

    @functools.cache
    def prefix() -> LayerCache:  # its batch of one is a program of its own
        empty = new_cache(policy, dataclasses.replace(spec, batch=1))
        return fill(empty, one, [before])[0]

    def replace(rows: Rows) -> None:
        for row in np.flatnonzero(others):
            rows.cache = insert(rows.cache, prefix(), int(row))
        rows.lengths = np.where(others, before, rows.lengths)

    def take_back(rows: Rows) -> None:
        lengths = rows.lengths
        room = np.asarray(policy.free(rows.cache.state))
        rows.take("decode", np.minimum(2, room) * others, flush=False)
        rows.cache = _rollback(rows.cache, lengths)
        rows.lengths = lengths

    def shorten(rows: Rows) -> None:
        rows.lengths = np.where(others, rows.lengths * 3 // 4, rows.lengths)
        rows.cache = _truncate(rows.cache, rows.lengths)

    verbs = {"flush": flush_full} | {kind: take(kind) for kind in MORE} | {"insert": replace}
    if policy.reversible:
        verbs["rollback"] = take_back
    if _shortens(policy, spec):
        verbs["truncate"] = shorten
    return verbs


def _shortens(policy: Policy, spec: CacheSpec) -> bool:
    try:
        jax.eval_shape(
            truncate, jax.eval_shape(new_cache, policy, spec), np.zeros(spec.batch, np.int32)
        )
    except ValueError:
        return False
    return True


def _lengths(policy: Policy, spec: CacheSpec, verb: str) -> np.ndarray:
    """i[B] lengths: the recent block of the first row is full after two tokens, those of its
    neighbours at other times.

    With `flush` they are full after one token, with `decode` in the midst of one of `CALLS`.
    """
    most = spec.capacity - 2 * CHUNK
    lengths = np.minimum(ragged_lengths(policy, spec), most)
    if has_history(policy):
        inner = core(policy)
        full = sink(policy) + inner.demote.slots(inner.local)
        chunk = inner.demote.leave
        for row in range(spec.batch):
            length = full - ((2, 1, 1) if verb == "flush" else (2, 17, 42))[row % 3]
            length += max(-(length - 1) // chunk, 0) * chunk
            lengths[row] = length + (chunk if length + chunk <= most else 0)
    return np.maximum(lengths, 1)
