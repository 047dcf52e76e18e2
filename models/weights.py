"""Loads a Decoder from a checkpoint in Hugging Face format (config.json, safetensors and
tokenizer), and saves it.

Errors are found before the first tensor goes to a device: in the architecture, the config, and
the name, shape and dtype of every tensor, which are in the headers of the files. Then the
tensors go from their files, a few at a time, to their places in a Decoder that was built
without arrays, so that memory holds only the model and these tensors. The tokenizer is loaded
by transformers when it is first used; none of this needs torch.

Saving is the reverse: the same tables name the tensors, and the config is parsed back and
compared before anything is written, so what the format cannot express is refused and not lost.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from kvjax.sharding.placement import Axes, Placement
from kvjax.spec import default_dtype, require_int
from kvjax.validation import short_repr

from .checkpoint import Checkpoint
from .config import DecoderConfig, Family, Fields, Weight
from .decoder import Decoder, decoder_of_shapes
from .gemma import GEMMA2, GEMMA3
from .generation_config import read_processors, read_stop_tokens
from .gpt_oss import GPT_OSS
from .lfm2 import LFM2
from .linear import param_dtype
from .llama import LLAMA, SMOLLM3
from .mistral import MISTRAL, MIXTRAL
from .phi import PHI3
from .qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from .qwen_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from .rope import Rope, Yarn
from .short_conv import ShortConv
from .tensor_files import (
    FLOATS,
    Grouped,
    Mxfp4,
    Part,
    Stack,
    Tensor,
    mapped,
    place,
    read_header,
    write,
)

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        *(LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, SMOLLM3, GEMMA2, GEMMA3),
        *(MIXTRAL, QWEN2_MOE, QWEN3_MOE, GPT_OSS),
        *(QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, LFM2),
    )
}

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
MOST_TOLD = 12  # problems that one error lists
_BASE = "model."  # begins the names of all tensors but the head's
_HEAD = "lm_head.weight"
_TABLE = "model.embed_tokens.weight"
_WITH_IMAGES = {  # and what their text_config is
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
_TEXT = "language_model."
_IMAGES = ("vision_tower.", "multi_modal_projector.", "visual.")
_ROWS = 4096  # rows of these that are compared at a time
# End the names of tensors in MXFP4.
_BLOCKS = "_blocks"
_SCALES = "_scales"


def shipped() -> Path:
    """The directory of the model that comes with kvjax: a Llama of 26 M parameters and 16384
    positions.

    It finds facts that are hidden in long texts, which shows what a cache keeps, and its text
    reads as English; it knows little else. Its README.md says what it was trained on and what
    it can do; `training/` has the code.

    A clone of kvjax has it, and so does the package `kvjax-26m`.

    >>> load(shipped()).config.max_positions
    16384

    Raises:
      FileNotFoundError: kvjax was installed without its model.
    """
    package = find_spec("kvjax_26m")
    installed = (package and package.submodule_search_locations) or ()
    for folder in (resources.files("kvjax") / "data" / "kvjax-26m", *installed):
        directory = Path(str(folder))
        if (directory / "config.json").is_file():
            return directory
    raise FileNotFoundError(
        "the model that comes with kvjax is not installed: it is the package kvjax-26m, which is in kvjax/data of a "
        "clone (pip install path/to/clone/kvjax/data); or give the directory of a checkpoint of your own"
    )


def load(
    directory: str | Path,
    dtype: DTypeLike | None = None,
    *,
    placement: Placement | None = None,
    rules: Mapping[str, Axes] | None = None,
    on_shapes: Callable[[Decoder], None] | None = None,
) -> Checkpoint:
    """Loads a checkpoint in Hugging Face format, of one of the architectures in `FAMILIES`.

    Needs config.json, and model.safetensors or the files that model.safetensors.index.json
    lists. Memory: the model in `dtype` and a few tensors.

    With a `placement` the model is split over its mesh, as `logical_axis_rules` says. Each
    device gets its own part straight from the files, and each part is read once. Caches that
    the checkpoint makes then have the placement too.

    Args:
      dtype: of weights and caches; by default float32 on a CPU, where 16-bit caches are copied
        to update them, and bfloat16 elsewhere.
      rules: changes to `logical_axis_rules(placement)`, such as {"vocab": None} for an
        embedding on all devices.
      on_shapes: called with the model without its arrays, before any is read, such as to
        compile for it meanwhile.

    Raises:
      FileNotFoundError: the directory or a file is missing.
      ValueError: a config that asks for something unsupported, pickled weights, a damaged file,
        or tensors that are missing, unexpected or misshapen: one error that counts them and
        lists the first. Or sizes that the placement cannot split.
    """
    directory = _path("load", directory)
    dtype = param_dtype(default_dtype() if dtype is None else dtype)
    check_directory(directory)
    found, family, fields, with_images = read_settings(directory)
    config = found.config
    tensors = read_headers(directory, with_images=with_images)
    if config.layers > len(tensors):
        raise ValueError(
            f"num_hidden_layers in {fields.source} is {config.layers}, but the files hold only {len(tensors)} tensors; "
            "one of the two is damaged: download both again"
        )
    if config.tied_head and has_own_head(tensors):
        config = dataclasses.replace(config, tied_head=False)
    model = decoder_of_shapes(config, dtype)
    if on_shapes is not None:
        on_shapes(jax.tree.map(lambda shape: shape, model))  # a copy, as this one is filled
    placement = None if placement is None else placement.auto
    shardings = None if placement is None else model_shardings(model, placement, rules)
    sources = match(family, model, tensors, directory)
    for param, arrays in place(_jobs(tensors, sources, shardings)):
        value = arrays[0]
        if shardings is not None:
            shape = param.get_value().shape
            value = jax.make_array_from_single_device_arrays(
                shape, shardings[id(param)], arrays
            )
        param.set_value(value)
    return dataclasses.replace(found, model=model, config=config, placement=placement)


def logical_axis_rules(placement: Placement) -> dict[str, Axes]:
    """The axes of the mesh over which each named axis of a Decoder's parameters is split; None
    for none.

    Heads are split over the axes of `heads`; MLP and vocabulary, most of a model, over those of
    `context` too, unless that does not come out even.
    `flax.nnx.logical_axis_rules(tuple(rules.items()))` takes the rules too.

    **Source:** Megatron-LM (Shoeybi et al. 2019), section 3: q, k, v, gate and up by columns,
    out and down by rows, so that a layer needs two sums over the devices. The vocabulary is
    split in the embedding and in the head. Each expert of a mixture is split as an MLP is, so
    that all devices have an equal share whatever a router chooses.

    >>> import jax
    >>> from kvjax import Placement
    >>> rules = logical_axis_rules(Placement(mesh=jax.make_mesh((1,), ("model",)), heads="model"))
    >>> rules["q_heads"], rules["embed"]
    ('model', None)
    """
    heads = placement.heads
    return {
        **dict.fromkeys(("q_heads", "kv_heads"), heads),
        **dict.fromkeys(("mlp", "vocab"), placement.heads_and_context),
        **dict.fromkeys(("embed", "head_dim", "experts", "state", "one")),
    }


def distribute(
    model: Decoder, placement: Placement, rules: Mapping[str, Axes] | None = None
) -> Decoder:
    """A copy of `model` with its parameters placed as `load` with this placement does; for
    models that were not loaded.

    Raises:
      ValueError: as `load`, for what the placement cannot split.
    """
    placement = placement.auto
    shardings = model_shardings(model, placement, rules)
    graph, state = nnx.split(model)
    by_path = {path: shardings[id(param)] for path, param in _params(model)}
    moved = {
        path: jax.device_put(param.get_value(), by_path[path])
        for path, param in nnx.to_flat_state(state)
    }
    # With its own parameters: `model` keeps its arrays where they are.
    found = nnx.merge(graph, state, copy=True)
    for path, param in _params(found):
        param.set_value(moved[path])
    return found


def model_shardings(
    model: Decoder, placement: Placement, rules: Mapping[str, Axes] | None = None
) -> dict[int, NamedSharding]:
    """The sharding of each parameter of a Decoder, by the id of its `nnx.Param`.

    Raises:
      ValueError: a rule for a name that no parameter has, or heads or an MLP that cannot be
        split evenly. A vocabulary that cannot be split stays whole.
    """
    config = model.config
    known = logical_axis_rules(placement)
    for name in rules or {}:
        if name not in known:
            raise ValueError(
                f"rules names {name!r}, an axis that no parameter has; use {', '.join(known)}"
            )
    known |= rules or {}
    sizes = {
        "q_heads": (config.q_heads, "query heads"),
        "kv_heads": (config.kv_heads, "KV heads"),
        "mlp": (math.gcd(*_mlp_sizes(config)), "channels of the MLP"),
        "vocab": (config.vocab_size, "tokens of the vocabulary"),
        "embed": (config.hidden_size, "channels"),
        "head_dim": (config.head_dim, "channels of a head"),
        "experts": (config.experts.count if config.experts else 1, "experts"),
        "state": (1, "channels of a layer with a state"),
        "one": (1, "gate of the shared expert"),
    }
    for name, (size, what) in sizes.items():
        if (
            name in ("mlp", "vocab")
            and name not in (rules or {})
            and size % placement.devices_of(known[name])
        ):
            known[name] = placement.heads
        parts = placement.devices_of(known[name])
        if size % parts and name == "vocab":
            known[name] = None
        elif size % parts:
            raise ValueError(
                f"{placement} splits {size} {what} over {parts} devices, which does not come out even; use an axis "
                f"whose size divides {size}"
            )

    def sharding(param: nnx.Param) -> NamedSharding:
        return NamedSharding(
            placement.mesh,
            PartitionSpec(*(known[axis] for axis in param.get_metadata("out_sharding"))),
        )

    return {id(param): sharding(param) for _, param in _params(model)}


def _mlp_sizes(config: DecoderConfig) -> list[int]:
    """The intermediate sizes of all MLPs of a model."""
    by = config.experts
    dense = [config.intermediate_size] if by is None or by.dense_layers else []
    return dense + (
        [] if by is None else [by.size] + ([by.shared_size] if by.shared_size else [])
    )


def check_directory(directory: Path) -> None:
    """Raises FileNotFoundError, with advice, unless `directory` is one with a config.json, and
    ValueError for a pipe or another file in it that is no regular one, as whoever opens it may
    wait forever."""
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        hub = (
            len(directory.parts) == 2 and not directory.is_absolute() and not directory.exists()
        )
        source, target = (
            (directory.as_posix(), directory.name)
            if hub
            else ("ORGANISATION/MODEL", "DIRECTORY")
        )
        raise FileNotFoundError(
            f"{directory} {what}; give a directory with config.json and {_SINGLE} "
            f"(`hf download {source} --local-dir {target}` makes one)"
        )
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(
            f"{directory} has no config.json; give a directory that holds a checkpoint in Hugging Face format"
        )
    for entry in directory.iterdir():
        if entry.exists() and not entry.is_file() and not entry.is_dir():
            raise ValueError(f"{entry} is no regular file; remove it")


def save(
    directory: str | Path,
    model: Decoder,
    *,
    dtype: DTypeLike | None = None,
    bos_token: int | None = None,
    stop_tokens: Sequence[int] = (),
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a model as a checkpoint in Hugging Face format, which `load` and transformers
    read.

    Writes config.json, and model.safetensors or numbered files with an index. The tokenizer is
    not part of a Decoder: copy its files to the same directory. Memory: the tensors of one
    file.

    Args:
      directory: new, or without a checkpoint in it.
      dtype: of the tensors in the files; that of the model's parameters unless given.
      bos_token, stop_tokens: ids for config.json.
      shard_bytes: maximum bytes of tensors in a file; a tensor that is larger has its own file.

    Raises:
      FileExistsError: the directory has a checkpoint already.
      ValueError: a config that no supported architecture can express, token ids outside of the
        vocabulary, or a `shard_bytes` below 1.
    """
    directory = _path("save", directory)
    if not isinstance(model, Decoder):
        cure = "; give its model" if hasattr(model, "init_cache") else ""
        raise ValueError(f"save(model=...) must be a Decoder, got {short_repr(model)}{cure}")
    highest = model.config.vocab_size - 1
    for what, ids in (
        ("bos_token", [] if bos_token is None else [bos_token]),
        ("stop_tokens", stop_tokens),
    ):
        for token in ids:
            require_int(f"save({what}=...)", token, at_least=0, at_most=highest)
    shard_bytes = require_int(
        "save(shard_bytes=...)", shard_bytes, at_least=1, at_most=2**63 - 1
    )
    existing = [
        p.name
        for p in (directory / "config.json", *directory.glob("*.safetensors*"))
        if p.exists()
    ]
    if existing:
        raise FileExistsError(
            f"{directory} has a checkpoint ({', '.join(sorted(existing))}); give a new directory"
        )
    family, fields = describe(model.config)
    params = {".".join(map(str, path)): param.get_value() for path, param in _params(model)}
    rows: dict[str, tuple[Weight, tuple[Array, ...]]] = {}
    for weight in family.weights:
        for i in range(model.config.layers if "{i}" in weight.path else 1):
            if weight.path.format(i=i) not in params or weight.optional:
                continue
            parts = tuple(params[path] for path in weight.paths(i))
            if weight.interleaved:
                axis = parts[0].ndim - 1 - weight.transposed
                shape = list(parts[0].shape)
                shape[axis] *= len(parts)
                parts = (jnp.stack(parts, axis=axis + 1).reshape(shape),)
            experts = list(parts[0]) if weight.by_expert else []
            rows |= {
                weight.name.format(i=i, e=e): (weight, (one,)) for e, one in enumerate(experts)
            }
            if not experts:
                rows[weight.name.format(i=i)] = weight, parts
    sizes = {
        name: sum(p.size * _stored(p, dtype).itemsize for p in parts)
        for name, (_, parts) in rows.items()
    }
    shards = split(sizes, shard_bytes)
    many = len(shards) > 1
    files = (
        [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
        if many
        else [_SINGLE]
    )

    directory.mkdir(parents=True, exist_ok=True)
    for file, names in zip(files, shards, strict=True):
        tensors = {}
        for name in names:
            weight, parts = rows[name]
            arrays = [
                write(np.asarray(p), _stored(p, dtype), transposed=weight.transposed)
                for p in parts
            ]
            tensors[name] = _join(arrays, weight.count_groups(model.config))
        save_file(tensors, directory / file, metadata={"format": "pt"})
    if many:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {
                name: file for file, names in zip(files, shards, strict=True) for name in names
            },
        }
        (directory / _INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    fields["dtype"] = _stored(model.embedding, dtype).name
    if bos_token is not None:
        fields["bos_token_id"] = int(bos_token)
    if stop_tokens:
        ids = [int(token) for token in stop_tokens]
        fields["eos_token_id"] = ids if len(ids) > 1 else ids[0]
    (directory / "config.json").write_text(json.dumps(fields, indent=1), encoding="utf-8")


def describe(config: DecoderConfig) -> tuple[Family, dict[str, Any]]:
    """A family that can express this config, and the fields of its config.json.

    Raises:
      ValueError: no family can.
    """
    rope = _rope_fields(config.rope)
    if (
        isinstance(config.rope, Yarn)
        and config.rope.original * config.rope.factor > config.max_position_embeddings
    ):
        # With it, the positions would be read as those before scaling.
        del rope["original_max_position_embeddings"]
    window = next((w for w in config.windows if w is not None), None)
    by = config.experts
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.q_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.activation,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],  # where transformers 4 looks
        "tie_word_embeddings": config.tied_head,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "initializer_range": config.initializer_range,
        "sliding_window": window,
    }
    if config.rotary_dim is not None:
        fields["partial_rotary_factor"] = config.rotary_dim / config.head_dim
    if config.norm_offset:
        fields |= {
            "hidden_activation": config.activation,
            "query_pre_attn_scalar": round(
                (config.query_scale or config.head_dim**-0.5) ** -2, 9
            ),
            "attn_logit_softcapping": config.soft_cap,
            "final_logit_softcapping": config.head_cap,
        }
        if config.qk_norm and config.post_norms:  # Gemma 3
            local = _rope_fields(config.local_rope or config.rope)
            fields["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    if by is not None:
        fields |= {
            "num_experts": by.count,
            "num_local_experts": by.count,
            "num_experts_per_tok": by.per_token,
            "moe_intermediate_size": by.size,
            "shared_expert_intermediate_size": by.shared_size,
            "norm_topk_prob": by.normalised,
            "mlp_only_layers": list(by.dense_layers),
            "qkv_bias": config.qkv_bias,
            **dict(zip(("swiglu_alpha", "swiglu_limit"), by.clamp or (), strict=False)),
        }
    if config.unrotated:
        fields["no_rope_layers"] = [
            int(i not in config.unrotated) for i in range(config.layers)
        ]
    if window is not None:
        kinds = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
        fields |= {"use_sliding_window": True, "layer_types": kinds}
    fields |= _mixer_fields(config)
    for family in FAMILIES.values():
        described = {
            "architectures": [family.architecture],
            "model_type": family.model_type,
            **fields,
        }
        try:
            same = family.configure(Fields(described)) == config
        except ValueError:
            continue
        if same:
            return family, described
    raise ValueError(
        f"none of {', '.join(f.architecture for f in FAMILIES.values())} supports all that this config asks for: "
        f"{config}"
    )


def _mixer_fields(config: DecoderConfig) -> dict[str, Any]:
    """The fields of layers with a state of fixed size; {} for a model without them."""
    mixer = config.mixer
    if mixer is None:
        return {}
    own = "conv" if isinstance(mixer, ShortConv) else "linear_attention"
    kinds = [own if i in config.recurrent else "full_attention" for i in range(config.layers)]
    if isinstance(mixer, ShortConv):
        return {
            "layer_types": kinds,
            "conv_L_cache": mixer.kernel,
            "conv_bias": config.mixer_bias,
            "norm_eps": config.norm_eps,
            "block_auto_adjust_ff_dim": False,
        }
    return {
        "layer_types": kinds,
        "linear_num_key_heads": mixer.key_heads,
        "linear_num_value_heads": mixer.value_heads,
        "linear_key_head_dim": mixer.key_dim,
        "linear_value_head_dim": mixer.value_dim,
        "linear_conv_kernel_dim": mixer.kernel,
        "partial_rotary_factor": config.rotated / config.head_dim,
    }


def _rope_fields(rope: Rope) -> dict[str, Any]:
    named = {"theta": "rope_theta", "original": "original_max_position_embeddings"}
    found = {
        named.get(name, name): value for name, value in vars(rope).items() if value is not None
    }
    return {"rope_type": type(rope).__name__.lower(), **found}


def split(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Splits names, in order, into lists of at most `most` bytes; a name with more bytes is
    alone in its list.

    >>> split({"a": 3, "b": 4, "c": 9, "d": 1}, 7)
    [['a', 'b'], ['c'], ['d']]
    """
    lists: list[list[str]] = [[]]
    total = 0
    for name, size in sizes.items():
        if lists[-1] and total + size > most:
            lists.append([])
            total = 0
        lists[-1].append(name)
        total += size
    return lists


def read_settings(directory: Path) -> tuple[Checkpoint, Family, Fields, bool]:
    """The checkpoint without its model, its family, the fields of its language model, and
    whether the whole model also sees images."""
    whole = Fields.read(directory / "config.json")
    fields = text_fields(whole)
    family = find_family(fields)
    config = family.configure(fields)
    nothing = cast(Any, None)
    stop_tokens = read_stop_tokens(directory, fields, config.vocab_size)
    processors = read_processors(directory)
    found = Checkpoint(nothing, config, stop_tokens, directory, processors=processors)
    return found, family, fields, fields is not whole


def text_fields(fields: Fields) -> Fields:
    """The fields of the language model in a config of one that also sees images; others as they
    are.
    """
    kind = fields.raw.get("model_type")
    text = fields.group("text_config").raw
    if kind not in _WITH_IMAGES or not text:
        return fields
    shared = (
        *("bos_token_id", "eos_token_id", "tie_word_embeddings"),
        *("quantization_config", "compression_config"),
    )
    outer = {name: fields.raw[name] for name in shared if fields.given(name)}
    default = {"model_type": _WITH_IMAGES[kind]}
    inner = {name: value for name, value in text.items() if name != "architectures"}
    return Fields({**outer, **default, **inner}, f"text_config of {fields.source}")


def _text_name(name: str) -> str | None:
    """The name that a tensor has in files of the language model alone; None for one of the part
    that sees images.
    """
    if name.removeprefix(_BASE).startswith(_IMAGES):
        return None
    inner = name.removeprefix(_BASE).removeprefix(_TEXT)
    if inner == name.removeprefix(_BASE):
        return name
    return inner if inner == _HEAD or inner.startswith(_BASE) else _BASE + inner


# Parts that kvjax lacks, of families that people ask for; `docs/support.md` lists them.
_LATER_GEMMA = (
    "layers that read the keys and values of another layer and take inputs of their own"
)
_GEMMA_4 = (
    f"heads of another size in layers without a window and, in some sizes, {_LATER_GEMMA}"
)
_MAMBA = "Mamba-2 layers"
_LATENT = "attention over latent vectors (MLA)"
MISSING = {
    "gemma3n_text": f"{_LATER_GEMMA}, and streams of activations beside the main one (AltUp)",
    "gemma4_text": _GEMMA_4,
    "granitemoehybrid": _MAMBA,
    "nemotron_h": _MAMBA,
    "falcon_h1": f"{_MAMBA} beside attention in one layer",
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
}


def _path(verb: str, directory: Any) -> Path:
    if not isinstance(directory, str | os.PathLike):
        raise ValueError(
            f"{verb}(directory=...) must be the path of a checkpoint's directory, got {short_repr(directory)}"
        )
    return Path(directory).expanduser()


def _why_missing(kind: str | None) -> str:
    """Returns what kvjax lacks for a family, as a clause; "" if that is not known."""
    if kind is None:
        return ""
    needed = MISSING.get(kind) or MISSING.get(f"{kind}_text")
    return f", because it needs {needed}" if needed else ""


def find_family(fields: Fields) -> Family:
    """The family of a config, by its model_type and architectures.

    Raises:
      ValueError: it is not supported; the message lists the supported ones.
    """
    supported = ", ".join(
        f"{f.architecture} (model_type {f.model_type})" for f in FAMILIES.values()
    )
    architectures = fields.raw.get("architectures") or []
    if not isinstance(architectures, list) or not all(
        isinstance(a, str) for a in architectures
    ):
        raise fields.error("architectures", "a list of names")
    kind = fields.text("model_type", None)
    if kind is None and not architectures:
        raise ValueError(
            f"{fields.source} has neither model_type nor architectures; supported are {supported}"
        )
    if kind is None:
        kind = next(
            (f.model_type for f in FAMILIES.values() if f.architecture in architectures), None
        )
    family = FAMILIES.get(kind) if kind is not None else None
    if family is None or (architectures and family.architecture not in architectures):
        named = ", ".join(architectures) or "no architecture"
        raise ValueError(
            f"{fields.source} is of {named} (model_type {fields.raw.get('model_type')}), which is not "
            f"supported{_why_missing(kind)}; supported are {supported}; add a kvjax.models.Family to "
            "kvjax.models.FAMILIES for one that computes as these do, or call kvjax.attention in a model of your own"
        )
    return family


def read_headers(directory: Path, *, with_images: bool = False) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, from the headers of its files.

    A checkpoint `with_images` gives only those of its language model, by the names that files
    of it alone have.

    Raises:
      FileNotFoundError: no weights, or a file that the index lists is missing.
      ValueError: only pickled weights, a damaged file or index, a tensor in two files or not
        where the index says.
    """
    files = [
        directory / name for name in sorted(set(_read_index(directory).values()) or {_SINGLE})
    ]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{directory} lacks {', '.join(missing)}, which {_INDEX} lists; download the missing files"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        for tensor in read_header(file):
            name = _text_name(tensor.name) if with_images else tensor.name
            if name is None:
                continue
            if (twice := tensors.get(name)) is not None:
                raise ValueError(
                    f"{directory} has {tensor.name} twice, in {twice.file.name} and {file.name}"
                )
            tensors[name] = tensor
    if _TABLE.removeprefix(_BASE) in tensors and not any(
        name.startswith(_BASE) for name in tensors
    ):
        # The files of a model without a head have other names, as in transformers.
        return {
            name if name == _HEAD else _BASE + name: tensor for name, tensor in tensors.items()
        }
    return tensors


def _read_index(directory: Path) -> dict[str, str]:
    """The file of each tensor, by the index; {} for a checkpoint of one file."""
    index = directory / _INDEX
    if (directory / _SINGLE).is_file():
        return {}
    if index.is_file():
        where: Any = Fields.read(index).raw.get("weight_map")
        if (
            not isinstance(where, dict)
            or not where
            or not all(isinstance(f, str) for f in where.values())
        ):
            raise ValueError(
                f"{index} must have a weight_map from tensor names to files; download it again"
            )
        # a digest of the directory covers the visible files directly in it
        outside = sorted(
            {
                name
                for name in where.values()
                if name[:1] in ("", ".") or set(name) & set("/\\\0:")
            }
        )
        if outside:
            raise ValueError(
                f"{index} names files that are not in its directory: {', '.join(map(repr, outside[:4]))}; a shard is a "
                "file in the same directory as the index, so this index is damaged or not to be trusted: download it "
                "again"
            )
        return where
    raise _no_weights(directory)


def _check_index(directory: Path, wanted: Iterable[str], tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError if a tensor that is needed is not where the index says. Its words about
    others are ignored.
    """
    known = {tensor.name: tensor.file.name for tensor in tensors.values()}
    misplaced = {
        name: file for name, file in _read_index(directory).items() if known.get(name) != file
    }
    needed = {tensors[name].name if name in tensors else name for name in wanted}
    if needed & set(misplaced):
        listed = ", ".join(f"{name} ({file})" for name, file in misplaced.items())
        raise ValueError(
            f"{directory} lacks tensors where {_INDEX} says they are: {listed}; download it again"
        )


def has_own_head(tensors: Mapping[str, Tensor]) -> bool:
    """True if the files hold a head that differs from the embedding table, both being there.

    Some fine-tuned checkpoints have one although their config says that the two are tied. As in
    transformers, the files are believed.
    """
    if _HEAD not in tensors or _TABLE not in tensors:
        return False
    head = tensors[_HEAD]
    table = tensors[_TABLE]
    if head.shape != table.shape or not {head.dtype, table.dtype} <= FLOATS.keys():
        return True  # `match` then says what is wrong with it
    heads = head.view(mapped(head.file))
    rows = table.view(mapped(table.file))
    parts = [slice(i, i + _ROWS) for i in range(0, head.shape[0], _ROWS)]
    return any(not np.array_equal(heads[part], rows[part]) for part in parts)


class Source(NamedTuple):
    """A row of the weight table, the parameters that it fills, and the tensors that it is read
    from.
    """

    weight: Weight
    params: tuple[nnx.Param, ...]
    names: tuple[str, ...]  # one; one for each expert; or the blocks and scales of MXFP4
    # in which the first axis of a tensor is, each with a part of each parameter
    groups: int = 1

    @property
    def packed(self) -> bool:
        """True for blocks and scales of MXFP4."""
        return not self.weight.by_expert and len(self.names) == 2

    @property
    def transposed(self) -> bool:
        """True if the last two axes of the tensors lie the other way round than in the Decoder."""
        return self.weight.transposed and not self.packed

    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the tensors."""
        shape = tuple(self.params[0].get_value().shape)
        n = len(self.params)
        if self.packed:
            experts, last, size = (
                shape  # 32 numbers of a block follow each other along the input
            )
            return [(experts, last * n, size // 32, 16), (experts, last * n, size // 32)]
        if len(shape) < 3 and not self.weight.interleaved:
            return [_file_shape(self.weight, self.params)]
        experts, *inside = shape
        if self.weight.followed_by:
            return [(experts, sum(p.get_value().shape[1] for p in self.params), *inside[1:])]
        inside = inside[::-1] if self.weight.transposed else inside
        inside[-1] *= n
        return (
            [tuple(inside)] * len(self.names) if self.weight.by_expert else [(experts, *inside)]
        )

    def split(self, views: list[np.ndarray]) -> list[Any]:
        """The tensor of each parameter in the arrays of the files, as an array or what becomes
        one when it is read.
        """
        n = len(self.params)
        if self.weight.by_expert:
            return [Stack(tuple(views))]
        if self.packed:
            blocks, scales = views
            return [Mxfp4(blocks[:, i::n], scales[:, i::n]) for i in range(n)]
        if self.weight.interleaved:
            return [views[0][..., i::n] for i in range(n)]
        if n == 1:
            return [views[0]]
        if views[0].ndim == 3:  # the parts of all experts
            ends = np.cumsum([param.get_value().shape[1] for param in self.params])
            return list(np.split(views[0], ends[:-1], axis=1))
        if self.groups > 1:
            rows = _rows(self.weight, self.params)
            return [Grouped(views[0], self.groups, part) for part in rows]
        return [views[0][rows] for rows in _rows(self.weight, self.params)]


def match(
    family: Family, model: Decoder, tensors: Mapping[str, Tensor], directory: Path
) -> list[Source]:
    """For each row of the weight table that applies, its parameters in `model` and the tensors
    that are to be read.

    Raises:
      ValueError: counts and lists tensors that are missing, unexpected, misshapen or not of a
        float dtype.
    """
    params = {".".join(map(str, path)): param for path, param in _params(model)}
    sources: list[Source] = []
    for weight in family.weights:
        for i in range(model.config.layers if "{i}" in weight.path else 1):
            if weight.path.format(i=i) not in params:
                continue
            experts = (
                model.config.experts.count if weight.by_expert and model.config.experts else 1
            )
            names = tuple(weight.name.format(i=i, e=e) for e in range(experts))
            if weight.optional and names[0] not in tensors:
                continue
            if names[0] + _BLOCKS in tensors:
                names = names[0] + _BLOCKS, names[0] + _SCALES
            if (
                names[0] == _TABLE
                and model.config.tied_head
                and _TABLE not in tensors
                and _HEAD in tensors
            ):
                names = (_HEAD,)  # some writers keep the other name of the shared tensor
            sources.append(
                Source(
                    weight,
                    tuple(params.pop(path) for path in weight.paths(i)),
                    names,
                    weight.count_groups(model.config),
                )
            )
    assert not params, f"no weight of {family.model_type} fills {sorted(params)}"

    wanted = {
        name: shape for s in sources for name, shape in zip(s.names, s.shapes(), strict=True)
    }
    _check_index(directory, wanted, tensors)
    problems = [
        f"missing: {name}{list(shape)}" for name, shape in wanted.items() if name not in tensors
    ]
    for name, tensor in tensors.items():
        if name not in wanted:
            tied_copy = name == _HEAD and model.config.tied_head
            # inv_freq is of old files: RoPE is in the config
            unread = name.startswith(family.ignored) or name.endswith("rotary_emb.inv_freq")
            if not tied_copy and not unread:
                problems.append(f"unexpected: {name}{list(tensor.shape)}")
            continue
        shape = wanted[name]
        if tensor.shape != shape:
            problems.append(f"misshapen: {name}{list(tensor.shape)}, wanted {list(shape)}")
        if tensor.dtype not in (("U8",) if name.endswith((_BLOCKS, _SCALES)) else FLOATS):
            problems.append(
                f"not a float of 16 bits or more: {name} is {tensor.dtype}; load and save it with transformers "
                "in bfloat16"
            )
    if problems:
        more = [f"and {len(problems) - MOST_TOLD} more"] if len(problems) > MOST_TOLD else []
        listed = "\n  ".join(problems[:MOST_TOLD] + more)
        raise ValueError(
            f"the tensors in {directory} do not fit its config.json ({family.architecture}): correct its "
            f"num_hidden_layers or tie_word_embeddings if the files have other layers or another head; {len(problems)} "
            f"problems:\n  {listed}"
        )
    return sources


def _params(model: Decoder) -> Iterator[tuple[tuple[Any, ...], nnx.Param]]:
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Param):
            yield path, node


def _file_shape(weight: Weight, params: tuple[nnx.Param, ...]) -> tuple[int, ...]:
    shape = tuple(params[0].get_value().shape)
    _, *rest = shape[::-1] if weight.transposed else shape
    return (_rows(weight, params)[-1].stop, *rest)


def _rows(weight: Weight, params: tuple[nnx.Param, ...]) -> list[slice]:
    """The rows of each parameter, along the first axis of their tensor."""
    ends = np.cumsum(
        [param.get_value().shape[-1 if weight.transposed else 0] for param in params]
    ).tolist()
    return [slice(first, stop) for first, stop in zip([0, *ends], ends, strict=False)]


def _jobs(
    tensors: Mapping[str, Tensor],
    sources: Sequence[Source],
    shardings: Mapping[int, NamedSharding] | None,
) -> Iterator[tuple[nnx.Param, list[Part]]]:
    """The parameters and their parts, in the order in which the files hold them; one file is
    mapped at a time, or those of a layer's experts."""

    def first(source: Source) -> tuple[Path, int]:
        tensor = tensors[source.names[0]]
        return tensor.file, tensor.first

    content: dict[Path, np.ndarray] = {}
    for source in sorted(sources, key=first):
        files = {tensors[name].file for name in source.names}
        content = {file: content[file] if file in content else mapped(file) for file in files}
        views = [tensors[name].view(content[tensors[name].file]) for name in source.names]
        for param, view in zip(source.params, source.split(views), strict=True):
            if shardings is None:
                yield param, [Part(view, param.get_value().dtype, source.transposed)]
                continue
            parts = _parts(param.get_value().shape, shardings[id(param)])
            yield (
                param,
                [
                    Part(
                        view[_swapped(index) if source.transposed else index],
                        param.get_value().dtype,
                        source.transposed,
                        devices,
                    )
                    for index, devices in parts
                ],
            )


def _join(arrays: Sequence[np.ndarray], groups: int) -> np.ndarray:
    """One array of parts along its first axis, in which each of the groups has all of them."""
    if len(arrays) == 1:
        return arrays[0]
    split = [a.reshape(groups, -1, *a.shape[1:]) for a in arrays]
    return np.concatenate(split, axis=1).reshape(-1, *arrays[0].shape[1:])


def _swapped(index: tuple[slice, ...]) -> tuple[slice, ...]:
    return *index[:-2], index[-1], index[-2]


def _parts(
    shape: tuple[int, ...], sharding: NamedSharding
) -> list[tuple[tuple[slice, ...], list[Any]]]:
    """The parts of an array that devices of this process hold, and which devices do."""
    devices: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        devices.setdefault(bounds, []).append(device)
    return [(tuple(slice(*bound) for bound in bounds), who) for bounds, who in devices.items()]


def _stored(param: Any, dtype: DTypeLike | None) -> np.dtype:
    return param.dtype if dtype is None else param_dtype(dtype)


def _no_weights(directory: Path) -> Exception:
    pickled = sorted(
        p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt")
    )
    if pickled:
        return ValueError(
            f"{directory} has only pickled weights ({', '.join(pickled)}), which can run code when opened, so they are "
            "not read; convert them, where you trust their source, with transformers and torch: "
            f"AutoModelForCausalLM.from_pretrained({str(directory)!r}).save_pretrained(NEW_DIRECTORY, "
            "safe_serialization=True)"
        )
    return FileNotFoundError(
        f"{directory} has neither {_SINGLE} nor {_INDEX}; download the weights"
    )
