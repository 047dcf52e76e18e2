"""The law of forms: what the verbs of a policy and of its parts take and return."""

from __future__ import annotations

from kvjax.policies import Policy
from kvjax.policies.contract import check_contract
from kvjax.spec import CacheSpec


def verbs_keep_their_contract(policy: Policy, spec: CacheSpec) -> None:
    """Each verb takes and returns the shapes and dtypes that its base says, and states keep their
    form.
    """
    try:
        check_contract(policy, spec, whole=True)
    except ValueError as error:
        raise AssertionError(str(error)) from error
