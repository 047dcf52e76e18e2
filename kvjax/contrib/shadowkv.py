"""ShadowKV: keys as low-rank factors, values in host memory, and a step reads the pages with the
best landmarks.

`MeanPages` has the landmarks, `OutlierRetrieval` selects pages besides those that are always
read, and `LowRank` is the store of factors. The paper learns the basis from the whole prompt;
here the first tokens of a row have it, so that the result does not depend on how a prompt is
split into chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.tree_util import register_dataclass

from kvjax import ops
from kvjax.numerics.blocks import page_means, put_last, sum_pairs, whole_units, write
from kvjax.numerics.derivatives import refuse_derivative
from kvjax.numerics.partial import Logits, PartialAttention, attention_logits
from kvjax.numerics.rotate import turn_positions
from kvjax.numerics.selection import (
    Candidates,
    GroupReduce,
    PackedSelection,
    Selection,
    by_row,
    unpack,
)
from kvjax.numerics.types import Rope
from kvjax.ops.chunk import attend_blocks
from kvjax.policies import PerLayer
from kvjax.policies.policy import Info, Step
from kvjax.policies.retrieval import Retrieval
from kvjax.policies.zones import Visible, ZonedState
from kvjax.presets.preset import published
from kvjax.presets.settings import Layers, over_layers, plain_rope
from kvjax.selectors import Selector
from kvjax.selectors.pending import Paged
from kvjax.sharding.context import Axis
from kvjax.spec import CacheSpec, keep_ints, require_int
from kvjax.stores import Dense
from kvjax.stores.demotion import Demotion, Fifo
from kvjax.stores.host import HostOffload
from kvjax.stores.store import Store
from kvjax.validation import check_rope, check_verbs

__all__ = ["LowRank", "MeanPages", "OutlierRetrieval", "shadowkv"]


@published(
    "keys of low rank, values in host memory; attends to outliers and the best pages",
    paper="ShadowKV 2024",
    paper_setting="sink=0",
    released="budget=1248,sink=0,outliers=24",
)
def shadowkv(
    budget: int = 2048,
    *,
    rank: int = 160,
    page: int = 8,
    outliers: int = 48,
    rope_theta: float | None = None,
    learn: int = 1024,
    group_reduce: GroupReduce = "max_softmax",
    sink: int = 4,
    local: int = 32,
    host: bool = True,
    layers: Layers = Layers(dense=0),
) -> PerLayer:
    """ShadowKV: keys as low-rank factors, values in host memory, and a step reads the pages
    with the best landmarks.

    The landmark of a page is the mean of its keys. Keys of selected pages are rebuilt from
    their factors, and their values come from host memory. The budget counts the outliers. Keys
    after RoPE are not of low rank and lose much more precision: pass `rope_theta`.

    Args:
      rank: coefficients of a token's keys, for all heads together.
      outliers: pages whose keys are farthest from their landmark; kept exact on the device and
        read by every step.
      rope_theta: theta of a model with plain RoPE: keys are then factored before their
        rotation, as in the paper. For other kinds of RoPE see `LowRank(rope=...)`.
      learn: number of first tokens from which the basis is learnt; also the tokens that are
        factored together.
      host: keep values in host memory; False: on the device.

    **Source:** ShadowKV (Sun et al. 2024, arXiv 2410.21465): rank 160, pages of 8, 48 outliers.
    **Differs:** see `LowRank`. The paper has no sink, and its budget counts neither outliers
    nor local window: its 1024 tokens are 1024 + 8 x 24 + 32 here, with outliers=24 and sink=0,
    as its released code has 24 outliers per 1024 tokens.

    **Checklist:** unit: pages of 8, for each KV head; besides: sink, window and 48 pages of
    outliers; zones: sink 4, window 32; budget: these and the selected pages; generated: compete
    by exact scores until a block of 1024 is factored.
    """
    require_int("shadowkv(budget=...)", budget, at_least=1)
    values = HostOffload(page=page) if host else Dense()
    policy = OutlierRetrieval(
        selector=MeanPages(page=page, group_reduce=group_reduce),
        store=LowRank(
            rank=rank,
            page=page,
            outliers=outliers,
            learn=learn,
            rope=plain_rope("shadowkv", rope_theta),
            values=values,
        ),
        budget=budget,
        sink=sink,
        local=local,
        demote=Fifo(leave=learn),
    )
    return over_layers("shadowkv", layers, policy)


EMPTY = 2.0  # above every cosine: a place that holds no page


_LARGEST_HALF = float(jnp.finfo(jnp.float16).max)


def _reach(numbers: int) -> float:
    """A power of two that is at least the length of a vector of so many ones."""
    return 2.0 ** math.ceil(math.log2(numbers) / 2)


@register_dataclass
@dataclass(frozen=True)
class LowRankBlock:
    """Keys of all heads as coefficients of one basis, and values in a separate store.

    The basis and the exact pages have no slots, so they are flat.
    """

    coefficients: Array  # dtype[B, 1, S, r]
    # f32[B, r K D] orthogonal rows of the keys of all heads, side by side: of length 1, or with
    # float16, which cannot hold coefficients of the largest keys, of a greater one
    basis: Array
    place: Array  # i32[B, K, P] which of the O exact pages a page is; -1 for none
    exact_k: Array  # dtype[B, K O Z D]
    exact_v: Array  # dtype[B, K O Z D]
    cosine: Array  # f32[B, K O] smallest cosine of a key of an exact page to the page's mean, in ascending order
    values: Any  # the state of the store of values
    count: Array  # i32[B] slots [0, count) are valid

    @property
    def slots(self) -> int:
        return self.coefficients.shape[2]


@dataclass(frozen=True, kw_only=True)
class LowRank(Store):
    """Keys as products of two factors of rank `rank`, on the device; values in the store
    `values`.

    The keys of all KV heads of a token are one vector of K D channels. A row's basis spans the
    directions of the `rank` largest singular values of the first `learn` vectors of its
    history; each token has `rank` coefficients in it, and a step rebuilds the keys that it
    reads. For each head, the `outliers` pages of `page` tokens whose keys are farthest from
    their mean, by the smallest cosine to it, are kept exact, keys and values. When a later page
    displaces one of them, that page is read like all others.

    Keys have a low rank before their rotation by RoPE. With `rope`, the rotary embedding of the
    model, keys are rotated back before they are projected, and rotated again when they are
    rebuilt. Without it the rotated keys are projected, as the cache gets them, and lose more
    precision. A rank of K D or more loses nothing.

    A token takes `rank` values of the cache's dtype on the device, for all heads together, and
    its bytes in `values`, a store that keeps the two halves of a value as a key and a value of
    D / 2 channels.

    **Source:** ShadowKV (Sun et al. 2024, arXiv 2410.21465): rank 160, pages of 8, 48 outliers,
    values in host memory. **Differs:** the paper factors the keys of a whole prompt and keeps
    generated tokens exact. Here the basis is that of the first `learn` tokens, and generated
    tokens are projected too. Tokens are rotated by their slots; the constant angle between
    slots and positions changes no rank.
    """

    rank: int = 160
    page: int = 8
    outliers: int = 48
    learn: int = 1024
    rope: Rope | None = None
    values: Store = HostOffload(page=8)

    def __post_init__(self) -> None:
        keep_ints(self, rank=1, page=1, outliers=0, learn=1)
        check_verbs(
            "LowRank(values=...)",
            self.values,
            "a store",
            ("init", "append", "gather"),
            "kvjax.Dense()",
        )
        check_rope("LowRank(rope=...)", self.rope)
        if self.page % self.values.page:
            raise ValueError(
                f"LowRank(page={self.page}) is not a multiple of the pages of {self.values}; use "
                f"{type(self.values).__name__}(page={self.page})"
            )
        if self.learn % self.page or self.learn < self.rank:
            least = -(-self.rank // self.page) * self.page
            raise ValueError(
                f"LowRank(learn={self.learn}) must be whole pages of {self.page} tokens and at least rank={self.rank}; "
                f"use a multiple of {self.page} from {least} on"
            )

    def check(self, spec: CacheSpec, chunk: int) -> None:
        if chunk % self.learn:
            raise ValueError(
                f"LowRank(learn={self.learn}) needs chunks of a multiple of {self.learn} tokens, got chunks of "
                f"{chunk}; use Fifo(leave={self.learn}), or a learn that divides {chunk}"
            )
        self.values.check(self._halves(spec), chunk)

    def init(self, spec: CacheSpec, slots: int) -> LowRankBlock:
        B = spec.batch
        K = spec.kv_heads
        D = spec.head_dim
        exact = (B, K * self.outliers * self.page * D)
        rank = self._rank(spec)
        return LowRankBlock(
            coefficients=jnp.zeros((B, 1, slots, rank), spec.dtype),
            basis=jnp.zeros((B, rank * K * D), jnp.float32),
            place=jnp.full((B, K, slots // self.page), -1, jnp.int32),
            exact_k=jnp.zeros(exact, spec.dtype),
            exact_v=jnp.zeros(exact, spec.dtype),
            cosine=jnp.full((B, K * self.outliers), EMPTY, jnp.float32),
            values=self.values.init(self._halves(spec), slots),
            count=jnp.zeros(B, jnp.int32),
        )

    @property
    def joins_heads(self) -> bool:
        """True: the keys of all heads share one basis, so no head can be computed without the
        others.
        """
        return True

    # ------------------------------------------------------------------------------------------------------- storing

    def append(self, st: LowRankBlock, k: Array, v: Array, count: Array) -> LowRankBlock:
        k, v = refuse_derivative(
            f"{self} keeps keys as factors of low rank, which have no derivative; use the store Dense(), or "
            "jax.lax.stop_gradient on k and v",
            k,
            v,
        )
        count = jnp.minimum(count, st.slots - st.count)
        plain = self._turn(
            k.astype(jnp.float32),
            st.count[:, None] + jnp.arange(k.shape[2], dtype=jnp.int32)[None],
            back=True,
        )
        starts = (st.count == 0) & (count > 0)
        half = st.coefficients.dtype == jnp.float16

        def learnt(basis: Array) -> Array:
            # Padding may be NaN.
            first = jnp.where(starts[:, None, None, None], plain[:, :, : self.learn], 0.0)
            new = self._learn(first)
            if half:
                new *= _reach(new.shape[2])
            new = new.reshape(basis.shape)
            return jnp.where(starts[:, None], new, basis)

        basis = lax.cond(jnp.any(starts), learnt, lambda basis: basis, st.basis)
        coefficients = self._project(plain, basis)
        if half:
            # By the basis itself, as rows of older saves have one of length 1.
            lengths = jnp.sum(
                jnp.square(
                    basis.reshape(st.coefficients.shape[0], st.coefficients.shape[3], -1)
                ),
                axis=-1,
            )
            coefficients /= jnp.maximum(lengths, 1.0)[:, None, None]
        coefficients = coefficients.astype(st.coefficients.dtype)
        stored = replace(
            st,
            coefficients=write(st.coefficients, coefficients, st.count, count),
            basis=basis,
            values=self.values.append(st.values, *_halves(v), count),
            count=st.count + count,
        )
        return self._keep(stored, k, v, st.count, count) if self.outliers else stored

    def _learn(self, k: Array) -> Array:
        """f32[B, r, K D]: the directions of the largest singular values of keys [B, K, n, D]."""
        rows = _side_by_side(k)
        products = jnp.einsum("bsi,bsj->bij", rows, rows, precision="highest")
        _, vectors = jnp.linalg.eigh(products)  # in ascending order
        return jnp.swapaxes(
            jnp.flip(vectors, axis=2)[:, :, : min(self.rank, rows.shape[2])], 1, 2
        )

    def _project(self, k: Array, basis: Array) -> Array:
        """f32[B, 1, T, r] of keys f32[B, K, T, D]; a block of `learn` tokens at a time, so that
        the bits do not depend on the length of the prompt."""
        B, K, T, D = k.shape
        basis = basis.reshape(B, -1, K * D)
        blocks = jnp.moveaxis(
            _side_by_side(k).reshape(B, T // self.learn, self.learn, K * D), 1, 0
        )
        found = lax.map(
            lambda block: jnp.einsum("bsi,bri->bsr", block, basis, precision="highest"), blocks
        )
        return jnp.moveaxis(found, 0, 1).reshape(B, 1, T, -1)

    def _keep(
        self, st: LowRankBlock, k: Array, v: Array, at: Array, count: Array
    ) -> LowRankBlock:
        """Updates the exact pages: those of smallest cosine among the old ones and the pages of
        k, v [B, K, T, D].

        Ties go to the first page.
        """
        B, K, T, D = k.shape
        Z = self.page
        limit = self.outliers
        n = T // self.page
        new_pages = at[:, None] // Z + jnp.arange(n, dtype=jnp.int32)[None]
        new = jnp.arange(n, dtype=jnp.int32)[None] < (count // Z)[:, None]
        cosine = jnp.where(new[:, None], _smallest_cosine(k, Z), EMPTY)
        line = jnp.concatenate([st.cosine.reshape(B, K, limit), cosine], axis=2)
        # Old pages are first: they came earlier.
        order = jnp.argsort(line, axis=2, stable=True)[:, :, :limit]
        kept = jnp.take_along_axis(line, order, axis=2)
        pages = jnp.concatenate(
            [self._pages(st), jnp.broadcast_to(new_pages[:, None], (B, K, n))], axis=2
        )
        pages = jnp.where(
            kept < EMPTY, jnp.take_along_axis(pages, order, axis=2), st.place.shape[2]
        )
        place = put_last(
            jnp.full_like(st.place, -1), pages, jnp.arange(limit, dtype=jnp.int32)[None, None]
        )

        def take(resident: Array, x: Array) -> Array:
            both = jnp.concatenate(
                [
                    resident.reshape(B, K, limit, Z * D),
                    x.reshape(B, K, n, Z * D).astype(resident.dtype),
                ],
                axis=2,
            )
            mine = jnp.take_along_axis(both, order[..., None], axis=2)
            return jnp.where(
                (kept < EMPTY)[..., None], mine, jnp.zeros((), resident.dtype)
            ).reshape(B, -1)

        return replace(
            st,
            place=place,
            exact_k=take(st.exact_k, k),
            exact_v=take(st.exact_v, v),
            cosine=kept.reshape(B, -1),
        )

    # ------------------------------------------------------------------------------------------------------- reading

    def kept(self, st: LowRankBlock) -> Array:
        """bool[B, K, P]: pages that are kept exact."""
        return (st.place >= 0) & (st.place < self.outliers)

    def kept_slots(self, st: LowRankBlock) -> Selection:
        """The slots [B, K, 1, O Z] of the pages that are kept exact, in the order of the exact
        pages.
        """
        B, K, _ = st.place.shape
        Z = self.page
        pages = self._pages(st)
        slots = pages[..., None] * Z + jnp.arange(Z, dtype=jnp.int32)[None, None, None]
        valid = jnp.broadcast_to((st.cosine.reshape(B, K, -1) < EMPTY)[..., None], slots.shape)
        return Selection(slots.reshape(B, K, 1, -1), valid.reshape(B, K, 1, -1))

    def _pages(self, st: LowRankBlock) -> Array:
        """i32[B, K, O]: the number of each exact page; 0 where a place is empty."""
        B, K, P = st.place.shape
        place = jnp.where(self.kept(st), st.place, self.outliers)
        return put_last(
            jnp.zeros((B, K, self.outliers), jnp.int32),
            place,
            jnp.arange(P, dtype=jnp.int32)[None, None],
        )

    def attend_chunk(
        self, st: LowRankBlock, q: Array, start: Array | None, *, logits: Logits
    ) -> PartialAttention:
        B, K = st.place.shape[:2]

        def read(st: LowRankBlock, first: Array | int, size: int) -> tuple[Array, Array]:
            slots = jnp.asarray(first, jnp.int32) + jnp.arange(size, dtype=jnp.int32)
            slots = jnp.broadcast_to(slots, (B, K, 1, size))
            return self.gather(st, Selection(slots, jnp.ones_like(slots, bool)))

        return attend_blocks(
            q, st, start, st.count, read=read, slots=st.slots, unit=self.page, logits=logits
        )

    def gather(self, st: LowRankBlock, selection: Selection) -> tuple[Array, Array]:
        B, K, _ = st.place.shape
        slots = selection.slots
        slots = slots.reshape(B, K, -1)
        coefficients = jnp.take_along_axis(
            st.coefficients, slots[..., None], axis=2, mode="clip"
        )
        # The basis as precise as the keys.
        basis = st.basis.reshape(B, coefficients.shape[-1], K, -1).astype(coefficients.dtype)
        k = jnp.einsum(
            "bksr,brkd->bksd",
            coefficients,
            basis,
            precision="highest",
            preferred_element_type=jnp.float32,
        )
        k = self._turn(k, slots, back=False)
        if coefficients.dtype == jnp.float16:  # what is near the largest number may lie beyond
            k = jnp.clip(k, -_LARGEST_HALF, _LARGEST_HALF)
        # Slots that are not valid may give any value. Both halves are one value.
        v = jnp.concatenate(self.values.gather(st.values, selection), axis=-1)
        if not self.outliers:
            return k.astype(st.coefficients.dtype), v
        page = jnp.minimum(slots // self.page, st.place.shape[2] - 1)
        place = jnp.take_along_axis(st.place, page, axis=2)
        exact = (place >= 0) & (place < self.outliers)
        at = jnp.where(exact, place * self.page + slots % self.page, 0)

        def with_exact(x: Array, resident: Array) -> Array:
            resident = resident.reshape(B, K, self.outliers * self.page, -1)
            own = jnp.take_along_axis(resident, at[..., None], axis=2)
            return jnp.where(exact[..., None], own, x.astype(resident.dtype))

        return with_exact(k, st.exact_k), with_exact(v, st.exact_v)

    def decoded(self, k: Array, v: Array) -> tuple[Array, Array]:
        """A row's first chunks k, v [B, K, T, D] as they are read after all of them are stored."""
        B, K, T, D = k.shape
        st = self.init(
            CacheSpec(batch=B, q_heads=K, kv_heads=K, head_dim=D, capacity=T, dtype=k.dtype), T
        )
        st = self.append(st, k, v, jnp.full(B, T, jnp.int32))
        slots = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, K, 1, T))
        return self.gather(st, Selection(slots, jnp.ones_like(slots, bool)))

    # --------------------------------------------------------------------------------------------------------- parts

    def _rank(self, spec: CacheSpec) -> int:
        return min(self.rank, spec.kv_heads * spec.head_dim)

    @staticmethod
    def _halves(spec: CacheSpec) -> CacheSpec:
        """The spec of the store `values`, which keeps the two halves of a value as a key and a
        value.
        """
        if spec.head_dim % 2:
            raise ValueError(
                f"LowRank splits values into halves, got head_dim={spec.head_dim}; use an even one"
            )
        return replace(spec, head_dim=spec.head_dim // 2)

    def _turn(self, k: Array, slots: Array, *, back: bool) -> Array:
        """Keys f32[B, K, T, D] rotated to their slots i32[B, T] or [B, K, T], or `back` from
        them; unchanged without `rope`."""
        slots = slots[:, None] if slots.ndim == 2 else slots
        return turn_positions(k, -slots if back else slots, self.rope)


def _side_by_side(k: Array) -> Array:
    """f32[B, T, K D] of keys [B, K, T, D]."""
    B, K, T, D = k.shape
    return jnp.swapaxes(k.astype(jnp.float32), 1, 2).reshape(B, T, K * D)


def _halves(v: Array) -> tuple[Array, Array]:
    low, high = jnp.split(v, 2, axis=-1)
    return low, high


def _smallest_cosine(k: Array, page: int) -> Array:
    """f32[B, K, P]: the smallest cosine of a key of k [B, K, T, D] to the mean of its page."""
    B, K, T, D = k.shape
    keys = k.reshape(B, K, T // page, page, D).astype(jnp.float32)
    means = page_means(k, page)[:, :, :, None]

    def dot(a: Array, b: Array) -> Array:
        return sum_pairs(jnp.moveaxis(a * b, 4, 3))

    norms = jnp.sqrt(dot(keys, keys) * dot(means, means))
    return jnp.min(dot(keys, means) / jnp.maximum(norms, 1e-30), axis=3)


@dataclass(frozen=True, kw_only=True)
class MeanPages(Paged):
    """Scores pages of `page` tokens by the mean of their keys: the mean of the exact scores of
    a page.

    Index: D values of the cache's dtype per page and KV head.

    **Source:** ShadowKV (Sun et al. 2024, arXiv 2410.21465), landmarks: pages of 8, the maximum
    of softmax over the group. **Differs:** a page is indexed with its chunk; until then it
    competes by the best exact score of its tokens.
    """

    page: int = 8
    group_reduce: GroupReduce = "max_softmax"

    def init(self, spec: CacheSpec, slots: int) -> Array:
        return jnp.zeros(
            (spec.batch, spec.kv_heads, slots // self.page, spec.head_dim), spec.dtype
        )

    def append(self, ix: Array, k: Array, at: Array, count: Array) -> Array:
        means = page_means(k, self.page).astype(ix.dtype)
        return write(ix, means, at // self.page, count // self.page)

    def score(self, ix: Array, q: Array, *, logits: Logits) -> Array:
        # Behind a barrier, or XLA would copy all landmarks to join them with the pending keys
        # for one product.
        ix = ix.astype(q.dtype) if self.group_reduce == "mean_query" else ix
        return attention_logits(lax.optimization_barrier(q), ix, logits)


@dataclass(frozen=True, kw_only=True)
class OutlierRetrieval(Retrieval):
    """A `Retrieval` that also attends, in every step, to the pages that its store keeps exact.

    These pages are the outliers, which their landmarks describe worst; they are not selected a
    second time. The budget counts them: it covers sink, local window, outliers and what the
    selector finds.

    **Source:** ShadowKV (Sun et al. 2024, arXiv 2410.21465), Algorithm 2.

    >>> import kvjax
    >>> spec = kvjax.CacheSpec(batch=1, q_heads=4, kv_heads=2, head_dim=64, capacity=4096)
    >>> policy = kvjax.contrib.shadowkv.OutlierRetrieval(store=kvjax.contrib.shadowkv.LowRank(rank=64), budget=1024)
    >>> layer = kvjax.init_layer(policy, spec)
    """

    selector: Selector = MeanPages()
    store: Store = LowRank()
    demote: Demotion = Fifo(leave=1024)

    shares_prefixes = False  # a row has its own basis and outliers

    def __post_init__(self) -> None:
        verbs = ("init", "append", "kept", "kept_slots")
        example = "kvjax.contrib.shadowkv.LowRank()"
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
        self, st: ZonedState, seen: Visible, *, steps: int = 1, num_sorted_last: int = 0
    ) -> Candidates:
        every = super().candidates(st, seen, steps=steps, num_sorted_last=num_sorted_last)
        return replace(every, last=self.exact_store.kept(st.store)) if self.beside else every

    def select(
        self, st: ZonedState, q: Array, step: Step, *, num_sorted_last: int = 0
    ) -> Selection | PackedSelection:
        every = super().select(st, q, step, num_sorted_last=num_sorted_last)
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
        selection = unpack(selection)
        seen = self.visible(st, step.window)
        kept = self.exact_store.kept_slots(st.store)
        kept = kept._replace(valid=kept.valid & (kept.slots >= by_row(seen.store)))
        read, k, v = self._gathered(st, selection, kept.valid)
        out = ops.attend_zones(
            q,
            k,
            v,
            read,
            seen.recent,
            seen.sink,
            self.local,
            sinks=step.sinks,
            logits=step.logits,
        )
        return out, st, self._with_outliers(st, kept, self.info(st, seen, selection))

    def _gathered(
        self, st: ZonedState, selection: Selection, kept: Array
    ) -> tuple[Selection, Array, Array]:
        """The slots that a step reads, in keys and values of the selected tokens and the exact
        pages, and after them in the recent block; and those keys and values. `kept` says which
        of the exact tokens it reads."""
        stored = selection.slots < st.store.slots
        B, K, H, M = selection.slots.shape
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
            attended=info.attended
            + jnp.sum(valid[:, :, 0], axis=-1, dtype=jnp.int32).astype(jnp.float32),
            positions=jnp.concatenate([info.positions, at], axis=-1),
        )
