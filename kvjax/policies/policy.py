"""The base of cache policies, what a decode step tells them, and `Info`, the report of what it
read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.tree_util import register_dataclass

from kvjax.memory import growth
from kvjax.numerics.partial import Logits, PartialAttention, softmax_weights
from kvjax.numerics.selection import PackedSelection, Selection
from kvjax.sharding.context import Axis, no_share
from kvjax.spec import CacheSpec
from kvjax.validation import refuse_former_verbs, short_repr

FORMER_VERBS = {
    "fitted": "the verb with_divisible_chunks",
    "turns": "the verb stripes_per_device",
}
STATIC = {"static": True}  # metadata of a field that is a part of the program, not an array


class Info(NamedTuple):
    """The tokens that a decode step read: how many, which ones, and which were selected.

    XLA removes fields that a program does not use.
    """

    attended: Array  # f32[B, K] tokens whose keys and values were read; mean over the selections of a GQA group
    selection: Selection | None  # slots that a selector selected; None where everything is read
    # bool[B, K] heads that selected with this step's query; None where all heads always do
    fresh: Array | None = None
    # i32[B, K, H, M] tokens that were read, once each, in any order; -1 is padding
    positions: Array | None = None
    # f32[B, K, H, M] added to the logits of `positions`; None: nothing is
    log_weights: Array | None = None


@register_dataclass
@dataclass(frozen=True)
class Step:
    """Everything that a call tells a policy besides its queries, keys and values.

    `logits`, `window` and `exact` are static; the others are arrays. A chunk of a prompt has
    `logits`, `window` and `sinks` only.
    """

    logits: Logits = field(metadata=STATIC)
    """How logits are made of products q.k."""
    window: int | None = field(default=None, metadata=STATIC)
    """Tokens that a query sees, its own included; None: all."""
    active: Array | None = None
    """bool[B] rows that take the step, or at least one of several; the outputs of others mean
    nothing. None: all."""
    selection: Selection | PackedSelection | None = None
    """Slots to attend to; None: the policy selects."""
    lengths: Array | None = None
    """i32[T, B] tokens of each row after each of T steps; None: one step."""
    sinks: Array | None = None
    """f32[K, G] logits that only the denominator of softmax counts; None: there are none."""
    exact: bool = field(default=False, metadata=STATIC)
    """Attend to all stored tokens instead of a selection."""
    ahead: Array | None = None
    """i32[B] tokens of the same prompt between what is stored and a chunk (`Staged`); None: none."""

    def __post_init__(self) -> None:
        if not isinstance(self.logits, Logits):
            raise ValueError(
                f"Step(logits=...) takes kvjax.Logits(scale, cap), got {short_repr(self.logits)}"
            )

    def weights(self, q: Array, k: Array, mask: Array, lse: Array | None = None) -> Array:
        """Returns f32[B, K, Q, S]: the weights that the model's own attention gives the keys k
        [B, K, S, D], for a policy that decides by them.

        q [B, K, Q, D] has Q = G*T queries, those of a head after those of the head before. The
        `mask`, broadcastable to bool[B, K, Q, S], says which keys a query sees, and `lse` is as
        in `softmax_weights`.
        """
        sinks = self.sinks
        if sinks is not None:
            sinks = jnp.repeat(sinks, q.shape[2] // sinks.shape[1], axis=1)
        return softmax_weights(q, k, mask, logits=self.logits, lse=lse, sinks=sinks)

    def starts(self, length: Array, T: int) -> Array | None:
        """i32[B, T]: the lowest position that each query of a chunk sees, after `length` i32[B]
        stored tokens; None without a window.
        """
        before = length if self.ahead is None else length + self.ahead
        return chunk_starts(before, T, self.window)

    def of_heads(self, heads: Sequence[int]) -> Step:
        """The step of some of the KV heads."""
        sinks = self.sinks
        return self if sinks is None else replace(self, sinks=sinks[np.asarray(heads)])


class Policy:
    """Decides which tokens a layer keeps, and to which a query attends.

    A subclass is a frozen dataclass without arrays. `kvjax.attention` calls these verbs. All
    are pure and take arrays with kv heads before tokens, [B, K, ...]; a state is a pytree with
    `length` and `overflow`. `init`, `prefill`, `update`, `attend` and `attend_stored` are a
    whole policy; the others have defaults.
    """

    follows: ClassVar[bool] = False
    """True if steps attend to what another layer selected."""

    takes_steps: ClassVar[bool] = False
    """True if `store` and `attend` take several decode steps at once; otherwise they come one
    after the other.
    """

    observes: ClassVar[bool] = False
    """True if the queries of a prompt decide what is kept: a prompt should then be one chunk.
    """

    takes_sinks: ClassVar[bool] = False
    """True if `attend` merges `Step.sinks`, which `kvjax.attention(sinks=...)` needs."""

    takes_exact: ClassVar[bool] = False
    """True if `attend` follows `Step.exact`, so that a draft can be verified on the same cache:
    it then attends to every token of the row, as the policy stores it.
    """

    shares_prefixes: ClassVar[bool] = False
    """True if rows can store tokens with which they begin alike once (`kvjax.serve.prefixes`):
    what is kept of them does not depend on what follows.
    """

    reversible: ClassVar[bool] = False
    """True if `rollback` can remove the newest tokens, back to the last flush."""

    @property
    def rounds(self) -> bool:
        """True if it keeps other keys and values than came, such as codes. A prompt that is
        read in several chunks is then held as it came until it ends (`kvjax.generation.prefill`),
        and `attend_stored` counts the tokens that are held with `Step.starts`.
        """
        return False

    @property
    def selects(self) -> bool:
        """True if `select` selects some of the tokens that steps attend to."""
        return False

    def of_size(self, spec: CacheSpec) -> Policy:
        """The policy of a cache for `spec`: this one, or another."""
        return self

    def with_divisible_chunks(self, parts: int) -> Policy:
        """The policy of a cache whose tokens are split over `parts` devices: this one, or one
        with larger chunks.
        """
        return self

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        refuse_former_verbs(cls, FORMER_VERBS)

    def init(self, spec: CacheSpec) -> Any:
        """The state of an empty layer."""
        raise NotImplementedError

    # ----------------------------------------------------------------------------------------------------- storing

    def prefill(self, st: Any, k: Array, v: Array, lengths: Array) -> Any:
        """Stores the first `lengths` i32[B] tokens of k, v [B, K, T, D]."""
        raise NotImplementedError

    def prefill_observed(
        self, st: Any, q: Array, k: Array, v: Array, lengths: Array, step: Step
    ) -> Any:
        """`prefill`, for policies that decide by a prompt's queries q [B, K, G, T, D] what to
        keep.
        """
        return self.prefill(st, k, v, lengths)

    def update(self, st: Any, k: Array, v: Array, active: Array) -> Any:
        """Stores k, v [B, K, 1, D] of the rows where `active` bool[B] is true."""
        raise NotImplementedError

    def update_for_step(self, st: Any, k: Array, v: Array, active: Array, step: Step) -> Any:
        """`update`, for policies that evict by how queries attend: `step` has the logits, the
        window and the sinks with which the stored token is about to attend.
        """
        return self.update(st, k, v, active)

    def store_steps(self, st: Any, k: Array, v: Array, count: Array) -> Any:
        """Stores the first `count` i32[B] tokens of k, v [B, K, T, D] as T calls of `update`
        do, without a flush.
        """
        raise NotImplementedError

    def full_rows(self, st: Any) -> Array | None:
        """bool[B]: rows from which `flush` would move tokens; None for a policy that never
        needs a flush.
        """
        return None

    def flush(self, st: Any) -> Any:
        """`st`, with a chunk of the oldest recent tokens of each full row moved to its history."""
        return st

    # --------------------------------------------------------------------------------------------------- attending

    def select(self, st: Any, q: Array, step: Step) -> Selection | PackedSelection:
        """Selects the slots that a step with q [B, K, G, D] attends to, besides those that
        every step attends to.
        """
        raise ValueError(
            f"{self} selects nothing: every step attends to all that it keeps; call attend without select"
        )

    def attend(self, st: Any, q: Array, step: Step) -> tuple[Array, Any, Info]:
        """Attends with q [B, K, G, D], the queries of each row's newest token: [B, K, G, D] in
        any float dtype.

        With `step.lengths`, q is [B, K, G, T, D]: the queries of the last T tokens, each of
        which sees the tokens up to itself. The Infos are then stacked along a first axis. Law:
        equals `update` and `attend` for one token after the other.
        """
        raise NotImplementedError

    def attend_stored(self, st: Any, q: Array, step: Step) -> PartialAttention:
        """Exact attention of a chunk's queries q [B, K, G, T, D] over all stored tokens, by the
        logits and the window of `step`: a part over Q = G*T, without sinks.

        The position of query t is `length` + t, and `Step.ahead` more if tokens of its prompt are
        held elsewhere.
        """
        raise NotImplementedError

    def follower(self, heads: tuple[int, ...] | None = None) -> Policy:
        """The policy of a layer that attends to what a layer of this policy selects; `heads` as
        in `Follower`.
        """
        raise ValueError(
            f"{self!r} selects nothing that other layers could follow; share takes a kvjax.Retrieval or a "
            "kvjax.Speculative, as in the presets fier, quest, pariskv, freekv and exact"
        )

    # ------------------------------------------------------------------------------------- changes of length and size

    def free(self, st: Any) -> Array:
        """i32[B]: tokens that each row can take before it needs a flush or is full."""
        raise NotImplementedError

    def earliest(self, st: Any) -> Array:
        """i32[B]: the smallest length to which `rollback` can return each row."""
        raise NotImplementedError

    def rollback(self, st: Any, lengths: Array) -> Any:
        """`st` with the first `lengths` i32[B] tokens of each row, between `earliest` and its
        length.

        Law: equals a state to which later tokens never came. A row whose length is out of range
        stays as it is and sets `overflow`.
        """
        raise NotImplementedError

    def truncate(self, st: Any, lengths: Array) -> Any:
        """`st` with the first `lengths` i32[B] tokens of each row, between 0 and its length.

        Law: everything it holds equals, to the bit, the state after a prompt of that many
        tokens. A row whose length is out of range stays as it is and sets `overflow`.

        Raises:
          ValueError: a part of the policy has lost what a shorter prompt would hold.
        """
        raise ValueError(
            f"truncate needs a policy that can shorten its cache; {self!r} forgets tokens or remembers its "
            "last step, so prefill the shorter prompt instead"
        )

    def grown(self, st: Any, before: Any) -> Any:
        """`st`, the arrays of `before` copied into larger ones, as if it had always been this
        large.
        """
        return st

    def stored(self, st: Any) -> tuple[Array, Array, Array] | None:
        """All keys and values [B, K, T, D] in order of position, and lengths i32[B], for
        another policy to store as a prompt; None for a policy that does not give them back."""
        return None

    def over_context(self, axis: Axis, parts: int) -> Policy:
        """The policy of one of `parts` devices along `axis`, among which the history is split.

        Arrays of its state that are split are smaller by that factor, all others are those of
        this policy. The default splits nothing.

        Raises:
          ValueError: chunks or a store that cannot be split.
        """
        return self

    def over_context_by_share(self, axis: Axis, parts: int) -> Policy:
        """As `over_context`, but each device selects its share of the budget from its own tokens.

        Raises:
          ValueError: as `over_context`; or a policy that selects, but not by share.
        """
        if self.selects:
            raise ValueError(no_share(self))
        return self.over_context(axis, parts)

    def stripes_per_device(self, spec: CacheSpec, parts: int) -> int:
        """Stripes of the history that each device has room for."""
        return 0

    def bytes_per_token(self, spec: CacheSpec) -> float:
        """Bytes per token of a long context, in one layer over all kv heads; 0 if the cache
        does not grow with it.
        """
        return growth(lambda capacity: self.init(replace(spec, capacity=capacity))) / spec.batch


def chunk_starts(length: Array, T: int, window: int | None) -> Array | None:
    """i32[B, T]: the lowest position that each of T queries past `length` i32[B] tokens sees;
    None without a window.
    """
    if window is None:
        return None
    return lowest_visible(length[:, None] + jnp.arange(T, dtype=jnp.int32)[None], window)


def lowest_visible(position: Array, window: int | None) -> Array:
    """The lowest position that a query at `position` sees; a window counts the query's own
    token.
    """
    return jnp.zeros_like(position) if window is None else jnp.maximum(position - window + 1, 0)


def step_lengths(after: Array, count: Array, T: int) -> Array:
    """i32[T, B]: the length of each row after each of T steps, of which it took the first
    `count` i32[B].

    `after` i32[B] is the length after the steps. If some tokens had no room, the row's lengths
    are those of its last.
    """
    return after[None] - jnp.maximum(
        count[None] - jnp.arange(1, T + 1, dtype=jnp.int32)[:, None], 0
    )


def steps_as_heads(q: Array) -> Array:
    """Queries [B, K, G, T, D] of T steps as [B, K, T*G, D]: each step's query heads after the
    previous step's.
    """
    B, K, G, T, D = q.shape
    return jnp.swapaxes(q, 2, 3).reshape(B, K, T * G, D)


def heads_as_steps(out: Array, T: int) -> Array:
    """Outputs [B, K, T*G, D] of the query heads of T steps as [B, K, G, T, D]; the inverse of
    `steps_as_heads`.
    """
    B, K, _, D = out.shape
    return jnp.swapaxes(out.reshape(B, K, T, -1, D), 2, 3)


def in_range(lengths: Array, earliest: Array, length: Array) -> tuple[Array, Array]:
    """`lengths` i32[B], with `length` where they are not in [earliest, length], and bool[B]:
    where they are not.
    """
    outside = (lengths < earliest) | (lengths > length)
    return jnp.where(outside, length, lengths), outside


def attend_in_turn(
    policy: Policy, shortened: Callable[[Any, Array], Any], st: Any, q: Array, step: Step
) -> tuple[Array, Any, Info]:
    """`attend` of T steps with q [B, K, G, T, D], one after the other, over tokens that are
    already stored.

    `shortened` gives a state with fewer tokens. A selection of `step` has T as its first axis.
    """

    def one(st: Any, x: Any) -> tuple[Any, tuple[Array, Info]]:
        q, length, selection = x
        out, st, info = policy.attend(
            shortened(st, length), q, replace(step, lengths=None, selection=selection)
        )
        return st, (out, info)

    st, (out, info) = lax.scan(one, st, (jnp.moveaxis(q, 3, 0), step.lengths, step.selection))
    return jnp.moveaxis(out, 0, 3), st, info
