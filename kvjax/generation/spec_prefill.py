"""SpecPrefill: a draft model reads a prompt, and the model reads only the tokens to which the
draft attends.

The draft reads the whole prompt, then decodes a few tokens. The attention of these steps to the
prompt says which parts of it an answer needs. The model reads the chunks with the most
attention, each token at its own position, so that its prompt takes about the share `keep` of
the time, and its cache the share `keep` of the memory. Nothing is verified: the answer is
another one than that of the whole prompt.

A prompt of 131072 tokens of an 8B shape took 2.6 s on an H100, 1.6 of them for a draft with 8
layers of a 1B shape (`ttft_part.json`); the whole one took 11.0 on an H200 (`ttft.json`). A
draft must be deep enough to find things: with all 30 layers of SmolLM2-135M as the draft,
keep=0.1 kept the needle of each of 6 prompts of 3072 tokens, and with the first 10 layers that
of 2 (`spec_prefill.json`).

**Source:** Liu et al. 2025 (SpecPrefill): pooling over 13 tokens, the largest of all layers and
heads, the mean of the steps, chunks of 32 tokens. **Differs:** the first chunk and the last 16
are read beside the share `keep`, because a prompt that lost the end of its chat template is not
answered as a chat.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.tree_util import register_dataclass

from kvjax.cache.cache import Cache, init
from kvjax.generation.drafts import check_known
from kvjax.generation.prefilling import check_takes_gaps, prefill, windows_of
from kvjax.generation.prompt_inputs import (
    check_fit,
    check_model,
    max_positions,
)
from kvjax.memory import on_host
from kvjax.numerics.partial import PartialAttention
from kvjax.policies import Full, FullState, Info, Policy, Step
from kvjax.policies.full import AroundFull
from kvjax.sharding.placement import call_model
from kvjax.spec import CacheSpec, keep_int
from kvjax.validation import check_share

POOL, CHUNK = (
    13,
    32,
)  # tokens whose weights are averaged, and that are read or left out together
FIRST, LAST = 1, 16  # chunks that are always read


@dataclass(frozen=True)
class SpecPrefill:
    """Reads the share `keep` of a prompt's chunks of 32 tokens, those to which a draft model
    attends most.

    Args:
      draft: a model of the same tokenizer, or the first layers of the main one. Layers with
        windows do not vote.
      keep: share of the chunks, above 0 and at most 1.
      look_ahead: tokens that the draft decodes, whose queries vote.

    >>> SpecPrefill(lambda tokens, cache, **_: (tokens, cache), keep=0.25).kept(131072)
    33312
    """

    draft: Any
    keep: float = dataclasses.field(default=0.2, kw_only=True)
    look_ahead: int = dataclasses.field(default=8, kw_only=True)

    def __post_init__(self) -> None:
        check_model(self.draft)
        check_share("SpecPrefill(keep=...)", self.keep, "the prompt")
        keep_int(self, "look_ahead", at_least=1, at_most=256)

    def kept(self, tokens: int) -> int:
        """How many of a prompt's `tokens` are read."""
        return kept(tokens, self.keep)

    def check(self, model: Any, cache: Cache) -> None:
        """Raises ValueError for a cache that holds tokens or needs whole prompts."""
        check_model(model, ("positions",))
        if earlier := int(np.max(on_host(cache.length))):
            raise ValueError(
                f"the cache holds {earlier} tokens before this prompt, which the draft model has not read; pass an "
                "empty cache and the whole text, or leave out spec_prefill"
            )
        check_takes_gaps(windows_of(model), cache)

    def choose(self, prompt: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The positions i32[B, N], in order, that are read of a prompt i32[B, T] with `lengths`
        i32[B], and how many, i32[B]; both are right-padded."""
        chosen = [np.arange(length, dtype=np.int32) for length in lengths]
        check_known(self.draft, prompt, lengths)
        if any(self.kept(int(length)) < length for length in lengths):
            scores = np.asarray(
                importance(self.draft, prompt, lengths, look_ahead=self.look_ahead)
            )
            chosen = [
                best_chunks(row[:length], self.keep)
                for row, length in zip(scores, lengths, strict=True)
            ]
        counts = np.array([len(row) for row in chosen], np.int32)
        positions = np.zeros((len(chosen), int(counts.max())), np.int32)
        for row, own in zip(positions, chosen, strict=True):
            row[: len(own)] = own
        return positions, counts

    def prefill(
        self,
        model: Any,
        cache: Cache,
        prompt: np.ndarray,
        lengths: np.ndarray,
        *,
        chunk: int | None = None,
        progress: Callable[[int], None] | None = None,
        final: Any = None,
    ) -> tuple[Array, Cache]:
        """`kvjax.generation.prefill` of the tokens that the draft chooses."""
        self.check(model, cache)
        positions, counts = self.choose(prompt, lengths)
        if np.array_equal(counts, lengths):
            return prefill(
                model, cache, prompt, lengths, chunk=chunk, progress=progress, final=final
            )
        tokens = np.take_along_axis(prompt, positions, axis=1)
        return prefill(
            model,
            cache,
            tokens,
            counts,
            chunk=chunk,
            progress=progress,
            final=final,
            positions=positions,
        )


def kept(tokens: int, keep: float) -> int:
    """How many of a prompt's `tokens` are read for the share `keep`."""
    chunks = -(-tokens // CHUNK)
    most = FIRST + LAST + _share(chunks, keep)
    return tokens if chunks <= most else tokens - (chunks - most) * CHUNK


def _share(chunks: int, keep: float) -> int:
    return math.ceil(round(chunks * keep, 6))  # .3 of 10 is 3


def best_chunks(scores: np.ndarray, keep: float) -> np.ndarray:
    """The positions i32[N], in order, of the chunks that are read by scores f32[M] of a
    prompt's tokens.

    The earlier one of equal chunks is read.
    """
    M = len(scores)
    start = np.arange(0, M, CHUNK)
    mean = np.add.reduceat(scores.astype(np.float64), start) / np.diff(np.append(start, M))
    always = np.zeros(len(start), bool)
    always[:FIRST], always[-LAST:] = True, True
    order = np.argsort(np.where(always, -np.inf, -mean), kind="stable")
    read = np.zeros(len(start), bool)
    read[order[: np.sum(always) + _share(len(start), keep)]] = True
    return np.flatnonzero(np.repeat(read, CHUNK)[:M]).astype(np.int32)


def importance(
    draft: Any, prompt: np.ndarray, lengths: np.ndarray, *, look_ahead: int = 8
) -> Array:
    """f32[B, T]: the attention of a draft's next `look_ahead` steps to the tokens of a
    right-padded prompt i32[B, T].

    The weights of a step's query over the prompt are averaged over 13 tokens; then the largest
    over all layers and heads is taken, and of these the mean over the steps.

    Raises:
      ValueError: a prompt that does not fit in the draft's positions; a draft whose layers all
        have windows.
    """
    B, T = prompt.shape
    check_fit(
        0,
        int(np.max(lengths)),
        look_ahead,
        None,
        max_positions(draft),
        where="the draft model: ",
    )
    spec = draft.spec(batch=B, capacity=T + look_ahead)
    if spec.recurrent is not None:
        raise ValueError(
            "SpecPrefill takes a draft model whose layers all have attention, whose queries choose the tokens; this "
            f"one keeps a state in layers {list(spec.recurrent.layers)}"
        )
    cache = init(_Watched(look_ahead), spec, layers=draft.config.layers)
    logits, cache = prefill(draft, cache, prompt, lengths, final=lengths + look_ahead)
    votes, _ = _look_ahead(draft, cache, logits, steps=look_ahead)
    if votes is None:
        raise ValueError(
            "every layer of the draft has a sliding window, and only layers with full attention can vote; give another "
            "draft model"
        )
    return votes[:, :T]


@partial(jax.jit, static_argnames="steps", donate_argnames="cache")
def _look_ahead(
    draft: Any, cache: Cache, logits: Array, *, steps: int
) -> tuple[Array | None, Cache]:
    """The scores of `importance`, and the cache, which is returned so that it can change in
    place.
    """

    def step(carry: tuple[Array, Cache], _: None) -> tuple[tuple[Array, Cache], None]:
        logits, cache = carry
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return call_model(draft, token[:, None], cache, last_logits=True), None

    (_, cache), _ = lax.scan(step, (logits, cache), length=steps)
    windows = windows_of(draft) or (None,) * len(cache.layers)
    seen = [
        layer.state.votes
        for layer, window in zip(cache.layers, windows, strict=True)
        if window is None
    ]
    return jnp.mean(jnp.max(jnp.stack(seen), axis=0), axis=1) if seen else None, cache


@register_dataclass
@dataclass(frozen=True)
class _WatchedState(AroundFull):
    full: FullState
    prompt: Array  # i32[B] tokens of the prompt
    votes: Array  # f32[B, steps, S] pooled weights of each step, the largest of all heads


@dataclass(frozen=True)
class _Watched(Policy):
    """`Full` attention that keeps how much each of the first `steps` decode steps attends to
    the prompt.
    """

    steps: int
    takes_sinks = True

    def init(self, spec: CacheSpec) -> _WatchedState:
        votes = jnp.zeros((spec.batch, self.steps, spec.capacity), jnp.float32)
        return _WatchedState(Full().init(spec), jnp.zeros(spec.batch, jnp.int32), votes)

    def prefill(self, st: _WatchedState, k: Array, v: Array, lengths: Array) -> _WatchedState:
        return dataclasses.replace(
            st, full=Full().prefill(st.full, k, v, lengths), prompt=st.prompt + lengths
        )

    def update(self, st: _WatchedState, k: Array, v: Array, active: Array) -> _WatchedState:
        return dataclasses.replace(st, full=Full().update(st.full, k, v, active))

    def attend(
        self, st: _WatchedState, q: Array, step: Step
    ) -> tuple[Array, _WatchedState, Info]:
        out, full, info = Full().attend(st.full, q, step)
        prompt = jnp.arange(st.votes.shape[2], dtype=jnp.int32)[None] < st.prompt[:, None]
        weights = step.weights(q, full.tokens.k, prompt[:, None, None])
        around, side = (1, 1, 1, POOL), POOL // 2
        pooled = (
            lax.reduce_window(
                weights, 0.0, lax.add, around, (1,) * 4, ((0, 0),) * 3 + ((side, side),)
            )
            / POOL
        )
        now = (
            jnp.arange(self.steps, dtype=jnp.int32)[None]
            == (st.length - st.prompt - 1)[:, None]
        )[..., None]
        votes = jnp.where(now, jnp.max(pooled, axis=(1, 2))[:, None], st.votes)
        return out, _WatchedState(full, st.prompt, votes), info

    def attend_stored(self, st: _WatchedState, q: Array, step: Step) -> PartialAttention:
        return Full().attend_stored(st.full, q, step)
