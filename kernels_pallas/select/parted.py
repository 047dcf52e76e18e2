"""Selection of a row's keys by blocks that are no cluster: they meet in device memory, between
launches.

A launch before kept the keys of a row, and for each block how many of its keys fall into each
bin (`histogram.keep`). (1) Each block finds the bin of the last place, writes the slots above
it, and lists the keys of that bin in device memory. (2) Blocks rank the list, a warp a key. If
it is too long, one block selects alone instead, from all keys of the row, bit by bit as a
cluster does. The result is that of a cluster, and the same each time: which blocks come first
decides only the order of the list.

**Bytes:** 4 read a unit, 8 written and read a key of the last bin, 4 written a place.
**Bound:** launches.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.select import histogram, threshold, tiling
from kvjax.kernels_pallas.select.compact import (
    Here,
    Out,
    write_certain,
    write_listed,
    write_slots,
)
from kvjax.kernels_pallas.select.elements import InDevice, InRegisters, elements_of
from kvjax.kernels_pallas.select.rule import How
from kvjax.kernels_pallas.select.threshold import LISTED, Bins, LastPlace, last_place
from kvjax.kernels_pallas.simt import Word, loop, ptx, when, word

# Words of bins and the list, and of sums by warp with the array that `top_k` calls small.
SCRATCH = 3 * histogram.PASS + 2 * LISTED, 64
CUT = 4  # words that the second launch reads: keys wanted of the list, its length, all wanted, and 1 if it is too long


def out_of(slots_m: Any, found_m: Any, names_m: Any, S: int, how: How) -> Out:
    """Where the slots of this block's row go, and the names of its units, of which the first
    part has S.
    """
    row = simt.row()
    slots, found = (
        simt.offset_rows(simt.global_address(m), row, n * 4)
        for m, n in ((slots_m, how.room), (found_m, 1))
    )
    M = how.limits[0]
    beyond = how.beyond
    names = (
        None if names_m is None else simt.offset_rows(simt.global_address(names_m), row, M * 4)
    )

    def name(unit: Word) -> Word:
        if beyond is None:
            return unit
        if names is None:
            return (unit < S).select(unit, unit - S + beyond)
        return simt.load_below(unit, M, simt.offset(names, unit * 4), unit - S + beyond)

    return Out(slots, found, how.room, name)


def select_keys(
    kernel: str,
    keys: Array,
    kept: Array,
    wanted: Array,
    names: Array | None,
    how: How,
    bins: Bins,
    S: int,
) -> tuple[Array, Array]:
    """(units i32[rows, room], count i32[rows]) of `keys` u32[rows, U] that were counted in
    `bins`.
    """
    config = how.config
    rows = how.rows
    launch = {
        "blocks": rows * config.blocks,
        "parts": config.blocks,
        "warpgroups": tiling.THREADS // 128,
    }
    program: dict[str, Any] = {
        "U": keys.shape[1],
        "S": S,
        "how": how,
        "bins": bins,
        "shared_by": rows // wanted.size,
    }
    named = [] if names is None else [names]
    slots, found, listed, cut = simt.kernel(
        functools.partial(_list, **program),
        name=f"{kernel}_list",
        out_type=(
            jax.ShapeDtypeStruct((rows, how.room), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
            jax.ShapeDtypeStruct((rows, 2 * LISTED), jnp.uint32),
            jax.ShapeDtypeStruct((rows, CUT), jnp.uint32),
        ),
        scratch=SCRATCH,
        sparse=(0, 1, 2),
        **launch,
    )(keys, kept, wanted, *named)
    made = simt.kernel_in_place(
        functools.partial(_rank, **program), name=kernel, scratch=SCRATCH, **launch
    )([slots, found], listed, cut, keys, wanted, *named)
    return made[0], made[1]


def _list(
    keys_m: Any,
    kept_m: Any,
    wanted_m: Any,
    *refs: Any,
    U: int,
    S: int,
    how: How,
    bins: Bins,
    shared_by: int,
) -> None:
    *names_m, slots_m, found_m, listed_m, cut_m, hist_m, small_m = refs
    row = simt.row()
    config = how.config
    keys, kept, listed, to = (
        simt.offset_rows(simt.global_address(m), row, n * 4)
        for m, n in (
            (keys_m, U),
            (kept_m, config.blocks * histogram.KEPT),
            (listed_m, 2 * LISTED),
            (cut_m, CUT),
        )
    )
    wanted = simt.clipped(simt.number_of((wanted_m, shared_by), row), how.room)
    here = Here.of(hist_m, small_m)
    here.clear()
    held: InRegisters | InDevice = InDevice(keys, U, config)
    if tiling.in_one_step(U, config):
        fours = [tiling.load_four(keys, at, U) for at in tiling.fours(word(0), U, config)]
        held = InRegisters(elements_of(word(0), fours, U, config))
    place, need, many, wanted, above, beside = histogram.find_kept(
        here.hist, kept, wanted, config.blocks
    )
    low, size, _ = bins.extent(place)
    many = wanted.equals(0).select(0, many)
    too_long = many > threshold.LISTED
    with when(here.thread.equals(0) & simt.part().equals(0)):
        ptx(
            "st.global.v4.u32 [$0], {$1, $2, $3, $4};",
            to,
            need,
            many,
            wanted,
            too_long.select(1, 0),
        )

    def share(at: Any, rank: Any, key: Any) -> None:
        ptx("st.global.v2.u32 [$0], {$1, $2};", simt.offset(listed, at * 8), rank, key)

    with when(many <= threshold.LISTED):
        out = out_of(slots_m, found_m, names_m[0] if names_m else None, S, how)
        cut = LastPlace(low, size, word(0), need, many, wanted, above, beside)
        write_certain(held, cut, here, out, share)
        out.finish(wanted, config.blocks)


def _rank(
    slots_m: Any, found_m: Any, *refs: Any, U: int, S: int, how: How, bins: Bins, shared_by: int
) -> None:
    listed_m, cut_m, keys_m, wanted_m, *names_m, hist_m, small_m = refs
    row = simt.row()
    here = Here.of(hist_m, small_m)
    listed, cut, keys = (
        simt.offset_rows(simt.global_address(m), row, n * 4)
        for m, n in ((listed_m, 2 * LISTED), (cut_m, CUT), (keys_m, U))
    )
    out = out_of(slots_m, found_m, names_m[0] if names_m else None, S, how)
    need, many, wanted, too_long = ptx(
        "ld.global.nc.v4.u32 {$0, $1, $2, $3}, [$4];", cut, results=4
    )
    with when(too_long.equals(0)):

        @loop(here.thread, many, tiling.THREADS)
        def _copy(i: Any) -> None:
            code = "ld.global.nc.v2.u32 {$0, $1}, [$2];"
            simt.store_shared(
                here.listed + i * 8, *ptx(code, simt.offset(listed, i * 8), results=2)
            )

        simt.block_barrier()
        write_listed(need, many, wanted, here, out, how.config.blocks)
    with when(too_long.differs(0) & simt.part().equals(0)):
        alone = tiling.Config(1, how.config.unroll, cluster=0)
        here.clear()
        simt.block_barrier()
        held = InDevice(keys, U, alone)
        wanted = simt.clipped(simt.number_of((wanted_m, shared_by), row), how.room)
        write_slots(held, last_place(held, wanted, here.hist, bins, 1), here, out, alone)
