"""The decode loops that run on the device: steps of one token per row, and steps of a token
with a draft.

A loop emits tokens into a buffer of `ROOM` tokens until all rows have ended or have reached
their limit; a longer answer calls it again, so that answers of all lengths run one program. The
loop of single tokens has an inner loop that ends when a recent block is full. So a flush
happens between steps, and a step has no condition of its own, for which the host would wait for
a GPU. Caches are donated.
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
# backends whose conditions the host reads, so that it waits for each step of a loop
WAITS = ("gpu",)
AHEAD = 4  # steps that the host may be ahead of the device, where it calls one program for each layer
# follows the last token of a row; not a token id, so that it cannot be mistaken for one
PAD = -1


class Loop(NamedTuple):
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
        whole, layers = Flat.of(model), [Flat.of(layer) for layer in model.layers]
        inside = {
            id(leaf) for layer in layers for leaf in layer.leaves
        }  # which a call of the ends would look at, too
        return cls(
            Flat([None if id(leaf) in inside else leaf for leaf in whole.leaves], whole.tree),
            layers,
        )

    def begin(self, *args: Any) -> Any:
        return self.whole.module.begin(*args)

    def finish(self, *args: Any) -> Any:
        return self.whole.module.finish(*args)


@dataclasses.dataclass
class ByLayer:
    """A model for `decode_by_layer`, and what the host knows of its cache."""

    model: FlatLayers
    # steps from here on before which no recent block can be full
    sure: int = 0


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
    seen = jnp.stack(
        [info.attended.astype(jnp.float32).mean(axis=-1) for info in infos if info is not None]
    )  # [L, ..., B]
    steps = jnp.sum(took, dtype=jnp.int32).astype(jnp.float32)
    counted = counted + steps
    total = jnp.sum(jnp.where(took[None], seen, 0.0), axis=tuple(range(1, seen.ndim)))
    return mean + (total - mean * steps) / jnp.maximum(counted, 1.0), counted


@partial(
    jax.jit,
    static_argnames=("measure", "exact", "log_probabilities", "alone"),
    donate_argnames="cache",
    compiler_options=CONCURRENT,
)
def decode_loop(
    model: Model,
    cache: Cache,
    logits: Array,
    active: Array,
    draws: Draws | None,
    first: Array,
    limit: Array,
    stop: Array,
    processed: tuple[Rules, History] | None = None,
    *,
    measure: bool,
    exact: bool = False,
    log_probabilities: bool = False,
    alone: bool = False,
) -> tuple[Loop, Packed]:
    """Emits up to `limit` <= `ROOM` tokens per row, and reports to the host. A row whose logits
    have no best token ends.

    `draws` is None for greedy decoding, and `first` the number of tokens that earlier calls
    emitted. Each row may have its own: `limit` and `first` are i32[] or i32[B], the stop tokens
    `stop` i32[n] or i32[B, n]. `processed` has rules that change the logits, and the tokens
    before this call. With `exact`, steps attend to all tokens of the cache.
    `log_probabilities` are those of the tokens (`log_probability`), before rules and filters.

    With `alone` it emits at most one token, without a loop. A loop keeps the host until its last
    step is done; a step alone leaves it free to prepare the results while a GPU is at work.
    """
    bad = has_no_best(logits)

    def more(s: Loop) -> Array:
        return jnp.any(s.active & (s.step < limit))

    def emit(s: Loop) -> Loop:
        s, active, fed = _draw(s, draws, first, limit, stop, processed)
        told: Any = {"info": True} if measure else {}
        if exact:
            told |= {"steps": True, "exact": True}
        with flushed():
            new, cache, *infos = call_model(
                model, fed, s.cache, active=active, last_logits=True, **told
            )
        return _after(
            s._replace(cache=cache), active, fed, new, infos[0] if measure else (), stop
        )

    start = _start(cache, logits, active & ~bad, len(attending(cache)) if measure else 0)
    if log_probabilities:
        start = start._replace(log_probabilities=jnp.zeros(start.tokens.shape, jnp.float32))
    if alone:
        some = more(start).astype(jnp.int32)
        done = emit(start._replace(cache=flush(start.cache)))._replace(step=some)
    else:
        done = _between_flushes(more, start, (more, emit))
    bad = jnp.stack([bad, has_no_best(done.logits)])
    return done, Packed.of(_report(done, done.step, bad))


def without_loop(alone: bool) -> dict[str, bool]:
    """Settings of `decode_loop` for calls that emit one token, if `alone` says that all do: no
    loop where it would keep the host.
    """
    return {"alone": True} if alone and jax.default_backend() in WAITS else {}


def _report(
    done: Loop | DraftLoop, count: Array, bad: Any, numbers: Array | np.ndarray | None = None
) -> Report:
    """The report of a loop that emitted `count` tokens; `numbers` are of its drafts, if it has
    any.
    """
    return Report(
        tokens=done.tokens,
        count=count,
        active=done.active,
        bad=bad,
        attended=done.attended,
        counted=done.counted,
        numbers=np.zeros(3, np.int32) if numbers is None else numbers,
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
    just flushed: then a step runs in any case, so that the loop around comes to an end."""

    def ready(carry: tuple[Array, L]) -> Array:
        just_flushed, s = carry
        return wanted(s) & (just_flushed | ~any_full(s.cache))

    return lax.while_loop(ready, lambda carry: (jnp.zeros((), bool), step(carry[1])), carry)


def _start(cache: Any, logits: Array, active: Array, measured: int) -> Loop:
    tokens, mean = (
        jnp.full((logits.shape[0], ROOM), PAD, jnp.int32),
        jnp.zeros(measured, jnp.float32),
    )
    return Loop(
        jnp.zeros((), jnp.int32),
        cache,
        logits,
        tokens,
        active,
        mean,
        jnp.zeros((), jnp.float32),
    )


def _draw(
    s: Loop,
    draws: Draws | None,
    first: Array,
    limit: Array,
    stop: Array,
    processed: tuple[Rules, History] | None,
) -> tuple[Loop, Array, Array]:
    """Draws a token of each row into the buffer; also the rows that take it, and the tokens as
    i32[B, 1].
    """
    active, ruled = s.active & (s.step < limit), _ruling(processed, first, stop)
    token = drawing(draws, s.logits.shape[0])(ruled(s.logits, s.tokens, s.step), first + s.step)
    tokens = lax.dynamic_update_index_in_dim(
        s.tokens, jnp.where(active, token, PAD), s.step, axis=1
    )
    if s.log_probabilities is not None:
        found = log_probability(s.logits, token, draws)
        kept = lax.dynamic_update_index_in_dim(s.log_probabilities, found, s.step, axis=1)
        s = s._replace(log_probabilities=kept)
    return s._replace(tokens=tokens), active, jnp.where(active, token, 0)[:, None]


def _after(
    s: Loop, active: Array, fed: Array, new: Array, infos: Sequence[Info], stop: Array
) -> Loop:
    """The loop after the rows `active` took the tokens `fed` i32[B, 1], which gave the logits
    `new`.
    """
    attended, counted = (
        count_attended(s.attended, s.counted, infos, active)
        if infos
        else (s.attended, s.counted)
    )
    ends = jnp.any(fed == stop.reshape(-1, stop.shape[-1]), axis=-1) | has_no_best(new)
    return s._replace(
        step=s.step + 1,
        logits=jnp.where(active[:, None], new, s.logits),
        active=s.active & ~(active & ends),
        attended=attended,
        counted=counted,
    )


@partial(jax.jit, compiler_options=QUICK)
def _begin_step(
    model: FlatLayers, s: Loop, cache: Cache, *given: Any
) -> tuple[Any, Any, Array]:
    """Draws and embeds; also `_steps_to_full` of `cache`, which has one layer of each policy."""
    bad = has_no_best(s.logits)
    stored = cache.length
    s, active, fed = _draw(s._replace(active=s.active & ~bad), *given)
    embedded = model.begin(fed, stored, stored + active.astype(jnp.int32))
    return (s, active, fed, bad), embedded, _steps_to_full(cache)


def _steps_to_full(cache: Cache) -> Array:
    """0 if a recent block is full, else a number of steps before which none can be: i32[]."""
    steps = [jnp.int32(np.iinfo(np.int32).max)]
    for layer in cache.layers:
        if layer.full_rows() is not None:
            counts = type(layer.policy).free is not Policy.free
            steps.append(jnp.min(layer.policy.free(layer.state)) if counts else jnp.int32(1))
    return jnp.where(any_full(cache), 0, jnp.maximum(functools.reduce(jnp.minimum, steps), 1))


@partial(
    jax.jit,
    static_argnames="measure",
    donate_argnames=("x", "cache"),
    compiler_options=CONCURRENT | QUICK,
)
def _step_layer(
    layer: Flat, x: Array, cos: Any, sin: Any, cache: Any, active: Array, *, measure: bool
) -> Any:
    with flushed():
        x, cache, info = layer(
            x, cos, sin, cache, lengths=None, active=active, first_chunk=False
        )
    seen = info if info is None or not measure else Info(info.attended, None)
    return x, cache, seen if measure else None


@partial(jax.jit, donate_argnames="s", compiler_options=QUICK)
def _end_step(
    model: FlatLayers,
    s: Loop,
    active: Array,
    fed: Array,
    x: Array,
    infos: Sequence[Info],
    stop: Array,
) -> tuple[Loop, Array]:
    after = _after(s, active, fed, model.finish(x, None), infos, stop)
    after = after._replace(
        step=s.step + jnp.any(active).astype(jnp.int32)
    )  # a step after the last one emits nothing
    return after, has_no_best(after.logits)


_flush_layer = jax.jit(flush, donate_argnums=0)


def _begin_by_layer(
    cache: Cache, logits: Array, active: Array, measure: bool
) -> tuple[Loop, list[int]]:
    """The loop before its first token, and the numbers of layers of which one fills when any
    does.
    """
    mean = np.zeros(len(attending(cache)) if measure else 0, np.float32)
    tokens, zero = np.full((logits.shape[0], ROOM), PAD, np.int32), np.int32(0)
    start: Any = zero, (), logits, tokens, np.asarray(active), mean, np.float32(0)
    s = Loop(*jax.device_put(start))
    first = {
        (layer.policy, layer.spec): i for i, layer in reversed(list(enumerate(cache.layers)))
    }
    return commit_together((cache, s))[1], list(first.values())


def decode_by_layer(
    by: ByLayer, cache: Cache, logits: Array, active: Array, *given: Any, measure: bool
) -> tuple[Loop, Report]:
    """`decode_loop`, called with `processed`, as programs of one layer each, which compile in
    less time.

    The host calls one for each layer. It waits for a device only where a recent block may be
    full, and else is at most `AHEAD` steps ahead: when it sees that all rows have ended, some
    steps have run in which no row takes part.
    """
    limit, stop = given[2], given[3]
    layers = list(cache.layers)
    ends = FlatLayers(by.model.whole, [])
    s, kinds = _begin_by_layer(cache, logits, active, measure)
    running: list[Any] = []  # of each step that the device may still work on, the active rows
    for i in range(int(np.max(limit))):
        # Draw the next token of each row and embed it.
        brief = dataclasses.replace(cache, layers=tuple(layers[kind] for kind in kinds))
        drawn, embedded, steps_to_full = _begin_step(ends, s, brief, *given)
        s, taken, fed, bad = drawn
        x, cos, sin = embedded
        running.append(taken)
        if i == 0:
            before = bad
        elif (len(running) > AHEAD or running[0].is_ready()) and not np.any(
            on_host(running.pop(0))
        ):
            break  # all rows had ended

        # Flush when a recent block may be full.
        if by.sure == 0:
            by.sure = int(on_host(steps_to_full))
            if by.sure == 0:
                layers = [_flush_layer(layer) for layer in layers]
                by.sure = 1
        by.sure -= 1

        infos = []
        for j, layer in enumerate(by.model.layers):
            x, layers[j], info = _step_layer(
                layer, x, cos, sin, layers[j], taken, measure=measure
            )
            if info is not None:
                infos.append(info)
        s, after = _end_step(ends, s, taken, fed, x, infos if measure else [], stop)
    done = s._replace(cache=dataclasses.replace(cache, layers=tuple(layers)))
    return done, _report(done, done.step, (before, after))


def programs_by_layer(
    by: ByLayer, cache: Cache, logits: Array, active: Array, *given: Any, measure: bool
) -> list[Program]:
    """The programs of `decode_by_layer`, but those of a flush; the model may hold shapes."""
    model, ends = by.model, FlatLayers(by.model.whole, [])
    s, kinds = _begin_by_layer(cache, logits, active, measure)
    brief = dataclasses.replace(cache, layers=tuple(cache.layers[kind] for kind in kinds))
    begin = Program(_begin_step, (ends, s, brief, *given), {})
    found = [begin]
    (s, taken, fed, _), (x, cos, sin), _ = like(cache, begin.results())
    info: Any = None
    for kind in kinds_of(model, cache):
        call = model.layers[kind], x, cos, sin, cache.layers[kind], taken
        step = Program(_step_layer, call, {"measure": measure})
        found.append(step)
        info = like(cache, step.results()[2]) or info
    infos = [info] * len(attending(cache))
    found.append(
        Program(_end_step, (ends, s, taken, fed, x, infos if measure else [], given[3]), {})
    )
    return found


def _ruling(
    processed: tuple[Rules, History] | None, first: Array, stop: Array
) -> Callable[[Array, Array, Array], Array]:
    """Makes the function (logits f32[B, V], tokens i32[B, ROOM], n) that changes the logits
    after n of the tokens.
    """
    if processed is None:
        return lambda logits, tokens, n: logits
    rules, before = processed
    return lambda logits, tokens, n: process(
        rules, before.with_new(tokens, n), logits, first + n, stop
    )


class DraftLoop(NamedTuple):
    emitted: Array  # i32[B] tokens of each row that this call emitted
    cache: Cache
    logits: Array  # f32[B, V]
    tokens: Array  # i32[B, ROOM]
    active: Array  # bool[B] rows that have not ended
    attended: Array  # as in Loop, mean over the tokens that were accepted
    counted: Array
    state: Any  # of the drafter
    numbers: Array  # i32[3] steps of a row, tokens drafted, tokens accepted
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
    draws: Draws | None,
    first: Array,
    limit: Array,
    stop: Array,
    drafter: Any,
    state: Any,
    processed: tuple[Rules, History] | None = None,
    *,
    measure: bool,
    log_probabilities: bool = False,
) -> tuple[DraftLoop, Packed]:
    """`decode_loop` in rounds of several tokens: the next token of each row and a draft of
    those after it. A round in which no row drafts is a step of one token. `log_probabilities`
    are those of the steps that verify.
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
        numbers=jnp.zeros(3, jnp.int32),
        log_probabilities=jnp.zeros(tokens.shape, jnp.float32) if log_probabilities else None,
    )
    rounds = _Rounds(
        model=model,
        drafter=drafter,
        draws=draws,
        draw=drawing(draws, B),
        ruled=None if processed is None else _ruling(processed, first, stop),
        first=first,
        limit=limit,
        stop=stop,
        measure=measure,
    )
    done = _between_flushes(rounds.more, start, *rounds.phases(start))
    bad = jnp.stack([bad, has_no_best(done.logits)])
    return done, Packed.of(_report(done, done.emitted, bad, done.numbers))


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
    draws: Draws | None
    draw: Callable[[Array, Array], Array]  # from logits, for a number of the text's tokens
    # changes logits f32[B, V] after n of the tokens i32[B, ROOM]
    ruled: Callable[[Array, Array, Array], Array] | None
    first: Array
    limit: Array
    stop: Array
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
        return s.active & (s.emitted < self.limit)

    def most(self, s: DraftLoop) -> Array:
        """i32[B]: tokens that may be drafted: no more than fit before the next flush, and than
        are still wanted.
        """
        after_next = jnp.minimum(free_room(s.cache), self.limit - s.emitted) - 1
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
            if self.ruled is not None:
                place = s.emitted[:, None] + jnp.arange(fed.shape[1], dtype=jnp.int32)[None]
                logits = self.ruled(logits, put_last(s.tokens, place, fed), s.emitted + i)
            return self.draw(logits, self.first + s.emitted + i)

        return draw

    def feed(self, cache: Cache, tokens: Array, lengths: Array) -> Fed:
        """Feeds the first `lengths` i32[B] of tokens i32[B, T] in one step of the model."""
        told: dict[str, Any] = {"exact": True} if self.drafter.exact else {}
        if self.measure:
            told["info"] = True
        with flushed():
            logits, cache, *infos = call_model(
                self.model,
                tokens,
                cache,
                lengths=lengths,
                steps=True,
                **told,
            )
        return Fed(tokens, logits, cache, infos[0] if self.measure else ())

    def accepted(self, now: Round, fed: Array, drafted: Array, new: Array) -> Array:
        """i32[B]: tokens of the draft that the model draws too, up to one that ends the row, or
        after which there is no best token.
        """
        T = fed.shape[1]
        if self.ruled is None:
            places = jnp.arange(1, T, dtype=jnp.int32)
            drawn = jax.vmap(now.draw, (1, None, 0), 1)(new[:, :-1], fed, places)
        else:  # rules have conditions, of which vmap would compute both sides
            drawn = jnp.stack([now.draw(new[:, i - 1], fed, i) for i in range(1, T)], axis=1)
        last = (self.ends(fed) | has_no_best(new))[:, :-1]
        right = accepted(drawn, fed[:, 1:], drafted, last)
        return jnp.where(now.active, right, 0)

    def ends(self, fed: Array) -> Array:
        """bool[B, T]: tokens that end their row."""
        return jnp.any(fed[..., None] == self.stop.reshape(-1, 1, self.stop.shape[-1]), axis=-1)

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
        at = jnp.where(kept, s.emitted[:, None] + place, ROOM)
        after = jnp.take_along_axis(fed.logits, right[:, None, None], axis=1)[:, 0]
        ended = jnp.any(self.ends(fed.tokens) & kept, axis=1) | (
            now.active & has_no_best(after)
        )
        attended, counted = s.attended, s.counted
        if self.measure:
            attended, counted = count_attended(attended, counted, fed.infos, kept.T)
        numbers = [jnp.sum(a, dtype=jnp.int32) for a in (now.active, drafted, right)]
        log_probabilities = s.log_probabilities
        if log_probabilities is not None:
            before = jnp.concatenate([s.logits[:, None], fed.logits[:, :-1]], axis=1)
            found = log_probability(before, fed.tokens, self.draws)
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
            numbers=s.numbers + jnp.stack(numbers),
            log_probabilities=log_probabilities,
        )
