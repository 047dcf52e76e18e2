"""A cache whose rows and KV heads are split over devices does what one device does, without
communication.

`test_context.py` and `test_verbs.py` show it of FIER and TOVA in every run.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.sharding import Mesh

import kvjax
from kvjax import CacheSpec, LastQuery, Placement
from kvjax.validation import parts_of
from tests.devices.programs import COLLECTIVE
from tests.laws.cases import CASES

SPEC = CacheSpec(batch=4, q_heads=8, kv_heads=4, head_dim=16, capacity=200, dtype="float32")
MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
BOTH = Placement(mesh=MESH, batch="data", heads="model")
PLACEMENTS = {
    "rows": Placement(mesh=Mesh(np.array(jax.devices()[:4]), ("data",)), batch="data"),
    "heads": Placement(mesh=Mesh(np.array(jax.devices()[:4]), ("model",)), heads="model"),
    "rows and heads": BOTH,
    "heads over two axes": Placement(
        mesh=Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c")), heads=("a", "b")
    ),
}
STEPS, CHUNK = 45, 48


def case_of(name: str) -> tuple[Any, CacheSpec]:
    """A case of the laws with 4 rows and 4 KV heads."""
    case = CASES[name]
    group = case.spec.group
    return case.policy, dataclasses.replace(case.spec, batch=4, kv_heads=4, q_heads=4 * group)


def tokens(spec: CacheSpec) -> tuple[Array, Array, Array]:
    """q, k, v of two chunks of a prompt and of the steps, one after the other."""
    T = 2 * CHUNK + STEPS
    shapes = [
        (4, T, heads, spec.head_dim) for heads in (spec.q_heads, spec.kv_heads, spec.kv_heads)
    ]
    rng = np.random.default_rng(0)  # jax.random would compile
    return tuple(jnp.asarray(rng.standard_normal(shape), spec.dtype) for shape in shapes)  # type: ignore[return-value]


def run(cache: kvjax.LayerCache, q: Array, k: Array, v: Array) -> tuple[Any, kvjax.LayerCache]:
    """Two ragged chunks, and steps in which a row in turn takes nothing."""
    outs = []
    for i, lengths in enumerate(([48, 3, 40, 17], [48, 48, 0, 5])):
        part = slice(i * CHUNK, (i + 1) * CHUNK)
        out, cache = kvjax.attention(
            cache,
            q[:, part],
            k[:, part],
            v[:, part],
            lengths=np.array(lengths),
            first_chunk=i == 0,
        )
        outs.append(
            jnp.where(
                (jnp.arange(CHUNK)[None] < jnp.array(lengths)[:, None])[..., None, None], out, 0
            )
        )

    def step(cache: kvjax.LayerCache, t: Array) -> Any:
        active = jnp.arange(4) != t % 7
        one = [lax.dynamic_slice_in_dim(a, 2 * CHUNK + t, 1, axis=1) for a in (q, k, v)]
        out, cache, info = kvjax.attention_info(
            kvjax.flush(cache), *one, active=active, flush=False
        )
        assert info is not None
        seen = jnp.where(active[:, None], info.attended, 0)
        return cache, (jnp.where(active[:, None, None, None], out, 0), seen)

    cache, stepped = lax.scan(step, cache, jnp.arange(STEPS))
    return (outs, stepped), cache


def compile_run(
    policy: Any, spec: CacheSpec, placement: Placement | None
) -> tuple[Any, str, kvjax.LayerCache]:
    cache = kvjax.init_layer(policy, spec, placement)
    given = tokens(spec)
    program = jax.jit(run, donate_argnums=0).lower(cache, *given).compile()
    result, after = program(cache, *given)
    return result, program.as_text(), after


def assert_same(spec: CacheSpec, one: Any, split: Any) -> None:
    tolerance = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}[np.dtype(spec.dtype).name]
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(split), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            a, b = (np.asarray(x, np.float32) for x in (a, b))
            np.testing.assert_allclose(b, a, atol=tolerance, rtol=tolerance)
        else:  # a product of another shape may round a key's code to its neighbour
            different = np.mean(np.asarray(a) != np.asarray(b))
            assert different <= (1e-3 if a.size > 2000 else 0), (
                f"{different:.4f} of {a.dtype}{list(a.shape)} differ"
            )


def check_case(name: str, placement: Placement) -> None:
    policy, spec = case_of(name)
    one, _, alone = compile_run(policy, spec, None)
    split, program, after = compile_run(policy, spec, placement)
    assert_same(spec, one, split)
    assert_same(spec, alone.state, after.state)
    for leaf, home in zip(
        jax.tree.leaves(after), jax.tree.leaves(kvjax.shardings(after)), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(home, leaf.ndim)
        assert leaf.sharding.memory_kind == home.memory_kind
    found = COLLECTIVE.findall(program)
    mean = (
        isinstance(getattr(policy, "evictor", None), LastQuery) and placement.heads is not None
    )
    assert {kind for _, kind in found} == ({"all-reduce"} if mean else set()), found


@pytest.mark.thorough
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", CASES)
def test_every_case_split_in_every_way_does_what_one_device_does(
    name: str, placement: str
) -> None:
    policy = CASES[name].policy
    joins_heads = any(getattr(part, "joins_heads", False) for part in parts_of(policy))
    if placement != "rows" and (getattr(policy, "heads", None) is not None or joins_heads):
        with pytest.raises(
            ValueError, match=r"numbers the KV heads|computes with all KV heads"
        ):
            check_case(name, PLACEMENTS[placement])
    else:
        check_case(name, PLACEMENTS[placement])
