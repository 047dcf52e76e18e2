"""Laws of storing: prompts and steps store the same, a row depends only on its own tokens, and
room is respected.
"""

from __future__ import annotations

import dataclasses
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.cache import raise_on_overflow
from kvjax.cache.editing import insert, take_rows
from kvjax.cache.flushing import flush
from kvjax.policies import Policy
from kvjax.spec import CacheSpec
from kvjax.testing._anatomy import (
    core,
    core_state,
    evicts,
    held_after,
    memory_of_steps,
    parts,
    ranks,
    replace_core,
    require,
    with_part,
)
from kvjax.testing._drive import (
    CHUNK,
    Tokens,
    fill,
    new_cache,
    prefill_chunk,
    ragged_lengths,
    random_tokens,
    step,
    with_room,
)
from kvjax.testing._expect import (
    assert_close,
    assert_same,
    assert_same_contents,
    held_positions,
    poison,
)


def prefill_equals_prefill_then_updates(policy: Policy, spec: CacheSpec) -> None:
    """A prompt of T1 + T2 tokens gives the same state as T1 tokens and T2 decode steps, in
    every zone.

    An evictor may weigh the queries of a prompt differently: then it gets slots for all tokens,
    which are the same.
    """
    policy = with_room(policy, spec)
    tokens = random_tokens(spec, 2)
    first = ragged_lengths(policy, spec) // 2
    last = first + min(70, spec.capacity - 1 - int(first.max()))
    whole, _ = fill(new_cache(policy, spec), tokens, last)
    steps, _ = fill(new_cache(policy, spec), tokens, first)
    for i in range(int((last - first).max())):
        _, steps, _ = step(steps, tokens, first + i)
    steps = flush(steps)
    # Names that tell prompts from steps.
    for name in ("evidence",) * ranks(policy) + (
        "memory",
        "pinned",
    ):
        if hasattr(whole.state, name):
            whole, steps = (
                dataclasses.replace(c, state=with_part(c.state, name, None))
                for c in (whole, steps)
            )
    assert_same_contents(steps, whole, spec, "state")
    assert (np.asarray(whole.length) == last).all()


def row_ignores_other_rows(policy: Policy, spec: CacheSpec) -> None:
    """The last row is the same to the bit, whatever the other rows hold and however long they
    are.
    """
    tokens = random_tokens(spec, 3)
    other = random_tokens(spec, 4)
    mixed = Tokens(
        *(
            np.concatenate([b[:-1], a[-1:]])
            for a, b in zip(_arrays(tokens), _arrays(other), strict=True)
        )
    )
    lengths = ragged_lengths(policy, spec)
    others = np.concatenate([lengths[:-1] // 3, lengths[-1:]])
    results = []
    for data, n in ((tokens, lengths), (mixed, others)):
        cache, _ = fill(new_cache(policy, spec), data, n)
        outs = []
        for i in range(3):
            out, cache, _ = step(
                cache, data, n + i, active=np.arange(spec.batch)[::-1] % (i + 1) == 0
            )
            outs.append(out[-1])
        results.append((outs, cache))
    (outs, cache), (outs_mixed, cache_mixed) = results
    assert_same(outs_mixed, outs, "last row")
    assert_same_contents(cache_mixed, cache, spec, "last row", row=spec.batch - 1)


def padding_does_not_matter(policy: Policy, spec: CacheSpec) -> None:
    """Tokens past a row's length may be anything, even NaN."""
    tokens = random_tokens(spec, 5)
    lengths = ragged_lengths(policy, spec)
    past = (np.arange(spec.capacity) >= lengths[:, None])[..., None, None]
    nothing = np.asarray(np.nan, tokens.v.dtype)
    bad = Tokens(*(np.where(past, nothing, a) for a in (tokens.q, tokens.k, tokens.v)))
    clean, out_clean = fill(new_cache(policy, spec), tokens, lengths)
    dirty, out_dirty = fill(new_cache(policy, spec), bad, lengths)
    assert_same(out_dirty, out_clean, "prompt output")
    assert_same_contents(dirty, clean, spec, "state")
    assert_same(step(dirty, tokens, lengths)[0], step(clean, tokens, lengths)[0], "step")


def slots_past_count_do_not_matter(policy: Policy, spec: CacheSpec) -> None:
    """Unused slots are never read: the law fills them with NaN keys and scales, values of 1e4
    and codes of all ones.
    """
    tokens = random_tokens(spec, 6)
    lengths = ragged_lengths(policy, spec) // 2
    cache, _ = fill(new_cache(policy, spec), tokens, lengths)
    poisoned = dataclasses.replace(cache, state=poison(cache))
    for i in range(2):
        out, cache, info = step(cache, tokens, lengths + i)
        out_poisoned, poisoned, info_poisoned = step(poisoned, tokens, lengths + i)
        why = "once unused slots hold NaN keys and scales and values of 1e4 (keep_valid zeroes values)"
        assert_same(out_poisoned, out, f"{why}: the output of a step")
        assert_same(
            info_poisoned.attended, info.attended, f"{why}: the tokens that a step attended"
        )


def inactive_rows_store_nothing(policy: Policy, spec: CacheSpec) -> None:
    """A row that is not active, or whose chunk has length 0, keeps its valid part to the bit."""
    tokens = random_tokens(spec, 11)
    lengths = ragged_lengths(policy, spec)
    cache, _ = fill(new_cache(policy, spec), tokens, lengths)
    _, after, _ = step(cache, tokens, lengths, active=np.zeros(spec.batch, bool))
    assert_same_contents(after, cache, spec, "after a step")
    assert_same(
        memory_of_steps(after.state), memory_of_steps(cache.state), "what a step remembers"
    )
    _, after = prefill_chunk(
        cache,
        *tokens.at(np.arange(CHUNK)[None].repeat(spec.batch, 0)),
        lengths=np.zeros(spec.batch, np.int32),
    )
    assert_same_contents(after, cache, spec, "after a prompt")


def insert_replaces_one_row(policy: Policy, spec: CacheSpec) -> None:
    """A row that is prefilled alone and inserted continues as it would alone; the other rows do
    not change.
    """
    one = dataclasses.replace(spec, batch=1)
    tokens = random_tokens(spec, 12)
    lengths = ragged_lengths(policy, spec) // 2
    row = spec.batch - 1
    alone = Tokens(*(a[row:] for a in _arrays(random_tokens(spec, 13))))
    n = spec.capacity // 2
    prefix, _ = fill(new_cache(policy, one), alone, [n])
    cache, _ = fill(new_cache(policy, spec), tokens, lengths)
    joined = insert(cache, prefix, row)
    mixed = Tokens(
        *(
            np.concatenate([a[:row], b])
            for a, b in zip(_arrays(tokens), _arrays(alone), strict=True)
        )
    )
    at = np.concatenate([lengths[:row], [n]])
    out, _, _ = step(joined, mixed, at)
    assert_close(out[row:], step(prefix, alone, [n])[0], spec, "inserted row")
    assert_same(out[:row], step(cache, tokens, lengths)[0][:row], "other rows")


def taken_rows_continue_as_they_were(policy: Policy, spec: CacheSpec) -> None:
    """Rows that are repeated, reordered and dropped give the outputs of the rows that they
    were, in two more steps.
    """
    tokens = random_tokens(spec, 15)
    lengths = ragged_lengths(policy, spec)
    cache, _ = fill(new_cache(policy, spec), tokens, lengths)
    rows = np.array([spec.batch - 1, spec.batch - 1, *range(spec.batch)])[: spec.batch]
    taken = take_rows(cache, rows)
    moved = Tokens(*(a[rows] for a in _arrays(tokens)))
    assert (np.asarray(taken.length) == lengths[rows]).all(), (
        "the lengths are not those of the rows"
    )
    for i in range(2):
        out, cache, _ = step(cache, tokens, lengths + i)
        out_moved, taken, _ = step(taken, moved, lengths[rows] + i)
        assert_same(out_moved, out[rows], f"step {i} of the taken rows")


def full_cache_drops_and_says_so(policy: Policy, spec: CacheSpec) -> None:
    """A token without room does not change the stored tokens, and `raise_on_overflow` raises."""
    require(not evicts(policy), "a policy that evicts always has room")
    tokens = random_tokens(spec, 14)
    cache, _ = fill(new_cache(policy, spec), tokens, np.full(spec.batch, spec.capacity - 1))
    _, cache, _ = step(cache, tokens, np.full(spec.batch, spec.capacity - 1))
    raise_on_overflow(cache)
    for _ in range(3 * spec.capacity):  # some zones hold a few tokens more than the capacity
        before = cache
        _, cache, _ = step(cache, tokens, np.full(spec.batch, spec.capacity - 1))
        if np.asarray(cache.state.overflow).any():
            break
    else:
        raise AssertionError("no overflow, although more tokens came than the capacity")
    after, before = (
        dataclasses.replace(c, state=_without_flag(c.state)) for c in (cache, before)
    )
    assert_same_contents(after, before, spec, "what was stored")
    try:
        raise_on_overflow(cache)
    except RuntimeError:
        return
    raise AssertionError("raise_on_overflow did not raise")


def budget_bounds_what_is_held(policy: Policy, spec: CacheSpec) -> None:
    """Each kv head holds min(budget, tokens received) different tokens, however many come,
    including the newest.

    If a policy has `head_bounds`, the fewest and the most tokens of a head, heads hold that
    many on average. The tokens of a sink are always included, all tokens are unchanged to the
    bit, and the state does not grow with the capacity.
    """
    require(evicts(policy), "the policy evicts nothing (no `evictor` with a `budget`)")
    inner = core(policy)
    tokens = random_tokens(spec, 18)
    lengths = ragged_lengths(policy, spec)
    cache, _ = fill(new_cache(policy, spec), tokens, lengths)
    for i in range(30):
        _, cache, info = step(cache, tokens, (lengths + i) % spec.capacity)
        received = lengths + i + 1
        positions = held_positions(cache)
        st = core_state(cache.state)
        counts = np.array([[len(mine) for mine in heads] for heads in positions])
        np.testing.assert_array_equal(np.asarray(info.attended), counts)
        held = held_after(policy, lengths, received)
        np.testing.assert_array_equal(counts.sum(axis=1), spec.kv_heads * held)
        for b, k in np.ndindex(spec.batch, spec.kv_heads):
            mine = positions[b][k]
            count = received[b]
            fewest, most = getattr(inner, "head_bounds", (held[b], held[b]))
            assert len(set(mine)) == len(mine), f"row {b} head {k} holds {sorted(mine)}"
            assert min(count, fewest) <= len(mine) <= min(count, most), (
                f"row {b} head {k} holds {sorted(mine)}"
            )
            assert count - 1 in mine, f"row {b} head {k} lost its newest token"
            first = getattr(inner.evictor, "sink", 0)
            assert set(range(min(first, count))) <= set(mine), (
                f"row {b} head {k} lost a token of its sink"
            )
            for stored, given in ((st.tokens.k, tokens.k), (st.tokens.v, tokens.v)):
                want = given[b, np.array(mine) % spec.capacity, k]
                assert_same(np.asarray(stored)[b, k, : len(mine)], want, f"row {b} head {k}")
    np.testing.assert_array_equal(np.asarray(cache.length), received)
    raise_on_overflow(cache)
    sizes = [
        sum(
            a.size * a.dtype.itemsize
            for a in jax.tree.leaves(jax.eval_shape(partial(policy.init, larger)))
        )
        for larger in (
            dataclasses.replace(spec, capacity=n * max(spec.capacity, inner.budget))
            for n in (1, 1000)
        )
    ]
    assert sizes[0] == sizes[1], f"{sizes} bytes at capacities 1 to 1000"


def checkpoint_restores_to_the_bit(policy: Policy, spec: CacheSpec) -> None:
    """A cache that is saved with orbax-checkpoint is restored unchanged."""
    import orbax.checkpoint as ocp

    tokens = random_tokens(spec, 17)
    lengths = ragged_lengths(policy, spec)
    cache, _ = fill(new_cache(policy, spec), tokens, lengths)
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as saver:
        path = Path(folder) / "cache"
        saver.save(path, cache.state)
        saver.wait_until_finished()
        restored = saver.restore(
            path, jax.tree.map(ocp.utils.to_shape_dtype_struct, cache.state)
        )
    chex.assert_trees_all_equal_shapes_and_dtypes(restored, cache.state)
    assert_same(restored, cache.state, "restored state")


def _arrays(tokens: Tokens) -> tuple[np.ndarray, ...]:
    return tokens.q, tokens.k, tokens.v


def _without_flag(state: Any) -> Any:
    inner = core_state(state)
    # A state whose class has a property `overflow` needs another name.
    for flag in (
        "overflow",
        "dropped",
    ):
        if flag in parts(inner):
            return replace_core(state, with_part(inner, flag, jnp.zeros_like(inner.overflow)))
    return state
