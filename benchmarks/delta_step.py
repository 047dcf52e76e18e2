"""The recurrence of a gated delta net by kvjax and by fla-core, in one run: a decode step, and a
prompt by chunks.

    pip install torch triton fla-core
    python benchmarks/delta_step.py [--models qwen3.5-27b,qwen3-next] [--batches 1,8]
    [--tokens 8192] [--out FILE]

Both get the same inputs in bfloat16 and the same state in float32. Each output is compared with
the rule token by token in float64 (of the prompt, its last token and state with the rule token by
token in float32) before it is timed. Times are of kernels alone, by the profiler of jax or of
torch, the median of `--calls` calls of several layers; `graph_us` is a layer of fla-core in a
replayed CUDA graph, with the gaps between kernels.

- "step": from queries, keys and values before the convolution to the output of the rule.
  kvjax: `kvjax.recurrence.advance` of each layer after a flush of all, which every 32nd step folds
  the newest tokens into the state; the other steps only read it. "plain JAX" is the same without
  its kernels. fla-core: `causal_conv1d_update`, then
  `fused_recurrent_gated_delta_rule`, which reads and writes the state in each.
- "rule alone": fla-core's `fused_recurrent_gated_delta_rule`; kvjax has no step without its
  convolution.
- "prompt": the rule over `--tokens` tokens by chunks, without the convolution. Both get queries,
  keys and values in arrays of their own, and normalise them.

The floor is to read the state once, and for the prompt to read the inputs and to write the
outputs. Without a GPU (`--quick`) sizes are small and the clock is the host's, which only shows
that the calls run; fla-core then needs TRITON_INTERPRET=1.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from beside.cases import Case, Timed, require, version
from device_time import bytes_per_us
from hybrid_step import MODELS
from jax import Array, lax
from layers import clock, numbers, options, out_of, parse, save, show
from named import names_of

import kvjax
from kvjax import ops
from kvjax.kernels_pallas.delta import delta_rule
from kvjax.models import GatedDelta
from kvjax.models.gated_delta import DeltaInputs
from kvjax.policies import RecurrentLayers
from kvjax.recurrence import advance

MOST_ERROR = 2e-2  # of inputs and outputs that are rounded to 8 bits
STEPS_OF_A_FOLD = 32
PLAIN = "kvjax, plain JAX"
Row = dict[str, Any]


@dataclass(frozen=True)
class Given:
    """What both libraries compute with, as float32 that bfloat16 holds exactly."""

    qkv: np.ndarray  # f32[B, T, C] before the convolution
    decay: np.ndarray  # f32[B, T, H] log of the factor that a token leaves of the state
    rate: np.ndarray  # f32[B, T, H]
    kernel: np.ndarray  # f32[W, C] of the convolution
    before: np.ndarray  # f32[B, W-1, C] the inputs of the convolution before these
    state: np.ndarray  # f32[B, H, Dk, Dv]

    @staticmethod
    def of(sizes: GatedDelta, batch: int, tokens: int) -> Given:
        rng = np.random.default_rng(0)

        def normal(*shape: int) -> np.ndarray:
            drawn = rng.standard_normal(shape, np.float32)
            return np.asarray(jnp.asarray(drawn, jnp.bfloat16), np.float32)

        heads = (batch, tokens, sizes.value_heads)
        state = (batch, sizes.value_heads, sizes.key_dim, sizes.value_dim)
        return Given(
            qkv=normal(batch, tokens, sizes.channels),
            decay=-0.1 * rng.random(heads, np.float32),
            rate=rng.random(heads, np.float32),
            kernel=normal(sizes.kernel, sizes.channels),
            before=normal(batch, sizes.kernel - 1, sizes.channels),
            state=rng.standard_normal(state, np.float32),
        )


def split(sizes: GatedDelta, x: Any) -> list[Any]:
    """Queries, keys [B, T, Hk, Dk] and values [B, T, H, Dv] of x [B, T, C], of any library."""
    keys = sizes.key_heads * sizes.key_dim
    key, value = (sizes.key_heads, sizes.key_dim), (sizes.value_heads, sizes.value_dim)
    parts = (x[..., :keys], key), (x[..., keys : 2 * keys], key), (x[..., 2 * keys :], value)
    return [part.reshape(*x.shape[:2], *shape) for part, shape in parts]


# ------------------------------------------------------------------------------ the reference


def convolved(given: Given) -> np.ndarray:
    """What the convolution and its activation give, in float64 [B, T, C]."""
    tokens = given.qkv.shape[1]
    joined = np.concatenate([given.before, given.qkv], axis=1).astype(np.float64)
    mixed = sum(w * joined[:, i : i + tokens] for i, w in enumerate(given.kernel))
    return np.asarray(mixed / (1 + np.exp(-mixed)))


def step_by_hand(sizes: GatedDelta, given: Given, x: np.ndarray) -> np.ndarray:
    """The output [B, H, Dv] of one token whose queries, keys and values are x [B, 1, C]."""
    q, k, v = (part[:, 0].astype(np.float64) for part in split(sizes, x))
    q, k = (part / np.sqrt(np.sum(part**2, -1, keepdims=True) + 1e-6) for part in (q, k))
    shared = sizes.value_heads // sizes.key_heads
    q, k = (np.repeat(part, shared, axis=1) for part in (q, k))
    state = given.state * np.exp(given.decay[:, 0, :, None, None].astype(np.float64))
    kept = np.einsum("bhd,bhde->bhe", k, state)
    written = given.rate[:, 0, :, None] * (v - kept)
    state = state + np.einsum("bhd,bhe->bhde", k, written)
    return np.einsum("bhd,bhde->bhe", q, state) * sizes.key_dim**-0.5


@jax.jit
def prompt_token_by_token(
    q: Array, k: Array, v: Array, decay: Array, rate: Array, state: Array
) -> tuple[Array, Array]:
    """The output of the last token, and the state after it, in float32."""
    shared = v.shape[2] // k.shape[2]
    product = partial(jnp.einsum, precision="highest")

    def one(carry: tuple[Array, Array], token: tuple[Array, ...]) -> tuple[Any, None]:
        state, _ = carry
        q, k, v, decay, rate = token
        q, k = (jnp.repeat(part, shared, axis=1) for part in (q, k))
        state = state * jnp.exp(decay)[..., None, None]
        written = rate[..., None] * (v - product("bhd,bhde->bhe", k, state))
        state = state + product("bhd,bhe->bhde", k, written)
        return (state, product("bhd,bhde->bhe", q, state)), None

    by_token = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, decay, rate))
    (state, out), _ = lax.scan(one, (state, jnp.zeros_like(v[:, 0])), by_token)
    return out, state


def distance(got: Any, want: Any) -> float:
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


# --------------------------------------------------------------------------------------- kvjax


def normalised(sizes: GatedDelta, parts: Sequence[Array]) -> list[Array]:
    """Queries, keys and values in float32 as the rule takes them, from those of a prompt."""
    q, k, v = (part.astype(jnp.float32) for part in parts)
    q, k = (x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6) for x in (q, k))
    return [q * sizes.key_dim**-0.5, k, v]


def our_cache(sizes: GatedDelta, given: Given, layers: int) -> kvjax.Cache:
    """A cache of so many gated delta nets, each with the given state and inputs before, and one
    layer of attention, which every cache has."""
    spec = kvjax.CacheSpec(
        batch=given.state.shape[0], q_heads=1, kv_heads=1, head_dim=8, capacity=64, dtype="bfloat16",
        recurrent=RecurrentLayers(sizes, tuple(range(layers))),
    )  # fmt: skip
    cache = kvjax.init(kvjax.Full(), spec, layers=layers + 1)

    def filled(layer: kvjax.LayerCache) -> kvjax.LayerCache:
        memory = layer.state.memory
        inputs = memory.inputs.at[:, : sizes.kernel - 1].set(
            given.before.astype(memory.inputs.dtype)
        )
        memory = dataclasses.replace(memory, state=jnp.array(given.state), inputs=inputs)
        return dataclasses.replace(layer, state=dataclasses.replace(layer.state, memory=memory))

    return dataclasses.replace(
        cache, layers=(*map(filled, cache.layers[:-1]), cache.layers[-1])
    )


def our_rows(
    sizes: GatedDelta, given: Given, prompt: Given | None, case: Case
) -> Iterator[Row]:
    """With kvjax's kernels where it has some, and in plain JAX."""
    if case.quick:
        return by_form(PLAIN, sizes, given, prompt, case)
    return chain(
        by_form("kvjax", sizes, given, prompt, case), by_form(PLAIN, sizes, given, prompt, case)
    )


def by_form(
    library: str, sizes: GatedDelta, given: Given, prompt: Given | None, case: Case
) -> Iterator[Row]:
    implementation: ops.Implementation | None = "xla" if library == PLAIN else None
    kernel = jnp.asarray(given.kernel, jnp.bfloat16)
    tokens = DeltaInputs(
        jnp.asarray(given.qkv, jnp.bfloat16), jnp.asarray(given.decay), jnp.asarray(given.rate)
    )

    def step(cache: kvjax.Cache, tokens: DeltaInputs) -> tuple[list[Array], kvjax.Cache]:
        cache = kvjax.flush(cache)
        outs, after = [], []
        for layer in cache.layers[:-1]:
            out, layer = advance(layer, tokens, kernel)
            tokens, out = lax.optimization_barrier((tokens, out))  # layers do not run at once
            outs.append(out)
            after.append(layer)
        return outs, dataclasses.replace(cache, layers=(*after, cache.layers[-1]))

    layers = case.layers(given.state.nbytes)
    with ops.use(implementation):
        run = jax.jit(step, donate_argnums=0)
        outs, cache = run(our_cache(sizes, given, layers), tokens)
        wanted = step_by_hand(sizes, given, convolved(given))
        error = require(distance(outs[-1][:, 0], wanted), MOST_ERROR, f"{library}, step")
        calls = case.calls if case.quick else 2 * STEPS_OF_A_FOLD  # each layer folds twice
        took, _ = clock(run, cache, tokens, calls=calls)
    yield row("step", library, took.us / layers, error, parts=per_layer(took.parts, layers))

    if prompt is None:
        return

    # No activation before the rule: a prompt here is what the convolution gave.
    @jax.jit
    def read(
        state: Array, parts: list[Array], decay: Array, rate: Array
    ) -> tuple[Array, Array]:
        dtype = parts[0].dtype
        return ops.delta_rule(*normalised(sizes, parts), decay, rate, state, dtype=dtype)

    args = [
        [jnp.array(part) for part in split(sizes, jnp.asarray(prompt.qkv, jnp.bfloat16))],
        *map(jnp.asarray, (prompt.decay, prompt.rate)),
    ]
    with ops.use(implementation):
        out, state = read(jnp.asarray(prompt.state), *args)
        error = prompt_error(sizes, prompt, out[:, -1], state)
        took, _ = clock(
            lambda state, *args: (read(state, *args)[0], state),
            jnp.asarray(prompt.state),
            *args,
            calls=min(case.calls, 5),
        )
    found = row("prompt", library, took.us, error, parts=per_layer(took.parts, 1))
    yield found if library == PLAIN else found | {"columns": by_columns(sizes, prompt, args)}


def by_columns(sizes: GatedDelta, prompt: Given, args: list[Any]) -> dict[int, float]:
    """Microseconds of the kernel of the states, by the columns of the state in its blocks."""

    def read(
        columns: int, state: Array, parts: list[Array], decay: Array, rate: Array
    ) -> tuple[Array, Array]:
        tokens = *normalised(sizes, parts), decay, rate
        config = delta_rule.Config(columns)
        out, _ = delta_rule.delta_rule(*tokens, state, parts[0].dtype, config)
        return out, state

    found = {}
    for columns in delta_rule.COLUMNS:
        run = jax.jit(partial(read, columns))
        took, _ = clock(run, jnp.asarray(prompt.state), *args, calls=3)
        found[columns] = sum(us for name, us in took.parts.items() if "rule_states" in name)
    return found


# ------------------------------------------------------------------------------------ fla-core


def fla_rows(
    sizes: GatedDelta, given: Given, prompt: Given | None, case: Case
) -> Iterator[Row]:
    import torch
    from beside.torch_clock import device, timed
    from fla.modules.causal_conv1d import causal_conv1d_update
    from fla.ops.gated_delta_rule import (
        chunk_gated_delta_rule,
        fused_recurrent_gated_delta_rule,
    )

    def tensor(x: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(device(), dtype)

    dtype = torch.float32 if case.quick else torch.bfloat16  # the interpreter knows no bfloat16
    layers = case.layers(given.state.nbytes)
    kernel = tensor(given.kernel.T, dtype)  # [C, W]
    new = tensor(given.qkv, dtype)
    decay, rate = tensor(given.decay), tensor(given.rate)
    # It keeps W inputs of a channel, of which a step drops the first.
    oldest = np.zeros_like(given.before[:, :1])
    held = np.concatenate([oldest, given.before], axis=1)
    windows = [tensor(np.moveaxis(held, 1, 2), dtype) for _ in range(layers)]
    states = [tensor(given.state) for _ in range(layers)]

    def rule(layer: int, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = split(sizes, qkv)
        out, states[layer] = fused_recurrent_gated_delta_rule(
            q, k, v, g=decay, beta=rate, initial_state=states[layer], output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return out

    def step(layer: int) -> torch.Tensor:
        mixed, windows[layer] = causal_conv1d_update(
            new, windows[layer], weight=kernel, activation="silu"
        )
        return rule(layer, mixed)

    if not case.quick:  # the interpreter cannot tune the kernel of the convolution
        wanted = step_by_hand(sizes, given, convolved(given))
        error = require(distance(step(0)[:, 0].float().cpu(), wanted), MOST_ERROR, "fla, step")
        yield fla_row("step", timed(case, step, layers), error)

    states[0] = tensor(given.state)
    alone = require(
        distance(rule(0, new)[:, 0].float().cpu(), step_by_hand(sizes, given, given.qkv)),
        MOST_ERROR,
        "fla, rule",
    )
    apart = [part.contiguous() for part in split(sizes, new)]
    flat = torch.cat([part.flatten(2) for part in apart], dim=-1)
    yield fla_row("rule alone", timed(case, lambda layer: rule(layer, flat), layers), alone)

    if prompt is None or case.quick:
        return  # the interpreter takes minutes for its kernels of chunks
    q, k, v = (part.contiguous() for part in split(sizes, tensor(prompt.qkv, dtype)))
    decays, rates, state = tensor(prompt.decay), tensor(prompt.rate), tensor(prompt.state)

    def read(_: int) -> Any:
        return chunk_gated_delta_rule(
            q, k, v, g=decays, beta=rates, initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    with torch.no_grad():
        out, end = read(0)
        error = prompt_error(sizes, prompt, out[:, -1].float().cpu(), end.float().cpu())
        few = dataclasses.replace(case, calls=min(case.calls, 5))
        yield fla_row("prompt", timed(few, read, 1), error)


def fla_row(part: str, took: Timed, error: float) -> Row:
    return row(part, "fla-core", took.us, error, parts=dict(took.parts), graph_us=took.graph_us)


# ---------------------------------------------------------------------------------------- rows


def prompt_error(sizes: GatedDelta, prompt: Given, out: Any, state: Any) -> float:
    """How far the last token's output and the state are from those of the rule by tokens."""
    parts = split(sizes, jnp.asarray(prompt.qkv))
    arrays = (*normalised(sizes, parts), prompt.decay, prompt.rate)
    wanted = prompt_token_by_token(*arrays, prompt.state)
    error = max(distance(*two) for two in zip((out, state), wanted, strict=True))
    return require(error, MOST_ERROR, "the prompt")


def per_layer(parts: dict[str, float], layers: int) -> dict[str, float]:
    return {name: us / layers for name, us in parts.items()}


def row(
    part: str,
    library: str,
    us: float,
    error: float,
    *,
    parts: dict[str, float],
    graph_us: float | None = None,
) -> Row:
    shown = {name: round(us, 2) for name, us in list(parts.items())[:24]}
    kernels = {"parts": shown, "version": version(library.partition(",")[0])}
    return {
        "part": part,
        "library": library,
        "us": us,
        "graph_us": graph_us,
        "error": error,
    } | kernels


def floor_us(part: str, given: Given) -> float:
    read = given.state.nbytes
    if part == "prompt":  # in bfloat16; the outputs are as many as the values
        values = given.state.shape[1] * given.state.shape[3] * given.qkv[..., 0].size
        read += 2 * (given.qkv.size + values)
    return read / bytes_per_us()


def main(args: Sequence[str] | None = None) -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves torch the memory
    parser = options(__doc__, "delta_step.json", calls=20)
    parser.add_argument(
        "--models", type=names_of(MODELS, "model"), default=["qwen3.5-27b", "qwen3-next"]
    )
    parser.add_argument("--batches", type=numbers, default=[1, 8])
    parser.add_argument("--tokens", type=int, default=8192, help="of the prompt, of one row")
    given = parse(parser, args)
    if given.quick:
        given.models, given.batches, given.tokens = ["tiny"], [1], 100
    libraries = {"kvjax": our_rows}
    if find_spec("fla") and find_spec("torch"):
        libraries["fla-core"] = fla_rows
    what = (
        "the recurrence of a gated delta net; us: device time of the kernels of a layer, or the "
        "host's clock without a GPU; parts: by kernel"
    )
    key = ("model", "part", "library", "batch", "tokens")
    # kvjax first: once torch's profiler has run, CUPTI refuses that of jax in the same process.
    for measure in libraries.values():
        for model in given.models:
            sizes = MODELS[model]["mixer"]
            prompt = Given.of(sizes, 1, given.tokens)
            for batch in given.batches:
                case = Case(1, batch, 0, calls=given.calls, quick=given.quick)
                one = Given.of(sizes, batch, 1)
                first = batch == given.batches[0]
                for found in measure(sizes, one, prompt if first else None, case):
                    is_prompt = found["part"] == "prompt"
                    about = {
                        "model": model,
                        "batch": 1 if is_prompt else batch,
                        "tokens": given.tokens if is_prompt else 1,
                        "floor_us": floor_us(found["part"], prompt if is_prompt else one),
                    }
                    show(about | found)
                    save(out_of(given, "delta_step.json"), what, [about | found], key)


if __name__ == "__main__":
    main()
