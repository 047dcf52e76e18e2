"""Language models in Flax NNX that decode through kvjax caches.

>>> from kvjax import models
>>> sorted(models.FAMILIES)[:6]
['gemma2', 'gemma3_text', 'gpt_oss', 'lfm2', 'llama', 'mistral']
"""

if __name__ == "models":
    raise ImportError(
        "this folder is the package kvjax.models: write `import kvjax.models`, not `import models`"
    )

from kvjax.validation import naming_absent

with naming_absent("kvjax.models"):
    from . import rope
    from .chat import Chat
    from .checkpoint import Checkpoint, Completion
    from .config import DecoderConfig, Experts, Family, Weight
    from .decoder import Decoder
    from .gated_delta import GatedDelta
    from .short_conv import ShortConv
    from .weights import FAMILIES, distribute, load, logical_axis_rules, save, shipped

__all__ = [
    "FAMILIES",
    "Chat",
    "Checkpoint",
    "Completion",
    "Decoder",
    "DecoderConfig",
    "Experts",
    "Family",
    "GatedDelta",
    "ShortConv",
    "Weight",
    "distribute",
    "load",
    "logical_axis_rules",
    "rope",
    "save",
    "shipped",
]
