"""The kernel top_k_grouped against the reference, on random and on adversarial input."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ops
from kvjax.kernels_pallas.select import top_k, top_k_grouped
from kvjax.numerics.selection import reduce_scores
from kvjax.ops.select import rank_grouped
from tests.kernels.conftest import ON_GPU, on_gpu

pytestmark = pytest.mark.usefixtures("kernels")


def parts_of(B, K, G, sizes, kind, seed=0):
    """Scores in which no two units of a row have ranks within rounding, unless `kind` makes
    them equal.
    """
    rng = np.random.default_rng(seed)
    U = sum(sizes)
    steps = np.argsort(rng.random((B, K, 1, U)), axis=-1).astype(np.float32) / 64
    scores = steps * np.linspace(1, 2, G, dtype=np.float32)[:, None] + rng.standard_normal(
        (B, K, G, 1), np.float32
    )
    valid = rng.random((B, K if kind == "poison" else 1, 1, U)) < 0.7
    if kind == "equal":
        scores[:] = 1
    elif kind == "poison":
        scores = np.where(valid, scores, np.nan)
    elif kind == "infinite":
        scores[..., ::9] = -np.inf
    elif kind == "far apart":
        scores[:, :, 0] += 500
        scores[:, :, -1] -= 500
    elif kind == "few valid":
        valid = np.broadcast_to(np.arange(U) < 3, valid.shape).copy()
        valid[0] = False
    edges = np.cumsum(sizes)[:-1]
    split = (np.split(a.astype(a.dtype), edges, axis=-1) for a in (scores, valid))
    return [(jnp.asarray(s), jnp.asarray(v)) for s, v in zip(*split, strict=True)]


@pytest.mark.parametrize(
    ("B", "K", "G", "sizes", "k", "blocks"),
    [
        (2, 1, 4, (400, 22), 30, 2),
        (2, 1, 4, (8200, 22), 30, -2),
        (2, 1, 12, (400, 22), 30, 2),
        pytest.param(2, 1, 16, (8200, 22), 30, -2, marks=pytest.mark.thorough),
        pytest.param(1, 2, 3, (1001,), 50, -1, marks=pytest.mark.thorough),
        pytest.param(1, 1, 8, (20000, 64), 700, -3, marks=pytest.mark.thorough),
        pytest.param(1, 2, 3, (1001,), 50, 1, marks=pytest.mark.thorough),
        pytest.param(1, 2, 3, (401, 3, 64), 50, 1, marks=pytest.mark.thorough),
        pytest.param(1, 1, 8, (40000, 64), 700, 2, marks=pytest.mark.thorough),
        *(
            pytest.param(*sizes, None, marks=on_gpu)
            for sizes in (
                *(
                    (1, 8, 4, (131072, 512), 2048),
                    (1, 8, 4, (130560, 512), 2048),
                    (2, 3, 8, (5000, 257), 300),
                ),
                (1, 2, 4, (1 << 20, 512), 4096),
            )
        ),
    ],
)
def test_top_k_grouped_chooses_what_its_reference_does(B, K, G, sizes, k, blocks):
    config = blocks and top_k.Config(blocks=abs(blocks), cluster=int(blocks > 0))
    run = jax.jit(partial(top_k_grouped.top_k_grouped, k=k, config=config), static_argnums=1)
    reference = jax.jit(partial(ops.top_k_grouped, k=k, implementation="xla"), static_argnums=1)
    pooled = jax.jit(reduce_scores, static_argnums=1)
    pools = (
        {"spread": ("mean_softmax", "mean_score")}
        if B > 1
        else {"spread": ("mean_softmax", "max_softmax")}
    )
    for kind in ("spread", "equal", "poison", "infinite", "far apart", "few valid"):
        # A row shows what a kind of scores does; the simulator takes a second for each.
        rows = B if ON_GPU or kind in ("spread", "few valid") else 1
        parts = parts_of(rows, K, G, sizes, kind)
        for group_reduce in pools.get(kind, ("mean_softmax",)):
            slots, found = run(parts, group_reduce)
            want = reference(parts, group_reduce)
            np.testing.assert_array_equal(found, want.valid, err_msg=kind)
            slots = np.asarray(slots)
            assert all(np.unique(row).size == k for row in slots.reshape(-1, k))
            # Ranks within rounding may stand in another order; what is chosen must rank as what
            # the reference chose.
            ranks = np.asarray(pooled(parts, group_reduce))
            both = (np.take_along_axis(ranks, np.asarray(s), -1) for s in (slots, want.slots))
            got, best = (np.where(want.valid, rank, 0) for rank in both)
            np.testing.assert_allclose(got, best, rtol=1e-5, atol=1e-4, err_msg=kind)
            if kind == "equal":
                np.testing.assert_array_equal(slots, want.slots)


def test_top_k_grouped_has_a_choice_for_each_head_and_takes_vmap():
    parts = parts_of(2, 1, 2, (59, 5), "spread")
    run = partial(
        top_k_grouped.top_k_grouped, group_reduce="per_head", k=7, config=top_k.Config(blocks=1)
    )
    want = jax.jit(
        partial(ops.top_k_grouped, group_reduce="per_head", k=7, implementation="xla")
    )(parts)
    np.testing.assert_array_equal(jax.jit(run)(parts)[0], want.slots)
    apart = jax.jit(jax.vmap(run))([tuple(a[:, None] for a in part) for part in parts])
    np.testing.assert_array_equal(apart[0][:, 0], want.slots)


def test_top_k_grouped_takes_flags_of_each_head_beside_flags_of_all():
    (scores, valid), shared = parts_of(1, 2, 2, (59, 5), "spread")
    parts = [(scores, jnp.concatenate([valid, ~valid], axis=1)), shared]
    run = partial(
        top_k_grouped.top_k_grouped,
        group_reduce="mean_score",
        k=7,
        config=top_k.Config(blocks=1),
    )
    want = jax.jit(
        partial(ops.top_k_grouped, group_reduce="mean_score", k=7, implementation="xla")
    )(parts)
    slots, found = jax.jit(run)(parts)
    np.testing.assert_array_equal(found, want.valid)
    np.testing.assert_array_equal(slots, want.slots)


@pytest.mark.parametrize("blocks", [2, -2])
@pytest.mark.parametrize("group_reduce", ["mean_softmax", "mean_score"])
def test_ranks_of_two_calls_order_the_units_of_both(group_reduce: str, blocks: int) -> None:
    """As devices do that hold parts of a row: the first k of both, by key and place, are those
    of the whole row.
    """
    parts, k = parts_of(2, 2, 4, (400, 400), "spread"), 30
    want = np.asarray(
        jax.jit(partial(ops.top_k_grouped, k=k, implementation="xla"), static_argnums=1)(
            parts, group_reduce
        )[0]
    )
    sums = [
        jax.nn.logsumexp(jnp.where(ok, scores, -jnp.inf), -1, keepdims=True)
        for scores, ok in parts
    ]
    total = jnp.logaddexp(*sums) if group_reduce == "mean_softmax" else None
    how = {
        "total": total,
        "ranked": True,
        "config": top_k.Config(blocks=abs(blocks), cluster=int(blocks > 0)),
    }
    run = jax.jit(partial(top_k_grouped.top_k_grouped, group_reduce=group_reduce, k=k, **how))
    reference = jax.jit(
        partial(rank_grouped, group_reduce=group_reduce, k=k, total=total, implementation="xla")
    )
    of_kernel, of_reference = ([f([part]) for part in parts] for f in (run, reference))
    for found in (of_kernel, [(*best, keys) for best, keys in of_reference]):
        keys = np.concatenate([x[2] for x in found], axis=-1)
        places = np.concatenate([x[0] + 400 * i for i, x in enumerate(found)], axis=-1)
        assert keys.dtype == np.uint32
        np.testing.assert_array_equal(keys > 0, np.concatenate([x[1] for x in found], axis=-1))
        order = np.lexsort((places, -keys.astype(np.int64)))[..., :k]
        np.testing.assert_array_equal(np.take_along_axis(places, order, axis=-1), want)
