"""Checks the parts of a policy that come from outside of kvjax, as a cache is made with them.

The contract of a selector, store, evictor, demotion or policy is what its verbs take and return:
shapes, dtypes, and the form of a state. Each verb is traced once with the shapes of the cache, so
that a mistake is one sentence with class, verb, got and wanted, instead of an error from deep
inside of a step. Nothing is compiled, and no program changes. Values, such as which tokens a
selector finds, are for the laws of `kvjax.testing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from inspect import Parameter, Signature, getattr_static, isfunction, signature
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.evictors import Evictor
from kvjax.evictors.base import Tokens
from kvjax.numerics.partial import Logits, PartialAttention
from kvjax.numerics.selection import (
    GROUP_REDUCES,
    PackedSelection,
    Selection,
    reduce_queries,
)
from kvjax.policies.evicting import Evicting
from kvjax.policies.policy import Info, Policy, Step
from kvjax.policies.retrieval import Retrieval
from kvjax.policies.zones import Zoned
from kvjax.selectors import Selector
from kvjax.spec import CacheSpec, require_int
from kvjax.stores import Store
from kvjax.stores.demotion import Demotion
from kvjax.validation import (
    check_verbs,
    described,
    first_line,
    parts_of,
    raised,
    short_repr,
)

Shape = jax.ShapeDtypeStruct
BASES = (Selector, Store, Evictor, Policy)
PARTS = (  # and the policies that have one
    (Selector, "selector", "kvjax.Retrieval(selector=..., budget=256)"),
    (Evictor, "evictor", "kvjax.Evicting(evictor=..., budget=256)"),
    (Store, "store", "kvjax.Compressed(store=...)"),
)


_checked: ContextVar[bool] = ContextVar("checked", default=True)


@contextmanager
def unchecked() -> Iterator[None]:
    """In the block, caches are made without a check, for laws that judge a policy by themselves."""
    token = _checked.set(False)
    try:
        yield
    finally:
        _checked.reset(token)


def check_is_policy(where: str, value: Any, example: str) -> None:
    """Raises ValueError unless `value` is a policy: it may be a preset's name, a class, a preset
    that was not called, or a part that a policy has.
    """
    for base, kind, holder in PARTS:
        if isinstance(value, base):
            raise ValueError(
                f"{where} must be a policy, got the {kind} {type(value).__name__}; put it into one: {holder}"
            )
    verbs = ("init", "prefill", "update", "attend", "of_size")
    check_verbs(where, value, "a policy", verbs, example, protocol="kvjax.Policy")


def check_contract(policy: Policy, spec: CacheSpec, *, whole: bool = False) -> None:
    """Raises ValueError unless the verbs of the parts of `policy` from outside of kvjax take and
    return what their bases say, in a cache of `spec`; with `whole`, those of all parts.
    """
    if not whole and (not _checked.get() or not _is_outside(policy)):
        return
    for part in parts_of(policy):
        if whole or _is_class_outside(part):
            _check_value(part)
            _check_attributes(part)
    _check(policy, spec, whole)


@lru_cache(maxsize=64)  # layers of a model, and its next cache, have the same parts
def _check(policy: Policy, spec: CacheSpec, whole: bool) -> None:
    for part in parts_of(policy):
        if isinstance(part, Zoned):
            _check_zoned(part, spec, whole)
        elif isinstance(part, Evicting) and (whole or _is_outside(part.evictor)):
            _check_evictor(part.evictor, spec, part._slots(spec))
    if whole or _is_class_outside(policy):
        _check_policy(policy, spec)


def _is_outside(part: Any) -> bool:
    """True if `part`, or a part of it, is of a class that is not kvjax's."""
    return any(map(_is_class_outside, parts_of(part)))


def _is_class_outside(part: Any) -> bool:
    module = type(part).__module__.partition(".")[0]
    return module not in ("kvjax", "builtins", "numpy", "jax", "jaxlib")


def _check_value(part: Any) -> None:
    """A policy is a part of compiled programs, which are found by its hash."""
    try:
        hash(part)
    except TypeError as error:
        name = type(part).__name__
        raise ValueError(
            f"{name} cannot be hashed ({error}), and a policy is a part of the compiled program; make {name} a "
            "dataclass with frozen=True, whose fields are numbers, texts or tuples, and keep arrays in the state"
        ) from error


def _check_attributes(part: Any) -> None:
    """Raises ValueError unless verbs, also those that no cache is made with, take what their
    base's are called with, and flags are values: a method in place of one would count as true.
    """
    bases = [base for base in BASES if isinstance(part, base)]
    for name in dir(bases[0]) if bases else ():
        own = getattr_static(bases[0], name)
        if name.startswith("_"):
            continue
        if isfunction(own):
            _check_parameters(part, name, bases[0])
        elif isinstance(own, bool) and not isinstance(getattr(part, name), bool):
            raise ValueError(
                f"{type(part).__name__}.{name} is {short_repr(getattr(part, name))}, and must be True or False"
            )
        elif isinstance(own, property) and isfunction(getattr_static(type(part), name)):
            raise ValueError(
                f"{type(part).__name__}.{name} is a method, and must be a value; write @property above it"
            )


def _check_zoned(policy: Zoned, spec: CacheSpec, whole: bool) -> None:
    if whole or _is_outside(policy.demote):
        _check_demotion(policy.demote, policy.local)
    chunk = policy.demote.leave
    slots = policy._slots(spec)
    if whole or _is_outside(policy.store):
        _check_store(policy.store, spec, chunk, slots, selects=isinstance(policy, Retrieval))
    if isinstance(policy, Retrieval) and (whole or _is_outside(policy.selector)):
        _check_selector(policy.selector, spec, chunk, slots)
        if type(policy.selector).select is not Selector.select:
            _check_selection(policy, spec)


# ------------------------------------------------------------------------------------------------------------ selectors


def _check_selector(selector: Selector, spec: CacheSpec, chunk: int, slots: int) -> None:
    name = type(selector).__name__
    rule = selector.group_reduce
    if rule not in GROUP_REDUCES:
        raise ValueError(
            f"{name}.group_reduce is {short_repr(rule)}, and must be one of {', '.join(GROUP_REDUCES)}"
        )
    unit = require_int(f"{name}.unit", selector.unit, at_least=1)
    _asked(selector, "check", spec, chunk)

    index = _call(selector, "init", spec, slots)
    _require_rows(selector, index, spec)
    for tokens in (chunk, 2 * chunk):
        k, _ = _new_tokens(spec, tokens)
        after = _call(selector, "append", index, k, _rows(spec), _rows(spec))
        _require_same(selector, "append", after, index, "its init gave")
    _require_same(
        selector,
        "truncate",
        _call(selector, "truncate", index, _rows(spec)),
        index,
        "its init gave",
    )
    if selector.reads_store:
        return
    q = jax.eval_shape(lambda q: reduce_queries(q, rule, 1), _queries(spec))
    scores = _call(selector, "score", index, q, logits=_step(spec).logits)
    heads = q.shape[2]
    cure = f"one score for each of {slots // unit} units of {unit} token{'s' * (unit > 1)}"
    _require_floats(
        selector, "score", scores, (spec.batch, spec.kv_heads, heads, slots // unit), cure
    )


def _check_selection(policy: Retrieval, spec: CacheSpec) -> None:
    """The `select` of a selector that overrides it."""
    selector = policy.selector
    st = jax.eval_shape(partial(policy.init, spec))
    found = _traced(
        selector,
        "select",
        lambda st, q: policy.select(st, q, _step(spec)),
        st,
        _queries(spec),
    )
    if not isinstance(found, Selection | PackedSelection):
        raise _wrong(selector, "select", found, "a kvjax.numerics.selection.Selection")
    lists = spec.group if selector.group_reduce == "per_head" else 1
    slots = found.slots
    B = spec.batch
    K = spec.kv_heads
    whole = slots.ndim == 4 and slots.shape[3] % selector.unit == 0
    if slots.dtype != jnp.int32 or not whole or slots.shape[:3] != (B, K, lists):
        wanted = f"slots int32[{B}, {K}, {lists}, M], M a multiple of {selector.unit}"
        raise _wrong(selector, "select", slots, wanted)


# --------------------------------------------------------------------------------------------------------------- stores


def _check_store(
    store: Store, spec: CacheSpec, chunk: int, slots: int, *, selects: bool
) -> None:
    name = type(store).__name__
    page = require_int(f"{name}.page", store.page, at_least=1)
    _asked(store, "check", spec, chunk)

    # Verbs that keep tokens.
    st = _call(store, "init", spec, slots)
    count = _traced(store, "init", lambda st: getattr(st, "count", None), st)
    _require_array(store, "init", count, _rows(spec), "a state with `count`")
    if getattr(st, "slots", None) != slots:
        raise _wrong(
            store, "init", getattr(st, "slots", None), f"a state whose `slots` are {slots}"
        )
    _require_rows(store, st, spec)
    k, v = _new_tokens(spec, chunk)
    after = _call(store, "append", st, k, v, _rows(spec))
    _require_same(store, "append", after, st, "its init gave")

    # Attention of a step and of a chunk of a prompt.
    B = spec.batch
    K = spec.kv_heads
    G = spec.group
    E = spec.value_dim or spec.head_dim
    q = _queries(spec)
    part = _call(store, "attend", st, q, _rows(spec), logits=_step(spec).logits)
    _require_part(store, "attend", part, (B, K, G, E))
    of_two = Shape((B, K, G, 2, spec.head_dim), q.dtype)
    start = Shape((B, 2), jnp.int32)
    part = _call(store, "attend_chunk", st, of_two, start, logits=_step(spec).logits)
    _require_part(store, "attend_chunk", part, (B, K, 2 * G, E))

    # Tokens as they are read back.
    read = _call(store, "decoded", k, v)
    if not isinstance(read, tuple) or len(read) != 2:
        raise _wrong(store, "decoded", read, "keys and values")
    for array, like in zip(read, (k, v), strict=True):
        _require_floats(store, "decoded", array, like.shape, "as the keys and values it got")
    if selects:
        _check_gather(store, spec, st, page)


def _check_gather(store: Store, spec: CacheSpec, st: Any, page: int) -> None:
    """Checks what `store` reads of a selection of one page for each KV head."""
    B = spec.batch
    K = spec.kv_heads
    slots: Any = Shape((B, K, 1, page), jnp.int32)
    valid: Any = Shape(slots.shape, jnp.bool_)
    rows = _call(store, "gather", st, Selection(slots, valid))
    if not isinstance(rows, tuple) or len(rows) != 2:
        raise _wrong(store, "gather", rows, "the keys and values of the selected slots")
    widths = (spec.head_dim, spec.value_dim or spec.head_dim)
    for array, channels in zip(rows, widths, strict=True):
        _require_floats(
            store, "gather", array, (B, K, page, channels), "the selected slots in order"
        )


def _require_part(part: Any, verb: str, got: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(got, PartialAttention):
        raise _wrong(part, verb, got, "a kvjax.numerics.partial.PartialAttention(out, lse)")
    _require_floats(part, verb, got.out, shape, "as its `out`")
    _require_floats(part, verb, got.lse, shape[:3], "as its `lse`, natural logarithms")


# ------------------------------------------------------------------------------------------------------------- evictors


def _check_evictor(evictor: Evictor, spec: CacheSpec, slots: int) -> None:
    name = type(evictor).__name__
    B = spec.batch
    K = spec.kv_heads
    G = spec.group
    D = spec.head_dim
    tokens = slots + 8  # those that are held, and a prompt's
    held = Shape((B, K, tokens), jnp.float32)
    position = Shape(held.shape, jnp.int32)
    k, v = _new_tokens(spec, tokens)

    if evictor.arrival is not None and not isinstance(evictor.arrival, float | int):
        raise ValueError(
            f"{name}.arrival is {short_repr(evictor.arrival)}, and must be the evidence of a new token, a number, or "
            "None"
        )
    seen = _call(evictor, "see_tokens", k, v)
    if seen is not None:
        _require_floats(evictor, "see_tokens", seen, held.shape, "the evidence of each token")
    evidence = held if evictor.keeps_evidence else None
    if evictor.arrival is not None:
        weights = Shape((B, K, G, tokens), jnp.float32)
        after = _call(evictor, "see_prompt", held, weights, position, _rows(spec), slots)
        _require_floats(evictor, "see_prompt", after, held.shape, "the evidence of each token")
        after = _call(evictor, "see_step", held, weights)
        _require_floats(evictor, "see_step", after, held.shape, "the evidence of each token")
    memory = None
    step = None
    if count := require_int(
        f"{name}.remembers(...)", _asked(evictor, "remembers", D), at_least=0
    ):
        memory = Shape((B, K, G, count, D), jnp.float32)
        step = _step(spec)
        after = _call(
            evictor,
            "see_queries",
            memory,
            Shape((B, K, G, 2, D), k.dtype),
            Shape((B, 2), jnp.int32),
        )
        _require_same(evictor, "see_queries", after, memory, "it got")
    if type(evictor).score_all is Evictor.score_all:
        score = _call(evictor, "score", evidence, position, _rows(spec), slots)
        _require_floats(evictor, "score", score, held.shape, "the score of each token")
        return

    def score_all(evidence: Any, position: Any, end: Any, k: Any, v: Any, memory: Any) -> Any:
        held = Tokens(evidence, position, end, slots, k, v, memory, step, asked=end)
        return evictor.score_all(held)

    score = _traced(
        evictor, "score_all", score_all, evidence, position, _rows(spec), k, v, memory
    )
    _require_floats(evictor, "score_all", score, held.shape, "the score of each token")


# ----------------------------------------------------------------------------------------------- demotions and policies


def _check_demotion(demote: Demotion, local: int) -> None:
    name = type(demote).__name__
    for verb in ("slots", "leaving", "staying", "place"):
        _check_parameters(demote, verb, Demotion)
    if not isinstance(demote.ordered, bool):
        raise ValueError(
            f"{name}.ordered is {short_repr(demote.ordered)}, and must be True or False"
        )
    chunk = require_int(f"{name}.leave", demote.leave, at_least=1)
    slots = require_int(
        f"{name}.slots({local})", _asked(demote, "slots", local), at_least=chunk
    )
    leaving = np.asarray(_asked(demote, "leaving", local)).tolist()
    staying = np.asarray(_asked(demote, "staying", local)).tolist()
    if len(leaving) != chunk:
        raise ValueError(
            f"{name}.leaving({local}) returned {len(leaving)} slots, and `leave` says that {chunk} leave together"
        )
    if sorted(leaving + staying) != list(range(slots)):
        raise ValueError(
            f"{name}.leaving({local}) and staying({local}) must name each of the {slots} slots once, got "
            f"{len(leaving)} and {len(staying)} of them"
        )


def _check_policy(policy: Policy, spec: CacheSpec) -> None:
    B = spec.batch
    K = spec.kv_heads
    G = spec.group
    D = spec.head_dim
    E = spec.value_dim or D
    st = _call(policy, "init", spec)
    flag = Shape((B,), jnp.bool_)
    for name, wanted in (("length", _rows(spec)), ("overflow", flag)):
        found = _traced(policy, "init", lambda st, name=name: getattr(st, name, None), st)
        _require_array(policy, "init", found, wanted, f"a state with `{name}`")

    k, v = _new_tokens(spec, 2)
    q = Shape((B, K, G, 2, D), k.dtype)
    if policy.observes:
        after = _call(policy, "prefill_observed", st, q, k, v, _rows(spec), _step(spec))
        _require_same(policy, "prefill_observed", after, st, "its init gave")
    else:
        after = _call(policy, "prefill", st, k, v, _rows(spec))
        _require_same(policy, "prefill", after, st, "its init gave")
    k, v = _new_tokens(spec, 1)
    if type(policy).update_for_step is Policy.update_for_step:
        after = _call(policy, "update", st, k, v, flag)
        _require_same(policy, "update", after, st, "its init gave")
    else:
        after = _call(policy, "update_for_step", st, k, v, flag, _step(spec))
        _require_same(policy, "update_for_step", after, st, "its init gave")
    full = _call(policy, "full_rows", st)
    if full is not None:
        _require_array(policy, "full_rows", full, flag, "None or")
    _require_same(policy, "flush", _call(policy, "flush", st), st, "its init gave")
    part = _call(policy, "attend_stored", st, q, _step(spec))
    _require_part(policy, "attend_stored", part, (B, K, 2 * G, E))

    found = _call(policy, "attend", st, _queries(spec), _step(spec))
    if not isinstance(found, tuple) or len(found) != 3 or not isinstance(found[2], Info):
        raise _wrong(policy, "attend", found, "(output, state, kvjax.policies.Info)")
    out, after, info = found
    _require_floats(policy, "attend", out, (B, K, G, E), "as its output")
    _require_same(policy, "attend", after, st, "its init gave")
    _require_floats(policy, "attend", info.attended, (B, K), "as the `attended` of its Info")


# ---------------------------------------------------------------------------------------------------------------- calls


def _rows(spec: CacheSpec) -> Shape:
    return Shape((spec.batch,), jnp.int32)


def _queries(spec: CacheSpec) -> Shape:
    return Shape((spec.batch, spec.kv_heads, spec.group, spec.head_dim), jnp.dtype(spec.dtype))


def _new_tokens(spec: CacheSpec, tokens: int) -> tuple[Shape, Shape]:
    """Keys and values of so many new tokens."""
    rows = (spec.batch, spec.kv_heads, tokens)
    dtype = jnp.dtype(spec.dtype)
    return Shape((*rows, spec.head_dim), dtype), Shape(
        (*rows, spec.value_dim or spec.head_dim), dtype
    )


def _step(spec: CacheSpec) -> Step:
    return Step(Logits(spec.head_dim**-0.5))


def _call(part: Any, verb: str, *args: Any, **settings: Any) -> Any:
    """The shapes that a verb of a part returns; arguments that are no shapes are static."""
    method = getattr(part, verb)
    static = {i: arg for i, arg in enumerate(args) if isinstance(arg, CacheSpec | Step | int)}
    arrays = [arg for i, arg in enumerate(args) if i not in static]

    def run(*arrays: Any) -> Any:
        left = iter(arrays)
        return method(
            *(static[i] if i in static else next(left) for i in range(len(args))), **settings
        )

    return _traced(part, verb, run, *arrays)


def _asked(part: Any, verb: str, *args: Any) -> Any:
    """The answer of a verb that takes no arrays, or a ValueError that names the class and it."""
    try:
        return getattr(part, verb)(*args)
    except ValueError:
        raise
    except Exception as error:
        raise raised(f"{type(part).__name__}.{verb}", error) from error


def _check_parameters(part: Any, verb: str, base: type) -> None:
    """Raises ValueError for a verb that does not take the arguments of its base's."""
    _, *wanted = signature(getattr(base, verb)).parameters.values()
    needed = [one for one in wanted if one.default is Parameter.empty]
    by_name = [one.name for one in needed if one.kind is Parameter.KEYWORD_ONLY]
    by_place = [None] * (len(needed) - len(by_name))
    try:
        signature(getattr(part, verb)).bind(*by_place, **dict.fromkeys(by_name))
    except TypeError as error:
        plain = Signature([one.replace(annotation=Parameter.empty) for one in wanted])
        raise ValueError(
            f"{type(part).__name__}.{verb} does not take what a kvjax.{base.__name__} is called with ({error}); "
            f"give it the parameters {plain}"
        ) from error


def _traced(part: Any, verb: str, run: Callable[..., Any], *arrays: Any) -> Any:
    """The shapes that `run` returns, or a ValueError that names the class and its verb."""
    name = f"{type(part).__name__}.{verb}"
    returned: list[Any] = []

    def keep(*arrays: Any) -> Any:
        returned.append(run(*arrays))
        return returned[0]

    try:
        return jax.eval_shape(keep, *arrays)
    except Exception as error:
        if returned:
            got = f"{name} returned {_described(returned[0])}, where arrays are wanted"
            raise ValueError(f"{got}: {first_line(error)}") from error
        if isinstance(error, NotImplementedError) and not str(error):
            raise ValueError(f"{name} is not implemented; {_needs(part)}") from error
        took = ", ".join(_described(array) for array in arrays) or "no arrays"
        raise ValueError(
            f"{name} raised {type(error).__name__} for {took}: {first_line(error)}"
        ) from error


def _needs(part: Any) -> str:
    verbs = {
        Selector: "a kvjax.Selector needs init, append and score",
        Store: "a kvjax.Store needs init, append, and attend or attend_chunk; and gather if policies select from it",
        Evictor: "a kvjax.Evictor needs score or score_all",
        Policy: "a kvjax.Policy needs init, prefill, update, attend and attend_stored",
    }
    return next(
        (text for base, text in verbs.items() if isinstance(part, base)), "implement it"
    )


# ------------------------------------------------------------------------------------------------------- got and wanted


def _require_same(part: Any, verb: str, got: Any, wanted: Any, whence: str) -> None:
    """Raises ValueError unless a verb returns arrays like those of `wanted`, in the same form."""
    form: Any = jax.tree.structure(got)
    if form != jax.tree.structure(wanted):
        raise _wrong(part, verb, got, f"what {whence}: {_described(wanted)}")
    paths = jax.tree_util.tree_leaves_with_path(wanted)
    for (path, leaf), other in zip(paths, jax.tree.leaves(got), strict=True):
        if (leaf.shape, leaf.dtype) != (other.shape, other.dtype):
            place = jax.tree_util.keystr(path)
            at = f"at {place} " if place else ""
            raise _wrong(part, verb, other, f"{at}what {whence}: {_described(leaf)}")


def _require_floats(part: Any, verb: str, got: Any, shape: tuple[int, ...], what: str) -> None:
    floats = hasattr(got, "dtype") and jnp.issubdtype(got.dtype, jnp.floating)
    if not floats or got.shape != shape:
        raise _wrong(
            part,
            verb,
            got,
            f"floats {list(shape)} {what}"
            if what.startswith("as")
            else f"floats {list(shape)}, {what}",
        )


def _require_array(part: Any, verb: str, got: Any, wanted: Shape, what: str) -> None:
    if getattr(got, "shape", None) != wanted.shape or got.dtype != wanted.dtype:
        raise _wrong(part, verb, got, f"{what} {_described(wanted)}")


def _require_rows(part: Any, state: Any, spec: CacheSpec) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if leaf.shape[:1] != (spec.batch,):
            place = jax.tree_util.keystr(path)
            wanted = f"an array{' at ' + place if place else ''} whose first axis are the {spec.batch} rows"
            raise _wrong(part, "init", leaf, wanted)


def _wrong(part: Any, verb: str, got: Any, wanted: str) -> ValueError:
    return ValueError(
        f"{type(part).__name__}.{verb} returned {_described(got)}, wanted {wanted}"
    )


def _described(value: Any) -> str:
    """An array by dtype and shape; a tuple or a state by its arrays."""
    if hasattr(value, "dtype") or value is None or isinstance(value, str | int | float):
        return described(value)
    found = jax.tree.leaves(value)
    if len(found) == 1 and found[0] is value:  # no pytree
        return short_repr(value)
    leaves = [_described(leaf) for leaf in found]
    few = ", ".join(leaves[:4]) + (", ..." if len(leaves) > 4 else "")
    if type(value) is tuple:
        return f"({few})"
    return f"{short_repr(value)} of {few}" if leaves else short_repr(value)
