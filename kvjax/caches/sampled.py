"""MagicPIG: every token kept, a random sample of them attended, each weighted by the inverse of its probability."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import Array

from kvjax import ops
from kvjax.caches.policy import Info
from kvjax.caches.zones import Visible, Zoned, ZonedState
from kvjax.demotion import Demotion, Fifo
from kvjax.hashing import SimHash
from kvjax.partial import PartialAttention, attention_logits, keep_valid, part_of_logits
from kvjax.selection import Selection, by_row
from kvjax.spec import CacheSpec, keep_int
from kvjax.stores import Dense, Store


@dataclass(frozen=True, kw_only=True)
class Sampled(Zoned):
    """Keeps every token; a step attends to sink and recent block, and estimates the rest of attention from a sample.

    Each query head samples the tokens of the history whose hashes collide with its own (`SimHash`), and divides the
    exponential of each by the probability with which it is sampled. So the sum over the sample is, on average over the
    random directions, the sum over the history. `budget` bounds the tokens that a query head reads; the sink and a full
    recent block of `demote.slots(local)` tokens are part of it. If more tokens collide than there is room for, an even
    part of them, by their slots, is taken and weighs more. A history that fits into the room is read in full, and
    attention is then exact.

    **Source:** MagicPIG (Chen et al. 2024, arXiv 2410.16179), sections 4 and 5. **Differs:** shapes are static, so the
    sample has a bound; the paper's has none. Recent tokens are hashed a chunk at a time, and are attended exactly until
    then. A sample is drawn for each query head, as in the paper, so a group reads up to G budgets.

    >>> import kvjax
    >>> spec = kvjax.CacheSpec(batch=1, q_heads=4, kv_heads=2, head_dim=64, capacity=2048)
    >>> layer = kvjax.init_layer(kvjax.Sampled(budget=512), spec)
    """

    hashing: SimHash = SimHash()
    store: Store = Dense()
    budget: int = 2048
    sink: int = 4
    local: int = 64
    demote: Demotion = Fifo(leave=256)

    def __post_init__(self) -> None:
        keep_int(self, "budget", at_least=1)
        super().__post_init__()
        if self.room < 1:
            least = self.budget - self.room + 1
            raise ValueError(
                f"Sampled(budget={self.budget}) leaves nothing to sample beside sink={self.sink} and a recent block of "
                f"up to {self.demote.slots(self.local)} tokens; use at least {least}, or smaller chunks"
            )
        if self.store.page != 1:
            raise ValueError(
                f"{self.store} moves whole pages, but Sampled reads single tokens; use {type(self.store).__name__}()"
            )

    @property
    def room(self) -> int:
        """Tokens of the history that a query head reads at most."""
        return self.budget - self.sink - self.demote.slots(self.local)

    def init(self, spec: CacheSpec) -> ZonedState:
        self.hashing.check(spec, self.demote.leave)
        st = super().init(spec)
        return replace(st, index=self.hashing.init(spec, st.store.slots))

    def append(self, st: ZonedState, k: Array, v: Array, count: Array) -> ZonedState:
        index = self.hashing.append(st.index, k, st.store.count, count)
        return replace(super().append(st, k, v, count), index=index)

    def attend(
        self, st: ZonedState, q: Array, *, scale: float, window: int | None = None
    ) -> tuple[Array, ZonedState, Info]:
        seen = self.visible(st, window)
        sample, share = self.sample(st, q, seen)
        history, log_weights = self._estimate(st, q, sample, share, scale)
        out = ops.attend_beside(history, q, None, seen.recent, seen.sink, scale=scale)
        return out, st, self._info(st, seen, sample, log_weights)

    def sample(self, st: ZonedState, q: Array, seen: Visible) -> tuple[Selection, Array]:
        """Slots [B, K, G, M] that query heads q [B, K, G, D] sample of the history, and the share of the hits taken.

        The share is f32[B, K, G] in logarithm: 0 where there is room for all tokens whose hashes collide, and inf for a
        row whose history is read in full.
        """
        slots = st.store.slots
        room, slot = min(self.room, slots), jnp.arange(slots, dtype=jnp.int32)[None, None, None]
        visible = (slot >= by_row(seen.store)) & (slot < by_row(st.store.count))
        whole = by_row(st.store.count - seen.store) <= room
        hit = self.hashing.collisions(st.index, q) >= self.hashing.least
        taken = visible & (hit | whole)
        # Slots in an order without a pattern: multiples of the golden ratio modulo 1, in 24 bits.
        order = ((slot.astype(jnp.uint32) * jnp.uint32(2654435769)) >> 8).astype(jnp.float32)
        sample = ops.top_k(jnp.broadcast_to(order, taken.shape), taken, room)
        found = jnp.maximum(jnp.sum(taken, axis=-1), 1).astype(jnp.float32)
        return sample, jnp.where(whole[..., 0], jnp.inf, jnp.log(jnp.minimum(room / found, 1.0)))

    def _estimate(
        self, st: ZonedState, q: Array, sample: Selection, share: Array, scale: float
    ) -> tuple[PartialAttention, Array]:
        """The part of the history as estimated from the sample, and the log of its weights f32[B, K, G, M]."""
        B, K, G, D = q.shape
        M = sample.slots.shape[3]
        k, v = (a.reshape(B, K, G, M, D) for a in self.store.gather(st.store, sample))
        log_weights = -self.hashing.log_probability(st.index, q, k) - share[..., None]
        log_weights = jnp.where(jnp.isposinf(share)[..., None] | ~sample.valid, 0.0, log_weights)
        valid = sample.valid.reshape(B, K * G, M)
        v = keep_valid(v.reshape(B, K * G, M, D), valid)
        logits = attention_logits(q.reshape(B, K * G, 1, D), k.reshape(B, K * G, M, D), scale)
        logits += log_weights.reshape(B, K * G, 1, M)

        def mix(weights: Array) -> Array:
            return jnp.einsum(
                "bkqs,bksd->bkqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32, precision="highest"
            )

        part = part_of_logits(logits, valid[:, :, None], mix)
        return PartialAttention(part.out.reshape(B, K, G, D), part.lse.reshape(B, K, G)), log_weights

    def _info(self, st: ZonedState, seen: Visible, sample: Selection, log_weights: Array) -> Info:
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
        log_weights = jnp.pad(log_weights, ((0, 0), (0, 0), (0, 0), (self.sink, st.recent.slots)))
        return Info(
            attended,
            sample,
            positions=jnp.concatenate([sink, sampled, recent], axis=-1),
            log_weights=log_weights,
        )

    def bytes_per_token(self, spec: CacheSpec) -> float:
        return super().bytes_per_token(spec) + spec.kv_heads * 4 * self.hashing.bits * self.hashing._words
