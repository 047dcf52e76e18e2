"""Methods of one's own by name: "mine.py:mine", "package.module:mine", and entry points."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import kvjax
from kvjax import presets
from kvjax.evaluate.tasks import make_tasks

MINE = '''
from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

import kvjax
from kvjax.numerics.blocks import write


@dataclass(frozen=True)
class MeanKey(kvjax.Selector):
    """Scores pages by their mean key."""

    unit: int = 8

    def init(self, spec, slots):
        return jnp.zeros((spec.batch, spec.kv_heads, slots // self.unit, spec.head_dim), jnp.float32)

    def append(self, means, k, at, count):
        B, K, T, D = k.shape
        new = k.astype(jnp.float32).reshape(B, K, T // self.unit, self.unit, D).mean(axis=3)
        return write(means, new, at // self.unit, count // self.unit)

    def score(self, means, q, *, logits):
        return logits.of(jnp.einsum("bkgd,bkud->bkgu", q.astype(jnp.float32), means))


@dataclass(frozen=True)
class Oldest(kvjax.Evictor):
    def score(self, evidence, position, end, slots):
        return -position.astype(jnp.float32)


def mine(budget, unit: int = 8):
    """Attends to pages by their mean key."""
    return kvjax.Retrieval(selector=MeanKey(unit), budget=budget, sink=4, local=16)


def fier(budget=64):
    return mine(budget)


policy = mine(64)
layers = [kvjax.Full(), policy]
number = 3


def nothing(budget=3):
    return None


def wants(x):
    return policy


def breaks(budget=3):
    return {}["missing"]


def part(budget=96):
    return MeanKey()
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with mine.py."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "budget", "dense"),
    [
        ("mine.py:mine:budget=64", 64, 0),
        ("mine.py:mine:budget=96,unit=16,dense_layers=2", 96, 2),
        ("mine.py:policy", 64, 0),
        ("mine.py:policy:dense_layers=1", 64, 1),
        ("mine.py:layers", 64, 1),
        ("mine.py:MeanKey:unit=16,budget=96", 96, 0),
        ("mine.py:Oldest:budget=32", 32, 0),
        ("mine.py:Oldest", 1024, 0),
        ("mine.py:fier", 64, 0),
        ("mine.py:part", 96, 0),
        ("mine.py:part:budget=64", 64, 0),
    ],
)
def test_text_names_what_a_file_has(folder: Path, text: str, budget: int, dense: int) -> None:
    made = presets.parse(text)
    assert made.rest.budget == budget  # type: ignore[attr-defined]
    assert made.first == (kvjax.Full(),) * dense
    assert made == presets.parse(text.replace("mine.py", str(folder / "mine.py")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no.py:mine", r"cache no\.py:mine: there is no file /.*/no\.py; give the path"),
        ("mine.py:mien", r"cache mine\.py:mien: mine\.py has no 'mien'; did you mean 'mine'\?"),
        ("mine.py:zzz", r"mine\.py has no 'zzz'; write mine\.py:NAME, such as mine\.py:part"),
        ("mine.py", r"cache mine\.py: names a file alone; write mine\.py:NAME"),
        (
            "mine.py:mine",
            r"mine needs a budget .*give one, such as cache mine\.py:mine:budget=256",
        ),
        ("mine.py:number", r"mine\.py:number must be a policy, a selector, .*, got 3$"),
        (
            "mine.py:nothing",
            r"mine\.py:nothing\(\) returned None, where a policy, .* is wanted",
        ),
        ("mine.py:wants", r"mine\.py:wants is called .*it cannot take x; give it a default"),
        ("mine.py:breaks", r"mine\.py:breaks\(\) raised KeyError: 'missing'"),
        ("mine.py:mine:size=3", r"'size=3' is not a setting of mine\.py:mine; .*budget, unit"),
        (
            "mine.py:layers:dense_layers=1",
            r"sets the policy of each layer itself, so dense_layers=1",
        ),
        ("syntax.py:mine", r"syntax\.py raised SyntaxError on line 2: "),
        ("raises.py:mine", r"raises\.py raised NameError on line 1: name 'x' is not defined"),
        (
            "nowhere.methods:mine",
            r"there is no module 'nowhere'; install it, or write FILE\.py:NAME",
        ),
        ("mine:mine", r"there is no module 'mine'; for a file write mine\.py:mine"),
        ("fire:exact", "unknown cache 'fire:exact'; did you mean 'fier'"),
        ("os:path", "os:path must be a policy, .*, got a module"),
        ("builtins:max", "builtins:max must be a policy, .*, got "),
        ("exits.py:mine", r"exits\.py raised SystemExit on line 2: 3$"),
        ("lines.py:mine", r"lines\.py raised ValueError on line 1: one two$"),
        ("latin.py:mine", r"latin\.py raised SyntaxError"),
        ("folder.py:mine", r"there is no file /.*/folder\.py"),
        ("a" * 5000 + ".py:mine", r"there is no file .*give the path of a Python file"),
        ("nul\0.py:mine", r"there is no file .*give the path of a Python file"),
    ],
)
def test_a_wrong_name_says_what_and_where(folder: Path, text: str, message: str) -> None:
    (folder / "syntax.py").write_text("x = 1\nx = = 2\n")
    (folder / "raises.py").write_text("y = x\n")
    (folder / "exits.py").write_text("import sys\nsys.exit(3)\n")
    (folder / "lines.py").write_text("raise ValueError('one\\ntwo')\n")
    (folder / "latin.py").write_bytes(b"x = 'caf\xe9'\n")
    (folder / "folder.py").mkdir()
    with pytest.raises(ValueError, match=message) as error:
        presets.parse(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["my methods.py", "a,b.py", "a:b.py", "x.python/mine.py", "C:\\mine.py", "é.py"]
)
def test_a_file_may_have_any_name(folder: Path, name: str) -> None:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(MINE)
    made = presets.parse(f"{name}:mine:budget=96,unit=16")
    assert made.rest.budget == 96  # type: ignore[attr-defined]


def test_methods_of_one_name_are_called_by_their_files(folder: Path) -> None:
    from kvjax.evaluate.caches import make_rows

    (folder / "a").mkdir()
    (folder / "a" / "mine.py").write_text(MINE)
    both = ["mine.py:mine", "a/mine.py:mine", "full"]
    assert [row.name for row in make_rows(both, budgets=[64])] == [
        "mine.mine@64",
        "a/mine.mine@64",
        "full",
    ]
    assert [row.name for row in make_rows(both[:1], budgets=[64])] == ["mine@64"]


def test_a_value_may_hold_a_comma(folder: Path) -> None:
    (folder / "mine.py").write_text(
        MINE + "\ndef named(file='', budget=64): return mine(budget)\n"
    )
    for text in ("file='a,b'", 'file="a,b"', "file=[1,2]", "file=(1,2)"):
        assert presets.read(f"mine.py:named:budget=96,{text}")[1]["budget"] == 96
    assert presets.read("mine.py:named:file='a,b'")[1] == {"file": "a,b"}
    with pytest.raises(ValueError, match=r"\'b\' is not a setting"):
        presets.parse("mine.py:named:file=a,b")


def test_the_error_of_a_file_is_the_cause(folder: Path) -> None:
    (folder / "raises.py").write_text("y = x\n")
    with pytest.raises(ValueError, match="NameError") as error:
        presets.parse("raises.py:mine")
    assert isinstance(error.value.__cause__, NameError)
    with pytest.raises(ValueError, match="KeyError") as error:
        presets.parse("mine.py:breaks")
    assert isinstance(error.value.__cause__, KeyError)


def test_a_file_runs_once_until_it_changes_and_leaves_no_path_behind(folder: Path) -> None:
    before = list(sys.path)
    (folder / "beside.py").write_text("budget = 48\n")
    count = MINE + "import pathlib, beside\npathlib.Path('ran').open('a').write('x')\n"
    (folder / "mine.py").write_text(count + "policy = mine(beside.budget)\n")
    first = presets.parse("mine.py:policy")
    assert first.rest.budget == 48  # type: ignore[attr-defined]
    assert presets.parse("mine.py:policy") == first
    assert (folder / "ran").read_text() == "x"
    (folder / "mine.py").write_text(count + "policy = mine(128)\n")
    os.utime(folder / "mine.py", ns=(1, 1))
    assert presets.parse("mine.py:policy").rest.budget == 128  # type: ignore[attr-defined]
    assert sys.path == before
    del sys.modules["beside"]


def budget_of(file: str) -> int:
    return presets.parse(f"{file}:policy").rest.budget  # type: ignore[attr-defined]


def test_files_of_two_folders_import_what_is_beside_them(folder: Path) -> None:
    for i, place in enumerate(("a", "b")):
        (folder / place).mkdir()
        (folder / place / "shared.py").write_text(f"budget = {64 + i}\n")
        text = MINE + "import shared\npolicy = mine(shared.budget)\n"
        (folder / place / "mine.py").write_text(text)
    assert budget_of("a/mine.py") == 64
    assert budget_of("b/mine.py") == 65
    (folder / "c").mkdir()
    (folder / "c" / "shared.py").write_text("budget = 66\n")
    (folder / "c" / "mine.py").write_text("import shared\nshared.missing\n")
    with pytest.raises(ValueError, match=r"mine\.py raised AttributeError on line 2"):
        presets.parse("c/mine.py:policy")
    os.utime(folder / "a" / "mine.py", ns=(1, 1))
    assert budget_of("a/mine.py") == 64
    (folder / "b" / "shared.py").write_text("budget = 70\n")  # and not the file that imports it
    os.utime(folder / "b" / "shared.py", ns=(1, 1))
    assert budget_of("b/mine.py") == 70
    assert budget_of("a/mine.py") == 64
    del sys.modules["shared"]


def test_a_file_imports_what_is_beside_it_later_too(folder: Path) -> None:
    """In a function, after another file was run, and after one that failed."""
    (folder / "helper.py").write_text("budget = 64\n")
    text = "\ndef policy(budget=64):\n    from helper import budget\n    return mine(budget)\n"
    (folder / "mine.py").write_text(MINE + "import helper\n" + text)
    assert budget_of("mine.py") == 64
    (folder / "other.py").write_text(MINE + "policy = mine(32)\n")
    assert budget_of("other.py") == 32
    assert budget_of("mine.py") == 64
    (folder / "fails.py").write_text("import helper\nhelper.missing\n")
    with pytest.raises(ValueError, match=r"fails\.py raised AttributeError on line 2"):
        presets.parse("fails.py:policy")
    assert budget_of("mine.py") == 64
    del sys.modules["helper"]


def test_a_folder_of_modules_is_imported_anew_when_one_changes(folder: Path) -> None:
    """Also one without `__init__.py`, which is a package without a file."""
    (folder / "parts").mkdir()
    (folder / "mine.py").write_text(
        MINE + "import parts.sub\npolicy = mine(parts.sub.budget)\n"
    )
    for budget in (64, 65, 66):
        (folder / "parts" / "sub.py").write_text(f"budget = {budget}\n")
        os.utime(folder / "parts" / "sub.py", (budget, budget))  # seconds, as bytecode has them
        assert budget_of("mine.py") == budget
    for name in ("parts", "parts.sub"):
        del sys.modules[name]


def test_a_package_below_the_folder_is_imported_once(folder: Path) -> None:
    """As in a project with its environment in it."""
    packages = folder / "env" / "packages"
    (packages / "installed").mkdir(parents=True)
    (packages / "installed" / "__init__.py").write_text("")
    text = MINE + f"import sys\nsys.path.append({str(packages)!r})\nimport installed\n"
    before = list(sys.path)
    try:
        found = []
        for name in ("mine.py", "other.py"):
            (folder / name).write_text(text + "policy = mine(64)\n")
            presets.parse(f"{name}:policy")
            found.append(sys.modules["installed"])
        assert found[0] is found[1]
    finally:
        sys.path[:] = before
        del sys.modules["installed"]


@pytest.fixture
def installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that announces a method and a task by entry points."""
    site = folder / "site"
    info = site / "someones_methods-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: someones-methods\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(
        "[kvjax.presets]\nmean_key = someones_methods:mine\nbroken = someones_methods:gone\n"
        "[kvjax.tasks]\nrecite = someones_methods:Recite\n"
    )
    (site / "someones_methods.py").write_text(MINE + TASK)
    monkeypatch.syspath_prepend(str(site))


TASK = '''
from kvjax.evaluate import Example


@dataclass(frozen=True)
class Recite:
    """Asks for the text's own first words."""

    samples: int = 2
    words: int = 3

    metric = "exact match"
    max_new_tokens = 4
    stop = ()
    chat = False

    @property
    def name(self):
        return f"recite {self.words} words"

    def key(self):
        return {"title": self.name}

    def examples(self, tokenizer):
        return [Example(str(i), "a b c d", ("a",)) for i in range(self.samples)]

    def score(self, example, answer):
        return float(answer in example.answers)
'''


def test_an_installed_package_announces_methods(installed: None) -> None:
    assert presets.parse("mean_key:budget=64,unit=16").rest.budget == 64  # type: ignore[attr-defined]
    assert presets.find("mean_key").name == "mean_key"
    assert presets.parse("someones_methods:mine:budget=64") is not None
    with pytest.raises(
        ValueError, match=r"broken: the installed package's entry point .* raised"
    ):
        presets.parse("broken")
    with pytest.raises(ValueError, match=r"did you mean 'mean_key'.*mean_key"):
        presets.parse("mean_kye")
    with pytest.raises(
        ValueError, match="is not a setting of mean_key; write NAME=VALUE, of budget"
    ):
        presets.parse("mean_key:x")


def test_a_task_of_ones_own_is_named_as_a_method_is(folder: Path, installed: None) -> None:
    (folder / "tasks.py").write_text("from dataclasses import dataclass\n" + TASK)
    for text in ("tasks.py:Recite", "recite", "someones_methods:Recite"):
        (task,) = make_tasks([text], samples=5)
        assert task.samples == 5  # type: ignore[attr-defined]
        (task,) = make_tasks([f"{text}:words=4,samples=1"])
        assert (task.words, task.samples) == (4, 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no.py:quiz", r"--task no\.py:quiz: there is no file"),
        ("tasks.py:number", r"--task tasks\.py:number must be a task, got 3, which has no key"),
        (
            "tasks.py:half",
            r"--task tasks\.py:half must be a task, got a Half, which has no key, examples, score, metric",
        ),
        (
            "tasks.py:Recite:x=1",
            "'x=1' is not a setting of tasks.py:Recite; write NAME=VALUE, of samples, words",
        ),
        ("recited", "--task recited: unknown; there are"),
        (
            "gsm8k",
            r"--task gsm8k: unknown; .*lm-evaluation-harness: python -m kvjax\.evaluate\.harness",
        ),
    ],
)
def test_a_wrong_task_says_what_and_where(folder: Path, text: str, message: str) -> None:
    (folder / "tasks.py").write_text(
        "from dataclasses import dataclass\n"
        + TASK
        + "number = 3\nclass Half:\n    name = 'half'\nhalf = Half()\n"
    )
    with pytest.raises(ValueError, match=message):
        make_tasks([text])


def test_results_of_a_method_are_known_by_the_code_of_its_file(folder: Path) -> None:
    from kvjax.evaluate.provenance import own_digest

    first = own_digest(presets.parse("mine.py:policy"))
    assert first
    assert own_digest(presets.parse("fier")) == own_digest(None) == ""
    (folder / "parts.py").write_text(MINE)  # where a part is, and what it uses
    for text in ("from parts import MeanKey\n", MINE + "import parts\n"):
        (folder / "two.py").write_text(text)
        os.utime(folder / "parts.py", ns=(1, 1))
        seen = own_digest(presets.parse("two.py:MeanKey:budget=96"))
        (folder / "parts.py").write_text(MINE + "# changed\n")
        assert own_digest(presets.parse("two.py:MeanKey:budget=96")) != seen != ""
        (folder / "parts.py").write_text(MINE)
        os.utime(folder / "two.py", ns=(1, 1))
    del sys.modules["parts"]
    (folder / "mine.py").write_text(MINE.replace("return logits.of", "return -logits.of"))
    os.utime(folder / "mine.py", ns=(1, 1))
    changed = own_digest(presets.parse("mine.py:policy"))
    assert changed != first
