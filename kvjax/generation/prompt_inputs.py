"""Requests: a prompt as arrays, and checks so that a request that cannot be served fails before
it starts.

A model may declare its positions and vocabulary (`max_positions`, or `config` with
`max_position_embeddings` and `vocab_size`); limits that it does not declare are not checked.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType
from jax.typing import ArrayLike

from kvjax.cache.cache import Cache, LayerCache, check_rotation, shared_tokens
from kvjax.memory import on_host, places_of
from kvjax.spec import require_int
from kvjax.validation import MOST, check_alive, described, short_repr


def pad_prompt(
    prompt: ArrayLike | Sequence[Sequence[int]], lengths: ArrayLike | None = None, *, rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """The prompt as right-padded i32[B, T] and lengths i32[B]. Raises ValueError that says what
    is wrong with it.

    >>> pad_prompt([[5, 6, 7], [8]], rows=2)
    (array([[5, 6, 7],
           [8, 0, 0]], dtype=int32), array([3, 1], dtype=int32))
    """
    rows_given = prompt if isinstance(prompt, list | tuple) else [prompt]
    if any(isinstance(row, str | Mapping) for row in rows_given):
        raise ValueError(
            "prompt must be token ids, got text; encode it with the model's tokenizer, or give it to the generate or "
            "stream of a kvjax.models.Checkpoint"
        )
    if isinstance(prompt, list | tuple):
        if lengths is not None:
            raise ValueError(
                "got lengths for a prompt that is a list of rows; leave them out, or pass a padded array"
            )
        parts = [np.asarray(row) for row in prompt]
        if any(part.ndim != 1 for part in parts):
            raise ValueError(
                "prompt must be a list of rows, each a list of token ids; for one row write [tokens]"
            )
        bad = [
            part.dtype
            for part in parts
            if part.size and not np.issubdtype(part.dtype, np.integer)
        ]
        if bad:
            raise ValueError(f"prompt must hold integer token ids, got {bad[0]}")
        counts = np.array([part.size for part in parts], np.int32)
        tokens = np.zeros((len(parts), max([1, *counts])), np.int64)
        for row, part in zip(tokens, parts, strict=True):
            row[: part.size] = part
    else:
        tokens = np.asarray(prompt)
        if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(
                f"prompt must be integers [B, T], got {tokens.dtype}{list(tokens.shape)}"
            )
        counts = (
            np.full((len(tokens),), tokens.shape[1], np.int32)
            if lengths is None
            else np.asarray(lengths)
        )
        whole = np.issubdtype(counts.dtype, np.integer)
        if not whole or counts.shape != (len(tokens),) or np.any(counts > tokens.shape[1]):
            wanted = (
                f"lengths must be integers [B={len(tokens)}] of at most T={tokens.shape[1]}"
            )
            raise ValueError(f"{wanted}, got {counts.dtype} {counts.tolist()}")
    if len(tokens) != rows:
        raise ValueError(
            f"prompt has {len(tokens)} rows but the cache has B={rows}; make the cache with that batch"
        )
    for row in np.flatnonzero(counts < 1):
        raise ValueError(f"row {row} of the prompt is empty; each row needs at least one token")
    check_ids(tokens, counts)
    return tokens.astype(np.int32), counts.astype(np.int32)


def right_padded(real: Array, *arrays: Array) -> tuple[Array, ...]:
    """Moves the real tokens of each row to its front: lengths i32[B], and `arrays` [B, T, ...]
    in the new order.

    `real` bool[B, T] is true for tokens and false for padding, on the left or anywhere: the
    attention mask of a left-padded prompt. Prompts, and the q, k and v of a layer after RoPE,
    then are as `kvjax.generate` and `kvjax.prefill` take them. Runs under jit.

    >>> import jax.numpy as jnp
    >>> lengths, tokens = right_padded(jnp.array([[False, True, True]]), jnp.array([[0, 7, 9]]))
    >>> lengths.tolist(), tokens.tolist()
    ([2], [[7, 9, 0]])

    Raises:
      ValueError: a mask that is not bool[B, T], or arrays of other rows or tokens.
    """
    if getattr(real, "ndim", 0) != 2 or real.dtype != bool:
        raise ValueError(
            f"right_padded takes a mask bool[B, T] first, true for real tokens; got {short_repr(real)}"
        )
    for array in arrays:
        if np.shape(array)[:2] != real.shape:
            raise ValueError(
                f"right_padded got a mask of {list(real.shape)} tokens and an array {list(np.shape(array))}"
            )
    order = jnp.argsort(~real, axis=1, stable=True)
    moved = (
        jax.vmap(lambda row, index: row[index])(jnp.asarray(array), order) for array in arrays
    )
    return jnp.sum(real, axis=1, dtype=jnp.int32), *moved


def check_ids(tokens: np.ndarray, counts: np.ndarray) -> None:
    """Raises ValueError for an id among the first `counts` [B] of the rows of `tokens` [B, T]
    that is none.
    """
    wild = tokens[
        (np.arange(tokens.shape[1]) < counts[:, None]) & ((tokens < 0) | (tokens > MOST))
    ]
    if wild.size:
        raise ValueError(f"prompt has the token id {wild[0]}; ids must be from 0 to 2**31 - 1")


def check_request(
    model: Any,
    cache: Cache,
    tokens: np.ndarray | None,
    lengths: np.ndarray,
    *,
    max_new_tokens: int,
    stop_tokens: int | Iterable[int] = (),
) -> np.ndarray:
    """Raises ValueError for a request that cannot be served; returns the stop tokens as
    `stop_array` does.

    Every prompt and its new tokens must fit in the cache, and in the model's positions if it
    declares them; token ids must be in its vocabulary if it declares that. Rows of length -1 do
    not take part.
    """
    require_int("max_new_tokens", max_new_tokens, at_least=1)
    check_devices(model, cache)
    stop = stop_array(stop_tokens)
    vocabulary = vocabulary_size(model)
    if vocabulary is not None:
        real = stop if tokens is None else tokens[np.arange(tokens.shape[1]) < lengths[:, None]]
        for what, ids in (("prompt", real), ("stop_tokens", stop)):
            high = np.max(ids, initial=0)
            if high >= vocabulary:
                raise ValueError(
                    f"{what} has the token id {high}, but the model's vocabulary is {vocabulary}; use its tokenizer"
                )
    stored = on_host(cache.length)
    room = cache.spec.capacity + shared_tokens(cache)
    positions = max_positions(model)
    for row in np.flatnonzero(lengths >= 0):
        check_fit(
            int(stored[row]),
            int(lengths[row]),
            max_new_tokens,
            int(room[row]),
            positions,
            where=f"row {row}: ",
        )
    check_rotation(cache, np.where(lengths >= 0, stored + lengths + max_new_tokens, 0))
    return stop


# Keywords that generation passes to every model.
ASKED = (
    "lengths",
    "active",
    "last_logits",
    "first_chunk",
)


def check_model(model: Any, asked: Iterable[str] = ()) -> None:
    """Raises ValueError unless the model can be called: it may be a Checkpoint, a path, or lack
    a keyword.

    >>> check_model(lambda tokens, cache, *, lengths=None, active=None: (tokens, cache))
    Traceback (most recent call last):
        ...
    ValueError: the model takes no last_logits, first_chunk; add them, as kvjax.generation.Model describes
    """
    unbound = hasattr(model, "unbind") and getattr(model, "scope", None) is None  # of Linen
    if unbound and not isinstance(model, type):
        raise ValueError(
            f"model is the Linen module {type(model).__name__} without its variables; give both, as "
            "functools.partial(module.apply, variables) or module.bind(variables)"
        )
    if callable(model) and not isinstance(model, type):
        missing = _missing_keywords(model, (*ASKED, *asked))
        if missing:
            raise ValueError(
                f"the model takes no {', '.join(missing)}; add {'them' if len(missing) > 1 else 'it'}, as "
                "kvjax.generation.Model describes"
            )
        return
    if callable(getattr(model, "model", None)):
        cure = "pass its .model, or call its own .generate"
    elif isinstance(model, str | Path):
        cure = "load it first: kvjax.models.load(directory).model"
    else:
        cure = "give a model as kvjax.generation.Model describes it, for example kvjax.models.load(directory).model"
    raise ValueError(f"model must be a callable pytree, got {short_repr(model)}; {cure}")


def check_returned(made: Any) -> None:
    """Raises ValueError unless a model returned logits [B, V] and the cache of all of its layers.

    >>> check_returned(("logits", ["a layer"]))
    Traceback (most recent call last):
        ...
    ValueError: the model returned a list as its cache; make a kvjax.Cache of it: kvjax.Cache(tuple(layers))
    """
    if not isinstance(made, tuple | list) or len(made) != 2:
        got = f"{len(made)} values" if isinstance(made, tuple | list) else described(made)
        raise ValueError(
            f"the model returned {got}, and must return two values, logits and a cache, as "
            "kvjax.generation.Model describes"
        )
    if not isinstance(made[1], Cache):
        raise ValueError(
            f"the model returned {described(made[1])} as its cache; make a kvjax.Cache of it: "
            "kvjax.Cache(tuple(layers))"
        )
    if np.ndim(made[0]) != 2:
        raise ValueError(
            f"the model returned {described(made[0])} as logits; with last_logits=True return those of each row's "
            "last real token alone, [B, V]"
        )


def _missing_keywords(model: Any, asked: Iterable[str]) -> list[str]:
    try:
        parameters = inspect.signature(model).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return []
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return []
    return [name for name in asked if name not in parameters]


def check_devices(model: Any, cache: Cache) -> None:
    """Raises ValueError for a cache on other devices than the model, or with a placement over
    another mesh, with other axes.
    """
    placement = cache.placement
    if placement is None:
        places = places_of(cache)
        others = places_of(model) - places if places else set()
        if others:
            raise ValueError(
                f"the cache is on {_names(places)} and the model on {_names(others)}; make the cache where "
                "the model is: with jax.default_device(device): cache = kvjax.init(...)"
            )
        return
    wanted = set(placement.mesh.devices.flat)
    for leaf in jax.tree.leaves(model):
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            continue
        if leaf.sharding.device_set != wanted:
            here = len(leaf.sharding.device_set)
            raise ValueError(
                f"the model is on {here} device{'s' if here > 1 else ''} and the cache on {len(wanted)}, by its "
                f"{placement}; give both one placement: kvjax.models.load(directory, placement=...)"
            )
        mesh = getattr(leaf.sharding, "mesh", placement.mesh)
        if list(mesh.devices.flat) != list(placement.mesh.devices.flat):
            raise ValueError(
                "the meshes of the model and of the cache have the same devices in another order; give both one "
                "placement"
            )
        explicit = [AxisType.Explicit in one.axis_types for one in (mesh, placement.mesh)]
        if explicit == [True, False] and jax.sharding.get_abstract_mesh().empty:
            raise ValueError(
                "the model is on a mesh of Explicit axes and the cache on one of Auto axes; make the cache with a "
                "Placement over the mesh of the model, or call this inside of jax.set_mesh(mesh)"
            )
        sizes, given = (dict(one.shape) for one in (mesh, placement.mesh))
        if sizes != given and not leaf.sharding.is_fully_replicated:
            raise ValueError(
                f"the model is split over a mesh of {_sizes(sizes)} and the cache over one of {_sizes(given)}; give "
                "both one placement: a loaded checkpoint has it as .placement"
            )


def _names(places: Iterable[Iterable[jax.Device]]) -> str:
    return ", ".join(sorted({str(device) for place in places for device in place}))


def _sizes(mesh: dict[str, int]) -> str:
    return " x ".join(f"{name}={size}" for name, size in mesh.items())


def check_model_cache(model: Any, cache: Any, asked: Iterable[str] = ()) -> None:
    """`check_model`, and raises ValueError unless `cache` is the cache of a whole model, not
    donated, that suits it.
    """
    check_model(model, asked)
    _check_layers(cache)
    if not isinstance(cache, Cache):
        raise ValueError(
            f"cache must be the Cache of a whole model, got {short_repr(cache)}; make one with "
            "kvjax.init(policy, model.spec(batch=..., capacity=...), layers=model.config.layers)"
        )
    check_alive("generate", cache)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "check_cache"):
        config.check_cache(cache)


def _check_layers(cache: Any) -> None:
    """Raises ValueError for layers that were stacked for a scan: a run flushes and takes back
    tokens layer by layer.
    """
    layers = (cache,) if isinstance(cache, LayerCache) else getattr(cache, "layers", ())
    for layer in layers:
        state = layer.state if isinstance(layer, LayerCache) else ()
        # Shapes alone are asked for: a cache may have been donated, or lie on other devices. A
        # state has counts by row, which are of one axis.
        counts = min(map(np.shape, jax.tree.leaves(state)), key=len, default=())
        if len(counts) > 1:
            raise ValueError(
                f"cache holds layers that are stacked, with counts of shape {list(counts)}; give it as kvjax.init "
                "makes it, and let a model with stacked weights loop over cache.layers, with weights "
                "jax.tree.map(lambda w: w[i], stacked) for layer i"
            )


def check_fit(
    stored: int,
    prompt: int,
    new: int,
    capacity: int | None,
    positions: int | None,
    *,
    where: str = "",
) -> None:
    """Raises unless `stored` + `prompt` + `new` tokens fit in the model's positions and in the
    cache.

    >>> check_fit(0, 100, 50, None, 128)
    Traceback (most recent call last):
        ...
    ValueError: 100 prompt + 50 new tokens do not fit in the model's 128 positions; ask for at most 28 new tokens
    >>> check_fit(0, 130, 50, None, 128)
    Traceback (most recent call last):
        ...
    ValueError: 130 prompt + 50 new tokens do not fit in the model's 128 positions; shorten the prompt by 52 tokens
    """
    total = stored + prompt + new
    for limit, name, larger in (
        (positions, "the model's {} positions", ""),
        (
            capacity,
            "the cache's capacity of {} tokens",
            f", or make the cache with capacity={total}",
        ),
    ):
        if limit is not None and total > limit:
            room = limit - stored - prompt
            excess = total - limit
            cure = "shorten the prompt and ask for fewer new tokens"
            if room > 0:
                cure = f"ask for at most {room} new tokens"
            elif excess < prompt:
                cure = f"shorten the prompt by {excess} tokens"
            counts = (f"{stored} stored + " if stored else "") + (
                f"{prompt} prompt + " if prompt else ""
            )
            raise ValueError(
                f"{where}{counts}{new} new tokens do not fit in {name.format(limit)}; {cure}{larger}"
            )


def max_positions(model: Any) -> int | None:
    """The number of positions of the model: its `max_positions`, else its config's
    `max_position_embeddings`.
    """
    if hasattr(model, "max_positions"):
        return model.max_positions
    return getattr(getattr(model, "config", None), "max_position_embeddings", None)


def vocabulary_size(model: Any) -> int | None:
    """The model's `config.vocab_size`; None if it has none."""
    return getattr(getattr(model, "config", None), "vocab_size", None)


LEAST_STOPS = 16  # places for stop tokens, so that most models and requests share a program
NO_TOKEN = -1


def stop_array(stop_tokens: int | Iterable[int] | None) -> np.ndarray:
    """i32[n] of one stop token or several, then `NO_TOKEN`; n is a power of two. None is no
    stop token.

    >>> stop_array((7, 9))
    array([ 7,  9, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1],
          dtype=int32)
    """
    if stop_tokens is None:
        stop_tokens = ()
    if isinstance(stop_tokens, str | bytes):
        raise ValueError(
            f"stop_tokens are token ids, got {short_repr(stop_tokens)}; encode the text, or use checkpoint.generate"
        )
    ids = list(stop_tokens) if isinstance(stop_tokens, Iterable) else [stop_tokens]
    found = [require_int("stop_tokens", i, at_least=0) for i in ids]
    room = max(LEAST_STOPS, 1 << max(len(found) - 1, 0).bit_length())
    return np.array(found + [NO_TOKEN] * (room - len(found)), np.int32)
