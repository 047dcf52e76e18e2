"""The exchanges of the devices of a placement in a decode step of a layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from kvjax.numerics.partial import Logits
from kvjax.policies.policy import Step
from kvjax.sharding.placement import Placement
from kvjax.spec import CacheSpec

KINDS = {
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "ppermute": "permute",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
}


class Exchange(NamedTuple):
    """A collective of a step."""

    kind: str  # "all-gather", "all-reduce", ...
    bytes: int  # that a device gives


def exchanges(policy: Any, spec: CacheSpec, placement: Placement) -> list[Exchange]:
    """The exchanges of a decode step of a layer, in order; those of the cache, not those of the
    model's own products. Nothing runs and nothing is compiled.

    Raises:
      ValueError: a policy that the placement cannot split.

    >>> import kvjax
    >>> placement = kvjax.Placement(jax.make_mesh((1,), ("ctx",)), context="ctx")
    >>> spec = kvjax.CacheSpec(batch=1, q_heads=4, kv_heads=2, head_dim=64, capacity=4096)
    >>> exchanges(kvjax.Full(), spec, placement)  # one device has nobody to tell
    []
    """
    placement.check(policy, spec)
    part = placement.policy_of_part(policy)
    local = placement.local(spec)
    sizes = list(placement.mesh.shape.items())

    def step(q: Any) -> Any:
        st = part.init(local)
        return part.attend(st, q, Step(Logits(1.0)))[0]

    q = jax.ShapeDtypeStruct(
        (local.batch, local.kv_heads, local.group, local.head_dim), local.dtype
    )
    made: Any = jax.make_jaxpr(step, axis_env=sizes)(q)
    used, _ = dce_jaxpr(getattr(made, "jaxpr", made), [True])
    return list(_collectives(used))


def explain_split(policy: Any, spec: CacheSpec, placement: Placement) -> str:
    """One sentence: how the tokens of a layer's cache are split, how a step selects among them,
    and what that costs."""
    parts = placement.parts("context")
    if parts == 1:
        return f"{placement}: each device has all tokens of its rows and heads"
    found = exchanges(policy, spec, placement)
    sent = sum(one.bytes for one in found)
    how = ""
    if getattr(policy, "selects", False):
        how = {
            "exact": ", which make the selection of one device together",
            "share": ", each of which selects its share of the budget among its own",
        }[placement.selection]
    times = "1 exchange" if len(found) == 1 else f"{len(found)} exchanges"
    return f"tokens over {parts} devices{how}: {times} a layer, for which a device gives {sent} bytes"


def _collectives(jaxpr: Any) -> Iterator[Exchange]:
    for eqn in jaxpr.eqns:
        if kind := KINDS.get(eqn.primitive.name):
            given = (math.prod(x.aval.shape) * x.aval.dtype.itemsize for x in eqn.invars)
            yield Exchange(kind, sum(given))
        for inner in jaxprs_in_params(eqn.params):
            yield from _collectives(inner)
