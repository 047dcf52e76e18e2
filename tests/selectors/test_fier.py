"""FIER against a numpy FIER written from Algorithm 1 alone, token for token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, Fier, Fifo, Retrieval
from kvjax.numerics.partial import Logits, group_queries
from kvjax.numerics.quant import quantize_1bit
from kvjax.numerics.selection import Candidates, PackedSelection
from kvjax.ops import score_1bit
from kvjax.testing import _drive as drive
from tests.oracles import agrees, fier_scores, pooled

# One for several tests, which so run the same programs.
SMALL = CacheSpec(batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=600, dtype=jnp.float32)


def reads(layer: kvjax.LayerCache) -> list[int]:
    """The tokens that a step attends to, alike in all heads, of two rows that then have 256 and
    304."""
    tokens, lengths = drive.random_tokens(SMALL), np.array([255, 303])
    filled, _ = drive.fill(layer, tokens, lengths)
    _, _, info = drive.step(filled, tokens, lengths)
    heads = np.asarray(info.attended)
    assert (heads == heads[:, :1]).all()
    return heads[:, 0].tolist()


@functools.partial(jax.jit, static_argnums=0)
def select(policy: Retrieval, st: kvjax.ZonedState, q: jax.Array) -> kvjax.Selection:
    step = kvjax.Step(kvjax.Logits(q.shape[-1] ** -0.5))
    return policy.select(
        st, group_queries(q, st.recent.k.shape[1]), step, num_sorted_last=st.store.slots
    )


def picks(info: kvjax.Info, row: int, first: int, end: int) -> list[list[set[int]]]:
    """Positions from `first` to before `end` that a step read, by kv head and selection."""
    return [
        [{p for p in choice.tolist() if first <= p < end} for choice in head]
        for head in np.asarray(info.positions)[row]
    ]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "group_reduce",
    ["mean_softmax", "per_head", "mean_query", "mean_score", "max_softmax", "sum_softmax"],
)
def test_picks_are_those_of_fier_scores(group_reduce: str) -> None:
    spec = CacheSpec(
        batch=2, q_heads=8, kv_heads=2, head_dim=32, capacity=330, dtype=jnp.bfloat16
    )
    group, budget = 16, 40
    policy = Retrieval(
        selector=Fier(group=group, group_reduce=group_reduce),
        budget=budget,
        sink=0,
        local=1,
        demote=Fifo(leave=group),
        dense_below=0,
    )
    tokens, lengths = drive.random_tokens(spec), np.array([301, 90])
    cache, _ = drive.fill(kvjax.init_layer(policy, spec), tokens, lengths)
    for i in range(20):  # crosses a seal in each row
        _, cache, info = drive.step(cache, tokens, lengths + i)
        counts = np.asarray(cache.state.store.count)
        q = tokens.at((lengths + i)[:, None])[0][:, 0]
        for row, n in enumerate(lengths + i + 1):
            found = picks(info, row, 0, n - 1)
            sealed = (n - 1) // group * group  # every full group of the tokens before this one
            assert counts[row] == sealed
            for head in range(2):
                queries = q[row].reshape(2, 4, -1)[head].astype(np.float32)
                keys = tokens.k[row, : n - 1, head]
                ranks = pooled(
                    fier_scores(queries, keys, sealed, group, 32**-0.5, jnp.bfloat16),
                    group_reduce,
                )
                for choice, mine in enumerate(found[head]):
                    assert agrees(mine, ranks[choice], min(budget - 1, n - 1)), (
                        row,
                        head,
                        choice,
                        i,
                    )


@pytest.mark.parametrize("page_reduce", ["max", "mean"])
def test_pages_are_those_with_the_best_or_the_mean_of_fier_scores(page_reduce: str) -> None:
    """Pending pages by their exact keys so far; a page of the local window's token competes
    without it.
    """
    spec = CacheSpec(
        batch=1, q_heads=4, kv_heads=2, head_dim=32, capacity=330, dtype=jnp.float32
    )
    group, page, pages = 16, 8, 5
    policy = Retrieval(
        selector=Fier(group=group, page=page, page_reduce=page_reduce, group_reduce="per_head"),
        budget=page * pages + 1,
        sink=0,
        local=1,
        demote=Fifo(leave=group),
    )
    tokens, n = drive.random_tokens(spec), 301
    cache, _ = drive.fill(kvjax.init_layer(policy, spec), tokens, [n - 1])
    _, cache, info = drive.step(cache, tokens, [n - 1])
    sealed = int(cache.state.store.count[0])
    q = tokens.at(np.array([[n - 1]]))[0][:, 0]
    for head, mine in enumerate(picks(info, 0, 0, n - 1)):
        queries = q[0].reshape(2, 2, -1)[head].astype(np.float32)
        scores = fier_scores(
            queries, tokens.k[0, : n - 1, head], sealed, group, 32**-0.5, jnp.bfloat16
        )
        starts = range(0, n - 1, page)
        reduce = np.max if page_reduce == "max" else np.mean
        by_page = np.array(
            [reduce(scores[:, first : first + page], axis=1) for first in starts]
        )
        for choice, positions in enumerate(mine):
            best = np.argsort(-by_page[:, choice])[:pages]
            want = {p for i in best for p in range(i * page, min(i * page + page, n - 1))}
            assert positions == want, (head, choice)


def test_page_reduce_is_max_or_mean() -> None:
    with pytest.raises(ValueError, match=r"page_reduce='min'\) must be one of max, mean"):
        Fier(page=8, page_reduce="min")  # type: ignore[arg-type]


def test_ties_go_to_the_lower_slot() -> None:
    spec = CacheSpec(batch=1, q_heads=1, kv_heads=1, head_dim=8, capacity=80, dtype=jnp.float32)
    policy = Retrieval(
        selector=Fier(group=8), budget=5, sink=0, local=1, demote=Fifo(leave=8), dense_below=0
    )
    k = jnp.tile(
        jnp.where(jnp.arange(73) % 2 == 0, 1.0, -1.0)[None, :, None, None], (1, 1, 1, 8)
    )
    _, cache = jax.jit(kvjax.attention)(kvjax.init_layer(policy, spec), k, k, k)
    selection = select(policy, cache.state, jnp.ones((1, 1, 8)))
    assert selection.slots[0, 0, 0].tolist() == [0, 2, 4, 6]


def test_score_is_the_product_with_the_decoded_key() -> None:
    rng = np.random.default_rng(0)
    for slots, group, dim in ((96, 32, 64), (64, 1, 8), (1024 + 32, 32, 16), (2048, 256, 8)):
        k = rng.normal(size=(2, 3, slots, dim)).astype(np.float32)
        q = rng.normal(size=(2, 3, 5, dim)).astype(np.float32)
        index = jax.jit(quantize_1bit, static_argnums=1)(k, group)
        scores = jax.jit(
            functools.partial(score_1bit, logits=Logits(0.5), implementation="xla")
        )(q, index)
        for b, h in np.ndindex(2, 3):
            want = fier_scores(q[b, h], k[b, h], slots, group, 0.5, jnp.bfloat16)
            np.testing.assert_allclose(scores[b, h], want, atol=2e-5 * np.abs(want).max())


def test_first_two_layers_are_dense_and_say_so() -> None:
    cache = kvjax.init(kvjax.presets.fier(budget=16), SMALL, layers=4)
    assert [reads(layer) for layer in cache.layers] == [[256, 304]] * 2 + [[16, 16]] * 2


def test_small_budget_counts_recent_tokens_too() -> None:
    policy = kvjax.presets.fier(budget=16).rest
    tokens, lengths = drive.random_tokens(SMALL), np.array([255, 303])
    cache, _ = drive.fill(kvjax.init_layer(policy, SMALL), tokens, lengths)
    for i in range(8):
        _, cache, info = drive.step(cache, tokens, lengths + i)
        assert (np.asarray(info.attended) == 16).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_step_at_32k_tokens_never_unpacks_its_keys(dtype: str) -> None:
    spec = CacheSpec(batch=1, q_heads=32, kv_heads=8, head_dim=128, capacity=32768, dtype=dtype)
    cache = jax.eval_shape(
        functools.partial(kvjax.init_layer, kvjax.presets.fier(budget=1024).rest, spec)
    )
    key_bytes = 32768 * 8 * 128 * spec.dtype.itemsize
    q, k = (jax.ShapeDtypeStruct((1, 1, heads, 128), dtype) for heads in (32, 8))
    step = jax.jit(functools.partial(kvjax.attention, flush=False), donate_argnums=0)
    temp = step.lower(cache, q, k, k).compile().memory_analysis().temp_size_in_bytes
    # On CPU, jaxlib before 0.11 has no 16-bit slices and widens the scales of the whole index
    # to f32: 4 bytes for each 16 bits of a scale and a zero, 1/8 of the key cache at g = 32.
    # Nothing else may be large.
    widened = key_bytes // 8 if dtype == "bfloat16" and jax.__version_info__ < (0, 11) else 0
    assert temp <= key_bytes // 4 + widened, f"{temp} temp bytes beside {key_bytes} of keys"


def test_equals_full_attention_over_steps_that_cross_flushes() -> None:
    spec = CacheSpec(
        batch=3, q_heads=8, kv_heads=2, head_dim=16, capacity=400, dtype=jnp.float32
    )
    fier = dataclasses.replace(
        kvjax.presets.fier(budget=400, group=16, chunk=32).rest, sink=4, local=24
    )
    tokens, lengths = drive.random_tokens(spec), np.array([130, 7, 300])
    caches = [
        drive.fill(kvjax.init_layer(p, spec), tokens, lengths)[0] for p in (fier, kvjax.Full())
    ]
    for i in range(80):  # a flush each 32
        active = np.array([True, i % 3 > 0, True])
        outs = []
        for j, cache in enumerate(caches):
            out, caches[j], _ = drive.step(cache, tokens, lengths, active)
            outs.append(out)
        np.testing.assert_allclose(outs[0][active], outs[1][active], atol=1e-5)
        lengths = lengths + active
    assert (np.asarray(caches[0].length) == lengths).all()
    assert (np.asarray(caches[0].state.store.count) > 0).all()


@pytest.mark.parametrize(
    ("num_sorted_last", "window", "fused"), [(0, None, True), (1, 64, True), (2, None, False)]
)
def test_one_operation_scores_and_selects_unless_more_than_one_unit_is_to_be_in_order(
    num_sorted_last: int, window: int | None, fused: bool
) -> None:
    spec, at = (
        CacheSpec(batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=64, dtype=jnp.float32),
        jnp.zeros(2, int),
    )
    q, keys = jnp.zeros((2, 2, 2, 16)), jnp.zeros((2, 2, 8, 16))
    candidates = Candidates(
        span=(at, at),
        pending=(keys, 0, at),
        k=5,
        k_max=5,
        pending_slots=8,
        window=window,
        num_sorted_last=num_sorted_last,
    )
    selector = Fier(group=16)
    found = jax.eval_shape(
        functools.partial(selector.select, logits=Logits(1.0)),
        selector.init(spec, 64),
        q,
        candidates,
    )
    assert isinstance(found, PackedSelection) == fused
