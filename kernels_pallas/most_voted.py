"""The slots of the keys with most votes, in order of slot, chosen in one kernel: a histogram and two running sums.

A cluster of `blocks` blocks shares a row of votes. Each counts its votes by value, in 8 copies of 256 bins, so that
lanes seldom meet; from the sum over the cluster follows the least vote that is taken, and how many slots of that vote.
Then each reads its votes again (from L2), and the place of a slot is the number of those taken before it: of the blocks
and warps before, by their counts, and of the lanes before, by shuffles.

**Bytes:** 2 read a key and row, twice, and 4 written a place. The bound on an H200 (4.3 TB/s) for 8 rows x 131072 with
13108 places is 0.6 us from device memory; what `collide` has just written, 1 MB, is still in L2.

**Measured** on an H200, 2026-11-21, jax 0.11.2, device time of the kernel alone, votes binomial of 96 at .2: 8 rows x
131072, 13108 places 8.4 us (the reference 72), 32 rows 16.4 us (122), 8 x 1M 43 us (192), 64 rows x 32768 9.7 us
(93). XLA adds 2.5 us around it. `benchmarks/results/most_voted.json` has more.

**Tried and lost**: 8 rows of 4 blocks 12.5 us, 8 blocks of two warpgroups 10.3 us; 64 rows of 8 blocks 27 us, hence
`config_for`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from kvjax.kernels_pallas import _common as c
from kvjax.kernels_pallas._common import Word, loop, ptx, when, word

MEASURED: str | None = "2026-11-21"  # the date in benchmarks/results/most_voted.json
BINS, COPIES = 256, 8
OWN = BINS // 32  # bins of a lane
BYTES = 16  # votes that a thread reads at once


@dataclass(frozen=True)
class Config:
    blocks: int = 8  # of a row, a cluster
    warpgroups: int = 4  # of a block

    def __post_init__(self) -> None:
        if self.blocks not in (1, 2, 4, 8):
            raise ValueError(f"blocks must be 1, 2, 4 or 8, a cluster's; got {self.blocks}")
        if self.warpgroups not in (2, 4):
            raise ValueError(f"warpgroups must be 2 or 4, a thread for each bin; got {self.warpgroups}")


def config_for(rows: int) -> Config:
    """Fewer and smaller blocks the more rows there are: as many as run at once."""
    if rows <= 16:
        return Config()
    return Config(blocks=8, warpgroups=2) if rows <= 32 else Config(blocks=4, warpgroups=2)


def smem_bytes(config: Config) -> int:
    return 4 * sum(_sizes(config))


def _sizes(config: Config) -> tuple[int, ...]:
    """Words of the bins in copies, those of the block, those of the row, the blocks' counts and the warps'."""
    return BINS * COPIES, BINS, BINS, 2 * 8, 2 * 4 * config.warpgroups


def unsupported(votes: Any, valid: Any, count: Any, room: int) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    S = votes.shape[3]
    if votes.dtype != jnp.uint8 or count.dtype != jnp.int32:
        return f"the kernel most_voted takes votes in u8 and counts in i32; got {votes.dtype} and {count.dtype}"
    if S % BYTES or not BYTES <= S < 1 << 24:
        return f"the kernel most_voted takes a multiple of {BYTES} keys, less than 2^24; got {S}"
    if 0 in votes.shape or room < 1:
        return f"the kernel most_voted takes at least one row and place; got votes{list(votes.shape)}, room {room}"
    return None


def supported(votes: Any, valid: Any, count: Any, room: int) -> bool:
    return unsupported(votes, valid, count, room) is None


def most_voted(
    votes: Array, valid: Array, count: Array, room: int, *, config: Config | None = None
) -> tuple[Array, Array]:
    """(slots i32[B, K, G, room], valid bool[B, K, G, room]) of u8[B, K, G, S] votes, valid bool[B, S], count i32[B]."""
    if limit := unsupported(votes, valid, count, room):
        raise NotImplementedError(limit)
    B, K, G, S = votes.shape
    args = votes.reshape(B * K * G, S), valid.astype(jnp.uint8), count
    slots, found = _most_voted(room, config or config_for(B * K * G), *args)
    return slots.reshape(B, K, G, room), jnp.arange(room)[None, None, None] < found.reshape(B, K, G, 1)


def _most_voted(room: int, config: Config, votes: Array, valid: Array, count: Array) -> tuple[Array, Array]:
    rows, S = votes.shape

    @jax.custom_batching.custom_vmap
    def run(votes: Array, valid: Array, count: Array) -> tuple[Array, Array]:
        return c.kernel(
            functools.partial(_program, sizes=(rows // count.shape[0], S, room), config=config),
            name="kvjax_most_voted",
            out_type=(jax.ShapeDtypeStruct((rows, room), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.int32)),
            scratch_types=[c.plgpu.SMEM((words,), jnp.uint32) for words in _sizes(config)],
            grid=(rows,),
            grid_names=("row",),
            cluster=(config.blocks,),
            cluster_names=("part",),
            num_threads=config.warpgroups,
        )(votes, valid, count)

    @run.def_vmap
    def batched(n: int, batches: list[bool], *args: Array) -> tuple[tuple[Array, Array], tuple[bool, bool]]:
        slots, found = _most_voted(room, config, *c.flatten_batch(n, batches, args))
        return (slots.reshape(n, rows, room), found.reshape(n, rows)), (True, True)

    return run(votes, valid, count)


def _program(
    votes_m, valid_m, count_m, slots_m, found_m, copies_m, bins_m, all_m, counts_m, warps_m,
    *, sizes: tuple[int, int, int], config: Config,
) -> None:  # fmt: skip
    shared_by, S, room = sizes
    blocks, threads = config.blocks, 128 * config.warpgroups
    t, part, row = c.special("tid.x"), c.special("cluster_ctarank"), c.special("clusterid.x")
    lane, warp = t & 31, t >> 5
    first_row = c.divide(row, shared_by)
    votes, valid, count, slots, found = (c.global_address(m) for m in (votes_m, valid_m, count_m, slots_m, found_m))
    votes, valid = c.offset_rows(votes, row, S), c.offset_rows(valid, first_row, S)
    slots = c.offset_rows(slots, row, room * 4)
    copies, bins, every, counts, warps = (c.shared_address(m) for m in (copies_m, bins_m, all_m, counts_m, warps_m))
    tile = threads * BYTES
    size = -(-S // (blocks * BYTES)) * BYTES  # votes of a block
    start = part * size
    stop = (start + size < S).choose(start + size, S)

    def load(first: Word) -> tuple[list[Word], list[Word]]:
        """This thread's votes of a tile, and 1 for each that counts."""
        at = first + t * BYTES
        inside = at < stop
        at = inside.choose(at, 0)
        words, marks = (
            ptx("ld.global.nc.v4.u32 {$0, $1, $2, $3}, [$4];", c.offset(a, at), results=4) for a in (votes, valid)
        )
        each = [(i // 4, 8 * (i % 4)) for i in range(BYTES)]
        counts = [((marks[w] >> shift) & 1) for w, shift in each]
        return [(words[w] >> shift) & 0xFF for w, shift in each], [inside.choose(x, 0) for x in counts]

    for i in range(0, BINS * COPIES // 4, threads):
        ptx("st.shared.v4.b32 [$0], {$1, $1, $1, $1};", copies + (t + i) * 16, 0)
    c.block_barrier()

    @loop(start, stop, tile)
    def _count(first: Word) -> None:
        for vote, counts_ in zip(*load(first), strict=True):
            with when(counts_.differs(0)):
                ptx("red.shared.add.u32 [$0], 1;", copies + (vote * COPIES + (lane & (COPIES - 1))) * 4)

    c.block_barrier()
    with when(t < BINS):
        eight = _eight("shared", copies + t * (COPIES * 4))
        ptx("st.shared.u32 [$0], $1;", bins + t * 4, functools.reduce(lambda a, b: a + b, eight))
    c.cluster_barrier()
    with when(t < BINS):
        of_blocks = [
            ptx("ld.shared::cluster.u32 $0, [$1];", c.remote(bins + t * 4, b), results=1) for b in range(blocks)
        ]
        ptx("st.shared.u32 [$0], $1;", every + t * 4, functools.reduce(lambda a, b: a + b, of_blocks))
    c.block_barrier()

    # Every warp finds the least vote taken: the largest that no fewer than `wanted` reach.
    wanted = ptx("ld.global.nc.u32 $0, [$1];", c.offset(count, first_row * 4), results=1)
    wanted = (wanted < 1 << 31).choose(wanted, 0)
    wanted = (wanted < room).choose(wanted, room)
    mine = _eight("shared", every + lane * (OWN * 4))
    total = functools.reduce(lambda a, b: a + b, mine)
    through = _scan(total, lane)
    all_votes = c.from_lane(through, 31)
    reach = all_votes - through  # votes of the lanes above
    least, above = word(0), word(0)
    for i in reversed(range(OWN)):
        more = reach + mine[i]
        last = (more >= wanted) & (reach < wanted)
        least, above = last.choose(lane * OWN + i, least), last.choose(reach, above)
        reach = more
    for gap in (1, 2, 4, 8, 16):
        least, above = least + c.bfly(least, gap), above + c.bfly(above, gap)
    least = wanted.equals(0).choose(BINS - 1, least)
    few = all_votes < wanted  # then all are taken: those above 0, and those of 0
    zero = ptx("ld.shared.u32 $0, [$1];", every, results=1)
    above = few.choose(all_votes - zero, above)
    spare = wanted - above

    # What the blocks before this one take: warp b counts for block b.
    for b in range(0, blocks, threads // 32):
        with when(warp + b < blocks):
            theirs = _eight("shared::cluster", c.remote(bins + lane * (OWN * 4), warp + b))
            sums = [word(0), word(0)]
            for i, x in enumerate(theirs):
                vote = lane * OWN + i
                sums = [sums[0] + (vote > least).choose(x, 0), sums[1] + vote.equals(least).choose(x, 0)]
            for gap in (1, 2, 4, 8, 16):
                sums = [x + c.bfly(x, gap) for x in sums]
            with when(lane.equals(0)):
                ptx("st.shared.v2.b32 [$0], {$1, $2};", counts + (warp + b) * 8, *sums)
    c.cluster_barrier()  # what this block counted, the others have read
    base = [word(0), word(0)]
    for b in range(blocks):
        two = ptx("ld.shared.v2.u32 {$0, $1}, [$2];", counts + b * 8, results=2)
        base = [x + (part > b).choose(y, 0) for x, y in zip(base, two, strict=True)]

    @loop(start, stop, tile, base)
    def _place(first: Word, *before: Word) -> list[Word]:
        values, there = load(first)
        more = [(vote > least).choose(x, 0) for vote, x in zip(values, there, strict=True)]
        same = [vote.equals(least).choose(x, 0) for vote, x in zip(values, there, strict=True)]
        own = [functools.reduce(lambda a, b: a + b, x) for x in (more, same)]
        upto = [_scan(x, lane) for x in own]
        with when(lane.equals(31)):
            ptx("st.shared.v2.b32 [$0], {$1, $2};", warps + warp * 8, *upto)
        c.block_barrier()
        of_warp = ptx("ld.shared.v2.u32 {$0, $1}, [$2];", warps + (lane & (threads // 32 - 1)) * 8, results=2)
        c.block_barrier()
        counted = [(lane < threads // 32).choose(x, 0) for x in of_warp]
        sums = [_scan(x, lane) for x in counted]
        a, level = (
            b + u - o + warp.equals(0).choose(0, c.from_lane(x, (warp - 1) & 31))
            for b, u, o, x in zip(before, upto, own, sums, strict=True)
        )
        for i in range(BYTES):
            taken = more[i].differs(0) | (same[i].differs(0) & (level < spare))
            with when(taken):
                place = a + (level < spare).choose(level, spare)
                ptx("st.global.b32 [$0], $1;", c.offset(slots, place * 4), first + t * BYTES + i)
            a, level = a + more[i], level + same[i]
        return [b + c.from_lane(x, 31) for b, x in zip(before, sums, strict=True)]

    taken = few.choose(all_votes, wanted)
    with when(part.equals(0) & t.equals(0)):
        ptx("st.global.b32 [$0], $1;", c.offset(found, row * 4), taken)
    loop(taken + part * threads + t, room, threads * blocks)(
        lambda i: ptx("st.global.b32 [$0], $1;", c.offset(slots, i * 4), 0)
    )


def _eight(space: str, at: Word) -> list[Word]:
    loads = [f"ld.{space}.v4.u32 {{$0, $1, $2, $3}}, [$4+{i}];" for i in (0, 16)]
    return [x for load in loads for x in ptx(load, at, results=4)]


def _scan(x: Word, lane: Word) -> Word:
    """The sum of x of this lane and those below."""
    for gap in (1, 2, 4, 8, 16):
        other = c.from_lane(x, (lane - gap) & 31)
        x = x + (lane >= gap).choose(other, 0)
    return x
