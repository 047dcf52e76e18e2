"""How an engine reads prompts: each into a row beside the slots, chunk by chunk.

    add  -->  read, once for each of `chunks`  -->  [park]  -->  row  -->  release

The thread whose turn it is calls what is here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array

from kvjax.cache.cache import Cache
from kvjax.generation import prefilling
from kvjax.generation.loops import Flat, FlatLayers
from kvjax.generation.staging import (
    needs_staging,
    room_for,
    rooms,
    settled,
    staged,
    without_room,
)
from kvjax.serve.scheduler import LONGEST, Prompt
from kvjax.serve.slots import Rows, committed, in_host, read_chunk

# Chunks that the device may be behind the host; more would only make prompts wait that come
# meanwhile, of which one may be shorter.
MOST_CHUNKS_AHEAD = 2


@dataclass
class PromptRow:
    """The row into which a prompt is read."""

    row: Cache
    tokens: int  # of the prompt that it holds
    logits: Any = None  # f32[1, V] after these, once a chunk is read
    device_shardings: Any = None  # of row and logits, while both are in host memory


class PromptReader:
    """Reads prompts into rows beside the slots.

    Args:
      model: a pytree that can be called, as `kvjax.generation.Model`.
      rows: makes the rows.
      chunk: tokens of a chunk; None reads prompts whole, and so do policies that select from a
        prompt by all of its queries.
    """

    def __init__(self, model: Any, rows: Rows, *, chunk: int | None) -> None:
        self.chunk = LONGEST if chunk is None else chunk
        self.whole_prompts = chunk is None or rows.kind.observes
        self._model: Any = Flat.of(model)
        if prefilling.by_layer(model, rows.empty):
            self._model = FlatLayers.of(model)
        on_cpu = jax.default_backend() == "cpu"
        _, *smaller = prefilling.CPU_CHUNKS if on_cpu else prefilling.GPU_CHUNKS
        self._chunk_sizes = (self.chunk, *(size for size in smaller if size < self.chunk))
        # Chunks of codes are held as they came until the prompt ends.
        self._stages = not self.whole_prompts and needs_staging(rows.empty)
        self._rows = rows
        self._capacity = rows.empty.spec.capacity
        self._reading = dict[Prompt, PromptRow]()
        self._logits_in_flight = deque[Array]()  # of the last chunks

    def chunks(self, tokens: int, start: int) -> list[int]:
        """The sizes of the chunks in which a prompt of `tokens` tokens is read from token
        `start` on.
        """
        if self.whole_prompts:
            return [prefilling.chunk_size(tokens, LONGEST)]
        if start % self.chunk:
            return prefilling.cut(tokens - start, self._chunk_sizes)
        return prefilling.cut(tokens, self._chunk_sizes)[start // self.chunk :]

    def with_room(self, row: Cache, tokens: int, chunks: int) -> Cache:
        """`row` for a prompt of `tokens` more tokens in so many chunks: with room to hold them as
        they came, if it keeps codes.
        """
        if not self._stages or chunks == 1:
            return row
        return self._staged(row, room_for(tokens, self._capacity))

    def add(self, prompt: Prompt, row: Cache, tokens: int) -> None:
        """Begins a prompt in a row that holds its first `tokens` tokens."""
        self._reading[prompt] = PromptRow(row, tokens)

    def read(self, prompt: Prompt, ids: np.ndarray, size: int) -> int:
        """Reads the next of the `ids` i32[T] of a prompt in a chunk of `size`; returns how many
        tokens those were.

        An exception, such as of too little memory, ends the prompt: its row is gone.
        """
        reading = self._reading[prompt]
        piece = ids[reading.tokens : reading.tokens + size]
        tokens = np.zeros((1, size), np.int32)
        tokens[0, : len(piece)] = piece
        length = np.array([len(piece)], np.int32)
        try:  # a whole prompt attends to nothing but itself
            reading.logits, reading.row = read_chunk(
                self._model, reading.row, tokens, length, first_chunk=self.whole_prompts
            )
            reading.tokens += len(piece)
            if reading.tokens == len(ids):
                reading.row = settled(reading.row)
        except Exception:
            del self._reading[prompt]
            raise
        self._logits_in_flight.append(reading.logits)
        return len(piece)

    def wait_for_chunks(self) -> None:
        """Waits until the device has few chunks to read (`MOST_CHUNKS_AHEAD`)."""
        while len(self._logits_in_flight) >= MOST_CHUNKS_AHEAD:
            jax.block_until_ready(self._logits_in_flight[0])
            self._logits_in_flight.popleft()

    def park(self, prompt: Prompt) -> None:
        """Moves the row of a prompt to host memory."""
        reading = self._reading[prompt]
        both, reading.device_shardings = in_host((reading.row, reading.logits))
        reading.row, reading.logits = both

    def row(self, prompt: Prompt) -> PromptRow:
        """The row of a prompt, on the device."""
        reading = self._reading[prompt]
        if reading.device_shardings is not None:
            both = (reading.row, reading.logits)
            reading.row, reading.logits = jax.device_put(both, reading.device_shardings)
            reading.device_shardings = None
        return reading

    def release(self, prompt: Prompt) -> None:
        """Gives back the row of a prompt, if it has one, so that the next one takes its arrays.
        A row that is parked has none on the device.
        """
        reading = self._reading.pop(prompt, None)
        if reading is not None and reading.device_shardings is None:
            self._rows.give_back(without_room(reading.row))

    def forget(self) -> None:
        """Drops all rows, which a failed step may have donated."""
        self._reading.clear()
        self._logits_in_flight.clear()

    def warm_up(self) -> Iterator[tuple[Cache, Array]]:
        """Compiles the programs of chunks, and those that make rows and their rooms. Yields a
        row and its logits for each size of a chunk; none for prompts that are read whole, whose
        programs differ by length.
        """
        length = np.ones(1, np.int32)
        for size in () if self.whole_prompts else self._chunk_sizes:
            tokens = np.zeros((1, size), np.int32)
            for room in rooms(self._capacity) if self._stages else ():
                row = self._staged(self._rows.make(), room)
                _, row = read_chunk(self._model, row, tokens, length, first_chunk=False)
                self._rows.give_back(settled(row))
            logits, row = read_chunk(
                self._model, self._rows.make(), tokens, length, first_chunk=False
            )
            yield row, logits
            self._rows.give_back(row)
            self._rows.give_back(self._rows.make())

    def _staged(self, row: Cache, room: int) -> Cache:
        """A row that holds the chunks of a prompt as they came, until the last one."""
        return committed(staged(row, room))
