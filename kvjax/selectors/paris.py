"""ParisKV: tokens by votes of sign patterns, then by codes of 4 bits per channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax import ops
from kvjax.numerics.blocks import put_last, take_rows, write
from kvjax.numerics.partial import Logits
from kvjax.numerics.rotate import (
    SUBSPACE,
    Directions,
    encode,
    patterns,
    require_rotatable,
    rotate,
    rotate_few,
)
from kvjax.numerics.selection import (
    GROUP_REDUCES,
    Candidates,
    GroupReduce,
    PackedSelection,
    Selection,
    join_lists,
    pack,
)
from kvjax.selectors.selector import Selector
from kvjax.spec import CacheSpec, keep_ints
from kvjax.validation import check_flags, check_one_of

Votes = Literal["tiers", "plain"]

# Candidates beta and reach rho, shares of the history, for histories shorter than each of
# LENGTHS and for longer ones. All shares are kept in twentieths, so that numbers of tokens are
# rounded up exactly.
LENGTHS = np.array([5_000, 10_000, 30_000], np.int32)
BETA = np.array([10, 5, 4, 2], np.int32)
RHO = np.array([10, 6, 5, 4], np.int32)
TIERS = {"tiers": np.array([1, 3, 6, 10, 15, 20], np.int32), "plain": np.array([20], np.int32)}
# A token that is not reranked scores its votes below this, so under every estimate, and still
# in order.
FLOOR = -(2.0**20)


class ParisIndex(NamedTuple):
    """Codes of each key, how many keys have each sign pattern, and how many keys a step puts in
    tiers and reranks.
    """

    codes: Directions  # of rotated keys, [B, K, S, ...]
    # i32[B, K D/m 2^m] by head, subspace and pattern; flat, because it has no slots
    counts: Array
    limits: Array  # i32[B, T] keys of each tier
    candidates: Array  # i32[B] tokens to rerank


@dataclass(frozen=True, kw_only=True)
class Paris(Selector):
    """Scores tokens in two stages, after one random rotation of keys and queries
    (`kvjax.numerics.rotate`).

    With R the rotation, and j the subspaces of 8 channels of R q and R k:

        votes(q, k) = sum_j tier of (R q)_j . sign((R k)_j) among the n keys of the history
        score(q, k) = scale * sum_j w_j (R q)_j . c_j     for the beta n keys with most votes

    where c_j is the direction of (R k)_j in 4 bits a channel, and w_j a weight. `kvjax.ops.collide` counts the
    votes, `kvjax.ops.most_voted` lists the keys with the most, and `kvjax.ops.rerank` scores
    these; `kvjax.ops.select_4bit` reranks and selects in one kernel.

    In each subspace a key has 6 votes if it is among the best 5 % of rho n, then 5, 4, 3, 2 and
    1 for 15, 30, 50, 75 and 100 % of it (`votes="tiers"`), or one for the best rho n ("plain").
    Keys that are not reranked score below the others, in order of their votes. beta and rho
    depend on the length n of the row's history: .50 and .50 below 5000 tokens, .25 and .30
    below 10000, .20 and .25 below 30000, then .10 and .20.

    Index: 6 bytes per 8 channels of a key, 96 at D = 128, and 1 KiB of counts per 8 channels of
    a row and kv head, 16 KiB. A step reads D/8 bytes of each slot and 3/4 D of each candidate.
    Shapes are static: it votes on all slots, and scores as many candidates as the worst length
    up to the capacity needs, or the `candidates` that are set.

    With subspace=4 votes cost twice the time and weights twice the bytes. With radius_bits=4 a
    weight is one of 16 shares of the key's length, by the distribution of random directions
    (`kvjax.numerics.rotate.radius_table`): 74 bytes per key at D = 128. Both run in plain JAX.

    Through the counts, a score depends on the rest of the history; under a sliding window on
    the visible part, whose patterns each step counts again. Votes tie often. For the last place
    among the candidates the lower slot wins, and only there does the order of slots matter.

    **Source:** ParisKV (Qi et al. 2026, arXiv 2602.07721): collision, reranking,
    alpha-correction (`correct`). With seed=None nothing is rotated, the ablation of its Fig.
    10: if channels differ in size, votes and codes then follow the large ones. **Differs:**
    neither query nor key is normalised, because both stages are linear in the query, and signs
    and directions are those of the unit key; the signs of a code are stored once, as the
    patterns (96 bytes per key, not 112); the paper codes radii for its vote, radius_bits=4
    those of the estimates; keys with the same pattern rank equally, and enter a tier together
    in both forms of voting; 5K, 10K and 30K are read as thousands of tokens in the history.

    Attributes:
      votes: how keys are voted for: "tiers", or "plain".
      correct: correct the estimated score of a key for its rounding.
      candidates: keys with the most votes, which are ranked by estimates; None: a tenth to a
        half of the history.
      group_reduce: how a GQA group shares a selection; "per_head": each query head has its own.
      seed: seed of the rotation of keys; None: no rotation, the paper's ablation.
      subspace: channels per block of the codes, 8 or 4; 4 runs in plain JAX, not in the
        kernels.
      radius_bits: bits of the length of a block, 16 or 4; 4 runs in plain JAX, not in the
        kernels.
    """

    votes: Votes = "tiers"
    correct: bool = True
    candidates: int | None = None
    group_reduce: GroupReduce = "mean_query"
    seed: int | None = 0
    subspace: int = SUBSPACE
    radius_bits: int = 16

    def __post_init__(self) -> None:
        check_one_of("Paris", get_args(Votes), votes=self.votes)
        keep_ints(
            self,
            candidates=1,
            subspace=1,
            radius_bits=1,
            **({} if self.seed is None else {"seed": 0}),
        )
        check_flags("Paris", correct=self.correct)
        check_one_of("Paris", GROUP_REDUCES, group_reduce=self.group_reduce)
        why = ": there is a count for each sign pattern of a subspace, and codes need more than 3 channels"
        check_one_of("Paris", (4, 8), why, subspace=self.subspace)
        check_one_of(
            "Paris",
            (4, 16),
            ": codes relative to the key, or bfloat16",
            radius_bits=self.radius_bits,
        )

    def check(self, spec: CacheSpec, chunk: int) -> None:
        require_rotatable(spec.head_dim)
        N = spec.head_dim // self.subspace
        tiers = len(TIERS[self.votes])
        if N * tiers > 255:
            raise ValueError(
                f"Paris(subspace={self.subspace}, votes={self.votes!r}) counts votes in a byte, and {N} subspaces of "
                f"head_dim={spec.head_dim} have {N * tiers}; use subspace=8, or votes='plain'"
            )
        if self.radius_bits == 4 and N % 2:
            raise ValueError(
                f"Paris(radius_bits=4) packs two subspaces into a byte, and head_dim={spec.head_dim} has {N} of "
                f"{self.subspace} channels; use radius_bits=16, or subspace=4"
            )

    def init(self, spec: CacheSpec, slots: int) -> ParisIndex:
        lead = (spec.batch, spec.kv_heads, slots)
        D = spec.head_dim
        N = D // self.subspace
        weights = jnp.dtype(jnp.uint16 if self.radius_bits == 16 else jnp.uint8)
        widths = N if self.radius_bits == 16 else 2 + N // 2
        shapes = (D // 8, jnp.uint8), (3 * D // 8, jnp.uint8), (widths, weights)
        codes = Directions(*(jnp.zeros((*lead, width), dtype) for width, dtype in shapes))
        return self._counted(
            codes, jnp.zeros((spec.batch, spec.kv_heads * N * 2**self.subspace), jnp.int32)
        )

    def append(self, ix: ParisIndex, k: Array, at: Array, count: Array) -> ParisIndex:
        rotated = k.astype(jnp.float32) if self.seed is None else rotate(k, self.seed)
        new = encode(
            rotated,
            correct=self.correct,
            subspace=self.subspace,
            coded_radii=self.radius_bits == 4,
        )
        i = jnp.arange(k.shape[2], dtype=jnp.int32)[None]
        stored = (i < count[:, None]) & (at[:, None] + i < ix.codes.signs.shape[2])
        counts = self._tally(ix.counts, new.signs, stored)
        return self._counted(
            Directions(*(write(a, b, at, count) for a, b in zip(ix.codes, new, strict=True))),
            counts,
        )

    def _tally(self, counts: Array, signs: Array, stored: Array) -> Array:
        """`counts` plus the patterns of signs u8[B, K, T, D/8], of the tokens that are
        `stored`, bool[B, T].
        """
        ids = patterns(signs, self.subspace)
        B, K, _, N = ids.shape
        first = (
            jnp.arange(K, dtype=jnp.int32)[:, None] * N + jnp.arange(N, dtype=jnp.int32)[None]
        ) * 2**self.subspace
        place = first[None, :, None] + ids.astype(jnp.int32)
        place = jnp.where(stored[:, None, :, None], place, counts.shape[1]).reshape(B, -1)
        return counts.at[jnp.arange(B, dtype=jnp.int32)[:, None], place].add(1, mode="drop")

    def _counted(self, codes: Directions, counts: Array) -> ParisIndex:
        n = self._length(counts)
        band = jnp.sum(n[:, None] >= LENGTHS[None], axis=1, dtype=jnp.int32)
        beta = jnp.asarray(BETA)[band]
        rho = jnp.asarray(RHO)[band]
        reach = (n * rho)[:, None] * TIERS[self.votes][None]
        wanted = (
            _round_up(n * beta, 20)
            if self.candidates is None
            else jnp.minimum(n, self.candidates)
        )
        return ParisIndex(codes, counts, _round_up(reach, 400), wanted)

    def truncate(self, ix: ParisIndex, count: Array) -> ParisIndex:
        stored = jnp.arange(ix.codes.signs.shape[2], dtype=jnp.int32)[None] < count[:, None]
        return self._counted(
            ix.codes, self._tally(jnp.zeros_like(ix.counts), ix.codes.signs, stored)
        )

    def score(self, ix: ParisIndex, q: Array, *, logits: Logits) -> Array:
        return self._score_first(ix, q, self._length(ix.counts), logits=logits)

    def _score_first(self, ix: ParisIndex, q: Array, length: Array, *, logits: Logits) -> Array:
        """`score`, with candidates among the first `length` i32[B] slots."""
        votes = self._votes(ix, q)
        listed = ops.most_voted(votes, length, ix.candidates, self.room(votes.shape[3]))
        return self._with_estimates(ix, q, votes, listed, logits=logits)

    def _with_estimates(
        self,
        ix: ParisIndex,
        q: Array,
        votes: Array,
        candidates: PackedSelection,
        *,
        logits: Logits,
    ) -> Array:
        """Scores of all keys: estimates of the `candidates`, and below them the votes of the
        others.
        """
        S = votes.shape[3]
        rotated = q if self.seed is None else rotate_few(q, self.seed)
        estimates = ops.rerank(rotated, ix.codes, candidates, logits=logits)
        slots = jnp.where(candidates.valid, candidates.slots, S)
        return put_last(votes.astype(jnp.float32) + FLOOR, slots, estimates)

    def score_visible(
        self, ix: ParisIndex, q: Array, candidates: Candidates, *, logits: Logits
    ) -> Array:
        """Scores as with an index of only the visible tokens."""
        if (window := candidates.window) is None:
            return self.score(ix, q, logits=logits)
        B = ix.codes.signs.shape[0]
        S = ix.codes.signs.shape[2]
        start = jnp.broadcast_to(jnp.asarray(candidates.span[0], jnp.int32), (B,))
        stop = jnp.broadcast_to(jnp.asarray(candidates.span[1], jnp.int32), (B,))

        # An index of only the visible tokens: their codes, and counts of their patterns.
        i = jnp.arange(min(window, S), dtype=jnp.int32)[None]
        place = start[:, None] + i
        seen = i < (stop - start)[:, None]
        codes = Directions(*(take_rows(a, place) for a in ix.codes))
        counts = self._tally(jnp.zeros_like(ix.counts), codes.signs, seen)
        visible = self._counted(codes, counts)

        # Its scores, at the slots of the tokens.
        scores = self.score(visible, q, logits=logits)
        at = jnp.broadcast_to(jnp.where(seen, place, S)[:, None, None], scores.shape)
        return put_last(jnp.zeros((*scores.shape[:3], S), jnp.float32), at, scores)

    def _votes(self, ix: ParisIndex, q: Array) -> Array:
        """Votes u8[B, K, G, S] for q."""
        ids = patterns(ix.codes.signs, self.subspace)
        B, K, _, N = ids.shape
        return ops.collide(
            q, ids, ix.counts.reshape(B, K, N, 2**self.subspace), ix.limits, seed=self.seed
        )

    def _length(self, counts: Array) -> Array:
        """i32[B] keys of the history: each has one pattern in the first subspace of the first
        head.
        """
        return jnp.sum(counts[:, : 2**self.subspace], axis=-1, dtype=jnp.int32)

    def select(
        self, ix: ParisIndex, q: Array, candidates: Candidates, *, logits: Logits
    ) -> Selection | PackedSelection:
        """Selects among candidates and pending tokens.

        Every reranked token ranks above all others. If candidates and pending tokens are too
        few, more tokens join them, those with the most votes, and all are selected.
        """
        # Tokens that only fill the budget are among the reranked ones.
        if not candidates.fit(num_sorted_last=0, window=False):
            return super().select(ix, q, candidates, logits=logits)
        # In passes of 8 queries, as many as the kernel for votes takes.
        if candidates.steps > 1:
            found = [self._select(ix, *part, logits=logits) for part in candidates.passes(q, 8)]
            return join_lists(
                [part if isinstance(part, PackedSelection) else pack(part) for part in found]
            )
        return self._select(ix, q, candidates, logits=logits)

    def _select(
        self, ix: ParisIndex, q: Array, candidates: Candidates, *, logits: Logits
    ) -> Selection | PackedSelection:
        # needs all scores of each head
        means = q.shape[2] > candidates.steps and self.group_reduce != "per_head"
        if means or self.seed is None:
            return ops.select_top(
                self._score_first(ix, q, candidates.span[1], logits=logits),
                q,
                candidates,
                self.group_reduce,
                logits=logits,
            )
        votes = self._votes(ix, q)
        room = max(self.room(votes.shape[3]), min(candidates.k_max, votes.shape[3]))
        fill = candidates.k, *candidates.pending[1:]
        listed = ops.most_voted(
            votes,
            candidates.span[1],
            ix.candidates,
            room,
            complement=fill,
            local=candidates.local,
        )
        return ops.select_4bit(q, ix.codes, listed, candidates, seed=self.seed, logits=logits)

    def room(self, slots: int) -> int:
        """Candidates that a step over `slots` slots has room for: as many as any length of
        history needs.
        """
        if self.candidates is not None:
            return min(self.candidates, slots)
        longest = [n for n in (*(LENGTHS - 1).tolist(), slots) if n <= slots]
        return max(
            -(-n * int(BETA[np.searchsorted(LENGTHS, n, side="right")]) // 20) for n in longest
        )

    def bytes_read(self, spec: CacheSpec, length: Any) -> Any:
        """Returns the bytes of the sign patterns of all keys, D/8 each, and of the codes of the
        candidates.
        """
        candidates = np.minimum(self.room(spec.capacity), length)
        return (
            spec.kv_heads * spec.head_dim / 8 * length + self.bytes_per_token(spec) * candidates
        )


def _round_up(parts: Array, whole: int) -> Array:
    """Returns the smallest number of whole tokens that holds `parts`, each 1/`whole` of a
    token.
    """
    return -(-parts // whole)
