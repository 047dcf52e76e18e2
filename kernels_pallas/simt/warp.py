"""Instructions that the threads of a warp, a block or a cluster run together."""

from __future__ import annotations

from collections.abc import Sequence

from kvjax.kernels_pallas.simt.backend import has_cluster, parts
from kvjax.kernels_pallas.simt.memory import load_shared
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
    """One bit for each lane of the warp, set if the lane's flag is true. All lanes get the same
    word.
    """
    return ptx("vote.sync.ballot.b32 $0, $1, -1;", flag, results=1, convergent=True)


def warp_sum(x: Word) -> Word:
    """The sum of x over the lanes of a warp. All lanes get it."""
    return instr("redux.sync.add.u32", x, -1, convergent=True)


def sum_of_next_lanes(x: Word) -> Word:
    """The sum of x over the lanes of a warp that come after this one."""
    lane = special("laneid")
    upward = x  # the sum over this lane and those after it
    for gap in (1, 2, 4, 8, 16):
        other = ptx(
            "shfl.sync.down.b32 $0, $1, $2, 31, -1;", upward, gap, results=1, convergent=True
        )
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


def mma_sparse(
    kind: str, acc: Sequence[Word], right: Sequence[Word], pattern: Word, of: int
) -> list[Word]:
    """acc f32[16, 8] + a[16, 32] @ b[32, 8], where a has two ones in each four adjacent columns.

    `right` is b, in which a lane has rows 2 col, 2 col + 1 and these plus 8, 16 and 24. A nibble
    of `pattern` has the columns of the two ones, the lower in its lower half. Lanes of columns 2
    `of` and 2 `of` + 1 have those of rows `quad`, in the lower half of the word, and `quad` + 8
    for the first and the second 16 columns.
    """
    one = 0x3F803F80 if kind == "bf16" else 0x3C003C00
    return ptx(
        f"mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.{kind}.{kind}.f32 {{$0, $1, $2, $3}}, "
        f"{{$4, $4, $4, $4}}, {{$5, $6, $7, $8}}, {{$9, $10, $11, $12}}, $13, {of};",
        *(one, *right, *acc, pattern),
        results=4,
        convergent=True,
    )


def wgmma(
    sums: Sequence[Sequence[Word]], lefts: Sequence[Sequence[Sequence[Word]]], right: Word, steps: Sequence[int],
    lead: int,
) -> list[list[Word]]:  # fmt: skip
    """sums[i] f32[64, N] + sum over s of a[64, 16] @ b[16, N] in bf16, of a warpgroup, on
    compute capability 9.0.

    A warp has 16 rows of sums and of a = lefts[i][s], as `mma` has them, 8 columns after the
    other. b is in shared memory at right + steps[s], as 8 x 8 matrices with b's columns as
    rows: N/8 one after the other of the upper 8 rows of b, and `lead` bytes further those of
    the lower ones. Writes to b need `fence.proxy.async` before a barrier.
    """
    each = len(sums[0])
    results = each * len(sums)
    left = [x for own in lefts for four in own for x in four]
    low = results * 2 + len(left)
    high = results * 2 + len(left) + 1
    code = [
        "{ .reg .b32 " + ", ".join(f"d{i}" for i in range(results)) + ", at; .reg .b64 matrix; "
    ]
    code += [f"mov.b32 d{i}, ${results + i}; " for i in range(results)]
    code.append("wgmma.fence.sync.aligned; ")
    for s, step in enumerate(steps):
        code.append(f"add.u32 at, ${low}, {step >> 4}; mov.b64 matrix, {{at, ${high}}}; ")
        for i, own in enumerate(lefts):
            d = ", ".join(f"d{each * i + n}" for n in range(each))
            a = ", ".join(f"${2 * results + 4 * (len(own) * i + s) + n}" for n in range(4))
            code.append(
                f"wgmma.mma_async.sync.aligned.m64n{2 * each}k16.f32.bf16.bf16 {{{d}}}, {{{a}}}, matrix, 1, 1, 1, 0; "
            )
    code.append("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; ")
    code += [f"mov.b32 ${i}, d{i}; " for i in range(results)]
    address = ((right >> 4) & 0x3FFF) | (lead >> 4 << 16)
    own_sums = [x for own in sums for x in own]
    found = ptx(
        "".join(code) + "}",
        *own_sums,
        *left,
        address,
        128 >> 4,
        results=results,
        convergent=True,
    )
    return [found[each * i : each * (i + 1)] for i in range(len(sums))]


def products(
    sums: Sequence[Sequence[Word]], lefts: Sequence[Sequence[Sequence[Word]]], right: Word, steps: Sequence[int],
    lead: int, wide: bool,
) -> list[list[Word]]:  # fmt: skip
    """`wgmma` if `wide`; else the same by `mma`, with the same operands."""
    if wide:
        return wgmma(sums, lefts, right, steps, lead)
    found = [list(x) for x in sums]
    at = right + (special("tid.x") & 31) * 4
    for s, step in enumerate(steps):
        for c in range(len(found[0]) // 4):
            of_column = [load_shared(at + (step + half * lead + c * 128)) for half in range(2)]
            for own, left in zip(found, lefts, strict=True):
                own[4 * c : 4 * c + 4] = mma("bf16", own[4 * c : 4 * c + 4], left[s], of_column)
    return found


def warp_barrier() -> None:
    ptx("bar.warp.sync -1;", convergent=True)


def block_barrier() -> None:
    ptx("bar.sync 0;", convergent=True)


def barrier_of(number: Word, threads: int | Word) -> None:
    """A barrier of some whole warps of the block, with a number of their own from 1 to 15."""
    ptx("bar.sync $0, $1;", number, threads, convergent=True)


def any_of_warps(flag: Word, number: Word, threads: int) -> Flag:
    """True in all threads if the word of any is not 0; and a `barrier_of` them."""
    code = "{ .reg .pred p, q; setp.ne.u32 q, $1, 0; bar.red.or.pred p, $2, $3, q; selp.u32 $0, 1, 0, p; }"
    return ptx(code, flag, number, threads, results=1, convergent=True).differs(0)


def cluster_barrier() -> None:
    """A barrier of all threads of the cluster. After it, all see what each wrote to shared and
    device memory.
    """
    cluster_arrive()
    cluster_wait()


def cluster_arrive(order: str = "release") -> None:
    """The first half of `cluster_barrier`: all threads see after `cluster_wait` what was
    written before it, unless the order is "relaxed"."""
    if has_cluster():
        ptx(f"barrier.cluster.arrive.{order};", convergent=True)


def cluster_wait() -> None:
    if has_cluster():
        ptx("barrier.cluster.wait.acquire;", convergent=True)
    else:
        block_barrier()
