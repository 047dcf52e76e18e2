"""Memory that a device does not have."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest


def lack_memory(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, times: int = 1
) -> list[str]:
    """Lets the first `times` calls of a function of a module fail for want of memory; returns a
    list of those that have failed.
    """
    real = getattr(module, name)
    failed = list[str]()

    def call(*args: Any, **settings: Any) -> Any:
        if len(failed) < times:
            failed.append(name)
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return real(*args, **settings)

    monkeypatch.setattr(module, name, call)
    return failed
