"""`kvjax methods`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.cli.options import AsJson, complete_cache
from kvjax.cli.terminal import show, write, write_json

if TYPE_CHECKING:
    from kvjax.presets import Preset

# Settings by name, in words: in all methods that have it, or in the one before the dot.
MEANINGS: dict[str, str] = {
    "budget": "tokens that a step reads for each KV head; of evicting methods, tokens held",
    "dense_layers": "first layers that attend to everything",
    "sink": "first tokens of a row that are always attended",
    "local": "newest tokens that are always attended",
    "chunk": "tokens that are indexed together, when so many are pending beside the local ones",
    "host": "whether keys and values lie in host memory",
    "hot": "tokens last read, of those in host memory, that the device holds too",
    "k": "tokens that are selected beside sink and local window, in place of a budget",
    "buffer": "whether pending tokens are selected like others, or all attended: select, or attend",
    "rope_theta": "of the model's RoPE: positions are then those within the cache",
    "shadowkv.rope_theta": "of the model's RoPE: keys are then factored as they were before it",
    "heads": "the heads that keep everything, or a file of them",
    "group_reduce": "how a GQA group shares a selection; per_head: it does not",
    "share": "layers that share the selection of the first of them",
    "anchors": "layers that select, as a list; those after one share its selection",
    "fier.group": "tokens that share a scale and a zero of the 1-bit keys",
    "logquant.group": "channels of a value that share a scale and a zero; of a key too where key_axis=token",
    "kivi.group": "tokens of a key's channel, and channels of a value, that share a scale and a zero",
    "fier.page": "tokens that are selected together, by the best score of one of them",
    "page": "tokens of a page, which are selected together",
    "quest.least_pages": "pages that are selected however small the budget",
    "quest.newest": "whether the newest page, perhaps not full, is always attended",
    "value_window": "newest values that are exact; none: as many as keys",
    "selection_scale": "factor of scores in the selection; none: that of attention",
    "votes": "how keys are voted for: tiers, or plain",
    "correct": "whether the estimate of a key is corrected for its rounding",
    "candidates": "keys with most votes that are ranked; none: a share of the history",
    "dense_below": "rows of fewer tokens attend to all of them",
    "dense_capacity": "a cache of so few tokens attends to all of them; auto: where that was measured to be faster",
    "subspace": "channels whose signs make a pattern, 8 or 4",
    "radius_bits": "bits of the length of a subspace: 16, or 4",
    "p": "share of the attention that selected tokens need hold, by their estimates; none: as many as k",
    "tau": "heads whose query's cosine to the last is below it recall anew",
    "reuse": "steps that a recall serves, while its head does not turn",
    "freekv.task": "defaults of the paper for long_input or long_generation",
    "summary": "what sums up the keys of a page",
    "digest": "what sums up the keys of a page",
    "window": "newest queries of the prompt whose attention says what is kept",
    "logquant.window": "W: 2W to 3W tokens are exact",
    "bits": "bits of a stored number",
    "mikv.group": "tokens of a key's channel, and channels of a value, that share a scale and a zero",
    "mikv.budget": "tokens held exactly for each KV head",
    "mikv.chunk": "tokens that are quantised together",
    "magicpig.bits": "bits of a hash",
    "pqcache.bits": "bits of a part's code",
    "value_bits": "bits of a value's number; none: those of keys",
    "key_axis": "whether keys are quantised by channel or by token",
    "residual": "newest tokens, at most, that are exact",
    "recent": "share of the budget that the newest tokens take",
    "kernel_size": "neighbouring tokens whose attention is pooled",
    "pooling": "how it is pooled: max or mean",
    "tables": "hash tables",
    "least": "tables in which a key must collide with the query",
    "seed": "seed of the random directions",
    "rank": "coefficients of a token's keys, for all heads together",
    "outliers": "pages that are kept exactly and always attended",
    "parts": "parts of a key that are coded apart",
    "learn": "tokens of the prompt from which the codes are learnt",
    "layers": "layers of the model",
    "beta": "how steeply budgets fall from the first layer to the last",
    "floor": "share of the budget that a KV head keeps in any case",
    "ceiling": "how many times the budget a KV head may keep",
    "threshold": "share of attention from which a token counts as read",
}


def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Say more of this method: its settings, their defaults and what they mean.",
            show_default=False,
            autocompletion=complete_cache,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Lists the methods: what each keeps, its bytes per token, and its paper. With a NAME, its settings."""
    from kvjax import presets

    if as_json:
        chosen = presets.REGISTRY.values() if name is None else [presets.find(name)]
        write_json(*map(_as_json, chosen))
    elif name is None:
        _list(presets.REGISTRY)
    else:
        _tell(presets.find(name))


def _list(registry: dict[str, Preset]) -> None:
    from rich.table import Table

    table = Table(
        caption="Bytes a token are those of one layer of Llama-3.1-8B in a long context: 8 KV heads of 128, bfloat16. "
        "`kvjax methods NAME` lists the settings of a method."
    )
    for title in ("name", "what it keeps", "bytes a token", "budget", "paper"):
        table.add_column(title, justify="right" if title == "bytes a token" else "left")
    for preset in registry.values():
        table.add_row(
            preset.name, preset.keeps, f"{_bytes(preset):,}", "yes" if preset.has_budget else "no", preset.paper
        )
    show(table)


def _as_json(preset: Preset) -> dict[str, Any]:
    return {
        "name": preset.name,
        "keeps": preset.keeps,
        "bytes_per_token": _bytes(preset),
        "budget": preset.has_budget,
        "paper": None if preset.paper == "-" else preset.paper,
        "settings": {one.name: _shown(one.default) for one in inspect.signature(preset.make).parameters.values()},
    }


def _tell(preset: Preset) -> None:
    from rich.table import Table

    settings = inspect.signature(preset.make).parameters.values()
    first, *_ = inspect.cleandoc(preset.make.__doc__ or "").split("\n\n")
    write(
        f"{' '.join(first.split())}\n\nKeeps {preset.keeps}. Paper: {preset.paper}. {_bytes(preset):,} bytes a token.\n"
    )
    if not settings:
        write("It has no settings.\n")
        return
    table = Table(caption=f"Write settings after the name: {preset.name}:{_example(settings)}")
    for title in ("setting", "default", "meaning"):
        table.add_column(title)
    for one in settings:
        table.add_row(one.name, _shown(one.default), meaning(preset.name, one.name))
    show(table)


def meaning(method: str, setting: str) -> str:
    """A setting of a method in words; nothing if the table above lacks it."""
    return MEANINGS.get(f"{method}.{setting}", MEANINGS.get(setting, ""))


def _bytes(preset: Preset) -> int:
    from kvjax.spec import CacheSpec

    spec = CacheSpec(batch=1, q_heads=32, kv_heads=8, head_dim=128, capacity=131072)
    return round(preset.policy().bytes_per_token(spec))


def _shown(default: Any) -> str:
    """As a setting is written."""
    return str(default).lower() if isinstance(default, bool | None) else str(default)


def _example(settings: Any) -> str:
    given = [one for one in settings if one.default is not None][:2]
    return ",".join(f"{one.name}={_shown(one.default)}" for one in given)
