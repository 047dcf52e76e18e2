"""The forms that a program for a TPU has give what those of other platforms give."""

from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax import lax

from kvjax.numerics import blocks, platforms
from kvjax.numerics.partial import Logits
from kvjax.numerics.rotate import encode
from kvjax.numerics.selection import Selection
from kvjax.ops import attend, select
from kvjax.selectors.fier import Fier

# Each operation of a form that is not under jit would be a program for each shape.
write_slices = jax.jit(blocks._write_slices)
scatter_tokens = jax.jit(blocks._scatter_tokens)
top_by_places = jax.jit(select._top_by_places, static_argnums=1)


@given(
    rows=st.sampled_from([1, 3]),
    length=st.sampled_from([1, 3, 4, 12]),
    starts=st.lists(st.integers(0, 11), min_size=3, max_size=3),
    counts=st.lists(st.integers(0, 12), min_size=3, max_size=3),
)
def test_slices_write_what_a_scatter_writes(
    rows: int, length: int, starts: list[int], counts: list[int]
) -> None:
    rng = np.random.default_rng(0)
    kinds = ((3,), jnp.float32), ((), jnp.float32), ((3,), jnp.uint8)

    def arrays(tokens: int) -> list[np.ndarray]:
        shapes = [(rows, 2, tokens, *rest) for rest, _ in kinds]
        values = [100 * rng.random(size=shape) for shape in shapes]
        return [x.astype(dtype) for x, (_, dtype) in zip(values, kinds, strict=True)]

    buffers, news = arrays(9), arrays(length)
    start = np.array(starts[:rows], np.int32)
    count = np.minimum(np.array(counts[:rows], np.int32), length)
    for got, want in zip(
        write_slices(buffers, news, start, count),
        scatter_tokens(buffers, news, start, count),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


def scores_of(kind: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    normal = rng.normal(size=(2, 16400)).astype(np.float32)
    return {
        "distinct": normal,
        "many ties": np.round(normal),
        "all equal": np.full_like(normal, 3),
        "few valid": np.where(np.arange(16400) % 41 == 7, normal, -np.inf),
        "none valid": np.full_like(normal, -np.inf),
        "rising": np.sort(normal, axis=1),
        "falling": np.sort(normal, axis=1)[:, ::-1],
        "extreme": np.where(
            normal > 1, np.float32(3e38), np.where(normal < -1, -3e38, 0 * normal)
        ),
        "infinite": np.where(normal > 2, np.inf, normal),
    }[kind].astype(np.float32)


@pytest.mark.parametrize(
    "kind",
    [
        "distinct",
        "many ties",
        "all equal",
        "few valid",
        "none valid",
        "rising",
        "falling",
        "extreme",
        "infinite",
    ],
)
@pytest.mark.parametrize("k", [1, 600, 4096])
def test_top_by_places_is_top_k(kind: str, k: int) -> None:
    ranked = scores_of(kind)
    best, slots = top_by_places(ranked, k)
    want_best, want_slots = lax.top_k(ranked, k)
    np.testing.assert_array_equal(best, want_best)
    np.testing.assert_array_equal(slots, want_slots)


@pytest.mark.parametrize("places", [[0, 1, 2], [1, 3, 5, 7], [0, 2, 4, 8, 9], [5], []])
def test_places_taken_as_slices_are_those_of_a_gather(
    places: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = jnp.arange(2 * 3 * 10 * 4.0).reshape(2, 3, 10, 4)
    at = np.array(places, int)
    want = blocks.take_places(x, at)
    monkeypatch.setattr(blocks, "for_tpu", lambda tpu, others, *operands: tpu(*operands))
    np.testing.assert_array_equal(blocks.take_places(x, at), want)


def test_a_program_for_a_cpu_has_only_the_form_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platforms, "reaches_tpus", lambda: True)
    args = jnp.ones((1, 2, 8, 4)), jnp.ones((1, 2, 1, 4)), jnp.zeros(1, int), jnp.ones(1, int)
    programs = {
        platform: jax.jit(lambda *a: blocks.write(*a))
        .trace(*args)
        .lower(lowering_platforms=(platform,))
        .as_text()
        for platform in ("cpu", "tpu")
    }
    assert "scatter" in programs["cpu"]
    assert "dynamic_update_slice" not in programs["cpu"]
    assert "scatter" not in programs["tpu"]


@pytest.mark.parametrize("heads", [1, 2])
def test_pages_gathered_at_once_are_their_tokens(
    heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(2, 3, 24, size)), jnp.float32) for size in (8, 5))
    pages = jnp.asarray(rng.integers(0, 6, size=(2, 3, heads, 5)))
    slots = jnp.asarray(
        (np.asarray(pages)[..., None] * 4 + np.arange(4)).reshape(2, 3, heads, 20)
    )
    selection = Selection(slots, jnp.ones(slots.shape, bool))
    want = attend.gather_slots(k, v, selection)
    monkeypatch.setattr(attend, "for_tpu", lambda tpu, others, *operands: tpu(*operands))
    for got, same in zip(attend.gather_slots(k, v, selection, together=4), want, strict=True):
        np.testing.assert_array_equal(got, same)


@pytest.mark.parametrize(("tokens", "listed"), [(700, 90), (520, 520), (40, 7)])
def test_estimates_of_all_keys_are_those_of_the_listed(tokens: int, listed: int) -> None:
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, 2, 3, 64)).astype(np.float32)
    keys = jax.jit(encode)(rng.normal(size=(2, 2, tokens, 64)).astype(np.float32))
    slots = rng.integers(0, tokens + 3, size=(2, 2, 3, listed)).astype(np.int32)
    got, want = (
        jax.jit(partial(form, logits=Logits(0.3)))(q, keys, slots)
        for form in (select._rerank_all, select._rerank_blocks)
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.parametrize("page", [2, 32])
def test_pages_reduced_by_windows_are_those_of_an_axis(page: int, reduce) -> None:
    scores = jnp.asarray(np.random.default_rng(0).normal(size=(2, 1, 3, 6 * page)), jnp.float32)
    scores = scores.at[:, :, :, : 2 * page].set(-jnp.inf).at[0, 0, 0, -1].set(jnp.nan)
    selector = Fier(page=page, page_reduce=reduce)
    got, want = selector._of_windows(scores), selector._of_pages(scores)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
