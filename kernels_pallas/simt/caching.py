"""Whether functions that were traced before are used again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_cache: ContextVar[bool] = ContextVar("_cache", default=True)


@contextmanager
def bypass_cache() -> Iterator[None]:
    """In the block, functions under `lowered_once` are traced again, for code that inspects or
    changes a kernel.
    """
    token = _cache.set(False)
    try:
        yield
    finally:
        _cache.reset(token)


def has_cache() -> bool:
    """Whether functions that were traced before may be used again here."""
    return _cache.get()
