"""The methods in numpy, written from their papers alone, for comparison with the library.

Plain lists, and loops over tokens, channels, subspaces, pages and steps; float64, except where
a stored number has fewer bits. Nothing here is taken from `kvjax`. Positions take the place of
the library's slots, and a history is the run of positions that left a first-in first-out window
of `local` tokens in whole chunks.
"""

from __future__ import annotations

import dataclasses
import functools
from fractions import Fraction

import numpy as np

# --------------------------------------------------------------------------------------------- what all have in common


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """(out f64[Q, D], lse f64[Q]) of q [Q, D] over k, v [S, D], one query at a time; empty is 0
    and -inf.
    """
    k, v = k.astype(np.float64), v.astype(np.float64)
    out, lse = np.zeros(q.shape), np.full(len(q), -np.inf)
    for i, query in enumerate(q.astype(np.float64)):
        if len(k):
            logits = scale * k @ query
            weights = np.exp(logits - logits.max())
            out[i], lse[i] = weights @ v / weights.sum(), np.log(weights.sum()) + logits.max()
    return out, lse


def bfloat16(x: np.ndarray) -> np.ndarray:
    """f64 of x rounded to the 16 upper bits of an f32, half to even."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) & np.uint64(0xFFFF0000)
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def history_end(tokens: int, sink: int, local: int, chunk: int) -> int:
    """Positions [sink, end) of a row of `tokens` are the history; those from there to the local
    window are pending.
    """
    return sink + max(tokens - sink - local, 0) // chunk * chunk


def pooled(scores: np.ndarray, group_reduce: str) -> np.ndarray:
    """f64[H, n] of f64[G, n], by the definition of the rule."""
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares = weights / weights.sum(axis=1, keepdims=True)
    return {
        "per_head": lambda: scores,
        "mean_query": lambda: scores.mean(
            axis=0, keepdims=True
        ),  # scores are linear in the query
        "mean_score": lambda: scores.mean(axis=0, keepdims=True),
        "max_score": lambda: scores.max(axis=0, keepdims=True),
        "max_softmax": lambda: shares.max(axis=0, keepdims=True),
        "sum_softmax": lambda: shares.sum(axis=0, keepdims=True),
        "mean_softmax": lambda: shares.mean(axis=0, keepdims=True),
    }[group_reduce]()


def agrees(ours: set[int], ranks: np.ndarray, count: int) -> bool:
    """Whether `ours` are the `count` best of ranks [n], up to swaps of ranks that rounding
    cannot tell apart.
    """
    best = np.argsort(-ranks, kind="stable")[:count]
    if ours == set(best.tolist()):
        return True
    edge = ranks[best[-1]]
    differing = list(ours.symmetric_difference(best.tolist()))
    return len(ours) == count and bool(
        np.all(np.abs(ranks[differing] - edge) <= 1e-5 * max(abs(edge), 1e-30))
    )


# ---------------------------------------------------------------------------------------------------------------- FIER


def fier_scores(
    q: np.ndarray, keys: np.ndarray, sealed: int, group: int, scale: float, dtype
) -> np.ndarray:
    """f64[G, n] scores of all n keys [n, D] for q [G, D]: 1-bit ones below `sealed`, exact ones
    from there on.

    Algorithm 1; scale and zero of a group are stored in `dtype`.
    """
    scores = np.zeros((len(q), len(keys)))
    for first in range(0, sealed, group):
        block = keys[first : first + group].astype(np.float32)
        high, low = block.max(axis=0), block.min(axis=0)
        middle, half = (high + low) / 2, (high - low) / 2
        sign = np.where(block >= middle, 1.0, -1.0)
        stored_middle, stored_half = (
            a.astype(dtype).astype(np.float64) for a in (middle, half)
        )
        decoded = sign * stored_half + stored_middle
        scores[:, first : first + group] = q.astype(np.float64) @ decoded.T
    scores[:, sealed:] = q.astype(np.float64) @ keys[sealed:].astype(np.float64).T
    return scores * scale


# ------------------------------------------------------------------------------------------------------------- ParisKV


def rotation(signs: np.ndarray) -> np.ndarray:
    """f64[D, D], D a power of two: a key k [D] becomes k @ rotation. `signs` [D] of +-1 is the
    random diagonal.
    """
    hadamard = np.ones((1, 1))
    while len(hadamard) < len(signs):
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    return np.diag(signs) @ hadamard / np.sqrt(len(signs))


@functools.cache
def sphere_centres(m: int) -> np.ndarray:
    """f64[8]: the Lloyd-Max centres of |u_j| for u uniform on the sphere in m dimensions, where
    u_j^2 is Beta.

    With u_j^2 ~ Beta(1/2, (m-1)/2), the density of t = |u_j| is (1 - t^2)^((m-3)/2) up to a
    factor. Each round moves a centre to the mean of its cell, by Gauss-Legendre quadrature, and
    a bound midway between its centres.
    """
    nodes, weights = np.polynomial.legendre.leggauss(20)
    centres = np.linspace(0.05, 0.85, 8)
    for _ in range(2000):
        edges = np.concatenate([[0], (centres[1:] + centres[:-1]) / 2, [1]])
        half, middle = np.diff(edges) / 2, (edges[1:] + edges[:-1]) / 2
        t = middle[:, None] + half[:, None] * nodes
        density = weights * (1 - t * t) ** ((m - 3) / 2)
        centres = (density * t).sum(axis=1) / density.sum(axis=1)
    return centres


@functools.cache
def radius_centres(m: int, D: int) -> np.ndarray:
    """f64[16]: the Lloyd-Max centres of the length r of m channels of a random unit vector of
    D: r^2 is Beta.

    With r^2 ~ Beta(m/2, (D-m)/2), the density of r is r^(m-1) (1 - r^2)^((D-m)/2-1) up to a
    factor.
    """
    nodes, weights = np.polynomial.legendre.leggauss(40)
    centres = np.linspace(0.4 * np.sqrt(m / D), min(1.8 * np.sqrt(m / D), 0.95), 16)
    for _ in range(4000):
        edges = np.concatenate([[0], (centres[1:] + centres[:-1]) / 2, [1]])
        half, middle = np.diff(edges) / 2, (edges[1:] + edges[:-1]) / 2
        r = middle[:, None] + half[:, None] * nodes
        density = weights * r ** (m - 1) * (1 - r * r) ** ((D - m) / 2 - 1)
        centres = (density * r).sum(axis=1) / density.sum(axis=1)
    return centres


@dataclasses.dataclass
class Paris:
    """ParisKV over the history of one kv head. A row vector times `rotation` f64[D, D] is the
    vector rotated.
    """

    rotation: np.ndarray
    keys: np.ndarray  # [n, D]
    votes: str = "tiers"
    correct: bool = True
    candidates: int | None = None
    m: int = 8  # channels of a subspace
    radius_bits: int = 16

    def __post_init__(self) -> None:
        keys = self.keys.astype(np.float64)
        self.norm = np.linalg.norm(keys, axis=1)
        unit = keys / np.maximum(self.norm, 1e-8)[:, None] @ self.rotation
        n, D = keys.shape
        self.parts = unit.reshape(n, D // self.m, self.m)
        self.ids = ((self.parts >= 0) * 2 ** np.arange(self.m)).sum(axis=2)

        radius = np.linalg.norm(self.parts, axis=2)
        u = self.parts / np.maximum(radius, 1e-30)[..., None]
        centres = sphere_centres(self.m)
        self.sizes = np.abs(np.abs(u)[..., None] - centres).argmin(axis=-1)
        self.codes = np.where(u >= 0, 1, -1) * centres[self.sizes]
        alpha = np.maximum((self.codes * u).sum(axis=2), 1e-6) if self.correct else 1.0
        if self.radius_bits == 4:  # the nearest of 16 shares of the length
            levels = radius_centres(self.m, D)
            self.weights = (
                bfloat16(self.norm)[:, None]
                * levels[np.abs((radius / alpha)[..., None] - levels).argmin(axis=-1)]
            )
        else:
            self.weights = bfloat16(self.norm[:, None] * radius / alpha)

    def shares(self) -> tuple[Fraction, Fraction]:
        """beta and rho."""
        n = len(self.keys)
        table = [
            (5_000, ".50", ".50"),
            (10_000, ".25", ".30"),
            (30_000, ".20", ".25"),
            (10**9, ".10", ".20"),
        ]
        beta, rho = next((beta, rho) for below, beta, rho in table if n < below)
        return Fraction(beta), Fraction(rho)

    def collide(self, q: np.ndarray) -> np.ndarray:
        """i[n] votes for a query [D]."""
        n, rho = len(self.keys), self.shares()[1]
        tiers = (
            (".05", ".15", ".30", ".50", ".75", "1.00") if self.votes == "tiers" else ("1.00",)
        )
        limits = [-(-n * rho * Fraction(c) // 1) for c in tiers]
        rotated, m = (q.astype(np.float64) @ self.rotation).reshape(-1, self.m), self.m
        centroids = np.array(
            [[1 if i >> j & 1 else -1 for j in range(m)] for i in range(2**m)]
        ) / np.sqrt(m)
        total = np.zeros(n, int)
        for b, part in enumerate(rotated):
            score = centroids @ part
            ids, key = np.unique(self.ids[:, b], return_inverse=True)
            better = (score[self.ids[:, b]][None] > score[ids][:, None] + 1e-12).sum(axis=1)
            total += sum((better < limit).astype(int) for limit in limits)[key]
        return total

    def best(self, votes: np.ndarray) -> np.ndarray:
        """The candidates, in order."""
        count = min(
            -(-len(votes) * self.shares()[0] // 1)
            if self.candidates is None
            else self.candidates,
            len(votes),
        )
        return np.sort(np.argsort(-votes, kind="stable")[:count])

    def estimate(self, q: np.ndarray) -> np.ndarray:
        """f64[n] of q.k."""
        length = np.linalg.norm(q.astype(np.float64))
        unit = (q.astype(np.float64) / max(length, 1e-8) @ self.rotation).reshape(-1, self.m)
        return length * (self.weights * (self.codes * unit[None]).sum(axis=2)).sum(axis=1)

    def ranks(self, q: np.ndarray) -> np.ndarray:
        """f64[n]: estimates of candidates, -inf elsewhere."""
        ranks = np.full(len(self.keys), -np.inf)
        best = self.best(self.collide(q))
        ranks[best] = self.estimate(q)[best]
        return ranks


# -------------------------------------------------------------------------------------------------------------- FreeKV


@dataclasses.dataclass
class FreeKV:
    """FreeKV of one kv head over a run of decode steps; a page enters the history as soon as it
    is full.

    `budget` counts sink, local window and the pages, of which it has room for whole ones.
    """

    page: int
    budget: int
    sink: int
    local: int
    tau: float
    # query and recall, and tokens at that step
    last: tuple[np.ndarray, list[int | None], int] | None = None

    def step(self, q: np.ndarray, keys: np.ndarray) -> tuple[bool, set[int]]:
        """Whether q [G, D] corrected, and the positions it attends to; keys [n, D] end with its
        own.
        """
        n, found = len(keys), self.select(q, keys)
        last, self.last = self.last, (q, found, n)
        attended = set(range(min(self.sink, n))) | set(range(max(n - self.local, 0), n))
        if last is None or self.similarity(q, last[0]) < self.tau:
            return True, attended | {p for p in found if p is not None}
        # What was recalled, and the tokens that have left the window since, in the
        # lowest-ranked ones' place where the budget has no other.
        left = [p for p in range(last[2] - self.local, n - self.local) if p >= self.sink]
        most = self.budget - self.sink - self.local - len(left)
        kept = last[1] if sum(p is not None for p in last[1]) <= most else last[1][:most]
        recalled = [*kept, *left]
        return False, attended | {p for p in recalled if p is not None}

    @staticmethod
    def similarity(q: np.ndarray, before: np.ndarray) -> float:
        return float(
            np.mean(
                [a @ b / np.sqrt((a @ a) * (b @ b)) for a, b in zip(q, before, strict=True)]
            )
        )

    def select(self, q: np.ndarray, keys: np.ndarray) -> list[int | None]:
        """Positions of the best pages, a page after the other; None for those of a page that
        the window has.
        """
        stop = max(len(keys) - self.local, self.sink)
        firsts = range(self.sink, stop, self.page)
        if not firsts:
            return []
        pages = [
            keys[at : at + self.page] for at in firsts
        ]  # tokens of the window count in the box of their page
        ranks = pooled(np.array([self.scores(q, page) for page in pages]).T, "mean_softmax")
        best = np.argsort(-ranks[0], kind="stable")[
            : (self.budget - self.sink - self.local) // self.page
        ]
        return [
            p if p < stop else None
            for i in best
            for p in range(firsts[i], firsts[i] + self.page)
        ]

    def scores(self, q: np.ndarray, keys: np.ndarray) -> list[float]:
        """Scores of a page by query head, from the smallest and largest of the keys that it
        has.
        """
        scale, q, keys = q.shape[1] ** -0.5, q.astype(np.float64), keys.astype(np.float64)
        low, high = keys.min(axis=0), keys.max(axis=0)
        return [
            scale * sum(max(x * a, x * b) for x, a, b in zip(row, low, high, strict=True))
            for row in q
        ]


# --------------------------------------------------------------------------------------------------------------- Quest


def quest(
    q: np.ndarray, keys: np.ndarray, page: int, pages: int, group_reduce: str
) -> list[set[int]]:
    """Positions that a step with q [G, D] attends to of keys [n, D], by query head, or one set
    for all.

    Algorithm 1 as the released code evaluates it: pages from position 0 on, the last one as far
    as it has come, each with the box of its smallest and largest keys; the best pages, at least
    3. The newest token is read in any case.
    """
    scores = []
    for first in range(0, len(keys), page):
        tokens = keys[first : first + page].astype(np.float64)
        low, high = tokens.min(axis=0), tokens.max(axis=0)
        scores.append(
            [
                sum(max(x * a, x * b) for x, a, b in zip(row, low, high, strict=True))
                for row in q
            ]
        )
    ranks = pooled(np.array(scores).T * q.shape[1] ** -0.5, group_reduce)
    found = []
    for row in ranks:
        best = np.argsort(-row, kind="stable")[: max(pages, 3)].tolist()
        found.append(
            {p for i in best for p in range(i * page, min((i + 1) * page, len(keys)))}
            | {len(keys) - 1}
        )
    return found


# --------------------------------------------------------------------------------------------------- LogQuant and KIVI


def log_sparse(window: int, tokens: int) -> tuple[list[int], list[int]]:
    """LogQuant, Algorithm 1: positions that are exact and those that are quantised, in order,
    after `tokens` came.
    """
    exact: list[int] = []
    quantised: list[int] = []
    for position in range(tokens):
        exact.append(position)
        if len(exact) == 3 * window:
            quantised += exact[1 : 2 * window : 2]
            exact = exact[0 : 2 * window : 2] + exact[2 * window :]
    return exact, quantised


def residual(size: int, tokens: int) -> tuple[list[int], list[int]]:
    """KIVI's rule for keys: all `size` exact tokens are quantised at once, as soon as there are
    so many.
    """
    whole = tokens // size * size
    return list(range(whole, tokens)), list(range(whole))


def asymmetric(x: np.ndarray, bits: int, tokens: int, channels: int) -> tuple[np.ndarray, ...]:
    """Codes [S, D], scales and zeros [S, D] of x [S, D], each group of tokens x channels on its
    own.
    """
    codes, scales, zeros = (np.zeros(x.shape) for _ in range(3))
    for s in range(0, x.shape[0], tokens):
        for d in range(0, x.shape[1], channels):
            here = slice(s, s + tokens), slice(d, d + channels)
            block = x[here].astype(np.float32)
            low = block.min()
            scale, zero = (
                bfloat16((block.max() - low) * np.float32(1 / (2**bits - 1))),
                bfloat16(low),
            )
            # its reciprocal must be a normal number too
            scale = scale if scale >= 2.0**-125 else 0.0
            if scale:
                levels = (block - np.float32(zero)) * (1 / np.float32(scale))
                codes[here] = np.clip(np.rint(levels), 0, 2**bits - 1)
            scales[here], zeros[here] = scale, zero
    return codes, scales, zeros
