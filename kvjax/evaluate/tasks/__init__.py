"""The tasks of an evaluation: one file per family of tasks, their protocol, and tasks by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax.evaluate.tasks.protocol import Example, Task
from kvjax.presets.parsing import read_settings, settings_of
from kvjax.validation import nearest

__all__ = ["Example", "Task", "make_tasks"]

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
) -> list[Task]:
    """Makes generated tasks by name, optionally with settings ("needles:hidden=16"), one at
    every length.

    "ruler-synthetic" stands for the ten synthetic tasks of RULER. `generated.Synthetic`
    explains the arguments.

    Raises:
      ValueError: an unknown task or setting, or a text for tasks that make their own.
    """
    from kvjax.evaluate.tasks.generated import FILLING, FORMS, RULER, TASKS, make_task

    names = [one for name in names for one in (RULER if name == GENERATED_RULER else (name,))]
    text = None if text is None else Path(text)
    if text is not None and not text.is_file():
        raise ValueError(f"--text {text}: there is no such file")
    common: dict[str, Any] = {
        "samples": SAMPLES if samples is None else samples,
        "seed": seed,
        "text": text,
    }
    common |= {} if question is None else {"question": question}
    made: list[Task] = []
    for asked in names:
        name = asked.partition(":")[0]
        if name not in TASKS:
            known = (*TASKS, GENERATED_RULER)
            near = nearest(name, known)
            meant = f"did you mean {near!r}? There" if near else "there"
            raise ValueError(f"--task {asked}: unknown; {meant} are {', '.join(known)}")
        form, instead = TASKS[name]
        settings = read_settings(asked, settings_of(FORMS[form]) | instead, where="--task")
        made += [
            make_task(name, **{**common, "length": n, **settings}) for n in lengths or [LENGTH]
        ]
    if text is not None and all(name.partition(":")[0] in FILLING for name in names):
        raise ValueError(
            f"--text {text} does not apply to {', '.join(names)}: they make their text; leave it out"
        )
    titles = [task.name for task in made]
    if twice := [title for title in dict.fromkeys(titles) if titles.count(title) > 1]:
        raise ValueError(
            f"two tasks would both be called {twice[0]!r}, and a table could not tell their rows apart; run them one "
            "after the other, each with its own --out"
        )
    return made
