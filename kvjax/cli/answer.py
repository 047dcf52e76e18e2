"""The run of one job: weights, prompt and answer, with the time of each."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvjax.cli.ahead import Ahead, short_turns
from kvjax.cli.job import Job
from kvjax.cli.options import implementations
from kvjax.cli.programs import load_checkpoint
from kvjax.cli.terminal import Timeline, bar, collect_garbage

if TYPE_CHECKING:
    from rich.progress import Progress

    from kvjax import Cache
    from kvjax.generation import Stream
    from kvjax.generation.drafts import DraftModel, PromptLookup, SelfDraft
    from kvjax.models import Decoder


class Answer(NamedTuple):
    """A finished run, and its times."""

    run: Stream
    text: str  # empty if it was streamed
    compile_seconds: float  # from the start of compiling, also while weights are read
    prefill_seconds: float
    decode_seconds: float
    # As `kvjax.cli.options.implementations` finds them; empty if they were not asked for.
    implementations: dict[str, str]

    def report(self, prompt: int) -> dict[str, Any]:
        """The answer to a prompt of `prompt` tokens, and its cost, as JSON."""
        import numpy as np

        from kvjax.memory import nbytes

        new = self.run.rows[0]
        size = nbytes(self.run.cache)
        drafted = self.run.speculation
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

    def summary(self, prompt: int, cache: str) -> list[str]:
        """The cost of an answer to a prompt of `prompt` tokens, in lines."""
        report = self.report(prompt)
        new = len(report["token_ids"])
        device = report["cache_bytes_device"] / 2**20
        host = report["cache_bytes_host"] / 2**20
        read = in_layers(report["attended_tokens_by_layer"], prompt, new)
        lines = [
            f"{prompt} prompt tokens at {report['prefill_tokens_per_second']:.0f}/s, {new} new at "
            f"{report['decode_tokens_per_second']:.1f}/s; cache {cache}: {device:.1f} MiB on the "
            f"device, {host:.1f} MiB on the host; a step read {read}"
        ]
        drafted = self.run.speculation
        if drafted is not None and drafted.idle is not None:
            lines.append(drafted.idle)
        elif drafted is not None:
            lines.append(
                f"{drafted.acceptance:.0%} of {drafted.drafted} drafted tokens accepted, "
                f"{drafted.tokens_per_step:.2f} tokens a step"
            )
        return lines


def in_layers(attended: Sequence[float], prompt: int, new: int) -> str:
    """The mean number of tokens that a step read, by layer.

    >>> in_layers([2832, 2832, 256, 256, 256, 256, 256, 256], 2829, 5)
    '256 of 2832 tokens in 6 layers, 2832 in 2'
    """
    layers_by_tokens = sorted(Counter(round(float(mean)) for mean in attended).items())
    stored = round(prompt + (new + 1) / 2)  # at the mean step, its own token included
    fewest, layers = layers_by_tokens[0]
    most, others = layers_by_tokens[-1]
    if len(layers_by_tokens) == 1:
        return f"{fewest} of {stored} tokens"
    if len(layers_by_tokens) > 2:
        return f"{fewest} to {most} of {stored} tokens, by layer"
    return (
        f"{fewest} of {stored} tokens in {layers} layer{'s' * (layers > 1)}, {most} in {others}"
    )


def run_job(
    job: Job,
    progress: Progress,
    times: Timeline,
    *,
    show: Callable[[str], None] | None,
    block: int,
    explains: bool,
) -> Answer:
    """Answers the prompt of a job.

    Args:
      times: receives the times of all steps.
      show: receives the text piece by piece; None collects it in the answer.
      block: tokens that decode between two looks at them.
      explains: the answer also has what runs each operation.
    """
    from kvjax.compiling import cached_on_disk
    from kvjax.generation.prefilling import steps_of

    with progress:
        ahead = Ahead(job, block=block, silent=show is None)
        models = _load(job, ahead, progress, times)
        with bar(progress, "compiling"):
            cache = _cache(job, ahead, times)
        # Found while the device reads the prompt.
        ran = None
        if explains:
            logits = steps_of(job.checkpoint.config, cache)[0].logits
            ran = ahead.submit(cached_on_disk, implementations, job.policy, job.spec, logits)
        run, prefill_seconds = _read_prompt(job, models, cache, block, progress, times)
        ahead_seconds = ahead.wait()
        if ahead_seconds:
            times.add(ahead.started, ahead.started + ahead_seconds, ahead.summary())
        begin = time.perf_counter()
        compiled_before = run.compile_seconds
        text = _collect(run, job.max_new_tokens, progress) if show is None else ""
    waited = 0.0 if show is None else _show(run, show, ahead)
    end = time.perf_counter()
    new = len(run.rows[0])
    times.add(begin, end, f"{new} new tokens, the first text after {waited:.2f} s")
    return Answer(
        run=run,
        text=text,
        compile_seconds=ahead_seconds + run.compile_seconds,
        prefill_seconds=prefill_seconds,
        decode_seconds=end - begin - (run.compile_seconds - compiled_before),
        implementations={} if ran is None else ran.result(),
    )


class _Models(NamedTuple):
    """The model of a job, and what drafts for it."""

    model: Decoder
    draft: PromptLookup | SelfDraft | DraftModel | None


def _load(job: Job, ahead: Ahead, progress: Progress, times: Timeline) -> _Models:
    """Reads the weights, while `ahead` compiles."""
    from flax import nnx

    from kvjax.memory import nbytes

    with bar(progress, "loading weights"), short_turns(), times.row("weights") as words:
        begin = time.perf_counter()
        loaded = load_checkpoint(
            job.checkpoint.directory,
            dtype=job.dtype,
            placement=job.placement,
            on_shapes=ahead.begin,
        )
        seconds = time.perf_counter() - begin
        gigabytes = nbytes(nnx.state(loaded.model)).total / 1e9
        words.append(f"{gigabytes:.2f} GB at {gigabytes / seconds:.2f} GB/s")
        return _with_draft(job, loaded.model)


def _with_draft(job: Job, model: Decoder) -> _Models:
    from kvjax.generation.drafts import DraftModel

    if job.draft_directory is None:
        return _Models(model, job.own_draft)
    small = load_checkpoint(job.draft_directory, dtype=job.dtype).model
    return _Models(model, DraftModel(small))


def _cache(job: Job, ahead: Ahead, times: Timeline) -> Cache:
    """The empty cache, as soon as the programs are there that read the prompt."""
    import jax

    # On a CPU, whose cores prompt and compiler would share, all programs come first.
    ahead.wait(prompt_only=jax.default_backend() != "cpu")
    collect_garbage()
    cache = ahead.cache()
    times.add(ahead.started, ahead.made, "empty cache")
    return cache


def _read_prompt(
    job: Job, models: _Models, cache: Cache, block: int, progress: Progress, times: Timeline
) -> tuple[Stream, float]:
    """Reads the prompt into the cache; returns the stream of the answer, and the seconds without
    compiling.
    """
    import jax

    from kvjax.generation import stream

    prompt = len(job.tokens)
    what = f"reading the prompt of {prompt} tokens"
    with bar(progress, what, total=prompt) as advance_to, times.row("prompt") as words:
        begin = time.perf_counter()
        run = stream(
            models.model,
            cache,
            [job.tokens],
            max_new_tokens=job.max_new_tokens,
            sampling=job.sampling,
            processors=job.checkpoint.processors,
            key=job.key,
            stop_tokens=job.stop_tokens,
            measure=True,
            tokenizer=job.checkpoint.tokenizer,
            block=block,
            progress=advance_to,
            draft=models.draft,
            sparse_prompt=job.sparse_prompt,
            short=job.short,
        )
        jax.block_until_ready(run.logits)
        seconds = time.perf_counter() - begin - run.compile_seconds
        words.append(f"{run.compile_seconds:.2f} s of it compiling")
    return run, seconds


def _collect(run: Stream, most: int, progress: Progress) -> str:
    """The whole text of the answer."""
    pieces = []
    with bar(progress, f"decoding up to {most} tokens", total=most) as advance_to:
        for piece in run:
            pieces.append(piece)
            advance_to(len(run.rows[0]))
    return "".join(pieces)


def _show(run: Stream, show: Callable[[str], None], ahead: Ahead) -> float:
    """Shows the text as it comes; returns the seconds until its first piece."""
    begin = time.perf_counter()
    waited = 0.0
    for piece in run:
        show(piece)
        # Programs that compile when they first run have done so.
        ahead.telling.cancel()
        waited = waited or time.perf_counter() - begin
    show("\n")
    return waited
