"""Compiles for GPUs on a machine without one, to inspect the code of ptxas for a kernel and of
XLA around it.

Needs Python 3.12, jax 0.11 and the CUDA plugin's wheels: pip install --no-deps
jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm, of jax's version. `missing()`
says what is not there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.attend import attend_key_blocks
from kvjax.kernels_pallas.simt import Launch

H200 = simt.card("NVIDIA H200")
# What XLA asks of the device. Unless a card's own is here, the number is an H200's.
TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: {multiprocessors}
  shared_memory_per_block: 49152 shared_memory_per_core: {per_core} shared_memory_per_block_optin: {smem}
  fpus_per_core: 128
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {bandwidth}000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98 device_memory_size: 151397597184
  cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
  device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability {capability}" name: "{kind}"
  device_address_bits: 64 pcie_bandwidth: 34359738368 ecc_enabled: true
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{kind}"
"""


PASSIVE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")


def missing() -> str | None:
    """The reason why this process cannot compile for a GPU; None if it can."""
    if jax.__version_info__ < (0, 11):
        return f"compiling for a GPU without one needs jax >= 0.11; this is {jax.__version__}"
    nvidia = importlib.util.find_spec("nvidia")
    folders = (
        [Path(folder) for folder in (nvidia.submodule_search_locations or ())] if nvidia else []
    )
    absent = []
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        absent.append("jax-cuda13-plugin and jax-cuda13-pjrt")
    if not any(list(folder.glob("*/bin/ptxas")) for folder in folders):
        absent.append("nvidia-cuda-nvcc and nvidia-nvvm")
    return (
        f"compiling for a GPU without one needs the wheels of {' and '.join(absent)}"
        if absent
        else None
    )


@dataclass(frozen=True)
class Compiled:
    """A program for a GPU."""

    hlo: str  # optimised
    temp_bytes: int  # of device and host
    kernels: dict[
        str, tuple[int, int, int]
    ]  # name: registers, bytes of spills stored, bytes of spills loaded
    architecture: str  # that the kernels were compiled for, such as "sm_90a"
    shared: dict[str, int]  # bytes of shared memory that a block of each kernel launches with
    threads: dict[str, int]  # of a block

    @property
    def launches(self) -> list[str]:
        """The launches of the program on the device, in order, with a loop or branch as one."""
        entry = self.hlo[self.hlo.index("\nENTRY") :]
        found = re.findall(
            r"^\s+(?:ROOT )?%(\S+) = (?:\(.*?\)|\S+) ([a-z][\w-]*)\(", entry, re.MULTILINE
        )
        return [name for name, op in found if op not in PASSIVE]


class _OnHost(NamedSharding):
    """In pinned host memory of a device that is not there: it names no memories, so that a
    plain one has no kind.
    """

    memory_kind = property(lambda self: "pinned_host")  # type: ignore[assignment]


def devices_of(target: simt.Target, topology: str = "1x1x1") -> Any:
    """The devices of a card that is not there."""
    from jax.experimental import topologies

    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # it asks the driver
    major, _, minor = target.capability.partition(".")
    config = TARGET.format(
        **{
            name: getattr(target, name)
            for name in ("kind", "capability", "multiprocessors", "smem", "bandwidth")
        },
        per_core=target.smem + 1024,
        major=major,
        minor=minor,
        features="feature_extension: ACCELERATED_FEATURES" if int(major) >= 9 else "",
    )
    return topologies.get_topology_desc(
        platform="cuda", target_config=config, topology=topology
    ).devices


@cache
def _shardings(target: simt.Target) -> tuple[NamedSharding, NamedSharding]:
    """In the memory of the device, and in that of its host."""
    mesh = Mesh(np.array(devices_of(target)[:1]), ("x",))
    return NamedSharding(mesh, PartitionSpec()), _OnHost(mesh, PartitionSpec())


@contextlib.contextmanager
def _told(target: simt.Target) -> Iterator[None]:
    """In the block, Mosaic compiles for the target. It takes the architecture from the
    process's own GPU, and without one builds for Hopper whatever the program is for."""
    from jax.experimental.mosaic.gpu import utils

    major, _, minor = target.capability.partition(".")
    with mock.patch.object(utils, "_infer_arch", return_value=(int(major), int(minor))):
        yield


def compile_for(
    f: Callable[..., Any],
    *args: Any,
    target: simt.Target = H200,
    donate: int | None = None,
    options: Any = None,
) -> Compiled:
    """jit(f) for `args`, arrays or `jax.ShapeDtypeStruct`, of which argument `donate` is given
    away, with `options` of XLA."""

    def shape(a: Any) -> jax.ShapeDtypeStruct:
        host = getattr(getattr(a, "sharding", None), "memory_kind", None) == "pinned_host"
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=_shardings(target)[host])

    shapes = jax.tree.map(shape, args)
    launches: list[Launch] = []
    with _standard_output() as text, _told(target), _noted(launches):
        program = (
            jax.jit(f, donate_argnums=donate, compiler_options=options).lower(*shapes).compile()
        )
        report = text()
    memory = program.memory_analysis()
    temp = memory.temp_size_in_bytes + memory.host_temp_size_in_bytes
    shared = {
        launch.name: sum(-(-4 * words // 1024) * 1024 for words in launch.scratch)
        for launch in launches
    }
    kernels, architectures = _kernels(report)
    assert len(architectures) <= 1
    threads = {launch.name: 128 * launch.warpgroups for launch in launches}
    return Compiled(program.as_text(), temp, kernels, "".join(architectures), shared, threads)


@contextlib.contextmanager
def _noted(launches: list[Launch]) -> Iterator[None]:
    """Notes the launches that are traced in the block."""
    run = simt.Mosaic.run

    def noted(self: Any, program: Any, launch: Launch, *args: Any) -> Any:
        launches.append(launch)
        return run(self, program, launch, *args)

    attend = attend_key_blocks._launch  # in Pallas's own operations

    def attending(*args: Any, config: Any, **how: Any) -> Any:
        words = attend_key_blocks.smem_bytes(args[0].shape[2], config) // 4
        launches.append(
            Launch(name="kvjax_attend_key_blocks", blocks=1, warpgroups=3, scratch=(words,))
        )
        return attend(*args, config=config, **how)

    with (
        mock.patch.object(simt.Mosaic, "run", noted),
        mock.patch.object(attend_key_blocks, "_launch", attending),
    ):
        yield


def _kernels(report: str) -> tuple[dict[str, tuple[int, int, int]], set[str]]:
    found, architectures = {}, set()
    for part in report.split("Compiling entry function")[1:]:
        ((name, architecture),) = re.findall(r"'(\S+)' for '(sm_\w+)'", part)
        stores, loads = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)[
            0
        ]
        (registers,) = re.findall(r"Used (\d+) registers", part)
        found[name] = int(registers), int(stores), int(loads)
        architectures.add(architecture)
    return found, architectures


@contextlib.contextmanager
def _standard_output() -> Iterator[Callable[[], str]]:
    """Captures what this process writes to file descriptors 1 and 2 in the block, as the C++ of
    Mosaic does.
    """
    with tempfile.TemporaryFile() as file:
        old = [os.dup(n) for n in (1, 2)]
        sys.stdout.flush(), sys.stderr.flush()
        os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
        for n in (1, 2):
            os.dup2(file.fileno(), n)
        try:
            yield lambda: (file.seek(0), file.read().decode(errors="replace"))[1]
        finally:
            for n, saved in zip((1, 2), old, strict=True):
                os.dup2(saved, n)
                os.close(saved)
            del os.environ["MOSAIC_GPU_DUMP_PTXAS"]
