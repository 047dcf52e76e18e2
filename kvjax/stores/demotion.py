"""Demotion: which tokens leave the recent block, and when.

The recent block holds `local` tokens that are always attended and up to a chunk more. When it
is full, two static index arrays say which slots leave as one chunk and which stay. No
quantisation group or page spans two chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.spec import keep_ints


class Demotion(Protocol):
    """Says which tokens move to the history when the recent block is full.

    The block has `slots(local)` slots; those of `leaving(local)` move and those of
    `staying(local)` remain.
    """

    @property
    def leave(self) -> int:
        """Tokens of a chunk."""
        ...

    @property
    def ordered(self) -> bool:
        """Whether history and recent block hold tokens in order of arrival, as a sliding window
        needs.
        """
        ...

    def slots(self, local: int) -> int: ...

    def leaving(self, local: int) -> np.ndarray: ...

    def staying(self, local: int) -> np.ndarray: ...

    def place(self, flushes: Array, slot: Array) -> Array:
        """Returns the place, in order of arrival, of the token in `slot` of the block after
        `flushes` flushes, i32.

        It counts the tokens that entered the block before this one, so it depends only on these
        two numbers, and positions of tokens need not be stored. Law: `place` agrees with an
        empty block that is filled one token at a time, by `leaving` and `staying`.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class _Oldest:
    """Moves the oldest `leave` tokens to the history together; the block stays in order of
    arrival.
    """

    leave: int = 256
    ordered: ClassVar[bool] = True

    def __post_init__(self) -> None:
        keep_ints(self, leave=1)

    def slots(self, local: int) -> int:
        raise NotImplementedError

    def leaving(self, local: int) -> np.ndarray:
        return np.arange(self.leave)

    def staying(self, local: int) -> np.ndarray:
        return np.arange(self.leave, self.slots(local))

    def place(self, flushes: Array, slot: Array) -> Array:
        return flushes * self.leave + slot


@dataclass(frozen=True, kw_only=True)
class Fifo(_Oldest):
    """Moves the oldest `leave` tokens to the history together; the block stays in order of
    arrival.

    A larger chunk leaves more rarely and keeps its tokens exact for longer. The block is full
    when the next token would make `leave` tokens older than the `local` newest, so local - 1
    stay, and every chunk leaves as early as possible.
    """

    def slots(self, local: int) -> int:
        return local + self.leave - 1


@dataclass(frozen=True, kw_only=True)
class Buffer(_Oldest):
    """Moves the oldest `leave` tokens of a full local window to the history, so that no token
    is pending.

    The block has `local` slots and every step attends to all of its tokens, local - leave + 1
    to local of them. `Fifo` has `local` tokens and up to a chunk more, which compete with the
    history.

    **Source:** ParisKV's update buffer beside its local window: `local` is the sum of both,
    `leave` the buffer. With local = leave = one page it is Quest's rule: the page that is not
    yet full is always attended.
    """

    def slots(self, local: int) -> int:
        if local < self.leave:
            raise ValueError(
                f"Buffer(leave={self.leave}) is part of the local window, so local={local} is too small; use "
                f"local={local + self.leave}, or Fifo(leave={self.leave})"
            )
        return local


@dataclass(frozen=True, kw_only=True)
class LogSparse:
    """Moves every second token of the older two thirds to the history: the tokens that stay are
    sparser with age.

    The block holds 3W tokens, W = `window`. When it is full:

        leaving = 1, 3, 5, ..., 2W - 1     staying = 0, 2, 4, ..., 2W - 2, then 2W to 3W - 1

    as `leaving` and `staying` return; `Compressed` moves them, to a store such as `Quantized`.
    So 2W to 3W tokens are in the block, the newest W of them adjacent (`local` may be at most
    W); they reach back about W log2 W tokens, and a row's first token never leaves.

    A full block is thinned before the next token comes, so the query of the step that filled it
    reads all 3W.

    **Source:** LogQuant, Algorithm 1.
    """

    window: int = 42
    ordered: ClassVar[bool] = False

    def __post_init__(self) -> None:
        keep_ints(self, window=1)

    @property
    def leave(self) -> int:
        return self.window

    def slots(self, local: int) -> int:
        if local > self.window:
            raise ValueError(
                f"LogSparse(window={self.window}) keeps the newest {self.window} tokens adjacent and cannot always "
                f"attend to local={local} of them; use local <= {self.window} or a larger window"
            )
        return 3 * self.window

    def leaving(self, local: int) -> np.ndarray:
        return np.arange(1, 2 * self.window, 2)

    def staying(self, local: int) -> np.ndarray:
        return np.concatenate(
            [np.arange(0, 2 * self.window, 2), np.arange(2 * self.window, self.slots(local))]
        )

    def place(self, flushes: Array, slot: Array) -> Array:
        """A flush moves slot 2i to slot i below 2W, and slots past 2W back by W.

        So a token in slot i < W was in slots 2i, 4i, ... before, each one flush earlier; slots
        from W on are in order.
        """
        W = self.window
        # Flushes since the token of slot i was in a slot from W on: least n with i * 2**n >= W.
        # Slot 0 never moves.
        steps = [2**30, *((-(-W // i) - 1).bit_length() for i in range(1, 3 * W))]
        back = jnp.minimum(flushes, jnp.asarray(steps, jnp.int32)[slot])
        return (flushes - back) * W + (slot << jnp.minimum(back, 30))
