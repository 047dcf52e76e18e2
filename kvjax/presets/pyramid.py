"""Budgets that differ by layer."""

from __future__ import annotations


def pyramid(budget: int, layers: int, beta: float) -> list[int]:
    """Tokens of each layer, falling linearly to budget/beta in the last one, with a mean of about `budget`.

    **Source:** PyramidKV (Cai et al. 2024, arXiv 2406.02069), section 4: with L layers, the last has total / (beta L)
    and the first 2 total / L minus that.

    >>> pyramid(100, 5, 20)
    [195, 148, 100, 52, 5]
    """
    last = budget / beta
    first = 2 * budget - last
    step = (first - last) / max(layers - 1, 1)
    return [round(first - step * i) for i in range(layers)] if layers > 1 else [budget]
