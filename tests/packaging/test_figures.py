"""Figures inside of sentences of README and docs/ come from their files, and none is typed where
it could go stale.
"""

import json
import re

import pytest

from docs import tables
from docs.tables import PAGES, figures, values
from docs.tables.reading import ROOT

OF_PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in PAGES}
README = OF_PAGES["README.md"]
MARKED = [
    (page, *found) for page, text in OF_PAGES.items() for found in values.VALUE.findall(text)
]


def test_every_figure_of_a_file_stands_on_a_page() -> None:
    assert {name for _, _, name, _ in MARKED} == set(values.VALUES)


@pytest.mark.parametrize("name", values.VALUES)
def test_a_figure_that_differs_from_its_file_is_found(name: str) -> None:
    (page, *_) = next(one for one in MARKED if one[2] == name)
    marked = re.compile(rf"(<!-- value: {name} -->).*?(<!-- /value -->)")
    for found in marked.finditer(OF_PAGES[page]):
        changed = marked.sub(r"\1typed\2", found[0])
        assert changed != found[0]
        assert values.fill(changed) == found[0]


@pytest.mark.parametrize("page", OF_PAGES)
def test_no_line_begins_with_a_marker(page: str) -> None:
    """Markdown takes such a line as HTML, which ends the paragraph."""
    assert not re.search(r"^\s*(?:[-*>] )?<!-- /?value", OF_PAGES[page], re.MULTILINE)
    assert OF_PAGES[page].count("<!-- value:") == OF_PAGES[page].count("<!-- /value -->")


def test_figures_are_written_with_the_tables() -> None:
    changed = README.replace("-->8K<!--", "-->9K<!--")
    assert changed != README
    assert tables.fill(changed) == README


def test_readme_has_no_typed_number() -> None:
    assert list(figures.typed("README.md", README, figures.NUMBER)) == []


@pytest.mark.parametrize("page", OF_PAGES)
def test_a_page_has_no_typed_figure(page: str) -> None:
    assert list(figures.typed(page, OF_PAGES[page])) == []


@pytest.mark.parametrize("page", figures.EXCEPTIONS)
def test_no_exception_outlives_its_words(page: str) -> None:
    words = figures.prose(OF_PAGES[page])
    assert [one for one in figures.EXCEPTIONS[page] if one not in words] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("FIER is 1.31 times as fast.", ["1.31"]),
        ("It finds .66 of them, and loses 5 %.", [".66", "5"]),
        ("A step takes 40 us, or 3x as long.", ["40", "3"]),
        ("A budget of 1024 tokens at 32768 x 8.", []),
        ("`tau=0.8` and [0.7](page.md#1.2) in arXiv 2508.08256", ["0.7"]),
        ("It is <!-- value: short_row -->8.5<!-- /value --> ms.", []),
        ("<!-- table: speed -->\n| 1.5 ms |\n<!-- end -->\n2.5 ms", ["2.5"]),
        ("```console\n$ sleep 1.5\n```\nIt took 9.2 ms.", ["9.2"]),
    ],
)
def test_a_typed_figure_is_found_and_others_are_not(text: str, found: list[str]) -> None:
    assert [one.figure for one in figures.typed("a page", text)] == found


def test_readme_is_asked_for_every_number() -> None:
    text = README + "\nIt has 12 methods for Llama-3.1-8B in bf16.\n"
    assert [one.figure for one in figures.typed("README.md", text, figures.NUMBER)] == ["12"]


def test_a_typed_figure_is_found_in_the_file_of_its_section(tmp_path, monkeypatch) -> None:
    (tmp_path / "speed.json").write_text(json.dumps({"rows": [{"us": 40.26, "share": 0.31}]}))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    figures._shown.cache_clear()
    text = "# A\n\nIt took 40.3 us.\n\n# B\n\nIt took 40.3 us, 31 % of 7 ms (`speed.json`).\n"
    one, other, share, unknown = figures.typed("a page", text)
    assert figures.holders(one.figure, one.section) == []
    assert figures.holders(other.figure, other.section) == ["speed"]
    assert figures.holders(share.figure, share.section) == ["speed"]
    assert figures.holders(unknown.figure, unknown.section) == []
    figures._shown.cache_clear()
