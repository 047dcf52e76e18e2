"""README: its Python runs, its commands are those of CI, its table is that of the registry."""

import ast
import importlib
import re
from functools import reduce
from pathlib import Path

import pytest

from kvjax.presets import REGISTRY

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[tuple[int, str]]:
    """(first line, text) of each fenced block."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [(README.count("\n", 0, m.start(1)), m[1]) for m in found]


def test_python_blocks_run_in_order(tmp_path, monkeypatch, capsys):
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
    rows = re.findall(r"^\| (`.*) \|$", README, re.MULTILINE)
    assert rows == [f"`{p.name}` | {p.keeps} | {p.paper}" for p in REGISTRY.values()]


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
