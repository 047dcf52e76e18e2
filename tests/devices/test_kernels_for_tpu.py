"""A program for several TPUs has a kernel only where each device runs its own part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax import ops
from kvjax.numerics import platforms
from kvjax.numerics.partial import Logits
from kvjax.numerics.quant import OneBit


def score(q: jax.Array, keys: OneBit) -> jax.Array:
    return ops.score_1bit(q, keys, logits=Logits(0.1))


def lowered(run, split: NamedSharding) -> str:
    """The program for TPUs of `run`, whose operands are split."""

    def array(*shape: int, dtype: type = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=split)

    bits, groups = array(1, 2, 4096, 16, dtype=jnp.uint8), array(1, 2, 128, 128)
    shapes = array(1, 2, 4, 128), OneBit(bits, groups, groups)
    return jax.jit(run).trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()


def test_arrays_split_without_a_placement_have_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platforms, "reaches_tpus", lambda: True)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("heads", "other"))
    split = NamedSharding(mesh, PartitionSpec(None, "heads"))

    def by_head(**axes: set[str]):
        parts = split.spec
        return jax.shard_map(
            score, mesh=mesh, in_specs=parts, out_specs=parts, check_vma=False, **axes
        )

    assert "tpu_custom_call" in lowered(by_head(), split)
    assert "tpu_custom_call" not in lowered(score, split)
    assert "tpu_custom_call" not in lowered(by_head(axis_names={"heads"}), split)
