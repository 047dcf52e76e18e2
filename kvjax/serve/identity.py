"""The identity of a model: a digest of its weights, its settings and its code.

Keys and values that another model wrote give wrong answers without a sign of it. So kept rows on
disk name their model by a digest of

- all arrays that are leaves;
- the structure of its pytree, which has the settings of an nnx module, and its `config`;
- the code of a function and what it closes over, since any callable is a model.

A function may hold what has no digest, such as an object that only its address tells from another.
It is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import math
import re
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax.generation.callables import Called
from kvjax.memory import move_to, on_host
from kvjax.validation import short_repr

ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def digest_of(model: Any) -> str:
    """Returns a digest of a model.

    Raises:
      ValueError: a function that holds what cannot be told from others.
    """
    digest = hashlib.sha256()
    for part in _parts(model):
        digest.update(part)
    return digest.hexdigest()


def _parts(model: Any) -> Iterator[bytes]:
    """Yields everything that the digest of a model is made of."""
    config = getattr(model, "config", None)
    if dataclasses.is_dataclass(config):
        yield repr(config).encode()
    if isinstance(model, Called):
        yield from _of_code((model.function, model.args, model.settings, model.given), set())
        return
    yield _without_addresses(str(jax.tree.structure(model)))
    for leaf in jax.tree.leaves(model):
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            yield from _of_array(leaf)


def _of_array(array: Any) -> Iterator[bytes]:
    yield f"{array.dtype}{list(array.shape)}".encode()
    if not jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        whole = move_to(array, host=False) if isinstance(array, Array) else array
        yield on_host(_checksum(whole)).tobytes()


def _of_code(value: Any, seen: set[int]) -> Iterator[bytes]:
    """Yields everything that tells a part of a program from another, without functions that are
    in `seen`.
    """
    value = inspect.unwrap(value) if callable(value) else value
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        yield from _of_array(value)
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value, seen)
    elif isinstance(value, types.CodeType):
        yield value.co_code + " ".join(value.co_names).encode()
        yield from _of_code(value.co_consts, seen)
    elif isinstance(value, types.MethodType):
        yield from _of_code((value.__func__, value.__self__), seen)
    elif isinstance(value, functools.partial):
        yield from _of_code((value.func, value.args, value.keywords), seen)
    elif isinstance(value, dict):
        yield from _of_code([*map(str, value), *value.values()], seen)
    elif isinstance(value, tuple | list):
        yield f"{len(value)} of".encode()
        for one in value:
            yield from _of_code(one, seen)
    elif not jax.tree_util.all_leaves([value]):
        yield from _parts(value)
    else:
        text = _without_addresses(repr(value))
        if text != repr(value).encode():
            raise ValueError(
                f"prefixes of this model cannot be told from those of another: its function holds {short_repr(value)}; "
                "give its weights and settings as arguments of functools.partial"
            )
        yield text


def _of_function(function: types.FunctionType, seen: set[int]) -> Iterator[bytes]:
    """The code of a function, its defaults, and what it closes over."""
    yield f"{function.__module__}.{function.__qualname__}".encode()
    if id(function) in seen:
        return
    seen.add(id(function))
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    yield from _of_code(
        (function.__code__, function.__defaults__, function.__kwdefaults__ or {}, cells), seen
    )


def _without_addresses(text: str) -> bytes:
    return ADDRESS.sub("", text).encode()


@jax.jit
def _checksum(weights: Array) -> Array:
    """A sum u32[2] over the bits of all numbers, each times an odd number of its place: it
    differs wherever one number differs. Weights stay on the device.
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
    odd = place * np.uint32(2) + np.uint32(1)
    return jnp.stack([jnp.sum(bits * odd, dtype=jnp.uint32), jnp.sum(bits, dtype=jnp.uint32)])
