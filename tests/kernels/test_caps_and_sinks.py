"""Soft caps and sink logits in the kernels that attend to keys and values, against the
references.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ops
from kvjax.numerics.partial import Logits, Span
from tests.kernels.inputs import normal, relative
from tests.kernels.test_attend_slots import attended
from tests.kernels.test_attend_zones import zones_of

pytestmark = pytest.mark.usefixtures("kernels")

K, G = 2, 3
SINKS = jnp.linspace(-2.0, 6.0, K * G).reshape(K, G)
CAPPED, PLAIN = Logits(0.4, 1.5), Logits(0.125)  # most logits are above the cap before it


def span(steps=1):
    """Rows of which one is empty; with several steps, of a span each."""
    stop = np.array([[70, 71, 73], [0, 1, 5]], np.int32)[:, :steps]
    k, v = (normal(seed, 2, K, 96, 64, dtype=jnp.bfloat16) for seed in (1, 2))
    start, stop = (
        jnp.asarray(a[:, 0] if steps == 1 else a) for a in (np.minimum(stop, 3), stop)
    )
    return normal(0, 2, K, steps * G, 64, dtype=jnp.bfloat16), Span(k, v, start, stop)


def zones():
    return zones_of(4, K, G, 1, 90, 40, 5, 64, 60, 33, jnp.bfloat16)


CASES = {
    "span": (ops.attend_span, span, {}, True),
    "span of each step": (ops.attend_span, partial(span, 3), {}, True),
    "zones": (ops.attend_zones, zones, {"local": 33}, True),
    "slots": (
        ops.attend_slots,
        lambda: attended(2, K, G, 1, 90, 64, 40, jnp.bfloat16, [40, 0]),
        {},
        False,
    ),
}


@pytest.mark.parametrize(
    ("name", "logits"), [*((name, CAPPED) for name in CASES), ("span", PLAIN), ("zones", PLAIN)]
)
def test_kernels_cap_logits_and_merge_sinks_as_the_references(name, logits):
    op, make, settings, takes_sinks = CASES[name]
    args, sinks = make(), {"sinks": SINKS} if takes_sinks else {}
    run = [
        jax.jit(
            partial(
                op.run_kernel if kernel else partial(op, implementation="xla"),
                logits=logits,
                **settings,
            )
        )
        for kernel in (True, False)
    ]
    got, want = (jax.tree.leaves(f(*args, **sinks)) for f in run)
    for a, b in zip(got, want, strict=True):
        a, b = (
            np.where(np.isfinite(x), x, 0) for x in (np.asarray(y, np.float32) for y in (a, b))
        )
        # Weights are rounded to the dtype of the values, and so is the result.
        assert relative(a, b) < 2 * float(jnp.finfo(jnp.bfloat16).eps)
