"""Instructions that the threads of a warp, a block or a cluster run together."""

from __future__ import annotations

from collections.abc import Sequence

from kvjax.kernels_pallas.simt.backend import has_cluster, parts
from kvjax.kernels_pallas.simt.word import Flag, Operand, Word, divide, instr, ptx, word


def special(name: str) -> Word:
    """A special register, such as tid.x."""
    return ptx(f"mov.u32 $0, %{name};", results=1)


def part() -> Word:
    """The number of this block among those of its row, which may be a cluster."""
    if has_cluster():
        return special("cluster_ctarank")
    return special("ctaid.x") - row() * parts() if parts() > 1 else word(0)


def row() -> Word:
    """The row of this block, with a cluster, `Launch.parts` blocks or one block a row."""
    return special("clusterid.x") if has_cluster() else divide(special("ctaid.x"), parts())


def bfly(x: Word, gap: int) -> Word:
    """x of the lane whose number differs in the bit `gap`."""
    return ptx("shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", x, gap, results=1, convergent=True)


def from_lane(x: Word, lane: Operand) -> Word:
    return ptx("shfl.sync.idx.b32 $0, $1, $2, 31, -1;", x, lane, results=1, convergent=True)


def ballot(flag: Flag) -> Word:
    """One bit for each lane of the warp, set if the lane's flag is true. All lanes get the same word."""
    return ptx("vote.sync.ballot.b32 $0, $1, -1;", flag, results=1, convergent=True)


def warp_sum(x: Word) -> Word:
    """The sum of x over the lanes of a warp. All lanes get it."""
    return instr("redux.sync.add.u32", x, -1, convergent=True)


def sum_of_next_lanes(x: Word) -> Word:
    """The sum of x over the lanes of a warp that come after this one."""
    lane, upward = special("laneid"), x  # of this lane and those after it
    for gap in (1, 2, 4, 8, 16):
        other = ptx("shfl.sync.down.b32 $0, $1, $2, 31, -1;", upward, gap, results=1, convergent=True)
        upward = upward + (lane + gap < 32).select(other, 0)
    return upward - x


def mma(kind: str, acc: Sequence[Word], a: Sequence[Word], b: Sequence[Word]) -> list[Word]:
    """acc f32[16, 8] + a[16, 16] @ b[16, 8], where a and b are of `kind`, "bf16" or "f16".

    The PTX manual shows under m16n8k16 which lane has which element.
    """
    return ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, "
        "{$8, $9}, {$10, $11, $12, $13};",
        *(*a, *b, *acc),
        results=4,
        convergent=True,
    )


def warp_barrier() -> None:
    ptx("bar.warp.sync -1;", convergent=True)


def block_barrier() -> None:
    ptx("bar.sync 0;", convergent=True)


def cluster_barrier() -> None:
    """A barrier of all threads of the cluster. After it, all see what each wrote to shared and device memory."""
    cluster_arrive()
    cluster_wait()


def cluster_arrive(order: str = "release") -> None:
    """The first half of `cluster_barrier`: all threads see after `cluster_wait` what was written before it, unless the
    order is "relaxed"."""
    if has_cluster():
        ptx(f"barrier.cluster.arrive.{order};", convergent=True)


def cluster_wait() -> None:
    if has_cluster():
        ptx("barrier.cluster.wait.acquire;", convergent=True)
    else:
        block_barrier()
