"""PQCache against numpy written from its paper: k-means, codes and scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, presets
from kvjax.contrib.pqcache import ProductCodes
from kvjax.numerics.partial import Logits
from tests.test_oracles import data

LEARN, SLOTS = 64, 192
SELECTOR = ProductCodes(parts=2, bits=4, learn=LEARN, iterations=6)


def kmeans(points: np.ndarray, centres: int, iterations: int) -> np.ndarray:
    """f64[C, d] of points [n, d], from evenly spaced ones."""
    books = points[[i * len(points) // centres for i in range(centres)]].astype(np.float64)
    for _ in range(iterations):
        own = nearest(points, books)
        books = np.array(
            [
                points[own == c].mean(axis=0) if (own == c).any() else books[c]
                for c in range(centres)
            ]
        )
    return books


def nearest(points: np.ndarray, books: np.ndarray) -> np.ndarray:
    return np.array([np.argmin([((p - c) ** 2).sum() for c in books]) for p in points])


def random_keys() -> np.ndarray:
    rng = np.random.default_rng(0)
    return (
        rng.normal(size=(2, 2, SLOTS, 16)) * rng.uniform(0.2, 2, 16) + rng.normal(size=16)
    ).astype(np.float32)


@jax.jit
def whole(k: jax.Array, q: jax.Array) -> tuple:
    spec = CacheSpec(
        batch=k.shape[0],
        q_heads=4,
        kv_heads=2,
        head_dim=k.shape[3],
        capacity=SLOTS,
        dtype=k.dtype,
    )
    ix = SELECTOR.append(
        SELECTOR.init(spec, SLOTS), k, jnp.zeros(2, jnp.int32), jnp.full(2, SLOTS, jnp.int32)
    )
    return ix, SELECTOR.score(ix, q, logits=Logits(0.25))


@pytest.mark.parametrize("kind", ["random", pytest.param("live", marks=pytest.mark.thorough)])
def test_centroids_codes_and_scores_are_those_of_the_oracle(
    kind: str, checkpoint: str | None
) -> None:
    if kind == "random":
        k = random_keys()
    else:
        tokens = data(checkpoint)["live"][1].k[:2, :SLOTS, :2]
        k = np.ascontiguousarray(np.swapaxes(tokens, 1, 2)).astype(np.float32)
    D = k.shape[3]
    q = np.random.default_rng(1).normal(size=(2, 2, 3, D)).astype(np.float32)
    ix, scores = whole(k, q)
    books, codes = (
        np.asarray(ix.centroids).reshape(2, 2, SLOTS // LEARN, 16, 2, D // 2),
        np.asarray(ix.codes),
    )
    agreeing, decoded = 0, np.zeros((2, 2, SLOTS, D))
    for row, head, block, part in np.ndindex(2, 2, SLOTS // LEARN, 2):
        own, channels = (
            slice(block * LEARN, (block + 1) * LEARN),
            slice(part * D // 2, (part + 1) * D // 2),
        )
        points, book = (
            k[row, head, own, channels].astype(np.float64),
            books[row, head, block, :, part],
        )
        np.testing.assert_allclose(book, kmeans(points, 16, 6), atol=1e-4)
        agreeing += (codes[row, head, own, part] == nearest(points, book)).sum()
        decoded[row, head, own, channels] = book[codes[row, head, own, part]]
    assert agreeing >= 0.999 * 8 * SLOTS
    np.testing.assert_allclose(
        scores, 0.25 * np.einsum("bkgd,bksd->bkgs", q, decoded), atol=1e-4
    )


def test_blocks_have_the_same_codebooks_however_a_row_comes() -> None:
    k = random_keys()
    spec = CacheSpec(
        batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=SLOTS, dtype="float32"
    )
    append = jax.jit(SELECTOR.append)
    ix = SELECTOR.init(spec, SLOTS)
    for first in range(
        0, SLOTS, LEARN
    ):  # the second row comes a chunk late, and brings nothing first
        late = max(first - LEARN, 0)
        keys = np.stack([k[0, :, first : first + LEARN], k[1, :, late : late + LEARN]])
        ix = append(
            ix,
            keys,
            np.array([first, late], np.int32),
            np.array([LEARN, LEARN if first else 0], np.int32),
        )
    want, _ = whole(k, np.zeros((2, 2, 1, 16), np.float32))
    np.testing.assert_array_equal(ix.codes[0], want.codes[0])
    np.testing.assert_array_equal(
        ix.codes[1, :, : SLOTS - LEARN], want.codes[1, :, : SLOTS - LEARN]
    )
    np.testing.assert_array_equal(ix.centroids[0], want.centroids[0])
    np.testing.assert_array_equal(ix.centroids[1, :, :-1], want.centroids[1, :, :-1])


def test_sizes_that_do_not_fit_are_refused() -> None:
    spec = CacheSpec(batch=1, q_heads=2, kv_heads=2, head_dim=16, capacity=256)
    with pytest.raises(ValueError, match=r"learn=32.*too few tokens to learn 64 centroids"):
        ProductCodes(learn=32)
    with pytest.raises(ValueError, match=r"bits=9.*1 to 8"):
        ProductCodes(bits=9, learn=1024)
    with pytest.raises(ValueError, match=r"parts=3.*does not divide head_dim=16"):
        kvjax.init_layer(presets.pqcache(parts=3).rest, spec)
    with pytest.raises(ValueError, match=r"learn=64.*chunks of 96.*use Fifo\(leave=64\)"):
        kvjax.init_layer(
            kvjax.Retrieval(selector=ProductCodes(learn=64), demote=kvjax.Fifo(leave=96)), spec
        )
