"""Random caches under random calls give what plain lists of tokens give: no wrong output, no
token lost silently.

A failure names its script s; `run(Programs(configuration(s // SCRIPTS)), s)` repeats it.
KVJAX_FUZZ=2000:2600 runs the configurations of these numbers, whatever is in the suite; with
many cores:

    KVJAX_FUZZ=2000:2600 python -m pytest tests/fuzz/test_fuzz.py -k random_scripts \\
        --thorough -n 16 -rf

The same configurations, split over devices, are in `tests/devices/test_fuzz.py`.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax.contrib.adakv import HeadBudgets
from kvjax.contrib.mikv import Mixed
from kvjax.contrib.shadowkv import LowRank, MeanPages, OutlierRetrieval
from kvjax.numerics.partial import Logits
from kvjax.numerics.selection import unpack
from tests.fuzz.draw import Configuration, configuration
from tests.fuzz.run import Programs, Wrong, run_all
from tests.laws.broken import BrokenFull

SCRIPTS = 4  # of a configuration, which share its compiled programs
CONFIGURATIONS = 1600
QUICK = (2, 3, 676)  # in every run of the suite; what once failed joins them


def numbers(default: range) -> range:
    first, _, end = os.environ.get("KVJAX_FUZZ", f"{default.start}:{default.stop}").partition(
        ":"
    )
    return range(int(first), int(end))


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(n, marks=() if n in QUICK else pytest.mark.thorough)
        for n in numbers(range(CONFIGURATIONS))
    ],
)
def test_random_scripts_on_a_random_configuration(number: int) -> None:
    run_all(Programs(configuration(number)), range(SCRIPTS * number, SCRIPTS * (number + 1)))


# --------------------------------------------------------------------------------------------------- planted faults

SPEC = kvjax.CacheSpec(
    batch=3, q_heads=4, kv_heads=2, head_dim=16, capacity=60, dtype="float32"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LosesOne(kvjax.Retrieval):
    """A Retrieval whose flush writes one token of a chunk over its neighbour."""

    def append(self, st: Any, k: Any, v: Any, count: Any) -> Any:
        return super().append(st, k, v.at[:, :, 3].set(v[:, :, 2]), count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TellsOthers(kvjax.Retrieval):
    """A Retrieval that reports positions off by one from those that it read."""

    def info(self, *args: Any) -> Any:
        info = super().info(*args)
        told = info.positions
        return info._replace(positions=jnp.where((told > 5) & (told < 9), told - 1, told))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixesRows(kvjax.Retrieval):
    """A Retrieval whose flush gives a row the recent values of its neighbour."""

    def flush(self, st: Any) -> Any:
        after = super().flush(st)
        recent = dataclasses.replace(after.recent, v=jnp.roll(after.recent.v, 1, axis=0))
        return dataclasses.replace(after, recent=recent)


class OverBudget(HeadBudgets):
    """HeadBudgets whose heads together hold more than the layer's budget."""

    def _share(self, slots: int) -> int:
        return min(self.budget + 3, slots)


class StoresOneTwice(Mixed):
    """A Mixed whose flush stores one of the tokens that left in place of another."""

    def flush(self, st: Any) -> Any:
        v = st.pending.v
        wrong = dataclasses.replace(
            st, pending=dataclasses.replace(st.pending, v=v.at[:, :, 2].set(v[:, :, 1]))
        )
        return super().flush(wrong)


class LearnsAnew(LowRank):
    """A LowRank that learns a new basis with each flush, in which the old coefficients mean
    other keys.
    """

    def append(self, st: Any, k: Any, v: Any, count: Any) -> Any:
        fresh = super().append(
            dataclasses.replace(st, count=jnp.zeros_like(st.count)), k, v, count
        )
        right = super().append(st, k, v, count)
        return dataclasses.replace(
            right, basis=jnp.where((count > 0)[:, None], fresh.basis, st.basis)
        )


class SelectsTwice(kvjax.Exact):
    """An Exact that gives its best unit twice."""

    def select(self, ix: Any, q: Any, among: Any, *, logits: Logits) -> Any:
        best = unpack(super().select(ix, q, among, logits=logits))
        return best._replace(
            slots=best.slots.at[..., 1].set(best.slots[..., 0]),
            valid=best.valid.at[..., 1].set(best.valid[..., 0]),
        )


PARTS: dict[str, Any] = {
    "selector": kvjax.Fier(group=8),
    "budget": 24,
    "sink": 2,
    "local": 8,
    "demote": kvjax.Fifo(leave=8),
}
FAULTS: dict[str, kvjax.Policy] = {
    "a token is written over its neighbour": LosesOne(**PARTS),
    "positions that were not read": TellsOthers(**PARTS),
    "rows mixed by a flush": MixesRows(**PARTS),
    "heads over their budget": OverBudget(
        evictor=kvjax.Observation(window=4, kernel_size=1), budget=12
    ),
    "an evicted token is lost": StoresOneTwice(budget=12, store=kvjax.Dense(), chunk=8),
    "a basis that changes": OutlierRetrieval(
        selector=MeanPages(page=4),
        store=LearnsAnew(rank=8, page=4, outliers=1, learn=8, values=kvjax.Dense()),
        **{name: part for name, part in PARTS.items() if name != "selector"},
    ),
    "a unit selected twice": kvjax.Retrieval(**PARTS | {"selector": SelectsTwice()}),
} | {
    fault: BrokenFull(fault=fault)
    for fault in (
        "clamps",
        "uses the length of row 0",
        "reads past count",
        "forgets the newest",
        "stores inactive rows",
        "scales by the batch's mean length",
        "stores a prompt in reverse",
        "forgets a prompt's first chunk",
    )
}
QUICK_FAULTS = ("clamps", "reads past count")


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=() if f in QUICK_FAULTS else pytest.mark.thorough) for f in FAULTS],
    ids=lambda f: f,
)
def test_a_planted_fault_is_found(fault: str) -> None:
    programs = Programs(Configuration(FAULTS[fault], SPEC, None))
    with pytest.raises(Wrong, match=r"^script \d, call \d+ of "):
        run_all(programs, range(SCRIPTS))


def test_a_fault_of_insert_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row too low."""
    real = kvjax.insert
    programs = Programs(Configuration(kvjax.Full(), SPEC, None))
    programs.insert = jax.jit(lambda cache, one, row: real(cache, one, jnp.maximum(row - 1, 0)))
    with pytest.raises(Wrong):
        run_all(programs, range(SCRIPTS))


def test_a_fault_of_rollback_is_found() -> None:
    """A token too many stays."""
    programs = Programs(Configuration(kvjax.Full(), SPEC, None, several=3))
    programs.rollback = jax.jit(
        lambda cache, to: kvjax.rollback(cache, jnp.minimum(to + 1, cache.length))
    )
    with pytest.raises(Wrong):
        run_all(programs, range(SCRIPTS))


def test_a_fault_of_truncate_is_found() -> None:
    """A token too many stays."""
    programs = Programs(Configuration(kvjax.Full(), SPEC, None, truncates=True))
    programs.truncate = jax.jit(
        lambda cache, to: kvjax.truncate(cache, jnp.minimum(to + 1, cache.length))
    )
    with pytest.raises(Wrong):
        run_all(programs, range(SCRIPTS))


def test_a_fault_of_several_steps_is_found() -> None:
    """The keys of a call come in another order."""
    programs = Programs(Configuration(kvjax.Full(), SPEC, None, several=3))
    real = programs.decode
    programs.decode = lambda cache, q, k, v, **settings: real(
        cache, q, k[:, ::-1], v, **settings
    )
    with pytest.raises(Wrong):
        run_all(programs, range(SCRIPTS))
