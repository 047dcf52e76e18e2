"""What a selection by share loses beside an exact one: attention mass, accepted drafts, needles.

    python benchmarks/shares.py [MODEL] --text book.txt [--devices 2] [--methods fier,quest,pariskv]
        [--budgets 256,1024] [--length 4096] [--parts mass,drafts,needles] [--out FILE]

Tokens are split over `--devices` devices, and each row is of one way to select among them: "exact"
or "share" (`kvjax.Placement`). A CPU poses as several devices with
XLA_FLAGS=--xla_force_host_platform_device_count=8. Without MODEL the model that comes with kvjax is
measured.

- `mass`: the share of softmax mass on the tokens that a step reads, mean over layers, steps and
  heads, by live queries at the end of `--length` tokens (`kvjax.evaluate.recall`), and what the
  same budget could reach at best: by the exact scores.
- `drafts`: tokens of a draft of 8 that agree with full attention (`kvjax.evaluate.acceptance`).
- `needles`: the score of `--samples` questions for one of 8 needles; the questions are fed through
  the cache.

Several GPUs must be this program's alone. Where another one fills the memory of a GPU, a
collective fails on that device, and the others wait for it until XLA aborts. So the first thing
that runs is one collective of each kind, alone, and each program ends before the next begins.

Rows are added to results/shares.json as they are measured, and replace those of the same sizes.
`--quick` runs all at tiny sizes and writes nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec
from layers import out_of, save, show
from measured import read_tokens
from named import names_of

import kvjax
from kvjax import PerLayer, Placement, models, presets
from kvjax.cache.cache import Cache, init
from kvjax.evaluate import acceptance, accuracy
from kvjax.evaluate.caches import Row
from kvjax.evaluate.capture import Live, capture
from kvjax.evaluate.plan import Plan, prepare
from kvjax.evaluate.recall import reads
from kvjax.evaluate.tasks import make_tasks
from kvjax.generation import generate, prefill
from kvjax.models import Checkpoint, distribute
from kvjax.spec import default_dtype, padded_capacity

PARTS = ("mass", "drafts", "needles")
SELECTIONS = ("exact", "share")
METHODS: dict[str, Callable[..., PerLayer]] = {
    "fier": presets.fier,
    "quest": presets.quest,
    "pariskv": presets.pariskv,
}
KEY = ("part", "model", "method", "budget", "length", "devices", "selection", "backend")
WHAT = (
    "a selection by share beside an exact one, over tokens split on devices. mass: share of softmax "
    "mass on the tokens read, mean over layers, steps and heads; best: by exact scores. drafts: "
    "tokens of 8 that agree with full attention. needles: score of questions for one of 8"
)


def policies_of(method: str, budget: int, devices: int) -> PerLayer:
    """A method's policies, with chunks that devices can split."""
    settings: dict[str, Any] = {"dense_capacity": 0}
    if method == "quest":
        settings["chunk"] = 16 * devices  # of one page for each device, on one device too
    if method == "pariskv":
        settings["dense_below"] = 0
    return METHODS[method](budget, **settings)


def connect(mesh: Mesh) -> None:
    """Runs a collective of each kind once, on a few numbers and with nothing beside it.

    The first call of each connects the devices and loads its kernels, and XLA ends the process
    if a device takes 40 s longer than another.
    """
    (axis,) = mesh.axis_names

    def each(x: Array) -> Array:
        gathered = lax.all_gather(x, axis, tiled=True)
        return lax.psum(lax.psum_scatter(gathered, axis, tiled=True), axis)

    split = PartitionSpec(axis)
    run = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=split, out_specs=PartitionSpec()))
    numbers = jax.device_put(jnp.ones(64 * mesh.size), jax.NamedSharding(mesh, split))
    jax.block_until_ready(run(numbers))


class Subject:
    """A checkpoint on one device and over several, and the cache of each way to select."""

    def __init__(self, checkpoint: Checkpoint, devices: int):
        mesh = Mesh(np.array(jax.devices()[:devices]), ("ctx",))
        connect(mesh)
        self.checkpoint = checkpoint
        self.placement = Placement(mesh, context="ctx")
        self.split = dataclasses.replace(
            checkpoint, model=distribute(checkpoint.model, self.placement)
        )

    def place(self, selection: Any) -> Placement:
        return dataclasses.replace(self.placement, selection=selection)

    def read(
        self, policies: PerLayer, selection: str, prompts: Sequence[Sequence[int]], new: int
    ) -> tuple[Array, Cache]:
        """Logits and the cache after prompts, with room for `new` tokens."""
        lengths = np.array([len(one) for one in prompts], np.int32)
        tokens = np.zeros((len(prompts), int(lengths.max())), np.int32)
        for row, one in zip(tokens, prompts, strict=True):
            row[: len(one)] = one
        model = self.split.model
        spec = model.spec(batch=len(prompts), capacity=padded_capacity(tokens.shape[1] + new))
        layers = self.checkpoint.config.layers
        cache = init(policies, spec, layers=layers, placement=self.place(selection))
        return jax.block_until_ready(prefill(model, cache, tokens, lengths))


def mass(subject: Subject, live: Live, policies: PerLayer, selection: str) -> dict[str, Any]:
    """Of the layers that select."""
    dense = len(policies.first)
    selecting = dataclasses.replace(live, layers=live.layers[dense:])
    seen = reads(selecting, policies.rest, placement=subject.place(selection))
    row = {
        "mass": round(float(seen.mass.mean()), 5),
        "error": round(float(seen.error.mean()), 5),
    }
    row["lowest_mass"] = round(float(seen.mass.mean(axis=(2, 3)).min()), 5)
    if selection == "exact":
        best = dataclasses.replace(policies.rest, selector=kvjax.Exact())
        row["best"] = round(float(reads(selecting, best).mass.mean()), 5)
    return row


def drafts(
    subject: Subject,
    prompts: np.ndarray,
    wanted: np.ndarray,
    policies: PerLayer,
    selection: str,
) -> dict[str, Any]:
    _, cache = subject.read(policies, selection, prompts, wanted.shape[1])
    found, _ = acceptance(subject.split.model, cache, wanted)
    return {
        "accepted": round(found.accepted, 4),
        "agreement": round(found.agreement, 4),
        "steps": found.steps,
    }


def needles(
    subject: Subject, plan: Plan, policies: PerLayer, selection: str, *, batch: int
) -> dict[str, Any]:
    ids = list(plan.prompts)
    scores = []
    for first in range(0, len(ids), batch):
        part = ids[first : first + batch]
        prompts = [plan.prompts[i] for i in part]
        logits, cache = subject.read(policies, selection, prompts, plan.new_tokens + 32)
        found, *_ = accuracy.answer(subject.split, cache, logits, plan, part)
        scores += [one["score"] for one in found.values()]
    return {"score": round(float(np.mean(scores)), 4), "samples": len(scores)}


def asked(args: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="a UTF-8 file")
    parser.add_argument("--devices", type=int, default=2, help="that split the tokens")
    parser.add_argument("--methods", type=names_of(METHODS), default=list(METHODS))
    parser.add_argument("--parts", type=names_of(PARTS, "part"), default=list(PARTS))
    parser.add_argument("--budgets", default="256,1024")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=32, help="live queries of the part mass")
    parser.add_argument("--new", type=int, default=128, help="tokens of the part drafts")
    parser.add_argument("--rows", type=int, default=4, help="prompts of the part drafts")
    parser.add_argument("--samples", type=int, default=32, help="of the part needles")
    parser.add_argument("--batch", type=int, default=8, help="rows of the part needles")
    parser.add_argument("--dtype", default=default_dtype())
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no row after"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="tiny sizes; nothing is written")
    given = parser.parse_args(args)
    given.budgets = [int(budget) for budget in given.budgets.split(",")]
    if given.quick:
        given.budgets = given.budgets[:1]
        given.length = min(given.length, 512)
        given.steps = 4
        given.new = 12
        given.rows = 2
        given.samples = 2
        given.batch = 2
    if jax.device_count() < given.devices:
        parser.error(
            f"--devices {given.devices}: there are {jax.device_count()}; a CPU has more with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={given.devices}"
        )
    return given


def main(args: Sequence[str] | None = None) -> None:
    given = asked(args)
    end = time.monotonic() + given.seconds
    directory = given.model or models.shipped()
    checkpoint = models.load(directory, dtype=given.dtype)
    subject = Subject(checkpoint, given.devices)

    measures: dict[str, Callable[[PerLayer, str], dict[str, Any]]] = {}
    if "mass" in given.parts:
        text = read_tokens(checkpoint, given.text, given.length)
        live = capture(checkpoint, [text], lengths=[given.length], steps=given.steps)
        measures["mass"] = partial(mass, subject, live)
    if "drafts" in given.parts:
        text = read_tokens(checkpoint, given.text, given.length * given.rows)
        prompts = np.array(text, np.int32).reshape(given.rows, -1)
        _, full = subject.read(presets.full(), "exact", prompts[:, :-1], given.new + 1)
        last = jnp.asarray(prompts[:, -1:])
        done = generate(subject.split.model, full, np.asarray(last), max_new_tokens=given.new)
        measures["drafts"] = partial(drafts, subject, prompts, np.asarray(done.tokens))
    if "needles" in given.parts:
        (task,) = make_tasks(
            ["needles"], lengths=[given.length], samples=given.samples, text=given.text
        )
        rows = [Row("full", presets.full(), None)]
        plan = prepare(checkpoint, task, rows, dtype=given.dtype)
        measures["needles"] = partial(needles, subject, plan, batch=given.batch)

    for part, measure in measures.items():
        for budget in given.budgets:
            for method in given.methods:
                policies = policies_of(method, budget, given.devices)
                for selection in SELECTIONS:
                    if time.monotonic() > end:
                        return
                    row = {
                        "part": part,
                        "model": directory.resolve().name,
                        "method": method,
                        "budget": budget,
                        "length": given.length,
                        "devices": given.devices,
                        "selection": selection,
                        "dtype": str(given.dtype),
                        **measure(policies, selection),
                    }
                    show(row)
                    save(out_of(given, "shares.json"), WHAT, [row], KEY)


if __name__ == "__main__":
    main()
