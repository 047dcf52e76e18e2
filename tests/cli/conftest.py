"""The command by its entry point, and a random checkpoint in Hugging Face format."""

import pytest

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
