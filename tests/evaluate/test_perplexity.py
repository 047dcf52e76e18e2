"""Perplexity through caches against a plain forward pass, on a random checkpoint that the test
writes.
"""

import dataclasses
import json
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from kvjax import models, presets
from kvjax.cli import main
from kvjax.evaluate import passages as module
from kvjax.evaluate.passages import (
    Setting,
    markdown,
    mean_perplexity,
    nats,
    perplexity,
    summarise,
)
from kvjax.evaluate.store import Cell
from tests.checkpoint import BOS, POSITIONS, write_checkpoint

TEXT = "".join(f"{i} ships went out, and {i * i} came back; " for i in range(40))
STEPS = 6
SETTING = Setting(lengths=(40,), steps=STEPS, passages=2, batch=2, budget=12)
BOTH = dataclasses.replace(SETTING, lengths=(40, 24), budget=None)
SMALL = "fier:group=8,chunk=8,dense_layers=1"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def checkpoint(directory):
    return models.load(directory, dtype="float32")


@pytest.fixture(scope="module")
def cells(checkpoint):
    """Full after 24 and 40 tokens; after 40, FIER with 12 tokens a step and FIER with all."""
    first = perplexity(checkpoint, TEXT, ["full"], BOTH)[:1]
    return first + perplexity(
        checkpoint, TEXT, ["full", SMALL, f"{SMALL},budget=64"], SETTING, parallel=2
    )


def of(cells, cache, length):
    (found,) = (c for c in cells if (c.cache, c.key["task"]["length"]) == (cache, length))
    return found


def test_full_equals_a_plain_forward_pass(cells, checkpoint):
    ids = np.array(checkpoint.tokenizer(TEXT)["input_ids"])
    span = len(ids) - STEPS - 40
    starts = [40 + span // 4, 40 + 3 * span // 4]
    forward = jax.jit(lambda model, tokens: jax.nn.log_softmax(model(tokens)[0], axis=-1))
    for length in (24, 40):
        rows = np.stack([ids[at - length : at + STEPS] for at in starts])
        padded = np.pad(rows, ((0, 0), (0, 40 - length)))  # what follows does not matter
        scores = np.asarray(forward(checkpoint.model, padded))[
            :, length - 1 : length - 1 + STEPS
        ]
        wanted = -np.take_along_axis(scores, rows[:, length:, None], axis=-1)[..., 0]
        full = of(cells, "full", length)
        np.testing.assert_allclose(nats(full), wanted, rtol=1e-4)
        assert mean_perplexity(full)[0] == pytest.approx(math.exp(wanted.mean()), rel=1e-4)
        np.testing.assert_allclose(full.attended, length + (STEPS - 1) / 2)


def test_a_budget_of_everything_equals_full(cells):
    np.testing.assert_allclose(
        nats(of(cells, f"{SMALL}@64", 40)), nats(of(cells, "full", 40)), rtol=1e-4
    )


def test_a_small_budget_reads_what_it_says_and_scores_otherwise(cells):
    small, full = of(cells, f"{SMALL}@12", 40), of(cells, "full", 40)
    np.testing.assert_allclose(small.attended[1:], 12)
    assert (small.budget, full.budget) == (12, None)
    assert np.max(np.abs(nats(small) - nats(full))) > 1e-3


def test_shares_of_the_context_are_rounded():
    setting = dataclasses.replace(SETTING, budget=None, share=0.11)
    assert [setting.budgets_at(n) for n in (2, 1024, 4096)] == [(1,), (113,), (451,)]


def test_cells_come_by_length_and_say_what_made_them(cells, checkpoint):
    made = [(c.cache, c.key["task"]["length"]) for c in cells]
    assert made == [("full", 24), ("full", 40), (f"{SMALL}@12", 40), (f"{SMALL}@64", 40)]
    assert cells[2].key["policy"] == repr(
        presets.fier(12, group=8, chunk=8, layers=presets.Layers(dense=1), dense_capacity=0)
    )
    assert {"model", "dtype", "kvjax", "task"} <= set(cells[0].key)
    assert {"date", "versions", "device", "source"} <= set(cells[0].head["made"][0])
    assert cells[0].head["model"]["name"] == checkpoint.directory.name


def test_bos_stands_before_every_context(directory):
    def tokenizer(text, **settings):
        return {
            "input_ids": [
                *([BOS] if settings.get("add_special_tokens", True) else []),
                *text.encode(),
            ]
        }

    tokenizer.bos_token_id = BOS
    assert module._tokens(SimpleNamespace(tokenizer=tokenizer), "ab") == ([BOS], [97, 98])
    assert module._tokens(SimpleNamespace(), [5, 6]) == ([], [5, 6])
    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "layers": 1}
    config = models.DecoderConfig(**sizes, q_heads=2, kv_heads=1, head_dim=8)
    holder = SimpleNamespace(
        config=config, tokenizer=tokenizer, directory=directory, stop_tokens=()
    )
    short, long = module.prepare(
        holder, "abcdefgh", ["full"], Setting(lengths=(3, 5), steps=2), dtype="float32"
    )
    assert short.task.rows == ((BOS, *b"defg"),)
    assert long.task.rows == ((BOS, *b"bcdefg"),)
    assert (short.prompts["0"], short.fed["0"], short.task.targets("0")) == (
        (BOS, *b"d"),
        (*b"ef",),
        (*b"fg",),
    )


def test_several_texts_have_their_own_passages_and_short_ones_are_left_out(
    checkpoint, tmp_path, capsys
):
    texts = {"a": TEXT, "b": "too short", "c": TEXT[7:]}
    setting = dataclasses.replace(SETTING, passages=1, batch=1, budget=None)
    (plan,) = module.prepare(checkpoint, texts, ["full"], setting, dtype="float32")
    alone = [
        module.prepare(checkpoint, texts[name], ["full"], setting, dtype="float32")[0]
        for name in "ac"
    ]
    assert plan.task.rows == tuple(one.task.rows[0] for one in alone)
    assert plan.task.key()["texts"] == ["a", "c"]
    assert "texts" not in alone[0].task.key()
    with pytest.raises(
        ValueError,
        match="none of 2 texts is long enough for 1 passages of 6 scored tokens after 40",
    ):
        module.prepare(
            checkpoint, {"b": "too short", "d": "x"}, ["full"], setting, dtype="float32"
        )

    from kvjax.cli.perplexity import _read

    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    assert _read(tmp_path) == {f"{name}.txt": text for name, text in texts.items()}
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no \.txt files; those of PG19"):
        _read(tmp_path / "empty")


# -------------------------------------------------------------------------------------------------------------- results


def cell(cache, length, nll):
    examples = [{"id": str(i), "nll": list(row)} for i, row in enumerate(nll)]
    batches = [{"examples": examples, "attended_by_layer": [8.0], "steps": 1, "seconds": 0.0}]
    return Cell(
        f"perplexity {length}",
        "perplexity",
        cache,
        {"task": {"length": length}},
        {"budget": None},
        1,
        None,
        batches,
    )


def test_ratios_are_paired():
    full, other = (
        cell("full", 8, ((1.0, 3.0), (2.0, 2.0))),
        cell("other", 8, ((1.1, 3.1), (2.1, 2.3))),
    )
    row = summarise([full, other])[1]
    assert row["perplexity"] == pytest.approx(math.exp(2.15))
    assert row["ratio"] == pytest.approx(math.exp(0.15))
    # gaps .1 .1 .1 .3: deviation .1 over the root of 4
    assert row["ratio_stderr"] == pytest.approx(math.exp(0.15) * 0.1 / 2)
    assert mean_perplexity(full)[1] == pytest.approx(math.exp(2) * math.sqrt(2 / 3) / 2)


def test_first_of_two_budgets_is_the_baseline():
    cells = [
        cell(f"fier@{budget}", 8, ((nats, nats + 1.0),))
        for budget, nats in ((32, 2.0), (64, 1.0))
    ]
    cells = [dataclasses.replace(one, head={"budget": int(one.cache[5:])}) for one in cells]
    assert [row["ratio"] for row in summarise(cells)] == [1.0, pytest.approx(math.exp(-1.0))]
    head, _, first, second = markdown(cells).splitlines()
    assert head.endswith("| against fier:budget=32 |")
    assert first.endswith("|  |")
    assert second.endswith("| -63.21 ± 0.00 % |")


def test_table_shows_every_cell():
    cells = [
        cell(n, t, ((1.0 + t / 64 + i, 2.0 + i / 2),))
        for t in (8, 16)
        for i, n in enumerate(("full", "other"))
    ]
    lines = markdown(cells).splitlines()
    means = [mean_perplexity(c)[0] for c in cells]
    assert lines[0] == "| cache | context | budget | tokens read | perplexity | against full |"
    assert lines[2] == f"| `full` | 8 | all | 8 | {means[0]:.2f} |  |"
    change, error = 100 * (math.exp(0.75) - 1), 100 * math.exp(0.75) * 0.25
    assert (
        lines[3]
        == f"| `other` | 8 | all | 8 | {means[1]:.2f} | {change:+.2f} ± {error:.2f} % |"
    )


def test_a_file_s_cells_are_not_run_again(checkpoint, cells, tmp_path, monkeypatch):
    out, full = tmp_path / "deep", ["full"]
    first = perplexity(checkpoint, TEXT, full, BOTH, out=out)
    assert nats(first[1]).tolist() == nats(cells[1]).tolist()

    monkeypatch.setattr(module, "score", lambda *args: pytest.fail("ran"))
    again = perplexity(checkpoint, TEXT, full, BOTH, out=out)
    assert [c.batches for c in again] == [c.batches for c in first]
    for changes in ({"lengths": (24, 30, 40)}, {"passages": 4}, {"steps": 5}):
        with pytest.raises(pytest.fail.Exception, match="ran"):
            perplexity(checkpoint, TEXT, full, dataclasses.replace(BOTH, **changes), out=out)
    with pytest.raises(pytest.fail.Exception, match="ran"):
        perplexity(
            checkpoint,
            TEXT,
            {"full": presets.fier(9, group=8, chunk=8, layers=presets.Layers(dense=1))},
            BOTH,
            out=out,
        )
    with pytest.raises(pytest.fail.Exception, match="ran"):
        perplexity(checkpoint, TEXT.replace("ships", "boats"), full, BOTH, out=out)
    assert "perplexity" in (out / "table.md").read_text()
    for path in (out / "results").iterdir():
        path.write_text("[]")
    with pytest.raises(ValueError, match=r"is no result of kvjax .*move it away"):
        perplexity(checkpoint, TEXT, full, BOTH, out=out)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"lengths": (POSITIONS,), "steps": 8},
            f"model has {POSITIONS}; use a length of at most {POSITIONS - 7}, or",
        ),
        ({"lengths": (1,)}, "must be at least 2, got 1"),
        ({"lengths": ()}, "needs one or more lengths"),
        (
            {"passages": 400, "batch": 1},
            "400 passages of 6 scored tokens after 40 need 2446: give a longer text",
        ),
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
        perplexity(
            checkpoint, TEXT, [SMALL], Setting(**{**dataclasses.asdict(SETTING), **changes})
        )


def test_bad_texts_and_caches_are_refused(checkpoint):
    for text, caches, said in (
        ("", [SMALL], "the text is empty"),
        ("abc", [SMALL], "the text has 3 tokens"),
        ([5] * 500 + [9999], [SMALL], "token ids 5 to 9999, but the vocabulary has 258"),
        (TEXT, [], "at least one cache"),
        (TEXT, ["pariskv"], "budget=12 is below sink"),
    ):
        with pytest.raises(ValueError, match=said):
            perplexity(checkpoint, text, caches, SETTING)


@pytest.mark.parametrize("policies", [False, True])
def test_a_share_that_no_cache_takes_is_refused(checkpoint, policies):
    caches = ["full", f"{SMALL},budget=12"]
    setting = dataclasses.replace(SETTING, budget=None, share=0.5)
    if policies:
        caches = {cache: presets.parse(cache) for cache in caches}
    with pytest.raises(
        ValueError,
        match=r"share=0.5 applies to no cache: full, fier.* set their own; leave it out",
    ):
        perplexity(checkpoint, TEXT, caches, setting)


def test_command_prints_a_table_and_goes_on_from_its_file(directory, tmp_path, capsys):
    (tmp_path / "book.txt").write_text(TEXT)
    args = [
        "perplexity",
        directory,
        "--text",
        tmp_path / "book.txt",
        "--out",
        tmp_path / "out",
        "--steps",
        STEPS,
    ]
    args += ["--length", "40", "--passages", 2, "--batch", 2, "--share", 0.3]
    args += ["--cache", "full", "--cache", "fier:group=8,chunk=8,dense_layers=1"]
    assert main([str(arg) for arg in args]) == 0
    out, err = capsys.readouterr()
    header, _, full, fier = out.splitlines()
    assert header == "| cache | context | budget | tokens read | perplexity | against full |"
    assert full.startswith("| `full` | 40 | all | 42 | ")
    assert fier.startswith("| `fier:group=8,chunk=8,dense_layers=1` | 40 | 12 | 22 | ")

    assert main([str(arg) for arg in [*args, "--json"]]) == 0
    out, err = capsys.readouterr()
    assert err.startswith(f"wrote {tmp_path / 'out' / 'table.md'}, ")
    made = json.loads(out)
    assert {"date", "versions", "device", "source"} <= set(made["made"][0])
    assert (made["text"], made["model"]["name"], made["dtype"]) == (
        "book.txt",
        directory.name,
        "float32",
    )
    assert [(row["cache"], row["budget"], row["tokens"]) for row in made["rows"]] == [
        ("full", None, 2 * STEPS),
        ("fier:group=8,chunk=8,dense_layers=1", 12, 2 * STEPS),
    ]
    assert main(["perplexity", str(directory), "--text", str(tmp_path / "none.txt")]) == 2
    assert "none.txt is not there; --text takes a UTF-8 file" in capsys.readouterr().err
