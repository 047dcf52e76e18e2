"""Rules that hold for the options of every command."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_type_hints

from typer.core import TyperCommand


class Command(TyperCommand):
    """A command that refuses an option that is given twice, unless it may be repeated, and an
    empty path.

    By itself, the last of several values would count without a word, and an empty path, as of a
    shell variable that is not set, would be the current folder.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # as while a shell completes a word
            self._check(ctx, list(args))
        return super().parse_args(ctx, args)

    def _check(self, ctx: Any, args: list[str]) -> None:
        values, _, in_order = self.make_parser(ctx).parse_args(args=args)
        for param in dict.fromkeys(in_order):
            several = getattr(param, "multiple", False)
            if in_order.count(param) > 1 and not several:
                raise ValueError(f"{written(param)} is given more than once; give it once")
            if values.get(param.name) == "" and self._takes_path(param.name):
                raise ValueError(f"{written(param)} is empty; give a path")

    def _takes_path(self, name: str) -> bool:
        hint = get_type_hints(self.callback)[name]
        return Path in (hint, *get_args(hint))


def written(param: Any) -> str:
    """The name of an option or argument, as it is written."""
    if param.param_type_name == "argument":
        return getattr(param, "metavar", None) or param.name.upper()
    return str(param.opts[0])
