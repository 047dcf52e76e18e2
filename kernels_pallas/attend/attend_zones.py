"""Attention of a whole retrieval step in one kernel: selected slots, local window and sink.

The kernel of `attend_slots` runs over one numbering of slots that continues from the store to
the recent block and the sink. For each slot that it copies, it compares which zone has the
slot. Warps derive the slots of the window and the sink from their spans. A count, or -1 in the
list, says where nothing was selected. The store may consist of two arrays, such as the tokens
that FreeKV recalled one step before and the tokens that it recalls in this step.

**Bytes:** 2 D e M read a row, where e is the size of an element and M counts all attended
slots; 4 for each selected slot; e g D written.

**Bound:** as `attend_slots`.

**Limits:** `unsupported`. Evidence: `benchmarks/NOTES.md`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.kernels_pallas import simt, tuned
from kvjax.kernels_pallas.attend import attend_slots as one_zone
from kvjax.kernels_pallas.attend import softmax
from kvjax.kernels_pallas.attend.attend_slots import Config, config_for
from kvjax.kernels_pallas.attend.directions import Coded
from kvjax.kernels_pallas.attend.softmax import KINDS

MEASURED: str | None = "2026-11-21"  # the date in benchmarks/results/attend_zones.json
TAKES = ("soft caps", "sinks")


def unsupported(
    q: Any, k: Any, v: Any, slots: Any, recent: Any, sink: Any, local: int, more: Any = None,
    config: Config | None = None,
) -> str | None:  # fmt: skip
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    B, K, H, M = slots.shape
    spans = _spans(recent, sink, local)
    all_slots = jax.ShapeDtypeStruct(
        (B, K, H, M + sum(max_slots for _, max_slots in spans)), jnp.int32
    )
    if limit := one_zone.unsupported(q, k, v, all_slots, config):
        return limit.replace("attend_slots", "attend_zones", 1)
    if str(q.dtype) not in KINDS:
        return f"the kernel attend_zones takes queries in f32, bf16 or f16; got {q.dtype}"
    others = [a for zone in (more or (), *(span[:2] for span, _ in spans)) for a in zone]
    if any(a.dtype != k.dtype for a in others):
        return f"the kernel attend_zones takes zones of one dtype; got {', '.join(str(a.dtype) for a in (k, *others))}"
    total = k.shape[2] + sum(keys.shape[2] for keys in others[::2])
    if total * k.shape[3] * 2 >= 1 << 32:
        return f"the kernel attend_zones takes rows of less than 4 GiB of keys; got {total} slots of D={k.shape[3]}"
    return None


def _spans(recent: Any, sink: Any, local: int) -> list[tuple[Any, int]]:
    """Each span, with the largest number of its slots that are attended to."""
    return [(recent, local)] + ([] if sink is None else [(sink, sink[0].shape[2])])


def attend_zones(
    q: Array,
    k: Array,
    v: Array,
    slots: Array,
    known: Array,
    recent: Any,
    sink: Any,
    local: int,
    more: tuple[Array, Array] | None = None,
    sinks: Array | None = None,
    *,
    scale: float,
    cap: float | None = None,
    part: bool = False,
    config: Config | None = None,
) -> Any:
    """[B, K, G, D] in the dtype of q [B, K, G, D]: attention over slots i32[B, K, H, M] and
    spans, merged with logits `sinks` f32[K, G] without a value.

    `known` says which slots are read, as bool[B, K, H, M], or how many of the first ones, as
    i32[B, K, H]. Slots 0 to S - 1 are those of k, v [B, K, S, D]; if given, `more`, of the same
    shape, has slots S to 2 S - 1; those of `recent` follow. `recent`, and `sink` if there is
    one, are keys and values [B, K, R, D] and start and stop i32[B] of the slots that are
    attended to, in `recent` only the last `local` of these; or i32[B, T], for each H/T lists.
    `cap` is soft. With `part`, (out f32[B, K, G, D], lse f32[B, K, G]) without sinks.
    """
    if limit := unsupported(q, k, v, slots, recent, sink, local, more, config):
        raise NotImplementedError(limit)
    return attend(
        q,
        (k, v, *(more or ())),
        slots,
        known,
        recent,
        sink,
        local,
        sinks,
        name="attend_zones",
        scale=softmax.Scale(scale, cap),
        part=part,
        config=config,
    )


@simt.lowered_once("local", "scale", "part", "config", "coded", "name")
def attend(
    q: Array, history: Sequence[Array], slots: Array, known: Array, recent: Any, sink: Any, local: int,
    sinks: Array | None, *, name: str, scale: softmax.Scale, part: bool, config: Config | None,
    coded: Coded | None = None,
) -> Any:  # fmt: skip
    """`attend_zones` over keys and values of one zone or two in `history`, or over the arrays
    of a `coded` zone.
    """
    B, K, G, D = q.shape
    H, M = slots.shape[2:]
    # a model uses [B, T, K, G, D], which XLA need not transpose
    T = recent[3].shape[1] if recent[3].ndim == 2 else 1
    found = None
    spans = _spans(recent, sink, local)
    read = M + sum(max_slots for _, max_slots in spans)
    target = simt.target((q, *history))
    config = config or tuned.select(
        name,
        config_for(B * K * H, read, D, target),
        (q, *history),
        lambda x: (
            None
            if one_zone.smem_bytes(D, x) <= target.smem
            else f"{x} exceeds shared memory for D={D}"
        ),
        rows=B * K * H,
        M=read,
        G=G // H,
        D=D,
    )
    if not M:  # a kernel reads no array without elements
        slots = jnp.zeros((B, K, H, 1), jnp.int32)
        known = jnp.zeros((B, K, H), jnp.int32)
    if known.dtype == bool:
        stored = coded.S if coded else sum(a.shape[2] for a in history[::2])
        slots = jnp.where(known, jnp.clip(slots, 0, stored + recent[0].shape[2] - 1), -1)
    else:
        found = known
    if (passes := softmax.passes_of(G // H)) > 1:
        H = H * passes
        slots = jnp.repeat(slots, passes, axis=2)
        found = None if found is None else jnp.repeat(found, passes, axis=2)
    lse = part or sinks is not None
    means = ((G // H, D), jnp.float32 if lse else q.dtype)
    if T > 1:
        q = jnp.swapaxes(q.reshape(B, K, T, G // T, D), 1, 2)
    parts = one_zone.attend(
        q.astype(recent[0].dtype).reshape(B * K * H, G // H, D),
        [
            a.reshape(B * K, *a.shape[2:])
            for zone in (history, *(span[:2] for span, _ in spans))
            for a in zone
        ],
        slots.astype(jnp.int32).reshape(B * K * H, -1),
        found=None if found is None else found.reshape(B * K * H),
        spans=[
            (simt.by_step(span[2], K), simt.by_step(span[3], K), max_slots)
            for span, max_slots in spans
        ],
        outs=(means,) if not lse else (means, ((G // H,), jnp.float32)),
        coded=coded,
        name=name,
        write=softmax.Merged.write
        if lse
        else functools.partial(_write, kind=KINDS[str(q.dtype)]),
        scale=scale,
        config=config,
        order=(K, T, H // T),
    )

    def by_head(a: Array) -> Array:
        return jnp.swapaxes(a.reshape(B, T, K, G // T, *a.shape[2:]), 1, 2).reshape(
            B, K, G, *a.shape[2:]
        )

    whole = [by_head(a) for a in parts]
    if part:
        return tuple(whole)
    return whole[0] if sinks is None else softmax.with_sinks(whole[0], whole[1], sinks, q.dtype)


def _write(merged: softmax.Merged, out: Any, *, kind: str) -> None:
    merged.write_mean(out, kind)
