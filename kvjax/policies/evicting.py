"""Caches with a fixed number of slots: once they are full, each new token evicts one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.tree_util import register_dataclass

from kvjax import ops
from kvjax.evictors import Evictor
from kvjax.evictors.base import Tokens
from kvjax.memory import vary_with
from kvjax.numerics.blocks import Block, empty_block, put_last, where_rows, write
from kvjax.numerics.derivatives import with_derivative
from kvjax.numerics.partial import (
    Logits,
    PartialAttention,
    Span,
    attend_part,
    keep_valid,
    merge,
    merge_sinks,
)
from kvjax.numerics.rotate import turn_positions
from kvjax.numerics.selection import Selection
from kvjax.numerics.types import Rope
from kvjax.ops.chunk import attend_own, attend_zone, takes_cudnn
from kvjax.policies.policy import Info, Policy, Step, chunk_starts, lowest_visible
from kvjax.spec import CacheSpec, keep_ints
from kvjax.validation import check_verbs

QUERIES = 128  # queries of a prompt whose weights are in memory at a time
PARTS = 4  # of a prompt's voters; each is compared with the keys up to its own last query only
NEVER = np.iinfo(np.int32).max  # after all positions
SLOTS = 1024  # slots that a chunk of a prompt attends to at a time


@register_dataclass
@dataclass(frozen=True)
class EvictingState:
    """The tokens that each KV head holds, in any order, with their positions and evidence.

    Slots fill in order of arrival. Later a new token takes the slot of an evicted one.
    """

    tokens: Block  # [B, K, S, D]
    position: Array  # i32[B, K, S] of each token
    # f32[B, K, S] what the evictor knows of each token; None if it keeps no evidence
    evidence: Array | None
    length: Array  # i32[B] tokens received, which is the position of the next one
    # bool[B] a token was stored whose query the evictor has not seen yet; None if it sees none
    due: Array | None
    # f32[B, K, G, n, D] what the evictor remembers of queries; None if it remembers none
    memory: Array | None
    # bool[B, K, S] tokens of prompts, which are kept beside the budget; None: they compete
    pinned: Array | None
    # dtype[B, K, S, D] keys as they came, of which those of `tokens` are turned to their places;
    # None: those of `tokens` are as they came
    keys: Array | None

    @property
    def overflow(self) -> Array:
        """bool[B]: always false, because there is room for every token."""
        return jnp.zeros_like(self.length, bool)


class Voters(NamedTuple):
    """The n queries of a prompt whose weights are evidence."""

    at: Array  # i32[B, n] their places in the chunk; below 0 for none
    is_voter: Array  # bool[B, n] the others are padding
    block: int  # queries whose weights are computed at a time, which divides n
    are_all: bool  # all queries of the prompt vote
    stands_for: Array | None  # f32[B] queries of which each is a sample; None: it is none


class Shrink(NamedTuple):
    """Rows that keep fewer tokens than they have slots."""

    rows: Array  # bool[B] the others stay as they are
    most: Array  # i32[B] tokens that each of these rows keeps


class Line(NamedTuple):
    """L = S + T tokens in order of position: empty slots, held tokens, those of a chunk, and
    its padding.
    """

    source: Array  # i32[B, K, L] the slot of each, or S + its place in the chunk
    position: Array  # i32[B, K, L] -1 where there is no token
    evidence: Array | None  # f32[B, K, L]
    pinned: Array | None  # bool[B, K, L]
    k: Array  # dtype[B, K, L, D] by slot and place in the chunk, not in order
    v: Array  # dtype[B, K, L, D] as k

    def tokens(self, place: Array) -> tuple[Array, Array]:
        """Keys and values [B, K, X, D] at places i32[B, K, X] of the line."""
        source = jnp.take_along_axis(self.source, place, axis=-1)[..., None]
        k = jnp.take_along_axis(self.k, source, axis=2)
        return k, jnp.take_along_axis(self.v, source, axis=2)


@dataclass(frozen=True, kw_only=True)
class Evicting(Policy):
    """Keeps at most `budget` tokens per KV head and attends to all of them; the `evictor` says
    which one to evict.

    When all slots are full, a new token takes the slot of an evicted one before its query
    attends, so a step reads `budget` tokens, its own included. The spec's capacity costs no
    further memory, and a row may receive more tokens than that; `length` counts all of them.
    Keys keep their original positions.

    A chunk of a prompt attends exactly to itself and to the tokens kept from the chunks before
    it; then all tokens beyond the budget are evicted at once. A prompt in one chunk is thus
    evicted once, as in the papers. In a model with a sliding window, a token outside of the
    window keeps its slot until it is evicted.

    With `every` above 1 that many tokens are evicted at once, when all slots are full, which an
    evictor that compares tokens needs: otherwise each step compares all of them. With `rope`,
    the rotary embedding of the model, tokens that are left close up at each eviction: their
    keys are rotated to their places among the held ones, and the query to the place after them.
    Keys are then held twice, as they came and rotated, so that each is rounded once however
    often it moves.
    `kvjax.contrib.raas.BesidePrompt` keeps the tokens of prompts too.
    """

    evictor: Evictor
    budget: int = 1024  # tokens kept and attended
    every: int = 1  # tokens that are evicted at once
    rope: Rope | None = None
    evicts_several: ClassVar[bool] = True
    """True if `every` may exceed 1, and evictors may remember queries."""

    observes = True
    takes_sinks = True

    def __post_init__(self) -> None:
        keep_ints(self, budget=1)
        check_verbs(
            "Evicting(evictor=...)",
            self.evictor,
            "an evictor",
            ("check", "score"),
            "kvjax.evictors.Sliding()",
        )
        self.evictor.check(self.budget)
        keep_ints(self, every=1)
        if self.every >= self.budget and self.every > 1:
            raise ValueError(
                f"Evicting(every={self.every}) must be below budget={self.budget}, which it would empty"
            )
        if not self.evicts_several and (self.every > 1 or self._remembers_queries):
            raise ValueError(
                f"{type(self).__name__} evicts one token at a time, by evidence; use every=1 and an evictor such as "
                f"kvjax.HeavyHitter() instead of {self.evictor}"
            )
        changes_update = type(self).update is not Evicting.update
        knows_step = type(self).update_for_step is not Evicting.update_for_step
        if changes_update and not knows_step and self._remembers_queries:
            raise ValueError(
                f"{type(self).__name__} changes update, which does not get the step by which {self.evictor} evicts; "
                "change update_for_step instead"
            )
        if self.rope is not None and (
            self.every == 1 or getattr(self.evictor, "rope", None) is not None
        ):
            raise ValueError(
                f"Evicting(rope=...) rotates keys at each eviction, which {self.evictor} with every={self.every} "
                "does not allow; use every=64 and an evictor without rope"
            )

    def init(self, spec: CacheSpec) -> EvictingState:
        slots = self._slots(spec)
        n = self.evictor.remembers(spec.head_dim)
        memory = (spec.batch, spec.kv_heads, spec.group, n, spec.head_dim)
        shape = (spec.batch, spec.kv_heads, slots)
        return EvictingState(
            tokens=empty_block(spec, slots),
            position=jnp.zeros(shape, jnp.int32),
            evidence=jnp.zeros(shape, jnp.float32) if self.evictor.keeps_evidence else None,
            length=jnp.zeros(spec.batch, jnp.int32),
            due=jnp.zeros(spec.batch, bool) if self._needs_queries else None,
            memory=jnp.zeros(memory, jnp.float32) if n else None,
            pinned=None,
            keys=None if self.rope is None else empty_block(spec, slots).k,
        )

    @property
    def _remembers_queries(self) -> bool:
        # How many it remembers may depend on the head size, but not whether: any will do.
        return self.evictor.remembers(8) > 0

    @property
    def _needs_queries(self) -> bool:
        return self.evictor.arrival is not None or self._remembers_queries

    # ----------------------------------------------------------------------------------------------------------- steps

    def update(self, st: EvictingState, k: Array, v: Array, active: Array) -> EvictingState:
        """Stores a token without its step. Raises ValueError for an evictor that remembers
        queries, which evicts by how they attend.
        """
        if st.memory is not None:
            raise ValueError(
                f"{self.evictor} evicts by how queries attend; call kvjax.attention, kvjax.update or update_for_step"
            )
        return self._store(st, k, v, active, None)

    def update_for_step(
        self, st: EvictingState, k: Array, v: Array, active: Array, step: Step
    ) -> EvictingState:
        if st.memory is None:
            return self.update(st, k, v, active)
        return self._store(st, k, v, active, step)

    def _store(
        self, st: EvictingState, k: Array, v: Array, active: Array, step: Step | None
    ) -> EvictingState:
        # Several tokens leave a full row now; a single one leaves as its slot is taken below.
        if self.every > 1:
            full = active & (st.tokens.count >= self._limit(st))
            if self.rope is None:
                st = self._make_room(st, full, step)
            else:
                st = lax.cond(
                    jnp.any(full), lambda st: self._close_up(st, full, step), lambda st: st, st
                )
        came = k
        if self.rope is not None:  # to its place after the held tokens
            by = jnp.broadcast_to((st.tokens.count - st.length)[:, None, None], k.shape[:-1])
            k = turn_positions(k, by, self.rope).astype(k.dtype)
        B, K, S = st.position.shape
        added = active.astype(jnp.int32)
        # Only the new length is read below: XLA would copy the old one if both were.
        length = st.length + added
        slot = self._slot(st, length, step)

        # A KV head is a row of its own here, whose count is the slot to write: out of range, it
        # writes nothing. No row overflows: `at < 0` is false for all.
        at = jnp.where(active[:, None], slot, S).reshape(-1)
        in_range = at < S

        def by_head(a: Array) -> Array:
            return a.reshape(B * K, 1, -1, a.shape[3])

        rows = Block(by_head(st.tokens.k), by_head(st.tokens.v), at)
        (stored,), _ = ops.put_token([rows], by_head(k), by_head(v), in_range, at < 0)
        keys = st.keys
        if keys is not None:
            place = jnp.minimum(at, S - 1)
            written = write(by_head(keys), by_head(came), place, in_range.astype(jnp.int32))
            keys = written.reshape(keys.shape)

        # The slot's evidence is now that of the new token.
        is_slot = jnp.arange(S, dtype=jnp.int32)[None, None] == slot[..., None]
        taken = is_slot & active[:, None, None]
        evidence = st.evidence
        if evidence is not None:
            evidence = jnp.where(taken, self._arriving(k, v), evidence)
        return replace(
            st,
            tokens=Block(
                stored.k.reshape(st.tokens.k.shape),
                stored.v.reshape(st.tokens.v.shape),
                jnp.minimum(st.tokens.count + added, self._limit(st)),
            ),
            position=jnp.where(taken, length[:, None, None] - 1, st.position),
            evidence=evidence,
            pinned=None if st.pinned is None else st.pinned & ~taken,
            length=length,
            due=None if st.due is None else st.due | active,
            keys=keys,
        )

    def _make_room(self, st: EvictingState, full: Array, step: Step | None) -> EvictingState:
        """Frees `every` slots in each row that is `full` bool[B]; tokens of the last slots move
        into the gaps.
        """
        B, K, S = st.position.shape
        n = self.every
        count = st.tokens.count - n * full.astype(jnp.int32)  # tokens after the eviction
        # A token in a slot past that count moves to the gap of an evicted one before it.
        last = (count[:, None] + jnp.arange(n, dtype=jnp.int32)[None])[:, None]
        last = jnp.broadcast_to(last, (B, K, n))

        def moves() -> tuple[Array, Array]:
            source, target = fill_gaps(self._lowest_scores(st, step), last, count, S)
            return source, jnp.where(full[:, None, None], target, S)

        def none() -> tuple[Array, Array]:
            return last, jnp.full_like(last, S)

        source, target = lax.cond(jnp.any(full), moves, none)
        st = move_tokens(st, source, target)
        return replace(st, tokens=replace(st.tokens, count=count))

    def _lowest_scores(self, st: EvictingState, step: Step | None = None) -> Array:
        """i32[B, K, n]: the slots of the `every` tokens of lowest score; of equals the oldest."""
        position = self._positions(st)
        tokens = self._tokens(st, position, st.length, step)
        score = jnp.where(position >= 0, self._scores(tokens, st.pinned), jnp.inf)
        arrived = jnp.where(position >= 0, position, NEVER)
        return jnp.lexsort((arrived, score), axis=-1)[..., : self.every].astype(jnp.int32)

    def _close_up(self, st: EvictingState, full: Array, step: Step | None) -> EvictingState:
        """`st` less `every` tokens of each row that is `full` bool[B]; the others are rotated
        to their new places.
        """
        most = jnp.maximum(self._limit(st) - self.every, 1)
        most = jnp.broadcast_to(most, st.length.shape)
        no_tokens = st.tokens.k[:, :, :0]
        no_lengths = jnp.zeros_like(st.length)
        shrink = Shrink(full, most)
        return self._keep(st, no_tokens, no_tokens, no_lengths, None, step, shrink)

    def attend(
        self, st: EvictingState, q: Array, step: Step
    ) -> tuple[Array, EvictingState, Info]:
        first = lowest_visible(st.length - 1, step.window)
        visible = self._valid(st) & (st.position >= first[:, None, None])
        positions = jnp.where(visible, st.position, -1)[:, :, None]
        info = Info(jnp.sum(visible, axis=-1, dtype=jnp.float32), None, positions=positions)

        at_place = q
        if self.rope is not None:
            at_place = self._turned(st, q[:, :, :, None])[:, :, :, 0]
        after, weighed = self._observed(st, q, at_place, visible[:, :, None], step)

        # One kernel attends to all slots, unless some are hidden by a window or have other
        # positions, or the logits are computed above anyway.
        window = step.window
        renumbered = self.evictor.renumbered
        shows_all = window is None or (self.evictor.keeps_newest and st.tokens.slots <= window)
        if shows_all and not weighed and not renumbered:
            return self._attend_held(st, at_place, step), after, info
        seen = visible[:, :, None]
        logits = step.logits
        if renumbered:
            queries = at_place[:, :, :, None]
            part = self._attend_renumbered(st, queries, seen, renumbered, logits=logits)
        else:
            part = attend_part(at_place, st.tokens.k, st.tokens.v, seen, logits=logits)
        return merge_sinks(part, step.sinks).out, after, info

    def _observed(
        self, st: EvictingState, q: Array, at_place: Array, seen: Array, step: Step
    ) -> tuple[EvictingState, bool]:
        """The state after the evictor has observed the queries q [B, K, G, D] of rows that are
        `due`, and whether that took their weights.

        `at_place` are the queries as they attend to the slots `seen` bool[B, K, 1, S].
        """
        if st.due is None:
            return st, False
        after = replace(st, due=jnp.zeros_like(st.due))
        weighed = False
        if st.evidence is not None and self.evictor.arrival is not None:
            weights = step.weights(at_place, st.tokens.k, seen)
            evidence = self._see_step(st, weights, step)
            # An evictor may give back what it got; the weights are then not computed.
            weighed = evidence is not st.evidence
            evidence = jnp.where(st.due[:, None, None], evidence, st.evidence)
            after = replace(after, evidence=evidence)
        if st.memory is not None:
            queries = _scaled(q[:, :, :, None], step)
            position = (st.length - 1)[:, None]
            memory = self.evictor.see_queries(st.memory, queries, position)
            memory = jnp.where(st.due[:, None, None, None, None], memory, st.memory)
            after = replace(after, memory=memory)
        return after, weighed

    def _attend_renumbered(
        self, st: EvictingState, q: Array, seen: Array, renumbered: int, *, logits: Logits
    ) -> PartialAttention:
        """Attention of q [B, K, G, T, D], a part over G*T, to the slots `seen` bool[B, 1 or K,
        1 or G*T, S].

        The first `renumbered` slots hold tokens whose distance to a query counts only the
        tokens still held in between.
        """
        B, K, G, T, D = q.shape
        n = min(renumbered, st.tokens.slots)
        turned = self.evictor.turn(q, st.tokens.count - st.length)
        parts = []
        for queries, slots in ((turned, slice(0, n)), (q, slice(n, None))):
            k = st.tokens.k[:, :, slots]
            v = st.tokens.v[:, :, slots]
            parts.append(
                attend_part(
                    queries.reshape(B, K, G * T, D), k, v, seen[..., slots], logits=logits
                )
            )
        return merge(*parts)

    # --------------------------------------------------------------------------------------------------------- prompts

    def prefill(self, st: EvictingState, k: Array, v: Array, lengths: Array) -> EvictingState:
        """Stores a prompt without its queries. Raises ValueError for an evictor that needs
        them.
        """
        if self._needs_queries:
            raise ValueError(
                f"{self.evictor} needs the queries of a prompt; call kvjax.attention or prefill_observed"
            )
        return self._keep(st, k, v, lengths, None, None)

    def prefill_observed(
        self,
        st: EvictingState,
        q: Array,
        k: Array,
        v: Array,
        lengths: Array,
        step: Step,
    ) -> EvictingState:
        if st.memory is not None:
            at = jnp.arange(k.shape[2], dtype=jnp.int32)[None]
            at = jnp.where(at < lengths[:, None], st.length[:, None] + at, -1)
            st = replace(st, memory=self.evictor.see_queries(st.memory, _scaled(q, step), at))
        if self.evictor.arrival is None:
            return self._keep(st, k, v, lengths, None, step)
        # The attention of the voters is evidence, by which tokens are kept.
        voters = self._voters(st, lengths, k.shape[2])
        votes = self._votes(st, q, k, lengths, voters, step)
        return self._keep(st, k, v, lengths, votes, step)

    def _voters(self, st: EvictingState, lengths: Array, T: int) -> Voters:
        """The queries that vote in a prompt with the first `lengths` i32[B] of T tokens."""
        last = self.evictor.voters(self._share(st.tokens.slots))  # None: all queries
        count = T if last is None else min(last, T)
        # Only all queries are sampled, never the last ones.
        sampled = count if last is not None else self.evictor.sampled or T
        block = max(min(count, sampled, QUERIES), 1)  # an evictor may have no voters
        padded = -(-min(count, sampled) // block) * block
        if last is None and padded < count:
            # One query from each of as many equal parts of the prompt.
            at, stands_for = _spread(lengths, padded)
            return Voters(at, at >= 0, block, are_all=False, stands_for=stands_for)
        # The last queries of each row, padded at the front to whole blocks with queries that
        # see nothing.
        at = lengths[:, None] - padded + jnp.arange(padded, dtype=jnp.int32)[None]
        is_last = (jnp.arange(padded, dtype=jnp.int32) >= padded - count)[None]
        is_voter = (at >= 0) & is_last
        return Voters(at, is_voter, block, are_all=last is None, stands_for=None)

    def _votes(
        self,
        st: EvictingState,
        q: Array,
        k: Array,
        lengths: Array,
        voters: Voters,
        step: Step,
    ) -> Array:
        """f32[B, K, G, S+T]: the weights that the voters of a prompt give to the S slots and to
        the T tokens of the chunk, summed.
        """
        T = k.shape[2]
        block = voters.block
        total = voters.at.shape[1]
        chosen = jnp.maximum(voters.at, 0)
        queries = jnp.take_along_axis(q, chosen[:, None, None, :, None], axis=3)
        query_position = jnp.where(voters.is_voter, st.length[:, None] + voters.at, -1)
        held_keys = self._held_at_distance(st)
        keys = jnp.concatenate([held_keys, k.astype(st.tokens.k.dtype)], axis=2)
        position = jnp.concatenate([self._positions(st), self._coming(st, lengths, T)], axis=2)

        # cuDNN gives the sums of all queries in one pass, where there are many.
        lse = None
        fast = takes_cudnn(keys.dtype, keys.shape[3], step.logits.cap)
        if voters.are_all and T > QUERIES and fast:
            of_all = self._log_sums(st, q, k, position, step)
            lse = jnp.take_along_axis(of_all, chosen[:, None, None], axis=3)

        def add_block(i: Array, votes: Array) -> Array:
            """`votes` for the first L keys, with those of the i-th block of queries."""
            L = votes.shape[3]
            of_block = lax.dynamic_slice_in_dim(queries, i * block, block, axis=3)
            here = lax.dynamic_slice_in_dim(query_position, i * block, block, axis=1)
            first = lowest_visible(here, step.window)
            at = position[:, :, None, :L]
            seen = (at <= here[:, None, :, None]) & (at >= first[:, None, :, None]) & (at >= 0)
            known = None
            if lse is not None:
                known = lax.dynamic_slice_in_dim(lse, i * block, block, axis=3)
            return votes + _sum_weights(of_block, keys[:, :, :L], seen, step, known)

        def later_keys(stop: int) -> int:
            """How many keys of the chunk come after all of the first `stop` queries."""
            if voters.stands_for is None:
                return total - stop
            return T - -(-stop * T // total)

        B, K, L = position.shape
        blocks = total // block
        votes = vary_with(
            jnp.zeros((B, K, q.shape[2], L), jnp.float32),
            queries,
            keys,
            query_position,
            position,
        )
        # A part of the queries is compared only with the keys that it may see.
        bounds = [blocks * part // PARTS for part in range(PARTS + 1)]
        for begin, end in pairwise(bounds):
            if begin < end:
                visible = votes[..., : L - later_keys(end * block)]
                counted = lax.fori_loop(begin, end, add_block, visible)
                # `votes.at[...].set` is a scatter, at which XLA of jaxlib 0.11.2 crashes on
                # several CPU devices.
                votes = lax.dynamic_update_slice_in_dim(votes, counted, 0, axis=3)
        if voters.stands_for is not None:
            votes *= voters.stands_for[:, None, None, None]
        return votes

    def _log_sums(
        self, st: EvictingState, q: Array, k: Array, position: Array, step: Step
    ) -> Array:
        """f32[B, K, G, T]: the log-sum-exp of each query's logits, by cuDNN, which takes less
        time than a softmax in JAX: that reads and writes all logits.
        """
        real = keep_valid(k, position[:, :, st.tokens.slots :] >= 0)
        own = attend_own(q, real, real, logits=step.logits, window=step.window)
        return merge(own, self._attend_kept(st, q, step)).lse.reshape(q.shape[:4])

    def _keep(
        self,
        st: EvictingState,
        k: Array,
        v: Array,
        lengths: Array,
        votes: Array | None,
        step: Step | None,
        shrink: Shrink | None = None,
    ) -> EvictingState:
        """Keeps the tokens of highest score among the S slots and the T tokens of a chunk.

        `votes` f32[B, K, G, S+T] are in this order: by slot, then by place in the chunk. To
        `shrink` rows no chunk comes, T = 0.
        """
        S = st.tokens.slots
        L = S + k.shape[2]
        end = st.length + lengths
        # A row that stores nothing stays as it is, unless it shrinks.
        takes = lengths > 0 if shrink is None else shrink.rows
        most = None if shrink is None else shrink.most

        # Each token gets its evidence, and the best are kept.
        line = self._line(st, k, v, lengths)
        if line.evidence is not None and votes is not None:
            votes = jnp.take_along_axis(votes, line.source[:, :, None], axis=-1)
            evidence = self.evictor.see_prompt(
                line.evidence, votes, line.position, end, self._share(S)
            )
            line = line._replace(evidence=evidence)
        tokens = Tokens(
            evidence=line.evidence,
            position=line.position,
            end=end,
            slots=self._share(S),
            k=self._keys_for_evictor(st, line.k),
            v=line.v,
            memory=st.memory,
            step=_of_remembered(st, step),
            asked=end,
        )
        # The tokens of a prompt compete although they are pinned: they may be too many.
        pinned = None if shrink is None else line.pinned
        score = self._scores(tokens, pinned, line.source)
        place = self._best_places(line, score, S, most)
        valid = place < L
        place = jnp.minimum(place, L - 1)

        # The kept tokens, in order of position.
        kept_k, kept_v = line.tokens(place)
        keys = None
        if st.keys is not None:
            keys = self._keys_as_they_came(st, k, line, place, valid)
            was = jnp.take_along_axis(line.position, place, axis=-1)
            by = jnp.arange(S, dtype=jnp.int32)[None, None] - was
            kept_k = turn_positions(keys, by, self.rope).astype(keys.dtype)
        kept_k = keep_valid(kept_k, valid)
        kept_v = keep_valid(kept_v, valid)
        count = jnp.minimum(st.tokens.count + lengths, S if most is None else most)

        def select(a: Array | None) -> Array | None:
            if a is None:
                return None
            return jnp.where(
                valid, jnp.take_along_axis(a, place, axis=-1), jnp.zeros((), a.dtype)
            )

        def leaving() -> tuple[Array, Array]:
            """The evicted tokens, in order, then others."""
            kept = put_last(
                jnp.zeros(line.position.shape, bool), jnp.where(valid, place, L), True
            )
            evicted = (line.position >= 0) & ~kept
            gone = jnp.where(evicted, jnp.arange(L, dtype=jnp.int32)[None, None], L)
            return line.tokens(jnp.minimum(jnp.sort(gone, axis=-1)[..., : L - S], L - 1))

        due = st.due
        if due is not None and shrink is None:
            due = jnp.zeros_like(due)  # the prompt's last query has been seen
        of_rows = partial(where_rows, takes)
        after = replace(
            st,
            tokens=of_rows(Block(kept_k, kept_v, count), st.tokens),
            position=of_rows(select(line.position), st.position),
            evidence=of_rows(select(line.evidence), st.evidence),
            length=of_rows(end, st.length),
            due=of_rows(due, st.due),
            pinned=of_rows(select(line.pinned), st.pinned),
            keys=of_rows(keys, st.keys),
        )
        return self._settled(after, valid, takes, leaving)

    @staticmethod
    def _keys_as_they_came(
        st: EvictingState, k: Array, line: Line, place: Array, valid: Array
    ) -> Array:
        """The keys [B, K, S, D] at places of the line, as they came.

        Keys are turned from these, by one angle: to turn stored ones again at each eviction
        would round them each time.
        """
        assert st.keys is not None
        source = jnp.take_along_axis(line.source, place, axis=-1)[..., None]
        every = jnp.concatenate([st.keys, k.astype(st.keys.dtype)], axis=2)
        return keep_valid(jnp.take_along_axis(every, source, axis=2), valid)

    def _line(self, st: EvictingState, k: Array, v: Array, lengths: Array) -> Line:
        """The held tokens and the first `lengths` i32[B] of a chunk k, v [B, K, T, D]."""
        B, K, S = st.position.shape
        T = k.shape[2]
        # Empty slots, whose position is -1, come first.
        position = self._positions(st)
        stored = jnp.argsort(position, axis=-1).astype(jnp.int32)
        chunk = jnp.broadcast_to(S + jnp.arange(T, dtype=jnp.int32), (B, K, T))
        source = jnp.concatenate([stored, chunk], axis=-1)

        def in_order(stored: Array, coming: Array) -> Array:
            both = jnp.concatenate([stored, coming], axis=2)
            return jnp.take_along_axis(both, source, axis=-1)

        pinned = st.pinned
        if pinned is not None:
            pinned = in_order(pinned, jnp.ones((B, K, T), bool))
        evidence = st.evidence
        if evidence is not None:
            arriving = jnp.broadcast_to(self._arriving(k, v), (B, K, T))
            evidence = in_order(evidence, arriving)
        return Line(
            source=source,
            position=in_order(position, self._coming(st, lengths, T)),
            evidence=evidence,
            pinned=pinned,
            k=jnp.concatenate([st.tokens.k, k.astype(st.tokens.k.dtype)], axis=2),
            v=jnp.concatenate([st.tokens.v, v.astype(st.tokens.v.dtype)], axis=2),
        )

    def _best_places(self, line: Line, score: Array, slots: int, most: Array | None) -> Array:
        """i32[B, K, S]: the places of the line that are kept, in order, then L; no more than
        `most` i32[B] of a row, if given.
        """
        L = score.shape[-1]
        # The line is reversed, so that ties go to the newer token.
        eligible = jnp.flip(line.position >= 0, axis=-1)
        best = self._best(jnp.flip(score, axis=-1), eligible, slots)
        if most is not None:
            fits = (jnp.arange(slots, dtype=jnp.int32)[None] < most[:, None])[:, None]
            best = best._replace(valid=best.valid & fits)
        return jnp.sort(jnp.where(best.valid, L - 1 - best.slots, L), axis=-1)

    def attend_stored(self, st: EvictingState, q: Array, step: Step) -> PartialAttention:
        return self._attend_kept(st, q, step)

    # ------------------------------------------------------------------------------------------ what subclasses change
    # `HeadBudgets` (AdaKV), `Mixed` (MiKV) and `BesidePrompt` (RaaS) of `kvjax.contrib` override
    # some of these. Arrays have `_slots` slots, a row may use `_limit` of them, and uses `_most`
    # after a prompt.

    def _slots(self, spec: CacheSpec) -> int:
        """The number of slots."""
        return self._share(spec.capacity)

    def _most(self, prompt: Any) -> Any:
        """The most tokens that a KV head holds after a prompt of `prompt` tokens."""
        return self.budget

    def _limit(self, st: EvictingState) -> Array | int:
        """The number of slots that a row may use; an array i32[B] if rows differ."""
        return st.tokens.slots

    def _valid(self, st: EvictingState) -> Array:
        """bool[B, 1 or K, S]: slots that hold a token."""
        return (jnp.arange(st.tokens.slots, dtype=jnp.int32)[None] < st.tokens.count[:, None])[
            :, None
        ]

    def _slot(self, st: EvictingState, end: Array, step: Step | None) -> Array:
        """i32[B, K]: the slot for the token at position `end` - 1: an empty one, or that of the
        evicted token.
        """
        if self.every > 1:
            return jnp.broadcast_to(st.tokens.count[:, None], st.position.shape[:2])
        evicted = self._to_evict(st, jnp.ones_like(st.position, bool), end, step)
        return jnp.where((end > st.tokens.slots)[:, None], evicted, end[:, None] - 1)

    def _best(self, score: Array, eligible: Array, slots: int) -> Selection:
        """Selects the tokens to keep, [B, K, slots], by score f32[B, K, L] among the `eligible`
        bool[B, K, L].
        """
        return ops.top_k(score, eligible, slots)

    def _see_step(self, st: EvictingState, weights: Array, step: Step) -> Array:
        """f32[B, K, S]: the evidence after a step with softmax weights f32[B, K, G, S]."""
        assert st.evidence is not None
        return self.evictor.see_step(st.evidence, weights)

    def _settled(
        self,
        st: EvictingState,
        valid: Array,
        takes: Array,
        leaving: Callable[[], tuple[Array, Array]],
    ) -> EvictingState:
        """Completes the state after a prompt, for subclasses that keep more than the slots.

        The slots where `valid` bool[B, K, S] have just been filled, in the rows that it `takes`
        bool[B]. `leaving` gives keys and values [B, K, T, D]: first those of the evicted
        tokens, in order, then arbitrary ones.
        """
        return st

    def _attend_kept(self, st: EvictingState, q: Array, step: Step) -> PartialAttention:
        """Attention of a chunk's queries q [B, K, G, T, D] to the slots."""
        logits = step.logits
        first = chunk_starts(st.length, q.shape[3], step.window)
        B, K, G, T, D = q.shape
        q = self._turned(st, q)
        if renumbered := self.evictor.renumbered:
            seen = jnp.broadcast_to(self._valid(st)[:, :, None], (B, 1, T, st.tokens.slots))
            if first is not None:
                seen = seen & (st.position[:, :, None] >= first[:, None, :, None])
            seen = jnp.tile(seen, (1, 1, G, 1))
            return self._attend_renumbered(st, q, seen, renumbered, logits=logits)
        if first is None:
            return attend_zone(
                q, st.tokens.k, st.tokens.v, None, st.tokens.count, logits=logits
            )

        # The slots are in no order, so a window masks each of them, some at a time.
        queries = q.reshape(B, K, G * T, D)
        first = jnp.tile(first, (1, G))[:, None, :, None]
        position = self._positions(st)
        parts = []
        for begin in range(0, position.shape[2], SLOTS):
            some = slice(begin, begin + SLOTS)
            at = position[:, :, None, some]
            mask = (at >= first) & (at >= 0)
            k = st.tokens.k[:, :, some]
            v = st.tokens.v[:, :, some]
            parts.append(attend_part(queries, k, v, mask, logits=logits))
        return merge(*parts)

    def _attend_held(self, st: EvictingState, q: Array, step: Step) -> Array:
        """Attention of q [B, K, G, D] to all tokens in the slots."""
        span = Span(st.tokens.k, st.tokens.v, jnp.zeros_like(st.length), st.tokens.count)
        return ops.attend_span(q, span, step.sinks, logits=step.logits)

    # ------------------------------------------------------------------------------------------- what the evictor sees

    def _share(self, slots: int) -> int:
        """How many of the slots of a head the evictor decides for: as many as it can fill."""
        return min(int(self._most(slots)), slots)

    def _tokens(
        self, st: EvictingState, position: Array, end: Array, step: Step | None
    ) -> Tokens:
        """The tokens in the slots, as the evictor sees them."""
        return Tokens(
            evidence=st.evidence,
            position=position,
            end=end,
            slots=self._share(st.tokens.slots),
            k=self._keys_for_evictor(st, st.tokens.k),
            v=st.tokens.v,
            memory=st.memory,
            step=_of_remembered(st, step),
            asked=st.length,
        )

    def _keys_for_evictor(self, st: EvictingState, k: Array) -> Array:
        """Keys k [B, K, S+T, D] of the slots and of a chunk, as the evictor sees them: at the
        distances at which remembered queries would attend to them now, if tokens close up.
        """
        if st.memory is None or st.keys is None:
            return k
        of_chunk = k[:, :, st.tokens.slots :]
        return jnp.concatenate([self._held_at_distance(st), of_chunk], axis=2)

    def _scores(
        self, tokens: Tokens, pinned: Array | None, order: Array | None = None
    ) -> Array:
        """f32[B, K, L]: the scores of tokens, whose keys and values are yet to be put in `order`
        i32[B, K, L].

        Tokens that are `pinned`, bool[B, K, L], score higher than any other.
        """
        if type(self.evictor).score_all is not Evictor.score_all and order is not None:
            tokens = tokens._replace(
                k=jnp.take_along_axis(tokens.k, order[..., None], axis=2),
                v=jnp.take_along_axis(tokens.v, order[..., None], axis=2),
            )
        score = self.evictor.score_all(tokens)
        return score if pinned is None else jnp.where(pinned, jnp.inf, score)

    def _to_evict(
        self, st: EvictingState, valid: Array, end: Array, step: Step | None = None
    ) -> Array:
        """i32[B, K]: the slot of lowest score among the `valid` bool[B, K, S]; of equals the
        oldest.
        """
        position = jnp.where(valid, st.position, -1)
        scores = self._scores(self._tokens(st, position, end, step), st.pinned)
        score = jnp.where(valid, lax.stop_gradient(scores), jnp.inf)
        arrived = jnp.where(valid, st.position, NEVER)
        slot = lax.broadcasted_iota(jnp.int32, position.shape, 2)
        operands = (score, arrived, vary_with(slot, score))
        last = (jnp.float32(jnp.inf), jnp.int32(NEVER), jnp.int32(0))

        def least(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
            """The operands of the lower score; of equals the oldest, then of the lower slot."""
            lower = a[0] < b[0]
            equal = a[0] == b[0]
            older = (a[1] < b[1]) | ((a[1] == b[1]) & (a[2] <= b[2]))
            first = lower | (equal & older)
            return tuple(lax.select(first, x, y) for x, y in zip(a, b, strict=True))

        # One reduction, which is one launch.
        found: list[Array] = lax.reduce(operands, vary_with(last, score), least, (2,))
        return found[2]

    def _arriving(self, k: Array, v: Array) -> Array:
        """f32[B, K, T], or one number: the evidence of new tokens k, v [B, K, T, D]."""
        seen = self.evictor.see_tokens(k, v)
        return (
            jnp.float32(self.evictor.arrival or 0.0)
            if seen is None
            else seen.astype(jnp.float32)
        )

    # ------------------------------------------------------------------------------------------------------- positions

    def held_after(self, prompt: Any, received: Any) -> Any:
        """The tokens that a KV head holds after a prompt of `prompt` tokens, and `received`
        tokens in all.
        """
        most = self._most(prompt)
        held = np.minimum(prompt, most) + received - prompt
        return np.where(
            held <= most, held, most + 1 - self.every + (held - most - 1) % self.every
        )

    def _positions(self, st: EvictingState) -> Array:
        """i32[B, K, S] positions of the tokens in the slots, -1 in empty slots."""
        return jnp.where(self._valid(st), st.position, -1)

    @staticmethod
    def _coming(st: EvictingState, lengths: Array, T: int) -> Array:
        """i32[B, K, T] positions of a chunk's tokens, -1 for padding."""
        at = jnp.arange(T, dtype=jnp.int32)[None]
        coming = jnp.where(at < lengths[:, None], st.length[:, None] + at, -1)
        return jnp.broadcast_to(coming[:, None], (*st.position.shape[:2], T))

    def _turned(self, st: EvictingState, q: Array) -> Array:
        """Queries q [B, K, G, T, D], at the place after the held tokens if these have closed
        up.
        """
        if self.rope is None:
            return q
        by = (st.tokens.count - st.length)[:, None, None, None]
        return turn_positions(q, by, self.rope).astype(q.dtype)

    def _held_at_distance(self, st: EvictingState) -> Array:
        """The held keys [B, K, S, D], at the distances from new queries that closed-up tokens
        have.
        """
        if st.keys is None:
            return st.tokens.k
        place = jnp.arange(st.tokens.slots, dtype=jnp.int32)[None, None]
        by = place - st.position + (st.length - st.tokens.count)[:, None, None]
        return turn_positions(st.keys, by, self.rope).astype(st.keys.dtype)


def fill_gaps(evicted: Array, last: Array, count: Array, slots: int) -> tuple[Array, Array]:
    """Which tokens move where, so that the first `count` i32[B] slots are filled after an
    eviction.

    `evicted` i32[B, K, n] are the slots of the evicted tokens, and `last` i32[B, K, n] the n
    slots from `count` on. Returns the slots i32[B, K, n] of tokens that move, those first, and
    the gaps that they fill, or `slots` for none.
    """
    leaves = jnp.any(last[..., None] == evicted[..., None, :], axis=-1)
    source = jnp.take_along_axis(last, jnp.argsort(leaves, axis=-1), axis=-1)
    gaps = jnp.where(evicted < count[:, None, None], evicted, slots)
    return source, jnp.sort(gaps, axis=-1)


def move_tokens(st: EvictingState, source: Array, target: Array) -> EvictingState:
    """Copies the tokens in the slots `source` i32[B, K, n] to the slots `target`, S for none:
    one write for each, in place.
    """
    n = source.shape[2]

    def move(
        i: Array, done: tuple[EvictingState, Array, Array]
    ) -> tuple[EvictingState, Array, Array]:
        st, source, target = done
        old = lax.dynamic_slice_in_dim(source, i, 1, axis=2)
        new = lax.dynamic_slice_in_dim(target, i, 1, axis=2)
        return _move_token(st, old, new), source, target

    def run(*done: Any) -> EvictingState:
        steps = n * jnp.any(done[2] < st.tokens.slots).astype(jnp.int32)
        return lax.fori_loop(0, steps, move, done)[0]

    def all_steps(*done: Any) -> EvictingState:
        # A loop whose bounds are data has no reverse-mode derivative.
        return lax.fori_loop(0, n, move, done)[0]

    moved: EvictingState = with_derivative(run, all_steps)(st, source, target)
    return moved


def _move_token(st: EvictingState, old: Array, new: Array) -> EvictingState:
    """Copies a token of each head from the slot `old` i32[B, K, 1] to the slot `new`, S for
    none.
    """
    B, K, S = st.position.shape
    is_new = jnp.arange(S, dtype=jnp.int32)[None, None] == new

    def number(a: Array | None) -> Array | None:
        if a is None:
            return None
        return jnp.where(is_new, jnp.take_along_axis(a, old, axis=2, mode="clip"), a)

    def row(a: Array) -> Array:
        token = jnp.take_along_axis(a, old[..., None], axis=2, mode="clip")
        # A KV head is a row of its own here, which is written where there is a slot for it.
        rows = a.reshape(B * K, 1, S, a.shape[3])
        moved = token.reshape(B * K, 1, 1, a.shape[3])
        taken = (new < S).astype(jnp.int32).reshape(-1)
        at = jnp.minimum(new, S - 1).reshape(-1)
        return write(rows, moved, at, taken).reshape(a.shape)

    position = number(st.position)
    assert position is not None
    return replace(
        st,
        tokens=replace(st.tokens, k=row(st.tokens.k), v=row(st.tokens.v)),
        position=position,
        evidence=number(st.evidence),
        pinned=number(st.pinned),
    )


def _spread(lengths: Array, count: int) -> tuple[Array, Array]:
    """i32[B, n]: one of the first `lengths` i32[B] positions from each of n = `count` equal
    parts, in order, and f32[B] how many each stands for. A row of fewer positions has all of
    them, then -1.

    Places within the parts follow the golden ratio, so that no period of a text meets them.
    """
    i = np.arange(count)
    place = jnp.asarray(i + i * (5**0.5 - 1) / 2 % 1, jnp.float32)[None]
    width = lengths.astype(jnp.float32)[:, None] / count
    inside = jnp.minimum((place * width).astype(jnp.int32), lengths[:, None] - 1)
    each = jnp.asarray(i, jnp.int32)[None]
    each = jnp.where(each < lengths[:, None], each, -1)
    return jnp.where(width > 1, inside, each), jnp.maximum(width[:, 0], 1.0)


def _of_remembered(st: EvictingState, step: Step | None) -> Step | None:
    """How the queries in `st.memory` attend, which `_scaled` has scaled for the model's step."""
    if st.memory is None:
        return None
    assert step is not None
    logits = Logits(st.memory.shape[4] ** -0.5, step.logits.cap)
    return Step(logits, step.window, sinks=step.sinks)


def _scaled(q: Array, step: Step) -> Array:
    """q [B, K, G, T, D] of which D**-0.5 * q.k are the logits, whatever the model's scale."""
    usual = q.shape[4] ** -0.5
    scale = step.logits.scale
    return q if scale == usual else (q.astype(jnp.float32) * (scale / usual))


def _sum_weights(q: Array, k: Array, seen: Array, step: Step, lse: Array | None) -> Array:
    """f32[B, K, G, L]: softmax weights of q [B, K, G, T, D] over k [B, K, L, D] where `seen`
    bool[B, K, T, L], summed over T. `lse` f32[B, K, G, T] has the logarithms of the sums over
    L, if they are known."""
    B, K, G, T, D = q.shape
    L = k.shape[2]
    mask = jnp.broadcast_to(seen[:, :, None], (B, K, G, T, L)).reshape(B, K, -1, L)
    lse = None if lse is None else lse.reshape(B, K, -1)
    weights = step.weights(q.reshape(B, K, -1, D), k, mask, lse)
    return jnp.sum(weights.reshape(B, K, G, T, L), axis=3)
