"""Text of token ids that arrive a few at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Detokenizer:
    """Text of a growing list of token ids, in pieces that never split a character; pieces join to the whole text.

    A tokenizer may spell one character with several tokens, and may strip or add a space depending on the token
    before. So each piece is the difference of two decodings, of the last piece's tokens with and without the new
    ones, and is held back while it ends in U+FFFD, the mark of bytes that are not yet a character.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._settings: dict[str, Any] = {"skip_special_tokens": True}
        if hasattr(tokenizer, "clean_up_tokenization_spaces"):
            self._settings["clean_up_tokenization_spaces"] = False  # it changes text already returned
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._before = 0  # ids [before, given) made the last piece
        self._given = 0  # ids [0, given) have been given out

    def push(self, ids: Sequence[int]) -> str:
        """The text that is final after these ids, possibly empty."""
        self._ids.extend(ids)
        return self._take(hold=True)

    def finish(self) -> str:
        """The rest of the text, with unfinished characters as U+FFFD."""
        return self._take(hold=False)

    def _take(self, *, hold: bool) -> str:
        known = self._decode(self._ids[self._before : self._given])
        text = self._decode(self._ids[self._before :])
        if len(text) <= len(known) or (hold and text.endswith("�")):
            return ""
        self._before, self._given = self._given, len(self._ids)
        return text[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, **self._settings) if ids else ""
