"""Perplexity through caches against a plain forward pass, on a random checkpoint that the test writes."""

import dataclasses
import json
import math
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from kvjax import models, presets
from kvjax.cli import main
from kvjax.evaluate import perplexity as module
from kvjax.evaluate.perplexity import Cell, Setting, figure, markdown, perplexity, summarise
from tests.checkpoint import BOS, POSITIONS, write_checkpoint

TEXT = "".join(f"{i} ships went out, and {i * i} came back; " for i in range(40))
STEPS = 6
SETTING = Setting(lengths=(40,), steps=STEPS, passages=2, batch=2, budget=12)
BOTH = dataclasses.replace(SETTING, lengths=(40, 24), budget=None)
SMALL = partial(presets.fier, group=8, chunk=8, dense_layers=1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def checkpoint(directory):
    return models.load(directory, dtype="float32")


@pytest.fixture(scope="module")
def cells(checkpoint):
    """Full after 24 and 40 tokens; after 40, FIER with 12 tokens a step and FIER with all."""
    caches = {"full": presets.full(), "fier": SMALL, "fier, all": SMALL(budget=64)}
    first = perplexity(checkpoint, TEXT, {"full": presets.full()}, BOTH)[:1]
    return first + perplexity(checkpoint, TEXT, caches, SETTING)


def of(cells, cache, length):
    (found,) = (cell for cell in cells if (cell.cache, cell.length) == (cache, length))
    return found


def test_full_equals_a_plain_forward_pass(cells, checkpoint):
    ids = np.array(checkpoint.tokenizer(TEXT)["input_ids"])
    span = len(ids) - STEPS - 40
    starts = [40 + span // 4, 40 + 3 * span // 4]
    forward = jax.jit(lambda model, tokens: jax.nn.log_softmax(model(tokens)[0], axis=-1))
    for length in (24, 40):
        rows = np.stack([ids[at - length : at + STEPS] for at in starts])
        padded = np.pad(rows, ((0, 0), (0, 40 - length)))  # what follows does not matter
        scores = np.asarray(forward(checkpoint.model, padded))[:, length - 1 : length - 1 + STEPS]
        wanted = -np.take_along_axis(scores, rows[:, length:, None], axis=-1)[..., 0]
        full = of(cells, "full", length)
        np.testing.assert_allclose(full.nll, wanted, rtol=1e-4)
        assert full.perplexity == pytest.approx(math.exp(wanted.mean()), rel=1e-4)
        np.testing.assert_allclose(full.attended, length + (STEPS - 1) / 2)


def test_a_budget_of_everything_equals_full(cells):
    np.testing.assert_allclose(of(cells, "fier, all", 40).nll, of(cells, "full", 40).nll, rtol=1e-4)


def test_a_small_budget_reads_what_it_says_and_scores_otherwise(cells):
    small, full = of(cells, "fier", 40), of(cells, "full", 40)
    np.testing.assert_allclose(small.attended[1:], 12)
    assert (small.budget, full.budget) == (12, None)
    assert np.max(np.abs(np.subtract(small.nll, full.nll))) > 1e-3


def test_shares_of_the_context_are_rounded():
    setting = dataclasses.replace(SETTING, budget=None, share=0.11)
    assert [setting.budget_at(n) for n in (2, 1024, 4096)] == [1, 113, 451]


def test_cells_come_by_length_and_say_what_made_them(cells, checkpoint):
    assert [(c.cache, c.length) for c in cells] == [("full", 24), ("full", 40), ("fier", 40), ("fier, all", 40)]
    assert cells[2].policies == repr(SMALL(budget=12))
    assert {"date", "versions", "device", "model_digest", "tokens_digest", "dtype"} <= set(cells[0].made)
    assert cells[0].made["model"] == checkpoint.directory.name


def test_bos_stands_before_every_context():
    def tokenizer(text, **settings):
        return {"input_ids": [*([BOS] if settings.get("add_special_tokens", True) else []), *text.encode()]}

    tokenizer.bos_token_id = BOS
    assert module._tokens(SimpleNamespace(tokenizer=tokenizer), "ab") == ([BOS], [97, 98])
    assert module._tokens(SimpleNamespace(), [5, 6]) == ([], [5, 6])
    config = SimpleNamespace(
        vocab_size=300, max_positions=None, layers=1, q_heads=2, kv_heads=1, head_dim=8, tokenizer=tokenizer
    )
    plan = module.prepare(
        SimpleNamespace(config=config, tokenizer=tokenizer),
        "abcdefgh",
        {"full": presets.full()},
        Setting(lengths=(3, 5), steps=2),
        dtype="float32",
    )
    assert plan.rows[3].tolist() == [[BOS, *b"defg"]]
    assert plan.rows[5].tolist() == [[BOS, *b"bcdefg"]]


# -------------------------------------------------------------------------------------------------------------- results


def cell(cache, length, nll):
    return Cell(cache, "", length, None, nll, (8.0,), 0.0, {})


def test_ratios_are_paired():
    full, other = cell("full", 8, ((1.0, 3.0), (2.0, 2.0))), cell("other", 8, ((1.1, 3.1), (2.1, 2.3)))
    row = summarise([full, other])[1]
    assert row["perplexity"] == pytest.approx(math.exp(2.15))
    assert row["ratio"] == pytest.approx(math.exp(0.15))
    # gaps .1 .1 .1 .3: deviation .1 over the root of 4
    assert row["ratio_stderr"] == pytest.approx(math.exp(0.15) * 0.1 / 2)
    assert full.stderr == pytest.approx(math.exp(2) * math.sqrt(2 / 3) / 2)


def test_table_and_plot_show_every_cell():
    cells = [cell(n, t, ((1.0 + t / 64 + i, 2.0 + i / 2),)) for t in (8, 16) for i, n in enumerate(("full", "other"))]
    lines = markdown(cells).splitlines()
    assert lines[0] == "| cache | 8 tokens | 16 tokens |"
    assert lines[2] == f"| full | {cells[0].perplexity:.2f} | {cells[2].perplexity:.2f} |"
    change, error = 100 * (math.exp(0.75) - 1), 100 * math.exp(0.75) * 0.25
    assert f"{cells[1].perplexity:.2f} ({change:+.2f} ± {error:.2f} %)" in lines[3]
    left, right = figure(cells).axes
    shown = {line.get_label(): line for line in left.get_lines()}
    np.testing.assert_allclose(shown["other"].get_ydata(), [cells[1].perplexity, cells[3].perplexity])
    np.testing.assert_allclose(shown["other"].get_xdata(), [8, 16])
    assert list(right.containers[0].lines[0].get_ydata()) == pytest.approx([change, change])
    assert len(right.containers) == 1


def test_a_file_s_cells_are_not_run_again(checkpoint, cells, tmp_path, monkeypatch):
    out, full = tmp_path / "deep" / "out.json", {"full": presets.full()}
    first = perplexity(checkpoint, TEXT, full, BOTH, out=out)
    assert [c.nll for c in first] == [c.nll for c in cells[:2]]

    def fail(checkpoint, rows, setting, policies):
        assert not policies, "ran"
        return iter(())

    monkeypatch.setattr(module, "_score_all", fail)
    assert perplexity(checkpoint, TEXT, full, BOTH, out=out) == first
    for changes in ({"lengths": (24, 30, 40)}, {"passages": 4}, {"steps": 5}):
        with pytest.raises(AssertionError, match="ran"):
            perplexity(checkpoint, TEXT, full, dataclasses.replace(BOTH, **changes), out=out)
    with pytest.raises(AssertionError, match="ran"):
        perplexity(checkpoint, TEXT, {"full": SMALL(budget=9)}, BOTH, out=out)
    with pytest.raises(AssertionError, match="ran"):
        perplexity(checkpoint, TEXT.replace("ships", "boats"), full, BOTH, out=out)
    out.write_text("{}")
    with pytest.raises(ValueError, match=r"out.json is no result of a perplexity .*move it away"):
        perplexity(checkpoint, TEXT, full, BOTH, out=out)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lengths": (POSITIONS,)}, f"do not fit in the model's {POSITIONS} positions"),
        ({"lengths": (1,)}, "must be at least 2, got 1"),
        ({"lengths": ()}, "needs one or more lengths"),
        ({"passages": 400, "batch": 1}, "400 passages of 6 scored tokens after 40 need 2446: give a longer text"),
        ({"passages": 3}, "batch=2 does not divide passages=3"),
        ({"budget": None}, "give budget .* or share"),
        ({"share": 0.5}, "only one of budget"),
        ({"budget": None, "share": 11}, r"share must be in \(0, 1\], got 11"),
        ({"budget": 0}, "must be at least 1"),
        ({"steps": 0}, r"Setting\(steps=...\) must be at least 1"),
    ],
)
def test_bad_settings_are_refused_before_anything_runs(checkpoint, changes, said):
    with pytest.raises(ValueError, match=said):
        perplexity(checkpoint, TEXT, {"fier": SMALL}, Setting(**{**dataclasses.asdict(SETTING), **changes}))


def test_bad_texts_and_caches_are_refused(checkpoint):
    for text, caches, said in (
        ("", {"fier": SMALL}, "the text is empty"),
        ("abc", {"fier": SMALL}, "the text has 3 tokens"),
        ([5] * 500 + [9999], {"fier": SMALL}, "token ids 5 to 9999, but the vocabulary has 258"),
        (TEXT, {}, "one or more caches"),
        (TEXT, {"pariskv": presets.pariskv}, "budget=12 is below sink"),
    ):
        with pytest.raises(ValueError, match=said):
            perplexity(checkpoint, text, caches, SETTING)


def test_command_prints_a_table_and_goes_on_from_its_file(directory, tmp_path, capsys):
    (tmp_path / "book.txt").write_text(TEXT)
    args = ["perplexity", directory, "--text", tmp_path / "book.txt", "--out", tmp_path / "out.json", "--steps", STEPS]
    args += ["--length", "40", "--passages", 2, "--batch", 2, "--share", 0.3]
    args += ["--cache", "full", "--cache", "fier:group=8,chunk=8,dense_layers=1"]
    assert main([str(arg) for arg in [*args, "--plot", tmp_path / "plot.svg"]]) == 0
    out, err = capsys.readouterr()
    header, _, full, fier = out.splitlines()
    assert header == "| cache | 40 tokens |"
    assert full.startswith("| full | ")
    assert fier.startswith("| fier:group=8,chunk=8,dense_layers=1 | ")
    assert err.count("perplexity") == 2
    assert "<svg" in (tmp_path / "plot.svg").read_text()

    assert main([str(arg) for arg in [*args, "--json"]]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [(row["cache"], row["budget"], row["tokens"]) for row in json.loads(out)] == [
        ("full", None, 2 * STEPS),
        ("fier:group=8,chunk=8,dense_layers=1", 12, 2 * STEPS),
    ]
    assert main(["perplexity", str(directory), "--text", str(tmp_path / "none.txt")]) == 1
    assert "none.txt is not there; --text takes a UTF-8 file" in capsys.readouterr().err
