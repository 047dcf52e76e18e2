"""Keys and values in 2, 3, 4 or 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax.numpy as jnp
from jax import Array, lax
from jax.tree_util import register_dataclass

from kvjax import ops
from kvjax.numerics.blocks import write
from kvjax.numerics.partial import Logits, PartialAttention, Span
from kvjax.numerics.quant import QuantArray, channels_packed, dequantize, quantize, slice_tokens
from kvjax.numerics.selection import Selection
from kvjax.ops.chunk import attend_blocks
from kvjax.spec import CacheSpec, keep_ints
from kvjax.stores.store import Store, refuse_codes
from kvjax.validation import check_divides, check_one_of

KeyAxis = Literal["channel", "token"]
BITS = (2, 3, 4, 8)


@register_dataclass
@dataclass(frozen=True)
class QuantizedBlock:
    """Codes of keys and values. Tokens are written in whole chunks, once."""

    k: QuantArray  # u8[B, K, S, D * bits / 8], u32[B, K, S / gs, D / gd]
    v: QuantArray  # the same, with the values' bits and group; gs is 1
    count: Array  # i32[B] slots [0, count) are valid

    @property
    def slots(self) -> int:
        return self.k.codes.shape[2]


@dataclass(frozen=True, kw_only=True)
class Quantized(Store):
    """Keys and values as codes of few bits, with a scale and a zero point per group; a token is
    quantised once.

    For a group x of numbers, in b bits:

        zero = min x     scale = (max x - min x) / (2^b - 1)
        code = round((x - zero) / scale)     x~ = zero + scale * code

    `kvjax.numerics.quant.quantize` computes the codes, and `kvjax.ops.attend_quantized` attends
    to x~. KIVI groups keys by channel and values by token, LogQuant too or both by token.

    Values are grouped by token: `value_group` channels of a token (or all, if a head has
    fewer). Keys are grouped in the same way with key_axis="token", or by channel: `key_group`
    consecutive tokens of the history per channel. Bits and group of values default to those of
    keys.

    A key takes D * bits / 8 bytes of codes and 4 D / key_group bytes of scale and zero point,
    and a value accordingly: at 2 bits, groups of 32 and D = 128, 96 bytes per token and kv
    head, against 512 in bfloat16.
    """

    bits: int = 2
    key_axis: KeyAxis = "channel"
    key_group: int = 32
    value_bits: int | None = None
    value_group: int | None = None

    takes_steps = True

    def __post_init__(self) -> None:
        keep_ints(self, bits=1, key_group=1, value_bits=1, value_group=1)
        check_one_of("Quantized", BITS, bits=self.bits, value_bits=self._value_bits)
        check_one_of("Quantized", get_args(KeyAxis), key_axis=self.key_axis)

    @property
    def _value_bits(self) -> int:
        return self.bits if self.value_bits is None else self.value_bits

    def _key_tokens(self) -> int:
        return self.key_group if self.key_axis == "channel" else 1

    def _key_channels(self, head_dim: int) -> int:
        return 1 if self.key_axis == "channel" else min(self.key_group, head_dim)

    def _value_channels(self, head_dim: int) -> int:
        return min(self.key_group if self.value_group is None else self.value_group, head_dim)

    def check(self, spec: CacheSpec, chunk: int) -> None:
        D = spec.head_dim
        check_divides(self, "the chunk of ", chunk, key_group=self._key_tokens())
        check_divides(
            self,
            "head_dim=",
            D,
            key_group=self._key_channels(D),
            value_group=self._value_channels(D),
        )
        for bits in (self.bits, self._value_bits):
            if D % channels_packed(bits):
                raise ValueError(
                    f"Quantized packs codes of {bits} bits by {channels_packed(bits)} channels, and head_dim={D} is "
                    f"not a multiple of that; use {', '.join(str(b) for b in BITS if D % channels_packed(b) == 0)} bits"
                )

    def init(self, spec: CacheSpec, slots: int) -> QuantizedBlock:
        lead = (spec.batch, spec.kv_heads)
        D = spec.head_dim

        def empty(bits: int, tokens: int, channels: int) -> QuantArray:
            codes = jnp.zeros((*lead, slots, D * bits // 8), jnp.uint8)
            return QuantArray(
                codes, jnp.zeros((*lead, slots // tokens, D // channels), jnp.uint32)
            )

        return QuantizedBlock(
            empty(self.bits, self._key_tokens(), self._key_channels(D)),
            empty(self._value_bits, 1, self._value_channels(D)),
            jnp.zeros(spec.batch, jnp.int32),
        )

    def append(self, st: QuantizedBlock, k: Array, v: Array, count: Array) -> QuantizedBlock:
        tokens = self._key_tokens()
        start = st.count
        k, v = refuse_codes(self, k, v)
        new_k, new_v = self._quantize(k, v)
        return QuantizedBlock(
            QuantArray(
                write(st.k.codes, new_k.codes, start, count),
                write(st.k.scales, new_k.scales, start // tokens, count // tokens),
            ),
            QuantArray(
                write(st.v.codes, new_v.codes, start, count),
                write(st.v.scales, new_v.scales, start, count),
            ),
            jnp.minimum(start + count, st.slots),
        )

    def _quantize(self, k: Array, v: Array) -> tuple[QuantArray, QuantArray]:
        D = k.shape[-1]
        return (
            quantize(k, self.bits, tokens=self._key_tokens(), channels=self._key_channels(D)),
            quantize(v, self._value_bits, channels=self._value_channels(D)),
        )

    def decoded(self, k: Array, v: Array) -> tuple[Array, Array]:
        codes_k, codes_v = self._quantize(k, v)
        return dequantize(codes_k, k.shape[-1]), dequantize(codes_v, v.shape[-1])

    def attend(
        self, st: QuantizedBlock, q: Array, start: Array, *, logits: Logits
    ) -> PartialAttention:
        return ops.attend_quantized(q, st.k, st.v, start, st.count, logits=logits)

    def attend_chunk(
        self, st: QuantizedBlock, q: Array, start: Array | None, *, logits: Logits
    ) -> PartialAttention:
        D = q.shape[-1]

        def read(
            coded: tuple[QuantArray, QuantArray], first: Array | int, size: int
        ) -> tuple[Array, Array]:
            # Without the barrier XLA widens all codes ahead of the loop over blocks.
            k, v = lax.optimization_barrier(
                tuple(slice_tokens(code, first, size) for code in coded)
            )
            return dequantize(k, D), dequantize(v, D)

        unit = self._key_tokens()
        return attend_blocks(
            q,
            (st.k, st.v),
            start,
            st.count,
            read=read,
            slots=st.slots,
            unit=unit,
            logits=logits,
        )

    def attend_with(
        self,
        st: QuantizedBlock,
        q: Array,
        start: Array,
        recent: Span,
        sink: Span | None,
        *,
        logits: Logits,
        sinks: Array | None = None,
        part: bool = False,
    ) -> Any:
        return ops.attend_quantized_zones(
            q,
            st.k,
            st.v,
            start,
            st.count,
            recent,
            sink,
            sinks,
            logits=logits,
            part=part,
        )

    def gather(self, st: QuantizedBlock, selection: Selection) -> tuple[Array, Array]:
        D = st.k.codes.shape[-1] * 8 // self.bits
        return ops.gather_quantized(st.k, selection, D), ops.gather_quantized(
            st.v, selection, D
        )
