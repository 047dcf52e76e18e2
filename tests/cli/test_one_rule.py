"""One rule over all commands: the same option takes the same values, and a wrong value is the same
sentence, before anything is compiled.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvjax.cli import main
from kvjax.cli import options as shared
from tests.checkpoint import LAYERS, POSITIONS, write_checkpoint

CACHES = ("generate", "compare", "eval", "perplexity", "chat", "warm")
BUDGETS = ("generate", "compare", "eval", "perplexity", "chat", "warm")
DTYPES = ("generate", "compare", "eval", "perplexity", "chat", "warm")

# What each command needs besides the option that is tried.
NEEDED = {
    "generate": ["--prompt", "a"],
    "compare": ["--prompt", "a"],
    "eval": ["--length", "480", "--samples", "1"],
    "perplexity": ["--text", "TEXT", "--length", "64", "--steps", "2"],
    "chat": [],
    "warm": ["--capacity", "64"],
}

WRONG_CACHES = {
    "fire": "unknown cache 'fire'; did you mean 'fier'?",
    "fier:grup=16": "'grup=16' is not a setting of fier; write NAME=VALUE, of budget, group",
    "no.py:mine": "no.py:mine: there is no file ",
    "mine.py": "mine.py: names a file alone; write mine.py:NAME",
    "mine.py:mien": "mine.py has no 'mien'; did you mean 'mine'?",
    "mine.py:number": "mine.py:number must be a policy, a selector, an evictor, ",
    "mine.py:breaks": "mine.py:breaks() raised KeyError: 'missing'",
    "raises.py:x": "raises.py raised NameError on line 1: name 'y' is not defined",
    "nowhere:mine": "there is no module 'nowhere'; install it, or write FILE.py:NAME",
    "mine.py:mine:size=3": "'size=3' is not a setting of mine.py:mine; write NAME=VALUE, of budget, unit",
}
WRONG_BUDGETS = ("0", "-5", "many", "16k5", "1.5", "")
MINE = """
import kvjax


def mine(budget=24, unit=8):
    return kvjax.Retrieval(selector=kvjax.Fier(group=16), budget=budget, sink=0, local=4)


def breaks():
    return {}["missing"]


number = 3
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "raises.py").write_text("x = y\n")
    (tmp_path / "book.txt").write_text("It was the best of times, it was the worst. " * 30)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(
    capsys: pytest.CaptureFixture[str], directory: Path, command: str, *args: str
) -> str:
    """The one line of error that a command ends with."""
    needed: list[str] = []
    for option, value in zip(NEEDED[command][::2], NEEDED[command][1::2], strict=True):
        if option not in args:
            needed += [option, "book.txt" if value == "TEXT" else value]
    assert main([command, str(directory), *needed, *args]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize("command", CACHES)
def test_a_wrong_cache_is_the_same_sentence(
    command: str, directory: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for cache, message in WRONG_CACHES.items():
        assert message in refused(capsys, directory, command, "--cache", cache)


@pytest.mark.parametrize("command", BUDGETS)
def test_a_wrong_budget_is_the_same_sentence(
    command: str, directory: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for budget in WRONG_BUDGETS:
        line = refused(capsys, directory, command, "--cache", "fier", "--budget", budget)
        assert "from 1, such as 8192, 8K or 1M" in line
        assert line.endswith(f"got {budget!r}")
    line = refused(capsys, directory, command, "--cache", "full", "--budget", "8")
    assert "full" in line
    assert "has no budget" in line or "none has a budget" in line
    line = refused(capsys, directory, command, "--cache", "fier:budget=8", "--budget", "9")
    assert "set two budgets" in line or "set their own" in line


@pytest.mark.parametrize("command", DTYPES)
def test_a_wrong_dtype_is_the_same_sentence(
    command: str, directory: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for dtype in ("int8", "bf17"):
        line = refused(capsys, directory, command, "--dtype", dtype)
        assert "a cache cannot hold dtype" in line
        assert "use one of bfloat16" in line


@pytest.mark.parametrize(
    ("short", "long"), [("bf16", "bfloat16"), ("f32", "float32"), ("fp16", "float16")]
)
def test_short_names_of_dtypes(short: str, long: str) -> None:
    assert shared.dtype_name(short) == shared.dtype_name(long) == long


def test_budgets_have_units() -> None:
    policy, budget = shared.make_policy("fier", "2K")
    assert budget == policy.rest.budget == 2048  # type: ignore[attr-defined]


def test_a_capacity_beyond_the_positions_of_the_model_compiles_nothing(
    directory: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, directory, "warm", "--capacity", "1m")
    assert f"--capacity 1m is more than the model's {POSITIONS} positions" in line


def test_layers_that_are_all_dense_are_refused(
    directory: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("generate", "compare", "eval", "perplexity"):
        args = ["--cache", f"mine.py:mine:dense_layers={LAYERS}"]
        assert "so no layer uses it" in refused(capsys, directory, command, *args)


def test_default_lengths_of_perplexity_fit_the_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from kvjax.cli.perplexity import LENGTHS, _default_lengths

    assert _default_lengths(None, 256) == _default_lengths(8192, 256) == LENGTHS
    assert _default_lengths(2048, 256) == (1024,)
    assert _default_lengths(512, 256) == (257,)


def test_a_task_of_the_harness_is_told_where_it_is(
    directory: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, directory, "eval", "--task", "gsm8k")
    assert "python -m kvjax.evaluate.harness run --model kvjax --tasks gsm8k" in line


def test_bench_says_what_it_does_where_there_is_no_gpu(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench"]) == 2
    assert "bench checks and times kernels, which run on an NVIDIA GPU or a TPU" in (
        capsys.readouterr().err
    )


# An option with two values, on each command; only those that may be repeated take them.
TWICE = {
    "generate": ("--budget", "8", "--budget", "9"),
    "compare": ("--dense-layers", "0", "--dense-layers", "1"),
    "eval": ("--resume", "--no-resume"),
    "perplexity": ("--dtype", "f32", "--dtype", "bf16"),
    "chat": ("--cache", "full", "--cache", "fier"),
    "warm": ("--cache", "full", "--cache", "fier"),
}
# An option with an empty path, as of a shell variable that is not set.
EMPTY = {
    "generate": "--prompt-file",
    "compare": "--prompt-file",
    "eval": "--out",
    "perplexity": "--out",
    "chat": "--resume",
}


def test_an_option_that_counts_once_is_given_once(
    directory: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, args in TWICE.items():
        line = refused(capsys, directory, command, *args)
        assert line == f"error: {args[0]} is given more than once; give it once"


def test_an_empty_path_is_not_the_current_folder(
    directory: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, option in EMPTY.items():
        line = refused(capsys, directory, command, option, "")
        assert line == f"error: {option} is empty; give a path"
    assert main(["warm", ""]) == 2
    assert "error: MODEL_DIR is empty; give a path" in capsys.readouterr().err


def test_methods_tells_the_settings_of_ones_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in ((), ("--json",)):
        assert main(["methods", "mine.py:mine", *more]) == 0
        out = capsys.readouterr().out
        assert "unit" in out
        assert "24" in out
        assert more or "mine.py:mine:budget=24,unit=8" in out
        assert not out.startswith("\n")


def test_a_path_that_cannot_be_is_one_sentence(
    directory: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "prompts").mkdir()
    wrong = {
        "x" * 5000: "File name too long",
        "~nobody-has-this-name/x": "there is no such user; give another path",
        "prompts": "is a folder; give a file with",
        "missing": "there is no such file",
    }
    for path, message in wrong.items():
        for command, option in (
            ("generate", "--prompt-file"),
            ("compare", "--prompt-file"),
            ("generate", "--prompts"),
        ):
            assert main([command, str(directory), option, path]) == 2
            line = capsys.readouterr().err.splitlines()[-1]
            assert line.startswith("error: ")
            assert message in line
    assert main(["warm", "x" * 5000]) == 2
    assert main(["warm", "~nobody-has-this-name/x"]) == 2
