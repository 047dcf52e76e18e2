"""Votes for keys by the sign patterns of their subspaces, all G heads of a group at once, in one kernel.

First, what each of the 256 patterns of a subspace earns: a warp a subspace and head sorts the patterns by score, 8 a
lane (bitonic), sums the keys before each, and counts the limits above. A cluster of `blocks` blocks shares the
subspaces of a row, and each block then reads what the others found. What 4 heads give are the bytes of one word, so
that a key takes D/8 words and additions for all of them. At random addresses some 3.5 of 32 lanes would meet in one
bank of shared memory; so lane l begins with subspace l, and subspaces lie in banks of their own: table[pattern][copy,
subspace, word], 32 words a pattern. A thread has `keys` keys at once, and loads as many ahead, the first of them before
it sorts. A row has `parts` clusters.

**Bytes:** D/8 read and G written a key and kv head, and 1 KiB of counts a subspace, kv head and cluster: at D = 128 and
G = 4, 20 bytes a key. The bound on an H200 (4.3 TB/s) is 4.9 us for 8 kv heads x 131072, 39 us for 8 x 1M. Scores of
patterns are sums in the order of channels, in f32: where two are equal but for rounding, the reference may order them
otherwise. 96 registers at G = 4, no spills; by count, votes take 4.5 instructions a subspace and key.

**Measured** on an H200, 2026-11-21, jax 0.11.2, device time, 8 kv heads x 131072, D = 128, six limits: G = 4 17.8 us
(the reference 426), G = 1 16.3 us (175); no other shape yet. `benchmarks/results/collide.json` has more. It is three
times the bound: what a cluster does before it votes (sorting, and waiting for the others) is likely the most of it.

**Tried and lost** (G = 4): two clusters a row 23.6 us, with two warpgroups a block 20.3 us; 4 blocks a cluster 28.8 us.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from kvjax.kernels_pallas import _common as c
from kvjax.kernels_pallas._common import Word, loop, ptx, when, word

MEASURED: str | None = "2026-11-21"  # the date in benchmarks/results/collide.json
PATTERNS = 256  # of a subspace
HEADS = 8  # two words of a byte each
OWN = PATTERNS // 32  # patterns that a lane sorts


@dataclass(frozen=True)
class Config:
    parts: int = 1  # clusters of a row
    blocks: int = 8  # of a cluster
    warpgroups: int = 4  # of a block
    keys: int = 4  # that a thread loads at once

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise ValueError(f"parts must be at least 1; got {self.parts}")
        if self.blocks not in (1, 2, 4, 8):
            raise ValueError(f"blocks must be 1, 2, 4 or 8, a cluster's; got {self.blocks}")
        if self.warpgroups not in (1, 2, 4):
            raise ValueError(f"warpgroups must be 1, 2 or 4; got {self.warpgroups}")
        if self.keys not in (1, 2, 4):
            raise ValueError(f"keys must be 1, 2 or 4, as registers hold; got {self.keys}")


def config_for(rows: int, S: int) -> Config:
    """As many clusters a row as fit on half of the multiprocessors at once and have keys for all of their threads."""
    most = -(-S // (8 * 4 * 128))
    return Config(parts=max(1, min(64 // (8 * rows), most)))


def smem_bytes(subspaces: int, heads: int, config: Config) -> int:
    return 4 * sum(_sizes(subspaces, heads, config.blocks))


def _sizes(N: int, G: int, blocks: int) -> tuple[int, int, int]:
    """Words of what a block finds, of what all find (each's padded, to begin in other banks), of the table."""
    share = N // blocks * -(-G // 4)
    return PATTERNS * share, blocks * (PATTERNS * share + max(4, share)), PATTERNS * 32


def unsupported(q: Any, ids: Any, counts: Any, limits: Any, config: Config | None = None) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    *_, G, D = q.shape
    S, N = ids.shape[2:]
    if D not in (64, 128) or N * 8 != D:
        return f"the kernel collide takes head sizes 64 and 128 in subspaces of 8; got D={D} in {N}"
    if not 1 <= G <= HEADS:
        return f"the kernel collide takes 1 to {HEADS} query heads a kv head; got G={G}"
    if not 4 <= S < 1 << 24 or S % 4:
        return f"the kernel collide takes a multiple of 4 keys, less than 2^24; got {S}"
    if not 1 <= limits.shape[1] <= 255 // N:
        return f"the kernel collide takes 1 to {255 // N} limits for D={D}; got {limits.shape[1]}"
    if counts.dtype != jnp.int32 or limits.dtype != jnp.int32:
        return f"the kernel collide takes counts and limits in i32; got {counts.dtype} and {limits.dtype}"
    if 0 in q.shape:
        return f"the kernel collide takes at least one row; got q{list(q.shape)}"
    return None


def supported(q: Any, ids: Any, counts: Any, limits: Any) -> bool:
    return unsupported(q, ids, counts, limits) is None


def collide(q: Array, ids: Array, counts: Array, limits: Array, *, config: Config | None = None) -> Array:
    """u8[B, K, G, S] votes, of q [B, K, G, D], ids u8[B, K, S, D/8], counts i32[B, K, D/8, 256], limits i32[B, T]."""
    if limit := unsupported(q, ids, counts, limits):
        raise NotImplementedError(limit)
    B, K, G, _ = q.shape
    S = ids.shape[2]
    args = *(a.reshape(B * K, *a.shape[2:]) for a in (q.astype(jnp.float32), ids, counts)), limits
    return _votes(config or config_for(B * K, S), *args).reshape(B, K, G, S)


def _votes(config: Config, q: Array, ids: Array, counts: Array, limits: Array) -> Array:
    rows, S, N = ids.shape
    G, (B, T) = q.shape[1], limits.shape

    @jax.custom_batching.custom_vmap
    def run(q: Array, ids: Array, counts: Array, limits: Array) -> Array:
        return c.kernel(
            functools.partial(_program, sizes=(rows // B, G, S, N, T), config=config),
            name="kvjax_collide",
            out_type=jax.ShapeDtypeStruct((rows, G, S), jnp.uint8),
            scratch_types=[c.plgpu.SMEM((words,), jnp.uint32) for words in _sizes(N, G, config.blocks)],
            grid=(rows * config.parts,),
            grid_names=("row",),
            cluster=(config.blocks,),
            cluster_names=("part",),
            num_threads=config.warpgroups,
        )(q, ids, counts, limits)

    @run.def_vmap
    def batched(n: int, batches: list[bool], *args: Array) -> tuple[Array, bool]:
        return _votes(config, *c.flatten_batch(n, batches, args)).reshape(n, rows, G, S), True

    return run(q, ids, counts, limits)


def _program(
    q_m, ids_m, counts_m, limits_m, out_m, mine_m, all_m, table_m,
    *, sizes: tuple[int, int, int, int, int], config: Config,
) -> None:  # fmt: skip
    shared_by, G, S, N, T = sizes
    blocks, threads = config.blocks, 128 * config.warpgroups
    share, width = N // blocks, -(-G // 4)  # subspaces of a block; words of a pattern
    t, rank, cluster = c.special("tid.x"), c.special("cluster_ctarank"), c.special("clusterid.x")
    lane, warp = t & 31, t >> 5
    row = c.divide(cluster, config.parts)
    part = (cluster - row * config.parts) * blocks + rank
    q, ids, counts, limits, out = (c.global_address(m) for m in (q_m, ids_m, counts_m, limits_m, out_m))
    q, counts = c.offset_rows(q, row, G * N * 32), c.offset_rows(counts, row, N * PATTERNS * 4)
    ids, out = c.offset_rows(ids, row, S * N), c.offset_rows(out, row, G * S)
    limits = c.offset_rows(limits, c.divide(row, shared_by), T * 4)
    mine, every, table = (c.shared_address(m) for m in (mine_m, all_m, table_m))

    size = -(-S // (config.parts * blocks * 32)) * 32  # keys of a block
    stop = (part + 1) * size
    stop = (stop < S).choose(stop, S)
    vector = "{" + ", ".join(f"${i}" for i in range(N // 4)) + "}"

    def fetch(first: Word) -> list[Word]:
        """The patterns of this thread's keys first + t, first + t + threads, .., N/4 words each."""
        found = []
        for i in range(config.keys):
            key = first + t + i * threads
            at = c.offset(ids, (key < S).choose(key, S - 1) * N)
            found += ptx(f"ld.global.nc.v{N // 4}.u32 {vector}, [${N // 4}];", at, results=N // 4)
        return found

    held = fetch(part * size)
    for i in range(0, PATTERNS * share * width, threads):
        with when(t + i < PATTERNS * share * width):
            ptx("st.shared.u32 [$0], $1;", mine + (t + i) * 4, 0)
    c.block_barrier()
    bounds = [ptx(f"ld.global.nc.u32 $0, [$1+{4 * i}];", limits, results=1) for i in range(T)]
    bounds = [(x < 1 << 31).choose(x, 0) for x in bounds]  # no count is below a negative limit

    @loop(warp, share * G, threads // 32)
    def _subspace(i: Word) -> None:
        head = c.divide(i, share)
        own = i - head * share
        n = rank * share + own
        patterns, before = _rank(c.offset(q, head * (N * 32) + n * 32), c.offset(counts, n * (PATTERNS * 4)), lane)
        place = mine + own * (4 * width) + (head >> 2) * 4
        for pattern, x in zip(patterns, before, strict=True):
            earned = word(0)
            for bound in bounds:
                earned = earned + (x < bound).choose(1, 0)
            at = place + pattern * (4 * share * width)
            ptx("red.shared.add.u32 [$0], $1;", at, earned << ((head & 3) << 3))

    c.cluster_barrier()
    found, pad = PATTERNS * share * width, max(4, share * width)
    for i in range(0, blocks * found // 4, threads):
        with when(t + i < blocks * found // 4):
            block = c.divide(t + i, found // 4)
            at = (t + i - block * (found // 4)) * 16
            four = ptx("ld.shared::cluster.v4.u32 {$0, $1, $2, $3}, [$4];", c.remote(mine + at, block), results=4)
            ptx("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", every + block * ((found + pad) * 4) + at, *four)
    c.cluster_barrier()  # what this block found, the others have read
    which = lane & (N * width - 1)
    block = c.divide(which, share * width)
    source = every + block * ((found + pad) * 4) + (which - block * (share * width)) * 4

    @loop(warp * 4, PATTERNS, threads // 8)
    def _copy(first: Word) -> None:
        found = [
            ptx("ld.shared.u32 $0, [$1];", source + (first + i) * (4 * share * width), results=1) for i in range(4)
        ]
        for i, x in enumerate(found):
            ptx("st.shared.u32 [$0], $1;", table + (first + i) * 128 + lane * 4, x)

    c.block_barrier()
    copy = c.divide(lane, N) & (32 // (N * width) - 1)
    takes = [((lane + j) & 3) | 0x4440 for j in range(4)]
    places = [
        [table + (copy * N + (((lane >> 2) + i) & (N // 4 - 1)) * 4 + ((lane + j) & 3)) * (4 * width) for j in range(4)]
        for i in range(N // 4)
    ]
    turns = [(lane & (4 << i)).differs(0) for i in range(N // 8)]
    m = lane & 3
    swaps = ((m & 1).equals(0).choose(0x6240, 0x3715), (m < 2).choose(0x5410, 0x3276))

    def votes(words: Sequence[Word]) -> list[Word]:
        """A byte a head."""
        for i, turn in enumerate(turns):  # word (lane / 4 + i) % (N / 4) comes to be word i
            words = [turn.choose(words[(j + (1 << i)) % len(words)], x) for j, x in enumerate(words)]
        sums = [word(0)] * width
        for x, at in zip(words, places, strict=True):
            for take, place in zip(takes, at, strict=True):
                address = place + (ptx("prmt.b32 $0, $1, 0, $2;", x, take, results=1) << 7)
                if width == 1:
                    got = [ptx("ld.shared.u32 $0, [$1];", address, results=1)]
                else:
                    got = ptx("ld.shared.v2.u32 {$0, $1}, [$2];", address, results=2)
                sums = [a + b for a, b in zip(sums, got, strict=True)]
        return sums

    @loop(part * size, stop, threads * config.keys, held)
    def _keys(first: Word, *held: Word) -> list[Word]:
        ahead = fetch(first + threads * config.keys)
        for i in range(config.keys):
            key = first + t + i * threads
            for w, x in enumerate(votes(held[i * N // 4 : (i + 1) * N // 4])):
                for gap, swap in zip((1, 2), swaps, strict=True):  # of 4 lanes: head m of 4 keys, not 4 heads of key m
                    x = ptx("prmt.b32 $0, $1, $2, $3;", x, c.bfly(x, gap), swap, results=1)
                head = m + 4 * w
                with when((head < G) & (key < stop)):
                    ptx("st.global.b32 [$0], $1;", c.offset(c.offset_rows(out, head, S), key - m), x)
        return ahead


def _rank(q: Any, counts: Any, lane: Word) -> tuple[list[Word], list[Word]]:
    """8 of the 256 patterns, and how many keys those of higher score have: each lane others, best first.

    `q` is the address of 8 channels, `counts` that of the keys of each pattern.
    """

    def eight(at: Any) -> list[Word]:
        return [x for i in (0, 16) for x in ptx(f"ld.global.nc.v4.u32 {{$0, $1, $2, $3}}, [$4+{i}];", at, results=4)]

    channels, mine = eight(q), eight(c.offset(counts, lane * 32))
    keys, values = [], []
    for i in range(OWN):  # pattern 8 lane + i; its bit j is the sign of channel j
        total = word(0)
        for j, x in enumerate(channels):
            sign = word(((i >> j) & 1 ^ 1) << 31) if j < 3 else (((lane >> (j - 3)) & 1) ^ 1) << 31
            total = c.instr("add.f32", total, x ^ sign)  # and never -0, for 0 was added
        keys.append(total ^ ((word(0) - (total >> 31)) | 0x80000000))  # unsigned in the order of f32
        values.append((mine[i] << 8) | (lane * OWN + i))

    flips = [word(0)] * OWN  # all ones where the order is turned
    for size in (2**i for i in range(1, 9)):
        turned, flips = flips, [_rising(lane, i, size) for i in range(OWN)]
        keys = [key ^ old ^ new for key, old, new in zip(keys, turned, flips, strict=True)]
        gap = size // 2
        while gap:
            if gap >= OWN:
                _exchange_lanes(keys, values, lane, gap // OWN)
            else:
                for i in (i for i in range(OWN) if not i & gap):
                    swap = keys[i] < keys[i + gap]
                    for both in (keys, values):
                        both[i], both[i + gap] = (
                            swap.choose(both[i + gap], both[i]),
                            swap.choose(both[i], both[i + gap]),
                        )
            gap //= 2

    total, sums = word(0), []
    for value in values:
        sums.append(total)
        total = total + (value >> 8)
    through = _scan(total, lane, lambda a, b: a + b)
    base = through - total
    # Equal patterns share the place of their first: that of the last one that differs from the one before it.
    last = c.from_lane(keys[-1], (lane - 1) & 31)
    place, places = word(0), []
    for x, before in zip(keys, sums, strict=True):
        place = x.differs(last).choose(base + before, place)
        places.append(place)
        last = x
    ahead = _scan(place, lane, lambda a, b: (a < b).choose(b, a))
    ahead = lane.equals(0).choose(0, c.from_lane(ahead, (lane - 1) & 31))
    return [value & (PATTERNS - 1) for value in values], [(x < ahead).choose(ahead, x) for x in places]


def _rising(lane: Word, i: int, size: int) -> Word:
    """All ones where a sort into runs of `size`, falling and rising in turn, has pattern 8 lane + i in a rising one."""
    if size < OWN:
        return word(0xFFFFFFFF if i & size else 0)
    return word(0) - ((lane >> (size // OWN).bit_length() - 1) & 1) if size < PATTERNS else word(0)


def _exchange_lanes(keys: list[Word], values: list[Word], lane: Word, gap: int) -> None:
    """The larger key to the lane without the bit `gap`, the smaller to that with it; equal ones stay."""
    low = (lane & gap).equals(0)
    high = (lane & gap).differs(0)
    for i, (key, value) in enumerate(zip(keys, values, strict=True)):
        other, with_it = c.bfly(key, gap), c.bfly(value, gap)
        take = (low & (other > key)) | (high & (other < key))
        keys[i], values[i] = take.choose(other, key), take.choose(with_it, value)


def _scan(x: Word, lane: Word, join: Any) -> Word:
    """join of x of this lane and those below, whose neutral element is 0."""
    for gap in (1, 2, 4, 8, 16):
        other = c.from_lane(x, (lane - gap) & 31)
        x = join(x, (lane >= gap).choose(other, 0))
    return x
