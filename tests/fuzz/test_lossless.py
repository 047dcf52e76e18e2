"""Drafts of a model by itself give the text of full attention in random cases; a verification
that is not exact is caught.

`python -m tests.fuzz.lossless --cases 2000` runs as many as you like.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from flax import nnx

from kvjax import Fier, Fifo
from kvjax.models import Decoder
from tests.fuzz.lossless import SHARED, Differs, check, run_cases, shape
from tests.laws.broken import BrokenRetrieval

QUICK = 6  # cases, which share their programs


def test_random_drafts_give_the_text_of_full_attention() -> None:
    told: Counter[str] = Counter()
    run_cases(0, QUICK, told)
    assert told["accepted"] > 0
    assert told["drafted"] > told["accepted"]


@pytest.mark.thorough
@pytest.mark.parametrize("group", range(1, 9))
def test_more_random_drafts_give_the_text_of_full_attention(group: int) -> None:
    run_cases(SHARED * group, SHARED, Counter())


def test_a_verification_that_selects_is_caught() -> None:
    drawn = shape(0)
    policy = BrokenRetrieval(
        selector=Fier(group=8),
        budget=8,
        sink=1,
        local=2,
        demote=Fifo(leave=8),
        fault="selects in exact steps",
    )
    broken = replace(drawn, layers=(policy, policy))
    model = Decoder(drawn.config, rngs=nnx.Rngs(0))

    def check_all() -> None:
        for seed in range(QUICK):
            check(broken, model, seed, Counter())

    with pytest.raises(Differs, match=r"is not that of"):
        check_all()
