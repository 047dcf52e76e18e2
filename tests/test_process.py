"""A library call changes nothing in its user's process: only the command line does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint import write_checkpoint

# Runs `CALLS` in a process of its own, and prints what it changed there.
PROGRAM = """
import json, logging, os, signal, sys, threading, warnings
import jax, jax.monitoring
import numpy as np
import kvjax, kvjax.models, kvjax.evaluate, kvjax.testing
from jax._src import monitoring

def process():
    return {{
        "options of jax": {{name: repr(value) for name, value in jax.config.values.items()}},
        "signals": {{str(s): repr(signal.getsignal(s)) for s in signal.valid_signals()}},
        "warnings": [repr(warnings.showwarning), repr(warnings.filters)],
        "listeners": repr([monitoring.get_event_listeners(), monitoring.get_event_duration_listeners()]),
        "environment": dict(os.environ),
        "path": list(sys.path),
        "hooks": [repr(sys.excepthook), repr(sys.displayhook), repr(threading.excepthook)],
        "logging": [repr(logging.root.handlers), logging.root.level, logging.getLogger("kvjax").level],
        "numpy": [repr(np.geterr()), repr(np.get_printoptions())],
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "folder": os.getcwd(),
        "limits": [sys.getrecursionlimit(), sys.getswitchinterval()],
    }}

jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))
before = process()
handled = []
set_handler = signal.signal
signal.signal = lambda *what: handled.append(repr(what)) or set_handler(*what)
directory = {directory!r}
{calls}
after = process()
changed = {{name: [before[name], after[name]] for name in before if before[name] != after[name]}}
if handled:
    changed["signal handlers, meanwhile"] = handled
print(json.dumps(changed))
"""

GENERATE = """
checkpoint = kvjax.models.load(directory)
fier = "fier:budget=16,group=8,chunk=8,local=4,dense_layers=1"
answer = checkpoint.generate("one two three", cache=fier, max_new_tokens=4)
cache = checkpoint.init_cache("full", capacity=64)
list(kvjax.stream(checkpoint.model, cache, [[1, 2, 3]], max_new_tokens=9))
"""

ENGINE = """
checkpoint = kvjax.models.load(directory)
engine = kvjax.Engine(checkpoint, cache="full", slots=2, capacity=256)
request, *_ = engine.submit([1, 2, 3], max_new_tokens=4)
engine.run()
"""


def changes(calls: str, directory: Path) -> dict[str, list]:
    code = PROGRAM.format(directory=str(directory), calls=calls)
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "KVJAX_COMPILATION_CACHE": str(directory / "p"),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("calls", [GENERATE, ENGINE], ids=["generate", "engine"])
def test_a_library_call_changes_nothing_in_its_process(tmp_path, calls):
    assert changes(calls, Path(write_checkpoint(tmp_path / "model"))) == {}


def test_a_change_is_seen(tmp_path):
    assert list(changes("kvjax.use_compilation_cache()", tmp_path)) == ["options of jax"]
