"""Many requests from one batch of rows: each is read into a row of its own, decodes beside the
others, and leaves.

An `Engine` has a cache of `slots` rows. A step reads chunks of prompts into rows beside them,
puts rows that are read into free slots, and then decodes a block of tokens in all slots by one
call of `decode_loop`. Its parts:

    scheduler    which prompt is read next, and which request gets which slot; no arrays
    reading      rows beside the slots, into which prompts are read
    slots        the cache, and the programs that change it
    keeping      rows that stay after their requests, for prompts that begin like them
    beginnings   which rows share a stored prefix, and which kept row a prompt begins like

Limits, stop tokens, settings of sampling and the counter of draws are a request's own, so **its
tokens are those that it gets alone**, whatever comes, goes or fails beside it. A slot that is
free holds an empty row, which costs nothing to attend to. After `warm_up` no program is
compiled, except for prompts of policies that read them whole.

The device never waits for the host: a step asks for a block, and then looks at the tokens of
the block before. The slot of a request that reaches its limit is filled at once, as its end is
known. One that draws a stop token is idle until the host has seen it, which is one block later.

Two locks: one thread at a time steps and changes arrays, in the order in which threads ask
(`_Turns`). The books, which are the queues, the requests and the counts, have a lock of their
own, which no thread holds while the device works. So `submit`, `cancel` and `stats` wait for no
prompt.

A prompt is read once for all answers to it. One that begins like a row that is running starts
from a copy of that row's first tokens, in whole chunks, if the policies can be truncated. With
`prefix_bytes`, rows also stay after their requests, and what prompts have in common with them is
not read again (`beginnings`).

With `prefixes`, what prompts have in common is also stored once (`kvjax.serve.prefixes`): all
of a prompt with several answers, or a system prompt with which several requests begin. Tokens
are then those of the request alone but for rounding, since attention sums in two parts; so are
they with `small_slots`, in which a row has other parts.
"""

from __future__ import annotations

import dataclasses
import operator
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.cache.cache import Cache
from kvjax.generation import drafts, prefilling
from kvjax.generation.callables import as_model
from kvjax.generation.drafts import Drafter, SelfDraft, Speculation
from kvjax.generation.loops import PAD, ROOM, Flat, LoopInputs
from kvjax.generation.processors import Processors, check_processors
from kvjax.generation.prompt_inputs import (
    check_devices,
    check_model_cache,
    check_request,
    pad_prompt,
    stop_array,
)
from kvjax.generation.reports import Packed
from kvjax.generation.sampling import Draws, Sampling, rows_of_draws, stack_draws
from kvjax.memory import making_on, on_host, places_of
from kvjax.serve.beginnings import SharedPrefixes, same_tokens
from kvjax.serve.caches import allocated, cache_of_checkpoint, cache_of_model
from kvjax.serve.keeping import Keeper, is_out_of_memory
from kvjax.serve.prefixes import prefixed_like
from kvjax.serve.reading import PromptReader
from kvjax.serve.requests import (
    NOT_FINITE,
    EngineBusy,
    Request,
    Stats,
    check_own,
    stop_ids,
    token_ids,
)
from kvjax.serve.scheduler import Assign, Begin, Park, Prompt, Read, Scheduler, Work
from kvjax.serve.slots import (
    RowKind,
    Rows,
    SharedStart,
    Slots,
    all_finite,
    can_truncate,
    capacities,
    committed,
    first_tokens,
    long_rows,
    splits_rows,
    whole_row,
    with_small_slots,
)
from kvjax.spec import require_int
from kvjax.validation import check_alive, check_flags, short_repr

INTERRUPTED = "a step was interrupted while it changed the arrays of the engine"


@dataclasses.dataclass
class _Block:
    """Decode steps that the device was asked for, and whose tokens the host has not seen."""

    rows: list[tuple[int, Request]]  # by slot
    decoded: Packed


@dataclasses.dataclass(eq=False)
class _Copy:
    """A copy of the row of a request, which `Engine.row` asks for.

    While the thread that asks waits for its turn, a step of another thread makes the copy before
    it asks for its block (`_make_copies`), so that the copy has to wait for no further work of
    the device. The next step drops it if nobody has taken it: it then lacks tokens that are
    known.
    """

    request: Request
    row: Cache | None = None


@dataclasses.dataclass
class _Counts:
    """Counts of an engine since it was made."""

    prompt_tokens: int = 0  # that were read
    copied_tokens: int = 0  # of prompts, copied from a row that runs or was kept
    new_tokens: int = 0  # that requests have got
    drawn_tokens: int = 0  # in all slots, those after the end of a request too
    steps: int = 0  # decode steps of the batch
    draft_counts: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros(3, int)
    )  # i64[3], the sum of `Report.draft_counts`


class _Turns:
    """A lock that threads get in the order in which they ask for it. With `threading.Lock` one
    that steps again and again would keep all others out.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._line = deque[object]()

    def __enter__(self) -> None:
        mine = object()
        with self._condition:
            self._line.append(mine)
            try:
                while self._line[0] is not mine:
                    self._condition.wait()
            except BaseException:
                self._line.remove(mine)
                self._condition.notify_all()
                raise

    def __exit__(self, *error: object) -> None:
        with self._condition:
            self._line.popleft()
            self._condition.notify_all()


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
      cache: a policy or its text, such as "fier:budget=256"; or an empty cache of `kvjax.init`,
        whose rows are the slots and which the engine takes over. A model without `spec` and
        `config.layers` needs the second.
      slots, capacity: rows, and tokens that each can hold, where the engine makes the cache.
      small_slots: more slots of smaller capacity, how many of each, such as {8192: 12}: a short
        request then takes less memory than the longest. Logits then differ by rounding from one
        capacity to another. No prompt is then read before a slot for it is free.
      block: tokens of each row between two looks at waiting requests. A larger block is faster,
        a smaller one reads prompts and frees slots sooner.
      chunk: tokens of a prompt that are read at once. Larger ones are faster on a GPU, and rows
        that decode wait for each. A cache of codes holds a longer prompt as it came until it
        ends, so its text is that of the prompt in one chunk; each prompt that is read then
        takes what a full cache of its tokens takes, and at most twice. None reads prompts whole.
      prompt_tokens: most tokens of prompts that a step reads, if one chunk is not more; by
        default one chunk. More fill slots sooner, and let the rows that decode wait longer.
      readers: most prompts that are read at once, each into a row beside the slots. A prompt
        begins beside others if a slot is free for it and it is at most half as long as what
        each of them has left. Rows are made when they are first needed, and stay.
      max_waiting: requests that may wait for a slot.
      prefixes, prefix_tokens: prefixes that are stored once beside the slots, and the most
        tokens of each. A prompt may then be longer than a slot by what its prefix holds.
      sharers: most requests that use one stored prefix; more of them store it again. A step
        computes for so many requests of each prefix, used or not, so give the number of answers
        to a prompt if it is known. None: all.
      prefix_bytes: bytes of rows that are kept after their requests; prompts that begin like
        them read only what is new. A row counts with the tokens that it has room for, a power
        of two of at least 64. 0 keeps none.
      prefix_host_bytes: bytes of kept rows that move to host memory when `prefix_bytes` are in
        use.
      park: prompts that are read ahead while all slots are in use, and wait in host memory.
      stop_tokens: of requests that name none; by default those of the checkpoint, after chat
        messages those of chats.
      processors: rules that change the logits of all requests; those of the checkpoint by
        default.
      speculate: "self", or a `kvjax.SelfDraft`: the rows draft by the selection of the cache,
        and texts are those of full attention (`speculation`). All rows wait for the slowest at
        the end of a block, so a larger `block` suits drafts. Not with `small_slots`.
      log_probabilities: fills in `Request.log_probabilities`, as in `kvjax.generate`.

    Raises:
      ValueError: a cache that holds tokens or was given to another engine, settings that do not
        fit together, or more memory than the device has.
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
        readers: int = 3,
        max_waiting: int = 256,
        prefixes: int = 0,
        prefix_tokens: int = 0,
        sharers: int | None = None,
        prefix_bytes: int = 0,
        prefix_host_bytes: int = 0,
        park: int = 0,
        stop_tokens: int | Iterable[int] | None = None,
        processors: Processors | None = None,
        speculate: str | SelfDraft | None = None,
        log_probabilities: bool = False,
    ) -> None:
        self.tokenizer: Any = None
        self._checkpoint: Any = None
        if hasattr(model, "init_cache") and hasattr(model, "encode"):
            self.tokenizer = model.tokenizer
            self._checkpoint = model
            cache = cache_of_checkpoint(model, cache, slots, capacity)
            processors = model.processors if processors is None else processors
            model = model.model
        elif slots is not None or capacity is not None:
            cache = cache_of_model(model, cache, slots, capacity)
        check_alive("Engine", cache)
        check_model_cache(model, cache)
        self._model = as_model(model)
        check_devices(self._model, cache)
        cache = _moved_to_model(self._model, cache)
        self._places = places_of(committed(cache))
        self._flat_model: Any = Flat.of(self._model)  # for decode steps
        if np.any(on_host(cache.length)):
            raise ValueError(
                "Engine takes an empty cache, whose rows are its slots; this one holds tokens"
            )

        # Limits.
        self.block = min(require_int("block", block, at_least=1), ROOM)
        if chunk is not None:
            chunk = require_int("chunk", chunk, at_least=2)
        if prompt_tokens is None:  # one chunk, also if that is a whole prompt
            prompt_tokens = 1 if chunk is None else chunk
        self.prompt_tokens = require_int("prompt_tokens", prompt_tokens, at_least=1)
        self.max_waiting = require_int("max_waiting", max_waiting, at_least=1)
        self.readers = require_int("readers", readers, at_least=1)
        park = require_int("park", park, at_least=0)
        prefixes = require_int("prefixes", prefixes, at_least=0)

        # The cache whose rows are the slots, and one like the rows into which prompts are read.
        row_like = cache
        self._prefixes: SharedPrefixes | None = None
        if prefixes:
            prefix_tokens = require_int("prefix_tokens", prefix_tokens, at_least=1)
            row_like = long_rows(cache, prefix_tokens)
            with making_on(self._places):
                cache = _with_prefixes(cache, prefix_tokens, prefixes, sharers)
            self._prefixes = SharedPrefixes.of(cache, prefixes, sharers)
        elif prefix_tokens or sharers is not None:
            raise ValueError(
                "prefix_tokens and sharers are for stored prefixes; say how many there are: prefixes=..."
            )
        if small_slots:
            if speculate is not None:
                raise ValueError(
                    "Engine(speculate=...) drafts in slots of one capacity; leave out small_slots, or make another "
                    "engine for short requests"
                )
            with making_on(self._places):
                cache = _with_small_slots(cache, small_slots)
        drafter = None if speculate is None else _drafter(self._model, cache, speculate)
        check_flags("Engine", log_probabilities=log_probabilities)
        self._log_probabilities = log_probabilities
        self._slots = Slots(
            cache,
            shares=self._prefixes is not None,
            drafter=drafter,
            log_probabilities=log_probabilities,
        )
        self.slots = self._slots.count

        # How prompts are read, and whether they may begin with copies of other rows.
        self._rows = Rows(RowKind.of(row_like), most=self.readers)
        self._spec = self._rows.empty.spec
        self._reader = PromptReader(self._model, self._rows, chunk=chunk)
        self.chunk = self._reader.chunk
        # A row that is rotated for its final length has other keys than one of another length.
        may_copy = not self._reader.whole_prompts and not self._rows.kind.rotated
        self._cuts_rows = may_copy and can_truncate(self._slots.cache, self._spec)
        prefix_bytes = require_int("prefix_bytes", prefix_bytes, at_least=0)
        if prefix_bytes:
            self._check_keeps(chunk)
        elif prefix_host_bytes:
            raise ValueError(
                "prefix_host_bytes takes rows from prefix_bytes; say how many bytes stay on the device: "
                "prefix_bytes=..."
            )
        self._keeper = Keeper(
            self._slots,
            self._rows,
            limit=prefix_bytes,
            host_limit=require_int("prefix_host_bytes", prefix_host_bytes, at_least=0),
            cuts=self._cuts_rows,
        )

        self._stop_tokens = None if stop_tokens is None else stop_ids(stop_array(stop_tokens))
        self._processors = check_processors(Processors() if processors is None else processors)
        self._scheduler = Scheduler(
            capacities(self._slots.cache),
            prompt_tokens=self.prompt_tokens,
            readers=self.readers,
            park=park,
            admit=self._admit,
        )

        # Read and written by the thread whose turn it is.
        self._turns = _Turns()
        self._starts = dict[Prompt, SharedStart]()  # where rows of a prompt begin
        self._to_clear = set[int]()  # slots that hold tokens of a request that has left
        self._blocks = deque[_Block]()
        # How the slots drew in the last block: each by itself, and all of them stacked.
        self._last_draws: tuple[list[Draws | None], Draws | None] = [], None
        # Read and written with the lock of the books, as the scheduler and the requests are.
        self._lock = threading.Lock()
        self._copies = list[_Copy]()
        self._news = dict[Request, None]()  # requests with new tokens or an end, in order
        self._counts = _Counts()
        self._failed: Exception | None = None  # after which the arrays are gone
        self._in_change = False  # `_change`

    # ------------------------------------------------------------------ requests

    def submit(
        self,
        prompt: Any,
        *,
        max_new_tokens: int = 128,
        n: int = 1,
        sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
        key: Array | None = None,
        stop_tokens: int | Iterable[int] | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> list[Request]:
        """Adds n requests for answers to one prompt, which is read once; any thread may call
        it.

        Args:
          prompt: token ids, or with a checkpoint a text or chat messages.
          max_new_tokens: of each answer.
          sampling, key: how tokens are drawn, as in `kvjax.generate` with a batch of n rows of
            this prompt.
          stop_tokens: at most 16 ids that end the answer.
          template: settings of the chat template, as in `Checkpoint.generate`.

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
        ids, stop = self._encoded(prompt, stop_tokens, template)
        tokens, lengths = pad_prompt(token_ids(ids), rows=1)
        stops = stop_ids(
            check_request(
                self._model,
                self._rows.empty,
                tokens,
                lengths,
                max_new_tokens=max_new_tokens,
                stop_tokens=stop,
            )
        )
        (prompt_ids,) = tokens
        if self._prefixes is not None:
            room = self._slots.cache.spec.capacity
            self._prefixes.check_room(len(prompt_ids), max_new_tokens, room)
        draws = rows_of_draws(Draws.of(sampling, key, n), n)
        made = [Request(prompt_ids, max_new_tokens, draw, stops, self) for draw in draws]
        if self._log_probabilities:
            for request in made:
                request.log_probabilities = []
        unread = len(prompt_ids) - self._keeper.known_tokens(prompt_ids)
        with self._lock:
            if self._failed is not None:
                raise RuntimeError(
                    "a step of this engine has failed; make a new one"
                ) from self._failed
            waiting = self._scheduler.waiting
            if waiting + n > self.max_waiting:
                raise EngineBusy(
                    f"{waiting} requests wait and the engine takes {self.max_waiting}; run `step` until fewer "
                    "wait, and submit again"
                )
            self._scheduler.add(made, tokens=unread, size=made[0].size)
        return made

    def cancel(self, request: Request) -> None:
        """Ends a request; its slot is free at the next step. A request that is done stays as it
        is.
        """
        with self._lock:
            check_own("cancel", self, request)
            if not request.done:
                self._end(request, "cancelled")

    def speculation(self) -> Speculation | None:
        """The acceptance of drafts in the tokens seen so far, over all requests; None without
        `speculate`.
        """
        with self._lock:
            return self._slots.speculation(self._counts.draft_counts)

    def stats(self) -> Stats:
        with self._lock:
            counts = self._counts
            kept = self._keeper.kept
            return Stats(
                slots=self.slots,
                decoding=len(self._running()),
                waiting=self._scheduler.waiting,
                prompt_tokens=counts.prompt_tokens,
                shared_tokens=counts.copied_tokens,
                parked=len(self._scheduler.parked),
                prefixes=0 if self._prefixes is None else self._prefixes.in_use,
                new_tokens=counts.new_tokens,
                steps=counts.steps,
                kept=kept.count,
                kept_bytes=kept.nbytes,
                kept_host_bytes=kept.host_nbytes,
                fill=counts.drawn_tokens / max(counts.steps * self.slots, 1),
            )

    def row(self, request: Request) -> Cache:
        """A copy of the row of a request that is running, as a cache of batch 1: its prompt and
        its tokens so far. Waits for a step of another thread.
        """
        check_own("row", self, request)
        copy = _Copy(request)
        with self._lock:
            self._copies.append(copy)
        try:
            with self._turn():
                if copy.row is not None:  # that step has made it
                    return copy.row
                return self._row_now(request)
        finally:
            with self._lock:
                self._copies.remove(copy)

    def _row_now(self, request: Request) -> Cache:
        """A copy of a row, after the last block that the device was asked for."""
        slot = self._scheduler.slot_of(request)
        if slot is None:
            raise ValueError(
                f"the request is {request.state}, so no slot holds its tokens; ask while it runs"
            )
        self._receive_until(0)  # so that the row and `tokens` are alike
        self._forget_copies()
        return self._whole_row(slot)

    # ------------------------------------------------------------------ steps

    def run(self, requests: Sequence[Request] | None = None) -> None:
        """Steps until these requests are done, or all."""
        if requests is None:
            while self._has_work():
                self.step()
        else:
            while any(not request.done for request in requests):
                self.step()

    def step(self) -> list[Request]:
        """Reads prompts, fills free slots, asks for a block of tokens and waits for those of
        the block before; returns the requests with new tokens or an end. Nothing to do returns
        none.

        Other threads may submit and cancel meanwhile. An exception ends all requests
        (`Request.error`). So does an interrupt (Ctrl-C), unless it comes while the step waits
        for the device: a notebook that goes on after one takes steps inside of
        `kvjax.generation.interrupts_wait()`.
        """
        with self._turn():
            self._forget_copies()
            try:
                if not self._running():  # so that prompts find what the last requests left
                    self._receive_until(0)
                asked = self._failed is None and self._ask()
                # Rules that change logits count the tokens of the block before.
                late = 1 if asked and self._processors.idle else 0
                self._receive_until(late)
            except Exception as error:
                self._fail(error)
                raise
            except BaseException:
                if self._in_change:
                    self._fail(RuntimeError(INTERRUPTED))
                raise
            with self._lock:
                news = list(self._news)
                self._news = {}
            return news

    def warm_up(self, *, draws: bool = True) -> None:
        """Compiles the programs that `step` runs: the chunks of a prompt, the move into a slot,
        and decoding, also with `draws`. Call it before the first request."""
        with self._turn():
            if self._has_work():
                raise ValueError(
                    "warm_up takes an idle engine: it writes to its slots; call it before any request"
                )
            for row, logits in self._reader.warm_up():
                self._warm_up_assign(row, logits)
            self._clear_slots()
            if self._slots.logits is None:
                return
            nothing = np.zeros(self.slots, np.int32)
            self._decode(None, nothing)
            if draws:
                one = Draws.of(Sampling(temperature=1.0), jax.random.key(0), 1)
                rows_of_draws(one, 1)  # as `submit` does
                self._decode(stack_draws([None] * self.slots), nothing)
            for slot in self._slots.one_of_each_size():
                if self._cuts_rows:
                    self._first_tokens(slot, 0)
                if not splits_rows(self._slots.cache):
                    self._whole_row(slot)
            self._keeper.warm_up()

    def save_prefixes(self, directory: str | Path) -> int:
        """Saves the kept rows in a directory, instead of those that an earlier call saved
        there; returns how many. Other threads may step meanwhile; a row that they drop before it
        is written is left out.

        Raises:
          ValueError: an engine that keeps none.
          RuntimeError: another save to the directory is not done.
          OSError: the directory cannot be written; what an earlier call saved there stays.
        """
        return self._keeper.save(directory, self._model)

    def restore_prefixes(self, directory: str | Path) -> int:
        """Keeps the rows that `save_prefixes` saved, as far as there is room for their bytes,
        and returns how many. Other threads may step meanwhile. Rows are read one by one, and an
        error leaves those before it.

        Raises:
          FileNotFoundError: the directory holds no saved prefixes.
          RuntimeError: others were saved to it meanwhile.
          ValueError: an engine that keeps none; prefixes of another model or another cache.
          DamagedSaveError: (a ValueError) files that are not those that were written.
        """
        return self._keeper.restore(directory, self._model, self._turn)

    # ------------------------------------------------------------------ what a step does

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The turn of a thread, whose new arrays are made on the device of the cache."""
        with self._turns, making_on(self._places):
            yield

    def _ask(self) -> bool:
        """Does the work of a step, and asks the device for a block; false if no row runs."""
        self._begin_step()
        with self._change():
            self._keep_vacated()
        self._do_scheduled_work()
        with self._change():
            self._keep_vacated()
            self._clear_slots()
            return self._ask_for_block()

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Marks work that must run to its end: arrays that are donated would be gone."""
        self._in_change = True
        yield
        self._in_change = False  # not in a `finally`: `step` asks if an exception came within

    def _begin_step(self) -> None:
        """Frees the slots of requests whose tokens the device was all asked for."""
        with self._lock:
            self._scheduler.begin_step()
            for slot, request in self._running():
                if request.asked == request.max_new_tokens:
                    self._leave(slot)

    def _do_scheduled_work(self) -> None:
        """Reads prompts and fills slots, until it is time to decode."""
        while True:
            with self._lock:
                finished = self._scheduler.take_finished()
                work = self._scheduler.schedule()
            for prompt in finished:
                self._starts.pop(prompt, None)
                self._reader.release(prompt)
            if work is None:
                return
            with self._change():
                self._do(work)
            self._reader.wait_for_chunks()

    def _do(self, work: Work) -> None:
        match work:
            case Begin(prompt):
                self._begin(prompt)
            case Read(prompt, tokens):
                self._read(prompt, tokens)
            case Park(prompt):
                self._reader.park(prompt)
            case Assign():
                self._assign(work)

    # ------------------------------------------------------------------ prompts

    def _begin(self, prompt: Prompt) -> None:
        """Makes a row for a prompt, with what is known of its beginning."""
        request = _first_request(prompt)
        try:
            row, tokens, chunks = self._row_for(request.prompt)
        except Exception as error:  # such as too little memory: the others go on
            with self._lock:
                if is_out_of_memory(error) and len(self._scheduler.reading) > 1:
                    self._scheduler.put_back(prompt)
                else:
                    self._end_all(prompt.without_slot, error)
            return
        if row.rotated_for is not None:
            row = self._model.rotate_for(row, jnp.array([request.size], jnp.int32))
        self._reader.add(prompt, row, tokens)
        with self._lock:
            self._scheduler.begin(prompt, chunks)
            self._counts.copied_tokens += tokens

    def _row_for(self, prompt: np.ndarray) -> tuple[Cache, int, list[int]]:
        """`_new_row`, for which kept rows make room if there is no memory: none of them
        is worth a request.
        """
        while True:
            try:
                return self._new_row(prompt)
            except Exception as error:
                if not is_out_of_memory(error) or not self._keeper.kept.move_out_oldest():
                    raise

    def _new_row(self, prompt: np.ndarray) -> tuple[Cache, int, list[int]]:
        """A row for a prompt, how many of its tokens that holds, and the chunks in which the
        others are read.
        """
        row, start = self._beginning(prompt)
        chunks = self._reader.chunks(len(prompt), start)
        row = self._reader.with_room(row, len(prompt) - start, len(chunks))
        return row, start, chunks

    def _beginning(self, prompt: np.ndarray) -> tuple[Cache, int]:
        """A row that holds the first tokens of the prompt, and how many: copied from a kept row
        or one that runs, whichever has more.
        """
        kept, tokens = self._keeper.kept.find(prompt)
        slot, same = self._running_beginning(prompt)
        if same > tokens:
            return self._first_tokens(slot, same), same
        if kept is None:
            return self._rows.make(), 0
        return self._keeper.beginning(kept, tokens), tokens

    def _running_beginning(self, prompt: np.ndarray) -> tuple[int, int]:
        """The slot of a row that begins like a prompt, and for how many tokens: whole chunks,
        so that the rest is read in the chunks in which the whole would be. -1 and 0 if none does.
        """
        nothing = (-1, 0)
        if not self._cuts_rows:
            return nothing
        best = (0, True)  # tokens, and whether the row is known to be finite
        best_slot = -1
        for slot, request in self._running():
            same = min(same_tokens(request.prompt, prompt), len(prompt) - 1)
            same = same // self.chunk * self.chunk
            finite = bool(request.tokens)  # a token was drawn from its logits
            if (same, finite) > best:
                best = (same, finite)
                best_slot = slot
        same, finite = best
        if same and not finite and not all_finite(on_host(self._slots.logits)[best_slot]):
            return nothing
        return best_slot, same

    def _whole_row(self, slot: int) -> Cache:
        """A copy of the row of a slot, as a cache of one row."""
        return whole_row(self._slots.cache, self._slots.at(slot), spec=self._spec)

    def _first_tokens(self, slot: int, tokens: int) -> Cache:
        """A copy of the row of a slot, cut to its first `tokens` tokens."""
        length = np.array([tokens], np.int32)
        return first_tokens(self._slots.cache, self._slots.at(slot), length, spec=self._spec)

    def _read(self, prompt: Prompt, size: int) -> None:
        """Reads a chunk of `size` tokens of a prompt."""
        request = _first_request(prompt)
        try:
            tokens = self._reader.read(prompt, request.prompt, size)
        except Exception as error:  # such as too little memory: the others go on
            with self._lock:
                self._end_all(prompt.without_slot, error)
            return
        with self._lock:
            self._counts.prompt_tokens += tokens

    # ------------------------------------------------------------------ slots

    def _admit(self, prompt: Prompt) -> bool:
        """Whether a prompt that is read can have a slot; it may have to wait for a stored
        prefix. The one with which its rows begin is in `_starts` from then on. The scheduler
        calls this, while its caller has the lock of the books.
        """
        if self._prefixes is None:
            return True
        request = _first_request(prompt)
        start = self._starts.get(prompt)
        if start is None or not self._prefixes.takes(start, request.prompt):
            others = [other.prompt for other in self._others(prompt)]
            room = self._slots.cache.spec.capacity - request.max_new_tokens
            start = self._prefixes.find(request.prompt, len(prompt.without_slot), others, room)
        if start is None:
            return False
        self._starts[prompt] = start
        return True

    def _others(self, prompt: Prompt) -> Iterator[Request]:
        """The requests with which a prompt may share its beginning."""
        yield from (request for _, request in self._running())
        for other in self._scheduler.next_prompts(2 * self.slots):
            if other is not prompt:
                yield _first_request(other)

    def _assign(self, work: Assign) -> None:
        """Puts the row of a prompt into a slot."""
        request = cast(Request, work.request)
        if work.before is not None:
            self._keep(work.slot, cast(Request, work.before))
        reading = self._reader.row(work.prompt)
        start = self._starts.get(work.prompt, SharedStart())
        if start.store and not all_finite(reading.logits):  # it would spoil its sharers
            with self._lock:
                waiting = [request, *work.prompt.without_slot]
                self._end_all(waiting, FloatingPointError(NOT_FINITE))
            return
        self._slots.assign(work.slot, reading.row, reading.logits, start)
        self._to_clear.discard(work.slot)
        self._note_prefix(work, start)
        if request is _first_request(work.prompt):
            self._keeper.keep_prompt(reading.row, request)

    def _note_prefix(self, work: Assign, start: SharedStart) -> None:
        """Notes with which stored prefix the row in a slot begins."""
        if self._prefixes is None:
            return
        request = cast(Request, work.request)
        with self._lock:
            if not request.done:  # it may have been cancelled meanwhile
                self._prefixes.use(start, work.slot, request.prompt)
            elif start.store:
                self._prefixes.store(start, request.prompt)
        # The next answers to the prompt use what this one has stored.
        self._starts[work.prompt] = dataclasses.replace(start, store=False)

    def _keep_vacated(self) -> None:
        """Keeps the rows that requests have left in slots, which are then to be cleared."""
        with self._lock:
            vacated = self._scheduler.take_vacated()
        for slot, request in vacated.items():
            self._keep(slot, cast(Request, request))
            self._to_clear.add(slot)

    def _clear_slots(self) -> None:
        """Empties the slots that requests have left, so that no step attends to their rows."""
        self._slots.clear(sorted(self._to_clear), self._rows.kind)
        self._to_clear.clear()

    # ------------------------------------------------------------------ blocks of tokens

    def _ask_for_block(self) -> bool:
        """Asks the device for a block of tokens; false if no row runs."""
        with self._lock:
            rows = self._running()
            left = {slot: request.max_new_tokens - request.asked for slot, request in rows}
            limit = np.zeros(self.slots, np.int32)
            steps = self._steps_of_block(list(left.values()))
            for slot, tokens in left.items():
                limit[slot] = min(steps, tokens)
        if not rows:
            self._last_draws = [], None
            return False
        self._make_copies()
        decoded = self._decode(self._draws(rows), limit, rows)
        decoded.words.copy_to_host_async()
        self._blocks.append(_Block(rows, decoded))
        for slot, request in rows:
            request.asked += int(limit[slot])
        return True

    def _steps_of_block(self, left: list[int]) -> int:
        """Steps of the next block: fewer if a row ends within it, for whose slot another waits."""
        if not left or not self._scheduler.wants_slot:
            return self.block
        return min(self.block, max(min(left), self.block // 4))

    def _draws(self, rows: list[tuple[int, Request]]) -> Draws | None:
        """How all slots draw; None if all are greedy."""
        draws: list[Draws | None] = [None] * self.slots
        for slot, request in rows:
            draws[slot] = request.draws
        last, stacked = self._last_draws
        same = len(last) == len(draws) and all(map(operator.is_, draws, last))
        if not same:
            some = any(draw is not None for draw in draws)
            stacked = stack_draws(draws) if some else None
            self._last_draws = draws, stacked
        return stacked

    def _decode(
        self, draws: Draws | None, limit: np.ndarray, rows: Sequence[tuple[int, Request]] = ()
    ) -> Packed:
        """Asks the device for up to `limit` i32[slots] tokens in each slot, of which `rows` have
        requests.
        """
        first = np.zeros(self.slots, np.int32)
        stops = self._slots.no_stops()
        for slot, request in rows:
            first[slot] = request.asked
            stops[slot, : len(request.stop)] = request.stop
        inputs = LoopInputs(draws, first, limit, stops, self._rules(rows))
        return self._slots.decode(self._flat_model, inputs, single_tokens=self.block == 1)

    def _rules(self, rows: Sequence[tuple[int, Request]]) -> Any:
        """The rules that change logits, and the tokens of all slots that they count; None if
        there are none.
        """
        if self._processors.idle:
            return None
        lengths = np.zeros(self.slots, int)
        for slot, request in rows:
            lengths[slot] = len(request.known)
        tokens = np.zeros((self.slots, max(1, *lengths)), np.int32)
        for slot, request in rows:
            tokens[slot, : lengths[slot]] = request.known
        return self._processors.start(
            tokens,
            lengths,
            capacity=self._spec.capacity,
            vocabulary=self._slots.logits.shape[1],
        )

    def _receive_until(self, unseen: int) -> None:
        """Waits until at most `unseen` blocks are left whose tokens the host has not seen."""
        while len(self._blocks) > unseen:
            self._receive()

    def _receive(self) -> None:
        """Waits for the block that was asked for first, and notes its tokens."""
        block = self._blocks[0]
        jax.block_until_ready(block.decoded)
        with self._change():
            report = block.decoded.read()
            self._blocks.popleft()
            with self._lock:
                self._counts.steps += int(np.max(report.count))
                self._counts.draft_counts += report.draft_counts
                for slot, request in block.rows:
                    log_probabilities = report.log_probabilities
                    if log_probabilities is not None:
                        log_probabilities = log_probabilities[slot]
                    tokens = report.tokens[slot]
                    self._note(request, tokens, log_probabilities, report.bad[:, slot])
            self._keeper.settle(self._in_blocks())

    def _note(
        self,
        request: Request,
        tokens: np.ndarray,
        log_probabilities: np.ndarray | None,
        bad: np.ndarray,
    ) -> None:
        """Notes the tokens i32[ROOM] of a request in a block; `bad` bool[2] says whether its
        logits had no best token before them, and after them.
        """
        new = tokens[tokens != PAD]
        bad_before, bad_after = bad
        self._counts.drawn_tokens += len(new)
        request.finite &= not bad.any()
        if request.done:  # since it was asked for
            return
        self._news[request] = None
        if bad_before:
            self._end(request, "error", FloatingPointError(NOT_FINITE))
            return
        request.tokens += new.tolist()
        if request.log_probabilities is not None and log_probabilities is not None:
            request.log_probabilities += log_probabilities[tokens != PAD].tolist()
        self._counts.new_tokens += len(new)
        if np.isin(new, request.stop).any():
            self._end(request, "stop")
        elif len(request.tokens) >= request.max_new_tokens:
            self._end(request, "length")
        elif bad_after:
            self._end(request, "error", FloatingPointError(NOT_FINITE))

    # ------------------------------------------------------------------ copies for other threads

    def _forget_copies(self) -> None:
        """Drops copies that nobody has taken yet: from now on more tokens are known than they
        hold.
        """
        with self._lock:
            for copy in self._copies:
                copy.row = None

    def _make_copies(self) -> None:
        """Copies the rows for which threads wait, before the device is asked for a block. When
        this step ends, the tokens of the blocks before that one are known, and the copies hold
        just these. Copies made after it would have to wait for that block, too.
        """
        if not self._processors.idle:  # this step waits for its own block
            return
        with self._lock:
            wanted = [(copy, self._scheduler.slot_of(copy.request)) for copy in self._copies]
        for copy, slot in wanted:
            if slot is not None:
                with suppress(Exception):  # such as too little memory, which `row` then tells
                    copy.row = self._whole_row(slot)

    # ------------------------------------------------------------------ kept rows

    def _check_keeps(self, chunk: int | None) -> None:
        """Raises ValueError if a row of this engine is no beginning of another prompt."""
        why = None
        if self._rows.kind.observes:
            why = "the method keeps of a prompt what its own queries choose, and others would choose other tokens"
        elif chunk is None:
            why = "chunk=None reads each prompt whole, without what was read before"
        elif self._rows.kind.rotated:
            why = "the model rotates the keys of a text for its final length"
        elif self._slots.cache.placement is not None:
            why = "the cache has a placement, and kept rows are for one device"
        if why is not None:
            raise ValueError(f"prefix_bytes keeps no rows here: {why}; leave it out")

    def _keep(self, slot: int, request: Request) -> None:
        """Keeps the row that a request leaves in a slot."""
        self._keeper.keep_slot(slot, request)
        self._keeper.settle(self._in_blocks())

    def _in_blocks(self) -> list[Request]:
        """The requests of blocks whose tokens the host has not seen."""
        return [request for block in self._blocks for _, request in block.rows]

    # ------------------------------------------------------------------ programs

    def _warm_up_assign(self, row: Cache, logits: Array) -> None:
        """Compiles the move of a row into a slot of each capacity."""
        starts = [SharedStart()]
        if self._prefixes is not None:
            starts.append(SharedStart(0, 0, store=True))
        for slot in self._slots.one_of_each_size():
            for start in starts:
                self._slots.assign(slot, row, logits, start)
            self._to_clear.add(slot)

    # ------------------------------------------------------------------ the books

    def _encoded(
        self, prompt: Any, stop_tokens: Any, template: Mapping[str, Any] | None
    ) -> tuple[Any, Any]:
        """A prompt as token ids, and the stop tokens of its request."""
        checkpoint = self._checkpoint
        is_chat = (
            isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping)
        )
        if template is not None and (checkpoint is None or not is_chat):
            raise ValueError(
                "submit(template=...) is for chat messages to an engine of a checkpoint, whose template takes it"
            )
        ids = prompt
        if checkpoint is not None and (is_chat or isinstance(prompt, str)):
            ids = checkpoint.encode(prompt, template=template)
        if stop_tokens is None:
            stop_tokens = self._default_stop_tokens(is_chat=is_chat)
        return ids, stop_tokens

    def _default_stop_tokens(self, *, is_chat: bool) -> Any:
        """Those of the engine, or else of its checkpoint, or none."""
        if self._stop_tokens is not None:
            return self._stop_tokens
        if self._checkpoint is None:
            return ()
        return self._checkpoint.chat_stop_tokens if is_chat else self._checkpoint.stop_tokens

    def _has_work(self) -> bool:
        """True if a request is not done, or a block is not seen."""
        return not self._scheduler.idle or bool(self._blocks)

    def _running(self) -> list[tuple[int, Request]]:
        """The requests in slots, and their slots."""
        return [
            (slot, cast(Request, request))
            for slot, request in enumerate(self._scheduler.running)
            if request is not None
        ]

    def _end(self, request: Request, reason: str, error: Exception | None = None) -> None:
        """Ends a request, wherever it is; its caller has the lock of the books."""
        request.reason = reason
        request.error = error
        slot = self._scheduler.slot_of(request)
        if slot is not None and self._prefixes is not None:
            self._prefixes.leave(slot)
        self._scheduler.end(request)
        self._news[request] = None

    def _end_all(self, requests: Iterable[Any], error: Exception) -> None:
        """Ends those of the requests that are not done, by an error."""
        for request in [one for one in requests if not one.done]:
            self._end(request, "error", error)

    def _leave(self, slot: int) -> None:
        """Frees a slot, and its use of a stored prefix."""
        self._scheduler.leave(slot)
        if self._prefixes is not None:
            self._prefixes.leave(slot)

    def _fail(self, error: Exception) -> None:
        """Ends all requests: the arrays that a failed call was given are gone."""
        with self._lock:
            self._failed = error
            self._end_all(self._scheduler.requests(), error)
            for block in self._blocks:
                self._end_all([request for _, request in block.rows], error)
            self._scheduler.take_finished()
            self._scheduler.take_vacated()
        self._reader.forget()
        self._keeper.forget_leaving()
        self._starts.clear()
        self._to_clear.clear()
        self._blocks.clear()


def _first_request(prompt: Prompt) -> Request:
    """The request by which a prompt is read, for all that want an answer to it."""
    return cast(Request, prompt.requests[0])


def _with_prefixes(cache: Cache, tokens: int, prefixes: int, sharers: int | None) -> Cache:
    """An empty cache like `cache`, with `prefixes` stored prefixes of `tokens` tokens each."""
    return allocated(
        f"prefixes={prefixes} of prefix_tokens={tokens}",
        lambda: prefixed_like(cache, tokens, prefixes=prefixes, sharers=sharers),
    )


def _with_small_slots(cache: Cache, small_slots: Mapping[int, int]) -> Cache:
    """`cache` with more rows of smaller capacities."""
    return allocated(f"small_slots={small_slots}", lambda: with_small_slots(cache, small_slots))


def _moved_to_model(model: Any, cache: Cache) -> Cache:
    """`cache` on the device of the model. Arrays that move are gone where they were, as those of
    a cache that stays are once the engine has it.
    """
    moved = prefilling.with_model(model, cache)
    for old, new in zip(jax.tree.leaves(cache), jax.tree.leaves(moved), strict=True):
        if old.sharding.device_set != new.sharding.device_set:
            old.delete()
    return moved


def _drafter(model: Any, cache: Cache, speculate: str | SelfDraft) -> Drafter:
    """The drafter of rows that are half full."""
    draft = drafts.parse(speculate) if isinstance(speculate, str) else speculate
    if not isinstance(draft, SelfDraft):
        raise ValueError(
            f"Engine(speculate=...) must be 'self' or a kvjax.SelfDraft, got {short_repr(draft)}: other drafts need "
            "the text of one run"
        )
    check_model_cache(model, cache, ("steps", "exact"))
    half = np.full(cache.spec.batch, cache.spec.capacity // 2, np.int32)
    return draft.start(model, cache, np.zeros((len(half), 1), np.int32), half, 0)
