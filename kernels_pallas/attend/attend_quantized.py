"""Attention over keys and values of 2 or 4 bits, whose codes become operands of `mma` with one
`and` for two codes.

Below 256 the bits of a bf16 count linearly, so codes are used undecoded where scales can move:
to the queries for keys by channel, to the weights for values by token. Keys by token are
decoded. The rounding of scaled operands is corrected.

A warp takes a unit at a time; four warps take many queries (`together`). Exact keys of the
recent block follow. A second kernel merges blocks.

**Bytes:** D (b_k + b_v) / 8 of codes and 4 D / g of scales each of keys and values, for a token
and KV head.

**Bound:** instructions, then memory.

**Limits:** by channel, q s and q z below 2^50; of values, s below 2^55 and z below 2^38;
precision suffers below 2^-57. Evidence: `benchmarks/NOTES.md`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.kernels_pallas import simt, tuned
from kvjax.kernels_pallas.attend import softmax, together
from kvjax.kernels_pallas.attend.codes import (
    LIFT,
    Layout,
    affine_of,
    centre_of,
    codes_at,
    decode,
    exact_operand,
    groups_of,
    layout_of,
    load_words,
    multiply,
    own_queries,
    pair_of,
    pairs_of,
    prmt,
)
from kvjax.kernels_pallas.attend.mixing import Mixing
from kvjax.kernels_pallas.attend.softmax import KINDS, MOST_STEPS, step_count
from kvjax.kernels_pallas.simt import Flag, Word, instr, loop, ptx, real, when, word

MEASURED: str | None = "2026-11-21"  # the date in benchmarks/results/attend_quantized.json
MAX_GROUP = 64
MAX_QUERIES = 256
SLACK = 8.0  # weights are up to 2^(LIFT + SLACK)


@dataclass(frozen=True)
class Config:
    blocks: int  # of a row
    warpgroups: int = 3  # of a block; registers allow one such block per multiprocessor
    stages: int = 2  # units that a warp has room for in shared memory
    wide: bool = False  # products of a warpgroup, of more than one column

    def __post_init__(self) -> None:
        if self.blocks < 1 or self.warpgroups not in (1, 2, 3, 4) or self.stages < 2:
            raise ValueError(
                f"blocks must be at least 1, warpgroups 1 to 4, stages 2 or more; got {self}"
            )


def _room(layout: Layout, config: Config) -> int:
    """Bytes of shared memory of a warp, for its stages and afterwards for its part of the
    result.
    """
    return max(config.stages * layout.stage, softmax.part_bytes(layout.D))


def smem_bytes(layout: Layout, config: Config, columns: int = 1) -> int:
    if columns > 1:
        return together.smem_bytes(layout, config.stages, columns, config.warpgroups)
    return 4 * config.warpgroups * _room(layout, config)


def unsupported(
    q: Any, keys: Any, values: Any, start: Any, stop: Any, recent: Any = None, sink: Any = None
) -> str | None:
    """The limit that these shapes exceed; None if there is a kernel for them. keys, values:
    (codes, scales).
    """
    *_, Q, D = q.shape
    if len(keys) != 2 or len(values) != 2:
        return (
            "the kernel attend_quantized takes codes of uniform levels; got those of a codebook"
        )
    S = keys[0].shape[2]
    if D not in (64, 128):
        return f"the kernel attend_quantized takes head sizes 64 and 128; got D={D}"
    if not 1 <= Q <= MAX_QUERIES:
        return (
            f"the kernel attend_quantized takes 1 to {MAX_QUERIES} queries a kv head; got {Q}"
        )
    bits = [codes.shape[3] * 8 / D for codes, _ in (keys, values)]
    if not all(b in (2, 4) for b in bits):
        return f"the kernel attend_quantized takes codes of 2 and 4 bits; got {bits[0]:g} and {bits[1]:g}"
    tokens, channels = groups_of(keys[1], S, D)
    sliced = groups_of(values[1], S, D)
    if not (tokens == 1 and channels % (D // 4) == 0) and not (
        channels == 1 and tokens <= MAX_GROUP
    ):
        return (
            f"the kernel attend_quantized takes keys in groups of up to {MAX_GROUP} tokens by 1 channel, or of "
            f"1 token by a multiple of {D // 4} channels; got {tokens} by {channels}"
        )
    if sliced[0] != 1 or sliced[1] % (D // 8):
        return (
            f"the kernel attend_quantized takes values in groups of 1 token by a multiple of {D // 8} channels; "
            f"got {sliced[0]} by {sliced[1]}"
        )
    if len(start.shape) != 1 or len(stop.shape) != 1:
        return f"the kernel attend_quantized takes one start and stop a row; got start{list(start.shape)}"
    if S * D >= 1 << 31:
        return f"the kernel attend_quantized takes rows of less than 2^31 / D tokens; got {S}"
    if recent is not None:
        if sink is not None:
            return "the kernel attend_quantized takes one exact zone; got a sink beside the recent one"
        if (steps := step_count(recent[3])) > MOST_STEPS:
            return f"the kernel attend_quantized takes 1 to {MOST_STEPS} steps at once; got {steps}"
        if str(q.dtype) not in KINDS:
            return (
                f"the kernel attend_quantized takes queries in f32, bf16 or f16; got {q.dtype}"
            )
        if any(a.dtype != jnp.bfloat16 for a in recent[:2]) or recent[0].shape[2] == 0:
            zone = f"{recent[0].dtype}{list(recent[0].shape)}"
            return f"the kernel attend_quantized takes an exact zone of keys and values in bf16; got {zone}"
    if 0 in q.shape:
        return f"the kernel attend_quantized takes at least one row; got q{list(q.shape)}"
    return None


@simt.lowered_once("scale", "part", "config")
def attend_quantized(
    q: Array,
    keys: tuple[Array, Array],
    values: tuple[Array, Array],
    start: Array,
    stop: Array,
    recent: tuple[Array, Array, Array, Array] | None = None,
    *,
    scale: float,
    part: bool = False,
    config: Config | None = None,
) -> Any:
    """(out f32[B, K, Q, D], lse f32[B, K, Q]) of q [B, K, Q, D] over slots [start, stop) i32[B]
    of codes of k and v.

    keys and values are (codes u8[B, K, S, D * bits / 8], scales u32[B, K, S / gs, D / gd]).
    With `recent`, exact keys and values bf16[B, K, R, D] and the start and stop i32[B] of those
    that are attended to, out [B, K, Q, D] of both in the dtype of q, or with `part` out and
    lse; of T steps the stop is i32[B, T], the start alike or [B, 1], and each has Q / T
    queries.
    """
    if limit := unsupported(q, keys, values, start, stop, recent):
        raise NotImplementedError(limit)
    B, K, Q, D = q.shape
    zone = (
        () if recent is None else (*(a.reshape(B * K, -1, D) for a in recent[:2]), *recent[2:])
    )
    flat = [a.reshape(B * K, *a.shape[2:]) for a in (*keys, *values)]
    dtype = None if recent is None or part else q.dtype
    queries = q.astype(jnp.bfloat16).reshape(B * K, Q, D)
    ends = (a.astype(jnp.int32) for a in (start, stop))
    groups, columns = softmax.columns_of(Q, together.MOST_COLUMNS)
    steps = 1 if recent is None else step_count(recent[3])
    if steps > 1:  # one column reads the same span for all of its queries
        columns = max(columns, 2)
    heads = -(-Q // (groups * columns))
    order = None
    if heads * groups * columns > Q:
        queries = jnp.pad(queries, ((0, 0), (0, heads * groups * columns - Q), (0, 0)))
    elif steps > 1 and dtype is not None:  # a model has them as [B, T, K, G, D]
        order = Order(K, steps, Q // steps)
        queries = jnp.swapaxes(queries.reshape(B, K, steps, -1, D), 1, 2)
    queries = queries.reshape(-1, heads, D)
    made = _attend(
        scale,
        dtype,
        Split(groups, columns, Q // steps, order),
        config,
        queries,
        *ends,
        *flat,
        *zone,
    )
    if order:
        return jnp.swapaxes(made[0].reshape(B, steps, K, -1, D), 1, 2).reshape(B, K, Q, D)
    whole = tuple(a.reshape(B, K, -1, *a.shape[2:])[:, :, :Q] for a in made)
    return whole if dtype is None else whole[0]


class Order(NamedTuple):
    """Queries in memory as [B, T, K, G, D]."""

    heads: int  # K
    steps: int  # T
    of_step: int  # G

    def place(self, row: Word, n: Word) -> Word:
        """The number in [B, T, K, G] of query n of T G, of row `row` of B K."""
        return simt.swapped_row(row * (self.steps * self.of_step) + n, *self)


class Split(NamedTuple):
    """How the queries of a KV head are split."""

    groups: int  # rows of the grid
    columns: int  # of each, which are rows of queries
    of_step: int  # queries of a step
    order: Order | None  # of queries and outputs in memory; None: as the rows


def _attend(
    scale: float, dtype: Any, split: Split, config: Config | None, *args: Array
) -> tuple[Array, ...]:
    """[rows, Q, D] in `dtype`; or, if it is None, f32[rows, Q, D] and f32[rows, Q]."""
    rows, Q, D = args[0].shape
    groups, columns, _, order = split
    layout = layout_of(D, args[3:5], args[5:7])
    target = simt.target(args)

    def limit(x: Config) -> str | None:
        needed = smem_bytes(layout, x, columns)
        return None if needed <= target.smem else f"{needed} bytes of shared memory"

    config = config or tuned.select(
        "attend_quantized",
        config_for(rows // columns, layout, target, columns),
        args,
        limit,
        rows=rows // columns,
        S=layout.S,
        D=D,
        Q=Q * columns,
        **dict(zip(("key_bits", "value_bits"), layout.bits, strict=True)),
        **dict(zip(("key_tokens", "key_channels"), layout.key_group, strict=True)),
        value_channels=layout.value_channels,
    )

    @simt.over_rows(functools.partial(_attend, scale, dtype, split, config))
    def run(*args: Array) -> tuple[Array, ...]:
        shared_by = rows // (groups * columns) // args[1].shape[0]
        recent = args[7].shape[1] if len(args) > 7 else 0
        steps = tuple(map(step_count, args[9:]))
        means, logs = simt.kernel(
            functools.partial(
                _program,
                heads=Q,
                shared_by=shared_by,
                recent=recent,
                steps=steps,
                split=split,
                layout=layout,
                scale=scale,
                config=config,
            ),
            name="kvjax_attend_quantized",
            out_type=(
                jax.ShapeDtypeStruct((rows, config.blocks, Q, D), jnp.float32),
                jax.ShapeDtypeStruct((rows, config.blocks, Q), jnp.float32),
            ),
            scratch=(smem_bytes(layout, config, columns) // 4,),
            blocks=rows // columns * config.blocks,
            warpgroups=config.warpgroups,
        )(*args)
        kind = jnp.float32 if dtype is None else dtype

        def place_of_head(i: Word, head: Word) -> Word:
            assert order is not None
            row = simt.divide(i, groups * columns)
            return order.place(row, (i - row * (groups * columns)) * Q + head)

        how: Any = {"place_of_head": place_of_head} if order else {}
        return softmax.merge_blocks(
            means, logs, kind, name="attend_quantized", lse=dtype is None, **how
        )

    return run(*args)


def config_for(
    rows: int, layout: Layout, target: simt.Target | None = None, columns: int = 1
) -> Config:
    """Blocks as large as registers and shared memory allow, and as many as take the least time,
    where a wave of blocks costs the turns of its warps and two more."""
    target = target or simt.target()
    sizes = ((3, 3), (3, 2), (2, 2), (1, 2))[columns == 1 :]
    fits = (x for x in sizes if smem_bytes(layout, Config(1, *x), columns) <= target.smem)
    warpgroups, stages = next(fits, sizes[-1])
    wide = columns > 1 and target.capability == "9.0"
    units = -(-layout.S // layout.unit)

    def turns(blocks: int) -> int:
        return -(-rows * blocks // target.multiprocessors) * (
            -(-units // (blocks * 4 * warpgroups)) + 2
        )

    return Config(
        min(range(1, target.multiprocessors + 1), key=turns), warpgroups, stages, wide
    )


def _program(
    q_m, start_m, stop_m, key_codes_m, key_scales_m, value_codes_m, value_scales_m, *refs,
    heads: int,
    shared_by: int,
    recent: int,  # slots of the exact zone
    steps: tuple[int, ...],  # of its start and stop
    split: Split,
    layout: Layout,
    scale: float,
    config: Config,
) -> None:  # fmt: skip
    *zone, out_m, lse_m, room_m = refs
    blocks = config.blocks
    D = layout.D
    unit = layout.unit
    tiles = layout.tiles
    by_channel = layout.by_channel
    warps = 4 * config.warpgroups
    t = simt.special("tid.x")
    block = simt.special("ctaid.x")
    lane = t & 31
    warp = t >> 5
    quad = lane >> 2
    col = lane & 3
    groups, columns, of_step, order = split
    of_queries = simt.divide(block, blocks)
    row = simt.divide(of_queries, groups)
    part = block - of_queries * blocks
    of_part = block
    if columns > 1:
        of_queries, of_part = (
            of_queries * columns,
            block + of_queries * ((columns - 1) * blocks),
        )
    q, out, lse = (
        simt.offset_rows(simt.global_address(m), n, heads * size)
        for m, n, size in (
            (q_m, of_queries, D * 2),
            (out_m, of_part, D * 4),
            (lse_m, of_part, 4),
        )
    )
    start, stop = simt.ends_of((start_m, shared_by), (stop_m, shared_by), row, layout.S)
    first = simt.divide(start, unit)
    units = simt.divide(stop + (unit - 1), unit)
    units = (units > first).select(units - first, 0)
    each = simt.divide(units + (blocks - 1), blocks)
    begin = part * each
    end = (begin + each < units).select(begin + each, units) + first
    begin = begin + first + warp if columns == 1 else begin + first
    room_bytes = _room(layout, config)
    room = simt.shared_address(room_m)
    room = room + warp * room_bytes if columns == 1 else room
    sources = key_codes_m, value_codes_m, value_scales_m, key_scales_m
    fetch = _fetcher(layout, lane, row, *sources, turn=together.turned if columns > 1 else None)
    sign = 1.0 if scale >= 0 else -1.0
    factor = (abs(scale) or 2.0**-99) / math.log(2)
    if columns > 1:
        group = of_queries - row * (groups * columns)

        def query(c: int, head: Word) -> Any:
            """The address of a query of column c."""
            if order is None:
                return simt.offset_rows(q, head + c * heads, 2 * D)
            n = (group + c) * heads + head
            return simt.offset_rows(simt.global_address(q_m), order.place(row, n), 2 * D)

        team = together.Together(
            layout, columns, heads, query, room, config.stages, config.warpgroups, config.wide
        )
        team.share(sign)
        state = team.attend(fetch, begin, end, (start, stop), factor * 2.0**LIFT, SLACK)
        if zone:
            exact = [
                simt.offset_rows(simt.global_address(m), row, recent * D * 2) for m in zone[:2]
            ]
            spans = softmax.Spans(
                tuple(zip(zone[2:], steps, strict=True)),
                simt.divide(row, shared_by),
                lane,
                recent,
            )
            own = group * heads + col * 2  # the first query of the lane

            def step_of(c: int, e: int) -> Word:
                return simt.divide(own + (c * heads + e), of_step)

            state = team.add_exact(
                state, exact, recent, spans, step_of, word(blocks - 1) - part, blocks, scale
            )
        team.write(state, out, lse, blocks * heads)
        return
    for i in range(config.stages - 1):
        with when(begin + i * warps < end):
            fetch(begin + i * warps, room + i * layout.stage)
        ptx("cp.async.commit_group;")
    queries = _queries(layout, q, heads, quad, col, sign)
    factor *= 2.0**LIFT if by_channel else 1.0
    mixing = Mixing(layout, lane)
    end_of_ring = room + (config.stages - 1) * layout.stage

    @loop(begin, end, warps, [room, end_of_ring, *mixing.nothing()])
    def carry(n: Word, at: Word, before: Word, *state: Word) -> list[Word]:
        ptx(f"cp.async.wait_group {config.stages - 2};")
        simt.warp_barrier()
        ahead = n + (config.stages - 1) * warps
        with when(ahead < end):
            fetch(ahead, before)
        ptx("cp.async.commit_group;")
        logs = _scores(layout, at, queries, quad, col)
        scales = mixing.scales(at)
        for r in range(unit // 8, 2 * tiles):  # rows of the last 16 keys that are past the unit
            for e in (2 * (r % 2), 2 * (r % 2) + 1):
                logs[r // 2][e] = (quad + 8 * r < unit).select(logs[r // 2][e], real(-math.inf))

        def counted() -> list[Word]:
            tokens = [n * unit + (quad + 8 * r) for r in range(2 * tiles)]
            exists = [(token >= start) & (token < stop) for token in tokens]
            kept = [
                f.select(x, 0) for f, words in zip(exists, scales, strict=True) for x in words
            ]
            return [*softmax.flat(softmax.masked(logs, lambda r, _: exists[r])), *kept]

        whole = [*softmax.flat(logs), *softmax.flat(scales)]
        words = iter(simt.branch((n * unit < start) | (n * unit + unit > stop), counted, whole))
        logs, scales = (
            [[next(words) for _ in four] for four in fours] for fours in (logs, scales)
        )
        kept, weights = softmax.exponentials(state, logs, factor=factor, lift=LIFT, slack=SLACK)
        mixed = mixing.add(softmax.parts(kept)[2], at, weights, scales)
        return [
            at.equals(end_of_ring).select(room, at + layout.stage),
            at,
            *kept[:4],
            *softmax.flat(mixed),
        ]

    ptx("cp.async.wait_group 0;")
    simt.warp_barrier()
    state = mixing.finish(carry[2:])
    if zone:  # its tiles go to warps that may have a unit less
        ends = simt.ends_of((zone[2], shared_by), (zone[3], shared_by), row, recent)
        job = (word(warps - 1) - warp) * blocks + (word(blocks - 1) - part)
        state = _exact(
            mixing,
            zone[:2],
            ends,
            q,
            heads,
            recent,
            row,
            job,
            warps * blocks,
            state,
            scale=scale,
        )
    softmax.store(room, state, heads, D, mixing.channel)
    simt.block_barrier()
    parts = [simt.shared_address(room_m) + w * room_bytes for w in range(warps)]
    loop(t, heads * D // 4, 32 * warps)(
        functools.partial(softmax.write_merged, parts, D, out, lse)
    )


def _fetcher(
    layout: Layout,
    lane: Word,
    row: Word,
    *refs: Any,
    turn: Callable[[Word, int], Word] | None = None,
) -> Callable[[Word, Word], None]:
    """fetch(unit, to) starts to copy a unit into a stage; bytes outside of the row or the unit
    become 0. The place of a chunk of 16 bytes of value codes is turn(chunk, bytes of a token),
    if given."""
    S = layout.S
    D = layout.D
    unit = layout.unit
    padded = 16 * layout.tiles
    jobs = []  # (address for this lane, bytes of a unit, of a token, of a chunk, place)
    for m, size, place in zip(refs, layout.per_token, layout.places, strict=True):
        if size:
            chunk = math.gcd(16, S * size, unit * size)
            jobs.append(
                (simt.offset_rows(simt.global_address(m), row, S * size), size, chunk, place)
            )
    if layout.by_channel:
        # The i-th of the D/16 chunks of a column of lanes goes to 4 i + col, so that columns
        # read from different banks.
        per = D // 16
        groups = simt.offset_rows(simt.global_address(refs[3]), row, S // unit * D * 4)
        swizzled = ((lane & (per - 1)) * 4 + simt.divide(lane, per)) * 16 + layout.places[3]

    def fetch(n: Word, to: Word) -> None:
        for address, size, chunk, place in jobs:
            cache = "cg" if chunk == 16 else "ca"
            copy = f"cp.async.{cache}.shared.global [$0+{{0}}], [$1+{{0}}], {chunk}, $2;"
            source = simt.offset(address, n * (unit * size) + lane * chunk)
            own = turn(lane, size) * 16 if turn and place == layout.places[1] else lane * chunk
            at = to + own + place
            valid = word(unit * size)
            if S % unit:
                left = (word(S) - n * unit) * size
                valid = (left < unit * size).select(left, unit * size)
            for done in range(0, padded * size, 32 * chunk):
                here = lane * chunk + done
                full = done + 32 * chunk <= unit * size and not S % unit
                with when(here < padded * size):
                    ptx(
                        copy.format(done),
                        at,
                        source,
                        chunk if full else (here < valid).select(chunk, 0),
                    )
        if layout.by_channel:
            with when(lane < D // 4):
                copy = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
                ptx(copy, to + swizzled, simt.offset(groups, n * (4 * D) + lane * 16), 16)

    return fetch


def _queries(
    layout: Layout, q: Any, heads: int, quad: Word, col: Word, sign: float
) -> list[Word]:
    """Right operands. A lane has D/4 adjacent channels, as `pairs_of`."""
    D = layout.D
    bits = layout.bits[0]
    mine = own_queries(q, heads, D, quad, col)
    found = []
    for low, high in pairs_of(layout):
        pair = prmt(mine[low // 2], mine[high // 2], 0x7632 if low % 2 else 0x5410)
        power = 2.0 ** (133 - LIFT - low % (8 // bits) * bits) if layout.by_channel else 1.0
        found.append(multiply(pair, pair_of(sign * power)))
    return found


def _scores(
    layout: Layout, at: Word, queries: list[Word], quad: Word, col: Word
) -> list[list[Word]]:
    """Sums of `mma` of 16 keys each: scores without scale, times 2^-LIFT where scales are by
    channel.
    """
    D = layout.D
    bits = layout.bits[0]
    width = layout.per_token[0]
    in_byte = 8 // bits
    pairs = pairs_of(layout)
    tiles = layout.tiles
    lane = at + (quad * width + col * (width // 4))
    rows = [load_words(lane + 8 * r * width, width // 16) for r in range(2 * tiles)]
    begin = [word(0)] * 4
    if layout.by_channel:
        shared = [
            w
            for i in range(D // 16)
            for w in load_words(at + layout.places[3] + col * 16 + i * 64, 4)
        ]
        steps, zeros = (
            [prmt(shared[a], shared[b], how) for a, b in pairs] for how in (0x5410, 0x7632)
        )
        scaled = [multiply(x, s) for x, s in zip(queries, steps, strict=True)]
        # By place, as the queries have their powers: the lower rows have products with zeros,
        # the upper ones the rounding errors of the products with scales, which are added back
        # times the centre of the codes.
        sums = [begin] * in_byte
        for n in range(0, len(pairs), 2):
            j = n // 2 % in_byte
            off = word(pair_of(-1.0))
            a = [zeros[n], steps[n], zeros[n + 1], steps[n + 1]]
            sums[j] = simt.mma("bf16", sums[j], a, queries[n : n + 2])
            sums[j] = simt.mma("bf16", sums[j], [word(0), off, word(0), off], scaled[n : n + 2])
        begin = []
        for e in range(2):
            places = [
                instr("fma.rn.f32", acc[e + 2], real(centre_of(bits)), acc[e]) for acc in sums
            ]
            total = functools.reduce(
                lambda a, b: instr("fma.rn.f32", a, real(2.0**bits), b), places[::-1]
            )
            begin.append(
                instr("mul.f32", instr("mul.f32", total, real(2.0**-64)), real(2.0**-69))
            )
        begin = begin * 2
        queries = scaled
    else:
        size = layout.per_token[3]
        slice_ = simt.divide(col * (D // 4), layout.key_group[1])
        lane = at + (quad * size + slice_ * 4)
        own = [
            load_words(lane + (layout.places[3] + 8 * r * size), 1)[0] for r in range(2 * tiles)
        ]
        affine = [affine_of(w, bits) for w in own]
    found = []
    for tile in range(tiles):
        near, far = rows[2 * tile : 2 * tile + 2]
        shifted = [[x >> 8 for x in words] for words in (near, far)]
        acc = begin
        for n in range(0, len(pairs), 2):
            w, j = divmod(n // 2, in_byte)
            if layout.by_channel:
                lanes = [
                    codes_at(x[w], s[w], j, bits)
                    for x, s in zip((near, far), shifted, strict=True)
                ]
            else:
                lanes = [
                    [decode(x[w], i, bits, *affine[2 * tile + r]) for i in (j, j + in_byte)]
                    for r, x in enumerate((near, far))
                ]
            acc = simt.mma(
                "bf16",
                acc,
                [x for two in zip(*lanes, strict=True) for x in two],
                queries[n : n + 2],
            )
        found.append(acc)
    return found


def _exact(
    mixing: Mixing, zone: Sequence[Any], ends: Sequence[Word], q: Any, heads: int, size: int, row: Word,
    first: Word, step: int, state: list[Word], *, scale: float,
) -> list[Word]:  # fmt: skip
    """Adds some of the exact keys and values of the span `ends` to the state, 16 at a time."""
    D = mixing.layout.D
    quad = mixing.quad
    col = mixing.lane & 3
    in_byte = mixing.in_byte
    keys, values = (simt.offset_rows(simt.global_address(m), row, size * D * 2) for m in zone)
    queries = own_queries(q, heads, D, quad, col)
    start, stop = ends

    @loop(simt.divide(start, 16) + first, simt.divide(stop + 15, 16), step, state)
    def carry(n: Word, *state: Word) -> list[Word]:
        def words(address: Any, token: Word, byte: Word, number: int) -> list[Word]:
            token = n * 16 + token
            return load_words(
                simt.offset(address, (token < size).select(token, size - 1) * (2 * D) + byte),
                number,
            )

        near, far = (words(keys, quad + 8 * r, col * (D // 2), D // 8) for r in range(2))
        # A lane has its channels of a block of values for tokens 2 col, 2 col + 1 and the two 8
        # further.
        blocks = range(D // mixing.block)
        tokens = [col * 2 + (i & 1) + 8 * (i >> 1) for i in range(4)]
        own = [
            [
                words(values, x, quad * (4 * in_byte) + 2 * mixing.block * m, in_byte)
                for m in blocks
            ]
            for x in tokens
        ]
        scores = [word(0)] * 4
        for i in range(0, D // 8, 2):
            scores = simt.mma(
                "bf16", scores, [near[i], far[i], near[i + 1], far[i + 1]], queries[i : i + 2]
            )

        def exists(r: int, _: int) -> Flag:
            token = n * 16 + (quad + 8 * r)
            return (token >= start) & (token < stop)

        kept, (right,) = softmax.weigh(
            state, [scores], exists, scale=softmax.Scale(scale), kind="bf16"
        )
        mixed = softmax.parts(kept)[2]
        for i, (m, j) in enumerate(mixing.products):
            mixed[i] = simt.mma("bf16", mixed[i], exact_operand(own, m, j, in_byte), right)
        return [*kept[:4], *softmax.flat(mixed)]

    return carry
