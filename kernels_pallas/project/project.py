"""A row times kernels [in, out], after an RMSNorm of the row and before a bias and a residual, in one launch.

XLA makes three to five of it: the sum of squares, the normed row, the product (split over `in`), and the sum of its
parts with the residual. Here a block has `columns` columns of a kernel, and each of its threads 16 bytes of a row of
the kernel at a time; the first are on their way while the block norms the row, which it keeps in shared memory in f32.
A thread has `unroll` loads in flight until the last row. Sums are f32; the normed row and each result are rounded to 16
bits where the reference rounds them.

**Bytes:** those of the kernels; each block also reads the row.

**Bound:** memory.

**Limits:** `unsupported`. Evidence: `benchmarks/NOTES.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.simt import Word, instr, loop, ptx, real, when, word

MEASURED: str | None = None  # the date in benchmarks/results/project.json
CHUNK = 8  # columns: 16 bytes


@dataclass(frozen=True)
class Config:
    columns: int = 32  # of a block
    warpgroups: int = 4  # of a block
    unroll: int = 8  # loads of a thread in flight

    def __post_init__(self) -> None:
        if self.columns not in (16, 32, 64, 128) or self.warpgroups not in (1, 2, 4, 8) or not 1 <= self.unroll <= 16:
            raise ValueError(f"columns 16 to 128, warpgroups 1 to 8 and unroll 1 to 16 make a block; got {self}")

    @property
    def rows(self) -> int:
        """Rows of a kernel that a block reads at a time."""
        return 128 * self.warpgroups * CHUNK // self.columns

    def padded(self, size: int) -> int:
        """`size` rows in whole turns of `unroll` loads."""
        turn = self.rows * self.unroll
        return -(-size // turn) * turn

    def scratch(self, size: int) -> tuple[int, int, int]:
        """Words: the row, a sum of squares for each warp, and the sums of each warp."""
        return self.padded(size), 4 * self.warpgroups, 4 * self.warpgroups * self.columns


def config_for(columns: int, target: simt.Target) -> Config:
    """Large blocks, one a multiprocessor, if there are no more of them than that; else two smaller ones."""
    large = Config()
    return large if columns // large.columns <= target.multiprocessors else Config(warpgroups=2)


def smem_bytes(size: int = 4096, config: Config | None = None) -> int:
    return 4 * sum((config or Config()).scratch(size))


def unsupported(x: Any, kernels: Sequence[Any], config: Config | None = None) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    config = config or Config()
    if any(a.dtype != jnp.bfloat16 for a in (x, *kernels)):
        return f"the kernel project takes bfloat16; got {', '.join(str(a.dtype) for a in (x, *kernels))}"
    if x.shape[0] % 2:
        return f"the kernel project takes an even number of channels; got {x.shape[0]}"
    if odd := [a.shape[1] for a in kernels if a.shape[1] % config.columns]:
        return f"the kernel project takes kernels of a multiple of {config.columns} columns; got {odd[0]}"
    if (smem := smem_bytes(x.shape[0], config)) > (most := simt.target((x,)).smem):
        return f"the kernel project keeps the row in shared memory, {smem} bytes for {x.shape[0]}; there are {most}"
    return None


@simt.lowered_once("eps", "offset", "config")
def project(
    x: Array, kernels: Sequence[Array], biases: Sequence[Array], scale: Array | None, residual: Array | None,
    *, eps: float, offset: bool, config: Config | None = None,
) -> Array:  # fmt: skip
    """The row x [in] times each of `kernels` [in, out], one after the other: [sum of out].

    With `scale` [in] the row is first normed: over the root of its mean square plus `eps`, times scale, or 1 + scale
    with `offset`. `biases` [out], none or one for each kernel, and `residual` [sum of out] are added.
    """
    widths = tuple(a.shape[1] for a in kernels)
    config = config or config_for(sum(widths), simt.target((x,)))
    if limit := unsupported(x, kernels, config):
        raise NotImplementedError(limit)
    extra = tuple(a for a in (scale, residual) if a is not None)
    how: dict[str, Any] = {
        "widths": widths,
        "biased": bool(biases),
        "normed": scale is not None,
        "added": residual is not None,
    }
    run = partial(_program, size=x.shape[0], eps=eps, offset=offset, config=config, **how)

    @jax.custom_batching.sequential_vmap  # a model takes several rows at once as a product of matrices
    def call(x: Array, *rest: Array) -> Array:
        return simt.kernel(
            run,
            name="kvjax_project",
            out_type=jax.ShapeDtypeStruct((sum(widths),), jnp.bfloat16),
            blocks=sum(widths) // config.columns,
            warpgroups=config.warpgroups,
            scratch=config.scratch(x.shape[0]),
        )(x, *rest)

    made: Array = call(x, *extra, *kernels, *biases)
    return made


def _program(
    *refs: Any, size: int, widths: tuple[int, ...], normed: bool, added: bool, biased: bool, eps: float, offset: bool,
    config: Config,
) -> None:  # fmt: skip
    *given, out = (simt.global_address(m) for m in refs[:-3])
    row_s, squares_s, sums_s = (simt.shared_address(m) for m in refs[-3:])
    x, *given = given
    scale = given.pop(0) if normed else None
    residual = given.pop(0) if added else None
    t, block, threads = simt.special("tid.x"), simt.special("ctaid.x"), 128 * config.warpgroups
    lanes = config.columns // CHUNK  # that share a row of a kernel
    lane, first_row = t & (lanes - 1), simt.divide(t, lanes)

    kernel, bias, stride, column = given[0], given[len(widths)] if biased else None, word(2 * widths[0]), block
    for i in range(1, len(widths)):
        start = sum(widths[:i]) // config.columns
        here = block >= start
        kernel = simt.select_address(here, given[i], kernel)
        bias = simt.select_address(here, given[len(widths) + i], bias) if biased else None
        stride, column = here.select(2 * widths[i], stride), here.select(block - start, column)
    own = simt.offset(kernel, column * (2 * config.columns) + lane * 16)

    def fetch(row: Word) -> list[Word]:
        words: list[Word] = simt.load_below(row, size, simt.offset(own, row * stride), words=4)
        return words

    ahead = [w for u in range(config.unroll) for w in fetch(first_row + u * config.rows)]
    norm_row(x, scale, size, config.padded(size), row_s, squares_s, threads, eps=eps, offset=offset)

    turn = config.unroll * config.rows

    @loop(0, config.padded(size), turn, [*[word(0)] * CHUNK, *ahead])
    def sums(start: Word, *carry: Word) -> list[Word]:
        acc, words = list(carry[:CHUNK]), list(carry[CHUNK:])
        rows = [start + first_row + u * config.rows for u in range(config.unroll)]
        factors = [simt.load_shared(row_s + row * 4) for row in rows]
        for u, (row, factor) in enumerate(zip(rows, factors, strict=True)):
            for j, two in enumerate(words[4 * u : 4 * u + 4]):
                for n, value in enumerate(of_bf16(two)):
                    acc[2 * j + n] = instr("fma.rn.f32", value, factor, acc[2 * j + n])
            words[4 * u : 4 * u + 4] = fetch(row + turn)
        return [*acc, *words]

    acc = sums[:CHUNK]
    gap = lanes
    while gap < 32:
        acc = [instr("add.f32", a, simt.bfly(a, gap)) for a in acc]
        gap *= 2
    warps = 4 * config.warpgroups
    with when((t & 31) < lanes):
        at = sums_s + ((t >> 5) * config.columns + lane * CHUNK) * 4
        simt.store_shared(at, *acc[:4])
        simt.store_shared(at + 16, *acc[4:])
    simt.block_barrier()
    with when(t < config.columns // 2):
        pairs = [simt.load_shared(sums_s + t * 8 + 4 * config.columns * warp, 2) for warp in range(warps)]
        low, high = (reduce(partial(instr, "add.f32"), side) for side in zip(*pairs, strict=True))
        result = rounded(low, high)
        at = t * 4
        if bias is not None:
            result = sum_bf16(result, simt.load(simt.offset(bias, column * (2 * config.columns) + at)))
        at = at + block * (2 * config.columns)
        if residual is not None:
            result = sum_bf16(result, simt.load(simt.offset(residual, at)))
        ptx("st.global.u32 [$0], $1;", simt.offset(out, at), result)


def norm_row(
    x: Any, scale: Any, size: int, padded: int, row_s: Word, squares_s: Word, threads: int, *, eps: float, offset: bool
) -> list[Word]:
    """The row at x, of `size` bf16, in shared memory in f32, with zeros up to `padded`; over its root mean square and
    times the scale at `scale` if there is one. Returns this thread's words of two bf16: t, t + threads, ... Ends with a
    barrier."""
    t = simt.special("tid.x")
    places = [t + i * threads for i in range(-(-padded // (2 * threads)))]
    words = [simt.load_below(j, size // 2, simt.offset(x, j * 4)) for j in places]
    if scale is not None:
        total = word(0)
        for two in words:
            for value in of_bf16(two):
                total = instr("fma.rn.f32", value, value, total)
        for gap in (1, 2, 4, 8, 16):
            total = instr("add.f32", total, simt.bfly(total, gap))
        with when((t & 31).equals(0)):
            simt.store_shared(squares_s + (t >> 5) * 4, total)
        factors = [simt.load_below(j, size // 2, simt.offset(scale, j * 4)) for j in places]
        simt.block_barrier()
        parts = [w for i in range(0, threads // 32, 4) for w in simt.load_shared(squares_s + 4 * i, 4)]
        mean = instr("fma.rn.f32", reduce(partial(instr, "add.f32"), parts), real(1 / size), real(eps))
        over = instr("rsqrt.approx.f32", mean)
        for i, (two, factor) in enumerate(zip(words, factors, strict=True)):
            by = [instr("add.f32", f, real(1.0)) for f in of_bf16(factor)] if offset else of_bf16(factor)
            words[i] = rounded(
                *(instr("mul.f32", instr("mul.f32", a, over), b) for a, b in zip(of_bf16(two), by, strict=True))
            )
    for j, two in zip(places, words, strict=True):
        with when(j < padded // 2):
            simt.store_shared(row_s + j * 8, *of_bf16(two))
    simt.block_barrier()
    return words


def of_bf16(two: Word) -> list[Word]:
    """The two bf16 numbers of a word, in f32."""
    return [two << 16, two & 0xFFFF0000]


def rounded(low: Word, high: Word) -> Word:
    return instr("cvt.rn.bf16x2.f32", high, low)


def sum_bf16(a: Word, b: Word) -> Word:
    return rounded(*(instr("add.f32", *two) for two in zip(of_bf16(a), of_bf16(b), strict=True)))
