"""Ranks of the sign patterns of subspaces: how many votes each of the 256 earns, in shared
memory.

The kernel `collide` ranks in the blocks that count votes, or in a separate kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.score.rotate import channels, rotated
from kvjax.kernels_pallas.simt import Flag, Word, instr, loop, ptx, when, word

PATTERNS = 256  # of a subspace
# words from a subspace to the next, so that fours of 8 of them are in different banks
PITCH = PATTERNS + 4
LANES = 16  # that rank a subspace for a head
# of a lane: a pattern and its opposite, whose scores are s and -s
PAIRS = PATTERNS // 2 // LANES
BITS = LANES.bit_length() - 1  # of a lane's number
MAX_KEYS = 1 << 24  # keys: sums of counts are exact in f32
Sizes = tuple[int, int, int, int]  # rows that share limits, G, N, T


def rank_scratch(G: int, N: int, share: int) -> tuple[int, int]:
    """Words for the votes that the patterns of `share` subspaces earn; and for queries and
    limits.
    """
    return share * -(-G // 4) * PITCH, G * N * 8 + 32


class Ranks:
    """Votes that the patterns of a block's subspaces earn, a byte per head; `LANES` lanes work
    on a subspace and head.

    One of two opposite patterns scores s >= 0, the other -s. The former are sorted, several per
    lane, by 23 bits of s and the pattern, and the counts of those above are summed. Only if two
    are equal in these bits and s has more, or if limits reach patterns below 0, the result is
    sorted again by all bits of s, and all patterns count. Counts are in f32.
    """

    def __init__(
        self, given: Sequence[Any], scratch: Sequence[Any], row: Word, first: Word, share: int, sizes: Sizes,
        turned: int | None, warpgroups: int,
    ):  # fmt: skip
        """Starts the loads of `given` queries, counts and limits for `share` subspaces from the
        `first` on; `scratch` has room for the counts, for the votes that patterns earn, and for
        queries."""
        shared_by, self.G, self.N, self.T = sizes
        self.first = first
        self.share = share
        self.turned = turned
        self.warps = 4 * warpgroups
        q, counts, limits = (simt.global_address(m) for m in given)
        self.counts, self.earned, self.queries = (simt.shared_address(m) for m in scratch)
        self.q = simt.offset_rows(q, row, self.G * self.N * 32)
        counts = simt.offset_rows(counts, row * self.N + first, PATTERNS * 4)
        limits = simt.offset_rows(limits, simt.divide(row, shared_by), self.T * 4)
        self.bounds = self.queries + self.G * self.N * 32
        t = simt.special("tid.x")
        threads = 128 * warpgroups
        fours = share * PATTERNS // 4
        lane = t & 31
        warp = t >> 5
        self.mine = [t + i for i in range(0, fours, threads)]
        load = "ld.global.nc.v4.u32 {$0, $1, $2, $3}, [$4];"
        self.loaded = [
            ptx(load, simt.offset(counts, (i < fours).select(i, 0) * 16), results=4)
            for i in self.mine
        ]
        self.query = self._channels((warp < self.G).select(warp, self.G - 1))
        self.limit = simt.load(
            simt.offset(limits, (lane < self.T).select(lane, self.T - 1) * 4)
        )
        zeros = "st.shared.v4.u32 [$0], {$1, $1, $1, $1};"
        words = rank_scratch(self.G, self.N, share)[0]
        loop(t * 4, words, threads * 4)(lambda i: ptx(zeros, self.earned + i * 4, 0))
        self.lane = lane & (LANES - 1)
        # 1 if a bit of a lane's number is set, else -1; and 1 if there is a lane 2^i further,
        # else 0.
        self.signs = [
            (self.lane & (1 << i)).equals(0).select(simt.real(-1.0), simt.real(1.0))
            for i in range(BITS)
        ]
        self.exists = [
            (self.lane < LANES - (1 << i)).select(simt.real(1.0), 0) for i in range(BITS)
        ]

    def _channels(self, head: Word) -> list[Word]:
        return channels(simt.offset(self.q, head * (self.N * 32)), self.N * 8)

    def find(self) -> None:
        """Writes the votes that patterns earn, from one barrier to the next."""
        G = self.G
        T = self.T
        t = simt.special("tid.x")
        lane = t & 31
        warp = t >> 5
        for i, four in zip(self.mine, self.loaded, strict=True):
            numbers = [instr("cvt.rn.f32.u32", x) for x in four]
            with when(i < self.share * PATTERNS // 4):
                simt.store_shared(self.counts + i * 16, *numbers)
        limit = simt.clipped(self.limit, MAX_KEYS)
        self.largest = instr(
            "cvt.rn.f32.u32", instr("redux.sync.max.u32", limit, -1, convergent=True)
        )
        with when(t < T):
            simt.store_shared(self.bounds + t * 4, instr("cvt.rn.f32.u32", limit))

        def put(head: Word, x: list[Word]) -> None:
            at = self.queries + (head * 32 + lane) * self.N
            per = self.N // 4
            values = "{" + ", ".join(f"${i + 1}" for i in range(per)) + "}"
            ptx(f"st.shared.v{per}.u32 [$0], {values};", at, *rotated(x, self.turned))

        with when(warp < G):
            put(warp, self.query)
        if self.warps < G:  # as in a block of 128 threads
            loop(warp + self.warps, G, self.warps)(lambda head: put(head, self._channels(head)))
        simt.block_barrier()
        jobs = self.share * G
        at_once = 32 // LANES

        @loop(warp * at_once, jobs, self.warps * at_once)
        def _job(first: Word) -> None:
            ptx('.pragma "nounroll";')
            job = first + simt.divide(lane, LANES)
            exists = job < jobs  # otherwise these lanes repeat the work of others
            self._rank(exists.select(job, jobs - 1), exists)

        simt.block_barrier()

    def _rank(self, job: Word, exists: Flag) -> None:
        """Ranks the patterns of the job-th subspace and head with these lanes."""
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
        found = simt.branch(
            finer, lambda: self._exactly(x, patterns, counts, put), [*patterns, *above]
        )
        put(found[:PAIRS], found[PAIRS:])

    def _differences(self, x: Sequence[Word], step: int) -> list[Word]:
        """The difference of each word from the one before, or from the next if `step` is -1;
        all bits at the edge.
        """
        if step < 0:
            others = [*x[1:], self._next(x[0])]
            edge = -1
            exists = self.lane < LANES - 1
        else:
            others = [self._last(x[-1]), *x[:-1]]
            edge = 0
            exists = self.lane > 0
        found = [a ^ b for a, b in zip(x, others, strict=True)]
        found[edge] = exists.select(found[edge], 0xFFFFFFFF)
        return found

    def _levelled(
        self, sums: Sequence[Word], differences: Sequence[Word], alike: int, step: int
    ) -> list[Word]:
        """The value of the first of neighbours that differ by less than `alike`, or of the last
        if `step` is -1.
        """
        order = range(PAIRS)[::step]

        def once(*sums: Word) -> tuple[Flag, list[Word]]:
            out = list(sums)
            source = (self._next if step < 0 else self._last)(out[order[-1]])
            for i in order:
                source = out[i] = (differences[i] < alike).select(source, out[i])
            return _any([source.differs(sums[order[-1]])]), out

        return simt.repeat(sums, once)

    def _put(
        self, at: Word, exists: Flag, patterns: Sequence[Word], before: Sequence[Word]
    ) -> None:
        """Writes the votes that patterns earn by the number of keys before them, as bytes of
        words at `at`.
        """

        @loop(0, self.T, 1, [simt.real(2.0**23)] * PAIRS)
        def votes(i: Word, *votes: Word) -> list[Word]:
            ptx('.pragma "nounroll";')
            bound = simt.load_shared(self.bounds + i * 4)
            # 1 if bound > x, as both are whole.
            more = [instr("sub.sat.f32", bound, x) for x in before]
            return [instr("add.f32", a, b) for a, b in zip(votes, more, strict=True)]

        nothing = exists.select(simt.real(2.0**23), 0xFFFFFFFF)
        for pattern, n in zip(patterns, votes, strict=True):  # the byte is the number
            store = "{ .reg .pred p; setp.gt.u32 p, $1, $2; @p st.shared.u8 [$0], $1; }"
            ptx(store, at + pattern * 4, n, nothing)

    def _keys(self, x: Sequence[Word]) -> tuple[list[Word], Flag]:
        """This lane's pairs as words: 23 bits of s, then 8 of the pattern; and whether s has
        more bits.

        As f32 the words are ordered numbers, in the order of s if those bits differ."""
        first = word(0)
        magnitude = word(0)
        # Bit j of a pattern is the sign of channel j.
        for y, sign in zip(x, self.signs, strict=False):
            first = instr("fma.rn.f32", sign, y, first)  # summed in the order of channels
        totals = [first]
        for y in x[BITS:7]:
            totals = [
                instr(f"{how}.f32", total, y) for how in ("sub", "add") for total in totals
            ]
        totals = [instr("sub.f32", total, x[7]) for total in totals]
        for y in x:
            magnitude = instr("add.f32", magnitude, instr("abs.f32", y))
        # A power of two that makes `magnitude` at most 2^23 / 1.01; larger words would not be
        # numbers as f32.
        exponent = instr("mul.f32", magnitude, simt.real(1.01)) >> 23
        scale = instr("min.u32", word(276) - exponent, 254) << 23
        keys = []
        rest = word(0)
        for i, total in enumerate(totals):
            s = instr("abs.f32", total)
            bits = instr("fma.rz.f32", s, scale, simt.real(2.0**23))
            rest = rest | instr(
                "fma.rn.f32", s, scale, instr("sub.f32", simt.real(2.0**23), bits)
            )
            pattern = self.lane + LANES * i
            keys.append((bits << 8) | (total < 1 << 31).select(pattern, pattern ^ 0xFF))
        return keys, rest.differs(0)

    def _next(self, x: Word) -> Word:
        """x of the next lane; the last lane gets that of other lanes' first, or its own."""
        return ptx("shfl.sync.down.b32 $0, $1, 1, 31, -1;", x, results=1, convergent=True)

    def _last(self, x: Word) -> Word:
        """x of the lane before; the first lane gets its own."""
        lane = simt.special("laneid")
        return simt.from_lane(x, self.lane.equals(0).select(lane, lane - 1))

    def _sums_above(self, numbers: Sequence[Word]) -> list[Word]:
        """The sum of all numbers after each, where the numbers of one lane follow those of the
        lane before.
        """
        own = [word(0)]  # sums after each of this lane's numbers, from the last on
        for x in reversed(numbers):
            own.append(instr("add.f32", own[-1], x))
        upward = own.pop()  # of this lane and later ones
        mine = upward
        for i, exists in enumerate(self.exists):
            other = ptx(
                f"shfl.sync.down.b32 $0, $1, {1 << i}, 31, -1;",
                upward,
                results=1,
                convergent=True,
            )
            upward = instr("fma.rn.f32", other, exists, upward)
        later = instr("sub.f32", upward, mine)
        return [instr("add.f32", later, x) for x in reversed(own)]

    def _sorted(self, x: list[Word]) -> list[Word]:
        """The words of these lanes in ascending order, a lane's one after the other. They are
        numbers in f32, not below 0.

        The words of a lane are sorted by a network of Batcher's, then by merges of a bitonic
        sort. A lane that is to get the smaller of two numbers has them with the opposite sign
        meanwhile, and so takes the larger one.
        """
        minus = None  # the bit whose signs the numbers have

        def order(i: int, j: int) -> None:
            x[i], x[j] = instr("min.f32", x[i], x[j]), instr("max.f32", x[i], x[j])

        def across(gap: int, turn: int, bit: int) -> None:
            """Orders the i-th word and the (i ^ turn)-th of the lane whose number differs in
            the bits of `gap`.
            """
            sign = self.signs[bit]
            if minus is not None:
                sign = instr("mul.f32", sign, self.signs[minus])
            x[:] = [instr("mul.f32", a, sign) for a in x]
            others = [simt.bfly(x[i ^ turn], gap) for i in range(PAIRS)]
            x[:] = [
                instr("max.f32", a, instr("neg.f32", b)) for a, b in zip(x, others, strict=True)
            ]

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
        self,
        x: Sequence[Word],
        patterns: Sequence[Word],
        counts: Word,
        put: Callable[..., None],
    ) -> list[Word]:
        """Patterns sorted by all bits of s, and the counts before each; the opposite patterns
        are written here.
        """

        def score(pattern: Word) -> Word:
            total = word(0)
            for j, y in enumerate(x):
                total = instr(
                    "add.f32", total, y ^ (((pattern ^ 0xFF) << (31 - j)) & 0x80000000)
                )
            return total & 0x7FFFFFFF

        lane = self.lane

        def exchanged(*state: Word) -> tuple[Flag, list[Word]]:
            s = list(state[:PAIRS])
            p = list(state[PAIRS:])
            wrong = []
            for i in (*range(0, PAIRS, 2), *range(1, PAIRS - 1, 2)):
                wrong.append(s[i] > s[i + 1])
                for a in (s, p):
                    a[i], a[i + 1] = (
                        wrong[-1].select(a[i + 1], a[i]),
                        wrong[-1].select(a[i], a[i + 1]),
                    )
            up = [self._next(a[0]) for a in (s, p)]
            down = [self._last(a[-1]) for a in (s, p)]
            low = (s[-1] > up[0]) & (lane < LANES - 1)
            high = (s[0] < down[0]) & (lane > 0)
            for a, of_next, of_last in zip((s, p), up, down, strict=True):
                a[-1], a[0] = low.select(of_next, a[-1]), high.select(of_last, a[0])
            return _any([*wrong, low]), [*s, *p]

        found = simt.repeat([*(score(p) for p in patterns), *patterns], exchanged)
        s = found[:PAIRS]
        patterns = found[PAIRS:]
        loaded, opposite = (
            [_word_of(counts, p ^ turn) for p in patterns] for turn in (0, 0xFF)
        )
        above = self._levelled(self._sums_above(loaded), self._differences(s, -1), 1, -1)
        total = functools.reduce(partial(instr, "add.f32"), [*loaded, *opposite])
        for gap in (1 << i for i in range(BITS)):
            total = instr("add.f32", total, simt.bfly(total, gap))
        after = self._sums_above(opposite)
        below = [
            instr("sub.f32", total, instr("add.f32", a, n))
            for a, n in zip(after, opposite, strict=True)
        ]
        below = self._levelled(below, self._differences(s, 1), 1, 1)
        below = [y.equals(0).select(a, b) for y, a, b in zip(s, above, below, strict=True)]
        put([p ^ 0xFF for p in patterns], below)
        return [*patterns, *above]


def _network(n: int) -> Iterator[tuple[int, int]]:
    """Pairs of n elements whose ordering, one after the other, sorts them all: Batcher's
    odd-even merges.
    """
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
    """Whether one of the flags is true in any lane of the warp."""
    found = flags[0]
    for flag in flags[1:]:
        found = found | flag
    return simt.ballot(found).differs(0)
