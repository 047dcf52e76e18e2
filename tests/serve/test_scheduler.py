"""Which prompt is read next and who gets a slot: decisions alone, without arrays."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvjax.serve.scheduler import (
    LONGEST,
    Assign,
    Begin,
    Prompt,
    Queue,
    Read,
    Scheduler,
    Stage,
)

CHUNK = 64


@dataclass(eq=False)
class Job:
    """A request without an engine."""

    tokens: int
    new: int = 4
    state: Stage = Stage.WAITING
    began: int | None = None  # the step in which it got a slot


@dataclass
class Machine:
    """Does the work of a scheduler as an engine would, and notes what it did."""

    scheduler: Scheduler
    step: int = 0
    read: list[list[tuple[Prompt, int]]] = field(default_factory=list)  # by step
    log: list[str] = field(default_factory=list)

    def submit(self, tokens: int, *, n: int = 1, new: int = 4) -> list[Job]:
        jobs = [Job(tokens, new) for _ in range(n)]
        self.scheduler.add(jobs, tokens=tokens, size=tokens + new)
        return jobs

    def run_step(self) -> None:
        """One step: prompts, then one token of each row that runs."""
        self.step += 1
        self.read.append([])
        self.scheduler.begin_step()
        while (work := self.scheduler.schedule()) is not None:
            self.log.append(type(work).__name__)
            match work:
                case Begin(prompt):
                    chunks = [CHUNK] * -(-prompt.tokens // CHUNK)
                    chunks[-1] = min(
                        CHUNK, 8 * -(-(prompt.tokens - CHUNK * len(chunks[1:])) // 8)
                    )
                    self.scheduler.begin(prompt, chunks)
                case Read(prompt, tokens):
                    self.read[-1].append((prompt, tokens))
                case Assign(request=job):
                    job.began = self.step
        self.scheduler.take_finished()
        for job in [job for job in self.scheduler.running if job is not None]:
            job.new -= 1
            if job.new == 0:
                self.scheduler.end(job)

    def run_until(self, *jobs: Job, most: int = 10_000) -> None:
        while any(job.began is None for job in jobs):
            self.run_step()
            assert self.step < most


def machine(slots: int = 3, **settings) -> Machine:
    settings = {"prompt_tokens": CHUNK, "readers": 3} | settings
    return Machine(Scheduler([LONGEST] * slots, **settings))


def test_the_scheduler_imports_no_jax():
    path = importlib.util.find_spec("kvjax.serve.scheduler").origin
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('scheduler', {path!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['scheduler'] = module\n"
        "spec.loader.exec_module(module)\n"
        "module.Scheduler([4], prompt_tokens=1)\n"
        "assert not {'jax', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(path).parent)


def test_a_request_waits_is_read_runs_and_is_done():
    one = machine(slots=1)
    (job,) = one.submit(2 * CHUNK, new=2)
    assert job.state == "waiting"
    one.run_step()
    assert job.state == "reading"
    one.run_step()
    assert job.state == "running"
    one.run_step()
    assert job.state == "done"
    assert one.scheduler.idle
    assert one.log == ["Begin", "Read", "Read", "Assign"]


def test_a_short_prompt_does_not_wait_for_a_long_one():
    """It waited for 66 steps behind a prompt of 4096 tokens in chunks of 64, with slots free."""
    one = machine()
    (long,) = one.submit(4096)
    one.run_step()
    (short,) = one.submit(8)
    one.run_until(short)
    assert one.step <= 4
    one.run_until(long)
    assert one.step <= 68


@pytest.mark.parametrize("others", [[4096, 4096], [100_000, 40_000, 3000], [4096, 1000]])
def test_a_short_prompt_does_not_wait_for_several_long_ones(others):
    one = machine(slots=6)
    for tokens in others:
        one.submit(tokens)
        one.run_step()
    before = one.step
    (short,) = one.submit(8)
    one.run_until(short)
    assert one.step <= before + 3 or len(others) >= one.scheduler.readers


def test_one_step_reads_no_more_than_it_may():
    """Also while nobody decodes."""
    rng = random.Random(0)
    for prompt_tokens in (1, CHUNK, 5 * CHUNK):
        one = machine(slots=4, prompt_tokens=prompt_tokens)
        for _ in range(30):
            one.submit(rng.choice([8, 60, 64, 300, 2000]), new=rng.randint(1, 5))
        while not one.scheduler.idle:
            one.run_step()
        read = [sum(tokens for _, tokens in step) for step in one.read]
        assert max(read) <= max(prompt_tokens, CHUNK)
        assert max(len(step) for step in one.read) >= min(prompt_tokens // CHUNK, 2)


def test_a_step_reads_chunks_up_to_the_last_token_of_its_budget():
    """One below two chunks, just two, and one above; then no prompt begins."""
    for more, chunks in ((-1, 1), (0, 2), (1, 2)):
        one = machine(prompt_tokens=2 * CHUNK + more)
        one.submit(3 * CHUNK)
        one.run_step()
        assert len(one.read[0]) == chunks
    one = machine()
    one.submit(CHUNK)
    one.submit(CHUNK)
    one.run_step()
    assert one.log == ["Begin", "Read", "Assign"]


def test_a_prompt_overtakes_by_what_the_others_have_left():
    """Half of it: 64 tokens of 128 that are left, and no token more."""
    for tokens, overtakes in ((CHUNK - 1, True), (CHUNK, True), (CHUNK + 1, False)):
        one = machine()
        one.submit(10 * CHUNK)
        for _ in range(8):
            one.run_step()
        (other,) = one.submit(tokens)
        one.run_step()
        assert (other.state != "waiting") == overtakes


def test_a_prompt_that_just_fits_in_a_small_slot_overtakes():
    for size, overtakes in ((31, True), (32, True), (33, False)):
        one = Machine(Scheduler([5000, 32], prompt_tokens=CHUNK, readers=3))
        for tokens in (4096, 1000):  # both for the large slot
            one.submit(tokens)
            one.run_step()
        (short,) = one.submit(size - 4)
        one.run_step()
        assert (short.state != "waiting") == overtakes


def test_a_slot_is_wanted_if_a_request_could_run_in_it_at_once():
    one = machine(slots=1, park=1)
    assert not one.scheduler.wants_slot
    (running,) = one.submit(8, new=10**6)
    assert one.scheduler.wants_slot  # its prompt is read in the step that fills the slot
    one.run_until(running)
    assert not one.scheduler.wants_slot
    one.submit(2 * CHUNK)
    one.run_step()
    assert not one.scheduler.wants_slot  # while a prompt is being read
    one.run_step()
    assert one.scheduler.wants_slot
    for _ in range(3):
        one.run_step()
    assert one.scheduler.parked
    assert one.scheduler.wants_slot


def test_the_scheduler_knows_where_each_request_is():
    one = machine(slots=2)
    (running,) = one.submit(8, new=10**6)
    one.run_until(running)
    (reading,) = one.submit(4096)
    one.run_step()
    (waiting,) = one.submit(4096)
    slots = [one.scheduler.slot_of(job) for job in (running, reading, waiting)]
    assert slots == [0, None, None]
    assert set(one.scheduler.requests()) == {running, reading, waiting}
    one.scheduler.end(running)
    assert set(one.scheduler.requests()) == {reading, waiting}


def test_a_long_prompt_gets_every_other_chunk_however_many_short_ones_come():
    one = machine(slots=4)
    (long,) = one.submit(100 * CHUNK)
    one.run_step()
    while long.began is None:
        one.submit(8, new=1)
        one.run_step()
    assert one.step <= 2 * 100 + 4


def test_prompts_that_wait_are_begun_in_turn():
    """None waits for ever: the first row goes to the one that has waited longest."""
    one = machine(slots=2)
    middle = []
    for _ in range(4):
        middle += one.submit(20 * CHUNK, new=1)
    steps = 0
    while any(job.began is None for job in middle):
        one.submit(8, new=1)
        one.run_step()
        steps += 1
        assert steps < 400
    order = [job.began for job in middle]
    assert order == sorted(order)


def test_equal_prompts_are_read_one_after_another():
    """Reading them by turns would only let the first answer wait."""
    one = machine(slots=4)
    first, second = (one.submit(4 * CHUNK)[0] for _ in range(2))
    one.run_until(first, second)
    assert (first.began, second.began) == (4, 8)


def test_short_prompts_begin_beside_others_only_for_free_slots():
    one = machine(slots=1)
    (running,) = one.submit(8, new=10**6)
    one.run_until(running)
    one.submit(4096)
    one.submit(8)
    for _ in range(5):
        one.run_step()
    assert len(one.scheduler.reading) == 1
    one.scheduler.end(running)
    one.run_step()
    assert len(one.scheduler.reading) + sum(x is not None for x in one.scheduler.running) == 2


def test_prompts_are_read_once_for_their_requests_and_in_slots_in_order():
    one = machine(slots=2)
    jobs = one.submit(CHUNK, n=3, new=3)
    one.run_until(*jobs)
    assert one.log.count("Read") == 1
    assert jobs[0].began == jobs[1].began < jobs[2].began


def test_one_row_is_read_ahead_and_others_are_parked():
    one = machine(slots=1, park=2)
    (running,) = one.submit(8, new=10**6)
    for _ in range(6):
        one.submit(8)
    for _ in range(12):
        one.run_step()
    assert (len(one.scheduler.parked), len(one.scheduler.reading)) == (2, 1)
    assert one.log.count("Park") == 2
    assert one.scheduler.waiting == 6
    one.scheduler.end(running)
    for _ in range(40):
        one.run_step()
    assert one.scheduler.idle


def test_slots_of_several_sizes_take_what_fits():
    one = Machine(Scheduler([128, 32, 32], prompt_tokens=10 * CHUNK, readers=2))
    long, also, *short = (one.submit(n, new=5)[0] for n in (100, 90, 9, 20, 5))
    one.run_step()
    states = [job.state for job in (long, also, *short)]
    assert states == ["running", "waiting", "running", "reading", "running"]
    one.run_until(also, *short)
    assert short[1].began <= also.began


def test_a_small_slot_is_not_kept_from_a_short_request():
    one = Machine(Scheduler([1000, 32], prompt_tokens=CHUNK, readers=2))
    (running,) = one.submit(100, new=900)
    one.run_until(running)
    one.submit(100)
    (short,) = one.submit(9)
    one.run_until(short, most=10)


def test_a_refused_prompt_holds_up_those_that_came_later():
    refused = set()
    one = machine(admit=lambda prompt: prompt.requests[0] not in refused)
    first, second = (one.submit(8)[0] for _ in range(2))
    refused.add(first)
    for _ in range(4):
        one.run_step()
    assert first.began is second.began is None
    refused.clear()
    one.run_step()
    one.run_step()
    assert first.began is not None
    one.run_until(second)
    assert first.began <= second.began


def test_a_row_that_cannot_be_made_lets_its_prompt_wait():
    one = machine()
    (long,) = one.submit(4096)
    one.run_step()
    (short,) = one.submit(8)
    one.scheduler.begin_step()
    work = one.scheduler.schedule()
    assert isinstance(work, Begin)
    assert work.prompt.requests == (short,)
    one.scheduler.put_back(work.prompt)
    assert (short.state, one.scheduler.readers) == ("waiting", 1)
    one.run_until(long, short)
    assert long.began < short.began


def test_a_prompt_that_was_put_back_begins_only_when_others_have_left():
    """Also where it would have the first row: else `schedule` would begin it again and again, and
    the others would not be read.
    """
    one = machine(slots=3)
    first, second = (one.submit(tokens)[0] for tokens in (CHUNK, 4096))
    one.scheduler.begin_step()
    begun = one.scheduler.schedule()
    assert isinstance(begun, Begin)
    one.scheduler.begin(begun.prompt, [CHUNK])
    (third,) = one.submit(4096)
    one.scheduler._begin(one.scheduler._oldest_waiting())
    one.scheduler.begin(one.scheduler.reading[1], [CHUNK] * 64)

    # The first is read and gets a slot; the third then takes the first row.
    assert isinstance(one.scheduler.schedule(), Read)
    one.scheduler.begin_step()
    assert isinstance(one.scheduler.schedule(), Assign)
    assert first.state == "running"
    work = one.scheduler.schedule()
    assert isinstance(work, Begin)
    assert work.prompt.requests == (third,)

    one.scheduler.put_back(work.prompt)
    assert one.scheduler.readers == 1
    work = one.scheduler.schedule()
    assert isinstance(work, Read)
    assert work.prompt.requests == (second,)
    one.run_until(second, third)


def test_a_prompt_that_nobody_wants_any_more_costs_no_reader():
    one = machine()
    one.submit(4096)
    one.run_step()
    (short,) = one.submit(8)
    one.scheduler.begin_step()
    work = one.scheduler.schedule()
    one.scheduler.end(short)
    one.scheduler.put_back(work.prompt)
    assert one.scheduler.readers == 3


def test_random_requests_all_get_slots_and_nothing_stays():
    """Requests come and are cancelled in every stage."""
    for seed in range(60):
        rng = random.Random(seed)
        sizes = rng.choice([[LONGEST] * rng.randint(1, 4), [4096, 512, 64]])
        one = Machine(
            Scheduler(
                sizes,
                prompt_tokens=rng.choice([1, CHUNK, 300]),
                readers=rng.randint(1, 4),
                park=rng.randint(0, 2),
            )
        )
        jobs, cancelled = [], set()
        for _ in range(40):
            if rng.random() < 0.6:
                tokens = rng.choice([1, 8, 50, 64, 65, 400, 3000])
                jobs += one.submit(tokens, n=rng.choice([1, 1, 3]), new=rng.randint(1, 9))
            if rng.random() < 0.7:
                one.run_step()
            live = [job for job in jobs if job.state is not Stage.DONE]
            if live and rng.random() < 0.3:
                job = rng.choice(live)
                cancelled.add(job)
                one.scheduler.end(job)
            assert one.scheduler.waiting == sum(
                job.state in (Stage.WAITING, Stage.READING) for job in jobs
            )
            assert len(one.scheduler.reading) <= one.scheduler.readers
            assert len(one.scheduler.parked) <= one.scheduler.park
        for _ in range(4000):
            if one.scheduler.idle:
                break
            one.run_step()
        assert one.scheduler.idle
        assert all(job.state is Stage.DONE for job in jobs)
        assert all(job.began is not None for job in jobs if job not in cancelled)
        assert not one.scheduler.reading
        assert not one.scheduler.parked


def test_a_queue_forgets_prompts_that_left():
    queue = Queue()
    for i in range(1000):
        prompt = Prompt((), [], tokens=i % 7, size=1, arrival=i)
        queue.add(prompt)
        if i:
            queue.remove(prompt)
    assert len(queue) == 1
    assert len(queue._by_length) < 64
    assert queue.oldest is queue.shortest


def test_the_shortest_and_the_oldest_are_found_and_one_put_back_keeps_its_place():
    queue = Queue()
    prompts = [Prompt((), [], tokens=n, size=1, arrival=i) for i, n in enumerate((9, 3, 5, 3))]
    for prompt in prompts:
        queue.add(prompt)
    assert (queue.oldest, queue.shortest) == (prompts[0], prompts[1])
    queue.remove(prompts[1])
    assert queue.shortest is prompts[3]
    queue.remove(prompts[0])
    assert queue.oldest is prompts[2]
    queue.add(prompts[1])
    assert list(queue) == [prompts[1], prompts[2], prompts[3]]
    assert (queue.oldest, queue.shortest) == (prompts[1], prompts[1])
