"""Which tokens to keep exact: LogQuant's claim, measured on live queries.

LogQuant, KIVI and the eviction methods all keep some E tokens exact. They differ in which
tokens these are, and in whether the others are quantised or dropped. At equal E there are two
questions. Coverage: how much of the attention do the exact tokens hold (LogQuant, Fig. 4)?
Loss: how large is the error of attention if the others are quantised, or dropped (its Table 2)?

The exact tokens follow from the policy and the length alone, so they are computed on the host;
quantised keys and values are read back from the policy's own store, for the chunks that left
the recent block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax import presets
from kvjax.evaluate.capture import Live, LiveLayer
from kvjax.evaluate.recall import exact_logits
from kvjax.evaluate.store import Progress
from kvjax.policies import Compressed
from kvjax.stores.demotion import Fifo

SINKS = 2  # first tokens that the second coverage leaves out, as they draw attention whatever their content


def exact_tokens(policy: Compressed, length: int) -> np.ndarray:
    """i[E], the positions that are exact right after the decode step that stores token number
    `length` of a row.

    >>> from kvjax import Compressed, LogSparse
    >>> exact_tokens(Compressed(local=2, demote=LogSparse(window=2)), 9)
    array([0, 4, 6, 7, 8])
    """
    sink = min(policy.sink, length)
    line, slots, leave = length - sink, policy.demote.slots(policy.local), policy.demote.leave
    flushes = max(0, -(-(line - slots) // leave))
    block = np.asarray(policy.demote.place(jnp.int32(flushes), jnp.arange(slots)))[
        : line - flushes * leave
    ]
    return np.concatenate([np.arange(sink), np.sort(sink + block)])


def decoded(policy: Compressed, k: Array, v: Array) -> tuple[Array, Array]:
    """Keys and values [B, K, S, D], decoded from the store for tokens that have left the recent
    block of a row of S tokens; all others as they are."""
    line, slots, leave = (
        k.shape[2] - policy.sink,
        policy.demote.slots(policy.local),
        policy.demote.leave,
    )
    flushes = max(0, -(-(line - slots) // leave))
    if not flushes:
        return k, v
    leaving = jnp.asarray(policy.demote.leaving(policy.local), jnp.int32)
    place = policy.sink + policy.demote.place(
        jnp.arange(flushes)[:, None], leaving[None]
    ).reshape(-1)
    stored = policy.store.decoded(k[:, :, place], v[:, :, place])
    kq, vq = (
        a.at[:, :, place].set(b.astype(a.dtype)) for a, b in zip((k, v), stored, strict=True)
    )
    return kq, vq


class _Seen(NamedTuple):
    """Measurements of one step, or of T steps along a first axis."""

    mass: Any  # f32[B, N] share of attention on the exact tokens
    mass_past_sinks: Any  # f32[B, N] the same share of the attention past the first tokens
    top: Any  # f32[B, N] share of the E most attended tokens that are exact
    weights: Any  # f32[B, N] sum of |weight - exact weight| over the tokens
    outputs: Any  # f32[B, N] sum of |out - exact out| over the channels
    error: Any  # f32[B, N] |out - exact out| / |exact out|


@dataclass(frozen=True)
class Kept:
    """The effect of keeping some tokens exact, at T live steps of L layers and B rows."""

    lengths: np.ndarray  # i[T]
    exact: np.ndarray  # i[T] tokens that are exact
    mass: np.ndarray  # f[L, T, B, N], as all below; see `_Seen`
    mass_past_sinks: np.ndarray
    top: np.ndarray
    weights: np.ndarray
    outputs: np.ndarray
    error: np.ndarray

    def row(self) -> dict[str, float]:
        """Means over everything, for a table."""
        kinds = ("mass", "mass_past_sinks", "top", "weights", "outputs", "error")
        return {"exact": round(float(self.exact.mean()), 1)} | {
            kind: round(float(getattr(self, kind).mean()), 5) for kind in kinds
        }

    def summary(self) -> dict[str, Any]:
        """Means as JSON: over everything, and by layer."""
        kinds = ("mass", "mass_past_sinks", "top", "outputs")
        return {
            "mean": self.row(),
            "by_layer": {
                k: [round(float(a.mean()), 5) for a in getattr(self, k)] for k in kinds
            },
        }


Mask = Callable[
    [LiveLayer, np.ndarray], np.ndarray
]  # bool[R, 1 or K, S]: exact tokens of R steps at these positions


def keep(live: Live, mask: Mask, policy: Compressed | None) -> Kept:
    """Keeps the tokens of `mask` exact; the others are decoded from the store of `policy`, or
    dropped if it is None.
    """
    found, exact = [], []
    for layer in live.layers:
        kq, vq = (layer.k, layer.v) if policy is None else decoded(policy, layer.k, layer.v)
        steps = []
        for run in live.runs():
            positions = live.positions[run]
            kept = mask(replace(layer, q=layer.q[:, run]), positions)
            q = jnp.moveaxis(layer.q[:, run], 1, 0)
            settings = {"scale": layer.scale, "window": layer.window, "drop": policy is None}
            seen = _keep(
                q,
                layer.k,
                layer.v,
                kq,
                vq,
                jnp.asarray(kept),
                jnp.asarray(positions),
                **settings,
            )
            steps.append(jax.tree.map(np.asarray, seen))
            if layer is live.layers[0]:
                exact.append(kept.sum(axis=-1).mean(axis=-1))
        found.append(jax.tree.map(lambda *parts: np.concatenate(parts), *steps))
    whole: _Seen = jax.tree.map(lambda *layers: np.stack(layers), *found)
    return Kept(live.lengths, np.concatenate(exact), *whole)


@partial(jax.jit, static_argnames=("scale", "window", "drop"))
def _keep(
    q: Array,
    k: Array,
    v: Array,
    kq: Array,
    vq: Array,
    exact: Array,
    positions: Array,
    *,
    scale: float,
    window: int | None,
    drop: bool,
) -> _Seen:
    """q [R, B, N, D], k, v and kq, vq [B, K, S, D], exact bool[R, 1 or K, S], positions i32[R]."""

    def step(x: tuple[Array, Array, Array]) -> _Seen:
        qt, kept, position = x
        logits, visible = exact_logits(qt, k, position, scale=scale, window=window)
        coded, _ = exact_logits(qt, kq, position, scale=scale, window=window)
        kept = kept[None, :, None] & visible  # [1, 1 or K, 1, S]
        true = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf), axis=-1)
        seen = kept if drop else visible
        weights = jax.nn.softmax(
            jnp.where(seen, jnp.where(kept, logits, coded), -jnp.inf), axis=-1
        )

        def mix(share: Array, values: Array) -> Array:
            return jnp.einsum(
                "bkgs,bksd->bkgd", share, values.astype(jnp.float32), precision="highest"
            )

        wanted = mix(true, v)
        off = (
            mix(jnp.where(kept, weights, 0.0), v)
            + mix(jnp.where(kept, 0.0, weights), vq)
            - wanted
        )
        tiny = jnp.finfo(jnp.float32).tiny
        later = jnp.where(jnp.arange(k.shape[2])[None, None, None] >= SINKS, true, 0.0)
        count = jnp.broadcast_to(jnp.sum(kept, axis=-1, keepdims=True), (*true.shape[:3], 1))
        least = jnp.take_along_axis(
            jnp.sort(true, axis=-1, descending=True), jnp.maximum(count - 1, 0), axis=-1
        )
        top = visible & (true >= least)
        found = _Seen(
            mass=jnp.sum(jnp.where(kept, true, 0.0), axis=-1),
            mass_past_sinks=jnp.sum(jnp.where(kept, later, 0.0), axis=-1)
            / jnp.maximum(jnp.sum(later, axis=-1), tiny),
            top=jnp.sum(top & kept, axis=-1, dtype=jnp.float32)
            / jnp.sum(top, axis=-1, dtype=jnp.float32),
            weights=jnp.sum(jnp.abs(weights - true), axis=-1),
            outputs=jnp.sum(jnp.abs(off), axis=-1),
            error=jnp.linalg.norm(off, axis=-1)
            / jnp.maximum(jnp.linalg.norm(wanted, axis=-1), tiny),
        )
        return jax.tree.map(lambda a: a.reshape(a.shape[0], -1), found)

    return lax.map(step, (q, exact, positions))


# ----------------------------------------------------------------------------------------------------- attended tokens


@dataclass(frozen=True)
class Attended:
    """Which tokens attention goes to, at T live steps of L layers and N heads; adjacent steps
    for `overlap`.
    """

    first_two: np.ndarray  # f[L, T, B, N] share of attention on the first two tokens
    newest: np.ndarray  # f[L, T, B, N] share on the newest 128
    # f[L, T', B, N] share of the most attended tokens that were so a step before
    overlap: np.ndarray

    def row(self) -> dict[str, float]:
        """Means over everything, for a table."""
        return {
            kind: round(float(getattr(self, kind).mean()), 5)
            for kind in ("first_two", "newest", "overlap")
        }

    def summary(self) -> dict[str, Any]:
        """Means as JSON: over everything, and by layer."""
        by_layer = {
            k: [round(float(a.mean()), 5) for a in getattr(self, k)] for k in self.row()
        }
        return {"mean": self.row(), "by_layer": by_layer}


def attended(live: Live, *, newest: int = 128, top: int = 126) -> Attended:
    """Attention of the first two and the newest tokens, and the overlap of the `top` tokens of
    adjacent steps.

    The overlap leaves out the first two tokens and the newest `newest`, which are among the
    best in most steps.
    """
    found = []
    for layer in live.layers:
        q, at = jnp.moveaxis(layer.q, 1, 0), jnp.asarray(live.positions)
        masses = _attended(
            q, layer.k, at, scale=layer.scale, window=layer.window, newest=newest, top=top
        )
        first_two, last, best = map(np.asarray, masses)
        shares = [
            (best[i + 1][..., :, None] == best[i][..., None, :]).any(axis=-1).mean(axis=-1)
            for i in np.flatnonzero(np.diff(live.positions) == 1)
        ]
        found.append((first_two, last, np.stack(shares)))
    return Attended(*(np.stack(kind) for kind in zip(*found, strict=True)))


@partial(jax.jit, static_argnames=("scale", "window", "newest", "top"))
def _attended(
    q: Array,
    k: Array,
    positions: Array,
    *,
    scale: float,
    window: int | None,
    newest: int,
    top: int,
) -> tuple[Array, Array, Array]:
    """Shares f32[T, B, N] of the first two tokens and of the newest, and the most attended
    tokens i32[T, B, N, top] between them, of q [T, B, N, D]."""

    def step(x: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        logits, visible = exact_logits(x[0], k, x[1], scale=scale, window=window)
        true = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf), axis=-1)
        true = true.reshape(true.shape[0], -1, true.shape[-1])
        place, start = jnp.arange(k.shape[2]), x[1] + 1 - newest
        between = jnp.where((place >= SINKS) & (place < start), true, -1.0)
        last = jnp.sum(
            jnp.where((place >= jnp.maximum(start, SINKS)) & (place <= x[1]), true, 0.0),
            axis=-1,
        )
        return jnp.sum(true[..., :SINKS], axis=-1), last, lax.top_k(between, top)[1]

    return lax.map(step, (q, positions))


# -------------------------------------------------------------------------------------------------------- exact tokens


def of_policy(policy: Compressed) -> Mask:
    """The tokens that a policy keeps exact."""
    return _mask(lambda length: exact_tokens(policy, length))


def newest(like: Compressed, *, sink: int = 0) -> Mask:
    """`sink` first tokens and the newest ones, in total as many as `like` keeps exact: a
    window, or StreamingLLM.
    """

    def positions(length: int) -> np.ndarray:
        count = len(exact_tokens(like, length))
        first = min(sink, count)
        return np.concatenate([np.arange(first), np.arange(length - count + first, length)])

    return _mask(positions)


def heavy(like: Compressed, queries: int = 16) -> Mask:
    """Half the newest tokens, half those that drew most attention, in total as many as `like`
    keeps exact.

    The mass is that of the `queries` live queries before the step in its run (or fewer, at its
    beginning), summed over the group: the selection of H2O and SnapKV by recent queries, as if
    no token had been evicted before. A run's first step has no queries before it and keeps the
    newest tokens.
    """

    def mask(layer: LiveLayer, positions: np.ndarray) -> np.ndarray:
        K, S = layer.k.shape[1:3]
        kept = np.zeros((len(positions), K, S), bool)
        drawn: list[np.ndarray] = []
        for i, position in enumerate(positions):
            count = len(exact_tokens(like, int(position) + 1))
            new = count if not drawn else count // 2
            kept[i, :, position + 1 - new : position + 1] = True
            if drawn:
                mass = np.sum(drawn[-queries:], axis=0)
                mass[:, position + 1 - new :] = -1.0
                best = np.argsort(-mass, axis=-1, kind="stable")[:, : count - new]
                np.put_along_axis(kept[i], best, True, axis=-1)
            drawn.append(
                np.asarray(
                    _mass(layer.q[:, i], layer.k, int(position), layer.scale, layer.window)
                )
            )
        return kept

    return mask


@partial(jax.jit, static_argnums=(3, 4))
def _mass(q: Array, k: Array, position: Array, scale: float, window: int | None) -> Array:
    """f32[K, S]: attention that each token draws, summed over rows and the group."""
    logits, visible = exact_logits(q, k, position, scale=scale, window=window)
    return jnp.sum(jax.nn.softmax(jnp.where(visible, logits, -jnp.inf), axis=-1), axis=(0, 2))


def _mask(positions: Callable[[int], np.ndarray]) -> Mask:
    def mask(layer: LiveLayer, at: np.ndarray) -> np.ndarray:
        kept = np.zeros((len(at), 1, layer.k.shape[2]), bool)
        for i, position in enumerate(at):
            kept[i, 0, positions(int(position) + 1)] = True
        return kept

    return mask


def logquant(
    live: Live,
    *,
    window: int = 42,
    bits: tuple[int, ...] = (2, 4),
    progress: Progress | None = None,
) -> dict[str, Kept]:
    """Coverage and loss of LogQuant's pattern, a window, StreamingLLM and recent attention,
    with 2W to 3W exact tokens.

    "drop" drops the other tokens; "n bits" quantises them all the same way: keys by channel in
    groups of W tokens, values by token. "KIVI" is the preset, which keeps 1 to 128 tokens exact
    in groups of 32.
    """
    logsparse = presets.logquant(window).rest
    assert isinstance(logsparse, Compressed)
    cases: dict[str, tuple[Mask, Compressed | None]] = {
        "log-sparse, drop": (of_policy(logsparse), None),
        "window, drop": (newest(logsparse), None),
        "sink and window, drop": (newest(logsparse, sink=4), None),
        "recent attention, drop": (heavy(logsparse), None),
    }
    for n in bits:
        made = presets.logquant(window, bits=n).rest
        assert isinstance(made, Compressed)
        windowed = replace(
            made, demote=Fifo(leave=window), local=2 * window + 1
        )  # 2W + 1 to 3W newest, as LogSparse
        cases[f"log-sparse, {n} bits"] = (of_policy(made), made)
        cases[f"window, {n} bits"] = (of_policy(windowed), windowed)
        kivi = presets.kivi(n).rest
        assert isinstance(kivi, Compressed)
        cases[f"KIVI, {n} bits"] = (of_policy(kivi), kivi)
    found = {}
    for done, (name, (mask, policy)) in enumerate(cases.items()):
        if progress is not None:
            progress(done, len(cases), name)
        found[name] = keep(live, mask, policy)
    return found
