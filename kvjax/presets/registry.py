"""The table of presets, and the parser of text such as "fier:budget=256" that names a preset and
its settings.

A name may also be that of a file's or a module's object ("mine.py:mine"), or one that an installed
package announces in the group `GROUP` of entry points.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from kvjax.policies import Full, PerLayer
from kvjax.presets.loading import (
    FILE,
    announced,
    load,
    load_announced,
    reference,
)
from kvjax.presets.own import Own, name_of
from kvjax.presets.parsing import read_settings
from kvjax.presets.preset import Preset
from kvjax.validation import nearest, short_repr

GROUP = "kvjax.presets"  # of entry points
# The module of each preset, whose function has the preset's name. It is imported when the preset
# is first asked for. The order is that of tables.
MODULES: dict[str, str] = {
    "full": "kvjax.presets.baselines",
    "fier": "kvjax.presets.retrieval",
    "pariskv": "kvjax.presets.retrieval",
    "quest": "kvjax.presets.retrieval",
    "freekv": "kvjax.presets.speculative",
    "arkvale": "kvjax.contrib.arkvale",
    "magicpig": "kvjax.contrib.magicpig",
    "pqcache": "kvjax.contrib.pqcache",
    "shadowkv": "kvjax.contrib.shadowkv",
    "logquant": "kvjax.presets.compressed",
    "kivi": "kvjax.presets.compressed",
    "turboquant": "kvjax.contrib.turboquant",
    "exact": "kvjax.presets.baselines",
    "streaming_llm": "kvjax.presets.evicting",
    "logevict": "kvjax.contrib.logevict",
    "h2o": "kvjax.presets.evicting",
    "tova": "kvjax.presets.evicting",
    "snapkv": "kvjax.presets.evicting",
    "pyramidkv": "kvjax.contrib.pyramidkv",
    "adakv": "kvjax.contrib.adakv",
    "mikv": "kvjax.contrib.mikv",
    "raas": "kvjax.contrib.raas",
    "evict": "kvjax.contrib.evict",
    "razorattention": "kvjax.contrib.razorattention",
    "duoattention": "kvjax.contrib.duoattention",
}


def load_preset(name: str) -> Preset:
    """The preset of a name in `MODULES`, whose module is imported."""
    return Preset.of(getattr(import_module(MODULES[name]), name))


class Registry(Mapping[str, Preset]):
    """Presets by name; each is loaded when it is asked for."""

    def __getitem__(self, name: str) -> Preset:
        if name not in MODULES:
            raise KeyError(name)
        return load_preset(name)

    def __contains__(self, name: object) -> bool:
        return name in MODULES

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


REGISTRY = Registry()


def find(name: str) -> Preset:
    """The preset of that name: one of the registry, "mine.py:mine", "package.module:mine", or one
    that an installed package announces.

    Raises:
      ValueError: an unknown name, with the nearest known one; a file or module that does not have
        it, or that raises an error.
    """
    preset, found = _find(name, "cache")
    if found != name:
        raise _unknown(name, [*REGISTRY])
    return preset


def installed() -> list[str]:
    """The names that installed packages announce."""
    return list(announced(GROUP))


def own_preset(given: Any, name: str = "") -> Preset:
    """A policy, a part of one, or a function that returns one as a preset; see
    `kvjax.presets.own`.

    >>> import kvjax
    >>> own_preset(lambda budget: kvjax.Retrieval(selector=kvjax.Fier(), budget=budget), "mine").has_budget
    True
    """
    own = Own.of(name or name_of(given), given)
    return Preset.of_own(own)


def read(text: str, *, where: str = "cache") -> tuple[Preset, dict[str, Any]]:
    """The preset that a text names, and the settings that it writes. `where` begins an error
    message.

    >>> preset, settings = read("fier:group=16")
    >>> preset.name, settings
    ('fier', {'group': 16})

    Raises:
      ValueError: see `find`; or a setting that the preset does not have.
    """
    if not isinstance(text, str):
        raise ValueError(
            f"{where} must be text such as 'fier:budget=256', got {short_repr(text)}"
        )
    preset, name = _find(text, where)
    return preset, read_settings(text, preset.make, where=where, name=name)


def _find(text: str, where: str) -> tuple[Preset, str]:
    """The preset of a text, and the part of the text that names it."""
    head = text.partition(":")[0]
    name = head.strip()
    if name in REGISTRY:
        return REGISTRY[name], head
    others = {} if FILE.fullmatch(text) else announced(GROUP)
    known = [*REGISTRY, *others]
    wanted = None if name in others else reference(text)
    if wanted is not None and (wanted.is_file or not nearest(name, known)):
        own = Own.of(f"{where} {wanted.text}", load(wanted, where=where))
        # In a table a method's name is short, unless a preset has it.
        label = f"{wanted.stem}.{wanted.name}" if wanted.name in REGISTRY else wanted.name
        return Preset.of_own(own, label), wanted.text
    if name in others:
        own = Own.of(f"{where} {name}", load_announced(others[name], where=where))
        return Preset.of_own(own, name), head
    raise _unknown(text, known)


def _unknown(name: str, known: Sequence[str]) -> ValueError:
    first, *more = re.split(r"[:@,]", name)
    near = nearest(first, known)
    if near and "@" in name:  # rows of a comparison are named "fier@256"
        near = f"{near}:budget={more[0]}"
    hint = f"did you mean {near!r}? There" if near else "there"
    if "," in name:
        hint = "give one cache at a time; there"
    return ValueError(
        f"unknown cache {short_repr(name)}; {hint} are {', '.join(known)}, and FILE.py:NAME or module:NAME for your own"
    )


def parse(text: str) -> PerLayer:
    """The policies that a text names: a preset, or a method of your own, and its settings.

    >>> from kvjax import presets
    >>> parse("fier:budget=256,group=16") == presets.fier(256, group=16)
    True

    "mine.py:mine:budget=64" is what the file mine.py calls mine, "package.module:mine" what a
    module does: a function of a budget and settings, a policy, or a selector or evictor. An
    installed package may announce names of its own in the group `kvjax.presets` of entry points.

    Raises:
      ValueError: an unknown preset, with the nearest one; a setting that the preset does not
        have; a file that is not there, or that raises an error.
    """
    return parse_with_budget(text)[0]


def parse_with_budget(
    text: str, budget: int | None = None, *, where: str = "cache", budget_where: str = "budget="
) -> tuple[PerLayer, int | None]:
    """`parse` that also returns the preset's budget, or None. `budget` is one given separately
    from the text.

    `where` and `budget_where` name text and budget in error messages.
    """
    preset, settings = read(text, where=where)
    if budget is not None:
        if not preset.has_budget:
            have = ", ".join(p.name for p in REGISTRY.values() if p.has_budget)
            raise ValueError(
                f"{budget_where} {budget}: the cache {preset.name!r} has no budget; leave it out, or use one of {have}"
            )
        if settings.get("budget", budget) != budget:
            raise ValueError(
                f"{where} {text} and {budget_where} {budget} set two budgets; give one"
            )
        settings["budget"] = budget
    policies = preset.policies(**settings)
    if not preset.has_budget:
        return policies, None
    return policies, settings.get("budget", preset.settings["budget"])


def check_reaches(policies: PerLayer, layers: int, name: str) -> None:
    """Raises ValueError if the dense layers of a preset cover the whole model, or if it was
    made for another model.

    >>> from kvjax import presets
    >>> check_reaches(presets.fier(64), 2, "fier")
    Traceback (most recent call last):
        ...
    ValueError: fier keeps the first 2 layers full and the model has 2, so no layer uses it; set dense_layers below 2
    """
    policies.check(layers)
    if not policies.reaches(layers):
        if set(policies.first) != {Full()}:
            raise ValueError(
                f"{name} has policies for {len(policies.first) + 1} layers and the model has {layers}; set "
                f"layers={layers}"
            )
        raise ValueError(
            f"{name} keeps the first {len(policies.first)} layers full and the model has {layers}, so no layer uses "
            f"it; set dense_layers below {layers}"
        )
