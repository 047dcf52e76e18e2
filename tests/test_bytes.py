"""The bytes of a preset: of a token against its formula, and their place, on the device or on
the host.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, memory, models, presets
from kvjax.contrib.mikv import Mixed
from kvjax.generation.loops import LoopInputs, decode_loop
from kvjax.generation.prefilling import _prefill_chunk

D, K, VALUE = 128, 8, 2  # a layer of Llama 3.1 8B in bfloat16
SPEC = CacheSpec(batch=1, q_heads=32, kv_heads=K, head_dim=D, capacity=32768)
EXACT = 2 * D * VALUE  # bytes of a key and a value
ONE_BIT = D / 8 + 2 * 2 * D / 32  # signs, and scale and zero of 16 bits a channel and 32 tokens
PARIS = 6 * D / 8  # signs, sizes and weights of subspaces of 8
PAGE_16, PAGE_32 = (2 * D * VALUE / page for page in (16, 32))  # two corners


@dataclasses.dataclass(frozen=True)
class Cost:
    """Bytes of a stored token and kv head, from the descriptions of the methods."""

    make: Callable[[], kvjax.PerLayer]
    device: float
    host: float = 0.0


COSTS = {
    "full": Cost(presets.full, EXACT),
    "fier": Cost(presets.fier, EXACT + ONE_BIT),
    "fier, host": Cost(functools.partial(presets.fier, store="host"), ONE_BIT, EXACT),
    "fier, turbo4": Cost(
        functools.partial(presets.fier, store="turbo4"), 2 * (D * 4 / 8 + 2) + ONE_BIT
    ),
    "pariskv": Cost(presets.pariskv, EXACT + PARIS),
    "pariskv, host": Cost(functools.partial(presets.pariskv, store="host"), PARIS, EXACT),
    "quest": Cost(presets.quest, EXACT + PAGE_16),
    "freekv": Cost(presets.freekv, PAGE_32, EXACT),
    "arkvale": Cost(presets.arkvale, PAGE_32, EXACT),
    "pqcache": Cost(
        presets.pqcache, EXACT + 2 + 64 * D * VALUE / 1024
    ),  # two codes, and 64 centroids for 1024 tokens
    # Coefficients of 160 for all heads, a landmark and a number for 8 tokens, and values in
    # host memory.
    "shadowkv": Cost(presets.shadowkv, 160 * VALUE / K + D * VALUE / 8 + 4 / 8, D * VALUE),
    "mikv": Cost(presets.mikv, 2 * D * 2 / 8 + 2 * 4 * D / 32),
    "magicpig": Cost(
        presets.magicpig, EXACT + 10 * 160 / 8
    ),  # a bit for each of 10 signs in 160 tables
    # Codes of two bits, and 4 bytes of scale and zero for 42 tokens a channel and for 64
    # channels a token; or for 32.
    "logquant": Cost(presets.logquant, 2 * D * 2 / 8 + 4 * D / 42 + 4 * D / 64),
    "logquant, 4 bits by token": Cost(
        functools.partial(presets.logquant, bits=4, key_axis="token"),
        2 * D * 4 / 8 + 2 * 4 * D / 64,
    ),
    "kivi": Cost(presets.kivi, 2 * D * 2 / 8 + 2 * 4 * D / 32),
}


def held(policy: kvjax.Policy, spec: CacheSpec) -> memory.Bytes:
    """Bytes of a cache as `init` lays it out; nothing is allocated."""
    found = {"device": 0, "host": 0}
    for leaf in jax.tree.leaves(
        memory.shapes(functools.partial(kvjax.init_layer, policy, spec))
    ):
        found["host" if leaf.sharding.memory_kind == "pinned_host" else "device"] += (
            leaf.size * leaf.dtype.itemsize
        )
    return memory.Bytes(**found)


def history(policy: kvjax.Policy, spec: CacheSpec) -> int:
    """Slots of the history."""
    st = jax.eval_shape(functools.partial(policy.init, spec))
    if isinstance(policy, kvjax.Speculative):
        st = st.zones
    if isinstance(policy, Mixed):
        return st.low.slots
    return st.tokens.slots if isinstance(policy, kvjax.Full) else st.store.slots


@pytest.mark.parametrize("name", COSTS)
def test_a_token_takes_the_bytes_of_its_formula(name: str) -> None:
    """Measured as the growth from one capacity to another, which leaves out windows, counts and
    other fixed sizes.
    """
    cost, policy = COSTS[name], COSTS[name].make().rest
    long = dataclasses.replace(SPEC, capacity=2 * SPEC.capacity)
    (device, host), (more_device, more_host) = held(policy, SPEC), held(policy, long)
    tokens = history(policy, long) - history(policy, SPEC)
    assert tokens > 0.99 * SPEC.capacity
    assert np.isclose((more_device - device) / tokens / K, cost.device)
    assert np.isclose((more_host - host) / tokens / K, cost.host)
    assert np.isclose(policy.bytes_per_token(SPEC) / K, cost.device + cost.host)


def test_every_preset_of_the_four_methods_is_counted() -> None:
    counted = {name.split(",")[0] for name in COSTS}
    assert {"fier", "pariskv", "freekv", "logquant", "kivi", "quest", "full"} <= counted & set(
        presets.REGISTRY
    )


def test_bytes_are_the_same_in_arrays_that_are_made() -> None:
    small = dataclasses.replace(SPEC, kv_heads=1, q_heads=4, capacity=2048)
    for name in ("freekv", "logquant"):
        policy = COSTS[name].make().rest
        assert memory.nbytes(kvjax.init_layer(policy, small)) == held(policy, small)


SMALL = CacheSpec(batch=2, q_heads=4, kv_heads=2, head_dim=64, capacity=2048)
TAKES_HOST = [name for name, preset in presets.REGISTRY.items() if "store" in preset.settings]


@pytest.mark.parametrize("name", TAKES_HOST)
def test_shapes_of_a_cache_count_where_its_arrays_lie(name: str) -> None:
    """`jax.eval_shape` forgets the memory of an array; policy and spec know it."""
    make = functools.partial(kvjax.init, presets.parse(f"{name}:store=host"), SMALL, layers=3)
    made = make()
    shapes = jax.eval_shape(make)
    assert made.nbytes.host > 0
    assert shapes.nbytes == made.nbytes
    assert [layer.nbytes for layer in shapes.layers] == [layer.nbytes for layer in made.layers]


def test_shapes_of_a_split_cache_count_as_its_arrays_do() -> None:
    placement = kvjax.Placement(mesh=jax.make_mesh((1,), ("x",)), batch="x")
    policies = presets.fier(store="host")
    make = functools.partial(kvjax.init, policies, SMALL, layers=3, placement=placement)
    assert jax.eval_shape(make).nbytes == make().nbytes


@pytest.mark.parametrize(
    ("policy", "resident", "index"),
    [
        # Sink, window and the page that fills; the recall of the step before, a page beyond the
        # window, and its query.
        (presets.freekv().rest, 128 + 128 + 32 + 2048, PAGE_32),
        (presets.pariskv(store="host").rest, 4 + 128 + 256, PARIS),
        (presets.fier(store="host").rest, 1 + 256, ONE_BIT),
    ],
    ids=["freekv", "pariskv over host", "fier over host"],
)
def test_the_device_holds_windows_and_index_alone(
    policy: kvjax.Retrieval | kvjax.Speculative, resident: int, index: float
) -> None:
    """A cache of 32768 tokens over host memory has no more exact tokens than the method's zones
    and recall.
    """
    slots = history(policy, SPEC)
    query = 32 * D * 4 if isinstance(policy, kvjax.Speculative) else 0
    selector = (
        policy.retrieval.selector if isinstance(policy, kvjax.Speculative) else policy.selector
    )
    counts = K * D // 8 * 256 * 4 if isinstance(selector, kvjax.Paris) else 0
    places = K * 2048 * 5  # slots, and whether they are valid, of a recall
    device, host = held(policy, SPEC)
    assert host == slots * K * EXACT
    assert device <= K * (slots * index + resident * EXACT) + query + counts + places + 256
    assert device < (host + device) / (4 if selector == kvjax.Paris() else 8)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "make",
    [
        presets.freekv,
        functools.partial(presets.pariskv, store="host"),
        functools.partial(presets.fier, store="host"),
    ],
    ids=["freekv", "pariskv over host", "fier over host"],
)
def test_a_prompt_larger_than_the_device_goes_to_the_host_chunk_by_chunk(
    make: Callable[[], kvjax.PerLayer],
) -> None:
    """In addition to the cache, a chunk of a prompt needs the same device memory however long
    the prompt is.
    """
    small = dataclasses.replace(SPEC, q_heads=8, kv_heads=2, dtype=jnp.float32)
    policy, temp, chunk = make().rest, [], 512
    for capacity in (8192, 65536):
        spec = dataclasses.replace(small, capacity=capacity)
        q, k = (jax.ShapeDtypeStruct((1, chunk, heads, D), spec.dtype) for heads in (8, 2))
        cache = memory.shapes(functools.partial(kvjax.init_layer, policy, spec))
        run = jax.jit(kvjax.attention, donate_argnums=0)
        compiled: Any = run.lower(cache, q, k, k).compile().memory_analysis()
        temp.append(compiled.temp_size_in_bytes)
        size = sum(held(policy, spec))
        passed_on = 64  # numbers that a prompt does not read are no arguments
        assert (
            compiled.alias_size_in_bytes + compiled.host_alias_size_in_bytes >= size - passed_on
        ), "a second cache"
    logits = 8 * chunk * 1024 * 4  # f32[N, chunk, a block of 1024 stored tokens]
    assert temp[0] <= 8 * logits
    # On CPU, jaxlib before 0.11 drops barriers before it places buffers, and so copies what it
    # writes into.
    if jax.__version_info__ >= (0, 11):
        assert temp[1] <= 1.01 * temp[0], f"temp bytes grow with the history: {temp}"
    else:
        assert temp[1] <= temp[0] + size, f"more than one copy: {temp}"


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason="on CPU, jaxlib before 0.11 copies what a chunk stores into",
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.thorough] * (n != "quest")) for n in presets.REGISTRY],
)
def test_a_prompt_needs_beside_its_cache_only_what_a_chunk_does(name: str) -> None:
    """Four times the capacity takes little more memory: no second cache, and never logits of
    all slots.
    """
    policy, temp = presets.REGISTRY[name].make().policy(40), []
    for capacity, chunk in ((8192, 512), (32768, 512)):
        spec = dataclasses.replace(
            SPEC, q_heads=8, kv_heads=2, capacity=capacity, dtype=jnp.float32
        )
        q, k = (jax.ShapeDtypeStruct((1, chunk, heads, D), spec.dtype) for heads in (8, 2))
        cache = memory.shapes(functools.partial(kvjax.init_layer, policy, spec))
        # A number that a prompt sets anew would be no argument, and so no memory that the
        # program can write it to.
        run = jax.jit(kvjax.attention, donate_argnums=0, keep_unused=True)
        compiled: Any = run.lower(cache, q, k, k).compile().memory_analysis()
        temp.append(compiled.temp_size_in_bytes)
        assert compiled.alias_size_in_bytes + compiled.host_alias_size_in_bytes >= sum(
            held(policy, spec)
        )
        assert temp[-1] <= 4 * 8 * chunk * 1024 * 4, (
            "more than some logits of a chunk by a block of 1024 tokens"
        )
    assert temp[1] - temp[0] <= 24576 * 2 * D * 4 / 2, (
        "more than a quarter of the keys and values that the capacity adds"
    )


@pytest.mark.thorough
def test_generation_of_a_model_needs_the_same_device_memory_for_any_prompt() -> None:
    model = models.Decoder(
        models.DecoderConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=96,
            layers=2,
            q_heads=4,
            kv_heads=2,
            head_dim=64,
        )
    )
    temp, device, number = [], [], jax.ShapeDtypeStruct((), jnp.int32)
    tokens, rows = (
        jax.ShapeDtypeStruct((1, 512), jnp.int32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )
    logits, active = (
        jax.ShapeDtypeStruct((1, 128), jnp.float32),
        jax.ShapeDtypeStruct((1,), bool),
    )
    inputs = LoopInputs(None, number, number, rows)
    for capacity in (8192, 65536):
        spec, method = (
            model.spec(batch=1, capacity=capacity),
            presets.freekv(layers=presets.Layers(dense=0)),
        )
        cache = memory.shapes(functools.partial(kvjax.init, method, spec, layers=2))
        prompt = _prefill_chunk.lower(model, cache, tokens, rows, first_chunk=False)
        loop = decode_loop.lower(model, cache, logits, active, inputs, measure=False)
        temp.append([p.compile().memory_analysis().temp_size_in_bytes for p in (prompt, loop)])
        device.append(2 * held(method.rest, spec).device)
    assert device[1] - device[0] <= 1.01 * 2 * 2 * (65536 - 8192) * 2 * 64 * 4 / 32, (
        "more than the index grew"
    )
    prompts, loops = zip(*temp, strict=True)
    assert loops[1] <= 1.02 * loops[0]
    assert jax.__version_info__ < (0, 11) or prompts[1] <= 1.02 * prompts[0]


@pytest.mark.parametrize(
    "preset",
    [presets.freekv(), presets.pariskv(store="host")],
    ids=["freekv", "pariskv over host"],
)
def test_an_empty_store_is_made_in_host_memory(preset: kvjax.PerLayer) -> None:
    """It is not made on the device and then moved: init moves only one zero."""
    spec = dataclasses.replace(SPEC, kv_heads=1, q_heads=1, capacity=8192)
    program = jax.make_jaxpr(functools.partial(kvjax.init_layer, preset.rest, spec))()
    moved = [
        str(eqn.invars[0].aval)
        for eqn in program.jaxpr.eqns
        if eqn.primitive.name == "device_put"
    ]
    assert moved == ["bfloat16[]"]
