"""Tables and plots of results that are made up here."""

import dataclasses
import json
import sys

import numpy as np
import pytest

from kvjax.evaluate import plots, report
from kvjax.evaluate.store import Cell, read_cells
from kvjax.presets import REGISTRY

KEY = {"dtype": "float32", "model": "abc", "kvjax": "1"}
MADE = {"date": "2026-01-02T03:04:05", "versions": {"jax": "1.2.3"}, "device": "cpu"}


def cell(cache, length, scores, title="needle"):
    budget = int(cache.partition("@")[2]) if "@" in cache else None
    examples = [
        {"id": str(i), "score": s, "answer": str(s), "fields": {"depth": float(i % 2)}}
        for i, s in enumerate(scores)
    ]
    batches = (
        [
            {
                "examples": examples,
                "attended_by_layer": [float(budget or 500), 500.0],
                "steps": 1,
                "seconds": 1.0,
            }
        ]
        if scores
        else []
    )
    task = {"title": title, "length": length}
    head = {
        "budget": budget,
        "model": {"name": "tiny", "layers": 2},
        "dense_layers": 1,
        "made": [MADE],
    }
    return Cell(
        f"{title} at {length}",
        "exact match",
        cache,
        {**KEY, "task": task},
        head,
        4,
        None,
        batches,
    )


CELLS = [
    cell("full", 512, [1.0, 1.0, 1.0, 1.0]),
    cell("fier@64", 512, [1.0, 0.0, 1.0, 0.0]),
    cell("fier@16", 512, [1.0, 0.0, 0.0, 0.0]),
    cell("full", 1024, [1.0, 1.0, 1.0, 0.0]),
    cell("fier@16", 1024, [0.0, 0.0, 0.0, 0.0]),
    cell("fier@64", 1024, [0.5, 0.5, 0.0, 0.25]),
    cell("fier@64", 2048, []),
]


def test_the_table_has_a_row_a_cache_and_budget_with_tokens_read_and_a_block_a_length():
    assert report.table(CELLS[:3]) == (
        "### needle, 512 tokens\n\nExact match, n = 4.\n\n"
        "| cache | budget | tokens read | exact match | 95 % |\n| --- | ---: | ---: | ---: | ---: |\n"
        "| `full` | all | 500 | 1.00 | 0.51 to 1.00 |\n"
        "| `fier` | 16 | 258 | 0.25 | 0.05 to 0.70 |\n"
        "| `fier` | 64 | 282 | 0.50 | 0.15 to 0.85 |\n"
    )
    whole = report.table(CELLS)
    assert [line for line in whole.splitlines() if line.startswith("#")] == [
        "### needle, 512 tokens",
        "### needle, 1024 tokens",
    ]


def test_caches_that_were_not_run_are_told_with_the_reason_and_rounded_budgets_too():
    refused = dataclasses.replace(
        CELLS[1], cache="pariskv@64", batches=[], refused="the budget is too small"
    )
    floored = dataclasses.replace(
        CELLS[2], head={**CELLS[2].head, "note": "reads 8: whole pages of 8"}
    )
    told = report.table([CELLS[0], refused, floored])
    assert told.endswith("\nNot run: `pariskv@64`: the budget is too small.\n")
    assert "| `fier` | 16 (reads 8: whole pages of 8) | 258 |" in told
    assert report.summary([CELLS[0], refused])["refused"] == {
        "pariskv@64": "the budget is too small"
    }


def test_both_protocols_of_a_question_are_blocks_of_their_own():
    def of(question):
        return dataclasses.replace(
            CELLS[0], key={**KEY, "task": {**CELLS[0].key["task"], "question": question}}
        )

    titles = [block.title for block in report.blocks([of("decoded"), of("prefilled")])]
    assert titles == ["needle, question decoded", "needle, question prefilled"]


def test_a_comparison_shows_itself_as_columns():
    assert report.plain(report.table(CELLS[:2])).splitlines()[4:] == [
        "cache  budget  tokens read  exact match          95 %",
        "full      all          500         1.00  0.51 to 1.00",
        "fier       64          282         0.50  0.15 to 0.85",
    ]


def test_the_page_says_model_versions_and_date():
    page = report.page(CELLS)
    for part in (
        "# tiny, float32",
        "jax 1.2.3",
        "2026-01-02",
        "cpu",
        report.overview(CELLS),
        report.table(CELLS),
    ):
        assert part in page
    other = dataclasses.replace(
        CELLS[0], head={**CELLS[0].head, "made": [{**MADE, "device": "gpu"}]}
    )
    assert "Greedy decoding through each cache." in page
    assert "2026-01-02, cpu, jax 1.2.3; 2026-01-02, gpu, jax 1.2.3." in report.page(
        [*CELLS, other]
    )


def test_the_overview_has_all_lengths_of_a_task_in_each_place():
    others = [cell("full", 512, [1.0], title="key"), cell("h2o@16", 512, [1.0])]
    assert report.overview([*CELLS[3:], *CELLS[:3], *others]) == (
        "### needle, 512 / 1024 tokens\n\nExact match at each length, n = 1 to 4 / 4.\n\n"
        "| cache | budget | tokens read | exact match |\n| --- | ---: | ---: | ---: |\n"
        "| `full` | all | 500 / 500 | 1.00 .75 |\n| `fier` | 16 | 258 / 258 | .25 .00 |\n"
        "| `fier` | 64 | 282 / 282 | .50 .31 |\n| `h2o` | 16 | 258 / - | 1.00 - |\n\n"
    )
    assert report.overview(CELLS[:3]) == ""


def test_the_summary_says_what_was_run_and_the_scores():
    found = json.loads(json.dumps(report.summary(CELLS)))
    assert found["made"] == [MADE]
    assert (found["model"], found["dtype"], found["kvjax"]) == (
        {"name": "tiny", "layers": 2, "digest": "abc"},
        "float32",
        "1",
    )
    assert list(found["results"]) == ["needle at 512", "needle at 1024"]
    short = found["results"]["needle at 1024"]
    assert short["task"]["length"] == 1024
    assert {name: one["mean"] for name, one in short["caches"].items()} == {
        "full": 0.75,
        "fier@16": 0,
        "fier@64": 0.3125,
    }


def test_the_summary_compares_with_full_attention_question_by_question():
    found = report.summary(CELLS)["results"]["needle at 1024"]["caches"]
    assert "difference" not in found["full"]
    by_question = np.array([0.5 - 1, 0.5 - 1, 0.0 - 1, 0.25 - 0])
    assert found["fier@64"]["difference"] == round(by_question.mean(), 4)
    assert found["fier@64"]["difference_stderr"] == round(
        np.sqrt(by_question.var(ddof=1) / 4), 4
    )
    assert found["fier@64"]["other_wording"] == 1.0
    assert found["fier@16"]["other_wording"] == 0.75  # of the last question both say 0.0
    assert (
        "difference"
        not in report.summary(CELLS[1:3])["results"]["needle at 512"]["caches"]["fier@64"]
    )


def test_the_summary_compares_every_two_caches_question_by_question():
    found = report.summary(CELLS)["results"]["needle at 1024"]["differences"]
    assert {one: list(others) for one, others in found.items()} == {
        "fier@16": ["full"],
        "fier@64": ["full", "fier@16"],
    }
    full, few, more = (
        np.array([one["score"] for one in cell.examples])
        for cell in CELLS
        if cell.task == "needle at 1024"
    )
    for name, other in (("full", full), ("fier@16", few)):
        by_question = more - other
        error = by_question.std(ddof=1) / np.sqrt(len(by_question))
        assert found["fier@64"][name] == [round(by_question.mean(), 4), round(error, 4)]


def test_cells_of_several_runs_come_in_the_order_of_tables(tmp_path):
    def save(one, run):
        one = dataclasses.replace(
            one, path=tmp_path / run / "results" / f"{one.task} {one.cache}.json"
        )
        one.save()
        return one.path

    for i, one in enumerate(reversed(CELLS)):
        save(one, str(i % 2))
    save(dataclasses.replace(CELLS[1], batches=[]), "begun")
    found = read_cells(tmp_path)
    assert [(c.cache, c.key["task"]["length"]) for c in found] == [
        *(("full", 512), ("fier@16", 512), ("fier@64", 512)),
        *(("full", 1024), ("fier@16", 1024), ("fier@64", 1024), ("fier@64", 2048)),
    ]
    assert report.table(found[:3]) == report.table(CELLS[:3])
    assert len(found[2].examples) == 4

    other = save(dataclasses.replace(CELLS[1], key={**CELLS[1].key, "kvjax": "other"}), "other")
    with pytest.raises(
        ValueError, match="the same task and cache, but different keys; move one away"
    ):
        read_cells(tmp_path)
    other.unlink()
    save(cell("h2o@16", 512, [1.0]), "h2o")
    odd = cell("quest@16", 512, [1.0])
    save(dataclasses.replace(odd, key={**odd.key, "model": "other"}), "odd")
    with pytest.raises(
        ValueError, match="are not of the same model; report on them one at a time"
    ):
        read_cells(tmp_path)


def test_a_cache_with_many_settings_is_kept_in_a_file_with_a_short_name(tmp_path):
    long = cell("pariskv:" + "dense_capacity=0," * 14 + "radius_bits=4@64", 512, [1.0])
    long.open(tmp_path / "results", {"0"})
    long.save()
    (path,) = (tmp_path / "results").iterdir()
    assert len(path.name) < 200
    assert [one.cache for one in read_cells(tmp_path)] == [long.cache]


def test_everything_is_written(tmp_path):
    written = plots.write(CELLS, tmp_path / "out")
    assert [path.name for path in written] == [
        "table.md",
        "summary.json",
        "needle-by-budget.svg",
    ]
    assert all(path.stat().st_size > 500 for path in written)


def test_without_a_curve_there_is_no_plot(tmp_path):
    cells = [cell("full", 512, [1.0]), cell("fier@16", 512, [1.0])]
    assert [path.name for path in plots.write(cells, tmp_path)] == ["table.md", "summary.json"]


def test_lines_are_the_means_by_budget_in_the_colour_of_the_method():
    figure = plots.by_budget(report.blocks(CELLS))
    left, right = figure.axes
    (line,) = (line for line in left.lines if line.get_marker() != "None")
    assert line.get_color() == plots.COLOURS["fier"]
    np.testing.assert_array_equal(
        line.get_xdata(), [258, 282], "tokens read, dense layers included"
    )
    np.testing.assert_array_equal(line.get_ydata(), [0.25, 0.5])
    (dashed,) = (line for line in right.lines if line.get_marker() == "None")
    np.testing.assert_array_equal(dashed.get_ydata(), [0.75, 0.75])
    assert {text.get_text() for text in left.texts} == {"full", "fier"}
    assert "needle" in figure.get_suptitle()
    assert "n = 4" in figure.get_suptitle()


def test_many_settings_of_a_preset_get_a_panel_and_colours_the_same_in_each():
    rules = ("mean_query", "mean_score", "max_softmax", "sum_softmax", "per_head")
    names = [f"{name}:group_reduce={rule}" for name in ("fier", "quest") for rule in rules]
    cells = [cell(f"{name}@{budget}", 512, [1.0, 0.0]) for name in names for budget in (16, 64)]
    left, right = plots.by_budget(report.blocks(cells)).axes
    colours = [[line.get_color() for line in axis.lines] for axis in (left, right)]
    assert colours[0] == colours[1]
    assert len(set(colours[0])) == len(rules)
    assert {text.get_text() for text in left.texts} == set(names[:5])


@pytest.mark.parametrize(
    "places", [[0.5] * 4, [0.0, 0.01, 0.5, 0.51, 0.52], [1.0] * 3, [0.1, 0.9]]
)
def test_labels_keep_their_distance_and_their_order(places):
    found = plots.spread(places, gap=0.05, top=1.0)
    assert np.all(np.diff(found) >= 0.05 - 1e-9)
    assert max(found) <= 1.0 + 1e-9
    if min(np.diff(places)) >= 0.05:
        assert found == pytest.approx(places)


def test_every_preset_has_a_colour_and_a_marker_of_its_own():
    looks = [plots.style(name) for name in REGISTRY]
    assert len({look["color"] for look in looks}) == len(looks)
    assert len({look["marker"] for look in looks}) == len(looks)
    for name in REGISTRY:  # also as rows name it, whatever its settings and budget
        assert (
            plots.style(f"{name}@64")
            == plots.style(f"{name}:dense_layers=1@64")
            == plots.style(name)
        )
    among = ["fier", "fier:group_reduce=per_head"]
    plain, per_head = (plots.style(name, among) for name in among)
    assert plain["color"] == per_head["color"]
    assert plain["linestyle"] != per_head["linestyle"]


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="plots need matplotlib: pip install matplotlib"):
        plots.new_figure(1, 1)
