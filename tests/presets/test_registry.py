"""The table of presets, each method's least budget, and the settings of its paper."""

import dataclasses
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

from kvjax import contrib, presets
from kvjax.presets import REGISTRY
from kvjax.presets.registry import MODULES

WITH_BUDGET = [name for name, preset in REGISTRY.items() if preset.has_budget]


@pytest.mark.parametrize("name", MODULES)
def test_a_name_of_the_table_is_a_function_of_its_module(name: str) -> None:
    preset = presets.load_preset(name)
    assert preset.make is getattr(presets, name)
    assert preset.make.__module__ == MODULES[name]
    assert preset.name == name
    assert preset.keeps


def test_concepts_names_the_file_of_each_preset() -> None:
    text = (Path(__file__).parents[2] / "docs" / "concepts.md").read_text()
    told = {
        name: f"kvjax.presets.{file}"
        for names, file in re.findall(r"^\| (.+?) \| `kvjax/presets/(\w+)\.py`", text, re.M)
        for name in re.findall(r"\w+", names)
    }
    assert told == {
        name: module for name, module in MODULES.items() if module != f"kvjax.contrib.{name}"
    }


@pytest.mark.parametrize("file", [file.name for file in iter_modules(contrib.__path__)])
def test_each_preset_of_contrib_is_in_the_table(file: str) -> None:
    module = import_module(f"kvjax.contrib.{file}")  # one without a preset has parts alone
    found = {name for name, thing in vars(module).items() if hasattr(thing, "published")}
    assert found == {name for name in MODULES if MODULES[name] == module.__name__}


def test_a_method_of_contrib_is_imported_when_it_is_asked_for() -> None:
    code = """
import sys, kvjax
before = [name for name in sys.modules if name.startswith("kvjax.contrib")]
kvjax.presets.parse("adakv")
after = [name for name in sys.modules if name.startswith("kvjax.contrib.")]
print(before, after)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout.strip() == "[] ['kvjax.contrib.adakv']"


def test_a_file_of_contrib_copied_elsewhere_is_a_method_of_its_own(tmp_path: Path) -> None:
    source = Path(import_module("kvjax.contrib.mikv").__file__ or "").read_text()
    mine = tmp_path / "mine.py"
    mine.write_text(
        source.replace("def mikv(", "def mine(").replace("class Mixed(", "class Mine(")
    )
    mine.write_text(mine.read_text().replace(" Mixed(", " Mine("))
    preset = presets.find(f"{mine}:mine")
    assert preset.paper == REGISTRY["mikv"].paper
    assert preset.keeps == REGISTRY["mikv"].keeps
    policy = presets.parse(f"{mine}:mine:budget=64").rest
    assert type(policy).__name__ == "Mine"
    assert dataclasses.asdict(policy) == dataclasses.asdict(presets.mikv(64).rest)


@pytest.mark.parametrize("name", WITH_BUDGET)
def test_the_least_budget_is_taken_and_no_smaller_one(name: str) -> None:
    preset = REGISTRY[name]
    least = preset.least_budget
    assert least is not None
    assert 1 <= least <= inspect.signature(preset.make).parameters["budget"].default
    preset.make(least)
    for budget in {least - 1, least // 2}:
        with pytest.raises(ValueError, match="budget"):
            preset.make(budget)


@pytest.mark.parametrize("name", REGISTRY)
def test_the_papers_settings_are_settings_of_the_preset(name: str) -> None:
    preset = REGISTRY[name]
    for released in (False, True):
        assert presets.parse(preset.setting(released)) is not None
    if not preset.paper_setting:
        assert preset.setting() == name
    assert preset.released != preset.paper_setting or not preset.released


def test_a_method_without_a_budget_has_no_least_one() -> None:
    assert REGISTRY["logquant"].least_budget is None


ITEMS = ("unit", "besides", "zones", "budget", "generated")


@pytest.mark.parametrize("name", [name for name in REGISTRY if name != "full"])
def test_a_docstring_answers_the_checklist_of_comparisons_with_the_defaults_that_hold(
    name: str,
) -> None:
    preset = REGISTRY[name]
    assert tuple(preset.checklist) == ITEMS
    assert all(len(text) > 3 for text in preset.checklist.values())
    zones = preset.checklist["zones"]
    for setting, word in (("sink", "sink"), ("local", "window")):
        default = preset.settings.get(setting)
        if default is not None:
            assert f"{word} {default}" in zones, (
                f"{name} has {setting}={default}, and its checklist says: {zones}"
            )
        elif setting == "sink" and "sink" not in preset.settings:
            assert "no sink" in zones or "prompt's last" in zones
    assert (preset.checklist["budget"] == "none") == (not preset.has_budget)
    unit = preset.settings.get("page", 1) if name != "raas" else 1
    assert unit == 1 or f"pages of {unit}" in preset.checklist["unit"]
