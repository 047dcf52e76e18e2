"""Many requests from one batch of rows: each is read into a row of its own, decodes beside the
others, and leaves.

An `Engine` has a cache of `slots` rows. A step reads chunks of prompts into a spare row, puts
rows that are read into free slots (`kvjax.insert`), and then decodes a block of tokens in all
slots by one call of `decode_loop`. Limits, stop tokens, settings of sampling and the counter of
draws are a request's own, so **its tokens are those that it gets alone**, whatever comes, goes
or fails beside it. A slot that is free holds an empty row, which costs nothing to attend to.
After `warm_up` no program is compiled, except for prompts of policies that read them whole.

The device never waits for the host: a step asks for a block, and then looks at the tokens of
the block before. The slot of a request that reaches its limit is filled at once, as its end is
known. One that draws a stop token is idle until the host has seen it, which is one block later.

A prompt is read once for all answers to it. One that begins like a row that is running starts
from a copy of that row's first tokens, in whole chunks, if the policies can be truncated.

With `prefixes`, what prompts have in common is also stored once (`kvjax.serve.prefixes`): all
of a prompt with several answers, or a system prompt with which several requests begin. Tokens
are then those of the request alone but for rounding, since attention sums in two parts; so are
they with `small_slots`, in which a row has other parts.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.cache.cache import Cache
from kvjax.generation import prefilling
from kvjax.generation.callables import as_model
from kvjax.generation.loops import PAD, ROOM, Flat, FlatLayers, decode_loop
from kvjax.generation.processors import Processors, check_processors
from kvjax.generation.prompt_inputs import (
    check_model_cache,
    check_request,
    pad_prompt,
    stop_array,
)
from kvjax.generation.sampling import Draws, Sampling, rows_of_draws, stack_draws
from kvjax.generation.streaming import interrupts_wait
from kvjax.memory import commit_together, on_host, zeros_like
from kvjax.serve import places
from kvjax.serve.places import LONGEST, Slot
from kvjax.serve.prefixes import prefixed_like
from kvjax.serve.requests import (
    NOT_FINITE,
    STOPS,
    EngineBusy,
    Request,
    Stats,
    check_own,
    stop_ids,
    token_ids,
)
from kvjax.spec import require_int


@dataclasses.dataclass
class _Block:
    """Decode steps that the device was asked for, and whose tokens the host has not seen."""

    rows: list[tuple[int, Request]]  # by slot
    tokens: Array  # i32[slots, ROOM]
    steps: Array  # i32[]
    bad: Array  # bool[2, slots], rows without a best token, before and after


class Engine:
    """Serves requests from a cache of `slots` rows.

    >>> import kvjax
    >>> checkpoint = kvjax.models.load(kvjax.models.shipped())
    >>> engine = kvjax.Engine(checkpoint, cache="fier:budget=64", slots=4, capacity=512)
    >>> text = "The pass key is 71432. Remember it.\\nWhat is the pass key? The pass key is "
    >>> requests = [engine.submit(text, max_new_tokens=n)[0] for n in (2, 5)]
    >>> engine.run()
    >>> [request.text for request in requests]
    ['71', '71432']

    Args:
      model: a `kvjax.models.Checkpoint`, or a model as `kvjax.generation.Model` describes it.
      cache: for a checkpoint a policy or its text, such as "fier:budget=256"; for another model
        an empty cache of `kvjax.init`, whose rows are the slots.
      slots, capacity: rows, and tokens that each can hold; only with a checkpoint. small_slots:
      more slots of smaller capacity, how many of each, such as {8192: 12}: a short request then
      takes less
        memory than the longest. Logits then differ by rounding from one capacity to another. No
        prompt is then read before a slot for it is free.
      block: tokens of each row between two looks at waiting requests. A larger block is faster,
        a smaller one reads prompts and frees slots sooner.
      chunk: tokens of a prompt that are read at once. Larger ones are faster on a GPU, and rows
        that decode wait for each. None reads prompts whole, so that each attends to itself
        exactly whatever its cache stores.
      prompt_tokens: most tokens of prompts that are read between two blocks while rows decode;
        by default one chunk. More fill slots sooner, and let the rows that decode wait longer.
      max_waiting: requests that may wait for a slot. prefixes, prefix_tokens: prefixes that are
      stored once beside the slots, and the most tokens of each. A prompt may
        then be longer than a slot by what its prefix holds.
      sharers: most requests that use one stored prefix; more of them store it again. A step
        computes for so many requests of each prefix, used or not, so give the number of answers
        to a prompt if it is known. None: all.
      park: prompts that are read ahead while all slots are in use, and wait in host memory.
      stop_tokens: of requests that name none; by default those of the checkpoint, after chat
        messages those of chats.
      processors: rules that change the logits of all requests; those of the checkpoint by
        default.

    Raises:
      ValueError: a cache that holds tokens, or settings that do not fit together.
    """

    def __init__(
        self,
        model: Any,
        cache: Any = "full",
        *,
        slots: int | None = None,
        capacity: int | None = None,
        small_slots: Mapping[int, int] | None = None,
        block: int = 16,
        chunk: int | None = 512,
        prompt_tokens: int | None = None,
        max_waiting: int = 256,
        prefixes: int = 0,
        prefix_tokens: int = 0,
        sharers: int | None = None,
        park: int = 0,
        stop_tokens: int | Iterable[int] | None = None,
        processors: Processors | None = None,
    ) -> None:
        self.tokenizer: Any = None
        self._checkpoint: Any = None
        if hasattr(model, "init_cache") and hasattr(model, "encode"):
            if slots is None or capacity is None:
                raise ValueError(
                    "Engine(checkpoint) needs slots=..., the rows of its cache, and capacity=... of a row"
                )
            made = model.init_cache(
                cache, batch=require_int("slots", slots, at_least=1), capacity=capacity
            )
            processors = model.processors if processors is None else processors
            self.tokenizer, self._checkpoint = model.tokenizer, model
            model, cache = model.model, made
        elif slots is not None or capacity is not None:
            raise ValueError(
                "slots and capacity are for a checkpoint; make the cache of a model with kvjax.init"
            )
        check_model_cache(model, cache)
        model = as_model(model)
        if np.any(on_host(cache.length)):
            raise ValueError(
                "Engine takes an empty cache, whose rows are its slots; this one holds tokens"
            )
        self.block = min(require_int("block", block, at_least=1), ROOM)
        self.chunk = LONGEST if chunk is None else require_int("chunk", chunk, at_least=2)
        most = self.chunk if prompt_tokens is None else prompt_tokens
        self.prompt_tokens = require_int("prompt_tokens", most, at_least=1)
        self.max_waiting = require_int("max_waiting", max_waiting, at_least=1)
        self.park, self._parked = require_int("park", park, at_least=0), deque[places.Reading]()
        rows, self._places = cache, None
        if require_int("prefixes", prefixes, at_least=0):
            tokens = require_int("prefix_tokens", prefix_tokens, at_least=1)
            by: Any = {"prefixes": prefixes, "sharers": sharers}
            rows, cache = places.long_rows(cache, tokens), prefixed_like(cache, tokens, **by)
            self._places = places.Places.of(cache, prefixes, sharers)
        elif prefix_tokens or sharers is not None:
            raise ValueError(
                "prefix_tokens and sharers are for stored prefixes; say how many there are: prefixes=..."
            )
        if small_slots:
            cache = places.with_small_slots(cache, small_slots)
        self.slots, self._capacities = cache.spec.batch, places.capacities(cache)
        self._stop_tokens = None if stop_tokens is None else stop_ids(stop_array(stop_tokens))
        self._processors = check_processors(Processors() if processors is None else processors)
        self._whole = model
        self._model: prefilling.Model = Flat.of(model)
        self._anchor = prefilling._committed(model)
        _, self._cache = commit_together((self._anchor, cache))
        self._logits: Any = None  # f32[slots, V], once the model has told V
        self._active: Any = (
            None  # bool[slots] on the device, rows that have drawn no stop token
        )
        layers = tuple((layer.policy, layer.spec, layer.placement) for layer in rows.layers)
        self._kind = layers, cache.rotated_for is not None
        self._spare: Any = None  # a row whose arrays the next one takes
        # An empty row without its arrays, to check requests by.
        self._empty = jax.tree.map(
            zeros_like, jax.eval_shape(partial(places.empty_row, *self._kind))
        )
        self._reader: Any = (
            FlatLayers.of(model) if prefilling.by_layer(model, self._empty) else self._model
        )
        self._first = partial(places.first_tokens, spec=self._empty.spec)
        smaller = (
            prefilling.CPU_CHUNKS if jax.default_backend() == "cpu" else prefilling.GPU_CHUNKS
        )[1:]
        self._sizes = (self.chunk, *(size for size in smaller if size < self.chunk))
        self._whole_prompts = chunk is None or any(
            layer.policy.observes for layer in rows.layers
        )
        # A row that is rotated for its final length has other keys than one of another length.
        self._can_share = (
            not self._whole_prompts
            and cache.rotated_for is None
            and places.can_share(self._first, cache)
        )
        # By the smallest capacity of slots in which they fit: groups of requests for one
        # prompt, in order of arrival.
        self._waiting = {
            most: deque[tuple[int, list[Request]]]() for most in sorted(set(self._capacities))
        }
        self._arrivals, self._unseated = (
            itertools.count(),
            0,
        )  # live requests that no slot holds
        self._reading: places.Reading | None = None
        self._seated: list[Request | None] = [None] * self.slots
        self._dirty: set[int] = set()  # slots that hold tokens of a request that has left
        self._blocks: deque[_Block] = deque()
        self._news: dict[Request, None] = {}
        self._drawn: tuple[list[Any], Draws | None] = [], None  # of the last block, by slot
        self._failed: Exception | None = None
        self._lock = threading.RLock()
        self._prompt_tokens = self._shared_tokens = self._new_tokens = self._steps = (
            self._used
        ) = 0

    # -------------------------------------------------------------------------------------------------------- requests

    def submit(
        self,
        prompt: Any,
        *,
        max_new_tokens: int = 128,
        n: int = 1,
        sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
        key: Array | None = None,
        stop_tokens: int | Iterable[int] | None = None,
    ) -> list[Request]:
        """Adds n requests for answers to one prompt, which is read once; any thread may call
        it.

        Args:
          prompt: token ids, or with a checkpoint a text or chat messages.
          max_new_tokens: of each answer. sampling, key: how tokens are drawn, as in
          `kvjax.generate` with a batch of n rows of this prompt. stop_tokens: at most 16 ids
          that end the answer.

        Raises:
          EngineBusy: `max_waiting` requests are waiting.
          ValueError: a request that can never be served.
          RuntimeError: a step has failed, and with it the arrays of the engine are lost.
        """
        n = require_int("submit(n=...)", n, at_least=1)
        if n > self.max_waiting:
            raise ValueError(
                f"submit(n={n}) asks for more answers than may wait: max_waiting={self.max_waiting}"
            )
        checkpoint, stop = (
            self._checkpoint,
            self._stop_tokens if stop_tokens is None else stop_tokens,
        )
        chat = (
            isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping)
        )
        if checkpoint is not None and (chat or isinstance(prompt, str)):
            prompt = checkpoint.encode(prompt)
        if stop is None:
            stop = (
                ()
                if checkpoint is None
                else checkpoint.chat_stop_tokens
                if chat
                else checkpoint.stop_tokens
            )
        tokens, lengths = pad_prompt(token_ids(prompt), rows=1)
        limits: Any = {"max_new_tokens": max_new_tokens, "stop_tokens": stop}
        stops = stop_ids(check_request(self._whole, self._empty, tokens, lengths, **limits))
        if self._places:
            self._places.check_room(len(tokens[0]), max_new_tokens, self._cache.spec.capacity)
        draws = rows_of_draws(Draws.of(sampling, key, n), n)
        made = [Request(tokens[0], max_new_tokens, draw, stops, self) for draw in draws]
        with self._lock:
            if self._failed is not None:
                raise RuntimeError(
                    "a step of this engine has failed; make a new one"
                ) from self._failed
            if self._unseated + n > self.max_waiting:
                raise EngineBusy(
                    f"{self._unseated} requests wait and the engine takes {self.max_waiting}; run `step` until fewer "
                    "wait, and submit again"
                )
            self._unseated += n
            queue = next(queue for most, queue in self._waiting.items() if most >= made[0].size)
            queue.append((next(self._arrivals), made))
        return made

    def cancel(self, request: Request) -> None:
        """Ends a request; its slot is free at the next step. A request that is done stays as it
        is.
        """
        with self._lock:
            check_own("cancel", self, request)
            if not request.done:
                self._end(request, "cancelled")

    def stats(self) -> Stats:
        with self._lock:
            return Stats(
                slots=self.slots,
                decoding=sum(request is not None for request in self._seated),
                waiting=self._unseated,
                prompt_tokens=self._prompt_tokens,
                shared_tokens=self._shared_tokens,
                parked=len(self._parked),
                prefixes=sum(map(bool, self._places.users)) if self._places else 0,
                new_tokens=self._new_tokens,
                steps=self._steps,
                fill=self._used / max(self._steps * self.slots, 1),
            )

    def row(self, request: Request) -> Cache:
        """A copy of the row of a request that is decoding, as a cache of batch 1: its prompt
        and its tokens so far.
        """
        with self._lock:
            check_own("row", self, request)
            if request not in self._seated:
                raise ValueError(
                    f"the request is {request.state}, so no slot holds its tokens; ask while it decodes"
                )
            slot = self._seated.index(request)
            while self._blocks:  # so that the row and `tokens` are alike
                self._receive()
            return places.row_of(self._cache, Slot.of(self._cache, slot), self._empty.spec)

    # ----------------------------------------------------------------------------------------------------------- steps

    def run(self, requests: Sequence[Request] | None = None) -> None:
        """Steps until these requests are done, or all."""
        while (
            any(not request.done for request in requests)
            if requests is not None
            else self._has_work()
        ):
            self.step()

    def step(self) -> list[Request]:
        """Reads prompts, fills free slots, asks for a block of tokens and waits for those of
        the block before; returns the requests with new tokens or an end. Nothing to do returns
        none.

        Other threads may submit and cancel while it waits. An exception ends all requests
        (`Request.error`).
        """
        try:
            with interrupts_wait(), self._lock:  # arrays that are donated would be gone
                for slot, request in enumerate(self._seated):
                    if request is not None and request.asked == request.max_new_tokens:
                        self._leave(slot)
                # Rules that change logits count the tokens of the block before.
                late = (
                    1 if self._failed is None and self._send() and self._processors.idle else 0
                )
            while True:
                with self._lock:
                    if len(self._blocks) <= late:
                        news, self._news = list(self._news), {}
                        return news
                    block = self._blocks[0]
                jax.block_until_ready((block.tokens, block.steps, block.bad))
                with interrupts_wait(), self._lock:
                    if self._blocks and self._blocks[0] is block:
                        self._receive()
        except Exception as error:
            with self._lock:
                self._fail(error)
            raise

    def warm_up(self, *, draws: bool = True) -> None:
        """Compiles the programs that `step` runs: the chunks of a prompt, the move into a slot,
        and decoding, also with `draws`. Call it before the first request."""
        with self._lock:
            if self._has_work():
                raise ValueError(
                    "warm_up takes an idle engine: it writes to its slots; call it before any request"
                )
            slots = {
                capacity: slot for slot, capacity in enumerate(self._capacities)
            }.values()  # one of each
            for size in self._sizes if not self._whole_prompts else ():
                tokens, length = np.zeros((1, size), np.int32), np.ones(1, np.int32)
                logits, row = _read_chunk(
                    self._reader, self._new_row(), tokens, length, first_chunk=False
                )
                self._spare = row
                for slot in slots:
                    for store in (False, True) if self._places else (False,):
                        self._seat(slot, row, logits, places.Seat(0 if store else -1, 0, store))
                    self._dirty.add(slot)
                self._spare = self._new_row()
            self._clean()
            if self._logits is not None:
                for drawn in (None, stack_draws([None] * self.slots)) if draws else (None,):
                    self._run_block(drawn, np.zeros(self.slots, np.int32))
                for slot in slots if self._can_share else ():
                    self._first(self._cache, Slot.of(self._cache, slot), np.zeros(1, np.int32))

    def _has_work(self) -> bool:
        return any(
            (*self._waiting.values(), self._parked, self._blocks, self._reading, *self._seated)
        )

    def _being_read(self) -> list[list[Request]]:
        return [
            reading.requests
            for reading in (*self._parked, self._reading)
            if reading is not None
        ]

    def _fill_slots(self) -> None:
        left = self.prompt_tokens
        while left > 0:
            self._seat_those_read()
            if self._reading is None and not self._start_reading():
                return
            reading = self._reading
            assert reading is not None
            if not reading.chunks and len(self._parked) >= self.park:
                return  # it waits for a slot
            if not reading.chunks:
                self._parked.append(places.parked(reading))
                self._reading = None
                continue
            try:
                left -= self._read(reading)
            except Exception as error:  # such as too little memory: the others go on
                self._reading = None
                self._end_all(reading.requests, error)
                continue
            if not any(self._seated):
                left = max(left, 1)  # nobody waits for this prompt
        self._seat_those_read()

    def _start_reading(self) -> bool:
        while group := self._next_waiting():
            prompt = group[0].prompt
            for request in group:
                request.state = "reading"
            try:
                cache, start = self._beginning(prompt)
            except Exception as error:
                self._end_all(group, error)
                continue
            if cache.rotated_for is not None:
                cache = self._whole.rotate_for(
                    cache, jnp.array([len(prompt) + group[0].max_new_tokens], jnp.int32)
                )
            self._shared_tokens += start
            chunks = [prefilling.chunk_size(len(prompt), LONGEST)]
            if not self._whole_prompts:
                chunks = prefilling.cut(len(prompt), self._sizes)[start // self.chunk :]
            self._reading = places.Reading(group, cache, chunks, start)
            return True
        return False

    def _next_waiting(self) -> list[Request]:
        """Takes the first requests out of the queues for which a slot is free, and leaves those
        slots alone for which others have waited longer. If all slots are alike, a prompt is
        read ahead of a free one."""
        for queue in self._waiting.values():
            while queue and all(request.done for request in queue[0][1]):
                queue.popleft()
        free = [
            capacity
            for one, capacity in zip(self._seated, self._capacities, strict=True)
            if one is None
        ]
        for fit in sorted(
            (fit for fit, queue in self._waiting.items() if queue),
            key=lambda n: self._waiting[n][0][0],
        ):
            if fit == LONGEST or any(capacity >= fit for capacity in free):
                return [
                    request for request in self._waiting[fit].popleft()[1] if not request.done
                ]
            free = [capacity for capacity in free if capacity < fit]
        return []

    def _beginning(self, prompt: np.ndarray) -> tuple[Cache, int]:
        """A row that holds the first tokens of the prompt, and how many: those of a running row
        in whole chunks, so that the rest is read in the chunks in which the whole would be."""
        best, source, known = 0, -1, True
        for slot, request in enumerate(self._seated if self._can_share else ()):
            if request is not None:
                same = (
                    min(places.same_tokens(request.prompt, prompt), len(prompt) - 1)
                    // self.chunk
                    * self.chunk
                )
                best, source, known = max(
                    (best, source, known), (same, slot, bool(request.tokens))
                )
        if best == 0 or not (known or places.all_finite(on_host(self._logits)[source])):
            return self._new_row(), 0
        return self._first(
            self._cache, Slot.of(self._cache, source), np.array([best], np.int32)
        ), best

    def _new_row(self) -> Cache:
        row, self._spare = self._spare, None
        made = (
            places.empty_row(*self._kind) if row is None else places.emptied(*self._kind, row)
        )
        return commit_together((self._anchor, made))[1]

    def _drop_row(self, reading: places.Reading) -> None:
        """Keeps the arrays of a row that is not needed any more, so that the rows of all
        prompts take those of one.
        """
        if reading.homes is None:
            self._spare = reading.cache

    def _read(self, reading: places.Reading) -> int:
        """Reads one chunk of a prompt, and returns its size."""
        size, alone = (
            reading.chunks.pop(0),
            self._whole_prompts,
        )  # a whole prompt attends to nothing but itself
        prompt = reading.requests[0].prompt[reading.start : reading.start + size]
        tokens = np.zeros((1, size), np.int32)
        tokens[0, : len(prompt)] = prompt
        length = np.array([len(prompt)], np.int32)
        reading.logits, reading.cache = _read_chunk(
            self._reader, reading.cache, tokens, length, first_chunk=alone
        )
        reading.start += len(prompt)
        self._prompt_tokens += len(prompt)
        return size

    def _seat_those_read(self) -> None:
        """Puts the rows that are read into free slots, one for each of their requests, in order
        of arrival.
        """
        while self._parked and self._seat_read(self._parked[0]):
            self._drop_row(self._parked.popleft())
        reading = self._reading
        unwanted = reading is not None and all(request.done for request in reading.requests)
        if reading and (
            unwanted or (not self._parked and not reading.chunks and self._seat_read(reading))
        ):
            self._drop_row(reading)
            self._reading = None

    def _seat_read(self, reading: places.Reading) -> bool:
        """Puts a row into free slots; true if none of its requests is left."""
        reading.requests = left = [request for request in reading.requests if not request.done]
        free = [
            i
            for i, one in enumerate(self._seated)
            if one is None and left and self._capacities[i] >= left[0].size
        ]
        for slot in sorted(free, key=self._capacities.__getitem__):  # from small to large
            request = left[0]
            if self._places and not (reading.seat and self._places.takes(reading.seat)):
                others = [other.prompt for other in self._others(request)]
                room = self._cache.spec.capacity - request.max_new_tokens
                reading.seat = self._places.find(request.prompt, len(left), others, room)
                if reading.seat is None:
                    break  # it waits for a prefix to be free
                if reading.seat.store and not places.all_finite(
                    reading.logits
                ):  # it would spoil its sharers
                    self._end_all(left, FloatingPointError(NOT_FINITE))
                    return True
            if reading.homes is not None:
                homes, reading.homes = reading.homes, None
                reading.cache, reading.logits = jax.device_put(
                    (reading.cache, reading.logits), homes
                )
            self._seat(slot, reading.cache, reading.logits, reading.seat or places.Seat())
            if self._places and reading.seat:
                self._places.use(reading.seat, slot, request.prompt)
                reading.seat = dataclasses.replace(reading.seat, store=False)
            self._seated[slot], request.state = left.pop(0), "decoding"
            self._unseated -= 1
            self._dirty.discard(slot)
            if not left:
                break
        return not left

    def _others(self, request: Request) -> Iterator[Request]:
        """The requests with which another may share the beginning of its prompt."""
        yield from (one for one in self._seated if one is not None)
        near = (
            group
            for queue in self._waiting.values()
            for _, group in itertools.islice(queue, 2 * self.slots)
        )
        for group in (*self._being_read(), *near):
            yield from (one for one in group[:1] if one is not request)

    def _seat(self, slot: int, row: Any, logits: Any, at: places.Seat) -> None:
        if self._logits is None:
            self._logits = jax.device_put(
                np.zeros((self.slots, logits.shape[1]), logits.dtype), logits.sharding
            )
            active = jax.device_put(
                np.zeros(self.slots, bool), places.replicated(logits.sharding)
            )
            self._cache, self._logits, self._active = commit_together(
                (self._cache, self._logits, active)
            )
        place = (np.int32(at.prefix), np.int32(at.shared)) if self._places else None
        state = (
            self._cache,
            self._logits,
            self._active,
            row,
            logits,
            Slot.of(self._cache, slot),
            place,
        )
        self._cache, self._logits, self._active = places.put(*state, store=at.store)

    def _clean(self) -> None:
        """Empties the slots that requests have left."""
        for slot in sorted(self._dirty):
            place = (np.int32(-1), np.int32(0)) if self._places else None
            state = self._cache, self._logits, self._active, Slot.of(self._cache, slot)
            self._cache, self._logits, self._active = places.clear(*self._kind, *state, place)
        self._dirty.clear()

    def _send(self) -> bool:
        """Fills slots and asks the device for a block of tokens; false if no row decodes."""
        self._fill_slots()
        self._clean()
        rows = [
            (slot, request) for slot, request in enumerate(self._seated) if request is not None
        ]
        if not rows:
            self._drawn = [], None
            return False
        left = {slot: request.max_new_tokens - request.asked for slot, request in rows}
        steps, reading = self.block, self._reading
        if self._parked or (
            self._unseated if reading is None else not reading.chunks
        ):  # it waits for a slot
            steps = min(steps, max(min(left.values()), self.block // 4))
        limit = np.zeros(self.slots, np.int32)
        for slot, tokens in left.items():
            limit[slot] = min(steps, tokens)
        draws = [None if request is None else request.draws for request in self._seated]
        if len(draws) != len(self._drawn[0]) or any(
            a is not b for a, b in zip(draws, self._drawn[0], strict=True)
        ):
            self._drawn = (
                draws,
                stack_draws(draws) if any(draw is not None for draw in draws) else None,
            )
        found = self._run_block(self._drawn[1], limit)
        for part in found:
            part.copy_to_host_async()
        self._blocks.append(_Block(rows, *found))
        for slot, request in rows:
            request.asked += int(limit[slot])
        return True

    def _run_block(self, draws: Draws | None, limit: np.ndarray) -> tuple[Array, Array, Array]:
        """The tokens of a call of the loop, how many, and its rows without a best token."""
        first, stops = (
            np.zeros(self.slots, np.int32),
            np.full((self.slots, STOPS), PAD, np.int32),
        )
        for slot, request in enumerate(self._seated):
            if request is not None:
                first[slot], stops[slot, : len(request.stop)] = request.asked, request.stop
        state = self._model, self._cache, self._logits, self._active, draws
        done, bad = _run_loop(*state, first, limit, stops, self._rules(), measure=False)
        self._cache, self._logits = done.cache, done.logits
        self._active = jax.device_put(done.active, self._active.sharding)
        return done.tokens, done.step, bad

    def _receive(self) -> None:
        """Notes the tokens of the block that was asked for first."""
        block = self._blocks[0]
        tokens, steps, bad = jax.tree.map(on_host, (block.tokens, block.steps, block.bad))
        self._blocks.popleft()
        self._steps += int(steps)
        for slot, request in block.rows:
            new = tokens[slot][tokens[slot] != PAD]
            self._used += len(new)
            if request.done:  # since it was asked for
                continue
            self._news[request] = None
            if bad[0][slot]:
                self._end(request, "error", FloatingPointError(NOT_FINITE))
                continue
            request.tokens += new.tolist()
            self._new_tokens += len(new)
            if np.isin(new, request.stop).any():
                self._end(request, "stop")
            elif len(request.tokens) >= request.max_new_tokens:
                self._end(request, "length")
            elif bad[1][slot]:
                self._end(request, "error", FloatingPointError(NOT_FINITE))

    def _rules(self) -> Any:
        """The rules that change logits, and the tokens of all slots that they count; None if
        there are none.
        """
        if self._processors.idle:
            return None
        known = [
            [] if one is None else [*one.prompt.tolist(), *one.tokens] for one in self._seated
        ]
        lengths = np.array([len(row) for row in known])
        tokens = np.zeros((self.slots, max(1, *lengths)), np.int32)
        for row, own in zip(tokens, known, strict=True):
            row[: len(own)] = own
        sizes = {"capacity": self._empty.spec.capacity, "vocabulary": self._logits.shape[1]}
        return self._processors.start(tokens, lengths, **sizes)

    def _end(self, request: Request, reason: str, error: Exception | None = None) -> None:
        self._unseated -= request.state != "decoding"
        request.state, request.reason, request.error = "done", reason, error
        self._news[request] = None
        if request in self._seated:
            self._leave(self._seated.index(request))

    def _end_all(self, requests: Iterable[Request], error: Exception) -> None:
        for request in [one for one in requests if not one.done]:
            self._end(request, "error", error)

    def _leave(self, slot: int) -> None:
        self._seated[slot] = None
        if self._places:
            self._places.leave(slot)
        self._dirty.add(slot)

    def _fail(self, error: Exception) -> None:
        """Ends all requests: the arrays that a failed call was given are gone."""
        self._failed = error
        running = [
            [request for request in self._seated if request is not None],
            *self._being_read(),
        ]
        running += [group for queue in self._waiting.values() for _, group in queue]
        running += [[request for _, request in block.rows] for block in self._blocks]
        self._end_all([one for group in running for one in group], error)
        queues: list[Any] = [*self._waiting.values(), self._parked, self._blocks, self._dirty]
        for queue in queues:
            queue.clear()
        self._reading = None


_read_chunk, _run_loop = (
    prefilling.on_auto_axes(prefilling._read),
    prefilling.on_auto_axes(decode_loop),
)
