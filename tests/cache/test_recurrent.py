"""Caches in which some layers keep a state of fixed size: every function of a cache treats both
kinds.
"""

from __future__ import annotations

import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import presets
from kvjax.generation.drafts import SelfDraft
from kvjax.models import Decoder, DecoderConfig, GatedDelta, ShortConv
from kvjax.policies import Recurrent, RecurrentLayers
from kvjax.recurrence import advance
from kvjax.serve.prefixes import prefixed_like
from kvjax.serve.slots import with_small_slots

NET = GatedDelta(key_heads=1, value_heads=2, key_dim=4, value_dim=6, kernel=3)
CONFIG = DecoderConfig(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    recurrent=(0,),
    mixer=NET,
    output_gate=True,
    norm_offset=True,
    qk_norm=True,
    initializer_range=0.4,
)
B, CAPACITY = 3, 96
TEXT = np.random.default_rng(0).integers(0, 50, (B, 80))


@functools.cache
def model():
    """Not made when the file is collected; a test makes its cache, and so this, before it traces."""
    return Decoder(CONFIG)


read = jax.jit(lambda tokens, cache, lengths=None: model()(tokens, cache, lengths=lengths))
step = jax.jit(
    lambda tokens, cache, lengths=None: model()(tokens, cache, lengths=lengths, steps=True)
)


def new_cache(policy=None, batch=B):
    policy = kvjax.Full() if policy is None else policy
    return kvjax.init(policy, model().spec(batch, CAPACITY), layers=CONFIG.layers)


def filled(lengths=(20, 5, 11), policy=None):
    lengths = np.asarray(lengths)
    return read(TEXT[:, : lengths.max()], new_cache(policy), lengths)[1]


def next_logits(cache, lengths):
    """Logits f32[B, V] after the token at `lengths` of each row."""
    tokens = np.take_along_axis(TEXT, np.asarray(lengths)[:, None], axis=1)
    return np.asarray(read(tokens, cache)[0][:, 0])


def test_policies_of_a_cache_go_to_the_layers_with_attention():
    spec = dataclasses.replace(
        model().spec(B, CAPACITY), recurrent=RecurrentLayers(NET, (0, 2))
    )

    def four_layers(policy):
        cache = kvjax.init(policy, spec, layers=4)
        return [type(layer.policy).__name__ for layer in cache.layers]

    fier = presets.fier(32, group=8, chunk=16, layers=presets.Layers(dense=1))
    assert four_layers(fier) == ["GatedDelta", "Full", "GatedDelta", "Retrieval"]
    assert four_layers([kvjax.Full()] * 2)[1::2] == ["Full", "Full"]
    with pytest.raises(ValueError, match=r"3 policies for layers=4 of which 2 have attention"):
        four_layers([kvjax.Full()] * 3)
    with pytest.raises(
        ValueError,
        match=r"first 2 layers and layers=4 of which 2 have attention, so no layer uses",
    ):
        four_layers(presets.fier(32, layers=presets.Layers(dense=2)))


def test_memory_of_a_state_does_not_grow_with_the_capacity():
    small, large = (
        kvjax.init(kvjax.Full(), model().spec(1, n), layers=2).layers for n in (64, 4096)
    )
    assert small[0].nbytes == large[0].nbytes
    assert large[1].nbytes.device > 50 * small[1].nbytes.device
    assert NET.bytes_per_token(model().spec(1, 64)) == 0
    whole = kvjax.init(kvjax.Full(), model().spec(1, 64), layers=2)
    assert whole.nbytes.device == sum(layer.nbytes.device for layer in whole.layers)


def test_rows_are_taken_repeated_and_inserted_with_their_states():
    lengths = np.array([20, 5, 11])
    cache = filled(lengths)
    wanted = next_logits(cache, lengths)
    order = np.array([2, 0, 0])
    taken = kvjax.take_rows(cache, order)
    tokens = np.take_along_axis(TEXT, lengths[:, None], axis=1)[order]
    logits = read(tokens, taken)[0][:, 0]
    np.testing.assert_allclose(logits, wanted[order], atol=1e-5)

    one = kvjax.take_rows(cache, [1])
    other = kvjax.insert(filled((3, 40, 2)), one, 2)
    found = read(np.repeat(TEXT[1:2, 5:6], B, axis=0), other)[0][2, 0]
    np.testing.assert_allclose(found, wanted[1], atol=1e-5)
    assert other.length.tolist() == [3, 40, 5]


def test_rows_ignore_other_rows_to_the_bit():
    lengths = np.array([20, 5, 11])
    other = kvjax.insert(filled(lengths), kvjax.take_rows(filled((9, 30, 1)), [1]), 0)
    one, two = next_logits(filled(lengths), lengths), next_logits(other, lengths)
    np.testing.assert_array_equal(one[1:], two[1:])


def test_drafts_are_taken_back_up_to_the_last_flush():
    lengths = np.array([20, 5, 11])
    cache = filled(lengths)
    wanted = next_logits(cache, lengths)
    tokens = np.stack([row[n : n + 6] for row, n in zip(TEXT, lengths, strict=True)])
    count = np.array([6, 2, 4])
    further = step(tokens, cache, count)[1]
    np.testing.assert_array_equal(further.length, lengths + count)
    back = kvjax.rollback(further, lengths)
    np.testing.assert_allclose(next_logits(back, lengths), wanted, atol=1e-5)
    assert kvjax.room(further).tolist() == (Recurrent.newest - count).tolist()
    with pytest.raises(ValueError, match=r"it holds 26, and can go back to 20"):
        kvjax.rollback(further, lengths - 1)
    with pytest.raises(ValueError, match=r"keeps a state of all of them: read the shorter"):
        kvjax.truncate(cache, lengths - 1)


def test_tokens_without_room_are_reported():
    cache = filled((4, 4, 4))
    for i in range(Recurrent.newest // 16):
        cache = step(TEXT[:, 4 + 16 * i : 20 + 16 * i], cache)[1]
    assert kvjax.any_full(cache)
    layer = cache.layers[0]
    inputs = jax.tree.map(
        lambda x: jnp.zeros((B, 1, *x.shape[1:])),
        (NET.empty(B, np.dtype("float32")).inputs[:, 0], *[jnp.zeros((B, 2))] * 2),
    )
    from kvjax.models.gated_delta import DeltaInputs

    _, full = jax.jit(advance)(layer, DeltaInputs(*inputs), jnp.ones((3, NET.channels)))
    with pytest.raises(RuntimeError, match=r"dropped tokens"):
        kvjax.raise_on_overflow(full)
    kvjax.raise_on_overflow(read(TEXT[:, 40:41], cache)[1])  # a step flushes first


def test_saved_caches_come_back_and_other_states_are_named(tmp_path):
    lengths = np.array([20, 5, 11])
    cache = step(TEXT[:, 20:23], filled(lengths))[1]
    kvjax.save(tmp_path, cache)
    like = jax.eval_shape(new_cache)
    again = kvjax.restore(tmp_path, like)
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    larger = dataclasses.replace(NET, value_dim=8)
    spec = dataclasses.replace(cache.spec, recurrent=RecurrentLayers(larger, (0,)))
    with pytest.raises(ValueError, match=r"policy.value_dim is 6 in the save, 8 wanted"):
        kvjax.restore(tmp_path, kvjax.init(kvjax.Full(), spec, layers=2))


def test_cache_grows_with_its_states():
    lengths = np.array([20, 5, 11])
    cache = filled(lengths)
    grown = kvjax.grow(cache, 2 * CAPACITY)
    np.testing.assert_allclose(
        next_logits(grown, lengths), next_logits(cache, lengths), atol=1e-5
    )


def test_many_steps_are_one_scan_that_updates_in_place():
    @partial(jax.jit, donate_argnums=0)
    def run(cache, tokens):
        def one(cache, token):
            logits, cache = model()(token[:, None], cache, last_logits=True)
            return cache, logits

        return jax.lax.scan(one, cache, tokens.T)

    cache = filled((4, 4, 4))
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), cache)
    after, logits = run(cache, TEXT[:, 4:74])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == shapes
    whole = jax.jit(lambda tokens: model()(tokens)[0])
    wanted = np.asarray(whole(TEXT[:, :74]))[:, 4:]
    np.testing.assert_allclose(np.moveaxis(logits, 0, 1), wanted, atol=1e-3)
    kvjax.raise_on_overflow(after)


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ("fier:budget=96,group=8,chunk=16,dense_layers=0", True),
        ("freekv:budget=96,sink=8,local=16,page=8,chunk=16,dense_layers=0", False),
    ],
)
def test_methods_apply_to_the_layers_with_attention(text, drafts):
    """With room for all tokens they are full attention; drafts need caches that take tokens
    back.
    """
    policy = presets.parse(text)
    cache, full = new_cache(policy), new_cache()
    for part in (slice(0, 60), *(slice(i, i + 1) for i in range(60, 70))):
        logits, cache = read(TEXT[:, part], cache)
        wanted, full = read(TEXT[:, part], full)
    np.testing.assert_allclose(logits, wanted, atol=1e-3)
    lengths = np.asarray(cache.length)
    if drafts:
        kvjax.rollback(cache, lengths)
    else:
        with pytest.raises(ValueError, match=r"rollback needs a policy that can take back"):
            kvjax.rollback(cache, lengths)


def test_model_drafts_for_itself_with_the_selection_of_its_attention():
    prompt = [row[:40].tolist() for row in TEXT]
    policy = presets.parse("fier:budget=16,local=4,sink=2,group=8,chunk=16,dense_layers=0")
    whole = kvjax.generate(model(), new_cache(), prompt, max_new_tokens=20, measure=True)
    drafted = kvjax.generate(
        model(), new_cache(policy), prompt, max_new_tokens=20, draft=SelfDraft(tokens=3)
    )
    np.testing.assert_array_equal(drafted.tokens, whole.tokens)
    assert drafted.speculation.drafted > 0
    assert whole.attended.shape == (1,)  # by layer with attention


def test_features_for_attention_alone_are_refused_in_words():
    with pytest.raises(ValueError, match=r"small_slots are for models whose layers all have"):
        with_small_slots(new_cache(), {32: 2})
    with pytest.raises(
        ValueError, match=r"cannot share a prefix: it evicts tokens, .* a state"
    ):
        prefixed_like(new_cache(), 16, prefixes=1)


def test_wrong_uses_say_what_to_do():
    spec = model().spec(B, CAPACITY)
    layer = kvjax.init_layer(NET, spec)
    q = jnp.ones((B, 2, 4, 8))
    k = jnp.ones((B, 2, 2, 8))
    with pytest.raises(ValueError, match=r"keeps a state instead of keys and values"):
        kvjax.attention(layer, q, k, k)
    with pytest.raises(ValueError, match=r"kvjax.attention takes this one"):
        advance(kvjax.init_layer(kvjax.Full(), spec), q)
    conv = kvjax.init_layer(ShortConv(channels=2), spec)
    with pytest.raises(ValueError, match=r"takes 1 to 16 tokens per row, got T=17"):
        advance(conv, jnp.ones((B, 17, 2)), (jnp.ones((3, 2)), None), steps=True)
    with pytest.raises(ValueError, match=r"numbers of layers in a tuple, in order"):
        RecurrentLayers(NET, (2, 1))
    with pytest.raises(ValueError, match=r"of which at least one has attention"):
        kvjax.init(kvjax.Full(), spec, layers=1)
    with pytest.raises(ValueError, match=r"give both, or none of them"):
        dataclasses.replace(CONFIG, recurrent=())
    with pytest.raises(ValueError, match=r"leaves none of 2 layers with attention"):
        dataclasses.replace(CONFIG, recurrent=(0, 1))
