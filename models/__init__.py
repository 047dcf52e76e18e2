"""Language models in Flax NNX that decode through kvjax caches: Llama, Mistral, Qwen2, Qwen2.5, Qwen3 and Phi-3.

>>> from kvjax import models
>>> sorted(models.FAMILIES)
['llama', 'mistral', 'phi3', 'qwen2', 'qwen3']
"""

if __name__ == "models":
    raise ImportError("this folder is the package kvjax.models: write `import kvjax.models`, not `import models`")

from kvjax.validation import naming_absent

with naming_absent("kvjax.models"):
    from . import rope
    from .chat import Chat
    from .checkpoint import Checkpoint, Completion
    from .config import DecoderConfig, Family, Weight
    from .decoder import Decoder
    from .weights import FAMILIES, distribute, load, logical_axis_rules, save, shipped

__all__ = [
    "FAMILIES",
    "Chat",
    "Checkpoint",
    "Completion",
    "Decoder",
    "DecoderConfig",
    "Family",
    "Weight",
    "distribute",
    "load",
    "logical_axis_rules",
    "rope",
    "save",
    "shipped",
]
