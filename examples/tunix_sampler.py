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
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import kvjax
from kvjax.generation import right_padded

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
