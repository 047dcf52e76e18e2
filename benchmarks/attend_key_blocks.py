"""Device time of attend_key_blocks, of the choice of blocks, and of cuDNN on all keys, for a
chunk of a prompt.

    python benchmarks/attend_key_blocks.py

A chunk of T queries attends to the share of S stored tokens that `choose_blocks` finds.
"choose" is the time of that, "cudnn" that of exact attention to all S tokens, "tflops" the rate
of the kernel, and "floor" the time of its products at 784 TFLOP/s, the rate of a large product
of bf16 matrices on an H200. With share 1 the lists have all blocks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from device_time import device_time
from sweep import Sweep, run

from kvjax import ops
from kvjax.kernels_pallas.attend import attend_key_blocks
from kvjax.kernels_pallas.attend.attend_key_blocks import Config
from kvjax.numerics.partial import Logits
from kvjax.ops.chunk import attend_zone
from kvjax.ops.key_blocks import BLOCK, choose_blocks

FLOPS_PER_US = 784e6
SHAPES = (  # B, K, G, T, S, D, share
    (1, 8, 4, 4096, 131072, 128, 0.1),
    (1, 8, 4, 4096, 131072, 128, 0.05),
    (1, 8, 4, 4096, 131072, 128, 1.0),
    (1, 8, 4, 4096, 32768, 128, 0.1),
    (1, 8, 4, 512, 131072, 128, 0.1),
    (1, 8, 8, 4096, 131072, 64, 0.1),
    (8, 8, 4, 512, 32768, 128, 0.1),
)


def inputs(B: int, K: int, G: int, T: int, S: int, D: int, share: float) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (B, K, G, T, D), "bfloat16")
    k, v = (jax.random.normal(key, (B, K, S, D), "bfloat16") for key in keys[1:])
    stop = jnp.full(B, S, jnp.int32)
    if share < 1:
        return q, k, v, *choose_blocks(q, k, stop, share=share, logits=Logits(D**-0.5)), stop
    rows, every = (B, K, G, T // BLOCK), jnp.arange(S // BLOCK, dtype=jnp.int32)
    return (
        q,
        k,
        v,
        jnp.broadcast_to(every, (*rows, len(every))),
        jnp.full(rows, len(every), jnp.int32),
        stop,
    )


def measure(
    sweep: Sweep, B: int, K: int, G: int, T: int, S: int, D: int, share: float
) -> dict[str, Any]:
    scale = D**-0.5
    args = jax.jit(inputs, static_argnums=range(7))(B, K, G, T, S, D, share)
    q, k, v, blocks, _, stop = args

    def kernel(config: Config | None) -> Any:
        return partial(attend_key_blocks.attend_key_blocks, scale=scale, config=config)

    def error(got: Any, want: Any) -> float:
        off = jnp.linalg.norm(got[0] - want.out) / jnp.linalg.norm(want.out)
        return float(jnp.maximum(off, jnp.max(jnp.abs(got[1] - want.lse))))

    def exact(q: Any, k: Any, v: Any, stop: Any) -> Any:
        return attend_zone(q, k, v, None, stop, logits=Logits(scale))

    # With all blocks the reference is cuDNN.
    reference = partial(ops.attend_key_blocks, logits=Logits(scale), implementation="xla")
    compared = (
        reference if share < 1 else lambda q, k, v, blocks, counts, stop: exact(q, k, v, stop)
    )
    flops = 4.0 * q.size * blocks.shape[-1] * BLOCK
    configs = [None, Config(2), Config(3)]
    moved = 2.0 * BLOCK * D * blocks.size * 2
    row = sweep(
        "attend_key_blocks",
        kernel,
        compared,
        args,
        configs=configs,
        error=error,
        most=1e-2,
        moved=moved,
    )
    row |= {"floor": flops / FLOPS_PER_US, "tflops": flops / row["kernel"] / 1e6}
    row["choose"] = device_time(
        partial(choose_blocks, share=min(share, 0.99), logits=Logits(scale)),
        q,
        k,
        stop,
        calls=5,
    )[0]
    row["cudnn"] = device_time(exact, q, k, v, stop, calls=5)[0]
    return {
        "B": B,
        "K": K,
        "G": G,
        "T": T,
        "S": S,
        "D": D,
        "share": share,
        "blocks": blocks.shape[-1],
        **row,
    }


if __name__ == "__main__":
    run(
        "attend_key_blocks",
        "attend_key_blocks of q [B, K, G, T, D] over a share of S tokens in blocks of 128; config: stages",
        "normal random q, k, v; blocks of choose_blocks",
        measure,
        SHAPES,
        swept=7,
    )
