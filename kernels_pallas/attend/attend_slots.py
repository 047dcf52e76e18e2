"""Exact attention over selected slots: one kernel gathers keys and values, scores them and
mixes the values.

Several blocks work on one row: a KV head, or a query head with its own selection. Each warp
takes 32 slots at a time and copies their keys and values into its own shared memory, so no warp
waits for another before the end. Scores are K q^T on `mma`. The weights are rounded to the
dtype of the cache and transposed in registers for the product with V. Warps merge in shared
memory, then blocks through their cluster, or without clusters in a second launch.

**Bytes:** 2 D e M read a row, where e is the size of an element, 4 M of slots, and 4 g (D + 1)
written.

**Bound:** latency for few slots, random reads for many.

**Limits:** `unsupported`. Evidence: `benchmarks/NOTES.md`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.kernels_pallas import simt, tuned
from kvjax.kernels_pallas.attend import directions, softmax
from kvjax.kernels_pallas.attend.directions import Coded
from kvjax.kernels_pallas.attend.softmax import HEADS
from kvjax.kernels_pallas.simt import Flag, Word, loop, ptx, when, word

TAKES = ("soft caps",)
MEASURED: str | None = "2026-11-21"  # the date in benchmarks/results/attend_slots.json
TILE = 32  # slots of a warp at a time
MAX_SLOTS = 4096
MAX_PARTS = 32  # blocks of a row without a cluster
NONE = 0xFFFFFFFF  # in place of a slot


@dataclass(frozen=True)
class Config:
    blocks: int = 8  # of a row
    warpgroups: int = 2  # of a block
    cluster: int = 1  # 0: the blocks are no cluster, and a second kernel merges them
    tile: int = TILE  # slots of a warp at a time

    def __post_init__(self) -> None:
        if self.cluster not in (0, 1):
            raise ValueError(f"cluster must be 0 or 1; got {self.cluster}")
        if self.cluster and self.blocks not in (1, 2, 4, 8):
            raise ValueError(f"blocks must be 1, 2, 4 or 8, a cluster's; got {self.blocks}")
        if not 1 <= self.blocks <= MAX_PARTS:
            raise ValueError(f"blocks must be 1 to {MAX_PARTS}; got {self.blocks}")
        if self.tile not in (TILE // 2, TILE):
            raise ValueError(f"tile must be {TILE // 2} or {TILE}; got {self.tile}")
        if self.warpgroups not in (1, 2, 4):
            raise ValueError(f"warpgroups must be 1, 2 or 4; got {self.warpgroups}")


def config_for(rows: int, slots: int, D: int, target: simt.Target | None = None) -> Config:
    """As many blocks per row as fit on the multiprocessors at once and have work; four warps
    for the largest heads, and where shared memory is small."""
    target = target or simt.target()
    warpgroups = 2 if D <= 128 and target.clusters else 1
    tile = TILE if smem_bytes(D, Config(1, warpgroups)) <= target.smem else TILE // 2
    max_slots = -(-slots // (tile * 4 * warpgroups))
    if not target.clusters:
        blocks = max(1, min(MAX_PARTS, max_slots, target.multiprocessors // rows))
        return Config(blocks, warpgroups, cluster=0, tile=tile)
    at_once = target.multiprocessors * 128 // 132
    return Config(
        next((b for b in (8, 4, 2) if b < 2 * max_slots and rows * b <= at_once), 1), warpgroups
    )


def smem_bytes(D: int, config: Config) -> int:
    return config.warpgroups * 4 * config.tile * softmax.row_bytes(D) * 2


def unsupported(q: Any, k: Any, v: Any, slots: Any, config: Config | None = None) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    _, _, G, D = q.shape
    H, M = slots.shape[2:]
    if D not in softmax.SIZES:
        return f"the kernel attend_slots takes head sizes {', '.join(map(str, softmax.SIZES))}; got D={D}"
    if not 1 <= G // H <= 2 * HEADS:
        return f"the kernel attend_slots takes 1 to {2 * HEADS} query heads that share a selection; got {G} for {H}"
    if k.dtype not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        return f"the kernel attend_slots takes keys and values in bf16 or f16; got {k.dtype}"
    if (v.dtype, v.shape) != (k.dtype, k.shape):
        return f"the kernel attend_slots takes values like keys, {k.dtype}{list(k.shape)}; got {v.dtype}{list(v.shape)}"
    if not 1 <= M <= MAX_SLOTS:
        return f"the kernel attend_slots takes 1 to {MAX_SLOTS} slots a row; got {M}"
    if k.shape[2] * D * 2 >= 1 << 32:
        return f"the kernel attend_slots takes rows of less than 4 GiB of keys; got k{list(k.shape)}"
    if 0 in q.shape:
        return f"the kernel attend_slots takes at least one row; got q{list(q.shape)}"
    if config and smem_bytes(D, config) > (smem := simt.target((k,)).smem):
        return f"{config} needs {smem_bytes(D, config)} bytes of shared memory for D={D}; a block has {smem}"
    return None


@simt.lowered_once("scale", "cap", "config")
def attend_slots(
    q: Array,
    k: Array,
    v: Array,
    slots: Array,
    valid: Array,
    *,
    scale: float,
    cap: float | None = None,
    config: Config | None = None,
) -> tuple[Array, Array]:
    """(out f32[B, K, G, D], lse f32[B, K, G]) of q [B, K, G, D] over the `valid` slots [B, K,
    H, M] of k, v.

    k, v are [B, K, S, D]. `cap` is a soft cap of the logits. `config` follows from the shape.
    """
    if limit := unsupported(q, k, v, slots, config):
        raise NotImplementedError(limit)
    B, K, G, D = q.shape
    S, (H, M) = k.shape[2], slots.shape[2:]
    config = config or tuned.select(
        "attend_slots",
        config_for(B * K * H, M, D, simt.target((q, k, v))),
        (q, k, v),
        lambda x: unsupported(q, k, v, slots, x),
        rows=B * K * H,
        M=M,
        G=G // H,
        D=D,
    )
    index, passes = jnp.where(valid, jnp.clip(slots, 0, S - 1), -1), softmax.passes_of(G // H)
    H *= passes
    index = jnp.repeat(index, passes, axis=2).reshape(B * K * H, M)
    out, lse = attend(
        q.astype(k.dtype).reshape(B * K * H, G // H, D),
        [a.reshape(B * K, S, D) for a in (k, v)],
        index,
        outs=(((G // H, D), jnp.float32), ((G // H,), jnp.float32)),
        name="attend_slots",
        write=softmax.Merged.write,
        scale=softmax.Scale(scale, cap),
        config=config,
    )
    return out.reshape(B, K, G, D), lse.reshape(B, K, G)


def attend(
    q: Array, kept: Sequence[Array], index: Array, *, coded: Coded | None = None, found: Array | None = None,
    spans: Sequence[tuple[Array, Array, int]] = (), outs: Sequence[tuple[tuple[int, ...], Any]],
    name: str, write: Callable[..., None], scale: softmax.Scale, config: Config,
    order: tuple[int, int, int] = (1, 1, 1),
) -> tuple[Array, ...]:  # fmt: skip
    """Runs the kernel over rows of queries [rows, heads, D] and of slots i32[rows, M], -1 where
    there is none.

    `kept` has the keys and values [rows', S, D] of each zone; slots are numbered on from zone
    to zone. If the first is `coded`, `kept` begins with its `directions.ARRAYS`, [rows', S,
    width] and [rows', D]. Slots of a row from the `found` i32[rows] on are not read either.
    `spans` are start and stop, i32[rows''] each, of each of the last zones, and how many of its
    last slots are read. `outs` are the shapes and dtypes that write(merged, *addresses) writes
    for each row. With `order` = (K, T, H) the rows of slots are those of [..., K, T, H], and
    the rows of queries and of `outs` those of [..., T, K, H].
    """
    rows, heads, D = q.shape
    lists, ends = (
        [index] if found is None else [index, found],
        [end for *two, _ in spans for end in two],
    )

    parts, arrays = 1 if config.cluster else config.blocks, directions.ARRAYS if coded else 0

    def again(q: Array, *flat: Array) -> tuple[Array, ...]:
        kept, (index, *rest) = flat[: -len(lists + ends)], flat[-len(lists + ends) :]
        found = rest.pop(0) if len(lists) == 2 else None
        two = zip(rest[::2], rest[1::2], (max_slots for *_, max_slots in spans), strict=True)
        return attend(
            q, kept, index, coded=coded, found=found, spans=list(two), outs=outs, name=name, write=write, scale=scale,
            config=config, order=order,
        )  # fmt: skip

    @simt.over_rows(again)
    def run(q: Array, *args: Array) -> tuple[Array, ...]:
        kept, index = args[: -len(lists + ends)], args[-len(lists + ends)]
        shapes = tuple(jax.ShapeDtypeStruct((rows, *shape), dtype) for shape, dtype in outs)
        of_parts = tuple(
            jax.ShapeDtypeStruct((rows, parts, *n), jnp.float32) for n in ((heads, D), (heads,))
        )
        made = simt.kernel(
            functools.partial(
                _program,
                sizes=(heads, rows // kept[0].shape[0], D, index.shape[1]),
                zones=((coded.S,) if coded else ())
                + tuple(a.shape[1] for a in kept[arrays::2]),
                coded=coded,
                max_slots=tuple(max_slots for *_, max_slots in spans),
                counted=found is not None,
                shared_by=tuple(rows // end.shape[0] for end in args[len(args) - len(ends) :]),
                strides=tuple(
                    math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in outs
                ),
                write=write,
                order=order,
                kind="bf16" if kept[-1].dtype == jnp.bfloat16 else "f16",
                scale=scale,
                config=config,
            ),
            name=f"kvjax_{name}",
            out_type=shapes if parts == 1 else of_parts,
            scratch=(smem_bytes(D, config) // 4,),
            blocks=rows * parts,
            cluster=config.blocks if config.cluster else None,
            parts=parts,
            warpgroups=config.warpgroups,
        )(q, *args)
        if parts == 1:
            return made
        place = functools.partial(simt.swapped_row, K=order[0], T=order[1], H=order[2])
        means, logs = made
        return softmax.merge_blocks(
            means, logs, outs[0][1], name=name, lse=len(outs) == 2, place=place
        )

    made: tuple[Array, ...] = run(q, *kept, *lists, *ends)
    return made


def _program(
    q_m: Any, *refs: Any, sizes: tuple[int, int, int, int], zones: tuple[int, ...], max_slots: tuple[int, ...],
    counted: bool, shared_by: tuple[int, ...], strides: tuple[int, ...], write: Callable[..., None], kind: str,
    scale: softmax.Scale, config: Config, order: tuple[int, int, int], coded: Coded | None,
) -> None:  # fmt: skip
    heads, of_zone, D, M = sizes
    places = M + sum(max_slots)
    warps, blocks, tile = 4 * config.warpgroups, config.blocks, config.tile
    t, part, row = simt.special("tid.x"), simt.part(), simt.row()
    lane, warp = t & 31, t >> 5
    rows = softmax.Rows(D, kind, lane)
    width, of_token = (
        rows.width,
        rows.of_token,
    )  # bytes of keys of one slot, in shared and in device memory
    arrays, exact = (directions.ARRAYS, zones[1:]) if coded else (0, zones)
    coded_m, refs = refs[:arrays], refs[arrays:]
    kept_m, (index_m, *rest) = refs[: 2 * len(exact)], refs[2 * len(exact) :]
    of_counts = [1] * counted + [*shared_by]
    q, index, *kept = (simt.global_address(m) for m in (q_m, index_m, *kept_m))
    q = simt.offset_rows(q, simt.swapped_row(row, *order), heads * of_token)
    index = simt.offset_rows(index, row, M * 4)
    ends, of_row = list(itertools.accumulate(zones)), simt.divide(row, of_zone)
    ends_of_exact = ends[len(zones) - len(exact) :]

    def bases(places: Sequence[Any]) -> list[Any]:
        """The address of slot 0 of this row, by zone, if the zone extended to before its first
        slot.
        """
        mine = (
            simt.offset_rows(a, of_row, n * of_token)
            for a, n in zip(places, exact, strict=True)
        )
        return [
            simt.offset_rows(a, word(e - n), -of_token)
            for a, n, e in zip(mine, exact, ends_of_exact, strict=True)
        ]

    k, v = bases(kept[::2]), bases(kept[1::2])
    *outs_m, room_m = rest[len(of_counts) :]
    parted = blocks > 1 and not config.cluster
    to = simt.special("ctaid.x") if parted else simt.swapped_row(row, *order)
    strides = (heads * D * 4, heads * 4) if parted else strides
    outs = [
        simt.offset_rows(simt.global_address(m), to, stride)
        for m, stride in zip(outs_m, strides, strict=True)
    ]
    limits = [simt.number_of(numbers, row) for numbers in zip(rest, of_counts, strict=False)]
    found, spans = (
        limits[0] if counted else None,
        list(zip(limits[counted::2], limits[counted + 1 :: 2], strict=True)),
    )
    room = simt.shared_address(room_m)
    keys = room + warp * (2 * tile * width)
    values = keys + tile * width
    steps = -(-places // (tile * warps * blocks))

    def slots_of(step: Word) -> Word:
        """The slot of this lane in tile `step` of the warp; all ones if there is none. Slots of
        the list come first, then those of the spans."""
        at = ((step * blocks + part) * warps + warp) * tile + lane
        if tile < TILE:
            at = (lane < tile).select(at, 1 << 30)
        slot = simt.load_below(at, M, simt.offset(index, at * 4), NONE)
        if found is not None:
            slot = (at < found).select(slot, NONE)
        first = M
        for (start, stop), n, end in zip(
            spans, max_slots, ends[len(zones) - len(max_slots) - 1 :], strict=False
        ):
            of_span = (stop > start + n).select(stop - n, start) + (at - first)
            exists = (at >= first) & (at < first + n) & (of_span < stop)
            slot, first = exists.select(of_span + end, slot), first + n
        return slot

    def copy(sources: Sequence[Any], to: Word, slots: Word) -> None:
        for i in range(tile // rows.per):
            r = rows.first + i * rows.per
            slot = simt.from_lane(slots, r)
            exists = slot.differs(NONE)
            slot, source = exists.select(slot, 0), sources[-1]
            for before, end in zip(sources[-2::-1], ends_of_exact[-2::-1], strict=True):
                source = simt.select_address(slot < end, before, source)
            at = simt.offset(source, slot * of_token + rows.chunk * 16)
            code = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
            rows.copy(code, rows.place(to, r, rows.chunk), at, exists)
        ptx("cp.async.commit_group;")

    def wait() -> None:
        """Waits for all copies but the last group's."""
        ptx("cp.async.wait_group 1;")
        simt.warp_barrier()

    def weigh(state: Sequence[Word], slots: Word, scores: list[list[Word]]) -> Any:
        exists = simt.ballot(slots.differs(NONE)) >> rows.quad
        return softmax.weigh(
            state,
            scores,
            lambda j, _: ((exists >> (8 * j)) & 1).differs(0),
            scale=scale,
            kind=kind,
        )

    def step(n: Word, slots: Word, *state: Word) -> list[Word]:
        ahead = slots_of(n + 1) if steps > 1 else slots
        wait()
        scores = rows.scores(keys, queries, tile // 16)
        simt.warp_barrier()
        if steps > 1:
            copy(k, keys, ahead)
        else:
            ptx("cp.async.commit_group;")
        before, weights = weigh(state, slots, scores)
        wait()
        mixed = rows.mix(before, values, weights)
        if steps > 1:
            simt.warp_barrier()
            copy(v, values, ahead)
        return [ahead, *mixed]

    def exact_of(step: Word) -> tuple[Word, Flag]:
        """Slots past the coded zone, and whether this warp has any."""
        slots = slots_of(step)
        slots = (slots < zones[0]).select(NONE, slots)
        return slots, simt.ballot(slots.differs(NONE)).differs(0)

    def late(state: Sequence[Word], slots: Word, any_: Flag, copied: bool) -> list[Word]:
        def make() -> list[Word]:
            if not copied:
                copy(k, keys, slots)
                copy(v, values, slots)
            ptx("cp.async.wait_group 0;")
            simt.warp_barrier()
            before, weights = weigh(state, slots, rows.scores(keys, queries, tile // 16))
            mixed = rows.mix(before, values, weights)
            simt.warp_barrier()
            return mixed

        return simt.branch(any_, make, state)

    if coded:  # exact slots are few, most of them in the last step: they are copied ahead, and attended to afterwards
        slots, any_ = exact_of(word(steps - 1))
        with when(any_):
            copy(k, keys, slots)
            copy(v, values, slots)
        zone = directions.Zone(coded, coded_m, of_row, q, heads, kind, lane)

        def tile_of(n: Word, listed: Word, *state: Word) -> list[Word]:
            ahead = slots_of(n + 1)
            has = simt.ballot(listed < coded.S).differs(0)
            return [
                ahead,
                *simt.branch(
                    has, lambda: zone.add(state, listed, tile // 16, scale=scale), state
                ),
            ]

        listing = -(-M // (tile * warps * blocks))
        carry = loop(0, listing, 1, [slots_of(word(0)), *softmax.empty(D)])(tile_of)
        queries = rows.queries(q, heads)
        state = late(zone.finish(carry[1:]), slots, any_, True)
        carry = [
            slots,
            *loop(0, steps - 1, 1, state)(lambda n, *state: late(state, *exact_of(n), False)),
        ]
    else:
        slots = slots_of(word(0))
        copy(k, keys, slots)
        copy(v, values, slots)
        queries = rows.queries(q, heads)
        carry = [slots, *softmax.empty(D)]
        carry = step(word(0), *carry) if steps == 1 else loop(0, steps, 1, carry)(step)
    ptx("cp.async.wait_group 0;")
    simt.block_barrier()  # the memory of the copies is reused

    size = softmax.part_bytes(D)
    rows.store(room + warp * size, carry[1:], heads)
    simt.block_barrier()
    quads, whole = heads * D // 4, room + warps * size
    mine = [room + w * size for w in range(warps)]
    if parted:
        loop(t, quads, 32 * warps)(lambda i: softmax.Merged(mine, i, D, "shared").write(*outs))
        return
    loop(t, quads, 32 * warps)(lambda i: softmax.Merged(mine, i, D, "shared").store(whole))
    simt.cluster_barrier()
    share = -(-quads // blocks)
    others = [simt.remote(whole, b) for b in range(blocks)]

    @loop(part * share + t, quads, 32 * warps)
    def _write(i: Word) -> None:
        with when(i < (part + 1) * share):
            write(softmax.Merged(others, i, D, simt.remote_space()), *outs)

    simt.cluster_barrier()  # a block may end once the others have read its part
