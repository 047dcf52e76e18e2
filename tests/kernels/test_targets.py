"""What the kernels are on each GPU that they are built for: forms, block sizes, and what is
said of them.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import CacheSpec, ops, presets
from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.attend import attend_key_blocks, attend_zones
from kvjax.kernels_pallas.delta import delta_rule
from kvjax.kernels_pallas.host import hot_float8
from kvjax.kernels_pallas.select import select_1bit, tiling, top_k
from kvjax.kernels_pallas.simt import mosaic
from kvjax.numerics.partial import Logits
from kvjax.policies.policy import Step
from tests.kernels.conftest import HAS_KERNELS, ON_GPU
from tests.kernels.inputs import index, normal, relative
from tests.kernels.simulate import Simulator
from tests.kernels.test_aot import PROGRAMS
from tests.kernels.test_hot_pages import same_pages, to_host

TARGETS = {capability: simt.stands_for(capability) for capability in simt.ARCHITECTURES}
SMALLEST = "8.0", "8.9"  # the forms: no clusters, and no clusters with 99 KB


@dataclass(frozen=True)
class Device:
    device_kind: str
    compute_capability: str
    core_count: int
    platform: str = "gpu"


class Noted:
    """A backend that runs nothing: it keeps the launches, and its results are zeros."""

    def __init__(self):
        self.launches = []

    def run(self, program, launch, out_type, args):
        self.launches.append(launch)
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), out_type)

    def run_in_place(self, program, launch, changed, args):
        self.launches.append(launch)
        return tuple(changed)


def launches_of(name, target):
    f, args, *_ = PROGRAMS[name]
    noted, leaves = Noted(), jax.tree.leaves(args)
    plain = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in leaves]
    with simt.use(noted), simt.build_for(target):
        jax.eval_shape(
            lambda *given: f(*jax.tree.unflatten(jax.tree.structure(args), given)), *plain
        )
    return noted.launches


def shared_bytes(launch):
    """Each array of shared memory begins at a multiple of 1024 bytes."""
    return sum(-(-4 * words // 1024) * 1024 for words in launch.scratch)


@pytest.mark.parametrize("capability", TARGETS)
def test_a_kernel_takes_no_more_than_its_gpu_has(capability):
    target = TARGETS[capability]
    for name in PROGRAMS:
        config = getattr(PROGRAMS[name][0], "keywords", {}).get("config")
        if getattr(config, "cluster", 0) and not target.clusters:
            with pytest.raises(NotImplementedError, match=f"{target.kind} has no clusters"):
                launches_of(name, target)
            continue
        wgmma = name.startswith(
            "attend_key_blocks"
        )  # in Pallas's own operations, so no launch is noted
        if wgmma and capability != "9.0":
            with pytest.raises(NotImplementedError, match="needs wgmma"):
                launches_of(name, target)
            continue
        if wgmma:
            _, keys, *_ = PROGRAMS[name][1]
            assert (
                attend_key_blocks.smem_bytes(
                    keys.shape[-1], config or attend_key_blocks.Config()
                )
                <= target.smem
            )
            continue
        delta = name.startswith("delta_rule")
        if delta and delta_rule.smem_bytes() > target.smem:  # plain JAX runs there
            with pytest.raises(NotImplementedError, match="bytes of shared memory"):
                launches_of(name, target)
            continue
        found = launches_of(name, target)
        assert found, name
        for launch in found:
            assert shared_bytes(launch) <= target.smem, f"{name}: {launch}"
            assert (launch.cluster or 1) == 1 or target.clusters, f"{name}: {launch}"


@pytest.mark.parametrize("capability", ["8.0", "8.6", "10.0", "12.0"])
def test_block_sizes_follow_the_multiprocessors(capability):
    few, many = (dataclasses.replace(TARGETS[capability], multiprocessors=n) for n in (20, 200))
    for name in ("attend_span", "collide, a head", "score_1bit", "attend_quantized, LogQuant"):
        blocks = [launches_of(name, target)[0].blocks for target in (few, many)]
        assert blocks[0] < blocks[1], f"{name}: {blocks} blocks"


def test_a_row_has_several_blocks_without_clusters():
    for capability, target in TARGETS.items():
        config = tiling.config_for(8, 131072, target)
        assert config.cluster == target.clusters
        assert config.blocks > 1
        assert 8 * config.blocks > target.multiprocessors * 0.4, capability
        assert tiling.config_for(8, 8192, target).parted is False


@pytest.mark.parametrize(
    ("devices", "wanted"),
    [
        ([Device("NVIDIA L4", "8.9", 58)], ("8.9", 58, 99 * 1024, False, False)),
        ([Device("NVIDIA H200", "9.0", 132)], ("9.0", 132, 227 * 1024, True, True)),
        ([Device("NVIDIA H200 NVL", "9.0", 132)], ("9.0", 132, 227 * 1024, True, False)),
        ([Device("NVIDIA RTX A6000", "8.6", 84)], ("8.6", 84, 99 * 1024, False, False)),
        (
            [Device("NVIDIA H200", "9.0", 132), Device("NVIDIA L4", "8.9", 58)],
            ("9.0", 132, 227 * 1024, True, True),
        ),
    ],
)
def test_the_target_is_the_gpu_of_the_process(monkeypatch, devices, wanted):
    monkeypatch.setattr(jax, "devices", lambda: devices)
    found = simt.target()
    assert (
        found.capability,
        found.multiprocessors,
        found.smem,
        found.clusters,
        found.measured,
    ) == wanted


def test_a_program_compiled_ahead_of_time_takes_the_card_of_its_mesh(monkeypatch):
    from jax._src.mesh import AbstractDevice  # no public name

    device = AbstractDevice("NVIDIA A10", num_cores=72, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert simt.target() == simt.card("NVIDIA A10")


@pytest.fixture
def fresh():
    mosaic.why_not.cache_clear()
    yield
    mosaic.why_not.cache_clear()


@pytest.mark.skipif(not HAS_KERNELS, reason="there are kernels from jax 0.11 on")
@pytest.mark.parametrize(
    ("kind", "capability", "why"),
    [
        *((target.kind, capability, None) for capability, target in TARGETS.items()),
        (
            "NVIDIA V100",
            "7.0",
            "capability 8.0, 8.6, .*12.0; .* V100 of compute capability 7.0",
        ),
        (
            "AMD Instinct MI300X",
            "gfx942",
            "for NVIDIA GPUs .* MI300X of compute capability gfx942",
        ),
    ],
)
def test_kernels_are_built_for_the_gpus_that_they_compile_for(
    monkeypatch, fresh, kind, capability, why
):
    monkeypatch.setattr(jax, "devices", lambda: [Device(kind, capability, 100)])
    if why is None:
        assert simt.why_not() is None
    else:
        with pytest.raises(AssertionError, match=why):
            raise AssertionError(simt.why_not())


@pytest.mark.parametrize("value", ["off", "on", "none"])
def test_an_environment_variable_turns_kernels_off(monkeypatch, fresh, value):
    monkeypatch.setenv("KVJAX_KERNELS", value)
    if value == "none":
        with pytest.raises(ValueError, match="KVJAX_KERNELS must be 'on' or 'off'; got 'none'"):
            simt.why_not()
    else:
        assert ("is 'off'" in str(simt.why_not())) == (value == "off")


@pytest.mark.skipif(not HAS_KERNELS, reason="there are kernels from jax 0.11 on")
@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA L4"])
def test_explain_says_whether_a_kernel_was_measured_on_this_gpu(monkeypatch, kind):
    card = simt.card(kind)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(
        jax, "devices", lambda: [Device(kind, card.capability, card.multiprocessors)]
    )
    how = ops.explain("top_k", jnp.zeros((1, 50)), jnp.ones((1, 50), bool), 5)
    assert how.implementation == "mosaic"
    assert how.measured == card.measured
    if card.measured:
        assert str(how) == "mosaic"
        assert how.reason == "measured on this GPU, NVIDIA H200"
    else:
        assert str(how) == "mosaic: compiled and simulated, not measured on this GPU, NVIDIA L4"


# ------------------------------------------------------------------------- results in the forms of each GPU, simulated


@pytest.fixture
def simulated():
    if ON_GPU:
        yield
    else:
        with simt.use(Simulator()):
            yield


SAMPLE = [pytest.param(x, marks=[pytest.mark.thorough] * (x != "8.9")) for x in TARGETS]


@pytest.mark.parametrize("capability", SAMPLE)
def test_a_long_row_is_selected_alike_on_each_gpu(capability, simulated):
    """`select_1bit` and `top_k` over more units than a block's registers hold."""
    S, room = 20544, 40
    q, ix = normal(1, 1, 1, 2, 64), index(1, 1, S, 64, 64, jnp.bfloat16)
    late = normal(2, 1, 1, 2, 8), 0, 8
    scores = normal(3, 2, S)
    with simt.build_for(TARGETS[capability]):
        slots, found = select_1bit.select_1bit(
            q, *ix, (3, S - 5), late, room, "mean_softmax", room, scale=0.1
        )
        best, _ = top_k.top_k(scores, jnp.ones((2, S), bool), room)
    want, many = select_1bit.select_1bit(
        q,
        *ix,
        (3, S - 5),
        late,
        room,
        "mean_softmax",
        room,
        scale=0.1,
        config=select_1bit.Config(blocks=8),
    )
    assert int(found[0, 0, 0]) == int(many[0, 0, 0]) == room
    np.testing.assert_array_equal(np.sort(slots), np.sort(want))
    assert slots[0, 0, 0, -1] == want[0, 0, 0, -1]  # the one of lowest rank comes last
    np.testing.assert_array_equal(best, jax.lax.top_k(scores, room)[1])


@pytest.mark.parametrize("capability", SAMPLE)
def test_zones_are_attended_alike_on_each_gpu(capability, simulated):
    B, K, T, G, S, R, D, M = 1, 2, 2, 2, 300, 20, 64, 260
    q, *kv = (
        normal(i, B, K, n, D, dtype=jnp.bfloat16) for i, n in enumerate((T * G, S, S, R, R))
    )
    rng = np.random.default_rng(1)
    slots = jnp.asarray(
        np.stack([rng.permutation(S)[:M] for _ in range(K * T)]).reshape(B, K, T, M), jnp.int32
    )
    recent = *kv[2:], jnp.zeros((B, T), jnp.int32), jnp.full((B, T), R, jnp.int32)
    run = partial(
        attend_zones.attend_zones,
        q,
        *kv[:2],
        slots,
        jnp.full((B, K, T), M),
        recent,
        None,
        7,
        scale=0.1,
    )
    with simt.build_for(TARGETS[capability]):
        got = run()
    assert relative(got, run()) < 3e-3


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_bytes_are_read_as_8_bit_floats_without_the_instruction(dtype, simulated):
    codes = np.random.default_rng(3).permutation(np.arange(1 * 2 * 40 * 2 * 64) % 256)
    x = to_host(jnp.asarray(codes.reshape(1, 2, 40, 2, 1, 64), jnp.uint8))
    with simt.build_for(TARGETS["8.0"]):
        same_pages(jax.jit(hot_float8.hot_load_float8), ops.hot_load_float8, x, dtype, 12, 9)


@pytest.mark.thorough
@pytest.mark.skipif(ON_GPU, reason="of the simulator")
@pytest.mark.parametrize("capability", SMALLEST)
@pytest.mark.parametrize(
    "preset", ["full", "fier:budget=384", "quest:budget=384", "pariskv:budget=384", "logquant"]
)
def test_a_step_is_that_of_the_references_on_each_gpu(
    capability, preset, simulated, monkeypatch
):
    monkeypatch.setattr(simt, "why_not", lambda: None)
    monkeypatch.setattr(
        jax.lax, "platform_dependent", lambda *args, cuda, **others: cuda(*args)
    )
    spec = CacheSpec(
        batch=1, q_heads=4, kv_heads=2, head_dim=64, capacity=768, dtype=jnp.bfloat16
    )
    policy = presets.parse(preset).rest
    k, v = (normal(i, 1, 2, 700, 64, dtype=jnp.bfloat16) for i in range(2))
    q = normal(2, 1, 2, 2, 64, dtype=jnp.bfloat16)
    with ops.use("xla"):
        st = policy.prefill(policy.init(spec), k, v, jnp.array([700]))
        want = policy.attend(st, q, Step(Logits(0.1)))[0]
    with simt.build_for(TARGETS[capability]):
        got = policy.attend(st, q, Step(Logits(0.1)))[0]
    assert relative(got, want) < 2e-2
