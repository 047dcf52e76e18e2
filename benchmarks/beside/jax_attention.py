"""jax's own attention by cuDNN and `lax.top_k`, and FlashAttention 3 by flash-attn3-jax."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .cases import DENSE, PROMPT, TOP_K, Case, require, row
from .jax_clock import attention, distance, normal, timed

LIBRARY = "jax"
FLASH = "flash-attn3-jax"
SPLITS = (1, 8, 16, 32)  # parts of a row that FlashAttention 3 reads side by side


def rows(case: Case) -> Iterator[dict[str, Any]]:
    yield dense(case)
    yield top_k(case)
    if case.batch == 1:
        yield prompt(case, LIBRARY, "cuDNN", cudnn, "jax.nn.dot_product_attention(cudnn)")


def flash_rows(case: Case) -> Iterator[dict[str, Any]]:
    if jax.default_backend() != "gpu":
        raise SystemExit("flash-attn3-jax has a kernel for Hopper GPUs alone")
    from flash_attn3_jax import flash_mha, flash_mha_with_kvcache

    tried = []
    for splits in SPLITS:

        def attend(q: Array, k: Array, v: Array, splits: int = splits) -> Array:
            out: Array = flash_mha_with_kvcache(q, k, v, num_splits=splits)
            return out

        name = "flash_mha_with_kvcache"
        tried.append(
            _dense(case, FLASH, "FlashAttention 3", attend, name, f"num_splits={splits}")
        )
    yield min(tried, key=lambda one: float(one["us"]))
    if case.batch == 1:

        def causal(q: Array, k: Array, v: Array) -> Array:
            out: Array = flash_mha(q, k, v, is_causal=True)
            return out

        yield prompt(case, FLASH, "FlashAttention 3", causal, "flash_mha(is_causal=True)")


def dense(case: Case) -> dict[str, Any]:
    def attend(q: Array, k: Array, v: Array) -> Array:
        return jax.nn.dot_product_attention(q, k, v, implementation=_dense_implementation())

    call = "jax.nn.dot_product_attention(implementation='cudnn')"
    return _dense(case, LIBRARY, "jax, cuDNN", attend, call)


def _dense_implementation() -> Any:
    return "cudnn" if jax.default_backend() == "gpu" else "xla"


def _dense(
    case: Case,
    library: str,
    name: str,
    attend: Callable[[Array, Array, Array], Array],
    call: str,
    setting: str = "",
) -> dict[str, Any]:
    layers = case.layers(case.dense_bytes)
    shape = (case.batch, case.length, case.kv_heads, case.head_dim)
    pairs = [(normal(2 * i, shape), normal(2 * i + 1, shape)) for i in range(layers)]
    q = normal(100, (case.batch, 1, case.q_heads, case.head_dim))
    k, v = pairs[0]
    error = distance(jax.jit(attend)(q, k, v)[0, 0], attention(q[0, 0], k[0], v[0]))
    timing = timed(case, lambda q, pair: attend(q, *pair), q, pairs)
    return row(
        case,
        DENSE,
        library,
        name,
        call,
        timing,
        layers=layers,
        error=require(error, 1e-2, name),
        setting=setting,
        beside=("jax", "jaxlib"),
    )


def top_k(case: Case) -> dict[str, Any]:
    rows_read = case.batch * case.kv_heads
    layers = case.layers(4.0 * rows_read * case.length)
    scores = [normal(i, (rows_read, case.length), jnp.float32) for i in range(layers)]
    timing = timed(case, lambda _, one: lax.top_k(one, case.budget)[1], jnp.int32(0), scores)
    return row(
        case,
        TOP_K,
        LIBRARY,
        "lax.top_k",
        "jax.lax.top_k",
        timing,
        layers=layers,
        error=0.0,  # it is the reference of the others
        beside=("jaxlib",),
    )


def cudnn(q: Array, k: Array, v: Array) -> Array:
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=True, implementation=_dense_implementation()
    )


PROMPT_TOKENS = 32768


def prompt(
    case: Case,
    library: str,
    name: str,
    attend: Callable[[Array, Array, Array], Array],
    call: str,
    setting: str = "",
) -> dict[str, Any]:
    """Causal attention of all tokens of a prompt of one layer. The last token's output is
    compared.
    """
    tokens = min(PROMPT_TOKENS, case.length)
    q = normal(0, (1, tokens, case.q_heads, case.head_dim))
    k, v = (normal(i, (1, tokens, case.kv_heads, case.head_dim)) for i in (1, 2))
    out = jax.jit(attend)(q, k, v)
    error = distance(out[0, -1], attention(q[0, -1], k[0], v[0]))
    timing = timed(case, lambda q, pair: attend(q, *pair), q, [(k, v)], calls=5)
    made = row(
        case,
        PROMPT,
        library,
        name,
        call,
        timing,
        layers=1,
        error=require(error, 1e-2, f"{name}, prompt"),
        setting=setting,
        beside=("jax", "jaxlib"),
    )
    return made | {"length": tokens}
