"""Compiled programs on disk, for the commands.

Only a command sets options of its process: a library call does not. So this is where the folder
of programs is turned on, and where JAX's warnings about it become one line.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    from kvjax import Placement
    from kvjax.models import Checkpoint, Decoder

_UNREADABLE = "Error reading persistent compilation cache"
_UNWRITABLE = "Error writing persistent compilation cache"


def load_checkpoint(
    directory: Path,
    dtype: DTypeLike | None = None,
    *,
    placement: Placement | None = None,
    on_shapes: Callable[[Decoder], None] | None = None,
) -> Checkpoint:
    """`kvjax.models.load`, after the folder of compiled programs is turned on."""
    from kvjax import models

    keep_programs()
    return models.load(directory, dtype=dtype, placement=placement, on_shapes=on_shapes)


def keep_programs() -> Path | None:
    """Keeps compiled programs on disk for the next command; returns the folder, None if it is
    off.
    """
    from kvjax.compiling import use_compilation_cache

    folder = use_compilation_cache()
    if folder is not None and not isinstance(warnings.showwarning, _ShowWarning):
        warnings.showwarning = _ShowWarning(folder, warnings.showwarning)
    return folder


class _ShowWarning:
    """`warnings.showwarning` that writes one line for entries of the folder that failed.

    It removes a damaged entry, because JAX would never write over it.
    """

    def __init__(self, folder: Path, show: Any) -> None:
        self.folder = folder
        self.show = show

    def __call__(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        from kvjax.compiling import tell_once

        text = str(message)
        # JAX writes: Error reading persistent compilation cache entry for 'NAME': CAUSE
        cause = " ".join(text.partition(": ")[2].split())[:120]
        if text.startswith(_UNREADABLE):
            if text.count("'") >= 2:
                self._remove(text.split("'")[1])
            tell_once(
                "unreadable",
                f"a program could not be read in {self.folder} and was compiled ({cause})",
            )
        elif text.startswith(_UNWRITABLE):
            tell_once(
                "unwritable",
                f"a program could not be written in {self.folder} and was compiled ({cause})",
            )
        else:
            self.show(message, category, filename, lineno, file, line)

    def _remove(self, name: str) -> None:
        for entry in self.folder.glob(f"{name}-*"):
            entry.unlink(missing_ok=True)
