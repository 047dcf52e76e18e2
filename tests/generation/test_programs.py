"""Few programs: sessions of many lengths, stop tokens, draws and turns share what was compiled."""

import dataclasses
from collections import Counter
from contextlib import contextmanager

import jax
import jax.monitoring
import numpy as np
import pytest

import kvjax
from kvjax.generation import loops, prefilling
from kvjax.generation.prefilling import CPU_CHUNKS, GPU_CHUNKS, cut
from kvjax.generation.processors import Processors
from kvjax.generation.prompt_inputs import pad_prompt, stop_array
from kvjax.generation.sampling import sampling
from kvjax.generation.streaming import abstract_cache
from kvjax.memory import on_host
from kvjax.models import Decoder, DecoderConfig
from kvjax.spec import round_capacity
from tests.generation.test_generate import assert_close

CONFIG = DecoderConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=8,
)
SMALL = (48, 16)  # chunks of prompts, so that short ones have several


@pytest.fixture(scope="module")
def model():
    return Decoder(CONFIG)


@contextmanager
def compiled(event="backend_compile_duration"):
    """Yields a Counter of the programs that XLA compiles, by name; of another `event`, of
    those that it happens to.
    """
    found, on = Counter(), [True]

    def listen(name, seconds, **about):
        if on[0] and name == f"/jax/core/compile/{event}":
            found[about.get("fun_name", "?")] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        on[0] = False


def empty(model, policy, *, batch=1, capacity=1152):
    return kvjax.init(policy, model.spec(batch=batch, capacity=capacity), layers=CONFIG.layers)


def words(rng, *lengths):
    return [rng.integers(0, CONFIG.vocab_size, n).tolist() for n in lengths]


@pytest.mark.parametrize(
    ("policy", "most"),
    [
        pytest.param(kvjax.Full(), 4, marks=pytest.mark.thorough),
        (kvjax.presets.parse("fier:budget=24,dense_layers=1"), 4),
        # Codes have chunks of both sizes with room for the prompt too; to make it and to settle
        # takes two more.
        pytest.param(kvjax.presets.kivi(), 8, marks=pytest.mark.thorough),
    ],
    ids=["full", "fier", "kivi"],
)
def test_a_session_compiles_few_programs(model, policy, most, monkeypatch):
    monkeypatch.setattr(prefilling, "CPU_CHUNKS", SMALL)
    jax.clear_caches()
    rng = np.random.default_rng(0)
    spare, running = empty(model, policy), empty(model, policy, batch=4)
    draws = [
        sampling(0.7),
        sampling(1.2, top_k=5),
        sampling(0.5, top_p=0.9),
        sampling([1.0], min_p=0.1),
    ]
    stops = [(), 3, (3, 4, 5), range(7)]
    with compiled() as seen:
        caches = [empty(model, policy) for _ in range(12)]
        assert not caches[0].length.any()
    made, keys = set(seen), [jax.random.key(i) for i in range(12)]
    with compiled() as seen:
        for i, cache in enumerate(
            caches
        ):  # 12 lengths, 10 lengths of answers, 4 sets of stop tokens
            draw = draws[i % 4] if i % 3 == 0 else sampling()
            given = {
                "max_new_tokens": 1 + i % 10,
                "stop_tokens": stops[i % 4],
                "sampling": draw,
                "key": keys[i],
            }
            done = kvjax.generate(model, cache, words(rng, 1 + 17 * i), **given)
            for turn in (5, 40, 90):  # a chat
                done = kvjax.generate(model, done.cache, words(rng, turn), max_new_tokens=3)
    session = {name: n for name, n in seen.items() if name not in made}
    assert sum(session.values()) <= most, session

    with compiled() as seen:
        logits, one = kvjax.generation.prefill(model, spare, words(rng, 77))
    assert not seen
    with compiled() as seen:
        running = kvjax.insert(running, one, 2)
        logits = np.tile(np.asarray(logits), (4, 1))
        active = np.array([False, False, True, False])
        kvjax.generation.decode(model, running, logits, max_new_tokens=3, active=active)
    loops = {name: n for name, n in seen.items() if "loop" in name or "chunk" in name}
    assert sum(loops.values()) <= 1, loops


def test_a_longer_answer_calls_the_same_program_again(model, monkeypatch):
    monkeypatch.setattr("kvjax.generation.streaming.ROOM", 16)
    settings = {
        "sampling": sampling(0.8, top_p=0.95),
        "key": jax.random.key(1),
        "measure": True,
    }
    prompt = words(np.random.default_rng(1), 9, 30)
    short = kvjax.generate(
        model, empty(model, kvjax.Full(), batch=2), prompt, max_new_tokens=40, **settings
    )
    monkeypatch.undo()
    whole = kvjax.generate(
        model, empty(model, kvjax.Full(), batch=2), prompt, max_new_tokens=40, **settings
    )
    np.testing.assert_array_equal(short.tokens, whole.tokens)
    np.testing.assert_allclose(short.attended, whole.attended, rtol=1e-6)
    assert_close(short.logits, whole.logits)


@pytest.mark.parametrize("tokens", [1, 16, 17, 48, 49, 145])
@pytest.mark.parametrize(
    "policy",
    [kvjax.Full(), kvjax.presets.parse("fier:budget=24,dense_layers=1")],
    ids=["full", "fier"],
)
def test_the_cuts_of_a_prompt_change_no_result(model, policy, tokens, monkeypatch):
    monkeypatch.setattr(prefilling, "CPU_CHUNKS", SMALL)
    prompt = words(np.random.default_rng(tokens), tokens, max(1, tokens // 2))
    want, whole = kvjax.generation.prefill(
        model, empty(model, policy, batch=2), *pad_prompt(prompt, rows=2), chunk=256
    )
    got, cut_up = kvjax.generation.prefill(
        model, empty(model, policy, batch=2), *pad_prompt(prompt, rows=2)
    )
    assert_close(got, want)
    assert cut_up.length.tolist() == whole.length.tolist() == [len(row) for row in prompt]


@pytest.mark.parametrize("sizes", [CPU_CHUNKS, GPU_CHUNKS[1:], (16,)], ids=str)
def test_cuts_hold_the_prompt_and_pad_a_tenth_or_the_smallest_chunk(sizes):
    for tokens in [*range(1, 1500, 7), 2829, 4096, 9999, 65536, 100_003]:
        found = cut(tokens, sizes)
        assert set(found) <= set(sizes)
        assert found == sorted(found, reverse=True)
        assert 0 <= sum(found) - tokens <= max(tokens / 10, sizes[-1] - 1)
        assert sum(found[:-1]) < tokens


def test_capacities_have_two_sizes_for_a_factor_of_two():
    ladder = sorted({round_capacity(n, rows=8) for n in range(1, 300_000, 3)})
    assert all(ladder[i + 2] >= 2 * ladder[i] for i in range(len(ladder) - 2))
    assert len({round_capacity(n) for n in range(1, 4609)}) == 2
    for n in (1, 287, 288, 289, 1153, 32768, 36865, 131_072, 2**31 - 1):
        assert n <= round_capacity(n, rows=8) <= max(288, 1.5 * n)
        assert round_capacity(n, positions=n) == n
        assert round_capacity(n, positions=max(1, n - 1)) == n


def test_stop_tokens_of_most_requests_have_one_shape():
    assert {stop_array(stops).shape for stops in ((), None, 3, (1, 2), range(16))} == {(16,)}
    assert stop_array(range(17)).shape == (32,)
    assert stop_array((4, 2)).tolist() == [4, 2] + [-1] * 14


# Of one kind, so that it can be read by layer: with caches of two kinds where one of a kind is deep.
DEEP = Decoder(CONFIG)
FIER = kvjax.presets.parse("fier:budget=24,dense_layers=1")
FREEKV = kvjax.presets.freekv(32, sink=4, local=4, page=4)


def test_a_model_of_many_layers_is_deep():
    for layers, deep in ((7, False), (8, True)):
        model = jax.eval_shape(
            lambda n=layers: Decoder(dataclasses.replace(CONFIG, layers=n, windows=()))
        )
        for policy, kinds in ((kvjax.Full(), 1), (FREEKV, 2)):  # whose first layer is dense
            spec = model.spec(batch=1, capacity=288)
            cache = jax.eval_shape(
                lambda p=policy, s=spec, n=layers: kvjax.init(p, s, layers=n)
            )
            assert prefilling.by_layer(model, cache) == (deep or kinds == 1)


BY_LAYER = {
    "full": kvjax.Full(),
    "fier": FIER,
    "snapkv": kvjax.presets.snapkv(32),
    "freekv": FREEKV,
}


@pytest.mark.parametrize(
    ("policy", "batch"),
    [  # of one kind of layer and of two, of one row and of several, and one that looks at the prompt's queries
        pytest.param(
            policy,
            batch,
            id=f"{name}-{batch}",
            marks=() if (name, batch) in kept else pytest.mark.thorough,
        )
        for kept in [[("full", 1), ("freekv", 3), ("snapkv", 3)]]
        for name, policy in BY_LAYER.items()
        for batch in (1, 3)
    ],
)
def test_a_deep_model_reads_a_prompt_layer_by_layer(policy, batch, monkeypatch):
    monkeypatch.setattr(prefilling, "CPU_CHUNKS", SMALL)
    monkeypatch.setattr(prefilling, "DEEP", 1)
    rng = np.random.default_rng(2)
    prompt = pad_prompt(words(rng, *(70, 20, 101)[:batch]), rows=batch)

    def read():
        cache = kvjax.init(
            policy, DEEP.spec(batch=batch, capacity=288), layers=DEEP.config.layers
        )
        return prefilling.prefill(DEEP, cache, *prompt)

    jax.clear_caches()
    with compiled() as seen:
        got, cache = read()
    sizes, kinds = (
        len(set(cut(prompt[0].shape[1], SMALL))),
        len({layer.policy for layer in cache.layers}),
    )
    assert "jit(_prefill_chunk)" not in seen
    assert seen["jit(_layer)"] <= max(sizes, 1) * kinds
    assert seen["jit(_begin)"] == seen["jit(_finish)"] <= sizes
    monkeypatch.setattr(prefilling, "DEEP", 1000)
    want, whole = read()
    assert_close(got, want)
    for one, other in zip(jax.tree.leaves(cache), jax.tree.leaves(whole), strict=True):
        if one.dtype.kind in "iub":
            np.testing.assert_array_equal(one, other)
    assert cache.length.tolist() == whole.length.tolist()


@pytest.mark.parametrize(
    ("model", "policy"),
    [
        pytest.param(Decoder(CONFIG), FIER, id="shallow-fier"),
        pytest.param(Decoder(CONFIG), FREEKV, id="shallow-freekv", marks=pytest.mark.thorough),
        pytest.param(DEEP, FIER, id="deep-fier", marks=pytest.mark.thorough),
        pytest.param(DEEP, FREEKV, id="deep-freekv"),
    ],
)
def test_programs_that_compiled_ahead_for_shapes_are_those_that_run(model, policy, monkeypatch):
    if model is DEEP:
        monkeypatch.setattr(prefilling, "DEEP", 1)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), model)
    jax.clear_caches()
    cache = kvjax.init(policy, model.spec(batch=1, capacity=288), layers=model.config.layers)
    assert not cache.length.any()
    settings = {
        "measure": True,
        "stop_tokens": (1, 2),
        "sampling": sampling(0.7),
        "key": jax.random.key(3),
    }
    settings["processors"] = Processors(repetition_penalty=1.1 if model is DEEP else 1.0)
    chosen = {name: value for name, value in settings.items() if name != "key"}
    known = abstract_cache(
        lambda: kvjax.init(
            policy, model.spec(batch=1, capacity=288), layers=model.config.layers
        )
    )
    assert (known is None) == (policy is FREEKV)  # which has arrays in host memory
    for compile_one in kvjax.generation.compile_ahead(shapes, known or cache, 90, **chosen):
        compile_one()
    with compiled() as seen:
        list(
            kvjax.generation.stream(
                model, cache, words(np.random.default_rng(0), 90), max_new_tokens=4, **settings
            )
        )
    assert not seen


@pytest.mark.parametrize(
    ("policy", "batch"),
    [
        pytest.param(FIER, 2, id="fier"),  # whose recent block fills on the way
        pytest.param(FREEKV, 1, id="freekv", marks=pytest.mark.thorough),
        pytest.param(kvjax.presets.snapkv(32), 2, id="snapkv", marks=pytest.mark.thorough),
    ],
)
def test_a_short_answer_compiles_one_layer_of_each_kind_and_is_the_same(
    policy, batch, monkeypatch
):
    monkeypatch.setattr(prefilling, "DEEP", 1)
    rng, tokens = np.random.default_rng(4), 280
    prompt = words(rng, *(50, 20)[:batch])
    settings = {
        "measure": True,
        "sampling": sampling(0.9),
        "key": jax.random.key(5),
        "max_new_tokens": tokens,
    }
    settings |= {
        "stop_tokens": (3,),
        "processors": Processors(repetition_penalty=1.2),
        "block": 70,
    }

    def empty():
        return kvjax.init(
            policy, DEEP.spec(batch=batch, capacity=352), layers=DEEP.config.layers
        )

    chosen = {
        name: settings[name] for name in ("measure", "sampling", "stop_tokens", "processors")
    }
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), DEEP)
    jax.clear_caches()
    cache = empty()
    assert not cache.length.any()
    for compile_one in kvjax.generation.compile_ahead(
        shapes, abstract_cache(empty) or cache, 50, short=True, **chosen
    ):
        compile_one()
    waits = []
    monkeypatch.setattr(loops, "on_host", lambda x: waits.append(x.dtype.kind) or on_host(x))
    with compiled() as seen:
        short = kvjax.generation.stream(DEEP, cache, prompt, short=True, **settings)
        got = np.concatenate(list(short), axis=1)
    assert set(seen) <= {"jit(flush)"}, seen
    if policy is FIER:  # which says how many tokens its block takes
        assert 0 < waits.count("i") <= 3 + got.shape[1] // 16
    with compiled() as seen:
        whole = kvjax.generation.stream(DEEP, empty(), prompt, **settings)
        np.testing.assert_array_equal(got, np.concatenate(list(whole), axis=1))
    assert seen["jit(decode_loop)"] == 1
    assert_close(short.logits, whole.logits)
    np.testing.assert_allclose(short.attended, whole.attended, rtol=1e-5)
    assert short.cache.length.tolist() == whole.cache.length.tolist()


def test_programs_of_a_greedy_answer_are_traced_once_and_make_no_key(monkeypatch):
    # A process that finds its programs on disk still traces them: what it traces twice, or
    # compiles besides, each first answer waits for.
    monkeypatch.setattr(prefilling, "DEEP", 1)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), DEEP)
    cache = kvjax.init(FIER, DEEP.spec(batch=1, capacity=352), layers=DEEP.config.layers)
    kinds = len(prefilling.kinds_of(shapes, cache))
    jax.clear_caches()
    with compiled() as seen, compiled("jaxpr_trace_duration") as traced:
        for compile_one in kvjax.generation.compile_ahead(
            shapes, cache, 90, short=True, measure=True
        ):
            compile_one()
    parts = ("_begin", "_begin_step", "_end_step", "_finish", "_layer", "_step_layer")
    assert {name.partition("(")[2].rstrip(")") for name in seen} <= set(parts), seen
    chunks = traced["_finish"]  # of several sizes
    each = {"_begin": chunks, "_layer": chunks * kinds, "_begin_step": 1, "_end_step": 1}
    assert {name: traced[name] for name in each} == each
    assert traced["_step_layer"] == kinds


def test_layers_that_follow_a_selection_decode_in_one_program(monkeypatch):
    monkeypatch.setattr(prefilling, "DEEP", 1)
    model = Decoder(dataclasses.replace(CONFIG, layers=4, windows=()))
    for share, programs in ((1, 3), (2, 1)):
        policy = kvjax.presets.parse(f"fier:budget=24,dense_layers=0,share={share}")
        cache = kvjax.init(policy, model.spec(batch=1, capacity=288), layers=4)
        logits = np.zeros((1, CONFIG.vocab_size), np.float32)
        assert (
            len(kvjax.generation.Stream(model, cache, logits, 1, short=True).programs())
            == programs
        )
