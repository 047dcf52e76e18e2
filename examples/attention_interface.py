"""The `AttentionInterface` of jax-llm-examples' serving loop, for caches of kvjax.

Its loop reads prompts in a cache of their own, keeps the caches of prompts that were read, and
inserts them into the rows that decode. It sees a cache through two functions, which this module
makes:

    get_sequence(cache, row) -> (sequence, length)
    insert_sequences(cache, sequences, rows, lengths, erase=False) -> cache

A sequence is a cache of one row, whatever its policy keeps of it. The loop's store of prompts
cuts sequences into pieces of 512 tokens; a row of kvjax has an index and codes, so it stays
whole, and is cut to a shorter beginning by `kvjax.truncate`. Both functions run under jit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import kvjax


class AttentionInterface(NamedTuple):
    cache: kvjax.Cache
    get_sequence: Any
    insert_sequences: Any


def get_sequence(cache: kvjax.Cache, row: int | Array) -> tuple[kvjax.Cache, Array]:
    """A copy of a row, and its length i32[]."""
    sequence = kvjax.take_rows(cache, jnp.asarray(row, jnp.int32)[None])
    return sequence, sequence.length[0]


def insert_sequences(
    cache: kvjax.Cache,
    sequences: Sequence[kvjax.Cache],
    rows: Sequence[int | Array],
    lengths: Sequence[int | Array] | None,
    erase: bool = False,
) -> kvjax.Cache:
    """The cache with the first tokens of each sequence in a row. A row outside of the cache is
    padding of the lists.

    With `erase`, all other rows become empty.

    Raises:
      ValueError: a policy that forgets tokens, and so cannot be cut to a length. Give
        lengths=None for whole sequences.
    """
    if erase:
        none = jnp.full(cache.spec.batch, -1, jnp.int32)  # no row is taken
        cache = jax.jit(kvjax.take_rows)(cache, none)
    for i, (sequence, row) in enumerate(zip(sequences, rows, strict=True)):
        if lengths is not None:
            sequence = kvjax.truncate(sequence, jnp.asarray(lengths[i], jnp.int32)[None])
        cache = kvjax.insert(cache, sequence, jnp.asarray(row, jnp.int32))
    return cache


def attention_interface(cache: kvjax.Cache) -> AttentionInterface:
    """The interface of a cache of `kvjax.init`."""
    return AttentionInterface(cache, get_sequence, insert_sequences)
