"""Random configurations: a policy of any parts that fit together, a spec, and settings of the
hook.

A seed always names the same configuration: a failure is repeated by its number. Combinations
that the library refuses are drawn again, and the refusal must be one sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax import CacheSpec, presets
from kvjax.contrib.adakv import HeadBudgets
from kvjax.contrib.magicpig import Sampled, SimHash
from kvjax.contrib.mikv import Mixed
from kvjax.contrib.pqcache import ProductCodes
from kvjax.contrib.razorattention import Compensated
from kvjax.contrib.shadowkv import LowRank, MeanPages, OutlierRetrieval
from kvjax.models import rope as ropes

CHUNK = 16  # tokens of prompt in a call
WINDOWS = (None, None, None, 1, 7, 30)
# Configurations from these numbers on are of what was added when those before them had a
# number.
NEWER, NEWEST, LATEST = 500, 1000, 1600
GROUP_REDUCES = (
    "mean_softmax",
    "per_head",
    "mean_query",
    "mean_score",
    "max_softmax",
    "sum_softmax",
)


@dataclass(frozen=True)
class Configuration:
    policy: kvjax.Policy
    spec: CacheSpec
    window: int | None
    several: int = 0  # tokens of a `decode` call; 0 for scripts without
    leader: kvjax.Policy | None = None  # of a layer before, whose selection `policy` follows
    truncates: bool = False  # whether scripts cut the cache, where the policy can
    rope: Any = None  # the kind of RoPE that turns queries and keys, by their positions
    placement: kvjax.Placement | None = None

    @property
    def layers(self) -> list[kvjax.Policy]:
        return [self.policy] if self.leader is None else [self.leader, self.policy]

    @property
    def keeps_evicted(self) -> bool:
        """Whether tokens that an evictor drops are in a store, so that a step reads everything."""
        return hasattr(self.policy, "evictor") and hasattr(self.policy, "store")

    def __str__(self) -> str:
        leader = "" if self.leader is None else f", after {self.leader}"
        beside = "".join(
            f", {part}" for part in (self.rope, self.placement) if part is not None
        )
        return f"{self.policy}{leader} for {self.spec}, window={self.window}, several={self.several}{beside}"


def configuration(seed: int) -> Configuration:
    """The configuration of a seed; the first of its draws that the library accepts."""
    rng = np.random.default_rng([seed, 23])
    for _ in range(200):
        try:
            draws = (_policy, _newer, _newest)
            latest = _one(rng, *draws) if seed >= LATEST else _newest
            draw = _policy if seed < NEWER else _newer if seed < NEWEST else latest
            policy, spec, window = draw(rng), _spec(rng), _one(rng, *WINDOWS)
            if isinstance(policy, kvjax.PerLayer):
                leader, follower = policy.policy(0), policy.policy(1)
                drawn = Configuration(follower, spec, window, _one(rng, 2, 3, 5), leader)
            else:
                drawn = (
                    Configuration(policy, spec, window)
                    if seed < NEWER
                    else _with_steps(rng, policy, spec, window)
                )
            if seed >= LATEST:
                drawn = _rotated(
                    rng, replace(drawn, several=drawn.several and _one(rng, 2, 5, 11, 16))
                )
            jax.eval_shape(partial(kvjax.init, drawn.layers, spec, layers=len(drawn.layers)))
        except (ValueError, NotImplementedError) as refusal:
            if "\n" in str(refusal):
                raise AssertionError(
                    f"seed {seed} is refused by more than a sentence: {refusal}"
                ) from refusal
            continue
        demote = getattr(getattr(policy, "retrieval", policy), "demote", None)
        # A block that forgets the order of its tokens refuses a sliding window when a step is
        # traced.
        ordered = (
            getattr(demote, "ordered", True)
            and not hasattr(drawn.policy, "window")
            and not drawn.keeps_evicted
        )
        return replace(drawn, window=window if ordered else None, truncates=seed >= NEWEST)
    raise AssertionError(f"seed {seed}: nothing of 200 draws was accepted")


def _with_steps(
    rng: np.random.Generator, policy: kvjax.Policy, spec: CacheSpec, window: int | None
) -> Configuration:
    """With several steps at once, and where the policy selects for others, perhaps a follower
    in its place.
    """
    several = _one(rng, 2, 3, 5)
    if hasattr(policy, "follower") and rng.random() < 0.4:
        heads = tuple(int(head) for head in rng.integers(0, spec.kv_heads, spec.kv_heads))
        follower = policy.follower(_one(rng, None, heads))
        return Configuration(follower, spec, window, several, policy)
    return Configuration(policy, spec, window, several)


def _rotated(rng: np.random.Generator, drawn: Configuration) -> Configuration:
    """With keys as a model with some kind of RoPE gives them, for a text of 60 tokens where its
    kind asks for that.
    """
    half = drawn.spec.head_dim // 2
    longer = {
        "short_factor": (1.0,) * half,
        "long_factor": tuple(1 + 0.5 * i for i in range(half)),
    }
    rope = _one(
        rng,
        None,
        ropes.Default(theta=_one(rng, 100.0, 10000.0)),
        ropes.Linear(factor=4.0),
        ropes.Llama3(
            theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original=32
        ),
        ropes.Yarn(theta=500.0, factor=4.0, original=32),
        ropes.Dynamic(factor=2.0, original=_one(rng, 20, 80)),
        ropes.LongRope(**longer, original=_one(rng, 20, 80), attention_factor=1.2),
    )
    store = getattr(drawn.policy, "store", None)
    if (
        isinstance(store, LowRank)
        and store.rope is not None
        and rope is not None
        and not rope.by_length
    ):
        drawn = replace(drawn, policy=replace(drawn.policy, store=replace(store, rope=rope)))  # type: ignore[type-var]
    return replace(drawn, rope=rope)


def placed(seed: int) -> Configuration:
    """The configuration of a seed on several of 8 devices: the first placement of its draws
    that is accepted.
    """
    rng, drawn = np.random.default_rng([seed, 25]), configuration(seed)
    spec = drawn.spec
    if spec.kv_heads == 1:
        spec = replace(spec, q_heads=4, kv_heads=2)
    spec = replace(spec, batch=2 * int(rng.integers(1, 3)))
    axes = {"batch": "data", "heads": "model", "context": "ctx"}
    for _ in range(20):
        used = [axis for axis in axes if rng.random() < 0.5]
        mesh = (
            jax.make_mesh((2,) * len(used), tuple(axes[axis] for axis in used))
            if used
            else None
        )
        if mesh is None:
            continue
        placement = kvjax.Placement(mesh=mesh, **{axis: axes[axis] for axis in used})
        tried = replace(drawn, spec=spec, placement=placement)
        try:
            made = jax.eval_shape(
                partial(
                    kvjax.init,
                    tried.layers,
                    spec,
                    layers=len(tried.layers),
                    placement=placement,
                )
            )
        except (ValueError, NotImplementedError) as refusal:
            if "\n" in str(refusal):
                raise AssertionError(
                    f"seed {seed} is refused by more than a sentence: {refusal}"
                ) from refusal
            continue
        # Chunks that cannot be dealt to the devices became larger, and the oracle must round
        # the same chunks.
        first, *_, last = (layer.policy for layer in (made.layers[0], *made.layers))
        return replace(tried, policy=last, leader=tried.leader and first)
    raise AssertionError(f"seed {seed}: no placement of 20 draws was accepted for {drawn}")


def heads(spec: CacheSpec) -> tuple[int, int, int]:
    return spec.q_heads, spec.kv_heads, spec.kv_heads


def _one(rng: np.random.Generator, *values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def _spec(rng: np.random.Generator) -> CacheSpec:
    q_heads, kv_heads = _one(rng, (4, 2), (2, 2), (7, 1), (8, 2))
    return CacheSpec(
        batch=int(rng.integers(1, 4)),
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=_one(rng, 8, 16, 32),
        capacity=int(rng.integers(20, 90)),
        dtype=_one(rng, "float32", "float32", "float32", "bfloat16", "float16"),
    )


def _policy(rng: np.random.Generator) -> kvjax.Policy:
    kinds: tuple[Callable[[np.random.Generator], kvjax.Policy], ...] = (
        _retrieval,
        _retrieval,
        _retrieval,
        lambda rng: kvjax.Speculative(_retrieval(rng), tau=_one(rng, -1.0, 0.0, 0.5, 2.0)),
        lambda rng: kvjax.Compressed(
            store=_store(rng),
            sink=_sink(rng),
            local=int(rng.integers(1, 12)),
            demote=_demote(rng),
        ),
        lambda rng: kvjax.Evicting(evictor=_evictor(rng), budget=int(rng.integers(4, 60))),
        lambda rng: kvjax.Full(),
        _preset,
    )
    return kinds[int(rng.integers(len(kinds)))](rng)


def _newer(rng: np.random.Generator) -> kvjax.Policy:
    """A policy with a part that `_policy` lacks, or one of `_policy` for several steps,
    rollback and followers.
    """
    kinds: tuple[Callable[[np.random.Generator], kvjax.Policy], ...] = (
        _policy,
        _newer_retrieval,
        _newer_retrieval,
        _newer_retrieval,
        lambda rng: kvjax.Speculative(
            _newer_retrieval(rng), tau=_one(rng, -1.0, 0.0, 0.5, 2.0)
        ),
        _sampled,
        lambda rng: kvjax.Evicting(
            evictor=_newer_evictor(rng), budget=int(rng.integers(4, 60))
        ),
        lambda rng: Compensated(_window(rng)),
        lambda rng: kvjax.PerHead(
            heads=(int(rng.integers(2)),), selected=kvjax.Full(), others=_window(rng)
        ),
    )
    return kinds[int(rng.integers(len(kinds)))](rng)


def _newest(rng: np.random.Generator) -> kvjax.Policy | kvjax.PerLayer:
    """A policy with a part that `_newer` lacks, or one of `_newer`, whose caches are also cut
    to shorter ones.
    """
    kinds: tuple[Callable[[np.random.Generator], kvjax.Policy | kvjax.PerLayer], ...] = (
        _newer,
        _low_rank,
        _low_rank,
        lambda rng: HeadBudgets(
            evictor=_one(rng, _newer_evictor, _attentive)(rng),
            budget=int(rng.integers(6, 60)),
            floor=_one(rng, 0.0, 0.2, 1.0),
            ceiling=_one(rng, 1.0, 1.5, 3.0),
        ),
        lambda rng: Mixed(
            evictor=_attentive(rng),
            budget=int(rng.integers(4, 40)),
            store=_low_store(rng),
            chunk=_one(rng, 8, 16),
        ),
        lambda rng: kvjax.Evicting(evictor=kvjax.LogSpaced(), budget=int(rng.integers(3, 60))),
        _whole,
        _shared_preset,
    )
    return kinds[int(rng.integers(len(kinds)))](rng)


def _low_rank(rng: np.random.Generator) -> OutlierRetrieval:
    page, learn = _one(rng, 4, 8), _one(rng, 8, 16)
    return OutlierRetrieval(
        selector=MeanPages(page=page, group_reduce=_one(rng, *GROUP_REDUCES)),
        store=LowRank(
            rank=int(rng.integers(1, learn + 1)),
            page=page,
            outliers=_one(rng, 0, 1, 3),
            learn=learn,
            rope=_one(rng, None, ropes.Default()),
            values=_one(
                rng, kvjax.Dense(), kvjax.HostOffload(page=page), kvjax.HostOffload(page=1)
            ),
        ),
        budget=int(rng.integers(8, 60)),
        sink=_sink(rng),
        local=int(rng.integers(1, 12)),
        demote=kvjax.Fifo(leave=_one(rng, learn, 2 * learn)),
    )


def _whole(rng: np.random.Generator) -> kvjax.Policy:
    """A policy whose cache can be cut to any shorter one."""
    return _one(
        rng,
        lambda: kvjax.Full(),
        lambda: replace(
            _newer_retrieval(rng),
            store=_one(rng, kvjax.Dense(), kvjax.HostOffload(), kvjax.HotSet(tokens=512)),
        ),
        lambda: kvjax.Compressed(
            store=_one(rng, kvjax.Dense(), kvjax.HostOffload(page=8)),
            sink=_sink(rng),
            local=int(rng.integers(1, 12)),
            demote=kvjax.Fifo(leave=_one(rng, 8, 16)),
        ),
    )()


def _shared_preset(rng: np.random.Generator) -> kvjax.PerLayer:
    """Two layers of a preset, of which the second follows the first."""
    budget, hot = int(rng.integers(24, 60)), _one(rng, 0, 512)
    hosted = f"host+{hot}" if hot else "host"
    store = hosted if hot else "device"
    return _one(
        rng,
        lambda: presets.fier(
            budget, group=8, chunk=16, store=store, layers=presets.Layers(dense=0, share=2)
        ),
        lambda: presets.quest(
            budget, page=8, store=store, layers=presets.Layers(dense=0, share=2)
        ),
        lambda: presets.freekv(
            budget,
            page=8,
            sink=4,
            local=8,
            store=f"host+{hot}" if hot else "host",
            layers=presets.Layers(dense=0, share=2),
        ),
        lambda: presets.exact(budget, chunk=16, layers=presets.Layers(dense=0, anchors=(0,))),
    )()


def _attentive(rng: np.random.Generator) -> Any:
    """An evictor that looks at attention in every step."""
    return _one(
        rng,
        lambda: kvjax.HeavyHitter(recent=_one(rng, 0.0, 0.3, 0.8)),
        lambda: kvjax.LastQuery(),
    )()


def _low_store(rng: np.random.Generator) -> Any:
    return _one(
        rng,
        lambda: kvjax.Dense(),
        lambda: kvjax.Dense(),
        lambda: kvjax.HostOffload(page=_one(rng, 1, 8)),
        lambda: kvjax.Quantized(bits=8, key_group=8, value_group=8),
    )()


def _newer_retrieval(rng: np.random.Generator) -> kvjax.Retrieval:
    """A Retrieval with a selector, a store or both that `_retrieval` lacks."""
    chunk = _one(rng, 8, 16)
    rule = _one(rng, *GROUP_REDUCES)
    selector = _one(
        rng,
        lambda: ProductCodes(
            parts=_one(rng, 2, 4), bits=_one(rng, 2, 3), learn=chunk, group_reduce=rule
        ),
        lambda: _selector(rng),
    )()
    page = _one(rng, 1, 4, 8)
    host = _one(
        rng,
        kvjax.HostOffload(page=page),
        kvjax.HostFloat8(page=page),
        kvjax.HostTurboQuant(page=page),
    )
    store = _one(
        rng, lambda: kvjax.HotSet(tokens=512, store=host), lambda: host, lambda: _store(rng)
    )()
    return replace(
        _retrieval(rng), selector=selector, store=store, demote=kvjax.Fifo(leave=chunk)
    )


def _sampled(rng: np.random.Generator) -> Sampled:
    chunk = _one(rng, 8, 16)
    hashing = SimHash(
        bits=_one(rng, 2, 3, 5),
        tables=_one(rng, 4, 40),
        least=_one(rng, 1, 2),
        learn=chunk,
        seed=int(rng.integers(9)),
    )
    return Sampled(
        hashing=hashing,
        store=_one(rng, kvjax.Dense(), kvjax.HostOffload()),
        budget=int(rng.integers(20, 60)),
        sink=_sink(rng),
        local=int(rng.integers(1, 8)),
        demote=kvjax.Fifo(leave=chunk),
    )


def _window(rng: np.random.Generator) -> kvjax.Evicting:
    return kvjax.Evicting(
        evictor=kvjax.Sliding(sink=_one(rng, 0, 2, 4)), budget=int(rng.integers(6, 40))
    )


def _newer_evictor(rng: np.random.Generator) -> Any:
    return _one(
        rng,
        lambda: kvjax.LastUse(threshold=_one(rng, 0.0, 1e-4, 0.1)),
        lambda: kvjax.Observation(
            window=_one(rng, 1, 4, 8), kernel_size=_one(rng, 1, 3), pooling="mean"
        ),
    )()


def _preset(rng: np.random.Generator) -> kvjax.Policy:
    """A preset with small sizes, and defaults where it has them."""
    budget = int(rng.integers(24, 60))
    return _one(
        rng,
        lambda: presets.fier(budget, group=8, chunk=16),
        lambda: presets.quest(budget, page=8),
        lambda: presets.pariskv(
            budget, sink=4, local=8, chunk=16, dense_below=_one(rng, 0, 30)
        ),
        lambda: presets.freekv(budget, page=8, sink=4, local=8),
        lambda: presets.exact(budget, chunk=16),
        lambda: presets.logquant(window=8, group=8),
        lambda: presets.kivi(residual=16, group=8),
        lambda: presets.snapkv(budget, window=8, kernel_size=3),
        lambda: presets.h2o(budget),
        lambda: presets.tova(budget),
        lambda: presets.streaming_llm(budget),
    )().rest


def _retrieval(rng: np.random.Generator) -> kvjax.Retrieval:
    return kvjax.Retrieval(
        selector=_selector(rng),
        store=_store(rng),
        budget=int(rng.integers(8, 60)),
        sink=_sink(rng),
        local=int(rng.integers(1, 12)),
        demote=_demote(rng),
        dense_below=_one(rng, 0, 0, 25),
    )


def _sink(rng: np.random.Generator) -> int:
    return _one(rng, 0, 0, 1, 4)


def _selector(rng: np.random.Generator) -> Any:
    rule = _one(rng, *GROUP_REDUCES)
    return _one(
        rng,
        lambda: kvjax.Fier(group=_one(rng, 4, 8, 16), group_reduce=rule),
        lambda: kvjax.MinMaxPages(
            page=_one(rng, 1, 4, 8), group_reduce=rule, pending=_one(rng, "box", "exact")
        ),
        lambda: kvjax.CentrePages(
            page=_one(rng, 4, 8), group_reduce=rule, pending=_one(rng, "box", "exact")
        ),
        lambda: kvjax.Exact(group_reduce=rule),
        lambda: kvjax.Paris(
            votes=_one(rng, "tiers", "plain"),
            candidates=_one(rng, None, 8, 20),
            group_reduce=rule,
        ),
    )()


def _store(rng: np.random.Generator) -> Any:
    return _one(
        rng,
        lambda: kvjax.Dense(),
        lambda: kvjax.Dense(),
        lambda: kvjax.HostOffload(page=_one(rng, 1, 4, 8)),
        lambda: kvjax.Quantized(
            bits=_one(rng, 2, 3, 4, 8),
            key_axis=_one(rng, "channel", "token"),
            key_group=8,
            value_group=8,
        ),
    )()


def _demote(rng: np.random.Generator) -> Any:
    return _one(
        rng, kvjax.Fifo(leave=8), kvjax.Fifo(leave=16), kvjax.LogSparse(window=_one(rng, 8, 12))
    )


def _evictor(rng: np.random.Generator) -> Any:
    return _one(
        rng,
        lambda: kvjax.Sliding(sink=_one(rng, 0, 2, 4)),
        lambda: kvjax.HeavyHitter(recent=_one(rng, 0.0, 0.3, 0.8)),
        lambda: kvjax.LastQuery(),
        lambda: kvjax.Observation(window=_one(rng, 1, 4, 8), kernel_size=_one(rng, 1, 3, 5)),
    )()
