"""A newcomer's first mistakes raise errors that say what was given, what was expected and how
to fix it.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax.tree_util import register_dataclass

import kvjax
from kvjax import models, presets
from kvjax.evaluate import Example
from kvjax.evaluate.tasks import check_task, checking
from kvjax.generation import (
    compile_ahead,
    decode,
    drafts,
    prefill,
    processors,
    warm_up,
)
from kvjax.generation.sampling import sampling

SPEC = kvjax.CacheSpec(
    batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=64, dtype="float32"
)
CONFIG = models.DecoderConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
)


def layer(policy: Any = None) -> kvjax.LayerCache:
    return kvjax.init_layer(kvjax.Full() if policy is None else policy, SPEC)


def cache() -> kvjax.Cache:
    return kvjax.init(kvjax.Full(), SPEC, layers=2)


def model() -> models.Decoder:
    return models.Decoder(CONFIG)


def qkv(T: int = 3, B: int = 2, dtype: Any = np.float32) -> tuple[Any, Any, Any]:
    return tuple(np.ones((B, T, heads, 16)).astype(dtype) for heads in (4, 2, 2))  # type: ignore[return-value]


RETRIEVAL = kvjax.Retrieval(
    selector=kvjax.Fier(group=8),
    budget=24,
    sink=2,
    local=8,
    demote=kvjax.Fifo(leave=8),
    dense_below=0,
)


def mesh() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))


def shared(heads: Any) -> kvjax.Cache:
    policies = kvjax.share_selections(
        presets.fier(24, group=8, chunk=8, dense_capacity=0), share=2, heads=heads
    )
    return kvjax.init(policies, SPEC, layers=4)


def insert(row: Any) -> kvjax.LayerCache:
    return kvjax.insert(
        layer(), kvjax.init_layer(kvjax.Full(), dataclasses.replace(SPEC, batch=1)), row
    )


class HalfASelector:
    unit = 1

    def check(self, spec: kvjax.CacheSpec, chunk: int) -> None: ...

    def init(self, spec: kvjax.CacheSpec, slots: int) -> None: ...


class ForeignArray:
    """An array of another library, whose dtypes NumPy does not know."""

    shape = (2, 1, 4, 16)
    ndim = 4
    dtype = "theirs.float32"

    def __array__(self, *asked: Any, **how: Any) -> np.ndarray:
        return np.ones(self.shape, np.float32)


def running() -> kvjax.generation.Stream:
    return kvjax.stream(model(), cache(), [[1], [2]], max_new_tokens=2)


def donated(made: Any) -> Any:
    """`made` after a call that donated its arrays."""
    for leaf in jax.tree.leaves(made):
        leaf.delete()
    return made


# ---------------------------------------------------------------------------------------- drafts and tasks of one's own


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Guesser:
    """Drafts token 7, as often as it may."""

    seen: Any  # i32[B] tokens so far
    max_tokens: Any = dataclasses.field(default=3, metadata={"static": True})
    exact: ClassVar[Any] = False
    idle: ClassVar[Any] = None

    @property
    def state(self) -> Any:
        return self.seen

    def with_state(self, state: Any) -> Any:
        return dataclasses.replace(self, seen=state)

    def pays(self, active: Any, most: Any) -> None:
        return None

    def propose(self, now: drafts.Round) -> Any:
        tokens = jnp.full((len(now.token), self.max_tokens), 7, jnp.int32)
        drafted = jnp.full_like(now.token, self.max_tokens)
        return drafts.Proposal(tokens, drafted, now.cache, self)

    def accept(self, tokens: Any, taken: Any, drafted: Any) -> Any:
        return dataclasses.replace(self, seen=self.seen + taken)


class Loose(Guesser):
    """A drafter that nothing registers."""

    def __init__(self) -> None:
        object.__setattr__(self, "seen", None)
        object.__setattr__(self, "max_tokens", 3)


def changed(found: Any, **values: Any) -> Any:
    """A proposal or an example with other fields."""
    if isinstance(found, drafts.Proposal):
        return found._replace(**values)
    return dataclasses.replace(found, **values)


def guess(*, start: Any = None, **changes: Any) -> Any:
    """Generates with drafts of a `Guesser` of which some members are others."""
    kind = register_dataclass(
        dataclasses.dataclass(frozen=True)(type("Guesser", (Guesser,), changes))
    )

    class Guess:
        tokens = 3

        def start(self, model: Any, cache: Any, *prompt: Any) -> Any:
            return kind(jnp.zeros(2, jnp.int32)) if start is None else start

    return kvjax.generate(model(), cache(), [[1], [2]], max_new_tokens=4, draft=Guess())


def proposing(**values: Any) -> Any:
    """Generates with drafts whose proposals have some fields changed."""
    return guess(propose=lambda own, now: changed(Guesser.propose(own, now), **values))


class Quiz:
    """A task of one question."""

    name: Any = "quiz"
    metric: Any = "exact match"
    max_new_tokens: Any = 4
    stop: Any = ("\n",)
    chat: Any = False

    def key(self) -> Any:
        return {"task": "quiz"}

    def examples(self, tokenizer: Any) -> Any:
        return [Example("0", "What is it?", ("42",))]

    def score(self, example: Example, answer: str) -> Any:
        return float(answer == example.answers[0])


def ask(**changes: Any) -> Any:
    """Everything that an evaluation asks of a `Quiz` of which some members are others."""
    task = check_task("compare(task=...)", type("Quiz", (Quiz,), changes)())
    checking.key_of(task)
    (example,) = checking.examples_of(task, None, vocabulary=50)
    return checking.score_of(task, example, "7")


def asking(**values: Any) -> Any:
    """Asks a `Quiz` whose example has some fields changed."""
    return ask(examples=lambda task, _: [changed(Quiz.examples(task, None)[0], **values)])


def sums(processors: Any) -> Any:
    return kvjax.generate(model(), cache(), [[1], [2]], max_new_tokens=2, processors=processors)


ROWS: dict[str, tuple[Callable[[], Any], str]] = {
    # ------------------------------------------------------------------------------------------------ making a cache
    "the name of a preset": (
        lambda: kvjax.init("fier", SPEC, layers=2),  # type: ignore[arg-type]
        r"init\(policy=\.\.\.\) must be a policy, got the string 'fier'; write it as code, for example kvjax\.presets",
    ),
    "a preset that was not called": (
        lambda: kvjax.init(presets.fier, SPEC, layers=2),  # type: ignore[arg-type]
        r"got the function fier; call it: fier\(\.\.\.\)",
    ),
    "a preset whose dense layers are the whole model": (
        lambda: kvjax.init(presets.fier(400), SPEC, layers=2),
        r"policies of their own for the first 2 layers and layers=2, so no layer uses Retrieval; give fewer, such as "
        r"Layers\(dense=1\) of a preset",
    ),
    "a class of policy": (
        lambda: kvjax.init(kvjax.Full, SPEC, layers=2),  # type: ignore[arg-type]
        r"got the class Full; make an instance: Full\(\.\.\.\)",
    ),
    "a class of policy for a layer": (
        lambda: kvjax.init_layer(kvjax.Full, SPEC),  # type: ignore[arg-type]
        r"init_layer\(policy=\.\.\.\) must be a policy, got the class Full",
    ),
    "a selector for a policy": (
        lambda: kvjax.init_layer(kvjax.Fier(), SPEC),  # type: ignore[arg-type]
        r"got the selector Fier; put it into one: kvjax\.Retrieval\(selector=\.\.\., budget=256\)",
    ),
    "an evictor for a policy": (
        lambda: kvjax.init(kvjax.evictors.KeyDiff(), SPEC, layers=2),  # type: ignore[arg-type]
        r"got the evictor KeyDiff; put it into one: kvjax\.Evicting\(evictor=\.\.\., budget=256\)",
    ),
    "a store for a policy": (
        lambda: kvjax.testing.check_policy(kvjax.HostOffload()),  # type: ignore[arg-type]
        r"got the store HostOffload; put it into one: kvjax\.Compressed\(store=\.\.\.\)",
    ),
    "the name of a preset for a layer": (
        lambda: kvjax.init_layer("fier", SPEC),  # type: ignore[arg-type]
        r"the string 'fier'; write it as code, for example kvjax\.Retrieval\(selector=kvjax\.Fier\(\), budget=256\)",
    ),
    "a dict for the spec": (
        lambda: kvjax.init(kvjax.Full(), {"batch": 1}, layers=2),  # type: ignore[arg-type]
        r"init\(spec=\.\.\.\) must be a kvjax\.CacheSpec, got a dict; make one with kvjax\.CacheSpec\(batch",
    ),
    "policy and spec the wrong way round": (
        lambda: kvjax.init(SPEC, kvjax.Full(), layers=2),  # type: ignore[arg-type]
        r"must be a policy, got a CacheSpec, which has no init",
    ),
    "a class of selector": (
        lambda: kvjax.Retrieval(selector=kvjax.Fier, budget=400),  # type: ignore[arg-type]
        r"Retrieval\(selector=\.\.\.\) must be a selector, got the class Fier; make an instance: Fier\(\.\.\.\)",
    ),
    "a selector by name": (
        lambda: kvjax.Retrieval(selector="fier", budget=400),  # type: ignore[arg-type]
        r"must be a selector, got the string 'fier'; write it as code, for example kvjax\.Fier\(\)",
    ),
    "a selector that lacks a verb": (
        lambda: kvjax.Retrieval(selector=HalfASelector(), budget=400),  # type: ignore[arg-type]
        r"got a HalfASelector, which has no append, score, select, group_reduce; .* or make kvjax\.Selector its base",
    ),
    "a class of store": (
        lambda: kvjax.Retrieval(selector=kvjax.Fier(), budget=400, store=kvjax.Dense),  # type: ignore[arg-type]
        r"Retrieval\(store=\.\.\.\) must be a store, got the class Dense; make an instance",
    ),
    "a class of evictor": (
        lambda: kvjax.Evicting(evictor=kvjax.Sliding),  # type: ignore[arg-type]
        r"Evicting\(evictor=\.\.\.\) must be an evictor, got the class Sliding",
    ),
    "a number for a demotion": (
        lambda: kvjax.Retrieval(selector=kvjax.Fier(), budget=400, demote=32),  # type: ignore[arg-type]
        r"Retrieval\(demote=\.\.\.\) must be a demotion, got 32, which has no .*; give for example kvjax\.Fifo\(",
    ),
    "a class of demotion": (
        lambda: kvjax.Compressed(demote=kvjax.Fifo),  # type: ignore[arg-type]
        r"Compressed\(demote=\.\.\.\) must be a demotion, got the class Fifo; make an instance: Fifo\(\.\.\.\)",
    ),
    "an unknown preset in capitals": (
        lambda: presets.find("FIER"),
        r"unknown cache 'FIER'; did you mean 'fier'\? There",
    ),
    "an unknown preset near another": (
        lambda: presets.find("pariskw"),
        "did you mean 'pariskv'",
    ),
    "an unknown preset with a dash": (
        lambda: presets.find("streaming-llm"),
        "did you mean 'streaming_llm'",
    ),
    "an unknown preset near none": (
        lambda: presets.find("lru"),
        "unknown cache 'lru'; there are full, fier, ",
    ),
    "a number of layers that is none": (
        lambda: kvjax.init(kvjax.Full(), SPEC, layers=0),
        r"init\(layers=\.\.\.\) must be at least 1, got 0",
    ),
    # ----------------------------------------------------------------------------------------------------- attention
    "a model's cache for a layer": (
        lambda: kvjax.attention(cache(), *qkv()),  # type: ignore[arg-type]
        r"attention takes the cache of one layer, got the Cache of a whole model; pass cache\.layers\[i\]",
    ),
    "a policy for a cache": (
        lambda: kvjax.attention(kvjax.Full(), *qkv()),  # type: ignore[arg-type]
        r"attention takes a kvjax\.LayerCache or None, got a Full; kvjax\.init_layer makes one",
    ),
    "the cache last": (
        lambda: kvjax.attention(*qkv(), layer()),  # type: ignore[arg-type]
        r"attention takes the cache first: kvjax\.attention\(cache, q, k, v\)",
    ),
    "heads before tokens": (
        lambda: kvjax.attention(layer(), *(a.swapaxes(1, 2) for a in qkv())),
        r"q has N=3 but the cache has N=4; the axes of q must be \[B, T, N, D\]: use jnp\.swapaxes; q\[2, 4, 3",
    ),
    "a donated layer": (
        lambda: kvjax.attention(donated(layer()), *qkv()),
        r"attention got a cache whose arrays are gone: .*donated.*use the cache that it returned",
    ),
    "a second chunk told as the first": (
        lambda: kvjax.attention(kvjax.attention(layer(), *qkv())[1], *qkv(), first_chunk=True),
        r"attention\(first_chunk=True\) promises an empty cache, but a row of this one holds 3 tokens; leave it out",
    ),
    "lists": (
        lambda: kvjax.attention(None, *(array.tolist() for array in qkv())),  # type: ignore[arg-type]
        r"q must be an array of floats, got a list; convert it with jnp\.asarray",
    ),
    "integers": (
        lambda: kvjax.attention(None, *qkv(dtype=np.int32)),
        r"q must be an array of floats, got int32\[2, 3",
    ),
    "booleans": (
        lambda: kvjax.attention(None, *qkv(dtype=bool)),
        r"q must be an array of floats, got bool",
    ),
    "complex": (
        lambda: kvjax.attention(None, *qkv(dtype=np.complex64)),
        r"q must be .* got complex64",
    ),
    "integer values": (
        lambda: kvjax.attention(None, *qkv()[:2], qkv(dtype=np.int8)[2]),
        r"v must be an array of floats, got int8\[2, 3, 2, 16\]; convert it with v\.astype",
    ),
    "a scale of nan": (
        lambda: kvjax.attention(None, *qkv(), scale=float("nan")),
        r"attention\(scale=\.\.\.\) must be a finite number, got nan",
    ),
    "an infinite scale": (
        lambda: kvjax.attention(layer(), *qkv(1), scale=np.inf),
        r"attention\(scale=\.\.\.\) must be a finite number, got inf",
    ),
    "a scale that overflows": (
        lambda: kvjax.attention(layer(), *qkv(1), scale=1e38),
        r"attention\(scale=\.\.\.\) must be at most 1e\+06, got 1e\+38: larger logits overflow",
    ),
    "float8 arrays": (
        lambda: kvjax.attention(None, *(a.astype(jnp.float8_e4m3fn) for a in qkv())),
        r"q must be an array of floats, got float8_e4m3fn.* of 16 bits or more",
    ),
    "a scale that is text": (
        lambda: kvjax.attention(None, *qkv(), scale="half"),  # type: ignore[arg-type]
        "must be a finite number, got 'half'",
    ),
    "a scale that is a number as text": (
        lambda: kvjax.attention(None, *qkv(), scale="1"),  # type: ignore[arg-type]
        r"attention\(scale=\.\.\.\) must be a finite number, got '1'",
    ),
    "a flag as text": (
        lambda: kvjax.attention(layer(), *qkv(), first_chunk="no"),  # type: ignore[arg-type]
        r"attention\(first_chunk=\.\.\.\) must be True or False, got 'no'",
    ),
    "a flag of steps as text": (
        lambda: kvjax.decode(layer(), *qkv(1), flush="false"),  # type: ignore[arg-type]
        r"decode\(flush=\.\.\.\) must be True or False, got 'false'",
    ),
    "the laws of a name": (
        lambda: kvjax.testing.check_policy("fier"),
        r"check_policy\(policy=\.\.\.\) must be a policy, got the string 'fier'; write it as code",
    ),
    "the laws by what is no spec": (
        lambda: kvjax.testing.check_policy(kvjax.Full(), 3),  # type: ignore[arg-type]
        r"check_policy\(spec=\.\.\.\) must be a kvjax\.CacheSpec or None, got 3",
    ),
    "a model of no directory": (
        lambda: kvjax.models.load(None),  # type: ignore[arg-type]
        r"load\(directory=\.\.\.\) must be the path of a checkpoint's directory, got None",
    ),
    "a model before its directory": (
        lambda: models.save(model(), "mine"),  # type: ignore[arg-type]
        r"save\(directory=\.\.\.\) must be the path of a checkpoint's directory, got a Decoder",
    ),
    "a checkpoint for its model": (
        lambda: models.save("mine", models.load(models.shipped())),  # type: ignore[arg-type]
        r"save\(model=\.\.\.\) must be a Decoder, got .*; give its model",
    ),
    "a traced scale": (
        lambda: jax.jit(lambda scale: kvjax.attention(None, *qkv(), scale=scale)[0])(0.5),
        "must be a Python number, got a traced array",
    ),
    "no tokens": (
        lambda: kvjax.attention(None, *qkv(T=0)),
        "q, k and v have T=0 tokens; give at least one",
    ),
    "no tokens with a cache": (lambda: kvjax.attention(layer(), *qkv(T=0)), "T=0 tokens"),
    "no rows": (
        lambda: kvjax.attention(None, *qkv(B=0)),
        "q, k and v have B=0 rows; give at least one",
    ),
    "more real tokens than there are": (
        lambda: kvjax.attention(layer(), *qkv(), lengths=[1, 4]),
        r"lengths must be in \[0, T=3\], got 4",
    ),
    "fewer real tokens than none": (
        lambda: kvjax.attention(layer(), *qkv(), lengths=np.array([-1, 3])),
        r"lengths must be in \[0, T=3\], got -1",
    ),
    "lengths that are text": (
        lambda: kvjax.attention(layer(), *qkv(), lengths="ab"),
        r"lengths must be integers, such as \[3, 5\], got 'ab'",
    ),
    "lengths for other rows": (
        lambda: kvjax.attention(layer(), *qkv(), lengths=[1]),
        r"lengths must have shape \[B=2\], got \[1\]",
    ),
    "active rows by number": (
        lambda: kvjax.attention(layer(), *qkv(1), active=[1, 0]),
        r"active must be bool, got int32; convert it with jnp\.asarray\(active, bool\)",
    ),
    "active rows of a prompt": (
        lambda: kvjax.attention(layer(), *qkv(), active=[True, True]),
        r"active is for decode steps \(T=1\), got T=3; for a prompt give lengths",
    ),
    # ------------------------------------------------------------------------------------- prefill, decode, rollback
    "a prompt without rows": (
        lambda: kvjax.prefill(layer(), *(a[0] for a in qkv())),
        r"q must have the 4 dimensions \[B, T, N, D\]; x\[None\] adds the row, .*; q\[3, 4, 16\]",
    ),
    "a prompt of other rows": (
        lambda: kvjax.prefill(layer(), *qkv(B=3)),
        r"q has B=3 but the cache has B=2; q\[3, 3, 4, 16\]",
    ),
    "a prompt of other heads": (
        lambda: kvjax.prefill(layer(), qkv()[0], *qkv()[:2]),
        r"k has K=4 but the cache has K=2; give k as it is projected, not repeated for the query heads",
    ),
    "values of other tokens": (
        lambda: kvjax.prefill(layer(), *qkv()[:2], qkv(4)[2]),
        "v has T=4 but q has T=3",
    ),
    "a prompt without a cache": (
        lambda: kvjax.prefill(None, *qkv()),  # type: ignore[arg-type]
        r"prefill takes a kvjax\.LayerCache, got None; kvjax\.init_layer makes one",
    ),
    "a window of no tokens": (
        lambda: kvjax.prefill(layer(), *qkv(), window=0),
        r"prefill\(window=\.\.\.\) must be at least 1, got 0",
    ),
    "no steps": (lambda: kvjax.decode(layer(), *qkv(0)), "T=0 tokens; give at least one"),
    "too many steps": (
        lambda: kvjax.decode(layer(), *qkv(17)),
        r"decode takes 1 to 16 tokens per row, got T=17; read a prompt with kvjax\.prefill",
    ),
    "more steps than there are": (
        lambda: kvjax.decode(layer(), *qkv(3), lengths=[5, 1]),
        r"lengths must be in \[0, T=3\], got 5",
    ),
    "steps without a cache": (
        lambda: kvjax.decode(None, *qkv(1)),  # type: ignore[arg-type]
        r"decode takes a kvjax\.LayerCache, got None",
    ),
    "steps of a follower alone": (
        lambda: kvjax.decode(layer(RETRIEVAL.follower()), *qkv(1)),
        r"Follower attends to what another layer selected and got no selection; pass selection=info\.selection",
    ),
    "a selection that is none": (
        lambda: kvjax.attention(layer(RETRIEVAL.follower()), *qkv(1), selection=3),  # type: ignore[arg-type]
        r"attention\(selection=\.\.\.\) takes the `selection` of an Info, got int",
    ),
    "back past what is there": (
        lambda: kvjax.rollback(layer(), [20, 0]),
        r"rollback of row 0 to 20 tokens: it holds 0, and can go back to 0",
    ),
    "back before the start": (
        lambda: kvjax.rollback(layer(), [-1, 0]),
        "rollback of row 0 to -1 tokens",
    ),
    "back to one length": (
        lambda: kvjax.rollback(layer(), 3),
        r"rollback\(lengths=\.\.\.\) must be integers \[B=2\], the tokens that each row keeps; got int32\[\]",
    ),
    "back to text": (
        lambda: kvjax.rollback(layer(), "x"),
        r"must be integers \[B=2\], such as \[3, 5\], got 'x'",
    ),
    "back to nothing": (
        lambda: kvjax.rollback(layer(), None),  # type: ignore[arg-type]
        r"must be integers \[B=2\], such as \[3, 5\], got None",
    ),
    "back where tokens are forgotten": (
        lambda: kvjax.rollback(layer(presets.h2o(16).rest), [0, 0]),
        "rollback needs a policy that can take back tokens, which .* cannot",
    ),
    "a smaller cache": (
        lambda: kvjax.grow(layer(), 32),
        r"grow\(capacity=32\) is below the cache's capacity of 64",
    ),
    # ---------------------------------------------------------------------------------- placements, hot sets, sharing
    "a placement on no mesh": (
        lambda: kvjax.Placement(mesh=3),  # type: ignore[arg-type]
        r"Placement\(mesh=\.\.\.\) must be a jax\.sharding\.Mesh, got 3; make one with",
    ),
    "a placement by an axis that is not there": (
        lambda: kvjax.Placement(mesh=mesh(), heads="tensor"),
        r"Placement\(heads='tensor'\): the mesh has no axis of that name; its axes are data=1 x model=1",
    ),
    "a placement by an axis twice": (
        lambda: kvjax.Placement(mesh=mesh(), batch="data", heads="data"),
        "the axis splits batch already; give each its own axis",
    ),
    "a mesh for a placement": (
        lambda: kvjax.init(kvjax.Full(), SPEC, layers=2, placement=mesh()),  # type: ignore[arg-type]
        r"placement must be a kvjax\.Placement, got a Mesh",
    ),
    "a hot set below a selection": (
        lambda: layer(dataclasses.replace(RETRIEVAL, store=kvjax.HotSet(tokens=8))),
        r"HotSet\(tokens=8\) is smaller than the 14 tokens that a step selects.*; use at least 14",
    ),
    "a hot set of no tokens": (
        lambda: kvjax.HotSet(tokens=0),
        r"HotSet\(tokens=\.\.\.\) must be at least 1, got 0",
    ),
    "a hot set of half pages": (
        lambda: kvjax.HotSet(tokens=12, store=kvjax.HostOffload(page=8)),
        r"holds whole pages of HostOffload\(page=8\); use a multiple of 8",
    ),
    "a hot set of a store by name": (
        lambda: kvjax.HotSet(tokens=8, store="host"),  # type: ignore[arg-type]
        r"HotSet\(store=\.\.\.\) must be a store, got the string 'host'",
    ),
    "a hot set of a class": (
        lambda: kvjax.HotSet(tokens=8, store=kvjax.HostOffload),  # type: ignore[arg-type]
        r"got the class HostOffload; make an instance",
    ),
    "a hot set of a hot set": (
        lambda: kvjax.HotSet(tokens=8, store=kvjax.HotSet(tokens=8)),
        "which has a hot set already; give its inner store",
    ),
    "a hot set on the device": (
        lambda: presets.fier(24, store="device+64"),
        r"fier\(store='device\+64'\) must be 'device', 'host', or 'float8' for host memory in that dtype",
    ),
    "no sharing": (
        lambda: presets.fier(24, layers=presets.Layers(dense=2, share=0)),
        r"Layers\(share=\.\.\.\) must be at least 1, got 0",
    ),
    "sharing of what selects nothing": (
        lambda: kvjax.share_selections(presets.h2o(24), share=2),
        "selects nothing that other layers could follow",
    ),
    "sharing of one policy": (
        lambda: kvjax.share_selections(RETRIEVAL, share=2),  # type: ignore[arg-type]
        r"takes the policies of a model's layers, got a Retrieval; a preset returns them",
    ),
    "anchors that do not rise": (
        lambda: presets.fier(24, layers=presets.Layers(dense=2, anchors=[5, 2])),
        r"anchors=\(5, 2\) must increase and begin with",
    ),
    "anchors past the model": (
        lambda: kvjax.init(
            presets.fier(24, group=8, chunk=8, layers=presets.Layers(dense=2, anchors="2+9")),
            SPEC,
            layers=4,
        ),
        "anchors name layer 9, and the model has layers 0 to 3; leave it out",
    ),
    "anchors that are no number": (
        lambda: presets.fier(24, layers=presets.Layers(dense=2, anchors=2.5)),  # type: ignore[arg-type]
        r"such as \[2, 5, 9\] or '2\+5\+9', got 2\.5",
    ),
    "share and anchors": (
        lambda: presets.fier(24, layers=presets.Layers(dense=2, share=2, anchors=[2])),
        "both say which layers select; give one",
    ),
    "windows around layers that follow": (
        lambda: presets.windowed(presets.parse("fier:budget=24,share=2"), (8, None)),
        r"windowed\(policies=.* takes a policy, or those of a preset whose layers select for themselves, got a Shared",
    ),
    "no windows": (
        lambda: presets.windowed(presets.full(), ()),
        r"windowed\(windows=.* needs one for each layer of the model, such as \(128, None\), got none",
    ),
    "heads of a layer past the model": (
        lambda: shared(heads={9: (0, 1)}),
        "heads name layer 9, and the model has layers",
    ),
    "heads of a layer that selects": (
        lambda: shared(heads={2: (0, 1)}),
        "heads name layer 2, which follows no other",
    ),
    "heads that are not the layer's": (
        lambda: shared(heads={3: (0, 1, 2)}),
        r"Follower\(heads=\(0, 1, 2\)\) names 3 heads, and the cache has 2 KV heads",
    ),
    "heads without layers": (
        lambda: shared(heads="x"),
        r"heads must be the KV heads of layers, such as \{3: \(1, 0\)\}, got 'x'",
    ),
    # ---------------------------------------------------------------------------------------- flush, insert, overflow
    "a row that is no whole number": (
        lambda: insert(0.5),
        r"insert\(row=\.\.\.\) must be an integer, got 0\.5",
    ),
    "a prefix of another budget": (
        lambda: kvjax.insert(
            *(
                layer(presets.h2o(budget, layers=presets.Layers(dense=0)).rest)
                for budget in (24, 9)
            ),
            0,
        ),
        r"same layers, policies, capacity and dtype; policy\.budget is 9 in the prefix, 24 in the cache; make it like",
    ),
    "a row by name": (
        lambda: insert("x"),
        r"insert\(row=\.\.\.\) must be an integer, such as 0, got 'x'",
    ),
    "several rows": (
        lambda: insert([0]),
        r"insert\(row=\.\.\.\) must be an integer, got a list",
    ),
    "a model's cache for a row of a layer's": (
        lambda: kvjax.insert(layer(), cache(), 0),  # type: ignore[type-var]
        "two caches of a layer or two of a model, got a LayerCache and for its row a Cache; kvjax.init makes",
    ),
    "a row that is not there": (
        lambda: insert(5),
        "insert got row=5; the cache has rows 0 to 1",
    ),
    "a donated cache flushed": (
        lambda: kvjax.flush(donated(cache())),
        "flush got a cache whose arrays are gone",
    ),
    "a donated cache inserted into": (
        lambda: kvjax.insert(donated(cache()), cache(), 0),
        r"insert\(cache=\.\.\.\) got a cache whose arrays are gone",
    ),
    "a policy flushed": (lambda: kvjax.flush(kvjax.Full()), "flush takes a cache, got a Full"),  # type: ignore[type-var]
    "a donated cache asked for full blocks": (
        lambda: kvjax.any_full(donated(cache())),
        "any_full got a cache whose",
    ),
    "a donated cache asked for overflow": (
        lambda: kvjax.raise_on_overflow(donated(cache())),
        "arrays are gone",
    ),
    "overflow asked for inside jit": (
        lambda: jax.jit(kvjax.raise_on_overflow)(cache()),
        "raise_on_overflow reads flags from the device, .* inside jit; return the cache and call it outside",
    ),
    "a cache to explain": (
        lambda: kvjax.explain(cache()),  # type: ignore[arg-type]
        r"explain\(op=\.\.\.\) must be an operation or its name, got a Cache; for all operations of a step: with kvjax",
    ),
    # --------------------------------------------------------------------------------------------- models, generation
    "a layer's cache for a model": (
        lambda: model()(jnp.ones((2, 3), jnp.int32), layer()),  # type: ignore[arg-type]
        r"a model takes the Cache of all its layers, got a LayerCache; make one with kvjax\.init\(policy, model\.spec",
    ),
    "a layer's cache for generate": (
        lambda: kvjax.generate(model(), layer(), [[1], [2]], max_new_tokens=2),  # type: ignore[arg-type]
        r"cache must be the Cache of a whole model, got a LayerCache; make one with kvjax\.init",
    ),
    "a donated cache for generate": (
        lambda: kvjax.generate(model(), donated(cache()), [[1], [2]], max_new_tokens=2),
        "generate got a cache whose arrays are gone",
    ),
    "a donated cache for stream": (
        lambda: kvjax.stream(model(), donated(cache()), [[1], [2]], max_new_tokens=2),
        "arrays are gone",
    ),
    "a donated cache for decode": (
        lambda: decode(model(), donated(cache()), jnp.zeros((2, 50)), max_new_tokens=2),
        "arrays are gone",
    ),
    "a donated cache for prefill": (
        lambda: prefill(model(), donated(cache()), [[1, 2], [2, 3]]),
        "arrays are gone",
    ),
    "a directory for a model": (
        lambda: kvjax.generate(Path("llama"), cache(), [[1], [2]], max_new_tokens=2),  # type: ignore[arg-type]
        r"model must be a callable pytree, got a \w+; load it first: kvjax\.models\.load\(directory\)\.model",
    ),
    "a class for a model": (
        lambda: kvjax.generate(models.Decoder, cache(), [[1], [2]], max_new_tokens=2),  # type: ignore[arg-type]
        r"model must be a callable pytree",
    ),
    "a model that takes only tokens and a cache": (
        lambda: kvjax.generate(
            lambda tokens, cache: (tokens, cache), cache(), [[1], [2]], max_new_tokens=2
        ),
        r"the model takes no lengths, active, last_logits, first_chunk; add them, as kvjax\.generation\.Model desc",
    ),
    "a Linen module without its variables": (
        lambda: kvjax.generate(linen.Dense(50), cache(), [[1], [2]], max_new_tokens=2),
        r"model is the Linen module Dense without its variables; give both, as functools\.partial\(module\.apply",
    ),
    "a model that returns a list of layers": (
        lambda: kvjax.generate(
            lambda tokens, cache, **how: (jnp.zeros((2, 50)), list(cache.layers)),
            cache(),
            [[1], [2]],
            max_new_tokens=2,
        ),
        r"the model returned a list as its cache; make a kvjax\.Cache of it: kvjax\.Cache\(tuple\(layers\)\)",
    ),
    "a model that returns the logits of all tokens": (
        lambda: kvjax.generate(
            lambda tokens, cache, **how: (jnp.zeros((*tokens.shape, 50)), cache),
            cache(),
            [[1], [2]],
            max_new_tokens=2,
        ),
        r"the model returned float32\[2, \d+, 50\] as logits; with last_logits=True return those of each row's last",
    ),
    "a model that returns logits alone": (
        lambda: kvjax.generate(
            lambda tokens, cache, **how: jnp.zeros((2, 50)),
            cache(),
            [[1], [2]],
            max_new_tokens=2,
        ),
        r"the model returned float32\[2, 50\], and must return two values, logits and a cache",
    ),
    "a model without steps for drafts": (
        lambda: kvjax.stream(
            _plain_model, cache(), [[1], [2]], max_new_tokens=2, draft=kvjax.PromptLookup()
        ),
        "the model takes no steps; add it",
    ),
    "a model without info to measure": (
        lambda: kvjax.stream(_plain_model, cache(), [[1], [2]], max_new_tokens=2, measure=True),
        "the model takes no info; add it",
    ),
    "a model without info to measure steps": (
        lambda: decode(
            _plain_model, cache(), jnp.zeros((2, 50)), max_new_tokens=2, measure=True
        ),
        "the model takes no info; add it",
    ),
    "queries of another library": (
        lambda: kvjax.attention(layer(), ForeignArray(), *qkv(1)[1:]),  # type: ignore[arg-type]
        r"q must be an array of floats, got an array theirs\.float32\[2, 1, 4, 16\]; convert it with jnp\.asarray",
    ),
    "a key of another library": (
        lambda: kvjax.generate(
            model(),
            cache(),
            [[1], [2]],
            max_new_tokens=2,
            key=ForeignArray(),  # type: ignore[arg-type]
            sampling=sampling(0.5),
        ),
        r"key must be made by jax\.random\.key\(seed\), got theirs\.float32",
    ),
    "a number of another library": (
        lambda: kvjax.generate(model(), cache(), [[1], [2]], max_new_tokens=ForeignArray()),  # type: ignore[arg-type]
        r"max_new_tokens must be an integer, got an array theirs\.float32\[2, 1, 4, 16\]",
    ),
    "a key for a temperature": (
        lambda: sampling(jax.random.key(0)),
        r"temperature must be a number, got an array key<fry>\[\]",
    ),
    "temperatures in lists of several lengths": (
        lambda: sampling([[0.5], [1.0, 2.0]]),
        "temperature must be a number, got a list",
    ),
    "logits in a list": (
        lambda: decode(model(), cache(), [[0.0] * 50] * 2, max_new_tokens=2),  # type: ignore[arg-type]
        r"logits must be floats \[B=2, V\] for this cache, got a list; pass those of prefill",
    ),
    "token ids for logits": (
        lambda: decode(model(), cache(), jnp.zeros((2, 50), jnp.int32), max_new_tokens=2),
        r"logits must be floats \[B=2, V\] for this cache, got int32\[2, 50\]",
    ),
    "a stream that advances by a text": (
        lambda: running().advance("3"),  # type: ignore[arg-type]
        r"advance\(steps=\.\.\.\) must be an integer, got '3'",
    ),
    "a stream that advances by half a step": (
        lambda: running().advance(0.5),  # type: ignore[arg-type]
        r"advance\(steps=\.\.\.\) must be an integer, got 0\.5",
    ),
    "a stream that goes back": (
        lambda: running().advance(-1),
        r"advance\(steps=\.\.\.\) must be at least 0, got -1",
    ),
    "a text for the block to warm up": (
        lambda: warm_up(model(), cache(), 3, max_new_tokens=2, block="1"),  # type: ignore[arg-type]
        "block must be an integer, got '1'",
    ),
    "no block to compile ahead": (
        lambda: compile_ahead(model(), cache(), 3, block=0),
        "block must be at least 1, got 0",
    ),
    "no prompt to warm up": (
        lambda: warm_up(model(), cache(), 0, max_new_tokens=2),
        r"warm_up\(prompt_tokens=\.\.\.\) must be at least 1, got 0",
    ),
    "a cache in use to warm up": (
        lambda: warm_up(model(), running().cache, 3, max_new_tokens=2),
        "warm_up consumes an empty cache, and this one holds tokens; make another one",
    ),
    "rows of several lengths to prefill, and their lengths": (
        lambda: prefill(model(), cache(), [[1, 2], [3]], lengths=[2, 1]),
        r"tokens must be one array of integers \[B, T\], and these rows have several lengths; leave lengths",
    ),
    "one list of tokens for a prompt": (
        lambda: kvjax.generate(model(), cache(), [1, 2], max_new_tokens=2),  # type: ignore[list-item]
        r"for one row write \[tokens\]",
    ),
    # ------------------------------------------------------------------------------------------- drafts of one's own
    "a draft that starts nothing": (
        lambda: guess(start=0),
        r"what Guess\.start returns must be a drafter, got 0, which has no with_state, pays, propose, accept, state, "
        r"max_tokens, exact, idle; .* make kvjax\.generation\.drafts\.Drafter its base",
    ),
    "a drafter that is no pytree": (
        lambda: guess(start=Loose()),
        r"what Guess\.start returns is a Loose, which is no pytree; make it a frozen dataclass with",
    ),
    "a drafter of more tokens than a step takes": (
        lambda: guess(start=Guesser(jnp.zeros(2, jnp.int32), 16)),
        r"Guesser\.max_tokens must be at most 15, got 16",
    ),
    "a drafter that verifies by a word": (
        lambda: guess(exact="no"),
        r"Guesser\(exact=\.\.\.\) must be True or False, got 'no'",
    ),
    "a drafter that is idle without a reason": (
        lambda: guess(idle=True),
        r"Guesser\.idle is True, wanted None, or why nothing is drafted as text",
    ),
    "a proposal that is a pair": (
        lambda: guess(propose=lambda own, now: (now.token, now.token)),
        r"Guesser\.propose returned a tuple, wanted a kvjax\.generation\.drafts\.Proposal",
    ),
    "a proposal of one token for each row": (
        lambda: proposing(tokens=jnp.zeros(2, jnp.int32)),
        r"Guesser\.propose returned tokens int32\[2\], wanted int32\[2, 3\], max_tokens for each row",
    ),
    "a proposal of fewer tokens": (
        lambda: proposing(tokens=jnp.zeros((2, 2), jnp.int32)),
        r"Guesser\.propose returned tokens int32\[2, 2\], wanted int32\[2, 3\]",
    ),
    "a proposal of floats": (
        lambda: proposing(tokens=jnp.zeros((2, 3))),
        r"Guesser\.propose returned tokens float32\[2, 3\], wanted int32\[2, 3\]",
    ),
    "a number of tokens for all rows": (
        lambda: proposing(drafted=3),
        r"Guesser\.propose returned drafted 3, wanted int32\[2\], how many for each row",
    ),
    "a proposal without a cache": (
        lambda: proposing(cache=None),
        r"Guesser\.propose returned the cache None, wanted the form that it had",
    ),
    "a proposal of another drafter": (
        lambda: proposing(drafter=None),
        r"Guesser\.propose returned a drafter None, wanted a Guesser",
    ),
    "a state that changes its dtype": (
        lambda: guess(accept=lambda own, *_: own.with_state(own.seen.astype(jnp.float32))),
        r"Guesser\.accept returned a state float32\[2\], wanted int32\[2\] as before",
    ),
    "a state where a drafter is wanted": (
        lambda: guess(accept=lambda own, *_: own.seen),
        r"Guesser\.accept returned a drafter int32\[2\], wanted a Guesser",
    ),
    "a draft with a mistake of its own": (
        lambda: guess(propose=lambda own, now: now.token.nothing),
        r"Guesser\.propose raised AttributeError: .*nothing.*; its traceback is that of this error's cause",
    ),
    # ----------------------------------------------------------------------------------------------------- processors
    "a function for the processors": (
        lambda: sums(lambda logits: logits),
        r"processors must be a Processors, got a function; make one: kvjax\.generation\.processors\.Processors\(",
    ),
    "a dict for the processors": (
        lambda: sums({"repetition_penalty": 1.1}),
        "processors must be a Processors, got a dict; make one",
    ),
    "the class of the processors": (
        lambda: sums(processors.Processors),
        "processors must be a Processors, got a type",
    ),
    "a penalty that is no number": (
        lambda: processors.Processors(repetition_penalty=float("nan")),
        r"Processors\(repetition_penalty=\.\.\.\) must be a finite number, got nan",
    ),
    "one id to suppress": (
        lambda: processors.Processors(suppress_tokens=5),  # type: ignore[arg-type]
        r"Processors\(suppress_tokens=\.\.\.\) must be .*integers.*got 5",
    ),
    "an n-gram of half a token": (
        lambda: processors.Processors(no_repeat_ngram_size=2.5),  # type: ignore[arg-type]
        r"Processors\(no_repeat_ngram_size=\.\.\.\) must be an integer, got 2\.5",
    ),
    "a history of other rows": (
        lambda: sums(processors.Processors(repetition_penalty=1.1, history=((1,),))),
        r"Processors\(history=\.\.\.\) has 1 rows, and the request 2",
    ),
    # -------------------------------------------------------------------------------------------- tasks of one's own
    "a stop that is a text": (
        lambda: ask(stop="\n"),
        r"Quiz\.stop is '\\n', wanted texts in a tuple",
    ),
    "new tokens as text": (
        lambda: ask(max_new_tokens="4"),
        r"Quiz\.max_new_tokens is '4', wanted a number of tokens",
    ),
    "a task without a name": (lambda: ask(name=None), r"Quiz\.name is None, wanted a text"),
    "a template by name": (
        lambda: ask(chat="llama"),
        r"Quiz\.chat is 'llama', wanted True or False",
    ),
    "no examples": (
        lambda: ask(examples=lambda task, tokenizer: None),
        r"Quiz\.examples returned None, wanted a list of kvjax\.evaluate\.Example",
    ),
    "examples that are dicts": (
        lambda: ask(examples=lambda task, tokenizer: [{"prompt": "?"}]),
        r"Quiz\.examples returned a dict, wanted a kvjax\.evaluate\.Example at 0",
    ),
    "an answer that is not in a tuple": (
        lambda: asking(answers="42"),
        r"Quiz\.examples returned an Example with answers='42', wanted texts in a tuple, such as \(\"42\",\)",
    ),
    "an answer that is a number": (
        lambda: asking(answers=(42,)),
        r"Quiz\.examples returned an Example with answers=a tuple, wanted texts in a tuple",
    ),
    "a number for an id": (
        lambda: asking(id=0),
        r"Quiz\.examples returned an Example with id=0, wanted a text that no other example has",
    ),
    "a prompt of rows": (
        lambda: asking(prompt=[[1, 2]]),
        r"Quiz\.examples returned an Example with prompt=a list, wanted a text, or token ids below 50",
    ),
    "a prompt of another tokenizer": (
        lambda: asking(prompt=(1, 99)),
        "with prompt=a tuple, wanted a text, or token ids below 50",
    ),
    "a question that is text": (
        lambda: asking(question="why"),
        "with question='why', wanted token ids below 50",
    ),
    "a key that is a name": (
        lambda: ask(key=lambda task: "quiz"),
        r"Quiz\.key returned 'quiz', wanted a dict of JSON",
    ),
    "a key with an array": (
        lambda: ask(key=lambda task: {"seed": np.arange(2)}),
        r"Quiz\.key returned no JSON \(.*ndarray.*\), wanted a dict of JSON",
    ),
    "no score": (
        lambda: ask(score=lambda task, example, answer: None),
        r"Quiz\.score returned None, wanted a number from 0 to 1, for the answer '7'",
    ),
    "a score that is nan": (
        lambda: ask(score=lambda task, example, answer: float("nan")),
        r"Quiz\.score returned nan, wanted a number from 0 to 1",
    ),
    "a score in percent": (
        lambda: ask(score=lambda task, example, answer: 100.0),
        r"Quiz\.score returned 100\.0, wanted a number from 0 to 1",
    ),
    "a score that takes no wrong answer": (
        lambda: ask(score=lambda task, example, answer: 1 / (int(answer) - 7)),
        r"Quiz\.score raised ZeroDivisionError: .*, for the answer '7' to example 0; it must take every answer",
    ),
}


def _plain_model(
    tokens, cache, *, lengths=None, active=None, last_logits=False, first_chunk=False
):
    return tokens, cache


@pytest.mark.parametrize("row", ROWS)
def test_first_mistake_says_got_wanted_and_how_to_mend(row: str) -> None:
    call, message = ROWS[row]
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_float64_of_numpy_is_taken_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, _ = kvjax.attention(layer(), *(np.asarray(a, np.float64) for a in qkv(1)))
    assert out.dtype == np.float32


def test_arrays_that_a_step_took_over_are_told_after_it() -> None:
    step = jax.jit(kvjax.attention, donate_argnums=0)
    first = layer()
    _, second = step(first, *qkv(1))
    with pytest.raises(ValueError, match="arrays are gone"):
        kvjax.attention(first, *qkv(1))
    assert "donated" in repr(first)
    assert "length [1, 1] of 64" in repr(second)


def test_numpy_integers_count_tokens() -> None:
    made = kvjax.generate(model(), cache(), [[1], [2]], max_new_tokens=np.int64(2))  # type: ignore[arg-type]
    assert made.tokens.shape == (2, 2)


@pytest.mark.parametrize("name", presets.REGISTRY)
def test_numpy_integers_in_a_policy_are_those_of_python(name: str) -> None:
    make = presets.find(name).make
    given = {
        p.name: p.default
        for p in inspect.signature(make).parameters.values()
        if type(p.default) is int
    }
    numpy = make(**{key: np.int64(value) for key, value in given.items()})
    assert repr(numpy) == repr(make())  # reprs are part of the keys of results
    assert hash(numpy) == hash(make())


# ---------------------------------------------------------------------------------------------------------- row of jit


@pytest.mark.parametrize("row", [-1, 2, 7])
@pytest.mark.parametrize(
    "policy",
    [
        kvjax.Full(),
        kvjax.Retrieval(
            selector=kvjax.Fier(group=16),
            store=kvjax.HostOffload(),
            budget=24,
            sink=0,
            local=8,
            demote=kvjax.Fifo(leave=16),
            dense_below=0,
        ),
    ],
    ids=["full", "host"],
)
def test_traced_row_out_of_range_changes_nothing(policy: Any, row: int) -> None:
    _, whole = jax.jit(kvjax.attention)(layer(policy), *qkv(5))
    one = kvjax.init_layer(policy, dataclasses.replace(SPEC, batch=1))
    insert = jax.jit(kvjax.insert)
    jax.tree.map(np.testing.assert_array_equal, insert(whole, one, row), whole)
    assert insert(whole, one, 1).length.tolist() == [5, 0]


# -------------------------------------------------------------------------------------------------------- what is shown


def test_repr_tells_policy_rows_length_and_bytes() -> None:
    made = kvjax.init(
        presets.fier(24, group=8, chunk=16, layers=presets.Layers(dense=1)), SPEC, layers=3
    )
    text = repr(made)
    assert text.startswith("Cache(1 x Full() + 2 x Retrieval(selector=Fier(group=8")
    assert "2 rows, length [0, 0] of 64, " in text
    assert "KiB on the device" in text
    assert "array" not in text.lower()
    assert len(text) < 600
    _, filled = jax.jit(kvjax.attention)(made.layers[0], *qkv(), lengths=np.array([3, 1]))
    assert re.fullmatch(
        r"LayerCache\(Full\(\); 2 rows, length \[3, 1\] of 64, 32\.0 KiB on the device\)",
        repr(filled),
    )


def test_repr_of_many_rows_gives_shortest_and_longest() -> None:
    spec = dataclasses.replace(SPEC, batch=6)
    attend, lengths = jax.jit(kvjax.attention), np.array([0, 1, 2, 3, 3, 1])
    _, made = attend(kvjax.init_layer(kvjax.Full(), spec), *qkv(B=6), lengths=lengths)
    assert "6 rows, length 0 to 3 of 64" in repr(made)


def test_repr_tells_dropped_tokens() -> None:
    spec = dataclasses.replace(SPEC, capacity=2)
    attend = jax.jit(kvjax.attention)
    _, made = attend(kvjax.init_layer(kvjax.Full(), spec), *qkv(T=2), lengths=np.array([2, 1]))
    assert "dropped" not in repr(made)
    _, made = attend(made, *qkv(T=1))
    assert "length [2, 2] of 2, rows [0] dropped tokens, " in repr(made)


def test_repr_tells_host_memory() -> None:
    policy = presets.freekv(48, page=8, sink=8, local=8, layers=presets.Layers(dense=0))
    assert "on the device, " in repr(kvjax.init(policy, SPEC, layers=1))
    assert "KiB on the host" in repr(kvjax.init(policy, SPEC, layers=1))


def test_repr_works_on_whatever_a_cache_may_hold() -> None:
    seen = []

    def watch(made: kvjax.Cache) -> kvjax.Cache:
        seen.append((repr(made), repr(made.layers[0]), made.nbytes))
        return made

    jax.jit(watch)(cache())
    jax.vmap(watch)(jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), cache()))
    for text, one, size in seen:
        assert "length traced of 64, 64.0 KiB on the device" in text
        assert "length traced" in one
        assert size.host == 0
    shapes = jax.eval_shape(cache)
    assert "shapes alone of 64, 64.0 KiB on the device" in repr(shapes)
    assert shapes.nbytes == cache().nbytes
    for made in (0, None, "x", object()):
        assert "2 rows" in repr(jax.tree.map(lambda _, made=made: made, cache()))
    assert repr(jax.device_get(cache())) == repr(cache())
    assert repr(kvjax.Cache(())) == "Cache(no layers)"
    assert "gone" in repr(donated(cache()))


def test_nbytes_counts_all_layers_where_they_lie() -> None:
    made = cache()
    assert made.nbytes == kvjax.memory.nbytes(made)
    assert made.nbytes.device == 2 * made.layers[0].nbytes.device
    assert made.nbytes.total == sum(leaf.nbytes for leaf in jax.tree.leaves(made))
    assert str(made.nbytes) == "64.0 KiB on the device"


# -------------------------------------------------------------------------------------------------------- front door


def test_every_name_of_the_front_door_is_there() -> None:
    for name in (*kvjax.__all__, "models", "testing"):
        assert getattr(kvjax, name) is not None
        assert name in dir(kvjax)
    with pytest.raises(AttributeError, match="module 'kvjax' has no attribute 'sav'"):
        kvjax.sav  # noqa: B018


def test_texts_name_what_exists() -> None:
    """Every `kvjax.name` that a docstring, comment or message of the package writes can be
    reached.
    """
    root = Path(kvjax.__file__).parent
    files = [
        path for folder in (root, *map(Path, models.__path__)) for path in folder.rglob("*.py")
    ]
    named = {
        found
        for file in files
        for found in re.findall(r"`kvjax\.(\w+(?:\.\w+)*)", file.read_text())
    }
    assert len(named) > 10
    for name in sorted(named):
        there: Any = kvjax
        for part in name.split("."):
            try:
                there = getattr(there, part)
            except AttributeError:
                there = importlib.import_module(f"{there.__name__}.{part}")


def test_import_needs_neither_flax_nor_orbax() -> None:
    program = (
        "import sys, kvjax; print(sorted({'flax', 'orbax', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_layers_with_and_without_a_window_share_one_policy() -> None:
    caches = kvjax.init(presets.windowed(RETRIEVAL, (8, None)), SPEC, layers=2)
    windowed, whole = (each.policy for each in caches.layers)
    assert isinstance(windowed, kvjax.Evicting)
    assert windowed.budget == 8
    assert whole == RETRIEVAL


def test_lengths_in_a_list_are_taken_under_jit_too() -> None:
    _, stored = jax.eval_shape(
        lambda lengths: kvjax.attention(layer(), *qkv(), lengths=lengths), [1, 2]
    )
    assert stored.length.shape == (2,)


def test_a_save_that_cannot_make_its_directory_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        OSError, match=r"save cannot make the directory .*/file/saves .*; give one to write in"
    ):
        kvjax.save(tmp_path / "file" / "saves", layer())


def test_own_drafts_and_tasks_without_a_mistake_pass() -> None:
    plain = kvjax.generate(model(), cache(), [[1], [2]], max_new_tokens=4)
    assert guess().rows == plain.rows
    assert ask() == 0.0
    assert ask(score=lambda task, example, answer: jnp.float32(1)) == 1.0
    assert ask(score=lambda task, example, answer: True) == 1.0
    assert asking(prompt=np.arange(50), question=()) == 0.0
