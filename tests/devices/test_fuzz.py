"""Random scripts on caches that are split over rows, KV heads and tokens: what plain lists of tokens give.

    KVJAX_FUZZ=1600:2000 XLA_FLAGS=--xla_force_host_platform_device_count=8 \\
        python -m pytest tests/devices/test_fuzz.py --thorough -rf
"""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest

import kvjax
from tests.fuzz.draw import LATEST, placed
from tests.fuzz.run import Programs, Wrong, run_all
from tests.fuzz.test_fuzz import FAULTS, SCRIPTS, numbers

QUICK = (1607,)


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.thorough) for n in numbers(range(LATEST, LATEST + 40))],
)
def test_random_scripts_on_a_random_configuration_and_placement(number: int) -> None:
    run_all(Programs(placed(number)), range(SCRIPTS * number, SCRIPTS * (number + 1)))


def test_a_planted_fault_is_found_on_several_devices() -> None:

    mesh = jax.make_mesh((2,), ("ctx",))
    drawn = replace(placed(LATEST), policy=FAULTS["rows mixed by a flush"], leader=None, window=None, several=0)
    drawn = replace(
        drawn, spec=replace(drawn.spec, dtype="float32"), placement=kvjax.Placement(mesh=mesh, context="ctx")
    )
    with pytest.raises(Wrong):
        run_all(Programs(drawn), range(SCRIPTS))
