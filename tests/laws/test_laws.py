"""Every law on every policy. A failure names the law and the policy."""

import dataclasses
import itertools
import re
import warnings
from collections.abc import Callable, Container, Iterable
from typing import Any

import jax
import pytest

import kvjax
from kvjax import testing
from tests.laws.broken import BROKEN, BY_VERB, CAUGHT
from tests.laws.cases import (
    CASES,
    CHOICE_LAWS,
    CORE,
    GROUP_REDUCES,
    QUICK_LAWS,
    QUICK_MORE,
    QUICK_POOLS,
    QUICK_PRESETS,
    REFUSED,
    SPEC,
    Case,
    does_not_apply,
)


def _cells(
    wanted: Iterable[str], cases: Iterable[str], quick: Callable[[str], Container[str]]
) -> list[Any]:
    """Every law with every case; what is not among the case's quick laws is left to --thorough."""
    return [
        pytest.param(law, case, marks=() if law in quick(case) else pytest.mark.thorough)
        for law, case in itertools.product(wanted, cases)
    ]


def _quick(case: str) -> Container[str]:
    if case == "fier with sink and window":  # takes long; `full` and a broken policy run it
        return [law for law in testing.LAWS if law != "gradients_are_those_of_attention"]
    if case in CORE:
        return testing.LAWS
    return (*QUICK_LAWS, *QUICK_MORE.get(case, ())) if case in QUICK_PRESETS else ()


def _quick_choice(case: str) -> Container[str]:
    return CHOICE_LAWS if case in QUICK_POOLS else ()


def _assert_holds(law: str, case: Case) -> None:
    """The law holds; or it does not apply, and the table of cases says so too."""
    report = testing.check_policy(case.policy, case.spec, laws=[law])
    report.raise_for_failures()
    assert report[law].outcome == (
        "does not apply" if law in does_not_apply(case.policy) else "held"
    ), report


def _id(name: str) -> str:
    return name.replace(" ", "_")


@pytest.mark.parametrize(("law", "case"), _cells(testing.LAWS, CASES, _quick), ids=_id)
def test_law_holds(law: str, case: str) -> None:
    _assert_holds(law, CASES[case])


@pytest.mark.parametrize(
    ("law", "case"), _cells(CHOICE_LAWS, GROUP_REDUCES, _quick_choice), ids=_id
)
def test_law_holds_whatever_the_pooling(law: str, case: str) -> None:
    _assert_holds(law, GROUP_REDUCES[case])


VALUES = dataclasses.replace(SPEC, value_dim=24)
CLOSING_UP = kvjax.evictors.Sliding(sink=4, rope=kvjax.models.rope.Default(theta=1e4))


@pytest.mark.parametrize(
    ("law", "case"),
    [
        ("budget_of_all_is_dense_attention", Case(kvjax.Full(), VALUES)),
        ("step_is_in_place", Case(kvjax.Full(), VALUES)),
        ("step_attends_to_what_is_held", Case(kvjax.Evicting(evictor=CLOSING_UP, budget=60))),
    ],
    ids=["dense-values", "in-place-values", "closing-up"],
)
def test_law_judges_values_of_another_size_and_tokens_that_close_up(
    law: str, case: Case
) -> None:
    _assert_holds(law, case)


X64_LAWS = ("prefill_equals_prefill_then_updates", "structure_is_constant")
X64_CASES = ("tova, budget 64", "freekv preset, budget 72", "fier with sink and window")
X64_QUICK = [("structure_is_constant", case) for case in X64_CASES[:2]]


@pytest.mark.parametrize(
    ("law", "case"),
    [
        *X64_QUICK,
        *(p for p in _cells(X64_LAWS, CASES, lambda _: ()) if p.values not in X64_QUICK),
    ],
    ids=_id,
)
def test_law_holds_with_64_bit_types(law: str, case: str) -> None:
    """Under `jax_enable_x64`, where indices and constants are of 64 bits by default, states
    keep their dtypes.

    As users run it, with standard promotion: indices of 32 and of 64 bits meet.
    """
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        _assert_holds(law, CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_states_have_no_64_bit_arrays_with_64_bit_types(case: str) -> None:
    """A save would else not fit a process without them."""
    policy, spec = CASES[case].policy, CASES[case].spec
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = jax.eval_shape(lambda: policy.init(spec))
    assert {leaf.dtype.itemsize for leaf in jax.tree.leaves(made)} <= {1, 2, 4}


@pytest.mark.parametrize("combination", REFUSED)
def test_unsupported_combination_is_refused_with_the_mend(combination: str) -> None:
    make, message = REFUSED[combination]
    with pytest.raises(ValueError, match=message):
        make()


def test_every_preset_has_a_case() -> None:
    policies = {type(case.policy) for case in CASES.values()}
    assert {type(preset.policy()) for preset in kvjax.presets.REGISTRY.values()} <= policies


def test_every_law_has_a_broken_policy_that_it_catches() -> None:
    assert {law for _, law in CAUGHT} == set(testing.LAWS)
    assert {fault for fault, _ in CAUGHT} == set(BROKEN)


@pytest.mark.parametrize(("fault", "law"), CAUGHT[len(BY_VERB) :], ids=_id)
def test_law_catches_a_broken_policy(fault: str, law: str) -> None:
    report = testing.check_policy(BROKEN[fault], SPEC, laws=[law])
    assert report[law].outcome == "failed", report
    assert isinstance(report[law].error, AssertionError), (
        "the law did not judge: the policy raised"
    )


@pytest.mark.parametrize("verb", BY_VERB)
def test_law_of_independent_rows_names_what_the_neighbour_did(verb: str) -> None:
    law = "row_ignores_calls_of_other_rows"
    row = testing.check_policy(BROKEN[BY_VERB[verb]], SPEC, laws=[law])[law]
    assert isinstance(row.error, AssertionError), "the law did not judge: the policy raised"
    assert row.reason.startswith(f"{verb} of a neighbour changes the next ")


def test_report_tells_what_held_what_failed_and_what_does_not_apply() -> None:
    laws = ["recall_grows_with_budget", "budget_of_all_is_dense_attention", "policy_is_a_value"]
    report = testing.check_policy(BROKEN["forgets the newest"], SPEC, laws=laws)
    assert [row.outcome for row in report] == ["does not apply", "failed", "held"]
    assert (
        report["recall_grows_with_budget"].reason
        == "the policy selects nothing (no `selector` with a `budget`)"
    )
    assert "length 1: differs by" in report["budget_of_all_is_dense_attention"].reason
    assert "1 held, 1 failed, 1 does not apply" in repr(report)
    assert "  held            policy_is_a_value" in repr(report).splitlines()
    with pytest.raises(
        AssertionError, match=r"^budget_of_all_is_dense_attention: length 1: differs"
    ):
        report.raise_for_failures()


def test_a_law_of_equal_bits_says_how_they_differ() -> None:
    law = "slots_past_count_do_not_matter"
    reason = testing.check_policy(BROKEN["reads past count"], SPEC, laws=[law])[law].reason
    assert re.search(
        r"keep_valid .*: the output of a step (is not finite|differs) in \d+ of \d+ numbers",
        reason,
    ), reason


def test_an_error_of_the_policy_is_a_failure_and_other_laws_run() -> None:
    class NoUpdate(kvjax.Full):
        def update(self, st, k, v, active):
            raise TypeError("no update here")

    report = testing.check_policy(
        NoUpdate(), SPEC, laws=["row_ignores_other_rows", "prompt_attends_causally"]
    )
    assert report["row_ignores_other_rows"].reason == (
        "TypeError: no update here; look at NoUpdate.update"
    )
    assert report["prompt_attends_causally"].outcome == "held"


def test_check_policy_takes_what_a_preset_returns() -> None:
    policies = kvjax.presets.fier(64)
    report = testing.check_policy(policies, laws=["policy_is_a_value"])
    assert report.policy == policies.rest != policies.first[0]
    assert report["policy_is_a_value"].outcome == "held"


def test_check_policy_refuses_what_is_no_policy_or_law() -> None:
    with pytest.raises(
        ValueError, match=r"got the class Full; give an instance, Full\(\.\.\.\)"
    ):
        testing.check_policy(kvjax.Full)
    with pytest.raises(
        ValueError, match=r"got laws=\['lawful'\]; kvjax.testing.LAWS has \w+, budget_of_all"
    ):
        testing.check_policy(kvjax.Full(), laws=["lawful"])
    with pytest.raises(KeyError, match="has no law 'lawful'"):
        testing.check_policy(kvjax.Full(), laws=["policy_is_a_value"])["lawful"]


def test_testing_has_few_public_names() -> None:
    assert testing.__all__ == ["FIRST", "LAWS", "Report", "Row", "check_policy"]
    assert all(says for says in testing.LAWS.values())
