"""What benchmarks/touched.py counts, on selections written by hand."""

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import touched

    return touched


def test_a_group_counts_once_and_none_for_no_slot(touched) -> None:
    slots = np.array([[0, 15, 16, 47, 3], [-1, -1, 64, 64, -1], [-1] * 5])
    np.testing.assert_array_equal(touched.touched(slots, 16), [3, 1, 0])
    row = touched.row_of(slots.reshape(1, 3, 1, 1, 5), tokens=128, size=16)
    assert (row["groups"], row["selected"], row["most"]) == (8, 2.0, 3)
    assert row["touched"] == pytest.approx(4 / 3, abs=0.05)


def test_tokens_at_random_touch_what_chance_says(touched) -> None:
    rng = np.random.default_rng(0)
    slots = np.array([rng.choice(4096, 64, replace=False) for _ in range(400)])
    found = touched.touched(slots, 128).mean()
    assert touched.even(64, 4096, 128) == pytest.approx(found, rel=0.03)
    assert touched.even(4096, 4096, 128) == 32
