"""Runs the kernels' bodies on CPU: all threads of a grid in lockstep, a register is a numpy
array over them.

Interpret mode does not run PTX, in which the kernels are written through the operations of
`kernels_pallas.simt`. The `Simulator` is a backend of these operations, so each kernel, with
the wrapper around it, runs anywhere and is compared with its reference. It is stricter than a
GPU. It raises on a load or store outside of an array, on one that is not aligned, on a read of
memory that nothing wrote (shared memory included), on an output left unwritten, and on a
collective of a warp with lanes missing.

It also finds races, though all threads run in lockstep. `Touched` keeps which threads read and
wrote each word of shared memory and each byte of the outputs. Two threads may touch the same
place, one of them writing, only with a barrier of both between; threads of different clusters
never may. Stores of equal values are no race. A load past the coherent caches (`.nc`) must be
of memory that the kernel never writes. A block may touch another's shared memory only after a
barrier of the cluster, since that block may not have begun, and before one that the other waits
at, since it may have ended.

The simulator cannot show time, the rounding of `approx` instructions, and the code that Mosaic
and ptxas generate.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import ml_dtypes
import numpy as np

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.simt import Launch

U32, U64 = np.uint32, np.uint64
GLOBAL, GAP = 1 << 40, 1024  # where device memory begins; bytes between arrays
SHARED, BLOCK_BITS = (
    1024,
    24,
)  # where a block's shared memory begins; a block's place in addresses of a cluster
UNUSED, READ_ONLY, UNWRITTEN, WRITTEN = range(4)  # of a byte
WIDTHS = {32: U32, 64: U64}
ARITHMETIC: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.floor_divide, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "shl": np.left_shift, "shr": np.right_shift,
}  # fmt: skip
COMPARISONS: dict[str, Any] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal
}  # fmt: skip
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
# XLA's threads take subnormal numbers for 0, and threads that they start do too; those of a GPU
# and this one do not.
_thread = ThreadPoolExecutor(1)
_thread.submit(int).result()


class Simulator:
    """The `Backend` that runs a grid in numpy. A value is an array over all threads, or a
    number for all of them.
    """

    def __init__(self) -> None:
        self._machine: Machine | None = None
        # XLA may call two kernels at once, of which neither reads the other
        self._turn = threading.Lock()

    @property
    def machine(self) -> Machine:
        assert self._machine is not None, "a word outside of a kernel"
        return self._machine

    def constant(self, x: int, bits: int = 32) -> Any:
        return np.asarray(np.int64(x)).astype(WIDTHS[bits])

    def arithmetic(self, op: str, a: Any, b: Any) -> Any:
        if op in ("shl", "shr"):
            assert ((np.asarray(b) < 32) | ~self.machine.mask).all(), (
                "a shift by 32 or more is not defined"
            )
        return ARITHMETIC[op](a, b)

    def compare(self, op: str, a: Any, b: Any) -> Any:
        return COMPARISONS[op](a, b)

    def select(self, flag: Any, yes: Any, no: Any) -> Any:
        return np.where(flag, yes, no)

    def extend(self, x: Any) -> Any:
        return np.asarray(x).astype(U64)

    def address(self, ref: Any, bits: int) -> Any:
        return np.asarray(ref, WIDTHS[bits])

    def ptx(self, code: str, values: Any, results: int, convergent: bool) -> list[Any]:
        m = self.machine
        arrays = [m.wide(v) for v in values]
        empty = [np.zeros(m.lanes, U32) for _ in range(results)]
        registers: dict[str, Any] = {f"${i}": a for i, a in enumerate((*empty, *arrays))}
        for guard, negated, name, operands in _parse(code):
            lanes = m.mask
            if guard:
                lanes = lanes & (~registers[guard] if negated else registers[guard])
            _step(m, name, operands, registers, lanes)
        return [registers[f"${i}"] for i in range(results)]

    @contextlib.contextmanager
    def when(self, flag: Any) -> Iterator[None]:
        self.machine.masks.append(self.machine.mask & flag)
        try:
            yield
        finally:
            self.machine.masks.pop()

    def loop(
        self, start: Any, stop: Any, step: Any, carry: Any, body: Callable[..., Any]
    ) -> list[Any]:
        m = self.machine
        first, last, by = (m.wide(x).view(np.int32) for x in (start, stop, step))
        i, values = first.copy(), [m.wide(x) for x in carry]
        while (m.mask & (i < last)).any():
            active = m.mask & (i < last)
            with self.when(active):
                out = body(i.view(U32), *values)
            values = [np.where(active, new, old) for new, old in zip(out, values, strict=True)]
            i = np.where(active, i + by, i)
        return values

    def repeat(self, carry: Any, body: Callable[..., Any]) -> list[Any]:
        m = self.machine
        active, values = m.mask, [m.wide(x) for x in carry]
        while active.any():
            with self.when(active):
                again, out = body(*values)
            values = [np.where(active, new, old) for new, old in zip(out, values, strict=True)]
            active = active & again
        return values

    def branch(self, flag: Any, make: Callable[[], Any], otherwise: Any) -> list[Any]:
        with self.when(flag):
            made = make() if self.machine.mask.any() else otherwise
        return [np.where(flag, a, b) for a, b in zip(made, otherwise, strict=True)]

    def run(
        self,
        program: Callable[..., None],
        launch: Launch,
        out_type: Any,
        args: Any,
        in_place: bool = False,
    ) -> Any:
        outs, tree = jax.tree.flatten(out_type)
        target = simt.target(args)

        def on_host(*args: Any) -> Any:
            with self._turn:
                arrays = [np.asarray(a) for a in args]
                self._machine = machine = Machine(
                    arrays, outs, launch, in_place=in_place, target=target
                )
                try:
                    _thread.submit(self._execute, program).result()
                    return jax.tree.unflatten(tree, machine.results())
                finally:
                    self._machine = None

        return jax.pure_callback(on_host, out_type, *args)

    def _execute(self, program: Callable[..., None]) -> None:
        with simt.use(self), np.errstate(all="ignore"):
            program(*self.machine.refs)

    def run_in_place(
        self, program: Callable[..., None], launch: Launch, changed: Any, args: Any
    ) -> Any:
        shapes = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in changed)
        outs = self.run(program, launch, shapes, [*changed, *args], in_place=True)
        return tuple(
            jax.device_put(out, jax.typeof(a).memory_space)
            for out, a in zip(outs, changed, strict=True)
        )


class Touched:
    """The last writer of each word of a memory, and its readers since.

    Among reads, and among atomic additions, that no barrier orders, those of the lowest thread
    and of the highest are kept: a barrier of both has all threads between them. Times of atomic
    additions and of relaxed reads are negative.
    """

    def __init__(self, size: int) -> None:
        self.times, self.threads = np.zeros(
            (2, 2, 2, size), np.int32
        )  # of writes and reads, lowest and highest
        self.constant = np.zeros(size, bool)
        self._ends = np.zeros((2, size), np.int32)

    def writes(self, words: Any) -> list[tuple[Any, Any]]:
        return self._of(0, words)

    def reads(self, words: Any) -> list[tuple[Any, Any]]:
        return self._of(1, words)

    def _of(self, kind: int, words: Any) -> list[tuple[Any, Any]]:
        """Time and thread of the lowest thread's and of the highest's."""
        return [
            (self.times[kind, end][words], self.threads[kind, end][words]) for end in range(2)
        ]

    def alone(self, words: Any) -> bool:
        """Whether no word comes twice."""
        flat, number = words.reshape(-1), np.arange(words.size, dtype=np.int32)
        self._ends[0][flat] = number
        return bool((self._ends[0][flat] == number).all())

    def note_write(
        self, words: Any, mine: Any, time: int, atomic: bool, unordered: Callable[..., Any]
    ) -> None:
        if atomic:
            self._note(0, words, mine, -time, unordered)
        else:
            for end in range(2):
                self.times[0, end][words], self.threads[0, end][words] = time, mine
        for end in range(2):
            self.times[1, end][words] = 0

    def note_read(
        self, words: Any, mine: Any, time: int, unordered: Callable[..., Any]
    ) -> None:
        self._note(1, words, mine, time, unordered)

    def _note(
        self, kind: int, words: Any, mine: Any, time: int, unordered: Callable[..., Any]
    ) -> None:
        low, high = self._ends
        low[words.reshape(-1)[::-1]], high[words.reshape(-1)] = (
            mine.reshape(-1)[::-1],
            mine.reshape(-1),
        )
        new, found = (low[words], high[words]), []
        for end, (then, thread) in enumerate(self._of(kind, words)):
            kept = unordered(new[0], thread, then)
            if kept.any():
                kept &= unordered(new[1], thread, then) & (
                    thread < new[0] if end == 0 else thread > new[1]
                )
                found.append((np.where(kept, then, time), np.where(kept, thread, new[end])))
            else:
                found.append((time, new[end]))
        for end, (then, thread) in enumerate(found):
            self.times[kind, end][words], self.threads[kind, end][words] = then, thread


class Machine:
    """The threads of a grid, and their memories."""

    def __init__(
        self,
        args: list[Any],
        outs: list[Any],
        launch: Launch,
        *,
        in_place: bool = False,
        target: Any = None,
    ):
        self.sparse = launch.sparse
        self.threads, self.cluster = 128 * launch.warpgroups, launch.cluster or 1
        blocks, target = launch.blocks * self.cluster, target or simt.target()
        assert self.cluster == 1 or target.clusters, f"a cluster, which {target.kind} has not"
        self.lanes = blocks * self.threads
        lane = np.arange(self.lanes)
        block = lane // self.threads
        self.special = {
            "tid.x": lane % self.threads,
            "laneid": lane % 32,
            "ctaid.x": block,
            "cluster_ctarank": block % self.cluster,
            "clusterid.x": block // self.cluster,
        }
        self.block, self.warp, self.group = block, lane // 32, block // self.cluster
        self.masks = [np.ones(self.lanes, bool)]
        self._active: tuple[Any, Any] = None, None
        self._numbers: dict[str, Any] = {}

        refs, at = [], GAP
        made = [] if in_place else outs
        for a in (*args, *made):
            refs.append(at)
            at += -(-(a.size * a.dtype.itemsize) // 256) * 256 + GAP
        self.memory = np.zeros(at, np.uint8)
        self.state = np.full(at, UNUSED, np.uint8)
        for start, a in zip(refs, args, strict=False):
            raw = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
            self.memory[start : start + raw.size] = raw
            self.state[start : start + raw.size] = READ_ONLY
        self.outs = list(
            zip(refs[: len(outs)] if in_place else refs[len(args) :], outs, strict=True)
        )
        for start, a in self.outs:
            self.state[start : start + a.size * a.dtype.itemsize] = (
                WRITTEN if in_place else UNWRITTEN
            )
        self.refs = [GLOBAL + r for r in refs]

        at = SHARED
        for words in launch.scratch:
            self.refs.append(at)
            at += -(-(words * 4) // 1024) * 1024
        self.words = at // 4
        assert at - SHARED <= target.smem, f"{at - SHARED} bytes of shared memory"
        self.shared = np.zeros(blocks * self.words, U32)
        # A race: touched since the last barrier of both. Times are counts of operations.
        self.time = self.since = (
            1  # ... and since the last barrier of all threads that share memory
        )
        self.one_group = launch.blocks == 1
        self.of_shared = Touched(self.shared.size)
        self.first_out = min((start for start, _ in self.outs), default=0)
        self.of_outs = Touched(
            max((start + a.size * a.dtype.itemsize for start, a in self.outs), default=0)
            - self.first_out
        )
        self.warp_time, self.block_time, self.cluster_time = np.zeros((3, self.lanes), np.int32)
        self.some_time, self.some = np.zeros(
            (2, self.lanes), np.int32
        )  # of a barrier of some threads, and which
        self.arrived, self.released, self.waited = np.zeros(
            (3, self.lanes), np.int32
        )  # at barriers of the cluster
        self.visited = np.zeros(
            blocks, np.int32
        )  # when another block last touched the shared memory of this one
        self.copies: list[
            tuple[Any, ...]
        ] = []  # lanes, words, data, and the group of each lane
        self.groups = np.zeros(self.lanes, np.int32)  # that a lane has committed

    @property
    def mask(self) -> Any:
        return self.masks[-1]

    def wide(self, x: Any) -> Any:
        """A number, or an array over all threads, as the latter."""
        return (
            x if getattr(x, "shape", None) == (self.lanes,) else np.broadcast_to(x, self.lanes)
        )

    def number(self, text: str) -> Any:
        if text not in self._numbers:
            self._numbers[text] = np.broadcast_to(
                np.int64(int(text, 0)).astype(U32), self.lanes
            )
        return self._numbers[text]

    def active(self, mask: Any) -> Any:
        """The threads of a mask, as numbers; the result for the last mask is kept."""
        if mask is not self._active[0]:
            self._active = mask, np.flatnonzero(mask)
        return self._active[1]

    def results(self) -> list[Any]:
        left = self.waited.reshape(-1, self.threads).min(1) < self.visited
        assert not left.any(), (
            f"block {np.flatnonzero(left)[0]} may end while another touches its shared memory"
        )
        found = []
        for i, (start, a) in enumerate(self.outs):
            size = a.size * a.dtype.itemsize
            left = np.flatnonzero(self.state[start : start + size] != WRITTEN)
            assert i in self.sparse or not left.size, (
                f"an output {a} was left unwritten at byte {left[0]}"
            )
            self.memory[start + left] = 0xFF  # NaN
            found.append(self.memory[start : start + size].view(a.dtype).reshape(a.shape))
        return found

    # --------------------------------------------------------------------------------------------------------- memory

    def _device(self, lanes: Any, at: Any, size: int, allowed: tuple[int, ...]) -> Any:
        at = at[lanes].astype(np.int64) - GLOBAL
        assert not (at % size).any(), f"an address in device memory is not aligned to {size}"
        assert ((at >= 0) & (at + size <= self.memory.size)).all(), (
            "an address outside of device memory"
        )
        bad = ~np.isin(self.state[at[:, None] + np.arange(size)], allowed).all(axis=1)
        assert not bad.any(), (
            f"thread {lanes[bad][0]}: device memory at {at[bad][0]}, which is not its to touch"
        )
        return at

    def load_global(
        self, at: Any, size: int, lanes: Any, *, constant: bool = False, atomic: bool = False
    ) -> Any:
        at = self._device(lanes, at, size, (READ_ONLY, WRITTEN))
        own = self.state[at] == WRITTEN
        if own.any():
            self._touch(
                self.of_outs,
                lanes[own],
                self._bytes(at[own], size),
                "device memory",
                constant=constant,
                atomic=atomic,
            )
        if size < 4:
            return self.memory.view(f"u{size}")[at // size][:, None].astype(U32)
        return self.memory.view(U32)[at[:, None] // 4 + np.arange(size // 4)]

    def store_global(self, at: Any, values: Any, lanes: Any) -> None:
        size = values.dtype.itemsize * values.shape[1]
        at = self._device(lanes, at, size, (UNWRITTEN, WRITTEN))
        places, memory = (
            at[:, None] // values.dtype.itemsize + np.arange(values.shape[1]),
            self.memory.view(values.dtype),
        )
        same = np.repeat(memory[places] == values, values.dtype.itemsize, axis=1)
        self._touch(
            self.of_outs, lanes, self._bytes(at, size), "device memory", write=True, same=same
        )
        memory[places] = values
        assert (memory[places] == values).all(), (
            "two threads store different values to one place in device memory"
        )
        self.state[at[:, None] + np.arange(size)] = WRITTEN

    def _bytes(self, at: Any, size: int) -> Any:
        """In the outputs."""
        return (at - self.first_out)[:, None] + np.arange(size)

    def _shared(self, lanes: Any, at: Any, size: int, cluster: bool) -> Any:
        at = at[lanes].astype(np.int64)
        assert not (at % size).any(), f"an address in shared memory is not aligned to {size}"
        block = self.block[lanes]
        if cluster:
            own, block = block, self.group[lanes] * self.cluster + (at >> BLOCK_BITS) - 1
            at = at & ((1 << BLOCK_BITS) - 1)
            away = own != block
            assert self.waited[lanes[away]].all(), (
                "a thread touches the shared memory of a block that may not have begun"
            )
            self.visited[block[away]] = self.time
        assert ((at >= SHARED) & (at + size <= 4 * self.words)).all(), (
            "an address outside of shared memory"
        )
        return (block * self.words + at // 4)[:, None] + np.arange(size // 4)

    def _unordered(self, memory: Touched, mine: Any, theirs: Any, then: Any) -> Any:
        """Whether no barrier of threads `mine` and `theirs` came after `then`, when `theirs`
        touched memory.
        """
        then = np.abs(then)
        is_open = then >= (self.since if memory is self.of_shared or self.one_group else 1)
        if is_open.any():
            is_open[is_open] = ~self._ordered(mine[is_open], theirs[is_open], then[is_open])
        return is_open

    def _ordered(self, mine: Any, theirs: Any, then: Any) -> Any:
        by_warp = (self.warp[mine] == self.warp[theirs]) & (self.warp_time[mine] > then)
        by_block = np.minimum(self.block_time[mine], self.block_time[theirs]) > then
        by_block |= (self.some[mine] == self.some[theirs]) & (self.some_time[mine] > then)
        by_block &= self.block[mine] == self.block[theirs]
        by_cluster = np.minimum(self.cluster_time[mine], self.cluster_time[theirs]) > then
        by_cluster &= self.group[mine] == self.group[theirs]
        return (mine == theirs) | by_warp | by_block | by_cluster

    def _touch(
        self, memory: Touched, lanes: Any, words: Any, where: str, *, write: bool = False, atomic: bool = False,
        same: Any = False, constant: bool = False,
    ) -> None:  # fmt: skip
        """Notes that lanes [n] touch words [n, m], and raises if that is a race. Atomic
        additions and relaxed reads do not race with each other, nor does a store of what is there with the store
        that put it there: `same`."""
        mine, unordered = (
            np.broadcast_to(lanes[:, None], words.shape),
            partial(self._unordered, memory),
        )
        for then, writer in memory.writes(words):
            bad = unordered(mine, writer, then)
            if bad.any():
                bad &= ~((atomic & (then < 0)) | (write & same))
                assert not bad.any(), (
                    f"thread {mine[bad][0]} races with the write of {writer[bad][0]} to {where}"
                )
        if write:
            for then, reader in memory.reads(words):
                bad = unordered(mine, reader, then) & ~(atomic & (then < 0))
                assert not bad.any(), (
                    f"thread {mine[bad][0]} overwrites what {reader[bad][0]} may still read in {where}"
                )
            assert not memory.constant[words].any(), (
                f"a thread writes to {where} what another read as constant"
            )
            memory.note_write(words, mine, self.time, atomic, unordered)
        else:
            if constant:
                memory.constant[words] = True
                written = memory.times[0, 0][words] != 0
                assert not written.any(), (
                    f"a thread reads as constant what the kernel wrote to {where}"
                )
            memory.note_read(words, mine, -self.time if atomic else self.time, unordered)
        self.time += 1

    def load_shared(self, at: Any, size: int, lanes: Any, cluster: bool = False) -> Any:
        words = self._shared(lanes, at, size, cluster)
        empty = self.of_shared.times[0, 0][words] == 0
        assert not empty.any(), (
            f"thread {lanes[empty.any(1)][0]} reads shared memory that nothing wrote"
        )
        self._touch(self.of_shared, lanes, words, "shared memory")
        return self.shared[words]

    def store_shared(self, at: Any, values: Any, lanes: Any, cluster: bool = False) -> None:
        self._write(lanes, self._shared(lanes, at, 4 * values.shape[1], cluster), values)

    def _write(self, lanes: Any, words: Any, values: Any) -> None:
        assert self.of_shared.alone(words), (
            "two threads store to one word of shared memory at once"
        )
        self._touch(self.of_shared, lanes, words, "shared memory", write=True)
        self.shared[words] = values

    def store_byte(self, at: Any, value: Any, lanes: Any) -> None:
        """Stores a byte of a word whose other bytes other threads may write meanwhile."""
        words = self._shared(lanes, at & ~U32(3), 4, cluster=False)
        self._touch(self.of_shared, lanes, words, "shared memory", write=True, atomic=True)
        places = words[:, 0] * 4 + (at[lanes] & 3)
        assert np.unique(places).size == places.size, (
            "two threads store to one byte of shared memory at once"
        )
        self.shared.view(np.uint8)[places] = value

    def add_shared(self, at: Any, value: Any, lanes: Any) -> Any:
        """Adds in the order of threads, and returns the value that each found."""
        words = self._shared(lanes, at, 4, cluster=False)
        self._touch(self.of_shared, lanes, words, "shared memory", write=True, atomic=True)
        return _add(self.shared, words[:, 0], value[lanes])

    def add_global(self, at: Any, value: Any, lanes: Any) -> Any:
        """As `add_shared`, in device memory."""
        at = self._device(lanes, at, 4, (WRITTEN,))
        places = self._bytes(at, 4)
        self._touch(self.of_outs, lanes, places, "device memory", write=True, atomic=True)
        return _add(self.memory.view(U32), at // 4, value[lanes])

    def copy(self, to: Any, source: Any, width: int, size: Any, lanes: Any) -> None:
        words = self._shared(lanes, to, width, cluster=False)
        data = np.zeros((lanes.size, width // 4), U32)
        reads = size[lanes] != 0
        assert np.isin(size[lanes], (0, width)).all()
        data[reads] = self.load_global(source, width, lanes[reads])
        self._write(lanes, words, U32(0xFFFFFFFF))  # NaN, until it is waited for
        self.copies.append((lanes, words, data, self.groups[lanes]))

    def wait_copies(self, waiting: Any, left: int) -> None:
        """Threads `waiting` wait for their own copies but those of the last `left` groups."""
        copies, self.copies = self.copies, []
        for lanes, words, data, group in copies:
            done = waiting[lanes] & (group < self.groups[lanes] - left)
            if done.any():
                self._write(lanes[done], words[done], data[done])
            if not done.all():
                self.copies.append((lanes[~done], words[~done], data[~done], group[~done]))

    def barrier(self, times: Any, lanes: Any) -> None:
        times[lanes] = self.time
        self.time += 1

    def whole_warps(self) -> Any:
        """The lanes of active warps [n, 32]; an error where a part of a warp is active."""
        by_warp = self.mask.reshape(-1, 32)
        assert (by_warp.all(1) | ~by_warp.any(1)).all(), (
            "a collective of a warp without some of its lanes"
        )
        return np.flatnonzero(by_warp.all(1))[:, None] * 32 + np.arange(32)


def _add(memory: Any, places: Any, values: Any) -> Any:
    """Adds values in the order of threads, and returns what each found."""
    order = np.argsort(places, kind="stable")
    sums = np.cumsum(values[order].astype(np.int64))
    start = np.r_[True, places[order][1:] != places[order][:-1]]
    before = sums - values[order]
    before -= before[np.maximum.accumulate(np.where(start, np.arange(start.size), 0))]
    found = np.empty(places.size, U32)
    found[order] = memory[places[order]] + before.astype(U32)
    np.add.at(memory, places, values)
    return found


# --------------------------------------------------------------------------------------------------------- instructions


@functools.cache
def _parse(code: str) -> list[tuple[str, bool, str, list[str]]]:
    """(guard, whether it is negated, opcode, operands) of each instruction."""
    code = code.strip()
    if code.startswith("{ .reg"):
        code = code[1:].rstrip("} \n")
    found = []
    for line in code.split(";"):
        line = line.strip()
        if not line or line.startswith((".reg", ".pragma")):
            continue
        guard = re.match(r"@(!?)(\w+)\s+", line)
        line = line[guard.end() :] if guard else line
        name, _, rest = line.partition(" ")
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+", rest)
        found.append((guard[2] if guard else "", bool(guard and guard[1]), name, operands))
    return found


def _step(
    m: Machine, name: str, operands: list[str], registers: dict[str, Any], mask: Any
) -> None:
    kind, *how = name.split(".")
    lanes = m.active(mask)

    def read(x: str) -> Any:
        if x in registers:
            return registers[x]
        if x.startswith("%"):
            return m.special[x[1:]].astype(U32)
        return m.number(x)

    def vector(x: str) -> list[str]:
        return x.strip("{}").replace(" ", "").split(",") if x.startswith("{") else [x]

    if not lanes.size and kind != "cp":
        for w in vector(operands[0]) if operands else ():
            registers.setdefault(w, np.zeros(m.lanes, U32))
        return

    def address(x: str) -> Any:
        base, _, plus = x.strip("[]").partition("+")
        return read(base) + read(base).dtype.type(int(plus or 0))

    def put(x: str, value: Any, at: Any = mask) -> None:
        old = registers.get(x)
        value = np.asarray(value)
        if old is None or old.dtype != value.dtype:
            old = np.zeros(m.lanes, value.dtype)
        new = old.copy()
        new[at] = value[at] if value.shape == (m.lanes,) else value
        registers[x] = new

    def floats(*xs: str) -> list[Any]:
        return [np.ascontiguousarray(read(x)).view(np.float32) for x in xs]

    def put_float(x: Any) -> None:
        put(operands[0], np.asarray(x, np.float32).view(U32))

    match kind:
        case "ld":
            words = vector(operands[0])
            size = {"u8": 1, "u16": 2, "u64": 8}.get(how[-1], 4 * len(words))
            at = address(operands[1])
            if "global" in how:
                constant, atomic = "nc" in how, how[0] == "relaxed"
                got = m.load_global(at, size, lanes, constant=constant, atomic=atomic)
            else:
                got = m.load_shared(at, size, lanes, cluster="cluster" in how[0])
            if how[-1] == "u64":
                got = np.ascontiguousarray(got).view(U64)
            for w, column in zip(words, got.T, strict=True):
                put(w, column, lanes)
        case "st":
            values = np.stack([read(w)[lanes] for w in vector(operands[1])], axis=1)
            values = values.astype(
                {"u8": np.uint8, "u16": np.uint16}.get(how[-1], values.dtype)
            )
            if how[0] == "global":
                m.store_global(address(operands[0]), values, lanes)
            elif how[-1] == "u8":
                m.store_byte(address(operands[0]), values[:, 0], lanes)
            else:
                m.store_shared(address(operands[0]), values, lanes, cluster="cluster" in how[0])
        case "mov" if operands[0].startswith("{"):
            low, high = vector(operands[0])
            put(low, read(operands[1]) & U32(0xFFFF))
            put(high, read(operands[1]) >> U32(16))
        case "mov":
            words = vector(operands[1])
            if len(words) == 2:
                whole, half = (U64, 32) if how[0].endswith("64") else (U32, 16)
                lo, hi = (read(w).astype(whole) for w in words)
                put(operands[0], lo | (hi << whole(half)))
            else:
                put(operands[0], read(words[0]).astype(U64 if how[0].endswith("64") else U32))
        case "setp":
            a, b = (read(x) for x in operands[1:3])
            if how[1] == "s32":
                a, b = a.view(np.int32), b.view(np.int32)
            if how[1] == "f32":
                a, b = floats(*operands[1:])
            compare = {
                "lt": "less",
                "le": "less_equal",
                "gt": "greater",
                "ge": "greater_equal",
                "eq": "equal",
            }
            holds = getattr(np, compare.get(how[0], "not_equal"))(a, b)
            put(operands[0], holds & read(operands[3]) if how[1] == "and" else holds)
        case "xor":
            put(operands[0], read(operands[1]) ^ read(operands[2]))
        case "add" if how == ["u32"]:
            put(operands[0], read(operands[1]) + read(operands[2]))
        case "dp4a":
            a, b, total = (np.ascontiguousarray(read(x)) for x in operands[1:])
            products = a.view(np.uint8).reshape(-1, 4).astype(U32) * b.view(np.uint8).reshape(
                -1, 4
            )
            put(operands[0], total + products.sum(axis=1, dtype=U32))
        case "selp":
            put(operands[0], np.where(read(operands[3]), read(operands[1]), read(operands[2])))
        case "red" | "atom":
            *to, at, value = operands
            add = m.add_global if "global" in how else m.add_shared
            got = add(address(at), read(value), lanes)
            for x in to:
                put(x, got, lanes)
        case "mul" | "add" | "sub" | "fma" | "div" | "max" | "min" if how[-1] == "f32":
            x = floats(*operands[1:])
            if kind == "fma":
                exact = x[0].astype(np.float64) * x[1] + x[2]
                got = exact.astype(np.float32)
                up = (how[0] == "rz") & (np.abs(got) > np.abs(exact))
                put_float(np.where(up, np.nextafter(got, np.float32(0)), got))
            else:
                f32 = {"mul": np.multiply, "add": np.add, "sub": np.subtract, "div": np.divide}
                f32 |= {"max": np.fmax, "min": np.fmin}
                got = f32[kind](*x)
                put_float(np.clip(got, 0, 1) if "sat" in how else got)
        case "mul" | "sub" | "fma" | "max" | "min" if how[-1] in ("bf16x2", "f16x2"):
            dtype = DTYPES[how[-1][:-2]]
            x = [
                np.ascontiguousarray(read(o)).view(dtype).astype(np.float64)
                for o in operands[1:]
            ]
            two = {"mul": np.multiply, "sub": np.subtract, "max": np.fmax, "min": np.fmin}
            got = x[0] * x[1] + x[2] if kind == "fma" else two[kind](*x)
            put(operands[0], np.asarray(got, dtype).view(U32))
        case "ex2" | "lg2" | "rcp" | "rsqrt":
            (x,) = floats(operands[1])
            of = {"ex2": np.exp2, "lg2": np.log2, "rcp": np.reciprocal}
            put_float(1 / np.sqrt(x) if kind == "rsqrt" else of[kind](x))
        case "cvt" if how == ["f32", "f16"]:
            put_float(read(operands[1]).astype(np.uint16).view(np.float16))
        case "abs" | "neg":
            (x,) = floats(operands[1])
            put_float(np.abs(x) if kind == "abs" else -x)
        case "cvt" if how == ["rn", "f32", "u32"]:
            put_float(read(operands[1]).astype(np.float32))
        case "cvt" if how[-1] == "u16":
            put(operands[0], read(operands[1]))
        case "cvt" if how[-1] == "e4m3x2":
            two = read(operands[1]).astype(np.uint16)
            bytes_ = np.stack([two & np.uint16(255), two >> np.uint16(8)], axis=-1).astype(
                np.uint8
            )
            put(
                operands[0],
                np.ascontiguousarray(
                    bytes_.view(ml_dtypes.float8_e4m3fn).astype(np.float16)
                ).view(U32)[..., 0],
            )
        case "cvt" if how[1] in ("bf16x2", "f16x2"):
            hi, lo = (
                x.astype(DTYPES[how[1][:-2]]).view(np.uint16).astype(U32)
                for x in floats(*operands[1:])
            )
            put(operands[0], lo | (hi << U32(16)))
        case "max" | "min" if how[-1] in ("u32", "s32"):
            a, b = (
                np.ascontiguousarray(read(x)).view(np.int32 if how[-1] == "s32" else U32)
                for x in operands[1:]
            )
            put(operands[0], {"max": np.maximum, "min": np.minimum}[kind](a, b).view(U32))
        case "or" | "popc":
            of = [read(x) for x in operands[1:]]
            put(
                operands[0],
                of[0] | of[1] if kind == "or" else np.bitwise_count(of[0]).astype(U32),
            )
        case "clz":
            put(
                operands[0],
                32 - np.ceil(np.log2(read(operands[1]).astype(np.float64) + 1)).astype(U32),
            )
        case "lop3":
            table, out = int(read(operands[4]).flat[0]), np.zeros(m.lanes, U32)
            for i in range(
                8
            ):  # bits 2, 1 and 0 of i say what a bit of the first, second and third operand is
                bits = [
                    read(x) if i >> (2 - n) & 1 else ~read(x)
                    for n, x in enumerate(operands[1:4])
                ]
                out |= (bits[0] & bits[1] & bits[2]) * U32(table >> i & 1)
            put(operands[0], out)
        case "prmt":
            a, b, how_ = (read(x).astype(U64) for x in operands[1:])
            both, out = a | (b << U64(32)), np.zeros(m.lanes, U64)
            for byte in range(4):
                take = (how_ >> U64(4 * byte)) & U64(7)
                out |= ((both >> (take * U64(8))) & U64(255)) << U64(8 * byte)
            put(operands[0], out.astype(U32))
        case "mapa":
            put(
                operands[0],
                read(operands[1]) + ((read(operands[2]) + U32(1)) << U32(BLOCK_BITS)),
            )
        case "bar" if how[0] == "warp":
            m.whole_warps()
            m.barrier(m.warp_time, lanes)
        case "fence":
            pass
        case "bar":
            red = how[0] == "red"
            asked = operands[1:-1] if red else operands
            of = m.block[lanes] * 16 + read(asked[0])[lanes]
            sizes = np.bincount(of, minlength=m.lanes // m.threads * 16)
            want = read(asked[1])[lanes] if len(asked) > 1 else m.threads
            came = np.unique(sizes[of])
            assert (sizes[of] == want).all(), (
                f"a barrier of {np.unique(want)} threads that {came} came to"
            )
            if red:
                any_ = np.bincount(of, read(operands[-1])[lanes], minlength=len(sizes)) > 0
                put(operands[0], any_[of], lanes)
            if np.all(want == m.threads):
                if mask.all() and m.cluster == 1:
                    m.since = m.time + 1
                m.barrier(m.block_time, lanes)
            else:
                m.some[lanes] = m.time * 16 + read(asked[0])[lanes]
                m.barrier(m.some_time, lanes)
        case "barrier":
            whole = mask.reshape(-1, m.threads * m.cluster)
            assert (whole.all(1) | ~whole.any(1)).all(), (
                "a barrier of a cluster without some of its threads"
            )
            waited = m.arrived[lanes] == m.waited[lanes]
            if how[1] == "arrive":
                assert waited.all(), (
                    "threads arrive at a barrier of their cluster that have not waited at the last"
                )
                if how[2] == "release":
                    m.released[lanes] = m.time
                m.barrier(m.arrived, lanes)
            else:  # what was done since the arrival is not ordered, nor by a relaxed one what was done before it
                assert not waited.any(), (
                    "threads wait at a barrier of their cluster at which they did not arrive"
                )
                m.waited[lanes], m.cluster_time[lanes] = m.arrived[lanes], m.released[lanes]
                if mask.all():
                    m.since = max(m.since, int(m.cluster_time.min()) + 1)
        case "cp" if "commit_group" in how:
            m.groups[lanes] += 1
        case "cp" if "wait_group" in how:
            m.wait_copies(mask, int(operands[0]))
        case "cp":
            assert operands[2] == "16" or (how[1] == "ca" and operands[2] in ("4", "8"))
            m.copy(
                address(operands[0]),
                address(operands[1]),
                int(operands[2]),
                read(operands[3]),
                lanes,
            )
        case _:
            _collective(m, kind, name, [vector(x) for x in operands], read, address, put)


def _collective(
    m: Machine, kind: str, name: str, operands: Any, read: Any, address: Any, put: Any
) -> None:
    """A collective operation of the lanes of a warp."""
    warps = m.whole_warps()
    lanes = warps.reshape(-1)
    lane = np.arange(32)

    def rows(x: str) -> Any:
        return read(x)[warps]

    match kind:
        case "shfl":
            by = rows(operands[2][0]).astype(np.int64)
            source = {"bfly": lane ^ by, "down": lane + by, "idx": (by & 31) + 0 * lane}[
                name.split(".")[2]
            ]
            source = np.where((source >= 0) & (source < 32), source, lane)
            put(
                operands[0][0],
                np.take_along_axis(rows(operands[1][0]), source, axis=1).reshape(-1),
                lanes,
            )
        case "redux":
            over = {"add": np.add, "max": np.maximum}[name.split(".")[2]]
            one = over.reduce(rows(operands[1][0]), axis=1, dtype=U32)
            put(operands[0][0], np.repeat(one, 32), lanes)
        case "vote":
            ballot = np.sum(rows(operands[1][0]).astype(np.int64) << lane, axis=1).astype(U32)
            put(operands[0][0], np.repeat(ballot, 32), lanes)
        case "movmatrix":
            tiles = np.ascontiguousarray(rows(operands[1][0])).view(np.uint16).reshape(-1, 8, 8)
            put(
                operands[0][0],
                np.ascontiguousarray(tiles.swapaxes(1, 2))
                .reshape(-1, 64)
                .view(U32)
                .reshape(-1),
                lanes,
            )
        case "ldmatrix":
            at = address("[" + operands[1][0].strip("[]") + "]")
            got = m.load_shared(at, 16, lanes).reshape(-1, 4, 8, 4)
            tiles = np.ascontiguousarray(got).view(np.uint16)  # [warps, part, row, 8]
            if ".trans" in name:
                tiles = np.ascontiguousarray(tiles.swapaxes(2, 3))
            for part, to in enumerate(operands[0]):
                mine = np.ascontiguousarray(tiles[:, part]).view(U32)  # [warps, 8, 4]
                put(to, mine.reshape(-1), lanes)
        case "wgmma" if "mma_async" not in name:  # its sums are complete at once
            pass
        case "wgmma":
            (n,) = map(int, re.findall(r"\.m64n(\d+)k16\.f32\.bf16\.bf16", name))
            assert (warps.reshape(-1, 128) == warps[::4, :1] + np.arange(128)).all(), (
                "not whole warpgroups"
            )
            assert (warps[::4, 0] % 128 == 0).all(), "not whole warpgroups"
            out, a, (matrix,), *flags = operands
            assert [x for (x,) in flags] == ["1", "1", "1", "0"]
            bits = read(matrix)
            start, lead, stride = (
                (bits >> U64(shift)).astype(U32) & U32(0x3FFF) for shift in (0, 16, 32)
            )
            # A lane reads 16 bytes: 8 rows of a column of b.
            i = np.arange(m.lanes, dtype=U32) % 128 % (2 * n)
            at = (start + (i // n).astype(U32) * lead) * U32(16)
            at += (i % n // 8).astype(U32) * stride * U32(16) + i % U32(8) * U32(16)
            got = (
                np.ascontiguousarray(m.load_shared(at, 16, lanes))
                .view(DTYPES["bf16"])
                .astype(np.float64)
            )
            right = (
                got.reshape(-1, 128, 8)[:, : 2 * n]
                .reshape(-1, 2, n, 8)
                .swapaxes(2, 3)
                .reshape(-1, 16, n)
            )
            left, total = np.empty((len(warps), 16, 16)), np.empty((len(warps), 16, n))
            quad, col = lane >> 2, (lane & 3) * 2
            for j, x in enumerate(a):
                two = (
                    np.ascontiguousarray(rows(x))
                    .view(DTYPES["bf16"])
                    .reshape(-1, 32, 2)
                    .astype(np.float64)
                )
                for half in range(2):
                    left[:, quad + 8 * (j & 1), col + half + 8 * (j >> 1)] = two[:, :, half]
            for j, x in enumerate(out):
                place = quad + 8 * (j >> 1 & 1), 8 * (j >> 2) + col + (j & 1)
                total[:, *place] = np.ascontiguousarray(rows(x)).view(np.float32)
            total = (total + left @ np.repeat(right, 4, axis=0)).astype(np.float32).view(U32)
            for j, x in enumerate(out):
                place = quad + 8 * (j >> 1 & 1), 8 * (j >> 2) + col + (j & 1)
                put(x, np.ascontiguousarray(total[:, *place]).reshape(-1), lanes)
        case "mma" if ".sp::ordered_metadata." in name:
            assert "m16n8k32" in name
            dtype = DTYPES[name.split(".")[-2]]
            out, a, b, acc, (pattern,), (of,) = operands
            left = np.zeros((len(warps), 16, 32))
            right, total = np.empty((len(warps), 32, 8)), np.empty((len(warps), 16, 8))
            quad, col = lane >> 2, lane & 3

            def two_halves(x: str) -> Any:
                both = np.ascontiguousarray(rows(x)).view(dtype)
                return both.reshape(-1, 32, 2).astype(np.float64)

            # Of each four columns a row has two numbers, at the places that two lanes know.
            known = rows(pattern).reshape(-1, 8, 4)[:, :, 2 * int(of) : 2 * int(of) + 2]
            warp = np.arange(len(warps))[:, None]
            for j, x in enumerate(a):
                lower = 16 * (j & 1)  # bits of rows `quad`, or of those after 8
                shift = (lower + 4 * col).astype(U32)
                nibble = known[:, quad, j >> 1] >> shift
                first, second = nibble & U32(3), nibble >> U32(2) & U32(3)
                assert (first < second).all(), "places of a sparse operand are not in order"
                fours = 4 * (col + 4 * (j >> 1))
                for half, place in enumerate((first, second)):
                    left[warp, quad + 8 * (j & 1), fours + place] = two_halves(x)[:, :, half]
            for j, x in enumerate(b):
                for half in range(2):
                    right[:, 2 * col + half + 8 * j, quad] = two_halves(x)[:, :, half]
            for j, x in enumerate(acc):
                part = np.ascontiguousarray(rows(x)).view(np.float32)
                total[:, quad + 8 * (j >> 1), 2 * col + (j & 1)] = part
            total = (total + left @ right).astype(np.float32).view(U32)
            for j, x in enumerate(out):
                mine = total[:, quad + 8 * (j >> 1), 2 * col + (j & 1)]
                put(x, np.ascontiguousarray(mine).reshape(-1), lanes)
        case "mma":
            assert "m16n8k16" in name
            dtype = DTYPES[name.split(".")[-2]]
            out, a, b, acc = operands
            left, right = np.empty((len(warps), 16, 16)), np.empty((len(warps), 16, 8))
            total = np.empty((len(warps), 16, 8))
            quad, col = lane >> 2, (lane & 3) * 2

            def halves(x: str) -> Any:
                return (
                    np.ascontiguousarray(rows(x))
                    .view(dtype)
                    .reshape(-1, 32, 2)
                    .astype(np.float64)
                )

            for j, x in enumerate(a):
                for half in range(2):
                    left[:, quad + 8 * (j & 1), col + half + 8 * (j >> 1)] = halves(x)[
                        :, :, half
                    ]
            for j, x in enumerate(b):
                for half in range(2):
                    right[:, col + half + 8 * j, quad] = halves(x)[:, :, half]
            for j, x in enumerate(acc):
                total[:, quad + 8 * (j >> 1), col + (j & 1)] = np.ascontiguousarray(
                    rows(x)
                ).view(np.float32)
            total = (total + left @ right).astype(np.float32).view(U32)
            for j, x in enumerate(out):
                put(
                    x,
                    np.ascontiguousarray(total[:, quad + 8 * (j >> 1), col + (j & 1)]).reshape(
                        -1
                    ),
                    lanes,
                )
        case _:
            raise NotImplementedError(f"the simulator has no {name}")
