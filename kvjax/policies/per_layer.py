"""Policies of a model's layers, which may differ from layer to layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvjax.policies.policy import Policy


@dataclass(frozen=True)
class PerLayer:
    """Policies of a model's layers: one for each of the first layers, and one for all the others.

    Fits a model with any number of layers. If the number is known, a plain list of policies works too.
    """

    first: tuple[Policy, ...]
    rest: Policy

    def policy(self, layer: int) -> Policy:
        return self.first[layer] if layer < len(self.first) else self.rest

    def reaches(self, layers: int) -> bool:
        """True if a model with `layers` layers has one that uses `rest`."""
        return len(self.first) < layers or self.rest in self.first[:layers]

    def check(self, layers: int, kv_heads: int | None = None) -> None:
        """Raises ValueError if the policies were made for a model with other layers or KV heads."""

    @classmethod
    def of(cls, policies: Policy | PerLayer | Sequence[Policy]) -> PerLayer:
        """One policy for all layers, or a policy for each layer, as a PerLayer."""
        if isinstance(policies, PerLayer):
            return policies
        if isinstance(policies, Sequence):
            if not policies:
                raise ValueError("a list of policies needs one for each layer, got an empty one")
            return cls(tuple(policies[:-1]), policies[-1])
        return cls((), policies)
