"""Adaptive budgets: the fewest tokens that hold a share of the attention, and the best tokens of all heads together."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import AdaptiveHeads, CacheSpec, Exact, Fifo, Nucleus, Retrieval
from kvjax.numerics.rotate import _signs
from kvjax.testing import _drive as drive
from tests import oracles

SPEC = CacheSpec(batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=200, dtype=jnp.float32)
BASE = Retrieval(selector=Exact(), budget=120, sink=4, local=8, demote=Fifo(leave=32))


@pytest.mark.sample(1)
@pytest.mark.parametrize("group_reduce", ["mean_softmax", "per_head"])
def test_a_step_reads_the_fewest_tokens_that_hold_the_share(group_reduce: str) -> None:
    """In addition to sink and local window, against numpy in float64; history and pending tokens compete."""
    selector = Exact(group_reduce=group_reduce)
    policy = dataclasses.replace(BASE, selector=Nucleus(selector=selector, p=0.8))
    tokens, lengths = drive.random_tokens(SPEC, 1), np.array([170, 60])
    cache, _ = drive.fill(drive.new_cache(policy, SPEC), tokens, lengths)
    _, _, info = drive.step(cache, tokens, lengths)
    positions = np.asarray(info.positions)
    for b, h, c in np.ndindex(positions.shape[:3]):
        n = lengths[b] + 1
        free = np.arange(4, n - 8)
        q = tokens.q[b, lengths[b]].reshape(2, 2, -1)[h].astype(np.float64)
        weights = np.exp(q @ tokens.k[b, free, h].astype(np.float64).T / 4)
        shares = weights / weights.sum(axis=1, keepdims=True)
        shares = shares.mean(axis=0) if group_reduce == "mean_softmax" else shares[c]
        order = np.argsort(-shares)
        count = int(np.searchsorted(np.cumsum(shares[order]), 0.8)) + 1
        wanted = set(free[order[: min(count, 108)]]) | set(range(4)) | set(range(n - 8, n))
        assert {p for p in positions[b, h, c] if p >= 0} == wanted
    assert (np.asarray(info.attended) < 120).all(), "fewer than the budget"


def test_with_the_whole_share_it_selects_what_its_selector_does() -> None:
    tokens, lengths = drive.random_tokens(SPEC, 1), np.array([170, 60])
    cache, _ = drive.fill(drive.new_cache(BASE, SPEC), tokens, lengths)
    whole = dataclasses.replace(BASE, selector=Nucleus(selector=BASE.selector, p=1.0))
    q = jnp.asarray(tokens.q[:, 170].reshape(2, 2, 2, 16))
    found = [
        jax.jit(partial(lambda policy, st, q: policy.attend(st, q, kvjax.Step(0.25))[2].positions, policy))(
            cache.state, q
        )
        for policy in (BASE, whole)
    ]
    np.testing.assert_array_equal(np.sort(found[1], axis=-1), np.sort(found[0], axis=-1))


def test_a_short_row_is_read_whole_also_where_the_budget_could_hold_it() -> None:
    """`dense_below` below the budget: row 1 is shorter and attends to everything, row 0 to its share alone."""
    policy = dataclasses.replace(BASE, selector=Nucleus(selector=Exact(), p=0.3), dense_below=70)
    tokens, lengths = drive.random_tokens(SPEC, 1), np.array([170, 60])
    cache, _ = drive.fill(drive.new_cache(policy, SPEC), tokens, lengths)
    _, _, info = drive.step(cache, tokens, lengths)
    read = np.sort(np.asarray(info.positions), axis=-1)
    assert (read[1, ..., -61:] == np.arange(61)).all(), read[1]
    assert (np.asarray(info.attended)[0] < 120).all(), info.attended


@pytest.mark.parametrize("p", [0, 1.5, "most"])
def test_a_share_out_of_range_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match=r"Nucleus\(p="):
        Nucleus(selector=kvjax.Fier(), p=p)


@pytest.mark.parametrize("window", [None, pytest.param(90, marks=pytest.mark.thorough)])
def test_over_votes_the_shares_are_those_of_the_candidates(window: int | None) -> None:
    """ParisKV with an adaptive k, by the oracle's estimates; row 1 is short, and attends to everything."""
    preset = kvjax.presets.pariskv(
        52, selector=kvjax.Paris(candidates=60), p=0.6, sink=4, local=8, chunk=16, dense_below=70
    )
    tokens, lengths = drive.random_tokens(SPEC, 1), np.array([170, 60])
    cache, _ = drive.fill(drive.new_cache(preset.rest, SPEC), tokens, lengths)
    _, _, info = drive.step(cache, tokens, lengths, window=window)
    sizes = []
    for b, h in np.ndindex(2, 2):
        n = int(lengths[b]) + 1
        first, end = max(n - (window or n), 0), oracles.history_end(n, 4, 8, 16)
        start = max(first, 4)
        q, keys = tokens.q[b, n - 1].reshape(2, 2, -1)[h].mean(axis=0), tokens.k[b, :, h]
        history = oracles.Paris(oracles.rotation(_signs(16, 0)), keys[start:end], candidates=60)
        logits = np.concatenate([history.ranks(q), keys[end : n - 8].astype(np.float64) @ q.astype(np.float64)]) / 4
        shares = np.exp(logits - logits.max())
        order = np.argsort(-shares, kind="stable")
        count = min(int(np.searchsorted(np.cumsum(shares[order]) / shares.sum(), 0.6)) + 1, 40)
        wanted = {*range(first, 4), *(start + order[: len(order) if n < 70 else count]).tolist(), *range(n - 8, n)}
        assert {int(p) for p in np.asarray(info.positions)[b, h, 0] if p >= 0} == wanted
        sizes.append(len(wanted))
    assert max(sizes[:2]) < 52 < min(sizes[2:]), sizes


def by_heads(shares: np.ndarray, room: int, mean: float, floor: float) -> list[set[int]]:
    """AdaKV's rule: the tokens of each head, of shares [heads, tokens] of which a head could take `room`."""
    order = np.argsort(-shares, axis=1)[:, :room]
    sure = int(np.ceil(floor * mean * room))
    found = [set(row[:sure].tolist()) for row in order]
    rest = [(-shares[h, token], rank, h, token) for h, row in enumerate(order) for rank, token in enumerate(row[sure:])]
    for _, _, h, token in sorted(rest)[: max(int(np.ceil(mean * room * len(order))) - sure * len(order), 0)]:
        found[h].add(int(token))
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("group_reduce", ["mean_softmax", "per_head"])
@pytest.mark.parametrize(("mean", "floor"), [(0.5, 0.2), (0.3, 0.0), (0.5, 1.0)])
def test_heads_share_one_budget(group_reduce: str, mean: float, floor: float) -> None:
    """Against numpy in float64; the second KV head attends more widely, so it reads more."""
    selector = AdaptiveHeads(selector=Exact(group_reduce=group_reduce), mean=mean, floor=floor)
    policy = dataclasses.replace(BASE, selector=selector)
    tokens, lengths = drive.random_tokens(SPEC, 1), np.array([170, 60])
    tokens = dataclasses.replace(tokens, k=tokens.k * np.array([3, 1], np.float32)[:, None])
    cache, _ = drive.fill(drive.new_cache(policy, SPEC), tokens, lengths)
    _, _, info = drive.step(cache, tokens, lengths)
    positions = np.asarray(info.positions)
    for b in range(2):
        n = lengths[b] + 1
        free = np.arange(4, n - 8)
        q = tokens.q[b, lengths[b]].reshape(2, 2, -1).astype(np.float64)
        logits = np.einsum("kgd,skd->kgs", q, tokens.k[b, free].astype(np.float64)) / 4
        shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        shares = shares.mean(axis=1) if group_reduce == "mean_softmax" else shares.reshape(4, -1)
        wanted = by_heads(shares, min(108, len(free)), mean, floor)
        always = set(range(4)) | set(range(n - 8, n))
        read = [{p for p in heads if p >= 0} for heads in positions[b].reshape(len(wanted), -1).tolist()]
        assert read == [{int(free[i]) for i in own} | always for own in wanted]
    read = np.asarray(info.attended)[0]
    assert (read[1] > read[0]).all() if floor < 1 else (read[0] == read[1]).all()


def test_the_mean_over_heads_is_what_was_asked_for() -> None:
    share = jnp.asarray(np.random.default_rng(0).random((2, 3, 2, 10)), jnp.float32)
    rule, valid = AdaptiveHeads(selector=Exact(), mean=0.4, floor=0.0), jnp.ones(share.shape, bool)
    kept = np.asarray(rule.keep(share, valid, jnp.argsort(-share, axis=-1)))
    assert (kept.sum(axis=(1, 2, 3)) == 24).all()
    for row, took in zip(np.asarray(share), kept, strict=True):
        assert row[took].min() > row[~took].max(), "the largest shares of all heads"


def test_heads_on_several_devices_are_refused() -> None:
    policy = dataclasses.replace(BASE, selector=AdaptiveHeads(selector=Exact()))
    mesh = jax.sharding.Mesh(np.array(2 * jax.devices()[:1]), ("model",))
    with pytest.raises(ValueError, match="computes with all KV heads of a layer together"):
        kvjax.Placement(mesh=mesh, heads="model").check(policy, SPEC)


@pytest.mark.parametrize("setting", [{"mean": 0}, {"mean": 1.5}, {"floor": -0.1}, {"floor": "most"}])
def test_shares_of_a_head_out_of_range_are_refused(setting: dict) -> None:
    with pytest.raises(ValueError, match=rf"AdaptiveHeads\({next(iter(setting))}=.*must be a"):
        AdaptiveHeads(selector=kvjax.Fier(), **setting)


READS_LESS = {  # laws of policies that read everything where the budget is everything
    "budget_of_all_is_dense_attention",
    "selected_slots_are_valid_and_unique",
    "every_token_is_in_one_zone",
    "gradients_are_those_of_attention",
}


@pytest.mark.thorough
@pytest.mark.parametrize(("mean", "broken"), [(1.0, set()), (0.5, READS_LESS)])
def test_adaptive_heads_keep_the_laws_of_policies(mean: float, broken: set[str]) -> None:
    policy = dataclasses.replace(BASE, budget=40, selector=AdaptiveHeads(selector=kvjax.Fier(group=16), mean=mean))
    report = kvjax.testing.check_policy(policy, SPEC)
    assert set(report.laws("failed")) == broken, report
