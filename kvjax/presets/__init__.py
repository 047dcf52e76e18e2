"""Presets: published methods, built from policies and their parts with the paper's defaults, and a registry of them.

A preset returns the policies of all layers of a model. Its docstring says where it differs from the paper.

Two settings of many presets:

- `layers`, a `Layers`: how many first layers attend to everything, and which layers select for those after them. As
  text: "fier:budget=256,dense_layers=2,share=4", or "anchors=2+5+9", or "anchors=FILE" of `benchmarks/calibrate.py`.
- `store`, where the history's keys and values are: "device"; "turbo4" or, with values of other bits, "turbo8v4", for
  codes of `TurboQuant` on the device; "host-turbo4" for these on the host; "host"; "float8", "int8", "int4" or "int2",
  which is host memory in that dtype; with "+1024" after one that is on the host the device keeps the last 1024 selected
  tokens of each row and KV head too (`HotSet`). A `Store` is used as it is.
"""

from kvjax.policies import share_selections
from kvjax.presets.baselines import exact, full
from kvjax.presets.compressed import kivi, logquant, mikv, turboquant
from kvjax.presets.evicting import adakv, evict, h2o, logevict, pyramidkv, raas, snapkv, streaming_llm, tova
from kvjax.presets.head_files import Heads
from kvjax.presets.heads import duoattention, razorattention
from kvjax.presets.index_based import magicpig, pqcache, shadowkv
from kvjax.presets.registry import REGISTRY, Preset, check_reaches, find, parse, parse_with_budget
from kvjax.presets.retrieval import PARISKV_BUDGET, fier, pariskv, quest
from kvjax.presets.settings import Anchors, Layers, windowed
from kvjax.presets.speculative import FREEKV, arkvale, freekv

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
    "kivi",
    "logevict",
    "logquant",
    "magicpig",
    "mikv",
    "pariskv",
    "parse",
    "parse_with_budget",
    "pqcache",
    "pyramidkv",
    "quest",
    "raas",
    "razorattention",
    "shadowkv",
    "share_selections",
    "snapkv",
    "streaming_llm",
    "tova",
    "turboquant",
    "windowed",
]
