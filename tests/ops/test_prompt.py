"""Chunks of a prompt over what is stored: blocks, streams and zones give softmax attention over
the whole.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

from kvjax.numerics.partial import Logits, PartialAttention, attend_part
from kvjax.ops import chunk as prompt
from tests.numerics.test_partial import check, whole

B, K, G, T, D = 2, 2, 3, 4, 8
SCALE = 0.5


def draw(S: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    sizes = (B, K, G, T, D), (B, K, S, D), (B, K, S, D)
    q, k, v = (rng.normal(size=size).astype(np.float32) for size in sizes)
    return q, k, v


def wanted(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, start: np.ndarray, stop: np.ndarray
) -> tuple[np.ndarray, ...]:
    S = k.shape[2]
    mask = (np.arange(S) >= start[..., None]) & (
        np.arange(S) < stop[:, None, None]
    )  # [B, T, S]
    mask = np.broadcast_to(mask[:, None, None], (B, K, G, T, S)).reshape(B, K, G * T, S)
    return whole(q.reshape(B, K, G * T, D), k, v, mask, SCALE)


def poison(a: np.ndarray, stop: np.ndarray) -> Array:
    return jnp.asarray(
        np.where((np.arange(a.shape[2]) >= stop[:, None])[:, None, :, None], np.nan, a)
    )


def read(zone: tuple[Array, Array], first: Array | int, size: int) -> tuple[Array, Array]:
    k, v = (lax.dynamic_slice_in_dim(a, first, size, axis=2) for a in zone)
    return k, v


@pytest.mark.parametrize("start", [None, [[0, 3, 7, 8], [2, 2, 0, 1]]])
@pytest.mark.parametrize("stop", [(9, 0), (12, 5), (0, 0)])
@pytest.mark.parametrize("block", [1, 5, 12, 100])
def test_blocks_give_the_same_as_the_whole(
    block: int, stop: tuple[int, int], start: list[list[int]] | None
) -> None:
    q, k, v = draw(12)
    ends, starts = np.array(stop), np.zeros((B, T), int) if start is None else np.array(start)
    how = {"read": read, "slots": 12, "block": block, "logits": Logits(SCALE)}
    args = (
        q,
        (poison(k, ends), poison(v, ends)),
        None if start is None else jnp.asarray(starts),
        jnp.asarray(ends),
    )
    check(jax.jit(partial(prompt._attend_blocks, **how))(*args), *wanted(q, k, v, starts, ends))


@pytest.mark.parametrize("stop", [(9, 0), (12, 5), (0, 0)])
@pytest.mark.parametrize("block", [1, 5, 6, 12])
def test_a_stream_of_blocks_gives_the_same_as_the_whole(
    block: int, stop: tuple[int, int]
) -> None:
    q, k, v = draw(12)
    ends = np.array(stop)

    def part(
        q: Array, k: Array, v: Array, stop: Array
    ) -> PartialAttention:  # as cuDNN: slots [0, stop) of a block
        mask = (jnp.arange(k.shape[2])[None] < stop[:, None])[:, None, None]
        return attend_part(q.reshape(B, K, G * T, D), k, v, mask, logits=Logits(SCALE))

    run = jax.jit(partial(prompt._stream, read=read, slots=12, block=block, part=part))
    check(
        run(jnp.asarray(q), (jnp.asarray(k), jnp.asarray(v)), jnp.asarray(ends)),
        *wanted(q, k, v, np.zeros((B, T), int), ends),
    )


def test_a_part_over_stored_keys_has_the_gradient_of_attention() -> None:
    q, k, v = draw(12)
    stop = jnp.array([9, 4])
    mask = (jnp.arange(12)[None] < stop[:, None])[:, None, None]

    def blocks(q: Array, k: Array, v: Array) -> Array:
        part = prompt._attend_blocks(
            q, (k, v), None, stop, read=read, slots=12, block=5, logits=Logits(SCALE)
        )
        return jnp.sum(jnp.sin(part.out)) + jnp.sum(jnp.cos(part.lse))

    def plain(q: Array, k: Array, v: Array) -> Array:
        part = attend_part(q.reshape(B, K, G * T, D), k, v, mask, logits=Logits(SCALE))
        return jnp.sum(jnp.sin(part.out)) + jnp.sum(jnp.cos(part.lse))

    got, want = (
        jax.jit(jax.grad(f, (0, 1, 2)))(*map(jnp.asarray, (q, k, v))) for f in (blocks, plain)
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", ["attend_chunk", "attend_own"])
def test_the_form_beside_cudnn_gives_the_same_values_and_derivatives(
    monkeypatch: pytest.MonkeyPatch, name: str, window: int | None
) -> None:
    q, k, v = draw(20)
    q = np.random.default_rng(3).normal(size=(B, K, G, 20, D)).astype(np.float32)
    if name == "attend_chunk":
        q = np.asarray(prompt.ungroup(jnp.asarray(q), q.dtype))
        k, v = np.moveaxis(k, 2, 1), np.moveaxis(v, 2, 1)
    attend = partial(getattr(prompt, name), logits=Logits(SCALE), window=window)

    def values_and_derivatives() -> tuple[np.ndarray, ...]:
        def first(*operands: Array) -> tuple[Array, Array]:
            found = jax.tree.leaves(attend(*operands))[0]
            return jnp.sum(found**2), found

        found, slopes = jax.jit(jax.grad(first, (0, 1, 2), has_aux=True))(q, k, v)[::-1]
        return (jax.jit(first)(q, k, v)[1], found, *slopes)

    plain = values_and_derivatives()
    # As in a process with a GPU, whose programs have a call of cuDNN beside plain JAX.
    monkeypatch.setattr(prompt, "takes_cudnn", lambda *_: True)
    monkeypatch.setattr(prompt, "PLAIN_BLOCK", 8)
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, *_, **__: q)
    part = PartialAttention(jnp.zeros((B, K, G * 20, D)), jnp.zeros((B, K, G * 20)))
    monkeypatch.setattr(prompt, "_cudnn", lambda *_, **__: part)
    for ours, theirs in zip(values_and_derivatives(), plain, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
