"""README: its Python runs, its commands are those of CI, its table is that of the registry."""

import ast
import importlib
import json
import re
from dataclasses import astuple
from functools import reduce
from pathlib import Path

import pytest
from kvjax.kernels_pallas import score_pages, select_4bit

from kvjax import models
from kvjax.presets import REGISTRY
from tests.checkpoint import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[tuple[int, str]]:
    """(first line, text) of each fenced block."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [(README.count("\n", 0, m.start(1)), m[1]) for m in found]


def section(title: str) -> str:
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_python_blocks_run_in_order(tmp_path, monkeypatch, capsys):
    small = write_checkpoint(tmp_path / "model")  # what ships is asked elsewhere, and takes longer to compile
    monkeypatch.setattr(models, "shipped", lambda: small)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "readme"}
    for line, text in blocks("python"):
        exec(compile("\n" * line + text, str(ROOT / "README.md"), "exec"), names)
    assert "[301] [[64. 64.]]" in capsys.readouterr().out


def test_hook_is_shown_in_ten_lines():
    hook = blocks("python")[0][1].split("\n\n", 1)[1]
    assert "kvjax.attention(" in hook
    assert len([line for line in hook.splitlines() if line]) <= 10


def test_ci_runs_the_two_commands_of_readme():
    """CI takes the shell blocks from README itself, so there must be two and it must spell neither."""
    setup, test = (text for _, text in blocks("sh"))
    assert "-c constraints.txt" in setup
    assert "kvjax generate" in setup
    assert README.count("<!-- .ci/run runs the next block -->\n```sh\n") == 2
    script = (ROOT / ".ci" / "run").read_text()
    assert "readme_block 1" in script
    assert "readme_block 2" in script
    assert "pip install" not in script
    assert "pytest" in test
    assert "-m pytest" not in script


def test_table_of_methods_is_the_registry():
    rows = re.findall(r"^\| (`.*) \|$", section("Methods"), re.MULTILINE)
    assert rows == [f"`{p.name}` | {p.keeps} | {p.paper}" for p in REGISTRY.values()]


RESULTS = ROOT / "benchmarks" / "results"
# What a kernel is given without being asked, where that changed after its benchmark.
DEFAULTS = {
    name: "x".join(str(size) for size in astuple(config))
    for name, config in (("score_pages", score_pages.Config()), ("select_4bit", select_4bit.config_for(8, 13108, 256)))
}


def test_the_table_of_needles_says_what_its_file_says():
    found = json.loads((RESULTS / "eval.json").read_text())["results"]
    lengths, budgets = (4096, 8192, 16384), (None, 16, 32, 64, 128, 256, 512)
    rows = []
    for method in dict.fromkeys(cache.partition("@")[0] for cache in found["1 of 8 needles at 8192"]["caches"]):
        cells = [f"`{method}`"]
        for budget in budgets:
            names = [method if budget is None else f"{method}@{budget}"] * len(lengths)
            of = [found[f"1 of 8 needles at {n}"]["caches"].get(name) for n, name in zip(lengths, names, strict=True)]
            cells.append(" ".join(f"{x['mean']:.2f}".removeprefix("0") for x in of if x))
        rows.append(f"| {' | '.join(cells)} |")
    assert re.findall(r"^\| `.*", section("What a method keeps"), re.MULTILINE) == rows


def test_the_table_of_perplexities_says_what_its_file_says():
    rows = json.loads((RESULTS / "perplexity.json").read_text())["rows"]
    wanted = []
    for name in dict.fromkeys(row["cache"] for row in rows):
        own = [row for row in rows if row["cache"] == name]
        told = (f"{x['perplexity']:.2f}" if name == "full" else f"{100 * (x['ratio'] - 1):+.1f} %" for x in own)
        wanted.append(" | ".join(told))
    assert [line for line in wanted if f"| {line} |" in section("What a method keeps")] == wanted


def rows_of(name):
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def steps_of_users():
    rows = (row for row in rows_of("decode_step") if row["implementation"] == "default")
    return {(row["length"], row["batch"], row["method"]): row for row in rows}


def test_the_table_of_steps_says_what_its_file_says():
    steps, wanted = steps_of_users(), []
    for size in sorted({key[:2] for key in steps}):
        cells = [f"{size[0]} x {size[1]}"]
        for method in ("cudnn", "full", "fier", "quest", "pariskv", "logquant"):
            row = steps[*size, method]
            times = "" if method == "cudnn" else f", {row['times_faster_than_cudnn']:.2f}x"
            cells.append(f"{row['us']:.1f} ({row['floor_us']:.1f}){times}")
        wanted.append(f"| {' | '.join(cells)} |")
    assert re.findall(r"^\| \d+ x .*", section("Speed"), re.MULTILINE) == wanted


def test_the_table_of_steps_in_plain_jax_says_what_its_file_says():
    rows = [row for row in rows_of("decode_step") if row["batch"] == 1]
    found = {(row["method"], row["length"]): f"{row['us']:.0f}" for row in rows if row["implementation"] == "xla"}
    found |= {(row["method"], row["length"]): f"{row['us']:.0f}" for row in rows if row["method"] == "by hand"}
    lengths = sorted({length for method, length in found if method != "by hand"})
    columns = ("by hand", "fier", "quest", "pariskv", "logquant")
    wanted = [f"| {n} | {' | '.join(found.get((method, n), '') for method in columns)} |" for n in lengths]
    assert re.findall(r"^\| \d+ \| .*", section("Speed"), re.MULTILINE) == wanted


def test_the_table_of_kernels_says_what_their_files_say():
    rows = re.findall(r"^\| `(\w+)`: .* \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", section("Speed"), re.MULTILINE)
    files = {path.stem for path in RESULTS.glob("*.json") if '"kernel": ' in path.read_text()}
    assert {name for name, *_ in rows} == files
    for name, *told in rows:
        row = rows_of(name)[0]
        us, floor = row["all"][DEFAULTS[name]] if name in DEFAULTS else row["kernel"], row["floor"]
        assert told == [f"{x:.1f}" for x in (us, floor, row["xla"])], name


CACHES = {"cudnn": "full attention by cuDNN"} | {
    name: f"`{name}`" for name in ("full", "fier", "quest", "pariskv", "freekv", "freekv:tau=-1", "logquant")
}


def test_the_table_of_tokens_says_what_its_file_says():
    rows = [row for row in rows_of("end_to_end") if not row.get("largest_batch")]
    took = {(row["cache"], row["batch"], row["length"]): f"{row['tpot_ms']:.2f}" for row in rows}
    sizes = sorted({key[1:] for key in took}, key=lambda size: size[::-1])
    wanted = [f"| cache | {' | '.join(f'{batch} x {length}' for batch, length in sizes)} |"]
    for cache, shown in CACHES.items():
        cells = [took.get((cache, *size), "") for size in sizes]
        wanted.append(f"| {shown} | {' | '.join(cells)} |")
    lines = section("Speed").splitlines()
    assert [line for line in wanted if line in lines] == wanted


def test_the_table_of_largest_batches_says_what_its_file_says():
    largest = [row for row in rows_of("end_to_end") if row.get("largest_batch")]
    found = {(row["cache"], row["length"]): f"{row['batch']} | {row['tokens_per_second']:.0f}" for row in largest}
    caches = [cache for cache in CACHES if any(cache == name for name, _ in found)]
    wanted = [
        f"| {CACHES[cache]} | {' | '.join(found.get((cache, n), ' | ') for n in (32768, 131072))} |" for cache in caches
    ]
    lines = section("Speed").splitlines()
    assert [line for line in wanted if line in lines] == wanted


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_names_and_files_on_a_page_exist(page):
    text = (ROOT / page).read_text()
    files = re.findall(r"\]\(([^)#:]+)\)|`((?:kvjax|tests|models|kernels_pallas|\.ci)/[\w/.]*)`", text)
    for name in map("".join, files):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`kvjax\.([\w.]+)", text):
        first, *rest = name.split(".")
        try:
            thing = importlib.import_module(f"kvjax.{first}")
        except ModuleNotFoundError:
            thing = getattr(importlib.import_module("kvjax"), first)
        reduce(getattr, rest, thing)


def test_suite_reads_nothing_outside_the_repository():
    """No absolute path, home directory or address in any string of the tests (JAX events and /nowhere excepted)."""
    outside = re.compile(r"^(/(?!jax/|nowhere/)\w+/|~/|[a-z]+://)")
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not outside.match(node.value), f"{path.relative_to(ROOT)}:{node.lineno}: {node.value!r}"
