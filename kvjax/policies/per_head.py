"""KV heads of one layer under two policies: RazorAttention and DuoAttention keep everything for
some heads only.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import register_dataclass

from kvjax.numerics.partial import PartialAttention
from kvjax.policies.policy import Info, Policy, Step
from kvjax.spec import CacheSpec, require_ints
from kvjax.validation import check_verbs


@register_dataclass
@dataclass(frozen=True)
class PerHeadState:
    """The states of the two policies, each for its own heads."""

    selected: Any
    others: Any

    @property
    def length(self) -> Array:
        """i32[B] tokens received."""
        return self.selected.length

    @property
    def overflow(self) -> Array:
        """bool[B] a token of this row was dropped."""
        return self.selected.overflow | self.others.overflow


@dataclass(frozen=True, kw_only=True)
class PerHead(Policy):
    """The policy `selected` for the KV heads `heads` of a layer, and `others` for all other
    heads.

    Each policy sees a cache of its own heads only, and decides among these.

    >>> import kvjax
    >>> window = kvjax.Evicting(evictor=kvjax.evictors.Sliding(sink=4), budget=256)
    >>> policy = kvjax.policies.PerHead(heads=(0, 5), selected=kvjax.Full(), others=window)
    """

    heads: tuple[int, ...]
    selected: Policy
    others: Policy

    observes = True
    takes_sinks = True

    def __post_init__(self) -> None:
        heads = require_ints("PerHead(heads=...)", self.heads, at_least=0)
        if not heads or len(set(heads)) < len(heads):
            raise ValueError(
                f"PerHead(heads={self.heads}) must name at least one KV head, and each once; for no head, use the "
                "policy `others` itself"
            )
        object.__setattr__(self, "heads", tuple(sorted(heads)))
        for name, policy in (("selected", self.selected), ("others", self.others)):
            verbs = ("init", "prefill", "update", "attend")
            check_verbs(f"PerHead({name}=...)", policy, "a policy", verbs, "kvjax.Full()")

    def init(self, spec: CacheSpec) -> PerHeadState:
        n = len(self.heads)
        K = spec.kv_heads
        if self.heads[-1] >= K or n == K:
            raise ValueError(
                f"PerHead(heads={self.heads}) must list between 1 and {K - 1} of the {K} KV heads; for all "
                "heads, use the policy `selected` itself"
            )
        selected, others = (
            replace(spec, kv_heads=k, q_heads=k * spec.group) for k in (n, K - n)
        )
        return PerHeadState(self.selected.init(selected), self.others.init(others))

    @property
    def rounds(self) -> bool:
        return self.selected.rounds or self.others.rounds

    def prefill(self, st: PerHeadState, k: Array, v: Array, lengths: Array) -> PerHeadState:
        return PerHeadState(
            *self._each(st, lambda policy, st, k, v: policy.prefill(st, k, v, lengths), k, v)
        )

    def prefill_observed(
        self, st: PerHeadState, q: Array, k: Array, v: Array, lengths: Array, step: Step
    ) -> PerHeadState:
        of_selected, of_others = self._steps(step, q.shape[1])
        (q1, q2), (k1, k2), (v1, v2) = (self._split(a) for a in (q, k, v))
        return PerHeadState(
            self.selected.prefill_observed(st.selected, q1, k1, v1, lengths, of_selected),
            self.others.prefill_observed(st.others, q2, k2, v2, lengths, of_others),
        )

    def update(self, st: PerHeadState, k: Array, v: Array, active: Array) -> PerHeadState:
        return PerHeadState(
            *self._each(st, lambda policy, st, k, v: policy.update(st, k, v, active), k, v)
        )

    def update_for_step(
        self, st: PerHeadState, k: Array, v: Array, active: Array, step: Step
    ) -> PerHeadState:
        of_selected, of_others = self._steps(step, k.shape[1])
        (k1, k2), (v1, v2) = (self._split(a) for a in (k, v))
        return PerHeadState(
            self.selected.update_for_step(st.selected, k1, v1, active, of_selected),
            self.others.update_for_step(st.others, k2, v2, active, of_others),
        )

    def attend(
        self, st: PerHeadState, q: Array, step: Step
    ) -> tuple[Array, PerHeadState, Info]:
        q1, q2 = self._split(q)
        if step.sinks is not None and not (
            self.selected.takes_sinks and self.others.takes_sinks
        ):
            raise ValueError(f"{self} takes no sink logits, as one of its policies takes none")
        step1, step2 = self._steps(step, q.shape[1])
        out1, selected, info1 = self.selected.attend(st.selected, q1, step1)
        out2, others, info2 = self.others.attend(st.others, q2, step2)
        info = Info(self._join(info1.attended, info2.attended), None)
        weighted = info1.log_weights is not None or info2.log_weights is not None
        if info1.positions is not None and info2.positions is not None and not weighted:
            info = info._replace(
                positions=self._join(*_pad_positions(info1.positions, info2.positions))
            )
        return self._join(out1, out2.astype(out1.dtype)), PerHeadState(selected, others), info

    def attend_stored(self, st: PerHeadState, q: Array, step: Step) -> PartialAttention:
        parts = self._each(st, lambda policy, st, q: policy.attend_stored(st, q, step), q)
        return PartialAttention(*(self._join(a, b) for a, b in zip(*parts, strict=True)))

    def full_rows(self, st: PerHeadState) -> Array | None:
        found = [
            rows
            for rows in self._each(st, lambda policy, st: policy.full_rows(st))
            if rows is not None
        ]
        return functools.reduce(operator.or_, found) if found else None

    def flush(self, st: PerHeadState) -> PerHeadState:
        return PerHeadState(*self._each(st, lambda policy, st: policy.flush(st)))

    def grown(self, st: PerHeadState, before: PerHeadState) -> PerHeadState:
        return PerHeadState(
            self.selected.grown(st.selected, before.selected),
            self.others.grown(st.others, before.others),
        )

    def _each(self, st: PerHeadState, verb: Callable[..., Any], *arrays: Array) -> list[Any]:
        """verb(policy, its state, its heads of the arrays [B, K, ...]), for both policies."""
        parts = zip(*map(self._split, arrays), strict=True) if arrays else ((), ())
        policies = (self.selected, st.selected), (self.others, st.others)
        return [verb(*policy, *part) for policy, part in zip(policies, parts, strict=True)]

    def _steps(self, step: Step, kv_heads: int) -> tuple[Step, Step]:
        """The step of each policy's heads."""
        others = [head for head in range(kv_heads) if head not in self.heads]
        return step.of_heads(self.heads), step.of_heads(others)

    def _split(self, x: Array) -> tuple[Array, Array]:
        """The heads of each policy of x [B, K, ...]."""
        selected = np.array(self.heads)
        return x[:, selected], x[:, np.setdiff1d(np.arange(x.shape[1]), selected)]

    def _join(self, selected: Array, others: Array) -> Array:
        """The two parts joined to [B, K, ...], each head in its place."""
        K = selected.shape[1] + others.shape[1]
        heads = np.array(self.heads)
        order = np.argsort(np.concatenate([heads, np.setdiff1d(np.arange(K), heads)]))
        return jnp.concatenate([selected, others], axis=1)[:, order]


def _pad_positions(a: Array, b: Array) -> tuple[Array, Array]:
    """Positions [B, K, H, M] of two policies, padded with -1 to the larger H and M of both."""
    H = max(a.shape[2], b.shape[2])
    M = max(a.shape[3], b.shape[3])

    def widen(x: Array) -> Array:
        x = jnp.broadcast_to(x, (*x.shape[:2], H, x.shape[3])) if x.shape[2] != H else x
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, M - x.shape[3])), constant_values=-1)

    return widen(a), widen(b)
