"""Keys and values in host memory as codes, so that fewer bytes cross the bus.

The codes of a token, with their scales, are adjacent bytes in the layout of `HostOffload`, so
the same kernels move them. They are decoded on the device. Codes of one token span its
channels, so a channel that is large in all keys would cost all others their precision: the mean
of a row's first keys is taken out before coding and put back after.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array, lax
from jax.tree_util import register_dataclass

from kvjax import ops
from kvjax.memory import host_zeros, to_device
from kvjax.numerics.partial import Logits, PartialAttention
from kvjax.numerics.selection import Selection
from kvjax.ops.chunk import attend_blocks
from kvjax.spec import CacheSpec, keep_ints
from kvjax.stores.host import HostBlock, HostOffload, split_parts
from kvjax.stores.store import Store, refuse_codes


@register_dataclass
@dataclass(frozen=True)
class CodedBlock(HostBlock):
    """Pages of codes, u8[B, K, P, 2, Z, width]."""

    offset: Array  # f32[B, K, D] mean of a row's first keys; the codes are of keys less this; in device memory


class Coded(Store):
    """Keeps codes of values, and of keys less the mean of their row's first; a subclass defines
    `append_coded`.
    """

    # first keys of which the mean is taken: no more, so that chunks of any size agree
    learn: ClassVar[int] = 8

    def append(self, st: Any, k: Array, v: Array, count: Array) -> Any:
        return self.append_coded(self.learnt(st, k, count), k, v, count)

    def append_coded(self, st: Any, k: Array, v: Array, count: Array) -> Any:
        """As `append`, with the offset that the state has."""
        raise NotImplementedError

    def learnt(self, st: Any, k: Array, count: Array) -> Any:
        """`st` with the offset of the first `count` i32[B] keys of k [B, K, T, D], if a row is
        empty.
        """
        first = ((st.count == 0) & (count > 0))[:, None, None]
        return replace(st, offset=jnp.where(first, self.mean_of_first(k, count), st.offset))

    def mean_of_first(self, k: Array, count: Array) -> Array:
        """f32[B, K, D]: the mean of the first `count` i32[B] keys of k [B, K, T, D], at most
        `learn`.
        """
        few = k[:, :, : self.learn].astype(jnp.float32)
        count = jnp.minimum(count, self.learn)
        here = (
            jnp.arange(few.shape[2], dtype=jnp.int32)[None, None, :, None]
            < count[:, None, None, None]
        )
        return (
            jnp.sum(jnp.where(here, few, 0.0), axis=2)
            / jnp.maximum(count, 1).astype(jnp.float32)[:, None, None]
        )

    def centred(self, st: Any, k: Array, v: Array) -> tuple[Array, Array]:
        """Keys without their offset, f32, and values, both [B, K, T, D] and without a
        derivative.
        """
        k, v = refuse_codes(self, k, v)
        return k.astype(jnp.float32) - st.offset[:, :, None], v

    def decoded(self, k: Array, v: Array) -> tuple[Array, Array]:
        """A row's first chunks k, v [B, K, T, D] as they are read."""
        offset = self.mean_of_first(k, jnp.full(k.shape[0], k.shape[2], jnp.int32))[:, :, None]
        k, v = self.recoded(k.astype(jnp.float32) - offset, v)
        return k + offset, v

    def recoded(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Keys without their offset and values, as their codes have them."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class _HostCodes(Coded):
    """A host store of coded tokens; a subclass defines the codes."""

    page: int = 1

    takes_steps = True

    def __post_init__(self) -> None:
        keep_ints(self, page=1)

    @property
    def _rows(self) -> HostOffload:
        """The host store that holds the coded bytes."""
        return HostOffload(page=self.page)

    def width(self, head_dim: int) -> int:
        """Bytes of a coded key or value."""
        raise NotImplementedError

    def encode_both(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Two rows u8[..., width] of keys and values [..., D]."""
        raise NotImplementedError

    def decode_both(self, k: Array, v: Array, head_dim: int) -> tuple[Array, Array]:
        """Keys and values f32[..., D] of two rows."""
        raise NotImplementedError

    def check(self, spec: CacheSpec, chunk: int) -> None:
        self._rows.check(spec, chunk)

    def init(self, spec: CacheSpec, slots: int) -> CodedBlock:
        width = self.width(spec.head_dim)
        heads = (spec.batch, spec.kv_heads)
        codes = host_zeros((*heads, slots // self.page, 2, self.page, width), jnp.uint8)
        return CodedBlock(
            codes,
            jnp.zeros(spec.batch, jnp.int32),
            jnp.zeros((*heads, spec.head_dim), jnp.float32),
        )

    def append_coded(self, st: CodedBlock, k: Array, v: Array, count: Array) -> CodedBlock:
        rows = self._rows.append(st, *self.encode_both(*self.centred(st, k, v)), count)
        return CodedBlock(rows.kv, rows.count, st.offset)

    def attend_chunk(
        self, st: CodedBlock, q: Array, start: Array | None, *, logits: Logits
    ) -> PartialAttention:
        Z = self.page

        def read(st: CodedBlock, first: Array | int, size: int) -> tuple[Array, Array]:
            k, v = split_parts(
                to_device(lax.dynamic_slice_in_dim(st.kv, first // Z, size // Z, axis=2))
            )
            return self._decoded(st, k, v)

        return attend_blocks(
            q, st, start, st.count, read=read, slots=st.slots, unit=Z, logits=logits
        )

    def gather(self, st: CodedBlock, selection: Selection) -> tuple[Array, Array]:
        return self._decoded(st, *self._rows.gather(st, selection))

    def _decoded(self, st: CodedBlock, k: Array, v: Array) -> tuple[Array, Array]:
        """f32[B, K, M, D] keys and values of codes u8[B, K, M, width]."""
        k, v = self.decode_both(k, v, st.offset.shape[-1])
        return k + st.offset[:, :, None], v

    def recoded(self, k: Array, v: Array) -> tuple[Array, Array]:
        return self.decode_both(*self.encode_both(k, v), k.shape[-1])


@dataclass(frozen=True, kw_only=True)
class HostFloat8(_HostCodes):
    """Keys and values in 8-bit floats (e4m3) in pinned host memory: half of the bytes of
    bfloat16.

    A number has 3 bits of fraction and no scale; numbers beyond 448, or keys that far from
    their channel's offset, are clipped. See `HostOffload` for what is moved when.
    """

    def width(self, head_dim: int) -> int:
        return head_dim

    def encode_both(self, k: Array, v: Array) -> tuple[Array, Array]:
        k, v = (
            jnp.clip(a.astype(jnp.float32), -448.0, 448.0).astype(jnp.float8_e4m3fn)
            for a in (k, v)
        )
        return lax.bitcast_convert_type(k, jnp.uint8), lax.bitcast_convert_type(v, jnp.uint8)

    def decode_both(self, k: Array, v: Array, head_dim: int) -> tuple[Array, Array]:
        k, v = (
            lax.bitcast_convert_type(a, jnp.float8_e4m3fn).astype(jnp.float32) for a in (k, v)
        )
        return k, v

    def place(
        self, st: CodedBlock, hot: tuple[Array, Array], page: Array, used: Array, at: Array
    ) -> tuple[Array, Array]:
        k, v = ops.hot_load_float8(st.kv, hot, page, used, at)
        # The places that this step has filled.
        new = jnp.repeat(used == 2, self.page, axis=2)[..., None]
        return jnp.where(
            new, (k.astype(jnp.float32) + st.offset[:, :, None]).astype(k.dtype), k
        ), v
