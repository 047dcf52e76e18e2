"""The command by its entry point, and a random checkpoint in Hugging Face format."""

import functools
from collections.abc import Iterator

import pytest
import typer.main

from kvjax.cli import main
from tests.checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def kvjax(capsys):
    """Runs the command by its entry point and returns (exit code, stdout, stderr)."""

    def run(*args):
        code = main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture(autouse=True, scope="session")
def commands_built_once() -> Iterator[None]:
    """typer reads the options of all commands again in each call of one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield
