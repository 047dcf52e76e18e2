"""Reports of a decode loop to the host, each as one array.

To read an array from a GPU takes the host up to 0.7 ms, whatever its size, so the loop puts
tokens, counts and flags together, and the host reads them in one copy.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.tree_util import register_dataclass

from kvjax.memory import on_host


class Report(NamedTuple):
    """Results of a call that the host reads; arrays of the device, or of the host once read."""

    tokens: Any  # i32[B, ROOM], each row's new tokens, then PAD
    count: Any  # tokens that this call emitted: i32[], or i32[B] of each row
    active: Any  # bool[B] rows that have not ended
    # bool[2, B] rows whose logits have no best token: before the first step, after the last one
    bad: Any
    attended: Any  # f32[L] mean over the steps of rows; [0] if not measured
    counted: Any  # f32[] row steps in that mean
    draft_counts: Any  # i32[3] steps of rows, tokens drafted, tokens accepted: `Speculation`
    log_probabilities: Any = None  # f32[B, ROOM] of the tokens; None: not asked for

    def read(self) -> Report:
        """The same arrays on the host."""
        return jax.tree.map(on_host, self)


class _Part(NamedTuple):
    """Shape and dtype of an array in the words of a `Packed`."""

    shape: tuple[int, ...]
    dtype: str


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A `Report` in one array: the elements of all its arrays, one after the other, as i32.

    >>> report = Report(*jnp.ones((6, 2), bool), draft_counts=jnp.full(3, 0.5))
    >>> Packed.of(report).read().draft_counts
    array([0.5, 0.5, 0.5], dtype=float32)
    """

    words: Array  # i32[n]
    parts: tuple[_Part, ...] = dataclasses.field(metadata={"static": True})
    tree: Any = dataclasses.field(metadata={"static": True})  # structure of the report

    @classmethod
    def of(cls, report: Report) -> Packed:
        leaves, tree = jax.tree.flatten(report)
        leaves = [jnp.asarray(leaf) for leaf in leaves]
        parts = tuple(_Part(leaf.shape, str(leaf.dtype)) for leaf in leaves)
        return cls(jnp.concatenate([_words(leaf) for leaf in leaves]), parts, tree)

    def read(self) -> Report:
        """The arrays of the report on the host, in one copy."""
        words = on_host(self.words)
        leaves = []
        start = 0
        for part in self.parts:
            end = start + math.prod(part.shape)
            leaf = words[start:end]
            leaf = leaf != 0 if part.dtype == "bool" else leaf.view(part.dtype)
            leaves.append(leaf.reshape(part.shape))
            start = end
        return jax.tree.unflatten(self.tree, leaves)


def _words(leaf: Array) -> Array:
    """An array of bool, i32 or f32 as i32[n]."""
    if leaf.dtype == bool:
        return leaf.ravel().astype(jnp.int32)
    return lax.bitcast_convert_type(leaf.ravel(), jnp.int32)
