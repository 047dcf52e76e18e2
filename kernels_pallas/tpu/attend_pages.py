"""Attention over selected pages on a TPU, read where they lie.

A page of keys or values of one KV head is one DMA into the fast memory. While a list of pages is
attended, the DMAs of the next one run, so the kernel takes as long as it takes to start them or
to move their bytes, whichever is longer.

**Bytes:** 2 (D + Dv) read a selected token and list.

**Bound:** on a v5e, the number of DMAs, two a page and list; `benchmarks/results/tpu.json` has the
bundles.

**Limits:** products read queries and weights in bf16; see `unsupported`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.kernels_pallas.tpu.tiles import HEADS, LANES, far, product

TILE = 16  # tokens of a tile of bf16 in the fast memory
MOST_BYTES = 8 << 20  # of the fast memory, for two lists' keys and values


def unsupported(q: Any, k: Any, v: Any, slots: Any, together: int) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    G = q.shape[2]
    S, D = k.shape[2:]
    H, M = slots.shape[2:]
    name = "the TPU's kernel attend_pages takes"
    if D % LANES or v.shape[3] % LANES:
        return f"{name} head sizes that 128 divides; got {D} and {v.shape[3]}"
    if together % TILE or S % together or M % together or M == 0:
        return f"{name} whole pages of a multiple of {TILE} tokens; got {M} of {S} tokens, {together} together"
    if G // H > HEADS:
        return f"{name} up to {HEADS} query heads a list of pages; got {G // H}"
    if not k.dtype == v.dtype == jnp.dtype(jnp.bfloat16):
        return f"{name} keys and values in bf16; got {k.dtype} and {v.dtype}"
    if 2 * _padded(M) * (D + v.shape[3]) * k.dtype.itemsize > MOST_BYTES:
        return f"{name} lists that fit into the fast memory twice; got {M} tokens"
    return None


def attend_pages(
    q: Array,
    k: Array,
    v: Array,
    slots: Array,
    valid: Array,
    *,
    together: int,
    scale: float,
    cap: float | None = None,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """Attention of q [B, K, G, D] over the `valid` ones of `slots` [B, K, H, M] of k, v [B, K, S,
    D], of which `together` are those of one page, in order: the output f32[B, K, G, Dv], and the
    log of the sum of exponentials f32[B, K, G].
    """
    if limit := unsupported(q, k, v, slots, together):
        raise NotImplementedError(limit)
    B, K, G, _ = q.shape
    S = k.shape[2]
    H, M = slots.shape[2:]
    lists = B * K * H
    room = _padded(M)

    # Pages by the number of their first token, as clipped as slots are.
    first = slots.reshape(-1, together)[:, 0]
    pages = jnp.clip(first // together, 0, S // together - 1)

    heads = q.astype(jnp.bfloat16).reshape(lists, G // H, -1)
    heads = jnp.pad(heads, ((0, 0), (0, HEADS - G // H), (0, 0)))
    flags = valid.reshape(lists, 1, M).astype(jnp.int32)
    flags = jnp.pad(flags, ((0, 0), (0, 0), (0, room - M)))

    def of_list(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape), lambda i, pages: (i, 0, 0))

    def two_lists(x: Array) -> Any:
        return pltpu.VMEM((2, room, x.shape[3]), x.dtype)

    out, lse = pl.pallas_call(
        partial(_program, together=together, scale=scale, cap=cap, shape=(K, H)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(lists,),
            in_specs=[
                of_list(HEADS, q.shape[3]),
                of_list(1, room),
                pl.BlockSpec(memory_space=pltpu.HBM),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=[of_list(HEADS, v.shape[3]), of_list(HEADS, LANES)],
            scratch_shapes=[two_lists(k), two_lists(v), pltpu.SemaphoreType.DMA((2, 2))],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((lists, HEADS, v.shape[3]), jnp.float32),
            jax.ShapeDtypeStruct((lists, HEADS, LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="kvjax_attend_pages",
    )(pages, heads, flags, *(far(a, interpret) for a in (k, v)))
    out = out[:, : G // H].reshape(B, K, G, -1)
    return out, lse[:, : G // H, 0].reshape(B, K, G)


def _padded(tokens: int) -> int:
    return pl.cdiv(tokens, LANES) * LANES


def _program(
    pages_ref, q_ref, valid_ref, k_ref, v_ref, out_ref, lse_ref, keys_ref, values_ref, done_ref,
    *, together: int, scale: float, cap: float | None, shape: tuple[int, int],
) -> None:  # fmt: skip
    """Attention over one list, whose pages were started a step ago; starts those of the next."""
    K, H = shape
    lists = pl.num_programs(0)
    this = pl.program_id(0)
    count = pages_ref.shape[0] // lists  # pages of a list
    tokens = count * together
    arrays = (k_ref, keys_ref), (v_ref, values_ref)

    def start(which: Array, carry: int) -> int:
        row = lax.div(which, K * H)
        head = lax.rem(lax.div(which, H), K)
        half = lax.rem(which, 2)

        def start_page(i: Array, carry: int) -> int:
            from_ = pl.multiple_of(pages_ref[which * count + i] * together, together)
            to = pl.multiple_of(i * together, together)
            for j, (stored, near) in enumerate(arrays):
                pltpu.make_async_copy(
                    stored.at[row, head, pl.ds(from_, together)],
                    near.at[half, pl.ds(to, together)],
                    done_ref.at[half, j],
                ).start()
            return carry

        return lax.fori_loop(0, count, start_page, carry)

    @pl.when(this == 0)
    def _clear() -> None:
        # Tokens past the lists' ends are multiplied, too, with weights of 0.
        for _, near in arrays:
            past = near.shape[1] - tokens
            if past:
                near[:, pl.ds(tokens, past)] = jnp.zeros((2, past, near.shape[2]), near.dtype)

    # The first step starts two lists, the last one none.
    lax.fori_loop(jnp.where(this == 0, 0, this + 1), jnp.minimum(this + 2, lists), start, 0)
    half = lax.rem(this, 2)
    for j, (_, near) in enumerate(arrays):
        # One wait for as many bytes as all pages of the list have.
        whole = near.at[half, pl.ds(0, tokens)]
        pltpu.make_async_copy(whole, whole, done_ref.at[half, j]).wait()

    valid = jnp.broadcast_to(valid_ref[0], (HEADS, valid_ref.shape[2])) > 0
    scores = product(q_ref[0], keys_ref[half], (1, 1)) * scale
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    scores = jnp.where(valid, scores, -jnp.inf)
    top = jnp.max(scores, axis=1, keepdims=True)
    shift = jnp.where(top == -jnp.inf, 0.0, top)  # of a list without a valid token
    weights = jnp.exp(scores - shift)
    total = jnp.sum(weights, axis=1, keepdims=True)

    # A value that is not valid may be NaN, which a weight of 0 would keep. The matrix unit turns
    # the flags of tokens, which lie in a row, into a column.
    row = lax.broadcasted_iota(jnp.int32, valid.shape, 0)
    flags = jnp.where(valid & (row == 0), 1.0, 0.0).astype(jnp.bfloat16)
    ones = jnp.ones((HEADS, values_ref.shape[2]), jnp.bfloat16)
    kept = product(flags, ones, (0, 0)) > 0
    values = jnp.where(kept, values_ref[half].astype(jnp.float32), 0.0).astype(jnp.bfloat16)

    mixed = product(weights.astype(jnp.bfloat16), values, (1, 0))
    out_ref[0] = mixed / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    lse_ref[0] = jnp.broadcast_to(jnp.log(total) + shift, lse_ref.shape[1:])
