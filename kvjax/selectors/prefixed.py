"""An index whose first tokens are stored once for all rows that share them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from kvjax.numerics.partial import Logits
from kvjax.numerics.sharing import Shared, Sharing
from kvjax.selectors.selector import Selector, Wrapper
from kvjax.spec import CacheSpec


@register_dataclass
@dataclass(frozen=True)
class PrefixedIndex:
    """An index in two parts, as `kvjax.stores.prefixed.PrefixedBlock` has the tokens."""

    prefix: Array  # i32[B] which prefix the row has; -1 for none
    base: Array  # i32[B] slots of the prefix
    own: Any  # the selector's index of B rows
    shared: Shared  # the selector's index of P prefixes instead of rows


@dataclass(frozen=True, kw_only=True)
class PrefixedSelector(Sharing, Wrapper):
    """Selects by another selector among a prefix and a row's own tokens, as if they were one
    history.

    The scores of both parts are put into the order of slots, and compete in one sort.
    """

    selector: Selector

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.selector).score_visible not in (
            Selector.score_visible,
            Wrapper.score_visible,
        ):
            raise ValueError(
                f"{self.selector} scores tokens by each other, over prefix and own tokens together, so rows cannot "
                "share prefixes; use a selector whose scores stand alone, such as kvjax.Fier"
            )

    def check(self, spec: CacheSpec, chunk: int) -> None:
        self.selector.check(spec, chunk)
        self.check_part(self.selector, spec, chunk)

    def init(self, spec: CacheSpec, slots: int) -> PrefixedIndex:
        none = jnp.zeros(spec.batch, jnp.int32)
        shared = self.selector.init(dataclasses.replace(spec, batch=self.prefixes), self.tokens)
        return PrefixedIndex(
            none - 1, none, self.selector.init(spec, slots - self.tokens), Shared(shared)
        )

    def append(self, ix: PrefixedIndex, k: Array, at: Array, count: Array) -> PrefixedIndex:
        return replace(ix, own=self.selector.append(ix.own, k, at - ix.base, count))

    def score(self, ix: PrefixedIndex, q: Array, *, logits: Logits) -> Array:
        _, K, G, D = q.shape
        groups = self.groups(ix.prefix)
        queries = jnp.moveaxis(groups.gather(q), 1, 2).reshape(self.prefixes, K, -1, D)
        shared = self.selector.score(ix.shared.value, queries, logits=logits)
        shared = jnp.moveaxis(shared.reshape(self.prefixes, K, -1, G, shared.shape[3]), 2, 1)
        scores = jnp.concatenate(
            [groups.scatter(shared), self.selector.score(ix.own, q, logits=logits)], axis=3
        )
        units = scores.shape[3]
        of_prefix = self.tokens // self.unit
        unit = jnp.arange(units, dtype=jnp.int32)[None]
        base = ix.base[:, None] // self.unit
        source = jnp.where(unit < base, unit, jnp.minimum(unit - base + of_prefix, units - 1))
        return jax.vmap(lambda one, order: jnp.take(one, order, axis=2))(scores, source)

    score_visible = Selector.score_visible

    def truncate(self, ix: PrefixedIndex, count: Array) -> PrefixedIndex:
        return ix
