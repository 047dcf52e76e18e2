"""The protocol of stores."""

from __future__ import annotations

from typing import Any, Protocol

from jax import Array

from kvjax.partial import PartialAttention
from kvjax.selection import Selection
from kvjax.spec import CacheSpec


class Store(Protocol):
    """Keeps keys and values. Slots are handed out in order of arrival; slot s holds the s-th token that came."""

    def check(self, spec: CacheSpec, chunk: int) -> None:
        """Raises ValueError where this store cannot take chunks of `chunk` tokens of such a cache."""
        ...

    def init(self, spec: CacheSpec, slots: int) -> Any:
        """An empty state of `slots` slots a row, with `count` i32[B]."""
        ...

    def append(self, st: Any, k: Array, v: Array, count: Array) -> Any:
        """Adds the first `count` i32[B] tokens of k, v [B, K, T, D]; count is a multiple of the chunk."""
        ...

    def attend(self, st: Any, q: Array, start: Array, *, scale: float) -> PartialAttention:
        """Attention of a step's q [B, K, G, D] over the slots [start, count), start i32[B]."""
        ...

    def attend_chunk(self, st: Any, q: Array, start: Array | None, *, scale: float) -> PartialAttention:
        """Attention of a chunk's q [B, K, G, T, D] over the slots [start, count), a part over Q = G*T.

        start is i32[B, T], a slot for each query, or None for slot 0. `kvjax.prompt.attend_blocks` does it for a store
        that can read a block of its slots.
        """
        ...

    def attend_slots(self, st: Any, q: Array, selection: Selection, *, scale: float) -> PartialAttention:
        """Attention of q [B, K, G, D] over the selected slots, reading only those."""
        ...

    def gather(self, st: Any, selection: Selection) -> tuple[Array, Array]:
        """Keys and values [B, K, H*M, D] of the selected slots, on the device. Those of slots that are not valid may be
        anything, also not finite."""
        ...

    def decoded(self, k: Array, v: Array) -> tuple[Array, Array]:
        """What whole chunks k, v [B, K, T, D] are read as once they are stored; themselves in a lossless store."""
        ...

    def bytes_per_token(self, spec: CacheSpec) -> float:
        """Bytes that a stored token takes in a layer, over all kv heads."""
        ...
