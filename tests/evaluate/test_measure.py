"""Measurements against numpy on small random data, and on cases whose answer is known."""

import json
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, Fifo, Full, LogSparse, Quantized, Retrieval, models, presets
from kvjax.evaluate import coverage, drift, figures, measure
from kvjax.evaluate.live import Live, LiveLayer, Recorded, capture, capture_generated, read
from kvjax.selectors import All, Exact
from tests.checkpoint import write_checkpoint

L, B, N, K, D, S = 2, 2, 4, 2, 16, 96
G, STEPS, ENDS = N // K, 4, (40, 96)
POSITIONS = np.concatenate([np.arange(end - STEPS, end) for end in ENDS])
BASE = Retrieval(
    selector=Exact(group_reduce="per_head"), budget=32, sink=4, local=6, demote=Fifo(leave=1), dense_below=0
)
CHOSEN = 32 - 4 - 6


def _live(seed=0, positions=POSITIONS, shape=(B, N, K, S, D)):
    B, N, K, S, D = shape
    rng = np.random.default_rng(seed)

    def layer():
        q, k, v = (
            jnp.asarray(rng.normal(size=(B, rows, n, D) if rows != S else (B, n, S, D)).astype(np.float32))
            for rows, n in ((len(positions), N), (S, K), (S, K))
        )
        return LiveLayer(q * 2, k, v, D**-0.5, None)

    return Live((layer(), layer()), np.asarray(positions))


LIVE = _live()


@dataclass(frozen=True, kw_only=True)
class Worst(Exact):
    """Prefers the tokens that matter least."""

    def score(self, ix, q, *, scale):
        return -super().score(ix, q, scale=scale)


def _logits(layer, t, position):
    """f[B, N, position + 1] of step t, in float64."""
    q, k = np.asarray(layer.q, np.float64)[:, t], np.asarray(layer.k, np.float64)
    return np.stack([(k[:, n // G, : position + 1] @ q[:, n, :, None])[..., 0] * layer.scale for n in range(N)], axis=1)


def _softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def _by_hand(live, sign):
    """recall, mass and error of each query head, when each chooses its own top tokens by sign * logit."""
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
    plain = jax.jit(lambda model, tokens: (model(tokens), list(seen))[1])(checkpoint.model, TOKENS)
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
    for active in ((True, True), (True, False), (True, True)):
        _, cache = step(cache, q, k, k, active=np.array(active), window=4)
    assert np.asarray(cache.state.positions).tolist() == [[0, 1, 2, -1], [0, 1, -1, -1]]
    with pytest.raises(ValueError, match=r"the same steps.*\[3, 2\]"):
        read(kvjax.Cache((cache,)))
    one = jax.tree.map(lambda a: a[:1], cache)
    assert read(kvjax.Cache((one,))).layers[0].window == 4


@pytest.mark.parametrize(
    ("lengths", "steps", "message"),
    [((20, 22), 3, "must be steps=3 or more"), ((3,), 3, "above 1"), ((41,), 3, "reach beyond the 40 tokens")],
)
def test_lengths_that_cannot_be_captured_are_refused(checkpoint, lengths, steps, message):
    with pytest.raises(ValueError, match=message):
        capture(checkpoint, TOKENS, lengths=lengths, steps=steps)


def test_steps_are_cut_into_runs_and_windows():
    live = _live(positions=[3, 4, 5, 9, 10])
    assert [live.positions[run].tolist() for run in live.runs(2)] == [[3, 4], [5], [9, 10]]
    assert live.windows(2, 2).positions.tolist() == [3, 4, 9, 10]
    np.testing.assert_array_equal(live.take([4]).layers[1].q[:, 0], live.layers[1].q[:, 4])
    with pytest.raises(ValueError, match="more than the 5 steps"):
        live.windows(3, 2)


# ---------------------------------------------------------------------------------------------------------------- reads


@pytest.mark.sample(1)
@pytest.mark.parametrize(("selector", "sign"), [(Worst, -1), (Exact, 1)])
def test_recall_mass_and_error_are_those_of_numpy(selector, sign):
    seen = measure.reads(LIVE, replace(BASE, selector=selector(group_reduce="per_head")))
    wanted = _by_hand(LIVE, sign)
    for i, kind in enumerate(("recall", "mass", "error")):
        np.testing.assert_allclose(getattr(seen, kind), wanted[..., i], atol=2e-5, err_msg=kind)
    np.testing.assert_array_equal(seen.head_recall, seen.recall)
    assert (seen.recall == 1).all() == (sign > 0)
    assert (seen.attended == 32).all()
    assert {length: steps.stop for length, steps in seen.by_length().items()} == {40: 4, 96: 8}


def test_a_pooled_choice_has_all_of_its_own_top_tokens_and_fewer_of_each_heads():
    seen = measure.reads(LIVE, replace(BASE, selector=Exact(group_reduce="mean_score")))
    assert seen.recall.shape == (L, len(POSITIONS), B, K)
    assert (seen.recall == 1).all()
    assert 0.3 < seen.head_recall.mean() < 0.95
    for layer, (t, position) in ((0, (0, 36)), (1, (7, 95))):
        mean = _logits(LIVE.layers[layer], t, position).reshape(B, K, G, -1).mean(axis=2)
        free = np.arange(4, position + 1 - 6)
        picked = free[np.argsort(-mean[1, 0, free])][:CHOSEN]
        own = free[np.argsort(-_logits(LIVE.layers[layer], t, position)[1, 1, free])][:CHOSEN]
        assert seen.head_recall[layer, t, 1, 1] == pytest.approx(len(set(picked) & set(own)) / min(CHOSEN, len(free)))


@pytest.mark.thorough
def test_top_asks_for_another_number_of_tokens_than_was_chosen():
    seen = measure.reads(LIVE, replace(BASE, selector=Worst(group_reduce="mean_score")), top=5)
    free = POSITIONS + 1 - 10  # the worst 22 of them are chosen, so 5 best ones only where fewer than 27 are free
    assert (seen.recall[:, free >= 27] == 0).all()


def test_full_attention_has_no_error_and_no_choice_and_reads_everything():
    seen = measure.reads(LIVE, Full())
    assert np.abs(seen.error).max() < 1e-5
    assert np.isnan(seen.recall).all()
    np.testing.assert_array_equal(seen.bytes[0, :, 0], (POSITIONS + 1) * K * 2 * D * 4)
    assert np.isnan(seen.row()["mass"])


@pytest.mark.thorough
def test_bytes_read_are_keys_values_and_index_of_what_is_stored():
    policy = replace(BASE, selector=kvjax.Fier(group=8), demote=Fifo(leave=8))
    seen = measure.reads(LIVE, policy)
    history = (POSITIONS + 1 - 4 - 6) // 8 * 8  # whole chunks beyond the window
    index = history * K * D * (1 / 8 + 4 / 8)
    np.testing.assert_array_equal(seen.bytes[0, :, 0], 32 * K * 2 * D * 4 + index)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.thorough) for n in measure.selectors(64)])
def test_a_budget_of_everything_loses_nothing(name):
    policy = replace(measure.selectors(64)[name], budget=20 + 96)
    seen = measure.reads(LIVE, policy)
    assert (seen.recall == 1).all()
    assert seen.mass.min() > 1 - 1e-5
    assert seen.error.max() < 1e-4


def test_a_policy_that_needs_the_queries_of_a_prompt_is_refused():
    with pytest.raises(ValueError, match="queries of a prompt"):
        measure.reads(LIVE, presets.REGISTRY["snapkv"].make(budget=64))


@pytest.mark.thorough
@pytest.mark.parametrize("cases", [measure.selectors(64), measure.groups(64, sizes=(8, 16)), measure.pools(64)])
def test_every_case_to_compare_runs_and_selects_better_than_chance(cases):
    for name, seen in measure.compare(LIVE, cases).items():
        last = seen.recall[:, -STEPS:]  # 44 of 76 free tokens, or whole pages
        assert last.mean() > 0.62, name
        json.dumps(seen.summary())


# ---------------------------------------------------------------------------------------------------------------- turns


def test_cosines_of_adjacent_queries_are_those_of_numpy_and_skip_gaps():
    seen = measure.turns(LIVE)
    assert seen.cosines.shape == (L, 2 * (STEPS - 1), B, K)
    q = np.asarray(LIVE.layers[1].q, np.float64)
    pairs = [(a, a + 1) for a in (0, 1, 2, 4, 5, 6)]
    for i, (a, b) in enumerate(pairs):
        for row, head in np.ndindex(B, K):
            each = [
                q[row, a, n] @ q[row, b, n] / np.linalg.norm(q[row, a, n]) / np.linalg.norm(q[row, b, n])
                for n in (G * head, G * head + 1)
            ]
            assert seen.cosines[1, i, row, head] == pytest.approx(np.mean(each), abs=1e-5)


def test_equal_queries_never_correct_and_tau_beyond_the_cosines_decides_alone():
    still = Live(tuple(replace(a, q=jnp.ones_like(a.q)) for a in LIVE.layers), LIVE.positions)
    np.testing.assert_allclose(measure.turns(still).cosines, 1.0, atol=1e-6)
    assert measure.turns(still).corrected(0.99) == (0, 0)
    turned = measure.turns(LIVE)
    assert turned.corrected(-1.01) == (0, 0)
    assert turned.corrected(1.01) == (1, 1)
    heads, steps = turned.corrected(0.0)
    assert heads == (turned.cosines < 0).mean()
    assert steps == (turned.cosines.min(axis=-1) < 0).mean() > heads
    with pytest.raises(ValueError, match="steps=2 or more"):
        measure.turns(LIVE.take([0, 4]))


# ------------------------------------------------------------------------------------------------------------- coverage


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "policy",
    [
        Retrieval(selector=All(), budget=None, sink=0, local=5, demote=LogSparse(window=5)),
        Retrieval(selector=All(), budget=None, sink=3, local=4, demote=Fifo(leave=6)),
    ],
)
def test_exact_tokens_are_those_of_the_cache(policy):
    spec = CacheSpec(batch=1, q_heads=1, kv_heads=1, head_dim=8, capacity=60, dtype="float32")
    cache = kvjax.init_layer(policy, spec)
    step = jax.jit(kvjax.attention)
    for position in range(50):
        token = jnp.full((1, 1, 1, 8), float(position))
        _, cache = step(cache, token, token, token)
        st = cache.state
        zones = [st.recent] if st.sink is None else [st.sink, st.recent]
        held = np.concatenate([np.asarray(zone.v)[0, 0, : int(zone.count[0]), 0] for zone in zones])
        assert coverage.exact_tokens(policy, position + 1).tolist() == sorted(held.tolist())


LOGSPARSE = Retrieval(
    selector=All(),
    store=Quantized(bits=2, key_group=6, value_group=8),
    budget=None,
    sink=0,
    local=6,
    demote=LogSparse(window=6),
)


@pytest.mark.thorough
def test_error_of_quantised_tokens_is_that_of_the_cache_itself():
    kept = coverage.keep(LIVE, coverage.of_policy(LOGSPARSE), LOGSPARSE)
    seen = measure.reads(LIVE, LOGSPARSE)
    np.testing.assert_allclose(kept.error, seen.error, atol=2e-5)
    assert kept.error.min() > 1e-3
    assert kept.exact.tolist() == [len(coverage.exact_tokens(LOGSPARSE, p + 1)) for p in POSITIONS]


def test_coverage_of_dropped_tokens_is_that_of_numpy():
    kept = coverage.keep(LIVE, coverage.newest(LOGSPARSE, sink=2), None)
    for t, position in enumerate(POSITIONS):
        count = len(coverage.exact_tokens(LOGSPARSE, position + 1))
        exact = np.concatenate([[0, 1], np.arange(position + 1 - (count - 2), position + 1)])
        weights = _softmax(_logits(LIVE.layers[1], t, position))[1, 3]
        best = np.argsort(-weights)[:count]
        values = np.asarray(LIVE.layers[1].v, np.float64)[1, 1]
        part = weights[exact] / weights[exact].sum()
        off = part @ values[exact] - weights @ values[: position + 1]
        apart = 2 * (1 - weights[exact].sum())  # what the others lose, and these gain
        wanted = {
            "mass": weights[exact].sum(),
            "mass_past_sinks": weights[exact[2:]].sum() / weights[2:].sum(),
            "top": len(set(best) & set(exact)) / count,
            "weights": apart,
            "outputs": np.abs(off).sum(),
        }
        for kind, value in wanted.items():
            assert getattr(kept, kind)[1, t, 1, 3] == pytest.approx(value, abs=2e-5), kind


def test_everything_exact_covers_all_and_loses_nothing():
    everything = replace(LOGSPARSE, demote=LogSparse(window=40))
    kept = coverage.keep(LIVE, coverage.of_policy(everything), None)
    for kind, value in (("mass", 1), ("mass_past_sinks", 1), ("top", 1), ("weights", 0), ("outputs", 0)):
        np.testing.assert_allclose(getattr(kept, kind), value, atol=1e-5)
    assert kept.exact.tolist() == (POSITIONS + 1).tolist()


@pytest.mark.thorough
def test_heavy_tokens_are_those_that_recent_queries_attended_to():
    """One token draws all attention: the window has lost it, and the choice by recent attention finds it."""
    layer = LIVE.layers[0]
    loud = replace(layer, q=jnp.ones_like(layer.q), k=jnp.zeros_like(layer.k).at[:, :, 10].set(4.0))
    live = Live((loud,), POSITIONS).take(np.arange(4, 8))
    assert coverage.keep(live, coverage.newest(LOGSPARSE), None).mass.max() < 0.01
    found = coverage.keep(live, coverage.heavy(LOGSPARSE), None)
    assert found.mass[:, 1:].min() > 0.99
    assert (found.exact == coverage.keep(live, coverage.newest(LOGSPARSE), None).exact).all()


@pytest.mark.thorough
def test_fewer_bits_lose_more_and_dropping_loses_most():
    found = {name: kept.row() for name, kept in coverage.logquant(_live(2), window=8).items()}
    for pattern in ("log-sparse", "window"):
        errors = [found[f"{pattern}, {what}"]["outputs"] for what in ("4 bits", "2 bits", "drop")]
        assert errors == sorted(errors)
        assert found[f"{pattern}, 4 bits"]["mass"] == found[f"{pattern}, drop"]["mass"]


# ---------------------------------------------------------------------------------------------------------------- drift


def test_k_means_finds_clusters_and_leaves_out_what_is_not_valid():
    rng = np.random.default_rng(0)
    middles = np.array([[0, 0], [9, 0], [0, 9], [9, 9]], np.float32)
    points = np.concatenate([middles[rng.integers(0, 4, 60)], np.full((20, 2), 1e6, np.float32)])
    points[:4] = middles  # evenly spaced starts cannot be relied on; these are there at least
    valid = np.arange(80) < 60
    found = drift.k_means(jnp.asarray(points)[None, None], jnp.asarray(valid), centroids=16, rounds=4)[0, 0]
    far = np.linalg.norm(points[:60, None] - np.asarray(found)[None], axis=-1).min(axis=1)
    assert far.max() < 1e-5


def _index(selector, keys, prompt):
    """Index of keys [B, K, S, D], the first `prompt` in one call."""
    spec = CacheSpec(batch=B, q_heads=N, kv_heads=K, head_dim=D, capacity=S, dtype="float32")
    append = jax.jit(selector.append)
    ix = append(selector.init(spec, S), keys, np.full(B, 0), np.full(B, prompt))
    return append(ix, np.roll(keys, -prompt, axis=2), np.full(B, prompt), np.full(B, S - prompt))


def test_learnt_products_are_exact_with_a_centroid_for_each_key_and_old_centroids_serve_new_keys():
    layer, selector = LIVE.layers[0], drift.Learnt(bits=7)
    q = layer.q[:, 0].reshape(B, K, G, D)
    exact = np.einsum("bkgd,bksd->bkgs", q, layer.k) * 0.25
    score = jax.jit(selector.score, static_argnames="scale")
    anew = score(_index(selector, layer.k, S), q, scale=0.25)
    np.testing.assert_allclose(anew, exact, atol=1e-5)
    old = np.asarray(score(_index(selector, layer.k, 48), q, scale=0.25))
    np.testing.assert_allclose(old[..., :48], exact[..., :48], atol=1e-5)
    assert np.abs(old[..., 48:] - exact[..., 48:]).mean() > 0.05
    keys = np.asarray(layer.k, np.float64).reshape(B, K, S, 2, 8)  # new keys read as the nearest old one, by subspace
    apart = ((keys[:, :, 90, None] - keys[:, :, :48]) ** 2).sum(axis=-1)  # [B, K, 48, 2]
    near = np.take_along_axis(keys[:, :, :48], apart.argmin(axis=2)[:, :, None, :, None], axis=2)
    wanted = np.einsum("bkgd,bkd->bkg", q, near.reshape(B, K, D)) * 0.25
    np.testing.assert_allclose(old[..., 90], wanted, atol=1e-5)


@pytest.mark.thorough
def test_learnt_votes_are_those_of_numpy():
    layer, selector = LIVE.layers[1], drift.Learnt(bits=3, by="votes", rho=0.5)
    ix, q = _index(selector, layer.k, S), np.asarray(layer.q[:, 2], np.float64).reshape(B, K, G, 2, 8)
    score = jax.jit(selector.score, static_argnames="scale")
    votes = np.asarray(score(ix, layer.q[:, 2].reshape(B, K, G, D), scale=1.0))
    centroids, ids = np.asarray(ix.centroids, np.float64), np.asarray(ix.ids)
    reach = np.ceil(S * 0.5 * np.array([0.05, 0.15, 0.3, 0.5, 0.75, 1.0]))
    for b, k, g in np.ndindex(B, K, G):
        worth = centroids[b, k] @ q[b, k, g][..., None]  # [2, C, 1]
        of_key = np.take_along_axis(worth[..., 0], ids[b, k].T, axis=1)  # [2, S]
        better = (of_key[:, None] > of_key[:, :, None]).sum(axis=-1)
        np.testing.assert_array_equal(votes[b, k, g], (better[..., None] < reach).sum(axis=(0, 2)))


@pytest.mark.thorough
def test_recall_of_learnt_centroids_falls_when_keys_move_and_not_when_learnt_anew():
    live = _live(3, positions=[199, 398, 399], shape=(1, 4, 2, 400, 16))
    moved = tuple(replace(a, k=a.k.at[:, :, 200:].multiply(3.0).at[:, :, 200:].add(4.0)) for a in live.layers)
    found = drift.drift(Live(moved, live.positions), prompt=199, candidates=150)
    recall = {name: seen.recall[:, 1:].mean() for name, seen in found.items()}
    assert recall["k-means, prompt"] < recall["k-means, anew"] - 0.05
    assert recall["PQCache, prompt"] < recall["PQCache, anew"]
    assert recall["Paris, all reranked"] > 0.85
    assert set(drift.ablation(live)) >= {"as published", "no alpha-correction", "candidates 0.25"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"bits": 9}, "at most 8 bits"), ({"by": "sum"}, "products, votes"), ({"channels": 0}, "at least 1")],
)
def test_learnt_refuses_what_it_cannot_do(settings, message):
    with pytest.raises(ValueError, match=message):
        drift.Learnt(**settings)


# -------------------------------------------------------------------------------------------------- figures and command


def _fake(seed=0):
    rng = np.random.default_rng(seed)
    a = rng.random((L, len(POSITIONS), B, N))
    return measure.Reads(POSITIONS + 1, a, a, a, a, a[..., :K], a[..., 0])


def test_figures_have_named_axes_and_all_that_was_measured():
    found = {"Fier": _fake(), "Quest": _fake(1)}
    kept = coverage.Kept(POSITIONS + 1, POSITIONS, *(_fake().mass,) * 6)
    drifted = {name: _fake() for name in ("Paris", "Paris, candidates", "k-means, prompt", "k-means, anew")}
    made = {
        "by_length": figures.by_length(found),
        "maps": figures.maps(found),
        "dots": figures.dots(found, ("recall", "mass")),
        "coverage": figures.dots({"log-sparse": kept}, ("mass", "outputs")),
        "turning": figures.turning(measure.turns(LIVE)),
        "drifting": figures.drifting(drifted, prompt=30),
    }
    for name, figure in made.items():
        plots = [axis for axis in figure.axes if axis.get_label() != "<colorbar>"]
        assert plots, name
        assert all(axis.get_xlabel() for axis in plots), name
    heat = made["maps"].axes[0].images[0].get_array()
    np.testing.assert_allclose(heat, found["Fier"].head_recall.mean(axis=(1, 2)))
    lines = made["drifting"].axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["Paris", "k-means, prompt", "k-means, anew"]
    assert lines[0].get_xdata().tolist() == [40 - 30, 96 - 30]


def _measure(*args):
    from kvjax.cli import main

    return main(["measure", *map(str, args)])


@pytest.mark.thorough
def test_command_writes_table_json_and_plot(directory, tmp_path, capsys):
    book = tmp_path / "book.txt"
    book.write_text("It was a bright cold day in April. " * 10)
    out = tmp_path / "out"
    assert (
        _measure(directory, "--text", book, "--what", "queries", "--length", "20,40", "--steps", 3, "--out", out) == 0
    )
    content = json.loads((out / "measure_queries.json").read_text())
    assert content["lengths"] == [20, 40]
    assert len(content["results"]["cosine of adjacent queries"]["cosine_by_layer"]) == 3
    assert content["versions"]["jax"] == jax.__version__
    assert "<svg" in (out / "measure_queries.svg").read_text()
    table = (out / "measure_queries.md").read_text()
    assert table in capsys.readouterr().out
    assert table.startswith("| tau | heads corrected |")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--what", "recal"), "'recal' must be of recall, groups"),
        (("--length", "4k,x"), "--length 'x' must be numbers of tokens"),
        (("--text", "nowhere.txt"), "nowhere.txt is not a file"),
        pytest.param(
            ("--length", "10000"), "fewer than --length 10000", marks=pytest.mark.thorough
        ),  # reads a tokenizer
    ],
)
def test_command_says_what_was_wrong(directory, tmp_path, capsys, options, message):
    book = tmp_path / "book.txt"
    book.write_text("x" * 50)
    assert _measure(directory, "--text", book, *options) == 1
    assert message in capsys.readouterr().err


@pytest.mark.thorough
def test_command_runs_every_measurement(directory, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("It was a bright cold day in April, and the clocks were striking thirteen. " * 5)
    sizes = ("--length", "150,200", "--steps", 4, "--budget", 64, "--new-tokens", 16, "--window", 8)
    assert _measure(directory, "--text", book, "--what", "all", *sizes, "--out", tmp_path) == 0
    for what in ("recall", "groups", "pools", "queries", "logquant", "drift", "paris"):
        content = json.loads((tmp_path / f"measure_{what}.json").read_text())
        assert content["results"]
        assert (tmp_path / f"measure_{what}.svg").stat().st_size > 1000
