"""Operations: a reference in plain JAX, a GPU kernel, for some a TPU kernel, and the rule that
says which of them runs.

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
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar, get_args

import jax
from jax import Array, lax
from jax.extend.core import get_opaque_trace_state

from kvjax.memory import varying_axes
from kvjax.numerics import platforms
from kvjax.numerics.derivatives import with_derivative
from kvjax.numerics.partial import Logits
from kvjax.ops.partitioned import on_one_device, warn_if_partitioned
from kvjax.validation import short_repr

Implementation = Literal["xla", "mosaic"]
Derivative = Literal["reference", "zero", "none"]
P = ParamSpec("P")
R = TypeVar("R")

OPS: dict[str, Op[..., Any]] = {}
# An Implementation; jit's caches have it in their keys.
_implementation = jax.make_user_context(None)
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
    # False: a kernel that was compiled for this GPU or TPU and simulated, but not measured on it
    measured: bool = True

    def __str__(self) -> str:
        plain = self.implementation != "xla" and self.measured
        return self.implementation if plain else f"{self.implementation}: {self.reason}"


class OnTpu(NamedTuple):
    """The kernel of an operation for TPUs; its fields are called as those of `op`."""

    limit: Callable[[Any], str | None]
    mosaic: Callable[[Any], Any]


@dataclass(frozen=True)
class Choice:
    """The implementation that an operation runs for a call, and the reason."""

    runs: Literal["reference", "kernel", "either"]  # "either": by platform
    told: Explanation  # of this process
    forced: bool = False  # operations inside of a reference run references, too
    warning: str | None = None  # to be logged, once

    @property
    def silent(self) -> bool:
        """True if operations inside of a reference are not explained, as a kernel runs instead."""
        return self.told.implementation == "mosaic"


class Op(Generic[P, R]):
    """An operation: called like its reference, with `implementation` to say what runs. Made by
    `op`.
    """

    def __init__(
        self,
        reference: Callable[P, R],
        kernel: Callable[[], ModuleType],
        static_argnames: tuple[str, ...],
        derivative: Derivative,
        limit: Callable[[Any], str | None],
        mosaic: Callable[[Any], R],
        on_tpu: OnTpu | None = None,
    ) -> None:
        functools.update_wrapper(self, reference)
        self.name = reference.__name__
        self._kernel = kernel
        self.reference = reference  # operations inside it are dispatched as anywhere else
        self._signature = inspect.signature(reference)
        self._static = static_argnames
        self.operands = [
            n
            for n in self._signature.parameters
            if n not in (*static_argnames, "implementation")
        ]
        self.derivative = derivative
        self._limit = limit
        self._mosaic = mosaic
        self._on_tpu = on_tpu
        OPS[self.name] = self

    def __repr__(self) -> str:
        return f"<kvjax.ops.{self.name}>"

    @property
    def module(self) -> Any:
        """The module of the kernel, imported on first use."""
        return self._kernel()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        a = self._bind(*args, **kwargs)
        choice = self._choose(a)
        _record(choice)
        return self._run(a, choice)

    def _choose(self, a: SimpleNamespace) -> Choice:
        """Returns what runs for the arguments `a`. The first that has a say decides:

        1. The caller, by `implementation` or `use`: "xla" runs the reference, and "mosaic" the
           kernel, or raises NotImplementedError if that cannot take the arguments.
        2. The process, if it can neither run kernels nor compile them: the reference.
        3. The arguments, if the kernel cannot take them (its own limits, 32-bit offsets, axes
           of shard_map, a soft cap or sinks): the reference.
        4. The kernel, if it is not yet measured: the reference.
        5. The trace, if it is that of a program's branch for other platforms: the reference.
        6. The platform that the program is lowered for: CUDA runs the kernel, and all others
           the reference.

        Where the reference runs and nobody asked for it by name, a program for a TPU has the
        kernel for TPUs, if there is one that takes the arguments.

        Raises ValueError for arguments that kernel and reference both refuse.
        """
        asked = (
            _implementation.value if a.implementation is None else _require(a.implementation)
        )
        nowhere = None if asked == "mosaic" else runs_nowhere()
        limit = None if nowhere else self._limit_here(a)
        if asked == "mosaic" and limit:
            raise NotImplementedError(limit)
        if asked is not None:
            told = Explanation(self.name, asked, "asked for by name")
            return Choice("kernel" if asked == "mosaic" else "reference", told, forced=True)
        if nowhere:
            told = self._told_on_tpu(a) or Explanation(self.name, "xla", nowhere)
            return Choice("reference", told)

        told = self._told_on_tpu(a) or self._explain(limit)
        if _unmeasured(self.module):
            return Choice("reference", told)
        if limit:
            on_gpu = jax.default_backend() == "gpu"
            warning = f"running the reference in plain JAX: {limit}" if on_gpu else None
            return Choice("reference", told, warning=warning)
        if _off_cuda.get() == get_opaque_trace_state():
            return Choice("reference", told)
        return Choice("either", told)

    def _run(self, a: SimpleNamespace, choice: Choice) -> R:
        static = tuple((name, getattr(a, name)) for name in self._static)
        operands = tuple(getattr(a, name) for name in self.operands)
        if self.derivative == "zero":
            operands = lax.stop_gradient(operands)
        # JAX traces a branch once for each function and shapes, so equal calls share their
        # functions.
        build = _forms if shares_traces() else _forms.__wrapped__
        forms = build(self, static, choice.forced or choice.silent, choice.silent)
        if choice.runs == "kernel":  # lowered for anything else: NotImplementedError
            return lax.platform_dependent(*operands, cuda=forms.kernel)
        kernels = {"cuda": forms.kernel} if choice.runs == "either" else {}
        if not choice.forced and self._why_not_on_tpu(a) is None:
            kernels["tpu"] = forms.on_tpu
        if not kernels:
            return forms.reference(*operands)
        plain = forms.elsewhere if choice.runs == "either" else forms.reference
        return lax.platform_dependent(*operands, **kernels, default=plain)

    def _why_not_on_tpu(self, a: SimpleNamespace) -> str | None:
        """Why a program for a TPU has the reference for these arguments; None if it has a kernel."""
        if self._on_tpu is None:
            return f"{self.name} has no kernel for TPUs"
        if not platforms.reaches_tpus():
            return f"this process runs on {jax.default_backend()} and has no libtpu"
        if os.environ.get("KVJAX_KERNELS") == "off":
            return "the environment variable KVJAX_KERNELS is 'off'"
        return self._on_tpu.limit(a) or _why_not_in_shard_map(vars(a))

    def _limit_here(self, a: SimpleNamespace) -> str | None:
        """Why this process cannot run the kernel for these arguments; None if it can."""
        limit = self._limit(a)  # which raises ValueError for wrong arguments
        limit = _why_not(limit or _too_large(vars(a))) or _why_not_in_shard_map(vars(a))
        return limit or self._untaken(a)

    def unsupported(self, *args: P.args, **kwargs: P.kwargs) -> str | None:
        """Returns the limit of the kernel that these arguments exceed, on any machine; None if
        the kernel takes them.
        """
        a = self._bind(*args, **kwargs)
        return self._limit(a) or _too_large(vars(a)) or self._untaken(a)

    def why_not(self, *args: Any, **kwargs: Any) -> str | None:
        """Why this process runs the reference for these arguments by default; None if it runs
        the kernel.
        """
        return (
            runs_nowhere()
            or _why_not(self.unsupported(*args, **kwargs))
            or _unmeasured(self.module)
        )

    def _untaken(self, a: SimpleNamespace) -> str | None:
        """Why the kernel does not take a soft cap or sink logits; None if it does, or there are
        none.
        """
        logits = getattr(a, "logits", None)
        cap = logits.cap if isinstance(logits, Logits) else None
        if cap is None and getattr(a, "sinks", None) is None:
            return None
        takes = getattr(self.module, "TAKES", ())
        if cap is not None and "soft caps" not in takes:
            return f"the kernel {self.name} takes no soft cap of the logits, got {cap}"
        if getattr(a, "sinks", None) is not None and "sinks" not in takes:
            return f"the kernel {self.name} takes no sink logits"
        return None

    def run_kernel(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Returns the result of the kernel, whatever its limits; without a derivative."""
        return self._mosaic(self._bind(*args, **kwargs))

    def _told_on_tpu(self, a: SimpleNamespace) -> Explanation | None:
        """Explains whether this process runs the kernel for TPUs by default; None if it has no
        TPU, or the operation no such kernel."""
        if jax.default_backend() != "tpu" or self._on_tpu is None:
            return None
        if why := self._why_not_on_tpu(a):
            return Explanation(self.name, "xla", why)
        unproven = "compiled by the TPU's compiler and interpreted, never run on a chip"
        return Explanation(self.name, "mosaic", unproven, measured=False)

    def run_on_tpu(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Returns the result of the kernel for TPUs, without a derivative."""
        assert self._on_tpu is not None
        return self._on_tpu.mosaic(self._bind(*args, **kwargs))

    def _bind(self, *args: Any, **kwargs: Any) -> SimpleNamespace:
        """Returns the arguments by name, with defaults."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return SimpleNamespace(**bound.arguments)

    def _explain(self, limit: str | None) -> Explanation:
        """Explains what this process runs by default; `limit` is why the kernel cannot run."""
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
    kernel: Callable[[], ModuleType],
    limit: Callable[[Any], str | None],
    mosaic: Callable[[Any], R],
    static_argnames: tuple[str, ...] = (),
    derivative: Derivative = "none",
    on_tpu: OnTpu | None = None,
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Makes an operation from a reference in plain JAX, which must take `implementation=None`
    and leave it unused.

    Args:
      kernel: returns the module of the kernel, such as `kernels.attend_span`. It is called only
        where a kernel may run, so that nothing else imports the module.
      limit: called as limit(a), where `a` has the reference's arguments as attributes; returns
        the limit of the kernel that they exceed, or None. It raises ValueError, as the
        reference does, for arguments that both refuse.
      mosaic: mosaic(a) runs the kernel.
      static_argnames: arguments that are Python values; all others are pytrees of arrays.
      derivative: of the kernel, which has none of its own: "reference" takes that of the
        reference, and "zero" is for a selection of slots.
      on_tpu: the kernel for TPUs, which has the derivative of the reference.
    """
    return lambda reference: Op(
        reference, kernel, static_argnames, derivative, limit, mosaic, on_tpu
    )


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
    this kind of GPU. A TPU runs the kernels that there are for it, which were never run on a
    chip. Everything else runs the reference ("xla"), and so does a GPU with the environment
    variable KVJAX_KERNELS=off. The decision is made for the platform that a program
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
            f"explain(op=...) must be an operation or its name, got {short_repr(op)}; for all operations of a step: "
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


def _record(choice: Choice) -> None:
    tell(choice.told)
    if choice.warning:
        say_once(choice.warning)


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


class Forms(NamedTuple):
    """An operation as functions of only its operands."""

    kernel: Callable[..., Any]
    reference: Callable[..., Any]
    elsewhere: Callable[..., Any]  # the reference where CUDA runs the kernel
    on_tpu: Callable[..., Any]  # the kernel for TPUs


@functools.lru_cache(maxsize=1024)
def _forms(
    op: Op[..., Any], static: tuple[tuple[str, Any], ...], forced: bool, silent: bool
) -> Forms:
    """Returns the forms of `op` with these static arguments; `forced` and `silent` as in
    `_inside_reference`.
    """

    def plain(*operands: Any) -> Any:
        return op.reference(**dict(zip(op.operands, operands, strict=True)), **dict(static))

    reference = plain
    if forced or silent:
        reference = _inside_reference(forced=forced, silent=silent)(plain)

    def elsewhere(*operands: Any) -> Any:
        with _set(_off_cuda, get_opaque_trace_state()):
            return reference(*operands)

    def mosaic(*operands: Any) -> Any:
        operands = warn_if_partitioned(op.name, operands)
        return op.run_kernel(**dict(zip(op.operands, operands, strict=True)), **dict(static))

    def mosaic_on_tpu(*operands: Any) -> Any:
        named = dict(zip(op.operands, operands, strict=True))
        return op.run_on_tpu(**named, **dict(static))

    def on_tpu(*operands: Any) -> Any:
        return on_one_device(mosaic_on_tpu, reference, *operands)

    kernel = with_derivative(mosaic, reference) if op.derivative == "reference" else mosaic
    return Forms(kernel, reference, elsewhere, with_derivative(on_tpu, reference))


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
    ahead = platforms.compiles_ahead() and _has_cuda_plugin()
    return jax.default_backend() == "gpu" or ahead


@functools.cache
def _has_cuda_plugin() -> bool:
    plugins = find_spec("jax_plugins")
    folders = () if plugins is None else plugins.submodule_search_locations or ()
    return any(module.name.startswith("xla_cuda") for module in pkgutil.iter_modules(folders))


def _why_not(limit: str | None) -> str | None:
    """Why no kernel can run: what this process lacks, or else `limit`."""
    from kvjax.kernels_pallas import simt

    return simt.why_not() or limit


def _too_large(operands: Any) -> str | None:
    """Returns the limit of offsets of 32 bits, if an array exceeds it."""
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
    # The module has no such function while it is being imported.
    has_cache = getattr(sys.modules.get("kvjax.kernels_pallas.simt"), "has_cache", None)
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
    """Returns the kind of GPU that this process has, such as "NVIDIA H200"; None without one,
    or with several kinds.
    """
    from kvjax.kernels_pallas.tuned import device_kind

    return device_kind()
