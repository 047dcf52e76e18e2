"""Registers of a thread, instructions on them, and control flow. Python loops unroll."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

from kvjax.kernels_pallas.simt.backend import backend
from kvjax.kernels_pallas.simt.types import Arithmetic, Comparison

Operand = Any  # Word | int


def value(x: Operand) -> Any:
    """The backend's value of a word or number."""
    return x.value if isinstance(x, Word) else backend().constant(x)


class Word:
    """A u32 in a register of each thread."""

    def __init__(self, value: Any):
        self.value = value

    def _op(self, op: Arithmetic, other: Operand) -> Word:
        return Word(backend().arithmetic(op, self.value, value(other)))

    def __add__(self, other: Operand) -> Word:
        return self._op("add", other)

    def __sub__(self, other: Operand) -> Word:
        return self._op("sub", other)

    def __mul__(self, other: Operand) -> Word:
        return self._op("mul", other)

    def __and__(self, other: Operand) -> Word:
        return self._op("and", other)

    def __or__(self, other: Operand) -> Word:
        return self._op("or", other)

    def __xor__(self, other: Operand) -> Word:
        return self._op("xor", other)

    def __rshift__(self, other: Operand) -> Word:
        return self._op("shr", other)

    def __lshift__(self, other: Operand) -> Word:
        return self._op("shl", other)

    def _compare(self, op: Comparison, other: Operand) -> Flag:
        return Flag(backend().compare(op, self.value, value(other)))

    def __lt__(self, other: Operand) -> Flag:
        return self._compare("lt", other)

    def __le__(self, other: Operand) -> Flag:
        return self._compare("le", other)

    def __gt__(self, other: Operand) -> Flag:
        return self._compare("gt", other)

    def __ge__(self, other: Operand) -> Flag:
        return self._compare("ge", other)

    def equals(self, other: Operand) -> Flag:
        return self._compare("eq", other)

    def differs(self, other: Operand) -> Flag:
        return self._compare("ne", other)


class Flag:
    """A predicate of each thread."""

    def __init__(self, value: Any):
        self.value = value

    def __and__(self, other: Flag) -> Flag:
        return Flag(backend().arithmetic("and", self.value, other.value))

    def __or__(self, other: Flag) -> Flag:
        return Flag(backend().arithmetic("or", self.value, other.value))

    def select(self, yes: Operand, no: Operand) -> Word:
        return Word(backend().select(self.value, value(yes), value(no)))


def word(x: Operand) -> Word:
    return x if isinstance(x, Word) else Word(value(x))


def real_bits(x: float) -> int:
    """The bits of an f32."""
    return struct.unpack("<I", struct.pack("<f", x))[0]


def real(x: float) -> Word:
    return word(real_bits(x))


def divide(x: Word, by: int) -> Word:
    return x if by == 1 else Word(backend().arithmetic("div", x.value, value(by)))


def sum_of(words: Sequence[Word]) -> Word:
    return reduce(lambda a, b: a + b, words)


def ptx(code: str, *args: Any, results: int = 0, convergent: bool = False) -> Any:
    """Emits `code`, in which $0, $1, ... are the `results` (u32) and then the arguments.

    Words are u32, addresses in device memory u64. One result is returned as a Word, more as a
    list.
    """
    values = [
        a.value if isinstance(a, (Word, Flag)) else value(a) if isinstance(a, int) else a
        for a in args
    ]
    words = [Word(x) for x in backend().ptx(code, values, results, convergent)]
    return (words[0] if results == 1 else words) if results else None


def instr(name: str, *args: Operand, convergent: bool = False) -> Word:
    """One instruction with one result, such as instr("fma.rn.f32", a, b, c)."""
    operands = ", ".join(f"${i}" for i in range(len(args) + 1))
    return ptx(f"{name} {operands};", *args, results=1, convergent=convergent)


def from_halves(two: Word) -> list[Word]:
    """The two f16 numbers of a word, in f32."""
    both = "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
    words: list[Word] = ptx(both, two, results=2)
    return words


def clipped(x: Word, limit: int) -> Word:
    """A signed x, clipped to 0 .. `limit`."""
    return instr("min.s32", instr("max.s32", x, 0), limit)


@contextmanager
def when(flag: Flag) -> Iterator[None]:
    """Runs the block in the threads whose flag is true."""
    with backend().when(flag.value):
        yield


def loop(
    start: Operand, stop: Operand, step: Operand, carry: Sequence[Word] = ()
) -> Callable[..., list[Word]]:
    """Runs carry = body(i, *carry) for i in range(start, stop, step); each thread has its own
    bounds.
    """

    def run(body: Callable[..., Any]) -> list[Word]:
        def step_of(i: Any, *values: Any) -> list[Any]:
            out = body(Word(i), *(Word(x) for x in values))
            out = [] if out is None else out if isinstance(out, (list, tuple)) else [out]
            return [x.value for x in out]

        bounds = value(start), value(stop), value(step)
        return [Word(x) for x in backend().loop(*bounds, [x.value for x in carry], step_of)]

    return run


def repeat(
    carry: Sequence[Word], body: Callable[..., tuple[Flag, Sequence[Word]]]
) -> list[Word]:
    """Runs again, carry = body(*carry) once, and then while `again` is true."""

    def step_of(*values: Any) -> tuple[Any, list[Any]]:
        again, out = body(*(Word(x) for x in values))
        return again.value, [x.value for x in out]

    return [Word(x) for x in backend().repeat([x.value for x in carry], step_of)]


def branch(
    flag: Flag, make: Callable[[], Sequence[Word]], otherwise: Sequence[Word]
) -> list[Word]:
    """make() if the flag is true, else `otherwise`. If make() has a barrier, the whole block
    must share the flag.
    """
    made = backend().branch(
        flag.value, lambda: [x.value for x in make()], [x.value for x in otherwise]
    )
    return [Word(x) for x in made]
