"""The text of full attention, faster: drafts by a selection, verified on the same cache.

    python benchmarks/lossless.py MODEL --text prose=book.txt --text code=DIR --gsm8k test.jsonl
    [--size 32768x24] [--method fier:budget=1024]
    [--parts speed,same,steps,acceptance,selections]
    [--minutes 8]

Prompts are excerpts of the texts, and of worked examples of GSM8K. They are read once by full
attention, and stored into every other cache. Then the loop on the device continues them
greedily, the loop of `kvjax.generate`.

- `speed`: tokens a second of the whole loop, full attention and `SelfDraft` in the same run.
  All rows write the same number of tokens, so a row that is done waits for the last one.
- `same`: new tokens of a row until the first difference from full attention: of `SelfDraft`, of
  full attention with prompt look-up, and of full attention with half of the rows; and by how
  much the best logit of full attention exceeds the second where they differ (`margin`). In
  bfloat16 each of these rounds other sums.
- `steps`: layers of the shape of Llama-3.1-8B: a step of full attention, verifications of 5 and
  8 tokens, and a draft step, the mean of those by one selection. `head_ms` is the last product of
  the model. Tokens a second of 32 layers are derived from these and from the acceptance
  that `speed` measured (`derived`).
- `acceptance`: tokens of a draft of 8 that are right, by method, budget and length
  (`kvjax.evaluate.acceptance`).
- `selections`: tokens of a step with drafts of `--tokens`, 4 by default, by methods that select in
  each draft step, and by `verified+METHOD`, which select once in a round, when they verify
  (`benchmarks/verified.py`). Beside it the bytes that a draft step reads, and on a GPU the
  microseconds of a draft step and of a verification, of the whole model.

What the file has is not measured again by the same code; a part begins only within
`--minutes`. Without a GPU, `--quick` runs all parts at tiny sizes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import named
import numpy as np
from flax import nnx
from jax import Array, lax
from layers import numbers, show
from measured import write_rows
from named import names_of
from throughput import fill
from verified import Verified, verified

import kvjax
from kvjax import PromptLookup, SelfDraft, models
from kvjax.cache.cache import Cache, LayerCache, flushed, init
from kvjax.evaluate.drafting import DRAFT, acceptance
from kvjax.evaluate.provenance import digest, model_digest, provenance
from kvjax.generation import Stream, prefill
from kvjax.generation.draft_length import tokens_in_one_pass
from kvjax.generation.drafts import check_draft
from kvjax.generation.kept_selections import (
    attending_again,
    keeping_selections,
    steps_together,
    without_selections,
)
from kvjax.memory import nbytes
from kvjax.models import Checkpoint, Decoder, DecoderConfig
from kvjax.spec import CacheSpec, default_dtype, padded_capacity

OUT = Path(__file__).parent / "results" / "lossless.json"
PARTS = ("speed", "same", "steps", "acceptance", "selections")
EIGHT = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "q_heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "q_heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
}
LAYERS = 32  # of the model whose speed is derived
# Methods of the part `acceptance`. Those that select, by how often they are used:
COMMON = ("fier", "quest", "pariskv", "exact")
LESS_COMMON = ("pqcache", "magicpig", "arkvale", "freekv", "shadowkv")
CODES = ("kivi", "logquant", "turboquant")  # read all of their codes, whatever the budget


# ------------------------------------------------------------------------------------ prompts


def token_stream(checkpoint: Checkpoint, source: Path) -> list[int]:
    """The tokens of a text, of the Python files of a folder, or of worked examples of a .jsonl
    file of GSM8K.
    """
    if source.is_dir():
        text = "\n\n".join(path.read_text() for path in sorted(source.rglob("*.py")))
    elif source.suffix == ".jsonl":
        examples = map(json.loads, source.read_text().splitlines())
        text = "".join(
            f"Question: {x['question']}\nAnswer: {x['answer']}\n\n" for x in examples
        )
    else:
        text = source.read_text()
    return list(checkpoint.tokenizer(text, verbose=False)["input_ids"])


def excerpts(stream: Sequence[int], rows: int, length: int) -> np.ndarray:
    """i32[rows, length]: pieces that begin at evenly spaced places; a short text is repeated."""
    whole = np.tile(np.asarray(stream, np.int32), -(-2 * length // len(stream)))
    starts = np.linspace(0, len(whole) - length, rows).astype(int)
    return np.stack([whole[start : start + length] for start in starts])


def read(model: Decoder, tokens: np.ndarray, capacity: int) -> tuple[Array, Cache]:
    """Logits and the cache of full attention after a prompt."""
    spec = model.spec(batch=len(tokens), capacity=capacity)
    empty = init(kvjax.Full(), spec, layers=model.config.layers)
    logits, cache = prefill(model, empty, tokens, first_chunk=True)
    return jax.block_until_ready((logits, cache))


def stored(cache: Cache, policies: Any) -> Cache:
    """The prompt that a cache of full attention holds, in a cache of other policies."""
    layers = []
    for i, layer in enumerate(cache.layers):
        policy = policies.policy(i).of_size(layer.spec)
        tokens = layer.policy.stored(layer.state)
        if isinstance(policy, Verified):
            zones = prompt_state(policy.retrieval, layer.spec, tokens)
            state: Any = replace(policy.init(layer.spec), zones=zones)
        else:
            state = prompt_state(policy, layer.spec, tokens)
        layers.append(LayerCache(state, policy, layer.spec))
    return jax.block_until_ready(replace(cache, layers=tuple(layers)))


@partial(jax.jit, static_argnames=("policy", "spec"))
def prompt_state(policy: Any, spec: CacheSpec, tokens: Any) -> Any:
    """The state of a policy after a prompt of keys, values and lengths."""
    return policy.prefill(policy.init(spec), *tokens)


def begin(
    model: Decoder, cache: Cache, logits: Array, new: int, draft: Any, prompt: np.ndarray
) -> Stream:
    """The run that continues a prompt by `new` tokens."""
    drafter = None
    if draft is not None:
        check_draft(draft, cache)
        read = np.full(len(prompt), 0, np.int32)  # beside what the cache holds
        if isinstance(draft, PromptLookup):
            read = np.full(len(prompt), prompt.shape[1], np.int32)
        drafter = draft.start(model, cache, prompt, read, new)
    return Stream(model, cache, jnp.copy(logits), new, drafter=drafter)


def told(run: Stream) -> dict[str, Any]:
    """What a run says of its drafts."""
    found = run.speculation
    if found is None:
        return {}
    return {
        "steps": found.steps,
        "drafted": found.drafted,
        "accepted": found.accepted,
        "acceptance": found.acceptance,
        "tokens_per_step": found.tokens_per_step,
        "idle": found.idle,
    }


# ------------------------------------------------------------------------------------ whole loops


def time_run(
    make: Callable[[], Stream], new: int, warm: bool
) -> tuple[dict[str, Any], np.ndarray]:
    """Seconds and tokens a second of a whole run, and its tokens; `warm` if its program is
    compiled."""
    compiling = 0.0
    if not warm:
        start = time.perf_counter()
        make().advance(8)
        compiling = time.perf_counter() - start
    run = make()
    start = time.perf_counter()
    run.advance(new)
    seconds = time.perf_counter() - start
    tokens = np.array(run.rows, np.int32)
    row = {
        "seconds": seconds,
        "tokens_per_second": tokens.size / seconds,
        "ms_per_token": 1e3 * seconds / new,
        "warm_up_seconds": compiling,
    }
    return row | told(run), tokens


def differences(found: np.ndarray, want: np.ndarray) -> list[int]:
    """For each row, the number of tokens before the first that differs."""
    same = np.cumprod(found == want[: len(found)], axis=1)
    return [int(count) for count in same.sum(axis=1)]


class Prompts:
    """Prompts in the one cache of full attention, which a run donates and gives back."""

    def __init__(
        self, model: Decoder, cache: Cache, logits: Array, prompt: np.ndarray, new: int
    ) -> None:
        self.model, self.logits, self.prompt, self.new = model, logits, prompt, new
        self.cache: Cache | None = cache

    def take(self) -> Cache:
        """The cache without what a run added."""
        cache, self.cache = self.cache, None
        assert cache is not None
        return kvjax.rollback(cache, np.full(len(self.prompt), self.prompt.shape[1], np.int32))

    def time_full(self, warm: bool, draft: Any = None) -> tuple[dict[str, Any], np.ndarray]:
        """`time_run` of full attention."""
        runs: list[Stream] = []

        def make() -> Stream:
            if runs:
                self.cache = runs.pop().cache
            run = begin(self.model, self.take(), self.logits, self.new, draft, self.prompt)
            runs.append(run)
            return run

        found = time_run(make, self.new, warm)
        self.cache = runs.pop().cache
        return found

    def time_drafts(
        self, policies: Any, draft: SelfDraft, warm: bool
    ) -> tuple[dict[str, Any], np.ndarray]:
        """`time_run` of other policies that hold the same prompts."""
        self.cache = self.take()

        def make() -> Stream:
            cache = stored(self.cache, policies)
            return begin(self.model, cache, self.logits, self.new, draft, self.prompt)

        return time_run(make, self.new, warm)

    def half(self) -> np.ndarray:
        """The tokens of full attention in a batch of half of the rows."""
        self.cache, count = self.take(), len(self.prompt) // 2
        cache = kvjax.take_rows(self.cache, np.arange(count))
        logits, prompt = self.logits[:count], self.prompt[:count]
        run = begin(self.model, cache, logits, self.new, None, prompt)
        run.advance(self.new)
        return np.array(run.rows, np.int32)

    def margins(self, counts: Sequence[int]) -> list[float | None]:
        """By how much the best logit of row b exceeds the second after counts[b] new tokens;
        None for all of them.
        """
        run = begin(self.model, self.take(), self.logits, self.new, None, self.prompt)
        found: list[float | None] = [None] * len(counts)
        emitted = 0
        for at in sorted({n for n in counts if n < self.new}):
            if at > emitted:
                run.advance(at - emitted)
                emitted = at
            best = np.asarray(lax.top_k(run.logits, 2)[0])
            for b in np.flatnonzero(np.array(counts) == at):
                found[b] = float(best[b, 0] - best[b, 1])
        self.cache = run.cache
        return found


def loops(
    checkpoint: Checkpoint, texts: dict[str, list[int]], given: argparse.Namespace, keep: Any
) -> None:
    """The parts `speed` and `same`: both continue the same prompts."""
    model, (length, batch) = checkpoint.model, given.size
    policies = kvjax.presets.parse(given.method)
    capacity = padded_capacity(length)
    warm = False
    for name, stream in texts.items():
        key = {
            "part": "speed",
            "text": name,
            "length": length,
            "batch": batch,
            "method": given.method,
        }
        if keep.has(**key, new=given.new) and (
            "same" not in given.parts or keep.has(**key | {"part": "same"}, new=given.new)
        ):
            continue
        if not keep.time_left():
            return
        prompt = excerpts(stream, batch, length - given.new)
        start = time.perf_counter()
        logits, full = read(model, prompt, capacity)
        reading = time.perf_counter() - start
        prompts = Prompts(model, full, logits, prompt, given.new)
        plain, want = prompts.time_full(warm)
        drafts, tokens = prompts.time_drafts(policies, given.draft, warm)
        row = {
            **key,
            "new": given.new,
            "prefill_seconds": reading,
            "full": plain,
            "steps_per_selection": given.draft.steps_per_selection,
            "self_draft": drafts,
            "times_full": plain["seconds"] / drafts["seconds"],
        }
        keep(row)
        show(
            {
                "text": name,
                "times full": row["times_full"],
                "tokens a step": drafts.get("tokens_per_step"),
            }
        )
        if "same" in given.parts:
            found = {"self_draft": differences(tokens, want)}
            if keep.time_left():
                _, other = prompts.time_full(True, PromptLookup())
                found["full with prompt look-up"] = differences(other, want)
            if keep.time_left() and batch > 1:
                found["full with half of the rows"] = differences(prompts.half(), want)
            row = {
                **key,
                "part": "same",
                "new": given.new,
                "until_difference": found,
                "margins": {which: prompts.margins(counts) for which, counts in found.items()},
            }
            keep(row)
            show({which: float(np.mean(counts)) for which, counts in found.items()})
        del prompts, full
        warm = True


# ------------------------------------------------------------------------------------ steps


def take_step(
    model: Decoder, cache: Cache, token: Array, *, T: int, exact: bool, together: int = 1
) -> tuple[Array, Cache]:
    """The most likely tokens i32[B, T] after a step of T tokens, or after draft steps that
    attend `together` to what the first of them selects; and the cache without them.
    """
    length = cache.length
    fed = jnp.broadcast_to(token[:, None], (len(token), T))
    how: dict[str, Any] = {"steps": True, "exact": True} if exact else {}
    if together > 1:
        cache = keeping_selections(cache, together)
    with flushed():
        logits, cache = model(fed, cache, **how)
        for _ in range(1, together):
            fed = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            logits, cache = model(fed, attending_again(cache))
    cache = kvjax.rollback(without_selections(cache), length)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache


@partial(jax.jit, static_argnames=("T", "exact", "count", "together"), donate_argnames="cache")
def take_steps(
    model: Decoder, cache: Cache, *, T: int, exact: bool, count: int, together: int = 1
) -> tuple[Array, Cache]:
    """`count` times `take_step`."""

    def step(_: Any, carry: tuple[Array, Cache]) -> tuple[Array, Cache]:
        token, cache = carry
        best, cache = take_step(model, cache, token, T=T, exact=exact, together=together)
        return jnp.max(best, axis=1), cache

    token = jnp.zeros(cache.spec.batch, jnp.int32)
    return lax.fori_loop(0, count, step, (token, kvjax.flush(cache)))


def time_steps(
    model: Decoder, cache: Cache, T: int, exact: bool, count: int, together: int = 1
) -> tuple[float, Cache]:
    """Milliseconds of a step, or of those `together`: the median of three runs."""
    how = {"T": T, "exact": exact, "count": count, "together": together}
    _, cache = jax.block_until_ready(take_steps(model, cache, **how))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        _, cache = jax.block_until_ready(take_steps(model, cache, **how))
        times.append(1e3 * (time.perf_counter() - start) / count)
    return float(np.median(times)), cache


def time_drafts(
    model: Decoder, cache: Cache, draft: SelfDraft, count: int
) -> tuple[float, Cache]:
    """Milliseconds of a draft step: the mean of those by one selection."""
    tokens = draft.tokens or tokens_in_one_pass(cache.spec)
    together = steps_together(cache, draft.steps_per_selection, tokens)
    ms, cache = time_steps(model, cache, 1, False, count, together)
    return ms / together, cache


def steps(given: argparse.Namespace, keep: Any) -> None:
    """The part `steps`, and speeds derived from it."""
    sizes = SMALL if given.quick else EIGHT
    config = DecoderConfig(vocab_size=256, layers=given.layers, **sizes)
    model = Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.dtype(given.dtype))
    vocabulary = 1024 if given.quick else 128256
    head = jax.random.normal(jax.random.key(0), (config.hidden_size, vocabulary), given.dtype)
    policy = kvjax.presets.parse(given.method).policy(given.layers + 8)  # past dense layers
    for length, batch in given.shapes:
        key = {"part": "steps", "length": length, "batch": batch, "method": given.method}
        if keep.has(**key, new=None) or not keep.time_left():
            continue
        spec = model.spec(batch=batch, capacity=padded_capacity(length))
        row: dict[str, Any] = {**key, "new": None, "layers": given.layers}
        row["steps_per_selection"] = given.draft.steps_per_selection
        filled = fill(init(kvjax.Full(), spec, layers=given.layers), length - 64)
        row["full_ms"], filled = time_steps(model, filled, 1, False, given.count)
        del filled
        cache = fill(init(policy, spec, layers=given.layers), length - 64)
        for T in (5, 8):
            row[f"verify_{T}_ms"], cache = time_steps(model, cache, T, True, given.count)
            row[f"verify_{T}_over_full"] = row[f"verify_{T}_ms"] / row["full_ms"]
        row["draft_ms"], cache = time_drafts(model, cache, given.draft, given.count)
        del cache
        for T in (1, 5):
            row[f"head_{T}_ms"] = time_head(head, batch * T, given.count)
        row["derived"] = derived(row, keep.accepted(), given.layers)
        keep(row)
        show(
            {name: value for name, value in row.items() if name.endswith(("_ms", "_over_full"))}
        )
        show(row["derived"])


def time_head(head: Array, rows: int, count: int) -> float:
    """Milliseconds of the product that gives logits."""
    x = jnp.ones((rows, head.shape[0]), head.dtype)

    @jax.jit
    def products(x: Array, head: Array) -> Array:
        def one(_: Any, x: Array) -> Array:
            y = jnp.einsum("bh,hv->bv", x, head, preferred_element_type=jnp.float32)
            return x + jnp.max(y, axis=1, keepdims=True).astype(x.dtype) * 0

        return lax.fori_loop(0, count, one, x)

    jax.block_until_ready(products(x, head))
    start = time.perf_counter()
    jax.block_until_ready(products(x, head))
    return 1e3 * (time.perf_counter() - start) / count


def derived(row: dict[str, Any], accepted: dict[str, float], layers: int) -> dict[str, Any]:
    """Speeds of 32 layers over full attention, from step times and tokens a step by text, with
    4 drafted tokens a step.
    """

    def whole(ms: float, head: float) -> float:
        return ms * LAYERS / layers + head

    full = whole(row["full_ms"], row["head_1_ms"])
    draft = whole(row["draft_ms"], row["head_1_ms"])
    verification = whole(row["verify_5_ms"], row["head_5_ms"])
    rates = accepted | {
        "each token right with .90": 4.0951,
        "each token right with .95": 4.5244,
    }
    return {
        "full_tpot_ms": full,
        "draft_ms": draft,
        "verification_ms": verification,
        "times_full": {
            name: rate * full / (4 * draft + verification) for name, rate in rates.items()
        },
    }


# ------------------------------------------------------------------------------------ acceptance


def drafting_methods(budgets: Sequence[int]) -> list[str]:
    """Methods of the part `acceptance`, the most telling first: those in common use at the first
    budget, codes, which have none, and then the others."""

    def at(names: Sequence[str], budgets: Sequence[int]) -> list[str]:
        return [f"{name}:budget={budget}" for budget in budgets for name in names]

    return [
        *at(COMMON, budgets[:1]),
        *CODES,
        *at(COMMON, budgets[1:]),
        *at(LESS_COMMON, budgets),
    ]


def refusal(method: str, model: Decoder, capacity: int) -> str | None:
    """Why a method cannot hold the model at its budget; None if it can."""
    try:
        policies = kvjax.presets.parse(method)
        spec = model.spec(batch=1, capacity=capacity)
        jax.eval_shape(lambda: init(policies, spec, layers=model.config.layers))
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return None


def accepted_tokens(
    checkpoint: Checkpoint, texts: dict[str, list[int]], given: argparse.Namespace, keep: Any
) -> None:
    """The part `acceptance`. Methods are compared in threads, so that their programs compile at
    the same time."""
    model, rows = checkpoint.model, given.acceptance_rows
    capacity = padded_capacity(max(given.lengths) + given.forced)
    methods = []
    for method in given.methods:
        if why := refusal(method, model, capacity):
            show({"method": method, "refused": why})
        else:
            methods.append(method)
    for length in given.lengths:
        for name, stream in texts.items():
            key = {"part": "acceptance", "text": name, "length": length, "batch": rows}
            asked = [method for method in methods
                     if not keep.has(**key, method=method, new=given.forced)]  # fmt: skip
            if not asked or not keep.time_left():
                continue
            prompt = excerpts(stream, rows, length)
            logits, full = read(model, prompt, capacity)
            run = begin(model, jax.tree.map(jnp.copy, full), logits, given.forced, None, prompt)
            run.advance(given.forced)
            wanted = np.array(run.rows, np.int32)
            del run
            compare = partial(accepted_of, model, full, wanted, keep)
            with ThreadPoolExecutor(given.parallel) as pool:
                for method, found in zip(asked, pool.map(compare, asked), strict=True):
                    if found is not None:
                        keep({**key, "method": method, "new": given.forced, **found})
                        show({**key, "method": method, "accepted": found["accepted"]})
            del full, compare


def accepted_of(
    model: Decoder, full: Cache, wanted: np.ndarray, keep: Any, method: str
) -> dict[str, Any] | None:
    """How the steps of a method agree with the text of full attention after a prompt; None if
    no time is left."""
    if not keep.time_left():
        return None
    start = time.perf_counter()
    found, _ = acceptance(model, stored(full, kvjax.presets.parse(method)), wanted)
    return {
        "draft": DRAFT,
        "accepted": found.accepted,
        "agreement": found.agreement,
        "by_position": list(found.by_position),
        "seconds": time.perf_counter() - start,
    }


# ------------------------------------------------------------------------------------ selections


def policies_of(method: str) -> Any:
    """The policies that `METHOD` or `verified+METHOD` names."""
    kind, plus, name = method.rpartition("+")
    policies = kvjax.presets.parse(name)
    if plus and kind != "verified":
        raise SystemExit(f"--selections takes METHOD or verified+METHOD; got {method}")
    return verified(policies) if plus else policies


def draft_bytes(cache: Cache, length: int) -> dict[str, int]:
    """Bytes that a draft step reads of the layers that select, and that their indexes hold."""
    selected = index = held = 0
    for layer in cache.layers:
        policy, spec = layer.policy, layer.spec
        if not isinstance(policy, kvjax.Retrieval | Verified):
            continue
        selected += spec.batch * min(policy.budget, length) * spec.key_value_bytes
        if isinstance(policy, Verified):
            held += nbytes(layer.state.positions).device
            scored = isinstance(policy.selector, kvjax.Exact)  # by the verification itself
            held += 0 if scored else nbytes(layer.state.zones.index).device
        else:
            index += int(spec.batch * policy.selector.bytes_read(spec, length))
            held += nbytes(layer.state.index).device
    return {"selected_bytes": selected, "index_bytes": index, "held_bytes": held}


def with_drafts(model: Decoder, cache: Cache, logits: Array, new: int, tokens: int) -> Stream:
    """The run that continues a prompt with drafts of `tokens`, however often they are right."""
    batch = cache.spec.batch
    nothing = np.zeros((batch, 1), np.int32)
    drafter = SelfDraft(tokens, 1).start(model, cache, nothing, np.zeros(batch, np.int32), new)
    always = replace(drafter, price=jnp.float32(0), idle=None, max_tokens=tokens)
    return Stream(model, cache, jnp.copy(logits), new, drafter=always)


def selections(
    checkpoint: Checkpoint, texts: dict[str, list[int]], given: argparse.Namespace, keep: Any
) -> None:
    """The part `selections`. The first prompt goes through all methods in threads before any of
    them is timed, so that their programs compile at the same time."""
    model, rows, tokens = checkpoint.model, given.acceptance_rows, given.tokens or 4
    capacity = padded_capacity(max(given.lengths) + given.forced + tokens)
    warm: set[str] = set()
    for length in given.lengths:
        for name, stream in texts.items():
            key = {"part": "selections", "text": name, "length": length, "batch": rows}
            asked = [
                method
                for method in given.selections
                if not keep.has(**key, method=method, new=given.forced)
            ]
            if not asked or not keep.time_left():
                continue
            prompt = excerpts(stream, rows, length)
            logits, full = read(model, prompt, capacity)
            run = begin(model, jax.tree.map(jnp.copy, full), logits, given.forced, None, prompt)
            run.advance(given.forced)
            wanted = np.array(run.rows, np.int32)
            del run
            measure = partial(selection_of, model, full, logits, wanted, tokens, given.count)
            with ThreadPoolExecutor(given.parallel) as pool:
                list(pool.map(measure, [method for method in asked if method not in warm]))
            warm |= set(asked)
            for method in asked:
                if not keep.time_left():
                    return
                row = {**key, "method": method, "new": given.forced, **measure(method)}
                keep(row)
                show({**key, "method": method, **{x: row.get(x) for x in SHOWN}})
            del full, measure


def selection_of(
    model: Decoder,
    full: Cache,
    logits: Array,
    wanted: np.ndarray,
    tokens: int,
    count: int,
    method: str,
) -> dict[str, Any]:
    """How a method drafts after a prompt, and on a GPU what its steps cost."""
    cache = stored(full, policies_of(method))
    new = wanted.shape[1]
    row = {"tokens": tokens, **draft_bytes(cache, int(full.length.max()))}
    run = with_drafts(model, cache, logits, new, tokens)
    run.advance(new)
    row |= told(run)
    row["until_difference"] = differences(np.array(run.rows, np.int32), wanted)
    if jax.default_backend() == "gpu":
        row |= step_microseconds(model, run.cache, tokens, count)
    return row


SHOWN = ("tokens_per_step", "index_bytes", "selected_bytes", "draft_us", "verify_us")


def step_microseconds(
    model: Decoder, cache: Cache, tokens: int, count: int
) -> dict[str, float]:
    """Of a draft step, and of the step that verifies `tokens` and the one before them."""
    verify, cache = time_steps(model, cache, tokens + 1, True, count)
    draft, _ = time_drafts(model, cache, SelfDraft(tokens, 1), count)
    return {"draft_us": 1e3 * draft, "verify_us": 1e3 * verify}


# ------------------------------------------------------------------------------------ file


class Rows:
    """The rows of the file, which is written after each."""

    KEY = ("part", "text", "length", "batch", "method", "new")

    def __init__(self, out: Path, about: dict[str, Any], minutes: float) -> None:
        self.out, self.about, self.rows = out, about, {}
        self.end = time.perf_counter() + 60 * minutes
        if not out.is_file():
            return
        held = json.loads(out.read_text())
        for name in ("model", "dtype", "device", "source"):
            if held.get(name) != about[name]:
                raise SystemExit(f"--out {out} has rows of another {name}; name another file")
        self.rows = {self._key(row): row for row in held["rows"]}

    def _key(self, row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in self.KEY)

    def has(self, **row: Any) -> bool:
        return self._key(row) in self.rows

    def time_left(self) -> bool:
        return time.perf_counter() < self.end

    def accepted(self) -> dict[str, float]:
        """Tokens of a step by text, where drafts had 4 tokens."""
        speeds = [row for row in self.rows.values() if row["part"] == "speed"]
        return {
            row["text"]: row["self_draft"]["tokens_per_step"]
            for row in speeds
            if row["self_draft"].get("drafted")
        }

    def __call__(self, row: dict[str, Any]) -> None:
        self.rows[self._key(row)] = row
        write_rows(self.out, self.about, self.rows.values())


def shape(text: str) -> tuple[int, int]:
    length, batch = text.split("x")
    return int(length), int(batch)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", nargs="?", type=Path, help="default: the shipped model")
    parser.add_argument(
        "--text", action="append", default=[], help="NAME=FILE, or NAME=FOLDER of Python files"
    )
    parser.add_argument("--gsm8k", type=Path, help="a .jsonl file with questions and answers")
    parser.add_argument(
        "--size", type=shape, default=(32768, 24), help="tokens x rows of the loops"
    )
    parser.add_argument("--method", type=named.cache, default="fier:budget=1024")
    parser.add_argument("--tokens", type=int, help="of a draft; default: SelfDraft's own")
    parser.add_argument(
        "--steps-per-selection",
        type=int,
        help="draft steps of the parts speed, same and steps that attend to one selection; default: all of a draft",
    )
    parser.add_argument("--new", type=int, default=384, help="tokens that each row writes")
    parser.add_argument(
        "--parts",
        type=names_of(PARTS, "part"),
        default="speed,same,steps",
        help=",".join(PARTS),
    )
    parser.add_argument(
        "--shapes", default="131072x1,131072x4,32768x24", help="of the part steps"
    )
    parser.add_argument("--layers", type=int, default=4, help="of the part steps")
    parser.add_argument("--count", type=int, default=20, help="steps that are timed together")
    parser.add_argument(
        "--methods",
        nargs="*",
        type=named.cache,
        help="of the part acceptance; default: all that select, at budgets 1024, 256, 4096, and codes",
    )
    parser.add_argument(
        "--selections",
        nargs="*",
        type=lambda text: named.caches(marks=("verified+",))(text)[0],
        help="of the part selections; default: METHOD and verified+METHOD of several at a budget of 256",
    )
    parser.add_argument("--lengths", type=numbers, default=[4096, 16384, 31744])
    parser.add_argument("--acceptance-rows", type=int, default=4)
    parser.add_argument(
        "--parallel",
        type=int,
        default=8,
        help="methods whose programs compile at the same time, for acceptance and selections",
    )
    parser.add_argument(
        "--forced", type=int, default=128, help="tokens that are compared in a row"
    )
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--dtype", default=default_dtype())
    parser.add_argument("--quick", action="store_true", help="tiny sizes, for a CPU")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser


def main(args: Sequence[str] | None = None) -> None:
    parser = options()
    given = parser.parse_args(args)
    if given.quick:
        given.size, given.new, given.lengths = (640, 2), 24, [512]
        given.layers, given.count, given.forced, given.acceptance_rows = 2, 2, 24, 2
        given.shapes = "1024x2"
        given.method = "fier:budget=96"
    given.draft = SelfDraft(given.tokens, given.steps_per_selection)
    given.shapes = [shape(text) for text in given.shapes.split(",")]
    given.methods = given.methods or drafting_methods(
        (448,) if given.quick else (1024, 256, 4096)
    )
    given.selections = given.selections or [
        f"{when}{name}:budget={96 if given.quick else 256}"
        for name in ("fier", "quest", "pariskv", "exact")
        for when in ("", "verified+")
    ]
    sources = dict(text.split("=", 1) for text in given.text)
    sources = {name: Path(source) for name, source in sources.items()}
    if given.gsm8k:
        sources["gsm8k"] = given.gsm8k
    sources = sources or {"code": Path(kvjax.__file__).parent}
    directory = given.model_dir or models.shipped()
    about = {
        **provenance(),
        "model": {"name": directory.resolve().name, "digest": model_digest(directory)},
        "texts": {
            name: digest(path) if path.is_file() else path.name
            for name, path in sources.items()
        },
        "dtype": given.dtype,
    }
    keep = Rows(given.out, about, given.minutes)
    checkpoint, texts = None, {}
    if {"speed", "same", "acceptance", "selections"} & set(given.parts):
        checkpoint = models.load(directory, dtype=given.dtype)
        about["weight_bytes"] = nbytes(checkpoint.model).device
        texts = {name: token_stream(checkpoint, path) for name, path in sources.items()}
    if checkpoint is not None and {"speed", "same"} & set(given.parts):
        loops(checkpoint, texts, given, keep)
    if "steps" in given.parts:
        steps(given, keep)
    if checkpoint is not None and "acceptance" in given.parts:
        accepted_tokens(checkpoint, texts, given, keep)
    if checkpoint is not None and "selections" in given.parts:
        selections(checkpoint, texts, given, keep)


if __name__ == "__main__":
    main()
