"""Live queries, keys and values of a model, for measurements.

Capture is a policy: `Recorded` is `Full` attention that also keeps the query of each decode
step in its state. So whatever calls `kvjax.attention` can be captured, teacher-forced on a text
or generating:

    cache = kvjax.init(Recorded(steps=64), spec, layers=...)
    ...                                                        # prompts and decode steps, in any order
    live = read(cache)

Queries of prompts are not kept; `capture` decodes the tokens to be measured and prefills all
others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.tree_util import register_dataclass
from jax.typing import ArrayLike

from kvjax.cache.cache import Cache, attending, init, raise_on_overflow
from kvjax.evaluate.store import Progress
from kvjax.generation.prefilling import Model, prefill
from kvjax.numerics.partial import PartialAttention
from kvjax.policies import Full, FullState, Info, Policy, Step
from kvjax.policies.full import AroundFull
from kvjax.spec import CacheSpec, keep_ints, require_int

NO_WINDOW = np.iinfo(np.int32).max


@register_dataclass
@dataclass(frozen=True)
class RecordedState(AroundFull):
    full: FullState  # every key and value
    queries: Array  # dtype[B, steps, K, G, D] of decode steps, in order
    positions: Array  # i32[B, steps] the position of each; -1 if there was no step
    count: Array  # i32[B] steps recorded
    due: Array  # bool[B] a token was stored whose query has not attended yet
    scale: Array  # f32[B] of the logits
    window: Array  # i32[B] tokens that a query sees at most


@dataclass(frozen=True, kw_only=True)
class Recorded(Policy):
    """`Full` attention that also records the queries of a row's first `steps` decode steps, and
    no later ones.
    """

    steps: int
    takes_sinks = True  # in a prompt

    def __post_init__(self) -> None:
        keep_ints(self, steps=1)

    def init(self, spec: CacheSpec) -> RecordedState:
        B = spec.batch
        return RecordedState(
            full=Full().init(spec),
            queries=jnp.zeros(
                (B, self.steps, spec.kv_heads, spec.group, spec.head_dim), spec.dtype
            ),
            positions=jnp.full((B, self.steps), -1, jnp.int32),
            count=jnp.zeros(B, jnp.int32),
            due=jnp.zeros(B, bool),
            scale=jnp.zeros(B, jnp.float32),
            window=jnp.zeros(B, jnp.int32),
        )

    def prefill(self, st: RecordedState, k: Array, v: Array, lengths: Array) -> RecordedState:
        return dataclasses.replace(st, full=Full().prefill(st.full, k, v, lengths))

    def update(self, st: RecordedState, k: Array, v: Array, active: Array) -> RecordedState:
        return dataclasses.replace(
            st, full=Full().update(st.full, k, v, active), due=st.due | active
        )

    def attend(
        self, st: RecordedState, q: Array, step: Step
    ) -> tuple[Array, RecordedState, Info]:
        if step.logits.cap is not None or step.sinks is not None:
            raise ValueError(
                "live measurements replay plain attention, and this model has a soft cap or sink logits"
            )
        out, full, info = Full().attend(st.full, q, step)
        row = jnp.arange(q.shape[0], dtype=jnp.int32)
        at = jnp.where(st.due, st.count, self.steps)
        state = RecordedState(
            full=full,
            queries=st.queries.at[row, at].set(q.astype(st.queries.dtype), mode="drop"),
            positions=st.positions.at[row, at].set(st.length - 1, mode="drop"),
            count=jnp.minimum(st.count + st.due.astype(jnp.int32), self.steps),
            due=jnp.zeros_like(st.due),
            scale=jnp.full_like(st.scale, step.logits.scale),
            window=jnp.full_like(st.window, NO_WINDOW if step.window is None else step.window),
        )
        return out, state, info

    def attend_stored(self, st: RecordedState, q: Array, step: Step) -> PartialAttention:
        return Full().attend_stored(st.full, q, step)


@dataclass(frozen=True)
class LiveLayer:
    """One layer: T decode steps over a context of S tokens."""

    q: Array  # dtype[B, T, N, D] after RoPE
    k: Array  # dtype[B, K, S, D] after RoPE; slot = position
    v: Array  # dtype[B, K, S, D]
    scale: float  # of the logits
    window: int | None  # tokens that a query sees at most

    @property
    def spec(self) -> CacheSpec:
        """A cache of this layer that holds all its tokens."""
        B, K, S, D = self.k.shape
        return CacheSpec(
            batch=B,
            q_heads=self.q.shape[2],
            kv_heads=K,
            head_dim=D,
            capacity=S,
            dtype=np.dtype(self.k.dtype),
        )


@dataclass(frozen=True)
class Live:
    """The arrays that `Recorded` saw, by layer. All rows made their steps at the same
    positions.
    """

    layers: tuple[LiveLayer, ...]
    positions: np.ndarray  # i[T], rising; the query at position p sees the tokens 0 to p

    @property
    def lengths(self) -> np.ndarray:
        """Tokens that each step's query sees without a sliding window, its own included: i[T]."""
        return self.positions + 1

    def runs(self, longest: int = 64) -> list[slice]:
        """Steps at adjacent positions, at most `longest` together."""
        return [
            slice(i, min(i + longest, run.stop))
            for run in adjacent(self.positions)
            for i in range(run.start, run.stop, longest)
        ]


def adjacent(positions: np.ndarray) -> list[slice]:
    """Runs of positions that follow one another.

    >>> adjacent(np.array([3, 4, 8, 9]))
    [slice(0, 2, None), slice(2, 4, None)]
    """
    cuts = (np.flatnonzero(np.diff(positions) != 1) + 1).tolist()
    return [slice(*bounds) for bounds in pairwise([0, *cuts, len(positions)])]


def read(cache: Cache) -> Live:
    """The arrays that a cache of `Recorded` layers saw, of the layers with attention. Its arrays
    are shared with the cache, not copied.

    Raises:
      ValueError: a layer of another policy, no step recorded, or rows whose steps stand at
        different positions.
    """
    raise_on_overflow(cache)
    layers = []
    positions: np.ndarray | None = None
    for i, layer in enumerate(attending(cache)):
        if not isinstance(layer.policy, Recorded):
            raise ValueError(
                f"layer {i} has the policy {layer.policy}; make the cache with Recorded(steps=...)"
            )
        st: RecordedState = layer.state
        counts = np.asarray(st.count)
        at = np.asarray(st.positions)
        T = int(counts[0])
        S = int(np.asarray(st.length)[0])
        if T == 0 or (counts != T).any() or (at[:, :T] != at[:1, :T]).any():
            raise ValueError(
                f"rows must have recorded the same steps, at least one; they have {counts.tolist()}"
            )
        positions = at[0, :T]
        window = int(np.asarray(st.window)[0])
        k, v = (
            a if a.shape[2] == S else a[:, :, :S] for a in (st.full.tokens.k, st.full.tokens.v)
        )
        q = st.queries if st.queries.shape[1] == T else st.queries[:, :T]
        q = q.reshape(*q.shape[:2], -1, q.shape[-1])
        layers.append(
            LiveLayer(
                q, k, v, float(np.asarray(st.scale)[0]), None if window == NO_WINDOW else window
            )
        )
    assert positions is not None
    return Live(tuple(layers), positions)


def capture(
    checkpoint: Any,
    tokens: ArrayLike | Sequence[Sequence[int]],
    *,
    lengths: Sequence[int],
    steps: int,
    progress: Progress | None = None,
) -> Live:
    """Live queries of a text: the `steps` tokens that end at each of `lengths` are decoded, all
    others prefilled.

    `checkpoint` is a `kvjax.models.Checkpoint`, or anything with its `model` and
    `config.layers`. tokens i32[B, S], of which the longest of `lengths` are read; full
    attention throughout. `progress` is called with the tokens done, their number, and a word on
    them.

    Raises:
      ValueError: lengths that do not rise by `steps` at least, or reach beyond the text or the
        model's positions.
    """
    text = np.asarray(tokens, np.int32)
    if text.ndim != 2:
        raise ValueError(
            f"capture needs tokens [B, S], got {list(text.shape)}; for one text write [tokens]"
        )
    limit = min(
        n
        for n in (text.shape[1], getattr(checkpoint.model, "max_positions", None))
        if n is not None
    )
    ends = check_lengths(lengths, steps, limit)

    model: Model = checkpoint.model
    cache = _empty(checkpoint, len(text), ends[-1], steps * len(ends))
    stored = 0
    for end in ends:
        if end - steps > stored:
            _, cache = prefill(model, cache, text[:, stored : end - steps], final=ends[-1])
        cache = _force(model, cache, text[:, end - steps : end].T)
        stored = end
        if progress is not None:
            jax.block_until_ready(cache)
            progress(stored, ends[-1], "tokens read")
    return read(cache)


def check_lengths(lengths: Sequence[int], steps: int, limit: int | None) -> list[int]:
    """Checks `lengths` and `steps` for `capture` on a text or model of `limit` tokens (None:
    any); returns `lengths`.

    Raises:
      ValueError: as `capture`.
    """
    require_int("steps", steps, at_least=1)
    ends = [require_int("lengths", n, at_least=1) for n in lengths]
    if not ends:
        raise ValueError("lengths must name at least one length of context, got none")
    if any(end - steps < begin for begin, end in zip([1, *ends], ends, strict=False)):
        raise ValueError(
            f"each of lengths={ends} must be steps={steps} or more above the one before, the first above 1; give fewer "
            "steps, or other lengths"
        )
    if limit is not None and ends[-1] > limit:
        raise ValueError(
            f"lengths={ends} reach beyond the {limit} tokens that the text has or the model takes; give shorter ones"
        )
    return ends


def _empty(checkpoint: Any, batch: int, capacity: int, steps: int) -> Cache:
    spec = checkpoint.model.spec(batch=batch, capacity=capacity)
    return init(Recorded(steps=steps), spec, layers=checkpoint.config.layers)


@partial(jax.jit, donate_argnames="cache")
def _force(model: Model, cache: Cache, tokens: Array) -> Cache:
    """Feeds tokens i32[T, B], one decode step each, whatever the model predicts."""

    def step(cache: Cache, token: Array) -> tuple[Cache, None]:
        return model(token[:, None], cache, last_logits=True)[1], None

    return lax.scan(step, cache, tokens)[0]
