"""How strictly the suite runs: on CPU, offline, the same every time.

Silent broadcasting and silent promotion hide bugs of exactly the kind that a cache has (a mask
of [B] against [B, K], an f32 scale that widens a bf16 store), so both are errors here.
pyproject.toml makes warnings of kvjax errors.
"""

import functools
import gc
import itertools
import os
import re
import zlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Most of the suite's time is XLA compiling. Without LLVM's optimisations it takes half, by
# XLA's former emitters of fusions half of that, and in one part, as the workers fill the cores,
# a tenth less again. What a program allocates, which tests count, stays as it is. Set
# XLA_FLAGS, to nothing if you like, to run what users run.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    "--xla_cpu_parallel_codegen_split_count=1",
)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["KVJAX_COMPILATION_CACHE"] = "off"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest

from tests import compiled_once

compiled_once.install()
compiled_once.reuse_contexts()
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update(
    "jax_traceback_in_locations_limit", 0
)  # else a tenth of the time goes into lines of programs' texts

hypothesis.settings.register_profile(
    "kvjax",
    derandomize=True,
    database=None,
    deadline=None,  # the first example compiles
    max_examples=25,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("kvjax")


@pytest.fixture(autouse=True, scope="session")
def offline() -> Iterator[None]:
    """No test may reach the network: connecting a socket to anything but a local one is an
    error.
    """

    def refuse(self: socket.socket, address: Any) -> None:
        if self.family == socket.AF_UNIX or address[0] == "127.0.0.1":
            return connect(self, address)
        raise AssertionError(
            f"a test tried to connect to {address}; the suite must run offline"
        )

    connect = socket.socket.connect
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        yield


@pytest.fixture(autouse=True, scope="session")
def profiles_of_times_alone() -> Iterator[None]:
    """A profile otherwise has the text of each program of the process: seconds, after some files."""
    options = jax.profiler.ProfileOptions()
    options.enable_hlo_proto = False
    with pytest.MonkeyPatch.context() as patch:
        trace = functools.partial(jax.profiler.trace, profiler_options=options)
        patch.setattr(jax.profiler, "trace", trace)
        yield


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest) -> str | None:
    """The directory of a real model, in Hugging Face format; None for a small random one."""
    return request.config.getoption("--checkpoint")


def pytest_collection_finish() -> None:
    """Excludes imported objects from garbage collection, which took 7 % of a run to walk
    through them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)


_ended = itertools.count(1)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Drops what was traced when the next test is of another file, and after a hundred tests.

    A file may replace functions of the library, which what it traced has in it. XLA's CPU
    backend maps memory for every program, and a process may have some 65 000 maps: without this
    a worker ran out of them after about 600 tests, and crashed with a segmentation fault while
    compiling. Some programs stay for equal ones: tests/compiled_once.py.
    """
    hundredth = next(_ended) % 100 == 0
    if hundredth or nextitem is None or item.path != nextitem.path:
        jax.clear_caches()
    if hundredth:  # a fifth of a second
        gc.collect()


TESTS = Path(__file__).parent
MODEL = TESTS.parent / "kvjax" / "data" / "kvjax-26m" / "config.json"
# What stands on the library, or on the tree and not on the version of Python.
ABOVE = (
    "evaluate/",
    "packaging/",
    "test_training.py",
    "benchmarks/",
    "test_notebooks.py",
    "cli/",
    "test_doctests.py",
)
KERNELS = "kernels/"


# One minute for two workers, `-m core`: the arithmetic, a selector against numpy, the hook,
# saves, imports and prose.
CORE = (
    "numerics/",
    "ops/test_ops.py",
    "selectors/test_fier.py",
    "cache/test_saving.py",
    "test_attention.py",
    "packaging/test_imports.py",
    "packaging/test_prose.py",
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Skips what asks for the model in a source archive, which has none."""
    report = yield
    if (
        call.excinfo
        and not MODEL.exists()
        and "is the package kvjax-26m" in str(call.excinfo.value)
    ):
        report.outcome, report.longrepr = (
            "skipped",
            (str(item.path), 0, str(call.excinfo.value)),
        )
    return report


def _above(path: Path) -> bool:
    return _inside(path).startswith(ABOVE)


def _inside(path: Path) -> str:
    """A path within this folder; that of a folder ends with a slash."""
    inside = path.relative_to(TESTS).as_posix()
    return inside + "/" if path.is_dir() else inside


def _is_in(half: int, item: pytest.Item) -> bool:
    """True if a test is in half 1 or 2 of the suite. What shares programs is in one of them."""
    inside = item.path.relative_to(TESTS).as_posix()
    if inside == "test_devices.py":  # which passes the half on
        return True
    if _above(item.path) or item.get_closest_marker("torch"):
        return half == 1
    return half == (2 if inside.startswith(KERNELS) else _half_by_name(_shared(item.nodeid)))


def _half_by_name(name: str) -> int:
    """1 or 2, at random but always the same, for a file or the id of a test that is alone."""
    return 1 + zlib.crc32(name.encode()) % 2


# In the text of a file whose tests are not all in one half: `_is_in` and `_shared`.
PARTED = ("mark.torch", "test_law_holds", "test_random_")


def _is_in_both(path: Path) -> bool:
    """False if one half has all tests of a file, so that the other need not import it."""
    if path.name in ("test_devices.py", "test_goldens.py"):
        return True
    return any(part in path.read_text(encoding="utf-8") for part in PARTED)


ORDER = {"test_devices.py": 0, "test_readme.py": 0, "test_goldens.py": 2}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough",
        action="store_true",
        help="all of it: every law on every policy, every parameter",
    )
    parser.addoption(
        "--checkpoint",
        metavar="DIR",
        help="a model whose keys and queries the methods are tested on too",
    )
    parser.addoption(
        "--half",
        type=int,
        choices=(1, 2),
        help="one half of the tests, for one of two versions of JAX; comparisons with torch and what stands on the "
        "library are in the first, kernels in the second",
    )
    parser.addoption(
        "--quick",
        action="store_true",
        help="every fifth test, with every seventh of its sets of parameters, and nothing of what stands on the "
        "library: evaluation, training, benchmarks, notebooks, command line, README, examples",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --quick, --half or -m core, files that are left out as a whole are not imported, which
    saves seconds.
    """
    if not collection_path.is_relative_to(TESTS):
        return None
    inside = _inside(collection_path)
    half = config.getoption("--half")
    if _above(collection_path):
        left_out = half == 2 or config.getoption("--quick")
    elif inside.startswith(KERNELS):
        left_out = half == 1
    elif half and collection_path.suffix == ".py" and not _is_in_both(collection_path):
        left_out = half != _half_by_name(f"{TESTS.name}/{inside}")
    else:
        left_out = False
    if config.option.markexpr == "core" and collection_path.is_file():
        left_out = left_out or not inside.startswith(CORE)
    return True if left_out else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --thorough, leaves out tests marked `thorough`, and all but n cases of a test
    marked `sample(n)`.
    """
    for item in items:
        if item.path.is_relative_to(TESTS) and item.path.relative_to(
            TESTS
        ).as_posix().startswith(CORE):
            item.add_marker("core")
    if half := config.getoption("--half"):
        config.hook.pytest_deselected(items=[item for item in items if not _is_in(half, item)])
        items[:] = [item for item in items if _is_in(half, item)]
    if not config.getoption("--thorough"):
        quick = config.getoption("--quick")
        every = 7 if quick else 1
        seen: dict[str, int] = {}
        numbers: dict[str, int] = {}
        kept, left_out = [], []
        for item in items:
            sample = item.get_closest_marker("sample")
            name = item.nodeid.split("[")[0]
            if item.get_closest_marker("thorough"):
                left_out.append(item)
                continue
            number = numbers.setdefault(name, len(numbers))
            seen[name] = seen.get(name, 0) + 1
            late = sample is not None and seen[name] > sample.args[0]
            skipped = seen[name] % every != 1 % every or (
                quick and number % 5 != 0 and item.path.name != "test_devices.py"
            )
            (left_out if late or skipped else kept).append(item)
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
    # A worker takes a file, and each golden alone. Long ones first and short ones last let all
    # workers end together. One process, too, runs what shares programs together.
    first: dict[str, int] = {}
    for place, item in enumerate(items):
        first.setdefault(_shared(item.nodeid), place)
    items.sort(key=lambda item: (ORDER.get(item.path.name, 1), first[_shared(item.nodeid)]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keeps tests that share compiled programs in one worker: those of a file.

    Spread singly, two policies' laws compiled 157 programs in place of 108. (Not by `--dist
    loadgroup` and its marks: xdist 3.8 does not see them under pytest 9.2.)
    """
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByPrograms(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            alone = _shared(nodeid) == nodeid
            return nodeid if alone else nodeid.partition("::")[0]

    # it would take the files with the most tests first, not the longest
    config.option.loadscopereorder = False
    return ByPrograms(config, log)


def _shared(nodeid: str) -> str:
    """Names the tests that run the same compiled programs: a policy's laws, a file's tests.

    Each golden, and each random configuration, compiles programs of its own.
    """
    file, _, test = nodeid.partition("::")
    if "test_goldens.py" in file or test.startswith("test_random_"):
        return nodeid
    law = re.fullmatch(r"test_law_holds\w*\[\w+-(.*)\]", test)
    return f"{file}::{law[1]}" if law else file
