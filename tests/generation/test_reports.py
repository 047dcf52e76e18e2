"""Reports of a decode loop to the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.generation.reports import Packed, Report


@pytest.mark.parametrize("with_probabilities", [False, True])
def test_a_report_is_read_as_it_was_packed(with_probabilities):
    report = Report(
        tokens=jnp.array([[3, -1], [2**31 - 1, 0]]),
        count=jnp.int32(2),
        active=jnp.array([True, False]),
        bad=jnp.array([[False, True], [True, True]]),
        attended=jnp.array([np.nan, -0.0, 1e-45, np.inf], jnp.float32),
        counted=jnp.float32(7.5),
        draft_counts=np.arange(3, dtype=np.int32),
        log_probabilities=-jnp.ones((2, 2)) / 3 if with_probabilities else None,
    )
    packed = jax.jit(Packed.of)(report)
    assert len(jax.tree.leaves(packed)) == 1
    for got, want in zip(packed.read(), report.read(), strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            assert got.tobytes() == want.tobytes()  # NaN and -0 too
