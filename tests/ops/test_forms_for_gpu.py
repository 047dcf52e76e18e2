"""The forms of references that a program for a GPU has give what those of other platforms give."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kvjax import ops
from kvjax.numerics.partial import Logits
from kvjax.numerics.quant import quantize, quantize_1bit
from kvjax.numerics.rotate import encode
from kvjax.numerics.selection import PackedSelection
from kvjax.ops import select


def as_on_gpu(f, *args):
    """f(*args) with the forms of `ops.op.for_gpu` for a GPU, on this machine, in plain JAX."""
    with pytest.MonkeyPatch.context() as patch, ops.use("xla"):
        patch.setattr("kvjax.ops.op.reaches_gpus", lambda: True)
        patch.setattr(
            lax, "platform_dependent", lambda *operands, cuda, rocm, default: cuda(*operands)
        )
        return jax.jit(lambda *args: f(*args))(*args)


def plainly(f, *args):
    with ops.use("xla"):
        return jax.jit(lambda *args: f(*args))(*args)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def integers(seed, stop, *shape, dtype=np.int32):
    return np.random.default_rng(seed).integers(0, stop, shape).astype(dtype)


# Inputs are made when a test asks for them: every process that runs tests imports this file.
def of_score():
    keys = jax.jit(partial(quantize_1bit, group=16))(normal(1, 1, 4, 96, 32))
    return normal(0, 1, 4, 3, 32), keys


def of_rerank():
    slots = np.stack([np.random.default_rng(i).permutation(96)[:40] for i in range(12)])
    listing = PackedSelection(
        slots.reshape(1, 4, 3, 40).astype(np.int32), np.full((1, 4, 3), 40, np.int32)
    )
    return normal(0, 1, 4, 3, 32), jax.jit(encode)(normal(1, 1, 4, 96, 32)), listing


def quantised(tokens, channels, steps=False):
    code = jax.jit(quantize, static_argnums=(1,), static_argnames=("tokens", "channels"))
    start, stop = [[3, 0, 96], [90, 96, 96]] if steps else [[3], [77]]
    return (
        normal(0, 1, 4, 3, 32),
        code(normal(1, 1, 4, 96, 32), 2, tokens=tokens, channels=channels),
        code(normal(2, 1, 4, 96, 32), 2, channels=16),
        np.array([start], np.int32),
        np.array([stop], np.int32),
    )


def of_collide():
    ids = integers(1, 256, 1, 4, 96, 4, dtype=np.uint8)
    counts = integers(2, 9, 1, 4, 4, 256)
    return normal(0, 1, 4, 3, 32), ids, counts, np.array([[30, 90, 300]], np.int32)


CASES = {
    "score_1bit": (partial(ops.score_1bit, logits=Logits(0.3)), of_score),
    "rerank": (partial(ops.rerank, logits=Logits(0.3)), of_rerank),
    "attend_quantized, by channel": (
        partial(ops.attend_quantized, logits=Logits(0.3)),
        partial(quantised, 16, 1),
    ),
    "attend_quantized, by token": (
        partial(ops.attend_quantized, logits=Logits(0.3)),
        partial(quantised, 1, 16),
    ),
    "attend_quantized, by query": (
        partial(ops.attend_quantized, logits=Logits(0.3)),
        partial(quantised, 16, 1, steps=True),
    ),
    "collide": (ops.collide, of_collide),
}


@pytest.mark.parametrize("name", CASES)
def test_the_form_for_a_gpu_gives_the_same(name):
    f, make = CASES[name]
    args = make()
    for a, b in zip(
        jax.tree.leaves(as_on_gpu(f, *args)), jax.tree.leaves(plainly(f, *args)), strict=True
    ):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", [name for name in CASES if name != "collide"])
def test_the_form_for_a_gpu_has_the_same_derivative(name):
    f, make = CASES[name]
    q, *args = make()

    def loss(q):
        return jnp.sum(jnp.sin(jax.tree.leaves(f(q, *args))[0]))

    np.testing.assert_allclose(
        as_on_gpu(jax.grad(loss), q), plainly(jax.grad(loss), q), rtol=2e-4, atol=2e-4
    )


def test_codes_past_the_stop_do_not_matter_in_the_form_for_a_gpu():
    f, make = CASES["attend_quantized, by channel"]
    q, keys, values, start, stop = make()
    late = (np.arange(96) >= 80)[None, None, :, None]
    nan = np.uint32(0x7FC07FC0)
    spoilt = values._replace(scales=np.where(late, nan, values.scales))
    for a, b in zip(
        as_on_gpu(f, q, keys, values, start, stop),
        as_on_gpu(f, q, keys, spoilt, start, stop),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("count", [0, 1, 37, 4000])
def test_most_voted_for_a_gpu_gives_the_same(count):
    votes = integers(3, 256, 2, 3, 2, 500, dtype=np.uint8)
    most = partial(ops.most_voted, room=200)
    args = votes, np.array([500, 41], np.int32), np.array([count, 7], np.int32)
    for a, b in zip(as_on_gpu(most, *args), plainly(most, *args), strict=True):
        np.testing.assert_array_equal(a, b)


ROWS = {
    "random": lambda rng, n: rng.standard_normal(n),
    "few values": lambda rng, n: rng.integers(-2, 3, n) * rng.choice([-0.0, 0.0, 1.0], n),
    "one value": lambda rng, n: np.zeros(n),
    "rising": lambda rng, n: np.arange(n[1]),
    "not finite": lambda rng, n: rng.choice([np.nan, np.inf, -np.inf, 1.0, -1e30], n),
}


SIZES = [(65536, 2048, 65536), (65543, 700, 65000), (70001, 3, 2), (65536, 9000, 0)]


@pytest.mark.parametrize(("units", "k", "stop"), SIZES)
def test_top_k_by_counts_gives_the_same_slots(units, k, stop):
    """Of rows of each kind at once."""
    rows = [make(np.random.default_rng(0), (2, units)) for make in ROWS.values()]
    scores = np.concatenate([row * np.ones((2, 1)) for row in rows]).astype(np.float32)
    valid = (np.arange(units) < stop)[None]
    top = partial(ops.top_k, k=k)
    counted, whole = as_on_gpu(top, scores, valid), plainly(top, scores, valid)
    np.testing.assert_array_equal(counted.valid, whole.valid)
    slots = np.asarray(counted.slots)
    np.testing.assert_array_equal(
        np.where(whole.valid, slots, 0), np.where(whole.valid, whole.slots, 0)
    )
    assert 0 <= slots.min() <= slots.max() < units


def test_top_k_by_counts_sorts_no_row():
    """The law above cannot fail on rows that are sorted whole, so it needs rows that are not."""
    equations = jax.make_jaxpr(lambda x: select._top_by_counts(x, 2048))(
        jnp.zeros((1, 65536))
    ).eqns
    assert [
        eqn.invars[0].aval.shape for eqn in equations if eqn.primitive.name in ("top_k", "sort")
    ] == [(1, 2048)]
