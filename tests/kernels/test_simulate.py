"""The simulator finds races, in small kernels and in kernels that lack one of their barriers."""

import linecache
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import kernels_pallas, ops
from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.attend import attend_slots, attend_span
from kvjax.kernels_pallas.delta import delta_rule, delta_step
from kvjax.kernels_pallas.host import hot_pages
from kvjax.kernels_pallas.score import score_1bit
from kvjax.kernels_pallas.select import tiling
from kvjax.kernels_pallas.simt import ptx, when
from kvjax.kernels_pallas.vote import most_voted
from kvjax.kernels_pallas.write import put_token
from kvjax.numerics.partial import Logits
from tests.kernels import test_delta_rule, test_delta_step
from tests.kernels.conftest import ON_GPU
from tests.kernels.inputs import boxes, index, normal
from tests.kernels.simulate import Simulator
from tests.kernels.test_steps import candidates

pytestmark = pytest.mark.skipif(ON_GPU, reason="of the simulator")


@pytest.fixture(autouse=True)
def simulated():
    with simt.use(Simulator()):
        yield


def run(program, *args, blocks=1, cluster=None, scratch=(), words=256):
    """The output of a kernel of blocks of 128 threads: out[words]. The rest of it may stay
    unwritten.
    """
    out = jax.ShapeDtypeStruct((words,), jnp.uint32)
    kernel = simt.kernel(
        program,
        name="k",
        blocks=blocks,
        warpgroups=1,
        cluster=cluster,
        out_type=(out,),
        scratch=scratch,
        sparse=(0,),
    )
    return np.asarray(jax.block_until_ready(kernel(*args))[0])


def raises(match):
    return pytest.raises(jax.errors.JaxRuntimeError, match=match)


def words_of(out, i):
    return simt.offset_rows(simt.global_address(out), i, 4)


def store(at, x):
    ptx("st.global.u32 [$0], $1;", at, x)


def load(at):
    return ptx("ld.global.u32 $0, [$1];", at, results=1)


def neighbours(barrier, apart, blocks=1):
    """Each thread writes a word, and reads that of the thread whose number differs by `apart`."""

    def program(out):
        t = simt.special("ctaid.x") * 128 + simt.special("tid.x")
        store(words_of(out, t), t)
        barrier()
        x = load(words_of(out, t ^ apart))
        simt.block_barrier()
        store(words_of(out, t), x)

    return partial(run, program, blocks=blocks)


@pytest.mark.parametrize(
    ("barrier", "apart", "sees"),
    [("block_barrier", 32, None), ("warp_barrier", 1, None), ("warp_barrier", 32, "races")],
)
def test_device_memory_that_a_thread_wrote_is_read_after_a_barrier_of_both(
    barrier, apart, sees
):
    go = neighbours(getattr(simt, barrier), apart)
    if sees:
        with raises("races with the write of .* to device memory"):
            go()
    else:
        np.testing.assert_array_equal(go()[:128], np.arange(128) ^ apart)


def test_no_barrier_is_one_of_two_blocks():
    with raises("races with the write of .* to device memory"):
        neighbours(simt.block_barrier, 128, blocks=2)()


def test_threads_may_store_equal_values_to_one_place_and_no_others():
    def program(out, *, of_thread):
        t = simt.special("tid.x")
        for _ in range(2):
            store(words_of(out, t & 1), t & of_thread)

    assert run(partial(program, of_thread=1))[:2].tolist() == [0, 1]
    with raises("different values to one place"):
        run(partial(program, of_thread=3))


def test_a_later_store_of_another_value_needs_a_barrier():
    def program(out):
        t = simt.special("tid.x")
        with when(t < 32):
            store(words_of(out, t), t)
        with when((t >= 32) & (t < 64)):
            store(words_of(out, t & 31), t)

    with raises("races with the write"):
        run(program)


def test_a_constant_load_is_of_what_the_kernel_never_writes():
    def program(out, *, first):
        t = simt.special("tid.x")
        with when(t < 64):
            store(words_of(out, t), t)
        if first:
            store(words_of(out, t), t)
        simt.block_barrier()
        x = simt.load(words_of(out, t & 63))
        simt.block_barrier()
        store(words_of(out, t), x)

    with raises("reads as constant what the kernel wrote"):
        run(partial(program, first=True))

    def in_place(changed):
        t = simt.special("tid.x")
        x = simt.load(words_of(changed, t))
        simt.block_barrier()
        store(words_of(changed, t), x + 1)

    kernel = simt.kernel_in_place(in_place, name="k", blocks=1, warpgroups=1)
    with raises("what another read as constant"):
        jax.block_until_ready(kernel([jnp.zeros(128, jnp.uint32)]))


def of_shared(body):
    """A program of which body(t, at) has 128 words of shared memory at `at`; each thread writes
    its own first.
    """

    def program(_, room):
        t, at = simt.special("tid.x"), simt.shared_address(room)
        simt.store_shared(at + t * 4, t)
        body(t, at)

    return partial(run, program, scratch=(128,))


def test_a_reader_is_remembered_when_the_writer_reads_later():
    def body(t, at):
        simt.block_barrier()
        with when(t < 32):
            simt.load_shared(at)
        with when((t >= 32) & (t < 64)):
            simt.load_shared(at)
            simt.warp_barrier()
        with when(t.equals(32)):
            simt.store_shared(at, t)

    with raises("overwrites what .* may still read in shared memory"):
        of_shared(body)()


def test_all_readers_of_one_load_are_remembered():
    def body(t, at):
        simt.block_barrier()
        simt.load_shared(at)
        with when(t >= 96):
            simt.warp_barrier()
        with when(t.equals(127)):  # the last of the readers
            simt.store_shared(at, t)

    with raises("overwrites what .* may still read in shared memory"):
        of_shared(body)()


def test_all_atomic_additions_are_remembered():
    def body(t, at):
        simt.block_barrier()
        ptx("red.shared.add.u32 [$0], 1;", at)
        with when(t >= 96):
            simt.warp_barrier()
            simt.load_shared(at)

    with raises("races with the write"):
        of_shared(body)()


@pytest.mark.parametrize("how", ["relaxed.gpu.", ""])
def test_blocks_may_add_to_a_word_that_others_read_relaxed(how):
    """And the last of them knows that all have read it."""

    def program(out):
        t = simt.special("ctaid.x") * 128 + simt.special("tid.x")
        read = ptx(f"ld.{how}global.u32 $0, [$1];", words_of(out, simt.word(0)), results=1)
        simt.block_barrier()
        with when((t & 127).equals(0)):
            add = "atom.relaxed.gpu.global.add.u32 $0, [$1], $2;"
            ticket = ptx(add, words_of(out, simt.word(0)), 1 << 16, results=1) >> 16
            store(words_of(out, (t >> 7) + 1), ticket + (read & 255))

    go = simt.kernel_in_place(program, name="k", blocks=3, warpgroups=1)
    words = jnp.full(4, 7, jnp.uint32)
    if how:
        assert go((words,))[0].tolist() == [7 + (3 << 16), 7, 8, 9]
    else:
        with raises("may still read in device memory"):
            jax.block_until_ready(go((words,)))


def test_two_barriers_of_some_threads_are_not_one():
    def body(t, at, *, apart):
        for n in range(2):
            with when((t >> 6).equals(n)):
                ptx(f"bar.sync {n + 1}, 64;", convergent=True)
        simt.load_shared(at + (t ^ apart) * 4)

    of_shared(partial(body, apart=32))()
    with raises("races with the write"):
        of_shared(partial(body, apart=64))()


def test_a_thread_waits_for_its_own_copies_alone():
    def program(x, out, room):
        t = simt.special("tid.x")
        at = simt.shared_address(room) + t * 16
        copy = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
        ptx(copy, at, simt.offset_rows(simt.global_address(x), t, 16), 16)
        ptx("cp.async.commit_group;")
        with when(t < 64):
            ptx("cp.async.wait_group 0;")
        simt.block_barrier()
        x = simt.load_shared(at)
        ptx("cp.async.wait_group 0;")
        store(words_of(out, t), x)

    copied = run(program, jnp.arange(512, dtype=jnp.uint32), scratch=(512,))[:128]
    np.testing.assert_array_equal(
        copied, np.where(np.arange(128) < 64, 4 * np.arange(128), 0xFFFFFFFF)
    )


def of_cluster(before, after):
    def program(_, room):
        at, part = simt.shared_address(room), simt.special("cluster_ctarank")
        simt.store_shared(at + simt.special("tid.x") * 4, 1)
        before()
        other = simt.remote(at + simt.special("tid.x") * 4, part ^ 1)
        ptx("ld.shared::cluster.u32 $0, [$1];", other, results=1)
        after()

    return partial(run, program, cluster=2, scratch=(128,))


def test_a_block_touches_anothers_memory_after_it_began_and_before_it_ends():
    of_cluster(simt.cluster_barrier, simt.cluster_barrier)()
    with raises("may not have begun"):
        of_cluster(simt.block_barrier, simt.cluster_barrier)()
    with raises("may end while another touches"):
        of_cluster(simt.cluster_barrier, simt.block_barrier)()


def test_a_relaxed_arrival_orders_no_writes():
    def relaxed():
        ptx("barrier.cluster.arrive.relaxed;", convergent=True)
        simt.cluster_wait()

    with raises("races with the write"):
        of_cluster(relaxed, simt.cluster_barrier)()


# ------------------------------------------------------------------------- kernels without one of their barriers


class Without(Simulator):
    """A simulator that leaves out the barriers of one place in the code, and notes all places."""

    def __init__(self, place=None):
        super().__init__()
        self.place, self.places = place, set()

    def ptx(self, code, *args):
        if code.startswith(("bar.", "barrier.")):
            place = self._place()
            self.places.add(place)
            if place == self.place:
                return []
        return super().ptx(code, *args)

    def _place(self):
        """File and line of the two functions nearest to the barrier, past the words themselves."""
        found, frame = [], sys._getframe(2)
        while frame and len(found) < 2:
            file = frame.f_code.co_filename.replace("\\", "/").partition("kernels_pallas/")[2]
            if file and not file.startswith("simt/"):
                found.append(f"{file}:{frame.f_lineno}")
            frame = frame.f_back
        return tuple(found)


def places():
    """A step of a hot set that finds some pages, misses some and replaces some."""
    rng, (n, N, P) = np.random.default_rng(0), (40, 17, 90)
    tables = [
        jnp.asarray(rng.permutation(P)[:n], jnp.int32)[None, None],
        jnp.ones((1, 1, n), jnp.int32),
    ]
    place = jnp.zeros((1, 1, P), jnp.int32).at[0, 0, tables[0][0, 0]].set(jnp.arange(n))
    tables += [place, jnp.full((1, 1), 9, jnp.int32), jnp.zeros((1, 1), jnp.int32)]
    index = jnp.asarray(rng.permutation(P)[:N], jnp.int32)[None, None]
    return hot_pages.hot_places(tables, index, jnp.full((1, 1), N, jnp.int32))


def written(put, due, T):
    zones = [(*(normal(s, 2, 2, 8, 64, dtype=jnp.bfloat16) for s in (1, 2)), jnp.array([3, 7]))]
    return put(
        zones,
        *(normal(s, 2, 2, T, 64, dtype=jnp.bfloat16) for s in (3, 4)),
        due,
        jnp.zeros(2, bool),
    )


def spans():
    q, k = (
        normal(1, 1, 1, 8, 64, dtype=jnp.bfloat16),
        normal(2, 1, 1, 400, 64, dtype=jnp.bfloat16),
    )
    ends = jnp.zeros((1, 2), jnp.int32), jnp.array([[350, 351]], jnp.int32)
    return attend_span.attend_span(
        q, k, k, *ends, scale=0.1, config=attend_span.Config(1, stages=1, keys=16)
    )


def slots():
    q, k = (
        normal(1, 1, 1, 2, 64, dtype=jnp.bfloat16),
        normal(2, 1, 1, 300, 64, dtype=jnp.bfloat16),
    )
    chosen = jnp.arange(290)[None, None, None], jnp.ones((1, 1, 1, 290), bool)
    return attend_slots.attend_slots(
        q, k, k, *chosen, scale=0.1, config=attend_slots.Config(2, 1)
    )


def scores():
    config = score_1bit.Config(units=8, stages=2)
    return score_1bit.score_1bit(
        normal(1, 1, 1, 5, 64),
        *index(1, 1, 256, 64, 32, jnp.bfloat16),
        scale=0.1,
        config=config,
    )


def chosen_1bit():
    among = candidates(1, 1, 2, 40, 64, 160, 36, 25)
    keys = index(1, 1, 160, 64, 32, jnp.bfloat16)
    q = normal(1, 1, 1, 8, 64, dtype=jnp.bfloat16).astype(jnp.float32)
    return ops.select_1bit.run_kernel(
        q=q, keys=keys, candidates=among, group_reduce="mean_softmax", logits=Logits(0.1)
    )


def chosen_pages():
    q, (low, high) = (
        normal(2, 1, 1, 6, 64, dtype=jnp.bfloat16).astype(jnp.float32),
        boxes(1, 1, 21, 64, jnp.bfloat16),
    )
    among = candidates(1, 1, 2, 40, 64, 21 * 16, 32, 7)
    how = {"group_reduce": "mean_softmax", "unit": 16, "logits": Logits(0.1)}
    return ops.select_pages.run_kernel(q=q, low=low, high=high, candidates=among, **how)


def voted():
    votes = jnp.asarray(np.random.default_rng(0).integers(0, 9, (1, 1, 1, 9008)), jnp.uint8)
    two = jnp.array([9000], jnp.int32), jnp.array([700], jnp.int32)
    return most_voted.most_voted(votes, *two, 700, config=most_voted.Config(2, 2))


def of_two_blocks(select):
    """A selection whose rows have two blocks each, as longer rows have."""
    with mock.patch.object(tiling, "config_for", return_value=tiling.Config(blocks=2)):
        return select()


# Barriers that a case can do without, by what is in the line before or after. attend_span waits
# once more for copies after its loop, which has waited for all. select_1bit fills no stage of the
# ring of score_1bit twice here, which score_1bit itself does. A row of one block has its list of
# pairs before the barrier of `sum_before`, so the wait of its cluster adds nothing; with two
# blocks it does.
ALONE = "out.finish(cut.wanted, config.blocks)"
STAGES = "with when(i + stages < self.iterations):"
NOT_NEEDED = {
    "attend_span": ("cp.async.wait_group 0;",),
    "select_1bit": (STAGES, ALONE),
    "select_1bit of two blocks": (STAGES,),
    "select_pages": (ALONE,),
}


def lines_around(place):
    """The lines before and after that of a barrier."""
    file, line = place[0].split(":")
    path = str(Path(kernels_pallas.__path__[0]) / file)
    return [linecache.getline(path, int(line) + by).strip() for by in (-1, 1)]


def stepped():
    args = test_delta_step.step_of(1, 1, 1, 64, 32, held=(3,))
    return delta_step.delta_step(*args)


def read():
    args = test_delta_rule.prompt_of(1, 70, 1, 1)
    return delta_rule.delta_rule(*args, dtype=jnp.bfloat16)


KERNELS = {
    "hot_places": places,
    "put_token": partial(written, put_token.put_token, jnp.array([True, True]), 1),
    "put_tokens": partial(written, put_token.put_tokens, jnp.array([2, 1]), 3),
    "attend_span": spans,
    "attend_slots": slots,
    "score_1bit": scores,
    "select_1bit": chosen_1bit,
    "select_1bit of two blocks": partial(of_two_blocks, chosen_1bit),
    "select_pages": chosen_pages,
    "select_pages of two blocks": partial(of_two_blocks, chosen_pages),
    "most_voted": voted,
    "delta_step": stepped,
    "delta_rule": read,
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", KERNELS)
def test_each_barrier_of_a_kernel_is_needed(name):
    """And the simulator sees it: so it would also see where one is missing."""
    whole = Without()
    with simt.use(whole):
        jax.block_until_ready(KERNELS[name]())
    assert whole.places
    seen = "races with|may still read|nothing wrote|may not have begun|may end while|did not arrive|have not waited"
    for place in sorted(whole.places):
        around = lines_around(place)
        if any(text in line for text in NOT_NEEDED.get(name, ()) for line in around):
            continue
        with simt.use(Without(place)), raises(seen):
            jax.block_until_ready(KERNELS[name]())
            pytest.fail(f"{name} does without its barrier at {place}")
