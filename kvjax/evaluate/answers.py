"""One prompt through several caches: each answer with its cost, and where it departs from the
first answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax.evaluate.caches import Caches, Row, check_row, check_rows, make_rows, without_budget
from kvjax.generation import stream, warm_up
from kvjax.generation.prompt_inputs import check_fit
from kvjax.models import Checkpoint
from kvjax.models.chat import common
from kvjax.spec import default_dtype, one_or_several, require_int, round_capacity

BUDGET = 256  # for methods whose text sets none


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of one cache, and its cost."""

    cache: str  # name of the cache, with its budget: "fier@256"
    text: str = ""
    token_ids: tuple[int, ...] = ()
    same: int = 0  # leading tokens that equal the first answer's
    attended: float = (
        0.0  # tokens that a decode step read, mean over steps, KV heads and layers
    )
    device_bytes: int = 0  # of the cache
    host_bytes: int = 0
    prefill_seconds: float = 0.0  # without compilation
    decode_tokens_per_second: float = 0.0
    refused: str = ""  # why it could not be run; all else is empty then

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def side_by_side(
    checkpoint: Checkpoint,
    prompt: str,
    caches: Caches,
    *,
    budget: int | Sequence[int] | None = None,
    dense_layers: int | None = None,
    max_new_tokens: int = 32,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Answer]:
    """Continues one prompt greedily through each cache, and times it.

    Args:
      caches: names of presets, optionally with settings ("fier:budget=64"), or of your own
        ("mine.py:mine"); policies; or functions of a budget; in a list, or by name.
      budget: for caches that have one and do not set it, also several; default 256.
      dense_layers: for caches that do not set their own; None keeps each preset's.
      progress: called with the caches done, their number, and the next one's name.

    Raises:
      ValueError: an unknown cache, or a prompt that does not fit the model. A cache that cannot
        hold its budget or this model has an answer with the reason instead.
    """
    settings: Any = {
        "budget": budget,
        "dense_layers": dense_layers,
        "max_new_tokens": max_new_tokens,
    }
    rows, tokens = prepare(checkpoint, prompt, caches, **settings)
    found: list[Answer] = []
    for at, row in enumerate(rows):
        if progress is not None:
            progress(at, len(rows), row.name)
        found.append(_answer(checkpoint, row, tokens, max_new_tokens, found))
    return found


def prepare(
    checkpoint: Checkpoint,
    prompt: str,
    caches: Caches,
    *,
    budget: int | Sequence[int] | None = None,
    dense_layers: int | None = None,
    max_new_tokens: int = 32,
) -> tuple[list[Row], list[int]]:
    """The rows and the prompt's tokens of `side_by_side`: the part that needs no weights, with
    all its errors.
    """
    require_int("max_new_tokens", max_new_tokens, at_least=1)
    budgets = one_or_several("budget", budget)
    if budgets is None and without_budget(caches):
        budgets = (BUDGET,)
    rows = make_rows(caches, budgets=budgets, dense_layers=dense_layers)
    tokens = checkpoint.encode(prompt)
    config = checkpoint.config
    check_fit(0, len(tokens), max_new_tokens, None, config.max_positions)
    spec = config.spec(1, round_capacity(len(tokens) + max_new_tokens), default_dtype())
    return check_rows(rows, spec, config), tokens


def _answer(
    checkpoint: Checkpoint,
    row: Row,
    tokens: list[int],
    max_new_tokens: int,
    earlier: list[Answer],
) -> Answer:
    spec = checkpoint.model.spec(batch=1, capacity=round_capacity(len(tokens) + max_new_tokens))
    row = check_row(row, spec, checkpoint.config)
    policies = row.policies
    if policies is None:
        return Answer(cache=row.name, refused=row.refused)

    def empty() -> kvjax.Cache:
        return kvjax.init(policies, spec, layers=checkpoint.config.layers)

    settings: dict[str, Any] = dict(
        max_new_tokens=max_new_tokens, stop_tokens=checkpoint.stop_tokens, measure=True
    )
    warm_up(checkpoint.model, empty(), len(tokens), **settings)
    cache = jax.block_until_ready(empty())
    begin = time.perf_counter()
    run = stream(
        checkpoint.model,
        cache,
        [tokens],
        tokenizer=checkpoint.tokenizer,
        block=max_new_tokens,
        **settings,
    )
    jax.block_until_ready(run.logits)
    middle = time.perf_counter()
    text = "".join(run)
    end = time.perf_counter()
    ids = tuple(int(i) for i in run.rows[0])
    first = next((answer.token_ids for answer in earlier if not answer.refused), ids)
    size = kvjax.memory.nbytes(run.cache)
    return Answer(
        cache=row.name,
        text=text,
        token_ids=ids,
        same=common(ids, first),
        attended=float(np.mean(np.asarray(run.attended, np.float64))),
        device_bytes=size.device,
        host_bytes=size.host,
        prefill_seconds=middle - begin,
        decode_tokens_per_second=len(ids) / (end - middle),
    )
