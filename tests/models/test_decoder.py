"""The decoder keeps the model protocol: what generate, users and training rely on."""

import importlib.util
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax import models
from kvjax.models import decoder

CONFIG = models.DecoderConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    norm_eps=1e-3,
    qk_norm=True,
    qkv_bias=True,
    windows=(6, None),
    initializer_range=0.25,
)
LENGTHS = np.array([12, 5, 1, 0], np.int32)
B, T = 4, 12


@pytest.fixture(scope="module")
def model():
    return models.Decoder(CONFIG, rngs=nnx.Rngs(1))


@pytest.fixture(scope="module")
def tokens():
    """Of numpy: a slice of an array of jax is a program."""
    drawn = jax.random.randint(jax.random.key(0), (B, 30), 0, CONFIG.vocab_size)
    return np.asarray(drawn)


call = jax.jit(
    lambda model, tokens, cache, **settings: model(tokens, cache, **settings),
    static_argnames=("last_logits", "first_chunk", "info", "steps"),
)


def run(model, tokens, cache=None, **settings):
    """The logits, as an array of numpy, and what else the model returns."""
    logits, *rest = call(model, tokens, cache, **settings)
    return np.asarray(logits), *rest


def empty(model, capacity=32, batch=B):
    return kvjax.init(kvjax.Full(), model.spec(batch, capacity), layers=model.config.layers)


def test_last_gives_the_logits_of_the_last_real_token(model, tokens):
    every, _ = run(model, tokens[:, :T], empty(model), lengths=LENGTHS, first_chunk=True)
    last, cache = run(
        model, tokens[:, :T], empty(model), lengths=LENGTHS, first_chunk=True, last_logits=True
    )
    assert every.shape == (B, T, 40)
    assert last.shape == (B, 40)
    assert every.dtype == last.dtype == jnp.float32
    np.testing.assert_array_equal(cache.length, LENGTHS)
    for row, n in enumerate(LENGTHS.tolist()):
        np.testing.assert_allclose(last[row], every[row, max(n - 1, 0)], atol=1e-5)
    assert np.isfinite(np.asarray(every)).all()


def test_without_a_cache_it_is_the_plain_causal_model(model, tokens):
    plain, none = run(model, tokens[:, :T])
    assert none is None
    cached, _ = run(model, tokens[:, :T], empty(model), first_chunk=True)
    np.testing.assert_allclose(plain, cached, atol=1e-5)
    other = tokens[:, :T].copy()
    other[:, 7] = 0
    changed, _ = run(model, other)
    np.testing.assert_allclose(changed[:, :7], plain[:, :7], atol=1e-5)
    last, _ = run(model, tokens[:, :T], last_logits=True)
    np.testing.assert_allclose(last, plain[:, -1], atol=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("cuts", [(12,), (5, 12), (3, 4, 9, 12)])
def test_chunks_and_single_tokens_give_the_logits_of_the_whole(model, tokens, cuts):
    """Ragged rows: row r holds its first r + 6 tokens after the prompt, then decodes to 20."""
    whole, _ = run(model, tokens[:, :20])
    cache, start = empty(model), 0
    lengths = np.arange(6, 6 + B, dtype=np.int32)
    for end in cuts:
        real = np.clip(lengths - start, 0, end - start)
        logits, cache = run(
            model, tokens[:, start:end], cache, lengths=real, first_chunk=start == 0
        )
        for row, n in enumerate(real.tolist()):
            np.testing.assert_allclose(
                logits[row, :n], whole[row, start : start + n], atol=2e-5
            )
        start = end
    step = jax.jit(lambda model, cache, token: model(token, cache, last_logits=True))
    for i in range(8):
        token = np.take_along_axis(tokens, lengths[:, None] + i, axis=1)
        logits, cache = step(model, cache, token)
        logits = np.asarray(logits)
        for row, n in enumerate(lengths.tolist()):
            np.testing.assert_allclose(logits[row], whole[row, n + i], atol=2e-5)


def test_rows_ignore_each_other(model, tokens):
    together, _ = run(model, tokens[:, :T], empty(model), lengths=LENGTHS)
    for row, n in enumerate(LENGTHS.tolist()):
        if n > 1:
            alone, _ = run(model, tokens[row : row + 1, :n], empty(model, batch=1))
            np.testing.assert_allclose(together[row, :n], alone[0], atol=1e-5)


def test_padding_tokens_do_not_matter_even_out_of_the_vocabulary(model, tokens):
    padded = np.where(np.arange(T)[None] < LENGTHS[:, None], tokens[:, :T], 10**6)
    a, cache_a = run(model, tokens[:, :T], empty(model), lengths=LENGTHS, last_logits=True)
    b, cache_b = run(model, padded, empty(model), lengths=LENGTHS, last_logits=True)
    np.testing.assert_array_equal(a[:3], b[:3])
    step = tokens[:, :1]
    np.testing.assert_array_equal(run(model, step, cache_a)[0], run(model, step, cache_b)[0])


def test_rows_that_are_not_active_store_nothing(model, tokens):
    _, cache = run(model, tokens[:, :T], empty(model), lengths=LENGTHS)
    active = np.array([True, False, True, False])
    logits, after = run(model, tokens[:, T : T + 1], cache, active=active, last_logits=True)
    np.testing.assert_array_equal(after.length, LENGTHS + active)
    every, _ = run(model, tokens[:, T : T + 1], cache, last_logits=True)
    np.testing.assert_allclose(logits[active], every[active], atol=1e-5)
    assert np.isfinite(np.asarray(logits)).all()


def test_several_steps_at_once_are_single_steps(model, tokens):
    """Through a selecting cache, ragged, with a row without a step; tokens taken back are as if
    never fed.
    """
    policy = kvjax.Retrieval(
        selector=kvjax.Exact(), budget=6, sink=1, local=2, demote=kvjax.LogSparse(window=8)
    )
    policies = [
        kvjax.Full(),
        policy,
    ]  # the first layer has a sliding window, which a LogSparse block cannot serve
    cache = kvjax.init(policies, model.spec(B, 32), layers=2)
    _, cache = run(model, tokens[:, :T], cache, lengths=LENGTHS)
    count = np.array([5, 3, 0, 4], np.int32)
    logits, together, infos = run(
        model, tokens[:, T : T + 5], cache, lengths=count, steps=True, info=True
    )
    single = cache
    for t in range(5):
        want, single, seen = run(
            model, tokens[:, T + t][:, None], single, active=t < count, info=True
        )
        active = t < count
        np.testing.assert_allclose(logits[active, t], want[active, 0], atol=1e-4)
        for ours, theirs in zip(infos, seen, strict=True):
            np.testing.assert_array_equal(
                np.asarray(ours.attended)[t, active], np.asarray(theirs.attended)[active]
            )
    np.testing.assert_array_equal(together.length, single.length)
    back, (active, last) = (
        jax.jit(kvjax.rollback)(together, LENGTHS),
        (np.ones(B, bool), tokens[:, :1]),
    )
    ahead, again = (run(model, last, c, active=active, info=True)[0] for c in (cache, back))
    np.testing.assert_allclose(again, ahead, atol=1e-4)


def test_info_tells_what_each_layer_attended_to(model, tokens):
    _, cache, infos = run(model, tokens[:, :T], empty(model), lengths=LENGTHS, info=True)
    assert infos == (None, None)
    _, _, infos = run(model, tokens[:, :1], cache, info=True)
    wanted = np.tile((LENGTHS + 1)[:, None], (1, 2))
    np.testing.assert_array_equal(infos[0].attended, np.minimum(wanted, 6))  # its window
    np.testing.assert_array_equal(infos[1].attended, wanted)


def test_decoding_traces_once_and_allocates_no_second_cache(model):
    traces = []

    def step(model, cache, token):
        traces.append(1)
        logits, cache = model(token[:, None], cache, last_logits=True)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache

    cache = empty(model, capacity=4096)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    token = jnp.zeros(B, jnp.int32)
    run = jax.jit(step, donate_argnums=1)
    memory = run.lower(model, cache, token).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 2
    traces.clear()
    for _ in range(5):
        token, cache = run(model, cache, token)
    assert len(traces) <= 1  # 0 where lowering above has filled the cache of traces
    np.testing.assert_array_equal(cache.length, np.full(B, 5))


@pytest.mark.thorough
def test_retrieval_caches_with_a_large_budget_decode_as_full_ones(model, tokens):
    policy = kvjax.Retrieval(
        selector=kvjax.Fier(group=8),
        budget=64,
        sink=2,
        local=8,
        demote=kvjax.Fifo(leave=8),
        dense_below=0,
    )
    caches = [kvjax.init(p, model.spec(B, 64), layers=2) for p in (kvjax.Full(), policy)]
    step = jax.jit(lambda model, cache, token: model(token, cache, last_logits=True))
    caches = [
        run(model, tokens[:, :T], cache, lengths=LENGTHS, first_chunk=True)[1]
        for cache in caches
    ]
    for i in range(30):  # crosses flushes
        (a, b) = (step(model, cache, tokens[:, i : i + 1]) for cache in caches)
        np.testing.assert_allclose(a[0], b[0], atol=1e-4)
        caches = [a[1], b[1]]
    kvjax.raise_on_overflow(caches[1])


def test_rope_by_length_follows_the_row_alone(tokens):
    """Not the longest row of the batch: a short row beside a long one is as it is alone, in
    prompts and in steps.
    """
    config = models.DecoderConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        layers=1,
        q_heads=4,
        kv_heads=2,
        head_dim=8,
        rope=models.rope.Dynamic(theta=100.0, factor=4.0, original=8),
        initializer_range=0.3,
    )
    model = models.Decoder(config)
    assert model.max_positions is None
    rows = tokens[:2, :T]
    alone, cache = run(model, rows[:1, :5], empty(model, batch=1), last_logits=True)
    beside, both = run(
        model, rows[::-1], empty(model, batch=2), lengths=np.array([12, 5]), last_logits=True
    )
    np.testing.assert_allclose(beside[1], alone[0], atol=1e-5)
    np.testing.assert_array_equal(both.rotated_for, [12, 8])
    step, _ = run(model, rows[:1, 5:6], cache, last_logits=True)
    beside, _ = run(
        model,
        np.tile(rows[:1, 5:6], (2, 1)),
        both,
        active=np.array([False, True]),
        last_logits=True,
    )
    np.testing.assert_allclose(beside[1], step[0], atol=1e-5)
    with pytest.raises(RuntimeError, match="rotated for a text of at most 12 tokens"):
        kvjax.raise_on_overflow(run(model, rows[:, 5:6], both)[1])


def test_random_parameters_follow_the_config():
    config = models.DecoderConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        layers=2,
        q_heads=4,
        kv_heads=2,
        head_dim=16,
        out_bias=True,
        initializer_range=0.05,
    )
    model = models.Decoder(config, rngs=nnx.Rngs(3), dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype(jnp.bfloat16)}
    layer = model.layers[0]
    for param in (
        model.embedding,
        model.head.kernel,
        layer.attention.q.kernel,
        layer.mlp.down.kernel,
    ):
        drawn = np.asarray(param[...]).astype(np.float32)
        assert drawn.std() == pytest.approx(0.05, rel=0.1)
    assert not np.array_equal(
        layer.attention.q.kernel[...], model.layers[1].attention.q.kernel[...]
    )
    np.testing.assert_array_equal(layer.attention.out.bias[...], np.zeros(64))
    np.testing.assert_array_equal(model.norm.scale[...], np.ones(64))
    again = models.Decoder(config, rngs=nnx.Rngs(3), dtype=jnp.bfloat16)
    jax.tree.map(np.testing.assert_array_equal, model, again)
    assert not np.array_equal(
        models.Decoder(config, rngs=nnx.Rngs(4), dtype=jnp.bfloat16).embedding[...],
        models.Decoder(config, dtype=jnp.bfloat16).embedding[...],
    )


def test_training_lowers_the_loss(tokens):
    model = models.Decoder(CONFIG)

    @jax.jit
    def step(model):
        def loss(model):
            logits, _ = model(tokens[:, :-1])
            picked = jnp.take_along_axis(
                jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1
            )
            return -jnp.mean(picked)

        value, grads = jax.value_and_grad(loss)(model)
        return value, jax.tree.map(lambda p, g: p - 0.3 * g, model, grads)

    first, model = step(model)
    for _ in range(30):
        value, model = step(model)
    assert float(value) < 0.5 * float(first)


def test_spec_is_that_of_the_model():
    model = models.Decoder(CONFIG, dtype=jnp.bfloat16)
    assert model.spec(2, 100) == kvjax.CacheSpec(
        batch=2, q_heads=4, kv_heads=2, head_dim=8, capacity=100, dtype=jnp.bfloat16
    )
    assert model.spec(batch=2, capacity=100, dtype="float32").dtype == jnp.float32


def test_bad_calls_say_what_is_wrong(model, tokens):
    cache = empty(model)
    for call, said in (
        (lambda: model(tokens[0]), r"integers \[B, T >= 1\], got int32\[30\]"),
        (lambda: model(tokens[:, :0]), r"got int32\[4, 0\]"),
        (lambda: model(tokens.astype(np.float32)), "got float32"),
        (
            lambda: model(tokens[:2, :3], cache),
            r"tokens has B=2 but the cache has B=4; tokens\[2, 3\]",
        ),
        (
            lambda: model(tokens, kvjax.init(kvjax.Full(), model.spec(B, 32), layers=3)),
            "the cache has 3 layers but the model has 2",
        ),
        (lambda: model(tokens, cache, active=np.ones(B, bool)), "active is for decode steps"),
        (
            lambda: models.Decoder(CONFIG, dtype=jnp.int8),
            "a model cannot have dtype int8; use one of bfloat16",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            call()


def test_the_folder_is_no_package_of_its_own():
    path = Path(inspect.getfile(models))
    spec = importlib.util.spec_from_file_location(
        "models", path, submodule_search_locations=[str(path.parent)]
    )
    with pytest.raises(ImportError, match=r"import kvjax\.models"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_experts_are_chosen_as_by_top_k_and_equal_ones_by_number():
    # many are equal
    logits = np.random.default_rng(0).integers(-4, 5, (300, 24)).astype(np.float32)
    logits[0], logits[1, 3:] = 0.0, -np.inf
    shares = jax.nn.softmax(logits, axis=-1)
    for k, normalised in ((1, False), (4, True), (24, False)):
        weights, chosen = jax.jit(decoder.route, static_argnames=("k", "normalised"))(
            logits, k, normalised=normalised
        )
        _, want = jax.lax.top_k(logits, k)
        np.testing.assert_array_equal(chosen, want)
        of_chosen = jnp.take_along_axis(shares, want, axis=1)
        total = jnp.sum(of_chosen, axis=1, keepdims=True) if normalised else 1.0
        np.testing.assert_allclose(weights, of_chosen / total, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"unrotated": (0, 2), "windows": (None,) * 3, "tied_head": True},
        {"windows": (6, None, 6), "local_rope": models.rope.Default(theta=100.0)},
        {"experts": models.Experts(count=4, per_token=2, size=8, dense_layers=(1, 2))},
    ],
    ids=["plain", "unrotated", "two ropes", "experts"],
)
def test_first_layers_are_those_of_the_model_with_its_head(changes):
    config = models.DecoderConfig(
        **{**vars(CONFIG), "layers": 3, "windows": (6, None, 6), **changes}
    )
    whole = models.Decoder(config, rngs=nnx.Rngs(2))
    tokens = np.arange(10, dtype=np.int32)[None] * 3 % 40

    @jax.jit
    def after_each_layer(whole):
        x, cos, sin = whole.begin(jnp.asarray(tokens), jnp.zeros(1, jnp.int32), jnp.array([10]))
        logits = []
        for layer in whole.layers:
            x, _, _ = layer(x, cos, sin, None, lengths=None, active=None, first_chunk=True)
            logits.append(whole._logits(whole.norm(x)))
        return logits

    for count, wanted in enumerate(after_each_layer(whole), start=1):
        found, _ = call(whole.first_layers(count), tokens, None)
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    with pytest.raises(ValueError, match=r"first_layers\(count=...\) must be at most 3, got 4"):
        whole.first_layers(4)


@pytest.mark.parametrize(
    "changes", [{}, {"experts": models.Experts(count=2, per_token=1, size=8)}]
)
def test_a_decoder_of_shapes_has_those_of_one_with_parameters(changes):
    config = models.DecoderConfig(**{**vars(CONFIG), **changes})
    wanted = nnx.eval_shape(lambda: models.Decoder(config, dtype=jnp.bfloat16))
    found = decoder.decoder_of_shapes(config, jnp.bfloat16)
    assert nnx.split(found) == nnx.split(wanted)
