"""A process that is killed while it writes results loses nothing that it had told: cells of
`kvjax eval`, files of anchors and of heads. A hundred kills with `--thorough`.
"""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from kvjax.evaluate.store import read_cell
from kvjax.policies.shared import _in_file
from kvjax.presets.head_files import Heads

PROGRAM = """
    import sys
    from pathlib import Path
    from kvjax.evaluate.provenance import json_text, replace_file
    from kvjax.evaluate.store import Cell
    from kvjax.presets.head_files import Heads

    folder = Path(sys.argv[1])
    cell = Cell("task", "accuracy", "full", {"a": 1}, {"made": []}, 10**6)
    cell.open(folder, {f"e{i}" for i in range(10**5)})
    for number in range(len(cell.examples), 10**5):
        example = {"id": f"e{number}", "score": 1.0}
        cell.add({"examples": [example], "attended_by_layer": [1.0], "steps": 1, "seconds": 0.0}, {"date": ""})
        replace_file(folder / "anchors.json", json_text({"heads": {}, "anchors": list(range(number % 60 + 1))}))
        Heads(kv_heads=64, layers=[list(range(number % 60 + 1))] * 40).save(folder / "heads.json")
        print(number, flush=True)
"""


def kill_while_writing(folder: Path, seed: int) -> int:
    """Starts a writer, kills it at a random moment after its first results, and returns the
    last number it told.
    """
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(folder)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as writer:
        assert writer.stdout is not None
        said = writer.stdout.readline()
        time.sleep(random.Random(seed).uniform(0, 0.3))
        writer.kill()
        said += writer.communicate()[0]
    return int(said.removesuffix("\n").splitlines()[-1])


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 101))]
)
def test_a_killed_run_keeps_all_results_that_it_told(tmp_path: Path, seed: int) -> None:
    told = kill_while_writing(tmp_path, seed)
    if seed % 2:
        told = kill_while_writing(
            tmp_path, 1000 + seed
        )  # the second run goes on from the first
    (file,) = tmp_path.glob("task*.json")
    cell = read_cell(file)
    assert [example["id"] for example in cell.examples] in (
        [f"e{i}" for i in range(n)] for n in (told + 1, told + 2)
    )
    assert len(_in_file(str(tmp_path / "anchors.json"))[0]) in {
        (told + i) % 60 + 1 for i in (0, 1)
    }
    assert len(Heads.load(tmp_path / "heads.json").layers[0]) in {
        (told + i) % 60 + 1 for i in (0, 1)
    }
