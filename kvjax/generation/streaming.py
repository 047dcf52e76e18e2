"""Text generation: prefill a prompt in chunks, then decode in one loop on the device until all
rows have ended.

A model is any callable pytree that maps tokens and a cache to logits and a cache; `Model` is
the protocol, and kvjax.models.Decoder implements it. The cache decides what is kept and
attended to; this module does not depend on it.

One convention holds throughout: **every emitted token, including the stop token, is fed to the
model.** The returned cache therefore holds the prompt and all emitted tokens, and the returned
logits are those of the next token. Continue a conversation with `generate(model, result.cache,
next_prompt, ...)`, and a run that reached its length limit with `decode(model, result.cache,
result.logits, ...)`. A row that `kvjax.insert` puts into a running batch continues with the
others.

Programs compile once per shape, and there are few shapes: prompts are cut into chunks of two or
three sizes, and one loop, of `loops.ROOM` tokens per call, takes the number of new tokens, the
stop tokens and the settings of draws as data. So for a batch size and a capacity, requests of
all kinds compile at most four programs on a CPU: two for prompts, and two loops, of which one
is greedy and one draws. Caches are donated: after a call the cache that was passed in is
invalid; use the returned one.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import ArrayLike

from kvjax.cache.cache import Cache, attending, raise_on_overflow
from kvjax.compiling import Program, compile_clock
from kvjax.generation.callables import as_model
from kvjax.generation.draft_contract import check_drafter
from kvjax.generation.drafts import Draft, SelfDraft, Speculation, check_draft
from kvjax.generation.loops import (
    PAD,
    ROOM,
    ByLayer,
    DraftLoop,
    Flat,
    FlatLayers,
    Loop,
    LoopInputs,
    check_finite,
    decode_by_layer,
    decode_loop,
    draft_loop,
    programs_by_layer,
    without_loop,
)
from kvjax.generation.prefilling import Model as Model
from kvjax.generation.prefilling import (
    by_layer,
    on_auto_axes,
    prompt_programs,
    to_caller,
    warm_prefill,
)
from kvjax.generation.prefilling import chunk_size as chunk_size
from kvjax.generation.prefilling import prefill as prefill
from kvjax.generation.processors import History, Processors, Rules, check_processors
from kvjax.generation.prompt_inputs import (
    check_model_cache,
    check_request,
    pad_prompt,
    stop_array,
    vocabulary_size,
)
from kvjax.generation.reports import Packed, Report
from kvjax.generation.sampling import Draws, Sampling
from kvjax.generation.text import Detokenizer
from kvjax.memory import commit_together, on_host, zeros_like
from kvjax.sharding.placement import to_context
from kvjax.spec import require_int
from kvjax.validation import check_alive, described, has_dtype


@dataclasses.dataclass(frozen=True)
class Generation:
    """The result of `generate` and `decode`. Token arrays are on the host."""

    tokens: np.ndarray  # i32[B, max_new_tokens], each row's new tokens, then PAD
    lengths: np.ndarray  # i32[B] new tokens of each row, a stop token included
    cache: Cache  # holds the prompt and all new tokens
    logits: Array  # f32[B, V] logits of the token that follows each row's last one
    # f32[L] mean tokens attended per step and kv head, by layer with attention; None: not
    # measured
    attended: np.ndarray | None = None
    speculation: Speculation | None = None  # acceptance of drafts; None without a draft
    compile_seconds: float = 0.0  # that this call compiled, or read programs from disk; the rest of its time was work
    # f32[B, max_new_tokens] of the new tokens, then 0; None: not asked for
    log_probabilities: np.ndarray | None = None

    @property
    def rows(self) -> list[list[int]]:
        """The new tokens of each row without padding."""
        return [row[:n].tolist() for row, n in zip(self.tokens, self.lengths, strict=True)]


@partial(jax.jit, donate_argnames="cache")
def decode_step(
    model: Model, cache: Cache, token: Array, active: Array | None = None
) -> tuple[Array, Cache]:
    """Feeds one token per row, i32[B], and returns the logits f32[B, V] of the next token and
    the cache.

    Rows where `active` bool[B] is false store nothing; their logits are meaningless. The cache
    is donated.
    """
    if jnp.ndim(token) != 1:
        raise ValueError(
            f"token must be [B={cache.spec.batch}], one for each row, got {list(token.shape)}"
        )
    return model(token[:, None], cache, active=active, last_logits=True)


@on_auto_axes
def generate(
    model: Model,
    cache: Cache,
    prompt: ArrayLike | Sequence[Sequence[int]],
    lengths: ArrayLike | None = None,
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    processors: Processors = Processors(),  # noqa: B008
    key: Array | None = None,
    stop_tokens: int | Iterable[int] = (),
    chunk: int | None = None,
    measure: bool = False,
    draft: Draft | None = None,
    sparse_prompt: float | None = None,
    log_probabilities: bool = False,
) -> Generation:
    """Continues each row of the prompt until it emits a stop token or `max_new_tokens`.

    Args:
      prompt: one sequence of token ids per row, of any lengths, or a right-padded i32[B, T]
        with `lengths` i32[B]. It is appended to what the cache already holds, so pass the cache
        of the last turn to continue a conversation.
      max_new_tokens: the most new tokens of each row.
      sampling: how a token is drawn; greedy by default.
      processors: rules that change the logits before that, such as a repetition penalty; none
        by default.
      key: one key, into which each row folds its index, or B keys. Token i of a row draws with
        `fold_in(row's key, i)`, so pass a new key for each turn.
      stop_tokens: ids after which a row ends; the stop token is emitted too.
      chunk: tokens per chunk of the prompt, as in `prefill`.
      measure: fills in `Generation.attended`.
      draft: a `PromptLookup` or a `DraftModel` that proposes tokens, which the model verifies,
        several per step. The text stays the same, up to rounding; `Generation.speculation`
        reports how many were accepted. With a `SelfDraft`, the cache's own selection drafts,
        and the text is that of full attention.
      sparse_prompt: the share of the stored tokens to which a block of a long prompt attends,
        as in `prefill`. The text changes.
      log_probabilities: fills in `Generation.log_probabilities`: those of the new tokens by the
        model's logits over the temperature, before processors and filters. With a draft they
        are the model's, not the draft's.

    Raises:
      ValueError: a request that cannot be served, before any work is done: see
        `kvjax.generation.prompt_inputs.check_request`.
    """
    run = stream(
        model,
        cache,
        prompt,
        lengths,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        processors=processors,
        key=key,
        stop_tokens=stop_tokens,
        chunk=chunk,
        measure=measure,
        draft=draft,
        sparse_prompt=sparse_prompt,
        log_probabilities=log_probabilities,
    )
    return _decode_all(run, max_new_tokens)


@on_auto_axes
def decode(
    model: Model,
    cache: Cache,
    logits: Array,
    *,
    max_new_tokens: int,
    active: ArrayLike | None = None,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    processors: Processors = Processors(),  # noqa: B008
    key: Array | None = None,
    stop_tokens: int | Iterable[int] = (),
    measure: bool = False,
    log_probabilities: bool = False,
) -> Generation:
    """`generate` without a prompt, from the logits f32[B, V] of the next token that `prefill`
    or a Generation holds.

    Rows where `active` bool[B] is false emit nothing, such as the empty rows of a server's
    batch.
    """
    check_model_cache(model, cache, _optional_keywords(measure, None))
    model = as_model(model)
    B = cache.spec.batch
    if not has_dtype(logits, jnp.floating) or logits.ndim != 2 or logits.shape[0] != B:
        raise ValueError(
            f"logits must be floats [B={B}, V] for this cache, got {described(logits)}; pass those of prefill or of "
            "a Generation"
        )
    rows = np.ones((B,), bool) if active is None else np.asarray(active)
    if rows.shape != (B,) or rows.dtype != bool:
        raise ValueError(f"active must be bool[B={B}], got {rows.dtype}{list(rows.shape)}")
    max_new_tokens = require_int("max_new_tokens", max_new_tokens, at_least=1)
    stop = check_request(
        model,
        cache,
        None,
        np.where(rows, 0, -1),
        max_new_tokens=max_new_tokens,
        stop_tokens=stop_tokens,
    )
    draws = Draws.of(sampling, key, B)
    processed = _start_processors(processors, cache, logits)
    run = Stream(
        model,
        cache,
        logits,
        max_new_tokens,
        draws,
        stop,
        active=rows,
        measure=measure,
        processed=processed,
        log_probabilities=log_probabilities,
    )
    return _decode_all(run, max_new_tokens)


def _optional_keywords(measure: bool, draft: Draft | None) -> list[str]:
    """Keywords that a model may lack, of which this run needs these."""
    needed = ["info"] if measure else []
    if draft is not None:
        needed.append("steps")
    if isinstance(draft, SelfDraft):
        needed.append("exact")
    return needed


def _decode_all(run: Stream, max_new_tokens: int) -> Generation:
    """Advances a run to its end."""
    emitted = run._advance_all(max_new_tokens, single_steps=False)
    tokens = np.full((len(emitted), max_new_tokens), PAD, np.int32)
    tokens[:, : emitted.shape[1]] = emitted
    raise_on_overflow(run.cache)
    log_probabilities = None
    if run.log_probabilities is not None:
        log_probabilities = np.zeros(tokens.shape, np.float32)
        for row, new in zip(log_probabilities, run.log_probabilities, strict=True):
            row[: len(new)] = new
    return Generation(
        tokens=tokens,
        lengths=np.array([len(row) for row in run.rows], np.int32),
        cache=run.cache,
        logits=run.logits,
        attended=run.attended,
        speculation=run.speculation,
        compile_seconds=run.compile_seconds,
        log_probabilities=log_probabilities,
    )


@on_auto_axes
def stream(
    model: Model,
    cache: Cache,
    prompt: ArrayLike | Sequence[Sequence[int]],
    lengths: ArrayLike | None = None,
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    processors: Processors = Processors(),  # noqa: B008
    key: Array | None = None,
    stop_tokens: int | Iterable[int] = (),
    chunk: int | None = None,
    measure: bool = False,
    tokenizer: Any = None,
    block: int = 1,
    progress: Callable[[int], None] | None = None,
    draft: Draft | None = None,
    sparse_prompt: float | None = None,
    short: bool = False,
    log_probabilities: bool = False,
) -> Stream:
    """`generate` as an iterator: the same tokens, in blocks of up to `block` tokens per row.

    Yields i32[B, n <= block] on the host, with PAD where a row has ended; or, with a
    `tokenizer` and one row, pieces of text that never split a character. This call checks and
    prefills the prompt, so errors are raised before the first block. The host waits for the
    device once per block: a larger block is faster, a smaller one streams more smoothly.
    `draft`, `sparse_prompt` and `log_probabilities` are as in `generate`; with a draft, a block
    is at least the draft and the token before it. `short=True` trades decode speed for compile
    time, for a process that gives one answer: where prompts are read layer by layer, decode
    steps also run one layer at a time.
    """
    check_model_cache(model, cache, _optional_keywords(measure, draft))
    model = as_model(model)
    block = require_int("block", block, at_least=1)
    tokens, lengths = pad_prompt(prompt, lengths, rows=cache.spec.batch)
    if tokenizer is not None and cache.spec.batch != 1:
        raise ValueError(
            f"text streams one row at a time, but the cache has B={cache.spec.batch}; "
            "leave out the tokenizer to stream token ids of all rows"
        )
    max_new_tokens = require_int("max_new_tokens", max_new_tokens, at_least=1)
    stop = check_request(
        model,
        cache,
        tokens,
        lengths,
        max_new_tokens=max_new_tokens,
        stop_tokens=stop_tokens,
    )
    draws = Draws.of(sampling, key, cache.spec.batch)
    check_processors(processors)
    drafter = None
    if draft is not None:
        check_draft(draft, cache)
        started = draft.start(model, cache, tokens, lengths, max_new_tokens)
        drafter = check_drafter(draft, started)
        block = max(block, drafter.max_tokens + 1)
    final = on_host(cache.length) + lengths + max_new_tokens
    with compile_clock() as clock:
        logits, cache = prefill(
            model,
            cache,
            tokens,
            lengths,
            chunk=chunk,
            progress=progress,
            final=final,
            sparse_prompt=sparse_prompt,
        )
    return Stream(
        model,
        cache,
        logits,
        max_new_tokens,
        draws,
        stop,
        measure=measure,
        block=block,
        text=None if tokenizer is None else Detokenizer(tokenizer),
        drafter=drafter,
        compile_seconds=clock.seconds,
        processed=_start_processors(processors, cache, logits, tokens, lengths),
        short=short,
        log_probabilities=log_probabilities,
    )


def _start_processors(
    processors: Processors,
    cache: Cache,
    logits: Any,
    tokens: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
) -> tuple[Rules, History] | None:
    """The rules for a prompt as data; None if there are none."""
    if lengths is None:
        lengths = np.zeros(cache.spec.batch, np.int32)
    return check_processors(processors).start(
        tokens, lengths, capacity=cache.spec.capacity, vocabulary=logits.shape[-1]
    )


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Raises the KeyboardInterrupt of Ctrl-C after the block instead of within it.

    A step donates its cache. An interrupt between the step and the moment that its result is
    kept would lose both, so a notebook that wants to go on after Ctrl-C takes steps inside of
    this block:

        with interrupts_wait():
            tokens = next(run)

    It sets the handler of SIGINT while the block runs, which is why no function of kvjax calls
    it. In other threads than the main one, and where SIGINT has a handler of its own, it does
    nothing.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupts: list[Any] = []
    signal.signal(signal.SIGINT, lambda *what: interrupts.append(what))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupts:
        raise KeyboardInterrupt


def _runs_by_layer(model: Model, cache: Cache) -> bool:
    """True if decode steps can run one layer at a time: where prompts do, unless a layer needs
    what another one selected.
    """
    follows = any(layer.policy.follows for layer in cache.layers)
    return not follows and by_layer(model, cache)


def _putting_beside(cache: Cache) -> Callable[[Any], Any]:
    """A function that puts a small argument of a loop where it can stay between calls: on all
    devices of a cache with a placement, on the device of another, committed if its arrays are.

    Arrays may be on several devices without a placement; then arguments stay on the host, and
    jit puts them where the others are.
    """
    if cache.placement is not None:
        everywhere = NamedSharding(cache.placement.auto.mesh, PartitionSpec())
        return partial(jax.device_put, device=everywhere)
    leaf = next(iter(jax.tree.leaves(cache)))
    if not isinstance(leaf, Array) or not leaf.committed:
        return jax.device_put
    devices = leaf.sharding.device_set
    if len(devices) > 1:
        return lambda value: value
    return partial(jax.device_put, device=SingleDeviceSharding(next(iter(devices))))


class _Progress(NamedTuple):
    """The progress of a run, as the host knows it after the last call of a loop.

    It is replaced as a whole, so that an exception, such as that of Ctrl-C, leaves the one
    before it or the one after it.
    """

    active: np.ndarray  # bool[B] rows that have not ended
    step: int  # tokens emitted so far
    left: int  # tokens that may still be emitted
    lengths: list[int]  # the tokens of each row that are noted in full
    attended: np.ndarray  # f32[L] mean tokens read; zeros if not measured
    counted: float  # row steps in that mean
    draft_counts: np.ndarray  # i64[3] steps of rows, tokens drafted, tokens accepted
    drafter: Any  # None without a draft
    processed: tuple[Rules, History] | None  # as in `LoopInputs`
    # The results of a call since, until all of them are noted: no entry, or one.
    unread: list[tuple[Loop | DraftLoop, Packed | Report]]


class Stream(Iterator[Any]):
    """A generation in progress, made by `stream`. Iterating advances it; its attributes can be
    read between steps.

    Each step donates the cache, so a reference to `run.cache` is valid only until the next
    step. The run uses the weights that the model had when it began.
    """

    cache: Cache  # holds the prompt and all tokens emitted so far
    rows: list[list[int]]  # the new tokens of each row so far
    # their log-probabilities; None: not asked for
    log_probabilities: list[list[float]] | None
    compile_seconds: float  # that compiling took so far, that of the prompt included

    def __init__(
        self,
        model: Model,
        cache: Cache,
        logits: Array,
        max_new_tokens: int,
        draws: Draws | None = None,
        stop: np.ndarray | None = None,
        *,
        active: np.ndarray | None = None,
        measure: bool = False,
        block: int = 1,
        text: Detokenizer | None = None,
        drafter: Any = None,
        compile_seconds: float = 0.0,
        processed: tuple[Rules, History] | None = None,
        short: bool = False,
        log_probabilities: bool = False,
    ) -> None:
        batch = cache.spec.batch
        self.cache, self._logits = commit_together((cache, to_context(logits)))
        self.rows = [[] for _ in range(batch)]
        self.log_probabilities = [[] for _ in range(batch)] if log_probabilities else None
        self.compile_seconds = compile_seconds

        # How all calls run.
        by_layers = (
            short and drafter is None and not log_probabilities and _runs_by_layer(model, cache)
        )
        self._model: Any = ByLayer(FlatLayers.of(model)) if by_layers else Flat.of(model)
        self._draws = draws
        # One row of stop tokens for each row, as an engine has them, which so runs the same
        # programs.
        self._stop = np.tile(stop_array(()) if stop is None else stop, (batch, 1))
        self._measure = measure
        self._drafts = drafter is not None and drafter.max_tokens > 0
        # A model that drafts nothing for itself still attends to all tokens.
        self._exact = drafter is not None and drafter.exact and not self._drafts
        self._taking_part = np.ones((batch,), bool) if active is None else active

        # How tokens are given out.
        self._block = min(block, max_new_tokens)
        self._single_steps = block == 1
        self._text = text

        # Arguments of the last call on the host and on the device, by name.
        self._put_before: dict[str, tuple[Any, Any]] = {}
        self._put_beside = _putting_beside(self.cache)
        self._now = _Progress(
            active=self._taking_part,
            step=0,
            left=max_new_tokens,
            lengths=[0] * batch,
            attended=np.zeros(len(attending(cache)), np.float32),
            counted=0.0,
            draft_counts=np.zeros(3, np.int64),
            drafter=drafter,
            processed=processed,
            unread=[],
        )

    @property
    def logits(self) -> Array:
        """Logits of the token that follows those emitted so far: f32[B, V]."""
        return to_caller(self._logits, self.cache.placement)

    @property
    def attended(self) -> np.ndarray | None:
        """Mean tokens attended per step and kv head, over the steps so far; None if not
        measured: f32[L].
        """
        return self._now.attended if self._measure else None

    @property
    def speculation(self) -> Speculation | None:
        """The acceptance of drafts so far; None without a draft."""
        drafter = self._now.drafter
        if drafter is None:
            return None
        if drafter.idle is not None:
            return Speculation(sum(map(len, self.rows)), 0, 0, idle=drafter.idle)
        steps, drafted, accepted = self._now.draft_counts.tolist()
        return Speculation(steps, drafted, accepted)

    def _call(self, limit: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of `decode_loop`, and its settings."""
        put = (lambda _, value: value) if isinstance(self._model, ByLayer) else self._put
        rows = (len(self.rows),)
        inputs = LoopInputs(
            draws=self._draws,
            first=np.full(rows, self._now.step, np.int32),
            limit=put("limit", np.full(rows, limit, np.int32)),
            stop=put("stop", self._stop),
            processed=self._now.processed,
        )
        active = put("active", self._now.active)
        settings = {"measure": self._measure}
        # Only where they are asked for: `decode_by_layer` and `draft_loop` lack some of them.
        if self._exact:
            settings["exact"] = True
        if self.log_probabilities is not None:
            settings["log_probabilities"] = True
        return (self._model, self.cache, self._logits, active, inputs), settings

    def _put(self, name: str, value: Any) -> Any:
        """An argument of the loop on the devices, where it stays for further calls that have the
        same: each copy from the host would take time before the first kernel.
        """
        before = self._put_before.get(name)
        if before is None or not np.array_equal(before[0], value):
            before = value, self._put_beside(value)
            self._put_before[name] = before
        return before[1]

    def programs(self, block: int | None = None) -> list[Program]:
        """The programs of `advance` without a draft, in calls of `block` tokens; None is for
        calls of any number.
        """
        block = _block_or_any(block)
        arguments, settings = self._call(1)
        if isinstance(self._model, ByLayer):
            return programs_by_layer(*arguments, **settings)
        loop = Program(decode_loop, arguments, settings)
        if not without_loop(True):
            return [loop]  # which calls of one token run, too
        step = Program(decode_loop, arguments, settings | without_loop(True))
        if block is None:
            return [loop, step]
        return [step] if block == 1 else [loop]

    def advance(self, steps: int) -> np.ndarray:
        """Emits up to `steps` tokens per row and returns them, i32[B, n]; n is 0 when all rows
        have ended.

        To go on after Ctrl-C, call it inside of `interrupts_wait`.
        """
        steps = require_int("advance(steps=...)", steps, at_least=0, at_most=sys.maxsize)
        return self._advance_all(steps, single_steps=steps == 1)

    @on_auto_axes
    def _advance_all(self, steps: int, *, single_steps: bool) -> np.ndarray:
        """`advance`; `single_steps` says that each call is for one token, so that it needs no
        loop where the host would wait for it.
        """
        if self._now.unread:  # an exception came before its results were noted
            done, _ = self._now.unread[0]
            self.cache = done.cache
        check_alive("a stream", self.cache)
        blocks = [np.zeros((len(self.rows), 0), np.int32)]
        while steps > 0 and self._now.left > 0 and np.any(self._now.active):
            limit = min(steps, self._now.left, ROOM)
            blocks.append(self._advance(limit, single_steps=single_steps))
            steps -= blocks[-1].shape[1]
        return np.concatenate(blocks, axis=1)

    def _advance(self, limit: int, *, single_steps: bool) -> np.ndarray:
        """One call of a loop: its tokens i32[B, n <= limit].

        If an exception comes before the results are noted, the next call does not run the loop
        again, and notes these.
        """
        if not self._now.unread:
            with compile_clock() as clock:
                self._now.unread.append(self._run_loop(limit, single_steps=single_steps))
            self.compile_seconds += clock.seconds
        done, packed = self._now.unread[0]
        self.cache = done.cache
        self._logits = done.logits
        report = packed.read()
        self._check_finite(report)
        return self._note(done, report)

    def _run_loop(
        self, limit: int, *, single_steps: bool
    ) -> tuple[Loop | DraftLoop, Packed | Report]:
        """Asks the device for up to `limit` tokens."""
        arguments, settings = self._call(limit)
        if isinstance(self._model, ByLayer):
            return decode_by_layer(*arguments, **settings)
        if self._drafts:
            drafter = self._now.drafter
            return draft_loop(*arguments, drafter.with_state(None), drafter.state, **settings)
        return decode_loop(*arguments, **settings, **without_loop(single_steps))

    def _check_finite(self, report: Report) -> None:
        """Raises RuntimeError if a row that takes part has no best logit."""
        bad_before, bad_after = report.bad
        if self._now.step == 0:
            check_finite(self._taking_part & bad_before, "before the first token")
        last = self._now.step + int(np.max(report.count))
        check_finite(self._taking_part & bad_after, f"by new token {last}")

    def _note(self, done: Loop | DraftLoop, report: Report) -> np.ndarray:
        """Notes the results of a call, and returns its tokens. It may be called again after an
        exception: it counts only once, by its last assignment.
        """
        before = self._now
        size = int(np.max(report.count))
        tokens = report.tokens[:, :size]
        new_rows = [row[row != PAD].tolist() for row in tokens]
        for row, start, new in zip(self.rows, before.lengths, new_rows, strict=True):
            row[start:] = new
        if self.log_probabilities is not None:
            found = report.log_probabilities[:, :size]
            for i, row_so_far in enumerate(self.log_probabilities):
                row_so_far[before.lengths[i] :] = found[i][tokens[i] != PAD].tolist()

        drafter = before.drafter
        if isinstance(done, DraftLoop):
            drafter = drafter.with_state(done.state)
        processed = before.processed
        if processed is not None:
            rules, history = processed
            processed = (rules, history.with_rows(new_rows))
        steps = float(report.counted)
        self._now = _Progress(
            active=report.active,
            step=before.step + size,
            left=before.left - size,
            lengths=[len(row) for row in self.rows],
            attended=self._mean_attended(report.attended, steps),
            counted=before.counted + steps,
            draft_counts=before.draft_counts + report.draft_counts,
            drafter=drafter,
            processed=processed,
            unread=[],
        )
        return tokens

    def _mean_attended(self, attended: np.ndarray, steps: float) -> np.ndarray:
        """The mean number of tokens f32[L] that a step attended to, by layer, after `steps` more
        steps of rows, whose mean is `attended`.
        """
        before = self._now
        if not self._measure or not steps:
            return before.attended
        share = np.float32(steps / (before.counted + steps))
        return before.attended + (attended - before.attended) * share

    def __next__(self) -> Any:
        while True:
            tokens = self._advance_all(self._block, single_steps=self._single_steps)
            ended = tokens.shape[1] == 0
            if self._text is None:
                if ended:
                    raise StopIteration
                return tokens
            piece = self._text.push(tokens[0][tokens[0] != PAD].tolist())
            if ended:
                piece += self._text.finish()
            if piece:
                return piece
            if ended:
                raise StopIteration


@on_auto_axes
def warm_up(
    model: Model,
    cache: Cache,
    prompt_tokens: int,
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    processors: Processors = Processors(),  # noqa: B008
    stop_tokens: int | Iterable[int] = (),
    chunk: int | None = None,
    measure: bool = False,
    draft: Draft | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    block: int | None = None,
) -> None:
    """Compiles the programs that `generate` or `stream` runs for a prompt of `prompt_tokens`.

    Runs a chunk of each size, of which the first holds one token, and one decode step. Consumes
    `cache`, which must be empty; make another one for the run itself. `progress` is called
    before each part, with the number of parts done, the number of parts, and what is compiled
    next.

    On a GPU, a stream of single tokens has a program of its own. Both are compiled, or one if
    `block` is given, that of the `stream`: the one of single tokens if it is 1.
    """
    report = progress or (lambda *_: None)
    report(0, 2, "for the prompt")
    check_model_cache(model, cache, _optional_keywords(measure, draft))
    model = as_model(model)
    prompt_tokens = require_int("warm_up(prompt_tokens=...)", prompt_tokens, at_least=1)
    max_new_tokens = require_int("max_new_tokens", max_new_tokens, at_least=1)
    block = _block_or_any(block)
    if np.any(on_host(cache.length)):
        raise ValueError(
            "warm_up consumes an empty cache, and this one holds tokens; make another one like it for warm_up"
        )
    B = cache.spec.batch
    drafter = None
    if draft is not None:
        prompt = np.zeros((B, prompt_tokens), np.int32)
        # A self-draft decides by the length whether it drafts; others read the prompt, too.
        length = prompt_tokens if isinstance(draft, SelfDraft) else 1
        lengths = np.full((B,), length, np.int32)
        started = draft.start(model, cache, prompt, lengths, max_new_tokens)
        drafter = check_drafter(draft, started)
    logits, cache = warm_prefill(model, cache, prompt_tokens, chunk=chunk)
    report(1, 2, "for decode steps")
    draws = _draws_of_any_key(sampling, B)
    stop = stop_array(stop_tokens)
    processed = _start_processors(processors, cache, logits)
    run = Stream(
        model,
        cache,
        logits,
        1,
        draws,
        stop,
        measure=measure,
        drafter=drafter,
        processed=processed,
    )
    drafts = drafter is not None and drafter.max_tokens > 0
    if block is None and not drafts:
        _, *others = run.programs()  # the first compiles as it runs
        for program in others:
            program.compile()
    run._advance_all(1, single_steps=block == 1)
    jax.block_until_ready(run.logits)


def _block_or_any(block: int | None) -> int | None:
    """Checks the tokens of a stream's calls; None is for calls of any number."""
    return None if block is None else require_int("block", block, at_least=1)


def _draws_of_any_key(sampling: Sampling, rows: int) -> Draws | None:
    """Draws for programs that compile before there is a key; None if no row draws."""
    if isinstance(sampling, Sampling) and sampling.greedy:
        return None  # to make a key takes programs of its own
    return Draws.of(sampling, jax.random.key(0), rows)


def abstract_cache(empty: Callable[[], Cache]) -> Cache | None:
    """Arrays for `compile_ahead` with the shapes of the cache that `empty` makes, but without
    its memory.

    None if programs depend on more of them, as on where arrays in host memory are.
    """
    program, shapes = jax.make_jaxpr(empty, return_shape=True)()
    for aval in program.out_avals:
        kind: Any = aval
        if kind.memory_space == jax.memory.Space.Host or not isinstance(kind.dtype, np.dtype):
            return None
    return jax.tree.map(zeros_like, shapes)


@on_auto_axes
def compile_ahead(
    model: Model,
    cache: Cache,
    prompt_tokens: int | None,
    *,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    processors: Processors = Processors(),  # noqa: B008
    stop_tokens: int | Iterable[int] = (),
    chunk: int | None = None,
    measure: bool = False,
    prompts: bool = True,
    steps: bool = True,
    short: bool = False,
    block: int | None = None,
) -> list[Callable[[], Any]]:
    """Functions that each compile a program of `stream` for a prompt of `prompt_tokens`, to be
    called in threads.

    None is for prompts of all lengths. Without `prompts` there are only the programs of decode
    steps, and without `steps` only those that read prompts.

    `model` may hold shapes (`jax.ShapeDtypeStruct`) in place of arrays, so that programs
    compile while weights are read. `cache` is the empty one of the run, in which nothing
    changes, or `abstract_cache`. Call `stream` after all of them have returned, or it compiles again.
    `block` is as in `warm_up`.
    """
    block = _block_or_any(block)
    V = vocabulary_size(model)
    programs = prompt_programs(model, cache, prompt_tokens, chunk=chunk) if prompts else []
    if steps and V is not None:
        rows = cache.spec.batch
        logits: Any = jax.device_put(np.zeros((rows, V), np.float32))
        draws = _draws_of_any_key(sampling, rows)
        processed = _start_processors(processors, cache, logits)
        stop = stop_array(stop_tokens)
        run = Stream(
            model,
            cache,
            logits,
            1,
            draws,
            stop,
            measure=measure,
            processed=processed,
            short=short,
        )
        programs += run.programs(block)
    return [program.compile for program in programs]
