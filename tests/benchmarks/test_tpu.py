"""What benchmarks/tpu.py reads from compiled programs, on programs written by hand."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from benchmarks import tpu
from benchmarks.tpu_moves import Moves, derived_us, kernel_moves
from benchmarks.tpu_program import Program, cache_sized_copies

PROGRAM = """HloModule step

%fused_slice (p0: bf16[1,8,4096,128], p1: s32[]) -> bf16[1,8,64,128] {
  %p0 = bf16[1,8,4096,128]{3,2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %part = bf16[1,8,64,128]{3,2,1,0} dynamic-slice(%p0, %p1), dynamic_slice_sizes={1,8,64,128}
}

%fused_copy (p0: bf16[1,8,4096,128]) -> bf16[1,8,4096,128] {
  %p0 = bf16[1,8,4096,128]{3,2,1,0} parameter(0)
  ROOT %moved = bf16[1,8,4096,128]{3,1,2,0} copy(%p0)
}

%body (state: (s32[], bf16[1,8,4096,128])) -> (s32[], bf16[1,8,4096,128]) {
  %state = (s32[], bf16[1,8,4096,128]{3,2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %k = bf16[1,8,4096,128]{3,2,1,0} get-tuple-element(%state), index=1
  %block = bf16[1,8,64,128]{3,2,1,0} fusion(%k, %i), kind=kLoop, calls=%fused_slice
  ROOT %next = (s32[], bf16[1,8,4096,128]{3,2,1,0}) tuple(%i, %k)
}

%condition (state: (s32[], bf16[1,8,4096,128])) -> pred[] {
  %state = (s32[], bf16[1,8,4096,128]{3,2,1,0}) parameter(0)
  %rounds = s32[] constant(10)
  %i = s32[] get-tuple-element(%state), index=0
  ROOT %less = pred[] compare(%i, %rounds), direction=LT
}

ENTRY %main (k: bf16[1,8,4096,128]) -> bf16[1,8,4096,128] {
  %k = bf16[1,8,4096,128]{3,2,1,0} parameter(0)
  %small = bf16[1,8,1,128]{3,1,2,0} copy(%k)
  %nearer = (bf16[1,8,4096,128]{3,2,1,0:S(1)}, bf16[1,8,4096,128]{3,2,1,0}, u32[]{:S(2)}) copy-start(%k)
  %near = bf16[1,8,4096,128]{3,2,1,0:S(1)} copy-done(%nearer)
  %few = ((bf16[1,8,4096,128]{3,2,1,0}), bf16[1,8,64,128]{3,2,1,0:S(1)}, s32[]{:S(2)}) slice-start(%k)
  %nearest = bf16[1,8,64,128]{3,2,1,0:S(1)} slice-done(%few)
  %turned = bf16[1,8,4096,128]{3,1,2,0} fusion(%k), kind=kLoop, calls=%fused_copy
  %loop = (s32[], bf16[1,8,4096,128]{3,2,1,0}) while(%turned), condition=%condition, body=%body
  ROOT %back = bf16[1,8,4096,128]{3,2,1,0} copy(%turned)
}
"""


def test_copies_as_large_as_the_cache_are_found_in_and_out_of_fusions() -> None:
    cache = [jax.ShapeDtypeStruct((1, 8, 4096, 128), jnp.bfloat16)]
    assert cache_sized_copies(Program(PROGRAM), cache) == [
        "bf16[1,8,4096,128]{3,1,2,0}",
        "bf16[1,8,4096,128]{3,2,1,0}",
    ]


def test_copies_of_another_type_or_size_are_not_the_caches() -> None:
    cache = [jax.ShapeDtypeStruct((1, 8, 4096, 128), jnp.uint16)]
    assert cache_sized_copies(Program(PROGRAM), cache) == []


def test_moved_bytes_are_those_of_main_memory_with_all_rounds() -> None:
    whole = 8 * 4096 * 128 * 2
    block = 8 * 64 * 128 * 2  # of a round, read by a slice and written as its result
    index = 4
    small = whole + 8 * 128 * 2  # as if all of k were read for it
    copies = whole + 2 * whole + 2 * whole  # `nearer` only reads, `turned` and `back`
    few = block  # which only reads, too
    assert Program(PROGRAM).moved() == small + copies + few + 10 * (2 * block + index)


BRANCHES = """HloModule step

%fused_gather (p0: bf16[8,4096,128], p1: s32[8,20]) -> bf16[160,128] {
  %p0 = bf16[8,4096,128]{2,1,0} parameter(0)
  %flat = bf16[32768,128]{1,0} bitcast(%p0)
  %p1 = s32[8,20]{1,0} parameter(1)
  ROOT %taken = bf16[160,128]{1,0} gather(%flat, %p1), slice_sizes={1,128}
}

%flush (a: bf16[8,4096,128]) -> bf16[8,4096,128] {
  %a = bf16[8,4096,128]{2,1,0} parameter(0)
  %new = bf16[8,256,128]{2,1,0:S(1)} constant({...})
  %zero = s32[] constant(0)
  ROOT %written = bf16[8,4096,128]{2,1,0} dynamic-update-slice(%a, %new, %zero, %zero, %zero)
}

%stay (b: bf16[8,4096,128]) -> bf16[8,4096,128] {
  ROOT %b = bf16[8,4096,128]{2,1,0} parameter(0)
}

ENTRY %main (k: bf16[8,4096,128], at: s32[8,20]) -> bf16[160,128] {
  %k = bf16[8,4096,128]{2,1,0} parameter(0)
  %at = s32[8,20]{1,0:S(1)} parameter(1)
  %which = s32[] parameter(2)
  %kept = bf16[8,4096,128]{2,1,0} conditional(%which, %k, %k), branch_computations={%flush, %stay}
  %scores = f32[8,4096]{1,0} custom-call(%kept), custom_call_target="tpu_custom_call"
  ROOT %near = bf16[160,128]{1,0:S(1)} fusion(%kept, %at), kind=kCustom, calls=%fused_gather
}
"""


def test_a_loop_by_data_reads_all_of_what_it_slices() -> None:
    by_data = PROGRAM.replace("%rounds = s32[] constant(10)", "%rounds = s32[] parameter(1)")
    whole = 8 * 4096 * 128 * 2
    block = 8 * 64 * 128 * 2
    index = 4
    rounds, once = 10 * (2 * block + index), whole + block + index
    assert Program(by_data).moved() == Program(PROGRAM).moved() - rounds + once


def test_a_branch_a_gather_and_an_update_count_what_they_move() -> None:
    update = 8 * 256 * 128 * 2
    taken = 160 * 128 * 2
    assert Program(BRANCHES).moved() == update + taken


def test_a_run_replaces_rows_of_the_same_programs(tmp_path: Path) -> None:
    def row(preset: str, moved: int) -> dict[str, object]:
        place = {"chip": "v5e", "program": "step", "rows": 1, "capacity": 4096}
        return {**place, "preset": preset, "bytes": moved}

    file = tmp_path / "tpu.json"
    tpu.save(file, {"rows": [row("full", 1), row("fier", 2)]})
    tpu.save(file, {"rows": [row("fier", 3)]})
    runs = json.loads(file.read_text())["runs"]
    assert [[one["bytes"] for one in run["rows"]] for run in runs] == [[1], [3]]


def known_kernel(x: jax.Array, y: jax.Array, far: jax.Array) -> jax.Array:
    """A grid of 2 x 3 blocks of 8 x 128, of x once each and of y once a row; a DMA each step."""

    def add(x_ref, y_ref, far_ref, out_ref, room, done) -> None:
        pltpu.async_copy(far_ref.at[pl.ds(0, 4)], room, done).wait()
        out_ref[...] = x_ref[...] + y_ref[...]
        out_ref[:4] += room[...]

    block = (8, 128)
    return pl.pallas_call(
        add,
        grid=(2, 3),
        in_specs=[
            pl.BlockSpec(block, lambda i, j: (i, j)),
            pl.BlockSpec(block, lambda i, j: (i, 0)),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=pl.BlockSpec(block, lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.VMEM((4, 128), x.dtype), pltpu.SemaphoreType.DMA],
    )(x, y, far)


def moves(run, *args: jax.Array) -> Moves:
    found = kernel_moves(jax.make_jaxpr(run)(*args).jaxpr)
    assert len(found) <= 1
    return sum(found.values(), Moves())


def test_blocks_and_dmas_of_a_kernel_are_counted() -> None:
    args = jnp.ones((16, 300)), jnp.ones((16, 128)), jnp.ones((64, 128))
    whole = 8 * 128 * 4
    cut = 8 * 44 * 4  # the last block of a row of 300
    x = 2 * (2 * whole + cut)
    want = Moves(bytes=x + 2 * whole + x + 6 * whole // 2, dmas=6 + 2 + 6 + 6, steps=6)
    assert moves(known_kernel, *args) == want

    def several(x, y, far):
        return jax.lax.fori_loop(0, 5, lambda _, x: known_kernel(x, y, far), x)

    assert moves(several, *args) == want * 5


def test_only_what_a_tpu_runs_is_counted() -> None:
    args = jnp.ones((16, 384)), jnp.ones((16, 128)), jnp.ones((64, 128))

    def by_platform(x, y, far):
        return jax.lax.platform_dependent(
            x, y, far, tpu=known_kernel, default=lambda x, y, far: x
        )

    def elsewhere(x, y, far):
        return jax.lax.platform_dependent(
            x, y, far, cuda=known_kernel, default=lambda x, y, far: x
        )

    assert moves(by_platform, *args) == moves(known_kernel, *args)
    assert moves(elsewhere, *args) == Moves()


def test_kernels_move_what_their_docstrings_say() -> None:
    D, G, rows, tokens = 128, 4, 8, 32768
    queries = rows * 8 * D * 2
    found = {
        name: moves(program.run, *program.args)
        for name, program in tpu.kernel_programs(tokens).items()
    }

    of_tokens = rows * tokens * (D // 8 + 4 * D // 32 + 4 * G)
    assert found["score_1bit"].bytes == of_tokens + queries
    assert found["score_1bit"].steps == rows * tokens // (4 * 4096)

    pages = tokens // 16
    assert found["score_pages"].bytes == rows * pages * (4 * D + 4 * G) + queries
    assert found["score_pages"].steps == rows * pages // 2048

    selected = 2048
    flags = rows * selected * 4
    results = rows * 8 * (D + 128) * 4
    attended = rows * selected * 4 * D
    assert found["attend_pages"].bytes == attended + flags + queries + results
    program = tpu.kernel_programs(tokens)["attend_groups"]
    jaxpr = jax.make_jaxpr(program.run)(*program.args).jaxpr
    (of_groups,) = kernel_moves(jaxpr, {tpu.GROUPS: program.own}).values()
    marks = rows * tokens * 4
    read = rows * tpu.KERNEL_GROUPS * 256 * 2 * D
    assert of_groups.bytes == read + marks + queries + results
    assert of_groups.dmas == rows * (2 * tpu.KERNEL_GROUPS + 4)

    own = 2 * rows * selected // 16
    assert (
        found["attend_pages"].dmas == own + 4 * rows
    )  # those of two operands and results, too


GATHERS = """HloModule step

%fused_tokens (p0: bf16[8,4096,128], p1: s32[8,20]) -> bf16[8,20,128] {
  %p0 = bf16[8,4096,128]{2,1,0} parameter(0)
  %p1 = s32[8,20]{1,0} parameter(1)
  ROOT %tokens = bf16[8,20,128]{2,1,0} gather(%p0, %p1), offset_dims={2}, slice_sizes={1,1,128}
}

%by_sparsecore (p2: bf16[8,4096,128], p3: s32[8,20]) -> bf16[8,20,128] {
  %p2 = bf16[8,4096,128]{2,1,0} parameter(0)
  %p3 = s32[8,20]{1,0} parameter(1)
  ROOT %taken = bf16[8,20,128]{2,1,0} fusion(%p2, %p3), kind=kCustom, calls=%fused_tokens
}, execution_thread="sparsecore"

%few (a: bf16[8,4096,128]) -> bf16[8,20,128] {
  %a = bf16[8,4096,128]{2,1,0} parameter(0)
  ROOT %first = bf16[8,20,128]{2,1,0} slice(%a), slice={[0:8], [0:20], [0:128]}
}

%more (b: bf16[8,4096,128]) -> bf16[8,20,128] {
  %b = bf16[8,4096,128]{2,1,0} parameter(0)
  %which = s32[8,20]{1,0} constant({...})
  %taken.1 = bf16[8,20,128]{2,1,0} fusion(%b, %which), kind=kCustom, calls=%fused_tokens
  ROOT %twice = bf16[8,20,128]{2,1,0} copy(%taken.1)
}

ENTRY %main (far: bf16[8,4096,128], near: f32[8,4096], at: s32[8,20]) -> bf16[8,20,128] {
  %far = bf16[8,4096,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %near = f32[8,4096]{1,0:T(8,128)S(1)} parameter(1)
  %at = s32[8,20]{1,0} parameter(2)
  %pages = bf16[8,5,16,128]{3,2,1,0} gather(%far, %at), offset_dims={2,3}, slice_sizes={1,16,128}
  %scores = f32[8,20]{1,0} gather(%near, %at), offset_dims={}, slice_sizes={1,1}
  %start = ((), (), s32[]{:S(2)}) call-start(), async_execution_thread="sparsecore", to_apply=%by_sparsecore
  %update = ((bf16[8,4096,128]{2,1,0}, s32[8,20]{1,0}), bf16[8,20,128]{2,1,0}) call-update(%start, %far, %at)
  %done = bf16[8,20,128]{2,1,0} call-done(%update)
  ROOT %either = bf16[8,20,128]{2,1,0} conditional(%done, %far, %far), branch_computations={%few, %more}
}
"""


def test_gathers_count_slices_of_main_memory_of_the_branch_that_moves_most() -> None:
    program = Program(GATHERS)
    assert program.gathered(on_sparsecore=False) == 8 * 5 + 8 * 20
    assert program.gathered(on_sparsecore=True) == 8 * 20


def test_a_gather_by_sparsecores_moves_its_slices_once() -> None:
    taken = 8 * 20 * 128 * 2
    slots = 8 * 20 * 4
    pages = 2 * 8 * 5 * 16 * 128 * 2  # read and written
    by_one_core = pages + slots_of_scores()
    more = 2 * taken + slots + 2 * taken
    assert Program(GATHERS).moved() == by_one_core + 2 * taken + slots + more


def slots_of_scores() -> int:
    """The scores that a gather takes from the fast memory and writes to the main one."""
    return 8 * 20 * 4


def test_a_derived_time_has_bytes_dmas_and_bundles() -> None:
    moved = 819_000_000  # a millisecond
    kernel = Moves(bytes=moved, dmas=1000, steps=1000)

    def us(slices: int, kernel: Moves, bundles: int = 0, chip: str = "v5e") -> float:
        on_sparsecore = slices if chip == "tpu7x" else 0
        rest = slices - on_sparsecore
        known = {"kvjax_score": bundles}
        return derived_us(chip, moved, rest, on_sparsecore, {"kvjax_score": kernel}, known)

    assert us(1000, Moves()) == pytest.approx(1030)
    assert us(1000, kernel) == pytest.approx(2030)  # its bytes
    assert us(1000, Moves(moved, 50_000, 1)) == pytest.approx(2530)  # its DMAs
    assert us(1000, kernel, bundles=3000) == pytest.approx(3030)  # its bundles
    of_bytes = 1e6 * moved / 3690e9
    assert us(32_000, Moves(), chip="tpu7x") == pytest.approx(of_bytes + 30)


def test_groups_that_selections_touch_are_those_of_the_nearest_measured_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(selected: int, groups: int) -> dict[str, object]:
        return {
            "method": "fier",
            "size": 128,
            "groups": 100,
            "selected": selected,
            "touched": groups,
        }

    file = tmp_path / "touched.json"
    file.write_text(json.dumps({"rows": [row(200, 40), row(800, 90)]}))
    monkeypatch.setattr(tpu, "TOUCHED", file)
    assert tpu.touched("fier:page=1", 131072) == 410  # 2048 of them are 1.6 %, and 200 of 12800
    assert tpu.touched("fier", 32768) == 230
    assert tpu.touched("another", 131072) == 1024  # as many as it can
