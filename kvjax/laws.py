"""The laws of a cache policy, as functions that anyone can run on a policy of their own.

    from kvjax import laws
    laws.check(MyPolicy(...), spec)                  # all laws; AssertionError names the first that does not hold
    laws.LAWS["row_ignores_other_rows"](policy, spec)

A law takes a policy and a CacheSpec and compares with the simplest independent thing: attention in numpy float64, or
the same policy fed in another way. Where a store keeps keys and values in few bits, the attention to compare with is
over what it gives back for those tokens that have left the recent block, and over exact ones for all others. Laws
that speak of a budget or of a selection ask nothing of policies without. Prompts come in chunks of `CHUNK` tokens and
steps of one, so a policy compiles twice for most laws.

A policy that evicts has laws of its own: what it holds, and what a step then attends to. A law that compares with all
tokens that came gives it slots for all of them (`attending_to_all`), and a law of what happens when the capacity is
used up asks nothing of it, for it always has room. All other laws hold while tokens die.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.caches import Evicting, EvictingState, Info, Policy, Retrieval, RetrievalState
from kvjax.hook import LayerCache, attention, attention_info, flush, init_layer, insert
from kvjax.hook import check as check_overflow
from kvjax.memory import shapes, to_device
from kvjax.pick import Selection, mass_recall
from kvjax.spec import CacheSpec

CHUNK = 48  # tokens of prompt in a call
Law = Callable[[Policy, CacheSpec], None]


def tolerance(spec: CacheSpec) -> float:
    """Largest error of an attention output over values of order 1: f32 sums, or weights rounded to 16 bits."""
    return {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[jnp.dtype(spec.dtype).name]


# ------------------------------------------------------------------------------------------------- driving a policy


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Queries, keys and values of all positions and rows, in the cache's dtype.

    Numpy arrays, since slicing jax arrays compiles.
    """

    q: np.ndarray  # [B, S, N, D]
    k: np.ndarray  # [B, S, K, D]
    v: np.ndarray  # [B, S, K, D]

    def at(self, position: np.ndarray) -> tuple[np.ndarray, ...]:
        """One chunk a row, its tokens at `position` i[B, T]; positions past the end give the last token."""
        index = np.minimum(position, self.q.shape[1] - 1)[:, :, None, None]
        return tuple(np.take_along_axis(a, index, axis=1) for a in (self.q, self.k, self.v))


@partial(jax.jit, static_argnums=(0, 1))
def _draw(spec: CacheSpec, seed: int) -> tuple[Array, Array, Array]:
    ks = jax.random.split(jax.random.key(seed), 5)
    B, S, D = spec.batch, spec.capacity, spec.head_dim
    q = jax.random.normal(ks[0], (B, S, spec.q_heads, D))
    k, v = (jax.random.normal(key, (B, S, spec.kv_heads, D)) for key in ks[1:3])
    size, offset = jax.random.uniform(ks[3], (D,), minval=0.2, maxval=2.0), jax.random.normal(ks[4], (D,))
    k = k * size[None, None, None] + offset[None, None, None]
    return q.astype(spec.dtype), k.astype(spec.dtype), v.astype(spec.dtype)


def random_tokens(spec: CacheSpec, seed: int = 0) -> Tokens:
    """Normal random tokens; keys have channels of very different size and offset, as those of models do."""
    return Tokens(*(np.asarray(a) for a in _draw(spec, seed)))


_new = jax.jit(init_layer, static_argnums=(0, 1))
_prompt = jax.jit(attention, static_argnames=("window", "scale", "fresh", "flush"))
_step = jax.jit(attention_info, static_argnames=("window", "scale", "fresh", "flush"))


def fill(cache: LayerCache, tokens: Tokens, lengths: Any, held: Any = 0) -> tuple[LayerCache, np.ndarray]:
    """Prefills each row from position `held` up to `lengths`; returns the cache and the outputs [B, S, N, D].

    Rows may start at different positions; each call gives every row its own next tokens.
    """
    lengths = np.asarray(lengths)
    held = np.broadcast_to(np.asarray(held), lengths.shape)
    outputs = np.zeros(tokens.q.shape, np.float32)
    while (held < lengths).any():
        now = np.clip(lengths - held, 0, CHUNK)
        out, cache = _prompt(cache, *tokens.at(held[:, None] + np.arange(CHUNK)), lengths=now)
        for b, row in enumerate(np.asarray(out, np.float32)):
            outputs[b, held[b] : held[b] + now[b]] = row[: now[b]]
        held = held + now
    return cache, outputs


def step(cache: LayerCache, tokens: Tokens, position: Any, active: Any = None) -> tuple[np.ndarray, LayerCache, Info]:
    """One decode step, each row at its own position: (out f32[B, N, D], cache, info)."""
    position = np.asarray(position)
    active = np.ones(len(position), bool) if active is None else np.asarray(active)
    out, cache, info = _step(cache, *tokens.at(position[:, None]), active=active)
    return np.asarray(out, np.float32)[:, 0], cache, info


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention of q [N, D] over k, v [S, K, D] in float64, a head at a time."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    group = q.shape[0] // k.shape[1]
    out = np.zeros_like(q)
    for n in range(q.shape[0]):
        logits = k[:, n // group] @ q[n] / np.sqrt(q.shape[1])
        weights = np.exp(logits - logits.max())
        out[n] = weights @ v[:, n // group] / weights.sum()
    return out


_decode = jax.jit(lambda store, k, v: store.decoded(k, v), static_argnums=0)


def zones(policy: Retrieval, spec: CacheSpec, held: int) -> tuple[list[list[int]], list[int]]:
    """Positions of the chunks of the history and of the recent block, in order, of a flushed row of `held` tokens."""
    leaving, staying = policy.demote.leaving(policy.local), policy.demote.staying(policy.local)
    most = jax.eval_shape(partial(policy.init, spec)).store.slots // policy.demote.leave
    chunks: list[list[int]] = []
    block: list[int] = []
    for position in range(policy.sink, held):
        block.append(position)
        if len(block) == len(leaving) + len(staying) and len(chunks) < most:
            chunks.append([block[i] for i in leaving])
            block = [block[i] for i in staying]
    return chunks, block


def as_stored(
    policy: Policy, spec: CacheSpec, k: np.ndarray, v: np.ndarray, held: int
) -> tuple[np.ndarray, np.ndarray]:
    """A row's k, v [S, K, D] as the policy gives them back when it holds the first `held`; later ones are exact."""
    if not isinstance(policy, Retrieval):
        return k, v
    k, v = k.astype(np.float32), v.astype(np.float32)
    for chunk in zones(policy, spec, held)[0]:
        heads_first = (np.swapaxes(a[chunk], 0, 1)[None] for a in (k, v))
        k[chunk], v[chunk] = (np.swapaxes(np.asarray(a)[0], 0, 1) for a in _decode(policy.store, *heads_first))
    return k, v


def attending_to_all(policy: Policy, spec: CacheSpec) -> Policy:
    """The policy with a budget that no row exceeds; itself where it has no budget."""
    if isinstance(policy, Retrieval) and policy.budget is not None:
        unit = policy.selector.unit
        return dataclasses.replace(policy, budget=spec.capacity + policy.sink + policy.local + unit)
    return _with_room(policy, spec)


def _with_room(policy: Policy, spec: CacheSpec) -> Policy:
    """A policy that evicts with slots for all tokens; any other as it is."""
    return dataclasses.replace(policy, budget=spec.capacity) if isinstance(policy, Evicting) else policy


def edge_lengths(policy: Policy, spec: CacheSpec) -> list[int]:
    """The lengths at which zones become empty, full, or about to be flushed."""
    edges = {0, 1, CHUNK, spec.capacity - 1}
    if isinstance(policy, Retrieval):
        sink, chunk, block = policy.sink, policy.demote.leave, policy.demote.slots(policy.local)
        edges |= {sink, sink + 1, chunk - 1, chunk, chunk + 1, sink + policy.local}
        edges |= {sink + block - 1, sink + block, sink + block + 1, sink + block + chunk}
    return sorted(n for n in edges if 0 <= n < spec.capacity)


def _ragged(policy: Policy, spec: CacheSpec) -> np.ndarray:
    """Lengths that differ by row, within 20 tokens of the capacity at most."""
    most = max(spec.capacity - 20, 1)
    return np.array([most - (37 * b) % most for b in range(spec.batch)])


def _close(got: np.ndarray, want: np.ndarray, spec: CacheSpec, what: str) -> None:
    assert np.isfinite(got).all(), f"{what}: not finite"
    error = float(np.max(np.abs(got - want), initial=0.0))
    assert error <= tolerance(spec), f"{what}: differs by {error:.2e}, allowed {tolerance(spec):.0e}"


def _same(got: Any, want: Any, what: str) -> None:
    """Equal to the bit."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree_util.tree_leaves_with_path(want), strict=True)
    for (path, a), (path_wanted, b) in pairs:
        assert path == path_wanted, f"{what}: {path} is not {path_wanted}"
        equal = np.array_equal(np.asarray(a), np.asarray(b), equal_nan=jnp.issubdtype(a.dtype, jnp.floating))
        assert equal, f"{what}: {jax.tree_util.keystr(path)} differs"


# ------------------------------------------------------------------------------------------------- the laws themselves


def budget_of_all_is_dense_attention(policy: Policy, spec: CacheSpec) -> None:
    """With a budget of at least the stored tokens, a step is attention over all of them, at every edge length.

    Exact attention, or in a store of few bits attention over what that decodes to.
    """
    policy, tokens = attending_to_all(policy, spec), random_tokens(spec)
    edges = edge_lengths(policy, spec)
    edges += [edges[-1]] * (-len(edges) % spec.batch)
    for first in range(0, len(edges), spec.batch):
        lengths = np.array(edges[first : first + spec.batch])
        cache, _ = fill(_new(policy, spec), tokens, lengths)
        out, cache, info = step(cache, tokens, lengths)
        for b, n in enumerate(lengths):
            want = dense(tokens.q[b, n], *as_stored(policy, spec, tokens.k[b, : n + 1], tokens.v[b, : n + 1], n))
            _close(out[b], want, spec, f"length {n}")
        _attended(info, lengths + 1)
        np.testing.assert_array_equal(np.asarray(cache.length), lengths + 1)
        check_overflow(cache)


def prompt_attends_causally(policy: Policy, spec: CacheSpec) -> None:
    """A prompt in chunks gives causal attention, exactly, whatever is chosen in later steps.

    A chunk reads itself exactly, and earlier ones as they are stored.
    """
    policy, tokens, lengths = _with_room(policy, spec), random_tokens(spec, 1), _ragged(policy, spec)
    _, out = fill(_new(policy, spec), tokens, lengths)
    for b in range(spec.batch):
        for t in {0, 1, CHUNK - 1, CHUNK, int(lengths[b]) - 1} & set(range(int(lengths[b]))):
            before = t // CHUNK * CHUNK
            k, v = as_stored(policy, spec, tokens.k[b, : t + 1], tokens.v[b, : t + 1], before)
            want = dense(tokens.q[b, t], k, v)
            _close(out[b, t], want, spec, f"row {b}, position {t}")


def prefill_equals_prefill_then_updates(policy: Policy, spec: CacheSpec) -> None:
    """A prompt of T1 + T2 tokens leaves what T1 tokens and T2 decode steps leave, in every zone.

    An evictor may make more or less of a query for its coming in a prompt: with slots for all, the tokens are the same.
    """
    policy, tokens = _with_room(policy, spec), random_tokens(spec, 2)
    first = _ragged(policy, spec) // 2
    last = first + min(70, spec.capacity - 1 - int(first.max()))
    whole, _ = fill(_new(policy, spec), tokens, last)
    steps, _ = fill(_new(policy, spec), tokens, first)
    for i in range(int((last - first).max())):
        _, steps, _ = step(steps, tokens, first + i)
    steps = flush(steps)
    if isinstance(policy, Evicting):
        whole, steps = (
            dataclasses.replace(c, state=dataclasses.replace(c.state, evidence=None)) for c in (whole, steps)
        )
    _same(valid_part(steps, spec), valid_part(whole, spec), "state")
    assert (np.asarray(whole.length) == last).all()


def row_ignores_other_rows(policy: Policy, spec: CacheSpec) -> None:
    """The last row is the same to the bit whatever the other rows hold and however long they are."""
    tokens, other = random_tokens(spec, 3), random_tokens(spec, 4)
    mixed = Tokens(*(np.concatenate([b[:-1], a[-1:]]) for a, b in zip(_arrays(tokens), _arrays(other), strict=True)))
    lengths = _ragged(policy, spec)
    others = np.concatenate([lengths[:-1] // 3, lengths[-1:]])
    results = []
    for data, n in ((tokens, lengths), (mixed, others)):
        cache, _ = fill(_new(policy, spec), data, n)
        outs = []
        for i in range(3):
            out, cache, _ = step(cache, data, n + i, active=np.arange(spec.batch)[::-1] % (i + 1) == 0)
            outs.append(out[-1])
        results.append((outs, [np.asarray(a)[-1] for a in valid_part(cache, spec)]))
    _same(results[1], results[0], "last row")


def padding_does_not_matter(policy: Policy, spec: CacheSpec) -> None:
    """Tokens past a row's length may be anything: keys NaN, values 1e4."""
    tokens, lengths = random_tokens(spec, 5), _ragged(policy, spec)
    past = (np.arange(spec.capacity) >= lengths[:, None])[..., None, None]
    dtype = tokens.v.dtype
    bad = Tokens(tokens.q, np.where(past, np.nan, tokens.k).astype(dtype), np.where(past, 1e4, tokens.v).astype(dtype))
    clean, out_clean = fill(_new(policy, spec), tokens, lengths)
    dirty, out_dirty = fill(_new(policy, spec), bad, lengths)
    _same(out_dirty, out_clean, "prompt output")
    _same(valid_part(dirty, spec), valid_part(clean, spec), "state")
    _same(step(dirty, tokens, lengths)[0], step(clean, tokens, lengths)[0], "step")


def slots_past_count_do_not_matter(policy: Policy, spec: CacheSpec) -> None:
    """What lies in unused slots is never read: keys and scales NaN, values 1e4, codes of all ones."""
    tokens, lengths = random_tokens(spec, 6), _ragged(policy, spec) // 2
    cache, _ = fill(_new(policy, spec), tokens, lengths)
    poisoned = dataclasses.replace(cache, state=poison(cache, spec))
    for i in range(2):
        out, cache, info = step(cache, tokens, lengths + i)
        out_poisoned, poisoned, info_poisoned = step(poisoned, tokens, lengths + i)
        _same(out_poisoned, out, "step")
        _same(info_poisoned.attended, info.attended, "attended")


def order_of_chunks_does_not_matter(policy: Policy, spec: CacheSpec) -> None:
    """Chunks of the history may lie in any order: attention after RoPE is over a bag."""
    if not isinstance(policy, Retrieval):
        return
    tokens, lengths = random_tokens(spec, 7), np.full(spec.batch, spec.capacity - 2)
    cache, _ = fill(_new(policy, spec), tokens, lengths)
    st, chunk = cache.state, policy.demote.leave
    chunks = int(np.asarray(st.store.count).min()) // chunk
    assert chunks >= 2, f"the capacity of {spec.capacity} has {chunks} chunks of {chunk}; give the law more"
    order = np.concatenate([np.arange(chunks)[::-1], np.arange(chunks, st.store.slots // chunk)])

    def move(leaf: Array) -> Array:
        if leaf.ndim < 3:
            return leaf
        home, leaf = leaf.sharding, to_device(leaf)
        blocks = leaf.reshape(*leaf.shape[:2], len(order), -1, *leaf.shape[3:])
        return jax.device_put(blocks[:, :, order].reshape(leaf.shape), home)

    moved = dataclasses.replace(st, store=jax.tree.map(move, st.store), index=jax.tree.map(move, st.index))
    out, _, info = step(cache, tokens, lengths)
    out_moved, _, info_moved = step(dataclasses.replace(cache, state=moved), tokens, lengths)
    _close(out_moved, out, spec, "step")
    _same(info_moved.attended, info.attended, "attended")


def selected_slots_are_valid_and_unique(policy: Policy, spec: CacheSpec) -> None:
    """A step attends to at most its budget, at least what there is, and never twice to a token."""
    tokens, lengths = random_tokens(spec, 8), _ragged(policy, spec)
    cache, _ = fill(_new(policy, spec), tokens, lengths)
    for i in range(3):
        _, cache, info = step(cache, tokens, lengths + i)
        held = lengths + i + 1
        if not isinstance(policy, Retrieval) or policy.budget is None:
            assert info.selection is None
            _attended(info, np.minimum(held, policy.budget) if isinstance(policy, Evicting) else held)
            continue
        most = np.where(held >= policy.dense_below, np.minimum(held, policy.budget), held)
        if policy.selector.unit == 1:
            _attended(info, most)
        assert (np.asarray(info.attended) <= most[:, None] + 0.01).all(), info.attended
        _check_selection(info.selection, cache)


def recall_grows_with_budget(policy: Policy, spec: CacheSpec) -> None:
    """A larger budget keeps what a smaller one chose, so the softmax mass that it holds does not fall."""
    if not isinstance(policy, Retrieval) or policy.budget is None:
        return
    tokens, lengths = random_tokens(spec, 9), _ragged(policy, spec)
    cache, _ = fill(_new(policy, spec), tokens, lengths)
    q = jnp.asarray(tokens.at(lengths[:, None])[0][:, 0])
    stored = cache.state.store.slots
    keys = np.zeros((spec.batch, spec.kv_heads, stored + cache.state.recent.slots, spec.head_dim), np.float32)
    for b, n in enumerate(lengths):
        chunks, recent = zones(policy, spec, n)
        history = [position for chunk in chunks for position in chunk]
        keys[b, :, : len(history)] = np.swapaxes(tokens.k[b, history], 0, 1)
        keys[b, :, stored : stored + len(recent)] = np.swapaxes(tokens.k[b, recent], 0, 1)

    @partial(jax.jit, static_argnums=1)
    def choose(st: RetrievalState, wider: Retrieval, keys: Array) -> tuple[Selection, Array]:
        qg = q.astype(jnp.float32).reshape(spec.batch, spec.kv_heads, spec.group, spec.head_dim)
        logits = jnp.einsum("bkgd,bksd->bkgs", qg, keys) * spec.head_dim**-0.5
        valid = [jnp.arange(b.slots)[None] < b.count[:, None] for b in (st.store, st.recent)]
        selection = wider.select(st, q)
        return selection, mass_recall(selection, logits, jnp.concatenate(valid, axis=1))

    base, unit, before, chosen = policy.sink + policy.local, policy.selector.unit, None, None
    for more in (unit, 3 * unit, spec.capacity):
        wider = dataclasses.replace(policy, budget=base + more, dense_below=0)
        selection, mass = choose(cache.state, wider, keys)
        mass = np.asarray(mass)
        members = _members(selection)
        assert before is None or (mass >= before - 1e-6).all(), f"mass fell at budget {base + more}"
        assert chosen is None or all(a <= b for a, b in zip(chosen, members, strict=True)), "a choice was dropped"
        before, chosen = mass, members


def every_token_is_in_one_zone(policy: Policy, spec: CacheSpec) -> None:
    """With equal keys every attended token weighs the same, so the output is the mean of all values, each once.

    Each as its zone gives it back.
    """
    policy, tokens = attending_to_all(policy, spec), random_tokens(spec, 10)
    tokens = Tokens(tokens.q, np.ones_like(tokens.k), tokens.v)
    lengths = _ragged(policy, spec)
    cache, _ = fill(_new(policy, spec), tokens, lengths)
    for i in range(19):
        out, cache, info = step(cache, tokens, lengths + i)
        for b in range(spec.batch):
            n = int(lengths[b]) + i + 1
            # A recall of the step before has tokens as they were stored then.
            now, then = (
                np.asarray(as_stored(policy, spec, tokens.k[b, :n], tokens.v[b, :n], held)[1], np.float64).mean(axis=0)
                for held in (n - 1, max(n - 2, 0))
            )
            fresh = np.ones(spec.kv_heads, bool) if info.fresh is None else np.asarray(info.fresh[b])
            mean = np.where(fresh[:, None], now, then).repeat(spec.group, axis=0)
            _close(out[b], mean, spec, f"row {b} with {n} tokens")
        _attended(info, lengths + i + 1)


def inactive_rows_store_nothing(policy: Policy, spec: CacheSpec) -> None:
    """A row that is not active, or whose chunk has length 0, keeps its valid part to the bit."""
    tokens, lengths = random_tokens(spec, 11), _ragged(policy, spec)
    cache, _ = fill(_new(policy, spec), tokens, lengths)
    _, after, _ = step(cache, tokens, lengths, active=np.zeros(spec.batch, bool))
    _same(valid_part(after, spec), valid_part(cache, spec), "after a step")
    if isinstance(policy, Retrieval):
        _same(after.state.schedule, cache.state.schedule, "schedule after a step")
    _, after = _prompt(
        cache, *tokens.at(np.arange(CHUNK)[None].repeat(spec.batch, 0)), lengths=np.zeros(spec.batch, np.int32)
    )
    _same(valid_part(after, spec), valid_part(cache, spec), "after a prompt")


def insert_replaces_one_row(policy: Policy, spec: CacheSpec) -> None:
    """A row prefilled alone and inserted goes on as it would alone; the others do not notice."""
    one = dataclasses.replace(spec, batch=1)
    tokens, lengths = random_tokens(spec, 12), _ragged(policy, spec) // 2
    row = spec.batch - 1
    alone = Tokens(*(a[row:] for a in _arrays(random_tokens(spec, 13))))
    n = spec.capacity // 2
    prefix, _ = fill(_new(policy, one), alone, [n])
    cache, _ = fill(_new(policy, spec), tokens, lengths)
    joined = insert(cache, prefix, row)
    mixed = Tokens(*(np.concatenate([a[:row], b]) for a, b in zip(_arrays(tokens), _arrays(alone), strict=True)))
    at = np.concatenate([lengths[:row], [n]])
    out, _, _ = step(joined, mixed, at)
    _close(out[row:], step(prefix, alone, [n])[0], spec, "inserted row")
    _same(out[:row], step(cache, tokens, lengths)[0][:row], "other rows")


def full_cache_drops_and_says_so(policy: Policy, spec: CacheSpec) -> None:
    """A token without room changes nothing that is stored, and `check` raises. A policy that evicts always has room."""
    if isinstance(policy, Evicting):
        return
    tokens = random_tokens(spec, 14)
    cache, _ = fill(_new(policy, spec), tokens, np.full(spec.batch, spec.capacity - 1))
    _, cache, _ = step(cache, tokens, np.full(spec.batch, spec.capacity - 1))
    check_overflow(cache)
    for _ in range(3 * spec.capacity):  # some zones hold a few tokens more than the capacity
        before = cache
        _, cache, _ = step(cache, tokens, np.full(spec.batch, spec.capacity - 1))
        if np.asarray(cache.state.overflow).any():
            break
    else:
        raise AssertionError("no overflow however many tokens came")
    _same(valid_part(cache, spec)[:-1], valid_part(before, spec)[:-1], "what was stored")
    try:
        check_overflow(cache)
    except RuntimeError:
        return
    raise AssertionError("check did not raise")


def one_trace_serves_all_steps(policy: Policy, spec: CacheSpec) -> None:
    """Steps that differ in position, active rows and flushes run one program."""
    tokens, traces = random_tokens(spec, 15), []

    @partial(jax.jit, donate_argnums=0)
    def run(cache: LayerCache, q: Array, k: Array, v: Array, active: Array) -> tuple[Array, LayerCache | None]:
        traces.append(1)
        return attention(cache, q, k, v, active=active)

    cache = _new(policy, spec)
    for i in range(min(100, spec.capacity)):
        active = np.arange(spec.batch) <= i
        _, cache = run(cache, *tokens.at(np.full((spec.batch, 1), i)), active)
    assert len(traces) == 1, f"traced {len(traces)} times"


def step_is_in_place(policy: Policy, spec: CacheSpec) -> None:
    """A donated step aliases its whole cache, and holds no second one: temp bytes under 1/4 of a large cache.

    Of a policy that evicts, with slots for all: its cache is as large as its budget.

    A policy with a budget holds a score of every token, which beside codes of few bits is much: there it is 1/4 of
    the exact keys and values.
    """
    for batch in (1, spec.batch):
        large = dataclasses.replace(
            spec,
            batch=batch,
            capacity=max(32768, spec.capacity),
            head_dim=max(128, spec.head_dim),
            dtype=jnp.float32,
        )
        cache = shapes(partial(init_layer, _with_room(policy, large), large))
        q, k = (
            jax.ShapeDtypeStruct((batch, 1, n, large.head_dim), large.dtype) for n in (large.q_heads, large.kv_heads)
        )
        compiled = jax.jit(attention, donate_argnums=0).lower(cache, q, k, k).compile()
        memory: Any = compiled.memory_analysis()
        size = sum(np.prod(a.shape, dtype=np.int64) * a.dtype.itemsize for a in jax.tree.leaves(cache))
        aliased = memory.alias_size_in_bytes + memory.host_alias_size_in_bytes
        assert aliased >= size, f"{aliased} of {size} bytes are aliased"
        exact = 2 * batch * large.kv_heads * large.capacity * large.head_dim * jnp.dtype(large.dtype).itemsize
        beside = max(size, exact) if isinstance(policy, Retrieval) and policy.budget is not None else size
        # cuBLAS takes a workspace of 32 MiB, whatever the sizes.
        allowed = beside // 4 + (32 * 2**20 if jax.default_backend() == "gpu" else 0)
        assert memory.temp_size_in_bytes <= allowed, f"{memory.temp_size_in_bytes} temp bytes beside {beside} of cache"


def structure_is_constant(policy: Policy, spec: CacheSpec) -> None:
    """Every verb keeps tree structure, shapes, dtypes and memory kinds, and every leaf has the batch first."""
    tokens = random_tokens(spec, 16)
    start = init_layer(policy, spec)
    prompt, _ = fill(start, tokens, np.full(spec.batch, CHUNK))
    _, stepped, _ = step(prompt, tokens, np.full(spec.batch, CHUNK))
    for name, after in (("prefill", prompt), ("update and attend", stepped), ("flush", flush(stepped))):
        chex.assert_trees_all_equal_shapes_and_dtypes(after, start)
        assert _memory(after) == _memory(start), f"{name} moved arrays to another memory"
    assert all(a.shape[0] == spec.batch for a in jax.tree.leaves(start)), "a leaf without the batch first"
    buffers = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(start) if a.nbytes]
    assert len(buffers) == len(set(buffers)), "init shares a buffer between fields, which donation refuses"


def policy_is_a_value(policy: Policy, spec: CacheSpec) -> None:
    """Equal policies are one static argument: hashable, equal, printable; a changed copy differs."""
    twin = dataclasses.replace(policy)  # type: ignore[type-var]
    assert twin == policy, "replace without a change gave another policy"
    assert hash(twin) == hash(policy), "equal policies have different hashes"
    assert repr(twin) == repr(policy)
    assert not jax.tree.leaves(jax.tree.map(lambda a: a if isinstance(a, jax.Array) else None, vars(policy)))


def budget_bounds_what_is_held(policy: Policy, spec: CacheSpec) -> None:
    """Each kv head holds min(budget, tokens that came) different tokens, however many come, the newest among them.

    The first ones that a sink keeps too; all as they came, to the bit; and the state is no larger for a large capacity.
    """
    if not isinstance(policy, Evicting):
        return
    tokens, lengths = random_tokens(spec, 18), _ragged(policy, spec)
    cache, _ = fill(_new(policy, spec), tokens, lengths)
    for i in range(30):
        _, cache, info = step(cache, tokens, (lengths + i) % spec.capacity)
        came = lengths + i + 1
        _attended(info, np.minimum(came, policy.budget))
        held = held_positions(cache)
        for b, k in np.ndindex(spec.batch, spec.kv_heads):
            mine = held[b][k]
            assert len(set(mine)) == len(mine) == min(came[b], policy.budget), f"row {b} head {k} holds {sorted(mine)}"
            assert came[b] - 1 in mine, f"row {b} head {k} lost its newest token"
            sink = getattr(policy.evictor, "sink", 0)
            assert set(range(min(sink, came[b]))) <= set(mine), f"row {b} head {k} lost of its sink"
            for stored, given in ((cache.state.tokens.k, tokens.k), (cache.state.tokens.v, tokens.v)):
                want = given[b, np.array(mine) % spec.capacity, k]
                _same(np.asarray(stored)[b, k, : len(mine)], want, f"row {b} head {k}")
    np.testing.assert_array_equal(np.asarray(cache.length), came)
    check_overflow(cache)
    sizes = [
        sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(jax.eval_shape(partial(policy.init, larger))))
        for larger in (dataclasses.replace(spec, capacity=n * max(spec.capacity, policy.budget)) for n in (1, 1000))
    ]
    assert sizes[0] == sizes[1], f"{sizes} bytes at capacities 1 to 1000"


def step_attends_to_what_is_held(policy: Policy, spec: CacheSpec) -> None:
    """A step of a policy that evicts is exact attention over the tokens that each kv head then holds."""
    if not isinstance(policy, Evicting):
        return
    tokens, lengths = random_tokens(spec, 19), _ragged(policy, spec)
    cache, _ = fill(_new(policy, spec), tokens, lengths)
    for i in range(3):
        out, cache, _ = step(cache, tokens, lengths + i)
        for b, k in np.ndindex(spec.batch, spec.kv_heads):
            mine = held_positions(cache)[b][k]
            heads = slice(k * spec.group, (k + 1) * spec.group)
            q, keys, values = tokens.q[b, lengths[b] + i, heads], tokens.k[b, mine, k], tokens.v[b, mine, k]
            _close(out[b, heads], dense(q, keys[:, None], values[:, None]), spec, f"row {b}, kv head {k}")


def checkpoint_restores_to_the_bit(policy: Policy, spec: CacheSpec) -> None:
    """A cache goes through orbax-checkpoint and comes back the same."""
    import orbax.checkpoint as ocp

    tokens, lengths = random_tokens(spec, 17), _ragged(policy, spec)
    cache, _ = fill(_new(policy, spec), tokens, lengths)
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as saver:
        path = Path(folder) / "cache"
        saver.save(path, cache.state)
        saver.wait_until_finished()
        restored = saver.restore(path, jax.tree.map(ocp.utils.to_shape_dtype_struct, cache.state))
    chex.assert_trees_all_equal_shapes_and_dtypes(restored, cache.state)
    _same(restored, cache.state, "restored state")


# ------------------------------------------------------------------------------------------------- running them

LAWS: dict[str, Law] = {
    law.__name__: law
    for law in (
        budget_of_all_is_dense_attention,
        prompt_attends_causally,
        prefill_equals_prefill_then_updates,
        row_ignores_other_rows,
        padding_does_not_matter,
        slots_past_count_do_not_matter,
        order_of_chunks_does_not_matter,
        selected_slots_are_valid_and_unique,
        recall_grows_with_budget,
        every_token_is_in_one_zone,
        inactive_rows_store_nothing,
        insert_replaces_one_row,
        full_cache_drops_and_says_so,
        one_trace_serves_all_steps,
        step_is_in_place,
        structure_is_constant,
        policy_is_a_value,
        budget_bounds_what_is_held,
        step_attends_to_what_is_held,
        checkpoint_restores_to_the_bit,
    )
}


def check(policy: Policy, spec: CacheSpec) -> None:
    """Runs all laws; the first that does not hold raises AssertionError, which starts with its name."""
    for name, law in LAWS.items():
        try:
            law(policy, spec)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


# ------------------------------------------------------------------------------------------------- parts of the laws


def held_positions(cache: LayerCache) -> list[list[list[int]]]:
    """Positions of the tokens that each row and kv head of a policy that evicts holds, by slot."""
    st = cache.state
    return [
        [head[:count].tolist() for head in row]
        for row, count in zip(np.asarray(st.position), np.asarray(st.tokens.count), strict=True)
    ]


def valid_part(cache: LayerCache, spec: CacheSpec) -> list[Any]:
    """The state with zeros in every slot past count, as leaves; what two caches that hold the same must agree on.

    Without what a schedule remembers of the last step: a prompt leaves none. Slots that hold a bag, as those of a
    policy that evicts, in order of position.
    """
    st = cache.state
    if isinstance(st, RetrievalState):
        cache = dataclasses.replace(cache, state=dataclasses.replace(st, schedule=()))
    if isinstance(st, EvictingState):
        used = jnp.arange(st.tokens.slots)[None] < st.tokens.count[:, None]
        order = jnp.argsort(jnp.where(used[:, None], st.position, spec.capacity), axis=-1)

        def sort(leaf: Array) -> Array:
            if leaf.ndim < 3:
                return leaf
            return jnp.take_along_axis(leaf, order.reshape(*order.shape, *(1,) * (leaf.ndim - 3)), axis=2)

        cache = dataclasses.replace(cache, state=jax.tree.map(sort, st))
    return jax.tree.leaves(_map_slots(cache, spec, lambda leaf, used: jnp.where(used, leaf, jnp.zeros_like(leaf))))


def poison(cache: LayerCache, spec: CacheSpec) -> Any:
    """The state with every slot past count spoiled: floats NaN but values 1e4, codes of all ones."""

    def spoil(leaf: Array, used: Array, is_value: bool) -> Array:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.where(used, leaf, jnp.asarray(1e4 if is_value else jnp.nan, leaf.dtype))
        return jnp.where(used, leaf, jnp.asarray(jnp.iinfo(leaf.dtype).max, leaf.dtype))

    return _map_slots(cache, spec, spoil, values=True)


def _map_slots(cache: LayerCache, spec: CacheSpec, change: Callable[..., Array], values: bool = False) -> Any:
    """Applies change(leaf, used[, is_value]) to each leaf with slots on axis 2; `used` broadcasts against the leaf.

    A leaf of the store or the index that has fewer slots than the store has one for each unit of tokens.
    """

    def zone(tree: Any, count: Array, slots: int) -> Any:
        def one(path: Any, leaf: Array) -> Array:
            if leaf.ndim < 3:
                return leaf
            used = jnp.arange(leaf.shape[2])[None] < (count * leaf.shape[2] // slots)[:, None]
            used = used.reshape(used.shape[0], 1, -1, *(1,) * (leaf.ndim - 3))
            extra = (jax.tree_util.keystr(path).endswith(".v"),) if values else ()
            return jax.device_put(change(to_device(leaf), used, *extra), leaf.sharding)

        return jax.tree_util.tree_map_with_path(one, tree)

    st = cache.state
    if isinstance(st, RetrievalState):
        return dataclasses.replace(
            st,
            sink=None if st.sink is None else zone(st.sink, st.sink.count, st.sink.slots),
            store=zone(st.store, st.store.count, st.store.slots),
            index=zone(st.index, st.store.count, st.store.slots),
            recent=zone(st.recent, st.recent.count, st.recent.slots),
        )
    if isinstance(st, EvictingState):
        return zone(st, st.tokens.count, st.tokens.slots)
    return zone(st, st.length, spec.capacity)


def _attended(info: Info, want: np.ndarray) -> None:
    """Every head of a row attended to `want` i[B] tokens; the mean over a group's own choices is rounded."""
    got = np.asarray(info.attended)
    assert np.allclose(got, want[:, None], rtol=1e-6, atol=0), f"attended to {got.tolist()}, not {want.tolist()}"


def _check_selection(selection: Selection | None, cache: LayerCache) -> None:
    assert selection is not None
    st = cache.state
    slots, valid = np.asarray(selection.slots), np.asarray(selection.valid)
    past = st.store.slots + st.recent.slots
    assert ((slots >= 0) & (slots < past)).all(), "a slot out of range"
    for b, k, h in np.ndindex(*slots.shape[:3]):
        mine = slots[b, k, h][valid[b, k, h]]
        assert len(set(mine.tolist())) == len(mine), f"row {b} head {k}: a slot twice"
        stored = mine[mine < st.store.slots]
        assert (stored < int(st.store.count[b])).all(), f"row {b} head {k}: a slot past count"


def _members(selection: Selection) -> list[set[int]]:
    slots, valid = np.asarray(selection.slots), np.asarray(selection.valid)
    return [set(slots[i][valid[i]].tolist()) for i in np.ndindex(*slots.shape[:3])]


def _memory(tree: Any) -> list[Any]:
    return [a.sharding.memory_kind for a in jax.tree.leaves(tree)]


def _arrays(tokens: Tokens) -> tuple[np.ndarray, ...]:
    return tokens.q, tokens.k, tokens.v
