"""Finds the layers that should select for the layers after them, on a text: the anchors of
shared selections.

    python -m benchmarks.calibrate MODEL --text book.txt --length 4K --cache fier:budget=451 \\
        --share 4 --out fier4.json

The file is for `--cache fier:budget=451,anchors=fier4.json` of the commands of kvjax, and for
`anchors=` of presets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks import measured
from kvjax.cli.options import (
    AsJson,
    Dtype,
    ModelDir,
    check_file,
    dtype_name,
    model_directory,
    sizes,
    without_weights,
)
from kvjax.cli.terminal import bar, bars, say, show_markdown, write_json


def calibrate(
    model_dir: ModelDir = None,
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 file with a long text.", show_default=False)
    ] = None,
    cache: Annotated[
        str,
        typer.Option(help="The cache whose selections layers should share, with its settings."),
    ] = "fier:budget=256",
    share: Annotated[int, typer.Option(help="Layers per layer that selects, on average.")] = 4,
    length: Annotated[
        str, typer.Option("--length", help="Context lengths in tokens, ascending.")
    ] = "1K,2K",
    steps: Annotated[
        int, typer.Option(help="Consecutive decode steps to measure at each length.")
    ] = 16,
    dtype: Dtype = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="JSON file for the proposal and the measurements.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prints for each layer its anchor, the layer that selects for it, and a value for --cache
    of other commands.

    The file that --out writes also says which KV head of the anchor each KV head should follow;
    use it as --cache fier:budget=256,anchors=FILE. Columns: overlap, the share of the layer's
    own selection that its anchor reads too; mass, the share of softmax mass on the anchor's
    tokens; error, the relative error of the layer's output over the anchor's tokens; best
    heads, the same with the KV heads of the file; own error, the same over the layer's own
    tokens.
    """
    from kvjax import presets
    from kvjax.presets.parsing import read_settings
    from kvjax.spec import require_int

    preset = presets.find(cache.partition(":")[0])
    settings = read_settings(cache, preset.make, where="--cache")
    if already := {"share", "anchors"} & settings.keys():
        raise ValueError(
            f"--cache {cache} sets {already.pop()}, which this command finds; leave it out"
        )
    if "dense_capacity" in preset.settings:
        settings = {
            "dense_capacity": 0,
            **settings,
        }  # a cache that selects nothing has nothing to share
    policies = preset.policies(**settings)
    require_int("--share", share, at_least=1)
    presets.share_selections(policies, share=2)  # raises early if nothing can be shared
    check_file("--out", out)
    if out is not None and out.suffix != ".json":
        raise ValueError(
            f"--out {out}: end the name in .json, so that --cache {cache.partition(':')[0]}:anchors=FILE can read it"
        )
    if text is None or not text.is_file():
        got = "got none" if text is None else f"{text} is not a file"
        raise ValueError(f"--text takes a UTF-8 file with a long text; {got}")
    lengths, kind, directory = (
        sizes("--length", length),
        dtype_name(dtype),
        model_directory(model_dir),
    )

    from benchmarks import sharing
    from kvjax import models
    from kvjax.evaluate import capture
    from kvjax.evaluate.provenance import json_text, replace_file

    progress = bars()
    with progress, bar(progress, "reading the text"):
        checkpoint = without_weights(directory)
        capture.check_lengths(lengths, steps, checkpoint.config.max_positions)
        tokens = measured.read_tokens(checkpoint, text, lengths[-1])
        presets.check_reaches(policies, checkpoint.config.attention_layers, f"--cache {cache}")
    with progress, bar(progress, "loading weights"):
        checkpoint = models.load(directory, dtype=kind)
    with (
        progress,
        bar(progress, f"live queries of {lengths[-1]} tokens", total=lengths[-1]) as advance_to,
    ):
        seen = capture.capture(
            checkpoint, [tokens], lengths=lengths, steps=steps, progress=advance_to
        )
    with progress, bar(progress, "pairs of layers") as advance_to:
        found = sharing.measure(seen, policies, progress=advance_to)

    even = found.every(share)
    anchors = found.anchors(len(even))

    def with_anchors(given: object) -> str:
        return f"{cache}{',' if ':' in cache else ':'}anchors={given}"

    proposed = with_anchors("+".join(map(str, anchors)))
    content = {
        **measured.about(directory, text, kind, lengths, steps),
        "cache": proposed,
        "anchors": anchors,
        "heads": {str(layer): list(own) for layer, own in found.heads(anchors).items()},
        "layers": found.by_layer(anchors),
        "error": {
            "anchors, best heads": found.total_error(anchors, best_heads=True),
            "anchors": found.total_error(anchors),
            f"share={share}": found.total_error(even),
            "share=1": found.total_error(found.every(1)),
        },
    }
    if as_json:
        write_json(content)
    else:
        mapped, ours, theirs, least = content["error"].values()
        show_markdown(
            f"{measured.markdown(content['layers'])}\nmean error: {ours:.4f} with these anchors, {mapped:.4f} with the "
            f"KV heads of the file too, {theirs:.4f} with share={share}, {least:.4f} with every layer selecting\n\n"
            f"--cache {proposed}\n"
        )
    if out is not None:
        replace_file(out, json_text(content, indent=1))
        say(f"wrote {out}; to use its KV heads too: --cache {with_anchors(out)}")


if __name__ == "__main__":
    typer.run(calibrate)
