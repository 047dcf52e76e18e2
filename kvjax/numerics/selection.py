"""Selection: from scores of units to the slots that a query attends to.

Scores are per query head. `group_reduce` reduces them to one score per unit and kv head, so
that the G heads of a group read the same tokens. Ties go to the lower slot. Softmax pooling is
done on logarithms, so that scores far below the top do not underflow to a tie.

**Source:** the rules as used by ParisKV (mean of queries), ArkVale (mean of scores), ShadowKV
(max of softmax), PQCache (sum of softmax) and FreeKV (mean of softmax, and in its ablation the
maximum of scores, which no kernel implements). Sum and mean of softmax give the same ranks;
both names are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.tree_util import register_dataclass

from kvjax.numerics.blocks import put_last
from kvjax.numerics.partial import Logits, attention_logits
from kvjax.numerics.types import Bool, Float, Int32

GroupReduce = Literal[
    "mean_query",
    "mean_score",
    "max_score",
    "max_softmax",
    "sum_softmax",
    "mean_softmax",
    "per_head",
]
GROUP_REDUCES: tuple[str, ...] = get_args(GroupReduce)


class Selection(NamedTuple):
    """The slots that a step attends to. H is 1 where a group shares them, G where each query
    head has its own.
    """

    # Store slots, unique among the valid ones; in range even where not valid.
    slots: Int32[Array, "B K H M"]
    valid: Bool[Array, "B K H M"]


class PackedSelection(NamedTuple):
    """A selection whose valid slots come first, in any order. Its readers need no mask."""

    slots: Int32[Array, "B K H M"]  # as in a Selection
    found: Int32[Array, "B K H"]  # the first `found` slots are valid

    @property
    def valid(self) -> Bool[Array, "B K H M"]:
        """Which slots are valid: the first `found`."""
        return (
            jnp.arange(self.slots.shape[3], dtype=jnp.int32)[None, None, None]
            < self.found[..., None]
        )


class DealtSelection(NamedTuple):
    """A selection among the tokens of several devices, and the part of it that this device
    attends to.
    """

    slots: Int32[Array, "B K H M"]  # as in a Selection, of the whole history
    valid: Bool[Array, "B K H M"]
    own: Selection | PackedSelection  # in slots of this device


class UnitScores(NamedTuple):
    """Scores of units of one kind, such as those of the history or the pending ones, and which
    of the units compete.
    """

    scores: Float[Array, "B K G U"]
    valid: Bool[Array, "B _ _ U"]  # [B, 1 or K, 1, U], or [B, K, G, U] under "per_head"


def unpack(selection: Selection | PackedSelection | DealtSelection) -> Selection:
    """A selection with a mask of its valid slots."""
    return (
        selection
        if isinstance(selection, Selection)
        else Selection(selection.slots, selection.valid)
    )


def pack(selection: Selection) -> PackedSelection:
    """Packs a selection whose valid slots already come first."""
    return PackedSelection(selection.slots, jnp.sum(selection.valid, axis=-1, dtype=jnp.int32))


def split_steps(x: Array, steps: int) -> Array:
    """[B, K, T*H, ...] of T steps as [B, K*T, H, ...]: each step of a KV head is its own group."""
    B, K, lists, *rest = x.shape
    return x if steps == 1 else x.reshape(B, K * steps, lists // steps, *rest)


def join_steps(x: Array, steps: int) -> Array:
    """[B, K*T, H, ...] as [B, K, T*H, ...]: the inverse of `split_steps`."""
    B, groups, heads, *rest = x.shape
    return x if steps == 1 else x.reshape(B, groups // steps, steps * heads, *rest)


@partial(
    register_dataclass,
    data_fields=("span", "pending", "k", "dense", "last"),
    meta_fields=(
        "k_max",
        "pending_slots",
        "local",
        "steps",
        "window",
        "num_sorted_last",
        "stored_slots",
    ),
)
@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The units that compete in a selection, and how many to select. Starts, stops and k are
    i32[B], or one number.

    A unit is a token or a page of tokens. Stored units are those of the index with a token in
    `span`. Pending units have recent tokens that are not yet indexed: their keys are scored
    exactly, and a page has the score of its best token. They are numbered on from the stored
    units.

    Several `steps` may select at once, each on its own: queries are [B, K, T*G, D], each step's
    after the previous step's, and a selection has the lists of all steps in the same order, [B,
    K, T*H, M]. Stops and k may then differ by step, i32[B, T], and so may the pending keys, [B,
    K, T, R, D].
    """

    span: tuple[Array | int, Array]  # start and stop of the slots of the index
    # Recent keys [B, K, R, D], start and stop of their slots.
    pending: tuple[Array, Array | int, Array | int]
    k: Array | int  # units to select
    k_max: int  # most units that any row selects
    pending_slots: int  # only the first of the R keys, in whole units, can be pending
    local: int = 0  # tokens before the stop of `pending` that do not compete, because every step attends to them
    steps: int = 1  # decode steps whose queries select at once
    # tokens that a query sees at most; the span begins where the window does
    window: int | None = None
    dense: Array | None = None  # bool[B], or by step too: rows that attend to every unit
    last: Array | None = None  # bool[B, K, U] stored units that rank after all others
    # this many units of the lowest ranks come last in the selection, in order of rank
    num_sorted_last: int = 0
    stored_slots: int | None = None  # slots of the index; None where nobody asks for them

    def fit(self, *, num_sorted_last: int, window: bool) -> bool:
        """True if a kernel can select among them that puts `num_sorted_last` units last, under
        a sliding window if `window`.

        Otherwise all scores must be computed and sorted.
        """
        fits_window = window or self.window is None
        return self.num_sorted_last <= num_sorted_last and fits_window and self.last is None

    def passes(self, q: Array, heads: int) -> Iterator[tuple[Array, Candidates]]:
        """Splits the steps into passes of at most `heads` query heads: queries [B, K, T'*G, D]
        and candidates of each.

        A pass has at least one step.
        """
        step_heads = q.shape[2] // self.steps
        pass_steps = max(heads // step_heads, 1)
        for first in range(0, self.steps, pass_steps):
            steps = slice(first, min(first + pass_steps, self.steps))

            def part(number: Any, steps: slice = steps) -> Any:
                return (
                    number[:, steps]
                    if isinstance(number, Array) and number.ndim == 2
                    else number
                )

            keys, start, stop = self.pending
            candidates = replace(
                self,
                span=(part(self.span[0]), part(self.span[1])),
                pending=(
                    keys if keys.ndim == 4 else keys[:, :, steps],
                    part(start),
                    part(stop),
                ),
                k=part(self.k),
                dense=part(self.dense),
                steps=steps.stop - steps.start,
            )
            yield q[:, :, steps.start * step_heads : steps.stop * step_heads], candidates

    def require(self, stored: int, unit: int) -> None:
        """Raises ValueError if these sizes do not fit an index of `stored` units of `unit`
        tokens.
        """
        keys = self.pending[0].shape[-2]
        slots = self.pending_slots
        if unit < 1 or slots % unit or not 0 < slots <= keys:
            raise ValueError(
                f"Candidates(pending_slots={slots}) must be whole pages of {unit} tokens among the {keys} recent keys"
            )
        if self.k_max > stored + slots // unit:
            raise ValueError(
                f"Candidates(k_max={self.k_max}) is more than the {stored} stored and {slots // unit} pending units"
            )

    def of_groups(self, number: Array | int) -> Array:
        """i32[B or 1, 1, 1, 1] of i32[B] or of a number; i32[B, K*T, 1, 1] of i32[B, T]."""
        number = jnp.asarray(number, jnp.int32)
        if number.ndim < 2:
            return number.reshape(-1, 1, 1, 1)
        return jnp.tile(number, (1, self.pending[0].shape[1]))[:, :, None, None]

    def pending_units(self, q: Array, logits: Logits, unit: int = 1) -> UnitScores:
        """Exact scores f32[B, K*T, G, W] of the pending units for q [B, K, T*G, D], and which
        of them exist, bool[B, 1 or K*T, 1, W]."""
        keys, start, stop = self.pending
        if keys.ndim == 4:
            scores = split_steps(attention_logits(q, keys, logits), self.steps)
        else:
            own = keys.reshape(keys.shape[0], -1, *keys.shape[3:])
            scores = attention_logits(split_steps(q, self.steps), own, logits)
        scores = scores[..., : self.pending_slots]
        valid = self.inside(start, stop - self.local, self.pending_slots)
        if unit == 1:
            return UnitScores(scores, valid)
        # A page has the score of its best token, and exists if any of them does.
        pages = self.pending_slots // unit
        scores = jnp.where(valid, scores, -jnp.inf).reshape(*scores.shape[:3], pages, unit)
        best = jnp.max(scores, axis=-1)
        exists = jnp.any(valid.reshape(*valid.shape[:3], pages, unit), axis=-1)
        return UnitScores(best, exists)

    def tokens(self, units: Selection, stored: int, unit: int) -> Selection:
        """Returns the tokens of selected units that are candidates themselves, for an index of
        `stored` units.
        """
        if unit == 1:
            return units
        slots = (
            units.slots[..., None] * unit
            + jnp.arange(unit, dtype=jnp.int32)[None, None, None, None]
        )
        valid = jnp.broadcast_to(units.valid[..., None], slots.shape)
        shape = *slots.shape[:3], -1
        slots = split_steps(slots.reshape(shape), self.steps)
        valid = split_steps(valid.reshape(shape), self.steps)
        start, stop = self.span
        _, first, end = self.pending
        start, stop, first, end = map(self.of_groups, (start, stop, first, end - self.local))
        recent = slots - stored * unit
        inside = jnp.where(
            recent < 0, (slots >= start) & (slots < stop), (recent >= first) & (recent < end)
        )
        return Selection(join_steps(slots, self.steps), join_steps(valid & inside, self.steps))

    def inside(self, start: Array | int, stop: Array | int, units: int, unit: int = 1) -> Array:
        """Says which units of `unit` slots have one from start to stop: bool[B, 1 or K*T, 1,
        units].
        """
        start = self.of_groups(start)
        stop = self.of_groups(stop)
        slot = lax.mul(lax.broadcasted_iota(jnp.int32, (1, 1, 1, units), 3), np.int32(unit))
        inside = (slot > start - unit) & (slot < stop)
        if unit > 1:  # an empty span that begins within a unit has none either
            inside &= start < stop
        return jnp.broadcast_to(inside, (self.pending[0].shape[0], *inside.shape[1:]))


def by_row(number: Array | int) -> Array:
    """i32[B, 1, 1, 1] of i32[B]; i32[1, 1, 1, 1] of a number."""
    return jnp.reshape(jnp.asarray(number, jnp.int32), (-1, 1, 1, 1))


def no_kernel_for(group_reduce: GroupReduce) -> str | None:
    """Why the kernels cannot rank units by this rule; None if they can."""
    known = group_reduce in GROUP_REDUCES and group_reduce != "max_score"
    return None if known else f"the kernels do not reduce a group by {group_reduce}"


def reduce_queries(q: Array, group_reduce: GroupReduce, steps: int = 1) -> Array:
    """Returns the queries f32[B, K, T*G', D] to score for q [B, K, T*G, D] of T steps: under
    `mean_query` their mean in each step (G' = 1), else all.
    """
    q = q.astype(jnp.float32)
    if group_reduce != "mean_query":
        return q
    return join_steps(jnp.mean(split_steps(q, steps), axis=2, keepdims=True), steps)


def join_lists(parts: Sequence[PackedSelection]) -> PackedSelection:
    """Returns the selections of some steps, one after the other."""
    if len(parts) == 1:
        return parts[0]
    return PackedSelection(
        *(jnp.concatenate(same, axis=2) for same in zip(*parts, strict=True))
    )


SOFTMAX_REDUCES = ("max_softmax", "sum_softmax", "mean_softmax")
_REDUCES: dict[str, Callable[..., Array]] = {
    "mean_query": jnp.mean,
    "mean_score": jnp.mean,
    "max_score": jnp.max,
    "max_softmax": jnp.max,
    "sum_softmax": jax.nn.logsumexp,
    "mean_softmax": jax.nn.logsumexp,
}


def reduce_scores(
    parts: Sequence[tuple[Array, Array]], group_reduce: GroupReduce, total: Array | None = None
) -> Array:
    """Ranks of the units of all parts, one part after the other: f32[B, K, H, U].

    A part is a `UnitScores`, or such a pair. Units that are not valid have rank -inf. Softmax is
    over the units of all parts together, or over those whose log of a sum of exponentials is
    `total` f32[B, K, G, 1].
    """
    if group_reduce not in GROUP_REDUCES:
        raise ValueError(
            f"group_reduce={group_reduce!r} must be one of {', '.join(GROUP_REDUCES)}"
        )
    scores = [jnp.where(valid, score, -jnp.inf) for score, valid in parts]
    if group_reduce == "per_head":
        return jnp.concatenate(scores, axis=-1)

    # For a softmax, each head's scores less the log of their sum of exponentials.
    if group_reduce in SOFTMAX_REDUCES:
        if total is None:
            sums = [jax.nn.logsumexp(one, axis=-1, keepdims=True) for one in scores]
            total = jax.nn.logsumexp(jnp.concatenate(sums, axis=-1), axis=-1, keepdims=True)
        shift = jnp.where(jnp.isneginf(total), 0.0, total)
        scores = [one - shift for one in scores]

    # The heads of a group become one.
    reduce = _REDUCES[group_reduce]
    pooled = jnp.concatenate([reduce(one, axis=2, keepdims=True) for one in scores], axis=-1)
    if group_reduce == "mean_softmax":
        return pooled - jnp.log(scores[0].shape[2])  # a mean over the group, not a sum
    return pooled


def in_order(numbers: Array) -> Array:
    """u32 of f32 without NaN, in the order of `lax.top_k`: -0 is below 0."""
    bits = lax.bitcast_convert_type(numbers, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def of_order(keys: Array) -> Array:
    """The f32 numbers of which `in_order` makes keys u32."""
    bits = jnp.where(keys >> 31 == 1, keys & jnp.uint32((1 << 31) - 1), ~keys)
    return lax.bitcast_convert_type(bits, jnp.float32)


def split_selection(
    selection: Selection | PackedSelection, slots: int
) -> tuple[Selection, Selection]:
    """Splits a selection into the part in the first `slots` slots and the part past them, with
    slots counted from 0.
    """
    inside = selection.slots < slots
    past = ~inside
    return (
        Selection(jnp.where(inside, selection.slots, 0), selection.valid & inside),
        Selection(jnp.where(past, selection.slots - slots, 0), selection.valid & past),
    )


def of_lists(number: Array | int, lists: int) -> Array:
    """i32[B or 1, 1, 1] of i32[B] or of a number; i32[B, 1, lists] of i32[B, T], step after
    step.
    """
    number = jnp.asarray(number, jnp.int32)
    if number.ndim < 2:
        return number.reshape(-1, 1, 1)
    return jnp.repeat(number, lists // number.shape[1], axis=1)[:, None]


def membership(selection: Selection, slots: int) -> Array:
    """Says which of S slots are selected: bool[B, K, H, S]."""
    at = jnp.where(selection.valid, selection.slots, slots)
    return put_last(jnp.zeros((*at.shape[:-1], slots), bool), at, True)


def set_recall(selection: Selection, wanted: Selection, slots: int) -> Array:
    """Share of the wanted slots that were selected; 1 where none is wanted: f32[B, K, H]."""
    got = membership(selection, slots)
    want = membership(wanted, slots)
    hit = jnp.sum(got & want, axis=-1, dtype=jnp.float32)
    return jnp.where(
        jnp.any(want, axis=-1),
        hit / jnp.maximum(jnp.sum(want, axis=-1, dtype=jnp.float32), 1.0),
        1.0,
    )


def mass_recall(selection: Selection, logits: Array, valid: Array) -> Array:
    """Share of softmax mass of logits f32[B, K, G, S], where `valid` [B, S], that the selection
    holds: f32[B, K, G].
    """
    weights = jax.nn.softmax(jnp.where(valid[:, None, None], logits, -jnp.inf), axis=-1)
    return jnp.sum(jnp.where(membership(selection, logits.shape[-1]), weights, 0.0), axis=-1)
