"""Options that take names: an unknown one ends the program in one sentence, with those that
there are.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable

from kvjax.presets.registry import read
from kvjax.validation import nearest


def names_of(
    known: Iterable[str], what: str = "method", *, apart: str = ","
) -> Callable[[str], list[str]]:
    """A type of an option for argparse: names of `known`, separated by `apart`. A name may have a
    variant behind "|".
    """
    known = list(known)

    def read_names(text: str) -> list[str]:
        for name in text.split(apart):
            if name.partition("|")[0] not in known:
                raise argparse.ArgumentTypeError(unknown(name, what, known))
        return text.split(apart)

    return read_names


def unknown(name: str, what: str, known: Collection[str]) -> str:
    near = nearest(name, known)
    hint = f"did you mean {near!r}? There" if near else "there"
    return f"no {what} {name!r}; {hint} are {', '.join(known)}"


def cache(text: str) -> str:
    """A type of an option for argparse: a preset or method of one's own, with settings, as
    `kvjax.presets.parse` takes it.
    """
    try:
        read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def caches(
    *beside: str, marks: Collection[str] = (), apart: str = " "
) -> Callable[[str], list[str]]:
    """The same for several, separated by `apart`. Names of `beside` are taken, too, and a name
    may begin with one of `marks`.
    """

    def read_caches(text: str) -> list[str]:
        found = [name for name in text.split(apart) if name]
        for name in found:
            mark = next((mark for mark in marks if name.startswith(mark)), "")
            if name not in beside:
                cache(name.removeprefix(mark))
        return found

    return read_caches
