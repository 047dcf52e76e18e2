"""The hook: what it computes without a cache, with windows and scales, and what it says of bad
input.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.attention import MOST_STEPS
from kvjax.cache.cache import any_full, flushed
from kvjax.contrib.magicpig import Sampled, SimHash
from kvjax.testing import _drive as drive
from kvjax.testing import _steps, check_policy
from kvjax.testing._expect import dense
from tests.laws.cases import BASE, SPEC

attend = jax.jit(kvjax.attention, static_argnames=("first_chunk",))


def draw(
    B: int = 2, T: int = 5, N: int = 4, K: int = 2, D: int = 16, seed: int = 0
) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=(B, T, n, D)).astype(np.float32) for n in (N, K, K))


def causal(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, window: int | None = None
) -> np.ndarray:
    out = np.zeros_like(q, np.float64)
    B, T, _, D = q.shape
    for b, t in np.ndindex(B, T):
        first = 0 if window is None else max(0, t - window + 1)
        query = q[b, t] * scale * np.sqrt(D)  # `dense` divides by sqrt(D)
        out[b, t] = dense(query, k[b, first : t + 1], v[b, first : t + 1])
    return out


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("scale", [None, 0.9])
def test_no_cache_is_causal_attention(window: int | None, scale: float | None) -> None:
    q, k, v = draw()
    out, cache = kvjax.attention(None, q, k, v, window=window, scale=scale)
    assert cache is None
    np.testing.assert_allclose(out, causal(q, k, v, scale or 16**-0.5, window), atol=1e-5)


@pytest.mark.parametrize(
    "policy", [kvjax.Full(), dataclasses.replace(BASE, budget=300)], ids=["full", "fier"]
)
def test_sliding_window_in_prompt_and_decoding(policy: kvjax.Policy) -> None:
    tokens, lengths, window = drive.random_tokens(SPEC), np.array([150, 3, 61]), 40
    call = jax.jit(functools.partial(kvjax.attention_info, window=window))
    cache = kvjax.init_layer(policy, SPEC)
    held = np.zeros(3, int)
    while (held < lengths).any():
        now = np.clip(lengths - held, 0, 48)
        q, k, v = tokens.at(held[:, None] + np.arange(48))
        out, cache, _ = call(cache, q, k, v, lengths=now)
        for b in range(3):
            for t in range(0, int(now[b]), 7):
                p = held[b] + t
                low = max(0, p - window + 1)
                want = dense(tokens.q[b, p], tokens.k[b, low : p + 1], tokens.v[b, low : p + 1])
                np.testing.assert_allclose(out[b, t], want, atol=1e-5)
        held = held + now
    for i in range(30):
        out, cache, info = call(cache, *tokens.at((lengths + i)[:, None]))
        for b, p in enumerate(lengths + i):
            low = max(0, p - window + 1)
            want = dense(tokens.q[b, p], tokens.k[b, low : p + 1], tokens.v[b, low : p + 1])
            np.testing.assert_allclose(out[b, 0], want, atol=1e-5)
        assert (np.asarray(info.attended)[:, 0] == np.minimum(lengths + i + 1, window)).all()


def test_fresh_prompt_equals_a_prompt_on_an_empty_cache() -> None:
    tokens = drive.random_tokens(SPEC)
    prompt = tokens.at(np.arange(48)[None].repeat(3, 0))
    empty = kvjax.init_layer(BASE, SPEC)
    (a, cache_a), (b, cache_b) = (
        attend(empty, *prompt, first_chunk=first_chunk) for first_chunk in (True, False)
    )
    np.testing.assert_allclose(a, b, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, cache_a, cache_b)


def test_mixed_precision_keeps_the_dtype_of_queries_and_of_the_cache() -> None:
    spec = dataclasses.replace(SPEC, dtype=jnp.bfloat16)
    q, k, v = (jnp.asarray(a) for a in draw(B=3, T=60, N=8))
    for policy in (kvjax.Full(), BASE):
        out, cache = attend(kvjax.init_layer(policy, spec), q, k, v)
        out1, cache = attend(cache, q[:, :1], k[:, :1], v[:, :1])
        assert out.dtype == out1.dtype == jnp.float32
        assert all(a.dtype != jnp.float32 for a in jax.tree.leaves(cache))


def test_one_trace_over_300_steps_with_flushes() -> None:
    spec = dataclasses.replace(SPEC, capacity=400)
    cache, tokens, traces = kvjax.init(BASE, spec, layers=2), drive.random_tokens(spec), []

    @functools.partial(jax.jit, donate_argnums=0)
    def step(
        cache: kvjax.Cache, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[kvjax.Cache, jax.Array]:
        traces.append(1)
        cache = kvjax.flush(cache)
        layers = []
        for layer in cache.layers:
            q, layer = kvjax.attention(layer, q, k, v, flush=False)
            layers.append(layer)
        return dataclasses.replace(cache, layers=tuple(layers)), q

    for i in range(300):
        cache, _ = step(cache, *tokens.at(np.full((3, 1), i)))
    assert len(traces) == 1
    assert cache.length.tolist() == [300] * 3
    assert int(cache.layers[1].state.store.count[0]) == 256
    kvjax.raise_on_overflow(cache)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traced(kvjax.Retrieval):
    """A Retrieval that notes each verb that is traced."""

    def attend(self, *args: Any, **kwargs: Any) -> Any:
        TRACED.append("attend")
        return super().attend(*args, **kwargs)

    def flush(self, st: Any) -> Any:
        TRACED.append("flush")
        return super().flush(st)


TRACED: list[str] = []


@pytest.mark.parametrize("store", [kvjax.Dense(), kvjax.HostOffload()], ids=["dense", "host"])
def test_equal_layers_are_traced_once(store: kvjax.Store) -> None:
    policy = Traced(
        selector=kvjax.Exact(),
        store=store,
        budget=16,
        sink=4,
        local=4,
        demote=kvjax.Fifo(leave=8),
    )
    cache = kvjax.init(policy, SPEC, layers=3)
    q, k, v = (jnp.asarray(a) for a in draw(SPEC.batch, 1, SPEC.q_heads, SPEC.kv_heads))

    def step(cache: kvjax.Cache, q: jax.Array) -> tuple[jax.Array, kvjax.Cache]:
        after = []
        for layer in kvjax.flush(cache).layers:
            q, layer = kvjax.attention(layer, q, k, v, flush=False)
            after.append(layer)
        return q, kvjax.Cache(tuple(after))

    TRACED.clear()
    jax.jit(step).trace(cache, q)
    assert sorted(TRACED) == ["attend", "flush"]


def test_step_without_flush_drops_and_says_so() -> None:
    cache, tokens = kvjax.init_layer(BASE, SPEC), drive.random_tokens(SPEC)
    step = jax.jit(functools.partial(kvjax.attention, flush=False))
    for i in range(4 + 24 + 31 + 1):
        _, cache = step(cache, *tokens.at(np.full((3, 1), i)))
    with pytest.raises(
        RuntimeError, match=r"rows \[0, 1, 2\] dropped tokens.*flush was not called"
    ):
        kvjax.raise_on_overflow(cache)
    assert cache.length.tolist() == [59] * 3


def test_a_cache_can_promise_that_nothing_is_full() -> None:
    cache, tokens = kvjax.init(BASE, SPEC, layers=1), drive.random_tokens(SPEC)
    for i in range(4 + 24 + 31):
        assert not any_full(cache)
        _, layer = attend(cache.layers[0], *tokens.at(np.full((3, 1), i)))
        cache = kvjax.Cache((layer,))
    assert any_full(cache)
    assert any_full(cache.layers[0])
    with flushed():
        assert kvjax.flush(cache) is cache
        _, layer = attend(
            cache.layers[0], *tokens.at(np.full((3, 1), 59))
        )  # `attend` is jitted, and traced again
        assert kvjax.flush(layer) is layer
    assert layer.state.overflow.all()  # the promise was false
    _, layer = attend(cache.layers[0], *tokens.at(np.full((3, 1), 59)))
    assert not layer.state.overflow.any()
    assert not any_full(kvjax.flush(cache))
    assert not any_full(kvjax.init(kvjax.Full(), SPEC, layers=1))


def test_vmap_over_the_hook_gives_each_its_own() -> None:
    q, k, v = (np.stack([a, 2 * a]) for a in draw(B=3, T=20, N=8))
    caches = jax.tree.map(lambda a: jnp.stack([a, a]), kvjax.init_layer(BASE, SPEC))
    out, _ = jax.vmap(attend)(caches, q, k, v)
    for i in range(2):
        alone, _ = attend(kvjax.init_layer(BASE, SPEC), q[i], k[i], v[i])
        np.testing.assert_allclose(out[i], alone, atol=1e-6)


# -------------------------------------------------------------------------------------------------------- bad input


def test_batches_that_disagree_are_named() -> None:
    q, k, v = draw()
    message = "k has B=3 but q has B=2; q[2, 5, 4, 16], k[3, 5, 2, 16], v[2, 5, 2, 16]"
    with pytest.raises(ValueError, match=re.escape(message)):
        kvjax.attention(None, q, np.concatenate([k, k[:1]]), v)


def test_a_spec_keeps_its_fields_alone() -> None:
    """Another spec can be made from `vars` of one that was used."""
    spec = dataclasses.replace(SPEC)
    kvjax.attention(kvjax.init_layer(kvjax.Full(), spec), *draw(B=3, N=8))
    assert kvjax.CacheSpec(**vars(spec)) == spec


def test_cache_of_another_size_is_named() -> None:
    q, k, v = draw(B=3, N=8, D=8)
    with pytest.raises(ValueError, match=r"q has D=8 but the cache has D=16"):
        kvjax.attention(kvjax.init_layer(kvjax.Full(), SPEC), q, k, v)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": np.array([1, 2, 3])}, r"lengths must have shape \[B=2\], got \[3\]"),
        (
            {"lengths": np.array([1.0, 2.0])},
            r"lengths must be integers, got float.*; convert it with jnp\.asarray",
        ),
        ({"active": np.array([True, False])}, r"active is for decode steps \(T=1\), got T=5"),
        ({"window": 0}, r"window=.*at least 1, got 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kvjax.attention(None, *draw(), **change)


def test_heads_that_do_not_divide_are_named() -> None:
    q, k, v = draw(N=5)
    with pytest.raises(
        ValueError, match=r"q has N=5 heads, which must be a multiple of k's K=2 kv heads"
    ):
        kvjax.attention(None, q, k, v)


def test_rank_is_checked() -> None:
    q, k, v = draw()
    with pytest.raises(ValueError, match=r"k must have the 4 dimensions \[B, T, K, D\]"):
        kvjax.attention(None, q, k[0], v)


def test_insert_refuses_what_does_not_fit() -> None:
    cache = kvjax.init(BASE, SPEC, layers=2)
    one = dataclasses.replace(SPEC, batch=1)
    with pytest.raises(ValueError, match=r"same layers, policies, capacity"):
        kvjax.insert(cache, kvjax.init(kvjax.Full(), one, layers=2), 0)
    with pytest.raises(ValueError, match=r"prefix must have batch 1, got 3"):
        kvjax.insert(cache, cache, 0)
    with pytest.raises(ValueError, match=r"row=3; the cache has rows 0 to 2"):
        kvjax.insert(cache, kvjax.init(BASE, one, layers=2), 3)


def test_unknown_method_gives_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"unknown cache 'fierr'; did you mean 'fier'\?"):
        kvjax.presets.find("fierr")


def test_bytes_a_token_are_what_the_arrays_take() -> None:
    spec = dataclasses.replace(SPEC, batch=1, capacity=4096, dtype=jnp.bfloat16)
    policy = kvjax.presets.fier(budget=64).rest
    layer = kvjax.init_layer(policy, spec)
    # without the count
    stored = kvjax.memory.nbytes((layer.state.store, layer.state.index)).device - 4
    assert stored / layer.state.store.slots == policy.bytes_per_token(spec)
    full = kvjax.init_layer(kvjax.Full(), spec)
    assert kvjax.memory.nbytes(
        full.state.tokens
    ).device - 4 == 4096 * kvjax.Full().bytes_per_token(spec)


def test_bytes_are_counted_where_they_lie() -> None:
    host = jax.device_put(jnp.zeros(10), jax.memory.Space.Host)
    assert kvjax.memory.nbytes({"a": jnp.zeros(3), "b": host}) == (12, 40)


def test_a_plain_list_of_policies_is_one_for_each_layer() -> None:
    policies = [kvjax.Full(), BASE, kvjax.Compressed()]
    spec = dataclasses.replace(SPEC, head_dim=32)
    cache = kvjax.init(policies, spec, layers=3)
    assert [layer.policy for layer in cache.layers] == policies
    assert jax.tree.structure(cache) == jax.tree.structure(
        kvjax.init(tuple(policies), spec, layers=3)
    )
    with pytest.raises(
        ValueError, match=r"init got 3 policies for layers=4; give one for each layer"
    ):
        kvjax.init(policies, spec, layers=4)
    with pytest.raises(
        ValueError, match=r"init\(policy=\.\.\.\)\[1\] must be a policy, got the string 'fier'"
    ):
        kvjax.init([BASE, "fier"], spec, layers=2)  # type: ignore[list-item]


def test_one_token_of_prompt_is_read_exactly_by_name() -> None:
    """And by selection as a step."""
    tokens, n = drive.random_tokens(SPEC), np.array([150, 150, 150])
    cache, _ = drive.fill(
        kvjax.init_layer(dataclasses.replace(BASE, budget=32), SPEC), tokens, n
    )
    out, after = jax.jit(kvjax.prefill)(cache, *tokens.at(n[:, None]))
    want = dense(tokens.q[0, 150], tokens.k[0, :151], tokens.v[0, :151])
    np.testing.assert_allclose(out[0, 0], want, atol=1e-5)
    assert np.abs(np.asarray(drive.step(cache, tokens, n)[0][0]) - want).max() > 1e-3
    assert after.length.tolist() == [151] * 3


@pytest.mark.parametrize("policy", ["zones", "sampled"])
def test_steps_within_the_room_can_be_taken_back(policy: str) -> None:
    """Rows that have taken their tokens are full then, and stay as they are while nothing else
    happens.
    """
    made: kvjax.Policy = kvjax.Compressed(store=kvjax.Dense(), demote=kvjax.Fifo(leave=8))
    if policy == "sampled":
        hashing = SimHash(bits=2, tables=8, learn=8)
        made = Sampled(hashing=hashing, budget=60, sink=0, local=1, demote=kvjax.Fifo(leave=8))
    spec = dataclasses.replace(SPEC, batch=2, capacity=64)
    cache = kvjax.init_layer(made, spec)
    qkv = [
        np.ones((2, 6, n, spec.head_dim), np.float32)
        for n in (spec.q_heads, spec.kv_heads, spec.kv_heads)
    ]
    _, cache = kvjax.prefill(cache, *qkv, lengths=[6, 6])
    room = np.asarray(kvjax.room(cache))
    assert (room < 4).all()
    _, cache = kvjax.decode(cache, *(a[:, :4] for a in qkv), lengths=room)
    assert kvjax.rollback(cache, [7, 6]).length.tolist() == [7, 6]


def test_rollback_out_of_reach_is_refused_or_reported() -> None:
    tokens, n = drive.random_tokens(SPEC), np.array([150, 20, 0])
    cache, _ = drive.fill(kvjax.init_layer(BASE, SPEC), tokens, n)
    with pytest.raises(
        ValueError,
        match=r"rollback of row 0 to 3 tokens: it holds 150, and can go back to 123.*kvjax.room says",
    ):
        kvjax.rollback(cache, jnp.array([3, 20, 0]))
    with pytest.raises(
        ValueError, match=r"rollback of row 1 to 21 tokens: it holds 20, and can go back to 0"
    ):
        kvjax.rollback(cache, [150, 21, 0])
    with pytest.raises(ValueError, match=r"lengths=\.\.\.\) must be integers \[B=3\]"):
        kvjax.rollback(cache, [1])
    after = jax.jit(kvjax.rollback)(cache, jnp.array([3, 7, 0]))
    assert after.length.tolist() == [150, 7, 0]
    with pytest.raises(
        RuntimeError, match=r"rows \[0\].*rollback got a length that is out of reach"
    ):
        kvjax.raise_on_overflow(after)
    assert kvjax.room(cache).tolist() == [5, 39, 59]


@pytest.mark.parametrize(
    "policy",
    [kvjax.presets.tova(64).rest, kvjax.presets.freekv(72, page=8, sink=4, local=24).rest],
    ids=["tova", "freekv"],
)
def test_policies_that_forget_refuse_a_rollback(policy: kvjax.Policy) -> None:
    cache = kvjax.init_layer(policy, SPEC)
    for verb in (kvjax.room, lambda cache: kvjax.rollback(cache, [0, 0, 0])):
        with pytest.raises(
            ValueError, match=r"needs a policy that can take back tokens.*use Full, Retrieval"
        ):
            verb(cache)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "policy",
    [BASE, kvjax.Full(), kvjax.presets.kivi().rest, kvjax.presets.tova(64).rest],
    ids=lambda p: type(p).__name__,
)
def test_the_most_tokens_of_a_call_are_as_many_steps(
    policy: kvjax.Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The law takes 5 at a time; here a chunk leaves the recent block within 16."""
    monkeypatch.setattr(_steps, "STEPS", MOST_STEPS)
    check_policy(policy, SPEC, laws=["decode_equals_single_steps"]).raise_for_failures()


def test_decode_says_what_it_takes() -> None:
    cache = kvjax.init_layer(kvjax.Full(), SPEC)
    q, k, v = draw(B=3, T=17, N=8)
    with pytest.raises(
        ValueError,
        match=r"decode takes 1 to 16 tokens per row, got T=17; read a prompt with kvjax.prefill",
    ):
        kvjax.decode(cache, q, k, v)
    with pytest.raises(
        ValueError,
        match=r"decode takes a kvjax.LayerCache, got .*; kvjax.generation.decode takes a model",
    ):
        kvjax.decode(lambda tokens: None, q, k, v)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError,
        match=r"prefill takes a kvjax.LayerCache, got None; kvjax.init_layer makes one",
    ):
        kvjax.prefill(None, q, k, v)  # type: ignore[arg-type]


def test_a_prompt_read_between_the_steps_of_others_joins_them_as_if_read_alone() -> None:
    policy = kvjax.Retrieval(
        selector=kvjax.Fier(group=8), budget=16, sink=2, local=4, demote=kvjax.Fifo(leave=8)
    )
    spec = kvjax.CacheSpec(
        batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=64, dtype=jnp.float32
    )
    attention, insert = jax.jit(kvjax.attention), jax.jit(kvjax.insert)
    prompt = [
        jax.random.normal(jax.random.key(i), (1, 36, heads, 16))
        for i, heads in enumerate((4, 2, 2))
    ]
    steps = [
        jax.random.normal(jax.random.key(i), (2, 8, heads, 16))
        for i, heads in enumerate((4, 2, 2))
    ]
    running, request = (
        kvjax.init_layer(policy, spec),
        kvjax.init_layer(policy, dataclasses.replace(spec, batch=1)),
    )
    alone = running
    for t in range(3):
        _, request = attention(request, *(a[:, 12 * t : 12 * t + 12] for a in prompt))
        own = [a[:, t : t + 1] for a in steps]
        out, running = attention(running, *own, active=jnp.array([True, False]))
        want, alone = attention(alone, *own, active=jnp.array([True, False]))
        np.testing.assert_array_equal(out[0], want[0])
    running = insert(running, request, jnp.array(1))
    for t in range(3, 8):
        own = [a[:, t : t + 1] for a in steps]
        out, running = attention(running, *own, active=jnp.array([True, True]))
        first, alone = attention(alone, *own, active=jnp.array([True, True]))
        second, request = attention(request, *(a[1:] for a in own))
        np.testing.assert_array_equal(out[0], first[0])
        np.testing.assert_allclose(out[1], second[0], atol=1e-5)
    assert running.length.tolist() == [8, 41]


@pytest.mark.parametrize(
    "policy",
    [
        kvjax.Full(),
        BASE,
        kvjax.Compressed(),
        Sampled(hashing=SimHash(bits=4, tables=8), budget=330),
    ],
    ids=["full", "fier", "codes", "magicpig"],
)
def test_rows_that_take_no_exact_step_read_nothing(policy: kvjax.Policy) -> None:
    """A row that has ended costs the others' verification no reads."""
    tokens = drive.random_tokens(SPEC)
    cache, _ = drive.fill(kvjax.init_layer(policy, SPEC), tokens, np.array([150, 61, 90]))
    new = tokens.at(np.array([150, 61, 90])[:, None] + np.arange(3))
    out, after = kvjax.decode(cache, *new, lengths=[3, 0, 1], exact=True)
    assert np.all(np.asarray(out[1]) == 0)
    assert np.all(np.any(np.asarray(out)[[0, 2]] != 0, axis=(1, 2, 3)))
    np.testing.assert_array_equal(after.length, [153, 61, 91])


def test_exact_steps_of_several_tokens_read_each_zone_once() -> None:
    """One kernel takes the queries of all of them; another would read the recent block for each."""

    def new(heads: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((SPEC.batch, 3, heads, SPEC.head_dim), SPEC.dtype)

    cache = jax.eval_shape(lambda: kvjax.init_layer(BASE, SPEC))
    k = new(SPEC.kv_heads)
    with kvjax.ops.explained() as calls:
        jax.eval_shape(
            lambda *a: kvjax.decode(*a, exact=True, flush=False)[0],
            cache,
            new(SPEC.q_heads),
            k,
            k,
        )
    assert {call.op for call in calls if call.op.startswith("attend")} == {"attend_span"}


def test_truncate_says_why_it_cannot_shorten_a_cache() -> None:
    spec = kvjax.CacheSpec(batch=1, q_heads=4, kv_heads=2, head_dim=32, capacity=256)
    refused = {
        kvjax.Evicting(
            evictor=kvjax.Sliding(), budget=32
        ): r"truncate needs a policy that can shorten its cache",
        kvjax.presets.logquant().rest: r"LogSparse\(.*forgets the order of tokens",
        kvjax.presets.kivi().rest: r"Quantized\(.*does not return keys and values unchanged",
    }
    for policy, why in refused.items():
        with pytest.raises(ValueError, match=why):
            kvjax.truncate(kvjax.init_layer(policy, spec), jnp.zeros(1, jnp.int32))
    cache = kvjax.init_layer(kvjax.Full(), spec)
    with pytest.raises(ValueError, match="truncate of row 0 to 3 tokens: it holds 0"):
        kvjax.truncate(cache, [3])
    assert bool(jax.jit(kvjax.truncate)(cache, jnp.array([3])).state.overflow[0])
