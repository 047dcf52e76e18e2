"""`kvjax calibrate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvjax.cli.options import Dtype, ModelDir, dtype_name, model_directory, sizes, without_weights
from kvjax.cli.terminal import bar, bars, say, write


def calibrate(
    model_dir: ModelDir = None,
    text: Annotated[
        Path | None,
        typer.Option(help="UTF-8 file with a long text like those that you will decode.", show_default=False),
    ] = None,
    cache: Annotated[str, typer.Option(help="Cache to share selections of, with its settings.")] = "fier:budget=256",
    share: Annotated[int, typer.Option(help="Layers for each layer that selects, on average.")] = 4,
    length: Annotated[str, typer.Option(help="Tokens of context, in rising order.")] = "1K,2K",
    steps: Annotated[int, typer.Option(help="Adjacent queries of the model at each length.")] = 16,
    dtype: Dtype = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON file for the proposal and the measurements.", show_default=False)
    ] = None,
) -> None:
    """Finds the layers that should select for the layers after them, on your own text.

    Prints which layer selects for which, and a cache with these anchors: give it to --cache of the other commands.
    overlap is the share of a layer's own selection that its anchor reads too; mass is the share of softmax mass that
    the anchor's tokens hold; error is the relative error of the layer's output over them, and own error over its own.
    """
    if text is None or not text.is_file():
        raise ValueError("--text: " + ("give a file with a long text" if text is None else f"{text} is not a file"))
    from kvjax import presets
    from kvjax.spec import require_int

    lengths, policies = sizes("--length", length), presets.parse(cache)
    require_int("--share", share, at_least=1)
    presets.share_selections(policies, share=2)  # says now if nothing can be shared
    directory, kind = model_directory(model_dir), dtype_name(dtype)

    from kvjax import models
    from kvjax.evaluate import live, recall, sharing

    progress = bars()
    with progress, bar(progress, "reading the text"):
        tokens = recall.read_tokens(without_weights(directory), text, lengths[-1])
    with progress, bar(progress, "loading weights"):
        checkpoint = models.load(directory, dtype=kind)
    with progress, bar(progress, f"live queries of {lengths[-1]} tokens", total=lengths[-1]) as advance_to:
        seen = live.capture(checkpoint, [tokens], lengths=lengths, steps=steps, progress=advance_to)
    with progress, bar(progress, "pairs of layers") as advance_to:
        found = sharing.measure(seen, policies, progress=advance_to)

    even = found.every(share)
    anchors = found.anchors(len(even))
    proposed = f"{cache}{',' if ':' in cache else ':'}anchors={'+'.join(map(str, anchors))}"
    write(recall.markdown(found.by_layer(anchors)) + "\n")
    write(
        f"mean error: {found.total_error(anchors):.4f} with these anchors, {found.total_error(even):.4f} with "
        f"share={share}, {found.total_error(found.every(1)):.4f} with every layer selecting\n\n--cache {proposed}\n"
    )
    if out is not None:
        content = {
            **recall.about(directory, text, kind, lengths, steps),
            "cache": proposed,
            "heads": {str(layer): list(own) for layer, own in found.heads(anchors).items()},
            "layers": found.by_layer(anchors),
            "error": {
                "anchors": found.total_error(anchors),
                f"share={share}": found.total_error(even),
                "share=1": found.total_error(found.every(1)),
            },
        }
        out.write_text(json.dumps(content, indent=1) + "\n")
        say(f"wrote {out}")
