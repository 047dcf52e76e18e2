"""Checks of arguments: each error says what it got, what it wanted, and what to do.

The checks look at the methods and fields of an argument, never at its class, so that a policy,
selector or store of another package passes them. They run while tracing and cost nothing in a
compiled program.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

MOST = 2**31 - 1  # counts, sizes and positions are int32 on the device
LEAST_LIKENESS = 0.6  # for "did you mean" to offer a name: 2 * equal letters / all letters


@contextmanager
def naming_absent(what: str) -> Iterator[None]:
    """If a package is not installed that the block imports, the error says that `what` needs
    it, and how to get it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "kvjax"):
            raise
        package = {"orbax": "orbax-checkpoint"}.get(missing, missing)
        raise ImportError(
            f"{what} needs {package}, which is not installed: pip install {package}"
        ) from error


def refuse_former_verbs(part: type, now: Mapping[str, str]) -> None:
    """Raises ValueError if a class defines a verb by a former name, by which nothing calls it;
    `now` says what each became.

    >>> refuse_former_verbs(type("Mine", (), {"worth": len}), {"worth": "the verb score"})
    Traceback (most recent call last):
        ...
    ValueError: Mine.worth would never be called: it is the verb score now; write that instead
    """
    for name in vars(part).keys() & now.keys():
        raise ValueError(
            f"{part.__name__}.{name} would never be called: it is {now[name]} now; write that instead"
        )


def check_verbs(
    where: str,
    value: Any,
    wanted: str,
    verbs: Iterable[str],
    example: str,
    *,
    fields: Iterable[str] = (),
    protocol: str | None = None,
) -> None:
    """Raises ValueError unless `value` is an instance with the methods `verbs` and the
    attributes `fields`.

    >>> import kvjax
    >>> check_verbs("init(policy=...)", kvjax.Full, "a policy", ["attend"], "kvjax.Full()")
    Traceback (most recent call last):
        ...
    ValueError: init(policy=...) must be a policy, got the class Full; make an instance: Full(...)
    """
    if isinstance(value, str):
        problem = f"the string {short_repr(value)}; write it as code, for example {example}"
    elif isinstance(value, type):
        problem = f"the class {value.__name__}; make an instance: {value.__name__}(...)"
    elif missing := [
        *(verb for verb in verbs if not callable(getattr(value, verb, None))),
        *(field for field in fields if not hasattr(value, field)),
    ]:
        if callable(value):
            name = getattr(value, "__name__", type(value).__name__)
            problem = f"the function {name}; call it: {name}(...)"
        else:
            problem = f"{short_repr(value)}, which has no {', '.join(missing)}; give for example {example}"
            problem += f", or make {protocol} its base" if protocol else ""
    else:
        return
    raise ValueError(f"{where} must be {wanted}, got {problem}")


def check_rope(where: str, rope: Any) -> None:
    """Raises ValueError unless `rope` is None, or a kind of RoPE with the same frequencies for
    texts of all lengths.
    """
    if rope is None:
        return
    check_verbs(where, rope, "a kind of RoPE", ("frequencies",), "kvjax.models.rope.Default()")
    if getattr(rope, "by_length", False):
        raise ValueError(
            f"{where} turns all keys by the same frequencies, and those of {type(rope).__name__} depend on the final "
            "length of a row; use None"
        )


def parts_of(config: Any) -> Iterator[Any]:
    """`config` and, if it is a dataclass, the parts of its fields."""
    yield config
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        for part in dataclasses.fields(config):
            yield from parts_of(getattr(config, part.name))


def check_alive(where: str, cache: Any) -> None:
    """Raises ValueError for a cache whose arrays were donated to an earlier call."""
    for leaf in jax.tree.leaves(cache):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
            raise ValueError(
                f"{where} got a cache whose arrays are gone: they were donated to an earlier call, which returned a "
                "new cache; use the cache that it returned, or copy it before: jax.tree.map(jnp.copy, cache)"
            )


def check_flags(verb: str, **flags: Any) -> None:
    """Raises ValueError unless all are true or false: text such as "no" would count as true.

    >>> check_flags("attention", flush="no")
    Traceback (most recent call last):
        ...
    ValueError: attention(flush=...) must be True or False, got 'no'
    """
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            raise ValueError(
                f"{verb}({name}=...) must be True or False, got {short_repr(value)}"
            )


def check_one_of(who: str, among: Iterable[Any], why: str = "", **given: Any) -> None:
    """Raises ValueError unless each of the `given` arguments of `who` is one of the values
    `among`; it ends in `why`.

    >>> check_one_of("kvjax.Fier", ("max", "mean"), page_reduce="min")
    Traceback (most recent call last):
        ...
    ValueError: kvjax.Fier(page_reduce='min') must be one of max, mean
    """
    known = tuple(among)
    for name, value in given.items():
        if not isinstance(value, str | int) or value not in known:
            raise ValueError(
                f"{who}({name}={short_repr(value)}) must be one of {', '.join(map(str, known))}{why}"
            )


def check_divides(part: Any, what: str, whole: int, **sizes: int) -> None:
    """Raises ValueError unless each of the `sizes` of a part divides `whole`, which `what`
    names.

    >>> import kvjax
    >>> check_divides(kvjax.Fier(group=48), "the chunk of ", 256, group=48)
    Traceback (most recent call last):
        ...
    ValueError: Fier(group=48) does not divide the chunk of 256; use a divisor of 256
    """
    for name, size in sizes.items():
        if whole % size:
            where = f"{type(part).__name__}({name}={size})"
            raise ValueError(f"{where} does not divide {what}{whole}; use a divisor of {whole}")


def is_traced(value: Any) -> bool:
    """True for a traced array, and for a list that `jit` was given: its numbers are traced."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value))


def check_array(what: str, value: Any, kind: str, example: str) -> None:
    """Raises ValueError for a value that jnp.asarray does not take, such as text or None, or
    whose integers are beyond 32 bits, which it would cut off.

    The message says that `what` must be `kind`, such as `example`.

    >>> check_array("rollback(lengths=...)", "ab", "integers", "[3, 5]")
    Traceback (most recent call last):
        ...
    ValueError: rollback(lengths=...) must be integers, such as [3, 5], got 'ab'
    """
    if is_traced(value):
        return
    try:
        found = np.asarray(value)
    except (TypeError, ValueError):  # rows of different lengths
        found = np.asarray(None)
    if found.dtype.kind not in "biuf":
        raise ValueError(f"{what} must be {kind}, such as {example}, got {short_repr(value)}")
    if found.dtype.kind in "iu" and (wild := found[(found > MOST) | (found < -MOST)]).size:
        raise ValueError(f"{what} must be {kind} of 32 bits, such as {example}, got {wild[0]}")


def check_dims(
    layout: str, spec: Any = None, cure: str = "", /, **arrays: Any
) -> dict[str, int]:
    """Binds each dimension letter (`kvjax.spec`) of arrays of floats, and returns the sizes.

    All arguments of a call are bound at once, so that an error can say which two disagree,
    rather than where the first broadcast failed. Raises ValueError where they do, with `cure`
    at the end, and for what is no array of real floats of at least 16 bits.

    `layout` names each argument and its letters; `spec`, that of a cache, binds letters in
    advance.

    >>> check_dims("q BTND, k BTKD", q=np.zeros((2, 1, 4, 16)), k=np.zeros((2, 1, 2, 16)))
    {'B': 2, 'T': 1, 'N': 4, 'D': 16, 'K': 2}
    >>> check_dims("q BTND, k BTKD", q=np.zeros((2, 1, 4, 16)), k=np.zeros((3, 1, 2, 16)))
    Traceback (most recent call last):
        ...
    ValueError: k has B=3 but q has B=2; q[2, 1, 4, 16], k[3, 1, 2, 16]
    """
    for name, array in arrays.items():
        if not has_dtype(array, np.generic):
            raise ValueError(
                f"{name} must be an array of floats, got {short_repr(array)}; convert it with jnp.asarray"
            )
        if not has_dtype(array, jnp.floating) or array.dtype.itemsize < 2:
            raise ValueError(
                f"{name} must be an array of floats, got {array.dtype}{list(array.shape)}; "
                f"convert it with {name}.astype(jnp.bfloat16) or another float dtype of 16 bits or more"
            )
    sizes: dict[str, int] = {}
    if spec is not None:
        sizes = {"B": spec.batch, "N": spec.q_heads, "K": spec.kv_heads, "D": spec.head_dim}
        sizes["E"] = spec.value_dim or spec.head_dim
    owner = dict.fromkeys(sizes, "the cache")

    def fail(problem: str) -> ValueError:
        all_shapes = ", ".join(f"{name}{list(a.shape)}" for name, a in arrays.items())
        return ValueError(f"{problem}; {all_shapes}{cure}")

    for part in layout.split(","):
        name, letters = part.split()
        if name not in arrays:
            continue
        shape = arrays[name].shape
        if len(shape) != len(letters):
            add = (
                "; x[None] adds the row, x[:, None] a step's token"
                if len(shape) == 3 and letters[:2] == "BT"
                else ""
            )
            raise fail(
                f"{name} must have the {len(letters)} dimensions [{', '.join(letters)}]{add}"
            )
        for letter, size in zip(letters, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                wrong = f"{name} has {letter}={size} but {owner[letter]} has {letter}={sizes[letter]}"
                swapped = owner[letter] == "the cache" and sizes[letter] in shape[1:-1]
                hint = (
                    f"; the axes of {name} must be [{', '.join(letters)}]: use jnp.swapaxes"
                    if swapped
                    else ""
                )
                if letter == "K" and size == sizes.get("N"):
                    hint = f"; give {name} as it is projected, not repeated for the query heads"
                raise fail(wrong + hint)
            owner.setdefault(letter, name)
    return sizes


def finite_number(what: str, value: Any) -> float:
    """`value` as a float, or an error that says what it must be."""
    if isinstance(value, Tracer):
        raise ValueError(
            f"{what} must be a Python number, got a traced array; pass it as a static value, as it is part of the "
            "compiled program"
        )
    try:
        number = math.nan if isinstance(value, str | bytes | bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{what} must be a finite number, got {short_repr(value)}")
    return number


def check_utf8(what: str, text: str | None, cure: str = "") -> None:
    """Raises ValueError for text of the command line that is not UTF-8; None passes."""
    # Python gives bytes of the command line that are not UTF-8 as lone surrogates.
    if any("\ud800" <= character < "\ue000" for character in text or ""):
        raise ValueError(f"{what} is not UTF-8; set a UTF-8 locale{cure}")


MOST_SHOWN = 200  # characters of a wrong value in an error message
MOST_OF_MESSAGE = 2000  # characters of an error on the command line


def check_share(what: str, value: Any, whole: str) -> None:
    """Raises ValueError unless `value` is a share of the `whole`."""
    if not 0 < finite_number(what, value) <= 1:
        raise ValueError(
            f"{what} must be a share of {whole}, above 0 and at most 1; got {value}"
        )


def short_repr(value: Any) -> str:
    """A value in a few words, for an error message.

    >>> short_repr(2.5), short_repr(10**5000), short_repr([1]), short_repr("(" * 10000)[-30:]
    ('2.5', 'an integer of 5001 digits', 'a list', "((((((('... (10000 characters)")
    """
    if value is None:
        return "None"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**60:
        return f"an integer of {int(math.log10(abs(value))) + 1} digits"
    if isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, str):
        return (
            repr(value)
            if len(value) <= MOST_SHOWN
            else f"{value[:MOST_SHOWN]!r}... ({len(value)} characters)"
        )
    name = type(value).__name__
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"an array {described(value)}"
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"


def described(value: Any) -> str:
    """An array by dtype and shape, anything else by what it is."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        try:
            name = np.dtype(value.dtype).name
        except TypeError:  # of another library, or of keys of jax.random
            name = str(value.dtype)
        return f"{name}{list(value.shape)}"
    return short_repr(value)


def has_dtype(value: Any, kind: Any) -> bool:
    """True for an array of NumPy or JAX whose dtype is of a `kind`, such as `jnp.floating`.

    >>> has_dtype(np.ones(2), jnp.floating), has_dtype([1.0], jnp.floating)
    (True, False)
    """
    try:
        return bool(jnp.issubdtype(value.dtype, kind))
    except (AttributeError, TypeError):  # an array of another library has other dtypes
        return False


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    line = next(iter(str(error).splitlines()), "").strip()
    return line or "no message"


def raised(what: str, error: Exception) -> ValueError:
    """An error that says what of a user's own code raised `error`; raise it from that.

    >>> raised("mine", TypeError("no"))
    ValueError("mine raised TypeError: no; its traceback is that of this error's cause")
    """
    return ValueError(
        f"{what} raised {type(error).__name__}: {first_line(error)}; its traceback is that of this error's cause"
    )


def cut(message: str) -> str:
    """A message without the ends of long words and quotations, for errors that repeat what a
    user wrote.
    """
    message = re.sub(rf"(\S{{{MOST_SHOWN}}})\S{{20,}}", r"\1...", message)
    message = re.sub(rf"('[^']{{{MOST_SHOWN}}})[^']{{20,}}'", r"\1...'", message)
    if len(message) > MOST_OF_MESSAGE:
        half = MOST_OF_MESSAGE // 2
        message = f"{message[:half]} ... {message[-half:]}"
    return message


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name that `name` most likely stands for, in any case of letters; None if none is
    near.

    >>> nearest("FIER", ["fier", "quest"]), nearest("qest", ["fier", "quest"]), nearest("lru", ["fier", "quest"])
    ('fier', 'quest', None)
    """
    lower = {known.lower().replace("-", "_"): known for known in names}
    found = difflib.get_close_matches(
        name.lower().replace("-", "_"), lower, n=1, cutoff=LEAST_LIKENESS
    )
    return lower[found[0]] if found else None
