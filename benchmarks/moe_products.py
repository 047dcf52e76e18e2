"""The products of a mixture's chosen experts, by ours and by kept libraries: `moe_steps.py
--product row,ragged_dot,tokamax`.

A call runs the experts of several layers, gate, up and down, for the same few tokens. Each way
gets the kernels in the layout that it reads best, made before it is timed, and its output must be
that of `row`. `floor_us` is the time to read the kernels of the chosen experts once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from device_time import bytes_per_us
from flax import nnx
from jax import Array, lax
from layers import clock

from kvjax.models import DecoderConfig
from kvjax.models.decoder import MixtureOfExperts, _by_row

LAYERS = 3
NAMES = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")


@dataclass(frozen=True)
class Product:
    """Rows x [m, in] times the kernel of each one's expert, `which` i32[m], in order."""

    of: Callable[[Array, Array, Array], Array]
    transposed: bool  # takes kernels [E, in, out], which the models keep as [E, out, in]


def by_expert(x: Array, kernel: Array, which: Array) -> Array:
    """A product of jax for each row."""
    rows = [
        lax.dynamic_index_in_dim(kernel, which[i], keepdims=False) @ x[i] for i in range(len(x))
    ]
    return jnp.stack(rows)


def by_batch(x: Array, kernel: Array, which: Array) -> Array:
    """One batched product of jax over gathered kernels."""
    found = jnp.einsum("mi,moi->mo", x, kernel[which], preferred_element_type=jnp.float32)
    return found.astype(x.dtype)


def sizes_of(which: Array, kernel: Array) -> Array:
    return jnp.bincount(which, length=len(kernel)).astype(jnp.int32)


def by_ragged_dot(x: Array, kernel: Array, which: Array) -> Array:
    return lax.ragged_dot(x, kernel, sizes_of(which, kernel))


def by_pallas(x: Array, kernel: Array, which: Array) -> Array:
    """jax's example kernel for Hopper."""
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    out: Array = ragged_dot_mgpu.ragged_dot(
        x,
        kernel,
        group_sizes=sizes_of(which, kernel),
        block_m=64,
        block_n=next(size for size in (128, 192, 64) if kernel.shape[2] % size == 0),
        block_k=64,
        max_concurrent_steps=6,
        grid_block_n=1,
    )
    return out


def by_tokamax(x: Array, kernel: Array, which: Array, *, implementation: Any) -> Array:
    import tokamax

    out: Array = tokamax.ragged_dot(
        x, kernel, sizes_of(which, kernel), implementation=implementation
    )
    return out


PRODUCTS = {
    "row": Product(_by_row, transposed=False),
    "expert": Product(by_expert, transposed=False),
    "batch": Product(by_batch, transposed=False),
    "ragged_dot": Product(by_ragged_dot, transposed=True),
    "pallas": Product(by_pallas, transposed=True),
    "tokamax": Product(partial(by_tokamax, implementation=None), transposed=True),
    "tokamax:mosaic": Product(partial(by_tokamax, implementation="mosaic"), transposed=True),
    "tokamax:triton": Product(partial(by_tokamax, implementation="triton"), transposed=True),
}
Weighted = dict[str, Array]


def measure(
    shape: str, config: DecoderConfig, name: str, batch: int, calls: int
) -> dict[str, Any]:
    """Times one way; ends with ValueError if its output is another than that of `row`."""
    by = config.experts
    assert by is not None
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    mixtures = [
        MixtureOfExperts(config, rngs=nnx.Rngs(i), dtype=jnp.dtype(dtype))
        for i in range(LAYERS)
    ]
    mixture = mixtures[0]
    stored = [weights_of(each) for each in mixtures]
    keys = jax.random.split(jax.random.key(0), batch + 1)
    own = [jax.random.permutation(key, by.count)[: by.per_token] for key in keys[1:]]
    which = jnp.sort(jnp.concatenate(own)).astype(jnp.int32)
    x = jax.random.normal(keys[0], (len(which), config.hidden_size), dtype)

    def through(product: Product, layers: list[Weighted], x: Array) -> list[Array]:
        outs = []
        for weighted in layers:
            y = mixture._mix(weighted, x, which, product.of)
            x, y = lax.optimization_barrier((x, y))  # the next layer waits
            outs.append(y)
        return outs

    read = len(set(which.tolist())) * sum(
        part[0].nbytes for name, part in stored[0].items() if not name.endswith("_bias")
    )
    floor = read / bytes_per_us()
    product = PRODUCTS[name]
    laid = [transposed(each) for each in stored] if product.transposed else stored
    want = jax.jit(partial(through, PRODUCTS["row"]))(stored, x)

    def run(layers: list[Weighted], x: Array) -> tuple[list[Array], list[Weighted]]:
        return through(product, layers, x), layers

    took, got = clock(jax.jit(run, donate_argnums=0), laid, x, calls=calls)
    error = max(distance(one, other) for one, other in zip(got, want, strict=True))
    if not error < 2e-2:
        raise ValueError(f"the output is {error:.2g} from that of row")
    return {
        "shape": shape,
        "product": name,
        "batch": batch,
        "us": took.us / LAYERS,
        "floor_us": floor,
        "times_floor": took.us / LAYERS / floor,
        "kernels": None if took.kernels is None else took.kernels / LAYERS,
        "error": error,
        "parts": {
            part[:80]: round(us / LAYERS, 2) for part, us in list(took.parts.items())[:8]
        },
    }


def distance(got: Array, want: Array) -> float:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def weights_of(mixture: MixtureOfExperts) -> Weighted:
    parts = {name: getattr(mixture, name) for name in NAMES}
    return {name: part[...] for name, part in parts.items() if part is not None}


@jax.jit
def transposed(weighted: Weighted) -> Weighted:
    return {
        name: a if name.endswith("_bias") else jnp.swapaxes(a, 1, 2)
        for name, a in weighted.items()
    }
