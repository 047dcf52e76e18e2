"""MagicPIG: every token is kept, and a step attends to a random sample of them, each weighted by
its inverse probability.

`SimHash` hashes keys and says which of them a query samples, and with what probability;
`Sampled` is the policy that attends to the sample.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax import ops
from kvjax.memory import has_host_arrays
from kvjax.numerics.blocks import sum_pairs, write
from kvjax.numerics.partial import (
    Logits,
    PartialAttention,
    attend_part,
    keep_valid,
    merge,
    merge_sinks,
)
from kvjax.numerics.selection import Selection, by_row, in_order, unpack
from kvjax.ops.op import reaches_gpus
from kvjax.policies import PerLayer
from kvjax.policies.policy import Info, Policy, Step
from kvjax.policies.short import DenseCapacity, check_dense_capacity, if_long
from kvjax.policies.zones import Visible, Zoned, ZonedState
from kvjax.presets.preset import published
from kvjax.presets.settings import Layers, capacity_of, history, over_layers
from kvjax.sharding.context import Axis, Stripes, merge_parts
from kvjax.sharding.context.selectors import NOWHERE, first_places
from kvjax.sharding.context.stores import StripedStore
from kvjax.spec import CacheSpec, keep_ints, require_int
from kvjax.stores import Dense, Store
from kvjax.stores.demotion import Demotion, Fifo
from kvjax.validation import check_verbs

__all__ = ["Sampled", "SimHash", "magicpig"]


@published(
    "all tokens, and key hashes; attends to a weighted sample",
    paper="MagicPIG 2024",
)
def magicpig(
    budget: int = 2048,
    *,
    bits: int = 10,
    tables: int = 150,
    least: int = 2,
    sink: int = 4,
    local: int = 64,
    chunk: int = 256,
    seed: int = 0,
    store: Store | str = "device",
    dense_capacity: DenseCapacity = "auto",
    layers: Layers = Layers(dense=1),
) -> PerLayer:
    """MagicPIG: every token is kept; a step estimates attention from tokens whose hashes
    collide with the query's.

    Each query head samples the keys that share its hash in enough tables, and weights them by
    the inverse of their sampling probability. The sink and the recent block of up to `local` +
    `chunk` tokens are attended exactly; the budget counts them.

    Args:
      bits: bits of a hash.
      tables: hash tables.
      least: tables in which a key must collide with the query.
      chunk: tokens that are hashed together; at most this many are pending.
      seed: seed of the random directions.

    **Source:** MagicPIG (Chen et al. 2024, arXiv 2410.16179): 10 bits, 150 tables, 2
    collisions, sink 4, local 64. **Differs:** see `Sampled` and `SimHash`. The paper keeps
    layers 0 and 16 of 32 dense; here the first are. Hashes are on the device; the paper's are
    in host memory.

    **Checklist:** unit: tokens, sampled for each query head; besides: sink, window and pending
    tokens; zones: sink 4, window 64; budget: these and the sample, which it bounds; generated:
    attended exactly until a chunk of 256 is hashed.
    """
    require_int("magicpig(budget=...)", budget, at_least=1)
    policy = Sampled(
        hashing=SimHash(bits=bits, tables=tables, least=least, learn=chunk, seed=seed),
        store=history("magicpig", store),
        budget=budget,
        sink=sink,
        local=local,
        demote=Fifo(leave=chunk),
        dense_capacity=capacity_of(dense_capacity, store, layers),
    )
    return over_layers("magicpig", layers, policy)


WORD = 32  # tables per word
TOGETHER = 256  # keys that are hashed at once; always so many, because a product's last bits depend on its shape
TILE = 8  # most keys whose words lie side by side: 32 bytes, which a GPU reads at once
MOST_BITS = 32  # a hash of more bits collides with nothing
MOST_TABLES = 4096  # more take longer than attention
CENTRES = 16  # for any capacity, so that `kvjax.grow` copies them as they are


class HashIndex(NamedTuple):
    """Hashes of centred keys. Bit t % 32 of word (j, t // 32) is bit j of a key's hash in table
    t.
    """

    words: Array  # u32[B, K, S / tile, bits * ceil(tables / 32), tile]
    total: Array  # f32[B, K D] sum of the keys in the history; flat, because it has no slots
    centres: Array  # f32[B, K CENTRES D] centre j is the mean of the first 2**j blocks of `learn` keys


@dataclass(frozen=True, kw_only=True)
class SimHash:
    """Hashes vectors in `tables` tables by the signs of their products with `bits` random
    directions each.

    A query samples the keys that have its own hash in at least `least` tables. Two vectors at
    an angle of theta have equal signs with probability 1 - theta / pi, so the probability that
    a key is sampled is known.

    A centre is subtracted from each key before it is hashed, which spreads the angles. The
    probability is that of the centred key, so estimates are unbiased for any centre. The
    history of a row is divided into blocks of `learn` tokens. The first two blocks are centred
    by the mean of the first one. A later block is centred by the mean of the first 2**j blocks,
    with the largest 2**j, up to 2**15, that does not exceed the number of blocks before it.

    Index: bits * tables / 8 bytes per key and kv head, with tables rounded up to 32: 200 bytes
    at the defaults. A row also has 16 centres and a sum of keys for each kv head. The
    directions are drawn from `seed` and are constants of the program.

    **Source:** MagicPIG (Chen et al. 2024, arXiv 2410.16179): K = 10 bits, L = 150 tables, at
    least 2 collisions, keys centred. **Differs:** the paper centres all keys by the mean of the
    prompt; here hashes do not depend on how a prompt is split into chunks, and follow keys that
    drift along the row.
    """

    bits: int = 10
    tables: int = 150
    least: int = 2
    learn: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        keep_ints(self, bits=1, tables=1, least=1, learn=1, seed=0)
        if self.bits > MOST_BITS or self.tables > MOST_TABLES:
            raise ValueError(
                f"SimHash(bits={self.bits}, tables={self.tables}) takes at most {MOST_BITS} bits and {MOST_TABLES} "
                "tables; the paper has 10 and 150"
            )
        if self.least > self.tables:
            raise ValueError(
                f"SimHash(least={self.least}) needs at least {self.least} tables, got tables={self.tables}; use more "
                "tables, or fewer collisions"
            )

    def check(self, spec: CacheSpec, chunk: int) -> None:
        if chunk % self.learn:
            raise ValueError(
                f"SimHash(learn={self.learn}) needs chunks of a multiple of {self.learn} tokens, got chunks of "
                f"{chunk}; use Fifo(leave={self.learn}), or a learn that divides {chunk}"
            )

    def init(self, spec: CacheSpec, slots: int) -> HashIndex:
        B = spec.batch
        K = spec.kv_heads
        D = spec.head_dim
        return HashIndex(
            jnp.zeros(
                (B, K, slots // self.tile, self.bits * self._words, self.tile), jnp.uint32
            ),
            jnp.zeros((B, K * D), jnp.float32),
            jnp.zeros((B, K * CENTRES * D), jnp.float32),
        )

    def append(
        self, ix: HashIndex, k: Array, at: Array, count: Array, stripes: Stripes | None = None
    ) -> HashIndex:
        """Hashes the first `count` i32[B] keys of k [B, K, T, D] as slots at[b], at[b]+1, ...;
        whole chunks.

        With `stripes`, slots are places of a history that is split over devices, and the index
        has those of this device. All devices have all centres.
        """
        k = lax.stop_gradient(k).astype(jnp.float32)
        total, centres = self._add(ix, k, at, count)
        if stripes is not None:
            k = stripes.take_own(k)
            at = at // stripes.parts
            count = count // stripes.parts
        B, K, T, _ = k.shape
        place = at[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
        if stripes is not None:
            place = stripes.place(place)

        more = -T % TOGETHER
        k = jnp.pad(k, ((0, 0), (0, 0), (0, more), (0, 0)))
        place = jnp.pad(place, ((0, 0), (0, more)))

        def hash_some(first: Array) -> Array:
            keys = lax.dynamic_slice_in_dim(k, first, TOGETHER, axis=2)
            here = lax.dynamic_slice_in_dim(place, first, TOGETHER, axis=1)
            return self._hash(keys - self._centres_of(centres, here[:, None], keys.shape))

        words = lax.map(hash_some, jnp.arange(0, T + more, TOGETHER, dtype=jnp.int32))
        words = jnp.moveaxis(words, 0, 2).reshape(B, K, T + more, -1)[:, :, :T]
        words = jnp.swapaxes(words.reshape(B, K, T // self.tile, self.tile, -1), 3, 4)
        return HashIndex(
            write(ix.words, words, at // self.tile, count // self.tile), total, centres
        )

    def hits(self, ix: HashIndex, q: Array) -> Array:
        """bool[B, K, G, S]: whether a query, q [B, K, G, D], has the hash of a key in at least
        `least` tables.
        """
        B, K, G, _ = q.shape
        W = self._words
        query = self._hash(q.astype(jnp.float32)).reshape(B, K, G, 1, self.bits, W, 1)
        words = ix.words.reshape(B, K, -1, self.bits, W, self.tile)
        tables = np.full((1, 1, 1, W, 1), 2**WORD - 1, np.uint32)
        tables[..., -1, :] >>= -self.tables % WORD

        def found(unlike: Array) -> Array:
            alike = lax.population_count(~unlike & tables)
            return jnp.sum(alike, axis=3, dtype=jnp.uint32).reshape(B, K, -1) >= self.least

        # One reduction for all heads: a GPU reads the words of a key once.
        unlike = lax.reduce(
            [words ^ query[:, :, head] for head in range(G)],
            G * [jnp.uint32(0)],
            lambda a, b: [lax.bitwise_or(*pair) for pair in zip(a, b, strict=True)],
            (3,),
        )
        return jnp.stack([found(a) for a in unlike], axis=2)

    def log_probability(self, ix: HashIndex, q: Array, k: Array, place: Array) -> Array:
        """f32[B, K, G, M]: log of the probability that a query of q [B, K, G, D] samples keys k
        [B, K, G, M, D].

        The probability is over the random directions. It has no derivative.

        Args:
          place: i32[B, K, G, M], the slots of the keys in the history; with stripes, in that of
            all devices.
        """
        q, k = (lax.stop_gradient(a).astype(jnp.float32) for a in (q, k))
        k = k - self._centres_of(ix.centres, place, k.shape)
        norms = jnp.linalg.norm(q, axis=-1)[..., None] * jnp.linalg.norm(k, axis=-1)
        products = jnp.einsum("bkgd,bkgmd->bkgm", q, k, precision="highest")
        cosine = jnp.clip(products / jnp.maximum(norms, 1e-30), -1, 1)
        return jnp.log(self.inclusion(1 - jnp.arccos(cosine) / jnp.pi))

    def inclusion(self, alike: Array) -> Array:
        """f32: probability of at least `least` collisions of vectors whose signs agree with
        probability `alike`.
        """
        x = jnp.clip(alike**self.bits, 1e-30, 1 - 1e-6)
        L = self.tables
        n = self.least

        def terms(counts: range) -> Array:
            logs = [
                math.log(math.comb(L, i)) + i * jnp.log(x) + (L - i) * jnp.log1p(-x)
                for i in counts
            ]
            return sum((jnp.exp(a) for a in logs[1:]), jnp.exp(logs[0]))

        # If collisions are rare, the sum of the lower counts is near 1, so the upper ones are
        # summed instead: those within seven standard deviations of the mean, which is less than
        # n.
        rare = terms(range(n, min(n + 4 + math.ceil(7 * math.sqrt(n)), L + 1)))
        return jnp.where(x * L < n, rare, jnp.maximum(1 - terms(range(n)), 1e-30))

    @property
    def tile(self) -> int:
        """Keys whose words lie side by side; keys are stored in whole tiles."""
        return math.gcd(self.learn, TILE)

    @property
    def _words(self) -> int:
        return -(-self.tables // WORD)

    def _add(self, ix: HashIndex, k: Array, at: Array, count: Array) -> tuple[Array, Array]:
        """The sum and the centres after `append`. Blocks are added in order, so no bit depends
        on their chunks.
        """
        B, K, _, D = k.shape
        starts = (at == 0) & (count > 0)  # a row that starts forgets the one before it
        total, centres = (jnp.where(starts[:, None], 0.0, a) for a in (ix.total, ix.centres))
        sums = jnp.moveaxis(
            sum_pairs(k.reshape(B, K, -1, self.learn, D)).reshape(B, K, -1, D), 2, 0
        )
        first = at // self.learn
        blocks = count // self.learn

        def add(total: Array, block: tuple[Array, Array]) -> tuple[Array, Array]:
            i, keys = block
            total = jnp.where((i < blocks)[:, None], total + keys.reshape(B, K * D), total)
            return total, total

        total, totals = lax.scan(
            add, total, (jnp.arange(len(sums), dtype=jnp.int32), sums), unroll=16
        )
        sizes = 2 ** np.arange(CENTRES)
        # of k, the last one of each centre
        block = jnp.asarray(sizes - 1, jnp.int32)[None] - first[:, None]
        valid = (block >= 0) & (block < blocks[:, None])
        means = jnp.take_along_axis(
            jnp.moveaxis(totals, 0, 1), block[..., None], axis=1, mode="clip"
        )
        # [B, CENTRES, K D]
        means = means / jnp.asarray(sizes * self.learn, jnp.float32)[None, :, None]
        means = jnp.swapaxes(means.reshape(B, CENTRES, K, D), 1, 2)
        centres = jnp.where(valid[:, None, :, None], means, centres.reshape(B, K, CENTRES, D))
        return total, centres.reshape(B, K * CENTRES * D)

    def _centres_of(self, centres: Array, place: Array, shape: tuple[int, ...]) -> Array:
        """f32 of `shape` [B, K, ..., D]: the centre of each key, whose places are i32[B, K or
        1, ...].
        """
        B = shape[0]
        K = shape[1]
        D = shape[-1]
        level = jnp.minimum(31 - lax.clz(jnp.maximum(place // self.learn, 1)), CENTRES - 1)
        level = level.reshape(B, place.shape[1], -1, 1)
        return jnp.take_along_axis(
            centres.reshape(B, K, CENTRES, D), level, axis=2, mode="clip"
        ).reshape(shape)

    def _hash(self, x: Array) -> Array:
        """u32[..., bits * words] of x f32[..., D]."""
        directions = _directions(self.seed, x.shape[-1], self.bits * self._words * WORD)
        signs = jnp.matmul(x, directions, precision="highest") >= 0
        signs = signs.reshape(*x.shape[:-1], self.bits * self._words, WORD).astype(jnp.uint32)
        places = jnp.left_shift(jnp.uint32(1), jnp.arange(WORD, dtype=jnp.uint32))
        return jnp.sum(
            signs * places.reshape(*(1,) * (x.ndim), WORD), axis=-1, dtype=jnp.uint32
        )


@functools.lru_cache(maxsize=16)
def _directions(seed: int, head_dim: int, count: int) -> np.ndarray:
    """f32[D, count]"""
    return np.random.default_rng(seed).normal(size=(head_dim, count)).astype(np.float32)


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
    >>> layer = kvjax.init_layer(kvjax.contrib.magicpig.Sampled(budget=512), spec)
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
        check_dense_capacity(self)
        super().__post_init__()
        verbs = ("check", "init", "append")
        check_verbs(
            "Sampled(hashing=...)",
            self.hashing,
            "a hashing",
            verbs,
            "kvjax.contrib.magicpig.SimHash()",
        )
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
        return if_long(self, type(self.hashing).__name__, spec)

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
        history, log_weights = self._estimate(st, q, sample, share, step.logits)
        recent = seen.recent
        none = jnp.zeros((*q.shape[:2], 1, 128), jnp.int32)
        zones = Selection(none, none > 0), recent, seen.sink, recent.k.shape[2]
        exact = ops.attend_zones(q, recent.k, recent.v, *zones, logits=step.logits, part=True)
        out = merge_sinks(merge(history, exact), step.sinks).out.astype(q.dtype)
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
        return sample, self._share(st, seen, jnp.sum(taken, axis=-1, dtype=jnp.int32))

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
        self, st: ZonedState, q: Array, sample: Selection, share: Array, logits: Logits
    ) -> tuple[PartialAttention, Array]:
        """The history's part of attention, estimated from the sample, and the sample's log
        weights f32[B, K, G, M].

        Few tokens are sampled, so a CPU gathers a quarter of the room if that holds all. A GPU
        would wait to know it.
        """
        few = sample.slots.shape[3] // 4

        def estimate(sample: Selection) -> tuple[PartialAttention, Array]:
            k, v = self.store.gather(st.store, sample)
            return self._attend(st, q, k, v, sample, share, logits)

        def estimate_few(sample: Selection) -> tuple[PartialAttention, Array]:
            part, log_weights = estimate(Selection(*(a[..., :few] for a in sample)))
            return part, jnp.zeros(sample.slots.shape, jnp.float32).at[..., :few].set(
                log_weights
            )

        # A condition under vmap would choose between copies of arrays in host memory.
        if reaches_gpus() or few == 0 or has_host_arrays(st.store):
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
        logits: Logits,
    ) -> tuple[PartialAttention, Array]:
        """`_estimate` from the keys and values [B, K, G M, D] of a sample."""
        B, K, G, D = q.shape
        M = sample.slots.shape[3]
        valid = sample.valid
        k, v = (a.reshape(B, K, G, M, D) for a in (k, v))
        log_weights = (
            -self.hashing.log_probability(st.index, q, k, sample.slots) - share[..., None]
        )
        log_weights = jnp.where(jnp.isposinf(share)[..., None] | ~valid, 0.0, log_weights)
        valid = valid.reshape(B, K * G, M)
        v = keep_valid(v.reshape(B, K * G, M, D), valid)
        q = q.reshape(B, K * G, 1, D)
        k = k.reshape(B, K * G, M, D)
        bias = log_weights.reshape(B, K * G, 1, M)
        part = attend_part(q, k, v, valid[:, :, None], logits=logits, bias=bias)
        return PartialAttention(
            part.out.reshape(B, K, G, D), part.lse.reshape(B, K, G)
        ), log_weights

    def _info(
        self, st: ZonedState, seen: Visible, sample: Selection, log_weights: Array
    ) -> Info:
        B, K, G, _ = sample.slots.shape
        read = seen.recent.size + (0 if seen.sink is None else seen.sink.size)
        attended = jnp.mean(
            jnp.sum(sample.valid, axis=-1, dtype=jnp.int32), axis=-1, dtype=jnp.float32
        )
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
        part = super().over_context(axis, parts)
        tile = self.hashing.tile
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
        stripes = self.store.stripes
        own = self._hashed(st)
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
        self, st: ZonedState, q: Array, sample: Selection, share: Array, logits: Logits
    ) -> tuple[PartialAttention, Array]:
        k, v, here = self.store.gather_own(st.store, sample)
        part, log_weights = self._attend(
            st, q, k, v, sample._replace(valid=here), share, logits
        )
        axis = self.store.stripes.axis
        # A step that keeps no Info needs no sum.
        return merge_parts(part, axis), lax.psum(log_weights, axis)


def _order(place: Array) -> Array:
    """f32[...]: evenly scattered ranks of places i32[...]: multiples of the golden ratio modulo
    1, in 24 bits.
    """
    return ((place.astype(jnp.uint32) * jnp.uint32(2654435769)) >> 8).astype(jnp.float32)
