"""Coded tokens in host memory: what the codes decode to, and what they cost."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, HostFloat8, HostOffload, HotSet, Retrieval, Store, ops, presets
from kvjax.numerics.partial import Logits
from kvjax.numerics.selection import Selection
from kvjax.stores import HostTurboQuant, TurboQuant

SPEC = CacheSpec(batch=2, q_heads=4, kv_heads=2, head_dim=64, capacity=200, dtype=jnp.float32)


def test_8_bit_floats_keep_3_bits_of_fraction() -> None:
    x = np.concatenate([np.random.default_rng(0).normal(size=62) * 10, [1e6, -1e6]]).astype(
        np.float32
    )
    one = jnp.asarray(x)[None, None, None]
    got = np.asarray(HostFloat8().decoded(one, one)[1]).ravel()
    assert (np.abs(got - x)[:62] <= np.abs(x)[:62] / 16 + 1e-3).all()
    assert got[62:].tolist() == [448, -448]


@pytest.mark.parametrize("store", [HostFloat8(page=4), HostTurboQuant()])
def test_selected_tokens_are_read_as_they_were_stored(store: Store) -> None:
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(2, 2, 16, 64)), jnp.float32) for _ in range(2))
    st = jax.jit(store.append)(store.init(SPEC, 32), k, v, jnp.array([16, 8]))
    assert st.kv.sharding.memory_kind == "pinned_host"
    assert st.kv.size == 2 * 32 * store.bytes_per_token(SPEC)
    slots = jnp.broadcast_to(jnp.array([4, 5, 6, 7, 0, 1, 2, 3], jnp.int32), (2, 2, 1, 8))
    got = jax.jit(store.gather)(st, Selection(slots, jnp.ones(slots.shape, bool)))
    for a, b in zip(got, jax.jit(store.decoded)(k, v), strict=True):
        np.testing.assert_allclose(a, np.asarray(b)[:, :, slots[0, 0, 0]], rtol=1e-6, atol=1e-6)


OFFSET_STORES = [HostFloat8(), HostTurboQuant(), TurboQuant(bits=3)]


@pytest.mark.parametrize("store", OFFSET_STORES, ids=str)
@pytest.mark.parametrize("hot", [False, True])
def test_an_offset_of_all_keys_changes_no_result(store: Store, hot: bool) -> None:
    """Softmax is unchanged by a vector that is added to all keys, as a bias does, and codes
    must not lose by it.
    """
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=(2, heads, 64, 64)), jnp.float32) for heads in (4, 2, 2)
    )
    count, scale = jnp.array([64, 32]), 64**-0.5
    slots = jnp.broadcast_to(jnp.arange(64, dtype=jnp.int32), (2, 2, 1, 64))
    selection = Selection(slots, slots < count[:, None, None, None])

    @partial(jax.jit, static_argnums=0)
    def run(store: Any, k: jax.Array) -> Any:
        st = store.init(SPEC, 64)
        for start in (0, 32):
            own = slice(start, start + 32)
            st = store.append(st, k[:, :, own], v[:, :, own], (count - start).clip(0, 32))
        queries = q[:, :, 0].reshape(2, 2, 2, 64)
        if hot:
            st, loaded = store.load(st, selection)
            return ops.attend_gathered(
                queries, loaded.k, loaded.v, loaded.selection, logits=Logits(scale)
            ).out
        both = store.attend(st, queries, jnp.zeros(2, jnp.int32), logits=Logits(scale)).out
        return jnp.concatenate(
            [both, store.attend_slots(st, queries, selection, logits=Logits(scale)).out]
        )

    exact = run(kvjax.Dense(), k) if not hot else run(HotSet(tokens=64), k)
    coded = HotSet(tokens=64, store=store) if hot else store
    plain = np.abs(run(coded, k) - exact).mean()
    for offset in (100.0, 900.0):  # biases of Qwen2's keys
        shifted = k.at[..., ::32].add(offset)
        assert np.abs(run(coded, shifted) - exact).mean() < 1.2 * plain + 1e-4, offset


def test_pages_that_chunks_do_not_fill_are_refused() -> None:
    with pytest.raises(ValueError, match=r"page=24\) does not divide the chunk of 32"):
        HostFloat8(page=24).check(SPEC, 32)


@pytest.mark.parametrize(
    ("name", "store"),
    [
        ("fier:store=host", HostOffload()),
        ("fier:store=float8", HostFloat8()),
        ("pariskv:store=host-turbo4", HostTurboQuant()),
        ("quest:store=float8+4096", HotSet(tokens=4096, store=HostFloat8(page=16))),
        ("fier:store=host+4096", HotSet(tokens=4096)),
    ],
)
def test_presets_keep_their_history_in_the_codes_that_are_asked_for(
    name: str, store: Store
) -> None:
    policy = presets.parse(name).rest
    assert isinstance(policy, Retrieval)
    assert policy.store == store


@pytest.mark.parametrize("name", ["fier", "quest", "pariskv"])
def test_presets_refuse_stores_that_there_are_not(name: str) -> None:
    for store in ("int4", "hosts", "device+64", "host+", "host+many", "HOST"):
        with pytest.raises(
            ValueError, match=rf"{name}\(store='{re.escape(store)}'\) must be .*'float8'"
        ):
            presets.find(name).make(1024, store=store)
    with pytest.raises(
        ValueError, match=rf"{name}\(store='host\+...'\) must be at least 1, got 0"
    ):
        presets.find(name).make(1024, store="host+0")


@pytest.mark.parametrize("count", [4, 8, 16])
def test_the_offset_is_the_mean_of_the_first_keys_and_stays(count: int) -> None:
    store, rng = HostFloat8(page=4), np.random.default_rng(0)
    k, more = (jnp.asarray(rng.normal(size=(2, 2, 16, 64)), jnp.float32) for _ in range(2))
    st = store.append(store.init(SPEC, 32), k, k, jnp.array([count, 0]))
    st = store.append(st, more, more, jnp.array([16, 16]))
    first = k[0, :, : min(count, 8)], more[1, :, :8]  # the second row was empty before
    np.testing.assert_allclose(
        st.offset, [np.mean(a, axis=1) for a in first], rtol=1e-5, atol=1e-6
    )
