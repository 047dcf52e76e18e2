"""Options that commands share: the model, its dtype, caches and their budgets."""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

if TYPE_CHECKING:
    from kvjax import CacheSpec, Placement
    from kvjax.generation.drafts import Draft
    from kvjax.models import Checkpoint
    from kvjax.numerics.partial import Logits
    from kvjax.policies import PerLayer
    from kvjax.policies.policy import Policy


def optional(help: str, *names: str, **settings: Any) -> Any:
    """An option whose default, such as None, is not shown."""
    return typer.Option(*names, help=help, show_default=False, **settings)


DTYPES = {
    "f32": "float32",
    "fp32": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
}
UNITS = {"K": 1 << 10, "M": 1 << 20}

ModelDir = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL_DIR",
        help="Directory of a checkpoint in Hugging Face format. Default: the model that ships with kvjax.",
        show_default=False,
    ),
]
PromptFile = Annotated[
    Path | None,
    optional("UTF-8 file with the prompt, or - for stdin. One trailing newline is dropped."),
]
Dtype = Annotated[
    str | None,
    optional(
        "Dtype of weights and cache: float32, bfloat16 or float16, or f32, bf16, f16. Default float32 on a CPU, else "
        "bfloat16."
    ),
]

AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print JSON instead of text and tables: one object per line, null for unknown values.",
    ),
]


def complete_cache(incomplete: str) -> list[str]:
    """Names of methods that start with `incomplete`, for shell completion."""
    from kvjax.presets import REGISTRY, installed

    return [name for name in (*REGISTRY, *installed()) if name.startswith(incomplete)]


CacheName = Annotated[
    str,
    typer.Option(
        help="A method listed by `kvjax methods`, or your own: mine.py:NAME. Settings may follow: fier:group=16.",
        autocompletion=complete_cache,
    ),
]
CacheNames = Annotated[
    list[str] | None,
    optional(
        "A method listed by `kvjax methods`, or your own: mine.py:NAME. Settings may follow: fier:group=16. Repeat the "
        "option for several, the first is the baseline.",
        autocompletion=complete_cache,
    ),
]
Budget = Annotated[
    str | None,
    optional(
        "Tokens that a step reads for each KV head, such as 1024 or 1K, for methods with a budget that set none."
    ),
]
Budgets = Annotated[
    str | None,
    optional(
        "Tokens that a step reads for each KV head, for methods with a budget. Several: 64,256."
    ),
]
Temperature = Annotated[
    float | None, optional("Sampling temperature. Without it, or at 0, decoding is greedy.")
]
TopP = Annotated[
    float | None,
    optional("Draw from the smallest set of tokens with at least this probability."),
]
Speculate = Annotated[
    str | None,
    optional(
        "Speculative decoding: draft tokens and verify several in one step. self drafts by the selection of "
        "--cache and verifies by attention to all tokens, so the text is that of --cache full. prompt-lookup drafts "
        "the tokens that followed the same n-gram earlier; the text stays the same.",
        metavar="self[:TOKENS] or prompt-lookup[:NGRAM,TOKENS]",
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the sampling.")]
TemplateSettings = Annotated[
    list[str] | None,
    optional(
        "A setting of the model's chat template, such as enable_thinking=false; the value is JSON or text. Repeat the "
        'option for several, or give an object: {"enable_thinking": false}.',
        "--template",
        metavar="NAME=VALUE",
    ),
]
Parallel = Annotated[
    int,
    typer.Option(
        min=1,
        help="Number of caches that decode at the same time. Their programs then compile in parallel, one per core; "
        "device memory must hold all of these caches.",
    ),
]

DenseLayers = Annotated[
    int,
    typer.Option(
        min=0,
        help="Number of first layers that attend to everything, for every cache, so that caches of equal budget read "
        "about equally many tokens. A cache's own setting wins: --cache snapkv:dense_layers=0.",
    ),
]


def check_seed(seed: int) -> None:
    """Raises ValueError for a seed that JAX would cut to 32 bits."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed must be in [0, 2**32), got {seed}")


def check_new_tokens(most: int | None) -> None:
    """Raises ValueError for a number of new tokens below 1; None passes."""
    if most is not None and most < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {most}")


def new_tokens(checkpoint: Checkpoint, prompt: int, asked: int | None) -> int:
    """The most new tokens after a prompt; raises ValueError if the model has no positions for
    them.
    """
    from kvjax.generation.prompt_inputs import check_fit
    from kvjax.models.chat import default_new_tokens

    positions = checkpoint.config.max_positions
    new = default_new_tokens(prompt, positions) if asked is None else asked
    check_fit(0, prompt, new, None, positions)
    return new


def check_holds(
    cache: str, policy: PerLayer, checkpoint: Checkpoint, dtype: str, draft: Draft | None = None
) -> None:
    """Raises ValueError for a policy that cannot hold the model, or that cannot draft so.

    `cache` is the policy as it was written.
    """
    import jax

    import kvjax
    from kvjax.generation.drafts import check_draft
    from kvjax.presets import check_reaches
    from kvjax.spec import round_capacity

    config = checkpoint.config
    check_reaches(policy, config.attention_layers, f"--cache {cache}")
    spec = config.spec(1, round_capacity(1, positions=config.max_positions), dtype)
    shapes = jax.eval_shape(lambda: kvjax.init(policy, spec, layers=config.layers))
    config.check_cache(shapes)
    if draft is not None:
        check_draft(draft, shapes)


def template_settings(given: list[str] | None) -> dict[str, Any] | None:
    """Returns the settings that --template gives; None without it."""
    from kvjax.models.template import parse_settings

    return parse_settings(given, where="--template") if given else None


def check_template_use(settings: dict[str, Any] | None, *, chat: bool) -> None:
    """Raises ValueError for settings of a chat template that wraps no prompt."""
    if settings is not None and not chat:
        raise ValueError("--template is for the model's chat template; add --chat")


def dtype_name(name: str | None) -> str:
    """The full name of the dtype that --dtype gives; without it, the default of this backend."""
    from kvjax.spec import cache_dtype, default_dtype

    return default_dtype() if name is None else cache_dtype(DTYPES.get(name, name)).name


def at_home(what: str, path: Path) -> Path:
    """The path with the folder of a user for its ~; `what` names it in an error message."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError(f"{what} {path}: there is no such user; give another path") from None


def model_directory(given: Path | None) -> Path:
    """The directory of the model, by default that of the one that ships with kvjax; raises
    ValueError or FileNotFoundError if it holds none.
    """
    from kvjax.models.weights import check_directory, shipped

    if given is None:
        return shipped()
    given = at_home("MODEL_DIR", given)
    if not given.exists() and any(map(str.isspace, str(given))):
        from kvjax.validation import short_repr

        raise ValueError(
            f"there is no directory {short_repr(str(given))}; a prompt is given as --prompt TEXT"
        )
    check_directory(given)
    return given


def without_weights(directory: Path) -> Checkpoint:
    """The checkpoint without its weights, to check a prompt against."""
    from kvjax.models.weights import read_settings

    return read_settings(directory)[0]


def make_policy(cache: str, budget: str | int | None = None) -> tuple[PerLayer, int | None]:
    """The policies of `cache`, and their budget if the method has one.

    `cache` is the name of a preset, optionally with settings, such as
    "fier:group_reduce=per_head,group=16".
    """
    from kvjax import presets

    tokens = size("--budget", budget) if isinstance(budget, str) else budget
    return presets.parse_with_budget(cache, tokens, where="--cache", budget_where="--budget")


MESH_AXES = ("data", "model", "ctx")


def make_placement(mesh: str | None, selection: str | None = None) -> Placement | None:
    """The placement that `mesh` describes, such as "model=4,ctx=2", for one row: `model` splits
    its KV heads and `ctx` its tokens, among which steps select by `selection`; `data` replicates
    both.
    """
    if selection is not None:
        from kvjax.sharding.placement import Selecting

        ways = get_args(Selecting)
        if selection not in ways:
            raise ValueError(f"--selection must be {' or '.join(ways)}, got {selection!r}")
        if mesh is None:
            raise ValueError(f"--selection {selection} needs tokens over devices: --mesh ctx=N")
    if mesh is None:
        return None
    sizes = _mesh_sizes(mesh)
    import jax
    import numpy as np

    from kvjax import Placement

    wanted = math.prod(sizes.values())
    known = jax.device_count()
    one_process = jax.process_count() == 1
    if wanted > known or (wanted < known and not one_process):
        cure = "at most" if one_process else "exactly"
        raise ValueError(
            f"--mesh {mesh} asks for {wanted} devices; there are {known}, so give sizes whose product is {cure} {known}"
        )
    devices = np.array(jax.devices()[:wanted]).reshape(
        [sizes.get(name, 1) for name in MESH_AXES]
    )
    return Placement(
        jax.sharding.Mesh(devices, MESH_AXES),
        heads="model",
        context="ctx",
        selection="share" if selection == "share" else "exact",
    )


def _mesh_sizes(mesh: str) -> dict[str, int]:
    """The sizes of axes that a text such as "model=4,ctx=2" names."""
    sizes: dict[str, int] = {}
    for part in mesh.split(","):
        name, _, number = part.partition("=")
        if name not in MESH_AXES or name in sizes or not number.isdecimal() or int(number) < 1:
            raise ValueError(
                f"--mesh takes data=N, model=N and ctx=N with commas between them, each at most once; got {mesh!r}"
            )
        sizes[name] = int(number)
    return sizes


def capacity_over(capacity: int, placement: Placement | None) -> int:
    """`capacity`, rounded up to a multiple of the number of devices along `ctx`."""
    parts = 1 if placement is None else placement.parts("context")
    return -(-capacity // parts) * parts


def join_processes() -> None:
    """Joins this process to others: those of a cluster that JAX detects, or those that
    environment variables name.
    """
    import jax

    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    address, *numbers = (os.environ.get(name) for name in names)
    try:
        count, number = (None if value is None else int(value) for value in numbers)
        jax.distributed.initialize(address, count, number)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"--distributed could not join the other processes ({' '.join(str(error).split())[:160]}); set "
            f"{', '.join(names)}, or start the processes with a cluster manager that JAX detects, such as Slurm"
        ) from error


def sizes(option: str, text: str) -> list[int]:
    """Parses comma-separated numbers, optionally with the unit K or M: "8K,100" gives [8192,
    100].
    """
    wanted = "whole numbers from 1, such as 8192, 8K or 1M, with commas between them"
    return [size(option, part, wanted) for part in text.split(",")]


def size(
    option: str, text: str, wanted: str = "one whole number from 1, such as 8192, 8K or 1M"
) -> int:
    """Parses one number, optionally with the unit K or M: "8K" gives 8192."""
    number = text
    unit = 1
    if text[-1:].upper() in tuple(UNITS):
        number = text[:-1]
        unit = UNITS[text[-1].upper()]
    if not (number.isascii() and number.strip().isdecimal()) or int(number) < 1:
        raise ValueError(f"{option} takes {wanted}; got {text!r}")
    from kvjax.spec import require_int

    return require_int(option, int(number) * unit, at_least=1)


def given_file(option: str, path: Path, holds: str) -> Path:
    """Returns the path of a file to read; `holds` says what is in it.

    Raises:
      ValueError: a folder, or nothing at all. A named pipe is fine.
    """
    path = at_home(option, path)
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder; give a file with {holds}")
    if not path.exists():
        raise ValueError(f"{option} {path}: there is no such file")
    return path


def check_folder(option: str, path: Path | None) -> None:
    """Raises ValueError if `path` cannot become a writable folder; None passes."""
    if path is None:
        return
    parent = next(
        folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists()
    )
    if not parent.is_dir():
        raise ValueError(
            f"{option} {path}: {parent} is a file; give the path of a folder, which need not exist yet"
        )
    if not os.access(parent, os.W_OK):
        raise ValueError(f"{option} {path}: {parent} is not writable; give another folder")


def check_file(option: str, path: Path | None) -> None:
    """Raises ValueError if no file can be written at `path`; None passes."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder; give the path of a file")
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(
            f"{option} {path}: there is no such folder, or it is not writable; create it first"
        )


def implementations(policy: PerLayer, spec: CacheSpec, logits: Logits) -> dict[str, str]:
    """The implementation of each operation of a decode step that has a kernel, as
    `kvjax.ops.explain` reports it, in a model whose attention makes `logits` so.
    """
    import jax
    import jax.numpy as jnp

    from kvjax import ops
    from kvjax.policies import Step

    def step(own: Policy) -> tuple[Any, Any]:
        q = jnp.zeros((spec.batch, spec.kv_heads, spec.group, spec.head_dim), spec.dtype)
        k = jnp.zeros((spec.batch, spec.kv_heads, 1, spec.head_dim), spec.dtype)
        every = jnp.ones(spec.batch, bool)
        st = own.update_for_step(own.flush(own.init(spec)), k, k, every, Step(logits))
        return own.attend(st, q, Step(logits))[:2]

    kinds = dict.fromkeys(one.of_size(spec) for one in (*policy.first, policy.rest))
    with ops.explained() as found:
        for own in kinds:
            jax.eval_shape(partial(step, own))
    return {call.op: f"{call.implementation}: {call.reason}" for call in found}


def in_short(found: dict[str, str]) -> str:
    """`implementations` on one line: "score_1bit, top_k: xla (why)"."""
    by_answer: dict[str, list[str]] = {}
    for name, answer in found.items():
        by_answer.setdefault(answer, []).append(name)
    parts = []
    for answer, names in by_answer.items():
        which, _, why = answer.partition(": ")
        parts.append(f"{', '.join(names)}: {which}" + (f" ({why})" if why else ""))
    return "; ".join(parts) or "the whole step runs as plain XLA"
