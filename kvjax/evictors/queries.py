"""Evictors that remember queries, and one that weighs attention by values.

A few vectors of each query head are remembered (`Evictor.remembers`), as the queries themselves
are gone when a token must be evicted. Each of these compares all tokens, so a cache should
evict several at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax.evictors.base import Evictor, Tokens
from kvjax.evictors.keys import in_order, length
from kvjax.evictors.scores import HeavyHitter, Observation
from kvjax.memory import vary_with
from kvjax.numerics.partial import Logits, weights_of
from kvjax.numerics.rotate import turn_pairs, turn_positions
from kvjax.numerics.types import Rope
from kvjax.spec import keep_ints, keep_number
from kvjax.validation import check_flags, check_rope, check_verbs

BLOCK = 2**20  # numbers of a block of keys, by query
NODES = 64  # of an integral over logits under a soft cap
MOST_DEVIATIONS = 12  # that exponentials favour under a cap of up to a hundred


@dataclass(frozen=True, kw_only=True)
class ValueWeighted(Evictor):
    """Multiplies another evictor's score of a token, here `attention`, by the size of its
    value, the sum of the value's magnitudes:

        score(t) = attention(t) * |v_t|_1

    The first `sink` tokens stay.

    **Source:** VATP (Guo et al. 2024, arXiv 2406.12335), over the scores of H2O, with a sink of
    20.
    """

    evictor: Evictor = HeavyHitter()
    sink: int = 20

    def __post_init__(self) -> None:
        keep_ints(self, sink=0)
        _check_scores(self, self.evictor)

    @property
    def compares(self) -> bool:
        return False

    @property
    def arrival(self) -> float | None:
        return self.evictor.arrival

    def check(self, budget: int) -> None:
        self.evictor.check(budget)

    def voters(self, slots: int) -> int | None:
        return self.evictor.voters(slots)

    @property
    def sampled(self) -> int | None:
        return self.evictor.sampled

    def see_prompt(
        self, evidence: Array, votes: Array, position: Array, end: Array, slots: int
    ) -> Array:
        return self.evictor.see_prompt(evidence, votes, position, end, slots)

    def see_step(self, evidence: Array, weights: Array) -> Array:
        return self.evictor.see_step(evidence, weights)

    def score_all(self, tokens: Tokens) -> Array:
        score = self.evictor.score(tokens.evidence, tokens.position, tokens.end, tokens.slots)
        weighted = jnp.where(jnp.isinf(score), score, score * _magnitude(tokens.v))
        return jnp.where(tokens.position < self.sink, jnp.inf, weighted)


@dataclass(frozen=True, kw_only=True)
class Critical(ValueWeighted):
    """Keeps tokens in two stages: a share `first` of the slots by another evictor's score alone,
    the others by that score times the size of the value:

        score(t) = (attention(t) + epsilon) * |v_t|_1

    The first stage divides the slots that are left beside tokens that stay in any case, such as
    the window of `Observation`, whose score is infinite; so no evictor makes it void.

    **Source:** CriticalKV (Feng et al. 2025, arXiv 2502.03805), Algorithm 1: over SnapKV's
    scores, first=.5, epsilon=1e-4. **Differs:** the paper measures a value after the model's
    output projection, which a cache does not have. Its form in kvpress counts the window of
    SnapKV in the first stage, which a window of half of the budget makes void.
    """

    evictor: Evictor = Observation()
    sink: int = 0
    first: float = 0.5  # share of the slots
    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_number(self, "first", what="a share of the slots, ", at_least=0, below=1)
        keep_number(self, "epsilon", at_least=0)

    @property
    def compares(self) -> bool:
        return True

    def score_all(self, tokens: Tokens) -> Array:
        score = self.evictor.score(tokens.evidence, tokens.position, tokens.end, tokens.slots)
        pinned = jnp.isposinf(score) | (tokens.position < self.sink)
        competes = (tokens.position >= 0) & ~pinned

        # The first stage: the best scores among the tokens that compete.
        slots_left = tokens.slots - jnp.sum(pinned, axis=-1, keepdims=True, dtype=jnp.int32)
        kept = jnp.floor(self.first * jnp.maximum(slots_left, 0).astype(jnp.float32))
        chosen = competes & (
            _rank(jnp.where(competes, score, -jnp.inf)) < kept.astype(jnp.int32)
        )

        # The second stage: what is left, by its value too.
        by_value = (score + self.epsilon) * _magnitude(tokens.v)
        second = jnp.where(jnp.isinf(score), score, by_value)
        return jnp.where(pinned | chosen, jnp.inf, second)


def _check_scores(evictor: ValueWeighted, inner: Evictor) -> None:
    """Raises ValueError unless `inner` scores each token by the attention of queries."""
    name = type(evictor).__name__
    verbs = ("score_all", "see_prompt", "see_step")
    check_verbs(f"{name}(evictor=...)", inner, "an evictor", verbs, "kvjax.HeavyHitter()")
    if type(inner).score_all is not Evictor.score_all or inner.arrival is None:
        raise ValueError(
            f"{name} got {inner}, which no attention guides; use kvjax.HeavyHitter()"
        )


def _magnitude(v: Array) -> Array:
    """Returns the sum of the magnitudes of each value: f32[B, K, L] of v [B, K, L, D]."""
    return jnp.sum(jnp.abs(v.astype(jnp.float32)), axis=-1)


def _rank(score: Array) -> Array:
    """i32[B, K, L]: the number of slots with a higher score, or an equal one and a lower
    number.
    """
    order = jnp.argsort(-score, axis=-1, stable=True)
    return jnp.argsort(order, axis=-1).astype(jnp.int32)


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Evictor):
    """Keeps the tokens to which the next `future` queries are expected to attend, times the
    length of their values.

    Queries before their rotation are taken as normal, with the mean and covariance of those
    seen so far, and rotated to the mean of the next positions. A token's weight is the mean of
    exp(logit) over such queries, divided by the sum of these means and of the exponential of
    the head's sink logit, if the model has one; tokens outside of the next query's window have
    none. It remembers D + 2 vectors of a query head in float32, or 2 with covariance=False.

    **Source:** Expected Attention (Devoto et al. 2025, arXiv 2510.00636): 512 positions, a sink
    of 4 that stays and is not counted among queries. **Differs:** queries of generated tokens
    count too. The paper knows of no soft cap, sink logits and window.
    """

    rope: Rope | None
    future: int = 512
    sink: int = 4
    epsilon: float = 0.0
    covariance: bool = True

    def __post_init__(self) -> None:
        keep_ints(self, future=1, sink=0)
        check_flags("ExpectedAttention", covariance=self.covariance)
        keep_number(self, "epsilon")
        check_rope("ExpectedAttention(rope=...)", self.rope)

    def remembers(self, head_dim: int) -> int:
        return 2 + head_dim * self.covariance

    def see_queries(self, memory: Array, q: Array, position: Array) -> Array:
        """Returns the sum of queries, their count, and the sums of their products."""
        counts = position >= self.sink
        plain = turn_positions(q, -position[:, None, None], self.rope)
        plain = jnp.where(counts[:, None, None, :, None], plain, 0.0)
        number = jnp.broadcast_to(
            jnp.sum(counts, axis=1, dtype=jnp.float32)[:, None, None, None], q[:, :, :, 0].shape
        )
        parts = [jnp.sum(plain, axis=3), number]
        new = jnp.stack(parts, axis=3)
        if self.covariance:
            products = jnp.einsum("bkgti,bkgtj->bkgij", plain, plain, precision="highest")
            new = jnp.concatenate([new, products], axis=3)
        return memory + new

    def score_all(self, tokens: Tokens) -> Array:
        assert tokens.memory is not None
        step = tokens.known_step()
        logits = step.logits
        D = tokens.k.shape[3]
        count = jnp.maximum(tokens.memory[:, :, :, 1], 1)
        mean = tokens.memory[:, :, :, 0] / count  # [B, K, G, D]
        later = tokens.end[:, None] + jnp.arange(self.future, dtype=jnp.int32)[None]

        # A rotation to each of the next positions, on average, is a linear map of each pair: it
        # takes the pair (1, 0) to the mean cosine and sine.
        pairs = jnp.broadcast_to(jnp.ones(D, jnp.float32), (*later.shape, D))
        unit = jnp.concatenate([pairs[..., : D // 2], 0 * pairs[..., D // 2 :]], axis=-1)
        turned_unit = jnp.mean(turn_positions(unit, later, self.rope), axis=1)
        cos, sin = jnp.split(turned_unit, 2, axis=-1)

        def ahead(x: Array) -> Array:
            """x [B, K, G, ..., D] rotated to each of the next positions, on average."""
            shape = (-1, *(1,) * (x.ndim - 2), D // 2)
            return turn_pairs(x, cos.reshape(shape), sin.reshape(shape))

        # Mean and covariance of the queries there. A product q.k of a normal q is normal, with
        # the mean mean.k and the variance k.covariance.k.
        mean_ahead = ahead(mean)
        if self.covariance:
            moment = tokens.memory[:, :, :, 2:] / count[..., :1, None]
            spread = moment - mean[..., :, None] * mean[..., None, :]
            spread = ahead(jnp.swapaxes(ahead(spread), -1, -2))

        def expected_logits(k: Array) -> Array:
            products = jnp.einsum("bkgd,bkld->bkgl", mean_ahead, k, precision="highest")
            if not self.covariance:
                return logits.of(products)
            turned = jnp.einsum("bkgij,bklj->bkgli", spread, k, precision="highest")
            variance = jnp.einsum("bkgli,bkli->bkgl", turned, k, precision="highest")
            return _log_mean_exp(products, variance, logits)

        expected = _by_blocks(expected_logits, tokens.k, mean.shape[2])
        competes = tokens.seen_next() & (tokens.position >= self.sink)
        weights = weights_of(expected, competes[:, :, None], sinks=step.sinks)
        score = (jnp.mean(weights, axis=2) + self.epsilon) * length(tokens.v)
        return jnp.where(tokens.position < self.sink, jnp.inf, score)


@dataclass(frozen=True, kw_only=True)
class Redundancy(Evictor):
    """Keeps tokens to which the last `window` queries attend, less those whose keys resemble
    other keys.

    The score is `balance` times the attention, pooled over `pool` neighbours, less (1 -
    balance) times the redundancy. A query's attention is the softmax of the largest logits of
    the group's query heads, over the tokens before the window that it sees, beside the largest
    sink logit. The redundancy is the softmax of a key's mean cosine with all others, where
    each token forgives the newest key that resembles it by more than `alike`. The window itself
    stays. Comparing L held tokens takes L^2 products of keys.

    **Source:** R-KV (Cai et al. 2025, arXiv 2505.24133), its code: window 8, balance .07, which
    is .1 in the paper. **Differs:** where no key resembles a token, its code forgives the first key; here none.
    It knows of no soft cap, sink logits and window.
    """

    window: int = 8
    balance: float = 0.07
    pool: int = 7
    alike: float = 0.5

    def __post_init__(self) -> None:
        keep_ints(self, window=1, pool=1)
        keep_number(self, "balance", "alike")

    def check(self, budget: int) -> None:
        if budget <= self.window:
            raise ValueError(
                f"{self} always keeps {self.window} tokens, got a budget of {budget}; raise the budget"
            )

    def remembers(self, head_dim: int) -> int:
        return self.window

    def see_queries(self, memory: Array, q: Array, position: Array) -> Array:
        """Returns the last queries, oldest first."""
        both = jnp.concatenate([memory, q.astype(jnp.float32)], axis=3)
        count = jnp.sum(position >= 0, axis=1, dtype=jnp.int32)
        at = count[:, None] + jnp.arange(self.window, dtype=jnp.int32)[None]
        return jnp.take_along_axis(both, at[:, None, None, :, None], axis=3)

    def score_all(self, tokens: Tokens) -> Array:
        assert tokens.memory is not None
        step = tokens.known_step()
        order = in_order(tokens.position)
        L = tokens.position.shape[2]
        position = tokens.position
        k = tokens.k
        valid = position >= 0
        older = valid & (position < (tokens.end - self.window)[:, None, None])

        # The heads of a group vote as one, by the largest of their logits of a key, and of
        # their sinks.
        def largest_logits(k: Array) -> Array:
            products = jnp.einsum("bkgwd,bkld->bkgwl", tokens.memory, k, precision="highest")
            return jnp.max(step.logits.of(products), axis=2)

        sinks = step.sinks
        if sinks is not None:
            largest = jnp.max(sinks, axis=1, keepdims=True)
            sinks = jnp.broadcast_to(largest, (sinks.shape[0], self.window))
        logits = _by_blocks(largest_logits, k, self.window)
        voted = older[:, :, None] & tokens.seen_by_last(self.window)
        votes = jnp.mean(weights_of(logits, voted, sinks=sinks), axis=2)
        votes = jnp.take_along_axis(votes, order, axis=2)
        half = self.pool // 2
        votes = lax.reduce_window(
            votes,
            -jnp.inf,
            lax.max,
            (1, 1, self.pool),
            (1, 1, 1),
            ((0, 0), (0, 0), (half, self.pool - 1 - half)),
        )
        votes = jnp.take_along_axis(votes, jnp.argsort(order, axis=-1), axis=2)
        size = jnp.maximum(length(k), 1e-12)
        slot = jnp.arange(L, dtype=jnp.int32)[None, None]

        def alike(i: Array) -> Array:
            """f32[B, K, L] what the token in slot i adds to the cosines of all others."""
            product = jnp.einsum(
                "bkd,bkld->bkl",
                k[:, :, i],
                k,
                preferred_element_type=jnp.float32,
                precision="highest",
            )
            cosine = jnp.where(
                valid & valid[:, :, i, None] & (slot != i),
                product / (size * size[:, :, i, None]),
                0.0,
            )
            newest = jnp.max(
                jnp.where(cosine > self.alike, position, -1), axis=-1, keepdims=True
            )
            return jnp.where(position == newest, 0.0, cosine)

        total = lax.fori_loop(0, L, lambda i, sums: sums + alike(i), jnp.zeros_like(votes))
        mean = total / jnp.maximum(jnp.sum(valid, axis=-1, keepdims=True, dtype=jnp.float32), 1)
        redundancy = jax.nn.softmax(jnp.where(valid, mean, -1e30), axis=-1)
        score = self.balance * votes - (1 - self.balance) * redundancy
        return jnp.where(valid & ~older, jnp.inf, score)


@dataclass(frozen=True, kw_only=True)
class Trigonometric(Evictor):
    """Keeps the tokens whose keys score best against the mean query, at distances 1, 2, 4 ...
    65536 ahead.

    For each pair of channels the mean of the queries before their rotation predicts how
    attention falls with distance, and the rest of their length adds to it. The best of a
    group's query heads decides, each by its standard deviation.

    **Source:** TriAttention (arXiv 2604.04921), its code: per layer and head, prompt kept
    beside the budget. **Differs:** it is calibrated on the queries that the cache has seen,
    instead of another text. Dividing by the deviation is an option of the authors' code, which
    is off by default there and on in TensorRT-LLM. The oldest of equal tokens goes, where the
    code adds noise. The score has no softmax: sink logits, a soft cap and the scale of a
    model's logits do not change it.
    """

    rope: Rope | None

    def __post_init__(self) -> None:
        check_rope("Trigonometric(rope=...)", self.rope)

    def remembers(self, head_dim: int) -> int:
        return 2

    def see_queries(self, memory: Array, q: Array, position: Array) -> Array:
        """Returns the sum of queries; then that of the lengths of their pairs, and the number
        of queries D/2 times.
        """
        counts = (position >= 0)[:, None, None, :, None]
        plain = jnp.where(counts, turn_positions(q, -position[:, None, None], self.rope), 0.0)
        number = jnp.broadcast_to(counts.astype(jnp.float32), (*q.shape[:-1], q.shape[-1] // 2))
        lengths = jnp.concatenate([_pairs(plain), number], axis=-1)
        return memory + jnp.stack([jnp.sum(plain, axis=3), jnp.sum(lengths, axis=3)], axis=3)

    def score_all(self, tokens: Tokens) -> Array:
        assert tokens.memory is not None
        total = tokens.memory[:, :, :, 0]
        rest = tokens.memory[:, :, :, 1]
        size, count = jnp.split(rest, 2, axis=-1)
        count = jnp.maximum(count, 1)
        mean = total / jnp.concatenate([count, count], axis=-1)
        size = size / count
        steps = (tokens.end - 1)[:, None] + 2 ** jnp.arange(17, dtype=jnp.int32)[None]
        ahead = turn_positions(mean[..., None, :], steps[:, None, None], self.rope)
        ahead = jnp.mean(ahead, axis=3)
        more = size - _pairs(mean)

        def both(k: Array) -> Array:
            far = jnp.einsum("bkgd,bkld->bkgl", ahead, k, precision="highest")
            return far + jnp.einsum("bkgd,bkld->bkgl", more, _pairs(k), precision="highest")

        expected = _by_blocks(both, tokens.k, mean.shape[2])
        valid = (tokens.position >= 0)[:, :, None]
        number = jnp.maximum(jnp.sum(valid, axis=-1, keepdims=True, dtype=jnp.float32), 1)
        centred = jnp.where(
            valid,
            expected
            - jnp.sum(jnp.where(valid, expected, 0.0), axis=-1, keepdims=True) / number,
            0.0,
        )
        deviation = jnp.sqrt(jnp.sum(centred * centred, axis=-1, keepdims=True) / number)
        return jnp.max(centred / jnp.maximum(deviation, 1e-12), axis=2)


def _log_mean_exp(products: Array, variance: Array, logits: Logits) -> Array:
    """f32[B, K, n, L]: the logarithm of the mean of exp(logit), if products q.k are normal with
    these means and variances.

    With a soft cap it is an integral without a closed form. The trapezoidal rule sums it over
    NODES values of q.k, from 6 deviations below the mean to 6 above the largest that
    exponentials favour, which without a cap lies one deviation of the logits above it.
    """
    if logits.cap is None:
        return logits.of(products) + variance * (logits.scale**2 / 2)
    deviation = jnp.sqrt(jnp.maximum(variance, 0.0))
    favoured = jnp.minimum(deviation * logits.scale, MOST_DEVIATIONS)
    width = ((favoured + 12) / (NODES - 1))[..., None]
    node = jnp.arange(NODES, dtype=jnp.float32).reshape((1,) * products.ndim + (-1,))
    z = width * node - 6
    exponent = logits.of(products[..., None] + deviation[..., None] * z) - z * z / 2
    total = jax.scipy.special.logsumexp(exponent, axis=-1)
    return total + jnp.log(width[..., 0] * np.float32((2 * np.pi) ** -0.5))


def _by_blocks(score: Callable[[Array], Array], k: Array, n: int) -> Array:
    """f32[B, K, n, L]: score(k) of k f32[B, K, L, D] for n queries, some keys at a time: so
    their copies stay small.
    """
    B, K, L, D = k.shape
    block = min(max(BLOCK // (B * K * D * n), 1), L)

    def one(i: Array, scores: Array) -> Array:
        first = jnp.minimum(i * block, L - block)
        part = lax.dynamic_slice_in_dim(k, first, block, axis=2).astype(jnp.float32)
        return lax.dynamic_update_slice_in_dim(scores, score(part), first, axis=3)

    return lax.fori_loop(
        0, -(-L // block), one, vary_with(jnp.zeros((B, K, n, L), jnp.float32), k)
    )


def _pairs(x: Array) -> Array:
    """f32[..., D/2]: the lengths of the pairs of channels that RoPE rotates."""
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.sqrt(low * low + high * high)
