"""Inputs that the tests of several kernels share, of numpy: each operation of jax on an array
is a program.
"""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.numerics.quant import quantize_1bit
from kvjax.numerics.rotate import SUBSPACE, lloyd_max
from kvjax.numerics.selection import Selection


@lru_cache(maxsize=4)  # the sizes for a GPU take seconds
def normal(seed, *shape, dtype=jnp.float32):
    x = np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)
    x.flags.writeable = False  # it is kept for others
    return x


def changed(x, *places):
    """x with a value at each of some places, (index, value)."""
    x = np.array(x)
    for index, value in places:
        x[index] = value
    return x


def relative(got, want):
    got, want = (np.asarray(a, np.float64) for a in (got, want))
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


CENTRES = tuple(lloyd_max(SUBSPACE)[1].tolist())


def index(B, K, S, D, group, dtype, seed=0):
    k = normal(seed, B, K, S, D) * (1 + np.arange(D) % 5).astype(np.float32)[None, None, None]
    return jax.tree.map(np.asarray, _quantize(k, group=group, dtype=jnp.dtype(dtype)))


_quantize = jax.jit(quantize_1bit, static_argnames=("group", "dtype"))


def boxes(B, K, P, D, dtype):
    corners = np.sort([normal(seed, B, K, P, D) for seed in (0, 1)], axis=0)
    return tuple(corners.astype(dtype))


def spans_of(B, *spans):
    return tuple(np.resize(ends, B).astype(np.int32) for ends in zip(*spans, strict=True))


BIG = [(0, 131040), (0, 0), (5, 131000), (64, 65)]


def of_pages(pages, valid, page):
    """The selection of all tokens of pages [B, K, H, M] of `page` tokens."""
    slots = np.asarray(pages)[..., None] * page + np.arange(page, dtype=np.int32)
    slots = slots.reshape(*slots.shape[:3], -1).astype(np.int32)
    return Selection(slots, np.repeat(np.asarray(valid), page, axis=3))
