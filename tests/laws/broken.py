"""Policies that are broken on purpose: a law that cannot fail proves nothing.

Each is a working policy with one fault in one verb. `CAUGHT` names the laws that must fail on
it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import kvjax
from kvjax import Evicting, Fier, Full, LastQuery, Retrieval, Sliding, Speculative
from tests.laws.cases import BASE


@dataclasses.dataclass(frozen=True)
class BrokenFull(Full):
    """A Full that is wrong in the way that `fault` says."""

    fault: str = ""

    def init(self, spec):
        st = super().init(spec)
        if self.fault == "cannot be saved":
            return Wrapped(st, {"a.b": st.overflow, "a": {"b": ~st.overflow}})
        if self.fault == "keeps one number for all rows":
            return Wrapped(st, {"batch": jnp.full(1, spec.batch, jnp.float32)})
        return Wrapped(st, {}) if self.fault == "counts its steps in a static field" else st

    def prefill(self, st, k, v, lengths):
        if isinstance(st, Wrapped):
            return dataclasses.replace(st, full=super().prefill(st.full, k, v, lengths))
        if self.fault == "stores padding's mean":
            k = k + 0 * jnp.mean(k, axis=2, keepdims=True)
        if self.fault == "stores a prompt in reverse":
            k = jnp.flip(k, axis=2)
        return super().prefill(st, k, v, lengths)

    def update(self, st, k, v, active):
        if isinstance(st, Wrapped):
            steps = st.steps + (self.fault == "counts its steps in a static field")
            return dataclasses.replace(
                st, full=super().update(st.full, k, v, active), steps=steps
            )
        if self.fault == "scales by the rows that step":
            v = v * jnp.mean(active, dtype=v.dtype)
        after = super().update(st, k, v, active)
        tokens = after.tokens
        if self.fault == "stores inactive rows":
            return super().update(st, k, v, jnp.ones_like(active))
        if self.fault == "clamps":
            last = tokens.slots - 1
            tokens = dataclasses.replace(tokens, k=tokens.k.at[:, :, last].set(k[:, :, 0]))
            return dataclasses.replace(after, tokens=tokens, overflow=st.overflow)
        if self.fault == "copies its cache":
            turned = lax.optimization_barrier(
                jnp.sort(tokens.k, axis=2) + jnp.sort(tokens.v, axis=2)
            )
            return dataclasses.replace(
                after, tokens=dataclasses.replace(tokens, k=tokens.k + 0 * turned)
            )
        return after

    def attend(self, st, q, step):
        if isinstance(st, Wrapped):
            out, full, info = super().attend(st.full, q, step)
            out = out * st.flags["batch"][0] if "batch" in st.flags else out
            return out, dataclasses.replace(st, full=full), info
        if step.lengths is not None:
            window = 1 if self.fault == "decodes each token alone" else step.window
            out, st, info = super().attend(st, q, dataclasses.replace(step, window=window))
            if self.fault == "rounds if a row takes many tokens":
                many = jnp.max(step.lengths[-1] - step.lengths[0]) >= 3
                out = jnp.where(many, out.astype(jnp.bfloat16).astype(out.dtype), out)
            return out, st, info
        tokens = st.tokens
        if self.fault == "uses the length of row 0":
            tokens = dataclasses.replace(
                tokens, count=jnp.broadcast_to(tokens.count[:1], tokens.count.shape)
            )
        if self.fault == "reads past count":
            tokens = dataclasses.replace(tokens, count=tokens.count + 1)
        if self.fault == "forgets the newest":
            tokens = dataclasses.replace(tokens, count=jnp.maximum(tokens.count - 1, 1))
        out, _, info = super().attend(dataclasses.replace(st, tokens=tokens), q, step)
        if self.fault == "tells one token too few":
            info = info._replace(positions=jnp.where(info.positions == 1, -1, info.positions))
        if self.fault == "changes the state":
            st = dataclasses.replace(st, overflow=st.overflow.astype(jnp.int8))
        if self.fault == "stops the gradient":
            out = lax.stop_gradient(out)
        if self.fault == "scales by the batch's mean length":
            out = out * (1 + jnp.mean(st.length.astype(jnp.float32))).astype(out.dtype)
        return out, st, info

    def store_steps(self, st, k, v, count):
        if isinstance(st, Wrapped):
            return dataclasses.replace(st, full=super().store_steps(st.full, k, v, count))
        return super().store_steps(st, k, v, count)

    def free(self, st):
        return super().free(st.full if isinstance(st, Wrapped) else st)

    def rollback(self, st, lengths):
        if isinstance(st, Wrapped):
            return dataclasses.replace(st, full=super().rollback(st.full, lengths))
        if self.fault == "takes a token back in every row":
            lengths = lengths - jnp.any(lengths < st.length).astype(lengths.dtype)
        return st if self.fault == "keeps what it takes back" else super().rollback(st, lengths)

    def truncate(self, st, lengths):
        if isinstance(st, Wrapped):
            return dataclasses.replace(st, full=super().truncate(st.full, lengths))
        if self.fault == "shortens every row":
            lengths = lengths - jnp.any(lengths < st.length).astype(lengths.dtype)
            return Full.rollback(self, st, lengths)
        return super().truncate(st, lengths)

    def attend_stored(self, st, q, step):
        if isinstance(st, Wrapped):
            return super().attend_stored(st.full, q, step)
        if self.fault == "forgets a prompt's first chunk":
            st = dataclasses.replace(
                st, tokens=dataclasses.replace(st.tokens, count=jnp.zeros_like(st.tokens.count))
            )
        return super().attend_stored(st, q, step)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Wrapped:
    """A FullState with leaves that a checkpoint stores under one name, or with a count that is
    part of the type.
    """

    full: Any
    flags: dict[str, Any]
    steps: int = dataclasses.field(default=0, metadata={"static": True})

    @property
    def length(self):
        return self.full.length

    @property
    def overflow(self):
        return self.full.overflow


@dataclasses.dataclass(frozen=True, eq=False)
class AnyBudget(Evicting):
    """An Evicting that equals all others."""

    def __eq__(self, other):
        return isinstance(other, AnyBudget)

    def __hash__(self):
        return 0


class Identity(Full):
    """A Full that equals nothing but itself."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other


@dataclasses.dataclass(frozen=True, kw_only=True)
class BySlot(Fier):
    """A Fier that prefers tokens by their slots."""

    def score(self, ix, q, *, logits):
        scores = super().score(ix, q, logits=logits)
        return scores + jnp.arange(scores.shape[-1], dtype=scores.dtype)[None, None, None]

    def select(self, ix, q, among, *, logits):
        found = super().select(ix, q, among, logits=logits)
        first = found.slots[..., :1]
        return found._replace(
            slots=jnp.arange(found.slots.shape[-1], dtype=first.dtype)[None, None, None]
            + 0 * first
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BrokenRetrieval(Retrieval):
    """A Retrieval that is wrong in the way that `fault` says."""

    fault: str = ""

    def attend(self, st, q, step):
        if self.fault == "reads other slots than it is given" and step.selection is not None:
            given = step.selection._replace(slots=jnp.roll(step.selection.slots, 1, axis=0))
            step = dataclasses.replace(step, selection=given)
        if self.fault == "selects in exact steps":
            step = dataclasses.replace(step, exact=False)
        out, st, info = super().attend(st, q, step)
        if self.fault == "tells a slot twice":
            slots = jnp.broadcast_to(info.selection.slots[..., :1], info.selection.slots.shape)
            info = info._replace(selection=info.selection._replace(slots=slots))
        return out, st, info

    def flush(self, st):
        full, st = jnp.any(self.full_rows(st)), super().flush(st)
        if self.fault == "changes every row in a flush":
            st = dataclasses.replace(
                st,
                recent=dataclasses.replace(
                    st.recent,
                    v=st.recent.v * jnp.where(full, 2.0, 1.0).astype(st.recent.v.dtype),
                ),
            )
        return st

    def select(self, st, q, step, *, num_sorted_last=0):
        good = super().select(st, q, step, num_sorted_last=num_sorted_last)
        if self.fault == "selects other tokens at each budget":
            return good._replace(slots=(good.slots + 3 * self.budget) % st.store.slots)
        return good


@dataclasses.dataclass(frozen=True, kw_only=True)
class BrokenSpeculative(Speculative):
    """A Speculative that forgets a row's recall if a prompt of another row flushes its full
    block.
    """

    def prefill(self, st, k, v, lengths):
        after = super().prefill(st, k, v, lengths)
        moved = after.zones.store.count != st.zones.store.count
        return dataclasses.replace(
            after, recall=st.recall, recalled_at=jnp.where(moved, -1, st.recalled_at)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BrokenEvicting(Evicting):
    """An Evicting that is wrong in the way that `fault` says."""

    fault: str = ""

    def attend(self, st, q, step):
        if self.fault == "reads half of what it holds":
            half = dataclasses.replace(
                st, tokens=dataclasses.replace(st.tokens, count=(st.tokens.count + 1) // 2)
            )
            out, _, info = super().attend(half, q, step)
            return out, st, info
        return super().attend(st, q, step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvictsTheNewest(Sliding):
    """A Sliding whose newest token is the first to go."""

    def score(self, evidence, position, length, slots):
        return -super().score(evidence, position, length, slots)


def _base(cls: type, **changes: Any) -> Any:
    return cls(**{f.name: getattr(BASE, f.name) for f in dataclasses.fields(BASE)} | changes)


BROKEN: dict[str, kvjax.Policy] = {
    fault: BrokenFull(fault=fault)
    for fault in (
        "uses the length of row 0",
        "reads past count",
        "forgets the newest",
        "stores inactive rows",
        "stores padding's mean",
        "stores a prompt in reverse",
        "clamps",
        "copies its cache",
        "changes the state",
        "scales by the batch's mean length",
        "forgets a prompt's first chunk",
        "cannot be saved",
        "stops the gradient",
        "counts its steps in a static field",
        "tells one token too few",
        "decodes each token alone",
        "keeps what it takes back",
        "scales by the rows that step",
        "rounds if a row takes many tokens",
        "takes a token back in every row",
        "shortens every row",
        "keeps one number for all rows",
    )
} | {
    "equals nothing": Identity(),
    "equals any budget": AnyBudget(evictor=Sliding(), budget=64),
    "selects by slot": _base(Retrieval, selector=BySlot(group=16)),
    "reads other slots than it is given": _base(
        BrokenRetrieval, fault="reads other slots than it is given"
    ),
    "selects in exact steps": _base(BrokenRetrieval, fault="selects in exact steps"),
    "tells a slot twice": _base(BrokenRetrieval, fault="tells a slot twice"),
    "changes every row in a flush": _base(
        BrokenRetrieval, fault="changes every row in a flush"
    ),
    "forgets its recall beside a prompt": BrokenSpeculative(_base(Retrieval), tau=-1.0),
    "selects other tokens at each budget": _base(
        BrokenRetrieval, fault="selects other tokens at each budget"
    ),
    "evicts the newest": Evicting(evictor=EvictsTheNewest(), budget=64),
    "reads half of what it holds": BrokenEvicting(
        evictor=LastQuery(), budget=64, fault="reads half of what it holds"
    ),
}

BY_VERB = {
    "step": "scales by the rows that step",
    "decode": "rounds if a row takes many tokens",
    "prompt": "forgets its recall beside a prompt",
    "flush": "changes every row in a flush",
    "insert": "keeps one number for all rows",
    "rollback": "takes a token back in every row",
    "truncate": "shortens every row",
}
"""Faults by which a row depends on its neighbours, by what these do."""

CAUGHT: list[tuple[str, str]] = [
    *((fault, "row_ignores_calls_of_other_rows") for fault in BY_VERB.values()),
    ("uses the length of row 0", "row_ignores_other_rows"),
    ("uses the length of row 0", "budget_of_all_is_dense_attention"),
    ("reads past count", "slots_past_count_do_not_matter"),
    ("forgets the newest", "every_token_is_in_one_zone"),
    ("forgets the newest", "budget_of_all_is_dense_attention"),
    ("stores inactive rows", "inactive_rows_store_nothing"),
    ("stores padding's mean", "padding_does_not_matter"),
    ("stores a prompt in reverse", "prefill_equals_prefill_then_updates"),
    ("clamps", "full_cache_drops_and_says_so"),
    ("copies its cache", "step_is_in_place"),
    ("changes the state", "structure_is_constant"),
    ("counts its steps in a static field", "one_trace_serves_all_steps"),
    ("scales by the batch's mean length", "insert_replaces_one_row"),
    ("scales by the batch's mean length", "taken_rows_continue_as_they_were"),
    ("forgets a prompt's first chunk", "prompt_attends_causally"),
    ("tells one token too few", "step_attends_to_the_positions_it_tells"),
    ("decodes each token alone", "decode_equals_single_steps"),
    ("selects in exact steps", "exact_steps_attend_to_all_tokens"),
    ("keeps what it takes back", "rollback_forgets_what_came_after"),
    ("keeps what it takes back", "truncate_gives_the_shorter_prompt"),
    ("cannot be saved", "checkpoint_restores_to_the_bit"),
    ("equals nothing", "policy_is_a_value"),
    ("equals any budget", "policy_is_a_value"),
    ("stops the gradient", "gradients_are_those_of_attention"),
    ("selects by slot", "order_of_chunks_does_not_matter"),
    ("reads other slots than it is given", "three_calls_equal_a_step"),
    ("tells a slot twice", "selected_slots_are_valid_and_unique"),
    ("selects other tokens at each budget", "outstanding_key_is_read"),
    ("changes the state", "verbs_keep_their_contract"),
    ("selects other tokens at each budget", "recall_grows_with_budget"),
    ("evicts the newest", "budget_bounds_what_is_held"),
    ("reads half of what it holds", "step_attends_to_what_is_held"),
]
