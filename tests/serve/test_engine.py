"""Requests in one batch: each gets the tokens that it gets alone."""

import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.generation.processors import Processors
from kvjax.generation.sampling import sampling
from kvjax.serve import EngineBusy, reading, slots
from kvjax.serve import engine as engines
from tests.checkpoint import write_checkpoint
from tests.fuzz import requests as fuzz_requests
from tests.generation.test_generate import FLUSHING, VOCAB, Tiny, compilations, words
from tests.generation.test_generate import new_cache as cache_of
from tests.serve.lacking import lack_memory

HOSTED = dataclasses.replace(FLUSHING, store=kvjax.HostOffload())
KIVI = kvjax.Compressed(
    store=kvjax.Quantized(bits=2, key_group=8), local=8, demote=kvjax.Fifo(leave=16)
)
H2O = kvjax.Evicting(evictor=kvjax.evictors.HeavyHitter(), budget=24)
SHARING = {"flushing": FLUSHING, "full": kvjax.presets.full(), "kivi": KIVI}
ORDER = sorted(fuzz_requests.POLICIES, key=("quest", "kivi", "freekv").count, reverse=True)


@pytest.fixture(scope="module")
def model():
    """Of one layer: rows are moved in all layers alike. Those of tests/fuzz/requests.py have two."""
    return Tiny(nnx.Rngs(0), layers=1)


def new_cache(batch=1, capacity=128, policy=None):
    return cache_of(batch, capacity, policy, layers=1)


def alone(model, policy, slots, prompt, **settings):
    """The tokens of a request in an engine of its own, with the same programs."""
    engine = kvjax.Engine(model, new_cache(slots, policy=policy), block=5, chunk=32)
    requests = engine.submit(prompt, **settings)
    engine.run()
    return [request.tokens for request in requests]


def step_until_running(engine, *requests):
    while not all(request.state == "running" for request in requests):
        engine.step()


def draw(rng):
    """A random request: prompt and settings."""
    settings = {"max_new_tokens": int(rng.integers(1, 20)), "n": int(rng.choice([1, 1, 1, 3]))}
    if rng.random() < 0.5:
        settings |= {
            "sampling": sampling(float(rng.uniform(0.2, 2)), top_k=int(rng.integers(1, 30)))
        }
        settings |= {"key": jax.random.key(int(rng.integers(100)))}
    if rng.random() < 0.5:
        settings |= {"stop_tokens": rng.integers(0, VOCAB, 3).tolist()}
    return rng.integers(1, VOCAB, int(rng.integers(1, 90))).tolist(), settings


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "seed"), [(name, seed) for name in ORDER for seed in fuzz_requests.KEPT[name]]
)
def test_tokens_are_those_of_the_request_alone(name, seed):
    """Requests that come and go at random: see tests/fuzz/requests.py, which also runs new
    seeds.
    """
    fuzz_requests.run_scenario(name, seed)


@pytest.mark.parametrize("draws", [False, True])
def test_tokens_are_those_of_generate(draws):
    """Of as many rows, whose loop is that of the engine, traced once."""
    traced = []

    class Traced(Tiny):
        def __call__(self, tokens, cache, **settings):
            traced.append(tokens.shape)
            return super().__call__(tokens, cache, **settings)

    model = Traced(nnx.Rngs(0), layers=1)
    settings = {"sampling": sampling(1.0), "key": jax.random.key(3)} if draws else {}
    (prompt,) = words(40)
    engine = kvjax.Engine(model, new_cache(2), chunk=512)
    requests = engine.submit(prompt, n=2, max_new_tokens=12, **settings)
    engine.run()
    whole = kvjax.generate(model, new_cache(2), [prompt, prompt], max_new_tokens=12, **settings)
    assert [request.tokens for request in requests] == whole.rows
    assert traced.count((2, 1)) == 1


def test_blocks_of_one_token_run_no_loop_where_it_would_wait(model, monkeypatch):
    monkeypatch.setattr("kvjax.generation.loops.WAITS", ("cpu",))
    prompts = words(40, 9)
    engine = kvjax.Engine(model, new_cache(2, policy=FLUSHING), chunk=512, block=1)
    requests = [engine.submit(prompt, max_new_tokens=14)[0] for prompt in prompts]
    engine.run()
    assert engine.stats().steps <= 15  # a call counts no step in which no row takes part
    for request, prompt in zip(requests, prompts, strict=True):
        cache = new_cache(policy=FLUSHING)
        assert (
            request.tokens == kvjax.generate(model, cache, [prompt], max_new_tokens=14).rows[0]
        )


def test_rules_that_change_logits_count_the_tokens_of_a_request(model):
    rules = Processors(
        repetition_penalty=1.7, no_repeat_ngram_size=2, min_new_tokens=6, suppress_tokens=(5,)
    )
    engine = kvjax.Engine(
        model, new_cache(2), block=4, chunk=512, processors=rules, stop_tokens=range(8)
    )
    prompts = words(9, 14, 20)
    requests = [engine.submit(prompt, max_new_tokens=12)[0] for prompt in prompts]
    engine.run()
    for request, prompt in zip(requests, prompts, strict=True):
        settings = {"max_new_tokens": 12, "processors": rules, "stop_tokens": range(8)}
        assert (
            request.tokens == kvjax.generate(model, new_cache(), [prompt], **settings).rows[0]
        )


def test_a_request_that_is_iterated_yields_all_tokens_whoever_steps(model):
    """Those that came while its reader held a token were left out."""
    engine = kvjax.Engine(model, new_cache(2), block=4, chunk=32)
    one, two = (engine.submit(prompt, max_new_tokens=11)[0] for prompt in words(9, 14))
    in_turns = list(zip(one, two, strict=True))
    assert in_turns == list(zip(one.tokens, two.tokens, strict=True))
    (third,) = engine.submit(words(9)[0], max_new_tokens=11)
    found = []
    for token in third:
        found.append(token)
        engine.run()
    assert found == third.tokens == one.tokens


def test_a_prompt_is_read_once_for_its_answers_and_a_beginning_is_copied(model):
    long, rest = words(100, 20)
    engine = kvjax.Engine(model, new_cache(4, capacity=256), chunk=32, block=2)
    step_until_running(engine, *engine.submit(long, n=3, max_new_tokens=20))
    assert engine.stats().prompt_tokens == 100
    (other,) = engine.submit(long[:90] + rest, max_new_tokens=9)
    engine.run()
    assert engine.stats().shared_tokens == 64  # whole chunks of 32
    assert engine.stats().prompt_tokens == 100 + 110 - 64
    cold = kvjax.Engine(model, new_cache(4, capacity=256), chunk=32, block=2)
    (same,) = cold.submit(long[:90] + rest, max_new_tokens=9)
    cold.run()
    assert other.tokens == same.tokens


def test_nothing_compiles_after_warm_up(model):
    engine = kvjax.Engine(model, new_cache(3, policy=FLUSHING), block=4, chunk=32)
    engine.warm_up()
    rng = np.random.default_rng(1)
    keys = [jax.random.key(seed) for seed in range(10)]
    with compilations() as seen:
        for n, key in enumerate(keys, start=1):
            prompt, settings = draw(rng)
            engine.submit(prompt, **settings)
            engine.submit(prompt, n=n, sampling=sampling(1.0), key=key, max_new_tokens=2)
            engine.step()
        engine.run()
        (request,) = engine.submit([3, 4], max_new_tokens=30)
        step_until_running(engine, request)
        row = engine.row(request)
    assert not seen
    assert row.length.tolist() == [2 + len(request.tokens)]


def test_a_row_that_is_not_finite_ends_alone():
    class Broken(Tiny):
        """Its logits are NaN once a row has been fed token 7."""

        def __call__(self, tokens, cache, **settings):
            logits, cache = super().__call__(tokens, cache, **settings)
            hit = jnp.any(tokens == 7, axis=1)
            return jnp.where(hit[:, None], jnp.nan, logits), cache

    broken = Broken(nnx.Rngs(0), layers=1)
    engine = kvjax.Engine(broken, new_cache(2), block=4, chunk=32)
    (bad,), (good,) = (
        engine.submit([5, 7], max_new_tokens=9),
        engine.submit([5, 6], max_new_tokens=9),
    )
    engine.run()
    assert (bad.reason, bad.tokens) == ("error", [])
    cold = kvjax.Engine(broken, new_cache(2), block=4, chunk=32)
    (same,) = cold.submit([5, 6], max_new_tokens=9)
    cold.run()
    assert (good.reason, good.tokens) == (same.reason, same.tokens)


def test_a_row_ends_with_the_token_that_makes_it_not_finite(model):
    """Wherever blocks end."""
    cold = kvjax.Engine(model, new_cache(1), block=4)
    (whole,) = cold.submit([5, 6], max_new_tokens=12)
    cold.run()
    bad, at = next(
        (token, i)
        for i, token in enumerate(whole.tokens)
        if i > 1 and token not in whole.tokens[:i]
    )

    class Poisoned(Tiny):
        def __call__(self, tokens, cache, **settings):
            logits, cache = super().__call__(tokens, cache, **settings)
            return jnp.where(jnp.any(tokens == bad, axis=1)[:, None], jnp.nan, logits), cache

    for block in (3, 16):
        engine = kvjax.Engine(Poisoned(nnx.Rngs(0), layers=1), new_cache(1), block=block)
        (request,) = engine.submit([5, 6], max_new_tokens=12)
        engine.run()
        assert (request.reason, request.tokens) == ("error", whole.tokens[: at + 1])
        assert isinstance(request.error, FloatingPointError)


@pytest.mark.parametrize(
    "policy",
    [pytest.param(kvjax.presets.full(), marks=pytest.mark.thorough), HOSTED, H2O],
    ids=["full", "hosted", "evicting"],
)
def test_short_requests_take_slots_of_small_capacity(model, policy):
    """A long one that waits for its slot holds up none of them; no program is compiled after
    warm-up.
    """
    long, also, *short = words(90, 80, 9, 20, 5, 30, 11)
    by = {"block": 4, "chunk": 32, "prompt_tokens": 500}
    engine = kvjax.Engine(model, new_cache(1, policy=policy), small_slots={48: 2}, **by)
    engine.warm_up()
    with compilations() as seen:
        sent = [(one, engine.submit(one, max_new_tokens=10)[0]) for one in (long, also, *short)]
        engine.step()
        running = [request for _, request in sent if request.state == "running"]
        assert len(running) == 3
        assert sent[0][1].state == "running"
        assert sent[1][1].state == "waiting"
        engine.run()
    assert not seen or policy is H2O  # whose prompts are read whole
    assert engine.stats().slots == 3
    for prompt, request in sent:
        assert [request.tokens] == alone(model, policy, 1, prompt, max_new_tokens=10)


def test_rows_of_slots_of_several_capacities_are_copied(model):
    """To a prompt that begins like them, and to a caller."""
    (start,) = words(40)
    engine = kvjax.Engine(
        model, new_cache(1), small_slots={64: 1}, block=2, chunk=32, prompt_tokens=500
    )
    requests = [engine.submit([*start, token], max_new_tokens=16)[0] for token in (3, 4)]
    engine.step()
    assert engine.stats().shared_tokens == 32
    row = engine.row(requests[0])  # in the small slot
    assert (row.spec.batch, row.spec.capacity, row.length.tolist()) == (
        1,
        128,
        [41 + len(requests[0].tokens)],
    )
    engine.run()
    for token, request in zip((3, 4), requests, strict=True):
        assert [request.tokens] == alone(
            model, kvjax.presets.full(), 1, [*start, token], max_new_tokens=16
        )


def test_slots_of_several_capacities_are_refused_where_rows_depend_on_others(model):
    share = kvjax.presets.parse("fier:budget=24,group=8,chunk=8,dense_layers=0,share=2")
    for cache, given, message in (
        (new_cache(2), {128: 1}, "a capacity of small_slots must be at most 127, got 128"),
        (new_cache(2), 64, "small_slots must say how many slots of each capacity"),
        (new_cache(2), {64: 0}, r"small_slots\[64\] must be at least 1"),
        (cache_of(2, policy=share), {64: 1}, "must have one capacity: it needs other layers"),
    ):
        with pytest.raises(ValueError, match=message):
            kvjax.Engine(model, cache, small_slots=given)
    with pytest.raises(ValueError, match="give prefixes or small_slots"):
        kvjax.Engine(model, new_cache(2), small_slots={64: 1}, prefixes=1, prefix_tokens=64)


def test_the_device_is_asked_for_a_block_before_the_last_one_is_read(model):
    engine = kvjax.Engine(model, new_cache(1), block=4)
    first, second = (engine.submit(prompt, max_new_tokens=8)[0] for prompt in words(5, 6))
    assert engine.step() == []
    assert (first.tokens, first.asked) == ([], 4)
    assert engine.step() == [first]
    assert (len(first.tokens), first.asked) == (4, 8)
    assert engine.step() == [
        first
    ]  # its end was known, so that the slot has the other one already
    assert (first.reason, second.asked) == ("length", 4)
    engine.run()
    assert engine.stats().fill == 1
    assert engine.stats().steps == 16


def test_a_block_ends_with_a_row_if_another_waits(model):
    engine = kvjax.Engine(model, new_cache(2), block=8)
    for prompt, new in zip(words(5, 6, 7), (3, 20, 17), strict=True):
        engine.submit(prompt, max_new_tokens=new)
    engine.run()
    assert engine.stats().steps == 20
    assert engine.stats().fill == 1


def test_a_block_is_whole_while_no_other_waits(model):
    engine = kvjax.Engine(model, new_cache(2), block=8)
    for prompt, new in zip(words(5, 6), (3, 20), strict=True):
        engine.submit(prompt, max_new_tokens=new)
    engine.step()
    assert engine._steps_of_block([3, 20]) == 8
    engine.submit([3, 4], max_new_tokens=2)
    assert engine._steps_of_block([3, 20]) == 3
    engine.run()


def test_settings_of_draws_go_to_the_device_when_rows_come_or_go(model, monkeypatch):
    real, stacked = engines.stack_draws, []

    def counted(draws):
        stacked.append(draws)
        return real(draws)

    monkeypatch.setattr(engines, "stack_draws", counted)
    engine = kvjax.Engine(model, new_cache(2), block=2)
    settings = {"sampling": sampling(1.0), "key": jax.random.key(3)}
    for new in (4, 20):
        engine.submit([3, 4], max_new_tokens=new, **settings)
    engine.run()
    assert len(stacked) == 2  # both rows, and the one that stayed


def test_a_prompt_that_cannot_be_read_ends_alone(model, monkeypatch):
    """Such as for lack of memory."""
    real = reading.read_chunk

    def read(model, cache, tokens, *rest, **settings):
        if tokens[0, 0] == 7:
            raise MemoryError("no room for the prompt")
        return real(model, cache, tokens, *rest, **settings)

    engine = kvjax.Engine(model, new_cache(2), block=4)
    monkeypatch.setattr(reading, "read_chunk", read)
    (bad, also), (good,) = (
        engine.submit([7, 5], n=2, max_new_tokens=9),
        engine.submit([5, 7], max_new_tokens=9),
    )
    assert {bad, also} <= set(engine.step())
    engine.run()
    assert (bad.reason, also.reason, good.reason) == ("error", "error", "length")
    assert "no room for the prompt" in str(bad.error)
    assert [good.tokens] == alone(model, kvjax.presets.full(), 2, [5, 7], max_new_tokens=9)


def test_a_row_that_has_no_memory_ends_alone(model, monkeypatch):
    engine = kvjax.Engine(model, new_cache(2), block=4)
    real, left = slots.empty_row, [1]

    def no_room(*kind):
        if left and left.pop():
            raise MemoryError("no room for a row")
        return real(*kind)

    monkeypatch.setattr(slots, "empty_row", no_room)
    (bad,), (good,) = (engine.submit([7, 5], max_new_tokens=5) for _ in range(2))
    engine.run()
    assert (bad.reason, str(bad.error), good.reason) == ("error", "no room for a row", "length")


def test_a_step_that_fails_ends_all_requests_and_the_engine_says_so(model, monkeypatch):
    engine = kvjax.Engine(model, new_cache(1), block=4, park=1)
    requests = [engine.submit(prompt, max_new_tokens=9)[0] for prompt in words(5, 6, 7, 8)]
    engine.step()

    def fail(model, cache, *arguments, **settings):
        for array in jax.tree.leaves(cache):
            array.delete()
        raise RuntimeError("device lost")

    monkeypatch.setattr(slots, "_run_loop", fail)
    with pytest.raises(RuntimeError, match="device lost"):
        engine.run()
    assert {(request.done, request.reason, str(request.error)) for request in requests} == {
        (True, "error", "device lost")
    }
    assert engine.step() == requests  # which are told once
    engine.run()
    with pytest.raises(RuntimeError, match="a step of this engine has failed; make a new one"):
        engine.submit([3], max_new_tokens=3)


def test_threads_submit_and_cancel_while_the_engine_runs(model):
    engine, sent = kvjax.Engine(model, new_cache(2), block=2), []

    def client(seed):
        for prompt in words(9, 20, 5, seed=seed):
            (request,) = engine.submit(prompt, max_new_tokens=11)
            sent.append((prompt, request))
            if len(prompt) == 20:
                engine.cancel(request)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or any(
        not request.done for _, request in sent
    ):
        engine.step()
    assert len(sent) == 12
    for prompt, request in sent:
        if request.reason == "length":
            assert [request.tokens] == alone(
                model, kvjax.presets.full(), 2, prompt, max_new_tokens=11
            )
    assert sum(request.reason == "length" for _, request in sent) >= 8


def test_prompts_that_are_read_whole_attend_exactly(model):
    """A quantised cache reads a chunk after the first as it stored the first; a whole prompt
    attends to itself.
    """
    (prompt,) = words(90)
    engine = kvjax.Engine(model, new_cache(2, policy=KIVI), chunk=None)
    (request,) = engine.submit(prompt, max_new_tokens=9)
    engine.run()
    whole = kvjax.generate(
        model, new_cache(1, policy=KIVI), [prompt], max_new_tokens=9, chunk=128
    )
    assert [request.tokens] == whole.rows


def test_trouble_of_one_changes_no_token_of_the_others(model):
    """A full queue, a request that is too long, one that leaves in each state, and a row that
    is not finite.
    """
    poisoned = Tiny(nnx.Rngs(0), layers=1)
    poisoned.embed.set_value(poisoned.embed.get_value().at[7].set(jnp.nan))
    engine = kvjax.Engine(poisoned, new_cache(2), max_waiting=3, block=2, chunk=32)
    prompts = [[max(token, 8) for token in prompt] for prompt in words(5, 70, 20)]
    kept = [engine.submit(prompt, max_new_tokens=12)[0] for prompt in prompts]
    with pytest.raises(EngineBusy, match=r"3 requests wait and the engine takes 3; run `step`"):
        engine.submit([3], max_new_tokens=3)
    engine.step()  # `kept` are decoding, reading and waiting
    with pytest.raises(ValueError, match="do not fit"):
        engine.submit([3], max_new_tokens=128)
    (waiting,) = engine.submit([3, 4], max_new_tokens=20)
    engine.cancel(waiting)
    left = {}
    for reason, prompt in (("cancelled", prompts[1]), ("error", [9, 7])):
        while engine.stats().waiting > 2:
            engine.step()
        left[reason] = engine.submit(prompt, max_new_tokens=20)[0]
    while left["cancelled"].state != "running":
        engine.step()
    engine.cancel(left["cancelled"])
    engine.run()
    assert {reason: one.reason for reason, one in left.items()} == {
        reason: reason for reason in left
    }
    assert engine.stats().waiting == 0
    for prompt, request in zip(prompts, kept, strict=True):
        assert [request.tokens] == alone(
            poisoned, kvjax.presets.full(), 2, prompt, max_new_tokens=12
        )


def test_a_prompt_begins_without_a_look_at_all_that_wait(model, monkeypatch):
    looks, done = [], engines.Request.done

    def seen(self):
        looks.append(self)
        return done.fget(self)

    def count(waiting):
        engine = kvjax.Engine(
            model, new_cache(1), small_slots={64: 1}, block=2, chunk=32, max_waiting=waiting + 9
        )
        for _ in range(waiting):
            engine.submit([3, 4], max_new_tokens=2)
        looks.clear()
        engine.submit([3, 4], max_new_tokens=2)
        for _ in range(3):
            engine.step()
        return len(looks), engine.stats().new_tokens

    monkeypatch.setattr(engines.Request, "done", property(seen))
    assert count(20) == count(200)


@pytest.mark.parametrize(
    ("settings", "read"), [({}, 3), ({"readers": 1}, 1), ({"readers": 4}, 4)]
)
def test_prompts_are_read_beside_others_up_to_a_number(model, settings, read):
    engine = kvjax.Engine(model, new_cache(8), chunk=2, **settings)
    for prompt in words(110, 50, 20, 8):
        engine.submit(prompt, max_new_tokens=2)
        engine.step()
    assert len(engine._scheduler.reading) == read


def test_a_prompt_is_compared_with_few_of_those_that_wait(model):
    """With so many as two rounds of slots: others begin later, if at all alike."""
    engine = kvjax.Engine(model, new_cache(2))
    for _ in range(9):
        engine.submit([3, 4], max_new_tokens=2)
    first, *_ = engine._scheduler.next_prompts(1)
    assert len(list(engine._others(first))) == 2 * engine.slots - 1


def test_iterating_over_a_request_runs_the_engine(model):
    engine = kvjax.Engine(model, new_cache(2), block=3)
    (first,), (second,) = (engine.submit(prompt, max_new_tokens=7) for prompt in words(9, 5))
    assert list(first) == first.tokens
    assert len(first.tokens) == 7
    with pytest.raises(ValueError, match="the engine has no tokenizer"):
        _ = first.text
    row = None
    while not second.done:
        if second.state == "running":
            row = engine.row(second)
            assert row.length.tolist() == [5 + len(second.tokens)]
        engine.step()
    with pytest.raises(ValueError, match="done, so no slot holds"):
        engine.row(second)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": [VOCAB]}, "vocabulary"),
        (
            {"max_new_tokens": 500},
            r"3 prompt \+ 500 new tokens do not fit in the cache's capacity of 128",
        ),
        ({"n": 0}, "n"),
        ({"n": 257}, r"more answers than may wait: max_waiting=256"),
        ({"stop_tokens": list(range(17))}, "16 stop tokens, got 17"),
        ({"sampling": sampling(1.0)}, "key"),
        (
            {"prompt": "a text"},
            r"submit\(prompt=...\) must be a list of integer token ids, or with a checkpoint a text",
        ),
        ({"prompt": [[1, 2], [3]]}, "must be a list of integer token ids.*got a list"),
        ({"prompt": [1.5]}, "must be a list of integer token ids"),
        ({"prompt": None}, "must be a list of integer token ids.*got None"),
        (
            {"sampling": sampling(np.array([0.5, 1.0])), "key": jax.random.key(0)},
            r"temperature must be one number or 1, one for each row, got shape \[2\]",
        ),
        ({"sampling": sampling(1.0), "key": jax.random.key(0, impl="rbg")}, "keys of one kind"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_at_once(model, change, message):
    engine = kvjax.Engine(model, new_cache(2))
    settings = {"prompt": [1, 2, 3], "max_new_tokens": 4} | change
    with pytest.raises(ValueError, match=message):
        engine.submit(settings.pop("prompt"), **settings)
    assert engine.stats().waiting == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop_tokens": "x"}, "stop_tokens are token ids, got 'x'"),
        ({"stop_tokens": range(17)}, "16 stop tokens, got 17"),
        ({"sharers": 2}, "prefix_tokens and sharers are for stored prefixes"),
        ({"prefix_tokens": 64}, "prefix_tokens and sharers are for stored prefixes"),
        ({"prefixes": -1}, "prefixes must be at least 0, got -1"),
        ({"park": -1}, "park must be at least 0, got -1"),
        ({"block": 0}, "block must be at least 1, got 0"),
        ({"chunk": 1}, "chunk must be at least 2, got 1"),
        ({"prompt_tokens": 0}, "prompt_tokens must be at least 1, got 0"),
        ({"readers": 0}, "readers must be at least 1, got 0"),
        ({"max_waiting": 0}, "max_waiting must be at least 1, got 0"),
        ({"prefixes": 1}, "prefix_tokens must be at least 1, got 0"),
        ({"prefix_bytes": 9, "prefix_host_bytes": -1}, "prefix_host_bytes must be at least 0"),
        (
            {"log_probabilities": "no"},
            "log_probabilities=...\\) must be True or False, got 'no'",
        ),
    ],
)
def test_settings_of_an_engine_are_checked_when_it_is_made(model, settings, message):
    with pytest.raises(ValueError, match=message):
        kvjax.Engine(model, new_cache(2), **settings)


def test_stop_tokens_that_are_read_once_are_those_of_all_requests(model):
    (prompt,) = words(9)
    (first,) = alone(model, kvjax.presets.full(), 2, prompt, max_new_tokens=9)
    engine = kvjax.Engine(model, new_cache(2), stop_tokens=(token for token in first[3:4]))
    found = [engine.submit(prompt, max_new_tokens=9)[0] for _ in range(2)]
    engine.run()
    assert [request.reason for request in found] == ["stop", "stop"]


def test_a_request_of_another_engine_is_left_to_it(model):
    own, other = (kvjax.Engine(model, new_cache(1), block=2) for _ in range(2))
    (request,) = own.submit([3, 4], max_new_tokens=9)
    own.step()
    for verb in (other.cancel, other.row):
        with pytest.raises(
            ValueError, match="takes a request that `submit` of this engine returned"
        ):
            verb(request)
    own.run()
    assert request.reason == "length"


def test_engine_refuses_a_cache_that_holds_tokens(model):
    _, cache = kvjax.generation.prefill(model, new_cache(), words(3))
    with pytest.raises(ValueError, match="empty cache"):
        kvjax.Engine(model, cache)


def test_warm_up_touches_no_request(model):
    engine = kvjax.Engine(model, new_cache(2), block=3)
    (request,) = engine.submit(np.array([3, 4, 5]), max_new_tokens=7)
    engine.step()
    with pytest.raises(ValueError, match="warm_up takes an idle engine"):
        engine.warm_up()
    engine.run()
    assert [request.tokens] == alone(
        model, kvjax.presets.full(), 2, [3, 4, 5], max_new_tokens=7
    )


def test_chat_messages_end_at_the_stop_tokens_of_a_chat(tmp_path):
    checkpoint = kvjax.models.load(write_checkpoint(tmp_path / "chat"))
    engine = kvjax.Engine(checkpoint, slots=1, capacity=512)  # as `generate` makes it
    asked = {"text": "Hello", "messages": [{"role": "user", "content": "Hello"}]}
    found = {name: engine.submit(prompt, max_new_tokens=6)[0] for name, prompt in asked.items()}
    engine.run()
    for name, request in found.items():
        alone = checkpoint.generate(asked[name], max_new_tokens=6)
        assert (request.tokens, request.text) == (alone.tokens, alone.text)
    ends = set(found["messages"].stop.tolist()) - {-1}
    assert ends == set(checkpoint.chat_stop_tokens)
    assert set(found["text"].stop.tolist()) - {-1} == set(checkpoint.stop_tokens)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SHARING)
def test_answers_and_requests_that_begin_alike_share_a_prefix(model, name):
    """Samples of one prompt, then requests with its beginning, get their tokens; the prompt is
    stored once.
    """
    policy = SHARING[name]
    system, *rests = words(70, 9, 17, 20)
    engine = kvjax.Engine(
        model, new_cache(4, 96, policy), block=4, chunk=32, prefixes=2, prefix_tokens=64
    )
    settings = {"max_new_tokens": 30, "sampling": sampling(1.0), "key": jax.random.key(3)}
    sent = [
        (
            engine.submit(system + rests[0], n=3, **settings),
            system + rests[0],
            {"n": 3, **settings},
        )
    ]
    step_until_running(engine, *sent[0][0])
    assert engine.stats().prefixes == 1
    for rest in rests[1:]:
        sent.append(
            (
                engine.submit(system + rest, max_new_tokens=9),
                system + rest,
                {"max_new_tokens": 9},
            )
        )
    most = 0
    while any(not request.done for requests, _, _ in sent for request in requests):
        engine.step()
        most = max(most, engine.stats().prefixes)
    assert most == 2
    assert engine.stats().prefixes == 0
    for requests, prompt, how in sent:
        long = kvjax.Engine(model, new_cache(4, 160, policy), block=4, chunk=32)
        same = long.submit(prompt, **how)
        long.run()
        assert [request.tokens for request in requests] == [request.tokens for request in same]


def test_a_prompt_may_be_longer_than_a_slot_by_its_prefix(model):
    (prompt, other) = words(90, 90)
    engine = kvjax.Engine(
        model, new_cache(2, 96), block=4, chunk=32, prefixes=1, prefix_tokens=64
    )
    with pytest.raises(
        ValueError, match="need 110 tokens beside the longest prefix, and a slot has 96"
    ):
        engine.submit(prompt[:60], max_new_tokens=50)
    # in turn: there is one place
    first, second = (engine.submit(one, max_new_tokens=40)[0] for one in (prompt, other))
    engine.run()
    for request, one in ((first, prompt), (second, other)):
        assert (
            request.tokens
            == kvjax.generate(model, new_cache(1, 160), [one], max_new_tokens=40).rows[0]
        )


@pytest.mark.parametrize(
    "shared", [{}, {"prefixes": 1, "prefix_tokens": 64}], ids=["copied", "stored"]
)
def test_a_prompt_that_is_not_finite_lends_its_beginning_to_none(shared):
    """Within a chunk, NaN of a later token reaches the keys of earlier ones in the next layer."""
    poisoned = Tiny(nnx.Rngs(0))
    poisoned.embed.set_value(poisoned.embed.get_value().at[7].set(jnp.nan))
    (start,) = words(80)
    start, settings = [max(token, 8) for token in start], {"max_new_tokens": 9}
    engine = kvjax.Engine(poisoned, cache_of(3, 128), block=4, chunk=32, **shared)
    bad, good, also = (
        engine.submit(start + rest, **settings)[0] for rest in ([7, 9], [9], [8, 9])
    )
    engine.run()
    assert (bad.reason, good.reason, also.reason) == ("error", "length", "length")
    for request, rest in ((good, [9]), (also, [8, 9])):
        cold = kvjax.Engine(poisoned, cache_of(3, 128), block=4, chunk=32)
        (same,) = cold.submit(start + rest, **settings)
        cold.run()
        assert request.tokens == same.tokens


def test_more_answers_than_share_a_prefix_store_it_again(model):
    (prompt,) = words(90)
    settings = {"max_new_tokens": 20, "sampling": sampling(1.0), "key": jax.random.key(3)}
    by = {"prefixes": 2, "prefix_tokens": 64, "block": 4, "chunk": 32}
    engine = kvjax.Engine(model, new_cache(5, 128), sharers=2, **by)
    requests = engine.submit(prompt, n=5, **settings)
    step_until_running(engine, *requests)  # one of them with its own copy
    assert engine.stats().prefixes == 2
    engine.run()
    all_share = kvjax.Engine(model, new_cache(5, 128), **by)
    same = all_share.submit(prompt, n=5, **settings)
    all_share.run()
    assert [request.tokens for request in requests] == [request.tokens for request in same]
    with pytest.raises(ValueError, match="sharers"):
        kvjax.Engine(model, new_cache(5, 128), sharers=0, **by)


@pytest.mark.parametrize(
    "name", ["full", "kivi"]
)  # read as it is stored, and held until its end
def test_a_prefix_goes_to_another_prompt_between_two_answers(model, name):
    """The shorter prompt is read first, and its second answer waits for both of the longer one,
    whose prefix takes the only place.
    """
    prompts = words(100, 50)
    settings = {"max_new_tokens": 5, "n": 2, "sampling": sampling(1.0)}
    settings |= {"key": jax.random.key(3)}
    shared = {"prefixes": 1, "prefix_tokens": 64}
    policy = SHARING[name]
    engine = kvjax.Engine(
        model,
        new_cache(1, 128, policy),
        block=4,
        chunk=32,
        readers=2,
        prompt_tokens=64,
        **shared,
    )
    long, short = (engine.submit(prompt, **settings) for prompt in prompts)
    first_tokens = []
    while any(not request.done for request in long + short):
        engine.step()
        for request in long + short:
            if request.tokens and request not in first_tokens:
                first_tokens.append(request)
    assert first_tokens == [short[0], *long, short[1]], "the order that this is about"
    for requests, prompt in ((long, prompts[0]), (short, prompts[1])):
        plain = kvjax.Engine(model, new_cache(1, 128, policy), block=4, chunk=32)
        same = plain.submit(prompt, **settings)
        plain.run()
        assert [request.tokens for request in requests] == [request.tokens for request in same]


@pytest.mark.parametrize("policy", [kvjax.presets.full(), HOSTED], ids=["full", "hosted"])
def test_prompts_are_read_ahead_and_wait_in_host_memory(model, policy):
    prompts = words(40, 30, 20, 10)
    engine = kvjax.Engine(model, new_cache(1, policy=policy), block=3, chunk=64, park=2)
    requests = [engine.submit(prompt, max_new_tokens=20)[0] for prompt in prompts]
    for _ in range(4):
        engine.step()
    assert (engine.stats().parked, engine.stats().waiting) == (2, 3)
    engine.cancel(requests[1])
    engine.run()
    assert engine.stats().parked == 0
    for request, prompt in zip(requests, prompts, strict=True):
        if request.reason != "cancelled":
            assert [request.tokens] == alone(model, policy, 1, prompt, max_new_tokens=20)


def test_rows_are_made_in_the_arrays_of_those_that_were_given_back(model):
    """At most as many wait for a prompt as are read at once."""
    rows = slots.Rows(slots.RowKind.of(new_cache(2)), most=2)
    made = [rows.make() for _ in range(3)]
    for row in made:
        rows.give_back(row)
    again = [rows.make() for _ in range(3)]
    reused = [jax.tree.leaves(row.layers[0].state)[0].is_deleted() for row in made]
    assert reused == [True, True, False]
    assert all(row.length.tolist() == [0] for row in again)


def test_policies_that_cannot_share_prefixes_are_refused(model):
    with pytest.raises(ValueError, match="cannot share a prefix: it evicts"):
        kvjax.Engine(model, new_cache(2, policy=H2O), prefixes=1, prefix_tokens=64)
    with pytest.raises(ValueError, match="prefix_tokens"):
        kvjax.Engine(model, new_cache(2), prefixes=1)


@pytest.mark.parametrize("count", [60, pytest.param(10_000, marks=pytest.mark.thorough)])
def test_many_requests_leave_nothing_behind(model, count):
    """No program compiles and no buffer stays, with cancellations, samples and prefixes, and a
    queue that is full.
    """
    (system,) = words(64)
    settings = {"prefixes": 2, "prefix_tokens": 64, "park": 1, "max_waiting": 8}
    engine = kvjax.Engine(model, new_cache(4, 96, FLUSHING), block=8, chunk=64, **settings)
    rng, buffers = np.random.default_rng(5), []

    def one() -> None:
        prompt = (system if rng.random() < 0.3 else []) + rng.integers(
            1, VOCAB, int(rng.integers(1, 20))
        ).tolist()
        how = (
            {"sampling": sampling(1.0), "key": jax.random.key(0)} if rng.random() < 0.5 else {}
        )
        try:
            requests = engine.submit(
                prompt, max_new_tokens=int(rng.integers(1, 9)), n=int(rng.choice([1, 3])), **how
            )
        except EngineBusy:
            engine.run()
            return
        if rng.random() < 0.2:
            engine.step()
            engine.cancel(requests[0])

    engine.warm_up()
    for _ in range(30):
        one()
    engine.run()
    with compilations() as seen:
        for i in range(count):
            one()
            if i % (count // 3) == 0:
                engine.run()
                buffers.append(len(jax.live_arrays()))
        engine.run()
    assert not seen
    assert buffers[0] == buffers[-1]


# ------------------------------------------------------------------ while a prompt is read


class Gate:
    """A `read_chunk` that waits until it may go on, as one of a slow model does."""

    def __init__(self, real):
        self.real, self.inside, self.may_go = real, threading.Event(), threading.Event()

    def __call__(self, *args, **settings):
        self.inside.set()
        assert self.may_go.wait(60)
        return self.real(*args, **settings)


def in_thread(call, *args, **settings):
    """What `call` returns in a thread, within half a minute."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call(*args, **settings)), daemon=True)
    thread.start()
    thread.join(30)
    assert found, f"{call} waits for the step"
    return found[0]


def test_submit_cancel_and_stats_answer_while_a_chunk_is_read(model, monkeypatch):
    """The step holds no lock that they need, however long the device takes."""
    gate = Gate(reading.read_chunk)
    monkeypatch.setattr(reading, "read_chunk", gate)
    engine = kvjax.Engine(model, new_cache(2), chunk=32)
    prompts = words(100, 9)
    (long,) = engine.submit(prompts[0], max_new_tokens=5)
    stepper = threading.Thread(target=engine.run, daemon=True)
    stepper.start()
    assert gate.inside.wait(30)
    (short,) = in_thread(engine.submit, prompts[1], max_new_tokens=5)
    (unwanted,) = in_thread(engine.submit, prompts[1], max_new_tokens=5)
    assert in_thread(engine.stats).waiting == 3
    in_thread(lambda: engine.cancel(unwanted) or True)
    assert unwanted.reason == "cancelled"
    assert long.state == "reading"
    gate.may_go.set()
    stepper.join(120)
    for request, prompt in ((long, prompts[0]), (short, prompts[1])):
        assert [request.tokens] == alone(
            model, kvjax.presets.full(), 2, prompt, max_new_tokens=5
        )


def test_a_request_that_is_cancelled_while_its_prompt_is_read_leaves_nothing(
    model, monkeypatch
):
    gate = Gate(reading.read_chunk)
    monkeypatch.setattr(reading, "read_chunk", gate)
    engine = kvjax.Engine(model, new_cache(1), chunk=32)
    (first,) = engine.submit(words(40)[0], max_new_tokens=5)
    stepper = threading.Thread(target=engine.step, daemon=True)
    stepper.start()
    assert gate.inside.wait(30)
    in_thread(lambda: engine.cancel(first) or True)
    gate.may_go.set()
    stepper.join(60)
    (second,) = engine.submit(words(20)[0], max_new_tokens=5)
    engine.run()
    assert (first.tokens, second.reason) == ([], "length")
    assert (engine.stats().waiting, engine.stats().decoding) == (0, 0)
    assert [second.tokens] == alone(
        model, kvjax.presets.full(), 1, words(20)[0], max_new_tokens=5
    )


def test_threads_get_their_turn_in_the_order_in_which_they_ask():
    """Also beside one that asks again and again."""
    turns = engines._Turns()
    order = []

    def ask(name, times):
        for _ in range(times):
            with turns:
                order.append(name)

    with turns:
        threads = []
        for name, times in (("steps", 50), ("row", 1), ("save", 1)):
            threads.append(threading.Thread(target=ask, args=(name, times), daemon=True))
            threads[-1].start()
            while len(turns._line) < 1 + len(threads):  # until it stands in the line
                time.sleep(0.001)
    for thread in threads:
        thread.join(60)
    assert order == ["steps", "row", "save", *["steps"] * 49]


def test_one_that_is_interrupted_while_it_waits_for_its_turn_leaves_the_line(monkeypatch):
    turns = engines._Turns()

    def interrupted():
        raise KeyboardInterrupt

    with turns:
        monkeypatch.setattr(turns._condition, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt), turns:
            pass
        assert len(turns._line) == 1
        monkeypatch.undo()
    with turns:
        assert len(turns._line) == 1


def test_a_row_is_copied_between_two_steps_of_a_thread_that_never_rests(model):
    engine = kvjax.Engine(model, new_cache(1), block=1)
    (request,) = engine.submit(words(9)[0], max_new_tokens=100)
    while not request.tokens:
        engine.step()

    def run():
        while not request.done:
            engine.step()

    stepper = threading.Thread(target=run, daemon=True)
    stepper.start()
    lengths = []
    while not request.done:
        try:
            lengths.append(int(engine.row(request).length[0]))
        except ValueError:
            break  # it was faster
    stepper.join(60)
    assert lengths
    assert lengths == sorted(lengths)
    assert lengths[0] >= 9


def test_a_row_that_is_asked_for_while_a_step_reads_waits_for_no_later_block(
    model, monkeypatch
):
    engine = kvjax.Engine(model, new_cache(2), chunk=32, block=4)
    (request,) = engine.submit(words(9)[0], max_new_tokens=60)
    while len(request.tokens) < 8:
        engine.step()
    engine.submit(words(90)[0], max_new_tokens=5)
    gate = Gate(reading.read_chunk)
    monkeypatch.setattr(reading, "read_chunk", gate)
    stepper = threading.Thread(target=engine.step, daemon=True)
    stepper.start()
    assert gate.inside.wait(30)
    rows = []
    asks = [
        threading.Thread(target=lambda: rows.append(engine.row(request)), daemon=True)
        for _ in range(2)
    ]
    for ask in asks:
        ask.start()
    while len(engine._turns._line) < 3:  # until both stand in the line
        time.sleep(0.001)
    gate.may_go.set()
    for thread in (stepper, *asks):
        thread.join(60)
    known = len(request.known)
    assert len(engine._blocks) == 1  # nobody has waited for it
    later = engine.row(request)
    assert int(later.length[0]) == known + 4
    for row in rows:
        assert row.length.tolist() == [known]
        for part in ("k", "v"):
            early, late = (
                getattr(cache.layers[0].state.tokens, part)[:, :, :known]
                for cache in (row, later)
            )
            np.testing.assert_array_equal(early, late)


def test_a_copy_that_cannot_be_made_is_the_trouble_of_who_asked(model, monkeypatch):
    """The step goes on, and so does the request."""
    engine = kvjax.Engine(model, new_cache(1), block=4)
    (request,) = engine.submit(words(9)[0], max_new_tokens=40)
    step_until_running(engine, request)
    lack_memory(monkeypatch, engines, "whole_row", times=2)
    told = []

    def ask():
        with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
            engine.row(request)
        told.append(True)

    with engine._turns:
        stepper = threading.Thread(target=engine.step, daemon=True)
        stepper.start()
        while len(engine._turns._line) < 2:
            time.sleep(0.001)
        asks = threading.Thread(target=ask, daemon=True)
        asks.start()
        while len(engine._turns._line) < 3:
            time.sleep(0.001)
    for thread in (stepper, asks):
        thread.join(60)
    assert told
    engine.run()
    assert request.reason == "length"
    assert len(request.tokens) == 40


def test_short_prompts_are_answered_while_a_long_one_is_read(model):
    """Also when nobody decodes: a step reads no more than a chunk."""
    engine = kvjax.Engine(model, new_cache(3, capacity=560), chunk=16, block=2)
    (long,) = engine.submit(words(500)[0], max_new_tokens=5)
    engine.step()
    assert engine.stats().prompt_tokens == 16
    (short,) = engine.submit(words(8)[0], max_new_tokens=5)
    steps = 0
    while not short.done:
        before = engine.stats().prompt_tokens
        engine.step()
        assert engine.stats().prompt_tokens - before <= 16
        steps += 1
    assert steps <= 6
    assert long.state == "reading"
    engine.run()
    for request, prompt in ((long, words(500)[0]), (short, words(8)[0])):
        cold = kvjax.Engine(model, new_cache(3, capacity=560), chunk=16, block=5)
        (same,) = cold.submit(prompt, max_new_tokens=5)
        cold.run()
        assert request.tokens == same.tokens


def test_prompts_share_rows_if_there_is_no_memory_for_one_more(model, monkeypatch):
    """The short prompt waits instead of ending."""
    engine = kvjax.Engine(model, new_cache(3), chunk=16)
    (long,) = engine.submit(words(90)[0], max_new_tokens=5)
    engine.step()
    (short,) = engine.submit(words(8)[0], max_new_tokens=5)
    failed = lack_memory(monkeypatch, slots, "empty_row")
    engine.run()
    assert failed
    assert (long.reason, short.reason) == ("length", "length")


def test_an_interrupt_while_a_step_waits_loses_nothing(model, monkeypatch):
    """One that comes while arrays are given away ends all requests, and the engine says so."""
    (prompt,) = words(9)
    engine = kvjax.Engine(model, new_cache(1), block=2)
    (request,) = engine.submit(prompt, max_new_tokens=9)
    real, times = jax.block_until_ready, []

    def wait(tree):
        times.append(None)
        if len(times) == 2:
            raise KeyboardInterrupt
        return real(tree)

    monkeypatch.setattr(jax, "block_until_ready", wait)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    engine.run()
    assert [request.tokens] == alone(model, kvjax.presets.full(), 1, prompt, max_new_tokens=9)

    def stop(*args, **settings):
        raise KeyboardInterrupt

    (request,) = engine.submit(prompt, max_new_tokens=9)
    monkeypatch.setattr(slots, "_run_loop", stop)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert "a step was interrupted" in str(request.error)
    with pytest.raises(RuntimeError, match="a step of this engine has failed"):
        engine.submit(prompt, max_new_tokens=9)


# ------------------------------------------------------------------ what is not the engine's


def test_two_engines_do_not_write_to_one_cache(model):
    cache = new_cache(2)
    engine = kvjax.Engine(model, cache)
    with pytest.raises(ValueError, match="Engine got a cache whose arrays are gone"):
        kvjax.Engine(model, cache)
    (request,) = engine.submit([3, 4], max_new_tokens=3)
    engine.run()
    assert request.reason == "length"


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"prefixes": 1, "prefix_tokens": 10**9}, "prefixes=1 of prefix_tokens=1000000000"),
        ({"prefixes": 10**6, "prefix_tokens": 10**6}, "prefixes=1000000 of prefix_tokens"),
        ({"small_slots": {64: 10**9}}, r"small_slots=\{64: 1000000000\}"),
    ],
)
def test_more_memory_than_the_machine_has_is_one_sentence(model, settings, what):
    with pytest.raises(
        ValueError, match=rf"Engine\({what}.* needs .*iB of memory, and there are"
    ):
        kvjax.Engine(model, new_cache(2), **settings)


def test_more_slots_than_memory_of_a_checkpoint_are_one_sentence():
    checkpoint = kvjax.models.load(kvjax.models.shipped())
    with pytest.raises(ValueError, match=r"Engine\(slots=1000000000 of capacity=512\) needs"):
        kvjax.Engine(checkpoint, slots=10**9, capacity=512)
