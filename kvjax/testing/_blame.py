"""The verb to look at when a law fails, for parts of a policy from outside of kvjax."""

from __future__ import annotations

import traceback
from typing import Any

from kvjax.evictors import Evictor
from kvjax.selectors import Selector
from kvjax.stores import Store
from kvjax.validation import parts_of

# By law: the verbs of each kind of part that can break it, the likeliest first.
VERBS: dict[str, dict[str, str]] = {
    "outstanding_key_is_read": {"selector": "append, score", "policy": "select, attend"},
    "prefill_equals_prefill_then_updates": {
        "selector": "append",
        "store": "append",
        "evictor": "see_tokens, see_prompt",
        "policy": "prefill, update",
    },
    "slots_past_count_do_not_matter": {
        "store": "attend, gather",
        "evictor": "score",
        "policy": "attend, attend_stored",
    },
    "budget_of_all_is_dense_attention": {
        "store": "append, gather, decoded",
        "evictor": "score",
        "policy": "update, attend",
    },
    "truncate_gives_the_shorter_prompt": {"selector": "truncate", "store": "truncate"},
    "budget_bounds_what_is_held": {"evictor": "score", "policy": "update"},
    "row_ignores_other_rows": {
        "selector": "append, score",
        "store": "append, attend",
        "evictor": "score",
        "policy": "update, attend",
    },
    "every_token_is_in_one_zone": {"store": "append, gather, decoded", "policy": "attend"},
    "step_attends_to_the_positions_it_tells": {
        "store": "append, gather, decoded",
        "policy": "attend",
    },
    "prompt_attends_causally": {"store": "attend_chunk, decoded", "policy": "attend_stored"},
    "selected_slots_are_valid_and_unique": {"selector": "select", "policy": "select"},
    "recall_grows_with_budget": {"selector": "select, score", "policy": "select"},
    "order_of_chunks_does_not_matter": {"selector": "score, append", "store": "attend, gather"},
    "policy_is_a_value": {
        kind: "__eq__ and __hash__, which a dataclass with frozen=True has"
        for kind in ("selector", "store", "evictor", "policy")
    },
}
KINDS = {"selector": Selector, "store": Store, "evictor": Evictor}


def blamed(policy: Any, law: str, error: Exception) -> str:
    """The verbs of a user's parts that a failed law leads to: "MeanKey.append, MeanKey.score";
    empty if there are none.
    """
    own = [part for part in parts_of(policy) if _is_own(part)]
    raised = _raised_in(error, own)
    if raised or not own:
        return raised
    named = [
        f"{type(part).__name__}.{verb}"
        for part in own
        for verb in VERBS.get(law, {}).get(_kind(part), "").split(", ")
        if verb
    ]
    return ", ".join(named)


def _is_own(part: Any) -> bool:
    return type(part).__module__.partition(".")[0] not in ("kvjax", "builtins", "numpy")


def _kind(part: Any) -> str:
    return next((kind for kind, base in KINDS.items() if isinstance(part, base)), "policy")


def _raised_in(error: Exception, own: list[Any]) -> str:
    """The innermost verb of a user's part that an error came through."""
    if isinstance(error, AssertionError):
        return ""
    names = {type(part): type(part).__name__ for part in own}
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = type(frame.f_locals.get("self"))
        if owner in names:
            found = f"{names[owner]}.{frame.f_code.co_name}"
    return found
