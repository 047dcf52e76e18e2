"""Keys and values as codes of rotated directions, on the device and on the host.

After a random rotation one table of levels fits every model and layer, and a token needs no
more than one scale. Attention is over rotated keys, by the rotated query, and only its result
is rotated back. The mean of a row's first keys is taken out before coding; it adds one number
to all logits of a query, and comes back in the log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.tree_util import register_dataclass

from kvjax import ops
from kvjax.numerics.blocks import write
from kvjax.numerics.partial import Logits, PartialAttention, Span
from kvjax.numerics.quant import slice_tokens
from kvjax.numerics.rotate import (
    Directions,
    decode,
    encode,
    require_rotatable,
    rotate,
    rotate_back,
    rotate_few,
    rotation,
)
from kvjax.numerics.selection import PackedSelection, Selection
from kvjax.ops.chunk import attend_blocks
from kvjax.ops.op import for_gpu
from kvjax.ops.quantized import attend_rotated, turn_back
from kvjax.spec import CacheSpec, keep_ints
from kvjax.stores.host_codes import Coded, CodedBlock, _HostCodes
from kvjax.validation import check_one_of

BITS = (2, 3, 4, 8)


@register_dataclass
@dataclass(frozen=True)
class TurboBlock:
    """Codes of rotated keys and values, by planes: the signs of keys, the first plane, are a
    1-bit index of them.
    """

    k: Directions  # u8[B, K, S, D/8], u8[B, K, S, (bits-1) D/8], u16[B, K, S, 1]
    v: Directions  # the same, with the values' bits
    count: Array  # i32[B] slots [0, count) are valid
    offset: Array  # f32[B, K, D] mean of a row's first keys; the codes are of keys less this

    @property
    def slots(self) -> int:
        return self.k.signs.shape[2]


@dataclass(frozen=True, kw_only=True)
class _Turbo(Coded):
    """The codes and the attention over them; a subclass keeps the codes."""

    bits: int = 4
    value_bits: int | None = None
    seed: int = 0

    takes_steps = True

    def __post_init__(self) -> None:
        keep_ints(self, bits=1, value_bits=1, seed=0)
        check_one_of(type(self).__name__, BITS, bits=self.bits, value_bits=self.both_bits[1])

    @property
    def both_bits(self) -> tuple[int, int]:
        """Bits of a channel of keys and of values."""
        return self.bits, self.bits if self.value_bits is None else self.value_bits

    def check(self, spec: CacheSpec, chunk: int) -> None:
        super().check(spec, chunk)
        require_rotatable(spec.head_dim)

    def codes(self, k: Array, v: Array) -> tuple[Directions, Directions]:
        """Codes of keys, which lack their offset, and of values [..., D]."""
        key_bits, value_bits = self.both_bits
        D = k.shape[-1]
        # Behind a barrier: XLA would rotate anew for each bit of the codes.
        k, v = lax.optimization_barrier((self._rotate(k), self._rotate(v)))
        return encode(k, subspace=D, bits=key_bits), encode(
            v, subspace=D, bits=value_bits, least=True
        )

    def _rotate(self, x: Array) -> Array:
        """Returns the rotated x f32[..., D] of many tokens: on a GPU by a product, which is one
        kernel.
        """

        def product(x: Array) -> Array:
            return jnp.einsum(
                "...i,oi->...o",
                x.astype(jnp.float32),
                rotation(x.shape[-1], self.seed),
                precision="highest",
            )

        return for_gpu(product, lambda x: rotate(x, self.seed), x)

    def rotated(self, st: TurboBlock | CodedBlock, selection: Selection) -> tuple[Array, Array]:
        """Keys without their offset and values f32[B, K, H*M, D] of the selected slots,
        rotated.
        """
        raise NotImplementedError

    def gather(self, st: TurboBlock | CodedBlock, selection: Selection) -> tuple[Array, Array]:
        k, v = (rotate_back(a, self.seed) for a in self.rotated(st, selection))
        return k + st.offset[:, :, None], v

    def attend_slots(
        self, st: TurboBlock | CodedBlock, q: Array, selection: Selection, *, logits: Logits
    ) -> PartialAttention:
        rows = self.rotated(st, selection)
        return attend_rotated(q, *rows, st.offset, selection, seed=self.seed, logits=logits)

    def recoded(self, k: Array, v: Array) -> tuple[Array, Array]:
        k, v = (rotate_back(decode(code), self.seed) for code in self.codes(k, v))
        return k, v

    rounds_scales_to = jnp.float16  # for the laws: see `kvjax.testing`


@dataclass(frozen=True, kw_only=True)
class TurboQuant(_Turbo):
    """Keys and values in 2, 3, 4 or 8 bits a channel of a rotated direction, and a float16
    scale for each.

    A key takes D * bits / 8 + 2 bytes and a value D * value_bits / 8 + 2: at 4 bits and D = 128
    a token takes 132 bytes a KV head, against 512 in bfloat16. Every token is coded alone, so
    chunks may have any size. `SignPlane` selects by the keys' signs, without an index of its
    own.

    **Source:** TurboQuant (arXiv 2504.19874), the codes of least squared error. **Differs:**
    the rotation is a Hadamard matrix with random signs. The scale of a key is that with which
    q.k is unbiased, and of a value that of least error, as in DRIVE and EDEN (Vargaftik et al.
    2021, arXiv 2105.08339, and 2022, arXiv 2108.08842), instead of the length; the paper's
    inner-product form, which adds a 1-bit code of the residual, has 5 times this variance at 3
    bits. The mean of a row's first keys is taken out. Codes of 8 bits have uniform levels.
    """

    recalls = False

    def init(self, spec: CacheSpec, slots: int) -> TurboBlock:
        lead = (spec.batch, spec.kv_heads)
        D = spec.head_dim

        def empty(bits: int) -> Directions:
            signs, sizes = (
                jnp.zeros((*lead, slots, n * D // 8), jnp.uint8) for n in (1, bits - 1)
            )
            return Directions(signs, sizes, jnp.zeros((*lead, slots, 1), jnp.uint16))

        k, v = map(empty, self.both_bits)
        return TurboBlock(
            k, v, jnp.zeros(spec.batch, jnp.int32), jnp.zeros((*lead, D), jnp.float32)
        )

    def append_coded(self, st: TurboBlock, k: Array, v: Array, count: Array) -> TurboBlock:
        new = self.codes(*self.centred(st, k, v))
        new_k, new_v = jax.tree.map(
            lambda old, new: write(old, new, st.count, count), (st.k, st.v), new
        )
        return TurboBlock(new_k, new_v, jnp.minimum(st.count + count, st.slots), st.offset)

    def attend(
        self, st: TurboBlock, q: Array, start: Array, *, logits: Logits
    ) -> PartialAttention:
        if logits.cap is not None:
            return self.attend_chunk(st, q[:, :, :, None], start[:, None], logits=logits)
        part = ops.attend_quantized(
            rotate_few(q, self.seed), st.k, st.v, start, st.count, logits=logits
        )
        return turn_back(part, q, st.offset, seed=self.seed, scale=logits.uncapped)

    def attend_chunk(
        self, st: TurboBlock, q: Array, start: Array | None, *, logits: Logits
    ) -> PartialAttention:
        def read(st: TurboBlock, first: Array | int, size: int) -> tuple[Array, Array]:
            # Without the barrier XLA widens all codes ahead of the loop over blocks.
            k, v = lax.optimization_barrier(
                tuple(slice_tokens(code, first, size) for code in (st.k, st.v))
            )
            return decode(k) + st.offset[:, :, None], decode(v)

        turned = rotate(q, self.seed)
        offset = st.offset
        if logits.cap is not None:
            st = replace(st, offset=rotate(offset, self.seed))
            offset = jnp.zeros_like(offset)
        else:
            st = replace(st, offset=jnp.zeros_like(offset))
        part = attend_blocks(
            turned, st, start, st.count, read=read, slots=st.slots, unit=1, logits=logits
        )
        return turn_back(
            part,
            q.reshape(*q.shape[:2], -1, q.shape[-1]),
            offset,
            seed=self.seed,
            scale=logits.scale,  # of no offset, if there is a cap
        )

    def rotated(self, st: TurboBlock, selection: Selection) -> tuple[Array, Array]:  # type: ignore[override]
        D = st.offset.shape[-1]
        return ops.gather_quantized(st.k, selection, D), ops.gather_quantized(
            st.v, selection, D
        )

    def attend_zones(
        self,
        st: TurboBlock,
        q: Array,
        selection: Selection | PackedSelection,
        recent: Span,
        sink: Span | None,
        local: int,
        *,
        logits: Logits,
        sinks: Array | None = None,
    ) -> tuple[Array, TurboBlock]:
        out: Array = ops.attend_coded_zones(
            q,
            st.k,
            st.v,
            st.offset,
            selection,
            recent,
            sink,
            local,
            sinks,
            seed=self.seed,
            logits=logits,
        )
        return out, st

    def attend_zones_part(
        self,
        st: TurboBlock,
        q: Array,
        selection: Selection | PackedSelection,
        recent: Span,
        sink: Span | None,
        local: int,
        *,
        logits: Logits,
    ) -> PartialAttention:
        part: PartialAttention = ops.attend_coded_zones(
            q,
            st.k,
            st.v,
            st.offset,
            selection,
            recent,
            sink,
            local,
            seed=self.seed,
            logits=logits,
            part=True,
        )
        return part


@dataclass(frozen=True, kw_only=True)
class HostTurboQuant(_Turbo, _HostCodes):
    """The codes of `TurboQuant` in pinned host memory; a step moves the codes of the selected
    tokens only.

    The bytes of a key and its value lie one after the other, in two halves: with bits of both,
    D = 128 and 4 bits, 132 bytes cross the bus for a token and KV head.
    """

    def __post_init__(self) -> None:
        _Turbo.__post_init__(self)
        _HostCodes.__post_init__(self)

    def width(self, head_dim: int) -> int:
        return -(-sum(self._widths(head_dim)) // 2)

    def _widths(self, head_dim: int) -> tuple[int, ...]:
        return tuple(head_dim * bits // 8 + 2 for bits in self.both_bits)

    def encode_both(self, k: Array, v: Array) -> tuple[Array, Array]:
        rows = [
            part
            for code in self.codes(k, v)
            for part in (
                code.signs,
                code.sizes,
                lax.bitcast_convert_type(code.weights[..., 0], jnp.uint8),
            )
        ]
        both = jnp.concatenate(rows, axis=-1)
        width = self.width(k.shape[-1])
        both = jnp.pad(both, ((0, 0),) * (both.ndim - 1) + ((0, 2 * width - both.shape[-1]),))
        return both[..., :width], both[..., width:]

    def decode_rotated(self, k: Array, v: Array, head_dim: int) -> tuple[Array, ...]:
        """Keys and values f32[..., D] of two rows, rotated."""
        both = jnp.concatenate([k, v], axis=-1)
        first, second = self._widths(head_dim)

        def one(row: Array) -> Array:
            weights = lax.bitcast_convert_type(row[..., -2:], jnp.uint16)[..., None]
            return decode(
                Directions(row[..., : head_dim // 8], row[..., head_dim // 8 : -2], weights)
            )

        return one(both[..., :first]), one(both[..., first : first + second])

    def decode_both(self, k: Array, v: Array, head_dim: int) -> tuple[Array, Array]:
        k, v = (rotate_back(a, self.seed) for a in self.decode_rotated(k, v, head_dim))
        return k, v

    def rotated(self, st: CodedBlock, selection: Selection) -> tuple[Array, Array]:  # type: ignore[override]
        k, v = self.decode_rotated(*self._rows.gather(st, selection), st.offset.shape[-1])
        return k, v
