"""The step that trains: the model with its layers stacked, its loss, and the optimizer.

All parameters are f32 and have the layers stacked, so that Muon orthogonalises one batch of
matrices per kind; a step casts them to the compute dtype and unstacks them into the Decoder of
kvjax.models.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import data
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from kvjax.models import Decoder, DecoderConfig, rope
from kvjax.models.decoder import decoder_of_shapes

EMBEDDING = "embedding.value"

# ------------------------------------------------------------------------------------------------------------ the model


def decoder_config(settings: Mapping[str, Any]) -> DecoderConfig:
    return DecoderConfig(**settings["model"], rope=rope.Default(theta=settings["rope_theta"]))


@cache
def shapes(config: DecoderConfig) -> Decoder:
    """A Decoder without arrays."""
    return decoder_of_shapes(config)


def initial(config: DecoderConfig, seed: int = 0) -> dict[str, Array]:
    """Random parameters; matrices that write to the residual stream are 0, so each layer begins
    as the identity.
    """
    params = stack(Decoder(config, rngs=nnx.Rngs(seed)))
    return {
        n: jnp.zeros_like(a) if re.search(r"\.(out|down)\.kernel", n) else a
        for n, a in params.items()
    }


def stack(model: Decoder) -> dict[str, Array]:
    """The parameters by name, those of all layers in one array [layers, ...]."""
    found: dict[str, list[Array]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        found.setdefault(_place(path)[0], []).append(leaf)
    return {
        name: jnp.stack(all_) if name.startswith("layers.") else all_[0]
        for name, all_ in found.items()
    }


def unstack(params: Mapping[str, Array], like: Decoder) -> Decoder:
    """The Decoder of stacked parameters; `like` has its structure."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    places = (_place(path) for path, _ in leaves)
    return jax.tree.unflatten(
        structure, [params[n] if i is None else params[n][i] for n, i in places]
    )


def _place(path: Any) -> tuple[str, int | None]:
    """The name without the number of the layer, and that number."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    layer = re.match(r"layers\.(\d+)\.", name)
    return (name, None) if layer is None else ("layers." + name[layer.end() :], int(layer[1]))


def trunk(model: Decoder, table: Array, tokens: Array) -> Array:
    """The input of the head, [B, T, hidden], for tokens i32[B, T].

    Reads embeddings from `table` f32, so that their gradients are added in f32: a step has few
    distinct tokens, each of them very often.
    """
    x = table.at[tokens].get(mode="clip").astype(model.embedding.dtype)
    cos, sin = rope.angles(
        model.config.rope,
        jnp.arange(tokens.shape[1], dtype=jnp.int32)[None],
        model.config.rotated,
    )
    for layer in model.layers:
        x, _, _ = layer(x, cos, sin, None)
    return model.norm(x)


# ------------------------------------------------------------------------------------------------------------- the loss


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def cross_entropy(
    x: Array, table: Array, targets: Array, weights: Array, chunk: int
) -> tuple[Array, Array, Array]:
    """(weighted sum of the losses f32[], loss of each token f32[n], whether the target is the
    likeliest bool[n]).

    x [n, hidden], table [V, hidden], targets i32[n], weights f32[n]. Only the sum has a
    gradient. Works through `chunk` tokens at a time and makes their gradients as it goes, so it
    holds the logits of a chunk, once: 262144 tokens have 4 GB of them, and reading them again
    for a backward pass would cost as much as making them.
    """
    return _by_chunks(x, table, targets, weights, chunk, gradients=False)[0]


def _by_chunks(
    x: Array, table: Array, targets: Array, weights: Array, chunk: int, *, gradients: bool
) -> Any:
    def one(d_table: Array, part: tuple[Array, Array, Array]) -> tuple[Array, Any]:
        x, targets, weights = part
        logits = jnp.einsum("nd,vd->nv", x, table, preferred_element_type=jnp.float32)
        hit = targets[:, None] == jnp.arange(table.shape[0], dtype=jnp.int32)[None]
        total = jax.nn.logsumexp(logits, axis=-1)
        wanted = jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)
        seen = total - wanted, wanted >= jnp.max(logits, axis=-1)
        if not gradients:
            return d_table, (*seen, None)
        d = (jnp.exp(logits - total[:, None]) - hit.astype(jnp.float32)) * weights[:, None]
        d = d.astype(x.dtype)
        d_table = d_table + jnp.einsum("nv,nd->vd", d, x, preferred_element_type=jnp.float32)
        return d_table, (*seen, jnp.einsum("nv,vd->nd", d, table))

    n = x.shape[0]
    if n % chunk:
        raise ValueError(f"loss_chunk={chunk} does not divide the {n} tokens of a step")
    parts = jax.tree.map(
        lambda a: a.reshape(n // chunk, chunk, *a.shape[1:]), (x, targets, weights)
    )
    d_table, (losses, right, d_x) = jax.lax.scan(
        one, jnp.zeros(table.shape, jnp.float32), parts
    )
    losses, right = losses.reshape(n), right.reshape(n)
    d_x = None if d_x is None else d_x.reshape(x.shape)
    return (jnp.sum(losses * weights), losses, right), (d_x, d_table.astype(table.dtype))


def _loss_forward(x: Array, table: Array, targets: Array, weights: Array, chunk: int) -> Any:
    return _by_chunks(x, table, targets, weights, chunk, gradients=True)


def _loss_backward(
    chunk: int, gradients: tuple[Array, Array], given: tuple[Array, Array, Array]
) -> Any:
    return *(d * given[0].astype(d.dtype) for d in gradients), None, None


cross_entropy.defvjp(_loss_forward, _loss_backward)


def losses(
    params: Mapping[str, Array],
    tokens: Array,
    kinds: Array,
    *,
    like: Decoder,
    settings: Mapping[str, Any],
) -> tuple[Array, tuple[Array, Array, Array]]:
    """The weighted mean loss of a batch; and after each token, the loss and correctness [B, T]
    and kind of its target.

    tokens u16[B, T] and kinds u8[B, T] are as `data.make_batch` makes them.
    """
    compute = jnp.dtype(settings["compute"])
    model = unstack({name: a.astype(compute) for name, a in params.items()}, like)
    ids = tokens.astype(jnp.int32)
    x = trunk(model, params[EMBEDDING], ids)
    # a token's logits are those of the next
    kinds = jnp.roll(kinds, -1, axis=1).at[:, -1].set(data.NONE)
    answer, repeat = settings["answer_weight"], settings["repeat_weight"]
    table = jnp.array([0.0, 1.0, answer, answer, repeat], jnp.float32)  # by kind
    weights = table[kinds.astype(jnp.int32)]
    weights = weights / jnp.maximum(jnp.sum(weights), 1.0)
    loss, each, right = cross_entropy(
        x.reshape(-1, x.shape[-1]),
        model.embedding[...],
        jnp.roll(ids, -1, axis=1).reshape(-1),
        weights.reshape(-1),
        min(settings["loss_chunk"], ids.size),
    )
    return loss, (each.reshape(ids.shape), right.reshape(ids.shape), kinds)


# ------------------------------------------------------------------------------------------------------------- the step


def optimizer(settings: Mapping[str, Any]) -> optax.GradientTransformation:
    """Muon for the matrices of the layers, Adam for embeddings and norms; at rate 1, as the
    step scales the updates.

    `consistent_rms=0.2` gives Muon's updates the size of Adam's, so that one rate serves both
    (Liu et al. 2025).
    """
    matrix = optax.contrib.MuonDimensionNumbers(
        reduction_axis=1, output_axis=2
    )  # of [layers, in, out]

    def matrices(params: Mapping[str, Any]) -> dict[str, Any]:
        return {name: matrix if ".kernel" in name else None for name in params}

    return optax.chain(
        optax.clip_by_global_norm(settings["clip"]),
        optax.contrib.muon(
            1.0,
            weight_decay=settings["weight_decay"],
            consistent_rms=0.2,
            adam_b2=0.95,
            adam_learning_rate=settings["adam_rate"] / settings["rate"],
            muon_weight_dimension_numbers=matrices,
        ),
    )


def make_step(settings: Mapping[str, Any], like: Decoder) -> Any:
    """step(state, tokens, kinds, rate) -> (state, metrics), jitted; the state is donated."""
    transform = optimizer(settings)

    def mean(a: Array, where: Array) -> Array:
        count = jnp.maximum(jnp.sum(where), 1).astype(jnp.float32)
        return jnp.sum(jnp.where(where, a.astype(jnp.float32), 0.0)) / count

    @partial(jax.jit, donate_argnums=0)
    def step(state: dict[str, Any], tokens: Array, kinds: Array, rate: Array) -> Any:
        of = partial(losses, like=like, settings=settings)
        (loss, (each, right, kind)), grads = jax.value_and_grad(of, has_aux=True)(
            state["params"], tokens, kinds
        )
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
            updates, held = transform.update(grads, state["optimizer"], state["params"])
        params = jax.tree.map(lambda p, u: p + rate * u, state["params"], updates)
        metrics = {
            "loss": loss,
            "text": mean(each, kind == data.TEXT),
            "repeat": mean(each, kind == data.REPEAT),
            "answer": mean(each, kind == data.ANSWER),
            "right": mean(right, kind == data.ANSWER),
            "chains": mean(right, kind == data.CHAIN),
            "gradient": jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in grads.values())),
        }
        return {"params": params, "optimizer": held}, metrics

    return step


def initial_state(settings: Mapping[str, Any]) -> dict[str, Any]:
    params = initial(decoder_config(settings))
    with jax.numpy_dtype_promotion("standard"):
        return {"params": params, "optimizer": optimizer(settings).init(params)}


def flops_per_token(config: DecoderConfig, length: int) -> float:
    """FLOPs per token of a step, in the usual way: 6 per parameter of a matrix (the head's
    too), and 6 N D T per layer of attention.

    The forward pass has 2 per parameter, the backward pass twice that; attention has two
    products of T x D per head and token, half of them masked. Norms, RoPE, softmax, the
    optimizer and recomputation in the backward pass do not count.
    """
    heads, kv = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
    layer = config.hidden_size * (2 * heads + 2 * kv + 3 * config.intermediate_size)
    matrices = config.layers * layer + config.vocab_size * config.hidden_size
    return 6.0 * matrices + 6.0 * config.layers * heads * length


class Programs:
    """The step compiled for each length, one after another in a thread: the first runs while
    the next compile.
    """

    def __init__(self, step: Any, state: Any, lengths: list[int], tokens: int) -> None:
        def build(length: int) -> Any:
            start, shape = time.monotonic(), (max(1, tokens // length), length)
            batch = (
                jax.ShapeDtypeStruct(shape, jnp.uint16),
                jax.ShapeDtypeStruct(shape, jnp.uint8),
            )
            lowered = step.lower(like, *batch, jax.ShapeDtypeStruct((), jnp.float32))
            traced = time.monotonic() - start
            program = lowered.compile()
            memory = program.memory_analysis()
            print(
                f"length {length}: traced in {traced:.1f} s, compiled in {time.monotonic() - start - traced:.1f} s, "
                f"{memory.temp_size_in_bytes / 1e9:.1f} GB temporary",
                flush=True,
            )
            return program

        like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state)
        self._pool = ThreadPoolExecutor(1)
        self._programs: dict[int, Future[Any]] = {
            length: self._pool.submit(build, length) for length in lengths
        }

    def __getitem__(self, length: int) -> Any:
        return self._programs[length].result()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
