"""Settings written as text: "fier:budget=256,group=16" names a function and the arguments to
call it with.

If the default of a parameter is a dataclass, the dataclass's fields are settings too, in place
of the parameter: with `layers=Layers(dense=2)`, the text "share=4" stands for Layers(dense=2,
share=4).

A value is read by the default of its parameter: if that is a bool, "no" and "0" mean False. All
other values are read as Python literals, and anything else is a string.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from kvjax.validation import cut, short_repr

TEXT_NAME = "name in text"  # metadata of a field whose setting has another name than the field
# Text between two commas: all that is in quotes or in brackets, and other characters.
SETTING = re.compile(
    r"""(?:^|(?<=,))(?:'[^']*'|"[^"]*"|\[[^][]*\]|\([^()]*\)|\{[^{}]*\}|[^,'"\[({])*(?=,|$)"""
)
TRUE = ("true", "yes", "on", "1")
FALSE = ("false", "no", "off", "0")


def settings_of(make: Callable[..., Any]) -> dict[str, Any]:
    """The settings of a function, with their defaults."""
    found: dict[str, Any] = {}
    for p in inspect.signature(make).parameters.values():
        if p.default is not p.empty:
            names = field_names(p.default)
            found |= {name: getattr(p.default, own) for name, own in names.items()} or {
                p.name: p.default
            }
    return found


def arguments_of(make: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a function for these settings.

    >>> from kvjax import presets
    >>> arguments_of(presets.fier, {"budget": 256, "share": 4})
    {'budget': 256, 'layers': Layers(dense=2, share=4, anchors=None)}
    """
    given = dict(settings)
    made = {}
    for p in inspect.signature(make).parameters.values():
        if own := {
            own: given.pop(name)
            for name, own in field_names(p.default).items()
            if name in given
        }:
            made[p.name] = replace(p.default, **own)
    return given | made


def field_names(default: Any) -> dict[str, str]:
    """The names of the fields of a dataclass by their names as settings; none of anything else."""
    if not is_dataclass(default) or isinstance(default, type):
        return {}
    return {f.metadata.get(TEXT_NAME, f.name): f.name for f in fields(default)}


def read_settings(
    text: str,
    make: Callable[..., Any] | Mapping[str, Any],
    *,
    where: str = "setting",
    name: str | None = None,
) -> dict[str, Any]:
    """The settings of "NAME:SETTING=VALUE,...", for `arguments_of`; `make` may also be all
    settings with their defaults. `where` begins an error message; `name` is what comes before the
    settings, by default all up to the first colon.

    >>> from kvjax import presets
    >>> read_settings("shadowkv:budget=256,host=no,group_reduce=per_head", presets.shadowkv)
    {'budget': 256, 'host': False, 'group_reduce': 'per_head'}

    A comma within quotes or brackets does not end a value:

    >>> read_settings("razorattention:heads='a,b.json'", {"heads": None})
    {'heads': 'a,b.json'}

    Raises:
      ValueError: a part that is not SETTING=VALUE, a name that `make` does not take, a name
        given twice, a bool that is neither true nor false.
    """
    name = text.partition(":")[0] if name is None else name
    rest = text[len(name) :].removeprefix(":")
    known = make if isinstance(make, Mapping) else settings_of(make)
    settings: dict[str, Any] = {}
    for part in filter(None, _parts(rest)):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in known or not equals:
            cure = f"write NAME=VALUE, of {', '.join(known)}" if known else "it has no settings"
            raise ValueError(
                cut(f"{where} {text}: {short_repr(part)} is not a setting of {name}; {cure}")
            )
        if key in settings:
            raise ValueError(cut(f"{where} {text}: {key} is given twice; give it once"))
        settings[key] = _read(value, known[key], f"{where} {text}: {key}")
    return settings


def _parts(text: str) -> list[str]:
    """The text between commas that stand outside of quotes and brackets. A quote or bracket that
    is never closed is a character like others.
    """
    parts = SETTING.findall(text)
    return parts if ",".join(parts) == text else text.split(",")


def _read(value: str, default: Any, where: str) -> Any:
    if isinstance(default, bool):
        if value.lower() not in (*TRUE, *FALSE):
            raise ValueError(
                f"{where} must be true or false, got {short_repr(value)}; write true, yes, on, 1, false, no, off, 0"
            )
        return value.lower() in TRUE
    if value.lower() == "none":
        return None
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return value
