"""How long the drafts of a model by itself should be (`kvjax.SelfDraft`).

A decode step of a long context is bound by what it reads: the weights, and keys and values of
all rows. A draft step reads the weights too, but of the cache only an index and the budget. So
the time of either is that of its bytes, and of the kernels that read little: for each layer,
and once more for each layer that selects. `benchmarks/results/lossless.json` has the steps of
whole models from which these are taken, on one H200.

If each token of a draft is right with probability a, given that those before it are, a draft of
n tokens gives 1 + a + ... + a^n tokens in the time of n draft steps and one verification.
"""

from __future__ import annotations

from functools import cache as cached
from typing import Any, NamedTuple

import jax
import numpy as np

from kvjax import ops
from kvjax.cache.cache import Cache
from kvjax.generation.kept_selections import keeps_selection
from kvjax.policies import Policy, Recurrent
from kvjax.policies.short import Short, measured
from kvjax.spec import CacheSpec

# Time of a step that verifies 5 to 8 tokens in steps of full attention. Measured for the kernel
# of a layer on an H200: 137 us for 8 tokens and 124 us for one, of 131072 tokens with D = 128
# (`decode_tokens.json`).
VERIFICATION = 1.1
# Share of drafted tokens that are right before a row has drafted any, and the number of tokens
# which that expectation counts as. fier at a budget of 1024 agreed with full attention in .935 to
# .99 of the tokens of three texts of 4096 and 16384 tokens (`lossless_acceptance.json`).
USUAL = 0.93
TRUST = 2.0
# Share of a row's counts that the next round keeps, and the one after a step that drafted nothing.
# With these and TRUST, drafts that are always wrong come to an end even where they cost little (a
# tenth of a full step), and trying one again now and then takes less than .02 of the time.
MEMORY = 0.95
IDLE_MEMORY = 0.995
PRICE = 0.25  # of a draft step in verifications, where step times are not known
# Bytes that a GPU reads in the time of a layer's small kernels, and of those of a selection: 40 us
# each at 4.4 TB/s.
KERNELS = 176e6
# Time of a selection's reads, from an index and at single tokens, over that of as many bytes in
# a row.
SCATTERED = 1.5
# Times as fast as full attention, at least; with less nothing is drafted. More than 1, as costs are
# estimates.
WORTH = 1.1


class StepCosts(NamedTuple):
    """Bytes that a step reads, or as many as a GPU reads in the same time."""

    full: float  # of a step of full attention
    draft: float

    @property
    def verification(self) -> float:
        return VERIFICATION * self.full

    @property
    def price(self) -> float:
        """The time of a draft step, as a share of a verification."""
        return self.draft / self.verification

    def gain(self, tokens: int, rate: float = USUAL) -> float:
        """The speed of drafts of `tokens` tokens in that of full attention, if each token is
        right with probability `rate`.

        >>> round(StepCosts(full=2.0, draft=1.0).gain(4, rate=0.9), 2)
        1.32
        """
        gained = sum(rate**i for i in range(tokens + 1))
        return gained * self.full / (self.verification + tokens * self.draft)


def step_costs(
    cache: Cache, weights: float, length: int, steps_per_selection: int
) -> StepCosts | None:
    """The costs of steps of a model of `weights` bytes with rows of `length` tokens in `cache`;
    None if no measurement on this kind of device says what its selections cost. That of a draft
    step is a mean, where not all of them select.
    """
    selecting = [layer.policy for layer in cache.layers if layer.policy.selects]
    if not all(_name(policy) in _known() for policy in selecting):
        return None
    full = draft = float(weights)
    budget = 0
    for layer in cache.layers:
        if isinstance(layer.policy, Recurrent):  # a step of either kind reads its state
            full += layer.nbytes.device
            draft += layer.nbytes.device
            continue
        spec = layer.spec if layer.placement is None else layer.placement.local(layer.spec)
        everything = spec.batch * min(length, spec.capacity) * _token_bytes(layer.policy, spec)
        # a layer that follows has the budget of its anchor
        budget = getattr(layer.policy, "budget", budget)
        full += everything + KERNELS
        draft += KERNELS
        if selects(layer.policy):
            selected = spec.batch * budget * spec.key_value_bytes
            kept = keeps_selection(layer, steps_per_selection)
            selections = 1 / steps_per_selection if kept else 1.0  # in a step
            read = selected + selections * _index_bytes(layer.policy, spec, length)
            draft += min(SCATTERED * read, everything) + selections * KERNELS
        else:
            draft += everything
    return StepCosts(full, draft)


def selects(policy: Policy) -> bool:
    """True if a step reads a part of the tokens, which the policy or another layer selects."""
    return policy.selects or policy.follows


@cached
def keeps_on_host(policy: Policy, spec: CacheSpec) -> bool:
    """True if the state of `policy` has arrays in host memory, on a CPU too."""
    made = jax.make_jaxpr(lambda: policy.init(spec))()
    return any(aval.memory_space == jax.memory.Space.Host for aval in made.out_avals)


def why_idle(cache: Cache, costs: StepCosts | None, tokens: int) -> str | None:
    """Why drafts of up to `tokens` tokens do not pay; None if they do, or if nobody knows."""
    if any(isinstance(layer.policy, Short) for layer in cache.layers):
        return (
            f"no tokens are drafted, because in a cache for {cache.spec.capacity} tokens attention to all of them is "
            "as fast as a selection"
        )
    if costs is None:
        return None
    best = max(costs.gain(n) for n in range(1, tokens + 1))
    if best >= WORTH:
        return None
    return (
        f"no tokens are drafted, because the cache is so short that drafts would give {best:.2f} times the speed of "
        "full attention"
    )


def tokens_in_one_pass(spec: CacheSpec) -> int:
    """Tokens of a draft, 3 to 7, that are verified in one pass of the kernel over the cache:
    with the one before them, it takes 32 query heads of a KV head together, and 16 if D > 128.
    """
    together = 32 if spec.head_dim <= 128 else 16
    return int(np.clip(together // spec.group - 1, 3, 7))


def _index_bytes(policy: Policy, spec: CacheSpec, length: int) -> float:
    """Bytes of its index that a step reads, over all rows."""
    selector: Any = getattr(policy, "selector", None)
    return 0.0 if selector is None else spec.batch * selector.bytes_read(spec, length)


def _name(policy: Any) -> str:
    """The name of what selects, as measurements know it."""
    return type(getattr(policy, "selector", getattr(policy, "hashing", None))).__name__


def _known() -> frozenset[str]:
    """The selectors that were timed on this kind of device."""
    return frozenset(measured().get(ops.device_kind() or "", {}))


@cached
def _token_bytes(policy: Policy, spec: CacheSpec) -> float:
    return policy.bytes_per_token(spec)
