"""The tasks of an evaluation: one file per family of tasks, their protocol, and tasks by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvjax.evaluate.tasks.checking import check_task
from kvjax.evaluate.tasks.protocol import Example, Task
from kvjax.presets.loading import FILE, announced, load, load_announced, reference
from kvjax.presets.parsing import arguments_of, read_settings, settings_of
from kvjax.validation import nearest, raised, short_repr

__all__ = ["Example", "Task", "check_task", "make_tasks"]

GENERATED_RULER = "ruler-synthetic"  # ten tasks: see `generated.RULER`
# Defaults of generated tasks.
SAMPLES = 64
LENGTH = 2048
GROUP = "kvjax.tasks"  # of entry points
HARNESS = (
    "published tasks are those of lm-evaluation-harness: python -m kvjax.evaluate.harness run "
    "--model kvjax --tasks"
)


def make_tasks(
    names: Sequence[str],
    *,
    lengths: Sequence[int] | None = None,
    samples: int | None = None,
    seed: int = 0,
    text: str | Path | None = None,
    question: str | None = None,
) -> list[Task]:
    """Makes tasks by name, optionally with settings ("needles:hidden=16"), one at every length.

    "ruler-synthetic" stands for the ten synthetic tasks of RULER. `generated.Synthetic`
    explains the arguments.

    A task of your own is named as a method is (`kvjax.presets.parse`): "mine.py:quiz",
    "package.module:quiz", or a name that an installed package announces in the group
    "kvjax.tasks" of entry points. It is a `Task`, or a function or class that returns one for its
    settings, which gets those arguments that it takes.

    Raises:
      ValueError: an unknown task or setting, or a text for tasks that make their own.
    """
    from kvjax.evaluate.tasks.generated import FILLING, FORMS, RULER, TASKS, make_task

    names = [one for name in names for one in (RULER if name == GENERATED_RULER else (name,))]
    text = None if text is None else Path(text)
    if text is not None and text.is_dir():
        raise ValueError(f"--text {text} is a folder; give a UTF-8 file")
    if text is not None and not text.is_file():
        raise ValueError(f"--text {text}: there is no such file")
    given: dict[str, Any] = {
        "samples": samples,
        "seed": seed,
        "text": text,
        "question": question,
    }
    common: dict[str, Any] = {
        "samples": SAMPLES if samples is None else samples,
        "seed": seed,
        "text": text,
    }
    if question is not None:
        common["question"] = question
    made: list[Task] = []
    for asked in names:
        name = asked.partition(":")[0]
        if name not in TASKS:
            made += _own_tasks(asked, lengths, given, known=(*TASKS, GENERATED_RULER))
            continue
        form, instead = TASKS[name]
        settings = read_settings(asked, settings_of(FORMS[form]) | instead, where="--task")
        for length in lengths or [LENGTH]:
            made.append(make_task(name, **{**common, "length": length, **settings}))
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


def _own_tasks(
    asked: str, lengths: Sequence[int] | None, given: Mapping[str, Any], known: Sequence[str]
) -> list[Task]:
    """A user's task at every length, if it takes a length."""
    name = asked.partition(":")[0]
    others = {} if FILE.fullmatch(asked) else announced(GROUP)
    wanted = None if name in others else reference(asked)
    if name in others:
        found = load_announced(others[name], where="--task")
    elif wanted is not None and (wanted.is_file or not nearest(name, [*known, *others])):
        name = wanted.text
        found = load(wanted, where="--task")
    else:
        near = nearest(name, [*known, *others])
        meant = f"did you mean {near!r}? There" if near else "there"
        own = "FILE.py:NAME or module:NAME for your own"
        published = "" if near else f"; {HARNESS} {name}"
        raise ValueError(
            f"--task {asked or repr('')}: unknown; {meant} are {', '.join([*known, *others])}, and {own}{published}"
        )
    where = f"--task {name}"
    if not callable(found):
        read_settings(asked, {}, where="--task", name=name)
        return [check_task(where, found)]
    settings = read_settings(asked, found, where="--task", name=name)
    takes = inspect.signature(found).parameters
    passed = {key: value for key, value in given.items() if key in takes and value is not None}
    sizes = [{"length": length} for length in lengths or []] if "length" in takes else []
    return [_called(where, found, {**passed, **size, **settings}) for size in (sizes or [{}])]


def _called(where: str, make: Any, settings: Mapping[str, Any]) -> Task:
    """The task that a user's function or class returns."""
    try:
        task = make(**arguments_of(make, settings))
    except ValueError:
        raise
    except Exception as error:
        called = ", ".join(f"{name}={short_repr(value)}" for name, value in settings.items())
        raise raised(f"{where}({called})", error) from error
    return check_task(f"what {where} returns", task)
