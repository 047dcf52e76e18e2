"""Compiles equal programs once in a process, and lowers several in one context.

Functions that a test makes for itself, and policies of classes that differ in nothing that a
program sees, are traced to equal programs: a fifth of those that the suite compiles. jax's own
persistent cache finds them too, but reads them from files, which takes half of what it saves,
and a program from there need not tell its temp bytes, which laws count.

jax 0.10 makes a context of MLIR for each program that it lowers, and registers the operations
of all dialects in it: 6 ms, two thirds of the time that a small program takes to lower. jax
0.11 lowers several programs of a thread in one context, which here the older one does too.
"""

import functools
import hashlib
import inspect
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax
from jax._src import compiler
from jax._src.interpreters import mlir

# A process may have some 65 000 maps of memory. XLA's CPU backend makes some 25 for a program.
MOST = 800
_kept: OrderedDict[Any, Any] = OrderedDict()  # the program that was used last is at the end
# Programs in one context, which keeps their types and constants; as many as jax 0.11 has.
LOWERED = 10
# What jax writes of an array that was put on a device, as an engine's are, and of no other. To a
# program of one device it says nothing.
_PUT = r"sdy\.sharding = #sdy\.sharding<@empty_mesh, \[[{}, ]*\]>"
_ON_ONE_DEVICE = re.compile(rf"  sdy\.mesh @empty_mesh = .*\n| \{{{_PUT}\}}|{_PUT}, |, {_PUT}")
_KNOWN = ["backend", "computation", "devices", "compile_options", "host_callbacks"]


def install() -> bool:
    """Has `jit` take an equal program that was compiled before.

    Returns False, and changes nothing, if jax compiles by another function than we know.
    """
    compile_anew = getattr(compiler, "compile_or_get_cached", None)
    if compile_anew is None or list(inspect.signature(compile_anew).parameters)[:5] != _KNOWN:
        return False
    compiler.compile_or_get_cached = _once(compile_anew)
    return True


def _once(compile_anew: Callable[..., Any]) -> Callable[..., Any]:
    def compile_or_get_kept(
        backend: Any,
        computation: Any,
        devices: Any,
        compile_options: Any,
        host_callbacks: Any,
        *more: Any,
        **named: Any,
    ) -> Any:
        def compiled() -> Any:
            return compile_anew(
                backend,
                computation,
                devices,
                compile_options,
                host_callbacks,
                *more,
                **named,
            )

        # A program holds its callbacks, which its text does not show. A test that has a
        # compilation cache is about that one. GPUs and TPUs are compiled for, but not here.
        cached = jax.config.jax_compilation_cache_dir is not None
        if host_callbacks or cached or backend.platform != "cpu":
            return compiled()
        text = computation.operation.get_asm(enable_debug_info=False)
        if compile_options.num_partitions == 1:
            text = _ON_ONE_DEVICE.sub("", text)
        digest = hashlib.sha256(text.encode()).digest()
        key = (backend, digest, _serialized(compile_options))
        if key not in _kept:
            _kept[key] = compiled()
            if len(_kept) > MOST:
                _kept.popitem(last=False)
        _kept.move_to_end(key)
        return _kept[key]

    return compile_or_get_kept


def _serialized(options: Any) -> bytes:
    """The options of a program, of one device without those that say where arguments were put."""
    build = options.executable_build_options
    put = build.allow_spmd_sharding_propagation_to_parameters
    if options.num_partitions == 1:
        build.allow_spmd_sharding_propagation_to_parameters = [True] * len(put)
    found: bytes = options.SerializeAsString()
    build.allow_spmd_sharding_propagation_to_parameters = put
    return found


def reuse_contexts() -> bool:
    """Has a thread lower `LOWERED` programs in a context before it makes another.

    Returns False, and changes nothing, if jax does so itself.
    """
    if jax.__version_info__ >= (0, 11):
        return False
    mlir.make_ir_context = _several_times(mlir.make_ir_context)
    return True


def _several_times(make: Callable[[], Any]) -> Callable[[], Any]:
    own = threading.local()  # lowering adds to a context, so threads must not share one

    @functools.wraps(make)
    def make_or_take() -> Any:
        left = getattr(own, "left", 0)
        if not left:
            own.context = make()
            left = LOWERED
        own.left = left - 1
        return own.context

    return make_or_take
