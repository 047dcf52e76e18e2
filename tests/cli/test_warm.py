"""`kvjax warm`: the programs that it keeps are those that a request runs."""

import re
import sys
import types
import warnings

import jax
import pytest

from kvjax import compiling, models
from kvjax.ops import op


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """The folder of compiled programs, of which none is too small to be kept; off again
    afterwards.
    """
    monkeypatch.setenv(compiling.VARIABLE, str(tmp_path))
    monkeypatch.setattr(compiling, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: getattr(jax.config, name) for name in names}
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()


def kept(folder):
    """The entries of the programs that answer a prompt."""
    return {
        file.name
        for file in folder.rglob("*-cache")
        if re.match("jit_(decode_loop|_prefill_chunk|_begin|_layer|_finish)", file.name)
    }


def test_warm_keeps_the_programs_that_a_request_runs(kvjax, checkpoint, programs):
    code, out, err = kvjax(
        "warm", checkpoint, "--batch", 3, "--capacity", 190
    )  # which no other test has compiled
    assert (code, out) == (0, "")
    line = err.splitlines()[-1]
    found = re.fullmatch(
        r"3 programs for 3 rows of 512 tokens in \S+ s on cpu; (\S+) MiB more in (.*)", line
    )
    assert found, line
    assert float(found[1]) > 0
    assert found[2].startswith(str(programs))
    before = kept(programs)
    assert len(before) == 3
    # the folder stays on in this process
    models.load(checkpoint).generate(["abc" * 50, "a", "b"], max_new_tokens=20)
    assert kept(programs) == before


def test_warm_says_that_nothing_would_be_kept(kvjax, checkpoint, monkeypatch):
    monkeypatch.setenv(compiling.VARIABLE, "off")
    code, _, err = kvjax("warm", checkpoint, "--capacity", 200)
    assert code == 2
    assert "the cache of compiled programs is off" in err


def test_threads_may_trace_while_one_imports_the_kernels(monkeypatch):
    monkeypatch.setitem(
        sys.modules, "kvjax.kernels_pallas.simt", types.ModuleType("half imported")
    )
    assert op.shares_traces()


def test_a_second_answer_compiles_nothing(kvjax, checkpoint, programs):
    asked = ["generate", checkpoint, "--prompt", "a b c d e f", "--max-new-tokens", 5]
    asked += ["--cache", "fier", "--budget", 64]
    answers = []
    entries = []
    for _ in range(2):
        jax.clear_caches()
        code, out, err = kvjax(*asked)
        assert code == 0, err
        answers.append(out)
        entries.append(kept(programs))
    assert answers[0] == answers[1]
    assert entries[0]
    assert entries[0] == entries[1]


def test_a_first_answer_after_warm_compiles_nothing(kvjax, checkpoint, programs):
    """Short and long answers, of a method with an index and of one without."""
    for method in ("fier:budget=64", "full"):
        jax.clear_caches()  # of other tests, whose programs are in no folder of this one
        code, _, err = kvjax("warm", checkpoint, "--cache", method, "--capacity", 200)
        assert code == 0, err
        before = kept(programs)
        for answer in (5, 150):
            jax.clear_caches()
            asked = ["--prompt", "a b c d e f", "--cache", method, "--max-new-tokens", answer]
            code, _, err = kvjax("generate", checkpoint, *asked)
            assert code == 0, err
            assert kept(programs) == before
