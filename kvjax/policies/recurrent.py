"""The base of layers that keep a state of fixed size instead of keys and values.

Models of today put such layers (gated delta nets, short convolutions, Mamba) between those with
attention. Their `Cache` has an entry for each layer of the model: `kvjax.init` gives the user's
policies to the layers with attention, and the model's own `Recurrent` policy to the others,
which `CacheSpec.recurrent` names. Every function that walks over a cache then treats both alike.

A state that has taken a token cannot give it back. So the newest tokens stay beside the state,
each as what it would add, and a step reads both. `flush` folds them into the state once there
are `newest` of them, as it moves tokens of a full recent block to the history elsewhere. Up to
then `rollback` takes tokens back, such as rejected drafts, by their count alone. It also saves
work: a step reads the state and writes only its own token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import register_dataclass

from kvjax.numerics.partial import PartialAttention
from kvjax.policies.policy import Info, Policy, Step, in_range
from kvjax.spec import CacheSpec


@register_dataclass
@dataclass(frozen=True)
class RecurrentState:
    """The memory of a layer with a state of fixed size."""

    memory: Any  # arrays [B, ...]: the state, and the newest tokens beside it
    count: Array  # i32[B] newest tokens, in slots [0, count) of their arrays
    length: Array  # i32[B] tokens received
    overflow: Array  # bool[B] a token of this row was dropped


@dataclass(frozen=True)
class Recurrent(Policy):
    """A layer that keeps a state of fixed size: no growth with the text and no budget.

    A subclass is a frozen dataclass without arrays that defines `empty`, `read`, `fold`, and
    `step` or `decode`, which also counts the tokens; init, flush, room, rollback, save,
    restore, rows and shardings follow from them. The memory is any pytree of arrays that begin
    with the rows. `kvjax.recurrence.advance` calls these verbs; `inputs` are what the layer
    computes of its T tokens, a tree of arrays [B, T, ...], and `weights` are its parameters.
    """

    newest: ClassVar[int] = 32
    """Tokens that stay beside the state at most, and so a draft may have."""

    reversible = True
    takes_exact = True  # a state is never a selection

    def empty(self, batch: int, dtype: np.dtype) -> Any:
        """The memory of `batch` rows without tokens; `dtype` is that of the cache."""
        raise NotImplementedError

    def read(self, memory: Any, inputs: Any, weights: Any, count: Array) -> tuple[Array, Any]:
        """Outputs [B, T, ...] of a chunk of a prompt, and the memory after its first `count`
        i32[B] tokens. There are no newest tokens beside the state, before and after.
        """
        raise NotImplementedError

    def step(
        self, memory: Any, inputs: Any, weights: Any, held: Array, count: Array
    ) -> tuple[Array, Any]:
        """Outputs [B, T, ...] of decode steps, and the memory whose first `count` i32[B] tokens
        follow the `held` i32[B] newest ones.
        """
        raise NotImplementedError

    def decode(
        self, st: RecurrentState, inputs: Any, weights: Any, count: Array
    ) -> tuple[Array, RecurrentState]:
        """Outputs [B, T, ...] of decode steps, and the state with the first `count` i32[B]
        tokens beside it; those without room are dropped.
        """
        taken = jnp.minimum(count, self.free(st))
        out, memory = self.step(st.memory, inputs, weights, st.count, taken)
        after = RecurrentState(
            memory, st.count + taken, st.length + taken, st.overflow | (count > taken)
        )
        return out, after

    def fold(self, memory: Any, count: Array) -> Any:
        """The memory with the first `count` i32[B] of the newest tokens in the state. A row
        where `count` is 0 stays as it is, to the bit.
        """
        raise NotImplementedError

    # ------------------------------------------------------------------------------------- verbs of every policy

    def init(self, spec: CacheSpec) -> RecurrentState:
        none = jnp.zeros(spec.batch, jnp.int32)
        memory = self.empty(spec.batch, jnp.dtype(spec.dtype))
        return RecurrentState(memory, none, jnp.zeros_like(none), jnp.zeros(spec.batch, bool))

    def full_rows(self, st: RecurrentState) -> Array:
        return st.count >= self.newest

    def flush(self, st: RecurrentState) -> RecurrentState:
        folded = jnp.where(self.full_rows(st), st.count, 0)
        return replace(st, memory=self.fold(st.memory, folded), count=st.count - folded)

    def free(self, st: RecurrentState) -> Array:
        return self.newest - st.count

    def earliest(self, st: RecurrentState) -> Array:
        return st.length - st.count

    def rollback(self, st: RecurrentState, lengths: Array) -> RecurrentState:
        lengths, outside = in_range(lengths, self.earliest(st), st.length)
        taken_back = st.length - lengths
        return RecurrentState(st.memory, st.count - taken_back, lengths, st.overflow | outside)

    def truncate(self, st: RecurrentState, lengths: Array) -> NoReturn:
        raise ValueError(
            f"truncate needs layers that keep every token, and {self!r} keeps a state of all of them: read the "
            "shorter prompt into an empty cache, or use kvjax.rollback for the newest tokens"
        )

    def prefill(self, st: Any, k: Array, v: Array, lengths: Array) -> NoReturn:
        self._refuse()

    def update(self, st: Any, k: Array, v: Array, active: Array) -> NoReturn:
        self._refuse()

    def attend(self, st: Any, q: Array, step: Step) -> tuple[Array, Any, Info]:
        self._refuse()

    def attend_stored(self, st: Any, q: Array, step: Step) -> PartialAttention:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ValueError(
            f"{self!r} keeps a state instead of keys and values, so nothing attends to it; call "
            "kvjax.recurrence.advance for this layer"
        )
