"""The kernel select_4bit against the reference, on random and on adversarial input."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ops
from kvjax.kernels_pallas.select import select_4bit
from kvjax.numerics.partial import Logits, attention_logits
from kvjax.numerics.rotate import encode, rotate, turned
from kvjax.numerics.selection import Candidates, PackedSelection
from tests.kernels.conftest import on_gpu
from tests.kernels.inputs import CENTRES, normal, spans_of

pytestmark = pytest.mark.usefixtures("kernels")


def reranked(B, K, G, S, D, M, R, dtype, kind):
    """Arguments of select_4bit but the room, with spans and counts of each row that are at the
    edges.
    """
    rng = np.random.default_rng(M)
    q, k = normal(1, B, K, G, D), normal(0, B, K, S, D)
    late = np.asarray(2 * normal(2, B, K, R, D)).astype(dtype)
    if kind == "equal":
        k, late = np.zeros_like(k), np.zeros_like(late)
    slots = jnp.asarray(
        np.sort(rng.permuted(np.tile(np.arange(S), (B, K, G, 1)), axis=-1)[..., :M]), jnp.int32
    )
    found = jnp.asarray(np.resize([M, M - 1, 0, 1, M], (B, K, G)), jnp.int32)
    start, stop = spans_of(B, (0, R), (0, 5), (3, R + 9), (2, R - 2), (5, 4), (-2, 3))
    if kind == "poison":  # past the spans
        slot = np.arange(R)[None, :]
        first, last = (np.asarray(end)[:, None] for end in (start, stop))
        outside = (slot < first) | (slot >= last - 3)
        late = np.where(outside[:, None, :, None], np.asarray(np.nan, dtype), late)
    # In one program, since a million rotated keys and what leads to them take 20 GB.
    return (
        q,
        jax.jit(lambda k: encode(rotate(k, 3)))(k),
        PackedSelection(slots, found),
        (late, start, stop),
    )


@pytest.mark.parametrize(
    ("B", "K", "G", "S", "D", "M", "R", "pending_slots", "room", "dtype", "config"),
    [
        (
            6,
            1,
            2,
            200,
            128,
            150,
            40,
            37,
            50,
            jnp.bfloat16,
            select_4bit.Config(blocks=1, unroll=1, warpgroups=1),
        ),
        (1, 2, 1, 90, 64, 33, 20, 20, 40, jnp.float16, select_4bit.Config(blocks=2, unroll=1)),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (
                    2,
                    1,
                    1,
                    5000,
                    128,
                    4200,
                    300,
                    259,
                    900,
                    jnp.bfloat16,
                    select_4bit.Config(blocks=1, unroll=1),
                ),
                (1, 1, 8, 64, 64, 64, 8, 3, 67, jnp.bfloat16, None),
            )
        ),
        *(
            pytest.param(*sizes, jnp.bfloat16, None, marks=on_gpu)
            for sizes in (
                *(
                    (1, 8, 1, 131072, 128, 13108, 383, 256, 1916),
                    (6, 2, 4, 33000, 128, 6000, 383, 255, 2047),
                ),
                *(
                    (1, 8, 1, 1 << 20, 128, 104858, 383, 256, 1916),
                    (8, 8, 8, 4096, 64, 2500, 129, 128, 500),
                ),
            )
        ),
    ],
)
def test_select_4bit_chooses_what_its_reference_does(
    B, K, G, S, D, M, R, pending_slots, room, dtype, config
):
    how = {"scale": D**-0.5, "pending_slots": pending_slots, "local": 3}

    def run(q, keys, *rest):
        mine = {"centres": CENTRES, "turned": turned(D, 3), "config": config}
        return select_4bit.select_4bit(q, *keys, *rest, room, **mine, **how)

    count = jnp.asarray(np.resize([room, 1, room + 9, 5, 0, room], B), jnp.int32)
    logits = Logits(how["scale"])
    reference = jax.jit(partial(ops.select_4bit, seed=3, logits=logits, implementation="xla"))

    @jax.jit
    def all_scores(q, keys, candidates, late):
        rotated = rotate(q, 3)
        estimates = ops.rerank(rotated, keys, candidates, logits=logits, implementation="xla")
        return estimates, attention_logits(q, late, logits)

    run = jax.jit(run)
    for kind in ("normal", "equal", "poison"):
        q, keys, candidates, pending = reranked(B, K, G, S, D, M, R, dtype, kind)
        args = q, keys, candidates, pending, count
        got = PackedSelection(*run(*args))
        among = Candidates(
            span=(0, S),
            pending=pending,
            k=count,
            k_max=room,
            pending_slots=pending_slots,
            local=3,
        )
        want = reference(q, keys, candidates, among)
        np.testing.assert_array_equal(got.found, want.found, err_msg=kind)
        scored = all_scores(q, keys, candidates, pending[0])
        estimates, exact = map(np.asarray, scored)
        for row in np.ndindex(B, K, G):
            scores = np.full(S + R, np.nan, np.float32)
            scores[np.asarray(candidates.slots)[row]] = estimates[row]
            scores[S:] = exact[row]
            ours, theirs = (
                np.asarray(p.slots)[row][: np.asarray(want.found)[row]] for p in (got, want)
            )
            assert np.unique(ours).size == ours.size
            if kind == "equal":
                assert set(ours) == set(theirs)
            ours, theirs = (np.sort(scores[slots]) for slots in (ours, theirs))
            np.testing.assert_allclose(
                ours, theirs, rtol=2**-10, atol=2**-13, err_msg=kind
            )  # of f16


@pytest.mark.thorough
def test_select_4bit_takes_vmap_and_numbers_for_all_rows():
    q, keys, candidates, (late, *_) = reranked(2, 1, 2, 80, 64, 60, 12, jnp.bfloat16, "normal")
    how = {"centres": CENTRES, "scale": 0.1, "turned": 6, "pending_slots": 12, "local": 1}

    def run(q, start=0, stop=11, count=9):
        config = select_4bit.Config(blocks=1, unroll=1)
        return select_4bit.select_4bit(
            q, *keys, candidates, (late, start, stop), count, 20, config=config, **how
        )

    many = jax.jit(jax.vmap(run))(jnp.stack([q, -q]))
    for i, one in enumerate((q, -q)):
        arrays = (jnp.full(2, n, jnp.int32) for n in (0, 11, 9))
        for got, want in zip(many, jax.jit(run)(one, *arrays), strict=True):
            np.testing.assert_array_equal(got[i], want)
