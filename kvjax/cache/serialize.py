"""Descriptions of policies and specs as JSON values, and in words where two of them differ."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """A frozen dataclass as a dict that begins with its name; other values as JSON values.

    A field whose metadata has saved=False is left out, as it changes nothing that is stored.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.metadata.get("saved", True)
        }
        return {"kind": type(value).__qualname__, **fields}
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    if isinstance(value, bool | np.bool_):
        return bool(value)
    # NumPy's too, so that equal policies have equal descriptions.
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    return value if isinstance(value, str | None) else str(value)


def differences(
    saved: Any,
    wanted: Any,
    where: str = "",
    *,
    names: tuple[str, str] = ("in the save", "wanted"),
) -> list[str]:
    """Every place at which two descriptions differ, as text; `names` says what they are of.

    >>> differences({"a": {"budget": 64}, "b": 1}, {"a": {"budget": 128}, "b": 1})
    ['a.budget is 64 in the save, 128 wanted']
    >>> differences({"policy": {"kind": "Full"}}, {"policy": {"kind": "Retrieval", "budget": 128}})
    ['policy.kind is Full in the save, Retrieval wanted']
    """
    one, other = names
    if isinstance(saved, dict) and isinstance(wanted, dict):
        if saved.get("kind") != wanted.get("kind"):  # their fields are not comparable
            return [
                f"{where}.kind is {_brief(saved.get('kind'))} {one}, {_brief(wanted.get('kind'))} {other}"
            ]
        pairs = [
            (saved.get(n, "absent"), wanted.get(n, "absent"), f"{where}.{n}" if where else n)
            for n in dict.fromkeys((*saved, *wanted))
        ]
    elif isinstance(saved, list) and isinstance(wanted, list):
        if len(saved) != len(wanted):
            return [f"{where} has {len(saved)} entries {one}, {len(wanted)} {other}"]
        pairs = [
            (a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(saved, wanted, strict=True))
        ]
    else:
        return (
            []
            if saved == wanted
            else [f"{where} is {_brief(saved)} {one}, {_brief(wanted)} {other}"]
        )
    return [line for pair in pairs for line in differences(*pair, names=names)]


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def summarize(different: list[str], most: int = 2) -> list[str]:
    """Differences, with equal ones of several layers merged, at most `most` of them, and how
    many more there are.

    Those of arrays are told only if there are no others, since most follow from those.

    >>> summarize([f"layers[{i}].policy.budget is 64 in the save, 128 wanted" for i in range(3)])
    ['policy.budget is 64 in the save, 128 wanted (layers 0 to 2)']
    >>> summarize([f"arrays.{name} is float32[4] in the save, float32[8] wanted" for name in "kvq"], most=1)
    ['arrays.k is float32[4] in the save, float32[8] wanted', 'and 2 more']
    """
    causes = [line for line in different if not line.startswith("arrays")] or different
    layers: dict[str, list[str]] = {}
    for line in causes:
        inside = line.startswith("layers[")
        number, _, what = (
            line.removeprefix("layers[").partition("].") if inside else ("", "", line)
        )
        layers.setdefault(what, []).append(number)
    told = [
        f"{what} (layers {n[0]} to {n[-1]})" if len(n) > 1 else what
        for what, n in layers.items()
    ]
    return told if len(told) <= most else [*told[:most], f"and {len(told) - most} more"]
