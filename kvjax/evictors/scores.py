"""Evictors by position, by attention mass, by the votes of a prompt's last queries and by the
last use of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax.evictors.base import Evictor
from kvjax.numerics.rotate import turn_positions
from kvjax.numerics.types import Rope
from kvjax.sharding.placement import mean_over_heads
from kvjax.spec import keep_ints, keep_number, require_int
from kvjax.validation import check_one_of, check_rope

Pooling = Literal["max", "mean"]
_ARRIVAL = 1.0  # evidence of a token that no step has seen: above any evidence from steps


@dataclass(frozen=True, kw_only=True)
class Sliding(Evictor):
    """Keeps the first `sink` tokens and the newest: a sliding window with a sink.

    After `end` tokens, of which a row has room for S, it keeps the tokens at positions

        p < sink     or     p >= end - (S - sink)

    `score` is infinite for the first ones and equal for all others, of which `Evicting` evicts
    the oldest.

    With `rope`, the rotary embedding of the model, tokens are numbered by their place in the
    cache: a query sees the sink directly before the window, however many tokens were evicted
    between them, and no two tokens are further apart than the length of the cache. Without it
    keys keep their original positions.

    **Source:** StreamingLLM (Xiao et al. 2023), section 3.2; sink 4. **Differs:** the paper
    stores keys before their rotation and rotates all of them in every step; here only the query
    is rotated back, for the sink. A chunk of a prompt is numbered on from the tokens that are
    in the cache before it.
    """

    sink: int = 4
    rope: Rope | None = None

    def __post_init__(self) -> None:
        keep_ints(self, sink=0)
        check_rope("Sliding(rope=...)", self.rope)

    @property
    def renumbered(self) -> int:
        return self.sink if self.rope is not None else 0

    @property
    def keeps_newest(self) -> bool:
        return self.sink == 0

    def turn(self, q: Array, by: Array) -> Array:
        return turn_positions(q, by[:, None, None, None], self.rope).astype(q.dtype)

    def check(self, budget: int) -> None:
        if budget <= self.sink:
            raise ValueError(
                f"{self} always keeps {self.sink} tokens, got a budget of {budget}; use at least {self.sink + 1}"
            )

    def score(self, evidence: Array | None, position: Array, end: Array, slots: int) -> Array:
        return jnp.where(position < self.sink, jnp.float32(jnp.inf), jnp.float32(0))


@dataclass(frozen=True)
class LogSpaced(Evictor):
    """Keeps fewer of the older tokens, spaced by the logarithm of their age; the first token
    stays.

    The n-th thinning of 3W slots keeps slots 0, 2, 4, ..., 2W - 2 and the newest W, so a token
    in slot s < 2W survives as many of them as s can be halved; `score` is the number of the
    thinning that evicts it. With a budget of 3W tokens the newest 2W are adjacent. `LogSparse` thins a full block of 3W
    tokens to 2W at once; here the same tokens are evicted one at a time, as new ones come, so
    that 3W are always kept.

    **Source:** LogQuant (2025), Algorithm 1, in its evicting variant. **Differs:** one token at
    a time.
    """

    def check(self, budget: int) -> None:
        require_int("the budget of LogSpaced", budget, at_least=3)

    def score(self, evidence: Array | None, position: Array, end: Array, slots: int) -> Array:
        """Returns the number of the thinning that evicts a token.

        A thinning moves a token from slot 2i to slot i, and from a slot past 2W back by W. So a
        token is evicted by the first thinning that finds it in an odd slot below 2W. After the
        first one that finds it below 2W, these are as many as its slot there can be halved.
        """
        W = max(slots // 3, 1)
        halved = np.array(
            [np.inf, *((s & -s).bit_length() - 1 for s in range(1, 2 * W))], np.float32
        )
        position = jnp.maximum(position, 0)
        # The first thinning that finds the token below slot 2W.
        first = jnp.maximum(position // W - 1, 0)
        slot = jnp.where(position < W, position, W + position % W)
        return first.astype(jnp.float32) + jnp.asarray(halved)[slot]


@dataclass(frozen=True, kw_only=True)
class HeavyHitter(Evictor):
    """Keeps the newest tokens, a share `recent` of the slots, and those with the largest sum of
    attention so far.

    A token s has this evidence, summed over all queries t since it came and over the query
    heads g of its group:

        evidence_s = sum_t sum_g softmax(scale * q_tg . k)_s

    `see_prompt` and `see_step` add the weights of a prompt's queries and of a step's, which
    `Evicting` computes, and `score` is the evidence, or infinite for the newest tokens. For a
    prompt this computes the product of queries and keys a second time. In longer prompts only
    `queries` evenly spaced queries vote, and their sum is scaled up. With queries=None all of
    them vote, as in the paper, which takes several times as long as to read the prompt. In a
    text of 8192 tokens
    (SmolLM2-135M, budget 1024), what 1024 queries chose had 97.2 % of the attention of what all
    chose; with 2048 it is 98.9 %, and with the last 1024 instead of a sample 70 %
    (`benchmarks/votes.py`).

    **Source:** H2O (Zhang et al. 2023), Algorithm 1, half heavy hitters and half recent.
    **Differs:** a GQA group shares a selection; the paper has no groups. All tokens of a prompt
    are kept until its last query has voted. A sample of the queries of a long prompt votes.
    """

    recent: float = 0.5  # share of the slots
    queries: int | None = 1024  # of a prompt, that vote

    def __post_init__(self) -> None:
        if self.queries is not None:
            keep_ints(self, queries=1)
        keep_number(self, "recent", what="a share of the slots, ", at_least=0, at_most=1)

    @property
    def arrival(self) -> float:
        return 0.0

    def voters(self, slots: int) -> None:
        return None

    @property
    def sampled(self) -> int | None:
        return self.queries

    def see_prompt(
        self, evidence: Array, votes: Array, position: Array, end: Array, slots: int
    ) -> Array:
        return evidence + jnp.sum(votes, axis=2)

    def see_step(self, evidence: Array, weights: Array) -> Array:
        return evidence + jnp.sum(weights, axis=2)

    def score(self, evidence: Array | None, position: Array, end: Array, slots: int) -> Array:
        assert evidence is not None
        return jnp.where(_newest(position, end, int(self.recent * slots)), jnp.inf, evidence)


@dataclass(frozen=True)
class LastQuery(Evictor):
    """Evicts the token to which the newest query attends least, by the mean over all query
    heads.

    A token s has this evidence, the mean over the query heads n of the layer, by the newest
    query t:

        evidence_s = mean_n softmax(scale * q_tn . k)_s

    `see_step` computes the mean, and the token of least evidence is evicted, from all heads.

    **Source:** TOVA (Oren et al. 2024). **Differs:** for a prompt, only its last query decides,
    once.
    """

    @property
    def arrival(self) -> float:
        return 0.0

    def voters(self, slots: int) -> int:
        return 1

    def see_prompt(
        self, evidence: Array, votes: Array, position: Array, end: Array, slots: int
    ) -> Array:
        return self.see_step(evidence, votes)

    def see_step(self, evidence: Array, weights: Array) -> Array:
        mean = mean_over_heads(jnp.mean(weights, axis=(1, 2)))
        return jnp.broadcast_to(mean[:, None], evidence.shape)


@dataclass(frozen=True, kw_only=True)
class Observation(Evictor):
    """Keeps the tokens of a prompt that its last `window` queries attend to most, and these
    last tokens.

    A token s before the window has this vote, with the queries t of the window, the query
    heads g of its group, and the `kernel_size` tokens r around it:

        weight_s = sum_t sum_g softmax(scale * q_tg . k)_s     vote_s = max_r weight_r

    or the mean over r (pooling="mean"; missing neighbours count as 0). `Evicting` computes the
    weights, and `see_prompt` pools them. With fewer than 2 `window` slots, the window is half
    of the slots.

    Pooling keeps the neighbours of a voted token, `kernel_size` // 2 on each side; tokens
    further away that no query has attended to yet are lost, such as the last digits of a
    number.

    **Source:** SnapKV (Li et al. 2024), section 4; window 32, pooling of 7; both poolings are
    in its code. **Differs:** the paper selects for each query head; here a GQA group shares a
    selection. The paper keeps all generated tokens in addition to its budget; here a generated
    token takes the slot of the prompt's token with the lowest vote, or, when none is left, of
    the oldest token. In a prompt of several chunks, each chunk selects among the tokens that
    earlier ones left; in a chunk shorter than the window only its own queries vote.
    """

    window: int = 32
    kernel_size: int = 7  # tokens, odd
    pooling: Pooling = "max"

    def __post_init__(self) -> None:
        keep_ints(self, window=1, kernel_size=1)
        if self.kernel_size % 2 == 0:
            raise ValueError(
                f"Observation(kernel_size={self.kernel_size}) must be odd; "
                f"use {self.kernel_size - 1} or {self.kernel_size + 1}"
            )
        check_one_of("Observation", get_args(Pooling), pooling=self.pooling)

    @property
    def arrival(self) -> float:
        return float("inf")

    def check(self, budget: int) -> None:
        require_int("the budget of Observation", budget, at_least=2)

    def voters(self, slots: int) -> int:
        return max(min(self.window, slots // 2), 1)

    def see_prompt(
        self, evidence: Array, votes: Array, position: Array, end: Array, slots: int
    ) -> Array:
        newest = _newest(position, end, self.voters(slots))
        least, combine = (-jnp.inf, lax.max) if self.pooling == "max" else (0.0, lax.add)
        votes = jnp.where(newest | (position < 0), least, jnp.sum(votes, axis=2))
        pooled = lax.reduce_window(
            votes, least, combine, (1, 1, self.kernel_size), (1, 1, 1), "SAME"
        )
        return jnp.where(newest, jnp.inf, pooled)


@dataclass(frozen=True, kw_only=True)
class LastUse(Evictor):
    """Evicts the token that has gone longest without a softmax weight above `threshold`; a
    prompt's tokens stay.

    A step stamps each token to which one of the group's query heads gives more than the
    threshold. Evidence is 0 for a token stamped by the last step, one less for each step since,
    and infinite for tokens of a prompt. The budget should exceed the prompt by the length of
    the answer. If the prompt exceeds the budget, only its newest tokens are kept, and all
    generated tokens share one slot.

    **Source:** RaaS (Hu et al. 2025, arXiv 2502.11147): stamps, threshold 1e-4, prompt kept.
    **Differs:** tokens are stamped and evicted one at a time, by their exact weights; the paper
    does so for pages of 16, by an estimate. The budget counts the prompt. `BesidePrompt` has
    pages, and the prompt beside the budget.
    """

    threshold: float = 1e-4

    def __post_init__(self) -> None:
        keep_number(self, "threshold", what="a softmax weight, ", at_least=0, below=1)

    @property
    def arrival(self) -> float:
        return _ARRIVAL

    def voters(self, slots: int) -> int:
        return 1  # their votes are not used: all of a prompt stays

    def see_prompt(
        self, evidence: Array, votes: Array, position: Array, end: Array, slots: int
    ) -> Array:
        return jnp.where(evidence == _ARRIVAL, jnp.inf, evidence)

    def see_step(self, evidence: Array, weights: Array) -> Array:
        stamped = jnp.any(weights > self.threshold, axis=2)
        return jnp.where(jnp.isinf(evidence), evidence, jnp.where(stamped, 0.0, evidence - 1))


def _newest(position: Array, end: Array, count: int) -> Array:
    """Returns the last `count` of the positions before `end` i32[B]: bool[B, K, L]."""
    return position >= (end - count)[:, None, None]
