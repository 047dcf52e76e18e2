"""Prefill of a prompt of any length: a model reads it into a cache, in chunks of few sizes.

`Model` is the interface of a model. A program compiles once per shape, so that prompts of all
lengths are cut into chunks of the two or three sizes of `CPU_CHUNKS` or `GPU_CHUNKS`. The cache
is donated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial, wraps
from itertools import product
from typing import Any, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import SingleDeviceSharding
from jax.typing import ArrayLike

from kvjax.cache.cache import Cache, LayerCache, check_rotation
from kvjax.call import plain_step
from kvjax.compiling import Program
from kvjax.generation.callables import as_model
from kvjax.generation.prompt_inputs import (
    check_ids,
    check_model_cache,
    check_returned,
    pad_prompt,
)
from kvjax.generation.staging import (
    empty_prompt,
    needs_staging,
    room_for,
    rooms,
    settle_programs,
    settled,
    staged,
    with_room,
)
from kvjax.memory import QUICK, commit_together, on_host
from kvjax.ops.key_blocks import BLOCK, sparse_prompts
from kvjax.ops.op import Explanation, explained
from kvjax.policies import FullState, Recurrent, Step
from kvjax.sharding.placement import Placement, call_model, loops_on_auto_axes, to_context
from kvjax.spec import require_int
from kvjax.validation import check_array, check_share

SMALLEST_CHUNK = 16  # more than 1, because a chunk of one token would be a decode step
CPU_CHUNKS = (256, 64)  # logits of 256 tokens and a block of keys stay in the caches of a core
# Tokens of all rows together. The first is for an empty cache only: cuDNN attention of a whole
# prompt holds no T x T array, so only activations grow. To read the weights takes a GPU as long
# as to multiply some 300 tokens with them.
GPU_CHUNKS = (32768, 4096, 512)
# of a prompt; a last chunk that would be emptier is cut into smaller ones
MOST_PADDING = 1 / 10
# Layers of each kind from which a prompt runs layer by layer, because to compile all of them
# takes longer.
DEEP = 4

F = TypeVar("F", bound=Callable[..., Any])


class Chunk(NamedTuple):
    """A chunk of a prompt, as it is compiled."""

    size: int  # tokens of each row, padding included
    is_first: bool  # the cache is empty, so that it attends to nothing but itself


class Pass(NamedTuple):
    """One reading of a chunk."""

    share: float | None  # of the stored tokens, to which it attends; None: all
    tokens: Any  # i32[B] that each row reads in it, 0 for rows that take no part


@runtime_checkable
class Layered(Protocol):
    """A model whose prompts can run layer by layer, so that a program for them has one layer:
    see `Decoder`.

    `layers` are called as layer(x, cos, sin, cache, lengths=..., first_chunk=...) and return x
    and the layer's cache, and what they read of a decode step.
    """

    layers: Any

    def begin(self, tokens: Array, stored: Array, final: Array) -> tuple[Array, Any, Any]:
        """x [B, T, hidden], and two more arrays that each layer takes, for a chunk that follows
        `stored` i32[B] tokens, up to `final` i32[B].
        """
        ...

    def finish(self, x: Array, lengths: Any) -> Array:
        """Logits f32[B, V] of each row's last token."""
        ...


class Model(Protocol):
    """The interface of a model for generation: a pytree that can be called, or any callable
    (`kvjax.generation.as_model`).

    `steps` is needed for drafts, `exact` for those of `SelfDraft`, and `info` for
    `measure`; everything else works without.

    Optional attributes: `rotate_for` (see `kvjax.models.Decoder`), `max_positions`, and
    `config` with `vocab_size`, `max_position_embeddings`, `windows`, `query_scale` and
    `soft_cap`, as `kvjax.models.DecoderConfig` has them. With them, a request that cannot be
    served fails before it starts.
    """

    def __call__(
        self,
        tokens: Array,
        cache: Cache,
        *,
        lengths: Any = None,
        active: Any = None,
        last_logits: bool = False,
        first_chunk: bool = False,
        steps: bool = False,
        exact: bool = False,
        info: bool = False,
    ) -> Any:
        """(logits, cache), or (logits, cache, infos) with info=True.

        tokens i32[B, T] · lengths i32[B]: real tokens of this right-padded chunk · active
        bool[B]: rows that take this token · last_logits=True: logits f32[B, V] of each row's
        last real token · first_chunk=True: the cache is empty · steps=True: the T tokens are
        decode steps, as drafts need · exact=True: these steps attend to all stored tokens
        (`kvjax.decode(exact=True)`) · info=True: one Info per layer, with `attended` f32[B, K],
        or f32[T, B, K] with steps.
        """


def on_auto_axes(f: F) -> F:
    """Runs `f` in `loops_on_auto_axes` of the cache among its arguments; its logits are arrays
    of the caller's mesh.
    """

    @wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        # The cache is an argument, or an attribute of one, such as the state of a loop. Its
        # `__dict__` asks no object, such as a tokenizer, to make up an attribute.
        found = [getattr(a, "__dict__", {}).get("cache", a) for a in (*args, *kwargs.values())]
        placement = next((a.placement for a in found if isinstance(a, Cache)), None)
        with loops_on_auto_axes(placement):
            made = f(*args, **kwargs)
        if (
            dataclasses.is_dataclass(made)
            and not isinstance(made, type)
            and hasattr(made, "logits")
        ):
            return dataclasses.replace(made, logits=to_caller(made.logits, placement))
        return (to_caller(made[0], placement), made[1]) if isinstance(made, tuple) else made

    return cast(F, run)


def to_caller(logits: Array, placement: Placement | None) -> Array:
    return logits if placement is None else to_context(logits, placement.spec("B"))


@on_auto_axes
def prefill(
    model: Model,
    cache: Cache,
    tokens: ArrayLike | Sequence[Sequence[int]],
    lengths: ArrayLike | None = None,
    *,
    chunk: int | None = None,
    first_chunk: bool | None = None,
    progress: Callable[[int], None] | None = None,
    final: ArrayLike | None = None,
    sparse_prompt: float | None = None,
) -> tuple[Array, Cache]:
    """Stores a right-padded prompt i32[B, T], or one list of token ids for each row, and returns
    the logits f32[B, V] of each row's last real token.

    Reads the prompt in chunks of at most `chunk` tokens, so it holds neither a T x T array nor
    the logits of every token. None cuts it into chunks of few sizes, at most 256 tokens on CPU
    and 32768 on GPU, counted over all rows; a cache that decides by the prompt's queries what
    to keep, such as the evicting ones, gets the whole prompt at once, and with a `chunk` evicts
    after each. A row of length 0 stores nothing, and its logits are meaningless. `first_chunk`
    promises that the cache is empty; None checks this, and is False under a trace. `progress`
    is called after each chunk with the number of columns done, and waits for the chunk.

    A cache of codes, such as those of kivi, logquant or turboquant, holds the keys and values
    of a prompt of several chunks as they came until the prompt ends, so that the result does
    not depend on the chunks. Until then it takes as much memory again as a full cache of the
    prompt's tokens, rounded up to a power of two of at least 1024. A prompt in one chunk takes
    no such memory. Earlier prompts are read as they were stored. Over the devices of a context
    axis later chunks attend to the codes of earlier ones.

    `final`, a number or i32[B], is the number of tokens that a row will hold in the end, answer
    included; by default those after this prompt. Only models whose RoPE depends on the length
    of a text (LongRoPE, dynamic NTK) use it: they rotate all keys of a row for it, and refuse a
    text that outgrows it.

    `sparse_prompt` is the share of the stored tokens, in blocks of 128, to which each block of
    queries attends: those with the most estimated weight (`kvjax.ops.key_blocks`). A chunk
    attends to itself exactly, and the chunk in which a row ends, for that row, to everything;
    the last chunk has at most 512 tokens on a GPU. Such a prompt is read in chunks of at most
    4096 tokens. The logits, and the keys and values of all layers but the first, are
    approximate. A GPU that has no kernel for it, which is any but Hopper, ignores
    `sparse_prompt` and says so: everything takes less time there.

    Raises:
      ValueError: a prompt of a wrong shape or dtype; a row that is rotated for a shorter text;
        a `sparse_prompt` for a cache that reads whole prompts at once, is split over devices,
        or keeps no plain keys on the device, or with `lengths` that are traced.
    """
    check_model_cache(model, cache)
    model = as_model(model)
    if isinstance(tokens, list | tuple) and lengths is None:
        tokens, lengths = pad_prompt(tokens, rows=cache.spec.batch)
    if sparse_prompt is not None:
        steps = steps_of(getattr(model, "config", None), cache)
        if not check_sparse(cache, sparse_prompt, steps):
            sparse_prompt = None
    prompt, count = _checked_prompt(cache, tokens, lengths, sparse=sparse_prompt is not None)
    T = prompt.shape[1]
    if first_chunk is None:
        length = cache.length
        first_chunk = not isinstance(length, jax.core.Tracer) and not np.any(on_host(length))
    if cache.rotated_for is not None:
        cache = _rotated(model, cache, count, final)

    # Room for all chunks, and the prompt padded to fill them.
    chunks = chunks_of(cache, T, chunk, empty=first_chunk, sparse=sparse_prompt is not None)
    pad = jnp.pad if isinstance(prompt, jax.core.Tracer) else np.pad
    padding = ((0, 0), (0, sum(size for size, _ in chunks) - T))
    prompt = pad(prompt.astype(np.int32), padding)
    cache = with_model(model, cache)
    cache = with_room(cache, T, len(chunks))

    logits: Array | None = None
    start = 0
    for size, is_first in chunks:
        columns = slice(start, start + size)
        for share, real in _passes(count - start, size, sparse_prompt):
            with sparse_prompts(share):
                new, cache = _read(model, cache, prompt[:, columns], real, first_chunk=is_first)
            # A row whose last token is in this chunk gets its logits here; a row that ended
            # earlier keeps its own.
            if logits is None:
                logits = new
            elif isinstance(real, jax.core.Tracer) or not np.all(real > 0):
                logits = _keep_rows(real > 0, new, logits)
            else:
                logits = new
        start += size
        if progress is not None:
            jax.block_until_ready(logits)
            progress(min(start, T))
    assert logits is not None
    return logits, settled(cache)


def _checked_prompt(
    cache: Cache, tokens: Any, lengths: ArrayLike | None, *, sparse: bool
) -> tuple[Any, Any]:
    """A prompt [B, T] and the tokens [B] that each row has of it, both on the host unless they
    are traced: slices of a prompt are then not compiled as programs.

    Raises ValueError for arrays that are none of this cache, and for a `sparse` prompt whose
    rows end nobody knows where.
    """
    prompt: Any = tokens
    if not isinstance(tokens, jax.core.Tracer):
        try:
            prompt = np.asarray(tokens)
        except (TypeError, ValueError):
            raise ValueError(
                "tokens must be one array of integers [B, T], and these rows have several lengths; leave "
                "lengths=... out, which a list says itself, or pad them on the right"
            ) from None
    if prompt.ndim != 2 or prompt.shape[0] != cache.spec.batch or prompt.shape[1] == 0:
        raise ValueError(
            f"tokens must be [B={cache.spec.batch}, T >= 1] for this cache, got shape {list(prompt.shape)}"
        )
    B, T = prompt.shape
    if not np.issubdtype(prompt.dtype, np.integer):
        raise ValueError(f"tokens must be integers, got {prompt.dtype}")
    count: Any = np.full((B,), T) if lengths is None else lengths
    count = count if isinstance(count, jax.core.Tracer) else np.asarray(count)
    if count.shape != (B,) or not np.issubdtype(count.dtype, np.integer):
        raise ValueError(
            f"lengths must be integers [B={B}], one for each row of tokens, got {count.dtype}{list(count.shape)}"
        )
    if isinstance(count, jax.core.Tracer):
        if sparse:
            raise ValueError(
                "sparse_prompt must know where each row ends, whose last chunk attends to everything, and lengths are "
                "traced; call prefill outside of jit, or leave lengths out"
            )
        return prompt, count
    if np.any((count < 0) | (count > T)):
        raise ValueError(
            f"lengths must be in [0, T={T}], got {count.tolist()}; they count the real tokens of rows"
        )
    if not isinstance(prompt, jax.core.Tracer):
        check_ids(prompt, count)
    return prompt, count


def _rotated(model: Any, cache: Cache, count: Any, final: ArrayLike | None) -> Cache:
    """`cache`, whose rows will rotate their keys for texts of `final` tokens, a number or i32[B];
    for None, or less than that, of those that they hold after `count` [B] more.

    Raises ValueError for a row that holds keys that are rotated for a shorter text.
    """
    total = cache.length + count
    if final is not None:
        check_array("final", final, "a number or integers [B]", "4096")
    text = total
    if final is not None:
        given = jnp.broadcast_to(jnp.asarray(final, jnp.int32), total.shape)
        text = jnp.maximum(given, total)
    check_rotation(cache, total)
    rotated: Cache = model.rotate_for(cache, jnp.where(count > 0, text, 0))
    return rotated


def _passes(left: Any, size: int, share: float | None) -> list[Pass]:
    """The passes in which rows with `left` tokens, i32[B], read a chunk of `size` columns, if
    earlier tokens attend to a `share` of what is stored.

    The last tokens of a text, which ask the question, attend to everything. So where some rows
    end in a chunk and others do not, it is read twice: what a row computes does not depend on
    the lengths of the others.
    """
    real = left.clip(0, size).astype(np.int32)
    all_exact = [Pass(None, real)]
    if share is None:
        return all_exact
    goes_on = left > size
    sparse = Pass(share, np.where(goes_on, real, 0))
    exact = Pass(None, np.where(goes_on, 0, real))
    return [one for one in (sparse, exact) if np.any(one.tokens)] or all_exact


def steps_of(config: Any, cache: Cache) -> tuple[Step, ...]:
    """How each layer of a model with this `config` attends to its cache, as
    `kvjax.attention` does by default where the config does not say.
    """
    scale, soft_cap, windows = (
        getattr(config, name, None) for name in ("query_scale", "soft_cap", "windows")
    )
    return tuple(
        plain_step("prefill", layer.spec.head_dim, window, scale, soft_cap)
        for layer, window in zip(
            cache.layers, windows or (None,) * len(cache.layers), strict=True
        )
    )


def check_sparse(cache: Cache, share: float, steps: Sequence[Step]) -> bool:
    """True if chunks in this process attend to a part of a full cache, whose layers attend as
    `steps` say.

    Raises ValueError for a `sparse_prompt` that is no share, or a cache whose chunks cannot
    attend to a part.
    """
    check_share("sparse_prompt", share, "what is stored")
    if cache.placement is not None:
        raise ValueError(
            "sparse_prompt is for a cache on one device, and this one has a placement"
        )
    ran: list[Explanation] = []
    kinds = {
        (layer.policy, step): layer for layer, step in zip(cache.layers, steps, strict=True)
    }
    for (policy, step), layer in kinds.items():
        if isinstance(policy, Recurrent):
            continue
        if policy.observes:
            raise ValueError(
                f"sparse_prompt has no effect on {policy}, which reads a whole prompt at once; leave it out, or use a "
                "method that reads prompts in chunks, such as full or fier"
            )
        spec = layer.spec
        heads = spec.kv_heads, spec.q_heads // spec.kv_heads
        q = jax.ShapeDtypeStruct((spec.batch, *heads, BLOCK, spec.head_dim), spec.dtype)
        with sparse_prompts(share), explained() as found:
            jax.eval_shape(partial(policy.attend_stored, step=step), layer.state, q)
        ran += found
    return any(one.op == "attend_key_blocks" for one in ran)


def windows_of(model: Any) -> tuple[int | None, ...]:
    """The sliding window of each layer, if the model says so."""
    return getattr(getattr(model, "config", None), "windows", ())


def warm_prefill(
    model: Model, cache: Cache, tokens: int, *, chunk: int | None = None
) -> tuple[Array, Cache]:
    """Compiles what `prefill` runs for a prompt of `tokens` per row, by chunks of which the
    first holds one token.
    """
    B = cache.spec.batch
    empty = True
    cache = with_model(model, cache)
    chunks = chunks_of(cache, tokens, chunk, empty=True)
    cache = with_room(cache, tokens, len(chunks))
    logits: Any = None
    for size, is_first in dict.fromkeys(chunks):
        count = np.full((B,), int(empty), np.int32)
        before = logits
        logits, cache = _read(
            model, cache, np.zeros((B, size), np.int32), count, first_chunk=is_first
        )
        if B > 1 and before is not None:
            logits = _keep_rows(count > 0, logits, before)
        empty = False
    return logits, settled(cache)


def prompt_programs(
    model: Model, cache: Cache, tokens: int | None, *, chunk: int | None = None
) -> list[Program]:
    """The programs with which `prefill` reads a prompt of `tokens` per row into the empty
    `cache`; nothing runs.

    The model may hold shapes in place of arrays. `tokens` None is for prompts of all lengths,
    for which a cache that gets prompts at once has the longest.
    """
    cache = with_model(model, cache)
    B = cache.spec.batch
    most = cache.spec.capacity
    found = list[Program]()
    if tokens is not None:
        prompts = [tokens]
    elif chunk_for(cache, 1, chunk) is not None:
        prompts = [most]
    else:
        prompts = [1, 600, 5000, 32768]  # which have chunks of all sizes
    plans = [chunks_of(cache, min(n, most), chunk, empty=True) for n in prompts]
    chunks = dict.fromkeys(one for plan in plans for one in plan)
    caches = [cache]
    if needs_staging(cache) and max(map(len, plans)) > 1:
        sizes = rooms(most) if tokens is None else [room_for(min(tokens, most), most)]
        roomy = [staged(cache, room, _prompt_like) for room in sizes]
        found += [program for one in roomy for program in settle_programs(one)]
        # Prompts of one chunk, which some of all lengths are, need no room.
        caches = [cache, *roomy] if tokens is None else roomy

    for cache, (size, is_first) in product(caches, chunks):
        chunk_tokens = np.zeros((B, size), np.int32)
        lengths = np.zeros((B,), np.int32)
        settings = {"first_chunk": is_first}
        if not by_layer(model, cache):
            arguments = (model, cache, chunk_tokens, lengths)
            found.append(Program(_prefill_chunk, arguments, settings))
            continue
        stored = like(cache, jax.eval_shape(lambda cache: cache.length, cache))
        begin = Program(_begin, (model, chunk_tokens, stored, lengths), {})
        x, cos, sin = like(cache, begin.results())
        found.append(begin)
        found.append(Program(_finish, (model, x, lengths), {}))
        layers: Any = cast(Any, model).layers
        for i in kinds_of(model, cache):
            of_layer = (layers[i], x, cos, sin, cache.layers[i], lengths)
            found.append(Program(_layer, of_layer, settings))
    return found


def chunks_of(
    cache: Cache, tokens: int, chunk: int | None = None, *, empty: bool, sparse: bool = False
) -> list[Chunk]:
    """The chunks in which a prompt of `tokens` per row is read into `cache`, of which the last is
    padded. The first may be compiled for an `empty` cache.

    With a `chunk` the sizes are even. A policy that selects once by all queries of a prompt
    gets it as one chunk. A `sparse` prompt is cut into smaller chunks, which attend to
    themselves exactly, and an exact last one.
    """
    B = cache.spec.batch
    chunk = chunk_for(cache, tokens, chunk)
    if chunk is not None:
        size = chunk_size(tokens, chunk, rows=B)
        return [Chunk(size, empty and start == 0) for start in range(0, tokens, size)]
    if jax.default_backend() == "cpu":
        return [Chunk(size, False) for size in cut(tokens, CPU_CHUNKS)]
    whole, *sizes = (max(SMALLEST_CHUNK, size // B) for size in GPU_CHUNKS)
    if sparse and tokens > sizes[0]:
        # Large chunks, and at least one small one at the end, which is exact.
        large = (tokens - sizes[1]) // sizes[0]
        rest = cut(tokens - large * sizes[0], sizes[1:])
        return [Chunk(size, False) for size in large * sizes[:1] + rest]
    # The largest size is for an empty cache only, and not above its capacity.
    whole = min(whole, 1 << (cache.spec.capacity.bit_length() - 1))
    if not empty or whole - tokens > MOST_PADDING * tokens:
        return [Chunk(size, False) for size in cut(tokens, sizes)]
    rest = cut(max(tokens - whole, 0), sizes)
    return [Chunk(whole, True), *(Chunk(size, False) for size in rest)]


def cut(tokens: int, sizes: Sequence[int]) -> list[int]:
    """`tokens` as chunks of few `sizes`, from large to small.

    The last one is padded if that adds at most `MOST_PADDING` of `tokens`, or if there is no
    smaller size.

    >>> cut(2829, (512, 64)), cut(600, (512, 64)), cut(5, (512, 64))
    ([512, 512, 512, 512, 512, 512], [512, 64, 64], [64])
    """
    found = list[int]()
    left = tokens
    for size in sizes:
        most = MOST_PADDING * tokens if size != sizes[-1] else size
        while left > 0 and size - left <= most:
            found.append(size)
            left -= size
    return found


def chunk_size(tokens: int, chunk: int | None = None, *, rows: int = 1) -> int:
    """The size of all chunks of a prompt of `tokens` tokens: chunks are as even as a small set
    of shapes allows.

    >>> [chunk_size(t, 512) for t in (1, 100, 300, 512, 513, 5000)]
    [16, 128, 512, 512, 512, 512]
    >>> [chunk_size(t, 32768) for t in (1100, 9000, 32768, 33000)]
    [1280, 10240, 32768, 20480]
    """
    if chunk is None and jax.default_backend() == "cpu":
        chunk = CPU_CHUNKS[0]
    elif chunk is None:
        chunk = max(GPU_CHUNKS[-1], GPU_CHUNKS[0] // rows)
    chunk = require_int("chunk", chunk, at_least=2)
    chunks = math.ceil(tokens / chunk)
    even = math.ceil(tokens / chunks)
    return min(chunk, _round_up(even))


def chunk_for(cache: Cache, tokens: int, chunk: int | None) -> int | None:
    """`chunk`; if it is None, the whole prompt for policies that select from it once, by all of
    its queries.
    """
    whole = chunk is None and any(layer.policy.observes for layer in cache.layers)
    return _round_up(tokens) if whole else chunk


def _round_up(size: int) -> int:
    """`size`, rounded up to one of few sizes: a power of two up to 1024, then a multiple of an
    eighth of the next one, which is at most 25 % more.
    """
    power = max(SMALLEST_CHUNK, 1 << (size - 1).bit_length())
    step = power if power <= 1024 else power // 8
    return -(-size // step) * step


@partial(jax.jit, static_argnames="first_chunk", donate_argnames="cache")
def _prefill_chunk(
    model: Model,
    cache: Cache,
    tokens: Array,
    lengths: Array,
    *,
    first_chunk: bool,
) -> tuple[Array, Cache]:
    made = call_model(
        model,
        tokens,
        cache,
        lengths=lengths,
        last_logits=True,
        first_chunk=first_chunk,
    )
    check_returned(made)
    logits, cache = made
    return logits, cache


def _read(
    model: Model,
    cache: Cache,
    tokens: Any,
    lengths: Any,
    *,
    first_chunk: bool,
) -> tuple[Array, Cache]:
    """Reads a chunk, in one program or layer by layer; the cache is donated."""
    if isinstance(tokens, jax.core.Tracer) or not by_layer(model, cache):
        return _prefill_chunk(model, cache, tokens, lengths, first_chunk=first_chunk)
    layered: Any = model
    caches = list(cache.layers)
    x, cos, sin = commit_together((cache, _begin(layered, tokens, cache.length, lengths)))[1]
    for i, layer in enumerate(layered.layers):
        x, caches[i] = _layer(layer, x, cos, sin, caches[i], lengths, first_chunk=first_chunk)
    cache = dataclasses.replace(cache, layers=tuple(caches))
    return _finish(layered, x, lengths), cache


def by_layer(model: Any, cache: Cache) -> bool:
    """Whether prompts run layer by layer: a deep model on one device."""
    if (
        not isinstance(model, Layered)
        or cache.rotated_for is not None
        or cache.placement is not None
        or not jax.sharding.get_abstract_mesh().empty
    ):
        return False
    layers = jax.tree.leaves(cache.layers)
    if isinstance(layers[0], jax.core.Tracer) or len(model.layers) != len(cache.layers):
        return False
    return len(cache.layers) >= DEEP * len(kinds_of(model, cache))


def kinds_of(model: Any, cache: Cache) -> list[int]:
    """The first layer of each kind: of those that differ in more than their numbers, and so do
    their caches.
    """
    found: dict[Any, int] = {}
    for i, both in enumerate(zip(model.layers, cache.layers, strict=True)):
        leaves, tree = jax.tree.flatten(both)
        found.setdefault((tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)), i)
    return list(found.values())


def like(cache: Cache | LayerCache, shapes: Any) -> Any:
    """Shapes of arrays that are committed to a device if those of the cache are."""
    leaf: Any = next(iter(jax.tree.leaves(cache)))
    if isinstance(leaf, np.ndarray) or not leaf.committed:
        return shapes
    device = SingleDeviceSharding(next(iter(leaf.sharding.device_set)))
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=device), shapes
    )


def _prompt_like(layer: LayerCache, room: int) -> FullState:
    """Shapes of room for a prompt beside a layer; arrays if the layer has a placement."""
    if layer.placement is not None:
        return empty_prompt(layer, room)
    return cast(FullState, like(layer, jax.eval_shape(lambda: empty_prompt(layer, room))))


@partial(jax.jit, compiler_options=QUICK)
def _begin(model: Any, tokens: Array, stored: Array, lengths: Array) -> tuple[Array, Any, Any]:
    return model.begin(tokens, stored, stored + lengths)


@partial(
    jax.jit,
    static_argnames="first_chunk",
    donate_argnames=("x", "cache"),
    compiler_options=QUICK,
)
def _layer(
    layer: Any, x: Array, cos: Any, sin: Any, cache: Any, lengths: Array, *, first_chunk: bool
) -> tuple[Array, Any]:
    x, cache, _ = layer(
        x, cos, sin, cache, lengths=lengths, active=None, first_chunk=first_chunk
    )
    return x, cache


@partial(jax.jit, compiler_options=QUICK)
def _finish(model: Any, x: Array, lengths: Array) -> Array:
    return model.finish(x, lengths)


def with_model(model: Model, cache: Cache) -> Cache:
    """The cache on the device of the model, if it was not committed to another."""
    return commit_together((_committed(model), cache))[1]


def _committed(model: Model) -> Any:
    """An array of the model that is committed to its device, if there is one."""
    arrays = [leaf for leaf in jax.tree.leaves(model) if isinstance(leaf, Array)]
    return next(
        (leaf for leaf in arrays if not isinstance(leaf, jax.core.Tracer) and leaf.committed),
        None,
    )


@jax.jit
def _keep_rows(rows: Array, new: Array, old: Array) -> Array:
    return jnp.where(rows[:, None], new, old)
