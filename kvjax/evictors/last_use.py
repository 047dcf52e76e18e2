"""RaaS: an evictor that goes by the time at which a token was last attended to."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from kvjax.evictors.base import Evictor
from kvjax.spec import keep_number

_ARRIVAL = 1.0  # evidence of a token that no step has seen: above any evidence from steps


@dataclass(frozen=True, kw_only=True)
class LastUse(Evictor):
    """Evicts the token that has gone longest without a softmax weight above `threshold`; a prompt's tokens stay.

    A step stamps each token to which one of the group's query heads gives more than the threshold. Evidence is 0 for a
    token stamped by the last step, one less for each step since, and infinite for tokens of a prompt. The budget should
    exceed the prompt by the length of the answer. If the prompt exceeds the budget, only its newest tokens are kept,
    and all generated tokens share one slot.

    **Source:** RaaS (Hu et al. 2025, arXiv 2502.11147): stamps, threshold 1e-4, prompt kept. **Differs:** tokens are
    stamped and evicted one at a time, by their exact weights; the paper does so for pages of 16, by an estimate. The
    budget counts the prompt. `BesidePrompt` has pages, and the prompt beside the budget.
    """

    threshold: float = 1e-4

    def __post_init__(self) -> None:
        keep_number(self, "threshold", at_least=0, at_most=0.999)

    @property
    def arrival(self) -> float:
        return _ARRIVAL

    def voters(self, slots: int) -> int:
        return 1  # their votes are not used: all of a prompt stays

    def see_prompt(self, evidence: Array, votes: Array, position: Array, end: Array, slots: int) -> Array:
        return jnp.where(evidence == _ARRIVAL, jnp.inf, evidence)

    def see_step(self, evidence: Array, weights: Array) -> Array:
        stamped = jnp.any(weights > self.threshold, axis=2)
        return jnp.where(jnp.isinf(evidence), evidence, jnp.where(stamped, 0.0, evidence - 1))
