"""Rows that are kept after their requests: a prompt that begins like one reads only the rest."""

from __future__ import annotations

import dataclasses
import errno
import json
import threading
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.cache.saving import DamagedSaveError, digest_json
from kvjax.generation import prefilling, staging
from kvjax.generation.sampling import sampling
from kvjax.models import Decoder
from kvjax.serve import keeping, kept_files, reading, slots
from kvjax.serve.beginnings import KeptRow, KeptRows, PrefixTree, capacities_of
from tests.fuzz.requests import CONFIG, NAN, POLICIES, model_of
from tests.generation.test_generate import Tiny, compilations, words
from tests.generation.test_generate import new_cache as cache_of
from tests.serve.lacking import lack_memory

MANY = 10**9
CHUNK = 32
OBSERVING = ("streaming_llm", "h2o", "snapkv")
KEEPS = [name for name in POLICIES if name not in (*OBSERVING, "with drafts")]
CUTS = ("full", "fier", "share", "quest", "pariskv", "hosted", "windowed", "windowed fier")


@pytest.fixture(scope="module")
def model():
    """Of one layer: rows are kept in all layers alike. Those of tests/fuzz/requests.py have two."""
    return Tiny(nnx.Rngs(0), layers=1)


def new_cache(batch=1, capacity=128):
    return cache_of(batch, capacity, layers=1)


@cache
def finite_model(name):
    """The model of the fuzz without its token that makes a row not finite."""
    windows = (12, None) if name.startswith("windowed") else ()
    return Decoder(dataclasses.replace(CONFIG, windows=windows), rngs=nnx.Rngs(0))


def engine_of(name, slots=2, capacity=256, model=None, **settings):
    model = finite_model(name) if model is None else model
    empty = kvjax.init(
        kvjax.presets.parse(POLICIES[name]),
        model.spec(batch=slots, capacity=capacity),
        layers=CONFIG.layers,
    )
    settings = {"block": 5, "chunk": CHUNK, "prefix_bytes": MANY} | settings
    return kvjax.Engine(model, empty, **settings)


def say(engine, conversation, new, **settings):
    """A turn: its tokens join the conversation; returns them and how many tokens were read."""
    before = engine.stats().prompt_tokens
    (request,) = engine.submit(conversation, max_new_tokens=new, **settings)
    engine.run()
    assert request.error is None
    conversation += request.tokens
    return request.tokens, engine.stats().prompt_tokens - before


def one_cache(name, turns, new, capacity=256):
    """The answers to turns that are read and decoded on one cache, in an engine's chunks."""
    model = finite_model(name)
    cache = engine_of(
        name, capacity=capacity
    )._rows.make()  # `kvjax.init` may make Full of one row
    answers = []
    for turn in turns:
        start, sizes = 0, prefilling.cut(len(turn), (CHUNK,))
        if staging.needs_staging(cache) and len(sizes) > 1:
            cache = staging.staged(cache, capacity)
        for size in sizes:
            piece = np.zeros((1, size), np.int32)
            real = turn[start : start + size]
            piece[0, : len(real)] = real
            logits, cache = prefilling._read(
                model, cache, piece, np.array([len(real)], np.int32), first_chunk=False
            )
            start += len(real)
        cache = staging.settled(cache)
        run = kvjax.generation.Stream(model, cache, logits, new)
        list(run)
        answers.append(run.rows[0])
        cache = run.cache
    return answers


FIRST = ("kivi", "fier", "turboquant", "pariskv", "logquant")
TALKS = [(name, 0) for name in sorted(KEEPS, key=FIRST.count)[::-1]]
TALKS += [(name, seed) for seed in (1, 2) for name in FIRST]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("name", "seed"), TALKS)
def test_a_talk_gets_the_tokens_of_one_cache_and_reads_only_what_is_new(name, seed):
    """For every method that can, those of codes and of host memory among them. Talks of other
    seeds have turns of other lengths, and other requests come between them.
    """
    rng = np.random.default_rng([3, seed])
    lengths = rng.choice([1, 2, 9, 20, 31, 32, 33, 50], 5) if seed else (50, 9, 33, 1, 20)
    turns = [rng.integers(1, NAN, n).tolist() for n in lengths]
    engine, conversation, answers, read = engine_of(name), [], [], []
    for turn in turns:
        conversation += turn
        if seed:
            say(engine, rng.integers(1, NAN, int(rng.integers(1, 60))).tolist(), 3)
        answer, tokens = say(engine, conversation, 12)
        answers.append(answer)
        read.append(tokens)
    assert read == [len(turn) for turn in turns]
    assert answers == one_cache(name, turns, 12)


@pytest.mark.parametrize("name", OBSERVING)
def test_methods_whose_prompts_choose_what_to_keep_are_refused(name):
    with pytest.raises(ValueError, match=r"prefix_bytes keeps no rows here: the method keeps"):
        engine_of(name)


def test_rows_that_are_kept_are_refused_where_they_begin_no_other_prompt(model):
    with pytest.raises(ValueError, match="chunk=None reads each prompt whole"):
        kvjax.Engine(model, new_cache(2), chunk=None, prefix_bytes=MANY)
    with pytest.raises(ValueError, match="prefix_host_bytes takes rows from prefix_bytes"):
        kvjax.Engine(model, new_cache(2), prefix_host_bytes=MANY)
    with pytest.raises(ValueError, match="prefix_bytes must be at least 0"):
        kvjax.Engine(model, new_cache(2), prefix_bytes=-1)
    engine = kvjax.Engine(model, new_cache(2))
    for verb in (engine.save_prefixes, engine.restore_prefixes):
        with pytest.raises(ValueError, match="make it with prefix_bytes"):
            verb("nowhere")


@pytest.mark.parametrize("name", ["full", "kivi"])
def test_the_same_beginning_is_read_once(name):
    """A system prompt, then other questions: cut where it can be, else from the prompt alone."""
    rng = np.random.default_rng(5)
    system, *rests = (rng.integers(1, NAN, n).tolist() for n in (70, 9, 17))
    engine = engine_of(name)
    say(engine, list(system), 8)
    for rest in rests:
        conversation = system + rest
        _, read = say(engine, conversation, 8)
        assert read == len(rest)


def test_the_prompt_of_a_request_again_reads_one_token():
    """The one whose logits begin the answer; a row that cannot be cut is no use then."""
    prompt = np.random.default_rng(6).integers(1, NAN, 40).tolist()
    for name, wanted in (("full", 1), ("kivi", 40)):
        engine = engine_of(name)
        first, _ = say(engine, list(prompt), 6)
        again, read = say(engine, list(prompt), 6)
        assert (again, read) == (first, wanted)


def test_a_prompt_equal_to_one_that_runs_copies_its_whole_chunks(model):
    """All but the last token may be shared: at the edge of a chunk, one before and one after."""
    for length in (2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 2 * CHUNK + 2):
        (prompt,) = words(length)
        engine = kvjax.Engine(model, new_cache(2), chunk=CHUNK, block=2)
        (first,) = engine.submit(prompt, max_new_tokens=30)
        while not first.tokens:
            engine.step()
        (second,) = engine.submit(prompt, max_new_tokens=30)
        engine.run()
        assert engine.stats().shared_tokens == (length - 1) // CHUNK * CHUNK
        assert engine.stats().prompt_tokens == 2 * length - engine.stats().shared_tokens
        assert first.tokens == second.tokens


@pytest.mark.parametrize("end", ["stop", "cancelled"])
def test_requests_that_end_early_are_kept(end, model):
    """At a stop token, and by a client that saw a stop string."""
    (prompt,) = words(40)
    settings = {"chunk": CHUNK, "block": 4, "prefix_bytes": MANY}
    engine = kvjax.Engine(model, new_cache(2), **settings)
    (whole,) = engine.submit(prompt, max_new_tokens=20)
    engine.run()
    engine = kvjax.Engine(model, new_cache(2), **settings)
    stop = whole.tokens[5:6] if end == "stop" else ()
    (request,) = engine.submit(prompt, max_new_tokens=20, stop_tokens=stop)
    while len(request.tokens) < 5 and not request.done:
        engine.step()
    engine.cancel(request)
    engine.run()
    said = request.tokens
    conversation = [*prompt, *said, 3, 4]
    tokens, read = say(engine, conversation, 6)
    assert read == 2
    cold = kvjax.Engine(model, new_cache(2), chunk=CHUNK, block=4)
    (same,) = cold.submit([*prompt, *said, 3, 4], max_new_tokens=6)
    cold.run()
    assert tokens == same.tokens


@pytest.mark.parametrize("name", ["full", "kivi", "fier"])
def test_a_kept_row_holds_as_many_tokens_as_it_is_found_by(name):
    """However its request ended, and whatever the device had drawn of it by then."""
    engine = engine_of(name)
    rng = np.random.default_rng(9)
    for seen in (0, 1, 4, 9, 30):
        prompt = rng.integers(1, NAN, int(rng.integers(2, 70))).tolist()
        (request,) = engine.submit(prompt, max_new_tokens=20)
        while len(request.tokens) < seen and not request.done:
            engine.step()
        engine.cancel(request)
        engine.run()
    rows = engine._keeper.kept.rows()
    assert rows
    for row in rows:
        assert row.cache.length.tolist() == [len(row.tokens)]


@pytest.mark.parametrize("tokens", [63, 64, 65, 127, 128, 129, 255, 256])
def test_a_kept_row_has_the_least_capacity_that_holds_it(tokens):
    engine = engine_of("full")
    say(engine, [5] * (tokens - 9), 9)
    engine.step()
    wanted = min(size for size in (64, 128, 256) if size >= tokens)
    (row,) = engine._keeper.kept.rows()
    assert (len(row.tokens), row.cache.spec.capacity) == (tokens, wanted)
    assert engine.stats().kept_bytes == engine._keeper.sizes[wanted]


def test_a_row_is_kept_though_nobody_steps_after_its_last_token(model):
    """As a server does, which rests until the next turn: a block may be in flight then."""
    (prompt,) = words(40)
    settings = {"chunk": CHUNK, "block": 4, "prefix_bytes": MANY}
    engine = kvjax.Engine(model, new_cache(2), **settings)
    (whole,) = engine.submit(prompt, max_new_tokens=20)
    engine.run()
    engine = kvjax.Engine(model, new_cache(2), **settings)
    (request,) = engine.submit(prompt, max_new_tokens=20, stop_tokens=whole.tokens[5:6])
    while not request.done:
        engine.step()
    before = engine.stats().prompt_tokens
    (turn,) = engine.submit([*prompt, *request.tokens, 3, 4], max_new_tokens=2)
    while not turn.done:
        engine.step()
    assert engine.stats().prompt_tokens - before == 2


def test_rows_that_are_not_finite_are_not_kept():
    for name in ("full", "kivi"):
        engine = engine_of(name, model=model_of(name))
        prompt = np.random.default_rng(7).integers(1, NAN, 40).tolist()
        (bad,) = engine.submit([*prompt, NAN], max_new_tokens=6)
        engine.run()
        assert bad.reason == "error"
        assert engine.stats().kept == 0
        _, read = say(engine, list(prompt), 6)
        assert read == 40


def test_a_row_whose_last_token_makes_it_not_finite_is_not_kept(model):
    """Its request has all its tokens, and no other may begin with their keys."""
    cold = kvjax.Engine(model, new_cache(1))
    (whole,) = cold.submit([5, 6], max_new_tokens=4)
    cold.run()
    bad = whole.tokens[-1]
    assert bad not in whole.tokens[:-1]

    class Poisoned(Tiny):
        def __call__(self, tokens, cache, **settings):
            logits, cache = super().__call__(tokens, cache, **settings)
            return jnp.where(jnp.any(tokens == bad, axis=1)[:, None], jnp.nan, logits), cache

    for new, kept in ((3, 1), (4, 0)):
        engine = kvjax.Engine(Poisoned(nnx.Rngs(0), layers=1), new_cache(1), prefix_bytes=MANY)
        (request,) = engine.submit([5, 6], max_new_tokens=new)
        engine.run()
        engine.step()
        assert (request.reason, request.tokens) == ("length", whole.tokens[:new])
        assert engine.stats().kept == kept


def test_the_row_of_a_prompt_is_kept_though_another_is_cancelled_in_that_step(monkeypatch):
    engine = engine_of("kivi")
    rng = np.random.default_rng(10)
    other, prompt = (rng.integers(1, NAN, 40).tolist() for _ in range(2))
    (left,) = engine.submit(other, max_new_tokens=100)
    while not left.tokens:
        engine.step()
    real = engine._slots.assign

    def assign(*args):
        real(*args)
        engine.cancel(left)

    monkeypatch.setattr(engine._slots, "assign", assign)
    say(engine, list(prompt), 6)
    monkeypatch.undo()
    assert left.reason == "cancelled"
    assert say(engine, [*prompt, 4, 5], 3)[1] == 2


def test_answers_to_one_prompt_and_other_requests_share_what_is_kept(model):
    (prompt, rest) = words(50, 9)
    engine = kvjax.Engine(model, new_cache(3), chunk=CHUNK, block=4, prefix_bytes=MANY)
    drawn = {"sampling": sampling(1.0), "key": jax.random.key(3)}
    answers = engine.submit(prompt, n=3, max_new_tokens=10, **drawn)
    engine.run()
    assert engine.stats().kept == len({tuple(one.tokens) for one in answers})
    for one in answers:
        _, read = say(engine, [*prompt, *one.tokens, *rest], 4)
        assert read == len(rest)


def test_prefixes_that_are_stored_once_are_kept_too(model):
    """A row that begins with a stored prefix is kept with it."""
    system, one, two = words(70, 9, 17)
    settings = {"prefixes": 2, "prefix_tokens": 64, "prefix_bytes": MANY}
    engine = kvjax.Engine(model, new_cache(4, 128), block=4, chunk=CHUNK, **settings)
    first = engine.submit(system + one, n=3, max_new_tokens=10)
    engine.run()
    conversation = [*system, *one, *first[0].tokens, *two]
    tokens, read = say(engine, conversation, 9)
    assert read == len(two)
    cold = kvjax.Engine(model, new_cache(4, 192), block=4, chunk=CHUNK)
    (same,) = cold.submit([*system, *one, *first[0].tokens, *two], max_new_tokens=9)
    cold.run()
    assert tokens == same.tokens


@pytest.mark.parametrize("small", [{}, {64: 2}], ids=["alike", "small"])
def test_bytes_are_bound_and_the_oldest_goes(small, model):
    row = kvjax.Engine(model, new_cache(1), prefix_bytes=1)._keeper.sizes
    limit, host = 2 * row[64] + 1, row[64]
    engine = kvjax.Engine(
        model,
        new_cache(2),
        chunk=CHUNK,
        block=4,
        small_slots=small,
        prefix_bytes=limit,
        prefix_host_bytes=host,
    )
    prompts = words(40, 41, 42, 43)
    for prompt in prompts:
        say(engine, list(prompt), 4)
        stats = engine.stats()
        assert stats.kept_bytes <= limit
        assert stats.kept_host_bytes <= host
    say(engine, [1], 1)  # the step that keeps the last one
    assert (engine.stats().kept_bytes, engine.stats().kept_host_bytes) in (
        (2 * row[64], 0),
        (2 * row[64], host),
    )
    _, read = say(engine, [*prompts[0], 5], 4)
    assert read == len(prompts[0]) + 1  # it has gone


def test_what_was_used_last_stays(model):
    size = kvjax.Engine(model, new_cache(1), prefix_bytes=1)._keeper.sizes[64]
    engine = kvjax.Engine(model, new_cache(1), chunk=CHUNK, prefix_bytes=2 * size)
    first, second, third = words(40, 41, 42)
    for prompt in (first, second):
        say(engine, list(prompt), 2)
    _, read = say(engine, [*first[:30], 1], 1)
    assert read == 1
    say(engine, list(third), 2)
    say(engine, [1], 1)
    assert [row.tokens[0] for row in engine._keeper.kept.rows()].count(second[0]) == 0
    assert engine.stats().kept_bytes <= 2 * size


def test_nothing_compiles_after_warm_up_with_kept_rows(model):
    engine = kvjax.Engine(
        model, new_cache(2), chunk=CHUNK, block=4, small_slots={64: 1}, prefix_bytes=MANY
    )
    engine.warm_up()
    talk = words(20)[0]
    say(engine, talk, 2)
    with compilations() as seen:
        for new in (5, 30, 20):
            talk += [3, 4, 5]
            say(engine, talk, new)
    assert not seen


@pytest.mark.parametrize("name", ["full", "kivi", "hosted"])
def test_kept_rows_are_saved_and_restored(name, tmp_path):
    rng = np.random.default_rng(8)
    engine, talks = engine_of(name), []
    for n in (40, 70):
        talks.append(rng.integers(1, NAN, n).tolist())
        say(engine, talks[-1], 9)
    say(engine, [1], 1)
    count = engine.save_prefixes(tmp_path)
    assert count == engine.save_prefixes(tmp_path) == engine.stats().kept
    assert len(list(tmp_path.glob("rows-*"))) == 1
    other = engine_of(name)
    assert other.restore_prefixes(tmp_path) == count
    for talk in talks:
        (here, read), (there, also) = (say(one, [*talk, 5, 6], 7) for one in (engine, other))
        assert (there, also) == (here, 2)
        assert read == 2


def saving(engine, tmp_path):
    """An engine that keeps a row, and what it has saved."""
    say(engine, [4, 5, 6, 7], 5)
    say(engine, [1], 1)
    assert engine.save_prefixes(tmp_path) == 2


def test_saved_rows_of_another_cache_are_refused(tmp_path):
    engine = engine_of("full")
    saving(engine, tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no saved prefixes"):
        engine.restore_prefixes(tmp_path / "other")
    with pytest.raises(ValueError, match="of another kind of cache"):
        engine_of("kivi").restore_prefixes(tmp_path)


def test_saved_rows_of_another_model_are_refused(tmp_path):
    """By any weight, and by a setting: keys of another base of RoPE have the same weights."""
    saving(engine_of("full"), tmp_path)
    weights = Decoder(CONFIG, rngs=nnx.Rngs(0))
    for path, leaf in jax.tree.leaves_with_path(nnx.state(weights)):
        changed = Decoder(CONFIG, rngs=nnx.Rngs(0))
        flat = np.array(leaf).reshape(-1)
        flat[len(flat) // 3] = np.nextafter(flat[len(flat) // 3], np.float32(9))
        state = nnx.state(changed)
        state = jax.tree.map_with_path(
            lambda at, old, path=path, flat=flat: (
                flat.reshape(old.shape) if at == path else old
            ),
            state,
        )
        nnx.update(changed, state)
        with pytest.raises(ValueError, match="of a model with other weights, settings or code"):
            engine_of("full", model=changed).restore_prefixes(tmp_path)
    settings = Decoder(dataclasses.replace(CONFIG, norm_eps=1e-5), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="of a model with other weights, settings or code"):
        engine_of("full", model=settings).restore_prefixes(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 9}, "written by another version"),
        ({"folder": "../rows-0"}, "names no folder of rows"),
        ({"rows": [{"tokens": [1]}]}, "a row without tokens or capacity"),
        (
            {"rows": [{"tokens": [4, 5], "capacity": 64}]},
            "a row of 9 tokens, and its list says 2",
        ),
    ],
)
def test_a_list_that_names_no_rows_is_refused(tmp_path, change, message):
    saving(engine_of("full"), tmp_path)
    about = json.loads((tmp_path / "prefixes.json").read_text()) | change
    del about["sha256_of_this"]
    about["sha256_of_this"] = digest_json(about)
    (tmp_path / "prefixes.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=message):
        engine_of("full").restore_prefixes(tmp_path)


WHOLE = {"tokens": [4, 5, 6], "capacity": 64}


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": None},
        {"tokens": []},
        {"tokens": 4},
        {"tokens": "45"},
        {"tokens": [4, 5.0]},
        {"tokens": [4, "5"]},
        {"tokens": [4, True]},
        {"tokens": [[4, 5]]},
        {"capacity": None},
        {"capacity": 64.0},
        {"capacity": True},
        {"capacity": 2},
    ],
    ids=str,
)
def test_a_row_of_the_list_has_whole_tokens_and_room_for_them(tmp_path, change):
    tokens, capacity = kept_files._entry(tmp_path, WHOLE | {"capacity": 3})
    assert (tokens.tolist(), tokens.dtype, capacity) == ([4, 5, 6], np.int32, 3)
    with pytest.raises(DamagedSaveError, match="a row without tokens or capacity"):
        kept_files._entry(tmp_path, WHOLE | change)


@pytest.mark.parametrize("row", [None, [4, 5], {}, {"tokens": [4]}, {"capacity": 64}], ids=str)
def test_what_is_no_row_in_the_list_is_refused(tmp_path, row):
    with pytest.raises(DamagedSaveError, match="a row without tokens or capacity"):
        kept_files._entry(tmp_path, row)


def test_rows_under_other_tokens_are_refused(tmp_path):
    """They would answer another prompt."""
    saving(engine_of("full"), tmp_path)
    text = (tmp_path / "prefixes.json").read_text()
    (tmp_path / "prefixes.json").write_text(text.replace("[4, 5, 6, 7", "[4, 5, 6, 8"))
    with pytest.raises(ValueError, match="has changed; save the prefixes again"):
        engine_of("full").restore_prefixes(tmp_path)


def test_rows_that_another_save_removes_while_they_are_read_are_told_apart(tmp_path):
    """From damaged ones: to restore again is all that it takes."""
    engine = engine_of("full")
    saving(engine, tmp_path)
    (_, capacity, read), *_ = kept_files.saved(tmp_path, engine._model)
    assert engine.save_prefixes(tmp_path) == 2
    with pytest.raises(RuntimeError, match="while they were read; restore them again"):
        read(engine._keeper._shapes(capacity))
    assert engine_of("full").restore_prefixes(tmp_path) == 2


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_files_that_are_damaged_give_no_row(tmp_path, damage):
    """Whichever file it is: rows are as they were, or an error says that files are damaged."""
    engine, talk = engine_of("full"), [4, 5, 6, 7]
    wanted, _ = say(engine, list(talk), 5)
    engine.step()
    assert engine.save_prefixes(tmp_path) == 1
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]
    errors = []
    for file in files:
        content = file.read_bytes()
        middle = len(content) // 2
        if damage == "cut":
            file.write_bytes(content[:middle])
        elif damage == "flipped":
            flipped = bytes([content[middle] ^ 255])
            file.write_bytes(content[:middle] + flipped + content[middle + 1 :])
        else:
            file.unlink()
        other = engine_of("full")
        try:
            other.restore_prefixes(tmp_path)
        except (ValueError, FileNotFoundError) as error:
            errors.append(str(error))
        assert say(other, list(talk), 5)[0] == wanted
        file.write_bytes(content)
    assert len(errors) >= 3
    assert all(str(tmp_path) in error for error in errors)
    assert engine_of("full").restore_prefixes(tmp_path) == 1


@pytest.mark.parametrize("full_at", ["the second row", "the list"])
def test_a_save_for_which_the_disk_is_too_small_changes_nothing(tmp_path, monkeypatch, full_at):
    engine = engine_of("full")
    saving(engine, tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    real, saved = kept_files.save_cache, []

    def full(*args, **settings):
        raise OSError(errno.ENOSPC, "No space left on device")

    def save_one(*args):
        saved.append(args)
        return full() if len(saved) == 2 else real(*args)

    if full_at == "the list":
        monkeypatch.setattr(kept_files.os, "replace", full)
    else:
        monkeypatch.setattr(kept_files, "save_cache", save_one)
    with pytest.raises(OSError, match="No space left"):
        engine.save_prefixes(tmp_path)
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert engine_of("full").restore_prefixes(tmp_path) == 2
    assert engine.save_prefixes(tmp_path) == 2


def test_an_engine_steps_while_its_rows_are_saved(tmp_path, monkeypatch):
    """Rows that are dropped meanwhile are left out, and a second save is refused."""
    size = engine_of("full")._keeper.sizes[64]
    engine = engine_of("full", prefix_bytes=3 * size)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(1, NAN, 30).tolist() for _ in range(5)]
    for prompt in prompts[:3]:
        say(engine, list(prompt), 4)
    engine.step()
    real, inside, may_go = kept_files.save_cache, threading.Event(), threading.Event()

    def slow(*args):
        inside.set()
        assert may_go.wait(60)
        return real(*args)

    monkeypatch.setattr(kept_files, "save_cache", slow)
    counts = []
    thread = threading.Thread(
        target=lambda: counts.append(engine.save_prefixes(tmp_path)), daemon=True
    )
    thread.start()
    assert inside.wait(30)
    for prompt in prompts[3:]:  # which take the room of two of the three rows
        say(engine, list(prompt), 4)
    engine.step()
    assert engine.stats().kept_bytes <= 3 * size
    with pytest.raises(RuntimeError, match="prefixes are being saved to"):
        engine.save_prefixes(tmp_path)
    may_go.set()
    thread.join(60)
    assert counts == [2]  # the one that was being written, and the one that stayed
    other = engine_of("full")
    assert other.restore_prefixes(tmp_path) == 2
    assert say(other, [*prompts[0], 5], 1)[1] < 30
    assert say(other, [*prompts[1], 5], 1)[1] == 31
    assert say(other, [*prompts[2], 5], 1)[1] < 30


@pytest.mark.parametrize(("room", "rows"), [(-1, 0), (0, 1), (1, 1)])
def test_restored_rows_fit_in_the_bound(tmp_path, room, rows):
    saving(engine_of("full"), tmp_path)
    size = engine_of("full")._keeper.sizes[64]
    engine = engine_of("full", prefix_bytes=size + room)
    assert engine.restore_prefixes(tmp_path) == rows
    assert engine.stats().kept_bytes == rows * size
    assert engine.stats().kept == rows


def test_saved_rows_that_no_slot_has_room_for_are_left_out(tmp_path):
    engine = engine_of("full", capacity=512)
    for tokens in (20, 300):
        say(engine, [tokens % 50] * tokens, 5)
    engine.step()
    assert engine.save_prefixes(tmp_path) == 2
    other = engine_of("full", capacity=256)
    assert other.restore_prefixes(tmp_path) == 1
    assert [len(row.tokens) for row in other._keeper.kept.rows()] == [25]


def test_a_row_for_which_there_is_no_memory_is_not_kept(monkeypatch):
    """The request has its tokens, and the others go on."""
    engine = engine_of("full")
    talk = [4, 5, 6, 7]
    lack_memory(monkeypatch, keeping, "copy_of_slot", times=MANY)
    first, _ = say(engine, list(talk), 5)
    say(engine, [1], 1)
    assert engine.stats().kept == 0
    monkeypatch.undo()
    again, _ = say(engine, list(talk), 5)
    assert again == first


@pytest.mark.parametrize("lacking", [1, 2, 3])
def test_kept_rows_make_room_for_the_row_of_a_prompt(monkeypatch, lacking):
    """The oldest go first, and one that is left still serves."""
    engine = engine_of("full")
    prompts = [[n, 5, 6, 7, 8] for n in (1, 2, 3)]
    for prompt in prompts:
        say(engine, list(prompt), 3)
    engine.step()
    assert engine.stats().kept == 3
    lack_memory(monkeypatch, slots, "empty_row", lacking)
    engine._rows._spare.clear()
    (request,) = engine.submit([9] * 40, max_new_tokens=2)
    engine.run()
    assert request.reason == "length"
    monkeypatch.undo()
    reads = [say(engine, [*prompt, 4], 1)[1] for prompt in prompts]
    assert reads == [6] * lacking + [1] * (3 - lacking)


@pytest.mark.parametrize("lacking", [1, 2])
def test_kept_rows_make_room_for_a_prompt_that_is_held_as_it_came(monkeypatch, lacking):
    """Until a prompt of codes ends it takes more than its row."""
    engine = engine_of("kivi")
    say(engine, [1, 5, 6, 7, 8], 3)
    engine.step()
    assert engine.stats().kept == 2  # the prompt, and its answer
    failed = lack_memory(monkeypatch, reading, "staged", lacking)
    (request,) = engine.submit([9] * 40, max_new_tokens=2)
    while request.state == "waiting":
        engine.step()
    assert len(failed) == lacking
    assert engine.stats().kept == 2 - lacking
    engine.run()
    assert request.reason == "length"


# ------------------------------------------------------------------ the tree


def test_the_tree_finds_the_longest_beginning_of_lists():
    """Against a search through lists of tokens, with rows that come and go."""
    rng = np.random.default_rng(0)
    for seed in range(30):
        tree, rows = PrefixTree(), dict[tuple, KeptRow]()
        for clock in range(60):
            tokens = tuple(rng.integers(0, 3, rng.integers(1, 8)).tolist())
            if rows and rng.random() < 0.3:
                gone = list(rows)[rng.integers(len(rows))]
                tree.remove(rows.pop(gone))
            else:
                row = KeptRow(np.array(tokens), None, 0, used=clock)
                assert tree.add(row) is rows.get(tokens)
                rows[tokens] = row
            prompt = tuple(rng.integers(0, 3, rng.integers(1, 9)).tolist())
            for whole in (False, True):
                found, same = tree.longest(np.array(prompt), whole=whole)
                lengths = [_same(known, prompt) for known in rows]
                if whole:
                    lengths = [
                        n for known, n in zip(rows, lengths, strict=True) if n == len(known)
                    ]
                assert same == max(lengths, default=0), (seed, prompt, whole)
                if same:
                    assert _same(tuple(found.tokens.tolist()), prompt) == same
            beginnings = {
                tuple(row.tokens.tolist()) for row in tree.beginnings(np.array(prompt))
            }
            assert beginnings == {
                known for known in rows if known == prompt[: len(known)] and known != prompt
            }
            assert {tuple(row.tokens.tolist()) for row in tree} == set(rows)
        for row in list(rows.values()):
            tree.remove(row)
        assert not tree._root.children


def _same(a, b):
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def test_rows_that_can_be_cut_replace_those_of_which_they_have_all():
    for cuts, left in ((True, 1), (False, 3)):
        kept = KeptRows(100, 0, cuts=cuts)
        for tokens in ([1, 2], [1, 2, 3, 4], [1, 2, 3]):
            row = kept.hold(lambda: object(), 10)
            kept.settle(row, np.array(tokens))
        assert kept.count == left
        assert kept.nbytes == 10 * left
        found, same = kept.find(np.array([1, 2, 3, 9]))
        assert same == 3
        assert len(found.tokens) == (4 if cuts else 3)


def test_a_row_larger_than_the_bound_is_not_copied():
    kept = KeptRows(9, 0, cuts=True)
    assert kept.hold(lambda: pytest.fail("copied"), 10) is None
    assert kept.hold(lambda: object(), 9) is not None
    assert kept.hold(lambda: object(), 9) is not None
    assert kept.nbytes == 9


def test_a_prompt_has_at_least_one_token_to_read():
    kept = KeptRows(100, 0, cuts=True)
    kept.settle(kept.hold(lambda: object(), 1), np.array([1, 2, 3]))
    for prompt, wanted in (([1, 2, 3, 4], 3), ([1, 2, 3], 2), ([1, 2], 1), ([1], 0), ([2], 0)):
        assert kept.find(np.array(prompt))[1] == wanted


def test_capacities_of_kept_rows_are_few():
    assert capacities_of(64) == [64]
    assert capacities_of(65) == [64, 65]
    assert capacities_of(1024) == [64, 128, 256, 512, 1024]
