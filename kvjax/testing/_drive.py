"""Running a policy: random tokens, and prompts and steps by programs that all laws share."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from kvjax.attention import attention, attention_info
from kvjax.cache.cache import LayerCache, init_layer
from kvjax.policies import Info, Policy
from kvjax.spec import CacheSpec
from kvjax.testing._anatomy import core, has_budget, has_history, ranks, sink, with_fields

CHUNK = 48  # tokens of a prompt per call


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Queries, keys and values of all positions and rows, in the cache's dtype.

    NumPy arrays, because slicing JAX arrays compiles programs.
    """

    q: np.ndarray  # [B, S, N, D]
    k: np.ndarray  # [B, S, K, D]
    v: np.ndarray  # [B, S, K, E]

    def at(self, position: np.ndarray) -> tuple[np.ndarray, ...]:
        """One chunk per row, its tokens at `position` i[B, T]; positions past the end give the
        last token.
        """
        index = np.minimum(position, self.q.shape[1] - 1)[:, :, None, None]
        return tuple(np.take_along_axis(a, index, axis=1) for a in (self.q, self.k, self.v))


def random_tokens(spec: CacheSpec, seed: int = 0) -> Tokens:
    """Normal random tokens; keys have channels of very different size and offset, as those of
    models do. Row 0 begins alike at every capacity."""
    *each, channels = (np.random.default_rng((seed, i)) for i in range(4))
    sizes = (
        (spec.q_heads, spec.head_dim),
        (spec.kv_heads, spec.head_dim),
        (spec.kv_heads, spec.value_size),
    )
    q, k, v = (
        draws.standard_normal((spec.batch, spec.capacity, *size), np.float32)
        for draws, size in zip(each, sizes, strict=True)
    )
    size = channels.uniform(0.2, 2.0, spec.head_dim)
    offset = channels.standard_normal(spec.head_dim)
    return Tokens(*(a.astype(spec.dtype) for a in (q, k * size + offset, v)))


new_cache = jax.jit(init_layer, static_argnums=(0, 1))
prefill_chunk = jax.jit(attention, static_argnames=("window", "scale", "first_chunk", "flush"))
_step = jax.jit(attention_info, static_argnames=("window", "scale", "first_chunk", "flush"))


def fill(
    cache: LayerCache, tokens: Tokens, lengths: Any, start: Any = 0
) -> tuple[LayerCache, np.ndarray]:
    """Prefills each row from position `start` up to `lengths`; returns the cache and the
    outputs [B, S, N, E].

    Rows may start at different positions; each call gives every row its own next tokens.
    """
    lengths = np.asarray(lengths)
    done = np.broadcast_to(np.asarray(start), lengths.shape)
    outputs = np.zeros((*tokens.q.shape[:3], tokens.v.shape[3]), np.float32)
    while (done < lengths).any():
        count = np.clip(lengths - done, 0, CHUNK)
        out, cache = prefill_chunk(
            cache, *tokens.at(done[:, None] + np.arange(CHUNK)), lengths=count
        )
        for b, row in enumerate(np.asarray(out, np.float32)):
            outputs[b, done[b] : done[b] + count[b]] = row[: count[b]]
        done = done + count
    return cache, outputs


def step(
    cache: LayerCache,
    tokens: Tokens,
    position: Any,
    active: Any = None,
    *,
    window: int | None = None,
) -> tuple[np.ndarray, LayerCache, Info]:
    """One decode step, each row at its own position: (out f32[B, N, E], cache, info)."""
    position = np.asarray(position)
    active = np.ones(len(position), bool) if active is None else np.asarray(active)
    out, cache, info = _step(cache, *tokens.at(position[:, None]), active=active, window=window)
    return np.asarray(out, np.float32)[:, 0], cache, info


def attending_to_all(policy: Policy, spec: CacheSpec) -> Policy:
    """The policy with a budget that no row exceeds, and a hot set for it; unchanged if it has
    no budget.
    """
    if ranks(policy) or not has_budget(policy):
        return with_room(policy, spec)
    inner = core(policy)
    unit = getattr(getattr(inner, "selector", None), "unit", 1)
    always = sink(policy) + getattr(inner, "local", 0) + getattr(inner, "beside", 0)
    budget = spec.capacity + always + unit
    changes: dict[str, Any] = {"budget": budget}
    store: Any = getattr(inner, "store", None)
    # It holds the selection of a step.
    if hasattr(store, "require_room") and hasattr(store, "tokens"):
        page = getattr(store, "page", 1)
        changes["store"] = dataclasses.replace(
            store, tokens=max(store.tokens, spec.group * -(-budget // page) * page)
        )
    return with_fields(policy, **changes)


def with_room(policy: Policy, spec: CacheSpec) -> Policy:
    """A policy that ranks tokens, with slots for all of them; any other policy unchanged."""
    return with_fields(policy, budget=spec.capacity) if ranks(policy) else policy


def edge_lengths(policy: Policy, spec: CacheSpec) -> list[int]:
    """The lengths at which zones become empty, full, or about to be flushed."""
    edges = {0, 1, CHUNK, spec.capacity - 1}
    if has_history(policy):
        inner = core(policy)
        first = sink(policy)
        chunk = inner.demote.leave
        block = inner.demote.slots(inner.local)
        edges |= {first, first + 1, chunk - 1, chunk, chunk + 1, first + inner.local}
        edges |= {first + block - 1, first + block, first + block + 1, first + block + chunk}
    return sorted(n for n in edges if 0 <= n < spec.capacity)


def ragged_lengths(policy: Policy, spec: CacheSpec) -> np.ndarray:
    """Lengths that differ by row, at most 20 tokens below the capacity."""
    longest = max(spec.capacity - 20, 1)
    return np.array([longest - (37 * b) % longest for b in range(spec.batch)])
