"""Votes for keys by the sign patterns of their subspaces, for all query heads of a group at
once.

**Ranks** say how many votes each of the 256 patterns of a subspace earns. Opposite patterns
have opposite scores, so 16 lanes sort 128 scores and sum the counts. Each block ranks all
subspaces of its row, unless G D/8 exceeds 32 and rows are few: then a separate kernel does.

**Votes** are looked up in shared memory by `parts` blocks a row. One word holds the votes of 4
heads as bytes. Lanes start at different subspaces, in separate banks.

**Bytes:** D/8 read and G written per key and KV head; 1 KiB of counts per subspace and KV head.

**Bound:** memory, then shared memory.

**Limits:** scores that differ only by rounding may rank unlike the reference; a NaN query gets
arbitrary votes. Evidence: `benchmarks/NOTES.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.kernels_pallas import simt, tuned
from kvjax.kernels_pallas.simt import Word, instr, loop, ptx, when, word
from kvjax.kernels_pallas.vote.ranks import (
    MAX_KEYS,
    PATTERNS,
    PITCH,
    Ranks,
    Sizes,
    rank_scratch,
)

MEASURED: str | None = "2026-11-22"  # the date in benchmarks/results/collide.json
HEADS = 8  # two words, with a byte per head


@dataclass(frozen=True)
class Config:
    parts: int = 16  # blocks of a row
    warpgroups: int = 4  # of each
    keys: int = 4  # that a thread has at once
    stages: int = 2  # times as many in flight
    apart: int = 0  # 1: a separate kernel finds the ranks, with a block per subspace

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise ValueError(f"parts must be at least 1; got {self.parts}")
        if self.warpgroups not in (1, 2, 4, 8):
            raise ValueError(f"warpgroups must be 1, 2, 4 or 8; got {self.warpgroups}")
        if self.keys not in (1, 2, 4):
            raise ValueError(f"keys must be 1, 2 or 4, as registers hold; got {self.keys}")
        if self.stages < 1:
            raise ValueError(f"stages must be at least 1; got {self.stages}")
        if self.apart not in (0, 1):
            raise ValueError(f"apart must be 0 or 1; got {self.apart}")


def config_for(
    rows: int, S: int, G: int = 1, D: int = 128, target: simt.Target | None = None
) -> Config:
    """A block per multiprocessor, with at least one key per thread. Each block of a row ranks
    all of its subspaces, unless there are many blocks and that is much of their work. Fewer
    keys in flight where shared memory is small."""
    target = target or simt.target()
    parts = max(1, min(target.multiprocessors // rows, -(-S // 512)))
    if G * D > 256 and parts >= 16:
        config = Config(parts, keys=1 if parts * 512 >= S else 2, stages=4, apart=1)
    else:
        config = Config(
            parts, keys=next((n for n in (1, 2) if parts * 512 * n >= S), 4), stages=2
        )
    smaller = (
        config,
        *(
            replace(config, keys=k, stages=n)
            for k, n in ((2, 2), (1, 2), (1, 1))
            if k <= config.keys
        ),
    )
    return next((x for x in smaller if smem_bytes(G, D // 8, x) <= target.smem), smaller[-1])


def scratch(G: int, N: int, config: Config) -> list[int]:
    """Words of the table; if blocks find the ranks, of what patterns earn, queries and limits
    (the counts are where the table will be); and of the keys' patterns in flight."""
    ring = 128 * config.warpgroups * config.keys * config.stages * N // 4
    return [32 * PATTERNS, *(() if config.apart else rank_scratch(G, N, N)), ring]


def smem_bytes(G: int, N: int, config: Config) -> int:
    return 4 * sum(-(-words // 256) * 256 for words in scratch(G, N, config))


def unsupported(q: Any, ids: Any, counts: Any, limits: Any) -> str | None:
    """The limit that these shapes and dtypes exceed; None if there is a kernel for them."""
    *_, G, D = q.shape
    S, N = ids.shape[2:]
    if D not in (64, 128) or N * 8 != D:
        return f"the kernel collide takes head sizes 64 and 128 in subspaces of 8; got D={D} in {N}"
    if not 1 <= G <= HEADS:
        return f"the kernel collide takes 1 to {HEADS} query heads a kv head; got G={G}"
    if not 4 <= S < MAX_KEYS or S % 4:
        return f"the kernel collide takes a multiple of 4 keys, less than 2^24; got {S}"
    if not 1 <= limits.shape[1] <= 255 // N:
        return (
            f"the kernel collide takes 1 to {255 // N} limits for D={D}; got {limits.shape[1]}"
        )
    if counts.dtype != jnp.int32 or limits.dtype != jnp.int32:
        return f"the kernel collide takes counts and limits in i32; got {counts.dtype} and {limits.dtype}"
    if 0 in q.shape:
        return f"the kernel collide takes at least one row; got q{list(q.shape)}"
    return None


def too_large(G: int, N: int, target: simt.Target, config: Config) -> str | None:
    size = smem_bytes(G, N, config)
    return (
        f"{size} bytes of shared memory, more than {target.smem}"
        if size > target.smem
        else None
    )


@simt.lowered_once("turned", "config")
def collide(
    q: Array,
    ids: Array,
    counts: Array,
    limits: Array,
    *,
    turned: int | None = None,
    config: Config | None = None,
) -> Array:
    """u8[B, K, G, S] votes, of q [B, K, G, D], ids u8[B, K, S, D/8], counts i32[B, K, D/8,
    256], limits i32[B, T].

    With `turned`, the bits of channels as in `rotate.turned`, q is rotated first.
    """
    if limit := unsupported(q, ids, counts, limits):
        raise NotImplementedError(limit)
    B, K, G, D = q.shape
    S, N = ids.shape[2:]
    target = simt.target((q, ids))
    limit_of = partial(too_large, G, N, target)
    config = config or tuned.select(
        "collide",
        config_for(B * K, S, G, D, target),
        (q, ids),
        limit_of,
        rows=B * K,
        S=S,
        G=G,
        D=D,
    )
    if limit := limit_of(config):
        raise NotImplementedError(f"the kernel collide cannot take {config}: {limit}")
    args = (
        *(a.reshape(B * K, *a.shape[2:]) for a in (q.astype(jnp.float32), ids, counts)),
        limits,
    )
    return _votes(turned, config, *args).reshape(B, K, G, S)


def _votes(
    turned: int | None, config: Config, q: Array, ids: Array, counts: Array, limits: Array
) -> Array:
    rows, S, N = ids.shape
    G = q.shape[1]
    B, T = limits.shape

    @simt.over_rows(partial(_votes, turned, config))
    def run(q: Array, ids: Array, counts: Array, limits: Array) -> Array:
        of_query = [q, counts, limits]
        sizes = (rows // B, G, N, T)
        if config.apart:
            rank = simt.kernel(
                partial(_rank, sizes=sizes, turned=turned),
                name="kvjax_collide_rank",
                out_type=jax.ShapeDtypeStruct((rows, -(-G // 4), N, PATTERNS), jnp.uint32),
                scratch=(PATTERNS, *rank_scratch(G, N, 1)),
                blocks=rows * N,
                warpgroups=-(-G // 4),  # a warp per head
            )
            of_query = [rank(*of_query)]
        return simt.kernel(
            partial(_vote, sizes=sizes, S=S, turned=turned, config=config),
            name="kvjax_collide",
            out_type=jax.ShapeDtypeStruct((rows, G, S), jnp.uint8),
            scratch=tuple(scratch(G, N, config)),
            blocks=rows * config.parts,
            warpgroups=config.warpgroups,
        )(ids, *of_query)

    return run(q, ids, counts, limits)


def _rank(
    q_m, counts_m, limits_m, out_m, numbers_m, earned_m, queries_m, *, sizes: Sizes, turned: int | None
) -> None:  # fmt: skip
    """The kernel that ranks: the votes that each pattern of a subspace earns, packed in words."""
    _, G, N, _ = sizes
    block = simt.special("ctaid.x")
    t = simt.special("tid.x")
    row = simt.divide(block, N)
    n = block - row * N
    earned = simt.shared_address(earned_m)
    ranks = Ranks(
        (q_m, counts_m, limits_m),
        (numbers_m, earned_m, queries_m),
        row,
        n,
        1,
        sizes,
        turned,
        -(-G // 4),
    )
    simt.block_barrier()
    ranks.find()
    width = -(-G // 4)
    out = simt.offset_rows(simt.global_address(out_m), row, width * N * PATTERNS * 4)

    @loop(t * 4, width * PATTERNS, width * 128 * 4)
    def _write(i: Word) -> None:
        w = i >> 8
        pattern = i & (PATTERNS - 1)
        four = simt.load_shared(earned + (w * PITCH + pattern) * 4, 4)
        at = simt.offset(out, ((w * N + n) * PATTERNS + pattern) * 4)
        ptx("st.global.v4.u32 [$0], {$1, $2, $3, $4};", at, *four)


def _vote(*refs, sizes: Sizes, S: int, turned: int | None, config: Config) -> None:
    """The votes for the keys of a block."""
    n = 3 if config.apart else 5
    ids_m, *of_query, out_m = refs[:n]
    table_m, *of_ranks, ring_m = refs[n:]
    _, G, N, _ = sizes
    block = simt.special("ctaid.x")
    row = simt.divide(block, config.parts)
    part = block - row * config.parts
    size = -(-S // (config.parts * 32)) * 32  # keys of a block
    start = part * size
    stop = (part + 1) * size
    stop = (stop < S).select(stop, S)
    ids = simt.global_address(ids_m)
    out = simt.global_address(out_m)
    places = simt.shared_address(table_m)
    votes = _Votes(
        simt.offset_rows(ids, row, S * N),
        simt.shared_address(ring_m),
        places,
        start,
        stop,
        G,
        S,
        N,
        config,
    )
    table = _Table(places, G, N, config)

    # All threads issue the loads of a query before any thread issues those of patterns, so that
    # they do not wait for these. Ranks of another kernel would also wait for the patterns of
    # other blocks, so only one turn of patterns is begun before.
    turns = 1 if config.apart else config.stages
    if config.apart:
        earned = simt.offset_rows(
            simt.global_address(*of_query), row, -(-G // 4) * N * PATTERNS * 4
        )
        found = table.load(lambda at: simt.offset(earned, at * 4), PATTERNS, "global.nc")
        simt.block_barrier()
        votes.begin(0, turns)
    else:
        ranks = Ranks(
            of_query, (table_m, *of_ranks), row, word(0), N, sizes, turned, config.warpgroups
        )
        simt.block_barrier()
        votes.begin(0, turns)
        ranks.find()
        earned = simt.shared_address(of_ranks[0])
        found = table.load(lambda at: earned + at * 4, PITCH, "shared")
    table.store(found)
    votes.begin(turns, config.stages)
    simt.block_barrier()
    votes.count(simt.offset_rows(out, row, G * S))


class _Table:
    """The votes that patterns earn, as table[pattern][copy, subspace, word]."""

    def __init__(self, table: Word, G: int, N: int, config: Config):
        self.table = table
        self.N = N
        self.width = -(-G // 4)
        self.t = simt.special("tid.x")
        self.words = N * self.width
        self.which = self.t & (self.words - 1)
        step = 128 * config.warpgroups // self.words  # fours of patterns at once
        self.fours = [
            simt.divide(self.t, self.words) + i for i in range(0, PATTERNS // 4, step)
        ]

    def load(self, place: Callable[[Word], Any], pitch: int, space: str) -> list[list[Word]]:
        """Words of some fours of patterns, from place([word, subspace, pattern]), with `pitch`
        words per subspace.
        """
        n = simt.divide(self.which, self.width)
        first = ((self.which - n * self.width) * self.N + n) * pitch
        load = f"ld.{space}.v4.u32 {{$0, $1, $2, $3}}, [$4];"
        final = PATTERNS // 4 - 1
        return [
            ptx(load, place(first + (i < final).select(i, final) * 4), results=4)
            for i in self.fours
        ]

    def store(self, found: Sequence[Sequence[Word]]) -> None:
        copies = 32 // self.words
        # So that all lanes store to banks of their own.
        first_copy = simt.divide(self.t & 31, self.words)
        for i, patterns in zip(self.fours, found, strict=True):
            with when(i < PATTERNS // 4):
                for copy in range(copies):
                    at = ((first_copy + copy) & (copies - 1)) * self.words + self.which
                    for j, x in enumerate(patterns):
                        ptx(
                            f"st.shared.u32 [$0+{j * 128}], $1;",
                            self.table + i * 512 + at * 4,
                            x,
                        )


class _Votes:
    """Adds up the votes that the patterns of a block's keys earn."""

    def __init__(
        self,
        ids: Any,
        ring: Word,
        table: Word,
        start: Word,
        stop: Word,
        G: int,
        S: int,
        N: int,
        config: Config,
    ):
        self.ids = ids
        self.ring = ring
        self.table = table
        self.start = start
        self.stop = stop
        self.G = G
        self.S = S
        self.N = N
        self.config = config
        self.threads = 128 * config.warpgroups
        self.width = -(-G // 4)
        self.turn = self.threads * config.keys  # keys of a turn

    def _mine(self) -> tuple[Word, list[Word], Word]:
        """This thread's key among those of all, its order of the words of a pattern, and its
        copy of the table.

        Lanes 4 m .. 4 m + 3 have 4 adjacent keys.

        In this order, lanes use all banks of the ring and of the table; a load of two words
        serves one half of the lanes after the other.
        """
        t = simt.special("tid.x")
        by_4 = self.N // 4
        lane = t & 31
        above = lane >> 2
        copies = 32 // (self.N * self.width)
        if self.width == 1:
            begin = simt.divide(lane, 128 // self.N)
            copy = above & (copies - 1)
            key = lane
        else:
            begin = above & (by_4 - 1)
            copy = simt.divide(above, by_4) & (copies - 1)
            key = (lane & 3) + (simt.divide(above, by_4) << 2) + begin * (32 // by_4)
        return t - lane + key, [(begin + i) & (by_4 - 1) for i in range(by_4)], copy

    def _fetch(self, first: Word, slot: Word | int) -> None:
        """Starts to copy the patterns of this thread's keys of a turn to a slot of the ring."""
        mine = self._mine()[0]
        for i in range(self.config.keys):
            key = first + mine + i * self.threads
            exists = key < self.stop
            at = simt.offset(self.ids, exists.select(key, 0) * self.N)
            to = self.ring + slot + mine * self.N + i * self.threads * self.N
            how = "cg" if self.N == 16 else "ca"
            ptx(
                f"cp.async.{how}.shared.global [$0], [$1], {self.N}, $2;",
                to,
                at,
                exists.select(self.N, 0),
            )
        ptx("cp.async.commit_group;")

    def begin(self, first: int, stop: int) -> None:
        """Starts to copy the patterns of the turns first .. stop, the earliest ones first."""
        for i in range(first, stop):
            self._fetch(self.start + i * self.turn, i * self.turn * self.N)

    def count(self, out: Any) -> None:
        """Writes the votes of the block's keys, once the table is complete and copies of
        `stages` turns have begun.
        """
        G = self.G
        N = self.N
        threads = self.threads
        width = self.width
        keys = self.config.keys
        stages = self.config.stages
        mine, order, copy = self._mine()
        lane = simt.special("laneid")
        # 128 in the byte that is taken.
        takes = [word(128) << (((lane + j) & 3) << 3) for j in range(4)]
        places = [
            [self.table + (copy * N + i * 4 + ((lane + j) & 3)) * (4 * width) for j in range(4)]
            for i in order
        ]
        words = [self.ring + mine * N + i * 4 for i in order]

        def of_key(number: int, slot: Word) -> list[Word]:
            """The votes of a key, a byte per head."""
            sums = [word(0)] * width
            for at, of_bytes in zip(words, places, strict=True):
                x = ptx(f"ld.shared.u32 $0, [$1+{number * threads * N}];", at + slot, results=1)
                for take, place in zip(takes, of_bytes, strict=True):
                    found = instr("dp4a.u32.u32", x, take, place)  # place + 128 * byte
                    got = (
                        [simt.load_shared(found)] if width == 1 else simt.load_shared(found, 2)
                    )
                    sums = [a + b for a, b in zip(sums, got, strict=True)]
            return sums

        # A word has bytes of `heads` heads for each of `joined` keys; lane m of 4 stores byte m
        # of all four.
        heads = min(G, 4)
        joined = min(keys, 4 // heads) if heads in (1, 2, 4) else 1
        m = lane & 3
        swaps = ((m & 1).equals(0).select(0x6240, 0x3715), (m < 2).select(0x5410, 0x3276))
        which = simt.divide(m, heads)  # of the keys joined
        mover = which * threads + mine - m
        head = m - which * heads
        outs = [
            simt.offset(simt.offset_rows(out, head + 4 * w, self.S), mover)
            for w in range(width)
        ]
        stores = [(which < joined) & (head + 4 * w < G) for w in range(width)]
        slot_bytes = self.turn * N

        @loop(self.start, self.stop, self.turn, [word(0)])
        def _turn(first: Word, slot: Word) -> Word:
            ptx(f"cp.async.wait_group {stages - 1};")
            for i in range(0, keys, joined):
                sums = [word(0)] * width
                for j in range(joined):
                    more = of_key(i + j, slot)
                    sums = [
                        a + (b << (8 * heads * j)) if j else b
                        for a, b in zip(sums, more, strict=True)
                    ]
                key = first + i * threads
                for x, to, mask in zip(sums, outs, stores, strict=True):
                    for gap, swap in zip((1, 2), swaps, strict=True):
                        x = ptx(
                            "prmt.b32 $0, $1, $2, $3;", x, simt.bfly(x, gap), swap, results=1
                        )
                    with when(mask & (key + mover < self.stop)):
                        ptx("st.global.b32 [$0], $1;", simt.offset(to, key), x)
            self._fetch(first + stages * self.turn, slot)
            return slot.equals((stages - 1) * slot_bytes).select(0, slot + slot_bytes)

        ptx("cp.async.wait_group 0;")
