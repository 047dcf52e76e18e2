"""Drafts: tokens that are proposed cheaply and verified by the model, several in one step.

A draft proposes the next tokens. The model takes the next token and the draft in one step
(`kvjax.decode`), and a drafted token is accepted if the model draws the same token in its
place: the most likely one without a temperature, else a draw with the key of that position.
Tokens after the first difference are removed (`kvjax.rollback`). So the text is the same as
without drafts, also for draws with the same key, up to rounding of the logits; drafts change
only the speed.

**Source:** Leviathan et al. 2023 and Saxena 2023 (prompt lookup). **Differs:** they accept a
drafted token with probability min(1, p / q), and otherwise draw from the residual distribution.
Here the draft and the model draw with the same noise (Daliri et al. 2024), which has the same
distribution p and gives the text of the key. For a draft without its own draws, such as prompt
lookup, the two rules accept equally often.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.tree_util import register_dataclass

from kvjax.attention import MOST_STEPS
from kvjax.cache.cache import Cache, flushed, init
from kvjax.cache.editing import rollback, room
from kvjax.cache.flushing import flush
from kvjax.generation.prefilling import prefill
from kvjax.generation.prompt_inputs import check_model, vocabulary_size
from kvjax.numerics.blocks import put_last
from kvjax.policies import Full, PerLayer, Policy
from kvjax.sharding.placement import call_model
from kvjax.spec import keep_int
from kvjax.validation import check_verbs, shown

Draw = Callable[[Array, Array | int], Array]
"""(logits f32[B, V], i) -> i32[B]: the token that the run draws from them, i tokens after the
next one.
"""


class Drafter(Protocol):
    """A draft in progress: a pytree; a loop on the device carries its `state`."""

    @property
    def state(self) -> Any:
        """The arrays that steps change. They are donated."""
        ...

    def with_state(self, state: Any) -> Any:
        """The drafter with another state."""
        ...

    @property
    def max_tokens(self) -> int:
        """The most tokens that a step drafts."""
        ...

    def propose(self, token: Array, active: Array, draw: Draw) -> tuple[Array, Array, Any]:
        """Drafts i32[B, max_tokens] of the tokens after `token` i32[B], their number i32[B],
        and the new drafter.
        """
        ...

    def accept(self, tokens: Array, taken: Array) -> Any:
        """The drafter after the first `taken` i32[B] of tokens i32[B, 1 + max_tokens], the
        token and its draft.
        """
        ...


class Draft(Protocol):
    """A source of drafts that `generate` and `stream` take as `draft`."""

    @property
    def tokens(self) -> int:
        """The most tokens that a step drafts."""
        ...

    def start(
        self, model: Any, cache: Cache, prompt: np.ndarray, lengths: np.ndarray, new_tokens: int
    ) -> Drafter:
        """The drafter of a run that will read a right-padded prompt i32[B, T] with `lengths`
        i32[B] into `cache`.

        Raises:
          ValueError: the draft cannot work with this model, cache or prompt. The cache is not
            donated yet.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class PromptLookup:
    """Drafts the tokens that followed an earlier occurrence of the last `ngram` tokens, in the
    prompt or the answer.

    Needs no second model. Finds the most recent occurrence of the longest match of at most
    `ngram` tokens; if not even the last token occurred before, it drafts nothing. Useful when
    the answer repeats the prompt: edited code, summaries.
    """

    ngram: int = 3
    tokens: int = 7  # 8 with the one before them: kernels take 32 query heads in a pass, and 8 divides chunks

    def __post_init__(self) -> None:
        keep_int(self, "ngram", at_least=1, at_most=64)
        keep_int(self, "tokens", at_least=1, at_most=MOST_STEPS - 1)

    def start(
        self, model: Any, cache: Cache, prompt: np.ndarray, lengths: np.ndarray, new_tokens: int
    ) -> _LookupDrafter:
        size = max(64, 1 << (prompt.shape[1] + new_tokens + self.tokens).bit_length())
        text = np.pad(prompt, ((0, 0), (0, size - prompt.shape[1])))
        return _LookupDrafter(
            jnp.asarray(text), jnp.asarray(lengths, jnp.int32), self.ngram, self.tokens
        )


@dataclass(frozen=True)
class DraftModel:
    """Drafts with a smaller model of the same vocabulary, which reads and writes along with the
    main model.

    `cache` is the policy of its own cache, and must support `kvjax.rollback`. A draft ends
    where that cache needs a flush, so a small chunk shortens some drafts, unless `tokens` + 1
    divides it.
    """

    model: Any
    tokens: int = dataclasses.field(default=4, kw_only=True)
    cache: Policy | PerLayer = dataclasses.field(default=Full(), kw_only=True)

    def __post_init__(self) -> None:
        check_model(self.model)
        keep_int(self, "tokens", at_least=1, at_most=MOST_STEPS - 1)
        if not hasattr(self.model, "spec") or not hasattr(self.model, "config"):
            raise ValueError(
                f"DraftModel got a {type(self.model).__name__} without `spec` or `config`; give a "
                "kvjax.models.Decoder, or a model with its `spec` and `config.layers`"
            )

    def start(
        self, model: Any, cache: Cache, prompt: np.ndarray, lengths: np.ndarray, new_tokens: int
    ) -> _ModelDrafter:
        check_vocabularies(vocabulary_size(self.model), vocabulary_size(model))
        earlier = np.asarray(cache.length)
        if earlier.any():
            raise ValueError(
                f"the cache holds {int(earlier.max())} tokens before this prompt, which the draft model has not read; "
                "pass an empty cache and the whole text, or draft with PromptLookup()"
            )
        spec = self.model.spec(
            batch=cache.spec.batch, capacity=cache.spec.capacity + self.tokens + 1
        )
        own = init(self.cache, spec, layers=self.model.config.layers)
        check_takes_drafts(own, self.tokens)
        _, own = prefill(self.model, own, prompt, lengths, final=lengths + new_tokens)
        return _ModelDrafter(self.model, own, jnp.asarray(lengths, jnp.int32), self.tokens)


def parse(text: str) -> PromptLookup:
    """The draft that a text names: "prompt-lookup", or "prompt-lookup:3,8" with n-gram and
    tokens.

    >>> parse("prompt-lookup:2,4")
    PromptLookup(ngram=2, tokens=4)
    """
    name, _, numbers = text.partition(":")
    parts = numbers.split(",") if numbers else []
    if (
        name != "prompt-lookup"
        or len(parts) > 2
        or not all(part.strip().isdecimal() for part in parts)
    ):
        raise ValueError(
            f"speculate={shown(text)} must be prompt-lookup, or prompt-lookup:NGRAM,TOKENS such as prompt-lookup:3,8"
        )
    return PromptLookup(**dict(zip(("ngram", "tokens"), map(int, parts), strict=False)))


def check_vocabularies(draft: int | None, model: int | None) -> None:
    """Raises ValueError for a draft model of another vocabulary; unknown vocabularies are not
    checked.
    """
    if draft is not None and model is not None and draft != model:
        raise ValueError(
            f"the draft model has a vocabulary of {draft} tokens and the model one of {model}; a draft model must have "
            "the model's tokenizer"
        )


def check_draft(draft: Any, cache: Cache) -> None:
    """Raises ValueError for a `draft` that is no Draft, or for a cache from which its tokens
    cannot be removed.
    """
    if not isinstance(draft, type) and not hasattr(draft, "start"):
        model = draft if hasattr(draft, "spec") else getattr(draft, "model", None)
        if callable(model):
            name = "model" if model is draft else "checkpoint.model"
            raise ValueError(
                f"draft must be a PromptLookup or a DraftModel, got {shown(draft)}; to draft with it, write "
                f"kvjax.generation.drafts.DraftModel({name})"
            )
    wanted = "a PromptLookup or a DraftModel"
    check_verbs(
        "draft",
        draft,
        wanted,
        ("start",),
        "kvjax.generation.drafts.PromptLookup()",
        fields=("tokens",),
    )
    check_takes_drafts(cache, draft.tokens)


def check_takes_drafts(cache: Cache, tokens: int) -> None:
    """Raises ValueError for a cache from which drafted tokens cannot be removed."""
    for i, layer in enumerate(cache.layers):
        policy: Any = layer.policy
        if not policy.reversible:
            raise ValueError(
                f"drafts need a cache that can take back tokens, which layer {i} with {policy!r} cannot; use full, or "
                "a retrieval or compressed method other than freekv"
            )
        chunk = getattr(getattr(policy, "demote", None), "leave", None)
        if chunk is not None and tokens + 1 > chunk:
            raise ValueError(
                f"a draft of {tokens} tokens and the token before it are more than the {chunk} that the recent block "
                f"of layer {i} takes between two flushes; draft at most {chunk - 1}, or make the chunk larger"
            )


@register_dataclass
@dataclass(frozen=True)
class _LookupDrafter:
    text: Array  # i32[B, L] prompt and generated tokens
    length: Array  # i32[B]
    ngram: int = dataclasses.field(metadata={"static": True})
    max_tokens: int = dataclasses.field(metadata={"static": True})

    @property
    def state(self) -> Any:
        return self.text, self.length

    def with_state(self, state: Any) -> _LookupDrafter:
        text: Any
        length: Any
        text, length = (None, None) if state is None else state
        return dataclasses.replace(self, text=text, length=length)

    def propose(
        self, token: Array, active: Array, draw: Draw
    ) -> tuple[Array, Array, _LookupDrafter]:
        text, L = (
            _append(self.text, self.length, token[:, None], jnp.ones_like(token)),
            self.text.shape[1],
        )
        n, place = self.length + 1, jnp.arange(L, dtype=jnp.int32)[None]
        start = jnp.full_like(n, -1)  # where the continuation of the longest run begins
        same = jnp.ones(
            text.shape, bool
        )  # the i + 1 tokens that end at this place are the last i + 1 of the text
        for i in range(self.ngram):
            last = jnp.take_along_axis(text, jnp.maximum(n - 1 - i, 0)[:, None], axis=1)
            same &= (jnp.roll(text, i, axis=1) == last) & (place >= i)
            found = jnp.max(jnp.where(same & (place < (n - 1)[:, None]), place, -1), axis=1)
            start = jnp.where(found >= 0, found + 1, start)
        at = jnp.minimum(start[:, None] + jnp.arange(self.max_tokens)[None], L - 1)
        count = jnp.where(start >= 0, jnp.minimum(n - start, self.max_tokens), 0)
        return jnp.take_along_axis(text, jnp.maximum(at, 0), axis=1), count, self

    def accept(self, tokens: Array, taken: Array) -> _LookupDrafter:
        text = _append(self.text, self.length, tokens, taken)
        return dataclasses.replace(self, text=text, length=self.length + taken)


@register_dataclass
@dataclass(frozen=True)
class _ModelDrafter:
    model: Any
    cache: Cache
    length: Array  # i32[B] tokens that were accepted
    max_tokens: int = dataclasses.field(metadata={"static": True})

    @property
    def state(self) -> Any:
        return self.cache, self.length

    def with_state(self, state: Any) -> _ModelDrafter:
        cache: Any
        length: Any
        cache, length = (None, None) if state is None else state
        return dataclasses.replace(self, cache=cache, length=length)

    def propose(
        self, token: Array, active: Array, draw: Draw
    ) -> tuple[Array, Array, _ModelDrafter]:
        start = flush(self.cache)
        free = room(start)  # a flush within a draft could not be taken back

        def feed(carry: tuple[Cache, Array], i: Array) -> tuple[tuple[Cache, Array], Array]:
            cache, token = carry
            fed = active & (i <= free)
            with flushed():
                logits, cache = call_model(
                    self.model, token[:, None], cache, active=fed, last_logits=True
                )
            token = draw(logits, i)
            return (cache, token), token

        # The last drafted token is fed too: if all are accepted, this cache holds the same
        # tokens as the model's.
        steps = jnp.arange(1, self.max_tokens + 2, dtype=jnp.int32)
        (cache, _), drafted = lax.scan(feed, (start, token), steps)
        count = jnp.clip(free - 1, 0, self.max_tokens)
        return drafted[: self.max_tokens].T, count, dataclasses.replace(self, cache=cache)

    def accept(self, tokens: Array, taken: Array) -> _ModelDrafter:
        length = self.length + taken
        return dataclasses.replace(self, cache=rollback(self.cache, length), length=length)


def _append(text: Array, length: Array, tokens: Array, count: Array) -> Array:
    i = jnp.arange(tokens.shape[1])[None]
    at = jnp.where(i < count[:, None], length[:, None] + i, text.shape[1])
    return put_last(text, at, tokens)


def accepted(drawn: Array, draft: Array, count: Array, ended: Array) -> Array:
    """Says how many of the first `count` tokens of draft i32[B, M] are accepted: i32[B].

    `drawn` i32[B, M] are the tokens that the model draws in their places. `ended` bool[B, M] is
    true where the token before ends the text.
    """
    i = jnp.arange(draft.shape[1])[None]
    good = (drawn == draft) & (i < count[:, None]) & ~ended
    return jnp.sum(jnp.cumprod(good.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


@dataclass(frozen=True)
class Speculation:
    """The acceptance of drafts, over all rows."""

    steps: int  # steps of the model, counted per row
    drafted: int  # tokens that were proposed to it
    accepted: int

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that were accepted; 0 if none was drafted."""
        return self.accepted / max(self.drafted, 1)

    @property
    def tokens_per_step(self) -> float:
        """New tokens of a row per step of the model; 1 without drafts."""
        return (self.steps + self.accepted) / max(self.steps, 1)
