"""Laws of the ends: nothing selected, all selected, and any chunks, neighbours and order of
verbs.

They run on every policy of the laws with `--thorough`; without it, on one for each kind of
store.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import kvjax
from kvjax import (
    CacheSpec,
    HostFloat8,
    HostOffload,
    HostTurboQuant,
    HotSet,
    MinMaxPages,
    Quantized,
)
from kvjax.cache.editing import rollback, room, take_rows, truncate
from kvjax.stores.demotion import Buffer
from kvjax.testing import _anatomy as anatomy
from kvjax.testing._drive import (
    CHUNK,
    Tokens,
    fill,
    new_cache,
    prefill_chunk,
    random_tokens,
    step,
    with_room,
)
from kvjax.testing._expect import as_stored, assert_close, assert_same_contents, dense, zones
from kvjax.testing._neighbours import _decode, _flush
from tests.laws.broken import BROKEN
from tests.laws.cases import BASE, CASES, GROUP_REDUCES, SPEC, Case, _with

STORES: dict[str, Any] = {
    "host": HostOffload(page=8),
    "8-bit floats": HostFloat8(page=8),
    "codes": HostTurboQuant(page=8),
    "hot set": HotSet(tokens=512, store=HostOffload(page=8)),
    "hot set of 8-bit floats": HotSet(tokens=512, store=HostFloat8(page=8)),
    "hot set of codes": HotSet(tokens=512, store=HostTurboQuant(page=8)),
    "quantised": Quantized(bits=4, key_group=16, value_group=8),
}
PAGES = {
    f"pages over {name}": _with(selector=MinMaxPages(page=16), store=store)
    for name, store in STORES.items()
}
SELECTING = {
    name: case
    for name, case in (CASES | PAGES).items()
    if anatomy.selects(case.policy) and not isinstance(case.policy, kvjax.Speculative)
}
QUICK_SELECTING = ("fier with sink and window",)
QUICK_VERBS = ("fier with sink and window",)


def cells(names: Any, quick: tuple[str, ...]) -> list[Any]:
    return [
        pytest.param(name, marks=() if name in quick else pytest.mark.thorough)
        for name in names
    ]


def always(policy: Any) -> int:
    """Tokens that every step reads, whatever is selected."""
    inner = anatomy.core(policy)
    return inner.sink + inner.local + getattr(inner, "beside", 0)


def lengths_of(policy: Any, spec: CacheSpec) -> np.ndarray:
    """An empty row, one that sink and local window hold, and a long one."""
    inner = anatomy.core(policy)
    edges = [spec.capacity - 4, inner.sink + inner.local, 0, inner.sink + inner.local + 1]
    return np.array(edges)[np.arange(spec.batch) % 4]


@pytest.mark.parametrize("spare", ["none", "less than a page"])
@pytest.mark.parametrize("name", cells(SELECTING, ("pages over quantised",)))
def test_nothing_selected_reads_sink_and_local_window(name: str, spare: str) -> None:
    """A budget of sink and local window, and one with no room for a whole page beside them."""
    spec, inner = SELECTING[name].spec, anatomy.core(SELECTING[name].policy)
    extra = 0 if spare == "none" else inner.selector.unit - 1
    policy = anatomy.with_fields(
        SELECTING[name].policy, budget=always(inner) + extra, dense_below=0
    )
    tokens, lengths = random_tokens(spec, 31), lengths_of(policy, spec)
    cache, _ = fill(new_cache(policy, spec), tokens, lengths)
    for i in range(2):
        out, cache, info = step(cache, tokens, lengths + i)
        for b, n in enumerate(lengths + i + 1):
            newest = min(
                inner.local, len(zones(policy, spec, n - 1)[1]) + 1
            )  # a `Buffer` may hold fewer than local
            beside = {*range(min(inner.sink, n)), *range(max(n - newest, 0), n)}
            for k, h in np.ndindex(*info.positions.shape[1:3]):
                read = np.asarray(info.positions)[b, k, h]
                read = np.sort(read[read >= 0])
                more = set(read.tolist()) - beside
                assert len(read) == len(beside) + len(more)
                assert beside <= set(read.tolist())
                assert len(more) <= getattr(inner, "beside", 0), (
                    f"row {b} of {n} tokens reads {sorted(more)} too"
                )
                for g in range(spec.group) if info.positions.shape[2] == 1 else [h]:
                    head = k * spec.group + g
                    keys, values = (
                        a[read, k : k + 1] for a in _stored(policy, spec, tokens, b, n)
                    )
                    want = dense(tokens.q[b, n - 1, head : head + 1], keys, values)
                    assert_close(
                        out[b, head : head + 1],
                        want,
                        spec,
                        f"row {b} of {n} tokens, head {head}",
                    )
    assert not np.asarray(cache.state.overflow).any()


def _stored(
    policy: Any, spec: CacheSpec, tokens: Tokens, b: int, n: int
) -> tuple[np.ndarray, np.ndarray]:
    return as_stored(policy, spec, tokens.k[b, :n], tokens.v[b, :n], n - 1)


@pytest.mark.parametrize("tau", [-1.0, 2.0])
def test_a_recall_of_nothing_is_refused_by_its_budget(tau: float) -> None:
    for budget in (28, 28 + 15):
        retrieval = dataclasses.replace(BASE, selector=MinMaxPages(page=16), budget=budget)
        with pytest.raises(
            ValueError, match=rf"budget={budget} leaves nothing besides sink \+ local = 4 \+ 24"
        ):
            kvjax.Speculative(retrieval, tau=tau)


def least_for_all(policy: Any, spec: CacheSpec, length: int) -> int:
    """The smallest budget with which a step reads all `length` tokens of a row."""
    inner = anatomy.core(policy)
    chunks, recent = zones(policy, spec, length - 1)  # a full block is flushed after the step
    unit, pending = inner.selector.unit, max(len(recent) + 1 - inner.local, 0)
    return always(policy) + sum(map(len, chunks)) + -(-pending // unit) * unit


@pytest.mark.parametrize("name", cells(SELECTING, QUICK_SELECTING))
def test_all_selected_is_attention_over_all(name: str) -> None:
    """With the budget that is stated to be enough, and not with one page less than the least."""
    case = SELECTING[name]
    spec, inner = case.spec, anatomy.core(case.policy)
    n, tokens = spec.capacity - 3, random_tokens(spec, 32)
    least, chunk = least_for_all(case.policy, spec, n), inner.demote.leave
    stated = (
        n
        + (chunk if isinstance(inner.demote, Buffer) else inner.selector.unit)
        + getattr(inner, "beside", 0)
    )
    assert least <= stated
    for budget in (least, least - 1):
        changes = {"budget": budget, "dense_below": 0}
        if isinstance(inner.store, HotSet):
            changes["store"] = dataclasses.replace(inner.store, tokens=spec.group * 256)
        policy = anatomy.with_fields(case.policy, **changes)
        cache, _ = fill(new_cache(policy, spec), tokens, np.full(spec.batch, n - 1))
        out, _, info = step(cache, tokens, np.full(spec.batch, n - 1))
        if budget < least:
            # tokens that are read anyway may be those of the page
            lacks = getattr(inner, "beside", 0) == 0
            assert (np.asarray(info.attended) < n).all() or not lacks
            continue
        assert np.allclose(info.attended, n)
        for b in range(spec.batch):
            want = dense(tokens.q[b, n - 1], *_stored(policy, spec, tokens, b, n))
            assert_close(out[b], want, spec, f"row {b}")


_rollback, _truncate, _room = jax.jit(rollback), jax.jit(truncate), jax.jit(room)
DECODED = 5


def script(
    policy: Any, spec: CacheSpec, tokens: Tokens, seed: int
) -> tuple[kvjax.LayerCache, np.ndarray, list[str]]:
    """A cache after random calls, the lengths of its rows, and the verbs; row b holds the first
    tokens of row b.
    """
    rng = np.random.default_rng(seed)
    cache, lengths, done = new_cache(policy, spec), np.zeros(spec.batch, int), []
    try:
        jax.eval_shape(truncate, cache, lengths)
        shortens = True
    except ValueError:
        shortens = False
    most = spec.capacity - 2
    for _ in range(24):
        verb = str(
            rng.choice(
                [
                    "prompt",
                    "prompt",
                    "decode",
                    "step",
                    "step",
                    "flush",
                    "rows",
                    "take back",
                    "shorten",
                ]
            )
        )
        done.append(verb)
        width = {"prompt": CHUNK, "step": 1}.get(verb, DECODED)
        count = np.minimum(rng.integers(0, width + 1, spec.batch), most - lengths)
        chunk = tokens.at(lengths[:, None] + np.arange(width))
        if verb == "prompt":
            _, cache = prefill_chunk(cache, *chunk, lengths=count)
        elif verb == "step":
            _, cache, _ = step(cache, tokens, lengths, count > 0)
        elif verb == "decode":
            _, cache = _decode(cache, *chunk, lengths=count)
        elif verb == "flush":
            cache, count = _flush(cache), 0
        elif verb == "rows":  # there and back
            order = rng.permutation(spec.batch)
            cache, count = take_rows(take_rows(cache, order), np.argsort(order)), 0
        elif verb == "take back" and policy.reversible:
            count = np.minimum(count, np.asarray(_room(cache)))
            _, cache = _decode(cache, *chunk, lengths=count, flush=False)
            kept = rng.integers(0, count + 1)
            cache, count = _rollback(cache, lengths + kept), kept
        elif verb == "shorten" and shortens:
            to = rng.integers(lengths // 2, lengths + 1)
            cache, count = _truncate(cache, to), to - lengths
        else:
            count = 0
        lengths = lengths + count
    return cache, lengths, done


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", cells(CASES | PAGES | GROUP_REDUCES, QUICK_VERBS))
def test_any_chunks_neighbours_and_order_of_verbs_give_one_cache(name: str, seed: int) -> None:
    """The cache is that of the same tokens as one prompt, and so is what the next step reads."""
    case: Case = (CASES | PAGES | GROUP_REDUCES)[name]
    policy, spec = with_room(case.policy, case.spec), case.spec
    tokens = random_tokens(spec, 33)
    cache, lengths, verbs = script(policy, spec, tokens, seed)
    np.testing.assert_array_equal(cache.length, lengths)
    whole, _ = fill(new_cache(policy, spec), tokens, lengths)
    cache = _flush(cache)
    if anatomy.ranks(policy) and hasattr(
        whole.state, "evidence"
    ):  # it may weigh a prompt's queries differently
        whole, cache = (
            dataclasses.replace(c, state=anatomy.with_part(c.state, "evidence", None))
            for c in (whole, cache)
        )
        assert_same_contents(cache, whole, spec, f"after {verbs}")
        return
    assert_same_contents(cache, whole, spec, f"after {verbs}")
    if not anatomy.memory_of_steps(whole.state):
        want, _, _ = step(whole, tokens, lengths)
        assert_close(step(cache, tokens, lengths)[0], want, spec, f"the step after {verbs}")


@pytest.mark.parametrize(
    "fault", ["stores a prompt in reverse", "keeps what it takes back", "stores inactive rows"]
)
def test_a_planted_fault_of_order_is_found(fault: str) -> None:
    tokens = random_tokens(SPEC, 33)
    cache, lengths, verbs = script(BROKEN[fault], SPEC, tokens, 0)
    whole, _ = fill(new_cache(kvjax.Full(), SPEC), tokens, lengths)
    with pytest.raises(AssertionError):
        assert_same_contents(_flush(cache), whole, SPEC, f"after {verbs}")
