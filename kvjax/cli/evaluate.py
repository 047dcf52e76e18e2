"""`kvjax eval`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.cli.options import (
    AsJson,
    Budgets,
    CacheNames,
    DenseLayers,
    Dtype,
    ModelDir,
    Parallel,
    check_folder,
    dtype_name,
    model_directory,
    optional,
    sizes,
    without_weights,
)
from kvjax.cli.programs import load_checkpoint
from kvjax.cli.terminal import bar, bars, say, show_markdown, write_json

if TYPE_CHECKING:
    from kvjax.evaluate.caches import Row
    from kvjax.evaluate.store import Cell
    from kvjax.evaluate.tasks import Task

# Defaults of --quick, which other options override: minutes on two CPU cores with a model of 26
# M parameters.
QUICK: dict[str, Any] = {
    "task": ["needle", "needles"],
    "cache": ["full", "fier", "quest", "snapkv", "streaming_llm"],
    "budget": "32,64,256",
    "length": "2K",
    "samples": 24,
}

Tasks = Annotated[
    list[str] | None,
    optional(
        "pass_key, needle, needles, needle_lines, key_value, variables, assigned_variables, frequent_words, "
        "common_words; ruler-synthetic for the ten synthetic tasks of RULER. Settings may follow: "
        "needles:hidden=16,asked=2. Your own: mine.py:NAME. Repeat the option for several. Default: needles."
    ),
]


def evaluate(
    ctx: typer.Context,
    model_dir: ModelDir = None,
    task: Tasks = None,
    cache: CacheNames = None,
    budget: Budgets = None,
    dense_layers: DenseLayers = 2,
    question: Annotated[
        str | None,
        optional(
            "How the question reaches the model. decoded: one token per decode step through the "
            "cache, after the text. prefilled: as the end of the prompt, so that a cache that evicts tokens has seen "
            "it. Default: decoded."
        ),
    ] = None,
    group_reduce: Annotated[
        str | None,
        optional(
            "How a GQA group shares a selection, for methods that select. Several: mean_softmax,per_head."
        ),
    ] = None,
    length: Annotated[
        str | None,
        optional("Tokens of prompt and answer together. Several: 4K,8K. Default: 2K."),
    ] = None,
    samples: Annotated[int | None, optional("Examples per task. Default: 64.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the tasks.")] = 0,
    text: Annotated[
        Path | None,
        optional("UTF-8 file with the text to hide needles in. Default: generated sentences."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small comparison that takes minutes on a CPU.")
    ] = False,
    batch: Annotated[int, typer.Option(help="Prompts decoded together.")] = 8,
    parallel: Parallel = 1,
    dtype: Dtype = None,
    out: Annotated[
        Path, typer.Option(help="Directory for results/*.json, table.md and the plots.")
    ] = Path("kvjax-eval"),
    resume: Annotated[
        bool, typer.Option(help="Reuse results in --out of the same model, cache and task.")
    ] = True,
    report_only: Annotated[
        bool,
        typer.Option(
            "--report-only",
            help="Decode nothing; write the table and plots of all results in --out and its subfolders.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Scores tasks by decoding their answers through caches; writes a table and plots by cache
    and budget.

    Prompts are prefilled once for all caches. A killed run continues where it stopped. Columns
    of the table: budget, the tokens that a cache may read per step and KV head in layers that
    are not dense; tokens read, how many it did read, mean over steps, KV heads and all layers;
    95 %, the confidence interval of the mean score. A cache that cannot hold its budget is
    listed below the table with the reason, and the others run. The default caches are full and
    fier.
    """
    if report_only:
        if given := _given(ctx, but=("report_only", "out", "as_json")):
            raise ValueError(
                f"--report-only only reads the results in --out; leave out {', '.join(given)}"
            )
        from kvjax.evaluate.store import read_cells

        _report(read_cells(out), out, as_json)
        return
    from kvjax.evaluate.caches import make_rows, without_budget

    if quick:
        task, cache = task or QUICK["task"], cache or QUICK["cache"]
        length, samples = length or QUICK["length"], samples or QUICK["samples"]
        budget = budget or (QUICK["budget"] if without_budget(cache) else None)

    from kvjax.evaluate.tasks import make_tasks
    from kvjax.spec import require_int

    require_int("--batch", batch, at_least=1)
    require_int("--seed", seed, at_least=0)
    check_folder("--out", out)
    lengths = None if length is None else sizes("--length", length)
    tasks = make_tasks(
        task or ["needles"],
        lengths=lengths,
        samples=samples,
        seed=seed,
        text=text,
        question=question,
    )
    rows = make_rows(
        cache or ["full", "fier"],
        budgets=None if budget is None else sizes("--budget", budget),
        dense_layers=dense_layers,
        group_reduces=None if group_reduce is None else group_reduce.split(","),
    )
    settings: dict[str, Any] = {"dtype": dtype_name(dtype), "resume": resume}
    cells = _run(
        model_directory(model_dir),
        tasks,
        rows,
        batch=batch,
        parallel=parallel,
        out=out,
        **settings,
    )
    _report(cells, out, as_json)


def _given(ctx: typer.Context, *, but: Collection[str]) -> list[str]:
    """Arguments and options that the command line sets, in the order of the help, except those
    named in `but`.
    """
    names = []
    for param in ctx.command.params:
        name = param.name or ""
        source = ctx.get_parameter_source(name)
        if name in but or source is None or source.name != "COMMANDLINE":
            continue
        if param.param_type_name == "argument":
            names.append(getattr(param, "metavar", None) or name)
        else:
            off = ctx.params[name] is False and param.secondary_opts  # such as --no-resume
            names.append((off or param.opts)[0])
    return names


def _run(
    directory: Path,
    tasks: Sequence[Task],
    rows: Sequence[Row],
    *,
    batch: int,
    parallel: int,
    out: Path,
    **settings: Any,
) -> list[Cell]:
    """Scores the tasks; `settings` go to `plan.prepare` of each."""
    import jax

    from kvjax.evaluate import accuracy, plan
    from kvjax.evaluate.provenance import model_digest, source_digest

    progress, plans = bars(), list[plan.Plan]()
    checkpoint = without_weights(directory)
    with progress, bar(progress, "making examples") as advance_to:
        digest = model_digest(directory)
        for task in tasks:
            advance_to(len(plans), len(tasks), task.name)
            plans.append(
                plan.prepare(
                    checkpoint, task, rows, out=out / "results", model=digest, **settings
                )
            )
    for name, note in {name: note for one in plans for name, note in one.notes.items()}.items():
        say(f"{name} {note}")
    cells = [cell for one in plans for cell in one.cells.values()]
    total, done = sum(one.total for one in plans), sum(one.done for one in plans)
    if done:
        old = {made["source"] for cell in cells for made in cell.head.get("made", [])} - {
            source_digest()
        }
        other = (
            ", some by different source code of the same version; --no-resume computes them again"
            if old
            else ""
        )
        say(f"{done} of {total} answers are in {out / 'results'} already{other}")
    if done == total:
        return cells
    with progress:
        with bar(progress, "loading weights"):
            loaded = load_checkpoint(directory, dtype=settings["dtype"])
        # On a GPU a program takes longer to compile than its empty slots take to read.
        capacity = (
            None if jax.default_backend() == "cpu" else max(one.capacity for one in plans)
        )
        room = accuracy.question_columns(
            max(len(fed) for one in plans for fed in one.fed.values())
        )
        answer = partial(accuracy.answer, room=room)
        for number, one in enumerate(plans, 1):
            what = f"task {number} of {len(plans)}, {one.task.name}"
            with bar(progress, what, total=one.total) as advance_to:
                how: dict[str, Any] = {
                    "batch": batch,
                    "parallel": parallel,
                    "capacity": capacity,
                }
                plan.run(loaded, one, answer, **how, progress=advance_to)
            if progress.disable:  # no terminal: log a line per task
                say(f"{what}: {one.done} answers")
    return cells


def _report(cells: Sequence[Cell], out: Path, as_json: bool) -> None:
    from kvjax.evaluate import plots, report

    if as_json:
        write_json(report.summary(cells))
    else:
        show_markdown(report.table(cells))
    say(f"wrote {', '.join(map(str, plots.write(cells, out)))}")
    if not plots.can_draw():
        say(plots.NEEDED)
