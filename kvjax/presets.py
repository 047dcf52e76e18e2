"""Presets: the methods of the papers, as parts put together with the paper's defaults, and the table of them.

A preset returns the policies of all layers of a model. Its docstring says where it differs from the paper.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from kvjax.caches import Full, Policy, Retrieval
from kvjax.demotion import Fifo
from kvjax.hook import Layered
from kvjax.pick import Pool
from kvjax.selectors import Fier
from kvjax.spec import require_int


def full() -> Layered:
    """Every token, attended by every query."""
    return Layered((), Full())


def fier(
    budget: int = 1024,
    *,
    group: int = 32,
    pool: Pool = "mean_softmax",
    sink: int = 0,
    local: int = 1,
    chunk: int = 256,
    dense_layers: int = 2,
) -> Layered:
    """FIER: every token is kept, and a step attends to the `budget` whose 1-bit keys score best.

    The first `dense_layers` layers attend to everything. Sealed groups of `group` tokens are scored by 1-bit keys; the
    newest tokens, up to `chunk` of them, wait unsealed and are scored exactly. The paper forces no token into the
    choice, so `sink` is 0 and `local` is the new token alone.

    **Source:** FIER (2025), Algorithm 1; g = 32. **Differs:** the choice is shared by a GQA group (`pool`;
    "per_head" is the paper's rule), and a group is sealed with its chunk, not as soon as it is full (chunk=group
    seals as the paper does).
    """
    require_int("fier(dense_layers=...)", dense_layers, at_least=0)
    require_int("fier(budget=...)", budget, at_least=1)
    policy = Retrieval(
        selector=Fier(group=group, pool=pool),
        budget=budget,
        sink=sink,
        local=local,
        demote=Fifo(leave=chunk),
        dense_below=0,
    )
    return Layered((Full(),) * dense_layers, policy)


@dataclass(frozen=True)
class Preset:
    """A row of the table of methods."""

    name: str
    make: Callable[..., Layered]
    keeps: str  # what it keeps and attends to
    paper: str
    has_budget: bool = True

    def policy(self) -> Policy:
        """Of a layer that the method is applied to, with the preset's defaults."""
        return self.make().rest


REGISTRY: dict[str, Preset] = {
    p.name: p
    for p in (
        Preset("full", full, "every token, attends to all", "-", has_budget=False),
        Preset("fier", fier, "every token and 1-bit keys, attends to the budget", "FIER 2025"),
    )
}


def find(name: str) -> Preset:
    """The preset of that name, or an error with the nearest one."""
    if name in REGISTRY:
        return REGISTRY[name]
    near = difflib.get_close_matches(name, REGISTRY, n=1, cutoff=0.0)
    raise ValueError(f"unknown cache {name!r}; did you mean {near[0]!r}? There are {', '.join(REGISTRY)}")
