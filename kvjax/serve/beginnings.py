"""Beginnings that prompts have in common: stored once beside the slots, and kept after requests.

`SharedPrefixes` says which rows of a batch begin with which stored prefix; rows that run at the
same time then hold it once (`kvjax.serve.prefixes`).

`KeptRows` keeps rows after their requests have ended, so that a prompt that begins like one of
them reads only the rest. A `PrefixTree` finds the longest common beginning. A kept row is
copied on use. The one that was not used for longest goes first: to host memory if there is room
for it, otherwise it is dropped.

**What tokens equal.** A request that begins from a kept row gets the tokens that it gets when
the same turns are read and decoded on one cache. For a cache that keeps tokens as they are
(`full`) these are the tokens of the request alone but for rounding. A method that selects
(`fier`, `quest`, `pariskv`) keeps the keys and values that an answer's tokens had when they were
drawn, and those of prompts are exact. A cache of codes (`kivi`, `logquant`, `turboquant`) reads
what is new while it attends to the codes of what it has, as in any turn after the first.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from kvjax.cache.cache import Cache
from kvjax.memory import nbytes
from kvjax.serve.slots import SharedStart, in_host


def same_tokens(a: np.ndarray, b: np.ndarray) -> int:
    """How many first tokens of two prompts are the same."""
    most = min(len(a), len(b))
    return int(np.argmin(np.append(a[:most] == b[:most], False)))


# ------------------------------------------------------------------ stored once, for rows that run


@dataclass
class SharedPrefixes:
    """Prefixes that are stored beside the slots, each used by rows in slots."""

    policies: Sequence[Any]  # of the cache with prefixes, by layer
    prompts: list[np.ndarray]  # by prefix, the tokens that it holds; empty if none
    sharers: int  # most slots of a prefix
    users: list[set[int]] = field(default_factory=list)  # by prefix, slots
    used: list[int] = field(default_factory=list)  # by prefix, when it was last used
    clock: int = 0

    @classmethod
    def of(cls, cache: Cache, count: int, sharers: int | None) -> SharedPrefixes:
        return cls(
            policies=[layer.policy for layer in cache.layers],
            prompts=[np.zeros(0, np.int32)] * count,
            sharers=sharers or cache.spec.batch,
            users=[set[int]() for _ in range(count)],
            used=[0] * count,
        )

    @property
    def in_use(self) -> int:
        return sum(map(bool, self.users))

    def takes(self, start: SharedStart, prompt: np.ndarray) -> bool:
        """True if one more row of a prompt can begin where `find` said earlier.

        Between two answers to a prompt its prefix may have had no row, and may have been given
        to another prompt.
        """
        if start.prefix < 0:
            return True
        held = self.prompts[start.prefix]
        its_own = not start.store and np.array_equal(held, prompt[: start.tokens])
        return its_own and len(self.users[start.prefix]) < self.sharers

    def held(self, tokens: int) -> int:
        """How many of the first `tokens` tokens of a prompt a prefix holds, in the layer where
        that is least.
        """
        least = tokens
        for policy in self.policies:
            chunk = policy.demote.leave
            stay = len(policy.demote.staying(policy.local))
            whole = max(tokens - policy.sink - stay, 0) // chunk * chunk
            least = min(least, whole, policy.store.tokens)
        return least

    def check_room(self, prompt: int, new: int, capacity: int) -> None:
        """Raises ValueError for a request that does not fit in a slot beside the prefix that it
        would have.
        """
        if (own := prompt + new - self.held(prompt)) > capacity:
            raise ValueError(
                f"{prompt} prompt + {new} new tokens need {own} tokens beside the longest prefix, and a slot has "
                f"{capacity}; make the engine with larger capacity or prefix_tokens"
            )

    def find(
        self, prompt: np.ndarray, answers: int, others: Iterable[np.ndarray], room: int
    ) -> SharedStart | None:
        """Where rows for a prompt begin; None if they must wait for a prefix to be free,
        because `room` tokens are too few alone.

        A prompt with several `answers` is shared as a whole, and one that begins like some of
        the `others` as far as that. A prefix whose last row has gone stays, for prompts to
        come, until its place is needed.
        """
        want = len(prompt)
        if answers == 1:
            want = max((same_tokens(prompt, other) for other in others), default=0)
        best = self._longest_stored(prompt)
        fits = len(prompt) - self.held(best.tokens) <= room
        if not fits:
            want = len(prompt)
        free = [number for number, users in enumerate(self.users) if not users]
        if self.held(want) > self.held(best.tokens) and free:
            return SharedStart(min(free, key=self.used.__getitem__), want, store=True)
        return best if fits else None

    def _longest_stored(self, prompt: np.ndarray) -> SharedStart:
        best = SharedStart()
        for number, known in enumerate(self.prompts):
            longer = len(known) > best.tokens and self.held(len(known)) > 0
            free = len(self.users[number]) < self.sharers
            if longer and free and same_tokens(prompt, known) == len(known):
                best = SharedStart(number, len(known))
        return best

    def use(self, start: SharedStart, slot: int, prompt: np.ndarray) -> None:
        """Notes that the row in `slot` begins at `start`."""
        self.leave(slot)
        if start.prefix >= 0:
            self.clock += 1
            self.prompts[start.prefix] = prompt[: start.tokens]
            self.used[start.prefix] = self.clock
            self.users[start.prefix].add(slot)

    def store(self, start: SharedStart, prompt: np.ndarray) -> None:
        """Notes that a prefix holds the first tokens of a prompt, also if no row begins there."""
        self.prompts[start.prefix] = prompt[: start.tokens]

    def leave(self, slot: int) -> None:
        for users in self.users:
            users.discard(slot)


# ------------------------------------------------------------------ kept after requests


@dataclass(eq=False)
class KeptRow:
    """A row of a request that has ended, or of a prompt as it was read."""

    tokens: np.ndarray  # i32[n] that it holds; known once its request has ended
    cache: Any  # of one row, of a capacity with room for these tokens
    nbytes: int
    used: int = 0  # when it was last used
    device_shardings: Any = None  # that the row had, while it is in host memory
    dropped: bool = False

    @property
    def in_host(self) -> bool:
        return self.device_shardings is not None


@dataclass(eq=False)
class _Node:
    """A sequence of tokens after those of its parent."""

    label: np.ndarray  # i32[n], of the edge from the parent
    children: dict[int, _Node] = field(default_factory=dict)  # by their first token
    row: KeptRow | None = None  # whose tokens end here


class PrefixTree:
    """Kept rows by their tokens: a radix tree, in which rows that begin alike share nodes.

    >>> tree = PrefixTree()
    >>> one, two = (KeptRow(np.array(tokens), None, 0) for tokens in ([1, 2, 3], [1, 2, 4, 5]))
    >>> tree.add(one), tree.add(two)
    (None, None)
    >>> row, tokens = tree.longest(np.array([1, 2, 4, 9]), whole=False)
    >>> row is two, tokens
    (True, 3)
    """

    def __init__(self) -> None:
        self._root = _Node(np.zeros(0, np.int32))

    def add(self, row: KeptRow) -> KeptRow | None:
        """Adds a row, and returns the one of the same tokens that it replaces."""
        node = self._root
        rest = row.tokens
        while len(rest):
            child = node.children.get(int(rest[0]))
            if child is None:
                child = node.children[int(rest[0])] = _Node(rest)
            same = same_tokens(child.label, rest)
            if same < len(child.label):
                child = self._split(node, child, same)
            node = child
            rest = rest[same:]
        old = node.row
        node.row = row
        return old

    def remove(self, row: KeptRow) -> None:
        """Takes out a row, and the nodes that only it needed."""
        path = [self._root]
        rest = row.tokens
        while len(rest):
            child = path[-1].children[int(rest[0])]
            rest = rest[len(child.label) :]
            path.append(child)
        path[-1].row = None
        for parent, node in zip(path[-2::-1], path[:0:-1], strict=True):
            if node.row is not None or len(node.children) > 1:
                return
            (only,) = node.children.values() or (None,)
            if only is None:
                del parent.children[int(node.label[0])]
            else:  # one child: a longer edge to it
                only.label = np.concatenate([node.label, only.label])
                parent.children[int(only.label[0])] = only
                return

    def longest(self, prompt: np.ndarray, *, whole: bool) -> tuple[KeptRow | None, int]:
        """The row with which a prompt has most first tokens in common, and how many. With
        `whole` only rows of which the prompt continues all tokens count.
        """
        node = self._root
        matched = 0
        best: tuple[KeptRow | None, int] = (None, 0)
        while matched < len(prompt):
            child = node.children.get(int(prompt[matched]))
            if child is None:
                break
            same = same_tokens(child.label, prompt[matched:])
            matched += same
            if same < len(child.label):
                return best if whole else (self._any_below(child), matched)
            node = child
            if node.row is not None:
                best = node.row, matched
        if whole or matched == 0:
            return best
        return self._any_below(node), matched

    def beginnings(self, tokens: np.ndarray) -> list[KeptRow]:
        """The rows whose tokens are first tokens of these, without a row of all of them."""
        found = list[KeptRow]()
        node = self._root
        rest = tokens
        while len(rest):
            child = node.children.get(int(rest[0]))
            if child is None or same_tokens(child.label, rest) < len(child.label):
                break
            rest = rest[len(child.label) :]
            node = child
            if node.row is not None and len(rest):
                found.append(node.row)
        return found

    def __iter__(self) -> Iterator[KeptRow]:
        nodes = [self._root]
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            if node.row is not None:
                yield node.row

    def _split(self, parent: _Node, child: _Node, at: int) -> _Node:
        """A new node after the first `at` tokens of the edge to `child`."""
        middle = _Node(child.label[:at])
        child.label = child.label[at:]
        middle.children[int(child.label[0])] = child
        parent.children[int(middle.label[0])] = middle
        return middle

    def _any_below(self, node: _Node) -> KeptRow | None:
        """The row below a node that was used last."""
        rows = list[KeptRow]()
        nodes = [node]
        while nodes:
            one = nodes.pop()
            nodes += one.children.values()
            rows += [] if one.row is None else [one.row]
        return max(rows, key=_last_use, default=None)


class KeptRows:
    """Rows that are kept after their requests, at most `limit` bytes of them, and `host_limit`
    bytes more in host memory.

    Args:
      cuts: whether a row can be cut to its first tokens. If not, a row serves only prompts that
        continue all of its tokens.
    """

    def __init__(self, limit: int, host_limit: int, *, cuts: bool) -> None:
        self.limit = limit
        self.host_limit = host_limit
        self.cuts = cuts
        self._tree = PrefixTree()
        self._rows = set[KeptRow]()  # those whose tokens are not known yet, too
        self._clock = 0
        self._lock = threading.Lock()  # other threads find rows, and save them

    def find(self, prompt: np.ndarray) -> tuple[KeptRow | None, int]:
        """The row from which a prompt can begin, and how many of its tokens. At least one token
        of the prompt is left to read.
        """
        with self._lock:
            row, tokens = self._tree.longest(prompt[:-1], whole=not self.cuts)
        return (row, tokens) if tokens else (None, 0)

    def use(self, row: KeptRow) -> None:
        self._clock += 1
        row.used = self._clock

    def hold(self, make: Callable[[], Cache], size: int) -> KeptRow | None:
        """Keeps the row of `size` bytes that `make` copies, whose tokens `settle` tells; None if
        there is no room for it.
        """
        if size > self.limit:
            return None
        self._make_room(size)
        row = KeptRow(np.zeros(0, np.int32), make(), size)
        self.use(row)
        self._rows.add(row)
        return row

    def add(self, cache: Cache, size: int, tokens: np.ndarray) -> KeptRow:
        """Keeps a row of `size` bytes, at most `limit`, whose tokens are known."""
        row = self.hold(lambda: cache, size)
        assert row is not None
        self.settle(row, tokens)
        return row

    def settle(self, row: KeptRow, tokens: np.ndarray) -> None:
        """Tells what tokens a row holds, so that prompts find it. Rows that can be cut replace
        those of which they have all tokens.
        """
        if row.dropped:
            return
        row.tokens = np.asarray(tokens, np.int32)
        longer = self._longer(row.tokens) if self.cuts else None
        if longer is not None:
            self.use(longer)
            self._drop(row, in_tree=False)
            return
        with self._lock:
            same = self._tree.add(row)
            shorter = self._tree.beginnings(row.tokens) if self.cuts else []
        if same is not None:
            self._drop(same, in_tree=False)
        for one in shorter:
            self._drop(one, in_tree=True)

    def _longer(self, tokens: np.ndarray) -> KeptRow | None:
        """A row that has all of these tokens and more."""
        with self._lock:
            row, same = self._tree.longest(tokens, whole=False)
        has_all = row is not None and same == len(tokens) < len(row.tokens)
        return row if has_all else None

    def drop(self, row: KeptRow) -> None:
        """Forgets a row, which holds what no other may begin with."""
        if not row.dropped:
            self._drop(row, in_tree=self._is_found(row))

    @property
    def count(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that are not in host memory."""
        return sum(row.nbytes for row in list(self._rows) if not row.in_host)

    @property
    def host_nbytes(self) -> int:
        return sum(row.nbytes for row in list(self._rows) if row.in_host)

    def rows(self) -> list[KeptRow]:
        """The rows whose tokens are known, from the one that was not used for longest."""
        with self._lock:
            return sorted(self._tree, key=_last_use)

    def copies(self) -> Iterator[KeptRow]:
        """Yields `rows` one by one, without those that are dropped before their turn comes. Any
        thread may call it: what it yields stays as it is when the row is moved or dropped.
        """
        for row in self.rows():
            with self._lock:
                copy = dataclasses.replace(row)
            if not copy.dropped:
                yield copy

    def _make_room(self, size: int) -> None:
        """Moves rows out until `size` bytes more may be kept."""
        while self.nbytes + size > self.limit:
            self.move_out_oldest()

    def move_out_oldest(self) -> bool:
        """Moves the row that was not used for longest to host memory, or drops it; false if no
        row is on the device.
        """
        on_device = [row for row in self._rows if not row.in_host]
        oldest = min(on_device, key=_last_use, default=None)
        if oldest is not None and not self._move_to_host(oldest):
            self.drop(oldest)
        return oldest is not None

    def _move_to_host(self, row: KeptRow) -> bool:
        """Moves a row to host memory, from where the oldest ones go for it; false if it is too
        large.
        """
        if row.nbytes > self.host_limit:
            return False
        while self.host_nbytes + row.nbytes > self.host_limit:
            self.drop(min((one for one in self._rows if one.in_host), key=_last_use))
        hosted, device_shardings = in_host(row.cache)
        with self._lock:
            row.cache = hosted
            row.device_shardings = device_shardings
        return row.in_host

    def _is_found(self, row: KeptRow) -> bool:
        """True if prompts find this row."""
        with self._lock:
            found = self._tree.longest(row.tokens, whole=True)
        return found[0] is row

    def _drop(self, row: KeptRow, *, in_tree: bool) -> None:
        with self._lock:
            if in_tree:
                self._tree.remove(row)
            row.dropped = True
            row.cache = None
        self._rows.discard(row)


def _last_use(row: KeptRow) -> int:
    return row.used


def bytes_of(row: Any) -> int:
    """Bytes of a row's arrays, or of their shapes, in whatever memory."""
    return nbytes(row).total


def capacities_of(most: int) -> list[int]:
    """The few capacities of kept rows, so that few programs cut them: powers of two up to
    `most`.

    >>> capacities_of(400)
    [64, 128, 256, 400]
    """
    sizes = [64 << i for i in range(32) if 64 << i < most]
    return [*sizes, most]


def on_device(row: KeptRow) -> Cache:
    """The cache of a row, on the device; a copy if the row is in host memory."""
    return jax.device_put(row.cache, row.device_shardings) if row.in_host else row.cache
