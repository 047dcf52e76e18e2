"""The Pallas kernels: what they refuse, and when they are chosen."""

import dataclasses
import json
import logging
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.attend import attend_quantized, attend_slots, attend_span, attend_zones
from kvjax.kernels_pallas.host import host_append, host_rows
from kvjax.kernels_pallas.score import rerank, score_1bit, score_pages
from kvjax.kernels_pallas.select import select_1bit, select_4bit, tiling, top_k, top_k_grouped
from kvjax.kernels_pallas.select.keys import ordered_keys
from kvjax.kernels_pallas.vote import collide, most_voted
from kvjax.kernels_pallas.write import put_token

from kvjax import CacheSpec, Fifo, Retrieval, ops
from kvjax.blocks import Block
from kvjax.partial import Span
from kvjax.quant import OneBit, quantize, quantize_1bit
from kvjax.rotate import encode
from kvjax.selection import Candidates, PackedSelection, Selection
from kvjax.selectors import Fier
from tests.kernels.conftest import HAS_KERNELS, KERNELS, ON_GPU

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def index(B, K, S, D, group, dtype):
    return quantize_1bit(jax.random.normal(jax.random.key(0), (B, K, S, D)), group, dtype)


def shapes_1bit(B=1, K=2, G=4, S=64, D=64, group=32, dtype=jnp.bfloat16):
    groups = jax.ShapeDtypeStruct((B, K, S // group, D), dtype)
    bits = jax.ShapeDtypeStruct((B, K, S, D // 8), jnp.uint8)
    return jax.ShapeDtypeStruct((B, K, G, D), jnp.float32), bits, groups


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(D=96), "head sizes 64 and 128"),
        (dict(G=9), "1 to 8 query heads"),
        (dict(group=16), "groups of a multiple of 32"),
        (dict(dtype=jnp.float32), "scales in bf16 or f16"),
        (dict(B=0), "at least one row"),
    ],
)
def test_score_1bit_refuses_what_it_has_no_kernel_for(changed, words):
    assert score_1bit.supported(*shapes_1bit())
    q, bits, step = shapes_1bit(**changed)
    assert words in score_1bit.unsupported(q, bits, step)
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(partial(score_1bit.score_1bit, scale=1.0), q, bits, step, step)


@pytest.mark.parametrize(
    ("shape", "dtype", "k", "words"),
    [
        ((8, 64), jnp.float32, 0, "k from 1 to 4096"),
        ((8, 8192), jnp.float32, 4097, "k from 1 to 4096"),
        ((8, 64), jnp.float32, 65, "rows of k to"),
        ((1, 1 << 22), jnp.float32, 5, "rows of k to"),
        ((0, 64), jnp.float32, 5, "at least one row"),
        ((8, 64), jnp.int32, 5, "f32, bf16 or f16"),
    ],
)
def test_top_k_refuses_what_it_has_no_kernel_for(shape, dtype, k, words):
    assert top_k.supported((8, 64), jnp.float32, 64)
    assert words in top_k.unsupported(shape, dtype, k)
    scores = jax.ShapeDtypeStruct(shape, dtype)
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(lambda s: top_k.top_k(s, jnp.ones(shape, bool), k), scores)
    with pytest.raises(NotImplementedError, match=words if HAS_KERNELS else r"jax >= 0\.11"):
        jax.eval_shape(lambda s: ops.top_k(s, jnp.ones(shape, bool), k, implementation="mosaic"), scores)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(D=96), "head sizes 64, 128 and 256"),
        (dict(G=9), "1 to 8 query heads"),
        (dict(dtype=jnp.float32), "in bf16 or f16"),
        (dict(values=jnp.float16), "values like keys"),
        (dict(M=4097), "1 to 4096 slots"),
        (dict(S=1 << 25), "less than 4 GiB"),
        (dict(B=0), "at least one row"),
        (dict(config=attend_slots.Config(warpgroups=4)), "bytes of shared memory"),
    ],
)
def test_attend_slots_refuses_what_it_has_no_kernel_for(changed, words):
    def shapes(B=1, K=2, G=4, S=64, D=128, M=32, dtype=jnp.bfloat16, values=None, config=None):
        q = jax.ShapeDtypeStruct((B, K, G, D), jnp.float32)
        k, v = (jax.ShapeDtypeStruct((B, K, S, D), kind) for kind in (dtype, values or dtype))
        slots = jax.ShapeDtypeStruct((B, K, 1, M), jnp.int32)
        return (q, k, v, slots), config

    assert attend_slots.supported(*shapes()[0])
    args, config = shapes(**changed)
    assert words in attend_slots.unsupported(*args, config)
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(lambda *a: attend_slots.attend_slots(*a, a[-1] > 0, scale=1.0, config=config), *args)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(D=96), "the kernel attend_zones takes head sizes 64, 128 and 256"),
        (dict(M=3900), "1 to 4096 slots a row; got 4106"),
        (dict(S=(1 << 24) - 100), "less than 4 GiB of keys; got 16777320 slots"),
        (dict(recent=jnp.float16), "zones of one dtype; got bfloat16, float16, float16, bfloat16, bfloat16"),
        (dict(queries=jnp.int32), "queries in f32, bf16 or f16; got int32"),
        (dict(config=attend_slots.Config(warpgroups=4)), "bytes of shared memory"),
    ],
)
def test_attend_zones_refuses_what_it_has_no_kernel_for(changed, words):
    def shapes(S=64, D=128, M=32, recent=jnp.bfloat16, queries=jnp.float32, config=None):
        def kept(n, kind):
            return 2 * [jax.ShapeDtypeStruct((1, 2, n, D), kind)]

        ends = 2 * [jax.ShapeDtypeStruct((1,), jnp.int32)]
        q, slots = jax.ShapeDtypeStruct((1, 2, 4, D), queries), jax.ShapeDtypeStruct((1, 2, 1, M), jnp.int32)
        spans = (*kept(198, recent), *ends), (*kept(6, jnp.bfloat16), *ends)
        return (q, *kept(S, jnp.bfloat16), slots, *spans), config

    assert attend_zones.supported(*shapes()[0], 200)
    args, config = shapes(**changed)
    assert words in attend_zones.unsupported(*args, 200, config=config)
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(
            lambda q, k, v, slots, *spans: attend_zones.attend_zones(
                q, k, v, slots, slots > 0, *spans, 200, scale=1.0, config=config
            ),
            *args,
        )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(D=96), "head sizes 64 and 128"),
        (dict(G=9), "1 to 8 query heads"),
        (dict(dtype=jnp.float32), "corners in bf16 or in f16"),
        (dict(P=0), "at least one row and page"),
    ],
)
def test_score_pages_refuses_what_it_has_no_kernel_for(changed, words):
    def shapes(G=4, P=10, D=64, dtype=jnp.bfloat16):
        corner = jax.ShapeDtypeStruct((1, 2, P, D), dtype)
        return jax.ShapeDtypeStruct((1, 2, G, D), jnp.float32), corner, corner

    assert score_pages.supported(*shapes())
    assert words in score_pages.unsupported(*shapes(**changed))
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(partial(score_pages.score_pages, scale=1.0), *shapes(**changed))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(D=96), "head sizes 64 and 128"),
        (dict(G=9), "1 to 8 query heads"),
        (dict(S=66), "a multiple of 4 keys"),
        (dict(S=1 << 24), "less than 2\\^24"),
        (dict(T=16), "1 to 15 limits for D=128"),
        (dict(dtype=jnp.int16), "counts and limits in i32"),
        (dict(K=0), "at least one row"),
    ],
)
def test_collide_refuses_what_it_has_no_kernel_for(changed, words):
    def shapes(K=2, G=4, S=64, D=128, T=6, dtype=jnp.int32):
        q, ids = jax.ShapeDtypeStruct((1, K, G, D), jnp.float32), jax.ShapeDtypeStruct((1, K, S, D // 8), jnp.uint8)
        return q, ids, jax.ShapeDtypeStruct((1, K, D // 8, 256), dtype), jax.ShapeDtypeStruct((1, T), jnp.int32)

    assert collide.supported(*shapes())
    assert re.search(words, collide.unsupported(*shapes(**changed)))
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(collide.collide, *shapes(**changed))
    with pytest.raises(NotImplementedError, match="bytes of shared memory"):
        jax.eval_shape(partial(collide.collide, config=collide.Config(stages=9)), *shapes())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(dtype=jnp.int32), "votes in u8, lengths and counts in i32"),
        (dict(S=72), "a multiple of 16 keys"),
        (dict(S=1 << 24), "less than 2\\^24"),
        (dict(room=0), "at least one row and place"),
    ],
)
def test_most_voted_refuses_what_it_has_no_kernel_for(changed, words):
    def shapes(S=64, dtype=jnp.uint8, room=5):
        return jax.ShapeDtypeStruct((1, 2, 4, S), dtype), *2 * [jax.ShapeDtypeStruct((1,), jnp.int32)], room

    assert most_voted.supported(*shapes())
    *args, room = shapes(**changed)
    assert re.search(words, most_voted.unsupported(*args, room))
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(partial(most_voted.most_voted, room=room), *args)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(D=96), "head sizes 64 and 128"),
        (dict(H=1), "slots for each of q"),
        (dict(weights=jnp.bfloat16), "weights in u16"),
        (dict(S=1 << 26), "1 to 2\\^26 - 1 keys"),
        (dict(M=0), "at least one pick"),
    ],
)
def test_rerank_refuses_what_it_has_no_kernel_for(changed, words):
    def shapes(G=4, H=None, S=64, D=128, M=9, weights=jnp.uint16):
        kinds = ((D // 8, jnp.uint8), (3 * D // 8, jnp.uint8), (D // 8, weights))
        codes = (jax.ShapeDtypeStruct((1, 2, S, n), kind) for n, kind in kinds)
        slots = jax.ShapeDtypeStruct((1, 2, H or G, M), jnp.int32)
        return jax.ShapeDtypeStruct((1, 2, G, D), jnp.float32), *codes, slots

    assert rerank.supported(*shapes())
    assert re.search(words, rerank.unsupported(*shapes(**changed)))
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(partial(rerank.rerank, centres=range(8), scale=1.0), *shapes(**changed))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(D=96), "the kernel select_4bit takes head sizes 64 and 128"),
        (dict(dtype=jnp.float32), "pending keys in bf16 or f16"),
        (dict(wide=17), "1 to 16 keys that may wait"),
        (dict(room=30), "the kernel select_4bit takes rows of k to"),
    ],
)
def test_select_4bit_refuses_what_it_has_no_kernel_for(changed, words):
    def shapes(D=128, dtype=jnp.bfloat16, wide=16, room=20):
        q, late = jax.ShapeDtypeStruct((1, 2, 4, D), jnp.float32), jax.ShapeDtypeStruct((1, 2, 16, D), dtype)
        keys = jax.eval_shape(encode, jax.ShapeDtypeStruct((1, 2, 64, D), jnp.float32))
        slots = jax.ShapeDtypeStruct((1, 2, 4, 9), jnp.int32)
        return q, *keys, slots, late, room, wide

    assert select_4bit.supported(*shapes())
    q, *keys, slots, late, room, wide = shapes(**changed)
    assert words in select_4bit.unsupported(q, *keys, slots, late, room, wide)
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(
            lambda q, keys, slots, late: select_4bit.select_4bit(
                q, *keys, (slots, None), (late, 0, 9), 5, room, centres=(0.1,), scale=1.0, turned=0, wide=wide
            ),
            *(q, keys, slots, late),
        )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(D=96), "head sizes 64, 128 and 256"),
        (dict(G=9), "1 to 8 queries"),
        (dict(queries=jnp.int8), "queries in f32, bf16 or f16"),
        (dict(dtype=jnp.float32), "keys and values in bf16 or f16"),
        (dict(values=jnp.float16), r"values like keys, bfloat16"),
        (dict(D=256, S=1 << 23), "less than 4 GiB of keys"),
        (dict(K=0), "at least one row and slot"),
        (dict(config=attend_span.Config(1, warpgroups=4, stages=8)), "bytes of shared memory"),
    ],
)
def test_attend_span_refuses_what_it_has_no_kernel_for(changed, words):
    def shapes(B=1, K=2, G=4, S=64, D=128, queries=jnp.bfloat16, dtype=jnp.bfloat16, values=None, config=None):
        q, ends = jax.ShapeDtypeStruct((B, K, G, D), queries), 2 * [jax.ShapeDtypeStruct((B,), jnp.int32)]
        return (q, *(jax.ShapeDtypeStruct((B, K, S, D), kind) for kind in (dtype, values or dtype)), *ends), config

    assert attend_span.supported(*shapes()[0])
    args, config = shapes(**changed)
    assert words in attend_span.unsupported(*args, config)
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(partial(attend_span.attend_span, scale=1.0, config=config), *args)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(D=256), "head sizes 64 and 128"),
        (dict(Q=9), "1 to 8 queries"),
        (dict(bits=8), "codes of 2 and 4 bits; got 8"),
        (dict(tokens=128), "keys in groups of up to 64 tokens by 1 channel"),
        (dict(tokens=1, channels=16), "of 1 token by a multiple of 32 channels; got 1 by 16"),
        (dict(value_channels=8), "values in groups of 1 token by a multiple of 16 channels; got 1 by 8"),
        (dict(ends=(2, 4)), "one start and stop a row"),
        (dict(B=0), "at least one row"),
    ],
)
def test_attend_quantized_refuses_what_it_has_no_kernel_for(changed, words):
    def shapes(B=2, Q=4, S=256, D=128, bits=2, tokens=32, channels=1, value_channels=32, ends=(2,)):
        codes = jax.ShapeDtypeStruct((B, 2, S, D * bits // 8), jnp.uint8)
        keys = jax.ShapeDtypeStruct((B, 2, S // tokens, D // channels), jnp.uint32)
        values = jax.ShapeDtypeStruct((B, 2, S, D // value_channels), jnp.uint32)
        q = jax.ShapeDtypeStruct((B, 2, Q, D), jnp.float32)
        return q, (codes, keys), (codes, values), *2 * [jax.ShapeDtypeStruct(ends, jnp.int32)]

    assert attend_quantized.supported(*shapes())
    assert words in attend_quantized.unsupported(*shapes(**changed))
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(partial(attend_quantized.attend_quantized, scale=1.0), *shapes(**changed))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(D=2), "rows of a multiple of 16 bytes"),
        (dict(D=0), "at least one row, and one byte of each"),
        (dict(B=0), "at least one row"),
        (dict(P=0), "at least one row"),
        (dict(N=1 << 26, D=2048), "less than 32 GiB at a time"),
    ],
)
def test_host_rows_and_host_append_refuse_what_they_have_no_kernel_for(changed, words):
    def shapes(B=1, P=10, N=4, D=64):
        x, index = (jax.ShapeDtypeStruct(s, d) for s, d in (((B, 2, P, 2, D), jnp.bfloat16), ((B, 2, N), jnp.int32)))
        return (x, index), (x, 2 * [jax.ShapeDtypeStruct((B, 2, N, D), x.dtype)], *2 * [index])

    for kernel, good, args in zip((host_rows, host_append), shapes(), shapes(**changed), strict=True):
        assert kernel.supported(*good)
        assert words in kernel.unsupported(*args)
        with pytest.raises(NotImplementedError, match=words):
            jax.eval_shape(getattr(kernel, kernel.__name__.rpartition(".")[2]), *args)
    (x, index), held = shapes()[0], jax.ShapeDtypeStruct((1, 2, 4, 64), jnp.bfloat16)
    zones = 2 * [held], 2 * [jax.ShapeDtypeStruct((1, 2, 9, 64), jnp.float32)]
    assert host_rows.unsupported_recall(x, index, zones[0]) is None
    numbers = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((1, 2), bool)
    with pytest.raises(NotImplementedError, match="in the dtype of the store, bfloat16; got bfloat16, bfloat16, float"):
        jax.eval_shape(host_rows.recall, x, index, *numbers, (index, zones[0]), zones[1])
    x, new, *counts = shapes()[1]
    half = [jax.ShapeDtypeStruct(a.shape, jnp.float16) for a in new]
    assert "parts of the array's bfloat16; got float16, float16" in host_append.unsupported(x, half, *counts)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(D=12), "heads of a multiple of 16 bytes; got 24"),
        (dict(other=jnp.float16), "zones of one dtype; got bfloat16, bfloat16, float16, float16"),
        (dict(slots=0), "at least one row and slot"),
    ],
)
def test_put_token_refuses_what_it_has_no_kernel_for(changed, words):
    def shapes(D=64, slots=5, other=jnp.bfloat16):
        flags, counts = (jax.ShapeDtypeStruct((2,), kind) for kind in (bool, jnp.int32))
        zones = [
            (*2 * [jax.ShapeDtypeStruct((2, 3, n, D), kind)], counts) for n, kind in ((slots, jnp.bfloat16), (9, other))
        ]
        return zones, *2 * [jax.ShapeDtypeStruct((2, 3, 1, D), jnp.bfloat16)], flags, flags

    assert put_token.supported(*shapes())
    assert words in put_token.unsupported(*shapes(**changed))
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(put_token.put_token, *shapes(**changed))


@pytest.mark.parametrize(
    ("sizes", "dtype", "k", "words"),
    [
        ((64,), jnp.bfloat16, 5, "scores in f32"),
        ((64, 8), jnp.float32, 73, "the kernel top_k_grouped takes rows of k to"),
    ],
)
def test_top_k_grouped_refuses_what_it_has_no_kernel_for(sizes, dtype, k, words):
    parts = [(jax.ShapeDtypeStruct((1, 2, 4, n), dtype), jax.ShapeDtypeStruct((1, 1, 1, n), bool)) for n in sizes]
    assert words in top_k_grouped.unsupported(parts, "mean_score", k)
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(lambda parts: top_k_grouped.top_k_grouped(parts, "mean_score", k), parts)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(D=96), "the kernel select_1bit takes head sizes 64 and 128"),
        (dict(group=16), "the kernel select_1bit takes groups of a multiple of 32"),
        (dict(room=200), "the kernel select_1bit takes rows of k to"),
        (dict(room=0), "k from 1 to 4096"),
        (dict(pending=jnp.bfloat16), "scores of pending tokens in f32"),
    ],
)
def test_select_1bit_refuses_what_it_has_no_kernel_for(changed, words):
    def shapes(room=9, pending=jnp.float32, **sizes):
        q, bits, step = shapes_1bit(**sizes)
        scores = jax.ShapeDtypeStruct((1, 2, 4, 7), pending)
        return q, OneBit(bits, step, step), scores, room

    q, keys, scores, room = shapes()
    assert select_1bit.supported(q, keys.bits, keys.scale, scores, "mean_softmax", room)
    q, keys, scores, room = shapes(**changed)
    assert words in select_1bit.unsupported(q, keys.bits, keys.scale, scores, "mean_softmax", room)
    ends = 2 * [jax.ShapeDtypeStruct((1,), jnp.int32)]
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(
            lambda q, keys, scores, start, stop: select_1bit.select_1bit(
                q, *keys, (start, stop), (scores, start, stop), stop, "mean_softmax", room, scale=1.0
            ),
            *(q, keys, scores, *ends),
        )


def test_configs_refuse_what_a_cluster_or_a_product_cannot_be():
    with pytest.raises(ValueError, match="blocks must be"):
        top_k.Config(blocks=3)
    with pytest.raises(ValueError, match="units must be"):
        score_1bit.Config(units=17)
    with pytest.raises(ValueError, match="stages must be 2, 4 or 8"):
        score_1bit.Config(stages=1)
    with pytest.raises(ValueError, match="units must be"):
        select_1bit.Config(units=0)
    with pytest.raises(ValueError, match="stages must be 2, 4 or 8"):
        select_1bit.Config(stages=3)
    with pytest.raises(ValueError, match="blocks must be"):
        select_1bit.Config(blocks=3)
    with pytest.raises(ValueError, match="blocks must be"):
        attend_slots.Config(blocks=16)
    with pytest.raises(ValueError, match="warpgroups must be"):
        attend_slots.Config(warpgroups=3)
    with pytest.raises(ValueError, match="warpgroups 1, 2 or 4"):
        score_pages.Config(warpgroups=8)
    with pytest.raises(ValueError, match="keys must be 1, 2 or 4"):
        collide.Config(keys=8)
    with pytest.raises(ValueError, match="warpgroups must be 2, 4 or 8"):
        most_voted.Config(warpgroups=1)
    with pytest.raises(ValueError, match="warpgroups must be 1, 2, 4 or 8; got 3"):
        rerank.Config(3)
    with pytest.raises(ValueError, match="warpgroups must be 1, 2, 4 or 8; got 16"):
        select_4bit.Config(warpgroups=16)
    with pytest.raises(ValueError, match="blocks must be"):
        select_4bit.Config(blocks=3)
    with pytest.raises(ValueError, match="parts must be at least 1"):
        collide.Config(parts=0)
    with pytest.raises(ValueError, match="stages must be at least 1"):
        collide.Config(stages=0)
    with pytest.raises(ValueError, match="apart must be 0 or 1"):
        collide.Config(apart=2)
    with pytest.raises(ValueError, match="blocks must be at least 1"):
        attend_quantized.Config(blocks=0)
    with pytest.raises(ValueError, match="keys 16, 32 or 64"):
        attend_span.Config(blocks=1, keys=8)
    with pytest.raises(ValueError, match="ahead must be at least 1"):
        host_rows.Config(ahead=0)


@pytest.mark.parametrize("k", [1, 100, 2048, 4096])
def test_top_k_fits_in_shared_memory(k):
    assert top_k.smem_bytes(k) < top_k_grouped.smem_bytes(k) <= 227 * 1024


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_select_1bit_fits_in_shared_memory_and_runs_at_once(stages):
    assert select_1bit.smem_bytes(128, select_1bit.Config(stages=stages)) <= 227 * 1024 // 4
    for rows, slots in ((8, 130816), (8, 32512), (64, 8192), (8, 300)):
        config = select_1bit.config_for(rows, 1, slots, slots + 256)
        assert (config.units, config.stages) == dataclasses.astuple(score_1bit.config_for(rows, slots))
        warps = rows * -(-slots // (score_1bit.UNIT * config.units))
        assert warps <= score_1bit.RUN_AT_ONCE
        assert tiling.in_one_step(slots + 256, config)
    assert score_1bit.config_for(64, 32512).units == 16  # two turns, the last of them full


@pytest.mark.parametrize("D", [64, 128, 256])
def test_attend_slots_fits_in_shared_memory_and_on_the_multiprocessors(D):
    for rows in (1, 8, 64, 300):
        for slots in (1, 100, 2048, 4096):
            config = attend_slots.config_for(rows, slots, D)
            assert attend_slots.smem_bytes(D, config) <= 227 * 1024
            assert config.blocks == 1 or rows * config.blocks <= 128


@pytest.mark.parametrize("D", [64, 128, 256])
def test_attend_span_takes_the_multiprocessors_in_whole_waves(D):
    for rows in (1, 4, 8, 16, 64, 128, 300):  # a row alone has at most a block a multiprocessor
        config = attend_span.config_for(rows, 131072, D)
        waves = rows * config.blocks / attend_span.at_once(D, config)
        assert waves > 0.9 * np.ceil(waves) or rows == 1


@pytest.mark.parametrize("pending", [0, 256])
@pytest.mark.parametrize("heads", [1, 3, 8, 64, 300])
def test_rerank_has_a_thread_for_each_pick_and_a_multiprocessor_for_each_block_where_these_are_enough(heads, pending):
    for M in (1, 31, 130, 3277, 6554, 13108, 52429):
        config = rerank.config_for(heads, M, pending)
        beside = heads * -(-pending // (128 * config.warpgroups))
        share = rerank.split(heads, M, config, beside)
        assert share.blocks * share.picks >= M > (share.blocks - 1) * share.picks
        assert share.picks <= share.threads == 128 * config.warpgroups
        assert share.picks % 32 == 0
        fits = heads * -(-M // 1024) + heads * -(-pending // 1024) <= 132
        assert (heads * share.blocks + beside <= 132) == fits


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_chosen_once_its_benchmark_was_run(name):
    file = RESULTS / f"{name}.json"
    date = json.loads(file.read_text())["date"] if file.exists() else None
    assert date == KERNELS[name].MEASURED, f"{name}.MEASURED must be the date of {file.name}, {date}"


def test_a_kernel_that_was_not_measured_is_only_run_by_name(monkeypatch):
    monkeypatch.setattr(top_k, "MEASURED", None)
    scores, valid = jnp.zeros((1, 50)), jnp.ones((1, 50), bool)
    if HAS_KERNELS:
        assert str(ops.explain("top_k", scores, valid, 5)) == (
            "xla: the kernel top_k is not yet measured on a GPU: ask for it by name"
        )

        def lowered(implementation):
            run = jax.jit(partial(ops.top_k, k=5, implementation=implementation))
            return run.trace(scores, valid).lower(lowering_platforms=("cuda",)).as_text()

        assert "kvjax_top_k" not in lowered(None)
        assert "kvjax_top_k" in lowered("mosaic")


def test_a_gpu_without_kernels_is_told_of_once(monkeypatch, caplog):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(simt, "why_not", lambda: "this GPU is too old")
    with caplog.at_level(logging.WARNING, "kvjax"):
        for k in (3, 4):
            ops.top_k(jnp.zeros((1, 9)), jnp.ones((1, 9), bool), k)
    assert [r.getMessage() for r in caplog.records] == ["running the reference in plain JAX: this GPU is too old"]


def test_an_unknown_implementation_or_operation_is_refused():
    with pytest.raises(ValueError, match="implementation must be None or one of 'xla', 'mosaic'"):
        ops.top_k(jnp.zeros((1, 4)), jnp.ones((1, 4), bool), 2, implementation="cuda")
    with pytest.raises(ValueError, match="op must be one of"):
        ops.explain("attend")


@pytest.mark.skipif(ON_GPU, reason="says what is chosen where no kernel can run")
def test_the_reference_runs_where_there_is_no_kernel():
    scores, valid = jax.random.normal(jax.random.key(0), (2, 50)), jnp.ones((2, 50), bool)
    why = "jax >= 0.11" if not HAS_KERNELS else "for GPUs"
    boxes, picks = jnp.zeros((1, 1, 4, 64)), jnp.zeros((1, 1, 4, 5), jnp.int32)
    half, one_bit, codes = boxes.astype(jnp.bfloat16), index(1, 1, 64, 64, 32, jnp.bfloat16), encode(boxes)
    by_channel, by_token = quantize(boxes, 2, tokens=4), quantize(boxes, 2, channels=32)
    pages = jnp.zeros((1, 1, 16, 64), jnp.bfloat16)
    count, some = picks[:, 0, 0, 0], Selection(picks[:, :, :1], picks[:, :, :1] == 0)
    span, found = Span(half, half, count, count), PackedSelection(picks, picks[..., 0])
    few = Candidates(span=(0, count), pending=(half, 0, count), limit=3, room=5, pending_slots=4)
    scale = {"scale": 0.1}
    asked = (
        ("attend_quantized", (boxes, by_channel, by_token, count, count), scale),
        ("attend_slots", (boxes, half, half, some), scale),
        ("attend_span", (boxes, span), scale),
        ("attend_zones", (half, half, half, some, span, None, 3), scale),
        (
            "collide",
            (boxes, codes.signs, *(jnp.zeros(shape, jnp.int32) for shape in ((1, 1, 8, 256), (1, 6)))),
            {"seed": 0},
        ),
        ("host_append", (boxes[..., None, :], [boxes], count, count), {}),
        ("host_rows", (boxes, picks[:, :, 0]), {}),
        ("most_voted", (boxes.astype(jnp.uint8), count, count, 5), {}),
        ("select_1bit", (boxes, one_bit, few, "mean_score"), scale),
        ("select_4bit", (boxes, codes, found, few), {**scale, "seed": 0}),
        (
            "select_pages",
            (boxes, half, half, replace(few, pending=(pages, 0, count), pending_slots=16), "mean_score"),
            {**scale, "unit": 16},
        ),
        ("put_token", ([Block(boxes, boxes, count)], *2 * [boxes[:, :, :1]], *2 * [count == 0]), {}),
        ("rerank", (boxes, codes, found), scale),
        ("score_1bit", (boxes, one_bit), scale),
        ("score_pages", (boxes, half, half), scale),
        ("top_k", (scores, valid, 5), {}),
        ("top_k_grouped", ([(boxes, boxes[:, :, :1] == 0)], "mean_score", 5), {}),
    )
    assert {op for op, *_ in asked} == set(KERNELS)
    for op, args, options in asked:
        unmeasured = HAS_KERNELS and KERNELS[op].MEASURED is None
        assert ("not yet measured" if unmeasured else why) in str(ops.explain(op, *args, **options)), op
    chosen, named = (jax.jit(partial(ops.top_k, k=5, implementation=i))(scores, valid) for i in (None, "xla"))
    np.testing.assert_array_equal(chosen.slots, named.slots)
    assert "kvjax_top_k" not in jax.jit(partial(ops.top_k, k=5)).lower(scores, valid).as_text()
    with pytest.raises(NotImplementedError, match=r"platform cpu" if HAS_KERNELS else r"jax >= 0\.11"):
        jax.jit(partial(ops.top_k, k=5, implementation="mosaic"))(scores, valid)


@pytest.mark.skipif(not HAS_KERNELS, reason="there are kernels from jax 0.11 on")
def test_a_program_lowered_for_a_gpu_has_the_kernels():
    if not ON_GPU and jax.default_backend() == "gpu":
        pytest.skip(simt.why_not())
    ix = index(1, 2, 64, 64, 32, jnp.bfloat16)

    def step(q, ix):
        scores = jnp.max(ops.score_1bit(q, ix, scale=0.1), axis=2)
        return ops.top_k(scores, jnp.ones(scores.shape, bool), 16)

    q = jnp.zeros((1, 2, 4, 64))
    text = jax.jit(step).trace(q, ix).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") + text.count("custom_call @mosaic_gpu_v2") >= 2
    assert "chlo.top_k" not in text


def test_keys_have_the_order_of_the_scores():
    scores = jnp.array([-jnp.inf, jnp.nan, -3e38, -1.0, -1e-30, -0.0, 0.0, 1e-30, 1.0, 3e38, jnp.inf])
    keys = np.asarray(ordered_keys(scores, jnp.ones(scores.shape, bool))).astype(np.int64)
    assert keys[0] == keys[1] > 0
    assert (np.diff(keys[1:]) > 0).all()
    assert not np.asarray(ordered_keys(scores, jnp.zeros(scores.shape, bool))).any()


def test_the_derivative_of_scores_is_the_references():
    ix, q = index(1, 1, 64, 64, 32, jnp.bfloat16), jax.random.normal(jax.random.key(1), (1, 1, 2, 64))
    chosen, named = (
        jax.jit(jax.grad(lambda q, i=i: jnp.sum(ops.score_1bit(q, ix, scale=0.1, implementation=i))))(q)
        for i in (None, "xla")
    )
    np.testing.assert_allclose(chosen, named, rtol=1e-5)


@pytest.mark.parametrize("group_reduce", ["mean_softmax", "mean_query", "per_head"])
def test_a_step_chooses_of_all_pools_and_lengths_what_select_ranks_highest(group_reduce):
    spec = CacheSpec(batch=4, q_heads=4, kv_heads=2, head_dim=16, capacity=128, dtype=jnp.float32)
    policy = Retrieval(
        selector=Fier(group=8, group_reduce=group_reduce),
        budget=20,
        sink=2,
        local=4,
        demote=Fifo(leave=16),
        dense_below=30,
    )
    k, q = (jax.random.normal(jax.random.key(i), (4, 2, n, 16)) for i, n in enumerate((100, 2)))
    lengths = jnp.array([100, 29, 31, 0])

    @jax.jit
    def choose(k, q):
        st = policy.prefill(policy.init(spec), k, k, lengths)
        found = []
        for window in (None, 40):
            info = policy.attend(st, q, scale=0.25, window=window)[2]
            found.append((info.selection, policy.select(st, q, scale=0.25, window=window)))
        return found

    for chosen, ranked in choose(k, q):
        for ours, theirs in zip(*(_sets(s) for s in (chosen, ranked)), strict=True):
            assert ours == theirs
    assert [len(s) for s in _sets(ranked)][:: len(_sets(ranked)) // 4] == [14, 23, 14, 0]


def _sets(selection):
    slots, valid = (np.asarray(a).reshape(-1, a.shape[-1]) for a in selection)
    return [set(s[ok].tolist()) for s, ok in zip(slots, valid, strict=True)]
