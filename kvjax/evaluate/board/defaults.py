"""Tasks, their length, caches and budgets of a board for which a user names none."""

from __future__ import annotations

from kvjax.evaluate.tasks import GENERATED_RULER
from kvjax.models import DecoderConfig
from kvjax.numerics.rope import Default
from kvjax.presets import REGISTRY

TASKS = ("needles", GENERATED_RULER)
TOKENS = 4096  # the default length of TASKS, of which some have no room in 2048
MEASURED_HEADS = ("razorattention", "duoattention")  # need a file of `kvjax heads`
BUDGETS = (128, 32, 8)  # default budgets, as parts of the longest length


def default_caches(config: DecoderConfig) -> list[str]:
    """All presets that apply to a model, with the settings that they need of it. Those that need
    a file of `kvjax heads` are left out.
    """
    found = []
    for name in REGISTRY:
        if name in MEASURED_HEADS:
            continue
        if name == "pyramidkv":
            name = f"pyramidkv:layers={config.attention_layers}"
        if name == "shadowkv" and isinstance(config.rope, Default):
            name = f"shadowkv:rope_theta={config.rope.theta:g}"
        found.append(name)
    return found


def default_budgets(length: int) -> list[int]:
    """Three budgets for texts of `length` tokens.

    >>> default_budgets(131072)
    [1024, 4096, 16384]
    """
    return [max(1, length // part) for part in BUDGETS]
