"""Text generation: prefill a prompt, then decode in one loop on the device until all rows have
ended.
"""

from kvjax.generation.callables import as_model
from kvjax.generation.prefilling import Model, chunk_size, prefill
from kvjax.generation.prompt_inputs import right_padded
from kvjax.generation.streaming import (
    Generation,
    Stream,
    compile_ahead,
    decode,
    decode_step,
    generate,
    interrupts_wait,
    stream,
    warm_up,
)
from kvjax.generation.text import Detokenizer

__all__ = [
    "Detokenizer",
    "Generation",
    "Model",
    "Stream",
    "as_model",
    "chunk_size",
    "compile_ahead",
    "decode",
    "decode_step",
    "generate",
    "interrupts_wait",
    "prefill",
    "right_padded",
    "stream",
    "warm_up",
]
