"""The base of evictors: which token is evicted when a cache of fixed size is full.

An evictor gives each token a score; the token of lowest score is evicted, or the oldest of
equals. An evictor knows a token's position and one number, its evidence: from its key and
value, or from the attention that queries pay to it while it is in the cache. Some score a token
beside all others: they see keys and values, and what they remember of queries.

`Evicting` stores positions and evidence, and calls the evictor. L counts the slots of the
cache, and with a prompt also its tokens, all in order of position; position is then -1 where
there is no token. Each KV head evicts on its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax import Array

from kvjax.validation import refuse_former_verbs

if TYPE_CHECKING:
    from kvjax.policies.policy import Step


FORMER_VERBS = {"worth": "the verb score", "judge": "the verb score_all"}


class Tokens(NamedTuple):
    """The tokens among which an evictor chooses, L slots; those of a prompt and of several
    evictions at once in order.

    Keys and values of slots without a token may be anything finite.
    """

    evidence: Array | None  # f32[B, K, L]
    position: Array  # i32[B, K, L] -1 where there is no token
    end: Array  # i32[B] tokens received
    slots: int  # tokens that there is room for
    k: Array  # dtype[B, K, L, D]
    v: Array  # dtype[B, K, L, D]
    memory: Array | None  # f32[B, K, G, n, D] what `see_queries` returned
    # How remembered queries attend, as these are scaled: logits, window and sinks. None if no
    # queries are remembered.
    step: Step | None = None
    asked: Array | None = None  # i32[B] tokens whose queries have come; None: of all

    def seen_by_last(self, count: int) -> Array:
        """bool[B, K, n, L]: the tokens that each of the last n = `count` remembered queries
        sees, its own included; none for queries before the first token.
        """
        window = self.known_step().window
        asked = self.end if self.asked is None else self.asked
        before = jnp.arange(count, dtype=jnp.int32)[None] - count
        query = (asked[:, None] + before)[:, None, :, None]
        token = self.position[:, :, None]
        seen = (token >= 0) & (token <= query)
        return seen if window is None else seen & (token > query - window)

    def seen_next(self) -> Array:
        """bool[B, K, L]: the tokens that the query of the next token sees; those outside of its
        window are never seen again.
        """
        window = self.known_step().window
        held = self.position >= 0
        if window is None:
            return held
        return held & (self.position > (self.end - window)[:, None, None])

    def known_step(self) -> Step:
        """Returns `step`. Raises ValueError if it is None."""
        if self.step is None:
            raise ValueError(
                "an evictor that remembers queries weighs tokens by Tokens.step, which is None; "
                "give the kvjax.policies.Step with which the queries attend"
            )
        return self.step


class Evictor:
    """Says which token an `Evicting` cache evicts next. A subclass is a frozen dataclass that
    implements `score`, or `score_all` if it compares tokens, unless evidence is all that counts.

    Without more it goes by position alone. `see_tokens` gives each token evidence by its key
    and value as it is stored. An evictor with an `arrival` sees the attention of queries:
    `see_prompt` and `see_step`.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        refuse_former_verbs(cls, FORMER_VERBS)

    @property
    def arrival(self) -> float | None:
        """The evidence of a new token; None for an evictor that needs no queries."""
        return None

    @property
    def compares(self) -> bool:
        """True if a token's score depends on the other tokens, so that a cache should evict
        several at once.
        """
        return type(self).score_all is not Evictor.score_all

    @property
    def renumbered(self) -> int:
        """The number of the first slots that are closer to a query than by their original
        positions.
        """
        return 0

    def check(self, budget: int) -> None:
        """Raises ValueError if `budget` slots are too few."""

    def voters(self, slots: int) -> int | None:
        """Returns the number of last queries of a prompt that vote; None for all."""
        return 0

    @property
    def sampled(self) -> int | None:
        """If all queries vote, the number of those of a long prompt that vote for all, evenly
        spread; None for each.
        """
        return None

    def see_tokens(self, k: Array, v: Array) -> Array | None:
        """Evidence f32[B, K, T] of tokens with keys and values k, v [B, K, T, D], as they are
        stored; None for `arrival`."""
        return None

    def see_prompt(
        self, evidence: Array, votes: Array, position: Array, end: Array, slots: int
    ) -> Array:
        """Evidence f32[B, K, L] after a prompt up to position `end` i32[B], exclusive.

        `votes` f32[B, K, G, L] are the softmax weights of the voters, summed. Tokens of the
        prompt come with the evidence of their arrival.
        """
        return evidence

    def see_step(self, evidence: Array, weights: Array) -> Array:
        """Evidence f32[B, K, L] after a decode step with softmax weights f32[B, K, G, L].

        If it returns `evidence` itself, a compiled step does not compute the weights.
        """
        return evidence

    def score(self, evidence: Array | None, position: Array, end: Array, slots: int) -> Array:
        """f32[B, K, L]: the score of each token, after `end` i32[B] tokens were received and
        with room for `slots`; by default its evidence."""
        if evidence is None:
            raise NotImplementedError(
                f"{type(self).__name__} has no evidence of tokens, so it must say their score"
            )
        return evidence

    def score_all(self, tokens: Tokens) -> Array:
        """f32[B, K, L]: the score of each token. The default asks `score`, and reads no keys or
        values.
        """
        return self.score(tokens.evidence, tokens.position, tokens.end, tokens.slots)

    def remembers(self, head_dim: int) -> int:
        """Returns the number n of vectors of D = `head_dim` numbers that are remembered of a
        query head's queries.
        """
        return 0

    def see_queries(self, memory: Array, q: Array, position: Array) -> Array:
        """Returns the memory f32[B, K, G, n, D], at first 0, after queries q [B, K, G, T, D] at
        `position` i32[B, T], or -1.

        Queries are scaled so that D**-0.5 * q.k are the logits, whatever the model's scale.
        `Tokens.step` has the soft cap, the window and the sinks when tokens are scored:
        `step.logits.of(q.k)` are the logits of remembered queries, and
        `kvjax.numerics.partial.weights_of` makes weights of them.
        """
        return memory

    def turn(self, q: Array, by: Array) -> Array:
        """q [B, K, G, Q, D], rotated as if its position were `by` i32[B] higher, for the
        `renumbered` slots.
        """
        return q

    @property
    def keeps_newest(self) -> bool:
        """True if the newest tokens stay, and no other."""
        return False

    @property
    def keeps_evidence(self) -> bool:
        """True if each token has evidence."""
        return self.arrival is not None or type(self).see_tokens is not Evictor.see_tokens
