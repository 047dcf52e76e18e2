"""Reads and writes of rows in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.memory import to_device, to_host, vary_with
from kvjax.numerics.blocks import put_last
from kvjax.numerics.types import Bool, Int32, Shaped
from kvjax.ops import kernels
from kvjax.ops.op import Implementation, op

Parts = tuple[Array, ...]


@op(
    kernel=lambda: kernels.host_rows,
    limit=lambda a: kernels.host_rows.unsupported(a.x, a.index),
    mosaic=lambda a: kernels.host_rows.host_rows(a.x, a.index),
)
def host_rows(
    x: Shaped[Array, "B K P parts Z D"],
    index: Int32[Array, "B K N"],
    *,
    implementation: Implementation | None = None,
) -> Parts:
    """Moves rows in host memory to the device: their parts [B, K, N * Z, D], such as keys and
    values.

    The rows are `index` i32[B, K, N] of x [B, K, P, parts, Z, D]; an index out of range gives
    zeros.

    Moves only those rows. XLA gathers them on the host's CPU first.
    """
    rows = _gather_rows(x, index)
    return tuple(
        rows[:, :, :, n].reshape(*index.shape[:2], -1, x.shape[5]) for n in range(x.shape[3])
    )


@op(
    kernel=lambda: kernels.host_rows,
    limit=lambda a: kernels.host_rows.unsupported_recall(
        a.x, a.device[0], [*a.device[1], *a.recent]
    ),
    mosaic=lambda a: kernels.host_rows.recall(
        a.x, a.index, a.edge, a.recalls, a.device, a.recent
    ),
)
def host_rows_first(
    x: Shaped[Array, "B K P 2 Z D"],
    index: Int32[Array, "B K N"],
    edge: Int32[Array, " B"],
    recalls: Bool[Array, "B K"],
    device: tuple[Int32[Array, "B K M"], Parts],
    recent: Parts,
    *,
    implementation: Implementation | None = None,
) -> Parts:
    """Recalls keys and values [B, K, M * Z, D] from host memory for the heads where `recalls`
    bool[B, K] is true.

    Other heads get arbitrary values; `host_rows_rest` gives the parts of all heads.

    A head gets at place n < N the row that `index` i32[B, K, N] names, at place N the one that
    `edge` i32[B] names, and zeros at later places. The number i < P names row i of x [B, K, P,
    2, Z, D]. P + r names the Z slots of `recent`, keys and values [B, K, R, D], from slot r on;
    past its end its last slot is repeated. A negative number gives zeros. `device` = (rows
    i32[B, K, M], (k, v)) holds rows that are on the device already: the keys and values of
    rows[b, k, m], negative for none, [B, K, M * Z, D] each. The kernel reads them there.

    XLA reads the rows of all heads, because it moves the same number in either case.
    """
    B, K, P, _, Z, D = x.shape
    N = index.shape[2]
    places = device[0].shape[2]

    # The number of the row at each place: those of `index`, that of `edge`, then none.
    at_edge = jnp.broadcast_to(edge[:, None, None], (B, K, 1))
    padding = jnp.full((B, K, max(places - N - 1, 0)), -1, jnp.int32)
    index = jnp.concatenate([index, at_edge, padding], axis=2)[:, :, :places]

    # Rows of x, or of the recent block where the number is P or more.
    rows = _gather_rows(x, jnp.where(index < P, index, -1))
    slots = index[..., None] - P + jnp.arange(Z, dtype=jnp.int32)[None, None, None]
    slots = jnp.clip(slots, 0, recent[0].shape[2] - 1).reshape(B, K, places * Z, 1)
    is_recent = jnp.repeat(index >= P, Z, axis=2)[..., None]
    parts = []
    for n, zone in enumerate(recent):
        old = rows[:, :, :, n].reshape(B, K, places * Z, D)
        parts.append(
            jnp.where(is_recent, jnp.take_along_axis(zone, slots, axis=2).astype(x.dtype), old)
        )
    return tuple(parts)


def _host_rows_rest_mosaic(a: Any) -> Parts:
    how = a.recent, a.first_read
    return kernels.host_rows.recall(
        a.x, a.index, a.edge, a.recalls, a.device, *how, config=kernels.host_rows.BESIDE
    )


@op(
    kernel=lambda: kernels.host_rows,
    limit=lambda a: kernels.host_rows.unsupported_recall(
        a.x, a.device[0], [*a.device[1], *a.recent, *a.first_read[1]]
    ),
    mosaic=_host_rows_rest_mosaic,
)
def host_rows_rest(
    x: Shaped[Array, "B K P 2 Z D"],
    index: Int32[Array, "B K N"],
    edge: Int32[Array, " B"],
    recalls: Bool[Array, "B K"],
    device: tuple[Int32[Array, "B K M"], Parts],
    recent: Parts,
    first_read: tuple[Array, Parts],
    *,
    implementation: Implementation | None = None,
) -> Parts:
    """Returns the keys and values [B, K, M * Z, D] of all heads, after `host_rows_first`
    returned those of some.

    `first_read` = (which bool[B, K], parts) is the result of `host_rows_first`, by the same
    implementation. Heads in `recalls` recall as there; the others get `first_read` where
    `which` is true, and the parts of `device` elsewhere.

    The kernel has few blocks, so other kernels can run at the same time if XLA starts them so
    (`memory.CONCURRENT`).
    """
    which, parts_read = first_read  # of all heads
    heads = (recalls | which)[..., None, None]
    return jax.tree.map(partial(jnp.where, heads), parts_read, device[1])


def read_pages(x: Array, first: Array | int, size: int) -> Array:
    """[..., size, 2, Z, D] on the device: pages [first, first + size) of x [..., P, 2, Z, D] in
    host memory.

    Has its own rule for vmap: JAX would make a gather with indices in device memory, and XLA
    refuses to mix the two.
    """

    @jax.custom_batching.custom_vmap
    def read(x: Array, first: Array) -> Array:
        return to_device(lax.dynamic_slice_in_dim(x, first, size, axis=x.ndim - 4))

    @read.def_vmap
    def batched(count: int, mapped: list[bool], x: Array, first: Array) -> tuple[Array, bool]:
        if not mapped[1]:
            return read_pages(x, first, size), True

        def one(i: Array) -> Array:
            mine = lax.dynamic_index_in_dim(x, i, keepdims=False) if mapped[0] else x
            return read_pages(mine, first[i], size)

        return lax.map(one, jnp.arange(count, dtype=jnp.int32)), True

    return read(x, jnp.asarray(first, jnp.int32))


def _gather_rows(x: Array, index: Array) -> Array:
    row = x.shape[3:]
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(3, 3 + len(row))),
        collapsed_slice_dims=(2,),
        start_index_map=(2,),
        operand_batching_dims=(0, 1),
        start_indices_batching_dims=(0, 1),
    )
    places = index[..., None]
    if jax.typeof(x).memory_space == jax.memory.Space.Host:
        places = to_host(places)
    rows = to_device(
        lax.gather(x, places, numbers, (1, 1, 1, *row), mode=lax.GatherScatterMode.CLIP)
    )
    in_range = (index >= 0) & (index < x.shape[2])
    return jnp.where(
        in_range.reshape(*index.shape, *[1] * len(row)), rows, jnp.zeros((), x.dtype)
    )


@op(
    kernel=lambda: kernels.host_append,
    limit=lambda a: kernels.host_append.unsupported(a.x, tuple(a.new), a.at, a.count),
    mosaic=lambda a: kernels.host_append.host_append(a.x, tuple(a.new), a.at, a.count),
)
def host_append(
    x: Shaped[Array, "B K P parts *row"],
    new: Sequence[Shaped[Array, "B K n *row"]],
    at: Int32[Array, " B"],
    count: Int32[Array, " B"],
    *,
    implementation: Implementation | None = None,
) -> Shaped[Array, "B K P parts *row"]:
    """Writes rows to x [B, K, P, parts, ...] in host memory, from row `at` i32[B] on.

    They are the first `count` i32[B] rows of `new`, one array [B, K, n, ...] per part, n <= P.
    Rows at or past P are dropped.

    In place if x is donated or a loop's carry. XLA reads, changes and writes one slice for each
    row of the batch.
    """
    return _append_rows(x, jnp.stack([part.astype(x.dtype) for part in new], axis=3), at, count)


def _append_rows(x: Array, stacked: Array, at: Array, count: Array) -> Array:
    """`host_append` of parts stacked as [B, K, n, parts, ...]. Under vmap the mapped axis
    becomes rows.
    """

    @jax.custom_batching.custom_vmap
    def append(x: Array, stacked: Array, at: Array, count: Array) -> Array:
        return _append_each(x, stacked, at, count)

    @append.def_vmap
    def batched(size: int, mapped: list[bool], *args: Array) -> tuple[Array, bool]:
        whole = [
            a if m else jnp.broadcast_to(a, (size, *a.shape))
            for a, m in zip(args, mapped, strict=True)
        ]
        out = _append_rows(*(a.reshape(-1, *a.shape[2:]) for a in whole))
        return out.reshape(size, -1, *out.shape[1:]), True

    return append(x, stacked, at, count)


def _append_each(x: Array, stacked: Array, at: Array, count: Array) -> Array:
    B, K, P, *row = x.shape
    n = stacked.shape[2]
    move = to_host if jax.typeof(x).memory_space == jax.memory.Space.Host else to_device

    # For one row at a time, a slice is read, changed and written: in host memory XLA does this
    # in place, on CPU and GPU. (A scatter is in place too, but for a GPU the host's CPU
    # executes it, with a warning.) A slice past the end would be clamped, so it starts earlier
    # and its first rows stay as they are.
    def one_row(b: Array, x: Array) -> Array:
        first = jnp.minimum(at[b], P - n)
        source = first + jnp.arange(n, dtype=jnp.int32) - at[b]
        fits = (source >= 0) & (source < count[b])
        # Indices of one dtype, also under x64.
        start = [jnp.asarray(i, jnp.int32) for i in (b, 0, first, *[0] * len(row))]
        old = to_device(lax.dynamic_slice(x, start, (1, K, n, *row)))
        new = jnp.take(
            lax.dynamic_slice_in_dim(stacked, b, 1, axis=0), source, axis=2, mode="clip"
        )
        changed = jnp.where(fits.reshape(n, *[1] * len(row)), new, old)
        return lax.dynamic_update_slice(x, move(changed), start)

    return lax.fori_loop(0, B, one_row, vary_with(x, stacked, at, count))


class HotTables(NamedTuple):
    """Which pages of a history on the host have a place on the device; n places for P pages."""

    page: Int32[Array, "B K n"]  # the page of each place; -1 for none
    # 0 for places not used since the hand last passed, 2 for those filled last.
    used: Int32[Array, "B K n"]
    # Where each page was last put; it is there if `page` of that place says so.
    place: Int32[Array, "B K P"]
    hand: Int32[Array, "B K"]  # the place that the hand points at
    loads: Int32[Array, "B K"]  # pages that got a place


def _hot_places_mosaic(a: Any) -> tuple[HotTables, Array]:
    new_tables, at = kernels.hot_pages.hot_places(tuple(a.tables), a.index, a.found)
    return HotTables(*new_tables), at


@op(
    kernel=lambda: kernels.hot_pages,
    limit=lambda a: kernels.hot_pages.unsupported(a.tables.page, a.index),
    mosaic=_hot_places_mosaic,
)
def hot_places(
    tables: HotTables,
    index: Int32[Array, "B K N"],
    found: Int32[Array, "B K"],
    *,
    implementation: Implementation | None = None,
) -> tuple[HotTables, Int32[Array, "B K N"]]:
    """Gives each page that a step needs a place, by the clock rule; returns the tables and the
    place of each entry.

    A step needs the first `found` entries of `index`, N <= n. An entry i < P is a page, each a
    different one, and becomes the page's place; P + r becomes n + r; a negative entry, or one
    past those found, becomes n. Places whose page must be read have `used` = 2.
    """
    B, K, N = index.shape
    n = tables.page.shape[2]
    P = tables.place.shape[2]
    index = jnp.where(jnp.arange(N, dtype=jnp.int32)[None, None] < found[..., None], index, -1)
    wanted = (index >= 0) & (index < P)
    page = jnp.where(wanted, index, 0)

    # A page that has a place keeps it.
    known = jnp.clip(jnp.take_along_axis(tables.place, page, axis=2), 0, n - 1)
    hit = wanted & (jnp.take_along_axis(tables.page, known, axis=2) == page)
    missed = wanted & ~hit
    kept = put_last(jnp.zeros((B, K, n), bool), jnp.where(hit, known, n), True)

    # Each page that has none gets the next place that the hand frees.
    freed, unused = _freed_places(tables, kept, N)
    nth = lax.cumsum(missed.astype(jnp.int32), axis=2)
    misses = nth[..., -1:]
    new_place = jnp.take_along_axis(freed, jnp.maximum(nth - 1, 0), axis=2)
    place = jnp.where(missed, new_place, known)
    last = jnp.take_along_axis(freed, jnp.maximum(misses - 1, 0), axis=2)

    # The hand has gone round to the place that it gave last, or all the way; places that it
    # passed count as unused.
    hand = tables.hand[..., None]
    distance = jnp.mod(jnp.arange(n, dtype=jnp.int32)[None, None] - hand, n)
    swept = (distance <= jnp.mod(last - hand, n)) | (misses > unused)
    used = ((tables.used > 0) & ~(swept & (misses > 0))).astype(jnp.int32)
    used = put_last(
        used, jnp.where(wanted, place, n), jnp.where(missed, jnp.int32(2), jnp.int32(1))
    )

    after = HotTables(
        page=put_last(tables.page, jnp.where(missed, place, n), page),
        used=used,
        place=put_last(tables.place, jnp.where(missed, page, P), place),
        hand=jnp.where(misses > 0, jnp.mod(last + 1, n), hand)[..., 0],
        loads=tables.loads + misses[..., 0],
    )
    return after, jnp.where(wanted, place, n + jnp.maximum(index - P, 0))


def _freed_places(tables: HotTables, kept: Array, count: int) -> tuple[Array, Array]:
    """Returns the first `count` places in the order in which the hand frees them, i32[B, K,
    count], and how many of all were unused, i32[B, K, 1].

    The hand frees the unused places first, then the used ones, from where it points on. It
    never frees those that are `kept` bool[B, K, n].
    """
    B, K, n = kept.shape
    was_used = tables.used > 0
    hand = tables.hand[..., None]
    idle = ~kept & ~was_used
    busy = ~kept & was_used

    # Among the places of its kind, a place's rank from the hand on: those before the hand come
    # last.
    before = lax.cumsum(jnp.stack([idle, busy]).astype(jnp.int32), axis=3)
    total = before[..., -1:]
    hand_at = jnp.broadcast_to(hand[None], (2, B, K, 1))
    at_hand = jnp.take_along_axis(before, jnp.maximum(hand_at - 1, 0), axis=3)
    rank = before - 1 - jnp.where(hand_at > 0, at_hand, 0)
    rank = jnp.where(rank < 0, rank + total, rank)

    # Among all places: unused ones come before used ones, and kept ones after all.
    unused = total[0]
    rank = jnp.where(idle, rank[0], jnp.where(busy, unused + rank[1], count))
    places = jnp.arange(n, dtype=jnp.int32)[None, None]
    freed = put_last(jnp.zeros((B, K, count), jnp.int32), jnp.minimum(rank, count), places)
    return freed, unused


@op(
    kernel=lambda: kernels.hot_pages,
    limit=lambda a: kernels.hot_pages.unsupported_load(a.x, a.zones[0], a.at),
    mosaic=lambda a: kernels.hot_pages.hot_load(a.x, a.zones, a.page, a.used, a.at),
)
def hot_load(
    x: Shaped[Array, "B K P parts Z D"],
    zones: Parts,
    page: Int32[Array, "B K n"],
    used: Int32[Array, "B K n"],
    at: Int32[Array, "B K N"],
    *,
    implementation: Implementation | None = None,
) -> Parts:
    """Reads the pages that `hot_places` gave a new place into `zones`, parts [B, K, n * Z, D]
    on the device.

    For each place in `at` with `used` = 2, its `page` is read from x [B, K, P, parts, Z, D] in
    host memory; entries of `at` may lie past the n places. In place if the zones are donated or
    a loop's carry. XLA reads as many rows as `at` has entries.
    """
    source, to = pages_to_read(page, used, at)
    return place_pages(zones, host_rows(x, source), to, page.shape[2])


def pages_to_read(page: Array, used: Array, at: Array) -> tuple[Array, Array]:
    """Returns the pages that `hot_load` reads, -1 for none, and their places, past the last one
    for none: i32[B, K, N].
    """
    n = page.shape[2]
    safe = jnp.minimum(at, n - 1)
    fresh = (at < n) & (jnp.take_along_axis(used, safe, axis=2) == 2)
    return jnp.where(fresh, jnp.take_along_axis(page, safe, axis=2), -1), jnp.where(
        fresh, at, n
    )


def place_pages(zones: Parts, pages: Sequence[Array], at: Array, n: int) -> Parts:
    """`zones`, [B, K, n * Z, D] each, with `pages` [B, K, N * Z, D] at the places below n in
    `at` i32[B, K, N].
    """
    B, K, N = at.shape
    *_, D = zones[0].shape
    row = jnp.arange(B, dtype=jnp.int32)[:, None, None]
    head = jnp.arange(K, dtype=jnp.int32)[None, :, None]

    def put(zone: Array, new: Array) -> Array:
        by_page = zone.reshape(B, K, n, -1, D)
        new = new.reshape(B, K, N, -1, D).astype(zone.dtype)
        return by_page.at[row, head, at].set(new, mode="drop").reshape(zone.shape)

    return tuple(put(*two) for two in zip(zones, pages, strict=True))


@op(
    kernel=lambda: kernels.hot_float8,
    limit=lambda a: kernels.hot_float8.unsupported(a.x, a.zones[0], a.at),
    mosaic=lambda a: kernels.hot_float8.hot_load_float8(a.x, a.zones, a.page, a.used, a.at),
)
def hot_load_float8(
    x: Shaped[Array, "B K P parts Z D"],
    zones: Parts,
    page: Int32[Array, "B K n"],
    used: Int32[Array, "B K n"],
    at: Int32[Array, "B K N"],
    *,
    implementation: Implementation | None = None,
) -> Parts:
    """`hot_load` of 8-bit floats (e4m3), whose bytes are x u8[B, K, P, parts, Z, D]; the zones
    get their values.

    Half the bytes cross the bus, without an intermediate copy. The values are exact in bf16,
    f16 and f32.
    """
    source, to = pages_to_read(page, used, at)
    values = tuple(
        lax.bitcast_convert_type(part, jnp.float8_e4m3fn) for part in host_rows(x, source)
    )
    return place_pages(zones, values, to, page.shape[2])
