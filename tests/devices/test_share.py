"""Devices that select by share: each its part of the budget from its own tokens, and one exchange
merges what they attend to.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import (
    CacheSpec,
    Exact,
    Fier,
    Full,
    MinMaxPages,
    Paris,
    Placement,
    Retrieval,
    presets,
)
from kvjax.contrib.pqcache import ProductCodes
from kvjax.sharding.context import Stripes
from kvjax.sharding.context.shares import dealt_evenly
from kvjax.sharding.exchanges import exchanges, explain_split
from tests.devices.programs import exchanges as compiled_exchanges
from tests.devices.programs import wanted_exchanges
from tests.devices.test_context import (
    CASES,
    FIER,
    MAGICPIG,
    MORE,
    PROMPT,
    SPEC,
    STEPS,
    THREE,
    WINDOW,
    ZONES,
    along,
    compiled_steps,
    read_prompt,
    run,
    tokens,
)
from tests.oracles import attention

LARGE = 200  # tokens of a budget that every cache here has room in
filled = jax.jit(kvjax.prefill)


def by_share(placement: Placement) -> Placement:
    return dataclasses.replace(placement, selection="share")


SELECTORS: dict[str, tuple[kvjax.Selector, Placement, int | None]] = {
    "fier": (Fier(group=4), along(4), None),
    "pages": (MinMaxPages(page=4), along(2), None),
    "paris": (Paris(candidates=LARGE), along(4), None),
    "product codes": (ProductCodes(parts=4, bits=3, learn=8), THREE, None),
    "exact": (Exact(group_reduce="per_head"), along(8), WINDOW),
}


# ------------------------------------------------------------------------------------------------- what is selected


@pytest.mark.parametrize("name", SELECTORS)
def test_budget_for_all_tokens_reads_all_of_them(name: str) -> None:
    """Whatever the selector, in ragged rows, under a window that some devices see nothing of."""
    selector, placement, window = SELECTORS[name]
    policy = Retrieval(selector=selector, budget=LARGE, **ZONES)
    (out,), positions, *_ = run(policy, by_share(placement), window, prompts=False)
    (wanted,), read, *_ = run(Full(), None, window, prompts=False)
    np.testing.assert_allclose(np.asarray(out), np.asarray(wanted), atol=5e-6)
    np.testing.assert_array_equal(_as_sets(positions), _as_sets(read))


def _as_sets(positions: np.ndarray) -> np.ndarray:
    """bool[steps, B, K, G, tokens]: which positions a query head reads, each once."""
    heads = SPEC.group // positions.shape[3]
    member = positions[..., None] == np.arange(SPEC.capacity)
    count = member.sum(axis=-2)
    assert count.max() <= 1, "a token is read twice"
    return np.repeat(count > 0, heads, axis=3)


def own_shares(
    scores: np.ndarray, count: int, end: int, policy: Retrieval, parts: int
) -> list[np.ndarray]:
    """The positions that each device selects of `count` tokens with these scores, of which
    those before `end` are the history.
    """
    stripe = policy.demote.leave // parts
    history = np.arange(policy.sink, end)
    pending = np.arange(end, max(count - policy.local, end))
    runs = np.array_split(pending, parts)  # the first ones have one more
    found = []
    for device in range(parts):
        own = history[(history - policy.sink) // stripe % parts == device]
        own = np.concatenate([own, runs[device]])
        share = policy.selected // parts + (device < policy.selected % parts)
        best = np.lexsort((own, -scores[own]))[:share]
        found.append(own[best])
    return found


@pytest.mark.parametrize("budget", [24, 27])
def test_each_device_selects_its_own_best_and_the_parts_merge(budget: int) -> None:
    """Against a loop over steps, rows and heads in numpy. A budget of 24 leaves four for each
    of four devices, and one of 27 leaves them 5, 5, 5 and 4.
    """
    parts = 4
    policy = Retrieval(selector=Exact(group_reduce="mean_query"), budget=budget, **ZONES)
    q, k, v = tokens(2 * STEPS, 6)
    cache = kvjax.init_layer(policy, SPEC, by_share(along(parts)))
    step = compiled_steps(policy, cache.placement, None)
    k_of_row = np.zeros((2, SPEC.capacity, 2, 16), np.float32)
    v_of_row = np.zeros_like(k_of_row)
    outs = []
    reads = []
    for part in (slice(STEPS), slice(STEPS, None)):
        (out, positions), cache = step(cache, q[:, part], k[:, part], v[:, part])
        outs.append(np.asarray(out))
        reads.append(np.asarray(positions))
    out = np.concatenate(outs)
    positions = np.concatenate(reads)

    count = [0, 0]
    ends = [policy.sink, policy.sink]
    compared = 0
    for t in range(2 * STEPS):
        for row in range(2):
            if row == t % STEPS % 7:
                continue
            full = count[row] - ends[row] >= policy.demote.slots(policy.local)
            ends[row] += policy.demote.leave * full
            k_of_row[row, count[row]] = k[row, t]
            v_of_row[row, count[row]] = v[row, t]
            count[row] += 1
            for head in range(2):
                queries = np.asarray(q[row, t]).reshape(2, 2, 16)[head]
                keys = k_of_row[row, : count[row], head]
                scores = keys @ queries.mean(axis=0) / 4
                shares = own_shares(scores, count[row], ends[row], policy, parts)
                always = [np.arange(policy.sink), np.arange(count[row])[-policy.local :]]
                wanted = np.unique(np.concatenate([*shares, *always]))
                wanted = wanted[wanted < count[row]]
                read = np.sort(positions[t, row, head, 0])
                np.testing.assert_array_equal(read[read >= 0], wanted)
                logits = queries @ keys[wanted].T / 4
                weights = np.exp(logits - logits.max(axis=1, keepdims=True))
                weights /= weights.sum(axis=1, keepdims=True)
                np.testing.assert_allclose(
                    out[t, row, 0].reshape(2, 2, 16)[head],
                    weights @ v_of_row[row, wanted, head],
                    atol=5e-6,
                )
                compared += len(wanted) < count[row]
    assert compared > 100, "nothing was left out"


def test_budget_goes_where_the_tokens_are() -> None:
    """As evenly as the counts allow, and all of it if there are enough tokens: against dealing
    one unit at a time.
    """
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 9, (4, 200))
    counts[:, 0] = [0, 7, 0, 0]  # all on one device
    for budget in (0, 3, 7, 40):
        found = np.asarray(
            dealt_evenly(jnp.asarray(counts, jnp.int32), jnp.full((1, 1), budget))
        )
        for column, given in zip(counts.T, found.T, strict=True):
            left = budget
            wanted = np.zeros(4, int)
            while left and np.any(wanted < column):
                for device in range(4):
                    if left and wanted[device] < column[device]:
                        wanted[device] += 1
                        left -= 1
            np.testing.assert_array_equal(given, wanted)


def test_shares_of_a_count_add_up() -> None:
    stripes = Stripes("ctx", 3, 2)
    device = jnp.arange(3)[:, None]
    count = jnp.arange(50)[None]
    share = np.asarray(stripes.even_share(count, device))
    np.testing.assert_array_equal(share.sum(axis=0), np.arange(50))
    assert np.all(np.diff(share, axis=0) <= 0)
    assert np.all(share[0] - share[-1] <= 1)


# --------------------------------------------------------------------------------------------------- what it costs


PAGES = Retrieval(selector=MinMaxPages(page=4), budget=24, **ZONES)
PARIS = Retrieval(selector=Paris(candidates=30), budget=24, **ZONES)


def assert_one_exchange(program: Any, T: int) -> None:
    """The parts of attention of `T` tokens; another branch may take them one by one, where a
    chunk leaves between them. (An exact selection has three exchanges or more.)
    """
    numbers = 4 * SPEC.batch * SPEC.q_heads * (SPEC.head_dim + 1)
    wanted = {("all-gather", numbers): 1, ("all-gather", numbers * T): 1}
    assert compiled_exchanges(program.as_text()) == wanted


def test_step_has_one_exchange() -> None:
    cache = kvjax.init_layer(PARIS, SPEC, by_share(along(4)))
    assert_one_exchange(jax.jit(kvjax.attention).lower(cache, *tokens(1, 0)).compile(), T=1)


# --------------------------------------------------------------------------------------------- what it composes with


def test_cache_keeps_what_an_exact_one_keeps(tmp_path: Path) -> None:
    """So a save has no note of how its steps select: it goes on exactly on one device."""
    _, _, _, share, _ = run(FIER, by_share(THREE), None, prompts=True)
    _, _, _, alone, _ = run(FIER, None, None, prompts=True)
    kvjax.save(tmp_path / "share", share)
    restored = kvjax.restore(tmp_path / "share", kvjax.init_layer(FIER, SPEC))
    again = kvjax.restore(tmp_path / "share", kvjax.init_layer(FIER, SPEC, by_share(along(2))))
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(wanted))
    for leaf, home in zip(
        jax.tree.leaves(again), jax.tree.leaves(kvjax.shardings(again)), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(home, leaf.ndim)
    assert again.placement.selection == "share"
    assert "selection='share'" in repr(again.placement)


def test_rows_and_heads_beside_tokens_read_the_same() -> None:
    """On two devices of context, whatever else is split."""
    outs, positions, *_ = run(FIER, by_share(THREE), None, prompts=True)
    wanted, read, *_ = run(FIER, by_share(along(2)), None, prompts=True)
    for out, other in zip(outs, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(out), np.asarray(other), atol=5e-6)
    np.testing.assert_array_equal(positions, read)


SEVERAL = {
    "fier": FIER,
    "pages": PAGES,
    "paris": PARIS,
    "fier in host memory": dataclasses.replace(FIER, store=kvjax.HostOffload()),
    "fier over codes": dataclasses.replace(FIER, store=kvjax.TurboQuant()),
}


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(p, id=n, marks=[pytest.mark.thorough] * (" " in n))
        for n, p in SEVERAL.items()
    ],
)
def test_several_tokens_at_a_time_read_what_single_steps_read(policy: Retrieval) -> None:
    """By one exchange, and after a `rollback` of some of them."""
    q, k, v = tokens(13, 1)
    _, cache = filled(kvjax.init_layer(policy, SPEC, by_share(along(4))), *tokens(60, 0))
    first, second = ([a[:, part] for a in (q, k, v)] for part in (slice(8), slice(5, 13)))
    together = jax.jit(kvjax.decode).lower(cache, *first).compile()
    assert_one_exchange(together, T=8)
    out, after = together(cache, *first)
    after = jax.jit(kvjax.rollback)(after, after.length - 3)
    again, after = together(after, *second)

    @jax.jit
    def one_by_one(cache: kvjax.LayerCache) -> Any:
        def step(cache: kvjax.LayerCache, t: Any) -> Any:
            one = (jax.lax.dynamic_slice_in_dim(a, t, 1, axis=1) for a in (q, k, v))
            out, cache = kvjax.attention(cache, *one)
            return cache, out[:, 0]

        cache, outs = jax.lax.scan(step, cache, jnp.arange(13))
        return jnp.moveaxis(outs, 0, 1), cache.length

    wanted, length = one_by_one(cache)
    np.testing.assert_allclose(out, wanted[:, :8], atol=5e-6)
    np.testing.assert_allclose(again, wanted[:, 5:], atol=5e-6)
    np.testing.assert_array_equal(np.asarray(after.length), np.asarray(length))


def test_drafts_are_verified_by_all_tokens() -> None:
    """`decode(..., exact=True)` is full attention, by share as on one device."""
    text = [
        np.concatenate(parts, axis=1) for parts in zip(tokens(60, 0), tokens(8, 1), strict=True)
    ]
    _, cache = filled(kvjax.init_layer(FIER, SPEC, by_share(along(4))), *tokens(60, 0))
    out, _ = jax.jit(partial(kvjax.decode, exact=True))(cache, *tokens(8, 1))
    for row, t, head in np.ndindex(SPEC.batch, 8, SPEC.q_heads):
        q = text[0][row, 60 + t, head]
        k, v = (a[row, : 61 + t, head // SPEC.group] for a in text[1:])
        wanted, _ = attention(q[None], k, v, SPEC.head_dim**-0.5)
        np.testing.assert_allclose(out[row, t, head], wanted[0], atol=5e-6)


def test_layers_follow_a_share() -> None:
    q, k, v = tokens(1, 1)

    @jax.jit
    def step(anchor: kvjax.LayerCache, follower: kvjax.LayerCache) -> Any:
        _, anchor, info = kvjax.attention_info(anchor, q, k, v)
        _, follower, own = kvjax.attention_info(follower, q, k, v, selection=info.selection)
        return info.positions, own.positions

    layers = []
    for policy in (FIER, FIER.follower()):
        cache = kvjax.init_layer(policy, SPEC, by_share(along(4)))
        layers.append(filled(cache, *tokens(60, 0))[1])
    np.testing.assert_array_equal(*map(np.asarray, step(*layers)))


@pytest.mark.parametrize("policy", [FIER, PARIS], ids=["fier", "paris"])
def test_slots_past_the_count_may_hold_nan(policy: Retrieval) -> None:
    placement = by_share(THREE)
    parts = placement.parts("context")
    cache = kvjax.init_layer(policy, SPEC, placement)
    lengths = jnp.array([24, 20], jnp.int32)
    _, cache = read_prompt(cache, *tokens(PROMPT, 0), lengths, window=None)

    def poisoned(leaf: Any, value: float) -> Any:
        """`leaf` [B, K, S, ...], with `value` in the slots past the count of each device."""
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        own = leaf.shape[2] // parts
        slots = cache.state.store.slots // leaf.shape[2]  # of a group of tokens
        count = np.asarray(cache.state.store.count) // parts // slots
        empty = np.arange(leaf.shape[2]) % own >= count[:, None]
        spoilt = np.where(empty[:, None, :, None], value, np.asarray(leaf))
        return jax.device_put(spoilt.astype(leaf.dtype), leaf.sharding)

    st = cache.state
    store = dataclasses.replace(
        st.store, k=poisoned(st.store.k, np.nan), v=poisoned(st.store.v, 1e4)
    )
    index = jax.tree.map(
        lambda leaf: poisoned(leaf, np.nan) if leaf.ndim == 4 else leaf, st.index
    )
    spoilt = dataclasses.replace(cache, state=dataclasses.replace(st, store=store, index=index))
    step = compiled_steps(policy, placement, None)
    # It takes over its cache, which the other shares arrays with.
    (out, positions), _ = step(jax.tree.map(jnp.copy, spoilt), *tokens(STEPS, 6))
    (wanted, read), _ = step(cache, *tokens(STEPS, 6))
    np.testing.assert_array_equal(np.asarray(out), np.asarray(wanted))
    np.testing.assert_array_equal(np.asarray(positions), np.asarray(read))


def test_one_device_selects_exactly() -> None:
    """A mesh of one device runs the policy as it is, by the program of an exact selection."""
    assert by_share(along(1)).policy_of_part(FIER) is FIER

    def program(placement: Placement) -> str:
        cache = kvjax.init_layer(FIER, SPEC, placement)
        return jax.jit(kvjax.attention).lower(cache, *tokens(1, 0)).as_text()

    assert program(by_share(along(1))) == program(along(1))


# ---------------------------------------------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("policy", "error"),
    [
        (kvjax.Speculative(FIER), "makes one selection for all devices"),
        (MAGICPIG, "makes one selection for all devices"),
        (
            dataclasses.replace(FIER, selector=kvjax.SignPlane(), store=kvjax.TurboQuant()),
            "a split context cannot",
        ),
        (
            presets.shadowkv(256, page=4, layers=presets.Layers(dense=0)).rest,
            "one basis for all tokens",
        ),
    ],
    ids=["a step late", "magicpig", "codes of the store", "shadowkv"],
)
def test_what_cannot_select_by_share_says_so(policy: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        kvjax.init_layer(policy, SPEC, by_share(along(2)))


def test_placement_says_what_a_share_needs() -> None:
    with pytest.raises(ValueError, match=r"selection='share'\) says how .*context"):
        Placement(mesh=along(2).mesh, heads="ctx", selection="share")
    with pytest.raises(
        ValueError, match=r"Placement\(selection='local'\) must be one of exact, share"
    ):
        Placement(mesh=along(2).mesh, context="ctx", selection="local")  # type: ignore[arg-type]


def test_what_keeps_all_or_little_is_split_as_ever() -> None:
    """`full`, codes, and evicting caches select nothing."""
    spec = CacheSpec(batch=1, q_heads=2, kv_heads=1, head_dim=16, capacity=64, dtype="float32")
    for policy in (
        Full(),
        kvjax.Compressed(store=kvjax.Quantized(bits=4, key_group=4), **ZONES),
    ):
        exact, share = (
            along(2).policy_of_part(policy),
            by_share(along(2)).policy_of_part(policy),
        )
        assert exact == share
        kvjax.init_layer(policy, spec, by_share(along(2)))


# ------------------------------------------------------------------------------------------------------- what is said


@pytest.mark.parametrize(
    "name", ["full", "fier", "fier in host memory", "paris", "magicpig", "4 bits in a window"]
)
def test_exchanges_are_those_of_the_compiled_program(name: str) -> None:
    policy, placement, _ = (CASES | MORE)[name]
    parts = placement.parts("context")
    found = Counter(
        (one.kind, one.bytes // 4 * (parts if one.kind == "all-gather" else 1))
        for one in exchanges(policy, SPEC, placement)
    )
    assert found == wanted_exchanges(policy, placement, SPEC)


def test_split_is_explained() -> None:
    for placement, wanted in (
        (THREE, "over 2 devices, which make the selection of one device together: 3 exchanges"),
        (
            by_share(THREE),
            "over 2 devices, each of which selects its share .*: 1 exchange .* gives 136 bytes$",
        ),
        (dataclasses.replace(THREE, context=None), "each device has all tokens of its rows"),
    ):
        assert re.search(wanted, explain_split(FIER, SPEC, placement))
