"""All laws, in the order in which they run: the first ones find the most common faults."""

from __future__ import annotations

from collections.abc import Callable

from kvjax.policies import Policy
from kvjax.spec import CacheSpec
from kvjax.testing._attending import (
    budget_of_all_is_dense_attention,
    every_token_is_in_one_zone,
    order_of_chunks_does_not_matter,
    prompt_attends_causally,
    step_attends_to_the_positions_it_tells,
    step_attends_to_what_is_held,
)
from kvjax.testing._gradients import gradients_are_those_of_attention
from kvjax.testing._neighbours import row_ignores_calls_of_other_rows
from kvjax.testing._programs import (
    one_trace_serves_all_steps,
    policy_is_a_value,
    step_is_in_place,
    structure_is_constant,
)
from kvjax.testing._selecting import recall_grows_with_budget, selected_slots_are_valid_and_unique
from kvjax.testing._steps import (
    decode_equals_single_steps,
    rollback_forgets_what_came_after,
    three_calls_equal_a_step,
    truncate_gives_the_shorter_prompt,
)
from kvjax.testing._storing import (
    budget_bounds_what_is_held,
    checkpoint_restores_to_the_bit,
    full_cache_drops_and_says_so,
    inactive_rows_store_nothing,
    insert_replaces_one_row,
    padding_does_not_matter,
    prefill_equals_prefill_then_updates,
    row_ignores_other_rows,
    slots_past_count_do_not_matter,
    taken_rows_continue_as_they_were,
)

Law = Callable[[Policy, CacheSpec], None]
"""Returns if the law holds, raises AssertionError if it does not, and DoesNotApply with the reason if it cannot."""

FUNCTIONS: dict[str, Law] = {
    law.__name__: law
    for law in (
        budget_of_all_is_dense_attention,
        prompt_attends_causally,
        prefill_equals_prefill_then_updates,
        row_ignores_other_rows,
        row_ignores_calls_of_other_rows,
        padding_does_not_matter,
        slots_past_count_do_not_matter,
        order_of_chunks_does_not_matter,
        selected_slots_are_valid_and_unique,
        recall_grows_with_budget,
        every_token_is_in_one_zone,
        step_attends_to_the_positions_it_tells,
        three_calls_equal_a_step,
        decode_equals_single_steps,
        rollback_forgets_what_came_after,
        truncate_gives_the_shorter_prompt,
        inactive_rows_store_nothing,
        insert_replaces_one_row,
        taken_rows_continue_as_they_were,
        full_cache_drops_and_says_so,
        one_trace_serves_all_steps,
        step_is_in_place,
        structure_is_constant,
        policy_is_a_value,
        gradients_are_those_of_attention,
        budget_bounds_what_is_held,
        step_attends_to_what_is_held,
        checkpoint_restores_to_the_bit,
    )
}
