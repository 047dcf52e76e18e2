"""The simulator finds races, in kernels of a few words and in kernels that lack one of their barriers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.host import hot_pages
from kvjax.kernels_pallas.simt import ptx, when
from kvjax.kernels_pallas.write import put_token
from kvjax.stores.hot import empty_hot
from tests.kernels.conftest import ON_GPU
from tests.kernels.inputs import normal
from tests.kernels.simulate import Simulator

pytestmark = pytest.mark.skipif(ON_GPU, reason="of the simulator")


@pytest.fixture(autouse=True)
def simulated():
    with simt.use(Simulator()):
        yield


def run(program, *args, blocks=1, cluster=None, scratch=(), words=256):
    """What a kernel of blocks of 128 threads writes: out[words]. The rest of it may stay unwritten."""
    out = jax.ShapeDtypeStruct((words,), jnp.uint32)
    kernel = simt.kernel(
        program, name="k", blocks=blocks, warpgroups=1, cluster=cluster, out_type=(out,), scratch=scratch, sparse=(0,)
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
def test_device_memory_that_a_thread_wrote_is_read_after_a_barrier_of_both(barrier, apart, sees):
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
    """A program of which body(t, at) has 128 words of shared memory at `at`; each thread writes its own first."""

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
    np.testing.assert_array_equal(copied, np.where(np.arange(128) < 64, 4 * np.arange(128), 0xFFFFFFFF))


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


def without(monkeypatch, module, n):
    """The module's kernels without their n-th barrier of a block."""
    calls, barrier = [], module.block_barrier

    def some():
        calls.append(1)
        if len(calls) != n:
            barrier()

    monkeypatch.setattr(module, "block_barrier", some)
    return calls


def places(n=40, N=17, P=90):
    """A step that finds some pages, misses some and replaces some."""
    tables = empty_hot((1, 2), n, P, 1, 8, jnp.bfloat16).tables
    rng = np.random.default_rng(0)
    for _ in range(4):
        index = jnp.asarray(np.stack([rng.permutation(60)[:N] for _ in range(2)])[None], jnp.int32)
        tables, at = hot_pages.hot_places(tuple(tables), index, jnp.full((1, 2), N, jnp.int32))
    return at


@pytest.mark.parametrize("barrier", range(1, 6))
def test_each_barrier_of_the_places_of_a_hot_set_is_needed(barrier, monkeypatch):
    calls = without(monkeypatch, hot_pages, barrier + 5)  # of the second step
    with raises("races with|may still read|nothing wrote"):
        jax.block_until_ready(places())
    assert len(calls) >= barrier + 5


@pytest.mark.parametrize("several", [False, True])
def test_the_barrier_of_a_written_token_is_needed(several, monkeypatch):
    zones = [(*(normal(s, 2, 2, 8, 64, dtype=jnp.bfloat16) for s in (1, 2)), jnp.array([3, 7]))]
    k, v = (normal(s, 2, 2, 3 if several else 1, 64, dtype=jnp.bfloat16) for s in (3, 4))
    due = jnp.array([2, 1]) if several else jnp.array([True, True])
    run = put_token.put_tokens if several else put_token.put_token
    jax.block_until_ready(run(zones, k, v, due, jnp.zeros(2, bool)))
    monkeypatch.setattr(simt, "block_barrier", lambda: None)
    with raises("may still read"):
        jax.block_until_ready(run(zones, k, v, due, jnp.zeros(2, bool)))
