"""Which layers should select: measurements of pairs of layers, and the best anchors for them."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import presets
from kvjax.evaluate.live import Live, LiveLayer
from kvjax.evaluate.sharing import Sharing, measure


def layers_alike(same_as: list[int]) -> Live:
    """Layer i has the queries and keys of layer same_as[i], and values of its own; its heads swap where it is odd."""
    rng, T, S, K, G, D = np.random.default_rng(0), 4, 96, 2, 2, 8
    q, k = rng.normal(size=(len(same_as), 1, T, K * G, D)) * 3, rng.normal(size=(len(same_as), 1, K, S, D))

    def layer(own: int) -> LiveLayer:
        v = rng.normal(size=(1, K, S, D))
        return LiveLayer(*(jnp.asarray(a, jnp.float32) for a in (q[own], k[own], v)), D**-0.5, None)

    return Live(tuple(layer(own) for own in same_as), np.arange(S - T, S))


def test_layers_with_the_same_keys_and_queries_serve_each_other() -> None:
    live = layers_alike([0, 1, 1, 3, 3])
    swapped = live.layers[4]
    swapped = LiveLayer(
        swapped.q.reshape(1, 4, 2, 2, 8)[:, :, ::-1].reshape(1, 4, 4, 8),
        swapped.k[:, ::-1],
        swapped.v,
        swapped.scale,
        None,
    )
    live = Live((*live.layers[:4], swapped), live.positions)
    found = measure(live, presets.fier(24, group=8, chunk=32, dense_layers=1))
    assert found.first == 1
    np.testing.assert_allclose(found.overlap[1, 2], 1, atol=1e-6)
    assert found.overlap[1, 3] < 0.6
    assert found.error[1, 3] > 2 * found.error[3, 3]
    assert np.isnan(found.error[2, 1])
    assert found.anchors(2) == (1, 3)
    assert found.heads((1, 3)) == {4: (1, 0)}
    np.testing.assert_allclose(found.head_error[3, 4, (0, 1), (1, 0)], found.head_error[3, 3, (1, 0), (1, 0)], rtol=0.5)
    assert found.least_error[3, 4] < 0.6 * found.error[3, 4]
    assert found.total_error((1, 2, 3, 4)) <= found.total_error((1, 3)) + 1e-6


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_anchors_have_the_least_error_of_all_choices(count: int) -> None:
    rng = np.random.default_rng(count)
    found = Sharing(1, rng.uniform(size=(7, 7)), rng.uniform(size=(7, 7)), rng.uniform(size=(7, 7, 2, 2)))
    choices = ((1, *rest) for rest in itertools.combinations(range(2, 7), count - 1))
    errors = [found.total_error(choice, best_heads=True) for choice in choices]
    assert found.total_error(found.anchors(count), best_heads=True) == pytest.approx(min(errors))
    assert min(errors) <= found.total_error(found.anchors(count))
    assert found.every(3) == (1, 4)
