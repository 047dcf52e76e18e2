"""Settings that several presets take: dense first layers, shared selections, where the history is kept, pages, RoPE.

Each function takes the name of the preset for its error messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from kvjax.policies import Full, PerLayer, Policy, share_selections
from kvjax.spec import require_int
from kvjax.stores import Dense, HostFloat8, HostOffload, HostQuantized, HotSet, Store
from kvjax.validation import finite_number

Anchors = Sequence[int] | int | str | None
HOST_DTYPES: dict[str, Callable[..., Store]] = {
    "float8": HostFloat8,
    **{f"int{bits}": partial(HostQuantized, bits=bits) for bits in (8, 4, 2)},
}


def past_dense(name: str, dense_layers: int, policy: Policy, share: int = 1, anchors: Anchors = None) -> PerLayer:
    """`dense_layers` layers that attend to everything, then layers of `policy`, some of which may select for others."""
    dense_layers = require_int(f"{name}(dense_layers=...)", dense_layers, at_least=0)
    return share_selections(PerLayer((Full(),) * dense_layers, policy), share=share, anchors=anchors)


def history(name: str, host: bool, hot: int, page: int = 1, *, host_dtype: str | None = None) -> Store:
    """The store of a preset's history: on the device, in host memory, or in host memory with a hot set of tokens."""
    require_int(f"{name}(hot=...)", hot, at_least=0)
    if hot and not host:
        raise ValueError(f"{name}(hot={hot}) keeps tokens of a host store on the device; set host=True too")
    if host_dtype is not None and not host:
        raise ValueError(f"{name}(host_dtype={host_dtype!r}) applies to a history in host memory; set host=True too")
    if not host:
        return Dense()
    if host_dtype is not None and host_dtype not in HOST_DTYPES:
        raise ValueError(
            f"{name}(host_dtype={host_dtype!r}) must be one of {', '.join(HOST_DTYPES)}, or None for the dtype of the "
            "cache"
        )
    store = HostOffload(page=page) if host_dtype is None else HOST_DTYPES[host_dtype](page=page)
    return HotSet(tokens=hot, store=store) if hot else store


def require_page(name: str, budget: int, page: int, sink: int, local: int) -> None:
    """Raises ValueError if the budget leaves no room for a page besides sink and local window."""
    if sink + local <= budget < sink + local + page:
        raise ValueError(
            f"{name}(budget={budget}) leaves no room for a page of {page} tokens besides sink + local = {sink} + "
            f"{local}; use at least {sink + local + page}, or smaller pages"
        )


def plain_rope(name: str, theta: float | None) -> Any:
    """The plain RoPE of that theta; None without one."""
    if theta is None:
        return None
    return import_module("kvjax.models.rope").Default(theta=finite_number(f"{name}(rope_theta=...)", theta))
