"""Work that threads do while the weights of a model are read: the empty cache and the programs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from kvjax.cli.job import Job
from kvjax.cli.terminal import say

if TYPE_CHECKING:
    from kvjax import Cache
    from kvjax.compiling import Clock
    from kvjax.models import Decoder

THREADS = 32
TURN = 0.0005  # seconds for which a thread runs Python while another waits
SILENCE = 2.0  # seconds of compiling after which a line says what takes the time
# Seconds that a program of one layer or none takes to compile, on a CPU and on a GPU, and those
# that each layer of the loop of an answer adds if the answer is not short.
EACH_PROGRAM_ON_CPU = 0.7
EACH_PROGRAM_ON_GPU = 1.5
EACH_LAYER = 0.4
# The parts of a program's seconds, by the words of a summary.
EVENTS = {
    "tracing": "/jax/core/compile/jaxpr_trace_duration",
    "lowering": "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "XLA or the disk": "/jax/core/compile/backend_compile_duration",
}


class Compiled(NamedTuple):
    """A program that has compiled."""

    clock: Clock  # the seconds that it took, by what took them
    ended: float  # `time.perf_counter`


class Ahead:
    """The programs of a job and the empty cache that they take, which threads make while
    weights are read. `block` is that of the job's stream: tokens of a call.
    """

    def __init__(self, job: Job, *, block: int, silent: bool) -> None:
        self.started = time.perf_counter()
        self.made = 0.0  # when the cache was there
        # A line about what takes the time, SILENCE seconds after somebody waits for it.
        self.telling = threading.Timer(SILENCE, self._tell)
        self.telling.daemon = True
        self._job = job
        self._block = block
        self._silent = silent
        self._pool = ThreadPoolExecutor(THREADS, "ahead")
        self.submit = self._pool.submit
        self._cache: Future[Cache] | None = None
        # The programs that read the prompt, and those of decode steps, once they are known.
        self._prompt: Future[list[Future[Compiled]]] | None = None
        self._steps: Future[list[Future[Compiled]]] | None = None

    def begin(self, shapes: Decoder) -> None:
        """Starts to make the cache, and to compile for a model of these shapes."""
        self.started = time.perf_counter()
        self._cache = self._pool.submit(self._empty)
        if self._job.compiles_ahead:
            cache = self._pool.submit(self._abstract)
            self._prompt = self._pool.submit(self._compile_prompt, shapes, cache)
            self._steps = self._pool.submit(self._compile_steps, shapes, cache)

    def cache(self) -> Cache:
        """The empty cache. If there was no memory for it while weights were read, it is made
        again.
        """
        assert self._cache is not None
        if self._cache.exception() is not None:
            self._cache = self._pool.submit(self._empty)
        return self._cache.result()

    def wait(self, *, prompt_only: bool = False) -> float:
        """Returns when all programs are compiled, or those of the prompt, and the seconds that
        took.

        Unless this is silent, a line says what takes the time, if it takes some.
        """
        told = self.telling.is_alive() or self.telling.finished.is_set()
        if not self._silent and not told:
            self.telling.start()
        programs = _of(self._prompt) if prompt_only else self._programs
        ends = [one.result().ended for one in programs]
        if ends and not prompt_only:
            self.telling.cancel()
        return max(ends, default=self.started) - self.started

    def summary(self) -> str:
        """The seconds of all programs, by what took them."""
        clocks = [one.result().clock for one in self._programs]
        parts = []
        for words, event in EVENTS.items():
            seconds = sum(clock.parts.get(event, 0.0) for clock in clocks)
            parts.append(f"{words} {seconds:.2f}")
        return f"{len(clocks)} programs in threads: {', '.join(parts)} s of all threads"

    def _empty(self) -> Cache:
        import jax

        cache = jax.block_until_ready(self._job.empty())
        self.made = time.perf_counter()
        return cache

    def _abstract(self) -> Cache:
        """The empty cache, without its memory where programs depend on no more than that."""
        from kvjax.generation.streaming import abstract_cache

        return abstract_cache(self._job.empty) or self.cache()

    def _compile_prompt(self, shapes: Decoder, cache: Future[Cache]) -> list[Future[Compiled]]:
        """Starts to compile each program that reads the prompt."""
        from kvjax.generation import compile_ahead

        tokens = len(self._job.tokens)
        programs = compile_ahead(shapes, cache.result(), tokens, steps=False)
        return [self._pool.submit(self._compile, program) for program in programs]

    def _compile_steps(self, shapes: Decoder, cache: Future[Cache]) -> list[Future[Compiled]]:
        """Starts to compile each program of decode steps, after those of the prompt."""
        from kvjax.generation import compile_ahead

        job = self._job
        # Even a list of the programs of steps takes a trace of a step, and threads take turns at
        # Python. So the prompt, which runs first, has its programs listed before.
        _of(self._prompt)
        programs = compile_ahead(
            shapes,
            cache.result(),
            len(job.tokens),
            sampling=job.sampling,
            processors=job.checkpoint.processors,
            stop_tokens=job.stop_tokens,
            measure=True,
            prompts=False,
            short=job.short,
            block=self._block,
        )
        return [self._pool.submit(self._compile, program) for program in programs]

    @staticmethod
    def _compile(program: Callable[[], Any]) -> Compiled:
        from kvjax.compiling import compile_clock

        with compile_clock() as clock:
            program()
        return Compiled(clock, time.perf_counter())

    @property
    def _programs(self) -> list[Future[Compiled]]:
        return [*_of(self._prompt), *_of(self._steps)]

    def _expected(self) -> float:
        """About how many seconds the programs take, by their number and the layers."""
        import jax

        on_cpu = jax.default_backend() == "cpu"
        each_program = EACH_PROGRAM_ON_CPU if on_cpu else EACH_PROGRAM_ON_GPU
        programs = self._programs
        by_layer = bool(programs) and self._job.short
        layers = 0 if by_layer else self._job.checkpoint.config.layers
        loops = 1 if self._job.draft_directory is None else 2  # one is that of the draft model
        seconds = max(2, len(programs)) * each_program + loops * layers * EACH_LAYER
        return max(seconds, SILENCE + 1)

    def _tell(self) -> None:
        """Says what takes the time before the answer."""
        programs = max(2, len(self._programs))
        layers = self._job.checkpoint.config.layers
        seconds = self._expected()
        about = seconds if seconds < 10 else round(seconds / 5) * 5
        say(
            f"compiling {programs} programs, for a prompt of {len(self._job.tokens)} tokens and "
            f"for decode steps of {layers} layers, takes about {about:.0f} s{_kept()}"
        )


def _of(programs: Future[list[Future[Compiled]]] | None) -> list[Future[Compiled]]:
    """Programs that compile; none if they do not compile ahead."""
    return [] if programs is None else programs.result()


@contextmanager
def short_turns() -> Iterator[None]:
    """Has threads that run Python change more often than each 5 ms.

    One that reads weights runs a little Python after each copy. While another traces a program
    it would wait for most of a turn each time.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(TURN)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _kept() -> str:
    """Where compiled programs are kept for the next command; empty if they are not."""
    import jax

    from kvjax.compiling import NEVER

    config: Any = jax.config
    folder = config.jax_compilation_cache_dir
    if not folder or config.jax_persistent_cache_min_compile_time_secs >= NEVER:
        return ""
    return f", once: they are kept in {folder}"
