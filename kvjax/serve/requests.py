"""Requests to an engine, with the checks of what a user gives, and its counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvjax.generation.loops import PAD
from kvjax.generation.prompt_inputs import LEAST_STOPS
from kvjax.generation.sampling import Draws
from kvjax.generation.text import Detokenizer
from kvjax.serve.scheduler import Stage
from kvjax.validation import short_repr

STOPS = LEAST_STOPS  # stop tokens that a request can have
NOT_FINITE = "the logits of this row are not finite"


class EngineBusy(RuntimeError):
    """As many requests are waiting as the engine takes: run `step` and submit again."""


@dataclasses.dataclass(eq=False)
class Request:
    """A request and its answer so far. Iterating over it runs the engine and yields its tokens
    as they come.
    """

    prompt: np.ndarray = dataclasses.field(repr=False)  # i32[T]
    max_new_tokens: int
    draws: Draws | None = dataclasses.field(repr=False)  # how its row draws; None: greedy
    stop: np.ndarray = dataclasses.field(repr=False)  # i32[n] ids that end it
    engine: Any = dataclasses.field(repr=False)
    tokens: list[int] = dataclasses.field(default_factory=list)  # a stop token included
    # One for each of the tokens; None where the engine was not asked for them.
    log_probabilities: list[float] | None = dataclasses.field(default=None, repr=False)
    state: Stage = Stage.WAITING
    reason: str | None = None  # of its end: "stop", "length", "cancelled" or "error"
    error: Exception | None = None  # that ended it
    finite: bool = dataclasses.field(default=True, repr=False)  # all its logits, as far as seen
    # Tokens that the device was asked for, which may be more than `tokens` has yet.
    asked: int = dataclasses.field(default=0, repr=False)

    @property
    def done(self) -> bool:
        return self.state is Stage.DONE

    @property
    def known(self) -> np.ndarray:
        """The tokens of its prompt and its answer so far: i32[n]."""
        return np.concatenate([self.prompt, np.asarray(self.tokens, np.int32)])

    @property
    def size(self) -> int:
        """Tokens for which it needs room."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def text(self) -> str:
        """The text of the tokens, if the engine has a tokenizer."""
        if self.engine.tokenizer is None:
            raise ValueError(
                "the engine has no tokenizer: make it from a checkpoint, or decode `tokens` yourself"
            )
        detokenizer = Detokenizer(self.engine.tokenizer)
        return detokenizer.push(self.tokens) + detokenizer.finish()

    def __iter__(self) -> Iterator[int]:
        yielded = 0
        while True:
            # Asked before its tokens are: more may come meanwhile, by steps of other readers or
            # threads, but none after its end.
            done = self.done
            while yielded < len(self.tokens):
                yield self.tokens[yielded]
                yielded += 1
            if done:
                return
            self.engine.step()


def token_ids(prompt: Any) -> np.ndarray:
    """A prompt as integers [1, T], or an error if it is no list of token ids."""
    try:
        ids = np.asarray(prompt)
    except ValueError:  # lists of several lengths
        ids = np.zeros(())
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(
            "submit(prompt=...) must be a list of integer token ids, or with a checkpoint a text or chat messages; got "
            f"{short_repr(prompt)}"
        )
    return ids.astype(int)[None]


def stop_ids(stop_tokens: np.ndarray) -> np.ndarray:
    """The stop tokens of a request, of `stop_array`: i32[n], n at most `STOPS`."""
    own = stop_tokens[stop_tokens != PAD]
    if len(own) > STOPS:
        raise ValueError(f"a request can have {STOPS} stop tokens, got {len(own)}")
    return own


def check_own(verb: str, engine: Any, request: Any) -> None:
    """Raises ValueError for a request of another engine, whose slot this one would not free."""
    if not isinstance(request, Request) or request.engine is not engine:
        raise ValueError(
            f"{verb} takes a request that `submit` of this engine returned, got {short_repr(request)}"
        )


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts of an engine: its requests, tokens and steps so far."""

    slots: int
    decoding: int  # requests in slots
    waiting: int  # requests that are not in a slot yet
    prompt_tokens: int  # read, those of shared beginnings not counted again
    shared_tokens: int  # of prompts, copied from a row that is running or was kept
    parked: int  # prompts that are read and wait in host memory for a slot
    prefixes: int  # stored prefixes that rows use
    new_tokens: int
    steps: int  # decode steps of the batch
    kept: int  # rows that are kept for prompts that begin like them
    kept_bytes: int  # of those that are not in host memory
    kept_host_bytes: int
    fill: float  # share of slots in use, mean over the decode steps
