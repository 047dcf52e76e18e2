"""Ctrl-C ends the command with 130, in whichever library it finds the process."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.checkpoint import write_checkpoint

LATEST = 12.0  # seconds: by then the command decodes
COMMAND = [sys.executable, "-c", "import sys; from kvjax_command import main; sys.exit(main())"]


def interrupt(
    directory: Path, seconds: float | None, command: list[str] = COMMAND
) -> tuple[int, str]:
    """Starts the command, and interrupts it after some seconds, or when it has decoded a text;
    its exit code, and what it wrote to stderr."""
    long = [
        "generate",
        str(directory),
        "--prompt",
        "once upon a time",
        "--max-new-tokens",
        "200000",
    ]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [*command, *long], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root
    ) as process:
        if seconds is None:
            assert process.stdout is not None
            process.stdout.read(1)
        else:
            time.sleep(seconds)
        assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=60)[1]
    return process.returncode, errors


DELAYS = [0.3, 1.5, None, *(pytest.param(i, marks=pytest.mark.thorough) for i in range(100))]


@pytest.mark.parametrize("delay", DELAYS)
def test_an_interrupt_ends_the_command_with_130(
    tmp_path: Path, delay: float | int | None
) -> None:
    seconds = (
        delay
        if delay is None or isinstance(delay, float)
        else random.Random(delay).uniform(0.2, LATEST)
    )
    directory = write_checkpoint(tmp_path, max_position_embeddings=400_000)
    code, errors = interrupt(directory, seconds)
    assert code == 130, errors
    assert "Traceback" not in errors
    assert "KeyboardInterrupt" not in errors
