"""The protocols of selectors."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from jax import Array

from kvjax.numerics.selection import Candidates, GroupReduce, PackedSelection, Selection
from kvjax.spec import CacheSpec


class Selector(Protocol):
    """Indexes keys, and estimates from the index which stored tokens a query needs.

    Laws: a score depends only on its own unit and the query; appending in one call or chunk by chunk gives the same
    index; slots at or past count may score anything, the caller masks them.
    """

    @property
    def unit(self) -> int:
        """Tokens of a scored unit: 1, or the page size."""
        ...

    @property
    def group_reduce(self) -> GroupReduce:
        """How the scores of the G query heads of a group become one score."""
        ...

    def check(self, spec: CacheSpec, chunk: int) -> None:
        """Raises ValueError if this selector cannot index chunks of `chunk` tokens in a cache of this spec."""
        ...

    def init(self, spec: CacheSpec, slots: int) -> Any: ...

    def append(self, ix: Any, k: Array, at: Array, count: Array) -> Any:
        """Indexes the first `count` i32[B] keys of k [B, K, T, D] as slots at[b], at[b]+1, ...; whole chunks."""
        ...

    def score(self, ix: Any, q: Array, *, scale: float) -> Array:
        """f32[B, K, G, units] estimates of scale * q.k for q [B, K, G, D]."""
        ...

    def bytes_per_token(self, spec: CacheSpec) -> float:
        """Bytes of index per stored token, in one layer over all kv heads."""
        ...

    def bytes_read(self, spec: CacheSpec, length: Any) -> Any:
        """Bytes of index that a step reads for a history of `length` tokens, in one layer over all kv heads."""
        ...


@runtime_checkable
class PendingSelector(Selector, Protocol):
    """A selector that scores pending units in its own way, not by the best exact score of their tokens."""

    def with_pending(self, among: Candidates, q: Array) -> Candidates:
        """`among` with other keys in the pending slots: a unit's score is the best score of these for q [B, K, G, D].

        The units stay the same: those with a token that is pending in `among`.
        """
        ...


@runtime_checkable
class WindowedSelector(Selector, Protocol):
    """A selector whose scores depend on which tokens of the history the query sees."""

    def score_visible(self, ix: Any, q: Array, among: Candidates, *, window: int, scale: float) -> Array:
        """`score` as if the history consisted of only the tokens in the span of `among`, at most `window` of them."""
        ...


@runtime_checkable
class FusedSelector(Selector, Protocol):
    """A selector that also ranks and selects, for steps that need no order in the selection."""

    @property
    def selects_in_window(self) -> bool:
        """Whether it also selects under a sliding window, where tokens before the starts do not count."""
        ...

    @property
    def lowest_is_last(self) -> bool:
        """Whether the unit that ranks lowest comes last in its selection."""
        ...

    def select(self, ix: Any, q: Array, among: Candidates, *, scale: float) -> Selection | PackedSelection:
        """The candidates `among` that rank highest by `group_reduce` for q [B, K, G, D], as whole units in any order.

        Slots are those of the index, and S + w for pending token w. Law: these are the tokens that `score` and
        `Retrieval` select.
        """
        ...


@runtime_checkable
class MultiStepSelector(FusedSelector, Protocol):
    """A selector that selects for several decode steps at once, in one pass over its index."""

    def select_steps(self, ix: Any, q: Array, among: Candidates, *, scale: float) -> Selection | PackedSelection:
        """The tokens [B, K, T*H, M] that `select` selects for each of the `among.steps` steps, for q [B, K, T*G, D]."""
        ...


@runtime_checkable
class TruncatableSelector(Selector, Protocol):
    """A selector whose index can be shortened, as `kvjax.truncate` needs."""

    def truncate(self, ix: Any, count: Array) -> Any:
        """The index of the first `count` i32[B] tokens of each row, whole chunks; later slots may hold anything."""
        ...


class Wrapper:
    """A base of selectors that wrap another one and share its properties. A subclass is a dataclass with `selector`."""

    selector: Selector
    selects_in_window = True
    lowest_is_last = True

    @property
    def unit(self) -> int:
        return self.selector.unit

    @property
    def group_reduce(self) -> GroupReduce:
        return self.selector.group_reduce

    def bytes_per_token(self, spec: CacheSpec) -> float:
        return self.selector.bytes_per_token(spec)

    def bytes_read(self, spec: CacheSpec, length: Any) -> Any:
        return self.selector.bytes_read(spec, length)


def require_truncatable(selector: Selector) -> TruncatableSelector:
    """`selector`, if its index can be shortened; else raises ValueError."""
    if not isinstance(selector, TruncatableSelector):
        raise ValueError(
            f"truncate cannot shorten the index of {selector}, which has no method truncate(ix, count); "
            "kvjax.rollback can remove tokens of the recent block"
        )
    return selector


def with_own_pending(selector: Selector, among: Candidates, q: Array) -> Candidates:
    """`among` with the pending keys that `selector` scores by; unchanged if it scores pending tokens exactly."""
    return selector.with_pending(among, q) if isinstance(selector, PendingSelector) else among
