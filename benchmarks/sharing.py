"""Which layers should select, and which can attend to what another layer selected.

`measure` drives the policy through live queries of all layers. It measures for each pair of
layers, and for each pair of their KV heads, how well the selection of the earlier layer serves
the later one. `Sharing.anchors` then finds the layers that should select, the anchors: those
that minimise the sum of the output errors of all layers, by dynamic programming over the
layers, if each KV head follows the head of its anchor that serves it best (`Sharing.heads`).

**Source:** Kascade (Deshmukh et al. 2025), anchor layers selected on a development text by
dynamic programming, and a map of KV heads. **Differs:** the cost is the relative error of the
outputs, where Kascade takes the similarity of attention mass; the selections are those of the
policy to be used.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax.attention import attention_info
from kvjax.cache.cache import LayerCache, init_layer
from kvjax.evaluate.capture import Live
from kvjax.evaluate.recall import exact_logits, store_prompt
from kvjax.evaluate.store import Progress
from kvjax.numerics.selection import Selection, membership
from kvjax.policies import PerLayer
from kvjax.spec import require_int


@dataclass(frozen=True)
class Sharing:
    """How well the selection of layer i serves layer j, for i <= j, means over steps and rows;
    NaN elsewhere.
    """

    first: int  # the first layer that may select; layers before it attend to everything
    # f[L, L] share of the tokens of layer j's own selection that layer i reads too
    overlap: np.ndarray
    mass: np.ndarray  # f[L, L] share of softmax mass of layer j on the tokens of layer i
    # f[L, L, K, K] |out - exact out| / |exact out| of KV head k of layer j over the tokens of
    # head h of layer i
    head_error: np.ndarray

    @property
    def error(self) -> np.ndarray:
        """f[L, L] the error if each KV head follows the head of the same number."""
        return np.asarray(np.diagonal(self.head_error, axis1=2, axis2=3).mean(axis=-1))

    @property
    def least_error(self) -> np.ndarray:
        """f[L, L] the error if each KV head of a later layer follows the head that serves it
        best.
        """
        least = self.head_error.min(axis=-1).mean(axis=-1)
        np.fill_diagonal(least, np.diagonal(self.error))
        return np.asarray(least)

    def anchors(self, count: int) -> tuple[int, ...]:
        """The `count` layers that should select to minimise the sum of the errors of all
        layers.

        Each KV head follows the head of its anchor that serves it best.
        """
        layers, error = len(self.overlap), self.least_error
        count = require_int(
            "anchors(count=...)", count, at_least=1, at_most=layers - self.first
        )
        # best[n][j]: least error of the layers from j on with n anchors, of which j is the
        # first; and the next anchor
        best = np.full((count + 1, layers + 1), np.inf)
        after = np.zeros((count + 1, layers + 1), int)
        best[0, layers] = 0.0
        for n in range(1, count + 1):
            for j in range(self.first, layers):
                costs = [
                    error[j, j:end].sum() + best[n - 1, end] for end in range(j + 1, layers + 1)
                ]
                best[n, j], after[n, j] = np.min(costs), j + 1 + int(np.argmin(costs))
        found, j = [], self.first
        for n in range(count, 0, -1):
            found.append(j)
            j = int(after[n, j])
        return tuple(found)

    def every(self, share: int) -> tuple[int, ...]:
        """The anchors that a preset's `share=...` gives."""
        return tuple(
            range(
                self.first,
                len(self.overlap),
                require_int("every(share=...)", share, at_least=1),
            )
        )

    def by_layer(self, anchors: tuple[int, ...]) -> list[dict[str, Any]]:
        """A row for each layer past the dense ones: its anchor, and how well the anchor's
        selection serves it.
        """
        rows, error, least = [], self.error, self.least_error
        for layer in range(self.first, len(self.overlap)):
            anchor = max(a for a in anchors if a <= layer)
            row: dict[str, Any] = {"layer": layer, "selected by": anchor}
            for name, of in (("overlap", self.overlap), ("mass", self.mass), ("error", error)):
                row[name] = float(of[anchor, layer])
            rows.append(
                {
                    **row,
                    "best heads": float(least[anchor, layer]),
                    "own error": float(error[layer, layer]),
                }
            )
        return rows

    def total_error(self, anchors: tuple[int, ...], *, best_heads: bool = False) -> float:
        """Mean of the output error over the layers past the dense ones."""
        return float(
            np.mean(
                [row["best heads" if best_heads else "error"] for row in self.by_layer(anchors)]
            )
        )

    def heads(self, anchors: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
        """For the layers that follow, which KV head of the anchor serves each of their KV heads
        best (`Shared.heads`).

        Layers whose heads are served best by the heads of the same numbers are left out.
        """
        found = {}
        for row in self.by_layer(anchors):
            layer, anchor = row["layer"], row["selected by"]
            best = tuple(int(h) for h in np.argmin(self.head_error[anchor, layer], axis=-1))
            if layer != anchor and best != tuple(range(len(best))):
                found[layer] = best
        return found


def measure(live: Live, policies: PerLayer, *, progress: Progress | None = None) -> Sharing:
    """Lets every layer select for itself and for the layers after it, through the live steps.

    `policies` are those of a preset with a selection, such as `presets.fier(256)`. Its first
    layers are dense and are left out. `progress` is called with the layers done, their number,
    and the layer.

    Cost: each live step runs the policy once per layer, and full attention once per pair of
    layers and KV head.

    Raises:
      ValueError: policies without a selection, or dense layers only.
    """
    layers, first = len(live.layers), len(policies.first)
    policies.rest.follower()  # raises for policies that select nothing
    if first >= layers:
        raise ValueError(
            f"the first {first} layers attend to everything and the model has {layers}; none selects"
        )
    kv_heads = live.layers[0].spec.kv_heads
    overlap, mass = (np.full((layers, layers), np.nan) for _ in range(2))
    head_error = np.full((layers, layers, kv_heads, kv_heads), np.nan)
    read: list[np.ndarray] = []  # by layer i32[T, B, K, H, M]
    for j in range(first, layers):
        layer = live.layers[j]
        own = []
        for run in live.runs():
            start = int(live.positions[run.start])
            cache = store_prompt(
                init_layer(policies.rest, layer.spec), layer.k, layer.v, 0, start
            )
            q = jnp.moveaxis(layer.q[:, run], 1, 0)
            own.append(
                np.asarray(
                    _positions(cache, q, layer.k, layer.v, start, layer.scale, layer.window)
                )
            )
        read.append(np.concatenate(own))
        q, at = jnp.moveaxis(layer.q, 1, 0), jnp.asarray(live.positions)
        for i in range(first, j + 1):
            served = _serve(
                q, layer.k, layer.v, at, read[i - first], read[-1], layer.scale, layer.window
            )
            overlap[i, j], mass[i, j] = (float(a) for a in served[:2])
            head_error[i, j] = np.asarray(served[2])
        if progress is not None:
            progress(j + 1 - first, layers - first, f"layer {j}")
    return Sharing(first, overlap, mass, head_error)


@partial(jax.jit, static_argnums=(5, 6))
def _positions(
    cache: LayerCache,
    q: Array,
    k: Array,
    v: Array,
    start: int,
    scale: float,
    window: int | None,
) -> Array:
    """Positions i32[T, B, K, H, M] that the policy reads in the steps of q [T, B, N, D] from
    position `start` on.
    """

    def step(cache: Any, x: Any) -> tuple[Any, Array]:
        q, position = x
        kt, vt = (
            jnp.swapaxes(lax.dynamic_slice_in_dim(a, position, 1, axis=2), 1, 2) for a in (k, v)
        )
        _, cache, info = attention_info(cache, q[:, None], kt, vt, scale=scale, window=window)
        assert info is not None
        assert info.positions is not None
        return cache, info.positions

    return lax.scan(step, cache, (q, start + jnp.arange(q.shape[0])))[1]


@partial(jax.jit, static_argnums=(6, 7))
def _serve(
    q: Array,
    k: Array,
    v: Array,
    at: Array,
    read: Array,
    own: Array,
    scale: float,
    window: int | None,
) -> tuple[Array, Array, Array]:
    """Overlap, mass, and error by pairs of heads, of steps q [T, B, N, D] at positions `at`
    that attend to `read`.
    """
    S = k.shape[2]

    def members(positions: Array) -> Array:
        return membership(
            Selection(jnp.maximum(positions, 0), positions >= 0), S
        )  # bool[B, K, H, S]

    def step(x: Any) -> tuple[Array, Array, Array]:
        q, position, read, own = x
        logits, visible = exact_logits(q, k, position, scale=scale, window=window)
        weights = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf), axis=-1)
        got, wanted = members(read), members(own)
        both = jnp.sum(got & wanted, axis=-1) / jnp.maximum(jnp.sum(wanted, axis=-1), 1)
        mass = jnp.sum(jnp.where(got, weights, 0.0), axis=-1)

        def attend(w: Array) -> Array:
            return jnp.einsum("bkgs,bksd->bkgd", w, v.astype(jnp.float32), precision="highest")

        exact = attend(weights)
        size = jnp.maximum(jnp.linalg.norm(exact, axis=-1), jnp.finfo(jnp.float32).tiny)

        def error(tokens: Array) -> Array:
            """f[K]: the error of every KV head over the tokens bool[B, H, S] of one head."""
            few = jax.nn.softmax(
                jnp.where(visible & tokens[:, None], logits, -jnp.inf), axis=-1
            )
            return jnp.mean(jnp.linalg.norm(attend(few) - exact, axis=-1) / size, axis=(0, 2))

        return jnp.mean(both), jnp.mean(mass), lax.map(error, jnp.moveaxis(got, 1, 0)).T

    means = lax.map(step, (q, at, read, own))
    return tuple(jnp.mean(a, axis=0) for a in means)  # type: ignore[return-value]
