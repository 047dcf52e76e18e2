"""`kvjax generate`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from kvjax.cli.answer import Answer, run_job
from kvjax.cli.job import Job
from kvjax.cli.many import Many, answer_many
from kvjax.cli.options import (
    AsJson,
    Budget,
    Dtype,
    ModelDir,
    PromptFile,
    Seed,
    Speculate,
    Temperature,
    TemplateSettings,
    TopP,
    check_new_tokens,
    check_seed,
    check_template_use,
    complete_cache,
    dtype_name,
    in_short,
    join_processes,
    make_placement,
    make_policy,
    model_directory,
    new_tokens,
    optional,
    template_settings,
    without_weights,
)
from kvjax.cli.prompts import EXAMPLE_TOKENS, read_prompt
from kvjax.cli.terminal import Timeline, bar, bars, collect_garbage, say, write, write_json

# Tokens between two looks of the host at the answer.
JSON_BLOCK = 16  # --json does not stream
# On a GPU, where the host then calls programs ahead; 4 steps take some milliseconds.
TEXT_BLOCK = 4
SLOTS = 8  # prompts of --prompts that are answered at the same time


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
    template: TemplateSettings = None,
    as_json: AsJson = False,
    mesh: Annotated[
        str | None,
        optional(
            "Shard weights and KV heads over `model` and cached tokens over `ctx`; `data` replicates both.",
            metavar="data=N,model=N,ctx=N",
        ),
    ] = None,
    selection: Annotated[
        str | None,
        optional(
            "How a method with a budget selects among tokens over `ctx`: as one device would, in two or three "
            "exchanges a layer, or each device its share of the budget, in one. Default: exact.",
            metavar="exact|share",
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
    if not distributed:  # such a process joins the others before it asks for devices
        _start_devices()

    from kvjax.generation.sampling import requested_sampling

    # Parse: what is wrong is said here, before anything takes long.
    cache = _only_cache(caches)
    policy, tokens_read = make_policy(cache, budget)
    sampling = requested_sampling(temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    settings = template_settings(template)
    check_seed(seed)
    check_new_tokens(max_new_tokens)
    _check_drafts(speculate, draft, sparse_prompt)
    texts = texts or []
    if prompts is not None or len(texts) > 1:
        _refuse_together(
            "several --prompt" if prompts is None else "--prompts",
            {
                "--prompt": prompts is not None and texts,
                "--prompt-file": prompt_file,
                "--example": example,
                "--chat": chat,
                "--speculate": speculate,
                "--draft": draft,
                "--sparse-prompt": sparse_prompt,
                "--mesh": mesh,
                "--selection": selection,
                "--distributed": distributed,
                "--json": as_json,
            },
        )
        collect_garbage()
        many = Many(
            model_dir=model_dir,
            cache=cache,
            policy=policy,
            slots=slots or SLOTS,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed,
            dtype=dtype_name(dtype),
            template=settings,
        )
        answer_many(prompts or [read_prompt(text, None) for text in texts], out, many)
        return
    _refuse_for_one_prompt({"--out": out, "--slots": slots})
    check_template_use(settings, chat=chat)
    times = Timeline()
    if distributed:
        join_processes()
        _start_devices()
    placement = make_placement(mesh, selection)
    dtype = dtype_name(dtype)
    directory = model_directory(model_dir)
    text = read_prompt(texts[0] if texts else None, prompt_file, example=example)
    if example and max_new_tokens is None:
        max_new_tokens = EXAMPLE_TOKENS

    import jax

    import kvjax
    from kvjax.generation import drafts
    from kvjax.presets import check_reaches

    own_draft = None if speculate is None else drafts.parse(speculate)
    progress = bars()
    with progress, bar(progress, "loading the tokenizer"), times.row("tokenizer") as words:
        checkpoint = without_weights(directory)
        if chat:
            checkpoint.chat_template.check_used(settings, where="--template")
            tokens = checkpoint.apply_chat(text, template=settings)
        else:
            tokens = checkpoint.encode(text)
        words.append(f"{len(tokens)} tokens of prompt")
    check_reaches(policy, checkpoint.config.attention_layers, f"--cache {cache}")
    job = Job(
        checkpoint=checkpoint,
        tokens=tokens,
        policy=policy,
        placement=placement,
        dtype=dtype,
        max_new_tokens=new_tokens(checkpoint, len(tokens), max_new_tokens),
        stop_tokens=checkpoint.chat_stop_tokens if chat else checkpoint.stop_tokens,
        sampling=sampling,
        key=None if sampling.greedy else jax.random.key(seed),
        own_draft=own_draft,
        draft_directory=None if draft is None else model_directory(draft),
        sparse_prompt=sparse_prompt,
    )
    job.check()

    # Run.
    prints = jax.process_index() == 0
    if example and prints and not as_json:
        new = job.max_new_tokens
        say(f"Continuing {len(tokens)} prompt tokens by {new} new ones; the answer follows.")
    backend = jax.default_backend()
    explains = prints and (as_json or verbose or backend == "gpu")
    answer = run_job(
        job,
        progress,
        times,
        show=_shows_by(prints=prints, as_json=as_json),
        block=_block(backend, as_json=as_json),
        explains=explains,
    )
    kvjax.raise_on_overflow(answer.run.cache)

    # Print.
    if not prints:
        return
    if as_json:
        asked = {
            "model": str(directory),
            "cache": cache,
            "budget": tokens_read,
            "dtype": dtype,
            "implementations": answer.implementations,
            "backend": backend,
        }
        write_json({**answer.report(len(tokens)), **asked})
        return
    _print_cost(answer, len(tokens), cache, times if verbose else None, explains=explains)


def _only_cache(caches: list[str] | None) -> str:
    """The one cache that is asked for."""
    if not caches:
        return "full"
    if len(caches) > 1:
        raise ValueError(
            f"--cache is given {len(caches)} times ({', '.join(caches)}), and generate takes one; "
            "kvjax compare runs several"
        )
    return caches[0]


def _check_drafts(
    speculate: str | None, draft: Path | None, sparse_prompt: float | None
) -> None:
    """Raises ValueError for drafts and shares of a prompt that are wrong for every model."""
    if speculate is not None and draft is not None:
        raise ValueError("--speculate and --draft each say how to draft; give one of them")
    if sparse_prompt is not None:
        from kvjax.validation import check_share

        check_share("--sparse-prompt", sparse_prompt, "what is stored")


def _refuse_together(what: str, options: Mapping[str, object]) -> None:
    """Raises ValueError if one of the options is given, none of which goes together with `what`."""
    for name, value in options.items():
        if value:
            raise ValueError(f"{what} and {name} cannot be given together")


def _refuse_for_one_prompt(options: Mapping[str, object]) -> None:
    """Raises ValueError if one of the options is given, which are for several prompts."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(
                f"{name} is for the answers to --prompts; leave it out for a single prompt"
            )


def _start_devices() -> None:
    """Starts the driver of a GPU in a thread: it takes a second or two, beside the imports and
    the tokenizer.
    """
    if os.environ.get("JAX_PLATFORMS") != "cpu" and find_spec("jax_plugins"):
        threading.Thread(target=_find_devices, daemon=True).start()


def _find_devices() -> None:
    import jax

    with suppress(Exception):  # whoever needs the devices gets the error
        jax.devices()


def _shows_by(*, prints: bool, as_json: bool) -> Callable[[str], None] | None:
    """A function that shows a piece of text: the first process `prints` it, the others drop it.
    None: the text is collected, for the JSON.
    """
    if as_json:
        return None
    return write if prints else _show_nothing


def _show_nothing(piece: str) -> None:
    """Drops a piece of text."""


def _block(backend: str, *, as_json: bool) -> int:
    """Tokens between two looks of the host at the answer."""
    if as_json:
        return JSON_BLOCK
    return 1 if backend == "cpu" else TEXT_BLOCK


def _print_cost(
    answer: Answer, prompt: int, cache: str, times: Timeline | None, *, explains: bool
) -> None:
    """Prints the cost of an answer, the times of its steps, and what ran each operation."""
    for line in answer.summary(prompt, cache):
        say(line)
    if times is not None:
        say(str(times))
    if explains:
        say(in_short(answer.implementations))
        _explain_split(answer)


def _explain_split(answer: Answer) -> None:
    """Prints how the tokens of the cache are split over devices, if they are."""
    from kvjax.cache.cache import attending
    from kvjax.sharding.exchanges import explain_split

    layer = attending(answer.run.cache)[-1]
    if layer.placement is not None:
        say(explain_split(layer.policy, layer.spec, layer.placement))
