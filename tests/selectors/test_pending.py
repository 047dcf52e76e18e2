"""A page that is not yet indexed competes as the page of its tokens so far would, once it is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import CacheSpec, CentrePages, Fier, MinMaxPages
from kvjax.numerics.partial import Logits
from kvjax.numerics.selection import Candidates

SPEC = CacheSpec(batch=2, q_heads=4, kv_heads=2, head_dim=8, capacity=16, dtype=jnp.float32)
PAGE, SCALE = 4, 0.3


@pytest.mark.parametrize("seen", [1, PAGE - 1, PAGE])
@pytest.mark.parametrize(
    "kind", [lambda page: MinMaxPages(page=page), lambda page: CentrePages(page=page)]
)
def test_a_pending_page_has_the_score_of_the_page_of_its_tokens(kind: Any, seen: int) -> None:
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(2, 2, n, 8)) + 1, jnp.float32) for n in (2, 2 * PAGE))
    count = PAGE + seen  # a full page, and one with the first `seen` tokens
    candidates = Candidates(
        span=(0, jnp.zeros(2, jnp.int32)), pending=(k, 0, count), k=1, k_max=1, pending_slots=8
    )
    got, valid = jax.jit(
        lambda q: kind(PAGE).with_pending(candidates, q).pending_units(q, Logits(SCALE), PAGE)
    )(q)
    assert np.asarray(valid).all()
    for page, tokens in enumerate((k[:, :, :PAGE], k[:, :, PAGE:count])):
        whole = kind(tokens.shape[2])
        none, size = jnp.zeros(2, jnp.int32), jnp.full(2, tokens.shape[2], jnp.int32)

        @jax.jit
        def score(
            q: jax.Array, k: jax.Array, whole: Any = whole, none: Any = none, size: Any = size
        ) -> jax.Array:
            return whole.score(
                whole.append(whole.init(SPEC, k.shape[2]), k, none, size),
                q,
                logits=Logits(SCALE),
            )

        want = score(q, tokens)
        np.testing.assert_allclose(got[..., page], want[..., 0], rtol=1e-5, atol=1e-2)


def test_a_pending_page_by_the_mean_of_its_keys_ignores_slots_past_the_count() -> None:
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(2, 2, n, 8)).astype(np.float32) for n in (2, PAGE))
    k[:, :, 2:] = np.nan

    @jax.jit
    def score(q: jax.Array, k: jax.Array) -> jax.Array:
        candidates = Candidates(
            span=(0, jnp.zeros(2, jnp.int32)),
            pending=(k, 0, 2),
            k=1,
            k_max=1,
            pending_slots=PAGE,
        )
        scored = Fier(group=8, page=PAGE, page_reduce="mean").with_pending(candidates, q)
        return scored.pending_units(q, Logits(SCALE), PAGE)[0]

    got = np.asarray(score(q, k))
    np.testing.assert_allclose(
        got[..., 0], np.einsum("bkgd,bkd->bkg", q, k[:, :, :2].mean(2)) * SCALE, rtol=1e-5
    )
