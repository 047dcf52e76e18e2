"""Selection of the units that a step attends to: the highest scores, and kernels that score and select at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.numerics.blocks import put_last
from kvjax.numerics.partial import attention_logits
from kvjax.numerics.quant import OneBit
from kvjax.numerics.rotate import Directions, rotate_few, turned
from kvjax.numerics.selection import (
    Candidates,
    GroupReduce,
    PackedSelection,
    Selection,
    in_order,
    join_lists,
    join_steps,
    no_kernel_for,
    pack,
    reduce_scores,
    split_steps,
)
from kvjax.numerics.types import Bool, Float
from kvjax.ops.op import Implementation, for_gpu, op
from kvjax.ops.score import centres, rerank, score_1bit, score_pages


@op(
    kernel="select.top_k",
    static_argnames=("k",),
    derivative="zero",
    limit=lambda kernel, a: kernel.unsupported(a.scores.shape, a.scores.dtype, a.k),
    mosaic=lambda kernel, a: Selection(*kernel.top_k(a.scores, a.valid, a.k)),
)
def top_k(
    scores: Float[Array, "*rows U"],
    valid: Bool[Array, "*#rows #U"],
    k: int,
    *,
    implementation: Implementation | None = None,
) -> Selection:
    """The k largest of scores f32[..., U] where `valid` (broadcastable bool) is true; ties go to the lower index.

    A row with fewer than k valid units gives all of them, and the rest of its selection is not valid.
    """
    valid = jnp.broadcast_to(valid, scores.shape)
    # A valid score of -inf must still come before units that are not valid, and NaN must not rank first.
    low = jnp.finfo(scores.dtype).min
    ranked = jnp.where(valid, jnp.where(scores >= low, scores, low), -jnp.inf)
    best, slots = for_gpu(partial(_top_by_counts, k=k), partial(lax.top_k, k=k), ranked)
    return Selection(slots.astype(jnp.int32), best > -jnp.inf)


def _top_by_counts(ranked: Array, k: int) -> Sequence[Array]:
    """`lax.top_k` that finds the lowest of the k values by counting, four bits at a time, and sorts only those k.

    A GPU sorts a long row in ever more kernels, and pads it to a power of two.
    """
    *lead, U = ranked.shape
    if ranked.dtype != jnp.float32 or max(2 * k, 16384) > U:
        return lax.top_k(ranked, k)
    ranked = ranked.reshape(-1, U)
    keys = in_order(ranked)
    least = jnp.zeros((len(keys), 1), jnp.uint32)
    for shift in range(28, -1, -4):
        at_least = [keys >= least + jnp.uint32(digit << shift) for digit in range(1, 16)]
        zeros = [jnp.int32(0)] * len(at_least)
        counts = lax.reduce(
            [at.astype(jnp.int32) for at in at_least], zeros, lambda a, b: list(map(lax.add, a, b)), (1,)
        )
        least += sum((count >= k).astype(jnp.uint32) for count in counts)[:, None] << shift
    above, level = keys > least, keys == least
    ranks, levels = lax.cumsum(jnp.stack([above, level]).astype(jnp.int32), axis=2)
    spare = k - ranks[:, -1:]  # of the level, the lower slots
    place = jnp.where(above | (level & (levels <= spare)), ranks + jnp.minimum(levels, spare) - 1, k)
    slots = put_last(jnp.zeros((len(keys), k), jnp.int32), place, lax.broadcasted_iota(jnp.int32, keys.shape, 1))
    best, order = lax.top_k(jnp.take_along_axis(ranked, slots, axis=1), k)
    return [a.reshape(*lead, k) for a in (best, jnp.take_along_axis(slots, order, axis=1))]


def _top_k_grouped_limit(kernel: Any, a: Any) -> str | None:
    if any(valid.shape[2] != 1 for _, valid in a.parts):
        return "the kernel top_k_grouped takes units that are valid for all query heads of a group"
    return no_kernel_for(a.group_reduce) or kernel.unsupported(a.parts, a.group_reduce, a.k)


_of_groups: Any = {"kernel": "select.top_k_grouped", "limit": _top_k_grouped_limit, "derivative": "zero"}


@op(
    **_of_groups,
    static_argnames=("group_reduce", "k"),
    mosaic=lambda kernel, a: Selection(*kernel.top_k_grouped(a.parts, a.group_reduce, a.k)),
)
def top_k_grouped(
    parts: Sequence[tuple[Float[Array, "B K G _"], Bool[Array, "B _ _ _"]]],
    group_reduce: GroupReduce,
    k: int,
    *,
    implementation: Implementation | None = None,
) -> Selection:
    """The k highest units of all parts for a group of heads: `top_k` of `selection.reduce_scores`, in one kernel.

    A part has scores f32[B, K, G, U'] and `valid` bool[B, 1 or K, 1, U'], or [B, K, G, U'] under "per_head". Units are
    numbered on from part to part; softmax is over the valid units of all parts. The kernel may order units differently
    if their ranks differ by less than rounding.
    """
    heads = jnp.broadcast_shapes(*(ok.shape[:-1] for _, ok in parts))
    valid = jnp.concatenate([jnp.broadcast_to(ok, (*heads, ok.shape[-1])) for _, ok in parts], axis=-1)
    return top_k(reduce_scores(parts, group_reduce), valid, k)


def _rank_grouped_mosaic(kernel: Any, a: Any) -> tuple[Selection, Array]:
    slots, valid, keys = kernel.top_k_grouped(a.parts, a.group_reduce, a.k, total=a.total, ranked=True)
    return Selection(slots, valid), keys


@op(**_of_groups, static_argnames=("group_reduce", "k"), mosaic=_rank_grouped_mosaic)
def rank_grouped(
    parts: Sequence[tuple[Float[Array, "B K G _"], Bool[Array, "B _ _ _"]]],
    group_reduce: GroupReduce,
    k: int,
    total: Float[Array, "B K G 1"] | None,
    *,
    implementation: Implementation | None = None,
) -> tuple[Selection, Array]:
    """`top_k_grouped` among units of which other devices have more, and u32[B, K, H, k], which orders those of all.

    `total` is the log of the sum of exponentials of all devices' scores, None unless ranks are softmaxes. The order is
    that of ranks, 0 for units that are not valid.
    """
    flags = jnp.concatenate([jnp.broadcast_to(ok, (*scores.shape[:2], 1, ok.shape[3])) for scores, ok in parts], -1)
    ranks = reduce_scores(parts, group_reduce, total)
    best = top_k(ranks, flags, k)
    low = jnp.finfo(ranks.dtype).min
    rank = jnp.take_along_axis(ranks, best.slots, axis=-1)
    return best, jnp.where(best.valid, in_order(jnp.where(rank >= low, rank, low)), jnp.uint32(0))


def select_top(
    scores: Float[Array, "B K G U"],
    q: Float[Array, "B K G D"],
    candidates: Candidates,
    group_reduce: GroupReduce,
    *,
    unit: int = 1,
    scale: float,
) -> Selection:
    """The candidates with the highest scores, sorted by score: score, mask, group-reduce, top-k, cut.

    `scores` f32[B, K, G, U] are those of the U stored units for q [B, K, G, D]; those of pending keys are scale * q.k.
    """
    candidates.require(scores.shape[3], unit)
    pending = candidates.pending_units(_pending_logits(q, candidates, scale), unit)
    stored = split_steps(scores, candidates.steps), candidates.inside(*candidates.span, scores.shape[3], unit)
    return _highest([stored, pending], group_reduce, candidates)


def _pending_logits(q: Array, candidates: Candidates, scale: float) -> Array:
    """Exact scores of the recent keys for q [B, K, T*G, D]: f32[B, K*T, G, R]."""
    keys, steps = candidates.pending[0], candidates.steps
    if keys.ndim == 4:
        return split_steps(attention_logits(q, keys, scale), steps)
    return attention_logits(split_steps(q, steps), keys.reshape(keys.shape[0], -1, *keys.shape[3:]), scale)


def _highest(parts: Sequence[tuple[Array, Array]], group_reduce: GroupReduce, candidates: Candidates) -> Selection:
    """The highest of each step's parts, scores f32[B, K*T, G, U]: a selection [B, K, T*H, k_max]."""
    best = top_k_grouped(parts, group_reduce, candidates.k_max)
    rank = jnp.arange(candidates.k_max)[None, None, None]
    valid = best.valid & (rank < candidates.of_groups(candidates.k))
    return Selection(join_steps(best.slots, candidates.steps), join_steps(valid, candidates.steps))


def _select_1bit_limit(kernel: Any, a: Any) -> str | None:
    q, keys, candidates = a.q, a.keys, a.candidates
    candidates.require(keys.bits.shape[2], 1)
    step_q = jax.ShapeDtypeStruct((*q.shape[:2], q.shape[2] // candidates.steps, q.shape[3]), q.dtype)
    pending = jax.ShapeDtypeStruct((*step_q.shape[:3], candidates.pending_slots), jnp.float32)
    return no_kernel_for(a.group_reduce) or kernel.unsupported(
        step_q, keys.bits, keys.scale, pending, a.group_reduce, candidates.k_max
    )


def _select_1bit_mosaic(kernel: Any, a: Any) -> PackedSelection:
    def one_pass(q: Array, candidates: Candidates) -> PackedSelection:
        pending, slots, steps = candidates.pending, candidates.pending_slots, candidates.steps
        how: dict[str, Any] = {"scale": a.scale, "pending_slots": slots, "local": candidates.local, "steps": steps}
        if pending[0].dtype != a.keys.scale.dtype:  # the kernel takes scores in place of keys of another dtype
            pending = join_steps(_pending_logits(q, candidates, a.scale), steps)[..., :slots], *pending[1:]
            how["pending_slots"] = None
        asked = candidates.span, pending, candidates.k, a.group_reduce, candidates.k_max
        return PackedSelection(*kernel.select_1bit(q, *a.keys, *asked, **how))

    return join_lists([one_pass(*part) for part in a.candidates.passes(a.q, kernel.PASS)])


@op(
    kernel="select.select_1bit",
    static_argnames=("group_reduce", "scale"),
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
    scale: float,
    implementation: Implementation | None = None,
) -> PackedSelection:
    """The tokens with the highest scores by 1-bit keys: `score_1bit` and `select_top` at once.

    `keys` [B, K, S, ...] are scored for q [B, K, G, D]; pending tokens have slots from S on. The token of lowest rank
    comes last, the others in any order. The kernel scores as that of `score_1bit` and ranks scores in f16, where one
    beyond 65504 is infinite; it may order tokens differently if their ranks differ by less than its rounding.
    """
    return pack(select_top(score_1bit(q, keys, scale=scale), q, candidates, group_reduce, scale=scale))


def _select_pages_limit(kernel: Any, a: Any) -> str | None:
    candidates = a.candidates
    candidates.require(a.low.shape[2], a.unit)
    keys, room, slots = candidates.pending[0], candidates.k_max, candidates.pending_slots
    return no_kernel_for(a.group_reduce) or kernel.unsupported(
        a.q, a.low, a.high, keys, a.group_reduce, room, a.unit, slots, candidates.steps
    )


def _select_pages_mosaic(kernel: Any, a: Any) -> PackedSelection:
    candidates = a.candidates
    asked = candidates.span, candidates.pending, candidates.k, a.group_reduce, candidates.k_max
    how = {"unit": a.unit, "scale": a.scale, "pending_slots": candidates.pending_slots, "local": candidates.local}
    return PackedSelection(*kernel.select_pages(a.q, a.low, a.high, *asked, **how, steps=candidates.steps))


@op(
    kernel="select.select_pages",
    static_argnames=("group_reduce", "unit", "scale"),
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
    scale: float,
    implementation: Implementation | None = None,
) -> PackedSelection:
    """The pages of `unit` tokens with the highest scores by their boxes: `score_pages` and `select_top` at once.

    Boxes have corners [B, K, P, D] and are scored for q [B, K, G, D]; pending pages are numbered from P on. The page of
    lowest rank comes last, the others in any order. The kernel scores as that of `score_pages`, pending keys too; it
    may order pages differently if their ranks differ by less than rounding.
    """
    scores = score_pages(q, low, high, scale=scale)
    return pack(select_top(scores, q, candidates, group_reduce, unit=unit, scale=scale))


def _select_4bit_limit(kernel: Any, a: Any) -> str | None:
    candidates = a.candidates
    candidates.require(a.listed.slots.shape[3], 1)
    pending = candidates.pending[0], candidates.k_max, candidates.pending_slots
    return kernel.unsupported(a.q, *a.keys, a.listed.slots, *pending)


def _select_4bit_mosaic(kernel: Any, a: Any) -> PackedSelection:
    candidates, fixed = a.candidates, {"centres": centres(), "turned": turned(a.q.shape[-1], a.seed)}
    how = {"scale": a.scale, "pending_slots": candidates.pending_slots, "local": candidates.local}
    asked = candidates.pending, candidates.k, candidates.k_max
    return PackedSelection(*kernel.select_4bit(a.q, *a.keys, a.listed, *asked, **how, **fixed))


@op(
    kernel="select.select_4bit",
    static_argnames=("seed", "scale"),
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
    scale: float,
    implementation: Implementation | None = None,
) -> PackedSelection:
    """The tokens with the highest scores by 4-bit codes for each query head: `rerank` and the selection at once.

    Stored candidates are the `listed` slots [B, K, G, M] of `keys` [B, K, S, ...], whatever `candidates.span` says,
    scored for q [B, K, G, D] rotated by `seed`; pending tokens have slots from S on. The token of lowest rank comes
    last, the others in any order. The kernel ranks scores in f16, as that of `select_1bit`.
    """
    M, S = listed.slots.shape[3], keys.signs.shape[2]
    candidates.require(M, 1)
    estimates = rerank(rotate_few(q, seed), keys, listed, scale=scale)
    pending = candidates.pending_units(_pending_logits(q, candidates, scale))
    stored = split_steps(estimates, candidates.steps), split_steps(listed.valid, candidates.steps)
    best = _highest([stored, pending], "per_head", candidates)
    slots = jnp.take_along_axis(listed.slots, jnp.minimum(best.slots, M - 1), axis=-1)
    slots = jnp.where(best.slots < M, slots, best.slots - M + S)
    return pack(Selection(slots, best.valid))
