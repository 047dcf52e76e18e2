"""The operations that a decode step spends its time in, in plain JAX.

Each is the reference for a GPU kernel of the same name and signature, and covers everything that the signature admits.
They are written to hold little: scoring expands packed keys a block at a time, and never the whole of them.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from kvjax.partial import Partial, attend_part, keep_valid
from kvjax.pick import Selection
from kvjax.quant import OneBit, dequantize_1bit


def score_1bit(q: Array, keys: OneBit, *, scale: float) -> Array:
    """f32[B, K, G, S]: scale * q.k~ of q [B, K, G, D] with every key k~ that `keys` [B, K, S, ...] decode to.

    Reads D/8 + 4 D/g bytes a key and kv head. Keys are expanded in blocks of S/64 (at least 512): on CPU at 8 heads
    x 32K tokens, D = 128, G = 4, this took 8-13 ms, one expansion of everything 57 ms and 128 MiB, and one fused
    multiply and sum 0.4-2.4 s (2026-11-21, jax 0.10.2, 2 shared cores, normal random q, uniform random codes).
    """
    B, K, G, _ = q.shape
    S, groups = keys.bits.shape[2], keys.scale.shape[2]
    group = S // groups
    block = min(max(512, S // 64) // group or 1, groups)  # in groups
    q = q.astype(jnp.float32)

    def step(i: Array, scores: Array) -> Array:
        first = jnp.minimum(i * block, groups - block)
        part = OneBit(
            lax.dynamic_slice_in_dim(keys.bits, first * group, block * group, axis=2),
            lax.dynamic_slice_in_dim(keys.scale, first, block, axis=2),
            lax.dynamic_slice_in_dim(keys.zero, first, block, axis=2),
        )
        # Without the barrier XLA widens all scales to f32 ahead of the loop: 1/8 of a bf16 key cache, twice.
        keys_f32 = dequantize_1bit(lax.optimization_barrier(part))
        s = jnp.einsum("bkgd,bksd->bkgs", q, keys_f32, precision="highest") * scale
        return lax.dynamic_update_slice_in_dim(scores, s, first * group, axis=3)

    return lax.fori_loop(0, -(-groups // block), step, jnp.zeros((B, K, G, S), jnp.float32))


def top_k(scores: Array, valid: Array, k: int) -> Selection:
    """The k largest of scores f32[..., U] where `valid` (broadcastable bool) is true; ties go to the lower index.

    A row with fewer than k valid units gives all of them, and the rest of its selection is not valid.
    """
    valid = jnp.broadcast_to(valid, scores.shape)
    # A valid score of -inf must still come before what is not valid, and NaN must not rank first.
    low = jnp.finfo(scores.dtype).min
    ranked = jnp.where(valid, jnp.clip(jnp.nan_to_num(scores, nan=low), low), -jnp.inf)
    _, slots = lax.top_k(ranked, k)
    return Selection(slots.astype(jnp.int32), jnp.take_along_axis(valid, slots, axis=-1))


def attend_slots(q: Array, k: Array, v: Array, selection: Selection, *, scale: float) -> Partial:
    """Exact attention of q [B, K, G, D] over the selected slots of k, v [B, K, S, D]; Partial over Q = G."""
    B, K, G, D = q.shape
    H, M = selection.slots.shape[2:]
    index = selection.slots.reshape(B, K, H * M, 1)
    kg, vg = (jnp.take_along_axis(a, index, axis=2, mode="clip") for a in (k, v))
    kg, vg = (a.reshape(B, K * H, M, a.shape[-1]) for a in (kg, vg))
    valid = selection.valid.reshape(B, K * H, M)
    part = attend_part(q.reshape(B, K * H, G // H, D), kg, keep_valid(vg, valid), valid[:, :, None], scale=scale)
    return Partial(part.out.reshape(B, K, G, -1), part.lse.reshape(B, K, G))
