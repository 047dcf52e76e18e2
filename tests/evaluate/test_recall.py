"""Measurements against numpy on small random data, and on cases whose answer is known."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from benchmarks.claims.live import capture_generated, take, windows
from kvjax import CacheSpec, Fifo, Full, LogSparse, Retrieval, models, presets
from kvjax.evaluate import recall
from kvjax.evaluate.capture import Live, LiveLayer, Recorded, capture, read
from kvjax.selectors import Exact, MinMaxPages
from tests.checkpoint import write_checkpoint

L, B, N, K, D, S = 2, 2, 4, 2, 16, 96
G, STEPS, ENDS = N // K, 4, (40, 96)
POSITIONS = np.concatenate([np.arange(end - STEPS, end) for end in ENDS])
BASE = Retrieval(
    selector=Exact(group_reduce="per_head"),
    budget=32,
    sink=4,
    local=6,
    demote=Fifo(leave=1),
    dense_below=0,
)
CHOSEN = 32 - 4 - 6


def _live(seed=0, positions=POSITIONS, shape=(B, N, K, S, D)):
    B, N, K, S, D = shape
    rng = np.random.default_rng(seed)

    def layer():
        q, k, v = (
            jnp.asarray(
                rng.normal(size=(B, rows, n, D) if rows != S else (B, n, S, D)).astype(
                    np.float32
                )
            )
            for rows, n in ((len(positions), N), (S, K), (S, K))
        )
        return LiveLayer(q * 2, k, v, D**-0.5, None)

    return Live((layer(), layer()), np.asarray(positions))


LIVE = _live()


@dataclass(frozen=True, kw_only=True)
class Worst(Exact):
    """Prefers the tokens that matter least."""

    def score(self, ix, q, *, logits):
        return -super().score(ix, q, logits=logits)


def _logits(layer, t, position):
    """f[B, N, position + 1] of step t, in float64."""
    q, k = np.asarray(layer.q, np.float64)[:, t], np.asarray(layer.k, np.float64)
    return np.stack(
        [
            (k[:, n // G, : position + 1] @ q[:, n, :, None])[..., 0] * layer.scale
            for n in range(N)
        ],
        axis=1,
    )


def _softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def _by_hand(live, sign):
    """recall, mass and error of each query head, if each selects its own top tokens by sign *
    logit.
    """
    found = []
    for layer in live.layers:
        v = np.asarray(layer.v, np.float64)
        for t, position in enumerate(live.positions):
            logits = _logits(layer, t, position)
            weights, length = _softmax(logits), position + 1
            for b, n in np.ndindex(B, N):
                free = np.arange(4, length - 6)
                ranked = free[np.argsort(-logits[b, n, free])]
                picked = (ranked if sign > 0 else ranked[::-1])[:CHOSEN]
                kept = np.concatenate([np.arange(4), picked, np.arange(length - 6, length)])
                part = _softmax(logits[b, n, kept]) @ v[b, n // G, kept]
                whole = weights[b, n] @ v[b, n // G, :length]
                recall = len(set(picked) & set(ranked[:CHOSEN])) / min(CHOSEN, len(free))
                error = np.linalg.norm(part - whole) / np.linalg.norm(whole)
                found.append((recall, weights[b, n, kept].sum(), error))
    return np.array(found).reshape(len(live.layers), len(live.positions), B, N, 3)


# -------------------------------------------------------------------------------------------------------------- capture


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("measured") / "model")


@pytest.fixture(scope="module")
def checkpoint(directory):
    return models.load(directory, dtype="float32")


TOKENS = np.random.default_rng(1).integers(0, 256, size=(2, 40))


def test_captured_queries_and_keys_are_those_of_a_plain_forward_pass(checkpoint, monkeypatch):
    live = capture(checkpoint, TOKENS, lengths=(20, 40), steps=3)
    seen = []

    def spy(cache, q, k, v, **settings):
        seen.append((q, k, v))
        return kvjax.attention_info(cache, q, k, v, **settings)

    monkeypatch.setattr("kvjax.models.decoder.attention_info", spy)
    plain = jax.jit(lambda model, tokens: (model(tokens), list(seen))[1])(
        checkpoint.model, TOKENS
    )
    assert live.positions.tolist() == [17, 18, 19, 37, 38, 39]
    assert len(plain) == len(live.layers)
    for layer, (q, k, v) in zip(live.layers, plain, strict=True):
        np.testing.assert_allclose(layer.q, q[:, live.positions], rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(layer.k, jnp.swapaxes(k, 1, 2), rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(layer.v, jnp.swapaxes(v, 1, 2), rtol=2e-5, atol=2e-5)
        assert (layer.scale, layer.window) == (pytest.approx(q.shape[-1] ** -0.5), None)


@pytest.mark.thorough
def test_queries_of_a_generation_are_those_of_the_text_that_it_wrote(checkpoint):
    live, written = capture_generated(checkpoint, TOKENS[:1, :16], steps=4)
    text = np.concatenate([TOKENS[:1, :16], written], axis=1)
    forced = capture(checkpoint, text, lengths=(20,), steps=4)
    assert live.positions.tolist() == forced.positions.tolist() == [16, 17, 18, 19]
    for a, b in zip(live.layers, forced.layers, strict=True):
        np.testing.assert_allclose(a.q, b.q, atol=2e-5)
        np.testing.assert_allclose(a.k, b.k, atol=2e-5)


def test_a_row_that_took_no_token_records_no_query():
    spec = CacheSpec(batch=2, q_heads=2, kv_heads=1, head_dim=8, capacity=8, dtype="float32")
    cache = kvjax.init_layer(Recorded(steps=4), spec)
    q, k = jnp.ones((2, 1, 2, 8)), jnp.ones((2, 1, 1, 8))
    step = jax.jit(kvjax.attention, static_argnames="window")
    _, cache = kvjax.prefill(cache, *(jnp.ones((2, 2, n, 8)) for n in (2, 1, 1)))
    for active in (
        (True, False),
        (True, True),
        (True, True),
    ):  # the first step of a row may be one that it skips
        _, cache = step(cache, q, k, k, active=np.array(active), window=4)
    assert np.asarray(cache.state.positions).tolist() == [[2, 3, 4, -1], [2, 3, -1, -1]]
    with pytest.raises(ValueError, match=r"the same steps.*\[3, 2\]"):
        read(kvjax.Cache((cache,)))
    one = jax.tree.map(lambda a: a[:1], cache)
    assert read(kvjax.Cache((one,))).layers[0].window == 4


@pytest.mark.parametrize(
    ("lengths", "steps", "message"),
    [
        ((20, 22), 3, "must be steps=3 or more"),
        ((3,), 3, "above 1"),
        ((41,), 3, "reach beyond the 40 tokens"),
    ],
)
def test_lengths_that_cannot_be_captured_are_refused(checkpoint, lengths, steps, message):
    with pytest.raises(ValueError, match=message):
        capture(checkpoint, TOKENS, lengths=lengths, steps=steps)


def test_steps_are_cut_into_runs_and_windows():
    live = _live(positions=[3, 4, 5, 9, 10])
    assert [live.positions[run].tolist() for run in live.runs(2)] == [[3, 4], [5], [9, 10]]
    assert windows(live, 2, 2).positions.tolist() == [3, 4, 9, 10]
    np.testing.assert_array_equal(take(live, [4]).layers[1].q[:, 0], live.layers[1].q[:, 4])
    with pytest.raises(ValueError, match="more than the 5 steps"):
        windows(live, 3, 2)


# ---------------------------------------------------------------------------------------------------------------- reads


@pytest.mark.sample(1)
@pytest.mark.parametrize(("selector", "sign"), [(Worst, -1), (Exact, 1)])
def test_recall_mass_and_error_are_those_of_numpy(selector, sign):
    seen = recall.reads(LIVE, replace(BASE, selector=selector(group_reduce="per_head")))
    wanted = _by_hand(LIVE, sign)
    for i, kind in enumerate(("recall", "mass", "error")):
        np.testing.assert_allclose(getattr(seen, kind), wanted[..., i], atol=2e-5, err_msg=kind)
    np.testing.assert_array_equal(seen.head_recall, seen.recall)
    assert (seen.recall == 1).all() == (sign > 0)
    assert (seen.attended == 32).all()
    assert {length: steps.stop for length, steps in seen.by_length().items()} == {40: 4, 96: 8}


def test_a_pooled_choice_has_all_of_its_own_top_tokens_and_fewer_of_each_heads():
    seen = recall.reads(LIVE, replace(BASE, selector=Exact(group_reduce="mean_score")))
    assert seen.recall.shape == (L, len(POSITIONS), B, K)
    assert (seen.recall == 1).all()
    assert 0.3 < seen.head_recall.mean() < 0.95
    for layer, (t, position) in ((0, (0, 36)), (1, (7, 95))):
        mean = _logits(LIVE.layers[layer], t, position).reshape(B, K, G, -1).mean(axis=2)
        free = np.arange(4, position + 1 - 6)
        picked = free[np.argsort(-mean[1, 0, free])][:CHOSEN]
        own = free[np.argsort(-_logits(LIVE.layers[layer], t, position)[1, 1, free])][:CHOSEN]
        assert seen.head_recall[layer, t, 1, 1] == pytest.approx(
            len(set(picked) & set(own)) / min(CHOSEN, len(free))
        )


def test_tokens_in_another_order_than_they_came_are_known_by_their_positions():
    """A log-sparse block keeps old tokens beside new ones; the best of all are found, so all of
    the top is read.
    """
    seen = recall.reads(
        LIVE,
        replace(BASE, selector=Exact(group_reduce="mean_score"), demote=LogSparse(window=8)),
    )
    assert (seen.recall == 1).all()


@pytest.mark.thorough
def test_top_asks_for_another_number_of_tokens_than_was_chosen():
    seen = recall.reads(LIVE, replace(BASE, selector=Worst(group_reduce="mean_score")), top=5)
    # the worst 22 of them are chosen, so 5 best ones only where fewer than 27 are free
    free = POSITIONS + 1 - 10
    assert (seen.recall[:, free >= 27] == 0).all()


def test_a_selector_that_chooses_nothing_recalls_nothing():
    @dataclass(frozen=True, kw_only=True)
    class Blind(Exact):
        """Ranks no token."""

        def score(self, ix, q, *, logits):
            return jnp.full_like(super().score(ix, q, logits=logits), -jnp.inf)

    pages = replace(BASE, selector=MinMaxPages(page=16), demote=Fifo(leave=16), local=6)
    short = recall.reads(LIVE, replace(pages, budget=20))  # 10 tokens are left for pages of 16
    none = recall.reads(
        LIVE, replace(BASE, budget=10)
    )  # sink and window take it all: nothing to choose
    assert np.isnan(none.recall).all()
    assert np.isnan(none.head_recall).all()
    assert (short.recall < 1).all(), "a page that does not fit is no perfect choice"


def test_pages_that_cannot_fill_the_budget_do_not_have_all_of_the_top():
    pages = replace(
        BASE, selector=MinMaxPages(page=16), demote=Fifo(leave=16), budget=4 + 6 + 24
    )
    seen = recall.reads(LIVE, pages)
    assert seen.recall.max() <= 16 / 24 + 1e-6


def test_full_attention_has_no_error_and_no_choice_and_reads_everything():
    seen = recall.reads(LIVE, Full())
    assert np.abs(seen.error).max() < 1e-5
    assert np.isnan(seen.recall).all()
    np.testing.assert_array_equal(seen.bytes[0, :, 0], (POSITIONS + 1) * K * 2 * D * 4)
    assert np.isnan(seen.row()["mass"])


@pytest.mark.thorough
def test_bytes_read_are_keys_values_and_index_of_what_is_stored():
    policy = replace(BASE, selector=kvjax.Fier(group=8), demote=Fifo(leave=8))
    seen = recall.reads(LIVE, policy)
    history = (POSITIONS + 1 - 4 - 6) // 8 * 8  # whole chunks beyond the window
    index = history * K * D * (1 / 8 + 4 / 8)
    pending = (POSITIONS + 1 - 4 - 6 - history) * K * D * 4  # scored by their keys
    np.testing.assert_array_equal(seen.bytes[0, :, 0], 32 * K * 2 * D * 4 + index + pending)


def test_a_policy_that_needs_the_queries_of_a_prompt_is_refused():
    with pytest.raises(ValueError, match="queries of a prompt"):
        recall.reads(LIVE, presets.REGISTRY["snapkv"].make(budget=64))
