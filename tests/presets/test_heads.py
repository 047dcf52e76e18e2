"""Policies by KV head, compensation tokens and the rule that finds retrieval heads, against
numpy.
"""

import types

import jax
import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, Evicting, Full, LastQuery, PerHead, Sliding, presets
from kvjax.contrib.razorattention import Compensated
from kvjax.evaluate import heads as finding
from kvjax.evaluate.caches import make_rows
from kvjax.presets import head_files as heads
from kvjax.testing import _drive as drive
from tests.test_oracles import data

SPEC = CacheSpec(batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=120, dtype="float32")


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, log_weights: np.ndarray
) -> np.ndarray:
    logits = k.astype(np.float64) @ q / np.sqrt(len(q)) + log_weights
    weights = np.exp(logits - logits.max())
    return weights @ v / weights.sum()


@pytest.mark.parametrize("keys", ["random", pytest.param("live", marks=pytest.mark.thorough)])
def test_razor_heads_read_all_or_a_window_and_the_mean_of_the_rest(
    keys: str, checkpoint: str | None, tmp_path
) -> None:
    """Over a prompt in two chunks and steps; head 1 is a retrieval head. The mask goes through
    a file.
    """
    spec, tokens = (
        (SPEC, drive.random_tokens(SPEC)) if keys == "random" else data(checkpoint)["live"]
    )
    sink, budget, lengths = 3, 20, np.resize([70, 33], spec.batch)
    heads.Heads(kv_heads=2, layers=((1,),)).save(tmp_path / "heads.json")
    policy = presets.razorattention(
        budget=budget, sink=sink, heads=str(tmp_path / "heads.json")
    ).policy(0)
    assert isinstance(policy, PerHead)
    cache, _ = drive.fill(kvjax.init_layer(policy, spec), tokens, lengths)
    for i in range(3):
        out, cache, info = drive.step(cache, tokens, lengths + i)
        for row, n in enumerate(lengths + i + 1):
            for head in range(spec.q_heads):
                k, v = (
                    a[row, :n, head // spec.group].astype(np.float64)
                    for a in (tokens.k, tokens.v)
                )
                weights = np.zeros(n)
                if head < spec.group:
                    gone = np.arange(sink, n - (budget - sink))
                    k, v = (
                        np.concatenate([np.delete(a, gone, 0), a[gone].mean(axis=0)[None]])
                        for a in (k, v)
                    )
                    weights = np.append(np.zeros(budget), np.log(len(gone)))
                want = attention(tokens.q[row, n - 1, head].astype(np.float64), k, v, weights)
                np.testing.assert_allclose(
                    out[row, head], want, atol=1e-5 * max(1.0, np.abs(want).max())
                )
            np.testing.assert_array_equal(np.asarray(info.attended)[row], [budget, n])
    assert cache.policy.bytes_per_token(spec) == 2 * spec.head_dim * 4


def test_echo_and_induction_heads_are_found(monkeypatch) -> None:
    """In a model whose heads copy by design: head 1 attends to equal tokens, head 2 to the
    tokens after them.
    """
    length, repeats, D = 8, 3, 32
    tokens = np.tile(np.random.default_rng(0).integers(50, size=(1, length)), (1, repeats))
    code = np.random.default_rng(1).normal(size=(50, D))
    S = length * repeats
    own, before = code[tokens], code[np.roll(tokens, 1, axis=1)]
    noise = np.random.default_rng(2).normal(size=(1, S, D))
    q = np.stack([noise, own, own, noise], axis=2)[:, -length:]
    k = np.stack([noise, own, before, noise], axis=1)
    layer = types.SimpleNamespace(q=q, k=k, scale=2.0, window=None)
    live = types.SimpleNamespace(layers=[layer], positions=np.arange(S - length, S))
    monkeypatch.setattr("kvjax.evaluate.capture.capture", lambda *a, **b: live)
    config = types.SimpleNamespace(vocab_size=50, kv_heads=4)
    checkpoint = types.SimpleNamespace(config=config)
    echo, induction = finding.scores(checkpoint, length=length, repeats=repeats, batch=1)
    assert echo.argmax() == 1
    assert echo[0, 1] > 0.5
    assert induction.argmax() == 2
    assert induction[0, 2] > 0.5
    found = finding.retrieval_heads(
        checkpoint, echo=0.25, induction=0.25, length=length, repeats=repeats
    )
    assert found == heads.Heads(kv_heads=4, layers=((1, 2),))


@pytest.mark.parametrize("share", [1.4, -0.1, float("nan")])
def test_a_share_of_heads_that_is_none_is_refused(share) -> None:
    with pytest.raises(
        ValueError,
        match=r"retrieval_heads\(induction=.* is a share of the query heads in \[0, 1\]",
    ):
        finding.retrieval_heads(types.SimpleNamespace(), induction=share)


@pytest.mark.thorough
def test_heads_of_the_shipped_model_are_found_and_serve_it(tmp_path) -> None:
    checkpoint = kvjax.models.load(kvjax.models.shipped(), dtype="float32")
    found = finding.retrieval_heads(checkpoint)
    assert 0 < found.count < found.kv_heads * len(found.layers)
    found.save(tmp_path / "heads.json")
    text = (
        "The pass key is 71432. Remember it.\n"
        + "The grass is green. " * 20
        + "\nWhat is the pass key? The pass key is "
    )
    cache = presets.duoattention(budget=64, sink=4, heads=str(tmp_path / "heads.json"))
    assert len(checkpoint.generate(text, cache=cache, max_new_tokens=5).text)


def test_masks_go_through_files_and_cover_all_or_no_head(tmp_path) -> None:
    mask = heads.Heads(kv_heads=3, layers=((2, 0), (), (0, 1, 2)))
    mask.save(tmp_path / "heads.json")
    assert heads.Heads.load(tmp_path / "heads.json") == mask
    window = Evicting(evictor=Sliding(), budget=9)
    policies = mask.policies(window)
    assert [policies.policy(i) for i in range(3)] == [
        PerHead(heads=(0, 2), selected=Full(), others=window),
        window,
        Full(),
    ]


@pytest.mark.parametrize("method", ["razorattention", "duoattention"])
def test_a_comparison_takes_a_mask_whose_last_layer_is_split(method: str, tmp_path) -> None:
    heads.Heads(kv_heads=2, layers=((), (1,))).save(tmp_path / "heads.json")
    (row,) = make_rows([f"{method}:heads={tmp_path / 'heads.json'}"], budgets=[80])
    assert row.policies is not None
    assert isinstance(row.policies.policy(1), PerHead)
    assert (row.budget, row.note) == (80, "")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: PerHead(heads=(), selected=Full(), others=Full()),
            r"heads=\(\).*must name at least one KV head",
        ),
        (lambda: PerHead(heads=(1, 1), selected=Full(), others=Full()), r"each once"),
        (
            lambda: kvjax.init_layer(PerHead(heads=(2,), selected=Full(), others=Full()), SPEC),
            r"heads=\(2,\).*must list between 1 and 1 of the 2 KV heads",
        ),
        (
            lambda: kvjax.init(
                heads.Heads(kv_heads=2, layers=((1,), ())).policies(Full()), SPEC, layers=3
            ),
            "heads are those of a model of 2 layers and this one has 3; find its own with kvjax heads MODEL",
        ),
        (
            lambda: kvjax.init(
                heads.Heads(kv_heads=4, layers=((1,), ())).policies(Full()), SPEC, layers=2
            ),
            "heads are those of a model of 4 KV heads and this one has 2; find its own with kvjax heads MODEL",
        ),
        (
            lambda: presets.check_reaches(
                heads.Heads(kv_heads=2, layers=((1,), ())).policies(Full()), 1, "duo"
            ),
            "heads are those of a model of 2 layers and this one has 1; find its own",
        ),
        (
            lambda: heads.Heads(kv_heads=2, layers=((2,),)),
            r"layers=...\)\[0\] must be at most 1, got 2",
        ),
        (lambda: Compensated(Evicting(evictor=LastQuery())), r"Compensated got.*Sliding"),
        (
            lambda: Compensated(
                Evicting(evictor=Sliding(sink=2, rope=kvjax.models.rope.Default()))
            ),
            r"cannot renumber tokens; use kvjax\.evictors\.Sliding\(sink=2\) without rope",
        ),
        (
            lambda: jax.eval_shape(
                lambda: kvjax.attention(
                    kvjax.init_layer(Compensated(Evicting(evictor=Sliding(), budget=8)), SPEC),
                    *(jax.numpy.zeros((2, 1, n, 16)) for n in (4, 2, 2)),
                    window=8,
                )
            ),
            r"cannot serve a sliding window of 8",
        ),
    ],
)
def test_what_cannot_work_is_refused(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_file_of_something_else_is_refused(tmp_path) -> None:
    for text in ("{}", "[", '{"kv_heads": 2, "layers": 7}'):
        (tmp_path / "heads.json").write_text(text)
        with pytest.raises(ValueError, match=r"holds no heads of a model|is not valid JSON"):
            heads.Heads.load(tmp_path / "heads.json")
