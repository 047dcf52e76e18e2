"""What is kept and what is shared, without arrays: bounds one below, at and one above."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kvjax.serve import beginnings
from kvjax.serve.beginnings import (
    KeptRow,
    KeptRows,
    PrefixTree,
    SharedPrefixes,
    same_tokens,
)
from kvjax.serve.slots import SharedStart

SINK = 2
LOCAL = 5
CHUNK = 8
ROOM = 24  # tokens of a prefix


def policy(*, sink=SINK, local=LOCAL, room=ROOM):
    """What `SharedPrefixes` asks of a layer's policy."""
    demote = SimpleNamespace(leave=CHUNK, staying=lambda local: range(local))
    return SimpleNamespace(
        sink=sink, local=local, demote=demote, store=SimpleNamespace(tokens=room)
    )


def shared(*policies, count=2, sharers=None, slots=4):
    layers = [SimpleNamespace(policy=one) for one in policies or (policy(),)]
    cache = SimpleNamespace(layers=layers, spec=SimpleNamespace(batch=slots))
    return SharedPrefixes.of(cache, count, sharers)


def prompt(tokens, first=1):
    return np.arange(first, first + tokens, dtype=np.int32)


# ------------------------------------------------------------------ stored once


def test_a_prefix_holds_whole_chunks_between_the_sink_and_what_stays():
    one = shared()
    for tokens in range(60):
        chunks = max(tokens - SINK - LOCAL, 0) // CHUNK
        assert one.held(tokens) == min(chunks * CHUNK, ROOM)


def test_a_prefix_holds_what_every_layer_can():
    for other in (policy(sink=9), policy(local=12), policy(room=16)):
        both = shared(policy(), other)
        for tokens in range(60):
            assert both.held(tokens) == min(shared().held(tokens), shared(other).held(tokens))


def test_a_request_fits_beside_its_prefix_up_to_the_last_token():
    one = shared()
    for tokens in (0, 14, 15, 16, 40):
        room = 50 - tokens + one.held(tokens)  # new tokens beside the prompt in a slot of 50
        one.check_room(tokens, room, 50)
        with pytest.raises(ValueError, match="need 51 tokens beside the longest prefix"):
            one.check_room(tokens, room + 1, 50)


def test_a_prompt_with_several_answers_is_stored_as_a_whole():
    one = shared()
    assert one.find(prompt(40), 1, [], 50) == SharedStart()
    assert one.find(prompt(40), 2, [], 50) == SharedStart(0, 40, store=True)
    least = SINK + LOCAL + CHUNK
    assert one.find(prompt(least - 1), 2, [], 50) == SharedStart()
    assert one.find(prompt(least), 2, [], 50) == SharedStart(0, least, store=True)


def test_prompts_that_begin_alike_share_as_far_as_that():
    one = shared()
    other = np.concatenate([prompt(20), prompt(20, first=500)])
    assert one.find(prompt(40), 1, [other, prompt(9)], 50) == SharedStart(0, 20, store=True)


def test_a_prompt_too_long_alone_is_stored_or_waits():
    """Of 40 tokens a prefix holds 24, so a slot needs room for 16."""
    one = shared(count=1)
    assert one.find(prompt(40), 1, [], 40) == SharedStart()
    assert one.find(prompt(40), 1, [], 39) == SharedStart(0, 40, store=True)
    one.use(SharedStart(0, 40, store=True), slot=0, prompt=prompt(40, first=500))
    assert one.find(prompt(40), 1, [], 40) == SharedStart()
    assert one.find(prompt(40), 1, [], 39) is None
    one.leave(0)
    assert one.find(prompt(40), 1, [], 39) == SharedStart(0, 40, store=True)


@pytest.mark.parametrize("sharers", [1, 2, 3])
def test_a_prefix_has_as_many_rows_as_sharers(sharers):
    one = shared(count=1, sharers=sharers)
    start = SharedStart(0, 40)
    assert not one.takes(start, prompt(40)), "nothing is stored there"
    for slot in range(sharers):
        one.use(start, slot, prompt(40))
        assert one.takes(start, prompt(40)) == (slot + 1 < sharers)
        found = one.find(prompt(45), 1, [], 100)
        assert found == (SharedStart(0, 40) if slot + 1 < sharers else SharedStart())
    assert not one.takes(start, prompt(40))
    assert one.takes(SharedStart(), prompt(40))
    assert one.in_use == 1
    one.leave(0)
    assert one.takes(start, prompt(40))


def test_a_prefix_that_another_prompt_has_taken_is_looked_for_anew():
    one = shared(count=1)
    start = SharedStart(0, 40)
    one.use(start, 0, prompt(40))
    one.leave(0)
    assert one.takes(start, prompt(45)), "nobody has taken it"
    one.use(one.find(prompt(50, first=500), 2, [], 100), 0, prompt(50, first=500))
    one.leave(0)
    assert not one.takes(start, prompt(45))


def test_a_stored_prefix_serves_only_prompts_that_have_all_of_it():
    one = shared()
    one.store(SharedStart(1, 20), prompt(40))
    assert one.find(prompt(41), 1, [], 100) == SharedStart(1, 20)
    assert one.find(prompt(20), 1, [], 100) == SharedStart(1, 20)
    assert one.find(prompt(19), 1, [], 100) == SharedStart()
    assert one.find(prompt(41, first=2), 1, [], 100) == SharedStart()


def test_a_prompt_fits_beside_a_prefix_that_is_stored():
    """Of 40 tokens it holds 24, and a slot has room for the other 16, or for one less."""
    one = shared(count=1)
    one.store(SharedStart(0, 40), prompt(40))
    assert one.find(prompt(40), 1, [], 16) == SharedStart(0, 40)
    assert one.find(prompt(40), 1, [], 15) is None


def test_a_prefix_that_holds_nothing_is_not_used():
    one = shared()
    least = SINK + LOCAL + CHUNK
    for tokens, wanted in ((least - 1, SharedStart()), (least, SharedStart(0, least))):
        one.store(SharedStart(0, tokens), prompt(tokens))
        assert one.find(prompt(40), 1, [], 100) == wanted


def test_the_prefix_that_was_not_used_for_longest_is_stored_over():
    one = shared(count=3, slots=4)
    for slot, number in enumerate((2, 0, 1)):
        one.use(SharedStart(number, 40, store=True), slot, prompt(40, first=100 * slot))
    one.leave(1)
    one.leave(2)
    assert one.find(prompt(40, first=900), 2, [], 100) == SharedStart(0, 40, store=True)
    one.leave(0)
    assert one.find(prompt(40, first=900), 2, [], 100) == SharedStart(2, 40, store=True)


def test_a_place_that_holds_no_prefix_is_taken_before_one_that_does():
    one = shared(count=3)
    for number in range(3):
        start = SharedStart(number, 40, store=True)
        assert one.find(prompt(40, first=100 * number), 2, [], 100) == start
        one.use(start, 0, prompt(40, first=100 * number))
        one.leave(0)


def test_a_slot_uses_one_prefix_at_a_time():
    one = shared()
    one.use(SharedStart(0, 40), 3, prompt(40))
    one.use(SharedStart(1, 40), 3, prompt(40))
    assert one.users == [set(), {3}]
    one.use(SharedStart(), 3, prompt(40))
    assert one.in_use == 0


# ------------------------------------------------------------------ kept after requests


class Oracle:
    """Rows in two lists, each from the one that was not used for longest."""

    def __init__(self, limit, host_limit):
        self.limit, self.host_limit = limit, host_limit
        self.device, self.host = [], []  # (name, size)

    def add(self, name, size):
        if size > self.limit:
            return
        while sum(one[1] for one in self.device) + size > self.limit:
            oldest = self.device.pop(0)
            if oldest[1] <= self.host_limit:
                while sum(one[1] for one in self.host) + oldest[1] > self.host_limit:
                    self.host.pop(0)
                self.host.append(oldest)
        self.device.append((name, size))


@pytest.mark.parametrize("near", [-1, 0, 1])
@pytest.mark.parametrize("sizes", [(10,), (10, 20), (5, 10, 40)])
def test_bytes_are_bound_on_the_device_and_in_the_host(monkeypatch, sizes, near):
    """The rows that stay are those of plain lists."""
    monkeypatch.setattr(beginnings, "in_host", lambda tree: (tree, "home"))
    for seed, (limit, host_limit) in enumerate(
        [(10, 0), (20, 10), (40, 40), (30, 100), (80, 20)]
    ):
        rng = np.random.default_rng(seed)
        kept = KeptRows(limit + near, max(host_limit + near, 0), cuts=False)
        oracle = Oracle(limit + near, max(host_limit + near, 0))
        rows = {}
        for name in range(30):
            size = int(rng.choice(sizes))
            row = kept.hold(lambda name=name: name, size)
            oracle.add(name, size)
            if row is not None:
                rows[name] = row
                kept.settle(row, np.array([name + 1]))
            on_device = {one[0] for one in oracle.device}
            in_host = {one[0] for one in oracle.host}
            assert {n for n, r in rows.items() if not r.dropped and not r.in_host} == on_device
            assert {n for n, r in rows.items() if not r.dropped and r.in_host} == in_host
            assert kept.nbytes == sum(one[1] for one in oracle.device) <= kept.limit
            assert kept.host_nbytes == sum(one[1] for one in oracle.host) <= kept.host_limit
            assert kept.count == len(on_device) + len(in_host)
            for n in rows:
                assert kept.find(np.array([n + 1, 99]))[1] == (n in on_device | in_host)


def test_a_row_that_was_used_outlives_one_that_came_later(monkeypatch):
    monkeypatch.setattr(beginnings, "in_host", lambda tree: (tree, None))
    kept = KeptRows(20, 0, cuts=True)
    first, second = (kept.add("row", 10, np.array([n, n])) for n in (1, 2))
    kept.use(first)
    third = kept.add("row", 10, np.array([3, 3]))
    assert [row.dropped for row in (first, second, third)] == [False, True, False]


def test_a_prompt_that_repeats_a_kept_row_keeps_it_in_use():
    """A row of the same tokens, or of fewer, does not stay beside the one that has them all."""
    kept = KeptRows(30, 0, cuts=True)
    long, other = (kept.add("row", 10, np.array(tokens)) for tokens in ([1, 2, 3], [7]))
    kept.add("row", 10, np.array([1, 2]))
    assert kept.count == 2
    kept.add("row", 10, np.array([8]))
    kept.add("row", 10, np.array([9]))
    assert other.dropped
    assert not long.dropped


def test_rows_dropped_before_their_tokens_are_known_are_not_found():
    kept = KeptRows(20, 0, cuts=True)
    row = kept.hold(lambda: "row", 10)
    kept.drop(row)
    kept.settle(row, np.array([1, 2]))
    assert kept.find(np.array([1, 2, 3])) == (None, 0)
    assert (kept.count, kept.nbytes, list(kept.copies())) == (0, 0, [])


def test_copies_stay_as_they_are_when_their_rows_are_dropped():
    kept = KeptRows(20, 0, cuts=True)
    first, second = (kept.add(name, 10, np.array([n])) for n, name in ((1, "a"), (2, "b")))
    copies = kept.copies()
    one = next(copies)
    kept.drop(first)
    kept.drop(second)
    assert one.cache == "a"
    assert first.cache is None
    assert list(copies) == []


def test_a_tree_has_no_nodes_that_no_row_needs():
    tree = PrefixTree()
    rows = [KeptRow(np.array(tokens), None, 0) for tokens in ([1, 2], [1, 2, 3, 4], [1, 2, 5])]
    for row in rows:
        tree.add(row)
    tree.remove(rows[0])
    tree.remove(rows[2])
    (only,) = tree._root.children.values()
    assert only.label.tolist() == [1, 2, 3, 4]
    assert not only.children


def test_tokens_are_the_same_up_to_the_first_that_differs():
    for a, b, same in (
        ([], [], 0),
        ([1], [], 0),
        ([1, 2], [1, 2], 2),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 4], [1, 2, 3], 2),
        ([5, 2], [1, 2], 0),
    ):
        assert same_tokens(np.array(a, int), np.array(b, int)) == same
        assert same_tokens(np.array(b, int), np.array(a, int)) == same
