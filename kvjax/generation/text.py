"""Text of token ids that arrive a few at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"  # what a decoder makes of bytes that are no character
LONGEST = 4  # bytes of a character, so tokens of one


class Detokenizer:
    """Text of a growing list of token ids, in pieces that never split a character; pieces join
    to the whole text.

    A tokenizer may spell one character with several tokens, and may strip or add a space
    depending on the token before. So each piece is the difference of two decodings, of the last
    piece's tokens with and without the new ones, and is held back while it ends in the mark of
    bytes that are not yet a character. Ids are taken one at a time, and decoded without those
    of the last piece where that helps, because a decoder with byte fallback marks all bytes of
    a run if one of its characters is not whole.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._settings: dict[str, Any] = {"skip_special_tokens": True}
        if hasattr(tokenizer, "clean_up_tokenization_spaces"):
            self._settings["clean_up_tokenization_spaces"] = (
                False  # it changes text already returned
            )
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._before = 0  # ids [before, given) made the last piece
        self._given = 0  # ids [0, given) have been given out

    def push(self, ids: Sequence[int]) -> str:
        """The text that is final after these ids, possibly empty."""
        pieces = []
        for i in ids:
            self._ids.append(i)
            text = self._rest()
            if text.endswith(UNFINISHED):
                # the first of them begins no character
                broken = len(self._ids) - self._given >= LONGEST
                text = self._decode(self._ids[self._given : self._given + 1]) if broken else ""
                self._give(1 if broken else 0)
            elif text:
                self._give(len(self._ids) - self._given)
            pieces.append(text)
        return "".join(pieces)

    def finish(self) -> str:
        """The rest of the text, with unfinished characters as U+FFFD."""
        text = self._rest()
        self._give(len(self._ids) - self._given)
        return text

    def _give(self, count: int) -> None:
        if count:
            self._before = self._given
            self._given = self._given + count

    def _rest(self) -> str:
        """The text of the ids that have not been given out."""
        known = self._decode(self._ids[self._before : self._given])
        text = self._decode(self._ids[self._before :])
        if text.endswith(UNFINISHED) or not text.startswith(known):
            return self._decode(self._ids[self._given :])
        return text[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, **self._settings) if ids else ""
