"""Products of queries with the 4-bit codes of selected keys, decoded by a table in shared
memory.

The sign and size of a channel are 4 bits in four planes. Bit exchanges bring the bits of
channels i and i + 4 of a subspace together in one byte, and a table has both decoded numbers
for each byte. It has 16 copies to avoid bank conflicts. The sum of each subspace is multiplied
by its weight.

Each thread estimates one key and reads its codes before the block writes the table. Random
reads dominate, so the reads of all keys should be in flight at once: rolled loops keep
registers few.

**Bytes:** 3/4 D read a selected key, in pieces of at least 32 bytes, plus 4 of its slot and 4
written.

**Bound:** latency of random reads.

**Limits:** `unsupported`. Evidence: `benchmarks/NOTES.md`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.kernels_pallas import simt, tuned
from kvjax.kernels_pallas.score.rotate import channels, rotated
from kvjax.kernels_pallas.simt import Word, loop, ptx, when, word

MEASURED: str | None = "2026-11-22"  # the date in benchmarks/results/rerank.json
BYTES = 256  # of two channels
COPIES = 16  # of the table, for the lanes of half a warp


@dataclass(frozen=True)
class Config:
    warpgroups: int = 2  # of a block, with one candidate per thread

    def __post_init__(self) -> None:
        if self.warpgroups not in (1, 2, 4, 8):
            raise ValueError(f"warpgroups must be 1, 2, 4 or 8; got {self.warpgroups}")


class Split(NamedTuple):
    """How the selected keys of a head are split over blocks."""

    blocks: int
    candidates: int  # of a block, whole warps
    threads: int  # of a block


def config_for(
    heads: int, M: int, pending: int = 0, target: simt.Target | None = None
) -> Config:
    """The smallest blocks of which one per multiprocessor is enough, so that all candidates are
    in flight; else small ones. `pending`: keys per head for which `select_4bit` has blocks in
    the same grid."""
    most = (target or simt.target()).multiprocessors
    enough = (
        n for n in (2, 4, 8) if heads * (-(-M // (128 * n)) - (-pending // (128 * n))) <= most
    )
    return Config(next(enough, 2))


def split(
    heads: int, M: int, config: Config, beside: int = 0, target: simt.Target | None = None
) -> Split:
    """Splits over all multiprocessors but `beside`, if one block for each is enough."""
    most = (target or simt.target()).multiprocessors
    blocks = max(-(-M // (128 * config.warpgroups)), (most - beside) // heads)
    candidates = -(-M // (blocks * 32)) * 32
    return Split(-(-M // candidates), candidates, 128 * config.warpgroups)


def smem_bytes(D: int) -> int:
    return BYTES * COPIES * 8 + D * 4


def unsupported(q: Any, signs: Any, sizes: Any, weights: Any, slots: Any) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    D = q.shape[-1]
    S, N = signs.shape[2:]
    if D not in (64, 128) or (N * 8, sizes.shape[3], weights.shape[3]) != (D, 3 * N, N):
        return (
            f"the kernel rerank takes head sizes 64 and 128 in subspaces of 8; got D={D} in {N}"
        )
    if slots.shape[:3] != q.shape[:3]:
        return f"the kernel rerank takes slots for each of q{list(q.shape)}; got slots{list(slots.shape)}"
    if weights.dtype != jnp.uint16 or slots.dtype != jnp.int32:
        return f"the kernel rerank takes weights in u16 and slots in i32; got {weights.dtype} and {slots.dtype}"
    if not 1 <= S < 1 << 26:
        return f"the kernel rerank takes 1 to 2^26 - 1 keys; got {S}"
    if 0 in q.shape or 0 in slots.shape:
        return f"the kernel rerank takes at least one candidate; got slots{list(slots.shape)}"
    return None


@simt.lowered_once("centres", "scale", "config")
def rerank(
    q: Array, signs: Array, sizes: Array, weights: Array, slots: Array,
    *, centres: tuple[float, ...], scale: float, config: Config | None = None,
) -> Array:  # fmt: skip
    """f32[B, K, G, M]: scale * q.k~ of q [B, K, G, D] with the keys at slots i32[B, K, G, M],
    clipped to S.

    Keys are signs u8[B, K, S, D/8], sizes u8[B, K, S, 3 D/8] and weights u16[B, K, S, D/8], as
    in `rotate.Directions`; `centres` are the values of the 8 sizes, as a tuple, because
    arguments of `lowered_once` must be hashable.
    """
    if limit := unsupported(q, signs, sizes, weights, slots):
        raise NotImplementedError(limit)
    B, K, G, M = slots.shape
    codes = (a.reshape(B * K, *a.shape[2:]) for a in (signs, sizes, weights))
    heads = (a.reshape(B * K * G, a.shape[-1]) for a in (q.astype(jnp.float32), slots))
    config = config or tuned.select(
        "rerank",
        config_for(B * K * G, M, target=simt.target((q, signs))),
        (q, signs),
        rows=B * K * G,
        M=M,
        G=G,
        D=q.shape[-1],
    )
    how = tuple(map(float, centres)), scale, config
    return _estimates(how, *heads, *codes).reshape(B, K, G, M)


def _estimates(
    how: tuple[tuple[float, ...], float, Config], q: Array, slots: Array, *codes: Array
) -> Array:
    heads, D = q.shape
    M = slots.shape[1]
    rows, S, _ = codes[0].shape
    centres, scale, config = how
    shares = split(heads, M, config, target=simt.target((q, *codes)))

    @simt.over_rows(functools.partial(_estimates, how))
    def run(q: Array, slots: Array, *codes: Array) -> Array:
        return simt.kernel(
            functools.partial(
                _program,
                sizes=(heads // rows, S, D, M),
                shares=shares,
                centres=centres,
                scale=scale,
            ),
            name="kvjax_rerank",
            out_type=jax.ShapeDtypeStruct((heads, M), jnp.float32),
            scratch=(BYTES * COPIES * 2, D),
            blocks=heads * shares.blocks,
            warpgroups=config.warpgroups,
        )(q, slots, *codes)

    return run(q, slots, *codes)


def _program(
    q_m, slots_m, signs_m, sizes_m, weights_m, out_m, table_m, queries_m,
    *, sizes: tuple[int, int, int, int], shares: Split, centres: Sequence[float], scale: float,
) -> None:  # fmt: skip
    M = sizes[3]
    place = Place(simt.special("ctaid.x"), sizes, shares)
    codes = (signs_m, sizes_m, weights_m)
    scratch = (table_m, queries_m)
    total = estimate(
        q_m, place.slot(slots_m), codes, scratch, place, centres=centres, scale=scale
    )
    with when(place.is_of_block & (place.candidate < M)):
        out = simt.offset_rows(simt.global_address(out_m), place.head, M * 4)
        ptx("st.global.b32 [$0], $1;", simt.offset(out, place.candidate * 4), total)


class Place:
    """The key that a thread of a block scores; `sizes` = (query heads of a row of keys, S, D,
    M).
    """

    def __init__(self, block: Word, sizes: tuple[int, int, int, int], shares: Split):
        self.sizes = sizes
        self.shares = shares
        t = simt.special("tid.x")
        self.head = simt.divide(block, shares.blocks)
        self.row = simt.divide(self.head, sizes[0])
        self.first = (block - self.head * shares.blocks) * shares.candidates  # of the block
        self.candidate = self.first + t
        self.is_of_block = t < shares.candidates

    def slot(self, slots_m: Any) -> Word:
        """The slot of the thread's candidate, as it is in the list."""
        _, _, _, M = self.sizes
        at = simt.offset_rows(simt.global_address(slots_m), self.head, M * 4)
        candidate = (self.candidate < M).select(self.candidate, M - 1)
        return simt.load(simt.offset(at, candidate * 4))


def estimate(
    q_m: Any, slot: Word, codes_m: Sequence[Any], scratch_m: Sequence[Any], place: Place,
    *, centres: Sequence[float], scale: float, turned: int | None = None,
) -> Word:  # fmt: skip
    """scale * q.k~ of this thread's candidate, in f32; with R q in place of q if `turned` is
    given (`rotated`).
    """
    _, S, D, _ = place.sizes
    signs_m, sizes_m, weights_m = codes_m
    table_m, queries_m = scratch_m
    N = D // 8
    threads = place.shares.threads
    t = simt.special("tid.x")
    q = simt.offset_rows(simt.global_address(q_m), place.head, D * 4)
    table = simt.shared_address(table_m)
    queries = simt.shared_address(queries_m)

    # A negative slot counts from the end, as in the reference.
    slot = (slot < 1 << 31).select(slot, slot + S)
    slot = (slot < S).select(slot, (slot < 1 << 31).select(S - 1, 0))
    width = N // 4  # words of a plane, or of half the weights
    vector = "{" + ", ".join(f"${i}" for i in range(width)) + "}"

    def planes(m: Any, count: int) -> list[list[Word]]:
        at = simt.offset_rows(
            simt.offset_rows(simt.global_address(m), place.row, S * N * count), slot, N * count
        )
        loads = [
            f"ld.global.nc.v{width}.u32 {vector}, [${width}+{i * N}];" for i in range(count)
        ]
        return [ptx(load, at, results=width) for load in loads]

    (signs,) = planes(signs_m, 1)
    bits = planes(sizes_m, 3)
    weights = [x for half in planes(weights_m, 2) for x in half]

    with when(t < 32):
        factor = simt.real(scale if turned is None else scale * D**-0.5)
        for i, x in enumerate(rotated(channels(q, D), turned)):
            simt.store_shared(queries + t * (D // 8) + 4 * i, simt.instr("mul.f32", x, factor))
    decoded = _decode(t & 15, [simt.real_bits(x) for x in centres])  # lane i has that of code i
    for first in range(0, BYTES, threads):
        with when(t + first < BYTES):
            byte = t + first
            two = [simt.from_lane(decoded, byte & 15), simt.from_lane(decoded, byte >> 4)]
            at = table + byte * (COPIES * 8) + ((t & (COPIES // 2 - 1)) << 4)
            # Two copies at a time, in another order in each lane of eight.
            for i in range(COPIES // 2):
                ptx("st.shared.v4.b32 [$0], {$1, $2, $1, $2};", at ^ (i << 4), *two)
    simt.block_barrier()

    mine = table + ((t & (COPIES - 1)) << 3)
    product = functools.partial(_product, queries, mine, signs, bits, weights)
    if place.shares.candidates > threads - 32:
        return product()
    (total,) = simt.branch(place.is_of_block, lambda: [product()], [word(0)])
    return total


def _product(
    queries: Word,
    table: Word,
    signs: list[Word],
    bits: Sequence[list[Word]],
    weights: Sequence[Word],
) -> Word:
    """The product of a query with a key, given its signs, planes of sizes, and weights in
    pairs.
    """
    total = word(0)
    for w in range(len(signs)):  # channels 32 w ..
        pairs = _nibbles([*(plane[w] for plane in bits), signs[w]])

        @loop(
            queries + w * 128,
            queries + w * 128 + 128,
            64,
            [total, weights[2 * w + 1], weights[2 * w], *pairs],
        )
        def carried(
            at: Word, total: Word, ahead: Word, scales: Word, *pairs: Word
        ) -> list[Word]:
            """Adds two subspaces, whose pairs are the lower bytes of words; `ahead` are the
            weights of the next two.
            """
            # Otherwise ptxas reads ahead so far that two blocks fill the registers.
            ptx('.pragma "nounroll";')
            for b, weight in enumerate((scales << 16, scales & 0xFFFF0000)):
                load = "ld.shared.v4.u32 {$0, $1, $2, $3}, [$4+%d];"
                channels = [x for i in (0, 16) for x in ptx(load % (b * 32 + i), at, results=4)]
                part = word(0)
                for i, pair in enumerate(pairs):
                    # `table` + 128 * byte b.
                    address = simt.instr("dp4a.u32.u32", pair, (COPIES * 8) << (8 * b), table)
                    two = simt.load_shared(address, 2)
                    for x, channel in zip(two, (channels[i], channels[i + 4]), strict=True):
                        part = simt.instr("fma.rn.f32", x, channel, part)
                total = simt.instr("fma.rn.f32", part, weight, total)
            return [total, ahead, ahead, *(x >> 16 for x in pairs)]

        total = carried[0]
    return total


def _decode(code: Word, centres: Sequence[int]) -> Word:
    """The number, in f32, of a sign in bit 3 and the index of a centre in bits 0 to 2."""
    size = word(centres[-1])
    for i, centre in enumerate(centres[:-1]):
        size = (code & 7).equals(i).select(centre, size)
    return size ^ (((code >> 3) ^ 1) << 31)


def _nibbles(planes: Sequence[Word]) -> list[Word]:
    """Four words of four planes. Word i has bits i, i + 4, ..: nibble n has bits i + 4 n, the
    first plane's lowest.

    In each nibble a matrix of 4 x 4 bits is transposed: blocks of two, then single bits change
    places.
    """
    rows = list(planes)
    for gap, mask in ((2, 0x33333333), (1, 0x55555555)):
        for i in (0, 3 - gap):
            pairs = (rows[i], rows[i + gap] << gap), (rows[i] >> gap, rows[i + gap])
            # Bits of the mask come from the first, the others from the second.
            rows[i], rows[i + gap] = (
                ptx(f"lop3.b32 $0, $1, $2, {mask}, 0xE4;", *pair, results=1) for pair in pairs
            )
    return rows
