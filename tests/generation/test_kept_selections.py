"""Drafts of which not every step selects."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax import Exact, Fier, Fifo, MinMaxPages, Paris, Retrieval, SelfDraft
from kvjax.generation.drafts import Speculation
from kvjax.generation.kept_selections import steps_together
from kvjax.models import Decoder
from kvjax.numerics.selection import PackedSelection, Selection, unpack
from kvjax.policies.kept import FirstStep, KeptState, LaterStep
from kvjax.policies.policy import Step
from tests.generation.test_self_draft import CONFIG, PROMPT

NEW = 40
BY_KEYS = Retrieval(selector=Exact(), budget=12, sink=2, local=4, demote=Fifo(leave=16))


@pytest.fixture(scope="module")
def model() -> Decoder:
    return Decoder(CONFIG, rngs=nnx.Rngs(3))


def run(
    model: Decoder, policy: Any, draft: SelfDraft | None
) -> tuple[list[list[int]], Speculation | None]:
    """New tokens of each row, and what the drafts did."""
    cache = kvjax.init(policy, model.spec(3, 96), layers=CONFIG.layers)
    made = kvjax.generate(model, cache, PROMPT, max_new_tokens=NEW, draft=draft)
    return made.rows, made.speculation


@pytest.fixture(scope="module")
def want(model: Decoder) -> list[list[int]]:
    """The text of full attention."""
    return run(model, kvjax.Full(), None)[0]


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        (replace(BY_KEYS, selector=Fier(group=8)), 3),
        (replace(BY_KEYS, budget=96, local=1), 5),
    ],
    ids=["fier", "all and no window"],
)
def test_the_text_is_that_of_full_attention(
    model: Decoder, policy: Retrieval, steps: int, want: list[list[int]]
) -> None:
    """Over flushes, in rows of several lengths. With a budget for all tokens each draft is
    right, so none is read twice or missed. (The next test moves a local window, too.)"""
    found, told = run(model, policy, SelfDraft(tokens=5, steps_per_selection=steps))
    assert found == want
    assert told is not None
    assert told.drafted > 0
    if policy.budget >= 96:
        assert told.accepted == told.drafted


prefill = jax.jit(BY_KEYS.prefill)
select_first = jax.jit(Retrieval.select, static_argnums=(0, 3))
update_for_step = jax.jit(FirstStep.update_for_step, static_argnums=(0, 5))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_later_steps_attend_to_what_the_first_selected(
    seed: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And to each token that has left the local window since, once: in rows with and without a
    history, some of which take no step. Kernels pack what they find."""
    rng = np.random.default_rng(seed)
    spec = kvjax.CacheSpec(batch=4, q_heads=4, kv_heads=2, head_dim=16, capacity=96)
    step = Step(kvjax.Logits(0.25))
    selections: list[int] = []
    select = Retrieval.select

    def selecting(*args: Any) -> Any:
        selections.append(1)
        found = unpack(select(*args))
        order = jnp.argsort(~found.valid, axis=3, stable=True)
        slots = jnp.take_along_axis(found.slots, order, axis=3)
        count = jnp.sum(found.valid, axis=3, dtype=jnp.int32)
        return PackedSelection(slots, count) if packed else found

    @partial(jax.jit, static_argnums=0)
    def attend(policy: FirstStep | LaterStep, state: KeptState, q: jax.Array) -> Any:
        return policy.attend(state, q, step)[1:]

    monkeypatch.setattr(Retrieval, "select", selecting)

    def arrays(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    lengths = jnp.asarray([3, 7, *rng.integers(8, 75, 2)], jnp.int32)
    keys = arrays(4, 2, 80, 16)
    empty = BY_KEYS.init(spec)
    state = KeptState(BY_KEYS.flush(prefill(empty, keys, keys, lengths)))
    took = np.zeros(4, np.int32)
    for i in range(3):
        policy = LaterStep(BY_KEYS, later=2) if i else FirstStep(BY_KEYS, later=2)
        active = rng.random(4) < (0.7 if i else 1.0)
        new = arrays(4, 2, 1, 16), arrays(4, 2, 1, 16)
        state = update_for_step(policy, state, *new, jnp.asarray(active), step)
        q = arrays(4, 2, 2, 16)
        if i == 0:
            first = positions(state, unpack(select_first(BY_KEYS, state.state, q, step)))
        state, info = attend(policy, state, q)
        took += active if i else 0
        assert info.selection is not None
        assert len(selections) == 1  # when the program of the first step is traced
        found = positions(state, info.selection)
        for row, head in np.ndindex(4, 2):
            window = int(lengths[row]) + 1 - BY_KEYS.local
            since = range(max(window, BY_KEYS.sink), window + int(took[row]))
            want = sorted([*first[row][head], *since])
            assert sorted(found[row][head]) == want


def positions(state: KeptState, selection: Selection) -> list[list[list[int]]]:
    """Of each row and KV head."""
    found = BY_KEYS.positions(state.state, selection.slots)
    return [
        [
            [int(p) for p, is_valid in zip(heads[0], valid[0], strict=True) if is_valid]
            for heads, valid in zip(row, of_row, strict=True)
        ]
        for row, of_row in zip(np.asarray(found), np.asarray(selection.valid), strict=True)
    ]


def test_layers_that_select_pages_select_in_each_step() -> None:
    """And those whose kernel of attention has no room for more tokens."""

    def keeps(policy: Any, steps: int | None = None) -> bool:
        spec = kvjax.CacheSpec(batch=1, q_heads=4, kv_heads=2, head_dim=16, capacity=8192)
        cache = jax.eval_shape(lambda: kvjax.init(policy, spec, layers=2))
        return steps_together(cache, steps, 4) == (steps or 4)

    assert keeps(Retrieval(selector=Fier(), budget=2048))
    assert keeps(Retrieval(selector=Paris(), budget=1024))
    whole = Retrieval(selector=Fier(), budget=4096, sink=0, local=1)
    assert keeps(whole, 2)
    assert not keeps(whole)
    assert not keeps(Retrieval(selector=MinMaxPages(page=16), budget=1024))
