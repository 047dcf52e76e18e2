"""The algebra of partial attention: parts of any partition merge to attention over the whole."""

from functools import partial
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from kvjax.numerics.partial import (
    Logits,
    PartialAttention,
    attend_causal,
    attend_causal_in_turns,
    attend_part,
    empty_part,
    merge,
)


def whole(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax attention in float64, a query at a time; zeros and -inf where nothing is seen."""
    B, K, Q, _ = q.shape
    out, lse = np.zeros((*q.shape[:3], v.shape[-1])), np.full(q.shape[:3], -np.inf)
    for b, h, i in np.ndindex(B, K, Q):
        seen = mask[b, h, i]
        if seen.any():
            logits = scale * k[b, h, seen].astype(np.float64) @ q[b, h, i].astype(np.float64)
            weights = np.exp(logits - logits.max())
            out[b, h, i] = weights @ v[b, h, seen] / weights.sum()
            lse[b, h, i] = logits.max() + np.log(weights.sum())
    return out, lse


def draw(seed: int, S: int = 12, Q: int = 3, size: float = 1.0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(2, 2, n, 8)).astype(np.float32) * size for n in (Q, S, S))
    return q, k, v, rng.random((2, 2, Q, S)) < 0.6


def check(part: PartialAttention, out: np.ndarray, lse: np.ndarray, atol: float = 2e-6) -> None:
    np.testing.assert_allclose(part.out, out, atol=atol)
    np.testing.assert_allclose(part.lse, lse, atol=atol * 10)


@given(
    seed=st.integers(0, 2**16),
    cuts=st.lists(st.integers(0, 3), min_size=12, max_size=12),
    size=st.sampled_from([0.1, 1, 30]),
)
def test_merge_of_any_partition_is_the_whole(seed: int, cuts: list[int], size: float) -> None:
    q, k, v, mask = draw(seed, size=size)
    parts = []
    for part in range(4):  # some of them empty, in some rows or in all
        mine = mask & (np.array(cuts) == part)
        parts.append(attend_part(q, k, v, jnp.asarray(mine), logits=Logits(0.3)))
    out, lse = whole(q, k, v, mask, 0.3)
    check(merge(*parts), out, lse, atol=2e-6 * max(1.0, size) ** 3)
    check(merge(*reversed(parts)), out, lse, atol=2e-6 * max(1.0, size) ** 3)
    check(
        merge(merge(parts[0], parts[1]), merge(parts[2], parts[3])),
        out,
        lse,
        atol=2e-6 * max(1.0, size) ** 3,
    )


def test_empty_part_is_the_identity_to_the_bit() -> None:
    q, k, v, mask = draw(1)
    part = attend_part(q, k, v, jnp.asarray(mask), logits=Logits(1.0))
    for merged in (
        merge(part, empty_part(part.out.shape)),
        merge(empty_part(part.out.shape), part),
    ):
        np.testing.assert_array_equal(merged.out, part.out)
        np.testing.assert_array_equal(merged.lse, part.lse)


def test_nothing_attended_is_zero_and_not_nan() -> None:
    q, k, v, _ = draw(2)
    part = attend_part(q, k, v, jnp.zeros((1, 1, 1, 12), bool), logits=Logits(1.0))
    assert not np.asarray(part.out).any()
    assert np.isneginf(np.asarray(part.lse)).all()
    both = merge(part, part)
    assert np.isfinite(np.asarray(both.out)).all()
    assert np.isneginf(np.asarray(both.lse)).all()


def test_huge_logits_stay_finite() -> None:
    q, k, v, mask = draw(3, size=300.0)
    part = attend_part(q, k, v, jnp.asarray(mask), logits=Logits(1.0))
    assert np.isfinite(np.asarray(part.out)).all()


def test_masked_keys_may_be_nan() -> None:
    q, k, v, mask = draw(4)
    mask[:] = mask[:1, :1, :1]
    seen = mask[0, 0, 0][None, None, :, None]
    part = attend_part(q, np.where(seen, k, np.nan), v, jnp.asarray(mask), logits=Logits(1.0))
    check(part, *whole(q, k, v, mask, 1.0))


@pytest.mark.parametrize("form", [attend_causal, attend_causal_in_turns])
@pytest.mark.parametrize("window", [None, 1, 4, 50])
def test_causal_blocks_give_causal_attention(window: int | None, form: Any) -> None:
    B, K, G, T, D = 2, 2, 3, 21, 8
    rng = np.random.default_rng(6)
    q, k, v = (
        rng.normal(size=s).astype(np.float32)
        for s in ((B, K, G, T, D), (B, K, T, D), (B, K, T, D))
    )
    at = np.arange(T)
    mask = (at[None] <= at[:, None]) & (at[None] > at[:, None] - (window or T))
    part = jax.jit(partial(form, logits=Logits(0.4), window=window, block=8))(q, k, v)
    want = whole(
        q.reshape(B, K, G * T, D),
        k,
        v,
        np.broadcast_to(np.tile(mask, (G, 1)), (B, K, G * T, T)),
        0.4,
    )
    check(part, *want)


def test_turns_are_traced_once_for_all_blocks() -> None:
    def operations(tokens: int) -> int:
        q = jax.ShapeDtypeStruct((1, 2, 3, tokens, 8), np.float32)
        k = jax.ShapeDtypeStruct((1, 2, tokens, 8), np.float32)
        form = partial(attend_causal_in_turns, logits=Logits(0.4), window=9, block=8)
        return str(jax.make_jaxpr(form)(q, k, k)).count(" = ")

    assert operations(32) == operations(64)


def test_attention_is_differentiable() -> None:
    q, k, v, _ = draw(7)
    grad = jax.grad(
        lambda q: attend_part(
            q, k, v, jnp.ones((1, 1, 1, 12), bool), logits=Logits(1.0)
        ).out.sum()
    )(q)
    assert np.isfinite(np.asarray(grad)).all()
    assert np.asarray(grad).any()
