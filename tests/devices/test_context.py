"""A cache whose tokens are dealt to devices reads what one device reads, and exchanges what the
formulas say.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import kvjax
from kvjax import (
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
    Quantized,
    Retrieval,
    Speculative,
    presets,
)
from kvjax.contrib.pqcache import ProductCodes
from kvjax.sharding import context
from tests.devices.programs import copies, exchanges, history, wanted_exchanges

SPEC = CacheSpec(batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=112, dtype="float32")
PROMPT, STEPS, WINDOW = 24, 40, 30
DEVICES = np.array(jax.devices())
THREE = Placement(
    mesh=Mesh(DEVICES.reshape(2, 2, 2), ("data", "model", "ctx")),
    batch="data",
    heads="model",
    context="ctx",
)


def along(parts: int) -> Placement:
    return Placement(mesh=Mesh(DEVICES[:parts], ("ctx",)), context="ctx")


ZONES: dict[str, Any] = {"sink": 2, "local": 6, "demote": Fifo(leave=16)}
FIER = Retrieval(selector=Fier(group=4), budget=24, **ZONES)
MAGICPIG = presets.magicpig(
    budget=40, bits=3, tables=40, local=6, chunk=16, layers=presets.Layers(dense=0)
).rest
# A policy, a placement, a sliding window. With a window the steps begin at once; a test of its
# own reads prompts.
CASES: dict[str, tuple[kvjax.Policy, Placement, int | None]] = {
    "full": (Full(), along(4), None),
    "4 bits in a window": (
        Compressed(store=Quantized(bits=4, key_group=4), **ZONES),
        along(4),
        WINDOW,
    ),
    "fier": (FIER, THREE, None),
    "fier, rows and heads": (FIER, dataclasses.replace(THREE, context=None), None),
    "pages per query head in a window": (
        Retrieval(selector=MinMaxPages(page=4, group_reduce="per_head"), budget=20, **ZONES),
        along(4),
        WINDOW,
    ),
    "paris": (Retrieval(selector=Paris(candidates=30), budget=24, **ZONES), THREE, None),
    "magicpig": (MAGICPIG, THREE, None),
}

MORE: dict[str, tuple[kvjax.Policy, Placement, int | None]] = {
    "fier, dense below 60 tokens": (dataclasses.replace(FIER, dense_below=60), THREE, None),
    "fier in host memory": (dataclasses.replace(FIER, store=HostOffload()), THREE, None),
    "fier over turboquant": (dataclasses.replace(FIER, store=kvjax.TurboQuant()), THREE, None),
    "fier a step late": (Speculative(FIER, tau=0.0), THREE, None),
    "codes of turboquant a step late": (
        Speculative(dataclasses.replace(FIER, store=kvjax.TurboQuant()), tau=0.0),
        THREE,
        None,
    ),
    "pages a step late in host memory": (
        Speculative(
            Retrieval(
                selector=MinMaxPages(page=4), store=HostOffload(page=4), budget=32, **ZONES
            ),
            tau=-1.0,
        ),
        along(4),
        None,
    ),
    "paris per query head in a window": (
        Retrieval(
            selector=Paris(candidates=12, votes="plain", group_reduce="per_head"),
            budget=16,
            **ZONES,
        ),
        along(4),
        WINDOW,
    ),
    "paris by length, a step late": (
        Speculative(Retrieval(selector=Paris(), budget=24, **ZONES), tau=0.0),
        THREE,
        None,
    ),
    "product codes": (
        Retrieval(selector=ProductCodes(parts=4, bits=3, learn=8), budget=24, **ZONES),
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
    "exact by mean query": (
        Retrieval(selector=Exact(group_reduce="mean_query"), budget=20, **ZONES),
        along(8),
        None,
    ),
    "tova": (Evicting(evictor=LastQuery(), budget=24), THREE, None),
    "magicpig in a window": (MAGICPIG, along(2), WINDOW),
}

RULES = ("mean_softmax", "mean_query", "per_head")
SELECTORS: dict[str, Any] = {"fier": Fier, "pages": MinMaxPages, "exact": Exact}


def crossed(selector: str, rule: str, parts: int) -> tuple[kvjax.Policy, Placement, None]:
    unit: dict[str, Any] = {"fier": {"group": 2}, "pages": {"page": 2}, "exact": {}}[selector]
    chosen = SELECTORS[selector](group_reduce=rule, **unit)
    return Retrieval(selector=chosen, budget=20, **ZONES), along(parts), None


# Each selector by each rule, over 2, 4 or 8 devices: each pair of two of the three once.
MORE |= {
    f"{selector} by {rule} over {2 << (i + j) % 3}": crossed(selector, rule, 2 << (i + j) % 3)
    for i, selector in enumerate(SELECTORS)
    for j, rule in enumerate(RULES)
}


def tokens(count: int, seed: int) -> tuple[Array, ...]:
    rng = np.random.default_rng(seed)  # jax.random would compile
    return tuple(
        jnp.asarray(rng.standard_normal((2, count, n, 16), np.float32)) for n in (4, 2, 2)
    )


def prompt(
    cache: kvjax.LayerCache, q: Array, k: Array, v: Array, lengths: Array, *, window: int | None
) -> Any:
    out, cache = kvjax.prefill(cache, q, k, v, lengths=lengths, window=window)
    return jnp.where(
        (jnp.arange(PROMPT)[None] < lengths[:, None])[..., None, None], out, 0
    ), cache


def decode(cache: kvjax.LayerCache, q: Array, k: Array, v: Array, *, window: int | None) -> Any:
    """Steps, of which a row in turn takes none; outputs, and the positions that each read."""

    def step(cache: kvjax.LayerCache, t: Array) -> Any:
        active = jnp.arange(2) != t % 7
        one = [lax.dynamic_slice_in_dim(a, t, 1, axis=1) for a in (q, k, v)]
        out, cache, info = kvjax.attention_info(
            kvjax.flush(cache), *one, active=active, window=window, flush=False
        )
        assert info is not None
        assert info.positions is not None
        read = jnp.where(active[:, None, None, None], jnp.sort(info.positions, axis=-1), -1)
        return cache, (jnp.where(active[:, None, None, None], out, 0), read)

    cache, found = lax.scan(step, cache, jnp.arange(STEPS))
    return found, cache


@cache
def compiled_steps(
    policy: kvjax.Policy, placement: Placement | None, window: int | None
) -> Any:
    """`decode` of `STEPS` tokens, which takes over its cache."""
    steps = jax.jit(partial(decode, window=window), donate_argnums=0)
    empty = kvjax.init_layer(policy, SPEC, placement)
    return steps.lower(empty, *tokens(STEPS, 6)).compile()


read_prompt = jax.jit(prompt, static_argnames="window")


@cache
def run(
    policy: kvjax.Policy,
    placement: Placement | None,
    window: int | None,
    prompts: bool,
) -> Any:
    """Outputs and positions of two prompts, if wanted, and steps; the HLO of the steps, the
    cache, and the program of the steps.
    """
    layer, outs = kvjax.init_layer(policy, SPEC, placement), []
    for seed, lengths in ((0, [24, 17]), (3, [20, 24])) if prompts else ():
        given = *tokens(PROMPT, seed), jnp.array(lengths, jnp.int32)
        out, layer = read_prompt(layer, *given, window=window)
        outs.append(out)
    steps = compiled_steps(policy, placement, window)
    (stepped, positions), layer = steps(layer, *tokens(STEPS, 6))
    return [*outs, stepped], np.asarray(positions), steps.as_text(), layer, steps


def runs(name: str, split: bool) -> Any:
    """A case on one device or on several, run once."""
    policy, placement, window = (CASES | MORE)[name]
    return run(policy, placement if split else None, window, prompts=window is None)


def check(one: Any, split: Any) -> None:
    for a, b in zip(one[0], split[0], strict=True):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), atol=5e-6)
    np.testing.assert_array_equal(split[1], one[1])
    np.testing.assert_array_equal(np.asarray(split[3].length), np.asarray(one[3].length))


QUICK = "paris per query head in a window"  # scores by what the window shows


@pytest.mark.parametrize(
    "name",
    [
        *CASES,
        *(pytest.param(n, marks=() if n == QUICK else pytest.mark.thorough) for n in MORE),
    ],
)
def test_tokens_on_several_devices_are_read_as_on_one(name: str) -> None:
    (*_, alone, _), (*_, cache, _) = runs(name, False), runs(name, True)
    check(runs(name, False), runs(name, True))
    for leaf, home in zip(
        jax.tree.leaves(cache), jax.tree.leaves(kvjax.shardings(cache)), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(home, leaf.ndim)
    if isinstance(cache.policy, Evicting | Speculative):  # bounded, or with kept copies
        return
    parts = np.prod([cache.placement.parts(what) for what in ("batch", "heads", "context")])
    for leaf, whole in zip(*map(history, (cache, alone)), strict=True):
        assert leaf.addressable_shards[0].data.nbytes == whole.nbytes // parts


def test_a_full_history_is_sampled_whole_where_the_budget_allows() -> None:
    """Each device then offers all of its tokens, to the last slot."""
    cache = kvjax.init_layer(
        dataclasses.replace(MAGICPIG, budget=100),
        dataclasses.replace(SPEC, capacity=48),
        along(2),
    )
    st = cache.state
    length = st.sink.slots + st.store.slots + st.recent.slots

    @jax.jit
    def fill(cache: kvjax.LayerCache, tokens: tuple[Array, ...]) -> Any:
        """Steps, and the positions that the last one read."""

        def step(cache: kvjax.LayerCache, one: tuple[Array, ...]) -> Any:
            _, cache, info = kvjax.attention_info(cache, *(a[:, None] for a in one))
            return cache, info.positions

        cache, read = lax.scan(step, cache, tuple(a.swapaxes(0, 1) for a in tokens))
        return cache, read[-1]

    cache, positions = fill(cache, tokens(length, 0))
    assert np.asarray(cache.state.store.count).tolist() == [st.store.slots] * 2
    for read in np.asarray(positions).reshape(-1, positions.shape[-1]):
        assert np.sort(read[read >= 0]).tolist() == list(range(length))


WINDOWED = [name for name, (_, _, window) in (CASES | MORE).items() if window is not None]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n == "full in a window" else pytest.mark.thorough)
        for n in WINDOWED
    ],
)
def test_prompts_under_a_window_are_read_as_on_one(name: str) -> None:
    """Prompts longer than the window, whose rows have different lengths, and the steps after
    them.
    """
    policy, placement, window = (CASES | MORE)[name]
    check(*(run(policy, place, window, prompts=True) for place in (None, placement)))


@pytest.mark.parametrize(
    "name",
    [*CASES, *(pytest.param(n, marks=pytest.mark.thorough) for n in MORE if " over " in n)],
)
def test_step_exchanges_what_the_formula_says_and_copies_nothing(name: str) -> None:
    policy, placement, _ = (CASES | MORE)[name]
    (*_, alone), (*_, program, cache, split) = runs(name, False), runs(name, True)
    wanted = wanted_exchanges(policy, placement, SPEC)
    assert exchanges(program) == wanted
    assert not copies(program, cache)
    # Each array of the cache is changed where it lies, and little is held beside it.
    assert len(re.findall("(?:may|must)-alias", program)) == len(jax.tree.leaves(cache))
    moved = 4 * sum(size * count for (_, size), count in wanted.items())
    temporary = [steps.memory_analysis().temp_size_in_bytes for steps in (alone, split)]
    print(temporary, moved)
    assert temporary[1] <= temporary[0] + 2 * moved


def test_copy_of_a_split_cache_is_noticed() -> None:
    """The operations that these tests look for are in a program that gathers or copies an
    array.
    """
    cache = runs("fier", True)[3]
    whole = NamedSharding(THREE.mesh, PartitionSpec())
    gather = jax.jit(lambda leaf: lax.with_sharding_constraint(leaf, whole) + 1)
    copy = jax.jit(lambda leaf: (leaf.at[0, 0, 0, 0].set(0), leaf))
    for broken in (gather, copy):
        assert copies(broken.lower(history(cache)[0]).compile().as_text(), cache)


@pytest.mark.parametrize("name", ["fier", "pages per query head in a window"])
def test_of_equal_scores_on_several_devices_the_lower_place_wins(name: str) -> None:
    """Groups of four tokens have one of three keys, so stripes of all devices tie in every
    step.
    """
    policy, placement, window = CASES[name]
    # small integers, whose scores are exact
    q, k, v = (np.round(2 * np.asarray(a)) for a in tokens(2 * STEPS, 6))
    keys, kinds = k[0, :3].copy(), (np.arange(SPEC.capacity) - policy.sink) // 4 % 3
    steps = []  # row, step, tokens of the row after it, and where its history ends
    for row in range(2):
        count, end = 0, policy.sink
        for t in range(2 * STEPS):
            if row != t % STEPS % 7:  # `decode` lets the row take part
                end += policy.demote.leave * (count - end >= policy.demote.slots(policy.local))
                k[row, t], count = keys[kinds[count]], count + 1
                steps.append((row, t, count, end))
    read = []
    for split in (False, True):
        cache, found = kvjax.init_layer(policy, SPEC, placement if split else None), []
        for part in (slice(STEPS), slice(STEPS, None)):
            (_, positions), cache = runs(name, split)[4](
                cache, *(jnp.asarray(a[:, part]) for a in (q, k, v))
            )
            found.append(np.asarray(positions))
        read.append(np.concatenate(found))
    np.testing.assert_array_equal(*read)
    cut = 0
    for row, t, count, end in steps:
        history = np.arange(
            policy.sink if window is None else max(policy.sink, count - window), end
        )
        for kind, *head in np.ndindex(3, *read[0].shape[2:4]):
            tied = np.isin(history[kinds[history] == kind], read[1][t, row, *head])
            assert np.all(tied[:-1] >= tied[1:]), "a higher place was read before a lower one"
            cut += 0 < np.sum(tied) < tied.size
    assert cut > 0, "no tie decided anything"


def test_devices_agree_on_the_most_voted_tokens_ties_by_place() -> None:
    """Candidates of all devices together are those of one, also where stripes of many devices
    tie.
    """
    stripes, turns, rng = context.Stripes("ctx", 4, 3), 5, np.random.default_rng(0)
    marks = rng.integers(0, 4, (2, 2, 2, turns * 12), dtype=np.uint8)
    marks[1, 0] = 2  # all tie
    wanted = np.array([[23, 7], [60, 0], [11, 99]], np.int32)

    def share(own: Array, count: Array) -> Array:
        return jax.vmap(lambda n: context.share_of_highest(own[:, :, :, 0], n, 3, stripes))(
            count
        )[:, :, :, :, None]

    dealt = marks.reshape(2, 2, 2, turns, 4, 3).swapaxes(3, 4).reshape(2, 2, 2, 4, -1)
    split, whole = jax.P(None, None, None, "ctx"), jax.P(None, None, None, None, "ctx")
    run = jax.jit(
        jax.shard_map(
            share,
            mesh=along(4).mesh,
            in_specs=(split, jax.P()),
            out_specs=whole,
            check_vma=False,
        )
    )
    order = np.argsort(-marks.astype(int), axis=-1, kind="stable")
    for shares, counts in zip(np.asarray(run(dealt, wanted)), wanted, strict=True):
        for b, k, g in np.ndindex(2, 2, 2):
            highest = order[b, k, g][: min(counts[b], np.sum(marks[b, k, g] > 0))]
            np.testing.assert_array_equal(
                shares[b, k, g], np.bincount(highest // 3 % 4, minlength=4)
            )


@pytest.mark.parametrize(("offers", "wanted"), [(1, 3), (5, 0), (5, 7), (24, 50), (24, 200)])
def test_devices_count_their_own_among_the_first_of_all(offers: int, wanted: int) -> None:
    """As a sort of all offers does, also where ranks tie and where a device has fewer units
    than it may offer.
    """
    rng = np.random.default_rng(offers + wanted)
    places = np.stack(
        [rng.permutation(4 * offers).reshape(4, offers) for _ in range(2)]
    )  # [row, device, offer]
    ranks = rng.integers(1, 5, places.shape)
    ranks[1, 2, offers // 2 :] = 0
    places = np.where(ranks == 0, np.iinfo(np.int32).max, places)
    order = np.lexsort((places, -ranks))
    ranks, places = (np.take_along_axis(a, order, axis=-1) for a in (ranks, places))
    of_all = context.Offers(
        rank=jnp.asarray(ranks, jnp.uint32).reshape(2, 1, 1, -1),
        place=jnp.asarray(places, jnp.int32).reshape(2, 1, 1, -1),
    )
    for device in range(4):
        own = context.Offers(*(a.reshape(2, 1, 1, 4, offers)[:, :, :, device] for a in of_all))
        got = jax.jit(context.count_taken)(
            own, of_all, jnp.full((1, 1, 1, 1), wanted, jnp.int32)
        )
        for row in range(2):
            best = np.lexsort((places[row].reshape(-1), -ranks[row].reshape(-1)))[:wanted]
            best = best[ranks[row].reshape(-1)[best] > 0]
            assert int(got[row, 0, 0]) == np.sum(best // offers == device)


def test_saves_and_larger_caches_do_not_depend_on_the_split(tmp_path: Path) -> None:
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
    assert_equal(
        kvjax.restore(tmp_path / "grown", kvjax.init_layer(FIER, larger)),
        kvjax.grow(alone, 160),
    )
    assert_equal(
        kvjax.restore(tmp_path / "split", kvjax.init_layer(FIER, larger, THREE)), grown
    )


def test_several_steps_rows_and_followers_are_those_of_one_device() -> None:
    """`decode` of several tokens, `rollback`, `insert` and a layer that attends to what another
    selected.
    """
    policies = [FIER, FIER.follower()]

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
        cache = kvjax.init(policies, SPEC, layers=2, placement=placement)
        alone = None if placement is None else dataclasses.replace(placement, batch=None)
        prefix = kvjax.init(
            policies, dataclasses.replace(SPEC, batch=1), layers=2, placement=alone
        )
        found.append(jax.jit(talk)(cache, prefix, tokens(60, 0), tokens(12, 1)))
    (one, before), (split, after) = found
    for a, b in zip(one, split, strict=True):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), atol=5e-6)
    assert after.length.tolist() == before.length.tolist() == [70, 0]


def test_a_row_moves_to_other_devices_with_its_tokens() -> None:
    """`take_rows` under rows, heads and context: each row goes on where the other was."""
    found = []
    for split in (False, True):
        *_, cache, steps = runs("fier", split)
        found.append(steps(kvjax.take_rows(cache, [1, 0]), *tokens(STEPS, 6)))
    ((out, read), one), ((split_out, split_read), other) = found
    np.testing.assert_allclose(split_out, out, atol=5e-6)
    np.testing.assert_array_equal(split_read, read)
    assert other.length.tolist() == one.length.tolist() == [109, 112]


def test_owner_off_by_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results that these tests compare change if a device takes the stripes of its
    neighbour for its own.
    """
    right = context.Stripes.slot

    def wrong(stripes: context.Stripes, place: Array) -> tuple[Array, Array]:
        return right(stripes, place + stripes.tokens)

    monkeypatch.setattr(context.Stripes, "slot", wrong)
    spec = dataclasses.replace(SPEC, capacity=128)  # of another capacity, nothing is traced yet
    (split, _), _ = jax.jit(partial(decode, window=None))(
        kvjax.init_layer(Full(), spec, along(4)), *tokens(STEPS, 6)
    )
    (one, _), _ = runs("full", False)[4](kvjax.init_layer(Full(), SPEC), *tokens(STEPS, 6))
    assert np.max(np.abs(np.asarray(split) - np.asarray(one))) > 0.1


@pytest.mark.parametrize(
    ("policy", "parts", "error"),
    [
        (
            FIER,
            8,
            r"chunk of 16 .*split over 8 .*: Fier\(group=4\) does not divide .* of 2.*or larger chunks",
        ),
        (
            dataclasses.replace(FIER, selector=kvjax.Fier(group=3)),
            2,
            r"^Fier\(group=3\) does not divide .* of 16;",
        ),
        (
            FIER,
            3,
            r"cannot split chunks of 16 tokens evenly over 3 devices.* leave a multiple of 3",
        ),
        (
            MAGICPIG,
            4,
            r"each of 4 devices 4 tokens of a chunk of 16.*hashes of 8 tokens together.*a multiple of 32",
        ),
        (
            Retrieval(selector=MinMaxPages(page=8), budget=32, **ZONES),
            4,
            "would cut pages of 8; .* multiple of 32",
        ),
        (
            dataclasses.replace(FIER, store=HotSet(tokens=64)),
            2,
            "keeps selected tokens on one device",
        ),
        (
            dataclasses.replace(FIER, selector=kvjax.SignPlane(), store=kvjax.TurboQuant()),
            2,
            "a split context cannot",
        ),
        (
            kvjax.PerHead(heads=(1,), selected=Full(), others=FIER),
            2,
            "grows with the capacity and has no over_context",
        ),
        (
            Full(),
            3,
            "cannot split a capacity of 112 tokens evenly over 3 devices.* use capacity=114",
        ),
    ],
)
def test_what_cannot_be_dealt_is_refused(policy: Any, parts: int, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        kvjax.init_layer(policy, SPEC, along(parts))


PAGED = {
    "quest": presets.quest(64, page=4, layers=presets.Layers(dense=0)).rest,
    "quest, pending": presets.quest(
        64, page=4, newest="select", layers=presets.Layers(dense=0)
    ).rest,
    "arkvale": presets.arkvale(
        64, page=4, sink=4, local=8, layers=presets.Layers(dense=0)
    ).rest,
    "freekv": presets.freekv(64, page=4, sink=4, local=8, layers=presets.Layers(dense=0)).rest,
}
ALWAYS = [("quest, pending", 4), ("freekv", 2)]
OTHERS = [pair for pair in itertools.product(PAGED, (2, 4, 8)) if pair not in ALWAYS]


@pytest.mark.parametrize(
    ("name", "parts"),
    [*ALWAYS, *(pytest.param(*pair, marks=pytest.mark.thorough) for pair in OTHERS)],
)
def test_chunks_of_one_page_become_one_page_for_each_device(name: str, parts: int) -> None:
    policy, spec = PAGED[name], dataclasses.replace(SPEC, capacity=160)
    split = kvjax.init_layer(policy, spec, along(parts))
    retrieval = getattr(split.policy, "retrieval", split.policy)
    assert retrieval.demote.leave == 4 * parts
    one = kvjax.init_layer(split.policy, spec)
    step = jax.jit(partial(decode, window=None))
    ((a, read), _) = step(split, *tokens(STEPS, 6))
    ((b, wanted), _) = step(one, *tokens(STEPS, 6))
    np.testing.assert_array_equal(read, wanted)
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
