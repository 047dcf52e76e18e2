"""LogQuant against Algorithm 1 on plain lists, KIVI against its residual rule, and that both
quantise a token once.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import kvjax.stores.quantized
from kvjax import CacheSpec, Fifo, LogSparse, Quantized, presets
from kvjax.numerics.quant import split_scales
from kvjax.testing import _drive as drive
from kvjax.testing import check_policy
from tests.oracles import asymmetric, log_sparse, residual


def positions_as_values(spec: CacheSpec) -> drive.Tokens:
    """Tokens whose values are all their own position: a constant group, which is stored
    exactly.
    """
    tokens = drive.random_tokens(spec)
    at = np.arange(spec.capacity, dtype=np.float32)[None, :, None, None]
    return drive.Tokens(
        tokens.q, tokens.k, np.broadcast_to(at, tokens.v.shape).astype(tokens.v.dtype)
    )


@jax.jit
def flushed(cache: kvjax.LayerCache) -> tuple[jax.Array, ...]:
    """After a flush: values in the recent block and their counts, those in the store and their
    counts."""
    st = kvjax.flush(cache).state
    return st.recent.v, st.recent.count, split_scales(st.store.v.scales)[1], st.store.count


def held(cache: kvjax.LayerCache) -> list[tuple[list[int], list[int]]]:
    """Positions in the recent block and in the store after a flush, of each row, in order of
    slots, read from the values."""
    recent, recents, stored, count = map(np.asarray, flushed(cache))
    return [
        (
            recent[row, 0, : recents[row], 0].astype(int).tolist(),
            stored[row, 0, : count[row], 0].astype(int).tolist(),
        )
        for row in range(len(count))
    ]


def behind(sink: int, rule: Callable[[int, int], tuple[list[int], list[int]]]):
    """The rule for the tokens past the first `sink`."""

    def shifted(size: int, tokens: int) -> tuple[list[int], list[int]]:
        exact, quantised = rule(size, max(tokens - sink, 0))
        return [p + sink for p in exact], [p + sink for p in quantised]

    return shifted


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("policy", "rule", "size"),
    [
        (presets.kivi(residual=8, group=4, sink=3, value_bits=4).rest, behind(3, residual), 8),
        (presets.logquant(window=4, group=8).rest, log_sparse, 4),
        (presets.logquant(window=6, group=8).rest, log_sparse, 6),
        (presets.logquant(window=5, bits=8, key_axis="token").rest, log_sparse, 5),
        (presets.kivi(residual=8, group=4).rest, residual, 8),
    ],
    ids=["kivi 8 behind 3", "logquant 4", "logquant 6", "logquant 5 by token", "kivi 8"],
)
def test_every_token_is_where_the_rule_puts_it(policy, rule, size: int) -> None:
    """Prompts of every length from 1 to 5W, a row each, and 5W decode steps after."""
    lengths = np.arange(1, 5 * size + 1)
    spec = CacheSpec(
        batch=len(lengths),
        q_heads=1,
        kv_heads=1,
        head_dim=8,
        capacity=12 * size,
        dtype=jnp.float32,
    )
    tokens = positions_as_values(spec)
    cache, _ = drive.fill(kvjax.init_layer(policy, spec), tokens, lengths)
    for i in range(5 * size + 1):
        for n, found in zip(lengths + i, held(cache), strict=True):
            assert found == rule(size, n), f"{n} tokens, {i} of them decoded"
        _, cache, _ = drive.step(cache, tokens, lengths + i)
    kvjax.raise_on_overflow(cache)


@pytest.mark.parametrize("window", [1, 2, 3, 4, 7, 42])
def test_two_to_three_windows_are_exact_and_the_newest_are_adjacent(window: int) -> None:
    demote = LogSparse(window=window)
    leaving, staying = demote.leaving(window), demote.staying(window)
    assert sorted([*leaving, *staying]) == list(range(demote.slots(window)))
    assert len(leaving) == demote.leave == window
    for tokens in range(3 * window, 30 * window):
        exact, quantised = log_sparse(window, tokens)
        assert 2 * window <= len(exact) < 3 * window
        assert len(quantised) % window == 0
        assert exact[-window:] == list(range(tokens - window, tokens))
        assert exact[0] == 0


@pytest.mark.parametrize(
    "policy",
    [presets.logquant(window=8, group=8).rest, presets.kivi(residual=8, group=8).rest],
    ids=["logquant", "kivi"],
)
def test_a_token_is_quantised_once(policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the tokens that run through the quantiser, and compares all codes before and after
    each step.
    """
    runs: list[int] = []
    original = kvjax.stores.quantized.quantize

    def counted(x, *args, **kwargs):
        jax.debug.callback(lambda size=x.shape[2]: runs.append(size))
        return original(x, *args, **kwargs)

    monkeypatch.setattr(kvjax.stores.quantized, "quantize", counted)
    spec = CacheSpec(
        batch=1, q_heads=2, kv_heads=1, head_dim=16, capacity=100, dtype=jnp.float32
    )
    tokens, cache = drive.random_tokens(spec), kvjax.init_layer(policy, spec)
    step = jax.jit(
        lambda *args: kvjax.attention(*args)
    )  # a trace of its own, with the counter in it
    for n in range(80):
        before = cache.state.store
        _, cache = step(cache, *tokens.at(np.array([[n]])))
        after = cache.state.store
        for a, b in zip(
            jax.tree.leaves((before.k, before.v)),
            jax.tree.leaves((after.k, after.v)),
            strict=True,
        ):
            kept = int(before.count[0]) * a.shape[2] // before.slots
            np.testing.assert_array_equal(
                np.asarray(a)[:, :, :kept], np.asarray(b)[:, :, :kept]
            )
        jax.effects_barrier()
        assert sum(runs) == 2 * int(after.count[0]), "keys and values of each stored token once"
    assert int(cache.state.store.count[0]) >= 6 * policy.demote.leave
    exact = int(cache.state.recent.count[0])
    assert exact + int(cache.state.store.count[0]) == 80
    assert cache.state.recent.slots == policy.demote.slots(policy.local)
    assert not hasattr(cache.state.store, "exact")


def as_stored(x: np.ndarray, tokens: int, channels: int) -> np.ndarray:
    """x [S, D] in 2 bits and back, whole groups of tokens."""
    codes, scales, zeros = asymmetric(x, 2, tokens, channels)
    return codes * scales + zeros


@pytest.mark.parametrize("name", ["kivi, short window behind 3", "logquant"])
@pytest.mark.parametrize("prompt", [1, 61])
def test_values_are_exact_for_a_window_of_their_own(name: str, prompt: int) -> None:
    """Steps of one prompt against numpy; keys are rounded by the rule of the method, values by
    age alone.
    """
    sink, W = (3 if "behind" in name else 0), 8
    newest = 5 if sink else W
    policy = (
        presets.logquant(window=W, group=8, value_window=newest).rest
        if name == "logquant"
        else presets.kivi(residual=W, group=4, value_window=newest, sink=sink).rest
    )
    # tokens of a key's group, channels of a value's
    groups = (W, 8) if name == "logquant" else (4, 4)
    spec = CacheSpec(
        batch=1, q_heads=2, kv_heads=1, head_dim=8, capacity=120, dtype=jnp.float32
    )
    tokens = drive.random_tokens(spec)
    cache, _ = drive.fill(kvjax.init_layer(policy, spec), tokens, np.array([prompt]))
    for n in range(prompt, prompt + 40):
        out, cache, info = drive.step(cache, tokens, np.array([n]))
        k, v = (np.array(a[0, : n + 1, 0], np.float64) for a in (tokens.k, tokens.v))
        if name == "logquant":
            rounded = np.array(log_sparse(W, n)[1], int)
        else:
            rounded = np.arange(sink, sink + max(n - sink, 0) // W * W)
        k[rounded] = as_stored(k[rounded], groups[0], 1)
        old = np.arange(sink, max(n + 1 - newest, sink))
        v[old] = as_stored(v[old], 1, groups[1])
        logits = np.asarray(tokens.q[0, n], np.float64) @ k.T / np.sqrt(8)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        np.testing.assert_allclose(
            out[0], weights @ v / weights.sum(axis=1, keepdims=True), atol=2e-5, err_msg=str(n)
        )
        assert info.attended[0, 0] == n + 1


def test_a_value_window_beyond_the_local_one_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"value_window=9\) keeps more values than the local window of 8"
    ):
        presets.logquant(window=8, value_window=9)


@pytest.mark.thorough
@pytest.mark.parametrize("make", [presets.logquant, presets.kivi], ids=["logquant", "kivi"])
def test_more_bits_come_closer_to_full_attention(make) -> None:
    """On random tokens, where attention averages much away and so errors weigh most."""
    spec = CacheSpec(
        batch=2, q_heads=8, kv_heads=2, head_dim=64, capacity=600, dtype=jnp.float32
    )
    tokens, lengths = drive.random_tokens(spec), np.array([570, 400])
    want, _, _ = drive.step(
        drive.fill(kvjax.init_layer(kvjax.Full(), spec), tokens, lengths)[0], tokens, lengths
    )
    errors = []
    for bits in (2, 4, 8):
        cache, _ = drive.fill(kvjax.init_layer(make(bits=bits).rest, spec), tokens, lengths)
        out, _, info = drive.step(cache, tokens, lengths)
        errors.append(np.sqrt(np.mean((out - want) ** 2) / np.mean(want**2)))
        assert (np.asarray(info.attended) == lengths[:, None] + 1).all()
    # Two bits more are steps of a fifth, four more of a seventeenth.
    assert errors[1] < errors[0] / 4, errors
    assert errors[2] < errors[1] / 10, errors


@pytest.mark.parametrize(
    "preset", [presets.logquant(), presets.kivi()], ids=["logquant", "kivi"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_step_at_32k_tokens_holds_no_decoded_cache(preset: kvjax.PerLayer, dtype: str) -> None:
    spec = CacheSpec(batch=1, q_heads=32, kv_heads=8, head_dim=128, capacity=32768, dtype=dtype)
    cache = jax.eval_shape(functools.partial(kvjax.init_layer, preset.rest, spec))
    q, k = (jax.ShapeDtypeStruct((1, 1, heads, 128), spec.dtype) for heads in (32, 8))
    step = jax.jit(kvjax.attention, donate_argnums=0)
    memory = step.lower(cache, q, k, k).compile().memory_analysis()
    size = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(cache))
    assert size <= 1.1 * preset.rest.bytes_per_token(spec) * 32768
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes <= size // 4, (
        f"{memory.temp_size_in_bytes} temp bytes beside {size} of cache"
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "preset", [presets.logquant(), presets.kivi()], ids=["logquant", "kivi"]
)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "dtype"),
    [(7, 1, 128, "bfloat16"), (2, 2, 64, "float16"), (8, 2, 128, "float32")],
)
def test_defaults_attend_to_everything_as_stored(
    preset, q_heads: int, kv_heads: int, head_dim: int, dtype: str
) -> None:
    spec = CacheSpec(
        batch=7,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        capacity=440,
        dtype=dtype,
    )
    check_policy(
        preset.rest, spec, laws=["budget_of_all_is_dense_attention"]
    ).raise_for_failures()


def test_presets_have_the_papers_numbers() -> None:
    logquant, kivi = presets.logquant().rest, presets.kivi().rest
    assert isinstance(logquant, kvjax.Compressed)
    assert isinstance(kivi, kvjax.Compressed)
    assert logquant.demote == LogSparse(window=128 // 3)
    assert logquant.store == Quantized(bits=2, key_axis="channel", key_group=42, value_group=64)
    assert kivi.demote == Fifo(leave=128)
    assert kivi.store == Quantized(bits=2, key_axis="channel", key_group=32)
    spec = CacheSpec(batch=1, q_heads=32, kv_heads=8, head_dim=128, capacity=32768)
    for policy, bits in ((logquant, 2 + 32 / 42 + 2 + 32 / 64), (kivi, 2 + 1 + 2 + 1)):
        assert np.isclose(policy.bytes_per_token(spec), 8 * 128 * bits / 8)
    released = presets.logquant(key_axis="token").rest
    assert released.store == dataclasses.replace(logquant.store, key_axis="token", key_group=64)


def test_dense_layers_come_first() -> None:
    layered = presets.logquant(layers=presets.Layers(dense=1))
    assert layered.policy(0) == kvjax.Full()
    assert layered.policy(1) == presets.logquant().rest


def test_sliding_window_over_unordered_history_is_refused() -> None:
    spec = CacheSpec(batch=1, q_heads=2, kv_heads=1, head_dim=16, capacity=300)
    cache = kvjax.init_layer(presets.logquant().rest, spec)
    q, k = (jnp.zeros((1, 1, heads, 16), jnp.bfloat16) for heads in (2, 1))
    with pytest.raises(ValueError, match=r"forgets the order of tokens.*window of 64"):
        kvjax.attention(cache, q, k, k, window=64)


def test_the_evicting_variant_holds_the_exact_tokens_of_the_oracle() -> None:
    """Whenever the block is full; in between it has these and more."""
    spec, W = (
        kvjax.CacheSpec(
            batch=1, q_heads=2, kv_heads=1, head_dim=8, capacity=140, dtype="float32"
        ),
        7,
    )
    tokens = drive.random_tokens(spec)
    for prompt in (1, 95):
        cache, _ = drive.fill(
            kvjax.init_layer(kvjax.presets.logevict(3 * W).rest, spec),
            tokens,
            np.array([prompt]),
        )
        for n in range(prompt, 130):
            _, cache, info = drive.step(cache, tokens, np.array([n]))
            held = set(np.asarray(info.positions).ravel().tolist()) - {-1}
            exact = set(log_sparse(W, n + 1)[0])
            assert exact <= held, n
            if (n + 1) % W == 0:
                block = set(log_sparse(W, n)[0]) | {n}  # before it is thinned
                assert held == block, n
