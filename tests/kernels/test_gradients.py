"""Gradients of prompts, chunks and scans of steps with the kernels in place, as a GPU selects
them.

A kernel has no derivative of its own. This is the law of gradients, with every kernel that
takes a policy's shapes simulated: its outputs are the kernel's, its derivative the reference's,
and a derivative that does not exist is refused with an explanation, never by an error of JAX.
"""

import dataclasses
import types
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import ops, testing
from kvjax.cli.options import implementations
from kvjax.kernels_pallas import simt
from kvjax.numerics.partial import Logits
from kvjax.ops import op
from tests.kernels import test_delta_rule, test_delta_step
from tests.kernels.conftest import ON_GPU
from tests.kernels.simulate import Simulator
from tests.laws.cases import CASES

pytestmark = pytest.mark.skipif(ON_GPU, reason="there the laws themselves run on kernels")
LAW = "gradients_are_those_of_attention"
OF_SCALE = (" at scale, ", ", heads of ")  # other shapes of policies that are there already


class Counting(Simulator):
    def __init__(self):
        super().__init__()
        self.ran = Counter()

    def run(self, program, launch, out_type, args, in_place=False):
        self.ran[launch.name] += 1
        return super().run(program, launch, out_type, args, in_place)


@pytest.fixture
def kernels(monkeypatch):
    """Every kernel that takes its arguments is used, by default as by name."""
    choice = types.SimpleNamespace(**vars(jax.lax))
    choice.platform_dependent = lambda *operands, cuda, **others: cuda(*operands)
    monkeypatch.setattr(op, "lax", choice)
    monkeypatch.setattr(op, "_unmeasured", lambda kernel: None)
    monkeypatch.setattr(simt, "why_not", lambda: None)
    simulator = Counting()
    with simt.use(simulator):
        yield simulator


@pytest.mark.parametrize(
    ("case", "implementation"),
    [
        ("full", "mosaic"),
        *(
            pytest.param(case, None, marks=pytest.mark.thorough)
            for case in CASES
            if not any(words in case for words in OF_SCALE)
        ),
    ],
)
def test_gradients_with_kernels_are_those_of_attention(kernels, case, implementation):
    spec = CASES[case].spec
    heads = spec.kv_heads * min(spec.group, 2)
    spec = dataclasses.replace(
        spec, batch=2, q_heads=heads, head_dim=64, capacity=160, dtype=jnp.bfloat16
    )
    with ops.use(implementation):
        testing.check_policy(CASES[case].policy, spec, laws=[LAW]).raise_for_failures()
    policy = kvjax.PerLayer((), CASES[case].policy)
    steps_have_some = bool(implementations(policy, spec, Logits(spec.head_dim**-0.5)))
    assert (
        kernels.ran or not steps_have_some
    )  # evictors select from a prompt by one, and attend without any


def stepped(inputs, args, implementation):
    """The outputs of a step of a gated delta net, by queries, keys and values before it."""
    args = list(args)
    args[5] = inputs
    out, *_ = ops.delta_step(*args, implementation=implementation)
    return out


def read(queries, args, implementation):
    """The outputs of a prompt of a gated delta net."""
    out, _ = ops.delta_rule(
        queries, *args[1:], dtype=jnp.bfloat16, implementation=implementation
    )
    return out


@pytest.mark.parametrize(
    ("f", "args", "along"),
    [
        (stepped, partial(test_delta_step.step_of, 1, 1, 1, 64, 32, jnp.float32), 5),
        (read, partial(test_delta_rule.prompt_of, 1, 20, 1, 1), 0),
    ],
    ids=["delta_step", "delta_rule"],
)
def test_derivatives_of_delta_nets_are_those_of_the_references(kernels, f, args, along):
    args = list(args())
    given = np.asarray(args[along])
    tangent = np.ones_like(given)

    def derived(how):  # as one program: each operation of JAX would be one
        return jax.jit(partial(jax.jvp, partial(f, args=args, implementation=how)))

    (out, moved), (want, wanted) = (
        derived(how)((given,), (tangent,)) for how in ("mosaic", "xla")
    )
    assert kernels.ran
    np.testing.assert_allclose(out, want, atol=1e-2 * np.abs(want).max())
    np.testing.assert_allclose(moved, wanted, atol=1e-6 * np.abs(wanted).max())
    slopes = jax.jit(jax.grad(lambda x: f(x, args, "mosaic").sum()))(given)
    assert np.abs(slopes).max() > 0
