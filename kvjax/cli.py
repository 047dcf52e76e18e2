"""The command line: `kvjax generate` decodes through a cache, `kvjax methods` lists the caches.

Everything cheap is checked before anything long starts, in this order: options, prompt, config, length of the
prompt, weights. What a user can get wrong ends in one line `error: ...` on stderr and a non-zero exit code: 2 for the
use of the command, 1 for everything else, 130 for an interrupt. KVJAX_TRACEBACK=1 shows the traceback instead.

Heavy imports stand inside the commands, so that `kvjax --help` stays quick.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.progress import Progress

    from kvjax.models import Checkpoint

# Advice for people who train with torch, and warnings of XLA's start, are not for this command's users.
for _name, _value in (
    ("TRANSFORMERS_VERBOSITY", "error"),
    ("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1"),
    ("TOKENIZERS_PARALLELISM", "false"),
    ("TF_CPP_MIN_LOG_LEVEL", "2"),
):
    os.environ.setdefault(_name, _value)

DEFAULT_NEW_TOKENS = 128
CAPACITY_STEP = 128  # capacities are multiples of it, so that near lengths share a program
JSON_BLOCK = 16  # tokens between two reads of the host; --json need not show each token as it comes

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="KV caches for long-context decoding in JAX.",
)


@app.command()
def generate(
    model_dir: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL_DIR",
            help="Checkpoint in Hugging Face format. Without it, the model that ships with kvjax.",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt itself.", show_default=False)] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="UTF-8 file with the prompt; one newline at its end is dropped.", show_default=False),
    ] = None,
    cache: Annotated[str, typer.Option(help="A method of `kvjax methods`.")] = "full",
    budget: Annotated[
        int | None,
        typer.Option(help="Tokens attended a step and KV head, for methods that have one.", show_default=False),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help=f"Default {DEFAULT_NEW_TOKENS}, or what the model's positions leave.", show_default=False),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k most likely tokens.", show_default=False)] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw from the fewest tokens that hold this probability.", show_default=False),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Draw from tokens at least this times as likely as the likeliest.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of weights and cache: float32, bfloat16 or float16. Default float32 on CPU, else bfloat16.",
            show_default=False,
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
) -> None:
    """Continues a prompt, decoding through a KV cache.

    The text streams to stdout, progress and a summary go to stderr. Tokens per second are of runs without
    compilation: everything is compiled, and run once for a few tokens, before the clock starts; `compile_seconds`
    in the JSON is that time.
    """
    from kvjax import presets
    from kvjax.sample import sampling

    preset = presets.find(cache)
    if budget is not None and not preset.has_budget:
        have = ", ".join(p.name for p in presets.REGISTRY.values() if p.has_budget)
        raise ValueError(f"--budget {budget}: the cache {cache!r} has no budget; leave it out, or use one of {have}")
    policy = preset.make() if budget is None else preset.make(budget=budget)
    draw = sampling(temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {max_new_tokens}")
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed must be in [0, 2**32), got {seed}")  # JAX would drop the higher bits
    kind = _dtype(dtype)
    text = _read_prompt(prompt, prompt_file)
    directory = _model_directory(model_dir)

    import jax
    import numpy as np

    import kvjax
    from kvjax import models
    from kvjax.generate import stream, warm_up
    from kvjax.request import check_fit

    progress = _progress()
    with progress, _task(progress, "reading the prompt"):
        checkpoint = _without_weights(directory)
        tokens = _encode(checkpoint, text, chat=chat)
    config, positions = checkpoint.config, checkpoint.config.max_positions
    if max_new_tokens is None:
        left = DEFAULT_NEW_TOKENS if positions is None else positions - len(tokens)
        max_new_tokens = max(1, min(DEFAULT_NEW_TOKENS, left))
    check_fit(0, len(tokens), max_new_tokens, None, positions)

    spec = kvjax.CacheSpec(
        batch=1,
        q_heads=config.q_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        capacity=-(-(len(tokens) + max_new_tokens) // CAPACITY_STEP) * CAPACITY_STEP,
        dtype=kind,
    )

    def empty() -> kvjax.Cache:
        return kvjax.init(policy, spec, layers=config.layers)

    jax.eval_shape(empty)  # a policy that cannot hold this model says so before the weights are read
    block = JSON_BLOCK if as_json else 1
    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "sampling": draw,
        "stop_tokens": checkpoint.stop_tokens,
        "measure": True,
        "block": block,
    }
    with progress:
        with _task(progress, "loading weights"):
            model = models.load(directory, dtype=kind).model
        with _task(progress, "compiling"):
            begin = time.perf_counter()
            warm_up(model, empty(), len(tokens), **settings)
            compile_seconds = time.perf_counter() - begin
        with _task(progress, f"prefill of {len(tokens)} tokens", total=len(tokens)) as advance_to:
            held = jax.block_until_ready(empty())
            begin = time.perf_counter()
            run = stream(
                model,
                held,
                [tokens],
                key=None if draw.greedy else jax.random.key(seed),
                tokenizer=checkpoint.tokenizer,
                progress=advance_to,
                **settings,
            )
            jax.block_until_ready(run.logits)
            prefill_seconds = time.perf_counter() - begin
        begin = time.perf_counter()
        pieces = []
        if as_json:
            with _task(progress, f"decoding up to {max_new_tokens} tokens", total=max_new_tokens) as advance_to:
                for piece in run:
                    pieces.append(piece)
                    advance_to(len(run.rows[0]))
    if not as_json:
        for piece in run:
            _write(piece)
        _write("\n")
    decode_seconds = time.perf_counter() - begin
    kvjax.check(run.cache)

    new = run.rows[0]
    size = kvjax.memory.nbytes(run.cache)
    attended = np.asarray(run.attended, np.float64)
    report = {
        "text": "".join(pieces),
        "token_ids": new,
        "prompt_tokens": len(tokens),
        "prefill_tokens_per_second": len(tokens) / prefill_seconds,
        "decode_tokens_per_second": len(new) / decode_seconds,
        "compile_seconds": compile_seconds,
        "cache_bytes_device": size.device,
        "cache_bytes_host": size.host,
        "attended_tokens_per_step": float(attended.mean()),
        "attended_tokens_by_layer": attended.tolist(),
        "model": str(directory),
        "cache": cache,
        "budget": budget if budget is not None or not preset.has_budget else _default_budget(preset),
        "dtype": kind,
        "backend": jax.default_backend(),
    }
    if as_json:
        _write(json.dumps(report) + "\n")
    else:
        _say(
            f"{len(tokens)} prompt tokens at {report['prefill_tokens_per_second']:.0f}/s, {len(new)} new at "
            f"{report['decode_tokens_per_second']:.1f}/s; cache {cache}: {size.device / 2**20:.1f} MiB on the device, "
            f"{size.host / 2**20:.1f} MiB on the host, {attended.mean():.1f} tokens attended a step"
        )


@app.command()
def methods() -> None:
    """Lists the caches: what each keeps, its bytes a token, and its paper."""
    from rich.console import Console
    from rich.table import Table

    from kvjax.presets import REGISTRY
    from kvjax.spec import CacheSpec

    spec = CacheSpec(batch=1, q_heads=32, kv_heads=8, head_dim=128, capacity=131072)
    table = Table(
        caption="Bytes a token are those of one layer of Llama-3.1-8B in a long context: 8 KV heads of 128, bfloat16."
    )
    for title in ("name", "what it keeps", "bytes a token", "budget", "paper"):
        table.add_column(title, justify="right" if title == "bytes a token" else "left")
    for preset in REGISTRY.values():
        stored = f"{preset.policy().bytes_per_token(spec):,.0f}"
        table.add_row(preset.name, preset.keeps, stored, "yes" if preset.has_budget else "no", preset.paper)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a pipe has no width to fit into
    console.print(table)


def main(args: Sequence[str] | None = None) -> int:
    """The console entry point. Returns the exit code."""
    args = list(sys.argv[1:] if args is None else args) or ["--help"]
    try:
        code = app(args, prog_name="kvjax", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # the reader, as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if os.environ.get("KVJAX_TRACEBACK"):
            raise
        usage = getattr(error, "format_message", None)  # click's errors, wherever typer's version keeps their class
        _say(f"error: {_one_line(error) if usage is None else ' '.join(usage().split())}")
        return 1 if usage is None else 2


def _one_line(error: Exception) -> str:
    """What a person can act on, without a line break."""
    message = " ".join(str(error).split())
    if "RESOURCE_EXHAUSTED" in message:
        return f"out of memory; use a smaller model, a shorter prompt or --dtype bfloat16 ({message[:200]})"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, ValueError | NotImplementedError | OSError | RuntimeError):
        return message or type(error).__name__
    return f"{type(error).__name__}: {message} (unexpected; KVJAX_TRACEBACK=1 shows where)"


def _dtype(name: str | None) -> str:
    from kvjax.spec import cache_dtype

    if name is not None:
        return cache_dtype(name).name
    import jax

    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise ValueError(f"give {'one' if prompt is None else 'only one'} of --prompt TEXT and --prompt-file FILE")
    if file is not None:
        if not file.is_file():
            raise ValueError(f"--prompt-file {file}: there is no such file")
        try:
            prompt = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"--prompt-file {file} is not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start}; "
                "convert it first, as with `iconv -t utf-8`"
            ) from None
        prompt = prompt.removesuffix("\n").removesuffix("\r")
    assert prompt is not None
    if not prompt:
        raise ValueError("the prompt is empty; give at least one character")
    return prompt


def _model_directory(given: Path | None) -> Path:
    if given is None:
        shipped = sorted((Path(__file__).parent / "data").glob("*/config.json"))
        if not shipped:
            raise ValueError(
                "this version of kvjax ships no model; pass a directory with config.json, tokenizer and safetensors"
            )
        return shipped[0].parent
    if not given.is_dir():
        raise ValueError(f"{given} is not a directory; pass one with config.json, tokenizer and safetensors")
    if not (given / "config.json").is_file():
        raise ValueError(f"{given} has no config.json; pass a checkpoint in Hugging Face format")
    return given


def _without_weights(directory: Path) -> Checkpoint:
    """The checkpoint before its weights: what a prompt can be checked against."""
    from kvjax.models.config import Fields
    from kvjax.models.weights import Checkpoint, find_family, read_stop_tokens

    fields = Fields.read(directory / "config.json")
    config = find_family(fields).configure(fields)
    nothing: Any = None
    return Checkpoint(nothing, config, read_stop_tokens(directory, fields, config.vocab_size), directory)


def _encode(checkpoint: Checkpoint, text: str, *, chat: bool) -> list[int]:
    """Token ids of the prompt, with the special tokens that the tokenizer or the chat template puts around it."""
    ids = checkpoint.apply_chat(text) if chat else list(checkpoint.tokenizer(text)["input_ids"])
    if not ids:
        raise ValueError("the prompt is empty: the tokenizer makes no token of it")
    return ids


def _default_budget(preset: Any) -> int:
    import inspect

    return inspect.signature(preset.make).parameters["budget"].default


def _progress() -> Progress:
    """Bars on stderr that vanish when done; nothing where stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextmanager
def _task(progress: Progress, what: str, *, total: int | None = None) -> Iterator[Any]:
    """A bar while the block runs; yields a function that sets how much is done."""
    task = progress.add_task(what, total=total)
    try:
        yield lambda done: progress.update(task, completed=done)
    finally:
        progress.remove_task(task)


def _write(text: str) -> None:
    """To stdout at once; characters that its encoding lacks become question marks."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
