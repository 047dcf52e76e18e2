"""Trains the model that the package ships, on one GPU in under ten minutes: see README.md beside this file.

    python training/train.py --books DIR --code DIR --out DIR [--seconds 540] [--resume]
    python training/train.py --evaluate only --out DIR
    python training/train.py --smoke --out DIR                              # a minute on a CPU

The schedule is a matter of time: warm-up, constant rate and linear decay, and the lengths of rows, are shares of what
`--seconds` leaves from the first step on, so whatever the machine, the run ends when it shall. With `--steps` they
are shares of a number of steps, and a run is exactly repeatable, also when it is cut off and resumed.

All parameters are f32 and have the layers stacked, so that Muon orthogonalises one batch of matrices a kind; a step
casts them to the compute dtype and takes them apart into the Decoder of kvjax.models.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax import Array

sys.path.insert(0, str(Path(__file__).parent))

import data
from kvjax.models import Decoder, DecoderConfig, rope

from kvjax import models
from kvjax.evaluate.record import digest_json, provenance
from kvjax.evaluate.synthetic import FORMS

SHARD_BYTES = 15 * 10**6  # of a file of the export, which is to stay below 16 MB

# ------------------------------------------------------------------------------------------------------------ the model


def decoder_config(settings: Mapping[str, Any]) -> DecoderConfig:
    return DecoderConfig(**settings["model"], rope=rope.Default(theta=settings["rope_theta"]))


@cache
def shapes(config: DecoderConfig) -> Decoder:
    """A Decoder without arrays."""
    return nnx.eval_shape(lambda: Decoder(config))


def initial(config: DecoderConfig, seed: int = 0) -> dict[str, Array]:
    """Random parameters; what writes to the residual stream is 0, so that each layer begins as the identity."""
    params = stack(Decoder(config, rngs=nnx.Rngs(seed)))
    return {n: jnp.zeros_like(a) if re.search(r"\.(out|down)\.kernel", n) else a for n, a in params.items()}


def stack(model: Decoder) -> dict[str, Array]:
    """The parameters by name, those of all layers in one array [layers, ...]."""
    found: dict[str, list[Array]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        found.setdefault(_place(path)[0], []).append(leaf)
    return {name: jnp.stack(all_) if name.startswith("layers.") else all_[0] for name, all_ in found.items()}


def unstack(params: Mapping[str, Array], like: Decoder) -> Decoder:
    """The Decoder of stacked parameters; `like` has its structure."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    places = (_place(path) for path, _ in leaves)
    return jax.tree.unflatten(structure, [params[n] if i is None else params[n][i] for n, i in places])


def _place(path: Any) -> tuple[str, int | None]:
    """The name without the number of the layer, and that number."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    layer = re.match(r"layers\.(\d+)\.", name)
    return (name, None) if layer is None else ("layers." + name[layer.end() :], int(layer[1]))


def trunk(model: Decoder, table: Array, tokens: Array) -> Array:
    """What the head reads, [B, T, hidden], of i32[B, T].

    Reads embeddings from `table` f32, so that their gradients are added in f32: the tokens of a step are few kinds,
    each of them very often.
    """
    x = table.at[tokens].get(mode="clip").astype(model.embedding.dtype)
    cos, sin = rope.angles(model.config.rope, jnp.arange(tokens.shape[1])[None], model.config.head_dim)
    for layer in model.layers:
        x, _, _ = layer(x, cos, sin, None)
    return model.norm(x)


# ------------------------------------------------------------------------------------------------------------- the loss


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def cross_entropy(x: Array, table: Array, targets: Array, weights: Array, chunk: int) -> tuple[Array, Array, Array]:
    """(the weighted sum f32[], that of each token f32[n], whether the target is the likeliest bool[n]).

    x [n, hidden], table [V, hidden], targets i32[n], weights f32[n]. Only the sum has a gradient. Works through
    `chunk` tokens at a time and makes their gradients as it goes, so it holds the logits of a chunk, once: 262144
    tokens have 4 GB of them, and reading them again for a backward pass would cost as much as making them.
    """
    return _by_chunks(x, table, targets, weights, chunk, gradients=False)[0]


def _by_chunks(x: Array, table: Array, targets: Array, weights: Array, chunk: int, *, gradients: bool) -> Any:
    def one(d_table: Array, part: tuple[Array, Array, Array]) -> tuple[Array, Any]:
        x, targets, weights = part
        logits = jnp.einsum("nd,vd->nv", x, table, preferred_element_type=jnp.float32)
        hit = targets[:, None] == jnp.arange(table.shape[0])[None]
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
    parts = jax.tree.map(lambda a: a.reshape(n // chunk, chunk, *a.shape[1:]), (x, targets, weights))
    d_table, (losses, right, d_x) = jax.lax.scan(one, jnp.zeros(table.shape, jnp.float32), parts)
    losses, right = losses.reshape(n), right.reshape(n)
    d_x = None if d_x is None else d_x.reshape(x.shape)
    return (jnp.sum(losses * weights), losses, right), (d_x, d_table.astype(table.dtype))


def _loss_forward(x: Array, table: Array, targets: Array, weights: Array, chunk: int) -> Any:
    return _by_chunks(x, table, targets, weights, chunk, gradients=True)


def _loss_backward(chunk: int, made: tuple[Array, Array], given: tuple[Array, Array, Array]) -> Any:
    return *(d * given[0].astype(d.dtype) for d in made), None, None


cross_entropy.defvjp(_loss_forward, _loss_backward)


def losses(
    params: Mapping[str, Array], tokens: Array, kinds: Array, *, like: Decoder, settings: Mapping[str, Any]
) -> tuple[Array, tuple[Array, Array, Array]]:
    """The weighted mean over a batch; and of the tokens, after each: loss and right f32[B, T], kind of the target.

    tokens u16[B, T] and kinds u8[B, T] are as `data.make_batch` makes them.
    """
    compute = jnp.dtype(settings["compute"])
    model = unstack({name: a.astype(compute) for name, a in params.items()}, like)
    ids = tokens.astype(jnp.int32)
    x = trunk(model, params[EMBEDDING], ids)
    kinds = jnp.roll(kinds, -1, axis=1).at[:, -1].set(data.NONE)  # a token's logits are those of the next
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


EMBEDDING = "embedding.value"

# ------------------------------------------------------------------------------------------------------------- the step


def optimizer(settings: Mapping[str, Any]) -> optax.GradientTransformation:
    """Muon for the matrices of the layers, Adam for embeddings and norms; at rate 1, the step scales what it gives.

    `consistent_rms=0.2` gives Muon's updates the size of Adam's, so that one rate serves both (Liu et al. 2025).
    """
    matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)  # of [layers, in, out]

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
        (loss, (each, right, kind)), grads = jax.value_and_grad(of, has_aux=True)(state["params"], tokens, kinds)
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
    """Of a step, in the usual way: 6 a parameter of a matrix (the head's too), and 6 N D T a layer of attention.

    Forward 2 a parameter, backward twice that; attention has two products of T x D a head and token, half of them
    masked. Norms, RoPE, softmax, the optimizer and what a backward pass computes again do not count.
    """
    heads, kv = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
    layer = config.hidden_size * (2 * heads + 2 * kv + 3 * config.intermediate_size)
    matrices = config.layers * layer + config.vocab_size * config.hidden_size
    return 6.0 * matrices + 6.0 * config.layers * heads * length


class Programs:
    """The step compiled for each length, one after another in a thread: the first runs while the next compile."""

    def __init__(self, step: Any, state: Any, lengths: list[int], tokens: int) -> None:
        def build(length: int) -> Any:
            start, shape = time.monotonic(), (max(1, tokens // length), length)
            batch = (jax.ShapeDtypeStruct(shape, jnp.uint16), jax.ShapeDtypeStruct(shape, jnp.uint8))
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
        self._made: dict[int, Future[Any]] = {length: self._pool.submit(build, length) for length in lengths}

    def __getitem__(self, length: int) -> Any:
        return self._made[length].result()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


# --------------------------------------------------------------------------------------------------------- the schedule


@dataclass
class Clock:
    """How far a run is, from 0 to 1: by steps, or by the time from its first step to its deadline."""

    steps: int | None
    deadline: float  # of time.monotonic()
    done: float = 0.0  # when it was resumed
    start: float | None = None

    def progress(self, step: int) -> float:
        if self.steps is not None:
            return step / self.steps
        if self.start is None:
            return self.done
        passed = (time.monotonic() - self.start) / max(self.deadline - self.start, 1e-9)
        return self.done + (1.0 - self.done) * passed


def rate_at(progress: float, settings: Mapping[str, Any]) -> float:
    """The learning rate: a warm-up, a constant part, and a linear decay to 0, as shares of the run."""
    up = (progress + 1e-3) / settings["warmup"] if settings["warmup"] else 1.0
    down = (1.0 - progress) / settings["decay"] if settings["decay"] else 1.0
    return settings["rate"] * max(0.0, min(1.0, up, down))


def lengths_left(progress: float, settings: Mapping[str, Any]) -> list[int]:
    """The lengths of rows from here on, in their order; none when the run is over."""
    phases = settings["phases"]
    ends = np.cumsum(list(phases.values()))
    return [int(length) for length, end in zip(phases, ends, strict=True) if progress < end - 1e-9]


# ---------------------------------------------------------------------------------------------------- saving and export


def manager(out: Path) -> ocp.CheckpointManager:
    return ocp.CheckpointManager((out / "checkpoints").absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2))


def save(checkpoints: ocp.CheckpointManager, step: int, state: Any, about: Mapping[str, Any]) -> None:
    """Begins to write the state after `step` steps; the arrays are read before this returns."""
    args = ocp.args.Composite(state=ocp.args.StandardSave(_named(state)), about=ocp.args.JsonSave(dict(about)))
    checkpoints.save(step, args=args)


def restore(checkpoints: ocp.CheckpointManager, like: Any) -> tuple[int, Any, dict[str, Any]]:
    """(steps done, state, what was saved with it), of the newest complete save."""
    step = checkpoints.latest_step()
    if step is None:
        raise FileNotFoundError(f"{checkpoints.directory} has no complete save to resume from; leave out --resume")
    wanted = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in _named(like).items()}
    args = ocp.args.Composite(state=ocp.args.StandardRestore(wanted), about=ocp.args.JsonRestore())
    found = checkpoints.restore(step, args=args)
    leaves = [jnp.asarray(found["state"][name]) for name in _named(like)]
    return step, jax.tree.unflatten(jax.tree.structure(like), leaves), found["about"]


def _named(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def export(
    directory: Path,
    params: Mapping[str, Array],
    corpus: data.Corpus,
    settings: Mapping[str, Any],
    about: Mapping[str, Any],
) -> None:
    """Writes the model in bf16 in Hugging Face format, its tokenizer and its card; takes the place of an older one."""
    config = decoder_config(settings)
    new, old = directory.with_name(directory.name + ".new"), directory.with_name(directory.name + ".old")
    shutil.rmtree(new, ignore_errors=True)
    encoder = corpus.tokenizer
    models.save(
        new,
        unstack(params, shapes(config)),
        dtype="bfloat16",
        bos_token=encoder.bos_token_id,
        stop_tokens=(encoder.eos_token_id,),
        shard_bytes=SHARD_BYTES,
    )
    shutil.copy(corpus.directory / "tokenizer.json", new)
    tokenizer = json.loads((corpus.directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokenizer["model_max_length"] = config.max_position_embeddings
    (new / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=1), encoding="utf-8")
    (new / "README.md").write_text(card(config, corpus, settings, about), encoding="utf-8")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    new.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


def card(config: DecoderConfig, corpus: data.Corpus, settings: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """The model card: what it is, what it was trained on, and what it can do."""
    files, tokens = corpus.card["files"], corpus.card["tokens"]
    parameters = sum(a.size for a in jax.tree.leaves(shapes(config)))
    lines = [
        "---",
        "license: apache-2.0",
        "language: en",
        "library_name: kvjax",
        "---",
        "",
        "# A small long-context model for kvjax",
        "",
        f"A Llama of {parameters / 1e6:.1f} M parameters ({config.layers} layers, width {config.hidden_size}, "
        f"{config.q_heads} query and {config.kv_heads} KV heads of {config.head_dim}, vocabulary {config.vocab_size}, "
        f"{config.max_position_embeddings} positions, bf16), trained from scratch by `training/train.py` of kvjax. It "
        "finds what is hidden in long texts, and is there to show what KV-cache methods keep; it knows little else.",
        "",
        f"Trained {about['step']} steps, {about['tokens'] / 1e6:.0f} M tokens, in {about['seconds']:.0f} s on one "
        f"{about['made']['device']}; of the schedule {100 * about['progress']:.0f} % was done. Settings: "
        f"`{json.dumps(dict(settings))}`. Versions: `{json.dumps(about['made']['versions'])}`.",
        "",
        "## Data",
        "",
        "Nothing of it is in this repository. The books are in the public domain; the Python code is under the licence "
        "of the Python Software Foundation. The rows with questions are generated by kvjax.",
        "",
        f"Books ({tokens['books']} tokens):",
        "",
        "| title | bytes | SHA-256 |",
        "| --- | --- | --- |",
        *(f"| {_title(f['name'])} | {f['bytes']} | `{f['sha256']}` |" for f in files["books"]),
        "",
        f"Code ({tokens['code']} tokens): {len(files['code'])} files, {sum(f['bytes'] for f in files['code'])} bytes, "
        f"SHA-256 of the list of their digests `{digest_json([f['sha256'] for f in files['code']])}`.",
        "",
        f"Held out: {', '.join(_title(f['name']) for f in files['held_out'])} ({tokens['held_out']} tokens).",
    ]
    if "evaluation" in about:
        found = about["evaluation"]
        lengths = list(found["perplexity"])
        exact = {name: [f"{row[n]:.3f}" for n in lengths] for name, row in found["exact_match"].items()}
        exact["perplexity"] = [f"{found['perplexity'][n]:.1f}" for n in lengths]
        lines += [
            "",
            "## Full attention, on held-out text",
            "",
            f"Exact match of {found['rows']} answers, each of them decoded greedily, and perplexity a token:",
            "",
            f"| task | {' | '.join(lengths)} |",
            f"| --- |{' --- |' * len(lengths)}",
            *(f"| {name} | {' | '.join(row)} |" for name, row in exact.items()),
        ]
    return "\n".join([*lines, ""])


def _title(name: str) -> str:
    return Path(name).stem.replace("-", " ").title()


# ------------------------------------------------------------------------------------------------------- the evaluation


def evaluate(
    params: Mapping[str, Array], corpus: data.Corpus, settings: Mapping[str, Any], *, seed: int = 1
) -> dict[str, Any]:
    """Exact match of the answers by task and length, and perplexity by length, on held-out text.

    One pass over prompt and answer tells what greedy decoding answers: all of its tokens are right if each is the
    likeliest after the right ones before it.
    """
    asked, lengths = settings["evaluate"], settings["evaluate"]["lengths"]
    text = corpus.tokens("held_out")
    rows_of = {length: min(asked["rows"], max(1, settings["tokens"] // length)) for length in lengths}
    exact: dict[str, dict[str, float]] = {name: {} for name in asked["tasks"]}
    perplexity: dict[str, float] = {}
    look = jax.jit(partial(losses, like=shapes(decoder_config(settings)), settings=settings))

    def build(length: int) -> Any:
        shape = rows_of[length], length
        batch = jax.ShapeDtypeStruct(shape, jnp.uint16), jax.ShapeDtypeStruct(shape, jnp.uint8)
        return look.lower(params, *batch).compile()

    with ThreadPoolExecutor() as pool:
        programs = dict(zip(lengths, pool.map(build, lengths), strict=True))

    def seen(rows: list[tuple[np.ndarray, np.ndarray]], together: int) -> Any:
        for i in range(0, len(rows), together):
            part = (rows[i : i + together] * together)[:together]  # a last batch begins again, to be as large
            tokens, kinds = (np.stack(a) for a in zip(*part, strict=True))
            _, found = programs[tokens.shape[1]](params, tokens, kinds)
            yield tuple(np.asarray(a)[: len(rows) - i] for a in found)

    for length, together in rows_of.items():
        for name, sizes in asked["tasks"].items():
            form = FORMS[name.split()[0]]
            rngs = [random.Random(f"{seed} {name} {length} {row}") for row in range(asked["rows"])]
            rows = [data.asking(corpus, text, length, [form(rng, **sizes)], rng) for rng in rngs]
            answers = data.ANSWER, data.CHAIN
            hits = [np.all(right | ~np.isin(kind, answers), axis=1) for _, right, kind in seen(rows, together)]
            exact[name][str(length)] = float(np.concatenate(hits).mean())
        rngs = [random.Random(f"{seed} {length} {row}") for row in range(together)]
        plain = seen([data.plain(corpus, text, length, rng) for rng in rngs], together)
        perplexity[str(length)] = float(np.exp(np.mean([each[:, :-1].mean() for each, _, _ in plain])))
    return {"rows": asked["rows"], "exact_match": exact, "perplexity": perplexity}


# -------------------------------------------------------------------------------------------------------------- the run


class Log:
    """Lines of JSON in a file, and some of them on the screen. Speed is taken between lines."""

    def __init__(self, path: Path, config: DecoderConfig, peak: float | None, every: float) -> None:
        self.file = path.open("a", encoding="utf-8")
        self.config, self.peak, self.every = config, peak, every
        self.last = time.monotonic()
        self.shown = -float("inf")

    def write(
        self, step: int, length: int, tokens: int, progress: float, rate: float, metrics: Mapping[str, Any]
    ) -> None:
        line = {name: float(value) for name, value in metrics.items()}  # waits for the step
        now = time.monotonic()
        speed, self.last = tokens / (now - self.last), now
        line = {"step": step, "length": length, "progress": progress, "rate": rate, **line, "tokens_per_second": speed}
        if self.peak is not None:
            line["utilisation"] = speed * flops_per_token(self.config, length) / (self.peak * 1e12)
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        if now - self.shown >= self.every:
            self.shown = now
            print("  ".join(f"{k} {v:.4g}" for k, v in line.items()), flush=True)


def train(
    settings: Mapping[str, Any],
    out: Path,
    *,
    books: Path | None,
    code: Path | None,
    seconds: float = 540.0,
    steps: int | None = None,
    stop_after: int | None = None,
    resume: bool = False,
    peak_tflops: float | None = None,
    show_every: float = 5.0,
) -> None:
    """Trains to the end of the schedule, saves, and exports to out/model; out/result.json has what its card states.

    `stop_after` ends the run after that step, as a cut-off would, but saves first.
    """
    begun = time.monotonic()
    config = decoder_config(settings)
    out.mkdir(parents=True, exist_ok=True)
    corpus = data.prepare(out / "corpus", books, code, vocab_size=config.vocab_size, **settings["corpus"])
    checkpoints = manager(out)
    if not resume and checkpoints.latest_step() is not None:
        raise FileExistsError(f"{out} has a run with checkpoints; give --resume, or another --out")

    like, state = shapes(config), initial_state(settings)
    first, clock, trained, tokens = 0, Clock(steps, begun + seconds), 0.0, 0
    if resume:
        first, state, before = restore(checkpoints, state)
        if before["settings"] != json.loads(json.dumps(dict(settings))):
            raise ValueError(f"the run in {out} has other settings; resume with the config that it began with")
        clock.done, trained, tokens = before["progress"], before["seconds"], before["tokens"]
    lengths = lengths_left(clock.progress(first), settings)
    if not lengths:
        raise ValueError(f"the run in {out} has come to its end; give another --out")
    programs = Programs(make_step(settings, like), state, lengths, settings["tokens"])
    batches = data.Batches(
        corpus,
        data.Mixture(**settings["mixture"]),
        lambda step: next(iter(lengths_left(clock.progress(step), settings)), None),
        tokens=settings["tokens"],
        first=first,
        workers=settings["workers"],
    )
    programs[lengths[0]]  # waits for it
    clock.start = time.monotonic()
    log = Log(out / "log.jsonl", config, peak_tflops, show_every)
    print(f"first step after {clock.start - begun:.1f} s", flush=True)

    waiting: deque[Any] = deque()
    saved = clock.start if steps is None else first
    step, made = first, provenance()

    def about() -> dict[str, Any]:
        passed, progress = trained + time.monotonic() - clock.start, min(1.0, clock.progress(step))
        run = {"step": step, "tokens": tokens, "seconds": passed, "progress": progress}
        return {**run, "made": made, "settings": dict(settings)}

    def keep() -> None:
        result = about()
        save(checkpoints, step, state, result)
        export(out / "model", state["params"], corpus, settings, result)
        (out / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")

    for length, ids, kinds in batches:
        progress = clock.progress(step)
        if progress >= 1.0:
            break
        rate = rate_at(progress, settings)
        state, metrics = programs[length](state, ids, kinds, np.float32(rate))
        step, tokens = step + 1, tokens + ids.size
        waiting.append((step, length, ids.size, progress, rate, metrics))
        if len(waiting) > 2:  # so that the device always has a step to go on with
            log.write(*waiting.popleft())
        if step == stop_after:
            break
        now = time.monotonic() if steps is None else step
        if now - saved >= settings["save_every"]:
            saved = now
            keep()
    for left in waiting:
        log.write(*left)
    log.file.close()
    batches.close()
    programs.close()
    if step not in checkpoints.all_steps():
        keep()
    checkpoints.wait_until_finished()
    checkpoints.close()
    print(f"{step} steps, {tokens / 1e6:.1f} M tokens, exported after {time.monotonic() - begun:.1f} s", flush=True)


def judge(out: Path) -> dict[str, Any]:
    """Evaluates out/model, and writes what was found into out/result.json and the model's card."""
    begun = time.monotonic()
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    corpus, checkpoint = data.Corpus(out / "corpus"), models.load(out / "model")
    result["evaluation"] = evaluate(stack(checkpoint.model), corpus, result["settings"])
    text = card(checkpoint.config, corpus, result["settings"], result)
    (out / "model" / "README.md").write_text(text, encoding="utf-8")
    (out / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(json.dumps(result["evaluation"], indent=1), f"\nevaluated in {time.monotonic() - begun:.1f} s", flush=True)
    return result["evaluation"]


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description="Trains kvjax's small long-context model; README.md says how.")
    parser.add_argument("--config", type=Path, default=here / "config.json")
    parser.add_argument("--books", type=Path, help="directory of texts; needed until OUT/corpus is made")
    parser.add_argument("--code", type=Path, help="directory of Python code, such as the standard library")
    parser.add_argument("--out", type=Path, required=True, help="for the corpus, checkpoints, log and model")
    parser.add_argument("--seconds", type=float, default=540.0, help="from start to last step")
    parser.add_argument("--steps", type=int, help="of the whole run, in place of --seconds")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--peak-tflops", type=float, help="dense, in the compute dtype: 989 for an H200 in bf16")
    parser.add_argument("--evaluate", choices=("after", "only", "no"), default="after")
    parser.add_argument("--smoke", action="store_true", help="a tiny run on the sources of kvjax")
    given = parser.parse_args()
    config, books, code, steps = given.config, given.books, given.code, given.steps
    if given.smoke:
        config, books, code, steps = here / "smoke.json", here.parent / "kvjax", here.parent / "models", 60
    if given.evaluate != "only":
        train(
            json.loads(config.read_text(encoding="utf-8")),
            given.out,
            books=books,
            code=code,
            seconds=given.seconds,
            steps=steps,
            resume=given.resume,
            peak_tflops=given.peak_tflops,
        )
    if given.evaluate != "no":
        judge(given.out)


if __name__ == "__main__":
    main()
