"""Policies of a model's layers, which may differ from layer to layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvjax.policies.policy import Policy
from kvjax.validation import check_verbs, short_repr


@dataclass(frozen=True)
class PerLayer:
    """Policies of a model's layers: one for each of the first layers, and one for all the
    others.

    Fits a model with any number of layers. If the number is known, a plain list of policies
    works too.
    """

    first: tuple[Policy, ...]
    rest: Policy

    def __post_init__(self) -> None:
        if not isinstance(self.first, tuple):
            raise ValueError(
                f"PerLayer(first=...) must be a tuple of policies, got {short_repr(self.first)}"
            )
        for name, policy in (
            *(("first", policy) for policy in self.first),
            ("rest", self.rest),
        ):
            verbs = ("init", "prefill", "update", "attend")
            check_verbs(f"PerLayer({name}=...)", policy, "a policy", verbs, "kvjax.Full()")

    def policy(self, layer: int) -> Policy:
        return self.first[layer] if layer < len(self.first) else self.rest

    def reaches(self, layers: int) -> bool:
        """True if a model with `layers` layers has one that uses `rest`."""
        return len(self.first) < layers or self.rest in self.first[:layers]

    def check(self, layers: int, kv_heads: int | None = None) -> None:
        """Raises ValueError if the policies were made for a model with other layers or KV
        heads.
        """

    @classmethod
    def of(cls, policies: Policy | PerLayer | Sequence[Policy]) -> PerLayer:
        """One policy for all layers, or a policy for each layer, as a PerLayer."""
        if isinstance(policies, PerLayer):
            return policies
        if isinstance(policies, Sequence):
            if not policies:
                raise ValueError(
                    "a list of policies needs one for each layer, got an empty one"
                )
            return cls(tuple(policies[:-1]), policies[-1])
        return cls((), policies)
