"""Docstrings of kvjax as reStructuredText: they are plain text with Markdown's backticks, bold
words and bullets. Fields of a class have their meaning in comments beside them.
"""

from __future__ import annotations

import ast
import io
import re
import textwrap
import tokenize
from collections.abc import Sequence

SECTION = re.compile(r"(Args|Returns|Raises|Yields|Attributes|Note|Notes|Example|Examples):$")
BULLET = re.compile(r"\s*(?:[-*·]|\d+\.) ")
CODE = re.compile(r"(`+)(.+?)\1|(\*\*)(?=\S)(.+?)\*\*")

TO_TOOLS = re.compile(r"(fmt|type|noqa|mypy|pragma)\b")


def to_rst(lines: Sequence[str]) -> list[str]:
    """The same text for Sphinx with napoleon: literals in two backticks, markup escaped,
    indented text as code.

    >>> to_rst(["Takes `x` and *y of all.", "", "    x = 1"])
    ['Takes ``x`` and \\\\*y of all.', '', '::', '', '    x = 1']
    """
    text = [line.expandtabs().rstrip() for line in lines]
    made: list[str] = []
    section = doctest = code = False
    for i, line in enumerate(text):
        indent = len(line) - len(line.lstrip())
        if not line.strip():
            made.append("")
            doctest = False
            continue
        if SECTION.fullmatch(line.strip()) and indent == 0:
            section, code = True, False
            if made and made[-1]:
                made.append("")
            made.append(line)
            continue
        if indent == 0:
            section = code = False
        doctest = doctest or line.lstrip().startswith(">>>")
        if doctest or code:
            made.append(line)
            continue
        if (
            indent
            and not section
            and not (made and made[-1] and BULLET.match(_parent(text, i)))
        ):
            if made and made[-1]:  # an indented line right below its paragraph
                made.append("")
            made += ["::", ""]
            code = True
            made.append(line)
            continue
        if (
            BULLET.match(line)
            and made
            and made[-1]
            and not BULLET.match(made[-1])
            and not made[-1].startswith("  ")
        ):
            made.append("")
        made.append(_escape(line))
    return made


def fields(source: str) -> dict[str, str]:
    """The comments of a class's public fields that have one: from the lines above a field, and
    from beside it.

    >>> fields("class Row:\\n    at: int  # its place\\n    # the last one\\n    end: int\\n    of: str")
    {'at': 'its place', 'end': 'the last one'}
    """
    source = textwrap.dedent(source)
    (made,) = ast.parse(source).body
    assert isinstance(made, ast.ClassDef)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
    found = {}
    for node in made.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        name = node.target.id
        if name.startswith("_") or ast.unparse(node.annotation).startswith("ClassVar"):
            continue
        first = node.lineno
        while (above := comments.get(first - 1)) and not above.line[: above.start[1]].strip():
            first -= 1
        lines = range(first, (node.end_lineno or node.lineno) + 1)
        told = [comments[line].string.lstrip("# ") for line in lines if line in comments]
        if text := " ".join(words for words in told if not TO_TOOLS.match(words)):
            found[name] = text
    return found


def _parent(text: Sequence[str], i: int) -> str:
    """The nearest line above with less indentation."""
    indent = len(text[i]) - len(text[i].lstrip())
    for line in reversed(text[:i]):
        if line.strip() and len(line) - len(line.lstrip()) < indent:
            return line
    return ""


def _escape(line: str) -> str:
    made, at = [], 0
    for found in CODE.finditer(line):
        made.append(_plain(line[at : found.start()]))
        if found[2] is not None:
            made.append(
                f"``{found[2]}``"
                + ("\\" if line[found.end() : found.end() + 1].isalnum() else "")
            )
        else:
            made.append(f"**{_plain(found[4])}**")
        at = found.end()
    return "".join((*made, _plain(line[at:])))


def _plain(text: str) -> str:
    bullet = re.match(r"\s*\* ", text)
    start = bullet.end() if bullet else 0
    return text[:start] + re.sub(r"([*|`]|(?<=\w)_(?!\w))", r"\\\1", text[start:])
