"""Plots of claims. Each function takes the result of a measurement and returns a
`matplotlib.figure.Figure` to save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.claims.queries import Turns
from kvjax.evaluate.plots import MARKERS, labels, new_figure, style
from kvjax.evaluate.recall import Reads, known_mean, mean_known

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which are distinct to people with any colour vision.
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#999999",
)
WORDS: dict[str, str] = {
    "first_two": "attention to the first two tokens",
    "newest": "attention to the newest 128 tokens",
    "overlap": "best tokens that were so a step before",
    "recall": "set recall",
    "head_recall": "set recall by query head",
    "mass": "attention mass",
    "error": "relative error of the output",
    "mass_past_sinks": "attention mass past the first 2 tokens",
    "top": "share of the most attended tokens",
    "outputs": "L1 error of the output",
    "weights": "L1 error of the weights",
}


def panels(count: int, *, height: float, share: bool = False) -> tuple[Figure, Sequence[Axes]]:
    """`count` axes in a row, without a frame at the top and right."""
    figure = new_figure(max(4.0 * count, 5.0), height)
    axes = figure.subplots(1, count, squeeze=False, sharey=share)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return figure, axes


def recall_by_length(found: Mapping[str, Reads]) -> Figure:
    """Recall, mass and error of each policy by the length of the context."""
    figure, axes = panels(3, height=3.6)
    short = labels(list(found))
    for axis, kind in zip(axes, ("recall", "mass", "error"), strict=True):
        for name, seen in found.items():
            places = seen.by_length()
            means = [known_mean(getattr(seen, kind)[:, at]) for at in places.values()]
            axis.plot(
                list(places), means, label=short[name], markersize=4, **style(name, list(found))
            )
        axis.set(
            xlabel="context (tokens)",
            ylabel=WORDS[kind],
            ylim=(0, None) if kind == "error" else (0, 1.02),
        )
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g}K" if x >= 1024 else f"{x:g}")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside lower center", ncols=min(len(names), 5), frameon=False
    )
    return figure


def dots(found: Mapping[str, Any], kinds: Sequence[str]) -> Figure:
    """The mean of each of `kinds` for each policy, one panel per kind."""
    figure, axes = panels(len(kinds), height=1.2 + 0.28 * len(found), share=True)
    at = np.arange(len(found))[::-1]
    for axis, kind in zip(axes, kinds, strict=True):
        values = [known_mean(getattr(seen, kind)) for seen in found.values()]
        axis.hlines(at, 0, values, color="0.8", linewidth=1)
        for name, x, y in zip(found, values, at, strict=True):
            axis.plot(x, y, markersize=6, **style(name, list(found)))
            axis.annotate(
                f"{x:.3g}",
                (x, y),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        axis.set(
            xlabel=WORDS[kind], xlim=(0, 1.25 * max([v for v in values if v == v], default=1.0))
        )
        axis.set_yticks(at, labels(list(found)).values())
    return figure


def of_rules(found: Mapping[str, Reads]) -> Figure:
    """Means of each rule by which a GQA group shares a selection."""
    return dots(found, ("head_recall", "mass", "error"))


def maps(found: Mapping[str, Reads], names: Sequence[str] | None = None) -> Figure:
    """Recall of each query head's own top tokens, layer by head, for each policy: FIER's Fig.
    6.
    """
    names = list(found) if names is None else list(names)
    figure, axes = panels(len(names), height=3.6)
    for axis, name in zip(axes, names, strict=True):
        values = np.nanmean(found[name].head_recall, axis=(1, 2))
        image = axis.imshow(
            values, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest"
        )
        axis.set(title=f"{name}: {values.mean():.2f}", xlabel="query head", ylabel="layer")
        axis.grid(visible=False)
    figure.colorbar(image, ax=list(axes), label="set recall", shrink=0.9)
    return figure


def turning(
    seen: Turns, taus: Sequence[float] = tuple(np.round(np.linspace(0.3, 1.0, 29), 3))
) -> Figure:
    """Cosine of adjacent queries by layer, and the share of them that FreeKV would correct."""
    figure, (left, right) = panels(2, height=3.6)
    quantiles = np.quantile(
        seen.cosines.reshape(len(seen.cosines), -1), (0.05, 0.25, 0.5, 0.75, 0.95), axis=-1
    )
    layer = np.arange(len(seen.cosines))
    left.fill_between(
        layer, quantiles[0], quantiles[4], color=COLOURS[5], alpha=0.3, label="5 to 95 %"
    )
    left.fill_between(
        layer, quantiles[1], quantiles[3], color=COLOURS[5], alpha=0.7, label="25 to 75 %"
    )
    left.plot(layer, quantiles[2], color=COLOURS[0], label="median")
    left.set(
        xlabel="layer",
        ylabel="cosine to the query of the step before",
        ylim=(min(0, quantiles.min()), 1),
    )
    left.legend(frameon=False)
    shares = np.array([seen.corrected(tau) for tau in taus])
    right.plot(
        taus, shares[:, 1], color=COLOURS[1], label="steps with a head that turned, by layer"
    )
    right.plot(taus, shares[:, 0], color=COLOURS[0], label="kv heads that turned")
    for tau in (0.8, 0.9):
        right.axvline(tau, color=COLOURS[7], linewidth=0.8, linestyle=":")
    right.set(xlabel="tau", ylabel="corrected share", ylim=(0, 1.02))
    right.legend(frameon=False)
    return figure


def drifting(found: Mapping[str, Reads], *, prompt: int) -> Figure:
    """Recall along a text, of indexes that learnt from its first `prompt` tokens, or did not
    learn.
    """
    figure, axes = panels(2, height=3.8)
    for axis, voting in zip(axes, (False, True), strict=True):
        cases = {name: seen for name, seen in found.items() if ("candidates" in name) == voting}
        colours: dict[str, Any] = {}
        for name, seen in cases.items():
            base, _, when = (
                name.rpartition(", ")
                if name.endswith((", prompt", ", anew"))
                else (name, "", "")
            )
            colour = colours.setdefault(base, COLOURS[len(colours)])
            places = seen.by_length()
            x = [length - prompt for length in places]
            y = [mean_known(seen.recall[:, at]) for at in places.values()]
            axis.plot(
                x,
                y,
                "--" if when == "anew" else "-",
                color=colour,
                marker=MARKERS[len(colours) - 1],
                label=name,
            )
        what = (
            "of the exact top 100 among the candidates"
            if voting
            else "recall@100 of the whole index"
        )
        axis.set(xlabel=f"tokens after the prompt of {prompt}", ylabel=what, ylim=(0, 1.02))
        axis.legend(frameon=False, fontsize=8)
    return figure
