"""Runs a random script of prompts, steps and inserted rows through a cache, and through lists
of tokens in numpy.

The lists are all that the oracle knows of a cache: which tokens each row was given. The tokens
that a step may read, and its output, follow from them and from `Info.positions`, in float64 and
a head at a time.
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
        call = partial(_in_layers, kvjax.attention_info, window=drawn.window)
        self.drawn = drawn
        self.prompt = jax.jit(call)
        self.step = jax.jit(call, donate_argnums=0)
        self.decode = jax.jit(
            partial(_in_layers, kvjax.decode_info, window=drawn.window), donate_argnums=0
        )
        self.insert = jax.jit(kvjax.insert)
        self.rollback = jax.jit(kvjax.rollback)
        self.truncate = jax.jit(kvjax.truncate)
        self.empty = kvjax.init(
            drawn.layers, drawn.spec, layers=len(drawn.layers), placement=drawn.placement
        )
        self.reversible = all(policy.reversible for policy in drawn.layers)
        try:
            jax.eval_shape(kvjax.truncate, self.empty, np.zeros(drawn.spec.batch, np.int32))
            self.shortens = drawn.truncates
        except ValueError:
            self.shortens = False


def _in_layers(
    verb: Any, cache: kvjax.Cache, q: Any, k: Any, v: Any, **settings: Any
) -> tuple[Any, kvjax.Cache, Any]:
    """`verb` of the same tokens in each layer, which gets the selection of the layer before;
    the last one's results.
    """
    layers: list[Any] = []
    out, info = None, None
    for layer in cache.layers:
        selection = None if info is None else info.selection
        out, layer, info = verb(layer, q, k, v, selection=selection, **settings)
        layers.append(layer)
    return out, kvjax.Cache(tuple(layers)), info


def _padded(tokens: tuple[np.ndarray, ...], lengths: np.ndarray) -> tuple[np.ndarray, ...]:
    """Arrays [B, T, H, D] with NaN at and past `lengths` [B] tokens."""
    past = np.arange(tokens[0].shape[1]) >= lengths[:, None]
    return tuple(
        np.where(past[..., None, None], np.asarray(np.nan, a.dtype), a) for a in tokens
    )


class Rows:
    """A cache, and beside it the tokens that each row was given."""

    def __init__(self, programs: Programs, seed: int) -> None:
        self.programs, self.rng = programs, np.random.default_rng([seed, 24])
        self.policy, self.spec, self.window = (
            programs.drawn.policy,
            programs.drawn.spec,
            programs.drawn.window,
        )
        self.cache: Any = jax.tree.map(lambda leaf: jax.numpy.copy(leaf), programs.empty)
        self.keys: list[list[np.ndarray]] = [[] for _ in range(self.spec.batch)]
        self.values: list[list[np.ndarray]] = [[] for _ in range(self.spec.batch)]
        self.dropped = np.zeros(
            self.spec.batch, bool
        )  # rows that outgrew the capacity: what they hold is not known
        self.everything = programs.drawn.keeps_evicted
        self.forgets = any(
            hasattr(self.policy, part) for part in ("evictor", "window", "others")
        )
        self.forgets &= not self.everything
        # What is kept in 8 bits is not compared to the bit.
        self.allowed = (
            0.1
            if self.everything and _rounds(self.policy)
            else 2 * tolerance(self.spec, self.policy)
        )
        self.stored: dict[
            tuple[int, int, int], Any
        ] = {}  # of the row that is compared, as `_stored` made it

    # ------------------------------------------------------------------------------------------------------- calls

    def call(self) -> None:
        """One random call."""
        kind = self.rng.random()
        if kind < 0.2:
            self.prompt()
        elif kind < 0.27 and self.spec.batch > 1:
            self.insert()
        elif kind < 0.33 and self.programs.shortens:
            self.truncate()
        elif kind > 0.7 and self.programs.drawn.several:
            self.decode()
        else:
            self.step()

    def prompt(self) -> None:
        lengths = self.rng.integers(0, CHUNK + 1, self.spec.batch)
        q, k, v = _padded(self._tokens(CHUNK), lengths)
        before = [len(row) for row in self.keys]
        out, self.cache, _ = self.programs.prompt(
            self.cache, q, k, v, lengths=lengths.astype(np.int32)
        )
        out = np.asarray(out, np.float64)
        for b, n in enumerate(lengths):
            self.keys[b] += list(k[b, :n])
            self.values[b] += list(v[b, :n])
            self._finite(out[b, :n], "a prompt")
            if self.dropped[b] or (self.forgets and before[b] > 0):
                continue
            for t in {0, int(n) // 2, int(n) - 1} & set(range(int(n))):
                seen = np.arange(before[b] + t + 1)
                low = 0 if self.window is None else max(before[b] + t + 1 - self.window, 0)
                self._compare(
                    out[b, t],
                    q[b, t],
                    b,
                    seen[low:],
                    before[b],
                    f"row {b}, token {t} of a prompt",
                )
        self._lengths()

    def step(self) -> None:
        active = self.rng.random(self.spec.batch) < 0.85
        q, k, v = self._tokens(1)
        self._take(
            *self.programs.step(self.cache, q, k, v, active=active),
            (q, k, v),
            active.astype(int),
        )

    def decode(self) -> None:
        """Several steps at once; then, where tokens can be taken back, some are."""
        most = self.programs.drawn.several
        q, k, v = self._tokens(most)
        count = self.rng.integers(0, most + 1, self.spec.batch)
        q, k, v = _padded((q, k, v), count)
        out, cache, infos = self.programs.decode(
            self.cache, q, k, v, lengths=count.astype(np.int32)
        )
        self._take(out, cache, infos, (q, k, v), count)
        if self.programs.reversible and self.rng.random() < 0.5:
            self.rollback(count)

    def rollback(self, came: np.ndarray) -> None:
        """Takes back some of the tokens that just came, as far as a flush since then allows."""
        layers = zip(self.programs.drawn.layers, self.cache.layers, strict=True)
        earliest = np.max(
            [np.asarray(policy.earliest(layer.state)) for policy, layer in layers], axis=0
        )  # type: ignore[attr-defined]
        held = np.asarray(self.cache.length)
        kept = np.maximum(held - self.rng.integers(0, came + 1), np.minimum(earliest, held))
        kept = np.where(self.dropped, held, kept)
        self.cache = self.programs.rollback(self.cache, kept.astype(np.int32))
        for b in np.flatnonzero(~self.dropped):
            del self.keys[b][kept[b] :], self.values[b][kept[b] :]
        self.stored = {}
        self._lengths()

    def truncate(self) -> None:
        """Cuts the cache to any earlier lengths."""
        held = np.asarray(self.cache.length)
        kept = np.where(self.dropped, held, self.rng.integers(0, held + 1))
        self.cache = self.programs.truncate(self.cache, kept.astype(np.int32))
        for b in np.flatnonzero(~self.dropped):
            del self.keys[b][kept[b] :], self.values[b][kept[b] :]
        self.stored = {}
        self._lengths()

    def _take(
        self, out: Any, cache: Any, info: Any, qkv: tuple[np.ndarray, ...], count: np.ndarray
    ) -> None:
        """The rows after the first `count` of T steps, with out [B, T, N, D]; checks each step
        that a row took.
        """
        self.cache = cache
        q, k, v = qkv
        steps = q.shape[1]
        positions, attended, weights = (
            None
            if a is None
            else np.asarray(a).reshape(steps, self.spec.batch, *np.shape(a)[-n:])
            for a, n in ((info.positions, 3), (info.attended, 1), (info.log_weights, 3))
        )
        out = np.asarray(out, np.float64)
        before = [len(row) for row in self.keys]
        for b, n in enumerate(count):
            self.keys[b] += list(k[b, :n])
            self.values[b] += list(v[b, :n])
        self._lengths()
        for b, n in enumerate(count):
            self._finite(out[b, :n], "a step")
            for t in range(n if not self.dropped[b] else 0):
                if positions is None and self.everything:
                    self._check_everything(b, before[b] + t, out[b, t], q[b, t], attended[t, b])
                    continue
                if positions is None:
                    self._check_compensated(b, before[b] + t, out[b, t], q[b, t])
                    continue
                told = None if weights is None else weights[t, b]
                self._check_step(
                    b, before[b] + t, out[b, t], q[b, t], positions[t, b], attended[t, b], told
                )

    def _check_everything(
        self, b: int, held: int, out: np.ndarray, q: np.ndarray, attended: np.ndarray
    ) -> None:
        """`out` is attention over all tokens."""
        where = f"row {b} of {held + 1} tokens"
        if (attended != held + 1).any():
            raise Wrong(f"{where}: tells that it read {attended.tolist()}")
        self._compare(out, q, b, np.arange(held + 1), held, where)

    def _check_compensated(self, b: int, held: int, out: np.ndarray, q: np.ndarray) -> None:
        """`out` is attention over sink and newest tokens, and over the mean of all others,
        weighted by their number.
        """
        window: Any = self.policy.window  # type: ignore[attr-defined]
        sink, budget, n = window.evictor.sink, window.budget, held + 1
        slots = min(budget, self.spec.capacity)
        gone = range(sink, max(n - (slots - sink), sink))
        read = [i for i in range(n) if i not in gone]
        tokens = [np.array(a[b][:n], np.float64) for a in (self.keys, self.values)]
        k, v = (
            np.concatenate([a[read], a[gone].mean(axis=0)[None]]) if gone else a[read]
            for a in tokens
        )
        weights = np.zeros(len(k))
        weights[len(read) :] = np.log(max(len(gone), 1))
        for i, query in enumerate(q.astype(np.float64)):
            want = _attend(
                query, k[:, i // self.spec.group], v[:, i // self.spec.group], weights
            )
            if np.abs(out[i] - want).max() > 2 * tolerance(self.spec):
                raise Wrong(
                    f"row {b} of {n} tokens, head {i}: differs from attention over window and mean"
                )

    def _check_step(
        self,
        b: int,
        held: int,
        out: np.ndarray,
        q: np.ndarray,
        positions: np.ndarray,
        attended: np.ndarray,
        log_weights: np.ndarray | None,
    ) -> None:
        """`positions` i[K, H, M] are a fair reading of the row's tokens, and `out` [N, D] is
        attention over them.
        """
        n, group = held + 1, self.spec.group
        if hasattr(self.policy, "head_bounds"):
            together, most = (
                int((positions >= 0).sum()),
                self.policy.budget * self.spec.kv_heads,
            )
            if together > most:
                raise Wrong(
                    f"row {b} of {n} tokens: its heads read {together} tokens, more than {most} together"
                )
        low = 0 if self.window is None else max(n - self.window, 0)
        for kv in range(self.spec.kv_heads):
            found = [np.sort(choice[choice >= 0]) for choice in positions[kv]]
            where = f"row {b} of {n} tokens, kv head {kv}"
            for read in found:
                if len(set(read.tolist())) < len(read):
                    raise Wrong(f"{where}: a token is read twice: {read.tolist()}")
                if not len(read) or read[-1] >= n or read[0] < low:
                    raise Wrong(
                        f"{where}: reads {read.tolist()}, of which tokens {low} to {n - 1} are visible"
                    )
                if read[-1] != n - 1:
                    raise Wrong(f"{where}: does not read its own token: {read.tolist()}")
                self._check_budget(read, n, where)
            count = float(np.mean([len(read) for read in found]))
            if abs(count - attended[kv]) > 1e-3:
                raise Wrong(f"{where}: reads {count} tokens and tells {attended[kv]}")
            for g in range(group):
                head = kv * group + g
                choice = g if len(found) > 1 else 0
                weights = None
                if log_weights is not None:
                    order = np.argsort(positions[kv, choice])
                    weights = log_weights[kv, choice][order][positions[kv, choice][order] >= 0]
                what, one = f"{where}, head {head}", slice(head, head + 1)
                self._compare(
                    out[one], q[one], b, found[choice], held, what, kv=kv, log_weights=weights
                )

    def _check_budget(self, read: np.ndarray, n: int, where: str) -> None:
        if hasattr(self.policy, "others"):  # each head has a policy of its own
            return
        inner = getattr(self.policy, "retrieval", self.policy)
        selects = self.programs.drawn.leader or self.policy
        selects = getattr(selects, "retrieval", selects)
        budget = getattr(selects, "budget", None)
        if budget is None:
            if self.window is None and len(read) != n:
                raise Wrong(f"{where}: reads {len(read)} of {n} tokens, and has no budget")
            return
        most = max(budget, getattr(selects, "dense_below", 0))
        if hasattr(self.policy, "head_bounds"):
            most = self.policy.head_bounds[1]
        if len(read) > most:
            raise Wrong(f"{where}: reads {len(read)} tokens, more than {most}")
        if self.window is None and hasattr(inner, "local"):
            # The recent block has more than `local`, but for a Buffer, of which every step
            # reads all.
            stay = len(inner.demote.staying(inner.local))
            newest = min(
                inner.local, stay + 1 + (n - inner.sink - stay - 1) % inner.demote.leave
            )
            must = {*range(min(inner.sink, n)), *range(max(n - newest, 0), n)}
            if missing := must - set(read.tolist()):
                raise Wrong(f"{where}: sink and local window lack {sorted(missing)}")

    def insert(self) -> None:
        """A row is replaced by a request that was read alone, or freed by an empty one."""
        spec = self.spec
        row = int(self.rng.integers(spec.batch))
        length = int(self.rng.integers(0, CHUNK + 1))
        q, k, v = self._tokens(CHUNK, alone=True)
        one = _alone(self.programs.drawn)
        if length:
            # All rows of a batch of the same size read the request, so that it takes no program
            # of its own.
            whole = jax.tree.map(lambda leaf: jax.numpy.copy(leaf), self.programs.empty)
            lengths = np.zeros(spec.batch, np.int32)
            lengths[0] = length
            _, whole, _ = self.programs.prompt(whole, q, k, v, lengths=lengths)
            first = [np.asarray(leaf)[:1] for leaf in map(_readable, jax.tree.leaves(whole))]
            homes = [leaf.sharding for leaf in jax.tree.leaves(one)]
            moved = [jax.device_put(a, home) for a, home in zip(first, homes, strict=True)]
            one = jax.tree.unflatten(jax.tree.structure(one), moved)
        self.cache = self.programs.insert(self.cache, one, np.int32(row))
        self.keys[row], self.values[row] = list(k[0, :length]), list(v[0, :length])
        self.dropped[row], self.stored = False, {}
        self._lengths()

    # ------------------------------------------------------------------------------------------------------ checks

    def _tokens(self, count: int, *, alone: bool = False) -> tuple[np.ndarray, ...]:
        """Random q, k, v [B, T, H, D] of the rows' next tokens, or of the first ones of new
        rows.
        """
        spec, rope = self.spec, self.programs.drawn.rope
        q, k, v = (
            self.rng.normal(size=(spec.batch, count, h, spec.head_dim)) for h in heads(spec)
        )
        if rope is not None:
            first = [0 if alone else len(row) for row in self.keys]
            positions = np.array(first, np.int32)[:, None] + np.arange(count, dtype=np.int32)
            q, k = (_turned(a, rope, positions) for a in (q, k))
        return q.astype(spec.dtype), k.astype(spec.dtype), v.astype(spec.dtype)

    def _lengths(self) -> None:
        """A row holds what it was given; if not, it is past its capacity and says so."""
        held = np.asarray(self.cache.length)
        told = np.any([np.asarray(layer.state.overflow) for layer in self.cache.layers], axis=0)
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
        self,
        out: np.ndarray,
        q: np.ndarray,
        b: int,
        read: np.ndarray,
        held: int,
        where: str,
        *,
        kv: int | None = None,
        log_weights: np.ndarray | None = None,
    ) -> None:
        """`out` [N, D] is attention of q [N, D] over the tokens `read`, as they are stored when
        `held` are.

        `log_weights` [S] are added to their logits.
        """
        spec = self.spec
        errors = []
        for stored in self._stored(b, held):
            k, v = (a[read].astype(np.float64) for a in stored)
            want = np.zeros(out.shape)
            for i, query in enumerate(q.astype(np.float64)):
                head = i // spec.group if kv is None else kv
                want[i] = _attend(
                    query, k[:, head], v[:, head], 0.0 if log_weights is None else log_weights
                )
            errors.append(float(np.abs(out - want).max()))
            if errors[-1] <= self.allowed:
                return
        raise Wrong(f"{where}: differs from attention over what it read by {min(errors):.2e}")

    def _stored(self, b: int, held: int) -> Any:
        """The row's keys and values [S, K, D] as its policy may give them back: those of a full
        block flushed or not, and for a recall of the step before as they were then."""
        for before in (0, held, held - 1, held - 2) if _rounds(self.policy) else (0,):
            key = b, len(self.keys[b]), before
            if before >= 0 and key not in self.stored:
                self.stored = {k: a for k, a in self.stored.items() if k[:2] == key[:2]}
                tokens = np.array(self.keys[b]), np.array(self.values[b])
                self.stored[key] = (
                    as_stored(self.policy, self.spec, *tokens, before) if before else tokens
                )
            if before >= 0:
                yield self.stored[key]

    def _finite(self, out: np.ndarray, what: str) -> None:
        if not np.isfinite(out).all():
            raise Wrong(f"{what} gives what is not finite")


def _readable(leaf: Any) -> Any:
    """On the device, where eager slices of it can be taken."""
    return jax.device_put(leaf, jax.memory.Space.Device)


def _alone(drawn: Configuration) -> Any:
    placement = drawn.placement and dataclasses.replace(drawn.placement, batch=None)
    return kvjax.init(
        drawn.layers,
        dataclasses.replace(drawn.spec, batch=1),
        layers=len(drawn.layers),
        placement=placement,
    )


def _turned(x: np.ndarray, rope: Any, positions: np.ndarray) -> np.ndarray:
    """x [B, T, H, D] as RoPE turns it, in float64."""
    frequencies = np.asarray(rope.frequencies(x.shape[-1], 60), np.float64)
    turns = np.exp(1j * positions[..., None, None] * frequencies) * rope.amplitude
    low, high = np.split(x, 2, axis=-1)
    turned = (low + 1j * high) * turns
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _attend(
    query: np.ndarray, k: np.ndarray, v: np.ndarray, log_weights: Any = 0.0
) -> np.ndarray:
    """Attention of one query [D] over k, v [S, D]."""
    logits = k @ query * query.size**-0.5 + log_weights
    weights = np.exp(logits - logits.max())
    return weights @ v / weights.sum()


def _rounds(policy: Any) -> bool:
    store = getattr(getattr(policy, "retrieval", policy), "store", None)
    inner = getattr(store, "store", store)  # of a hot set
    return (
        any(hasattr(inner, part) for part in ("bits", "rank"))
        or type(inner).__name__ == "HostFloat8"
    )


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
