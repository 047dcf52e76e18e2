"""Pages against numpy boxes written from the papers' formulas, page for page."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

import kvjax
from kvjax import CacheSpec, CentrePages, Fier, Fifo, MinMaxPages, Paris, Retrieval
from kvjax.numerics.partial import Logits
from kvjax.numerics.selection import Candidates
from kvjax.ops import score_pages, select_pages
from kvjax.selectors import Selector
from kvjax.testing import _drive as drive
from tests.oracles import agrees, pooled
from tests.selectors.test_fier import SMALL, reads, select


def box(keys: np.ndarray, summary: type, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """The corners f64[D] of a page of keys [page, D], as they are stored."""
    keys = keys.astype(np.float32)
    low, high = keys.min(axis=0), keys.max(axis=0)
    if summary is CentrePages:
        centre = (high + low) / 2
        deviation = np.abs(keys - centre).mean(axis=0)
        low, high = centre - deviation, centre + deviation
    return tuple(a.astype(dtype).astype(np.float64) for a in (low, high))


def scores(
    q: np.ndarray,
    keys: np.ndarray,
    local: int,
    sealed: int,
    selector: MinMaxPages | CentrePages,
    scale: float,
    dtype,
) -> np.ndarray:
    """f64[G, pages] of q [G, D] and pages with a token before the `local` last of `keys`: by
    boxes; or, from token `sealed` on, if the selector says so by the best exact score of those
    tokens."""
    found, page, end = [], selector.page, len(keys) - local
    for first in range(0, end, page):
        if first < sealed or selector.pending == "box":
            low, high = box(keys[first : first + page], type(selector), dtype)
            found.append(
                [
                    sum(max(x * a, x * b) for x, a, b in zip(row, low, high, strict=True))
                    for row in q
                ]
            )
        else:
            tokens = keys[first : min(first + page, end)]
            found.append((q.astype(np.float64) @ tokens.astype(np.float64).T).max(axis=1))
    return np.array(found).T * scale


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "selector", [MinMaxPages(page=8), CentrePages(page=4), Fier(group=8), Paris(candidates=9)]
)
def test_a_pick_is_the_choice_and_its_lowest_comes_last_where_it_says_so(
    selector: Selector,
) -> None:
    spec = CacheSpec(
        batch=4, q_heads=4, kv_heads=2, head_dim=16, capacity=200, dtype=jnp.float32
    )
    policy = Retrieval(
        selector=selector, budget=50, sink=2, local=3, demote=Fifo(leave=16), dense_below=0
    )
    tokens = drive.random_tokens(spec)
    cache, _ = drive.fill(kvjax.init_layer(policy, spec), tokens, np.array([190, 101, 33, 4]))
    q = tokens.at(np.array([[150]] * 4))[0][:, 0]
    got = jax.jit(
        lambda st, q: policy.select(st, q.reshape(4, 2, 2, 16), kvjax.Step(kvjax.Logits(0.25)))
    )(cache.state, q)
    want = select(policy, cache.state, q)
    for row in np.ndindex(want.slots.shape[:3]):
        ours, theirs = (np.asarray(s.slots)[row][np.asarray(s.valid)[row]] for s in (got, want))
        assert set(ours.tolist()) == set(theirs.tolist())
        if not isinstance(selector, Paris) and ours.size:
            assert ours[-1] // selector.unit == theirs[-1] // selector.unit


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            dict(pending_slots=12),
            r"pending_slots=12\) must be whole pages of 8 tokens among the 20 recent keys",
        ),
        (dict(pending_slots=24), r"pending_slots=24\) must be whole pages"),
        (dict(k_max=6), r"k_max=6\) is more than the 3 stored and 2 pending units"),
        (dict(group_reduce="mean"), "group_reduce='mean' must be one of"),
    ],
)
def test_picking_pages_refuses_sizes_that_do_not_fit(changed: dict, words: str) -> None:
    q, low, keys = (jnp.zeros((1, 1, n, 16)) for n in (2, 3, 20))
    given = dict(group_reduce="mean_score", k_max=5, pending_slots=16) | changed
    group_reduce = given.pop("group_reduce")
    candidates = Candidates(span=(0, 24), pending=(keys, 0, 16), k=5, **given)
    with pytest.raises(ValueError, match=words):
        select_pages(q, low, low, candidates, group_reduce, unit=8, logits=Logits(1.0))


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "selector",
    [
        MinMaxPages(page=8),
        MinMaxPages(page=8, group_reduce="per_head"),
        MinMaxPages(page=8, group_reduce="max_softmax", pending="exact"),
        CentrePages(page=8),
        CentrePages(page=8, pending="exact"),
    ],
)
def test_picks_are_the_pages_of_the_best_boxes(
    selector: MinMaxPages | CentrePages, dtype
) -> None:
    spec = CacheSpec(batch=2, q_heads=8, kv_heads=2, head_dim=16, capacity=330, dtype=dtype)
    page, local, sink = 8, 5, 3
    budget = sink + local + 4 * page + 7  # 7 tokens of it fill no page
    policy = Retrieval(
        selector=selector,
        budget=budget,
        sink=sink,
        local=local,
        demote=Fifo(leave=2 * page),
        dense_below=0,
    )
    tokens, lengths = drive.random_tokens(spec), np.array([301, 90])
    cache, _ = drive.fill(kvjax.init_layer(policy, spec), tokens, lengths)
    for i in range(20):  # crosses a flush in each row
        _, cache, info = drive.step(cache, tokens, lengths + i)
        q = tokens.at((lengths + i)[:, None])[0][:, 0]
        counts = np.asarray(cache.state.store.count)
        for row, n in enumerate(lengths + i + 1):
            sealed = int(counts[row])
            assert sealed == (n - sink - local) // (2 * page) * 2 * page
            read = np.asarray(info.positions)[row] - sink
            for head in range(2):
                queries = q[row].reshape(2, 4, -1)[head].astype(np.float32)
                keys = tokens.k[row, sink:n, head]
                found = scores(queries, keys, local, sealed, selector, 16**-0.5, dtype)
                ranks = pooled(found, selector.group_reduce)
                for choice, positions in enumerate(read[head]):
                    all_read = positions[positions >= -sink]
                    assert len(set(all_read.tolist())) == len(all_read)
                    mine = all_read[(all_read >= 0) & (all_read < len(keys) - local)]
                    pages = set((mine // page).tolist())
                    assert agrees(pages, ranks[choice], 4), (row, head, choice, i)
                    whole = set().union(
                        *(
                            range(p * page, min((p + 1) * page, len(keys) - local))
                            for p in pages
                        )
                    )
                    assert set(mine.tolist()) == whole, "a page came in part"
            assert (np.asarray(info.attended)[row] <= budget).all()
            # Only the page that the local window cuts may have fewer tokens.
            assert (np.asarray(info.attended)[row] >= sink + local + 3 * page).all()


_score_pages = jax.jit(functools.partial(score_pages, logits=Logits(0.3)))


# Of few shapes: each is a program.
@given(
    some.sampled_from([1, 5]),
    some.sampled_from([1, 4, 16]),
    some.sampled_from([1, 7, 24]),
    some.integers(0, 2**31),
)
def test_min_max_score_is_an_upper_bound(pages: int, page: int, dim: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    k = rng.normal(size=(pages, page, dim)).astype(np.float32) * rng.uniform(
        0.1, 5, size=dim
    ).astype(np.float32)
    q = rng.normal(size=(3, dim)).astype(np.float32)
    low, high = k.min(axis=1), k.max(axis=1)
    got = _score_pages(*(a[None, None] for a in (q, low, high)))[0, 0]
    best = 0.3 * np.einsum("gd,psd->gps", q.astype(np.float64), k.astype(np.float64)).max(
        axis=2
    )
    assert (np.asarray(got) >= best - 1e-5 * np.abs(q).sum() * np.abs(k).max()).all()
    if page == 1:
        np.testing.assert_allclose(got, best, atol=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("extra", [0, 21, 35, 7, 14, 28])
def test_budget_that_is_no_multiple_of_the_page_is_never_exceeded(extra: int) -> None:
    spec = CacheSpec(
        batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=300, dtype=jnp.float32
    )
    policy = Retrieval(
        selector=MinMaxPages(page=16),
        budget=9 + extra,
        sink=4,
        local=5,
        demote=Fifo(leave=32),
        dense_below=0,
    )
    tokens, lengths = drive.random_tokens(spec), np.array([250, 36])
    cache, _ = drive.fill(kvjax.init_layer(policy, spec), tokens, lengths)
    for i in range(34):
        _, cache, info = drive.step(cache, tokens, lengths + i)
        attended = np.asarray(info.attended)
        assert (attended <= 9 + extra).all()
        assert (attended >= 9).all()


def test_pages_of_one_token_wait_for_nothing() -> None:
    """With chunks of one token no token is pending; a box is then the key itself."""
    spec = CacheSpec(
        batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=60, dtype=jnp.float32
    )
    tokens, lengths, found = drive.random_tokens(spec), np.array([50, 7]), []
    for selector in (MinMaxPages(page=1, pending="exact"), kvjax.Exact()):
        policy = Retrieval(selector=selector, budget=12, sink=1, local=2, demote=Fifo(leave=1))
        cache, _ = drive.fill(kvjax.init_layer(policy, spec), tokens, lengths)
        found.append([drive.step(cache, tokens, lengths)[i] for i in (0, 2)])
    (out, info), (out_exact, info_exact) = found
    np.testing.assert_allclose(out, out_exact, atol=1e-5)
    np.testing.assert_array_equal(np.sort(info.positions), np.sort(info_exact.positions))


def test_page_of_equal_keys_scores_as_its_key() -> None:
    spec = CacheSpec(batch=1, q_heads=2, kv_heads=1, head_dim=8, capacity=64, dtype=jnp.float32)
    key = np.linspace(-2, 2, 8, dtype=np.float32)
    q = np.random.default_rng(0).normal(size=(1, 1, 2, 8)).astype(np.float32)
    for selector in (MinMaxPages(page=4), CentrePages(page=4)):
        keys = np.tile(key, (1, 1, 8, 1))

        @jax.jit
        def score(keys, q, selector=selector):
            ix = selector.append(selector.init(spec, 16), keys, jnp.array([0]), jnp.array([8]))
            return selector.score(ix, q, logits=Logits(1.0))

        got = np.asarray(score(keys, q))[0, 0, :, :2]
        np.testing.assert_allclose(got, (q[0, 0] @ key)[:, None].repeat(2, 1), rtol=1e-5)


def test_index_takes_the_bytes_that_it_says() -> None:
    spec = CacheSpec(
        batch=1, q_heads=4, kv_heads=2, head_dim=16, capacity=64, dtype=jnp.bfloat16
    )
    for selector in (MinMaxPages(page=16), CentrePages(page=32)):
        held = sum(a.nbytes for a in jax.tree.leaves(selector.init(spec, 64)))
        assert held == 64 * selector.bytes_per_token(spec)


def test_quest_is_dense_in_two_layers_and_attends_to_whole_pages_in_the_others() -> None:
    cache = kvjax.init(kvjax.presets.quest(budget=80), SMALL, layers=4)
    assert [reads(layer) for layer in cache.layers] == [[256, 304]] * 2 + [[80, 80]] * 2


def test_step_at_32k_tokens_holds_no_second_index() -> None:
    spec = CacheSpec(
        batch=1, q_heads=32, kv_heads=8, head_dim=128, capacity=32768, dtype=jnp.bfloat16
    )
    policy = dataclasses.replace(kvjax.presets.quest(budget=1024).rest)
    cache = jax.eval_shape(functools.partial(kvjax.init_layer, policy, spec))
    key_bytes = 32768 * 8 * 128 * 2
    q, k = (jax.ShapeDtypeStruct((1, 1, heads, 128), jnp.bfloat16) for heads in (32, 8))
    step = jax.jit(functools.partial(kvjax.attention, flush=False), donate_argnums=0)
    temp = step.lower(cache, q, k, k).compile().memory_analysis().temp_size_in_bytes
    assert temp <= key_bytes // 2, f"{temp} temp bytes beside {key_bytes} of keys"


@pytest.mark.parametrize("selector", [MinMaxPages, CentrePages])
def test_page_must_divide_the_chunk(selector: type) -> None:
    spec = CacheSpec(batch=1, q_heads=2, kv_heads=1, head_dim=8, capacity=64, dtype=jnp.float32)
    with pytest.raises(
        ValueError,
        match=r"Pages\(page=24\) does not divide the chunk of 32; use a divisor of 32",
    ):
        selector(page=24).check(spec, 32)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("quest", {"budget": 40}),
        ("quest", {"budget": 40, "newest": "select"}),
        pytest.param("quest", {"budget": 56, "chunk": 16}, marks=pytest.mark.thorough),
        pytest.param(
            "freekv",
            {"budget": 40, "sink": 4, "local": 4, "tau": 2.0},
            marks=pytest.mark.thorough,
        ),
        ("freekv", {"budget": 40, "sink": 4, "local": 4, "tau": -1.0}),
        ("arkvale", {"budget": 40, "sink": 4, "local": 4}),
    ],
    ids=lambda value: (
        value if isinstance(value, str) else " ".join(f"{k}={v}" for k, v in value.items())
    ),
)
def test_a_token_that_matters_is_in_sight_at_every_age(name: str, settings: dict) -> None:
    """In the local window, in a page that is not full, and in a full one: whatever the bounds
    of other pages are.

    Published models have channels with large values in all keys, so that a page's bound is far
    above its products.
    """
    policy = getattr(kvjax.presets, name)(page=8, **settings).rest
    spec = CacheSpec(
        batch=1, q_heads=4, kv_heads=2, head_dim=16, capacity=300, dtype=jnp.float32
    )
    tokens, place = drive.random_tokens(spec), 202
    k, q = 0.1 * tokens.k, np.ones_like(tokens.q)
    k[..., 0] = np.where(np.arange(k.shape[1]) % 2, 50, -50)[None, :, None]
    k[:, place, :, 1:] += (
        3.0  # its product is 5 below zero, where the bounds of others are 50 and more, its page's 95
    )
    tokens = dataclasses.replace(tokens, q=q, k=k)
    cache, _ = drive.fill(kvjax.init_layer(policy, spec), tokens, [place])
    for n in range(place, place + 40):
        _, cache, info = drive.step(cache, tokens, [n])
        read = np.asarray(info.positions)[0]
        assert (read == place).any(axis=-1).all(), f"{n - place} tokens after it"
        assert (np.asarray(info.attended) <= settings["budget"] + 1).all()


def test_quest_has_room_for_the_page_that_is_not_full() -> None:
    with pytest.raises(
        ValueError, match=r"quest\(local=8\) is less than a chunk of 16 tokens.*at least 16"
    ):
        kvjax.presets.quest(256, local=8)
    with pytest.raises(
        ValueError, match=r"quest\(local=32\) is less than a chunk of 64 tokens"
    ):
        kvjax.presets.quest(256, local=32, chunk=64)
    policy = kvjax.presets.quest(256).rest
    assert (policy.local, policy.demote.slots(policy.local), policy.selected) == (16, 16, 240)
