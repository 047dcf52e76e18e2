"""Perplexity of long text by context length, each token decoded through the cache.

A passage of the text is split into a context and `steps` tokens that are scored. The context, but for its last token,
is stored as a prompt, which attends to itself exactly; then the true tokens are fed one at a time, so that every score
comes from a decode step that attends to what the cache chooses. Nothing is simulated by a mask, and what a method
forgets is forgotten.

The same tokens are scored at every length and by every cache: longer contexts begin earlier. So the ratio of two
caches is known far better than either perplexity: its standard error is that of the paired differences.

**Source:** the PG19 setting of FIER (2025) and Quest (2024). **Differs:** they score each token of a long text, at all
context lengths in one; here a point has one length.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from kvjax.attention import Cache, PerLayer, init, raise_on_overflow
from kvjax.evaluate import prompt
from kvjax.evaluate.plots import labels, new_figure, style
from kvjax.evaluate.provenance import digest, digest_json, provenance, replace_file
from kvjax.generation import Model
from kvjax.models import Checkpoint
from kvjax.request import check_fit
from kvjax.spec import CacheSpec, require_int

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Caches = Mapping[str, PerLayer | Callable[[Any], PerLayer]]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is scored, and with which budget."""

    lengths: tuple[int, ...]  # tokens of context
    steps: int = 256  # tokens scored in each passage
    passages: int = 1  # places in the text, spread evenly
    batch: int = 1  # passages that are read, and decoded, together
    budget: int | None = None  # tokens attended a step, at every length; or
    share: float | None = None  # budget as a share of the length: 0.11 of 4096 is 451

    def __post_init__(self) -> None:
        for name in ("steps", "passages", "batch"):
            require_int(f"Setting({name}=...)", getattr(self, name), at_least=1)
        if self.passages % self.batch:
            raise ValueError(f"batch={self.batch} does not divide passages={self.passages}; give a divisor of it")
        if not self.lengths:
            raise ValueError("Setting(lengths=...) needs one or more lengths of context")
        for length in self.lengths:
            require_int("Setting(lengths=...)", length, at_least=2)
        if self.budget is not None:
            require_int("Setting(budget=...)", self.budget, at_least=1)
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError(f"share must be in (0, 1], got {self.share}; 0.11 is 11 % of the context")
        if self.budget is not None and self.share is not None:
            raise ValueError("give only one of budget (tokens) and share (of the context)")

    def budget_at(self, length: int) -> int:
        if self.budget is not None:
            return self.budget
        if self.share is None:
            raise ValueError("give budget (tokens) or share (of the context): there are caches that need one")
        return max(1, round(self.share * length))


@dataclass(frozen=True)
class Cell:
    """What one cache made of the scored tokens after contexts of one length."""

    cache: str
    policies: str
    length: int  # tokens of context, of which the last is fed by the first decode step
    budget: int | None  # what the cache was asked for; None if it was given as it is
    nll: tuple[tuple[float, ...], ...]  # [passages][steps] nats
    attended: tuple[float, ...]  # tokens a step and kv head, by layer
    seconds: float  # of decoding, with compilation
    made: Mapping[str, Any]  # by which model, text, versions and device

    @property
    def perplexity(self) -> float:
        return math.exp(np.mean(self.nll))

    @property
    def stderr(self) -> float:
        """Of the perplexity, as if tokens were independent draws."""
        return self.perplexity * _stderr(np.asarray(self.nll))

    def ratio(self, other: Cell) -> tuple[float, float]:
        """This perplexity over that of another cache at the same length, and the ratio's standard error."""
        gap = np.asarray(self.nll) - np.asarray(other.nll)
        ratio = math.exp(np.mean(gap))
        return ratio, ratio * _stderr(gap)


def perplexity(
    checkpoint: Checkpoint,
    text: str | Sequence[int],
    caches: Caches,
    setting: Setting,
    *,
    out: Path | None = None,
    report: Callable[[Cell], None] | None = None,
) -> list[Cell]:
    """Every cache at every context length, lengths ascending.

    Args:
      text: text, before whose contexts stands what the tokenizer puts before a text (BOS), or token ids as they are.
      caches: by name. One that is a function, as most presets, is called with the budget of each length.
      out: JSON file that gets each cell as it is done. One that is there, made by the same, is not run again.
      report: is called with each cell as it is done.

    Raises:
      ValueError: a text that is too short, lengths beyond the model's positions, a budget that is missing or too
        small for a cache; before anything runs.
    """
    plan = prepare(checkpoint, text, caches, setting, dtype=checkpoint.model.dtype)
    return run(checkpoint, plan, out=out, report=report)


@dataclass(frozen=True)
class Plan:
    """Passages and caches, checked. `run` does the rest."""

    setting: Setting
    rows: Mapping[int, np.ndarray]  # i32[passages, length + steps] by length, ascending
    policies: Mapping[int, Mapping[str, PerLayer]]  # by length and name
    budgets: Mapping[int, Mapping[str, int | None]]


def prepare(
    checkpoint: Checkpoint, text: str | Sequence[int], caches: Caches, setting: Setting, *, dtype: DTypeLike
) -> Plan:
    """What `perplexity` does before it needs the weights: every error that can be known comes from here."""
    if not caches:
        raise ValueError("perplexity needs one or more caches")
    config, lengths, steps = checkpoint.config, sorted(set(setting.lengths)), setting.steps
    for length in lengths:
        check_fit(0, length - 1, steps, None, config.max_positions)
    prefix, ids = _tokens(checkpoint, text)
    starts = _places(len(ids), lengths[-1] - len(prefix), steps, setting.passages)
    if min(ids) < 0 or max(ids) >= config.vocab_size:
        raise ValueError(f"text has token ids {min(ids)} to {max(ids)}, but the vocabulary has {config.vocab_size}")
    rows, policies, budgets = {}, {}, {}
    for length in lengths:
        rows[length] = np.array([[*prefix, *ids[at - length + len(prefix) : at + steps]] for at in starts], np.int32)
        budgets[length] = {n: None if isinstance(c, PerLayer) else setting.budget_at(length) for n, c in caches.items()}
        policies[length] = {n: c if isinstance(c, PerLayer) else c(budgets[length][n]) for n, c in caches.items()}
        spec = CacheSpec(
            batch=setting.batch,
            q_heads=config.q_heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            capacity=prompt.columns(length - 1) + steps,
            dtype=dtype,
        )
        for policy in policies[length].values():
            jax.eval_shape(partial(init, policy, spec, layers=config.layers))  # says what it cannot hold
    return Plan(setting, rows, policies, budgets)


def run(
    checkpoint: Checkpoint,
    plan: Plan,
    *,
    out: Path | None = None,
    report: Callable[[Cell], None] | None = None,
) -> list[Cell]:
    """Scores what a plan asks for; see `perplexity`."""
    about = {
        "model": checkpoint.directory.resolve().name,
        "model_digest": digest(checkpoint.directory),
        "dtype": jnp.dtype(checkpoint.model.dtype).name,
        **provenance(),
    }
    cells: list[Cell] = []
    saved = _saved(out)
    for length, rows in plan.rows.items():
        made = {**about, "tokens_digest": digest_json(rows.tolist()), "steps": plan.setting.steps}
        here, budgets = plan.policies[length], plan.budgets[length]
        known = {name: _find(saved, name, policy, length, made) for name, policy in here.items()}
        found = {name: cell for name, cell in known.items() if cell is not None}
        missing = {name: policy for name, policy in here.items() if name not in found}
        for name, nll, attended, seconds in _score_all(checkpoint, rows, plan.setting, missing):
            cell = Cell(name, repr(here[name]), length, budgets[name], nll, attended, seconds, made)
            found[name] = cell
            saved = [*saved, cell]
            _save(out, saved)
            if report is not None:
                report(cell)
        cells += [found[name] for name in here]
    return cells


def _score_all(
    checkpoint: Checkpoint, rows: np.ndarray, setting: Setting, policies: Mapping[str, PerLayer]
) -> Iterator[tuple[str, tuple[tuple[float, ...], ...], tuple[float, ...], float]]:
    """Name, nll, attended and seconds of each policy. A context is read once, and stored into every cache."""
    steps, count = setting.steps, len(rows) // setting.batch
    context = rows.shape[1] - steps
    parts: dict[str, list[tuple[np.ndarray, np.ndarray, float]]] = {name: [] for name in policies}
    for part in np.split(rows, count) if policies else ():
        _, prompts = prompt.read(checkpoint, part[:, : context - 1].tolist())
        for name, policy in policies.items():
            begin = time.perf_counter()
            cache = prompt.store(checkpoint, prompts, policy, prompts.spec.capacity + steps)
            cache, nll, attended = _score(checkpoint.model, cache, part[:, context - 1 : -1], part[:, context:])
            raise_on_overflow(cache)
            parts[name].append((np.asarray(nll), np.asarray(attended), time.perf_counter() - begin))
            if len(parts[name]) == count:
                nlls, seen, seconds = zip(*parts.pop(name), strict=True)
                nats = tuple(tuple(row) for row in np.concatenate(nlls).tolist())
                yield name, nats, tuple(np.mean(seen, axis=0).tolist()), sum(seconds)


@partial(jax.jit, donate_argnames="cache")
def _score(model: Model, cache: Cache, fed: Array, targets: Array) -> tuple[Cache, Array, Array]:
    """Feeds i32[B, steps] token by token; nll f32[B, steps] of the targets, and tokens attended f32[L]."""

    def step(cache: Cache, tokens: tuple[Array, Array]) -> tuple[Cache, tuple[Array, Array]]:
        token, target = tokens
        logits, cache, infos = model(token[:, None], cache, last=True, info=True)
        score = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        seen = jnp.stack([jnp.mean(info.attended.astype(jnp.float32)) for info in infos])
        return cache, (jax.nn.logsumexp(logits, axis=-1) - score, seen)

    cache, (nll, seen) = lax.scan(step, cache, (fed.T, targets.T))
    return cache, nll.T, jnp.mean(seen, axis=0)


# -------------------------------------------------------------------------------------------------------------- results


def summarise(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """A row a cell: perplexity, and its ratio to that of the first cache at that length, with standard errors."""
    first = {cell.length: cell for cell in cells if cell.cache == cells[0].cache}
    rows = []
    for cell in cells:
        row = {
            "cache": cell.cache,
            "length": cell.length,
            "budget": cell.budget,
            "attended": float(np.mean(cell.attended)),
            "tokens": int(np.size(cell.nll)),
            "perplexity": cell.perplexity,
            "stderr": cell.stderr,
        }
        if cell.length in first:
            row["ratio"], row["ratio_stderr"] = cell.ratio(first[cell.length])
        rows.append(row)
    return rows


def markdown(cells: Sequence[Cell]) -> str:
    """A table: a row a cache, a column a context length; perplexity, and its change against the first cache."""
    lengths = sorted({cell.length for cell in cells})
    rows = {(row["cache"], row["length"]): row for row in summarise(cells)}
    lines = [
        f"| cache | {' | '.join(f'{length} tokens' for length in lengths)} |",
        "| --- |" + " ---: |" * len(lengths),
    ]
    for name in dict.fromkeys(cell.cache for cell in cells):
        shown = []
        for length in lengths:
            row = rows.get((name, length))
            change = "" if row is None or name == cells[0].cache or "ratio" not in row else _change(row)
            shown.append("" if row is None else f"{row['perplexity']:.2f}{change}")
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _change(row: Mapping[str, Any]) -> str:
    return f" ({100 * (row['ratio'] - 1):+.2f} ± {100 * row['ratio_stderr']:.2f} %)"


def figure(cells: Sequence[Cell]) -> Figure:
    """Perplexity by context length, a line a cache; beside it the change against the first cache, with error bars.

    Raises:
      ImportError: matplotlib is not installed.
    """
    rows, names = summarise(cells), list(dict.fromkeys(cell.cache for cell in cells))
    short = labels(names)
    lengths = sorted({cell.length for cell in cells})
    drawing = new_figure(9, 4.0 + 0.2 * -(-len(names) // 3))
    left, right = drawing.subplots(1, 2)
    for name in names:
        look = style(name, names)
        own = [row for row in rows if row["cache"] == name]
        left.plot(
            [row["length"] for row in own],
            [row["perplexity"] for row in own],
            label=short[name],
            markersize=4.5,
            **look,
        )
        paired = [row for row in own if name != names[0] and "ratio" in row]
        if paired:
            change = [100 * (row["ratio"] - 1) for row in paired]
            error = [100 * row["ratio_stderr"] for row in paired]
            right.errorbar([row["length"] for row in paired], change, error, markersize=4.5, capsize=3, **look)
    right.axhline(0, linewidth=1.1, **{**style(names[0], names), "marker": ""})
    left.set_ylabel("perplexity a token")
    right.set_ylabel(f"change against {names[0]}, %, ± standard error")
    drawing.legend(loc="outside lower center", ncols=3, frameon=False)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [str(length) for length in lengths])
        axis.minorticks_off()
        axis.set_xlabel("context, tokens")
        axis.grid(color="0.9", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return drawing


# ---------------------------------------------------------------------------------------------------------------- parts


def _stderr(x: np.ndarray) -> float:
    """Of the mean of x; nan of a single number."""
    return float(np.std(x, ddof=1) / math.sqrt(x.size)) if x.size > 1 else math.nan


def _tokens(checkpoint: Checkpoint, text: str | Sequence[int]) -> tuple[list[int], list[int]]:
    """What stands before every context, and the ids of the text."""
    if not isinstance(text, str):
        ids, prefix = [int(i) for i in text], []
    else:
        tokenizer = checkpoint.tokenizer
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        before = tokenizer.bos_token_id
        prefix = [before] if before is not None and before in tokenizer("")["input_ids"] else []
    if not ids:
        raise ValueError("the text is empty")
    return prefix, ids


def _places(have: int, context: int, steps: int, passages: int) -> list[int]:
    """Where the scored tokens of each passage begin: in the middles of equal parts of what has `context` before it.

    >>> _places(1000, 200, 100, 4)
    [287, 462, 637, 812]
    """
    span = have - steps - context
    wanted = context + steps if passages == 1 else context + steps * (passages + 1)
    if have < wanted:
        raise ValueError(
            f"the text has {have} tokens; {passages} passages of {steps} scored tokens after {context} need {wanted}: "
            "give a longer text, or fewer or shorter passages"
        )
    return [context + span * (2 * i + 1) // (2 * passages) for i in range(passages)]


def _find(cells: Sequence[Cell], name: str, policy: PerLayer, length: int, made: Mapping[str, Any]) -> Cell | None:
    """The cell that was made as one would be made now, the date aside."""
    for cell in cells:
        wanted = json.loads(json.dumps({**made, "date": cell.made["date"]}))
        if (cell.cache, cell.policies, cell.length, dict(cell.made)) == (name, repr(policy), length, wanted):
            return cell
    return None


def _saved(out: Path | None) -> list[Cell]:
    if out is None or not out.is_file():
        return []
    try:
        found = json.loads(out.read_text())["cells"]
        return [Cell(**{**c, "nll": tuple(map(tuple, c["nll"])), "attended": tuple(c["attended"])}) for c in found]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{out} is no result of a perplexity ({error!r}); move it away, or give another file"
        ) from None


def _save(out: Path | None, cells: Sequence[Cell]) -> None:
    if out is not None:
        replace_file(out, json.dumps({"cells": [asdict(cell) for cell in cells]}) + "\n")
