"""Bytes that a step of a cache reads, and bytes that the cache holds, counted without running
it.

Methods of one budget in tokens read different bytes: codes instead of values, an index of every
token, a selection for each query head. So a fair comparison holds bytes equal, or memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache as cached
from functools import partial
from typing import Any, NamedTuple

from kvjax.cache.cache import init_layer
from kvjax.memory import Bytes, growth, nbytes, shapes
from kvjax.policies import Evicting, PerLayer, Policy
from kvjax.policies.zones import Zoned
from kvjax.spec import CacheSpec
from kvjax.stores import Store


class Costs(NamedTuple):
    """Bytes of one row, over all layers."""

    read: float  # that a decode step reads: keys, values and index
    held: int  # of the cache in device memory
    on_host: int  # of the cache in host memory

    @property
    def total(self) -> int:
        """Bytes of the cache, wherever they lie."""
        return self.held + self.on_host


def costs(
    policies: PerLayer, spec: CacheSpec, attended: Sequence[float], *, layers: int, length: int
) -> Costs:
    """The costs of a cache after `length` tokens.

    Args:
      policies: of the model's layers.
      spec: for one row.
      attended: tokens whose keys and values a step read, by layer with attention, mean over KV
        heads, as a measurement returns them.
      layers: layers of the model.
      length: tokens of the row.
    """
    recurrent = spec.recurrent
    states = () if recurrent is None else (recurrent.policy,) * len(recurrent.layers)
    attends = [policies.policy(layer) for layer in range(layers - len(states))]
    held = [bytes_held(policy, spec) for policy in (*states, *attends)]
    # A layer that keeps a state of fixed size reads all of it.
    read_whole = sum(one.total for one in held[: len(states)])
    read_in_part = sum(
        bytes_read(policy, spec, tokens, length)
        for policy, tokens in zip(attends, attended, strict=True)
    )
    return Costs(
        read=read_whole + read_in_part,
        held=sum(one.device for one in held),
        on_host=sum(one.host for one in held),
    )


@cached
def bytes_held(policy: Policy, spec: CacheSpec) -> Bytes:
    """Bytes of a layer's cache in device and host memory."""
    return nbytes(shapes(partial(init_layer, policy.of_size(spec), spec)))


def bytes_read(policy: Policy, spec: CacheSpec, attended: float, length: int) -> float:
    """Bytes that a step of a layer reads for a row of `length` tokens, of which it attends to
    `attended`, mean over KV heads.

    Tokens in full precision count with the cache's dtype, all others as their store keeps them;
    those that wait to be stored count as stored. Where each query head has a selection of its
    own, a KV head reads all of them. The index is counted as the selector tells it
    (`Selector.bytes_read`).
    """
    inner: Any = getattr(policy, "retrieval", policy)  # of a policy around a Retrieval
    pair = spec.key_value_bytes
    store = getattr(inner, "store", None)
    if store is None:
        return attended * pair
    exact = min(attended, _exact_tokens(inner))
    others = (attended - exact) * _selections(inner, spec)
    return (
        exact * pair + others * _stored_bytes(store, spec) + _index_bytes(inner, spec, length)
    )


@cached
def _stored_bytes(store: Store, spec: CacheSpec) -> float:
    """Bytes of a token as a store keeps it."""
    return store.bytes_per_token(spec)


def _exact_tokens(policy: Any) -> int:
    """Tokens that a step always reads in full precision."""
    if isinstance(policy, Evicting):  # keeps its budget exactly, and codes of all others
        return policy.budget
    return policy.sink + policy.local if isinstance(policy, Zoned) else 0


def _selections(policy: Any, spec: CacheSpec) -> int:
    """Selections of a KV head in a step."""
    own = getattr(getattr(policy, "selector", None), "group_reduce", "") == "per_head"
    return spec.group if own or hasattr(policy, "hashing") else 1


@cached
def _index_bytes(policy: Any, spec: CacheSpec, length: int) -> float:
    """Bytes of the index that a step reads."""
    if (selector := getattr(policy, "selector", None)) is not None:
        return float(selector.bytes_read(spec, length))
    if (hashing := getattr(policy, "hashing", None)) is not None:
        return length * growth(lambda slots: hashing.init(spec, slots)) / spec.batch
    return 0.0
