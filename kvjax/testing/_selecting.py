"""Laws of selections: which tokens a step selects."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.cache.cache import LayerCache
from kvjax.numerics.partial import Logits, group_queries
from kvjax.numerics.selection import Selection, mass_recall, unpack
from kvjax.policies import Policy, Step
from kvjax.spec import CacheSpec
from kvjax.testing._anatomy import (
    core,
    core_state,
    evicts,
    has_budget,
    has_history,
    held_after,
    ranks,
    require,
    samples,
    selects,
    sink,
    with_fields,
)
from kvjax.testing._drive import fill, new_cache, ragged_lengths, random_tokens, step
from kvjax.testing._expect import assert_attended, slots_of, zones


def selected_slots_are_valid_and_unique(policy: Policy, spec: CacheSpec) -> None:
    """A step attends to the tokens that there are, up to its budget, and never twice to a
    token.
    """
    tokens = random_tokens(spec, 8)
    lengths = ragged_lengths(policy, spec)
    cache, _ = fill(new_cache(policy, spec), tokens, lengths)
    inner = core(policy)
    for i in range(3):
        _, cache, info = step(cache, tokens, lengths + i)
        stored = lengths + i + 1
        if not selects(policy) and not samples(policy):
            assert info.selection is None, (
                "a policy that reads all of its tokens reports a selection"
            )
            # Heads hold different numbers, `budget` on average.
            if hasattr(inner, "head_bounds"):
                info = info._replace(
                    attended=np.asarray(info.attended).mean(axis=1, keepdims=True)
                )
            bounded = has_budget(policy) and (evicts(policy) or not ranks(policy))
            assert_attended(info, held_after(policy, lengths, stored) if bounded else stored)
            continue
        room = np.full(stored.shape, inner.budget)
        # A local window whose oldest tokens leave in chunks is not always full.
        if has_history(policy):
            block = np.asarray(core_state(cache.state).recent.count)
            missing = np.maximum(inner.local - block, 0)
            room = np.where(stored > sink(policy) + inner.local, room - missing, room)
        limit = np.where(
            stored >= getattr(inner, "dense_below", 0), np.minimum(stored, room), stored
        )
        if selects(policy) and inner.selector.unit == 1:
            assert_attended(info, limit)
        assert (np.asarray(info.attended) <= limit[:, None] + 0.01).all(), info.attended
        require(info.selection is not None, "the policy's Info has no selection")
        _check_selection(info.selection, cache)


def recall_grows_with_budget(policy: Policy, spec: CacheSpec) -> None:
    """A larger budget selects all that a smaller one selects, so the softmax mass of the
    selection does not fall.
    """
    require(selects(policy), "the policy selects nothing (no `selector` with a `budget`)")
    inner = core(policy)
    require(
        has_history(policy) and hasattr(inner, "select"),
        "the policy has no `select` over a history of chunks",
    )
    tokens = random_tokens(spec, 9)
    lengths = ragged_lengths(policy, spec)
    cache, _ = fill(new_cache(policy, spec), tokens, lengths)
    state = core_state(cache.state)
    q = group_queries(jnp.asarray(tokens.at(lengths[:, None])[0][:, 0]), spec.kv_heads)
    stored = state.store.slots
    keys = np.zeros(
        (spec.batch, spec.kv_heads, stored + state.recent.slots, spec.head_dim), np.float32
    )
    for b, n in enumerate(lengths):
        chunks, recent = zones(policy, spec, n)
        history = [position for chunk in chunks for position in chunk]
        keys[b, :, : len(history)] = np.swapaxes(tokens.k[b, history], 0, 1)
        keys[b, :, stored : stored + len(recent)] = np.swapaxes(tokens.k[b, recent], 0, 1)

    @partial(jax.jit, static_argnums=1)
    def selection_and_mass(st: Any, wider: Any, keys: Array) -> tuple[Selection, Array]:
        logits = (
            jnp.einsum("bkgd,bksd->bkgs", q.astype(jnp.float32), keys) * spec.head_dim**-0.5
        )
        valid = [
            jnp.arange(b.slots, dtype=jnp.int32)[None] < b.count[:, None]
            for b in (st.store, st.recent)
        ]
        selection = unpack(
            wider.select(
                st, q, Step(Logits(q.shape[-1] ** -0.5)), num_sorted_last=st.store.slots
            )
        )
        return selection, mass_recall(selection, logits, jnp.concatenate(valid, axis=1))

    base = sink(policy) + inner.local + getattr(inner, "beside", 0)
    unit = inner.selector.unit
    before = None
    selected = None
    dense = {"dense_below": 0} if hasattr(inner, "dense_below") else {}
    for more in (unit, 3 * unit, spec.capacity):
        wider = with_fields(inner, budget=base + more, **dense)
        selection, mass = selection_and_mass(state, wider, keys)
        mass = np.asarray(mass)
        members = slots_of(selection)
        assert before is None or (mass >= before - 1e-6).all(), (
            f"mass fell at budget {base + more}"
        )
        kept = selected is None or all(a <= b for a, b in zip(selected, members, strict=True))
        assert kept, "a larger budget dropped a selected slot"
        before = mass
        selected = members


def outstanding_key_is_read(policy: Policy, spec: CacheSpec) -> None:
    """A step reads the stored token whose key points along its query and is by far the longest, in
    every row and KV head.

    A selector that indexes keys at other slots than their own, or scores other units, misses it.
    """
    require(selects(policy), "the policy selects nothing (no `selector` with a `budget`)")
    require(
        has_history(policy),
        "the policy has no history of chunks (the fields `store`, `demote` and `local`)",
    )
    inner = core(policy)
    always = sink(policy) + inner.local + getattr(inner, "beside", 0)
    require(inner.budget > always, "the budget has no room for a selection")
    tokens = random_tokens(spec, 23)
    lengths = ragged_lengths(policy, spec)
    rng = np.random.default_rng(23)
    places = np.zeros((spec.batch, spec.kv_heads), int)
    for b, n in enumerate(lengths):
        history = [position for chunk in zones(policy, spec, n)[0] for position in chunk]
        require(
            bool(history), f"a row of {n} tokens has no history yet; give a larger capacity"
        )
        for head in range(spec.kv_heads):
            places[b, head] = rng.choice(history)
            query = rng.standard_normal(spec.head_dim)
            group = slice(head * spec.group, (head + 1) * spec.group)
            tokens.q[b, n : n + 2, group] = query
            longest = np.linalg.norm(tokens.k[b, :, head].astype(np.float64), axis=-1).max()
            tokens.k[b, places[b, head], head] = 4 * longest * query / np.linalg.norm(query)

    cache, _ = fill(new_cache(policy, spec), tokens, lengths)
    # A policy that attends to what the step before recalled has it at the second step.
    for i in range(2):
        _, cache, info = step(cache, tokens, lengths + i)
    require(info.positions is not None, "the policy's Info has no positions")
    positions = np.asarray(info.positions)
    for b, head, part in np.ndindex(*positions.shape[:3]):
        place = places[b, head]
        assert place in positions[b, head, part], (
            f"row {b}, KV head {head}: the token at position {place} is not read, though its key is by far the best"
        )


def _check_selection(selection: Selection | None, cache: LayerCache) -> None:
    assert selection is not None
    st = core_state(cache.state)
    slots = np.asarray(selection.slots)
    valid = np.asarray(selection.valid)
    past = st.store.slots + st.recent.slots
    assert ((slots >= 0) & (slots < past)).all(), "a slot out of range"
    for b, k, h in np.ndindex(*slots.shape[:3]):
        mine = slots[b, k, h][valid[b, k, h]]
        assert len(set(mine.tolist())) == len(mine), f"row {b} head {k}: a slot twice"
        stored = mine[mine < st.store.slots]
        assert (stored < int(st.store.count[b])).all(), f"row {b} head {k}: a slot past count"
