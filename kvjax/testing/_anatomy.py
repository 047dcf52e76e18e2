"""The parts of a policy and of its state, found by the names of their fields and never by their
class.

The laws also run on policies of other packages. A policy that holds another one in a field is
read through that field. In a state, a zone is anything with `count` and `slots`. A law that
needs a part which a policy does not have raises `DoesNotApply`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array

from kvjax.evictors import Evictor
from kvjax.policies import Policy
from kvjax.selectors import Selector
from kvjax.stores import Store


class DoesNotApply(Exception):
    """A law needs something that the policy does not have. The message says what."""


# ------------------------------------------------------------------------------------------------------------ policies


def _has(value: Any, *names: str) -> bool:
    return all(hasattr(value, name) for name in names)


def _inner_field(policy: Any) -> str | None:
    """The field that holds the policy which this one wraps; None if it wraps none."""
    if not dataclasses.is_dataclass(policy):
        return None
    found = [
        f.name
        for f in dataclasses.fields(policy)
        if _has(getattr(policy, f.name), "attend", "update", "prefill")
    ]
    return found[0] if len(found) == 1 else None


def core(policy: Any) -> Any:
    """The innermost policy: the one that stores and selects."""
    field = _inner_field(policy)
    return policy if field is None else core(getattr(policy, field))


def with_fields(policy: Any, **changes: Any) -> Any:
    """The policy with fields of its core replaced."""
    field = _inner_field(policy)
    if field is not None:
        return dataclasses.replace(
            policy, **{field: with_fields(getattr(policy, field), **changes)}
        )
    if not dataclasses.is_dataclass(policy) or isinstance(policy, type):
        raise DoesNotApply(
            f"{type(policy).__name__} is not a dataclass, so no copy with another {', '.join(changes)} can be made"
        )
    return dataclasses.replace(policy, **changes)


def twin(policy: Any) -> Any:
    """An equal policy that is another object, of parts that are other objects."""
    if not dataclasses.is_dataclass(policy) or isinstance(policy, type):
        return copy.deepcopy(policy)
    parts = {
        f.name: twin(part)
        for f in dataclasses.fields(policy)
        if f.init
        and isinstance(part := getattr(policy, f.name), Selector | Store | Evictor | Policy)
    }
    return dataclasses.replace(policy, **parts)


def has_budget(policy: Any) -> bool:
    return isinstance(getattr(core(policy), "budget", None), int)


def held_after(policy: Any, prompt: Any, received: Any) -> Any:
    """Tokens that a KV head holds, by its `budget`, after a prompt of `prompt` tokens and
    `received` in all.
    """
    inner = core(policy)
    return (
        inner.held_after(prompt, received)
        if hasattr(inner, "held_after")
        else np.minimum(received, inner.budget)
    )


def selects(policy: Any) -> bool:
    """True if a step reads at most `budget` of the stored tokens, which a selector selects."""
    return has_budget(policy) and hasattr(core(policy), "selector")


def samples(policy: Any) -> bool:
    """True if a step draws at most `budget` of the stored tokens at random, by their hashes."""
    return has_budget(policy) and hasattr(core(policy), "hashing")


def ranks(policy: Any) -> bool:
    """True if an evictor says which `budget` tokens are kept exact; others are gone, or in a
    store.
    """
    return has_budget(policy) and hasattr(core(policy), "evictor")


def evicts(policy: Any) -> bool:
    """True if at most `budget` tokens are held, and others are gone."""
    return ranks(policy) and not hasattr(core(policy), "store")


def has_history(policy: Any) -> bool:
    """True if tokens leave a recent block for a store, a chunk at a time."""
    return _has(core(policy), "store", "demote", "local")


def sink(policy: Any) -> int:
    return getattr(core(policy), "sink", 0)


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise DoesNotApply(reason)


# -------------------------------------------------------------------------------------------------------------- states


def is_zone(node: Any) -> bool:
    return dataclasses.is_dataclass(node) and _has(node, "count", "slots")


def parts(state: Any) -> dict[Any, Any]:
    """Fields of a state by name; of a tuple or a dictionary too."""
    if dataclasses.is_dataclass(state):
        return {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    if hasattr(state, "_fields"):
        return state._asdict()
    if isinstance(state, dict):
        return dict(state)
    return dict(enumerate(state)) if isinstance(state, list | tuple) else {}


def core_path(state: Any) -> tuple[Any, ...] | None:
    """The path in a state to the part that has zones; None if there is no zone."""
    fields = parts(state)
    if any(is_zone(part) for part in fields.values()):
        return ()
    for name, part in fields.items():
        path = core_path(part)
        if path is not None:
            return (name, *path)
    return None


def core_state(state: Any) -> Any:
    """The part of a state that has zones; the state itself if there is none."""
    for name in core_path(state) or ():
        state = parts(state)[name]
    return state


def replace_core(state: Any, new: Any) -> Any:
    """`state` with its core replaced by `new`."""

    def put(node: Any, path: tuple[Any, ...]) -> Any:
        return with_part(node, path[0], put(parts(node)[path[0]], path[1:])) if path else new

    return put(state, core_path(state) or ())


def has_zones(state: Any) -> bool:
    return core_path(state) is not None


def memory_of_steps(state: Any) -> Any:
    """The leaves of a state outside of its core: its memory between steps besides the tokens."""
    inner = core_state(state)
    outside = (
        {}
        if inner is state
        else {k: v for k, v in parts(state).items() if not _within(v, inner)}
    )
    return jax.tree.leaves(outside)


def _within(part: Any, inner: Any) -> bool:
    return part is inner or any(_within(p, inner) for p in parts(part).values())


def of_copies(path: Any) -> bool:
    """True if the path of a leaf leads through a field `hot`."""
    return any(getattr(key, "name", None) == "hot" for key in path)


def without_slots(path: Any) -> bool:
    """True for copies, and if the path leads through a field `offset`: a vector of each row and
    KV head.
    """
    return of_copies(path) or any(getattr(key, "name", None) == "offset" for key in path)


def map_slots(state: Any, change: Callable[[Any, np.ndarray, np.ndarray], np.ndarray]) -> Any:
    """The core of a state with each leaf that has slots on axis 2 replaced by change(path,
    leaf, used).

    Both are NumPy arrays; `used` is bool and broadcasts against the leaf. Arrays outside of
    zones belong to the zone `store`, or to the only zone, if they have as many slots. A leaf of
    a zone or of `index` with fewer slots has one for each unit of tokens. The fields of
    `without_slots` are not changed.
    """
    inner = core_state(state)
    fields = parts(inner)
    zones = {name: part for name, part in fields.items() if is_zone(part)}
    main = zones.get("store", next(iter(zones.values())) if len(zones) == 1 else None)

    def walk(tree: Any, zone: Any, units: bool) -> Any:
        def one(path: Any, leaf: Array) -> Array:
            if (
                leaf.ndim < 3
                or (leaf.shape[2] != zone.slots and not units)
                or without_slots(path)
            ):
                return leaf
            count = np.asarray(zone.count, np.int64) * leaf.shape[2] // zone.slots
            used = (np.arange(leaf.shape[2]) < count[:, None]).reshape(
                len(count), 1, -1, *(1,) * (leaf.ndim - 3)
            )
            return jax.device_put(change(path, np.asarray(leaf), used), leaf.sharding)

        return jax.tree_util.tree_map_with_path(one, tree)

    for name, part in fields.items():
        zone = part if is_zone(part) else main
        if zone is not None and part is not None:
            inner = with_part(inner, name, walk(part, zone, is_zone(part) or name == "index"))
    return inner


def with_part(node: Any, name: Any, part: Any) -> Any:
    """`node` with one of its `parts` replaced."""
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return dataclasses.replace(node, **{name: part})
    if hasattr(node, "_replace"):
        return node._replace(**{name: part})
    if isinstance(node, dict):
        return node | {name: part}
    return type(node)(part if i == name else old for i, old in enumerate(node))
