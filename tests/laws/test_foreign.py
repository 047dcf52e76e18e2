"""A selector and a store of another package: written from the protocols alone, they combine and
hold the laws.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import kvjax
from kvjax import CacheSpec, Fifo, Retrieval, ops
from kvjax.numerics.partial import Logits, PartialAttention, attend_part, merge, merge_sinks
from kvjax.numerics.selection import Selection, membership, split_selection
from kvjax.ops.chunk import attend_blocks
from kvjax.testing import LAWS, check_policy
from kvjax.testing._drive import fill, random_tokens, step

SPEC = CacheSpec(batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=150, dtype="float32")
LAWS_OF_PARTS = (
    "budget_of_all_is_dense_attention",
    "prefill_equals_prefill_then_updates",
    "slots_past_count_do_not_matter",
    "selected_slots_are_valid_and_unique",
    "inactive_rows_store_nothing",
)


@dataclass(frozen=True)
class Halves(kvjax.Selector):
    """Scores a token by the first half of its key's channels."""

    def init(self, spec: CacheSpec, slots: int) -> Array:
        return jnp.zeros((spec.batch, spec.kv_heads, slots, spec.head_dim // 2), spec.dtype)

    def append(self, ix: Array, k: Array, at: Array, count: Array) -> Array:
        place = jnp.arange(k.shape[2])[None]
        slot = jnp.where(place < count[:, None], at[:, None] + place, ix.shape[2])
        rows = jnp.arange(k.shape[0])[:, None]
        return ix.at[rows, :, slot].set(
            jnp.moveaxis(k, 2, 1)[..., : ix.shape[3]].astype(ix.dtype), mode="drop"
        )

    def score(self, ix: Array, q: Array, *, logits: Logits) -> Array:
        products = jnp.einsum("bkgd,bksd->bkgs", q[..., : ix.shape[3]], ix.astype(q.dtype))
        return logits.of(products)


@dataclass(frozen=True)
class FusedHalves(Halves):
    """A Halves with its own `select`."""

    def select(self, ix: Array, q: Array, among: Any, *, logits: Logits) -> Any:
        CALLS.append("select")
        if not among.fit(num_sorted_last=1, window=True):
            return super().select(ix, q, among, logits=logits)
        best = ops.select_top(
            self.score(ix, q, logits=logits), q, among, self.group_reduce, unit=1, logits=logits
        )
        return among.tokens(best, ix.shape[2], 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Joined:
    """Keys and values in one array."""

    kv: Array  # dtype[B, K, S, 2 D]
    count: Array  # i32[B]

    @property
    def slots(self) -> int:
        return self.kv.shape[2]


@dataclass(frozen=True)
class Joint(kvjax.Store):
    """A store that keeps a token's key and value side by side."""

    def init(self, spec: CacheSpec, slots: int) -> Joined:
        shape = (spec.batch, spec.kv_heads, slots, 2 * spec.head_dim)
        return Joined(jnp.zeros(shape, spec.dtype), jnp.zeros(spec.batch, jnp.int32))

    def append(self, st: Joined, k: Array, v: Array, count: Array) -> Joined:
        place = jnp.arange(k.shape[2])[None]
        fits = (place < count[:, None]) & (st.count[:, None] + place < st.slots)
        slot = jnp.where(fits, st.count[:, None] + place, st.slots)
        new = jnp.moveaxis(jnp.concatenate([k, v], axis=-1), 2, 1).astype(st.kv.dtype)
        kv = st.kv.at[jnp.arange(k.shape[0])[:, None], :, slot].set(new, mode="drop")
        return Joined(kv, jnp.minimum(st.count + count, st.slots))

    def attend(self, st: Joined, q: Array, start: Array, *, logits: Logits) -> PartialAttention:
        slot = jnp.arange(st.slots)[None]
        here = slot < st.count[:, None]
        k, v = jnp.split(st.kv, 2, axis=-1)
        v = jnp.where(here[:, None, :, None], v, jnp.zeros((), v.dtype))
        return attend_part(
            q, k, v, (here & (slot >= start[:, None]))[:, None, None], logits=logits
        )

    def gather(self, st: Joined, selection: Any) -> tuple[Array, Array]:
        slots = selection.slots.reshape(*selection.slots.shape[:2], -1, 1)
        k, v = jnp.split(jnp.take_along_axis(st.kv, slots, axis=2, mode="clip"), 2, axis=-1)
        return k, v


@dataclass(frozen=True)
class FusedJoint(Joint):
    """A Joint store that overrides verbs: history, recent block and sink are attended to in one
    operation.
    """

    def attend_with(
        self,
        st: Joined,
        q: Array,
        start: Array,
        recent: Any,
        sink: Any,
        *,
        logits: Logits,
        sinks: Array | None = None,
    ) -> Array:
        CALLS.append("attend_with")
        recent = attend_part(q, recent.k, recent.v, recent.mask(1), logits=logits)
        return self._merged(q, sink, self._stored(st, q, start, logits), recent, logits, sinks)

    def _stored(self, st: Joined, q: Array, start: Array, logits: Logits) -> PartialAttention:
        """A block at a time, which is all that is copied."""

        def read(st: Joined, first: Any, size: int) -> tuple[Array, Array]:
            k, v = jnp.split(
                jax.lax.dynamic_slice_in_dim(st.kv, first, size, axis=2), 2, axis=-1
            )
            return k, v

        q = q[:, :, :, None]
        return attend_blocks(
            q, st, start[:, None], st.count, read=read, slots=st.slots, unit=1, logits=logits
        )

    def attend_zones(
        self,
        st: Joined,
        q: Array,
        selection: Any,
        recent: Any,
        sink: Any,
        local: int,
        *,
        logits: Logits,
        sinks: Array | None = None,
    ) -> tuple[Array, Joined]:
        CALLS.append("attend_zones")
        stored, pending = split_selection(Selection(selection.slots, selection.valid), st.slots)
        newest = recent.mask(1) & (
            jnp.arange(recent.k.shape[2])[None, None, None]
            >= (recent.stop - local)[:, None, None, None]
        )
        own = membership(pending, recent.k.shape[2]) | newest
        own = jnp.broadcast_to(own, (*q.shape[:3], own.shape[3]))
        history = self.attend_slots(st, q, stored, logits=logits)
        near = attend_part(q, recent.k, recent.v, own, logits=logits)
        return self._merged(q, sink, history, near, logits, sinks), st

    def _merged(
        self,
        q: Array,
        sink: Any,
        history: PartialAttention,
        recent: PartialAttention,
        logits: Logits,
        sinks: Array | None,
    ) -> Array:
        parts = [history, recent]
        if sink is not None:
            parts.append(attend_part(q, sink.k, sink.v, sink.mask(1), logits=logits))
        return merge_sinks(merge(*parts), sinks).out.astype(q.dtype)


@dataclass(frozen=True)
class KeyNorm(kvjax.Evictor):
    """Keeps tokens with short keys."""

    def see_tokens(self, k: Array, v: Array) -> Array:
        return -jnp.linalg.norm(k.astype(jnp.float32), axis=-1)

    def score(self, evidence: Array | None, position: Array, end: Array, slots: int) -> Array:
        assert evidence is not None
        return evidence


CALLS: list[str] = []
SIZES = {"sink": 4, "local": 16, "demote": Fifo(leave=16)}
POLICIES = {
    "selector": Retrieval(selector=Halves(), budget=40, dense_below=0, **SIZES),
    "selector and store": Retrieval(
        selector=Halves(), store=Joint(), budget=40, dense_below=0, **SIZES
    ),
    "fused selector and store": Retrieval(
        selector=FusedHalves(), store=FusedJoint(), budget=40, dense_below=0, **SIZES
    ),
    "speculative": kvjax.Speculative(
        Retrieval(selector=FusedHalves(), store=Joint(), budget=40, dense_below=0, **SIZES),
        tau=0.0,
    ),
    "evictor": kvjax.Evicting(evictor=KeyNorm(), budget=40),
    "fused store that is all read": kvjax.Compressed(store=FusedJoint(), **SIZES),
}


@pytest.mark.parametrize(
    "name",
    [  # the first two have the selector of the others, and all that is left out their store
        pytest.param(
            name,
            marks=[pytest.mark.thorough]
            * (name not in ("selector and store", "fused selector and store")),
        )
        for name in POLICIES
    ],
)
def test_foreign_parts_hold_the_laws(name: str, request: pytest.FixtureRequest) -> None:
    laws = LAWS if request.config.getoption("--thorough") else LAWS_OF_PARTS
    report = check_policy(POLICIES[name], SPEC, laws=laws)
    report.raise_for_failures()
    # They evict nothing, and do not shorten a cache; not every one takes tokens back or has a
    # budget.
    left = {
        "budget_bounds_what_is_held",
        "step_attends_to_what_is_held",
        "truncate_gives_the_shorter_prompt",
    }
    left |= {"rollback_forgets_what_came_after"} if name == "speculative" else set()
    left |= {"recall_grows_with_budget"} if "all" in name else set()
    assert set(report.laws("does not apply")) <= left, report


def test_an_evictor_that_sees_keys_keeps_the_shortest() -> None:
    tokens, lengths, budget = random_tokens(SPEC), np.array([48, 30]), 24
    policy = kvjax.Evicting(evictor=KeyNorm(), budget=budget)
    cache, _ = fill(kvjax.init_layer(policy, SPEC), tokens, lengths)  # one chunk
    norms = np.linalg.norm(np.asarray(tokens.k, np.float32), axis=-1)
    for row, head in np.ndindex(2, SPEC.kv_heads):
        shortest = np.argsort(norms[row, : lengths[row], head])[:budget]
        assert set(np.asarray(cache.state.position[row, head]).tolist()) == set(
            shortest.tolist()
        )


def test_bytes_of_an_index_follow_from_its_arrays() -> None:
    selector, half = Halves(), SPEC.kv_heads * SPEC.head_dim / 2 * 4
    assert (selector.bytes_per_token(SPEC), selector.bytes_read(SPEC, 10)) == (half, 10 * half)


def test_a_check_tells_how_far_it_is() -> None:
    laws, told = ["policy_is_a_value", "budget_bounds_what_is_held"], []
    check_policy(kvjax.Full(), SPEC, laws=laws, progress=lambda *given: told.append(given))
    assert told == [(0, 2, laws[0]), (1, 2, laws[1])]


@pytest.mark.parametrize(
    ("name", "verbs"),
    [
        ("selector and store", []),
        ("fused selector and store", ["select", "attend_zones"]),
        ("fused store that is all read", ["attend_with"]),
    ],
)
def test_foreign_parts_with_the_verbs_get_the_fused_paths(name: str, verbs: list[str]) -> None:
    cache = kvjax.init_layer(POLICIES[name], SPEC)
    q, k = (
        jax.ShapeDtypeStruct((SPEC.batch, 1, n, SPEC.head_dim), jnp.float32) for n in (4, 2)
    )
    CALLS.clear()
    with ops.explained():  # each call is traced, also where a law has traced it before
        jax.eval_shape(lambda *a: kvjax.attention(*a), cache, q, k, k)
    assert verbs == CALLS


def test_fused_and_plain_parts_attend_alike() -> None:
    tokens, lengths = random_tokens(SPEC), np.array([120, 77])
    outs = []
    for name in ("selector and store", "fused selector and store"):
        cache, _ = fill(kvjax.init_layer(POLICIES[name], SPEC), tokens, lengths)
        outs.append(step(cache, tokens, lengths)[0])
    np.testing.assert_allclose(*outs, atol=1e-5)
