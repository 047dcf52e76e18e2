"""`kvjax eval`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from kvjax.cli.command import written
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
)
from kvjax.cli.subject import Subject
from kvjax.cli.terminal import bar, bars, say, show_markdown, write_json

if TYPE_CHECKING:
    from kvjax.evaluate.caches import Row
    from kvjax.evaluate.plan import Plan
    from kvjax.evaluate.store import Cell
    from kvjax.evaluate.tasks import Task


class Quick(NamedTuple):
    """Defaults of --quick, which other options override."""

    tasks: tuple[str, ...]
    caches: tuple[str, ...]
    budgets: str
    length: str
    samples: int


# Takes minutes on two CPU cores with a model of 26 M parameters.
QUICK = Quick(
    tasks=("needle", "needles"),
    caches=("full", "fier", "quest", "snapkv", "streaming_llm"),
    budgets="32,64,256",
    length="2K",
    samples=24,
)

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
        optional(
            "Tokens of prompt and answer together. Several: 4K,8K. Default: 2K, and 4K for a board."
        ),
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
    drafts: Annotated[
        bool,
        typer.Option(
            "--drafts",
            help="Also count the tokens of a draft of 8 that agree with full attention, after excerpts of --text at "
            "each length.",
        ),
    ] = False,
    board: Annotated[
        bool,
        typer.Option(
            "--board",
            help="Count drafts as --drafts does, and write board.md, board.json and curves: scores at equal bytes read "
            "and at equal memory. Default tasks: needles and ruler-synthetic; default caches: all that "
            "apply to the model.",
        ),
    ] = False,
    step_times: Annotated[
        Path | None,
        optional(
            "With --board: a file of benchmarks/real_speed.py of the same model, for scores by microseconds of a step."
        ),
    ] = None,
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
    from kvjax.evaluate.tasks import LENGTH, SAMPLES, make_tasks
    from kvjax.spec import require_int

    # Parse: what is wrong is said here, before examples are made.
    if step_times is not None and not board:
        raise ValueError(f"--step-times {step_times} is for --board; add it, or leave this out")
    if quick:
        task = task or list(QUICK.tasks)
        cache = cache or list(QUICK.caches)
        length = length or QUICK.length
        samples = samples or QUICK.samples
        if budget is None and without_budget(cache):
            budget = QUICK.budgets
    require_int("--batch", batch, at_least=1)
    require_int("--seed", seed, at_least=0)
    check_folder("--out", out)
    subject = Subject(model_directory(model_dir), dtype_name(dtype))
    lengths = None if length is None else sizes("--length", length)
    budgets = None if budget is None else sizes("--budget", budget)
    if board:
        from kvjax.evaluate.board import TASKS, TOKENS, default_budgets, default_caches

        if not task:
            task = list(TASKS)
            lengths = lengths or [TOKENS]
        cache = cache or default_caches(subject.unloaded.config)
        if budgets is None and without_budget(cache):
            budgets = default_budgets(max(lengths or [LENGTH]))
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
        budgets=budgets,
        dense_layers=dense_layers,
        group_reduces=None if group_reduce is None else group_reduce.split(","),
    )

    # Run.
    plans = _prepare(subject, tasks, rows, resume=resume, out=out)
    _print_what_is_there(plans, out)
    if any(plan.done < plan.total for plan in plans):
        _run(subject, plans, batch=batch, parallel=parallel)

    cells = _cells(plans)
    if drafts or board:
        from kvjax.cli.drafting import follow_texts

        cells += follow_texts(
            subject,
            rows,
            lengths=lengths or [LENGTH],
            samples=samples or SAMPLES,
            seed=seed,
            text=text,
            batch=batch,
            parallel=parallel,
            resume=resume,
            out=out,
        )

    # Print.
    _report(cells, out, as_json)
    if board:
        from kvjax.cli.board import finish

        written = finish(
            subject, cells, rows, lengths=lengths or [LENGTH], step_times=step_times, out=out
        )
        say(f"wrote {', '.join(map(str, written))}")


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
        off = ctx.params[name] is False and param.secondary_opts  # such as --no-resume
        names.append(off[0] if off else written(param))
    return names


def _prepare(
    subject: Subject, tasks: Sequence[Task], rows: Sequence[Row], *, resume: bool, out: Path
) -> list[Plan]:
    """Makes the examples of each task, and finds the answers that --out has already."""
    plans: list[Plan] = []
    progress = bars()
    with progress, bar(progress, "making examples") as advance_to:
        for task in tasks:
            advance_to(len(plans), len(tasks), task.name)
            plans.append(subject.prepare(task, rows, resume=resume, out=out))
    return plans


def _print_what_is_there(plans: Sequence[Plan], out: Path) -> None:
    """Prints the notes on caches, and how many answers there are."""
    from kvjax.evaluate.provenance import source_digest

    notes: dict[str, str] = {}
    for plan in plans:
        notes |= plan.notes
    for name, note in notes.items():
        say(f"{name} {note}")
    done = sum(plan.done for plan in plans)
    if not done:
        return
    sources = {made["source"] for cell in _cells(plans) for made in cell.head.get("made", [])}
    other = ""
    if sources - {source_digest()}:
        other = ", some by different source code of the same version; --no-resume computes them again"
    total = sum(plan.total for plan in plans)
    say(f"{done} of {total} answers are in {out / 'results'} already{other}")


def _run(subject: Subject, plans: Sequence[Plan], *, batch: int, parallel: int) -> None:
    """Computes the answers that the plans lack."""
    import jax

    from kvjax.evaluate import accuracy, plan

    progress = bars()
    with progress:
        with bar(progress, "loading weights"):
            loaded = subject.loaded
        # On a GPU a program takes longer to compile than its empty slots take to read.
        on_cpu = jax.default_backend() == "cpu"
        capacity = None if on_cpu else max(one.capacity for one in plans)
        longest = max(len(tokens) for one in plans for tokens in one.fed.values())
        answer = partial(accuracy.answer, room=accuracy.question_columns(longest))
        for number, one in enumerate(plans, 1):
            what = f"task {number} of {len(plans)}, {one.task.name}"
            with bar(progress, what, total=one.total) as advance_to:
                plan.run(
                    loaded,
                    one,
                    answer,
                    batch=batch,
                    parallel=parallel,
                    capacity=capacity,
                    progress=advance_to,
                )
            if progress.disable:  # no terminal: log a line per task
                say(f"{what}: {one.done} answers")


def _cells(plans: Sequence[Plan]) -> list[Cell]:
    """The cells of all plans, one for each task and cache."""
    return [cell for plan in plans for cell in plan.cells.values()]


def _report(cells: Sequence[Cell], out: Path, as_json: bool) -> None:
    from kvjax.evaluate import plots, report

    if as_json:
        write_json(report.summary(cells))
    else:
        show_markdown(report.table(cells))
    say(f"wrote {', '.join(map(str, plots.write(cells, out)))}")
    if not plots.can_draw():
        say(plots.NEEDED)
