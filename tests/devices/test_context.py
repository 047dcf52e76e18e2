"""A cache whose tokens are dealt to devices reads what one device reads, and exchanges what the formulas say."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.sharding import Mesh

import kvjax
from kvjax import (
    CacheSpec,
    Compressed,
    Exact,
    Fier,
    Fifo,
    Full,
    MinMaxPages,
    Placement,
    Quantized,
    Retrieval,
    context,
)
from tests.devices.test_rows_and_heads import COLLECTIVE

SPEC = CacheSpec(batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=112, dtype="float32")
PROMPT, STEPS, WINDOW = 24, 40, 50
DEVICES = np.array(jax.devices())
THREE = Placement(
    mesh=Mesh(DEVICES.reshape(2, 2, 2), ("data", "model", "ctx")), batch="data", heads="model", context="ctx"
)


def along(parts: int) -> Placement:
    return Placement(mesh=Mesh(DEVICES[:parts], ("ctx",)), context="ctx")


ZONES: dict[str, Any] = {"sink": 2, "local": 6, "demote": Fifo(leave=16)}
FIER = Retrieval(selector=Fier(group=4), budget=24, **ZONES)
CASES: dict[str, tuple[kvjax.Policy, Placement, int | None]] = {
    "full": (Full(), along(4), None),
    "full in a window": (Full(), THREE, WINDOW),
    "4 bits": (Compressed(store=Quantized(bits=4, key_group=4), **ZONES), along(4), None),
    "fier": (FIER, THREE, None),
    "pages per query head": (
        Retrieval(selector=MinMaxPages(page=4, group_reduce="per_head"), budget=32, **ZONES),
        along(4),
        None,
    ),
    "exact by mean query in a window": (
        Retrieval(selector=Exact(group_reduce="mean_query"), budget=20, **ZONES),
        along(8),
        WINDOW,
    ),
}


def tokens(count: int, seed: int) -> tuple[Array, ...]:
    return tuple(jax.random.normal(jax.random.key(seed + i), (2, count, n, 16)) for i, n in enumerate((4, 2, 2)))


def prompt(cache: kvjax.LayerCache, q: Array, k: Array, v: Array, lengths: Array, *, window: int | None) -> Any:
    out, cache = kvjax.prefill(cache, q, k, v, lengths=lengths, window=window)
    return jnp.where((jnp.arange(PROMPT)[None] < lengths[:, None])[..., None, None], out, 0), cache


def decode(cache: kvjax.LayerCache, q: Array, k: Array, v: Array, *, window: int | None) -> Any:
    """Steps, of which a row in turn takes none; outputs, and the positions that each read."""

    def step(cache: kvjax.LayerCache, t: Array) -> Any:
        active = jnp.arange(2) != t % 7
        one = [lax.dynamic_slice_in_dim(a, t, 1, axis=1) for a in (q, k, v)]
        out, cache, info = kvjax.attention_info(kvjax.flush(cache), *one, active=active, window=window, flush=False)
        assert info is not None
        assert info.positions is not None
        read = jnp.where(active[:, None, None, None], jnp.sort(info.positions, axis=-1), -1)
        return cache, (jnp.where(active[:, None, None, None], out, 0), read)

    cache, found = lax.scan(step, cache, jnp.arange(STEPS))
    return found, cache


def run(policy: kvjax.Policy, placement: Placement | None, window: int | None, spec: CacheSpec = SPEC) -> Any:
    """Outputs and positions, the HLO of the steps, and the cache."""
    cache, outs = kvjax.init_layer(policy, spec, placement), []
    chunk = jax.jit(partial(prompt, window=window))
    for seed, lengths in ((0, [24, 17]), (3, [20, 24])):
        out, cache = chunk(cache, *tokens(PROMPT, seed), jnp.array(lengths, jnp.int32))
        outs.append(out)
    steps = jax.jit(partial(decode, window=window), donate_argnums=0).lower(cache, *tokens(STEPS, 6)).compile()
    (stepped, positions), cache = steps(cache, *tokens(STEPS, 6))
    return [*outs, stepped], np.asarray(positions), steps.as_text(), cache


def history(cache: kvjax.LayerCache) -> list[Array]:
    """The arrays that have a slot for each token, or one for some."""
    state = cache.state
    zones = state.tokens if isinstance(cache.policy, Full) else (state.store, state.index)
    return [leaf for leaf in jax.tree.leaves(zones) if leaf.ndim > 2]


@pytest.fixture(scope="module")
def runs() -> Any:
    """Each case on one device and on several, run once."""
    found: dict[Any, Any] = {}

    def of(name: str, split: bool) -> Any:
        if (name, split) not in found:
            policy, placement, window = CASES[name]
            found[name, split] = run(policy, placement if split else None, window)
        return found[name, split]

    return of


@pytest.mark.parametrize("name", CASES)
def test_tokens_on_several_devices_are_read_as_on_one(runs: Any, name: str) -> None:
    one, positions, _, alone = runs(name, False)
    split, found, _, cache = runs(name, True)
    np.testing.assert_array_equal(found, positions)
    for a, b in zip(one, split, strict=True):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), atol=5e-6)
    np.testing.assert_array_equal(np.asarray(cache.length), np.asarray(alone.length))
    for leaf, home in zip(jax.tree.leaves(cache), jax.tree.leaves(kvjax.shardings(cache)), strict=True):
        assert leaf.sharding.is_equivalent_to(home, leaf.ndim)
    for leaf, whole in zip(*map(history, (cache, alone)), strict=True):
        assert leaf.addressable_shards[0].data.nbytes == whole.nbytes // CASES[name][1].mesh.size


@pytest.mark.parametrize("name", CASES)
def test_step_exchanges_what_the_formula_says(runs: Any, name: str) -> None:
    policy, placement, _ = CASES[name]
    C, B, K, G, D = placement.parts("context"), 2 // placement.parts("batch"), 2 // placement.parts("heads"), 2, 16
    sizes = [C * B * K * G * (D + 1)]  # the parts of attention
    if isinstance(policy, Retrieval):
        unit, rule = policy.selector.unit, policy.selector.group_reduce
        heads = G if rule == "per_head" else 1
        sizes.append(C * B * K * heads * policy.selected // unit * 2)  # offers
        if "softmax" in rule:
            sizes.append(C * B * K * G)  # log-sums
    found = COLLECTIVE.findall(runs(name, True)[2])
    assert {kind for _, kind in found} == {"all-gather"}
    shapes = [shape.split("[")[1].split("]")[0].split(",") for shape, _ in found]
    assert Counter(int(np.prod([int(n) for n in shape])) for shape in shapes) == Counter(sizes)


def test_owner_off_by_one_is_noticed(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests compare changes when a device takes the stripes of its neighbour for its own."""
    right = context.Stripes.slot

    def wrong(stripes: context.Stripes, place: Array) -> tuple[Array, Array]:
        return right(stripes, place + stripes.tokens)

    monkeypatch.setattr(context.Stripes, "slot", wrong)
    spec = dataclasses.replace(SPEC, capacity=128)  # of another capacity, nothing is traced yet
    split, *_ = run(FIER, THREE, None, spec)
    assert np.max(np.abs(np.asarray(split[-1]) - np.asarray(runs("fier", False)[0][-1]))) > 0.1


@pytest.mark.parametrize(
    ("policy", "parts", "error"),
    [
        (FIER, 8, r"Fier\(group=4\) does not divide .* of 2"),
    ],
)
def test_what_cannot_be_dealt_is_refused(policy: Any, parts: int, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        kvjax.init_layer(policy, SPEC, along(parts))
