"""Device time of most_voted by block sizes, and of its reference: `python
benchmarks/most_voted.py`, on a GPU.

All calls select from the same votes: in a model too, the votes that `collide` has just written
are in the L2 cache.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from sweep import Sweep, run

from kvjax import ops
from kvjax.kernels_pallas.vote import most_voted
from kvjax.kernels_pallas.vote.most_voted import Config, config_for

SHAPES = (  # B, K, G, S, room
    (1, 8, 1, 131072, 13108),
    (1, 8, 4, 131072, 13108),
    (1, 8, 1, 131072, 6554),
    (1, 8, 1, 32768, 6000),
    (1, 8, 1, 1 << 20, 104858),
    (8, 8, 1, 32768, 6000),
)
CONFIGS = [Config(blocks, warpgroups) for blocks in (8, 16) for warpgroups in (2, 4, 8)]


def measure(sweep: Sweep, B: int, K: int, G: int, S: int, room: int) -> dict[str, Any]:
    key = jax.random.key(0)
    votes = jax.random.binomial(key, 96, 0.2, (B, K, G, S)).astype(jnp.uint8)
    length, count = jnp.full((B,), S, jnp.int32), jnp.full((B,), room, jnp.int32)

    def kernel(config: Config) -> Any:
        return lambda *args: most_voted.most_voted(*args, room, config=config)

    def reference(*args: Array) -> Any:
        return ops.most_voted(*args, room, implementation="xla")

    def error(got: Any, want: Any) -> float:
        return float(jnp.mean(got[0] != want.slots) + jnp.mean(got[1] != want.found))

    args = votes, length, count
    moved = B * K * G * (S + 4 * room)
    configs = [config_for(B * K * G), *CONFIGS]
    row = sweep(
        "most_voted",
        kernel,
        reference,
        args,
        configs=configs,
        error=error,
        most=0.0,
        moved=moved,
    )
    return {"B": B, "K": K, "G": G, "S": S, "room": room, **row}


if __name__ == "__main__":
    run(
        "most_voted",
        "most_voted of u8[B, K, G, S] votes, `room` of them taken; error: share of the places that are not the "
        "reference's; config: blocks x warpgroups",
        "votes binomial of 96 at 0.2, all valid",
        measure,
        SHAPES,
    )
