"""Random scripts on caches that are split over rows, KV heads and tokens: what plain lists of
tokens give.

    KVJAX_FUZZ=1600:2000 XLA_FLAGS=--xla_force_host_platform_device_count=8 \\
        python -m pytest tests/devices/test_fuzz.py --thorough -rf
"""

from __future__ import annotations

import pytest

from tests.fuzz.draw import LATEST, placed
from tests.fuzz.run import Programs, run_all
from tests.fuzz.test_fuzz import SCRIPTS, numbers

QUICK = (1607,)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(n, marks=() if n in QUICK else pytest.mark.thorough)
        for n in numbers(range(LATEST, LATEST + 40))
    ],
)
def test_random_scripts_on_a_random_configuration_and_placement(number: int) -> None:
    run_all(Programs(placed(number)), range(SCRIPTS * number, SCRIPTS * (number + 1)))
