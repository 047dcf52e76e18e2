"""Methods of one's own as presets, so that they can be named, compared and swept like the built-in
ones.

A method is given as

- a function that returns a policy, or policies of all layers; it may have a `budget`, and other
  arguments with defaults, which are its settings;
- a policy, or a class of policies, whose fields are its settings;
- a selector or evictor, or a class of them, which is put into a `Retrieval` or an `Evicting` of
  the budget, with the defaults of that policy.

One policy for all layers also has the setting `dense_layers`: the number of first layers that
attend to everything instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvjax.evictors import Evictor
from kvjax.policies import Evicting, Full, PerLayer, Retrieval
from kvjax.presets.parsing import field_names
from kvjax.selectors import Selector
from kvjax.spec import require_int
from kvjax.validation import raised, short_repr

VERBS = ("init", "prefill", "update", "attend")  # of every policy
BUDGET = 1024  # of a selector or an evictor without another, as of the policies around them
WANTED = "a policy, a selector, an evictor, or a function or class that returns one"


@dataclass(frozen=True)
class Own:
    """A user's method under a name, and how it is called."""

    name: str
    given: Any
    settings: tuple[inspect.Parameter, ...] = ()  # of `given`, if it is called; by name
    needs_budget: bool = False
    adds_budget: bool = False  # for the policy around a part
    adds_dense_layers: bool = True

    @classmethod
    def of(cls, name: str, given: Any) -> Own:
        """Checks what a user gave, without a call.

        Raises:
          ValueError: it is nothing that could return a policy, or it needs another argument than
            a budget.
        """
        if not (callable(given) or _is_policy(given) or _is_part(given)):
            raise ValueError(f"{name} must be {WANTED}, got {short_repr(given)}")
        settings = _settings(name, given) if callable(given) else ()
        budgets = [p for p in settings if p.name == "budget"]
        layers = any("dense_layers" in (p.name, *field_names(p.default)) for p in settings)
        return cls(
            name,
            given,
            settings,
            needs_budget=any(p.default is p.empty for p in budgets),
            adds_budget=_is_part(given) and not budgets,
            adds_dense_layers=not layers,
        )

    def function(self) -> Callable[..., PerLayer]:
        """A function of the settings that returns the policies of all layers, as presets are."""

        def make(**settings: Any) -> PerLayer:
            return self.policies(settings)

        own = [p.replace(default=None) if p.default is p.empty else p for p in self.settings]
        if self.adds_budget:
            own.insert(0, _setting("budget", BUDGET))
        if self.adds_dense_layers:
            own.append(_setting("dense_layers", None))
        make.__name__ = self.name
        make.__doc__ = inspect.getdoc(self.given)
        make.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]  # read by `inspect.signature`
        return make

    def policies(self, settings: dict[str, Any]) -> PerLayer:
        """The policies of all layers."""
        dense = settings.get("dense_layers") if self.adds_dense_layers else None
        made = self._call(settings)
        if dense is None:
            return PerLayer.of(made)
        if not self.is_alike(settings):
            raise ValueError(
                f"{self.name} sets the policy of each layer itself, so dense_layers={dense} does not apply; leave it "
                "out"
            )
        count = require_int(f"{self.name}(dense_layers=...)", dense, at_least=0)
        return PerLayer((Full(),) * count, made)

    def is_alike(self, settings: dict[str, Any]) -> bool:
        """True if it returns one policy for all layers, to which `dense_layers` can be added."""
        return self.adds_dense_layers and not isinstance(
            self._call(settings), PerLayer | Sequence
        )

    def _call(self, settings: dict[str, Any]) -> Any:
        """A policy, or policies of all layers."""
        budget = settings.get("budget", self._default_budget)
        asked = {p.name: settings[p.name] for p in self.settings if p.name in settings}
        if self.needs_budget and budget is None:
            raise ValueError(
                f"{self.name} needs a budget of tokens; give one, such as {self.name}:budget=256"
            )
        made = self._called(asked) if callable(self.given) else self.given
        if isinstance(made, Selector):
            made = Retrieval(selector=made, budget=self._part_budget(budget))
        elif isinstance(made, Evictor):
            made = Evicting(evictor=made, budget=self._part_budget(budget))
        if not _is_policy(made):
            got = (
                f"{self.name}() returned {short_repr(made)}"
                if callable(self.given)
                else short_repr(made)
            )
            raise ValueError(
                f"{got}, where {WANTED} is wanted; give for example kvjax.Retrieval(...)"
            )
        return made

    @property
    def _default_budget(self) -> int | None:
        """The default of the argument `budget`; None without one."""
        budgets = [p.default for p in self.settings if p.name == "budget"]
        return budgets[0] if budgets and not self.needs_budget else None

    def _called(self, asked: dict[str, Any]) -> Any:
        try:
            return self.given(**asked)
        except ValueError:
            raise
        except Exception as error:
            called = ", ".join(f"{name}={value}" for name, value in asked.items())
            raise raised(f"{self.name}({called})", error) from error

    def _part_budget(self, budget: int | None) -> int:
        return BUDGET if budget is None else budget


def name_of(given: Any) -> str:
    """A short name of a policy, a part of one or a function, for a row of a comparison.

    >>> from kvjax import Fier, Retrieval
    >>> name_of(Retrieval(selector=Fier())), name_of(Fier), name_of(partial(max, key=len))
    ('Retrieval(Fier)', 'Fier', 'max')
    """
    while isinstance(given, partial):
        given = given.func
    if callable(given):
        return getattr(given, "__name__", type(given).__name__)
    if isinstance(given, PerLayer):
        given = given.rest
    elif isinstance(given, Sequence):
        given = given[-1]
    parts = (getattr(given, field, None) for field in ("selector", "evictor"))
    inner = next((f"({type(part).__name__})" for part in parts if part is not None), "")
    return type(given).__name__ + inner


def _is_policy(given: Any) -> bool:
    """True for a policy, and for policies of all layers."""
    if isinstance(given, Sequence) and not isinstance(given, str):
        return bool(given) and all(map(_is_policy, given))
    whole = all(callable(getattr(given, verb, None)) for verb in VERBS)
    return isinstance(given, PerLayer) or (whole and not isinstance(given, type))


def _is_part(given: Any) -> bool:
    """True for a selector or an evictor, or a class of one."""
    parts = (Selector, Evictor)
    return issubclass(given, parts) if isinstance(given, type) else isinstance(given, parts)


def _settings(name: str, make: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """The arguments of a function or class, to give by name."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # Python does not know those of some functions in C
        raise ValueError(f"{name} must be {WANTED}, got {short_repr(make)}") from None
    found = []
    for p in parameters:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        needed = p.default is p.empty
        if p.kind is p.POSITIONAL_ONLY or (needed and p.name != "budget"):
            cure = "remove the /" if p.kind is p.POSITIONAL_ONLY else "give it a default"
            raise ValueError(
                f"{name} is called with a budget and settings by name, so it cannot take {p.name}; {cure}"
            )
        found.append(_setting(p.name, p.default))
    return tuple(found)


def _setting(name: str, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
