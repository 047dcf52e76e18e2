"""Cache policies: what a layer keeps, and what a query attends to.

A policy is a frozen dataclass without arrays. It is hashable, so that equal policies share one trace. Its state is a
frozen pytree, and every leaf has the batch first. The methods of a policy, its verbs, take a state and return one of
the same structure, shapes and dtypes.

    init      an empty state for a CacheSpec
    prefill   stores a right-padded chunk of a prompt, T tokens per row of which `lengths` are real
    update    stores one token for each active row; only ever writes into the recent block
    attend    attention of the newest token's queries, over the tokens that the policy lets them see
    flush     moves tokens out of full recent blocks; called before each update, for all layers under one condition
    attend_stored   exact attention over all stored tokens: a chunk of a prompt attends to the chunks before it

`Policy` is the base of all policies, and has more verbs with defaults: `select`, several steps at once (`store_steps`),
`rollback`, `truncate`, `grown`. A `Step` has everything that a step knows besides its queries: the scale, a sliding
window, the rows that take part, a selection made elsewhere, and the lengths of several steps.

All arrays have kv heads before tokens: k and v are [B, K, T, D], the queries of a step [B, K, G, D] and those of a
prompt [B, K, G, T, D]. `kvjax.attention` converts a model's layout to this one, once.

Nothing is clamped: a token that has no room is dropped and sets `overflow`, which `kvjax.raise_on_overflow` reports.
"""

from kvjax.policies.beside_prompt import BesidePrompt
from kvjax.policies.compensated import Compensated, CompensatedState
from kvjax.policies.compressed import Compressed
from kvjax.policies.evicting import Evicting, EvictingState
from kvjax.policies.full import Full, FullState
from kvjax.policies.head_budgets import HeadBudgets, HeadBudgetsState
from kvjax.policies.indexed import MSA, QSA, Index, Indexed, Indexer
from kvjax.policies.mixed import Mixed, MixedState
from kvjax.policies.outliers import OutlierRetrieval
from kvjax.policies.per_head import PerHead, PerHeadState
from kvjax.policies.per_layer import PerLayer
from kvjax.policies.policy import Info, Policy, Step
from kvjax.policies.retrieval import Retrieval
from kvjax.policies.sampled import Sampled
from kvjax.policies.shared import Follower, Shared, share_selections
from kvjax.policies.short import Short
from kvjax.policies.speculative import Speculative, SpeculativeState
from kvjax.policies.zones import ZonedState

__all__ = [
    "MSA",
    "QSA",
    "BesidePrompt",
    "Compensated",
    "CompensatedState",
    "Compressed",
    "Evicting",
    "EvictingState",
    "Follower",
    "Full",
    "FullState",
    "HeadBudgets",
    "HeadBudgetsState",
    "Index",
    "Indexed",
    "Indexer",
    "Info",
    "Mixed",
    "MixedState",
    "OutlierRetrieval",
    "PerHead",
    "PerHeadState",
    "PerLayer",
    "Policy",
    "Retrieval",
    "Sampled",
    "Shared",
    "Short",
    "Speculative",
    "SpeculativeState",
    "Step",
    "ZonedState",
    "share_selections",
]
