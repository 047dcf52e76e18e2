"""MiKV against numpy written from its paper: which tokens are exact, and the codes of all
others.
"""

import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, Dense, HeavyHitter, Quantized
from kvjax.contrib.mikv import Mixed
from kvjax.testing import _drive as drive
from tests import oracles
from tests.test_oracles import data

SPEC = CacheSpec(batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=120, dtype="float32")
BUDGET, CHUNK, GROUP = 12, 8, 4


def numpy_step(
    q: np.ndarray, parts: list[tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Attention [G, D] of q [G, D] over all parts, keys and values [n, D], and the weights [G,
    n] of each part.
    """
    k, v = (np.concatenate([part[i] for part in parts]).astype(np.float64) for i in range(2))
    logits = q.astype(np.float64) @ k.T / np.sqrt(q.shape[1])
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return weights @ v, np.split(
        weights, np.cumsum([len(part[0]) for part in parts])[:-1], axis=1
    )


@pytest.mark.parametrize(
    ("keys", "lossless"),
    [
        ("random", False),
        pytest.param("random", True, marks=pytest.mark.thorough),
        pytest.param("live", False, marks=pytest.mark.thorough),
    ],
)
def test_steps_attend_to_exact_tokens_and_codes_of_all_others(
    keys: str, lossless: bool, checkpoint: str | None
) -> None:
    """From an empty cache, token by token: evidence is the sum of weights, and the least
    leaves.
    """
    store = Dense() if lossless else Quantized(bits=4, key_group=GROUP, value_group=GROUP)
    policy = Mixed(evictor=HeavyHitter(recent=0.25), budget=BUDGET, store=store, chunk=CHUNK)
    spec, tokens = (
        (SPEC, drive.random_tokens(SPEC)) if keys == "random" else data(checkpoint)["live"]
    )
    G, D = spec.group, spec.head_dim
    cache = kvjax.init_layer(policy, spec)
    heads = {
        at: ({}, []) for at in np.ndindex(2, 2)
    }  # evidence of exact positions; those that left, in order
    for n in range(60):
        out, cache, info = drive.step(cache, tokens, np.array([n, n]))
        out = out.reshape(2, 2, G, D)
        assert (np.asarray(info.attended) == n + 1).all()
        for (row, head), (evidence, gone) in heads.items():
            k, v = tokens.k[row, :, head], tokens.v[row, :, head]
            # A step demotes before its token comes.
            stored = gone[: len(gone) // CHUNK * CHUNK]
            if len(evidence) == BUDGET:
                old = [p for p in evidence if p <= n - int(0.25 * BUDGET)]
                least = min(old, key=lambda p, evidence=evidence: (evidence[p], p))
                gone.append(least)
                del evidence[least]
            evidence[n] = 0.0
            exact = [*evidence, *gone[len(stored) :]]
            decoded = k[stored], v[stored]
            if stored and not lossless:
                codes = (
                    oracles.asymmetric(k[stored], 4, GROUP, 1),
                    oracles.asymmetric(v[stored], 4, 1, GROUP),
                )
                decoded = tuple(code * scale + zero for code, scale, zero in codes)
            want, (weights, *_) = numpy_step(
                tokens.q[row, n].reshape(2, G, D)[head], [(k[exact], v[exact]), decoded]
            )
            for p, weight in zip(evidence, weights.sum(axis=0), strict=False):
                evidence[p] += weight
            np.testing.assert_allclose(
                out[row, head],
                want,
                atol=2e-5 * max(1.0, np.abs(want).max()),
                err_msg=f"{row}, {head}, {n}",
            )
    assert int(cache.state.low.count[0]) == 40


def test_a_prompt_in_chunks_keeps_every_token_once() -> None:
    """With a lossless store attention is exact, whichever tokens the evictor moved there."""
    policy = Mixed(budget=BUDGET, store=Dense(), chunk=CHUNK)
    tokens, lengths = drive.random_tokens(SPEC), np.array([97, 30])
    cache, _ = drive.fill(kvjax.init_layer(policy, SPEC), tokens, lengths)
    st = cache.state
    assert (
        np.asarray(st.low.count + st.pending.count + st.tokens.count).tolist()
        == lengths.tolist()
    )
    for i in range(12):
        outs, cache, _ = drive.step(cache, tokens, lengths + i)
        for row, n in enumerate(lengths + i):
            for head in range(2):
                q = tokens.q[row, n].reshape(2, 2, -1)[head]
                want, _ = numpy_step(
                    q, [(tokens.k[row, : n + 1, head], tokens.v[row, : n + 1, head])]
                )
                np.testing.assert_allclose(outs[row].reshape(2, 2, -1)[head], want, atol=2e-5)
    kvjax.raise_on_overflow(cache)


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match=r"key_group=32\) does not divide the chunk of 48"):
        kvjax.init_layer(Mixed(chunk=48), SPEC)
    tokens, cache = drive.random_tokens(SPEC), kvjax.init_layer(Mixed(store=Dense()), SPEC)
    with pytest.raises(ValueError, match=r"cannot serve a sliding window of 8"):
        drive.step(cache, tokens, np.zeros(2, int), window=8)
    with pytest.raises(ValueError, match=r"Sliding.*ranks tokens by position alone"):
        Mixed(evictor=kvjax.Sliding())
