"""What a TPU's compiler made of a program, read from its text: bytes, copies and gathers.

XLA's own figure of bytes has what stays in the fast memory, too, and counts a loop once. Here an
instruction counts what it reads from the main memory and writes to it: `Program.moved`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp

INSTRUCTION = re.compile(
    r"^\s+(?P<root>ROOT )?%(?P<name>\S+) = (?P<shape>\(.*?\)|\S+) (?P<kind>[\w-]+)\((?P<rest>.*)"
)
COMPUTATION = re.compile(r"^(?:ENTRY )?%(?P<name>\S+) \(.*\{\s*$")
TYPES = {
    "bfloat16": "bf16", "float16": "f16", "float32": "f32", "float8_e4m3fn": "f8e4m3fn", "bool": "pred",
    "int8": "s8", "uint8": "u8", "int16": "s16", "uint16": "u16", "int32": "s32", "uint32": "u32",
}  # fmt: skip
SIZES = {name: jnp.dtype(dtype).itemsize for dtype, name in TYPES.items()}  # by XLA's names
ARRAY = re.compile(r"(?P<type>[a-z]+\d*)\[(?P<sizes>[\d,]*)\](?P<layout>\{[^}]*\})?")


def cache_sized_copies(program: Program, cache: Sequence[Any]) -> list[str]:
    """Copies and transposes of arrays that have type and size of a large one of the `cache`.

    A fusion counts if its root is one; instructions inside of it do not, as they write no memory.
    """
    large = max(leaf.size * leaf.dtype.itemsize for leaf in cache) // 64
    stored = {
        (leaf.size, TYPES[str(leaf.dtype)])
        for leaf in cache
        if leaf.size * leaf.dtype.itemsize > large
    }
    copies = []
    for found in program.outside_of_fusions():
        # A copy-start is none: it brings an array nearer in its layout.
        array = ARRAY.search(found["shape"])
        if array is None or program.kind_of(found) not in ("copy", "transpose"):
            continue
        if (elements(array["sizes"]), array["type"]) in stored:
            copies.append(array[0])
    return copies


class Program:
    """The instructions of a compiled program by computation."""

    def __init__(self, hlo: str) -> None:
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = name = ""
        for line in hlo.splitlines():
            if header := COMPUTATION.match(line):
                name = header["name"]
                self.entry = name if line.startswith("ENTRY") else self.entry
                self.computations[name] = {}
            elif match := INSTRUCTION.match(line):
                self.computations[name][match["name"]] = match

    def outside_of_fusions(self) -> Iterator[Instruction]:
        """All instructions that write memory of their own."""
        every = [found for one in self.computations.values() for found in one.values()]
        fusions = [found for found in every if found["kind"] == "fusion"]
        inside = {name for found in fusions for name in named(found, "calls")}
        for name, instructions in self.computations.items():
            if name not in inside:
                yield from instructions.values()

    def kind_of(self, found: Instruction) -> str:
        """The kind of an instruction; of a fusion, that of its root."""
        if found["kind"] != "fusion":
            return found["kind"]
        (called,) = named(found, "calls")
        (root,) = (one for one in self.computations[called].values() if one["root"])
        return root["kind"]

    def _rounds(self, condition: str) -> int | None:
        """The number that the condition of a loop from 0 on compares with; None if the data
        have it."""
        tests = [condition]
        for found in self.computations[condition].values():
            tests += named(found, "calls")
        constants = [
            int(found["rest"].partition(")")[0])
            for name in tests
            for found in self.computations[name].values()
            if found["kind"] == "constant" and found["shape"].startswith("s32[]")
        ]
        return constants[0] if len(constants) == 1 else None

    def runs(self, computation: str | None = None) -> Iterator[Run]:
        """The instructions that a run of a computation executes, without those that move nothing.

        A loop's have its rounds; of branches come those of the one that moves most.
        """
        beside = self.computations[computation or self.entry]
        for found in beside.values():
            if found["kind"] == "while":
                (body,) = named(found, "body")
                (condition,) = named(found, "condition")
                rounds = self._rounds(condition)
                for run in self.runs(body):
                    by_data = run.by_data or rounds is None
                    yield run._replace(times=run.times * (rounds or 1), by_data=by_data)
            elif found["kind"] == "conditional":
                yield from self.runs(max(branches_of(found), key=self.moved))
            elif found["kind"] in ("call", "call-start"):
                on_sparsecore = 'async_execution_thread="sparsecore"' in found["rest"]
                for called in named(found, "to_apply"):
                    for run in self.runs(called):
                        yield run._replace(on_sparsecore=run.on_sparsecore or on_sparsecore)
            elif found["kind"] not in NO_TRAFFIC:
                yield Run(found, beside)

    def moved(self, computation: str | None = None) -> int:
        """Bytes that a run of a computation reads from a TPU's main memory and writes to it.

        A loop counts with its rounds; one with as many as the data say reads all of what it
        slices. Of branches the one counts that moves most. An array that is only sliced or
        gathered from counts with what is taken, and one that is updated in place with the
        update. Arrays in the fast memory count nothing, nor do kernels.
        """
        runs = (run for run in self.runs(computation) if not is_kernel(run.found))
        return sum(run.times * self._moved_by(run) for run in runs)

    def gathered(self, *, on_sparsecore: bool) -> int:
        """The slices that gathers read from a TPU's main memory, each by a DMA: those that the
        TPU's SparseCores read, or those of its other cores."""
        total = 0
        for run in self.runs():
            if run.on_sparsecore == on_sparsecore:
                total += run.times * self._slices_of(run)
        return total

    def _slices_of(self, run: Run) -> int:
        """The slices of main memory that an instruction, or one in its fusion, gathers."""
        beside = run.beside
        gathers = [run.found]
        if run.found["kind"] == "fusion":
            (called,) = named(run.found, "calls")
            beside = self.computations[called]
            gathers = list(beside.values())
        return sum(
            slices_of(found)
            for found in gathers
            if found["kind"] == "gather" and size_of(beside[operand_names(found)[0]]["shape"])
        )

    def _moved_by(self, run: Run) -> int:
        """Bytes that one instruction moves."""
        found = run.found
        operands = [run.beside[name] for name in operand_names(found) if name in run.beside]
        if found["kind"] in ("copy-start", "slice-start"):
            # Of its tuple one array is the destination, beside the source and a semaphore.
            arrays = [array[0] for array in ARRAY.finditer(found["shape"])]
            place = 0 if found["kind"] == "copy-start" else 1
            memories = size_of(operands[0]["shape"]) > 0, size_of(arrays[place]) > 0
            return any_size_of(arrays[place]) * sum(memories)
        if found["kind"] in TAKES:
            return size_of(found["shape"]) * (2 if size_of(operands[0]["shape"]) else 1)
        if found["kind"] == "dynamic-update-slice":
            update = size_of(operands[1]["shape"])
            return update + (
                any_size_of(operands[1]["shape"]) if size_of(found["shape"]) else 0
            )
        if found["kind"] != "fusion":
            return sum(size_of(a["shape"]) for a in (found, *operands))

        (called,) = named(found, "calls")
        inside = self.computations[called]
        parameters = [i for i in inside.values() if i["kind"] == "parameter"]
        parameters.sort(key=lambda i: int(i["rest"].partition(")")[0]))
        total = 0
        for operand, parameter in zip(operands, parameters, strict=False):
            if run.by_data:
                total += size_of(operand["shape"])
            elif size_of(operand["shape"]):
                total += self._read_by(operand, parameter, inside)
        updated = [i for i in inside.values() if i["kind"] == "dynamic-update-slice"]
        if not updated:
            return total + size_of(found["shape"])
        updates = (inside.get(operand_names(i)[1]) for i in updated)
        written = sum(any_size_of(i["shape"]) for i in updates if i is not None)
        return total + (written if size_of(found["shape"]) else 0)

    def _read_by(
        self, operand: Instruction, parameter: Instruction, inside: dict[str, Instruction]
    ) -> int:
        """Bytes of `operand` that a fusion reads, which has it as `parameter`."""
        users = users_of(parameter, inside)
        while len(users) == 1 and self._passes_on(users[0]):
            parameter = users[0]
            users = users_of(parameter, inside)
        if not users:  # it is the fusion's result
            return size_of(operand["shape"])
        first = all(operand_names(i)[0] == parameter["name"] for i in users)
        if not first or not {i["kind"] for i in users} <= TAKES | {"dynamic-update-slice"}:
            return size_of(operand["shape"])
        return sum(any_size_of(i["shape"]) for i in users if i["kind"] in TAKES)

    def _passes_on(self, found: Instruction) -> bool:
        """True within a fusion for what names its operand anew, or in another layout."""
        if found["kind"] != "fusion":
            return found["kind"] in ("bitcast", "copy")
        (called,) = named(found, "calls")
        kinds = [i["kind"] for i in self.computations[called].values()]
        return sorted(kinds) == ["copy", "parameter"]


Instruction = re.Match[str]


class Run(NamedTuple):
    """An instruction that is executed."""

    found: Instruction
    beside: dict[str, Instruction]  # its computation
    times: int = 1
    by_data: bool = False  # in a loop with as many rounds as the data say
    on_sparsecore: bool = False


TAKES = {"slice", "dynamic-slice", "gather"}  # a part of their first operand


def named(found: Instruction, role: str) -> list[str]:
    """The computations that an instruction names in a role: its body, or what it calls."""
    return re.findall(rf"\b{role}=%([\w.\-]+)", found["rest"])


def users_of(found: Instruction, beside: dict[str, Instruction]) -> list[Instruction]:
    return [i for i in beside.values() if found["name"] in operand_names(i)]


def branches_of(found: Instruction) -> list[str]:
    """The computations of a conditional."""
    if several := re.search(r"branch_computations=\{([^}]*)\}", found["rest"]):
        return re.findall(r"%([\w.\-]+)", several[1])
    return named(found, "(?:true|false)_computation")


NO_TRAFFIC = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "iota",
    "partition-id", "copy-done", "slice-done", "call-update", "call-done",
}  # fmt: skip


def is_kernel(found: Instruction) -> bool:
    return "tpu_custom_call" in found["rest"]


def slices_of(gather: Instruction) -> int:
    """How many slices a gather takes."""
    (sizes,) = re.findall(r"slice_sizes=\{([\d,]+)\}", gather["rest"])
    (result,) = ARRAY.finditer(gather["shape"])
    return elements(result["sizes"]) // elements(sizes)


def operand_names(found: Instruction) -> list[str]:
    return re.findall(r"%([\w.\-]+)", found["rest"].partition(")")[0])


def size_of(shape: str) -> int:
    """Bytes of a type, without its arrays in a TPU's fast memory."""
    return any_size_of(shape, without="S(1)")


def any_size_of(shape: str, without: str = "no such memory") -> int:
    """Bytes of a type, in whatever memory."""
    total = 0
    for array in ARRAY.finditer(shape):
        if without not in (array["layout"] or "") and array["type"] in SIZES:
            total += elements(array["sizes"]) * SIZES[array["type"]]
    return total


def elements(sizes: str) -> int:
    """The elements of an array whose axes an HLO has as "8,4096,128"; 1 of a scalar."""
    return prod(int(size) for size in sizes.split(",") if size)
