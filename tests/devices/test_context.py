"""A cache whose tokens are dealt to devices reads what one device reads, and exchanges what the formulas say."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.sharding import Mesh

import kvjax
from kvjax import (
    BallPages,
    CacheSpec,
    Compressed,
    Evicting,
    Exact,
    Fier,
    Fifo,
    Full,
    HostOffload,
    HotSet,
    LastQuery,
    LogSparse,
    MinMaxPages,
    Paris,
    Placement,
    ProductCodes,
    Quantized,
    Retrieval,
    Speculative,
    context,
    presets,
)
from tests.devices.test_rows_and_heads import COLLECTIVE

SPEC = CacheSpec(batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=112, dtype="float32")
PROMPT, STEPS, WINDOW = 24, 40, 30
DEVICES = np.array(jax.devices())
THREE = Placement(
    mesh=Mesh(DEVICES.reshape(2, 2, 2), ("data", "model", "ctx")), batch="data", heads="model", context="ctx"
)


def along(parts: int) -> Placement:
    return Placement(mesh=Mesh(DEVICES[:parts], ("ctx",)), context="ctx")


ZONES: dict[str, Any] = {"sink": 2, "local": 6, "demote": Fifo(leave=16)}
FIER = Retrieval(selector=Fier(group=4), budget=24, **ZONES)
# A policy, a placement, a sliding window; of a case with a window no prompt is read, and the steps begin at once.
CASES: dict[str, tuple[kvjax.Policy, Placement, int | None]] = {
    "full": (Full(), along(4), None),
    "4 bits in a window": (Compressed(store=Quantized(bits=4, key_group=4), **ZONES), along(4), WINDOW),
    "fier": (FIER, THREE, None),
    "fier, rows and heads": (FIER, dataclasses.replace(THREE, context=None), None),
    "pages per query head in a window": (
        Retrieval(selector=MinMaxPages(page=4, group_reduce="per_head"), budget=32, **ZONES),
        along(4),
        WINDOW,
    ),
    "paris": (Retrieval(selector=Paris(candidates=30), budget=24, **ZONES), THREE, None),
}

MORE: dict[str, tuple[kvjax.Policy, Placement, int | None]] = {
    "fier, dense below 60 tokens": (dataclasses.replace(FIER, dense_below=60), THREE, None),
    "fier in host memory": (dataclasses.replace(FIER, store=HostOffload()), THREE, None),
    "fier a step late": (Speculative(FIER, tau=0.0), THREE, None),
    "pages a step late in host memory": (
        Speculative(Retrieval(selector=MinMaxPages(page=4), store=HostOffload(page=4), budget=32, **ZONES), tau=-1.0),
        along(4),
        None,
    ),
    "pages by ball in a window": (Retrieval(selector=BallPages(page=4), budget=32, **ZONES), along(4), WINDOW),
    "paris per query head in a window": (
        Retrieval(selector=Paris(candidates=30, votes="plain", group_reduce="per_head"), budget=16, **ZONES),
        along(4),
        WINDOW,
    ),
    "paris by length, a step late": (
        Speculative(Retrieval(selector=Paris(), budget=24, **ZONES), tau=0.0),
        THREE,
        None,
    ),
    "product codes": (
        Retrieval(selector=ProductCodes(parts=4, bits=3, learn=16), budget=24, **ZONES),
        THREE,
        None,
    ),
    "fier over 4 bits, log-sparse": (
        Retrieval(
            selector=Fier(group=4),
            store=Quantized(bits=4, key_group=4),
            budget=24,
            sink=2,
            local=6,
            demote=LogSparse(window=16),
        ),
        along(4),
        None,
    ),
    "4 bits": (Compressed(store=Quantized(bits=4, key_group=4), **ZONES), THREE, None),
    "full in a window": (Full(), THREE, WINDOW),
    "exact by mean query": (Retrieval(selector=Exact(group_reduce="mean_query"), budget=20, **ZONES), along(8), None),
    "tova": (Evicting(evictor=LastQuery(), budget=24), THREE, None),
    "magicpig, hashes on all devices": (
        presets.magicpig(budget=64, bits=6, tables=40, local=6, chunk=16, dense_layers=0).rest,
        THREE,
        None,
    ),
}


def tokens(count: int, seed: int) -> tuple[Array, ...]:
    rng = np.random.default_rng(seed)  # jax.random would compile
    return tuple(jnp.asarray(rng.standard_normal((2, count, n, 16), np.float32)) for n in (4, 2, 2))


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
    """Outputs and positions, the HLO of the steps, the cache, and the program of the steps."""
    cache, outs = kvjax.init_layer(policy, spec, placement), []
    chunk = jax.jit(partial(prompt, window=window))
    for seed, lengths in ((0, [24, 17]), (3, [20, 24])) if window is None else ():
        out, cache = chunk(cache, *tokens(PROMPT, seed), jnp.array(lengths, jnp.int32))
        outs.append(out)
    steps = jax.jit(partial(decode, window=window), donate_argnums=0).lower(cache, *tokens(STEPS, 6)).compile()
    (stepped, positions), cache = steps(cache, *tokens(STEPS, 6))
    return [*outs, stepped], np.asarray(positions), steps.as_text(), cache, steps


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
        policy, placement, window = (CASES | MORE)[name]
        key = policy, placement if split else None, window
        if key not in found:
            found[key] = run(*key)
        return found[key]

    return of


def check(one: Any, split: Any) -> None:
    for a, b in zip(one[0], split[0], strict=True):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), atol=5e-6)
    np.testing.assert_array_equal(split[1], one[1])
    np.testing.assert_array_equal(np.asarray(split[3].length), np.asarray(one[3].length))


@pytest.mark.thorough
@pytest.mark.parametrize("name", MORE)
def test_more_methods_on_several_devices_read_as_on_one(runs: Any, name: str) -> None:
    check(runs(name, False), runs(name, True))


@pytest.mark.parametrize("name", CASES)
def test_tokens_on_several_devices_are_read_as_on_one(runs: Any, name: str) -> None:
    (*_, alone, _), (*_, cache, _) = runs(name, False), runs(name, True)
    check(runs(name, False), runs(name, True))
    for leaf, home in zip(jax.tree.leaves(cache), jax.tree.leaves(kvjax.shardings(cache)), strict=True):
        assert leaf.sharding.is_equivalent_to(home, leaf.ndim)
    parts = np.prod([CASES[name][1].parts(what) for what in ("batch", "heads", "context")])
    for leaf, whole in zip(*map(history, (cache, alone)), strict=True):
        assert leaf.addressable_shards[0].data.nbytes == whole.nbytes // parts


@pytest.mark.parametrize("name", CASES)
def test_step_exchanges_what_the_formula_says(runs: Any, name: str) -> None:
    policy, placement, _ = CASES[name]
    C, B, K, G, D = placement.parts("context"), 2 // placement.parts("batch"), 2 // placement.parts("heads"), 2, 16
    sizes = [C * B * K * G * (D + 1)] if C > 1 else []  # the parts of attention
    if C > 1 and isinstance(policy, Retrieval):
        unit, rule = policy.selector.unit, policy.selector.group_reduce
        heads = G if rule == "per_head" else 1
        sizes.append(C * B * K * heads * policy.selected // unit * 2)  # offers
        if "softmax" in rule:
            sizes.append(C * B * K * G)  # log-sums
    sums = 0
    if isinstance(policy, Retrieval) and isinstance(policy.selector, Paris):
        levels, slots = 6 * D // 8 + 2, policy.init(SPEC).store.slots
        sizes += [B * K * levels, B * K * slots // policy.demote.leave * C]  # votes, and ties by stripe
        sums = 1
    found = COLLECTIVE.findall(runs(name, True)[2])
    kinds = Counter(kind for _, kind in found)
    assert kinds.pop("all-reduce", 0) == sums
    assert set(kinds) <= {"all-gather"}
    shapes = [shape.split("[")[1].split("]")[0].split(",") for shape, _ in found]
    assert Counter(int(np.prod([int(n) for n in shape])) for shape in shapes) == Counter(sizes)


def test_devices_agree_on_the_most_voted_tokens_ties_by_place() -> None:
    """Candidates of all devices together are those of one, also where stripes of many devices tie."""
    stripes, turns, rng = context.Stripes("ctx", 4, 3), 5, np.random.default_rng(0)
    marks = rng.integers(0, 4, (2, 2, 2, turns * 12), dtype=np.uint8)
    marks[1, 0] = 2  # all tie
    wanted = np.array([[23, 7], [60, 0], [11, 99]], np.int32)

    def share(own: Array, count: Array) -> Array:
        return jax.vmap(lambda n: context.share_of_highest(own[:, :, :, 0], n, 3, stripes))(count)[:, :, :, :, None]

    dealt = marks.reshape(2, 2, 2, turns, 4, 3).swapaxes(3, 4).reshape(2, 2, 2, 4, -1)
    split, whole = jax.P(None, None, None, "ctx"), jax.P(None, None, None, None, "ctx")
    run = jax.jit(jax.shard_map(share, mesh=along(4).mesh, in_specs=(split, jax.P()), out_specs=whole, check_vma=False))
    order = np.argsort(-marks.astype(int), axis=-1, kind="stable")
    for shares, counts in zip(np.asarray(run(dealt, wanted)), wanted, strict=True):
        for b, k, g in np.ndindex(2, 2, 2):
            highest = order[b, k, g][: min(counts[b], np.sum(marks[b, k, g] > 0))]
            np.testing.assert_array_equal(shares[b, k, g], np.bincount(highest // 3 % 4, minlength=4))


def test_saves_and_larger_caches_do_not_depend_on_the_split(runs: Any, tmp_path: Path) -> None:
    (*_, alone, _), (*_, cache, _) = runs("fier", False), runs("fier", True)

    def assert_equal(found: kvjax.LayerCache, wanted: kvjax.LayerCache) -> None:
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

    kvjax.save(tmp_path / "split", cache)
    assert_equal(kvjax.restore(tmp_path / "split", kvjax.init_layer(FIER, SPEC)), alone)
    other = kvjax.restore(tmp_path / "split", kvjax.init_layer(FIER, SPEC, along(4)))
    kvjax.save(tmp_path / "other", other)
    assert_equal(kvjax.restore(tmp_path / "other", kvjax.init_layer(FIER, SPEC, THREE)), cache)
    shorten, grown = jax.jit(kvjax.truncate), kvjax.grow(cache, 160)
    kvjax.save(tmp_path / "shorter", shorten(cache, jnp.array([70, 33])))
    shorter = kvjax.restore(tmp_path / "shorter", kvjax.init_layer(FIER, SPEC))
    assert_equal(shorter, shorten(alone, jnp.array([70, 33])))
    kvjax.save(tmp_path / "grown", grown)
    larger = dataclasses.replace(SPEC, capacity=160)
    assert_equal(kvjax.restore(tmp_path / "grown", kvjax.init_layer(FIER, larger)), kvjax.grow(alone, 160))
    assert_equal(kvjax.restore(tmp_path / "split", kvjax.init_layer(FIER, larger, THREE)), grown)


def test_several_steps_rows_and_followers_are_those_of_one_device() -> None:
    """`decode` of several tokens, `rollback`, `insert` and a layer that attends to what another selected."""
    policies = [FIER, FIER.follower(), Full()]

    def talk(cache: kvjax.Cache, prefix: kvjax.Cache, first: Any, steps: Any) -> Any:
        layers, outs, selection = [], [], None
        for layer in cache.layers:
            _, layer = kvjax.prefill(layer, *first)
            layer = kvjax.rollback(layer, layer.length - 2)
            out, layer, info = kvjax.decode_info(layer, *steps, selection=selection)
            selection = info.selection
            layers.append(layer)
            outs += [out, jnp.sort(info.positions, axis=-1)]
        return outs, kvjax.insert(kvjax.Cache(tuple(layers)), prefix, 1)

    found = []
    for placement in (None, THREE):
        cache = kvjax.init(policies, SPEC, layers=3, placement=placement)
        alone = None if placement is None else dataclasses.replace(placement, batch=None)
        prefix = kvjax.init(policies, dataclasses.replace(SPEC, batch=1), layers=3, placement=alone)
        found.append(jax.jit(talk)(cache, prefix, tokens(60, 0), tokens(12, 1)))
    (one, before), (split, after) = found
    for a, b in zip(one, split, strict=True):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), atol=5e-6)
    assert after.length.tolist() == before.length.tolist() == [70, 0]


def test_owner_off_by_one_is_noticed(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests compare changes when a device takes the stripes of its neighbour for its own."""
    right = context.Stripes.slot

    def wrong(stripes: context.Stripes, place: Array) -> tuple[Array, Array]:
        return right(stripes, place + stripes.tokens)

    monkeypatch.setattr(context.Stripes, "slot", wrong)
    spec = dataclasses.replace(SPEC, capacity=128)  # of another capacity, nothing is traced yet
    (split, _), _ = jax.jit(partial(decode, window=None))(kvjax.init_layer(FIER, spec, THREE), *tokens(STEPS, 6))
    (one, _), _ = runs("fier", False)[4](kvjax.init_layer(FIER, SPEC), *tokens(STEPS, 6))
    assert np.max(np.abs(np.asarray(split) - np.asarray(one))) > 0.1


@pytest.mark.parametrize(
    ("policy", "parts", "error"),
    [
        (FIER, 8, r"Fier\(group=4\) does not divide .* of 2"),
        (FIER, 3, r"deals chunks of 16 tokens to 3 devices.* leave a multiple of 3"),
        (Retrieval(selector=MinMaxPages(page=8), budget=32, **ZONES), 4, "would cut pages of 8; .* multiple of 32"),
        (dataclasses.replace(FIER, store=HotSet(tokens=64)), 2, "keeps what steps select on one device"),
        (kvjax.PerHead(heads=(1,), chosen=Full(), others=FIER), 2, "grows with the capacity and has no over_context"),
        (Full(), 3, "deals a capacity of 112 tokens to 3 devices.* use 114"),
    ],
)
def test_what_cannot_be_dealt_is_refused(policy: Any, parts: int, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        kvjax.init_layer(policy, SPEC, along(parts))
