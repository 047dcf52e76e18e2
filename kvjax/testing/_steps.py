"""Laws of several steps at once, and of tokens that are taken back."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from kvjax.attention import decode_info
from kvjax.cache.cache import LayerCache
from kvjax.cache.editing import rollback, room, truncate
from kvjax.cache.flushing import flush
from kvjax.policies import Policy
from kvjax.spec import CacheSpec
from kvjax.steps import attend, select, update
from kvjax.testing._anatomy import DoesNotApply, core, has_history, require, sink
from kvjax.testing._drive import Tokens, fill, new_cache, ragged_lengths, random_tokens, step
from kvjax.testing._expect import (
    as_stored,
    assert_close,
    assert_same,
    assert_same_contents,
    dense,
    slots_of,
)

STEPS = 5

_decode = jax.jit(decode_info, static_argnames=("window", "scale", "flush", "exact"))
_rollback = jax.jit(rollback)
_truncate = jax.jit(truncate)
_room = jax.jit(room)
_flush = jax.jit(flush)
_update = jax.jit(update)
_select = jax.jit(select)
_attend = jax.jit(attend)


def decode_equals_single_steps(policy: Policy, spec: CacheSpec) -> None:
    """Several tokens in one `decode` read, return and store the same as one step after the
    other, flushes included.
    """
    tokens = random_tokens(spec, 23)
    lengths = _before_a_flush(policy, spec, 2)
    together, _ = fill(new_cache(policy, spec), tokens, lengths)
    single = together
    for call in range(2):
        count = (np.array([STEPS, 3, 0])[np.arange(spec.batch) % 3] + call) % (STEPS + 1)
        count = np.minimum(count, spec.capacity - 1 - lengths)
        out, together, info = _decode(
            together, *tokens.at(lengths[:, None] + np.arange(STEPS)), lengths=count
        )
        for t in range(STEPS):
            active = t < count
            want, single, seen = step(single, tokens, lengths + np.minimum(t, count), active)
            assert_close(
                np.asarray(out, np.float32)[active, t], want[active], spec, f"step {t}"
            )
            assert_same(
                np.asarray(info.attended)[t, active],
                np.asarray(seen.attended)[active],
                f"attended, step {t}",
            )
            if seen.positions is not None:
                got, wanted = (
                    np.sort(np.asarray(a)[active]) for a in (info.positions[t], seen.positions)
                )
                assert_same(got, wanted, f"positions read, step {t}")
        lengths = lengths + count
        # A step also flushes full blocks of rows that take no token, so single steps may flush
        # where a call need not.
        assert_same_contents(_flush(together), _flush(single), spec, f"state after call {call}")
        assert (np.asarray(together.length) == lengths).all(), (
            "the length is not that of the steps"
        )


def exact_steps_attend_to_all_tokens(policy: Policy, spec: CacheSpec) -> None:
    """Steps with `exact` attend to every token up to their own, whatever the policy selects,
    one at a time and several at once.

    They store what other steps store, so that a step with a selection may follow.
    """
    require(policy.takes_exact, "the policy's steps take no `exact`")
    tokens = random_tokens(spec, 29)
    lengths = _before_a_flush(policy, spec, 3)
    start, _ = fill(new_cache(policy, spec), tokens, lengths)
    start = _flush(start)
    most = np.minimum(np.array([STEPS, 2, 0])[np.arange(spec.batch) % 3], _room(start))
    for T in (STEPS, 1):
        count = np.minimum(most, T)
        new = tokens.at(lengths[:, None] + np.arange(T))
        out, cache, info = _decode(start, *new, lengths=count, flush=False, exact=True)
        for b, t in np.argwhere(np.arange(T)[None] < count[:, None]):
            end = int(lengths[b]) + t + 1
            k, v = as_stored(
                policy, spec, tokens.k[b, :end], tokens.v[b, :end], int(lengths[b])
            )
            got = np.asarray(out, np.float32)[b, t]
            want = dense(tokens.q[b, end - 1], k, v)
            assert_close(got, want, spec, f"row {b}, step {t} of {T}", policy)
            attended = np.asarray(info.attended)[t, b]
            assert (attended == end).all(), f"attended to {attended.tolist()} of {end} tokens"
        if T == 1:
            _, other, _ = _decode(start, *new, lengths=count, flush=False)
            assert_same_contents(cache, other, spec, "the state after a step")


def three_calls_equal_a_step(policy: Policy, spec: CacheSpec) -> None:
    """`update`, `select` and `attend` with the selection give the output and the cache of
    `attention`.

    A policy that selects nothing says so, and `attend` without a selection gives the same.
    """
    tokens = random_tokens(spec, 28)
    lengths = ragged_lengths(policy, spec)
    at_once, _ = fill(new_cache(policy, spec), tokens, lengths)
    by_hand = at_once
    for i in range(2):
        want, at_once, info = step(at_once, tokens, lengths + i)
        q, k, v = tokens.at((lengths + i)[:, None])
        by_hand = _update(by_hand, k, v)
        selection = None
        if info.selection is not None:
            selection = _select(by_hand, q)
            if info.fresh is None:
                assert slots_of(selection) == slots_of(info.selection), (
                    f"step {i}: select names other slots"
                )
        else:
            try:
                jax.eval_shape(select, by_hand, q)
            except ValueError:
                pass
            else:
                raise AssertionError("the policy selects, but its step reports no selection")
        out, by_hand = _attend(by_hand, q, selection)
        assert_close(np.asarray(out, np.float32)[:, 0], want, spec, f"step {i}")
    assert_same_contents(by_hand, at_once, spec, "the state after two steps")


def rollback_forgets_what_came_after(policy: Policy, spec: CacheSpec) -> None:
    """After tokens are taken back, the cache is as if they had never come; other tokens cannot
    be taken back.
    """
    require(
        policy.reversible,
        "the policy takes no tokens back (no `rollback`, `earliest` and `free`)",
    )
    tokens = random_tokens(spec, 24)
    other = random_tokens(spec, 25)
    lengths = _before_a_flush(policy, spec, 3)
    start, _ = fill(new_cache(policy, spec), tokens, lengths)
    start = _flush(start)
    count = np.minimum(STEPS, np.asarray(_room(start)))
    kept = np.minimum(np.arange(spec.batch) % 3, count)
    _, reference, _ = _take(start, tokens, lengths, kept)
    _, further, _ = _take(reference, other, lengths + kept, count - kept)
    back = _rollback(further, lengths + kept)
    assert (np.asarray(back.length) == lengths + kept).all(), "rollback gave another length"
    assert_same_contents(back, reference, spec, "state after rollback")
    out, _, info = step(back, tokens, lengths + kept)
    want, _, wanted = step(reference, tokens, lengths + kept)
    assert_same((out, info.attended), (want, wanted.attended), "the step after rollback")

    earliest = np.asarray(policy.earliest(start.state))
    first, _ = fill(new_cache(policy, spec), tokens, earliest)
    assert_same_contents(
        _rollback(start, earliest), first, spec, "state at the earliest length"
    )
    for wrong in (earliest - 1, lengths + 1):
        try:
            rollback(start, wrong)
        except ValueError:
            continue
        raise AssertionError(
            f"rollback to {wrong.tolist()} of {lengths.tolist()} tokens was not refused"
        )


def truncate_gives_the_shorter_prompt(policy: Policy, spec: CacheSpec) -> None:
    """A cache that is cut to any earlier length equals the cache of a prompt of that length,
    also in later steps.
    """
    tokens = random_tokens(spec, 26)
    lengths = ragged_lengths(policy, spec)
    lengths = np.maximum(lengths, np.minimum(3 * spec.capacity // 4, spec.capacity - 3))
    whole, _ = fill(new_cache(policy, spec), tokens, lengths)
    try:
        jax.eval_shape(truncate, whole, lengths)
    except ValueError as reason:
        raise DoesNotApply(str(reason)) from None
    shares = np.array([0.0, 0.4, 1.0, 0.7])[np.arange(spec.batch) % 4]
    for target in (
        (lengths * shares).astype(np.int32),
        np.maximum(lengths - 1 - np.arange(spec.batch) * 9, 0),
    ):
        cut = _truncate(whole, target)
        assert (np.asarray(cut.length) == target).all(), "truncate gave another length"
        shorter, _ = fill(new_cache(policy, spec), tokens, target)
        assert_same_contents(cut, shorter, spec, f"the cache cut to {target.tolist()} tokens")
    other = random_tokens(spec, 27)
    out, _, info = step(cut, other, target)
    want, _, wanted = step(shorter, other, target)
    assert_same((out, info.attended), (want, wanted.attended), "the step after truncate")
    for wrong in (lengths + 1, np.full_like(lengths, -1)):
        try:
            truncate(whole, wrong)
        except ValueError:
            continue
        raise AssertionError(
            f"truncate to {wrong.tolist()} of {lengths.tolist()} tokens was not refused"
        )


def _take(cache: LayerCache, tokens: Tokens, lengths: np.ndarray, count: np.ndarray) -> Any:
    return _decode(
        cache, *tokens.at(lengths[:, None] + np.arange(STEPS)), lengths=count, flush=False
    )


def _before_a_flush(policy: Policy, spec: CacheSpec, tokens: int) -> np.ndarray:
    """Lengths by row; in the first row, the recent block is full after `tokens` more."""
    lengths = np.minimum(ragged_lengths(policy, spec), spec.capacity - 3 * STEPS)
    if has_history(policy):
        inner = core(policy)
        first = sink(policy) + inner.demote.slots(inner.local) - tokens
        chunks = max(spec.capacity - 3 * STEPS - first, 0) // inner.demote.leave
        lengths[0] = min(first + chunks * inner.demote.leave, lengths.max())
    return np.maximum(lengths, 1)
