"""Several processes, each with a part of the devices, decode as one device does, and read each other's saves."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.models import Decoder, load, save
from tests.devices.test_models import CONFIG
from tests.devices.worker import METHOD, work

ROOT = Path(__file__).parents[2]


def run(processes: int, checkpoint: Path, saves: Path) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    here = f"device_count={8 // processes}"
    env = {**os.environ, "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", here)}
    given = [address, str(processes)]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.devices.worker", *given, str(number), str(checkpoint), str(saves)],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]
    try:
        texts = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode == 0 for process in started), texts[0][1][-3000:] + texts[-1][1][-3000:]
    return json.loads(texts[0][0].splitlines()[-1])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("model")
    save(
        folder / "checkpoint",
        Decoder(dataclasses.replace(CONFIG, layers=1, windows=CONFIG.windows[:1]), rngs=nnx.Rngs(7)),
    )
    return folder / "checkpoint", folder, work(str(folder / "checkpoint"), str(folder / "saves-1"), split=False)


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_processes_decode_as_one_does(alone: Any, processes: int) -> None:
    checkpoint, folder, one = alone
    assert run(processes, checkpoint, folder / f"saves-{processes}") == one
    like = load(checkpoint).init_cache(METHOD, capacity=128, batch=2, dtype="float32")
    here, there = (kvjax.restore(folder / f"saves-{n}", like) for n in (1, processes))
    for a, b in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=1e-5)
