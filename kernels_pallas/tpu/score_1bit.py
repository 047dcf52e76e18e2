"""Scores of 1-bit keys on a TPU: the product of each query head of a group with every key.

score = sum_d q_d (zero_d - step_d) + sum_d (q_d step_d) 2 bit_d. A TPU keeps the codes of 128
tokens side by side, as a matrix [D, 128] of bits. It is multiplied with the queries times the
steps of its four groups, and each token keeps the rows of its own group.

Bit 14 alone in a bf16 is the number 2, so a shift and a mask make 8 rows of two bf16 from a
word. A product with zeros and ones puts queries and steps in their order.

**Bytes:** D/8 + 4 D/32 read and 4 G written a key and KV head.

**Bound:** on a v5e, operations of registers; `benchmarks/results/tpu.json` has the bundles.

**Limits:** queries, and queries times steps, are rounded to bf16; see `unsupported`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.kernels_pallas.tpu.tiles import HEADS, LANES, product

GROUP = 32  # tokens that share a step and a zero
PART = LANES * GROUP  # tokens that are scored at once: as many groups as lanes
PARTS = 4  # of a step of the grid, as fewer and larger copies take less
WORD = 32  # channels
TWOS = 0x40004000  # the bits that alone are the number 2, in both halves of a word


def unsupported(q: Any, bits: Any, step: Any) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    *_, G, D = q.shape
    S = bits.shape[2]
    groups = step.shape[2]
    if D % LANES or D == 0:
        return f"the TPU's kernel score_1bit takes head sizes that 128 divides; got D={D}"
    if not 1 <= G <= HEADS:
        return (
            f"the TPU's kernel score_1bit takes 1 to {HEADS} query heads a kv head; got G={G}"
        )
    if groups * GROUP != S:
        return f"the TPU's kernel score_1bit takes groups of {GROUP} tokens; got {S} tokens in {groups} groups"
    if S < PART or S % LANES:
        return f"the TPU's kernel score_1bit takes {PART} tokens or more, in tiles of {LANES}; got {S}"
    if step.dtype != jnp.dtype(jnp.bfloat16):
        return f"the TPU's kernel score_1bit takes scales in bf16; got {step.dtype}"
    return None


def score_1bit(
    q: Array, bits: Array, step: Array, zero: Array, *, interpret: Any = False
) -> Array:
    """f32[B, K, G, S]: q.k~ of q [B, K, G, D], keys of bits u8[B, K, S, D/8], step and zero
    [B, K, S/32, D].
    """
    if limit := unsupported(q, bits, step):
        raise NotImplementedError(limit)
    B, K, G, D = q.shape
    S = bits.shape[2]

    # Up to four heads fill a register of eight rows twice, for two groups.
    heads = HEADS // 2 if G <= HEADS // 2 else HEADS
    padded = jnp.pad(q.astype(jnp.bfloat16), ((0, 0), (0, 0), (0, heads - G), (0, 0)))
    queries = jnp.tile(padded, (1, 1, HEADS // heads, 1))

    block = PART * min(PARTS, pl.cdiv(S, PART))
    of_groups = pl.BlockSpec((1, 1, block // GROUP, D), lambda b, k, i: (b, k, i, 0))

    def of_tokens(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, size, block), lambda b, k, i: (b, k, 0, i))

    # Arrays keep their four axes: XLA would reshape them within the branch of a flush before
    # this, which then returned a second copy.
    return pl.pallas_call(
        partial(_program, heads=heads),
        grid=(B, K, pl.cdiv(S, block)),
        in_specs=[
            pl.BlockSpec((1, 1, HEADS, D), lambda b, k, i: (b, k, 0, 0)),
            of_tokens(D // 8),
            of_groups,
            of_groups,
        ],
        out_specs=of_tokens(G),
        out_shape=jax.ShapeDtypeStruct((B, K, G, S), jnp.float32),
        scratch_shapes=[
            pltpu.VMEM((D, D), jnp.bfloat16),
            pltpu.VMEM((HEADS, D), jnp.float32),
            pltpu.VMEM((LANES, D), jnp.float32),
            pltpu.VMEM((2, D // WORD, PART), jnp.int32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="kvjax_score_1bit",
    )(
        queries,
        jnp.swapaxes(bits, 2, 3),  # as a TPU stores them, so this moves nothing
        step,
        zero,
    )


def _program(
    q_ref, bits_ref, step_ref, zero_ref, out_ref, order_ref, turned_ref, steps_ref, words_ref,
    *, heads: int
) -> None:  # fmt: skip
    """Scores of one block of a row, part by part; queries [8, D] are the row's heads, twice if
    they are 4."""
    D = step_ref.shape[3]
    G = out_ref.shape[2]
    queries = q_ref[0, 0]
    row = lax.broadcasted_iota(jnp.int32, (HEADS, LANES), 0)
    lane = lax.broadcasted_iota(jnp.int32, (HEADS, LANES), 1)
    own_group = lax.shift_right_logical(lane, 5)

    @pl.when(pl.program_id(2) == 0)
    def _of_row() -> None:
        order_ref[...] = _order_of_rows(D)
        turned_ref[...] = product(queries, order_ref[...], (1, 0))

    def score_part(part: Array, carry: int) -> int:
        # Scores of keys without any bit, [8, groups].
        groups = pl.ds(pl.multiple_of(part * LANES, LANES), LANES)
        step = step_ref[0, 0, groups]
        zero = zero_ref[0, 0, groups]
        least = product(queries, zero, (1, 1))
        least -= product(queries, step, (1, 1))

        # Words, of which bit 7 to 14 and 23 to 30 are first those of channels 8 to 15 and 24 to 31.
        first_token = pl.multiple_of(part * PART, PART)
        steps_ref[...] = product(step, order_ref[...], (1, 0))
        words = pltpu.bitcast(bits_ref[0, 0, :, pl.ds(first_token, PART)], jnp.int32)
        words_ref[0] = words
        words_ref[1] = lax.shift_right_logical(words, 1)

        def score_tile(tile: Array, carry: int) -> int:
            tokens = pl.ds(pl.multiple_of(tile * LANES, LANES), LANES)
            keys = []
            for word in range(D // WORD):
                for half, shift in enumerate((14 - row, 7 - row)):
                    eight = jnp.broadcast_to(
                        words_ref[half, word : word + 1, tokens], row.shape
                    )
                    keys.append(pltpu.bitcast((eight << shift) & TWOS, jnp.bfloat16))

            first = tile * (LANES // GROUP)
            steps = [steps_ref[pl.ds(first + i, 1)] for i in range(LANES // GROUP)]
            weighed = _weighed(turned_ref[...], steps, heads).astype(jnp.bfloat16)
            products = product(weighed, jnp.concatenate(keys, axis=0), (1, 0))

            base = jnp.take_along_axis(least, first + own_group, axis=1)
            scores = _of_own_group(products, own_group, heads) + base
            place = pl.multiple_of(first_token + tile * LANES, LANES)
            out_ref[0, 0, :, pl.ds(place, LANES)] = scores[:G]
            return carry

        return lax.fori_loop(0, PART // LANES, score_tile, carry, unroll=True)

    lax.fori_loop(0, out_ref.shape[3] // PART, score_part, 0)


def _order_of_rows(D: int) -> Array:
    """bf16[D, D]: a product with it puts channels in the order of the rows of bits.

    Row 32 w + 16 half + 2 r + side has bit 8 half + r + 16 side of word w.
    """
    channel = lax.broadcasted_iota(jnp.int32, (D, D), 0)
    row = lax.broadcasted_iota(jnp.int32, (D, D), 1)
    bit = ((row & 1) << 4) | (lax.shift_right_logical(row, 1) & 15)
    same = channel == ((row & ~31) | bit)
    return jnp.where(same, 1.0, 0.0).astype(jnp.bfloat16)


def _weighed(queries: Array, steps: list[Array], heads: int) -> Array:
    """Queries [8, D] times the steps [1, D] of each of four groups: [4 heads, D]."""
    wide = [jnp.broadcast_to(step, queries.shape) for step in steps]
    if heads < HEADS:
        upper = lax.broadcasted_iota(jnp.int32, queries.shape, 0) < heads
        wide = [jnp.where(upper, a, b) for a, b in zip(wide[::2], wide[1::2], strict=True)]
    return jnp.concatenate([queries * each for each in wide], axis=0)


def _of_own_group(products: Array, own_group: Array, heads: int) -> Array:
    """Picks each token's rows, those of its group, from products [4 heads, 128]: [8, 128], the
    heads first."""
    registers = [products[i : i + HEADS] for i in range(0, products.shape[0], HEADS)]
    if heads == HEADS:
        kept = registers[0]
        for group, register in enumerate(registers[1:], start=1):
            kept = jnp.where(own_group >= group, register, kept)
        return kept
    # The upper rows are those of groups 0 and 2, the lower ones of groups 1 and 3.
    pairs = jnp.where(own_group < 2, registers[0], registers[1])
    return jnp.where((own_group & 1) == 0, pairs, pltpu.roll(pairs, heads, axis=0))
