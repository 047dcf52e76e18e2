"""Short causal convolutions: each channel mixes a few adjacent tokens.

A decode step needs the last inputs of a row, so a layer keeps these; the newest stay beside them,
so that drafts can be taken back.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax.numerics.convolution import causal_conv, put_slots, take_slots
from kvjax.policies.recurrent import Recurrent
from kvjax.spec import keep_ints


@dataclass(frozen=True, kw_only=True)
class ShortConv(Recurrent):
    """The policy of layers that are a short causal convolution, as in LFM2.

    Its inputs are [B, T, C], its weights the kernel [W, C] and a bias [C] or None. The memory is
    dtype[B, W-1+P, C]: the last W - 1 inputs, then the newest beside them.
    """

    channels: int  # C
    kernel: int = 3  # W, tokens that the convolution sees

    def __post_init__(self) -> None:
        keep_ints(self, channels=1, kernel=1)

    def empty(self, batch: int, dtype: np.dtype) -> Array:
        return jnp.zeros((batch, self.kernel - 1 + self.newest, self.channels), dtype)

    def read(
        self, memory: Array, inputs: Array, weights: tuple[Array, Array | None], count: Array
    ) -> tuple[Array, Array]:
        before = memory[:, : self.kernel - 1]
        joined = jnp.concatenate([before, inputs.astype(memory.dtype)], axis=1)
        kept = take_slots(joined, count, self.kernel - 1)
        out = causal_conv(joined, *weights, like=inputs)
        return out, lax.dynamic_update_slice_in_dim(memory, kept, 0, axis=1)

    def step(
        self,
        memory: Array,
        inputs: Array,
        weights: tuple[Array, Array | None],
        held: Array,
        count: Array,
    ) -> tuple[Array, Array]:
        joined = put_slots(memory, inputs, self.kernel - 1 + held, count)
        window = take_slots(joined, held, inputs.shape[1] + self.kernel - 1)
        return causal_conv(window, *weights, like=inputs), joined

    def fold(self, memory: Array, count: Array) -> Array:
        kept = take_slots(memory, count, self.kernel - 1)
        return lax.dynamic_update_slice_in_dim(memory, kept, 0, axis=1)
