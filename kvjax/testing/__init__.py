"""The laws of a cache policy, to run on a policy of your own.

    report = kvjax.testing.check_policy(MyPolicy(...), spec)
    print(report)  # one row per law: held, failed or does not apply, each with its reason
    report.raise_for_failures()     # AssertionError with all failures

A law compares a policy with a simple, independent reference: attention in NumPy float64, or the
same policy fed in another way. If a store keeps keys and values in few bits, the reference
attends to the values that the store returns for tokens that have left the recent block, and to
exact keys and values for all others.

A policy is recognised by its fields, not by its class. `budget` with `selector` means that it
selects, `budget` with `evictor` that it evicts, with `hashing` that it samples, `store` with
`demote` and `local` that it has a history of chunks. A law that needs a field which a policy
lacks does not apply, and its row says which.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from kvjax.policies import PerLayer, Policy
from kvjax.policies.contract import check_is_policy, unchecked
from kvjax.spec import CacheSpec
from kvjax.validation import naming_absent, short_repr

with naming_absent("kvjax.testing"):
    from kvjax.testing import (
        _attending,
        _contract,
        _gradients,
        _neighbours,
        _programs,
        _selecting,
        _steps,
        _storing,
    )
    from kvjax.testing._anatomy import DoesNotApply, core, has_history
    from kvjax.testing._blame import blamed
    from kvjax.testing._report import Report, Row

__all__ = ["FIRST", "LAWS", "Report", "Row", "check_policy"]

# Every public function of these modules is a law; those that find the most common faults come
# first. It returns if the law holds, raises AssertionError if it does not, and DoesNotApply
# with the reason if it cannot.
_MODULES = (
    _contract,
    _attending,
    _storing,
    _neighbours,
    _selecting,
    _steps,
    _programs,
    _gradients,
)
FUNCTIONS: dict[str, Callable[[Policy, CacheSpec], None]] = {
    name: law
    for module in _MODULES
    for name, law in vars(module).items()
    if inspect.isfunction(law)
    and law.__module__ == module.__name__
    and not name.startswith("_")
}
FIRST = (
    "verbs_keep_their_contract",
    "policy_is_a_value",
    "budget_of_all_is_dense_attention",
    "prefill_equals_prefill_then_updates",
    "slots_past_count_do_not_matter",
    "row_ignores_other_rows",
    "truncate_gives_the_shorter_prompt",
    "budget_bounds_what_is_held",
    "outstanding_key_is_read",
)
"""The laws to begin with: those that find the first mistakes in a part of your own, and do not
take long."""
LAWS: dict[str, str] = {
    name: inspect.cleandoc(law.__doc__ or "") for name, law in FUNCTIONS.items()
}
"""The name of each law and what it says."""


def check_policy(
    policy: Any,
    spec: CacheSpec | None = None,
    *,
    laws: Iterable[str] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Runs the laws on a policy and reports which held, which failed and which do not apply.

    An error of the policy is a failure of the law that raised it, and the other laws still run.
    All laws take some minutes on a CPU, most of it compiling; `laws` restricts them, and
    `kvjax.testing.FIRST` are those to begin with. The reason of a failure names the verbs of your
    parts to look at.

    Args:
      policy: any object with the verbs of `kvjax.Policy`, for one layer; of what a preset
        returns, the policy of the layers that do not attend to everything.
      spec: sizes to run with; default a small f32 cache of three rows, with room for several
        chunks of the policy.
      laws: names from `LAWS`; default all.
      progress: called before each law with the number of laws done, their number, and the law's
        name; `print` works.

    Raises:
      ValueError: an unknown law, or a policy or spec that is not one, such as a class.

    >>> import kvjax
    >>> check_policy(kvjax.Full(), laws=["policy_is_a_value"])["policy_is_a_value"].outcome
    'held'
    """
    if isinstance(policy, type):
        raise ValueError(
            f"check_policy got the class {policy.__name__}; give an instance, {policy.__name__}(...)"
        )
    if isinstance(policy, PerLayer):
        policy = policy.rest
    check_is_policy("check_policy(policy=...)", policy, "kvjax.Full()")
    if spec is not None and not isinstance(spec, CacheSpec):
        raise ValueError(
            f"check_policy(spec=...) must be a kvjax.CacheSpec or None, got {short_repr(spec)}"
        )
    names = list(FUNCTIONS) if laws is None else list(laws)
    unknown = [name for name in names if name not in FUNCTIONS]
    if unknown:
        raise ValueError(
            f"check_policy got laws={unknown}; kvjax.testing.LAWS has {', '.join(FUNCTIONS)}"
        )
    spec = _small_spec(policy) if spec is None else spec
    rows = []
    for done, name in enumerate(names):
        if progress is not None:
            progress(done, len(names), name)
        rows.append(_run(name, policy, spec))
    return Report(policy, spec, tuple(rows))


def _run(name: str, policy: Any, spec: CacheSpec) -> Row:
    try:
        with unchecked():  # a law judges by itself; the first one is the contract
            FUNCTIONS[name](policy, spec)
    except DoesNotApply as reason:
        return Row(name, "does not apply", str(reason))
    except AssertionError as error:
        why = str(error) or "an assertion without a message"
        return Row(name, "failed", why + _look_at(policy, name, error), error)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        return Row(name, "failed", why + _look_at(policy, name, error), error)
    return Row(name, "held")


def _look_at(policy: Any, law: str, error: Exception) -> str:
    verbs = blamed(policy, law, error)
    return f"; look at {verbs}" if verbs else ""


def _small_spec(policy: Any) -> CacheSpec:
    inner = core(policy)
    capacity = 200
    if has_history(policy):
        capacity = max(capacity, inner.demote.slots(inner.local) + 3 * inner.demote.leave)
    return CacheSpec(
        batch=3, q_heads=8, kv_heads=2, head_dim=64, capacity=capacity, dtype="float32"
    )
