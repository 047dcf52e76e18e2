"""One selection for several layers: followers read what their anchor selected, of their own
keys and values.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import (
    CacheSpec,
    Fier,
    Fifo,
    Follower,
    HostOffload,
    LogSparse,
    MinMaxPages,
    Retrieval,
    Shared,
    Speculative,
    presets,
)
from kvjax.models import Decoder, DecoderConfig
from kvjax.testing import _drive as drive
from kvjax.testing import check_policy
from kvjax.testing._expect import dense

SPEC = CacheSpec(batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=200, dtype=jnp.float32)
BASE = Retrieval(selector=Fier(group=16), budget=64, sink=4, local=24, demote=Fifo(leave=32))
PAGES = dataclasses.replace(BASE, selector=MinMaxPages(page=16), store=HostOffload(page=8))


@jax.jit
def pair_step(anchor: Any, follower: Any, tokens: Any, others: Any, active: Any) -> Any:
    """A step of two layers, of which the second follows; each has queries, keys and values of
    its own.
    """
    _, anchor, info = kvjax.attention_info(anchor, *tokens, active=active)
    out, follower, seen = kvjax.attention_info(
        follower, *others, active=active, selection=info.selection
    )
    return out, anchor, follower, info, seen


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "anchor",
    [BASE, pytest.param(PAGES, marks=pytest.mark.thorough), Speculative(PAGES, tau=0.0)],
    ids=["fier", "pages_on_host", "freekv"],
)
def test_follower_attends_to_the_slots_of_its_anchor(anchor: Any) -> None:
    """Ragged rows, a row that pauses, and flushes between the steps."""
    spec, rows = SPEC, SPEC.batch
    tokens, others = drive.random_tokens(spec, 1), drive.random_tokens(spec, 2)
    lengths = np.array([150, 60])
    first, _ = drive.fill(drive.new_cache(anchor, spec), tokens, lengths)
    second, _ = drive.fill(drive.new_cache(anchor.follower(), spec), others, lengths)
    for i in range(34):
        active = np.arange(rows) != (i % 3 == 1)
        at = lengths[:, None]
        out, first, second, info, seen = pair_step(
            first, second, tokens.at(at), others.at(at), active
        )
        if i % 11 == 0:
            reused = isinstance(anchor, Speculative)
            positions, wanted = (
                np.asarray(seen.positions),
                np.asarray(info.positions)[..., : -1 if reused else None],
            )
            for b in np.flatnonzero(active):
                q = others.q[b, lengths[b]].reshape(spec.kv_heads, spec.group, -1)
                for h in range(spec.kv_heads):
                    read = sorted(p for p in positions[b, h, 0] if p >= 0)
                    assert read == sorted(p for p in wanted[b, h, 0] if p >= 0)
                    assert len(read) == len(set(read))
                    assert lengths[b] in read
                    k, v = (a[b, read][:, h : h + 1] for a in (others.k, others.v))
                    got = np.asarray(out)[b, 0].reshape(spec.kv_heads, spec.group, -1)[h]
                    np.testing.assert_allclose(got, dense(q[h], k, v), atol=2e-5)
        lengths = lengths + active


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PairState:
    follower: Any
    anchor: Any

    @property
    def length(self) -> jax.Array:
        return self.follower.length

    @property
    def overflow(self) -> jax.Array:
        return self.follower.overflow


@dataclass(frozen=True)
class Pair(kvjax.Policy):
    """An anchor and its follower over the same tokens, as one policy, whose output is the
    follower's.
    """

    anchor: Any

    def init(self, spec: CacheSpec) -> Any:
        return PairState(self.anchor.follower().init(spec), self.anchor.init(spec))

    def _both(self, verb: str, st: Any, *args: Any) -> Any:
        follower = getattr(self.anchor.follower(), verb)(st.follower, *args)
        return PairState(follower, getattr(self.anchor, verb)(st.anchor, *args))

    def prefill(self, st: Any, k: Any, v: Any, lengths: Any) -> Any:
        return self._both("prefill", st, k, v, lengths)

    def update(self, st: Any, k: Any, v: Any, active: Any) -> Any:
        return self._both("update", st, k, v, active)

    def flush(self, st: Any) -> Any:
        return self._both("flush", st)

    def attend(self, st: Any, q: Any, step: kvjax.Step) -> Any:
        _, anchor, info = self.anchor.attend(st.anchor, q, step)
        out, follower, info = self.anchor.follower().attend(
            st.follower, q, replace(step, selection=info.selection)
        )
        return out, PairState(follower, anchor), info

    def attend_stored(self, st: Any, q: Any, step: kvjax.Step) -> Any:
        return self.anchor.follower().attend_stored(st.follower, q, step)

    def full_rows(self, st: Any) -> Any:
        return self.anchor.follower().full_rows(st.follower)

    def bytes_per_token(self, spec: CacheSpec) -> float:
        return self.anchor.bytes_per_token(spec) + self.anchor.follower().bytes_per_token(spec)


# These move or select in one state alone, but a pair's history and index are in two.
NOT_OF_A_PAIR = ("order_of_chunks_does_not_matter", "recall_grows_with_budget")
QUICK = {"slots_past_count_do_not_matter"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "law",
    [
        pytest.param(law, marks=() if law in QUICK else pytest.mark.thorough)
        for law in kvjax.testing.LAWS
        if law not in NOT_OF_A_PAIR
    ],
)
def test_law_holds_of_a_follower(law: str) -> None:
    report = check_policy(Pair(BASE), SPEC, laws=[law])
    report.raise_for_failures()


def test_a_model_hands_on_the_selection_of_each_anchor() -> None:
    config = DecoderConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        layers=5,
        q_heads=4,
        kv_heads=2,
        head_dim=8,
    )
    policies = presets.fier(12, group=8, chunk=8, layers=presets.Layers(dense=1, share=2))
    assert isinstance(policies, Shared)
    assert [policies.selects(i) for i in range(5)] == [False, True, False, True, False]
    assert isinstance(policies.policy(2), Follower)
    assert policies.policy(1) == policies.rest
    model = Decoder(config)
    cache = kvjax.init(policies, model.spec(batch=2, capacity=64), layers=5)
    assert cache.layers[2].nbytes.device < cache.layers[1].nbytes.device

    @jax.jit
    def run(model: Decoder, cache: kvjax.Cache, tokens: jax.Array) -> Any:
        _, cache = model(tokens, cache, first_chunk=True)

        def step(cache: kvjax.Cache, token: jax.Array) -> Any:
            _, cache, infos = model(token[:, None], cache, info=True)
            return cache, [info.positions for info in infos]

        return jax.lax.scan(step, cache, tokens.T[:4])[1]

    tokens = jax.random.randint(jax.random.key(0), (2, 40), 0, 50)
    seen = run(model, cache, tokens)
    for follower, anchor in ((2, 1), (4, 3)):
        np.testing.assert_array_equal(seen[follower], seen[anchor])
    assert (np.asarray(seen[3]) != np.asarray(seen[1])).any(), (
        "the second anchor selected by itself"
    )


def test_heads_of_a_follower_may_follow_other_heads() -> None:
    spec = dataclasses.replace(SPEC, batch=1)
    tokens = drive.random_tokens(spec, 1)
    lengths = np.array([150])
    first, _ = drive.fill(drive.new_cache(BASE, spec), tokens, lengths)
    second, _ = drive.fill(drive.new_cache(BASE.follower((1, 0)), spec), tokens, lengths)
    now = tokens.at(lengths[:, None])
    *_, info, seen = pair_step(first, second, now, now, np.ones(1, bool))
    np.testing.assert_array_equal(np.asarray(seen.positions)[:, ::-1], info.positions)


def test_presets_name_anchors() -> None:
    policies = presets.parse("quest:budget=64,anchors=2+5+9")
    assert [i for i in range(12) if policies.selects(i)] == [2, 5, 9]
    assert presets.parse("fier:budget=64,share=1") == presets.fier(64)
    assert (
        presets.parse("fier:budget=64,dense_layers=0,anchors=0").policy(7)
        == presets.fier(64).rest.follower()
    )
    assert hash(policies) == hash(
        presets.quest(64, layers=presets.Layers(dense=2, anchors=[2, 5, 9]))
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: presets.fier(64, layers=presets.Layers(dense=2, share=0)),
            r"Layers\(share=...\) must be at least 1, got 0",
        ),
        (
            lambda: presets.fier(64, layers=presets.Layers(dense=2, share=2, anchors=(2, 5))),
            r"share=2 and anchors=\(2, 5\) both",
        ),
        (
            lambda: presets.fier(64, layers=presets.Layers(dense=2, anchors=(3, 5))),
            r"anchors=\(3, 5\) must increase and begin with layer 2",
        ),
        (
            lambda: presets.fier(64, layers=presets.Layers(dense=2, anchors=(2, 2))),
            r"anchors=\(2, 2\) must increase",
        ),
        (
            lambda: presets.fier(64, layers=presets.Layers(dense=2, anchors="2,x")),
            r"numbers of layers with \+ between",
        ),
        (
            lambda: kvjax.share_selections(presets.kivi(), share=2),
            r"selects nothing that other layers could follow",
        ),
        (
            lambda: Follower(store=HostOffload(page=8), unit=4),
            r"moves whole pages, but the selection has 4 tokens",
        ),
        (  # a recall made before a flush names tokens that it spreads over several pages
            lambda: Speculative(
                dataclasses.replace(
                    BASE,
                    selector=MinMaxPages(page=4),
                    store=HostOffload(page=4),
                    demote=LogSparse(window=32),
                )
            ).follower(),
            r"LogSparse\(window=32\) moves the tokens of a page to several pages.*use kvjax\.Fifo\(leave=32\)",
        ),
        (lambda: Follower(heads=(0, 2)), r"heads=\.\.\.\) must be at most 1, got 2"),
    ],
)
def test_what_cannot_be_shared_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_anchors_come_from_a_file_with_the_heads_that_serve(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"anchors": [2, 5], "heads": {"3": [1, 0]}}))
    policies = presets.parse(f"fier:budget=64,anchors={file}")
    assert policies == kvjax.share_selections(
        presets.fier(64, dense_capacity=0), anchors=(2, 5), heads={3: (1, 0)}
    )
    assert [policies.policy(layer) for layer in (3, 4)] == [
        policies.rest.follower((1, 0)),
        policies.rest.follower(),
    ]
    with pytest.raises(
        FileNotFoundError,
        match=r"is not a file; python -m benchmarks.calibrate --out writes one",
    ):
        presets.fier(64, layers=presets.Layers(dense=2, anchors=str(tmp_path / "other.json")))
    for content in (
        "",
        "[]",
        '{"anchors": [2]}',
        '{"anchors": 2, "heads": {}}',
        '{"anchors": [2], "heads": [1]}',
    ):
        file.write_text(content)
        with pytest.raises(
            ValueError, match=r"plan\.json (holds no anchors|is not valid|must hold)"
        ):
            presets.fier(64, layers=presets.Layers(dense=2, anchors=str(file)))


def test_a_step_of_a_follower_needs_a_selection() -> None:
    q, k = jnp.zeros((1, 1, 4, 16)), jnp.zeros((1, 1, 2, 16))
    spec = CacheSpec(
        batch=1, q_heads=4, kv_heads=2, head_dim=16, capacity=64, dtype=jnp.float32
    )
    cache = kvjax.init_layer(BASE.follower(), dataclasses.replace(spec, capacity=200))
    with pytest.raises(ValueError, match=r"got no selection; pass selection=info.selection"):
        kvjax.attention(cache, q, k, k)
    wrong = kvjax.Selection(jnp.zeros((1, 3, 1, 8), jnp.int32), jnp.ones((1, 3, 1, 8), bool))
    with pytest.raises(
        ValueError, match=r"slots\[1, 3, 1, 8\], but this layer has B=1, K=2, G=2"
    ):
        kvjax.attention(cache, q, k, k, selection=wrong)


def test_a_window_longer_than_a_row_changes_nothing_of_a_follower() -> None:
    """Also where the anchor found fewer tokens than its selection has room for."""
    tokens, lengths, outs = drive.random_tokens(SPEC, 1), np.array([90, 20]), []
    caches = [
        drive.fill(drive.new_cache(policy, SPEC), tokens, lengths)[0]
        for policy in (BASE, BASE.follower())
    ]
    for window in (None, 91):
        step = jax.jit(partial(kvjax.attention_info, window=window))
        _, _, info = step(caches[0], *tokens.at(lengths[:, None]))
        outs.append(step(caches[1], *tokens.at(lengths[:, None]), selection=info.selection)[0])
    np.testing.assert_allclose(outs[1], outs[0], atol=2e-6)
