"""kvjax's methods and operations, by the default of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import decode_step
import jax
import jax.numpy as jnp
from jax import Array, lax
from throughput import fill

import kvjax
from kvjax import CacheSpec, ops, presets
from kvjax.numerics.partial import Logits
from kvjax.numerics.selection import Selection

from . import jax_attention
from .cases import DENSE, SELECTED, STEP, TOP_K, Case, Timed, require, row
from .jax_attention import PROMPT_TOKENS
from .jax_clock import attention, distance, normal, timed

LIBRARY = "kvjax"
METHODS = ("quest", "fier", "pariskv")
BESIDE = ("jax", "jaxlib")
MOST_OTHERS = 4  # tokens of a selection that may be others than the reference's


def rows(case: Case) -> Iterator[dict[str, Any]]:
    yield step(case, "full", DENSE)
    for method in METHODS:
        yield step(case, method, STEP)
    yield selected(case)
    yield top_k(case)
    if case.batch == 1:
        yield prompt(case)


def spec_of(case: Case) -> CacheSpec:
    return CacheSpec(
        batch=case.batch,
        capacity=case.length,
        q_heads=case.q_heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        dtype=jnp.dtype(jnp.bfloat16),
    )


def step(case: Case, method: str, work: str) -> dict[str, Any]:
    """A whole step, with the write of the new token, which the others leave out."""
    error = step_error(case, method)
    made = decode_step.measure(
        method, "default", spec_of(case), case.budget, case.calls, 2 if case.quick else 16
    )
    timing = Timed(made["us"], made["parts"], made["kernels"])
    return row(
        case,
        work,
        LIBRARY,
        f"kvjax {method}",
        "kvjax.attention",
        timing,
        layers=made["layers"],
        error=error,
        setting=f"budget {case.budget}, in all" if work == STEP else "",
        beside=BESIDE,
    )


def step_error(case: Case, method: str) -> float:
    """How far a step of one layer by the kernels is from the same step in plain jax."""
    spec = spec_of(case)
    policy = decode_step.policies(case.budget)[method].of_size(spec)
    (layer,) = fill(kvjax.init(policy, spec, layers=1), case.length - 4).layers
    q = normal(100, (case.batch, 1, case.q_heads, case.head_dim))
    k, v = (normal(i, (case.batch, 1, case.kv_heads, case.head_dim)) for i in (101, 102))
    got, _ = jax.jit(decode_step.kvjax_step)(layer, q, k, v)
    with ops.use("xla"):
        want, _ = jax.jit(decode_step.kvjax_step)(layer, q, k, v)
    # Scores of a kernel are rounded otherwise, so tokens at the end of the budget may be others. Of
    # random tokens each has an equal share of the output's square: so many others are this far.
    most = (2 * MOST_OTHERS / case.budget) ** 0.5
    return require(distance(got, want), most, f"kvjax, step of {method}")


def selected(case: Case) -> dict[str, Any]:
    """Keys and values of `budget` slots of each KV head, in random order."""
    layers = case.layers(case.selected_bytes)
    stored = (case.batch, case.kv_heads, case.length, case.head_dim)
    pairs = [(normal(2 * i, stored), normal(2 * i + 1, stored)) for i in range(layers)]
    q = normal(100, (case.batch, case.kv_heads, case.group, case.head_dim))
    slots = spread_slots(case)
    logits = Logits(case.head_dim**-0.5)

    def attend(q: Array, pair: tuple[Array, Array]) -> Array:
        chosen = Selection(slots, jnp.ones(slots.shape, bool))
        return ops.attend_slots(q, *pair, chosen, logits=logits).out

    read = [a[0, :, slots[0, 0, 0]][:, :1] for a in pairs[0]]  # of the first head: [M, 1, D]
    error = distance(jax.jit(attend)(q, pairs[0])[0, 0], attention(q[0, 0], *read))
    return row(
        case,
        SELECTED,
        LIBRARY,
        "kvjax",
        "kvjax.ops.attend_slots",
        timed(case, attend, q, pairs),
        layers=layers,
        error=require(error, 1e-2, "kvjax, attend_slots"),
        setting="tokens, each KV head its own",
        beside=BESIDE,
    )


def spread_slots(case: Case) -> Array:
    """i32[B, K, 1, M]: one slot of each of M equal parts, in random order."""
    shape = (case.batch, case.kv_heads, 1, case.budget)
    part = case.length // case.budget
    offsets = jax.random.randint(jax.random.key(7), shape, 0, part)
    slots = offsets + part * jnp.arange(case.budget)
    return jax.random.permutation(jax.random.key(8), slots, axis=-1, independent=True)


def top_k(case: Case) -> dict[str, Any]:
    rows_read = case.batch * case.kv_heads
    layers = case.layers(4.0 * rows_read * case.length)
    scores = [normal(i, (rows_read, case.length), jnp.float32) for i in range(layers)]
    valid = jnp.ones((rows_read, case.length), bool)

    def select(valid: Array, one: Array) -> Array:
        return ops.top_k(one, valid, case.budget)[0]

    got = jnp.sort(jax.jit(select)(valid, scores[0]), axis=-1)
    want = jnp.sort(lax.top_k(scores[0], case.budget)[1], axis=-1)
    wrong = float(jnp.mean(got != want))
    return row(
        case,
        TOP_K,
        LIBRARY,
        "kvjax",
        "kvjax.ops.top_k",
        timed(case, select, valid, scores),
        layers=layers,
        error=require(wrong, 0.0, "kvjax, top_k"),
        beside=BESIDE,
    )


def prompt(case: Case) -> dict[str, Any]:
    """The attention of a prompt in one chunk; that its keys are stored is not a part of it."""
    tokens = min(PROMPT_TOKENS, case.length)
    spec = dataclasses.replace(spec_of(case), capacity=tokens)
    policy = presets.full().rest

    def attend(q: Array, k: Array, v: Array) -> Array:
        empty = kvjax.init_layer(policy, spec)  # here, or its zeros were constants
        return kvjax.prefill(empty, q, k, v, first_chunk=True)[0]

    return jax_attention.prompt(
        case, LIBRARY, "kvjax full", attend, "kvjax.prefill", "in one chunk"
    )
