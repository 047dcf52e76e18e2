"""Settings of every public class: a value of the wrong type is refused when the object is made,
in one sentence.

The table names the settings that a class needs and values of other kinds. Everything else comes
from the fields themselves, so that a new setting is tried when it is added.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import sys
import typing
from typing import Any

import jax
import numpy as np
import pytest

import kvjax
from kvjax import contrib, evictors, models, policies, selectors, stores
from kvjax.contrib.indexed import QSA
from kvjax.contrib.shadowkv import LowRank
from kvjax.generation.processors import Processors
from kvjax.models import rope as ropes

LOCAL: dict[str, Any] = {"local": 8, "demote": kvjax.Fifo(leave=16)}
WINDOW = kvjax.Evicting(evictor=kvjax.Sliding(), budget=16)
RETRIEVAL = kvjax.Retrieval(selector=kvjax.Fier(), budget=64)
MESH = jax.make_mesh((1,), ("x",))
NEEDS: dict[str, dict[str, Any]] = {
    "Compensated": {"window": WINDOW},
    "Evicting": {"evictor": kvjax.Sliding(), "budget": 32},
    "Follower": {"store": kvjax.Dense(), "sink": 4, "unit": 1, **LOCAL},
    "HeadBudgets": {"evictor": kvjax.LastQuery(), "budget": 32},
    "Mixed": {"budget": 32, "store": kvjax.Dense()},
    "OutlierRetrieval": {"store": LowRank(rank=8, learn=256), "budget": 1024},
    "PerHead": {"heads": (0,), "selected": kvjax.Full(), "others": WINDOW},
    "PerLayer": {"first": (), "rest": RETRIEVAL},
    "ExpectedAttention": {"rope": ropes.Default()},
    "Trigonometric": {"rope": ropes.Default()},
    "HotSet": {"tokens": 64},
    "Indexed": {"indexer": QSA()},
    "Layers": {"dense": 0},
    "Retrieval": {"selector": kvjax.Fier()},
    "Speculative": {"retrieval": RETRIEVAL},
    "CacheSpec": {"batch": 1, "q_heads": 4, "kv_heads": 2, "head_dim": 16, "capacity": 64},
    "DecoderConfig": {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "layers": 2,
        "q_heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
    },
    "Placement": {"mesh": MESH, "batch": "x"},
    "Dynamic": {"factor": 2.0, "original": 64},
    "Linear": {"factor": 2.0},
    "Llama3": {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original": 64},
    "Yarn": {"factor": 2.0, "original": 64},
    "LongRope": {"short_factor": (1.0,), "long_factor": (2.0,), "original": 64},
}
CONTRIB = [
    importlib.import_module(f"kvjax.contrib.{file.name}")
    for file in pkgutil.iter_modules(contrib.__path__)
]
MODULES: tuple[Any, ...] = (policies, selectors, stores, evictors, *CONTRIB)
NAMED = {name: getattr(module, name) for module in MODULES for name in module.__all__}
NAMED |= {
    kind.__name__: kind
    for kind in (kvjax.CacheSpec, kvjax.Placement, models.DecoderConfig, Processors)
}
NAMED |= {
    name: kind
    for name, kind in vars(ropes).items()
    if inspect.isclass(kind) and ropes.Rope in kind.__mro__[1:]
}
NAMED |= {"PromptLookup": kvjax.PromptLookup, "Layers": kvjax.presets.Layers}
# What holds arrays, or is made by the library: no settings of a caller.
MADE = {
    "LayerWide",
    "Prefixed",
    "PrefixedSelector",
    "HotBlock",
    "Short",
    "Shared",
    "Info",
    "Selection",
    "PackedSelection",
    "Step",
    "Logits",
    "RecurrentLayers",
    "Candidates",
    "Visible",
}
CLASSES = {
    name: kind
    for name, kind in NAMED.items()
    if dataclasses.is_dataclass(kind)
    and isinstance(kind, type)
    and name not in MADE
    and not hasattr(kind, "length")
    and not any(str(field.type) == "Array" for field in dataclasses.fields(kind))
    and any(field.init for field in dataclasses.fields(kind))
}
NUMBERS = [
    "7",
    None,
    [3],
    np.array([1, 2]),
    float("nan"),
    float("inf"),
    True,
    1 + 2j,
    {},
    object(),
]
WRONG: dict[str, list[Any]] = {
    "int": [*NUMBERS, 2.5, -(2**40), 2**40],
    "float": NUMBERS,
    "bool": ["no", None, 2, [True], np.array([True, False])],
    "str": [3, None, "no such word", ["mean"], object()],
    "part": [3, "text", object(), [kvjax.Full()], dict],
}


def kind_of(annotation: Any) -> tuple[str, bool, bool]:
    """What WRONG calls values of this type, and whether None, and whether a word, is one."""
    parts = (
        typing.get_args(annotation)
        if "|" in str(annotation) or "Union" in str(annotation)
        else (annotation,)
    )
    plain = [part for part in parts if part is not type(None)]
    words = any(part is str or typing.get_origin(part) is typing.Literal for part in plain)
    for name, kind in (("bool", bool), ("float", float), ("int", int)):
        if kind in plain:
            return name, type(None) in parts, words
    if words:
        return "str", type(None) in parts, words
    return "part", type(None) in parts, False


def settings() -> list[tuple[str, str]]:
    return [
        (name, field.name)
        for name, kind in CLASSES.items()
        for field in dataclasses.fields(kind)
        if field.init
    ]


@pytest.mark.parametrize(("name", "field"), settings())
def test_a_value_of_the_wrong_type_is_refused(name: str, field: str) -> None:
    kind = CLASSES[name]
    good = NEEDS.get(name, {})
    kind(**good)
    what, none, word = kind_of(typing.get_type_hints(kind)[field])
    taken = []
    for value in WRONG[what]:
        if (value is None and (none or field == "local")) or (word and isinstance(value, str)):
            continue
        number = isinstance(value, bool) or (
            isinstance(value, float) and not np.isfinite(value)
        )
        if isinstance(value, OTHERS.get((name, field), ())) and (not number or field == "tau"):
            continue
        try:
            kind(**{**good, field: value})
        except ValueError as error:
            said = str(error)
            one = "\n" not in said and len(said) < 500
            if not one or (field not in said and name not in said):
                taken.append(f"{value!r} said {said}")
        except Exception as error:
            taken.append(f"{value!r} raised {error!r}")
        else:
            taken.append(f"{value!r} was accepted")
    assert not taken, f"{name}({field}=...): {'; '.join(taken)}"


# Kinds of values that a setting takes beside those of its type.
OTHERS: dict[tuple[str, str], Any] = {
    ("Layers", "anchors"): (list, np.ndarray),
    **{
        (kind, "original"): (int, float) for kind in ("Dynamic", "Llama3", "Yarn", "LongRope")
    },  # finite, above 0
    ("Speculative", "tau"): float,  # infinity: at every step
    ("Processors", "suppress_tokens"): (list, np.ndarray),
    ("Processors", "begin_suppress_tokens"): (list, np.ndarray),
}


# ----------------------------------------------------------------------------------------------------------- boundaries

FROM_ZERO = {
    "sink",
    "dense_below",
    "dense_capacity",
    "seed",
    "iterations",
    "outliers",
    "prompt",
    "dense",
    "anchors",
}
FROM_ZERO |= {"no_repeat_ngram_size", "min_new_tokens"}
MOST = {("ProductCodes", "bits"): 8, ("SimHash", "bits"): 32, ("SimHash", "tables"): 4096}


def integers() -> list[tuple[str, str]]:
    return [
        (name, field)
        for name, field in settings()
        if kind_of(typing.get_type_hints(CLASSES[name])[field])[0] == "int"
    ]


def accepts(name: str, field: str, value: int) -> bool:
    try:
        CLASSES[name](**{**NEEDS.get(name, {}), field: value})
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(("name", "field"), integers())
def test_numbers_begin_at_one_or_where_that_means_something_at_zero(
    name: str, field: str
) -> None:
    assert not accepts(name, field, -1)
    assert accepts(name, field, 0) == (field in FROM_ZERO)


@pytest.mark.parametrize(("name", "field"), MOST)
def test_the_largest_number_is_accepted_and_one_more_is_not(name: str, field: str) -> None:
    assert accepts(name, field, MOST[name, field])
    assert not accepts(name, field, MOST[name, field] + 1)


@pytest.mark.parametrize(
    "name", [name for name in CLASSES if name != "Layers"]
)  # Layers(2) has 2 dense layers
def test_numbers_and_words_are_given_by_name(name: str) -> None:
    hints = typing.get_type_hints(CLASSES[name])
    by_place = [f.name for f in dataclasses.fields(CLASSES[name]) if f.init and not f.kw_only]
    assert [field for field in by_place if kind_of(hints[field])[0] != "part"] == []


# What a program changes as it runs; everything else is frozen, states and settings alike.
CHANGES = {
    "ByLayer",
    "Cell",
    "KeptRow",
    "Places",
    "Prompt",
    "PromptRow",
    "Reading",
    "Request",
    "Rows",
    "SharedPrefixes",
    "_Block",
    "_Copy",
    "_Counts",
    "_Leaving",
    "_Node",
    "_Request",
}


def test_settings_and_states_are_frozen() -> None:
    changed = set()
    for module in [
        module for name, module in sys.modules.items() if name.partition(".")[0] == "kvjax"
    ]:
        for kind in vars(module).values():
            if (
                isinstance(kind, type)
                and kind.__module__.startswith("kvjax")
                and dataclasses.is_dataclass(kind)
            ):
                changed |= set() if kind.__dataclass_params__.frozen else {kind.__name__}  # type: ignore[attr-defined]
    assert changed <= CHANGES
