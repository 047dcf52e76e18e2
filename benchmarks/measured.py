"""Measurements on a text: its tokens, the provenance of the numbers, and the files that they
are written to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvjax.evaluate.provenance import (
    digest,
    json_text,
    model_digest,
    provenance,
    read_text,
    replace_file,
)
from kvjax.evaluate.report import markdown_table
from kvjax.models import Checkpoint


def read_tokens(checkpoint: Checkpoint, text: Path, length: int) -> list[int]:
    """The first `length` tokens of a UTF-8 file.

    Raises:
      ValueError: it has fewer.
    """
    words = read_text(text, what="--text takes a UTF-8 file with a long text")
    tokens = checkpoint.tokenizer(words, verbose=False)["input_ids"][:length]
    if len(tokens) < length:
        raise ValueError(
            f"--text {text} has {len(tokens)} tokens, fewer than --length {length}; give a longer one"
        )
    return tokens


def about(
    directory: Path, text: Path, dtype: str, lengths: Sequence[int], steps: int
) -> dict[str, Any]:
    """The provenance of a measurement, for the head of its file; JSON."""
    return {
        **provenance(),
        "model": {"name": directory.resolve().name, "digest": model_digest(directory)},
        "text": {"name": text.name, "digest": digest(text)},
        "dtype": dtype,
        "lengths": list(lengths),
        "steps": steps,
    }


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of rows that have the same keys; "-" for numbers that are not known."""
    titles = list(rows[0])

    def cell(value: Any) -> str:
        if not isinstance(value, float):
            return str(value)
        return "-" if value != value else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"

    return markdown_table(titles, [[cell(row[t]) for t in titles] for row in rows]) + "\n"


def write(
    out: Path,
    kind: str,
    head: Mapping[str, Any],
    results: Mapping[str, Any],
    table: str,
    figure: Any,
) -> list[Path]:
    """Writes measure_KIND.json, .md and .svg to the folder `out`, and returns their paths."""
    paths = [out / f"measure_{kind}.{suffix}" for suffix in ("json", "md", "svg")]
    replace_file(paths[0], json_text({**head, "measure": kind, "results": results}, indent=1))
    replace_file(paths[1], table)
    figure.savefig(paths[2])
    return paths


def write_rows(
    path: Path, head: Mapping[str, Any], rows: Iterable[Mapping[str, Any]], name: str = "rows"
) -> None:
    """Writes a JSON object atomically: `head`, then `rows` with one row a line, so that diffs
    show rows.
    """
    lines = ",\n".join("    " + json_text(row).rstrip() for row in rows)
    before = json_text(dict(head), indent=1).removesuffix("\n}\n") + "," if head else "{"
    replace_file(path, f'{before}\n "{name}": [\n{lines}\n ]\n}}\n')
