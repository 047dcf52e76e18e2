"""TurboQuant: every token is kept and attended, most of them as rotated codes.

The codes are those of the store `TurboQuant`, which other methods can keep their history in.
"""

from __future__ import annotations

from kvjax.policies import Compressed, PerLayer
from kvjax.presets.preset import published
from kvjax.presets.settings import Layers, over_layers
from kvjax.stores import TurboQuant
from kvjax.stores.demotion import Fifo

__all__ = ["turboquant"]


@published(
    "the first 4 and the recent tokens in full precision, the rest in 4 bits; reads all",
    paper="TurboQuant 2025",
)
def turboquant(
    bits: int = 4,
    *,
    value_bits: int | None = None,
    sink: int = 4,
    local: int = 128,
    chunk: int = 128,
    seed: int = 0,
    layers: Layers = Layers(dense=2),
) -> PerLayer:
    """TurboQuant: every token is attended; the first and the newest are exact, and the rest are
    rotated codes.

    Args:
      bits: bits per channel of a key: 2, 3, 4 or 8.
      value_bits: bits per channel of a value; None: as keys. bits=8, value_bits=4 is known as
        k8v4.
      sink: first tokens of a row, always exact.
      local: newest tokens of a row, always exact.
      chunk: tokens that are coded together; at most this many more are exact.
      seed: of the rotation.

    **Source:** TurboQuant (arXiv 2504.19874). **Differs:** see the store `TurboQuant`. Sink,
    local window and dense layers are those of vLLM's presets and of practice, not of the paper;
    vLLM's last 2 layers are dense too.

    **Checklist:** unit: none, as all tokens are read; besides: every token, 132 to 259 are
    exact; zones: sink 4, window 128 to 255; budget: none; generated: coded 128 at a time, as
    the prompt is.
    """
    store = TurboQuant(bits=bits, value_bits=value_bits, seed=seed)
    policy = Compressed(store=store, sink=sink, local=local, demote=Fifo(leave=chunk))
    return over_layers("turboquant", layers, policy)
