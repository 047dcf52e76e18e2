"""The kernels that take several decode steps at once: each step gets the same result as alone."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ops
from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.attend import attend_span
from kvjax.kernels_pallas.select import select_1bit, select_pages
from kvjax.numerics.partial import Logits, Span
from kvjax.numerics.quant import quantize
from kvjax.numerics.rotate import encode
from kvjax.numerics.selection import Candidates, PackedSelection
from tests.kernels.inputs import boxes, index, normal, relative

pytestmark = pytest.mark.usefixtures("kernels")


def candidates(B, K, T, R, D, S, wide, room, *, own=False, local=2, dtype=jnp.bfloat16):
    """Candidates of T steps, each of which has one pending token more; counts differ by row."""
    keys = 3 * normal(7, B, K, *((T,) if own else ()), R, D, dtype=dtype)
    stop = jnp.asarray(np.arange(1, T + 1)[None] + np.array([R - T, 0])[:B, None], jnp.int32)
    limit = jnp.asarray(
        np.broadcast_to(np.array([room, room - 1])[:B, None], (B, T)), jnp.int32
    )
    span = (0, jnp.asarray([S, S - 3][:B], jnp.int32))
    return Candidates(
        span=span,
        pending=(keys, 0, stop),
        k=limit,
        k_max=room,
        pending_slots=wide,
        local=local,
        steps=T,
    )


def assert_each_step_is_as_alone(select, q, among):
    """select(q, candidates) of all steps gives the slots that it gives for the first and for
    the last.
    """
    together = jax.jit(select)(q, among)
    of_step, alone, lists = (
        q.shape[2] // among.steps,
        jax.jit(select),
        together.slots.shape[2] // among.steps,
    )
    for t, (own_q, own) in enumerate(among.passes(q, of_step)):
        if 0 < t < among.steps - 1:
            continue
        # As a caller of one step has it: numbers by row, and keys without the axis of steps.
        keys, start, stop = own.pending
        pending = (keys if keys.ndim == 4 else keys[:, :, 0], start, stop[:, 0])
        want = alone(own_q, dataclasses.replace(own, pending=pending, k=own.k[:, 0]))
        mine = PackedSelection(*(a[:, :, t * lists : (t + 1) * lists] for a in together))
        np.testing.assert_array_equal(mine.found, want.found)
        for got, wanted, valid in zip(mine.slots, want.slots, want.valid, strict=True):
            got, wanted = (np.sort(np.where(valid, a, -1), axis=-1) for a in (got, wanted))
            np.testing.assert_array_equal(got, wanted, err_msg=f"step {t}")


@pytest.mark.parametrize(
    ("T", "G", "D", "group_reduce", "keys"),
    [
        (8, 4, 64, "mean_softmax", jnp.bfloat16),
        pytest.param(3, 3, 128, "mean_score", jnp.bfloat16, marks=pytest.mark.thorough),
        pytest.param(
            5, 7, 64, "per_head", jnp.bfloat16, marks=pytest.mark.thorough
        ),  # two passes
        pytest.param(
            3, 4, 64, "mean_softmax", jnp.float32, marks=pytest.mark.thorough
        ),  # scores in place of keys
    ],
)
def test_select_1bit_scores_all_steps_at_once(T, G, D, group_reduce, keys):
    B, K, S = 1, 2, 160
    q, ix = (
        normal(1, B, K, T * G, D, dtype=jnp.bfloat16).astype(jnp.float32),
        index(B, K, S, D, 32, jnp.bfloat16),
    )
    among = candidates(B, K, T, 40, D, S, 36, 25, dtype=keys)
    run = partial(
        ops.select_1bit.run_kernel, keys=ix, group_reduce=group_reduce, logits=Logits(0.1)
    )
    assert_each_step_is_as_alone(lambda q, among: run(q=q, candidates=among), q, among)


@pytest.mark.parametrize(
    ("own", "B"), [(True, 2), pytest.param(False, 1, marks=pytest.mark.thorough)]
)
def test_select_pages_scores_all_steps_at_once(own, B):
    T, G, K, P, D, unit = 5, 3, 1, 21, 64, 16
    q, (low, high) = (
        normal(2, B, K, T * G, D, dtype=jnp.bfloat16).astype(jnp.float32),
        boxes(B, K, P, D, jnp.bfloat16),
    )
    among = candidates(B, K, T, 40, D, P * unit, 32, 7, own=own)
    run = partial(
        ops.select_pages.run_kernel,
        low=low,
        high=high,
        group_reduce="mean_softmax",
        unit=unit,
        logits=Logits(0.1),
    )
    assert_each_step_is_as_alone(lambda q, among: run(q=q, candidates=among), q, among)


def test_warps_that_share_the_heads_of_a_page_select_the_same():
    B, K, T, G, P, D, unit = 1, 1, 5, 4, 10, 64, 16
    q = normal(1, B, K, T * G, D, dtype=jnp.bfloat16).astype(jnp.float32)
    corners, among = (
        boxes(B, K, P, D, jnp.bfloat16),
        candidates(B, K, T, 40, D, P * unit, 32, 9),
    )

    def select(tiles, columns):
        return select_pages.select_pages(
            q, *corners, among.span, among.pending, among.k, "mean_softmax", 9, unit=unit, scale=0.1,
            pending_slots=32, steps=T, config=select_pages.Config(blocks=1, tiles=tiles, columns=columns),
        )  # fmt: skip

    want, got = (jax.jit(select, static_argnums=(0, 1))(*sizes) for sizes in ((1, 1), (2, 2)))
    np.testing.assert_array_equal(np.sort(got[0]), np.sort(want[0]))
    np.testing.assert_array_equal(got[1], want[1])


@pytest.mark.parametrize("wide", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_decoded_1bit_keys_select_the_same(wide):
    B, K, T, G, S, D = 2, 2, 6, 3, 544, 128
    q = normal(1, B, K, T * G, D, dtype=jnp.bfloat16).astype(jnp.float32)
    keys, among = index(B, K, S, D, 32, jnp.bfloat16), candidates(B, K, T, 40, D, S, 32, 9)

    def select(q, wide):
        return select_1bit.select_1bit(
            q, *keys, among.span, among.pending, among.k, "mean_softmax", 9, scale=0.1, pending_slots=32, steps=T,
            config=select_1bit.Config(blocks=1, units=2, wide=wide),
        )  # fmt: skip

    want, got = (jax.jit(select, static_argnums=1)(q, w) for w in (0, wide))
    np.testing.assert_array_equal(np.sort(got[0]), np.sort(want[0]))
    np.testing.assert_array_equal(got[1], want[1])


def test_select_4bit_and_most_voted_take_the_candidates_of_each_step():
    B, K, T, S, D = 2, 1, 3, 64, 64
    q, keys = normal(1, B, K, T, D), jax.jit(encode)(normal(2, B, K, S, D))
    votes = jnp.asarray(np.random.default_rng(4).integers(0, 20, (B, K, T, S)), jnp.uint8)
    among = candidates(B, K, T, 12, D, S, 9, 20)

    def select(q, among):
        mine = votes if among.steps > 1 else votes[:, :, :1]
        fill = among.k, *among.pending[1:]
        count = {"length": among.span[1], "count": jnp.full(B, 16, jnp.int32), "room": 30}
        listed = ops.most_voted.run_kernel(votes=mine, **count, complement=fill, local=2)
        return ops.select_4bit.run_kernel(
            q=q, keys=keys, listed=listed, candidates=among, seed=3, logits=Logits(0.1)
        )

    votes = jnp.broadcast_to(
        votes[:, :, :1], votes.shape
    )  # the same for each step, so that one alone has its own
    assert_each_step_is_as_alone(select, q, among)


def test_attend_zones_reads_the_spans_of_each_step():
    B, K, T, G, S, R, D, M = 2, 2, 3, 2, 40, 20, 64, 9
    q, *kv = (
        normal(i, B, K, n, D, dtype=jnp.bfloat16)
        for i, n in enumerate((T * G, S, S, R, R, 4, 4))
    )
    rng = np.random.default_rng(1)
    slots = jnp.asarray(
        np.stack([rng.permutation(S)[:M] for _ in range(B * K * T)]).reshape(B, K, T, M),
        jnp.int32,
    )
    found = jnp.asarray(rng.integers(0, M + 1, (B, K, T)), jnp.int32)
    stop, sunk = (
        jnp.asarray(x, jnp.int32) for x in ([[5, 6, 7], [18, 19, 20]], [[0, 1, 2], [4, 4, 4]])
    )
    none = jnp.zeros((B, 1), jnp.int32)

    def run(q, slots, found, start, stop, sunk):
        recent, sink = Span(*kv[2:4], start, stop), Span(*kv[4:], start, sunk)
        zones = {
            "k": kv[0],
            "v": kv[1],
            "recent": recent,
            "sink": sink,
            "local": 5,
            "more": None,
        }
        return ops.attend_zones.run_kernel(
            q=q, selection=PackedSelection(slots, found), **zones, logits=Logits(0.1)
        )

    together, alone = jax.jit(run)(q, slots, found, none, stop, sunk), jax.jit(run)
    for t in range(T):
        of = slice(t, t + 1)
        ends = none[:, 0], stop[:, t], sunk[:, t]
        want = alone(q[:, :, t * G : (t + 1) * G], slots[:, :, of], found[:, :, of], *ends)
        assert relative(together[:, :, t * G : (t + 1) * G], want) < 1e-6


@pytest.mark.parametrize(
    ("T", "G", "D"),
    [  # the last column is not full; two rows; one column
        (3, 7, 64),
        *(
            pytest.param(*sizes, marks=pytest.mark.thorough)
            for sizes in ((13, 3, 128), (2, 3, 64))
        ),
    ],
    ids=["21 heads", "39 heads", "6 heads"],
)
def test_attend_span_reads_the_span_of_each_step(T, G, D):
    B, K, S = 2, 2, 100
    q, *kv = (normal(i, B, K, n, D, dtype=jnp.bfloat16) for i, n in enumerate((T * G, S, S)))
    stop = jnp.asarray([np.arange(T) + 40, np.minimum(np.arange(T) + S - 1, S)], jnp.int32)
    start = jnp.maximum(stop - jnp.asarray([[200], [30]]), 0)

    def run(q, start, stop):
        config = attend_span.Config(2, stages=2, keys=16)
        return attend_span.attend_span(q, *kv, start, stop, scale=0.1, config=config)

    for starts in (start, start[:, :1]):
        together, alone = jax.jit(run)(q, starts, stop), jax.jit(run)
        for t in (0, T - 1):
            of = slice(t * G, (t + 1) * G)
            want = alone(
                q[:, :, of], starts[:, t % starts.shape[1]], stop[:, t]
            )  # in other tiles, and rounded to bf16
            assert relative(together[:, :, of], want) < 2e-3


@pytest.mark.parametrize(
    ("T", "G", "dtype"),
    [(5, 4, jnp.bfloat16), pytest.param(3, 2, jnp.float32, marks=pytest.mark.thorough)],
)
def test_attend_quantized_reads_the_exact_keys_of_each_step(T, G, dtype):
    B, K, S, R, D = 2, 2, 84, 40, 64
    q, k, v, *zone = (
        normal(i, B, K, n, D, dtype=jnp.bfloat16) for i, n in enumerate((T * G, S, S, R, R))
    )
    keys, values = quantize(k, 2, tokens=42, channels=1), quantize(v, 2, channels=32)
    stop = jnp.asarray([np.arange(T) + 3, np.arange(T) + R - T + 1], jnp.int32)
    span, none, q = (
        (jnp.zeros(B, jnp.int32), jnp.asarray([S, 42], jnp.int32)),
        jnp.zeros((B, 1), jnp.int32),
        q.astype(dtype),
    )

    def run(attend, q, start, stop):
        zones = {
            "start": span[0],
            "stop": span[1],
            "recent": Span(*zone, start, stop),
            "sink": None,
            "sinks": None,
        }
        return attend(q=q, keys=keys, values=values, **zones, logits=Logits(0.1))

    op = ops.attend_quantized_zones
    got, want = (
        jax.jit(partial(run, f))(q, none, stop)
        for f in (op.run_kernel, partial(op, implementation="xla"))
    )
    assert got.dtype == dtype
    assert relative(got, want) < 4e-3 + (dtype == jnp.bfloat16) * 4e-3


def test_numbers_by_step_are_repeated_for_each_head():
    got = simt.by_step(jnp.asarray([[1, 2, 3], [4, 5, 6]]), 2)
    np.testing.assert_array_equal(got, [1, 2, 3, 1, 2, 3, 4, 5, 6, 4, 5, 6])
    np.testing.assert_array_equal(simt.by_step(7, 2), [7])
