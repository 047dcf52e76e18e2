"""The description of a decoder: its sizes and variants, and how they are read from a
`config.json`.

`DecoderConfig` is all that the decoder knows of its architecture; no code depends on the family
of a model. A family is a record: the model_type of its configs, a function from their fields to
a DecoderConfig, and a table of weights.

Fields are read as transformers reads them (the defaults of its config classes where a field is
absent, both the `rope_parameters` of transformers 5 and the older `rope_theta` and
`rope_scaling`). A field that would change results and that the decoder does not implement is
refused here, before any weight is read; fields that transformers ignores for a family are
ignored here too. `transformers.AutoConfig` is not used: it takes seconds to import, ignores
fields that it does not know, and does not distinguish an absent field from its default.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.typing import DTypeLike

from kvjax.received import read_object
from kvjax.spec import CacheSpec, RecurrentLayers, require_int
from kvjax.validation import check_flags, check_verbs, finite_number, parts_of, short_repr

from . import rope as ropes
from .activations import ACTIVATIONS
from .gated_delta import GatedDelta
from .rope import Rope
from .short_conv import ShortConv

if TYPE_CHECKING:
    from kvjax.cache.cache import Cache


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The MLPs of a mixture of experts, of which a router chooses some for each token. Static
    and hashable.
    """

    count: int
    per_token: int  # experts of a token
    size: int  # intermediate size of each
    normalised: bool = True  # the weights of the chosen experts sum to 1
    dense_layers: tuple[int, ...] = ()  # layers with a plain MLP
    # intermediate size of an MLP for every token, by a gate of its own
    shared_size: int | None = None
    bias: bool = False  # of the router, gate, up and down
    # alpha and limit of gpt-oss: (up + 1) gate sigmoid(alpha gate), clamped
    clamp: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        for name in (
            "count",
            "per_token",
            "size",
            *(("shared_size",) if self.shared_size is not None else ()),
        ):
            require_int(f"Experts({name}=...)", getattr(self, name), at_least=1)
        check_flags("Experts", normalised=self.normalised, bias=self.bias)
        if self.per_token > self.count:
            raise ValueError(
                f"Experts(per_token={self.per_token}) must be at most count={self.count}"
            )


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The architecture of a Decoder. Static and hashable.

    >>> config = DecoderConfig(
    ...     vocab_size=100, hidden_size=64, intermediate_size=128, layers=2, q_heads=4, kv_heads=2, head_dim=16
    ... )
    >>> config.windows, config.max_positions
    ((None, None), 2048)
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    max_position_embeddings: int = 2048  # after scaling by RoPE, if any
    rope: Rope = field(default_factory=ropes.Default)
    norm_eps: float = 1e-6  # of every RMSNorm
    activation: str = "silu"
    qkv_bias: bool = False
    out_bias: bool = False  # of attention's output projection
    mlp_bias: bool = False  # of gate, up and down
    qk_norm: bool = False  # RMSNorm over each head of q and k, before RoPE
    windows: tuple[
        int | None, ...
    ] = ()  # sliding window of each layer, tokens; () for none anywhere
    local_rope: Rope | None = None  # of the layers with a window; None: `rope`
    # channels of a head that RoPE turns, the first ones; None: all
    rotary_dim: int | None = None
    unrotated: tuple[int, ...] = ()  # layers without RoPE
    query_scale: float | None = None  # factor of the attention logits; None: head_dim**-0.5
    soft_cap: float | None = None  # of the attention logits
    head_cap: float | None = None  # of the model's logits
    sinks: bool = False  # a learned sink logit for each query head
    output_gate: bool = False  # attention's results times sigmoid of a gate for each channel
    recurrent: tuple[int, ...] = ()  # layers with a `mixer` instead of attention
    mixer: GatedDelta | ShortConv | None = None  # its kind and sizes
    mixer_bias: bool = False  # of its projections and its convolution
    norm_offset: bool = False  # norms multiply by 1 + scale
    post_norms: bool = False  # norms of the results of attention and MLP, too
    embedding_scale: float = 1.0
    experts: Experts | None = None  # in place of the MLP
    tied_head: bool = False  # logits by the embedding table
    initializer_range: float = 0.02  # standard deviation of random weights

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "layers",
            "q_heads",
            "kv_heads",
            "head_dim",
        )
        for name in (*sizes, "max_position_embeddings"):
            require_int(f"DecoderConfig({name}=...)", getattr(self, name), at_least=1)
        if self.rotary_dim is not None:
            require_int("DecoderConfig(rotary_dim=...)", self.rotary_dim, at_least=0)
        if self.q_heads % self.kv_heads:
            raise ValueError(
                f"DecoderConfig(q_heads={self.q_heads}, kv_heads={self.kv_heads}): kv_heads must divide q_heads"
            )
        least = 4 if isinstance(self.rope, ropes.Dynamic) else 2  # its exponent is D / (D - 2)
        if self.rotated % 2 or not least <= self.rotated <= self.head_dim:
            own = f"head_dim={self.head_dim}" + (
                "" if self.rotary_dim is None else f", rotary_dim={self.rotary_dim}"
            )
            raise ValueError(
                f"DecoderConfig({own}): RoPE needs an even number, at least {least}, in the head"
            )
        for name in ("rope", "local_rope"):
            if name == "rope" or self.local_rope is not None:
                kind = getattr(self, name)
                check_verbs(
                    f"DecoderConfig({name}=...)",
                    kind,
                    "a kind of RoPE",
                    ("frequencies",),
                    "models.rope.Default()",
                )
        if len(self.ropes) > 1 and any(kind.by_length for kind in self.ropes):
            raise ValueError(
                f"DecoderConfig(rope={self.rope}, local_rope={self.local_rope}): two kinds of RoPE, one of "
                "which depends on the length of the text, are not supported"
            )
        own_layers = self.experts.dense_layers if isinstance(self.experts, Experts) else ()
        for name, layers in (
            ("unrotated", self.unrotated),
            ("recurrent", self.recurrent),
            ("experts.dense_layers", own_layers),
        ):
            if not isinstance(layers, tuple):
                raise ValueError(
                    f"DecoderConfig({name}=...) must be numbers of layers in a tuple, got {short_repr(layers)}"
                )
            for layer in layers:
                require_int(
                    f"DecoderConfig({name}=...)", layer, at_least=0, at_most=self.layers - 1
                )
        self._check_recurrent()
        if self.experts is not None and not isinstance(self.experts, Experts):
            raise ValueError(
                f"DecoderConfig(experts=...) must be kvjax.models.Experts, got {short_repr(self.experts)}"
            )
        for name in ("norm_eps", "initializer_range", "embedding_scale"):
            if finite_number(f"DecoderConfig({name}=...)", getattr(self, name)) < 0:
                raise ValueError(
                    f"DecoderConfig({name}={getattr(self, name)}) must be finite and at least 0"
                )
        for name in ("query_scale", "soft_cap", "head_cap"):
            value = getattr(self, name)
            if value is not None and finite_number(f"DecoderConfig({name}=...)", value) <= 0:
                raise ValueError(f"DecoderConfig({name}={value}) must be above 0, or None")
        flags = (
            "qkv_bias",
            "out_bias",
            "mlp_bias",
            "qk_norm",
            "tied_head",
            "sinks",
            "norm_offset",
            "post_norms",
            "output_gate",
            "mixer_bias",
        )
        check_flags("DecoderConfig", **{name: getattr(self, name) for name in flags})
        if not isinstance(self.activation, str) or self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation {short_repr(self.activation)} is not supported; use one of {', '.join(ACTIVATIONS)}"
            )
        if not isinstance(self.windows, list | tuple):
            raise ValueError(
                f"DecoderConfig(windows=...) must have one entry a layer, got {short_repr(self.windows)}"
            )
        windows = tuple(self.windows) or (None,) * self.layers
        if len(windows) != self.layers:
            raise ValueError(
                f"DecoderConfig(windows=...) has {len(windows)} entries for {self.layers} layers"
            )
        for window in windows:
            if window is not None:
                require_int("DecoderConfig(windows=...)", window, at_least=1)
        object.__setattr__(self, "windows", windows)

    def _check_recurrent(self) -> None:
        if bool(self.recurrent) != (self.mixer is not None):
            raise ValueError(
                f"DecoderConfig(recurrent={self.recurrent}, mixer={self.mixer}): give both, or none of them"
            )
        if self.mixer is not None and not isinstance(self.mixer, GatedDelta | ShortConv):
            raise ValueError(
                f"DecoderConfig(mixer=...) must be a kvjax.models.GatedDelta or ShortConv, got {short_repr(self.mixer)}"
            )
        if isinstance(self.mixer, ShortConv) and self.mixer.channels != self.hidden_size:
            raise ValueError(
                f"DecoderConfig(mixer={self.mixer}) must have as many channels as hidden_size={self.hidden_size}"
            )
        if len(set(self.recurrent)) == self.layers:
            raise ValueError(
                f"DecoderConfig(recurrent={self.recurrent}) leaves none of {self.layers} layers with attention"
            )

    @property
    def attention_layers(self) -> int:
        """Layers with attention, to which the policies of a cache apply."""
        return self.layers - len(self.recurrent)

    @property
    def rotated(self) -> int:
        """Channels of a head that RoPE turns."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The distinct kinds of RoPE."""
        return (
            (self.rope,)
            if self.local_rope in (None, self.rope)
            else (self.rope, self.local_rope)
        )

    def rope_of(self, layer: int) -> int | None:
        """Which of `ropes` a layer has; None for none."""
        if layer in self.unrotated:
            return None
        return len(self.ropes) - 1 if self.windows[layer] is not None else 0

    @property
    def max_positions(self) -> int | None:
        """Positions that the model supports; None for no limit, with dynamic NTK."""
        return None if isinstance(self.rope, ropes.Dynamic) else self.max_position_embeddings

    def spec(self, batch: int, capacity: int, dtype: DTypeLike) -> CacheSpec:
        """The sizes of each layer's cache."""
        return CacheSpec(
            batch=batch,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            capacity=capacity,
            dtype=dtype,
            rope_by_length=self.rope.by_length,
            recurrent=RecurrentLayers(self.mixer, self.recurrent) if self.mixer else None,
        )

    def check_cache(self, cache: Cache) -> None:
        """Raises ValueError if a policy turns keys by another RoPE than the model. Warns of
        codes of biased keys.
        """
        D = self.head_dim
        fixed = self.rotated == self.head_dim and not self.rope.by_length
        parts = [
            (i, part)
            for i, layer in enumerate(cache.layers[: self.layers])
            for part in parts_of(layer.policy)
        ]
        for i, part in parts:
            if (given := getattr(part, "rope", None)) is None:
                continue
            own: Any = None if (which := self.rope_of(i)) is None else self.ropes[which]
            if own and fixed and np.array_equal(given.frequencies(D), own.frequencies(D)):
                continue
            cure = (
                f"set rope_theta={own.theta}"
                if isinstance(own, ropes.Default)
                else f"give it rope={own}"
            )
            if not own or not fixed:
                cure = (
                    "no policy follows that; leave rope_theta out, or use a method without it"
                )
            raise ValueError(
                f"{type(part).__name__}(rope={given}) turns keys by another RoPE than layer {i} of this model, which "
                f"has {own} in {self.rotated} of {D} channels: {cure}"
            )
        if self.qkv_bias and any(
            getattr(part, "key_axis", None) == "token" for _, part in parts
        ):
            warnings.warn(
                "this model adds biases to keys, and codes of a token's keys lose precision by them; use "
                'key_axis="channel"',
                stacklevel=1,  # one place, so that Python shows it once
            )


@dataclass(frozen=True)
class Weight:
    """One row of a family's weight table. `{i}` stands for the number of the layer, `{e}` for
    that of an expert.

    A row applies to a model that has a parameter at `path`, so one table serves models with and
    without a bias.
    """

    name: str  # in the files
    path: str  # in the Decoder
    transposed: bool = False  # [out, in] in the files, [in, out] in the Decoder
    followed_by: tuple[
        str, ...
    ] = ()  # paths of parameters that follow in the same tensor, along its first axis
    # path of the parameter with the odd places of the last axis; `path` has the even
    interleaved: str | None = None
    # field of the config that says in how many groups the first axis is, each with all parts
    groups: str | None = None
    optional: bool = False  # files may have other tensors instead, which a later row names

    @property
    def by_expert(self) -> bool:
        """True if each expert has a tensor of its own, `{e}` in the name; the Decoder stacks
        them.
        """
        return "{e}" in self.name

    def count_groups(self, config: DecoderConfig) -> int:
        """In how many groups the tensor has its parts; 1 for one after the other."""
        return 1 if self.groups is None else attrgetter(self.groups)(config)

    def paths(self, layer: int) -> tuple[str, ...]:
        """The paths in the Decoder of the parts of a layer's tensor, in order."""
        more = (self.interleaved,) if self.interleaved else self.followed_by
        return tuple(path.format(i=layer) for path in (self.path, *more))


@dataclass(frozen=True)
class Family:
    """How the checkpoints of an architecture map to the one decoder."""

    model_type: str  # as config.json names it
    architecture: str
    configure: Callable[[Fields], DecoderConfig]
    weights: tuple[Weight, ...]
    ignored: tuple[str, ...] = ()  # begin the names of tensors that are not read


_REQUIRED: Any = object()
MOST_LAYERS = 1024  # several times those of the deepest models; each layer costs time before any weight is read


class Fields:
    """The fields of a config.json, each read with its type checked. `null` reads as absent."""

    def __init__(self, raw: Mapping[str, Any], source: str = "config.json") -> None:
        self.raw = raw
        self.source = source

    @classmethod
    def read(cls, path: Path) -> Fields:
        """The fields of a JSON file.

        Raises:
          ValueError: no JSON object: see `kvjax.received.read_object`.
        """
        return cls(read_object(path), str(path))

    def given(self, name: str) -> bool:
        return self.raw.get(name) is not None

    def integer(self, name: str, default: Any = _REQUIRED, *, at_least: int = 1) -> Any:
        value = self._get(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return (
            value
            if value is default
            else require_int(f"{name} in {self.source}", value, at_least=at_least)
        )

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        value = self._get(name, default)
        if value is default:
            return value
        if not is_finite(value):
            raise self.error(name, "a finite number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, default: Any = _REQUIRED) -> Any:
        value = self._get(name, default)
        if value is not default and not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def group(self, name: str) -> Fields:
        """The fields of a nested object; none if it is absent."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(value, f"{name} of {self.source}")

    def error(self, name: str, wanted: str) -> ValueError:
        return ValueError(
            f"{name} in {self.source} must be {wanted}, got {short_repr(self.raw.get(name))}"
        )

    def _get(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ValueError(f"{self.source} has no {name}, which this model needs")
        return default


# Fields that no supported family implements, with the values that do not change results.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1,),
    "per_layer_config": ({},),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "attention_chunk_size": (),
    "clip_qkv": (),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "no_rope_layers": ([],),
}


def read_common(
    fields: Fields,
    *,
    kv_heads: int | None,
    head_dim: int | None,
    positions: int,
    takes: tuple[str, ...] = (),
    rope: Rope | None = None,
    activation: str = "hidden_act",
    eps: float = 1e-6,
    tied: bool = False,
) -> dict[str, Any]:
    """Fields that all families read alike, as arguments of DecoderConfig.

    The arguments are the family's defaults in transformers for an absent `num_key_value_heads`
    (None: as many as query heads), `head_dim` (None: hidden size over query heads),
    `max_position_embeddings`, `rms_norm_eps` and `tie_word_embeddings`; fields that this family
    `takes` and others don't; the RoPE, if the family reads its own; and the name of the field
    of the activation.
    """
    for name in ("quantization_config", "compression_config"):
        if fields.raw.get(name) not in (None, {}) and name not in takes:
            method = (
                fields.raw[name].get("quant_method")
                if isinstance(fields.raw[name], dict)
                else None
            )
            by = f" by {method}" if isinstance(method, str) else ""
            raise ValueError(
                f"{fields.source} is of a checkpoint that is quantised{by} ({name}), which is not supported; load an "
                "unquantised one"
            )
    for name, harmless in _REFUSED.items():
        value = fields.raw.get(name)
        if value is not None and value not in harmless and name not in takes:
            allowed = (
                f"only {harmless[0]!r} is, or leaving it out" if harmless else "leave it out"
            )
            raise ValueError(
                f"{name} in {fields.source} is {short_repr(value)}, which is not supported: {allowed}"
            )
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    # Null means as many as query heads in every family.
    stated = fields.raw.get("num_key_value_heads", kv_heads)
    size = fields.integer("head_dim", head_dim)
    if size is None:
        if hidden % heads:
            raise ValueError(
                f"{fields.source} has no head_dim, and num_attention_heads={heads} does not divide hidden_size={hidden}"
            )
        size = hidden // heads
    positions = fields.integer("max_position_embeddings", positions)
    rope = read_rope(fields, positions, takes) if rope is None else rope
    field = activation
    activation = fields.text(activation, "silu")
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{field} in {fields.source} is {activation!r}, which is not supported; use one of {', '.join(ACTIVATIONS)}"
        )
    kv = (
        heads
        if stated is None
        else require_int(f"num_key_value_heads in {fields.source}", stated, at_least=1)
    )
    if heads % kv:
        raise ValueError(
            f"{fields.source} has num_attention_heads={heads}, which num_key_value_heads={kv} does not divide"
        )
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size"),
        "layers": _layers(fields),
        "q_heads": heads,
        "kv_heads": kv,
        "head_dim": size,
        "max_position_embeddings": _extended(fields, rope, positions),
        "rope": rope,
        "norm_eps": fields.number("rms_norm_eps", eps),
        "activation": activation,
        "tied_head": fields.flag("tie_word_embeddings", tied),
        "initializer_range": fields.number("initializer_range", 0.02),
    }


def _extended(fields: Fields, rope: Rope, positions: int) -> int:
    """The positions of a model whose config states `positions`.

    Configs state them after scaling, except that those with YaRN may state the length before it
    too. A config of linear scaling that states them before it must be changed by hand: nothing
    in it tells the two apart.
    """
    name = "original_max_position_embeddings"
    stated = fields.given(name) or any(
        fields.group(g).given(name) for g in ("rope_scaling", "rope_parameters")
    )
    return (
        max(positions, int(rope.original * rope.factor))
        if stated and isinstance(rope, ropes.Yarn)
        else positions
    )


def _layers(fields: Fields) -> int:
    layers = fields.integer("num_hidden_layers")
    if layers > MOST_LAYERS:
        raise ValueError(
            f"num_hidden_layers in {fields.source} is {layers}, more than any model has (at most {MOST_LAYERS} are "
            "read); the file is damaged: download it again"
        )
    return layers


def read_rope(fields: Fields, positions: int, takes: tuple[str, ...] = ()) -> Rope:
    """The kind of RoPE that a config asks for; `positions` is its max_position_embeddings.

    As in transformers, `rope_scaling` wins over `rope_parameters`, a `rope_theta` inside over
    one outside, and an `original_max_position_embeddings` outside over one inside; `type` is an
    old name of `rope_type`.

    >>> read_rope(Fields({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}), 4096)
    Linear(theta=500000.0, factor=2.0)
    """
    given = fields.group("rope_scaling")
    given = given if given.raw else fields.group("rope_parameters")
    nested = [name for name, value in given.raw.items() if isinstance(value, dict)]
    if nested:
        raise ValueError(
            f"{given.source} has parameters for each kind of layer ({', '.join(nested)}), which is not supported: "
            "all layers share one RoPE; write its fields directly"
        )
    if (
        given.raw.get("partial_rotary_factor") not in (None, 1)
        and "partial_rotary_factor" not in takes
    ):
        raise ValueError(
            f"partial_rotary_factor in {given.source} is {given.raw['partial_rotary_factor']!r}, which is not "
            "supported: only 1 is, or leaving it out"
        )
    kind = given.text("rope_type", given.text("type", "default"))
    theta = given.number("rope_theta", fields.number("rope_theta", 10000.0))
    original = fields.integer(
        "original_max_position_embeddings",
        given.integer("original_max_position_embeddings", positions),
    )
    if kind == "default":
        return ropes.Default(theta=theta)
    if kind == "linear":
        return ropes.Linear(theta=theta, factor=given.number("factor"))
    if kind == "dynamic":
        return ropes.Dynamic(theta=theta, factor=given.number("factor"), original=positions)
    if kind == "llama3":
        return ropes.Llama3(
            theta=theta,
            factor=given.number("factor"),
            low_freq_factor=given.number("low_freq_factor"),
            high_freq_factor=given.number("high_freq_factor"),
            original=original,
        )
    if kind == "yarn":
        return ropes.Yarn(
            theta=theta,
            factor=given.number("factor", None) or positions / original,
            original=original,
            beta_fast=given.number("beta_fast", None) or 32.0,
            beta_slow=given.number("beta_slow", None) or 1.0,
            attention_factor=given.number("attention_factor", None),
            mscale=given.number("mscale", None),
            mscale_all_dim=given.number("mscale_all_dim", None),
            truncate=given.flag("truncate", True),
        )
    if kind == "longrope":
        factor = given.number("factor", None) or positions / original
        return ropes.LongRope(
            theta=theta,
            short_factor=_factors(given, "short_factor"),
            long_factor=_factors(given, "long_factor"),
            original=original,
            attention_factor=given.number("attention_factor", None)
            or ropes.longrope_attention(factor, original),
        )
    raise ValueError(
        f"the RoPE type {kind!r} in {given.source} is not supported; those that are: default, linear, dynamic, "
        "llama3, yarn, longrope"
    )


def is_finite(value: Any) -> bool:
    """Whether a value of a JSON file is a number that a float can hold; JSON of Python has
    infinities and NaN.
    """
    try:
        return (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and math.isfinite(value)
        )
    except OverflowError:  # an integer
        return False


def _factors(fields: Fields, name: str) -> tuple[float, ...]:
    """A list of numbers."""
    value = fields.raw.get(name)
    if not isinstance(value, list | tuple) or not all(map(is_finite, value)):
        raise fields.error(name, "a list of finite numbers, one for each pair of channels")
    return tuple(float(x) for x in value)


def read_layer_types(
    fields: Fields, layers: int, window: int | None
) -> tuple[int | None, ...] | None:
    """The sliding window of each layer by `layer_types`, or None if the config has none."""
    types = fields.raw.get("layer_types")
    if types is None:
        return None
    known = {"full_attention": None, "attention": None, "sliding_attention": window}
    if (
        not isinstance(types, list)
        or len(types) != layers
        or not all(isinstance(t, str) for t in types)
    ):
        raise fields.error("layer_types", f"a list of one name for each of the {layers} layers")
    strange = sorted(set(types) - set(known))
    if strange:
        raise ValueError(
            f"layer_types in {fields.source} has {', '.join(strange)}, which is not supported; "
            "those that are: full_attention, sliding_attention"
        )
    if window is None and "sliding_attention" in types:
        raise ValueError(
            f"layer_types in {fields.source} has sliding_attention, but no window is in use; give sliding_window"
            + (" and use_sliding_window" if "use_sliding_window" in fields.raw else "")
        )
    return tuple(known[t] for t in types)
