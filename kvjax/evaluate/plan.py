"""Runs a plan: prefills each batch of prompts once, stores it in every cache, and decodes from
each cache.

An `Answer` function says how: `accuracy.answer` decodes freely, `perplexity.score` feeds the
true continuation. The last tokens of a prompt may be fed one step at a time through the cache,
as a question that comes after the cache has evicted tokens of the prompt. Caches may decode in
threads, because compiling takes most of the time of a short task.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.cache.cache import Cache
from kvjax.evaluate import prompt
from kvjax.evaluate.caches import Row, check_rows
from kvjax.evaluate.provenance import digest_json, model_digest, own_digest, provenance
from kvjax.evaluate.store import FORMAT, Cell, Progress
from kvjax.evaluate.tasks import Example, Task
from kvjax.evaluate.tasks.checking import examples_of, key_of, score_of
from kvjax.generation.loops import check_finite, has_no_best
from kvjax.memory import on_host
from kvjax.models import Checkpoint
from kvjax.policies import PerLayer
from kvjax.spec import padded_capacity, require_int

T = TypeVar("T")
CPU_LAYERS = 480  # layers of caches whose programs a process holds on a CPU; see `run`


@dataclass(frozen=True)
class Plan:
    """A task and its caches, checked, with the results that files already have. `run` does the
    rest.
    """

    task: Task
    policies: Mapping[str, PerLayer]  # of the caches that can be run
    # Prefilled tokens by example, in the order of their lengths.
    prompts: Mapping[str, tuple[int, ...]]
    fed: Mapping[str, tuple[int, ...]]  # tokens that follow them one step at a time
    examples: Mapping[str, Example]
    cells: Mapping[str, Cell]  # by cache; those that were refused have no policy
    notes: Mapping[str, str]  # by cache: a budget that was rounded down

    @property
    def total(self) -> int:
        return len(self.prompts) * len(self.policies)

    @property
    def capacity(self) -> int:
        """Tokens that a cache must hold for the longest example."""
        return _capacity(max(map(len, self.prompts.values())), self.new_tokens)

    @property
    def new_tokens(self) -> int:
        """Tokens that follow a prefilled prompt, at most: those that are fed, and the answer."""
        return max(map(len, self.fed.values())) + self.task.max_new_tokens

    @property
    def done(self) -> int:
        return sum(len(cell.examples) for cell in self.cells.values())


# Takes (checkpoint, cache, logits f32[B, V], plan, the example id of each row or None), and
# returns results by id, mean tokens read by layer, and the row steps of that mean.
Answer = Callable[
    [Checkpoint, Cache, Array, Plan, Sequence[str | None]],
    tuple[Mapping[str, dict[str, Any]], list[float], int],
]


def prepare(
    checkpoint: Checkpoint,
    task: Task,
    rows: Sequence[Row],
    *,
    dtype: Any,
    out: Path | None = None,
    model: str | None = None,
    resume: bool = True,
) -> Plan:
    """Makes a plan and checks everything that needs no weights, so that mistakes raise here.

    `model` is the digest of the checkpoint's directory, computed if None. Without `resume`,
    files in `out` are replaced.

    Raises:
      ValueError: prompts that the model has no positions for, examples without unique ids, a
        damaged result, or no cache that can hold the model. If only some caches cannot, their
        cells say why.
    """
    examples = examples_of(task, checkpoint.tokenizer, vocabulary=checkpoint.config.vocab_size)
    ids = [example.id for example in examples]
    if not ids or len(set(ids)) < len(ids):
        raise ValueError(
            f"the task {task.name} has {len(ids)} examples with {len(set(ids))} ids; each needs its own"
        )
    prompts = {example.id: _encode(checkpoint, task, example) for example in examples}
    fed = {example.id: tuple(example.question) for example in examples}
    order = sorted(range(len(ids)), key=lambda i: len(prompts[ids[i]]))

    config = checkpoint.config
    dtype = jnp.dtype(dtype)
    new = max(map(len, fed.values())) + task.max_new_tokens
    spec = config.spec(1, _capacity(len(prompts[ids[order[-1]]]), new), dtype)
    if not rows:
        raise ValueError("a comparison needs at least one cache")
    rows = check_rows(rows, spec, config)
    common = {
        "format": FORMAT,
        "kvjax": provenance()["versions"]["kvjax"],
        "model": model_digest(checkpoint.directory) if model is None else model,
        "dtype": dtype.name,
        "task": {
            **key_of(task),
            "max_new_tokens": task.max_new_tokens,
            "stop": list(task.stop),
            "stop_tokens": list(checkpoint.stop_tokens),
            "examples": digest_json(
                [(i, prompts[i], fed[i], examples[n].answers) for n, i in enumerate(ids)]
            ),
        },
    }
    sizes = ("layers", "q_heads", "kv_heads", "head_dim", "vocab_size", "max_positions")
    about = {
        "name": checkpoint.directory.resolve().name,
        **{name: getattr(config, name) for name in sizes},
    }
    cells = {}
    by_id = {example.id: example for example in examples}
    for row in rows:
        head = {
            "model": about,
            "budget": row.budget,
            "dense_layers": row.dense_layers,
            "note": row.note,
        }
        key = {**common, "policy": repr(row.policies)}
        if own := own_digest(row.policies):
            key["own"] = own
        cell = Cell(task.name, task.metric, row.name, key, head, len(ids), refused=row.refused)
        if out is not None and not row.refused:
            cell.open(out, by_id.keys(), resume=resume)
            # Results stay; a score may be that of an earlier version of the task.
            for example in cell.examples:
                if "answer" in example:
                    example["score"] = score_of(task, by_id[example["id"]], example["answer"])
        cells[row.name] = cell
    policies = {row.name: row.policies for row in rows if row.policies is not None}
    notes = {row.name: row.note for row in rows if row.note}
    return Plan(
        task, policies, {ids[i]: prompts[ids[i]] for i in order}, fed, by_id, cells, notes
    )


def run(
    checkpoint: Checkpoint,
    plan: Plan,
    answer: Answer,
    *,
    batch: int = 8,
    parallel: int = 1,
    capacity: int | None = None,
    progress: Progress | None = None,
) -> list[Cell]:
    """Answers the examples that a plan still lacks. Returns the cells in the order of the
    caches, also refused ones.

    `parallel` caches decode at the same time, in threads: context managers of JAX, such as
    `jax.default_device`, do not reach them. Device memory then holds as many caches. `capacity`
    is that of all caches, by default what each batch needs; plans that get the same one share
    their decode programs. On a CPU more than `CPU_LAYERS` layers of caches are answered in
    groups, each of which reads the prompts again, as the programs of more take too many memory
    mappings.
    """
    batch = min(require_int("batch", batch, at_least=1), len(plan.prompts))
    require_int("parallel", parallel, at_least=1)
    ids = list(plan.prompts)
    source = provenance()

    def report(what: str) -> None:
        if progress is not None:
            progress(plan.done, plan.total, what)

    known = {
        name: {example["id"] for example in plan.cells[name].examples} for name in plan.policies
    }
    names = list(plan.policies)
    size = len(plan.policies)
    if jax.default_backend() == "cpu":
        size = max(1, CPU_LAYERS // checkpoint.config.layers)
    for group, first in product(range(0, len(names), size), range(0, len(ids), batch)):
        if size < len(names) and not first:
            jax.clear_caches()
        part = ids[first : first + batch]
        open_cells = [
            name for name in names[group : group + size] if not known[name].issuperset(part)
        ]
        if not open_cells:
            continue
        report(f"prefill of {len(part)} prompts")
        rows = [plan.prompts[i] for i in part] + [()] * (batch - len(part))
        logits, prompts = jax.block_until_ready(prompt.read(checkpoint, rows, plan.new_tokens))
        needed = _capacity(prompts.spec.capacity, plan.new_tokens)
        one = partial(
            _answer_part,
            checkpoint,
            plan,
            answer,
            (logits, prompts),
            part,
            known,
            capacity or needed,
        )
        found = _map(one, open_cells, parallel)
        for name in open_cells:
            report(name)
            results = next(found)
            cell = plan.cells[name]
            cell.add(results, source)
            known[name] = {example["id"] for example in cell.examples}
        del logits, prompts, one, found  # before the next prompts are read
    report("")
    return list(plan.cells.values())


def feed(
    checkpoint: Checkpoint,
    cache: Cache,
    logits: Array,
    fed: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]] | None = None,
    *,
    room: int | None = None,
) -> prompt.Fed:
    """Feeds each row its own tokens one step at a time; see `prompt.feed`. Calls of the same
    `room` share a program.
    """
    counts = np.array([len(row) for row in fed], np.int32)
    tokens = np.zeros((len(fed), max(room or 0, int(counts.max()))), np.int32)
    wanted = tokens.copy()
    for to, rows in ((tokens, fed), (wanted, fed if targets is None else targets)):
        for padded, row in zip(to, rows, strict=True):
            padded[: len(row)] = row
    done = prompt.feed(checkpoint.model, cache, logits, tokens, wanted, counts)
    asked = np.array([len(row) > 0 for row in (fed if targets is None else targets)])
    check_finite(asked & on_host(has_no_best(done.logits)), "after the tokens that are scored")
    return done


# ---------------------------------------------------------------------------------------------------------------- parts


def _answer_part(
    checkpoint: Checkpoint,
    plan: Plan,
    answer: Answer,
    read: tuple[Array, Cache],
    part: Sequence[str],
    known: Mapping[str, Collection[str]],
    capacity: int,
    name: str,
) -> dict[str, Any]:
    """One batch of a cell: the answers of the cache `name` after the prompts `read`, to the
    examples `part` except those that are `known`."""
    begin = time.perf_counter()
    logits, prompts = read
    asked = [i if i not in known[name] else None for i in part] + [None] * (
        logits.shape[0] - len(part)
    )
    cache = prompt.store(
        checkpoint, prompts.layers, plan.policies[name], capacity, prompts.rotated_for
    )
    answers, attended, steps = answer(checkpoint, cache, logits, plan, asked)
    tokens = {i: len(plan.prompts[i]) + len(plan.fed[i]) for i in answers}
    results = [{"id": i, "prompt_tokens": tokens[i], **result} for i, result in answers.items()]
    seconds = round(time.perf_counter() - begin, 3)
    return {
        "examples": results,
        "attended_by_layer": attended,
        "steps": steps,
        "seconds": seconds,
    }


def _map(f: Callable[[str], T], names: Sequence[str], parallel: int) -> Iterator[T]:
    """Yields f of each name in order, running `parallel` of them at a time. An error is raised
    at once, and no other call begins after it: a call that waits for memory may wait forever.
    """
    if parallel == 1:
        yield from map(f, names)
        return
    pool = ThreadPoolExecutor(parallel)
    futures = [pool.submit(copy_context().run, f, name) for name in names]
    try:
        for future in futures:
            while not future.done():
                for other in futures:
                    if other.done() and (error := other.exception()):
                        raise error
                wait(
                    [other for other in futures if not other.done()],
                    return_when=FIRST_COMPLETED,
                )
            yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _encode(checkpoint: Checkpoint, task: Task, example: Example) -> tuple[int, ...]:
    """Token ids of a prompt, if the model has positions for it and its answer."""
    tokenizer = checkpoint.tokenizer
    positions = checkpoint.config.max_positions
    given = example.prompt
    chat = task.chat and tokenizer.chat_template is not None
    if not isinstance(given, str):
        ids = list(given)
    else:
        ids = checkpoint.apply_chat(given) if chat else list(tokenizer(given)["input_ids"])
    new = len(example.question) + task.max_new_tokens
    if positions is not None and len(ids) > positions - new:
        raise ValueError(
            f"{task.name}, example {example.id}: {len(ids)} prompt + {new} new tokens do not fit in "
            f"the model's {positions} positions; ask for shorter examples"
        )
    if not ids:
        raise ValueError(f"{task.name}, example {example.id}: the prompt is empty")
    return tuple(ids)


def _capacity(tokens: int, new: int) -> int:
    return padded_capacity(prompt.columns(tokens) + new)
