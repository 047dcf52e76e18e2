"""LogQuant, KIVI, TurboQuant and MiKV: every token is kept and attended, most of them in few
bits.

The presets differ in the tokens that stay exact. With LogQuant these are spaced by the
logarithm of their age, with KIVI and TurboQuant they are the newest, and with MiKV the newest
and the most attended.
"""

from __future__ import annotations

from kvjax.evictors import HeavyHitter
from kvjax.policies import Compressed, Mixed, PerLayer
from kvjax.presets.settings import Layers, over_layers
from kvjax.spec import require_int
from kvjax.stores import Quantized, TurboQuant
from kvjax.stores.demotion import Fifo, LogSparse
from kvjax.stores.quantized import KeyAxis


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


def mikv(
    budget: int = 1024,
    *,
    bits: int = 2,
    value_bits: int | None = None,
    group: int = 32,
    chunk: int = 128,
    recent: float = 0.5,
    queries: int | None = 1024,
    layers: Layers = Layers(dense=0),
) -> PerLayer:
    """MiKV: every token is attended; the `budget` most important ones are exact, and all others
    have `bits` bits.

    The exact tokens are the newest ones and those with the most accumulated attention, as in
    `h2o`. Tokens that `h2o` would evict are stored in few bits: keys by channel, values by
    token.

    Args:
      budget: tokens that a layer and KV head keeps exact.
      group: tokens of a key's channel, and channels of a value, that share a scale and a zero
        point.
      chunk: tokens that are quantised together.
      recent: share of the budget that the newest tokens take.
      queries: how many queries of a longer prompt vote, as in `h2o`; None: all.

    **Source:** MiKV (Yang et al. 2024, arXiv 2402.18096). **Differs:** see `Mixed`: keys are
    quantised by channel in place of the paper's channel balancer.

    **Checklist:** unit: tokens that stay exact, for each KV head; besides: every other token,
    in 2 bits; zones: no sink, window of half of the budget; budget: the exact tokens;
    generated: compete for exact slots as the prompt's do.
    """
    require_int("mikv(budget=...)", budget, at_least=1)
    store = Quantized(bits=bits, key_group=group, value_bits=value_bits, value_group=group)
    policy = Mixed(
        evictor=HeavyHitter(recent=recent, queries=queries),
        budget=budget,
        store=store,
        chunk=chunk,
    )
    return over_layers("mikv", layers, policy)
