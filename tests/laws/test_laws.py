"""Every law on every policy. A failure names the law and the policy."""

import dataclasses
import itertools
from collections.abc import Callable, Container, Iterable
from typing import Any

import jax.numpy as jnp
import pytest

import kvjax
from kvjax import testing
from tests.laws.cases import (
    BASE,
    CASES,
    CHOICE_LAWS,
    CORE,
    GROUP_REDUCES,
    QUICK_LAWS,
    QUICK_MORE,
    QUICK_POOLS,
    REFUSED,
    SPEC,
)


def _cells(wanted: Iterable[str], cases: Iterable[str], quick: Callable[[str], Container[str]]) -> list[Any]:
    """Every law with every case; what is not among the case's quick laws is left to --thorough."""
    return [
        pytest.param(law, case, marks=() if law in quick(case) else pytest.mark.thorough)
        for law, case in itertools.product(wanted, cases)
    ]


def _quick(case: str) -> Container[str]:
    if case in CORE:
        return testing.LAWS
    return (*QUICK_LAWS, *QUICK_MORE.get(case, ())) if "preset" in case else ()


def _quick_choice(case: str) -> Container[str]:
    return CHOICE_LAWS if case in QUICK_POOLS else ()


def _id(name: str) -> str:
    return name.replace(" ", "_")


@pytest.mark.parametrize(("law", "case"), _cells(testing.LAWS, CASES, _quick), ids=_id)
def test_law_holds(law: str, case: str) -> None:
    testing.LAWS[law](CASES[case].policy, CASES[case].spec)


@pytest.mark.parametrize(("law", "case"), _cells(CHOICE_LAWS, GROUP_REDUCES, _quick_choice), ids=_id)
def test_law_holds_whatever_the_pooling(law: str, case: str) -> None:
    testing.LAWS[law](GROUP_REDUCES[case].policy, GROUP_REDUCES[case].spec)


@pytest.mark.parametrize("combination", REFUSED)
def test_unsupported_combination_is_refused_with_the_mend(combination: str) -> None:
    make, message = REFUSED[combination]
    with pytest.raises(ValueError, match=message):
        make()


def test_every_preset_has_a_case() -> None:
    policies = {type(case.policy) for case in CASES.values()}
    assert {type(preset.policy()) for preset in kvjax.presets.REGISTRY.values()} <= policies


# A law that cannot fail proves nothing: break policies on purpose.


@dataclasses.dataclass(frozen=True)
class _Broken(kvjax.Full):
    """A Full that is wrong in the way that `fault` says."""

    fault: str = ""

    def update(self, st, k, v, active):
        after = super().update(st, k, v, active)
        tokens = after.tokens
        if self.fault == "stores inactive rows":
            return super().update(st, k, v, jnp.ones_like(active))
        if self.fault == "clamps":
            last = tokens.slots - 1
            tokens = dataclasses.replace(tokens, k=tokens.k.at[:, :, last].set(jnp.swapaxes(k, 1, 2)[:, :, 0]))
            return dataclasses.replace(after, tokens=tokens, overflow=st.overflow)
        return after

    def attend(self, st, q, *, scale, window=None):
        tokens = st.tokens
        if self.fault == "uses the length of row 0":
            tokens = dataclasses.replace(tokens, count=jnp.broadcast_to(tokens.count[:1], tokens.count.shape))
        if self.fault == "reads past count":
            tokens = dataclasses.replace(tokens, count=tokens.count + 1)
        if self.fault == "forgets the newest":
            tokens = dataclasses.replace(tokens, count=jnp.maximum(tokens.count - 1, 1))
        out, _, info = super().attend(dataclasses.replace(st, tokens=tokens), q, scale=scale, window=window)
        if self.fault == "changes the state":
            st = dataclasses.replace(st, overflow=st.overflow.astype(jnp.int8))
        return out, st, info


@pytest.mark.parametrize(
    ("fault", "law"),
    [
        ("uses the length of row 0", "row_ignores_other_rows"),
        ("uses the length of row 0", "budget_of_all_is_dense_attention"),
        ("reads past count", "slots_past_count_do_not_matter"),
        ("forgets the newest", "every_token_is_in_one_zone"),
        ("forgets the newest", "budget_of_all_is_dense_attention"),
        ("stores inactive rows", "inactive_rows_store_nothing"),
        ("clamps", "full_cache_drops_and_says_so"),
        ("changes the state", "structure_is_constant"),
    ],
)
def test_law_catches_a_broken_policy(fault: str, law: str) -> None:
    with pytest.raises(AssertionError):
        testing.LAWS[law](_Broken(fault=fault), SPEC)


def test_check_names_the_law_that_fails() -> None:
    with pytest.raises(AssertionError, match=r"^budget_of_all_is_dense_attention: "):
        testing.check(_Broken(fault="forgets the newest"), SPEC)


def test_recall_law_catches_a_choice_that_is_not_by_score() -> None:
    @dataclasses.dataclass(frozen=True)
    class Fickle(kvjax.Retrieval):
        def select(self, st, q, *, scale=None, window=None):
            good = super().select(st, q, scale=scale, window=window)
            return good._replace(slots=(good.slots + 3 * self.budget) % st.store.slots)

    fields = {f.name: getattr(BASE, f.name) for f in dataclasses.fields(BASE)}
    with pytest.raises(AssertionError):
        testing.LAWS["recall_grows_with_budget"](Fickle(**fields), SPEC)
