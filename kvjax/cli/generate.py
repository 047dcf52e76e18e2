"""`kvjax generate`."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from kvjax.cli.many import answer_many
from kvjax.cli.options import (
    AsJson,
    Budget,
    Dtype,
    ModelDir,
    PromptFile,
    Seed,
    Speculate,
    Temperature,
    TopP,
    capacity_over,
    complete_cache,
    dtype_name,
    implementations,
    in_short,
    join_processes,
    make_placement,
    make_policy,
    model_directory,
    optional,
    without_weights,
)
from kvjax.cli.programs import load_checkpoint
from kvjax.cli.terminal import Timeline, bar, bars, collect_garbage, say, write, write_json

if TYPE_CHECKING:
    from jax import Array
    from rich.progress import Progress

    from kvjax import Cache, CacheSpec, Placement
    from kvjax.compiling import Clock
    from kvjax.generation import Stream
    from kvjax.models import Checkpoint, Decoder
    from kvjax.policies import PerLayer

STDIN = Path("-")
# The prompt of --example: the key at its start is outside every local window. The shipped model
# answers in 5 tokens.
EXAMPLE = (
    "The pass key is 71432. Remember it.\n"
    + "The grass is green. The sky is blue. The sun is yellow.\n" * 140
    + "What is the pass key? The pass key is "
)
EXAMPLE_TOKENS = 5
SILENCE = 2.0  # seconds of compiling after which a line says what takes the time
EACH_PROGRAM = {
    False: 0.7,
    True: 1.5,
}  # seconds for one layer or none, by whether the device is a GPU
EACH_LAYER = 0.4  # seconds more for the loop of an answer that is not short
SHORT = (
    256  # new tokens up to which to compile all layers takes longer than calls of one layer do
)
JSON_BLOCK = 16  # decode steps between two transfers to the host; --json does not stream
TEXT_BLOCK = 4  # on a GPU, for which the host then calls programs ahead, and which takes some milliseconds a step


def generate(
    model_dir: ModelDir = None,
    texts: Annotated[
        list[str] | None,
        optional(
            "The prompt as text. Several are answered as those of --prompts are.", "--prompt"
        ),
    ] = None,
    prompt_file: PromptFile = None,
    prompts: Annotated[
        Path | None,
        optional(
            'Many prompts at a time, one a line: a text, or {"prompt": text or messages, "max_new_tokens": n}. '
            "Writes a line of JSON for each, as it is answered.",
            metavar="FILE.jsonl",
        ),
    ] = None,
    out: Annotated[
        Path | None, optional("File for the answers to --prompts. Default: stdout.")
    ] = None,
    slots: Annotated[
        int | None,
        optional("Prompts of --prompts answered at the same time. Default: 8.", min=1),
    ] = None,
    example: Annotated[
        bool,
        typer.Option(
            "--example",
            help="Use a built-in prompt that asks for a pass key before about 2800 tokens of filler. "
            "Generates 5 tokens unless --max-new-tokens is set.",
        ),
    ] = False,
    caches: Annotated[
        list[str] | None,
        optional(
            "A method listed by `kvjax methods`, or your own: mine.py:NAME. Settings may follow: fier:group=16. "
            "Default: full.",
            "--cache",
            autocompletion=complete_cache,
        ),
    ] = None,
    budget: Budget = None,
    max_new_tokens: Annotated[
        int | None,
        optional(
            "Maximum number of new tokens. Default: 128, or fewer if the model's positions do not allow it."
        ),
    ] = None,
    temperature: Temperature = None,
    top_k: Annotated[int | None, optional("Draw from the k most likely tokens.")] = None,
    top_p: TopP = None,
    min_p: Annotated[
        float | None,
        optional("Draw from tokens with at least this share of the highest probability."),
    ] = None,
    seed: Seed = 0,
    speculate: Speculate = None,
    draft: Annotated[
        Path | None,
        optional(
            "Speculative decoding with a draft model: a smaller checkpoint of the same vocabulary, which drafts 4 "
            "tokens at a time.",
            metavar="DIR",
        ),
    ] = None,
    keep: Annotated[
        float | None,
        optional(
            "With --draft, read only this share of the prompt, to which the draft attends most (SpecPrefill), and "
            "decode without drafts. The text changes.",
            metavar="SHARE",
        ),
    ] = None,
    sparse_prompt: Annotated[
        float | None,
        optional(
            "Let the blocks of a long prompt attend to this share of the blocks before them, those with the most "
            "estimated weight. The text changes.",
            metavar="SHARE",
        ),
    ] = None,
    dtype: Dtype = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")
    ] = False,
    as_json: AsJson = False,
    mesh: Annotated[
        str | None,
        optional(
            "Shard weights and KV heads over `model` and cached tokens over `ctx`; `data` replicates both.",
            metavar="data=N,model=N,ctx=N",
        ),
    ] = None,
    distributed: Annotated[
        bool,
        typer.Option(
            "--distributed",
            help="Run as one of several processes with the same arguments (jax.distributed); the first one prints.",
        ),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            help="Print when each step from start to answer ran, and what ran each operation.",
        ),
    ] = False,
) -> None:
    """Continues a prompt, decoding through a KV cache.

    The text streams to stdout; progress and a summary go to stderr. Programs compile while
    weights are read, and are kept on disk for the next run. Tokens per second exclude
    compilation; `compile_seconds` in the JSON is the time that it takes.
    """
    from kvjax.generation.sampling import requested_sampling

    cache, *others = caches or ["full"]
    if others:
        raise ValueError(
            f"--cache is given {len(others) + 1} times ({', '.join([cache, *others])}), and generate takes one; "
            "kvjax compare runs several"
        )
    policy, tokens_read = make_policy(cache, budget)
    draw = requested_sampling(temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    _check_options(max_new_tokens, seed, speculate, draft, keep, sparse_prompt)
    texts = texts or []
    prompt = texts[0] if texts else None
    if prompts is not None or len(texts) > 1:
        many = "several --prompt" if prompts is None else "--prompts"
        other: dict[str, Any] = {
            "--prompt": prompts and prompt,
            "--prompt-file": prompt_file,
            "--example": example,
        }
        other |= {
            "--chat": chat,
            "--speculate": speculate,
            "--draft": draft,
            "--sparse-prompt": sparse_prompt,
        }
        other |= {"--mesh": mesh, "--distributed": distributed}
        for name, value in (other | {"--json": as_json}).items():
            if value:
                raise ValueError(f"{many} and {name} cannot be given together")
        collect_garbage()
        settings: dict[str, Any] = {
            "model_dir": model_dir,
            "policy": policy,
            "cache": cache,
            "dtype": dtype,
        }
        settings |= {
            "slots": slots or 8,
            "max_new_tokens": max_new_tokens,
            "sampling": draw,
            "seed": seed,
        }
        answer_many(prompts or [read_prompt(text, None) for text in texts], out, **settings)
        return
    for name, value in {"--out": out, "--slots": slots}.items():
        if value is not None:
            raise ValueError(
                f"{name} is for the answers to --prompts; leave it out for a single prompt"
            )
    times = Timeline()
    if distributed:
        join_processes()
    if os.environ.get("JAX_PLATFORMS") != "cpu" and find_spec("jax_plugins"):
        threading.Thread(target=_find_devices, daemon=True).start()
    placement = make_placement(mesh)
    kind = dtype_name(dtype)
    directory = model_directory(model_dir)
    text = read_prompt(prompt, prompt_file, example=example)
    if example and max_new_tokens is None:
        max_new_tokens = EXAMPLE_TOKENS

    import jax

    import kvjax
    from kvjax.generation import drafts
    from kvjax.generation.prompt_inputs import check_fit
    from kvjax.models.chat import default_new_tokens
    from kvjax.presets import check_reaches

    lookup = None if speculate is None else drafts.parse(speculate)
    progress = bars()
    with progress, bar(progress, "loading the tokenizer"), times.row("tokenizer") as words:
        checkpoint = without_weights(directory)
        tokens = checkpoint.apply_chat(text) if chat else checkpoint.encode(text)
        words.append(f"{len(tokens)} tokens of prompt")
    check_reaches(policy, checkpoint.config.attention_layers, f"--cache {cache}")
    positions = checkpoint.config.max_positions
    new = (
        default_new_tokens(len(tokens), positions) if max_new_tokens is None else max_new_tokens
    )
    check_fit(0, len(tokens), new, None, positions)
    job = _Job(
        checkpoint=checkpoint,
        tokens=tokens,
        policy=policy,
        placement=placement,
        dtype=kind,
        key=None if draw.greedy else jax.random.key(seed),
        drafting=None if draft is None else model_directory(draft),
        keep=keep,
        settings={
            "max_new_tokens": new,
            "sampling": draw,
            "stop_tokens": checkpoint.chat_stop_tokens if chat else checkpoint.stop_tokens,
            "processors": checkpoint.processors,
            "measure": True,
            "draft": lookup,
            "sparse_prompt": sparse_prompt,
            "short": new <= SHORT,
        },
    )
    job.check()
    first = jax.process_index() == 0
    if example and not as_json and first:
        say(f"Continuing {len(tokens)} prompt tokens by {new} new ones; the answer follows.")
    show = None if as_json else write if first else lambda piece: None
    block = JSON_BLOCK if as_json else 1 if jax.default_backend() == "cpu" else TEXT_BLOCK
    told = first and (as_json or verbose or jax.default_backend() == "gpu")
    answer = _run(progress, job, times, show=show, block=block, told=told)
    kvjax.raise_on_overflow(answer.run.cache)
    if not first:
        return
    ran = answer.implementations
    if as_json:
        asked = {
            "model": str(directory),
            "cache": cache,
            "budget": tokens_read,
            "dtype": kind,
            "implementations": ran,
        }
        write_json({**answer.report(len(tokens)), **asked, "backend": jax.default_backend()})
        return
    _summarise(answer, len(tokens), cache)
    if verbose:
        say(str(times))
    if told:
        say(in_short(ran))


def _find_devices() -> None:
    """Starts the driver of a GPU, which takes a second or two, beside the imports and the
    tokenizer.
    """
    import jax

    with suppress(Exception):  # who needs the devices is told
        jax.devices()


def _check_options(
    max_new_tokens: int | None,
    seed: int,
    speculate: str | None,
    draft: Path | None,
    keep: float | None,
    sparse_prompt: float | None,
) -> None:
    """Raises ValueError for options that are wrong for every model."""
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {max_new_tokens}")
    if not 0 <= seed < 2**32:
        raise ValueError(
            f"--seed must be in [0, 2**32), got {seed}"
        )  # JAX would drop the higher bits
    if speculate is not None and draft is not None:
        raise ValueError("--speculate and --draft each say how to draft; give one of them")
    from kvjax.validation import check_share

    if keep is not None:
        check_share("--keep", keep, "the prompt")
        if draft is None:
            raise ValueError(
                "--keep is a share of the prompt that a draft model chooses; add --draft DIR"
            )
    if sparse_prompt is not None:
        check_share("--sparse-prompt", sparse_prompt, "what is stored")
        if keep is not None:
            raise ValueError(
                "--keep and --sparse-prompt each say which part of a prompt counts; give one of them"
            )


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A request, with everything that is known before the weights are loaded."""

    checkpoint: Checkpoint  # without weights
    tokens: list[int]  # of the prompt
    policy: PerLayer
    placement: Placement | None
    dtype: str
    key: Array | None
    drafting: Path | None  # the directory of a model that drafts
    keep: float | None  # share of the prompt that it chooses, in place of drafting
    settings: Mapping[str, Any]  # of `kvjax.generation.stream`

    @property
    def spec(self) -> CacheSpec:
        from kvjax.generation.spec_prefill import kept
        from kvjax.spec import round_capacity

        stored = len(self.tokens) if self.keep is None else kept(len(self.tokens), self.keep)
        config, needed = self.checkpoint.config, stored + self.settings["max_new_tokens"]
        capacity = capacity_over(
            round_capacity(needed, positions=config.max_positions), self.placement
        )
        return config.spec(1, capacity, self.dtype)

    def empty(self) -> Cache:
        import kvjax

        layers = self.checkpoint.config.layers
        return kvjax.init(self.policy, self.spec, layers=layers, placement=self.placement)

    def check(self) -> None:
        """Raises ValueError for a policy that cannot hold this model, or a draft that fits
        neither.
        """
        import jax

        from kvjax.generation import drafts
        from kvjax.generation.drafts import DraftModel
        from kvjax.generation.prefilling import check_sparse, check_takes_gaps

        shapes, lookup = jax.eval_shape(self.empty), self.settings["draft"]
        self.checkpoint.config.check_cache(shapes)
        if (share := self.settings["sparse_prompt"]) is not None:
            check_sparse(shapes, share)
        if self.drafting is not None:
            with suppress(FileNotFoundError):  # one without a tokenizer has nothing to compare
                small = without_weights(self.drafting).tokenizer
                drafts.check_tokenizers(small, self.checkpoint.tokenizer)
        if self.keep is not None:
            check_takes_gaps(self.checkpoint.config.windows, shapes)
        elif self.drafting is not None:
            drafts.check_takes_drafts(shapes, DraftModel.tokens)
        elif lookup is not None:
            drafts.check_draft(lookup, shapes)


class _Answer(NamedTuple):
    """A finished run, and its times."""

    run: Stream
    text: str  # empty if it was streamed
    compile_seconds: float  # from the start of compiling, also while weights are read
    prefill_seconds: float
    decode_seconds: float
    implementations: dict[
        str, str
    ]  # as `kvjax.cli.options.implementations` finds them; empty if not asked for

    def report(self, prompt: int) -> dict[str, Any]:
        """The answer to a prompt of `prompt` tokens, and its cost, as JSON."""
        import numpy as np

        from kvjax.memory import nbytes

        new, size, drafted = self.run.rows[0], nbytes(self.run.cache), self.run.speculation
        attended = np.asarray(self.run.attended, np.float64)
        return {
            "text": self.text,
            "token_ids": new,
            "prompt_tokens": prompt,
            "prefill_tokens_per_second": prompt / self.prefill_seconds,
            "decode_tokens_per_second": len(new) / self.decode_seconds,
            "compile_seconds": self.compile_seconds,
            "cache_bytes_device": size.device,
            "cache_bytes_host": size.host,
            "attended_tokens_per_step": float(attended.mean()),
            "attended_tokens_by_layer": attended.tolist(),
            "acceptance": None if drafted is None else drafted.acceptance,
            "tokens_per_step": None if drafted is None else drafted.tokens_per_step,
        }


def _run(
    progress: Progress,
    job: _Job,
    times: Timeline,
    *,
    show: Callable[[str], None] | None,
    block: int,
    told: bool,
) -> _Answer:
    """Runs a job. `show` receives the text piece by piece; None collects it. `told`: the answer
    has implementations.
    """
    import jax
    from flax import nnx

    from kvjax.compiling import cached_on_disk
    from kvjax.generation import SpecPrefill, stream
    from kvjax.generation.drafts import DraftModel
    from kvjax.memory import nbytes

    prompt, settings = len(job.tokens), dict(job.settings)
    with progress:
        ahead = _Ahead(job, silent=show is None)
        with bar(progress, "loading weights"), times.row("weights") as words:
            begin, directory = time.perf_counter(), job.checkpoint.directory
            model = load_checkpoint(
                directory, dtype=job.dtype, placement=job.placement, on_shapes=ahead.begin
            ).model
            size = nbytes(nnx.state(model)).total / 1e9
            words.append(f"{size:.2f} GB at {size / (time.perf_counter() - begin):.2f} GB/s")
            if job.drafting is not None:
                small = load_checkpoint(job.drafting, dtype=job.dtype).model
                if job.keep is not None:
                    settings["spec_prefill"] = SpecPrefill(small, keep=job.keep)
                else:
                    settings["draft"] = DraftModel(small)
        with bar(progress, "compiling"):
            # the cores of a CPU would be shared by prompt and compiling
            ahead.wait(prompt_only=jax.default_backend() != "cpu" and not settings["short"])
            collect_garbage()
            cache = ahead.cache()
            times.add(ahead.started, ahead.made, "empty cache")
        found = (
            ahead.submit(cached_on_disk, implementations, job.policy, job.spec)
            if told
            else None
        )  # as the device reads
        with (
            bar(progress, f"reading the prompt of {prompt} tokens", total=prompt) as advance_to,
            times.row("prompt") as words,
        ):
            begin = time.perf_counter()
            given: dict[str, Any] = {
                "key": job.key,
                "tokenizer": job.checkpoint.tokenizer,
                "progress": advance_to,
            }
            run = stream(model, cache, [job.tokens], block=block, **given, **settings)
            jax.block_until_ready(run.logits)
            prefill_seconds = time.perf_counter() - begin - run.compile_seconds
            words.append(f"{run.compile_seconds:.2f} s of it compiling")
        compile_seconds = ahead.wait()
        if compile_seconds:
            times.add(ahead.started, ahead.started + compile_seconds, ahead.summary())
        begin, compiled, pieces, first = (
            time.perf_counter(),
            run.compile_seconds,
            list[str](),
            0.0,
        )
        if show is None:
            limit = settings["max_new_tokens"]
            with bar(progress, f"decoding up to {limit} tokens", total=limit) as advance_to:
                for piece in run:
                    pieces.append(piece)
                    advance_to(len(run.rows[0]))
    if show is not None:
        for piece in run:
            show(piece)
            ahead.telling.cancel()  # programs that compile when they first run have
            first = first or time.perf_counter() - begin
        show("\n")
    end = time.perf_counter()
    times.add(begin, end, f"{len(run.rows[0])} new tokens, the first text after {first:.2f} s")
    decode_seconds = end - begin - (run.compile_seconds - compiled)
    seconds = compile_seconds + run.compile_seconds, prefill_seconds, decode_seconds
    return _Answer(run, "".join(pieces), *seconds, found.result() if found else {})


class _Ahead:
    """The programs of a job and the empty cache that they take, which threads make while
    weights are read.

    Programs of a job with drafts or a sparse prompt, or on several devices, compile when they
    first run.
    """

    def __init__(self, job: _Job, *, silent: bool) -> None:
        self._job = job
        self._pool = ThreadPoolExecutor(32, "ahead")
        self.submit = self._pool.submit
        self._cache: Future[Cache] | None = None
        self._begun: Future[list[Future[tuple[Clock, float]]]] | None = None
        self.telling = threading.Timer(SILENCE, self._tell)
        self.telling.daemon, self._silent = True, silent
        self.started, self.made = time.perf_counter(), 0.0

    def begin(self, shapes: Decoder) -> None:
        """Starts to make the cache, and to compile for a model of these shapes."""
        self.started = time.perf_counter()
        self._cache = self._pool.submit(self._empty)
        self._begun = self._pool.submit(self._submit, shapes)

    def _empty(self) -> Cache:
        import jax

        cache = jax.block_until_ready(self._job.empty())
        self.made = time.perf_counter()
        return cache

    def cache(self) -> Cache:
        """The empty cache. If there was no memory for it while weights were read, it is made
        again.
        """
        assert self._cache is not None
        if self._cache.exception() is not None:
            self._cache = self._pool.submit(self._empty)
        return self._cache.result()

    def _submit(self, shapes: Decoder) -> list[Future[tuple[Clock, float]]]:
        from kvjax.generation import compile_ahead
        from kvjax.generation.streaming import stand_in

        job, settings = self._job, self._job.settings
        alone = job.drafting is settings["draft"] is settings["sparse_prompt"] is None
        if job.placement is not None or not alone:
            return []
        chosen = {
            name: settings[name]
            for name in ("sampling", "stop_tokens", "processors", "measure", "short")
        }
        cache = stand_in(job.empty) or self.cache()
        return [
            self._pool.submit(self._compile, one)
            for one in compile_ahead(shapes, cache, len(job.tokens), **chosen)
        ]

    @staticmethod
    def _compile(job: Callable[[], Any]) -> tuple[Clock, float]:
        """Compiles one program; the times that it took, and when it ended."""
        from kvjax.compiling import compile_clock

        with compile_clock() as clock:
            job()
        return clock, time.perf_counter()

    def wait(self, *, prompt_only: bool = False) -> float:
        """Returns when all programs are compiled, or those of the prompt, and the seconds that
        took.

        Unless this is silent, a line says what takes the time, if it takes some.
        """
        if (
            not self._silent
            and not self.telling.is_alive()
            and not self.telling.finished.is_set()
        ):
            self.telling.start()
        running = self._running
        ends = [one.result()[1] for one in (running[:-1] if prompt_only else running)]
        if ends and not prompt_only:
            self.telling.cancel()
        return max(ends, default=self.started) - self.started

    def _expected(self) -> float:
        """About how many seconds the programs take, by their number and the layers."""
        import jax

        job, running = self._job, self._running
        layers = 0 if running and job.settings["short"] else job.checkpoint.config.layers
        loops = 1 if job.drafting is None else 2  # of the model that drafts, too
        rule = (
            max(2, len(running)) * EACH_PROGRAM[jax.default_backend() != "cpu"]
            + loops * layers * EACH_LAYER
        )
        return max(rule, SILENCE + 1)

    @property
    def _running(self) -> list[Future[tuple[Clock, float]]]:
        return [] if self._begun is None else self._begun.result()

    def summary(self) -> str:
        """The seconds of all programs, by what took them."""
        names = {
            "tracing": "jaxpr_trace",
            "lowering": "jaxpr_to_mlir_module",
            "XLA or the disk": "backend_compile",
        }
        clocks = [one.result()[0] for one in self._running]
        names = {what: f"/jax/core/compile/{name}_duration" for what, name in names.items()}
        parts = [
            f"{what} {sum(clock.parts.get(name, 0.0) for clock in clocks):.2f}"
            for what, name in names.items()
        ]
        return f"{len(clocks)} programs in threads: {', '.join(parts)} s of all threads"

    def _tell(self) -> None:
        """Says what takes the time before the answer."""
        import jax

        from kvjax.compiling import NEVER

        job = self._job
        programs, layers, seconds = (
            max(2, len(self._running)),
            job.checkpoint.config.layers,
            self._expected(),
        )
        config: Any = jax.config
        kept = config.jax_compilation_cache_dir
        written = kept and config.jax_persistent_cache_min_compile_time_secs < NEVER
        then = f", once: they are kept in {kept}" if written else ""
        say(
            f"compiling {programs} programs, for a prompt of {len(job.tokens)} tokens and for decode steps of "
            f"{layers} layers, takes about {seconds if seconds < 10 else round(seconds / 5) * 5:.0f} s{then}"
        )


def _summarise(answer: _Answer, prompt: int, cache: str) -> None:
    """Prints the cost of an answer."""
    report, drafted, new = (
        answer.report(prompt),
        answer.run.speculation,
        len(answer.run.rows[0]),
    )
    device, host = (report[f"cache_bytes_{place}"] / 2**20 for place in ("device", "host"))
    say(
        f"{prompt} prompt tokens at {report['prefill_tokens_per_second']:.0f}/s, {new} new at "
        f"{report['decode_tokens_per_second']:.1f}/s; cache {cache}: {device:.1f} MiB on the device, "
        f"{host:.1f} MiB on the host; a step read {_in_layers(report['attended_tokens_by_layer'], prompt, new)}"
    )
    if drafted is not None and drafted.idle is not None:
        say(drafted.idle)
    elif drafted is not None:
        say(
            f"{drafted.acceptance:.0%} of {drafted.drafted} drafted tokens accepted, "
            f"{drafted.tokens_per_step:.2f} tokens a step"
        )


def _in_layers(attended: Any, prompt: int, new: int) -> str:
    """The mean number of tokens that a step read, by layer: "256 of 2832 tokens in 6 layers,
    2832 in 2".
    """
    (fewest, layers), *more = Counter(sorted(round(float(mean)) for mean in attended)).items()
    stored = round(prompt + (new + 1) / 2)  # at the mean step, its own token included
    if not more:
        return f"{fewest} of {stored} tokens"
    if len(more) > 1:
        return f"{fewest} to {more[-1][0]} of {stored} tokens, by layer"
    return f"{fewest} of {stored} tokens in {layers} layer{'s' * (layers > 1)}, {more[0][0]} in {more[0][1]}"


def read_prompt(prompt: str | None, file: Path | None, *, example: bool = False) -> str:
    """Returns the prompt from the one source that is given."""
    given = (prompt is not None) + (file is not None) + example
    if given != 1:
        number = "only one" if given else "one"
        raise ValueError(
            f"give {number} of --prompt TEXT, --prompt-file FILE (- for stdin) and --example"
        )
    if example:
        return EXAMPLE
    if any(
        "\ud800" <= character < "\ue000" for character in prompt or ""
    ):  # Python's for other bytes
        raise ValueError(
            "--prompt is not UTF-8; set a UTF-8 locale, or give the text as --prompt-file FILE"
        )
    if file is not None:
        try:
            prompt = _content(file).decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"--prompt-file {file} is not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start}; convert "
                "it first, for example with `iconv -t utf-8`"
            ) from None
    if not prompt:
        raise ValueError("the prompt is empty; give at least one character")
    return prompt


def _content(file: Path) -> bytes:
    if file == STDIN:
        return sys.stdin.buffer.read()
    file = file.expanduser()
    if file.is_dir():
        raise ValueError(f"--prompt-file {file} is a folder; give a file with the prompt")
    if not file.exists():  # a named pipe is fine
        raise ValueError(f"--prompt-file {file}: there is no such file")
    return file.read_bytes()
