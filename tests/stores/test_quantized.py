"""Codes of 2, 3, 4 and 8 bits, and attention that reads them, against numpy written from the
methods' papers.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp

import kvjax
from kvjax import CacheSpec, Fier, Fifo, Quantized, Retrieval, Selection
from kvjax.numerics.partial import Logits
from kvjax.numerics.quant import dequantize, pack_codes, quantize, split_scales, unpack_codes
from kvjax.testing import _drive as drive
from tests.oracles import asymmetric, attention

BITS = (2, 3, 4, 8)
VALUES = st.floats(-1e4, 1e4, width=32)
GROUPS = [(1, 8), (1, 4), (1, 1), (3, 1), (12, 1), (6, 2)]  # tokens, channels

quantized = jax.jit(quantize, static_argnames=("bits", "tokens", "channels"))
dequantized = jax.jit(dequantize, static_argnames="channels")


def keys_like_a_models(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Channels of very different size and offset."""
    size, offset = rng.uniform(0.2, 2.0, shape[-1]), rng.normal(size=shape[-1])
    return (rng.normal(size=shape) * size + offset).astype(np.float32)


# ------------------------------------------------------------------------------------------------------------- codes


@given(codes=hnp.arrays(np.uint8, (3, 16)), bits=st.sampled_from(BITS))
def test_packing_round_trips(codes: np.ndarray, bits: int) -> None:
    codes &= 2**bits - 1
    packed = pack_codes(jnp.asarray(codes), bits)
    assert packed.dtype == jnp.uint8
    assert packed.shape == (3, 2 * bits)
    np.testing.assert_array_equal(unpack_codes(packed, 16), codes)


def test_the_lowest_bits_are_the_first_channel() -> None:
    codes = np.arange(16, dtype=np.uint8)
    assert pack_codes(jnp.asarray(codes), 4).tolist() == [
        i | (i + 1) << 4 for i in range(0, 16, 2)
    ]
    low, high = codes[:8] & 3, codes[:8] >> 2
    planes = [*(sum(int(low[4 * i + j]) << 2 * j for j in range(4)) for i in range(2))]
    planes.append(sum(int(high[j]) << j for j in range(8)))
    assert pack_codes(jnp.asarray(codes[:8]), 3).tolist() == planes


def test_packing_needs_whole_bytes() -> None:
    with pytest.raises(ValueError, match="3 bits pack a multiple of 8 channels, got 12"):
        pack_codes(jnp.zeros((2, 12), jnp.uint8), 3)


@pytest.mark.parametrize("bits", BITS)
@given(x=hnp.arrays(np.float32, (12, 8), elements=VALUES), group=st.sampled_from(GROUPS))
def test_value_decodes_to_within_half_a_step(
    bits: int, x: np.ndarray, group: tuple[int, int]
) -> None:
    tokens, channels = group
    code = quantized(jnp.asarray(x), bits=bits, tokens=tokens, channels=channels)
    decoded = np.asarray(dequantized(code, channels=8))
    assert np.isfinite(decoded).all()
    _, scales, zeros = asymmetric(x, bits, tokens, channels)
    # bfloat16 keeps 8 bits: the least level may lie off by 1/512 of itself, and the top one by
    # that of the range too.
    slack = np.abs(zeros) / 256 + scales * 2**bits / 256 + 2.0**-120
    assert (np.abs(decoded - x) <= scales / 2 + slack).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codes_and_scales_are_those_of_numpy(
    bits: int, group: tuple[int, int], dtype: str
) -> None:
    x = keys_like_a_models(np.random.default_rng(bits), 120, 16).astype(dtype)
    tokens, channels = group
    code = quantized(jnp.asarray(x), bits=bits, tokens=tokens, channels=channels)
    codes, scales, zeros = asymmetric(x, bits, tokens, channels)
    scale, zero = (
        np.repeat(np.repeat(np.asarray(a), tokens, 0), channels, 1)
        for a in split_scales(code.scales)
    )
    np.testing.assert_array_equal(zero, zeros)
    np.testing.assert_array_equal(scale, scales)
    np.testing.assert_array_equal(unpack_codes(code.codes, 16), codes)


@pytest.mark.parametrize("bits", BITS)
def test_constant_group_decodes_to_itself(bits: int) -> None:
    x = jnp.full((2, 64, 16), -3.25).at[1].set(0.0)
    code = quantized(x, bits=bits, tokens=32)
    assert not np.asarray(split_scales(code.scales)[0]).any()
    np.testing.assert_array_equal(dequantized(code, channels=16), x)


def test_range_too_small_for_a_scale_is_constant() -> None:
    x = jnp.zeros((4, 8)).at[0].set(2.0**-126)
    np.testing.assert_array_equal(
        dequantized(quantized(x, bits=2, tokens=4), channels=8), jnp.zeros((4, 8))
    )


def test_halves_round_to_even() -> None:
    x = np.array([0.0, 0.5, 1.5, 2.5, 3.0, 3.0, 3.0, 3.0], np.float32)[:, None].repeat(4, 1)
    code = quantized(jnp.asarray(x), bits=2, tokens=8)
    assert np.asarray(unpack_codes(code.codes, 4))[:, 0].tolist() == [0, 0, 2, 2, 3, 3, 3, 3]


def test_group_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="10 tokens, which groups of 4"):
        quantize(jnp.zeros((10, 8)), 2, tokens=4)
    with pytest.raises(ValueError, match="8 channels, which groups of 3"):
        quantize(jnp.zeros((10, 8)), 2, channels=3)


# -------------------------------------------------------------------------------------------------------- the store

SPEC = CacheSpec(batch=2, q_heads=8, kv_heads=2, head_dim=16, capacity=320, dtype=jnp.float32)
CHUNK, SLOTS = 32, 320
STORES = {
    "keys by channel": Quantized(bits=2, key_group=16, value_group=8),
    "keys by channel, a group a chunk": Quantized(bits=3, key_group=32, value_group=16),
    "small groups": Quantized(bits=4, key_group=2, value_group=2),
    "groups of one": Quantized(bits=2, key_group=1, value_group=16),
    "keys by token": Quantized(bits=4, key_axis="token", key_group=8, value_bits=2),
    "8 bits": Quantized(bits=8, key_axis="token", key_group=64),
}


def oracle(store: Quantized, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Decoded k, v f64[S, D] of one head, from the description of the store."""
    by_channel, D = store.key_axis == "channel", k.shape[1]
    group = (store.key_group, 1) if by_channel else (1, min(store.key_group, D))
    codes, scales, zeros = asymmetric(k, store.bits, *group)
    keys = codes * scales + zeros
    value_group = store.key_group if store.value_group is None else store.value_group
    codes, scales, zeros = asymmetric(v, store.value_bits or store.bits, 1, min(value_group, D))
    return keys, codes * scales + zeros


@functools.lru_cache
def filled(name: str) -> tuple:
    """k, v [B, K, S, D] and the state after two appends of different lengths a row."""
    store, rng = STORES[name], np.random.default_rng(3)
    k, v = (keys_like_a_models(rng, 2, 2, SLOTS, 16) for _ in range(2))
    st, append = store.init(SPEC, SLOTS), jax.jit(store.append)
    for first, counts in (
        (0, [CHUNK, 3 * CHUNK]),
        (1, [5 * CHUNK, 0]),
        (2, [CHUNK, 6 * CHUNK]),
    ):
        at = np.asarray(st.count)
        index = np.minimum(at[:, None] + np.arange(6 * CHUNK), SLOTS - 1)[:, None, :, None]
        st = append(st, *(np.take_along_axis(a, index, 2) for a in (k, v)), np.array(counts))
        assert (np.asarray(st.count) == at + counts).all(), first
    return k, v, st


def _mixed(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """All combinations; the first ones, as many as the longest axis has values, include every
    value of every axis.
    """
    first = [tuple(axis[i % len(axis)] for axis in axes) for i in range(max(map(len, axes)))]
    return first + [cell for cell in itertools.product(*axes) if cell not in first]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("queries", "name"), _mixed([1, 4, 40], [*STORES]))
def test_attention_over_everything_is_that_over_decoded_numpy(name: str, queries: int) -> None:
    store, (k, v, st) = STORES[name], filled(name)
    q = np.random.default_rng(4).normal(size=(2, 2, queries, 16)).astype(np.float32)
    attend = jax.jit(functools.partial(store.attend, logits=Logits(0.3)))
    for start in ([0, 0], [5, 70], [40, 300]):
        starts = np.asarray(start)[:, None] + np.zeros((1, queries), int)
        part = attend(st, q, starts)
        for b, h in np.ndindex(2, 2):
            keys, values = oracle(store, k[b, h], v[b, h])
            here = slice(start[b], int(st.count[b]))
            out, lse = attention(q[b, h], keys[here], values[here], 0.3)
            np.testing.assert_allclose(part.out[b, h], out, atol=2e-5)
            np.testing.assert_allclose(part.lse[b, h], lse, atol=2e-5)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("heads", "name"), _mixed([1, 4], [*STORES]))
def test_attention_over_selected_slots_is_that_over_decoded_numpy(
    name: str, heads: int
) -> None:
    store, (k, v, st) = STORES[name], filled(name)
    rng = np.random.default_rng(5)
    q = rng.normal(size=(2, 2, 4, 16)).astype(np.float32)
    slots = (
        np.stack([rng.permutation(200)[:20] for _ in range(4 * heads)])
        .reshape(2, 2, heads, 20)
        .astype(np.int32)
    )
    valid = rng.random(slots.shape) < 0.7
    valid[0, 0, 0] = False
    part = jax.jit(functools.partial(store.attend_slots, logits=Logits(0.3)))(
        st, q, Selection(jnp.asarray(slots), jnp.asarray(valid))
    )
    for b, h, g in np.ndindex(2, 2, 4):
        keys, values = oracle(store, k[b, h], v[b, h])
        mine = slots[b, h, g % heads][valid[b, h, g % heads]]
        out, lse = attention(q[b, h, g : g + 1], keys[mine], values[mine], 0.3)
        np.testing.assert_allclose(part.out[b, h, g], out[0], atol=2e-5)
        np.testing.assert_allclose(part.lse[b, h, g], lse[0], atol=2e-5)


@pytest.mark.parametrize("name", STORES)
def test_decoded_is_what_numpy_decodes(name: str) -> None:
    store, (k, v, _) = STORES[name], filled(name)
    got = jax.jit(store.decoded)(k[:, :, :CHUNK], v[:, :, :CHUNK])
    for b, h in np.ndindex(2, 2):
        for ours, want in zip(
            got, oracle(store, k[b, h, :CHUNK], v[b, h, :CHUNK]), strict=True
        ):
            np.testing.assert_allclose(ours[b, h], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", STORES)
def test_bytes_a_token_are_those_of_the_arrays(name: str) -> None:
    st = jax.eval_shape(lambda: STORES[name].init(SPEC, SLOTS))
    taken = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((st.k, st.v)))
    assert STORES[name].bytes_per_token(SPEC) * SPEC.batch * SLOTS == taken


def test_a_2_bit_token_of_a_llama_layer_takes_96_bytes_a_head() -> None:
    spec = dataclasses.replace(SPEC, head_dim=128, kv_heads=8, dtype=jnp.bfloat16)
    assert Quantized(bits=2, key_group=32).bytes_per_token(spec) == 8 * 96
    assert kvjax.presets.kivi().rest.bytes_per_token(spec) == 8 * 96


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("queries", "key_axis", "bits"), _mixed([4, 512], ["channel", "token"], BITS)
)
def test_attention_at_32k_tokens_never_decodes_the_cache(
    bits: int, key_axis: str, queries: int
) -> None:
    spec = CacheSpec(batch=1, q_heads=32, kv_heads=8, head_dim=128, capacity=32768)
    store = Quantized(bits=bits, key_axis=key_axis, key_group=32)  # type: ignore[arg-type]
    st = jax.eval_shape(lambda: store.init(spec, 32768))
    q = jax.ShapeDtypeStruct((1, 8, queries, 128), jnp.bfloat16)
    attend = jax.jit(functools.partial(store.attend, logits=Logits(0.1)))
    memory = (
        attend.lower(st, q, jax.ShapeDtypeStruct((1,), jnp.int32)).compile().memory_analysis()
    )
    codes = 32768 * 8 * store.bytes_per_token(spec) / 8
    # A block of 512 of the 32768 tokens: decoded k and v in f32 (1/16 of the bf16 cache's 128
    # MiB), or logits.
    block = 512 * 8 * (2 * 128 + 2 * queries) * 4
    assert memory.temp_size_in_bytes <= 1.5 * block
    assert queries > 4 or memory.temp_size_in_bytes <= codes / 4


# ------------------------------------------------------------------------------------------------- under a selector


def test_retrieval_over_codes_reads_what_it_chose() -> None:
    """FIER's selection does not depend on the store, and the output is attention over the
    decoded selected tokens.
    """
    spec = dataclasses.replace(SPEC, capacity=400)
    policy = Retrieval(
        selector=Fier(group=8),
        budget=48,
        sink=4,
        local=12,
        demote=Fifo(leave=32),
        dense_below=0,
        store=kvjax.Dense(),
    )
    coded = dataclasses.replace(policy, store=Quantized(bits=2, key_group=32, value_group=16))
    tokens, lengths = drive.random_tokens(spec), np.array([333, 150])
    (exact, _), (few, _) = (
        drive.fill(kvjax.init_layer(p, spec), tokens, lengths) for p in (policy, coded)
    )
    _, _, info = drive.step(exact, tokens, lengths)
    out, _, info_few = drive.step(few, tokens, lengths)
    np.testing.assert_array_equal(info_few.selection.slots, info.selection.slots)
    slots, valid = np.asarray(info.selection.slots), np.asarray(info.selection.valid)
    for b, h in np.ndindex(2, 2):
        n, stored = lengths[b], int(few.state.store.count[b])
        chosen = slots[b, h, 0][valid[b, h, 0]]
        past = chosen >= few.state.store.slots
        at = 4 + np.where(past, stored + chosen - few.state.store.slots, chosen)
        at = np.unique(np.concatenate([np.arange(4), at, np.arange(n - 11, n + 1)]))
        assert len(at) == 48
        keys, values = (a[b, : n + 1, h].astype(np.float64) for a in (tokens.k, tokens.v))
        here = slice(4, 4 + stored)
        keys[here], values[here] = oracle(
            coded.store, tokens.k[b, here, h], tokens.v[b, here, h]
        )
        want, _ = attention(tokens.q[b, n, 4 * h : 4 * h + 4], keys[at], values[at], 0.25)
        np.testing.assert_allclose(out[b, 4 * h : 4 * h + 4], want, atol=2e-5)


@pytest.mark.parametrize(
    ("head_dim", "bits"), [(8, "2, 3, 4, 8"), (12, "2, 4, 8"), (6, "4, 8"), (7, "8")]
)
def test_codes_make_whole_bytes_and_an_error_names_the_bits_that_do(
    head_dim: int, bits: str
) -> None:
    spec = dataclasses.replace(SPEC, head_dim=head_dim)
    for asked in (2, 3, 4, 8):
        store = Quantized(bits=asked, key_group=16)
        if str(asked) in bits.split(", "):
            store.check(spec, 16)
        else:
            with pytest.raises(
                ValueError,
                match=rf"head_dim={head_dim} is not a multiple of that; use {bits} bits$",
            ):
                store.check(spec, 16)
