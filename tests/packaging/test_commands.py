"""Commands of README and docs that stand beside data name the text, the length and the samples of
the files that they wrote.
"""

import json

import pytest

from docs.tables import PAGES, PLACE, commands
from docs.tables.reading import RESULTS, ROOT

TEXTS = {*commands.BOOKS.values(), "nicholas-nickleby.txt"}


@pytest.mark.parametrize("name", commands.PAGES)
def test_a_command_of_a_page_is_filled_from_its_file(name: str) -> None:
    file, lines = commands.PAGES[name]
    for line in lines:
        assert "{" not in (found := commands.filled(line, [file]))
        others = [other for _, other in commands.NAME.findall(line) if other]
        assert commands.disagreements(found.replace("\\\n", ""), [file, *others]) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_types_the_text_of_a_measurement(page) -> None:
    typed = PLACE.sub("", page.read_text())
    assert [text for text in TEXTS if f"--text {text}" in typed] == []


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("kvjax eval MODEL --length 16K --samples 100 --text middlemarch.txt", []),
        ("kvjax eval MODEL --text emma.txt", ["--text emma.txt"]),
        ("kvjax eval MODEL --length 16384,32K", ["--length 16384,32K"]),
        ("kvjax eval MODEL --samples 20 --text vanity-fair.txt", ["--samples 20", "--text"]),
    ],
)
def test_a_command_that_differs_from_its_file_is_found(command: str, wrong: list[str]) -> None:
    found = commands.disagreements(command, ["eval_qwen"])
    assert len(found) == len(wrong)
    assert all(one.startswith(option) for one, option in zip(found, wrong, strict=True))


def test_names_of_books_are_those_of_the_files_that_have_both() -> None:
    known = {}
    for path in sorted(RESULTS.glob("*.json")):
        text = json.loads(path.read_text())
        text = text.get("text") if isinstance(text, dict) else None
        if isinstance(text, dict):
            known[text["digest"]] = text["name"]
    # An excerpt had another name in one run.
    same = {digest: name for digest, name in commands.BOOKS.items() if digest in known}
    assert len(same) >= 4
    for digest, name in same.items():
        assert known[digest] == name or known[digest].startswith("war-and-peace")
    assert (ROOT / "docs" / "tables" / "books.json").exists()


def test_a_title_is_that_of_a_book() -> None:
    assert commands.as_title("vanity-fair.txt") == "Vanity Fair"
    assert commands.as_title("war-and-peace.txt") == "War and Peace"
