"""A history whose first tokens are stored once for all rows that share them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from kvjax.numerics.partial import Logits, PartialAttention, attend_part, merge
from kvjax.numerics.selection import Selection
from kvjax.numerics.sharing import Shared, Sharing
from kvjax.spec import CacheSpec
from kvjax.stores.dense import SPANS, Dense
from kvjax.stores.store import Store, Wrapper


@register_dataclass
@dataclass(frozen=True)
class PrefixedBlock:
    """A history in two parts: the row's prefix, then tokens of its own. Slots count through
    both.
    """

    prefix: Array  # i32[B] which prefix the row has; -1 for none
    base: Array  # i32[B] slots of the prefix: all that it holds, or 0
    own: Any  # the store's state of B rows
    shared: Shared  # the store's state of P prefixes instead of rows

    @property
    def count(self) -> Array:
        """i32[B] slots [0, count) are valid."""
        return self.base + self.own.count

    @property
    def slots(self) -> int:
        return self.shared.value.slots + self.own.slots


@dataclass(frozen=True, kw_only=True)
class Prefixed(Sharing, Wrapper):
    """Keeps the first tokens of the history once for all rows that share them, and the others
    in rows of their own.

    A row attends to both parts, merged by their log-sum-exp, which is exact; the queries of all
    rows of a prefix read it together. The capacity of a cache then counts the tokens of a row
    beyond its prefix. `kvjax.serve.prefixes` makes such caches, and says which rows have which
    prefix.

    Args:
      store: of both parts. Everything in its arrays must belong to a token.
      tokens, prefixes, sharers: as in `Sharing`.
    """

    store: Store = Dense()

    def check(self, spec: CacheSpec, chunk: int) -> None:
        super().check(spec, chunk)
        self.check_part(self.store, spec, chunk)

    def require_room(self, tokens: int) -> None:
        self.store.require_room(tokens)

    def init(self, spec: CacheSpec, slots: int) -> PrefixedBlock:
        none = jnp.zeros(spec.batch, jnp.int32)
        shared = self.store.init(dataclasses.replace(spec, batch=self.prefixes), self.tokens)
        return PrefixedBlock(none - 1, none, self.store.init(spec, slots), Shared(shared))

    def free(self, st: PrefixedBlock) -> Array:
        return self.store.free(st.own)

    def append(self, st: PrefixedBlock, k: Array, v: Array, count: Array) -> PrefixedBlock:
        return replace(st, own=self.store.append(st.own, k, v, count))

    def attend(
        self, st: PrefixedBlock, q: Array, start: Array, *, logits: Logits
    ) -> PartialAttention:
        own = self.store.attend(st.own, q, jnp.maximum(start - st.base, 0), logits=logits)
        return merge(self._attend_shared(st, q[:, :, :, None], start[:, None], logits), own)

    def attend_chunk(
        self, st: PrefixedBlock, q: Array, start: Array | None, *, logits: Logits
    ) -> PartialAttention:
        own_start = None if start is None else jnp.maximum(start - st.base[:, None], 0)
        own = self.store.attend_chunk(st.own, q, own_start, logits=logits)
        return merge(self._attend_shared(st, q, start, logits), own)

    def _attend_shared(
        self, st: PrefixedBlock, q: Array, start: Array | None, logits: Logits
    ) -> PartialAttention:
        """Returns the part of q [B, K, G, T, D] over the prefixes: the rows of a prefix are a
        chunk of n*T queries.
        """
        B, K, G, T, D = q.shape
        groups = self.groups(st.prefix)
        n = groups.row.shape[1]
        queries = jnp.moveaxis(groups.gather(q), 1, 3)  # [P, K, G, n, T, D]
        starts = None if start is None else groups.gather(start)  # [P, n, T]

        # The rows of a prefix read it together, up to as many as `Dense` has a kernel for.
        at_once = SPANS if T == 1 and isinstance(self.store, Dense) else n
        outs = []
        lses = []
        for first in range(0, n, at_once):
            rows = slice(first, first + at_once)
            of_rows = queries[:, :, :, rows]
            lead = of_rows.shape[:5]
            chunk = of_rows.reshape(*lead[:3], -1, D)
            since = None if starts is None else starts[:, rows].reshape(len(starts), -1)
            part = self.store.attend_chunk(st.shared.value, chunk, since, logits=logits)
            outs.append(part.out.reshape(*lead, part.out.shape[3]))
            lses.append(part.lse.reshape(lead))

        def by_row(parts: list[Array], fill: float) -> Array:
            """Parts [P, K, G, rows, T, ...] of all rows as [B, K, G*T, ...]."""
            x = jnp.moveaxis(jnp.concatenate(parts, axis=3), 3, 1)
            return groups.scatter(x, fill).reshape(B, K, G * T, *x.shape[5:])

        return PartialAttention(by_row(outs, 0), by_row(lses, -jnp.inf))

    def gather(self, st: PrefixedBlock, selection: Selection) -> tuple[Array, Array]:
        B, K, H, M = selection.slots.shape
        of_prefix, own = self._split(st, selection)
        groups = self.groups(st.prefix)
        # Each prefix is gathered from once, with the lists of its rows as lists of heads.
        by_prefix = Selection(
            self._as_heads(groups.gather(of_prefix.slots)),
            self._as_heads(groups.gather(of_prefix.valid)),
        )
        shared_k, shared_v = self.store.gather(st.shared.value, by_prefix)
        own_k, own_v = self.store.gather(st.own, own)
        is_shared = of_prefix.valid.reshape(B, K, H * M, 1)

        def joined(shared: Array, own: Array) -> Array:
            """`shared` [P, K, n*H*M, D] where a slot is of the prefix, else `own` [B, K, H*M, D]."""
            by_row = shared.reshape(shared.shape[0], K, -1, H * M, shared.shape[3])
            by_row = groups.scatter(jnp.moveaxis(by_row, 2, 1))
            return jnp.where(is_shared, by_row.astype(own.dtype), own)

        return joined(shared_k, own_k), joined(shared_v, own_v)

    def attend_slots(
        self, st: PrefixedBlock, q: Array, selection: Selection, *, logits: Logits
    ) -> PartialAttention:
        """Reads the selected slots; or each prefix once as a whole, if its rows select more
        than that of it.
        """
        B, K, H, M = selection.slots.shape
        groups = self.groups(st.prefix)
        if not isinstance(self.store, Dense) or groups.row.shape[1] * H * M <= self.tokens:
            return super().attend_slots(st, q, selection, logits=logits)
        of_prefix, own = self._split(st, selection)
        G = q.shape[2]
        shared = st.shared.value

        # The selected slots of the prefix as a mask over all of it, for each query head.
        slots = jnp.where(of_prefix.valid, of_prefix.slots, self.tokens)
        row, kv_head, head, _ = jnp.ix_(*map(jnp.arange, (B, K, H, M)))
        mask = jnp.zeros((B, K, H, self.tokens), bool)
        mask = mask.at[row, kv_head, head, slots].set(True, mode="drop")
        mask = jnp.repeat(mask, G // H, axis=2)

        # All rows of a prefix attend to it as if their heads were those of one row.
        queries = self._as_heads(groups.gather(q))
        masks = self._as_heads(groups.gather(mask))
        part = attend_part(queries, shared.k, shared.v, masks, logits=logits)

        def by_row(x: Array, fill: float) -> Array:
            """[P, K, n*G, ...] as [B, K, G, ...]."""
            split = x.reshape(x.shape[0], K, -1, G, *x.shape[3:])
            return groups.scatter(jnp.moveaxis(split, 2, 1), fill)

        whole = PartialAttention(by_row(part.out, 0), by_row(part.lse, -jnp.inf))
        return merge(whole, self.store.attend_slots(st.own, q, own, logits=logits))

    def _split(self, st: PrefixedBlock, selection: Selection) -> tuple[Selection, Selection]:
        """Returns the selected slots of the prefix, and of the row's own tokens."""
        base = st.base[:, None, None, None]
        early = selection.slots < base
        return (
            Selection(jnp.where(early, selection.slots, 0), selection.valid & early),
            Selection(
                jnp.clip(selection.slots - base, 0, st.own.slots - 1), selection.valid & ~early
            ),
        )

    def _as_heads(self, x: Array) -> Array:
        """[P, n, K, H, ...] as [P, K, n*H, ...]."""
        P, n, K, H, *rest = x.shape
        return jnp.moveaxis(x, 1, 2).reshape(P, K, n * H, *rest)

    def truncate(self, st: PrefixedBlock, count: Array) -> PrefixedBlock:
        raise ValueError(
            "truncate would cut a prefix that other rows share; kvjax.rollback takes back a row's newest tokens, and "
            "kvjax.serve.prefixes.without_prefix(cache, row) gives a row of its own, which truncate takes"
        )
