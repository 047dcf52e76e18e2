"""Votes for keys by the sign patterns of their subspaces, all G heads of a group at once, in two kernels.

**Ranks**: what each of the 256 patterns of a subspace earns, a block for each subspace and row: 64 or 128 threads a
head compare 128 scores with each other (the rest are their negatives), sum the keys of those above, and count the
limits above the sum. Queries are rotated there, by a warp each, if they are to be (`_rotated`).

**Votes**: `parts` blocks a row, one for each multiprocessor, read what patterns earn, 16 KiB, and look it up. What 4
heads give are the bytes of one word, so that a key takes D/8 words and additions for all of them. At random addresses
some 3.5 of 32 lanes would meet in one bank of shared memory; so lane l begins with subspace l, and subspaces lie in
banks of their own: table[pattern][copy, subspace, word], 32 words a pattern. A dot product of 4 bytes takes one of them
out of a word and makes it an address. A thread has `keys` keys at once, and loads as many ahead (if these are four,
twice as many), the first of them before the table is there; the next 64 KiB of a block are on their way to L2
meanwhile.

**Bytes:** D/8 read and G written a key and kv head, and 1 KiB of counts a subspace and kv head: at D = 128 and G = 4,
20 bytes a key. The bound on an H200 (4.3 TB/s) is 4.9 us for 8 kv heads x 131072, 39 us for 8 x 1M. Shared memory has
16 words a key to read at D = 128, which take 2.1 us of all multiprocessors. Scores of patterns are sums in the order of
channels, in f32: where two are equal but for rounding, the reference may order them otherwise. 69 registers to G = 4
and two keys a thread, no spills; by count, votes take 4 instructions a subspace and key, half of them on pipes of half
rate.

**Measured** on an H200, 2026-11-22, jax 0.11.2, device time of both kernels, 8 kv heads x 131072, D = 128, six limits,
queries and counts of its own for each call: G = 4 12.4 us (the reference 456), G = 1 10.5 us (197; in a step of ParisKV
2.7 for ranks and 7.5 for votes), G = 8 15.7 us (524). 32768 keys 7.3 us (385), G = 1 6.2 (254); 1M 46.9 us (1.55 ms), G
= 1 39.6 (257), both with four keys a thread and so two turns on their way, of `tuned.json`; batch 8 x 32768 31.3 us
(650), G = 1 21.1 (230); D = 64 9.2 us (399; eight warpgroups, of `tuned.json`). By a profile ranks are 3.5 us of it for
G = 4, 2.8 for G = 1, 5.1 for G = 8, and 15 for batch 8. What holds votes back at 131072 is probably not memory: after a
kernel that asked for all patterns to be brought to L2 they took as long.

**Tried and lost** (G = 4): one key a thread 13.2 us, four with 33 blocks a row 14.9, 66 blocks of two warpgroups 13.9;
1M with two keys a thread 60 us, with eight warpgroups 53.5, with 33 blocks a row 51.7, and for G = 1 one turn of four
keys on its way 41.2 us for votes of 37.3. Two turns of two keys 8.5 us for votes of 8.6, without the branch around a
key 9.0, three turns 9.0. Patterns brought to L2 while they are ranked: votes as before, and ranks 6.0 us for 3.6, as
their own loads wait. Ranks added up in f32, in another pipe than that of comparing: 3.6. Ranks and votes in one kernel,
where a cluster of 8 blocks shared the subspaces of a row and each read what the others found: 13.3 us, G = 1 10.5, G =
8 22.4, 32768 keys 9.8, 1M 65, 8 x 32768 31.8; each row had 3 clusters, so that all of it was ranked three times, and a
multiprocessor had one block or two. Two clusters a row 15.3 us, and one key at once there 16.4; four of two warpgroups
17.2, one of eight 14.3, one of 16 blocks 14.8, eight of two blocks 19.3. Patterns sorted, a warp a subspace and head,
and one cluster a row with more than 64 registers: 17.9 us.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from kvjax.kernels_pallas import _common as c
from kvjax.kernels_pallas import _tuned
from kvjax.kernels_pallas._common import Word, loop, ptx, when, word
from kvjax.kernels_pallas._rotated import rotated

MEASURED: str | None = "2026-11-22"  # the date in benchmarks/results/collide.json
PATTERNS = 256  # of a subspace
PAIRS = PATTERNS // 2  # of a pattern and that of all signs turned, whose scores are s and -s
HEADS = 8  # two words of a byte each
AHEAD = 64 << 10  # bytes of patterns that a block has brought to L2 ahead of time
COPIED = 16  # patterns that a warp copies at once


@dataclass(frozen=True)
class Config:
    parts: int = 33  # blocks of a row that vote
    warpgroups: int = 4  # of each
    keys: int = 2  # that a thread loads at once

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise ValueError(f"parts must be at least 1; got {self.parts}")
        if self.warpgroups not in (1, 2, 4, 8):
            raise ValueError(f"warpgroups must be 1, 2, 4 or 8; got {self.warpgroups}")
        if self.keys not in (1, 2, 4):
            raise ValueError(f"keys must be 1, 2 or 4, as registers hold; got {self.keys}")


def config_for(rows: int, S: int, G: int = 4) -> Config:
    """A block for each multiprocessor, with a key at least for each thread; two of many keys, as registers allow."""
    many = rows * S > 1 << 20
    warpgroups = 2 if many and G > 4 else 4  # more than 4 heads have 96 registers
    return Config(max(1, min((1 + many) * c.MULTIPROCESSORS // rows, -(-S // (warpgroups * 128)))), warpgroups)


def smem_bytes(G: int) -> int:
    """Of a block that ranks, and of one that votes; the larger."""
    return 4 * max(sum(_rank_sizes(G)), PATTERNS * 32)


def _rank_warpgroups(G: int) -> int:
    return 1 if G == 1 else 2 if G == 2 else 4


def _team(G: int) -> int:
    """Threads that rank the patterns of a head."""
    threads = 128 * _rank_warpgroups(G)
    return max(32, min(PAIRS, 1 << (threads // G).bit_length() - 1))


def _rank_sizes(G: int) -> tuple[int, int, int]:
    """Words of what patterns earn; of each team's pairs, s and the keys above 0, keys below 0, and keys above 0 of each
    warp; of queries."""
    return PATTERNS * -(-G // 4), 128 * _rank_warpgroups(G) // _team(G) * (PAIRS * 3 + 4), HEADS * 8


def unsupported(q: Any, ids: Any, counts: Any, limits: Any) -> str | None:
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


@c.lowered_once("turned", "config")
def collide(
    q: Array, ids: Array, counts: Array, limits: Array, *, turned: int | None = None, config: Config | None = None
) -> Array:
    """u8[B, K, G, S] votes, of q [B, K, G, D], ids u8[B, K, S, D/8], counts i32[B, K, D/8, 256], limits i32[B, T].

    With `turned`, bits of channels as `rotate.turned` has them, q is rotated first.
    """
    if limit := unsupported(q, ids, counts, limits):
        raise NotImplementedError(limit)
    B, K, G, D = q.shape
    S = ids.shape[2]
    chosen = config or _tuned.choose("collide", config_for(B * K, S, G), rows=B * K, S=S, G=G, D=D)
    args = *(a.reshape(B * K, *a.shape[2:]) for a in (q.astype(jnp.float32), ids, counts)), limits
    return _votes(turned, chosen, *args).reshape(B, K, G, S)


def _votes(turned: int | None, config: Config, q: Array, ids: Array, counts: Array, limits: Array) -> Array:
    rows, S, N = ids.shape
    G, (B, T) = q.shape[1], limits.shape
    width = -(-G // 4)

    @jax.custom_batching.custom_vmap
    def run(q: Array, ids: Array, counts: Array, limits: Array) -> Array:
        earned = c.kernel(
            partial(_rank, sizes=(rows // B, G, N, T), turned=turned),
            name="kvjax_collide_rank",
            out_type=jax.ShapeDtypeStruct((rows, PATTERNS, N * width), jnp.uint32),
            scratch_types=[c.plgpu.SMEM((words,), jnp.uint32) for words in _rank_sizes(G)],
            grid=(rows * N,),
            grid_names=("subspace",),
            num_threads=_rank_warpgroups(G),
        )(q, counts, limits)
        return c.kernel(
            partial(_vote, sizes=(G, S, N), config=config),
            name="kvjax_collide",
            out_type=jax.ShapeDtypeStruct((rows, G, S), jnp.uint8),
            scratch_types=[c.plgpu.SMEM((PATTERNS * 32,), jnp.uint32)],
            grid=(rows * config.parts,),
            grid_names=("part",),
            num_threads=config.warpgroups,
        )(ids, earned)

    @run.def_vmap
    def batched(n: int, batches: list[bool], *args: Array) -> tuple[Array, bool]:
        return _votes(turned, config, *c.flatten_batch(n, batches, args)).reshape(n, rows, G, S), True

    return run(q, ids, counts, limits)


def _vote(ids_m, earned_m, out_m, table_m, *, sizes: tuple[int, int, int], config: Config) -> None:
    """Adds up, for the keys of a block, what their patterns earn."""
    G, S, N = sizes
    threads, width = 128 * config.warpgroups, -(-G // 4)  # words of a pattern
    t, block = c.special("tid.x"), c.special("ctaid.x")
    lane, warp = t & 31, t >> 5
    row = c.divide(block, config.parts)
    part = block - row * config.parts
    ids, earned, out = (c.global_address(m) for m in (ids_m, earned_m, out_m))
    ids, out = c.offset_rows(ids, row, S * N), c.offset_rows(out, row, G * S)
    earned, table = c.offset_rows(earned, row, PATTERNS * N * width * 4), c.shared_address(table_m)

    size = -(-S // (config.parts * 32)) * 32  # keys of a block
    start, stop = part * size, (part + 1) * size
    stop = (stop < S).choose(stop, S)
    turn = threads * config.keys  # keys of a turn
    vector = "{" + ", ".join(f"${i}" for i in range(N // 4)) + "}"

    def fetch(first: Word) -> list[Word]:
        """The patterns of this thread's keys first + t, first + t + threads, .., N/4 words each."""
        found = []
        for i in range(config.keys):
            key = first + t + i * threads
            at = c.offset(ids, (key < S).choose(key, S - 1) * N)
            found += ptx(f"ld.global.nc.v{N // 4}.u32 {vector}, [${N // 4}];", at, results=N // 4)
        return found

    def prefetch(first: Word) -> None:
        """Has the patterns of a turn brought to L2."""
        with when(t.equals(0) & (first < stop)):
            few = (stop - first < turn).choose(stop - first, turn)
            ptx("cp.async.bulk.prefetch.L2.global [$0], $1;", c.offset(ids, first * N), few * N)

    # Of a long row two turns are on their way in registers: those of 4 keys, as is seen at 1M.
    early = 2 if config.keys == 4 else 1
    held = [x for i in range(early) for x in fetch(start + i * turn)]
    turns_ahead = -(-AHEAD // (turn * N))
    for i in range(1, turns_ahead + 1):
        prefetch(start + i * turn)
    which = lane & (N * width - 1)

    @loop(warp * COPIED, PATTERNS, threads // 32 * COPIED)
    def _copy(first: Word) -> None:
        at = c.offset(earned, (first * (N * width) + which) * 4)
        found = [c.load(at, i * N * width * 4) for i in range(COPIED)]
        for i, x in enumerate(found):
            ptx("st.shared.u32 [$0], $1;", table + (first + i) * 128 + lane * 4, x)

    c.block_barrier()
    copy = c.divide(lane, N) & (32 // (N * width) - 1)
    takes = [word(128) << (((lane + j) & 3) << 3) for j in range(4)]  # 128, of the byte that is taken
    places = [
        [table + (copy * N + (((lane >> 2) + i) & (N // 4 - 1)) * 4 + ((lane + j) & 3)) * (4 * width) for j in range(4)]
        for i in range(N // 4)
    ]
    turns = [(lane & (4 << i)).differs(0) for i in range(N // 8)]
    m = lane & 3
    swaps = ((m & 1).equals(0).choose(0x6240, 0x3715), (m < 2).choose(0x5410, 0x3276))

    def votes(words: Sequence[Word]) -> list[Word]:
        """A byte a head."""
        for i, turned in enumerate(turns):  # word (lane / 4 + i) % (N / 4) comes to be word i
            words = [turned.choose(words[(j + (1 << i)) % len(words)], x) for j, x in enumerate(words)]
        sums = [word(0)] * width
        for x, at in zip(words, places, strict=True):
            for take, place in zip(takes, at, strict=True):
                address = c.instr("dp4a.u32.u32", x, take, place)  # place + 128 * byte
                if width == 1:
                    got = [ptx("ld.shared.u32 $0, [$1];", address, results=1)]
                else:
                    got = ptx("ld.shared.v2.u32 {$0, $1}, [$2];", address, results=2)
                sums = [a + b for a, b in zip(sums, got, strict=True)]
        return sums

    # Bytes of a word are those of `heads` heads for each of `joined` keys; lane m of 4 stores byte m of all four.
    heads = min(G, 4)
    joined = min(config.keys, 4 // heads) if heads in (1, 2, 4) else 1
    which = c.divide(m, heads)  # of the keys joined
    mover = which * threads + t - m
    outs = [c.offset(c.offset_rows(out, m - which * heads + 4 * w, S), mover) for w in range(width)]
    stores = [(which < joined) & (m - which * heads + 4 * w < G) for w in range(width)]

    @loop(start, stop, turn, held)
    def _keys(first: Word, *held: Word) -> list[Word]:
        ahead = fetch(first + early * turn)
        prefetch(first + (turns_ahead + 1) * turn)
        for i in range(0, config.keys, joined):
            sums = [word(0)] * width
            for j in range(joined):
                words = held[(i + j) * N // 4 : (i + j + 1) * N // 4]
                inside = first + (i + j) * threads + t - lane < stop  # a branch, or ptxas takes more registers
                more = c.choose_between(inside, partial(votes, words), [word(0)] * width)
                sums = [a + (b << (8 * heads * j)) if j else b for a, b in zip(sums, more, strict=True)]
            key = first + i * threads
            for x, at, mask in zip(sums, outs, stores, strict=True):
                for gap, swap in zip((1, 2), swaps, strict=True):
                    x = ptx("prmt.b32 $0, $1, $2, $3;", x, c.bfly(x, gap), swap, results=1)
                with when(mask & (key + mover < stop)):
                    ptx("st.global.b32 [$0], $1;", c.offset(at, key), x)
        return [*held[config.keys * N // 4 :], *ahead]


def _rank(
    q_m, counts_m, limits_m, out_m, mine_m, spare_m, queries_m,
    *, sizes: tuple[int, int, int, int], turned: int | None,
) -> None:  # fmt: skip
    """What the patterns of a subspace earn, a byte a head.

    A team of 32 to 128 threads takes a head, a thread some patterns and their opposites. One of two opposites scores s
    >= 0, the other -s; s is compared with that of all pairs. Before a pattern below 0 are all above 0: only large
    limits ask for more.
    """
    shared_by, G, N, T = sizes
    width, threads, size = -(-G // 4), 128 * _rank_warpgroups(G), _team(G)
    t, block = c.special("tid.x"), c.special("ctaid.x")
    lane = t & 31
    row = c.divide(block, N)
    n = block - row * N
    q, counts, limits, out = (c.global_address(m) for m in (q_m, counts_m, limits_m, out_m))
    q, counts = c.offset_rows(q, row, G * N * 32), c.offset_rows(counts, row * N + n, PATTERNS * 4)
    limits = c.offset_rows(limits, c.divide(row, shared_by), T * 4)
    mine, spare, queries = (c.shared_address(m) for m in (mine_m, spare_m, queries_m))
    teams, team, member = threads // size, c.divide(t, size), t & (size - 1)
    near = spare + team * (PAIRS * 12 + 16)
    far, totals = near + PAIRS * 8, near + PAIRS * 12
    opposite = PATTERNS - 1
    pairs = [member + i for i in range(0, PAIRS, size)]
    keys = [c.load(c.offset(counts, i * 4)) for i in pairs]
    keys_opposite = [c.load(c.offset(counts, (i ^ opposite) * 4)) for i in pairs]
    bounds = [c.load(limits, 4 * i) for i in range(T)]

    @loop(t >> 5, G, threads // 32)
    def _query(head: Word) -> None:
        """The channels of the subspace, to shared memory."""
        per_lane = N // 4
        channels = rotated(c.offset(q, head * (N * 32)), N * 8, turned)
        with when(c.divide(lane, 8 // per_lane).equals(n)):
            at = queries + head * 32 + (lane & (8 // per_lane - 1)) * (4 * per_lane)
            for i, x in enumerate(channels):
                ptx("st.shared.u32 [$0], $1;", at + 4 * i, x)

    loop(t, PATTERNS * width, threads)(lambda i: ptx("st.shared.u32 [$0], $1;", mine + i * 4, 0))
    bounds = [(x < 1 << 31).choose(x, 0) for x in bounds]  # no count is below a negative limit
    largest = functools.reduce(lambda a, b: (a < b).choose(b, a), bounds)
    c.block_barrier()

    def scores(channels: Sequence[Word]) -> list[Word]:
        """Of the patterns, summed in the order of channels; bit j of a pattern is the sign of channel j."""
        totals = [word(0)]
        for j, x in enumerate(channels):
            if 1 << j < size:
                totals = [c.instr("add.f32", totals[0], x ^ (((member ^ 0xFF) << (31 - j)) & 0x80000000))]
            elif 1 << j < PAIRS:
                totals = [c.instr("add.f32", y, x ^ sign) for sign in (1 << 31, 0) for y in totals]
            else:
                totals = [c.instr("add.f32", y, x ^ (1 << 31)) for y in totals]
        return totals

    @loop(team, team + -(-G // teams) * teams, teams)
    def _head(number: Word) -> None:
        ptx('.pragma "nounroll";')
        head = (number < G).choose(number, G - 1)
        loads = [f"ld.shared.v4.u32 {{$0, $1, $2, $3}}, [$4+{i}];" for i in (0, 16)]
        totals_of = scores([x for load in loads for x in ptx(load, queries + head * 32, results=4)])
        above_0 = [x < 1 << 31 for x in totals_of]
        own = [x & 0x7FFFFFFF for x in totals_of]  # in the order of f32
        plus = [flag.choose(a, b) for flag, a, b in zip(above_0, keys, keys_opposite, strict=True)]
        minus = [flag.choose(b, a) for flag, a, b in zip(above_0, keys, keys_opposite, strict=True)]
        for pair, s, more, less in zip(pairs, own, plus, minus, strict=True):
            ptx("st.shared.v2.b32 [$0], {$1, $2};", near + pair * 8, s, more)
            ptx("st.shared.u32 [$0], $1;", far + pair * 4, less)
        of_warp = c.warp_sum(c.sum_of(plus))
        with when(lane.equals(0)):
            ptx("st.shared.u32 [$0], $1;", totals + (member >> 5) * 4, of_warp)
        c.block_barrier()

        @loop(0, PAIRS * 8, 16 * 8, [word(0)] * len(pairs))
        def above(at: Word, *found: Word) -> list[Word]:
            ptx('.pragma "nounroll";')
            sums = list(found)
            for i in range(0, 16 * 8, 16):
                s, keys, s_next, keys_next = ptx(
                    f"ld.shared.v4.u32 {{$0, $1, $2, $3}}, [$4+{i}];", near + at, results=4
                )
                sums = [_add_if("gt", s, x, y, keys) for x, y in zip(own, sums, strict=True)]
                sums = [_add_if("gt", s_next, x, y, keys_next) for x, y in zip(own, sums, strict=True)]
            return sums

        def below() -> list[Word]:
            @loop(0, PAIRS, 1, [word(0)] * len(pairs))
            def found(i: Word, *found: Word) -> list[Word]:
                ptx('.pragma "nounroll";')
                s = ptx("ld.shared.u32 $0, [$1];", near + i * 8, results=1)
                keys = ptx("ld.shared.u32 $0, [$1];", far + i * 4, results=1)
                return [_add_if("lt", s, x, y, keys) for x, y in zip(own, found, strict=True)]

            return found

        of_warps = [ptx(f"ld.shared.u32 $0, [$1+{i}];", totals, results=1) for i in range(0, size // 8, 4)]
        over = c.sum_of(of_warps)
        rest = c.choose_between(largest > over, below, [word(0)] * len(pairs))
        at, shift = mine + (head >> 2) * 4, (head & 3) << 3
        for pair, flag, s, more, less in zip(pairs, above_0, own, above, rest, strict=True):
            positive, negative = flag.choose(pair, pair ^ opposite), flag.choose(pair ^ opposite, pair)
            for pattern, before in ((positive, more), (negative, s.equals(0).choose(more, over + less))):
                earned = c.sum_of([(before < bound).choose(1, 0) for bound in bounds])
                with when(number < G):
                    ptx("red.shared.add.u32 [$0], $1;", at + pattern * (4 * width), earned << shift)
        c.block_barrier()

    out = c.offset(c.offset_rows(out, row, PATTERNS * N * width * 4), n * (width * 4))

    @loop(t, PATTERNS, threads)
    def _write(pattern: Word) -> None:
        for w in range(width):
            x = ptx("ld.shared.u32 $0, [$1];", mine + (pattern * width + w) * 4, results=1)
            ptx("st.global.b32 [$0], $1;", c.offset(out, (pattern * (N * width) + w) * 4), x)


def _add_if(compare: str, a: Word, b: Word, total: Word, more: Word) -> Word:
    """total + more where `a` compares so with b, else total."""
    code = f"{{ .reg .pred p; setp.{compare}.u32 p, $1, $2; mov.u32 $0, $3; @p add.u32 $0, $3, $4; }}"
    return ptx(code, a, b, total, more, results=1)
