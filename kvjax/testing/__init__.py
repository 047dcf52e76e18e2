"""The laws of a cache policy, as functions that anyone can run on a policy of their own.

    from kvjax import testing
    testing.check(MyPolicy(...), spec)                  # all laws; AssertionError names the first that does not hold
    testing.LAWS["row_ignores_other_rows"](policy, spec)

A law takes a policy and a CacheSpec and compares with the simplest independent thing: attention in numpy float64, or
the same policy fed in another way. Where a store keeps keys and values in few bits, the attention to compare with is
over what it gives back for those tokens that have left the recent block, and over exact ones for all others. Laws
that speak of a budget or of a selection ask nothing of policies without. Prompts come in chunks of `CHUNK` tokens and
steps of one, so a policy compiles twice for most laws.

A policy that evicts has laws of its own: what it holds, and what a step then attends to. A law that compares with all
tokens that came gives it slots for all of them (`attending_to_all`), and a law of what happens when the capacity is
used up asks nothing of it, for it always has room. All other laws hold while tokens die.
"""

from __future__ import annotations

from collections.abc import Callable

from kvjax.caches import Policy
from kvjax.spec import CacheSpec
from kvjax.testing.attending import (
    budget_of_all_is_dense_attention,
    every_token_is_in_one_zone,
    order_of_chunks_does_not_matter,
    prompt_attends_causally,
    step_attends_to_what_is_held,
)
from kvjax.testing.choosing import recall_grows_with_budget, selected_slots_are_valid_and_unique
from kvjax.testing.drive import CHUNK, Tokens, attending_to_all, edge_lengths, fill, random_tokens, step
from kvjax.testing.expect import as_stored, dense, held_positions, poison, tolerance, valid_part, zones
from kvjax.testing.programs import (
    one_trace_serves_all_steps,
    policy_is_a_value,
    step_is_in_place,
    structure_is_constant,
)
from kvjax.testing.storing import (
    budget_bounds_what_is_held,
    checkpoint_restores_to_the_bit,
    full_cache_drops_and_says_so,
    inactive_rows_store_nothing,
    insert_replaces_one_row,
    padding_does_not_matter,
    prefill_equals_prefill_then_updates,
    row_ignores_other_rows,
    slots_past_count_do_not_matter,
)

__all__ = [
    "CHUNK",
    "LAWS",
    "Law",
    "Tokens",
    "as_stored",
    "attending_to_all",
    "budget_bounds_what_is_held",
    "budget_of_all_is_dense_attention",
    "check",
    "checkpoint_restores_to_the_bit",
    "dense",
    "edge_lengths",
    "every_token_is_in_one_zone",
    "fill",
    "full_cache_drops_and_says_so",
    "held_positions",
    "inactive_rows_store_nothing",
    "insert_replaces_one_row",
    "one_trace_serves_all_steps",
    "order_of_chunks_does_not_matter",
    "padding_does_not_matter",
    "poison",
    "policy_is_a_value",
    "prefill_equals_prefill_then_updates",
    "prompt_attends_causally",
    "random_tokens",
    "recall_grows_with_budget",
    "row_ignores_other_rows",
    "selected_slots_are_valid_and_unique",
    "slots_past_count_do_not_matter",
    "step",
    "step_attends_to_what_is_held",
    "step_is_in_place",
    "structure_is_constant",
    "tolerance",
    "valid_part",
    "zones",
]

Law = Callable[[Policy, CacheSpec], None]

LAWS: dict[str, Law] = {
    law.__name__: law
    for law in (
        budget_of_all_is_dense_attention,
        prompt_attends_causally,
        prefill_equals_prefill_then_updates,
        row_ignores_other_rows,
        padding_does_not_matter,
        slots_past_count_do_not_matter,
        order_of_chunks_does_not_matter,
        selected_slots_are_valid_and_unique,
        recall_grows_with_budget,
        every_token_is_in_one_zone,
        inactive_rows_store_nothing,
        insert_replaces_one_row,
        full_cache_drops_and_says_so,
        one_trace_serves_all_steps,
        step_is_in_place,
        structure_is_constant,
        policy_is_a_value,
        budget_bounds_what_is_held,
        step_attends_to_what_is_held,
        checkpoint_restores_to_the_bit,
    )
}


def check(policy: Policy, spec: CacheSpec) -> None:
    """Runs all laws; the first that does not hold raises AssertionError, which starts with its name."""
    for name, law in LAWS.items():
        try:
            law(policy, spec)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
