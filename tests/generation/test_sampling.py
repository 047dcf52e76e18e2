"""The sampling laws. Draws are checked against numpy distributions, with fixed keys, so no test
is random.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.generation.sampling import Sampling, row_keys, sampling
from kvjax.generation.sampling import sample as draw_eagerly

DRAWS = 20_000
sample = jax.jit(draw_eagerly)


def draw_many(logits, settings, *, seed=0, draws=DRAWS):
    """Counts i64[V] of `draws` draws from logits f32[V]."""
    keys = jax.random.split(jax.random.key(seed), draws)
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (draws, len(logits)))
    tokens = np.asarray(sample(rows, keys, settings))
    return np.bincount(tokens, minlength=len(logits))


def softmax(x):
    e = np.exp(x - np.max(x))
    return e / e.sum()


def expected(logits, temperature, top_k=None, top_p=None, min_p=None):
    """The distribution by a plain loop over tokens in order of rank."""
    scores = np.asarray(logits, np.float64) / temperature
    order = sorted(range(len(scores)), key=lambda t: (-scores[t], t))
    alive = order if top_k is None else order[:top_k]
    if top_p is not None:
        share, kept, total = softmax(scores[alive]), [], 0.0
        for token, s in zip(alive, share, strict=True):
            if total < top_p or not kept:
                kept.append(token)
            total += s
        alive = kept
    if min_p is not None:
        share = softmax(scores[alive])
        alive = [t for t, s in zip(alive, share, strict=True) if s >= min_p * share.max()]
    out = np.zeros(len(scores))
    out[alive] = softmax(scores[alive])
    return out


LOGITS = np.array([0.3, 2.0, -1.0, 1.1, 1.9, -3.0, 0.0, 0.9], np.float32)


@pytest.mark.parametrize(
    "settings",
    [
        dict(temperature=1.0),
        dict(temperature=0.5),
        dict(temperature=3.0),
        dict(temperature=1.0, top_k=3),
        dict(temperature=1.0, top_k=1),
        dict(temperature=1.0, top_p=0.7),
        dict(temperature=1.0, top_p=1e-6),
        dict(temperature=1.0, min_p=0.25),
        dict(temperature=2.0, top_k=5, top_p=0.8, min_p=0.4),
    ],
    ids=str,
)
def test_draws_follow_the_filtered_distribution(settings):
    counts = draw_many(LOGITS, sampling(**settings))
    want = expected(LOGITS, **settings)
    assert np.all(counts[want == 0] == 0)
    alive = want > 0
    mean = want[alive] * DRAWS
    chi_squared = np.sum((counts[alive] - mean) ** 2 / mean)
    # 99.99 % of draws of the right distribution stay below this for up to 7 degrees of freedom.
    assert chi_squared < 30, (counts, mean)


def test_filters_run_in_the_order_temperature_top_k_top_p_min_p():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    counts = draw_many(logits, sampling(1.0, top_k=2, top_p=0.5))
    assert set(np.flatnonzero(counts)) == {
        0
    }  # .571 of what top-k left; of the whole it would be .4, and keep two
    counts = draw_many(logits, sampling(2.0, top_p=0.4))
    assert set(np.flatnonzero(counts)) == {
        0,
        1,
    }  # .325 when heated; unheated .4 would be enough alone


def test_greedy_takes_the_lower_of_equal_tokens():
    logits = jnp.array([[0.0, 5.0, 5.0, 1.0], [7.0, 7.0, 7.0, 7.0]])
    assert sample(logits, None, Sampling()).tolist() == [1, 0]


def test_top_k_keeps_exactly_k_of_equal_tokens_the_lower_ones():
    counts = draw_many(np.ones(6, np.float32), sampling(1.0, top_k=4))
    assert np.flatnonzero(counts).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "off", [dict(top_k=8), dict(top_k=10**12), dict(top_p=1.0), dict(min_p=0.0)], ids=str
)
def test_a_filter_that_keeps_everything_changes_no_draw(off):
    logits = jax.random.normal(jax.random.key(1), (64, 8))
    plain = sample(logits, jax.random.key(0), sampling(1.0))
    assert jnp.array_equal(sample(logits, jax.random.key(0), sampling(1.0, **off)), plain)


def test_a_tiny_temperature_is_greedy():
    logits = jax.random.normal(jax.random.key(1), (64, 50))
    cold = sample(logits, jax.random.key(0), sampling(1e-6))
    assert jnp.array_equal(cold, jnp.argmax(logits, -1))


def test_row_draw_ignores_other_rows_and_their_number():
    logits = jax.random.normal(jax.random.key(1), (4, 50))
    settings = sampling(1.0, top_k=20, top_p=0.9)
    key = jax.random.key(3)
    logits, run = np.asarray(logits), jax.jit(lambda logits, key: sample(logits, key, settings))
    all_rows = run(logits, key)
    others = np.where(np.arange(4)[:, None] == 2, logits, np.float32(-7.0))
    assert run(others, key)[2] == all_rows[2]
    np.testing.assert_array_equal(run(logits[:2], key), all_rows[:2])
    alone = run(logits[2:3], row_keys(key, 4)[2:3])
    assert alone[0] == all_rows[2]


@pytest.mark.parametrize("kind", ["rbg", "unsafe_rbg"])
def test_row_draw_ignores_other_rows_with_keys_of_any_kind(kind):
    logits = jax.random.normal(jax.random.key(0), (4, 300))
    keys = jax.random.split(jax.random.key(1, impl=kind), 4)
    run = jax.jit(lambda logits, keys: sample(logits, keys, sampling(1.0, top_k=50)))
    together = run(logits, keys)
    for row in range(4):
        one = slice(row, row + 1)
        np.testing.assert_array_equal(run(logits[one], keys[one])[0], together[row])
    assert (
        len(
            set(
                np.asarray(
                    sample(jnp.zeros((4, 300)), jax.random.key(1, impl=kind), sampling(1.0))
                ).tolist()
            )
        )
        > 1
    )


def test_rows_draw_differently_from_equal_logits():
    tokens = sample(jnp.zeros((32, 1000)), jax.random.key(0), sampling(1.0))
    assert len(set(tokens.tolist())) > 25


def test_settings_a_row_apply_to_their_row():
    logits = jnp.tile(jnp.asarray(LOGITS), (3, 1))
    mixed = sampling([0.0, 1.0, 2.0], top_k=[8, 1, 2])
    draws = {
        tuple(sample(logits, jax.random.key(seed), mixed).tolist()) for seed in range(40)
    }  # row 0 is greedy by temperature, row 1 by top_k, row 2 draws among two
    assert {d[:2] for d in draws} == {(1, 1)}
    assert {d[2] for d in draws} == {1, 4}


def test_new_values_compile_nothing():
    draw = jax.jit(lambda *args: sample(*args))  # a jit of its own, for its cache to be counted
    logits, key = jnp.zeros((2, 8)), jax.random.key(0)
    draw(logits, key, sampling(0.7, top_k=5, top_p=0.9, min_p=0.1))
    draw(logits, jax.random.key(9), sampling(1, top_k=7, top_p=1.0, min_p=0))
    assert draw._cache_size() == 1
    greedy = sample.lower(logits, None, Sampling()).as_text()
    assert "sort" not in greedy
    assert "threefry" not in greedy


def test_impossible_tokens_are_never_drawn():
    logits = np.array([-np.inf, 0.0, -np.inf, 1.0], np.float32)
    for settings in (sampling(1.0), sampling(5.0, top_k=3, top_p=0.99, min_p=0.01)):
        assert np.flatnonzero(draw_many(logits, settings, draws=2000)).tolist() == [1, 3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            dict(temperature=float("nan")),
            "temperature must be a finite number of at least 0, got nan",
        ),
        (dict(temperature=float("inf")), "temperature must be a finite number"),
        (dict(temperature=-0.1), "at least 0, got -0.1"),
        (dict(temperature="warm"), "temperature must be a number, got 'warm'"),
        (dict(temperature=[[0.1]]), "temperature must be one number or one per row"),
        (dict(temperature=1.0, top_k=0), "top_k must be at least 1, got 0"),
        (dict(temperature=1.0, top_k=2.5), "top_k must be an integer, got 2.5"),
        (dict(temperature=1.0, top_k=True), "top_k must be an integer, got True"),
        (dict(temperature=1.0, top_p=0.0), r"top_p must be in \(0, 1\], got 0.0"),
        (dict(temperature=1.0, top_p=float("nan")), r"top_p must be in \(0, 1\], got nan"),
        (dict(temperature=1.0, min_p=1.0), r"min_p must be in \[0, 1\), got 1.0"),
        (
            dict(temperature=0.0, top_p=7.0),
            "top_p must be in",
        ),  # checked although greedy drops it
    ],
    ids=str,
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        sampling(**settings)


def test_bad_keys_and_shapes_are_named():
    logits = jnp.zeros((2, 8))
    with pytest.raises(ValueError, match="needs a key"):
        sample(logits, None, sampling(1.0))
    with pytest.raises(ValueError, match=r"jax.random.key\(seed\), got uint32"):
        sample(logits, jax.random.PRNGKey(0), sampling(1.0))
    with pytest.raises(ValueError, match="one key or 2 keys"):
        sample(logits, jax.random.split(jax.random.key(0), 3), sampling(1.0))
    with pytest.raises(ValueError, match="temperature must be one number or 2"):
        sample(logits, jax.random.key(0), sampling([1.0, 1.0, 1.0]))
    with pytest.raises(ValueError, match=r"\[B, V\]"):
        sample(logits[0], None, Sampling())


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), -1.0, "0.7", True, np.float32(np.nan), np.array([1.0, -2.0])],
)
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "top_k"])
def test_the_type_refuses_what_its_builder_refuses(name, value):
    with pytest.raises(ValueError, match=name) as built:
        sampling(**{"temperature": 1.0, name: value})
    with pytest.raises(ValueError, match=name) as made:
        Sampling(**{name: value})
    assert str(made.value) == str(built.value)


def test_top_p_keeps_the_lower_of_equal_tokens():
    counts = draw_many(np.zeros(64, np.float32), sampling(1.0, top_p=0.245), draws=2000)
    assert np.flatnonzero(counts).tolist() == list(range(16))  # 15 of 64 hold less than .245


@pytest.mark.parametrize("shape", [(3,), (1, 1), (2, 1)])
def test_settings_of_another_shape_are_named_under_jit_too(shape):
    def draw(temperature):
        return sample(jnp.zeros((2, 8)), jax.random.key(0), Sampling(temperature=temperature))

    with pytest.raises(
        ValueError, match=r"temperature must be one number or 2, one for each row, got shape"
    ):
        jax.eval_shape(draw, jnp.ones(shape))
