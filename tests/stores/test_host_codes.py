"""Coded tokens in host memory: what the codes decode to, and what they cost."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, Fier, Fifo, HostFloat8, HostOffload, HostQuantized, HotSet, Retrieval, Store, presets
from kvjax.numerics.selection import Selection

SPEC = CacheSpec(batch=2, q_heads=4, kv_heads=2, head_dim=64, capacity=200, dtype=jnp.float32)


@pytest.mark.parametrize(("bits", "group"), [(2, 32), (4, 16), (8, 64)])
def test_codes_decode_to_the_nearest_level_of_their_group(bits: int, group: int) -> None:
    x = np.random.default_rng(0).normal(size=(2, 2, 8, 64)).astype(np.float32)
    got = np.asarray(HostQuantized(bits=bits, group=group).decoded(jnp.asarray(x), jnp.asarray(x))[0])
    groups = x.reshape(-1, group)
    low, high = groups.min(axis=1, keepdims=True), groups.max(axis=1, keepdims=True)
    half_a_step = (high - low) / (2**bits - 1) / 2
    rounding = (high - low + np.abs(low)) / 128  # scale and zero are bfloat16
    assert (np.abs(got.reshape(-1, group) - groups) <= half_a_step + rounding).all()


def test_8_bit_floats_keep_3_bits_of_fraction() -> None:
    x = np.concatenate([np.random.default_rng(0).normal(size=62) * 10, [1e6, -1e6]]).astype(np.float32)
    got = np.asarray(HostFloat8().decoded(jnp.asarray(x), jnp.asarray(x))[1])
    assert (np.abs(got - x)[:62] <= np.abs(x)[:62] / 16 + 1e-3).all()
    assert got[62:].tolist() == [448, -448]


@pytest.mark.parametrize("store", [HostFloat8(page=4), HostQuantized(bits=4, group=16)])
def test_selected_tokens_are_read_as_they_were_stored(store: Store) -> None:
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(2, 2, 16, 64)), jnp.float32) for _ in range(2))
    st = jax.jit(store.append)(store.init(SPEC, 32), k, v, jnp.array([16, 8]))
    assert st.kv.sharding.memory_kind == "pinned_host"
    assert st.kv.size == 2 * 32 * store.bytes_per_token(SPEC)
    slots = jnp.broadcast_to(jnp.array([4, 5, 6, 7, 0, 1, 2, 3], jnp.int32), (2, 2, 1, 8))
    got = jax.jit(store.gather)(st, Selection(slots, jnp.ones(slots.shape, bool)))
    for a, b in zip(got, store.decoded(k, v), strict=True):
        np.testing.assert_allclose(a, b[:, :, slots[0, 0, 0]], rtol=1e-6, atol=1e-6)


def test_wrong_codes_are_refused() -> None:
    policy = Retrieval(selector=Fier(group=16), store=HostQuantized(group=24), budget=64, demote=Fifo(leave=32))
    with pytest.raises(ValueError, match=r"group=24\) does not divide head_dim=64"):
        kvjax.init_layer(policy, SPEC)
    with pytest.raises(ValueError, match=r"bits=3\) must be one of 2, 4, 8"):
        HostQuantized(bits=3)
    with pytest.raises(ValueError, match=r"page=24\) does not divide the chunk of 32"):
        HostFloat8(page=24).check(SPEC, 32)


@pytest.mark.parametrize(
    ("name", "store"),
    [
        ("fier:store=host", HostOffload()),
        ("fier:store=float8", HostFloat8()),
        ("pariskv:store=int4", HostQuantized(bits=4)),
        ("quest:store=int8", HostQuantized(bits=8, page=16)),
        ("quest:store=float8+4096", HotSet(tokens=4096, store=HostFloat8(page=16))),
        ("fier:store=host+4096", HotSet(tokens=4096)),
    ],
)
def test_presets_keep_their_history_in_the_codes_that_are_asked_for(name: str, store: Store) -> None:
    policy = presets.parse(name).rest
    assert isinstance(policy, Retrieval)
    assert policy.store == store


@pytest.mark.parametrize("name", ["fier", "quest", "pariskv"])
def test_presets_refuse_stores_that_there_are_not(name: str) -> None:
    for store in ("int3", "hosts", "device+64", "host+", "host+many", "HOST"):
        with pytest.raises(
            ValueError, match=rf"{name}\(store='{re.escape(store)}'\) must be .*float8, int8, int4, int2"
        ):
            presets.find(name).make(1024, store=store)
    with pytest.raises(ValueError, match=rf"{name}\(store='host\+...'\) must be at least 1, got 0"):
        presets.find(name).make(1024, store="host+0")
