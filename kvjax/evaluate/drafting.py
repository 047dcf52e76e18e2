"""How often the steps of a cache choose the tokens of full attention: a quality of a method that
needs no task.

The steps are forced to follow the text of the exact model, and each names the token that it
would have drafted. Runs count: a draft of 8 tokens is as good as the number of its
first tokens that are right, and that number decides how fast drafts are (`kvjax.SelfDraft`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax.cache.cache import Cache
from kvjax.generation.loops import PAD
from kvjax.generation.prefilling import Model
from kvjax.sharding.placement import call_model
from kvjax.spec import require_int

DRAFT = 8  # tokens


@dataclass(frozen=True)
class Acceptance:
    """How the tokens that a method drafts agree with those of the exact model."""

    agreement: float  # share of steps that choose the exact model's token
    by_position: tuple[float, ...]  # share of drafts whose first 1, 2, ... tokens are all right
    steps: int  # that were compared, over all rows

    @property
    def accepted(self) -> float:
        """Tokens of a draft that are accepted: up to the first wrong one, on average."""
        return float(sum(self.by_position))


def acceptance(
    model: Model, cache: Cache, tokens: Any, *, draft: int = DRAFT
) -> tuple[Acceptance, Cache]:
    """Feeds the exact model's text to a cache that holds the prompt, and compares what its
    steps choose. The cache is donated; the new one holds the text.

    Args:
      tokens: i32[B, T], the greedy continuation of the prompt by the exact model
        (`Generation.tokens`), with PAD after the end of a row.
      draft: tokens of a draft. Every step that has so many after it begins one.

    Raises:
      ValueError: a text with fewer than 2 tokens in every row.
    """
    draft = require_int("acceptance(draft=...)", draft, at_least=1)
    tokens = np.asarray(tokens, np.int32)
    if tokens.ndim != 2 or int(np.sum(tokens != PAD, axis=1).max(initial=0)) < 2:
        raise ValueError(
            f"acceptance needs at least 2 tokens of a row to compare, got tokens{list(tokens.shape)}; generate more"
        )
    chosen, cache = _choices(model, cache, jnp.asarray(tokens[:, :-1]))
    return compare_choices(np.asarray(chosen), tokens[:, 1:], draft), cache


def compare_choices(chosen: np.ndarray, wanted: np.ndarray, draft: int = DRAFT) -> Acceptance:
    """The acceptance of tokens that steps chose, i32[B, T], where `wanted` were right; PAD is
    not compared.

    >>> wanted = np.array([[5, 6, 7, 8, 9, 4]])
    >>> compare_choices(np.array([[5, 6, 0, 8, 9, 4]]), wanted, 2).by_position
    (0.8, 0.6)
    """
    real = wanted != PAD
    return count_accepted((chosen == wanted) & real, real, draft)


def count_accepted(right: np.ndarray, real: np.ndarray, draft: int = DRAFT) -> Acceptance:
    """The acceptance of steps by whether each chose the right token, bool[B, T], where `real`
    bool[B, T]; a draft begins at every step that has `draft` of them.
    """
    shares = []
    so_far = np.ones_like(right)
    begins = _later(real, draft - 1)  # of a whole draft
    for position in range(draft):
        so_far &= _later(right, position)
        shares.append(float(np.sum(so_far & begins) / max(np.sum(begins), 1)))
    return Acceptance(float(right.sum() / max(real.sum(), 1)), tuple(shares), int(real.sum()))


def _later(flags: np.ndarray, by: int) -> np.ndarray:
    """bool[B, T]: the flag `by` places later, false past the end."""
    T = flags.shape[1]
    return np.pad(flags[:, min(by, T) :], ((0, 0), (0, min(by, T))))


@partial(jax.jit, donate_argnames="cache")
def _choices(model: Model, cache: Cache, tokens: Array) -> tuple[Array, Cache]:
    """The most likely token i32[B, T] after each of tokens i32[B, T], PAD past the end of a
    row.
    """

    def feed(cache: Cache, token: Array) -> tuple[Cache, Array]:
        active = token != PAD
        fed = jnp.where(active, token, 0)[:, None]
        logits, cache = call_model(model, fed, cache, active=active, last_logits=True)
        return cache, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    cache, chosen = lax.scan(feed, cache, tokens.T)
    return chosen.T, cache
