"""The cache of compiled programs: it is used, can be turned off, and no trouble with it costs
an answer.
"""

import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import compiling

# Prints for each phase, a statement of Python, what f gave after it, the programs that were found
# and the folder; and between phases to stderr what was told.
PROGRAM = """
import sys
import jax, jax.monitoring
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
from kvjax.cli.programs import keep_programs
folder = keep_programs()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
def f(x):
    for _ in range(3):
        x = jax.numpy.sort(x @ x)
    return x.sum()
ones = jax.numpy.ones((8, 8))
for phase in sys.argv[1:]:
    exec(phase)
    jax.clear_caches()
    hits.clear()
    answer = float(jax.jit(f)(ones))
    print(answer, hits.count("/jax/compilation_cache/cache_hits"), folder)
    print("end of a phase", file=sys.stderr)
"""


def start(*phases, **env):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **env}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *phases],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


def finish(process):
    """Of each phase its hits, the folder, and the lines that it told."""
    out, told = process.communicate(timeout=300)
    assert process.returncode == 0, told
    found = []
    for line, lines in zip(out.splitlines(), told.split("end of a phase\n"), strict=False):
        answer, hits, folder = line.split(maxsplit=2)
        assert float(answer) == 8**9
        found.append((int(hits), folder, lines.splitlines()))
    return found


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """A fresh state of the module and of JAX's settings, restored afterwards."""
    monkeypatch.setattr(compiling, "_told", set())
    monkeypatch.delenv(compiling.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in zip(names, (None, 1.0), strict=True):  # as JAX has them
        jax.config.update(name, value)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)


OTHER_VERSION = """
import jax._src.cache_key as key
version, key.jaxlib_version_str = key.jaxlib_version_str, "0.0.1"
"""
DAMAGE = """
key.jaxlib_version_str = version
from pathlib import Path
entries = [path for path in Path(folder).rglob("jit_f-*") if path.is_file()]
assert entries
for entry in entries:
    entry.write_bytes(entry.read_bytes()[:40])
"""


def test_processes_share_programs_and_survive_damaged_entries(tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path), compiling.VARIABLE: str(tmp_path / "own")}
    both = [finish(one) for one in [start("", **env), start("", **env)]]  # two at once
    assert all(len(told) <= 1 for ((_, _, told),) in both)
    first, of_another, damaged = finish(start("", OTHER_VERSION, DAMAGE, **env))
    hits, folder, told = first
    assert hits >= 1
    assert folder.startswith(str(tmp_path / "own"))
    assert told == []
    hits, _, told = of_another
    assert (hits, told) == (0, []), "programs of another version are others"
    _, _, told = damaged
    assert len(told) == 1
    assert "could not be read" in told[0]
    assert str(tmp_path) in told[0]
    ((hits, _, told),) = finish(start("", **env))
    assert hits >= 1, "a damaged entry is replaced"
    assert told == []


@pytest.mark.parametrize("off", ["off", "0", "", "OFF"])
def test_the_variable_turns_the_cache_off(settings, monkeypatch, off):
    monkeypatch.setenv(compiling.VARIABLE, off)
    assert compiling.use_compilation_cache() is None
    assert not jax.config.jax_compilation_cache_dir
    assert not list(settings.iterdir())


def test_the_folder_is_in_the_users_cache_folder(settings):
    folder = compiling.use_compilation_cache()
    assert folder.is_relative_to(settings / "kvjax" / "programs")
    assert str(folder) == jax.config.jax_compilation_cache_dir
    assert compiling.use_compilation_cache(settings / "another") == folder, (
        "the first one stays"
    )


def test_a_folder_that_jax_was_told_stays(settings):
    jax.config.update("jax_compilation_cache_dir", str(settings / "mine"))
    assert compiling.use_compilation_cache() == settings / "mine"
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 1.0


@pytest.mark.parametrize(
    "errno", ["Read-only file system", "No space left on device", "Disk quota exceeded"]
)
def test_a_folder_that_cannot_be_written_is_read_and_told_once(
    settings, monkeypatch, caplog, errno
):
    def refuse(*_, **__):
        raise OSError(28, errno)

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with caplog.at_level(logging.WARNING, "kvjax"):
        assert compiling.use_compilation_cache() is not None
    assert len(caplog.messages) == 1
    assert errno in caplog.messages[0]
    folder = jax.config.jax_compilation_cache_dir
    assert float(jax.jit(lambda x: jnp.sort(x * 3.5).sum())(np.ones(4))) == 14
    assert not os.listdir(folder)


def test_a_folder_that_cannot_be_made_is_told_once(settings, caplog):
    (settings / "kvjax").write_text("a file")
    with caplog.at_level(logging.WARNING, "kvjax"):
        assert compiling.use_compilation_cache() is None
    assert len(caplog.messages) == 1
    assert str(settings / "kvjax") in caplog.messages[0]


def test_the_clock_counts_compiling_once_and_work_not_at_all():
    step = jax.jit(lambda x: jnp.sort(jax.jit(jnp.tanh)(x) @ x.T, axis=0).sum())
    x = np.ones((16, 16), np.float32)
    with compiling.compile_clock() as outer:
        begin = time.monotonic()
        with compiling.compile_clock() as first:
            step(x)
        passed = time.monotonic() - begin
        with compiling.compile_clock() as second:
            jax.block_until_ready(step(x))
    assert 0 < first.seconds <= passed
    assert second.seconds == 0
    assert outer.seconds == pytest.approx(first.seconds)


def test_a_program_that_was_compiled_ahead_is_not_compiled_by_its_call():
    traced = []

    def run(x, *, by):
        traced.append(by)
        return by * x

    run = jax.jit(run, static_argnames="by")
    x = np.arange(3, dtype=np.float32)
    compiling.Program(run, (jax.ShapeDtypeStruct(x.shape, x.dtype),), {"by": 2}).compile()
    with compiling.compile_clock() as clock:
        np.testing.assert_array_equal(run(x, by=2), [0, 2, 4])
    assert traced == [2]
    assert "/jax/core/compile/backend_compile_duration" not in clock.parts


def test_threads_trace_programs_one_after_the_other():
    # Each more thread that runs Python makes all others wait for their turn, those too that
    # read weights meanwhile: beside eight that trace, 0.5 GB took 38 seconds instead of one.
    tracing, at_once = 0, []

    def slow(x):
        nonlocal tracing
        tracing += 1
        at_once.append(tracing)
        time.sleep(0.02)
        tracing -= 1
        return x + 1

    programs = [
        compiling.Program(jax.jit(lambda x: slow(x)), (jnp.zeros(n + 1),), {}) for n in range(4)
    ]
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(program.compile) for program in programs]:
            done.result()
    assert at_once == [1, 1, 1, 1]


def test_a_large_folder_loses_what_was_read_longest_ago(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "MOST_BYTES", 2500)
    folder = compiling.use_compilation_cache(tmp_path)
    for age, name in enumerate(("new", "middle", "old", "oldest")):
        (folder / name).write_bytes(bytes(1000))
        os.utime(folder / name, (time.time() - 1000 * age,) * 2)
    jax.config.update("jax_compilation_cache_dir", None)
    compiling.use_compilation_cache(tmp_path)
    assert sorted(file.name for file in folder.iterdir()) == ["middle", "new"]


def test_what_was_found_once_is_read_for_the_same_code(settings, tmp_path, monkeypatch):
    made = []

    def find(*args):
        made.append(args)
        return {"top_k": "xla: why"}

    assert compiling.cached_on_disk(find, 1, "a") == {"top_k": "xla: why"}  # no folder
    assert len(made) == 1
    folder = compiling.use_compilation_cache(tmp_path)
    for _ in range(2):
        assert compiling.cached_on_disk(find, 1, "a") == {"top_k": "xla: why"}
    assert len(made) == 2
    compiling.cached_on_disk(find, 2, "a")
    assert len(made) == 3
    for file in folder.glob("*-note"):
        file.write_text("{")  # damaged
    assert compiling.cached_on_disk(find, 2, "a") == {"top_k": "xla: why"}
    assert len(made) == 4
    monkeypatch.setattr(compiling, "_sources", lambda: "another version")
    compiling.cached_on_disk(find, 2, "a")
    assert len(made) == 5
    monkeypatch.setattr(
        compiling, "_write", lambda *_: (_ for _ in ()).throw(PermissionError())
    )
    compiling.cached_on_disk(find, 3, "a")
    assert compiling.cached_on_disk(find, 3, "a")
    assert len(made) == 7
