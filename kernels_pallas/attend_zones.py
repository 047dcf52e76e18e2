"""Attention of a whole step of retrieval in one kernel: chosen slots, local window and sink.

The kernel is that of `attend_slots`, over slots that count on from the store to the recent block and to the sink: of
each slot that it copies it compares which zone that lies in. A row's places are the chosen slots, then those of the
local window, then the sink's; a warp makes the slots of the last two from their spans, and knows from a count, or from
-1 in the list, where nothing was chosen. So no list is put together, there is no attention over the recent block in
plain XLA, no merge and no conversion after it: of a FIER step's launches at 128K 4 are left of 16 (with `put_token`,
and with `select_1bit`, which scores keys that wait and clips counts itself). Slots of the store may lie in two arrays,
of which one goes on where the other ends: what FreeKV recalled a step before, and what it recalls now.

**Bytes:** 2 D e M read a row, e of an element and M of all slots attended to, and 4 of each chosen one; e g D written.
The bound on an H200 (4.3 TB/s) is 2.0 us for 8 rows of 2048 slots, D = 128 in bf16, and 16 us for 64.

**Measured** on an H200, 2026-11-21, jax 0.11.2, device time, normal random q, k, v, slots spread, in random order, 8 kv
heads, G = 4, D = 128, bf16, a store of 131072: 2047 slots and a token (FIER) 6.4 us (the reference 34 us, the reference
around the kernel `attend_slots` 18), 2032 and 16 (Quest) 6.3 us (33, 16), 1916, 128 and a sink of 4 (ParisKV) 6.5 us
(43, 27); batch 8 x 2048 of 32768 21.2 us (111, 35).

**Tried and lost**: 8 blocks of a warpgroup 7.4 us, 4 of two 8.1, 2 of two 11.8; with 64 rows 8 blocks a row take 33 us,
4 take 28 to 29.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from kvjax.kernels_pallas import _common as c
from kvjax.kernels_pallas import _softmax as softmax
from kvjax.kernels_pallas import _tuned
from kvjax.kernels_pallas import attend_slots as one_zone
from kvjax.kernels_pallas._softmax import KINDS
from kvjax.kernels_pallas.attend_slots import Config, config_for

MEASURED: str | None = "2026-11-21"  # the date in benchmarks/results/attend_zones.json


def unsupported(
    q: Any, k: Any, v: Any, slots: Any, recent: Any, sink: Any, local: int, more: Any = None,
    config: Config | None = None,
) -> str | None:  # fmt: skip
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    B, K, H, M = slots.shape
    spans = _spans(recent, sink, local)
    all_slots = jax.ShapeDtypeStruct((B, K, H, M + sum(most for _, most in spans)), jnp.int32)
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
    """Each with the most slots of it that are attended to."""
    return [(recent, local)] + ([] if sink is None else [(sink, sink[0].shape[2])])


def supported(q: Any, k: Any, v: Any, slots: Any, recent: Any, sink: Any, local: int, more: Any = None) -> bool:
    return unsupported(q, k, v, slots, recent, sink, local, more) is None


@c.lowered_once("local", "scale", "config")
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
    *,
    scale: float,
    config: Config | None = None,
) -> Array:
    """[B, K, G, D] in the dtype of q [B, K, G, D]: attention over slots i32[B, K, H, M] and spans.

    Of the slots those are read that `known` says: as bool[B, K, H, M] which, as i32[B, K, H] how many, the first. k, v
    are [B, K, S, D], slots 0 to S - 1; `more`, of the same shape, has slots S to 2 S - 1, if given; those of `recent`
    follow. `recent`, and `sink` if there is one, are keys and values [B, K, R, D] and start and stop i32[B] of the
    slots that are attended to, of `recent` the last `local` of these. `config` is chosen by the shape.
    """
    if limit := unsupported(q, k, v, slots, recent, sink, local, more, config):
        raise NotImplementedError(limit)
    B, K, G, D = q.shape
    H, M = slots.shape[2:]
    found, spans = None, _spans(recent, sink, local)
    read = M + sum(most for _, most in spans)
    chosen = config or _tuned.choose(
        "attend_zones",
        config_for(B * K * H, read, D),
        lambda x: unsupported(q, k, v, slots, recent, sink, local, more, x),
        rows=B * K * H,
        M=read,
        G=G // H,
        D=D,
    )
    if not M:  # a kernel reads no array without elements
        slots, known = jnp.zeros((B, K, H, 1), jnp.int32), jnp.zeros((B, K, H), jnp.int32)
    if known.dtype == bool:
        stored = k.shape[2] * (1 if more is None else 2)
        slots = jnp.where(known, jnp.clip(slots, 0, stored + recent[0].shape[2] - 1), -1)
    else:
        found = known.reshape(B * K * H)
    (out,) = one_zone.attend(
        q.astype(k.dtype).reshape(B * K * H, G // H, D),
        [a.reshape(B * K, -1, D) for zone in ((k, v), more or (), *(span[:2] for span, _ in spans)) for a in zone],
        slots.astype(jnp.int32).reshape(B * K * H, -1),
        found=found,
        spans=[(*(end.astype(jnp.int32) for end in span[2:]), most) for span, most in spans],
        outs=(((G // H, D), q.dtype),),
        name="attend_zones",
        write=functools.partial(_write, kind=KINDS[str(q.dtype)]),
        scale=scale,
        config=chosen,
    )
    return out.reshape(B, K, G, D)


def _write(merged: softmax.Merged, out: Any, *, kind: str) -> None:
    merged.write_mean(out, kind)
