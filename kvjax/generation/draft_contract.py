"""Checks a draft where a run calls it: what `start` returns when the run begins, and what the
verbs of a drafter return while the loop is traced.

So a mistake in a draft of one's own is one sentence with class, verb, got and wanted, instead of
an error from inside of a loop. A compiled loop has no trace of it. Which tokens are drafted is
not checked: the model verifies them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.attention import MOST_STEPS
from kvjax.generation.drafts import Drafter, Proposal, Round
from kvjax.spec import require_int
from kvjax.validation import check_flags, check_verbs, described, raised, short_repr

T = TypeVar("T")


def check_drafter(draft: Any, drafter: Any) -> Drafter:
    """Returns the drafter that a draft started.

    Raises:
      ValueError: it lacks a verb, is no pytree, or drafts more tokens than a step verifies.
    """
    where = f"what {type(draft).__name__}.start returns"
    check_verbs(
        where,
        drafter,
        "a drafter",
        ("with_state", "pays", "propose", "accept"),
        "kvjax.generation.drafts.PromptLookup().start(...)",
        fields=("state", "max_tokens", "exact", "idle"),
        protocol="kvjax.generation.drafts.Drafter",
    )
    name = type(drafter).__name__
    require_int(f"{name}.max_tokens", drafter.max_tokens, at_least=0, at_most=MOST_STEPS - 1)
    check_flags(name, exact=drafter.exact)
    if drafter.idle is not None and not isinstance(drafter.idle, str):
        raise ValueError(
            f"{name}.idle is {short_repr(drafter.idle)}, wanted None, or why nothing is drafted as text"
        )
    if any(leaf is drafter for leaf in jax.tree.leaves(drafter)):
        raise ValueError(
            f"{where} is a {name}, which is no pytree; make it a frozen dataclass with "
            "jax.tree_util.register_dataclass, whose arrays are its state"
        )
    return drafter


def propose(drafter: Drafter, now: Round) -> Proposal:
    """Drafts the tokens of a round.

    Raises:
      ValueError: `Drafter.propose` returned something else than a `Proposal` for this round.
    """
    found = _called(drafter, "propose", lambda: drafter.propose(now))
    if not isinstance(found, Proposal):
        raise _wrong(drafter, "propose", found, "a kvjax.generation.drafts.Proposal")
    rows = now.token.shape[0]
    for name, shape in (("tokens", (rows, drafter.max_tokens)), ("drafted", (rows,))):
        _require_ints(drafter, name, getattr(found, name), shape)
    _require_same(drafter, "propose", "the cache", found.cache, now.cache)
    _require_drafter(drafter, "propose", found.drafter)
    return found


def accept(drafter: Drafter, tokens: Array, taken: Array, drafted: Array) -> Any:
    """The state of the drafter after some of the tokens were accepted.

    Raises:
      ValueError: `Drafter.accept` returned another class, or a state of another form.
    """
    after = _called(drafter, "accept", lambda: drafter.accept(tokens, taken, drafted))
    _require_drafter(drafter, "accept", after)
    return after.state


def _called(drafter: Drafter, verb: str, call: Callable[[], T]) -> T:
    """Calls a verb; an error of its own names class and verb."""
    try:
        return call()
    except (ValueError, NotImplementedError):
        raise
    except Exception as error:
        raise raised(f"{type(drafter).__name__}.{verb}", error) from error


def _require_ints(drafter: Drafter, name: str, got: Any, shape: tuple[int, ...]) -> None:
    of_shape = getattr(got, "shape", None) == shape
    if not of_shape or got.dtype != jnp.int32:
        cure = "max_tokens for each row" if name == "tokens" else "how many for each row"
        raise _wrong(drafter, "propose", got, f"int32{list(shape)}, {cure}", of=name)


def _require_drafter(drafter: Drafter, verb: str, after: Any) -> None:
    """Raises ValueError unless a loop can carry the drafter that a verb returned."""
    if type(after) is not type(drafter):
        raise _wrong(drafter, verb, after, f"a {type(drafter).__name__}", of="a drafter")
    _require_same(drafter, verb, "a state", after.state, drafter.state)


def _require_same(drafter: Drafter, verb: str, of: str, got: Any, before: Any) -> None:
    """Raises ValueError unless arrays have the form, shapes and dtypes of those before."""
    form: Any = jax.tree.structure(got)
    if form != jax.tree.structure(before):
        raise _wrong(drafter, verb, got, "the form that it had", of=of)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(before), strict=True):
        if (jnp.shape(one), jnp.result_type(one)) != (jnp.shape(other), jnp.result_type(other)):
            raise _wrong(drafter, verb, one, f"{described(other)} as before", of=of)


def _wrong(drafter: Drafter, verb: str, got: Any, wanted: str, *, of: str = "") -> ValueError:
    what = f"{of} " if of else ""
    return ValueError(
        f"{type(drafter).__name__}.{verb} returned {what}{described(got)}, wanted {wanted}"
    )
