"""The kernel attend_coded_zones against the reference, which attends to codes that it gathers
and decodes.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ops
from kvjax.kernels_pallas.attend import attend_slots
from kvjax.kernels_pallas.attend.directions import exactly
from kvjax.numerics.partial import Logits
from kvjax.numerics.rotate import lloyd_max
from kvjax.stores import TurboQuant
from tests.kernels.conftest import on_gpu
from tests.kernels.inputs import normal, relative
from tests.kernels.test_attend_zones import zones_of

pytestmark = pytest.mark.usefixtures("kernels")
BF16 = float(jnp.finfo(jnp.bfloat16).eps)


def coded_of(B, K, G, H, S, R, A, D, M, local, dtype, bits=(4, 4), *, counts=None, offset=2.0):
    """The arguments of a step whose history has codes, and those by name."""
    q, k, v, selection, *spans = zones_of(B, K, G, H, S, R, A, D, M, local, dtype, counts)
    middle = offset * normal(9, B, K, D)
    k = k.astype(jnp.float32) * (0.5 + np.arange(S, dtype=np.float32) % 3)[None, None, :, None]
    codes = jax.jit(TurboQuant(bits=bits[0], value_bits=bits[1], seed=3).codes)(
        k, v.astype(jnp.float32)
    )
    return (q, *codes, middle, selection, *spans), {"local": local, "seed": 3}


def both(args, how, config=None, **more):
    """The kernel's result and the reference's, of q in f32."""
    how = {"logits": Logits(0.125), **how, **more}
    op = ops.attend_coded_zones

    def run(*args):
        if config is None:
            return op.run_kernel(*args, **how)
        with pytest.MonkeyPatch.context() as m:
            m.setattr(attend_slots, "config_for", lambda *_: config)
            m.setattr("kvjax.kernels_pallas.attend.attend_zones.config_for", lambda *_: config)
            return op.run_kernel(*args, **how)

    reference = jax.jit(partial(op, implementation="xla", **how))
    return jax.jit(run)(*args), reference(args[0].astype(jnp.float32), *args[1:])


@pytest.mark.parametrize(
    ("B", "K", "G", "H", "S", "R", "A", "D", "M", "local", "dtype", "bits", "config"),
    [
        (4, 1, 4, 1, 90, 40, 5, 64, 60, 33, jnp.bfloat16, (4, 4), attend_slots.Config(2, 1)),
        (
            2,
            1,
            5,
            1,
            300,
            70,
            0,
            128,
            290,
            1,
            jnp.float16,
            (4, 3),
            attend_slots.Config(1, 1),
        ),  # a loop, no sink
        (4, 1, 12, 1, 90, 40, 5, 128, 40, 33, jnp.bfloat16, (2, 8), attend_slots.Config(1, 1)),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (
                    4,
                    2,
                    4,
                    4,
                    50,
                    20,
                    1,
                    64,
                    33,
                    7,
                    jnp.bfloat16,
                    (8, 4),
                    None,
                ),  # a choice for each head
                (
                    1,
                    1,
                    2,
                    1,
                    2000,
                    256,
                    4,
                    128,
                    1788,
                    256,
                    jnp.bfloat16,
                    (4, 4),
                    attend_slots.Config(8, 2),
                ),
                (
                    1,
                    1,
                    4,
                    1,
                    64,
                    31,
                    0,
                    64,
                    0,
                    16,
                    jnp.bfloat16,
                    (4, 4),
                    None,
                ),  # nothing is chosen
                (4, 1, 18, 2, 60, 20, 4, 64, 33, 7, jnp.bfloat16, (3, 2), None),
            )
        ),
        *(
            pytest.param(
                4, 3, G, 1, 5000, 300, 4, D, 1000, 200, jnp.bfloat16, bits, None, marks=on_gpu
            )
            for G, D, bits in (
                (1, 128, (4, 4)),
                (3, 64, (3, 3)),
                (8, 128, (2, 2)),
                (16, 128, (8, 4)),
                (4, 64, (8, 8)),
            )
        ),
        *(
            pytest.param(
                1,
                8,
                4,
                1,
                131072,
                256,
                0,
                128,
                2047,
                1,
                jnp.bfloat16,
                (4, 4),
                attend_slots.Config(b, w),
                marks=on_gpu,
            )
            for b in (1, 2, 4, 8)
            for w in (1, 2)
        ),
        pytest.param(
            8, 8, 4, 1, 32768, 512, 4, 128, 1788, 256, jnp.bfloat16, (4, 4), None, marks=on_gpu
        ),
    ],
)
def test_attention_over_codes_equals_the_reference(
    B, K, G, H, S, R, A, D, M, local, dtype, bits, config
):
    got, want = both(*coded_of(B, K, G, H, S, R, A, D, M, local, dtype, bits), config)
    assert got.dtype == dtype
    # Queries, weights and results are rounded to bf16.
    assert relative(got, want) < 1.5 * BF16
    if B == 4:
        assert not np.asarray(got[3], np.float32).any(), "attention over nothing is zero"


def test_part_has_its_log_sum_and_a_cap_counts_after_the_offset():
    args, how = coded_of(4, 2, 3, 1, 90, 40, 5, 64, 60, 33, jnp.bfloat16)
    for logits in (Logits(0.125), Logits(0.4, 1.5)):
        got, want = both(args, how, attend_slots.Config(2, 1), part=True, logits=logits)
        assert relative(got[0], want.out) < 1.5 * BF16
        np.testing.assert_allclose(got[1], want.lse, atol=2e-2)
        sinks = jnp.linspace(-2.0, 6.0, 6).reshape(2, 3)
        got, want = both(args, how, attend_slots.Config(2, 1), logits=logits, sinks=sinks)
        assert relative(got, want) < 2 * BF16


def test_attention_over_codes_reads_nothing_that_is_not_attended_to():
    args, how = coded_of(4, 1, 2, 1, 60, 30, 4, 64, 40, 9, jnp.bfloat16, counts=[30, 20, 0, 0])
    q, k, v, offset, selection, *spans = args
    run = jax.jit(partial(ops.attend_coded_zones.run_kernel, logits=Logits(0.125), **how))
    want = run(*args)
    chosen = np.zeros((4, 1, 60), bool)
    slots, valid = (np.asarray(a)[:, 0, 0] for a in selection)
    for b in range(4):
        chosen[b, 0, slots[b][valid[b] & (slots[b] < 60)]] = True

    def poison(code):
        return code._replace(
            weights=jnp.where(jnp.asarray(chosen)[..., None], code.weights, 0x7E00).astype(
                jnp.uint16
            )
        )

    np.testing.assert_array_equal(run(q, poison(k), poison(v), offset, selection, *spans), want)
    over = jax.jit(
        jax.vmap(
            partial(ops.attend_coded_zones.run_kernel, logits=Logits(0.125), **how),
            in_axes=(0, *6 * [None]),
        )
    )(jnp.stack([q, -q]), k, v, offset, selection, *spans)
    np.testing.assert_array_equal(over[0], want)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("D", [64, 128])
def test_sizes_are_exact_up_to_a_factor(D, bits):
    centres = lloyd_max(D, 2 ** (bits - 1))[1]
    step, table = exactly(tuple(map(float, centres)))
    sizes = np.asarray(table, np.uint16).view(jnp.bfloat16).astype(np.float64) * step
    np.testing.assert_allclose(sizes, centres, rtol=1.2e-3)
