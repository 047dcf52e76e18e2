"""Cache policies: what a layer keeps, and what a query attends to.

A policy is a frozen dataclass without arrays. It is hashable, so that equal policies share one
trace. Its state is a frozen pytree, and every leaf has the batch first. The methods of a
policy, its verbs (`Policy`), take a state and return one of the same structure, shapes and
dtypes.

All arrays have kv heads before tokens: k and v are [B, K, T, D], the queries of a step [B, K,
G, D] and those of a prompt [B, K, G, T, D]. `kvjax.attention` converts a model's layout to this
one, once.

Nothing is clamped: a token that has no room is dropped and sets `overflow`, which
`kvjax.raise_on_overflow` reports.
"""

from kvjax.policies.compressed import Compressed
from kvjax.policies.evicting import Evicting
from kvjax.policies.full import Full, FullState
from kvjax.policies.per_head import PerHead
from kvjax.policies.per_layer import PerLayer
from kvjax.policies.policy import Info, Logits, Policy, Step
from kvjax.policies.recurrent import Recurrent, RecurrentState
from kvjax.policies.retrieval import Retrieval
from kvjax.policies.shared import Follower, Shared, share_selections
from kvjax.policies.short import Short
from kvjax.policies.speculative import Speculative
from kvjax.policies.zones import ZonedState
from kvjax.spec import RecurrentLayers as RecurrentLayers

__all__ = [
    "Compressed",
    "Evicting",
    "Follower",
    "Full",
    "FullState",
    "Info",
    "Logits",
    "PerHead",
    "PerLayer",
    "Policy",
    "Recurrent",
    "RecurrentLayers",
    "RecurrentState",
    "Retrieval",
    "Shared",
    "Short",
    "Speculative",
    "Step",
    "ZonedState",
    "share_selections",
]
