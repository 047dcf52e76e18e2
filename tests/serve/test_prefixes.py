"""Rows that share a prefix go on as copies of the row would, and the prefix is stored once."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax.contrib.pqcache import ProductCodes
from kvjax.numerics.partial import Logits
from kvjax.numerics.sharing import Shared
from kvjax.serve import prefixes
from kvjax.stores.prefixed import Prefixed

SPEC = kvjax.CacheSpec(
    batch=1, q_heads=4, kv_heads=2, head_dim=16, capacity=160, dtype="float32"
)
FIER = kvjax.Retrieval(
    selector=kvjax.Fier(group=8), budget=24, sink=2, local=8, demote=kvjax.Fifo(leave=16)
)
POLICIES = {
    "full": kvjax.Full(),
    "kivi": kvjax.Compressed(
        store=kvjax.Quantized(bits=2, key_group=8), local=8, demote=kvjax.Fifo(leave=16)
    ),
    "values rounded later": kvjax.Compressed(
        store=kvjax.Quantized(bits=2, key_group=8),
        local=16,
        demote=kvjax.Fifo(leave=16),
        value_window=8,
    ),
    "log-sparse": kvjax.Compressed(
        store=kvjax.Quantized(bits=4, key_group=8),
        sink=2,
        local=16,
        demote=kvjax.LogSparse(window=16),
    ),
    "fier": FIER,
    "fier per head over codes": dataclasses.replace(
        FIER,
        selector=kvjax.Fier(group=8, group_reduce="per_head"),
        store=kvjax.Quantized(bits=8, key_group=8),
    ),
    "product codes": dataclasses.replace(
        FIER, selector=ProductCodes(parts=8, bits=3, learn=16)
    ),
    "pages in host memory": dataclasses.replace(
        FIER, selector=kvjax.MinMaxPages(page=8), budget=34, store=kvjax.HostOffload(page=8)
    ),
}


def tokens(batch, count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((batch, count, heads, 16), np.float32) for heads in (4, 2, 2)]


step = jax.jit(kvjax.attention_info, static_argnames="window")
prefill, decode = jax.jit(kvjax.prefill, static_argnames="window"), jax.jit(kvjax.decode)


def read(policy, length, seed=0, capacity=160):
    layer = kvjax.init_layer(policy, dataclasses.replace(SPEC, capacity=capacity))
    return prefill(layer, *tokens(1, length, seed))[1]


@pytest.mark.parametrize("name", ["full", pytest.param("fier", marks=pytest.mark.thorough)])
def test_values_of_another_size_than_keys_share_a_prefix(name):
    q, k, v = tokens(1, 77)
    empty = kvjax.init_layer(
        POLICIES[name], dataclasses.replace(SPEC, capacity=160, value_dim=8)
    )
    row = prefill(empty, q, k, v[..., :8])[1]
    copies, forked = kvjax.take_rows(row, [0] * 3), prefixes.share_prefix(row, 3, new_tokens=9)
    for i in range(9):
        q, k, v = tokens(3, 1, 10 * i)
        want, copies, _ = step(copies, q, k, v[..., :8])
        got, forked, _ = step(forked, q, k, v[..., :8])
        np.testing.assert_allclose(got, want, atol=2e-5)


# Like another that runs: "kivi" or "fier".
LIKE = [
    ("values rounded later", None),
    ("log-sparse", None),
    ("fier per head over codes", None),
]
LIKE += [("product codes", None), ("kivi", 40), ("full", 40)]


@pytest.mark.parametrize(
    ("name", "window"),
    [
        pytest.param(name, window, marks=pytest.mark.thorough if (name, window) in LIKE else ())
        for name, window in [
            *((name, None) for name in POLICIES),
            ("full", 40),
            ("kivi", 40),
            ("fier", 40),
        ]
    ],
)
def test_rows_of_a_fork_continue_as_copies(name, window):
    """The same selections, and outputs that differ by rounding; through flushes, a chunk and
    rows that pause.
    """
    row = read(POLICIES[name], 77)
    copies, forked = (
        kvjax.take_rows(prefixes.with_row_policies(row), [0] * 3),
        prefixes.share_prefix(row, 3, new_tokens=60),
    )
    assert forked.length.tolist() == [77] * 3
    q, k, v = tokens(3, 7, 5)
    settings = {"lengths": np.array([7, 3, 0]), "window": window}
    want, copies = prefill(copies, q, k, v, **settings)
    got, forked = prefill(forked, q, k, v, **settings)
    for i, n in enumerate([7, 3]):
        np.testing.assert_allclose(got[i, :n], want[i, :n], atol=2e-5)
    for i in range(22):
        q, k, v = tokens(3, 1, 10 * i)
        active = np.array([True, i % 3 > 0, i > 4])
        want, copies, info = step(copies, q, k, v, active=active, window=window)
        got, forked, seen = step(forked, q, k, v, active=active, window=window)
        np.testing.assert_allclose(got[active], want[active], atol=2e-5)
        positions = (np.sort(one.positions[active], axis=-1) for one in (seen, info))
        if info.selection is not None:
            np.testing.assert_array_equal(*positions)
        np.testing.assert_array_equal(seen.attended[active], info.attended[active])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("full", marks=pytest.mark.thorough),
        pytest.param("kivi", marks=pytest.mark.thorough),
        "fier",
    ],
)
def test_several_prefixes_in_one_batch(name):
    """Rows of two prefixes and one of none, seated in any order, then seated anew."""
    policy = POLICIES[name]
    first, second, third = (
        prefixes.with_row_policies(read(policy, n, seed))
        for n, seed in ((100, 1), (61, 2), (20, 3))
    )
    cache = kvjax.init(policy, dataclasses.replace(SPEC, batch=5, capacity=96), layers=1)
    cache = prefixes.prefixed_like(cache, 96, prefixes=3, sharers=2)
    seats = [
        (3, first, 2, True),
        (0, second, 0, True),
        (1, first, 2, False),
        (4, third, -1, False),
        (2, second, 0, False),
    ]
    assign_slot = jax.jit(prefixes.assign_slot, static_argnames="store")

    def whole(layer):
        return kvjax.Cache((layer,))

    rows = [None] * 5
    for slot, row, prefix, store in seats:
        cache = assign_slot(cache, whole(row), slot, prefix=prefix, shared=1000, store=store)
        rows[slot] = row
    cache = assign_slot(cache, whole(third), 3, prefix=1, shared=1000, store=True)
    rows[3] = third
    assert cache.length.tolist() == [int(row.length[0]) for row in rows]
    q, k, v = tokens(5, 1, 40)
    got, layer, _ = step(cache.layers[0], q, k, v)
    for i, row in enumerate(rows):
        want, _, _ = step(row, q[i : i + 1], k[i : i + 1], v[i : i + 1])
        np.testing.assert_allclose(got[i], want[0], atol=2e-5)
    taken = prefixes.without_prefix(layer, 1)
    got, _, _ = step(taken, q[:1], k[:1], v[:1])
    want, _, _ = step(step(rows[1], q[1:2], k[1:2], v[1:2])[1], q[:1], k[:1], v[:1])
    np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("name", ["full", "kivi", "fier"])
def test_what_a_row_has_after_its_prefix_changes_no_sharer(name):
    """Tokens that are not finite, in the row with which a prefix is stored."""
    policy = POLICIES[name]
    clean, poisoned = tokens(1, 100, 1), tokens(1, 100, 1)
    for array in poisoned:
        array[:, 70:] = np.nan
    empty = kvjax.init_layer(policy, dataclasses.replace(SPEC, capacity=160))
    first, second = (
        prefixes.with_row_policies(prefill(empty, *qkv)[1]) for qkv in (poisoned, clean)
    )
    cache = kvjax.init(policy, dataclasses.replace(SPEC, batch=6, capacity=112), layers=1)
    cache = prefixes.prefixed_like(cache, 64, prefixes=1)
    assign_slot = jax.jit(prefixes.assign_slot, static_argnames="store")
    for slot, row, store in ((0, first, True), (1, second, False)):
        cache = assign_slot(cache, kvjax.Cache((row,)), slot, prefix=0, shared=60, store=store)
    q, k, v = tokens(6, 1, 40)
    got = step(cache.layers[0], q, k, v)[0][1]
    np.testing.assert_allclose(got, step(second, q[1:2], k[1:2], v[1:2])[0][0], atol=2e-5)


@pytest.mark.parametrize("sharers", [2, 24])
def test_a_selection_reads_the_prefix_as_a_whole_where_that_is_less(sharers):
    """24 rows that select 14 of 64 tokens each read the prefix; 2 rows gather."""
    row = prefixes.with_row_policies(read(FIER, 77))
    forked, copies = (
        prefixes.share_prefix(row, sharers, new_tokens=8),
        kvjax.take_rows(row, [0] * sharers),
    )
    q, k, v = tokens(sharers, 1, 5)
    text = str(jax.make_jaxpr(kvjax.attention)(forked, q, k, v))
    assert (f"bool[1,2,{2 * sharers},64]" in text) == (sharers == 24)
    np.testing.assert_allclose(step(forked, q, k, v)[0], step(copies, q, k, v)[0], atol=2e-5)


@pytest.mark.parametrize("name", ["full", "kivi", "fier"])
def test_a_prompt_is_stored_once_for_its_answers(name):
    spec = dataclasses.replace(SPEC, capacity=32768 + 64)
    row = jax.eval_shape(lambda: POLICIES[name].init(spec))
    one = kvjax.memory.nbytes(row).total
    policy = prefixes.prefixed(POLICIES[name], 32768)
    many = jax.eval_shape(lambda: policy.init(dataclasses.replace(spec, batch=8, capacity=192)))
    assert kvjax.memory.nbytes(many).total < 1.12 * one


def test_rows_of_a_fork_are_taken_rolled_back_grown_and_taken_out():
    row = read(FIER, 77)
    forked = prefixes.share_prefix(row, 3, new_tokens=40)
    q, k, v = tokens(3, 4, 5)
    longer = decode(forked, q, k, v)[1]
    back = kvjax.rollback(longer, [77, 77, 77])
    q, k, v = tokens(3, 1, 6)
    want = step(forked, q, k, v)[0]
    np.testing.assert_array_equal(step(back, q, k, v)[0], want)
    np.testing.assert_array_equal(step(kvjax.take_rows(forked, [2, 0, 1]), q, k, v)[0], want)
    np.testing.assert_allclose(step(kvjax.grow(forked, 400), q, k, v)[0], want, atol=1e-6)
    five = kvjax.take_rows(forked, [0] * 5)
    assert five.nbytes.device < forked.nbytes.device * 1.7
    with pytest.raises(ValueError, match="a prefix that other rows share"):
        kvjax.truncate(forked, [3, 3, 3])
    with pytest.raises(ValueError, match="rows of this cache share prefixes"):
        kvjax.insert(forked, kvjax.take_rows(forked, [0]), 1)
    taken = prefixes.without_prefix(longer, 2)
    shorter = kvjax.truncate(taken, [77])
    np.testing.assert_allclose(step(shorter, q[2:], k[2:], v[2:])[0], want[2:], atol=2e-5)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            kvjax.Evicting(evictor=kvjax.evictors.Sliding(sink=2), budget=24),
            "cannot share a prefix: it evicts",
        ),
        (kvjax.Speculative(retrieval=FIER), "remembers its last step"),
        (
            dataclasses.replace(FIER, store=kvjax.HotSet(tokens=64)),
            "describes a row as a whole",
        ),
        (
            dataclasses.replace(FIER, selector=kvjax.Paris(candidates=200)),
            "scores tokens by each other",
        ),
    ],
)
def test_policies_whose_rows_cannot_share_a_prefix_say_so(policy, message):
    with pytest.raises(ValueError, match=message):
        prefixes.share_prefix(kvjax.init_layer(policy, SPEC), 2, new_tokens=8)


def test_fork_refuses_what_is_no_row():
    with pytest.raises(ValueError, match="one row, got 2"):
        prefixes.share_prefix(
            kvjax.init_layer(FIER, dataclasses.replace(SPEC, batch=2)), 2, new_tokens=8
        )
    with pytest.raises(ValueError, match=r"share_prefix\(row=\.\.\.\)"):
        prefixes.share_prefix([1, 2, 3], 2, new_tokens=8)
    row = kvjax.init_layer(FIER, SPEC)
    assert prefixes.share_prefix(row, 1, new_tokens=1).spec.batch == 1
    with pytest.raises(ValueError, match=r"share_prefix\(rows=\.\.\.\) must be at least 1"):
        prefixes.share_prefix(row, 0, new_tokens=1)
    with pytest.raises(
        ValueError, match=r"share_prefix\(new_tokens=\.\.\.\) must be at least 1"
    ):
        prefixes.share_prefix(row, 1, new_tokens=0)
    uneven = dataclasses.replace(POLICIES["kivi"], store=kvjax.stores.Prefixed(tokens=20))
    with pytest.raises(ValueError, match="whole chunks of 16"):
        kvjax.init_layer(uneven, SPEC)


def test_a_row_has_no_prefix_before_it_is_seated():
    store, spec = Prefixed(tokens=16), dataclasses.replace(SPEC, batch=2)
    rng, start = np.random.default_rng(0), np.zeros(2, np.int32)
    shared, own = (
        jax.numpy.asarray(rng.normal(size=(rows, 2, 16, 16)), spec.dtype) for rows in (1, 2)
    )
    q = jax.numpy.asarray(rng.normal(size=(2, 2, 2, 16)), spec.dtype)
    st = store.append(store.init(spec, 16), own, own, start + 16)
    prefix = store.store.append(st.shared.value, shared, shared, start[:1] + 16)
    st = dataclasses.replace(st, shared=Shared(prefix))
    want = store.store.attend(st.own, q, start, logits=Logits(0.25))
    attend = jax.jit(store.attend, static_argnames="logits")
    np.testing.assert_allclose(
        attend(st, q, start, logits=Logits(0.25)).out, want.out, rtol=1e-5
    )


@pytest.mark.parametrize(("rows", "reads"), [(4, 1), (33, 2)])
def test_rows_that_share_a_prefix_read_it_together_in_a_step(rows, reads):
    """By the kernel of spans, 32 rows at a time; plain JAX read a prefix block by block, as a
    chunk under a window.
    """
    store = Prefixed(store=kvjax.Dense(), tokens=32)
    rng, spec = np.random.default_rng(0), dataclasses.replace(SPEC, batch=rows)
    q, start = (
        rng.standard_normal((rows, 2, 2, 16), np.float32),
        np.arange(rows, dtype=np.int32) % 9,
    )
    st = store.init(spec, 32)
    filled = {name: rng.standard_normal((1, 2, 32, 16), np.float32) for name in ("k", "v")}
    prefix = dataclasses.replace(st.shared.value, **filled, count=np.array([20], np.int32))
    st = dataclasses.replace(
        st, prefix=np.zeros(rows, np.int32), base=np.full(rows, 20), shared=Shared(prefix)
    )
    with kvjax.ops.explained() as found:
        got = jax.jit(store.attend, static_argnames="logits")(st, q, start, logits=Logits(0.25))
    assert [one.op for one in found] == ["attend_span"] * (1 + reads)
    each = jax.tree.map(lambda a: np.repeat(a, rows, axis=0), prefix)
    want = store.store.attend(each, q, start, logits=Logits(0.25))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
