"""The hot set: the same tokens as without it, whatever is on the device, and only misses read
from the host.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import kvjax
from kvjax import (
    CacheSpec,
    Fier,
    Fifo,
    HostFloat8,
    HostOffload,
    HostTurboQuant,
    HotSet,
    MinMaxPages,
    Paris,
    Retrieval,
    Speculative,
    ops,
)
from kvjax.attention import decode_info
from kvjax.numerics.selection import Selection
from kvjax.stores.hot import Hot, empty_hot
from kvjax.testing import _drive as drive

SPEC = CacheSpec(batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=200, dtype=jnp.float32)
FIER = Retrieval(
    selector=Fier(group=16),
    store=HostOffload(),
    budget=64,
    sink=4,
    local=24,
    demote=Fifo(leave=32),
)
PAGES = dataclasses.replace(FIER, selector=MinMaxPages(page=16), store=HostOffload(page=8))
FLOAT8 = dataclasses.replace(PAGES, store=HostFloat8(page=8))
CODES = dataclasses.replace(FIER, store=HostTurboQuant(bits=8))
PARIS = dataclasses.replace(FIER, selector=Paris(candidates=80))
PER_HEAD = dataclasses.replace(FIER, selector=Fier(group=16, group_reduce="per_head"))


def with_hot_set(policy: Any, tokens: int) -> Any:
    if isinstance(policy, Speculative):
        return Speculative(with_hot_set(policy.retrieval, tokens), tau=policy.tau)
    return dataclasses.replace(policy, store=HotSet(tokens=tokens, store=policy.store))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("policy", "tokens"),
    [
        (FIER, 40),
        pytest.param(PAGES, 48, marks=pytest.mark.thorough),
        (FLOAT8, 48),
        pytest.param(CODES, 40, marks=pytest.mark.thorough),
        (Speculative(PAGES, tau=0.0), 40),
        pytest.param(PER_HEAD, 80, marks=pytest.mark.thorough),
        pytest.param(PARIS, 80, marks=pytest.mark.thorough),  # a query head selects for itself
    ],
    ids=["fier", "pages", "float8", "codes", "freekv", "per_head", "pariskv"],
)
def test_steps_read_the_same_tokens_as_without_a_hot_set(policy: Any, tokens: int) -> None:
    """Ragged rows, a row that pauses, flushes, and a hot set so small that pages come and go."""
    hot = with_hot_set(policy, tokens)
    data, lengths = drive.random_tokens(SPEC, 1), np.array([150, 70])
    plain, _ = drive.fill(drive.new_cache(policy, SPEC), data, lengths)
    cached, _ = drive.fill(drive.new_cache(hot, SPEC), data, lengths)
    for i in range(36):
        active = np.arange(2) != (i % 3 == 1)
        out, plain, info = drive.step(plain, data, lengths, active)
        out_cached, cached, info_cached = drive.step(cached, data, lengths, active)
        np.testing.assert_array_equal(info_cached.positions, info.positions)
        np.testing.assert_allclose(out_cached[active], out[active], atol=2e-6)
        lengths = lengths + active
    state = cached.state.zones if isinstance(hot, Speculative) else cached.state
    check_tables(state.store.hot)
    assert (np.asarray(state.store.hot.loads) > tokens // hot_page(hot)).any(), (
        "nothing was replaced"
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "policy", [FIER, PAGES, PER_HEAD], ids=["tokens", "pages", "per query head"]
)
def test_rows_that_pause_read_nothing_from_the_host(policy: Any) -> None:
    """With and without a hot set; the rows that take a step read as if no row paused."""
    data, lengths, tokens = drive.random_tokens(SPEC, 1), np.array([150, 70]), {}
    for hot in (False, True):
        own = with_hot_set(policy, 96) if hot else policy
        start, _ = drive.fill(drive.new_cache(own, SPEC), data, lengths)
        found = [
            drive.step(start, data, lengths, np.array(active))
            for active in ([True, False], [True, True])
        ]
        (out, cache, info), (out_all, _, info_all) = found
        stored = np.asarray(
            info.selection.valid & (info.selection.slots < cache.state.store.slots)
        )
        assert not stored[1].any(), "a row that paused selected tokens of the host"
        assert stored[0].any()
        np.testing.assert_array_equal(cache.state.store.count, start.state.store.count)
        np.testing.assert_array_equal(info.positions[0], info_all.positions[0])
        np.testing.assert_allclose(out[0], out_all[0], atol=2e-6)
        tokens[hot] = np.asarray(info.positions)[0]
        if hot:
            assert (np.asarray(cache.state.store.hot.loads) > 0).tolist() == [
                [True] * 2,
                [False] * 2,
            ]
    np.testing.assert_array_equal(tokens[True], tokens[False])


def test_a_row_that_pauses_recalls_nothing_from_the_host() -> None:
    """The second row pauses in all but the first step."""
    policy = Speculative(with_hot_set(PAGES, 48), tau=-1.0)
    data, lengths, loads = drive.random_tokens(SPEC, 1), np.array([150, 70]), []
    cache, _ = drive.fill(drive.new_cache(policy, SPEC), data, lengths)
    for i in range(9):
        active = np.array([True, i == 0])
        _, cache, _ = drive.step(cache, data, lengths, active)
        loads.append(np.asarray(cache.state.zones.store.hot.loads))
        lengths = lengths + active
    grew = np.diff([np.zeros_like(loads[0]), *loads], axis=0) > 0
    assert grew[:, 0].any()
    assert not grew[1:, 1].any(), "a row that paused read from the host"


def test_a_budget_that_sink_and_window_use_up_reads_no_page() -> None:
    policy = dataclasses.replace(FIER, budget=FIER.sink + FIER.local)
    data, lengths, active = drive.random_tokens(SPEC, 1), np.array([150, 70]), np.ones(2, bool)
    caches = [
        drive.fill(drive.new_cache(p, SPEC), data, lengths)[0]
        for p in (policy, with_hot_set(policy, 40))
    ]
    (out, _, info), (out_hot, after, info_hot) = (
        drive.step(cache, data, lengths, active) for cache in caches
    )
    np.testing.assert_array_equal(info_hot.positions, info.positions)
    np.testing.assert_allclose(out_hot, out, atol=2e-6)
    assert not np.asarray(after.state.store.hot.loads).any()


@pytest.mark.thorough
def test_steps_taken_at_once_fill_the_hot_set_too() -> None:
    hot, data, lengths = (
        with_hot_set(FIER, 48),
        drive.random_tokens(SPEC, 1),
        np.array([150, 70]),
    )
    cache, _ = drive.fill(drive.new_cache(hot, SPEC), data, lengths)
    decode = jax.jit(lambda cache, q, k, v: decode_info(cache, q, k, v, flush=False))
    tokens = data.at(lengths[:, None] + np.arange(3)[None])
    _, several, info = decode(cache, *tokens)
    one = cache
    for i in range(3):
        _, one, seen = drive.step(one, data, lengths + i)
        np.testing.assert_array_equal(np.asarray(info.positions)[i], seen.positions)
    np.testing.assert_array_equal(several.state.store.hot.loads, one.state.store.hot.loads)
    assert (np.asarray(one.state.store.hot.loads) > 0).all()


def hot_page(policy: Any) -> int:
    return (policy.retrieval if isinstance(policy, Speculative) else policy).store.page


def check_tables(hot: Hot) -> None:
    """No page is reachable at two places."""
    page, place = np.asarray(hot.page), np.asarray(hot.place)
    for b, k in np.ndindex(*page.shape[:2]):
        reached = [
            p for p in range(place.shape[2]) if page[b, k, place[b, k, p] % page.shape[2]] == p
        ]
        assert len({place[b, k, p] for p in reached}) == len(reached)


class Clock:
    """The clock rule for one head, a page at a time."""

    def __init__(self, places: int) -> None:
        self.page, self.used, self.hand = [-1] * places, [False] * places, 0

    def step(self, wanted: list[int]) -> int:
        """Pages that are read for a step. Hits are marked first, and no page of a step replaces
        another one of it.
        """
        kept = {p for p in wanted if p in self.page}
        for p in kept:
            self.used[self.page.index(p)] = True
        misses = [p for p in wanted if p not in kept]
        busy = [self.page.index(p) for p in kept]
        for p in misses:
            for _ in range(2 * len(self.page) + 1):
                at, self.hand = self.hand, (self.hand + 1) % len(self.page)
                if at in busy:
                    continue
                if not self.used[at]:
                    break
                self.used[at] = False
            self.page[at], self.used[at] = p, True
            busy.append(at)
        return len(misses)


def give_places(hot: Hot, page: Array) -> tuple[Hot, Array, Array]:
    """The hot set with a place for each page i32[B, K, N], the places, and which pages must be
    read from the host.
    """
    n = hot.page.shape[2]
    tables, place = ops.hot_places(
        hot.tables, page, jnp.full(page.shape[:2], page.shape[2], jnp.int32)
    )
    missed = (page >= 0) & (
        jnp.take_along_axis(tables.used, jnp.minimum(place, n - 1), axis=2) == 2
    )
    return hot.with_tables(tables), place, missed


def test_pages_are_replaced_by_the_clock_rule() -> None:
    """Against a clock in Python: as many reads, and the same pages on the device."""
    rng, places, pages, N = np.random.default_rng(0), 12, 40, 5
    hot = empty_hot((1, 2), places, pages, page=1, head_dim=1, dtype=jnp.float32)
    clocks, run = [Clock(places), Clock(places)], jax.jit(give_places)
    weights = 1 / np.arange(1, pages + 1)
    reads = np.zeros(2, int)
    for i in range(60):
        wanted = np.stack(
            [rng.choice(pages, N, replace=False, p=weights / weights.sum()) for _ in range(2)]
        )
        wanted[:, N - i % 3 :] = -1
        hot, place, missed = run(hot, jnp.asarray(wanted[None], jnp.int32))
        for k, clock in enumerate(clocks):
            known = [p for p in wanted[k] if p >= 0]
            reads[k] += clock.step(known)
            assert set(known) <= set(np.asarray(hot.page)[0, k].tolist())
            np.testing.assert_array_equal(
                np.asarray(hot.page)[0, k, np.asarray(place)[0, k, : len(known)]], known
            )
        assert np.asarray(missed)[0, :, N - i % 3 :].sum() == 0
        check_tables(hot)
    np.testing.assert_array_equal(np.asarray(hot.loads)[0], reads)
    assert [sorted(row) for row in np.asarray(hot.page)[0].tolist()] == [
        sorted(clock.page) for clock in clocks
    ]


def test_pages_that_are_written_anew_are_read_anew() -> None:
    store, spec = (
        HotSet(tokens=8, store=HostOffload(page=4)),
        dataclasses.replace(SPEC, batch=1, kv_heads=1),
    )
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(1, 1, 8, 16)), jnp.float32) for _ in range(2))
    selection = Selection(
        jnp.arange(4, 8, dtype=jnp.int32)[None, None, None], jnp.ones((1, 1, 1, 4), bool)
    )
    load, append = jax.jit(store.load), jax.jit(store.append)
    st = append(store.init(spec, 16), k, v, jnp.array([8]))
    st, loaded = load(st, selection)
    np.testing.assert_array_equal(loaded.k[0, 0, loaded.selection.slots[0, 0, 0]], k[0, 0, 4:])
    cut = dataclasses.replace(
        st, history=dataclasses.replace(st.history, count=jnp.array([4], jnp.int32))
    )
    st, loaded = load(append(cut, -k, -v, jnp.array([4])), selection)
    np.testing.assert_array_equal(loaded.k[0, 0, loaded.selection.slots[0, 0, 0]], -k[0, 0, :4])
    st, _ = load(st, selection)
    assert int(st.hot.loads[0, 0]) == 2


def test_a_cache_cut_to_a_prefix_goes_on_with_the_tokens_of_another_prompt() -> None:
    """Pages of the first prompt are still on the device when the second one writes them again."""
    lengths, cut, one, other = (
        np.array([150, 70]),
        np.array([50, 64]),
        *(drive.random_tokens(SPEC, i) for i in (1, 2)),
    )
    caches = [
        drive.fill(drive.new_cache(policy, SPEC), one, lengths)[0]
        for policy in (FIER, with_hot_set(FIER, 96))
    ]
    for i in range(2):
        caches = [drive.step(cache, one, lengths + i)[1] for cache in caches]
    caches = [kvjax.truncate(cache, cut) for cache in caches]
    page = np.asarray(caches[1].state.store.hot.page)
    assert (page >= np.asarray(caches[1].state.store.count)[:, None, None]).any(), (
        "no page was cut off"
    )
    caches = [drive.fill(cache, other, lengths, start=cut)[0] for cache in caches]
    for i in range(4):
        (out, plain, info), (out_hot, hot, info_hot) = (
            drive.step(cache, other, lengths + i) for cache in caches
        )
        np.testing.assert_array_equal(info_hot.positions, info.positions)
        np.testing.assert_allclose(out_hot, out, atol=2e-6)
        caches = [plain, hot]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HotSet(tokens=0), r"tokens=.*at least 1, got 0"),
        (
            lambda: kvjax.presets.fier(64, store="device+128"),
            r"fier\(store='device\+128'\) must be 'device', 'host'",
        ),
        (
            lambda: HotSet(tokens=20, store=HostOffload(page=8)),
            r"whole pages.*use a multiple of 8",
        ),
        (
            lambda: kvjax.init_layer(with_hot_set(FIER, 30), SPEC),
            r"HotSet\(tokens=30\) is smaller than the 36 tokens that a step selects.*use at least 36",
        ),
        (  # all stored tokens would fit, but not the pending ones of a selection beside them
            lambda: kvjax.init_layer(
                with_hot_set(FIER, 32), dataclasses.replace(SPEC, capacity=60)
            ),
            r"smaller than the 36 tokens that a step selects",
        ),
        (
            lambda: kvjax.init_layer(with_hot_set(PER_HEAD, 60), SPEC),
            r"smaller than the 72 tokens that a step selects",
        ),
    ],
)
def test_a_hot_set_that_cannot_serve_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_presets_make_hot_sets() -> None:
    policies = [
        kvjax.presets.parse(text).rest
        for text in ("fier:store=host+4096", "quest:store=host+4096")
    ]
    assert [policy.store for policy in policies] == [
        HotSet(tokens=4096),
        HotSet(tokens=4096, store=HostOffload(page=16)),
    ]
    assert kvjax.presets.freekv(store="host+4096").rest.retrieval.store == HotSet(
        tokens=4096, store=HostOffload(page=32)
    )


def test_a_page_that_two_query_heads_select_is_read_once() -> None:
    store, rng = HotSet(tokens=16, store=HostOffload(page=4)), np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(2, 2, 32, 16)), jnp.float32) for _ in range(2))
    st = jax.jit(store.append)(store.init(SPEC, 32), k, v, jnp.full(2, 32))
    pages = np.array([[5, 2], [2, 7]])  # of the two query heads of each KV head
    slots = (pages[..., None] * 4 + np.arange(4)).reshape(1, 1, 2, 8)
    selection = Selection(
        *(jnp.broadcast_to(a, (2, 2, 2, 8)) for a in (jnp.asarray(slots, jnp.int32), True))
    )
    st, got = jax.jit(store.read, static_argnums=2)(st, selection, 16)
    for ours, stored in zip(got, (k, v), strict=True):
        np.testing.assert_array_equal(ours, stored[:, :, slots.ravel()])
    assert (np.asarray(st.hot.loads) == 3).all()
