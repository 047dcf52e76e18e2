"""The sizes of a cache.

Each size has one letter everywhere: B rows, T new tokens, N query heads, K kv heads, G = N/K, D
head size, S slots, M selected tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvjax.validation import MOST, check_flags, check_verbs, finite_number, short_repr

CACHE_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class RecurrentLayers:
    """The layers of a model that keep a state of fixed size. Static and hashable.

    Raises:
      ValueError: a policy that is not `Recurrent`, or layers that are no tuple of numbers in
        order.
    """

    policy: Any  # a kvjax.policies.Recurrent
    layers: tuple[int, ...]  # numbers among all layers of the model, in order

    def __post_init__(self) -> None:
        check_verbs(
            "RecurrentLayers(policy=...)",
            self.policy,
            "a kvjax.policies.Recurrent",
            ("empty", "read", "step", "fold"),
            "kvjax.models.GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=8)",
        )
        numbers = self.layers if isinstance(self.layers, tuple) else ()
        integers = all(isinstance(i, int) and i >= 0 for i in numbers)
        if not numbers or not integers or list(numbers) != sorted(set(numbers)):
            raise ValueError(
                "RecurrentLayers(layers=...) must be numbers of layers in a tuple, in order, got "
                f"{short_repr(self.layers)}"
            )


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """The sizes of one layer's cache. Static: every array size depends on it.

    >>> CacheSpec(batch=2, q_heads=8, kv_heads=2, head_dim=64, capacity=4096).group
    4
    """

    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    capacity: int  # tokens that every row can hold, all zones together; rounding to whole chunks may add room
    dtype: DTypeLike = jnp.bfloat16  # of stored keys and values
    # head size of values; None: head_dim. Others, as of MLA, are for `Dense` stores
    value_dim: int | None = None
    rope_by_length: bool = False  # the rotation of a row's keys depends on its final length: see `Cache.rotated_for`
    # layers of the model that keep a state of fixed size; None: all have a cache
    recurrent: RecurrentLayers | None = None

    def __post_init__(self) -> None:
        keep_ints(self, batch=1, q_heads=1, kv_heads=1, head_dim=1, capacity=1, value_dim=1)
        if self.value_dim == self.head_dim:
            object.__setattr__(self, "value_dim", None)
        if self.q_heads % self.kv_heads:
            raise ValueError(
                f"CacheSpec(q_heads={self.q_heads}, kv_heads={self.kv_heads}): kv_heads must divide q_heads, "
                "because each group of query heads shares one kv head"
            )
        object.__setattr__(self, "dtype", cache_dtype(self.dtype))
        check_flags("CacheSpec", rope_by_length=self.rope_by_length)
        if self.recurrent is not None:
            check_verbs(
                "CacheSpec(recurrent=...)",
                self.recurrent,
                "a kvjax.policies.RecurrentLayers, or None",
                (),
                "kvjax.policies.RecurrentLayers(policy, (0, 1, 2))",
                fields=("policy", "layers"),
            )

    @property
    def value_size(self) -> int:
        """The head size of values."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def key_value_bytes(self) -> int:
        """Bytes of a token's keys and values in `dtype`, over all kv heads of a layer."""
        channels = self.kv_heads * (self.head_dim + self.value_size)
        return channels * jnp.dtype(self.dtype).itemsize

    @property
    def group(self) -> int:
        """G, the query heads that share a kv head."""
        return self.q_heads // self.kv_heads


def cache_dtype(dtype: DTypeLike) -> np.dtype:
    """The dtype of stored keys and values. Raises ValueError for one that a cache cannot hold."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in CACHE_DTYPES:
        alias = found is None or (isinstance(dtype, str) and dtype != found.name)
        raise ValueError(
            f"a cache cannot hold dtype {short_repr(dtype) if alias else found}; use one of {', '.join(CACHE_DTYPES)}"
        )
    return found


def default_dtype() -> str:
    """The dtype of a model and its caches where none is given, by the platform."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def require_int(what: str, value: Any, *, at_least: int, at_most: int = MOST) -> int:
    """`value` as an int, or an error that says what it must be."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{what} must be an integer, got {short_repr(value)}")
    if value < at_least:
        raise ValueError(f"{what} must be at least {at_least}, got {short_repr(value)}")
    if value > at_most:
        raise ValueError(f"{what} must be at most {at_most}, got {short_repr(value)}")
    return int(value)


def require_ints(
    what: str, values: Any, *, at_least: int, at_most: int = MOST
) -> tuple[int, ...]:
    """`values` as a tuple of ints, or an error that says what they must be."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        raise ValueError(f"{what} must be a list of integers, got {short_repr(values)}")
    return tuple(
        require_int(what, value, at_least=at_least, at_most=at_most) for value in values
    )


def one_or_several(what: str, value: Any, *, at_least: int = 1) -> tuple[int, ...] | None:
    """One integer, or each of several, as a tuple; None stays None.

    >>> one_or_several("budget", 64), one_or_several("budget", [64, 256])
    ((64,), (64, 256))
    """
    if value is None:
        return None
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        return require_ints(what, value, at_least=at_least)
    return (require_int(what, value, at_least=at_least),)


CAPACITY_STEP = 128
# Capacities of a cache of so few tokens in all rows that its size matters less than compiling.
SMALL_CAPACITIES = (
    1152,
    4608,
)


def padded_capacity(tokens: int) -> int:
    """A capacity for `tokens` in whole blocks, for a measurement of that length.

    >>> padded_capacity(100), padded_capacity(129)
    (128, 256)
    """
    return -(-tokens // CAPACITY_STEP) * CAPACITY_STEP


def round_capacity(tokens: int, *, rows: int = 1, positions: int | None = None) -> int:
    """The next capacity of a ladder for `tokens` per row, so that texts of many lengths share
    compiled programs.

    The ladder has two sizes for each factor of two, 9/8 and 13/8 of a power of two, so that a
    prompt of 32768 tokens has room for an answer: 36864, 53248, 73728, and so on. A cache of
    few tokens has only the sizes 1152 and, for one row, 4608. No capacity exceeds the
    `positions` of the model, unless `tokens` do.

    >>> [round_capacity(n) for n in (5, 1153, 5000, 32768 + 128)]
    [1152, 4608, 6656, 36864]
    >>> round_capacity(5, rows=8), round_capacity(30000, positions=32768)
    (288, 32768)
    """
    few = [
        size
        for size in SMALL_CAPACITIES
        if tokens <= size and rows * size <= SMALL_CAPACITIES[-1]
    ]
    power = 1 << max(8, (tokens - 1).bit_length() - 1)
    size = (
        few[0]
        if few
        else next(n for n in (power * 9 // 8, power * 13 // 8, power * 9 // 4) if n >= tokens)
    )
    return size if positions is None else min(size, max(tokens, positions))


def keep_ints(config: Any, **at_least: int) -> None:
    """Applies `keep_int` to each field that is named, with its lower bound; None stays where it
    is the default.
    """
    for name, bound in at_least.items():
        if getattr(config, name) is not None or getattr(type(config), name, 0) is not None:
            keep_int(config, name, at_least=bound)


BOUNDS = {
    "at_least": operator.ge,
    "above": operator.gt,
    "at_most": operator.le,
    "below": operator.lt,
}


def keep_number(config: Any, *names: str, what: str = "", **bounds: float) -> None:
    """Stores fields of a frozen dataclass as floats, or raises ValueError for one that is no
    number in these bounds, of `BOUNDS`, and says `what` it is, such as "a share of the slots,
    ". None stays where it is the default."""
    said = " and ".join(f"{name.replace('_', ' ')} {bound:g}" for name, bound in bounds.items())
    for name in names:
        if getattr(config, name) is None and getattr(type(config), name, 0) is None:
            continue
        value = finite_number(f"{type(config).__name__}({name}=...)", getattr(config, name))
        if not all(BOUNDS[kind](value, bound) for kind, bound in bounds.items()):
            raise ValueError(f"{type(config).__name__}({name}={value}) must be {what}{said}")
        object.__setattr__(config, name, value)


def keep_int(config: Any, name: str, *, at_least: int, at_most: int = MOST) -> None:
    """Applies `require_int` to a field of a frozen dataclass and stores it as a Python int: a
    NumPy integer has another repr, and reprs are part of the keys of results."""
    value = require_int(
        f"{type(config).__name__}({name}=...)",
        getattr(config, name),
        at_least=at_least,
        at_most=at_most,
    )
    object.__setattr__(config, name, value)
