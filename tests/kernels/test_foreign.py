"""A kernel of another package, written from AUTHORING.md alone: squared norms of keys, one
thread for a key.
"""

import sys
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import kvjax
from kvjax import ops
from kvjax.kernels_pallas.simt import (
    global_address,
    instr,
    kernel,
    loop,
    offset,
    offset_rows,
    ptx,
    real,
    special,
    word,
)
from kvjax.ops.op import op
from tests.kernels.conftest import HAS_KERNELS
from tests.kernels.inputs import normal

MEASURED = "2026-11-27"
CHUNK = 16  # bytes
THREADS = 128


def unsupported(k):
    if k.dtype != jnp.float32 or k.shape[3] % 4:
        return f"the kernel key_squares takes f32 heads of a multiple of {CHUNK} bytes; got {k.dtype}{list(k.shape)}"
    return None


def squares(k):
    B, K, T, D = k.shape
    shape = jax.ShapeDtypeStruct((B, K, T), jnp.float32)
    program = partial(_program, tokens=T, width=4 * D)
    return kernel(
        program,
        name="other_key_squares",
        out_type=(shape,),
        blocks=B * K,
        warpgroups=THREADS // 128,
    )(k)[0]


def _program(keys, out, *, tokens, width):
    row = special("ctaid.x")
    keys, out = (
        offset_rows(global_address(ref), row, size)
        for ref, size in ((keys, tokens * width), (out, 4 * tokens))
    )

    @loop(special("tid.x"), tokens, THREADS)
    def _add(token):
        key, total = offset_rows(keys, token, width), real(0.0)
        for at in range(0, width, CHUNK):
            for x in ptx(
                "ld.global.nc.v4.u32 {$0, $1, $2, $3}, [$4];", offset(key, word(at)), results=4
            ):
                total = instr("fma.rn.f32", x, x, total)
        ptx("st.global.u32 [$0], $1;", offset_rows(out, token, 4), total)


@op(
    kernel=lambda: sys.modules[__name__],
    limit=lambda a: unsupported(a.k),
    mosaic=lambda a: squares(a.k),
    derivative="reference",
)
def key_squares(k, *, implementation=None):
    """f32[B, K, T]: the squared norms of keys k [B, K, T, D]."""
    return jnp.sum(jnp.square(k.astype(jnp.float32)), axis=-1)


del ops.OPS["key_squares"]  # not one of the library's


@dataclass(frozen=True)
class KeyNorm(kvjax.Evictor):
    """Keeps tokens with short keys."""

    def see_tokens(self, k: Array, v: Array) -> Array:
        return -key_squares(k)

    def score(self, evidence, position, end, slots):
        return evidence


def test_its_result_is_that_of_the_reference(kernels):
    k = normal(0, 2, 3, 150, 20)
    want = key_squares(k, implementation="xla")
    np.testing.assert_allclose(jax.jit(key_squares.run_kernel)(k), want, rtol=1e-6)


def test_a_step_for_a_gpu_has_it_where_it_was_measured_and_takes_the_shapes(monkeypatch):
    if not HAS_KERNELS:
        pytest.skip("there are kernels from jax 0.11 on")

    def lowered(head_dim):
        spec = kvjax.CacheSpec(
            batch=1, q_heads=4, kv_heads=2, head_dim=head_dim, capacity=64, dtype="float32"
        )
        cache = kvjax.init_layer(kvjax.Evicting(evictor=KeyNorm(), budget=32), spec)
        q, k = (jax.ShapeDtypeStruct((1, 1, heads, head_dim), jnp.float32) for heads in (4, 2))
        step = jax.jit(lambda *args: kvjax.attention(*args[:3], args[2]))
        return step.trace(cache, q, k).lower(lowering_platforms=("cuda",)).as_text()

    assert "other_key_squares" in lowered(64)
    assert "other_key_squares" not in lowered(6), "it falls back to the reference"
    with pytest.raises(NotImplementedError, match="key_squares takes f32 heads"):
        key_squares(jnp.zeros((1, 1, 2, 6)), implementation="mosaic")
    monkeypatch.setattr(sys.modules[__name__], "MEASURED", None)
    alone = jax.jit(lambda k: key_squares(k)).trace(jnp.zeros((1, 1, 2, 8)))
    assert "other_key_squares" not in str(alone.jaxpr)


def test_its_derivative_is_that_of_the_reference():
    k = normal(1, 1, 2, 5, 8)
    got, want = (
        jax.grad(lambda k: jnp.sum(f(k)))(k)  # noqa: B023
        for f in (key_squares, key_squares.reference)
    )
    np.testing.assert_allclose(got, want, rtol=1e-6)
