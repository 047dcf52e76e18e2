"""The gated delta rule over a prompt in chunks of 64 tokens, in two launches.

Within a chunk, corrections depend on the state S before it by a product alone: with T the inverse of
the triangular system of `kvjax.ops.delta_rule` they are W - R S, W = T (rate v) and R = T (rate
exp(total) k).

1. `_chunks`, all at once, a block a head's chunk: products of keys by `mma`, T by substitution in
   f32, then W, R, and the products of queries and keys.
2. `_states`, chunks in turn, a block a head and 32 or 64 columns of its state, which stay in
   registers.

Operands between both are in the order in which lanes hold them, in bf16; sums are f32.

**Bytes:** 48 KB read, 40 written and read again and 32 written a head's chunk, 32 written a key head's.

**Limits:** `unsupported`. Evidence: `benchmarks/NOTES.md`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.simt import Word, instr, loop, ptx, real, when, word

MEASURED: str | None = "2026-11-30"  # the date in benchmarks/results/delta_step.json
CHUNK = 64  # tokens
SIZE = 128  # channels of keys and of values
THREADS = 128  # of a block that prepares a chunk
HALF = SIZE // 2  # channels of the state that a warp has
COLUMNS = 32, 64  # of the state that a block may have
SEGMENT = 16384  # tokens of all rows whose operands are in memory at once
LOG2E = math.log2(math.e)

# Words of the operands of a chunk.
ROWS_OF = CHUNK * SIZE // 2  # keys, queries, W or R
SEEN = CHUNK * CHUNK // 2
OF_HEAD = 2 * ROWS_OF + SEEN  # W, R and seen
OF_KEY = 2 * ROWS_OF  # queries and keys
STAGE = OF_KEY + ROWS_OF + SEEN + 2 * CHUNK  # words of a chunk in shared memory, W is not
OF_PAIR = (SIZE + 2 * CHUNK) // 16 * 128  # words that two warps show each other
PITCH = CHUNK + 4  # words between columns of the inverse
# Operands are in units of 16 bytes a lane. The place of each in its array, in units:
UNIT_WORDS = 4 * 32
AT_KEYS = ROWS_OF // UNIT_WORDS  # after the queries
AT_R = ROWS_OF // UNIT_WORDS  # after W
AT_SEEN = 2 * ROWS_OF // UNIT_WORDS


@dataclass(frozen=True)
class Config:
    columns: int = 64  # of the state, in a block

    def __post_init__(self) -> None:
        if self.columns not in COLUMNS:
            raise ValueError(f"columns must be 32 or 64; got {self.columns}")

    @property
    def pairs(self) -> int:
        """Pairs of warps of a block: each has 16 columns."""
        return self.columns // 16

    @property
    def threads(self) -> int:
        return 64 * self.pairs


def config_for(heads: int, target: simt.Target) -> Config:
    """As many blocks for the heads of all rows as run at once: fewer columns a block read the
    operands of the chunks more often."""
    at_once = heads * (SIZE // 32) <= target.multiprocessors
    return Config(32 if at_once else 64)


class Sizes(NamedTuple):
    """The sizes of a call."""

    key_heads: int
    value_heads: int
    chunks: int  # of a row

    @property
    def shared(self) -> int:
        """Value heads that share a key."""
        return self.value_heads // self.key_heads


def smem_bytes(config: Config = Config()) -> int:
    return 4 * max(sum(_scratch_of_chunks()), sum(_scratch_of_states(config)))


def _scratch_of_chunks() -> tuple[int, ...]:
    """Words for keys, queries and values, the system and its inverse, and of each token its
    total decay, rate and their factors."""
    return *(ROWS_OF,) * 3, CHUNK * PITCH, 4 * CHUNK


def _scratch_of_states(config: Config) -> tuple[int, int]:
    """Words for two chunks, and what the warps show each other."""
    return 2 * STAGE, config.pairs * OF_PAIR


def unsupported(q: Any, v: Any, state: Any, dtype: Any) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"the kernel delta_rule multiplies in bfloat16; got {jnp.dtype(dtype)}"
    if q.shape[-1] != SIZE or v.shape[-1] != SIZE:
        return f"the kernel delta_rule takes heads of {SIZE} channels; got {q.shape[-1]} and {v.shape[-1]}"
    if 0 in q.shape or 0 in v.shape:
        return "the kernel delta_rule takes at least one row and token"
    if (needed := smem_bytes()) > (most := simt.target((q,)).smem):
        return f"the kernel delta_rule needs {needed} bytes of shared memory, and a block has {most}"
    return None


def delta_rule(
    q: Array, k: Array, v: Array, decay: Array, rate: Array, state: Array, dtype: Any,
    config: Config | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """(out, state) of `kvjax.ops.delta_rule`."""
    if limit := unsupported(q, v, state, dtype):
        raise NotImplementedError(limit)
    B, T = q.shape[:2]
    config = config or config_for(B * v.shape[2], simt.target((q, k, v)))
    chunks = -(-T // CHUNK)
    at_once = max(1, min(chunks, SEGMENT // (B * CHUNK)))
    segments = -(-chunks // at_once)

    def padded(x: Array) -> Array:
        behind = segments * at_once * CHUNK - T
        return jnp.pad(x, ((0, 0), (0, behind), *((0, 0),) * (x.ndim - 2)))

    narrow = [padded(x.astype(jnp.bfloat16)) for x in (q, k, v)]
    args = [*narrow, padded(decay), padded(rate)]
    if segments == 1:
        out, state = _segment(config, *args, state)
        return out[:, :T], state

    def split(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(B, segments, -1, *x.shape[2:]), 1, 0)

    def one(state: Array, tokens: list[Array]) -> tuple[Array, Array]:
        out, state = _segment(config, *tokens, state)
        return state, out

    state, out = lax.scan(one, state, list(map(split, args)))
    return jnp.moveaxis(out, 0, 1).reshape(B, -1, *v.shape[2:])[:, :T], state


@simt.lowered_once("config")
def _segment(config: Config, *args: Array) -> tuple[Array, Array]:
    """`delta_rule` of whole chunks, q, k and v in bf16."""
    out, state = _run(config, *args)
    return out, state


def _run(config: Config, *args: Array) -> tuple[Array, ...]:
    """`_launch`, with a grid of its own for a batched call."""

    @simt.over_rows(functools.partial(_run, config))
    def run(*args: Array) -> tuple[Array, ...]:
        return _launch(config, *args)

    made: tuple[Array, ...] = run(*args)
    return made


def _launch(
    config: Config, q: Array, k: Array, v: Array, decay: Array, rate: Array, state: Array
) -> tuple[Array, Array]:
    B, T, heads, _ = v.shape
    sizes = Sizes(k.shape[2], heads, T // CHUNK)
    chunks = B * sizes.chunks
    u32, f32 = (functools.partial(jax.ShapeDtypeStruct, dtype=x) for x in ("uint32", "float32"))
    operands = simt.kernel(
        functools.partial(_chunks, sizes=sizes),
        name="kvjax_delta_rule_chunks",
        out_type=(
            u32((chunks * heads, OF_HEAD)),
            f32((chunks * heads, 2 * CHUNK)),
            u32((chunks * sizes.key_heads, OF_KEY)),
        ),
        blocks=chunks * heads,
        warpgroups=1,
        scratch=_scratch_of_chunks(),
    )(q, k, v, decay, rate)
    out, state = simt.kernel(
        functools.partial(_states, sizes=sizes, config=config),
        name="kvjax_delta_rule_states",
        out_type=(f32((B, T, heads, SIZE)), f32((B, heads, SIZE, SIZE))),
        blocks=B * heads * (SIZE // config.columns),
        warpgroups=config.threads // 128,
        scratch=_scratch_of_states(config),
    )(*operands, state)
    return out, state


# ------------------------------------------------------------------------------ all chunks at once


def _chunks(*refs: Any, sizes: Sizes) -> None:
    q, k, v, decay, rate, of_head, factors, of_key = map(simt.global_address, refs[:8])
    keys, queries, values, system, numbers = map(simt.shared_address, refs[8:])
    t, block = simt.special("tid.x"), simt.special("ctaid.x")
    lane, warp = t & 31, t >> 5
    # A block is a head of a chunk; heads that share keys are adjacent, so that L2 has these.
    chunk = simt.divide(block, sizes.value_heads)  # of all rows
    head = block - chunk * sizes.value_heads
    key_head = simt.divide(head, sizes.shared)
    for source, to, heads, own in (
        (k, keys, sizes.key_heads, key_head),
        (q, queries, sizes.key_heads, key_head),
        (v, values, sizes.value_heads, head),
    ):
        _copy_rows(source, to, chunk * (CHUNK * heads) + own, heads, t)
    ptx("cp.async.commit_group;")

    totals, rates, starts, lefts = (numbers + 4 * CHUNK * i for i in range(4))
    with when(t < CHUNK):
        of_token = (chunk * CHUNK + t) * sizes.value_heads + head
        for source, to in ((decay, lefts), (rate, rates)):
            simt.store_shared(to + t * 4, simt.load(simt.offset_rows(source, of_token, 4)))
    simt.block_barrier()
    with when(t < CHUNK):  # the sum of decays up to a token
        total = word(0)
        for j in range(0, CHUNK, 4):
            for n, x in enumerate(simt.load_shared(lefts + 4 * j, 4)):
                total = instr("add.f32", total, (t >= j + n).select(x, 0))
        simt.store_shared(totals + t * 4, total)
        simt.store_shared(starts + t * 4, _exp(total))
    simt.block_barrier()
    with when(t < CHUNK):
        own_total = simt.load_shared(totals + t * 4)
        last = simt.load_shared(totals + 4 * (CHUNK - 1))
        until = _exp(instr("sub.f32", last, own_total))
        to = simt.offset_rows(factors, block, 8 * CHUNK)
        for i, x in enumerate((simt.load_shared(starts + t * 4), until)):
            ptx("st.global.u32 [$0], $1;", simt.offset(to, (t + i * CHUNK) * 4), x)
    ptx("cp.async.wait_group 0;")
    simt.block_barrier()

    head_at = simt.offset(simt.offset_rows(of_head, block, 4 * OF_HEAD), lane * 16)
    key_at = simt.offset_rows(of_key, chunk * sizes.key_heads + key_head, 4 * OF_KEY)
    key_at = simt.offset(key_at, lane * 16)
    is_first = head.equals(key_head * sizes.shared)
    tiles = _Tiles(lane)

    # Products of this warp's 16 keys and queries with all keys.
    alike = [[word(0)] * 4 for _ in range(CHUNK // 8)]
    seen = [[word(0)] * 4 for _ in range(CHUNK // 8)]
    for s in range(SIZE // 16):
        own_keys = tiles.load(keys, warp * 16, word(s))
        own_queries = tiles.load(queries, warp * 16, word(s))
        with when(is_first):
            _store_four(key_at, word(4 * s) + warp, _swapped(own_queries))
        for p in range(CHUNK // 16):
            tile_of_keys = tiles.load(keys, word(16 * p), word(s))
            for n in range(2):
                both = tile_of_keys[n::2]
                alike[2 * p + n] = simt.mma("bf16", alike[2 * p + n], own_keys, both)
                seen[2 * p + n] = simt.mma("bf16", seen[2 * p + n], own_queries, both)

    # Times the decay between both tokens. A lane has rows quad and quad + 8 of this warp's, and
    # columns 2 col and 2 col + 1 of each eight.
    quad, col = lane >> 2, lane & 3
    rows = [warp * 16 + quad + 8 * i for i in range(2)]
    of_rows = [[simt.load_shared(at + row * 4) for at in (totals, rates)] for row in rows]
    for n in range(CHUNK // 8):
        first = col * 2 + 8 * n
        of_columns = simt.load_shared(totals + first * 4, 2)
        for e in range(4):
            row, (own_total, own_rate) = rows[e // 2], of_rows[e // 2]
            column = first + e % 2
            between = _exp(instr("sub.f32", own_total, of_columns[e % 2]))
            seen[n][e] = (row >= column).select(instr("mul.f32", seen[n][e], between), 0)
            entry = instr("mul.f32", instr("mul.f32", alike[n][e], between), own_rate)
            to = system + (column * PITCH + row) * 4  # by column, as a thread reads it
            simt.store_shared(to, (row > column).select(entry, 0))
    for s in range(CHUNK // 16):
        _store_four(head_at, warp + (AT_SEEN + 4 * s), _pairs(seen[2 * s], seen[2 * s + 1]))
    simt.block_barrier()

    with when(t < CHUNK):
        _invert(system, t)
    simt.block_barrier()

    # R of this warp's 16 tokens.
    inverse = _Inverse(system, rates, starts, lane)
    left = [inverse.rows(warp * 16, s) for s in range(CHUNK // 16)]
    for d in range(SIZE // 16):
        sums = [[word(0)] * 4 for _ in range(2)]
        for s in range(CHUNK // 16):
            four = tiles.load(keys, word(16 * s), word(d), turned=True)
            for n in range(2):
                sums[n] = simt.mma("bf16", sums[n], left[s], four[2 * n : 2 * n + 2])
            with when(is_first & warp.equals(s)):
                _store_four(key_at, word(AT_KEYS + 8 * s + d), four)
        _store_four(head_at, warp + (AT_R + 4 * d), _pairs(*sums))

    # W, transposed, of this warp's 32 channels.
    right = [[inverse.columns(8 * n, s) for s in range(CHUNK // 16)] for n in range(CHUNK // 8)]
    for m in range(2):
        tile = warp * 2 + m
        turned = [
            _swapped(tiles.load(values, word(16 * s), tile, turned=True))
            for s in range(CHUNK // 16)
        ]
        words = []
        for n in range(CHUNK // 8):
            acc = [word(0)] * 4
            for s in range(CHUNK // 16):
                acc = simt.mma("bf16", acc, turned[s], right[n][s])
            words += [_pair(*acc[:2]), _pair(*acc[2:])]
        for j in range(4):
            _store_four(head_at, tile * 4 + j, words[4 * j : 4 * j + 4])


def _copy_rows(source: Any, to: Word, first: Word, step: int, t: Word) -> None:
    """Copies a chunk's tokens, of which `first` is the first one's row of `source`, and others
    are `step` further each. In shared memory the 16 bytes j of a token are in place j ^ (token &
    7), so that 8 tokens of a column of these are in different banks."""
    each = 2 * SIZE // 16
    for i in range(CHUNK * each // THREADS):
        token = (t >> 4) + i * (THREADS // each)
        j = t & (each - 1)
        at = simt.offset(simt.offset_rows(source, first + token * step, 2 * SIZE), j * 16)
        place = to + token * (2 * SIZE) + ((j ^ (token & 7)) << 4)
        ptx("cp.async.cg.shared.global [$0], [$1], 16, $2;", place, at, word(16))


class _Tiles:
    """Tiles of 16 tokens x 16 channels of a chunk in shared memory, as `mma` takes them."""

    def __init__(self, lane: Word):
        # Lanes 8 i .. 8 i + 7 give the addresses of tokens 8 (i & 1) .. and channels 8 (i >> 1) ..
        self.token = (lane & 7) + (lane & 8)
        self.flip = (lane >> 4) ^ (lane & 7)

    def load(self, at: Word, token: Word, part: Word, *, turned: bool = False) -> list[Word]:
        """Four words of the tile of 16 tokens from `token` on and channels 16 `part` ..: of both
        eights of tokens and the lower channels, then of the upper ones. A word has two adjacent
        channels of a token, or with `turned` two adjacent tokens of a channel."""
        how = ".trans" if turned else ""
        place = at + (token + self.token) * (2 * SIZE) + (((part << 1) ^ self.flip) << 4)
        code = f"ldmatrix.sync.aligned.m8n8.x4{how}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
        words: list[Word] = ptx(code, place, results=4, convergent=True)
        return words


def _invert(system: Word, t: Word) -> None:
    """Puts the inverse of I + A in the place of A, below the diagonal: thread t has column t of
    it. Once an entry is known, it leaves those below."""
    own = [t.equals(i).select(real(1.0), 0) for i in range(CHUNK)]
    for j in range(CHUNK - 1):
        minus = instr("neg.f32", own[j])
        for i in range((j + 1) // 4 * 4, CHUNK, 4):
            four = simt.load_shared(system + 4 * (j * PITCH + i), 4)
            for n, x in enumerate(four):
                if i + n > j:
                    own[i + n] = instr("fma.rn.f32", x, minus, own[i + n])
    simt.barrier_of(word(1), CHUNK)  # all have read the system
    for i in range(0, CHUNK, 4):
        simt.store_shared(system + (t * PITCH + i) * 4, *own[i : i + 4])


class _Inverse:
    """The inverse T in shared memory, by column, as operands of `mma`."""

    def __init__(self, system: Word, rates: Word, starts: Word, lane: Word):
        self.system, self.quad, self.col = system, lane >> 2, lane & 3
        self.rates, self.starts = rates, starts

    def rows(self, first: Word, s: int) -> list[Word]:
        """16 rows from `first` on of T diag(rate exp(total)), columns 16 s ..: a left operand."""
        found = []
        for half in range(2):
            columns = [self.col * 2 + (16 * s + 8 * half + n) for n in range(2)]
            factors = [
                instr(
                    "mul.f32",
                    simt.load_shared(self.rates + column * 4),
                    simt.load_shared(self.starts + column * 4),
                )
                for column in columns
            ]
            for i in range(2):
                row = first + self.quad + 8 * i
                found.append(_pair(*self._entries(row, columns, factors)))
        return found

    def columns(self, first: int, s: int) -> list[Word]:
        """8 columns from `first` on of diag(rate) T^T, rows 16 s ..: a right operand."""
        found = []
        for half in range(2):
            columns = [self.col * 2 + (16 * s + 8 * half + n) for n in range(2)]
            factors = [simt.load_shared(self.rates + column * 4) for column in columns]
            found.append(_pair(*self._entries(self.quad + first, columns, factors)))
        return found

    def _entries(
        self, row: Word, columns: Sequence[Word], factors: Sequence[Word]
    ) -> list[Word]:
        at = [self.system + (column * PITCH + row) * 4 for column in columns]
        return [
            instr("mul.f32", simt.load_shared(place), factor)
            for place, factor in zip(at, factors, strict=True)
        ]


# --------------------------------------------------------------------------------- chunks in turn
#
# Two warps have 16 columns of the state, transposed, half of its channels each, so that sums of one
# product are the left operand of the next: S^T R^T gives the corrections, S^T Q^T and the
# corrections the outputs, and the corrections with K the next state. Each of the two computes half
# of the chunk's tokens, and then its channels of the next state; they show each other their halves
# of the state and of the corrections in shared memory. The next chunk is copied meanwhile.


def _states(*refs: Any, sizes: Sizes, config: Config) -> None:
    of_head, factors, of_key, state, out, last = map(simt.global_address, refs[:6])
    shared, room = map(simt.shared_address, refs[6:])
    t, block = simt.special("tid.x"), simt.special("ctaid.x")
    lane, warp = t & 31, t >> 5
    quad, col = lane >> 2, lane & 3
    half, pair = warp & 1, warp >> 1
    parts = SIZE // config.columns
    head_row = simt.divide(block, parts)  # of all rows
    tile = (block - head_row * parts) * config.pairs + pair  # 16 columns of the state
    row = simt.divide(head_row, sizes.value_heads)
    head = head_row - row * sizes.value_heads
    key_head = simt.divide(head, sizes.shared)
    halves = _Halves(room, config, pair, half, lane)

    def copy(i: Word) -> None:
        """Copies the operands of chunk i that all warps need."""
        chunk = row * sizes.chunks + i
        own = chunk * sizes.value_heads + head
        to = shared + (i & 1) * (4 * STAGE) + t * 16
        keys_at = simt.offset_rows(of_key, chunk * sizes.key_heads + key_head, 4 * OF_KEY)
        head_at = simt.offset_rows(of_head, own, 4 * OF_HEAD)
        _copy(simt.offset(keys_at, t * 16), to, OF_KEY, config.threads)
        _copy(
            simt.offset(head_at, t * 16 + 4 * ROWS_OF),
            to + 4 * OF_KEY,
            ROWS_OF + SEEN,
            config.threads,
        )
        with when(t < 2 * CHUNK // 4):
            at = simt.offset(simt.offset_rows(factors, own, 8 * CHUNK), t * 16)
            _copy_16(at, to + 4 * (STAGE - 2 * CHUNK))
        ptx("cp.async.commit_group;")

    # The state transposed: rows are columns quad and quad + 8 of the 16, and columns are channels
    # 2 col and 2 col + 1 of each eight of this warp's half.
    channel = [tile * 16 + quad + 8 * i for i in range(2)]
    first = half * HALF + col * 2
    place = [
        [(first + (8 * m + e % 2)) * SIZE + channel[e // 2] for e in range(4)]
        for m in range(HALF // 8)
    ]
    state_at, last_at = (simt.offset_rows(x, head_row, 4 * SIZE * SIZE) for x in (state, last))
    begin = [simt.load(simt.offset(state_at, at * 4)) for four in place for at in four]
    copy(word(0))
    halves.store_state(begin)

    @loop(0, sizes.chunks, 1, carry=begin)
    def end(i: Word, *held: Word) -> list[Word]:
        ptx("cp.async.wait_group 0;")
        simt.block_barrier()
        with when(i + 1 < sizes.chunks):
            copy(i + 1)
        own = (row * sizes.chunks + i) * sizes.value_heads + head
        unit = tile * (CHUNK // 16) + half * (CHUNK // 32)
        head_at = simt.offset(simt.offset_rows(of_head, own, 4 * OF_HEAD), lane * 16)
        head_at = simt.offset(head_at, unit * (4 * UNIT_WORDS))
        solved = [_load_four(head_at, j) for j in range(CHUNK // 32)]
        stage = shared + (i & 1) * (4 * STAGE)
        operands = stage + lane * 16
        of_tokens = operands + half * (CHUNK // 32 * 4 * UNIT_WORDS)
        of_channels = operands + half * (HALF // 16 * 4 * UNIT_WORDS)
        factors_at = stage + 4 * (STAGE - 2 * CHUNK) + (half * (CHUNK // 2) + col * 2) * 4

        def factor(n: int, of: int) -> list[Word]:
            """The decays of tokens 8 n + 2 col and the next of this warp's, from the chunk's
            start, or to its end."""
            found: list[Word] = simt.load_shared(factors_at + (32 * n + 4 * CHUNK * of), 2)
            return found

        # The corrections W - R S and q S of this warp's tokens, in 16 columns.
        left = halves.load_state()
        both = _products(
            of_tokens, [OF_KEY // UNIT_WORDS, OF_KEY // UNIT_WORDS + 1, 0, 1], 4, left
        )
        read, seen = both[: CHUNK // 16], both[CHUNK // 16 :]
        new = []
        for n, four in enumerate(read):
            words = solved[n // 2][n % 2 * 2 : n % 2 * 2 + 2]
            wanted = (
                words[0] << 16,
                words[0] & 0xFFFF0000,
                words[1] << 16,
                words[1] & 0xFFFF0000,
            )
            new.append([instr("sub.f32", x, y) for x, y in zip(wanted, four, strict=True)])
        halves.store_corrections(0, new)
        until = [factor(n, 1) for n in range(CHUNK // 16)]
        halves.store_corrections(
            1,
            [
                [instr("mul.f32", x, until[n][e % 2]) for e, x in enumerate(four)]
                for n, four in enumerate(new)
            ],
        )
        halves.meet()

        # This warp's half of the state at the end of the chunk.
        whole = simt.load_shared(stage + 4 * (STAGE - CHUNK - 1))
        sums = [
            [instr("mul.f32", x, whole) for x in held[4 * m : 4 * m + 4]]
            for m in range(HALF // 8)
        ]
        units = [AT_KEYS + p for p in range(HALF // 16)]
        sums = _products(of_channels, units, 8, halves.load_corrections(1), sums)
        after = [x for four in sums for x in four]
        halves.store_state(after)

        # The outputs of this warp's tokens.
        for n, four in enumerate(seen):
            since = factor(n, 0)
            seen[n] = [instr("mul.f32", x, since[e % 2]) for e, x in enumerate(four)]
        at_seen = (OF_KEY + ROWS_OF) // UNIT_WORDS
        units = [at_seen + p for p in range(CHUNK // 32)]
        seen = _products(of_tokens, units, 4, halves.load_corrections(0), seen)
        begins = (row * sizes.chunks + i) * CHUNK + half * (CHUNK // 2) + col * 2
        for n, four in enumerate(seen):
            for e, x in enumerate(four):
                token = begins + (8 * n + e % 2)
                to = simt.offset_rows(out, token * sizes.value_heads + head, 4 * SIZE)
                ptx("st.global.u32 [$0], $1;", simt.offset(to, channel[e // 2] * 4), x)
        return after

    for x, at in zip(end, (at for four in place for at in four), strict=True):
        ptx("st.global.u32 [$0], $1;", simt.offset(last_at, at * 4), x)


class _Halves:
    """The parts that two warps of 16 columns show each other in shared memory: the state as left
    operands of 16 channels each, then the corrections as those of 16 tokens each, of both kinds.
    """

    def __init__(self, room: Word, config: Config, pair: Word, half: Word, lane: Word):
        self.pair = pair
        at = room + pair * (4 * OF_PAIR) + lane * 16
        self.state = at
        self.own_state = at + half * (HALF // 16 * 4 * UNIT_WORDS)
        self.corrections = at + 4 * (SIZE // 16) * UNIT_WORDS
        self.own_corrections = self.corrections + half * (CHUNK // 32 * 4 * UNIT_WORDS)

    def meet(self) -> None:
        """A barrier of both warps."""
        simt.barrier_of(self.pair + 1, 64)

    def store_state(self, sums: Sequence[Word]) -> None:
        for s in range(HALF // 16):
            lower, upper = sums[8 * s : 8 * s + 4], sums[8 * s + 4 : 8 * s + 8]
            simt.store_shared(self.own_state + 4 * UNIT_WORDS * s, *_left(lower, upper))

    def load_state(self) -> list[list[Word]]:
        return [simt.load_shared(self.state + 4 * UNIT_WORDS * s, 4) for s in range(SIZE // 16)]

    def store_corrections(self, kind: int, new: Sequence[Sequence[Word]]) -> None:
        for s in range(CHUNK // 32):
            at = self.own_corrections + 4 * UNIT_WORDS * (kind * (CHUNK // 16) + s)
            simt.store_shared(at, *_left(new[2 * s], new[2 * s + 1]))

    def load_corrections(self, kind: int) -> list[list[Word]]:
        first = self.corrections + 4 * UNIT_WORDS * kind * (CHUNK // 16)
        return [simt.load_shared(first + 4 * UNIT_WORDS * s, 4) for s in range(CHUNK // 16)]


def _copy(source: Any, to: Word, words: int, threads: int) -> None:
    """Copies adjacent words, 16 bytes a thread at once."""
    for i in range(words // (4 * threads)):
        at = simt.offset(source, word(16 * threads * i)) if i else source
        _copy_16(at, to + 16 * threads * i)


def _copy_16(source: Any, to: Word) -> None:
    ptx("cp.async.cg.shared.global [$0], [$1], 16, $2;", to, source, word(16))


def _products(
    operands: Word,
    units: Sequence[int],
    step: int,
    left: Sequence[Sequence[Word]],
    sums: Sequence[Sequence[Word]] = (),
) -> list[list[Word]]:
    """Two tiles of sums for each of `units`: the left operands times right ones in shared
    memory, of which the first is in that unit, and each further one `step` units later. The
    tiles take turns, because a sum waits for the one before."""
    found = [list(x) for x in sums] or [[word(0)] * 4 for _ in range(2 * len(units))]
    for s, own in enumerate(left):
        for i, unit in enumerate(units):
            four = simt.load_shared(operands + 4 * UNIT_WORDS * (unit + step * s), 4)
            for n in range(2):
                right = four[2 * n : 2 * n + 2]
                found[2 * i + n] = simt.mma("bf16", found[2 * i + n], own, right)
    return found


# --------------------------------------------------------------------------------------- operands


def _pair(low: Word, high: Word) -> Word:
    """Two numbers as bf16."""
    return instr("cvt.rn.bf16x2.f32", high, low)


def _pairs(lower: Sequence[Word], upper: Sequence[Word]) -> list[Word]:
    """Two adjacent tiles of sums, of 16 rows and 16 columns, as right operands whose columns are
    these rows: of the first 8 rows, then of the others."""
    return [
        _pair(*tile[2 * half : 2 * half + 2]) for half in range(2) for tile in (lower, upper)
    ]


def _left(lower: Sequence[Word], upper: Sequence[Word]) -> list[Word]:
    """Two adjacent tiles of sums as the left operand with the same rows and columns."""
    return [
        _pair(*tile[2 * half : 2 * half + 2]) for tile in (lower, upper) for half in range(2)
    ]


def _swapped(four: Sequence[Word]) -> list[Word]:
    """A left operand as two right ones whose columns are its rows; and a tile that was loaded
    turned as a left operand."""
    a, b, c, d = four
    return [a, c, b, d]


def _store_four(base: Any, unit: Word, words: Sequence[Word]) -> None:
    """Stores this lane's words of a unit."""
    at = simt.offset(base, unit * (4 * UNIT_WORDS))
    ptx("st.global.v4.u32 [$0], {$1, $2, $3, $4};", at, *words)


def _load_four(base: Any, unit: int) -> list[Word]:
    at = simt.offset(base, word(4 * UNIT_WORDS * unit))
    words: list[Word] = ptx("ld.global.nc.v4.u32 {$0, $1, $2, $3}, [$4];", at, results=4)
    return words


def _exp(x: Word) -> Word:
    return instr("ex2.approx.ftz.f32", instr("mul.f32", x, real(LOG2E)))
