"""Runs tests/devices, which need 8 devices, in a process of their own: XLA fixes the number
when it starts.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_on_eight_devices(request: pytest.FixtureRequest) -> None:
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    given = [name for name in ("--thorough", "--quick") if request.config.getoption(name)]
    if half := request.config.getoption("--half"):
        given.append(f"--half={half}")
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "tests/devices",
            "-q",
            "-p",
            "no:xdist",
            "-p",
            "no:cacheprovider",
            *given,
        ],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
