"""`kvjax bench`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from kvjax.cli.options import AsJson, optional, sizes
from kvjax.cli.terminal import say, show, write_json


def bench(
    kernels: Annotated[
        bool, typer.Option("--kernels", help="The kernels: all that this measures.")
    ] = True,
    length: Annotated[
        str, typer.Option(help="Context length in tokens. Several: 32K,128K.")
    ] = "128K",
    batch: Annotated[str, typer.Option(help="Batch size. Several: 1,8.")] = "1",
    target: Annotated[
        str | None,
        optional(
            "Take the kernels' forms for this compute capability, such as 8.9. Default: for this GPU."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Checks a GPU's or TPU's kernels against plain JAX and times them, alone and in steps.

    The sizes are those of a layer of Llama-3.1-8B in bfloat16. Columns: microseconds on the
    device with kernels and in plain JAX; the rate of the bytes that are read at least; the
    share of slots or of the output's norm that differs; and the microseconds of each kernel. A
    kernel that fails has its error, and the others are measured. `--json` has the same with the
    card and versions, to send for docs/support.md.
    """
    import jax
    from rich.table import Table

    from kvjax.evaluate.kernels import TITLES, columns, measure
    from kvjax.evaluate.provenance import provenance
    from kvjax.kernels_pallas import simt

    lengths, batches = sizes("--length", length), sizes("--batch", batch)
    if target not in (None, *simt.ARCHITECTURES):
        raise ValueError(
            f"--target must be one of {', '.join(simt.ARCHITECTURES)}; got {target}"
        )
    backend = jax.default_backend()
    if backend not in ("gpu", "tpu"):
        raise ValueError(
            f"bench checks and times kernels, which run on an NVIDIA GPU or a TPU, and this process runs on "
            f"{backend}; kvjax compare times methods on any device"
        )
    if backend == "gpu" and (why := simt.why_not()):
        raise ValueError(f"no kernel can run here: {why}")
    if backend == "tpu" and target is not None:
        raise ValueError(
            "--target takes forms of GPUs, and this process runs on a TPU; omit it"
        )
    form = target and simt.stands_for(target)
    card, name = _card(backend)
    for size in lengths:
        for rows in batches:
            table = Table(
                title=f"{name}: {size} tokens x {rows}",
                caption="microseconds of a layer, on the device",
            )
            for title in TITLES:
                table.add_column(title)
            for row in measure(size, rows, target=form or None):
                say(f"{row['what']}: {row.get('us', row.get('failed'))}")
                table.add_row(*columns(row))
                if as_json:
                    write_json({**provenance(), "card": card, **row})
            if not as_json:
                show(table)


def _card(backend: str) -> tuple[dict[str, Any], str]:
    """Returns the fields that describe this process's GPU or TPU, and its name in a title."""
    import jax

    from kvjax.kernels_pallas import simt

    if backend == "tpu":
        kind = jax.devices()[0].device_kind
        return {"kind": kind}, kind
    card = simt.target()
    return asdict(card), f"{card.kind}, compute capability {card.capability}"
