"""A preset: a function that makes the policies of a published method, and what one says of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kvjax.policies import PerLayer, Policy
from kvjax.presets.own import Own
from kvjax.presets.parsing import arguments_of, settings_of

MakePolicies = TypeVar("MakePolicies", bound=Callable[..., PerLayer])


@dataclass(frozen=True)
class Published:
    """A method's line in a table; its settings are text without the method's name."""

    keeps: str = ""  # what it keeps and attends to
    paper: str = "-"
    paper_setting: str = ""  # settings of the paper where they are not the defaults
    released: str = ""  # those of the released code, where they differ from the paper's


def published(
    keeps: str, *, paper: str = "-", paper_setting: str = "", released: str = ""
) -> Callable[[MakePolicies], MakePolicies]:
    """Writes what a table says of a method to the function that makes its policies.

    >>> @published("the newest token", paper="None 2026")
    ... def newest() -> PerLayer: ...
    >>> Preset.of(newest).paper
    'None 2026'
    """

    def note(make: MakePolicies) -> MakePolicies:
        make.__dict__["published"] = Published(keeps, paper, paper_setting, released)
        return make

    return note


@dataclass(frozen=True)
class Preset:
    """A method by its function and a summary of it: one of the table, or one of a user's own."""

    make: Callable[..., PerLayer]
    keeps: str = ""  # what it keeps and attends to
    paper: str = "-"
    paper_setting: str = ""  # see `Published`
    released: str = ""
    own: Own | None = None  # what a user gave; None for those of the table
    label: str = ""  # the name in tables, if it is not that of `make`

    @classmethod
    def of(cls, make: Callable[..., PerLayer]) -> Preset:
        """The preset of a function, with what `published` wrote to it."""
        about = make.__dict__.get("published", Published())
        return cls(make, about.keeps, about.paper, about.paper_setting, about.released)

    @classmethod
    def of_own(cls, own: Own, label: str = "") -> Preset:
        """The preset of a user's method, with what `published` wrote to its function."""
        about = getattr(own.given, "published", None)
        if not isinstance(about, Published):
            about = Published()
        return cls(
            own.function(),
            about.keeps,
            about.paper,
            about.paper_setting,
            about.released,
            own=own,
            label=label,
        )

    @property
    def name(self) -> str:
        return self.label or self.make.__name__

    @property
    def has_budget(self) -> bool:
        return "budget" in settings_of(self.make)

    def setting(self, released: bool = False) -> str:
        """The text of the paper's setting, such as "quest:group_reduce=per_head"; or of the
        released code's.
        """
        given = (released and self.released) or self.paper_setting
        return f"{self.name}:{given}" if given else self.name

    @property
    def checklist(self) -> dict[str, str]:
        """Answers of the docstring to five questions on which methods of one budget differ: the
        unit of a selection, what is attended besides, sink and window by default, what the
        budget counts, and what becomes of generated tokens.

        >>> from kvjax.presets import find
        >>> find("magicpig").checklist["unit"]
        'tokens, sampled for each query head'
        """
        _, found, text = inspect.cleandoc(self.make.__doc__ or "").partition("**Checklist:** ")
        items = (
            " ".join(text.partition("\n\n")[0].split()).removesuffix(".").split("; ")
            if found
            else []
        )
        return dict(item.split(": ", 1) for item in items)

    @property
    def least_budget(self) -> int | None:
        """The smallest budget that the preset takes with its other settings at their defaults;
        None without a budget.

        >>> from kvjax.presets import find
        >>> find("quest").least_budget
        48
        """
        if not self.has_budget:
            return None
        # the default always works
        low = 0
        high = self.settings["budget"]
        if high is None:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            try:
                self.make(budget=middle)
            except ValueError:
                low = middle
            else:
                high = middle
        return high

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that its text takes, with their defaults; those of shared selections
        where it can share one.
        """
        found = settings_of(self.make)
        try:
            self.policy().follower()
        except ValueError:
            return {
                name: default
                for name, default in found.items()
                if name not in ("share", "anchors")
            }
        return found

    def policies(self, **settings: Any) -> PerLayer:
        """The policies of all layers, with settings by the names that its text has."""
        return self.make(**arguments_of(self.make, settings))

    def policy(self) -> Policy:
        """The policy that this preset uses for a compressed layer, with its defaults."""
        needed = {"budget": 1024} if self.own is not None and self.own.needs_budget else {}
        return self.make(**needed).rest

    def sets_dense_layers(self, **settings: Any) -> bool:
        """True if the number of first layers that attend to everything is a setting; that of a
        user's function can depend on what it returns for these settings."""
        if self.own is not None and self.own.adds_dense_layers:
            return self.own.is_alike(settings)
        return "dense_layers" in self.settings
