"""The tasks of an evaluation: one file per family of tasks, their protocol, and tasks by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax.evaluate.tasks.protocol import Example, Task
from kvjax.presets.parsing import read_settings
from kvjax.validation import nearest

__all__ = ["DATA", "Example", "Task", "make_tasks"]

DATA = ("longbench", "longbench-v2", "gsm8k", "ruler")
GENERATED_RULER = "ruler-synthetic"  # ten tasks: see `generated.RULER`
SAMPLES, LENGTH = 64, 2048  # defaults of generated tasks


def make_tasks(
    names: Sequence[str],
    *,
    lengths: Sequence[int] | None = None,
    samples: int | None = None,
    seed: int = 0,
    text: str | Path | None = None,
    question: str | None = None,
    data: str | Path | None = None,
) -> list[Task]:
    """Makes tasks by name, optionally with settings ("needles:hidden=16"): a generated task at every length.

    "ruler-synthetic" stands for the synthetic tasks of RULER, all generated.

    `lengths`, `seed`, `text` and `question` apply to generated tasks (see `generated.Synthetic`), and `data` is the
    directory of published ones: longbench and ruler take every file there if none is named. `samples` limits both.

    Raises:
      ValueError: an unknown task or setting, or an option that applies to no task.
    """
    from kvjax.evaluate.tasks.generated import FILLING, RULER, TASKS

    names = [one for name in names for one in (RULER if name == GENERATED_RULER else (name,))]
    text, data = (None if path is None else Path(path) for path in (text, data))
    if text is not None and not text.is_file():
        raise ValueError(f"--text {text}: there is no such file")
    common: dict[str, Any] = {"samples": SAMPLES if samples is None else samples, "seed": seed, "text": text}
    common |= {} if question is None else {"question": question}
    made: list[Task] = []
    for asked in names:
        name = asked.partition(":")[0]
        if name in TASKS:
            settings = read_settings(asked, TASKS[name], where="--task")
            made += [TASKS[name](**{**common, "length": n, **settings}) for n in lengths or [LENGTH]]
        elif name in DATA:
            made += _published(asked, samples, data)
        else:
            known = (*TASKS, GENERATED_RULER, *DATA)
            near = nearest(name, known)
            meant = f"did you mean {near!r}? There" if near else "there"
            raise ValueError(f"--task {asked}: unknown; {meant} are {', '.join(known)}")
    generated = [name for name in names if name.partition(":")[0] in TASKS]
    hiding = [name for name in generated if name.partition(":")[0] not in FILLING]
    for option, given, fits, cure in (
        ("--length", lengths and ",".join(map(str, lengths)), generated, "published data has its own lengths"),
        ("--text", text, hiding, "their text is published or made by the task"),
        ("--question", question, generated, "prompts of published data are prefilled whole"),
        ("--data", data, len(generated) < len(names), f"it is for {', '.join(DATA)}"),
    ):
        if given is not None and not fits:
            raise ValueError(f"{option} {given} does not apply to {', '.join(names)}: {cure}; leave it out")
    titles = [task.name for task in made]
    if twice := [title for title in dict.fromkeys(titles) if titles.count(title) > 1]:
        raise ValueError(
            f"two tasks would both be called {twice[0]!r}, and a table could not tell their rows apart; run them one "
            "after the other, each with its own --out"
        )
    return made


def _published(asked: str, samples: int | None, data: Path | None) -> list[Task]:
    from kvjax.evaluate.tasks.generated import First
    from kvjax.evaluate.tasks.gsm8k import Gsm8k
    from kvjax.evaluate.tasks.longbench import METRICS, LongBench, LongBenchV2
    from kvjax.evaluate.tasks.ruler import Ruler

    name = asked.partition(":")[0]
    if data is None:
        raise ValueError(f"--task {asked} reads published files: give their directory as --data DIR")
    makers: dict[str, Any] = {"longbench": LongBench, "longbench-v2": LongBenchV2, "gsm8k": Gsm8k, "ruler": Ruler}
    given = read_settings(asked, makers[name], where="--task")
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
