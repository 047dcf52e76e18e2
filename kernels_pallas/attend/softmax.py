"""Attention over a part of the keys in the registers of a warp, and the merges of warps and
blocks.

A lane holds the state of heads 2 col and 2 col + 1, where quad = lane / 4 and col = lane % 4:
the largest score (base 2), the lane's share of the sum of 2^(score - largest), and the mix of
values with the same weights. The mix is [D, heads], laid out as the accumulator of `mma`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.simt import Flag, Word, instr, ptx, real, when, word

HEADS = 8  # columns of a product
MOST_STEPS = 32  # of `Spans`: lanes of a warp
SIZES = (64, 80, 96, 128, 192, 256)  # of heads
KINDS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}  # of queries and means


class Scale(NamedTuple):
    """How logits are made of products q.k: times `factor`, then cap * tanh(logits / cap), if
    there is a cap.
    """

    factor: float
    cap: float | None = None


def empty(D: int) -> list[Word]:
    """The state of no keys: largest scores, sums and mix."""
    return [real(-math.inf)] * 2 + [word(0)] * (2 + D // 4)


def parts(state: Sequence[Word]) -> tuple[list[Word], list[Word], list[list[Word]]]:
    mixed = [list(state[j : j + 4]) for j in range(4, len(state), 4)]
    return list(state[:2]), list(state[2:4]), mixed


def weigh(
    state: Sequence[Word],
    scores: list[list[Word]],
    exists: Callable[[int, int], Flag],
    *,
    scale: Scale,
    kind: str,
) -> tuple[list[Word], list[list[Word]]]:
    """The state before the values of some keys are mixed in, and their weights as right
    operands of `mma`.

    `scores` are the sums of `mma` of 16 keys each, of which `scale` makes logits; exists(n, e)
    says whether key 8 n + quad counts for head 2 col + e.
    """
    kept, weights = exponentials(state, masked(logarithms(scores, scale), exists))
    return kept, [right_operand(tile, kind) for tile in weights]


def logarithms(scores: list[list[Word]], scale: Scale) -> list[list[Word]]:
    """Returns the logarithms, base 2, of weights, from sums of products q.k."""
    factor, cap = scale

    def log(x: Word) -> Word:
        if cap is None:
            return instr("mul.f32", x, real(factor / math.log(2)))
        # tanh y = 1 - 2 / (1 + e^2y), within 1e-7; the instruction is only within 5e-4, which a
        # cap of 50 multiplies.
        power = instr(
            "ex2.approx.ftz.f32", instr("mul.f32", x, real(2 * factor / cap / math.log(2)))
        )
        half = instr("rcp.approx.ftz.f32", instr("add.f32", power, real(1.0)))
        return instr("fma.rn.f32", half, real(-2 * cap / math.log(2)), real(cap / math.log(2)))

    return [[log(x) for x in tile] for tile in scores]


def masked(logs: list[list[Word]], exists: Callable[[int, int], Flag]) -> list[list[Word]]:
    return [
        [exists(2 * n + e // 2, e % 2).select(x, real(-math.inf)) for e, x in enumerate(t)]
        for n, t in enumerate(logs)
    ]


def exponentials(
    state: Sequence[Word],
    logs: list[list[Word]],
    *,
    factor: float = 1.0,
    lift: float = 0.0,
    slack: float | None = None,
) -> tuple[list[Word], list[list[Word]]]:
    """The state before the values of some keys are mixed in, and their weights times 2^lift.

    Logarithms, which `factor` > 0 multiplies, and weights are in the places of the sums of
    `mma` of 16 keys each. The state's sums have the lift too. With `slack` its largest score
    stays, so that its sums need no multiplication, until a score is larger by more than
    `slack`; weights are then up to 2^(lift + slack).
    """
    olds = list(state[:2])
    tops = []
    for e in range(2):
        top = functools.reduce(
            lambda a, b: instr("max.f32", a, b), [x for tile in logs for x in tile[e::2]]
        )
        for gap in (4, 8, 16):
            top = instr("max.f32", top, simt.bfly(top, gap))
        tops.append(
            instr(
                "max.f32", olds[e], top if factor == 1 else instr("mul.f32", top, real(factor))
            )
        )

    def moved() -> list[Word]:
        keep = [
            instr("ex2.approx.ftz.f32", instr("sub.f32", x, finite(y)))
            for x, y in zip(olds, tops, strict=True)
        ]
        return [*tops, *(instr("mul.f32", x, keep[i % 2]) for i, x in enumerate(state[2:]))]

    if slack is None:
        state = moved()
    else:
        greater = "{ .reg .pred p; setp.gt.f32 p, $1, $2; selp.u32 $0, 1, 0, p; }"
        limits = [instr("add.f32", x, real(slack)) for x in olds]
        far = [
            simt.ballot(ptx(greater, x, y, results=1).differs(0))
            for x, y in zip(tops, limits, strict=True)
        ]
        state = simt.branch((far[0] | far[1]).differs(0), moved, state)
    tops, totals, mixed = parts(state)
    weights = [list(tile) for tile in logs]
    for e in range(2):
        shift = instr("sub.f32", real(lift), finite(tops[e]))
        for tile in weights:
            for i in (e, e + 2):
                tile[i] = instr(
                    "ex2.approx.ftz.f32", instr("fma.rn.f32", tile[i], real(factor), shift)
                )
                totals[e] = instr("add.f32", totals[e], tile[i])
    return [*tops, *totals, *flat(mixed)], weights


def right_operand(tile: list[Word], kind: str) -> list[Word]:
    """The sums of a `mma` of 16 keys as a right operand of `mma`, whose rows are the keys."""
    halves = [instr(f"cvt.rn.{kind}x2.f32", tile[n + 1], tile[n]) for n in (0, 2)]
    return [instr("movmatrix.sync.aligned.m8n8.trans.b16", x, convergent=True) for x in halves]


def flat(mixed: list[list[Word]]) -> list[Word]:
    return [x for acc in mixed for x in acc]


def finite(top: Word) -> Word:
    """A largest score, or 0 if there are no scores: 2^(-inf - 0) is 0, but 2^(-inf - -inf) is
    NaN.
    """
    return top.equals(real(-math.inf)).select(0, top)


def row_bytes(D: int) -> int:
    """Bytes of shared memory of one token's key or value: whole eights of chunks of 16 bytes."""
    return -(-2 * D // 128) * 128


def passes_of(heads: int) -> int:
    """How often `heads` queries that share keys are split, so that a product has a column for
    each; each gets its own row of the grid, and the rows read most keys from the L2 cache."""
    return next(n for n in range(1, heads + 1) if heads % n == 0 and heads // n <= HEADS)


class Spans:
    """The spans i32[rows, T] of T steps, or of all, [rows, 1]; each lane has a step's, clipped
    to 0 .. `size`.
    """

    def __init__(self, ends: Sequence[tuple[Any, int]], row: Word, lane: Word, size: int):
        steps = ((m, row * T + (lane < T).select(lane, T - 1)) for m, T in ends)
        own = (
            simt.clipped(simt.load(simt.offset_rows(simt.global_address(m), at, 4)), size)
            for m, at in steps
        )
        self._starts, self._stops = own
        self.start, self.latest = (_over_lanes(self._starts, what) for what in ("min", "max"))
        self.earliest, stop = (_over_lanes(self._stops, what) for what in ("min", "max"))
        self.stop = (stop < size).select(stop, size)

    def of(self, step: Word) -> list[Word]:
        """Start and stop of a step; of the last one past it."""
        return [simt.from_lane(x, step) for x in (self._starts, self._stops)]


def _over_lanes(x: Word, what: str) -> Word:
    """The "min" or "max" of x over the lanes of a warp."""
    for gap in (1, 2, 4, 8, 16):
        x = instr(f"{what}.s32", x, simt.bfly(x, gap))
    return x


def step_count(stop: Any) -> int:
    """T of a stop i32[rows, T]; 1 of i32[rows]."""
    return stop.shape[1] if len(stop.shape) == 2 else 1


def columns_of(heads: int, most: int) -> tuple[int, int]:
    """Rows of the grid for `heads` queries that share keys, and columns of up to `HEADS`
    queries in each, `most` at most."""
    columns = -(-heads // HEADS)
    groups = -(-columns // most)
    return groups, -(-columns // groups)


def query_bytes(D: int, columns: int) -> int:
    """Bytes of shared memory of the queries, which registers hold if they are one column."""
    return 2 * HEADS * D * columns if columns > 1 else 0


class Rows:
    """Keys and values of D times 16 bits in shared memory of a warp, and products with them.

    A row is of one token, and its chunk i of 16 bytes is at i ^ (row % 8): so 8 rows of a
    chunk, which `ldmatrix` reads at once, are in different banks. `of_token` bytes are a
    token's in device memory. An instruction copies the `per` tokens from `first` on, and a lane
    `chunk` of its token.
    """

    def __init__(self, D: int, kind: str, lane: Word):
        self.D = D
        self.kind = kind
        self.width = row_bytes(D)
        self.of_token = 2 * D
        self.chunks = D // 8
        lanes = 1 << (self.chunks - 1).bit_length()
        self.per = 32 // lanes
        self.chunk = lane & (lanes - 1)
        self.first = simt.divide(lane, lanes)
        self.all_lanes = lanes == self.chunks
        self.quad = lane >> 2
        self.col = lane & 3
        # Lane 8 i + r gives `ldmatrix` the address of row r of its i-th 8 x 8 part.
        r = lane & 7
        i = lane >> 3
        self._key = ((i & 1) * 8 + r) * self.width, ((i >> 1) ^ r) << 4
        self._value = ((i >> 1) * 8 + r) * self.width, ((i & 1) ^ r) << 4

    def copy(self, code: str, to: Word, source: Any, exists: Flag) -> None:
        """Starts to copy this lane's chunk, `code` for 16 bytes to $0 from $1; zeros if it does
        not exist.
        """
        if self.all_lanes:
            ptx(code, to, source, exists.select(16, 0))
        else:
            with when(self.chunk < self.chunks):
                ptx(code, to, source, exists.select(16, 0))

    def place(self, at: Word, row: Word, chunk: Word) -> Word:
        return at + row * self.width + ((chunk ^ (row & 7)) << 4)

    def queries(self, q: Any, heads: int) -> list[Word]:
        """Right operands of queries in device memory: lane (head quad, channels 2 col, 2 col +
        1) of each 8.
        """
        at = self.quad * self.of_token + self.col * 4
        return [
            simt.load_below(self.quad, heads, simt.offset(q, at + n * 16))
            for n in range(self.D // 8)
        ]

    def scores(self, at: Word, queries: Sequence[Word], tiles: int) -> list[list[Word]]:
        """Scores of tiles of 16 keys each, the first tile at `at`."""
        return self.scores_of(at, lambda _, j: queries[2 * j : 2 * j + 2], tiles, 1)[0]

    def scores_of(
        self, at: Word, queries: Callable[[int, int], Sequence[Word]], tiles: int, columns: int
    ) -> list[list[list[Word]]]:
        """`scores` of each of `columns` times `HEADS` queries; queries(c, j) are the words of
        16 channels.
        """
        scores = [[[word(0)] * 4 for _ in range(tiles)] for _ in range(columns)]
        for j in range(self.D // 16):
            rights = [queries(c, j) for c in range(columns)]
            for n in range(tiles):
                left = self._part(at, self._key, n, j, "")
                for own, right in zip(scores, rights, strict=True):
                    own[n] = simt.mma(self.kind, own[n], left, right)
        return scores

    def mix(
        self, state: Sequence[Word], at: Word, weights: Sequence[Sequence[Word]]
    ) -> list[Word]:
        """The state with values at `at` times `weights`, right operands of 16 keys each."""
        return self.mix_of([state], at, [weights])[0]

    def mix_of(
        self,
        states: Sequence[Sequence[Word]],
        at: Word,
        weights: Sequence[Sequence[Sequence[Word]]],
    ) -> list[list[Word]]:
        """`mix` of several states, each with its weights."""
        mixed = [parts(state)[2] for state in states]
        for j in range(self.D // 16):
            for n in range(len(weights[0])):
                left = self._part(at, self._value, n, j, ".trans")
                for own, rights in zip(mixed, weights, strict=True):
                    own[j] = simt.mma(self.kind, own[j], left, rights[n])
        return [[*state[:4], *flat(own)] for state, own in zip(states, mixed, strict=True)]

    def _part(
        self, at: Word, lane: tuple[Word, Word], tile: int, pair: int, how: str
    ) -> list[Word]:
        row, chunk = lane
        code = f"ldmatrix.sync.aligned.m8n8.x4{how}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
        place = at + row + tile * 16 * self.width + (chunk ^ (pair * 32))
        return ptx(code, place, results=4, convergent=True)

    def store(self, at: Word, state: Sequence[Word], heads: int) -> None:
        """Writes a warp's part."""
        store(at, state, heads, self.D, lambda j, half: self.quad + 16 * j + 8 * half)


# In shared memory a part has, head by head, D words of the mix and 4 of padding (so that the
# lanes of a store go to different banks), and after all heads their largest scores and sums.


def part_bytes(D: int) -> int:
    return HEADS * (D + 4 + 2) * 4


def _stats(at: Word, head: Word, D: int) -> Word:
    return at + (head * 2 + HEADS * (D + 4)) * 4


def store(
    at: Word, state: Sequence[Word], heads: int, D: int, channel: Callable[[int, int], Word]
) -> None:
    """Writes a warp's part. channel(j, half) is the channel of this lane's words `half` of the
    j-th 16 of the mix.
    """
    tops, totals, mixed = parts(state)
    lane = simt.special("tid.x") & 31
    for gap in (4, 8, 16):
        totals = [instr("add.f32", x, simt.bfly(x, gap)) for x in totals]
    for e in range(2):
        head = (lane & 3) * 2 + e
        with when(head < heads):
            for j, acc in enumerate(mixed):
                for half in range(2):
                    simt.store_shared(
                        at + (head * (D + 4) + channel(j, half)) * 4, acc[2 * half + e]
                    )
            with when(lane < 4):
                store_stats(at, head, D, tops[e], totals[e])


def store_stats(at: Word, head: Word, D: int, top: Word, total: Word) -> None:
    simt.store_shared(_stats(at, head, D), top, total)


class Merged:
    """Words 4 i .. 4 i + 3 of the mix [heads, D] of merged parts."""

    def __init__(self, sources: Sequence[Word], i: Word, D: int, space: str):
        self._find(i, D)
        code = f"ld.{space}.v2.u32 {{$0, $1}}, [$2];"
        stats = [ptx(code, _stats(at, self.head, D), results=2) for at in sources]
        code = f"ld.{space}.v4.u32 {{$0, $1, $2, $3}}, [$4];"
        place = (self.head * (D + 4) + self.word) * 4
        mixes = [ptx(code, at + place, results=4) for at in sources]
        self._merge(stats, mixes)

    @classmethod
    def of_means(cls, means: Any, logs: Any, n: int, heads: int, i: Word, D: int) -> Merged:
        """The state of part i: means f32[n, heads, D] and natural logs of sums f32[n, heads]
        are in device memory.
        """
        self = cls.__new__(cls)
        self._find(i, D)
        logs = [simt.load(simt.offset(logs, (self.head + b * heads) * 4)) for b in range(n)]
        stats = [[instr("mul.f32", x, real(1 / math.log(2))), real(1.0)] for x in logs]
        code = "ld.global.nc.v4.u32 {$0, $1, $2, $3}, [$4];"
        self._merge(
            stats,
            [
                ptx(code, simt.offset(means, (i + b * (heads * D // 4)) * 16), results=4)
                for b in range(n)
            ],
        )
        return self

    def _find(self, i: Word, D: int) -> None:
        self.D = D
        self.head = simt.divide(i, D // 4)
        self.word = (i - self.head * (D // 4)) * 4

    def _merge(self, stats: Sequence[Sequence[Word]], mixes: Sequence[Sequence[Word]]) -> None:
        self.top = functools.reduce(
            lambda a, b: instr("max.f32", a, b), [top for top, _ in stats]
        )
        self.total = word(0)
        self.four = [word(0)] * 4
        for (top, total), mix in zip(stats, mixes, strict=True):
            by = instr("ex2.approx.ftz.f32", instr("sub.f32", top, finite(self.top)))
            self.total = instr("fma.rn.f32", total, by, self.total)
            self.four = [
                instr("fma.rn.f32", x, by, acc) for x, acc in zip(mix, self.four, strict=True)
            ]

    def store(self, at: Word) -> None:
        """Writes the state as that of a part."""
        simt.store_shared(at + (self.head * (self.D + 4) + self.word) * 4, *self.four)
        with when(self.word.equals(0)):
            simt.store_shared(_stats(at, self.head, self.D), self.top, self.total)

    def write(self, out: Any, lse: Any) -> None:
        """Writes the mean of values f32[heads, D] and the natural log of the sum f32[heads] to
        device memory.
        """
        self.write_mean(out, "f32")
        with when(self.word.equals(0)):
            log = instr("add.f32", self.top, instr("lg2.approx.f32", self.total))
            ptx(
                "st.global.u32 [$0], $1;",
                simt.offset(lse, self.head * 4),
                instr("mul.f32", log, real(math.log(2))),
            )

    def write_mean(self, out: Any, kind: str) -> None:
        """Writes the mean of values [heads, D] to device memory, as "f32", "bf16" or "f16"."""
        by = instr("max.f32", self.total, real(1e-37))
        mean = [instr("div.rn.f32", x, by) for x in self.four]
        at = self.head * self.D + self.word
        if kind == "f32":
            ptx("st.global.v4.u32 [$0], {$1, $2, $3, $4};", simt.offset(out, at * 4), *mean)
        else:
            two = [instr(f"cvt.rn.{kind}x2.f32", mean[j + 1], mean[j]) for j in (0, 2)]
            ptx("st.global.v2.u32 [$0], {$1, $2};", simt.offset(out, at * 2), *two)


def write_merged(parts: Sequence[Word], D: int, out: Any, lse: Any, i: Word) -> None:
    """Writes words 4 i .. 4 i + 3 of the mean of parts in shared memory, and the log of their
    sum.
    """
    Merged(parts, i, D, "shared").write(out, lse)


def merge_blocks(
    means: Array, logs: Array, dtype: Any, *, name: str, lse: bool, place: Callable[[Word], Word] = lambda row: row,
    place_of_head: Callable[[Word, Word], Word] | None = None,
) -> tuple[Array, ...]:  # fmt: skip
    """[rows, heads, D] in `dtype` of parts: their means f32[rows, blocks, heads, D] and natural
    logs of sums f32[rows, blocks, heads]; and, with `lse`, the log of all, f32[rows, heads].
    Row i is written as row place(i), or, without `lse`, head h of row i as the D numbers at
    place_of_head(i, h). A separate kernel with a block per row."""
    rows, blocks, heads, D = means.shape
    outs = [jax.ShapeDtypeStruct((rows, heads, D), dtype)]
    if lse:
        outs.append(jax.ShapeDtypeStruct((rows, heads), jnp.float32))
    return simt.kernel(
        functools.partial(
            _merge,
            heads=heads,
            D=D,
            blocks=blocks,
            kind=KINDS[str(jnp.dtype(dtype))],
            place=place,
            place_of_head=place_of_head,
        ),
        name=f"kvjax_{name}_merge",
        out_type=tuple(outs),
        blocks=rows,
        warpgroups=1,
    )(means, logs)


def with_sinks(out: Array, lse: Array, sinks: Array, dtype: Any) -> Array:
    """[B, K, G, D] in `dtype` of an `out` of these sizes and lse [B, K, G], both f32: merged
    with logits f32[K, H] that have no value, for each H of G queries in turn."""
    every = jnp.tile(sinks.astype(jnp.float32), (1, lse.shape[2] // sinks.shape[-1]))
    share = jax.nn.sigmoid(lse - jnp.broadcast_to(every, lse.shape))
    return (out * share[..., None]).astype(dtype)


def _merge(
    means_m: Any, logs_m: Any, out_m: Any, lse_m: Any = None, *, heads: int, D: int, blocks: int, kind: str,
    place: Callable[[Word], Word], place_of_head: Callable[[Word, Word], Word] | None,
) -> None:  # fmt: skip
    row = simt.special("ctaid.x")
    t = simt.special("tid.x")
    means, logs = (
        simt.offset_rows(simt.global_address(m), row, blocks * heads * size)
        for m, size in ((means_m, D * 4), (logs_m, 4))
    )
    to = place(row)
    size = 4 if kind == "f32" else 2
    out = simt.offset_rows(simt.global_address(out_m), to, heads * D * size)

    @simt.loop(t, heads * D // 4, 128)
    def _write(i: Word) -> None:
        merged = Merged.of_means(means, logs, blocks, heads, i, D)
        if place_of_head is not None:
            own = simt.offset_rows(
                simt.global_address(out_m), place_of_head(row, merged.head), D * size
            )
            merged.head = word(0)
            merged.write_mean(own, kind)
        elif lse_m is None:
            merged.write_mean(out, kind)
        else:
            merged.write(out, simt.offset_rows(simt.global_address(lse_m), to, heads * 4))
