"""ShadowKV: retrieval of pages by their landmarks, besides pages that the store keeps exact."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import Array

from kvjax import ops
from kvjax.numerics.blocks import whole_units
from kvjax.numerics.selection import Candidates, PackedSelection, Selection, by_row, unpack
from kvjax.policies.policy import Info, Step
from kvjax.policies.retrieval import Retrieval
from kvjax.policies.zones import Visible, ZonedState
from kvjax.selectors import MeanPages, Selector
from kvjax.sharding.context import Axis
from kvjax.stores import LowRank, Store
from kvjax.stores.demotion import Demotion, Fifo
from kvjax.validation import check_verbs


@dataclass(frozen=True, kw_only=True)
class OutlierRetrieval(Retrieval):
    """A `Retrieval` that also attends, in every step, to the pages that its store keeps exact.

    These pages are the outliers, which their landmarks describe worst; they are not selected a
    second time. The budget counts them: it covers sink, local window, outliers and what the
    selector finds.

    **Source:** ShadowKV (Sun et al. 2024, arXiv 2410.21465), Algorithm 2.

    >>> import kvjax
    >>> spec = kvjax.CacheSpec(batch=1, q_heads=4, kv_heads=2, head_dim=64, capacity=4096)
    >>> policy = kvjax.policies.OutlierRetrieval(store=kvjax.stores.LowRank(rank=64), budget=1024)
    >>> layer = kvjax.init_layer(policy, spec)
    """

    selector: Selector = MeanPages()
    store: Store = LowRank()
    demote: Demotion = Fifo(leave=1024)

    def __post_init__(self) -> None:
        verbs, example = ("init", "append", "kept", "kept_slots"), "kvjax.stores.LowRank()"
        check_verbs(
            "OutlierRetrieval(store=...)", self.store, "a store of exact pages", verbs, example
        )
        super().__post_init__()
        if self.exact_store.page != self.selector.unit:
            raise ValueError(
                f"OutlierRetrieval got {self.selector} with units of {self.selector.unit} and {self.store} with pages "
                f"of {self.exact_store.page}; use pages of one size"
            )
        least = self.sink + self.local + self.beside
        if self.budget < least:
            raise ValueError(
                f"budget={self.budget} is below sink + local + outliers = {self.sink} + {self.local} + {self.beside}, "
                f"which every step attends to; raise the budget to at least {least}, or use fewer outliers"
            )

    @property
    def exact_store(self) -> LowRank:
        """The store, which keeps some pages exact."""
        return self.store  # type: ignore[return-value]  # its verbs are checked above

    @property
    def beside(self) -> int:
        """Tokens of the budget that every step attends to besides sink and local window."""
        return self.exact_store.outliers * self.exact_store.page

    @property
    def selected(self) -> int:
        return whole_units(
            max(self.budget - self.sink - self.local - self.beside, 0), self.selector.unit
        )

    def over_context(self, axis: Axis, parts: int) -> Retrieval:
        raise ValueError(
            f"{type(self).__name__} has one basis for all tokens of a row, so they cannot be split over the {parts} "
            "devices of context; split only the batch"
        )

    def candidates(
        self, st: ZonedState, seen: Visible, *, steps: int = 1, in_order: int = 0
    ) -> Candidates:
        every = super().candidates(st, seen, steps=steps, in_order=in_order)
        return replace(every, last=self.exact_store.kept(st.store)) if self.beside else every

    def select(
        self, st: ZonedState, q: Array, step: Step, *, in_order: int = 0
    ) -> Selection | PackedSelection:
        every = super().select(st, q, step, in_order=in_order)
        if not self.beside:
            return every
        found = unpack(every)
        return found._replace(
            valid=found.valid & ~self._are_kept(st, self.exact_store.kept(st.store), found)
        )

    def _are_kept(self, st: ZonedState, kept: Array, selection: Selection) -> Array:
        """bool[B, K, H, M]: which slots belong to pages in `kept` bool[B, K, P]."""
        B, K, H, M = selection.slots.shape
        page = jnp.minimum(selection.slots // self.selector.unit, kept.shape[2] - 1).reshape(
            B, K, H * M
        )
        here = jnp.take_along_axis(kept, page, axis=2).reshape(B, K, H, M)
        return here & (selection.slots < st.store.slots)

    def attend_selected(
        self, st: ZonedState, q: Array, selection: Selection | PackedSelection, step: Step
    ) -> tuple[Array, ZonedState, Info]:
        if not self.beside:
            return super().attend_selected(st, q, selection, step)
        selection, seen = unpack(selection), self.visible(st, step.window)
        kept = self.exact_store.kept_slots(st.store)
        kept = kept._replace(valid=kept.valid & (kept.slots >= by_row(seen.store)))
        read, k, v = self._gathered(st, selection, kept.valid)
        out = ops.attend_zones(q, k, v, read, seen.recent, seen.sink, self.local, **step.logits)
        return out, st, self._with_outliers(st, kept, self.info(st, seen, selection))

    def _gathered(
        self, st: ZonedState, selection: Selection, kept: Array
    ) -> tuple[Selection, Array, Array]:
        """The slots that a step reads, in keys and values of the selected tokens and the exact
        pages, and after them in the recent block; and those keys and values. `kept` says which
        of the exact tokens it reads."""
        stored, (B, K, H, M) = selection.slots < st.store.slots, selection.slots.shape
        parts = self.store.gather(st.store, selection._replace(valid=selection.valid & stored))
        exact = (
            a.reshape(B, K, -1, parts[0].shape[3]) for a in (st.store.exact_k, st.store.exact_v)
        )
        k, v = (jnp.concatenate(pair, axis=2) for pair in zip(parts, exact, strict=True))
        at = jnp.arange(k.shape[2], dtype=jnp.int32)[None, None, None]
        selected = jnp.where(
            stored,
            at[..., : H * M].reshape(1, 1, H, M),
            k.shape[2] + selection.slots - st.store.slots,
        )
        pairs = (selected, at[..., H * M :]), (selection.valid, kept)
        both = (
            jnp.concatenate([a, jnp.broadcast_to(b, (B, K, H, self.beside))], axis=3)
            for a, b in pairs
        )
        return Selection(*both), k, v

    def _with_outliers(self, st: ZonedState, kept: Selection, info: Info) -> Info:
        slots, valid = kept
        assert info.positions is not None
        H = info.positions.shape[2]
        at = jnp.where(valid, self.positions(st, slots), -1)
        at = jnp.broadcast_to(at, (*at.shape[:2], H, at.shape[3]))
        return info._replace(
            attended=info.attended + jnp.sum(valid[:, :, 0], axis=-1).astype(jnp.float32),
            positions=jnp.concatenate([info.positions, at], axis=-1),
        )
