"""The parts that all kernels share: imports of Mosaic GPU, and a notation for the code of one CUDA thread.

Pallas offers no gather, no atomic addition to shared memory, no shuffle and no register-level `mma` on Hopper. Kernels
that select or expand bits need these, so their body is one `inline_mgpu` call. `Word` is an unsigned 32-bit register of
a thread, `ptx` emits one instruction, `when` and `loop` are control flow, and Python loops unroll.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, reduce, wraps
from typing import Any, TypeVar, cast

import jax

mgpu_utils: Any
plgpu: Any
run_state: Any
ir: Any
arith: Any
llvm: Any
scf: Any

MULTIPROCESSORS = 132  # of an H200
SMEM = 227 * 1024  # bytes that a block can have; a multiprocessor has 1 KB more, and takes 1 KB for each block
WHY_NOT: str | None = None  # the reason why no kernel can be built here
if jax.__version_info__ < (0, 11):
    WHY_NOT = f"the Pallas Mosaic GPU kernels need jax >= 0.11; this is {jax.__version__}"
else:
    try:
        from jax.experimental.mosaic.gpu import utils as mgpu_utils
        from jax.experimental.pallas import mosaic_gpu as plgpu
        from jax.experimental.pallas import run_state
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm, scf
    except ImportError as error:  # a jaxlib built without it
        WHY_NOT = f"this jax has no Mosaic GPU: {error}"


@cache
def why_not() -> str | None:
    """Why this process can build no kernel, or would build it for a GPU that it was not measured on; None if it can.

    Without any GPU it can: a program may be compiled ahead of time for one.
    """
    if WHY_NOT:
        return WHY_NOT
    for device in jax.devices():
        if device.platform == "gpu" and str(getattr(device, "compute_capability", "")) != "9.0":
            return f"the kernels are for GPUs of compute capability 9.0 (H100, H200); this process has {device}"
    return None


_anew = ContextVar("_anew", default=False)
F = TypeVar("F", bound=Callable[..., Any])


def lowered_once(*static: str) -> Callable[[F], F]:
    """Decorates a function that calls a kernel, so that equal calls of many layers are traced and lowered once.

    Mosaic then compiles one kernel for all layers. It would otherwise compile one for each call, about 100 for a Llama
    of 32 layers with FIER.
    """

    def wrap(f: F) -> F:
        jitted = jax.jit(f, static_argnames=static)

        @wraps(f)
        def run(*args: Any, **kwargs: Any) -> Any:
            return (f if _anew.get() else jitted)(*args, **kwargs)

        return cast(F, run)

    return wrap


@contextmanager
def traced_anew() -> Iterator[None]:
    """In the block, calls of `lowered_once` functions are traced again, for code that inspects or changes a kernel."""
    token = _anew.set(True)
    try:
        yield
    finally:
        _anew.reset(token)


def flatten_batch(n: int, batches: Sequence[bool], args: Sequence[jax.Array]) -> list[jax.Array]:
    """Reshapes batched [n, rows, ...] to [n * rows, ...] and repeats unbatched arguments, for a kernel's vmap rule."""
    whole = (a if has else jax.numpy.broadcast_to(a[None], (n, *a.shape)) for a, has in zip(args, batches, strict=True))
    return [a.reshape(n * a.shape[1], *a.shape[2:]) for a in whole]


Operand = Any  # Word | int


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def _value(x: Operand) -> Any:
    if isinstance(x, Word):
        return x.value
    return arith.constant(_i32(), ir.IntegerAttr.get(_i32(), x - (1 << 32) if x >= 1 << 31 else x))


class Word:
    """A u32 in a register of each thread."""

    def __init__(self, value: Any):
        self.value = value

    def _op(self, op: Callable[..., Any], other: Operand) -> Word:
        return Word(op(self.value, _value(other)))

    def __add__(self, other: Operand) -> Word:
        return self._op(arith.addi, other)

    def __sub__(self, other: Operand) -> Word:
        return self._op(arith.subi, other)

    def __mul__(self, other: Operand) -> Word:
        return self._op(arith.muli, other)

    def __and__(self, other: Operand) -> Word:
        return self._op(arith.andi, other)

    def __or__(self, other: Operand) -> Word:
        return self._op(arith.ori, other)

    def __xor__(self, other: Operand) -> Word:
        return self._op(arith.xori, other)

    def __rshift__(self, other: Operand) -> Word:
        return self._op(arith.shrui, other)

    def __lshift__(self, other: Operand) -> Word:
        return self._op(arith.shli, other)

    def _compare(self, predicate: Any, other: Operand) -> Flag:
        return Flag(arith.cmpi(predicate, self.value, _value(other)))

    def __lt__(self, other: Operand) -> Flag:
        return self._compare(arith.CmpIPredicate.ult, other)

    def __le__(self, other: Operand) -> Flag:
        return self._compare(arith.CmpIPredicate.ule, other)

    def __gt__(self, other: Operand) -> Flag:
        return self._compare(arith.CmpIPredicate.ugt, other)

    def __ge__(self, other: Operand) -> Flag:
        return self._compare(arith.CmpIPredicate.uge, other)

    def equals(self, other: Operand) -> Flag:
        return self._compare(arith.CmpIPredicate.eq, other)

    def differs(self, other: Operand) -> Flag:
        return self._compare(arith.CmpIPredicate.ne, other)


class Flag:
    """A predicate of each thread."""

    def __init__(self, value: Any):
        self.value = value

    def __and__(self, other: Flag) -> Flag:
        return Flag(arith.andi(self.value, other.value))

    def __or__(self, other: Flag) -> Flag:
        return Flag(arith.ori(self.value, other.value))

    def choose(self, yes: Operand, no: Operand) -> Word:
        return Word(arith.select(self.value, _value(yes), _value(no)))


def word(x: Operand) -> Word:
    return x if isinstance(x, Word) else Word(_value(x))


def ptx(code: str, *args: Any, results: int = 0, convergent: bool = False) -> Any:
    """Emits `code`, whose $0.. are first the `results` (u32) and then the arguments; Words are u32, addresses u64."""
    values = [a.value if isinstance(a, (Word, Flag)) else _value(a) if isinstance(a, int) else a for a in args]
    types = [_i32()] * results
    if not results:
        mgpu_utils.inline_ptx(code, *values, has_side_effects=True, convergent=convergent)
        return None
    out = mgpu_utils.inline_ptx(code, *values, result_types=types, has_side_effects=True, convergent=convergent)
    words = [Word(v) for v in out]
    return words[0] if results == 1 else words


def real_bits(x: float) -> int:
    """The bits of an f32."""
    return struct.unpack("<I", struct.pack("<f", x))[0]


def real(x: float) -> Word:
    return word(real_bits(x))


def instr(name: str, *args: Operand, convergent: bool = False) -> Word:
    """One instruction of one result, such as instr("fma.rn.f32", a, b, c)."""
    operands = ", ".join(f"${i}" for i in range(len(args) + 1))
    return ptx(f"{name} {operands};", *args, results=1, convergent=convergent)


def bfly(x: Word, gap: int) -> Word:
    """x of the lane whose number differs in the bit `gap`."""
    return ptx("shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", x, gap, results=1, convergent=True)


def from_lane(x: Word, lane: Operand) -> Word:
    return ptx("shfl.sync.idx.b32 $0, $1, $2, 31, -1;", x, lane, results=1, convergent=True)


def sum_of(words: Sequence[Word]) -> Word:
    return reduce(lambda a, b: a + b, words)


def warp_sum(x: Word) -> Word:
    """The sum of x over the lanes of a warp. All lanes get it."""
    return instr("redux.sync.add.u32", x, -1, convergent=True)


def warp_later(x: Word) -> Word:
    """The sum of x over the later lanes of a warp."""
    lane, upward = special("laneid"), x  # of this lane and later ones
    for gap in (1, 2, 4, 8, 16):
        other = ptx("shfl.sync.down.b32 $0, $1, $2, 31, -1;", upward, gap, results=1, convergent=True)
        upward = upward + (lane + gap < 32).choose(other, 0)
    return upward - x


def mma(kind: str, acc: Sequence[Word], a: Sequence[Word], b: Sequence[Word]) -> list[Word]:
    """acc f32[16, 8] + a[16, 16] @ b[16, 8], a and b of `kind`, "bf16" or "f16"; m16n8k16 has the places."""
    return ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, "
        "{$8, $9}, {$10, $11, $12, $13};",
        *(*a, *b, *acc),
        results=4,
        convergent=True,
    )


@contextmanager
def when(flag: Flag) -> Iterator[None]:
    with mgpu_utils.when(flag.value):
        yield


def loop(start: Operand, stop: Operand, step: Operand, carry: Sequence[Word] = ()) -> Callable[..., list[Word]]:
    """Runs carry = body(i, *carry) for i in range(start, stop, step); each thread has its own bounds."""

    def run(body: Callable[..., Any]) -> list[Word]:
        op = scf.ForOp(_value(start), _value(stop), _value(step), [w.value for w in carry])
        with ir.InsertionPoint(op.body):
            out = body(Word(op.induction_variable), *(Word(v) for v in op.inner_iter_args))
            out = [] if out is None else out if isinstance(out, (list, tuple)) else [out]
            scf.YieldOp([w.value for w in out])
        return [Word(v) for v in op.results]

    return run


def repeat(carry: Sequence[Word], body: Callable[..., tuple[Flag, Sequence[Word]]]) -> list[Word]:
    """Runs again, carry = body(*carry) once, and then while `again` is true."""
    types = [w.value.type for w in carry]
    op = scf.WhileOp(types, [w.value for w in carry])
    before, after = (region.blocks.append(*types) for region in (op.before, op.after))
    with ir.InsertionPoint(before):
        flag, out = body(*(Word(v) for v in before.arguments))
        scf.condition(flag.value, [w.value for w in out])
    with ir.InsertionPoint(after):
        scf.yield_(list(after.arguments))
    return [Word(v) for v in op.results]


def ballot(flag: Flag) -> Word:
    """One bit for each lane of the warp, set if the lane's flag is true. All lanes get the same word."""
    return ptx("vote.sync.ballot.b32 $0, $1, -1;", flag, results=1, convergent=True)


def special(name: str) -> Word:
    """A special register, such as tid.x."""
    return ptx(f"mov.u32 $0, %{name};", results=1)


def global_address(ref: Any) -> Any:
    """The u64 address of a ref in device memory."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu_utils.memref_ptr(ref))


def shared_address(ref: Any) -> Word:
    """The address of a ref in this block's shared memory."""
    return Word(llvm.ptrtoint(_i32(), mgpu_utils.memref_ptr(ref)))


def divide(x: Word, by: int) -> Word:
    return x if by == 1 else Word(arith.divui(x.value, _value(by)))


def choose_between(flag: Flag, make: Callable[[], Sequence[Word]], otherwise: Sequence[Word]) -> list[Word]:
    """make() if the flag is true, else `otherwise`. If make() has a barrier, the whole block must share the flag."""
    op = scf.IfOp(flag.value, [w.value.type for w in otherwise], has_else=True)
    with ir.InsertionPoint(op.then_block):
        scf.yield_([w.value for w in make()])
    with ir.InsertionPoint(op.else_block):
        scf.yield_([w.value for w in otherwise])
    return [Word(v) for v in op.results]


def kernel(program: Callable[..., None], *, name: str, **how: Any) -> Callable[..., Any]:
    """A Pallas kernel whose whole body is `program(*memrefs)`: inputs, output, scratch."""

    def body(*refs: Any) -> None:
        inline = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
        inline(lambda _, *memrefs: program(*memrefs))(*refs)

    lanes = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    return plgpu.kernel(body, thread_name="warpgroup", compiler_params=lanes, kernel_name=name, **how)


def kernel_in_place(program: Callable[..., None], *, name: str, **how: Any) -> Callable[..., tuple[jax.Array, ...]]:
    """A kernel, as `kernel`, that changes its first operands in place and returns them; they are passed together.

    XLA copies these operands first, unless they are donated.
    """

    def run(changed: Sequence[jax.Array], *args: jax.Array) -> tuple[jax.Array, ...]:
        change = kernel(program, name=name, out_type=(), **how)
        spaces = [jax.typeof(a).memory_space for a in changed]
        if jax.memory.Space.Host not in spaces:  # it takes custom derivatives around it, but no array of the host
            return run_state(lambda refs: change(*refs, *args))(tuple(changed))
        refs = [jax.new_ref(a) for a in changed]
        change(*refs, *args)
        # The type of what was frozen lacks the memory's space (jax 0.11.2); nothing moves.
        return tuple(jax.device_put(jax.freeze(ref), space) for ref, space in zip(refs, spaces, strict=True))

    return run


def offset(address: Any, byte: Word) -> Any:
    """address + byte, in 64 bits."""
    return arith.addi(address, arith.extui(ir.IntegerType.get_signless(64), byte.value))


def offset_rows(address: Any, row: Word, stride: int) -> Any:
    """address + row * stride, in 64 bits."""
    i64 = ir.IntegerType.get_signless(64)
    wide = arith.extui(i64, row.value)
    return arith.addi(address, arith.muli(wide, arith.constant(i64, ir.IntegerAttr.get(i64, stride))))


def choose_address(flag: Flag, yes: Any, no: Any) -> Any:
    """As `Flag.choose`, of u64 addresses."""
    return arith.select(flag.value, yes, no)


def load(address: Any, at: int = 0) -> Word:
    """The word of device memory `at` bytes after an address; it must be one that no kernel writes meanwhile."""
    return ptx(f"ld.global.nc.u32 $0, [$1{f'+{at}' if at else ''}];", address, results=1)


def load_below(i: Word, end: Operand, address: Any, otherwise: Operand = 0) -> Word:
    """The word of device memory at an address if i < end; else `otherwise`, and nothing is read."""
    code = "{ .reg .pred p; setp.lt.u32 p, $1, $2; mov.u32 $0, $3; @p ld.global.nc.u32 $0, [$4]; }"
    return ptx(code, i, end, otherwise, address, results=1)


Numbers = tuple[Any, int]  # i32 in device memory, and how many rows share each


def number_of(numbers: Numbers, row: Word) -> Word:
    at, shared_by = numbers
    return load(offset_rows(global_address(at), divide(row, shared_by), 4))


def clipped(x: Word, most: int) -> Word:
    """A signed x between 0 and `most`."""
    return instr("min.s32", instr("max.s32", x, 0), most)


def ends_of(start: Numbers, stop: Numbers, row: Word, size: int) -> list[Word]:
    """Start and stop of a row's span, `clipped`; as selections, for LLVM then sees that no offset of a slot wraps."""
    ends = (number_of(numbers, row) for numbers in (start, stop))
    return [(x < 1 << 31).choose((x < size).choose(x, size), 0) for x in ends]


def span_of(start: Numbers, stop: Numbers, row: Word, size: int, last: int = 0) -> list[Word]:
    """The first slot of a row's span [start, stop - last) among `size` slots, and the number of slots."""
    first, end = clipped(number_of(start, row), size), number_of(stop, row) - last
    return [first, instr("max.s32", instr("min.s32", end, size) - first, 0)]


def remote(at: Word, block: Operand) -> Word:
    """The cluster address of the place `at` in the shared memory of another block."""
    return ptx("mapa.shared::cluster.u32 $0, $1, $2;", at, block, results=1)


def warp_barrier() -> None:
    ptx("bar.warp.sync -1;", convergent=True)


def block_barrier() -> None:
    ptx("bar.sync 0;", convergent=True)


def cluster_barrier() -> None:
    """A barrier of all threads of the cluster. All see what each wrote to shared and device memory before it."""
    cluster_arrive()
    cluster_wait()


def cluster_arrive() -> None:
    """The first half of `cluster_barrier`: what was written before it is what all see after `cluster_wait`."""
    ptx("barrier.cluster.arrive.release;", convergent=True)


def cluster_wait() -> None:
    ptx("barrier.cluster.wait.acquire;", convergent=True)
