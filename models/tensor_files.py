"""The tensors of safetensors files: what headers say of them, views of their bytes, and their
way to devices.

A file is mapped into memory, and the bytes of a tensor are touched once: on their way to a GPU,
which transposes and casts them there, or when threads write them as a CPU's parameters. Threads
work a few tensors ahead of the caller, so that memory holds the model and these tensors.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from safetensors import SafetensorError, safe_open

FLOATS = {
    "BF16": jnp.dtype(jnp.bfloat16),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
AHEAD = 1 << 29  # bytes of tensors that threads work on ahead of the caller
THREADS = 4
# Rows and columns that a CPU transposes at a time, with a gap between rows so that they do not
# share places in its cache: 2.2 GB/s of bf16 on a core, where XLA and numpy reach 1.0 and 0.3.
BLOCK = (128, 256)
GAP = 8
ALIGNED = 64  # bytes; JAX takes such an array of the host as an array of the CPU without a copy

# The values that a code of MXFP4 stands for.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

T = TypeVar("T")


@dataclass(frozen=True)
class Tensor:
    """The entry of a tensor in a file's header."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it
    name: str  # in the file
    first: int  # its first byte in the file

    @property
    def nbytes(self) -> int:
        """Bytes of a tensor whose dtype is one of `FLOATS`, or U8."""
        return math.prod(self.shape) * self._dtype.itemsize

    @property
    def _dtype(self) -> np.dtype:
        return np.dtype(np.uint8) if self.dtype == "U8" else FLOATS[self.dtype]

    def view(self, content: np.ndarray) -> np.ndarray:
        """The tensor in the bytes u8[size] of its file."""
        return (
            content[self.first : self.first + self.nbytes].view(self._dtype).reshape(self.shape)
        )


@dataclass(frozen=True)
class Stack:
    """Arrays [a, b] of experts that become one [E, a, b] when they are read, by `np.asarray`."""

    views: tuple[np.ndarray, ...]

    @property
    def nbytes(self) -> int:
        return sum(view.nbytes for view in self.views)

    def __getitem__(self, index: tuple[slice, ...]) -> Stack:
        experts, *inside = index
        return Stack(tuple(view[tuple(inside)] for view in self.views[experts]))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.stack(self.views)


@dataclass(frozen=True)
class Grouped:
    """One part of a tensor [rows, ...] of `groups` groups, in each of which the parts follow each
    other; `rows` are those of this part if the parts themselves followed each other.
    """

    view: np.ndarray
    groups: int
    rows: slice
    index: tuple[slice, ...] = ()  # of the part; () for all

    @property
    def nbytes(self) -> int:
        return self._whole.nbytes

    @property
    def _whole(self) -> np.ndarray:
        grouped = self.view.reshape(self.groups, -1, *self.view.shape[1:])
        start = self.rows.start // self.groups
        return grouped[:, start : self.rows.stop // self.groups]

    def __getitem__(self, index: tuple[slice, ...]) -> Grouped:
        return replace(self, index=index)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        part = self._whole.reshape(-1, *self.view.shape[1:])
        return part[self.index] if self.index else part


@dataclass(frozen=True)
class Mxfp4:
    """Numbers of 4 bits, expanded to bfloat16[E, a, b], which is exact, when they are read, by
    `np.asarray`.

    `blocks` u8[E, a, b/32, 16] have two numbers a byte, the low half first; `scales` u8[E, a,
    b/32] have the exponent of 2 of each block, plus 127.
    """

    blocks: np.ndarray
    scales: np.ndarray
    last: slice | None = None  # of the last axis; None: all

    @property
    def nbytes(self) -> int:
        start, stop = self._bounds
        return 2 * math.prod(self.blocks.shape[:2]) * (stop - start)

    @property
    def _bounds(self) -> tuple[int, int]:
        start, stop, _ = (self.last or slice(None)).indices(self.blocks.shape[2] * 32)
        return start, stop

    def __getitem__(self, index: tuple[slice, ...]) -> Mxfp4:
        *outer, last = index
        return Mxfp4(self.blocks[tuple(outer)], self.scales[tuple(outer)], last)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        start, stop = self._bounds
        near = slice(start // 32, -(-stop // 32))  # the blocks that hold them
        out = np.empty((*self.blocks.shape[:2], stop - start), FLOATS["BF16"])
        for expert, blocks, scales in zip(
            out, self.blocks[:, :, near], self.scales[:, :, near], strict=True
        ):
            whole = _pairs()[scales.astype(np.uint16)[..., None] << 8 | blocks].view(out.dtype)
            expert[...] = whole.reshape(len(whole), -1)[
                :, start - 32 * near.start : stop - 32 * near.start
            ]
        return out


@cache
def _pairs() -> np.ndarray:
    """The two bfloat16 of a byte of MXFP4, as u32[scale * 256 + byte]."""
    codes = np.arange(256)
    exponents = np.arange(256)[:, None, None] - 127
    with np.errstate(over="ignore"):
        numbers = np.ldexp(np.stack([E2M1[codes & 15], E2M1[codes >> 4]], axis=-1), exponents)
        return numbers.astype(FLOATS["BF16"]).view(np.uint32).reshape(-1)


class Part(NamedTuple):
    """A part of a tensor that one or several devices hold."""

    view: Any  # an array, or a `Stack` or `Mxfp4` of which np.asarray makes one
    dtype: np.dtype  # on the devices
    transposed: bool  # there, of the last two axes
    devices: Sequence[Any] = (None,)  # None is JAX's default


def read_header(file: Path) -> list[Tensor]:
    """The tensors of a file.

    Raises:
      ValueError: it is truncated or no safetensors file.
    """
    try:
        with safe_open(file, framework="numpy"):  # checks all of the header
            pass
    except (SafetensorError, OSError) as error:
        with file.open("rb") as opened:
            start = opened.read(40)
        hint = (
            "it is a Git LFS pointer, not the data"
            if start.startswith(b"version https://git-lfs")
            else str(error)
        )
        raise ValueError(
            f"{file} is truncated or no safetensors file ({hint}; {file.stat().st_size} bytes); download it again"
        ) from error
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    header.pop("__metadata__", None)
    return [
        Tensor(
            file,
            tuple(entry["shape"]),
            entry["dtype"],
            name,
            8 + size + entry["data_offsets"][0],
        )
        for name, entry in header.items()
    ]


def mapped(file: Path) -> np.ndarray:
    """The bytes u8[size] of a file, which are read when they are touched; the system is told to
    fetch them before.
    """
    with file.open("rb") as opened:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        return np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def place(jobs: Iterable[tuple[T, list[Part]]]) -> Iterator[tuple[T, list[Array]]]:
    """Moves the parts of each job to their devices; yields the job and its arrays, in the order
    of jobs.
    """
    default = next(iter(jax.device_put(np.zeros(())).devices()))
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        running: deque[tuple[T, int, list[tuple[Part, Any]]]] = deque()
        ahead = 0
        for job, parts in jobs:
            size = sum(part.view.nbytes for part in parts)
            while running and ahead + size > AHEAD:
                before, done, sent = running.popleft()
                ahead -= done
                yield before, _arrive(sent)
            running.append(
                (job, size, [(part, pool.submit(_send, part, default)) for part in parts])
            )
            ahead += size
        while running:
            before, _, sent = running.popleft()
            yield before, _arrive(sent)


def _send(part: Part, default: Any) -> Any:
    """In a thread: a part as it is to be on a CPU, or as the file has it on another device."""
    device = part.devices[0] or default
    array = np.asarray(part.view)
    if device.platform == "cpu":
        return write(array, part.dtype, transposed=part.transposed)
    with jax.default_device(default):
        return jax.device_put(array, part.devices[0])


def _arrive(sent: list[tuple[Part, Any]]) -> list[Array]:
    """The arrays of parts, on all of their devices."""
    arrays = []
    for part, running in sent:
        first, *others = part.devices
        array = running.result()
        if isinstance(array, np.ndarray):
            array = jax.device_put(array, first)
        elif part.transposed or array.dtype != part.dtype:
            array = _convert(array, dtype=part.dtype, transposed=part.transposed)
        array = jax.block_until_ready(array)
        arrays += [array, *(jax.device_put(array, device) for device in others)]
    return arrays


@partial(jax.jit, static_argnames=("dtype", "transposed"))
def _convert(array: Array, *, dtype: np.dtype, transposed: bool) -> Array:
    return (jnp.matrix_transpose(array) if transposed and array.ndim > 1 else array).astype(
        dtype
    )


def write(array: np.ndarray, dtype: np.dtype, *, transposed: bool) -> np.ndarray:
    """A new array of the host with the numbers of another, rounded to `dtype`, its last two
    axes transposed.
    """
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    transposed &= array.ndim > 1
    shape = (*array.shape[:-2], *array.shape[:-3:-1]) if transposed else array.shape
    size = math.prod(shape) * dtype.itemsize
    content = np.empty(size + ALIGNED, np.uint8)
    start = -content.ctypes.data % ALIGNED
    out = content[start : start + size].view(dtype).reshape(shape)
    with np.errstate(over="ignore", invalid="ignore"):
        if not transposed:
            out[...] = array
            return out
        rows, columns = BLOCK
        block = np.empty((rows, columns + GAP), dtype)
        bits = f"u{dtype.itemsize}"  # numpy copies bfloat16 one by one
        for at in np.ndindex(shape[:-2]):
            one = array[at]
            turned = out[at]
            for i in range(0, one.shape[0], rows):
                for j in range(0, one.shape[1], columns):
                    part = one[i : i + rows, j : j + columns]
                    inside = block[: part.shape[0], : part.shape[1]]
                    inside[...] = part
                    turned[j : j + columns, i : i + rows].view(bits)[...] = inside.view(bits).T
    return out
