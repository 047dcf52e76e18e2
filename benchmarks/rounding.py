"""What bfloat16 costs a model through each cache, where no cache leaves anything out.

    python benchmarks/rounding.py MODEL --text book.txt

Full attention in float32, with exact products, continues excerpts of a book greedily. Its
tokens are then fed to the model in `--dtype` through each cache, whose budget holds all of
them, in lockstep with float32. At each step the distribution of the next token is compared with
that of float32: the Kullback-Leibler divergence in nats, how often the likeliest token is
another, and the root mean square of the differences of logits, each less its mean over the
vocabulary. Caches of two bits show what quantisation costs on the same tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import measured
import numpy as np
from jax import Array
from layers import show
from measured import write_rows
from real_speed import excerpts

from kvjax import Full, PerLayer, models
from kvjax.cache.cache import Cache, init
from kvjax.evaluate.caches import DENSE_LAYERS, make_rows, without_budget
from kvjax.generation import decode_step
from kvjax.generation.prefilling import prefill
from kvjax.models import Checkpoint
from kvjax.spec import default_dtype

METHODS = (
    "full exact fier pariskv:sink=4,local=16,dense_below=0 quest freekv:sink=0,local=32,page=16 streaming_llm "
    "logquant:bits=4 kivi:bits=4 logquant kivi"
)


def begin(
    checkpoint: Checkpoint, policies: PerLayer, tokens: np.ndarray, steps: int
) -> tuple[Array, Cache]:
    """Logits f32[B, V] after prompts i32[B, T], and their cache."""
    model, (rows, length) = checkpoint.model, tokens.shape
    empty = init(
        policies, model.spec(batch=rows, capacity=length + steps), layers=model.config.layers
    )
    return prefill(model, empty, tokens, first_chunk=True)


@jax.jit
def compare(exact: Array, logits: Array) -> Array:
    """f32[3, B]: KL divergence, whether the likeliest token is another, and the mean square of
    centred differences.
    """
    log_p, log_q = jax.nn.log_softmax(exact), jax.nn.log_softmax(logits)
    divergence = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
    other = jnp.argmax(exact, axis=-1) != jnp.argmax(logits, axis=-1)
    gap = logits - exact
    return jnp.stack([divergence, other.astype(jnp.float32), jnp.var(gap, axis=-1)])


def run(
    exact: Checkpoint,
    rounded: Checkpoint,
    policies: PerLayer,
    tokens: np.ndarray,
    steps: int,
    fed: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """`compare` at each step f32[steps, 3, B], and the tokens that were fed i32[B, steps]:
    greedy where none given.
    """
    with jax.default_matmul_precision("highest"):
        right, right_cache = begin(exact, PerLayer.of(Full()), tokens, steps)
    found, found_cache = begin(rounded, policies, tokens, steps)
    compared, chosen = [], []
    for i in range(steps):
        compared.append(compare(right, found))
        token = (
            jnp.argmax(right, axis=-1).astype(jnp.int32)
            if fed is None
            else jnp.asarray(fed[:, i])
        )
        chosen.append(token)
        with jax.default_matmul_precision("highest"):
            right, right_cache = decode_step(exact.model, right_cache, token)
        found, found_cache = decode_step(rounded.model, found_cache, token)
    return np.asarray(jnp.stack(compared), np.float64), np.asarray(jnp.stack(chosen, axis=1))


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model_dir", nargs="?", type=Path, default=None, help="default: the shipped model"
    )
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 file with a long text")
    parser.add_argument(
        "--methods",
        default=METHODS,
        help="names with spaces between; settings may follow a name",
    )
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--rows", type=int, default=64, help="excerpts, continued together")
    parser.add_argument("--length", type=int, default=128, help="tokens of each excerpt")
    parser.add_argument("--steps", type=int, default=192)
    parser.add_argument("--dtype", default=default_dtype())
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "rounding.json"
    )
    given = parser.parse_args(args)
    if given.rows < 2:
        parser.error(f"--rows {given.rows} gives no standard error; use at least 2")
    if given.length + given.steps > given.budget:
        parser.error(
            f"--budget {given.budget} leaves out some of {given.length} + {given.steps} tokens; raise it"
        )
    names = given.methods.split()
    asked = make_rows(
        names,
        budgets=[given.budget] if without_budget(names) else None,
        dense_layers=DENSE_LAYERS,
    )
    if refused := [f"{row.name}: {row.refused}" for row in asked if row.refused]:
        parser.error("; ".join(refused))
    directory = given.model_dir or models.shipped()
    exact, rounded = (models.load(directory, dtype=dtype) for dtype in ("float32", given.dtype))
    tokens = excerpts(rounded, given.text, given.length, given.rows)
    about = measured.about(directory, given.text, given.dtype, [given.length], given.steps)
    head = {**about, "rows_of_text": given.rows, "budget": given.budget}
    rows: list[dict[str, Any]] = []
    fed = None
    for row in asked:
        assert row.policies is not None
        compared, fed = run(exact, rounded, row.policies, tokens, given.steps, fed)
        by_row = compared.mean(axis=0)  # rows are independent, steps are not
        divergence, other, square = by_row.mean(axis=-1)
        errors = by_row.std(axis=-1, ddof=1) / np.sqrt(given.rows)
        rows.append(
            {
                "cache": row.name,
                "kl_nats": float(divergence),
                "kl_stderr": float(errors[0]),
                "other_token": float(other),
                "other_token_stderr": float(errors[1]),
                "logit_rms": float(np.sqrt(square)),
            }
        )
        show(rows[-1])
        write_rows(given.out, head, rows)  # what a killed run has measured is kept


if __name__ == "__main__":
    main()
