"""Lists the figures of README and docs/ that are typed, each with the result files that hold it:

    python -m docs.tables.figures

A figure is a number with a unit of measurement, or a share such as .66. Tables, commands and
figures that `python -m docs.tables` writes are left out, as are code, links and what EXCEPTIONS
names. The suite asks that no page has one, and README no other number either.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from docs.tables import PAGES, PLACE
from docs.tables.reading import RESULTS, ROOT
from docs.tables.values import VALUE

UNITS = (
    r"%|x\b(?! \d)|times\b|points?\b|ms\b|us\b|µs\b|(?:micro|milli)?seconds?\b|s\b"
    r"|[KMGT]i?B\b|per cent\b|tokens a second\b"
)
FIGURE = re.compile(
    rf"(?<![\w.,/^-])(?:\d[\d,]*(?:\.\d+)?(?=\s(?:{UNITS})|%|x\b)|\d*\.\d+(?!\w|\.\d))"
)
NUMBER = re.compile(r"(?<![\w.-])\d[\d.,]*\w*")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
CITED = re.compile(r"arXiv \d+\.\d+|[Ss]ection \d[\d.]*")
LINK = re.compile(r"\]\([^)]*\)")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)

# Words of a page with a number that no result file has, and why.
EXCEPTIONS: dict[str, dict[str, str]] = {
    "README.md": {
        "Python 3.11 or later": "a version",
        "jax 0.11 (Python 3.12)": "versions",
        "pass key, 71432,": "the key in the prompt that ships",
        "2800 tokens": "the length of the prompt that ships, rounded",
        "a budget of 2048 tokens": "the setting of the table",
        "up to 8192 tokens whole": "the bound that the presets set",
        "in 16384 tokens and on GSM8K": "the setting of the table",
        "budget is 1024 tokens (GSM8K: 128)": "the setting of the table",
        "1024 tokens often miss": "the setting of the table",
    },
    "docs/claims.md": {"taken to be 5 % off": "a rule of the verdicts"},
    "docs/faq.md": {"Python 3.12 and jax 0.11": "versions"},
    "docs/getting_started.md": {
        "Python 3.11": "a version",
        "Python 3.12": "a version",
        "jax 0.11": "a version",
    },
    "docs/guides/checkpoint.md": {"4 GiB": "a bound that kvjax sets"},
    "docs/guides/memory.md": {
        "at most 64 GB": "a bound of XLA",
        "correlation 0.0": "a setting of the table",
        "a budget of 11 %": "a setting of the table",
    },
    "docs/methods.md": {
        "16 KiB of counts": "256 patterns of 16 blocks in 4 bytes",
        "tau of 0.9": "a setting of the paper",
        "a cosine of at least .84": "a figure of the paper",
        "with tau = 0.8": "a setting of the preset",
        "0.7 MB of basis": "160 coefficients of 1024 channels in 4 bytes",
        "and 1.6 MB of exact pages": "48 pages of 8 tokens, keys and values of 1024 channels in 2 bytes",
        "16 % is the paper's rank": "a setting of the paper",
        "Llama 3.1 8B": "a model",
    },
    "docs/performance.md": {
        "jax 0.11.": "a version",
        "with 0.05": "a setting",
        "at 50 GB/s": "a bus that the sentence assumes",
        "at 3.0 TB/s": "the rate that the script takes for floors",
        "fla-core 0.6": "a version",
        "a budget of 11 %": "a setting of the table",
    },
    "docs/real_models.md": {"95 % interval": "what the table shows"},
    "docs/scaling.md": {
        "Off by more than 15 %": "the bound that the list below it uses",
        "a multiple of 8 times the devices": "a rule of `magicpig`",
        "a probability of .90 or .95": "settings of the table",
        "a probability of .90 over four GPUs after": "a setting of the table",
    },
    "docs/stability.md": {"1.0": "a version"},
    "docs/support.md": {
        "jax 0.11": "a version",
        "1.5 billion a second": "the clock of a chip",
    },
}


class Typed(NamedTuple):
    """A figure that is typed on a page."""

    line: int
    figure: str
    section: str  # the text that may name the file of it


def prose(text: str) -> str:
    """What is typed of a page, line by line: without tables, figures, code and links that are
    generated or are no prose.
    """

    def blank(found: re.Match[str]) -> str:
        return "\n" * found[0].count("\n")

    for pattern in (PLACE, FENCE, VALUE, COMMENT, CODE, LINK, CITED):
        text = pattern.sub(blank, text)
    return text


def typed(page: str, text: str, pattern: re.Pattern[str] = FIGURE) -> Iterator[Typed]:
    """The figures of a page that are typed and no exceptions."""
    left = prose(text)
    for words in EXCEPTIONS.get(page, ()):
        left = left.replace(words, "")
    lines = text.splitlines()
    for number, line in enumerate(left.splitlines()):
        for found in pattern.finditer(line):
            yield Typed(number + 1, found[0], _section(lines, number))


def _section(lines: list[str], number: int) -> str:
    """The lines between the headings around a line."""
    heads = [i for i, line in enumerate(lines) if line.startswith("#")]
    first = max((i for i in heads if i <= number), default=0)
    last = min((i for i in heads if i > number), default=len(lines))
    return "\n".join(lines[first:last])


def holders(figure: str, section: str) -> list[str]:
    """The result files that a section names, or whose script it names, with a number that is
    shown as `figure`.
    """
    named = re.findall(r"(\w+)\.json|benchmarks/(\w+)\.py", section)
    names = dict.fromkeys(one or other for one, other in named)
    return [name for name in names if _shown(name) and _plain(figure) in _shown(name)]


def _plain(figure: str) -> str:
    return figure.replace(",", "").removeprefix("0")


@cache
def _shown(file: str) -> frozenset[str]:
    """The numbers of a file in the forms in which a page may show them."""
    path = RESULTS / f"{file}.json"
    if not path.is_file():
        return frozenset()
    forms = set()
    for number in _numbers(json.loads(path.read_text())):
        for value in (number, 100 * number):
            forms |= {f"{value:.{digits}f}".removeprefix("0") for digits in range(4)}
    return frozenset(forms)


def _numbers(found: Any) -> Iterator[float]:
    if isinstance(found, dict | list):
        for one in found.values() if isinstance(found, dict) else found:
            yield from _numbers(one)
    elif isinstance(found, int | float) and not isinstance(found, bool):
        yield found


def main() -> None:
    """Writes page, line, figure and files of each typed figure."""
    for path in PAGES:
        page = path.relative_to(ROOT).as_posix()
        for one in typed(page, path.read_text()):
            files = ", ".join(holders(one.figure, one.section)) or "-"
            sys.stdout.write(f"{page}:{one.line}: {one.figure}  {files}\n")


if __name__ == "__main__":
    main()
