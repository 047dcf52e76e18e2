"""Rotary position embeddings: angles of a position, and the ways of stretching them to longer
texts.

A kind of RoPE is a frozen object that gives the inverse frequencies of a head (f32[D/2], angle
per position of each pair of channels) and the factor on cosine and sine. Channel i is paired
with channel i + D/2, as in Hugging Face checkpoints (not i with i + 1, as in the papers).

All kinds but `Dynamic` and `LongRope` are constants: plain numpy in f32, in the order of
operations of transformers, so that angles of far positions agree. The frequencies of these two
depend on the length of the text. **They are decided once for each row, from its final length**
(prompt and answer), when the row's first tokens are stored; the cache remembers the length up
to which they are right (`kvjax.Cache.rotated_for`). So a row's keys never mix two rotations,
whatever its chunks and its neighbours are, and a text that outgrows its rotation is refused or
read again.

Angles are products in f32, as in transformers. With theta 5e5 the cosine of the fastest
channels is off by .005 at position 131072, by .04 at a million, and has no correct digit at ten
million.

**Source:** Su et al. 2021 (RoPE); Chen et al. 2023 (Linear); Peng et al. 2023, YaRN (Yarn, and
Dynamic as its appendix B.1); Llama Team 2024 (Llama3); Ding et al. 2024 (LongRope);
transformers `modeling_rope_utils` for every detail that a paper leaves open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.numerics.rope import Default as Default
from kvjax.numerics.rope import Rope, exponents_of, periods_of, plain_frequencies, require_above
from kvjax.numerics.rotate import turn_pairs
from kvjax.spec import MOST
from kvjax.validation import check_flags, finite_number, short_repr


@dataclass(frozen=True, kw_only=True)
class Linear(Rope):
    """Positions divided by `factor`."""

    theta: float = 10000.0
    factor: float

    def __post_init__(self) -> None:
        require_above(self, 1.0, "theta")
        require_above(self, 0.0, "factor")

    def frequencies(self, head_dim: int, length: Array | int = 0) -> np.ndarray:
        return plain_frequencies(self.theta, head_dim) / np.float32(self.factor)


@dataclass(frozen=True, kw_only=True)
class Dynamic(Rope):
    """NTK-aware scaling that grows with the text: theta rises once the text is past `original`
    tokens.

    A text is rotated for its final length throughout, so its logits are those of transformers
    for the whole text read at once. **Differs:** `generate` of transformers computes theta anew
    for each token past `original`, and leaves the keys of earlier tokens as they are; and all
    rows of its batch share the theta of the longest.
    """

    theta: float = 10000.0
    factor: float
    original: int  # tokens up to which the frequencies are the default ones

    def __post_init__(self) -> None:
        require_above(self, 1.0, "theta")
        require_above(self, 0.0, "factor", "original")

    @property
    def by_length(self) -> bool:
        return True

    def frequencies(self, head_dim: int, length: Array | int = 0) -> Array:
        stretch = self.factor * (jnp.asarray(length, jnp.float32) / self.original) - (
            self.factor - 1.0
        )
        longer = self.theta * stretch ** (head_dim / (head_dim - 2))
        # At and below `original` the stretch is 1 up to rounding, or less: take theta itself.
        theta = jnp.where(jnp.asarray(length) > self.original, longer, self.theta)
        exponents = exponents_of(head_dim).reshape((1,) * theta.ndim + (-1,))
        return 1.0 / theta[..., None] ** exponents

    def valid_to(self, length: Array) -> Array:
        return jnp.maximum(length, self.original)


@dataclass(frozen=True, kw_only=True)
class Llama3(Rope):
    """Long wavelengths divided by `factor`, short ones kept, and a ramp between (Llama 3.1)."""

    theta: float = 10000.0
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original: int  # tokens of the pretraining that the wavelengths are compared with

    def __post_init__(self) -> None:
        require_above(self, 1.0, "theta")
        require_above(self, 0.0, "factor", "low_freq_factor", "high_freq_factor", "original")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"Llama3(low_freq_factor={self.low_freq_factor}, high_freq_factor={self.high_freq_factor}): "
                "high_freq_factor must be the larger one"
            )

    def frequencies(self, head_dim: int, length: Array | int = 0) -> np.ndarray:
        plain = plain_frequencies(self.theta, head_dim)
        # Turns of each pair of channels over the pretraining length.
        turns = self.original / (2 * np.pi / plain)
        ramp = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        between = (1 - ramp) * plain / self.factor + ramp * plain
        stretched = np.where(turns < self.low_freq_factor, plain / self.factor, between)
        return np.where(turns > self.high_freq_factor, plain, stretched).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Yarn(Rope):
    """YaRN: channels that turn often keep their frequency, slow ones are divided by `factor`,
    with a ramp between.

    The ramp runs over channel indices, from the channel that turns `beta_fast` times in
    `original` tokens to the one that turns `beta_slow` times; `truncate` rounds both to whole
    channels, outwards.
    """

    theta: float = 10000.0
    factor: float
    original: int  # tokens of the pretraining
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: from factor, mscale and mscale_all_dim
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        require_above(self, 1.0, "theta")
        require_above(self, 0.0, "factor", "original", "beta_fast", "beta_slow")
        given = (
            name
            for name in ("attention_factor", "mscale", "mscale_all_dim")
            if getattr(self, name) is not None
        )
        require_above(self, -math.inf, *given)
        check_flags("Yarn", truncate=self.truncate)

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def _magnitude(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    def frequencies(self, head_dim: int, length: Array | int = 0) -> np.ndarray:
        low = self._channel(self.beta_fast, head_dim)
        high = self._channel(self.beta_slow, head_dim)
        if self.truncate:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, head_dim - 1)
        width = high - low if high != low else 0.001
        channels = np.arange(head_dim // 2, dtype=np.float32)
        kept = 1 - np.clip((channels - low) / width, 0, 1)
        periods = periods_of(self.theta, head_dim)
        stretched = 1.0 / (np.float32(self.factor) * periods)
        return (stretched * (1 - kept) + (1.0 / periods) * kept).astype(np.float32)

    def _channel(self, turns: float, head_dim: int) -> float:
        """The channel pair, as a real number, that turns `turns` times in `original` tokens."""
        return (
            head_dim
            * math.log(self.original / (turns * 2 * math.pi))
            / (2 * math.log(self.theta))
        )


@dataclass(frozen=True, kw_only=True)
class LongRope(Rope):
    """Each pair of channels has its own factor on its period: one for short texts, another past
    `original` tokens.

    A text that is longer in the end has the long factors from its first token on, so its logits
    are those of transformers for the whole text. **Differs:** `generate` of transformers begins
    such a text with the short factors, and reads it again with the long ones when it crosses
    `original`; and all rows of its batch share the factors of the longest.

    **Source:** Ding et al. 2024 (LongRoPE), as Phi-3 uses it.
    """

    theta: float = 10000.0
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original: int  # tokens of the pretraining
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        require_above(self, 1.0, "theta")
        require_above(self, 0.0, "original", "attention_factor")
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            where = f"LongRope({name}=...)"
            good = (
                isinstance(factors, tuple)
                and factors
                and all(finite_number(where, x) > 0 for x in factors)
            )
            if not good:
                raise ValueError(
                    f"{where} must be finite numbers above 0 in a tuple, got {short_repr(factors)}"
                )

    @property
    def amplitude(self) -> float:
        return self.attention_factor

    @property
    def by_length(self) -> bool:
        return True

    def frequencies(self, head_dim: int, length: Array | int = 0) -> Any:
        short, long = (
            self._frequencies(head_dim, factors)
            for factors in (self.short_factor, self.long_factor)
        )
        past = jnp.asarray(length)[..., None] > self.original
        shape = (*past.shape[:-1], len(short))
        return jnp.where(past, jnp.broadcast_to(long, shape), jnp.broadcast_to(short, shape))

    def valid_to(self, length: Array) -> Array:
        return jnp.where(length > self.original, MOST, self.original)

    def _frequencies(self, head_dim: int, factors: tuple[float, ...]) -> np.ndarray:
        if len(factors) != head_dim // 2:
            raise ValueError(
                f"LongRope has {len(factors)} factors for a head of {head_dim} channels; it needs {head_dim // 2}"
            )
        return np.float32(1.0) / (
            np.array(factors, np.float32) * periods_of(self.theta, head_dim)
        )


def longrope_attention(factor: float, original: int) -> float:
    """LongRoPE's factor on cosine and sine for a text `factor` times as long as `original`."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def angles(
    rope: Rope, positions: Array, head_dim: int, length: Array | int = 0
) -> tuple[Array, Array]:
    """Cosine and sine f32[B, T, D/2] for positions i32[B, T], times the amplitude; `length`
    i32[B] as `frequencies`.
    """
    frequencies = jnp.asarray(rope.frequencies(head_dim, length)).reshape(-1, 1, head_dim // 2)
    angle = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angle) * rope.amplitude, jnp.sin(angle) * rope.amplitude


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """x [B, T, H, D] with channels (i, i + R/2) of each head turned by the angles of its
    position; computes in f32.

    cos and sin [B, T, R/2] may be of the first R channels only; the others stay as they are.
    """
    size = 2 * cos.shape[-1]
    turned = turn_pairs(
        x[..., :size].astype(jnp.float32), cos[:, :, None], sin[:, :, None]
    ).astype(x.dtype)
    return turned if size == x.shape[-1] else jnp.concatenate([turned, x[..., size:]], axis=-1)
