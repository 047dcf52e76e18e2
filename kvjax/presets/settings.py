"""Settings that several presets take: the layers of a model, where the history is kept, pages,
RoPE.

Each function takes the name of the preset for its error messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvjax.evictors import Sliding
from kvjax.numerics.rope import Default
from kvjax.policies import Evicting, Full, PerLayer, Policy, share_selections
from kvjax.policies.short import DenseCapacity
from kvjax.presets.parsing import TEXT_NAME
from kvjax.spec import keep_ints, require_int, require_ints
from kvjax.stores import (
    Dense,
    HostFloat8,
    HostOffload,
    HostTurboQuant,
    HotSet,
    Store,
    TurboQuant,
)
from kvjax.validation import finite_number, short_repr

Anchors = Sequence[int] | int | str | None
HOSTS: dict[str, Callable[..., Store]] = {"host": HostOffload, "float8": HostFloat8}
TURBO = re.compile(r"(?P<host>host-)?turbo(?P<keys>[2348])(v(?P<values>[2348]))?")


@dataclass(frozen=True)
class Layers:
    """How the layers of a model share work: the first `dense` attend to everything, and others
    may select for several.

    Attributes:
      dense: first layers of the model that attend to everything (`dense_layers` in text).
      share: after the dense layers, every `share`-th layer selects, and the layers after it
        attend to the same slots.
      anchors: numbers of the layers that select, in place of `share`; or a file written by
        `benchmarks/calibrate.py`.

    >>> from kvjax import presets
    >>> presets.fier(256, layers=Layers(dense=2, share=4)) == presets.parse("fier:budget=256,share=4")
    True
    """

    dense: int = field(metadata={TEXT_NAME: "dense_layers"})
    share: int = 1
    anchors: Anchors = None

    def __post_init__(self) -> None:
        keep_ints(self, dense=0, share=1)
        if self.anchors is not None and not isinstance(self.anchors, str):
            several: Any = [self.anchors] if isinstance(self.anchors, int) else self.anchors
            if not hasattr(several, "__iter__"):
                raise ValueError(
                    f"Layers(anchors=...) must be numbers of layers, such as [2, 5, 9] or '2+5+9', got "
                    f"{short_repr(several)}"
                )
            found = require_ints("Layers(anchors=...)", several, at_least=0)
            object.__setattr__(
                self, "anchors", self.anchors if isinstance(self.anchors, int) else found
            )

    @property
    def shares(self) -> bool:
        """True if layers attend to what another layer selected."""
        return self.share != 1 or self.anchors is not None


def over_layers(name: str, layers: Layers, policy: Policy) -> PerLayer:
    """The dense layers, then layers of `policy`, some of which may select for others."""
    if not isinstance(layers, Layers):
        raise ValueError(
            f"{name}(layers=...) must be a Layers, such as kvjax.presets.Layers(dense=2), got {short_repr(layers)}"
        )
    return share_selections(
        PerLayer((Full(),) * layers.dense, policy), share=layers.share, anchors=layers.anchors
    )


def windowed(policies: Policy | PerLayer, windows: Sequence[int | None]) -> PerLayer:
    """`policies`, one for all layers or those of a preset, but a layer with a sliding window
    keeps only its window; `windows` are those of a model's layers, None for a layer without.

    Such a layer needs no retrieval, and its memory does not grow with the text. Its tokens
    cannot be taken back, so `rollback` and `truncate` refuse such a cache.

    >>> from kvjax import presets
    >>> presets.windowed(presets.full(), (128, None)).policy(0)
    Evicting(evictor=Sliding(sink=0, rope=None), budget=128, every=1, rope=None)

    Raises:
      ValueError: layers that follow the selection of others, or no windows.
    """
    of_layers = policies if isinstance(policies, Sequence) else PerLayer.of(policies)
    if type(of_layers) is not PerLayer:
        raise ValueError(
            "windowed(policies=...) takes a policy, or those of a preset whose layers select for themselves, got "
            f"{short_repr(policies)}"
        )
    if len(windows) == 0:
        raise ValueError(
            "windowed(windows=...) needs one for each layer of the model, such as (128, None), got none"
        )
    own = tuple(
        of_layers.policy(i)
        if window is None
        else Evicting(evictor=Sliding(sink=0), budget=window)
        for i, window in enumerate(windows)
    )
    return PerLayer(own[:-1], own[-1])


def history(name: str, store: Store | str, page: int = 1) -> Store:
    """The store of a preset's history, made of its text: "device", "turbo4", "host", "float8",
    "host+1024", ...

    Raises:
      ValueError: text that names no store.
    """
    if not isinstance(store, str):
        return store
    where, plus, hot = store.partition("+")
    if where == "device" and not plus:
        return Dense(together=page)
    turbo = TURBO.fullmatch(where)
    on_host = where in HOSTS or (turbo and turbo["host"])
    if not (on_host or (turbo and not plus)) or (plus and not hot.isdecimal()):
        raise ValueError(
            f"{name}(store={store!r}) must be 'device', 'host', or 'float8' for host memory in that dtype; or "
            "TurboQuant's codes of 2, 3, 4 or 8 bits: 'turbo4', with other values 'turbo8v4', in host memory "
            "'host-turbo4'. In the form 'host+1024' the device keeps the last 1024 selected tokens too"
        )
    if turbo:
        bits: Any = {
            "bits": int(turbo["keys"]),
            "value_bits": int(turbo["values"]) if turbo["values"] else None,
        }
        made: Store = HostTurboQuant(page=page, **bits) if on_host else TurboQuant(**bits)
    else:
        made = HOSTS[where](page=page)
    if not plus:
        return made
    return HotSet(
        tokens=require_int(f"{name}(store='{where}+...')", int(hot), at_least=1), store=made
    )


def capacity_of(
    dense_capacity: DenseCapacity, store: Store | str, layers: Layers
) -> DenseCapacity:
    """The setting; "auto" becomes 0 where nothing was measured: for a history that is not in
    plain form on the device, and for selections that layers share.
    """
    if not isinstance(dense_capacity, str) or dense_capacity != "auto":
        return dense_capacity
    shares = isinstance(layers, Layers) and layers.shares
    plain = store == "device" or isinstance(store, Dense)
    return 0 if shares or not plain else "auto"


def require_page(name: str, budget: int, page: int, sink: int, local: int) -> None:
    """Raises ValueError if the budget leaves no room for a page besides sink and local window."""
    if sink + local <= budget < sink + local + page:
        raise ValueError(
            f"{name}(budget={budget}) leaves no room for a page of {page} tokens besides sink + local = {sink} + "
            f"{local}; use at least {sink + local + page}, or smaller pages"
        )


def plain_rope(name: str, theta: float | None) -> Default | None:
    """The plain RoPE of that theta; None without one."""
    if theta is None:
        return None
    return Default(theta=finite_number(f"{name}(rope_theta=...)", theta))
