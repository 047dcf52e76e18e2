"""The decode loops that run on the device: steps of one token per row, and steps of a token
with a draft.

    decode_loop      a token of each row per step
    draft_loop       a token of each row and a draft per step, which the model verifies
    decode_by_layer  `decode_loop` as one program per layer: slower, and compiled in less time

A loop emits tokens into a buffer of `ROOM` tokens until all rows have ended or have reached
their limit; a longer answer calls it again, so that answers of all lengths run one program. The
loop of single tokens has an inner loop that ends when a recent block is full. So a flush
happens between steps, and a step has no condition of its own, for which the host would wait for
a GPU. Caches are donated.

In what follows, a row is *active* until it draws a stop token or has no best logit, and *takes*
a step if it is active and below its limit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.tree_util import register_dataclass

from kvjax.cache.cache import Cache, any_full, attending, flushed
from kvjax.cache.editing import rollback
from kvjax.cache.editing import room as free_room
from kvjax.cache.flushing import flush
from kvjax.compiling import Program
from kvjax.generation.draft_contract import accept, propose
from kvjax.generation.drafts import Draw, Round, accepted
from kvjax.generation.prefilling import Model, kinds_of, like
from kvjax.generation.processors import History, Rules, process
from kvjax.generation.reports import Packed, Report
from kvjax.generation.sampling import Draws, drawing
from kvjax.memory import CONCURRENT, QUICK, commit_together, on_host
from kvjax.numerics.blocks import put_last
from kvjax.policies import Info, Policy
from kvjax.sharding.placement import call_model

ROOM = 512  # tokens that a call of a loop has room for, in each row
# Backends whose conditions the host reads, so that it waits for each step of a loop.
WAITS = ("gpu",)
AHEAD = 4  # steps that the host of `decode_by_layer` may be ahead of the device
# Follows the last token of a row; not a token id, so that it cannot be mistaken for one.
PAD = -1


class LoopInputs(NamedTuple):
    """The inputs that all steps of a call share: how rows draw tokens, and when they end.

    Settings of a row may differ from those of others: `first` and `limit` are i32[] or i32[B],
    `stop` i32[n] or i32[B, n].
    """

    draws: Draws | None  # None: greedy decoding
    first: Any  # tokens that earlier calls emitted, which number the draws
    limit: Any  # tokens that this call may emit, at most `ROOM`
    stop: Any  # stop tokens, then `NO_TOKEN`
    # Rules that change the logits, and the tokens before this call that they count.
    processed: tuple[Rules, History] | None = None


class Loop(NamedTuple):
    """The state of `decode_loop`."""

    step: Array  # i32[] tokens emitted by this call
    cache: Cache
    logits: Array  # f32[B, V]
    tokens: Array  # i32[B, ROOM]
    active: Array  # bool[B] rows that have not ended
    # f32[L] running mean over the decode steps of active rows; [0] if not measured
    attended: Array
    counted: Array  # f32[] row steps in that mean
    log_probabilities: Array | None = None  # f32[B, ROOM] of the tokens; None: not asked for


L = TypeVar("L", Loop, "DraftLoop")


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Flat:
    """A model as its leaves, flattened once: for an nnx module of 32 layers, a call would take
    the host 1 to 2 ms.
    """

    leaves: list[Any]
    tree: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, model: Model) -> Flat:
        return cls(*jax.tree.flatten(model))

    @property
    def module(self) -> Any:
        return jax.tree.unflatten(self.tree, self.leaves)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@register_dataclass
@dataclasses.dataclass(frozen=True)
class FlatLayers:
    """`Flat` for a model whose prompts run layer by layer (`prefilling.Layered`): a call for
    each layer.
    """

    whole: Flat  # the model without its layers
    layers: list[Flat]

    @classmethod
    def of(cls, model: Any) -> FlatLayers:
        whole = Flat.of(model)
        layers = [Flat.of(layer) for layer in model.layers]
        # Without the leaves of layers, at which a call of `begin` or `finish` would look, too.
        of_layers = {id(leaf) for layer in layers for leaf in layer.leaves}
        others = [None if id(leaf) in of_layers else leaf for leaf in whole.leaves]
        return cls(Flat(others, whole.tree), layers)

    @property
    def ends(self) -> FlatLayers:
        """The model for calls of `begin` and `finish` alone."""
        return FlatLayers(self.whole, [])

    def begin(self, *args: Any) -> Any:
        return self.whole.module.begin(*args)

    def finish(self, *args: Any) -> Any:
        return self.whole.module.finish(*args)


@dataclasses.dataclass
class ByLayer:
    """A model for `decode_by_layer`, and what the host knows of its cache."""

    model: FlatLayers
    # The next steps, so many, find no recent block full. The host asks the device at 0.
    steps_without_flush: int = 0


def has_no_best(logits: Array) -> Array:
    """True where logits contain NaN or infinity, or are all -infinity, which masks a token:
    bool[B].
    """
    best = jnp.max(logits, axis=-1)  # NaN if any is
    return ~jnp.isfinite(best)


def check_finite(bad: np.ndarray, when: str) -> None:
    """Raises RuntimeError if a row has no best logit. A non-finite number persists, because the
    cache holds it.
    """
    for row in np.flatnonzero(bad):
        raise RuntimeError(
            f"the model's logits of row {row} are not finite {when}: its weights are damaged, a token id is "
            "outside of its vocabulary, or activations overflowed the dtype; check the checkpoint and the ids, and "
            "load the model in bfloat16 or float32"
        )


def log_probability(logits: Array, tokens: Array, draws: Draws | None) -> Array:
    """The log-probabilities f32[B] or f32[B, T] of tokens, by logits with a last axis V over the
    temperature of each row; that of greedy rows counts as 1.

    >>> logits = jnp.log(jnp.array([[0.25, 0.75]]))
    >>> f"{log_probability(logits, jnp.array([1]), None)[0]:.3f}"
    '-0.288'
    """
    logits = logits.astype(jnp.float32)
    if draws is not None:
        temperature = jnp.asarray(draws.settings.temperature)
        temperature = jnp.where(temperature > 0, temperature, 1.0)
        logits = logits / temperature.reshape(-1, *(1,) * (logits.ndim - 1))
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def count_attended(
    mean: Array, counted: Array, infos: Sequence[Info | None], took: Array
) -> tuple[Array, Array]:
    """Updates the mean tokens read f32[L] by layer with attention, and the number of row steps
    f32[] in it, by one more step.

    `took` bool[..., B] are the rows that took it, with a first axis T for several steps, as in
    the Infos. It is a running mean, because a sum of long contexts over many steps would exceed
    the precision of f32.
    """
    of_layers = [info.attended for info in infos if info is not None]
    read = jnp.stack(
        [attended.astype(jnp.float32).mean(axis=-1) for attended in of_layers]
    )  # [L, ..., B]
    steps = jnp.sum(took, dtype=jnp.int32).astype(jnp.float32)
    counted = counted + steps
    total = jnp.sum(jnp.where(took[None], read, 0.0), axis=tuple(range(1, read.ndim)))
    return mean + (total - mean * steps) / jnp.maximum(counted, 1.0), counted


@partial(
    jax.jit,
    static_argnames=("measure", "exact", "log_probabilities", "single_step"),
    donate_argnames="cache",
    compiler_options=CONCURRENT,
)
def decode_loop(
    model: Model,
    cache: Cache,
    logits: Array,
    active: Array,
    inputs: LoopInputs,
    *,
    measure: bool,
    exact: bool = False,
    log_probabilities: bool = False,
    single_step: bool = False,
) -> tuple[Loop, Packed]:
    """Emits up to `inputs.limit` tokens per row, and reports to the host. A row whose logits
    have no best token ends.

    Args:
      logits: f32[B, V] of the next token of each row.
      active: bool[B], rows that have not ended.
      measure: whether the model reports the tokens read, for `Loop.attended`.
      exact: steps attend to all tokens of the cache, whatever it selects.
      log_probabilities: whether to compute those of the tokens (`log_probability`), before rules
        and filters.
      single_step: emits at most one token, without a loop. A loop keeps the host until its last
        step is done; a step alone leaves it free to prepare the results while a GPU is at work.
    """
    bad = has_no_best(logits)

    def more(s: Loop) -> Array:
        return jnp.any(s.active & (s.step < inputs.limit))

    def emit(s: Loop) -> Loop:
        s, takes, fed = _draw(s, inputs)
        # Keywords that only some models take, for which only some runs ask.
        optional: dict[str, Any] = {"info": True} if measure else {}
        if exact:
            optional |= {"steps": True, "exact": True}
        with flushed():
            new, cache, *infos = call_model(
                model, fed, s.cache, active=takes, last_logits=True, **optional
            )
        s = s._replace(cache=cache)
        return _after(s, takes, fed, new, infos[0] if measure else (), inputs.stop)

    start = _start(cache, logits, active & ~bad, len(attending(cache)) if measure else 0)
    if log_probabilities:
        start = start._replace(log_probabilities=jnp.zeros(start.tokens.shape, jnp.float32))
    if single_step:
        some = more(start).astype(jnp.int32)
        done = emit(start._replace(cache=flush(start.cache)))._replace(step=some)
    else:
        done = _between_flushes(more, start, (more, emit))
    bad = jnp.stack([bad, has_no_best(done.logits)])
    return done, Packed.of(_report(done, done.step, bad))


def without_loop(single_tokens: bool) -> dict[str, bool]:
    """Settings of `decode_loop` for calls of which each emits one token, if `single_tokens` says
    so: no loop where it would keep the host.
    """
    return {"single_step": True} if single_tokens and jax.default_backend() in WAITS else {}


def _report(
    done: Loop | DraftLoop,
    count: Array,
    bad: Any,
    draft_counts: Array | np.ndarray | None = None,
) -> Report:
    """The report of a loop that emitted `count` tokens; `draft_counts` if it drafted any."""
    return Report(
        tokens=done.tokens,
        count=count,
        active=done.active,
        bad=bad,
        attended=done.attended,
        counted=done.counted,
        draft_counts=np.zeros(3, np.int32) if draft_counts is None else draft_counts,
        log_probabilities=done.log_probabilities,
    )


def _between_flushes(
    more: Callable[[L], Array],
    start: L,
    *phases: tuple[Callable[[L], Array], Callable[[L], L]],
) -> L:
    """Runs steps while there is `more`, and flushes full recent blocks between them. A phase is
    a condition and the step to run while it holds; they take turns.

    Each condition makes the host wait for a GPU, and one within the step would copy the arrays
    that it passes on. So steps run in loops that end when a block is full.
    """

    def flush_and_run(s: L) -> L:
        carry = jnp.ones((), bool), s._replace(cache=flush(s.cache))
        for wanted, step in phases:
            carry = _while(wanted, step, carry)
        return carry[1]

    return lax.while_loop(more, flush_and_run, start)


def _while(
    wanted: Callable[[L], Array], step: Callable[[L], L], carry: tuple[Array, L]
) -> tuple[Array, L]:
    """Runs `step` while it is wanted and no recent block is full. The carry says whether one was
    just flushed: then a step runs in any case, so that the loop around comes to an end.
    """

    def ready(carry: tuple[Array, L]) -> Array:
        just_flushed, s = carry
        return wanted(s) & (just_flushed | ~any_full(s.cache))

    def run(carry: tuple[Array, L]) -> tuple[Array, L]:
        _, s = carry
        return jnp.zeros((), bool), step(s)

    return lax.while_loop(ready, run, carry)


def _start(cache: Any, logits: Array, active: Array, measured: int) -> Loop:
    """The loop before its first token; `measured` is the number of layers whose reads it
    counts.
    """
    return Loop(
        step=jnp.zeros((), jnp.int32),
        cache=cache,
        logits=logits,
        tokens=jnp.full((logits.shape[0], ROOM), PAD, jnp.int32),
        active=active,
        attended=jnp.zeros(measured, jnp.float32),
        counted=jnp.zeros((), jnp.float32),
    )


def _draw(s: Loop, inputs: LoopInputs) -> tuple[Loop, Array, Array]:
    """Draws a token of each row into the buffer; also the rows bool[B] that take it, and the
    tokens as i32[B, 1], 0 in other rows.
    """
    takes = s.active & (s.step < inputs.limit)
    process_logits = _processing(inputs)
    draw = drawing(inputs.draws, s.logits.shape[0])
    token = draw(process_logits(s.logits, s.tokens, s.step), inputs.first + s.step)
    tokens = lax.dynamic_update_index_in_dim(
        s.tokens, jnp.where(takes, token, PAD), s.step, axis=1
    )
    if s.log_probabilities is not None:
        found = log_probability(s.logits, token, inputs.draws)
        kept = lax.dynamic_update_index_in_dim(s.log_probabilities, found, s.step, axis=1)
        s = s._replace(log_probabilities=kept)
    return s._replace(tokens=tokens), takes, jnp.where(takes, token, 0)[:, None]


def _after(
    s: Loop, takes: Array, fed: Array, new: Array, infos: Sequence[Info], stop: Array
) -> Loop:
    """The loop after the rows `takes` took the tokens `fed` i32[B, 1], which gave the logits
    `new`.
    """
    attended = s.attended
    counted = s.counted
    if infos:
        attended, counted = count_attended(attended, counted, infos, takes)
    is_stop = jnp.any(fed == stop.reshape(-1, stop.shape[-1]), axis=-1)
    ends = is_stop | has_no_best(new)
    return s._replace(
        step=s.step + 1,
        logits=jnp.where(takes[:, None], new, s.logits),
        active=s.active & ~(takes & ends),
        attended=attended,
        counted=counted,
    )


# ------------------------------------------------------------------ one program per layer


def decode_by_layer(
    by: ByLayer,
    cache: Cache,
    logits: Array,
    active: Array,
    inputs: LoopInputs,
    *,
    measure: bool,
) -> tuple[Loop, Report]:
    """`decode_loop` as programs of one layer each, which compile in less time.

    The host calls one for each layer. It waits for a device only where a recent block may be
    full, and else is at most `AHEAD` steps ahead: when it sees that all rows have ended, some
    steps have run in which no row takes part.
    """
    layers = list(cache.layers)
    ends = by.model.ends
    s, kinds = _begin_by_layer(cache, logits, active, measure)
    # The rows that take each step that the device may still work on.
    running: list[Any] = []
    for i in range(int(np.max(inputs.limit))):
        # Draw the next token of each row and embed it.
        brief = dataclasses.replace(cache, layers=tuple(layers[kind] for kind in kinds))
        drawn, embedded, steps_to_full = _begin_step(ends, s, brief, inputs)
        s, takes, fed, bad = drawn
        x, cos, sin = embedded
        running.append(takes)
        if i == 0:
            bad_before = bad
        elif len(running) > AHEAD or running[0].is_ready():
            some_took = np.any(on_host(running.pop(0)))
            if not some_took:
                break  # all rows had ended

        # Flush when a recent block may be full.
        if by.steps_without_flush == 0:
            by.steps_without_flush = int(on_host(steps_to_full))
            if by.steps_without_flush == 0:
                layers = [_flush_layer(layer) for layer in layers]
                by.steps_without_flush = 1
        by.steps_without_flush -= 1

        infos = []
        for j, layer in enumerate(by.model.layers):
            x, layers[j], info = _step_layer(
                layer, x, cos, sin, layers[j], takes, measure=measure
            )
            if info is not None:
                infos.append(info)
        s, bad_after = _end_step(ends, s, takes, fed, x, infos if measure else [], inputs.stop)
    done = s._replace(cache=dataclasses.replace(cache, layers=tuple(layers)))
    return done, _report(done, done.step, (bad_before, bad_after))


def programs_by_layer(
    by: ByLayer,
    cache: Cache,
    logits: Array,
    active: Array,
    inputs: LoopInputs,
    *,
    measure: bool,
) -> list[Program]:
    """The programs of `decode_by_layer`, but those of a flush; the model may hold shapes."""
    model = by.model
    ends = model.ends
    s, kinds = _begin_by_layer(cache, logits, active, measure)
    brief = dataclasses.replace(cache, layers=tuple(cache.layers[kind] for kind in kinds))
    begin = Program(_begin_step, (ends, s, brief, inputs), {})
    drawn, embedded, _ = like(cache, begin.results())
    s, takes, fed, _ = drawn
    x, cos, sin = embedded

    steps: list[Program] = []
    info: Any = None
    for kind in kinds_of(model, cache):
        call = model.layers[kind], x, cos, sin, cache.layers[kind], takes
        step = Program(_step_layer, call, {"measure": measure})
        steps.append(step)
        info = like(cache, step.results()[2]) or info
    infos = [info] * len(attending(cache)) if measure else []
    end = Program(_end_step, (ends, s, takes, fed, x, infos, inputs.stop), {})
    return [begin, *steps, end]


def _begin_by_layer(
    cache: Cache, logits: Array, active: Array, measure: bool
) -> tuple[Loop, list[int]]:
    """The loop before its first token, without a cache, and the numbers of layers of which one
    fills when any does.
    """
    # NumPy arrays, which no program has to make.
    step: Any = np.int32(0)
    no_cache: Any = ()
    tokens: Any = np.full((logits.shape[0], ROOM), PAD, np.int32)
    attended: Any = np.zeros(len(attending(cache)) if measure else 0, np.float32)
    counted: Any = np.float32(0)
    start = Loop(step, no_cache, logits, tokens, active, attended, counted)
    _, s = commit_together((cache, jax.device_put(start)))
    first = {
        (layer.policy, layer.spec): i for i, layer in reversed(list(enumerate(cache.layers)))
    }
    return s, list(first.values())


@partial(jax.jit, compiler_options=QUICK)
def _begin_step(
    model: FlatLayers, s: Loop, cache: Cache, inputs: LoopInputs
) -> tuple[Any, Any, Array]:
    """Draws and embeds; also `_steps_to_full` of `cache`, which has one layer of each policy."""
    bad = has_no_best(s.logits)
    stored = cache.length
    s, takes, fed = _draw(s._replace(active=s.active & ~bad), inputs)
    embedded = model.begin(fed, stored, stored + takes.astype(jnp.int32))
    return (s, takes, fed, bad), embedded, _steps_to_full(cache)


def _steps_to_full(cache: Cache) -> Array:
    """0 if a recent block is full, else a number of steps before which none can be: i32[]."""
    steps = [jnp.int32(np.iinfo(np.int32).max)]
    for layer in cache.layers:
        if layer.full_rows() is None:
            continue
        # A policy that does not count its free slots may be full after any step.
        counts_free = type(layer.policy).free is not Policy.free
        steps.append(jnp.min(layer.policy.free(layer.state)) if counts_free else jnp.int32(1))
    fewest = jnp.maximum(functools.reduce(jnp.minimum, steps), 1)
    return jnp.where(any_full(cache), 0, fewest)


@partial(
    jax.jit,
    static_argnames="measure",
    donate_argnames=("x", "cache"),
    compiler_options=CONCURRENT | QUICK,
)
def _step_layer(
    layer: Flat, x: Array, cos: Any, sin: Any, cache: Any, active: Array, *, measure: bool
) -> Any:
    """x, the cache and, with `measure`, the Info of one layer in a decode step."""
    with flushed():
        x, cache, info = layer(
            x, cos, sin, cache, lengths=None, active=active, first_chunk=False
        )
    if info is None or not measure:
        return x, cache, None
    return x, cache, Info(info.attended, None)


@partial(jax.jit, donate_argnames="s", compiler_options=QUICK)
def _end_step(
    model: FlatLayers,
    s: Loop,
    takes: Array,
    fed: Array,
    x: Array,
    infos: Sequence[Info],
    stop: Array,
) -> tuple[Loop, Array]:
    """The loop after a step whose last layer returned `x`, and the rows whose logits now have no
    best token.
    """
    after = _after(s, takes, fed, model.finish(x, None), infos, stop)
    # A step after the last one, in which no row takes part, emits nothing.
    emitted = jnp.any(takes).astype(jnp.int32)
    after = after._replace(step=s.step + emitted)
    return after, has_no_best(after.logits)


_flush_layer = jax.jit(flush, donate_argnums=0)


def _processing(inputs: LoopInputs) -> Callable[[Array, Array, Array], Array]:
    """Makes the function (logits f32[B, V], tokens i32[B, ROOM], n) that changes the logits
    after n of the tokens, by the rules of a call.
    """
    if inputs.processed is None:
        return lambda logits, tokens, n: logits
    rules, before = inputs.processed

    def process_logits(logits: Array, tokens: Array, n: Array) -> Array:
        history = before.with_new(tokens, n)
        return process(rules, history, logits, inputs.first + n, inputs.stop)

    return process_logits


# ------------------------------------------------------------------ with drafts


class DraftLoop(NamedTuple):
    """The state of `draft_loop`."""

    emitted: Array  # i32[B] tokens of each row that this call emitted
    cache: Cache
    logits: Array  # f32[B, V]
    tokens: Array  # i32[B, ROOM]
    active: Array  # bool[B] rows that have not ended
    attended: Array  # as in Loop, mean over the tokens that were accepted
    counted: Array
    state: Any  # of the drafter
    draft_counts: Array  # i32[3] steps of rows, tokens drafted, tokens accepted
    log_probabilities: Array | None = None  # as in Loop


@partial(
    jax.jit,
    static_argnames=("measure", "log_probabilities"),
    donate_argnames=("cache", "state"),
    compiler_options=CONCURRENT,
)
def draft_loop(
    model: Model,
    cache: Cache,
    logits: Array,
    active: Array,
    inputs: LoopInputs,
    drafter: Any,
    state: Any,
    *,
    measure: bool,
    log_probabilities: bool = False,
) -> tuple[DraftLoop, Packed]:
    """`decode_loop` in rounds of several tokens: the next token of each row and a draft of
    those after it. A round in which no row drafts is a step of one token. `log_probabilities`
    are those of the steps that verify.

    The `drafter` comes without its `state`, which is donated.
    """
    bad = has_no_best(logits)
    B = logits.shape[0]
    tokens = jnp.full((B, ROOM), PAD, jnp.int32)
    start = DraftLoop(
        emitted=jnp.zeros(B, jnp.int32),
        cache=cache,
        logits=logits,
        tokens=tokens,
        active=jnp.asarray(active) & ~bad,
        attended=jnp.zeros(len(attending(cache)) if measure else 0, jnp.float32),
        counted=jnp.zeros((), jnp.float32),
        state=state,
        draft_counts=jnp.zeros(3, jnp.int32),
        log_probabilities=jnp.zeros(tokens.shape, jnp.float32) if log_probabilities else None,
    )
    rounds = _Rounds(
        model=model,
        drafter=drafter,
        inputs=inputs,
        draw_token=drawing(inputs.draws, B),
        process_logits=None if inputs.processed is None else _processing(inputs),
        measure=measure,
    )
    done = _between_flushes(rounds.more, start, *rounds.phases(start))
    bad = jnp.stack([bad, has_no_best(done.logits)])
    return done, Packed.of(_report(done, done.emitted, bad, done.draft_counts))


class Fed(NamedTuple):
    """Tokens of each row that a step of the model was fed, and its results."""

    tokens: Array  # i32[B, T]
    logits: Array  # f32[B, T, V] after each of them
    cache: Cache
    infos: Sequence[Info]  # of layers with attention; none if not measured


@dataclasses.dataclass(frozen=True)
class _Rounds:
    """The rounds of a draft loop, and what they share."""

    model: Model
    drafter: Any  # without its state
    inputs: LoopInputs
    # (logits f32[B, V], i) -> i32[B]: draws token i of each row
    draw_token: Callable[[Array, Array], Array]
    # (logits f32[B, V], tokens i32[B, ROOM], n) -> the logits after n of the tokens; None: no rules
    process_logits: Callable[[Array, Array, Array], Array] | None
    measure: bool

    def more(self, s: DraftLoop) -> Array:
        return jnp.any(self.running(s))

    def phases(self, s: DraftLoop) -> list[tuple[Any, Any]]:
        """Rounds with drafts while they pay, and steps of one token while they do not."""
        if self.pays(s) is None:
            return [(self.more, self.round)]

        def drafts(s: DraftLoop) -> Array:
            return self.more(s) & cast(Array, self.pays(s))

        def steps(s: DraftLoop) -> Array:
            return self.more(s) & ~cast(Array, self.pays(s))

        return [(drafts, self.round), (steps, self.step)]

    def round(self, s: DraftLoop) -> DraftLoop:
        """Draws the next token of each row, drafts those after it, and keeps the tokens of the
        draft that the model draws, too.
        """
        now = self.begin(s)
        proposal = propose(self.drafter.with_state(s.state), now)
        drafted = jnp.where(now.active, jnp.clip(proposal.drafted, 0, now.most), 0)
        fed = jnp.concatenate([now.token[:, None], proposal.tokens], axis=1)
        verified = self.feed(proposal.cache, fed, jnp.where(now.active, 1 + drafted, 0))
        right = self.accepted(now, fed, drafted, verified.logits)
        return self.keep(s, now, proposal.drafter, verified, drafted, right)

    def step(self, s: DraftLoop) -> DraftLoop:
        """Draws the next token of each row, and feeds it alone."""
        now = self.begin(s)
        none = jnp.zeros_like(now.token)
        fed = self.feed(now.cache, now.token[:, None], now.active.astype(jnp.int32))
        return self.keep(s, now, self.drafter.with_state(s.state), fed, none, none)

    def running(self, s: DraftLoop) -> Array:
        """bool[B]: rows that have not ended and still want tokens."""
        return s.active & (s.emitted < self.inputs.limit)

    def most(self, s: DraftLoop) -> Array:
        """i32[B]: tokens that may be drafted: no more than fit before the next flush, and than
        are still wanted.
        """
        after_next = jnp.minimum(free_room(s.cache), self.inputs.limit - s.emitted) - 1
        return jnp.where(self.running(s), jnp.maximum(after_next, 0), 0)

    def pays(self, s: DraftLoop) -> Array | None:
        return self.drafter.with_state(s.state).pays(self.running(s), self.most(s))

    def begin(self, s: DraftLoop) -> Round:
        """Draws the next token of each row."""
        active = self.running(s)
        draw = self.draw_after(s)
        token = draw(s.logits, jnp.zeros((s.logits.shape[0], 1), jnp.int32), 0)
        return Round(
            model=self.model.module if isinstance(self.model, Flat) else self.model,
            cache=s.cache,
            token=jnp.where(active, token, 0),
            active=active,
            most=self.most(s),
            draw=draw,
        )

    def draw_after(self, s: DraftLoop) -> Draw:
        """Makes the function that draws the token after the first i of the tokens `fed`, which
        follow those emitted.
        """

        def draw(logits: Array, fed: Array, i: Array | int) -> Array:
            if self.process_logits is not None:
                place = s.emitted[:, None] + jnp.arange(fed.shape[1], dtype=jnp.int32)[None]
                tokens = put_last(s.tokens, place, fed)
                logits = self.process_logits(logits, tokens, s.emitted + i)
            return self.draw_token(logits, self.inputs.first + s.emitted + i)

        return draw

    def feed(self, cache: Cache, tokens: Array, lengths: Array) -> Fed:
        """Feeds the first `lengths` i32[B] of tokens i32[B, T] in one step of the model."""
        # Keywords that only some models take, for which only some runs ask.
        optional: dict[str, Any] = {"exact": True} if self.drafter.exact else {}
        if self.measure:
            optional["info"] = True
        with flushed():
            logits, cache, *infos = call_model(
                self.model,
                tokens,
                cache,
                lengths=lengths,
                steps=True,
                **optional,
            )
        return Fed(tokens, logits, cache, infos[0] if self.measure else ())

    def accepted(self, now: Round, fed: Array, drafted: Array, new: Array) -> Array:
        """i32[B]: tokens of the draft that the model draws too, up to one that ends the row, or
        after which there is no best token.
        """
        T = fed.shape[1]
        if self.process_logits is None:
            places = jnp.arange(1, T, dtype=jnp.int32)
            drawn = jax.vmap(now.draw, (1, None, 0), 1)(new[:, :-1], fed, places)
        else:  # rules have conditions, of which vmap would compute both sides
            drawn = jnp.stack([now.draw(new[:, i - 1], fed, i) for i in range(1, T)], axis=1)
        last = (self.ends(fed) | has_no_best(new))[:, :-1]
        right = accepted(drawn, fed[:, 1:], drafted, last)
        return jnp.where(now.active, right, 0)

    def ends(self, fed: Array) -> Array:
        """bool[B, T]: tokens that end their row."""
        stop = self.inputs.stop
        return jnp.any(fed[..., None] == stop.reshape(-1, 1, stop.shape[-1]), axis=-1)

    def keep(
        self,
        s: DraftLoop,
        now: Round,
        drafter: Any,
        fed: Fed,
        drafted: Array,
        right: Array,
    ) -> DraftLoop:
        """The loop after a round: keeps the next token of each row and the first `right` i32[B]
        of its draft.
        """
        place = jnp.arange(fed.tokens.shape[1], dtype=jnp.int32)[None]
        taken = jnp.where(now.active, 1 + right, 0)
        kept = place < taken[:, None]
        # Where each token goes in the buffer; past its end for those that are not kept.
        at = jnp.where(kept, s.emitted[:, None] + place, ROOM)
        # Logits after the last kept token.
        after = jnp.take_along_axis(fed.logits, right[:, None, None], axis=1)[:, 0]
        drew_stop = jnp.any(self.ends(fed.tokens) & kept, axis=1)
        ended = drew_stop | (now.active & has_no_best(after))

        attended = s.attended
        counted = s.counted
        if self.measure:
            attended, counted = count_attended(attended, counted, fed.infos, kept.T)
        new_counts = [jnp.sum(a, dtype=jnp.int32) for a in (now.active, drafted, right)]
        log_probabilities = s.log_probabilities
        if log_probabilities is not None:
            before = jnp.concatenate([s.logits[:, None], fed.logits[:, :-1]], axis=1)
            found = log_probability(before, fed.tokens, self.inputs.draws)
            log_probabilities = put_last(log_probabilities, at, found)
        return DraftLoop(
            emitted=s.emitted + taken,
            cache=rollback(fed.cache, s.cache.length + taken),
            logits=jnp.where(now.active[:, None], after, s.logits),
            tokens=put_last(s.tokens, at, fed.tokens),
            active=s.active & ~ended,
            attended=attended,
            counted=counted,
            state=accept(drafter, fed.tokens, taken, drafted),
            draft_counts=s.draft_counts + jnp.stack(new_counts),
            log_probabilities=log_probabilities,
        )
