"""`kvjax measure`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.cli.options import Dtype, ModelDir, dtype_name, model_directory, without_weights
from kvjax.cli.terminal import bar, bars, say, write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvjax.evaluate.live import Live

WHATS = ("recall", "groups", "pools", "queries", "logquant", "drift", "paris")
WRITES = ("drift", "paris")  # these follow the model while it writes


def measure(
    model_dir: ModelDir = None,
    text: Annotated[
        Path | None,
        typer.Option(help="UTF-8 file with a long text, best one that the model never saw.", show_default=False),
    ] = None,
    what: Annotated[
        str, typer.Option(help=f"Which measurements, with commas between: {', '.join(WHATS)}; or `all`.")
    ] = "recall",
    length: Annotated[str, typer.Option(help="Contexts, rising.")] = "1024,2048,4096",
    steps: Annotated[int, typer.Option(help="Live queries at each length, adjacent.")] = 32,
    budget: Annotated[int, typer.Option(help="Tokens attended a step and KV head.")] = 256,
    new_tokens: Annotated[
        int | None,
        typer.Option(
            help="drift and paris: tokens that the model writes, at temperature 1, after the longest context. Default: "
            "as many as that has, or what the model's positions leave.",
            show_default=False,
        ),
    ] = None,
    window: Annotated[int, typer.Option(help="logquant: W; 2W to 3W tokens are exact.")] = 42,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    dtype: Dtype = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for measure_WHAT.json, .md and .svg.", show_default=False),
    ] = None,
) -> None:
    """Measures what selectors and quantised caches keep, on live queries and keys of the model.

    recall: every selector against exact top-k, by length. groups: FIER's recall by layer and head and by group size,
    beside Quest. pools: the rules of pooling over a GQA group. queries: cosine of adjacent queries, and what FreeKV
    would correct. logquant: coverage and loss by which tokens stay exact. drift: recall while the model writes, of
    indexes learnt from the prompt and of ParisKV. paris: alpha-correction, voting and candidates of ParisKV.

    Tables go to stdout.
    """
    kinds = list(WHATS) if what == "all" else what.split(",")
    for kind in kinds:
        if kind not in WHATS:
            raise ValueError(f"--what {kind!r} must be of {', '.join(WHATS)}, or all")
    lengths = [_length(part) for part in length.split(",")]
    if text is None or not text.is_file():
        raise ValueError("--text: " + ("give a file with a long text" if text is None else f"{text} is not a file"))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    directory = model_directory(model_dir)

    import jax

    from kvjax import models
    from kvjax.evaluate.files import read_text
    from kvjax.evaluate.live import capture, capture_generated
    from kvjax.evaluate.record import digest, provenance
    from kvjax.sampling import sampling

    progress = bars()
    words = read_text(text, download="--text takes a UTF-8 file with a long text")
    with progress, bar(progress, "reading the text"):
        checkpoint = without_weights(directory)
        tokens = checkpoint.tokenizer(words, verbose=False)["input_ids"][: lengths[-1]]
    if len(tokens) < lengths[-1]:
        raise ValueError(
            f"--text {text} has {len(tokens)} tokens, fewer than --length {lengths[-1]}; give a longer one"
        )
    if set(kinds) & set(WRITES):
        if new_tokens is None:
            new_tokens = min(lengths[-1], (checkpoint.config.max_positions or 2 * lengths[-1]) - lengths[-1])
        if new_tokens < steps:
            raise ValueError(f"--new-tokens {new_tokens} are fewer than --steps {steps}")
    with progress, bar(progress, "loading weights"):
        checkpoint = models.load(directory, dtype=dtype_name(dtype))
    head: dict[str, Any] = {
        **provenance(),
        "model": {"name": directory.resolve().name, "digest": digest(directory)},
        "text": {"name": text.name, "digest": digest(text)},
        "dtype": dtype_name(dtype),
        "lengths": lengths,
        "steps": steps,
    }

    live: Live | None = None
    if set(kinds) - set(WRITES):
        with progress, bar(progress, f"live queries of {lengths[-1]} tokens", total=lengths[-1]) as advance_to:
            live = capture(checkpoint, [tokens], lengths=lengths, steps=steps, progress=advance_to)
    written: Live | None = None
    if set(kinds) & set(WRITES):
        assert new_tokens is not None
        with progress, bar(progress, f"the model writes {new_tokens} tokens"):
            key = jax.random.key(seed)
            written, _ = capture_generated(checkpoint, [tokens], steps=new_tokens, sampling=sampling(1.0), key=key)
        written = written.windows(min(9, new_tokens // steps), steps)

    for kind in kinds:
        seen = written if kind in WRITES else live
        assert seen is not None
        with progress, bar(progress, kind):
            settings, found, figure = _run(kind, seen, budget, lengths[-1], window, say)
        table = _markdown(_rows(found))
        write(f"{kind}\n\n{table}\n")
        if out is not None:
            if kind in WRITES:
                settings = {
                    **settings,
                    "prompt": lengths[-1],
                    "new_tokens": new_tokens,
                    "temperature": 1.0,
                    "seed": seed,
                }
            results = {name: one.summary() for name, one in found.items()}
            content = {**head, "measure": kind, **settings, "results": results}
            (out / f"measure_{kind}.json").write_text(json.dumps(content, indent=1).replace("NaN", "null") + "\n")
            (out / f"measure_{kind}.md").write_text(table)
            figure.savefig(out / f"measure_{kind}.svg")
            say(f"wrote {out / f'measure_{kind}'}.json, .md and .svg")


def _run(
    kind: str, live: Live, budget: int, prompt: int, window: int, tell: Callable[[str], None]
) -> tuple[dict[str, Any], Mapping[str, Any], Figure]:
    """Settings, results by name, and the figure."""
    from kvjax.evaluate import coverage, drift, figures
    from kvjax.evaluate import measure as m

    def note(name: str) -> None:
        tell(f"{kind}: {name}")

    if kind == "recall":
        found = m.compare(live, m.selectors(budget), progress=note)
        return {"budget": budget}, found, figures.by_length(found)
    if kind == "groups":
        found = m.compare(live, m.groups(budget), progress=note)
        return {"budget": budget}, found, figures.maps(found)
    if kind == "pools":
        found = m.compare(live, m.pools(budget), progress=note)
        return {"budget": budget}, found, figures.dots(found, ("head_recall", "mass", "error"))
    if kind == "queries":
        turned = m.turns(live)
        return {}, {"cosine of adjacent queries": turned}, figures.turning(turned)
    if kind == "logquant":
        kept = coverage.logquant(live, window=window, progress=note)
        return {"window": window}, kept, figures.dots(kept, ("mass", "top", "weights", "outputs"))
    if kind == "drift":
        found = drift.drift(live, prompt=prompt, progress=note)
        return {}, found, figures.drifting(found, prompt=prompt)
    found = drift.ablation(live, progress=note)
    return {}, found, figures.dots(found, ("recall", "mass", "error"))


def _rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    from kvjax.evaluate.measure import Turns

    rows = []
    for name, one in found.items():
        if isinstance(one, Turns):
            shares = one.summary()
            for tau in shares["corrected_heads"]:
                rows.append({"tau": tau, "heads corrected": shares["corrected_heads"][tau]})
                rows[-1]["layers and steps corrected"] = shares["corrected_steps"][tau]
        else:
            rows.append({"": name, **one.row()})
    return rows


def _markdown(rows: list[dict[str, Any]]) -> str:
    titles = list(rows[0])

    def cell(value: Any) -> str:
        if not isinstance(value, float):
            return str(value)
        return "-" if value != value else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"

    lines = [titles, ["---"] * len(titles), *([cell(row[t]) for t in titles] for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _length(part: str) -> int:
    number = part.strip().upper()
    whole, unit = (number[:-1], 1024) if number.endswith("K") else (number, 1)
    if not whole.isdecimal():
        raise ValueError(f"--length {part!r} must be numbers of tokens, as 1024,4096 or 1K,4K")
    return int(whole) * unit
