"""LogQuant and KIVI: every token is kept and attended, most of them in few bits.

The presets differ in the tokens that stay exact. With LogQuant these are spaced by the
logarithm of their age, with KIVI they are the newest.
"""

from __future__ import annotations

from kvjax.policies import Compressed, PerLayer
from kvjax.presets.preset import published
from kvjax.presets.settings import Layers, over_layers
from kvjax.spec import require_int
from kvjax.stores import Quantized
from kvjax.stores.demotion import Fifo, LogSparse
from kvjax.stores.quantized import KeyAxis


@published(
    "84 to 126 tokens in full precision, log-spaced, the rest in 2 bits; reads all",
    paper="LogQuant 2025",
    released="key_axis=token",
)
def logquant(
    window: int = 42,
    *,
    bits: int = 2,
    value_bits: int | None = None,
    key_axis: KeyAxis = "channel",
    group: int = 64,
    value_window: int | None = None,
    sink: int = 0,
    layers: Layers = Layers(dense=0),
) -> PerLayer:
    """LogQuant: every token is attended; 2W to 3W are exact, sparser with age, and the rest
    have 2 bits.

    W is `window`; 42 is a third of the paper's R = 128 exact tokens. The paper has no sink,
    although a row's first token never leaves the window.

    Args:
      window: W: 2W to 3W tokens are exact.
      key_axis: keys are quantised by "channel", in groups of the W tokens that leave together,
        or by "token", as values are.
      group: channels of a value that share a scale and a zero point; with key_axis="token", of
        a key too.
      value_window: newest values that are exact, at most W; older log-spaced tokens then keep
        only their keys exact. None: as many as keys.
      sink: first tokens of a row, always exact.

    **Source:** LogQuant (2025), Algorithm 1, section 2.4. **Differs:** groups of keys have W =
    42 tokens, not 64: the tokens that leave together are quantised together, once. The released
    code quantises keys by token, like values (key_axis="token", group=64), and requantises the
    whole history at each flush. Scale and zero point are bfloat16.

    **Checklist:** unit: none, as all tokens are read; besides: every token, 2W to 3W are exact;
    zones: sink 0, window of 42 that grows to 126 with spaced tokens; budget: none; generated:
    quantised as they leave the window, as the prompt is.
    """
    demote = LogSparse(window=window)
    key_group = window if key_axis == "channel" else group
    store = Quantized(
        bits=bits,
        key_axis=key_axis,
        key_group=key_group,
        value_bits=value_bits,
        value_group=group,
    )
    policy = Compressed(
        store=store, sink=sink, local=window, demote=demote, value_window=value_window
    )
    return over_layers("logquant", layers, policy)


@published(
    "up to 128 recent tokens in full precision, the rest in 2 bits; reads all",
    paper="KIVI 2024",
)
def kivi(
    bits: int = 2,
    *,
    value_bits: int | None = None,
    residual: int = 128,
    value_window: int | None = None,
    group: int = 32,
    sink: int = 0,
    layers: Layers = Layers(dense=0),
) -> PerLayer:
    """KIVI: every token is attended; the newest, at most `residual`, are exact, and the rest
    have 2 bits.

    The paper has no sink.

    Args:
      residual: tokens that are quantised together; at most this many are exact.
      value_window: newest values that are exact; None: as many as keys.
      group: tokens of a key's channel, and channels of a value, that share a scale and a zero
        point.
      sink: first tokens of a row, always exact.

    **Source:** KIVI (Liu et al. 2024), section 3; g = 32, R = 128. **Differs:** keys and values
    leave the recent block together by the paper's rule for keys: all R at once when there are
    R, so 1 to R tokens are exact. The paper keeps the newest R values exact, as value_window=R
    does. Scale and zero point are bfloat16.

    **Checklist:** unit: none, as all tokens are read; besides: every token, up to 128 are
    exact; zones: sink 0, window of 1 to 128; budget: none; generated: quantised 128 at a time,
    as the prompt is.
    """
    require_int("kivi(residual=...)", residual, at_least=1)
    if value_window is not None:
        require_int("kivi(value_window=...)", value_window, at_least=1)
    policy = Compressed(
        store=Quantized(bits=bits, key_group=group, value_bits=value_bits),
        sink=sink,
        local=value_window or 1,
        demote=Fifo(leave=residual),
        value_window=value_window,
    )
    return over_layers("kivi", layers, policy)
