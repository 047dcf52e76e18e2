"""The cache of compiled programs: it is used, can be turned off, and no trouble with it costs
an answer.
"""

import logging
import os
import pickle
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import compiling

PROGRAM = """
import sys
import jax, jax.monitoring
{before}
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
import kvjax
folder = kvjax.use_compilation_cache({folder})
jax.config.update("jax_persistent_cache_min_compile_time_secs", {least})
def f(x):
    for _ in range(3):
        x = jax.numpy.sort(x @ x)
    return x.sum()
print(float(jax.jit(f)(jax.numpy.ones((8, 8)))), hits.count("/jax/compilation_cache/cache_hits"), folder)
"""


def start(folder="None", *, least=0.0, before="", **env):
    code = PROGRAM.format(folder=folder, least=least, before=before)
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **env}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


def finish(process):
    out, told = process.communicate(timeout=300)
    assert process.returncode == 0, told
    answer, hits, folder = out.split(maxsplit=2)
    assert float(answer) == 8**9
    return int(hits), folder.strip(), told.splitlines()


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """A fresh state of the module and of JAX's settings, restored afterwards."""
    monkeypatch.setattr(compiling, "_told", set())
    monkeypatch.setattr("warnings.showwarning", __import__("warnings").showwarning)
    monkeypatch.delenv(compiling.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in zip(names, (None, 1.0), strict=True):  # as JAX has them
        jax.config.update(name, value)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)


def test_processes_share_programs_and_survive_damaged_entries(tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path), compiling.VARIABLE: str(tmp_path / "own")}
    both = [finish(one) for one in [start(**env), start(**env)]]  # two at once
    assert all(len(told) <= 1 for _, _, told in both)
    hits, folder, told = finish(start(**env))
    assert hits >= 1
    assert folder.startswith(str(tmp_path / "own"))
    assert told == []
    other = "import jax._src.cache_key as key; key.jaxlib_version_str = '0.0.1'"
    hits, _, told = finish(start(before=other, **env))
    assert (hits, told) == (0, []), "programs of another version are others"
    entries = [path for path in (tmp_path / "own").rglob("jit_f-*") if path.is_file()]
    assert entries
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:40])
    hits, _, told = finish(start(**env))
    assert len(told) == 1
    assert "could not be read" in told[0]
    assert str(tmp_path) in told[0]
    hits, _, told = finish(start(**env))
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
    whole(affine([]))
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


def affine(traced, plus=1):
    """A function that notes when it is traced, with a static argument."""

    def run(x, *, by):
        traced.append(by)
        return {"a": by * x + plus}

    return compiling.Jitted(run, static_argnames="by")


def whole(run, *, size=3, by=2, plus=1):
    """Compiles it for f32[size] as a process that has traced nothing would, and runs it."""
    jax.clear_caches()
    with compiling.whole_programs():
        compiling.Program(
            run, (jax.ShapeDtypeStruct((size,), jnp.float32),), {"by": by}
        ).compile()
        found = run(jnp.arange(size, dtype=jnp.float32), by=by)["a"]
        np.testing.assert_array_equal(found, by * np.arange(size) + plus)


@pytest.fixture
def keeping(settings, tmp_path):
    """The folder, where JAX keeps each program."""
    folder = compiling.use_compilation_cache(tmp_path)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return folder


@pytest.fixture(params=["slow", "fast"])
def kept(request, keeping):
    """The folder, where JAX keeps programs by itself, or none, as if they compiled fast."""
    if request.param == "fast":
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 60.0)
    return keeping


def upgrade(monkeypatch):
    """The code of the library becomes another one."""
    monkeypatch.setattr(compiling, "_sources", lambda: "of another version")


def entries(folder):
    """JAX's entries of `affine`, and when they were written."""
    return {file: file.stat().st_mtime_ns for file in folder.glob("jit_run-*-cache")}


def test_a_whole_program_is_read_without_tracing_and_run_for_its_arguments_alone(kept):
    traced = []
    run = affine(traced)
    whole(run)
    assert traced == [2]
    whole(run)
    assert traced == [2]
    with compiling.whole_programs():
        compiling.Program(run, (np.zeros(3, np.float32),), {"by": 2}).compile()
        for x, by in (
            (np.ones(3, np.float32), 4),
            (np.ones(2, np.float32), 2),
            (np.ones(3, np.int32), 2),
        ):
            np.testing.assert_array_equal(run(x, by=by)["a"], by * x + 1)
        assert traced == [2, 4, 2, 2]
        np.testing.assert_array_equal(
            jax.jit(lambda x: run(x, by=2)["a"])(np.ones(3, np.float32)), [3, 3, 3]
        )
    assert traced == [2, 4, 2, 2, 2]


def test_after_an_upgrade_that_leaves_a_program_one_process_traces_it_and_none_compiles_it(
    kept, monkeypatch, caplog
):
    # XLA for CPUs writes an executable that it has read without its functions, so that one must
    # not be written again.
    traced = []
    run = affine(traced)
    whole(run)
    before = entries(kept)
    assert len(before) == 1
    (small,) = kept.glob("*-whole")
    assert small.stat().st_size < next(iter(before)).stat().st_size, (
        "no executable is kept twice"
    )
    for version in range(3):
        monkeypatch.setattr(compiling, "_sources", lambda version=version: str(version))
        for _ in range(3):
            whole(run)
        assert len(traced) == version + 2
    assert entries(kept) == before
    assert len(list(kept.glob("*-whole"))) == 4
    assert not caplog.messages


def test_what_another_process_compiled_for_itself_becomes_a_whole_program(keeping):
    """One that JAX alone has kept, as `Checkpoint` does."""
    traced = []
    run = affine(traced)
    run(jnp.arange(3.0), by=2)
    before = entries(keeping)
    assert len(before) == 1
    for _ in range(3):
        whole(run)
    assert traced == [2, 2]
    assert entries(keeping) == before


def test_an_upgrade_that_changes_a_program_compiles_it(kept, monkeypatch):
    whole(affine([]))
    upgrade(monkeypatch)
    traced = []
    for _ in range(2):
        whole(affine(traced, plus=5), plus=5)
    assert traced == [2]


def test_a_program_of_the_same_text_is_given_its_own_arguments(kept, monkeypatch):
    """XLA's program has no argument that is not read: these two have one text, and read
    different arguments.
    """

    def first(x, y):
        return {"a": jnp.sin(x)}

    def second(x, y):
        return {"a": jnp.sin(y)}

    for function in (first, second):
        function.__name__ = function.__qualname__ = "run"
    x, y = jnp.zeros(3), jnp.ones(3)
    for _ in range(3):
        for function in (first, second):
            monkeypatch.setattr(
                compiling, "_sources", lambda function=function: str(id(function))
            )
            jax.clear_caches()
            run = compiling.Jitted(function)
            with compiling.whole_programs():
                compiling.Program(run, (x, y), {}).compile()
                np.testing.assert_allclose(
                    run(x, y)["a"], np.sin(x if function is first else y), rtol=1e-6
                )
    assert len(entries(kept)) == 1


def test_a_program_that_jax_has_read_and_keeps_no_more_is_not_written(keeping, monkeypatch):
    traced = []
    run = affine(traced)
    whole(run)
    (small,) = keeping.glob("*-whole")
    small.unlink()
    now = compiling._write_whole

    def write(*args, **how):
        for entry in entries(keeping):
            entry.unlink()
        now(*args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(compiling, "_write_whole", write)
        whole(run)
    assert not entries(keeping)
    for _ in range(2):
        whole(run)
    assert traced == [2, 2, 2]


def test_what_jax_keeps_no_more_is_compiled_without_a_word(keeping, caplog):
    """As with jax_compilation_cache_max_size, which removes what was not read for long."""
    traced = []
    run = affine(traced)
    whole(run)
    for entry in entries(keeping):
        entry.unlink()
    for _ in range(2):
        whole(run)
    assert traced == [2, 2]
    assert not caplog.messages


@pytest.mark.parametrize("changed", ["size", "static", "variable", "setting", "source", "off"])
def test_a_whole_program_of_other_surroundings_is_not_run(kept, monkeypatch, changed):
    traced = []
    run = affine(traced)
    whole(run)
    before, how = jax.config.jax_default_matmul_precision, {}
    if changed in ("size", "static"):
        how = {"size": 5} if changed == "size" else {"by": 3}
    elif changed == "variable":
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    elif changed == "source":
        upgrade(monkeypatch)
    elif changed == "off":
        jax.config.update("jax_compilation_cache_dir", None)
    else:
        jax.config.update("jax_default_matmul_precision", "highest")
    try:
        whole(run, **how)
    finally:
        jax.config.update("jax_default_matmul_precision", before)
    assert len(traced) == 2


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "pickle"])
def test_a_damaged_whole_program_costs_one_line_and_the_time_to_trace(kept, caplog, damage):
    traced = []
    run = affine(traced)
    whole(run)
    (file,) = kept.glob("*-whole")
    data = file.read_bytes()
    file.write_bytes(
        {
            "cut": data[:-99],
            "empty": b"",
            "text": b"not a program",
            "pickle": pickle.dumps((1, 2, 3)),
        }[damage]
    )
    with caplog.at_level(logging.WARNING, "kvjax"):
        whole(run)
        whole(run)
    assert len(traced) == 2
    (line,) = caplog.messages
    assert line.startswith("a program could not be read in ")
    assert pickle.loads(file.read_bytes())[1:] == pickle.loads(data)[1:]


@pytest.mark.parametrize("damage", ["cut", "empty", "text"])
def test_a_damaged_entry_of_jax_costs_one_line_and_is_replaced(keeping, caplog, damage):
    traced = []
    run = affine(traced)
    whole(run)
    ((file, _),) = entries(keeping).items()
    data = file.read_bytes()
    file.write_bytes({"cut": data[:-99], "empty": b"", "text": b"not a program"}[damage])
    with caplog.at_level(logging.WARNING, "kvjax"):
        for _ in range(3):
            whole(run)
    assert traced == [2, 2]
    (line,) = caplog.messages
    assert line.startswith("a program could not be read in ")


def test_a_folder_that_cannot_be_written_still_gives_the_program(
    settings, tmp_path, monkeypatch
):
    folder = compiling.use_compilation_cache(tmp_path)
    monkeypatch.setattr(
        "pathlib.Path.write_bytes",
        lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")),
    )
    traced = []
    whole(affine(traced))
    assert traced == [2]
    assert not list(folder.glob("*whole*"))


def test_what_was_found_once_is_remembered_for_the_same_code(settings, tmp_path, monkeypatch):
    made = []

    def find(*args):
        made.append(args)
        return {"top_k": "xla: why"}

    assert compiling.remembered(find, 1, "a") == {"top_k": "xla: why"}  # no folder
    assert len(made) == 1
    folder = compiling.use_compilation_cache(tmp_path)
    for _ in range(2):
        assert compiling.remembered(find, 1, "a") == {"top_k": "xla: why"}
    assert len(made) == 2
    compiling.remembered(find, 2, "a")
    assert len(made) == 3
    for file in folder.glob("*-note"):
        file.write_text("{")  # damaged
    assert compiling.remembered(find, 2, "a") == {"top_k": "xla: why"}
    assert len(made) == 4
    monkeypatch.setattr(compiling, "_sources", lambda: "another version")
    compiling.remembered(find, 2, "a")
    assert len(made) == 5
    monkeypatch.setattr(
        compiling, "_write", lambda *_: (_ for _ in ()).throw(PermissionError())
    )
    compiling.remembered(find, 3, "a")
    assert compiling.remembered(find, 3, "a")
    assert len(made) == 7
