"""`benchmarks/walk.py`: it lists the functions of a step of any preset."""

import subprocess
import sys
from pathlib import Path

import kvjax

ROOT = Path(__file__).resolve().parents[2]


def listed(name: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/walk.py", "--list", name]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_walk_of_a_preset_that_is_not_in_the_table_is_listed() -> None:
    done = listed("quest:page=16")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].endswith(" attention_info")
    assert any(line.startswith("kvjax/selectors/pages.py:") for line in lines)


def test_a_walk_of_an_unknown_name_is_refused_with_the_presets() -> None:
    done = listed("quset")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert "unknown cache 'quset'" in last
    assert all(name in last for name in kvjax.presets.REGISTRY)
