"""Models that were trained to select: the indexer's queries and keys come from the model,
beside q, k and v.

A model calls `attention` of this module with an `Index` instead of `kvjax.attention`. The cache
keeps its keys as the indexer wants them, and a step attends to the blocks that the indexer's own
queries select. Budget and blocks are the model's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass
from jax.typing import ArrayLike

from kvjax import ops
from kvjax.attention import attention_info
from kvjax.cache.cache import LayerCache
from kvjax.call import row_counts
from kvjax.numerics.blocks import take_rows, write
from kvjax.numerics.partial import PartialAttention
from kvjax.numerics.selection import Selection
from kvjax.policies.full import AroundFull, Full, FullState
from kvjax.policies.policy import Info, Policy, Step
from kvjax.spec import CacheSpec, keep_ints
from kvjax.validation import check_verbs

__all__ = ["MSA", "QSA", "Index", "Indexed", "Indexer", "attention"]


class Index(NamedTuple):
    """Queries and keys of a model's indexer for the T tokens of a call."""

    q: Array  # [B, T, H, E] queries
    k: Array  # [B, T, E] one key a token, as the indexer wants it
    weights: Array | None = None  # [B, T, H] of query heads, any sign; None: 1
    # The keys of blocks [B, n, E] of pooled keys and the blocks' first positions i32[B, n],
    # such as their norm and RoPE
    finish: Callable[[Array, Array], Array] | None = None


class Indexer:
    """Selects blocks of a model's tokens by its index queries. A subclass is a frozen
    dataclass.
    """

    heads: int  # H
    size: int  # E
    block: int  # tokens of a block
    top: int  # blocks that a step selects

    def __post_init__(self) -> None:
        keep_ints(self, heads=1, size=1, block=1, top=1)

    @property
    def pooled(self) -> int:
        """Tokens of a stored key."""
        return 1

    def blocks(
        self, keys: Array, q: Array, weights: Array, length: Array, kv_heads: int
    ) -> Selection:
        """The blocks [B, K or 1, 1, top] for q f32[B, H, E] of rows of `length` i32[B]; keys
        [B, S / pooled, E].
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class QSA(Indexer):
    """Selects blocks of 4 tokens by the mean of their keys, one set for all heads, and the
    newest incomplete block.

    A block's score is the weighted sum over query heads of relu(q.k), in f32, without the
    factor 1 / sqrt(E), which changes no order; the `top` complete blocks of highest score are
    selected, and the tokens after the last one always.

    **Source:** Qwen's sparse attention as in transformers (qwen4_exp): 4 heads of 128, top 512.
    """

    heads: int = 4
    size: int = 128
    block: int = 4
    top: int = 512

    @property
    def pooled(self) -> int:
        return self.block

    def blocks(
        self, keys: Array, q: Array, weights: Array, length: Array, kv_heads: int
    ) -> Selection:
        products = jnp.einsum("bhe,bne->bhn", q, keys.astype(jnp.float32), precision="highest")
        scores = jnp.sum(jnp.maximum(products, 0) * weights[..., None], axis=1)
        whole = length // self.block
        n = keys.shape[1]
        complete = jnp.arange(n, dtype=jnp.int32)[None] < whole[:, None]
        best = ops.top_k(scores[:, None], complete[:, None], min(self.top, n))
        rank = (jnp.arange(best.slots.shape[-1] + 1, dtype=jnp.int32) < best.slots.shape[-1])[
            None, None
        ]
        rest = jnp.where(rank, 0, whole[:, None, None])  # the newest block, of fewer tokens
        slots = jnp.where(rank, jnp.pad(best.slots, ((0, 0), (0, 0), (0, 1))), rest)
        valid = jnp.where(
            rank,
            jnp.pad(best.valid, ((0, 0), (0, 0), (0, 1))),
            (length % self.block > 0)[:, None, None],
        )
        return Selection(slots[:, :, None], valid[:, :, None])


@dataclass(frozen=True, kw_only=True)
class MSA(Indexer):
    """Selects blocks of 128 tokens by the best of their tokens' scores, a set for each KV head.

    There is one index query for each KV head; a token's score is q.k. The query's own block is
    always among the `top`.

    **Source:** MiniMax's sparse attention (arXiv 2606.13392), transformers' minimax_m3_vl: 4
    heads of 128, top 16.
    """

    heads: int = 4
    size: int = 128
    block: int = 128
    top: int = 16

    def blocks(
        self, keys: Array, q: Array, weights: Array, length: Array, kv_heads: int
    ) -> Selection:
        if kv_heads != self.heads:
            raise ValueError(
                f"MSA(heads={self.heads}) needs an index query for each of the {kv_heads} KV heads"
            )
        scores = (
            jnp.einsum("bhe,bse->bhs", q, keys.astype(jnp.float32), precision="highest")
            * weights[..., None]
        )
        visible = jnp.arange(keys.shape[1], dtype=jnp.int32)[None, None] < length[:, None, None]
        scores = jnp.where(visible, scores, -jnp.inf)
        n = -(-keys.shape[1] // self.block)
        scores = jnp.pad(
            scores,
            ((0, 0), (0, 0), (0, n * self.block - scores.shape[2])),
            constant_values=-jnp.inf,
        )
        best = jnp.max(scores.reshape(*scores.shape[:2], n, self.block), axis=-1)
        own = (
            jnp.arange(n, dtype=jnp.int32)[None, None]
            == ((length - 1) // self.block)[:, None, None]
        )
        exists = jnp.broadcast_to(
            jnp.arange(n, dtype=jnp.int32)[None, None] * self.block < length[:, None, None],
            best.shape,
        )
        chosen = ops.top_k(jnp.where(own, jnp.inf, best), exists, min(self.top, n))
        return Selection(chosen.slots[:, :, None], chosen.valid[:, :, None])


@register_dataclass
@dataclass(frozen=True)
class IndexedState(AroundFull):
    """All tokens, the indexer's keys, and what the newest token's query asks."""

    full: FullState
    keys: Array  # dtype[B, 1, capacity / pooled, E]
    tail: Array  # dtype[B, pooled - 1, E] keys of tokens past the last complete block
    q: Array  # f32[B, H, E]
    weights: Array  # f32[B, H]


@dataclass(frozen=True)
class Indexed(Policy):
    """Keeps every token, and attends to the blocks that the model's own indexer selects.

    Every call goes through `attention` of this module. **Differs:** a prompt attends densely,
    and only decode steps select, so a model that was trained to select in its prompts gives
    other outputs past its budget.

    >>> import kvjax
    >>> spec = kvjax.CacheSpec(batch=1, q_heads=24, kv_heads=2, head_dim=256, capacity=512)
    >>> layer = kvjax.init_layer(Indexed(QSA()), spec)
    """

    indexer: Indexer

    def __post_init__(self) -> None:
        check_verbs(
            "Indexed(indexer=...)",
            self.indexer,
            "an indexer",
            ("blocks",),
            "kvjax.contrib.indexed.QSA()",
        )

    def init(self, spec: CacheSpec) -> IndexedState:
        one = self.indexer
        n = self.indexer.pooled
        return IndexedState(
            Full().init(spec),
            jnp.zeros((spec.batch, 1, -(-spec.capacity // n), one.size), spec.dtype),
            jnp.zeros((spec.batch, n - 1, one.size), spec.dtype),
            jnp.zeros((spec.batch, one.heads, one.size), jnp.float32),
            jnp.zeros((spec.batch, one.heads), jnp.float32),
        )

    def ask(self, st: IndexedState, index: Index, count: Array) -> IndexedState:
        """`st` with the index of the first `count` i32[B] tokens, which come next, and the last
        one's query.
        """
        one = self.indexer
        n = self.indexer.pooled
        B, T, _ = index.k.shape
        wanted = (B, T, one.heads, one.size)
        if index.q.shape != wanted or index.k.shape[2] != one.size:
            raise ValueError(
                f"{one} takes index queries {list(wanted)} and keys {[B, T, one.size]}; got q{list(index.q.shape)}, "
                f"k{list(index.k.shape)}"
            )
        left = st.length % n
        k = index.k.astype(st.keys.dtype)
        place = jnp.arange((n - 1 + T) // n * n + n - 1, dtype=jnp.int32)[None]
        source = jnp.where(place < left[:, None], place, n - 1 + place - left[:, None])

        def line(at: Array) -> Array:
            return take_rows(jnp.concatenate([st.tail, k], axis=1)[:, None], at)[:, 0]

        blocks = (left + count) // n
        first = st.length // n
        whole = source[:, : (n - 1 + T) // n * n]
        pooled = jnp.mean(
            line(whole).astype(jnp.float32).reshape(B, -1, n, one.size), axis=2
        ).astype(st.keys.dtype)
        if index.finish is not None:
            pooled = index.finish(
                pooled,
                (first[:, None] + jnp.arange(pooled.shape[1], dtype=jnp.int32)[None]) * n,
            )
        keys = write(st.keys, pooled.astype(st.keys.dtype)[:, None], first, blocks)
        rest = blocks[:, None] * n + jnp.arange(n - 1, dtype=jnp.int32)[None]
        tail = (
            line(jnp.where(rest < left[:, None], rest, n - 1 + rest - left[:, None]))
            if n > 1
            else st.tail
        )
        newest = jnp.maximum(count - 1, 0)
        q = jnp.take_along_axis(index.q, newest[:, None, None, None], axis=1)[:, 0].astype(
            jnp.float32
        )
        weights = (
            jnp.ones(index.q.shape[:3], jnp.float32) if index.weights is None else index.weights
        )
        weights = jnp.take_along_axis(
            weights.astype(jnp.float32), newest[:, None, None], axis=1
        )[:, 0]
        asks = (count > 0)[:, None]
        q = jnp.where(asks[..., None], q, st.q)
        weights = jnp.where(asks, weights, st.weights)
        return replace(st, keys=keys, tail=tail, q=q, weights=weights)

    def prefill(self, st: IndexedState, k: Array, v: Array, lengths: Array) -> IndexedState:
        self._require_index()

    def update(self, st: IndexedState, k: Array, v: Array, active: Array) -> IndexedState:
        self._require_index()

    def _require_index(self) -> NoReturn:
        raise ValueError(
            f"{self} needs the queries and keys of the model's indexer; call kvjax.contrib.indexed.attention with "
            "index=Index(q, k), one token at a time after the prompt"
        )

    def attend(
        self, st: IndexedState, q: Array, step: Step
    ) -> tuple[Array, IndexedState, Info]:
        if step.window is not None:
            raise ValueError(
                f"{self.indexer} selects among all tokens; window={step.window} is for other layers"
            )
        tokens = st.full.tokens
        size = self.indexer.block
        K = q.shape[1]
        chosen = self.indexer.blocks(st.keys[:, 0], st.q, st.weights, st.length, K)
        slots = (
            chosen.slots[..., None] * size
            + jnp.arange(size, dtype=jnp.int32)[None, None, None, None]
        )
        valid = chosen.valid[..., None] & (slots < st.length[:, None, None, None, None])
        shape = (q.shape[0], K, 1, chosen.slots.shape[3] * size)
        slots, valid = (
            jnp.broadcast_to(a.reshape(a.shape[0], -1, 1, shape[3]), shape)
            for a in (slots, valid)
        )
        selection = Selection(jnp.minimum(slots, tokens.slots - 1), valid)
        out = ops.attend_slots(q, tokens.k, tokens.v, selection, logits=step.logits).out
        attended = jnp.sum(valid, axis=(2, 3), dtype=jnp.float32)
        return out, st, Info(attended, selection, positions=jnp.where(valid, slots, -1))

    def attend_stored(self, st: IndexedState, q: Array, step: Step) -> PartialAttention:
        return Full().attend_stored(st.full, q, step)

    def free(self, st: IndexedState) -> Array:
        return Full().free(st.full)


def attention(
    cache: LayerCache,
    q: Array,
    k: Array,
    v: Array,
    *,
    index: Index,
    lengths: ArrayLike | None = None,
    active: ArrayLike | None = None,
    scale: float | None = None,
) -> tuple[Array, LayerCache, Info | None]:
    """`kvjax.attention_info` for a cache of `Indexed`, whose tokens come with their `index`: a
    chunk of a prompt, or one token.

    >>> import kvjax
    >>> spec = kvjax.CacheSpec(batch=1, q_heads=4, kv_heads=1, head_dim=16, capacity=64, dtype="float32")
    >>> layer = kvjax.init_layer(Indexed(MSA(heads=1, size=8, block=8, top=2)), spec)
    >>> q, k = jnp.ones((1, 20, 4, 16)), jnp.ones((1, 20, 1, 16))
    >>> out, layer, _ = attention(layer, q, k, k, index=Index(jnp.ones((1, 20, 1, 8)), jnp.ones((1, 20, 8))))
    >>> layer.length.tolist()
    [20]

    Raises:
      ValueError: a cache of another policy, an index of other shapes, or as `kvjax.attention`.
    """
    policy = cache.policy
    if not isinstance(policy, Indexed):
        raise ValueError(
            f"contrib.indexed.attention is for a cache of Indexed, and this one is of {policy}; call kvjax.attention"
        )
    rows, tokens = q.shape[:2]
    count = row_counts(rows, tokens, lengths, active)
    asked = replace(
        cache,
        state=policy.ask(cache.state, index, count),
        policy=_Asked(policy.indexer),
    )
    out, after, info = attention_info(
        asked, q, k, v, lengths=lengths, active=active, scale=scale
    )
    return out, replace(after, policy=policy), info


class _Asked(Indexed):
    """`Indexed` in a call that has brought its index."""

    def prefill(self, st: IndexedState, k: Array, v: Array, lengths: Array) -> IndexedState:
        return replace(st, full=Full().prefill(st.full, k, v, lengths))

    def update(self, st: IndexedState, k: Array, v: Array, active: Array) -> IndexedState:
        return replace(st, full=Full().update(st.full, k, v, active))
