"""Full attention in caches so short that it is faster than a selection.

A selection costs a step several kernels, however few tokens there are. So a policy may leave
caches up to some capacity to `Full`; `kvjax.init` decides this when it makes a cache. A cache
that grows past the bound (`kvjax.grow`) gets its original policy, as if its tokens had come as
one prompt.

A preset cannot decide it: it is called before the capacity is known, which a command takes from
the prompt and `kvjax.grow` changes, and the bound counts bytes, which the batch and the heads
decide. So the policy carries the rule to where `Policy.of_size` sees a `CacheSpec`. It is worth
that: up to the bounds of short.json, 32 MiB and more of a layer's keys and values (8192 tokens
of one row with 8 heads of 128 in bfloat16), a selection was slower on each GPU measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from kvjax import ops
from kvjax.policies.full import Full
from kvjax.policies.policy import Policy
from kvjax.spec import CacheSpec, keep_ints

FILE = Path(__file__).with_name("short.json")
DenseCapacity = int | Literal["auto"]
WITHOUT_KERNELS = "NVIDIA H100 80GB HBM3 without kernels"


@dataclass(frozen=True)
class Short(Full):
    """Keeps every token and attends to all of them, because the cache is too short for `policy`
    to be faster.

    `kvjax.init` makes it from policies with a `dense_capacity`.

    >>> import kvjax
    >>> spec = kvjax.CacheSpec(batch=1, q_heads=4, kv_heads=2, head_dim=16, capacity=512)
    >>> policy = kvjax.Retrieval(selector=kvjax.Fier(), budget=64, dense_capacity=512)
    >>> kvjax.init(policy, spec, layers=1).layers[0].policy == Short(policy)
    True
    """

    policy: Policy

    def of_size(self, spec: CacheSpec) -> Policy:
        return self.policy.of_size(spec)


def refilled(policy: Policy, spec: CacheSpec, old: Policy, st: Any) -> Any | None:
    """The state of `policy` in a cache for `spec`, after a prompt of all tokens that `st`, a
    state of `old`, holds.

    None if `old` does not give its tokens back.
    """
    if (tokens := old.stored(st)) is None:
        return None
    return _refilled(policy, policy.init(spec), tokens, st.overflow)


@partial(jax.jit, static_argnums=0)
def _refilled(policy: Policy, empty: Any, tokens: Any, overflow: jax.Array) -> Any:
    state = policy.prefill(empty, *tokens)
    return replace(state, overflow=state.overflow | overflow)


def check_dense_capacity(policy: Any) -> None:
    """Raises ValueError unless `policy.dense_capacity` is "auto" or a number of tokens."""
    is_auto = isinstance(policy.dense_capacity, str) and policy.dense_capacity == "auto"
    if not is_auto:
        keep_ints(policy, dense_capacity=0)


def if_long(policy: Any, selector: str, spec: CacheSpec) -> Policy:
    """The `policy` of a cache for `spec`, or `Short(policy)` where that attends to everything:
    the one place that decides it, for `Policy.of_size`.

    `selector` is the name of the class whose cost the policy pays to select.
    """
    most = policy.dense_capacity
    if most == "auto":
        most = measured_capacity(selector, spec)
    return Short(policy) if spec.capacity <= most else policy


def measured_capacity(selector: str, spec: CacheSpec) -> int:
    """The largest capacity, in tokens, at which attending to everything in a cache like `spec`
    is faster than a `selector` of that name.

    0 on devices without a measurement, such as CPUs. On a GPU that runs no kernels, as with
    KVJAX_KERNELS=off, a selection is only faster in a longer cache: measured on an H100, and
    taken for every kind, as both ways are bound by memory.
    """
    if jax.default_backend() != "gpu":
        return 0
    from kvjax.kernels_pallas import simt

    known = measured().get(ops.device_kind() or "", {})
    if simt.why_not():
        known = known | measured()[WITHOUT_KERNELS]
    itemsize = jnp.dtype(spec.dtype).itemsize
    bytes_per_token = 2 * spec.batch * spec.kv_heads * spec.head_dim * itemsize
    return known.get(selector, {}).get("bytes", 0) // bytes_per_token


@cache
def measured() -> dict[str, dict[str, dict[str, Any]]]:
    """The largest bytes of a layer's keys and values for which reading all is faster than
    selecting, by kind of device and selector. `benchmarks/short.py` writes the file."""
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(FILE.read_text())
    return found
