"""What benchmarks/tpu.py reads from compiled programs, on programs written by hand."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks import tpu

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
  %nearer = bf16[1,8,4096,128]{3,2,1,0:S(1)} copy-start(%k)
  %turned = bf16[1,8,4096,128]{3,1,2,0} fusion(%k), kind=kLoop, calls=%fused_copy
  %loop = (s32[], bf16[1,8,4096,128]{3,2,1,0}) while(%turned), condition=%condition, body=%body
  ROOT %back = bf16[1,8,4096,128]{3,2,1,0} copy(%turned)
}
"""


def test_copies_as_large_as_the_cache_are_found_in_and_out_of_fusions() -> None:
    cache = [jax.ShapeDtypeStruct((1, 8, 4096, 128), jnp.bfloat16)]
    assert tpu.cache_sized_copies(PROGRAM, cache) == [
        "bf16[1,8,4096,128]{3,1,2,0}",
        "bf16[1,8,4096,128]{3,2,1,0}",
    ]


def test_copies_of_another_type_or_size_are_not_the_caches() -> None:
    cache = [jax.ShapeDtypeStruct((1, 8, 4096, 128), jnp.uint16)]
    assert tpu.cache_sized_copies(PROGRAM, cache) == []


def test_further_rounds_of_a_loop_count_what_they_slice() -> None:
    block = 8 * 64 * 128 * 2  # bytes: read in a slice, and written as the result
    index = 4
    assert tpu.loop_bytes(PROGRAM) == 9 * (2 * block + index)


def test_a_run_replaces_rows_of_the_same_programs(tmp_path: Path) -> None:
    def row(preset: str, moved: int) -> dict[str, object]:
        place = {"chip": "v5e", "program": "step", "rows": 1, "capacity": 4096}
        return {**place, "preset": preset, "bytes": moved}

    file = tmp_path / "tpu.json"
    tpu.save(file, {"rows": [row("full", 1), row("fier", 2)]})
    tpu.save(file, {"rows": [row("fier", 3)]})
    runs = json.loads(file.read_text())["runs"]
    assert [[one["bytes"] for one in run["rows"]] for run in runs] == [[1], [3]]
