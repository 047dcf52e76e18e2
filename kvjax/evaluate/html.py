"""Results as one self-contained HTML page: the tables, and the plots embedded in it."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from html import escape

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; display: block; overflow-x: auto; margin: 1rem 0; }
th, td { padding: 0.25rem 0.8rem; border-bottom: 1px solid #ddd; text-align: left; white-space: nowrap; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
img { max-width: 100%; height: auto; display: block; margin: 1rem 0 2rem; }
"""


def page(markdown: str, plots: Mapping[str, bytes]) -> str:
    """An HTML page of a report in Markdown (headings, paragraphs, tables) and plots in SVG by name.

    >>> "<td class='number'>2</td>" in page("| a | b |\\n| --- | ---: |\\n| 1 | 2 |", {})
    True
    """
    parts = [_block(block) for block in re.split(r"\n{2,}", markdown.strip())]
    for name, svg in plots.items():
        title = escape(name.replace("-", " "))
        data = base64.b64encode(svg).decode()
        parts.append(f"<h2>{title}</h2>\n<img alt='{title}' src='data:image/svg+xml;base64,{data}'>")
    head = f"<meta charset='utf-8'><meta name='viewport' content='width=device-width'><style>{STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}<title>kvjax eval</title></head><body>\n" + "\n".join(
        (*parts, "</body></html>\n")
    )


def _block(text: str) -> str:
    lines = text.splitlines()
    if lines[0].startswith("|") and len(lines) > 1:
        return _table([[cell.strip() for cell in line.strip("| ").split("|")] for line in lines])
    if heading := re.match(r"(#+) (.*)", lines[0]):
        rest = f"\n{_block(text.partition(chr(10))[2])}" if len(lines) > 1 else ""
        return f"<h{len(heading[1])}>{_inline(heading[2])}</h{len(heading[1])}>{rest}"
    if all(line.startswith("- ") for line in lines):
        return "<ul>" + "".join(f"<li>{_inline(line[2:])}</li>" for line in lines) + "</ul>"
    return f"<p>{_inline(' '.join(lines))}</p>"


def _table(rows: list[list[str]]) -> str:
    header, rule, *body = rows
    kinds = [" class='number'" if cell.endswith(":") else "" for cell in rule]

    def row(cells: list[str], tag: str) -> str:
        filled = [*cells, *[""] * (len(kinds) - len(cells))]
        return "".join(f"<{tag}{kind}>{_inline(cell)}</{tag}>" for cell, kind in zip(filled, kinds, strict=False))

    lines = "\n".join(f"<tr>{row(cells, 'td')}</tr>" for cells in body)
    return f"<table><thead><tr>{row(header, 'th')}</tr></thead><tbody>\n{lines}\n</tbody></table>"


def _inline(text: str) -> str:
    made = escape(text)
    made = re.sub(r"`([^`]+)`", r"<code>\1</code>", made)
    return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", made)
