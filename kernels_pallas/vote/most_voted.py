"""The slots of the keys with the most votes, in order of slot, selected in one kernel.

Several blocks share a row of votes. Each block counts its votes by value, in separate bins for
each lane to avoid bank conflicts. The sums over the blocks, which are a cluster or meet in
device memory between two launches, give the least vote that is selected and the place where
each block begins. Each block then reads its votes again, and the place of a slot is the number
of selected slots before it, from running sums over lanes and warps. Votes are compared four a
word, and one word holds both running sums. Lengths and counts are read from the cache and
clipped.

**Bytes:** 1 read twice a key and row, and 4 written a place.

**Bound:** latency; the votes usually lie in the L2 cache.

**Limits:** `unsupported`. Evidence: `benchmarks/NOTES.md`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.kernels_pallas import simt, tuned
from kvjax.kernels_pallas.simt import Word, loop, ptx, when, word

MEASURED: str | None = "2026-11-22"  # the date in benchmarks/results/most_voted.json
BINS = 256
COPIES = 32  # one for each lane, in a bank of its own
OWN = BINS // 32  # bins of a lane
BYTES = 16  # votes that a thread reads at once
HIGH = 0x80808080  # the highest bits of the bytes of a word


@dataclass(frozen=True)
class Config:
    blocks: int = 8  # of a row
    warpgroups: int = 4  # of a block
    cluster: int = 1  # 0: the blocks are no cluster, and count in a launch before

    def __post_init__(self) -> None:
        if self.cluster not in (0, 1):
            raise ValueError(f"cluster must be 0 or 1; got {self.cluster}")
        if self.cluster and self.blocks not in (1, 2, 4, 8, 16):
            raise ValueError(f"blocks must be 1, 2, 4, 8 or 16, a cluster's; got {self.blocks}")
        if not 1 <= self.blocks <= 16:
            raise ValueError(f"blocks must be 1 to 16; got {self.blocks}")
        if self.warpgroups not in (2, 4, 8):
            raise ValueError(
                f"warpgroups must be 2, 4 or 8, a thread for each bin; got {self.warpgroups}"
            )


def config_for(rows: int, target: simt.Target | None = None) -> Config:
    """Blocks per row and their size: fewer and smaller the more rows there are, so that all run
    at once.
    """
    target = target or simt.target()
    if not target.clusters:
        return Config(max(1, min(16, target.multiprocessors // rows)), cluster=0)
    if rows <= 16:
        return Config()
    return Config(blocks=8, warpgroups=2) if rows <= 32 else Config(blocks=4, warpgroups=2)


def smem_bytes(config: Config) -> int:
    return 4 * sum(_sizes(config))


def _sizes(config: Config) -> tuple[int, ...]:
    """Words of the copies of the bins, the bins of the block, of the row and of the blocks
    before, and sums by warp.
    """
    return BINS * COPIES, BINS, BINS, BINS, 4 * config.warpgroups


def unsupported(votes: Any, length: Any, count: Any, room: int) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    S = votes.shape[3]
    if votes.dtype != jnp.uint8 or length.dtype != jnp.int32 or count.dtype != jnp.int32:
        kinds = f"{votes.dtype}, {length.dtype} and {count.dtype}"
        return (
            f"the kernel most_voted takes votes in u8, lengths and counts in i32; got {kinds}"
        )
    if S % BYTES or not BYTES <= S < 1 << 24:
        return (
            f"the kernel most_voted takes a multiple of {BYTES} keys, less than 2^24; got {S}"
        )
    if 0 in votes.shape or room < 1:
        return f"the kernel most_voted takes at least one row and place; got votes{list(votes.shape)}, room {room}"
    return None


@simt.lowered_once("room", "local", "config")
def most_voted(
    votes: Array,
    length: Array,
    count: Array,
    room: int,
    *,
    complement: Sequence[Array | int] | None = None,
    local: int = 0,
    config: Config | None = None,
) -> tuple[Array, Array]:
    """(slots i32[B, K, G, room], found i32[B, K, G]) of u8[B, K, G, S] votes in the first
    `length` i32[B] slots, count i32[B]; with `complement` = (total, start, stop), each i32[B],
    i32[B, T] or a number for all, more as in `ops.most_voted`."""
    if limit := unsupported(votes, length, count, room):
        raise NotImplementedError(limit)
    B, K, G, S = votes.shape
    rows = B * K * G
    rule = config_for(rows, simt.target((votes, length, count)))
    config = config or tuned.select(
        "most_voted", rule, (votes, length, count), rows=rows, S=S, room=room
    )
    numbers = [simt.by_step(x, K) for x in (length, count, *(complement or ()))]
    slots, found = _most_voted(room, local, config, votes.reshape(rows, S), *numbers)
    return slots.reshape(B, K, G, room), found.reshape(B, K, G)


def _most_voted(
    room: int, local: int, config: Config, votes: Array, *numbers: Array
) -> tuple[Array, Array]:
    rows, S = votes.shape
    shared_by = [rows // number.size for number in numbers]

    @simt.over_rows(functools.partial(_most_voted, room, local, config))
    def run(votes: Array, *numbers: Array) -> tuple[Array, Array]:
        program = functools.partial(
            _program, shared_by=shared_by, sizes=(S, room, local), config=config
        )
        outs = (
            jax.ShapeDtypeStruct((rows, room), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
        )
        launch: dict[str, Any] = {
            "scratch": tuple(_sizes(config)),
            "warpgroups": config.warpgroups,
        }
        if config.cluster or config.blocks == 1:
            launch |= {"blocks": rows, "cluster": config.blocks}
            return simt.kernel(program, name="kvjax_most_voted", out_type=outs, **launch)(
                votes, *numbers
            )
        launch |= {"blocks": rows * config.blocks, "parts": config.blocks}
        bins = jax.ShapeDtypeStruct((rows, config.blocks, BINS), jnp.uint32)
        count, place = (functools.partial(program, phase=phase) for phase in ("count", "place"))
        kept = simt.kernel(count, name="kvjax_most_voted_count", out_type=bins, **launch)(
            votes, *numbers
        )
        return simt.kernel(place, name="kvjax_most_voted", out_type=outs, **launch)(
            votes, *numbers, kept
        )

    return run(votes, *numbers)


def _program(
    votes_m, *refs, shared_by: Sequence[int], sizes: tuple[int, int, int], config: Config, phase: str = "both",
) -> None:  # fmt: skip
    """Counts the votes of a block, or selects by the counts that `kept` has, or both."""
    *arrays_m, copies_m, bins_m, every_m, before_m, warps_m = refs[len(shared_by) :]
    scratch_m = (copies_m, bins_m, every_m, before_m, warps_m)
    S, room, local = sizes
    blocks = config.blocks
    threads = 128 * config.warpgroups
    t = simt.special("tid.x")
    part = simt.part()
    row = simt.row()
    lane = t & 31
    warp = t >> 5
    length, wanted, *complement = [
        simt.number_of(number, row) for number in zip(refs, shared_by, strict=False)
    ]
    votes = simt.offset_rows(simt.global_address(votes_m), row, S)
    copies, bins, every, before, warps = (simt.shared_address(m) for m in scratch_m)
    tile = threads * BYTES
    length = simt.clipped(length, S)
    # votes of a block
    size = simt.divide(length + (blocks * BYTES - 1), blocks * BYTES) * BYTES
    start = part * size
    stop = (start + size < length).select(start + size, length)

    def load(first: Word) -> tuple[list[Word], list[Word]]:
        """This thread's votes of a tile, four per word, and the highest bit of the byte of each
        that counts.
        """
        at = first + t * BYTES
        left = (at < stop).select(stop - at, 0)  # of the votes from there on
        words = ptx(
            "ld.global.nc.v4.u32 {$0, $1, $2, $3}, [$4];",
            simt.offset(votes, left.differs(0).select(at, 0)),
            results=4,
        )

        def ragged() -> list[Word]:
            exists = [simt.clipped(left - 4 * w, 4) for w in range(BYTES // 4)]
            return [
                n.equals(0).select(0, word(HIGH) >> (((word(4) - n) << 3) & 31)) for n in exists
            ]

        return words, simt.branch(left < BYTES, ragged, [word(HIGH)] * (BYTES // 4))

    if phase != "place":
        _count_votes(
            load, range_of=(start, stop, tile), copies=copies, bins=bins, threads=threads
        )
    if phase == "count":
        with when(t < BINS):
            at = simt.offset_rows(simt.global_address(*arrays_m), row * blocks + part, BINS * 4)
            ptx(
                "st.global.u32 [$0], $1;",
                simt.offset(at, t * 4),
                simt.load_shared(bins + t * 4),
            )
        return
    *kept_m, slots_m, found_m = arrays_m
    slots = simt.offset_rows(simt.global_address(slots_m), row, room * 4)
    found = simt.global_address(found_m)
    kept = [simt.offset_rows(simt.global_address(m), row, blocks * BINS * 4) for m in kept_m]

    def of_block(b: int) -> Word:
        """This thread's bin of a block."""
        if kept:
            return simt.load(simt.offset(kept[0], (t + b * BINS) * 4))
        return simt.load_remote(simt.remote(bins + t * 4, b))

    simt.cluster_barrier()
    with when(t < BINS):
        of_blocks = [of_block(b) for b in range(blocks)]
        simt.store_shared(every + t * 4, simt.sum_of(of_blocks))
        of_earlier = [(part > b).select(x, 0) for b, x in enumerate(of_blocks)]
        simt.store_shared(before + t * 4, simt.sum_of(of_earlier))
    simt.cluster_arrive("relaxed")  # no other block reads this block's counts after it
    simt.block_barrier()

    # Every warp finds the least vote that is selected: the largest that at least `wanted` keys
    # reach.
    if complement:
        total, first, end = complement
        beside = simt.instr("max.s32", end - local - first, 0)
        wanted = simt.instr("max.s32", wanted, total - beside)
    wanted = simt.clipped(wanted, room)
    mine = _eight(every + lane * (OWN * 4))
    total = simt.sum_of(mine)
    through = _scan(total, lane)
    all_votes = simt.from_lane(through, 31)
    reach = all_votes - through  # votes of the lanes above
    least = word(0)
    above = word(0)
    for i in reversed(range(OWN)):
        more = reach + mine[i]
        here = (more >= wanted) & (reach < wanted)
        least = here.select(lane * OWN + i, least)
        above = here.select(reach, above)
        reach = more
    least = simt.warp_sum(least)
    above = simt.warp_sum(above)
    least = wanted.equals(0).select(BINS - 1, least)
    few = all_votes < wanted  # then all are selected: those above 0, and those of 0
    zero = simt.load_shared(every)
    above = few.select(all_votes - zero, above)
    spare = wanted - above

    # Selected by the blocks before this one.
    more_before = [
        (lane * OWN + i > least).select(x, 0)
        for i, x in enumerate(_eight(before + lane * (OWN * 4)))
    ]
    taken_before = simt.warp_sum(simt.sum_of(more_before))
    same_before = simt.load_shared(before + least * 4)
    least_bytes = least * 0x01010101
    more_bytes = (least + 1) * 0x01010101
    none_more = least.equals(BINS - 1)

    @loop(start, stop, tile, [taken_before, same_before])
    def _place(first: Word, *before: Word) -> list[Word]:
        values, marks = load(first)
        more = [
            none_more.select(0, _reach(x, more_bytes, mark))
            for x, mark in zip(values, marks, strict=True)
        ]
        same = [
            _reach(x, least_bytes, mark) ^ y
            for x, mark, y in zip(values, marks, more, strict=True)
        ]
        # Keys with more votes are counted in the lower 16 bits, keys with exactly as many in
        # the upper ones.
        counts = [
            simt.instr("dp4a.u32.u32", simt.sum_of([x >> 7 for x in xs]), 0x01010101, 0)
            for xs in (more, same)
        ]
        own = counts[0] | (counts[1] << 16)
        upto = _scan(own, lane)
        with when(lane.equals(31)):
            simt.store_shared(warps + warp * 4, upto)
        simt.block_barrier()
        of_warp = simt.load_shared(warps + (lane & (threads // 32 - 1)) * 4)
        simt.block_barrier()
        sums = _scan((lane < threads // 32).select(of_warp, 0), lane)
        ahead = upto - own + warp.equals(0).select(0, simt.from_lane(sums, (warp - 1) & 31))
        a = before[0] + (ahead & 0xFFFF)
        level = before[1] + (ahead >> 16)
        # Places for those of the least vote, from here on.
        left = (level < spare).select(spare - level, 0)

        def first_of_same() -> list[Word]:
            kept = []
            rest = left
            for x in same:
                part = word(0)
                for byte in range(4):
                    bit = x & (0x80 << (8 * byte))
                    takes = bit.differs(0) & rest.differs(0)
                    part = takes.select(part | bit, part)
                    rest = takes.select(rest - 1, rest)
                kept.append(part)
            return kept

        all_or_none = [left.equals(0).select(0, x) for x in same]
        same = simt.branch((left < counts[1]) & left.differs(0), first_of_same, all_or_none)
        place = a + (level < spare).select(level, spare)
        for w, taken in enumerate(x | y for x, y in zip(more, same, strict=True)):
            for byte in range(4):
                bit = (taken & (0x80 << (8 * byte))).differs(0)
                with when(bit):
                    slot = first + t * BYTES + (4 * w + byte)
                    ptx("st.global.b32 [$0], $1;", simt.offset(slots, place * 4), slot)
                place = bit.select(place + 1, place)
        of_tile = simt.from_lane(sums, 31)
        return [before[0] + (of_tile & 0xFFFF), before[1] + (of_tile >> 16)]

    taken = few.select(all_votes, wanted)
    with when(part.equals(0) & t.equals(0)):
        ptx("st.global.b32 [$0], $1;", simt.offset(found, row * 4), taken)
    loop(taken + part * threads + t, room, threads * blocks)(
        lambda i: ptx("st.global.b32 [$0], $1;", simt.offset(slots, i * 4), 0)
    )
    simt.cluster_wait()


def _count_votes(
    load: Callable[[Word], tuple[list[Word], list[Word]]], *, range_of: tuple[Word, Word, int], copies: Word,
    bins: Word, threads: int,
) -> None:  # fmt: skip
    """Counts a block's votes by value: thread i < BINS writes bin i."""
    t = simt.special("tid.x")
    for i in range(0, BINS * COPIES // 4, threads):
        ptx("st.shared.v4.b32 [$0], {$1, $1, $1, $1};", copies + (t + i) * 16, 0)
    simt.block_barrier()
    own_copy = copies + (t & 31) * 4

    @loop(*range_of)
    def _count(first: Word) -> None:
        for votes_, marks in zip(*load(first), strict=True):
            for byte in range(4):
                # `own_copy` + 128 * vote.
                at = simt.instr("dp4a.u32.u32", votes_, (COPIES * 4) << (8 * byte), own_copy)
                # 0 is added too: ptxas would turn a condition into a branch for each vote.
                ptx("red.shared.add.u32 [$0], $1;", at, (marks >> (8 * byte + 7)) & 1)

    simt.block_barrier()
    with when(t < BINS):
        fours = [
            simt.load_shared(copies + t * (COPIES * 4) + (((t + i) & 7) << 4), 4)
            for i in range(COPIES // 4)
        ]
        simt.store_shared(bins + t * 4, simt.sum_of([x for four in fours for x in four]))


def _reach(x: Word, bound: Word, mark: Word) -> Word:
    """`mark`, in the highest bits of bytes, for the bytes in which x is at least `bound`."""
    # Without the highest bits, so that no byte borrows.
    low = (x | HIGH) - (bound & ~HIGH & 0xFFFFFFFF)
    return ((x & (bound ^ 0xFFFFFFFF)) | (((x ^ bound) ^ 0xFFFFFFFF) & low)) & mark


def _eight(at: Word) -> list[Word]:
    loads = [f"ld.shared.v4.u32 {{$0, $1, $2, $3}}, [$4+{i}];" for i in (0, 16)]
    return [x for load in loads for x in ptx(load, at, results=4)]


def _scan(x: Word, lane: Word) -> Word:
    """The sum of x over this lane and the lanes below."""
    for gap in (1, 2, 4, 8, 16):
        other = simt.from_lane(x, (lane - gap) & 31)
        x = x + (lane >= gap).select(other, 0)
    return x
