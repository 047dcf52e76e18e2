"""Drafts: tokens that are proposed cheaply and verified by the model, several in one step.

A draft comes from the text (`PromptLookup`), from a smaller model (`DraftModel`), or from the
model itself, with a sparse read of its own cache (`SelfDraft`).

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
from typing import Any, ClassVar, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.tree_util import register_dataclass

from kvjax.attention import MOST_STEPS
from kvjax.cache.cache import Cache, flushed, init
from kvjax.cache.editing import rollback, room
from kvjax.cache.flushing import flush
from kvjax.generation.draft_length import (
    IDLE_MEMORY,
    MEMORY,
    PRICE,
    TRUST,
    USUAL,
    VERIFICATION,
    keeps_on_host,
    selects,
    step_costs,
    tokens_in_one_pass,
    why_idle,
)
from kvjax.generation.kept_selections import (
    attending_again,
    keeping_selections,
    steps_together,
    without_selections,
)
from kvjax.generation.prefilling import prefill
from kvjax.generation.prompt_inputs import check_model, vocabulary_size
from kvjax.memory import nbytes, on_host
from kvjax.numerics.blocks import put_last
from kvjax.policies import Full, PerLayer, Policy
from kvjax.policies.short import Short
from kvjax.sharding.placement import call_model
from kvjax.spec import keep_int
from kvjax.validation import check_verbs, short_repr

Draw = Callable[[Array, Array, Array | int], Array]
"""(logits f32[B, V], fed i32[B, n], i) -> i32[B]: the token that the run draws from logits that
follow the first i of the tokens `fed`: the next token and its draft. Later ones may be anything.
"""


@dataclass(frozen=True)
class Round:
    """The model, its cache and the tokens so far, before a step of the loop verifies a draft."""

    model: Any
    cache: Cache  # the text before `token`, flushed
    token: Array  # i32[B] the next token of each row
    active: Array  # bool[B] rows that take part
    # i32[B] tokens that may be drafted: so many fit before a flush; 0 in other rows
    most: Array
    draw: Draw


class Proposal(NamedTuple):
    """A draft, and what drafting left behind."""

    tokens: Array  # i32[B, max_tokens] that follow the token of the round
    drafted: Array  # i32[B] how many there are; the loop takes at most `most`
    cache: Cache  # the cache of the round, with the same tokens
    drafter: Any


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
        """The most tokens that a step drafts; 0 if drafts would not pay: see `idle`."""
        ...

    @property
    def exact(self) -> bool:
        """True if the model verifies by attention to all tokens, whatever its cache selects."""
        ...

    @property
    def idle(self) -> str | None:
        """Why nothing is drafted; None if tokens are."""
        ...

    def pays(self, active: Array, most: Array) -> Array | None:
        """bool[]: False if a draft of at most `most` i32[B] tokens would not pay now for the
        rows `active` bool[B]; then a step feeds one token. None: drafts always pay.
        """
        ...

    def propose(self, now: Round) -> Proposal:
        """Drafts tokens that follow the token of a round."""
        ...

    def accept(self, tokens: Array, taken: Array, drafted: Array) -> Any:
        """The drafter after the first `taken` i32[B] of tokens i32[B, T]: the token and its
        draft of `drafted` i32[B] tokens.
        """
        ...


class Draft(Protocol):
    """A source of drafts that `generate` and `stream` take as `draft`."""

    @property
    def tokens(self) -> int | None:
        """The most tokens that a step drafts; None: `start` decides by the cache."""
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
        check_known(self.model, prompt, lengths)
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


@dataclass(frozen=True)
class SelfDraft:
    """Drafts with the model itself, by the selection of its own cache, and verifies by
    attention to all tokens of that cache.

    So the text is that of full attention, and the method of the cache decides only how many
    tokens a step gives: the same tokens in float32; in bfloat16 as near as full attention is to
    itself in another batch, because sums are rounded in another order. Draws with a key are
    those of full attention with that key. Over a store of codes, such as `fier:store=turbo4`,
    it is the text of attention to all codes.

    Works with caches that keep every token on the device, can take tokens back, and select:
    fier, quest, pariskv, exact and magicpig, with layers that share a selection too. Nothing is
    copied: drafted tokens are written to the recent block, taken back, and written again by the
    step that verifies them.

    `tokens` is the most that a draft has; None: as many as one pass of the GPU kernel verifies
    together (32 query heads of a KV head), 3 to 7. Each round drafts as many as pay by how
    often the last drafts were right. On a GPU whose step times are known, caches too short for
    drafts to pay draft nothing, and `Speculation.idle` says so.

    `steps_per_selection` steps of a draft attend to what the first of them selects, and to the
    tokens that leave the local window since; None: all of a draft. So most steps score nothing.
    Layers that select pages, or over a mesh, select in each step.

    **Source:** self-speculative decoding with sparse attention: MagicDec (arXiv 2408.11049),
    TriForce (arXiv 2404.11912), SparseSpec (arXiv 2607.27735).
    """

    tokens: int | None = None
    steps_per_selection: int | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "steps_per_selection"):
            if getattr(self, name) is not None:
                keep_int(self, name, at_least=1, at_most=MOST_STEPS - 1)

    def start(
        self, model: Any, cache: Cache, prompt: np.ndarray, lengths: np.ndarray, new_tokens: int
    ) -> _SelfDrafter:
        check_drafts_itself(cache)
        tokens = tokens_in_one_pass(cache.spec) if self.tokens is None else self.tokens
        check_takes_drafts(cache, tokens)
        together = steps_together(cache, self.steps_per_selection, tokens)
        length = int(np.max(on_host(cache.length) + lengths)) + new_tokens // 2
        costs = step_costs(cache, nbytes(model).device, length, together)
        idle = why_idle(cache, costs, tokens)
        rows = cache.spec.batch
        return _SelfDrafter(
            compared=jnp.zeros(rows, jnp.float32),
            right=jnp.zeros(rows, jnp.float32),
            price=jnp.float32(PRICE if costs is None else costs.price),
            max_tokens=0 if idle else tokens,
            idle=idle,
            steps_per_selection=together,
        )


def parse(text: str) -> PromptLookup | SelfDraft:
    """The draft that a text names: "self" or "self:4" with the most tokens of a draft,
    "prompt-lookup", or "prompt-lookup:3,8" with n-gram and tokens.

    >>> parse("prompt-lookup:2,4")
    PromptLookup(ngram=2, tokens=4)
    >>> parse("self:4")
    SelfDraft(tokens=4, steps_per_selection=None)
    """
    name, _, numbers = text.partition(":")
    parts = numbers.split(",") if numbers else []
    fields = {"prompt-lookup": ("ngram", "tokens"), "self": ("tokens",)}.get(name, ())
    if len(parts) > len(fields) or not fields or not all(p.strip().isdecimal() for p in parts):
        raise ValueError(
            f"speculate={short_repr(text)} must be self or self:TOKENS such as self:4, prompt-lookup, or "
            "prompt-lookup:NGRAM,TOKENS such as prompt-lookup:3,8"
        )
    given = dict(zip(fields, map(int, parts), strict=False))
    return SelfDraft(**given) if name == "self" else PromptLookup(**given)


def check_known(draft: Any, prompt: np.ndarray, lengths: np.ndarray) -> None:
    """Raises ValueError for a prompt i32[B, T] of `lengths` i32[B] with ids that the draft model
    does not know.

    Models of one tokenizer may pad their vocabularies to different sizes, so sizes say nothing.
    """
    vocabulary = vocabulary_size(draft)
    real = prompt[np.arange(prompt.shape[1]) < np.asarray(lengths)[:, None]]
    highest = int(np.max(real, initial=0))
    if vocabulary is not None and highest >= vocabulary:
        raise ValueError(
            f"the prompt has the token id {highest}, and the draft model has a vocabulary of {vocabulary} tokens; a "
            "draft model must have the model's tokenizer"
        )


def check_tokenizers(draft: Any, model: Any) -> None:
    """Raises ValueError for a draft whose tokenizer gives a token another id than the model's."""
    known = model.get_vocab()
    for token, own in draft.get_vocab().items():
        if known.get(token, own) != own:
            raise ValueError(
                f"the draft model's tokenizer gives {short_repr(token)} the id {own} and the model's {known[token]}; a "
                "draft model must have the model's tokenizer"
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
                f"draft must be a SelfDraft, a PromptLookup or a DraftModel, got {short_repr(draft)}; to draft with "
                f"it, write kvjax.generation.drafts.DraftModel({name})"
            )
    wanted = "a SelfDraft, a PromptLookup or a DraftModel"
    check_verbs(
        "draft",
        draft,
        wanted,
        ("start",),
        "kvjax.generation.drafts.PromptLookup()",
        fields=("tokens",),
    )
    if isinstance(draft, SelfDraft):
        check_drafts_itself(cache)
    if draft.tokens is not None:
        check_takes_drafts(cache, draft.tokens)


def check_drafts_itself(cache: Cache) -> None:
    """Raises ValueError for a cache with which a model cannot draft for itself (`SelfDraft`)."""
    policies = [layer.policy for layer in cache.layers]
    for i, layer in enumerate(cache.layers):
        policy = layer.policy
        whole = policy.takes_exact and policy.reversible
        if not whole or keeps_on_host(policy, layer.spec):
            raise ValueError(
                f"a model drafts for itself on a cache that keeps every token on the device and can take tokens back, "
                f"which layer {i} with {policy!r} cannot; use fier, quest, pariskv, exact or magicpig"
            )
    if not any(selects(policy) or isinstance(policy, Short) for policy in policies):
        raise ValueError(
            f"a model drafts for itself by a selection, and with {policies[-1]!r} a draft step would read as much as "
            "the step that verifies it; use a method that selects, such as fier, or fier:store=turbo4 over codes"
        )


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
    """Looks for the last tokens in the text so far."""

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

    exact: ClassVar[bool] = False
    idle: ClassVar[str | None] = None

    def pays(self, active: Array, most: Array) -> None:
        return None

    def propose(self, now: Round) -> Proposal:
        one = jnp.ones_like(now.token)
        L = self.text.shape[1]
        text = _append(self.text, self.length, now.token[:, None], one)
        length = self.length + 1
        place = jnp.arange(L, dtype=jnp.int32)[None]

        # Where the longest earlier occurrence of the last tokens goes on; -1: there is none.
        start = jnp.full_like(length, -1)
        # The i + 1 tokens that end at this place are the last i + 1 of the text.
        same = jnp.ones(text.shape, bool)
        for i in range(self.ngram):
            last = jnp.take_along_axis(text, jnp.maximum(length - 1 - i, 0)[:, None], axis=1)
            same &= (jnp.roll(text, i, axis=1) == last) & (place >= i)
            earlier = same & (place < (length - 1)[:, None])
            latest = jnp.max(jnp.where(earlier, place, -1), axis=1)
            start = jnp.where(latest >= 0, latest + 1, start)

        # The tokens after it, up to the end of the text.
        steps = jnp.arange(self.max_tokens, dtype=jnp.int32)[None]
        at = jnp.minimum(start[:, None] + steps, L - 1)
        tokens = jnp.take_along_axis(text, jnp.maximum(at, 0), axis=1)
        count = jnp.where(start >= 0, jnp.minimum(length - start, self.max_tokens), 0)
        return Proposal(tokens, count, now.cache, self)

    def accept(self, tokens: Array, taken: Array, drafted: Array) -> _LookupDrafter:
        text = _append(self.text, self.length, tokens, taken)
        return dataclasses.replace(self, text=text, length=self.length + taken)


@register_dataclass
@dataclass(frozen=True)
class _ModelDrafter:
    """Drafts by steps of a smaller model, which has a cache of its own."""

    model: Any
    cache: Cache  # of the smaller model; holds the accepted tokens
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

    exact: ClassVar[bool] = False
    idle: ClassVar[str | None] = None

    def pays(self, active: Array, most: Array) -> None:
        return None

    def propose(self, now: Round) -> Proposal:
        start = flush(self.cache)
        free = room(start)  # a flush within a draft could not be taken back
        # The last drafted token is fed too: if all are accepted, this cache holds the same
        # tokens as the model's.
        steps = self.max_tokens + 1

        def feed(i: Array, carry: tuple[Cache, Array]) -> tuple[Cache, Array]:
            cache, fed = carry
            takes = now.active & (i < free)
            cache, token = _draft_step(now, self.model, cache, fed, i, takes)
            return cache, fed.at[:, i + 1].set(token)

        fed = jnp.zeros((now.token.shape[0], steps + 1), jnp.int32).at[:, 0].set(now.token)
        cache, fed = lax.fori_loop(0, steps, feed, (start, fed))
        count = jnp.clip(free - 1, 0, self.max_tokens)
        after = dataclasses.replace(self, cache=cache)
        return Proposal(fed[:, 1:-1], count, now.cache, after)

    def accept(self, tokens: Array, taken: Array, drafted: Array) -> _ModelDrafter:
        length = self.length + taken
        return dataclasses.replace(self, cache=rollback(self.cache, length), length=length)


@register_dataclass
@dataclass(frozen=True)
class _SelfDrafter:
    """Drafts by steps of the model itself. Each row counts how often its drafts were right,
    the last rounds most; all rows draft the same number of tokens, because they share the
    steps. Where no draft pays, counts fade slowly, so that one is tried again now and then.
    """

    compared: Array  # f32[B] drafted tokens up to the first wrong one
    right: Array  # f32[B] of them were right
    price: Array  # f32[] time of a draft step, as a share of the step that verifies
    max_tokens: int = dataclasses.field(metadata={"static": True})
    idle: str | None = dataclasses.field(default=None, metadata={"static": True})
    steps_per_selection: int = dataclasses.field(default=1, metadata={"static": True})

    exact: ClassVar[bool] = True

    @property
    def state(self) -> Any:
        return self.compared, self.right

    def with_state(self, state: Any) -> _SelfDrafter:
        compared: Any
        right: Any
        compared, right = (None, None) if state is None else state
        return dataclasses.replace(self, compared=compared, right=right)

    def pays(self, active: Array, most: Array) -> Array:
        return (self.best_length(active) > 0) & jnp.any(most > 0)

    def propose(self, now: Round) -> Proposal:
        before = now.cache.length
        steps = jnp.minimum(self.best_length(now.active), jnp.max(now.most))
        # The token of the round, and those drafted after it.
        fed = jnp.zeros((now.token.shape[0], self.max_tokens + 1), jnp.int32)
        fed = fed.at[:, 0].set(now.token)
        if self.steps_per_selection == 1:
            cache, fed = self._feed(now, now.cache, fed, 0, steps)
        else:
            cache, fed = self._feed_by_selections(now, fed, steps)
        # Keys and values of the draft come from hidden states of sparse steps, so the step that
        # verifies stores its own in their place.
        cache = rollback(cache, before)
        return Proposal(fed[:, 1:], jnp.minimum(steps, now.most), cache, self)

    def _feed_by_selections(self, now: Round, fed: Array, steps: Array) -> tuple[Cache, Array]:
        """`_feed` of the first `steps` tokens, of which each `steps_per_selection` attend to one
        selection.
        """
        together = self.steps_per_selection

        def more(drafts: tuple[Array, Cache, Array]) -> Array:
            i, _, _ = drafts
            return i < steps

        def feed_by_one_selection(
            drafts: tuple[Array, Cache, Array],
        ) -> tuple[Array, Cache, Array]:
            """A step that selects, and those that attend to what it selected."""
            i, cache, fed = drafts
            cache, fed = self._feed_one(now, keeping_selections(cache, together), fed, i)
            end = jnp.minimum(i + together, steps)
            cache, fed = self._feed(now, attending_again(cache), fed, i + 1, end)
            return end, without_selections(cache), fed

        start = jnp.zeros((), jnp.int32), now.cache, fed
        _, cache, fed = lax.while_loop(more, feed_by_one_selection, start)
        return cache, fed

    def _feed(
        self, now: Round, cache: Cache, fed: Array, start: Array | int, end: Array
    ) -> tuple[Cache, Array]:
        """Feeds the tokens [start, end) of `fed` i32[B, n] to the model, of which each step draws
        the next one.
        """

        def feed_one(i: Array, drafts: tuple[Cache, Array]) -> tuple[Cache, Array]:
            cache, fed = drafts
            return self._feed_one(now, cache, fed, i)

        cache, fed = lax.fori_loop(start, end, feed_one, (cache, fed))
        return cache, fed

    def _feed_one(self, now: Round, cache: Cache, fed: Array, i: Array) -> tuple[Cache, Array]:
        """Feeds token i of `fed`, in the rows that may draft one after it."""
        cache, token = _draft_step(now, now.model, cache, fed, i, i < now.most)
        return cache, fed.at[:, i + 1].set(token)

    def best_length(self, active: Array) -> Array:
        """i32[]: the tokens of a draft for which the most tokens are expected in the least
        time.

        A draft of n tokens, each of which is right with probability a if those before it are,
        gives 1 + a + ... + a^n tokens in the time of 1 + n price verifications, and no draft
        one token in that of a step of full attention.
        """
        rate = (self.right + USUAL * TRUST) / (self.compared + TRUST)
        rates = jnp.broadcast_to(rate[:, None], (rate.shape[0], self.max_tokens))
        # The tokens that are right of a draft of 1, 2, ... tokens.
        right = jnp.cumsum(jnp.cumprod(rates, axis=1), axis=1)
        gained = 1 + jnp.pad(right, ((0, 0), (1, 0)))  # f32[B, 1 + max_tokens]
        gained = jnp.sum(jnp.where(active[:, None], gained, 0.0), axis=0)
        drafted = jnp.arange(self.max_tokens + 1, dtype=jnp.float32)
        # In the time of a verification; without a draft, a step of full attention.
        verify_time = jnp.where(drafted > 0, 1.0, 1 / VERIFICATION)
        speed = gained / (verify_time + drafted * self.price)
        return jnp.argmax(speed).astype(jnp.int32)

    def accept(self, tokens: Array, taken: Array, drafted: Array) -> _SelfDrafter:
        right = jnp.maximum(taken - 1, 0)  # of the draft
        compared = jnp.minimum(right + 1, drafted)
        memory = jnp.where(drafted > 0, MEMORY, IDLE_MEMORY)
        return dataclasses.replace(
            self,
            compared=self.compared * memory + compared.astype(jnp.float32),
            right=self.right * memory + right.astype(jnp.float32),
        )


def _draft_step(
    now: Round, model: Any, cache: Cache, fed: Array, i: Array, takes: Array
) -> tuple[Cache, Array]:
    """Feeds token i of `fed` i32[B, n] in the rows `takes` bool[B], and draws the one after."""
    token = lax.dynamic_slice_in_dim(fed, i, 1, axis=1)
    own = vocabulary_size(model)
    whole = vocabulary_size(now.model)
    if own is not None and whole is not None and own < whole:
        token = jnp.minimum(token, own - 1)  # the others are padding, which no text has
    with flushed():
        logits, cache = call_model(model, token, cache, active=takes, last_logits=True)
    if whole is not None and own != whole:
        logits = _as_wide(logits, whole)
    return cache, now.draw(logits, fed, i + 1)


def _as_wide(logits: Array, vocabulary: int) -> Array:
    """Logits f32[B, V] for a vocabulary of another size: ids of one alone are never drafted."""
    more = max(vocabulary - logits.shape[1], 0)
    padded = jnp.pad(logits, ((0, 0), (0, more)), constant_values=-jnp.inf)
    return padded[:, :vocabulary]


def _append(text: Array, length: Array, tokens: Array, count: Array) -> Array:
    """`text` i32[B, L] of `length` tokens i32[B], with the first `count` i32[B] of `tokens`
    i32[B, T] after them.
    """
    i = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    at = jnp.where(i < count[:, None], length[:, None] + i, text.shape[1])
    return put_last(text, at, tokens)


def accepted(drawn: Array, draft: Array, count: Array, ended: Array) -> Array:
    """How many of the first `count` i32[B] tokens of draft i32[B, M] are accepted: i32[B].

    `drawn` i32[B, M] are the tokens that the model draws in their places. `ended` bool[B, M] is
    true where the token before ends the text.
    """
    i = jnp.arange(draft.shape[1], dtype=jnp.int32)[None]
    good = (drawn == draft) & (i < count[:, None]) & ~ended
    return jnp.sum(jnp.cumprod(good.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


@dataclass(frozen=True)
class Speculation:
    """The acceptance of drafts, over all rows."""

    steps: int  # steps of the model, counted per row
    drafted: int  # tokens that were proposed to it
    accepted: int
    idle: str | None = None  # why nothing was drafted, in a sentence

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that were accepted; 0 if none was drafted."""
        return self.accepted / max(self.drafted, 1)

    @property
    def tokens_per_step(self) -> float:
        """New tokens of a row per step of the model; 1 without drafts."""
        return (self.steps + self.accepted) / max(self.steps, 1)
