"""Prompts that are read once and stored into many caches.

A prompt in one chunk attends to itself exactly, whatever its cache keeps of it later. So its
queries, keys and values are the same for every cache: `Prompt` is a policy that records them,
and `store` passes them to the policies to decode from, through the hook that a model calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.tree_util import register_dataclass

from kvjax.attention import attention
from kvjax.cache.cache import Cache, LayerCache, attending, init, init_layer
from kvjax.generation.loops import count_attended
from kvjax.generation.prefilling import Model, chunk_size, prefill
from kvjax.models import Checkpoint
from kvjax.ops.chunk import ungroup
from kvjax.policies import PerLayer, Policy, Recurrent, Step
from kvjax.spec import CacheSpec

WHOLE = 1 << 30  # more tokens than a prompt has: one chunk


@register_dataclass
@dataclass(frozen=True)
class PromptState:
    q: Array  # dtype[B, K, G, T, D]
    k: Array  # dtype[B, K, T, D]
    v: Array  # dtype[B, K, T, D]
    length: Array  # i32[B] real tokens of each row

    @property
    def overflow(self) -> Array:
        """Always false, as a prompt is as long as the spec says: bool[B]."""
        return jnp.zeros(self.length.shape, bool)


@dataclass(frozen=True)
class Prompt(Policy):
    """Takes one prompt of as many columns as the spec's capacity, in one chunk, and records it
    unchanged.
    """

    observes = takes_sinks = True

    def init(self, spec: CacheSpec) -> PromptState:
        def zeros(*heads: int) -> Array:
            return jnp.zeros((spec.batch, *heads, spec.capacity, spec.head_dim), spec.dtype)

        K = spec.kv_heads
        length = jnp.zeros(spec.batch, jnp.int32)
        return PromptState(zeros(K, spec.group), zeros(K), zeros(K), length)

    def prefill_observed(
        self,
        st: PromptState,
        q: Array,
        k: Array,
        v: Array,
        lengths: Array,
        step: Step,
    ) -> PromptState:
        if q.shape != st.q.shape:
            raise ValueError(
                f"a Prompt takes one chunk of {st.q.shape[3]} columns, got {q.shape[3]}"
            )
        dtype = st.q.dtype
        return PromptState(q.astype(dtype), k.astype(dtype), v.astype(dtype), lengths)


def columns(tokens: int) -> int:
    """Columns that a prompt of `tokens` is padded to, one of four sizes an octave."""
    return chunk_size(tokens, WHOLE)


def read(
    checkpoint: Checkpoint, rows: Sequence[Sequence[int]], new_tokens: int = 0
) -> tuple[Array, Cache]:
    """Logits f32[B, V] after prompts, some of which may be empty, and a cache of their queries,
    keys and values.

    `new_tokens`, the most that will follow a prompt, matters only to a RoPE that depends on the
    length of a text.
    """
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), columns(int(lengths.max()))), np.int32)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: len(row)] = row
    T = tokens.shape[1]
    empty = init(
        Prompt(),
        checkpoint.model.spec(batch=len(rows), capacity=T),
        layers=checkpoint.config.layers,
    )
    return prefill(
        checkpoint.model,
        empty,
        tokens,
        lengths,
        chunk=T,
        first_chunk=True,
        final=lengths + new_tokens,
    )


def store(
    checkpoint: Checkpoint,
    prompts: Iterable[LayerCache],
    policy: PerLayer,
    capacity: int,
    rotated_for: Array | None = None,
) -> Cache:
    """A cache of `policy` that holds the layers that `read` recorded, as if the model had
    prefilled it.

    The recorded layers and their `rotated_for` stay valid. A layer that keeps a state of fixed
    size has the same one whatever the cache, so it is copied.
    """
    layers = []
    config = checkpoint.config
    of_model: Any = {"scale": config.query_scale, "soft_cap": config.soft_cap}
    policies = map(policy.policy, itertools.count())  # of the layers with attention
    for layer, window in zip(prompts, config.windows, strict=True):
        spec = replace(layer.spec, capacity=capacity)
        if isinstance(layer.policy, Recurrent):
            layers.append(LayerCache(jax.tree.map(jnp.copy, layer.state), layer.policy, spec))
            continue
        empty = init_layer(next(policies), spec)
        st: PromptState = layer.state
        layers.append(_store(empty, st.q, st.k, st.v, st.length, window=window, **of_model))
    return Cache(tuple(layers), jax.tree.map(jnp.copy, rotated_for))


@partial(jax.jit, static_argnames=("window", "scale", "soft_cap"), donate_argnames="cache")
def _store(
    cache: LayerCache, q: Array, k: Array, v: Array, lengths: Array, **static: Any
) -> Any:
    # The prompt's attention output is unused, so XLA leaves it out.
    q = ungroup(q, q.dtype)
    k = jnp.swapaxes(k, 1, 2)
    v = jnp.swapaxes(v, 1, 2)
    return attention(cache, q, k, v, lengths=lengths, first_chunk=True, **static)[1]


class Fed(NamedTuple):
    """The result of `feed`."""

    cache: Cache
    logits: Array  # f32[B, V] of the token after the last of each row
    nll: Array  # f32[B, R] nats of the targets; meaningless where a row has no step
    greedy: Array  # bool[B, R] whether the target is the likeliest token; meaningless where a row has no step
    attended: Array  # f32[L] tokens read per step and KV head, mean over the row steps
    steps: Array  # f32[] row steps


@partial(jax.jit, donate_argnames="cache")
def feed(
    model: Model, cache: Cache, logits: Array, tokens: Array, targets: Array, counts: Array
) -> Fed:
    """Feeds the first `counts` i32[B] of tokens i32[B, R], one decode step each, and scores
    targets i32[B, R].

    targets[b, t] is scored by the logits after tokens[b, t]. A row without tokens left is
    inactive, and keeps its logits.
    """
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    zero = jnp.sum(logits[:0], dtype=jnp.float32)  # on the devices of the logits

    def step(t: Array, fed: Fed) -> Fed:
        active = t < counts
        new, cache, infos = model(
            tokens[:, t][:, None], fed.cache, active=active, last_logits=True, info=True
        )
        nll = jax.nn.logsumexp(new, axis=-1) - new[rows, targets[:, t]]
        greedy = fed.greedy.at[:, t].set(jnp.argmax(new, axis=-1) == targets[:, t])
        attended, steps = count_attended(fed.attended, fed.steps, infos, active)
        logits = jnp.where(active[:, None], new, fed.logits)
        return Fed(cache, logits, fed.nll.at[:, t].set(nll), greedy, attended, steps)

    nll = zero + jnp.zeros(tokens.shape, jnp.float32)
    start = Fed(
        cache, logits, nll, nll > 0, jnp.broadcast_to(zero, (len(attending(cache)),)), zero
    )
    return lax.fori_loop(0, jnp.max(counts), step, start)
