"""Which prompt is read next, and which request gets which slot: the decisions of an engine.

    waiting  --Begin-->  reading  --Assign-->  running  --end-->  done

A request waits in a queue until its prompt begins to be read, runs once a slot holds its row,
and may end at any moment. Nothing here knows arrays: an `Engine` asks for one piece of work
after another (`Scheduler.schedule`), does each on the device, and then lets the rows decode.
A request is in its next stage as soon as `schedule` returns a `Begin` or an `Assign`, before
the device has done it; `put_back` lets it wait again.

How prompts share the time of the device:

- One step reads at most `prompt_tokens` tokens, or one chunk if that is more.
- Prompts are read into up to `readers` rows beside the slots. The *first row* is for prompts in
  the order in which they came: the one that has waited longest gets it as soon as it is free.
- The other rows are for short prompts, which may overtake it while slots are free: the shortest
  that waits begins if it is at most half as long as what each prompt that is read has left.
  So up to `readers` prompts, each much shorter than the one before, are read at once.
- Chunks go by turns to the prompt with the least left and to the one in the first row. So a
  short prompt waits for a few chunks of a long one and not for all of it, and a long one gets
  every other chunk however many short ones come.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

LONGEST = 2**30  # tokens of a chunk or a slot without a limit


class Stage(enum.StrEnum):
    """Where a request is in its life."""

    WAITING = "waiting"  # in the queue
    READING = "reading"  # its prompt is being read, or is read and has no slot yet
    RUNNING = "running"  # decodes in a slot, or has left it before its last tokens are seen
    DONE = "done"


class Scheduled(Hashable, Protocol):
    """A request, as far as the scheduler knows it."""

    state: Stage


@dataclass(eq=False)
class Prompt:
    """A prompt, which is read once for all requests that want an answer to it."""

    requests: tuple[Scheduled, ...]  # all that want an answer, also those that have ended
    without_slot: list[Scheduled]  # those of them that still need a slot
    tokens: int  # to read, by what is known when it arrives
    size: int  # tokens for which each request needs room in a slot
    arrival: int = 0
    chunks: deque[int] | None = None  # sizes that are left to read; None before it begins

    @property
    def left(self) -> int:
        """Tokens that are left to read."""
        return self.tokens if self.chunks is None else sum(self.chunks)

    @property
    def is_read(self) -> bool:
        return self.chunks is not None and not self.chunks


@dataclass(frozen=True)
class Begin:
    """Make a row for a prompt, and tell by `Scheduler.begin` in which chunks it is read."""

    prompt: Prompt


@dataclass(frozen=True)
class Read:
    """Read the next chunk of a prompt."""

    prompt: Prompt
    tokens: int


@dataclass(frozen=True)
class Park:
    """Move the row of a prompt, which is read, into host memory: no slot is free."""

    prompt: Prompt


@dataclass(frozen=True)
class Assign:
    """Put the row of a prompt into a slot, where `request` decodes."""

    prompt: Prompt
    request: Scheduled
    slot: int
    # Whose row the slot still holds, if `Scheduler.take_vacated` has not returned it yet.
    before: Scheduled | None


Work = Begin | Read | Park | Assign


class Queue:
    """Prompts that wait for slots of one capacity, by arrival and by length."""

    def __init__(self) -> None:
        self._by_arrival = OrderedDict[Prompt, None]()
        self._by_length = list[tuple[int, int, Prompt]]()  # a heap; may hold some that left

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._by_arrival)

    def add(self, prompt: Prompt) -> None:
        newest = next(reversed(self._by_arrival), None)
        self._by_arrival[prompt] = None
        # A prompt that is put back came before others that are here.
        if newest is not None and newest.arrival > prompt.arrival:
            self._by_arrival = OrderedDict.fromkeys(sorted(self._by_arrival, key=_arrival))
        heapq.heappush(self._by_length, (prompt.tokens, prompt.arrival, prompt))

    def remove(self, prompt: Prompt) -> None:
        del self._by_arrival[prompt]
        # The heap forgets those that left when most of it are such.
        if len(self._by_length) > 2 * len(self._by_arrival) + 16:
            self._by_length = [one for one in self._by_length if one[2] in self._by_arrival]
            heapq.heapify(self._by_length)

    @property
    def oldest(self) -> Prompt | None:
        return next(iter(self._by_arrival), None)

    @property
    def shortest(self) -> Prompt | None:
        while self._by_length and self._by_length[0][2] not in self._by_arrival:
            heapq.heappop(self._by_length)
        return self._by_length[0][2] if self._by_length else None


class Scheduler:
    """The queues and slots of an engine.

    A step calls `begin_step`, then `leave` for requests whose tokens are all asked for, then
    `schedule` until that returns None. Each `Begin` is answered, before the next `schedule`, by
    `begin`, by `put_back`, or by the `end` of its requests. After a step, `take_vacated` and
    `take_finished` say which slots and which prompts have rows that nobody needs any more.

    Args:
      capacities: of each slot, in tokens; `LONGEST` where all are alike. Then a prompt is also
        read ahead of a free slot.
      prompt_tokens: most tokens that a step reads, if a chunk is not longer.
      readers: most prompts that are read at once.
      park: prompts that are read while no slot is free, and wait in host memory.
      admit: says whether a prompt that is read can have a slot now; by default always. If one
        cannot, those that came after it wait, too.
    """

    def __init__(
        self,
        capacities: Sequence[int],
        *,
        prompt_tokens: int,
        readers: int = 1,
        park: int = 0,
        admit: Callable[[Prompt], bool] = lambda prompt: True,
    ) -> None:
        self.capacities = list(capacities)
        self.prompt_tokens = prompt_tokens
        self.readers = readers
        self.park = park
        self.running: list[Scheduled | None] = [None] * len(self.capacities)  # by slot
        self.vacated = dict[int, Scheduled]()  # slots that hold the row of a request that left
        self.reading = list[Prompt]()
        self.parked = list[Prompt]()
        self.finished = list[Prompt]()  # those whose row nobody needs any more
        # By capacity of a slot, the prompts that need that capacity.
        self._waiting = {capacity: Queue() for capacity in sorted(set(self.capacities))}
        self._prompt_of = dict[Scheduled, Prompt]()  # of requests without a slot
        self._arrivals = itertools.count()
        # The prompt in the first row, which was the oldest when that row was free.
        self._in_first_row: Prompt | None = None
        self._first_row_is_next = False  # the next chunk is for that prompt
        self._budget = prompt_tokens  # tokens that this step may still read
        self._admits = True  # no prompt was refused a slot in this step
        self._admit = admit

    # ------------------------------------------------------------------ what happened

    def add(self, requests: Sequence[Scheduled], *, tokens: int, size: int) -> Prompt:
        """Queues requests for answers to one prompt."""
        prompt = Prompt(tuple(requests), list(requests), tokens, size, next(self._arrivals))
        self._queue_of(prompt).add(prompt)
        for request in requests:
            request.state = Stage.WAITING
            self._prompt_of[request] = prompt
        return prompt

    def begin(self, prompt: Prompt, chunks: Sequence[int]) -> None:
        """Notes in which chunks a prompt is read, now that it has a row."""
        prompt.chunks = deque(chunks)

    def put_back(self, prompt: Prompt) -> None:
        """Lets a prompt wait again, since there is no memory for a row beside the others. From
        then on `readers` is the number of those others.
        """
        if prompt not in self.reading:  # all of its requests have ended meanwhile
            return
        self.readers = max(len(self.reading) - 1, 1)
        self.reading.remove(prompt)
        if prompt is self._in_first_row:
            self._in_first_row = None
        self._queue_of(prompt).add(prompt)
        for request in prompt.without_slot:
            request.state = Stage.WAITING

    def end(self, request: Scheduled) -> None:
        """Takes out a request, wherever it is."""
        if request in self.running:
            self.leave(self.running.index(request))
        elif request in self._prompt_of:
            prompt = self._prompt_of.pop(request)
            prompt.without_slot.remove(request)
            if not prompt.without_slot:
                self._drop(prompt)
        request.state = Stage.DONE

    def leave(self, slot: int) -> None:
        """Frees a slot, whose row stays until another takes its place or it is emptied."""
        request = self.running[slot]
        assert request is not None
        self.running[slot] = None
        self.vacated[slot] = request

    def take_vacated(self) -> dict[int, Scheduled]:
        """The slots that requests have left since the last call, and those requests."""
        vacated = self.vacated
        self.vacated = {}
        return vacated

    def take_finished(self) -> list[Prompt]:
        """The prompts whose rows nobody needs any more, since the last call."""
        finished = self.finished
        self.finished = []
        return finished

    def begin_step(self) -> None:
        """Lets a step read `prompt_tokens` tokens, and ask anew which prompts are admitted."""
        self._budget = self.prompt_tokens
        self._admits = True

    # ------------------------------------------------------------------ what to do

    def schedule(self) -> Work | None:
        """The next piece of work of this step; None when it is time to decode."""
        # Prompts that are read take the free slots, the oldest first. If one is refused, those
        # after it wait, too.
        for prompt in self._read_without_slot():
            slot = self._smallest_free(prompt.size)
            if slot is None or not self._admits:
                continue
            self._admits = self._admit(prompt)
            if self._admits:
                return self._assign_slot(prompt, slot)
        if self._budget <= 0:
            return None

        # A prompt in the first row that got no slot makes room for the next one.
        first = self._in_first_row
        if first is not None and first.is_read and len(self.parked) < self.park:
            return self._park(first)

        # A prompt begins if there is a row to read it into; then one of those that have begun
        # gets a chunk.
        waiting = self._next_to_begin()
        if waiting is not None:
            return self._begin(waiting)
        unread = self._next_to_read()
        return None if unread is None else self._read_chunk(unread)

    # ------------------------------------------------------------------ how it stands

    def slot_of(self, request: Scheduled) -> int | None:
        return self.running.index(request) if request in self.running else None

    @property
    def waiting(self) -> int:
        """Requests that no slot holds yet."""
        return len(self._prompt_of)

    @property
    def wants_slot(self) -> bool:
        """True if a request could run at once if a slot were free."""
        if self.parked or any(prompt.is_read for prompt in self.reading):
            return True
        # With none before it, a prompt that waits is read in the step that fills the slot.
        return not self.reading and self.waiting > 0

    @property
    def idle(self) -> bool:
        return not self.waiting and not any(one is not None for one in self.running)

    def requests(self) -> list[Scheduled]:
        """All requests but those that are done."""
        return [*(one for one in self.running if one is not None), *self._prompt_of]

    def next_prompts(self, waiting: int) -> Iterator[Prompt]:
        """The prompts that get slots next: those that are read, and of each queue the `waiting`
        oldest.
        """
        yield from self.parked
        yield from self.reading
        for queue in self._waiting.values():
            yield from itertools.islice(queue, waiting)

    # ------------------------------------------------------------------ from stage to stage

    def _begin(self, prompt: Prompt) -> Begin:
        if self._in_first_row is None:
            self._in_first_row = prompt
        self._queue_of(prompt).remove(prompt)
        self.reading.append(prompt)
        for request in prompt.without_slot:
            request.state = Stage.READING
        return Begin(prompt)

    def _read_chunk(self, prompt: Prompt) -> Read:
        assert prompt.chunks
        tokens = prompt.chunks.popleft()
        self._budget -= tokens
        self._first_row_is_next = prompt is not self._in_first_row
        return Read(prompt, tokens)

    def _park(self, prompt: Prompt) -> Park:
        self.reading.remove(prompt)
        self._in_first_row = None
        self.parked.append(prompt)
        return Park(prompt)

    def _assign_slot(self, prompt: Prompt, slot: int) -> Assign:
        request = prompt.without_slot.pop(0)
        del self._prompt_of[request]
        self.running[slot] = request
        request.state = Stage.RUNNING
        if not prompt.without_slot:
            self._drop(prompt)
        return Assign(prompt, request, slot, self.vacated.pop(slot, None))

    def _drop(self, prompt: Prompt) -> None:
        """Takes out a prompt that no request waits for."""
        if prompt in self.reading:
            self.reading.remove(prompt)
        elif prompt in self.parked:
            self.parked.remove(prompt)
        else:
            self._queue_of(prompt).remove(prompt)
            return  # it has no row
        if prompt is self._in_first_row:
            self._in_first_row = None
        self.finished.append(prompt)

    # ------------------------------------------------------------------ choices

    def _read_without_slot(self) -> list[Prompt]:
        """Prompts that are read and wait for a slot, the oldest first."""
        read = [prompt for prompt in self.reading if prompt.is_read]
        return sorted([*self.parked, *read], key=_arrival)

    def _next_to_begin(self) -> Prompt | None:
        """The next prompt to read, if there is a row to read it into: the oldest if the first
        row is free or waits for a slot of its own size, else a short one.
        """
        if len(self.reading) >= self.readers:
            return None
        unread = [prompt for prompt in self.reading if not prompt.is_read]
        if self._in_first_row is None or not unread:
            return self._oldest_waiting()
        most = min(prompt.left for prompt in unread) // 2
        return self._shortest_waiting(most)

    def _oldest_waiting(self) -> Prompt | None:
        """The prompt that has waited longest of those for which a slot is free. Where all slots
        are alike, the first row is also read into ahead of a free one.
        """
        oldest = [queue.oldest for queue in self._waiting.values()]
        for prompt in sorted((one for one in oldest if one is not None), key=_arrival):
            ahead = self._in_first_row is None and self._slot_capacity(prompt) == LONGEST
            if ahead or self._smallest_free(prompt.size) is not None:
                return prompt
        return None

    def _shortest_waiting(self, most: int) -> Prompt | None:
        """The shortest prompt of at most `most` tokens for which a slot is free, also when the
        others beside the first row have got theirs.
        """
        others = sum(prompt is not self._in_first_row for prompt in self.reading)
        shortest = [queue.shortest for queue in self._waiting.values()]
        for prompt in sorted((one for one in shortest if one is not None), key=_tokens):
            fitting = sum(capacity >= prompt.size for capacity in self._free_capacities())
            if prompt.tokens <= most and fitting > others:
                return prompt
        return None

    def _next_to_read(self) -> Prompt | None:
        """Whose chunk is read next, if this step may read it."""
        unread = [prompt for prompt in self.reading if prompt.chunks]
        if not unread:
            return None
        chosen = min(unread, key=lambda prompt: (prompt.left, prompt.arrival))
        if self._first_row_is_next and self._in_first_row in unread:
            chosen = self._in_first_row
        assert chosen.chunks
        # The first chunk of a step is read even if it is longer than the budget.
        fits = chosen.chunks[0] <= self._budget or self._budget == self.prompt_tokens
        return chosen if fits else None

    def _free_capacities(self) -> list[int]:
        pairs = zip(self.capacities, self.running, strict=True)
        return [capacity for capacity, request in pairs if request is None]

    def _smallest_free(self, size: int) -> int | None:
        """The free slot of the least capacity that has room for `size` tokens."""
        fitting = [
            slot
            for slot, request in enumerate(self.running)
            if request is None and self.capacities[slot] >= size
        ]
        return min(fitting, key=self.capacities.__getitem__, default=None)

    def _slot_capacity(self, prompt: Prompt) -> int:
        """The least capacity of a slot that has room for a prompt's requests."""
        return next(capacity for capacity in self._waiting if capacity >= prompt.size)

    def _queue_of(self, prompt: Prompt) -> Queue:
        return self._waiting[self._slot_capacity(prompt)]


def _arrival(prompt: Prompt) -> int:
    return prompt.arrival


def _tokens(prompt: Prompt) -> tuple[int, int]:
    return prompt.tokens, prompt.arrival
