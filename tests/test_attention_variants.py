"""What models add to attention: sink logits, soft caps, values of another size than keys, and
layers with a window.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.numerics.blocks import Block
from kvjax.numerics.partial import Logits, Span
from kvjax.testing._drive import CHUNK, attending_to_all, new_cache, random_tokens
from kvjax.testing._expect import as_stored, tolerance
from tests.laws.cases import CASES, Case

CAP, SCALE = 1.5, 0.4  # most logits are above the cap before it
VALUES_OF_8 = ["full", "fier with sink and window"]
QUICK = [
    "pages in host memory",
    "fier in host memory, hot set",
    "pages per query head a step late, hot set, 7 on 1, bf16",
    "all in host memory",
    "shadowkv, budget 96",
    "turboquant preset, 3 and 2 bits",
    "signs of turboquant's keys",
    "paris over turboquant on the host, bf16",
]
OTHERS = {
    "kivi": Case(kvjax.presets.kivi(residual=16, group=8).rest),
    "h2o": Case(kvjax.Evicting(evictor=kvjax.HeavyHitter(), budget=200)),
    "adakv": Case(kvjax.presets.adakv(budget=200).rest),
    "duo": Case(
        kvjax.PerHead(
            heads=(1,),
            selected=kvjax.Full(),
            others=kvjax.Evicting(evictor=kvjax.Sliding(sink=4), budget=200),
        )
    ),
}
run = jax.jit(kvjax.attention, static_argnames=("scale", "soft_cap", "window"))
# Chunks of one shape, the second in part padding, share a program; then single steps and
# several.
CALLS = ((CHUNK, CHUNK), (37, CHUNK), (1, 1), (1, 1), (3, 3))
steps = jax.jit(kvjax.decode, static_argnames=("scale", "soft_cap", "window"))


def by_hand(q, k, v, sinks, scale=SCALE):
    """Attention of q [N, D] over k, v [S, K, D] in float64."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    out = np.zeros((*q.shape[:1], v.shape[-1]))
    for n in range(len(q)):
        kv = n // (len(q) // k.shape[1])
        logits = CAP * np.tanh(scale * (k[:, kv] @ q[n]) / CAP)
        top = max(logits.max(), sinks[n])
        weights = np.exp(logits - top)
        out[n] = weights @ v[:, kv] / (weights.sum() + np.exp(sinks[n] - top))
    return out


@pytest.mark.parametrize("name", [*QUICK, *OTHERS])
def test_prompts_and_steps_are_attention_by_hand(name):
    case = (CASES | OTHERS)[name]
    check_by_hand(case.policy, case.spec, SCALE)


@pytest.mark.parametrize("name", VALUES_OF_8)
def test_values_may_have_another_size_than_keys(name):
    """The scale that is not given is that of keys."""
    case = CASES[name]
    check_by_hand(case.policy, dataclasses.replace(case.spec, value_dim=8), None)


def check_by_hand(policy, spec, scale):
    policy, tokens = attending_to_all(policy, spec), random_tokens(spec, 3)
    tokens = dataclasses.replace(tokens, v=tokens.v[..., : spec.value_size])
    sinks = np.linspace(-1.0, 4.0, spec.q_heads).astype(np.float32)
    how = {"scale": scale, "soft_cap": CAP, "sinks": sinks}
    cache, done, outs = new_cache(policy, spec), 0, []
    for count, size in CALLS:
        at, lengths = (
            np.broadcast_to(done + np.arange(size), (spec.batch, size)),
            np.full(spec.batch, count),
        )
        out, cache = (steps if size == 3 else run)(
            cache, *tokens.at(at), lengths=lengths, **how
        )
        outs.append(np.asarray(out, np.float32)[:, :count])
        done += count
    out, b = np.concatenate(outs, axis=1), spec.batch - 1
    assert out.shape == (spec.batch, done, spec.q_heads, spec.value_size)
    scale = spec.head_dim**-0.5 if scale is None else scale
    allowed = max(2e-5 if spec.dtype == jnp.float32 else 2e-2, tolerance(spec, policy))
    for t in (0, CHUNK - 1, CHUNK, 84, 85, 86, 87, 89):
        before = t // CHUNK * CHUNK if t < 85 else t
        k, v = as_stored(policy, spec, tokens.k[b, : t + 1], tokens.v[b, : t + 1], before)
        np.testing.assert_allclose(
            out[b, t],
            by_hand(tokens.q[b, t], k, v, sinks, scale),
            atol=allowed,
            rtol=0,
            err_msg=str(t),
        )


LENGTH = 120  # the first step after as many fills a recent block, which is flushed


def after_a_prompt(name):
    """The case's policy after a prompt of `LENGTH` tokens, all tokens, and what calls are
    given."""
    spec = CASES["full"].spec
    tokens = vars(random_tokens(spec, 3)).values()
    sinks = np.linspace(-1.0, 4.0, spec.q_heads).astype(np.float32)
    how = {"scale": SCALE, "soft_cap": CAP, "sinks": sinks}
    cache = new_cache(CASES[name].policy, spec)
    return run(cache, *(a[:, :LENGTH] for a in tokens), **how)[1], tokens, how


def test_the_calls_of_a_step_take_both():
    cache, tokens, how = after_a_prompt("fier with sink and window")
    q, k, v = (a[:, LENGTH : LENGTH + 1] for a in tokens)
    want, _ = run(cache, q, k, v, **how)
    cache = kvjax.update(cache, k, v)
    selection = kvjax.select(cache, q, scale=SCALE, soft_cap=CAP)
    out, _ = kvjax.attend(cache, q, selection, **how)
    np.testing.assert_allclose(out, want, atol=1e-6)


@pytest.mark.parametrize("name", ["full", "fier with sink and window"])
def test_rows_that_share_a_prefix_take_both(name):
    prompted, tokens, how = after_a_prompt(name)
    row, batch = kvjax.take_rows(prompted, [0]), prompted.spec.batch
    shared = kvjax.serve.prefixes.share_prefix(row, batch, new_tokens=8)
    apart = kvjax.take_rows(prompted, [0] * batch)
    for verb, count in ((run, 1), (steps, 3)):
        step = slice(first := int(apart.length[0]), first + count)
        got, shared = verb(shared, *(a[:, step] for a in tokens), **how)
        want, apart = verb(apart, *(a[:, step] for a in tokens), **how)
        np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("window", [None, 20])
def test_a_prompt_without_a_cache_and_a_first_chunk_agree_with_the_cache(window):
    spec = CASES["full"].spec
    tokens, sinks = random_tokens(spec, 4), jnp.linspace(-1.0, 4.0, spec.q_heads)
    how = {"scale": SCALE, "soft_cap": CAP, "sinks": sinks, "window": window}
    qkv = [a[:, :40] for a in (tokens.q, tokens.k, tokens.v)]
    plain, _ = kvjax.attention(None, *qkv, **how)
    first, _ = kvjax.attention(new_cache(kvjax.Full(), spec), *qkv, first_chunk=True, **how)
    chunks, _ = kvjax.attention(new_cache(kvjax.Full(), spec), *qkv, **how)
    low = 0 if window is None else 40 - window
    want = by_hand(tokens.q[0, 39], tokens.k[0, low:40], tokens.v[0, low:40], np.asarray(sinks))
    for out in (plain, first, chunks):
        np.testing.assert_allclose(out[0, 39], want, atol=2e-5)
        np.testing.assert_allclose(out, plain, atol=2e-5)


def test_gradients_are_those_of_attention_by_hand():
    spec = CASES["full"].spec
    tokens = random_tokens(spec, 5)
    qkv = [jnp.asarray(a[:, :6]) for a in (tokens.q, tokens.k, tokens.v)]
    sinks = jnp.linspace(-1.0, 4.0, spec.q_heads)
    cotangent = np.random.default_rng(0).standard_normal(qkv[0].shape, np.float32)

    def plain(q, k, v, sinks):
        k, v = (jnp.repeat(a, spec.group, axis=2) for a in (k, v))
        logits = CAP * jnp.tanh(SCALE * jnp.einsum("btnd,bsnd->bnts", q, k) / CAP)
        logits = jnp.where(jnp.tri(6, dtype=bool), logits, -jnp.inf)
        sink = jnp.broadcast_to(sinks[None, :, None, None], (*logits.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([logits, sink], axis=-1), axis=-1)[..., :-1]
        return jnp.sum(cotangent * jnp.einsum("bnts,bsnd->btnd", weights, v))

    def ours(q, k, v, sinks, policy):
        how = {"scale": SCALE, "soft_cap": CAP, "sinks": sinks}
        cache, outs = new_cache(policy, spec), []
        for part in (slice(0, 5), slice(5, 6)):
            out, cache = kvjax.attention(cache, q[:, part], k[:, part], v[:, part], **how)
            outs.append(out)
        return jnp.sum(cotangent * jnp.concatenate(outs, axis=1))

    want = jax.jit(jax.grad(plain, argnums=(0, 1, 2, 3)))(*qkv, sinks)
    for name in ("full", "fier with sink and window"):
        policy = attending_to_all(CASES[name].policy, spec)
        got = jax.jit(jax.grad(ours, argnums=(0, 1, 2, 3)), static_argnums=4)(
            *qkv, sinks, policy
        )
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5, err_msg=name)


def test_a_cap_is_not_lost_in_arithmetic():
    capped = Logits(0.5, 2.0)
    assert capped != Logits(0.5)
    np.testing.assert_allclose(capped.of(jnp.array(3.0)), 2 * np.tanh(0.75), rtol=1e-6)
    np.testing.assert_allclose(
        capped.of_means(jnp.array(12.0), 4), 2 * np.tanh(0.75), rtol=1e-6
    )
    for wrong in (lambda: jnp.ones(2) * capped, lambda: capped / 16, lambda: float(capped)):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(NotImplementedError, match=r"takes no soft cap of the logits, got 2\.0"):
        float(capped.uncapped)


def worth_by_hand(scores, group_reduce):
    """The worth f64[S] of keys to a group of query heads with scores f64[G, S]."""
    if group_reduce == "mean_score":
        return scores.mean(axis=0)
    weights = np.exp(scores)
    return (weights / weights.sum(axis=1, keepdims=True)).mean(axis=0)


@pytest.mark.parametrize("group_reduce", ["mean_softmax", "mean_score"])
def test_tokens_are_selected_by_capped_scores(group_reduce):
    spec, length, local = CASES["full"].spec, 100, 8
    policy = kvjax.Retrieval(
        selector=kvjax.selectors.Exact(group_reduce=group_reduce),
        budget=40,
        sink=0,
        local=local,
    )
    tokens = random_tokens(spec, 7)
    _, cache = run(new_cache(policy, spec), *(a[:, :length] for a in vars(tokens).values()))
    q = tokens.q[:, length - 1 : length]
    chosen = {}
    for cap in (None, CAP):
        selection = kvjax.select(cache, q, scale=SCALE, soft_cap=cap)
        positions = np.asarray(policy.positions(cache.state, selection.slots))
        for b, head in np.ndindex(spec.batch, spec.kv_heads):
            group = np.asarray(q[b, 0], np.float64).reshape(spec.kv_heads, spec.group, -1)[head]
            scores = SCALE * group @ np.asarray(tokens.k[b, : length - local, head]).T
            scores = scores if cap is None else cap * np.tanh(scores / cap)
            want = set(np.argsort(-worth_by_hand(scores, group_reduce))[: 40 - local])
            found = positions[b, head, 0][np.asarray(selection.valid)[b, head, 0]]
            assert set(found) == want, (cap, b, head)
            chosen[cap, b, head] = want
    changed = [chosen[None, b, h] != chosen[CAP, b, h] for _, b, h in chosen]
    assert any(changed), "a cap must change a selection for this to say something"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"sinks": np.zeros(3)}, "one logit for each of the 8 query heads"),
        ({"soft_cap": 0.0}, "above 0"),
        ({"soft_cap": float("nan")}, "finite number"),
    ],
)
def test_bad_sinks_and_caps_are_refused(how, message):
    spec = CASES["full"].spec
    q, k, v = (a[:, :1] for a in vars(random_tokens(spec)).values())
    with pytest.raises(ValueError, match=message):
        kvjax.attention(new_cache(kvjax.Full(), spec), q, k, v, **how)


def test_a_kernel_says_what_it_does_not_take():
    q, k = (jax.ShapeDtypeStruct((2, 2, n, 64), jnp.bfloat16) for n in (4, 128))
    count = jax.ShapeDtypeStruct((2,), jnp.int32)
    asked = q, Span(k, k, count, count), jnp.zeros((2, 4))
    assert kvjax.ops.attend_span.unsupported(*asked, logits=Logits(0.5, 30.0)) is None
    low = jax.ShapeDtypeStruct((2, 2, 8, 64), jnp.bfloat16)
    limit = kvjax.ops.score_pages.unsupported
    assert "no soft cap" not in (limit(q, low, low, logits=Logits(0.5)) or "")
    assert "no soft cap" in (limit(q, low, low, logits=Logits(0.5, 30.0)) or "")
    token, narrow = (jax.ShapeDtypeStruct((2, 2, 1, size), jnp.bfloat16) for size in (64, 32))
    zone = Block(k, jax.ShapeDtypeStruct((2, 2, 128, 32), jnp.bfloat16), count)
    active = jax.ShapeDtypeStruct((2,), bool)
    for op in (kvjax.ops.put_token, kvjax.ops.put_tokens):
        assert "values like keys" in (
            op.unsupported([zone], token, narrow, active, active) or ""
        )


@pytest.mark.parametrize("name", ["kivi", "h2o", "pages in host memory"])
def test_policies_that_need_values_like_keys_say_so(name):
    with pytest.raises(
        ValueError, match=r"value_dim=8, head_dim=16.*only kvjax.Full, and kvjax.Retrieval"
    ):
        kvjax.init_layer(
            (CASES | OTHERS)[name].policy, dataclasses.replace(CASES["full"].spec, value_dim=8)
        )


def test_layers_with_a_window_need_no_more_than_their_window():
    config = kvjax.models.DecoderConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        layers=2,
        q_heads=4,
        kv_heads=2,
        head_dim=8,
        windows=(8, None),
        initializer_range=0.3,
    )
    model = kvjax.models.Decoder(config)
    text, logits, sizes = jax.random.randint(jax.random.key(0), (2, 40), 0, 50), [], []
    call = jax.jit(lambda model, tokens, cache: model(tokens, cache))
    for policies in (
        kvjax.presets.full(),
        kvjax.presets.windowed(kvjax.presets.full(), config.windows),
    ):
        cache, outs = kvjax.init(policies, model.spec(2, 64), layers=2), []
        for part in (slice(0, 15), slice(15, 30), *(slice(i, i + 1) for i in range(30, 40))):
            out, cache = call(model, text[:, part], cache)
            outs.append(out)
        logits.append(np.concatenate(outs, axis=1))
        sizes.append([layer.state.tokens.k.shape[2] for layer in cache.layers])
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-5)
    assert sizes == [[64, 64], [8, 64]]
