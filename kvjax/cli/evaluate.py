"""`kvjax eval`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.cli.options import (
    Dtype,
    ModelDir,
    dtype_name,
    has_group_reduce,
    make_policy,
    model_directory,
    settings_of,
    sizes,
    without_weights,
)
from kvjax.cli.terminal import bar, bars, say, write

if TYPE_CHECKING:
    from kvjax.attention import PerLayer
    from kvjax.evaluate import Task
    from kvjax.evaluate.store import Cell

SAMPLES = 64
DATA = ("longbench", "longbench-v2", "gsm8k", "ruler")
# What --quick sets where nothing else is asked for: minutes on two CPU cores with a model of 26 M parameters.
QUICK: dict[str, Any] = {
    "task": ["needle", "needles"],
    "cache": ["full", "fier", "quest", "snapkv", "streaming_llm"],
    "budget": "16,64,256",
    "length": "2K",
    "samples": 24,
}


def evaluate(
    model_dir: ModelDir = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="pass_key, needle, needles, key_value, variables, frequent_words, common_words; or with --data "
            "longbench, longbench-v2, gsm8k, ruler. Settings may follow, as needles:hidden=16,asked=2. Repeat it for "
            "several. Default needles.",
            show_default=False,
        ),
    ] = None,
    cache: Annotated[
        list[str] | None,
        typer.Option(
            help="A method of `kvjax methods`, or with settings: fier:group=16. Repeat it for several. Default full "
            "and fier.",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Tokens attended a step and KV head, for the methods that have one; several as 64,256.",
            show_default=False,
        ),
    ] = None,
    group_reduce: Annotated[
        str | None,
        typer.Option(
            help="How a GQA group shares a choice, for the methods that choose; several as mean_softmax,per_head.",
            show_default=False,
        ),
    ] = None,
    length: Annotated[
        str | None,
        typer.Option(
            help="Tokens of prompt and answer of generated tasks; several as 4K,8K. Default 2K.", show_default=False
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(help=f"Examples of each task. Default {SAMPLES}, of data all.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of generated tasks.")] = 0,
    text: Annotated[
        Path | None,
        typer.Option(help="UTF-8 file to hide things in; without it, sentences made here.", show_default=False),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Directory of published data, for the tasks that read it.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small comparison, in minutes on a CPU.")] = False,
    batch: Annotated[int, typer.Option(help="Prompts decoded together.")] = 8,
    dtype: Dtype = None,
    out: Annotated[Path, typer.Option(help="Directory for results/*.json, table.md and the plots.")] = Path(
        "kvjax-eval"
    ),
    resume: Annotated[
        bool, typer.Option(help="Go on from the results in --out, of which each tells what made it.")
    ] = True,
    report_only: Annotated[
        bool,
        typer.Option(
            "--report-only",
            help="Decode nothing: table and plots of all results in --out, and of runs whose --out lay in it.",
        ),
    ] = False,
) -> None:
    """Scores tasks, decoded for real through caches: a table and plots by cache, budget and length.

    Prompts are prefilled once for all caches. A run that was killed goes on where it stopped.
    """
    if report_only:
        others: dict[str, Any] = {"MODEL_DIR": model_dir, "--task": task, "--cache": cache, "--budget": budget}
        others |= {
            "--group-reduce": group_reduce,
            "--length": length,
            "--samples": samples,
            "--text": text,
            "--data": data,
        }
        given = [name for name, value in others.items() if value is not None] + ["--quick"] * quick
        if given:
            raise ValueError(f"--report-only reads what lies in --out as it is; leave out {', '.join(given)}")
        from kvjax.evaluate.store import read_cells

        _report(read_cells(out), out)
        return
    if quick:
        task, cache = task or QUICK["task"], cache or QUICK["cache"]
        budget, length, samples = budget or QUICK["budget"], length or QUICK["length"], samples or QUICK["samples"]
    asked = _tasks(task or ["needles"], length, samples, seed, text, data)
    policies = _caches(cache or ["full", "fier"], budget, group_reduce)
    kind, directory = dtype_name(dtype), model_directory(model_dir)

    import jax

    from kvjax import models
    from kvjax.evaluate import accuracy
    from kvjax.evaluate.provenance import digest

    progress = bars()
    checkpoint = without_weights(directory)
    with progress, bar(progress, "making examples", total=len(asked)) as advance_to:
        weights = digest(directory)
        plans = []
        for one in asked:
            plans.append(
                accuracy.prepare(
                    checkpoint, one, policies, dtype=kind, out=out / "results", model_digest=weights, resume=resume
                )
            )
            advance_to(len(plans))
    total, done = sum(plan.total for plan in plans), sum(plan.done for plan in plans)
    if done:
        say(f"{done} of {total} answers are in {out / 'results'} already")
    cells = [cell for plan in plans for cell in plan.cells.values()]
    if done < total:
        with progress:
            with bar(progress, "loading weights"):
                loaded = models.load(directory, dtype=kind)
            # On a GPU a program takes longer to compile than its empty slots take to read.
            capacity = None if jax.default_backend() == "cpu" else max(plan.capacity for plan in plans)
            for number, plan in enumerate(plans, 1):
                with bar(progress, plan.task.name, total=plan.total) as advance_to:
                    accuracy.run(loaded, plan, batch=batch, capacity=capacity, progress=advance_to)
                if progress.disable:  # no terminal: a line a task, for whoever reads the log
                    say(f"task {number} of {len(plans)}, {plan.task.name}: {plan.done} answers")
    _report(cells, out)


def _report(cells: Sequence[Cell], out: Path) -> None:
    from kvjax.evaluate import report

    write(report.table(cells))
    try:
        say(f"wrote {', '.join(map(str, report.write(cells, out)))}")
    except ImportError as error:
        say(f"wrote {out / 'table.md'}; {error}")


def _tasks(
    names: Sequence[str],
    length: str | None,
    samples: int | None,
    seed: int,
    text: Path | None,
    data: Path | None,
) -> list[Task]:
    """Every task at every length. What a task has no use for is refused."""
    from kvjax.evaluate.tasks.generated import TASKS

    if text is not None and not text.is_file():
        raise ValueError(f"--text {text}: there is no such file")
    lengths = sizes("--length", length or "2K")
    made: list[Task] = []
    for asked in names:
        name = asked.partition(":")[0]
        if name in TASKS:
            settings = settings_of("--task", asked, TASKS[name])
            common: dict[str, Any] = {"samples": SAMPLES if samples is None else samples, "seed": seed, "text": text}
            made += [TASKS[name](**{**common, "length": n, **settings}) for n in lengths]
        elif name in DATA:
            made += _data_tasks(asked, samples, data)
        else:
            raise ValueError(f"--task {asked}: unknown; there are {', '.join((*TASKS, *DATA))}")
    generated = [name for name in names if name.partition(":")[0] in TASKS]
    for option, given, fits, cure in (
        ("--length", length, generated, "tasks of published data have their own lengths"),
        ("--text", text, generated, "tasks of published data have their own text"),
        ("--data", data, len(generated) < len(names), f"it is for {', '.join(DATA)}"),
    ):
        if given is not None and not fits:
            raise ValueError(f"{option} {given} has no use for {', '.join(names)}: {cure}; leave it out")
    return made


def _data_tasks(asked: str, samples: int | None, data: Path | None) -> list[Task]:
    """Tasks of published files in the directory `data`: of longbench and ruler every file there, if none is named."""
    from kvjax.evaluate.tasks.generated import First
    from kvjax.evaluate.tasks.gsm8k import Gsm8k
    from kvjax.evaluate.tasks.longbench import METRICS, LongBench, LongBenchV2
    from kvjax.evaluate.tasks.ruler import Ruler

    name = asked.partition(":")[0]
    if data is None:
        raise ValueError(f"--task {asked} reads published files: give their directory as --data DIR")
    makers: dict[str, Any] = {"longbench": LongBench, "longbench-v2": LongBenchV2, "gsm8k": Gsm8k, "ruler": Ruler}
    given = settings_of("--task", asked, makers[name])
    found: list[Task] = []
    if name == "longbench":
        here = [n for base in METRICS for n in (base, f"{base}_e") if (data / f"{n}.jsonl").is_file()]
        chosen = [given.pop("dataset")] if "dataset" in given else here or [next(iter(METRICS))]
        found = [LongBench(data, dataset, **given) for dataset in chosen]
    elif name == "longbench-v2":
        found = [LongBenchV2(data / given.pop("path", "data.json"), **given)]
    elif name == "gsm8k":
        found = [Gsm8k(data, **given)]
    else:
        paths = [data / given.pop("path")] if "path" in given else sorted(data.rglob("*.jsonl"))
        if not paths:
            raise ValueError(f"--data {data} has no .jsonl file; RULER's scripts make TASK/validation.jsonl")
        found = [Ruler(path, **given) for path in paths]
    return found if samples is None else [First(one, samples) for one in found]


def _caches(names: Sequence[str], budget: str | None, group_reduce: str | None) -> dict[str, PerLayer]:
    """Policies by name, "METHOD@BUDGET", each method with every budget and rule of pooling that it takes."""
    from kvjax.presets import REGISTRY, find

    presets = {name: find(name.partition(":")[0]) for name in names}
    if budget is not None and not any(preset.has_budget for preset in presets.values()):
        have = ", ".join(p.name for p in REGISTRY.values() if p.has_budget)
        raise ValueError(f"--budget {budget}: {', '.join(names)} have no budget; leave it out, or add one of {have}")
    if group_reduce is not None and not any(map(has_group_reduce, presets.values())):
        have = ", ".join(p.name for p in REGISTRY.values() if has_group_reduce(p))
        raise ValueError(
            f"--group-reduce {group_reduce}: {', '.join(names)} do not choose by a group; leave it out, or add "
            f"one of {have}"
        )
    found: dict[str, PerLayer] = {}
    for name, preset in presets.items():
        variants = [name]
        if group_reduce is not None and has_group_reduce(preset):
            variants = [f"{name}{',' if ':' in name else ':'}group_reduce={rule}" for rule in group_reduce.split(",")]
        for variant in variants:
            for tokens in sizes("--budget", budget) if budget is not None and preset.has_budget else [None]:
                policy, counted = make_policy(variant, tokens)
                found[variant if counted is None else f"{variant}@{counted}"] = policy
    return found
