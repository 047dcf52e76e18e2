"""Rotated keys: a fixed random rotation, codes of directions in subspaces or in a whole head,
and turns by RoPE.

A random rotation R gives all keys the same distribution: each subspace of 8 rotated channels is
close to a uniformly random direction times a radius, so that codes follow from the geometry of
the sphere, whatever the size of a model's channels. R is orthogonal, hence Rq.Rk = q.k.

R = H diag(s) / sqrt(D), the signs s from a seed, H a symmetric Hadamard matrix (entries +-1,
rows orthogonal): for D a power of two that of Walsh and Hadamard, in D log2 D additions; for 12
times a power of two its product with Paley's matrix of order 12. Other sizes raise ValueError.

A whole head's direction in 2, 3 or 4 bits a channel is TurboQuant's code: a channel of a random
unit vector has a known density, so the levels of least error (Lloyd, Max) are one table for all
keys. Its planes nest: the signs alone are a 1-bit code, and each further plane halves every
cell, within 3 % of the best code of as many bits.

**Source:** ParisKV, rotation and 4-bit direction codes; TurboQuant (arXiv 2504.19874), codes of
a head; Paley 1933 (order 12). Estimate and weight are those of RaBitQ (Gao and Long 2024), a
subspace at a time.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax.numerics.quant import pack_bits, pack_codes, unpack_bits, unpack_codes
from kvjax.numerics.types import Rope

SUBSPACE = 8  # channels of a subspace: its signs are one byte
RADII = 16  # values that a coded radius can have, of 4 bits
# Head sizes; `ops.collide` counts their votes in a byte.
ROTATABLE = (
    8,
    16,
    24,
    32,
    48,
    64,
    96,
    128,
    192,
    256,
)


class Directions(NamedTuple):
    """Keys by subspace of m channels: the direction in b bits per channel (sign and size), and
    a weight.

    Bit j of byte n of `signs` is set where channel 8n + j is >= 0: with m = 8 a byte is the
    pattern of a subspace, and a subspace takes 6 bytes in all. Weights are stored as bits
    because on CPU, jaxlib 0.10.2 converts a whole bf16 array to f32 to gather some of its rows
    (16 MiB at 8 heads x 32K tokens). Coded weights are the key's length, 16 bits, and 4 bits
    per subspace for its share of the length. b is 4, or with one subspace 2, 3, 4 or 8; its
    weight is then of float16, as a rounding of 1/512 in a logit of 50 would change a softmax by
    a tenth.
    """

    signs: Array  # u8[..., S, D/8]
    sizes: Array  # u8[..., S, (b-1) D/8] the index of |u| in b-1 bits, as planes of packed bits, lowest bit first
    weights: Array  # u16[..., S, D/m] the bits of a float; a channel decodes to sign * centre[size] * weight
    # or u8[..., S, 2 + D/2m], coded: the bytes of the length's bf16, low first, and codes, the
    # lower half byte first

    @property
    def subspaces(self) -> int:
        """The number of subspaces, D/m."""
        *_, width = self.weights.shape
        return 2 * (width - 2) if self.weights.dtype == jnp.uint8 else width


def require_rotatable(head_dim: int) -> None:
    """Raises ValueError for a head size without a rotation."""
    if head_dim not in ROTATABLE:
        raise ValueError(
            f"head_dim={head_dim} cannot be rotated; it must be one of {', '.join(map(str, ROTATABLE))}. "
            "Use a selector without rotation, such as Fier"
        )


def rotate(x: Array, seed: int) -> Array:
    """Returns the rotated R x: f32[..., D]. Lengths and inner products do not change, up to
    rounding in f32.
    """
    D = x.shape[-1]
    require_rotatable(D)
    signs = jnp.asarray(_signs(D, seed)).reshape((1,) * (x.ndim - 1) + (D,))
    return hadamard(x.astype(jnp.float32) * signs) * np.float32(D**-0.5)


def rotate_back(x: Array, seed: int) -> Array:
    """Returns the vectors whose rotation is x: f32[..., D]; the inverse of `rotate`."""
    signs = jnp.asarray(_signs(x.shape[-1], seed)).reshape((1,) * (x.ndim - 1) + (-1,))
    return hadamard(x.astype(jnp.float32)) * (signs * np.float32(x.shape[-1] ** -0.5))


def rotate_few(x: Array, seed: int) -> Array:
    """`rotate` for few vectors, such as the queries of a step, by a product with R: one kernel
    on a GPU. There the log2 D rounds of additions are two kernels with long chains of loads
    (8.4 us for 8 vectors of 128 on an H200)."""
    D = x.shape[-1]
    require_rotatable(D)
    R = rotation(D, seed).reshape((1,) * (x.ndim - 1) + (D, D))
    return jnp.sum(x.astype(jnp.float32)[..., None, :] * R, axis=-1)


@lru_cache
def rotation(D: int, seed: int) -> np.ndarray:
    """Returns the rotation R: f32[D, D]."""
    power, odd = _factor(D)
    H = np.ones((1, 1), np.float32)
    while H.shape[0] < power:
        H = np.kron(np.array([[1, 1], [1, -1]], np.float32), H)
    H = np.kron(_paley_12().astype(np.float32), H) if odd == 12 else H
    return H * _signs(D, seed)[None] * np.float32(D**-0.5)


def turn_positions(x: Array, by: Array, rope: Rope | None) -> Array:
    """x [..., D] in f32, turned as if its position were `by`, broadcastable to [...], higher;
    as it is without RoPE.
    """
    x = x.astype(jnp.float32)
    if rope is None:
        return x
    frequencies = jnp.asarray(rope.frequencies(x.shape[-1]), jnp.float32)
    angle = by.astype(jnp.float32)[..., None] * frequencies.reshape((1,) * by.ndim + (-1,))
    return turn_pairs(x, jnp.cos(angle), jnp.sin(angle))


def turn_pairs(x: Array, cos: Array, sin: Array) -> Array:
    """x [..., D] with channels (i, i + D/2) turned by angles whose cos and sin are
    broadcastable to [..., D/2].
    """
    low, high = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def hadamard(x: Array) -> Array:
    """H x for x f32[..., D], not normalised: H H = D."""
    *lead, D = x.shape
    power, odd = _factor(D)
    half = 1
    while half < power:
        low, high = jnp.split(x.reshape(*lead, -1, 2, half), 2, axis=-2)
        x = jnp.concatenate([low + high, low - high], axis=-2)
        half *= 2
    if odd == 12:
        x = jnp.einsum(
            "...ij,ki->...kj",
            x.reshape(*lead, 12, power),
            jnp.asarray(_paley_12()),
            precision="highest",
        )
    return x.reshape(*lead, D)


def encode(
    rotated: Array,
    *,
    correct: bool = True,
    subspace: int = SUBSPACE,
    coded_radii: bool = False,
    bits: int = 4,
    least: bool = False,
) -> Directions:
    """Codes of rotated keys f32[..., S, D].

    With radius r and direction u of a subspace, and v the direction that its code decodes to,
    the weight is r / <v, u> if `correct`: the product of the decoded key with the key itself is
    then exact. Otherwise it is r; with `least` it is r <v, u> / |v|^2, which has the least
    squared error. With `coded_radii` it is rounded to one of 16 shares of the key's length, by
    `radius_table`. Codes of 8 bits have uniform levels up to the largest channel, which a table
    does not better.
    """
    *lead, D = rotated.shape
    split = jnp.abs(rotated).reshape(*lead, D // subspace, subspace)
    radius = jnp.sqrt(jnp.sum(split * split, axis=-1))
    u = split / jnp.maximum(radius, 1e-8)[..., None]

    # Signs and sizes: a bit of all channels after the other.
    index = _size_index(u, subspace, bits)
    planes = [
        ((index >> jnp.uint8(bit)) & jnp.uint8(1)).astype(bool).reshape(*lead, D)
        for bit in range(bits - 1)
    ]
    signs = pack_bits(rotated >= 0)
    sizes = jnp.concatenate([pack_bits(plane) for plane in planes], axis=-1)

    # The weight makes up for how far the decoded direction is from the true one.
    size = _size([plane.reshape(split.shape) for plane in planes], subspace)
    alignment = jnp.sum(u * size, axis=-1)
    weight = radius / jnp.maximum(alignment, 1e-6) if correct else radius
    if least:
        weight = radius * alignment / jnp.sum(size * size, axis=-1)
    if coded_radii:
        return Directions(signs, sizes, _code_radii(weight, rotated, subspace))
    if subspace == D:
        half = jnp.minimum(weight, np.float32(65504)).astype(jnp.float16)
        return Directions(signs, sizes, lax.bitcast_convert_type(half, jnp.uint16))
    return Directions(signs, sizes, _bf16_bits(weight))


def _size_index(u: Array, subspace: int, bits: int) -> Array:
    """u8[..., N, m]: the number of the size of each channel of directions u, all >= 0."""
    if bits == 8:
        largest = jnp.maximum(jnp.max(u, axis=-1, keepdims=True), 1e-8)
        return jnp.minimum(u * (128 / largest), 127).astype(jnp.uint8)
    bounds, _ = lloyd_max(subspace, 2 ** (bits - 1))
    index = jnp.zeros(u.shape, jnp.uint8)
    for bound in bounds:
        index += (u > np.float32(bound)).astype(jnp.uint8)
    return index


def decode(code: Directions) -> Array:
    """Returns the rotated keys that the codes stand for: f32[..., S, D]."""
    D = 8 * code.signs.shape[-1]
    N = code.subspaces
    planes = [*jnp.split(code.sizes, 8 * code.sizes.shape[-1] // D, axis=-1), code.signs]
    # From three planes of bytes or more, XLA's loop on a CPU takes five times as long.
    if D % 32 == 0:
        planes = [
            lax.bitcast_convert_type(p.reshape(*p.shape[:-1], D // 32, 4), jnp.uint32)
            for p in planes
        ]
    *sizes, positive = map(unpack_bits, planes)
    size = _size(sizes, D // N)
    weight = jnp.repeat(decode_weights(code), D // N, axis=-1)
    return jnp.where(positive, size, -size) * weight


def sizes_of(code: Directions) -> tuple[float, ...]:
    """Returns the sizes of a channel of weight 1 that indices of a whole head's direction stand
    for; none with 8 bits, whose sizes are an index and a half.
    """
    planes = code.sizes.shape[-1] // code.signs.shape[-1]
    D = 8 * code.signs.shape[-1]
    return () if planes == 7 else tuple(map(float, lloyd_max(D, 2**planes)[1]))


def decode_weights(code: Directions) -> Array:
    """Returns the weights of subspaces: f32[..., S, D/m]."""
    N = code.subspaces
    if code.weights.dtype == jnp.uint8:
        return _decode_radii(code.weights, 8 * code.signs.shape[-1] // N)
    if N == 1:
        return lax.bitcast_convert_type(code.weights, jnp.float16).astype(jnp.float32)
    return _from_bf16_bits(code.weights)


def patterns(signs: Array, subspace: int) -> Array:
    """Returns the sign pattern of each subspace of m = `subspace` channels, 4 or 8, of signs
    u8[..., D/8]: u8[..., D/m].
    """
    return signs if subspace == 8 else unpack_codes(signs, 2 * signs.shape[-1])


def _bf16_bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)


def _from_bf16_bits(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32)


def _code_radii(weight: Array, rotated: Array, subspace: int) -> Array:
    """u8[..., 2 + N/2] of weights f32[..., N] of rotated keys f32[..., D]."""
    bounds, _ = radius_table(subspace, rotated.shape[-1])
    length = jnp.sqrt(jnp.sum(rotated * rotated, axis=-1, keepdims=True))
    share = weight / jnp.maximum(length, np.finfo(np.float32).tiny)
    codes = jnp.zeros(share.shape, jnp.uint8)
    for bound in bounds:
        codes += (share > np.float32(bound)).astype(jnp.uint8)
    bits = _bf16_bits(length)
    low = (bits >> jnp.uint16(0)).astype(jnp.uint8)
    high = (bits >> jnp.uint16(8)).astype(jnp.uint8)
    return jnp.concatenate([low, high, pack_codes(codes, 4)], axis=-1)


def _decode_radii(coded: Array, subspace: int) -> Array:
    """Returns the weights that u8[..., 2 + N/2] stand for: f32[..., N]."""
    N = 2 * (coded.shape[-1] - 2)
    length = coded[..., :1].astype(jnp.uint16) | (
        coded[..., 1:2].astype(jnp.uint16) << jnp.uint16(8)
    )
    codes = unpack_codes(coded[..., 2:], N)
    _, centres = radius_table(subspace, N * subspace)
    share = jnp.full(codes.shape, centres[0], jnp.float32)
    for code, centre in enumerate(centres[1:], 1):
        share = jnp.where(codes == code, np.float32(centre), share)
    return _from_bf16_bits(length) * share


def _size(planes: Sequence[Array], m: int) -> Array:
    """f32 sizes of an index in planes, lowest bit first: centres of `lloyd_max`; of 7 planes
    the index and a half.
    """
    if len(planes) == 7:
        index = functools.reduce(
            jnp.bitwise_or, (p.astype(jnp.uint8) << jnp.uint8(i) for i, p in enumerate(planes))
        )
        return index.astype(jnp.float32) + 0.5
    return _centre(planes, lloyd_max(m, 2 ** len(planes))[1])


def _centre(planes: Sequence[Array], centres: np.ndarray) -> Array:
    """f32 centre of each index, by selects: these fuse, whereas a table look-up would not
    vectorise.
    """
    *lower, top = planes
    half = len(centres) // 2
    if not lower:
        return jnp.where(top, np.float32(centres[1]), np.float32(centres[0]))
    return jnp.where(top, _centre(lower, centres[half:]), _centre(lower, centres[:half]))


@lru_cache
def lloyd_max(m: int, levels: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Bounds f64[levels - 1] and centres f64[levels] that quantise |u_j| with least squared
    error.

    u is uniform on the sphere S^(m-1), so (u_j)^2 ~ Beta(1/2, (m-1)/2), and t = |u_j| has the
    density (1 - t^2)^((m-3)/2) up to a factor. A bound lies midway between its centres, a
    centre at the mean of its cell (Lloyd, Max); the density is log-concave for m > 3, so there
    is exactly one such table. **Differs:** ParisKV's table (centres .0420 .1266 .. .7633) is,
    to 2e-4, the result of 100 of Lloyd's steps from the quantiles; this one has converged, and
    its squared error is smaller by 1/5000.

    >>> lloyd_max(8)[1].round(4).tolist()
    [0.0425, 0.128, 0.2152, 0.3053, 0.4003, 0.503, 0.6193, 0.7648]
    """
    if m <= 3:
        raise ValueError(f"the table needs subspaces of more than 3 channels, got {m}")
    power = (m - 3) / 2
    t = np.linspace(0, 1, 2**14 + 1)
    density = (1 - t * t) ** power
    mass = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)]) * t[1]
    moment = (1 - (1 - t * t) ** (power + 1)) / (2 * power + 2)
    return _settle(t, mass, moment, min(1.0, 3 / m**0.5) * (np.arange(levels) + 0.5) / levels)


@lru_cache
def radius_table(m: int, D: int) -> tuple[np.ndarray, np.ndarray]:
    """Bounds f64[15] and centres f64[16] that quantise the radius of a subspace with least
    squared error.

    A rotated key of length 1 is uniform on the sphere S^(D-1), so the radius r of m of its D
    channels has r^2 ~ Beta(m/2, (D-m)/2). The table does not depend on the text, so it never
    becomes outdated.

    >>> radius_table(8, 128)[1][[0, 7, 15]].round(3).tolist()
    [0.106, 0.241, 0.418]
    """
    if not 3 < m < D:
        raise ValueError(f"the table needs subspaces of 4 to D - 1 = {D - 1} channels, got {m}")
    r = np.linspace(0, 1, 2**14 + 1)
    density = r ** (m - 1) * (1 - r * r) ** ((D - m) / 2 - 1)
    mass, moment = (
        np.concatenate([[0], np.cumsum((f[1:] + f[:-1]) / 2)]) * r[1]
        for f in (density, r * density)
    )
    start = np.interp((np.arange(RADII) + 0.5) / RADII, mass / mass[-1], r)
    return _settle(r, mass, moment, start)


def _settle(
    t: np.ndarray, mass: np.ndarray, moment: np.ndarray, centres: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Runs Lloyd's steps from `centres` until they converge; returns bounds and centres.

    `mass` and `moment` are the integrals of a density, and of t times the density, from t[0] to
    each t.
    """
    for _ in range(10_000):
        edges = np.concatenate([[t[0]], (centres[1:] + centres[:-1]) / 2, [t[-1]]])
        new = np.diff(np.interp(edges, t, moment)) / np.diff(np.interp(edges, t, mass))
        converged = bool(np.abs(new - centres).max() < 1e-10)
        centres = new
        if converged:
            break
    return (centres[1:] + centres[:-1]) / 2, centres


def turned(D: int, seed: int) -> int:
    """A bit mask of the channels whose sign in s is -1. It uses Python's generator, whose
    stream is the same in every version, so stored codes stay readable."""
    return random.Random(seed).getrandbits(D) ^ ((1 << D) - 1)


@lru_cache
def _signs(D: int, seed: int) -> np.ndarray:
    """f32[D] of +-1."""
    bits = turned(D, seed)
    return np.array([-1.0 if bits >> i & 1 else 1.0 for i in range(D)], np.float32)


@lru_cache
def _paley_12() -> np.ndarray:
    """f32[12, 12] of +-1, symmetric, with orthogonal rows: Paley's second construction over the
    field of 5.
    """
    square = np.array([0, 1, -1, -1, 1])
    conference = np.ones((6, 6))
    conference[0, 0] = 0
    conference[1:, 1:] = square[np.subtract.outer(np.arange(5), np.arange(5)) % 5]
    return (
        np.kron(conference, [[1, 1], [1, -1]]) + np.kron(np.eye(6), [[1, -1], [-1, -1]])
    ).astype(np.float32)


def _factor(D: int) -> tuple[int, int]:
    """(power of two, rest) with D as their product. The rest is odd, or 12 if D is 12 times a
    power of two.
    """
    power = D & -D
    odd = D // power
    return (power // 4, 12) if odd == 3 and power >= 4 else (power, odd)
