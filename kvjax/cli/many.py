"""`kvjax generate --prompts FILE`: answers to every prompt of a file, or of several options,
many at a time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvjax.cli.options import check_file, dtype_name, model_directory, without_weights
from kvjax.cli.programs import load_checkpoint
from kvjax.cli.terminal import bar, bars, say, write


def answer_many(
    prompts: Path | list[str],
    out: Path | None,
    *,
    model_dir: Path | None,
    policy: Any,
    cache: str,
    slots: int,
    max_new_tokens: int | None,
    sampling: Any,
    seed: int,
    dtype: str | None,
) -> None:
    """Writes a line of JSON for each prompt, as it is answered: its number and fields, and the
    text and its tokens.

    `prompts` is a list of texts, or a file of lines. A line is a text, or an object with
    "prompt", a text or chat messages, and perhaps "max_new_tokens". All is checked before the
    weights are read.
    """
    import jax

    from kvjax import Engine
    from kvjax.evaluate.caches import Row, check_rows
    from kvjax.generation.prompt_inputs import check_fit
    from kvjax.models.chat import default_new_tokens
    from kvjax.spec import require_int, round_capacity

    check_file("--out", out)
    if out is not None and out.exists():
        raise ValueError(f"--out {out} exists; give another file, or remove it")
    directory = model_directory(model_dir)
    checkpoint = without_weights(directory)
    asked: dict[int, dict[str, Any]]
    asked = (
        _read(prompts)
        if isinstance(prompts, Path)
        else {i: {"prompt": p} for i, p in enumerate(prompts, 1)}
    )
    positions = checkpoint.config.max_positions
    most, tokens = 0, list[list[int]]()
    for number, line in asked.items():
        try:
            tokens.append(checkpoint.encode(line["prompt"]))
            new = line.get("max_new_tokens", max_new_tokens)
            new = default_new_tokens(len(tokens[-1]), positions) if new is None else new
            line["max_new_tokens"] = require_int("max_new_tokens", new, at_least=1)
            check_fit(0, len(tokens[-1]), new, None, positions)
        except (ValueError, TypeError) as error:
            where = (
                f"line {number} of {prompts}"
                if isinstance(prompts, Path)
                else f"--prompt {number}"
            )
            raise ValueError(f"{where}: {error}") from error
        most = max(most, len(tokens[-1]) + line["max_new_tokens"])
    rows, capacity = min(slots, len(asked)), round_capacity(most, positions=positions)
    spec = checkpoint.config.spec(rows, capacity, dtype_name(dtype))
    check_rows([Row(f"--cache {cache}", policy)], spec, checkpoint.config)

    progress = bars()
    with progress, bar(progress, "loading weights"):
        loaded = load_checkpoint(directory, dtype=dtype_name(dtype))
    by: dict[str, Any] = {"slots": rows, "capacity": capacity, "max_waiting": len(asked)}
    engine = Engine(
        loaded, policy, prompt_tokens=capacity, **by
    )  # nobody waits for the next token of an answer
    running: dict[int, tuple[int, dict[str, Any]]] = {}
    for ids, (number, line) in zip(tokens, asked.items(), strict=True):
        chat = not isinstance(line["prompt"], str)
        (request,) = engine.submit(
            ids,
            max_new_tokens=line["max_new_tokens"],
            sampling=sampling,
            key=None if sampling.greedy else jax.random.fold_in(jax.random.key(seed), number),
            stop_tokens=loaded.chat_stop_tokens if chat else loaded.stop_tokens,
        )
        running[id(request)] = number, line
    failed, file = 0, None if out is None else out.open("w", buffering=1, encoding="utf-8")
    try:
        with (
            progress,
            bar(progress, f"answering {len(asked)} prompts", total=len(asked)) as advance_to,
        ):
            while running:
                for request in engine.step():
                    if request.done:
                        number, line = running.pop(id(request))
                        found = {
                            "line": number,
                            **line,
                            "text": request.text,
                            "token_ids": request.tokens,
                        }
                        found |= {"reason": request.reason}
                        if request.error is not None:
                            found["error"], failed = str(request.error), failed + 1
                        text = json.dumps(found, ensure_ascii=False) + "\n"
                        write(text) if file is None else file.write(text)
                advance_to(len(asked) - len(running))
    finally:
        if file is not None:
            file.close()
    stats = engine.stats()
    say(
        f"{len(asked)} prompts of {stats.prompt_tokens + stats.shared_tokens} tokens, {stats.new_tokens} new ones in "
        f"{stats.steps} steps; slots were {stats.fill:.0%} in use"
    )
    if failed:
        raise RuntimeError(
            f"{failed} of {len(asked)} answers ended by an error, which their lines say"
        )


def _read(path: Path) -> dict[int, dict[str, Any]]:
    """The lines of a file, by their number from 1; empty ones are left out."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split(
            "\n"
        )  # a text may hold other ends of lines
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts {path} is not UTF-8 text: {error}") from error
    found = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(
                f'line {number} of {path} is no JSON ({error}); write {{"prompt": "..."}}'
            ) from error
        value = {"prompt": value} if isinstance(value, str) else value
        if (
            not isinstance(value, dict)
            or not isinstance(value.get("prompt"), str | list)
            or not value["prompt"]
        ):
            raise ValueError(
                f'line {number} of {path} needs a "prompt", a text or chat messages'
            )
        found[number] = value
    if not found:
        raise ValueError(f"--prompts {path} holds no prompt; write one line of JSON for each")
    return found
