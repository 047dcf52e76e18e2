"""Evictors: which token is evicted when a cache of fixed size is full.

An evictor gives each token a worth; the token of least worth is evicted, or the oldest of equals. An evictor knows a
token's position and one number, its evidence, from the attention that queries pay to it. Attention is over the tokens
in the cache when the query comes, so an evicted token gathers no more evidence, and none returns.

`Evicting` stores positions and evidence, and calls the evictor. L counts the slots of the cache, and with a prompt also
its tokens, all in order of position; position is then -1 where there is no token. Each KV head evicts on its own.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from jax import Array


class Evictor(Protocol):
    """Says which token an `Evicting` cache evicts next. Without evidence (`arrival` None), it needs no queries."""

    @property
    def arrival(self) -> float | None:
        """The evidence of a new token; None for an evictor that goes by position alone."""
        ...

    def check(self, budget: int) -> None:
        """Raises ValueError if `budget` slots are too few."""
        ...

    def voters(self, slots: int) -> int | None:
        """How many of the last queries of a prompt vote; None for all."""
        ...

    def see_prompt(self, evidence: Array, votes: Array, position: Array, end: Array, slots: int) -> Array:
        """Evidence f32[B, K, L] after a prompt up to position `end` i32[B], exclusive.

        `votes` f32[B, K, G, L] are the softmax weights of the voters, summed. Tokens of the prompt come with `arrival`
        as their evidence.
        """
        ...

    def see_step(self, evidence: Array, weights: Array) -> Array:
        """Evidence f32[B, K, L] after a decode step with softmax weights f32[B, K, G, L].

        If it returns `evidence` itself, a compiled step does not compute the weights.
        """
        ...

    def worth(self, evidence: Array | None, position: Array, end: Array, slots: int) -> Array:
        """The worth of each token, after `end` i32[B] tokens were received and with room for `slots`: f32[B, K, L]."""
        ...


class Rope(Protocol):
    """A kind of rotary position embedding, such as those of `kvjax.models.rope`."""

    def frequencies(self, head_dim: int) -> Any:
        """Radians per position, for channels i and i + D/2: f32[D/2]."""
        ...


@runtime_checkable
class Renumbering(Evictor, Protocol):
    """An evictor that numbers tokens by their place in the cache instead of their original position."""

    @property
    def renumbered(self) -> int:
        """How many of the first slots are closer to a query than by their original positions; 0 for none."""
        ...

    def turn(self, q: Array, by: Array) -> Array:
        """q [B, K, G, Q, D], rotated as if its position were `by` i32[B] higher."""
        ...
