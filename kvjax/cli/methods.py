"""`kvjax methods`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.cli.options import AsJson, complete_cache
from kvjax.cli.terminal import show, write, write_json

if TYPE_CHECKING:
    from kvjax.presets import Preset


def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Show the settings of this method, with their defaults and meanings.",
            show_default=False,
            autocompletion=complete_cache,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Lists the methods: what each keeps, its bytes per token, and its paper. With a NAME, its
    settings.
    """
    from kvjax import presets

    if as_json:
        chosen = presets.REGISTRY.values() if name is None else [presets.find(name)]
        write_json(*map(_as_json, chosen))
    elif name is None:
        _list(presets.REGISTRY)
        if others := presets.installed():
            write(f"From installed packages: {', '.join(others)}\n")
    else:
        _describe(presets.find(name), name)


def _list(registry: Mapping[str, Preset]) -> None:
    from rich.table import Table

    table = Table(
        caption="Bytes per token, on the device and the host: one layer of Llama-3.1-8B at long context, with 8 "
        "KV heads of head size 128 in bfloat16. `kvjax methods NAME` lists the settings of a method."
    )
    for title in ("name", "what it keeps", "bytes per token", "least budget", "paper"):
        table.add_column(title, justify="right" if title == "bytes per token" else "left")
    for preset in registry.values():
        table.add_row(
            preset.name,
            preset.keeps,
            f"{_bytes(preset):,}",
            str(preset.least_budget or "none"),
            preset.paper,
        )
    show(table)


def _as_json(preset: Preset) -> dict[str, Any]:
    return {
        "name": preset.name,
        "keeps": preset.keeps,
        "bytes_per_token": _bytes(preset),
        "budget": preset.has_budget,
        "least_budget": preset.least_budget,
        "paper_setting": preset.setting(),
        "released_setting": preset.setting(released=True),
        "checklist": preset.checklist,
        "paper": None if preset.paper == "-" else preset.paper,
        "settings": {name: _shown(default) for name, default in preset.settings.items()},
    }


def _describe(preset: Preset, name: str) -> None:
    """Prints a method and its settings; `name` is how it is written."""
    from rich.table import Table

    settings = preset.settings
    first, *_ = inspect.cleandoc(preset.make.__doc__ or "").split("\n\n")
    if first:
        write(f"{' '.join(first.split())}\n\n")
    write(f"{_about(preset)}{_memory(preset)}{_settings(replace(preset, label=name))}\n")
    if not settings:
        write("It has no settings.\n")
        return
    table = Table(caption=f"Write settings after the name: {name}:{_example(settings)}")
    for title in ("setting", "default", "meaning"):
        table.add_column(title)
    words = meanings(preset)
    for setting, default in settings.items():
        table.add_row(setting, _shown(default), words[setting])
    show(table)


def _about(preset: Preset) -> str:
    """Says what a method of the registry keeps, and its paper."""
    return f"Keeps {preset.keeps}. Paper: {preset.paper}. " if preset.own is None else ""


def _memory(preset: Preset) -> str:
    """Says what a longer text costs, on the device or on the host."""
    added = _bytes(preset)
    if added == 0:
        return "The cache stays as large as its budget, however long the text is."
    return f"{added:,} bytes per token in each layer of a Llama-3.1-8B in bfloat16."


def _settings(preset: Preset) -> str:
    """The least budget, the settings of the paper and of its released code, and the checklist,
    as sentences.
    """
    least = preset.least_budget
    told = "" if least is None else f" Least budget: {least}."
    if preset.paper != "-":
        told += f"\nThe paper's setting: {preset.setting()}."
        if preset.released:
            told += f" The released code's: {preset.setting(released=True)}."
    names = (
        "Selects",
        "Attends besides to",
        "Sink and window",
        "The budget counts",
        "Generated tokens",
    )
    return told + "".join(
        f"\n{name}: {text}."
        for name, text in zip(names, preset.checklist.values(), strict=False)
    )


OWN = {
    "dense_layers": "number of first layers that attend to everything"
}  # of any method of a user


def meanings(preset: Preset) -> dict[str, str]:
    """The meaning of each setting, from the `Args:` of the preset, else of all presets, and the
    `Attributes:` of arguments with fields."""
    from kvjax import presets
    from kvjax.presets.parsing import field_names

    parameters = inspect.signature(preset.make).parameters
    every = entries(presets.__doc__, "Args") | entries(preset.make.__doc__, "Args")
    found = {name: every.get(name, OWN.get(name, "")) for name in parameters}
    for p in parameters.values():
        if names := field_names(p.default):
            own = entries(type(p.default).__doc__, "Attributes")
            found |= {name: own[field] for name, field in names.items()}
    return found


def entries(docstring: str | None, section: str) -> dict[str, str]:
    _, _, args = inspect.cleandoc(docstring or "").partition(f"\n{section}:\n")
    entries = re.split(r"^  (?=\w)", args.partition("\n\n")[0], flags=re.MULTILINE)[1:]
    each = (" ".join(entry.split()).partition(": ") for entry in entries)
    return {setting: meaning.rstrip(".") for setting, _, meaning in each}


def _bytes(preset: Preset) -> int:
    from kvjax.spec import CacheSpec

    spec = CacheSpec(batch=1, q_heads=32, kv_heads=8, head_dim=128, capacity=131072)
    return round(preset.policy().bytes_per_token(spec))


def _shown(default: Any) -> str:
    """A default as it is written in a cache's text."""
    return str(default).lower() if isinstance(default, bool | None) else str(default)


def _example(settings: dict[str, Any]) -> str:
    given = [(name, default) for name, default in settings.items() if default is not None][:2]
    return ",".join(f"{name}={_shown(default)}" for name, default in given)
