"""Runs a task through caches, decoding for real, and keeps what came in files that a later run goes on from.

Each batch of prompts is prefilled once and stored into every cache (see `kvjax.evaluate.prompt`); from there each cache
decodes for itself, by `kvjax.generation.decode`.

A result is a file for each cell, a task with a cache. Its name ends in a digest of everything that made it: examples,
policy, weights, dtype, versions and source of kvjax. So a file is never mistaken for another's, a run that was killed
goes on where it stopped, and a run in which anything changed begins anew. Files are replaced as wholes after each
batch.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.attention import Cache, PerLayer, init
from kvjax.caches import Policy
from kvjax.evaluate import prompt
from kvjax.evaluate.provenance import digest, digest_json, provenance
from kvjax.evaluate.store import Cell, Progress, read_cell
from kvjax.evaluate.tasks.protocol import Example, Task
from kvjax.generation import decode
from kvjax.models import Checkpoint
from kvjax.spec import CacheSpec, require_int

FORMAT = 1  # of the files, and of what the runner does with a prompt and an answer
CAPACITY_STEP = 128  # capacities are multiples of it, so that near lengths share programs
PIECE = 32  # tokens, at most, decoded between two looks for the end of an answer


@dataclass(frozen=True)
class Plan:
    """A task and caches, checked, with what files hold of them already. `run` does the rest."""

    task: Task
    policies: Mapping[str, PerLayer]
    prompts: Mapping[str, tuple[int, ...]]  # by example, in the order of their lengths
    examples: Mapping[str, Example]
    cells: Mapping[str, Cell]  # by cache

    @property
    def total(self) -> int:
        return len(self.prompts) * len(self.cells)

    @property
    def capacity(self) -> int:
        """Tokens that a cache must hold for the longest example."""
        return _capacity(max(map(len, self.prompts.values())), self.task.max_new_tokens)

    @property
    def done(self) -> int:
        return sum(len(cell.examples) for cell in self.cells.values())


def evaluate(
    checkpoint: Checkpoint,
    task: Task,
    caches: Mapping[str, PerLayer | Policy],
    *,
    batch: int = 8,
    out: Path | None = None,
    progress: Progress | None = None,
) -> list[Cell]:
    """Asks a model everything that a task has, through each cache, and scores the answers.

    Decodes greedily. `caches` maps a name for tables to policies; what stands before "@" in a name is the method.
    With `out`, results go there, and those that are there already are not made again. `batch` prompts of near lengths
    are decoded together; they are padded to one of four sizes an octave, so that few programs are compiled. At a time,
    the queries, keys and values of a batch of whole prompts are held, and one cache.

    Raises:
      ValueError: before anything runs, for prompts that the model has no positions for (unless the task has a true
        `truncate`: then they lose their middle, as in LongBench), or a policy that cannot hold this model.
    """
    plan = prepare(checkpoint, task, caches, dtype=checkpoint.model.dtype, out=out)
    return run(checkpoint, plan, batch=batch, progress=progress)


def prepare(
    checkpoint: Checkpoint,
    task: Task,
    caches: Mapping[str, PerLayer | Policy],
    *,
    dtype: Any,
    out: Path | None = None,
    model_digest: str | None = None,
    resume: bool = True,
) -> Plan:
    """What `evaluate` does before it needs the weights: every error that can be known comes from here.

    `model_digest`, of the checkpoint's directory, spares reading it; without `resume`, files in `out` are replaced.
    """
    if not caches:
        raise ValueError("evaluate needs at least one cache")
    policies = {name: c if isinstance(c, PerLayer) else PerLayer((), c) for name, c in caches.items()}
    examples = list(task.examples(checkpoint.tokenizer))
    ids = [example.id for example in examples]
    if not ids or len(set(ids)) < len(ids):
        raise ValueError(f"the task {task.name} has {len(ids)} examples with {len(set(ids))} ids; each needs its own")
    prompts = {example.id: _encode(checkpoint, task, example) for example in examples}
    order = sorted(range(len(ids)), key=lambda i: len(prompts[ids[i]]))

    config, dtype = checkpoint.config, jnp.dtype(dtype)
    longest = len(prompts[ids[order[-1]]])
    spec = CacheSpec(
        batch=1,
        q_heads=config.q_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        capacity=_capacity(longest, task.max_new_tokens),
        dtype=dtype,
    )
    for policy in policies.values():
        jax.eval_shape(partial(init, policy, spec, layers=config.layers))

    made = provenance()
    common = {
        "format": FORMAT,
        "task": dict(task.key()),
        "max_new_tokens": task.max_new_tokens,
        "stop": list(task.stop),
        "examples": digest_json([(i, prompts[i], examples[n].answers) for n, i in enumerate(ids)]),
        "model": digest(checkpoint.directory) if model_digest is None else model_digest,
        "stop_tokens": list(checkpoint.stop_tokens),
        "dtype": dtype.name,
        **{name: made.pop(name) for name in ("versions", "source", "python", "backend", "device")},
    }
    sizes = ("layers", "q_heads", "kv_heads", "head_dim", "vocab_size", "max_positions")
    model = {"name": checkpoint.directory.resolve().name, **{name: getattr(config, name) for name in sizes}}
    cells = {}
    for name, policy in policies.items():
        head = {"model": model, "budget": getattr(policy.rest, "budget", None), **made}
        cell = Cell(task.name, task.metric, name, {**common, "policy": repr(policy)}, head, len(ids), None)
        if out is not None:
            file = re.sub(r"[^\w.@=-]+", "-", f"{task.name} {name} {cell.digest[:16]}")
            cell.path = Path(out) / f"{file}.json"
            if resume and cell.path.exists():
                found = read_cell(cell.path)
                if found.digest != cell.digest:
                    raise ValueError(f"{cell.path} was changed by hand: its key is not that of its name; delete it")
                cell.batches = _rescored(found, task, examples)
        cells[name] = cell
    by_id = {example.id: example for example in examples}
    return Plan(task, policies, {ids[i]: prompts[ids[i]] for i in order}, by_id, cells)


def _rescored(cell: Cell, task: Task, examples: Sequence[Example]) -> list[dict[str, Any]]:
    """The batches of a file by the task's present rule: its answers stay, its scores may be of another version."""
    asked = {example.id: example for example in examples}
    for example in cell.examples:
        example["score"] = task.score(asked[example["id"]], example["answer"])
    return cell.batches


def run(
    checkpoint: Checkpoint,
    plan: Plan,
    *,
    batch: int = 8,
    capacity: int | None = None,
    progress: Progress | None = None,
) -> list[Cell]:
    """Answers what a plan leaves open; see `evaluate`. The cells come in the order of the caches.

    `capacity`, of all caches, is by default what each batch needs. Plans that share the largest `plan.capacity` share
    the programs that decode: where compiling costs more than empty slots do, as for a small model on a GPU.
    """
    batch = min(require_int("evaluate(batch=...)", batch, at_least=1), len(plan.prompts))
    ids = list(plan.prompts)
    known = {name: {example["id"] for example in cell.examples} for name, cell in plan.cells.items()}
    for first in range(0, len(ids), batch):
        part = ids[first : first + batch]
        open_cells = [name for name in plan.cells if not known[name].issuperset(part)]
        if not open_cells:
            continue
        if progress is not None:
            progress(plan.done, plan.total, f"prefill of {len(part)} prompts")
        rows = [plan.prompts[i] for i in part] + [()] * (batch - len(part))
        logits, prompts = jax.block_until_ready(prompt.read(checkpoint, rows))
        needed = _capacity(prompts.spec.capacity, plan.task.max_new_tokens)
        for name in open_cells:
            if progress is not None:
                progress(plan.done, plan.total, name)
            begin = time.perf_counter()
            asked = np.array([i not in known[name] for i in part] + [False] * (batch - len(part)))
            held = prompt.store(checkpoint, prompts, plan.policies[name], capacity or needed)
            answers, attended, steps = _decode(checkpoint, held, logits, plan.task, asked)
            plan.cells[name].batches.append(
                {
                    "examples": [_result(plan, i, answers[row]) for row, i in enumerate(part) if asked[row]],
                    "attended_by_layer": attended,
                    "steps": steps,
                    "seconds": round(time.perf_counter() - begin, 3),
                }
            )
            plan.cells[name].save()
    if progress is not None:
        progress(plan.done, plan.total, "")
    return list(plan.cells.values())


def _result(plan: Plan, name: str, answer: tuple[str, int]) -> dict[str, Any]:
    example, (text, new_tokens) = plan.examples[name], answer
    return {
        "id": name,
        "fields": dict(example.fields),
        "prompt_tokens": len(plan.prompts[name]),
        "answers": list(example.answers),
        "answer": text,
        "new_tokens": new_tokens,
        "score": float(plan.task.score(example, text)),
    }


# ---------------------------------------------------------------------------------------------------------------- parts


def _encode(checkpoint: Checkpoint, task: Task, example: Example) -> tuple[int, ...]:
    """Token ids of a prompt, short enough for the model to answer."""
    tokenizer, positions = checkpoint.tokenizer, checkpoint.config.max_positions
    chat = task.chat and tokenizer.chat_template is not None

    def encode(text: str) -> list[int]:
        return checkpoint.apply_chat(text) if chat else list(tokenizer(text)["input_ids"])

    given = example.prompt
    ids = encode(given) if isinstance(given, str) else list(given)
    room = len(ids) if positions is None else positions - task.max_new_tokens
    if len(ids) > room and (room < 2 or not getattr(task, "truncate", False)):
        raise ValueError(
            f"{task.name}, example {example.id}: {len(ids)} prompt + {task.max_new_tokens} new tokens do not fit in "
            f"the model's {positions} positions; ask for shorter examples"
        )
    keep = room
    while len(ids) > room:  # what a template adds, and how the halves tokenize anew, shows when they are put together
        if isinstance(given, str):
            text = tokenizer(given, add_special_tokens=False)["input_ids"]
            head, tail = (tokenizer.decode(half, skip_special_tokens=True) for half in _halves(text, keep))
            ids = encode(head + tail)
        else:
            head, tail = _halves(list(given), keep)
            ids = head + tail
        keep -= max(1, len(ids) - room)
    if not ids:
        raise ValueError(f"{task.name}, example {example.id}: the prompt is empty")
    return tuple(ids)


def _halves(ids: list[int], keep: int) -> tuple[list[int], list[int]]:
    """The first and the last tokens, `keep` in all."""
    return ids[: keep - keep // 2], ids[len(ids) - keep // 2 :]


def _capacity(tokens: int, new: int) -> int:
    return -(-(prompt.columns(tokens) + new) // CAPACITY_STEP) * CAPACITY_STEP


def _decode(
    checkpoint: Checkpoint, cache: Cache, logits: Array, task: Task, active: np.ndarray
) -> tuple[list[tuple[str, int]], list[float], int]:
    """Answer and number of tokens of each row; tokens attended a step, by layer, and the steps they are the mean of."""
    tokenizer, stop_tokens = checkpoint.tokenizer, set(checkpoint.stop_tokens)
    found: list[list[int]] = [[] for _ in active]
    texts = [""] * len(found)
    attended, steps, left = np.zeros(len(cache.layers)), 0, task.max_new_tokens
    even = -(-left // -(-left // PIECE))  # one program for all pieces
    while left and active.any():
        piece = min(left, even)
        done = decode(
            checkpoint.model, cache, logits, max_new_tokens=piece, active=active, stop_tokens=stop_tokens, measure=True
        )
        cache, logits, left = done.cache, done.logits, left - piece
        new = int(done.lengths.sum())
        assert done.attended is not None
        attended, steps = attended + done.attended * new, steps + new
        active = active.copy()
        for row in np.flatnonzero(active):
            found[row] += done.rows[row]
            texts[row], ended = cut(tokenizer.decode(found[row], skip_special_tokens=True), task.stop)
            active[row] = not (ended or found[row][-1] in stop_tokens)
    return list(zip(texts, map(len, found), strict=True)), (attended / max(steps, 1)).tolist(), steps


def cut(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """What stands before the first of the texts `stop`, and whether there was one.

    >>> cut("42. So", ["\\n", "."])
    ('42', True)
    """
    ends = [at for s in stop if (at := text.find(s)) >= 0]
    return (text[: min(ends)], True) if ends else (text, False)
