"""`kvjax generate`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvjax.cli.options import (
    AsJson,
    Dtype,
    ModelDir,
    capacity_over,
    complete_cache,
    dtype_name,
    implementations,
    in_short,
    join_processes,
    make_placement,
    make_policy,
    model_directory,
    without_weights,
)
from kvjax.cli.terminal import bar, bars, say, write, write_json

STDIN = Path("-")
# A prompt to try: the key at its start is out of every local window. The shipped model needs 5 tokens for its answer.
EXAMPLE = (
    "The pass key is 71432. Remember it.\n"
    + "The grass is green. The sky is blue. The sun is yellow.\n" * 140
    + "What is the pass key? The pass key is "
)
EXAMPLE_TOKENS = 5
JSON_BLOCK = 16  # tokens between two reads of the host; --json need not show each token as it comes


def generate(
    model_dir: ModelDir = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt itself.", show_default=False)] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            help="UTF-8 file with the prompt, or - for stdin. One newline at its end is dropped.", show_default=False
        ),
    ] = None,
    example: Annotated[
        bool,
        typer.Option(
            "--example",
            help="Ask for a pass key that some 2800 tokens of filler follow; 5 new tokens unless you set others.",
        ),
    ] = False,
    cache: Annotated[
        str,
        typer.Option(
            help="A method of `kvjax methods`; settings may follow: fier:group=16.", autocompletion=complete_cache
        ),
    ] = "full",
    budget: Annotated[
        int | None,
        typer.Option(help="Tokens that a step reads for each KV head, for methods with a budget.", show_default=False),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="Most tokens to generate. Default 128, or what the model's positions leave.", show_default=False
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Sampling temperature. Without it, or at 0, decoding is greedy.", show_default=False),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k most likely tokens.", show_default=False)] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw from the smallest set of tokens with at least this probability.", show_default=False),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Draw from tokens with at least this share of the highest probability.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    speculate: Annotated[
        str | None,
        typer.Option(
            metavar="prompt-lookup[:NGRAM,TOKENS]",
            help="Draft what followed the same words before, and check the draft in one step. The text stays the same.",
            show_default=False,
        ),
    ] = None,
    draft: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Draft 4 tokens at a time by this smaller model of the same vocabulary.",
            show_default=False,
        ),
    ] = None,
    dtype: Dtype = None,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
    as_json: AsJson = False,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="data=N,model=N,ctx=N",
            help="Split model and KV heads over devices of `model`, cached tokens over `ctx`; `data` repeats that.",
            show_default=False,
        ),
    ] = None,
    distributed: Annotated[
        bool,
        typer.Option(
            "--distributed",
            help="This is one of several processes with the same arguments (jax.distributed); the first one prints.",
        ),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Say which implementation ran each operation.")] = False,
) -> None:
    """Continues a prompt, decoding through a KV cache.

    The text streams to stdout, progress and a summary go to stderr. Tokens per second are of runs without
    compilation: everything is compiled, and run once for a few tokens, before the clock starts; `compile_seconds`
    in the JSON is that time.
    """
    from kvjax.sampling import requested_sampling

    policy, budget = make_policy(cache, budget)
    draw = requested_sampling(temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {max_new_tokens}")
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed must be in [0, 2**32), got {seed}")  # JAX would drop the higher bits
    if speculate is not None and draft is not None:
        raise ValueError("--speculate and --draft both say what drafts; give one of them")
    if distributed:
        join_processes()
    placement = make_placement(mesh)
    kind = dtype_name(dtype)
    text = read_prompt(prompt, prompt_file, example=example)
    if example and max_new_tokens is None:
        max_new_tokens = EXAMPLE_TOKENS
    directory = model_directory(model_dir)

    import jax
    import numpy as np

    import kvjax
    from kvjax import drafts, models
    from kvjax.generation import stream, warm_up
    from kvjax.models.chat import default_new_tokens, round_capacity
    from kvjax.presets import check_reaches
    from kvjax.request import check_fit

    drafting: Any = None if speculate is None else drafts.parse(speculate)
    if draft is not None:
        draft = model_directory(draft)
    progress = bars()
    with progress, bar(progress, "loading the tokenizer"):
        checkpoint = without_weights(directory)
        tokens = checkpoint.apply_chat(text) if chat else checkpoint.encode(text)
    config, positions = checkpoint.config, checkpoint.config.max_positions
    check_reaches(policy, config.layers, f"--cache {cache}")
    if max_new_tokens is None:
        max_new_tokens = default_new_tokens(len(tokens), positions)
    check_fit(0, len(tokens), max_new_tokens, None, positions)

    spec = kvjax.CacheSpec(
        batch=1,
        q_heads=config.q_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        capacity=capacity_over(round_capacity(len(tokens) + max_new_tokens), placement),
        dtype=kind,
    )

    def empty() -> kvjax.Cache:
        return kvjax.init(policy, spec, layers=config.layers, placement=placement)

    shapes = jax.eval_shape(empty)  # a policy that cannot hold this model says so before the weights are read
    if draft is not None:
        drafts.check_vocabularies(without_weights(draft).config.vocab_size, config.vocab_size)
    if drafting is not None or draft is not None:
        drafts.check_takes_drafts(shapes, kvjax.DraftModel.tokens if drafting is None else drafting.tokens)
    ran = implementations(policy, spec)
    if example and not as_json and jax.process_index() == 0:
        wait = "take about half a minute on two free cores" if jax.default_backend() == "cpu" else "come first"
        say(
            f"Continuing {len(tokens)} prompt tokens by {max_new_tokens} new ones. "
            f"Compiling and reading the prompt {wait}; the answer follows."
        )
    block = JSON_BLOCK if as_json else 1
    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "sampling": draw,
        "stop_tokens": checkpoint.stop_tokens,
        "measure": True,
        "block": block,
    }
    with progress:
        with bar(progress, "loading weights"):
            model = models.load(directory, dtype=kind, placement=placement).model
            if draft is not None:
                drafting = kvjax.DraftModel(models.load(draft, dtype=kind).model)
            settings["draft"] = drafting
        with bar(progress, "compiling") as advance_to:
            begin = time.perf_counter()
            warm_up(model, empty(), len(tokens), progress=advance_to, **settings)
            compile_seconds = time.perf_counter() - begin
        with bar(progress, f"reading the prompt of {len(tokens)} tokens", total=len(tokens)) as advance_to:
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
            with bar(progress, f"decoding up to {max_new_tokens} tokens", total=max_new_tokens) as advance_to:
                for piece in run:
                    pieces.append(piece)
                    advance_to(len(run.rows[0]))
    first = jax.process_index() == 0
    if not as_json:
        for piece in run:
            if first:
                write(piece)
        if first:
            write("\n")
    decode_seconds = time.perf_counter() - begin
    kvjax.raise_on_overflow(run.cache)

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
        "acceptance": None if run.speculation is None else run.speculation.acceptance,
        "tokens_per_step": None if run.speculation is None else run.speculation.tokens_per_step,
        "model": str(directory),
        "cache": cache,
        "budget": budget,
        "dtype": kind,
        "implementations": ran,
        "backend": jax.default_backend(),
    }
    if not first:
        return
    if as_json:
        write_json(report)
    else:
        say(
            f"{len(tokens)} prompt tokens at {report['prefill_tokens_per_second']:.0f}/s, {len(new)} new at "
            f"{report['decode_tokens_per_second']:.1f}/s; cache {cache}: {size.device / 2**20:.1f} MiB on the device, "
            f"{size.host / 2**20:.1f} MiB on the host; a step read {_in_layers(attended, len(tokens), len(new))}"
        )
        if run.speculation is not None:
            say(
                f"{run.speculation.acceptance:.0%} of {run.speculation.drafted} drafted tokens accepted, "
                f"{run.speculation.tokens_per_step:.2f} tokens a step"
            )
        if verbose or jax.default_backend() == "gpu":
            say(in_short(ran))


def _in_layers(attended: Any, prompt: int, new: int) -> str:
    """The tokens that a step read in the mean, by layers: "256 of 2832 tokens in 6 layers, 2832 in 2"."""
    counts: dict[int, int] = {}
    for tokens in sorted(round(float(mean)) for mean in attended):
        counts[tokens] = counts.get(tokens, 0) + 1
    (fewest, layers), *more = counts.items()
    stored = round(prompt + (new + 1) / 2)  # of the mean step, its own token too
    if not more:
        return f"{fewest} of {stored} tokens"
    if len(more) > 1:
        return f"{fewest} to {more[-1][0]} of {stored} tokens, by layer"
    return f"{fewest} of {stored} tokens in {layers} layer{'s' * (layers > 1)}, {more[0][0]} in {more[0][1]}"


def _is_text(argument: str) -> bool:
    """Whether an argument of the command was UTF-8; Python keeps other bytes as half characters."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_prompt(
    prompt: str | None, file: Path | None, *, example: bool = False, file_option: str = "--prompt-file"
) -> str:
    """The prompt of one of the three. `file_option` names the file in error messages."""
    given = (prompt is not None) + (file is not None) + example
    if given != 1:
        number = "only one" if given else "one"
        raise ValueError(f"give {number} of --prompt TEXT, --prompt-file FILE and --example, a prompt to try")
    if example:
        return EXAMPLE
    if prompt is not None and not _is_text(prompt):
        raise ValueError("--prompt is not UTF-8; set a UTF-8 locale, or give the text as --prompt-file FILE")
    if file is not None:
        prompt = _decode(_content(file, file_option), f"{file_option} {file}")
        prompt = prompt.removesuffix("\n").removesuffix("\r")
    assert prompt is not None
    if not prompt:
        raise ValueError("the prompt is empty; give at least one character")
    return prompt


def _content(file: Path, option: str) -> bytes:
    if file == STDIN:
        return sys.stdin.buffer.read()
    file = file.expanduser()
    if file.is_dir():
        raise ValueError(f"{option} {file} is a folder; give a file with the prompt")
    if not file.exists():  # a pipe will do
        raise ValueError(f"{option} {file}: there is no such file")
    return file.read_bytes()


def _decode(content: bytes, what: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{what} is not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start}; convert it first, as with "
            "`iconv -t utf-8`"
        ) from None
