"""Prompts from the options of a command: text, a file, stdin, or the built-in example."""

from __future__ import annotations

import sys
from pathlib import Path

from kvjax.cli.options import given_file
from kvjax.validation import check_utf8

STDIN = Path("-")
# The prompt of --example: the key at its start is outside every local window. The shipped model
# answers in 5 tokens.
EXAMPLE = (
    "The pass key is 71432. Remember it.\n"
    + "The grass is green. The sky is blue. The sun is yellow.\n" * 140
    + "What is the pass key? The pass key is "
)
EXAMPLE_TOKENS = 5


def read_prompt(text: str | None, file: Path | None, *, example: bool = False) -> str:
    """Returns the prompt from the one source that is given.

    Raises:
      ValueError: no source or several, a file that cannot be read, an empty prompt, or one that
        is not UTF-8.
    """
    sources = (text is not None) + (file is not None) + example
    if sources != 1:
        number = "only one" if sources else "one"
        raise ValueError(
            f"give {number} of --prompt TEXT, --prompt-file FILE (- for stdin) and --example"
        )
    if example:
        return EXAMPLE
    prompt = _checked_text(text) if file is None else _text_of(file)
    if not prompt:
        raise ValueError("the prompt is empty; give at least one character")
    return prompt


def _checked_text(text: str | None) -> str:
    check_utf8("--prompt", text, ", or give the text as --prompt-file FILE")
    return text or ""


def _text_of(file: Path) -> str:
    """The text of a file, without one newline at its end."""
    content = _content(file)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--prompt-file {file} is not UTF-8: byte 0x{content[error.start]:02x} at {error.start}; "
            "convert it first, for example with `iconv -t utf-8`"
        ) from None
    return text.removesuffix("\n").removesuffix("\r")


def _content(file: Path) -> bytes:
    if file == STDIN:
        return sys.stdin.buffer.read()
    return given_file("--prompt-file", file, "the prompt").read_bytes()
