"""RazorAttention: retrieval heads keep every token; other heads keep a window of tokens, and one
token that stands for all evicted ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from kvjax import ops
from kvjax.evictors import Sliding
from kvjax.numerics.partial import Logits, PartialAttention, Span, merge, merge_sinks
from kvjax.policies import PerLayer
from kvjax.policies.evicting import Evicting, EvictingState
from kvjax.policies.policy import Info, Policy, Step
from kvjax.presets.head_files import Heads, by_heads
from kvjax.presets.preset import published
from kvjax.spec import CacheSpec, require_int

__all__ = ["Compensated", "razorattention"]


@published(
    "retrieval heads keep all tokens; other heads a recent window and one averaged token",
    paper="RazorAttention 2024",
)
def razorattention(
    budget: int = 4096, *, sink: int = 4, heads: str | Heads | None = None
) -> PerLayer:
    """RazorAttention: retrieval heads keep every token; others keep `budget` tokens and the
    mean of the rest.

    Other heads keep the first `sink` tokens, the newest ones, and a compensation token.

    Args:
      budget: tokens that other heads keep.
      sink: first tokens of a row that other heads keep.
      heads: the retrieval heads, or a file of them: `kvjax.evaluate.heads.retrieval_heads`
        finds them for a model by the paper's rule, and `save` writes them. None: no head keeps
        every token.

    **Source:** RazorAttention (Tang et al. 2024, arXiv 2407.15891). **Differs:** see
    `Compensated` and `kvjax.evaluate.heads.retrieval_heads`. The paper's window grows to a
    fifth of the prompt; here it is `budget`.

    **Checklist:** unit: KV heads, chosen before; besides: in retrieval heads every token, in
    others a mean of the evicted ones; zones: sink 4, window the rest of the budget; budget:
    kept tokens of the other heads; generated: evict the oldest of the window in other heads.
    """
    require_int("razorattention(budget=...)", budget, at_least=1)
    window = Evicting(evictor=Sliding(sink=sink), budget=budget)
    return by_heads("razorattention", Compensated(window), heads)


@register_dataclass
@dataclass(frozen=True)
class CompensatedState:
    """The kept tokens, and the sums of the evicted ones."""

    kept: EvictingState
    sum_k: Array  # f32[B, K, D] of the keys of evicted tokens
    sum_v: Array  # f32[B, K, D] of their values
    next_k: Array  # dtype[B, K, D] key of the token that is evicted next, if all slots are full
    next_v: Array  # dtype[B, K, D] its value

    @property
    def length(self) -> Array:
        """i32[B] tokens received."""
        return self.kept.length

    @property
    def overflow(self) -> Array:
        """bool[B]: always false, because there is room for every token."""
        return self.kept.overflow

    @property
    def evicted(self) -> Array:
        """i32[B] evicted tokens, those in the sums."""
        return self.kept.length - self.kept.tokens.count

    @property
    def compensation(self) -> tuple[Array, Array]:
        """f32[B, K, D] mean key and mean value of the evicted tokens; 0 if none was evicted."""
        count = jnp.maximum(self.evicted, 1).astype(jnp.float32)[:, None, None]
        return self.sum_k / count, self.sum_v / count


@dataclass(frozen=True)
class Compensated(Policy):
    """Keeps a window of tokens, and the mean key and value of all evicted tokens, weighted by
    their number.

    A query attends to the tokens of `window`, and to the mean key and value of the n evicted
    tokens, whose logit is raised by log n. Costs 2 D float32 and one token per row and KV head
    besides the window.

    **Source:** RazorAttention (Tang et al. 2024, arXiv 2407.15891), compensation tokens,
    equations of section 3.3. A prompt that `kvjax.generation.prefill` reads in several chunks is
    held as it came until it ends, and compressed once, as in the paper.

    >>> import kvjax
    >>> window = kvjax.Evicting(evictor=kvjax.evictors.Sliding(sink=4), budget=256)
    >>> policy = kvjax.contrib.razorattention.Compensated(window)
    """

    window: Evicting

    takes_sinks = True

    def __post_init__(self) -> None:
        evictor = getattr(self.window, "evictor", None)
        if not isinstance(evictor, Sliding):
            raise ValueError(
                f"Compensated got {self.window!r}; it sums what a sliding window evicts, so give it "
                "kvjax.Evicting(evictor=kvjax.evictors.Sliding(...))"
            )
        if evictor.renumbered:
            raise ValueError(
                "Compensated sums keys at their original positions, so its window cannot renumber tokens; use "
                f"kvjax.evictors.Sliding(sink={evictor.sink}) without rope"
            )

    def init(self, spec: CacheSpec) -> CompensatedState:
        shape = (spec.batch, spec.kv_heads, spec.head_dim)
        sums, tokens = (
            [jnp.zeros(shape, dtype) for _ in range(2)] for dtype in (jnp.float32, spec.dtype)
        )
        return CompensatedState(self.window.init(spec), *sums, *tokens)

    def update(
        self, st: CompensatedState, k: Array, v: Array, active: Array
    ) -> CompensatedState:
        leaves = (active & (st.kept.tokens.count == st.kept.tokens.slots))[:, None, None]
        sum_k = st.sum_k + jnp.where(leaves, st.next_k.astype(jnp.float32), 0.0)
        sum_v = st.sum_v + jnp.where(leaves, st.next_v.astype(jnp.float32), 0.0)
        return self._state(self.window.update(st.kept, k, v, active), sum_k, sum_v)

    def _state(self, kept: EvictingState, sum_k: Array, sum_v: Array) -> CompensatedState:
        """The state with a copy of the token that is evicted next. If an update read that token
        from the slots that it then writes, XLA would copy the slots."""
        oldest = jnp.argmax(
            kept.position == self._first(kept, kept.length)[:, None, None], axis=-1
        )[:, :, None, None]
        tokens = (
            jnp.take_along_axis(a, oldest, axis=2)[:, :, 0]
            for a in (kept.tokens.k, kept.tokens.v)
        )
        return CompensatedState(kept, sum_k, sum_v, *tokens)

    def prefill(
        self, st: CompensatedState, k: Array, v: Array, lengths: Array
    ) -> CompensatedState:
        kept = st.kept
        T = k.shape[2]
        sink = self._sink
        first = self._first(kept, kept.length)
        end = self._first(kept, kept.length + lengths)

        def leaves(position: Array) -> Array:
            """bool[B, K, L]: which positions i32[B, K, L] this chunk evicts."""
            return (
                (position >= sink)
                & (position >= first[:, None, None])
                & (position < end[:, None, None])
            )

        used = jnp.arange(kept.tokens.slots, dtype=jnp.int32)[None] < kept.tokens.count[:, None]
        coming = jnp.broadcast_to(
            (kept.length[:, None] + jnp.arange(T, dtype=jnp.int32)[None])[:, None],
            (*k.shape[:2], T),
        )
        sources = (
            (leaves(kept.position) & used[:, None], kept.tokens.k, kept.tokens.v),
            (leaves(coming), k, v),
        )

        def add(total: Array, which: int) -> Array:
            for mask, *tokens in sources:
                evicted = jnp.where(mask[..., None], tokens[which].astype(jnp.float32), 0.0)
                total = total + jnp.sum(evicted, axis=2)
            return total

        return self._state(
            self.window.prefill(kept, k, v, lengths), add(st.sum_k, 0), add(st.sum_v, 1)
        )

    @property
    def rounds(self) -> bool:
        """True: the mean stands for tokens of which a later chunk of the prompt asks."""
        return True

    def attend(
        self, st: CompensatedState, q: Array, step: Step
    ) -> tuple[Array, CompensatedState, Info]:
        self._check_window(step.window)
        kept = st.kept
        held = Span(
            kept.tokens.k, kept.tokens.v, jnp.zeros_like(kept.length), kept.tokens.count
        )
        part = ops.attend_span(q, held, logits=step.logits, part=True)
        out = merge_sinks(merge(part, self._compensate(st, q, step.logits)), step.sinks).out
        attended = jnp.broadcast_to(kept.tokens.count.astype(jnp.float32)[:, None], q.shape[:2])
        return out.astype(q.dtype), st, Info(attended, None)

    def attend_stored(self, st: CompensatedState, q: Array, step: Step) -> PartialAttention:
        self._check_window(step.window)
        B, K, G, T, D = q.shape
        stored = self.window.attend_stored(st.kept, q, step)
        return merge(stored, self._compensate(st, q.reshape(B, K, G * T, D), step.logits))

    @property
    def _sink(self) -> int:
        return self.window.evictor.sink  # type: ignore[attr-defined]  # checked to be a Sliding

    def _first(self, kept: EvictingState, length: Array) -> Array:
        """i32[B]: the oldest position past the sink that is kept after `length` tokens."""
        return jnp.maximum(length - (kept.tokens.slots - self._sink), self._sink)

    def _compensate(self, st: CompensatedState, q: Array, logits: Logits) -> PartialAttention:
        """Attention of q [B, K, Q, D] over the mean of the evicted tokens; empty if none was
        evicted.
        """
        k, v = st.compensation
        products = jnp.einsum("bkqd,bkd->bkq", q.astype(jnp.float32), k, precision="highest")
        scores = logits.of(products)
        count = st.evicted[:, None, None]
        lse = jnp.where(
            count > 0, scores + jnp.log(jnp.maximum(count, 1).astype(jnp.float32)), -jnp.inf
        )
        out = jnp.broadcast_to(
            jnp.where(count[..., None] > 0, v[:, :, None], 0.0), (*q.shape[:3], v.shape[-1])
        )
        return PartialAttention(out, lse)

    def _check_window(self, window: int | None) -> None:
        if window is not None:
            raise ValueError(
                f"Compensated keeps the mean of all evicted tokens, so it cannot serve a sliding window of {window}; "
                "use duoattention, or kvjax.Evicting(evictor=kvjax.evictors.Sliding(...)) alone"
            )
