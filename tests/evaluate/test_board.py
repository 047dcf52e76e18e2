"""The board: costs are counted as caches are made, methods are compared at equal costs, and what
the page shows follows from its files."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

import kvjax
from docs import tables
from kvjax import models, presets
from kvjax.cli import main
from kvjax.evaluate import acceptance, board, continuing, plan
from kvjax.evaluate.board.groups import (
    best_within,
    by_time,
    curves,
    equal_costs,
    ruler_titles,
)
from kvjax.evaluate.caches import check_rows, make_rows
from kvjax.evaluate.costs import costs
from kvjax.evaluate.curves import around, draw, evenly, ratios
from kvjax.evaluate.store import Cell
from kvjax.evaluate.tasks import make_tasks
from kvjax.models.weights import read_settings
from tests.checkpoint import write_checkpoint

SPEC = kvjax.CacheSpec(
    batch=1, q_heads=4, kv_heads=2, head_dim=64, capacity=1024, dtype="bfloat16"
)
PAIR = 2 * 2 * 64 * 2  # bytes of a token's keys and values in a layer
LAYERS = 3


def counted(text: str, attended: list[float]) -> Any:
    return costs(presets.parse(text), SPEC, attended, layers=LAYERS, length=1024)


# ----------------------------------------------------------------------------------------------------------- costs


@pytest.mark.parametrize(
    ("text", "attended", "read"),
    [
        ("full", [1024.0] * 3, 3 * 1024 * PAIR),
        ("streaming_llm:budget=64", [64.0] * 3, 3 * 64 * PAIR),
        # keys in 1 bit, with a scale and a zero of 16 bits for 32 channels of 2 heads
        (
            "fier:budget=64,dense_layers=1",
            [1024.0, 64.0, 64.0],
            1024 * PAIR + 2 * (64 * PAIR + 1024 * PAIR / 2 / 16 * 2),
        ),
        ("exact:budget=64,dense_layers=0", [64.0] * 3, 3 * (64 * PAIR + 1024 * PAIR / 2)),
    ],
)
def test_bytes_read_are_tokens_as_stored_and_the_index(
    text: str, attended: list[float], read: float
) -> None:
    assert counted(text, attended).read == pytest.approx(read, rel=0.01)


def test_a_selection_for_each_query_head_reads_as_many_more_tokens() -> None:
    budget = "budget=132,dense_layers=0,sink=4,local=64"
    shared, own = (
        counted(f"quest:{budget},group_reduce={rule}", [132.0] * 3).read
        for rule in ("mean_softmax", "per_head")
    )
    exact = presets.parse(f"quest:{budget}").rest
    selected = 132 - exact.sink - exact.local  # type: ignore[attr-defined]
    assert own - shared == 3 * selected * PAIR * (SPEC.group - 1)


@pytest.mark.parametrize("text", ["full", "fier", "kivi", "snapkv:budget=64", "freekv"])
def test_bytes_held_are_those_of_the_cache_that_is_made(text: str) -> None:
    policies = presets.parse(text)
    made = kvjax.init(policies, SPEC, layers=LAYERS).nbytes
    found = costs(policies, SPEC, [64.0] * LAYERS, layers=LAYERS, length=1024)
    assert (found.held, found.on_host) == pytest.approx((made.device, made.host), abs=16)


# ------------------------------------------------------------------------------------------------------------ rows


def row(cache: str, mean: float, **given: Any) -> board.Row:
    budget = int(cache.partition("@")[2]) if "@" in cache else None
    settings: dict[str, Any] = {
        "task": "needle",
        "length": 1024,
        "metric": "exact match",
        "dense_layers": 0,
        "n": 10,
        "low": None,
        "high": None,
        "tokens_read": 64.0,
        "bytes_read": 100.0,
        "bytes_held": 1000,
        "bytes_on_host": 0,
    }
    return board.Row(cache=cache, budget=budget, mean=mean, **settings | given)


ROWS = (
    row("full", 1.0, bytes_read=1000.0),
    row("fier@64", 0.5, bytes_read=90.0),
    row("fier@128", 0.9, bytes_read=190.0),
    row("fier@256", 0.8, bytes_read=290.0, bytes_on_host=500),
)


def test_the_best_score_counts_among_the_budgets_that_cost_no_more() -> None:
    (group,) = board.groups(ROWS)
    assert best_within(group, "fier", board.of_reads, 80.0) is None
    for most, cache in ((100.0, "fier@64"), (200.0, "fier@128"), (1000.0, "fier@128")):
        best = best_within(group, "fier", board.of_reads, most)
        assert best is not None
        assert best.cache == cache
    heads, lines = equal_costs(group, board.of_reads)
    assert heads == ["cache", "100 %", "20 %", "10 %"]
    assert lines == [["`full`", "1.00", "", ""], ["`fier`", "0.90", "0.90", "0.50"]]
    assert curves(group, board.of_memory)["fier"][-1] == (1.5, 0.8), "host memory counts too"


def test_tasks_of_ruler_become_their_mean_where_a_cache_has_all() -> None:
    titles = sorted(ruler_titles())[:2]
    rows = [
        row(c, m, task=t)
        for t, m in zip(titles, (0.2, 0.6), strict=True)
        for c in ("full", "fier@64")
    ]
    (group,) = board.groups([*rows, row("quest@64", 1.0, task=titles[0])])
    assert (group.title, group.methods) == ("RULER", ["full", "fier"])
    assert group.rows[0].mean == pytest.approx(0.4)
    assert group.rows[0].n == 20


def test_a_group_tells_the_least_and_the_most_samples() -> None:
    (same,) = board.groups(ROWS)
    assert same.samples == "10"
    (several,) = board.groups([*ROWS, row("quest@64", 0.1, n=4), row("kivi", 0.1, n=7)])
    assert several.samples == "4 to 10"


def test_rows_of_a_summary_have_dense_layers_that_read_everything() -> None:
    score = {"n": 1, "mean": 1.0, "low": 0.0, "high": 1.0}
    model = {"layers": 3, "q_heads": 4, "kv_heads": 2, "head_dim": 64}
    caches = {
        "full": {**score, "budget": None, "dense_layers": None, "tokens_read": 1024.0},
        "fier@64": {**score, "budget": 64, "dense_layers": 1, "tokens_read": (1024 + 128) / 3},
        "heads:heads=gone.json@64": {
            **score,
            "budget": 64,
            "dense_layers": 1,
            "tokens_read": 9.0,
        },
    }
    task = {"title": "needle", "length": 1024}
    results = {"x": {"metric": "exact match", "task": task, "caches": caches}}
    full, fier, gone = board.rows_of_summary(
        {"model": model, "dtype": "bfloat16", "results": results}
    )
    assert full.bytes_read == 3 * 1024 * PAIR
    wanted = counted("fier:budget=64,dense_layers=1", [1024.0, 64.0, 64.0])
    assert (fier.bytes_read, fier.bytes_held) == (wanted.read, wanted.held)
    assert gone.bytes_read is None, "nobody knows its policies"


def test_tasks_whose_key_has_no_title_stay_apart_under_their_names() -> None:
    batch = {
        "examples": [{"id": "0", "score": 1.0}],
        "attended_by_layer": [9.0] * LAYERS,
        "steps": 1,
        "seconds": 1.0,
    }
    cells = [
        Cell(name, "F1", "full", {"task": {"file": "same"}}, {}, total=1, batches=[batch])
        for name in ("quiz", "riddle")
    ]
    found = board.groups(board.rows_of(cells, {"full": presets.parse("full")}, SPEC, LAYERS))
    assert [group.heading for group in found] == ["Quiz", "Riddle"]
    score = {"budget": None, "dense_layers": None, "n": 1, "mean": 1.0, "low": 1.0, "high": 1.0}
    result = {
        "metric": "F1",
        "task": {"file": "same"},
        "caches": {"full": {**score, "tokens_read": 9.0}},
    }
    model = {"layers": LAYERS, "q_heads": 4, "kv_heads": 2, "head_dim": 64}
    results = {"quiz": result, "riddle": result}
    rows = board.rows_of_summary({"model": model, "dtype": "bfloat16", "results": results})
    assert [row.task for row in rows] == ["quiz", "riddle"]


def test_times_go_to_the_budget_and_length_that_were_timed() -> None:
    speeds = {
        "device": "GPU",
        "rows": [
            {"method": "fier", "length": 1024, "batch": 8, "budget": 128, "tpot_ms": 2.5, "status": "ok"},
            {"method": "full", "length": 2048, "batch": 8, "budget": 128, "tpot_ms": 3.0, "status": "ok"},
            {"method": "full", "length": 1024, "batch": 8, "budget": 128, "status": "no room"},
        ],
    }  # fmt: skip
    (group,) = board.groups(ROWS)
    assert by_time(group, board.times_of(speeds)) == {"fier": [(2500.0, 0.9)]}


# --------------------------------------------------------------------------------------------------------- pictures


def test_curves_stay_inside_of_their_picture_and_names_apart() -> None:
    many = {f"m{i}": [(0.1, i / 30), (0.5 + i / 60, 1.0)] for i in range(30)}
    svg = draw(many, ratios([0.1, 1.0]), evenly(1.0), title="t", x_label="x", y_label="y")
    height = float(svg.partition('height="')[2].partition('"')[0])
    names = [line for line in svg.splitlines() if ">m" in line]
    places = sorted(float(line.partition('y="')[2].partition('"')[0]) for line in names)
    assert len(places) == 30
    assert np.diff(places).min() >= 12
    assert 0 < places[0] < places[-1] < height


def test_a_long_name_is_cut_and_letters_of_xml_are_spelled() -> None:
    points = {"a_method_of_a_long_name": [(2.0, 0.5)], "a<b": [(3.0, 0.1)]}
    svg = draw(points, around([2.0, 3.0]), evenly(1.0), title="t", x_label="x", y_label="y")
    assert ">a_method_of_a_l…<" in svg
    assert ">a&lt;b<" in svg


@pytest.mark.parametrize("name", tables.PICTURES)
def test_pictures_of_the_page_show_what_the_results_say(name: str) -> None:
    kept = (tables.FOLDER / f"{name}.svg").read_text()
    assert kept == tables.PICTURES[name](), "run python -m docs.tables"


# ---------------------------------------------------------------------------------------------------------- drafts


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def test_followed_texts_are_accepted_as_acceptance_counts_them(
    checkpoint: Any, tmp_path: Any
) -> None:
    ck = models.load(checkpoint, dtype="float32")

    def load() -> models.Checkpoint:
        return ck

    task = continuing.make_task(ck, load, 96, folder=tmp_path, samples=2)
    again = continuing.make_task(
        ck, lambda: pytest.fail("weights were read"), 96, folder=tmp_path, samples=2
    )
    assert again == task, "the texts are kept"
    rows = make_rows(["full", "streaming_llm:budget=16,dense_layers=0"])
    made = plan.prepare(ck, task, rows, dtype="float32")
    full, window = plan.run(ck, made, continuing.follow, batch=2)
    assert full.scores.tolist() == [8.0, 8.0], "full attention follows its own text"

    spec = ck.model.spec(batch=1, capacity=96)
    for prompt, text, found in zip(task.prompts, task.texts, window.examples, strict=True):
        empty = kvjax.init(rows[1].policies, spec, layers=ck.config.layers)
        _, cache = kvjax.generation.prefill(ck.model, empty, np.array([prompt]))
        wanted, _ = acceptance(ck.model, cache, [text])
        assert found["agreement"] == pytest.approx(wanted.agreement)
        assert found["by_position"] == pytest.approx(wanted.by_position)


# --------------------------------------------------------------------------------------------------------- command


OWN = """
import kvjax


def mine(budget: int = 32):
    return kvjax.Evicting(evictor=kvjax.evictors.Sliding(sink=4), budget=budget)
"""


def test_a_board_is_written_and_an_own_method_is_added(
    checkpoint: Any,
    tmp_path: Any,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads: list[Any] = []
    load = models.load

    def count(directory: Any, **how: Any) -> models.Checkpoint:
        loads.append(directory)
        return load(directory, **how)

    monkeypatch.setattr("kvjax.models.load", count)
    (tmp_path / "mine.py").write_text(OWN)
    out = tmp_path / "out"
    small = ("--task", "pass_key:depths=2", "--length", "96", "--samples", "2", "--batch", "2")

    def run(*args: str) -> dict[str, Any]:
        given = ["eval", str(checkpoint), "--board", *small, "--out", str(out), *args]
        assert main(given) == 0, capsys.readouterr().err
        return json.loads((out / "board.json").read_text())

    first = run("--cache", "full")
    assert loads == [checkpoint], "scores and drafts share the weights"
    assert [one["cache"] for one in first["rows"]] == ["full", "full"]
    assert first["rows"][1]["mean"] == 8.0
    own = ("--cache", "full", "--cache", f"{tmp_path}/mine.py:mine", "--budget", "16,32")
    found = run(*own)
    assert "2 of 6 answers are in" in capsys.readouterr().err
    names = {one["cache"] for one in found["rows"]}
    assert names == {"full", "mine@16", "mine@32"}
    assert {"model", "made", "dtype", "tasks", "command", "refused"} <= found.keys()
    assert all(one.bytes_read for one in board.read_rows(found))
    page = (out / "board.md").read_text()
    assert "| `mine` |" in page
    assert "Nothing here says what methods keep beyond 96 tokens" in page
    for picture in out.glob("*.svg"):
        if picture.name.startswith("board-"):
            assert picture.name in page


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--step-times", "x.json"), "--step-times x.json is for --board; add it"),
        (("--board", "--cache", "fire"), "unknown cache 'fire'; did you mean 'fier'?"),
    ],
)
def test_a_wrong_board_is_refused_in_one_line(
    checkpoint: Any, args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(["eval", str(checkpoint), *args]) == 2
    assert message in capsys.readouterr().err


def test_json_of_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"format=1, got 7; make it again with kvjax eval"):
        board.read_rows({"format": 7, "rows": []})


def test_each_task_of_a_board_has_room_at_the_boards_own_length() -> None:
    tokenizer = AutoTokenizer.from_pretrained(models.shipped())
    tasks = make_tasks(list(board.TASKS), lengths=[board.TOKENS], samples=1)
    assert len(tasks) == 11
    assert all(len(task.examples(tokenizer)) == 1 for task in tasks)


def test_all_presets_that_apply_can_hold_the_model() -> None:
    config = read_settings(models.shipped())[0].config
    names = board.default_caches(config)
    assert len(names) == len(presets.REGISTRY) - 2, "two need a file of `kvjax heads`"
    rows = make_rows(names, budgets=[448])
    held = check_rows(rows, config.spec(1, 512, "float32"), config)
    assert not [row.refused for row in held if row.refused]
