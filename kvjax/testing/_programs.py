"""Laws of compiled programs: one program, in place, of constant structure."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.attention import attention
from kvjax.cache.cache import LayerCache, init_layer
from kvjax.cache.flushing import flush
from kvjax.memory import shapes
from kvjax.policies import Policy
from kvjax.spec import CacheSpec
from kvjax.testing._anatomy import core, has_budget, selects, twin, with_fields
from kvjax.testing._drive import CHUNK, fill, new_cache, random_tokens, step, with_room


def one_trace_serves_all_steps(policy: Policy, spec: CacheSpec) -> None:
    """Steps that differ in position, active rows and flushes run one program."""
    tokens = random_tokens(spec, 15)
    traces = []

    @partial(jax.jit, donate_argnums=0)
    def run(
        cache: LayerCache, q: Array, k: Array, v: Array, active: Array
    ) -> tuple[Array, LayerCache | None]:
        traces.append(1)
        return attention(cache, q, k, v, active=active)

    cache = new_cache(policy, spec)
    for i in range(min(100, spec.capacity)):
        active = np.arange(spec.batch) <= i
        _, cache = run(cache, *tokens.at(np.full((spec.batch, 1), i)), active)
        assert len(traces) == 1, f"traced again for step {i}"


def step_is_in_place(policy: Policy, spec: CacheSpec) -> None:
    """A donated step aliases its whole cache, and makes no copy of it: temp bytes under 1/4 of
    a large cache.

    A policy that evicts gets slots for all tokens: its cache is as large as its budget.

    A policy with a budget holds a score of every token, which is large compared with codes of
    few bits: for it the limit is 1/4 of the exact keys and values.
    """
    for batch in (1, spec.batch):
        large = dataclasses.replace(
            spec,
            batch=batch,
            capacity=max(32768, spec.capacity),
            head_dim=max(128, spec.head_dim),
            dtype=jnp.float32,
        )
        cache = shapes(partial(init_layer, with_room(policy, large), large))
        q, k, v = (
            jax.ShapeDtypeStruct((batch, 1, heads, channels), large.dtype)
            for heads, channels in (
                (large.q_heads, large.head_dim),
                (large.kv_heads, large.head_dim),
                (large.kv_heads, large.value_size),
            )
        )
        compiled = jax.jit(attention, donate_argnums=0).lower(cache, q, k, v).compile()
        memory: Any = compiled.memory_analysis()
        size = sum(
            np.prod(a.shape, dtype=np.int64) * a.dtype.itemsize for a in jax.tree.leaves(cache)
        )
        aliased = memory.alias_size_in_bytes + memory.host_alias_size_in_bytes
        assert aliased >= size, f"{aliased} of {size} bytes are aliased"
        exact = batch * large.capacity * large.key_value_bytes
        beside = max(size, exact) if selects(policy) else size
        # cuBLAS takes a workspace of 32 MiB, whatever the sizes.
        allowed = beside // 4 + (32 * 2**20 if jax.default_backend() == "gpu" else 0)
        assert memory.temp_size_in_bytes <= allowed, (
            f"{memory.temp_size_in_bytes} temp bytes besides {beside} of cache"
        )


def structure_is_constant(policy: Policy, spec: CacheSpec) -> None:
    """Every verb keeps tree structure, shapes, dtypes and memory kinds, and every leaf has the
    batch axis first.
    """
    tokens = random_tokens(spec, 16)
    start = init_layer(policy, spec)
    prompt, _ = fill(start, tokens, np.full(spec.batch, CHUNK))
    _, stepped, _ = step(prompt, tokens, np.full(spec.batch, CHUNK))
    for name, after in (
        ("prefill", prompt),
        ("update and attend", stepped),
        ("flush", jax.jit(flush)(stepped)),
    ):
        chex.assert_trees_all_equal_shapes_and_dtypes(after, start)
        assert _memory(after) == _memory(start), f"{name} moved arrays to another memory"
    assert all(a.shape[0] == spec.batch for a in jax.tree.leaves(start)), (
        "a leaf whose first axis is not the batch"
    )
    buffers = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(start) if a.nbytes]
    assert len(buffers) == len(set(buffers)), (
        "init shares a buffer between fields, which donation refuses"
    )


def policy_is_a_value(policy: Policy, spec: CacheSpec) -> None:
    """Equal policies are one static argument: hashable, equal, with equal reprs; a copy with
    another budget differs.
    """
    other = twin(policy)
    assert other == policy, "an unchanged copy does not equal the policy"
    assert hash(other) == hash(policy), "equal policies have different hashes"
    assert repr(other) == repr(policy), "equal policies print differently"
    arrays = [
        n
        for n, v in vars(policy).items()
        if any(isinstance(x, jax.Array) for x in jax.tree.leaves(v))
    ]
    assert not arrays, f"the policy holds arrays, {', '.join(arrays)}; they belong in its state"
    inner = core(policy)
    fields: Any = dataclasses.fields(inner) if dataclasses.is_dataclass(inner) else ()
    if has_budget(policy) and any(field.name == "budget" for field in fields):
        unit = getattr(getattr(inner, "selector", None), "unit", 1)
        larger: Policy = with_fields(policy, budget=inner.budget + unit)
        assert larger != policy, (
            "a copy with a larger budget equals the policy, so jit would run its program"
        )


def _memory(tree: Any) -> list[Any]:
    return [a.sharding.memory_kind for a in jax.tree.leaves(tree)]
