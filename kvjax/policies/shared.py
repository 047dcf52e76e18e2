"""One selection for several layers.

Adjacent layers of a model select many of the same tokens. So one layer, the anchor, selects,
and the layers after it attend to the same slots of their own keys and values, without an index.
A slot number means the same token in all layers, since all store the same tokens in zones of
the same sizes:

    out, anchor, info = kvjax.attention_info(anchor, q, k, v)
    out, follower = kvjax.attention(follower, q, k, v, selection=info.selection)

**Source:** Kascade (Deshmukh et al. 2025): anchor layers, layers that reuse their top tokens,
and a map of KV heads. **Differs:** Kascade's anchors score exactly; here any selector and any
store may be used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import jax.numpy as jnp
from jax import Array

from kvjax.numerics.selection import Selection
from kvjax.policies.per_layer import PerLayer
from kvjax.policies.policy import Info, Policy, Step
from kvjax.policies.zones import SelectedZones, ZonedState
from kvjax.received import read_object
from kvjax.spec import CacheSpec, keep_ints, require_int, require_ints
from kvjax.stores import Dense, Store
from kvjax.stores.demotion import Demotion, Fifo
from kvjax.validation import short_repr


@dataclass(frozen=True, kw_only=True)
class Follower(SelectedZones):
    """Keeps every token and attends to sink, local window and the slots that another layer
    selected.

    Store, sink, local window and demotion are those of the layer that it follows, so that slots
    mean the same tokens; `Retrieval.follower()` makes one that matches. `unit` tokens are
    selected together. `heads` says for each KV head which KV head of the other layer selects
    for it; None: the head of the same number.

    >>> import kvjax
    >>> kvjax.presets.fier(256, layers=kvjax.presets.Layers(dense=2, share=4)).policy(3).local
    1
    """

    store: Store = Dense()
    sink: int = 4
    local: int = 64
    demote: Demotion = Fifo(leave=256)
    unit: int = 1
    heads: tuple[int, ...] | None = None

    shares_prefixes = True
    follows = True
    takes_steps = False

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_ints(self, unit=1)
        require_whole_pages(
            self.store, self.unit, f"the selection has {self.unit} tokens at a time"
        )
        if self.heads is not None:
            heads = require_ints("Follower(heads=...)", self.heads, at_least=0)
            if max(heads, default=0) >= len(heads):
                raise ValueError(
                    f"Follower(heads=...) must be at most {len(heads) - 1}, got {max(heads, default=0)}"
                )
            object.__setattr__(self, "heads", heads)

    def init(self, spec: CacheSpec) -> ZonedState:
        if self.heads is not None and len(self.heads) != spec.kv_heads:
            raise ValueError(
                f"Follower(heads={self.heads}) names {len(self.heads)} heads, and the cache has {spec.kv_heads} KV "
                "heads; name one for each"
            )
        return super().init(spec)

    def select(self, st: ZonedState, q: Array, step: Step) -> NoReturn:
        raise ValueError(
            "Follower attends to what another layer selected and got no selection; pass selection=info.selection to "
            "kvjax.attention, with the info that kvjax.attention_info gave for the layer that it follows"
        )

    def attend(self, st: ZonedState, q: Array, step: Step) -> tuple[Array, ZonedState, Info]:
        if step.exact:
            return self.attend_all(st, q, step)
        if step.selection is None:
            self.select(st, q, step)
        selection = self._of_heads(step.selection, q.shape)
        seen = self.visible(st, step.window)
        if seen.first is not None:
            slots = st.store.slots
            start = jnp.where(
                selection.slots < slots,
                seen.store[:, None, None, None],
                slots + seen.recent.start[:, None, None, None],
            )
            selection = selection._replace(valid=selection.valid & (selection.slots >= start))
        return self.attend_selected(st, q, selection, step)

    def _of_heads(self, selection: Any, shape: tuple[int, ...]) -> Selection:
        B, K, G, _ = shape
        if not isinstance(selection, Selection):
            raise ValueError(
                f"attention(selection=...) takes the `selection` of an Info, got {type(selection).__name__}; pass "
                "info.selection, from kvjax.attention_info of the layer that it follows"
            )
        if selection.slots.shape[:2] != (B, K) or selection.slots.shape[2] not in (1, G):
            raise ValueError(
                f"the selection has slots{list(selection.slots.shape)}, but this layer has B={B}, K={K}, G={G}; pass "
                "the info.selection of a layer of the same model and step"
            )
        if self.heads is None or self.heads == tuple(range(K)):
            return selection
        return Selection(*(a[:, self.heads] for a in selection))


def require_whole_pages(store: Store, unit: int, who: str) -> None:
    """Raises ValueError if a store moves whole pages, which units of `unit` tokens would cut."""
    page = require_int(f"{type(store).__name__}.page", store.page, at_least=1)
    if unit % page:
        raise ValueError(
            f"{store} moves whole pages, but {who}; use {type(store).__name__}(page={unit})"
        )


@dataclass(frozen=True)
class Shared(PerLayer):
    """Policies of a model in which some layers, the anchors, select, and others attend to the
    last anchor's selection.

    The layers of `first` are as in `PerLayer`. After them every `share`-th layer, or each layer
    whose number is in `anchors`, is an anchor with the policy `rest`. `heads` maps KV heads of
    followers by layer, as in `Follower.heads`.

    >>> import kvjax
    >>> policies = kvjax.presets.fier(256, layers=kvjax.presets.Layers(dense=2, share=4))
    >>> [policies.selects(layer) for layer in range(2, 8)]
    [True, False, False, False, True, False]
    """

    share: int = field(default=1, kw_only=True)
    anchors: tuple[int, ...] | None = field(default=None, kw_only=True)
    # (layer, heads) pairs.
    heads: tuple[tuple[int, tuple[int, ...]], ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_ints(self, share=1)
        self.rest.follower()  # raises here if the policy cannot have followers
        if dense := getattr(self.rest, "dense_capacity", 0):
            raise ValueError(
                f"dense_capacity={dense!r} makes short caches select nothing, but layers that share a selection need "
                "one; use dense_capacity=0"
            )
        if self.anchors is None:
            return
        first = len(self.first)
        found = require_ints("anchors", self.anchors, at_least=0)
        object.__setattr__(self, "anchors", found)
        if self.share != 1:
            raise ValueError(
                f"share={self.share} and anchors={found} both say which layers select; give one"
            )
        if not found or found[0] != first or any(a >= b for a, b in pairwise(found)):
            raise ValueError(
                f"anchors={found} must increase and begin with layer {first}, the first that is not dense, because a "
                "layer follows the last anchor before it"
            )

    def check(self, layers: int, kv_heads: int | None = None) -> None:
        named = {
            "anchors": self.anchors or (),
            "heads": tuple(layer for layer, _ in self.heads),
        }
        for what, numbers in named.items():
            if numbers and max(numbers) >= layers:
                raise ValueError(
                    f"{what} name layer {max(numbers)}, and the model has layers 0 to {layers - 1}; leave it out"
                )
        if selecting := [
            layer for layer, _ in self.heads if layer < len(self.first) or self.selects(layer)
        ]:
            raise ValueError(
                f"heads name layer {selecting[0]}, which follows no other layer: it is dense or selects by itself; "
                "leave it out"
            )

    def selects(self, layer: int) -> bool:
        """Whether this layer selects by itself; False also for the first, dense layers."""
        past = layer - len(self.first)
        return past >= 0 and (
            past % self.share == 0 if self.anchors is None else layer in self.anchors
        )

    def policy(self, layer: int) -> Policy:
        if layer < len(self.first) or self.selects(layer):
            return super().policy(layer)
        return self.rest.follower(dict(self.heads).get(layer))


def share_selections(
    policies: PerLayer,
    *,
    share: int = 1,
    anchors: Sequence[int] | int | str | None = None,
    heads: Mapping[int, Sequence[int]] | None = None,
) -> PerLayer:
    """`policies`, changed so that every `share`-th layer selects, or those in `anchors`; see
    `Shared`.

    `anchors` are numbers of layers, text such as "2+5+9", or the name of a JSON file that
    `benchmarks/calibrate.py` wrote, which has `heads` too. With share=1 and no anchors every
    layer selects, and the policies are returned as they are.

    Raises:
      FileNotFoundError: no such file.
      ValueError: policies that select nothing, anchors that do not increase from the first
        layer past the dense ones, a file that `benchmarks/calibrate.py` did not write.
    """
    require_int("share", share, at_least=1)
    if not isinstance(policies, PerLayer):
        raise ValueError(
            f"share_selections takes the policies of a model's layers, got {short_repr(policies)}; a preset returns "
            "them, such as kvjax.presets.fier(256), and kvjax.PerLayer((), policy) makes them of one policy"
        )
    if share == 1 and anchors is None and not heads:
        return policies
    if isinstance(anchors, str) and anchors.endswith(".json"):
        anchors, in_file = _in_file(anchors)
        heads = in_file if heads is None else heads
    elif isinstance(anchors, str):
        anchors = _numbers(anchors)
    numbers = (anchors,) if isinstance(anchors, int) else anchors
    if not isinstance(numbers, Sequence | None):
        raise ValueError(
            f"anchors must be numbers of layers, such as [2, 5, 9] or '2+5+9', got {short_repr(anchors)}"
        )
    if not isinstance(heads, Mapping | None) or not all(
        isinstance(own, Sequence) for own in (heads or {}).values()
    ):
        raise ValueError(
            f"heads must be the KV heads of layers, such as {{3: (1, 0)}}, got {short_repr(heads)}"
        )
    return Shared(
        policies.first,
        policies.rest,
        share=share,
        anchors=None if numbers is None else tuple(numbers),
        heads=tuple((layer, tuple(own)) for layer, own in sorted((heads or {}).items())),
    )


def _in_file(name: str) -> tuple[tuple[int, ...], dict[int, tuple[int, ...]]]:
    """The anchors, and the KV heads by layer, in a file of `benchmarks/calibrate.py`."""
    cure = "python -m benchmarks.calibrate --out writes one"
    if not Path(name).is_file():
        raise FileNotFoundError(f"anchors={short_repr(name)} is not a file; {cure}")
    found = read_object(name, cure=cure)
    try:
        heads = {int(layer): tuple(own) for layer, own in found["heads"].items()}
        return tuple(found["anchors"]), heads
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name} holds no anchors ({type(error).__name__}: {error}); {cure}"
        ) from error


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split("+"))
    except ValueError:
        raise ValueError(
            f"anchors={short_repr(text)} must be numbers of layers with + between them, such as 2+5+9, or the name of "
            "a .json file of benchmarks.calibrate"
        ) from None
