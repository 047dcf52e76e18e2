"""The one function that a model calls where attention was, and the containers that it carries.

    out, cache = kvjax.attention(cache, q, k, v)

T > 1 tokens are a chunk of prompt: exact causal attention over what is stored and themselves; then they are stored.
T == 1 is a decode step: the token is stored, and attends to what the layer's policy selects. `prefill` and `decode` say
which of the two is meant, and decode takes several steps at once.

Everything is a pure function over pytrees, so it runs under jit, scan and grad, in NNX and Linen modules alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jax.tree_util import register_dataclass
from jax.typing import ArrayLike

from kvjax import ops
from kvjax.caches import Following, Info, MultiStep, Observer, PerLayer, Policy, Reversible, Truncatable
from kvjax.caches.short import Refillable, of_size, refilled
from kvjax.memory import Bytes, nbytes, on_host
from kvjax.partial import group_queries
from kvjax.placement import (
    Placement,
    axes_of,
    context_axis,
    first_row,
    make_state,
    run_on_parts,
    state_shardings,
    state_specs,
    to_context,
)
from kvjax.prompt import (
    attend_chunk,
    attend_chunk_after,
    attend_chunk_in_parts,
    attend_own_in_parts,
    group,
    in_order,
    splits_queries,
    ungroup,
)
from kvjax.selection import Selection
from kvjax.spec import CacheSpec, check_dims, require_int
from kvjax.validation import (
    check_alive,
    check_array,
    check_flags,
    check_floats,
    check_not_empty,
    check_verbs,
    finite_number,
    shown,
)


@register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """The cache of one attention layer: arrays in `state`, everything else static."""

    state: Any
    policy: Policy = dataclasses.field(metadata={"static": True})
    spec: CacheSpec = dataclasses.field(metadata={"static": True})
    placement: Placement | None = dataclasses.field(default=None, metadata={"static": True})  # how it is split

    @property
    def length(self) -> Array:
        """i32[B] tokens that a row has taken in."""
        with _own_axes(self):
            length = self.state.length
        return _of_rows(self, length)

    @property
    def nbytes(self) -> Bytes:
        """Bytes of the arrays, `device` and `host`; of one device, where a placement splits them."""
        return nbytes(self.state)

    def __repr__(self) -> str:
        return f"LayerCache({self.policy!r}; {_contents(self)})"

    def _full_rows(self) -> Array | None:
        with _own_axes(self):
            return self.policy.full_rows(self.state)


@register_dataclass
@dataclass(frozen=True, repr=False)
class _FlushedLayer(LayerCache):
    """A LayerCache with the promise of `flushed`."""

    # jax tells tree structures apart by their static fields, not by their classes; jit must not mix the two up.
    promise: bool = dataclasses.field(default=True, metadata={"static": True})

    def _full_rows(self) -> None:
        return None


@register_dataclass
@dataclass(frozen=True)
class Cache:
    """The caches of a model's attention layers."""

    layers: tuple[LayerCache, ...]

    @property
    def spec(self) -> CacheSpec:
        return self.layers[0].spec

    @property
    def length(self) -> Array:
        """i32[B] tokens that a row has taken in, the same in all layers."""
        return self.layers[0].length

    @property
    def placement(self) -> Placement | None:
        """How the cache is split over devices; None for a cache on one."""
        return self.layers[0].placement if self.layers else None

    @property
    def nbytes(self) -> Bytes:
        """Bytes of the arrays of all layers, `device` and `host`; of one device, where a placement splits them."""
        return nbytes(self.layers)

    def __repr__(self) -> str:
        if not self.layers:
            return "Cache(no layers)"
        runs = [(len(list(run)), policy) for policy, run in groupby(layer.policy for layer in self.layers)]
        layers = " + ".join(f"{count} x {policy!r}" for count, policy in runs)
        return f"Cache({layers}; {_contents(self)})"


C = TypeVar("C", Cache, LayerCache)
MOST_STEPS = 16  # tokens of a row in one `decode`
S = TypeVar("S")


def init(
    policy: Policy | PerLayer | Sequence[Policy], spec: CacheSpec, *, layers: int, placement: Placement | None = None
) -> Cache:
    """An empty cache for a model of `layers` attention layers, of one policy or of a policy for each layer.

    A policy may leave a cache of so small a capacity to `Full` (`Retrieval.dense_capacity`), unless there is a
    `placement`: each device would attend to a part alone, for which nothing was measured.

    A `placement` splits it over the devices of a mesh: each part is made on its device, and all functions that take the
    cache keep it there.

    >>> import kvjax
    >>> spec = kvjax.CacheSpec(batch=1, q_heads=4, kv_heads=2, head_dim=16, capacity=64)
    >>> kvjax.init(kvjax.Full(), spec, layers=2).length
    Array([0], dtype=int32)
    """
    layers = require_int("init(layers=...)", layers, at_least=1)
    if isinstance(policy, list | tuple):
        if len(policy) != layers:
            raise ValueError(
                f"init got {len(policy)} policies for layers={layers}; give one for each layer, or a kvjax.PerLayer"
            )
        for i, own in enumerate(policy):
            _check_policy(f"init(policy=...)[{i}]", own)
    elif not isinstance(policy, PerLayer):
        _check_policy("init(policy=...)", policy)
    _check_spec("init(spec=...)", spec)
    by_layer = PerLayer.of(policy)
    by_layer.check(layers)
    own = [by_layer.policy(i) for i in range(layers)]
    if placement is None:
        own = [of_size(policy, spec) for policy in own]
    return Cache(tuple(init_layer(policy, spec, placement) for policy in own))


def init_layer(policy: Policy, spec: CacheSpec, placement: Placement | None = None) -> LayerCache:
    """An empty cache for one attention layer, split over the devices of a `placement` if one is given.

    Raises:
      ValueError: no policy, no spec, or rows, KV heads or a policy that the placement cannot split.
    """
    if isinstance(policy, PerLayer | list | tuple):
        raise ValueError("init_layer takes the policy of one layer; call .policy(layer) of the PerLayer, or init(...)")
    _check_policy("init_layer(policy=...)", policy)
    _check_spec("init_layer(spec=...)", spec)
    if placement is None:
        return LayerCache(policy.init(spec), policy, spec)
    if not isinstance(placement, Placement):
        raise ValueError(f"placement must be a kvjax.Placement, got {shown(placement)}; it names the axes of a mesh")
    make: Any = make_state  # cached by the policy, which is frozen
    return LayerCache(make(policy, spec, placement)(), policy, spec, placement)


def shardings(cache: C) -> C:
    """The tree of `jax.sharding.NamedSharding`s of a cache with a placement, memory kinds included.

    `cache` may be one of shapes, as `jax.eval_shape` of `kvjax.init` gives it. For `jit`, `device_put` and orbax.

    Raises:
      ValueError: no cache, or one without a placement.
    """
    if not isinstance(cache, Cache | LayerCache):
        raise ValueError(f"shardings takes a cache, got {shown(cache)}; kvjax.init makes one")
    if any(layer.placement is None for layer in _layers(cache)):
        raise ValueError("shardings takes a cache with a placement; make it with kvjax.init(..., placement=...)")
    return _with_states(cache, [state_shardings(x.policy, x.spec, _placement(x)) for x in _layers(cache)])


def attention(
    cache: LayerCache | None,
    q: Array,
    k: Array,
    v: Array,
    *,
    lengths: ArrayLike | None = None,
    active: ArrayLike | None = None,
    window: int | None = None,
    scale: float | None = None,
    first_chunk: bool = False,
    flush: bool = True,
    selection: Selection | None = None,
) -> tuple[Array, LayerCache | None]:
    """Attention of q [B, T, N, D] over the cache and over k, v [B, T, K, D], all after RoPE; stores k and v.

    Args:
      cache: of this layer; None computes plain causal attention and stores nothing.
      lengths: i32[B], real tokens of each row of a right-padded chunk (default T). Outputs of padding are finite and
        meaningless.
      active: bool[B], rows that take this decode token; others store nothing, and their output is meaningless.
      window: sliding window; a token sees itself and the window - 1 before it.
      scale: of the logits; default D**-0.5.
      first_chunk: promises that the cache is empty, so a prompt attends only to itself (cuDNN attention on a GPU).
      flush: before a decode step, demote from a full recent block. A model of many layers passes False and calls
        `kvjax.flush` once a step, before its first layer: on a GPU each condition makes the host wait.
      selection: for a `Follower`, the `Info.selection` of this step in the layer that it follows; other policies select
        by themselves and do not read it.

    Returns:
      out [B, T, N, D] in q's dtype, and the cache.

    Raises:
      ValueError: shapes that disagree with each other or with the cache, `lengths` or `active` where they mean nothing.
    """
    out, cache, _ = attention_info(
        cache,
        q,
        k,
        v,
        lengths=lengths,
        active=active,
        window=window,
        scale=scale,
        first_chunk=first_chunk,
        flush=flush,
        selection=selection,
    )
    return out, cache


def attention_info(
    cache: LayerCache | None,
    q: Array,
    k: Array,
    v: Array,
    *,
    lengths: ArrayLike | None = None,
    active: ArrayLike | None = None,
    window: int | None = None,
    scale: float | None = None,
    first_chunk: bool = False,
    flush: bool = True,
    selection: Selection | None = None,
) -> tuple[Array, LayerCache | None, Info | None]:
    """`attention`, and what the step read: an `Info` for a decode step, None for a prompt or without a cache."""
    sizes, scale = _check_call("attention", cache, q, k, v, window, scale)
    check_flags("attention", first_chunk=first_chunk, flush=flush)
    if active is not None and sizes.T > 1:
        raise ValueError(
            f"active is for decode steps (T=1), got T={sizes.T}; give lengths, 0 for rows that take nothing"
        )
    count = _row_counts(sizes.B, sizes.T, lengths, active)
    operands: Any = (cache, q, k, v, count, selection)
    by: dict[str, Any] = {"scale": scale, "window": window}
    if cache is not None and sizes.T == 1:
        return _run(_attend_step, *operands, **by, flush=flush)
    return _run(_attend_prompt, *operands, **by, first_chunk=first_chunk, padded=lengths is not None)


def prefill(
    cache: LayerCache,
    q: Array,
    k: Array,
    v: Array,
    *,
    lengths: ArrayLike | None = None,
    window: int | None = None,
    scale: float | None = None,
    first_chunk: bool = False,
) -> tuple[Array, LayerCache]:
    """A chunk of a prompt: exact causal attention over the stored tokens and over k, v [B, T, K, D], which it stores.

    `attention` with T > 1, and also with T = 1: a single token of prompt is then read exactly and not by selection.
    Arguments and result are those of `attention`.
    """
    sizes, scale = _check_call("prefill", cache, q, k, v, window, scale)
    check_flags("prefill", first_chunk=first_chunk)
    count = _row_counts(sizes.B, sizes.T, lengths, None)
    settings: dict[str, Any] = {"first_chunk": first_chunk, "padded": lengths is not None}
    return _run(_attend_prompt, cache, q, k, v, count, None, scale=scale, window=window, **settings)[:2]


def decode(
    cache: LayerCache,
    q: Array,
    k: Array,
    v: Array,
    *,
    lengths: ArrayLike | None = None,
    active: ArrayLike | None = None,
    window: int | None = None,
    scale: float | None = None,
    flush: bool = True,
    selection: Selection | None = None,
) -> tuple[Array, LayerCache]:
    """T = 1 to 16 decode steps at once: out [B, T, N, D] and the cache, as T calls of `attention` would give them.

    Each token attends to what the policy selects for its own query, over the tokens up to itself. As long as no row has
    to be flushed between them, `Full`, `Compressed` and `Retrieval` store, select and attend for all tokens together.
    Other policies, and steps under a sliding window, attend for one after the other.

    Args:
      lengths: i32[B], steps that each row takes (default T); `active` bool[B] are rows that take any.
      flush: demote from full recent blocks, before the first step and between steps. With False the caller has called
        `kvjax.flush`, and no row takes more tokens than `kvjax.room` says; others are dropped and reported by
        `raise_on_overflow`.
      selection: for a `Follower`, the `Info.selection` that `decode_info` gave for the layer that it follows.

    The other arguments are those of `attention`. `rollback` takes back tokens that are not wanted after all.
    """
    settings: Any = {"window": window, "scale": scale, "flush": flush, "selection": selection}
    out, cache, _ = decode_info(cache, q, k, v, lengths=lengths, active=active, **settings)
    return out, cache


def decode_info(
    cache: LayerCache,
    q: Array,
    k: Array,
    v: Array,
    *,
    lengths: ArrayLike | None = None,
    active: ArrayLike | None = None,
    window: int | None = None,
    scale: float | None = None,
    flush: bool = True,
    selection: Selection | None = None,
) -> tuple[Array, LayerCache, Info]:
    """`decode`, and the `Info` of every step: their arrays stacked, T in front."""
    sizes, scale = _check_call("decode", cache, q, k, v, window, scale)
    check_flags("decode", flush=flush)
    if sizes.T > MOST_STEPS:
        raise ValueError(
            f"decode takes 1 to {MOST_STEPS} tokens of a row, got T={sizes.T}; kvjax.prefill reads a prompt"
        )
    count = _row_counts(sizes.B, sizes.T, lengths, active)
    if lengths is not None and sizes.T > 1:
        k, v = _without_padding(k, v, count)
    return _run(_attend_steps, cache, q, k, v, count, selection, scale=scale, window=window, flush=flush)


def room(cache: Cache | LayerCache) -> Array:
    """Tokens that each row can take before a flush is due or the cache is full: i32[B], of the layer with the fewest.

    Raises:
      ValueError: a policy that cannot tell, as it does not take back tokens either: see `rollback`.
    """
    _check_cache("room", cache)
    with _own_axes(cache):
        free = [_reversible(layer, "room").free(layer.state) for layer in _layers(cache)]
        least = jnp.min(jnp.stack(free), axis=0)
    return _of_rows(cache, least)


def rollback(cache: C, lengths: ArrayLike) -> C:
    """`cache` with the first `lengths` i32[B] tokens of each row, as if later ones had never come.

    Takes back tokens of the recent block, and moves no array: what a draft proposed and the model did not accept. A
    token that came after a flush was due cannot be taken back past that flush, so take at most `room(cache)` tokens
    between two rollbacks.

    Raises:
      ValueError: a policy that forgets (`Evicting`) or remembers its last step (`Speculative`); lengths past what is
        there or before the last flush. Under jit, where lengths are not known, such a row stays as it is and
        `raise_on_overflow` reports it.
    """
    _check_cache("rollback", cache)
    target = _target_lengths("rollback", cache, lengths)
    states = []
    with _own_axes(cache):
        target = _of_rows(cache, target)
        for layer in _layers(cache):
            policy = _reversible(layer, "rollback")
            if not isinstance(lengths, Tracer):
                _check_reach(np.asarray(target), policy.earliest(layer.state), layer.length)
            states.append(policy.rollback(layer.state, target))
    return _with_states(cache, states)


def truncate(cache: C, lengths: ArrayLike) -> C:
    """`cache` with the first `lengths` i32[B] tokens of each row, any number up to what it holds.

    A long prompt is read once, and any shorter prefix of it is then a cache for `insert` or for a prompt that goes on
    otherwise: all that is held equals, to the bit, the cache of the shorter prompt. Costs about as much as a flush. The
    result has the same capacity; the tokens that a `Retrieval` or a `Compressed` holds lie where `prefill` of the
    shorter prompt would put them.

    Raises:
      ValueError: a policy that evicts or remembers its last step (`Evicting`, `Speculative`), a store that keeps codes
        in place of keys and values, a demotion that forgets the order of tokens; lengths below 0 or past what is there.
        Under jit, where lengths are not known, such a row stays as it is and `raise_on_overflow` reports it.
    """
    _check_cache("truncate", cache)
    target, layers = _target_lengths("truncate", cache, lengths), _layers(cache)
    for layer in layers:
        if not isinstance(layer.policy, Truncatable):
            raise ValueError(
                f"truncate needs a policy that can shorten its cache; {layer.policy!r} forgets tokens or remembers its "
                "last step, so prefill the shorter prompt instead"
            )
    if not isinstance(lengths, Tracer) and not isinstance(layers[0].length, Tracer):
        known, held = np.asarray(target), on_host(layers[0].length)
        for row in np.flatnonzero((known < 0) | (known > held)):
            raise ValueError(f"truncate of row {row} to {known[row]} tokens: it holds {held[row]}")
    return _truncate_on_parts(cache, target) if layers[0].placement else _truncate(cache, target)


def flush(cache: C) -> C:
    """Moves a chunk of tokens from each full recent block to the history, all layers under one `lax.cond`.

    A model that passes `flush=False` to `attention` calls this once before each step. Without it the block stays
    full, and the next token of that row is dropped and reported by `raise_on_overflow`.

    Before, not after: attention then reads what the flush wrote, in the order of the data. After the step XLA sees no
    order between the reads of the step and the writes of the flush, and copies the whole store to be safe (measured
    on CPU, 2026-11-21, jax 0.10.2 and 0.11.2: temp bytes of a step 2.2 times the key cache, against 0.14).
    """
    _check_cache("flush", cache)
    return _flush_on_parts(cache) if _layers(cache)[0].placement else _flush(cache)


def any_full(cache: Cache | LayerCache) -> Array:
    """Whether any recent block is full, so that `flush` would move tokens: bool[]."""
    with _own_axes(cache):
        full = _full_rows(_layers(cache))
        found = jnp.any(jnp.stack(full)) if full else jnp.zeros((), bool)
    return to_context(found)


def flushed(cache: Cache, promise: bool = True) -> Cache:
    """`cache` with the promise that `any_full` is false, so that `flush` does nothing, not even ask; or without it.

    For loops that ask by themselves, as `kvjax.generate` does: on a GPU each condition makes the host wait, and a loop
    whose own condition is that no block is full asks once a step, not twice. The caller that promises takes it back
    after the step.
    """
    kind = _FlushedLayer if promise else LayerCache
    return Cache(tuple(kind(layer.state, layer.policy, layer.spec, layer.placement) for layer in cache.layers))


def insert(cache: C, prefix: C, row: int | Array) -> C:
    """`cache` with row `row` replaced by `prefix`, a cache of batch 1 with the same policies and capacity.

    A server prefills a request alone and inserts it into a running batch. A traced row that the cache does not have
    changes nothing; one that is known raises ValueError. Where `cache` has a placement, give `prefix` the same one
    without `batch`, as one row cannot be split.
    """
    _check_cache("insert(cache=...)", cache)
    _check_cache("insert(prefix=...)", prefix)
    if isinstance(cache, Cache) != isinstance(prefix, Cache):
        raise ValueError(
            f"insert takes two caches of a layer or two of a model, got a {type(cache).__name__} and for its row a "
            f"{type(prefix).__name__}; kvjax.init makes a Cache of a model, kvjax.init_layer a LayerCache"
        )
    prefix = _with_policies_of(cache, prefix)
    if _kinds(cache) != _kinds(prefix):
        raise ValueError(
            f"insert needs a prefix of the same layers, policies, capacity and dtype; got {_summary(prefix)} for "
            f"{_summary(cache)}"
        )
    if prefix.spec.batch != 1:
        raise ValueError(f"insert takes one row: the prefix must have batch 1, got {prefix.spec.batch}")
    check_array("insert(row=...)", row, "an integer", "0")
    if np.shape(row) != () or not jnp.issubdtype(jnp.result_type(row), jnp.integer):
        raise ValueError(f"insert(row=...) must be an integer, got {shown(row)}; it counts rows from 0")
    if not isinstance(row, Tracer) and not 0 <= int(row) < cache.spec.batch:
        raise ValueError(f"insert got row={row}; the cache has rows 0 to {cache.spec.batch - 1}")
    if _layers(cache)[0].placement is not None:
        return _insert_on_parts(cache, prefix, row)
    if isinstance(row, Tracer):
        return _insert_if_in_range(cache, prefix, row)
    return _insert(cache, prefix, row)


def raise_on_overflow(cache: Cache | LayerCache) -> None:
    """Raises RuntimeError if a row has dropped a token. Call it outside jit; it reads flags from the device."""
    _check_cache("raise_on_overflow", cache)
    layers = _layers(cache)
    if any(isinstance(layer.state.overflow, Tracer) for layer in layers):
        raise ValueError(
            "raise_on_overflow reads flags from the device, which is not possible inside jit; return the cache and "
            "call it outside"
        )
    flags = np.stack([on_host(layer.state.overflow) for layer in layers])
    rows = np.flatnonzero(flags.any(axis=0)).tolist()
    if rows:
        raise RuntimeError(
            f"rows {rows} dropped tokens in layers {np.flatnonzero(flags.any(axis=1)).tolist()}: the capacity of "
            f"{layers[0].spec.capacity} tokens is used up, or kvjax.flush was not called before each decode step; "
            "make the cache with a larger capacity (or a kvjax.rollback asked for a length that is out of reach)"
        )


# ----------------------------------------------------------------------------------------------------------- attending


def _run(attend: Callable[..., Any], cache: LayerCache | None, *operands: Any, **settings: Any) -> Any:
    """`attend` of checked arguments, by each device for its own part where the cache has a placement."""
    # Numpy's float64 stays so under an inlined jit, where every cast to it warns.
    operands = tuple(a.astype(jnp.result_type(a)) if isinstance(a, np.ndarray) else a for a in operands)
    if cache is not None and cache.placement is not None:
        return _run_on_parts(attend, cache, *operands, **settings)
    if isinstance(operands[0], Tracer) and ops.shares_traces():
        return _traced_once(attend, cache, *operands, **settings)
    return attend(cache, *operands, **settings)


@partial(jax.jit, static_argnums=0, static_argnames=("scale", "window", "first_chunk", "flush", "padded"), inline=True)
def _traced_once(attend: Callable[..., Any], cache: LayerCache | None, *operands: Any, **settings: Any) -> Any:
    """`attend`, traced once for all layers of a program that have equal policies and shapes."""
    return attend(cache, *operands, **settings)


@partial(jax.jit, static_argnums=0, static_argnames=("scale", "window", "first_chunk", "flush", "padded"), inline=True)
def _run_on_parts(
    attend: Callable[..., Any],
    cache: LayerCache,
    q: Array,
    k: Array,
    v: Array,
    count: Array,
    selection: Selection | None,
    **settings: Any,
) -> tuple[Array, LayerCache, Info | None]:
    """`attend` by each device of the placement for its rows and heads."""

    def local(state: Any, *operands: Any) -> Any:
        out, mine, info = attend(_part(cache, state), *operands, **settings)
        return out, _as_whole(cache, mine.state), info

    placement, state = _placement(cache), _specs(cache)
    tokens, heads = placement.spec("BTN"), placement.spec("TBK" if attend is _attend_steps else "BK")
    inside = (state, tokens, tokens, tokens, placement.spec("B"), jax.tree.map(lambda _: heads, selection))
    out, held, info = run_on_parts(
        placement, local, inside, (tokens, state, heads), cache.state, q, k, v, count, selection
    )
    out, info = to_context(out, tokens), jax.tree.map(lambda x: to_context(x, heads), info)
    return out, dataclasses.replace(cache, state=held), info


def _attend_prompt(
    cache: LayerCache | None,
    q: Array,
    k: Array,
    v: Array,
    count: Array,
    _: Any,
    *,
    scale: float,
    window: int | None,
    first_chunk: bool,
    padded: bool,
) -> tuple[Array, LayerCache | None, None]:
    """A chunk of a prompt, of which the first `count` i32[B] tokens are stored."""
    own_k, own_v = k, v
    if padded:
        own_k, own_v = _without_padding(k, v, count)
    if cache is None:
        return attend_chunk(q, own_k, own_v, scale=scale, window=window), None, None
    grouped, (k, v), over = group(q, k.shape[2]), _heads_first(k, v), context_axis()
    if over is not None and not splits_queries(q.shape[1], over[1], window):
        over = None
    if first_chunk and over is not None:
        out = attend_chunk_in_parts(q, own_k, own_v, *over, scale=scale)
    elif first_chunk:
        out = attend_chunk(q, own_k, own_v, scale=scale, window=window)
    else:
        attend_stored = partial(cache.policy.attend_stored, cache.state, scale=scale, window=window)
        own_k, own_v = _heads_first(own_k, own_v)
        own = None if over is None else attend_own_in_parts(grouped, own_k, own_v, *over, scale=scale)
        out = attend_chunk_after(attend_stored, grouped, own_k, own_v, scale=scale, window=window, own=own)
        out = ungroup(out, q.dtype)
        # Read, then store: without an order XLA copies all that is stored, to be safe (CPU with jaxlib before 0.11
        # drops barriers first, and copies; measured 2026-11-21, 131072 tokens: temp bytes 391 MB, with it 117 MB).
        out, k, v = in_order(out, k, v)
    policy = cache.policy
    if isinstance(policy, Observer):
        state = policy.prefill_observed(cache.state, grouped, k, v, count, scale=scale, window=window)
    else:
        state = policy.prefill(cache.state, k, v, count)
    return out, dataclasses.replace(cache, state=state), None


def _attend_step(
    cache: LayerCache,
    q: Array,
    k: Array,
    v: Array,
    count: Array,
    selection: Selection | None,
    *,
    scale: float,
    window: int | None,
    flush: bool,
) -> tuple[Array, LayerCache, Info]:
    """One decode step of the rows whose `count` is 1."""
    policy, (k, v) = cache.policy, _heads_first(k, v)
    state = policy.update((_flush(cache) if flush else cache).state, k, v, count > 0)
    queries = group_queries(q[:, 0], k.shape[1])
    if selection is not None and isinstance(policy, Following):
        out, state, info = policy.attend_selection(state, queries, selection, scale=scale, window=window)
    else:
        out, state, info = policy.attend(state, queries, scale=scale, window=window)
    return out.astype(q.dtype).reshape(q.shape), dataclasses.replace(cache, state=state), info


def _attend_steps(
    cache: LayerCache,
    q: Array,
    k: Array,
    v: Array,
    count: Array,
    selection: Selection | None,
    *,
    scale: float,
    window: int | None,
    flush: bool,
) -> tuple[Array, LayerCache, Info]:
    """T decode steps, of which each row takes the first `count` i32[B]; stored at once where the policy can."""

    def one_by_one(cache: LayerCache) -> tuple[Array, LayerCache, Info]:
        def one(cache: LayerCache, x: Any) -> tuple[LayerCache, tuple[Array, Info]]:
            t, selection, *qkv = x
            q, k, v = (a[:, None] for a in qkv)
            taken = (t < count).astype(jnp.int32)
            out, cache, info = _attend_step(cache, q, k, v, taken, selection, scale=scale, window=window, flush=flush)
            return cache, (out[:, 0], info)

        tokens = (jnp.moveaxis(a, 1, 0) for a in (q, k, v))
        steps = jnp.arange(q.shape[1], dtype=jnp.int32), selection, *tokens
        cache, (out, info) = lax.scan(one, cache, steps)
        return jnp.moveaxis(out, 0, 1), cache, info

    policy = cache.policy
    if not isinstance(policy, MultiStep):
        return one_by_one(cache)
    if q.shape[1] == 1:  # a loop of one step would cost kernels
        chosen = jax.tree.map(lambda a: a[0], selection)
        out, cache, info = _attend_step(cache, q, k, v, count, chosen, scale=scale, window=window, flush=flush)
        return out, cache, jax.tree.map(lambda a: a[None], info)
    several = policy

    def stored_at_once(cache: LayerCache) -> tuple[Array, LayerCache, Info]:
        keys, values = _heads_first(k, v)
        grouped = group(q, k.shape[2])
        out, state, info = several.decode(cache.state, grouped, keys, values, count, scale=scale, window=window)
        return ungroup(out, q.dtype), dataclasses.replace(cache, state=state), info

    if not flush or cache._full_rows() is None:
        return stored_at_once(cache)
    cache = _flush(cache)
    return lax.cond(jnp.any(count > several.free(cache.state)), one_by_one, stored_at_once, cache)


# --------------------------------------------------------------------------------------------------------------- parts


class _Sizes(NamedTuple):
    B: int
    T: int


def _check_call(
    verb: str, cache: Any, q: Array, k: Array, v: Array, window: int | None, scale: float | None
) -> tuple[_Sizes, float]:
    """Sizes and scale of a call; ValueError for arrays that disagree with each other or with the cache."""
    check_floats(q=q, k=k, v=v)
    _check_layer_cache(verb, cache)
    known = {} if cache is None else _spec_dims(cache.spec)
    sizes = check_dims("q BTND, k BTKD, v BTKD", known, q=q, k=k, v=v)
    B, T, N, K, D = (sizes[x] for x in "BTNKD")
    check_not_empty(sizes, B="rows", T="tokens", N="query heads", K="kv heads", D="channels")
    if N % K:
        raise ValueError(f"q has N={N} heads, which K={K} kv heads do not divide; q{list(q.shape)}, k{list(k.shape)}")
    if window is not None:
        require_int(f"{verb}(window=...)", window, at_least=1)
    return _Sizes(B, T), D**-0.5 if scale is None else finite_number(f"{verb}(scale=...)", scale)


def _without_padding(k: Array, v: Array, count: Array) -> tuple[Array, Array]:
    """k, v [B, T, K, D] with 0 past the first `count` i32[B] tokens: padding weighs 0, but 0 times NaN is NaN."""
    real = (jnp.arange(k.shape[1])[None] < count[:, None])[..., None, None]
    return jnp.where(real, k, jnp.zeros((), k.dtype)), jnp.where(real, v, jnp.zeros((), v.dtype))


_PRESETS = "kvjax.presets.fier(256) or kvjax.presets.parse('fier:budget=256')"


def _check_policy(where: str, policy: Any) -> None:
    """Raises ValueError for what is no policy: a preset's name, a class, a preset that was not called."""
    check_verbs(where, policy, "a policy", ("init", "prefill", "update", "attend"), _PRESETS)


def _check_spec(where: str, spec: Any) -> None:
    if not isinstance(spec, CacheSpec):
        raise ValueError(
            f"{where} must be a kvjax.CacheSpec, got {shown(spec)}; make one with kvjax.CacheSpec(batch=..., "
            "q_heads=..., kv_heads=..., head_dim=..., capacity=...), or model.spec(batch=..., capacity=...)"
        )


def _check_layer_cache(verb: str, cache: Any) -> None:
    if isinstance(cache, Cache):
        raise ValueError(
            f"{verb} takes the cache of one layer, got the Cache of a whole model; pass cache.layers[i], and put the "
            "layers that come back into dataclasses.replace(cache, layers=(...))"
        )
    if not isinstance(cache, LayerCache) and (cache is not None or verb != "attention"):
        wanted, mend = "a kvjax.LayerCache", "kvjax.init_layer makes one"
        if verb == "attention":
            wanted += " or None"
        elif callable(cache):
            mend = f"kvjax.generation.{verb} takes a model"
        raise ValueError(f"{verb} takes {wanted}, got {shown(cache)}; {mend}")
    check_alive(verb, cache)


def _check_cache(where: str, cache: Any) -> None:
    if not isinstance(cache, Cache | LayerCache):
        raise ValueError(f"{where} takes a cache, got {shown(cache)}; kvjax.init makes one")
    check_alive(where, cache)


def _layers(cache: Cache | LayerCache) -> tuple[LayerCache, ...]:
    return cache.layers if isinstance(cache, Cache) else (cache,)


def _full_rows(layers: tuple[LayerCache, ...]) -> list[Array]:
    """bool[B] of each layer that can have full rows and makes no promise."""
    return [rows for layer in layers if (rows := layer._full_rows()) is not None]


def _flush(cache: Any) -> Any:
    layers = _layers(cache)
    full = _full_rows(layers)
    if not full:
        return cache
    states = tuple(layer.state for layer in layers)

    def demote(states: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(_flush_layer(layer.policy, st) for layer, st in zip(layers, states, strict=True))

    states = _if_any(full, demote, states)
    return _with_states(cache, states)


def _flush_layer(policy: Policy, state: Any) -> Any:
    """`policy.flush`, traced once for all layers of equal policies and shapes.

    An array that a flush leaves alone comes back as it was given, not as a result of the shared trace.
    """
    if not ops.shares_traces():
        return policy.flush(state)
    after, changed = _traced_flush(policy, state)
    return changed.keep_others(after, state)


@partial(jax.jit, static_argnums=0, inline=True)
def _traced_flush(policy: Policy, state: Any) -> tuple[Any, _Changed]:
    after = policy.flush(state)
    return after, _changed(after, state)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Changed:
    """The arrays of a state that a flush changes: one bool a leaf. Static, so that a trace can return it."""

    leaves: tuple[bool, ...]

    def keep_others(self, after: S, before: S) -> S:
        """`after`, with the arrays of `before` where a flush changes nothing."""
        given, tree = jax.tree.flatten(before)
        leaves = zip(jax.tree.leaves(after), given, self.leaves, strict=True)
        return jax.tree.unflatten(tree, [new if changes else old for new, old, changes in leaves])


def _changed(after: Any, before: Any) -> _Changed:
    """The arrays that a flush changes, by their identity. Called within the trace of the flush, since jax 0.11 returns
    new values for arguments that an inlined jit passes on."""
    leaves = zip(*map(jax.tree.leaves, (after, before)), strict=True)
    return _Changed(tuple(new is not old for new, old in leaves))


@partial(jax.jit, inline=True)
def _flush_on_parts(cache: Any) -> Any:
    """`_flush` by each device for its rows; the devices need not agree, as no part of a flush reads another's."""
    layers = _layers(cache)
    if not _full_rows(layers):
        return cache
    states, specs = [layer.state for layer in layers], [_specs(layer) for layer in layers]

    def local(states: list[Any]) -> list[Any]:
        mine = Cache(tuple(_part(layer, st) for layer, st in zip(layers, states, strict=True)))
        return [_as_whole(layer, own.state) for layer, own in zip(layers, _flush(mine).layers, strict=True)]

    return _with_states(cache, run_on_parts(_placement(layers[0]), local, (specs,), specs, states))


def _truncate(cache: Any, lengths: Array) -> Any:
    layers = _layers(cache)
    policies: list[Any] = [layer.policy for layer in layers]
    states = [policy.truncate(layer.state, lengths) for policy, layer in zip(policies, layers, strict=True)]
    return _with_states(cache, states)


@partial(jax.jit, inline=True)
def _truncate_on_parts(cache: Any, lengths: Array) -> Any:
    """`_truncate` by each device for its rows and heads."""
    layers = _layers(cache)
    placement = _placement(layers[0])
    states, specs = [layer.state for layer in layers], [_specs(layer) for layer in layers]

    def local(states: list[Any], lengths: Array) -> list[Any]:
        mine = _truncate(Cache(tuple(_part(layer, st) for layer, st in zip(layers, states, strict=True))), lengths)
        return [_as_whole(layer, own.state) for layer, own in zip(layers, mine.layers, strict=True)]

    inside = (specs, placement.spec("B"))
    return _with_states(cache, run_on_parts(placement, local, inside, specs, states, lengths))


def _insert(cache: C, prefix: C, row: int | Array) -> C:
    def place(whole: Array, one: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(whole, one.astype(whole.dtype), row, axis=0)

    return jax.tree.map(place, cache, _as_spec_of(prefix, cache))


def _insert_if_in_range(cache: Any, prefix: Any, row: Array) -> Any:
    there = (row >= 0) & (row < jax.tree.leaves(cache)[0].shape[0])
    return lax.cond(there, lambda cache: _insert(cache, prefix, row), lambda cache: cache, cache)


@partial(jax.jit, inline=True)
def _insert_on_parts(cache: Any, prefix: Any, row: Array) -> Any:
    """Each device has all of the prefix's row for its heads; those write it that hold the row of the cache."""
    layers, ones = _layers(cache), _layers(prefix)
    placement = _placement(layers[0])
    whole = [_specs(layer) for layer in layers]
    of_one = dataclasses.replace(placement, batch=None)
    one = [state_specs(layer.policy, layer.spec, of_one) for layer in ones]

    def local(states: list[Any], prefix: list[Any], row: Array) -> list[Any]:
        rows = layers[0].spec.batch // placement.parts("batch")
        return _insert_if_in_range(states, prefix, row - first_row(placement, rows))

    states, prefixes = ([layer.state for layer in them] for them in (layers, ones))
    row = jnp.asarray(row, jnp.int32)
    return _with_states(
        cache, run_on_parts(placement, local, (whole, one, PartitionSpec()), whole, states, prefixes, row)
    )


def _own_axes(cache: Cache | LayerCache) -> AbstractContextManager[Any]:
    """A context to compute with the arrays of a cache that a placement splits; see `axes_of`."""
    placement = _layers(cache)[0].placement
    return nullcontext() if placement is None else axes_of(placement.mesh.abstract_mesh)


def _of_rows(cache: Cache | LayerCache, x: Array) -> Array:
    """x [B] as an array of the mesh around, split as the rows of the cache."""
    placement = _layers(cache)[0].placement
    return x if placement is None else to_context(x, placement.spec("B"))


def _placement(cache: LayerCache) -> Placement:
    assert cache.placement is not None
    return cache.placement


def _specs(cache: LayerCache) -> Any:
    """The PartitionSpecs of the arrays of a state."""
    return state_specs(cache.policy, cache.spec, _placement(cache))


def _part(cache: LayerCache, state: Any) -> LayerCache:
    """The cache that a device has of its part `state`."""
    placement = _placement(cache)
    policy, spec = placement.policy_of_part(cache.policy), placement.local(cache.spec)
    state = placement.enter(cache.policy, cache.spec, state)
    return dataclasses.replace(cache, state=state, policy=policy, spec=spec, placement=None)


def _as_whole(cache: LayerCache, state: Any) -> Any:
    """The state of a device's part with the tree of the whole cache's."""
    return jax.tree.unflatten(jax.tree.structure(cache.state), jax.tree.leaves(state))


def _with_states(cache: Any, states: Sequence[Any]) -> Any:
    layers = tuple(dataclasses.replace(a, state=st) for a, st in zip(_layers(cache), states, strict=True))
    return dataclasses.replace(cache, layers=layers) if isinstance(cache, Cache) else layers[0]


def _reversible(layer: LayerCache, verb: str) -> Reversible:
    if not isinstance(layer.policy, Reversible):
        raise ValueError(
            f"{verb} needs a policy that can take back tokens, which {layer.policy!r} cannot: it has forgotten or "
            "remembers more than what it stores; use Full, Retrieval or Compressed, or a copy of the cache"
        )
    return layer.policy


def _target_lengths(verb: str, cache: Any, lengths: ArrayLike) -> Array:
    check_array(f"{verb}(lengths=...)", lengths, f"integers [B={cache.spec.batch}]", "[3, 5]")
    target = jnp.asarray(lengths)
    if target.shape != (cache.spec.batch,) or not jnp.issubdtype(target.dtype, jnp.integer):
        raise ValueError(
            f"{verb}(lengths=...) must be integers [B={cache.spec.batch}], the tokens that each row keeps; got "
            f"{target.dtype}{list(target.shape)}"
        )
    return target.astype(jnp.int32)


def _check_reach(target: np.ndarray, earliest: Array, length: Array) -> None:
    if isinstance(earliest, Tracer) or isinstance(length, Tracer):
        return
    first, last = np.asarray(earliest), np.asarray(length)
    for row in np.flatnonzero((target < first) | (target > last)):
        raise ValueError(
            f"rollback of row {row} to {target[row]} tokens: it holds {last[row]}, and can go back to {first[row]}, "
            "where its recent block was last flushed; kvjax.room says how many it takes before that"
        )


def _if_any(full: list[Array], demote: Callable[[S], S], states: S) -> S:
    """`demote(states)` if any of `full` is true, else `states`.

    Under vmap a condition selects between both, and XLA cannot select between arrays in host memory. `demote` changes
    full rows alone, so all caches demote there if any has a full row.
    """

    def run(full: list[Array], states: S) -> S:
        return lax.cond(jnp.any(jnp.stack(full)), demote, lambda states: states, states)

    if not any(jax.typeof(leaf).memory_space == jax.memory.Space.Host for leaf in jax.tree.leaves(states)):
        return run(full, states)

    def batched(size: int, mapped: Any, full: list[Array], states: S) -> tuple[S, Any]:
        def whole(is_mapped: bool, leaf: Array) -> Array:
            return leaf if is_mapped else jnp.broadcast_to(leaf, (size, *leaf.shape))

        full, states = jax.tree.map(whole, tuple(mapped), (full, states))
        return _if_any(full, jax.vmap(demote), states), jax.tree.map(lambda _: True, states)

    once = jax.custom_batching.custom_vmap(run)
    once.def_vmap(batched)
    # A derivative passes `once` by, in what `demote` leaves alone. One of its own would be a call that no array of the
    # host can be written in.
    changed = jax.eval_shape(lambda states: _changed(demote(states), states), states)
    given, tree = jax.tree.flatten(states)
    inside = [a if changes else lax.stop_gradient(a) for a, changes in zip(given, changed.leaves, strict=True)]
    return changed.keep_others(once(full, jax.tree.unflatten(tree, inside)), states)


def _heads_first(*arrays: Array) -> tuple[Array, ...]:
    """Arrays [B, T, K, D] as [B, K, T, D], the layout of policies."""
    return tuple(jnp.swapaxes(a, 1, 2) for a in arrays)


def _contents(cache: Cache | LayerCache) -> str:
    """Rows, length and bytes for a repr, of whatever the leaves are: arrays, tracers, shapes, or what tree.map made."""
    leaves, spec = jax.tree.leaves(cache), cache.spec
    rows = f"{spec.batch} row{'s' if spec.batch > 1 else ''}"
    if not all(hasattr(leaf, "dtype") and hasattr(leaf, "shape") for leaf in leaves):
        return f"{rows}, capacity {spec.capacity}, leaves that are no arrays"
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        length = "length traced"
    elif not all(isinstance(leaf, Array | np.ndarray) for leaf in leaves):
        length = "shapes alone"
    elif any(isinstance(leaf, Array) and leaf.is_deleted() for leaf in leaves):
        return f"{rows}, capacity {spec.capacity}, donated: its arrays are gone"
    elif not all(isinstance(leaf, np.ndarray) or leaf.is_fully_addressable for leaf in leaves):
        length = "length on several hosts"
    else:
        held = np.asarray(cache.length).reshape(-1)
        length = f"length {held.tolist() if held.size <= 4 else f'{held.min()} to {held.max()}'}"
    return f"{rows}, {length} of {spec.capacity}, {cache.nbytes}"


def _spec_dims(spec: CacheSpec) -> dict[str, int]:
    return {"B": spec.batch, "N": spec.q_heads, "K": spec.kv_heads, "D": spec.head_dim}


def _row_counts(B: int, T: int, lengths: ArrayLike | None, active: ArrayLike | None) -> Array:
    """i32[B] tokens that each row stores."""
    count = jnp.full(B, T, jnp.int32)
    for name, given in (("lengths", lengths), ("active", active)):
        if given is None:
            continue
        check_array(name, given, *(("bools", "[True, False]") if name == "active" else ("integers", "[3, 5]")))
        known = None if isinstance(given, Tracer) else np.asarray(given)
        given = jnp.asarray(given)
        if given.shape != (B,):
            raise ValueError(f"{name} must have shape [B={B}], got {list(given.shape)}")
        wanted = jnp.bool_ if name == "active" else jnp.integer
        if not jnp.issubdtype(given.dtype, wanted):
            raise ValueError(f"{name} must be {'bool' if name == 'active' else 'integers'}, got {given.dtype}")
        if name == "lengths" and known is not None:
            outside = known[(known < 0) | (known > T)]
            if outside.size:
                raise ValueError(
                    f"lengths must be in [0, T={T}], got {outside[0]}; they count this chunk's real tokens"
                )
        count = jnp.where(given, count, 0) if name == "active" else jnp.minimum(jnp.clip(given, 0, T), count)
    return count.astype(jnp.int32)


def _as_spec_of(prefix: Any, cache: Any) -> Any:
    """`prefix` with the static fields of `cache`, whose batch differs."""
    return jax.tree.unflatten(jax.tree.structure(cache), jax.tree.leaves(prefix))


def _with_policies_of(cache: Any, prefix: Any) -> Any:
    """`prefix` with the policies of `cache`: one row may be too short for a policy that serves a batch."""

    def mend(own: LayerCache, layer: LayerCache) -> LayerCache:
        old = layer.policy
        wanted = of_size(old, own.spec)
        if not isinstance(old, Refillable) or wanted == layer.policy or wanted != own.policy:
            return layer
        return dataclasses.replace(layer, state=refilled(wanted, layer.spec, old, layer.state), policy=wanted)

    if not isinstance(prefix, Cache) or len(cache.layers) != len(prefix.layers):
        return prefix
    return Cache(tuple(mend(*two) for two in zip(cache.layers, prefix.layers, strict=True)))


def _kinds(cache: Any) -> list[Any]:
    """Policy and spec of each layer, without the batch."""
    layers = cache.layers if isinstance(cache, Cache) else (cache,)
    return [(layer.policy, dataclasses.replace(layer.spec, batch=1)) for layer in layers]


def _summary(cache: Any) -> str:
    layers = cache.layers if isinstance(cache, Cache) else (cache,)
    return f"{len(layers)} layers of {layers[-1].policy} for {layers[-1].spec}"
