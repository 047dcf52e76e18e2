"""Rules that change logits before a token is drawn: logits processors, as transformers names
them.

Each depends on the tokens before: a penalty for tokens that occurred, no n-gram twice, tokens
that never come, and stop tokens that come late. Checkpoints ask for them in
generation_config.json. Values are those of transformers' generate, which applies them in this
order. All are data of the compiled program, so that another value compiles nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax.spec import keep_int, require_ints
from kvjax.validation import finite_number, short_repr


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processors:
    """Which rules change the logits; by default none.

    >>> Processors(repetition_penalty=0)
    Traceback (most recent call last):
        ...
    ValueError: Processors(repetition_penalty=...) must be above 0, got 0; 1 changes nothing

    Raises:
      ValueError: a penalty of 0 or below, a negative number, ids that are none.
    """

    # divides positive logits of tokens that occurred, and multiplies negative ones
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0  # n-grams of this size occur at most once; 0 allows all
    min_new_tokens: int = 0  # new tokens before a stop token may come
    suppress_tokens: tuple[int, ...] = ()  # ids that never come
    begin_suppress_tokens: tuple[int, ...] = ()  # ids that are not the first new token
    history: tuple[
        tuple[int, ...], ...
    ] = ()  # by row, tokens in the cache before the prompt, which count as it does

    def __post_init__(self) -> None:
        where = f"{type(self).__name__}(repetition_penalty=...)"
        if finite_number(where, self.repetition_penalty) <= 0:
            raise ValueError(
                f"{where} must be above 0, got {self.repetition_penalty}; 1 changes nothing"
            )
        for name in ("no_repeat_ngram_size", "min_new_tokens"):
            keep_int(self, name, at_least=0)
        for name in ("suppress_tokens", "begin_suppress_tokens"):
            object.__setattr__(self, name, _ids(name, getattr(self, name)))
        if not isinstance(self.history, list | tuple):
            raise ValueError(
                f"history must be token ids for each row, got {short_repr(self.history)}"
            )
        object.__setattr__(self, "history", tuple(_ids("history", row) for row in self.history))

    @property
    def idle(self) -> bool:
        """Whether nothing changes."""
        return dataclasses.replace(self, history=()) == Processors()

    def start(
        self, prompt: np.ndarray | None, lengths: np.ndarray, *, capacity: int, vocabulary: int
    ) -> tuple[Rules, History] | None:
        """The rules as data, and the tokens so far of a prompt i32[B, T] of lengths i32[B];
        None if nothing changes.
        """
        if self.idle:
            return None
        rows = len(lengths)
        if self.history and len(self.history) != rows:
            raise ValueError(
                f"Processors(history=...) has {len(self.history)} rows, and the request {rows}"
            )
        tokens = np.zeros((rows, capacity), np.int32)
        count = np.zeros(rows, np.int32)
        for row in range(rows):
            before = np.array(self.history[row] if self.history else (), np.int32)
            given = () if prompt is None else (prompt[row, : lengths[row]],)
            known = np.concatenate([before, *given])[-capacity:]
            tokens[row, : len(known)] = known
            count[row] = len(known)
        rules = Rules(
            penalty=np.asarray(self.repetition_penalty, np.float32),
            ngram=np.asarray(self.no_repeat_ngram_size, np.int32),
            least=np.asarray(self.min_new_tokens, np.int32),
            never=_mask(self.suppress_tokens, vocabulary),
            not_first=_mask(self.begin_suppress_tokens, vocabulary),
        )
        return rules, History(tokens, count)


class Rules(NamedTuple):
    """`Processors` as data of a program."""

    penalty: Array | np.ndarray  # f32[]
    ngram: Array | np.ndarray  # i32[]
    least: Array | np.ndarray  # i32[]
    never: Array | np.ndarray  # bool[V]
    not_first: Array | np.ndarray  # bool[V]


class History(NamedTuple):
    """The tokens that the rules count."""

    tokens: Array | np.ndarray  # i32[B, S]
    count: Array | np.ndarray  # type: ignore[assignment]  # i32[B] tokens[:, :count] are valid

    def with_new(self, new: Array | np.ndarray, number: Array | np.ndarray) -> History:
        """With the first `number` i32[] or i32[B] of the tokens `new` i32[B, T] after those of
        each row.
        """
        place = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None] - self.count[:, None]
        number = jnp.broadcast_to(jnp.asarray(number, jnp.int32), self.count.shape)
        added = jnp.take_along_axis(
            jnp.asarray(new), jnp.clip(place, 0, new.shape[1] - 1), axis=1
        )
        tokens = jnp.where((place >= 0) & (place < number[:, None]), added, self.tokens)
        return History(tokens, self.count + number)

    def with_rows(self, rows: Sequence[Sequence[int]]) -> History:
        """`with_new` of a list of tokens for each row, on the host."""
        tokens = np.array(self.tokens)
        count = np.array(self.count)
        for row, new in enumerate(rows):
            kept = new[: tokens.shape[1] - count[row]]
            tokens[row, count[row] : count[row] + len(kept)] = kept
            count[row] += len(kept)
        return History(tokens, count)


def process(
    rules: Rules, history: History, logits: Array, emitted: Array, stop: Array
) -> Array:
    """The logits f32[B, V] after the rules, of rows that have emitted so many new tokens: i32[]
    or i32[B].

    `stop` i32[n], or i32[B, n] by row, are the stop tokens; negative ones stand for none.
    """
    B, V = logits.shape
    scores = logits.astype(jnp.float32)
    place = jnp.arange(history.tokens.shape[1], dtype=jnp.int32)[None]
    known = place < history.count[:, None]
    penalised = jnp.where(scores < 0, scores * rules.penalty, scores / rules.penalty)
    scores = jnp.where(_holds(history.tokens, known, V), penalised, scores)

    repeats = known & _follows_last(history, rules.ngram)
    scores = jnp.where(_holds(history.tokens, repeats, V), -jnp.inf, scores)

    emitted = jnp.broadcast_to(emitted, (B,))[:, None]
    stop = stop.reshape(-1, stop.shape[-1])
    ends = _holds(stop, stop >= 0, V)
    banned = (
        (ends & (emitted < rules.least))
        | rules.never[None]
        | (rules.not_first[None] & (emitted == 0))
    )
    return jnp.where(banned, -jnp.inf, scores)


def _holds(tokens: Array | np.ndarray, valid: Array | np.ndarray, vocabulary: int) -> Array:
    """bool[B, V]: the tokens that are among `tokens` i32[B, S], where `valid`."""
    rows = jnp.arange(len(tokens), dtype=jnp.int32)[:, None]
    at = jnp.where(valid, tokens, vocabulary)
    return jnp.zeros((len(tokens), vocabulary), bool).at[rows, at].set(True, mode="drop")


def _follows_last(history: History, size: Array | np.ndarray) -> Array:
    """bool[B, S]: the places after size - 1 tokens that equal the last ones of the row; none
    for size 0.
    """
    tokens = jnp.asarray(history.tokens)
    S = history.tokens.shape[1]
    place = jnp.arange(S, dtype=jnp.int32)[None]

    def compare(back: Array, same: Array) -> Array:
        last = jnp.take_along_axis(
            tokens, jnp.maximum(history.count - back, 0)[:, None], axis=1
        )
        return same & (place >= back) & (jnp.roll(tokens, back, axis=1) == last)

    same = jnp.broadcast_to((size > 0) & (history.count[:, None] + 1 >= size), tokens.shape)
    return lax.fori_loop(1, jnp.maximum(size, 1), compare, same)


def check_processors(processors: Any) -> Processors:
    """`processors`, or ValueError if it is something else."""
    if not isinstance(processors, Processors):
        raise ValueError(
            f"processors must be a Processors, got {short_repr(processors)}; make one: "
            "kvjax.generation.processors.Processors(repetition_penalty=1.1)"
        )
    return processors


def _ids(name: str, ids: object) -> tuple[int, ...]:
    return require_ints(f"Processors({name}=...)", ids, at_least=0)


def _mask(ids: tuple[int, ...], vocabulary: int) -> np.ndarray:
    mask = np.zeros(vocabulary, bool)
    mask[[i for i in ids if i < vocabulary]] = True
    return mask
