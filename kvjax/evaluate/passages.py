"""Perplexity of long text by context length, each token decoded through the cache.

A passage of the text is split into a context and `steps` tokens that are scored. The context,
except for its last token, is stored as a prompt, which attends to itself exactly; then the true
tokens are fed one at a time, so that every score comes from a decode step. The same tokens are
scored at every length and by every cache: longer contexts begin earlier. So the ratio of two
caches is known far better than either: its standard error is that of paired differences.

**Source:** the PG19 setting of FIER (2025) and Quest (2024). **Differs:** they score every
token of a long text, so all context lengths go into one number; here a point has one context
length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jax import Array
from jax.typing import DTypeLike

from kvjax.cache.cache import Cache, raise_on_overflow
from kvjax.evaluate import plots
from kvjax.evaluate.caches import DENSE_LAYERS, Caches, make_rows, read_caches, without_budget
from kvjax.evaluate.plan import Plan, feed
from kvjax.evaluate.plan import prepare as prepare_one
from kvjax.evaluate.plan import run as run_one
from kvjax.evaluate.provenance import digest_json, json_text, model_digest, replace_file
from kvjax.evaluate.report import about, markdown_table, refusals
from kvjax.evaluate.store import Cell, Progress
from kvjax.evaluate.tasks import Example
from kvjax.evaluate.tasks.haystack import first_tokens
from kvjax.models import Checkpoint
from kvjax.spec import keep_ints, one_or_several, require_int

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Which parts of the text are scored, and the budget."""

    lengths: tuple[int, ...]  # tokens of context
    steps: int = 256  # tokens scored in each passage
    passages: int = 1  # evenly spaced in the text, or in each of several texts
    batch: int = 1  # passages prefilled and decoded together
    # tokens read per step, at every length, for caches that set none, also several; or
    budget: int | tuple[int, ...] | None = None
    share: float | None = None  # that budget as a share of the length: 0.11 of 4096 is 451

    def __post_init__(self) -> None:
        keep_ints(self, steps=1, passages=1, batch=1)
        one_or_several("Setting(budget=...)", self.budget)
        if not self.lengths:
            raise ValueError("Setting(lengths=...) needs one or more lengths of context")
        for length in self.lengths:
            require_int("Setting(lengths=...)", length, at_least=2)
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError(
                f"share must be in (0, 1], got {self.share}; 0.11 is 11 % of the context"
            )
        if self.budget is not None and self.share is not None:
            budget = ",".join(map(str, one_or_several("budget", self.budget) or ()))
            raise ValueError(
                f"got budget={budget} and share={self.share}; give only one of budget (tokens) and share (of the "
                "context)"
            )

    def budgets_at(self, length: int) -> tuple[int, ...]:
        """The budgets of a context of `length` tokens."""
        if (budgets := one_or_several("budget", self.budget)) is not None:
            return budgets
        if self.share is None:
            raise ValueError(
                "give budget (tokens) or share (of the context): some caches need a budget"
            )
        return (max(1, round(self.share * length)),)


@dataclass(frozen=True)
class Passages:
    """A task: the tokens of each passage, of which the last `steps` are scored."""

    rows: tuple[tuple[int, ...], ...]  # context and scored tokens of each passage
    steps: int
    texts: tuple[str, ...] = ()  # names of the texts, if there are several

    metric = "perplexity"
    max_new_tokens = 0
    stop = ()
    chat = False

    @property
    def length(self) -> int:
        """Tokens of context, of which the last is fed by the first step."""
        return len(self.rows[0]) - self.steps

    @property
    def name(self) -> str:
        return f"perplexity after {self.length} tokens"

    def key(self) -> Mapping[str, Any]:
        names = {"texts": list(self.texts)} if self.texts else {}
        return {
            "title": "perplexity",
            "length": self.length,
            "steps": self.steps,
            "tokens": digest_json(self.rows),
            **names,
        }

    def examples(self, tokenizer: Any) -> list[Example]:
        last = self.length - 1
        return [
            Example(str(i), row[:last], (), {}, row[last:-1]) for i, row in enumerate(self.rows)
        ]

    def targets(self, number: str) -> tuple[int, ...]:
        """The tokens that are scored: each follows the one that was fed."""
        return self.rows[int(number)][self.length :]

    def score(self, example: Example, answer: str) -> float:
        raise NotImplementedError("a passage is scored token by token")


Text = str | Sequence[int] | Mapping[str, str]


def perplexity(
    checkpoint: Checkpoint,
    text: Text,
    caches: Caches,
    setting: Setting,
    *,
    dense_layers: int | None = DENSE_LAYERS,
    parallel: int = 1,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> list[Cell]:
    """Measures the perplexity of a text with every cache at every context length; lengths
    ascend.

    Args:
      text: a text, whose contexts begin with BOS if the tokenizer adds it; token ids, used as
        they are; or several texts by name, such as the books of PG19, each with its own
        passages. Several texts may include some that are too short for the longest context,
        which are left out.
      caches: names such as "fier:group=16" or "mine.py:mine", policies, or functions of a budget,
        in a list or by name; those that have a budget and do not set it get the setting's.
      dense_layers: number of first layers that attend to everything, for all caches that do not
        set their own.
      parallel: caches that decode at the same time.
      out: folder for results, one file per cell, and a table and plots of them, as
        `kvjax perplexity --out` writes them. Existing results with the same key are not run again.

    Raises:
      ValueError: a text that is too short, lengths beyond the model's positions, or a budget
        that is missing, too small for every cache or taken by none; before anything runs.
    """
    dtype = checkpoint.model.dtype
    results = None if out is None else Path(out) / "results"
    plans = prepare(
        checkpoint, text, caches, setting, dtype=dtype, dense_layers=dense_layers, out=results
    )
    cells = run(checkpoint, plans, batch=setting.batch, parallel=parallel, progress=progress)
    if out is not None:
        write(cells, Path(out))
    return cells


def prepare(
    checkpoint: Checkpoint,
    text: Text,
    caches: Caches,
    setting: Setting,
    *,
    dtype: DTypeLike,
    dense_layers: int | None = DENSE_LAYERS,
    out: Path | None = None,
) -> list[Plan]:
    """Makes a plan for each length: the part of `perplexity` that needs no weights, with all
    its errors.
    """
    config = checkpoint.config
    lengths = sorted(set(setting.lengths))
    steps = setting.steps
    positions = lengths[-1] - 1 + steps
    limit = config.max_positions
    if limit is not None and positions > limit:
        shorter = f"a length of at most {limit + 1 - steps}, or " if steps <= limit else ""
        raise ValueError(
            f"a length of {lengths[-1]} tokens and {steps} steps need {positions} positions, and the model has "
            f"{limit}; use {shorter}fewer steps"
        )
    names, passages = _passages(checkpoint, text, setting, lengths[-1])
    model = model_digest(checkpoint.directory)
    plans = []
    for length in lengths:
        rows = tuple(
            (*prefix, *ids[at - length + len(prefix) : at + steps])
            for prefix, ids, at in passages
        )
        asked = make_rows(
            caches, budgets=_budgets(setting, caches, length), dense_layers=dense_layers
        )
        task = Passages(tuple(tuple(map(int, row)) for row in rows), steps, names)
        plans.append(prepare_one(checkpoint, task, asked, dtype=dtype, out=out, model=model))
    return plans


def run(
    checkpoint: Checkpoint,
    plans: Sequence[Plan],
    *,
    batch: int = 1,
    parallel: int = 1,
    progress: Progress | None = None,
) -> list[Cell]:
    """Scores what the plans still lack; see `perplexity`, and `kvjax.evaluate.plan.run` for
    `parallel`.
    """
    cells = []
    total = sum(plan.total for plan in plans)
    before = 0
    for plan in plans:

        def advance(
            done: int, of: int, what: str, before: int = before, name: str = plan.task.name
        ) -> None:
            if progress is not None:
                progress(before + done, total, f"{name}, {what}" if what else name)

        cells += run_one(
            checkpoint, plan, score, batch=batch, parallel=parallel, progress=advance
        )
        before += plan.total
    return cells


def score(
    checkpoint: Checkpoint, cache: Cache, logits: Array, plan: Plan, asked: Sequence[str | None]
) -> tuple[Mapping[str, dict[str, Any]], list[float], int]:
    """Nats of each scored token by passage; mean tokens read by layer, and the row steps of
    that mean.
    """
    task = plan.task
    assert isinstance(task, Passages)
    fed = [() if i is None else plan.fed[i] for i in asked]
    targets = [() if i is None else task.targets(i) for i in asked]
    done = feed(checkpoint, cache, logits, fed, targets, room=task.steps)
    raise_on_overflow(done.cache)
    nll = np.asarray(done.nll).tolist()
    found = {i: {"nll": nll[row]} for row, i in enumerate(asked) if i is not None}
    return found, np.asarray(done.attended).tolist(), int(done.steps)


# -------------------------------------------------------------------------------------------------------------- results


def nats(cell: Cell) -> np.ndarray:
    """f64[passages, steps], passages in the order of the text."""
    return np.array(
        [example["nll"] for example in sorted(cell.examples, key=lambda e: int(e["id"]))],
        np.float64,
    )


def mean_perplexity(cell: Cell) -> tuple[float, float]:
    """The perplexity per token, and its standard error as if tokens were independent."""
    found = nats(cell)
    mean = math.exp(found.mean())
    return mean, mean * _stderr(found)


def ratio(cell: Cell, other: Cell) -> tuple[float, float]:
    """The perplexity of one cell over that of another at the same length, and the ratio's
    standard error.
    """
    gap = nats(cell) - nats(other)
    found = math.exp(np.mean(gap))
    return found, found * _stderr(gap)


def summarise(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """A row for each cell with results: perplexity, and its ratio to the first cache's at that
    length, with standard errors; `tokens_read` is the mean over steps, KV heads and all layers.
    """
    first = _baselines(cells)
    rows = []
    for cell in _done(cells):
        found, error = mean_perplexity(cell)
        row = {
            "cache": cell.method,
            "length": _length(cell),
            "budget": cell.budget,
            "tokens_read": cell.tokens_read,
            "tokens": int(nats(cell).size),
            "perplexity": found,
            "stderr": error,
        }
        if _length(cell) in first:
            row["ratio"], row["ratio_stderr"] = ratio(cell, first[_length(cell)])
        rows.append(row)
    return rows


def document(cells: Sequence[Cell]) -> dict[str, Any]:
    """`summarise`, with the model and the provenance of the results; JSON."""
    return {**about(cells), "rows": summarise(cells)}


def markdown(cells: Sequence[Cell]) -> str:
    """A table with a row for each cache and context length: perplexity, and its change against
    the first cache.

    Caches that were refused follow, each with its reason.
    """
    lines = []
    first = _baselines(cells)
    for cell, row in zip(_done(cells), summarise(cells), strict=True):
        change = ""
        if cell is not first.get(_length(cell)) and "ratio" in row:
            change = f"{100 * (row['ratio'] - 1):+.2f} ± {100 * row['ratio_stderr']:.2f} %"
        budget = "all" if row["budget"] is None else str(row["budget"])
        read = f"{row['tokens_read']:.0f}"
        found = f"{row['perplexity']:.2f}"
        lines.append([f"`{row['cache']}`", str(row["length"]), budget, read, found, change])
    head = [
        "cache",
        "context",
        "budget",
        "tokens read",
        "perplexity",
        f"against {_label(cells[0], cells)}",
    ]
    return markdown_table(head, lines) + refusals(cells)


def write(cells: Sequence[Cell], out: Path) -> list[Path]:
    """Writes table.md, summary.json and, with matplotlib, a plot to `out`; returns their paths."""
    written = [out / "table.md", out / "summary.json"]
    replace_file(written[0], markdown(cells) + "\n")
    replace_file(written[1], json_text(document(cells)))
    if plots.can_draw() and any(_done(cells)):
        written.append(out / "perplexity.svg")
        figure(cells).savefig(written[-1])
    return written


def figure(cells: Sequence[Cell]) -> Figure:
    """Perplexity by tokens read: a line for each method, a panel for each length of context.

    Raises:
      ImportError: matplotlib is not installed.
    """
    rows = summarise(cells)
    lengths = sorted({row["length"] for row in rows})
    methods = list(dict.fromkeys(row["cache"] for row in rows))
    drawn = plots.new_figure(1.6 + 4.2 * len(lengths), 4.2)
    axes = drawn.subplots(1, len(lengths), squeeze=False)[0]
    for axis, length in zip(axes, lengths, strict=True):
        for method in methods:
            _line(
                axis,
                [row for row in rows if (row["length"], row["cache"]) == (length, method)],
                methods,
            )
        axis.set_title(f"{length:,} tokens of context".replace(",", " "), fontsize=10)
        axis.set_xlabel("tokens read per step and KV head, mean over layers")
        axis.set_xscale("log", base=2)
        plots.tidy(axis)
    axes[0].set_ylabel("perplexity per token, with its standard error")
    axes[0].legend(fontsize=9)
    return drawn


def _line(axis: Axes, rows: Sequence[Mapping[str, Any]], methods: Sequence[str]) -> None:
    """The perplexity of one method: by budget, or the height of a method without budgets."""
    if not rows:
        return
    method = rows[0]["cache"]
    look = plots.style(method, methods)
    if rows[0]["budget"] is None:
        axis.axhline(
            rows[0]["perplexity"], color=look["color"], linestyle=(0, (6, 3)), label=method
        )
        return
    rows = sorted(rows, key=lambda row: row["tokens_read"])
    axis.errorbar(
        [row["tokens_read"] for row in rows],
        [row["perplexity"] for row in rows],
        yerr=[row["stderr"] for row in rows],
        markersize=4.5,
        label=method,
        **look,
    )


def _length(cell: Cell) -> int:
    return cell.key["task"]["length"]


def _done(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.examples]


def _baselines(cells: Sequence[Cell]) -> dict[int, Cell]:
    """The cell of the first cache by length, where it has results."""
    first: dict[int, Cell] = {}
    for cell in cells:
        if cell.method == cells[0].method:
            first.setdefault(_length(cell), cell)
    return {length: cell for length, cell in first.items() if cell.examples}


def _label(cell: Cell, cells: Sequence[Cell]) -> str:
    """The method of a cell, and its budget if the method has several at this length."""
    same = [
        other
        for other in cells
        if (other.method, _length(other)) == (cell.method, _length(cell))
    ]
    return (
        cell.method
        if len(same) == 1
        else f"{cell.method}{',' if ':' in cell.method else ':'}budget={cell.budget}"
    )


# ---------------------------------------------------------------------------------------------------------------- parts


def _stderr(x: np.ndarray) -> float:
    """The standard error of the mean of x; nan for a single number."""
    return float(np.std(x, ddof=1) / math.sqrt(x.size)) if x.size > 1 else math.nan


def _tokens(checkpoint: Checkpoint, text: str | Sequence[int]) -> tuple[list[int], list[int]]:
    """The token ids that begin every context, and those of the text."""
    if not isinstance(text, str):
        ids = [int(i) for i in text]
        prefix = []
    else:
        tokenizer = checkpoint.tokenizer
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        prefix = first_tokens(tokenizer)
    if not ids:
        raise ValueError("the text is empty")
    return prefix, ids


def _passages(
    checkpoint: Checkpoint, text: Text, setting: Setting, context: int
) -> tuple[tuple[str, ...], list[tuple[list[int], list[int], int]]]:
    """Names of several texts; for each passage the ids that begin it, its text's ids, and the
    first scored place.
    """
    several = isinstance(text, Mapping)
    if not several and setting.passages % setting.batch:
        raise ValueError(
            f"batch={setting.batch} does not divide passages={setting.passages}; give a divisor of it"
        )
    names = []
    found = []
    for name, one in text.items() if isinstance(text, Mapping) else [("", text)]:
        prefix, ids = _tokens(checkpoint, one)
        try:
            starts = _places(len(ids), context - len(prefix), setting.steps, setting.passages)
        except ValueError:
            if several:
                continue
            raise
        if min(ids) < 0 or max(ids) >= checkpoint.config.vocab_size:
            size = checkpoint.config.vocab_size
            raise ValueError(
                f"text has token ids {min(ids)} to {max(ids)}, but the vocabulary has {size}"
            )
        names += [name] if several else []
        found += [(prefix, ids, at) for at in starts]
    if not found:
        raise ValueError(
            f"none of {len(text)} texts is long enough for {setting.passages} passages of {setting.steps} scored "
            f"tokens after {context}; give longer texts, or fewer or shorter passages"
        )
    return tuple(names), found


def _places(have: int, context: int, steps: int, passages: int) -> list[int]:
    """Where the scored tokens of each passage begin: in the middles of equal parts of the text
    after `context` tokens.

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


def _budgets(setting: Setting, caches: Caches, length: int) -> tuple[int, ...] | None:
    """The budgets of the caches that have one and do not set it themselves; None if there are
    none.

    Raises:
      ValueError: caches that need a budget and no setting of one; a share that no cache takes.
        `make_rows` refuses a budget that none takes.
    """
    if not without_budget(caches):
        if setting.share is not None:
            names = ", ".join(one.name for one in read_caches(caches))
            raise ValueError(
                f"share={setting.share} applies to no cache: {names} have no budget or set their own; "
                "leave it out"
            )
        return one_or_several("budget", setting.budget)
    return setting.budgets_at(length)
