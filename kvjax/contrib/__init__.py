"""Methods that kvjax compares with, one file each: the preset, the parts that it alone uses, its
source, and where it differs from it.

`kvjax.presets` finds them by name ("magicpig:budget=512", `kvjax.presets.magicpig`) and imports
a file when its method is first asked for. Only files of this folder import one another, so a
method can be read, copied or removed without the rest of the library.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

if not TYPE_CHECKING:  # to a type checker, every name would exist

    def __getattr__(name: str) -> ModuleType:
        """A file of this folder, so that `kvjax.contrib.magicpig` needs no import of its own."""
        if name.startswith("_") or find_spec(f"{__name__}.{name}") is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module(f"{__name__}.{name}")
