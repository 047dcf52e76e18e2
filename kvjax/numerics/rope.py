"""Rotary position embeddings of one frequency for each pair of channels, and what all kinds have.

`kvjax.models.rope` has the kinds that stretch it to longer texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.spec import MOST
from kvjax.validation import finite_number


class Rope(Protocol):
    """The interface of a kind of RoPE, with the answers of most kinds. A kind is a subclass."""

    @property
    def amplitude(self) -> float:
        """Factor on cosine and sine, so its square is a factor on the attention logits."""
        return 1.0

    @property
    def by_length(self) -> bool:
        """True if the frequencies depend on the length of the text."""
        return False

    def frequencies(self, head_dim: int, length: Array | int = 0) -> Any:
        """Radians per position: f32[D/2], or f32[..., D/2] for texts of `length` i32[...]
        tokens in the end.
        """
        ...

    def valid_to(self, length: Array) -> Array:
        """i32[...] the longest text that the frequencies for texts of `length` i32[...] tokens
        are right for.
        """
        return jnp.full_like(length, MOST)


@dataclass(frozen=True, kw_only=True)
class Default(Rope):
    """One frequency for each pair of channels, theta^(-2i/D).

    >>> Default(theta=10000.0).frequencies(4).tolist()
    [1.0, 0.009999999776482582]
    """

    theta: float = 10000.0

    def __post_init__(self) -> None:
        require_above(self, 1.0, "theta")

    def frequencies(self, head_dim: int, length: Array | int = 0) -> np.ndarray:
        return plain_frequencies(self.theta, head_dim)


def exponents_of(head_dim: int) -> np.ndarray:
    """f32[D/2] from 0 to just below 1."""
    return np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)


def periods_of(theta: float, head_dim: int) -> np.ndarray:
    """f32[D/2] positions per radian, rounded once: numpy's own f32 power is off by an ulp at
    times, which is an angle of 1e-3 at position 16K, and torch's is not."""
    return (np.float64(theta) ** exponents_of(head_dim).astype(np.float64)).astype(np.float32)


def plain_frequencies(theta: float, head_dim: int) -> np.ndarray:
    """f32[D/2]: radians per position."""
    return np.float32(1.0) / periods_of(theta, head_dim)


def require_above(rope: Any, limit: float, *names: str) -> None:
    """Raises ValueError for a setting that is not a finite number above `limit`."""
    for name in names:
        value = getattr(rope, name)
        where = f"{type(rope).__name__}({name}=...)"
        if finite_number(where, value) <= limit:
            raise ValueError(f"{where} must be a finite number above {limit}, got {value}")
