"""Attention over keys and values of 2 and 4 bits, which are decoded in registers, into the operands of `mma`.

A code c of b bits becomes the bf16 number 1 + c / 2^b by a shift, an and and an or for two of them (its bits are the
highest of the mantissa), less 1; one `fma` with scale 2^b and zero makes the two values, rounded to bf16 once. Scores
are S^T = K q^T, 16 keys the rows and 8 heads the columns of a product, and the mix is O^T = V^T P^T; channels are taken
in the order in which their bits lie, a lane's in one run. A warp does a unit at a time: a group of keys that share
scales by channel, or 64 keys with scales by token. A unit is padded to whole products. The warps of some blocks share
what is stored of a row, whatever its room, in turns; each keeps a part (online softmax, base 2); the warps of a block
merge in shared memory, and the blocks in XLA.

**Bytes:** a token and kv head, D (b_k + b_v) / 8 of codes and 4 D / g of scales each of keys and values. The bound on
an H200 (4.3 TB/s) for 8 kv heads x 131072, D = 128, 2 bits, keys by channel in groups of 42, values of 64: 21 us.

**Measured** on an H200, 2026-11-21, jax 0.11.2, device time of the kernel alone, normal random q, k, v, 8 kv heads, 4
queries each, D = 128, 131072 tokens: 2 bits as LogQuant has them 74 us (the reference, in a loop, 5.3 ms), as KIVI 74
us, 4 bits 79 us; 32760 tokens 19 us, batch 8 x 32760 148 us. XLA adds 8 us for merging the blocks.
`benchmarks/results/attend_quantized.json` has more. That 2 and 4 bits take as long says that it is bound by
instructions and their latency: 380 of a warp for 16 tokens were counted at 2 bits, which alone are 27 us.

**Tried and lost** in time: 16 blocks a row 113 us, 50 blocks 81 us; two warpgroups a block no gain. In accuracy:
`fma` with zero - scale 2^b, without the subtraction; that sum is rounded for a whole group, and the output was wrong
by 1 to 2 %.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from kvjax.kernels_pallas import _common as c
from kvjax.kernels_pallas import _softmax as softmax
from kvjax.kernels_pallas._common import Flag, Word, instr, loop, ptx, word
from kvjax.kernels_pallas._softmax import HEADS

MEASURED: str | None = "2026-11-21"  # the date in benchmarks/results/attend_quantized.json
BY_TOKEN = 64  # keys of a unit that have scales of their own
MOST_GROUP = 64
ONE = 0x3F803F80  # bf16, twice


@dataclass(frozen=True)
class Config:
    blocks: int | None = None  # of a row; None: as many as two on each of 132 multiprocessors
    warpgroups: int = 1  # of a block

    def __post_init__(self) -> None:
        if (self.blocks is not None and self.blocks < 1) or self.warpgroups not in (1, 2):
            raise ValueError(f"blocks must be at least 1 or None, warpgroups 1 or 2; got {self}")


def smem_bytes(D: int, config: Config) -> int:
    return 4 * config.warpgroups * softmax.part_bytes(D)


def unsupported(q: Any, keys: Any, values: Any, start: Any, stop: Any) -> str | None:
    """The limit that these shapes exceed; None if there is a kernel for them. keys, values: (codes, scales)."""
    *_, Q, D = q.shape
    S = keys[0].shape[2]
    if D not in (64, 128):
        return f"the kernel attend_quantized takes head sizes 64 and 128; got D={D}"
    if not 1 <= Q <= HEADS:
        return f"the kernel attend_quantized takes 1 to {HEADS} queries a kv head; got {Q}"
    bits = [codes.shape[3] * 8 / D for codes, _ in (keys, values)]
    if not all(b in (2, 4) for b in bits):
        return f"the kernel attend_quantized takes codes of 2 and 4 bits; got {bits[0]:g} and {bits[1]:g}"
    (tokens, channels), sliced = _groups(keys[1], S, D), _groups(values[1], S, D)
    if not (tokens == 1 and channels % (D // 4) == 0) and not (channels == 1 and tokens <= MOST_GROUP):
        return (
            f"the kernel attend_quantized takes keys in groups of up to {MOST_GROUP} tokens by 1 channel, or of "
            f"1 token by a multiple of {D // 4} channels; got {tokens} by {channels}"
        )
    if sliced[0] != 1 or sliced[1] % (D // 8):
        return (
            f"the kernel attend_quantized takes values in groups of 1 token by a multiple of {D // 8} channels; "
            f"got {sliced[0]} by {sliced[1]}"
        )
    if len(start.shape) != 1 or len(stop.shape) != 1:
        return f"the kernel attend_quantized takes one start and stop a row; got start{list(start.shape)}"
    if S * D >= 1 << 31:
        return f"the kernel attend_quantized takes rows of less than 2^31 / D tokens; got {S}"
    if 0 in q.shape:
        return f"the kernel attend_quantized takes at least one row; got q{list(q.shape)}"
    return None


def supported(q: Any, keys: Any, values: Any, start: Any, stop: Any) -> bool:
    return unsupported(q, keys, values, start, stop) is None


def _groups(scales: Any, S: int, D: int) -> tuple[int, int]:
    """Tokens and channels of a group."""
    return S // scales.shape[2], D // scales.shape[3]


def attend_quantized(
    q: Array,
    keys: tuple[Array, Array],
    values: tuple[Array, Array],
    start: Array,
    stop: Array,
    *,
    scale: float,
    config: Config | None = None,
) -> tuple[Array, Array]:
    """(out f32[B, K, Q, D], lse f32[B, K, Q]) of q [B, K, Q, D] over slots [start, stop) i32[B] of codes of k and v.

    keys and values are (codes u8[B, K, S, D * bits / 8], scales u32[B, K, S / gs, D / gd]).
    """
    if limit := unsupported(q, keys, values, start, stop):
        raise NotImplementedError(limit)
    B, K, Q, D = q.shape
    config = config or Config()
    q = q.astype(jnp.bfloat16).reshape(B * K, Q, D)
    span = jnp.stack([jnp.maximum(start, 0), jnp.clip(stop, 0, keys[0].shape[2])], axis=1)
    span = jnp.repeat(span.astype(jnp.int32), K, axis=0)
    flat = (a.reshape(B * K, *a.shape[2:]) for a in (*keys, *values))
    out, lse = _parts(scale, config, q, span, *flat)
    top = jnp.max(lse, axis=1, keepdims=True)
    weights = jnp.exp(lse - jnp.where(jnp.isneginf(top), 0.0, top))
    total = jnp.sum(weights, axis=1)
    mean = jnp.sum(out * weights[..., None], axis=1) / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    return mean.reshape(B, K, Q, D), (jnp.log(total) + top[:, 0]).reshape(B, K, Q)


def _parts(scale: float, config: Config, *args: Array) -> tuple[Array, Array]:
    """f32[rows, blocks, Q, D] and f32[rows, blocks, Q]: the parts of the blocks of each row."""
    (rows, Q, D), S = args[0].shape, args[2].shape[1]
    blocks = config.blocks or max(1, 264 // config.warpgroups // rows)

    @jax.custom_batching.custom_vmap
    def run(*args: Array) -> tuple[Array, Array]:
        _, _, key_codes, key_scales, value_codes, value_scales = args
        bits = tuple(codes.shape[2] * 8 // D for codes in (key_codes, value_codes))
        groups = tuple((S // a.shape[1], D // a.shape[2]) for a in (key_scales, value_scales))
        sizes = (Q, S, D, blocks)
        return c.kernel(
            functools.partial(_program, sizes=sizes, bits=bits, groups=groups, scale=scale, config=config),
            name="kvjax_attend_quantized",
            out_type=(
                jax.ShapeDtypeStruct((rows, blocks, Q, D), jnp.float32),
                jax.ShapeDtypeStruct((rows, blocks, Q), jnp.float32),
            ),
            scratch_types=[c.plgpu.SMEM((smem_bytes(D, config) // 4,), jnp.uint32)],
            grid=(rows * blocks,),
            grid_names=("block",),
            num_threads=config.warpgroups,
        )(*args)

    @run.def_vmap
    def batched(n: int, batches: list[bool], *args: Array) -> tuple[tuple[Array, Array], tuple[bool, bool]]:
        fixed = Config(blocks, config.warpgroups)
        out, lse = _parts(scale, fixed, *c.flatten_batch(n, batches, args))
        return (out.reshape(n, rows, *out.shape[1:]), lse.reshape(n, rows, *lse.shape[1:])), (True, True)

    return run(*args)


def _program(
    q_m, span_m, key_codes_m, key_scales_m, value_codes_m, value_scales_m, out_m, lse_m, room_m,
    *,
    sizes: tuple[int, int, int, int],
    bits: tuple[int, ...],
    groups: tuple[tuple[int, int], ...],
    scale: float,
    config: Config,
) -> None:  # fmt: skip
    heads, S, D, blocks = sizes
    (tokens, key_channels), (_, value_channels) = groups
    by_channel = key_channels == 1
    unit = tokens if by_channel else BY_TOKEN
    tiles = -(-unit // 16)
    warps = 4 * config.warpgroups
    t, block = c.special("tid.x"), c.special("ctaid.x")
    lane, warp = t & 31, t >> 5
    quad, col = lane >> 2, lane & 3
    row = c.divide(block, blocks)
    part = block - row * blocks
    q = c.offset_rows(c.global_address(q_m), row, heads * D * 2)
    span = c.offset_rows(c.global_address(span_m), row, 8)
    widths = [D * b // 8 for b in bits]
    codes = [
        c.offset_rows(c.global_address(m), row, S * width)
        for m, width in zip((key_codes_m, value_codes_m), widths, strict=True)
    ]
    per_row = [S // tokens * (D // key_channels), S * (D // value_channels)]
    scales = [
        c.offset_rows(c.global_address(m), row, 4 * n)
        for m, n in zip((key_scales_m, value_scales_m), per_row, strict=True)
    ]
    out = c.offset_rows(c.global_address(out_m), block, heads * D * 4)
    lse = c.offset_rows(c.global_address(lse_m), block, heads * 4)

    # A lane has D/4 adjacent channels of a key, as pairs (i, i + half a word) since their codes are 16 bits apart.
    half = 16 // bits[0]
    pairs = [(w * 2 * half + j, w * 2 * half + j + half) for w in range(D // 8 // half) for j in range(half)]
    pick = (quad < heads).choose(quad, 0)
    mine = [(quad < heads).choose(w, 0) for w in _load(q, pick * (D * 2) + col * (D // 2), D // 8)]
    queries = [
        _prmt(mine[low // 2], mine[high // 2], 0x7632 if low % 2 else 0x5410) for low, high in pairs
    ]  # fmt: skip

    start, stop = ptx("ld.global.nc.v2.u32 {$0, $1}, [$2];", span, results=2)
    first = c.divide(start, unit)
    units = c.divide(stop + (unit - 1), unit)
    units = (units > first).choose(units - first, 0)
    each = c.divide(units + (blocks - 1), blocks)
    begin = part * each
    end = (begin + each < units).choose(begin + each, units) + first

    def within(token: Word) -> Word:
        return (token < S).choose(token, S - 1)

    @loop(begin + first + warp, end, warps, softmax.empty(D))
    def carry(n: Word, *state: Word) -> list[Word]:
        base = n * unit

        def there(i: Word) -> Flag:
            """Whether token i of the unit is one to attend to."""
            token = base + i
            return (i < unit) & (token >= start) & (token < stop)

        # All loads of the unit, then its scores, its weights and the mix.
        words = D // 8 // half
        key_rows = [within(base + (quad + 8 * r)) for r in range(2 * tiles)]
        key_words = [_load(codes[0], token * widths[0] + col * (widths[0] // 4), words) for token in key_rows]
        if by_channel:
            group = (n < S // tokens).choose(n, S // tokens - 1)
            shared = _load(scales[0], group * (4 * D) + col * D, D // 4)
            both = [_affine(shared[low], shared[high], bits[0]) for low, high in pairs]
            affine = [both] * (2 * tiles)
        else:
            slices = D // key_channels
            slice_ = c.divide(col * (D // 4), key_channels)
            own = [_load(scales[0], (token * slices + slice_) * 4, 1)[0] for token in key_rows]
            affine = [[_affine(w, w, bits[0])] * len(pairs) for w in own]
        places = [col * 2 + (i & 1) + 8 * (i >> 1) for i in range(4 * tiles)]  # tokens of this lane of the values
        value_tokens = [within(base + i) for i in places]
        value_words = [
            _load(codes[1], token * widths[1] + quad * (widths[1] // 8), -(-widths[1] // 32), widths[1] // 8)
            for token in value_tokens
        ]
        slice_ = c.divide(quad * (D // 8), value_channels)
        value_scales = [
            there(i).choose(_load(scales[1], (token * (D // value_channels) + slice_) * 4, 1)[0], 0)
            for i, token in zip(places, value_tokens, strict=True)
        ]

        scores = []
        for tile in range(tiles):
            rows = [
                [
                    _decode(key_words[r][p // half], p % half, bits[0], *affine[r][p])
                    for p in range(len(pairs))
                ]
                for r in (2 * tile, 2 * tile + 1)
            ]  # fmt: skip
            acc = [word(0)] * 4
            for p in range(0, len(pairs), 2):
                acc = c.mma("bf16", acc, [rows[0][p], rows[1][p], rows[0][p + 1], rows[1][p + 1]], queries[p : p + 2])
            scores.append(acc)
        kept, weights = softmax.weigh(state, scores, lambda r: there(quad + 8 * r), scale=scale, kind="bf16")
        *_, mixed = softmax.parts(kept)
        for tile in range(tiles):
            operands = []  # of the tokens 2 col, 2 col + 1, and of those 8 further: values of the lane's channels
            for i in (4 * tile, 4 * tile + 2):
                affine_v = _affine(value_scales[i], value_scales[i + 1], bits[1])
                pieces = [
                    _prmt(a, b, how)
                    for a, b in zip(value_words[i], value_words[i + 1], strict=True)
                    for how in ((0x5410, 0x7632) if widths[1] >= 32 else (0x5410,))
                ]
                n_half = 16 // bits[1]
                operands.append([_decode(x, j, bits[1], *affine_v) for x in pieces for j in range(n_half)])
            near, far = operands
            for j in range(D // 16):
                a = [near[2 * j], near[2 * j + 1], far[2 * j], far[2 * j + 1]]
                mixed[j] = c.mma("bf16", mixed[j], a, weights[tile])
        return [*kept[:4], *softmax.flat(mixed)]

    room, size = c.shared_address(room_m), softmax.part_bytes(D)
    softmax.store(room + warp * size, carry, heads, D, lambda j, r: quad * (D // 8) + (2 * j + r))
    c.block_barrier()
    parts = [room + w * size for w in range(warps)]
    loop(t, heads * D // 4, 32 * warps)(lambda i: softmax.Merged(parts, i, D, "shared").write(out, lse))


def _prmt(a: Word, b: Word, how: int) -> Word:
    return instr("prmt.b32", a, b, how)


def _load(address: Any, byte: Word, words: int, size: int = 4) -> list[Word]:
    """`words` words from address + byte on, by the widest loads; of `size` 2 one half word."""
    at = c.offset(address, byte)
    if size == 2:
        return [ptx("{ .reg .u16 h; ld.global.nc.u16 h, [$1]; cvt.u32.u16 $0, h; }", at, results=1)]
    if words < 4:
        lanes = ", ".join(f"${i}" for i in range(words))
        code = f"ld.global.nc.v{words}.u32 {{{lanes}}}, [${words}];" if words > 1 else "ld.global.nc.u32 $0, [$1];"
        got = ptx(code, at, results=words)
        return got if words > 1 else [got]
    loads = [f"ld.global.nc.v4.u32 {{$0, $1, $2, $3}}, [$4+{4 * w}];" for w in range(0, words, 4)]
    return [w for load in loads for w in ptx(load, at, results=4)]


def _affine(a: Word, b: Word, bits: int) -> tuple[Word, Word]:
    """Scale 2^bits and zero, of two u32 of scale and zero, as pairs of bf16."""
    return instr("mul.bf16x2", _prmt(a, b, 0x5410), _pair(2.0**bits)), _prmt(a, b, 0x7632)


def _pair(x: float) -> int:
    """A power of two twice, in bf16."""
    return (c.real_bits(x) >> 16) * 0x10001


def _decode(x: Word, j: int, bits: int, scale: Word, zero: Word) -> Word:
    """Values of the j-th codes of both halves of x."""
    shift = bits * j - (7 - bits)
    x = x >> shift if shift > 0 else x << -shift if shift else x
    mask = ((1 << bits) - 1) << (7 - bits)
    code = instr("sub.bf16x2", (x & (mask * 0x10001)) | ONE, ONE)
    return instr("fma.rn.bf16x2", code, scale, zero)
