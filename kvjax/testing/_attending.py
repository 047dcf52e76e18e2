"""Laws of attention: the tokens that a step and a prompt attend to."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax import Array

from kvjax.cache.cache import raise_on_overflow
from kvjax.policies import Policy, Speculative
from kvjax.spec import CacheSpec
from kvjax.testing._anatomy import (
    core,
    core_state,
    evicts,
    has_history,
    replace_core,
    require,
    samples,
    with_part,
    without_slots,
)
from kvjax.testing._drive import (
    CHUNK,
    Tokens,
    attending_to_all,
    edge_lengths,
    fill,
    new_cache,
    ragged_lengths,
    random_tokens,
    step,
    with_room,
)
from kvjax.testing._expect import (
    as_stored,
    assert_attended,
    assert_close,
    assert_same,
    dense,
    held_positions,
    require_read_as_stored,
)


def budget_of_all_is_dense_attention(policy: Policy, spec: CacheSpec) -> None:
    """With a budget of at least the stored tokens, a step is attention over all of them, at
    every edge length.

    The attention is exact, or, with a store of few bits, over the decoded values.
    """
    policy = attending_to_all(policy, spec)
    tokens = random_tokens(spec)
    edges = edge_lengths(policy, spec)
    edges += [edges[-1]] * (-len(edges) % spec.batch)
    for first in range(0, len(edges), spec.batch):
        lengths = np.array(edges[first : first + spec.batch])
        cache, _ = fill(new_cache(policy, spec), tokens, lengths)
        out, cache, info = step(cache, tokens, lengths)
        for b, n in enumerate(lengths):
            want = dense(
                tokens.q[b, n],
                *as_stored(policy, spec, tokens.k[b, : n + 1], tokens.v[b, : n + 1], n),
            )
            assert_close(out[b], want, spec, f"length {n}", policy)
        assert_attended(info, lengths + 1)
        np.testing.assert_array_equal(np.asarray(cache.length), lengths + 1)
        raise_on_overflow(cache)


def prompt_attends_causally(policy: Policy, spec: CacheSpec) -> None:
    """A prompt in chunks gives exact causal attention, whatever later steps select.

    A chunk reads itself exactly, and earlier ones as they are stored.
    """
    policy, tokens, lengths = (
        with_room(policy, spec),
        random_tokens(spec, 1),
        ragged_lengths(policy, spec),
    )
    _, out = fill(new_cache(policy, spec), tokens, lengths)
    for b in range(spec.batch):
        for t in {0, 1, CHUNK - 1, CHUNK, int(lengths[b]) - 1} & set(range(int(lengths[b]))):
            before = t // CHUNK * CHUNK
            k, v = as_stored(policy, spec, tokens.k[b, : t + 1], tokens.v[b, : t + 1], before)
            want = dense(tokens.q[b, t], k, v)
            assert_close(out[b, t], want, spec, f"row {b}, position {t}", policy)


def order_of_chunks_does_not_matter(policy: Policy, spec: CacheSpec) -> None:
    """Chunks of the history may be in any order: attention after RoPE does not depend on the
    order of keys.
    """
    require(
        has_history(policy),
        "the policy has no history of chunks (the fields `store`, `demote` and `local`)",
    )
    require(
        not samples(policy),
        "keys are centred by their place in the history, so chunks cannot change places",
    )
    tokens = random_tokens(spec, 7)
    lengths = np.full(spec.batch, spec.capacity - 2)
    cache, _ = fill(new_cache(policy, spec), tokens, lengths)
    st = core_state(cache.state)
    chunk = core(policy).demote.leave
    chunks = int(np.asarray(st.store.count).min()) // chunk
    require(
        chunks >= 2,
        f"the capacity of {spec.capacity} has {chunks} chunks of {chunk}; give a spec with more",
    )
    order = np.concatenate(
        [np.arange(chunks)[::-1], np.arange(chunks, st.store.slots // chunk)]
    )

    def move(path: Any, leaf: Array) -> Array:
        if leaf.ndim < 3 or without_slots(path):
            return leaf
        held = np.asarray(leaf)
        blocks = held.reshape(*leaf.shape[:2], len(order), -1, *leaf.shape[3:])
        return jax.device_put(blocks[:, :, order].reshape(leaf.shape), leaf.sharding)

    moved = with_part(st, "store", jax.tree_util.tree_map_with_path(move, st.store))
    if hasattr(st, "index"):
        moved = with_part(moved, "index", jax.tree_util.tree_map_with_path(move, st.index))
    out, _, info = step(cache, tokens, lengths)
    moved_cache = dataclasses.replace(cache, state=replace_core(cache.state, moved))
    out_moved, _, info_moved = step(moved_cache, tokens, lengths)
    assert_close(out_moved, out, spec, "step")
    assert_same(info_moved.attended, info.attended, "attended")


def every_token_is_in_one_zone(policy: Policy, spec: CacheSpec) -> None:
    """With equal keys every attended token has the same weight, so the output is the mean of
    all values, each once.

    Values are as their zone returns them.
    """
    policy = attending_to_all(policy, spec)
    tokens = random_tokens(spec, 10)
    tokens = Tokens(tokens.q, np.ones_like(tokens.k), tokens.v)
    lengths = ragged_lengths(policy, spec)
    cache, _ = fill(new_cache(policy, spec), tokens, lengths)
    for i in range(19):
        out, cache, info = step(cache, tokens, lengths + i)
        for b in range(spec.batch):
            n = int(lengths[b]) + i + 1
            # A recall of the previous step has tokens as they were stored then.
            new_mean, old_mean = (
                np.asarray(
                    as_stored(policy, spec, tokens.k[b, :n], tokens.v[b, :n], size)[1],
                    np.float64,
                ).mean(axis=0)
                for size in (n - 1, max(n - 2, 0))
            )
            in_place = isinstance(policy, Speculative) and not policy.retrieval.store.recalls
            fresh = (
                np.ones(spec.kv_heads, bool)
                if info.fresh is None or in_place
                else np.asarray(info.fresh[b])
            )
            mean = np.where(fresh[:, None], new_mean, old_mean).repeat(spec.group, axis=0)
            assert_close(out[b], mean, spec, f"row {b} with {n} tokens", policy)
        assert_attended(info, lengths + i + 1)


def step_attends_to_the_positions_it_tells(policy: Policy, spec: CacheSpec) -> None:
    """The output of a step is attention over the tokens of `Info.positions`, each read once and
    as it is stored.

    If a policy weights tokens, `Info.log_weights` are added to their logits.
    """
    tokens = random_tokens(spec, 22)
    lengths = ragged_lengths(policy, spec)
    cache, _ = fill(new_cache(policy, spec), tokens, lengths)
    for i in range(3):
        out, cache, info = step(cache, tokens, lengths + i)
        require(info.positions is not None, "the policy's Info has no positions")
        positions = np.asarray(info.positions)
        for b, at in enumerate(lengths + i):
            k, v = (a[b, : at + 1] for a in (tokens.k, tokens.v))
            stored = as_stored(policy, spec, k, v, at)
            require_read_as_stored(cache, stored, (k, v))
            for head in range(spec.q_heads):
                kv = head // spec.group
                index = b, kv, head % spec.group if positions.shape[2] > 1 else 0
                order = np.argsort(positions[index])
                order = order[positions[index][order] >= 0]
                mine = positions[index][order]
                assert (np.diff(mine) > 0).all(), f"row {b}, head {head}: a position twice"
                assert (mine <= at).all(), (
                    f"row {b}, head {head}: a position past the newest token"
                )
                weights = (
                    0.0
                    if info.log_weights is None
                    else np.asarray(info.log_weights)[index][order]
                )
                keys, values = (a[mine, kv : kv + 1] for a in stored)
                want = dense(tokens.q[b, at, head : head + 1], keys, values, weights)
                assert_close(
                    out[b, head : head + 1],
                    want,
                    spec,
                    f"row {b}, head {head}, position {at}",
                    policy,
                )


def step_attends_to_what_is_held(policy: Policy, spec: CacheSpec) -> None:
    """A step of a policy that evicts is exact attention over the tokens that each kv head then
    holds.

    If the state has a `compensation`, the mean key and value of the evicted tokens, it counts
    once for each of them. Where held tokens close up, each is rotated to its place among them,
    and the query to that of its own token.
    """
    require(evicts(policy), "the policy evicts nothing (no `evictor` with a `budget`)")
    rope = _closing_up(policy)
    tokens = random_tokens(spec, 19)
    lengths = ragged_lengths(policy, spec)
    cache, _ = fill(new_cache(policy, spec), tokens, lengths)
    for i in range(3):
        out, cache, _ = step(cache, tokens, lengths + i)
        for b, k in np.ndindex(spec.batch, spec.kv_heads):
            mine = held_positions(cache)[b][k]
            heads = slice(k * spec.group, (k + 1) * spec.group)
            q = tokens.q[b, lengths[b] + i, heads]
            keys = tokens.k[b, mine, k]
            values = tokens.v[b, mine, k]
            if rope is not None:
                turns = np.argsort(np.argsort(mine)) - mine
                keys = _turned(keys, turns, rope)
                q = _turned(q, np.max(turns + mine) - (lengths[b] + i), rope)
            weights = np.zeros(len(mine))
            gone = sorted(set(range(int(lengths[b]) + i + 1)) - set(mine))
            if hasattr(cache.state, "compensation") and gone:
                keys, values = (
                    np.concatenate([a, of[b, gone, k].astype(np.float64).mean(axis=0)[None]])
                    for a, of in ((keys, tokens.k), (values, tokens.v))
                )
                weights = np.append(weights, np.log(len(gone)))
            want = dense(q, keys[:, None], values[:, None], weights)
            assert_close(out[b, heads], want, spec, f"row {b}, kv head {k}")


def _closing_up(policy: Policy) -> Any:
    """The RoPE by which a policy rotates tokens to their places among those that are held; None
    if they stay where they were.
    """
    inner = core(policy)
    evictor: Any = inner.evictor
    own = getattr(inner, "rope", None)
    return evictor.rope if own is None and evictor.renumbered else own


def _turned(x: np.ndarray, by: Any, rope: Any) -> np.ndarray:
    """Arrays [..., D] of keys or queries, rotated by so many places more."""
    angle = np.multiply.outer(by, np.asarray(rope.frequencies(x.shape[-1]), np.float64))
    low, high = np.split(x.astype(np.float64), 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
