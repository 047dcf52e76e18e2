"""The library's sizes do not grow: fewer lines, names and protocols, and a decode step of fewer
functions and files.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Lower a number when the library has become smaller.
LINES, NAMES, PROTOCOLS = 30_698, 45, 7
STEPS = {  # functions, files, and protocols that a traced step asks for
    "full": (35, 9, 0),
    "fier": (80, 16, 0),
    "pariskv": (104, 19, 0),
    "quest": (77, 16, 0),
    "freekv": (100, 19, 0),
    "logquant": (68, 15, 0),
    "h2o": (49, 11, 0),
}


def test_library_and_a_step_through_it_do_not_grow() -> None:
    command = [sys.executable, "-W", "error", str(ROOT / "benchmarks" / "sizes.py")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["lines"] <= LINES
    assert found["names"] <= NAMES
    assert len(found["protocols"]) <= PROTOCOLS, found["protocols"]
    for method, (functions, files, asked) in STEPS.items():
        step = found["steps"][method]
        assert step["functions"] <= functions, method
        assert step["files"] <= files, method
        assert len(step["asked"]) <= asked, (method, step["asked"])
