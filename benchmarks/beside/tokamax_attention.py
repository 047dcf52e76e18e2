"""tokamax: causal attention of a prompt, by each of its implementations for this device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from jax import Array

from .cases import Case
from .jax_attention import prompt

LIBRARY = "tokamax"


def rows(case: Case) -> Iterator[dict[str, Any]]:
    """The fastest implementation; those that do not take the call are passed over."""
    if case.batch > 1:
        return
    import tokamax

    def by(implementation: Any) -> dict[str, Any]:
        def attend(q: Array, k: Array, v: Array) -> Array:
            out: Array = tokamax.dot_product_attention(
                q, k, v, is_causal=True, implementation=implementation
            )
            return out

        call = "tokamax.dot_product_attention(is_causal=True)"
        setting = f"the fastest implementation, {implementation}"
        return prompt(case, LIBRARY, "tokamax", attend, call, setting)

    tried, refused = [], []
    known = ("mosaic", "triton") if jax.default_backend() == "gpu" else ("xla",)
    for implementation in known:
        try:
            tried.append(by(implementation))
        except Exception as error:  # a library may refuse a call in any way
            refused.append(f"{implementation}: {str(error).splitlines()[0]}")
    if not tried:
        raise SystemExit(f"tokamax refused the call; {'; '.join(refused)}")
    yield min(tried, key=lambda one: float(one["us"]))
