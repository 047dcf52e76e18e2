"""Addresses and loads: device memory has u64 addresses, shared memory u32."""

from __future__ import annotations

from typing import Any

from kvjax.kernels_pallas.simt.backend import backend, has_cluster
from kvjax.kernels_pallas.simt.word import Flag, Operand, Word, clipped, divide, instr, ptx

Numbers = tuple[Any, int]  # a ref of i32 in device memory, and how many rows share each


def global_address(ref: Any) -> Any:
    """The u64 address of a ref in device memory."""
    return backend().address(ref, 64)


def shared_address(ref: Any) -> Word:
    """The address of a ref in this block's shared memory."""
    return Word(backend().address(ref, 32))


def offset(address: Any, byte: Word) -> Any:
    """address + byte, in 64 bits."""
    return backend().arithmetic("add", address, backend().extend(byte.value))


def offset_rows(address: Any, row: Word, stride: int) -> Any:
    """address + row * stride, in 64 bits."""
    index = backend().extend(row.value)
    return backend().arithmetic(
        "add", address, backend().arithmetic("mul", index, backend().constant(stride, 64))
    )


def select_address(flag: Flag, yes: Any, no: Any) -> Any:
    """As `Flag.select`, for u64 addresses."""
    return backend().select(flag.value, yes, no)


def remote(at: Word, block: Operand) -> Word:
    """The address of `at` in the shared memory of another block of the cluster."""
    return (
        ptx("mapa.shared::cluster.u32 $0, $1, $2;", at, block, results=1)
        if has_cluster()
        else at
    )


def remote_space() -> str:
    """The state space of addresses of `remote`."""
    return "shared::cluster" if has_cluster() else "shared"


def load(address: Any, at: int = 0) -> Word:
    """The word of device memory `at` bytes after an address; no kernel may write it meanwhile."""
    return ptx(f"ld.global.nc.u32 $0, [$1{f'+{at}' if at else ''}];", address, results=1)


def load_below(i: Word, end: Operand, address: Any, otherwise: Operand = 0) -> Word:
    """The word of device memory at an address if i < end; else `otherwise`, and nothing is
    read.
    """
    code = (
        "{ .reg .pred p; setp.lt.u32 p, $1, $2; mov.u32 $0, $3; @p ld.global.nc.u32 $0, [$4]; }"
    )
    return ptx(code, i, end, otherwise, address, results=1)


def load_shared(at: Word, words: int = 1) -> Any:
    """A word of shared memory, or a list of 2 or 4 adjacent ones."""
    return _load("shared", at, words)


def load_remote(at: Word, words: int = 1) -> Any:
    """As `load_shared`, at an address of `remote`."""
    return _load(remote_space(), at, words)


def store_shared(at: Word, *words: Operand) -> None:
    """Writes 1, 2 or 4 adjacent words of shared memory."""
    _store("shared", at, words)


def store_remote(at: Word, *words: Operand) -> None:
    """As `store_shared`, at an address of `remote`."""
    _store(remote_space(), at, words)


def _load(space: str, at: Word, words: int) -> Any:
    return ptx(
        f"ld.{space}.{_vector(words)}u32 {_registers(0, words)}, [${words}];", at, results=words
    )


def _store(space: str, at: Word, words: tuple[Operand, ...]) -> None:
    ptx(f"st.{space}.{_vector(len(words))}u32 [$0], {_registers(1, len(words))};", at, *words)


def _vector(words: int) -> str:
    return f"v{words}." if words > 1 else ""


def _registers(first: int, words: int) -> str:
    names = ", ".join(f"${first + i}" for i in range(words))
    return f"{{{names}}}" if words > 1 else names


def swapped_row(row: Word, K: int, T: int, H: int = 1) -> Word:
    """The number in [..., T, K, H] of row `row` of [..., K, T, H]."""
    if K == 1 or T == 1:
        return row
    of_step, of_head, of_all = (divide(row, n) for n in (H, T * H, K * T * H))
    head = of_head - of_all * K
    step = of_step - of_head * T
    return ((of_all * T + step) * K + head) * H + (row - of_step * H)


def number_of(numbers: Numbers, row: Word) -> Word:
    at, shared_by = numbers
    return load(offset_rows(global_address(at), divide(row, shared_by), 4))


def ends_of(start: Numbers, stop: Numbers, row: Word, size: int) -> list[Word]:
    """Start and stop of a row's span, `clipped`; by selections, so that LLVM sees that no
    offset of a slot wraps.
    """
    ends = (number_of(numbers, row) for numbers in (start, stop))
    return [(x < 1 << 31).select((x < size).select(x, size), 0) for x in ends]


def span_of(start: Numbers, stop: Numbers, row: Word, size: int, local: int = 0) -> list[Word]:
    """The first slot of a row's span [start, stop - local) among `size` slots, and the number
    of slots.
    """
    first = clipped(number_of(start, row), size)
    end = number_of(stop, row) - local
    return [first, instr("max.s32", instr("min.s32", end, size) - first, 0)]
