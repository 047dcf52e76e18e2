"""Speculation against positions and attention written in numpy from the rule: reuse where C >=
tau, else select.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import (
    CacheSpec,
    CentrePages,
    Dense,
    Fier,
    Fifo,
    HostOffload,
    MinMaxPages,
    Quantized,
    Retrieval,
    Speculative,
    Store,
    ops,
)
from kvjax.numerics.selection import PackedSelection
from kvjax.testing import _drive as drive
from tests import oracles
from tests.selectors.test_fier import select

SPEC = CacheSpec(batch=3, q_heads=8, kv_heads=2, head_dim=16, capacity=300, dtype=jnp.float32)
PAGES = Retrieval(
    selector=MinMaxPages(page=8),
    budget=61,
    sink=4,
    local=9,
    demote=Fifo(leave=16),
    dense_below=0,
)
TOKENS = Retrieval(
    selector=Fier(group=16, group_reduce="per_head"),
    store=HostOffload(),
    budget=40,
    sink=0,
    local=1,
    demote=Fifo(leave=16),
    dense_below=60,
)
LENGTHS = np.array([200, 61, 3])


@pytest.fixture(autouse=True)
def unordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selected units come in order of slot, with the lowest-ranked last, which is all that
    kernels promise.
    """

    def by_slot(pick: Any) -> Any:
        def run(*args: Any, **options: Any) -> PackedSelection:
            slots, found = pick(*args, **options)
            rank = jnp.arange(slots.shape[-1])[None, None, None]
            key = jnp.where(rank < found[..., None] - 1, slots, 2**20 + rank)
            return PackedSelection(
                jnp.take_along_axis(slots, jnp.argsort(key, axis=-1), axis=-1), found
            )

        return run

    for name in ("select_1bit", "select_pages"):
        monkeypatch.setattr(ops, name, by_slot(getattr(ops, name)))


def with_tau(policy: Retrieval, tau: float) -> Speculative:
    return Speculative(policy, tau=tau)


def positions(
    policy: Retrieval, st: kvjax.ZonedState, slots: np.ndarray, row: int
) -> np.ndarray:
    """Positions of a row's slots, by the order of arrival: the store follows the sink, the
    recent block the store.
    """
    count = int(st.store.count[row])
    return policy.sink + np.where(slots < st.store.slots, slots, slots - st.store.slots + count)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention of one query head over the given tokens, in float64."""
    logits = k.astype(np.float64) @ q.astype(np.float64) / np.sqrt(len(q))
    weights = np.exp(logits - logits.max())
    return weights @ v.astype(np.float64) / weights.sum()


@pytest.mark.sample(1)
@pytest.mark.parametrize("tau", [-1.0, 0.0, 0.15])
@pytest.mark.parametrize(
    "policy",
    [dataclasses.replace(PAGES, dense_below=75), TOKENS, PAGES],
    ids=["pages, dense at first", "tokens per head over host", "pages"],
)
def test_step_attends_with_the_last_recall_where_the_query_has_not_turned(
    policy: Retrieval, tau: float
) -> None:
    tokens, lengths = drive.random_tokens(SPEC), LENGTHS.copy()
    plain = policy
    cache, _ = drive.fill(kvjax.init_layer(with_tau(policy, tau), SPEC), tokens, lengths)
    twin, _ = drive.fill(kvjax.init_layer(plain, SPEC), tokens, lengths)
    # of each row: its query, and by kv head and choice the ranked positions of its selection
    last: list = [None] * 3
    chosen = (
        (policy.budget - policy.sink - policy.local)
        // policy.selector.unit
        * policy.selector.unit
    )
    reuses = 0
    for i in range(50):  # each row crosses three flushes
        active = np.array([True, i % 4 != 2, True])
        out, cache, info = drive.step(cache, tokens, lengths, active)
        _, twin, _ = drive.step(twin, tokens, lengths, active)
        q = tokens.at(lengths[:, None])[0][:, 0]
        lengths = lengths + active
        selection = select(plain, twin.state, q)
        for row in np.flatnonzero(active):
            n, mine = int(lengths[row]), q[row].reshape(2, 4, 16)
            ranked = [
                [
                    np.where(valid, positions(plain, twin.state, slots, row), -1)
                    for slots, valid in zip(*heads, strict=True)
                ]
                for heads in zip(
                    np.asarray(selection.slots[row]),
                    np.asarray(selection.valid[row]),
                    strict=True,
                )
            ]
            edge = n - 1 - policy.local  # the token that this step's local window has just left
            for head in range(2):
                reused = False
                if last[row] is not None:
                    before = last[row][0][head]
                    sizes = np.linalg.norm(mine[head], axis=1) * np.linalg.norm(before, axis=1)
                    cosine = ((mine[head] * before).sum(axis=1) / sizes).mean()
                    reused = cosine >= tau
                    assert abs(cosine - tau) > 1e-6
                assert bool(info.fresh[row, head]) == (not reused), (i, row, head)
                reuses += reused
                counts = []
                for g in range(4):
                    choice = g % len(ranked[head])
                    always = set(range(min(policy.sink, n))) | set(
                        range(max(n - policy.local, 0), n)
                    )
                    if reused:
                        picked = last[row][1][head][choice]
                        dense = n < policy.dense_below
                        beside = edge >= policy.sink
                        room = min(policy.budget - policy.sink - policy.local - beside, chosen)
                        # as a page that is not full has fewer tokens
                        fits = dense or (picked >= 0).sum() <= room
                        picked = picked if fits else picked[:room]
                        attended = (
                            always
                            | set(picked[picked >= 0].tolist())
                            | ({edge} if beside else set())
                        )
                    else:
                        picked = ranked[head][choice]
                        attended = always | set(picked[picked >= 0].tolist())
                    at = sorted(attended)
                    want = attention(
                        mine[head, g], tokens.k[row, at, head], tokens.v[row, at, head]
                    )
                    np.testing.assert_allclose(
                        out[row, head * 4 + g], want, atol=2e-5, err_msg=f"{i} {row} {head} {g}"
                    )
                    counts.append(len(at))
                    assert (
                        dense
                        if reused and len(at) > policy.budget
                        else n < policy.dense_below or len(at) <= policy.budget
                    )
                    # What a step tells of its choice has moved along with the flushes.
                    slots, valid = (np.asarray(a[row, head, choice]) for a in info.selection)
                    told = positions(policy, cache.state.zones, slots, row)[valid]
                    assert set(told.tolist()) == set(picked[picked >= 0].tolist())
                np.testing.assert_allclose(
                    float(info.attended[row, head]), np.mean(counts), rtol=1e-6
                )
            last[row] = (mine, ranked)
    assert reuses > 20


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "policy",
    [
        PAGES,
        TOKENS,
        dataclasses.replace(PAGES, store=HostOffload(page=8)),
        dataclasses.replace(PAGES, store=Quantized(bits=4, key_group=8), dense_below=100),
    ],
    ids=["pages", "tokens per head over host", "pages over host", "pages over 4 bits"],
)
def test_tau_above_one_is_selection_at_every_step(policy: Retrieval) -> None:
    tokens = drive.random_tokens(SPEC)
    caches = [
        drive.fill(kvjax.init_layer(p, SPEC), tokens, LENGTHS)[0]
        for p in (with_tau(policy, 1.0000001), policy)
    ]
    lengths = LENGTHS.copy()
    for i in range(40):
        active = np.array([True, i % 3 != 0, True])
        outs, infos = [], []
        for j, cache in enumerate(caches):
            out, caches[j], info = drive.step(cache, tokens, lengths, active)
            outs.append(out[active])
            infos.append(info)
        np.testing.assert_allclose(
            outs[0], outs[1], atol=1e-6, rtol=1e-5
        )  # the same tokens, summed in another order
        np.testing.assert_array_equal(infos[0].attended, infos[1].attended)
        assert np.asarray(infos[0].fresh).all()
        assert infos[1].fresh is None
        lengths = lengths + active


def test_first_step_after_a_prompt_or_an_insert_selects_anew() -> None:
    policy, tokens = with_tau(PAGES, -1.0), drive.random_tokens(SPEC)
    cache, _ = drive.fill(kvjax.init_layer(policy, SPEC), tokens, LENGTHS)
    fresh = []
    for i in range(2):
        _, cache, info = drive.step(cache, tokens, LENGTHS + i)
        fresh.append(np.asarray(info.fresh).all(axis=1).tolist())
    assert fresh == [[True] * 3, [False] * 3]
    # Row 1 takes 5 tokens more of a prompt, the others none.
    cache, _ = drive.fill(cache, tokens, LENGTHS + np.array([2, 7, 2]), start=LENGTHS + 2)
    _, cache, info = drive.step(cache, tokens, LENGTHS + np.array([2, 7, 2]))
    assert np.asarray(info.fresh).all(axis=1).tolist() == [False, True, False]
    one = dataclasses.replace(SPEC, batch=1)
    prefix, _ = drive.fill(kvjax.init_layer(policy, one), drive.random_tokens(one, 3), [100])
    cache = kvjax.insert(cache, prefix, 2)
    _, cache, info = drive.step(cache, tokens, np.array([203, 69, 100]))
    assert np.asarray(info.fresh).all(axis=1).tolist() == [False, False, True]


def test_a_prompt_of_no_tokens_that_flushes_changes_no_reused_step() -> None:
    """The recalled tokens then have other slots, and are the same tokens."""
    policy, tokens, full = (
        with_tau(PAGES, -1.0),
        drive.random_tokens(SPEC),
        np.array([43, 29, 60]),
    )
    cache, _ = drive.fill(
        kvjax.init_layer(policy, SPEC), tokens, full
    )  # row 0 is full after a step
    _, cache, _ = drive.step(cache, tokens, full)
    nothing = [a[:, :2] for a in (tokens.q, tokens.k, tokens.v)]
    _, after = kvjax.attention(cache, *nothing, lengths=np.zeros(3, np.int32))
    assert (
        np.asarray(after.state.zones.store.count) != np.asarray(cache.state.zones.store.count)
    ).any()
    want, _, expected = drive.step(cache, tokens, full + 1)
    out, _, info = drive.step(after, tokens, full + 1)
    assert not np.asarray(info.fresh).any()
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(np.sort(info.positions), np.sort(expected.positions))


def test_query_of_an_inactive_step_is_forgotten() -> None:
    policy, tokens, other = (
        with_tau(PAGES, 0.0),
        drive.random_tokens(SPEC),
        drive.random_tokens(SPEC, 1),
    )
    outs = []
    for idle in (tokens, other):
        cache, _ = drive.fill(kvjax.init_layer(policy, SPEC), tokens, LENGTHS)
        _, cache, _ = drive.step(cache, tokens, LENGTHS)
        _, cache, _ = drive.step(cache, idle, LENGTHS + 1, active=np.zeros(3, bool))
        outs.append(drive.step(cache, tokens, LENGTHS + 1)[0])
    np.testing.assert_array_equal(outs[0], outs[1])


def test_repeated_query_reuses_and_a_zero_query_does_not() -> None:
    tokens = drive.random_tokens(SPEC)
    same = drive.Tokens(np.repeat(tokens.q[:, :1], SPEC.capacity, axis=1), tokens.k, tokens.v)
    none = drive.Tokens(np.zeros_like(tokens.q), tokens.k, tokens.v)
    for data, fresh in ((same, False), (none, True)):
        cache, _ = drive.fill(kvjax.init_layer(with_tau(PAGES, 0.999), SPEC), data, LENGTHS)
        _, cache, _ = drive.step(cache, data, LENGTHS)
        _, cache, info = drive.step(cache, data, LENGTHS + 1)
        assert (np.asarray(info.fresh) == fresh).all()


def test_sliding_window_holds_for_a_reused_recall() -> None:
    """With equal keys a step that reuses a recall is a mean of values, and none may be before
    the window.
    """
    policy, tokens = (
        with_tau(dataclasses.replace(PAGES, budget=300), -1.0),
        drive.random_tokens(SPEC),
    )
    tokens = drive.Tokens(tokens.q, np.ones_like(tokens.k), tokens.v)
    cache, _ = drive.fill(kvjax.init_layer(policy, SPEC), tokens, LENGTHS)
    for i in range(40):
        out, cache, info = drive.step(cache, tokens, LENGTHS + i, window=20)
        for row, n in enumerate(LENGTHS + i + 1):
            seen = tokens.v[row, max(n - 20, 0) : n].astype(np.float64)
            np.testing.assert_allclose(out[row], seen.mean(axis=0).repeat(4, axis=0), atol=1e-5)
            assert (np.asarray(info.attended)[row] == len(seen)).all()


@pytest.mark.thorough
def test_what_is_held_is_what_the_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that a recall is told not to move, as the kernel does, through steps, prompts in
    between and flushes.
    """
    hits = []

    def recalled(
        x: jax.Array,
        index: jax.Array,
        edge: jax.Array,
        now: jax.Array,
        held: Any,
        recent: Any,
        ready: Any = None,
    ) -> tuple[jax.Array, ...]:
        there, parts = held
        (B, K, M), Z = there.shape, x.shape[4]
        same = (there[:, :, None] == index[..., None]) & (index[..., None] >= 0)  # [B, K, N, M]
        hits.append(jnp.any(same & now[..., None, None]))
        at, hit = (
            jnp.pad(a, ((0, 0), (0, 0), (0, M - index.shape[2])))[..., None, None]
            for a in (jnp.argmax(same, axis=-1), jnp.any(same, axis=-1))
        )
        rows = ops.host_rows_first.reference(
            x, index, edge, None, (jnp.zeros((1, 1, M)), ()), recent
        )
        pages = [[a.reshape(B, K, M, Z, -1) for a in arrays] for arrays in (rows, parts)]
        new = [
            jnp.where(hit, jnp.take_along_axis(kept, at, axis=2), row).reshape(B, K, M * Z, -1)
            for row, kept in zip(*pages, strict=True)
        ]
        others = [jnp.full_like(a, jnp.nan) for a in parts]
        if ready is not None:
            others = [
                jnp.where(ready[0][..., None, None], *two)
                for two in zip(ready[1], parts, strict=True)
            ]
        return tuple(
            jnp.where(now[..., None, None], *two) for two in zip(new, others, strict=True)
        )

    monkeypatch.setattr(ops, "host_rows_first", recalled)
    monkeypatch.setattr(ops, "host_rows_rest", recalled)
    tokens, rng = drive.random_tokens(SPEC), np.random.default_rng(0)
    stores: tuple[Store, Store] = HostOffload(page=8), Dense()
    lengths, found = np.array([40, 30, 5]), 0
    empty = [
        kvjax.init_layer(with_tau(dataclasses.replace(PAGES, store=store), 0.1), SPEC)
        for store in stores
    ]
    caches = [drive.fill(cache, tokens, lengths)[0] for cache in empty]
    step = jax.jit(
        lambda cache, active, *qkv: (
            *kvjax.attention(cache, *qkv, active=active),
            hits.pop() | hits.pop(),
        )
    )
    while (lengths < 270).all():
        if rng.random() < 0.3:
            more = rng.integers(0, 24, 3) * (rng.random(3) < 0.6)
            caches = [
                drive.fill(cache, tokens, lengths + more, start=lengths)[0] for cache in caches
            ]
            lengths = lengths + more
        active = rng.random(3) < 0.8
        with ops.explained():  # the trace of a layer is not shared, so it may tell its hits
            out, caches[0], hit = step(caches[0], active, *tokens.at(lengths[:, None]))
        want, caches[1], _ = drive.step(caches[1], tokens, lengths, active)
        np.testing.assert_allclose(
            np.asarray(out)[active, 0], want[active], atol=2e-6, err_msg=str(lengths)
        )
        lengths, found = lengths + active, found + int(hit)
    assert found > 30


@pytest.mark.thorough
def test_a_step_waits_only_for_what_its_heads_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """The read of the rest of a recall may be late: only the next step uses it."""
    policy, tokens = (
        with_tau(dataclasses.replace(PAGES, store=HostOffload(page=8)), -1.0),
        drive.random_tokens(SPEC),
    )
    cache, _ = drive.fill(kvjax.init_layer(policy, SPEC), tokens, LENGTHS)
    step = lambda: jax.jit(lambda cache, *qkv: kvjax.attention(cache, *qkv))  # noqa: E731 (each is traced anew)
    qkv = [tokens.at((LENGTHS + i)[:, None]) for i in range(2)]
    want, _ = step()(cache, *qkv[0])
    late = lambda *args: 2 * (jnp.full(args[4][1][0].shape, jnp.nan),)  # noqa: E731
    monkeypatch.setattr(ops, "host_rows_rest", late)
    with ops.explained():  # the trace of a layer is not shared, so it has `late`
        out, cache = step()(cache, *qkv[0])
        np.testing.assert_array_equal(out, want)
        out, _ = step()(cache, *qkv[1])
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[2]).all(), "a row whose tokens are all recent recalls none"


def test_a_row_that_makes_no_step_moves_nothing_and_keeps_what_it_recalled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, tokens = (
        with_tau(dataclasses.replace(PAGES, store=HostOffload(page=8)), -1.0),
        drive.random_tokens(SPEC),
    )
    cache, _ = drive.fill(kvjax.init_layer(policy, SPEC), tokens, LENGTHS)
    asked, read = [], []
    by_xla = ops.host_rows_first, ops.host_rows_rest

    def first(*args: Any) -> Any:
        """As the kernel: nothing of heads that wait for nothing."""
        asked.append(args[3])
        read.append(by_xla[0](*args))
        return [jnp.where(args[3][..., None, None], a, jnp.nan) for a in read[0]]

    def rest(*args: Any) -> Any:
        asked.append(args[3])
        *others, (which, _) = args
        return by_xla[1](*others, (which, read.pop()))

    monkeypatch.setattr(ops, "host_rows_first", first)
    monkeypatch.setattr(ops, "host_rows_rest", rest)

    @jax.jit
    def step(cache: Any, qkv: Any, active: jax.Array) -> tuple[Any, Any, list[jax.Array]]:
        out, cache = kvjax.attention(cache, *qkv, active=active)
        return out, cache, [asked.pop(0), asked.pop(0)]

    lengths, steps = LENGTHS.copy(), np.zeros(3, int)
    for active in np.array([[True, False, True], [True, True, False], [True, False, True]]):
        before = dataclasses.replace(cache.state, zones=())
        with (
            ops.explained()
        ):  # the trace of a layer is not shared, so it may tell what it asked for
            out, cache, told = step(cache, tokens.at(lengths[:, None]), active)
        assert np.isfinite(out).all(), "not even of a row that makes no step"
        # In its first step a row waits for all of its recall, and then, as no head turns, for
        # nothing.
        for heads, rows in zip(
            told, (active & (steps == 0), active & (steps > 0)), strict=True
        ):
            np.testing.assert_array_equal(heads, np.repeat(rows[:, None], 2, axis=1))
        idle = np.flatnonzero(~active)
        for old, new in zip(
            *(jax.tree.leaves(x) for x in (before, dataclasses.replace(cache.state, zones=()))),
            strict=True,
        ):
            np.testing.assert_array_equal(new[idle], old[idle])
        lengths, steps = lengths + active, steps + active


def test_freekv_is_dense_in_the_first_layer_and_holds_its_budget_in_the_others() -> None:
    spec = dataclasses.replace(SPEC, batch=1, capacity=700)
    cache = kvjax.init(
        kvjax.presets.freekv(budget=96, page=8, sink=8, local=24), spec, layers=3
    )
    tokens = drive.random_tokens(spec)
    for number, layer in enumerate(cache.layers):
        filled, _ = drive.fill(layer, tokens, [600])
        for i in range(10):
            _, filled, info = drive.step(filled, tokens, [600 + i])
            assert (
                (np.asarray(info.attended) == 601 + i).all()
                if number == 0
                else (np.asarray(info.attended) <= 96).all()
            )
        bytes_held = kvjax.memory.nbytes(filled)
        assert bytes_held.host == (
            0 if number == 0 else filled.state.zones.store.slots * 2 * 2 * 16 * 4
        )


def test_a_reused_recall_drops_nothing_that_the_budget_can_hold() -> None:
    """A page that the local window cuts has fewer tokens, so the token that left the window
    also has room.
    """
    spec = CacheSpec(
        batch=1, q_heads=2, kv_heads=1, head_dim=16, capacity=120, dtype=jnp.float32
    )
    tokens, page, sink, local = drive.random_tokens(spec, 3), 8, 1, 5
    loud = np.where(np.arange(120) < 80, 1, 6).astype(
        np.float32
    )  # so the page that is not full yet ranks high
    tokens = dataclasses.replace(tokens, k=tokens.k * loud[None, :, None, None])
    budget = sink + local + 4 * page
    inner = Retrieval(
        selector=MinMaxPages(page=page),
        budget=budget,
        sink=sink,
        local=local,
        demote=Fifo(leave=page),
    )
    cache, _ = drive.fill(kvjax.init_layer(Speculative(inner, tau=-1.0), spec), tokens, [90])
    oracle, most = oracles.FreeKV(page, budget, sink, local, -1.0), 0
    for n in range(90, 110):
        _, cache, info = drive.step(cache, tokens, [n])
        _, wanted = oracle.step(tokens.q[0, n], tokens.k[0, : n + 1, 0])
        read = set(np.asarray(info.positions).reshape(-1).tolist()) - {-1}
        assert read == wanted, n
        most = max(most, len(read))
    assert most == budget


def test_freekv_takes_its_settings_from_the_task_and_its_pages_from_the_summary() -> None:
    preset = kvjax.presets.freekv
    assert preset() == preset(task="long_input", tau=0.8, sink=128, local=128)
    long = preset(task="long_generation")
    assert long == preset(tau=0.9, sink=512, local=512)
    assert preset(task="long_generation", sink=4).rest.retrieval.sink == 4
    assert preset(
        summary="centre", group_reduce="mean_score"
    ).rest.retrieval.selector == CentrePages(page=32)
    with pytest.raises(
        ValueError, match=r"freekv\(task='chat'\) must be one of long_input, long_generation"
    ):
        preset(task="chat")
    with pytest.raises(
        ValueError, match=r"freekv\(summary='mean'\) must be one of min_max, centre"
    ):
        preset(summary="mean")


def test_selection_scale_is_that_of_the_group_s_softmax_alone() -> None:
    """tau=2 selects at every step, so the tokens read are those of the plain policy with that
    scale.
    """
    tokens = drive.random_tokens(SPEC)
    spread = dataclasses.replace(tokens, q=3 * np.asarray(tokens.q))
    policy = Speculative(PAGES, tau=2.0, selection_scale=1.0)
    cache, _ = drive.fill(kvjax.init_layer(policy, SPEC), spread, LENGTHS)
    twin, _ = drive.fill(kvjax.init_layer(PAGES, SPEC), spread, LENGTHS)
    out, cache, info = drive.step(cache, spread, LENGTHS)
    _, twin, _ = drive.step(twin, spread, LENGTHS)
    q = jnp.asarray(spread.at(LENGTHS[:, None])[0][:, 0].reshape(3, 2, 4, 16))

    @partial(jax.jit, static_argnames="scale")
    def select(st: Any, scale: float) -> Any:
        return PAGES.select(
            st, q, kvjax.Step(kvjax.Logits(scale)), num_sorted_last=st.store.slots
        )  # type: ignore[arg-type]

    def read(scale: float) -> list[set[int]]:
        found = select(twin.state, scale)
        at = [
            positions(PAGES, twin.state, np.asarray(found.slots[row]), row) for row in range(3)
        ]
        where = (
            np.where(valid, own, -1)
            for own, valid in zip(at, np.asarray(found.valid), strict=True)
        )
        return [set(own[head].ravel()) - {-1} for own in where for head in range(2)]

    unscaled = read(1.0)
    for i, chosen in enumerate(unscaled):
        row, head = divmod(i, 2)
        length = int(LENGTHS[row]) + 1
        wanted = chosen | set(range(min(4, length))) | set(range(max(length - 9, 0), length))
        assert set(np.asarray(info.positions)[row, head].ravel()) - {-1} == wanted
        for query in range(4):
            k, v = (np.asarray(a)[row, sorted(wanted), head] for a in (spread.k, spread.v))
            want = attention(np.asarray(q)[row, head, query], k, v)
            np.testing.assert_allclose(np.asarray(out)[row, head * 4 + query], want, atol=1e-4)
    assert unscaled != read(0.25), "the scale must matter for this to say something"


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_selection_scale_must_be_a_positive_number(scale: float) -> None:
    with pytest.raises(ValueError, match=r"Speculative\(selection_scale=.*\) must be"):
        Speculative(PAGES, selection_scale=scale)
