"""For each operation of `ops.OPS`: arguments that its kernel takes, and sizes that the kernel
refuses.

A test asks that every operation is in `CASES`; the tests over all operations take their
arguments from it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.numerics.blocks import Block
from kvjax.numerics.partial import Logits, Span
from kvjax.numerics.quant import OneBit, QuantArray
from kvjax.numerics.rotate import Directions, encode
from kvjax.numerics.selection import Candidates, PackedSelection, Selection
from kvjax.ops import HotTables


@dataclass(frozen=True)
class Case:
    """args(**sizes) are positional and keyword arguments of the operation, with shapes for
    arrays.
    """

    args: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    refused: Sequence[
        tuple[dict[str, Any], str]
    ]  # sizes that differ from the default, and a pattern of the reason


def sds(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


f32, i32, u8, u16, u32, flags = (
    partial(sds, dtype=dtype)
    for dtype in (jnp.float32, jnp.int32, jnp.uint8, jnp.uint16, jnp.uint32, bool)
)
SCALE = {"logits": Logits(0.1)}


def span(B=1, K=2, G=4, S=64, D=128, queries=jnp.bfloat16, dtype=jnp.bfloat16, values=None):
    kept = Span(
        sds(B, K, S, D, dtype=dtype), sds(B, K, S, D, dtype=values or dtype), i32(B), i32(B)
    )
    return (sds(B, K, G, D, dtype=queries), kept), SCALE


def slots(B=1, K=2, G=4, S=64, D=128, M=32, dtype=jnp.bfloat16, values=None):
    kept = sds(B, K, S, D, dtype=dtype), sds(B, K, S, D, dtype=values or dtype)
    return (f32(B, K, G, D), *kept, Selection(i32(B, K, 1, M), flags(B, K, 1, M))), SCALE


def key_blocks(B=1, T=256, S=640, D=128, dtype=jnp.bfloat16, values=None, channels=None):
    kept = sds(B, 2, S, D, dtype=dtype), sds(B, 2, S, channels or D, dtype=values or dtype)
    lists = i32(B, 2, 4, T // 128, 3), i32(B, 2, 4, T // 128)
    return (sds(B, 2, 4, T, D, dtype=jnp.bfloat16), *kept, *lists, i32(B)), SCALE


def zones(S=64, D=128, M=32, recent=jnp.bfloat16, queries=jnp.float32, local=200):
    def kept(n, dtype=jnp.bfloat16):
        return 2 * [sds(1, 2, n, D, dtype=dtype)]

    selection = Selection(i32(1, 2, 1, M), flags(1, 2, 1, M))
    spans = Span(*kept(198, recent), i32(1), i32(1)), Span(*kept(6), i32(1), i32(1))
    return (sds(1, 2, 4, D, dtype=queries), *kept(S), selection, *spans, local), SCALE


def coded_zones(D=128, bits=(4, 4), weights=1, **sizes):
    (q, *_, selection, recent, sink, local), scale = zones(D=D, **sizes)

    def code(b):
        one = sds(1, 2, 64, weights, dtype=jnp.uint16)
        return Directions(u8(1, 2, 64, D // 8), u8(1, 2, 64, (b - 1) * D // 8), one)

    return (q, *map(code, bits), f32(1, 2, D), selection, recent, sink, local), {
        **scale,
        "seed": 3,
    }


def quantized(
    B=2, Q=4, S=256, D=128, bits=2, tokens=32, channels=1, value_channels=32, ends=(2,)
):
    codes, at = u8(B, 2, S, D * bits // 8), i32(*ends)
    keys = QuantArray(codes, u32(B, 2, S // tokens, D // channels))
    values = QuantArray(codes, u32(B, 2, S, D // value_channels))
    return (f32(B, 2, Q, D), keys, values, at, at), SCALE


def quantized_zones(R=9, recent=jnp.bfloat16, queries=jnp.float32, sink=False, **sizes):
    (q, *codes), scale = quantized(**sizes)
    zone = Span(*2 * [sds(2, 2, R, q.shape[3], dtype=recent)], i32(2), i32(2))
    return (sds(*q.shape, dtype=queries), *codes, zone, zone if sink else None), scale


def ranks(shape=(8, 64), dtype=jnp.float32, k=5):
    return (sds(*shape, dtype=dtype), flags(*shape), k), {}


def ranks_grouped(sizes=(64, 8), G=4, dtype=jnp.float32, k=5):
    return (
        [(sds(1, 2, G, n, dtype=dtype), flags(1, 1, 1, n)) for n in sizes],
        "mean_score",
        k,
    ), {}


def one_bit(B=1, K=2, G=4, S=64, D=64, group=32, dtype=jnp.bfloat16):
    keys = OneBit(u8(B, K, S, D // 8), *2 * [sds(B, K, S // group, D, dtype=dtype)])
    return (f32(B, K, G, D), keys), SCALE


def pages(B=1, G=4, P=10, D=64, dtype=jnp.bfloat16):
    return (f32(B, 2, G, D), *2 * [sds(B, 2, P, D, dtype=dtype)]), SCALE


def codes(G=4, H=None, S=64, D=128, M=9, weights=jnp.uint16):
    keys = jax.eval_shape(encode, f32(1, 2, S, D))
    keys = keys._replace(weights=sds(*keys.weights.shape, dtype=weights))
    listed = PackedSelection(i32(1, 2, H or G, M), i32(1, 2, H or G))
    return (f32(1, 2, G, D), keys, listed), SCALE


def candidates(room=9, pending=16, R=16, D=128, dtype=jnp.bfloat16):
    keys = sds(1, 2, R, D, dtype=dtype), i32(1), i32(1)
    return Candidates(
        span=(i32(1), i32(1)), pending=keys, k=i32(1), k_max=room, pending_slots=pending
    )


def tokens_1bit(room=9, D=64, **sizes):
    (q, keys), scale = one_bit(D=D, **sizes)
    return (q, keys, candidates(room, D=D), "mean_softmax"), scale


def tokens_4bit(room=9, D=128, dtype=jnp.bfloat16, **sizes):
    (q, keys, listed), scale = codes(D=D, **sizes)
    return (q, keys, listed, candidates(room, D=D, dtype=dtype)), {**scale, "seed": 3}


def pages_of_tokens(room=9, pending=16, D=64, unit=16, keys=jnp.bfloat16, **sizes):
    args, scale = pages(D=D, **sizes)
    return (*args, candidates(room, pending, D=D, dtype=keys), "mean_softmax"), {
        **scale,
        "unit": unit,
    }


def votes(K=2, G=4, S=64, D=128, T=6, dtype=jnp.int32):
    patterns = (
        u8(1, K, S, D // 8),
        sds(1, K, D // 8, 256, dtype=dtype),
        sds(1, T, dtype=jnp.int32),
    )
    return (f32(1, K, G, D), *patterns), {"seed": 3}


def voted(S=64, dtype=jnp.uint8, room=5):
    return (sds(1, 2, 4, S, dtype=dtype), i32(1), i32(1), room), {}


def rows(B=1, P=10, N=4, D=64):
    return (sds(B, 2, P, 2, 1, D), i32(B, 2, N)), {}


def recalled(P=10, N=4, M=5, Z=4, D=64, recent=jnp.bfloat16):
    held = i32(1, 2, M), 2 * (sds(1, 2, M * Z, D),)
    return (
        sds(1, 2, P, 2, Z, D),
        i32(1, 2, N),
        i32(1),
        flags(1, 2),
        held,
        2 * (sds(1, 2, 9, D, dtype=recent),),
    ), {}


def recalled_rest(kept=jnp.bfloat16, **sizes):
    args, options = recalled(**sizes)
    return (*args, (flags(1, 2), tuple(sds(*a.shape, dtype=kept) for a in args[4][1]))), options


def appended(B=1, P=10, N=4, D=64, dtype=jnp.bfloat16):
    return (sds(B, 2, P, 2, D), 2 * [sds(B, 2, N, D, dtype=dtype)], i32(B), i32(B)), {}


def tokens(D=64, slots=5, other=jnp.bfloat16):
    zones = [
        Block(*2 * [sds(2, 3, n, D, dtype=t)], i32(2))
        for n, t in ((slots, jnp.bfloat16), (9, other))
    ]
    return (zones, *2 * [sds(2, 3, 1, D)], flags(2), flags(2)), {}


def several_tokens(T=3, **sizes):
    (zones, *_, overflow), _ = tokens(**sizes)
    return (zones, *2 * [sds(2, 3, T, zones[0].k.shape[3])], i32(2), overflow), {}


def placed(B=1, n=8, N=4, P=20):
    tables = HotTables(i32(B, 2, n), i32(B, 2, n), i32(B, 2, P), i32(B, 2), i32(B, 2))
    return (tables, i32(B, 2, N), i32(B, 2)), {}


def hot_rows(B=1, n=8, N=4, P=20, Z=1, D=64, dtype=jnp.bfloat16):
    zones = 2 * (sds(B, 2, n * Z, D, dtype=dtype),)
    return (sds(B, 2, P, 2, Z, D), zones, i32(B, 2, n), i32(B, 2, n), i32(B, 2, N)), {}


def hot_codes(**sizes):
    (x, *others), options = hot_rows(**sizes)
    return (sds(*x.shape, dtype=jnp.uint8), *others), options


ROWS = [
    (dict(D=2), "rows of a multiple of 16 bytes"),
    (dict(D=0), "at least one row, and one byte of each"),
    (dict(B=0), "at least one row"),
    (dict(P=0), "at least one row"),
    (dict(N=1 << 26, D=2048), "less than 16 GiB at a time"),
]
RECALLED = [
    (dict(D=6, Z=4), "recalls slots of a multiple of 16 bytes; got 12"),
    (dict(D=2, Z=1), "rows of a multiple of 16 bytes"),
    (dict(P=0), "at least one row"),
    (
        dict(recent=jnp.float32),
        "in the dtype of the store, bfloat16; got bfloat16, bfloat16, float32",
    ),
]
QUANTIZED = [
    (dict(D=256), "the kernel attend_quantized takes head sizes 64 and 128"),
    (dict(Q=257), "1 to 256 queries"),
    (dict(bits=8), "codes of 2 and 4 bits; got 8"),
    (dict(tokens=128), "keys in groups of up to 64 tokens by 1 channel"),
    (dict(tokens=1, channels=16), "of 1 token by a multiple of 32 channels; got 1 by 16"),
    (
        dict(value_channels=8),
        "values in groups of 1 token by a multiple of 16 channels; got 1 by 8",
    ),
    (dict(B=0), "at least one row"),
]


def delta_step(B=2, Hk=2, H=4, Dk=128, Dv=64, T=1, P=32, dtype=jnp.bfloat16, new=None):
    C, W = 2 * Hk * Dk + H * Dv, 4
    beside = (
        sds(B, W - 1 + P, C, dtype=dtype),
        f32(B, P, Hk, Dk),
        f32(B, P, H, Dv),
        f32(B, P, H),
    )
    tokens = sds(B, T, C, dtype=new or dtype), f32(B, T, H), f32(B, T, H)
    counts = i32(B), i32(B), sds(B, dtype=jnp.bool_)
    return (f32(B, H, Dk, Dv), *beside, *tokens, sds(W, C, dtype=dtype), counts, i32(B)), {}


def delta_rule(B=1, T=100, Hk=2, H=4, Dk=128, Dv=128, dtype=jnp.bfloat16):
    keys = 2 * [f32(B, T, Hk, Dk)]
    numbers = 2 * [f32(B, T, H)]
    return (*keys, f32(B, T, H, Dv), *numbers, f32(B, H, Dk, Dv)), {"dtype": jnp.dtype(dtype)}


CASES = {
    "attend_span": Case(
        span,
        [
            (
                dict(D=72),
                "the kernel attend_span takes head sizes 64, 80, 96, 128, 192, 256; got D=72",
            ),
            (dict(G=17), "1 to 16 queries"),
            (dict(queries=jnp.int8), "queries in f32, bf16 or f16"),
            (dict(dtype=jnp.float32), "keys and values in bf16 or f16"),
            (dict(values=jnp.float16), "values like keys, bfloat16"),
            (dict(D=256, S=1 << 23), "less than 4 GiB of keys"),
            (dict(K=0), "at least one row and slot"),
        ],
    ),
    "attend_key_blocks": Case(
        key_blocks,
        [
            (
                dict(dtype=jnp.float32),
                "attend_key_blocks takes keys and values in bf16 or f16; got float32",
            ),
            (dict(values=jnp.float16), "got bfloat16 and float16"),
            (dict(D=96), "of 64 or 128 channels; got 96 and 96"),
            (dict(channels=64), "got 128 and 64"),
            (
                dict(T=130),
                "multiples of 128 queries, and of 8 slots from 128 on; got 130 and 640",
            ),
            *(
                (dict(S=S), f"of 8 slots from 128 on; got 256 and {S}")
                for S in (64, 300, 700, 1023)
            ),
        ],
    ),
    "attend_slots": Case(
        slots,
        [
            (
                dict(D=72),
                "the kernel attend_slots takes head sizes 64, 80, 96, 128, 192, 256; got D=72",
            ),
            (dict(G=17), "1 to 16 query heads"),
            (dict(dtype=jnp.float32), "in bf16 or f16"),
            (dict(values=jnp.float16), "values like keys"),
            (dict(M=4097), "1 to 4096 slots"),
            (dict(S=1 << 25), "less than 4 GiB"),
            (dict(B=0), "at least one row"),
        ],
    ),
    "attend_zones": Case(
        zones,
        [
            (
                dict(D=72),
                "the kernel attend_zones takes head sizes 64, 80, 96, 128, 192, 256; got D=72",
            ),
            (dict(M=3900), "1 to 4096 slots a row; got 4106"),
            (dict(S=(1 << 24) - 100), "less than 4 GiB of keys; got 16777320 slots"),
            (
                dict(recent=jnp.float16),
                "zones of one dtype; got bfloat16, float16, float16, bfloat16, bfloat16",
            ),
            (dict(queries=jnp.int32), "queries in f32, bf16 or f16; got int32"),
        ],
    ),
    "attend_coded_zones": Case(
        coded_zones,
        [
            (
                dict(D=256),
                "the kernel attend_coded_zones takes head sizes 64 and 128; got D=256",
            ),
            (dict(bits=(6, 4)), "codes of 2, 3, 4 and 8 bits; got 6 and 4"),
            (dict(weights=16), r"one weight a token, in u16; got uint16\[1, 2, 64, 16\]"),
            (
                dict(M=3900),
                "the kernel attend_coded_zones takes 1 to 4096 slots a row; got 4106",
            ),
            (
                dict(recent=jnp.float32),
                "the kernel attend_coded_zones takes keys and values in bf16 or f16; got float32",
            ),
        ],
    ),
    "attend_quantized": Case(
        quantized, [*QUANTIZED, (dict(ends=(2, 4)), "one start and stop a row")]
    ),
    "attend_quantized_zones": Case(
        quantized_zones,
        [
            *QUANTIZED[:-1],
            (dict(queries=jnp.int32), "queries in f32, bf16 or f16; got int32"),
            (dict(recent=jnp.float16), "keys and values in bf16; got float16"),
            (dict(R=0), "keys and values in bf16; got bfloat16"),
        ],
    ),
    "top_k": Case(
        ranks,
        [
            (dict(k=0), "k from 1 to 4096"),
            (dict(shape=(8, 8192), k=4097), "k from 1 to 4096"),
            (dict(k=65), "the kernel top_k takes rows of k to"),
            (dict(shape=(1, 1 << 22)), "rows of k to"),
            (dict(shape=(0, 64)), "at least one row"),
            (dict(dtype=jnp.int32), "f32, bf16 or f16"),
        ],
    ),
    "rank_grouped": Case(
        lambda **sizes: ((*ranks_grouped(**sizes)[0], f32(1, 2, sizes.get("G", 4), 1)), {}),
        [(dict(dtype=jnp.bfloat16), "scores in f32"), (dict(G=17), "1 to 16 query heads")],
    ),
    "top_k_grouped": Case(
        ranks_grouped,
        [
            (dict(dtype=jnp.bfloat16), "scores in f32"),
            (dict(k=73), "the kernel top_k_grouped takes rows of k to"),
            (dict(G=17), "1 to 16 query heads"),
        ],
    ),
    "score_1bit": Case(
        one_bit,
        [
            (dict(D=96), "the kernel score_1bit takes head sizes 64, 128 and 256"),
            (dict(G=17), "1 to 16 query heads"),
            (dict(group=16), "groups of a multiple of 32"),
            (dict(dtype=jnp.float32), "scales in bf16 or f16"),
            (dict(B=0), "at least one row"),
        ],
    ),
    "score_pages": Case(
        pages,
        [
            (dict(D=96), "the kernel score_pages takes head sizes 64, 128 and 256"),
            (dict(G=17), "1 to 16 query heads"),
            (dict(dtype=jnp.float32), "corners in bf16 or in f16"),
            (dict(P=0), "at least one row and page"),
        ],
    ),
    "rerank": Case(
        codes,
        [
            (dict(D=96), "the kernel rerank takes head sizes 64 and 128"),
            (dict(H=1), "slots for each of q"),
            (dict(weights=jnp.bfloat16), "weights in u16"),
            (dict(S=1 << 26), r"1 to 2\^26 - 1 keys"),
            (dict(M=0), "at least one candidate"),
        ],
    ),
    "select_1bit": Case(
        tokens_1bit,
        [
            (dict(D=96), "the kernel select_1bit takes head sizes 64, 128 and 256"),
            (dict(group=16), "the kernel select_1bit takes groups of a multiple of 32"),
            (dict(S=8192, room=5000), "k from 1 to 4096"),
            (dict(room=0), "k from 1 to 4096"),
        ],
    ),
    "select_4bit": Case(
        tokens_4bit,
        [
            (dict(D=96), "the kernel select_4bit takes head sizes 64 and 128"),
            (dict(dtype=jnp.float32), "pending keys in bf16 or f16"),
            (dict(room=0), "k from 1 to 4096"),
        ],
    ),
    "select_pages": Case(
        pages_of_tokens,
        [
            (dict(D=96), "the kernel select_pages takes head sizes 64, 128 and 256"),
            (dict(unit=8), "pages of a multiple of 16 tokens; got 8"),
            (dict(keys=jnp.float16), "keys in the dtype of the corners, bfloat16; got float16"),
            (dict(room=0), "k from 1 to 4096"),
        ],
    ),
    "collide": Case(
        votes,
        [
            (dict(D=96), "the kernel collide takes head sizes 64 and 128"),
            (dict(G=9), "1 to 8 query heads"),
            (dict(S=66), "a multiple of 4 keys"),
            (dict(S=1 << 24), r"less than 2\^24"),
            (dict(dtype=jnp.int16), "counts and limits in i32"),
            (dict(K=0), "at least one row"),
        ],
    ),
    "most_voted": Case(
        voted,
        [
            (dict(dtype=jnp.int32), "votes in u8, lengths and counts in i32"),
            (dict(S=72), "a multiple of 16 keys"),
            (dict(S=1 << 24), r"less than 2\^24"),
            (dict(room=0), "at least one row and place"),
        ],
    ),
    "host_rows": Case(rows, ROWS),
    "host_rows_first": Case(recalled, RECALLED),
    "host_rows_rest": Case(
        recalled_rest,
        [
            *RECALLED,
            (dict(kept=jnp.float16), "in the dtype of the store, bfloat16; got .*float16"),
        ],
    ),
    "host_append": Case(
        appended,
        [
            *ROWS,
            (dict(dtype=jnp.float16), "parts of the array's bfloat16; got float16, float16"),
        ],
    ),
    "hot_places": Case(
        placed,
        [
            (dict(n=32769, N=4), "takes 1 to 32768 places and pages of a row; got 32769 and 4"),
            (dict(N=4097), "takes 1 to 4096 places and pages of a row; got 8 and 4097"),
            (dict(B=0), "takes 1 to 4096 places"),
            (dict(n=32768, N=32768), "bytes of shared memory"),
        ],
    ),
    "hot_load": Case(
        hot_rows,
        [
            (dict(dtype=jnp.float16), "reads the dtype of the store, bfloat16; got float16"),
            (dict(D=4), "parts of a multiple of 16 bytes; got 8"),
            (dict(P=0), "at least one row"),
        ],
    ),
    "hot_load_float8": Case(
        hot_codes,
        [
            (
                dict(dtype=jnp.int8),
                "bytes for keys in bfloat16, float16, float32; got uint8 for int8",
            ),
            (dict(D=8), "parts of a multiple of 16 bytes; got 8"),
            (dict(P=0), "at least one row"),
        ],
    ),
    "delta_step": Case(
        delta_step,
        [
            (dict(T=2), "one token a row; got 2"),
            (dict(dtype=jnp.float16), "bfloat16 or float32; got float16 after float16"),
            (dict(new=jnp.float32), "bfloat16 or float32; got float32 after bfloat16"),
            (dict(Dk=32), "keys of 64, 128, 192 or 256 channels; got 32"),
            (dict(Dv=48), "values of a multiple of 32 channels; got 48"),
            (dict(P=16), "32 tokens beside the state; got 16"),
            (dict(B=0), "at least one row"),
        ],
    ),
    "delta_rule": Case(
        delta_rule,
        [
            (dict(dtype=jnp.float32), "multiplies in bfloat16; got float32"),
            (dict(Dk=64), "heads of 128 channels; got 64 and 128"),
            (dict(T=0), "at least one row and token"),
        ],
    ),
    "put_token": Case(
        tokens,
        [
            (dict(D=12), "heads of a multiple of 16 bytes; got 24"),
            (
                dict(other=jnp.float16),
                "zones of one dtype; got bfloat16, bfloat16, float16, float16",
            ),
            (dict(slots=0), "at least one row and slot"),
        ],
    ),
    "put_tokens": Case(
        several_tokens,
        [
            (dict(D=12), "heads of a multiple of 16 bytes; got 24"),
            (dict(T=0), "at least one row and slot"),
        ],
    ),
}
