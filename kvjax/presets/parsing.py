"""Settings written as text: "fier:budget=256,group=16" names a function and the arguments to call it with.

A value is read by the default of its parameter: if that is a bool, "no" and "0" mean False. All other values are read
as Python literals, and anything else is a string.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

from kvjax.validation import cut, shown

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def read_settings(text: str, make: Callable[..., Any], *, where: str = "setting") -> dict[str, Any]:
    """The settings of "NAME:SETTING=VALUE,...", as arguments that `make` takes. `where` begins an error message.

    >>> from kvjax import presets
    >>> read_settings("fier:budget=256,host=no,group_reduce=per_head", presets.fier)
    {'budget': 256, 'host': False, 'group_reduce': 'per_head'}

    Raises:
      ValueError: a part that is not SETTING=VALUE, a name that `make` does not take, a name given twice, a bool that is
        neither true nor false.
    """
    name, _, rest = text.partition(":")
    known = {p.name: p for p in inspect.signature(make).parameters.values() if p.kind is not p.VAR_KEYWORD}
    settings: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in known or not equals:
            cure = f"write NAME=VALUE, of {', '.join(known)}" if known else "it has no settings"
            raise ValueError(cut(f"{where} {text}: {shown(part)} is not a setting of {name}; {cure}"))
        if key in settings:
            raise ValueError(cut(f"{where} {text}: {key} is given twice; give it once"))
        settings[key] = _read(value, known[key].default, f"{where} {text}: {key}")
    return settings


def _read(value: str, default: Any, where: str) -> Any:
    if isinstance(default, bool):
        if value.lower() not in (*TRUE, *FALSE):
            raise ValueError(
                f"{where} must be true or false, got {shown(value)}; write true, yes, on, 1, false, no, off, 0"
            )
        return value.lower() in TRUE
    if value.lower() == "none":
        return None
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return value
