"""Several sampled answers to a question: how they are drawn, and their joint scores.

mean@n is the mean score of n answers to a question, and pass@k the chance that at least one of k answers is right.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from jax import Array

from kvjax.generation.sampling import Sampling, sampling
from kvjax.spec import require_int


@dataclass(frozen=True, kw_only=True)
class Draws:
    """How many answers a question gets, and how they are drawn; by default one, greedy.

    An answer depends only on the seed, its question and its number, not on the other rows of its batch.

    >>> Draws(count=4)
    Traceback (most recent call last):
        ...
    ValueError: Draws(count=4) at temperature 0 gives 4 equal answers; set a temperature such as 0.6, or count=1
    """

    count: int = 1
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require_int("Draws(count=...)", self.count, at_least=1)
        require_int("Draws(seed=...)", self.seed, at_least=0)
        if self.sampling.greedy and self.count > 1:
            raise ValueError(
                f"Draws(count={self.count}) at temperature 0 gives {self.count} equal answers; set a temperature such "
                "as 0.6, or count=1"
            )

    @property
    def sampling(self) -> Sampling:
        return sampling(self.temperature, top_k=self.top_k, top_p=self.top_p)

    def key(self) -> dict[str, Any]:
        """The settings that decide the answers, as JSON; empty if decoding is greedy."""
        return {} if self.sampling.greedy else {"draws": asdict(self)}

    def keys(self, ids: Sequence[str | None], number: int) -> Array | None:
        """A key for answer `number` to each question; None where no key is needed."""
        if self.sampling.greedy:
            return None
        named = np.array([zlib.crc32((i or "").encode()) for i in ids], np.uint32)
        own = jax.random.fold_in(jax.random.key(self.seed), number)
        return jax.vmap(jax.random.fold_in, (None, 0))(own, named)


def pass_at(answers: int, right: int, k: int) -> float:
    """The unbiased pass@k of `right` right answers out of `answers`: the chance that k of them contain a right one.

    **Source:** Chen et al. 2021 (arXiv 2107.03374), Eq. 1.

    >>> pass_at(4, 1, 1), pass_at(4, 1, 2), pass_at(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    if not 1 <= k <= answers or not 0 <= right <= answers:
        raise ValueError(f"pass_at(answers={answers}, right={right}, k={k}) needs k in 1..{answers}, right in 0..")
    return 1.0 - math.comb(answers - right, k) / math.comb(answers, k)


def join(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Joins the results of several answers to a question into one; a single result is returned as it is."""
    if len(results) == 1:
        return dict(results[0])
    own = ("answer", "new_tokens", "score")
    common = {name: value for name, value in results[0].items() if name not in own}
    drawn = [{name: result[name] for name in own} for result in results]
    return {**common, "draws": drawn, "score": float(np.mean([one["score"] for one in drawn]))}


def rescore(result: dict[str, Any], score: Callable[[str], float]) -> None:
    """Recomputes the scores of a stored result."""
    for one in result.get("draws", [result] if "answer" in result else []):
        one["score"] = score(one["answer"])
    if "draws" in result:
        result["score"] = float(np.mean([one["score"] for one in result["draws"]]))


def passes(results: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """pass@k by k, for powers of two and the number of answers; empty if questions have one answer each.

    An answer is right if its score is 1.
    """
    count = min((len(result.get("draws", ())) for result in results), default=0)
    if count < 2:
        return {}
    sizes = sorted({2**i for i in range(count.bit_length())} | {count})
    right = [sum(one["score"] == 1 for one in result["draws"]) for result in results]
    total = [len(result["draws"]) for result in results]
    return {k: float(np.mean([pass_at(n, c, k) for n, c in zip(total, right, strict=True)])) for k in sizes}
