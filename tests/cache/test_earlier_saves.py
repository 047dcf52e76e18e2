"""Saves of earlier versions are restored and go on as they did."""

import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import kvjax
from kvjax.cache.serialize import plain
from tests.cache import saves


@pytest.mark.parametrize("kind", saves.KINDS)
def test_a_save_of_an_earlier_version_is_restored_and_goes_on(
    kind: str, tmp_path: Path
) -> None:
    with zipfile.ZipFile(saves.FOLDER / f"{kind}.zip") as file:
        file.extractall(tmp_path)
    like = jax.eval_shape(lambda: saves.empty(kvjax, kind))
    cache = kvjax.restore(tmp_path / "save", like)
    assert cache.length.tolist() == [saves.PROMPT]
    outputs = np.load(tmp_path / "outputs.npy")
    np.testing.assert_allclose(saves.go_on(kvjax, cache), outputs, rtol=0, atol=2e-5)


def kinds(value: Any) -> set[str]:
    """The names of all classes in a description."""
    if isinstance(value, dict):
        own = {value["kind"]} if "kind" in value else set()
        return own.union(*map(kinds, value.values()))
    return set().union(*map(kinds, value)) if isinstance(value, list) else set()


def test_each_class_of_a_preset_is_in_a_save_of_an_earlier_version() -> None:
    presets = [kvjax.presets.parse(text).rest for text in saves.KINDS.values()]
    kept = kinds([plain(policy) for policy in presets])
    assert kinds([plain(preset.policy()) for preset in kvjax.presets.REGISTRY.values()]) <= kept
    assert {path.stem for path in saves.FOLDER.glob("*.zip")} == set(saves.KINDS)
