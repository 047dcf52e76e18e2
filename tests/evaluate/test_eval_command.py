"""`kvjax eval`, in process, on a random checkpoint."""

import json
import re
import sys
import time

import pytest

from kvjax.cli import main, terminal
from kvjax.cli.evaluate import QUICK
from tests.checkpoint import write_checkpoint

SMALL = ("--task", "pass_key:depths=2", "--length", 300, "--samples", 3, "--batch", 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def run(capsys):
    def run(*args):
        code = main(["eval", *map(str, args)])
        return code, *capsys.readouterr()

    return run


def test_a_run_writes_results_table_and_plots_and_is_not_made_again(
    run, checkpoint, tmp_path, monkeypatch
):
    ask = (
        checkpoint,
        *SMALL,
        "--cache",
        "streaming_llm",
        "--budget",
        "16,32",
        "--out",
        tmp_path,
    )
    code, out, err = run(*ask)
    assert code == 0, err
    assert "| cache | budget | tokens read | exact match | 95 % |" in out
    assert "| `streaming_llm` | 16 | " in out
    assert "pass key, question decoded, 300 tokens" in out
    curve = "pass-key-question-decoded-by-budget.svg"
    assert {path.name for path in tmp_path.iterdir()} == {
        "results",
        "table.md",
        "summary.json",
        curve,
    }
    files = sorted((tmp_path / "results").glob("*.json"))
    assert len(files) == 2
    raw = json.loads(files[0].read_text())
    assert (raw["task"], raw["total"]) == ("pass key at 300, question decoded", 3)
    assert (raw["cache"], raw["budget"], raw["dense_layers"]) == ("streaming_llm@16", 16, 2)
    read = json.loads((tmp_path / "summary.json").read_text())["results"][raw["task"]][
        "caches"
    ]["streaming_llm@16"]
    assert read["tokens_read_last_layer"] == 16
    assert read["tokens_read"] > 2 / 3 * 280, "two of three layers are dense"

    monkeypatch.setattr(
        "kvjax.models.load", lambda *args, **settings: pytest.fail("weights were read")
    )
    again = run(*ask)
    assert again[:2] == (0, out)
    assert "6 of 6 answers are in" in again[2]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = run(*ask)
    assert (code, out) == again[:2]
    assert "plots need matplotlib: pip install matplotlib" in err


def test_drafts_are_counted_beside_the_scores_and_not_again(
    run, checkpoint, tmp_path, monkeypatch
):
    caches = ("--cache", "full", "--cache", "streaming_llm", "--budget", "16,32")
    ask = (checkpoint, *SMALL, *caches, "--drafts", "--out", tmp_path)
    code, out, err = run(*ask, "--json")
    assert code == 0, err
    found = json.loads(out)["results"]["drafts of 8 at 300"]
    assert found["metric"] == "tokens accepted of 8"
    assert found["task"]["draft"] == 8
    full = found["caches"]["full"]
    assert (full["n"], full["mean"], full["by_position"]) == (3, 8.0, [1.0] * 8)
    short = found["caches"]["streaming_llm@16"]
    assert short["mean"] == pytest.approx(sum(short["by_position"]), abs=1e-3)
    assert short["by_position"] == sorted(short["by_position"], reverse=True)
    assert short["mean"] < 8, "a window of 16 tokens misses nothing, so this shows nothing"
    assert short["difference"] == pytest.approx(short["mean"] - 8, abs=1e-3)
    assert "other_wording" not in short

    monkeypatch.setattr(
        "kvjax.models.load", lambda *args, **settings: pytest.fail("weights were read")
    )
    assert run(*ask, "--json")[:2] == (0, out)
    code, out, _ = run("--report-only", "--out", tmp_path)
    assert code == 0
    assert "Tokens accepted of 8, n = 3." in out


def test_runs_in_several_folders_are_reported_on_together_and_nothing_is_decoded(
    run, checkpoint, tmp_path, monkeypatch
):
    for cache, budget in (("streaming_llm", "16"), ("full", None)):
        asked = ("--cache", cache, *(("--budget", budget) if budget else ()))
        assert run(checkpoint, *SMALL, *asked, "--out", tmp_path / cache)[0] == 0
    monkeypatch.setattr(
        "kvjax.models.load", lambda *args, **settings: pytest.fail("weights were read")
    )
    code, out, err = run("--report-only", "--out", tmp_path)
    assert code == 0, err
    assert [line.split()[1] for line in out.splitlines() if line.startswith("| `")] == [
        "`full`",
        "`streaming_llm`",
    ]
    assert (tmp_path / "table.md").read_text().endswith(out)
    caches = json.loads((tmp_path / "summary.json").read_text())["results"][
        "pass key at 300, question decoded"
    ]["caches"]
    assert {name: found["n"] for name, found in caches.items()} == {
        "full": 3,
        "streaming_llm@16": 3,
    }

    code, out, err = run(checkpoint, "--report-only", "--cache", "full", "--out", tmp_path)
    assert (code, out) == (2, "")
    assert "--report-only only reads the results in --out; leave out MODEL_DIR, --cache" in err
    code, out, err = run(
        "--report-only", "--batch", 4, "--no-resume", "--seed", 0, "--out", tmp_path
    )
    assert code == 2
    assert "leave out --seed, --batch, --no-resume" in err
    code, _, err = run("--report-only", "--out", tmp_path / "nowhere")
    assert code == 2
    assert "nowhere has no results; give the --out of a run" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ("--task", "needle:depths=2", "--task", "needle:depths=3"),
            "two tasks would both be called 'needle at 2048, question decoded', and a table could not tell their rows",
        ),
        (
            ("--task", "needels"),
            "--task needels: unknown; did you mean 'needles'? There are pass_key, needle, needles",
        ),
        (
            ("--task", "needles:hiden=3"),
            "'hiden=3' is not a setting of needles; write NAME=VALUE, of hidden, asked",
        ),
        (("--cache", "fire"), "unknown cache 'fire'; did you mean 'fier'?"),
        (
            ("--cache", "full", "--budget", "64"),
            "64 applies to no cache, as none has a budget: full; leave it out, or add one of fier",
        ),
        (
            ("--cache", "fier", "--budget", "64,x"),
            "--budget takes whole numbers from 1, such as 8192, 8K",
        ),
        (
            ("--cache", "h2o", "--group-reduce", "per_head"),
            "--group-reduce per_head applies to no cache, as none selects by a group: h2o; leave it out",
        ),
        (("--cache", "fier", "--group-reduce", "most"), "group_reduce"),
        (
            ("--length", "64"),
            "at 64, question decoded has no room for the hidden lines, the question and 8 tokens of the answer; use",
        ),
        (("--length", "4K"), "do not fit in the model's 512 positions"),
        (("--samples", "0"), "samples=...) must be at least 1, got 0"),
        (("--text", "/nowhere/x.txt"), "--text /nowhere/x.txt: there is no such file"),
        (("--question", "late"), "question='late') must be one of decoded, prefilled"),
        (("--cache", "pariskv", "--budget", "64"), "budget=64 is below sink + local"),
        (("--cache", "quest", "--budget", "20"), "has room for 0 pages of 16 tokens beside"),
        (
            ("--task", "needle_lines", "--task", "common_words", "--text", __file__),
            "does not apply to needle_lines",
        ),
        (("--dtype", "int8"), "a cache cannot hold dtype int8"),
    ],
    ids=lambda value: " ".join(map(str, value))[:50] if isinstance(value, tuple) else None,
)
def test_what_is_refused_is_one_line_with_the_mend(run, checkpoint, tmp_path, args, message):
    code, out, err = run(checkpoint, "--out", tmp_path, *args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    assert message in err
    assert not list(tmp_path.iterdir()), "nothing is written before everything is checked"


@pytest.mark.parametrize("bad", ["--sample", "--lenght"])
def test_bad_usage_is_one_line(run, checkpoint, bad):
    code, _, err = run(checkpoint, bad, "3")
    assert code == 2
    assert bad in err


def test_budgets_lengths_and_pools_make_cells_of_what_takes_them(
    run, checkpoint, tmp_path, monkeypatch
):
    """The plan alone: nothing is decoded."""
    seen = []

    def stop(loaded, plan, answer, **settings):
        seen.append((plan.task.name, list(plan.cells)))
        if len(seen) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr("kvjax.evaluate.plan.run", stop)
    caches = (
        "--cache",
        "full",
        "--cache",
        "fier:group=16",
        "--cache",
        "snapkv:window=8",
        "--budget",
        "16,32",
    )
    tasks = (
        "--task",
        "pass_key",
        "--task",
        "needles:hidden=2",
        "--length",
        "300,400",
        "--samples",
        1,
    )
    code, _, _ = run(
        checkpoint,
        *caches,
        *tasks,
        "--group-reduce",
        "mean_softmax,per_head",
        "--out",
        tmp_path,
    )
    assert code == 130
    fier = [
        f"fier:group=16,group_reduce={rule}@{budget}"
        for rule in ("mean_softmax", "per_head")
        for budget in (16, 32)
    ]
    cells = ["full", *fier, "snapkv:window=8@16", "snapkv:window=8@32"]
    names = [
        f"{title} at {length}, question decoded"
        for title in ("pass key", "1 of 2 needles")
        for length in (300, 400)
    ]
    assert seen == [(name, cells) for name in names]


def test_quick_fills_in_what_is_not_asked_for(run, checkpoint, tmp_path):
    code, _, err = run(checkpoint, "--quick", "--out", tmp_path)
    assert code == 2
    assert re.search(r"do not fit in the model's 512 positions", err)
    assert QUICK.length == "2K"
    code, _, err = run(
        checkpoint, "--quick", "--length", "300", "--cache", "fire", "--out", tmp_path
    )
    assert "unknown cache 'fire'" in err


def test_a_log_has_a_line_while_work_goes_on(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "LOG_EVERY", 0.05)
    with terminal.bars() as progress, terminal.bar(progress, "decoding", total=9) as advance_to:
        advance_to(2, 9, "fier@64")
        time.sleep(0.2)  # nothing is reported meanwhile
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2
    assert all(line.startswith("decoding: 2 of 9, fier@64 (") for line in lines)
    assert terminal.LOG_EVERY <= 30


@pytest.mark.parametrize("command", ["eval", "perplexity"])
def test_help_explains_the_columns(run, capsys, command):
    assert main([command, "--help"]) == 0
    out = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    for words in ("tokens read", "mean over steps, KV heads and all layers"):
        assert words in out


def test_one_cache_that_cannot_hold_a_budget_does_not_stop_the_others(
    run, checkpoint, tmp_path
):
    ask = (
        "--cache",
        "pariskv:dense_layers=0",
        "--cache",
        "streaming_llm",
        "--budget",
        "16",
        "--out",
        tmp_path,
    )
    code, out, err = run(checkpoint, *SMALL, *ask)
    assert code == 0, err
    assert "| `streaming_llm` | 16 | " in out
    assert "Not run: `pariskv:dense_layers=0@16`: budget=16 is below sink + local" in out
    assert (
        "pariskv:dense_layers=0@16"
        in json.loads((tmp_path / "summary.json").read_text())["refused"]
    )
