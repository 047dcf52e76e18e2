"""Exact attention of a step: over spans, over selected slots, and over all zones of a cache."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array, lax

from kvjax.numerics.blocks import quotient
from kvjax.numerics.partial import (
    Logits,
    PartialAttention,
    Span,
    attend_part,
    keep_valid,
    merge,
    merge_sinks,
)
from kvjax.numerics.platforms import for_tpu, gathers_by_sparsecores
from kvjax.numerics.selection import PackedSelection, Selection, membership, split_selection
from kvjax.numerics.types import Float
from kvjax.ops import kernels
from kvjax.ops.op import Implementation, OnTpu, op


def _attend_span_mosaic(a: Any) -> Any:
    made = kernels.attend_span.attend_span(
        a.q,
        a.span.k,
        a.span.v,
        a.span.start,
        a.span.stop,
        a.sinks,
        scale=a.logits.scale,
        cap=a.logits.cap,
        part=a.part,
    )
    return PartialAttention(*made) if a.part else made


@op(
    kernel=lambda: kernels.attend_span,
    static_argnames=("logits", "part"),
    derivative="reference",
    limit=lambda a: kernels.attend_span.unsupported(a.q, *a.span),
    mosaic=_attend_span_mosaic,
)
def attend_span(
    q: Float[Array, "B K G D"],
    span: Span,
    sinks: Float[Array, "K G"] | None = None,
    *,
    logits: Logits,
    part: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    """[B, K, G, D] in the dtype of q [B, K, G, D]: attention over `span`, with sink logits; 0
    where it is empty.

    Keys outside of the span may hold anything. Each of T decode steps may have its own span:
    queries [B, K, T*G, D], each step's after the previous step's, with stop i32[B, T] and start
    alike or [B, 1]. `implementation`: see `explain`. The kernel's products read q in the dtype
    of the keys; it reads nothing outside of the span. With `part`, the result is a
    PartialAttention over Q = G, without `sinks`.
    """
    # Values outside of the span are finite, so they need no mask here: it would write a second
    # copy of them.
    whole = attend_part(q, span.k, span.v, span.mask(q.shape[2]), logits=logits)
    return whole if part else merge_sinks(whole, sinks).out.astype(q.dtype)


def _slots_on_tpu_limit(a: Any) -> str | None:
    if gathers_by_sparsecores():
        return "the SparseCores of this TPU gather tokens faster than a kernel reads them"
    if _pages_on_tpu_limit(a) is None:
        return None
    return kernels.tpu.attend_groups.unsupported(a.q, a.k, a.v, a.selection.slots)


def _pages_on_tpu_limit(a: Any) -> str | None:
    return kernels.tpu.attend_pages.unsupported(a.q, a.k, a.v, a.selection.slots, a.together)


def _slots_on_tpu(a: Any) -> PartialAttention:
    attend = kernels.tpu.attend_groups.attend_groups
    if _pages_on_tpu_limit(a) is None:
        attend = partial(kernels.tpu.attend_pages.attend_pages, together=a.together)
    part = attend(a.q, a.k, a.v, *a.selection, scale=a.logits.scale, cap=a.logits.cap)
    return PartialAttention(*part)


@op(
    kernel=lambda: kernels.attend_slots,
    static_argnames=("logits", "together"),
    derivative="reference",
    limit=lambda a: kernels.attend_slots.unsupported(a.q, a.k, a.v, a.selection.slots),
    mosaic=lambda a: PartialAttention(
        *kernels.attend_slots.attend_slots(
            a.q, a.k, a.v, *a.selection, scale=a.logits.scale, cap=a.logits.cap
        )
    ),
    on_tpu=OnTpu(limit=_slots_on_tpu_limit, mosaic=_slots_on_tpu),
)
def attend_slots(
    q: Float[Array, "B K G D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    selection: Selection,
    *,
    logits: Logits,
    together: int = 1,
    implementation: Implementation | None = None,
) -> PartialAttention:
    """Exact attention of q [B, K, G, D] over the selected slots of k, v [B, K, S, D];
    PartialAttention over Q = G.

    `implementation`: see `explain`. The kernel gathers and attends at once; its products read q
    in the dtype of k. `together`: see `gather_slots`. A TPU without SparseCores has kernels that
    read whole pages, or the groups of 128 tokens that hold a selected one.
    """
    kg, vg = gather_slots(k, v, selection, together=together)
    return attend_gathered(q, kg, vg, selection, logits=logits)


@runtime_checkable
class _AttendZones(Protocol):
    """The arguments of `attend_zones`, by which the thread leads on to its kernel."""

    q: Array
    k: Array
    v: Array
    selection: Selection | PackedSelection
    recent: Span
    sink: Span | None
    local: int
    more: tuple[Array, Array] | None
    sinks: Array | None
    logits: Logits
    part: bool


def _attend_zones_mosaic(a: _AttendZones) -> Any:
    # The kernel takes either how many slots are valid, or which.
    known = a.selection.found if isinstance(a.selection, PackedSelection) else a.selection.valid
    made = kernels.attend_zones.attend_zones(
        a.q,
        a.k,
        a.v,
        a.selection.slots,
        known,
        a.recent,
        a.sink,
        a.local,
        a.more,
        a.sinks,
        scale=a.logits.scale,
        cap=a.logits.cap,
        part=a.part,
    )
    return PartialAttention(*made) if a.part else made


@op(
    kernel=lambda: kernels.attend_zones,
    static_argnames=("local", "logits", "part", "together"),
    derivative="reference",
    limit=lambda a: kernels.attend_zones.unsupported(
        a.q, a.k, a.v, a.selection.slots, a.recent, a.sink, a.local, a.more
    ),
    mosaic=_attend_zones_mosaic,
)
def attend_zones(
    q: Float[Array, "B K G D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    selection: Selection | PackedSelection,
    recent: Span,
    sink: Span | None,
    local: int,
    more: tuple[Float[Array, "B K S D"], Float[Array, "B K S D"]] | None = None,
    sinks: Float[Array, "K G"] | None = None,
    *,
    logits: Logits,
    part: bool = False,
    together: int = 1,
    implementation: Implementation | None = None,
) -> Any:
    """[B, K, G, D] in the dtype of q [B, K, G, D]: attention of a retrieval step over
    selection, local window and sink.

    Selected slots 0 to S - 1 are those of k, v [B, K, S, D]; slots S to 2 S - 1 those of
    `more`, if given, keys and values of the same shape; the slots of `recent` follow. The local
    window is the last `local` slots of the span of `recent`, none of which are selected. `sink`
    is attended in its span, if there is one. The selection has H lists of slots, each for G/H
    query heads in turn; starts and stops are i32[B], or i32[B, T] for T decode steps. `sinks`
    are logits that only the denominator counts. `implementation`: see `explain`. The kernel's
    products read q in the dtype of k. With `part`, the result is a PartialAttention over Q = G,
    without `sinks`. `together`: see `gather_slots`.
    """
    if more is not None:
        k = jnp.concatenate([k, more[0]], axis=2)
        v = jnp.concatenate([v, more[1]], axis=2)
    recent = recent._replace(start=jnp.maximum(recent.start, recent.stop - local))
    stored, pending = split_selection(selection, k.shape[2])
    history = attend_slots(q, k, v, stored, logits=logits, together=together)
    whole = merge_beside(history, q, pending, recent, sink, logits=logits)
    return whole if part else merge_sinks(whole, sinks).out.astype(q.dtype)


def attend_beside(
    history: PartialAttention,
    q: Float[Array, "B K G D"],
    pending: Selection | None,
    recent: Span,
    sink: Span | None,
    sinks: Float[Array, "K G"] | None = None,
    *,
    logits: Logits,
) -> Float[Array, "B K G D"]:
    """[B, K, G, D] in the dtype of q [B, K, G, D]: `history` merged with attention over the
    spans of `recent` and `sink`, over the slots of `recent` that `pending` selects, and with
    `sinks`."""
    whole = merge_beside(history, q, pending, recent, sink, logits=logits)
    return merge_sinks(whole, sinks).out.astype(q.dtype)


def merge_beside(
    history: PartialAttention,
    q: Float[Array, "B K G D"],
    pending: Selection | None,
    recent: Span,
    sink: Span | None,
    *,
    logits: Logits,
) -> PartialAttention:
    """`attend_beside` as a part over Q = G, without `sinks`."""
    mask = recent.mask(q.shape[2])
    if pending is not None:
        own = membership(pending, recent.k.shape[2])  # of each list of slots
        heads_of_list = q.shape[2] // own.shape[2]
        mask |= own if own.shape[2] == 1 else jnp.repeat(own, heads_of_list, axis=2)
    parts = [history, attend_part(q, recent.k, recent.v, mask, logits=logits)]
    if sink is not None:
        parts.append(attend_part(q, sink.k, sink.v, sink.mask(q.shape[2]), logits=logits))
    return merge(*parts)


def gather_slots(
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    selection: Selection,
    *,
    together: int = 1,
) -> tuple[Float[Array, "B K HM D"], Float[Array, "B K HM D"]]:
    """Keys and values [B, K, H*M, D] of the selected slots of k, v [B, K, S, D]; slots out of
    range are clipped.

    `together` slots of each list are those of one page, in order; a TPU reads such a page at
    once.
    """

    def by_slots(k: Array, v: Array, slots: Array) -> tuple[Array, Array]:
        index = slots.reshape(*slots.shape[:2], -1, 1)
        return _taken(k, index), _taken(v, index)

    def by_pages(k: Array, v: Array, slots: Array) -> tuple[Array, Array]:
        first = slots.reshape(*slots.shape[:2], -1, together)[..., :1, None]
        # XLA would move the reshape into the branch of a flush before it, and copy what the
        # branch then returns in two shapes.
        paged = (
            a.reshape(*a.shape[:2], -1, together, a.shape[3])
            for a in lax.optimization_barrier((k, v))
        )
        kg, vg = (_taken(a, quotient(first, together)) for a in paged)
        return kg.reshape(*kg.shape[:2], -1, kg.shape[4]), vg.reshape(
            *vg.shape[:2], -1, vg.shape[4]
        )

    if together == 1 or k.shape[2] % together:
        return by_slots(k, v, selection.slots)
    return for_tpu(by_pages, by_slots, k, v, selection.slots)


def _taken(x: Array, index: Array) -> Array:
    return jnp.take_along_axis(x, index, axis=2, mode="clip")


def attend_gathered(
    q: Float[Array, "B K G D"],
    kg: Float[Array, "B K HM D"],
    vg: Float[Array, "B K HM D"],
    selection: Selection,
    *,
    logits: Logits,
) -> PartialAttention:
    """Attention of q [B, K, G, D] over selected tokens that were gathered: kg, vg [B, K, H*M,
    D], in order.
    """
    B, K, G, D = q.shape
    H, M = selection.slots.shape[2:]
    kg = kg.reshape(B, K * H, M, kg.shape[-1])
    vg = vg.reshape(B, K * H, M, vg.shape[-1])
    valid = selection.valid.reshape(B, K * H, M)
    part = attend_part(
        q.reshape(B, K * H, G // H, D),
        kg,
        keep_valid(vg, valid),
        valid[:, :, None],
        logits=logits,
    )
    return PartialAttention(part.out.reshape(B, K, G, -1), part.lse.reshape(B, K, G))
