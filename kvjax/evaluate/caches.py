"""The rows of a comparison: caches from text such as "fier:group=16" and of one's own, at equal
budgets and equal dense layers.

A comparison is fair if all rows read about as many tokens. So one `dense_layers` applies to all
rows, whatever the papers' presets say; a row that sets its own keeps it, and shows it in its
name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import jax

from kvjax import presets
from kvjax.cache.cache import init
from kvjax.evictors import Evictor
from kvjax.policies import Full, PerLayer, Policy
from kvjax.presets import Preset
from kvjax.presets.loading import reference
from kvjax.selectors import Selector
from kvjax.spec import CacheSpec

if TYPE_CHECKING:
    from kvjax.models import DecoderConfig

DENSE_LAYERS = 2  # of FIER's and Quest's papers
AMPLE = 1 << 30  # a budget that every method can hold


@dataclass(frozen=True)
class Row:
    """One cache of a comparison, or the reason why it cannot be run."""

    name: str  # "fier@64": the part before "@" is the method
    policies: PerLayer | None
    # tokens that a step reads for each KV head; None for a cache without a budget
    budget: int | None = None
    refused: str = ""  # why it cannot be run
    # first layers that attend to everything; None where the cache has no such setting
    dense_layers: int | None = None
    note: str = ""  # a budget that is rounded down to whole pages


# A name of `kvjax methods`, "mine.py:mine", a policy or a part of one, or a function that returns
# one, perhaps of a budget.
Method = str | PerLayer | Policy | Sequence[Policy] | Selector | Evictor | Callable[..., Any]
Caches = Method | Mapping[str, Method] | Sequence[Method]


@dataclass(frozen=True)
class Asked:
    """A cache that a caller asks for: a method, with the settings that are written with it."""

    preset: Preset
    settings: Mapping[str, Any]
    label: str = ""  # the name that the caller gave it
    text: str = ""  # as it is written

    @property
    def name(self) -> str:
        return self.label or self.text or self.preset.name

    @property
    def takes_budget(self) -> bool:
        """True if it has a budget and does not set it."""
        return self.preset.has_budget and "budget" not in self.settings

    @property
    def is_policy(self) -> bool:
        """True for a policy, which is used as it is but for the first layers."""
        return self.preset.own is not None and not callable(self.preset.own.given)


def read_caches(caches: Caches, *, where: str = "--cache") -> list[Asked]:
    """Reads caches in a list or by name: names of presets, methods of the caller's own, or both.

    Raises:
      ValueError: nothing, an unknown name or setting, or something that is no method.
    """
    if isinstance(caches, Mapping):
        return [
            replace(_read(cache, where, name), label=name) for name, cache in caches.items()
        ]
    if isinstance(caches, str) or not isinstance(caches, Sequence):
        return [_read(caches, where)]
    if not caches:
        raise ValueError(
            "a comparison needs at least one cache, such as 'full' or 'fier:budget=64'"
        )
    return [_read(cache, where) for cache in caches]


def _read(cache: Method, where: str, name: str = "") -> Asked:
    if isinstance(cache, str):
        return Asked(*presets.read(cache, where=where), text=cache)
    try:
        return Asked(presets.own_preset(cache, name), {})
    except ValueError as error:
        raise ValueError(
            "caches must be names of presets, as ['full', 'fier:budget=64'], policies, or functions of a budget, also "
            f"by name, as {{'mine': policy}}: {error}"
        ) from error


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
      caches: names of presets, optionally with settings ("fier:group=16"), or of your own
        ("mine.py:mine"); policies; or functions that return one, perhaps of a budget. In a list,
        or by name: {"mine": lambda budget: ...}.
      budgets: for methods that have one; a budget that is written with a name wins.
      dense_layers: for all rows that do not set their own, as policies of all layers do; None
        keeps each preset's own.
      group_reduces: for methods whose `group_reduce` can be set.

    Raises:
      ValueError: an unknown preset or setting; budgets or rules that apply to no cache; two
        caches of one name; no row that can be run. A budget that one cache of several cannot
        hold is no error: its row says so.
    """
    asked = _told_apart(read_caches(caches))
    _require_use("--budget", budgets, asked, lambda preset: preset.has_budget, "has a budget")
    _require_use("--group-reduce", group_reduces, asked, has_group_reduce, "selects by a group")
    if budgets and not any(one.takes_budget for one in asked):
        given = ",".join(map(str, budgets))
        own = ", ".join(one.name for one in asked if one.preset.has_budget)
        raise ValueError(
            f"--budget {given} applies to no cache, as {own} set their own; leave it out"
        )
    found: dict[str, Row] = {}
    origin: dict[str, Asked] = {}
    for one in asked:
        rules: Sequence[str | None] = [None]
        if group_reduces and has_group_reduce(one.preset):
            rules = group_reduces
        for rule in rules:
            for row in _rows(one, rule, budgets, dense_layers):
                if row.name in found and not _is_same(origin[row.name], one):
                    raise ValueError(
                        f"two caches would both be called {row.name!r}; give them by name, as "
                        "{'one': policy, 'other': policy}"
                    )
                found[row.name] = row
                origin[row.name] = one
    _require_one(list(found.values()))
    return list(found.values())


def _told_apart(asked: Sequence[Asked]) -> list[Asked]:
    """The caches, of which those of one name in several files have their file in the name."""
    found = []
    for one in asked:
        same_name = [other for other in asked if other.preset.name == one.preset.name]
        distinct = {repr(other.preset.own and other.preset.own.name) for other in same_name}
        own = one.preset.own
        wanted = None if own is None or one.label else reference(one.text)
        if wanted is not None and len(distinct) > 1:
            place = wanted.place.removesuffix(".py")
            one = replace(one, preset=replace(one.preset, label=f"{place}.{wanted.name}"))
        found.append(one)
    return found


def _is_same(one: Asked, other: Asked) -> bool:
    """True if a cache is only asked for twice."""
    method, same = (ask.preset.own or ask.preset.make for ask in (one, other))
    return method == same and one.settings == other.settings


def _rows(
    asked: Asked, rule: str | None, budgets: Sequence[int] | None, dense_layers: int | None
) -> Iterator[Row]:
    """A row for each budget of a cache."""
    preset = asked.preset
    settings = {name: value for name, value in asked.settings.items() if name != "budget"}
    if rule is not None:
        settings["group_reduce"] = rule
    label = asked.label or _label(preset.name, settings)
    if not preset.has_budget:
        made = _policies(preset, settings, dense_layers)
        own_budget = getattr(made.rest, "budget", None) if asked.is_policy else None
        dense = (
            _dense_layers(made) if preset.own else settings.get("dense_layers", dense_layers)
        )
        takes = preset.own is not None or "dense_layers" in preset.settings
        yield Row(label, made, own_budget, dense_layers=dense if takes else None)
        return
    if preset.own is None:
        # raises for settings that are wrong at every budget
        _policies(preset, {**settings, "budget": AMPLE}, dense_layers)
    budgets = budgets or [preset.settings["budget"]]
    for budget in [asked.settings["budget"]] if "budget" in asked.settings else budgets:
        name = f"{label}@{budget}"
        try:
            made = _policies(preset, {**settings, "budget": budget}, dense_layers)
        except ValueError as error:
            yield Row(name, None, budget, refused=str(error))
            continue
        note = _rounding(made.rest, budget)
        yield Row(name, made, budget, note=note, dense_layers=_dense_layers(made))


def _policies(
    preset: Preset, settings: Mapping[str, Any], dense_layers: int | None
) -> PerLayer:
    """The policies of a row, which runs its own method on every device."""
    whole = dict(settings)
    if "dense_capacity" in preset.settings:
        whole.setdefault("dense_capacity", 0)
    if (
        dense_layers is not None
        and "dense_layers" not in whole
        and preset.sets_dense_layers(**whole)
    ):
        whole["dense_layers"] = dense_layers
    return preset.policies(**whole)


def without_budget(caches: Caches) -> list[str]:
    """The names of the caches that have a budget and do not set it."""
    return [one.name for one in read_caches(caches) if one.takes_budget]


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
        presets.check_reaches(row.policies, config.attention_layers, row.name)
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
    reads = beside + inner.selected
    chosen = f"{inner.selected // unit} pages of {unit} tokens"
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
    asked: Sequence[Asked],
    takes: Callable[[Preset], bool],
    why: str,
) -> None:
    if given and not any(takes(one.preset) for one in asked):
        have = ", ".join(preset.name for preset in presets.REGISTRY.values() if takes(preset))
        names = ", ".join(one.name for one in asked)
        none = (
            f"{option} {','.join(map(str, given))} applies to no cache, as none {why}: {names}"
        )
        raise ValueError(f"{none}; leave it out, or add one of {have}")
