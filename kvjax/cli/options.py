"""Options that commands share: the model, its dtype, caches and their budgets."""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvjax import CacheSpec, Placement
    from kvjax.caches import PerLayer
    from kvjax.caches.policy import Policy
    from kvjax.models import Checkpoint

UNITS = {"K": 1 << 10, "M": 1 << 20}

ModelDir = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL_DIR",
        help="Directory of a checkpoint in Hugging Face format. Default: the model that ships with kvjax.",
        show_default=False,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Dtype of weights and cache: float32, bfloat16 or float16. Default float32 on a CPU, else bfloat16.",
        show_default=False,
    ),
]

AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON in place of text and tables: one object a line, null if not known.")
]


def complete_cache(incomplete: str) -> list[str]:
    """Methods that begin so, for a shell's completion."""
    from kvjax.presets import REGISTRY

    return [name for name in REGISTRY if name.startswith(incomplete)]


CacheNames = Annotated[
    list[str] | None,
    typer.Option(
        help="A method of `kvjax methods`; settings may follow: fier:group=16. Repeat it for several. Default full and "
        "fier.",
        autocompletion=complete_cache,
        show_default=False,
    ),
]
Budgets = Annotated[
    str | None,
    typer.Option(
        help="Tokens that a step reads for each KV head, for methods with a budget. Several: 64,256.",
        show_default=False,
    ),
]
Beside = Annotated[
    int,
    typer.Option(
        min=1,
        help="Caches that decode at a time. Their programs then compile beside one another, one on each core; device "
        "memory must hold as many caches.",
    ),
]

DenseLayers = Annotated[
    int,
    typer.Option(
        min=0,
        help="First layers that attend to everything, in every row, so that rows of one budget read about as many "
        "tokens. A row's own wins: --cache snapkv:dense_layers=0.",
    ),
]


def dtype_name(name: str | None) -> str:
    from kvjax.spec import cache_dtype

    if name is not None:
        return cache_dtype(name).name
    import jax

    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def model_directory(given: Path | None) -> Path:
    from kvjax.models.weights import check_directory, shipped

    if given is None:
        return shipped()
    given = given.expanduser()
    check_directory(given)
    return given


def without_weights(directory: Path) -> Checkpoint:
    """The checkpoint before its weights: what a prompt can be checked against."""
    from kvjax.models.config import Fields
    from kvjax.models.weights import Checkpoint, find_family, read_stop_tokens

    fields = Fields.read(directory / "config.json")
    config = find_family(fields).configure(fields)
    nothing: Any = None
    return Checkpoint(nothing, config, read_stop_tokens(directory, fields, config.vocab_size), directory)


def make_policy(cache: str, budget: int | None = None) -> tuple[PerLayer, int | None]:
    """The policies of `cache`, and their budget if the method has one.

    `cache` is the name of a preset, with settings of it if need be, as "fier:group_reduce=per_head,group=16".
    """
    from kvjax import presets

    return presets.parse_with_budget(cache, budget, where="--cache", budget_where="--budget")


MESH_AXES = ("data", "model", "ctx")


def make_placement(mesh: str | None) -> Placement | None:
    """The placement of "model=4,ctx=2" for one row: `model` splits its KV heads, `ctx` its tokens, and all of `data` do
    the same."""
    if mesh is None:
        return None
    sizes: dict[str, int] = {}
    for part in mesh.split(","):
        name, _, number = part.partition("=")
        if name not in MESH_AXES or name in sizes or not number.isdecimal() or int(number) < 1:
            raise ValueError(
                f"--mesh takes data=N, model=N and ctx=N with commas between them, each at most once; got {mesh!r}"
            )
        sizes[name] = int(number)
    import jax
    import numpy as np

    from kvjax import Placement

    wanted, known = math.prod(sizes.values()), jax.device_count()
    if wanted > known or (jax.process_count() > 1 and wanted != known):
        cure = "at most" if jax.process_count() == 1 else "exactly"
        raise ValueError(
            f"--mesh {mesh} asks for {wanted} devices; there are {known}, so give sizes whose product is {cure} {known}"
        )
    devices = np.array(jax.devices()[:wanted]).reshape([sizes.get(name, 1) for name in MESH_AXES])
    return Placement(mesh=jax.sharding.Mesh(devices, MESH_AXES), heads="model", context="ctx")


def capacity_over(capacity: int, placement: Placement | None) -> int:
    """`capacity`, or the least above it that the devices of `ctx` divide evenly."""
    parts = 1 if placement is None else placement.parts("context")
    return -(-capacity // parts) * parts


def join_processes() -> None:
    """Makes this process one of several: of a cluster that JAX knows, or of those that the environment names."""
    import jax

    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    address, *numbers = (os.environ.get(name) for name in names)
    try:
        count, number = (None if value is None else int(value) for value in numbers)
        jax.distributed.initialize(address, count, number)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"--distributed could not join the other processes ({' '.join(str(error).split())[:160]}); set "
            f"{', '.join(names)}, or start the processes by a cluster that JAX knows, as Slurm"
        ) from error


def sizes(option: str, text: str) -> list[int]:
    """Numbers with commas between them, of which K and M may be the units: [8192, 100] of "8K,100"."""
    wanted = "whole numbers from 1, as 8192 or 8K or 1M, with commas between them"
    return [_size(option, part, wanted) for part in text.split(",")]


def size(option: str, text: str) -> int:
    """One number, with a unit if need be: 8192 of "8K"."""
    return _size(option, text, "one whole number from 1, as 8192 or 8K or 1M")


def _size(option: str, text: str, wanted: str) -> int:
    number, unit = (text[:-1], UNITS[text[-1].upper()]) if text[-1:].upper() in tuple(UNITS) else (text, 1)
    if not (number.isascii() and number.strip().isdecimal()) or int(number) < 1:
        raise ValueError(f"{option} takes {wanted}; got {text!r}")
    from kvjax.spec import require_int

    return require_int(option, int(number) * unit, at_least=1)


def check_folder(option: str, path: Path | None) -> None:
    """Raises ValueError where no folder `path` can be written to; None is no request for one."""
    if path is None:
        return
    parent = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    if not parent.is_dir():
        raise ValueError(f"{option} {path}: {parent} is a file; give the path of a folder, which is made if need be")
    if not os.access(parent, os.W_OK):
        raise ValueError(f"{option} {path}: {parent} may not be written to; give another folder")


def check_file(option: str, path: Path | None) -> None:
    """Raises ValueError where no file `path` can be written; None is no request for one."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder; give the path of a file")
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{option} {path}: there is no such folder, or it may not be written to; make it first")


def implementations(policy: PerLayer, spec: CacheSpec) -> dict[str, str]:
    """The implementation of each operation of a decode step for which there is a kernel, as `kvjax.ops.explain` says
    it."""
    import jax
    import jax.numpy as jnp

    from kvjax import ops

    def step(own: Policy) -> tuple[Any, Any]:
        q = jnp.zeros((spec.batch, spec.kv_heads, spec.group, spec.head_dim), spec.dtype)
        k = jnp.zeros((spec.batch, spec.kv_heads, 1, spec.head_dim), spec.dtype)
        st = own.update(own.flush(own.init(spec)), k, k, jnp.ones(spec.batch, bool))
        return own.attend(st, q, scale=1.0)[:2]

    with ops.explained() as found:
        for own in dict.fromkeys((*policy.first, policy.rest)):
            jax.eval_shape(partial(step, own))
    return {call.op: str(call) for call in found}


def in_short(found: dict[str, str]) -> str:
    """`implementations` in a line: "score_1bit, top_k: xla (why)"."""
    by_answer: dict[str, list[str]] = {}
    for name, answer in found.items():
        by_answer.setdefault(answer, []).append(name)
    parts = []
    for answer, names in by_answer.items():
        which, _, why = answer.partition(": ")
        parts.append(f"{', '.join(names)}: {which}" + (f" ({why})" if why else ""))
    return "; ".join(parts) or "all of a step is plain XLA"
