"""A library call changes nothing in its user's process: only the command line does."""

import json
import os
import subprocess
import sys

import pytest

from tests.checkpoint import write_checkpoint

# Runs each of `CALLS` in a process of its own, one after the other, and prints what each changed
# there, or the error that it raised.
PROGRAM = """
import json, logging, os, signal, sys, threading, traceback, warnings
import jax, jax.monitoring
import numpy as np
import kvjax, kvjax.models, kvjax.evaluate, kvjax.testing
from jax._src import monitoring

def process():
    return {
        "options of jax": {name: repr(value) for name, value in jax.config.values.items()},
        "signals": {str(s): repr(signal.getsignal(s)) for s in signal.valid_signals()},
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
    }

handled = []
set_handler = signal.signal
signal.signal = lambda *what: handled.append(repr(what)) or set_handler(*what)

def changes(calls):
    before = process()
    handled.clear()
    try:
        exec(calls, {"kvjax": kvjax, "directory": sys.argv[1]})
    except Exception:
        return {"raised": traceback.format_exc()}
    after = process()
    changed = {name: [before[name], after[name]] for name in before if before[name] != after[name]}
    return changed | ({"signal handlers, meanwhile": handled[:]} if handled else {})

jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))
print(json.dumps({name: changes(calls) for name, calls in json.loads(sys.argv[2]).items()}))
"""

# The last one changes something.
CALLS = {
    "generate": """
checkpoint = kvjax.models.load(directory)
fier = "fier:budget=16,group=8,chunk=8,local=4,dense_layers=1"
answer = checkpoint.generate("one two three", cache=fier, max_new_tokens=4)
cache = checkpoint.init_cache("full", capacity=64)
list(kvjax.stream(checkpoint.model, cache, [[1, 2, 3]], max_new_tokens=9))
""",
    "engine": """
checkpoint = kvjax.models.load(directory)
engine = kvjax.Engine(checkpoint, cache="full", slots=2, capacity=256)
request, *_ = engine.submit([1, 2, 3], max_new_tokens=4)
engine.run()
""",
    "cache of programs": "kvjax.use_compilation_cache()",
}


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list]]:
    directory = tmp_path_factory.mktemp("process")
    model = write_checkpoint(directory / "model")
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "KVJAX_COMPILATION_CACHE": str(directory / "p"),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model), json.dumps(CALLS)],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("calls", ["generate", "engine"])
def test_a_library_call_changes_nothing_in_its_process(changed, calls):
    assert changed[calls] == {}


def test_a_change_is_seen(changed):
    assert list(changed["cache of programs"]) == ["options of jax"]
