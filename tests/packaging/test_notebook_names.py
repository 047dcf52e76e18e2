"""What a notebook uses of kvjax is public: it stands on a page of docs/api."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from docs import website

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def find(name: str) -> Any:
    """The object of a dotted name; None if there is none."""
    found: Any = importlib.import_module("kvjax")
    for part in name.split(".")[1:]:
        if not hasattr(found, part) and isinstance(found, ModuleType):
            try:
                importlib.import_module(f"{found.__name__}.{part}")
            except ImportError:
                return None
        found = getattr(found, part, None)
    return found


@functools.cache
def public() -> set[int]:
    """The objects on the pages, by identity."""
    return {id(thing) for thing in website.documented().values()}


def used(notebook: Path) -> Iterator[str]:
    """Dotted names of kvjax in the code of a notebook, also those of a module by the name under
    which it was imported.
    """
    modules: dict[str, str] = {}
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        for node in ast.walk(ast.parse("".join(cell["source"]))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvjax"):
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    yield name
                    if isinstance(find(name), ModuleType):
                        modules[alias.asname or alias.name] = name
            elif isinstance(node, ast.Attribute):
                first, _, rest = ast.unparse(node).partition(".")
                if first == "kvjax" or first in modules:
                    yield f"{modules.get(first, first)}.{rest}"


def is_public(name: str) -> bool:
    """True for a module, for what stands on a page, and for a verb of a class that does."""
    found = find(name)
    owner = find(name.rpartition(".")[0])
    return (
        isinstance(found, ModuleType)
        or id(found) in public()
        or (isinstance(owner, type) and id(owner) in public() and found is not None)
    )


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_names_of_kvjax_in_a_notebook_are_on_an_api_page(notebook: Path) -> None:
    names = {name for name in used(notebook) if re.fullmatch(r"[\w.]+", name)}
    assert names
    absent = {name for name in names if not is_public(name) and not name.endswith("__")}
    assert not absent, f"on no page of docs/api: {', '.join(sorted(absent))}"
