"""Operations: a reference in plain JAX, a GPU kernel, and the rule that says which of them
runs.

An operation is a function in plain JAX, its reference, under the decorator `op`, which also
takes how its GPU kernel is called and which arguments the kernel cannot take. `Op` does the
rest: the argument `implementation`, the import of the kernel on first use, the derivative, the
entry in `OPS`, and `explain`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, Literal, ParamSpec, TypeVar, get_args

import jax
from jax import Array, lax
from jax.extend.core import get_opaque_trace_state

from kvjax.memory import varying_axes
from kvjax.numerics.derivatives import with_derivative
from kvjax.numerics.partial import Logits
from kvjax.ops.partitioned import warn_if_partitioned
from kvjax.validation import shown

Implementation = Literal["xla", "mosaic"]
Derivative = Literal["reference", "zero", "none"]
P = ParamSpec("P")
R = TypeVar("R")

OPS: dict[str, Op[..., Any]] = {}
_implementation = jax.make_user_context(
    None
)  # an Implementation; jit's caches have it in their keys
# The trace of the branch that all platforms but CUDA run. As no key of a cache has it, no other
# trace may read it.
_off_cuda: ContextVar[Any] = ContextVar("off_cuda", default=None)
_explained: ContextVar[list[Explanation] | None] = ContextVar("explained", default=None)


@dataclass(frozen=True)
class Explanation:
    """Which implementation an operation runs, and why.

    As a string: "mosaic", "cudnn", "mosaic: reason" for a kernel that was not measured on this
    GPU, or "xla: reason".
    """

    op: str
    implementation: Implementation | Literal["cudnn"]  # "cudnn": exact attention of a prompt
    reason: str
    measured: bool = True  # False: a kernel that was compiled for this GPU and simulated, but not measured on it

    def __str__(self) -> str:
        plain = self.implementation != "xla" and self.measured
        return self.implementation if plain else f"{self.implementation}: {self.reason}"


class Op(Generic[P, R]):
    """An operation: called like its reference, with `implementation` to say what runs. Made by
    `op`.
    """

    def __init__(
        self,
        reference: Callable[P, R],
        kernel: str | ModuleType,
        static_argnames: tuple[str, ...],
        derivative: Derivative,
        limit: Callable[[Any, Any], str | None],
        mosaic: Callable[[Any, Any], R],
    ) -> None:
        functools.update_wrapper(self, reference)
        self.name = reference.__name__
        self.kernel = kernel
        self.reference = reference  # operations inside it are dispatched as anywhere else
        self._signature = inspect.signature(reference)
        self._static = static_argnames
        self.operands = [
            n
            for n in self._signature.parameters
            if n not in (*static_argnames, "implementation")
        ]
        self.derivative = derivative
        self._limit, self._mosaic = limit, mosaic
        OPS[self.name] = self

    def __repr__(self) -> str:
        return f"<kvjax.ops.{self.name}>"

    @property
    def module(self) -> Any:
        """The module of the kernel, imported on first use."""
        own = isinstance(self.kernel, str)
        return import_module(f"kvjax.kernels_pallas.{self.kernel}") if own else self.kernel

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        asked = given.pop("implementation")
        implementation = _implementation.value if asked is None else _require(asked)
        if implementation is None and (nowhere := runs_nowhere()):
            if (found := _explained.get()) is not None:
                found.append(Explanation(self.name, "xla", nowhere))
            if self.derivative == "zero":
                given.update(
                    zip(
                        self.operands,
                        lax.stop_gradient(tuple(map(given.get, self.operands))),
                        strict=True,
                    )
                )
            return self.reference(**given)  # type: ignore[call-arg]
        limit = nowhere = runs_nowhere() if implementation == "xla" else None
        if not nowhere:
            limit = self._limit(
                self.module, SimpleNamespace(**given)
            )  # which raises ValueError for wrong arguments
            limit = _why_not(limit or _too_large(given)) or _why_not_in_shard_map(given)
            if _cap(given) is not None or given.get("sinks") is not None:
                limit = limit or self._untaken(given)
        how = self._explain(limit, implementation)
        if (found := _explained.get()) is not None:
            found.append(how)
        static = tuple(zip(self._static, map(given.pop, self._static), strict=True))
        operands = tuple(given.values())
        # JAX traces a branch once for each function and shapes, so equal calls share their
        # functions.
        build = _functions if shares_traces() else _functions.__wrapped__
        silent = how.implementation == "mosaic"
        run, reference, elsewhere = build(
            self, static, silent or implementation is not None, silent
        )
        if self.derivative == "zero":
            operands = lax.stop_gradient(operands)
        if implementation == "mosaic":
            if limit:
                raise NotImplementedError(limit)
            return lax.platform_dependent(
                *operands, cuda=run
            )  # lowered for anything else: NotImplementedError
        if implementation == "xla" or nowhere or _unmeasured(self.module):
            return reference(*operands)
        if limit:
            if jax.default_backend() == "gpu":
                say_once(f"running the reference in plain JAX: {limit}")
            return reference(*operands)
        if _off_cuda.get() == get_opaque_trace_state():
            return reference(*operands)
        return lax.platform_dependent(*operands, cuda=run, default=elsewhere)

    def unsupported(self, *args: P.args, **kwargs: P.kwargs) -> str | None:
        """The limit of the kernel that these arguments exceed, on any machine; None if the
        kernel takes them.
        """
        given = self._arguments(*args, **kwargs)
        return (
            self._limit(self.module, given)
            or _too_large(vars(given))
            or self._untaken(vars(given))
        )

    def why_not(self, *args: Any, **kwargs: Any) -> str | None:
        """Why this process runs the reference for these arguments by default; None if it runs
        the kernel.
        """
        return (
            runs_nowhere()
            or _why_not(self.unsupported(*args, **kwargs))
            or _unmeasured(self.module)
        )

    def _untaken(self, given: dict[str, Any]) -> str | None:
        """Why the kernel does not take a soft cap or sink logits; None if it does, or there are
        none.
        """
        takes = getattr(self.module, "TAKES", ())
        cap = _cap(given)
        if cap is not None and "soft caps" not in takes:
            return f"the kernel {self.name} takes no soft cap of the logits, got {cap}"
        if given.get("sinks") is not None and "sinks" not in takes:
            return f"the kernel {self.name} takes no sink logits"
        return None

    def run_kernel(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The result of the kernel, whatever its limits; without a derivative."""
        return self._mosaic(self.module, self._arguments(*args, **kwargs))

    def _arguments(self, *args: Any, **kwargs: Any) -> SimpleNamespace:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return SimpleNamespace(**bound.arguments)

    def _explain(self, limit: str | None, implementation: Implementation | None) -> Explanation:
        if implementation is not None:
            return Explanation(self.name, implementation, "asked for by name")
        why = limit or _unmeasured(self.module)
        if why is None and jax.default_backend() != "gpu":
            why = f"the kernels are for GPUs; this process runs on {jax.default_backend()}"
        if why is None:
            from kvjax.kernels_pallas import simt

            target = simt.target()
            if target.measured:
                return Explanation(self.name, "mosaic", f"measured on this GPU, {target.kind}")
            not_here = f"compiled and simulated, not measured on this GPU, {target.kind}"
            return Explanation(self.name, "mosaic", not_here, measured=False)
        return Explanation(self.name, "xla", why)


def op(
    *,
    kernel: str | ModuleType,
    limit: Callable[[Any, Any], str | None],
    mosaic: Callable[[Any, Any], R],
    static_argnames: tuple[str, ...] = (),
    derivative: Derivative = "none",
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Makes an operation from a reference in plain JAX, which must take `implementation=None`
    and leave it unused.

    Args:
      kernel: folder and module of the kernel in `kvjax.kernels_pallas`, such as
        "attend.attend_span", or a module of another package.
      limit: called as limit(module, a), where `a` has the reference's arguments as attributes;
        returns the limit of the kernel that they exceed, or None. It raises ValueError, as the
        reference does, for arguments that both refuse.
      mosaic: mosaic(module, a) runs the kernel.
      static_argnames: arguments that are Python values; all others are pytrees of arrays.
      derivative: of the kernel, which has none of its own: "reference" takes that of the
        reference, and "zero" is for a selection of slots.
    """
    return lambda reference: Op(reference, kernel, static_argnames, derivative, limit, mosaic)


def for_gpu(gpu: Callable[..., R], others: Callable[..., R], *operands: Any) -> R:
    """gpu(*operands) in a program for a GPU, else others(*operands): two forms of the same
    plain JAX.

    A GPU spends 2 to 10 us on each step of a loop, and XLA makes one kernel of a sum and all
    that leads to it. A CPU or TPU has fast products, and wants its blocks in the nearest
    memory. Both have the derivative of `others`. A process that has no GPU and cannot compile
    for one does not trace the form for it, nor does a reference in whose place CUDA runs a
    kernel.
    """
    if not reaches_gpus() or _off_cuda.get() == get_opaque_trace_state():
        return others(*operands)
    gpu = with_derivative(gpu, others)
    return lax.platform_dependent(*operands, cuda=gpu, rocm=gpu, default=others)


def explain(op: str | Op[..., Any], *args: Any, **options: Any) -> Explanation:
    """Which implementation `op` runs for these arguments, and why.

    `op` is an operation of `kvjax.ops` or its name; the rest are its arguments, where any array
    may be a `jax.ShapeDtypeStruct`. By default an NVIDIA GPU runs the Pallas Mosaic GPU kernel
    if it can: jax >= 0.11, a compute capability from 8.0 to 12.0 that the kernels were compiled
    for, and shapes that the kernel takes; the reason says whether the kernel was measured on
    this kind of GPU. Everything else runs the reference ("xla"), and so does a GPU with the
    environment variable KVJAX_KERNELS=off. The decision is made for the platform that a program
    is lowered for. A kernel that is requested by name ("mosaic") runs, measured or not, or
    raises NotImplementedError with the limit.

    >>> import jax, jax.numpy as jnp
    >>> scores, valid = (jax.ShapeDtypeStruct((8, 65536), dtype) for dtype in (jnp.float32, bool))
    >>> explain("top_k", scores, valid, 8192).implementation
    'xla'
    """
    name = op.name if isinstance(op, Op) else op
    if not isinstance(name, str):
        raise ValueError(
            f"explain(op=...) must be an operation or its name, got {shown(op)}; for all operations of a step: "
            "with kvjax.ops.explained() as found: jax.eval_shape(lambda: kvjax.attention(cache, q, k, v))"
        )
    if name not in OPS:
        raise ValueError(f"op must be one of {', '.join(sorted(OPS))}; got {op!r}")
    leaves, tree = jax.tree.flatten((args, options))
    arrays = {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")}

    def run(arrays: dict[int, Array]) -> Any:
        args, options = jax.tree.unflatten(
            tree, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
        )
        return OPS[name](*args, **options)

    with explained() as found:
        jax.eval_shape(run, arrays)
    return found[0]


@contextmanager
def explained() -> Iterator[list[Explanation]]:
    """Collects an `Explanation` for each call of an operation that is traced in the block, in
    order.

    A function that jit has traced before is not traced again, and adds none.
    """
    found: list[Explanation] = []
    with _set(_explained, found):
        yield found


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def tell(how: Explanation) -> None:
    """Adds to what `explained` collects."""
    if (found := _explained.get()) is not None:
        found.append(how)


@contextmanager
def use(implementation: Implementation | None) -> Iterator[None]:
    """Within the block, operations run `implementation`: "xla", "mosaic", or None for the
    default.

    The same as passing it to each call; a call that passes another one keeps that. It is a part
    of the keys of jit's caches (`jax.make_user_context`), so a jitted function is traced again
    for another value.
    """
    with _implementation(_require(implementation)):
        yield


def _require(implementation: Any) -> Any:
    if implementation not in (None, *get_args(Implementation)):
        names = ", ".join(map(repr, get_args(Implementation)))
        raise ValueError(
            f"implementation must be None or one of {names}; got {implementation!r}"
        )
    return implementation


@contextmanager
def _inside_reference(*, forced: bool, silent: bool) -> Iterator[None]:
    """`forced`: operations inside run their references. `silent`: they add no explanation, as a
    kernel runs instead.
    """
    with (
        _set(_explained, None if silent else _explained.get()),
        _implementation("xla") if forced else nullcontext(),
    ):
        yield


@functools.lru_cache(maxsize=1024)
def _functions(
    op: Op[..., R], static: tuple[tuple[str, Any], ...], forced: bool, silent: bool
) -> tuple[Callable[..., R], Callable[..., R], Callable[..., R]]:
    """The kernel, the reference, and the reference where CUDA runs the kernel, as functions of
    only the operands.
    """

    def plain(*operands: Any) -> R:
        return op.reference(**dict(zip(op.operands, operands, strict=True)), **dict(static))

    reference = (
        _inside_reference(forced=forced, silent=silent)(plain) if forced or silent else plain
    )

    def elsewhere(*operands: Any) -> R:
        with _set(_off_cuda, get_opaque_trace_state()):
            return reference(*operands)

    def mosaic(*operands: Any) -> R:
        operands = warn_if_partitioned(op.name, operands)
        return op.run_kernel(**dict(zip(op.operands, operands, strict=True)), **dict(static))

    run = with_derivative(mosaic, reference) if op.derivative == "reference" else mosaic
    return run, reference, elsewhere


def runs_nowhere() -> str | None:
    """Why this process can neither run a kernel nor compile one ahead of time, so that none
    need be imported.

    A process that has imported the kernels, or asks for one by name, can still lower them.
    """
    if "kvjax.kernels_pallas.simt" in sys.modules:
        return None
    if not reaches_gpus():
        return f"the kernels are for GPUs; this process runs on {jax.default_backend()}"
    if jax.__version_info__ < (0, 11):
        return f"the Pallas Mosaic GPU kernels need jax >= 0.11; this is {jax.__version__}"
    return None


def reaches_gpus() -> bool:
    """True if this process has a GPU, or JAX's plugin for NVIDIA GPUs, which can compile for
    one that is not there.
    """
    return jax.default_backend() == "gpu" or _has_cuda_plugin()


@functools.cache
def _has_cuda_plugin() -> bool:
    plugins = find_spec("jax_plugins")
    folders = () if plugins is None else plugins.submodule_search_locations or ()
    return any(module.name.startswith("xla_cuda") for module in pkgutil.iter_modules(folders))


def _why_not(limit: str | None) -> str | None:
    """Why no kernel can run: what this process lacks, or else `limit`."""
    from kvjax.kernels_pallas import simt

    return simt.why_not() or limit


def _cap(given: dict[str, Any]) -> float | None:
    logits = given.get("logits")
    return logits.cap if isinstance(logits, Logits) else None


def _too_large(operands: Any) -> str | None:
    """The limit of offsets of 32 bits, if an array exceeds it."""
    for leaf in jax.tree.leaves(operands):
        shape = getattr(leaf, "shape", ())
        shape = shape[2 if len(shape) > 2 else 1 :]
        if math.prod(shape) * (leaf.dtype.itemsize if shape else 0) >= 1 << 31:
            return f"{leaf.dtype}{list(leaf.shape)} has 2**31 bytes or more a row and head, which no kernel can address"
    return None


def _why_not_in_shard_map(operands: Any) -> str | None:
    if axes := varying_axes(
        [leaf for leaf in jax.tree.leaves(operands) if isinstance(leaf, jax.Array)]
    ):
        return (
            f"JAX cannot check the types of kernels in jax.shard_map over {', '.join(sorted(axes))}; pass "
            "check_vma=False to it, or give the cache a kvjax.Placement"
        )
    return None


def shares_traces() -> bool:
    """True if equal calls may be traced once: not while `explained` lists each call, or a test
    changes a kernel.
    """
    has_cache = getattr(
        sys.modules.get("kvjax.kernels_pallas.simt"), "has_cache", None
    )  # None while it is imported
    return _explained.get() is None and (has_cache is None or has_cache())


def _unmeasured(kernel: Any) -> str | None:
    name = kernel.__name__.rpartition(".")[2]
    return (
        None
        if kernel.MEASURED
        else f"the kernel {name} is not yet measured on a GPU: ask for it by name"
    )


@functools.cache
def say_once(what: str) -> None:
    logging.getLogger("kvjax").warning(what)


def device_kind() -> str | None:
    """The kind of GPU that this process has, such as "NVIDIA H200"; None without one, or with
    several kinds.
    """
    from kvjax.kernels_pallas.tuned import device_kind

    return device_kind()
