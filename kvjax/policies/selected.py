"""Decode steps over zones that attend to sink, local window and selected slots, whichever layer selected them.

`Retrieval` selects by its own index. `Follower` gets the selection of another layer. Both attend by
`SelectedZones.attend_selected`, so they read the same tokens in the same way.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax import Array, lax

from kvjax.numerics.partial import Span
from kvjax.numerics.selection import PackedSelection, Selection, unpack
from kvjax.policies.policy import Info, Step
from kvjax.policies.zones import Visible, Zoned, ZonedState


class SelectedZones(Zoned):
    """Zones in which a step attends to sink, local window and a selection."""

    def attend_selected(
        self, st: ZonedState, q: Array, selection: Selection | PackedSelection, step: Step
    ) -> tuple[Array, ZonedState, Info]:
        """Attention [B, K, G, D] of q [B, K, G, D] over sink, selection and local window; the state, and what was read.

        Selected slots below S, the slots of the store, are in the history; S + r is slot r of the recent block.
        """
        seen = self.visible(st, step.window)
        zones = seen.recent, seen.sink, self.local
        out, store = self.store.attend_zones(st.store, q, selection, *zones, scale=step.scale)
        st = replace(st, store=store)
        return out, st, self.info(st, seen, unpack(selection))

    def local_span(self, seen: Visible) -> Span:
        return seen.recent._replace(start=jnp.maximum(seen.recent.stop - self.local, seen.recent.start))

    def info(self, st: ZonedState, seen: Visible, selection: Selection, fresh: Array | None = None) -> Info:
        """The `Info` of a step that attends to sink, local window and `selection`."""
        positions = self.positions_read(st, seen, selection)
        attended = jnp.sum(positions >= 0, axis=(2, 3), dtype=jnp.float32) / positions.shape[2]
        return Info(attended, selection, fresh, positions)

    def positions_read(self, st: ZonedState, seen: Visible, selection: Selection) -> Array:
        """i32[B, K, H, M + sink + local]: positions of selection, sink and local window, -1 where there is none."""
        length, first = st.length[:, None], st.offset_recent[:, None]
        lead = selection.slots.shape[:3]
        sink = lax.broadcasted_iota(jnp.int32, (lead[0], self.sink), 1)
        local = length - self.local + jnp.arange(self.local, dtype=jnp.int32)[None]
        visible = jnp.concatenate([sink < length, local >= first], axis=1)
        beside = jnp.concatenate([sink, local], axis=1)
        if seen.first is not None:
            visible &= beside >= seen.first[:, None]
        beside, visible = (lax.broadcast_in_dim(a, (*lead, a.shape[1]), (0, 3)) for a in (beside, visible))
        positions = jnp.concatenate([self.positions(st, selection.slots), beside], axis=-1)
        return jnp.where(jnp.concatenate([selection.valid, visible], axis=-1), positions, -1)
