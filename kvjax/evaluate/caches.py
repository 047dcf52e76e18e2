"""The rows of a comparison: caches from text such as "fier:group=16", at equal budgets and
equal dense layers.

A comparison is fair if all rows read about as many tokens. So one `dense_layers` applies to all
rows, whatever the papers' presets say; a row that sets its own keeps it, and shows it in its
name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import jax

from kvjax import presets
from kvjax.cache.cache import init
from kvjax.policies import Full, PerLayer, Policy
from kvjax.presets import Preset
from kvjax.presets.parsing import read_settings
from kvjax.spec import CacheSpec
from kvjax.validation import shown

if TYPE_CHECKING:
    from kvjax.models import DecoderConfig

DENSE_LAYERS = 2  # of FIER's and Quest's papers
AMPLE = 1 << 30  # a budget that every method can hold


@dataclass(frozen=True)
class Row:
    """One cache of a comparison, or the reason why it cannot be run."""

    name: str  # "fier@64": the part before "@" is the method
    policies: PerLayer | None
    budget: int | None = (
        None  # tokens that a step reads for each KV head; None for a cache without a budget
    )
    refused: str = ""  # why it cannot be run
    dense_layers: int | None = (
        None  # first layers that attend to everything; None where the cache has no such setting
    )
    note: str = ""  # a budget that is rounded down to whole pages


Caches = Mapping[str, PerLayer | Policy | Sequence[Policy]] | Sequence[str]


def make_rows(
    caches: Caches,
    *,
    budgets: Sequence[int] | None = None,
    dense_layers: int | None = DENSE_LAYERS,
    group_reduces: Sequence[str] | None = None,
) -> list[Row]:
    """The rows of a comparison: each cache with every budget and every group rule that it
    takes.

    Args:
      caches: names of presets, optionally with settings ("fier:group=16"); or policies by name,
        used as they are.
      budgets: for methods that have one; a budget in a name wins.
      dense_layers: for all rows whose text does not set it; None keeps each preset's own.
      group_reduces: for methods whose `group_reduce` can be set.

    Raises:
      ValueError: an unknown preset or setting; budgets or rules that apply to no cache, or that
        come with policies; no row that can be run. A budget that one cache of several cannot
        hold is no error: its row says so.
    """
    if isinstance(caches, str):
        caches = [caches]
    if not caches:
        raise ValueError(
            "a comparison needs at least one cache, such as 'full' or 'fier:budget=64'"
        )
    if isinstance(caches, Mapping):
        for name, setting in (("budgets", budgets), ("group_reduces", group_reduces)):
            if setting:
                raise ValueError(
                    f"{name}={list(setting)} applies to caches given as text; policies are used as they are, so leave "
                    "it out"
                )
        return [_given(name, policy) for name, policy in caches.items()]
    if not isinstance(caches, Sequence) or not all(isinstance(cache, str) for cache in caches):
        got = (
            f"[{', '.join(map(shown, caches))}]"
            if isinstance(caches, Sequence)
            else shown(caches)
        )
        raise ValueError(
            "caches must be names of presets, as ['full', 'fier:budget=64'], or policies by name, as {'mine': policy}; "
            f"got {got}"
        )
    known = {text: presets.find(text.partition(":")[0]) for text in caches}
    _require_use("--budget", budgets, known, lambda preset: preset.has_budget, "has a budget")
    _require_use("--group-reduce", group_reduces, known, has_group_reduce, "selects by a group")
    if budgets and not without_budget(caches):
        given, own = (
            ",".join(map(str, budgets)),
            ", ".join(text for text in known if known[text].has_budget),
        )
        raise ValueError(
            f"--budget {given} applies to no cache, as {own} set their own; leave it out"
        )
    found: dict[str, Row] = {}
    for text, preset in known.items():
        written = read_settings(text, preset.make, where="--cache")
        own_budget = written.get("budget")
        asked = {name: value for name, value in written.items() if name != "budget"}
        rules: Sequence[str | None] = (
            group_reduces if group_reduces and has_group_reduce(preset) else [None]
        )
        for rule in rules:
            more = {} if rule is None else {"group_reduce": rule}
            settings = {**asked, **more}
            label = _label(preset.name, settings)
            if dense_layers is not None and "dense_layers" in preset.settings:
                settings = {"dense_layers": dense_layers, **settings}
            if "dense_capacity" in preset.settings:
                settings = {
                    "dense_capacity": 0,
                    **settings,
                }  # so that a row runs its own method on every device
            if not preset.has_budget:
                found[label] = Row(
                    label,
                    preset.policies(**settings),
                    dense_layers=settings.get("dense_layers"),
                )
                continue
            preset.policies(
                **settings, budget=AMPLE
            )  # raises for settings that are wrong at every budget
            default = preset.settings["budget"]
            for budget in [own_budget] if own_budget is not None else budgets or [default]:
                name = f"{label}@{budget}"
                try:
                    made = preset.policies(**settings, budget=budget)
                    found[name] = Row(
                        name,
                        made,
                        budget,
                        note=_rounding(made.rest, budget),
                        dense_layers=_dense_layers(made),
                    )
                except ValueError as error:
                    found[name] = Row(name, None, budget, refused=str(error))
    _require_one(list(found.values()))
    return list(found.values())


def without_budget(caches: Caches) -> list[str]:
    """The caches that have a budget and do not set it in their text."""
    if isinstance(caches, Mapping):
        return []
    known = {
        text: presets.find(text.partition(":")[0])
        for text in ([caches] if isinstance(caches, str) else caches)
    }
    return [
        text
        for text, preset in known.items()
        if preset.has_budget
        and "budget" not in read_settings(text, preset.make, where="--cache")
    ]


def check_rows(rows: Sequence[Row], spec: CacheSpec, config: DecoderConfig) -> list[Row]:
    """The rows, each refused if it cannot hold this model.

    Raises:
      ValueError: no row can.
    """
    checked = [check_row(row, spec, config) for row in rows]
    _require_one(checked)
    return checked


def check_row(row: Row, spec: CacheSpec, config: DecoderConfig) -> Row:
    """The row, refused if it cannot hold this model."""
    if row.policies is None:
        return row
    try:
        presets.check_reaches(row.policies, config.layers, row.name)
        config.check_cache(
            jax.eval_shape(partial(init, row.policies, spec, layers=config.layers))
        )
    except (ValueError, NotImplementedError) as error:
        return replace(row, policies=None, refused=str(error))
    return row


def _require_one(rows: Sequence[Row]) -> None:
    if all(row.refused for row in rows):
        raise ValueError("; ".join(dict.fromkeys(row.refused for row in rows)))


def has_group_reduce(preset: Preset) -> bool:
    """True if a GQA group shares its selection by a rule that can be set."""
    return isinstance(preset.settings.get("group_reduce"), str)


def _given(name: str, policy: PerLayer | Policy | Sequence[Policy]) -> Row:
    policies = PerLayer.of(policy)
    return Row(
        name,
        policies,
        getattr(policies.rest, "budget", None),
        dense_layers=_dense_layers(policies),
    )


def _dense_layers(policies: PerLayer) -> int:
    """First layers that attend to everything; a preset may have other policies of their own for
    its layers.
    """
    return len(list(takewhile(lambda policy: policy == Full(), policies.first)))


def _label(name: str, settings: Mapping[str, Any]) -> str:
    return name + (
        ":" + ",".join(f"{key}={value}" for key, value in settings.items()) if settings else ""
    )


def _rounding(policy: Policy, budget: int) -> str:
    """The tokens that a step reads, if whole pages do not fill the budget; else empty."""
    inner: Any = getattr(policy, "retrieval", policy)  # of a policy around a Retrieval
    unit = getattr(getattr(inner, "selector", None), "unit", 1)
    if not hasattr(inner, "selector"):
        return ""
    beside = inner.sink + inner.local + getattr(inner, "beside", 0)
    reads, chosen = beside + inner.selected, f"{inner.selected // unit} pages of {unit} tokens"
    if unit == 1:
        chosen = f"{inner.selected} selected"
    return (
        ""
        if reads == budget
        else f"reads up to {reads}: {chosen} and {beside} other token{'s' * (beside != 1)}"
    )


def _require_use(
    option: str,
    given: Sequence[Any] | None,
    known: Mapping[str, Preset],
    takes: Callable[[Preset], bool],
    why: str,
) -> None:
    if given and not any(map(takes, known.values())):
        have = ", ".join(preset.name for preset in presets.REGISTRY.values() if takes(preset))
        none = f"{option} {','.join(map(str, given))} applies to no cache, as none {why}: {', '.join(known)}"
        raise ValueError(f"{none}; leave it out, or add one of {have}")
