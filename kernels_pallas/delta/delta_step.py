"""A decode step of a gated delta net in one launch: the short convolution, the rule, and the new
token beside the state.

A block has a row, a value head and some columns of its state. Its threads ask for the state first,
then for the newest tokens, and make the query and the key meanwhile. Blocks read slots before the new
token and write its slot. Its number is written by the last block of the row to have read it: each
takes a ticket from the upper half of that word.

**Bytes:** the state once, 4 H Dk Dv a row, and the key of each newest token and what it wrote, 4
(Hk Dk + H Dv).

**Bound:** the rate of the memory: 1 us for 48 heads of 128 x 128, 6 for 8 rows.

**Limits:** `unsupported`. Evidence: `benchmarks/NOTES.md`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.simt import Word, instr, ptx, real, when, word

MEASURED: str | None = "2026-11-30"  # the date in benchmarks/results/delta_step.json
COLUMNS = 32, 64, 128  # of the state that a block may have
ROWS = 16  # of the state that the threads of a block read at once
NEWEST = 32  # tokens beside the state
LARGEST = 256  # channels of a key
LOG2E = math.log2(math.e)
TICKET = 1 << 16  # in the word of the tokens of a row, above their number


@dataclass(frozen=True)
class Config:
    columns: int = 64  # of the state, in a block

    def __post_init__(self) -> None:
        if self.columns not in COLUMNS:
            raise ValueError(f"columns must be 32, 64 or 128; got {self.columns}")


def config_for(value_dim: int) -> Config:
    return Config(64 if value_dim % 64 == 0 else 32)


class Sizes(NamedTuple):
    """The sizes of a call, and what follows from them."""

    columns: int

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    window: int  # tokens that the convolution sees
    wide: bool  # inputs are f32, else bf16
    wide_kernel: bool  # the same of the convolution's weights

    @property
    def threads(self) -> int:
        return 4 * self.columns

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return self.value_heads * (self.value_dim // self.columns)

    @property
    def quads(self) -> int:
        """Threads that have 16 bytes each of a row of the state."""
        return self.columns // 4

    @property
    def warps(self) -> int:
        return self.threads // 32

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def shared(self) -> int:
        """Value heads that share a key."""
        return self.value_heads // self.key_heads

    @property
    def kernel_bytes(self) -> int:
        return self.window * self.channels * (4 if self.wide_kernel else 2)


def smem_bytes(sizes: Sizes) -> int:
    return 4 * sum(_scratch(sizes))


def _scratch(sizes: Sizes) -> tuple[int, ...]:
    """Words for a query, a key and values, sums of warps, weights of the newest tokens, and sums of
    columns."""
    vectors = 2 * sizes.key_dim + sizes.columns
    return vectors, 3 * sizes.warps, 2 * NEWEST, 2 * sizes.warps * sizes.columns


def sizes_of(state: Any, inputs: Any, keys: Any, kernel: Any, config: Config) -> Sizes:
    _, heads, key_dim, value_dim = state.shape
    return Sizes(
        config.columns,
        keys.shape[2],
        heads,
        key_dim,
        value_dim,
        kernel.shape[0],
        inputs.dtype == jnp.float32,
        kernel.dtype == jnp.float32,
    )


def unsupported(state: Any, inputs: Any, keys: Any, new: Any, kernel: Any) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    rows, _, key_dim, value_dim = state.shape
    if new.shape[1] != 1:
        return f"the kernel delta_step takes one token a row; got {new.shape[1]}"
    kinds = (jnp.bfloat16, jnp.float32)
    if inputs.dtype not in kinds or new.dtype != inputs.dtype or kernel.dtype not in kinds:
        return (
            "the kernel delta_step takes inputs and weights in bfloat16 or float32; got "
            f"{new.dtype} after {inputs.dtype}, and {kernel.dtype}"
        )
    if key_dim % 64 or not 0 < key_dim <= LARGEST:
        return (
            f"the kernel delta_step takes keys of 64, 128, 192 or 256 channels; got {key_dim}"
        )
    if value_dim % COLUMNS[0] or not value_dim:
        return f"the kernel delta_step takes values of a multiple of {COLUMNS[0]} channels; got {value_dim}"
    if keys.shape[1] != NEWEST:
        return (
            f"the kernel delta_step takes {NEWEST} tokens beside the state; got {keys.shape[1]}"
        )
    return None if rows else "the kernel delta_step takes at least one row"


@simt.lowered_once("config")
def delta_step(
    state: Array, inputs: Array, keys: Array, written: Array, decays: Array, new: Array,
    decay: Array, rate: Array, kernel: Array, counts: Sequence[Array], due: Array,
    config: Config | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """(out, inputs, keys, written, decays, counts) of `kvjax.ops.delta_step` for one token a
    row."""
    if limit := unsupported(state, inputs, keys, new, kernel):
        raise NotImplementedError(limit)
    config = config or config_for(state.shape[3])
    tokens = new, decay, rate, due.astype(jnp.int32)
    out, *made = _step(
        config, inputs, keys, written, decays, *counts, state, *tokens, kernel[None]
    )
    return out[:, None], *made[:4], tuple(made[4:])


def _step(config: Config, *args: Array) -> tuple[Array, ...]:
    """`_launch`, with a grid of its own for a batched call, each with its own weights."""

    @simt.over_rows(functools.partial(_step, config))
    def run(*args: Array) -> tuple[Array, ...]:
        return _launch(config, *args)

    made: tuple[Array, ...] = run(*args)
    return made


def _launch(
    config: Config, inputs: Array, keys: Array, written: Array, decays: Array, held: Array,
    length: Array, overflow: Array, state: Array, new: Array, decay: Array, rate: Array,
    due: Array, kernels: Array,
) -> tuple[Array, ...]:  # fmt: skip
    """Arrays begin with the rows; kernels [n, W, C] are of n equal shares of them."""
    sizes = sizes_of(state, inputs, keys, kernels[0], config)
    B = state.shape[0]
    out = lax.empty((B, sizes.value_heads, sizes.value_dim), jnp.float32)
    return simt.kernel_in_place(
        functools.partial(_program, sizes=sizes, of_kernel=B // kernels.shape[0]),
        name="kvjax_delta_step",
        blocks=B * sizes.blocks,
        warpgroups=sizes.threads // 128,
        scratch=_scratch(sizes),
    )(
        (out, inputs, keys, written, decays, held, length, overflow),
        state,
        new,
        decay,
        rate,
        due,
        kernels,
    )


def _program(*refs: Any, sizes: Sizes, of_kernel: int) -> None:
    out, inputs, keys, written, decays, *given = map(simt.global_address, refs[:14])
    held, length, overflow, state, new, decay, rate, due, kernels = given
    vectors, sums_at, weights_at, columns_at = map(simt.shared_address, refs[14:])
    Dk, Dv, heads = sizes.key_dim, sizes.value_dim, sizes.value_heads
    t, block = simt.special("tid.x"), simt.special("ctaid.x")
    head_row = simt.divide(block, Dv // sizes.columns)  # of all rows
    first = (block - head_row * (Dv // sizes.columns)) * sizes.columns  # column
    row = simt.divide(head_row, heads)
    head = head_row - row * heads
    key_head = simt.divide(head, sizes.shared)
    quad, group = t & (sizes.quads - 1), simt.divide(t, sizes.quads)
    column = first + quad * 4  # of this thread's four

    # The state, of which nothing is needed before the query and the key are known.
    state_at = simt.offset(
        simt.offset_rows(state, head_row, 4 * Dk * Dv), (group * Dv + column) * 4
    )
    tile = [_load_state(_plus(state_at, i * ROWS * 4 * Dv)) for i in range(Dk // ROWS)]

    counts = _Counts(sizes, row, held, length, overflow)
    slots = counts.held()
    is_due = simt.load(simt.offset_rows(due, row, 4)).differs(0)
    takes = is_due & (slots < NEWEST)
    own_decay = simt.load(simt.offset_rows(decay, head_row, 4))
    own_rate = simt.load(simt.offset_rows(rate, head_row, 4))
    decays_at = simt.offset(simt.offset_rows(decays, row, 4 * NEWEST * heads), head * 4)
    before = _load_if(slots.differs(0), simt.offset(decays_at, (slots - 1) * (4 * heads)))
    total = instr("add.f32", before, own_decay)

    # The newest tokens. Some threads share a token's key, and have 16 bytes of it in turn.
    sharing = sizes.threads // NEWEST
    slot, share = simt.divide(t, sharing), t & (sharing - 1)
    here = slot < slots
    keys_at = simt.offset_rows(keys, row * NEWEST + slot, 4 * sizes.key_heads * Dk)
    keys_at = simt.offset(keys_at, key_head * (4 * Dk) + share * 16)
    token = [
        _load_four(here, _plus(keys_at, i * sharing * 16)) for i in range(Dk // (4 * sharing))
    ]
    gone = _load_if(here, simt.offset(decays_at, slot * (4 * heads)))
    left = here.select(_exp(instr("sub.f32", total, gone)), 0)
    others = []  # what each wrote
    for i in range(NEWEST // ROWS):
        other = group + i * ROWS
        at = simt.offset_rows(written, row * NEWEST + other, 4 * heads * Dv)
        at = simt.offset(at, (head * Dv + column) * 4)
        others.append(_load_four(other < slots, at))

    # The query, the key and the values of this block after the convolution.
    weights = simt.offset_rows(kernels, simt.divide(row, of_kernel), sizes.kernel_bytes)
    convolution = _Convolution(sizes, inputs, new, weights, row, slots)
    makes_key = first.equals(0) & head.equals(key_head * sizes.shared)
    size = 2 * Dk + sizes.columns
    for begin in range(0, size, sizes.threads):
        item = t + begin
        of_value = item >= 2 * Dk
        channel = (item < Dk).select(item, item + (sizes.key_heads - 1) * Dk) + key_head * Dk
        value = item + (2 * (sizes.key_heads - 1) * Dk) + head * Dv + first
        channel = of_value.select(value, channel)
        with when(item < size):
            newest, result = convolution(channel)
            simt.store_shared(vectors + item * 4, result)
            keeps = (makes_key.select(1, 0) | of_value.select(1, 0)).differs(0)
            with when(takes & keeps):
                convolution.keep(channel, newest)
    simt.block_barrier()
    ticket = counts.ticket(t.equals(0))  # all threads of this block have read the number

    # Squares of the query and of the key, and their product.
    squares = [word(0)] * 3
    for begin in range(0, Dk, sizes.threads):
        inside = t + begin < Dk
        at = vectors + inside.select(t + begin, 0) * 4
        q, k = (inside.select(simt.load_shared(at + 4 * i * Dk), 0) for i in range(2))
        for i, (x, y) in enumerate(((q, q), (k, k), (q, k))):
            squares[i] = instr("fma.rn.f32", x, y, squares[i])
    squares = [_over_lanes(x, (1, 2, 4, 8, 16)) for x in squares]
    with when((t & 31).equals(0)):
        for i, x in enumerate(squares):
            simt.store_shared(sums_at + ((t >> 5) + i * sizes.warps) * 4, x)

    # How much each newest token counts for the query and the key, before these are normalised.
    gaps = [gap for gap in (1, 2, 4, 8) if gap < sharing]
    alike = [_dot(token, vectors + (share * 16 + 4 * i * Dk), 16 * sharing) for i in range(2)]
    alike = [_over_lanes(x, gaps) for x in alike]
    with when(share.equals(0)):
        for i, x in enumerate(alike):
            at = weights_at + (slot + i * NEWEST) * 4
            simt.store_shared(at, instr("mul.f32", x, left))

    # Sums over the rows of the state of four columns: of the query, then of the key.
    sums = [word(0)] * 8
    for i, four in enumerate(tile):
        for n in range(2):
            factor = simt.load_shared(vectors + (group + (i * ROWS + n * Dk)) * 4)
            sums[4 * n : 4 * n + 4] = _add_four(sums[4 * n : 4 * n + 4], factor, four)
    kept = _exp(total)
    sums = [instr("mul.f32", x, kept) for x in sums]
    simt.block_barrier()

    # Then over the newest tokens.
    for i, four in enumerate(others):
        for n in range(2):
            factor = simt.load_shared(weights_at + (group + (i * ROWS + n * NEWEST)) * 4)
            sums[4 * n : 4 * n + 4] = _add_four(sums[4 * n : 4 * n + 4], factor, four)
    sums = [_over_lanes(x, [gap for gap in (8, 16) if gap >= sizes.quads]) for x in sums]
    with when((t & 31) < sizes.quads):
        for n in range(2):
            to = columns_at + (((t >> 5) + n * sizes.warps) * sizes.columns + quad * 4) * 4
            simt.store_shared(to, *sums[4 * n : 4 * n + 4])
    norms = [_sum_of(sums_at + 4 * i * sizes.warps, sizes.warps, 4) for i in range(3)]
    of_q, of_k = (
        instr("rsqrt.approx.ftz.f32", instr("add.f32", x, real(1e-6))) for x in norms[:2]
    )
    of_q = instr("mul.f32", of_q, real(Dk**-0.5))
    own = instr("mul.f32", norms[2], instr("mul.f32", of_q, of_k))  # of the new token itself
    simt.block_barrier()

    with when(t < sizes.columns):
        read, predicted = (
            _sum_of(
                columns_at + t * 4 + 4 * n * sizes.warps * sizes.columns,
                sizes.warps,
                4 * sizes.columns,
            )
            for n in range(2)
        )
        value = simt.load_shared(vectors + t * 4 + 8 * Dk)
        error = instr("sub.f32", value, instr("mul.f32", predicted, of_k))
        mine = instr("mul.f32", own_rate, error)
        result = instr("fma.rn.f32", own, mine, instr("mul.f32", read, of_q))
        to = simt.offset(simt.offset_rows(out, head_row, 4 * Dv), (first + t) * 4)
        ptx("st.global.u32 [$0], $1;", to, result)
        with when(takes):
            to = simt.offset_rows(written, row * NEWEST + slots, 4 * heads * Dv)
            ptx("st.global.u32 [$0], $1;", simt.offset(to, (head * Dv + first + t) * 4), mine)
    with when(takes & first.equals(0) & t.equals(0)):
        ptx("st.global.u32 [$0], $1;", simt.offset(decays_at, slots * (4 * heads)), total)
    for begin in range(0, Dk, sizes.threads):
        channel = t + begin
        with when(takes & makes_key & (channel < Dk)):
            k = instr("mul.f32", simt.load_shared(vectors + (channel + Dk) * 4), of_k)
            to = simt.offset_rows(keys, row * NEWEST + slots, 4 * sizes.key_heads * Dk)
            to = simt.offset(to, (key_head * Dk + channel) * 4)
            ptx("st.global.u32 [$0], $1;", to, k)
    with when(t.equals(0) & ticket.equals(sizes.blocks - 1)):
        counts.add(is_due, takes)


class _Counts:
    """A row's numbers of tokens, which the last of its blocks changes."""

    def __init__(self, sizes: Sizes, row: Word, held: Any, length: Any, overflow: Any):
        self.blocks = sizes.blocks
        self.held_at = simt.offset_rows(held, row, 4)
        self.length_at = simt.offset_rows(length, row, 4)
        self.overflow_at = simt.offset(overflow, row)

    def held(self) -> Word:
        """The tokens beside the state, whichever blocks have taken their tickets.

        No write but tickets comes before this block's own, so the lower half may come from L1,
        and only one thread of a multiprocessor has to ask L2.
        """
        code = "ld.relaxed.cta.global.u32 $0, [$1];"
        both: Word = ptx(code, self.held_at, results=1)
        return simt.clipped(both & (TICKET - 1), NEWEST)

    def ticket(self, taker: simt.Flag) -> Word:
        """How many of the row's blocks took one before, where `taker` is true; else 0."""
        code = (
            "{ .reg .pred p; setp.ne.u32 p, $1, 0; mov.u32 $0, 0; "
            "@p atom.relaxed.gpu.global.add.u32 $0, [$2], $3; }"
        )
        both: Word = ptx(code, taker.select(1, 0), self.held_at, TICKET, results=1)
        return both >> 16

    def add(self, is_due: simt.Flag, takes: simt.Flag) -> None:
        """Counts a row's token, or that it was dropped, and puts the tickets back."""
        token = takes.select(1, 0)
        code = "red.relaxed.gpu.global.add.u32 [$0], $1;"
        ptx(code, self.held_at, token - self.blocks * TICKET)
        ptx(code, self.length_at, token)  # a sum of a load would have to wait for it
        with when(is_due & token.equals(0)):
            ptx("st.global.u8 [$0], $1;", self.overflow_at, word(1))


class _Convolution:
    """The short convolution of a row's new token, and silu of it."""

    def __init__(
        self, sizes: Sizes, inputs: Any, new: Any, kernel: Any, row: Word, slots: Word
    ):
        self.sizes, self.kernel = sizes, kernel
        size = sizes.channels * (4 if sizes.wide else 2)  # bytes of a token
        before = sizes.window - 1
        rows = [row * (before + NEWEST) + slots + i for i in range(before + 1)]
        *self.held, self.place = (simt.offset_rows(inputs, i, size) for i in rows)
        self.new = simt.offset_rows(new, row, size)

    def __call__(self, channel: Word) -> tuple[Word, Word]:
        """A channel's new input, and the result, f32 that is rounded as the inputs are."""
        sizes = self.sizes
        values = [_number(at, channel, sizes.wide) for at in self.held]
        newest = _number(self.new, channel, sizes.wide, constant=True)
        weights = [
            _number(self.kernel, channel + i * sizes.channels, sizes.wide_kernel, constant=True)
            for i in range(sizes.window)
        ]
        total = word(0)
        for x, weight in zip([*values, newest], weights, strict=True):
            total = instr("fma.rn.f32", x, weight, total)
        mixed = self._rounded(total)
        power = _exp(instr("neg.f32", mixed))
        sigmoid = instr("rcp.approx.ftz.f32", instr("add.f32", power, real(1.0)))
        return newest, self._rounded(instr("mul.f32", mixed, sigmoid))

    def keep(self, channel: Word, newest: Word) -> None:
        """Stores a new input in its slot."""
        if self.sizes.wide:
            ptx("st.global.u32 [$0], $1;", simt.offset(self.place, channel * 4), newest)
        else:
            ptx("st.global.u16 [$0], $1;", simt.offset(self.place, channel * 2), newest >> 16)

    def _rounded(self, x: Word) -> Word:
        return x if self.sizes.wide else instr("cvt.rn.bf16x2.f32", x, 0) & 0xFFFF0000


def _number(at: Any, i: Word, wide: bool, *, constant: bool = False) -> Word:
    """The number i of an array of f32, or of bf16 as f32; `constant` if the kernel writes to no
    part of the array."""
    how = "global.nc" if constant else "global"
    if wide:
        return ptx(f"ld.{how}.u32 $0, [$1];", simt.offset(at, i * 4), results=1)
    return ptx(f"ld.{how}.u16 $0, [$1];", simt.offset(at, i * 2), results=1) << 16


def _plus(at: Any, byte: int) -> Any:
    return simt.offset(at, word(byte)) if byte else at


def _load_state(at: Any) -> list[Word]:
    words: list[Word] = ptx("ld.global.nc.v4.u32 {$0, $1, $2, $3}, [$4];", at, results=4)
    return words


def _load_if(flag: simt.Flag, at: Any) -> Word:
    """A word of an array that the kernel writes to, or 0, and then nothing is read."""
    code = "{ .reg .pred p; setp.ne.u32 p, $1, 0; mov.u32 $0, 0; @p ld.global.u32 $0, [$2]; }"
    return ptx(code, flag.select(1, 0), at, results=1)


def _load_four(flag: simt.Flag, at: Any) -> list[Word]:
    """As `_load_if`, four adjacent words."""
    code = (
        "{ .reg .pred p; setp.ne.u32 p, $4, 0; mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; "
        "@p ld.global.v4.u32 {$0, $1, $2, $3}, [$5]; }"
    )
    words: list[Word] = ptx(code, flag.select(1, 0), at, results=4)
    return words


def _exp(x: Word) -> Word:
    return instr("ex2.approx.ftz.f32", instr("mul.f32", x, real(LOG2E)))


def _over_lanes(x: Word, gaps: Sequence[int]) -> Word:
    """The sum of x over lanes that differ in the bits `gaps`; all of them get it."""
    for gap in gaps:
        x = instr("add.f32", x, simt.bfly(x, gap))
    return x


def _add_four(sums: Sequence[Word], factor: Word, four: Sequence[Word]) -> list[Word]:
    return [instr("fma.rn.f32", factor, x, old) for x, old in zip(four, sums, strict=True)]


def _dot(token: Sequence[Sequence[Word]], at: Word, step: int) -> Word:
    """The product of a thread's part of a key, 16 bytes of each `step`, with a vector in shared
    memory."""
    total = word(0)
    for i, four in enumerate(token):
        for x, y in zip(four, simt.load_shared(at + step * i, 4), strict=True):
            total = instr("fma.rn.f32", x, y, total)
    return total


def _sum_of(at: Word, many: int, step: int) -> Word:
    """The sum of f32 in shared memory, `step` bytes apart."""
    total = simt.load_shared(at)
    for i in range(1, many):
        total = instr("add.f32", total, simt.load_shared(at + i * step))
    return total
