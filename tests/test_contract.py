"""First mistakes in parts of one's own: each is one sentence with class, verb, got and wanted."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import kvjax.testing
from kvjax.numerics.blocks import write
from kvjax.numerics.partial import PartialAttention
from kvjax.numerics.selection import Selection
from kvjax.policies import Info

SPEC = kvjax.CacheSpec(
    batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=64, dtype="float32"
)


@dataclass(frozen=True)
class MeanKey(kvjax.Selector):
    """A selector without a mistake."""

    unit: int = 8

    def init(self, spec: Any, slots: int) -> Any:
        shape = (spec.batch, spec.kv_heads, slots // self.unit, spec.head_dim)
        return jnp.zeros(shape, jnp.float32)

    def append(self, ix: Any, k: Any, at: Any, count: Any) -> Any:
        B, K, T, D = k.shape
        means = k.astype(jnp.float32).reshape(B, K, T // self.unit, self.unit, D).mean(axis=3)
        return write(ix, means, at // self.unit, count // self.unit)

    def score(self, ix: Any, q: Any, *, logits: Any) -> Any:
        return logits.of(jnp.einsum("bkgd,bkud->bkgu", q.astype(jnp.float32), ix))


@dataclass(frozen=True)
class Rounded(kvjax.Dense):
    """A store without a mistake."""

    truncate = kvjax.Store.truncate

    def append(self, st: Any, k: Any, v: Any, count: Any) -> Any:
        return super().append(st, *self.decoded(k, v), count)

    def decoded(self, k: Any, v: Any) -> Any:
        return tuple(a.astype("float8_e4m3fn").astype(a.dtype) for a in (k, v))


@dataclass(frozen=True)
class KeyNorm(kvjax.Evictor):
    """An evictor without a mistake."""

    def see_tokens(self, k: Any, v: Any) -> Any:
        return -jnp.linalg.norm(k.astype(jnp.float32), axis=-1)

    def score(self, evidence: Any, position: Any, end: Any, slots: int) -> Any:
        return evidence


@dataclass(frozen=True)
class Halves(kvjax.Fifo):
    """A demotion without a mistake."""

    leave: int = 16


@dataclass(frozen=True)
class Whole(kvjax.Full):
    """A policy without a mistake."""


def selecting(selector: Any) -> Any:
    return kvjax.Retrieval(
        selector=selector, budget=32, sink=0, local=8, demote=kvjax.Fifo(leave=16)
    )


def storing(store: Any) -> Any:
    return kvjax.Compressed(store=store, demote=kvjax.Fifo(leave=16))


def evicting(evictor: Any) -> Any:
    return kvjax.Evicting(evictor=evictor, budget=24)


def demoting(demote: Any) -> Any:
    return kvjax.Compressed(store=kvjax.Dense(), local=4, demote=demote)


def changed(base: type, **verbs: Any) -> Any:
    """An instance of a class `Mine` with other verbs than its base."""
    made = type("Mine", (base,), {"__module__": __name__, **verbs})
    return dataclass(frozen=True)(made)()


def mapped(verb: str, change: Callable[[Any], Any]) -> dict[str, Any]:
    """A verb that returns what its base does, after a change."""

    def method(self: Any, *args: Any, **settings: Any) -> Any:
        return change(getattr(super(type(self), self), verb)(*args, **settings))

    return {verb: method}


def low(tree: Any) -> Any:
    """Floats in 16 bits."""
    return jax.tree.map(
        lambda a: a.astype(jnp.bfloat16) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree
    )


@pytest.mark.parametrize(
    "policy",
    [
        selecting(MeanKey()),
        storing(Rounded()),
        evicting(KeyNorm()),
        demoting(Halves()),
        Whole(),
        kvjax.Retrieval(
            selector=MeanKey(), store=Rounded(), budget=32, sink=0, local=8, demote=Halves()
        ),
    ],
    ids=["selector", "store", "evictor", "demotion", "policy", "all"],
)
def test_parts_without_a_mistake_pass(policy: Any) -> None:
    assert kvjax.init_layer(policy, SPEC).length.tolist() == [0, 0]


@dataclass(frozen=True)
class Weighted(MeanKey):
    weights: Any = dataclasses.field(default_factory=lambda: np.ones(3))


def first_of(found: Any) -> Any:
    return found[0]


MISTAKES: dict[str, tuple[Any, str]] = {
    # -------------------------------------------------------------------------------------------------- selectors
    "a selector that is not frozen": (
        lambda: selecting(Weighted()),
        "Weighted cannot be hashed .*; make Weighted a dataclass with frozen=True, whose fields are",
    ),
    "a selector without verbs": (
        lambda: selecting(changed(kvjax.Selector)),
        "Mine.init is not implemented; a kvjax.Selector needs init, append and score",
    ),
    "init of two arguments": (
        lambda: selecting(changed(MeanKey, init=lambda self, spec: None)),
        r"Mine.init does not take what a kvjax.Selector is called with \(too many positional arguments\); "
        r"give it the parameters \(spec, slots\)",
    ),
    "an index without rows": (
        lambda: selecting(
            changed(MeanKey, init=lambda self, spec, slots: jnp.zeros((slots, 16)))
        ),
        r"Mine.init returned float32\[48, 16\], wanted an array whose first axis are the 2 rows",
    ),
    "an index of tokens where units are": (
        lambda: selecting(
            changed(MeanKey, init=lambda self, spec, slots: jnp.zeros((2, 2, slots, 16)))
        ),
        r"Mine.score returned float32\[2, 2, 2, 48\], wanted floats \[2, 2, 2, 6\], one score for each of 6 units of 8",
    ),
    "append that returns nothing": (
        lambda: selecting(changed(MeanKey, append=lambda self, ix, k, at, count: None)),
        r"Mine.append returned None, wanted what its init gave: float32\[2, 2, 6, 16\]",
    ),
    "append that changes the dtype": (
        lambda: selecting(changed(MeanKey, **mapped("append", low))),
        r"Mine.append returned bfloat16\[2, 2, 6, 16\], wanted what its init gave: float32\[2, 2, 6, 16\]",
    ),
    "append that grows the index": (
        lambda: selecting(
            changed(MeanKey, append=lambda self, ix, k, at, count: jnp.concatenate([ix, k], 2))
        ),
        r"Mine.append returned float32\[2, 2, 22, 16\], wanted what its init gave: float32\[2, 2, 6, 16\]",
    ),
    "append with the axes of tokens and heads swapped": (
        lambda: selecting(
            changed(
                MeanKey,
                append=lambda self, ix, k, at, count: write(
                    ix, k.reshape(2, 8, 2, 2, 16).mean(axis=1), at, count
                ),
            )
        ),
        r"Mine.append raised TypeError for float32\[2, 2, 6, 16\], float32\[2, 2, 32, 16\], .*: cannot reshape",
    ),
    "score without the logits": (
        lambda: selecting(changed(MeanKey, score=lambda self, ix, q: ix)),
        r"Mine.score does not take what a kvjax.Selector is called with \(got an unexpected keyword "
        r"argument 'logits'\); give it the parameters \(ix, q, \*, logits\)",
    ),
    "select without the logits": (
        lambda: selecting(changed(MeanKey, select=lambda self, ix, q, candidates: ix)),
        r"Mine.select does not take what a kvjax.Selector is called with \(got an unexpected keyword "
        r"argument 'logits'\); give it the parameters \(ix, q, candidates, \*, logits\)",
    ),
    "score of KV heads alone": (
        lambda: selecting(changed(MeanKey, **mapped("score", lambda s: s.mean(axis=2)))),
        r"Mine.score returned float32\[2, 2, 6\], wanted floats \[2, 2, 2, 6\]",
    ),
    "score of whole numbers": (
        lambda: selecting(changed(MeanKey, **mapped("score", lambda s: s.astype(jnp.int32)))),
        r"Mine.score returned int32\[2, 2, 2, 6\], wanted floats \[2, 2, 2, 6\]",
    ),
    "score by NumPy": (
        lambda: selecting(
            changed(MeanKey, score=lambda self, ix, q, logits: np.asarray(ix) @ np.asarray(q))
        ),
        "Mine.score raised TracerArrayConversionError for ",
    ),
    "score that branches on a value": (
        lambda: selecting(
            changed(MeanKey, **mapped("score", lambda s: s if s.max() > 0 else -s))
        ),
        "Mine.score raised TracerBoolConversionError for .*",
    ),
    "score that returns a text": (
        lambda: selecting(changed(MeanKey, score=lambda self, ix, q, logits: "best")),
        "Mine.score returned 'best', where arrays are wanted",
    ),
    "an unknown rule of groups": (
        lambda: selecting(changed(MeanKey, group_reduce="mean")),
        "Mine.group_reduce is 'mean', and must be one of mean_query, mean_score, ",
    ),
    "a unit of text": (
        lambda: selecting(MeanKey("8")),  # type: ignore[arg-type]
        r"MeanKey\.unit must be an integer, got '8'",
    ),
    "select that returns scores": (
        lambda: selecting(changed(MeanKey, select=lambda self, ix, q, candidates, logits: ix)),
        r"Mine.select returned float32\[2, 2, 6, 16\], wanted a kvjax.numerics.selection.Selection",
    ),
    "select of single tokens where pages are": (
        lambda: selecting(
            changed(
                MeanKey,
                select=lambda self, ix, q, candidates, logits: Selection(
                    jnp.zeros((2, 2, 1, 3), jnp.int32), jnp.ones((2, 2, 1, 3), bool)
                ),
            )
        ),
        r"Mine.select returned int32\[2, 2, 1, 3\], wanted slots int32\[2, 2, 1, M\], M a multiple of 8",
    ),
    "truncate that forgets the index": (
        lambda: selecting(changed(MeanKey, truncate=lambda self, ix, count: None)),
        "Mine.truncate returned None, wanted what its init gave",
    ),
    "an index that is no pytree": (
        lambda: selecting(changed(MeanKey, init=lambda self, spec, slots: Halves())),
        "Mine.init returned a Halves, where arrays are wanted",
    ),
    "score that is an object": (
        lambda: selecting(changed(MeanKey, score=lambda self, ix, q, logits: [object()])),
        "Mine.score returned a list of an object, where arrays are wanted",
    ),
    "an index of keys of jax.random": (
        lambda: selecting(changed(MeanKey, init=lambda self, spec, slots: jax.random.key(0))),
        r"Mine.init returned key<fry>\[\], wanted an array whose first axis are the 2 rows",
    ),
    "a check of no arguments": (
        lambda: selecting(changed(MeanKey, check=lambda self: None)),
        r"Mine.check does not take what a kvjax.Selector is called with .*; give it the parameters \(spec, chunk\)",
    ),
    "a check that divides by 0": (
        lambda: selecting(changed(MeanKey, check=lambda self, spec, chunk: chunk // 0)),
        "Mine.check raised ZeroDivisionError: ",
    ),
    "a verb that no cache is made with": (
        lambda: selecting(changed(MeanKey, bytes_read=lambda self: 8)),
        r"Mine.bytes_read does not take what a kvjax.Selector is called with .* the parameters \(spec, length\)",
    ),
    "a number for a verb": (
        lambda: selecting(changed(MeanKey, bytes_read=8)),
        r"Mine.bytes_read does not take what .* \(8 is not a callable object\); give it",
    ),
    "a method for a flag": (
        lambda: selecting(changed(MeanKey, reads_store=lambda self: False)),
        "Mine.reads_store is a method, and must be True or False",
    ),
    # ----------------------------------------------------------------------------------------------------- stores
    "a store with a method for a value": (
        lambda: storing(changed(Rounded, lossless=lambda self: False)),
        "Mine.lossless is a method, and must be a value; write @property above it",
    ),
    "a store of no page": (
        lambda: kvjax.Retrieval(selector=MeanKey(), store=changed(Rounded, page=0), budget=32),
        "Mine.page must be at least 1, got 0",
    ),
    "a store whose page is text": (
        lambda: kvjax.Retrieval(
            selector=MeanKey(), store=changed(Rounded, page="8"), budget=32
        ),
        "Mine.page must be an integer, got '8'",
    ),
    "a store whose verb of some programs takes nothing": (
        lambda: storing(changed(Rounded, bytes_per_token=lambda self: 4)),
        r"Mine.bytes_per_token does not take what a kvjax.Store is called with .*",
    ),
    "a store without verbs": (
        lambda: storing(changed(kvjax.Store)),
        "Mine.init is not implemented; a kvjax.Store needs init, append, and attend",
    ),
    "a store whose state has no count": (
        lambda: storing(changed(Rounded, init=lambda self, spec, slots: jnp.zeros((2, 3)))),
        r"Mine.init returned None, wanted a state with `count` int32\[2\]",
    ),
    "a store that makes half of its slots": (
        lambda: storing(
            changed(
                Rounded, init=lambda self, spec, slots: kvjax.Dense().init(spec, slots // 2)
            )
        ),
        "Mine.init returned 32, wanted a state whose `slots` are 64",
    ),
    "a store that appends in another dtype": (
        lambda: storing(changed(Rounded, **mapped("append", low))),
        r"Mine.append returned bfloat16\[2, 2, 64, 16\], wanted at \.k what its init gave: float32\[2, 2, 64, 16\]",
    ),
    "a store that does not return its state": (
        lambda: storing(changed(Rounded, append=lambda self, st, k, v, count: (k, v))),
        r"Mine.append returned \(float32\[2, 2, 16, 16\], .*\), wanted what its init gave: a Block of ",
    ),
    "a store that attends to an output alone": (
        lambda: storing(changed(Rounded, **mapped("attend", first_of))),
        r"Mine.attend returned float32\[2, 2, 2, 16\], wanted a kvjax.numerics.partial.PartialAttention",
    ),
    "a store that attends without log-sum-exp by head": (
        lambda: storing(
            changed(
                Rounded,
                **mapped("attend", lambda part: PartialAttention(part.out, part.lse.mean(2))),
            )
        ),
        r"Mine.attend returned float32\[2, 2\], wanted floats \[2, 2, 2\] as its `lse`",
    ),
    "a store that decodes keys alone": (
        lambda: storing(changed(Rounded, decoded=lambda self, k, v: k)),
        r"Mine\.append raised|Mine.decoded returned float32",
    ),
    "a store without gather under a selector": (
        lambda: kvjax.Retrieval(
            selector=kvjax.Fier(group=16),
            store=changed(Rounded, gather=kvjax.Store.gather),
            budget=32,
            sink=0,
            local=8,
            demote=kvjax.Fifo(leave=16),
        ),
        r"Mine.gather raised ValueError .* has no gather\(st, selection\)",
    ),
    # --------------------------------------------------------------------------------------------------- evictors
    "an evictor without verbs": (
        lambda: evicting(changed(kvjax.Evictor)),
        "Mine.score raised NotImplementedError .*Mine has no evidence of tokens, so it must say their score",
    ),
    "score of whole heads": (
        lambda: evicting(
            changed(KeyNorm, score=lambda self, evidence, *rest: evidence.mean(axis=-1))
        ),
        r"Mine.score returned float32\[2, 2\], wanted floats \[2, 2, 32\], the score of each token",
    ),
    "score that is a position": (
        lambda: evicting(
            changed(KeyNorm, score=lambda self, evidence, position, end, slots: position)
        ),
        r"Mine.score returned int32\[2, 2, 32\], wanted floats \[2, 2, 32\]",
    ),
    "evidence by channel": (
        lambda: evicting(changed(KeyNorm, see_tokens=lambda self, k, v: jnp.abs(k))),
        r"Mine.see_tokens returned float32\[2, 2, 32, 16\], wanted floats \[2, 2, 32\], the evidence",
    ),
    "an evictor that forgets to return": (
        lambda: evicting(
            changed(KeyNorm, arrival=0.0, see_step=lambda self, evidence, weights: None)
        ),
        r"Mine.see_step returned None, wanted floats \[2, 2, 32\], the evidence of each token",
    ),
    "an arrival of text": (
        lambda: evicting(changed(KeyNorm, arrival="new")),
        "Mine.arrival is 'new', and must be the evidence of a new token, a number, or None",
    ),
    "score of three arguments": (
        lambda: evicting(changed(KeyNorm, score=lambda self, evidence, position: evidence)),
        r"Mine.score does not take what a kvjax.Evictor is called with \(too many positional arguments\); give it the "
        r"parameters \(evidence, position, end, slots\)",
    ),
    "score of all tokens by two arguments": (
        lambda: evicting(changed(KeyNorm, score_all=lambda self, evidence, position: evidence)),
        r"Mine.score_all does not take what a kvjax.Evictor is called with \(missing a required argument: "
        r"'position'\); give it the parameters \(tokens\)",
    ),
    "an evictor with a method for a value": (
        lambda: evicting(changed(KeyNorm, keeps_newest=lambda self: False)),
        "Mine.keeps_newest is a method, and must be a value; write @property above it",
    ),
    "an evictor that remembers a text": (
        lambda: evicting(changed(KeyNorm, remembers=lambda self, head_dim: "all")),
        r"Mine.remembers\(...\) must be an integer, got 'all'",
    ),
    "an evictor that fails to remember": (
        lambda: evicting(changed(KeyNorm, remembers=lambda self, head_dim: head_dim // 0)),
        "Mine.remembers raised ZeroDivisionError: ",
    ),
    "an evictor whose verb of another kind takes nothing": (
        lambda: evicting(changed(KeyNorm, see_queries=lambda self: None)),
        "Mine.see_queries does not take what a kvjax.Evictor is called with",
    ),
    # ---------------------------------------------------------------------------------------- demotions, policies
    "a demotion without the size of the window": (
        lambda: demoting(changed(Halves, leaving=lambda self: np.arange(16))),
        r"Mine.leaving does not take what a kvjax.Demotion is called with .*; give it the parameters \(local\)",
    ),
    "a demotion whose places take one number": (
        lambda: demoting(changed(Halves, place=lambda self, slot: slot)),
        r"Mine.place does not take .*; give it the parameters \(flushes, slot\)",
    ),
    "a demotion with a method for a flag": (
        lambda: demoting(changed(Halves, ordered=lambda self: False)),
        "Mine.ordered is a method, and must be True or False",
    ),
    "a demotion that fails": (
        lambda: demoting(changed(Halves, staying=lambda self, local: np.arange(local // 0))),
        "Mine.staying raised ZeroDivisionError: ",
    ),
    "a policy that is always full": (
        lambda: changed(Whole, full_rows=lambda self, st: True),
        r"Mine.full_rows returned bool\[\], wanted None or bool\[2\]",
    ),
    "a policy that rolls back without lengths": (
        lambda: changed(Whole, rollback=lambda self, st: st),
        r"Mine.rollback does not take what a kvjax.Policy is called with .* the parameters \(st, lengths\)",
    ),
    "a policy whose flag is a method": (
        lambda: changed(Whole, reversible=lambda self: False),
        "Mine.reversible is a method, and must be True or False",
    ),
    "a demotion that loses a slot": (
        lambda: demoting(changed(Halves, staying=lambda self, local: np.arange(0))),
        r"Mine.leaving\(4\) and staying\(4\) must name each of the \d+ slots once, got 16 and 0",
    ),
    "a demotion of other chunks": (
        lambda: demoting(changed(Halves, leaving=lambda self, local: np.arange(3))),
        r"Mine.leaving\(4\) returned 3 slots, and `leave` says that 16 leave together",
    ),
    "a policy whose state has no length": (
        lambda: changed(Whole, init=lambda self, spec: jnp.zeros(2)),
        r"Mine.init returned None, wanted a state with `length` int32\[2\]",
    ),
    "a policy without verbs": (
        lambda: changed(kvjax.Policy),
        "Mine.init is not implemented; a kvjax.Policy needs init, prefill, update, attend",
    ),
    "a policy whose update returns nothing": (
        lambda: changed(Whole, update=lambda self, st, k, v, active: None),
        "Mine.update returned None, wanted what its init gave",
    ),
    "a policy that attends without a step": (
        lambda: changed(Whole, attend=lambda self, st, q: q),
        r"Mine.attend does not take what a kvjax.Policy is called with \(too many positional arguments\); give it the "
        r"parameters \(st, q, step\)",
    ),
    "a policy that attends to an output alone": (
        lambda: changed(Whole, **mapped("attend", first_of)),
        r"Mine.attend returned float32\[2, 2, 2, 16\], wanted \(output, state, kvjax.policies.Info\)",
    ),
    "a policy that counts what it read for the layer": (
        lambda: changed(
            Whole,
            **mapped("attend", lambda found: (*found[:2], Info(jnp.zeros(2), None))),
        ),
        r"Mine.attend returned float32\[2\], wanted floats \[2, 2\] as the `attended` of its Info",
    ),
    "a policy that changes its state in a step": (
        lambda: changed(
            Whole, **mapped("attend", lambda found: (found[0], low(found[1]), found[2]))
        ),
        "Mine.attend returned bfloat16.*, wanted .*what its init gave",
    ),
}


@pytest.mark.parametrize("row", MISTAKES)
def test_first_mistake_names_class_verb_got_and_wanted(row: str) -> None:
    make, message = MISTAKES[row]
    with pytest.raises(ValueError, match=message) as error:
        kvjax.init_layer(make(), SPEC)
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------- mistakes that only values show

SMALL = kvjax.CacheSpec(
    batch=2, q_heads=4, kv_heads=2, head_dim=16, capacity=140, dtype="float32"
)


def reverse(scores: Any) -> Any:
    return scores[..., ::-1]


@dataclass(frozen=True)
class Lossy(Rounded):
    """Says that it returns keys and values unchanged, but rounds them."""

    def append(self, st: Any, k: Any, v: Any, count: Any) -> Any:
        return kvjax.Dense.append(self, st, *super().decoded(k, v), count)

    def decoded(self, k: Any, v: Any) -> Any:
        return k, v


class Anew(MeanKey):
    """No dataclass of its own: copies are not told apart by `weight`."""

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


class Garbage(kvjax.Dense):
    """Attends to slots that hold nothing yet."""

    def attend(self, st: Any, q: Any, start: Any, *, logits: Any) -> Any:
        whole = dataclasses.replace(st, count=jnp.full_like(st.count, st.slots))
        return super().attend(whole, q, start, logits=logits)

    attend_with = kvjax.Store.attend_with
    attend_chunk = kvjax.Store.attend_chunk


SILENT: dict[str, tuple[Any, str, str]] = {
    "scores of the units in reverse": (
        lambda: selecting(changed(MeanKey, **mapped("score", reverse))),
        "outstanding_key_is_read",
        r"is not read, though its key is by far the best; look at Mine.append, Mine.score",
    ),
    "distances, which are small for good keys": (
        lambda: selecting(changed(MeanKey, **mapped("score", jnp.negative))),
        "outstanding_key_is_read",
        "look at Mine.append, Mine.score",
    ),
    "an index that is written from slot 0 each time": (
        lambda: selecting(
            changed(
                MeanKey,
                append=lambda self, ix, k, at, count: MeanKey.append(
                    self, ix, k, 0 * at, count
                ),
            )
        ),
        "outstanding_key_is_read",
        "look at Mine.append, Mine.score",
    ),
    "an index at tokens' places where units' are": (
        lambda: selecting(
            changed(
                MeanKey,
                append=lambda self, ix, k, at, count: MeanKey.append(
                    self, ix, k, 8 * at, count
                ),
            )
        ),
        "outstanding_key_is_read",
        "look at Mine.append, Mine.score",
    ),
    "queries of other heads": (
        lambda: selecting(
            changed(
                MeanKey,
                score=lambda self, ix, q, logits: MeanKey.score(
                    self, ix, jnp.roll(q, 1, axis=1), logits=logits
                ),
            )
        ),
        "outstanding_key_is_read",
        "look at Mine.append, Mine.score",
    ),
    "a store that changes keys and says it does not": (
        lambda: kvjax.Retrieval(
            selector=kvjax.Fier(group=16),
            store=Lossy(),
            budget=32,
            sink=0,
            local=8,
            demote=kvjax.Fifo(leave=16),
        ),
        "budget_of_all_is_dense_attention",
        r"differs by .*; look at Lossy.append, Lossy.gather, Lossy.decoded",
    ),
    "a store that attends to empty slots": (
        lambda: storing(Garbage()),
        "slots_past_count_do_not_matter",
        "look at Garbage.attend, Garbage.gather",
    ),
    "a selector that equals itself alone": (
        lambda: selecting(Anew()),
        "policy_is_a_value",
        "an unchanged copy does not equal the policy; look at Anew.__eq__ and __hash__",
    ),
    "an evictor that looks at another row": (
        lambda: evicting(
            changed(KeyNorm, **mapped("score", lambda score: jnp.roll(score, 1, 0)))
        ),
        "row_ignores_other_rows",
        "look at Mine.score",
    ),
}


@pytest.mark.parametrize("row", SILENT)
def test_a_law_finds_a_silent_mistake_and_names_the_verb(row: str) -> None:
    make, law, message = SILENT[row]
    policy = make()
    kvjax.init_layer(policy, SMALL)  # the forms are right
    assert law in kvjax.testing.FIRST
    report = kvjax.testing.check_policy(policy, SMALL, laws=[law])
    assert report[law].outcome == "failed", report
    assert re.search(message, report[law].reason), report[law].reason


@pytest.mark.parametrize(
    ("base", "former", "now"),
    [
        (kvjax.Evictor, "worth", "score"),
        (kvjax.Evictor, "judge", "score_all"),
        (kvjax.evictors.KeyNorm, "worth", "score"),
        (kvjax.Policy, "fitted", "with_divisible_chunks"),
        (kvjax.Full, "turns", "stripes_per_device"),
        (kvjax.Selector, "over_context", "split_selector"),
        (kvjax.Dense, "over_context", "split_store"),
    ],
)
def test_a_verb_by_a_former_name_is_refused(base: type, former: str, now: str) -> None:
    """Nothing would call it, and the base's own verb would answer instead."""
    with pytest.raises(ValueError, match=rf"^Mine\.{former} would never be called.*\b{now}\b"):
        type("Mine", (base,), {former: lambda self: None})
    assert not hasattr(base, former)
