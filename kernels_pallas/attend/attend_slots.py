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
from typing import Any, NamedTuple

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
    copies: int = TILE  # copies of a tile that are not a loop: fewer need fewer registers

    def __post_init__(self) -> None:
        if self.cluster not in (0, 1):
            raise ValueError(f"cluster must be 0 or 1; got {self.cluster}")
        if self.cluster and self.blocks not in (1, 2, 4, 8):
            raise ValueError(f"blocks must be 1, 2, 4 or 8, a cluster's; got {self.blocks}")
        if not 1 <= self.blocks <= MAX_PARTS:
            raise ValueError(f"blocks must be 1 to {MAX_PARTS}; got {self.blocks}")
        if self.tile not in (TILE // 2, TILE):
            raise ValueError(f"tile must be {TILE // 2} or {TILE}; got {self.tile}")
        if self.copies not in (4, 8, 16, 32):
            raise ValueError(f"copies must be 4, 8, 16 or 32; got {self.copies}")
        if self.warpgroups not in (1, 2, 4):
            raise ValueError(f"warpgroups must be 1, 2 or 4; got {self.warpgroups}")


def config_for(rows: int, slots: int, D: int, target: simt.Target | None = None) -> Config:
    """As many blocks per row as fit on the multiprocessors at once and have work; four warps
    where shared memory is small. Larger heads have smaller tiles, and copies in a loop: all
    copies of a tile at once would spill registers."""
    target = target or simt.target()
    wide = D > 128
    copies = 4 if wide else TILE
    warpgroups = 2 if target.clusters else 1
    whole = smem_bytes(D, Config(1, warpgroups)) <= target.smem
    tile = TILE if whole and not (wide and target.clusters) else TILE // 2
    max_slots = -(-slots // (tile * 4 * warpgroups))
    if not target.clusters:
        blocks = max(1, min(MAX_PARTS, max_slots, target.multiprocessors // rows))
        return Config(blocks, warpgroups, cluster=0, tile=tile, copies=copies)
    at_once = target.multiprocessors * 128 // 132
    blocks = next((b for b in (8, 4, 2) if b < 2 * max_slots and rows * b <= at_once), 1)
    return Config(blocks, warpgroups, tile=tile, copies=copies)


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
    S = k.shape[2]
    H, M = slots.shape[2:]
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
    index = jnp.where(valid, jnp.clip(slots, 0, S - 1), -1)
    passes = softmax.passes_of(G // H)
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
    lists = [index] if found is None else [index, found]
    ends = [end for start, stop, _ in spans for end in (start, stop)]
    parts = 1 if config.cluster else config.blocks
    arrays = directions.ARRAYS if coded else 0

    def again(q: Array, *flat: Array) -> tuple[Array, ...]:
        kept = flat[: -len(lists + ends)]
        index, *rest = flat[-len(lists + ends) :]
        found = rest.pop(0) if len(lists) == 2 else None
        two = zip(rest[::2], rest[1::2], (max_slots for *_, max_slots in spans), strict=True)
        return attend(
            q, kept, index, coded=coded, found=found, spans=list(two), outs=outs, name=name, write=write, scale=scale,
            config=config, order=order,
        )  # fmt: skip

    @simt.over_rows(again)
    def run(q: Array, *args: Array) -> tuple[Array, ...]:
        kept = args[: -len(lists + ends)]
        index = args[-len(lists + ends)]
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
    """A block attends to its part of the slots of a row, and merges with the row's other blocks."""
    heads, rows_of_zone, D, M = sizes
    exact = zones[1:] if coded else zones  # sizes of the zones that have keys and values
    given = _Refs.of(
        refs,
        coded=directions.ARRAYS if coded else 0,
        kept=2 * len(exact),
        numbers=counted + len(shared_by),
    )
    thread = simt.special("tid.x")
    part = simt.part()
    row = simt.row()
    lane = thread & 31
    warp = thread >> 5
    layout = softmax.Rows(D, kind, lane)

    # Where this row's queries, slots, keys, values and outputs begin.
    q, index, *kept = (simt.global_address(m) for m in (q_m, given.index, *given.kept))
    q = simt.offset_rows(q, simt.swapped_row(row, *order), heads * layout.of_token)
    index = simt.offset_rows(index, row, M * 4)
    row_of_zone = simt.divide(row, rows_of_zone)
    ends = list(itertools.accumulate(zones))
    ends_of_exact = ends[len(zones) - len(exact) :]
    k = _slot_0(kept[::2], exact, ends_of_exact, row_of_zone, layout.of_token)
    v = _slot_0(kept[1::2], exact, ends_of_exact, row_of_zone, layout.of_token)
    merged_later = config.blocks > 1 and not config.cluster  # by a second kernel
    to = simt.special("ctaid.x") if merged_later else simt.swapped_row(row, *order)
    if merged_later:
        strides = (heads * D * 4, heads * 4)
    outs = [
        simt.offset_rows(simt.global_address(m), to, stride)
        for m, stride in zip(given.outs, strides, strict=True)
    ]
    of_counts = [1] * counted + [*shared_by]
    numbers = [simt.number_of(two, row) for two in zip(given.numbers, of_counts, strict=True)]
    bounds = numbers[counted:]
    listed = _Listed(
        index=index,
        M=M,
        found=numbers[0] if counted else None,
        spans=[
            _Span(start, stop, most, first)
            for start, stop, most, first in zip(
                bounds[::2],
                bounds[1::2],
                max_slots,
                ends[len(zones) - len(max_slots) - 1 :],
                strict=False,
            )
        ],
    )

    room = simt.shared_address(given.room)
    keys = room + warp * (2 * config.tile * layout.width)
    tiles = _Tiles(
        config=config,
        part=part,
        warp=warp,
        lane=lane,
        layout=layout,
        listed=listed,
        ends=ends_of_exact,
        k=k,
        v=v,
        keys=keys,
        values=keys + config.tile * layout.width,
        scale=scale,
        kind=kind,
    )
    state = (
        _attend_coded(tiles, coded, given.coded, row_of_zone, q, heads)
        if coded
        else _attend_exact(tiles, q, heads)
    )
    ptx("cp.async.wait_group 0;")
    simt.block_barrier()  # the memory of the copies is reused

    # Warps leave their states in shared memory, and all of them merge these.
    threads = 32 * tiles.warps
    warps = tiles.warps
    size = softmax.part_bytes(D)
    layout.store(room + warp * size, state, heads)
    simt.block_barrier()
    quads = heads * D // 4
    whole = room + warps * size
    mine = [room + w * size for w in range(warps)]
    if merged_later:
        loop(thread, quads, threads)(
            lambda i: softmax.Merged(mine, i, D, "shared").write(*outs)
        )
        return
    loop(thread, quads, threads)(lambda i: softmax.Merged(mine, i, D, "shared").store(whole))
    simt.cluster_barrier()

    # Blocks merge through their cluster: each writes a share of the row.
    share = -(-quads // config.blocks)
    others = [simt.remote(whole, b) for b in range(config.blocks)]

    @loop(part * share + thread, quads, threads)
    def _write(i: Word) -> None:
        with when(i < (part + 1) * share):
            write(softmax.Merged(others, i, D, simt.remote_space()), *outs)

    simt.cluster_barrier()  # a block may end once the others have read its part


class _Refs(NamedTuple):
    """The arrays of the kernel besides the queries."""

    coded: Sequence[Any]  # those of the coded zone
    kept: Sequence[Any]  # keys and values of each exact zone
    index: Any
    numbers: Sequence[Any]  # `found` of `attend`, if given, then start and stop of each span
    outs: Sequence[Any]
    room: Any  # the block's shared memory

    @staticmethod
    def of(refs: Sequence[Any], *, coded: int, kept: int, numbers: int) -> _Refs:
        left = iter(refs)

        def take(count: int) -> list[Any]:
            return list(itertools.islice(left, count))

        arrays = take(coded), take(kept)
        (index,) = take(1)
        counts = take(numbers)
        *outs, room = left
        return _Refs(*arrays, index, counts, outs, room)


def _slot_0(
    arrays: Sequence[Any],
    sizes: Sequence[int],
    ends: Sequence[int],
    row: Word,
    of_token: int,
) -> list[Any]:
    """The address of slot 0 of a row, by zone, if the zone extended to before its first slot:
    slots are numbered on from zone to zone.
    """
    found = []
    for array, size, end in zip(arrays, sizes, ends, strict=True):
        own = simt.offset_rows(array, row, size * of_token)
        found.append(simt.offset_rows(own, word(end - size), -of_token))
    return found


class _Span(NamedTuple):
    """Slots [start, stop) of a zone, of which the last ones are attended to."""

    start: Word
    stop: Word
    most: int  # slots that are attended to
    first: int  # number of the zone's first slot


class _Listed(NamedTuple):
    """The slots that a row attends to: those of its list, then those of the spans."""

    index: Any  # address of the list
    M: int  # slots of the list
    found: Word | None  # those that count; None: all
    spans: Sequence[_Span]

    @property
    def places(self) -> int:
        return self.M + sum(span.most for span in self.spans)

    def slot(self, at: Word) -> Word:
        """The slot at a place; all ones if there is none."""
        slot = simt.load_below(at, self.M, simt.offset(self.index, at * 4), NONE)
        if self.found is not None:
            slot = (at < self.found).select(slot, NONE)
        first = self.M
        for start, stop, most, first_slot in self.spans:
            of_span = (stop > start + most).select(stop - most, start) + (at - first)
            exists = (at >= first) & (at < first + most) & (of_span < stop)
            slot = exists.select(of_span + first_slot, slot)
            first += most
        return slot


@dataclass(frozen=True)
class _Tiles:
    """The slots of a warp, a tile of them at a time, and their copies in shared memory."""

    config: Config
    part: Word  # of the row's blocks
    warp: Word
    lane: Word
    layout: softmax.Rows
    listed: _Listed
    ends: Sequence[int]  # number of the slot after each zone with keys and values
    k: Sequence[Any]  # addresses of slot 0, by zone
    v: Sequence[Any]
    keys: Word  # addresses of the copies of a tile
    values: Word
    scale: softmax.Scale
    kind: str

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return 4 * self.config.warpgroups

    @property
    def slots_at_once(self) -> int:
        """Slots of a tile of each warp of the row."""
        return self.config.tile * self.warps * self.config.blocks

    @property
    def steps(self) -> int:
        """Tiles of each warp."""
        return -(-self.listed.places // self.slots_at_once)

    def slots(self, step: Word) -> Word:
        """The slot of this lane in tile `step` of the warp; all ones if there is none."""
        tile = self.config.tile
        at = (
            (step * self.config.blocks + self.part) * self.warps + self.warp
        ) * tile + self.lane
        if tile < TILE:
            at = (self.lane < tile).select(at, 1 << 30)
        return self.listed.slot(at)

    def copy(self, sources: Sequence[Any], to: Word, slots: Word) -> None:
        """Begins to copy the rows of `slots` from the zones' `sources`, as one group."""
        layout = self.layout
        number = self.config.tile // layout.per
        at_once = min(number, self.config.copies)

        def copy_row(i: int | Word) -> None:
            r = layout.first + i * layout.per
            slot = simt.from_lane(slots, r)
            exists = slot.differs(NONE)
            slot = exists.select(slot, 0)
            source = sources[-1]
            for before, end in zip(sources[-2::-1], self.ends[-2::-1], strict=True):
                source = simt.select_address(slot < end, before, source)
            at = simt.offset(source, slot * layout.of_token + layout.chunk * 16)
            code = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
            layout.copy(code, layout.place(to, r, layout.chunk), at, exists)

        def copy_rows(first: int | Word) -> None:
            for i in range(at_once):
                copy_row(first + i)

        if at_once == number:
            copy_rows(0)
        else:
            loop(0, number, at_once)(copy_rows)
        ptx("cp.async.commit_group;")

    def copy_keys(self, slots: Word) -> None:
        self.copy(self.k, self.keys, slots)

    def copy_values(self, slots: Word) -> None:
        self.copy(self.v, self.values, slots)

    def scores(self, queries: Any) -> list[list[Word]]:
        """Products of the queries and the copied keys."""
        return self.layout.scores(self.keys, queries, self.config.tile // 16)

    def mix(self, state: Sequence[Word], weights: Any) -> list[Word]:
        """The state with the copied values mixed in."""
        return self.layout.mix(state, self.values, weights)

    def weigh(self, state: Sequence[Word], slots: Word, scores: list[list[Word]]) -> Any:
        """`softmax.weigh` of the keys of `slots` that there are."""
        exists = simt.ballot(slots.differs(NONE)) >> self.layout.quad
        return softmax.weigh(
            state,
            scores,
            lambda j, _: ((exists >> (8 * j)) & 1).differs(0),
            scale=self.scale,
            kind=self.kind,
        )


def _wait_for_earlier() -> None:
    """Waits for all copies but the last group's."""
    ptx("cp.async.wait_group 1;")
    simt.warp_barrier()


def _attend_exact(tiles: _Tiles, q: Any, heads: int) -> list[Word]:
    """The state of a warp's softmax after all its tiles.

    While the values of a tile are on their way its keys are scored, and while the keys of the
    next are, its values are mixed.
    """
    several = tiles.steps > 1
    slots = tiles.slots(word(0))
    tiles.copy_keys(slots)
    tiles.copy_values(slots)
    queries = tiles.layout.queries(q, heads)

    def step(n: Word, slots: Word, *state: Word) -> list[Word]:
        ahead = tiles.slots(n + 1) if several else slots
        _wait_for_earlier()
        scores = tiles.scores(queries)
        simt.warp_barrier()
        if several:
            tiles.copy_keys(ahead)
        else:
            ptx("cp.async.commit_group;")  # an empty group, so that the values are awaited
        before, weights = tiles.weigh(state, slots, scores)
        _wait_for_earlier()
        mixed = tiles.mix(before, weights)
        if several:
            simt.warp_barrier()
            tiles.copy_values(ahead)
        return [ahead, *mixed]

    carry = [slots, *softmax.empty(tiles.layout.D)]
    carry = step(word(0), *carry) if not several else loop(0, tiles.steps, 1, carry)(step)
    return carry[1:]


def _attend_coded(
    tiles: _Tiles, coded: Coded, refs: Sequence[Any], row: Word, q: Any, heads: int
) -> list[Word]:
    """The state of a warp's softmax after the codes of its slots, then its exact slots.

    Exact slots are few, most of them in the last tile: these are copied ahead, and attended to
    afterwards.
    """

    def exact_slots(step: Word) -> tuple[Word, Flag]:
        """Slots past the coded zone, and whether this warp has any."""
        slots = tiles.slots(step)
        slots = (slots < coded.S).select(NONE, slots)
        return slots, simt.ballot(slots.differs(NONE)).differs(0)

    last, has_last = exact_slots(word(tiles.steps - 1))
    with when(has_last):
        tiles.copy_keys(last)
        tiles.copy_values(last)

    zone = directions.Zone(coded, refs, row, q, heads, tiles.kind, tiles.lane)

    def add_codes(n: Word, slots: Word, *state: Word) -> list[Word]:
        ahead = tiles.slots(n + 1)
        has_codes = simt.ballot(slots < coded.S).differs(0)
        tiles_of_16 = tiles.config.tile // 16
        added = simt.branch(
            has_codes, lambda: zone.add(state, slots, tiles_of_16, scale=tiles.scale), state
        )
        return [ahead, *added]

    steps_with_codes = -(-tiles.listed.M // tiles.slots_at_once)
    carry = [tiles.slots(word(0)), *softmax.empty(tiles.layout.D)]
    carry = loop(0, steps_with_codes, 1, carry)(add_codes)
    queries = tiles.layout.queries(q, heads)

    def add_exact(state: Sequence[Word], slots: Word, any_: Flag, copied: bool) -> list[Word]:
        def add() -> list[Word]:
            if not copied:
                tiles.copy_keys(slots)
                tiles.copy_values(slots)
            ptx("cp.async.wait_group 0;")
            simt.warp_barrier()
            before, weights = tiles.weigh(state, slots, tiles.scores(queries))
            mixed = tiles.mix(before, weights)
            simt.warp_barrier()
            return mixed

        return simt.branch(any_, add, state)

    state = add_exact(zone.finish(carry[1:]), last, has_last, True)
    return loop(0, tiles.steps - 1, 1, state)(
        lambda n, *state: add_exact(state, *exact_slots(n), False)
    )
