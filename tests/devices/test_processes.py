"""Several processes, each with a part of the devices, decode as one device does, and read each
other's saves.
"""

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
from tests.checkpoint import VOCAB, write_tokenizer
from tests.devices.test_models import CONFIG
from tests.devices.worker import METHOD, command, work

ROOT = Path(__file__).parents[2]


def run(
    processes: int, checkpoint: Path, saves: Path, read: Path, *more: str
) -> list[dict[str, Any]]:
    """The results of each process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    here = f"device_count={8 // processes}"
    env = {**os.environ, "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", here)}
    env |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes)}
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.devices.worker",
                str(checkpoint),
                str(saves),
                str(read),
                *more,
            ],
            cwd=ROOT,
            env={**env, "JAX_PROCESS_ID": str(number)},
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
    assert all(process.returncode == 0 for process in started), (
        texts[0][1][-3000:] + texts[-1][1][-3000:]
    )
    return [
        json.loads(Path(f"{saves}.{number}.json").read_text()) for number in range(processes)
    ]


def alone_in(folder: Path) -> dict[str, Any]:
    found = work(str(folder / "checkpoint"), *[str(folder / "saves-1")] * 2, split=False)
    assert found["tokens"][0] != found["tokens"][1], (
        "rows that were swapped would not be noticed"
    )
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("model")
    config = dataclasses.replace(CONFIG, vocab_size=VOCAB, layers=1, windows=CONFIG.windows[:1])
    save(folder / "checkpoint", Decoder(config, rngs=nnx.Rngs(7)))
    write_tokenizer(folder / "checkpoint")
    return folder / "checkpoint", folder, alone_in(folder)


@pytest.mark.parametrize(
    ("processes", "by_command"),
    [(2, False), *(pytest.param(n, True, marks=pytest.mark.thorough) for n in (4, 2))],
)
def test_processes_decode_as_one_does(alone: Any, processes: int, by_command: bool) -> None:
    """By `generate`, `stream`, and `decode` after a save; and by `kvjax generate`, where the
    first alone prints.

    Two processes continue from the save of four if these have run, else from that of one
    device.
    """
    checkpoint, folder, one = alone
    saves, four = folder / f"saves-{processes}", folder / "saves-4"
    read = saves if processes == 4 else four if four.exists() else folder / "saves-1"
    found = run(processes, checkpoint, saves, read, *["--command"] * by_command)
    texts = (
        [command(str(checkpoint)), *[""] * (processes - 1)]
        if by_command
        else [None] * processes
    )
    assert found == [{"text": text, **one} for text in texts]
    like = load(checkpoint).init_cache(METHOD, capacity=128, batch=2, dtype="float32")
    here, there = (kvjax.restore(folder / f"saves-{n}", like) for n in (1, processes))
    for a, b in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), atol=1e-5
        )
