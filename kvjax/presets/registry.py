"""The registry of presets, and the parser of text such as "fier:budget=256" that names a preset
and its settings.

A name may also be that of a file's or a module's object ("mine.py:mine"), or one that an installed
package announces in the group `GROUP` of entry points.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvjax.policies import Full, PerLayer, Policy
from kvjax.presets.baselines import exact, full
from kvjax.presets.compressed import kivi, logquant, mikv, turboquant
from kvjax.presets.evicting import (
    adakv,
    evict,
    h2o,
    logevict,
    pyramidkv,
    raas,
    snapkv,
    streaming_llm,
    tova,
)
from kvjax.presets.heads import duoattention, razorattention
from kvjax.presets.index_based import magicpig, pqcache, shadowkv
from kvjax.presets.loading import (
    FILE,
    announced,
    load,
    load_announced,
    reference,
)
from kvjax.presets.own import Own, name_of
from kvjax.presets.parsing import arguments_of, read_settings, settings_of
from kvjax.presets.retrieval import fier, pariskv, quest
from kvjax.presets.speculative import arkvale, freekv
from kvjax.validation import nearest, shown

GROUP = "kvjax.presets"  # of entry points


@dataclass(frozen=True)
class Preset:
    """A method: an entry of the registry, or one of a user's own."""

    make: Callable[..., PerLayer]
    keeps: str = ""  # what it keeps and attends to
    paper: str = "-"
    paper_setting: str = (
        ""  # settings of the paper where they are not the defaults, as text without the name
    )
    released: str = ""  # those of the released code, where they differ from the paper's
    own: Own | None = None  # what a user gave; None for those of the registry
    label: str = ""  # the name in tables, if it is not that of `make`

    @property
    def name(self) -> str:
        return self.label or self.make.__name__

    @property
    def has_budget(self) -> bool:
        return "budget" in settings_of(self.make)

    def setting(self, released: bool = False) -> str:
        """The text of the paper's setting, such as "quest:group_reduce=per_head"; or of the
        released code's.
        """
        given = (released and self.released) or self.paper_setting
        return f"{self.name}:{given}" if given else self.name

    @property
    def checklist(self) -> dict[str, str]:
        """Answers of the docstring to five questions on which methods of one budget differ: the
        unit of a selection, what is attended besides, sink and window by default, what the
        budget counts, and what becomes of generated tokens.

        >>> find("magicpig").checklist["unit"]
        'tokens, sampled for each query head'
        """
        _, found, text = inspect.cleandoc(self.make.__doc__ or "").partition("**Checklist:** ")
        items = (
            " ".join(text.partition("\n\n")[0].split()).removesuffix(".").split("; ")
            if found
            else []
        )
        return dict(item.split(": ", 1) for item in items)

    @property
    def least_budget(self) -> int | None:
        """The smallest budget that the preset takes with its other settings at their defaults;
        None without a budget.

        >>> find("quest").least_budget
        48
        """
        if not self.has_budget:
            return None
        low, high = 0, self.settings["budget"]  # the default always works
        if high is None:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            try:
                self.make(middle)
            except ValueError:
                low = middle
            else:
                high = middle
        return high

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that its text takes, with their defaults; those of shared selections
        where it can share one.
        """
        found = settings_of(self.make)
        try:
            self.policy().follower()
        except ValueError:
            return {
                name: default
                for name, default in found.items()
                if name not in ("share", "anchors")
            }
        return found

    def policies(self, **settings: Any) -> PerLayer:
        """The policies of all layers, with settings by the names that its text has."""
        return self.make(**arguments_of(self.make, settings))

    def policy(self) -> Policy:
        """The policy that this preset uses for a compressed layer, with its defaults."""
        needed = {"budget": 1024} if self.own is not None and self.own.needs_budget else {}
        return self.make(**needed).rest

    def sets_dense_layers(self, **settings: Any) -> bool:
        """True if the number of first layers that attend to everything is a setting; that of a
        user's function can depend on what it returns for these settings."""
        if self.own is not None and self.own.adds_dense_layers:
            return self.own.is_alike(settings)
        return "dense_layers" in self.settings


REGISTRY: dict[str, Preset] = {
    p.name: p
    for p in (
        Preset(full, "all tokens; attends to all", "-"),
        Preset(
            fier,
            "all tokens, and keys in 1 bit; attends to the budget",
            "FIER 2025",
            paper_setting="group_reduce=per_head,chunk=32",
        ),
        Preset(
            pariskv,
            "all tokens, and rotated keys in 4 bits; attends to the budget",
            "ParisKV 2026",
            paper_setting="budget=360,local=256,chunk=512,buffer=attend,dense_below=2048,store=host",
        ),
        Preset(
            quest,
            "all tokens, and a box around the keys of each page; attends to the budget",
            "Quest 2024",
            paper_setting="group_reduce=per_head",
            released="group_reduce=per_head,newest=select",
        ),
        Preset(
            freekv,
            "all tokens in host memory; attends to the pages that the step before recalled",
            "FreeKV 2025",
            released="summary=centre,group_reduce=mean_score",
        ),
        Preset(
            arkvale,
            "all tokens in host memory; attends to the pages with the best digests",
            "ArkVale 2024",
            released="budget=4096,per=layer,topk=1056",
        ),
        Preset(
            magicpig,
            "all tokens, and key hashes; attends to a weighted sample",
            "MagicPIG 2024",
        ),
        Preset(
            pqcache,
            "all tokens, and product codes of keys; attends to the budget",
            "PQCache 2024",
            released="sink=32,local=512",
        ),
        Preset(
            shadowkv,
            "keys of low rank, values in host memory; attends to outliers and the best pages",
            "ShadowKV 2024",
            paper_setting="sink=0",
            released="budget=1248,sink=0,outliers=24",
        ),
        Preset(
            logquant,
            "84 to 126 tokens in full precision, log-spaced, the rest in 2 bits; reads all",
            "LogQuant 2025",
            released="key_axis=token",
        ),
        Preset(
            kivi,
            "up to 128 recent tokens in full precision, the rest in 2 bits; reads all",
            "KIVI 2024",
        ),
        Preset(
            turboquant,
            "the first 4 and the recent tokens in full precision, the rest in 4 bits; reads all",
            "TurboQuant 2025",
        ),
        Preset(exact, "all tokens; attends to the budget by exact scores, for comparison", "-"),
        Preset(
            streaming_llm,
            "the first 4 tokens and the most recent, up to the budget",
            "StreamingLLM 2023",
        ),
        Preset(
            logevict,
            "tokens spaced by logarithm of their age, up to the budget",
            "LogQuant 2025",
        ),
        Preset(
            h2o,
            "the most recent tokens and the most attended so far, half of the budget each",
            "H2O 2023",
        ),
        Preset(
            tova,
            "the tokens that the newest query attends to most, up to the budget",
            "TOVA 2024",
        ),
        Preset(
            snapkv,
            "the prompt's tokens that its last 32 queries attend to most, and later tokens",
            "SnapKV 2024",
        ),
        Preset(
            pyramidkv,
            "as snapkv, with budgets that fall from the first layer to the last",
            "PyramidKV 2024",
        ),
        Preset(
            adakv, "as snapkv, with more tokens in KV heads that attend widely", "AdaKV 2024"
        ),
        Preset(
            mikv,
            "the most recent and most attended tokens exactly, the rest in 2 bits; reads all",
            "MiKV 2024",
        ),
        Preset(
            raas,
            "the prompt, and generated tokens that were attended to lately",
            "RaaS 2025",
            paper_setting="prompt=65536,page=16",
        ),
        Preset(
            evict,
            "tokens by one of ten rules: by chance, by keys, by values or by remembered queries",
            "2024 to 2026",
        ),
        Preset(
            razorattention,
            "retrieval heads keep all tokens; other heads a recent window and one averaged token",
            "RazorAttention 2024",
        ),
        Preset(
            duoattention,
            "retrieval heads keep all tokens; other heads the first and the newest",
            "DuoAttention 2024",
            released="budget=320",
        ),
    )
}


def find(name: str) -> Preset:
    """The preset of that name: one of the registry, "mine.py:mine", "package.module:mine", or one
    that an installed package announces.

    Raises:
      ValueError: an unknown name, with the nearest known one; a file or module that does not have
        it, or that raises an error.
    """
    preset, found = _find(name, "cache")
    if found != name:
        raise _unknown(name, [*REGISTRY])
    return preset


def installed() -> list[str]:
    """The names that installed packages announce."""
    return list(announced(GROUP))


def own_preset(given: Any, name: str = "") -> Preset:
    """A policy, a part of one, or a function that returns one as a preset; see
    `kvjax.presets.own`.

    >>> import kvjax
    >>> own_preset(lambda budget: kvjax.Retrieval(selector=kvjax.Fier(), budget=budget), "mine").has_budget
    True
    """
    own = Own.of(name or name_of(given), given)
    return Preset(own.function(), own=own)


def read(text: str, *, where: str = "cache") -> tuple[Preset, dict[str, Any]]:
    """The preset that a text names, and the settings that it writes. `where` begins an error
    message.

    >>> preset, settings = read("fier:group=16")
    >>> preset.name, settings
    ('fier', {'group': 16})

    Raises:
      ValueError: see `find`; or a setting that the preset does not have.
    """
    if not isinstance(text, str):
        raise ValueError(f"{where} must be text such as 'fier:budget=256', got {shown(text)}")
    preset, name = _find(text, where)
    return preset, read_settings(text, preset.make, where=where, name=name)


def _find(text: str, where: str) -> tuple[Preset, str]:
    """The preset of a text, and the part of the text that names it."""
    head = text.partition(":")[0]
    name = head.strip()
    if name in REGISTRY:
        return REGISTRY[name], head
    others = {} if FILE.fullmatch(text) else announced(GROUP)
    known = [*REGISTRY, *others]
    wanted = None if name in others else reference(text)
    if wanted is not None and (wanted.is_file or not nearest(name, known)):
        own = Own.of(f"{where} {wanted.text}", load(wanted, where=where))
        # In a table a method's name is short, unless a preset has it.
        label = f"{wanted.stem}.{wanted.name}" if wanted.name in REGISTRY else wanted.name
        return Preset(own.function(), own=own, label=label), wanted.text
    if name in others:
        own = Own.of(f"{where} {name}", load_announced(others[name], where=where))
        return Preset(own.function(), own=own, label=name), head
    raise _unknown(text, known)


def _unknown(name: str, known: Sequence[str]) -> ValueError:
    first, *more = re.split(r"[:@,]", name)
    near = nearest(first, known)
    if near and "@" in name:  # rows of a comparison are named "fier@256"
        near = f"{near}:budget={more[0]}"
    hint = f"did you mean {near!r}? There" if near else "there"
    if "," in name:
        hint = "give one cache at a time; there"
    return ValueError(
        f"unknown cache {shown(name)}; {hint} are {', '.join(known)}, and FILE.py:NAME or module:NAME for your own"
    )


def parse(text: str) -> PerLayer:
    """The policies that a text names: a preset, or a method of your own, and its settings.

    >>> parse("fier:budget=256,group=16") == fier(256, group=16)
    True

    "mine.py:mine:budget=64" is what the file mine.py calls mine, "package.module:mine" what a
    module does: a function of a budget and settings, a policy, or a selector or evictor. An
    installed package may announce names of its own in the group `kvjax.presets` of entry points.

    Raises:
      ValueError: an unknown preset, with the nearest one; a setting that the preset does not
        have; a file that is not there, or that raises an error.
    """
    return parse_with_budget(text)[0]


def parse_with_budget(
    text: str, budget: int | None = None, *, where: str = "cache", budget_where: str = "budget="
) -> tuple[PerLayer, int | None]:
    """`parse` that also returns the preset's budget, or None. `budget` is one given separately
    from the text.

    `where` and `budget_where` name text and budget in error messages.
    """
    preset, settings = read(text, where=where)
    if budget is not None:
        if not preset.has_budget:
            have = ", ".join(p.name for p in REGISTRY.values() if p.has_budget)
            raise ValueError(
                f"{budget_where} {budget}: the cache {preset.name!r} has no budget; leave it out, or use one of {have}"
            )
        if settings.get("budget", budget) != budget:
            raise ValueError(
                f"{where} {text} and {budget_where} {budget} set two budgets; give one"
            )
        settings["budget"] = budget
    policies = preset.policies(**settings)
    if not preset.has_budget:
        return policies, None
    return policies, settings.get("budget", preset.settings["budget"])


def check_reaches(policies: PerLayer, layers: int, name: str) -> None:
    """Raises ValueError if the dense layers of a preset cover the whole model, or if it was
    made for another model.

    >>> check_reaches(fier(64), 2, "fier")
    Traceback (most recent call last):
        ...
    ValueError: fier keeps the first 2 layers full and the model has 2, so no layer uses it; set dense_layers below 2
    """
    policies.check(layers)
    if not policies.reaches(layers):
        if set(policies.first) != {Full()}:
            raise ValueError(
                f"{name} has policies for {len(policies.first) + 1} layers and the model has {layers}; set "
                f"layers={layers}"
            )
        raise ValueError(
            f"{name} keeps the first {len(policies.first)} layers full and the model has {layers}, so no layer uses "
            f"it; set dense_layers below {layers}"
        )
