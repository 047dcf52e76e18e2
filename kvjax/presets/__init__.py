"""Presets: published methods, built from policies and their parts with the paper's defaults,
and a registry of them.

A preset returns the policies of all layers of a model. Its docstring says where it differs from
the paper, and explains its own settings. The others mean the same in all presets:

Args:
  budget: tokens that a step reads in a layer and KV head, all zones included; with methods that
    evict, those that stay.
  page: tokens of a page.
  group_reduce: how a GQA group shares a selection; "per_head": each query head has its own.
  bits: bits per channel of a key.
  value_bits: bits per channel of a value; None: as keys.
  window: last tokens of the prompt, always kept; their queries vote for the others.
  kernel_size: neighbouring votes that are pooled into a token's vote.
  pooling: "max" or "mean" of those votes.
  sink: first tokens of a row, always attended.
  local: newest tokens of a row, always attended.
  chunk: tokens that are indexed together; at most this many are pending.
  store: where the history's keys and values are: "device"; "turbo4" or, with values of other
    bits, "turbo8v4", for codes of `TurboQuant` on the device; "host-turbo4" for these on the
    host; "host"; "float8", which is host memory in that dtype; with "+1024" after one that is
    on the host the device keeps the last 1024 selected tokens of each row and KV head too
    (`HotSet`). A `Store` is used as it is.
  dense_capacity: caches of at most this capacity become `Full`; "auto": where that was measured
    to be faster (`Retrieval`), and never in host memory or with shared selections.
  layers: how many first layers attend to everything, and which layers select for those after
    them (`Layers`). As text:
    "fier:budget=256,dense_layers=2,share=4", or "anchors=2+5+9", or "anchors=FILE" of
    `benchmarks/calibrate.py`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvjax.policies import share_selections
from kvjax.presets.baselines import exact, full
from kvjax.presets.compressed import kivi, logquant
from kvjax.presets.evicting import h2o, snapkv, streaming_llm, tova
from kvjax.presets.head_files import Heads
from kvjax.presets.preset import Preset, published
from kvjax.presets.registry import (
    MODULES,
    REGISTRY,
    check_reaches,
    find,
    installed,
    load_preset,
    own_preset,
    parse,
    parse_with_budget,
    read,
)
from kvjax.presets.retrieval import PARISKV_BUDGET, fier, pariskv, quest
from kvjax.presets.settings import Anchors, Layers, windowed
from kvjax.presets.speculative import FREEKV, freekv

if TYPE_CHECKING:
    from kvjax.contrib.adakv import adakv as adakv
    from kvjax.contrib.arkvale import arkvale as arkvale
    from kvjax.contrib.duoattention import duoattention as duoattention
    from kvjax.contrib.evict import evict as evict
    from kvjax.contrib.logevict import logevict as logevict
    from kvjax.contrib.magicpig import magicpig as magicpig
    from kvjax.contrib.mikv import mikv as mikv
    from kvjax.contrib.pqcache import pqcache as pqcache
    from kvjax.contrib.pyramidkv import pyramidkv as pyramidkv
    from kvjax.contrib.raas import raas as raas
    from kvjax.contrib.razorattention import razorattention as razorattention
    from kvjax.contrib.shadowkv import shadowkv as shadowkv
    from kvjax.contrib.turboquant import turboquant as turboquant
else:  # to a type checker, every name would exist

    def __getattr__(name: str) -> Any:
        """Presets of `kvjax.contrib`, whose files are imported when they are asked for."""
        if name in MODULES:
            return getattr(import_module(MODULES[name]), name)
        raise AttributeError(f"module 'kvjax.presets' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "FREEKV",
    "PARISKV_BUDGET",
    "REGISTRY",
    "Anchors",
    "Heads",
    "Layers",
    "Preset",
    "adakv",
    "arkvale",
    "check_reaches",
    "duoattention",
    "evict",
    "exact",
    "fier",
    "find",
    "freekv",
    "full",
    "h2o",
    "installed",
    "kivi",
    "load_preset",
    "logevict",
    "logquant",
    "magicpig",
    "mikv",
    "own_preset",
    "pariskv",
    "parse",
    "parse_with_budget",
    "pqcache",
    "published",
    "pyramidkv",
    "quest",
    "raas",
    "razorattention",
    "read",
    "shadowkv",
    "share_selections",
    "snapkv",
    "streaming_llm",
    "tova",
    "turboquant",
    "windowed",
]
