"""The tokens that each evictor keeps, against Python loops over positions written from the
papers' rules.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, Evicting, HeavyHitter, LastQuery, Observation, Sliding, generation
from kvjax.policies import evicting
from kvjax.policies.evicting import fill_gaps, move_tokens
from kvjax.testing import _drive as drive
from kvjax.testing import check_policy
from kvjax.testing._expect import dense, held_positions
from tests.test_oracles import data

SPEC = CacheSpec(batch=3, q_heads=4, kv_heads=2, head_dim=16, capacity=150, dtype=jnp.float32)
BUDGET = 20
WINDOW, POOL = 6, 5  # of the observation
EVICTORS = {
    "sliding": Sliding(sink=4),
    "heavy hitter": HeavyHitter(recent=0.5),
    "last query": LastQuery(),
    "observation": Observation(window=WINDOW, kernel_size=POOL),
    "observation, mean": Observation(window=WINDOW, kernel_size=POOL, pooling="mean"),
}


class Row:
    """One row in plain Python: for each kv head, the positions that it keeps and what each has
    earned.
    """

    def __init__(self, rule: str, q: np.ndarray, k: np.ndarray, window: int | None = None):
        rule, _, pooling = rule.partition(", ")
        # what is not there counts as 0
        self.pool = np.max if not pooling else lambda votes: np.sum(votes) / POOL
        self.rule, self.q, self.k, self.window = (
            rule,
            q.astype(np.float64),
            k.astype(np.float64),
            window,
        )
        self.group = q.shape[1] // k.shape[1]
        self.kept: list[dict[int, float]] = [{} for _ in range(k.shape[1])]
        self.length = 0

    def prompt(self, count: int) -> None:
        """A chunk of `count` tokens comes, all its queries attend, and then tokens are evicted
        until the rest fits.
        """
        first, self.length = self.length, self.length + count
        for kept in self.kept:
            kept |= dict.fromkeys(range(first, self.length), 0.0)
        voters = {"sliding": 0, "heavy hitter": count, "last query": 1, "observation": WINDOW}[
            self.rule
        ]
        self.earn(range(max(first, self.length - voters), self.length))
        if self.rule == "observation":
            self.kept = [self.pooled(kept) for kept in self.kept]
        for kept in self.kept:
            while len(kept) > BUDGET:
                del kept[self.dying(kept)]

    def step(self) -> None:
        """A token comes, and another is evicted if there is no room; then its query attends."""
        t, self.length = self.length, self.length + 1
        for kept in self.kept:
            if len(kept) == BUDGET:
                del kept[self.dying(kept)]
            kept[t] = np.inf if self.rule == "observation" else 0.0
        if self.rule in ("heavy hitter", "last query"):
            self.earn([t])

    def dying(self, kept: dict[int, float]) -> int:
        if self.rule == "sliding":
            return min(p for p in kept if p >= 4)
        recent = self.length - BUDGET // 2 if self.rule == "heavy hitter" else self.length
        return min((p for p in kept if p < recent), key=lambda p: (kept[p], p))

    def earn(self, queries) -> None:
        """Tokens earn the attention that they get; by the last query only, in all heads the
        same.
        """
        sums = []
        for head, kept in enumerate(self.kept):
            got = dict.fromkeys(kept, 0.0)
            for t in queries:
                seen = [
                    p for p in kept if p <= t and (self.window is None or p > t - self.window)
                ]
                for n in range(head * self.group, (head + 1) * self.group):
                    weights = np.exp(
                        self.k[seen, head] @ self.q[t, n] / np.sqrt(self.q.shape[-1])
                    )
                    for p, weight in zip(seen, weights / weights.sum(), strict=True):
                        got[p] += weight
            sums.append(got)
        if self.rule == "last query":
            sums = [{p: sum(got[p] for got in sums) / len(self.q[0]) for p in sums[0]}] * len(
                sums
            )
        keeps_sum = self.rule == "heavy hitter"
        self.kept = [
            {p: got[p] + (kept[p] if keeps_sum else 0.0) for p in kept}
            for kept, got in zip(self.kept, sums, strict=True)
        ]

    def pooled(self, kept: dict[int, float]) -> dict[int, float]:
        prefix = [p for p in sorted(kept) if p < self.length - WINDOW]
        votes = [kept[p] for p in prefix]
        best = {
            p: self.pool(votes[max(i - POOL // 2, 0) : i + POOL // 2 + 1])
            for i, p in enumerate(prefix)
        }
        return {p: best.get(p, np.inf) for p in kept}


def rows(
    rule: str, tokens: drive.Tokens, lengths: np.ndarray, chunk: int, window: int | None = None
) -> list[Row]:
    """Rows after prompts of these lengths, in chunks."""
    made = [Row(rule, tokens.q[b], tokens.k[b], window) for b in range(len(lengths))]
    for row, length in zip(made, lengths, strict=True):
        for first in range(0, length, chunk):
            row.prompt(min(chunk, length - first))
    return made


def keeps(cache: kvjax.LayerCache) -> list[list[set[int]]]:
    return [[set(head) for head in row] for row in held_positions(cache)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("rule", EVICTORS)
@pytest.mark.parametrize("keys", ["random", "live"])
def test_keeps_the_positions_that_the_rule_keeps(
    rule: str, keys: str, checkpoint: str | None
) -> None:
    """Ragged prompts in chunks that grow past the budget, then steps, in which rows fill up at
    different times.
    """
    spec, tokens = (
        (SPEC, drive.random_tokens(SPEC)) if keys == "random" else data(checkpoint)["live"]
    )
    lengths = np.resize([101, 49, 3], spec.batch)
    policy = Evicting(evictor=EVICTORS[rule], budget=BUDGET)
    cache, _ = drive.fill(kvjax.init_layer(policy, spec), tokens, lengths)
    wanted = rows(rule, tokens, lengths, drive.CHUNK)
    assert keeps(cache) == [[set(kept) for kept in row.kept] for row in wanted]
    for i in range(30):
        _, cache, info = drive.step(cache, tokens, lengths + i)
        for row in wanted:
            row.step()
        assert keeps(cache) == [[set(kept) for kept in row.kept] for row in wanted], f"step {i}"
        np.testing.assert_array_equal(
            np.asarray(info.attended[:, 0]), np.minimum(lengths + i + 1, BUDGET)
        )
    # The next turn of a conversation, to rows whose slots are in no order.
    cache, _ = drive.fill(cache, tokens, lengths + 40, start=lengths + 30)
    for row in wanted:
        row.prompt(10)
    assert keeps(cache) == [[set(kept) for kept in row.kept] for row in wanted]


@pytest.mark.thorough
@pytest.mark.parametrize("rule", EVICTORS)
@pytest.mark.parametrize(("group", "window"), [(2, 30), (1, None), (7, None)])
def test_keeps_the_positions_that_the_rule_keeps_of_a_whole_prompt(
    rule: str, group: int, window: int | None
) -> None:
    spec = dataclasses.replace(SPEC, q_heads=2 * group)
    tokens, lengths = drive.random_tokens(spec, 1), np.array([110, 77, 18])
    policy = Evicting(evictor=EVICTORS[rule], budget=BUDGET)
    step = jax.jit(kvjax.attention, static_argnames="window")
    first = (a[:, :110] for a in (tokens.q, tokens.k, tokens.v))
    out, cache = step(kvjax.init_layer(policy, spec), *first, lengths=lengths, window=window)
    wanted = rows(rule, tokens, lengths, 110, window)
    for i in range(40):
        assert keeps(cache) == [[set(kept) for kept in row.kept] for row in wanted], f"step {i}"
        out, cache = step(cache, *tokens.at((lengths + i)[:, None]), window=window)
        for b, row in enumerate(wanted):
            row.step()
            t = row.length - 1
            seen = [p for p in row.kept[0] if window is None or p > t - window]
            want = dense(tokens.q[b, t, :group], tokens.k[b, seen, :1], tokens.v[b, seen, :1])
            np.testing.assert_allclose(np.asarray(out)[b, 0, :group], want, atol=1e-5)


@pytest.fixture
def sums_of_attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Prompts take the sums of their softmaxes from attention, as on a GPU."""
    monkeypatch.setattr(evicting, "takes_cudnn", lambda *_: True)
    monkeypatch.setattr(evicting, "QUERIES", 4)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize(
    "rule", ["observation", "heavy hitter", "heavy hitter, by the sums of attention"]
)
def test_queries_of_a_prompt_vote_in_several_blocks(
    rule: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A window cuts the first of its blocks; all queries come in parts that see the keys before
    their end only.
    """
    rule, _, sums = rule.partition(", ")
    if sums:
        request.getfixturevalue("sums_of_attention")
    monkeypatch.setattr(evicting, "QUERIES", 4)
    tokens, lengths = drive.random_tokens(SPEC), np.array([60, 41, 5])
    cache = kvjax.init_layer(Evicting(evictor=EVICTORS[rule], budget=BUDGET), SPEC)
    came = (np.arange(60) < lengths[:, None])[..., None, None]
    prompt = [np.where(came, a[:, :60], np.nan) for a in (tokens.q, tokens.k, tokens.v)]
    _, cache = jax.jit(lambda cache, *qkv: kvjax.attention(cache, *qkv, lengths=lengths))(
        cache, *prompt
    )
    wanted = rows(rule, tokens, lengths, 60)
    assert keeps(cache) == [[set(kept) for kept in row.kept] for row in wanted]
    if rule == "heavy hitter":
        for b, row in enumerate(held_positions(cache)):
            for head, held in enumerate(row):
                want = [wanted[b].kept[head][p] for p in held]
                np.testing.assert_allclose(
                    cache.state.evidence[b, head, : len(held)], want, atol=1e-5
                )


@pytest.mark.parametrize("window", [None, 30])
def test_sums_of_attention_include_what_is_held(
    window: int | None, sums_of_attention: None
) -> None:
    """Ragged prompts in chunks that grow past the budget."""
    tokens, lengths = drive.random_tokens(SPEC), np.array([101, 49, 3])
    cache = kvjax.init_layer(Evicting(evictor=EVICTORS["heavy hitter"], budget=BUDGET), SPEC)
    prefill = jax.jit(kvjax.attention, static_argnames="window")
    for first in range(0, 101, 16):
        chunk = tokens.at(np.broadcast_to(first + np.arange(16), (3, 16)))
        _, cache = prefill(
            cache, *chunk, lengths=np.clip(lengths - first, 0, 16), window=window
        )
    wanted = rows("heavy hitter", tokens, lengths, 16, window)
    assert keeps(cache) == [[set(kept) for kept in row.kept] for row in wanted]


def test_a_chunk_of_a_prompt_sees_what_is_held_within_its_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If all tokens fit, chunks give the same as the whole prompt; slots are read in several
    parts.
    """
    monkeypatch.setattr(evicting, "SLOTS", 32)
    tokens, step = (
        drive.random_tokens(SPEC, 2),
        jax.jit(kvjax.attention, static_argnames="window"),
    )
    prompt = tuple(a[:, :120] for a in (tokens.q, tokens.k, tokens.v))
    whole, _ = step(None, *prompt, window=50)
    cache = kvjax.init_layer(Evicting(evictor=LastQuery(), budget=SPEC.capacity), SPEC)
    for first in (0, 40, 80):
        out, cache = step(cache, *(a[:, first : first + 40] for a in prompt), window=50)
        np.testing.assert_allclose(out, whole[:, first : first + 40], atol=1e-5)


def _rotated(x: np.ndarray, position: np.ndarray, theta: float) -> np.ndarray:
    """RoPE of x [T, heads, D] at positions [T], channel i with channel i + D/2."""
    half = x.shape[-1] // 2
    angle = position[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    low, high = x[..., :half], x[..., half:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def test_positions_are_those_within_the_cache() -> None:
    """Keys are rotated by their place in the cache, as in StreamingLLM, in steps and in a later
    chunk.
    """
    theta, sink, T = 100.0, 4, 60
    tokens = drive.random_tokens(SPEC)
    q, k, v = (a[0, :120].astype(np.float64) for a in (tokens.q, tokens.k, tokens.v))
    came = np.arange(120)
    qr, kr = (_rotated(a, came, theta)[None].astype(np.float32) for a in (q, k))
    spec = dataclasses.replace(SPEC, batch=1)
    policy = Evicting(
        evictor=Sliding(sink=sink, rope=kvjax.models.rope.Default(theta=theta)), budget=BUDGET
    )
    run = jax.jit(kvjax.attention)

    def wanted(held: list[int], new: int) -> np.ndarray:
        line, at = [*held, new], np.arange(len(held) + 1)
        keys = _rotated(k[line], at, theta)
        query = _rotated(q[new : new + 1], at[-1:], theta)[0]
        return dense(query, keys, v[line])

    _, cache = run(
        kvjax.init_layer(policy, spec), qr[:, :T], kr[:, :T], v[None, :T].astype(np.float32)
    )
    kept = [*range(sink), *range(T - (BUDGET - sink), T)]
    chunk = slice(T, T + 8)
    out, cache = run(cache, qr[:, chunk], kr[:, chunk], v[None, chunk].astype(np.float32))
    for i in range(8):
        np.testing.assert_allclose(
            out[0, i], wanted([*kept, *range(T, T + i)], T + i), atol=1e-5
        )
    for t in range(T + 8, T + 16):
        out, cache = run(
            cache, *(a[:, t : t + 1] for a in (qr, kr, v[None].astype(np.float32)))
        )
        np.testing.assert_allclose(
            out[0, 0], wanted([*range(sink), *range(t - BUDGET + sink + 1, t)], t), atol=1e-5
        )


def test_a_prompt_of_16k_tokens_holds_no_square_of_weights() -> None:
    """All its queries vote, a block at a time: all weights of 4 heads would take 4 GiB."""
    spec = dataclasses.replace(SPEC, batch=1, capacity=16384)
    policy = Evicting(evictor=HeavyHitter(queries=None), budget=256)
    q, k = (jax.ShapeDtypeStruct((1, 2, *g, 16384, 16), jnp.float32) for g in ((2,), ()))
    prefill = jax.jit(
        functools.partial(policy.prefill_observed, step=kvjax.Step(kvjax.Logits(0.25)))
    )
    st = jax.eval_shape(functools.partial(policy.init, spec))
    memory = (
        prefill.lower(st, q, k, k, jax.ShapeDtypeStruct((1,), jnp.int32))
        .compile()
        .memory_analysis()
    )
    assert memory.temp_size_in_bytes < 2**27


@pytest.mark.parametrize("window", [None, 40])
def test_a_sample_of_a_long_prompts_queries_votes_for_all(window: int | None) -> None:
    """One from each of 16 equal parts, as many times as a part is long; rows of at most 16
    tokens have all of them.
    """
    lengths, n = np.array([150, 37, 16]), 16
    q, k, v = (
        np.random.default_rng(i).standard_normal((3, 150, h, 16)).astype(np.float32)
        for i, h in enumerate((4, 2, 2))
    )
    policy = Evicting(evictor=HeavyHitter(queries=n), budget=BUDGET)
    settings = {"lengths": lengths, "first_chunk": True, "window": window}
    _, cache = kvjax.attention(kvjax.init_layer(policy, SPEC), 4 * q, k, v, **settings)
    evidence, held = np.asarray(cache.state.evidence), np.asarray(cache.state.position)
    for row, T in enumerate(lengths):
        parts = [int((i + i * 0.6180339887 % 1) * T / n) for i in range(n)]
        voters = parts if n < T else list(range(T))
        for head in range(2):
            votes = np.zeros(T)
            for i in voters:
                seen = slice(0 if window is None else max(i - window + 1, 0), i + 1)
                for g in range(2):
                    logits = k[row, seen, head] @ q[row, i, 2 * head + g].astype(np.float64)
                    votes[seen] += np.exp(logits) / np.exp(logits).sum() * T / len(voters)
            assert votes.sum() == pytest.approx(2 * T)
            count = min(T, BUDGET)
            newest = set(range(max(T - BUDGET // 2, 0), T))
            best = sorted(set(range(T)) - newest, key=lambda t: -votes[t])[
                : count - len(newest)
            ]
            assert set(held[row, head, :count]) == newest | set(best)
            np.testing.assert_allclose(
                evidence[row, head, :count],
                votes[held[row, head, :count]],
                rtol=1e-4,
                atol=1e-5,
            )


def test_an_evictor_around_another_asks_the_same_sample_of_queries() -> None:
    q, k, v = (
        np.random.default_rng(i).standard_normal((3, 150, h, 16)).astype(np.float32)
        for i, h in enumerate((4, 2, 2))
    )
    inner = HeavyHitter(queries=16)
    found = []
    for evictor in (inner, kvjax.evictors.ValueWeighted(evictor=inner)):
        layer = kvjax.init_layer(Evicting(evictor=evictor, budget=150), SPEC)
        found.append(kvjax.attention(layer, 4 * q, k, v, first_chunk=True)[1].state.evidence)
    np.testing.assert_array_equal(*found)


def test_memory_is_that_of_the_budget() -> None:
    spec = dataclasses.replace(SPEC, capacity=131072, dtype=jnp.bfloat16)
    for evictor in EVICTORS.values():
        tokens = spec.batch * spec.kv_heads * 64 * 2 * spec.head_dim * 2
        held = kvjax.memory.nbytes(
            kvjax.init_layer(Evicting(evictor=evictor, budget=64), spec)
        ).device
        assert tokens <= held <= 1.13 * tokens + 100


@pytest.mark.parametrize("fault", ["forgets its newest", "reads what died"])
def test_law_of_eviction_catches_a_broken_policy(fault: str) -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Broken(Evicting):
        def update(self, st, k, v, active):
            after = super().update(st, k, v, active)
            if fault == "forgets its newest":
                return dataclasses.replace(st, length=after.length)
            return dataclasses.replace(
                after, tokens=dataclasses.replace(after.tokens, k=st.tokens.k)
            )

    law = (
        "budget_bounds_what_is_held"
        if fault == "forgets its newest"
        else "step_attends_to_what_is_held"
    )
    report = check_policy(
        Broken(evictor=Sliding(), budget=BUDGET), dataclasses.replace(SPEC, batch=1), laws=[law]
    )
    assert report.laws("failed") == (law,), report


def test_presets_take_a_budget_and_dense_layers() -> None:
    for name, evictor in (
        ("streaming_llm", Sliding(sink=4)),
        ("h2o", HeavyHitter(recent=0.5)),
        ("tova", LastQuery()),
        ("snapkv", Observation(window=32, kernel_size=7)),
    ):
        layered = kvjax.presets.find(name).policies(budget=77, dense_layers=2)
        assert [layered.policy(i) for i in range(3)] == [kvjax.Full()] * 2 + [
            Evicting(evictor=evictor, budget=77)
        ]


def test_decoding_reads_a_prompt_whole_unless_told_otherwise() -> None:
    """Its queries select once from all tokens, as in the papers, and not from what is left of
    earlier chunks.
    """
    sizes = []

    def model(tokens, cache, **settings):
        sizes.append(tokens.shape[1])
        return jnp.zeros((1, 8)), cache

    def sizes_of(policy: kvjax.Policy, **settings: int) -> list[int]:
        spec = dataclasses.replace(SPEC, batch=1, capacity=1000)
        prompt = np.ones((1, 900), np.int32)
        sizes.clear()
        generation.prefill(
            jax.tree_util.Partial(model), kvjax.init(policy, spec, layers=1), prompt, **settings
        )
        return sizes

    assert sizes_of(Evicting(evictor=Observation(), budget=64)) == [1024]
    assert set(sizes_of(Evicting(evictor=Observation(), budget=64), chunk=256)) == {256}
    assert set(sizes_of(kvjax.Full())) == {256, 64}


def test_tokens_of_the_last_slots_fill_the_gaps_of_an_eviction() -> None:
    """Of 7 tokens 3 are evicted, one of them in the last slots; a second row evicts none."""
    evicted = jnp.asarray([[[5, 1, 2]], [[0, 1, 2]]], jnp.int32)
    count = jnp.asarray([4, 7], jnp.int32)
    last = count[:, None, None] + jnp.arange(3, dtype=jnp.int32)[None, None]
    source, target = fill_gaps(evicted, last, count, 8)
    np.testing.assert_array_equal(source[0, 0], [4, 6, 5])
    np.testing.assert_array_equal(target[0, 0], [1, 2, 8])

    policy = Evicting(evictor=Sliding(sink=0), budget=8, every=3)
    st = policy.init(dataclasses.replace(SPEC, batch=2, q_heads=1, kv_heads=1, capacity=8))
    position = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32), st.position.shape)
    k = jnp.broadcast_to(position[..., None].astype(st.tokens.k.dtype), st.tokens.k.shape)
    st = dataclasses.replace(
        st, position=position, tokens=dataclasses.replace(st.tokens, k=k, v=-k)
    )
    target = jnp.where(jnp.asarray([True, False])[:, None, None], target, 8)
    moved = jax.jit(move_tokens)(st, source, target)
    np.testing.assert_array_equal(moved.position[:, 0, :4], [[0, 4, 6, 3], [0, 1, 2, 3]])
    np.testing.assert_array_equal(moved.tokens.k[..., 0], moved.position)
    np.testing.assert_array_equal(moved.tokens.v[..., 0], -moved.position)
