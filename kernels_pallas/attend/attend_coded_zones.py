"""Attention of a retrieval step over a history of rotated codes, a recent block and a sink, in
one kernel.

The kernel of `attend_slots`, whose first zone has codes of rotated directions. They are decoded
in registers, 32 slots a warp, and are never in shared memory. Each warp rotates the query on
`mma`, and turns its mix back before it attends to exact slots, which the selection may also
have. The offset of the keys adds one number to a query's logits.

**Bytes:** D (b_k + b_v) / 8 + 4 of a selected slot read, 2 D e of an exact one; 4 for each
selected slot.

**Bound:** latency for few slots, instructions for many: 700 a warp and 32 slots.

**Limits:** `unsupported`. Evidence: `benchmarks/NOTES.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import Array

from kvjax.kernels_pallas.attend import attend_zones as exact
from kvjax.kernels_pallas.attend.attend_slots import Config
from kvjax.kernels_pallas.attend.directions import Coded
from kvjax.kernels_pallas.attend.softmax import Scale

MEASURED: str | None = "2026-11-26"  # the date in benchmarks/results/turbo_step.json
TAKES = ("soft caps", "sinks")
NAME = "attend_coded_zones"


def unsupported(
    q: Any,
    keys: Any,
    values: Any,
    slots: Any,
    recent: Any,
    sink: Any,
    local: int,
    config: Config | None = None,
) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    B, K, S, _ = keys[0].shape
    D = q.shape[3]
    bits = [8 * sum(a.shape[3] for a in code[:2]) // D for code in (keys, values)]
    if D not in (64, 128):
        return f"the kernel {NAME} takes head sizes 64 and 128; got D={D}"
    if any(b not in (2, 3, 4, 8) for b in bits):
        return (
            f"the kernel {NAME} takes codes of 2, 3, 4 and 8 bits; got {bits[0]} and {bits[1]}"
        )
    if any(code[2].shape[3] != 1 or code[2].dtype != "uint16" for code in (keys, values)):
        return f"the kernel {NAME} takes one weight a token, in u16; got {keys[2].dtype}{list(keys[2].shape)}"
    history = jax.ShapeDtypeStruct((B, K, S, D), recent[0].dtype)
    limit = exact.unsupported(q, history, history, slots, recent, sink, local, config=config)
    return limit and limit.replace("attend_zones", NAME, 1)


def attend_coded_zones(
    q: Array,
    keys: Sequence[Array],
    values: Sequence[Array],
    offset: Array,
    slots: Array,
    known: Array,
    recent: Any,
    sink: Any,
    local: int,
    sinks: Array | None = None,
    *,
    centres: tuple[tuple[float, ...], tuple[float, ...]],
    turned: int,
    scale: float,
    cap: float | None = None,
    part: bool = False,
    config: Config | None = None,
) -> Any:
    """As `attend_zones`, over the slots of codes: signs u8[B, K, S, D/8], sizes u8[B, K, S,
    (b-1) D/8] and weights u16[B, K, S, 1] of keys, which lack their `offset` f32[B, K, D], and
    of values.

    `centres` are the sizes of keys and of values by index, none for 8 bits; `turned` are the
    signs of the rotation. `cap` is a soft cap of the logits.
    """
    if limit := unsupported(q, keys, values, slots, recent, sink, local, config):
        raise NotImplementedError(limit)
    _, _, S, _ = keys[0].shape
    D = q.shape[3]
    key_bits, value_bits = (
        8 * sum(a.shape[3] for a in code[:2]) // D for code in (keys, values)
    )
    zone = Coded(S, D, (key_bits, value_bits), centres, turned)
    codes = (*keys, *values, offset)
    return exact.attend(
        q,
        codes,
        slots,
        known,
        recent,
        sink,
        local,
        sinks,
        name=NAME,
        scale=Scale(scale, cap),
        part=part,
        config=config,
        coded=zone,
    )
