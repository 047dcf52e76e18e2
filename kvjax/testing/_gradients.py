"""The law of gradients: they flow through prompts and steps, and are those of attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax.attention import attention, attention_info
from kvjax.cache.cache import LayerCache
from kvjax.policies import Policy
from kvjax.spec import CacheSpec
from kvjax.testing._anatomy import selects
from kvjax.testing._drive import CHUNK, Tokens, attending_to_all, new_cache, random_tokens
from kvjax.testing._expect import as_stored, require_read_as_stored, tolerance

STEPS = 3

# Queries, keys and values of a first chunk, a later chunk, and steps [STEPS, B].
Inputs = tuple[tuple[Array, ...], ...]


def gradients_are_those_of_attention(policy: Policy, spec: CacheSpec) -> None:
    """Under `jit(grad)`, a first chunk, a later chunk and a scan of steps have the gradients of
    dense attention.

    With a small budget, a step has those of attention over the tokens that it read, if
    `Info.positions` lists them: selecting has no derivative. If stored keys and values have
    none either, as codes or in host memory, `NotImplementedError` says "no derivative", and the
    gradients by the queries are correct.
    """
    tokens = random_tokens(spec, 20)
    lengths = np.array([CHUNK - (11 * b) % CHUNK for b in range(spec.batch)])
    inputs = _inputs(tokens, lengths)
    weights = _weights(spec)
    dense = attending_to_all(policy, spec)
    by = "qkv"
    try:
        grads, _ = _gradients(dense, spec, inputs, lengths, weights, by)
    except NotImplementedError as refusal:
        if "no derivative" not in str(refusal):
            raise
        by = "q"
        grads, _ = _gradients(dense, spec, inputs, lengths, weights, by)
    _compare(
        grads, _wanted(policy, spec, inputs, lengths, weights), spec, "with a budget of all"
    )
    if selects(policy):
        grads, positions = _gradients(policy, spec, inputs, lengths, weights, by)
        if positions is None:
            assert all(np.isfinite(a).all() for a in jax.tree.leaves(grads)), (
                "with a small budget: not finite"
            )
            return
        _compare(
            grads,
            _wanted(policy, spec, inputs, lengths, weights, positions),
            spec,
            "with a small budget",
        )


def _inputs(tokens: Tokens, lengths: np.ndarray) -> Inputs:
    first = np.full(len(lengths), CHUNK)
    chunks = [tokens.at(n[:, None] + np.arange(CHUNK)) for n in (0 * first, first)]
    steps = [tokens.at((first + lengths + i)[:, None]) for i in range(STEPS)]
    return tuple(
        tuple(jnp.asarray(a) for a in part)
        for part in (*chunks, (np.stack(a) for a in zip(*steps, strict=True)))
    )


def _weights(spec: CacheSpec) -> list[np.ndarray]:
    """Cotangents, f64, of the outputs of the two chunks and of the steps."""
    shapes = [(spec.batch, CHUNK), (spec.batch, CHUNK), (STEPS, spec.batch, 1)]
    rng = np.random.default_rng(21)
    return [rng.standard_normal((*shape, spec.q_heads, spec.value_size)) for shape in shapes]


def _gradients(
    policy: Policy,
    spec: CacheSpec,
    inputs: Inputs,
    lengths: np.ndarray,
    weights: list[np.ndarray],
    by: str,
) -> tuple[Inputs, np.ndarray | None]:
    """Gradients of the weighted outputs by the inputs named in `by`, and positions [STEPS, B,
    K, H, M] that steps read.

    The positions are None if the policy does not report them.
    """
    cotangents = [w.astype(np.float32) for w in weights]
    real = (np.arange(CHUNK)[None] < lengths[:, None])[..., None, None]

    def loss(varied: Inputs, cache: LayerCache) -> tuple[Array, Any]:
        first, later, steps = (
            (*mine, *fixed[len(by) :]) for mine, fixed in zip(varied, inputs, strict=True)
        )
        out_first, filled = attention(cache, *first)
        out_later, filled = attention(filled, *later, lengths=lengths)

        def step(cache: Any, qkv: Any) -> Any:
            out, cache, info = attention_info(cache, *qkv)
            return cache, (out, getattr(info, "positions", None))

        _, (out_steps, positions) = lax.scan(step, filled, steps)
        outs = (out_first, jnp.where(real, out_later, 0), out_steps)
        sums = [
            jnp.sum(w * o.astype(jnp.float32)) for w, o in zip(cotangents, outs, strict=True)
        ]
        return jnp.sum(jnp.stack(sums)), positions

    grads, positions = jax.jit(jax.grad(loss, has_aux=True))(
        tuple(part[: len(by)] for part in inputs), new_cache(policy, spec)
    )
    return grads, None if positions is None else np.asarray(positions)


def _wanted(
    policy: Policy,
    spec: CacheSpec,
    inputs: Inputs,
    lengths: np.ndarray,
    weights: list[np.ndarray],
    positions: np.ndarray | None = None,
) -> list[list[np.ndarray]]:
    """The gradients in NumPy float64, one query head and one token at a time."""
    first, later, steps = ([np.asarray(a, np.float64) for a in part] for part in inputs)
    grads = [[np.zeros_like(a) for a in part] for part in (first, later, steps)]
    for b, n in enumerate(lengths):
        # Where token t of this row is: (part, index).
        places: list[tuple[int, tuple[int, ...]]] = [
            *((0, (b, t)) for t in range(CHUNK)),
            *((1, (b, t)) for t in range(n)),
            *((2, (i, b, 0)) for i in range(STEPS)),
        ]
        line = [[(first, later, steps)[part][x][at] for part, at in places] for x in range(3)]
        q, k, v = (np.stack(a) for a in line)
        cotangents = np.stack([weights[part][at] for part, at in places])
        dq, dk, dv = (np.zeros_like(a) for a in (q, k, v))
        # A chunk reads itself exactly, and earlier tokens as they are stored; so does a step.
        before = [0, CHUNK, *range(CHUNK + n, CHUNK + n + STEPS)]
        stored = [
            as_stored(policy, spec, k.astype(spec.dtype), v.astype(spec.dtype), length)
            for length in before
        ]
        read = [stored[part + (at[0] if part == 2 else 0)] for part, at in places]
        require_read_as_stored(
            new_cache(policy, spec), stored[-1], (k.astype(spec.dtype), v.astype(spec.dtype))
        )
        for t, head in np.ndindex(len(places), spec.q_heads):
            kv = head // spec.group
            seen = np.arange(t + 1)
            if positions is not None and places[t][0] == 2:
                mine = positions[places[t][1][0], b, kv]
                mine = mine[head % spec.group if len(mine) > 1 else 0]
                seen = np.sort(mine[mine >= 0])
            keys, values, g = (*(a[seen, kv] for a in read[t]), cotangents[t, head])
            logits = keys @ q[t, head] / np.sqrt(spec.head_dim)
            p = np.exp(logits - logits.max())
            p /= p.sum()
            ds = p * (values @ g - p @ (values @ g)) / np.sqrt(spec.head_dim)
            dq[t, head] = ds @ keys
            dk[seen, kv] += np.outer(ds, q[t, head])
            dv[seen, kv] += np.outer(p, g)
        for t, (part, at) in enumerate(places):
            for x, d in enumerate((dq, dk, dv)):
                grads[part][x][at] = d[t]
    return grads


def _compare(got: Inputs, want: list[list[np.ndarray]], spec: CacheSpec, when: str) -> None:
    for part, mine, wanted in zip(
        ("first chunk", "later chunk", "steps"), got, want, strict=True
    ):
        for name, grad, exact in zip("qkv", mine, wanted, strict=False):
            ours = np.asarray(grad, np.float64)
            assert np.isfinite(ours).all(), (
                f"{when}: the gradient by {name} of the {part} is not finite"
            )
            error = np.abs(ours - exact).max()
            size = np.abs(exact).max()
            allowed = 20 * tolerance(spec) * max(size, 1.0)
            assert error <= allowed, (
                f"{when}: the gradient by {name} of the {part} differs by {error:.2e} of {size:.2e}"
            )
