"""A conversation with a model whose cache is kept between turns, so that each turn feeds only its own tokens.

A chat template renders a whole conversation, system prompt and first token included. The cache already holds the
earlier turns, so a later turn feeds only what the template renders after the model's last answer: the end of that
answer, the new message, and the opening of the next answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import Array

from kvjax.cache.cache import Cache
from kvjax.cache.growing import grow
from kvjax.generation import Stream, stream
from kvjax.generation.prompt_inputs import check_fit
from kvjax.generation.sampling import Sampling
from kvjax.spec import require_int, round_capacity
from kvjax.validation import shown

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

NEW_TOKENS = 128  # the default, or fewer if the model's positions leave fewer
ANSWER = "kvjax stands here for an answer"  # the template renders it in place of the model's last answer


class Chat:
    """A conversation in progress, made by `Checkpoint.chat`.

        chat = checkpoint.chat(cache="fier:budget=256", system="Answer briefly.")
        print(chat.say("Who wrote Moby-Dick?"))
        for piece in chat.stream("And when?"):
            print(piece, end="")

    `messages` and `cache` are the conversation so far. The cache grows when a turn does not fit. A turn that raises
    before its first token leaves the conversation as it was.
    """

    messages: list[dict[str, Any]]  # of all turns, as the chat template takes them

    def __init__(
        self,
        checkpoint: Checkpoint,
        make_cache: Callable[[int], Cache],
        *,
        system: str | None,
        max_new_tokens: int | None,
        sampling: Sampling,
        key: Array | None,
        capacity: int | None,
    ) -> None:
        self._checkpoint, self._make_cache, self._capacity = checkpoint, make_cache, capacity
        self._max_new_tokens, self._sampling, self._key = max_new_tokens, sampling, key
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self._run: Stream | None = None  # of the last answer
        self._turns = 0

    @property
    def cache(self) -> Cache | None:
        """The cache of all tokens fed and generated so far; None before the first turn."""
        return None if self._run is None else self._run.cache

    @property
    def _length(self) -> int:
        return 0 if self.cache is None else int(np.asarray(self.cache.length)[0])

    def __repr__(self) -> str:
        return f"Chat({len(self.messages)} messages, {self._length} tokens in the cache)"

    def say(self, message: str | Mapping[str, Any], *, max_new_tokens: int | None = None) -> str:
        """The model's answer to a message of the user, or to one of another role such as a tool's result.

        Raises:
          ValueError: no text, a turn that does not fit in the model's positions, a chat template that refuses.
        """
        return "".join(self.stream(message, max_new_tokens=max_new_tokens))

    def stream(self, message: str | Mapping[str, Any], *, max_new_tokens: int | None = None) -> Iterator[str]:
        """`say` as an iterator over pieces of text. This call reads the turn; `messages` grows by each piece."""
        new = _as_message(message)
        self._run = self._start(self._encode_turn(new), max_new_tokens)
        self._turns += 1
        self.messages += [new, {"role": "assistant", "content": ""}]
        return _follow(self._run, self.messages[-1])

    def _encode_turn(self, message: dict[str, Any]) -> list[int]:
        """Token ids of the new turn only, to follow those in the cache."""
        checkpoint = self._checkpoint
        if self._run is None:
            return checkpoint.apply_chat([*self.messages, message])
        _, found, turn = checkpoint.render_chat(
            [*self.messages[:-1], {**self.messages[-1], "content": ANSWER}, message]
        ).partition(ANSWER)
        if not found or not turn or ANSWER in turn:
            raise ValueError(
                f"the chat template in {checkpoint.directory} does not render a turn after the answer before it, so "
                "the turn's tokens cannot be separated; call generate with all messages instead"
            )
        emitted = self._run.rows[0]
        if emitted and emitted[-1] in checkpoint.stop_tokens:  # the end of the answer is in the cache already
            end = checkpoint.tokenizer.decode(emitted[-1:], skip_special_tokens=False)
            space, found, rest = turn.partition(end)
            turn = rest if found and not space.strip() else turn
        return [int(i) for i in checkpoint.tokenizer(turn, add_special_tokens=False)["input_ids"]]

    def _start(self, ids: list[int], max_new_tokens: int | None) -> Stream:
        """Reads a turn and returns the stream of its answer."""
        checkpoint, cache, stored = self._checkpoint, self.cache, self._length
        positions = checkpoint.config.max_positions
        new = self._max_new_tokens if max_new_tokens is None else max_new_tokens
        new = default_new_tokens(stored + len(ids), positions) if new is None else new
        new = require_int("max_new_tokens", new, at_least=1)
        check_fit(stored, len(ids), new, self._capacity, positions)
        needed = stored + len(ids) + new
        if cache is None:
            cache = self._make_cache(round_capacity(needed) if self._capacity is None else self._capacity)
        elif needed > cache.spec.capacity:  # to twice its size, so that a long conversation rarely grows
            cache = grow(cache, round_capacity(max(needed, 2 * cache.spec.capacity)))
        return stream(
            checkpoint.model,
            cache,
            [ids],
            max_new_tokens=new,
            sampling=self._sampling,
            key=None if self._key is None else jax.random.fold_in(self._key, self._turns),
            stop_tokens=checkpoint.stop_tokens,
            measure=True,
            tokenizer=checkpoint.tokenizer,
        )


def default_new_tokens(prompt: int, positions: int | None) -> int:
    """128 new tokens, or fewer if the model's positions leave fewer after a prompt.

    >>> default_new_tokens(100, None), default_new_tokens(100, 128)
    (128, 28)
    """
    return NEW_TOKENS if positions is None else max(1, min(NEW_TOKENS, positions - prompt))


def _follow(run: Stream, answer: dict[str, Any]) -> Iterator[str]:
    """Yields the pieces of text, and appends each to `answer`."""
    for piece in run:
        answer["content"] += piece
        yield piece


def _as_message(message: Any) -> dict[str, Any]:
    if message == "":
        raise ValueError("the message is empty; a chat needs some text to answer")
    if isinstance(message, str):
        return {"role": "user", "content": message}
    if isinstance(message, Mapping) and "role" in message:
        return dict(message)
    raise ValueError(f'a message must be text or {{"role": "user", "content": "..."}}, got {shown(message)}')
