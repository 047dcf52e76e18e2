"""From logits to a token: greedy, or a draw after temperature, top-k, top-p and min-p, in that
order.

The order and the meaning of each filter are those of transformers' generate: each filter sees
the distribution that the filters before it left, renormalised. **Differs:** exactly k tokens
pass top-k, where transformers keeps all that tie with the k-th; equal logits rank by token, the
lower first, greedy included.

A setting that is None is off, belongs to the static structure of `Sampling`, and costs nothing
in the compiled program. A setting that is a number or an array, a scalar or [B], is data: a new
value does not compile a new program, and a filter that keeps every token of all rows is
skipped. `generate` gives all settings as data (`Draws`), so that it has one program for all
draws, and one that is greedy.

Keys are explicit. Row b of a batch draws with `fold_in(key, b)`, or with its own key if `key`
is an array of B keys, so no row's draw depends on the other rows, nor on how many there are.
The draw is the Gumbel-max trick with one noise value per token of the vocabulary: a filter that
keeps the token that would have won does not change the draw.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from kvjax.memory import on_host
from kvjax.validation import MOST, cut, has_dtype, short_repr


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to draw a token. `Sampling()` is greedy; `sampling(...)` makes a Sampling from
    checked Python numbers.
    """

    temperature: ArrayLike | None = None  # f32[] or f32[B]; None or 0: greedy
    top_k: ArrayLike | None = None  # i32[] or i32[B], the most likely k tokens
    # f32[] or f32[B], the fewest tokens that hold this probability
    top_p: ArrayLike | None = None
    # f32[] or f32[B], tokens at least this times as likely as the likeliest
    min_p: ArrayLike | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a number that means nothing; arrays on a device and tracers are
        taken as they are.
        """
        for name in CHECKS:
            value = getattr(self, name)
            if isinstance(value, str | bool | int | float | np.ndarray | np.generic):
                _setting(name, value)

    @property
    def greedy(self) -> bool:
        """True if no draw is made, so that no key is needed. Static."""
        return self.temperature is None


def sampling(
    temperature: Any = 0.0, *, top_k: Any = None, top_p: Any = None, min_p: Any = None
) -> Sampling:
    """Makes a Sampling of checked values; each is a number, or a sequence with one for each
    row.

    A temperature of 0 is greedy, and drops the filters, which could not change the most likely
    token. If temperatures differ by row, a row with temperature 0 is greedy and the others
    draw.

    >>> sampling() == Sampling()
    True
    >>> sampling(0.7, top_p=1.5)
    Traceback (most recent call last):
        ...
    ValueError: top_p must be in (0, 1], got 1.5; 1 keeps every token
    """
    heat = _setting("temperature", temperature)
    k, p, least = (
        None if value is None else _setting(name, value)
        for name, value in (("top_k", top_k), ("top_p", top_p), ("min_p", min_p))
    )
    if heat.ndim == 0 and heat == 0:
        return Sampling()
    return Sampling(temperature=heat, top_k=k, top_p=p, min_p=least)


def requested_sampling(
    temperature: Any = None, *, top_k: Any = None, top_p: Any = None, min_p: Any = None
) -> Sampling:
    """`sampling` for settings that a user gave: without a temperature it is greedy, and filters
    raise ValueError.

    >>> requested_sampling(top_p=0.9)
    Traceback (most recent call last):
        ...
    ValueError: top_p=0.9 filters draws, but without a temperature nothing is drawn; give a temperature too, such as 1.0
    """
    if temperature is None:
        given = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"{name}={value} filters draws, but without a temperature nothing is drawn; give a temperature "
                    "too, such as 1.0"
                )
        return Sampling()
    return sampling(temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def sample(logits: Array, key: Array | None, sampling: Sampling) -> Array:
    """The next token i32[B] of each row, from logits f32[B, V].

    `key` is one key of jax.random.key for all rows, or B keys; it may be None when `sampling`
    is greedy. Sorts the vocabulary only for top-p. If devices split the vocabulary, greedy
    sampling and top-k exchange only counts and each device's best token, and top-p gathers the
    logits.
    """
    if logits.ndim != 2:
        raise ValueError(f"logits must have the 2 dimensions [B, V], got {list(logits.shape)}")
    B, V = logits.shape
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)  # ties go to the first
    if sampling.greedy:
        return best
    keys = row_keys(key, B)
    temperature = _column("temperature", sampling.temperature, B).astype(jnp.float32)
    drawn_rows = temperature > 0
    scores = logits.astype(jnp.float32) / jnp.where(drawn_rows, temperature, 1.0)
    noise = by_row(lambda row: jax.random.gumbel(row, (V,), jnp.float32), keys)

    if sampling.top_k is not None:
        k = _column("top_k", sampling.top_k, B)
        scores = lax.cond(jnp.any(k < V), _keep_best, lambda scores, k: scores, scores, k)
    if sampling.top_p is not None:
        p = _column("top_p", sampling.top_p, B)
        scores = lax.cond(jnp.any(p < 1), _keep_probable, lambda scores, p: scores, scores, p)
    if sampling.min_p is not None:
        # p_token >= min_p * p_best, in logs; the normaliser cancels, and the best token always
        # passes.
        floor = jnp.max(scores, axis=-1, keepdims=True) + jnp.log(
            _column("min_p", sampling.min_p, B)
        )
        scores = jnp.where(scores >= floor, scores, -jnp.inf)

    drawn = jnp.argmax(scores + noise, axis=-1).astype(jnp.int32)
    return jnp.where(drawn_rows[:, 0], drawn, best)


def _keep_best(scores: Array, k: Array) -> Array:
    return jnp.where(_among_best(scores, k), scores, -jnp.inf)


def _keep_probable(scores: Array, p: Array) -> Array:
    """Keeps the fewest tokens that hold the probability p f32[B or 1, 1]."""
    order = jnp.argsort(scores, axis=-1, descending=True, stable=True)  # rank -> token
    share = jax.nn.softmax(jnp.take_along_axis(scores, order, axis=-1), axis=-1)
    before = jnp.cumsum(share, axis=-1) - share  # probability of the tokens ranked above
    # a rounded sum may reach 1 before the last token
    keep = ((before < p) | (p >= 1)).at[:, 0].set(True)
    keep = jnp.put_along_axis(jnp.zeros_like(keep), order, keep, axis=-1, inplace=False)
    return jnp.where(keep, scores, -jnp.inf)


def _among_best(scores: Array, k: Array) -> Array:
    """The k i32[B or 1, 1] largest of each row; ties go to the lower tokens: bool[B, V].

    Finds the k-th largest score four bits at a time, and then how many of its ties pass, by
    counts alone: sums over the vocabulary, which devices that split it can exchange without the
    scores.
    """
    bits = lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.uint32)  # -0 as 0
    # Unsigned integers in the order of the floats.
    ordered = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))
    kth = _largest(lambda at: _count(ordered[:, None] >= at) >= k, len(scores))
    above = ordered > kth
    equal = ordered == kth
    room = k - _count(above)[:, None]
    token = lax.broadcasted_iota(jnp.uint32, scores.shape, 1)
    end = _largest(
        lambda at: _count(equal[:, None] & (token[:, None] < at)) <= room, len(scores)
    )
    return above | (equal & (token < end))


def _count(x: Array) -> Array:
    return jnp.sum(x, axis=-1, dtype=jnp.int32)


def _largest(holds: Callable[[Array], Array], rows: int) -> Array:
    """The largest number x for which holds(x) is true, as it is for all numbers below x: u32[B,
    1].

    `holds` takes u32[B, 15, 1] and returns bool[B, 15].
    """
    digits = jnp.arange(1, 16, dtype=jnp.uint32)[None]

    def digit(i: Array, found: Array) -> Array:
        shift = jnp.uint32(28) - 4 * i.astype(jnp.uint32)
        passed = holds((found + (digits << shift))[..., None])
        return found + (jnp.sum(passed, axis=-1, keepdims=True, dtype=jnp.uint32) << shift)

    return lax.fori_loop(0, 8, digit, jnp.zeros((rows, 1), jnp.uint32))


def by_row(f: Callable[..., Array], *operands: Array, of: Array | None = None) -> Array:
    """`f` of each row of `operands`, of which the first, or `of`, are keys.

    Under `jax.vmap`, keys of other kinds than threefry (such as rbg) draw what the first of
    them draws, so that rows would depend on the rows beside them; those run one after the
    other.
    """
    kind = str(jax.random.key_impl(operands[0] if of is None else of))
    return (
        jax.vmap(f)(*operands) if "threefry" in kind else lax.map(lambda row: f(*row), operands)
    )


def row_keys(key: Array | None, rows: int) -> Array:
    """One key per row: `fold_in(key, row)` of a single key; B keys are returned unchanged."""
    checked = _check_key(key, rows)
    if checked.ndim:
        return checked
    return by_row(
        lambda row: jax.random.fold_in(checked, row),
        jnp.arange(rows, dtype=jnp.int32),
        of=checked,
    )


def _check_key(key: Array | None, rows: int) -> Array:
    if key is None:
        raise ValueError(
            "a draw needs a key: pass key=jax.random.key(seed), or sample greedily"
        )
    if not has_dtype(key, jax.dtypes.prng_key):
        got = getattr(key, "dtype", type(key).__name__)
        raise ValueError(
            f"key must be made by jax.random.key(seed), got {got}; "
            "wrap an older key with jax.random.wrap_key_data"
        )
    if key.ndim and key.shape != (rows,):
        raise ValueError(
            f"key must be one key or {rows} keys, one for each row, got shape {list(key.shape)}"
        )
    return key


OFF = {
    "temperature": np.float32(0),
    "top_k": np.int32(2**31 - 1),
    "top_p": np.float32(1),
    "min_p": np.float32(0),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draws:
    """How rows draw, all of it data: each setting has one number per row, so that all draws run
    one program.
    """

    settings: Sampling  # f32[B] and i32[B]; none is None
    keys: Array  # key[B]
    shared: np.ndarray  # bool[]: the keys are one key, into which each row folds its index

    @classmethod
    def of(cls, sampling: Sampling, key: Array | None, rows: int) -> Draws | None:
        """The draws of a request; None if no row draws.

        Raises:
          ValueError: `sampling` is no Sampling, or it draws and `key` is no key for these rows.
        """
        if not isinstance(sampling, Sampling):
            raise ValueError(
                f"sampling must be a Sampling, got {short_repr(sampling)}; make one: "
                "kvjax.generation.sampling.sampling(temperature=0.7), and pass key=jax.random.key(seed)"
            )
        if sampling.greedy:
            return None
        key = _check_key(key, rows)
        settings = {}
        for name, off in OFF.items():
            given = getattr(sampling, name)
            given = off if given is None else on_host(given).astype(off.dtype)
            settings[name] = np.broadcast_to(_for_rows(name, given, rows), (rows,))
        data = on_host(jax.random.key_data(key))
        # A NumPy array: to make one of JAX would be a program.
        data_by_row: Any = np.broadcast_to(data, (rows, data.shape[-1]))
        keys = jax.random.wrap_key_data(data_by_row, impl=jax.random.key_impl(key))
        return cls(Sampling(**settings), keys, np.asarray(key.ndim == 0))


_OWN_KEYS = np.zeros((), bool)  # `Draws.shared` of rows that have keys of their own


def rows_of_draws(draws: Draws | None, rows: int) -> list[Draws | None]:
    """The draws of each row alone, as NumPy arrays, with the key data u32[1, 2] in place of
    keys.

    Raises:
      ValueError: keys of another kind than those of jax.random.key(seed).
    """
    if draws is None:
        return [None] * rows
    if jax.random.key_impl(draws.keys) != jax.random.key_impl(jax.random.key(0)):
        raise ValueError(
            "requests beside each other need keys of one kind: make them with jax.random.key(seed)"
        )
    data: Any = on_host(jax.random.key_data(draws.keys))
    if draws.shared:
        # Row by row, which is one program for any number of rows: no request waits for a compiler.
        key = jax.random.wrap_key_data(data[0])
        folded = [jax.random.fold_in(key, row) for row in range(rows)]
        data = np.stack([on_host(jax.random.key_data(one)) for one in folded])
    return [
        Draws(jax.tree.map(lambda a: a[i : i + 1], draws.settings), data[i : i + 1], _OWN_KEYS)  # noqa: B023
        for i in range(rows)
    ]


def stack_draws(rows: Sequence[Draws | None]) -> Draws:
    """The draws of a batch, of `rows_of_draws`; a row of None draws nothing."""
    size = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape
    off = Sampling(**{name: np.full(1, value) for name, value in OFF.items()})
    settings = jax.tree.map(
        lambda *each: np.concatenate(each),
        *(off if row is None else row.settings for row in rows),
    )
    nothing = np.zeros((1, *size), np.uint32)
    data: Any = np.concatenate([nothing if row is None else row.keys for row in rows])
    return Draws(settings, jax.random.wrap_key_data(data), _OWN_KEYS)


def drawing(draws: Draws | None, rows: int) -> Callable[[Array, Array], Array]:
    """The function (logits f32[B, V], i) -> i32[B] that draws token i, a number or one per row,
    of each row.
    """
    if draws is None:
        return lambda logits, i: sample(logits, None, Sampling())
    keys = jnp.where(
        draws.shared,
        by_row(jax.random.fold_in, draws.keys, jnp.arange(rows, dtype=jnp.int32)),
        draws.keys,
    )

    def draw(logits: Array, i: Array) -> Array:
        return sample(
            logits,
            by_row(jax.random.fold_in, keys, jnp.broadcast_to(i, (rows,))),
            draws.settings,
        )

    return draw


# The dtype of each setting, its values, and how an error names them.
CHECKS: dict[str, tuple[type, Callable[[np.ndarray], Any], str]] = {
    "temperature": (
        np.float32,
        lambda x: np.isfinite(x) & (x >= 0),
        "a finite number of at least 0, got {}; 0 is greedy",
    ),
    "top_k": (
        np.int32,
        lambda x: x >= 1,
        "at least 1, got {}; leave it out to keep every token",
    ),
    "top_p": (
        np.float32,
        lambda x: (x > 0) & (x <= 1),
        "in (0, 1], got {}; 1 keeps every token",
    ),
    "min_p": (
        np.float32,
        lambda x: (x >= 0) & (x < 1),
        "in [0, 1), got {}; 0 keeps every token",
    ),
}


def _setting(name: str, value: Any) -> np.ndarray:
    """`value` as a NumPy array, a scalar or one number per row, or an error that says what it
    must be.
    """
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            f"{name} is traced, so its value cannot be checked here; use kvjax.generation.sampling.Sampling directly"
        )
    dtype, allowed, wanted = CHECKS[name]
    try:
        found = np.asarray(value)
    except (TypeError, ValueError):  # a key of jax.random, or lists of several lengths
        found = np.asarray(None)
    kind = "integer" if dtype is np.int32 else "number"
    if found.dtype == bool or not np.issubdtype(
        found.dtype, np.integer if dtype is np.int32 else np.number
    ):
        raise ValueError(
            f"{name} must be {'an' if kind == 'integer' else 'a'} {kind}, got {short_repr(value)}"
        )
    if found.ndim > 1:
        raise ValueError(
            f"{name} must be one {kind} or one per row, got shape {list(found.shape)}"
        )
    if not np.all(allowed(found)):
        raise ValueError(f"{name} must be {wanted.format(cut(str(value)))}")
    if dtype is np.int32 and np.iinfo(found.dtype).max > MOST:
        found = np.minimum(found, MOST)
    return found.astype(dtype)


def _column(name: str, value: ArrayLike | None, rows: int) -> Array:
    """A setting as [1, 1] or [B, 1], to broadcast against [B, V]."""
    return _for_rows(name, jnp.asarray(value), rows).reshape(-1, 1)


def _for_rows(name: str, value: Any, rows: int) -> Any:
    if value.shape not in ((), (rows,)):
        raise ValueError(
            f"{name} must be one number or {rows}, one for each row, got shape {list(value.shape)}"
        )
    return value
