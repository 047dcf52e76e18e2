"""`kvjax generate --prompts FILE`: answers to every prompt of a file, or of several options,
many at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.cli.options import (
    check_file,
    given_file,
    model_directory,
    new_tokens,
    without_weights,
)
from kvjax.cli.programs import load_checkpoint
from kvjax.cli.terminal import bar, bars, say, write

if TYPE_CHECKING:
    from kvjax import Engine
    from kvjax.generation.sampling import Sampling
    from kvjax.models import Checkpoint
    from kvjax.models.template import Messages
    from kvjax.policies import PerLayer
    from kvjax.serve import Request


@dataclass(frozen=True, kw_only=True)
class Many:
    """How prompts are answered, whichever they are."""

    model_dir: Path | None
    cache: str  # as it was written
    policy: PerLayer
    slots: int  # prompts that are answered at the same time
    max_new_tokens: int | None  # of lines that say no number
    sampling: Sampling
    seed: int
    dtype: str
    template: Mapping[str, Any] | None  # settings of the chat template, for messages


@dataclass(frozen=True)
class Asked:
    """A prompt, and where it stands."""

    number: int  # from 1: a line of the file, or an option
    fields: Mapping[str, Any]  # of the line; "prompt" is a text or chat messages

    @property
    def prompt(self) -> str | Messages:
        prompt: str | Messages = self.fields["prompt"]
        return prompt

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str)


@dataclass(frozen=True)
class Fitted:
    """A prompt as tokens, with a number of new ones that the model has positions for."""

    asked: Asked
    tokens: list[int]
    max_new_tokens: int

    @property
    def total(self) -> int:
        return len(self.tokens) + self.max_new_tokens


def answer_many(prompts: Path | Sequence[str], out: Path | None, how: Many) -> None:
    """Writes a line of JSON for each prompt, as it is answered: its number and fields, and the
    text and its tokens.

    `prompts` are texts, or a file of lines. A line is a text, or an object with "prompt", a text
    or chat messages, and perhaps "max_new_tokens". All is checked before the weights are read.

    Raises:
      ValueError: a file, a prompt or a cache that cannot be used.
      RuntimeError: answers that ended by an error, after all are written.
    """
    _check_out(out)
    directory = model_directory(how.model_dir)
    checkpoint = without_weights(directory)
    asked = read_prompts(prompts)
    _check_template(checkpoint, asked, how)
    place = f"line {{}} of {prompts}" if isinstance(prompts, Path) else "--prompt {}"
    fitted = [_fit(checkpoint, one, how, place.format(one.number)) for one in asked]
    rows = min(how.slots, len(fitted))
    capacity = _capacity(checkpoint, fitted, rows, how)

    progress = bars()
    with progress, bar(progress, "loading weights"):
        loaded = load_checkpoint(directory, dtype=how.dtype)
    # Prompts are read whole: nobody waits for the next token of another answer.
    from kvjax import Engine

    engine = Engine(
        loaded,
        how.policy,
        slots=rows,
        capacity=capacity,
        max_waiting=len(fitted),
        prompt_tokens=capacity,
    )
    running = {_submit(engine, loaded, one, how): one for one in fitted}
    failed = 0
    with ExitStack() as stack:
        file = None
        if out is not None:
            file = stack.enter_context(out.open("w", buffering=1, encoding="utf-8"))
        stack.enter_context(progress)
        what = f"answering {len(fitted)} prompts"
        advance_to = stack.enter_context(bar(progress, what, total=len(fitted)))
        for done, request in enumerate(_finished(engine, list(running)), 1):
            line = _line(running[request].asked, request)
            if file is None:
                write(line)
            else:
                file.write(line)
            failed += request.error is not None
            advance_to(done)
    _print_cost(engine, len(fitted))
    if failed:
        raise RuntimeError(
            f"{failed} of {len(fitted)} answers ended by an error, which their lines say"
        )


def read_prompts(prompts: Path | Sequence[str]) -> list[Asked]:
    """The prompts of a file, whose empty lines are left out, or of options.

    Raises:
      ValueError: a file that cannot be read, or a line without a prompt.
    """
    if not isinstance(prompts, Path):
        return [Asked(number, {"prompt": text}) for number, text in enumerate(prompts, 1)]
    # Only this character ends a line of JSON; a text may hold others that do so in Python.
    lines = _text_of(prompts).split("\n")
    found = [
        Asked(number, _fields(line, f"line {number} of {prompts}"))
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise ValueError(
            f"--prompts {prompts} holds no prompt; write one line of JSON for each"
        )
    return found


def _text_of(path: Path) -> str:
    path = given_file("--prompts", path, "a prompt in each line")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts {path} is not UTF-8 text: {error}") from error


def _fields(line: str, where: str) -> dict[str, Any]:
    """The fields of a line, of which a text alone is the prompt."""
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f'{where} is no JSON ({error}); write {{"prompt": "..."}}') from error
    if isinstance(value, str):
        value = {"prompt": value}
    prompt = value.get("prompt") if isinstance(value, dict) else None
    if not isinstance(prompt, str | list) or not prompt:
        raise ValueError(f'{where} needs a "prompt", a text or chat messages')
    return dict(value)


def _check_out(out: Path | None) -> None:
    check_file("--out", out)
    if out is not None and out.exists():
        raise ValueError(f"--out {out} exists; give another file, or remove it")


def _check_template(checkpoint: Checkpoint, asked: Sequence[Asked], how: Many) -> None:
    """Raises ValueError for settings of a chat template that no prompt uses."""
    if how.template is None:
        return
    if not any(one.is_chat for one in asked):
        raise ValueError(
            "--template is for the model's chat template, and no prompt has chat messages; leave it out"
        )
    checkpoint.chat_template.check_used(how.template, where="--template")


def _fit(checkpoint: Checkpoint, asked: Asked, how: Many, where: str) -> Fitted:
    """A prompt as tokens. `where` begins an error message."""
    from kvjax.spec import require_int

    try:
        tokens = checkpoint.encode(asked.prompt, template=how.template)
        new = asked.fields.get("max_new_tokens", how.max_new_tokens)
        if new is not None:
            new = require_int("max_new_tokens", new, at_least=1)
        new = new_tokens(checkpoint, len(tokens), new)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error
    return Fitted(asked, tokens, new)


def _capacity(checkpoint: Checkpoint, fitted: Sequence[Fitted], rows: int, how: Many) -> int:
    """The capacity of the slots; raises ValueError for a cache that cannot hold the model."""
    from kvjax.evaluate.caches import Row, check_rows
    from kvjax.spec import round_capacity

    positions = checkpoint.config.max_positions
    capacity = round_capacity(max(one.total for one in fitted), positions=positions)
    spec = checkpoint.config.spec(rows, capacity, how.dtype)
    check_rows([Row(f"--cache {how.cache}", how.policy)], spec, checkpoint.config)
    return capacity


def _submit(engine: Engine, loaded: Checkpoint, one: Fitted, how: Many) -> Request:
    import jax

    key = None
    if not how.sampling.greedy:
        key = jax.random.fold_in(jax.random.key(how.seed), one.asked.number)
    (request,) = engine.submit(
        one.tokens,
        max_new_tokens=one.max_new_tokens,
        sampling=how.sampling,
        key=key,
        stop_tokens=loaded.chat_stop_tokens if one.asked.is_chat else loaded.stop_tokens,
    )
    return request


def _finished(engine: Engine, requests: Sequence[Request]) -> Iterator[Request]:
    """Steps the engine until all requests have ended; yields each as it ends."""
    left = len(requests)
    while left:
        for request in engine.step():
            if request.done:
                left -= 1
                yield request


def _line(asked: Asked, request: Request) -> str:
    """The line of JSON of an answer."""
    answer: dict[str, Any] = {
        "line": asked.number,
        **asked.fields,
        "text": request.text,
        "token_ids": request.tokens,
        "reason": request.reason,
    }
    if request.error is not None:
        answer["error"] = str(request.error)
    return json.dumps(answer, ensure_ascii=False) + "\n"


def _print_cost(engine: Engine, prompts: int) -> None:
    stats = engine.stats()
    read = stats.prompt_tokens + stats.shared_tokens
    say(
        f"{prompts} prompts of {read} tokens, {stats.new_tokens} new ones in {stats.steps} steps; "
        f"slots were {stats.fill:.0%} in use"
    )
