"""The kernels of put_token and put_tokens against the references, on random and on adversarial
input.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ops
from kvjax.kernels_pallas.write import put_token
from kvjax.numerics.blocks import Block
from tests.kernels.conftest import ON_GPU, on_gpu
from tests.kernels.inputs import normal

pytestmark = pytest.mark.usefixtures("kernels")


def token_of(B, K, slots, D, dtype):
    """A step's arguments. Rows have, in turn: room everywhere; a full first zone; no room; no
    token; a lost one.
    """
    counts = [np.resize([n - 1, n, n, 0, n], B).astype(np.int32) for n in slots]
    counts[-1] = np.resize([0, slots[-1] - 1, slots[-1], 1, slots[-1]], B).astype(np.int32)
    zones = [
        Block(
            *(normal(2 * i + s, B, K, n, D, dtype=dtype) for s in range(2)), jnp.asarray(count)
        )
        for i, (n, count) in enumerate(zip(slots, counts, strict=True))
    ]
    active = jnp.asarray(np.resize([True, True, True, False, True], B))
    return (
        zones,
        *(normal(s, B, K, 1, D) for s in (8, 9)),
        active,
        jnp.asarray(np.arange(B) == 4),
    )


def put_by_kernel(zones, *rest):
    made, overflow = put_token.put_token(
        [(zone.k, zone.v, zone.count) for zone in zones], *rest
    )
    return [Block(*zone) for zone in made], overflow


@pytest.mark.parametrize(
    ("B", "K", "slots", "D", "dtype"),
    [
        (5, 3, (2, 5), 128, jnp.bfloat16),
        (2, 5, (4,), 8, jnp.float32),
        pytest.param(9, 8, (4, 383), 128, jnp.bfloat16, marks=on_gpu),
        pytest.param(1, 8, (256,), 256, jnp.float16, marks=on_gpu),
    ],
)
def test_a_token_is_put_where_the_reference_puts_it(B, K, slots, D, dtype):
    args = token_of(B, K, slots, D, dtype)
    want = jax.jit(partial(ops.put_token, implementation="xla"))(*args)
    zones = jax.tree.map(jnp.copy, args[0])
    places = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(zones)]
    got = jax.jit(put_by_kernel, donate_argnums=0)(zones, *args[1:])
    jax.tree.map(np.testing.assert_array_equal, got, want)
    if ON_GPU:
        assert [a.unsafe_buffer_pointer() for a in jax.tree.leaves(got[0])] == places, (
            "it was copied"
        )


@pytest.mark.parametrize(
    ("B", "K", "T", "slots", "D", "dtype"),
    [
        (5, 3, 7, (2, 11), 64, jnp.bfloat16),
        pytest.param(5, 1, 2, (9,), 8, jnp.float32, marks=pytest.mark.thorough),
        pytest.param(9, 8, 8, (4, 383), 128, jnp.bfloat16, marks=on_gpu),
        pytest.param(1, 8, 16, (256,), 128, jnp.float16, marks=on_gpu),
    ],
)
def test_tokens_are_put_where_the_reference_puts_them(B, K, T, slots, D, dtype):
    zones, *_, overflow = token_of(B, K, slots, D, dtype)
    count = jnp.asarray(np.resize([T, T - 1, T, 0, 1], B), jnp.int32)
    args = *(normal(s, B, K, T, D) for s in (8, 9)), count, overflow
    want = jax.jit(partial(ops.put_tokens, implementation="xla"))(zones, *args)
    one = want
    for t in range(T if B == 5 else 0):  # one after the other
        token = (a[:, :, t : t + 1] for a in args[:2])
        before = (zones, overflow) if t == 0 else one
        one = jax.jit(partial(ops.put_token, implementation="xla"))(
            before[0], *token, t < count, before[1]
        )
    jax.tree.map(np.testing.assert_array_equal, one, want)

    def run(zones, *args):
        made, lost = put_token.put_tokens(
            [(zone.k, zone.v, zone.count) for zone in zones], *args
        )
        return [Block(*zone) for zone in made], lost

    copies = jax.tree.map(jnp.copy, zones)
    places = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(copies)]
    got = jax.jit(run, donate_argnums=0)(copies, *args)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    if ON_GPU:
        assert [a.unsafe_buffer_pointer() for a in jax.tree.leaves(got[0])] == places, (
            "it was copied"
        )


def test_a_token_is_put_under_vmap_and_has_the_references_derivative(monkeypatch):
    args = token_of(2, 1, (3,), 64, jnp.float32)
    two = jax.tree.map(lambda a: jnp.stack([a, a[::-1]]), args)
    got = jax.jit(jax.vmap(put_by_kernel))(*two)
    for i in range(2):
        want = ops.put_token(*jax.tree.map(lambda a, i=i: a[i], two), implementation="xla")
        jax.tree.map(
            np.testing.assert_array_equal, jax.tree.map(lambda a, i=i: a[i], got), want
        )
    zones, *rest = args

    def total(k, implementation):
        (zone,), _ = ops.put_token(zones, k, *rest[1:], implementation=implementation)
        return jnp.sum(zone.k**2)

    monkeypatch.setattr(ops.op, "_unmeasured", lambda kernel: None)
    for k in (rest[0], 2 * rest[0]):
        np.testing.assert_allclose(
            *(jax.jit(jax.grad(partial(total, implementation=i)))(k) for i in (None, "xla"))
        )
