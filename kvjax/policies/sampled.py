"""MagicPIG: every token is kept and a random sample is attended, each token weighted by its
inverse probability.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import jax.numpy as jnp
from jax import Array, lax

from kvjax import ops
from kvjax.numerics.partial import PartialAttention, attend_part, keep_valid, merge, merge_sinks
from kvjax.numerics.selection import Selection, by_row, in_order, unpack
from kvjax.ops.op import reaches_gpus
from kvjax.policies.policy import Info, Policy, Step
from kvjax.policies.short import DenseCapacity, Short, is_short
from kvjax.policies.zones import Visible, Zoned, ZonedState
from kvjax.selectors.simhash import SimHash
from kvjax.selectors.striped import NOWHERE, first_places
from kvjax.sharding.context import Axis, merge_parts
from kvjax.spec import CacheSpec, keep_ints
from kvjax.stores import Dense, Store
from kvjax.stores.demotion import Demotion, Fifo
from kvjax.stores.striped import StripedStore
from kvjax.validation import check_verbs


@dataclass(frozen=True, kw_only=True)
class Sampled(Zoned):
    """Keeps every token; a step attends to sink and recent block, and estimates the rest of
    attention from a sample.

    Each query head samples the tokens of the history whose hashes collide with its own
    (`SimHash`), and divides the exponential of each by its sampling probability. So the sum
    over the sample equals, on average over the random directions, the sum over the history.
    `budget` bounds the tokens that a query head reads; the sink and a full recent block of
    `demote.slots(local)` tokens are part of it. If more tokens collide than there is room for,
    a subset spread evenly over the slots is read, with larger weights. A history that fits into
    the room is read in full, and attention is then exact. `dense_capacity` is that of
    `Retrieval`.

    **Source:** MagicPIG (Chen et al. 2024, arXiv 2410.16179), sections 4 and 5. **Differs:**
    the sample has a bound; the paper's has none. Recent tokens are hashed a chunk at a time,
    and are attended exactly until then. A sample is drawn for each query head, as in the paper,
    so a group reads up to G budgets.

    >>> import kvjax
    >>> spec = kvjax.CacheSpec(batch=1, q_heads=4, kv_heads=2, head_dim=64, capacity=2048)
    >>> layer = kvjax.init_layer(kvjax.policies.Sampled(budget=512), spec)
    """

    hashing: SimHash = SimHash()
    store: Store = Dense()
    budget: int = 2048
    sink: int = 4
    local: int = 64
    demote: Demotion = Fifo(leave=256)
    dense_capacity: DenseCapacity = 0

    def __post_init__(self) -> None:
        keep_ints(self, budget=1)
        if not isinstance(self.dense_capacity, str) or self.dense_capacity != "auto":
            keep_ints(self, dense_capacity=0)
        super().__post_init__()
        verbs = ("check", "init", "append")
        check_verbs("Sampled(hashing=...)", self.hashing, "a hashing", verbs, "kvjax.SimHash()")
        if self.room < 1:
            least = self.budget - self.room + 1
            raise ValueError(
                f"Sampled(budget={self.budget}) leaves nothing to sample besides sink={self.sink} and a recent block "
                f"of up to {self.demote.slots(self.local)} tokens; use at least {least}, or smaller chunks"
            )
        if self.store.page != 1:
            raise ValueError(
                f"{self.store} moves whole pages, but Sampled reads single tokens; use {type(self.store).__name__}()"
            )

    @property
    def room(self) -> int:
        """The most tokens of the history that a query head reads."""
        return self.budget - self.sink - self.demote.slots(self.local)

    def init(self, spec: CacheSpec) -> ZonedState:
        self.hashing.check(spec, self.demote.leave)
        st = super().init(spec)
        return replace(st, index=self.hashing.init(spec, self._hashed(st)))

    def of_size(self, spec: CacheSpec) -> Policy:
        return (
            Short(self)
            if is_short(self.dense_capacity, type(self.hashing).__name__, spec)
            else self
        )

    @property
    def selects(self) -> bool:
        return True

    def append(self, st: ZonedState, k: Array, v: Array, count: Array) -> ZonedState:
        index = self.hashing.append(st.index, k, st.store.count, count)
        return replace(super().append(st, k, v, count), index=index)

    def attend(self, st: ZonedState, q: Array, step: Step) -> tuple[Array, ZonedState, Info]:
        if step.exact:
            return self.attend_all(st, q, step)
        seen = self.visible(st, step.window)
        sample, share = self.sample(st, q, seen)
        if step.selection is not None:
            sample = unpack(step.selection)
        history, log_weights = self._estimate(st, q, sample, share, step.scale)
        recent, none = seen.recent, jnp.zeros((*q.shape[:2], 1, 128), jnp.int32)
        zones = Selection(none, none > 0), recent, seen.sink, recent.k.shape[2]
        exact = ops.attend_zones(q, recent.k, recent.v, *zones, scale=step.scale, part=True)
        out = merge_sinks(merge(history, exact), step.logits.get("sinks")).out.astype(q.dtype)
        return out, st, self._info(st, seen, sample, log_weights)

    takes_steps = False

    def select(self, st: ZonedState, q: Array, step: Step) -> Selection:
        """The tokens of the history that each query head samples."""
        return self.sample(st, q, self.visible(st, step.window))[0]

    def sample(self, st: ZonedState, q: Array, seen: Visible) -> tuple[Selection, Array]:
        """Slots [B, K, G, M] of the history that query heads q [B, K, G, D] sample, and their
        share of all collisions.

        The share is a logarithm, f32[B, K, G]: 0 if there is room for all tokens whose hashes
        collide, and inf for a row whose history is read in full.
        """
        slot = jnp.arange(st.store.slots, dtype=jnp.int32)
        taken = self._collide(st, q, seen, slot)
        sample = ops.top_k(jnp.broadcast_to(_order(slot), taken.shape), taken, self._room(st))
        return sample, self._share(st, seen, jnp.sum(taken, axis=-1))

    def _room(self, st: ZonedState) -> int:
        """The most tokens of the history that a query head of `st` reads."""
        return min(self.room, st.store.slots)

    def _hashed(self, st: ZonedState) -> int:
        """Slots of the index."""
        return st.store.slots

    def _reads_all(self, st: ZonedState, seen: Visible) -> Array:
        """bool[B, 1, 1, 1]: the visible part of the history fits into the room."""
        return by_row(st.store.count - seen.store) <= self._room(st)

    def _collide(self, st: ZonedState, q: Array, seen: Visible, place: Array) -> Array:
        """bool[B, K, G, S]: whether a query would sample each token of the index; the tokens
        have places i32[S].
        """
        place = place[None, None, None]
        hit = self.hashing.hits(st.index, q)
        visible = (place >= by_row(seen.store)) & (place < by_row(st.store.count))
        return visible & (hit | self._reads_all(st, seen))

    def _share(self, st: ZonedState, seen: Visible, found: Array) -> Array:
        """The share that `sample` returns, if i32[B, K, G] tokens were `found` to collide."""
        share = jnp.log(
            jnp.minimum(self._room(st) / jnp.maximum(found, 1).astype(jnp.float32), 1.0)
        )
        return jnp.where(self._reads_all(st, seen)[..., 0], jnp.inf, share)

    def _estimate(
        self, st: ZonedState, q: Array, sample: Selection, share: Array, scale: float
    ) -> tuple[PartialAttention, Array]:
        """The history's part of attention, estimated from the sample, and the sample's log
        weights f32[B, K, G, M].

        Few tokens are sampled, so a CPU gathers a quarter of the room if that holds all. A GPU
        would wait to know it.
        """
        few = sample.slots.shape[3] // 4

        def estimate(sample: Selection) -> tuple[PartialAttention, Array]:
            return self._attend(
                st, q, *self.store.gather(st.store, sample), sample, share, scale
            )

        def estimate_few(sample: Selection) -> tuple[PartialAttention, Array]:
            part, log_weights = estimate(Selection(*(a[..., :few] for a in sample)))
            return part, jnp.zeros(sample.slots.shape).at[..., :few].set(log_weights)

        if reaches_gpus() or few == 0:
            return estimate(sample)
        return lax.cond(jnp.any(sample.valid[..., few:]), estimate, estimate_few, sample)

    def _attend(
        self,
        st: ZonedState,
        q: Array,
        k: Array,
        v: Array,
        sample: Selection,
        share: Array,
        scale: float,
    ) -> tuple[PartialAttention, Array]:
        """`_estimate` from the keys and values [B, K, G M, D] of a sample."""
        B, K, G, D = q.shape
        M, valid = sample.slots.shape[3], sample.valid
        k, v = (a.reshape(B, K, G, M, D) for a in (k, v))
        log_weights = (
            -self.hashing.log_probability(st.index, q, k, sample.slots) - share[..., None]
        )
        log_weights = jnp.where(jnp.isposinf(share)[..., None] | ~valid, 0.0, log_weights)
        valid = valid.reshape(B, K * G, M)
        v = keep_valid(v.reshape(B, K * G, M, D), valid)
        q, k, bias = (
            q.reshape(B, K * G, 1, D),
            k.reshape(B, K * G, M, D),
            log_weights.reshape(B, K * G, 1, M),
        )
        part = attend_part(q, k, v, valid[:, :, None], scale=scale, bias=bias)
        return PartialAttention(
            part.out.reshape(B, K, G, D), part.lse.reshape(B, K, G)
        ), log_weights

    def _info(
        self, st: ZonedState, seen: Visible, sample: Selection, log_weights: Array
    ) -> Info:
        B, K, G, _ = sample.slots.shape
        read = seen.recent.size + (0 if seen.sink is None else seen.sink.size)
        attended = jnp.mean(jnp.sum(sample.valid, axis=-1), axis=-1, dtype=jnp.float32)
        attended += read[:, None].astype(jnp.float32)

        def exact(slots: int, count: Array, offset: Array) -> Array:
            """i32[B, K, G, slots]: positions of a zone that is attended in full."""
            slot = jnp.arange(slots, dtype=jnp.int32)[None]
            at = offset[:, None] + slot
            valid = slot < count[:, None]
            if seen.first is not None:
                valid &= at >= seen.first[:, None]
            return jnp.broadcast_to(jnp.where(valid, at, -1)[:, None, None], (B, K, G, slots))

        sink = exact(self.sink, st.offset_store, jnp.zeros_like(st.offset_store))
        recent = exact(st.recent.slots, st.recent.count, st.offset_recent)
        sampled = jnp.where(sample.valid, self.positions(st, sample.slots), -1)
        log_weights = jnp.pad(
            log_weights, ((0, 0), (0, 0), (0, 0), (self.sink, st.recent.slots))
        )
        positions = jnp.concatenate([sink, sampled, recent], axis=-1)
        return Info(attended, sample, positions=positions, log_weights=log_weights)

    def over_context(self, axis: Axis, parts: int) -> StripedSampled:
        part, tile = super().over_context(axis, parts), self.hashing.tile
        if part.store.stripes.tokens % tile:
            raise ValueError(
                f"Placement(context={axis!r}) gives each of {parts} devices {part.store.stripes.tokens} tokens of a "
                f"chunk of {self.demote.leave}, but {self.hashing} stores hashes of {tile} tokens together; use chunks "
                f"of a multiple of {tile * parts} tokens (`chunk` of a preset)"
            )
        return StripedSampled(
            **{field.name: getattr(part, field.name) for field in fields(part)}
        )


@dataclass(frozen=True, kw_only=True)
class StripedSampled(Sampled):
    """`Sampled` on one device of a context axis: it has the hashes of its stripes, and samples
    as one device would.

    Each device offers the places of its own tokens that collide, 4 bytes each, and their
    number. All devices sort the same offers, attend to their own tokens of the sample, and
    merge.
    """

    store: StripedStore

    def append(self, st: ZonedState, k: Array, v: Array, count: Array) -> ZonedState:
        index = self.hashing.append(st.index, k, st.store.count, count, self.store.stripes)
        return replace(Zoned.append(self, st, k, v, count), index=index)

    def sample(self, st: ZonedState, q: Array, seen: Visible) -> tuple[Selection, Array]:
        stripes, own = self.store.stripes, self._hashed(st)
        place = stripes.place(jnp.arange(own, dtype=jnp.int32))
        taken = self._collide(st, q, seen, place)
        best = ops.top_k(
            jnp.broadcast_to(_order(place), taken.shape), taken, min(self.room, own)
        )
        found = jnp.sum(taken, axis=-1, keepdims=True, dtype=jnp.int32)
        offer = jnp.concatenate(
            [jnp.where(best.valid, stripes.place(best.slots), NOWHERE), found], axis=-1
        )
        offers = lax.all_gather(offer, stripes.axis, axis=3)

        place = offers[..., :-1].reshape(*offer.shape[:3], -1)
        rank = jnp.where(place < NOWHERE, in_order(_order(place)), jnp.uint32(0))
        place = first_places(rank, place, self._room(st))
        valid = place < NOWHERE
        return Selection(jnp.where(valid, place, 0), valid), self._share(
            st, seen, jnp.sum(offers[..., -1], axis=3)
        )

    def _hashed(self, st: ZonedState) -> int:
        return st.store.slots // self.store.stripes.parts

    def _estimate(
        self, st: ZonedState, q: Array, sample: Selection, share: Array, scale: float
    ) -> tuple[PartialAttention, Array]:
        k, v, here = self.store.gather_own(st.store, sample)
        part, log_weights = self._attend(st, q, k, v, sample._replace(valid=here), share, scale)
        axis = self.store.stripes.axis
        return merge_parts(part, axis), lax.psum(
            log_weights, axis
        )  # a step that keeps no Info needs no sum


def _order(place: Array) -> Array:
    """f32[...]: evenly scattered ranks of places i32[...]: multiples of the golden ratio modulo
    1, in 24 bits.
    """
    return ((place.astype(jnp.uint32) * jnp.uint32(2654435769)) >> 8).astype(jnp.float32)
