"""TurboQuant's codes against float64 numpy written from the paper, and the stores that keep
them.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, Fier, Fifo, HotSet, Retrieval, Selection, presets
from kvjax.numerics import rotate as rotations
from kvjax.numerics.partial import Logits
from kvjax.numerics.rotate import encode, lloyd_max
from kvjax.stores import HostTurboQuant, TurboQuant
from tests.oracles import attention

BITS = (2, 3, 4, 8)
SPEC = CacheSpec(batch=2, q_heads=8, kv_heads=2, head_dim=64, capacity=160, dtype=jnp.float32)
# Levels times sqrt(128), and the relative squared error at D = 64, 128 and 256.
LEVELS = {
    2: [0.4525, 1.5052],
    3: [0.2444, 0.7533, 1.3366, 2.1315],
    4: [0.1279, 0.3864, 0.6536, 0.9371, 1.2478, 1.6043, 2.0459, 2.6889],
}
ERRORS = {2: (0.1145, 0.1160, 0.1167), 3: (0.0334, 0.0340, 0.0343), 4: (0.0091, 0.0093, 0.0094)}

coded = jax.jit(encode, static_argnames=("correct", "subspace", "coded_radii", "bits", "least"))
rotate, rotate_back = (
    jax.jit(f, static_argnums=1) for f in (rotations.rotate, rotations.rotate_back)
)
decode = jax.jit(rotations.decode)


def oracle(x: np.ndarray, bits: int, R: np.ndarray, *, key: bool) -> np.ndarray:
    """x f64[S, D] as its codes decode: the nearest levels of its rotated direction, times one
    scale.
    """
    D = x.shape[1]
    y = x.astype(np.float64) @ R.T
    if bits == 8:  # 256 uniform levels up to the largest channel
        step = np.abs(y).max(axis=1, keepdims=True) / 128
        c = np.clip(np.floor(y / np.maximum(step, 1e-30)), -128, 127) + 0.5
    else:
        _, sizes = lloyd_max(D, 2 ** (bits - 1))
        levels = np.concatenate([-sizes[::-1], sizes])
        u = y / np.maximum(np.linalg.norm(y, axis=1, keepdims=True), 1e-30)
        c = levels[np.abs(u[..., None] - levels).argmin(axis=-1)]
    dot = (y * c).sum(axis=1, keepdims=True)
    scale = (
        (y * y).sum(axis=1, keepdims=True) / dot
        if key
        else dot / (c * c).sum(axis=1, keepdims=True)
    )
    return (scale * c) @ R


def matrix(D: int, seed: int) -> np.ndarray:
    return np.asarray(rotate(jnp.eye(D), seed)).T.astype(np.float64)


@pytest.mark.parametrize("bits", LEVELS)
def test_levels_are_those_of_the_law_of_a_random_direction(bits: int) -> None:
    _, centres = lloyd_max(128, 2 ** (bits - 1))
    np.testing.assert_allclose(centres * 128**0.5, LEVELS[bits], atol=1e-4)


@pytest.mark.sample(4)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("D", [128, 64, 256])
def test_error_of_gaussian_vectors_is_that_of_the_table(bits: int, D: int) -> None:
    want = ERRORS.get(bits, (5e-5,) * 3)[(64, 128, 256).index(D)]
    x = jnp.asarray(np.random.default_rng(D).normal(size=(2000, D)), jnp.float32)
    error = jnp.sum((decode(coded(x, subspace=D, bits=bits, least=True)) - x) ** 2) / jnp.sum(
        x * x
    )
    assert error < want if bits == 8 else abs(error / want - 1) < 0.03


@pytest.mark.parametrize("bits", BITS)
def test_products_with_coded_keys_are_unbiased(bits: int) -> None:
    q, k = (
        np.random.default_rng(i).normal(size=(1000, 64)).astype(np.float32) for i in range(2)
    )
    true, estimate = (
        np.sum(k * k, axis=1),
        np.sum(k * np.asarray(decode(coded(k, subspace=64, bits=bits))), axis=1),
    )
    np.testing.assert_allclose(estimate, true, rtol=2e-3)  # the scale is a float16
    true, estimate = q @ k.T, q @ np.asarray(decode(coded(k, subspace=64, bits=bits))).T
    assert abs((true * estimate).sum() / (true * true).sum() - 1) < 0.01


def test_planes_nest() -> None:
    """The sign and the highest planes of a 4-bit code are a good code of fewer bits."""
    x = rotate(jnp.asarray(np.random.default_rng(0).normal(size=(4000, 128)), jnp.float32), 0)
    code = coded(x, subspace=128, bits=4)
    unit = np.asarray(x / jnp.linalg.norm(x, axis=1, keepdims=True))
    size = np.asarray(
        decode(code._replace(weights=jnp.full_like(code.weights, 0x3C00)))
    )  # a float16 of 1
    for kept, best in ((0, 0.3609), (1, 0.1160), (2, 0.0340)):
        cell = np.searchsorted(LEVELS[4], np.abs(size) * 128**0.5 - 1e-3) >> (3 - kept)
        mean = np.array([np.abs(unit)[cell == i].mean() for i in range(2**kept)])
        error = np.sum((np.sign(size) * mean[cell] - unit) ** 2) / len(unit)
        assert best * 0.98 < error < best * 1.035


def test_rotation_goes_back() -> None:
    for D in (16, 96, 128):
        x = jnp.asarray(np.random.default_rng(D).normal(size=(7, D)), jnp.float32)
        np.testing.assert_allclose(rotate_back(rotate(x, 3), 3), x, atol=1e-5)


@pytest.mark.parametrize("bits", BITS)
def test_vectors_without_a_direction_decode_to_themselves(bits: int) -> None:
    # all alike: the offset takes all of it
    x = jnp.zeros((1, 1, 8, 64)).at[..., 4:, :].set(2.5)
    decoded = jax.jit(TurboQuant(bits=bits).decoded)
    keys, values = decoded(x, x * 0)
    assert not np.asarray(values).any()
    same = decoded(x * 0 + 2.5, x)[0]
    np.testing.assert_allclose(same, x * 0 + 2.5, atol=1e-6)
    assert np.isfinite(keys).all()


# -------------------------------------------------------------------------------------------------------- the stores

STORES: dict[str, Any] = {f"{bits} bits": TurboQuant(bits=bits) for bits in BITS} | {
    "keys of 8, values of 4": TurboQuant(bits=8, value_bits=4, seed=5),
    "keys of 3, values of 2, on the host": HostTurboQuant(bits=3, value_bits=2),
    "pages on the host": HostTurboQuant(page=8),
}
SLOTS = 96


def keys_like_a_models(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Channels of very different size, some with an offset as the biases of Qwen2 make it."""
    x = rng.normal(size=shape) * rng.uniform(0.2, 2.0, shape[-1])
    x[..., ::16] += rng.uniform(100, 900, shape[-1] // 16)
    return x.astype(np.float32)


@functools.lru_cache
def filled(name: str) -> tuple:
    """k, v [B, K, S, D], and the state after two appends of different lengths a row."""
    store, rng = STORES[name], np.random.default_rng(3)
    k, v = (
        keys_like_a_models(rng, 2, 2, SLOTS, 64),
        rng.normal(size=(2, 2, SLOTS, 64)).astype(np.float32),
    )
    st, append = store.init(SPEC, SLOTS), jax.jit(store.append)
    st = append(st, k[:, :, :32], v[:, :, :32], np.array([32, 8]))
    second = [np.stack([a[0, :, 32:64], a[1, :, 8:40]]) for a in (k, v)]
    return k, v, append(st, *second, np.array([32, 16]))


def decoded(store: Any, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Decoded k, v f64[S, D] of one head."""
    R, offset = matrix(64, store.seed), k[:8].astype(np.float64).mean(axis=0)
    keys = offset + oracle(k - offset, store.bits, R, key=True)
    return keys, oracle(v, store.value_bits or store.bits, R, key=False)


@pytest.mark.parametrize("name", STORES)
def test_attention_is_that_over_decoded_numpy(name: str) -> None:
    """Over all slots, for one query and for a chunk, and over selected ones."""
    store, (k, v, st) = STORES[name], filled(name)
    rng = np.random.default_rng(4)
    q = (0.2 * rng.normal(size=(2, 2, 4, 5, 64))).astype(np.float32)
    start = np.array([0, 3])
    slots = (
        np.stack([rng.permutation(24)[:8] for _ in range(4)])
        .reshape(2, 2, 1, 8)
        .astype(np.int32)
    )
    if store.page == 8 if isinstance(store, HostTurboQuant) else False:
        slots = np.broadcast_to(np.arange(8, 16, dtype=np.int32), slots.shape)
    selection = Selection(jnp.asarray(slots), jnp.ones(slots.shape, bool))

    @jax.jit
    def run(st: Any, q: Any) -> Any:
        one = store.attend(st, q[:, :, :, 0], start, logits=Logits(0.125))
        chunk = store.attend_chunk(st, q, None, logits=Logits(0.125))
        return (
            one,
            chunk,
            store.attend_slots(st, q[:, :, :, 0], selection, logits=Logits(0.125)),
            store.gather(st, selection),
        )

    one, chunk, few, rows = run(st, q)
    for b, h in np.ndindex(2, 2):
        count = int(st.count[b])
        keys, values = decoded(store, k[b, h, :count], v[b, h, :count])
        at = slots[b, h, 0]
        wants = (
            (one, attention(q[b, h, :, 0], keys[start[b] :], values[start[b] :], 0.125)),
            (chunk, attention(q[b, h].reshape(20, 64), keys, values, 0.125)),
            (few, attention(q[b, h, :, 0], keys[at], values[at], 0.125)),
        )
        for part, (out, lse) in wants:
            np.testing.assert_allclose(
                part.out[b, h], out, atol=4e-3
            )  # scales are rounded to 1/2048
            np.testing.assert_allclose(part.lse[b, h], lse, atol=6e-3)
        np.testing.assert_allclose(rows[0][b, h], keys[at], atol=1e-2)
        np.testing.assert_allclose(rows[1][b, h], values[at], atol=4e-3)


@pytest.mark.parametrize("name", STORES)
def test_bytes_a_token_are_those_of_the_arrays(name: str) -> None:
    store, (_, _, st) = STORES[name], filled(name)
    taken = (
        st.kv.nbytes
        if hasattr(st, "kv")
        else sum(a.nbytes for a in jax.tree.leaves((st.k, st.v)))
    )
    assert store.bytes_per_token(SPEC) * SPEC.batch * SLOTS == taken


def test_a_token_of_a_llama_layer_takes_the_papers_bytes() -> None:
    spec = CacheSpec(batch=1, q_heads=32, kv_heads=8, head_dim=128, capacity=1024)
    for text, each in (
        ("turboquant:bits=4", 132),
        ("turboquant:bits=8,value_bits=4", 196),
        ("turboquant:bits=3", 100),
    ):
        assert presets.parse(text).rest.bytes_per_token(spec) == 8 * each


@pytest.mark.parametrize("queries", [4, 512])
def test_attention_at_32k_tokens_never_decodes_the_cache(queries: int) -> None:
    spec, store = (
        CacheSpec(batch=1, q_heads=32, kv_heads=8, head_dim=128, capacity=32768),
        TurboQuant(),
    )
    st = jax.eval_shape(lambda: store.init(spec, 32768))
    q = jax.ShapeDtypeStruct((1, 8, queries, 128), jnp.bfloat16)
    attend = jax.jit(functools.partial(store.attend, logits=Logits(0.1)))
    memory = (
        attend.lower(st, q, jax.ShapeDtypeStruct((1,), jnp.int32)).compile().memory_analysis()
    )
    assert (
        memory.temp_size_in_bytes <= 3 * 512 * 8 * (2 * 128 + 2 * queries) * 4
    )  # blocks of 512 tokens, in f32


@pytest.mark.parametrize(
    ("name", "store"),
    [
        ("fier:store=turbo4", TurboQuant()),
        ("quest:store=turbo8v4", TurboQuant(bits=8, value_bits=4)),
        ("pariskv:store=host-turbo3", HostTurboQuant(bits=3)),
        (
            "quest:store=host-turbo2+4096",
            HotSet(tokens=4096, store=HostTurboQuant(bits=2, page=16)),
        ),
    ],
)
def test_presets_select_from_the_codes_that_are_asked_for(name: str, store: Any) -> None:
    policy = presets.parse(name).rest
    assert isinstance(policy, Retrieval)
    assert policy.store == store


def test_freekv_recalls_codes() -> None:
    policy = presets.parse("freekv:store=host-turbo4").rest
    assert policy.retrieval.store == HostTurboQuant(page=32)


class Copied(TurboQuant):
    """TurboQuant whose selected tokens FreeKV copies, as it does those of other stores."""

    recalls = True


def test_freekv_attends_in_place_to_what_it_would_recall() -> None:
    """Steps of several flushes, of which some heads reuse earlier selections: nearly exact
    codes show the tokens.
    """
    policy = presets.freekv(budget=48, page=8, sink=4, local=16, tau=0.2, store="turbo8").rest
    spec = kvjax.CacheSpec(
        batch=2, q_heads=4, kv_heads=2, head_dim=32, capacity=160, dtype="float32"
    )
    draw = np.random.default_rng(0).standard_normal
    prompt, steps = (
        [draw((n, 2, t, h, 32)).astype(np.float32) for h in (4, 2, 2)]
        for n, t in ((1, 77), (30, 1))
    )
    turning = np.cumsum(steps[0], axis=0)  # queries that are alike from step to step

    def run(policy: Any) -> tuple[Any, Any]:
        def one(layer: Any, qkv: Any) -> Any:
            out, layer, info = kvjax.attention_info(layer, *qkv)
            return layer, (out, info.positions)

        layer = kvjax.attention(kvjax.init_layer(policy, spec), *(a[0] for a in prompt))[1]
        layer, found = jax.lax.scan(one, layer, (turning, *steps[1:]))
        return layer.state.recall.k.shape[2], found

    size, (out, positions) = run(policy)
    copies = replace(policy.retrieval, store=Copied(bits=8))
    copied, (expected, same) = run(replace(policy, retrieval=copies))
    assert size == 1 < copied
    np.testing.assert_array_equal(np.sort(positions), np.sort(same))
    np.testing.assert_allclose(
        out, expected, atol=0.05
    )  # the copies of tokens that were flushed since are exact


def test_what_cannot_be_coded_is_refused() -> None:
    with pytest.raises(ValueError, match=r"TurboQuant\(bits=5\) must be one of 2, 3, 4, 8"):
        TurboQuant(bits=5)
    with pytest.raises(
        ValueError, match=r"HostTurboQuant\(value_bits=1\) must be one of 2, 3, 4, 8"
    ):
        HostTurboQuant(value_bits=1)
    with pytest.raises(ValueError, match=r"store='turbo4\+64'\) must be"):
        presets.fier(store="turbo4+64")
    policy = Retrieval(
        selector=Fier(group=16), store=TurboQuant(), budget=64, demote=Fifo(leave=32)
    )
    with pytest.raises(ValueError, match="head_dim=80 cannot be rotated"):
        kvjax.init_layer(
            policy, CacheSpec(batch=1, q_heads=1, kv_heads=1, head_dim=80, capacity=99)
        )
