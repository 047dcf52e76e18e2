"""Block-sparse prompts: a block of a prompt's queries attends to the blocks of stored keys with
the most weight.

A chunk of a prompt attends to itself exactly, and only what the cache stored before it is
sparse: so nothing here is causal. Each block of 128 queries of a head has a list of blocks of
128 keys, those with the most estimated softmax mass. Logits are estimated for strides of 16
queries with strides of 16 keys: the mean logit of the pairs on the antidiagonal of their tile,
which meets each query and key once. That is one product, of keys as they lie in memory.

A prompt of 131072 tokens of an 8B shape took 4.7 s on an H100 with a share of .1, and 11.1 s
whole (`ttft_sparse.json`). After 16384 tokens of text Qwen2.5-Coder-1.5B had a loss of 3.32
with .1 and whole, kvjax-26m 3.33 and 3.29 (`sparse_prompt.json`).

**Source:** Xu et al. 2025 (XAttention). **Differs:** each list has the same share of the
blocks, not of the mass, so that the time is known; every second stride of queries scores; the
chunk itself, and a prompt's last, are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.numerics.partial import Logits, PartialAttention, attend_part, merge_blocks
from kvjax.numerics.types import Float, Int32
from kvjax.ops import kernels
from kvjax.ops.op import Implementation, op
from kvjax.ops.select import top_k

BLOCK = 128  # queries, and keys, of a block
STRIDE = 16  # queries, and keys, of a tile of which only the antidiagonal is scored
EVERY = 2  # of the strides of queries, how many there are for each that is scored
LEAST = 16  # blocks that a list has, unless fewer are stored

_share = jax.make_user_context(None)  # a float or None; jit's caches have it in their keys


@contextmanager
def sparse_prompts(share: float | None) -> Iterator[None]:
    """Within the block, chunks of prompts attend to this share of what is stored before them;
    None for all of it.
    """
    with _share(share):
        yield


def sparse_share() -> float | None:
    return _share.value


def list_length(blocks: int, share: float) -> int:
    """How many of the `blocks` that are stored a block of queries attends to.

    >>> list_length(1024, 0.1), list_length(100, 0.1), list_length(9, 0.1)
    (103, 16, 9)
    """
    return min(blocks, max(math.ceil(round(blocks * share, 6)), LEAST))


def is_sparse(q: Array, k: Array) -> bool:
    """True if queries [B, K, G, T, D] attend to a part of the blocks of k [B, K, S, D], by the
    current share.
    """
    blocks = -(-k.shape[2] // BLOCK)
    share = sparse_share()
    return share is not None and q.shape[3] >= BLOCK and list_length(blocks, share) < blocks


def attend_sparse(
    q: Array, k: Array, v: Array, stop: Array, *, logits: Logits
) -> PartialAttention:
    """Attention of q [B, K, G, T, D] over chosen blocks of the slots [0, stop) of k, v: a part
    over Q = G*T.
    """
    B, K, G, T, _ = q.shape
    share = sparse_share()
    assert share is not None
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, -T % BLOCK), (0, 0)))
    blocks, counts = choose_blocks(q, k, stop, share=share, logits=logits)
    part = attend_key_blocks(q, k, v, blocks, counts, stop, logits=logits)
    out = part.out.reshape(B, K, G, q.shape[3], -1)
    lse = part.lse.reshape(B, K, G, q.shape[3])
    return PartialAttention(
        out[:, :, :, :T].reshape(B, K, G * T, -1), lse[:, :, :, :T].reshape(B, K, G * T)
    )


def why_no_kernel(q: Array, k: Array, v: Array, stop: Array, *, logits: Logits) -> str | None:
    """Why this process has no kernel for lists of blocks of these keys and values; None if it
    has one.
    """
    B, K, G, T, D = q.shape
    n = -(-T // BLOCK)
    queries = jax.ShapeDtypeStruct((B, K, G, n * BLOCK, D), q.dtype)
    lists, counts = (jax.ShapeDtypeStruct((B, K, G, n, *m), jnp.int32) for m in ((LEAST,), ()))
    return attend_key_blocks.why_not(queries, k, v, lists, counts, stop, logits=logits)


def choose_blocks(
    q: Array, k: Array, stop: Array, *, share: float, logits: Logits
) -> tuple[Array, Array]:
    """Returns the blocks of k [B, K, S, D] to which each block of queries q [B, K, G, T, D]
    attends, in order, and how many: i32[B, K, G, T / 128, M] and i32[B, K, G, T / 128].

    They are the `share` of the blocks with tokens before `stop` i32[B] that has the most
    estimated mass, but at least 16, and always the first and the last.
    """
    mass = lax.stop_gradient(estimated_mass(q, k, stop, logits=logits))
    stored = -(-stop // BLOCK)[:, None, None, None, None]
    most = -(-k.shape[2] // BLOCK)
    block = _count(most, 5)
    mass = jnp.pad(mass, ((0, 0),) * 4 + ((0, most - mass.shape[-1]),))
    # The first and the last block have more than any mass.
    mass = jnp.where((block == 0) | (block == stored - 1), jnp.float32(BLOCK), mass)
    best = top_k(mass, block < stored, list_length(most, share))
    wanted = jnp.array([list_length(n, share) for n in range(most + 1)], jnp.int32)[stored]
    among = _count(best.slots.shape[-1], 5) < wanted
    blocks = jnp.sort(jnp.where(among, best.slots, most), axis=-1)
    counts = jnp.broadcast_to(jnp.maximum(wanted[..., 0], 1), blocks.shape[:-1])
    return jnp.where(blocks < most, blocks, 0), counts


def estimated_mass(q: Array, k: Array, stop: Array, *, logits: Logits) -> Array:
    """f32[B, K, G, T / 128, S // 128]: the softmax mass over stored tokens of a block's queries
    that is estimated to lie in each whole block of keys, summed over the strides of queries
    that are scored."""
    B, K, G, T, D = q.shape
    S = k.shape[2] // BLOCK * BLOCK
    rows = BLOCK // STRIDE // EVERY
    columns = BLOCK // STRIDE

    # The sum over an antidiagonal of each tile of STRIDE queries and keys, as one product: the
    # queries of a stride in reverse order, beside the keys of one. One stride in EVERY is scored.
    strides = q.astype(k.dtype).reshape(B, K, G * T // STRIDE // EVERY, EVERY, STRIDE, D)
    scored = strides[:, :, :, -1, ::-1]
    scored = scored.reshape(*scored.shape[:3], STRIDE * D)
    keys = k[:, :, :S].reshape(B, K, S // STRIDE, STRIDE * D)
    sums = jnp.einsum("bkre,bkje->bkrj", scored, keys).astype(jnp.float32)
    scores = logits.of_means(sums, STRIDE)

    # Their softmax over all strides of keys that are stored as a whole, summed by block.
    whole = STRIDE * (_count(S // STRIDE, 4) + 1) <= stop[:, None, None, None]
    scores = jnp.where(whole, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(top), 0.0, top))
    mass = jnp.sum(weights.reshape(*weights.shape[:3], S // BLOCK, columns), axis=-1)
    mass /= jnp.maximum(jnp.sum(mass, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    return jnp.sum(mass.reshape(B, K, G, T // BLOCK, rows, S // BLOCK), axis=4)


@op(
    kernel=lambda: kernels.attend_key_blocks,
    static_argnames=("logits",),
    derivative="reference",
    limit=lambda a: kernels.attend_key_blocks.unsupported(a.q, a.k, a.v),
    mosaic=lambda a: PartialAttention(
        *kernels.attend_key_blocks.attend_key_blocks(
            a.q, a.k, a.v, a.blocks, a.counts, a.stop, scale=a.logits.uncapped
        )
    ),
)
def attend_key_blocks(
    q: Float[Array, "B K G T D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S _"],
    blocks: Int32[Array, "B K G n M"],
    counts: Int32[Array, "B K G n"],
    stop: Int32[Array, " B"],
    *,
    logits: Logits,
    implementation: Implementation | None = None,
) -> PartialAttention:
    """Attention of each block of 128 of the queries q to its first `counts` of the listed
    blocks of 128 slots of k, v, where they are below `stop`: a part over Q = G*T.

    Lists are in order, without repeats, and of at least one block; only the last one may reach
    `stop` or beyond. Keys past `stop` may hold anything, values there must be finite.
    """
    B, K, G, T, D = q.shape
    S = k.shape[2]
    if T % BLOCK or S < BLOCK:
        raise ValueError(
            f"attend_key_blocks takes multiples of {BLOCK} queries and at least {BLOCK} slots; got {T}, {S}"
        )

    def one(
        i: Array, q: Array, k: Array, v: Array, blocks: Array, counts: Array, stop: Array
    ) -> PartialAttention:
        first = lax.dynamic_index_in_dim(blocks, i, axis=4, keepdims=False) * BLOCK
        # The last block may overlap the one before: mask the overlap.
        start = jnp.minimum(first, S - BLOCK)
        slot = start[..., None] + _count(BLOCK, 5)
        seen = (
            (slot >= first[..., None])
            & (slot < stop[:, None, None, None, None])
            & (i < counts)[..., None]
        )
        kb, vb = (_take_blocks(a, start).reshape(-1, 1, BLOCK, a.shape[-1]) for a in (k, v))
        part = attend_part(
            q.reshape(-1, 1, BLOCK, D), kb, vb, seen.reshape(-1, 1, 1, BLOCK), logits=logits
        )
        return PartialAttention(
            part.out.reshape(B, K, G * T, -1), part.lse.reshape(B, K, G * T)
        )

    def bounds(*operands: Array) -> tuple[int, Array]:
        return 0, jnp.max(operands[-2])

    shape = (B, K, G * T, v.shape[-1])
    return merge_blocks(
        one, q, k, v, blocks, counts, stop, bounds=bounds, blocks=blocks.shape[-1], shape=shape
    )


def _count(n: int, rank: int) -> Array:
    """0 to n - 1 along the last axis of a rank: i32[1, ..., n]."""
    return lax.broadcasted_iota(jnp.int32, (1,) * (rank - 1) + (n,), rank - 1)


def _take_blocks(a: Array, start: Array) -> Array:
    """[B, K, G, n, 128, D]: the slots from `start` i32[B, K, G, n] on of a [B, K, S, D]."""

    def of_head(a: Array, start: Array) -> Array:
        return jax.vmap(lambda first: lax.dynamic_slice_in_dim(a, first, BLOCK, axis=0))(start)

    found = jax.vmap(jax.vmap(of_head))(a, start.reshape(*start.shape[:2], -1))
    return found.reshape(*start.shape, BLOCK, a.shape[-1])
