"""Reads data sets from the files in which they are published; an error names the file and the line.

Nothing is downloaded: the error for a missing file says what to download and where to put it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any

from kvjax.evaluate.provenance import digest

STRINGS = "a list of one or more strings"  # numbers become strings
Fields = Mapping[str, type | UnionType | str]  # the fields that a record must have, and what they hold


def read_jsonl(path: Path, fields: Fields, *, download: str) -> list[dict[str, Any]]:
    """The records of a file with one JSON object per line; empty lines are skipped.

    Raises:
      FileNotFoundError: there is no such file; `download` says what to fetch and what to do with it.
      ValueError: a line that is not a JSON object or lacks a field, or a file without a record.
    """
    records = []
    for number, line in enumerate(read_text(path, download=download).split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number},"
            records.append(_record(_parse(line, where, download), fields, where, download))
    if not records:
        raise ValueError(f"{path} has no records; {download}")
    return records


def read_json(path: Path, kind: type, *, download: str) -> Any:
    """The value of a JSON file, a `dict` or a `list`.

    Raises:
      FileNotFoundError, ValueError: as `read_jsonl`.
    """
    value = _parse(read_text(path, download=download), str(path), download)
    if not isinstance(value, kind):
        raise ValueError(f"{path} must hold JSON that is {_name(kind)}, not {_name(type(value))}; {download}")
    return value


def check_records(values: list[Any], fields: Fields, path: Path, *, download: str) -> list[dict[str, Any]]:
    """The values of a JSON list as records; an error names the place in the list, from 1."""
    return [_record(v, fields, f"{path}, record {number},", download) for number, v in enumerate(values, start=1)]


def digests(files: Mapping[Path, str]) -> dict[str, str]:
    """The digest of each file by its name; the values of `files` say how to get a missing one."""
    return {_present(path, download).name: digest(path) for path, download in files.items()}


def _present(path: Path, download: str) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; {download}")
    return path


def read_text(path: Path, *, download: str) -> str:
    """The text of a UTF-8 file; errors as `read_jsonl`."""
    _present(path, download)
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start}); {download}") from None


def _parse(text: str, where: str, download: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error}); {download}") from None


def _record(value: Any, fields: Fields, where: str, download: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a JSON object, not {_name(type(value))}; {download}")
    for name, kind in fields.items():
        if name not in value:
            raise ValueError(f"{where} lacks {name!r}; {download}")
        found = value[name]
        if kind == STRINGS and isinstance(found, list) and found and all(isinstance(x, str | int) for x in found):
            value[name] = tuple(map(str, found))
        elif isinstance(kind, str) or not isinstance(found, kind):
            raise ValueError(f"{where} has {name} = {found!r:.60}, which is not {_name(kind)}; {download}")
    return value


def _name(kind: Any) -> str:
    """The name of a Python type in JSON."""
    names = {dict: "an object", list: "an array", str: "a string", int: "a whole number", type(None): "null"}
    return names.get(kind, str(kind))
