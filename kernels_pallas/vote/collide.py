"""Votes for keys by the sign patterns of their subspaces, for all query heads of a group at once.

**Ranks** say how many votes each of the 256 patterns of a subspace earns. Opposite patterns have opposite scores, so 16
lanes sort 128 scores and sum the counts. Each block ranks all subspaces of its row, unless G D/8 exceeds 32 and rows
are few: then a kernel of its own does.

**Votes** are looked up in shared memory by `parts` blocks a row. One word holds the votes of 4 heads as bytes. Lanes
start at different subspaces, in separate banks.

**Bytes:** D/8 read and G written a key and KV head; 1 KiB of counts a subspace and KV head.

**Bound:** memory, then shared memory.

**Limits:** scores that differ only by rounding may rank unlike the reference; a NaN query gets arbitrary votes.
Evidence: `benchmarks/NOTES.md`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.kernels_pallas import simt, tuned
from kvjax.kernels_pallas.score.rotate import channels, rotated
from kvjax.kernels_pallas.simt import Flag, Word, instr, loop, ptx, when, word

MEASURED: str | None = "2026-11-22"  # the date in benchmarks/results/collide.json
PATTERNS = 256  # of a subspace
HEADS = 8  # two words of a byte each
PITCH = PATTERNS + 4  # words from a subspace to the next, so that fours of 8 of them lie in banks of their own
LANES = 16  # that rank a subspace for a head
PAIRS = PATTERNS // 2 // LANES  # of a lane: a pattern and that of all signs turned, whose scores are s and -s
BITS = LANES.bit_length() - 1  # of a lane's number
MAX_KEYS = 1 << 24  # keys: sums of counts are exact in f32


@dataclass(frozen=True)
class Config:
    parts: int = 16  # blocks of a row
    warpgroups: int = 4  # of each
    keys: int = 4  # that a thread has at once
    stages: int = 2  # times as many on their way
    apart: int = 0  # 1: ranks are found by a kernel of their own, a block a subspace

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise ValueError(f"parts must be at least 1; got {self.parts}")
        if self.warpgroups not in (1, 2, 4, 8):
            raise ValueError(f"warpgroups must be 1, 2, 4 or 8; got {self.warpgroups}")
        if self.keys not in (1, 2, 4):
            raise ValueError(f"keys must be 1, 2 or 4, as registers hold; got {self.keys}")
        if self.stages < 1:
            raise ValueError(f"stages must be at least 1; got {self.stages}")
        if self.apart not in (0, 1):
            raise ValueError(f"apart must be 0 or 1; got {self.apart}")


def config_for(rows: int, S: int, G: int = 1, D: int = 128) -> Config:
    """A block for each multiprocessor, with a key at least for each thread. Each block of a row ranks all of it, unless
    that is much of what many do."""
    parts = max(1, min(simt.MULTIPROCESSORS // rows, -(-S // 512)))
    if G * D > 256 and parts >= 16:
        return Config(parts, keys=1 if parts * 512 >= S else 2, stages=4, apart=1)
    return Config(parts, keys=next((n for n in (1, 2) if parts * 512 * n >= S), 4), stages=2)


def scratch(G: int, N: int, config: Config) -> list[int]:
    """Words of the table; of what patterns earn, queries and limits, if a block finds ranks, whose counts are where the
    table will be; and of the keys' patterns that are on their way."""
    ring = 128 * config.warpgroups * config.keys * config.stages * N // 4
    return [32 * PATTERNS, *(() if config.apart else rank_scratch(G, N, N)), ring]


def rank_scratch(G: int, N: int, share: int) -> tuple[int, int]:
    """Words of what patterns of `share` subspaces earn; of queries and limits."""
    return share * -(-G // 4) * PITCH, G * N * 8 + 32


def smem_bytes(G: int, N: int, config: Config) -> int:
    return 4 * sum(-(-words // 256) * 256 for words in scratch(G, N, config))


def unsupported(q: Any, ids: Any, counts: Any, limits: Any) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    *_, G, D = q.shape
    S, N = ids.shape[2:]
    if D not in (64, 128) or N * 8 != D:
        return f"the kernel collide takes head sizes 64 and 128 in subspaces of 8; got D={D} in {N}"
    if not 1 <= G <= HEADS:
        return f"the kernel collide takes 1 to {HEADS} query heads a kv head; got G={G}"
    if not 4 <= S < MAX_KEYS or S % 4:
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


def too_large(G: int, N: int, config: Config) -> str | None:
    size = smem_bytes(G, N, config)
    return f"{size} bytes of shared memory, more than {simt.SMEM}" if size > simt.SMEM else None


@simt.lowered_once("turned", "config")
def collide(
    q: Array, ids: Array, counts: Array, limits: Array, *, turned: int | None = None, config: Config | None = None
) -> Array:
    """u8[B, K, G, S] votes, of q [B, K, G, D], ids u8[B, K, S, D/8], counts i32[B, K, D/8, 256], limits i32[B, T].

    With `turned`, bits of channels as `rotate.turned` has them, q is rotated first.
    """
    if limit := unsupported(q, ids, counts, limits):
        raise NotImplementedError(limit)
    B, K, G, D = q.shape
    S, N = ids.shape[2:]
    limit_of = partial(too_large, G, N)
    config = config or tuned.select(
        "collide", config_for(B * K, S, G, D), (q, ids), limit_of, rows=B * K, S=S, G=G, D=D
    )
    if limit := limit_of(config):
        raise NotImplementedError(f"the kernel collide cannot take {config}: {limit}")
    args = *(a.reshape(B * K, *a.shape[2:]) for a in (q.astype(jnp.float32), ids, counts)), limits
    return _votes(turned, config, *args).reshape(B, K, G, S)


def _votes(turned: int | None, config: Config, q: Array, ids: Array, counts: Array, limits: Array) -> Array:
    rows, S, N = ids.shape
    G, (B, T) = q.shape[1], limits.shape

    @jax.custom_batching.custom_vmap
    def run(q: Array, ids: Array, counts: Array, limits: Array) -> Array:
        of_query, sizes = [q, counts, limits], (rows // B, G, N, T)
        if config.apart:
            rank = simt.kernel(
                partial(_rank, sizes=sizes, turned=turned),
                name="kvjax_collide_rank",
                out_type=jax.ShapeDtypeStruct((rows, -(-G // 4), N, PATTERNS), jnp.uint32),
                scratch=(PATTERNS, *rank_scratch(G, N, 1)),
                blocks=rows * N,
                warpgroups=-(-G // 4),  # a warp a head
            )
            of_query = [rank(*of_query)]
        return simt.kernel(
            partial(_vote, sizes=sizes, S=S, turned=turned, config=config),
            name="kvjax_collide",
            out_type=jax.ShapeDtypeStruct((rows, G, S), jnp.uint8),
            scratch=tuple(scratch(G, N, config)),
            blocks=rows * config.parts,
            warpgroups=config.warpgroups,
        )(ids, *of_query)

    @run.def_vmap
    def batched(n: int, batches: list[bool], *args: Array) -> tuple[Array, bool]:
        return _votes(turned, config, *simt.flatten_batch(n, batches, args)).reshape(n, rows, G, S), True

    return run(q, ids, counts, limits)


Sizes = tuple[int, int, int, int]  # rows that share limits, G, N, T


def _rank(
    q_m, counts_m, limits_m, out_m, numbers_m, earned_m, queries_m, *, sizes: Sizes, turned: int | None
) -> None:  # fmt: skip
    """The kernel that ranks: the votes that each pattern of a subspace earns, packed in words."""
    _, G, N, _ = sizes
    block, t = simt.special("ctaid.x"), simt.special("tid.x")
    row = simt.divide(block, N)
    n = block - row * N
    earned = simt.shared_address(earned_m)
    ranks = _Ranks((q_m, counts_m, limits_m), (numbers_m, earned_m, queries_m), row, n, 1, sizes, turned, -(-G // 4))
    simt.block_barrier()
    ranks.find()
    width = -(-G // 4)
    out = simt.offset_rows(simt.global_address(out_m), row, width * N * PATTERNS * 4)

    @loop(t * 4, width * PATTERNS, width * 128 * 4)
    def _write(i: Word) -> None:
        w, pattern = i >> 8, i & (PATTERNS - 1)
        four = simt.load_shared(earned + (w * PITCH + pattern) * 4, 4)
        at = simt.offset(out, ((w * N + n) * PATTERNS + pattern) * 4)
        ptx("st.global.v4.u32 [$0], {$1, $2, $3, $4};", at, *four)


def _vote(*refs, sizes: Sizes, S: int, turned: int | None, config: Config) -> None:
    """The votes for the keys of a block."""
    n = 3 if config.apart else 5
    (ids_m, *of_query, out_m), (table_m, *of_ranks, ring_m) = refs[:n], refs[n:]
    _, G, N, _ = sizes
    block = simt.special("ctaid.x")
    row = simt.divide(block, config.parts)
    part = block - row * config.parts
    size = -(-S // (config.parts * 32)) * 32  # keys of a block
    start, stop = part * size, (part + 1) * size
    stop = (stop < S).select(stop, S)
    ids, out, places = simt.global_address(ids_m), simt.global_address(out_m), simt.shared_address(table_m)
    votes = _Votes(simt.offset_rows(ids, row, S * N), simt.shared_address(ring_m), places, start, stop, G, S, N, config)
    table = _Table(places, G, N, config)

    # All threads ask for what a query needs before one asks for patterns: it does not wait for them then. Ranks
    # of another kernel would wait for the patterns of other blocks too, so one turn of patterns must do until then.
    turns = 1 if config.apart else config.stages
    if config.apart:
        earned = simt.offset_rows(simt.global_address(*of_query), row, -(-G // 4) * N * PATTERNS * 4)
        found = table.load(lambda at: simt.offset(earned, at * 4), PATTERNS, "global.nc")
        simt.block_barrier()
        votes.begin(0, turns)
    else:
        ranks = _Ranks(of_query, (table_m, *of_ranks), row, word(0), N, sizes, turned, config.warpgroups)
        simt.block_barrier()
        votes.begin(0, turns)
        ranks.find()
        earned = simt.shared_address(of_ranks[0])
        found = table.load(lambda at: earned + at * 4, PITCH, "shared")
    table.store(found)
    votes.begin(turns, config.stages)
    simt.block_barrier()
    votes.count(simt.offset_rows(out, row, G * S))


class _Ranks:
    """Votes that the patterns of a block's subspaces earn, a byte a head; some lanes work on one subspace and head.

    One of two opposite patterns scores s >= 0, the other -s. The former are sorted, some to a lane, by 23 bits of s and
    the pattern, and the counts of those above are summed. Only if two have the same bits of which s has more, or if
    limits ask for patterns below, what came out is sorted by s in full, and all is looked at. Counts are in f32.
    """

    def __init__(
        self, given: Sequence[Any], scratch: Sequence[Any], row: Word, first: Word, share: int, sizes: Sizes,
        turned: int | None, warpgroups: int,
    ):  # fmt: skip
        """Asks for what `share` subspaces from the `first` on need, of `given` queries, counts and limits; with room
        for the counts, what patterns earn, and queries."""
        shared_by, self.G, self.N, self.T = sizes
        self.first, self.share, self.turned, self.warps = first, share, turned, 4 * warpgroups
        q, counts, limits = (simt.global_address(m) for m in given)
        self.counts, self.earned, self.queries = (simt.shared_address(m) for m in scratch)
        self.q = simt.offset_rows(q, row, self.G * self.N * 32)
        counts = simt.offset_rows(counts, row * self.N + first, PATTERNS * 4)
        limits = simt.offset_rows(limits, simt.divide(row, shared_by), self.T * 4)
        self.bounds = self.queries + self.G * self.N * 32
        t, threads, fours = simt.special("tid.x"), 128 * warpgroups, share * PATTERNS // 4
        lane, warp = t & 31, t >> 5
        self.mine = [t + i for i in range(0, fours, threads)]
        load = "ld.global.nc.v4.u32 {$0, $1, $2, $3}, [$4];"
        self.loaded = [ptx(load, simt.offset(counts, (i < fours).select(i, 0) * 16), results=4) for i in self.mine]
        self.query = self._channels((warp < self.G).select(warp, self.G - 1))
        self.limit = simt.load(simt.offset(limits, (lane < self.T).select(lane, self.T - 1) * 4))
        zeros = "st.shared.v4.u32 [$0], {$1, $1, $1, $1};"
        words = rank_scratch(self.G, self.N, share)[0]
        loop(t * 4, words, threads * 4)(lambda i: ptx(zeros, self.earned + i * 4, 0))
        self.lane = lane & (LANES - 1)
        # 1 where a lane's number has a bit, else -1; and 1 where there is a lane so many further, else 0.
        self.signs = [(self.lane & (1 << i)).equals(0).select(simt.real(-1.0), simt.real(1.0)) for i in range(BITS)]
        self.exists = [(self.lane < LANES - (1 << i)).select(simt.real(1.0), 0) for i in range(BITS)]

    def _channels(self, head: Word) -> list[Word]:
        return channels(simt.offset(self.q, head * (self.N * 32)), self.N * 8)

    def find(self) -> None:
        """Writes the votes that patterns earn, from one barrier to the next."""
        G, T = self.G, self.T
        t = simt.special("tid.x")
        lane, warp = t & 31, t >> 5
        for i, four in zip(self.mine, self.loaded, strict=True):
            numbers = [instr("cvt.rn.f32.u32", x) for x in four]
            with when(i < self.share * PATTERNS // 4):
                simt.store_shared(self.counts + i * 16, *numbers)
        limit = simt.clipped(self.limit, MAX_KEYS)
        self.largest = instr("cvt.rn.f32.u32", instr("redux.sync.max.u32", limit, -1, convergent=True))
        with when(t < T):
            simt.store_shared(self.bounds + t * 4, instr("cvt.rn.f32.u32", limit))

        def put(head: Word, x: list[Word]) -> None:
            at, per = self.queries + (head * 32 + lane) * self.N, self.N // 4
            values = "{" + ", ".join(f"${i + 1}" for i in range(per)) + "}"
            ptx(f"st.shared.v{per}.u32 [$0], {values};", at, *rotated(x, self.turned))

        with when(warp < G):
            put(warp, self.query)
        if self.warps < G:  # as in a block of 128 threads
            loop(warp + self.warps, G, self.warps)(lambda head: put(head, self._channels(head)))
        simt.block_barrier()
        jobs, at_once = self.share * G, 32 // LANES

        @loop(warp * at_once, jobs, self.warps * at_once)
        def _job(first: Word) -> None:
            ptx('.pragma "nounroll";')
            job = first + simt.divide(lane, LANES)
            exists = job < jobs  # or these lanes do what others do, for nothing
            self._rank(exists.select(job, jobs - 1), exists)

        simt.block_barrier()

    def _rank(self, job: Word, exists: Flag) -> None:
        """Ranks the job-th subspace and head with these lanes."""
        subspace = simt.divide(job, self.G)
        head = job - subspace * self.G
        counts = self.counts + subspace * (PATTERNS * 4)
        at = self.queries + (head * self.N + self.first + subspace) * 32
        loads = (f"ld.shared.v4.u32 {{$0, $1, $2, $3}}, [$4+{i}];" for i in (0, 16))
        x = [y for load in loads for y in ptx(load, at, results=4)]
        keys, finer = self._keys(x)
        keys = self._sorted(keys)
        patterns = [key & 0xFF for key in keys]
        above = self._sums_above([_word_of(counts, pattern) for pattern in patterns])
        differences = self._differences(keys, -1)
        alike = _any([functools.reduce(lambda a, b: instr("min.u32", a, b), differences) < 256])
        above = simt.branch(alike, lambda: self._levelled(above, differences, 256, -1), above)
        deep = self.lane.equals(0) & (above[0] < self.largest)  # numbers in f32, not below 0
        finer = (_any([finer]) & alike) | _any([deep])
        at = self.earned + ((head >> 2) * self.share + subspace) * (PITCH * 4) + (head & 3)
        put = partial(self._put, at, exists)
        found = simt.branch(finer, lambda: self._exactly(x, patterns, counts, put), [*patterns, *above])
        put(found[:PAIRS], found[PAIRS:])

    def _differences(self, x: Sequence[Word], step: int) -> list[Word]:
        """The difference of each word from the one before, or from the next if `step` is -1; all bits at the edge."""
        if step < 0:
            others, edge, exists = [*x[1:], self._next(x[0])], -1, self.lane < LANES - 1
        else:
            others, edge, exists = [self._last(x[-1]), *x[:-1]], 0, self.lane > 0
        found = [a ^ b for a, b in zip(x, others, strict=True)]
        found[edge] = exists.select(found[edge], 0xFFFFFFFF)
        return found

    def _levelled(self, sums: Sequence[Word], differences: Sequence[Word], alike: int, step: int) -> list[Word]:
        """The value of the first of neighbours that differ by less than `alike`, or of the last if `step` is -1."""
        order = range(PAIRS)[::step]

        def once(*sums: Word) -> tuple[Flag, list[Word]]:
            out = list(sums)
            source = (self._next if step < 0 else self._last)(out[order[-1]])
            for i in order:
                source = out[i] = (differences[i] < alike).select(source, out[i])
            return _any([source.differs(sums[order[-1]])]), out

        return simt.repeat(sums, once)

    def _put(self, at: Word, exists: Flag, patterns: Sequence[Word], before: Sequence[Word]) -> None:
        """Writes the votes that patterns earn by the number of keys before them, as bytes of words at `at`."""

        @loop(0, self.T, 1, [simt.real(2.0**23)] * PAIRS)
        def votes(i: Word, *votes: Word) -> list[Word]:
            ptx('.pragma "nounroll";')
            bound = simt.load_shared(self.bounds + i * 4)
            more = [instr("sub.sat.f32", bound, x) for x in before]  # 1 if bound > x, as both are whole
            return [instr("add.f32", a, b) for a, b in zip(votes, more, strict=True)]

        nothing = exists.select(simt.real(2.0**23), 0xFFFFFFFF)
        for pattern, n in zip(patterns, votes, strict=True):  # the byte is the number
            store = "{ .reg .pred p; setp.gt.u32 p, $1, $2; @p st.shared.u8 [$0], $1; }"
            ptx(store, at + pattern * 4, n, nothing)

    def _keys(self, x: Sequence[Word]) -> tuple[list[Word], Flag]:
        """This lane's pairs as words: 23 bits of s, then 8 of the pattern; and whether s has more bits.

        As f32 the words are numbers, in the order of s where those bits differ."""
        first, magnitude = word(0), word(0)
        for y, sign in zip(x, self.signs, strict=False):  # bit j of a pattern is the sign of channel j
            first = instr("fma.rn.f32", sign, y, first)  # summed in the order of channels
        totals = [first]
        for y in x[BITS:7]:
            totals = [instr(f"{how}.f32", total, y) for how in ("sub", "add") for total in totals]
        totals = [instr("sub.f32", total, x[7]) for total in totals]
        for y in x:
            magnitude = instr("add.f32", magnitude, instr("abs.f32", y))
        # A power of two that makes `magnitude` at most 2^23 / 1.01; as f32, more would be no number.
        exponent = instr("mul.f32", magnitude, simt.real(1.01)) >> 23
        scale = instr("min.u32", word(276) - exponent, 254) << 23
        keys, rest = [], word(0)
        for i, total in enumerate(totals):
            s = instr("abs.f32", total)
            bits = instr("fma.rz.f32", s, scale, simt.real(2.0**23))
            rest = rest | instr("fma.rn.f32", s, scale, instr("sub.f32", simt.real(2.0**23), bits))
            pattern = self.lane + LANES * i
            keys.append((bits << 8) | (total < 1 << 31).select(pattern, pattern ^ 0xFF))
        return keys, rest.differs(0)

    def _next(self, x: Word) -> Word:
        """x of the next lane; of the last one, of others' first or its own."""
        return ptx("shfl.sync.down.b32 $0, $1, 1, 31, -1;", x, results=1, convergent=True)

    def _last(self, x: Word) -> Word:
        """x of the lane before; of the first one, its own."""
        lane = simt.special("laneid")
        return simt.from_lane(x, self.lane.equals(0).select(lane, lane - 1))

    def _sums_above(self, numbers: Sequence[Word]) -> list[Word]:
        """The sum of all numbers after each, where the numbers of one lane follow those of the lane before."""
        own = [word(0)]  # after each of this lane's, from the last on
        for x in reversed(numbers):
            own.append(instr("add.f32", own[-1], x))
        upward = own.pop()  # of this lane and later ones
        mine = upward
        for i, exists in enumerate(self.exists):
            other = ptx(f"shfl.sync.down.b32 $0, $1, {1 << i}, 31, -1;", upward, results=1, convergent=True)
            upward = instr("fma.rn.f32", other, exists, upward)
        later = instr("sub.f32", upward, mine)
        return [instr("add.f32", later, x) for x in reversed(own)]

    def _sorted(self, x: list[Word]) -> list[Word]:
        """The words of these lanes in ascending order, a lane's one after the other. They are numbers in f32, not
        below 0.

        Those of a lane by a network of Batcher's, then by merges of a bitonic sort. A lane that is to have the lesser
        of two has numbers with the other sign meanwhile, and so the larger of both.
        """
        minus = None  # the bit whose signs the numbers have

        def order(i: int, j: int) -> None:
            x[i], x[j] = instr("min.f32", x[i], x[j]), instr("max.f32", x[i], x[j])

        def across(gap: int, turn: int, bit: int) -> None:
            """The i-th word with the (i ^ turn)-th of the lane whose number differs in the bits of `gap`."""
            sign = self.signs[bit]
            if minus is not None:
                sign = instr("mul.f32", sign, self.signs[minus])
            x[:] = [instr("mul.f32", a, sign) for a in x]
            others = [simt.bfly(x[i ^ turn], gap) for i in range(PAIRS)]
            x[:] = [instr("max.f32", a, instr("neg.f32", b)) for a, b in zip(x, others, strict=True)]

        for i, j in _network(PAIRS):
            order(i, j)
        for top in range(BITS):
            across((2 << top) - 1, PAIRS - 1, top)
            minus = top
            for bit in reversed(range(top)):
                across(1 << bit, 0, bit)
                minus = bit
            x[:] = [instr("mul.f32", a, self.signs[minus]) for a in x]
            minus = None
            for gap in (gap for gap in (8, 4, 2, 1) if gap < PAIRS):
                for i in range(PAIRS):
                    if not i & gap:
                        order(i, i + gap)
        return x

    def _exactly(
        self, x: Sequence[Word], patterns: Sequence[Word], counts: Word, put: Callable[..., None]
    ) -> list[Word]:
        """Patterns by s in full, and the counts before each; those of opposites are put to use here."""

        def score(pattern: Word) -> Word:
            total = word(0)
            for j, y in enumerate(x):
                total = instr("add.f32", total, y ^ (((pattern ^ 0xFF) << (31 - j)) & 0x80000000))
            return total & 0x7FFFFFFF

        lane = self.lane

        def exchanged(*state: Word) -> tuple[Flag, list[Word]]:
            s, p = list(state[:PAIRS]), list(state[PAIRS:])
            wrong = []
            for i in (*range(0, PAIRS, 2), *range(1, PAIRS - 1, 2)):
                wrong.append(s[i] > s[i + 1])
                for a in (s, p):
                    a[i], a[i + 1] = wrong[-1].select(a[i + 1], a[i]), wrong[-1].select(a[i], a[i + 1])
            up, down = [self._next(a[0]) for a in (s, p)], [self._last(a[-1]) for a in (s, p)]
            low, high = (s[-1] > up[0]) & (lane < LANES - 1), (s[0] < down[0]) & (lane > 0)
            for a, of_next, of_last in zip((s, p), up, down, strict=True):
                a[-1], a[0] = low.select(of_next, a[-1]), high.select(of_last, a[0])
            return _any([*wrong, low]), [*s, *p]

        found = simt.repeat([*(score(p) for p in patterns), *patterns], exchanged)
        s, patterns = found[:PAIRS], found[PAIRS:]
        loaded, opposite = ([_word_of(counts, p ^ turn) for p in patterns] for turn in (0, 0xFF))
        above = self._levelled(self._sums_above(loaded), self._differences(s, -1), 1, -1)
        total = functools.reduce(partial(instr, "add.f32"), [*loaded, *opposite])
        for gap in (1 << i for i in range(BITS)):
            total = instr("add.f32", total, simt.bfly(total, gap))
        after = self._sums_above(opposite)
        below = [instr("sub.f32", total, instr("add.f32", a, n)) for a, n in zip(after, opposite, strict=True)]
        below = self._levelled(below, self._differences(s, 1), 1, 1)
        below = [y.equals(0).select(a, b) for y, a, b in zip(s, above, below, strict=True)]
        put([p ^ 0xFF for p in patterns], below)
        return [*patterns, *above]


def _network(n: int) -> Iterator[tuple[int, int]]:
    """Which of n are to be ordered, one pair after the other, so that all are: Batcher's merges of odd and even."""
    p = 1
    while p < n:
        k = p
        while k:
            for j in range(k % p, n - k, 2 * k):
                for i in range(j, min(j + k, n - k)):
                    if i // (2 * p) == (i + k) // (2 * p):
                        yield i, i + k
            k //= 2
        p *= 2


def _word_of(at: Word, i: Word) -> Word:
    return simt.load_shared(at + i * 4)


def _any(flags: Sequence[Flag]) -> Flag:
    """Whether one is true in a lane of the warp."""
    found = flags[0]
    for flag in flags[1:]:
        found = found | flag
    return simt.ballot(found).differs(0)


class _Table:
    """The votes that patterns earn, as table[pattern][copy, subspace, word]."""

    def __init__(self, table: Word, G: int, N: int, config: Config):
        self.table, self.N, self.width = table, N, -(-G // 4)
        self.t, self.words = simt.special("tid.x"), N * self.width
        self.which = self.t & (self.words - 1)
        step = 128 * config.warpgroups // self.words  # fours of patterns at once
        self.fours = [simt.divide(self.t, self.words) + i for i in range(0, PATTERNS // 4, step)]

    def load(self, place: Callable[[Word], Any], pitch: int, space: str) -> list[list[Word]]:
        """Words of some fours of patterns, from place([word, subspace, pattern]), with `pitch` to a subspace."""
        n = simt.divide(self.which, self.width)
        first = ((self.which - n * self.width) * self.N + n) * pitch
        load, final = f"ld.{space}.v4.u32 {{$0, $1, $2, $3}}, [$4];", PATTERNS // 4 - 1
        return [ptx(load, place(first + (i < final).select(i, final) * 4), results=4) for i in self.fours]

    def store(self, found: Sequence[Sequence[Word]]) -> None:
        copies = 32 // self.words
        first_copy = simt.divide(self.t & 31, self.words)  # so that all lanes store to banks of their own
        for i, patterns in zip(self.fours, found, strict=True):
            with when(i < PATTERNS // 4):
                for copy in range(copies):
                    at = ((first_copy + copy) & (copies - 1)) * self.words + self.which
                    for j, x in enumerate(patterns):
                        ptx(f"st.shared.u32 [$0+{j * 128}], $1;", self.table + i * 512 + at * 4, x)


class _Votes:
    """Adds up, for the keys of a block, what their patterns earn."""

    def __init__(
        self, ids: Any, ring: Word, table: Word, start: Word, stop: Word, G: int, S: int, N: int, config: Config
    ):
        self.ids, self.ring, self.table, self.start, self.stop = ids, ring, table, start, stop
        self.G, self.S, self.N, self.config = G, S, N, config
        self.threads, self.width = 128 * config.warpgroups, -(-G // 4)
        self.turn = self.threads * config.keys  # keys of a turn

    def _mine(self) -> tuple[Word, list[Word], Word]:
        """This thread's key among those of all, its order of the words of a pattern, and its copy of the table.

        Lanes 4 m .. 4 m + 3 have 4 adjacent keys.

        The order is one in which lanes ask for all the banks, of the ring and of the table; a load of two words is one
        of half the lanes after the other.
        """
        t, by_4 = simt.special("tid.x"), self.N // 4
        lane = t & 31
        above, copies = lane >> 2, 32 // (self.N * self.width)
        if self.width == 1:
            begin, copy, key = simt.divide(lane, 128 // self.N), above & (copies - 1), lane
        else:
            begin, copy = above & (by_4 - 1), simt.divide(above, by_4) & (copies - 1)
            key = (lane & 3) + (simt.divide(above, by_4) << 2) + begin * (32 // by_4)
        return t - lane + key, [(begin + i) & (by_4 - 1) for i in range(by_4)], copy

    def _fetch(self, first: Word, slot: Word | int) -> None:
        """Has the patterns of this thread's keys of a turn copied to a slot of the ring."""
        mine = self._mine()[0]
        for i in range(self.config.keys):
            key = first + mine + i * self.threads
            exists = key < self.stop
            at = simt.offset(self.ids, exists.select(key, 0) * self.N)
            to = self.ring + slot + mine * self.N + i * self.threads * self.N
            how = "cg" if self.N == 16 else "ca"
            ptx(f"cp.async.{how}.shared.global [$0], [$1], {self.N}, $2;", to, at, exists.select(self.N, 0))
        ptx("cp.async.commit_group;")

    def begin(self, first: int, stop: int) -> None:
        """Has the patterns of the turns first .. stop copied, the earliest ones first."""
        for i in range(first, stop):
            self._fetch(self.start + i * self.turn, i * self.turn * self.N)

    def count(self, out: Any) -> None:
        """Writes the votes of the block's keys; the table is there, and `stages` turns have been asked for."""
        G, N, threads, width = self.G, self.N, self.threads, self.width
        keys, stages = self.config.keys, self.config.stages
        mine, order, copy = self._mine()
        lane = simt.special("laneid")
        takes = [word(128) << (((lane + j) & 3) << 3) for j in range(4)]  # 128, of the byte that is taken
        places = [[self.table + (copy * N + i * 4 + ((lane + j) & 3)) * (4 * width) for j in range(4)] for i in order]
        words = [self.ring + mine * N + i * 4 for i in order]

        def of_key(number: int, slot: Word) -> list[Word]:
            """A byte a head."""
            sums = [word(0)] * width
            for at, of_bytes in zip(words, places, strict=True):
                x = ptx(f"ld.shared.u32 $0, [$1+{number * threads * N}];", at + slot, results=1)
                for take, place in zip(takes, of_bytes, strict=True):
                    found = instr("dp4a.u32.u32", x, take, place)  # place + 128 * byte
                    got = [simt.load_shared(found)] if width == 1 else simt.load_shared(found, 2)
                    sums = [a + b for a, b in zip(sums, got, strict=True)]
            return sums

        # Bytes of a word are those of `heads` heads for each of `joined` keys; lane m of 4 stores byte m of all four.
        heads = min(G, 4)
        joined = min(keys, 4 // heads) if heads in (1, 2, 4) else 1
        m = lane & 3
        swaps = ((m & 1).equals(0).select(0x6240, 0x3715), (m < 2).select(0x5410, 0x3276))
        which = simt.divide(m, heads)  # of the keys joined
        mover = which * threads + mine - m
        head = m - which * heads
        outs = [simt.offset(simt.offset_rows(out, head + 4 * w, self.S), mover) for w in range(width)]
        stores = [(which < joined) & (head + 4 * w < G) for w in range(width)]
        slot_bytes = self.turn * N

        @loop(self.start, self.stop, self.turn, [word(0)])
        def _turn(first: Word, slot: Word) -> Word:
            ptx(f"cp.async.wait_group {stages - 1};")
            for i in range(0, keys, joined):
                sums = [word(0)] * width
                for j in range(joined):
                    more = of_key(i + j, slot)
                    sums = [a + (b << (8 * heads * j)) if j else b for a, b in zip(sums, more, strict=True)]
                key = first + i * threads
                for x, to, mask in zip(sums, outs, stores, strict=True):
                    for gap, swap in zip((1, 2), swaps, strict=True):
                        x = ptx("prmt.b32 $0, $1, $2, $3;", x, simt.bfly(x, gap), swap, results=1)
                    with when(mask & (key + mover < self.stop)):
                        ptx("st.global.b32 [$0], $1;", simt.offset(to, key), x)
            self._fetch(first + stages * self.turn, slot)
            return slot.equals((stages - 1) * slot_bytes).select(0, slot + slot_bytes)

        ptx("cp.async.wait_group 0;")
