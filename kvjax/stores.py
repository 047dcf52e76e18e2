"""Stores: where and how the keys and values of the history lie.

A store is a policy object without arrays; its state is a pytree that has `count` i32[B] and `slots`. Tokens arrive in
chunks as they leave the recent block, and never leave again. `attend` reads everything, `attend_slots` only what was
selected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array

from kvjax import ops
from kvjax.blocks import Block, empty_block, put
from kvjax.partial import Partial, attend_blocks
from kvjax.pick import Selection
from kvjax.spec import CacheSpec


class Store(Protocol):
    """Keeps keys and values. Slots are handed out in order of arrival; slot s holds the s-th token that came."""

    def init(self, spec: CacheSpec, slots: int) -> Any:
        """An empty state of `slots` slots a row, with `count` i32[B]."""
        ...

    def append(self, st: Any, k: Array, v: Array, count: Array) -> Any:
        """Adds the first `count` i32[B] tokens of k, v [B, K, T, D]; count is a multiple of the chunk."""
        ...

    def attend(self, st: Any, q: Array, start: Array, *, scale: float) -> Partial:
        """Attention of q [B, K, Q, D] over the slots [start, count), start i32[B] or i32[B, Q]."""
        ...

    def attend_slots(self, st: Any, q: Array, selection: Selection, *, scale: float) -> Partial:
        """Attention of q [B, K, G, D] over the selected slots, reading only those."""
        ...

    def bytes_per_token(self, spec: CacheSpec) -> float:
        """Bytes that a stored token takes in a layer, over all kv heads."""
        ...


@dataclass(frozen=True)
class Dense:
    """Keys and values as they came, in device memory, [B, K, S, D]."""

    def init(self, spec: CacheSpec, slots: int) -> Block:
        return empty_block(spec, slots)

    def append(self, st: Block, k: Array, v: Array, count: Array) -> Block:
        return put(st, k, v, count)

    def attend(self, st: Block, q: Array, start: Array, *, scale: float) -> Partial:
        return attend_blocks(q, st.k, st.v, start, st.count, scale=scale)

    def attend_slots(self, st: Block, q: Array, selection: Selection, *, scale: float) -> Partial:
        return ops.attend_slots(q, st.k, st.v, selection, scale=scale)

    def bytes_per_token(self, spec: CacheSpec) -> float:
        return 2.0 * spec.kv_heads * spec.head_dim * jnp.dtype(spec.dtype).itemsize
