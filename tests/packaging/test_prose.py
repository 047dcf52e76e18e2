"""The rules of prose and words that a program can check; CONTRIBUTING.md has all of them."""

import ast
import dataclasses
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvjax
from kvjax import presets

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    path
    for folder in ("kvjax", "kernels_pallas", "models")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
FRAGMENT = re.compile(r"(?:^|[.!?:] +)(?:Of|What|Who)\b[^.?!]*")
WORDS = {  # each has a word of the glossary in its place
    *(
        "pick",
        "picked",
        "choose",
        "chosen",
        "choice",
        "die",
        "dies",
        "dying",
        "waiting",
        "seal",
        "sealed",
    ),
    *(
        "wide",
        "most",
        "last",
        "now",
        "anew",
        "held",
        "there",
        "made",
        "fresh_prompt",
        "layered",
        "check",
    ),
}


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Each docstring of a file without its examples, and where it is."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (ast.get_docstring(node) or "").splitlines()
            text = " ".join(
                line.strip() for line in lines if not line.lstrip().startswith((">>>", "..."))
            )
            yield f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}", text


def comments(path: Path) -> Iterator[tuple[str, str]]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield f"{path.relative_to(ROOT)}:{token.start[0]}", token.string.lstrip("#: ")


def test_no_sentence_begins_with_of_what_or_who() -> None:
    said = [
        (where, text)
        for path in FILES
        for part in (docstrings, comments)
        for where, text in part(path)
    ]
    found = [
        f"{where}: {match[0]}" for where, text in said for match in FRAGMENT.finditer(text)
    ]
    assert not found, "begin the sentence with its subject, a noun of the field:\n" + "\n".join(
        found
    )


def test_a_kernels_docstring_has_at_most_150_words() -> None:
    texts = [
        each
        for path in FILES
        if path.is_relative_to(ROOT / "kernels_pallas")
        for each in docstrings(path)
    ]
    long = {where: words for where, text in texts if (words := len(text.split())) > 150}
    assert not long, f"move experiments to benchmarks/NOTES.md: {long}"


@pytest.mark.parametrize("kind", ["policies and parts", "presets"])
def test_public_fields_are_named_by_the_glossary(kind: str) -> None:
    public = [getattr(kvjax, name) for name in kvjax.__all__]
    fields = {
        f"{each.__name__}.{f.name}"
        for each in public
        if dataclasses.is_dataclass(each)
        for f in dataclasses.fields(each)
    }
    settings = {
        f"{p.name}:{name}"
        for p in presets.REGISTRY.values()
        for name in inspect.signature(p.make).parameters
    }
    names = fields if kind == "policies and parts" else settings
    assert len(names) > 20
    assert not [name for name in names if re.split("[.:]", name)[1] in WORDS]
