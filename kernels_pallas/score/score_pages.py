"""Scores of pages by the bounding boxes of their keys, for all query heads of a group at once.

score = q+ . high + q- . low, where q+ is the positive and q- the negative part of the query.
Both products run on `mma` with 16 pages as rows and 8 heads as columns. Each lane loads 16
bytes of a box corner at a time. The order of channels does not matter as long as corners and
queries share it, so loaded words are multiplied as they are, without shared memory. Queries in
the dtype of the corners are not rounded; sums are f32.

**Bytes:** 2 D e read and 4 G written a page and KV head, where e is the size of a corner's
element.

**Bound:** memory.

**Limits:** `unsupported`. Evidence: `benchmarks/NOTES.md`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.kernels_pallas import simt, tuned
from kvjax.kernels_pallas.simt import Word, instr, loop, ptx, real, when, word

MEASURED: str | None = "2026-11-21"  # the date in benchmarks/results/score_pages.json
TILE = 16  # pages: the rows of a product
HEADS = 8


@dataclass(frozen=True)
class Config:
    tiles: int = 1  # of a warp
    warpgroups: int = 1  # of a block
    columns: int = 1  # products of `HEADS` heads that a warp makes of a tile, at most

    def __post_init__(self) -> None:
        if self.tiles < 1 or self.warpgroups not in (1, 2, 4):
            raise ValueError(f"tiles must be at least 1, warpgroups 1, 2 or 4; got {self}")
        if self.columns < 1:
            raise ValueError(f"columns must be at least 1; got {self.columns}")


def parts(G: int, config: Config) -> int:
    """Warps that share the heads of a tile."""
    return -(-G // (HEADS * config.columns))


def smem_bytes() -> int:
    return 0


def unsupported(q: Any, low: Any, high: Any, heads: int = 2 * HEADS) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them, of up
    to `heads` queries.
    """
    G, D = q.shape[2:]
    if D not in (64, 128, 256):
        return f"the kernel score_pages takes head sizes 64, 128 and 256; got D={D}"
    if not 1 <= G <= heads:
        return f"the kernel score_pages takes 1 to {heads} query heads a kv head; got G={G}"
    if (
        low.dtype not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
        or high.dtype != low.dtype
    ):
        return f"the kernel score_pages takes corners in bf16 or in f16; got {low.dtype} and {high.dtype}"
    if 0 in q.shape or not low.shape[2]:
        return f"the kernel score_pages takes at least one row and page; got q{list(q.shape)}, low{list(low.shape)}"
    return None


@simt.lowered_once("scale", "config")
def score_pages(
    q: Array, low: Array, high: Array, *, scale: float, config: Config | None = None
) -> Array:
    """f32[B, K, G, P]: scale * sum_i max(q_i low_i, q_i high_i) of q [B, K, G, D] and corners
    [B, K, P, D].
    """
    if limit := unsupported(q, low, high):
        raise NotImplementedError(limit)
    B, K, G, D = q.shape
    q = q.astype(low.dtype).reshape(B * K, G, D)
    corners = (a.reshape(B * K, *a.shape[2:]) for a in (low, high))
    config = config or tuned.select(
        "score_pages", Config(), (q, low), rows=B * K, P=low.shape[2], G=G, D=D
    )
    return _scores(scale, config, q, *corners).reshape(B, K, G, -1)


def _scores(scale: float, config: Config, q: Array, low: Array, high: Array) -> Array:
    rows, G, D = q.shape
    P = low.shape[1]
    kind = "bf16" if low.dtype == jnp.bfloat16 else "f16"
    warps = rows * -(-P // (TILE * config.tiles)) * parts(G, config)

    @simt.over_rows(functools.partial(_scores, scale, config))
    def run(q: Array, low: Array, high: Array) -> Array:
        return simt.kernel(
            functools.partial(
                program, shape=(rows, G, P, D), kind=kind, scale=scale, config=config
            ),
            name="kvjax_score_pages",
            out_type=jax.ShapeDtypeStruct((rows, G, P), jnp.float32),
            blocks=-(-warps // (4 * config.warpgroups)),
            warpgroups=config.warpgroups,
        )(q, low, high)

    return run(q, low, high)


def program(
    q_m: Any, low_m: Any, high_m: Any, out_m: Any, *, shape: tuple[int, int, int, int], kind: str, scale: float,
    config: Config, width: int | None = None, visit: Callable[..., None] | None = None, order: tuple[int, int] = (1, 1),
) -> None:  # fmt: skip
    """The kernel's body, with `width` scores per row and head; scores past P are arbitrary.
    Each tile calls visit(row, tile, pages, head, scores): a lane has two pages, and scores by
    head (this and the next) and page.

    A warp makes `config.columns` products of the corners that it loads; the warps of one tile
    are adjacent. With `order` = (K, T), queries are in memory as [B, T, K, G / T, D]."""
    rows, G, P, D = shape
    tiles = -(-P // TILE)
    width = width or P
    shares = parts(G, config)
    columns = -(-G // (HEADS * shares))
    batches = -(-tiles // config.tiles)
    t = simt.special("tid.x")
    lane = t & 31
    quad = lane >> 2
    col = lane & 3
    job = simt.special("ctaid.x") * (4 * config.warpgroups) + (t >> 5)
    last = rows * batches * shares - 1
    job = (job < last + 1).select(job, last)  # a spare warp repeats the last
    first_head = word(0)
    if shares > 1:
        tile_job = simt.divide(job, shares)
        job, first_head = tile_job, (job - tile_job * shares) * (HEADS * columns)
    row = simt.divide(job, batches)
    first = (job - row * batches) * config.tiles
    q, low, high, out = (simt.global_address(m) for m in (q_m, low_m, high_m, out_m))
    if order == (1, 1):
        q = simt.offset_rows(q, row, G * D * 2)
    low, high = (simt.offset_rows(a, row, P * D * 2) for a in (low, high))
    out = simt.offset_rows(out, row, G * width * 4)

    def load_queries(column: int) -> list[Word]:
        own = first_head + (quad + HEADS * column) if G > HEADS else quad
        place = (own < G).select(own, 0)
        if order != (1, 1):
            place = simt.swapped_row(row * G + place, *order, G // order[1])
        return [(own < G).select(w, 0) for w in channels(q, place, D)]

    def sides(words: Sequence[Word]) -> list[list[Word]]:
        """Positive and negative parts of queries."""
        return [[instr(f"{name}.{kind}x2", w, 0) for w in words] for name in ("max", "min")]

    queries = [load_queries(column) for column in range(columns)]
    # registers do not hold the parts of more columns
    both = [sides(queries[0])] if columns == 1 else []

    @loop(0, config.tiles, 1)
    def _tile(i: Word) -> None:
        pages = [(first + i) * TILE + quad + 8 * half for half in range(2)]
        within = [(page < P).select(page, P - 1) for page in pages]
        corners = [[channels(a, page, D) for page in within] for a in (high, low)]
        for column, words in enumerate(queries):
            acc = [word(0)] * 4
            two = both[column] if both else sides(words)
            for j in range(0, D // 8, 2):
                for (a, b), side in zip(corners, two, strict=True):
                    acc = simt.mma(kind, acc, [a[j], b[j], a[j + 1], b[j + 1]], side[j : j + 2])
            scores = [
                [instr("mul.f32", acc[e + 2 * half], real(scale)) for half in range(2)]
                for e in range(2)
            ]
            pair = first_head + (col * 2 + HEADS * column) if G > HEADS else col * 2
            for e in range(2):
                head = pair + e
                for half in range(2):
                    with when((head < G) & (pages[half] < width)):
                        at = simt.offset(
                            simt.offset_rows(out, head, width * 4), pages[half] * 4
                        )
                        ptx("st.global.u32 [$0], $1;", at, scores[e][half])
            if visit is not None:
                visit(row, first + i, pages, pair, scores)


def channels(address: Any, index: Word, D: int) -> list[Word]:
    """This lane's D/4 channels of a row of [..., D] 16-bit numbers: 8 of each 32."""
    at = simt.offset(simt.offset_rows(address, index, D * 2), (simt.special("tid.x") & 3) * 16)
    chunks = [f"ld.global.nc.v4.u32 {{$0, $1, $2, $3}}, [$4+{64 * v}];" for v in range(D // 32)]
    return [w for chunk in chunks for w in ptx(chunk, at, results=4)]
