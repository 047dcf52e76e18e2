"""Presets: published methods, built from policies and their parts with the paper's defaults, and a registry of them.

A preset returns the policies of all layers of a model. Its docstring says where it differs from the paper.

Presets that select tokens take `share` and `anchors`. After the dense layers, every `share`-th layer selects, or those
whose numbers `anchors` lists, and the layers that follow it attend to the same slots (`Shared`). As text, anchors are
separated by "+", as in "fier:budget=256,anchors=2+5+9", or name a file that `python -m benchmarks.calibrate` wrote.
"""

from kvjax.policies import share_selections
from kvjax.presets.baselines import exact, full
from kvjax.presets.compressed import kivi, logquant, mikv
from kvjax.presets.evicting import adakv, h2o, logevict, pyramidkv, raas, snapkv, streaming_llm, tova
from kvjax.presets.head_files import Heads
from kvjax.presets.heads import duoattention, razorattention
from kvjax.presets.learnt import magicpig, pqcache, shadowkv
from kvjax.presets.registry import REGISTRY, Preset, check_reaches, find, parse, parse_with_budget
from kvjax.presets.retrieval import PARISKV_BUDGET, fier, pariskv, quest
from kvjax.presets.settings import Anchors
from kvjax.presets.speculative import FREEKV, arkvale, freekv

__all__ = [
    "FREEKV",
    "PARISKV_BUDGET",
    "REGISTRY",
    "Anchors",
    "Heads",
    "Preset",
    "adakv",
    "arkvale",
    "check_reaches",
    "duoattention",
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
]
