"""Every operation says which arguments its kernel refuses, and why; none is run that the kernel
cannot take.
"""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from kvjax import ops
from kvjax.kernels_pallas.attend import attend_slots, attend_span, attend_zones
from kvjax.kernels_pallas.select import select_1bit, select_4bit
from kvjax.kernels_pallas.vote import collide
from kvjax.numerics.partial import Span
from kvjax.numerics.selection import Selection
from kvjax.ops.op import _too_large
from tests.kernels.cases import (
    CASES,
    candidates,
    codes,
    i32,
    one_bit,
    quantized_zones,
    slots,
    span,
    votes,
    zones,
)
from tests.kernels.conftest import HAS_KERNELS

REFUSED = [
    pytest.param(name, sizes, words, id=f"{name}-{'-'.join(sizes)}-{i}")
    for name, case in CASES.items()
    for i, (sizes, words) in enumerate(case.refused)
]


def test_every_operation_has_its_cases():
    assert CASES.keys() == ops.OPS.keys(), (
        "an operation needs an entry in tests/kernels/cases.py"
    )
    assert all(case.refused for case in CASES.values())


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_takes_the_arguments_of_its_case(name):
    assert limit_of(name, *CASES[name].args()) is None


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("less", [0, 1])
def test_an_array_that_offsets_of_32_bits_cannot_address_is_refused(name, less):
    """Of 2**31 bytes a row and head, whichever argument it is; one unit less is not."""
    args, large = CASES[name].args()[0], 0
    leaves, tree = jax.tree.flatten(args)
    for i, leaf in enumerate(leaves):
        if getattr(leaf, "ndim", 0) < 2:
            continue
        axis = 2 if leaf.ndim > 2 else 1
        unit = math.prod(leaf.shape[axis + 1 :]) * leaf.dtype.itemsize
        shape = (*leaf.shape[:axis], 2**31 // unit - less, *leaf.shape[axis + 1 :])
        given = [
            jax.ShapeDtypeStruct(shape, leaf.dtype) if i == j else a
            for j, a in enumerate(leaves)
        ]
        told = _too_large(jax.tree.unflatten(tree, given))
        assert ("2**31 bytes or more a row and head" in (told or "")) == (
            not less and unit * shape[axis] == 2**31
        )
        large += 1
    assert large
    assert _too_large(args) is None


def limit_of(name, args, options):
    """The limit that the operation names for these shapes."""
    found = []
    run(lambda *args: found.append(ops.OPS[name].unsupported(*args, **options)), args)
    return found[0]


def run(f, args):
    """eval_shape of f(*args), whose arguments may be more than arrays."""
    leaves, tree = jax.tree.flatten(args)
    arrays = {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")}
    return jax.eval_shape(
        lambda arrays: f(
            *jax.tree.unflatten(tree, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
        ),
        arrays,
    )


@pytest.mark.parametrize(("name", "sizes", "words"), REFUSED)
def test_a_kernel_refuses_what_exceeds_its_limits(name, sizes, words):
    args, options = CASES[name].args(**sizes)
    op = ops.OPS[name]
    assert re.search(words, limit_of(name, args, options) or "")
    with pytest.raises(NotImplementedError, match=words if HAS_KERNELS else r"jax >= 0\.11"):
        run(partial(op, **options, implementation="mosaic"), args)

    with pytest.raises(NotImplementedError, match=words):
        run(partial(op.run_kernel, **options), args)


@pytest.mark.parametrize(
    ("kernel", "case", "config"),
    [
        (attend_slots.attend_slots, slots(), attend_slots.Config(warpgroups=4)),
        (attend_span.attend_span, span(), attend_span.Config(1, warpgroups=4, stages=8)),
        (collide.collide, votes(), collide.Config(stages=9)),
    ],
)
def test_a_config_that_shared_memory_cannot_hold_is_refused(kernel, case, config):
    args, options = case
    args = [x for a in args for x in (a if isinstance(a, (Selection, Span)) else (a,))]
    options = {"scale": options["logits"].scale} if "logits" in options else {}
    with pytest.raises(NotImplementedError, match="bytes of shared memory"):
        run(partial(kernel, **options, config=config), args)


def test_attention_over_zones_refuses_a_config_that_shared_memory_cannot_hold():
    (q, k, v, selection, recent, sink, local), options = zones()
    run_zones = partial(
        attend_zones.attend_zones,
        local=local,
        scale=options["logits"].scale,
        config=attend_slots.Config(warpgroups=4),
    )
    with pytest.raises(NotImplementedError, match="bytes of shared memory"):
        run(run_zones, (q, k, v, *selection, recent, sink))


def test_attention_over_codes_refuses_a_sink_beside_the_recent_zone():
    args, options = quantized_zones(sink=True)
    limit = "the kernel attend_quantized takes one exact zone; got a sink beside the recent one"
    assert limit_of("attend_quantized_zones", args, options) == limit


def test_kernels_refuse_what_their_operations_cannot_ask_for():
    (q, keys), _ = one_bit()
    pending = jax.ShapeDtypeStruct((1, 2, 4, 7), jnp.bfloat16)
    assert "scores of pending tokens in f32" in select_1bit.unsupported(
        q, keys.bits, keys.scale, pending, "mean_softmax", 9
    )
    (q, keys, listed), _ = codes()
    late = candidates().pending[0]
    assert "1 to 16 pending keys" in select_4bit.unsupported(
        q, *keys, listed.slots, late, 9, 17
    )
    args, _ = votes(T=16)
    assert "1 to 15 limits for D=128" in collide.unsupported(*args)
    with pytest.raises(NotImplementedError, match="1 to 15 limits for D=128"):
        run(collide.collide, args)
    with pytest.raises(ValueError, match="more than 255"):
        limit_of("collide", args, {})
    (q, keys), _ = one_bit()
    late = jax.ShapeDtypeStruct((1, 2, 16, 64), jnp.float16)

    def select(q, keys, late, n):
        span, pending = (n, n), (late, n, n)
        return select_1bit.select_1bit(
            q, *keys, span, pending, n, "mean_softmax", 9, scale=1.0, pending_slots=16
        )

    with pytest.raises(
        NotImplementedError, match="keys in the dtype of the steps, bfloat16; got float16"
    ):
        run(select, (q, keys, late, i32(1)))
