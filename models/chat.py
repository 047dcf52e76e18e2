"""A conversation with a model whose cache is kept between turns, so that each turn feeds only
its own tokens.

A chat template renders a whole conversation, and may write earlier turns in another way than
before: it drops the thinking of earlier answers, moves the system prompt, trims. So each turn
compares the tokens of the whole conversation with those that the cache holds, keeps what they
have in common, and reads the rest.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax import Array

from kvjax.cache.cache import Cache, outgrown
from kvjax.cache.editing import truncate
from kvjax.cache.growing import grow
from kvjax.generation import Stream, stream
from kvjax.generation.drafts import Draft
from kvjax.generation.processors import Processors
from kvjax.generation.prompt_inputs import check_fit
from kvjax.generation.sampling import Sampling
from kvjax.received import read_object
from kvjax.spec import require_int, round_capacity
from kvjax.validation import short_repr

CHAT = "chat.json"  # of a saved conversation, beside its cache
NEW_TOKENS = 128  # the default, or fewer if the model's positions leave fewer


class ChatModel(Protocol):
    """A checkpoint, by the parts of it that a conversation needs."""

    @property
    def config(self) -> Any: ...
    @property
    def model(self) -> Any: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def chat_template(self) -> Any: ...
    @property
    def chat_stop_tokens(self) -> Any: ...

    def apply_chat(
        self, messages: Sequence[Mapping[str, Any]], *, template: Mapping[str, Any] | None
    ) -> list[int]:
        """The tokens of messages, up to where the answer begins."""
        ...


class Chat:
    """A conversation in progress, made by `Checkpoint.chat`.

        chat = checkpoint.chat(cache="fier:budget=256", system="Answer briefly.")
        print(chat.say("Who wrote Moby-Dick?"))
        for piece in chat.stream("And when?"):
            print(piece, end="")

    `messages` and `cache` are the conversation so far. The cache grows when a turn does not
    fit. A turn that raises before its first token leaves the conversation as it was.
    """

    messages: list[dict[str, Any]]  # of all turns, as the chat template takes them

    def __init__(
        self,
        checkpoint: ChatModel,
        make_cache: Callable[[int], Cache],
        *,
        system: str | None,
        max_new_tokens: int | None,
        sampling: Sampling,
        key: Array | None,
        capacity: int | None,
        draft: Draft | None,
        template: Mapping[str, Any] | None,
        processors: Processors,
    ) -> None:
        self._checkpoint = checkpoint
        self._make_cache = make_cache
        self._capacity = capacity
        self._max_new_tokens = max_new_tokens
        self._sampling = sampling
        self._key = key
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self._template = template
        self._processors = processors
        self._draft = draft
        self._run: Stream | None = None  # of the last answer
        self._fed: list[int] = []  # the tokens in the cache before that answer
        self._restored: Cache | None = None  # of `_fed`, until the first answer after it
        self._turns = 0

    @property
    def cache(self) -> Cache | None:
        """The cache of all tokens fed and generated so far; None before the first turn."""
        return self._restored if self._run is None else self._run.cache

    @property
    def _length(self) -> int:
        return 0 if self.cache is None else int(np.asarray(self.cache.length)[0])

    def __repr__(self) -> str:
        return f"Chat({len(self.messages)} messages, {self._length} tokens in the cache)"

    def say(
        self, message: str | Mapping[str, Any], *, max_new_tokens: int | None = None
    ) -> str:
        """The model's answer to a message of the user, or to one of another role such as a
        tool's result.

        Raises:
          ValueError: no text, a turn that does not fit in the model's positions, a chat
            template that refuses.
        """
        return "".join(self.stream(message, max_new_tokens=max_new_tokens))

    def stream(
        self, message: str | Mapping[str, Any], *, max_new_tokens: int | None = None
    ) -> Iterator[str]:
        """`say` as an iterator over pieces of text. This call reads the turn; `messages` grows
        by each piece.
        """
        new = _as_message(message)
        self._run = self._start([*self.messages, new], max_new_tokens)
        self._turns += 1
        self.messages += [new, {"role": "assistant", "content": ""}]
        return _follow(self._run, self.messages[-1])

    def save(self, directory: str | Path) -> None:
        """Saves the messages, and the cache of what was said so far, for `restore`.

        Raises:
          OSError: the directory cannot be written; see `kvjax.save`.
        """
        from kvjax.cache.saving import save  # loads orbax, which an answer does not need

        folder = Path(directory)
        held = self._held
        step = capacity = None
        if held and self.cache is not None:
            step = save(folder / "cache", self.cache)
            capacity = self.cache.spec.capacity
        kept = {
            "model": repr(self._checkpoint.config),
            "messages": self.messages,
            "turns": self._turns,
            "tokens": held,
            "step": step,
            "capacity": capacity,
        }
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{CHAT}.part"
        part.write_text(json.dumps(kept), encoding="utf-8")
        part.replace(folder / CHAT)  # after the cache, which it names

    def restore(self, directory: str | Path) -> Chat:
        """Goes on from a conversation that `save` wrote, and returns this one. It must be made
        by the same checkpoint, with the same cache.

        A save whose cache is gone is read again with the next message.

        Raises:
          FileNotFoundError: the directory has no saved conversation.
          ValueError: it is of another model, or its cache of another policy.
        """
        from kvjax.cache.saving import OtherCacheError, restore, saved_steps

        kept = read_saved(directory)
        if kept["model"] != repr(self._checkpoint.config):
            raise ValueError(
                f"the conversation in {directory} was saved with another model; restore it with that one"
            )
        cache = None
        folder = Path(directory) / "cache"
        if folder.is_dir() and kept["step"] in saved_steps(folder):
            like = self._make_cache(kept["capacity"])
            try:
                cache = restore(folder, like, step=kept["step"])
            except OtherCacheError as error:
                raise OtherCacheError(
                    f"the conversation in {directory} was saved with another cache; make the chat with that one, or "
                    f"remove {folder}, and it is read again: {error}"
                ) from error
        self._run = None
        self._restored = cache
        self._fed = [] if cache is None else list(kept["tokens"])
        self.messages = list(kept["messages"])
        self._turns = kept["turns"]
        return self

    def _start(self, messages: list[dict[str, Any]], max_new_tokens: int | None) -> Stream:
        """Reads what is new in a conversation, and returns the stream of its answer."""
        checkpoint = self._checkpoint
        ids = checkpoint.apply_chat(messages, template=self._template)
        positions = checkpoint.config.max_positions
        new = self._max_new_tokens if max_new_tokens is None else max_new_tokens
        new = default_new_tokens(len(ids), positions) if new is None else new
        new = require_int("max_new_tokens", new, at_least=1)
        held = self._held
        shared = min(common(held, ids), len(ids) - 1)
        check_fit(shared, len(ids) - shared, new, self._capacity, positions)
        cache, known, unread = self._prepare(messages, ids, held, shared)
        needed = len(known) + len(unread) + new
        # All keys need another rotation.
        if cache is not None and outgrown(cache, np.array([needed])).size:
            self._run = self._restored = None
            cache = None
            known = []
            unread = ids
        if cache is None:
            rounded = round_capacity(needed, positions=positions)
            cache = self._make_cache(rounded if self._capacity is None else self._capacity)
        elif (
            needed > cache.spec.capacity
        ):  # to twice its size, so that a long conversation rarely grows
            larger = round_capacity(2 * cache.spec.capacity, positions=positions)
            cache = grow(
                cache,
                larger if larger >= needed else round_capacity(needed, positions=positions),
            )
        run = stream(
            checkpoint.model,
            cache,
            [unread],
            max_new_tokens=new,
            sampling=self._sampling,
            key=None if self._key is None else jax.random.fold_in(self._key, self._turns),
            stop_tokens=checkpoint.chat_stop_tokens,
            tokenizer=checkpoint.tokenizer,
            processors=dataclasses.replace(self._processors, history=(tuple(known),)),
            draft=self._draft,
        )
        self._fed = known + unread
        return run

    @property
    def _held(self) -> list[int]:
        """The tokens that the cache holds; none if it is gone, as after an interrupt."""
        cache = self.cache
        if cache is None or any(leaf.is_deleted() for leaf in jax.tree.leaves(cache)):
            return []
        return self._fed if self._run is None else self._fed + self._run.rows[0]

    def _prepare(
        self, messages: list[dict[str, Any]], ids: list[int], held: list[int], shared: int
    ) -> tuple[Cache | None, list[int], list[int]]:
        """A cache of a part of the conversation, or None for an empty one; the tokens in it;
        and those to read.
        """
        cache = self.cache
        if shared == len(held) or not shared:
            return (cache if shared else None), ids[:shared], ids[shared:]
        self._run = self._restored = None  # two caches are in memory no longer than needed
        try:
            assert cache is not None
            return truncate(cache, np.array([shared])), ids[:shared], ids[shared:]
        except (
            ValueError
        ):  # its policy cannot; but perhaps only the spelling of the answer differs
            rest = self._checkpoint.chat_template.after(held, messages, ids, self._template)
            return (cache, held, rest) if rest else (None, [], ids)


def read_saved(directory: str | Path) -> dict[str, Any]:
    """Returns the parts that `Chat.save` wrote beside the cache.

    Raises:
      FileNotFoundError: the directory has no saved conversation.
      ValueError: its file is damaged.
    """
    file = Path(directory) / CHAT
    if not file.is_file():
        raise FileNotFoundError(f"{directory} has no saved conversation; Chat.save makes one")
    cure = "give the folder of a conversation that Chat.save wrote"
    kept = read_object(file, cure=cure)
    messages = kept.get("messages")
    tokens = kept.get("tokens")
    whole = (
        isinstance(kept.get("model"), str)
        and isinstance(messages, list)
        and all(isinstance(message, dict) and "role" in message for message in messages)
        and isinstance(tokens, list)
        and all(type(token) is int for token in tokens)
        and type(kept.get("turns")) is int
        and all(name in kept for name in ("step", "capacity"))
    )
    if not whole:
        raise ValueError(f"{file} is damaged: it lacks a part of the conversation; {cure}")
    return kept


def default_new_tokens(prompt: int, positions: int | None) -> int:
    """128 new tokens, or fewer if the model's positions leave fewer after a prompt.

    >>> default_new_tokens(100, None), default_new_tokens(100, 128)
    (128, 28)
    """
    return NEW_TOKENS if positions is None else max(1, min(NEW_TOKENS, positions - prompt))


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens with which both begin."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


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
    raise ValueError(
        f'a message must be text or {{"role": "user", "content": "..."}}, got {short_repr(message)}'
    )
