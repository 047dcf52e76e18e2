"""Writes the Markdown of a table, and the numbers that several pages show alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from docs.tables.reading import of_its_paper


def markdown(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = True
) -> str:
    """A table whose first column is text, and the others numbers unless said otherwise."""
    rule = ["---", *["---:" if numbers else "---"] * (len(header) - 1)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, rule, *rows))


def short(share: float, digits: int = 2) -> str:
    """A share as README shows it: .95, 1.00."""
    return f"{share:.{digits}f}".removeprefix("0")


def mean_of(score: dict[str, Any] | None) -> str:
    """The mean of a score; empty if a cache has none."""
    return "" if score is None else short(score["mean"])


def perplexity_change(row: dict[str, Any]) -> str:
    """Change of perplexity against full attention, with its standard error."""
    return f"{100 * (row['ratio'] - 1):+.1f} ± {100 * row['ratio_stderr']:.1f} %"


def named(cache: str) -> str:
    """A cache as a table shows it, without its budget; with a dagger if its settings are not
    those of its paper.
    """
    text = cache.partition("@")[0]
    return f"`{text}`{'' if of_its_paper(cache) else ' †'}"


def points(share: float) -> str:
    """A share as whole points: 3 of .0297."""
    return f"{100 * share:.0f}"


def span(low: float, high: float) -> str:
    """Two numbers as a range, or one where both are shown alike: 5 to 6."""
    first, last = f"{low:.0f}", f"{high:.0f}"
    return first if first == last else f"{first} to {last}"
