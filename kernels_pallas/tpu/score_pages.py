"""Scores of pages on a TPU: the product of each query head of a group with the corner of each
page's box that is largest for it.

As high >= low, a channel takes the high corner where the query is above 0 and the low one
elsewhere: the score is the sum of two products on the matrix unit, each in one pass.

**Bytes:** 4 D read and 4 G written a page and KV head.

**Bound:** its bytes; `benchmarks/results/tpu.json` has the bundles.

**Limits:** queries are rounded to bf16; see `unsupported`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.kernels_pallas.tpu.tiles import HEADS, LANES, product

BLOCK = 2048  # pages of a step of the grid


def unsupported(q: Any, low: Any, high: Any) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    *_, G, D = q.shape
    pages = low.shape[2]
    if D % LANES or D == 0:
        return f"the TPU's kernel score_pages takes head sizes that 128 divides; got D={D}"
    if not 1 <= G <= HEADS:
        return (
            f"the TPU's kernel score_pages takes 1 to {HEADS} query heads a kv head; got G={G}"
        )
    if pages < LANES:
        return f"the TPU's kernel score_pages takes {LANES} pages or more; got {pages}"
    if not low.dtype == high.dtype == jnp.dtype(jnp.bfloat16):
        return f"the TPU's kernel score_pages takes corners in bf16; got {low.dtype} and {high.dtype}"
    return None


def score_pages(q: Array, low: Array, high: Array, *, interpret: Any = False) -> Array:
    """f32[B, K, G, P]: sum_i max(q_i low_i, q_i high_i) of q [B, K, G, D] and corners [B, K, P,
    D].
    """
    if limit := unsupported(q, low, high):
        raise NotImplementedError(limit)
    B, K, G, D = q.shape
    pages = low.shape[2]
    block = min(BLOCK, pages)
    padded = jnp.pad(q.astype(jnp.bfloat16), ((0, 0), (0, 0), (0, HEADS - G), (0, 0)))

    corners = pl.BlockSpec((1, 1, block, D), lambda b, k, i: (b, k, i, 0))
    return pl.pallas_call(
        _program,
        grid=(B, K, pl.cdiv(pages, block)),
        in_specs=[
            pl.BlockSpec((1, 1, HEADS, D), lambda b, k, i: (b, k, 0, 0)),
            corners,
            corners,
        ],
        out_specs=pl.BlockSpec((1, 1, G, block), lambda b, k, i: (b, k, 0, i)),
        out_shape=jax.ShapeDtypeStruct((B, K, G, pages), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="kvjax_score_pages",
    )(padded, low, high)


def _program(q_ref, low_ref, high_ref, out_ref) -> None:
    """Scores of one block of the pages of a row."""
    q = q_ref[0, 0].astype(jnp.float32)
    up = jnp.maximum(q, 0.0).astype(jnp.bfloat16)
    down = jnp.minimum(q, 0.0).astype(jnp.bfloat16)
    scores = product(up, high_ref[0, 0], (1, 1)) + product(down, low_ref[0, 0], (1, 1))
    out_ref[0, 0] = scores[: out_ref.shape[2]]
