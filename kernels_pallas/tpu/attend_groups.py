"""Attention over selected tokens on a TPU, read in groups of the 128 that lie side by side.

A TPU takes as long to start the DMA of one token as to read many. So each aligned group with a
selected token is one DMA, of which the others are masked: the number of DMAs is that of groups
that the selection touches, whichever lists of a KV head's queries touch them. While groups are
attended, the DMAs of the next ones run.

**Bytes:** 256 (D + Dv) read a group that is touched, of a KV head.

**Bound:** bytes and DMAs alike, of a group of D = 128 on a v5e; at worst those of all keys and
values. `benchmarks/touched.py` counts the groups that methods touch.

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

GROUP = LANES  # tokens that are read at once
TOGETHER = 8  # groups that are attended at once
MOST_SCALARS = 128 << 10  # groups of all lists, whose numbers lie in the scalar memory


def unsupported(q: Any, k: Any, v: Any, slots: Any) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    B, K, G, _ = q.shape
    S, D = k.shape[2:]
    M = slots.shape[3]
    name = "the TPU's kernel attend_groups takes"
    if D % LANES or v.shape[3] % LANES:
        return f"{name} head sizes that 128 divides; got {D} and {v.shape[3]}"
    if S % GROUP or M == 0:
        return f"{name} whole groups of {GROUP} tokens; got {M} of {S} tokens"
    if G > HEADS:
        return f"{name} up to {HEADS} query heads a kv head; got {G}"
    if not k.dtype == v.dtype == jnp.dtype(jnp.bfloat16):
        return f"{name} keys and values in bf16; got {k.dtype} and {v.dtype}"
    if B * K * (S // GROUP) > MOST_SCALARS:
        return f"{name} up to {MOST_SCALARS} groups in all; got {B * K * (S // GROUP)}"
    return None


def attend_groups(
    q: Array,
    k: Array,
    v: Array,
    slots: Array,
    valid: Array,
    *,
    scale: float,
    cap: float | None = None,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """Attention of q [B, K, G, D] over the `valid` ones of `slots` [B, K, H, M] of k, v [B, K, S,
    D]: the output f32[B, K, G, Dv], and the log of the sum of exponentials f32[B, K, G].
    """
    if limit := unsupported(q, k, v, slots):
        raise NotImplementedError(limit)
    B, K, G, D = q.shape
    Dv = v.shape[3]
    H = slots.shape[2]
    rows = B * K
    marks = _marks(slots, valid, k.shape[2])
    order, count = _touched(marks)
    heads = jnp.pad(
        q.astype(jnp.bfloat16).reshape(rows, G, D), ((0, 0), (0, HEADS - G), (0, 0))
    )

    def of_row(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape), lambda i, order, count: (i, 0, 0))

    def two_parts(x: Array) -> Any:
        return pltpu.VMEM((2, TOGETHER * GROUP, x.shape[3]), x.dtype)

    out, lse = pl.pallas_call(
        partial(_program, scale=scale, cap=cap, kv_heads=K, sharing=G // H),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(rows,),
            in_specs=[
                of_row(HEADS, D),
                of_row(*marks.shape[1:]),
                pl.BlockSpec(memory_space=pltpu.HBM),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=[of_row(HEADS, Dv), of_row(HEADS, LANES)],
            scratch_shapes=[
                two_parts(k),
                two_parts(v),
                pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((rows, HEADS, Dv), jnp.float32),
            jax.ShapeDtypeStruct((rows, HEADS, LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="kvjax_attend_groups",
    )(order.reshape(-1), count, heads, marks, *(far(a, interpret) for a in (k, v)))
    out = out[:, :G].reshape(B, K, G, Dv)
    return out, lse[:, :G, 0].reshape(B, K, G)


def _marks(slots: Array, valid: Array, stored: int) -> Array:
    """i32[B*K, S/128, 128]: bit h of a token is set where list h of slots [B, K, H, M] has it.

    A TPU multiplies faster than it scatters: each list's bits are the product of the group and
    the place that its slots have, as zeros and ones. A slot is in a list once.
    """
    B, K, H, M = slots.shape
    slots = jnp.clip(slots, 0, stored - 1).reshape(B * K, H * M)
    bit = jnp.repeat(2 ** jnp.arange(H, dtype=jnp.int32), M)[None]
    weight = jnp.where(valid.reshape(B * K, H * M), bit, 0)
    groups, places = (lax.iota(jnp.int32, n)[None, None] for n in (stored // GROUP, GROUP))
    group = jnp.where(slots[..., None] // GROUP == groups, weight[..., None], 0)
    place = slots[..., None] % GROUP == places
    # The bits of up to 8 lists are below 256, which bf16 holds.
    marks = jnp.einsum(
        "rmg,rml->rgl",
        group.astype(jnp.bfloat16),
        place.astype(jnp.bfloat16),
        preferred_element_type=jnp.float32,
    )
    return marks.astype(jnp.int32)


def _touched(marks: Array) -> tuple[Array, Array]:
    """The groups with a mark, in order: i32[R, S/128], of which the first i32[R] count."""
    has = jnp.any(marks > 0, axis=2)
    groups = has.shape[1]
    order = jnp.sort(jnp.where(has, lax.iota(jnp.int32, groups)[None], groups), axis=1)
    return order, jnp.sum(has, axis=1, dtype=jnp.int32)


def _program(
    order_ref, count_ref, q_ref, marks_ref, k_ref, v_ref, out_ref, lse_ref,
    keys_ref, values_ref, done_ref, half_ref,
    *, scale: float, cap: float | None, kv_heads: int, sharing: int,
) -> None:  # fmt: skip
    """Attention of one KV head's queries over the groups that they touch, part by part; starts
    those of the next part, or of the next head's first."""
    rows = pl.num_programs(0)
    this = pl.program_id(0)
    groups = order_ref.shape[0] // rows
    arrays = (k_ref, keys_ref), (v_ref, values_ref)

    def of_part(row: Array, part: Array | int) -> Array:
        """How many groups a part of a row has."""
        return jnp.clip(count_ref[row] - part * TOGETHER, 0, TOGETHER)

    def copies(row: Array, part: Array | int, i: Array, half: Array | int) -> list[Any]:
        group = order_ref[row * groups + part * TOGETHER + i]
        from_ = pl.multiple_of(group * GROUP, GROUP)
        to = pl.multiple_of(i * GROUP, GROUP)
        return [
            pltpu.make_async_copy(
                stored.at[lax.div(row, kv_heads), lax.rem(row, kv_heads), pl.ds(from_, GROUP)],
                near.at[half, pl.ds(to, GROUP)],
                done_ref.at[half, j],
            )
            for j, (stored, near) in enumerate(arrays)
        ]

    def start(row: Array, part: Array | int, half: Array | int) -> None:
        def start_group(i: Array, carry: int) -> int:
            for copy in copies(row, part, i, half):
                copy.start()
            return carry

        lax.fori_loop(0, of_part(row, part), start_group, 0)

    def wait(row: Array, part: Array | int, half: Array | int) -> None:
        def wait_for_group(i: Array, carry: int) -> int:
            for copy in copies(row, part, i, half):
                copy.wait()
            return carry

        lax.fori_loop(0, of_part(row, part), wait_for_group, 0)

    @pl.when(this == 0)
    def _first() -> None:
        half_ref[0] = 0
        start(this, 0, 0)

    parts = pl.cdiv(count_ref[this], TOGETHER)
    head = lax.broadcasted_iota(jnp.int32, (HEADS, TOGETHER * GROUP), 0)
    own_list = lax.div(head, sharing)

    def attend_part(part: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, ...]:
        top, total, mixed = carry
        half = half_ref[0]
        half_ref[0] = 1 - half
        last = part + 1 == parts

        @pl.when(jnp.logical_not(last))
        def _next_part() -> None:
            start(this, part + 1, 1 - half)

        @pl.when(last & (this + 1 < rows))
        def _next_row() -> None:
            start(this + 1, 0, 1 - half)

        wait(this, part, half)
        present = of_part(this, part)
        of_groups = []
        for i in range(TOGETHER):
            place = jnp.minimum(part * TOGETHER + i, groups - 1)
            at = jnp.where(i < present, order_ref[this * groups + place], 0)
            of_groups.append(jnp.where(i < present, marks_ref[0, pl.ds(at, 1)], 0))
        marks = jnp.broadcast_to(jnp.concatenate(of_groups, axis=1), head.shape)
        valid = (lax.shift_right_logical(marks, own_list) & 1) > 0

        scores = product(q_ref[0], keys_ref[half], (1, 1)) * scale
        scores = scores if cap is None else cap * jnp.tanh(scores / cap)
        scores = jnp.where(valid, scores, -jnp.inf)
        higher = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
        shift = jnp.where(higher == -jnp.inf, 0.0, higher)  # of a list without a token so far
        weights = jnp.exp(scores - shift)
        before = jnp.exp(top - shift)

        # A value that no list has may be NaN, which a weight of 0 would keep. The matrix unit
        # turns the flags of tokens, which lie in a row, into a column.
        flags = jnp.where((marks > 0) & (head == 0), 1.0, 0.0).astype(jnp.bfloat16)
        ones = jnp.ones((HEADS, values_ref.shape[2]), jnp.bfloat16)
        kept = product(flags, ones, (0, 0)) > 0
        values = jnp.where(kept, values_ref[half].astype(jnp.float32), 0.0)

        added = product(weights.astype(jnp.bfloat16), values.astype(jnp.bfloat16), (1, 0))
        total = total * before + jnp.sum(weights, axis=1, keepdims=True)
        return higher, total, mixed * before + added

    empty = (
        jnp.full((HEADS, 1), -jnp.inf, jnp.float32),
        jnp.zeros((HEADS, 1), jnp.float32),
        jnp.zeros((HEADS, values_ref.shape[2]), jnp.float32),
    )
    top, total, mixed = lax.fori_loop(0, parts, attend_part, empty)

    # A row without a token has no part that starts the next row.
    @pl.when((parts == 0) & (this + 1 < rows))
    def _after_none() -> None:
        start(this + 1, 0, half_ref[0])

    shift = jnp.where(top == -jnp.inf, 0.0, top)
    out_ref[0] = mixed / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    lse_ref[0] = jnp.broadcast_to(jnp.log(total) + shift, lse_ref.shape[1:])
