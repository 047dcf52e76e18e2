"""The identity of a model: a digest of its weights, its settings and its code.

Keys and values that another model wrote give wrong answers without a sign of it. So kept rows on
disk name their model by a digest. Any callable is a model, so it is made of whatever the calls
of a model can reach:

- arrays, and the structure of pytrees with their static parts, such as the settings of an nnx
  module;
- the code of functions and of classes, what functions close over, and the global variables that
  they read;
- the fields of dataclasses, and the attributes of other objects.

Code of Python itself and of installed packages is told by its name; what its functions close over
counts all the same. A model may hold what has no digest, such as an object that only its address
tells from another. It is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import re
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax.generation.callables import Called, Code
from kvjax.memory import move_to, on_host
from kvjax.validation import short_repr

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# Told by their names wherever they are installed: what models are written with.
LIBRARIES = {"kvjax", "jax", "jaxlib", "numpy", "scipy", "ml_dtypes", "flax", "optax", "einops"}


def digest_of(model: Any) -> str:
    """Returns a digest of a model.

    Raises:
      ValueError: a model that holds what cannot be told from others.
    """
    digest = hashlib.sha256()
    # Texts of arrays inside of other objects have all numbers, in full.
    with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
        for part in _Walk().of(model):
            digest.update(len(part).to_bytes(8, "little"))  # (1, 23) is not (12, 3)
            digest.update(part)
    return digest.hexdigest()


class _Walk:
    """Yields everything that tells a model from another, each object once."""

    def __init__(self) -> None:
        # By address: when an object was met first, and the object, so that no other gets its
        # address meanwhile.
        self._met = dict[int, tuple[int, Any]]()

    def of(self, value: Any) -> Iterator[bytes]:
        match value:
            case None | bool() | int() | float() | complex() | str() | bytes():
                yield repr(value).encode()
            case dict():
                yield from self._of_many("dict", (*value, *value.values()))
            case tuple() | list():
                yield from self._of_many("list", value)
            case set() | frozenset():  # whose order differs from run to run
                members = [b"".join(_Walk().of(one)) for one in value]
                yield from self._of_many("set", sorted(members))
            case types.CodeType():
                code = (value.co_code, value.co_names, value.co_consts)
                yield from self._of_many("code", code)
            case functools.partial():
                parts = (value.func, value.args, value.keywords)
                yield from self._of_many("partial", parts)
            case types.MethodType():
                yield from self._of_many("method", (value.__func__, value.__self__))
            case property():
                yield from self._of_many("property", (value.fget,))
            case Code():
                yield from self.of(value.value)
            case Array() | np.ndarray() | np.generic():
                yield from self._of_array(value)
            case _:
                yield from self._of_object(value)

    def _of_many(self, kind: str, parts: Iterable[Any]) -> Iterator[bytes]:
        parts = list(parts)
        yield f"{kind} of {len(parts)}".encode()
        for part in parts:
            yield from self.of(part)

    def _of_array(self, array: Any) -> Iterator[bytes]:
        yield f"{array.dtype}{list(array.shape)}".encode()
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        if array.dtype.kind in "OSUMm":  # of NumPy alone: texts, times, objects
            yield from self.of(array.tolist())
            return
        if array.dtype.kind == "c":
            array = jnp.stack([jnp.real(array), jnp.imag(array)])
        whole = move_to(array, host=False) if isinstance(array, Array) else array
        yield on_host(_checksum(whole)).tobytes()

    def _of_object(self, value: Any) -> Iterator[bytes]:
        """An object that may hold itself, so that it is told once."""
        if id(value) in self._met:
            first, _ = self._met[id(value)]
            yield f"number {first}".encode()
            return
        self._met[id(value)] = len(self._met), value
        if isinstance(value, types.FunctionType):
            yield from self._of_function(value)
        elif isinstance(value, types.ModuleType):
            yield f"module {value.__name__}".encode()
        elif isinstance(value, type):
            yield from self._of_type(value)
        elif isinstance(value, Called):
            parts = (value.function, value.args, value.settings, value.given)
            yield from self._of_many("called", parts)
        elif not jax.tree_util.all_leaves([value]):
            yield from self._of_many("pytree", (getattr(value, "config", None),))
            leaves, tree = jax.tree.flatten(value)
            yield from self._of_tree(tree)
            yield from self._of_many("leaves", leaves)
        elif dataclasses.is_dataclass(value):
            fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
            yield from self._of_many("dataclass", (type(value), *fields))
        elif _is_installed(type(value).__module__) and hasattr(value, "__wrapped__"):
            yield from self.of(value.__wrapped__)  # what `jax.jit` was given
        elif _says_all(value):
            yield f"{type(value).__qualname__} {value!r}".encode()
        elif hasattr(value, "__dict__"):
            yield from self._of_many("object", (type(value), vars(value)))
        else:
            raise ValueError(
                f"prefixes of this model cannot be told from those of another: it holds {short_repr(value)}; leave "
                "that out of the model, and give weights and settings as arguments of functools.partial"
            )

    def _of_tree(self, tree: Any) -> Iterator[bytes]:
        """The types and the static parts of a pytree, without its leaves."""
        node = tree.node_data()
        yield from self._of_many("node", () if node is None else node)
        children = tree.children()
        yield f"{len(children)} children".encode()
        for child in children:
            yield from self._of_tree(child)

    def _of_function(self, function: types.FunctionType) -> Iterator[bytes]:
        """A function: what it closes over and its defaults. If it is not installed, also its code
        and the global variables that it reads.
        """
        module = function.__globals__.get("__name__", "")
        yield f"function {module}.{function.__qualname__}".encode()
        held = map(_content_of, function.__closure__ or ())
        defaults = (function.__defaults__, function.__kwdefaults__)
        yield from self._of_many("holds", [*defaults, *held])
        if not _is_installed(module):
            yield from self.of(function.__code__)
            yield from self.of(dict(_globals_of(function)))

    def _of_type(self, kind: type) -> Iterator[bytes]:
        """A class: its name. If it is not installed, also its bases, its methods and the other
        attributes that it was given.
        """
        yield f"class {kind.__module__}.{kind.__qualname__}".encode()
        if _is_installed(kind.__module__):
            return
        yield from self._of_many("bases", kind.__bases__)
        for name, part in sorted(vars(kind).items()):
            made_by_python = name.startswith("__") and not isinstance(part, types.FunctionType)
            if not made_by_python and name != "_abc_impl":
                yield name.encode()
                yield from self.of(part)


def _globals_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The global variables that a function may read, by name. A module that is not installed
    comes with those of its variables that the function may read.
    """
    names = sorted(_names_in(function.__code__))
    for name in names:
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        yield name, value
        if isinstance(value, types.ModuleType) and not _is_installed(value.__name__):
            for part in names:
                if part in vars(value):
                    yield f"{name}.{part}", vars(value)[part]


def _names_in(code: types.CodeType) -> set[str]:
    """The names that code reads, and the functions inside of it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return "an empty cell"


@functools.cache
def _is_installed(module: str) -> bool:
    """True for a module of Python or of an installed package."""
    package = module.partition(".")[0]
    if package in LIBRARIES or package in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _says_all(value: Any) -> bool:
    """True if the text of an object tells it from others: one of a class that is installed, in
    whose text is no address.
    """
    return _is_installed(type(value).__module__) and not ADDRESS.search(repr(value))


@jax.jit
def _checksum(weights: Array) -> Array:
    """Two sums u32[2] over all numbers, each mixed with its place: they differ wherever one
    number differs, and hardly agree where several do. Weights stay on the device.
    """
    if jnp.issubdtype(weights.dtype, jnp.floating) and weights.dtype.itemsize < 8:
        weights = weights.astype(jnp.float32)  # which keeps the value of any smaller type
    elif weights.dtype.itemsize < 4:
        weights = weights.astype(jnp.int32)
    bits = lax.bitcast_convert_type(weights, jnp.uint32)  # 64 bits are two numbers
    place = jnp.zeros(bits.shape, jnp.uint32)
    for axis in range(bits.ndim):
        stride = np.uint32(math.prod(bits.shape[axis + 1 :]) % 2**32)
        place += lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * stride
    placed = _mixed(_mixed(bits) + place)
    again = _mixed(~placed)
    return jnp.stack([jnp.sum(placed, dtype=jnp.uint32), jnp.sum(again, dtype=jnp.uint32)])


def _mixed(x: Array) -> Array:
    """Another number for each u32, in which each bit depends on all of `x`: the last steps of
    MurmurHash3 (Appleby 2011).
    """
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))
