"""The methods of the papers against numpy written from the papers: the tokens that a step
attends to, and its output.

On random keys, and on keys and queries of a model: of a small random one, or with `--checkpoint
DIR` of a real one in Hugging Face format, over text that it writes itself. A row of the batch
is a layer of the model.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import (
    CacheSpec,
    Fier,
    Fifo,
    Full,
    HostOffload,
    LogSparse,
    MinMaxPages,
    Paris,
    Retrieval,
    Speculative,
    models,
)
from kvjax.generation import generate
from kvjax.generation.sampling import sampling
from kvjax.numerics.quant import split_scales, unpack_codes
from kvjax.numerics.rotate import _signs, encode, lloyd_max, rotate
from kvjax.testing import _drive as drive
from tests import oracles

STEPS = 12
ZONES = {"sink": 3, "local": 9, "dense_below": 0}
POLICIES = {
    "fier": Retrieval(selector=Fier(group=16), budget=40, demote=Fifo(leave=32), **ZONES),
    "fier by pages": Retrieval(
        selector=Fier(group=16, page=8), budget=40, demote=Fifo(leave=32), **ZONES
    ),
    "pariskv": Retrieval(selector=Paris(), budget=40, demote=Fifo(leave=32), **ZONES),
    "pariskv, plain votes": Retrieval(
        selector=Paris(votes="plain"), budget=40, demote=Fifo(leave=32), **ZONES
    ),
    "freekv": Speculative(
        Retrieval(
            selector=MinMaxPages(page=8),
            store=HostOffload(page=8),
            budget=12
            + 4 * 8
            + 3,  # the 3 have no page, but there is room for the token between window and recall
            demote=Fifo(leave=8),
            **ZONES,
        ),
        tau=0.75,
    ),
    "freekv, no room to spare": Speculative(
        Retrieval(
            selector=MinMaxPages(page=8),
            store=HostOffload(page=8),
            budget=12 + 4 * 8,
            demote=Fifo(leave=8),
            **ZONES,
        ),
        tau=0.75,
    ),
    "logquant": kvjax.presets.logquant(window=14).rest,
    "logquant by token, 4 bits": kvjax.presets.logquant(
        window=14, bits=4, key_axis="token"
    ).rest,
    "kivi": kvjax.presets.kivi(residual=32, group=16).rest,
    "kivi with sinks, values of 4 bits": kvjax.presets.kivi(
        residual=32, group=16, sink=5, value_bits=4
    ).rest,
    "logquant with sinks": kvjax.presets.logquant(window=14, sink=5).rest,
}
# FIER and KIVI have tests of their own of the same things.
QUICK = ("fier by pages", "pariskv", "freekv, no room to spare", "logquant")


def _cells(kind: Callable[[str], bool]) -> list:
    return [
        pytest.param(n, marks=() if n in QUICK else pytest.mark.thorough)
        for n in POLICIES
        if kind(n)
    ]


def _quantises(name: str) -> bool:
    return isinstance(POLICIES[name], kvjax.Compressed)


def live_tokens(model: models.Decoder, text: np.ndarray) -> drive.Tokens:
    """Queries, keys and values of each layer, as rows, over token ids i[S]."""
    seen: list[tuple[np.ndarray, ...]] = []

    def watch(cache, q, k, v, **settings):
        seen.append(tuple(np.asarray(a[0]) for a in (q, k, v)))
        return kvjax.attention_info(cache, q, k, v, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvjax.models.decoder.attention_info", watch)
        model(text[None])
    return drive.Tokens(*(np.stack(part) for part in zip(*seen, strict=True)))


def own_text(loaded: models.Checkpoint, length: int) -> np.ndarray:
    """i[length]: the model's continuation of one word, drawn at its own probabilities."""
    model, first = loaded.model, loaded.tokenizer("The")["input_ids"]
    cache = kvjax.init(Full(), model.spec(batch=1, capacity=length), layers=model.config.layers)
    new = length - len(first)
    drawn = generate(
        model, cache, [first], max_new_tokens=new, sampling=sampling(1.0), key=jax.random.key(0)
    )
    return np.array([*first, *drawn.rows[0]])


@functools.cache
def data(checkpoint: str | None) -> dict[str, tuple[CacheSpec, drive.Tokens]]:
    """Random and live tokens of the same shapes, so that both run the same programs."""
    if checkpoint is None:
        config = models.DecoderConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=96,
            layers=2,
            q_heads=8,
            kv_heads=2,
            head_dim=64,
        )
        model = models.Decoder(dataclasses.replace(config, initializer_range=0.3))
        text = np.random.default_rng(0).integers(256, size=200)
    else:
        loaded = models.load(checkpoint, dtype="float32")
        model, text = loaded.model, own_text(loaded, 600)
    spec = model.spec(batch=model.config.layers, capacity=len(text))
    drawn = drive.random_tokens(spec)
    random = drive.Tokens(drawn.q.copy(), drawn.k, drawn.v)
    for t in range(
        1, spec.capacity
    ):  # a query resembles the one before: cosines of 0.75, a little more or less
        random.q[:, t] = 0.75 * random.q[:, t - 1] + np.sqrt(1 - 0.75**2) * random.q[:, t]
    return {"random": (spec, random), "live": (spec, live_tokens(model, text))}


@dataclasses.dataclass
class Step:
    """A decode step of one row and kv head, and what came before."""

    row: int
    head: int
    held: int  # tokens, the new one included
    q: np.ndarray  # [G, D]
    k: np.ndarray  # [held, D]
    v: np.ndarray
    out: np.ndarray  # f32[G, D]
    fresh: bool
    cache: kvjax.LayerCache  # after it


def steps(policy: kvjax.Policy, spec: CacheSpec, tokens: drive.Tokens) -> Iterator[Step]:
    lengths = spec.capacity - STEPS - 7 * np.arange(spec.batch)
    cache, _ = drive.fill(kvjax.init_layer(policy, spec), tokens, lengths)
    for i in range(STEPS):
        out, cache, info = drive.step(cache, tokens, lengths + i)
        for row, head in np.ndindex(spec.batch, spec.kv_heads):
            n, G = int(lengths[row]) + i, spec.group
            yield Step(
                row,
                head,
                n + 1,
                tokens.q[row, n].reshape(spec.kv_heads, G, -1)[head],
                tokens.k[row, : n + 1, head],
                tokens.v[row, : n + 1, head],
                out[row].reshape(spec.kv_heads, G, -1)[head],
                info.fresh is None or bool(info.fresh[row, head]),
                cache,
            )


def expected(
    policy: Retrieval | Speculative, at: Step, heads: dict[tuple[int, int], oracles.FreeKV]
) -> tuple[bool, set[int]]:
    """Whether the oracle selects again, and the positions that it attends to."""
    tau = policy.tau if isinstance(policy, Speculative) else None
    policy = policy.retrieval if isinstance(policy, Speculative) else policy
    sink, local, scale = policy.sink, policy.local, at.q.shape[1] ** -0.5
    if tau is not None:
        new = oracles.FreeKV(policy.selector.unit, policy.budget, sink, local, tau)
        return heads.setdefault((at.row, at.head), new).step(at.q, at.k)
    end = oracles.history_end(at.held, sink, local, policy.demote.leave)
    keys = at.k[sink : at.held - local]
    if isinstance(policy.selector, Fier):
        scores = oracles.fier_scores(
            at.q, keys, end - sink, policy.selector.group, scale, jnp.bfloat16
        )
        firsts = range(0, scores.shape[1], policy.selector.page)
        scores = np.stack(
            [scores[:, i : i + policy.selector.page].max(axis=1) for i in firsts], axis=1
        )
        ranks = oracles.pooled(scores, "mean_softmax")[0]
    else:
        D, query = at.q.shape[1], at.q.astype(np.float64).mean(axis=0)
        history = oracles.Paris(
            oracles.rotation(_signs(D, 0)), keys[: end - sink], policy.selector.votes
        )
        ranks = np.concatenate(
            [history.ranks(query), keys[end - sink :].astype(np.float64) @ query]
        )
    unit = policy.selector.unit
    best = np.argsort(-ranks, kind="stable")[: (policy.budget - sink - local) // unit]
    best = np.array(
        [
            i * unit + j
            for i in best
            for j in range(unit)
            if i * unit + j < at.held - local - sink
        ]
    )
    return True, {*range(sink), *(sink + best).tolist(), *range(at.held - local, at.held)}


@pytest.mark.parametrize("keys", [pytest.param("random", marks=pytest.mark.thorough), "live"])
@pytest.mark.parametrize("name", _cells(lambda name: not _quantises(name)))
def test_retrieval_attends_to_the_slots_of_the_oracle(
    name: str, keys: str, checkpoint: str | None
) -> None:
    """The output is attention over the oracle's positions; at the edge of a selection rounding
    may decide.
    """
    policy, (spec, tokens) = POLICIES[name], data(checkpoint)[keys]
    heads: dict[tuple[int, int], oracles.FreeKV] = {}
    same, fresh, total = 0, 0, 0
    for at in steps(policy, spec, tokens):
        selects, positions = expected(policy, at, heads)
        assert at.fresh == selects, (at.row, at.head, at.held)
        chosen = sorted(positions)
        want, _ = oracles.attention(at.q, at.k[chosen], at.v[chosen], at.q.shape[1] ** -0.5)
        same += bool(np.abs(at.out - want).max() <= 2e-5 * max(1.0, np.abs(want).max()))
        fresh, total = fresh + selects, total + 1
    print(f"{name}, {keys} keys: {same} of {total} choices are the oracle's, {fresh} made anew")
    assert same >= 0.99 * total
    if isinstance(policy, Speculative) and keys == "random":
        assert spec.batch * spec.kv_heads < fresh < total, (
            "only first steps, or all, select anew"
        )


@pytest.mark.parametrize("keys", [pytest.param("random", marks=pytest.mark.thorough), "live"])
@pytest.mark.parametrize(
    "rule", [pytest.param("per_head", marks=pytest.mark.thorough), "mean_softmax"]
)
def test_quest_attends_to_the_pages_of_the_oracle(
    rule: str, keys: str, checkpoint: str | None
) -> None:
    """All positions, in steps at which the newest page begins, grows and is stored."""
    (spec, tokens), page, same, total, newest = data(checkpoint)[keys], 8, 0, 0, 0
    policy = kvjax.presets.quest(
        4 * page + 5, page=page, newest="select", group_reduce=rule
    ).rest
    lengths = spec.capacity - STEPS - 7 * np.arange(spec.batch)
    cache, _ = drive.fill(kvjax.init_layer(policy, spec), tokens, lengths)
    for i in range(STEPS):
        _, cache, info = drive.step(cache, tokens, lengths + i)
        for row, head in np.ndindex(spec.batch, spec.kv_heads):
            n = int(lengths[row]) + i
            q = tokens.q[row, n].reshape(spec.kv_heads, spec.group, -1)[head]
            wanted = oracles.quest(q, tokens.k[row, : n + 1, head], page, 4, rule)
            for mine, want in zip(np.asarray(info.positions)[row, head], wanted, strict=True):
                same += set(mine.tolist()) - {-1} == want
                total, newest = total + 1, newest + (n // page * page in want)
    print(
        f"quest, {rule}, {keys} keys: {same} of {total} choices are the oracle's, {newest} with the newest page"
    )
    assert same >= 0.99 * total
    assert newest > 0


@pytest.mark.parametrize("keys", [pytest.param("random", marks=pytest.mark.thorough), "live"])
@pytest.mark.parametrize("name", _cells(_quantises))
def test_codes_scales_and_outputs_are_those_of_the_oracle(
    name: str, keys: str, checkpoint: str | None
) -> None:
    policy, (spec, tokens) = POLICIES[name], data(checkpoint)[keys]
    D, store, total = spec.head_dim, policy.store, 0
    tokens_of_a_key = store.key_group if store.key_axis == "channel" else 1
    channels = 1 if store.key_axis == "channel" else min(store.key_group, D)
    values = min(store.value_group or store.key_group, D)
    rule = oracles.log_sparse if isinstance(policy.demote, LogSparse) else oracles.residual
    for at in steps(policy, spec, tokens):
        sink = policy.sink
        exact, quantised = rule(
            policy.demote.leave, at.held - 1 - sink
        )  # a step demotes before its token comes
        exact, quantised = (
            [*range(sink), *(sink + p for p in exact), at.held - 1],
            [sink + p for p in quantised],
        )
        codes = [
            oracles.asymmetric(at.k[quantised], store.bits, tokens_of_a_key, channels),
            oracles.asymmetric(at.v[quantised], store.value_bits or store.bits, 1, values),
        ]
        k, v = (
            np.concatenate([code * scale + zero, a[exact]])
            for (code, scale, zero), a in zip(codes, (at.k, at.v), strict=True)
        )
        want, _ = oracles.attention(at.q, k, v, D**-0.5)
        np.testing.assert_allclose(at.out, want, atol=2e-5 * max(1.0, np.abs(want).max()))
        if at.held % 10:
            continue
        for ours, (code, scale, zero) in zip(
            (at.cache.state.store.k, at.cache.state.store.v), codes, strict=True
        ):
            n = len(quantised)
            mine = np.asarray(unpack_codes(ours.codes, D))[at.row, at.head, :n]
            scales = [np.asarray(a)[at.row, at.head] for a in split_scales(ours.scales)]
            group = ours.codes.shape[2] // ours.scales.shape[2], D // ours.scales.shape[3]
            for a, want in zip(scales, (scale, zero), strict=True):
                np.testing.assert_array_equal(
                    np.repeat(np.repeat(a, group[0], 0), group[1], 1)[:n], want
                )
            np.testing.assert_array_equal(mine, code)
            total += mine.size
    print(f"{name}, {keys} keys: {total} codes, their scales and all outputs are the oracle's")
    assert total > 0


def test_rotation_and_codes_are_those_of_the_oracle() -> None:
    rng, D = np.random.default_rng(0), 128
    keys = (rng.normal(size=(300, D)) * rng.uniform(0.2, 3, D)).astype(np.float32)
    history = oracles.Paris(oracles.rotation(_signs(D, 3)), keys)
    rotated = np.asarray(jax.jit(rotate, static_argnums=1)(keys, 3))
    np.testing.assert_allclose(
        rotated, history.parts.reshape(300, D) * history.norm[:, None], atol=2e-5
    )
    code = jax.jit(encode)(rotated)
    np.testing.assert_array_equal(code.signs, history.ids)
    planes = np.unpackbits(
        np.asarray(code.sizes).reshape(300, 3, D // 8), axis=-1, bitorder="little"
    )
    sizes = (planes * np.array([1, 2, 4])[None, :, None]).sum(axis=1)
    assert (
        sizes == history.sizes.reshape(300, D)
    ).mean() > 0.9999  # a size on the edge of two codes
    weights = (np.asarray(code.weights).astype(np.uint32) << 16).view(np.float32)
    assert (weights == history.weights).mean() > 0.99
    np.testing.assert_allclose(weights, history.weights, rtol=2**-6)


def test_table_is_the_settled_one_of_the_beta_law() -> None:
    np.testing.assert_allclose(lloyd_max(8)[1], oracles.sphere_centres(8), atol=1e-6)
