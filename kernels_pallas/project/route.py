"""The norm of a token's row, a router's logits, and the experts with the largest of them, in one launch.

XLA makes five kernels of it, none of which moves half a megabyte. Here a cluster of blocks shares the experts: each
block norms the row by itself, its warps make a logit at a time, and one block ranks all logits. A thread has one
expert, whose place is the number of those before it.

**Bytes:** 2 in E.

**Bound:** latency: of a load, of a norm, of a cluster's barriers.

**Limits:** `unsupported`. Evidence: `benchmarks/NOTES.md`.
"""

from __future__ import annotations

import math
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.project.project import CHUNK, norm_row, of_bf16
from kvjax.kernels_pallas.simt import Word, instr, loop, ptx, real, when, word

MEASURED: str | None = None  # the date in benchmarks/results/project.json
BLOCKS = 8  # of the cluster
WARPGROUPS = 2
THREADS = 128 * WARPGROUPS
MOST = 32  # experts of a token


def smem_bytes(size: int = 4096) -> int:
    return 4 * sum(_scratch(size))


def _scratch(size: int) -> tuple[int, ...]:
    """Words: the row, sums of squares of warps, logits, and the best logits."""
    return -(-size // 256) * 256, THREADS // 32, THREADS, MOST


def unsupported(x: Any, kernel: Any, k: int, normalised: bool) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    if any(a.dtype != jnp.bfloat16 for a in (x, kernel)):
        return f"the kernel route takes bfloat16; got {x.dtype} and {kernel.dtype}"
    if not normalised:
        return "the kernel route takes weights that are shares of the chosen experts: normalised=True"
    if x.shape[0] % CHUNK:
        return f"the kernel route takes a multiple of {CHUNK} channels; got {x.shape[0]}"
    if not k <= kernel.shape[0] <= THREADS or k > MOST or kernel.shape[0] % 4:
        return f"the kernel route takes up to {THREADS} experts, in fours, and {MOST} of a token; got {kernel.shape[0]}"
    if not (target := simt.target((x,))).clusters:
        return f"the kernel route needs clusters of blocks, which {target.kind} has not"
    return None


@simt.lowered_once("k", "eps", "offset", "normalised")
def route(
    x: Array,
    scale: Array,
    kernel: Array,
    bias: Array | None,
    k: int,
    *,
    eps: float,
    offset: bool,
    normalised: bool = True,
) -> tuple[Array, Array, Array]:
    """(the normed row [in], shares f32[k], experts i32[k]) of the row x [in] and a router's `kernel` [E, in].

    The row is normed as by `project`. Experts are those with the k largest logits, in order, equal ones by number; a
    share is an expert's in the softmax over these.
    """
    if limit := unsupported(x, kernel, k, normalised):
        raise NotImplementedError(limit)
    (E, size), given = kernel.shape, () if bias is None else (bias,)
    program = partial(_program, size=size, experts=E, k=k, biased=bias is not None, eps=eps, offset=offset)

    @jax.custom_batching.sequential_vmap
    def call(*args: Array) -> tuple[Array, Array, Array]:
        out: tuple[Array, Array, Array] = simt.kernel(
            program,
            name="kvjax_route",
            out_type=(
                jax.ShapeDtypeStruct((size,), jnp.bfloat16),
                jax.ShapeDtypeStruct((k,), jnp.float32),
                jax.ShapeDtypeStruct((k,), jnp.int32),
            ),
            blocks=1,
            cluster=BLOCKS,
            warpgroups=WARPGROUPS,
            scratch=_scratch(size),
        )(*args)
        return out

    made: tuple[Array, Array, Array] = call(x, scale, kernel, *given)
    return made


def _program(*refs: Any, size: int, experts: int, k: int, biased: bool, eps: float, offset: bool) -> None:
    x, scale, kernel, *bias, row_m, share_m, chosen_m = (simt.global_address(m) for m in refs[:-4])
    row_s, squares_s, logits_s, best_s = (simt.shared_address(m) for m in refs[-4:])
    simt.cluster_arrive("relaxed")  # until it has begun, a block's shared memory may not be written
    t, rank, steps = simt.special("tid.x"), simt.part(), -(-size // 256)
    lane, warps = t & 31, BLOCKS * THREADS // 32
    mine = [rank * (THREADS // 32) + (t >> 5) + warps * n for n in range(-(-experts // warps))]

    def fetch(expert: Word) -> list[list[Word]]:
        own = simt.offset_rows(kernel, (expert < experts).select(expert, 0), 2 * size)
        places = [lane + 32 * i for i in range(steps)]
        return [simt.load_below(j, size // CHUNK, simt.offset(own, j * 16), words=4) for j in places]

    ahead = fetch(mine[0])
    words = norm_row(x, scale, size, steps * 256, row_s, squares_s, THREADS, eps=eps, offset=offset)
    with when(rank.equals(BLOCKS - 1)):  # the last block has the fewest experts
        for i, two in enumerate(words):
            place = t + i * THREADS
            with when(place < size // 2):
                ptx("st.global.u32 [$0], $1;", simt.offset(row_m, place * 4), two)
    simt.cluster_wait()
    for n, expert in enumerate(mine):
        total = word(0)
        for i, chunk in enumerate(ahead if n == 0 else fetch(expert)):
            at = row_s + (lane + 32 * i) * 32
            factors = [*simt.load_shared(at, 4), *simt.load_shared(at + 16, 4)]
            for j, value in enumerate(v for two in chunk for v in of_bf16(two)):
                total = instr("fma.rn.f32", value, factors[j], total)
        for gap in (1, 2, 4, 8, 16):
            total = instr("add.f32", total, simt.bfly(total, gap))
        with when(lane.equals(0) & (expert < experts)):
            if biased:
                half = ptx("ld.global.nc.u16 $0, [$1];", simt.offset(bias[0], expert * 2), results=1)
                total = instr("add.f32", total, half << 16)
            simt.store_remote(simt.remote(logits_s + expert * 4, 0), total)
    simt.cluster_barrier()

    with when(rank.equals(0)):
        own = simt.load_shared(logits_s + (t < experts).select(t, 0) * 4)
        key = _ordered(own)

        @loop(0, experts, 4, [word(0)])
        def before(j: Word, count: Word) -> Word:
            for i, other in enumerate(simt.load_shared(logits_s + j * 4, 4)):
                other = _ordered(other)
                count = count + ((other > key) | (other.equals(key) & (j + i < t))).select(1, 0)
            return count

        place = before[0]
        with when((t < experts) & (place < k)):
            simt.store_shared(best_s + place * 4, own)
            ptx("st.global.u32 [$0], $1;", simt.offset(chosen_m, place * 4), t)
        simt.block_barrier()
        with when(t < k):
            best = [simt.load_shared(best_s + 4 * i) for i in range(k)]

            def power(x: Word) -> Word:
                above = instr("mul.f32", instr("sub.f32", x, best[0]), real(1 / math.log(2)))
                return instr("ex2.approx.ftz.f32", above)

            total = reduce(partial(instr, "add.f32"), map(power, best))
            share = instr("div.rn.f32", power(simt.load_shared(best_s + t * 4)), total)
            ptx("st.global.u32 [$0], $1;", simt.offset(share_m, t * 4), share)


def _ordered(x: Word) -> Word:
    """An unsigned word that is the larger, the larger the f32 x is; 0 and -0 are equal."""
    x = instr("add.f32", x, real(0.0))
    return (x < 1 << 31).select(x | (1 << 31), x ^ 0xFFFFFFFF)
