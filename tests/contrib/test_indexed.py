"""Selections by a model's own indexer, against loops over blocks written from its description."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec
from kvjax.contrib import indexed
from kvjax.contrib.indexed import MSA, QSA, Index, Indexed
from tests.oracles import attention

SPEC = CacheSpec(batch=2, q_heads=24, kv_heads=2, head_dim=256, capacity=400, dtype=jnp.float32)
T, E = 300, 32
INDEXERS = {
    "QSA": QSA(size=E, top=9),
    "MSA": MSA(heads=2, size=E, top=2),
    "MSA, small blocks": MSA(heads=2, size=E, block=16, top=3),
}
LENGTHS = np.array([T - 40, 130])


def tokens(indexer: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=(2, T, *shape)).astype(np.float32)

    made = {"q": normal(24, 256), "k": normal(2, 256), "v": normal(2, 256)}
    made |= {"iq": normal(indexer.heads, E), "ik": normal(E), "w": normal(indexer.heads)}
    made["q"] *= 2  # sharp attention, so that a wrong block shows
    return made


def finish(pooled: jax.Array, position: jax.Array) -> jax.Array:
    """In place of a model's norm and RoPE: unlike for blocks at other positions."""
    unit = pooled / jnp.sqrt(jnp.mean(pooled * pooled, axis=-1, keepdims=True) + 1e-6)
    return unit * (1 + 0.01 * position[..., None].astype(jnp.float32))


def wanted(
    indexer: Any, given: dict[str, np.ndarray], b: int, h: int, n: int, *, shapes: bool
) -> set[int]:
    """The positions that the newest of n tokens reads."""
    q, w = (
        given["iq"][b, n - 1].astype(np.float64),
        given["w"][b, n - 1] if shapes else np.ones(indexer.heads),
    )
    keys, size = given["ik"][b, :n].astype(np.float64), indexer.block
    if isinstance(indexer, QSA):
        scores = []
        for first in range(0, n // 4 * 4, 4):
            key = keys[first : first + 4].mean(axis=0)
            if shapes:
                key = key / np.sqrt((key * key).mean() + 1e-6) * (1 + 0.01 * first)
            scores.append(sum(w[i] * max(q[i] @ key, 0) for i in range(indexer.heads)) / E**0.5)
        best = np.argsort(-np.array(scores), kind="stable")[: indexer.top]
        return {4 * i + j for i in best for j in range(4)} | set(range(n // 4 * 4, n))
    scores = keys @ q[h] * w[h]
    blocks = {i: scores[i * size : (i + 1) * size].max() for i in range(-(-n // size))}
    blocks[(n - 1) // size] = np.inf
    best = sorted(blocks, key=lambda i: -blocks[i])[: indexer.top]
    return {p for i in best for p in range(i * size, min((i + 1) * size, n))}


def index_of(given: dict[str, np.ndarray], at: Any, *, shapes: bool) -> Index:
    rows = np.arange(2)[:, None]
    q, k, w = (jnp.asarray(given[name][rows, at]) for name in ("iq", "ik", "w"))
    return Index(q, k, w if shapes else None, finish if shapes else None)


@pytest.mark.parametrize("shapes", [False, True], ids=["plain", "weighted and finished"])
@pytest.mark.parametrize("name", INDEXERS)
def test_steps_read_the_blocks_that_the_indexer_selects(name: str, shapes: bool) -> None:
    """After a prompt in two ragged chunks; keys of blocks that steps complete count too."""
    indexer = INDEXERS[name]
    if shapes and name == "MSA":
        pytest.skip("the small blocks run the same")
    shapes_keys = shapes and isinstance(indexer, QSA)
    given = tokens(indexer)
    layer = kvjax.init_layer(Indexed(indexer), SPEC)

    @jax.jit
    def call(layer: Any, q: Any, k: Any, v: Any, lengths: Any, *index: Any) -> Any:
        made = Index(*index, finish=finish if shapes_keys else None)
        return indexed.attention(layer, q, k, v, lengths=lengths, index=made)

    def run(layer: Any, at: np.ndarray, count: np.ndarray) -> Any:
        rows = np.arange(2)[:, None]
        q, k, v = (given[name][rows, np.minimum(at, T - 1)] for name in "qkv")
        index = index_of(given, np.minimum(at, T - 1), shapes=shapes)
        return call(layer, q, k, v, count, index.q, index.k, index.weights)

    first = np.array([101, 33])
    _, layer, _ = run(layer, np.arange(260)[None] + np.zeros((2, 1), int), first)
    _, layer, _ = run(layer, first[:, None] + np.arange(260), LENGTHS - first)
    for i in range(9):
        n = LENGTHS + i
        out, layer, info = run(layer, n[:, None], np.ones(2, int))
        for b, h in np.ndindex(2, 2):
            read = np.asarray(info.positions)[b, h, 0]
            at = sorted(wanted(indexer, given, b, h, n[b] + 1, shapes=shapes))
            assert sorted(read[read >= 0]) == at, (i, b, h)
            assert info.attended[b, h] == len(at)
            heads = slice(12 * h, 12 * h + 12)
            want, _ = attention(
                given["q"][b, n[b], heads], given["k"][b, at, h], given["v"][b, at, h], 1 / 16
            )
            np.testing.assert_allclose(out[b, 0, heads], want, atol=1e-5)


def test_below_the_budget_it_is_dense_attention() -> None:
    for indexer in (QSA(size=E, top=100), MSA(heads=2, size=E, block=64, top=8)):
        given, dense = tokens(indexer), kvjax.init_layer(kvjax.Full(), SPEC)
        layer = kvjax.init_layer(Indexed(indexer), SPEC)
        for at in (slice(0, 97), slice(97, 98), slice(98, 99)):
            q, k, v = (jnp.asarray(given[name][:, at]) for name in "qkv")
            index = Index(*(jnp.asarray(given[name][:, at]) for name in ("iq", "ik")))
            out, layer, _ = jax.jit(indexed.attention)(layer, q, k, v, index=index)
            want, dense = jax.jit(kvjax.attention)(dense, q, k, v)
            np.testing.assert_allclose(out, want, atol=1e-5)


def test_bytes_a_token_are_those_of_the_arrays() -> None:
    for indexer, own in ((QSA(), 64), (MSA(), 256)):
        spec = CacheSpec(batch=1, q_heads=24, kv_heads=4, head_dim=256, capacity=4096)
        st = jax.eval_shape(lambda indexer=indexer, spec=spec: Indexed(indexer).init(spec))
        assert st.keys.size * 2 / 4096 == own
        assert Indexed(indexer).bytes_per_token(spec) == 2 * 4 * 256 * 2 + own


def test_what_an_indexer_lacks_is_told() -> None:
    layer = kvjax.init_layer(Indexed(QSA(size=E)), SPEC)
    q, k = np.zeros((2, 1, 24, 256), np.float32), np.zeros((2, 1, 2, 256), np.float32)
    index = Index(np.zeros((2, 1, 4, E), np.float32), np.zeros((2, 1, E), np.float32))
    few = index._replace(q=np.zeros((2, 1, 3, E), np.float32))
    other = kvjax.init_layer(Indexed(MSA(size=E)), SPEC)
    for verb in (kvjax.attention, kvjax.prefill, kvjax.decode):
        with pytest.raises(
            ValueError, match=r"call kvjax.contrib.indexed.attention with index="
        ):
            jax.eval_shape(verb, layer, q, k, k)
    with pytest.raises(ValueError, match="for a cache of Indexed, and this one is of Full"):
        indexed.attention(kvjax.init_layer(kvjax.Full(), SPEC), q, k, k, index=index)
    with pytest.raises(
        ValueError, match=r"takes index queries \[2, 1, 4, 32\] and .*; got q\[2, 1, 3, 32\]"
    ):
        indexed.attention(layer, q, k, k, index=few)
    with pytest.raises(ValueError, match="needs an index query for each of the 2 KV heads"):
        indexed.attention(other, q, k, k, index=index)


def test_a_call_leaves_the_policy_as_it_was() -> None:
    layer = kvjax.init_layer(Indexed(QSA(size=E)), SPEC)
    q, k = np.zeros((2, 1, 24, 256), np.float32), np.zeros((2, 1, 2, 256), np.float32)
    index = Index(np.zeros((2, 1, 4, E), np.float32), np.zeros((2, 1, E), np.float32))
    _, after, _ = indexed.attention(layer, q, k, k, index=index)
    assert after.policy == layer.policy
    assert jax.tree.structure(after) == jax.tree.structure(layer)
