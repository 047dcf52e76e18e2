"""Trains the model that the package ships, on one GPU in under ten minutes: see README.md in
this folder.

    python training/train.py --books DIR --code DIR --out DIR [--seconds 540] [--resume]
    python training/train.py --evaluate only --out DIR
    python training/train.py --smoke --out DIR                              # a minute on a CPU

The schedule follows the clock: warm-up, constant rate and linear decay, and the lengths of
rows, are shares of the time that `--seconds` leaves from the first step on, so the run ends in
time on any machine. With `--steps` they are shares of a number of steps, and a run is exactly
repeatable, also when it is interrupted and resumed.

This file has the schedule, the checkpoints and the run; `step.py` has the model, its loss and
the step, `data.py` the rows, and `export.py` the results.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

sys.path.insert(0, str(Path(__file__).parent))

import data
from export import export, judge
from step import Programs, decoder_config, flops_per_token, initial_state, make_step, shapes

from kvjax.evaluate.provenance import provenance, replace_file
from kvjax.models import DecoderConfig

# --------------------------------------------------------------------------------------------------------- the schedule


@dataclass
class Clock:
    """How far a run is, from 0 to 1: by steps, or by the time from its first step to its
    deadline.
    """

    steps: int | None
    deadline: float  # of time.monotonic()
    done: float = 0.0  # when it was resumed
    start: float | None = None

    def progress(self, step: int) -> float:
        if self.steps is not None:
            return step / self.steps
        if self.start is None:
            return self.done
        passed = (time.monotonic() - self.start) / max(self.deadline - self.start, 1e-9)
        return self.done + (1.0 - self.done) * passed


def rate_at(progress: float, settings: Mapping[str, Any]) -> float:
    """The learning rate: a warm-up, a constant part, and a linear decay to 0, as shares of the
    run.
    """
    up = (progress + 1e-3) / settings["warmup"] if settings["warmup"] else 1.0
    down = (1.0 - progress) / settings["decay"] if settings["decay"] else 1.0
    return settings["rate"] * max(0.0, min(1.0, up, down))


def lengths_left(progress: float, settings: Mapping[str, Any]) -> list[int]:
    """The lengths of rows from here on, in their order; empty when the run is over."""
    phases = settings["phases"]
    ends = np.cumsum(list(phases.values()))
    return [
        int(length) for length, end in zip(phases, ends, strict=True) if progress < end - 1e-9
    ]


# ---------------------------------------------------------------------------------------------------------- checkpoints


def manager(out: Path) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(
        (out / "checkpoints").absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2)
    )


def save(
    checkpoints: ocp.CheckpointManager, step: int, state: Any, about: Mapping[str, Any]
) -> None:
    """Begins to write the state after `step` steps; the arrays are read before this returns."""
    args = ocp.args.Composite(
        state=ocp.args.StandardSave(_named(state)), about=ocp.args.JsonSave(dict(about))
    )
    checkpoints.save(step, args=args)


def restore(checkpoints: ocp.CheckpointManager, like: Any) -> tuple[int, Any, dict[str, Any]]:
    """(steps done, state, metadata) of the newest complete save."""
    step = checkpoints.latest_step()
    if step is None:
        raise FileNotFoundError(
            f"{checkpoints.directory} has no complete save to resume from; leave out --resume"
        )
    wanted = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in _named(like).items()}
    args = ocp.args.Composite(
        state=ocp.args.StandardRestore(wanted), about=ocp.args.JsonRestore()
    )
    found = checkpoints.restore(step, args=args)
    leaves = [jnp.asarray(found["state"][name]) for name in _named(like)]
    return step, jax.tree.unflatten(jax.tree.structure(like), leaves), found["about"]


def _named(tree: Any) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


# -------------------------------------------------------------------------------------------------------------- the run


class Log:
    """Lines of JSON in a file, and some of them on the screen. Speed is measured between lines."""

    def __init__(
        self, path: Path, config: DecoderConfig, peak: float | None, every: float
    ) -> None:
        self.file = path.open("a", encoding="utf-8")
        self.config, self.peak, self.every = config, peak, every
        self.last = time.monotonic()
        self.shown = -float("inf")

    def write(
        self,
        step: int,
        length: int,
        tokens: int,
        progress: float,
        rate: float,
        metrics: Mapping[str, Any],
    ) -> None:
        line = {name: float(value) for name, value in metrics.items()}  # waits for the step
        now = time.monotonic()
        speed, self.last = tokens / (now - self.last), now
        line = {
            "step": step,
            "length": length,
            "progress": progress,
            "rate": rate,
            **line,
            "tokens_per_second": speed,
        }
        if self.peak is not None:
            line["utilisation"] = (
                speed * flops_per_token(self.config, length) / (self.peak * 1e12)
            )
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        if now - self.shown >= self.every:
            self.shown = now
            print("  ".join(f"{k} {v:.4g}" for k, v in line.items()), flush=True)


def forget_after(path: Path, step: int) -> None:
    """Drops the lines of a log that come after a step: a run that was killed took steps which
    nothing saved.
    """
    if not path.exists():
        return
    whole = [
        line
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
        if line.endswith("\n")
    ]
    replace_file(path, "".join(line for line in whole if json.loads(line)["step"] <= step))


def train(
    settings: Mapping[str, Any],
    out: Path,
    *,
    books: Path | None,
    code: Path | None,
    seconds: float = 540.0,
    steps: int | None = None,
    stop_after: int | None = None,
    resume: bool = False,
    peak_tflops: float | None = None,
    show_every: float = 5.0,
) -> None:
    """Trains to the end of the schedule, saves, and exports to out/model; out/result.json has
    the card's numbers.

    `stop_after` ends the run after that step, like an interruption, but saves first.
    """
    begun = time.monotonic()
    config = decoder_config(settings)
    out.mkdir(parents=True, exist_ok=True)
    corpus = data.prepare(
        out / "corpus", books, code, vocab_size=config.vocab_size, **settings["corpus"]
    )
    checkpoints = manager(out)
    if not resume and checkpoints.latest_step() is not None:
        raise FileExistsError(
            f"{out} has a run with checkpoints; give --resume, or another --out"
        )

    like, state = shapes(config), initial_state(settings)
    first, clock, trained, tokens = 0, Clock(steps, begun + seconds), 0.0, 0
    if resume:
        first, state, before = restore(checkpoints, state)
        if before["settings"] != json.loads(json.dumps(dict(settings))):
            raise ValueError(
                f"the run in {out} has other settings; resume with the config that it began with"
            )
        clock.done, trained, tokens = before["progress"], before["seconds"], before["tokens"]
        forget_after(out / "log.jsonl", first)
    lengths = lengths_left(clock.progress(first), settings)
    if not lengths:
        raise ValueError(f"the run in {out} has come to its end; give another --out")
    programs = Programs(make_step(settings, like), state, lengths, settings["tokens"])
    batches = data.Batches(
        corpus,
        data.Mixture(**settings["mixture"]),
        lambda step: next(iter(lengths_left(clock.progress(step), settings)), None),
        tokens=settings["tokens"],
        first=first,
        workers=settings["workers"],
    )
    programs[lengths[0]]  # waits for it
    clock.start = time.monotonic()
    log = Log(out / "log.jsonl", config, peak_tflops, show_every)
    print(f"first step after {clock.start - begun:.1f} s", flush=True)

    pending: deque[Any] = deque()
    saved = clock.start if steps is None else first
    step, made = first, provenance()

    def about() -> dict[str, Any]:
        passed, progress = (
            trained + time.monotonic() - clock.start,
            min(1.0, clock.progress(step)),
        )
        run = {"step": step, "tokens": tokens, "seconds": passed, "progress": progress}
        return {**run, "made": made, "settings": dict(settings)}

    def keep() -> None:
        result = about()
        save(checkpoints, step, state, result)
        export(out / "model", state["params"], corpus, settings, result)
        replace_file(out / "result.json", json.dumps(result, indent=1))

    for length, ids, kinds in batches:
        progress = clock.progress(step)
        if progress >= 1.0:
            break
        rate = rate_at(progress, settings)
        state, metrics = programs[length](state, ids, kinds, np.float32(rate))
        step, tokens = step + 1, tokens + ids.size
        pending.append((step, length, ids.size, progress, rate, metrics))
        if len(pending) > 2:  # so that the device always has a step to go on with
            log.write(*pending.popleft())
        if step == stop_after:
            break
        now = time.monotonic() if steps is None else step
        if now - saved >= settings["save_every"]:
            saved = now
            keep()
    for left in pending:
        log.write(*left)
    log.file.close()
    batches.close()
    programs.close()
    if step not in checkpoints.all_steps():
        keep()
    checkpoints.wait_until_finished()
    checkpoints.close()
    print(
        f"{step} steps, {tokens / 1e6:.1f} M tokens, exported after {time.monotonic() - begun:.1f} s",
        flush=True,
    )


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(
        description="Trains kvjax's small long-context model; README.md says how."
    )
    parser.add_argument("--config", type=Path, default=here / "config.json")
    parser.add_argument(
        "--books", type=Path, help="directory of texts; needed until OUT/corpus is made"
    )
    parser.add_argument(
        "--code", type=Path, help="directory of Python code, such as the standard library"
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder for the corpus, checkpoints, log and model",
    )
    parser.add_argument(
        "--seconds", type=float, default=540.0, help="time from start to last step"
    )
    parser.add_argument(
        "--steps", type=int, help="number of steps of the run, in place of --seconds"
    )
    parser.add_argument("--resume", action="store_true")
    parser.add_argument(
        "--peak-tflops", type=float, help="dense, in the compute dtype: 989 for an H200 in bf16"
    )
    parser.add_argument("--evaluate", choices=("after", "only", "no"), default="after")
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny run on the sources of kvjax"
    )
    given = parser.parse_args()
    config, books, code, steps = given.config, given.books, given.code, given.steps
    if given.smoke:
        config, books, code, steps = (
            here / "smoke.json",
            here.parent / "kvjax",
            here.parent / "models",
            60,
        )
    if given.evaluate != "only":
        train(
            json.loads(config.read_text(encoding="utf-8")),
            given.out,
            books=books,
            code=code,
            seconds=given.seconds,
            steps=steps,
            resume=given.resume,
            peak_tflops=given.peak_tflops,
        )
    if given.evaluate != "no":
        judge(given.out)


if __name__ == "__main__":
    main()
