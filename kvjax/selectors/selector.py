"""The base of selectors: how an index of keys is made, scored and selected from."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from kvjax import ops
from kvjax.memory import growth
from kvjax.numerics.partial import Logits
from kvjax.numerics.selection import Candidates, GroupReduce, PackedSelection, Selection
from kvjax.spec import CacheSpec
from kvjax.validation import refuse_former_verbs

FORMER_VERBS = {
    "over_context": "a function registered with kvjax.sharding.context.selectors.split_selector"
}
LAST = -1e30  # the score of units that rank after all others


class Selector:
    """Indexes keys, and estimates from the index which stored tokens a query needs.

    A subclass is a frozen dataclass without arrays that implements `init`, `append` and
    `score`; all other verbs have defaults. Override `select` if one operation can score and
    select.

    Laws: a score depends only on its own unit and the query; appending in one call or chunk by
    chunk gives the same index; slots at or past count may score anything, because they are
    masked later.
    """

    @property
    def unit(self) -> int:
        """Tokens of a scored unit: 1, or the page size."""
        return 1

    @property
    def group_reduce(self) -> GroupReduce:
        """How the scores of the G query heads of a group become one score."""
        return "mean_softmax"

    takes_steps: ClassVar[bool] = True
    """True if `select` selects for several decode steps at once; otherwise they come one after
    the other.
    """

    reads_store: ClassVar[bool] = False
    """True if it scores what the store keeps, instead of an index of its own: a step's index
    is then the state of the store, and the store."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        refuse_former_verbs(cls, FORMER_VERBS)

    def check_store(self, store: Any) -> None:
        """Raises ValueError for a store that does not hold what this selector reads."""

    def check(self, spec: CacheSpec, chunk: int) -> None:
        """Raises ValueError if this selector cannot index chunks of `chunk` tokens in a cache
        of this spec.
        """

    def init(self, spec: CacheSpec, slots: int) -> Any:
        """An empty index of `slots` slots per row: a pytree of arrays [B, ...]."""
        raise NotImplementedError

    def append(self, ix: Any, k: Array, at: Array, count: Array) -> Any:
        """Indexes the first `count` i32[B] keys of k [B, K, T, D] as slots at[b], at[b]+1, ...;
        whole chunks.
        """
        raise NotImplementedError

    def score(self, ix: Any, q: Array, *, logits: Logits) -> Array:
        """f32[B, K, G, units] estimates of the logits of q [B, K, G, D]."""
        raise NotImplementedError

    def score_visible(
        self, ix: Any, q: Array, candidates: Candidates, *, logits: Logits
    ) -> Array:
        """`score`, for selectors whose scores depend on the other tokens that a sliding window
        shows: those in the span of `candidates`, at most `candidates.window`."""
        return self.score(ix, q, logits=logits)

    def with_pending(self, candidates: Candidates, q: Array) -> Candidates:
        """`candidates` with other keys in the pending slots, for selectors that do not score
        pending tokens exactly.

        A unit's score is the best score of these keys for q [B, K, G, D]. The units stay the
        same.
        """
        return candidates

    def select(
        self, ix: Any, q: Array, candidates: Candidates, *, logits: Logits
    ) -> Selection | PackedSelection:
        """Selects the candidates that rank highest by `group_reduce` for q [B, K, G, D], as
        whole units.

        Slots are those of the index, and S + w for pending token w. With several
        `candidates.steps`, q is [B, K, T*G, D] and the selection [B, K, T*H, M], each step's
        part after the previous step's. The default sorts all scores. One that overrides it may
        select in any order, unless `candidates.num_sorted_last` asks for one, and calls the default
        for candidates that do not `fit`. Law: it selects the tokens that the default selects.
        """
        scores = self.score_visible(ix, q, candidates, logits=logits)
        if candidates.last is not None:
            scores = jnp.where(candidates.last[:, :, None], LAST, scores)
        scored = self.with_pending(candidates, q)
        best = ops.select_top(
            scores, q, scored, self.group_reduce, unit=self.unit, logits=logits
        )
        return candidates.tokens(best, scores.shape[3], self.unit)

    def truncate(self, ix: Any, count: Array) -> Any:
        """Returns the index of the first `count` i32[B] tokens of each row, whole chunks; later
        slots may hold anything.
        """
        return ix

    def bytes_per_token(self, spec: CacheSpec) -> float:
        """Bytes of index per stored token, in one layer over all kv heads."""
        return growth(lambda slots: self.init(spec, slots), self.unit) / spec.batch

    def bytes_read(self, spec: CacheSpec, length: Any) -> Any:
        """Bytes of index that a step reads for a history of `length` tokens, in one layer over
        all kv heads.
        """
        return self.bytes_per_token(spec) * length


class Wrapper(Selector):
    """A base of selectors that wrap another one and share its properties. A subclass is a
    dataclass with `selector`.
    """

    selector: Selector

    takes_steps = False

    @property
    def unit(self) -> int:
        return self.selector.unit

    @property
    def group_reduce(self) -> GroupReduce:
        return self.selector.group_reduce

    @property
    def reads_store(self) -> bool:  # type: ignore[override]
        return self.selector.reads_store

    def check_store(self, store: Any) -> None:
        self.selector.check_store(store)

    def check(self, spec: CacheSpec, chunk: int) -> None:
        self.selector.check(spec, chunk)

    def init(self, spec: CacheSpec, slots: int) -> Any:
        return self.selector.init(spec, slots)

    def append(self, ix: Any, k: Array, at: Array, count: Array) -> Any:
        return self.selector.append(ix, k, at, count)

    def score(self, ix: Any, q: Array, *, logits: Logits) -> Array:
        return self.selector.score(ix, q, logits=logits)

    def score_visible(
        self, ix: Any, q: Array, candidates: Candidates, *, logits: Logits
    ) -> Array:
        return self.selector.score_visible(ix, q, candidates, logits=logits)

    def with_pending(self, candidates: Candidates, q: Array) -> Candidates:
        return self.selector.with_pending(candidates, q)

    def truncate(self, ix: Any, count: Array) -> Any:
        return self.selector.truncate(ix, count)

    def bytes_read(self, spec: CacheSpec, length: Any) -> Any:
        return self.selector.bytes_read(spec, length)
