"""tunix's own sampler with the caches of kvjax, for its Llama 3 and Qwen 3 models.

    from tunix.models.llama3 import model as llama3

    with kvjax_caches(llama3, kvjax.presets.parse("fier:budget=1024")):
        sampler = Sampler(llama3.Llama3(config, rngs=nnx.Rngs(0)), tokenizer, cache_config)
        answers = sampler(prompts, max_generation_steps=128)

The sampler stays as it is: it pads prompts on the left, reads them in one call, and keeps the
caches of layers in its state, where a `kvjax.LayerCache` takes the place of a dict. With `full`
the tokens are tunix's own. Training and log probabilities, which use no cache, run tunix's
attention. Rows that have ended go on storing tokens until all have ended, as in tunix.

Make the sampler inside of the context, and use it there. Beam search repeats rows of the cache
by indexing its arrays, which needs `kvjax.take_rows`, so it is not possible.

A method with a budget changes the policy from which rollouts are drawn. `exact_rollouts` does
not: the selection only drafts, and attention to all tokens verifies (`kvjax.SelfDraft`). Tokens
and log-probabilities are those of the exact policy, at the temperature of the draw, as tunix's
trainers expect them:

    with kvjax_caches(llama3, kvjax.presets.parse("fier:budget=1024")):
        out = exact_rollouts(sampler, prompts, max_generation_steps=128, temperature=0.9, seed=0)
    out.tokens, out.logprobs
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import register_dataclass

import kvjax
from kvjax import SelfDraft
from kvjax.generation import right_padded
from kvjax.generation.sampling import sampling

MODELS = {"tunix.models.llama3.model": "Llama3", "tunix.models.qwen3.model": "Qwen3"}


@contextmanager
def kvjax_caches(module: ModuleType, policy: Any) -> Iterator[None]:
    """Within the context, models of a tunix module decode with caches of `policy`, one policy
    or one per layer.

    Raises:
      ValueError: a module whose attention has parts that kvjax does not have, such as a soft
        cap.
    """
    if module.__name__ not in MODELS:
        raise ValueError(
            f"kvjax_caches knows {', '.join(MODELS)}; got {module.__name__}, whose attention differs"
        )
    model, attention = getattr(module, MODELS[module.__name__]), module.Attention
    own_block, own_init = attention.block, model.__dict__.get("init_cache")

    def init_cache(
        self: Any, batch_size: int, cache_size: int, dtype: Any
    ) -> dict[str, kvjax.LayerCache]:
        config = self.config
        spec = kvjax.CacheSpec(
            batch=batch_size,
            q_heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            capacity=cache_size,
            dtype=getattr(config, "dtype", dtype),
        )
        made = kvjax.init(policy, spec, layers=config.num_layers)
        return {f"layer_{i}": layer for i, layer in enumerate(made.layers)}

    def block(
        self: Any, x: Array, segment_pos: Array, cache: Any, attn_mask: Array, **more: Any
    ) -> tuple[Any, Array]:
        if cache is None:
            return own_block(self, x, segment_pos, cache, attn_mask, **more)
        if x.shape[1] > 1 and getattr(self.config, "use_flash_attention", False):
            raise ValueError(
                "use_flash_attention is tunix's own attention for prompts; set it to False, kvjax has one"
            )
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (module.apply_rope(a, segment_pos, head_dim=self.head_dim) for a in (q, k))
        if isinstance(cache, Fed):
            out, cache = cache.attend(q, k, v, scale=self.scale)
        else:
            out, cache = attend(cache, q, k, v, attn_mask, scale=self.scale)
        return cache, self.o_proj(out)

    model.init_cache, attention.block = init_cache, block
    try:
        yield
    finally:
        attention.block = own_block
        if own_init is None:
            del model.init_cache
        else:
            model.init_cache = own_init


def attend(
    cache: kvjax.LayerCache, q: Array, k: Array, v: Array, mask: Array, *, scale: float
) -> tuple[Array, kvjax.LayerCache]:
    """Attention of a layer under a Gemma-style mask bool[B, T, S]: a left-padded prompt (T >
    1), or a decode step.

    A prompt must be whole: the cache is empty before it.
    """
    T = q.shape[1]
    if T == 1:
        return kvjax.attention(cache, q, k, v, scale=scale)
    real = mask[:, -1, :T]
    lengths, q, k, v = right_padded(real, q, k, v)
    out, cache = kvjax.prefill(cache, q, k, v, lengths=lengths, scale=scale, first_chunk=True)
    place = jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0)
    return jax.vmap(lambda row, order: row[order])(out, place), cache


STATIC = {"static": True}


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Fed:
    """The cache of a layer, and what a call of `kvjax.generate` says of the tokens that it feeds."""

    cache: kvjax.LayerCache
    lengths: Array | None  # i32[B] real tokens of each row; None: all
    active: Array | None  # bool[B] rows that take part; None: all
    first_chunk: bool = dataclasses.field(metadata=STATIC)
    steps: bool = dataclasses.field(metadata=STATIC)
    exact: bool = dataclasses.field(metadata=STATIC)

    def attend(self, q: Array, k: Array, v: Array, *, scale: float) -> tuple[Array, Fed]:
        if self.steps:
            out, cache = kvjax.decode(
                self.cache,
                q,
                k,
                v,
                lengths=self.lengths,
                active=self.active,
                exact=self.exact,
                scale=scale,
            )
        else:
            out, cache = kvjax.attention(
                self.cache,
                q,
                k,
                v,
                lengths=self.lengths,
                active=self.active,
                first_chunk=self.first_chunk,
                scale=scale,
            )
        return out, dataclasses.replace(self, cache=cache)


@register_dataclass
@dataclasses.dataclass(frozen=True)
class TunixModel:
    """A model of tunix as one of kvjax, inside of `kvjax_caches`."""

    model: Any

    def __call__(
        self,
        tokens: Array,
        cache: kvjax.Cache,
        *,
        lengths: Array | None = None,
        active: Array | None = None,
        last_logits: bool = False,
        first_chunk: bool = False,
        steps: bool = False,
        exact: bool = False,
    ) -> tuple[Array, kvjax.Cache]:
        B, T = tokens.shape
        positions = cache.length[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
        layers = {
            f"layer_{i}": Fed(layer, lengths, active, first_chunk, steps, exact)
            for i, layer in enumerate(cache.layers)
        }
        logits, fed = self.model(tokens, positions, layers, None)
        cache = dataclasses.replace(cache, layers=tuple(fed[name].cache for name in layers))
        if last_logits:
            last = jnp.full(B, T, jnp.int32) if lengths is None else jnp.asarray(lengths)
            last = jnp.maximum(last - 1, 0)
            logits = jnp.take_along_axis(logits, last[:, None, None], axis=1)[:, 0]
        return logits.astype(jnp.float32), cache


def exact_rollouts(
    sampler: Any,
    prompts: Sequence[str],
    *,
    max_generation_steps: int,
    temperature: float = 0.0,
    seed: int = 0,
    draft: SelfDraft = SelfDraft(),  # noqa: B008 (frozen)
) -> Any:
    """Samples as `sampler(prompts, ..., return_logprobs=True)` of tunix does with its own
    attention, by drafts of the selection of `kvjax_caches`: a tunix SamplerOutput.

    Draws use kvjax's keys, so at a temperature they are other draws from the same distribution.
    A stop token ends an answer and is no part of it, as in tunix.
    """
    from tunix.generate.base_sampler import SamplerOutput

    tokenizer, model = sampler.tokenizer, sampler.transformer
    encoded = [list(map(int, sampler.tokenize(prompt))) for prompt in prompts]
    size, dtype = sampler.cache_config.cache_size, sampler.dtype
    made = model.init_cache(len(encoded), size, dtype)
    cache = kvjax.Cache(layers=tuple(made[f"layer_{i}"] for i in range(len(made))))
    end = tokenizer.eos_id()
    found = kvjax.generate(
        TunixModel(model),
        cache,
        encoded,
        max_new_tokens=max_generation_steps,
        sampling=sampling(temperature),
        key=jax.random.key(seed),
        stop_tokens=end,
        draft=draft,
        log_probabilities=True,
    )
    assert found.log_probabilities is not None
    longest = max(map(len, encoded))
    tokens, logprobs = [], []
    for row, likely in zip(found.rows, found.log_probabilities, strict=True):
        new = row[:-1] if row[-1] == end else row
        tokens.append(np.array(new, np.int32))
        logprobs.append(likely[: len(new)].tolist())
    return SamplerOutput(
        text=[tokenizer.decode(new.tolist()) for new in tokens],
        logits=[],
        tokens=tokens,
        padded_prompt_tokens=np.array(
            [[tokenizer.pad_id()] * (longest - len(ids)) + ids for ids in encoded], np.int32
        ),
        logprobs=logprobs,
    )
