"""The tokens that H2O keeps of a prompt when a sample of its queries votes, against those that
all queries choose.

    python benchmarks/votes.py MODEL --text book.txt [--length 8192] [--budget 1024] [--every 5]

Of every `--every`-th layer, and each KV head, the half of the budget is compared that goes to
the most attended tokens; the newest tokens have the other half. `same` is the share of these
tokens that all queries choose too, `evidence` what they got of the attention of all queries, as
a share of what the right ones got; `worst` is the least of it over heads. The method `spread`
takes one query from each of equal parts of the prompt (`HeavyHitter(queries=)`), `last` the
newest.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import measured
import numpy as np
from jax import Array
from layers import out_of, save, show

import kvjax
from kvjax import models
from kvjax.evaluate.prompt import read
from kvjax.numerics.partial import Logits, softmax_weights


@partial(jax.jit, static_argnames="queries")
def spread(q: Array, k: Array, v: Array, *, queries: int | None) -> Array:
    """f32[K, T]: the evidence of each token after a prompt, by `kvjax.HeavyHitter`."""
    _, K, G, T, D = q.shape
    spec = kvjax.CacheSpec(
        batch=1, q_heads=K * G, kv_heads=K, head_dim=D, capacity=T, dtype=k.dtype
    )
    policy = kvjax.Evicting(evictor=kvjax.HeavyHitter(queries=queries), budget=T)
    step = kvjax.Step(Logits(D**-0.5))
    st = policy.prefill_observed(policy.init(spec), q, k, v, jnp.array([T]), step)
    return jnp.zeros((K, T)).at[jnp.arange(K)[:, None], st.position[0]].set(st.evidence[0])


@partial(jax.jit, static_argnames="queries")
def last(q: Array, k: Array, *, queries: int) -> Array:
    """The same if only the last queries vote."""
    _, K, G, T, D = q.shape
    seen = jnp.arange(T)[None] <= jnp.arange(T - queries, T)[:, None]
    mask = jnp.tile(seen, (G, 1))[None, None]
    weights = softmax_weights(
        q[:, :, :, -queries:].reshape(1, K, -1, D), k, mask, logits=Logits(D**-0.5)
    )
    return jnp.sum(weights[0], axis=1)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--out", type=Path, help="default: results/votes.json")
    given = parser.parse_args(args)
    given.quick = False
    checkpoint, half = models.load(given.model), given.budget // 2
    tokens = measured.read_tokens(checkpoint, given.text, given.length)[: given.length]
    _, cache = read(checkpoint, [tokens])
    found: dict[tuple[str, int], list[Any]] = {}
    for layer in cache.layers[:: given.every]:
        q, k, v = (
            a[..., : given.length, :] for a in (layer.state.q, layer.state.k, layer.state.v)
        )
        older = slice(0, given.length - half)
        every = np.asarray(spread(q, k, v, queries=None))[:, older]
        ways = {("spread", n): spread(q, k, v, queries=n) for n in (256, 512, 1024, 2048)}
        ways["last", 1024] = last(q, k, queries=1024)
        for way, evidence in ways.items():
            for right, mine in zip(every, np.asarray(evidence)[:, older], strict=True):
                best, chosen = (np.argsort(-e, kind="stable")[:half] for e in (right, mine))
                both = (
                    len(np.intersect1d(best, chosen)) / half,
                    right[chosen].sum() / right[best].sum(),
                )
                found.setdefault(way, []).append(both)
    rows = []
    for (method, queries), results in found.items():
        same, evidence = np.mean(results, axis=0).tolist()
        row = {
            "model": checkpoint.directory.name,
            "tokens": given.length,
            "budget": given.budget,
            "method": method,
        }
        worst = float(min(share for _, share in results))
        rows.append(
            {
                **row,
                "queries": queries,
                "same": same,
                "evidence": evidence,
                "worst": worst,
                "heads": len(results),
            }
        )
        show(rows[-1])
    key = ("model", "tokens", "budget", "method", "queries")
    save(out_of(given, "votes.json"), __doc__.splitlines()[0], rows, key)


if __name__ == "__main__":
    main()
