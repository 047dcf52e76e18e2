"""Claims of papers: coverage, drift, turning queries and their figures, against numpy on small
random data.
"""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from benchmarks.claims import coverage, drift, figures, queries
from benchmarks.claims.__main__ import main
from benchmarks.claims.groups import compare, group_reduces, groups, selectors
from benchmarks.claims.live import summary, take
from kvjax import CacheSpec, Compressed, Dense, Fifo, LogSparse, Quantized
from kvjax.evaluate import recall
from kvjax.evaluate.capture import Live
from kvjax.numerics.partial import Logits
from kvjax.numerics.rotate import radius_table, rotate
from kvjax.selectors import Paris
from tests.checkpoint import write_checkpoint
from tests.evaluate.test_recall import (
    LIVE,
    POSITIONS,
    STEPS,
    B,
    D,
    G,
    K,
    L,
    N,
    S,
    _live,
    _logits,
    _softmax,
    directory,  # noqa: F401
)

# ---------------------------------------------------------------------------------------------------------------- turns


def test_cosines_of_adjacent_queries_are_those_of_numpy_and_skip_gaps():
    seen = queries.turns(LIVE)
    assert seen.cosines.shape == (L, 2 * (STEPS - 1), B, K)
    q = np.asarray(LIVE.layers[1].q, np.float64)
    pairs = [(a, a + 1) for a in (0, 1, 2, 4, 5, 6)]
    for i, (a, b) in enumerate(pairs):
        for row, head in np.ndindex(B, K):
            each = [
                q[row, a, n]
                @ q[row, b, n]
                / np.linalg.norm(q[row, a, n])
                / np.linalg.norm(q[row, b, n])
                for n in (G * head, G * head + 1)
            ]
            assert seen.cosines[1, i, row, head] == pytest.approx(np.mean(each), abs=1e-5)


def test_equal_queries_never_correct_and_tau_beyond_the_cosines_decides_alone():
    still = Live(tuple(replace(a, q=jnp.ones_like(a.q)) for a in LIVE.layers), LIVE.positions)
    np.testing.assert_allclose(queries.turns(still).cosines, 1.0, atol=1e-6)
    assert queries.turns(still).corrected(0.99) == (0, 0)
    turned = queries.turns(LIVE)
    assert turned.corrected(-1.01) == (0, 0)
    assert turned.corrected(1.01) == (1, 1)
    heads, steps = turned.corrected(0.0)
    assert heads == (turned.cosines < 0).mean()
    assert steps == (turned.cosines.min(axis=-1) < 0).mean() > heads
    with pytest.raises(ValueError, match="steps=2 or more"):
        queries.turns(take(LIVE, [0, 4]))


def test_a_head_has_the_mean_of_its_runs_and_their_spread_as_error():
    seen = queries.turns(LIVE)
    np.testing.assert_array_equal(seen.runs, [0, 0, 0, 1, 1, 1])  # steps 0 to 3, and 4 to 7
    mean, error = seen.by_head()
    one, other = (seen.cosines[:, part].mean(axis=(1, 2)) for part in (slice(3), slice(3, 6)))
    np.testing.assert_allclose(mean, (one + other) / 2, rtol=1e-5)
    np.testing.assert_allclose(error, abs(one - other) / 2, rtol=1e-4, atol=1e-7)
    shown = seen.summary()
    np.testing.assert_allclose(shown["mean_by_head"], mean, atol=1e-5)
    np.testing.assert_allclose(shown["mean_by_head_stderr"], error, atol=1e-5)
    alone = queries.turns(take(LIVE, [0, 1, 2]))
    assert alone.summary()["mean_by_head_stderr"] is None


# ------------------------------------------------------------------------------------------------------------- coverage


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "policy",
    [
        Compressed(store=Dense(), local=5, demote=LogSparse(window=5)),
        Compressed(store=Dense(), sink=3, local=4, demote=Fifo(leave=6)),
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
        held = np.concatenate(
            [np.asarray(zone.v)[0, 0, : int(zone.count[0]), 0] for zone in zones]
        )
        assert coverage.exact_tokens(policy, position + 1).tolist() == sorted(held.tolist())


LOGSPARSE = Compressed(
    store=Quantized(bits=2, key_group=6, value_group=8),
    local=6,
    demote=LogSparse(window=6),
)


@pytest.mark.thorough
def test_error_of_quantised_tokens_is_that_of_the_cache_itself():
    kept = coverage.keep(LIVE, coverage.of_policy(LOGSPARSE), LOGSPARSE)
    seen = recall.reads(LIVE, LOGSPARSE)
    np.testing.assert_allclose(kept.error, seen.error, atol=2e-5)
    assert kept.error.min() > 1e-3
    assert kept.exact.tolist() == [
        len(coverage.exact_tokens(LOGSPARSE, p + 1)) for p in POSITIONS
    ]


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
    for kind, value in (
        ("mass", 1),
        ("mass_past_sinks", 1),
        ("top", 1),
        ("weights", 0),
        ("outputs", 0),
    ):
        np.testing.assert_allclose(getattr(kept, kind), value, atol=1e-5)
    assert kept.exact.tolist() == (POSITIONS + 1).tolist()


@pytest.mark.thorough
def test_heavy_tokens_are_those_that_recent_queries_attended_to():
    """One token draws all attention: the window has lost it, and selection by recent attention
    finds it.
    """
    layer = LIVE.layers[0]
    loud = replace(
        layer, q=jnp.ones_like(layer.q), k=jnp.zeros_like(layer.k).at[:, :, 10].set(4.0)
    )
    live = take(Live((loud,), POSITIONS), np.arange(4, 8))
    assert coverage.keep(live, coverage.newest(LOGSPARSE), None).mass.max() < 0.01
    found = coverage.keep(live, coverage.heavy(LOGSPARSE), None)
    assert found.mass[:, 1:].min() > 0.99
    assert (found.exact == coverage.keep(live, coverage.newest(LOGSPARSE), None).exact).all()


@pytest.mark.thorough
def test_fewer_bits_lose_more_and_dropping_loses_most():
    found = {name: kept.row() for name, kept in coverage.logquant(_live(2), window=8).items()}
    for pattern in ("log-sparse", "window"):
        errors = [
            found[f"{pattern}, {what}"]["outputs"] for what in ("4 bits", "2 bits", "drop")
        ]
        assert errors == sorted(errors)
        assert found[f"{pattern}, 4 bits"]["mass"] == found[f"{pattern}, drop"]["mass"]


# ---------------------------------------------------------------------------------------------------------------- drift


def test_k_means_finds_clusters_and_leaves_out_what_is_not_valid():
    rng = np.random.default_rng(0)
    middles = np.array([[0, 0], [9, 0], [0, 9], [9, 9]], np.float32)
    points = np.concatenate(
        [middles[rng.integers(0, 4, 60)], np.full((20, 2), 1e6, np.float32)]
    )
    points[:4] = middles  # evenly spaced starts cannot be relied on; these are there at least
    valid = np.arange(80) < 60
    found = drift.k_means(
        jnp.asarray(points)[None, None], jnp.asarray(valid), centroids=16, rounds=4
    )[0, 0]
    far = np.linalg.norm(points[:60, None] - np.asarray(found)[None], axis=-1).min(axis=1)
    assert far.max() < 1e-5


def _index(selector, keys, prompt):
    """Index of keys [B, K, S, D], the first `prompt` in one call."""
    spec = CacheSpec(batch=B, q_heads=N, kv_heads=K, head_dim=D, capacity=S, dtype="float32")
    append = jax.jit(selector.append)
    ix = append(selector.init(spec, S), keys, np.full(B, 0), np.full(B, prompt))
    return append(
        ix, np.roll(keys, -prompt, axis=2), np.full(B, prompt), np.full(B, S - prompt)
    )


def test_learnt_products_are_exact_with_a_centroid_for_each_key_and_old_centroids_serve_new_keys():
    layer, selector = LIVE.layers[0], drift.Learnt(bits=7)
    q = layer.q[:, 0].reshape(B, K, G, D)
    exact = np.einsum("bkgd,bksd->bkgs", q, layer.k) * 0.25
    score = jax.jit(selector.score, static_argnames="logits")
    anew = score(_index(selector, layer.k, S), q, logits=Logits(0.25))
    np.testing.assert_allclose(anew, exact, atol=1e-5)
    old = np.asarray(score(_index(selector, layer.k, 48), q, logits=Logits(0.25)))
    np.testing.assert_allclose(old[..., :48], exact[..., :48], atol=1e-5)
    assert np.abs(old[..., 48:] - exact[..., 48:]).mean() > 0.05
    keys = np.asarray(layer.k, np.float64).reshape(
        B, K, S, 2, 8
    )  # new keys read as the nearest old one, by subspace
    apart = ((keys[:, :, 90, None] - keys[:, :, :48]) ** 2).sum(axis=-1)  # [B, K, 48, 2]
    near = np.take_along_axis(
        keys[:, :, :48], apart.argmin(axis=2)[:, :, None, :, None], axis=2
    )
    wanted = np.einsum("bkgd,bkd->bkg", q, near.reshape(B, K, D)) * 0.25
    np.testing.assert_allclose(old[..., 90], wanted, atol=1e-5)


@pytest.mark.thorough
def test_learnt_votes_are_those_of_numpy():
    layer, selector = LIVE.layers[1], drift.Learnt(bits=3, by="votes", rho=0.5)
    ix, q = (
        _index(selector, layer.k, S),
        np.asarray(layer.q[:, 2], np.float64).reshape(B, K, G, 2, 8),
    )
    score = jax.jit(selector.score, static_argnames="logits")
    votes = np.asarray(score(ix, layer.q[:, 2].reshape(B, K, G, D), logits=Logits(1.0)))
    centroids, ids = np.asarray(ix.centroids, np.float64), np.asarray(ix.ids)
    reach = np.ceil(S * 0.5 * np.array([0.05, 0.15, 0.3, 0.5, 0.75, 1.0]))
    for b, k, g in np.ndindex(B, K, G):
        worth = centroids[b, k] @ q[b, k, g][..., None]  # [2, C, 1]
        of_key = np.take_along_axis(worth[..., 0], ids[b, k].T, axis=1)  # [2, S]
        better = (of_key[:, None] > of_key[:, :, None]).sum(axis=-1)
        np.testing.assert_array_equal(
            votes[b, k, g], (better[..., None] < reach).sum(axis=(0, 2))
        )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"directions": 16},
        pytest.param({"radii": 16}, marks=pytest.mark.thorough),
        pytest.param({"normalise": False, "seed": None}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_votes_by_other_centroids_are_those_of_numpy_and_by_default_those_of_paris(settings):
    layer, selector = LIVE.layers[1], drift.Voting(**settings)
    ix, q = (
        _index(selector, layer.k, S),
        np.asarray(layer.q[:, 2], np.float32).reshape(B, K, G, D),
    )
    found = np.asarray(jax.jit(selector._votes)(ix, q))
    turned = jax.jit(rotate, static_argnums=1)
    turn = (
        (lambda x: np.asarray(turned(np.asarray(x, np.float32), 0), np.float64))
        if selector.seed == 0
        else np.float64
    )
    keys = np.asarray(layer.k, np.float64)
    size = np.linalg.norm(keys, axis=-1, keepdims=True)
    blocks, queries = turn(keys / size).reshape(B, K, S, 2, 8), turn(q).reshape(B, K, G, 2, 8)
    used = int(np.log2(selector.directions))
    reach = np.ceil(S * 0.5 * np.array([0.05, 0.15, 0.3, 0.5, 0.75, 1.0]) - 1e-9)
    edges, centres = radius_table(8, D)
    for b, k, g in np.ndindex(B, K, G):
        votes = np.zeros(S)
        for n in range(2):
            signs = np.where(blocks[b, k, :, n, :used] >= 0, 1.0, -1.0)
            worth = signs @ queries[b, k, g, n, :used]
            if selector.radii > 1:
                worth *= centres[
                    np.searchsorted(edges, np.linalg.norm(blocks[b, k, :, n], axis=-1))
                ]
            worth = worth if selector.normalise else worth * size[b, k, :, 0]
            better = (worth[None] > worth[:, None] + 1e-6).sum(axis=1)
            votes += (better[:, None] < reach).sum(axis=1)
        assert (found[b, k, g] == votes).mean() > 0.97, (
            b,
            k,
            g,
        )  # products within rounding may change places
    if not settings:
        np.testing.assert_array_equal(
            found, jax.jit(Paris()._votes)(_index(Paris(), layer.k, S), q)
        )


def test_attended_tokens_are_those_of_numpy():
    found = coverage.attended(LIVE, newest=6, top=5)
    best = []
    for t, position in enumerate(POSITIONS[:2]):
        weights = _softmax(_logits(LIVE.layers[1], t, position))[1, 3]
        assert found.first_two[1, t, 1, 3] == pytest.approx(weights[:2].sum(), abs=1e-5)
        assert found.newest[1, t, 1, 3] == pytest.approx(
            weights[position - 5 : position + 1].sum(), abs=1e-5
        )
        best.append(set((np.argsort(-weights[2 : position - 5]) + 2)[:5].tolist()))
    assert found.overlap[1, 0, 1, 3] == pytest.approx(len(best[0] & best[1]) / 5)


@pytest.mark.thorough
def test_recall_of_learnt_centroids_falls_when_keys_move_and_not_when_learnt_anew():
    live = _live(3, positions=[199, 398, 399], shape=(1, 4, 2, 400, 16))
    moved = tuple(
        replace(a, k=a.k.at[:, :, 200:].multiply(3.0).at[:, :, 200:].add(4.0))
        for a in live.layers
    )
    found = drift.drift(Live(moved, live.positions), prompt=199, candidates=150)
    recall = {name: seen.recall[:, 1:].mean() for name, seen in found.items()}
    assert recall["k-means, prompt"] < recall["k-means, anew"] - 0.05
    assert recall["PQCache, prompt"] < recall["PQCache, anew"]
    assert recall["Paris, all reranked"] > 0.85
    assert set(drift.ablation(live)) >= {
        "as published",
        "no alpha-correction",
        "candidates 0.25",
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 9}, "at most 8 bits"),
        ({"by": "sum"}, "products, votes"),
        ({"channels": 0}, "at least 1"),
    ],
)
def test_learnt_refuses_what_it_cannot_do(settings, message):
    with pytest.raises(ValueError, match=message):
        drift.Learnt(**settings)


# ------------------------------------------------------------------------------------------------------- all selectors


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.thorough) for n in selectors(64)]
)
def test_a_budget_of_everything_loses_nothing(name):
    policy = replace(selectors(64)[name], budget=20 + 96)
    seen = recall.reads(LIVE, policy)
    assert (seen.recall == 1).all()
    assert seen.mass.min() > 1 - 1e-5
    assert seen.error.max() < 1e-4


@pytest.mark.thorough
@pytest.mark.parametrize("cases", [selectors(64), group_reduces(64)])
def test_every_case_to_compare_runs_and_selects_better_than_chance(cases):
    positions = POSITIONS[-STEPS:, None, None] + 1
    for name, seen in compare(LIVE, cases).items():
        share = (seen.attended[:, -STEPS:] / positions).mean()
        assert seen.mass[:, -STEPS:].mean() > share, name
        if (
            "page" not in name and "quest" not in name
        ):  # of pages a budget of 44 tokens holds two
            assert seen.recall[:, -STEPS:].mean() > 0.62, name  # of 44 of 76 free tokens
        json.dumps(summary(seen))


# -------------------------------------------------------------------------------------------------- figures and command


def _fake(seed=0):
    rng = np.random.default_rng(seed)
    a = rng.random((L, len(POSITIONS), B, N))
    return recall.Reads(POSITIONS + 1, a, a, a, a, a[..., :K], a[..., 0])


def test_figures_have_named_axes_and_all_that_was_measured():
    found = {"fier": _fake(), "quest": _fake(1)}
    kept = coverage.Kept(POSITIONS + 1, POSITIONS, *(_fake().mass,) * 6)
    drifted = {
        name: _fake()
        for name in ("Paris", "Paris, candidates", "k-means, prompt", "k-means, anew")
    }
    made = {
        "by_length": figures.recall_by_length(found),
        "maps": figures.maps(found),
        "dots": figures.dots(found, ("recall", "mass")),
        "coverage": figures.dots({"log-sparse": kept}, ("mass", "outputs")),
        "turning": figures.turning(queries.turns(LIVE)),
        "drifting": figures.drifting(drifted, prompt=30),
    }
    for name, figure in made.items():
        drawn = [axis for axis in figure.axes if axis.get_label() != "<colorbar>"]
        assert drawn, name
        assert all(axis.get_xlabel() for axis in drawn), name
    heat = made["maps"].axes[0].images[0].get_array()
    np.testing.assert_allclose(heat, found["fier"].head_recall.mean(axis=(1, 2)))
    lines = made["drifting"].axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["Paris", "k-means, prompt", "k-means, anew"]
    assert lines[0].get_xdata().tolist() == [40 - 30, 96 - 30]


def test_what_is_compared_can_be_made():
    spec = CacheSpec(
        batch=1, q_heads=8, kv_heads=2, head_dim=64, capacity=1024, dtype="float32"
    )
    compared = groups(256)
    assert list(compared)[-2:] == ["Quest, chunks of 32", "Quest"]
    for policy in compared.values():
        jax.eval_shape(lambda policy=policy: kvjax.init_layer(policy, spec))


@pytest.mark.thorough
def test_fier_by_group_size_selects_better_than_chance():
    for name, seen in compare(LIVE, groups(64, sizes=(8, 16))).items():
        chance = (
            32 if "pages" in name or name == "Quest" else 44
        ) / 76  # of free tokens; of pages, two whole ones
        assert seen.recall[:, -STEPS:].mean() > chance + (0.1 if chance > 0.5 else 0.01), name
        json.dumps(summary(seen))


@pytest.mark.thorough
def test_command_writes_table_json_and_plot(directory, tmp_path, capsys):  # noqa: F811
    book = tmp_path / "book.txt"
    book.write_text("It was a bright cold day in April. " * 10)
    out = tmp_path / "out"
    ask = [
        directory,
        "--text",
        book,
        "--what",
        "queries",
        "--length",
        "20,40",
        "--steps",
        3,
        "--out",
        out,
    ]
    assert main(list(map(str, ask))) == 0
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
        (("--what", "all"), "--what all: there are recall, group_reduce, groups"),
        (("--length", "5x"), "--length takes whole numbers from 1"),
        (
            ("--length", "40,20"),
            "lengths=[40, 20] must be steps=3 or more above the one before",
        ),
        (("--steps", 1), "queries compares adjacent steps; give 2 or more"),
        (("--what", "groups", "--budget", 10), "budget=10 is below sink + local = 4 + 16"),
        (
            ("--what", "logquant", "--window", 0),
            "LogSparse(window=...) must be at least 1, got 0",
        ),
        (("--text", "nowhere.txt"), "nowhere.txt is not there"),
    ],
)
def test_command_says_what_was_wrong(directory, tmp_path, capsys, options, message):  # noqa: F811
    book = tmp_path / "book.txt"
    book.write_text("It was a bright cold day in April. " * 10)
    sizes = ("--what", "queries", "--length", "20,40", "--steps", 3)
    with pytest.raises(SystemExit, match="2"):
        main([str(arg) for arg in (directory, "--text", book, *sizes, *options)])
    assert message in capsys.readouterr().err


@pytest.mark.thorough
def test_command_runs_every_measurement(tmp_path):
    heads = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }  # two of ParisKV's subspaces
    model = write_checkpoint(tmp_path / "model", **heads)
    book = tmp_path / "book.txt"
    book.write_text(
        "It was a bright cold day in April, and the clocks were striking thirteen. " * 5
    )
    sizes = (
        "--length",
        "150,200",
        "--steps",
        4,
        "--budget",
        64,
        "--new-tokens",
        16,
        "--window",
        8,
    )
    assert main([str(arg) for arg in (model, "--text", book, *sizes, "--out", tmp_path)]) == 0
    for what in ("recall", "group_reduce", "groups", "queries", "logquant", "drift", "paris"):
        content = json.loads((tmp_path / f"measure_{what}.json").read_text())
        assert content["results"]
        assert (tmp_path / f"measure_{what}.svg").stat().st_size > 1000
