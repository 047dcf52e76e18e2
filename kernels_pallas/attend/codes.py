"""Codes of 2 and 4 bits for `attend_quantized`: their sizes, and how they become operands of
`mma`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.simt import Word, instr, ptx

BY_TOKEN = 32  # keys of a unit if each key has its own scales
LIFT = 64  # see `codes_at`
ONE = 0x3F803F80  # bf16, twice


@dataclass(frozen=True)
class Layout:
    """Sizes of codes and of a unit of them, and the places of its parts in a stage of shared
    memory, in bytes.
    """

    S: int
    D: int
    bits: tuple[int, int]  # of keys and values
    key_group: tuple[int, int]  # tokens and channels
    value_channels: int  # of a group

    @property
    def by_channel(self) -> bool:
        return self.key_group[1] == 1

    @property
    def unit(self) -> int:
        return self.key_group[0] if self.by_channel else BY_TOKEN

    @property
    def tiles(self) -> int:
        return -(-self.unit // 16)

    @property
    def per_token(self) -> tuple[int, ...]:
        """Bytes per token of key codes, value codes, value scales, and key scales by token."""
        keys = 0 if self.by_channel else 4 * self.D // self.key_group[1]
        return (
            self.D * self.bits[0] // 8,
            self.D * self.bits[1] // 8,
            4 * self.D // self.value_channels,
            keys,
        )

    @property
    def places(self) -> tuple[int, ...]:
        return tuple(accumulate((16 * self.tiles * n for n in self.per_token[:3]), initial=0))

    @property
    def stage(self) -> int:
        return 16 * self.tiles * sum(self.per_token) + (4 * self.D if self.by_channel else 0)


def layout_of(D: int, keys: Any, values: Any) -> Layout:
    S = keys[0].shape[-2]
    key_bits, value_bits = (codes.shape[-1] * 8 // D for codes, _ in (keys, values))
    return Layout(
        S, D, (key_bits, value_bits), groups_of(keys[1], S, D), groups_of(values[1], S, D)[1]
    )


def groups_of(scales: Any, S: int, D: int) -> tuple[int, int]:
    """Tokens and channels of a group."""
    return S // scales.shape[-2], D // scales.shape[-1]


# An integer m below 256 as the bits of a bf16 is m 2^-133, whatever its highest bit (the
# smallest normal numbers are as dense as those below them). So an `and` makes two codes, times
# 2^-133 and the power of two of their place; the upper bytes need a shift by 8 first. Queries
# are multiplied by the inverse of the powers beforehand, less LIFT; for values the place
# belongs to a channel, and its power is divided out in the end.


def codes_at(x: Word, shifted: Word, place: int, bits: int) -> list[Word]:
    """The codes in place `place` of the lower bytes of both halves of x, and those of the upper
    bytes.
    """
    mask = (((1 << bits) - 1) << (bits * place)) * 0x10001
    return [x & mask, shifted & mask]


def prmt(a: Word, b: Word, how: int) -> Word:
    return instr("prmt.b32", a, b, how)


def load_words(at: Any, words: int) -> list[Word]:
    """1, 2, 4 or a multiple of 4 words of shared memory, at a Word, or of device memory, at an
    address.
    """
    space = "shared" if isinstance(at, Word) else "global.nc"
    n = min(words, 4)
    lanes = ", ".join(f"${i}" for i in range(n))
    kind, to = (f".v{n}", f"{{{lanes}}}") if n > 1 else ("", lanes)
    loads = [f"ld.{space}{kind}.u32 {to}, [${n}+{4 * w}];" for w in range(0, words, n)]
    found = [ptx(load, at, results=n) for load in loads]
    return found if n == 1 else [w for four in found for w in four]


def own_queries(q: Any, heads: int, D: int, quad: Word, col: Word) -> list[Word]:
    """The D/4 adjacent channels of query `quad` for this column of lanes, two a word; 0 past
    the queries.
    """
    mine = (quad < heads).select(quad, 0)
    return [
        (quad < heads).select(w, 0)
        for w in load_words(simt.offset(q, mine * (D * 2) + col * (D // 2)), D // 8)
    ]


def affine_of(x: Word, bits: int, other: Word | None = None) -> tuple[Word, Word]:
    """Scales 2^bits and zeros in bf16, from two u32 with scale and zero each, or one for both."""
    y = x if other is None else other
    return multiply(prmt(x, y, 0x5410), pair_of(2.0**bits)), prmt(x, y, 0x7632)


def pairs_of(layout: Layout) -> list[tuple[int, int]]:
    """Channels of a lane whose codes of keys are 16 bits apart in a word; the j-th pair of a
    word's lower bytes comes before that of its upper bytes."""
    half = 16 // layout.bits[0]
    lows = [
        w + j + upper
        for w in range(0, layout.D // 4, 2 * half)
        for j in range(half // 2)
        for upper in (0, half // 2)
    ]
    return [(low, low + half) for low in lows]


def exact_operand(
    own: Sequence[Sequence[Sequence[Word]]], m: int, j: int, in_byte: int
) -> list[Word]:
    """The left operand of a product of `Mixing`, from this lane's channels of exact values by
    token and block.
    """
    return [
        prmt(
            own[x][m][channel // 2],
            own[x + 1][m][channel // 2],
            0x7632 if channel % 2 else 0x5410,
        )
        for x in (0, 2)
        for channel in (j, j + in_byte)
    ]


def multiply(a: Any, b: Any) -> Word:
    """Products of two pairs of bf16; before compute capability 9.0 there is no instruction but
    `fma`.
    """
    return instr("fma.rn.bf16x2", a, b, pair_of(-0.0))


def centre_of(bits: int) -> float:
    """The mean of the least code and the largest."""
    return (2**bits - 1) / 2


def pair_of(x: float) -> int:
    """x twice, in bf16, which must be exact."""
    return (simt.real_bits(x) >> 16) * 0x10001


def decode(x: Word, j: int, bits: int, scale: Word, zero: Word) -> Word:
    """Values of the j-th codes of both halves of x."""
    shift = bits * j - (7 - bits)
    x = x >> shift if shift > 0 else x << -shift if shift else x
    mask = ((1 << bits) - 1) << (7 - bits)
    code = instr("fma.rn.bf16x2", ONE, pair_of(-1.0), (x & (mask * 0x10001)) | ONE)
    return instr("fma.rn.bf16x2", code, scale, zero)
