"""A call of a layer: its checked arguments as one typed value, and how it runs.

`kvjax.attention` and its relatives check their arguments and put them into a `Call`, a pytree:
its arrays are traced, and split over the devices of a placement; the rest is static. `run`
gives it to a verb, such as a decode step, which reads the fields by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import AxisType
from jax.tree_util import register_dataclass
from jax.typing import ArrayLike

from kvjax import ops
from kvjax.cache.cache import (
    LayerCache,
    as_whole,
    check_no_cache,
    part_of,
    placement_of,
    specs_of,
)
from kvjax.memory import on_host
from kvjax.numerics.partial import Logits
from kvjax.policies import Policy, Step
from kvjax.policies.policy import STATIC
from kvjax.sharding.placement import Placement, run_on_parts, to_context
from kvjax.spec import require_int
from kvjax.validation import (
    check_alive,
    check_array,
    check_dims,
    finite_number,
    is_traced,
)

MOST_SCALE = 1e6  # of the logits, which are f32
AXES = {"q": "BTN", "k": "BTN", "v": "BTN", "count": "B", "sinks": "KG"}
"""The letters of `Placement.spec` for the axes of each array of a call; the arrays of a
selection have those of its heads."""

AnyCache = TypeVar("AnyCache", bound=LayerCache | None)
AnyCall = TypeVar("AnyCall")
Result = TypeVar("Result")


@register_dataclass
@dataclass(frozen=True)
class Call:
    """T tokens of each row that a layer stores and attends with: a chunk of a prompt, or decode
    steps.
    """

    q: Array  # [B, T, N, D]
    k: Array  # [B, T, K, D]
    v: Array  # [B, T, K, E]
    count: Array  # i32[B] tokens that each row stores, its first ones
    step: Step  # how it attends, with `selection` and `sinks`
    # Decode steps flush full recent blocks first.
    flush: bool = field(default=False, metadata=STATIC)
    # The prompt's cache is empty.
    first_chunk: bool = field(default=False, metadata=STATIC)
    # A prompt's tokens past `count` may hold anything.
    padded: bool = field(default=False, metadata=STATIC)


# ------------------------------------------------------------------------------------------------------------- running


def run(
    verb: Callable[[AnyCache, AnyCall], Result],
    cache: AnyCache,
    call: AnyCall,
    *,
    by_head: str = "BK",
) -> Result:
    """Returns verb(cache, call) of checked arguments; each device of a placement calls it for
    its own part.

    A verb returns an output [B, T, N, D] or None, the cache, and a tree of arrays whose first
    axes are `by_head`. The arrays of a selection in `call` have these first axes too.
    """
    leaves = jax.tree.leaves(call)
    # A NumPy float64 array stays float64 under an inlined jit, where every cast to it warns.
    if np.ndarray in map(type, leaves):
        call = jax.tree.map(_as_jax_dtype, call)
    if cache is not None and cache.placement is not None:
        found: Result = _run_on_parts(verb, cache, call, by_head)
        return found
    # A selection that is none is a leaf, which its policy refuses by its kind: not once traced.
    if ops.shares_traces() and all(hasattr(leaf, "dtype") for leaf in leaves):
        traced: Result = _traced_once(verb, cache, call)
        return traced
    return verb(cache, call)


def _as_jax_dtype(a: Any) -> Any:
    return a.astype(jnp.result_type(a)) if isinstance(a, np.ndarray) else a


@partial(jax.jit, static_argnums=0)
def _traced_once(
    verb: Callable[[AnyCache, AnyCall], Result], cache: AnyCache, call: AnyCall
) -> Result:
    """`verb`, traced once for all layers of a program with equal policies and shapes; without
    jit, one program.

    It stays a call in the program, which XLA inlines first: with `inline=True`, JAX would take
    twice the time to trace and lower 32 layers.
    """
    return verb(cache, call)


@partial(jax.jit, static_argnums=(0, 3), inline=True)
def _run_on_parts(
    verb: Callable[[LayerCache, AnyCall], tuple[Array | None, LayerCache, Any]],
    cache: LayerCache,
    call: AnyCall,
    by_head: str,
) -> tuple[Array | None, LayerCache, Any]:
    """`verb`, run by each device of the placement for its own rows and heads."""

    def local(state: Any, call: AnyCall) -> tuple[Array | None, Any, Any]:
        out, mine, found = verb(part_of(cache, state), call)
        return out, as_whole(cache, mine.state), found

    placement = placement_of(cache)
    state = specs_of(cache)
    tokens = placement.spec("BTN")
    heads = placement.spec(by_head)
    out, new_state, found = run_on_parts(
        placement,
        local,
        (state, _specs(placement, call, by_head)),
        (tokens, state, heads),
        cache.state,
        call,
    )
    out = to_context(out, tokens)
    found = jax.tree.map(lambda x: to_context(x, heads), found)
    return out, dataclasses.replace(cache, state=new_state), found


def _specs(placement: Placement, call: AnyCall, by_head: str) -> AnyCall:
    """The PartitionSpecs of the arrays of a call, in their places."""

    def spec(path: tuple[Any, ...], _: Array) -> Any:
        names = (getattr(key, "name", None) for key in path)
        return placement.spec(next((AXES[n] for n in names if n in AXES), by_head))

    return jax.tree_util.tree_map_with_path(spec, call)


# ----------------------------------------------------------------------------------------------------------- arguments


def check_empty(verb: str, cache: LayerCache | None) -> None:
    """Raises ValueError if rows of a cache that is promised to be empty are known to hold
    tokens.
    """
    if cache is None or isinstance(length := cache.length, Tracer):
        return
    if most := int(on_host(length).max()):
        raise ValueError(
            f"{verb}(first_chunk=True) promises an empty cache, but a row of this one holds {most} tokens; leave it "
            "out for later chunks"
        )


def checked_step(
    verb: str,
    cache: Any,
    q: Array,
    k: Array,
    v: Array,
    window: int | None,
    scale: float | None,
    soft_cap: float | None,
    sinks: ArrayLike | None,
) -> Step:
    """Returns how a call of q [B, T, N, D] and k, v [B, T, K, D] attends, with its sinks.

    Raises ValueError for arrays that disagree with each other or with the cache.
    """
    if isinstance(v, LayerCache):
        raise ValueError(f"{verb} takes the cache first: kvjax.{verb}(cache, q, k, v)")
    spec = None
    cure = ""
    if isinstance(cache, LayerCache):
        check_alive(verb, cache)
        spec = cache.spec
        if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
            cure = (
                ". The spec of a cache is static, so jax.shard_map splits its arrays but not its sizes; instead of "
                "shard_map, make a cache that is split: kvjax.init(..., placement=kvjax.Placement(mesh=...))"
            )
    else:
        check_no_cache(verb, cache)
    sizes = check_dims("q BTND, k BTKD, v BTKE", spec, cure, q=q, k=k, v=v)
    N = sizes["N"]
    K = sizes["K"]
    if 0 in sizes.values():
        letter = next(letter for letter, size in sizes.items() if not size)
        words = {
            "B": "rows",
            "T": "tokens",
            "N": "query heads",
            "K": "kv heads",
            "D": "channels",
        }
        raise ValueError(f"q, k and v have {letter}=0 {words[letter]}; give at least one")
    if N % K:
        raise ValueError(
            f"q has N={N} heads, which must be a multiple of k's K={K} kv heads; q{list(q.shape)}, k{list(k.shape)}"
        )
    step = plain_step(verb, sizes["D"], window, scale, soft_cap)
    if sinks is None:
        return step
    return dataclasses.replace(step, sinks=sink_logits(verb, cache, sinks, N, K))


def check_exact(where: str, policy: Policy) -> None:
    """Raises ValueError for a policy whose steps cannot attend to all tokens of a row."""
    if not policy.takes_exact:
        raise ValueError(
            f"{where} needs a policy that keeps all tokens and can attend to them, which {policy!r} cannot; use full, "
            "or a retrieval or compressed method other than freekv"
        )


def plain_step(
    verb: str, D: int, window: int | None, scale: float | None, soft_cap: float | None
) -> Step:
    """Returns the `Step` of a call without its arrays, for keys of D channels."""
    if window is not None:
        require_int(f"{verb}(window=...)", window, at_least=1)
    scale = D**-0.5 if scale is None else finite_number(f"{verb}(scale=...)", scale)
    if abs(scale) > MOST_SCALE:
        raise ValueError(
            f"{verb}(scale=...) must be at most {MOST_SCALE:.0e}, got {scale}: larger logits overflow; it is usually "
            "head_dim**-0.5"
        )
    if soft_cap is None:
        return Step(Logits(scale), window)
    soft_cap = finite_number(f"{verb}(soft_cap=...)", soft_cap)
    if soft_cap <= 0:
        raise ValueError(
            f"{verb}(soft_cap=...) must be above 0, got {soft_cap}; leave it out for no cap"
        )
    return Step(Logits(scale, soft_cap), window)


def sink_logits(verb: str, cache: Any, sinks: ArrayLike, N: int, K: int) -> Array:
    """Returns sink logits f32[N] as f32[K, G]."""
    if jnp.shape(sinks) != (N,):
        raise ValueError(
            f"{verb}(sinks=...) must have one logit for each of the {N} query heads, got shape {list(jnp.shape(sinks))}"
        )
    if cache is not None and not cache.policy.takes_sinks:
        raise ValueError(
            f"{cache.policy} takes no sink logits; a policy whose attend merges Step.sinks says so by takes_sinks"
        )
    return jnp.asarray(sinks, jnp.float32).reshape(K, N // K)


def without_padding(k: Array, v: Array, count: Array) -> tuple[Array, Array]:
    """Returns k, v [B, T, K, D] with zeros past the first `count` i32[B] tokens: padding has
    weight 0, but 0 * NaN is NaN.
    """
    real = (jnp.arange(k.shape[1], dtype=jnp.int32)[None] < count[:, None])[..., None, None]
    k = jnp.where(real, k, jnp.zeros((), k.dtype))
    v = jnp.where(real, v, jnp.zeros((), v.dtype))
    return k, v


def row_counts(B: int, T: int, lengths: ArrayLike | None, active: ArrayLike | None) -> Array:
    """Returns how many of T tokens each row stores: i32[B]."""
    count = jnp.full(B, T, jnp.int32)
    if lengths is not None:
        given = _one_per_row("lengths", lengths, B, jnp.integer)
        if not is_traced(lengths):
            _check_lengths(np.asarray(lengths), T)
        count = jnp.minimum(jnp.clip(given, 0, T).astype(jnp.int32), count)
    if active is not None:
        count = jnp.where(_one_per_row("active", active, B, jnp.bool_), count, 0)
    return count.astype(jnp.int32)


def _one_per_row(name: str, given: ArrayLike, B: int, kind: Any) -> Array:
    """`given` as an array [B]. Raises ValueError if it has another shape, or is not of the
    `kind` bool or integer.
    """
    flags = kind is jnp.bool_
    check_array(name, given, *(("bools", "[True, False]") if flags else ("integers", "[3, 5]")))
    array = jnp.asarray(given)
    if array.dtype.itemsize < 4 and jnp.issubdtype(array.dtype, jnp.integer):
        array = array.astype(jnp.int32)  # T need not fit in fewer bits
    if array.shape != (B,):
        raise ValueError(
            f"{name} must have shape [B={B}], got {list(array.shape)}; give one for each row"
        )
    if not jnp.issubdtype(array.dtype, kind):
        wanted, dtype = ("bool", "bool") if flags else ("integers", "int")
        raise ValueError(
            f"{name} must be {wanted}, got {array.dtype}; convert it with jnp.asarray({name}, {dtype})"
        )
    return array


def _check_lengths(lengths: np.ndarray, T: int) -> None:
    outside = lengths[(lengths < 0) | (lengths > T)]
    if outside.size:
        raise ValueError(
            f"lengths must be in [0, T={T}], got {outside[0]}; they count this chunk's real tokens"
        )
