"""Runs a random script of prompts, steps and inserted rows through a cache, beside plain lists of tokens in numpy.

The lists are all that the oracle knows of a cache: which tokens each row was given. What a step may read, and what its
output then is, follows from them and from `Info.positions`, in float64 and a head at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax.testing._expect import as_stored, tolerance
from tests.fuzz.draw import CHUNK, Configuration, heads

STEPS = 40  # calls of a script


class Wrong(AssertionError):
    """The cache disagrees with the lists."""


class Programs:
    """The compiled calls of one configuration, shared by its scripts."""

    def __init__(self, drawn: Configuration) -> None:
        call = partial(kvjax.attention_info, window=drawn.window)
        self.drawn = drawn
        self.prompt = jax.jit(call)
        self.step = jax.jit(call, donate_argnums=0)
        self.insert = jax.jit(kvjax.insert)
        self.empty = kvjax.init_layer(drawn.policy, drawn.spec)


class Rows:
    """A cache, and beside it the tokens that each row was given."""

    def __init__(self, programs: Programs, seed: int) -> None:
        self.programs, self.rng = programs, np.random.default_rng([seed, 24])
        self.policy, self.spec, self.window = programs.drawn.policy, programs.drawn.spec, programs.drawn.window
        self.cache: Any = jax.tree.map(lambda leaf: jax.numpy.copy(leaf), programs.empty)
        self.keys: list[list[np.ndarray]] = [[] for _ in range(self.spec.batch)]
        self.values: list[list[np.ndarray]] = [[] for _ in range(self.spec.batch)]
        self.dropped = np.zeros(self.spec.batch, bool)  # rows that outgrew the capacity: what they hold is not known
        self.evicts = hasattr(self.policy, "evictor")
        self.stored: dict[tuple[int, int, int], Any] = {}  # of the row that is compared, as `_stored` made it

    # ------------------------------------------------------------------------------------------------------- calls

    def call(self) -> None:
        """One random call."""
        kind = self.rng.random()
        if kind < 0.2:
            self.prompt()
        elif kind < 0.27 and self.spec.batch > 1:
            self.insert()
        else:
            self.step()

    def prompt(self) -> None:
        lengths = self.rng.integers(0, CHUNK + 1, self.spec.batch)
        q, k, v = self._tokens(CHUNK)
        before = [len(row) for row in self.keys]
        out, self.cache, _ = self.programs.prompt(self.cache, q, k, v, lengths=lengths.astype(np.int32))
        out = np.asarray(out, np.float64)
        for b, n in enumerate(lengths):
            self.keys[b] += list(k[b, :n])
            self.values[b] += list(v[b, :n])
            self._finite(out[b, :n], "a prompt")
            if self.dropped[b] or (self.evicts and before[b] > 0):
                continue
            for t in {0, int(n) // 2, int(n) - 1} & set(range(int(n))):
                seen = np.arange(before[b] + t + 1)
                low = 0 if self.window is None else max(before[b] + t + 1 - self.window, 0)
                self._compare(out[b, t], q[b, t], b, seen[low:], before[b], f"row {b}, token {t} of a prompt")
        self._lengths()

    def step(self) -> None:
        active = self.rng.random(self.spec.batch) < 0.85
        q, k, v = self._tokens(1)
        before = [len(row) for row in self.keys]
        out, self.cache, info = self.programs.step(self.cache, q, k, v, active=active)
        out, positions = np.asarray(out, np.float64), np.asarray(info.positions)
        attended = np.asarray(info.attended)
        for b in np.flatnonzero(active):
            self.keys[b].append(k[b, 0])
            self.values[b].append(v[b, 0])
        self._lengths()
        for b in np.flatnonzero(active):
            self._finite(out[b], "a step")
            if not self.dropped[b]:
                self._check_step(int(b), before[b], out[b, 0], q[b, 0], positions[b], attended[b])

    def _check_step(
        self, b: int, held: int, out: np.ndarray, q: np.ndarray, positions: np.ndarray, attended: np.ndarray
    ) -> None:
        """`positions` i[K, H, M] are a fair reading of the row's tokens, and `out` [N, D] is attention over them."""
        n, group = held + 1, self.spec.group
        low = 0 if self.window is None else max(n - self.window, 0)
        for kv in range(self.spec.kv_heads):
            found = [np.sort(choice[choice >= 0]) for choice in positions[kv]]
            where = f"row {b} of {n} tokens, kv head {kv}"
            for read in found:
                if len(set(read.tolist())) < len(read):
                    raise Wrong(f"{where}: a token is read twice: {read.tolist()}")
                if not len(read) or read[-1] >= n or read[0] < low:
                    raise Wrong(f"{where}: reads {read.tolist()}, of which tokens {low} to {n - 1} are visible")
                if read[-1] != n - 1:
                    raise Wrong(f"{where}: does not read its own token: {read.tolist()}")
                self._check_budget(read, n, where)
            count = float(np.mean([len(read) for read in found]))
            if abs(count - attended[kv]) > 1e-3:
                raise Wrong(f"{where}: reads {count} tokens and tells {attended[kv]}")
            for g in range(group):
                head = kv * group + g
                read = found[g if len(found) > 1 else 0]
                self._compare(out[head : head + 1], q[head : head + 1], b, read, held, f"{where}, head {head}", kv=kv)

    def _check_budget(self, read: np.ndarray, n: int, where: str) -> None:
        inner = getattr(self.policy, "retrieval", self.policy)
        budget = getattr(inner, "budget", None)
        if budget is None:
            if self.window is None and len(read) != n:
                raise Wrong(f"{where}: reads {len(read)} of {n} tokens, and has no budget")
            return
        most = max(budget, getattr(inner, "dense_below", 0))
        if len(read) > most:
            raise Wrong(f"{where}: reads {len(read)} tokens, more than {most}")
        if self.window is None and hasattr(inner, "local"):
            must = {*range(min(inner.sink, n)), *range(max(n - inner.local, 0), n)}
            if missing := must - set(read.tolist()):
                raise Wrong(f"{where}: sink and local window lack {sorted(missing)}")

    def insert(self) -> None:
        """A row is replaced by a request that was read alone, or freed by an empty one."""
        spec = self.spec
        row = int(self.rng.integers(spec.batch))
        length = int(self.rng.integers(0, CHUNK + 1))
        q, k, v = self._tokens(CHUNK)
        one = _alone(self.policy, spec)
        if length:
            # All rows of a batch of the same size read the request, so that it takes no program of its own.
            whole = jax.tree.map(lambda leaf: jax.numpy.copy(leaf), self.programs.empty)
            lengths = np.zeros(spec.batch, np.int32)
            lengths[0] = length
            _, whole, _ = self.programs.prompt(whole, q, k, v, lengths=lengths)
            first = [jax.device_put(leaf[:1], leaf.sharding) for leaf in map(_readable, jax.tree.leaves(whole))]
            homes = [leaf.sharding for leaf in jax.tree.leaves(one)]
            moved = [jax.device_put(a, home) for a, home in zip(first, homes, strict=True)]
            one = jax.tree.unflatten(jax.tree.structure(one), moved)
        self.cache = self.programs.insert(self.cache, one, np.int32(row))
        self.keys[row], self.values[row] = list(k[0, :length]), list(v[0, :length])
        self.dropped[row], self.stored = False, {}
        self._lengths()

    # ------------------------------------------------------------------------------------------------------ checks

    def _tokens(self, count: int) -> tuple[np.ndarray, ...]:
        spec = self.spec
        made = (self.rng.normal(size=(spec.batch, count, h, spec.head_dim)) for h in heads(spec))
        return tuple(a.astype(spec.dtype) for a in made)

    def _lengths(self) -> None:
        """A row holds what it was given; if not, it is past its capacity and says so."""
        held, told = np.asarray(self.cache.length), np.asarray(self.cache.state.overflow)
        for b, row in enumerate(self.keys):
            if self.dropped[b]:
                if not told[b]:
                    raise Wrong(f"row {b} dropped a token and forgot it")
            elif held[b] != len(row) or told[b]:
                if len(row) <= self.spec.capacity or not told[b] or held[b] > len(row):
                    raise Wrong(
                        f"row {b} was given {len(row)} tokens, of {self.spec.capacity} that it can hold; it has "
                        f"{held[b]}, overflow {told[b]}"
                    )
                self.dropped[b] = True

    def _compare(
        self, out: np.ndarray, q: np.ndarray, b: int, read: np.ndarray, held: int, where: str, *, kv: int | None = None
    ) -> None:
        """`out` [N, D] is attention of q [N, D] over the tokens `read`, as they are stored when `held` are."""
        spec = self.spec
        errors = []
        for stored in self._stored(b, held):
            k, v = (a[read].astype(np.float64) for a in stored)
            want = np.zeros(out.shape)
            for i, query in enumerate(q.astype(np.float64)):
                head = i // spec.group if kv is None else kv
                logits = k[:, head] @ query * spec.head_dim**-0.5
                weights = np.exp(logits - logits.max())
                want[i] = weights @ v[:, head] / weights.sum()
            errors.append(float(np.abs(out - want).max()))
            if errors[-1] <= 2 * tolerance(spec):
                return
        raise Wrong(f"{where}: differs from attention over what it read by {min(errors):.2e}")

    def _stored(self, b: int, held: int) -> Any:
        """The row's keys and values [S, K, D] as its policy may give them back: those of a full block flushed or not,
        and for a recall of the step before as they were then."""
        for before in (0, held, held - 1, held - 2) if _rounds(self.policy) else (0,):
            key = b, len(self.keys[b]), before
            if before >= 0 and key not in self.stored:
                self.stored = {k: a for k, a in self.stored.items() if k[:2] == key[:2]}
                tokens = np.array(self.keys[b]), np.array(self.values[b])
                self.stored[key] = as_stored(self.policy, self.spec, *tokens, before) if before else tokens
            if before >= 0:
                yield self.stored[key]

    def _finite(self, out: np.ndarray, what: str) -> None:
        if not np.isfinite(out).all():
            raise Wrong(f"{what} gives what is not finite")


def _readable(leaf: Any) -> Any:
    """On the device, where eager slices of it can be taken."""
    return jax.device_put(leaf, jax.memory.Space.Device)


def _alone(policy: Any, spec: Any) -> Any:
    return kvjax.init_layer(policy, dataclasses.replace(spec, batch=1))


def _rounds(policy: Any) -> bool:
    store = getattr(getattr(policy, "retrieval", policy), "store", None)
    return hasattr(store, "bits")


def run_all(programs: Programs, seeds: Iterable[int]) -> None:
    for seed in seeds:
        run(programs, seed)


def run(programs: Programs, seed: int, calls: int = STEPS) -> None:
    """A script of random calls.

    Raises:
      Wrong: the cache and the lists disagree; the message has the seed's configuration.
    """
    rows = Rows(programs, seed)
    for i in range(calls):
        try:
            rows.call()
        except Wrong as wrong:
            raise Wrong(f"script {seed}, call {i} of {programs.drawn}: {wrong}") from None
