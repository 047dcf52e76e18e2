"""Scores by the signs of stored codes, against numpy, and against the products that they
estimate.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.numerics.partial import Logits
from kvjax.numerics.rotate import rotate
from kvjax.selectors import SignPlane
from kvjax.stores import TurboQuant

SPEC = kvjax.CacheSpec(
    batch=1, q_heads=8, kv_heads=2, head_dim=64, capacity=1024, dtype=jnp.float32
)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_scores_are_weighted_products_with_signs_and_unbiased(bits: int) -> None:
    store, rng = TurboQuant(bits=bits, seed=3), np.random.default_rng(bits)
    offset = rng.uniform(50, 90, 64) * (
        np.arange(64) % 16 == 0
    )  # a bias of some channels, as Qwen2's keys have
    k = (rng.normal(size=(1, 2, 1024, 64)) + offset).astype(np.float32)
    q = rng.normal(size=(1, 2, 4, 64)).astype(np.float32)

    @jax.jit
    def run(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        st = store.append(store.init(SPEC, 1024), k, k, jnp.array([1024]))
        plane = SignPlane()
        return plane.score((st, store), q, logits=Logits(0.125)), st.offset

    scores, mean = run(q, k)
    np.testing.assert_allclose(mean, k[:, :, :8].mean(axis=2), atol=1e-4)
    R = np.asarray(jax.jit(rotate, static_argnums=1)(jnp.eye(64), 3)).T.astype(np.float64)
    for h in range(2):
        few = k[0, h].astype(np.float64) - np.asarray(mean[0, h], np.float64)
        true, shift = q[0, h] @ few.T, q[0, h] @ np.asarray(mean[0, h], np.float64)
        found = np.asarray(scores[0, h], np.float64) / 0.125 - shift[:, None]
        signs = q[0, h] @ R.T @ np.sign(few @ R.T).T
        weight = (found * signs).sum(axis=0) / (signs * signs).sum(
            axis=0
        )  # one for each key, whatever the query
        np.testing.assert_allclose(found, weight * signs, atol=2e-3)
        assert abs((true * found).sum() / (true * true).sum() - 1) < 0.05


def test_a_store_without_codes_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"keeps none of 2 to 4 bits; use store=kvjax.TurboQuant"
    ):
        SignPlane().check_store(kvjax.Dense())
    with pytest.raises(ValueError, match="keeps none of 2 to 4 bits"):
        SignPlane().check_store(TurboQuant(bits=8))
