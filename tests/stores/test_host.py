"""The host store: where its bytes lie, that every program keeps them there, and that it reads
what Dense reads.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, Dense, Fier, Fifo, HostOffload, MinMaxPages, Retrieval, memory
from kvjax.numerics.partial import Logits
from kvjax.numerics.selection import Selection
from kvjax.stores.store import Recalled
from kvjax.testing import _drive as drive
from tests.kernels.inputs import of_pages

SPEC = CacheSpec(batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=300, dtype=jnp.float32)
POLICY = Retrieval(
    selector=MinMaxPages(page=16),
    store=HostOffload(page=16),
    budget=80,
    sink=4,
    local=24,
    demote=Fifo(leave=32),
    dense_below=0,
)


def kind(cache: kvjax.LayerCache) -> str:
    return cache.state.store.kv.sharding.memory_kind


@pytest.mark.sample(2)
@pytest.mark.parametrize("page", [1, 16, 4])
def test_host_store_holds_and_reads_what_dense_does(page: int) -> None:
    rng = np.random.default_rng(page)
    dense, host = Dense(), HostOffload(page=page)
    states = [store.init(SPEC, 96) for store in (dense, host)]
    attends = [
        jax.jit(functools.partial(store.attend, logits=Logits(0.2))) for store in (dense, host)
    ]
    q = jnp.asarray(rng.normal(size=(2, 2, 2, 16)), jnp.float32)
    # Rows take different numbers of chunks; the last call has less room than it brings, and row
    # 1 none for its last.
    for counts in ([32, 0], [16, 32], [48, 48], [0, 48]):
        k, v = (jnp.asarray(rng.normal(size=(2, 2, 48, 16)), jnp.float32) for _ in range(2))
        states = [
            jax.jit(store.append)(st, k, v, jnp.array(counts))
            for store, st in zip((dense, host), states, strict=True)
        ]
        for b, n in enumerate(np.asarray(states[0].count)):
            for name in "kv":
                ours, theirs = (np.asarray(getattr(st, name))[b, :, :n] for st in states[::-1])
                np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(states[1].count, states[0].count)
        start = jnp.array([5, 0])
        parts = [attend(st, q, start) for attend, st in zip(attends, states, strict=True)]
        for ours, theirs in zip(parts[1], parts[0], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
    pages = np.stack([rng.permutation(80 // page)[:3] for _ in range(4)]).reshape(2, 2, 1, 3)
    selection = of_pages(pages, pages != pages.max(), page)
    parts = [
        jax.jit(functools.partial(store.attend_slots, logits=Logits(0.2)))(st, q, selection)
        for store, st in zip((dense, host), states, strict=True)
    ]
    for ours, theirs in zip(parts[1], parts[0], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "selector", [MinMaxPages(page=16), Fier(group=16)], ids=["pages", "fier"]
)
def test_policy_over_host_memory_attends_as_over_dense(selector) -> None:
    host = dataclasses.replace(POLICY, selector=selector, store=HostOffload(page=selector.unit))
    dense = dataclasses.replace(host, store=Dense())
    tokens, lengths = drive.random_tokens(SPEC), np.array([150, 61])
    caches = [drive.fill(kvjax.init_layer(p, SPEC), tokens, lengths)[0] for p in (host, dense)]
    for i in range(40):
        outs = []
        for j, cache in enumerate(caches):
            out, caches[j], _ = drive.step(cache, tokens, lengths + i)
            outs.append(out)
        np.testing.assert_allclose(outs[0], outs[1], atol=1e-5)


def test_presets_move_the_history_to_the_host_and_change_nothing_else() -> None:
    for make in (kvjax.presets.fier, kvjax.presets.pariskv):
        layered = make(store="host", layers=kvjax.presets.Layers(dense=1))
        assert layered.first == (kvjax.Full(),)
        assert layered.rest == dataclasses.replace(
            make().rest, store=HostOffload(), dense_capacity=0
        )


def test_memory_kind_is_kept_by_init_jit_donation_and_loops() -> None:
    tokens = drive.random_tokens(SPEC)
    q, k, v = (jnp.asarray(a) for a in (tokens.q, tokens.k, tokens.v))
    make = functools.partial(kvjax.init_layer, POLICY, SPEC)
    assert kind(make()) == kind(jax.jit(make)()) == "pinned_host"

    @functools.partial(jax.jit, donate_argnums=0)
    def run(cache: kvjax.LayerCache) -> kvjax.LayerCache:
        _, cache = kvjax.attention(cache, q[:, :100], k[:, :100], v[:, :100])

        def step(i: jax.Array, cache: kvjax.LayerCache) -> kvjax.LayerCache:
            _, cache = kvjax.attention(
                cache, *(jax.lax.dynamic_slice_in_dim(a, 100 + i, 1, axis=1) for a in (q, k, v))
            )
            return cache

        return jax.lax.fori_loop(0, 80, step, cache)

    cache = make()
    place = cache.state.store.kv.unsafe_buffer_pointer()
    after = run(cache)
    assert kind(after) == "pinned_host"
    assert after.state.store.kv.unsafe_buffer_pointer() == place
    assert after.length.tolist() == [180, 180]
    steps, _ = drive.fill(make(), tokens, np.array([180, 180]))
    np.testing.assert_array_equal(after.state.store.count, steps.state.store.count)
    n = int(steps.state.store.count[0])
    np.testing.assert_array_equal(after.state.store.k[:, :, :n], steps.state.store.k[:, :, :n])


@pytest.mark.parametrize("preset", ["fier", "quest", "pariskv", "freekv"])
def test_loop_that_feeds_back_a_cache_compiles_its_step_once(preset: str) -> None:
    """Arrays in host memory are committed to their device, and so are all other results of the
    same program.
    """
    options = {} if preset == "freekv" else {"store": "host"}
    cache = kvjax.init(
        getattr(kvjax.presets, preset)(512, layers=kvjax.presets.Layers(dense=1), **options),
        SPEC,
        layers=2,
    )
    tokens = drive.random_tokens(SPEC)

    @jax.jit
    def step(cache: kvjax.Cache, q: jax.Array, k: jax.Array, v: jax.Array) -> kvjax.Cache:
        return kvjax.Cache(tuple(kvjax.attention(layer, q, k, v)[1] for layer in cache.layers))

    for i in range(3):
        cache = step(
            cache, *(jnp.asarray(a[:, i : i + 1]) for a in (tokens.q, tokens.k, tokens.v))
        )
    assert step._cache_size() == 1


def test_inserted_row_stays_on_the_host() -> None:
    cache, prefix = (
        kvjax.init_layer(POLICY, dataclasses.replace(SPEC, batch=b)) for b in (2, 1)
    )
    assert kind(kvjax.insert(cache, prefix, 1)) == "pinned_host"


def test_device_holds_index_and_windows_alone() -> None:
    """In bytes: two corners a page, sink and recent block; keys and values of the history are
    the host's.
    """
    cache = kvjax.init_layer(POLICY, SPEC)
    rows, slots, width = 2 * 2, cache.state.store.slots, 16 * 4
    held = memory.nbytes(cache)
    assert held.host == rows * slots * 2 * width
    assert held.host == 2 * slots * HostOffload(page=16).bytes_per_token(SPEC)
    zones = rows * 2 * width * (4 + 24 + 32 - 1)
    counters = 3 * 2 * 4 + 2
    assert held.device == rows * slots // 16 * 2 * width + zones + counters


def test_step_moves_what_it_selects_and_no_more() -> None:
    """The device's temporary bytes of a step do not grow with the history."""
    sizes = []
    for capacity in (8192, 32768):
        spec = dataclasses.replace(SPEC, capacity=capacity)
        cache = memory.shapes(functools.partial(kvjax.init_layer, POLICY, spec))
        q, k = (jax.ShapeDtypeStruct((2, 1, heads, 16), jnp.float32) for heads in (4, 2))
        step = jax.jit(functools.partial(kvjax.attention, flush=False), donate_argnums=0)
        sizes.append(step.lower(cache, q, k, k).compile().memory_analysis().temp_size_in_bytes)
    scores = 2 * 4 * (32768 - 8192) // 16 * 4  # f32[B, N, pages] of them are alive at a time
    assert sizes[1] - sizes[0] <= 8 * scores, sizes


def test_backend_without_host_memory_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("kvjax.stores.host.has_host_memory", lambda: False)
    with pytest.raises(
        ValueError, match=r"HostOffload needs pinned host memory.*lacks; use the store Dense"
    ):
        kvjax.init_layer(
            POLICY, dataclasses.replace(SPEC, capacity=SPEC.capacity + 1)
        )  # of which none was made


@pytest.mark.parametrize("store", [Dense(), HostOffload(page=4)], ids=["dense", "host"])
def test_a_recall_has_the_selection_and_then_the_edge(store: kvjax.Store) -> None:
    """A page of the history, one of the recent block, and the token of the recent block at the
    edge, if any.
    """
    rng = np.random.default_rng(0)
    k, v, k_new, v_new = (
        jnp.asarray(rng.normal(size=(2, 2, n, 16)), jnp.float32) for n in (16, 16, 8, 8)
    )
    st = store.append(store.init(SPEC, 16), k, v, jnp.full(2, 16))
    slots = jnp.broadcast_to(jnp.array([4, 5, 6, 7, 17, 18, 19, 20], jnp.int32), (2, 2, 1, 8))
    none = Selection(jnp.zeros((2, 2, 1, 12), jnp.int32), jnp.zeros((2, 2, 1, 12), bool))
    before, urgent = (
        Recalled(none, *jnp.zeros((2, 2, 2, 12, 16))),
        jnp.array([[True, False]] * 2),
    )

    @jax.jit
    def recall(st: Any, oldest: Any) -> Any:
        given = (
            Selection(slots, jnp.ones(slots.shape, bool)),
            (k_new, v_new),
            oldest,
            before,
            jnp.ones(2, bool),
            urgent,
        )
        _, first, rest = store.recall(st, *given)
        return first, rest()

    first, every = recall(st, jnp.array([2, -1], jnp.int32))
    for part, whole, old, new in zip(first, every, (k, v), (k_new, v_new), strict=True):
        want = np.concatenate([old[:, :, 4:8], new[:, :, 1:5], new[:, :, 2:3]], axis=2)
        for got, heads in ((part, 1), (whole, 2)):
            np.testing.assert_array_equal(got[0, :heads, :9], want[0, :heads])
            np.testing.assert_array_equal(
                got[1, :heads, :8], want[1, :heads, :8]
            )  # without an edge
            assert np.isfinite(got).all()


def test_pages_that_were_recalled_whole_need_not_be_read_again() -> None:
    store, S = HostOffload(page=4), 16
    cases = {
        (4, 5, 6, 7): 1,
        (0, 1, 2, 3): 0,
        (8, 10, 9, 11): -1,  # in another order
        (2, 3, 4, 5): -1,  # parts of two pages
        (S, S + 1, S + 2, S + 3): -1,  # of the recent block
    }
    slots = np.broadcast_to(np.concatenate([*cases, (12, 13, 14, 15)]), (2, 2, 1, 24)).astype(
        np.int32
    )
    valid = np.arange(24) != 23  # the last page lacks a token
    recalled = Selection(jnp.asarray(slots), jnp.broadcast_to(valid, slots.shape))
    got = store._whole_pages(store.init(SPEC, S), recalled)
    assert np.asarray(got).tolist() == [[[*cases.values(), -1]] * 2] * 2
