"""Device time of attend_quantized by block sizes, and of its reference: run it on a GPU.

At 128K tokens the codes are more than L2 holds, so they come from device memory in each call.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from sweep import Sweep, run

from kvjax import ops
from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.attend import attend_quantized
from kvjax.kernels_pallas.attend.attend_quantized import Config
from kvjax.numerics.partial import Logits
from kvjax.numerics.quant import QuantArray, quantize

SHAPES = (  # B, K, Q, S, D, bits of keys and values, a key group's tokens and channels, a value group's channels
    (1, 8, 4, 3120 * 42, 128, 2, 42, 1, 64),  # LogQuant
    (1, 8, 4, 131072, 128, 2, 32, 1, 32),  # KIVI
    (1, 8, 4, 131072, 128, 2, 1, 64, 64),
    (1, 8, 4, 131072, 128, 4, 32, 1, 32),
    (1, 8, 4, 780 * 42, 128, 2, 42, 1, 64),
    (8, 8, 4, 780 * 42, 128, 2, 42, 1, 64),
    (1, 8, 4, 131072, 64, 2, 32, 1, 32),
)
OTHERS = (
    (1, 3, 3),
    (1, 4, 2),
    (1, 4, 3),
    (2, 3, 2),
    (1, 2, 4),
    (2, 1, 4),
)  # times the default's blocks, as Config


def inputs(
    B: int,
    K: int,
    Q: int,
    S: int,
    D: int,
    bits: int,
    tokens: int,
    channels: int,
    value_channels: int,
) -> tuple[Array, QuantArray, QuantArray, Array, Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (B, K, Q, D), jnp.bfloat16)
    k, v = (jax.random.normal(key, (B, K, S, D), jnp.bfloat16) for key in keys[1:])
    codes = (
        quantize(k, bits, tokens=tokens, channels=channels),
        quantize(v, bits, channels=value_channels),
    )
    return q, *codes, jnp.zeros(B, jnp.int32), jnp.full(B, S, jnp.int32)


def measure(sweep: Sweep, *shape: int) -> dict[str, Any]:
    B, K, Q, S, D, bits, tokens, channels, value_channels = shape
    args = jax.jit(inputs, static_argnums=range(9))(*shape)

    def kernel(config: Config) -> Any:
        return lambda *args: attend_quantized.attend_quantized(
            *args, scale=D**-0.5, config=config
        )

    def reference(*args: Any) -> Any:
        return ops.attend_quantized(*args, logits=Logits(D**-0.5), implementation="xla")

    def error(got: Any, want: Any) -> float:
        off = jnp.linalg.norm(got[0] - want.out) / jnp.linalg.norm(want.out)
        return float(jnp.maximum(off, jnp.max(jnp.abs(got[1] - want.lse))))

    moved = (
        B * K * S * (2 * D * bits / 8 + 4 * D / (tokens * channels) + 4 * D / value_channels)
    )
    layout = attend_quantized.layout_of(D, *args[1:3])
    first = attend_quantized.config_for(B * K, layout)
    configs = [first]
    configs += [Config(times * first.blocks, *sizes) for times, *sizes in OTHERS]
    configs = [x for x in configs if attend_quantized.smem_bytes(layout, x) <= simt.SMEM]
    row = sweep(
        "attend_quantized",
        kernel,
        reference,
        args,
        configs=configs,
        error=error,
        most=2e-2,
        moved=moved,
    )
    sizes = {
        "B": B,
        "K": K,
        "Q": Q,
        "S": S,
        "D": D,
        "bits": bits,
        "key_group": [tokens, channels],
    }
    return {**sizes, "value_group": value_channels, **row}


if __name__ == "__main__":
    run(
        "attend_quantized",
        "attend_quantized of q [B, K, Q, D] over codes of S tokens; config: blocks of a row x warpgroups x stages",
        "normal random q, k and v",
        measure,
        SHAPES,
    )
