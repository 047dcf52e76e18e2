"""A prompt in chunks, held exactly until it ends, for policies that keep other keys and values
than came.

A prompt in one chunk attends to itself exactly, whatever the cache keeps of it. In several
chunks a later one attends to what is stored of the earlier ones; if that is codes, the answer
depends on how the prompt was cut. `Staged` holds the chunks as they came, so that a prompt is
the same in any chunks, and stores them together when the prompt has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from kvjax.numerics.partial import PartialAttention, merge
from kvjax.ops.chunk import attend_zone
from kvjax.policies.full import Full, FullState
from kvjax.policies.policy import Policy, Step, chunk_starts
from kvjax.spec import CacheSpec


@register_dataclass
@dataclass(frozen=True)
class StagedState:
    """The state of the policy before a prompt, and the prompt so far."""

    stored: Any  # the state of the policy
    prompt: FullState

    @property
    def length(self) -> Array:
        """i32[B] tokens held."""
        return cast(Array, self.stored.length + self.prompt.length)

    @property
    def overflow(self) -> Array:
        """bool[B] a token of this row was dropped."""
        return cast(Array, self.stored.overflow | self.prompt.overflow)


@dataclass(frozen=True, kw_only=True)
class Staged(Policy):
    """Holds a prompt of up to `room` tokens beside what `policy` has stored.

    Chunks of the prompt attend exactly to one another, and to earlier tokens as `policy` keeps
    them. `settled` then stores the prompt as one chunk. Meanwhile the prompt takes the memory
    of its keys and values in the cache's dtype, in every layer: what `Full` would take.
    """

    policy: Policy
    room: int

    @property
    def takes_sinks(self) -> bool:  # type: ignore[override]
        return self.policy.takes_sinks

    def init(self, spec: CacheSpec) -> StagedState:
        return StagedState(self.policy.init(spec), self.empty_prompt(spec))

    def empty_prompt(self, spec: CacheSpec) -> FullState:
        """Room for a prompt, which holds no token."""
        return Full().init(replace(spec, capacity=self.room))

    def prefill(self, st: StagedState, k: Array, v: Array, lengths: Array) -> StagedState:
        return replace(st, prompt=Full().prefill(st.prompt, k, v, lengths))

    def attend_stored(self, st: StagedState, q: Array, step: Step) -> PartialAttention:
        before = self.policy.attend_stored(st.stored, q, replace(step, ahead=st.prompt.length))

        # Slot 0 of the prompt has the position after the last token that was stored before.
        tokens = st.prompt.tokens
        start = chunk_starts(st.length, q.shape[3], step.window)
        if start is not None:
            start = jnp.maximum(start - st.stored.length[:, None], 0)
        prompt = attend_zone(q, tokens.k, tokens.v, start, tokens.count, logits=step.logits)
        return merge(before, prompt)

    def settled(self, st: StagedState) -> StagedState:
        """`st` with the prompt stored by the policy, and room for another one."""
        k, v, count = Full().stored(st.prompt)
        stored = self.policy.prefill(st.stored, k, v, count)
        emptied = replace(st.prompt.tokens, count=jnp.zeros_like(count))
        return StagedState(stored, replace(st.prompt, tokens=emptied))
