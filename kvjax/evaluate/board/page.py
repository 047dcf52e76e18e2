"""The board as JSON and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvjax.evaluate.board.groups import (
    Group,
    by_time,
    equal_costs,
    groups,
    of_memory,
    of_reads,
)
from kvjax.evaluate.board.pictures import picture, picture_by_time
from kvjax.evaluate.board.rows import Row
from kvjax.evaluate.provenance import json_text, replace_file
from kvjax.evaluate.report import about, markdown_table
from kvjax.evaluate.store import Cell

FORMAT = 1
NO_BREAK = "\u00a0"  # a space at which no line breaks
LONG = 32768  # tokens past which the project itself has not measured quality


def document(
    cells: Sequence[Cell],
    rows: Sequence[Row],
    *,
    steps: Sequence[Mapping[str, Any]] = (),
    command: str = "",
) -> dict[str, Any]:
    """All of a board as JSON: model, versions and devices, every row, and why caches were not
    run.
    """
    refused = {cell.cache: cell.refused for cell in cells if cell.refused}
    return {
        "format": FORMAT,
        "command": command,
        **about(cells),
        "tasks": {cell.task: cell.key["task"] for cell in cells if cell.examples},
        "rows": [asdict(row) for row in rows],
        "steps": list(steps),
        "refused": refused,
    }


def read_rows(board: Mapping[str, Any]) -> list[Row]:
    """The rows of a board's JSON.

    Raises:
      ValueError: JSON of another format.
    """
    if board.get("format") != FORMAT:
        raise ValueError(
            f"a board must have format={FORMAT}, got {board.get('format')}; make it again with kvjax eval --board"
        )
    return [Row(**row) for row in board["rows"]]


def write(board: Mapping[str, Any], out: Path) -> list[Path]:
    """Writes board.json, board.md and the pictures to `out`, and returns their paths."""
    written = [out / "board.json", out / "board.md"]
    replace_file(written[0], json_text(board, indent=1))
    text, drawn = page(board)
    replace_file(written[1], text)
    for name, svg in drawn.items():
        written.append(out / name)
        replace_file(written[-1], svg)
    return written


def page(board: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """The page as Markdown, and its pictures as SVG by the names of their files."""
    rows = read_rows(board)
    parts = [_head(board, rows)]
    drawn: dict[str, str] = {}
    for group in groups(rows):
        text, own = _section(group, board["steps"])
        parts.append(text)
        drawn |= own
    if board["refused"]:
        reasons = (f"- `{cache}`: {why}" for cache, why in board["refused"].items())
        parts.append("## Not run\n\n" + "\n".join(reasons))
    parts.append(_HOW)
    return "\n\n".join(parts) + "\n", drawn


def _head(board: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Model, device and versions, and what the board does not say."""
    model = board["model"]
    runs = dict.fromkeys(
        f"{made['date'][:10]} on {made['device']}, jax {made['versions']['jax']}, kvjax {made['versions']['kvjax']}"
        for made in board["made"]
    )
    longest = max((row.length or 0 for row in rows), default=0)
    head = (
        f"# Board: {model['name']}\n\n{model['layers']} layers, {model['q_heads']} query heads, {model['kv_heads']} KV "
        f"heads of {model['head_dim']}; {board['dtype']}. {'; '.join(runs)}. A cell of a table is the best score of a "
        "method's budgets that read, or hold, at most that share of the bytes of full attention. Bytes are counted, "
        "not measured: keys and values as they are stored, and the index."
    )
    if longest <= LONG:
        head += f" Nothing here says what methods keep beyond {longest} tokens."
    return head


def _section(group: Group, steps: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, str]]:
    """Scores of a group at equal bytes, and its pictures."""
    metric = group.metric[0].upper() + group.metric[1:]
    head = f"## {group.heading}\n\n{metric}, n = {group.samples}."
    if group.full is None or group.full.bytes_read is None:
        return f"{head} Add `--cache full`, which the others are compared with.", {}
    drawn: dict[str, str] = {}
    parts = [
        f"{head} Full attention reads {group.full.bytes_read / 1e6:.1f}{NO_BREAK}MB a step and scores "
        f"{group.full.mean:.2f}."
    ]
    for verb, cost in (("a step reads", of_reads), ("the cache holds", of_memory)):
        name = f"board-{group.name}-{verb.split()[-1]}.svg"
        drawn[name] = picture(group, cost)
        parts.append(f"![{group.heading}: score by the bytes that {verb}]({name})")
        parts.append(f"Best score by the share of bytes that {verb}:")
        heads, lines = equal_costs(group, cost)
        # On a phone, "30 %" would break into two lines.
        parts.append(markdown_table([head.replace(" ", NO_BREAK) for head in heads], lines))
    for device, rows in dict.fromkeys((step["device"], step["batch"]) for step in steps):
        own = [step for step in steps if (step["device"], step["batch"]) == (device, rows)]
        if by_time(group, own):
            name = f"board-{group.name}-us-{rows}.svg"
            drawn[name] = picture_by_time(group, own)
            parts.append(f"![{group.heading}: score by microseconds of a step]({name})")
    return "\n\n".join(parts), drawn


_HOW = """## Add a row

Run the same command again with one more `--cache`, such as `--cache mine.py:mine`, and the same
`--out`: what is there is not run again. `board.json` has every row, with versions, device,
samples and the digest of each task's examples."""
