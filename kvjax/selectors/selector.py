"""The protocol of selectors, and the one that needs no index."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from jax import Array

from kvjax.selection import Candidates, GroupReduce, PackedSelection, Selection
from kvjax.spec import CacheSpec


class Selector(Protocol):
    """Indexes keys, and estimates from the index which stored tokens a query needs.

    Laws: a score depends only on its own unit and the query; appending in one call or chunk by chunk gives the same
    index; slots at or past count may score anything, the caller masks them.
    """

    @property
    def unit(self) -> int:
        """Tokens a scored unit has: 1, or the page size."""
        ...

    @property
    def group_reduce(self) -> GroupReduce:
        """How scores of the G query heads of a group become one."""
        ...

    def check(self, spec: CacheSpec, chunk: int) -> None:
        """Raises ValueError where this selector cannot index chunks of `chunk` tokens of such a cache."""
        ...

    def init(self, spec: CacheSpec, slots: int) -> Any: ...

    def append(self, ix: Any, k: Array, at: Array, count: Array) -> Any:
        """Indexes the first `count` i32[B] keys of k [B, K, T, D] as slots at[b], at[b]+1, ...; whole chunks."""
        ...

    def score(self, ix: Any, q: Array, *, scale: float) -> Array:
        """f32[B, K, G, units] estimates of scale * q.k for q [B, K, G, D]."""
        ...

    def bytes_per_token(self, spec: CacheSpec) -> float:
        """Bytes of index that a stored token takes in a layer, over all kv heads."""
        ...

    def bytes_read(self, spec: CacheSpec, length: Any) -> Any:
        """Bytes of index that a step of a layer reads of a history of `length` tokens, over all kv heads."""
        ...


@runtime_checkable
class PendingSelector(Selector, Protocol):
    """A selector that scores pending units in a way of its own, not by the best exact score of their tokens."""

    def with_pending(self, among: Candidates, q: Array) -> Candidates:
        """`among` with other keys in the pending slots: a unit's score is the best of these for q [B, K, G, D].

        The units are the same, those with a token that `among` calls pending.
        """
        ...


@runtime_checkable
class WindowedSelector(Selector, Protocol):
    """A selector whose scores depend on which tokens of the history the query sees."""

    def score_visible(self, ix: Any, q: Array, among: Candidates, *, window: int, scale: float) -> Array:
        """`score` as if the history were the tokens in the span of `among` alone, `window` of them at most."""
        ...


@runtime_checkable
class FusedSelector(Selector, Protocol):
    """A selector that also ranks and selects, for steps that need no order in the selection."""

    @property
    def selects_in_window(self) -> bool:
        """Whether it does so under a sliding window too, where tokens before the starts do not count."""
        ...

    @property
    def lowest_is_last(self) -> bool:
        """Whether the unit that ranks lowest comes last in its selection."""
        ...

    def select(self, ix: Any, q: Array, among: Candidates, *, scale: float) -> Selection | PackedSelection:
        """The tokens `among` these that rank highest by `group_reduce` for q [B, K, G, D], whole units in any order:
        slots of the index, and S + w for pending token w.

        Law: these are the tokens that `score` and `Retrieval` select.
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
    """A selector whose index can be shortened, as `kvjax.truncate` asks."""

    def truncate(self, ix: Any, count: Array) -> Any:
        """The index of the first `count` i32[B] tokens of each row, whole chunks; slots past them may hold anything."""
        ...


class Wrapper:
    """The part of a selector that is as in the one that it wraps. A subclass is a dataclass with this field."""

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
    """`selector`, if its index can be shortened; else a ValueError."""
    if not isinstance(selector, TruncatableSelector):
        raise ValueError(
            f"truncate cannot shorten the index of {selector}, which has no verb truncate(ix, count); "
            "rollback takes back tokens of the recent block"
        )
    return selector


def with_own_pending(selector: Selector, among: Candidates, q: Array) -> Candidates:
    """`among` with the pending keys by which `selector` scores; as it is, for exact scores of the tokens."""
    return selector.with_pending(among, q) if isinstance(selector, PendingSelector) else among
