"""Does an index age? Selectors that learn from a prompt, compared with ParisKV's rotation,
along a long text.

An index by learnt centroids (PQCache, and most vector search) fits the keys that it has seen.
As a generation goes on, its keys may leave that distribution, and recall falls. ParisKV's codes
come from geometry and cannot age. But recall also falls because the history grows, for any
index. To separate the two, each learnt index is measured twice: with centroids of the prompt,
and with centroids learnt again from all of the text so far. The difference is drift.

`Learnt` is a selector like any other and can be used in `kvjax.Retrieval`; it is here because
only comparisons need it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from benchmarks.claims.live import take
from kvjax.contrib.pqcache import ProductCodes
from kvjax.evaluate.capture import Live
from kvjax.evaluate.recall import Reads, reads
from kvjax.evaluate.store import Progress
from kvjax.numerics.blocks import write
from kvjax.numerics.partial import Logits
from kvjax.numerics.rotate import RADII, Directions, patterns, radius_table, rotate, rotate_few
from kvjax.numerics.selection import GROUP_REDUCES, GroupReduce
from kvjax.policies import Retrieval
from kvjax.selectors import Exact, MinMaxPages, Paris, Selector
from kvjax.selectors.paris import TIERS, ParisIndex
from kvjax.spec import CacheSpec, require_int
from kvjax.stores.demotion import Fifo

By = Literal["products", "votes"]
TOP = 100  # ParisKV's k
PAGE = 16  # of Quest
BLOCK = 1024  # of kvjax's PQCache


class Codebook(NamedTuple):
    """Centroids of each subspace, and which one each key is nearest to."""

    centroids: Array  # f32[B, K, N, C, m]
    ids: Array  # u8[B, K, S, N]
    counts: Array  # i32[B, K, N, C] keys of each centroid


@dataclass(frozen=True, kw_only=True)
class Learnt(Selector):
    """Scores tokens by centroids of subspaces, learnt by k-means from the first keys that a row
    appends.

    A key is stored as its nearest centroid in each subspace of `channels` channels. With
    by="products" its score is the sum of the products of these centroids with the query: an
    estimate of scale * q.k. With by="votes" it is ParisKV's tiers of votes, with learnt
    centroids in place of sign patterns, `rho` of the history in reach. With `normalise` keys
    have length 1 before they are clustered, and with a `seed` they are rotated as ParisKV's
    are: the "N" and "N+R" of its Fig. 10. Its sign patterns are the same with and without
    normalisation. The centroids do not change when more keys are appended: they are learnt from
    a prompt that is stored in one call. So, unlike other selectors, it depends on how the keys
    are split into calls.

    **Source:** PQCache (Zhang et al. 2024): products, 2 subspaces, 6 bits, k-means at prefill,
    old centroids for new keys. **Differs:** k-means starts from evenly spaced keys and makes
    `rounds` rounds of Lloyd's algorithm.
    """

    channels: int = 8
    bits: int = 8
    by: By = "products"
    rounds: int = 10
    rho: float = 0.25
    normalise: bool = False
    seed: int | None = None  # of the rotation; None: no rotation
    group_reduce: GroupReduce = "mean_query"

    def __post_init__(self) -> None:
        for name in ("channels", "bits", "rounds"):
            require_int(f"Learnt({name}=...)", getattr(self, name), at_least=1)
        if self.bits > 8:
            raise ValueError(
                f"Learnt(bits={self.bits}): a centroid's number is a byte; use at most 8 bits"
            )
        if self.by not in get_args(By):
            raise ValueError(f"Learnt(by={self.by!r}) must be one of {', '.join(get_args(By))}")
        if self.group_reduce not in GROUP_REDUCES:
            raise ValueError(
                f"Learnt(group_reduce={self.group_reduce!r}) must be one of {', '.join(GROUP_REDUCES)}"
            )

    def check(self, spec: CacheSpec, chunk: int) -> None:
        if spec.head_dim % self.channels:
            raise ValueError(
                f"Learnt(channels={self.channels}) does not divide head_dim={spec.head_dim}"
            )

    def init(self, spec: CacheSpec, slots: int) -> Codebook:
        lead, N, C = (spec.batch, spec.kv_heads), spec.head_dim // self.channels, 2**self.bits
        return Codebook(
            jnp.zeros((*lead, N, C, self.channels), jnp.float32),
            jnp.zeros((*lead, slots, N), jnp.uint8),
            jnp.zeros((*lead, N, C), jnp.int32),
        )

    def append(self, ix: Codebook, k: Array, at: Array, count: Array) -> Codebook:
        keys = self._split(k)  # [B, K, N, T, m]
        valid = jnp.arange(k.shape[2])[None] < count[:, None]
        first = (at == 0) & (count > 0)

        def learn() -> Array:
            found = jax.vmap(partial(k_means, centroids=2**self.bits, rounds=self.rounds))(
                keys, valid
            )
            return jnp.where(first[:, None, None, None, None], found, ix.centroids)

        centroids = lax.cond(jnp.any(first), learn, lambda: ix.centroids)
        ids = jax.vmap(jax.vmap(jax.vmap(nearest)))(keys, centroids)  # [B, K, N, T]
        seen = jax.vmap(jax.vmap(jax.vmap(partial(jnp.bincount, length=2**self.bits))))
        shown = jnp.broadcast_to(valid[:, None, None], ids.shape).astype(jnp.int32)
        counts = ix.counts + seen(ids, shown)
        return Codebook(
            centroids,
            write(ix.ids, jnp.moveaxis(ids, 2, 3).astype(jnp.uint8), at, count),
            counts,
        )

    def score(self, ix: Codebook, q: Array, *, logits: Logits) -> Array:
        parts = self._split(q.astype(jnp.float32))  # [B, K, N, G, m]
        products = jnp.einsum("bkngm,bkncm->bkgnc", parts, ix.centroids, precision="highest")
        worth = (
            products * logits.scale
            if self.by == "products"
            else self._votes(products, ix.counts)
        )
        ids = jnp.swapaxes(ix.ids, 2, 3)[:, :, None].astype(jnp.int32)  # [B, K, 1, N, S]
        index = jnp.broadcast_to(ids, (*products.shape[:4], ids.shape[-1]))
        return jnp.sum(jnp.take_along_axis(worth, index, axis=-1), axis=3)

    def _votes(self, products: Array, counts: Array) -> Array:
        """f32[B, K, G, N, C]: one for each tier whose reach exceeds the keys of better
        centroids.
        """
        order = jnp.argsort(-products, axis=-1)
        held = jnp.take_along_axis(
            jnp.broadcast_to(counts[:, :, None], products.shape), order, axis=-1
        )
        better = jnp.take_along_axis(
            lax.cumsum(held, axis=4) - held, jnp.argsort(order, axis=-1), axis=-1
        )
        history = jnp.sum(counts, axis=-1)[:, :, None, :, None, None].astype(jnp.float32)
        shares = (self.rho * TIERS["tiers"] / 20).astype(np.float32).reshape(1, 1, 1, 1, 1, -1)
        reach = jnp.ceil(history * shares).astype(jnp.int32)
        return jnp.sum(better[..., None] < reach, axis=-1, dtype=jnp.float32)

    def _split(self, x: Array) -> Array:
        """[B, K, T, D], normalised and rotated, as [B, K, N, T, m]."""
        if self.normalise:
            x = x / jnp.maximum(
                jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True), 1e-8
            )
        if self.seed is not None:
            x = rotate(x, self.seed)
        return jnp.swapaxes(x.reshape(*x.shape[:3], -1, self.channels), 2, 3).astype(
            jnp.float32
        )

    def bytes_per_token(self, spec: CacheSpec) -> float:
        return float(spec.kv_heads * spec.head_dim // self.channels)


def nearest(x: Array, centroids: Array) -> Array:
    """i32[T]: the nearest of centroids [C, m] to each of x [T, m]; on a tie, the first."""
    return jnp.argmin(_distances(x, centroids), axis=-1)


def _distances(x: Array, centroids: Array) -> Array:
    """f32[T, C]: squared distances, less the squared length of x, which ranks nothing."""
    products = jnp.einsum("tm,cm->tc", x, centroids, precision="highest")
    return jnp.sum(centroids * centroids, axis=-1)[None] - 2 * products


def k_means(x: Array, valid: Array, *, centroids: int, rounds: int) -> Array:
    """f32[K, N, C, m]: Lloyd's algorithm on x f32[K, N, T, m] where `valid` bool[T], a subspace
    at a time.

    Starts from evenly spaced valid points. A centroid that no point is nearest to stays where
    it is.
    """
    count = jnp.sum(valid)
    place = jnp.argsort(~valid, stable=True)  # valid points first
    start = place[(jnp.arange(centroids) * count) // centroids]

    def one(points: Array) -> Array:
        def step(_: Array, found: Array) -> Array:
            # A product with a 0/1 matrix of membership: on CPU an argmin and a scatter take ten
            # times as long. A point equally near to two centroids counts for both.
            far = _distances(points, found)
            owned = ((far == jnp.min(far, axis=-1, keepdims=True)) & valid[:, None]).astype(
                jnp.float32
            )
            total, size = (
                jnp.einsum("tc,tm->cm", owned, points, precision="highest"),
                jnp.sum(owned, axis=0)[:, None],
            )
            return jnp.where(size > 0, total / jnp.maximum(size, 1.0), found)

        return lax.fori_loop(0, rounds, step, points[start])

    K, N, T, m = x.shape
    return lax.map(one, x.reshape(K * N, T, m)).reshape(K, N, centroids, m)


class VotingIndex(NamedTuple):
    """ParisKV's index, and the length of each block of each key."""

    codes: Directions
    counts: Array
    limits: Array
    candidates: Array
    lengths: Array  # f32[B, K, S, N] of the rotated unit key, times the key's own length if keys are not normalised


@dataclass(frozen=True, kw_only=True)
class Voting(Paris):
    """ParisKV with other centroids in its vote, which its section 5.4 and Proposition 4.1 name
    and its default leaves out: `directions` is K_omega, `radii` K_r.

    The paper does not say how fewer directions are chosen. Here they are the sign patterns of a
    block's first channels; the others count as 0, and after the rotation all channels are
    alike. Several radii are those by which `radius_table` codes the lengths of blocks. Without
    `normalise`, a key's centroids have the key's length. A vote sorts all keys by their
    centroids' products with the query, so it is slow; ranks and tiers are those of Paris.
    """

    directions: int = 256
    radii: int = 1
    normalise: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.directions not in [2**n for n in range(1, self.subspace + 1)]:
            raise ValueError(
                f"Voting(directions={self.directions}) must be a power of 2, at most {2**self.subspace}"
            )
        if self.radii not in (1, RADII):
            raise ValueError(f"Voting(radii={self.radii}) must be 1 or {RADII}")

    def init(self, spec: CacheSpec, slots: int) -> Any:
        shape = (spec.batch, spec.kv_heads, slots, spec.head_dim // self.subspace)
        return VotingIndex(*super().init(spec, slots), jnp.zeros(shape, jnp.float32))

    def append(self, ix: Any, k: Array, at: Array, count: Array) -> Any:
        base = super().append(ParisIndex(*ix[:4]), k, at, count)
        keys = k.astype(jnp.float32)
        size = jnp.maximum(jnp.linalg.norm(keys, axis=-1, keepdims=True), 1e-8)
        rotated = keys / size if self.seed is None else rotate(keys / size, self.seed)
        length = jnp.linalg.norm(rotated.reshape(*k.shape[:3], -1, self.subspace), axis=-1)
        if self.radii == 1:
            length = jnp.ones_like(length)
        else:
            edges, centres = radius_table(self.subspace, k.shape[3])
            length = jnp.asarray(centres, jnp.float32)[
                jnp.searchsorted(jnp.asarray(edges, jnp.float32), length)
            ]
        return VotingIndex(
            *base, write(ix.lengths, length if self.normalise else length * size, at, count)
        )

    def _votes(self, ix: Any, q: Array) -> Array:
        rotated = q.astype(jnp.float32) if self.seed is None else rotate_few(q, self.seed)
        used = self.directions.bit_length() - 1
        parts = rotated.reshape(*q.shape[:3], -1, self.subspace)[..., :used]  # [B, K, G, N, m]
        ids = patterns(ix.codes.signs, self.subspace)
        bits = (
            ids[..., None] >> jnp.arange(used, dtype=jnp.uint8).reshape(1, 1, 1, 1, -1)
        ) & jnp.uint8(1)
        signs = jnp.where(bits == 1, 1.0, -1.0)
        products = jnp.einsum("bkgnm,bksnm->bkgns", parts, signs, precision="highest")
        n = self._length(ix.counts)
        stored = jnp.arange(ids.shape[2])[None] < n[:, None]
        products = products * jnp.swapaxes(ix.lengths, 2, 3)[:, :, None]
        products = jnp.where(stored[:, None, None, None], products, -jnp.inf)
        rising = jnp.sort(products, axis=-1)
        place = jax.vmap(partial(jnp.searchsorted, side="right"))
        S = ids.shape[2]
        better = S - place(rising.reshape(-1, S), products.reshape(-1, S)).reshape(
            products.shape
        )
        tiers = jnp.sum(
            better[..., None] < ix.limits[:, None, None, None, None], axis=-1, dtype=jnp.uint8
        )
        return jnp.sum(tiers, axis=3, dtype=jnp.uint8)


# ------------------------------------------------------------------------------------------------------- measurements


def policy(selector: Selector, *, chosen: int = TOP) -> Retrieval:
    """ParisKV's zones around any selector: 4 sink tokens, the newest 128, and `chosen` of the
    history.
    """
    leave = 32 if selector.unit == 1 else selector.unit
    return Retrieval(
        selector=selector,
        budget=4 + 128 + chosen,
        sink=4,
        local=128,
        demote=Fifo(leave=leave),
        dense_below=0,
    )


def drift(
    live: Live,
    *,
    prompt: int,
    candidates: int = 2048,
    rounds: int = 10,
    progress: Progress | None = None,
) -> dict[str, Reads]:
    """Recall of the exact top 100 of the history along `live`, for indexes that begin with the
    first `prompt` tokens.

    "prompt" learns centroids from the prompt alone, "anew" from all of the history at each run
    of steps. Recall is that of 100 tokens that the whole index selects, or of `candidates`
    tokens by votes alone (names with "candidates"). "k-means" has ParisKV's subspaces of 8
    channels with 256 centroids each; "PQCache" has 2 with 64. "PQCache, by block" is kvjax's:
    each block of tokens has its own centroids, and tokens that do not fill one are scored
    exactly. "Quest" reads the whole pages that fit in 100 tokens, and its pages do not age;
    "exact" selects by the true scores.
    """
    full = int(live.lengths[-1])
    many = {"chosen": min(candidates, full - 132)}
    cases: dict[str, tuple[Retrieval, int | None]] = {
        "Paris": (policy(Paris()), prompt),
        "Paris, all reranked": (policy(Paris(candidates=full)), prompt),
        "Paris, candidates": (policy(Paris(candidates=1), **many), prompt),
        "Quest": (policy(MinMaxPages(page=PAGE), chosen=TOP // PAGE * PAGE), prompt),
        "exact": (policy(Exact()), prompt),
    }
    half = live.layers[0].spec.head_dim // 2
    learnt = {
        "k-means": policy(Learnt(rounds=rounds)),
        "k-means, candidates": policy(Learnt(by="votes", rounds=rounds), **many),
        "k-means of unit keys, candidates": policy(
            Learnt(by="votes", rounds=rounds, normalise=True), **many
        ),
        "k-means of rotated unit keys, candidates": policy(
            Learnt(by="votes", rounds=rounds, normalise=True, seed=0), **many
        ),
        "PQCache": policy(Learnt(channels=half, bits=6, rounds=rounds)),
    }
    for name, made in learnt.items():
        cases |= {f"{name}, prompt": (made, prompt), f"{name}, anew": (made, None)}
    codes = ProductCodes(learn=BLOCK, group_reduce="mean_query")
    cases["PQCache, by block"] = replace(policy(codes), demote=Fifo(leave=BLOCK)), prompt
    found = {}
    for done, (name, (made, first)) in enumerate(cases.items()):
        if progress is not None:
            progress(done, len(cases), name)
        found[name] = reads(live, made, top=TOP, prompt=first)
    return found


def by_length(live: Live, lengths: Sequence[int], *, share: float = 0.1) -> dict[str, Reads]:
    """Recall of the 100 best with a `share` of the keys as candidates, at each length of a
    captured text.
    """
    steps = len(live.positions) // len(lengths)
    found = {}
    for i, length in enumerate(lengths):
        run = take(live, np.arange(i * steps, (i + 1) * steps))
        found[f"{length} tokens"] = reads(
            run, policy(Paris(candidates=round(share * length))), top=TOP
        )
    return found


def ablation(
    live: Live,
    *,
    shares: Sequence[float] = (0.05, 0.1, 0.25, 0.5, 1.0),
    progress: Progress | None = None,
) -> dict[str, Reads]:
    """ParisKV's parts, one changed at a time: alpha-correction, tiers of votes, rotation, the
    channels of a subspace, the bits of its radius, and the share of candidates.

    Shares are of the longest context of `live`; where a history is shorter, they cover more of
    it.
    """
    longest = int(live.lengths[-1])
    cases: dict[str, Selector] = {
        "as published": Paris(),
        "no alpha-correction": Paris(correct=False),
        "plain votes": Paris(votes="plain"),
        "not rotated": Paris(seed=None),
        "subspaces of 4": Paris(subspace=4),
        "radii in 4 bits": Paris(radius_bits=4),
    }
    cases |= {
        f"candidates {share:g}": Paris(candidates=max(TOP, round(share * longest)))
        for share in shares
    }
    every = replace(Paris(), candidates=longest)
    cases |= {
        "all reranked, no alpha-correction": replace(every, correct=False),
        "all reranked, not rotated": replace(every, seed=None),
        "all reranked, subspaces of 4": replace(every, subspace=4),
        "all reranked, radii in 4 bits": replace(every, radius_bits=4),
    }
    return _recalls(live, cases, progress)


def votes(live: Live, *, progress: Progress | None = None) -> dict[str, Reads]:
    """ParisKV's vote by other centroids than its default's: fewer directions, radii, keys that
    are not normalised.
    """
    cases: dict[str, Selector] = {
        "as published": Paris(),
        "16 directions": Voting(directions=16),
        "16 radii": Voting(radii=RADII),
        "not normalised": Voting(normalise=False),
        "not rotated": Paris(seed=None),
        "neither normalised nor rotated": Voting(normalise=False, seed=None),
    }
    return _recalls(live, cases, progress)


def _recalls(
    live: Live, cases: Mapping[str, Selector], progress: Progress | None
) -> dict[str, Reads]:
    found = {}
    for done, (name, selector) in enumerate(cases.items()):
        if progress is not None:
            progress(done, len(cases), name)
        found[name] = reads(live, policy(selector), top=TOP)
    return found
