"""The units that a step attends to: scores of stored keys, the highest of them, and kernels
that do both at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax.memory import vary_with
from kvjax.numerics.blocks import put_last
from kvjax.numerics.partial import Logits
from kvjax.numerics.platforms import for_tpu
from kvjax.numerics.quant import OneBit, dequantize_1bit
from kvjax.numerics.rotate import SUBSPACE, Directions, decode, lloyd_max, rotate_few, turned
from kvjax.numerics.selection import (
    Candidates,
    GroupReduce,
    PackedSelection,
    Selection,
    UnitScores,
    in_order,
    join_lists,
    join_steps,
    no_kernel_for,
    of_order,
    pack,
    reduce_scores,
    split_steps,
)
from kvjax.numerics.types import Bool, Float
from kvjax.ops import kernels
from kvjax.ops.op import Implementation, OnTpu, for_gpu, op


@op(
    kernel=lambda: kernels.score_1bit,
    static_argnames=("logits",),
    derivative="reference",
    limit=lambda a: kernels.score_1bit.unsupported(a.q, a.keys.bits, a.keys.scale),
    mosaic=lambda a: kernels.score_1bit.score_1bit(a.q, *a.keys, scale=a.logits.uncapped),
    on_tpu=OnTpu(
        limit=lambda a: kernels.tpu.score_1bit.unsupported(a.q, a.keys.bits, a.keys.scale),
        mosaic=lambda a: a.logits.of(kernels.tpu.score_1bit.score_1bit(a.q, *a.keys)),
    ),
)
def score_1bit(
    q: Float[Array, "B K G D"],
    keys: OneBit,
    *,
    logits: Logits,
    implementation: Implementation | None = None,
) -> Float[Array, "B K G S"]:
    """Returns the logits of q [B, K, G, D] with every key k~ decoded from `keys` [B, K, S,
    ...]: f32[B, K, G, S].

    Reads D/8 + 4 D/g bytes per key and KV head. Keys are expanded in blocks of S/64, at least
    512, or on a GPU as they are summed, so no f32 copy of all keys exists. The kernel
    multiplies in the 16 bits of the scales and sums in f32.
    """

    def summed(q: Array, keys: OneBit) -> Array:
        return logits.of(sum_products(q, dequantize_1bit(keys)))

    return for_gpu(summed, partial(_score_blocks, logits=logits), q, keys)


def sum_products(
    q: Float[Array, "B K G D"], keys: Float[Array, "B K S D"]
) -> Float[Array, "B K G S"]:
    """f32[B, K, G, S]: q.k as a sum, of which a GPU makes one kernel together with what decodes
    the keys.

    A product would need the decoded keys in memory, at several times the bytes of their codes.
    Heads are summed side by side, so that a key is decoded once for all of them.
    """
    products = [q[:, :, head, None].astype(jnp.float32) * keys for head in range(q.shape[2])]
    sums = lax.reduce(
        products, [jnp.float32(0)] * len(products), lambda a, b: list(map(lax.add, a, b)), (3,)
    )
    return jnp.stack(sums, axis=2)


def _score_blocks(q: Array, keys: OneBit, *, logits: Logits) -> Array:
    B, K, G, _ = q.shape
    S = keys.bits.shape[2]
    groups = keys.scale.shape[2]
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
        # Without the barrier XLA widens all scales to f32 ahead of the loop: 1/8 of a bf16 key
        # cache, twice.
        keys_f32 = dequantize_1bit(lax.optimization_barrier(part))
        s = logits.of(jnp.einsum("bkgd,bksd->bkgs", q, keys_f32, precision="highest"))
        return lax.dynamic_update_slice_in_dim(scores, s, first * group, axis=3)

    return lax.fori_loop(
        0, -(-groups // block), step, vary_with(jnp.zeros((B, K, G, S), jnp.float32), q, keys)
    )


@op(
    kernel=lambda: kernels.score_pages,
    static_argnames=("logits",),
    derivative="reference",
    limit=lambda a: kernels.score_pages.unsupported(a.q, a.low, a.high),
    mosaic=lambda a: kernels.score_pages.score_pages(
        a.q, a.low, a.high, scale=a.logits.uncapped
    ),
    on_tpu=OnTpu(
        limit=lambda a: kernels.tpu.score_pages.unsupported(a.q, a.low, a.high),
        mosaic=lambda a: a.logits.of(kernels.tpu.score_pages.score_pages(a.q, a.low, a.high)),
    ),
)
def score_pages(
    q: Float[Array, "B K G D"],
    low: Float[Array, "B K P D"],
    high: Float[Array, "B K P D"],
    *,
    logits: Logits,
    implementation: Implementation | None = None,
) -> Float[Array, "B K G P"]:
    """f32[B, K, G, P]: scale * sum_i max(q_i low_i, q_i high_i) of q [B, K, G, D] and pages'
    corners [B, K, P, D].

    Because high >= low, the larger product is that with `high` where q_i > 0 and with `low`
    elsewhere, so the score is two matrix products. Reads 2 D values per page and KV head. The
    kernel rounds q to the 16 bits of the corners and sums in f32.
    """
    q = q.astype(jnp.float32)
    product = partial(jnp.einsum, "bkgd,bkpd->bkgp", precision="highest")
    up = jnp.maximum(q, 0.0)
    down = jnp.minimum(q, 0.0)
    above = product(up, high.astype(jnp.float32))
    return logits.of(above + product(down, low.astype(jnp.float32)))


@op(
    kernel=lambda: kernels.rerank,
    static_argnames=("logits",),
    derivative="reference",
    limit=lambda a: kernels.rerank.unsupported(
        a.q, a.keys.signs, a.keys.sizes, a.keys.weights, a.listed.slots
    ),
    mosaic=lambda a: kernels.rerank.rerank(
        a.q,
        a.keys.signs,
        a.keys.sizes,
        a.keys.weights,
        a.listed.slots,
        centres=centres(),
        scale=a.logits.uncapped,
    ),
)
def rerank(
    q: Float[Array, "B K G D"],
    keys: Directions,
    listed: PackedSelection,
    *,
    logits: Logits,
    implementation: Implementation | None = None,
) -> Float[Array, "B K G M"]:
    """f32[B, K, G, M]: scale * q.k~ of q [B, K, G, D] with the `listed` keys k~, decoded from
    `keys` [B, K, S, ...].

    Reads 3/4 D bytes per listed key with subspaces of 8, in blocks of 512 or, on a GPU, as they
    are summed. The kernel takes subspaces of 8 with weights of 16 bits.
    """
    B, K, G, M = listed.slots.shape

    def summed(q: Array, keys: Directions, slots: Array) -> Array:
        index = slots.reshape(B, K, G * M, 1)
        decoded = decode(
            Directions(*(jnp.take_along_axis(a, index, axis=2, mode="clip") for a in keys))
        )
        products = q.astype(jnp.float32)[:, :, :, None] * decoded.reshape(B, K, G, M, -1)
        return logits.of(jnp.sum(products, axis=-1))

    by_blocks = partial(_rerank_blocks, logits=logits)
    plain = partial(for_tpu, partial(_rerank_all, logits=logits), by_blocks)
    return for_gpu(summed, plain, q, keys, listed.slots)


def _rerank_blocks(q: Array, keys: Directions, slots: Array, *, logits: Logits) -> Array:
    B, K, G, M = slots.shape
    block = min(512, M)

    def step(i: Array, scores: Array) -> Array:
        first = jnp.minimum(i * block, M - block)
        index = lax.dynamic_slice_in_dim(slots, first, block, axis=3).reshape(
            B, K, G * block, 1
        )
        part = Directions(*(jnp.take_along_axis(a, index, axis=2, mode="clip") for a in keys))
        decoded = decode(lax.optimization_barrier(part)).reshape(B, K, G, block, -1)
        s = logits.of(
            jnp.einsum("bkgd,bkgsd->bkgs", q.astype(jnp.float32), decoded, precision="highest")
        )
        return lax.dynamic_update_slice_in_dim(scores, s, first, axis=3)

    return lax.fori_loop(
        0, -(-M // block), step, vary_with(jnp.zeros((B, K, G, M), jnp.float32), q, keys, slots)
    )


def _rerank_all(q: Array, keys: Directions, slots: Array, *, logits: Logits) -> Array:
    """`rerank` by estimates of all keys, of which those of the listed ones are taken.

    A TPU stores the bytes of codes with tokens side by side. To gather those of some tokens, it
    would first copy all of them to another layout.
    """
    B, K, G, _ = slots.shape
    S = keys.signs.shape[2]
    block = min(max(512, S // 64), S)
    q = q.astype(jnp.float32)

    def step(i: Array, scores: Array) -> Array:
        first = jnp.minimum(i * block, S - block)
        part = Directions(*(lax.dynamic_slice_in_dim(a, first, block, axis=2) for a in keys))
        decoded = decode(lax.optimization_barrier(part))
        s = logits.of(jnp.einsum("bkgd,bksd->bkgs", q, decoded, precision="highest"))
        return lax.dynamic_update_slice_in_dim(scores, s, first, axis=3)

    empty = vary_with(jnp.zeros((B, K, G, S), jnp.float32), q, keys)
    scores = lax.fori_loop(0, -(-S // block), step, empty)
    return jnp.take_along_axis(scores, slots, axis=3, mode="clip")


def centres() -> tuple[float, ...]:
    """Returns the eight values that a 4-bit code's magnitude can have."""
    return tuple(lloyd_max(SUBSPACE)[1].tolist())


@op(
    kernel=lambda: kernels.top_k,
    static_argnames=("k",),
    derivative="zero",
    limit=lambda a: kernels.top_k.unsupported(a.scores.shape, a.scores.dtype, a.k),
    mosaic=lambda a: Selection(*kernels.top_k.top_k(a.scores, a.valid, a.k)),
)
def top_k(
    scores: Float[Array, "*rows U"],
    valid: Bool[Array, "*#rows #U"],
    k: int,
    *,
    implementation: Implementation | None = None,
) -> Selection:
    """Returns the k largest of scores f32[..., U] where `valid` (broadcastable bool) is true;
    ties go to the lower index.

    A row with fewer than k valid units gives all of them, and the rest of its selection is not
    valid.
    """
    valid = jnp.broadcast_to(valid, scores.shape)
    # A valid score of -inf must still come before units that are not valid, and NaN must not
    # rank first.
    low = jnp.finfo(scores.dtype).min
    ranked = jnp.where(valid, jnp.where(scores >= low, scores, low), -jnp.inf)
    by_sorting = partial(for_tpu, partial(_top_by_places, k=k), partial(lax.top_k, k=k))
    best, slots = for_gpu(partial(_top_by_counts, k=k), by_sorting, ranked)
    return Selection(slots.astype(jnp.int32), best > -jnp.inf)


def _top_by_counts(ranked: Array, k: int) -> Sequence[Array]:
    """`lax.top_k` that finds the lowest of the k values by counting, four bits at a time, and
    sorts only those k.

    A GPU sorts a long row in ever more kernels, and pads it to a power of two.
    """
    *lead, U = ranked.shape
    if ranked.dtype != jnp.float32 or max(2 * k, 16384) > U:
        return lax.top_k(ranked, k)
    ranked = ranked.reshape(-1, U)
    keys = in_order(ranked)
    least = _least_by_digits(keys, k)

    # The units above the lowest leave room for so many of those equal to it, of the lower slots.
    above = keys > least
    level = keys == least
    ranks, levels = lax.cumsum(jnp.stack([above, level]).astype(jnp.int32), axis=2)
    room = k - ranks[:, -1:]
    chosen = above | (level & (levels <= room))

    # Each of them goes to its place among the k, in order of slots; then the k are sorted.
    place = jnp.where(chosen, ranks + jnp.minimum(levels, room) - 1, k)
    slot = lax.broadcasted_iota(jnp.int32, keys.shape, 1)
    slots = put_last(jnp.zeros((len(keys), k), jnp.int32), place, slot)
    best, order = lax.top_k(jnp.take_along_axis(ranked, slots, axis=1), k)
    return [a.reshape(*lead, k) for a in (best, jnp.take_along_axis(slots, order, axis=1))]


def _least_by_digits(keys: Array, k: int) -> Array:
    """Returns the lowest of the k largest of keys u32[R, U], u32[R, 1]: four bits at a time, the
    largest digit that at least k keys reach.
    """
    least = jnp.zeros((len(keys), 1), jnp.uint32)
    for shift in range(28, -1, -4):
        reached = [keys >= least + jnp.uint32(digit << shift) for digit in range(1, 16)]
        # One reduction with 15 results, of which a GPU makes one kernel.
        counts = lax.reduce(
            [each.astype(jnp.int32) for each in reached],
            [jnp.int32(0)] * len(reached),
            lambda a, b: list(map(lax.add, a, b)),
            (1,),
        )
        digit = sum((count >= k).astype(jnp.uint32) for count in counts)
        least += digit[:, None] << shift
    return least


def _top_by_places(ranked: Array, k: int) -> Sequence[Array]:
    """`lax.top_k` that finds the lowest of the k values by counting, one bit at a time, and the
    places of the k by products.

    A TPU takes longer to sort a long row than to read a cache, and most of a minute to compile
    that; nor does it scatter well.
    """
    *lead, U = ranked.shape
    if ranked.dtype != jnp.float32 or max(4 * k, 16384) > U:
        return lax.top_k(ranked, k)
    ranked = ranked.reshape(-1, U)
    keys = in_order(ranked)
    slots = _slots_of_top(keys, _least_of_top(keys, k), k)
    # Slots are in order, and stay so where values are equal. They are sorted along with those:
    # to gather them by the values' order would take one more DMA for each.
    falling = ~jnp.take_along_axis(keys, slots, axis=1)
    falling, slots = lax.sort((falling, slots), dimension=1, is_stable=True, num_keys=1)
    return [a.reshape(*lead, k) for a in (of_order(~falling), slots)]


def _least_of_top(keys: Array, k: int) -> Array:
    """Returns the lowest of the k largest of keys u32[R, U]: u32[R, 1]."""

    def with_bit(i: Array, least: Array) -> Array:
        more = least | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        count = jnp.sum(keys >= more, axis=1, keepdims=True, dtype=jnp.int32)
        return jnp.where(count >= k, more, least)

    return lax.fori_loop(
        0, 32, with_bit, vary_with(jnp.zeros((len(keys), 1), jnp.uint32), keys)
    )


LANES = 128  # of a TPU's registers


def _slots_of_top(keys: Array, least: Array, k: int) -> Array:
    """Slots i32[R, k], in order, of the k largest of keys u32[R, U], of which `least` u32[R, 1]
    is the lowest; of those equal to it the lower slots."""
    rows, units = keys.shape
    pages = -(-units // LANES)
    keys = jnp.pad(keys, ((0, 0), (0, pages * LANES - units))).reshape(rows, pages, LANES)
    least = least[:, :, None]

    # The units above the lowest leave room for so many of those equal to it.
    level = keys == least
    above = keys > least
    room = k - jnp.sum(above, axis=(1, 2), dtype=jnp.int32)
    inside, before = _ranks(level)
    chosen = above | (level & (inside + before[:, :, None] <= room[:, None, None]))

    # The unit of each rank is in the page that reaches that rank.
    inside, before = _ranks(chosen)
    reached = before + inside[:, :, -1]
    rank = lax.iota(jnp.int32, k)[None, :, None]
    here = (before[:, None] <= rank) & (rank < reached[:, None])  # [R, k, pages], one in each
    page = jnp.sum(jnp.where(here, lax.iota(jnp.int32, pages)[None, None], 0), axis=2)
    first = jnp.sum(jnp.where(here, before[:, None], 0), axis=2)

    # The page's ranks, by a product with zeros and a one; of them the one that is looked for.
    ranks = _exact_product("rkp,rpl->rkl", here, jnp.where(chosen, inside, 0))
    found = ranks == (rank[:, :, 0] + 1 - first)[:, :, None]
    lane = jnp.sum(jnp.where(found, lax.iota(jnp.int32, LANES)[None, None], 0), axis=2)
    return page * LANES + lane


def _ranks(chosen: Array) -> tuple[Array, Array]:
    """For bool[R, P, L]: how many are true in a page up to each place, i32[R, P, L], and before
    each page, i32[R, P]. A TPU multiplies faster than it sums along a row."""
    pages, lanes = chosen.shape[1:]
    up_to = np.triu(np.ones((lanes, lanes), bool))
    inside = _exact_product("rpl,lm->rpm", chosen, up_to)
    earlier = np.triu(np.ones((pages, pages), bool), 1)
    return inside, _exact_product("rp,po->ro", inside[:, :, -1], earlier)


def _exact_product(equation: str, x: Array, y: Array | np.ndarray) -> Array:
    """i32 product of whole numbers up to 128, of which bfloat16 holds each; sums are f32."""
    factors = (jnp.asarray(a, jnp.bfloat16) for a in (x, y))
    product = jnp.einsum(equation, *factors, preferred_element_type=jnp.float32)
    return product.astype(jnp.int32)


def _top_k_grouped_limit(a: Any) -> str | None:
    if any(valid.shape[2] != 1 for _, valid in a.parts):
        return (
            "the kernel top_k_grouped takes units that are valid for all query heads of a group"
        )
    return no_kernel_for(a.group_reduce) or kernels.top_k_grouped.unsupported(
        a.parts, a.group_reduce, a.k
    )


@op(
    kernel=lambda: kernels.top_k_grouped,
    static_argnames=("group_reduce", "k"),
    derivative="zero",
    limit=_top_k_grouped_limit,
    mosaic=lambda a: Selection(
        *kernels.top_k_grouped.top_k_grouped(a.parts, a.group_reduce, a.k)
    ),
)
def top_k_grouped(
    parts: Sequence[tuple[Float[Array, "B K G _"], Bool[Array, "B _ _ _"]]],
    group_reduce: GroupReduce,
    k: int,
    *,
    implementation: Implementation | None = None,
) -> Selection:
    """Returns the k highest units of all parts for a group of heads: `top_k` of
    `selection.reduce_scores`, in one kernel.

    A part is a `selection.UnitScores`: scores f32[B, K, G, U'] and `valid` bool[B, 1 or K, 1,
    U'], or [B, K, G, U'] under "per_head". Units are numbered on from part to part; softmax is over the valid units
    of all parts. The kernel may order units differently if their ranks differ by less than
    rounding.
    """
    heads = jnp.broadcast_shapes(*(ok.shape[:-1] for _, ok in parts))
    valid = jnp.concatenate(
        [jnp.broadcast_to(ok, (*heads, ok.shape[-1])) for _, ok in parts], axis=-1
    )
    return top_k(reduce_scores(parts, group_reduce), valid, k)


def _rank_grouped_mosaic(a: Any) -> tuple[Selection, Array]:
    slots, valid, keys = kernels.top_k_grouped.top_k_grouped(
        a.parts, a.group_reduce, a.k, total=a.total, ranked=True
    )
    return Selection(slots, valid), keys


@op(
    kernel=lambda: kernels.top_k_grouped,
    static_argnames=("group_reduce", "k"),
    derivative="zero",
    limit=_top_k_grouped_limit,
    mosaic=_rank_grouped_mosaic,
)
def rank_grouped(
    parts: Sequence[tuple[Float[Array, "B K G _"], Bool[Array, "B _ _ _"]]],
    group_reduce: GroupReduce,
    k: int,
    total: Float[Array, "B K G 1"] | None,
    *,
    implementation: Implementation | None = None,
) -> tuple[Selection, Array]:
    """`top_k_grouped` among units of which other devices have more, and u32[B, K, H, k], which
    orders those of all.

    `total` is the log of the sum of exponentials of all devices' scores, None unless ranks are
    softmaxes. The order is that of ranks, 0 for units that are not valid.
    """
    flags = jnp.concatenate(
        [jnp.broadcast_to(ok, (*scores.shape[:2], 1, ok.shape[3])) for scores, ok in parts], -1
    )
    ranks = reduce_scores(parts, group_reduce, total)
    best = top_k(ranks, flags, k)
    low = jnp.finfo(ranks.dtype).min
    rank = jnp.take_along_axis(ranks, best.slots, axis=-1)
    return best, jnp.where(
        best.valid, in_order(jnp.where(rank >= low, rank, low)), jnp.uint32(0)
    )


def select_top(
    scores: Float[Array, "B K G U"],
    q: Float[Array, "B K G D"],
    candidates: Candidates,
    group_reduce: GroupReduce,
    *,
    unit: int = 1,
    logits: Logits,
) -> Selection:
    """Returns the candidates with the highest scores, sorted by score: score, mask,
    group-reduce, top-k, cut.

    `scores` f32[B, K, G, U] are those of the U stored units for q [B, K, G, D]; those of
    pending keys are scale * q.k.
    """
    candidates.require(scores.shape[3], unit)
    pending = candidates.pending_units(q, logits, unit)
    stored = UnitScores(
        split_steps(scores, candidates.steps),
        candidates.inside(*candidates.span, scores.shape[3], unit),
    )
    return _highest([stored, pending], group_reduce, candidates)


def _highest(
    parts: Sequence[UnitScores], group_reduce: GroupReduce, candidates: Candidates
) -> Selection:
    """Returns the highest of each step's parts, scores f32[B, K*T, G, U]: a selection [B, K,
    T*H, k_max].
    """
    best = top_k_grouped(parts, group_reduce, candidates.k_max)
    rank = jnp.arange(candidates.k_max, dtype=jnp.int32)[None, None, None]
    valid = best.valid & (rank < candidates.of_groups(candidates.k))
    return Selection(
        join_steps(best.slots, candidates.steps), join_steps(valid, candidates.steps)
    )


@runtime_checkable
class _Select1bit(Protocol):
    """The arguments of `select_1bit`, by which the thread leads on to its kernel."""

    q: Array
    keys: OneBit
    candidates: Candidates
    group_reduce: GroupReduce
    logits: Logits


def _select_1bit_limit(a: _Select1bit) -> str | None:
    """The limit for one step, however many there are: a pass takes as many as fit."""
    q = a.q
    keys = a.keys
    candidates = a.candidates
    candidates.require(keys.bits.shape[2], 1)
    step_q = jax.ShapeDtypeStruct(
        (*q.shape[:2], q.shape[2] // candidates.steps, q.shape[3]), q.dtype
    )
    pending = jax.ShapeDtypeStruct((*step_q.shape[:3], candidates.pending_slots), jnp.float32)
    return no_kernel_for(a.group_reduce) or kernels.select_1bit.unsupported(
        step_q, keys.bits, keys.scale, pending, a.group_reduce, candidates.k_max
    )


def _select_1bit_mosaic(a: _Select1bit) -> PackedSelection:
    def one_pass(q: Array, candidates: Candidates) -> PackedSelection:
        steps = candidates.steps
        keys_or_scores, start, stop = candidates.pending
        pending_slots: int | None = candidates.pending_slots
        if keys_or_scores.dtype != a.keys.scale.dtype:
            # The kernel takes scores instead of keys of another dtype.
            scores = candidates.pending_units(q, a.logits).scores
            keys_or_scores = join_steps(scores, steps)
            pending_slots = None
        slots, found = kernels.select_1bit.select_1bit(
            q,
            a.keys.bits,
            a.keys.scale,
            a.keys.zero,
            candidates.span,
            (keys_or_scores, start, stop),
            candidates.k,
            a.group_reduce,
            candidates.k_max,
            scale=a.logits.uncapped,
            pending_slots=pending_slots,
            local=candidates.local,
            steps=steps,
        )
        return PackedSelection(slots, found)

    heads = kernels.select_1bit.heads_at_once(a.q.shape[-1])
    passes = a.candidates.passes(a.q, heads)
    return join_lists([one_pass(q, candidates) for q, candidates in passes])


@op(
    kernel=lambda: kernels.select_1bit,
    static_argnames=("group_reduce", "logits"),
    derivative="zero",
    limit=_select_1bit_limit,
    mosaic=_select_1bit_mosaic,
)
def select_1bit(
    q: Float[Array, "B K G D"],
    keys: OneBit,
    candidates: Candidates,
    group_reduce: GroupReduce,
    *,
    logits: Logits,
    implementation: Implementation | None = None,
) -> PackedSelection:
    """Returns the tokens with the highest scores by 1-bit keys: `score_1bit` and `select_top`
    at once.

    `keys` [B, K, S, ...] are scored for q [B, K, G, D]; pending tokens have slots from S on.
    The token of lowest rank comes last, the others in any order. The kernel scores as that of
    `score_1bit` and ranks scores in f16, where one beyond 65504 is infinite; it may order
    tokens differently if their ranks differ by less than its rounding.
    """
    return pack(
        select_top(
            score_1bit(q, keys, logits=logits), q, candidates, group_reduce, logits=logits
        )
    )


@runtime_checkable
class _SelectPages(Protocol):
    """The arguments of `select_pages`, by which the thread leads on to its kernel."""

    q: Array
    low: Array
    high: Array
    candidates: Candidates
    group_reduce: GroupReduce
    unit: int
    logits: Logits


def _select_pages_limit(a: _SelectPages) -> str | None:
    candidates = a.candidates
    candidates.require(a.low.shape[2], a.unit)
    keys, _, _ = candidates.pending
    room = candidates.k_max
    slots = candidates.pending_slots
    return no_kernel_for(a.group_reduce) or kernels.select_pages.unsupported(
        a.q, a.low, a.high, keys, a.group_reduce, room, a.unit, slots, candidates.steps
    )


def _select_pages_mosaic(a: _SelectPages) -> PackedSelection:
    candidates = a.candidates
    slots, found = kernels.select_pages.select_pages(
        a.q,
        a.low,
        a.high,
        candidates.span,
        candidates.pending,
        candidates.k,
        a.group_reduce,
        candidates.k_max,
        unit=a.unit,
        scale=a.logits.uncapped,
        pending_slots=candidates.pending_slots,
        local=candidates.local,
        steps=candidates.steps,
    )
    return PackedSelection(slots, found)


@op(
    kernel=lambda: kernels.select_pages,
    static_argnames=("group_reduce", "unit", "logits"),
    derivative="zero",
    limit=_select_pages_limit,
    mosaic=_select_pages_mosaic,
)
def select_pages(
    q: Float[Array, "B K G D"],
    low: Float[Array, "B K P D"],
    high: Float[Array, "B K P D"],
    candidates: Candidates,
    group_reduce: GroupReduce,
    *,
    unit: int,
    logits: Logits,
    implementation: Implementation | None = None,
) -> PackedSelection:
    """Returns the pages of `unit` tokens with the highest scores by their boxes: `score_pages`
    and `select_top` at once.

    Boxes have corners [B, K, P, D] and are scored for q [B, K, G, D]; pending pages are
    numbered from P on. The page of lowest rank comes last, the others in any order. The kernel
    scores as that of `score_pages`, pending keys too; it may order pages differently if their
    ranks differ by less than rounding.
    """
    scores = score_pages(q, low, high, logits=logits)
    return pack(select_top(scores, q, candidates, group_reduce, unit=unit, logits=logits))


def _select_4bit_limit(a: Any) -> str | None:
    candidates = a.candidates
    candidates.require(a.listed.slots.shape[3], 1)
    keys, _, _ = candidates.pending
    return kernels.select_4bit.unsupported(
        a.q,
        a.keys.signs,
        a.keys.sizes,
        a.keys.weights,
        a.listed.slots,
        keys,
        candidates.k_max,
        candidates.pending_slots,
    )


def _select_4bit_mosaic(a: Any) -> PackedSelection:
    candidates = a.candidates
    slots, found = kernels.select_4bit.select_4bit(
        a.q,
        a.keys.signs,
        a.keys.sizes,
        a.keys.weights,
        a.listed,
        candidates.pending,
        candidates.k,
        candidates.k_max,
        centres=centres(),
        turned=turned(a.q.shape[-1], a.seed),
        scale=a.logits.uncapped,
        pending_slots=candidates.pending_slots,
        local=candidates.local,
    )
    return PackedSelection(slots, found)


@op(
    kernel=lambda: kernels.select_4bit,
    static_argnames=("seed", "logits"),
    derivative="zero",
    limit=_select_4bit_limit,
    mosaic=_select_4bit_mosaic,
)
def select_4bit(
    q: Float[Array, "B K G D"],
    keys: Directions,
    listed: PackedSelection,
    candidates: Candidates,
    *,
    seed: int,
    logits: Logits,
    implementation: Implementation | None = None,
) -> PackedSelection:
    """Returns the tokens with the highest scores by 4-bit codes for each query head: `rerank`
    and the selection at once.

    Stored candidates are the `listed` slots [B, K, G, M] of `keys` [B, K, S, ...], whatever
    `candidates.span` says, scored for q [B, K, G, D] rotated by `seed`; pending tokens have
    slots from S on. The token of lowest rank comes last, the others in any order. The kernel
    ranks scores in f16, as that of `select_1bit`.
    """
    M = listed.slots.shape[3]
    S = keys.signs.shape[2]
    candidates.require(M, 1)
    estimates = rerank(rotate_few(q, seed), keys, listed, logits=logits)
    pending = candidates.pending_units(q, logits)
    stored = UnitScores(
        split_steps(estimates, candidates.steps),
        split_steps(listed.valid, candidates.steps),
    )
    best = _highest([stored, pending], "per_head", candidates)
    slots = jnp.take_along_axis(listed.slots, jnp.minimum(best.slots, M - 1), axis=-1)
    slots = jnp.where(best.slots < M, slots, best.slots - M + S)
    return pack(Selection(slots, best.valid))
