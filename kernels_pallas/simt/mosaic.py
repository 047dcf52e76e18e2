"""The backend that compiles kernels for a GPU: MLIR inside of a Pallas Mosaic GPU kernel.

The kernels scatter, gather and shuffle: each lane has an address or a source of its own. Pallas
gives a lane no address (`plgpu.atomic_add` adds a tile to a slice), and has no gather from
device memory and no shuffle on these GPUs. The body of a kernel is therefore one `inline_mgpu`
call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, cast

import jax
from jax import Array

from kvjax.kernels_pallas.simt.target import ARCHITECTURES
from kvjax.kernels_pallas.simt.types import Arithmetic, Comparison, Launch

utils: Any
plgpu: Any
run_state: Any
ir: Any
arith: Any
llvm: Any
scf: Any

WHY_NOT: str | None = None  # the reason why no kernel can be built here
if jax.__version_info__ < (0, 11):
    WHY_NOT = f"the Pallas Mosaic GPU kernels need jax >= 0.11; this is {jax.__version__}"
else:
    try:
        from jax.experimental.mosaic.gpu import utils
        from jax.experimental.pallas import mosaic_gpu as plgpu
        from jax.experimental.pallas import run_state
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm, scf
    except ImportError as error:  # a jaxlib built without it
        WHY_NOT = f"this jax has no Mosaic GPU: {error}"


@cache
def why_not() -> str | None:
    """Why this process can build no kernel for its GPUs; None if it can.

    Without any GPU it can: a program may be compiled ahead of time for one. The environment
    variable KVJAX_KERNELS=off turns all kernels off.
    """
    wanted = os.environ.get("KVJAX_KERNELS", "on")
    if wanted not in ("on", "off"):
        raise ValueError(
            f"the environment variable KVJAX_KERNELS must be 'on' or 'off'; got {wanted!r}"
        )
    if wanted == "off":
        return "the environment variable KVJAX_KERNELS is 'off'"
    if WHY_NOT:
        return WHY_NOT
    for device in jax.devices():
        capability = str(getattr(device, "compute_capability", ""))
        if device.platform == "gpu" and capability not in ARCHITECTURES:
            return (
                f"the kernels are for NVIDIA GPUs of compute capability {', '.join(ARCHITECTURES)}; this process has "
                f"{device.device_kind} of compute capability {capability or 'unknown'}"
            )
    return None


OPS = {
    "add": "addi", "sub": "subi", "mul": "muli", "div": "divui", "and": "andi", "or": "ori", "xor": "xori",
    "shl": "shli", "shr": "shrui",
}  # fmt: skip
PREDICATES = {"lt": "ult", "le": "ule", "gt": "ugt", "ge": "uge", "eq": "eq", "ne": "ne"}


def _integer(bits: int) -> Any:
    return ir.IntegerType.get_signless(bits)


class Mosaic:
    """The `Backend` whose values are SSA values of MLIR."""

    def constant(self, x: int, bits: int = 32) -> Any:
        kind = _integer(bits)
        return arith.constant(
            kind, ir.IntegerAttr.get(kind, x - (1 << bits) if x >= 1 << (bits - 1) else x)
        )

    def arithmetic(self, op: Arithmetic, a: Any, b: Any) -> Any:
        return getattr(arith, OPS[op])(a, b)

    def compare(self, op: Comparison, a: Any, b: Any) -> Any:
        return arith.cmpi(getattr(arith.CmpIPredicate, PREDICATES[op]), a, b)

    def select(self, flag: Any, yes: Any, no: Any) -> Any:
        return arith.select(flag, yes, no)

    def extend(self, x: Any) -> Any:
        return arith.extui(_integer(64), x)

    def address(self, ref: Any, bits: int) -> Any:
        return llvm.ptrtoint(_integer(bits), utils.memref_ptr(ref))

    def ptx(
        self, code: str, values: Sequence[Any], results: int, convergent: bool
    ) -> Sequence[Any]:
        how: dict[str, Any] = {"has_side_effects": True, "convergent": convergent}
        if not results:
            utils.inline_ptx(code, *values, **how)
            return ()
        return utils.inline_ptx(code, *values, result_types=[_integer(32)] * results, **how)

    def when(self, flag: Any) -> AbstractContextManager[None]:
        return cast(AbstractContextManager[None], utils.when(flag))

    def loop(
        self,
        start: Any,
        stop: Any,
        step: Any,
        carry: Sequence[Any],
        body: Callable[..., Sequence[Any]],
    ) -> Sequence[Any]:
        op = scf.ForOp(start, stop, step, list(carry))
        with ir.InsertionPoint(op.body):
            scf.YieldOp(list(body(op.induction_variable, *op.inner_iter_args)))
        return list(op.results)

    def repeat(
        self, carry: Sequence[Any], body: Callable[..., tuple[Any, Sequence[Any]]]
    ) -> Sequence[Any]:
        types = [x.type for x in carry]
        op = scf.WhileOp(types, list(carry))
        before, after = (region.blocks.append(*types) for region in (op.before, op.after))
        with ir.InsertionPoint(before):
            again, out = body(*before.arguments)
            scf.condition(again, list(out))
        with ir.InsertionPoint(after):
            scf.yield_(list(after.arguments))
        return list(op.results)

    def branch(
        self, flag: Any, make: Callable[[], Sequence[Any]], otherwise: Sequence[Any]
    ) -> Sequence[Any]:
        op = scf.IfOp(flag, [x.type for x in otherwise], has_else=True)
        with ir.InsertionPoint(op.then_block):
            scf.yield_(list(make()))
        with ir.InsertionPoint(op.else_block):
            scf.yield_(list(otherwise))
        return list(op.results)

    def run(
        self, program: Callable[..., None], launch: Launch, out_type: Any, args: Sequence[Array]
    ) -> Any:
        def body(*refs: Any) -> None:
            inline = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
            inline(lambda _, *memrefs: program(*memrefs))(*refs)

        lanes = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
        of_cluster = (
            {}
            if (launch.cluster or 1) == 1
            else {"cluster": (launch.cluster,), "cluster_names": ("part",)}
        )
        return plgpu.kernel(
            body,
            out_type=out_type,
            scratch_types=[plgpu.SMEM((words,), jax.numpy.uint32) for words in launch.scratch],
            grid=(launch.blocks,),
            grid_names=("block",),
            num_threads=launch.warpgroups,
            thread_name="warpgroup",
            compiler_params=lanes,
            kernel_name=launch.name,
            **of_cluster,
        )(*args)

    def run_in_place(
        self,
        program: Callable[..., None],
        launch: Launch,
        changed: Sequence[Array],
        args: Sequence[Array],
    ) -> tuple[Array, ...]:
        spaces = [jax.typeof(a).memory_space for a in (*changed, *args)]
        # This way allows custom derivatives, but no arrays in host memory.
        if jax.memory.Space.Host not in spaces:
            return run_state(lambda refs: self.run(program, launch, (), (*refs, *args)))(
                tuple(changed)
            )
        refs = [jax.new_ref(a) for a in changed]
        self.run(program, launch, (), cast(Any, [*refs, *args]))
        # The type of a frozen ref lacks its memory space (jax 0.11.2); this moves nothing.
        return tuple(
            jax.device_put(jax.freeze(ref), space)
            for ref, space in zip(refs, spaces, strict=False)
        )
