"""One decoder for all families: pre-norm blocks of grouped-query attention and a gated MLP.

Attention is one call of `kvjax.attention_info` on the layer's cache; nothing here knows what
the cache keeps. Layers run in a Python loop over a tuple of layer caches, so that each is
updated in place when the caller donates the cache.

Numbers: parameters and activations have one dtype; norms, RoPE angles and rotation, attention
logits and softmax, and the logits are f32. Products of f32 parameters run at full f32
precision, on a GPU too.

Each parameter names its axes ("vocab", "embed", "q_heads", "kv_heads", "head_dim", "mlp",
"experts") in its metadata. Rules from these names to axes of a mesh say how a model is split
over devices; `kvjax.models.load` has such rules.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from kvjax.attention import attention_info, decode_info
from kvjax.cache.cache import Cache, LayerCache, as_rows
from kvjax.cache.flushing import flush
from kvjax.numerics.derivatives import with_derivative
from kvjax.numerics.selection import Selection
from kvjax.policies import Info
from kvjax.sharding.placement import (
    Placement,
    auto_axes,
    keep_tokens,
    mesh_of,
    split_channels,
    split_tokens,
    to_context,
)
from kvjax.spec import CacheSpec, require_int
from kvjax.validation import short_repr

from . import rope
from .activations import ACTIVATIONS
from .config import DecoderConfig
from .linear import (
    Linear,
    RMSNorm,
    ShapesOnly,
    named_param,
    norm_settings,
    normal,
    param_dtype,
    product,
)
from .mixers import make_mixer


class Attention(nnx.Module):
    """Grouped-query attention with RoPE, over the tokens that the layer's cache attends to."""

    def __init__(self, config: DecoderConfig, *, layer: int, rngs: nnx.Rngs, dtype: np.dtype):
        hidden = config.hidden_size
        N = config.q_heads
        K = config.kv_heads
        D = config.head_dim
        common: dict[str, Any] = {
            "scale": config.initializer_range,
            "rngs": rngs,
            "dtype": dtype,
        }
        self.q = Linear(
            hidden, N * D, axes=("embed", "q_heads"), bias=config.qkv_bias, **common
        )
        self.gate = (
            Linear(hidden, N * D, axes=("embed", "q_heads"), bias=config.qkv_bias, **common)
            if config.output_gate
            else None
        )
        self.k = Linear(
            hidden, K * D, axes=("embed", "kv_heads"), bias=config.qkv_bias, **common
        )
        self.v = Linear(
            hidden, K * D, axes=("embed", "kv_heads"), bias=config.qkv_bias, **common
        )
        self.out = Linear(
            N * D, hidden, axes=("q_heads", "embed"), bias=config.out_bias, **common
        )
        norm: dict[str, Any] = {"axis": "head_dim", **norm_settings(config, dtype)}
        self.q_norm = RMSNorm(D, **norm) if config.qk_norm else None
        self.k_norm = RMSNorm(D, **norm) if config.qk_norm else None
        self.sinks = (
            named_param(jnp.zeros(N, dtype), ("q_heads",)) if config.sinks else None
        )  # [N]
        self.head_dim = D
        self.rope = config.rope_of(layer) if len(config.ropes) > 1 or config.unrotated else 0
        self.window = config.windows[layer]
        self.scale = config.query_scale
        self.soft_cap = config.soft_cap

    def __call__(
        self,
        x: Array,
        cos: Any,
        sin: Any,
        cache: LayerCache | None,
        *,
        lengths: ArrayLike | None = None,
        active: ArrayLike | None = None,
        first_chunk: bool = False,
        steps: bool = False,
        exact: bool = False,
        selection: Selection | None = None,
    ) -> tuple[Array, LayerCache | None, Info | None]:
        """out [B, T, hidden] of x [B, T, hidden], the cache with its T tokens, and what a decode
        step read. The arguments are those of `Decoder`, of which `steps` and `exact` need a
        cache.
        """
        q, k, v = (
            part(x).reshape(*x.shape[:2], -1, self.head_dim)
            for part in (self.q, self.k, self.v)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        if self.rope is not None:
            # Tuples have one entry for each kind of RoPE that the model's layers have.
            own_cos, own_sin = (a if isinstance(a, Array) else a[self.rope] for a in (cos, sin))
            q = rope.rotate(q, own_cos, own_sin)
            k = rope.rotate(k, own_cos, own_sin)
        sinks = None if self.sinks is None else self.sinks[...].astype(jnp.float32)
        info: Info | None
        if steps and cache is not None:
            mixed, cache, info = decode_info(
                cache,
                q,
                k,
                v,
                lengths=lengths,
                active=active,
                window=self.window,
                scale=self.scale,
                soft_cap=self.soft_cap,
                sinks=sinks,
                flush=False,
                selection=selection,
                exact=exact,
            )
        else:
            mixed, cache, info = attention_info(
                cache,
                q,
                k,
                v,
                lengths=lengths,
                active=active,
                window=self.window,
                scale=self.scale,
                soft_cap=self.soft_cap,
                sinks=sinks,
                first_chunk=first_chunk,
                flush=False,
                selection=selection,
            )
        mixed = mixed.reshape(*x.shape[:2], -1)
        if self.gate is not None:
            mixed = mixed * jax.nn.sigmoid(self.gate(x))
        return self.out(mixed), cache, info


class MLP(nnx.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: np.dtype, size: int | None = None
    ):
        hidden = config.hidden_size
        inner = size or config.intermediate_size
        common: dict[str, Any] = {
            "bias": config.mlp_bias,
            "scale": config.initializer_range,
            "rngs": rngs,
            "dtype": dtype,
        }
        self.gate = Linear(hidden, inner, axes=("embed", "mlp"), **common)
        self.up = Linear(hidden, inner, axes=("embed", "mlp"), **common)
        self.down = Linear(inner, hidden, axes=("mlp", "embed"), **common)
        self.activation = config.activation

    def __call__(self, x: Array, placement: Placement | None = None) -> Array:
        gate, up = (split_channels(placement, part(x)) for part in (self.gate, self.up))
        return self.down(ACTIVATIONS[self.activation](gate) * up)


class Router(nnx.Module):
    """Logits of experts, in f32: x @ kernel.T + bias."""

    def __init__(
        self,
        hidden: int,
        experts: int,
        *,
        bias: bool,
        scale: float,
        rngs: nnx.Rngs,
        dtype: np.dtype,
    ):
        self.kernel = named_param(
            normal(rngs, (experts, hidden), scale, dtype), ("experts", "embed")
        )  # [E, hidden]
        self.bias = (
            named_param(jnp.zeros(experts, dtype), ("experts",)) if bias else None
        )  # [E]

    def __call__(self, x: Array, *, few: bool) -> Array:
        """f32[n, E] of x [n, hidden]. With `few` rows it is a sum, which a GPU's kernel fuses
        with what makes x.
        """
        kernel = self.kernel[...]
        if few:
            y = jnp.sum(
                x.astype(jnp.float32)[:, None] * kernel.astype(jnp.float32)[None], axis=-1
            )
        else:
            y = product("ni,ei->ne", x, kernel, jnp.float32)
        if self.bias is None:
            return y
        return y + jnp.broadcast_to(self.bias[...].astype(jnp.float32), y.shape)


class MixtureOfExperts(nnx.Module):
    """The MLPs that a router chooses for each token, summed by its weights.

    A step of few tokens reads only the experts that they chose. A prompt is sorted by expert,
    and read in blocks of one expert: `jax.lax.ragged_dot` of jax 0.11 multiplies all rows by
    all experts on a GPU, and takes 8.6 GB for 2048 tokens of a layer of Qwen3-30B-A3B. The
    router's choice is made in f32; equal weights go to the lower expert.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: np.dtype):
        experts = config.experts
        assert experts is not None
        self.config = experts
        hidden = config.hidden_size
        E = experts.count
        inner = experts.size
        scale = config.initializer_range
        common: dict[str, Any] = {"scale": scale, "rngs": rngs, "dtype": dtype}

        def each(*shape: int, axes: tuple[str, ...]) -> nnx.Param:
            return named_param(normal(rngs, (E, *shape), scale, dtype), ("experts", *axes))

        self.router = Router(hidden, E, bias=experts.bias, **common)
        self.gate = each(inner, hidden, axes=("mlp", "embed"))  # [E, inner, hidden]
        self.up = each(inner, hidden, axes=("mlp", "embed"))
        self.down = each(hidden, inner, axes=("embed", "mlp"))
        sizes = {"gate": (inner, "mlp"), "up": (inner, "mlp"), "down": (hidden, "embed")}
        for name, (size, axis) in sizes.items():  # [E, inner], or [E, hidden]
            bias = None
            if experts.bias:
                bias = named_param(jnp.zeros((E, size), dtype), ("experts", axis))
            setattr(self, name + "_bias", bias)
        # One more expert, which all tokens pass, if the model has one.
        shared = None
        shared_gate = None
        if experts.shared_size:
            shared = MLP(config, rngs=rngs, dtype=dtype, size=experts.shared_size)
            shared_gate = Linear(hidden, 1, axes=("embed", "one"), bias=False, **common)
        self.shared = shared
        self.shared_gate = shared_gate
        self.activation = config.activation

    def __call__(self, x: Array, placement: Placement | None = None) -> Array:
        experts = self.config
        flat = keep_tokens(placement, x).reshape(-1, x.shape[-1])
        n = flat.shape[0]
        k = experts.per_token
        few = n * k <= max(experts.count, k)

        # Each token becomes k rows, one for each expert that the router chose for it.
        logits = self.router(flat, few=few)
        weights, chosen = route(logits, k, normalised=experts.normalised)
        expert_of_row = chosen.reshape(-1)
        rows = jnp.repeat(flat, k, axis=0)
        parts = {
            name: getattr(self, name)
            for name in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
        }
        kernels = {name: part[...] for name, part in parts.items() if part is not None}
        if few:
            mixed = self._mix(kernels, rows, expert_of_row, _by_row)
        else:
            order = jnp.argsort(expert_of_row, stable=True)
            in_blocks = with_derivative(
                partial(self._in_blocks, differentiable=False),
                partial(self._in_blocks, differentiable=True),
            )
            mixed = in_blocks(kernels, rows[order], expert_of_row)[jnp.argsort(order)]

        # The rows of a token are summed by the router's weights.
        of_token = mixed.reshape(n, k, -1).astype(jnp.float32)
        out = jnp.sum(of_token * weights[..., None], axis=1).astype(x.dtype)
        if self.shared is not None and self.shared_gate is not None:
            out += jax.nn.sigmoid(self.shared_gate(flat)) * self.shared(flat)
        return out.reshape(x.shape)

    def _in_blocks(
        self, kernels: dict[str, Array], x: Array, chosen: Array, *, differentiable: bool
    ) -> Array:
        """Rows x [m, hidden], sorted by expert, through the experts: a block of rows of one
        expert at a time. `chosen` i32[m] has the experts of these rows in any order.

        A block may reach into the rows of the next expert, whose own block then writes them
        again. With `differentiable` the loop has as many turns as there may be blocks, not as
        many as there are: then it has a derivative.
        """
        m = x.shape[0]
        E = self.config.count
        block = min(max(16, 1 << (m // E).bit_length()), 256)  # rows
        rows_of = jnp.bincount(chosen, length=E).astype(jnp.int32)  # of each expert
        blocks_of = (rows_of + (block - 1)) // block
        last_row = jnp.cumsum(rows_of)  # where the rows of each expert end
        last_block = jnp.cumsum(blocks_of)
        padded = jnp.pad(x, ((0, block), (0, 0)))

        def add_block(i: Array, out: Array) -> Array:
            e = jnp.minimum(jnp.searchsorted(last_block, i, side="right"), E - 1)
            # A block past the last one lies in the padding.
            block_of_expert = i - last_block[e] + blocks_of[e]
            first = last_row[e] - rows_of[e] + block_of_expert * block
            rows = jax.lax.dynamic_slice_in_dim(padded, first, block)
            mixed = self._mix(kernels, rows, e, _by_block)
            return jax.lax.dynamic_update_slice_in_dim(out, mixed, first, 0)

        nothing = jnp.zeros_like(padded)
        if not differentiable:
            return jax.lax.fori_loop(0, last_block[-1], add_block, nothing)[:m]
        most_blocks = jnp.arange(m // block + E, dtype=jnp.int32)
        out, _ = jax.lax.scan(lambda out, i: (add_block(i, out), None), nothing, most_blocks)
        return out[:m]

    def _mix(self, kernels: dict[str, Array], x: Array, expert: Array, multiply: Any) -> Array:
        """Rows [m, hidden] of x through experts: `expert` is i32[m] with `multiply` `_by_row`, or
        i32[], one for all rows, with `_by_block`.
        """

        def linear(x: Array, name: str) -> Array:
            y = multiply(x, kernels[name], expert)
            bias = kernels.get(name + "_bias")
            return y if bias is None else y + jnp.broadcast_to(bias[expert], y.shape)

        gate = linear(x, "gate")
        up = linear(x, "up")
        if self.config.clamp is None:
            return linear(ACTIVATIONS[self.activation](gate) * up, "down")
        # As in gpt-oss.
        alpha, limit = self.config.clamp
        gate = jnp.minimum(gate, limit)
        up = jnp.clip(up, -limit, limit)
        return linear((up + 1) * gate * jax.nn.sigmoid(alpha * gate), "down")


def route(logits: Array, k: int, *, normalised: bool) -> tuple[Array, Array]:
    """The k experts with the largest of logits f32[n, E], in order, equal ones by number: their
    weights f32[n, k], and which they are, i32[n, k].

    A weight is the expert's share of the softmax, over all experts or, if `normalised`, over
    these. An expert's place is the number of those before it: a GPU counts in one kernel, and
    `jax.lax.top_k` is a sort of several microseconds.
    """
    n, E = logits.shape
    count = functools.partial(jnp.sum, axis=-1, dtype=jnp.int32)

    # The place of each expert: how many others have a larger logit, or an equal one and a lower
    # number.
    own, other = (jax.lax.broadcasted_iota(jnp.int32, (n, E, E), i) for i in (1, 2))
    own_logit = logits[..., None]
    other_logit = logits[:, None]
    before = (other_logit > own_logit) | ((other_logit == own_logit) & (other < own))

    # The expert at each of the first k places; a sum of which one term is not 0.
    place, expert = (jax.lax.broadcasted_iota(jnp.int32, (n, k, E), i) for i in (1, 2))
    chosen = count(jnp.where(count(before)[:, None] == place, expert, 0))

    best = jnp.take_along_axis(logits, chosen, axis=1)
    largest = jax.lax.stop_gradient(best[:, :1])
    shares = jnp.exp(best - largest)
    if normalised:  # a sum by hand, which needs no kernel of its own
        total = functools.reduce(jnp.add, jnp.split(shares, k, axis=1))
    else:
        total = jnp.sum(jnp.exp(logits - largest), axis=1, keepdims=True)
    return shares / total, chosen


def _by_row(x: Array, kernel: Array, expert: Array) -> Array:
    """Each row of x [m, in] times the kernel [E, out, in] of its expert, as a sum with which
    XLA fuses the look-up.

    So a GPU reads the kernels at the rate of its memory. With `out` as the last axis, a step of
    gpt-oss-20b took 15.8 ms instead of 4.2 on an H100.
    """
    return jnp.sum(
        x.astype(jnp.float32)[:, None] * kernel[expert].astype(jnp.float32), axis=2
    ).astype(x.dtype)


def _by_block(x: Array, kernel: Array, expert: Array) -> Array:
    """All rows of x [m, in] times the kernel of one expert i32[]."""
    return product("mi,oi->mo", x, kernel[expert])


class Layer(nnx.Module):
    """Attention or a mixer, and an MLP, each applied to its normed input and added to the
    residual stream.
    """

    def __init__(self, config: DecoderConfig, *, layer: int, rngs: nnx.Rngs, dtype: np.dtype):
        norm = partial(RMSNorm, config.hidden_size, **norm_settings(config, dtype))
        experts = config.experts
        dense = experts is None or layer in experts.dense_layers
        self.attention_norm = norm()
        mixes = layer in config.recurrent
        self.attention = (
            None if mixes else Attention(config, layer=layer, rngs=rngs, dtype=dtype)
        )
        self.mixer = make_mixer(config, rngs=rngs, dtype=dtype) if mixes else None
        self.post_attention_norm = norm() if config.post_norms else None
        self.mlp_norm = norm()
        self.mlp = (
            MLP(config, rngs=rngs, dtype=dtype)
            if dense
            else MixtureOfExperts(config, rngs=rngs, dtype=dtype)
        )
        self.post_mlp_norm = norm() if config.post_norms else None

    def __call__(
        self,
        x: Array,
        cos: Any,
        sin: Any,
        cache: LayerCache | None,
        *,
        lengths: ArrayLike | None = None,
        active: ArrayLike | None = None,
        first_chunk: bool = False,
        steps: bool = False,
        exact: bool = False,
        selection: Selection | None = None,
    ) -> tuple[Array, LayerCache | None, Info | None]:
        """As `Attention`; a mixer has no Info, and ignores what is attention's alone."""
        placement = None if cache is None or steps else cache.placement
        normed = self.attention_norm(x)
        info = None
        if self.attention is not None:
            mixed, cache, info = self.attention(
                normed,
                cos,
                sin,
                cache,
                lengths=lengths,
                active=active,
                first_chunk=first_chunk,
                steps=steps,
                exact=exact,
                selection=selection,
            )
        else:
            assert self.mixer is not None
            # A mixer reads tokens in order, so each device has all of a chunk.
            mixed, cache = self.mixer(
                keep_tokens(placement, normed),
                cache,
                lengths=lengths,
                active=active,
                steps=steps,
            )
        if self.post_attention_norm is not None:
            mixed = self.post_attention_norm(mixed)
        x = split_tokens(placement, x + mixed)
        out = self.mlp(self.mlp_norm(x), placement)
        if self.post_mlp_norm is not None:
            out = self.post_mlp_norm(out)
        return x + split_tokens(placement, out), cache, info


class _Taken(NamedTuple):
    """Which tokens each row takes: the arguments of a call of a `Decoder` that are arrays."""

    lengths: ArrayLike | None
    active: ArrayLike | None


@dataclass(frozen=True)
class _Flags:
    """The arguments of a call of a `Decoder` that are flags."""

    last_logits: bool
    first_chunk: bool
    steps: bool
    exact: bool
    info: bool


class Decoder(nnx.Module):
    """A decoder-only language model; `kvjax.models.load` fills one from a checkpoint.

    A Decoder is a pytree: pass it to jit, grad and scan as an argument. It satisfies
    `kvjax.generation.Model`.

    >>> import jax, jax.numpy as jnp, kvjax
    >>> from kvjax.models import Decoder, DecoderConfig
    >>> config = DecoderConfig(
    ...     vocab_size=100, hidden_size=64, intermediate_size=128, layers=2, q_heads=4, kv_heads=2, head_dim=16
    ... )
    >>> model = Decoder(config)
    >>> cache = kvjax.init(kvjax.Full(), model.spec(batch=1, capacity=32), layers=config.layers)
    >>> call = jax.jit(lambda model, tokens, cache: model(tokens, cache))
    >>> logits, cache = call(model, jnp.array([[1, 2, 3]]), cache)
    >>> logits, cache = call(model, jnp.array([[4]]), cache)
    >>> logits.shape, int(cache.length[0])
    ((1, 1, 100), 4)
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs | None = None,
        dtype: DTypeLike = jnp.float32,
    ):
        """Random parameters of `dtype`: normal with the config's initializer_range, biases 0,
        norms 1.
        """
        rngs = nnx.Rngs(0) if rngs is None else rngs
        self.config = config
        self.dtype = param_dtype(dtype)
        shape = (config.vocab_size, config.hidden_size)
        table = normal(rngs, shape, config.initializer_range, self.dtype)
        self.embedding = named_param(table, ("vocab", "embed"))  # [V, hidden]
        layers = range(config.layers)
        self.layers = nnx.List(
            [Layer(config, layer=i, rngs=rngs, dtype=self.dtype) for i in layers]
        )
        self.norm = RMSNorm(config.hidden_size, **norm_settings(config, self.dtype))
        if config.tied_head:
            self.head = None
        else:
            self.head = Linear(
                *shape[::-1],
                axes=("embed", "vocab"),
                bias=False,
                scale=config.initializer_range,
                rngs=rngs,
                dtype=self.dtype,
            )

    @property
    def max_positions(self) -> int | None:
        """Positions that the model takes; None for no limit."""
        return self.config.max_positions

    def spec(self, batch: int, capacity: int, dtype: DTypeLike | None = None) -> CacheSpec:
        """The sizes of each layer's cache; `dtype` of keys and values is the model's unless
        given.
        """
        return self.config.spec(batch, capacity, self.dtype if dtype is None else dtype)

    def rotate_for(self, cache: Cache, final: Array) -> Cache:
        """`cache` whose empty rows will rotate their keys for texts of `final` i32[B] tokens; 0
        leaves a row as it is.

        Without it, the first tokens of a row decide, as the whole text. Changes nothing unless
        the model's RoPE depends on the length of a text.
        """
        if cache.rotated_for is None:
            return cache
        now = as_rows(cache, cache.rotated_for)
        new = jnp.where((now == 0) & (final > 0), self.config.rope.valid_to(final), now)
        return dataclasses.replace(cache, rotated_for=new)

    def __call__(
        self,
        tokens: Array,
        cache: Cache | None = None,
        *,
        lengths: ArrayLike | None = None,
        active: ArrayLike | None = None,
        last_logits: bool = False,
        first_chunk: bool = False,
        steps: bool = False,
        exact: bool = False,
        info: bool = False,
    ) -> Any:
        """(logits, cache), or (logits, cache, infos) with info=True.

        Args:
          tokens: i32[B, T], T > 1 a chunk of prompt, T == 1 a decode step. They follow what the
            cache holds.
          cache: None is plain causal attention over the T tokens, as in training.
          lengths: i32[B], real tokens of each row of a right-padded chunk (default T); 0 for a
            row that takes none.
          active: bool[B], rows that take this token of a decode step; the logits of others are
            meaningless.
          last_logits: only the logits of each row's last real token of this chunk.
          first_chunk: promises that the cache is empty.
          steps: the T <= 16 tokens are decode steps, `lengths` of them per row: see
            `kvjax.decode`. A row takes at most `kvjax.room(cache)` after a flush; each Info has
            a first axis of T steps.
          exact: with `steps`, every layer attends to all of its tokens instead of a selection.
          info: adds a tuple with one `kvjax.Info` per layer, or None per layer if no decode
            step ran.

        Returns:
          logits f32[B, T, V], or f32[B, V] with `last_logits`, and the cache, None without one.

        Raises:
          ValueError: tokens of another shape or dtype, a cache of another number of layers or
            of other sizes.
        """
        tokens = jnp.asarray(tokens)
        flags = _Flags(
            last_logits=last_logits,
            first_chunk=first_chunk,
            steps=steps,
            exact=exact,
            info=info,
        )
        taken = _Taken(lengths, active)
        _check_size(self, cache)
        mesh = _explicit_mesh(self, tokens, cache)
        if mesh is None:
            return self._run(tokens, cache, taken, flags)
        return _run_on_auto_axes(self, mesh, tokens, cache, taken, flags)

    def _run(self, tokens: Array, cache: Cache | None, taken: _Taken, flags: _Flags) -> Any:
        """The call of a model on one device, or on a mesh of Auto axes."""
        _check_tokens(tokens)
        B, T = tokens.shape
        stored = jnp.zeros(B, jnp.int32)
        caches: tuple[LayerCache | None, ...] = (None,) * self.config.layers
        if cache is not None:
            _check_layers(self, cache, batch=B)
            if flags.steps or T == 1:
                cache = flush(cache)  # once for all layers, before any of them reads
            stored = cache.length
            _check_rows(tokens, stored)
            caches = cache.layers

        # Embed the tokens, with angles of RoPE for their positions.
        count = _real_tokens(taken.lengths, B, T)
        if taken.active is not None:
            count = jnp.where(jnp.asarray(taken.active), count, 0)
        final = stored + count
        if cache is not None and self.config.rope.by_length:
            cache = self.rotate_for(cache, jnp.where(count > 0, final, 0))
            final = _rotated_for(cache)
        x, cos, sin = self.begin(tokens, stored, final)
        placement = None if cache is None or flags.steps else cache.placement
        # Otherwise XLA would gather the whole table.
        x = split_tokens(placement, keep_tokens(placement, x))

        layers: list[Any] = []
        infos: list[Info | None] = []
        selection = None  # of the last layer that selected, for the layers that follow it
        for layer, layer_cache in zip(self.layers, caches, strict=True):
            follows = layer_cache is not None and layer_cache.policy.follows
            x, layer_cache, info = layer(
                x,
                cos,
                sin,
                layer_cache,
                lengths=taken.lengths,
                active=taken.active,
                first_chunk=flags.first_chunk,
                steps=flags.steps,
                exact=flags.exact,
                selection=selection,
            )
            if info is not None and not follows:
                selection = info.selection
            layers.append(layer_cache)
            infos.append(info)
        if cache is not None:
            cache = dataclasses.replace(cache, layers=tuple(layers))

        lengths = taken.lengths
        logits = self.finish(x, lengths) if flags.last_logits else self._logits(self.norm(x))
        return (logits, cache, tuple(infos)) if flags.info else (logits, cache)

    def first_layers(self, count: int) -> Decoder:
        """The model of the first `count` layers and the head, with the same arrays, as a draft
        without own weights.

        >>> from kvjax.models import Decoder, DecoderConfig
        >>> config = DecoderConfig(
        ...     vocab_size=100, hidden_size=64, intermediate_size=128, layers=4, q_heads=4, kv_heads=2, head_dim=16
        ... )
        >>> Decoder(config).first_layers(2).config.layers
        2
        """
        count = require_int(
            "first_layers(count=...)", count, at_least=1, at_most=self.config.layers
        )
        whole = self.config
        experts = whole.experts

        def first_of(layers: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(layer for layer in layers if layer < count)

        own: dict[str, Any] = {
            "windows": whole.windows[:count],
            "unrotated": first_of(whole.unrotated),
            "recurrent": first_of(whole.recurrent),
        }
        if not own["recurrent"]:
            own |= {"mixer": None, "mixer_bias": False}
        if experts is not None:
            dense = first_of(experts.dense_layers)
            own["experts"] = dataclasses.replace(experts, dense_layers=dense)
        config = dataclasses.replace(whole, layers=count, **own)
        first = decoder_of_shapes(config, self.dtype)
        first.embedding = self.embedding
        first.norm = self.norm
        first.head = self.head
        first.layers = nnx.List(list(self.layers)[:count])
        return first

    def begin(self, tokens: Array, stored: Array, final: Array) -> tuple[Array, Any, Any]:
        """Embeds tokens i32[B, T] that follow `stored` i32[B] others: x [B, T, hidden], and cos
        and sin of RoPE.

        If layers have different kinds of RoPE, these are tuples with those of each.

        `final` i32[B] are the lengths of the texts, on which RoPE depends in some models.
        """
        positions = stored[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        config = self.config
        # The embedding of a padding token is meaningless, but must be finite: it is clipped.
        x = embed(self.embedding[...], tokens)
        if config.embedding_scale != 1:
            x *= jnp.asarray(config.embedding_scale, x.dtype)
        angles = [rope.angles(kind, positions, config.rotated, final) for kind in config.ropes]
        cos, sin = angles[0] if len(angles) == 1 else tuple(zip(*angles, strict=True))
        return x, cos, sin

    def finish(self, x: Array, lengths: ArrayLike | None) -> Array:
        """Logits f32[B, V] of the last of `lengths` i32[B] tokens of each row, from x [B, T,
        hidden].
        """
        last = jnp.maximum(_real_tokens(lengths, *x.shape[:2]) - 1, 0)
        # One index per row: a joint index of rows and tokens would gather the batch if devices
        # split it.
        x = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
        return self._logits(self.norm(x))

    def _logits(self, x: Array) -> Array:
        """f32[..., V] of x [..., hidden]."""
        if self.head is None:
            logits = product("...h,vh->...v", x, self.embedding[...], jnp.float32)
        else:
            logits = product("...h,hv->...v", x, self.head.kernel[...], jnp.float32)
        cap = self.config.head_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def _check_tokens(tokens: Array) -> None:
    integers = jnp.issubdtype(tokens.dtype, jnp.integer)
    if tokens.ndim != 2 or tokens.shape[1] == 0 or not integers:
        raise ValueError(
            f"tokens must be integers [B, T >= 1], got {tokens.dtype}{list(tokens.shape)}"
        )


def _check_layers(model: Decoder, cache: Cache, *, batch: int) -> None:
    """Raises ValueError for a cache that is not of as many layers as the model; `batch` is that
    of the tokens.
    """
    wanted = model.config.layers
    if not hasattr(cache, "layers"):
        raise ValueError(
            f"a model takes the Cache of all its layers, got {short_repr(cache)}; make one with "
            f"kvjax.init(policy, model.spec(batch={batch}, capacity=...), layers={wanted})"
        )
    if len(cache.layers) != wanted:
        raise ValueError(
            f"the cache has {len(cache.layers)} layers but the model has {wanted}; "
            f"make it with kvjax.init(..., layers={wanted})"
        )


def _check_rows(tokens: Array, stored: Array) -> None:
    """Raises ValueError for tokens of more or fewer rows than the cache, which has `stored`."""
    B = tokens.shape[0]
    if stored.shape != (B,):
        raise ValueError(
            f"tokens has B={B} but the cache has B={stored.shape[0]}; tokens{list(tokens.shape)}"
        )


def _rotated_for(cache: Cache) -> Array:
    """i32[B]: the length of the text for which each row rotates its keys."""
    if cache.rotated_for is None:
        raise ValueError(
            "this model's RoPE depends on the length of a text, which the cache must remember for each row; make it "
            "with kvjax.init(policy, model.spec(batch=..., capacity=...), layers=...), whose spec says so"
        )
    return as_rows(cache, cache.rotated_for)


def _real_tokens(lengths: ArrayLike | None, rows: int, tokens: int) -> Array:
    """i32[B]: the real tokens of each row of a chunk of `tokens` per row."""
    if lengths is None:
        return jnp.full(rows, tokens, jnp.int32)
    return jnp.clip(jnp.asarray(lengths, jnp.int32), 0, tokens)


def _check_size(model: Decoder, cache: Cache | None) -> None:
    """Raises ValueError for a cache on more or fewer devices than the model; `generate` checks
    more.
    """
    placement = getattr(cache, "placement", None)
    own = mesh_of(model.embedding[...])
    if placement is not None and not own.empty and own.size != placement.mesh.size:
        raise ValueError(
            f"the model is on {own.size} devices and the cache on {placement.mesh.size}, by its {placement}; give "
            "both one placement: a loaded checkpoint has it as .placement"
        )


def _explicit_mesh(model: Decoder, tokens: Array, cache: Cache | None) -> AbstractMesh | None:
    """The mesh of a call whose arrays, or whose mesh of `jax.set_mesh`, have Explicit axes;
    else None.

    Also None if no array is on a mesh, as for a model on one device.
    """
    placement = getattr(cache, "placement", None)
    own = [mesh_of(model.embedding[...]), mesh_of(tokens)]
    own += [] if placement is None else [placement.mesh.abstract_mesh]
    own = [mesh for mesh in own if not mesh.empty]
    around = jax.sharding.get_abstract_mesh()
    if not own or AxisType.Manual in around.axis_types:
        return None
    explicit = any(AxisType.Explicit in mesh.axis_types for mesh in (around, *own))
    return own[0] if explicit else None


def _run_on_auto_axes(
    model: Decoder,
    mesh: AbstractMesh,
    tokens: Array,
    cache: Cache | None,
    taken: _Taken,
    flags: _Flags,
) -> Any:
    """A call in which XLA splits the products over the axes of `mesh`; results have types of
    the surrounding mesh.

    Rows of the logits are split as those of the cache, or of `tokens`; the vocabulary is split
    as the parameter that produces it.
    """
    placement = getattr(cache, "placement", None)
    if placement is None:
        rows, columns = (*_axes_in_type(tokens), None, None)[:2]
        heads = PartitionSpec()
    else:
        rows = placement.batch
        columns = None
        heads = placement.spec("TBK" if flags.steps else "BK")
    if model.head is None:
        vocabulary = _axes_in_type(model.embedding[...])[:1]
    else:
        vocabulary = _axes_in_type(model.head.kernel[...])[1:]
    tokens_axes = () if flags.last_logits else (columns,)
    split = PartitionSpec(rows, *tokens_axes, *vocabulary)

    around = jax.sharding.get_abstract_mesh()
    with jax.sharding.use_abstract_mesh(auto_axes(mesh)):
        model, tokens, taken = jax.tree.map(to_context, (model, tokens, taken))
        logits, cache, *infos = model._run(tokens, cache, taken, flags)
    with jax.sharding.use_abstract_mesh(mesh if around.empty else around):
        logits = to_context(logits, split)
        infos = jax.tree.map(lambda x: to_context(x, heads), infos)
        return (logits, cache, *infos)


def _axes_in_type(x: Array) -> tuple[Any, ...]:
    """The Explicit axes of a mesh that split an array, from its type; () if its type has none."""
    sharding = jax.typeof(x).sharding
    return tuple(sharding.spec) if AxisType.Explicit in sharding.mesh.axis_types else ()


def decoder_of_shapes(config: DecoderConfig, dtype: DTypeLike = jnp.float32) -> Decoder:
    """A Decoder with a `jax.ShapeDtypeStruct` for each parameter, without memory for them.

    Not with `nnx.Rngs(0)`: it counts its draws, and for each count that is traced Flax asks for
    a sharding that a traced value lacks. JAX then writes a message of all equations before it,
    which took 1.3 s for 32 layers. Without draws there is less to trace, too.
    """
    made: Decoder = nnx.eval_shape(lambda: Decoder(config, rngs=ShapesOnly(), dtype=dtype))
    return made


def embed(table: Array, tokens: Array) -> Array:
    """Rows [B, T, hidden] of a table [V, hidden] for tokens [B, T]; out of range is clipped.

    A single token is looked up twice. XLA turns one look-up into a slice, and to slice a table
    that is split over devices it gathers the whole table on each of them, in every step.
    """
    if tokens.size == 1:
        twice = jnp.concatenate([tokens, tokens])
        return table.at[twice].get(mode="clip")[:1]
    return table.at[tokens].get(mode="clip")
