"""The plan of benchmarks: its commands are valid; a run of it resumes, ends in time and keeps
all results.
"""

import argparse
import json
import runpy
import subprocess
import sys
import time
from itertools import pairwise

import pytest
import typer

import kvjax.cli
from benchmarks import plan, run
from kvjax.evaluate.caches import make_rows
from kvjax.evaluate.tasks import make_tasks

PLACES = {name: f"/{name}" for name in (*plan.INPUTS, "out")} | {"ruler_task": "variables"}
CELLS = plan.cells()
KINDS = list({cell.kind: cell for cell in CELLS}.values())


class Parsed(Exception):
    """The options of a script, in place of its run."""


@pytest.fixture
def parsed(monkeypatch):
    """parsed(words) are the options that a command understands."""
    parse = argparse.ArgumentParser.parse_args

    def stop(self, args=None, namespace=None):
        raise Parsed(parse(self, args, namespace))

    def options(words):
        if words[:2] == ["-m", "pytest"]:
            assert (plan.ROOT / words[2]).is_file()
            return argparse.Namespace()
        if words[:2] == ["-m", "kvjax.cli"]:
            command = typer.main.get_command(kvjax.cli.app).commands[words[2]]
            return argparse.Namespace(**command.make_context(words[2], list(words[3:])).params)
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
        is_module = words[0] == "-m"
        start = runpy.run_module if is_module else runpy.run_path
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [str(plan.ROOT / "benchmarks"), *sys.path])
            patch.setattr(sys, "argv", words[is_module:])
            with pytest.raises(Parsed) as found:
                start(words[is_module], run_name="__main__")
        return found.value.args[0]

    yield options
    folder = str(plan.ROOT / "benchmarks")
    for name in [
        n
        for n, m in sys.modules.items()
        if str(getattr(m, "__file__", "")).startswith(folder + "/")
    ]:
        if not name.startswith("benchmarks"):
            del sys.modules[name]


@pytest.mark.parametrize("kind", KINDS, ids=lambda cell: cell.kind)
def test_every_command_of_the_plan_has_options_that_its_script_knows(kind, parsed):
    for cell in CELLS:
        if cell.kind != kind.kind:
            continue
        for smoke in (False, True):
            given = vars(parsed(cell.words(PLACES, cell.smoke if smoke else "")))
            out = given.get("out")
            assert out is None or str(out).startswith("/out"), (
                "results must lie in the run's folder"
            )
            assert (
                smoke or not cell.warms or parsed(cell.words(PLACES, plan.WARMING)).calls == 2
            )
            tried = (
                not smoke
                or given.get("quick") is not False
                or cell.kind.startswith("kvjax.cli")
            )
            assert tried, "what asks for a GPU cannot be tried here"
        known = METHODS.get(cell.kind)
        if known is not None:
            script = runpy.run_path(cell.words(PLACES)[0])
            assert set(given["methods"]) <= {
                *script[known],
                *script.get("MORE", ()),
                *BESIDE.get(cell.kind, ()),
            }
    if kind.kind == "kvjax.cli eval":
        assert (
            len(make_tasks([run.RULER], lengths=[4096], samples=1, text=plan.ROOT / "LICENSE"))
            == 10
        )
    if kind.kind.startswith("kvjax.cli"):
        for cell in (cell for cell in CELLS if cell.kind == kind.kind):
            words = cell.command.split()
            caches = [cache for option, cache in pairwise(words) if option == "--cache"]
            for cache in caches:
                assert make_rows(
                    [cache], budgets=None if cache.partition(":")[0] in plan.WHOLE else [1024]
                )


# Where a script has its methods by name, and what it takes beside these.
METHODS = {
    "decode_step.py": "METHODS",
    "decode_tokens.py": "METHODS",
    "shared.py": "METHODS",
    "ttft.py": "METHODS",
}
METHODS |= {
    "prefill.py": "POLICIES",
    "end_to_end.py": "METHODS",
    "compared.py": "METHODS",
    "devices.py": "METHODS",
}
METHODS |= {"million.py": "METHODS"}
BESIDE = {"ttft.py": ["floor"]}


def test_the_plan_covers_its_parts_and_names_each_cell_once():
    names = [run.name_of(cell) for cell in CELLS]
    assert len(set(names)) == len(names)
    assert {cell.part for cell in CELLS} == set(plan.PARTS)
    assert max(cell.seconds for cell in CELLS) <= 540  # fits in a piece of nine minutes
    needed = {name for cell in CELLS for name in cell.needs}
    assert needed == set(plan.INPUTS)
    for cell in CELLS:
        assert "{" not in " ".join(cell.words(PLACES, cell.smoke)), cell.command
    assert {cell.kind for cell in CELLS if not cell.timed} == set(plan.UNTIMED)


# ---------------------------------------------------------------------------- the runner, with commands of its own

SCRIPT = """
import pathlib, sys, time
out, seconds, code = pathlib.Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
out.parent.mkdir(parents=True, exist_ok=True)
out.open("a").write("a row\\n")
print("begins", flush=True)
time.sleep(seconds)
sys.exit(code)
"""


@pytest.fixture
def go(tmp_path, monkeypatch, capsys):
    """go(cells, *options) runs these cells in place of the plan's; returns its exit code, its
    output and the states.
    """
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def cell(name, seconds=0.0, code=0, limit=30, **how):
        return plan.Cell(
            "steps", name, f"{script} {{out}}/{name} {seconds} {code}", "", limit, **how
        )

    def start(made, *options, device="a GPU, jax 1"):
        monkeypatch.setattr(run, "cells", lambda: [cell(*one[0], **one[1]) for one in made])
        monkeypatch.setattr(run, "devices", lambda: ("gpu", 1, device))
        code = run.main(["--out", str(tmp_path / "out"), *options])
        states = json.loads((tmp_path / "out" / "cells.json").read_text())["cells"]
        return (
            code,
            capsys.readouterr().out,
            {name.partition(": ")[2]: one["status"] for name, one in states.items()},
        )

    return start


def rows(tmp_path, name):
    return (tmp_path / "out" / "results" / name).read_text().count("a row")


def test_a_second_run_goes_on_with_what_is_left(go, tmp_path, monkeypatch):
    made = [(("a",), {}), (("b",), {"code": 3}), (("c",), {})]
    code, told, states = go(made)
    assert code == 1
    assert states == {"a": "ok", "b": "failed", "c": "ok"}
    assert "steps: b | failed" in told
    assert "begins" in told, "the last line of what failed"
    code, told, _ = go(made)
    assert code == 0
    assert "3 known before" in told
    assert rows(tmp_path, "a") == 1
    go(made, device="another GPU, jax 1")
    monkeypatch.setattr(run, "digest_of_code", lambda: "other")
    go(made)
    assert rows(tmp_path, "a") == 3


def test_a_cell_whose_command_changed_runs_again_and_no_other(go, tmp_path):
    go([(("a",), {}), (("b",), {})])
    _, told, _ = go([(("a",), {"seconds": 0.1}), (("b",), {})])
    assert "1 ok; 1 known before" in told
    assert (rows(tmp_path, "a"), rows(tmp_path, "b")) == (2, 1)
    code = {file: (plan.ROOT / "benchmarks" / file).read_bytes() for file in run.THIS}
    assert all(code.values()), "files that the digest leaves out are there"


def test_nothing_is_measured_without_a_gpu(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run.main(["--out", str(tmp_path / "out")])
    assert "this measures a GPU, and jax finds cpu" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_cell_over_its_limit_ends_and_the_next_ones_run(go, tmp_path):
    start = time.monotonic()
    code, _, states = go([(("slow",), {"seconds": 60, "limit": 2}), (("next",), {})])
    assert code == 1
    assert states == {"slow": "over its limit", "next": "ok"}
    assert time.monotonic() - start < 40
    assert rows(tmp_path, "slow") == 1  # what it had written is kept


def test_a_run_ends_within_its_minutes_and_begins_nothing_that_would_not_end(go, tmp_path):
    made = [(("long",), {"limit": 300}), (("short",), {"limit": 3})]
    code, told, states = go(made, "--minutes", "0.4")
    assert code == 0
    assert states == {"short": "ok"}
    assert "1 for which no time was left" in told


def test_programs_are_compiled_beforehand_and_not_measured_there(go, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "WARMED", (str(tmp_path / "script.py"),))
    made = [((name,), {}) for name in "abc"]
    code, told, states = go(made, "--parallel", "3")
    assert code == 0
    assert "compiled beforehand for 3 cells" in told
    assert set(states.values()) == {"ok"}
    assert [rows(tmp_path, name) for name in "abc"] == [1, 1, 1], (
        "what they timed together is thrown away"
    )
    assert "compiled" not in go(made, "--parallel", "3")[1], "nothing is left to be measured"


def test_what_is_not_timed_runs_side_by_side_and_first(go, tmp_path, monkeypatch):
    script = str(tmp_path / "script.py")
    monkeypatch.setattr(plan, "UNTIMED", (script,))
    start = time.monotonic()
    code, told, states = go(
        [((name,), {"seconds": 3.0}) for name in "abc"] + [(("d",), {"code": 3})],
        "--parallel",
        "4",
    )
    assert time.monotonic() - start < 9, "one after the other they take nine seconds"
    assert code == 1
    assert states == {"a": "ok", "b": "ok", "c": "ok", "d": "failed"}
    assert "3 ok; 1 failed" in told


def test_processes_beside_one_another_divide_the_memory(tmp_path, monkeypatch):
    names = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE")
    for name in names:
        monkeypatch.setenv(name, "as the shell has it")
    given = run.options().parse_args(["--out", str(tmp_path), "--parallel", "2"])
    one, own = (plan.Cell("steps", "a", "a.py", "", 9, env) for env in ({}, {names[0]: ".15"}))
    assert [run.environment(one, given, parallel=True)[name] for name in names] == [
        "0.46",
        "false",
    ]
    assert run.environment(own, given, parallel=True)[names[0]] == ".15"
    assert {run.environment(one, given)[name] for name in names} == {"as the shell has it"}


def test_a_cell_without_its_input_is_left_out_and_told(go, tmp_path, monkeypatch, capsys):
    one = plan.Cell(
        "checkpoint", "eval", "-m kvjax.cli eval {checkpoint} --data {gsm8k}", "", 9
    )
    monkeypatch.setattr(
        run, "cells", lambda: [one, plan.Cell("devices", "full", "devices.py", "", 9)]
    )
    monkeypatch.setattr(run, "devices", lambda: ("gpu", 1, "a GPU"))
    assert run.main(["--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert "checkpoint: eval needs --checkpoint, --gsm8k" in told
    assert "devices: full needs two devices" in told
    with pytest.raises(SystemExit):
        run.main(["--out", str(tmp_path / "out"), "--text", "nowhere.txt"])
    assert "--text nowhere.txt: there is no such file" in capsys.readouterr().err


def test_the_runner_imports_no_jax():
    """It would hold the GPU's memory."""
    code = "import sys; import benchmarks.run; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=plan.ROOT).returncode == 0


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS, ids=lambda cell: cell.kind)
def test_every_command_runs_with_its_smallest_sizes(kind, tmp_path):
    name = run.name_of(kind)
    assert (
        run.main(["--smoke", "--out", str(tmp_path), "--parts", kind.part, "--match", name])
        == 0
    )
    assert json.loads((tmp_path / "cells.json").read_text())["cells"][name]["status"] == "ok"
