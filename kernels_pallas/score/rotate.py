"""Rotates a query within one warp, as `kvjax.numerics.rotate` does: signs, then log2 D rounds
of sums and differences.

A lane holds D/32 adjacent channels. The first rounds stay within a lane, and five use shuffles.
This replaces a launch of an XLA matrix product. Costs: `benchmarks/NOTES.md`.
"""

from __future__ import annotations

from typing import Any

from kvjax.kernels_pallas import simt
from kvjax.kernels_pallas.simt import Word, instr, ptx, real, word


def channels(q: Any, D: int) -> list[Word]:
    """This lane's D/32 channels of f32[D] at q; D is 64 or 128."""
    lane = simt.special("laneid")
    n = D // 32
    vector = "{" + ", ".join(f"${i}" for i in range(n)) + "}"
    return ptx(
        f"ld.global.nc.v{n}.u32 {vector}, [${n}];", simt.offset(q, lane * (4 * n)), results=n
    )


def rotated(x: list[Word], turned: int | None) -> list[Word]:
    """This lane's channels of sqrt(D) R q, from its `channels` x of q; x if `turned` is None.
    `turned` has the bits of the channels whose sign R flips first."""
    if turned is None:
        return x
    lane = simt.special("laneid")
    n = len(x)
    signs = word(turned & 0xFFFFFFFF)
    for i in range(1, n):
        signs = (lane >= i * (32 // n)).select(turned >> (32 * i) & 0xFFFFFFFF, signs)
    signs = signs >> ((lane & (32 // n - 1)) * n)
    x = [y ^ ((signs << (31 - i)) & 0x80000000) for i, y in enumerate(x)]
    for gap in (1, 2)[: n // 2]:
        pairs = [(i, i + gap) for i in range(n) if not i & gap]
        for i, j in pairs:
            x[i], x[j] = instr("add.f32", x[i], x[j]), instr("sub.f32", x[i], x[j])
    for gap in (1, 2, 4, 8, 16):
        sign = (lane & gap).equals(0).select(real(1.0), real(-1.0))
        x = [instr("fma.rn.f32", y, sign, simt.bfly(y, gap)) for y in x]
    return x
