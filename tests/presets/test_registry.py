"""The registry: each method's least budget and the settings of its paper."""

import inspect

import pytest

from kvjax import presets
from kvjax.presets import REGISTRY

WITH_BUDGET = [name for name, preset in REGISTRY.items() if preset.has_budget]


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
