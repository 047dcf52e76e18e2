"""Every kernel compiles for each GPU, without spills, and what surrounds it copies no cache.

Runs where a program can be compiled for a GPU without one (tests/kernels/aot.py); elsewhere it
says what is missing. For a GPU other than an H200, `python -m tests.kernels.test_aot 8.9
[PROGRAM ...]` compiles in a process of its own, as XLA keeps the architecture of a process's
first kernel.
"""

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax import memory, models, ops, presets
from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.attend import (
    attend_coded_zones,
    attend_key_blocks,
    attend_quantized,
    attend_slots,
    attend_span,
    attend_zones,
)
from kvjax.kernels_pallas.delta import delta_rule, delta_step
from kvjax.kernels_pallas.host import host_append, host_rows, hot_float8, hot_pages
from kvjax.kernels_pallas.score import rerank, score_1bit, score_pages
from kvjax.kernels_pallas.select import (
    select_1bit,
    select_4bit,
    select_pages,
    top_k,
    top_k_grouped,
)
from kvjax.kernels_pallas.vote import collide, most_voted
from kvjax.kernels_pallas.write import put_token
from kvjax.numerics.rotate import lloyd_max
from kvjax.recurrence import advance
from tests.kernels import aot, cases

pytestmark = pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))


def sds(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def keys_1bit(K, S, D, group, dtype=jnp.bfloat16):
    return sds(1, K, S, D // 8, dtype=jnp.uint8), *2 * [sds(1, K, S // group, D, dtype=dtype)]


def slots(G, S, D, M, H=1, dtype=jnp.bfloat16):
    kept = sds(1, 8, S, D, dtype=dtype)
    return (
        sds(1, 8, G, D, dtype=dtype),
        kept,
        kept,
        sds(1, 8, H, M, dtype=jnp.int32),
        sds(1, 8, H, M, dtype=bool),
    )


def listed(G, T, S, D, M, config=None, dtype=jnp.bfloat16):
    kept, lists = 2 * [sds(1, 8, S, D, dtype=dtype)], (1, 8, G, T // 128)
    args = (
        *kept,
        sds(*lists, M, dtype=jnp.int32),
        sds(*lists, dtype=jnp.int32),
        sds(1, dtype=jnp.int32),
    )
    f = partial(attend_key_blocks.attend_key_blocks, scale=0.1, config=config)
    return f, (sds(1, 8, G, T, D, dtype=dtype), *args)


def zones(G, S, R, A, D, M, H=1, dtype=jnp.bfloat16):
    q, k, v, chosen, valid = slots(G, S, D, M, H, dtype)
    ends = 2 * [sds(1, dtype=jnp.int32)]
    recent, sink = ((*2 * [sds(1, 8, n, D, dtype=dtype)], *ends) for n in (R, A))
    return q, k, v, chosen, valid, recent, sink if A else None


def tokens(*slots, D=128, T=1):
    one, count = sds(1, dtype=bool), sds(1, dtype=jnp.int32)
    kept = [(*2 * [sds(1, 8, n, D)], count) for n in slots]
    return kept, *2 * [sds(1, 8, T, D)], one if T == 1 else count, one


def span(G, S, D, dtype=jnp.bfloat16, T=1):
    ends = sds(*(1, T)[: 1 + (T > 1)], dtype=jnp.int32)
    return sds(1, 8, T * G, D, dtype=dtype), *2 * [sds(1, 8, S, D, dtype=dtype)], ends, ends


def parts(G, *sizes):
    return [(sds(1, 8, G, n, dtype=jnp.float32), sds(1, 1, 1, n, dtype=bool)) for n in sizes]


def top(k):
    return partial(top_k.top_k, k=k)


def pooled(group_reduce, k):
    return partial(top_k_grouped.top_k_grouped, group_reduce=group_reduce, k=k)


def picking(S, D, W, group_reduce, k, G=4, group=32, dtype=jnp.bfloat16, config=None):
    one = sds(1, dtype=jnp.int32)
    q, keys = sds(1, 8, G, D, dtype=jnp.float32), keys_1bit(8, S, D, group, dtype)
    args = q, *keys, [one, one], [sds(1, 8, G, W, dtype=jnp.float32), one, one], one
    return partial(
        select_1bit.select_1bit, group_reduce=group_reduce, room=k, scale=0.1, config=config
    ), args


def picking_keys(S, D, R, pending_slots, k, T=1, G=4):
    f, (q, *keys, span, (_, start, stop), count) = picking(
        S, D, pending_slots, "mean_softmax", k, G=G * T
    )
    stop = stop if T == 1 else sds(1, T, dtype=jnp.int32)
    return partial(f, pending_slots=pending_slots, steps=T), (
        q,
        *keys,
        span,
        [sds(1, 8, R, D), start, stop],
        count,
    )


def pages(
    P, D, R, pending_slots, k, unit=16, G=4, group_reduce="mean_softmax", dtype=jnp.bfloat16
):
    one = sds(1, dtype=jnp.int32)
    q, corners = sds(1, 8, G, D, dtype=jnp.float32), 2 * [sds(1, 8, P, D, dtype=dtype)]
    args = q, *corners, [one, one], [sds(1, 8, R, D, dtype=dtype), one, one], one
    return partial(
        select_pages.select_pages,
        group_reduce=group_reduce,
        room=k,
        unit=unit,
        scale=0.1,
        pending_slots=pending_slots,
        local=16,
    ), args


def coded(S, D, bits, tokens, channels, value_channels, Q=4):
    codes = sds(1, 8, S, D * bits // 8, dtype=jnp.uint8)
    keys = sds(1, 8, S // tokens, D // channels, dtype=jnp.uint32)
    values = sds(1, 8, S, D // value_channels, dtype=jnp.uint32)
    return sds(1, 8, Q, D), (codes, keys), (codes, values), *2 * [sds(1, dtype=jnp.int32)]


def recent_zone(R, D=128, T=()):
    return (
        *2 * [sds(1, 8, R, D)],
        sds(1, *T and (1,), dtype=jnp.int32),
        sds(1, *T, dtype=jnp.int32),
    )


def ballot(G, S, D, T):
    ids, counts = sds(1, 8, S, D // 8, dtype=jnp.uint8), sds(1, 8, D // 8, 256, dtype=jnp.int32)
    return sds(1, 8, G, D, dtype=jnp.float32), ids, counts, sds(1, T, dtype=jnp.int32)


def picks(G, S, D, M):
    codes = sds(1, 8, S, D // 8, dtype=jnp.uint8), sds(1, 8, S, 3 * D // 8, dtype=jnp.uint8)
    weights, slots = sds(1, 8, S, D // 8, dtype=jnp.uint16), sds(1, 8, G, M, dtype=jnp.int32)
    return sds(1, 8, G, D, dtype=jnp.float32), *codes, weights, slots


def candidates(G, S, D, M, R, room, config=None):
    q, *codes, slots = picks(G, S, D, M)
    pending = sds(1, 8, R, D), *2 * [sds(1, dtype=jnp.int32)]
    f = partial(
        select_4bit.select_4bit,
        room=room,
        centres=tuple(range(8)),
        scale=0.1,
        pending_slots=R - 127,
        local=127,
    )
    found = sds(1, 8, G, dtype=jnp.int32)
    return partial(f, turned=9 << 60, config=config), (
        q,
        *codes,
        (slots, found),
        pending,
        pending[1],
    )


SCORE, PAGES, ATTEND, SPAN, CODED = (
    partial(f, scale=0.1)
    for f in (
        score_1bit.score_1bit,
        score_pages.score_pages,
        attend_slots.attend_slots,
        attend_span.attend_span,
        attend_quantized.attend_quantized,
    )
)


def over_zones(local):
    return lambda *args: attend_zones.attend_zones(*args, local, scale=0.1)


def over_codes(local, G, S, R, A, D, M, bits=(4, 4), dtype=jnp.bfloat16, B=1):
    *_, slots, _, recent, sink = jax.tree.map(
        lambda a: sds(B, *a.shape[1:], dtype=a.dtype), zones(G, S, R, A, D, M)
    )
    recent, sink = (
        span and tuple(sds(*a.shape, dtype=dtype) for a in span[:2]) + span[2:]
        for span in (recent, sink)
    )

    def code(b):
        widths = (D // 8, jnp.uint8), ((b - 1) * D // 8, jnp.uint8), (1, jnp.uint16)
        return tuple(sds(B, 8, S, n, dtype=dtype) for n, dtype in widths)

    sizes = tuple(
        () if b == 8 else tuple(map(float, lloyd_max(D, 2 ** (b - 1))[1])) for b in bits
    )
    f = partial(
        attend_coded_zones.attend_coded_zones,
        local=local,
        centres=sizes,
        turned=9 << 60,
        scale=0.1,
    )
    found = sds(B, 8, 1, dtype=jnp.int32)
    args = (
        sds(B, 8, G, D, dtype=dtype),
        *map(code, bits),
        sds(B, 8, D, dtype=jnp.float32),
        slots,
        found,
    )
    return f, (*args, recent, sink)


# Of no device: a process that has started none can be forked.
HOST = jax.sharding.NamedSharding(
    jax.sharding.AbstractMesh((1,), ("x",)),
    jax.sharding.PartitionSpec(),
    memory_kind="pinned_host",
)


def kept_by_host(pages, page, D=128, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((1, 8, pages, 2, page, D), dtype, sharding=HOST)


def recalled(rest):
    """A recall of 64 pages of 32 tokens, its first kernel or the rest."""
    held, flags = [*2 * [sds(1, 8, 2048, 128)]], sds(1, 8, dtype=bool)
    there, index = (sds(1, 8, n, dtype=jnp.int32) for n in (64, 63))
    args = (
        kept_by_host(1024, 32),
        index,
        sds(1, dtype=jnp.int32),
        flags,
        (there, held),
        2 * [sds(1, 8, 159, 128)],
    )
    if not rest:
        return host_rows.recall, args
    return partial(host_rows.recall, config=host_rows.BESIDE), (*args, (flags, held))


def places(n, N, P):
    tables = [sds(1, 8, size, dtype=jnp.int32) for size in (n, n, P)]
    index, numbers = sds(1, 8, N, dtype=jnp.int32), sds(1, 8, dtype=jnp.int32)
    return (*tables, numbers, numbers), index, numbers


def hot_zones(n, N, page=1, dtype=jnp.bfloat16):
    return 2 * [sds(1, 8, n * page, 128, dtype=dtype)], *(
        sds(1, 8, size, dtype=jnp.int32) for size in (n, n, N)
    )


MIB = 1 << 20
PROGRAMS = {  # name: kernel, arguments, MiB of temporary memory at most, bytes of spills at most
    "score_1bit": (
        SCORE,
        (sds(1, 8, 4, 128, dtype=jnp.float32), *keys_1bit(8, 131072, 128, 32)),
        0.1,
        0,
    ),
    "score_1bit, D 64": (
        SCORE,
        (sds(1, 8, 8, 64, dtype=jnp.float32), *keys_1bit(8, 32768, 64, 64, jnp.float16)),
        0.1,
        0,
    ),
    "score_1bit, D 256": (
        SCORE,
        (sds(1, 8, 6, 256, dtype=jnp.float32), *keys_1bit(8, 131072, 256, 32)),
        0.1,
        0,
    ),
    "score_1bit, D 256, 16 heads": (
        SCORE,
        (sds(1, 8, 16, 256, dtype=jnp.float32), *keys_1bit(8, 131072, 256, 32)),
        0.1,
        0,
    ),
    "top_k": (
        top(2048),
        (sds(8, 131072, dtype=jnp.float32), sds(8, 131072, dtype=bool)),
        4.2,
        0,
    ),
    "top_k, 1M": (
        top(2048),
        (sds(8, 1 << 20, dtype=jnp.float32), sds(8, 1 << 20, dtype=bool)),
        33,
        0,
    ),
    "top_k_grouped": (pooled("mean_softmax", 2048), (parts(4, 130816, 256),), 0.5, 0),
    "top_k_grouped, 16 heads": (
        pooled("mean_softmax", 2048),
        (parts(16, 130816, 256),),
        0.5,
        32,
    ),
    "rank_grouped": (
        lambda parts, total: top_k_grouped.top_k_grouped(
            parts, "mean_softmax", 2048, total=total, ranked=True
        ),
        (parts(4, 130816, 256), sds(1, 8, 4, 1, dtype=jnp.float32)),
        0.5,
        0,
    ),
    "top_k_grouped, 1M": (pooled("mean_softmax", 2048), (parts(4, 1 << 20, 256),), 35, 0),
    # The scores are 8 MiB.
    "select_1bit, with keys that wait": (*picking_keys(131072, 128, 256, 255, 2047), 8.2, 0),
    "select_1bit, D 256": (*picking_keys(131072, 256, 256, 255, 2047, G=6), 12.2, 0),
    "select_1bit, D 256, 16 heads": (
        *picking_keys(131072, 256, 256, 255, 2047, G=16),
        33,
        0,
    ),
    "select_1bit, 2 steps, D 256": (
        *picking_keys(131072, 256, 256, 255, 2047, T=2, G=8),
        98,
        0,
    ),
    "select_1bit, 8 steps": (*picking_keys(131072, 128, 256, 255, 2047, T=8), 98, 0),
    "select_1bit": (*picking(131072, 128, 256, "mean_softmax", 2047), 8.2, 0),
    "select_1bit, a loop": (*picking(1 << 20, 128, 256, "mean_softmax", 2047), 97, 0),
    "select_1bit, eight heads": (
        *picking(130816, 128, 256, "mean_softmax", 2048, G=8),
        16.2,
        0,
    ),
    "select_1bit, clusters of 16": (
        *picking(131072, 128, 256, "mean_softmax", 2047, config=select_1bit.Config(blocks=16)),
        8.2,
        0,
    ),
    "select_1bit, D 64": (
        *picking(32512, 64, 383, "mean_score", 1788, G=1, group=64, dtype=jnp.float16),
        0.6,
        0,
    ),
    "select_4bit": (*candidates(1, 131072, 128, 13108, 383, 1916), 0.3, 0),
    "select_4bit, a loop": (
        *candidates(1, 1 << 20, 128, 104858, 383, 1916, select_4bit.Config(2)),
        7,
        0,
    ),
    "select_4bit, D 64": (*candidates(4, 131072, 64, 13108, 383, 1916), 1, 0),
    "select_pages": (*pages(8176, 128, 287, 272, 127), 1.6, 0),
    "select_pages, one waits": (*pages(1016, 128, 159, 32, 56, unit=32), 0.3, 0),
    "select_pages, a loop": (*pages(1 << 18, 128, 287, 272, 127), 64, 0),
    "select_pages, D 256": (*pages(8176, 256, 287, 272, 127, G=8), 2.8, 0),
    "select_pages, D 256, 16 heads": (*pages(8176, 256, 287, 272, 127, G=16), 5, 0),
    "select_pages, eight heads": (
        *pages(8176, 64, 287, 272, 127, G=8, dtype=jnp.float16),
        2.8,
        0,
    ),
    "select_pages, by head": (
        *pages(2041, 128, 287, 272, 127, group_reduce="per_head"),
        0.4,
        0,
    ),
    "score_pages": (PAGES, (sds(1, 8, 4, 128), *2 * [sds(1, 8, 8192, 128)]), 0.1, 0),
    "score_pages, D 256": (
        PAGES,
        (sds(1, 8, 8, 256, dtype=jnp.float32), *2 * [sds(1, 8, 8192, 256)]),
        0.1,
        0,
    ),
    "score_pages, D 64": (
        PAGES,
        (sds(1, 8, 8, 64, dtype=jnp.float32), *2 * [sds(1, 8, 512, 64)]),
        0.1,
        0,
    ),
    # Half the output in 16 bits, which is 32 MiB.
    "attend_key_blocks": (*listed(4, 4096, 131072, 128, 103), 33, 0),
    "attend_key_blocks, three stages": (
        *listed(4, 4096, 131072, 128, 103, attend_key_blocks.Config(3), jnp.float16),
        33,
        0,
    ),
    "attend_key_blocks, D 64": (*listed(8, 512, 32768, 64, 26), 5, 0),
    "attend_slots": (ATTEND, slots(4, 131072, 128, 2048), 0.1, 0),
    "attend_slots, a loop": (ATTEND, slots(8, 131072, 128, 4096, dtype=jnp.float16), 0.2, 0),
    "attend_slots, D 256": (ATTEND, slots(4, 131072, 256, 2048), 0.2, 136),
    "attend_span": (SPAN, span(4, 131072, 128), 0.6, 0),
    "attend_span, a cap and sinks": (
        partial(attend_span.attend_span, scale=0.1, cap=50.0),
        (*span(8, 131072, 64, jnp.float16), sds(8, 8, dtype=jnp.float32)),
        0.6,
        0,
    ),
    "attend_span, D 256": (SPAN, span(4, 131072, 256), 0.7, 0),
    "attend_span, 8 steps": (SPAN, span(4, 131072, 128, T=8), 5, 0),
    "attend_span, 32 rows of a prefix": (SPAN, span(4, 8192, 128, T=32), 40, 0),
    "attend_span, 8 steps, D 256": (SPAN, span(4, 131072, 256, T=8), 10, 0),
    "attend_span, D 80": (SPAN, span(16, 131072, 80), 1.2, 0),
    "attend_span, D 192": (SPAN, span(4, 131072, 192), 0.7, 0),
    "attend_zones, D 96": (over_zones(128), zones(12, 130816, 383, 4, 96, 1916), 0.2, 0),
    "delta_step": (  # not given away, what is beside the state is copied
        delta_step.delta_step,
        cases.delta_step(B=8, Hk=16, H=48, Dv=128)[0],
        20,
        0,
    ),
    "delta_step, D 256": (
        delta_step.delta_step,
        cases.delta_step(B=1, Hk=16, H=32, Dk=256, Dv=256)[0],
        4,
        0,
    ),
    "delta_rule": (
        partial(delta_rule.delta_rule, dtype=jnp.bfloat16),
        cases.delta_rule(T=8192, Hk=16, H=48)[0],
        500,
        0,
    ),
    "delta_rule, blocks of 32": (
        partial(delta_rule.delta_rule, dtype=jnp.bfloat16),
        cases.delta_rule(T=8192, Hk=16, H=32)[0],
        400,
        0,
    ),
    "put_token": (put_token.put_token, tokens(4, 383), 2, 0),  # not given away, they are copied
    "put_tokens": (put_token.put_tokens, tokens(4, 383, T=8), 2, 0),
    "attend_zones": (over_zones(1), zones(4, 131072, 256, 0, 128, 2047), 0.1, 0),
    "attend_zones, three": (over_zones(128), zones(4, 130816, 383, 4, 128, 1916), 0.1, 0),
    "attend_zones, a loop": (
        over_zones(256),
        zones(8, 131072, 511, 4, 128, 3800, dtype=jnp.float16),
        0.2,
        0,
    ),
    "attend_zones, D 256": (over_zones(256), zones(4, 131072, 511, 4, 256, 1788), 0.2, 232),
    "attend_zones, a choice for each head": (
        over_zones(128),
        zones(8, 131072, 383, 4, 64, 1916, H=8),
        0.6,
        0,
    ),
    "attend_coded_zones": (*over_codes(64, 4, 131072, 256, 4, 128, 1980), 0.1, 0),
    "attend_coded_zones, a loop": (
        *over_codes(64, 8, 32768, 256, 0, 128, 3800, (8, 8), jnp.float16, B=8),
        1,
        0,
    ),
    "attend_coded_zones, D 64": (*over_codes(64, 8, 131072, 256, 4, 64, 1980, (3, 2)), 0.1, 0),
    "attend_quantized, LogQuant": (CODED, coded(131040, 128, 2, 42, 1, 64), 0.6, 0),
    "attend_quantized, KIVI": (CODED, coded(131072, 128, 2, 32, 1, 32), 0.6, 0),
    "attend_quantized_zones": (
        CODED,
        (*coded(131040, 128, 2, 42, 1, 64), recent_zone(126)),
        0.6,
        0,
    ),
    "attend_quantized_zones, D 64": (
        CODED,
        (*coded(131072, 64, 4, 32, 1, 32), recent_zone(128, 64)),
        0.6,
        0,
    ),
    "attend_quantized, by token, 4 bits": (CODED, coded(131072, 128, 4, 1, 64, 32), 0.6, 0),
    "attend_quantized_zones, 8 steps": (
        CODED,
        (*coded(131040, 128, 2, 42, 1, 64, Q=32), recent_zone(126, T=(8,))),
        5,
        16,
    ),
    "attend_quantized, 32 queries of LogQuant": (
        CODED,
        coded(131040, 128, 2, 42, 1, 64, Q=32),
        5,
        144,
    ),
    "attend_quantized, 32 queries of KIVI": (
        CODED,
        coded(131072, 128, 2, 32, 1, 32, Q=32),
        5,
        16,
    ),
    "attend_quantized, 32 queries by token, 4 bits": (
        CODED,
        coded(131072, 128, 4, 1, 64, 32, Q=32),
        5,
        0,
    ),
    "attend_quantized, 32 queries of D 64": (
        CODED,
        coded(131072, 64, 4, 64, 1, 32, Q=32),
        5,
        36,
    ),
    "collide": (collide.collide, ballot(4, 131072, 128, 6), 0.2, 0),
    "collide, a head": (collide.collide, ballot(1, 131072, 128, 6), 0.1, 0),
    "collide, D 64": (collide.collide, ballot(8, 131072, 64, 31), 0.2, 0),
    "most_voted": (
        partial(most_voted.most_voted, room=13108),
        (sds(1, 8, 1, 131072, dtype=jnp.uint8), *2 * [sds(1, dtype=jnp.int32)]),
        0.3,
        0,
    ),
    "rerank": (
        partial(rerank.rerank, centres=range(8), scale=0.1),
        picks(1, 131072, 128, 6554),
        0.1,
        0,
    ),
    "rerank, D 64": (
        partial(rerank.rerank, centres=range(8), scale=0.1),
        picks(4, 131072, 64, 6554),
        0.1,
        0,
    ),
    "attend_slots, a choice for each head": (ATTEND, slots(8, 131072, 64, 2048, H=8), 0.6, 0),
    "host_rows": (
        host_rows.host_rows,
        (kept_by_host(1 << 13, 32), sds(1, 8, 64, dtype=jnp.int32)),
        0.1,
        0,
    ),
    "host_rows_first": (*recalled(rest=False), 0.1, 0),
    "host_rows_rest": (*recalled(rest=True), 0.1, 0),
    "hot_places": (
        hot_pages.hot_places,
        places(8192, 2048, 131072),
        5,
        0,
    ),  # not given away, tables are copied
    "hot_load": (
        hot_pages.hot_load,
        (kept_by_host(1 << 17, 1), *hot_zones(8192, 2048)),
        34,
        0,
    ),  # zones too
    "hot_load_float8": (
        hot_float8.hot_load_float8,
        (kept_by_host(1 << 13, 16, dtype=jnp.uint8), *hot_zones(512, 126, page=16)),
        34,
        0,
    ),
    "hot_load_float8, single tokens in f32": (
        hot_float8.hot_load_float8,
        (kept_by_host(1 << 17, 1, dtype=jnp.uint8), *hot_zones(8192, 2048, dtype=jnp.float32)),
        67,
        0,
    ),
}
DONATED = {"host_append"}  # compiled with a donated array by a test of its own


def test_every_operation_is_compiled():
    compiled = {name.split(",")[0] for name in PROGRAMS if name not in LATE} | DONATED
    assert compiled == ops.OPS.keys(), (
        "an operation needs a program in tests/kernels/test_aot.py"
    )


TWO = (
    "delta_rule",
    "attend_quantized",
    "attend_span",
    "collide",
    "select_1bit",
    "select_4bit",
    "select_pages",
)  # kernels of a program
ONE = ("collide, a head",)
# At most: else too few blocks fit on a multiprocessor.
REGISTERS = {
    "select_1bit, 8 steps": 128,
    "collide": 128,
    "collide, a head": 128,
    "rerank": 72,
    "select_4bit": 72,
}

LATE = (
    "delta_step, D 256",
    "attend_key_blocks, three stages",
    "attend_key_blocks, D 64",
    "attend_quantized, KIVI",
    "attend_quantized_zones, D 64",
    "attend_quantized_zones, 8 steps",
    "attend_quantized, 32 queries of LogQuant",
    "attend_quantized, 32 queries of KIVI",
    "attend_quantized, 32 queries by token, 4 bits",
    "attend_quantized, 32 queries of D 64",
    "collide, D 64",
    "rerank, D 64",
    "top_k, 1M",
    "top_k_grouped, 1M",
    "top_k_grouped, 16 heads",
    "score_1bit, D 256",
    "score_1bit, D 256, 16 heads",
    "score_pages, D 256",
    "select_1bit, D 256",
    "select_1bit, D 256, 16 heads",
    "select_1bit, 2 steps, D 256",
    "select_pages, D 256",
    "select_pages, D 256, 16 heads",
    "select_1bit, 8 steps",
    "select_1bit, a loop",
    "select_1bit, eight heads",
    "select_1bit, clusters of 16",
    "select_1bit, D 64",
    "select_4bit, a loop",
    "select_4bit, D 64",
    "select_pages, a loop",
    "select_pages, eight heads",
    "select_pages, by head",
    "attend_slots, D 256",
    "hot_load_float8, single tokens in f32",
    "attend_span, D 256",
    "attend_span, D 80",
    "attend_span, D 192",
    "attend_span, 32 rows of a prefix",
    "attend_span, 8 steps, D 256",
    "attend_coded_zones, a loop",
    "attend_coded_zones, D 64",
    "attend_zones, D 96",
    "attend_zones, a loop",
    "attend_zones, D 256",
    "attend_zones, a choice for each head",
    "score_1bit, D 64",
    "score_pages, D 64",
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.thorough] * (n in LATE)) for n in PROGRAMS]
)
def test_a_kernel_compiles_for_an_h200(name):
    f, args, mib, spills = PROGRAMS[name]
    program = aot.compile_for(f, *args)
    # One that this process compiled before, for another program, jax 0.12 takes from its cache
    # without a report.
    assert program.kernels.keys() <= {
        f"{kernel}_mosaic_gpu_kernel" for kernel in program.shared
    }
    assert len(program.shared) == 1 + (name.startswith(TWO) and name not in ONE)
    op = name.split(",")[0]
    for kernel, (registers, stored, loaded) in program.kernels.items():
        assert kernel.startswith(
            ("kvjax_" + op, "kvjax_" + ops.OPS[op].module.__name__.rpartition(".")[2])
        ), kernel
        assert registers <= REGISTERS.get(name, 255)
        assert max(stored, loaded) <= spills, (
            f"{stored} bytes of spills stored, {loaded} loaded"
        )
    assert program.temp_bytes <= mib * MIB


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("preset", "found"),
    [
        (presets.full(), {"attend_span", "attend_span_merge"}),
        (presets.fier(2048), {"select_1bit_score", "select_1bit", "attend_zones"}),
        (presets.quest(2048), {"select_pages_score", "select_pages", "attend_zones"}),
        (
            presets.pariskv(2048),
            {"collide", "most_voted", "select_4bit_score", "select_4bit", "attend_zones"},
        ),
        (presets.logquant(), {"attend_quantized", "attend_quantized_merge"}),
        (presets.kivi(), {"attend_quantized", "attend_quantized_merge"}),
    ],
    ids=["full", "fier", "quest", "pariskv", "logquant", "kivi"],
)
def test_a_step_runs_the_kernels_and_copies_no_cache(preset, found):
    spec = kvjax.CacheSpec(
        batch=1, q_heads=32, kv_heads=8, head_dim=128, capacity=131072, dtype=jnp.bfloat16
    )
    policy = preset.rest
    state = jax.eval_shape(partial(policy.init, spec))
    with mock.patch.object(ops.op, "_unmeasured", return_value=None):
        program = aot.compile_for(
            lambda st, q: policy.attend(st, q, kvjax.Step(kvjax.Logits(0.1)))[0],
            state,
            sds(1, 8, 4, 128),
        )
    names = {
        name.removeprefix("kvjax_").removesuffix("_mosaic_gpu_kernel")
        for name in program.kernels
    }
    assert names == found
    assert (
        program.temp_bytes < 40 * MIB
    )  # for the scores of 32 heads, 16 MiB, and pooled ones; the cache is 512 MiB


SAMPLE = (
    "top_k",
    "select_1bit, with keys that wait",
    "select_pages",
    "attend_zones, three",
    "attend_coded_zones",
    "attend_quantized, LogQuant",
)
EVERYWHERE = (  # of LATE, for each GPU
    "score_1bit, D 256, 16 heads",
    "select_1bit, D 256, 16 heads",
    "select_pages, D 256, 16 heads",
    "top_k_grouped, 16 heads",
)
SPILLS = {
    "attend_slots, D 256": 300,
    "attend_zones, D 256": 300,
    "select_1bit, D 256, 16 heads": 16,
    "select_pages, D 256, 16 heads": 184,
    "top_k_grouped, 16 heads": 32,
}  # bytes at most; none elsewhere


@pytest.fixture(scope="module")
def compilers():
    """A process that imports what compiles and goes on as another for each GPU, as XLA keeps
    the architecture of a process's first kernel.
    """
    command = [sys.executable, "-m", "tests.kernels.test_aot"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        yield process
        process.stdin.close()


# 8.9 has the forms and the shared memory of 8.6, and 10.0 those of 10.3.
@pytest.mark.parametrize(
    "capability",
    [
        pytest.param(n, marks=[pytest.mark.thorough] * (n in ("8.6", "10.3")))
        for n in simt.ARCHITECTURES
    ],
)
def test_kernels_compile_for_each_gpu(capability, pytestconfig, compilers):
    """Some by default, and all with --thorough: without spills, and within a block's shared
    memory and registers.
    """
    thorough = pytestconfig.getoption("--thorough")
    if capability == "9.0" and not thorough:
        pytest.skip("in this process, by test_a_kernel_compiles_for_an_h200")
    early = [name for name in PROGRAMS if name not in LATE or name in EVERYWHERE]
    names = early if thorough else list(SAMPLE)
    if capability in ("8.0", "8.9") and not thorough:
        names.remove(
            "top_k"
        )  # the form of 12.0, whose blocks have no more shared memory; ptxas takes 13 s for it
    target = simt.stands_for(capability)
    if target.smem < delta_rule.smem_bytes():
        names = [name for name in names if not name.startswith("delta_rule")]
    if capability != "9.0":  # wgmma is Hopper's
        names = [name for name in names if not name.startswith("attend_key_blocks")]
    print(json.dumps([capability, *names]), file=compilers.stdin, flush=True)
    lines = itertools.takewhile(lambda line: line != END, compilers.stdout)
    found = [json.loads(line) for line in lines if line.startswith("{")]
    failed = {row["program"]: row["error"] for row in found if "error" in row}
    assert not failed
    assert [row["program"] for row in found] == names
    for row in found:
        assert row["architecture"].removesuffix("a") == f"sm_{capability.replace('.', '')}"
        for kernel, (registers, stored, loaded) in row["kernels"].items():
            assert max(stored, loaded) <= SPILLS.get(row["program"], 0), (
                f"{row['program']}: {kernel}"
            )
            assert (
                registers * row["threads"][kernel.removesuffix("_mosaic_gpu_kernel")] <= 65536
            ), kernel
        assert max(row["shared"].values()) <= target.smem, row["program"]
        kept = 8 * MIB  # keys and counts, between the launches of a selection without clusters
        assert row["temp_bytes"] <= PROGRAMS[row["program"]][2] * MIB + kept, row["program"]


COMPARED = (
    "adakv",
    "arkvale",
    "h2o",
    "logevict",
    "magicpig",
    "mikv",
    "pqcache",
    "raas",
    "shadowkv",
    "snapkv",
    "tova",
)
COMPARED += ("shadowkv:host=false", "streaming_llm")
LAUNCHES = {"arkvale": 24, "magicpig": 22, "shadowkv": 22}
HOLD = {
    "magicpig": 96 * MIB
}  # the folded bits of its hashes, which takes less time than one pass does


@pytest.mark.thorough
@pytest.mark.parametrize("name", COMPARED)
def test_a_step_without_kernels_of_its_own_holds_scores_once(name):
    spec = kvjax.CacheSpec(
        batch=1, q_heads=32, kv_heads=8, head_dim=128, capacity=131072, dtype=jnp.bfloat16
    )
    policy = presets.parse_with_budget(name, 2048)[0].rest
    layer = kvjax.memory.shapes(partial(kvjax.init_layer, policy, spec))
    step = partial(kvjax.attention, flush=False)
    program = aot.compile_for(
        step, layer, sds(1, 1, 32, 128), *2 * [sds(1, 1, 8, 128)], donate=0
    )
    most = HOLD.get(
        name, 24 * MIB
    )  # the scores of 32 heads in f32 take 16 MiB, keys and values 512
    assert program.temp_bytes < most
    assert len(program.launches) <= LAUNCHES.get(name, 100), program.launches


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("preset", "most"),
    [
        (presets.full(), 4),
        (presets.fier(2048), 5),
        (presets.fier(2048, store="turbo4"), 5),
        (presets.quest(2048), 6),
        (presets.pariskv(2048), 8),
        (presets.fier(2048, store="host"), 7),
        (presets.fier(2048, store="host+8192"), 7),
    ],
    ids=["full", "fier", "fier_turbo4", "quest", "pariskv", "fier_on_host", "fier_hot"],
)
def test_a_step_starts_few_kernels_and_copies_nothing(preset, most):
    """One of them makes an array of k and v, which in a model the kernel does that rotates k."""
    spec = kvjax.CacheSpec(
        batch=1, q_heads=32, kv_heads=8, head_dim=128, capacity=131072, dtype=jnp.bfloat16
    )
    cache = memory.shapes(partial(kvjax.init_layer, preset.rest, spec))
    new = sds(1, 1, 32, 128), sds(1, 1, 8, 128), sds(1, 1, 8, 128)
    with mock.patch.object(ops.op, "_unmeasured", return_value=None):
        program = aot.compile_for(partial(kvjax.attention, flush=False), cache, *new, donate=0)
    assert len(program.launches) <= most, program.launches
    assert not [name for name in program.launches if name.startswith("copy")]


def test_steps_of_gated_delta_nets_are_a_launch_a_layer():
    """Their tokens are counted in it, and no array is copied."""
    net = models.GatedDelta(key_heads=2, value_heads=4, key_dim=128, value_dim=128)
    spec = kvjax.CacheSpec(
        batch=1, q_heads=4, kv_heads=2, head_dim=64, capacity=64, dtype=jnp.bfloat16
    )
    layer = memory.shapes(partial(kvjax.init_layer, net, spec))
    numbers = 2 * [sds(1, 1, 4, dtype=jnp.float32)]
    tokens = models.gated_delta.DeltaInputs(sds(1, 1, net.channels), *numbers)

    def step(layers, tokens, kernel):
        return [advance(layer, tokens, kernel) for layer in layers]

    with mock.patch.object(ops.op, "_unmeasured", return_value=None):
        program = aot.compile_for(
            step, 2 * [layer], tokens, sds(net.kernel, net.channels), donate=0
        )
    launches = [name for name in program.launches if not name.startswith("empty")]
    assert len(launches) == 2, launches


@pytest.mark.parametrize(
    "preset",
    [
        presets.pariskv(2048),
        *(
            pytest.param(p, marks=pytest.mark.thorough)
            for p in (presets.fier(2048), presets.kivi())
        ),
    ],
    ids=["pariskv", "fier", "kivi"],
)
def test_a_step_that_may_flush_changes_all_in_place(preset):
    """In both branches: a block of 383 tokens, and counts, which an earlier form copied twice
    in every step.
    """
    spec = kvjax.CacheSpec(
        batch=1, q_heads=8, kv_heads=2, head_dim=128, capacity=131072, dtype=jnp.bfloat16
    )
    cache = memory.shapes(partial(kvjax.init_layer, preset.rest, spec))
    new = sds(1, 1, 8, 128), sds(1, 1, 2, 128), sds(1, 1, 2, 128)
    program = aot.compile_for(kvjax.attention, cache, *new, donate=0)
    assert re.findall(r"%\S+ = \S+ copy\(.*", program.hlo) == []


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 12),
    reason="XLA of jax 0.12 lets concurrent programs share memory by data flow alone",
)
def test_layers_flush_in_the_memory_of_one():
    """Programs at the same time have arrays of their own, and the codes of a flush are made
    from 32-bit floats.
    """
    policies = kvjax.PerLayer((), presets.fier(2048, store="turbo4").rest)
    spec = kvjax.CacheSpec(
        batch=4, q_heads=8, kv_heads=2, head_dim=128, capacity=8192, dtype=jnp.bfloat16
    )
    temp = []
    for layers in (1, 3):
        cache = memory.shapes(partial(kvjax.init, policies, spec, layers=layers))
        temp.append(
            aot.compile_for(kvjax.flush, cache, donate=0, options=memory.CONCURRENT).temp_bytes
        )
    assert temp[1] < 1.5 * temp[0]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("preset", "most", "found"),
    [
        (presets.full(), 9, ["put_tokens", "attend_span", "attend_span_merge"]),
        (
            presets.fier(2048),
            8,
            ["put_tokens", "select_1bit_score", "select_1bit", "attend_zones"],
        ),
        (
            presets.quest(2048),
            9,
            ["put_tokens", "select_pages_score", "select_pages", "attend_zones"],
        ),
        (
            presets.pariskv(2048),
            12,
            [
                "put_tokens",
                "collide_rank",
                "collide",
                "most_voted",
                "select_4bit_score",
                "select_4bit",
                "attend_zones",
            ],
        ),
    ],
    ids=["full", "fier", "quest", "pariskv"],
)
def test_several_steps_start_each_kernel_once(preset, most, found):
    spec = kvjax.CacheSpec(
        batch=1, q_heads=32, kv_heads=8, head_dim=128, capacity=131072, dtype=jnp.bfloat16
    )
    cache = jax.eval_shape(partial(kvjax.init_layer, preset.rest, spec))
    new = sds(1, 8, 32, 128), sds(1, 8, 8, 128), sds(1, 8, 8, 128)
    with mock.patch.object(ops.op, "_unmeasured", return_value=None):
        program = aot.compile_for(partial(kvjax.decode, flush=False), cache, *new, donate=0)
    assert {
        name.removeprefix("kvjax_").removesuffix("_mosaic_gpu_kernel")
        for name in program.kernels
    } == set(found)
    assert len(program.launches) <= most, program.launches
    assert len([name for name in program.launches if name.startswith("mpmd_map")]) == len(found)
    assert not [name for name in program.launches if name.startswith("while")]
    assert (
        program.temp_bytes < 100 * MIB
    )  # for the scores of 256 heads in f16, 64 MiB; keys and values are 512 MiB


@pytest.mark.parametrize("name", ["host_rows", "host_append"])
def test_a_kernel_takes_arrays_of_the_host_as_they_are(name):
    x, one = kept_by_host(1 << 18, 1), sds(1, dtype=jnp.int32)
    if name == "host_rows":
        program = aot.compile_for(host_rows.host_rows, x, sds(1, 8, 512, dtype=jnp.int32))
    else:

        def loop(x, new, at, count):
            return jax.lax.fori_loop(
                0, 4, lambda i, x: host_append.host_append(x, new, at + i, count), x
            )

        program = aot.compile_for(loop, x, 2 * [sds(1, 8, 32, 1, 128)], one, one, donate=0)
    assert set(program.kernels) == {f"kvjax_{name}_mosaic_gpu_kernel"}
    assert max(max(spills) for _, *spills in program.kernels.values()) == 0
    assert "bf16[1,8,262144,2,1,128]{5,4,3,2,1,0:S(5)} parameter(0)" in program.hlo
    assert program.temp_bytes < 1024  # the array has 1 GiB
    assert all("262144" not in line for line in program.hlo.splitlines() if " copy" in line)


@pytest.mark.thorough
def test_attention_follows_the_first_read_of_a_recall_and_not_the_rest():
    """In the optimised program, as XLA could fuse the operations after the two."""
    spec = kvjax.CacheSpec(
        batch=1, q_heads=32, kv_heads=8, head_dim=128, capacity=32768, dtype=jnp.bfloat16
    )
    cache = memory.shapes(partial(kvjax.init_layer, presets.freekv(2048).rest, spec))
    program = aot.compile_for(
        kvjax.attention, cache, sds(1, 1, 32, 128), *[sds(1, 1, 8, 128)] * 2, donate=0
    )
    kernels, before = flow(program.hlo)
    reads = [name for name, kind in kernels.items() if kind.startswith("host_rows")]
    (attends,) = (name for name, kind in kernels.items() if kind.startswith("attend_zones"))
    first, rest = sorted(reads, key=lambda name: len(before(name)))
    assert first in before(rest)
    assert first in before(attends)
    assert rest not in before(attends)


def flow(hlo):
    """The kernels of a program by the name of their call, and a function that says which calls
    come before one.
    """
    lines = re.findall(
        r"^\s+(?:ROOT )?%(\S+) = .*? (?:fusion|[\w-]+)\((.*?)\)(.*)$", hlo, re.MULTILINE
    )
    operands = {name: re.findall(r"%([\w.-]+)", taken) for name, taken, _ in lines}
    kernels = {
        name: re.search(r"kvjax_(\w+)", rest) for name, _, rest in lines if "mosaic_gpu" in rest
    }

    def before(name):
        found, left = set(), [name]
        while left:
            for operand in set(operands.get(left.pop(), ())) - found:
                found.add(operand)
                left.append(operand)
        return found

    return {name: kind[1] for name, kind in kernels.items() if kind}, before


@pytest.mark.thorough
def test_a_layer_that_follows_reads_the_host_while_its_anchor_attends():
    """Its rows are known as soon as the anchor has selected, so a GPU may read them while other
    kernels run.
    """
    spec = kvjax.CacheSpec(
        batch=1, q_heads=32, kv_heads=8, head_dim=128, capacity=32768, dtype=jnp.bfloat16
    )
    policies = presets.fier(2048, store="host", layers=presets.Layers(dense=0, share=2))
    caches = [
        memory.shapes(partial(kvjax.init_layer, policies.policy(i), spec)) for i in range(2)
    ]

    def step(caches, q, k, v):
        out, anchor, info = kvjax.attention_info(caches[0], q, k, v, flush=False)
        out, follower = kvjax.attention(
            caches[1], out, k, v, flush=False, selection=info.selection
        )
        return out, (anchor, follower)

    program = aot.compile_for(
        step, caches, sds(1, 1, 32, 128), *[sds(1, 1, 8, 128)] * 2, donate=0
    )
    kernels, before = flow(program.hlo)
    attends = [name for name, kind in kernels.items() if kind.startswith("attend_zones")]
    anchor, follower = sorted(attends, key=lambda name: len(before(name)))
    assert anchor in before(follower)
    reads = [name for name, kind in kernels.items() if kind.startswith("host_rows")]
    assert len(reads) == 2
    assert not any(anchor in before(name) for name in reads)
    assert sum(name in before(anchor) for name in reads) == 1


@pytest.mark.thorough
def test_a_step_over_the_host_store_runs_its_kernels_and_copies_no_cache():
    spec = kvjax.CacheSpec(
        batch=1, q_heads=32, kv_heads=8, head_dim=128, capacity=131072, dtype=jnp.bfloat16
    )
    cache = memory.shapes(
        partial(kvjax.init_layer, presets.fier(2048, store="host").rest, spec)
    )
    new = sds(1, 1, 32, 128), sds(1, 1, 8, 128), sds(1, 1, 8, 128)
    with mock.patch.object(ops.op, "_unmeasured", return_value=None):
        program = aot.compile_for(kvjax.attention, cache, *new, donate=0)
    names = {
        name.removeprefix("kvjax_").removesuffix("_mosaic_gpu_kernel")
        for name in program.kernels
    }
    assert names == {
        "put_token",
        "select_1bit_score",
        "select_1bit",
        "host_rows",
        "host_append",
        "attend_zones",
    }
    assert program.temp_bytes < 40 * MIB  # the host's keys and values are 512 MiB


END = "compiled\n"


def compile_each(capability, *names):
    """Prints a line of JSON for each program, compiled for the GPU that stands for a compute
    capability.
    """
    target = simt.stands_for(capability)
    for name in names or [name for name in PROGRAMS if name not in LATE]:
        f, args, *_ = PROGRAMS[name]
        try:
            row = dataclasses.asdict(aot.compile_for(f, *args, target=target))
            del row["hlo"]
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        print(json.dumps({"program": name, **row}), flush=True)


def compile_asked_for():
    """Goes through lines of JSON with the arguments of `compile_each`, each in a new process,
    and prints `END` after each.
    """
    for line in sys.stdin:
        child = os.fork()
        if not child:
            compile_each(*json.loads(line))
            os._exit(0)
        os.waitpid(child, 0)
        print(END, end="", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        compile_each(*sys.argv[1:])
    else:
        compile_asked_for()
