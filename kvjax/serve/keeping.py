"""Which rows an engine keeps after their requests, and how prompts begin with them.

    running  --keep_slot-->  held, its tokens not known yet  --settle-->  found by prompts

A row is copied from its slot when its request leaves, which may be before the host has seen the
last tokens. It is held within the bound in bytes from then on. Once its tokens are known, and
known to be finite, `KeptRows` lets prompts find it. The thread whose turn it is calls what is
here; any thread may call `known_tokens`, `save` and the counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax.cache.cache import Cache
from kvjax.memory import making_on, places_of
from kvjax.serve.beginnings import KeptRow, KeptRows, bytes_of, capacities_of, on_device
from kvjax.serve.requests import Request
from kvjax.serve.slots import Rows, Slots, committed, copy_of_row, copy_of_slot, row_from


@dataclass
class _Leaving:
    """A held row whose tokens are not known yet, or not known to be finite."""

    row: KeptRow
    request: Request
    prompt_only: bool


class Keeper:
    """Keeps rows of an engine in at most `limit` bytes, and `host_limit` bytes more in host
    memory; with limit=0 none.

    Args:
      cuts: whether a row can be cut to its first tokens, so that it serves prompts that have
        only these.
    """

    def __init__(
        self, slots: Slots, rows: Rows, *, limit: int, host_limit: int, cuts: bool
    ) -> None:
        self.kept = KeptRows(limit, host_limit, cuts=cuts)
        self.keeps = limit > 0
        self.cuts = cuts
        self._slots = slots
        self._rows = rows
        self._spec = rows.empty.spec
        capacities = capacities_of(self._spec.capacity) if self.keeps else []
        self.sizes = {capacity: bytes_of(self._shapes(capacity)) for capacity in capacities}
        self._leaving = list[_Leaving]()

    # ------------------------------------------------------------------ rows that come

    def keep_slot(self, slot: int, request: Request) -> None:
        """Keeps the row that a request leaves in a slot."""
        cut_short = request.reason == "cancelled" and not self.cuts
        unproven = request.done and not request.tokens  # it may not be finite
        if not self.keeps or request.reason == "error" or cut_short or unproven:
            return
        tokens = len(request.known) if request.done else request.size
        capacity = self._capacity(tokens)
        copy = partial(
            copy_of_slot,
            self._slots.cache,
            self._slots.at(slot),
            np.array([tokens], np.int32),
            spec=self._spec,
            capacity=capacity,
            cuts=self.cuts,
        )
        self._hold(copy, capacity, request, prompt_only=False)

    def keep_prompt(self, row: Cache, request: Request) -> None:
        """Keeps the row of a prompt as it was read, if rows cannot be cut: that of its request
        will serve no prompt that goes on otherwise than by its answer.
        """
        if self.keeps and not self.cuts:
            capacity = self._capacity(len(request.prompt))
            copy = partial(copy_of_row, row, capacity=capacity)
            self._hold(copy, capacity, request, prompt_only=True)

    def settle(self, in_flight: Collection[Request]) -> None:
        """Lets prompts find the held rows whose tokens are known by now. The device draws tokens
        of requests `in_flight` that nobody has seen.
        """
        waiting = list[_Leaving]()
        for one in self._leaving:
            request = one.request
            # The first token of an answer proves its prompt; the end of a request all its row.
            proven = one.prompt_only and bool(request.tokens)
            ended = request.done and request not in in_flight
            if not proven and not ended:
                waiting.append(one)
            elif not request.tokens or not (request.finite or proven):
                self.kept.drop(one.row)
            else:
                self.kept.settle(one.row, request.prompt if one.prompt_only else request.known)
        self._leaving = waiting

    def forget_leaving(self) -> None:
        """Drops the rows whose requests a failed step has ended."""
        for one in self._leaving:
            self.kept.drop(one.row)
        self._leaving = []

    def _hold(
        self, copy: Callable[[], Cache], capacity: int, request: Request, *, prompt_only: bool
    ) -> None:
        """Holds a row that `copy` makes, if there is room."""
        try:
            row = self.kept.hold(copy, self.sizes[capacity])
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return  # the request itself has its tokens
        if row is not None:
            self._leaving.append(_Leaving(row, request, prompt_only))

    # ------------------------------------------------------------------ prompts that begin

    def known_tokens(self, prompt: np.ndarray) -> int:
        """How many first tokens of a prompt a kept row has."""
        return self.kept.find(prompt)[1]

    def beginning(self, row: KeptRow, tokens: int) -> Cache:
        """A row of an engine with the first tokens of a kept one."""
        self.kept.use(row)
        count = np.array([tokens], np.int32)
        capacity = self._spec.capacity
        return committed(row_from(on_device(row), count, capacity=capacity, cuts=self.cuts))

    def warm_up(self) -> None:
        """Compiles the copies of rows, of each capacity that they have."""
        nothing = np.zeros(1, np.int32)
        for capacity in self.sizes:
            for slot in self._slots.one_of_each_size():
                row = copy_of_slot(
                    self._slots.cache,
                    self._slots.at(slot),
                    nothing,
                    spec=self._spec,
                    capacity=capacity,
                    cuts=self.cuts,
                )
            if not self.cuts:
                row = copy_of_row(self._rows.make(), capacity=capacity)
            row_from(row, nothing, capacity=self._spec.capacity, cuts=self.cuts)

    # ------------------------------------------------------------------ on disk

    def save(self, directory: str | Path, model: Any) -> int:
        from kvjax.serve import kept_files  # which imports orbax

        self._require("save_prefixes")
        return kept_files.save(directory, self.kept.copies(), model)

    def restore(
        self,
        directory: str | Path,
        model: Any,
        turn: Callable[[], AbstractContextManager[None]],
    ) -> int:
        """Keeps saved rows, and returns how many; takes its `turn` for each, not for reading."""
        from kvjax.serve import kept_files  # which imports orbax

        self._require("restore_prefixes")
        restored = list[KeptRow]()
        for tokens, capacity, read in kept_files.saved(directory, model):
            size = self.sizes.get(capacity)
            if size is None or size > self.kept.limit:
                continue  # of an engine with larger slots, or more room
            with making_on(places_of(self._slots.cache)):
                cache = committed(read(self._shapes(capacity)))
            with turn():
                restored.append(self.kept.add(cache, size, tokens))
        return sum(not row.dropped for row in restored)

    def _require(self, verb: str) -> None:
        if not self.keeps:
            raise ValueError(
                f"{verb} is for an engine that keeps rows; make it with prefix_bytes=..."
            )

    # ------------------------------------------------------------------ sizes

    def _capacity(self, tokens: int) -> int:
        """The capacity of a kept row of so many tokens."""
        return next(capacity for capacity in self.sizes if capacity >= tokens)

    def _shapes(self, capacity: int) -> Any:
        return jax.eval_shape(lambda row: copy_of_row(row, capacity=capacity), self._rows.empty)


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
