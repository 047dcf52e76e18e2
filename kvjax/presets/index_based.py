"""PQCache, MagicPIG and ShadowKV: centroids, means or a basis of the keys, learnt from earlier
tokens of a row.

The papers learn from the whole prompt; here the result does not depend on how a prompt is split
into chunks.
"""

from __future__ import annotations

from kvjax.numerics.selection import GroupReduce
from kvjax.policies import OutlierRetrieval, PerLayer, Retrieval, Sampled
from kvjax.policies.short import DenseCapacity
from kvjax.presets.settings import Layers, capacity_of, history, over_layers, plain_rope
from kvjax.selectors import MeanPages, ProductCodes
from kvjax.selectors.simhash import SimHash
from kvjax.spec import require_int
from kvjax.stores import Dense, HostOffload, LowRank, Store
from kvjax.stores.demotion import Fifo


def pqcache(
    budget: int = 1024,
    *,
    parts: int = 2,
    bits: int = 6,
    learn: int = 1024,
    group_reduce: GroupReduce = "sum_softmax",
    sink: int = 4,
    local: int = 64,
    chunk: int | None = None,
    store: Store | str = "device",
    layers: Layers = Layers(dense=0),
) -> PerLayer:
    """PQCache: every token is kept, and a step attends to the `budget` tokens whose
    product-quantised keys score best.

    A code names the nearest of the centroids that k-means found among a block of `learn`
    tokens. Tokens compete by their exact scores until they are encoded.

    Args:
      parts: parts of a key, each with a code.
      bits: bits of a part's code.
      learn: tokens that share centroids, which are learnt from them.
      chunk: tokens encoded together: a multiple of `learn`, times the devices of a context
        axis. None: `learn`.

    **Source:** PQCache (Zhang et al. 2024, arXiv 2407.12820). **Differs:** see `ProductCodes`.
    The budget counts sink and local window: 4 and 64 tokens here, 32 and half of the budget in
    the released code. The paper keeps keys and values in host memory with a cache of blocks on
    the device; here that is store="host", without the cache.

    **Checklist:** unit: tokens, for each KV head; besides: sink and window; zones: sink 4,
    window 64; budget: every token that a step reads; generated: compete by exact scores until a
    block of 1024 has its centroids.
    """
    require_int("pqcache(budget=...)", budget, at_least=1)
    policy = Retrieval(
        selector=ProductCodes(parts=parts, bits=bits, learn=learn, group_reduce=group_reduce),
        store=history("pqcache", store),
        budget=budget,
        sink=sink,
        local=local,
        demote=Fifo(leave=learn if chunk is None else chunk),
    )
    return over_layers("pqcache", layers, policy)


def magicpig(
    budget: int = 2048,
    *,
    bits: int = 10,
    tables: int = 150,
    least: int = 2,
    sink: int = 4,
    local: int = 64,
    chunk: int = 256,
    seed: int = 0,
    store: Store | str = "device",
    dense_capacity: DenseCapacity = "auto",
    layers: Layers = Layers(dense=1),
) -> PerLayer:
    """MagicPIG: every token is kept; a step estimates attention from tokens whose hashes
    collide with the query's.

    Each query head samples the keys that share its hash in enough tables, and weights them by
    the inverse of their sampling probability. The sink and the recent block of up to `local` +
    `chunk` tokens are attended exactly; the budget counts them.

    Args:
      bits: bits of a hash.
      tables: hash tables.
      least: tables in which a key must collide with the query.
      chunk: tokens that are hashed together; at most this many are pending.
      seed: seed of the random directions.

    **Source:** MagicPIG (Chen et al. 2024, arXiv 2410.16179): 10 bits, 150 tables, 2
    collisions, sink 4, local 64. **Differs:** see `Sampled` and `SimHash`. The paper keeps
    layers 0 and 16 of 32 dense; here the first are. Hashes are on the device; the paper's are
    in host memory.

    **Checklist:** unit: tokens, sampled for each query head; besides: sink, window and pending
    tokens; zones: sink 4, window 64; budget: these and the sample, which it bounds; generated:
    attended exactly until a chunk of 256 is hashed.
    """
    require_int("magicpig(budget=...)", budget, at_least=1)
    policy = Sampled(
        hashing=SimHash(bits=bits, tables=tables, least=least, learn=chunk, seed=seed),
        store=history("magicpig", store),
        budget=budget,
        sink=sink,
        local=local,
        demote=Fifo(leave=chunk),
        dense_capacity=capacity_of(dense_capacity, store, layers),
    )
    return over_layers("magicpig", layers, policy)


def shadowkv(
    budget: int = 2048,
    *,
    rank: int = 160,
    page: int = 8,
    outliers: int = 48,
    rope_theta: float | None = None,
    learn: int = 1024,
    group_reduce: GroupReduce = "max_softmax",
    sink: int = 4,
    local: int = 32,
    host: bool = True,
    layers: Layers = Layers(dense=0),
) -> PerLayer:
    """ShadowKV: keys as low-rank factors, values in host memory, and a step reads the pages
    with the best landmarks.

    The landmark of a page is the mean of its keys. Keys of selected pages are rebuilt from
    their factors, and their values come from host memory. The budget counts the outliers. Keys
    after RoPE are not of low rank and lose much more precision: pass `rope_theta`.

    Args:
      rank: coefficients of a token's keys, for all heads together.
      outliers: pages whose keys are farthest from their landmark; kept exact on the device and
        read by every step.
      rope_theta: theta of a model with plain RoPE: keys are then factored before their
        rotation, as in the paper. For other kinds of RoPE see `LowRank(rope=...)`.
      learn: number of first tokens from which the basis is learnt; also the tokens that are
        factored together.
      host: keep values in host memory; False: on the device.

    **Source:** ShadowKV (Sun et al. 2024, arXiv 2410.21465): rank 160, pages of 8, 48 outliers.
    **Differs:** see `LowRank`. The paper has no sink, and its budget counts neither outliers
    nor local window: its 1024 tokens are 1024 + 8 x 24 + 32 here, with outliers=24 and sink=0,
    as its released code has 24 outliers per 1024 tokens.

    **Checklist:** unit: pages of 8, for each KV head; besides: sink, window and 48 pages of
    outliers; zones: sink 4, window 32; budget: these and the selected pages; generated: compete
    by exact scores until a block of 1024 is factored.
    """
    require_int("shadowkv(budget=...)", budget, at_least=1)
    values = HostOffload(page=page) if host else Dense()
    policy = OutlierRetrieval(
        selector=MeanPages(page=page, group_reduce=group_reduce),
        store=LowRank(
            rank=rank,
            page=page,
            outliers=outliers,
            learn=learn,
            rope=plain_rope("shadowkv", rope_theta),
            values=values,
        ),
        budget=budget,
        sink=sink,
        local=local,
        demote=Fifo(leave=learn),
    )
    return over_layers("shadowkv", layers, policy)
