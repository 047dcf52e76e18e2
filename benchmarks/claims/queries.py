"""How far queries turn from step to step: FreeKV reuses a recall while they hardly do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvjax.evaluate.capture import Live
from kvjax.evaluate.recall import mean_known


@dataclass(frozen=True)
class Turns:
    """How far queries turn from step to step, as FreeKV's correction sees it."""

    cosines: np.ndarray  # f[L, T, B, K] mean over the group of cosine(q_t, q_{t-1}), for each pair of adjacent steps
    runs: np.ndarray  # i[T] which run of adjacent steps a pair is of, from 0

    def corrected(self, tau: float) -> tuple[float, float]:
        """Shares of (step, kv head) below `tau`, and of (step, layer) with such a head: FreeKV
        then selects again.
        """
        below = self.cosines < tau
        return float(below.mean()), float(below.any(axis=-1).mean())

    def by_head(self) -> tuple[np.ndarray, np.ndarray | None]:
        """The mean of each head f[L, K], and its standard error, of which runs are the sample:
        adjacent pairs of one run are much alike. One run has no error.
        """
        of_steps = self.cosines.mean(axis=2)  # [L, T, K]
        count = int(self.runs[-1]) + 1
        of_runs = np.stack([of_steps[:, self.runs == run].mean(axis=1) for run in range(count)])
        error = None if count == 1 else of_runs.std(axis=0, ddof=1) / np.sqrt(count)
        return of_runs.mean(axis=0), error

    def summary(
        self, taus: Sequence[float] = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
    ) -> dict[str, Any]:
        """Quantiles by layer, means of heads with their errors, and corrected shares by tau, as
        JSON.
        """
        at = (0.05, 0.25, 0.5, 0.75, 0.95)
        mean, error = self.by_head()
        quantiles = np.quantile(self.cosines.reshape(len(self.cosines), -1), at, axis=-1).T
        return {
            "quantiles": list(at),
            "cosine_by_layer": quantiles.round(5).tolist(),
            "mean_by_layer": [mean_known(layer) for layer in self.cosines],
            "mean_by_head": mean.round(5).tolist(),
            "mean_by_head_stderr": None if error is None else error.round(5).tolist(),
            "corrected_heads": {str(tau): round(self.corrected(tau)[0], 5) for tau in taus},
            "corrected_steps": {str(tau): round(self.corrected(tau)[1], 5) for tau in taus},
            "corrected_heads_by_layer": {
                str(tau): [round(float((layer < tau).mean()), 5) for layer in self.cosines]
                for tau in taus
            },
        }


def turns(live: Live) -> Turns:
    """The cosine of each live query to the one of the step before, by kv head.

    Raises:
      ValueError: no two recorded steps are adjacent.
    """
    first = np.flatnonzero(np.diff(live.positions) == 1)
    if not len(first):
        raise ValueError(
            "turns needs steps at adjacent positions; capture with steps=2 or more"
        )
    # A pair begins a run unless the one before it ends where it begins.
    runs = np.cumsum(np.diff(live.positions[first], prepend=live.positions[first[0]]) > 1)
    cosines = []
    for layer in live.layers:
        B = layer.q.shape[0]
        q = np.asarray(layer.q, np.float32)
        q = q / np.maximum(np.linalg.norm(q, axis=-1, keepdims=True), np.finfo(np.float32).tiny)
        each = np.sum(q[:, first] * q[:, first + 1], axis=-1)  # [B, T, N]
        grouped = each.reshape(B, len(first), layer.k.shape[1], -1).mean(axis=-1)
        cosines.append(np.clip(np.moveaxis(grouped, 1, 0), -1.0, 1.0))
    return Turns(np.stack(cosines), runs)
