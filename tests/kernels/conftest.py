"""Where the kernels run: on a Hopper GPU if there is one, else in the simulator."""

from collections.abc import Iterator

import jax
import pytest
from kvjax.kernels_pallas import (
    _common,
    attend_quantized,
    attend_slots,
    attend_zones,
    collide,
    host_append,
    host_rows,
    most_voted,
    pick_1bit,
    rerank,
    score_1bit,
    score_pages,
    top_k,
    top_k_pooled,
)

from tests.kernels.simulate import simulated

KERNELS = {
    kernel.__name__.rpartition(".")[2]: kernel
    for kernel in (
        attend_quantized,
        attend_slots,
        attend_zones,
        collide,
        host_append,
        host_rows,
        most_voted,
        pick_1bit,
        rerank,
        score_1bit,
        score_pages,
        top_k,
        top_k_pooled,
    )
}
HAS_KERNELS = jax.__version_info__ >= (0, 11)
ON_GPU = HAS_KERNELS and jax.default_backend() == "gpu" and _common.why_not() is None

on_gpu = pytest.mark.skipif(not ON_GPU, reason="a size for a GPU of compute capability 9.0, with jax >= 0.11")


@pytest.fixture
def kernels() -> Iterator[None]:
    """The test's kernels run, on a GPU or simulated."""
    if ON_GPU:
        yield
    else:
        with simulated(*KERNELS.values()):
            yield
