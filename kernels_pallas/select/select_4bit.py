"""The slots that a query ranks highest by 4-bit codes among candidates, from query to slots in
two kernels.

**Scores** are computed by the code of `rerank` and stored in f16. A block without candidates
ends at once. Extra blocks at the end of the same grid score the pending keys, one key a thread,
with the query rounded to the dtype of the keys. In the other blocks, one warp rotates the
query.

**The selection** is `units.select_units` with one head; it writes the slot of each selected
candidate. Counts, starts and stops are read from the cache and clipped in the kernel.

**Bytes:** those of `rerank` with 2 bytes written a candidate; 2 D read and 2 written a pending
key; 2 read a unit; 4 read and written a selected unit.

**Bound:** latency of reads of 32 bytes at random.

**Limits:** `unsupported`. Evidence: `benchmarks/NOTES.md`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.kernels_pallas import simt, tuned
from kvjax.kernels_pallas.score import rerank
from kvjax.kernels_pallas.score.score_1bit import halves
from kvjax.kernels_pallas.select import tiling, top_k, units
from kvjax.kernels_pallas.select.rule import How
from kvjax.kernels_pallas.simt import Word, instr, loop, ptx, real, when, word

MEASURED: str | None = "2026-11-22"  # the date in benchmarks/results/select_4bit.json


@dataclass(frozen=True)
class Config(rerank.Config, tiling.Config):
    """Block sizes: `blocks` and `unroll` of the selection, `warpgroups` of the scores."""

    def __post_init__(self) -> None:
        tiling.Config.__post_init__(self)
        rerank.Config.__post_init__(self)


def config_for(
    rows: int, M: int, pending_slots: int, target: simt.Target | None = None
) -> Config:
    """No more loads in flight than a thread has fours."""
    U = sum(units.padded(M, pending_slots))
    rule = tiling.config_for(rows, U, target)
    # 20 keys of a thread
    fits = (n for n in range(1, 6) if tiling.in_one_step(U, replace(rule, unroll=n)))
    scores = rerank.config_for(rows, M, pending_slots, target)
    return Config(rule.blocks, next(fits, 4), rule.cluster, warpgroups=scores.warpgroups)


def smem_bytes(D: int) -> int:
    """Shared memory of a block of the scores or of the selection, whichever is larger."""
    return max(rerank.smem_bytes(D), 4 * sum(units.SCRATCH))


def unsupported(
    q: Any,
    signs: Any,
    sizes: Any,
    weights: Any,
    slots: Any,
    pending: Any,
    room: int,
    pending_slots: int,
) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    if limit := rerank.unsupported(q, signs, sizes, weights, slots):
        return limit.replace("rerank", "select_4bit", 1)
    if pending.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the kernel select_4bit takes pending keys in bf16 or f16; got {pending.dtype}"
    if not 1 <= pending_slots <= pending.shape[2]:
        return f"the kernel select_4bit takes 1 to {pending.shape[2]} pending keys; got {pending_slots}"
    if limit := top_k.unsupported(
        (q.shape[0], sum(units.padded(slots.shape[3], pending_slots))), jnp.float32, room
    ):
        return limit.replace("top_k", "select_4bit", 1)
    return None


@simt.lowered_once("room", "centres", "scale", "turned", "pending_slots", "local", "config")
def select_4bit(
    q: Array,
    signs: Array,
    sizes: Array,
    weights: Array,
    candidates: Sequence[Array],
    pending: Sequence[Array | int],
    count: Array | int,
    room: int,
    *,
    centres: tuple[float, ...],
    scale: float,
    turned: int,
    pending_slots: int,
    local: int = 0,
    config: Config | None = None,
) -> tuple[Array, Array]:
    """(slots i32[B, K, G, room], found i32[B, K, G]) of the `count` units that each query ranks
    highest.

    Units are `candidates` = (slots i32[B, K, G, M], found i32[B, K, G]), the first `found`,
    scored as in `rerank` for q [B, K, G, D], rotated as `turned` says (`rotate.turned`); and
    after all S slots of the codes those of `pending` = (keys [B, K, R, D], start, stop) without
    the `local` before its stop, scored for q, of which the first `pending_slots` may be
    pending. Count, start and stop are i32[B], i32[B, T] for the heads of T steps, or a number
    for all.
    """
    slots, found = candidates
    keys, *numbers = pending
    assert not isinstance(keys, int)
    if limit := unsupported(q, signs, sizes, weights, slots, keys, room, pending_slots):
        raise NotImplementedError(limit)
    B, K, G, D = q.shape
    M = slots.shape[3]
    R = keys.shape[2]
    config = config or tuned.select(
        "select_4bit",
        config_for(B * K * G, M, pending_slots, simt.target((q, signs))),
        (q, signs),
        rows=B * K * G,
        M=M,
        W=pending_slots,
        room=room,
        G=G,
        D=D,
    )
    ends = (found.reshape(-1), *(simt.by_step(x, K) for x in (*numbers, count)))
    codes = (a.reshape(B * K, *a.shape[2:]) for a in (signs, sizes, weights))
    how = tuple(map(float, centres)), scale, turned, pending_slots, local, room, config
    heads = q.astype(jnp.float32).reshape(B * K * G, D), slots.reshape(B * K * G, M)
    args = *ends, *heads, keys.reshape(B * K, R, D), *codes
    slots, many = _select(how, *args)
    return slots.reshape(B, K, G, room), many.reshape(B, K, G)


def _select(how: tuple[Any, ...], *args: Array) -> tuple[Array, Array]:
    """(slots, count) from `args`: found, start, stop and count, whose numbers of heads divide
    the rows; then queries, candidates, pending keys and codes."""
    centres, scale, turned, pending_slots, local, room, config = how
    heads, D = args[4].shape
    M = args[5].shape[1]
    rows, R, _ = args[6].shape
    S = args[7].shape[1]
    parts = units.padded(M, pending_slots)
    threads = 128 * config.warpgroups
    of_pending = rerank.Split(-(-pending_slots // threads), threads, threads)
    shares = rerank.split(heads, M, config, heads * of_pending.blocks, simt.target(args))

    @simt.over_rows(functools.partial(_select, how))
    def run(*args: Array) -> tuple[Array, Array]:
        ends = args[:4]
        q, slots, keys, *codes = args[4:]
        blocks = heads * shares.blocks
        scores = simt.kernel(
            functools.partial(
                _scores,
                sizes=(heads // rows, S, D, M),
                pending=(R, pending_slots),
                shares=(shares, of_pending),
                blocks=blocks,
                kind=keys.dtype,
                how={"centres": centres, "scale": scale, "turned": turned},
            ),
            name="kvjax_select_4bit_score",
            out_type=tuple(jax.ShapeDtypeStruct((heads, n), jnp.float16) for n in parts),
            scratch=(rerank.BYTES * rerank.COPIES * 2, D),
            blocks=blocks + heads * of_pending.blocks,
            warpgroups=config.warpgroups,
        )(ends[0], q, slots, keys, *codes)
        spans = jnp.zeros(1, jnp.int32), *ends
        inputs = units.Inputs(spans, [a[:, None] for a in scores], names=slots)
        chosen = How(heads, room, (M, pending_slots), "per_head", config, local, beyond=S)
        return units.select_units("kvjax_select_4bit", inputs, chosen)

    return run(*args)


def _scores(
    found_m, q_m, slots_m, keys_m, signs_m, sizes_m, weights_m, out_m, pending_m, table_m, queries_m,
    *, sizes: tuple[int, int, int, int], pending: tuple[int, int], shares: tuple[rerank.Split, rerank.Split],
    blocks: int, kind: Any, how: dict[str, Any],
) -> None:  # fmt: skip
    """Scores of candidates in the first `blocks` and of pending keys in the others, as `shares`
    divides them.
    """
    G, _, D, M = sizes
    R, pending_slots = pending
    block = simt.special("ctaid.x")
    codes = (signs_m, sizes_m, weights_m)
    scratch = (table_m, queries_m)
    place = rerank.Place(block, sizes, shares[0])
    with when(block < blocks):
        slot = place.slot(slots_m)  # loaded together with `found`
        exists = place.first < simt.clipped(simt.number_of((found_m, 1), place.head), M)
        run = functools.partial(rerank.estimate, q_m, slot, codes, scratch, place, **how)
        estimate = simt.branch(exists, lambda: [run()], [word(0)])
        _store(out_m, place, *estimate)
    with when(block >= blocks):
        place = rerank.Place(block - blocks, (G, 0, D, pending_slots), shares[1])
        exact = _exact(q_m, keys_m, queries_m, place, R, kind)
        _store(pending_m, place, instr("mul.f32", exact, real(how["scale"])))


def _store(out_m: Any, place: rerank.Place, score: Word) -> None:
    (size,) = units.padded(place.sizes[3])
    with when(place.is_of_block & (place.candidate < size)):
        at = simt.offset(
            simt.offset_rows(simt.global_address(out_m), place.head, size * 2),
            place.candidate * 2,
        )
        ptx("st.global.u16 [$0], $1;", at, halves(score, score))


def _exact(
    q_m: Any, keys_m: Any, queries_m: Any, place: rerank.Place, R: int, kind: Any
) -> Word:
    """q.k of this thread's key, q rounded to the dtype of keys."""
    D = place.sizes[2]
    t = simt.special("tid.x")
    bf16 = kind == jnp.bfloat16
    queries = simt.shared_address(queries_m)

    def both(two: Word) -> list[Word]:
        """Two numbers in f32."""
        return [two << 16, two & 0xFFFF0000] if bf16 else simt.from_halves(two)

    with when(t < D):
        x = simt.load(simt.offset_rows(simt.global_address(q_m), place.head * D + t, 4))
        rounded = instr("cvt.rn.bf16x2.f32", x, x) if bf16 else halves(x, x)
        simt.store_shared(queries + t * 4, both(rounded)[0])
    simt.block_barrier()
    row = simt.offset_rows(simt.global_address(keys_m), place.row, R * D * 2)
    key = simt.offset(row, (place.candidate < R).select(place.candidate, R - 1) * (D * 2))

    @loop(0, D, 32, [word(0)])
    def total(first: Word, total: Word) -> Word:
        load = "ld.global.nc.v4.u32 {{$0, $1, $2, $3}}, [$4+{}];"
        words = [
            x
            for i in range(0, 64, 16)
            for x in ptx(load.format(i), simt.offset(key, first * 2), results=4)
        ]
        for i in range(0, 32, 4):
            four = simt.load_shared(queries + first * 4 + i * 4, 4)
            for x, channel in zip(
                four, [*both(words[i // 2]), *both(words[i // 2 + 1])], strict=True
            ):
                total = instr("fma.rn.f32", x, channel, total)
        return total

    return total[0]
