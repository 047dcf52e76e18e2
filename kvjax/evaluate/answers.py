"""One prompt through several caches: each answer with its cost, and where it departs from the
first answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax.evaluate.caches import Caches, Row, check_row, check_rows, make_rows, without_budget
from kvjax.evaluate.drafting import acceptance
from kvjax.generation import drafts, prefill, stream, warm_up
from kvjax.generation.drafts import Draft
from kvjax.generation.prompt_inputs import check_fit
from kvjax.models import Checkpoint
from kvjax.models.chat import common
from kvjax.models.checkpoint import Prompt
from kvjax.spec import default_dtype, one_or_several, require_int, round_capacity

BUDGET = 256  # for methods whose text sets none


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of one cache, and its cost."""

    cache: str  # name of the cache, with its budget: "fier@256"
    text: str = ""
    token_ids: tuple[int, ...] = ()
    same: int = 0  # leading tokens that equal the first answer's
    # tokens that a decode step read, mean over steps, KV heads and layers
    attended: float = 0.0
    device_bytes: int = 0  # of the cache
    host_bytes: int = 0
    prefill_seconds: float = 0.0  # without compilation
    decode_tokens_per_second: float = 0.0
    tokens_per_step: float | None = None  # of drafts; None: it drafts none
    accepted: float | None = None  # of a draft of 8, in the first answer; None: not measured
    refused: str = ""  # why it could not be run; all else is empty then

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def side_by_side(
    checkpoint: Checkpoint,
    prompt: Prompt,
    caches: Caches,
    *,
    budget: int | Sequence[int] | None = None,
    dense_layers: int | None = None,
    max_new_tokens: int = 32,
    template: Mapping[str, Any] | None = None,
    speculate: str | Draft | None = None,
    measure_drafts: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Answer]:
    """Continues one prompt greedily through each cache, and times it.

    Args:
      prompt: a text, or chat messages, which the model's chat template renders.
      caches: names of presets, optionally with settings ("fier:budget=64"), or of your own
        ("mine.py:mine"); policies; or functions of a budget; in a list, or by name.
      budget: for caches that have one and do not set it, also several; default 256.
      dense_layers: for caches that do not set their own; None keeps each preset's.
      template: settings of the chat template, as in `Checkpoint.generate`.
      speculate: how caches draft, as in `Checkpoint.generate`; those that cannot decode without.
      measure_drafts: `Answer.accepted`: how many tokens of a draft of 8 agree with the first
        answer, if each cache is forced to follow that (`kvjax.evaluate.acceptance`).
      progress: called with the caches done, their number, and the next one's name.

    Raises:
      ValueError: an unknown cache, or a prompt that does not fit the model. A cache that cannot
        hold its budget or this model has an answer with the reason instead.
    """
    rows, tokens = prepare(
        checkpoint,
        prompt,
        caches,
        budget=budget,
        dense_layers=dense_layers,
        max_new_tokens=max_new_tokens,
        template=template,
    )
    is_text = isinstance(prompt, str)
    return answer_rows(
        checkpoint,
        rows,
        tokens,
        max_new_tokens=max_new_tokens,
        stop_tokens=checkpoint.stop_tokens if is_text else checkpoint.chat_stop_tokens,
        draft=drafts.parse(speculate) if isinstance(speculate, str) else speculate,
        measure_drafts=measure_drafts,
        progress=progress,
    )


def answer_rows(
    checkpoint: Checkpoint,
    rows: Sequence[Row],
    tokens: list[int],
    *,
    max_new_tokens: int,
    stop_tokens: tuple[int, ...],
    draft: Draft | None,
    measure_drafts: bool,
    progress: Callable[[int, int, str], None] | None,
) -> list[Answer]:
    """The answers of `side_by_side` by the rows and the tokens that `prepare` returned."""
    found: list[Answer] = []
    for at, row in enumerate(rows):
        if progress is not None:
            progress(at, len(rows), row.name)
        answer = _answer(checkpoint, row, tokens, max_new_tokens, stop_tokens, found, draft)
        if measure_drafts and not answer.refused:
            answer = _with_accepted(checkpoint, row, tokens, max_new_tokens, [*found, answer])
        found.append(answer)
    return found


def prepare(
    checkpoint: Checkpoint,
    prompt: Prompt,
    caches: Caches,
    *,
    budget: int | Sequence[int] | None = None,
    dense_layers: int | None = None,
    max_new_tokens: int = 32,
    template: Mapping[str, Any] | None = None,
) -> tuple[list[Row], list[int]]:
    """The rows and the prompt's tokens of `side_by_side`: the part that needs no weights, with
    all its errors.
    """
    require_int("max_new_tokens", max_new_tokens, at_least=1)
    budgets = one_or_several("budget", budget)
    if budgets is None and without_budget(caches):
        budgets = (BUDGET,)
    rows = make_rows(caches, budgets=budgets, dense_layers=dense_layers)
    tokens = checkpoint.encode(prompt, template=template)
    config = checkpoint.config
    check_fit(0, len(tokens), max_new_tokens, None, config.max_positions)
    spec = config.spec(1, round_capacity(len(tokens) + max_new_tokens), default_dtype())
    return check_rows(rows, spec, config), tokens


def _answer(
    checkpoint: Checkpoint,
    row: Row,
    tokens: list[int],
    max_new_tokens: int,
    stop_tokens: tuple[int, ...],
    earlier: list[Answer],
    draft: Draft | None,
) -> Answer:
    made = _maker(checkpoint, row, tokens, max_new_tokens)
    if isinstance(made, str):
        return Answer(cache=row.name, refused=made)
    draft = draft if _drafts(draft, made) else None
    warm_up(
        checkpoint.model,
        made(),
        len(tokens),
        max_new_tokens=max_new_tokens,
        stop_tokens=stop_tokens,
        processors=checkpoint.processors,
        measure=True,
        draft=draft,
        block=max_new_tokens,
    )
    cache = jax.block_until_ready(made())
    begin = time.perf_counter()
    run = stream(
        checkpoint.model,
        cache,
        [tokens],
        tokenizer=checkpoint.tokenizer,
        block=max_new_tokens,
        max_new_tokens=max_new_tokens,
        stop_tokens=stop_tokens,
        processors=checkpoint.processors,
        measure=True,
        draft=draft,
    )
    jax.block_until_ready(run.logits)
    middle = time.perf_counter()
    text = "".join(run)
    end = time.perf_counter()
    ids = tuple(int(i) for i in run.rows[0])
    size = kvjax.memory.nbytes(run.cache)
    return Answer(
        cache=row.name,
        text=text,
        token_ids=ids,
        same=common(ids, _first(earlier, ids)),
        attended=float(np.mean(np.asarray(run.attended, np.float64))),
        device_bytes=size.device,
        host_bytes=size.host,
        prefill_seconds=middle - begin,
        decode_tokens_per_second=len(ids) / (end - middle),
        tokens_per_step=None if run.speculation is None else run.speculation.tokens_per_step,
    )


def _with_accepted(
    checkpoint: Checkpoint,
    row: Row,
    tokens: list[int],
    max_new_tokens: int,
    found: list[Answer],
) -> Answer:
    """The last of the answers `found`, with `accepted`; as it is for a text of one token."""
    answer = found[-1]
    wanted = _first(found, ())
    made = _maker(checkpoint, row, tokens, max_new_tokens)
    if isinstance(made, str) or len(wanted) < 2:
        return answer
    _, cache = prefill(checkpoint.model, made(), np.array([tokens]))
    measured, _ = acceptance(checkpoint.model, cache, [wanted])
    return replace(answer, accepted=measured.accepted)


def _maker(
    checkpoint: Checkpoint, row: Row, tokens: list[int], max_new_tokens: int
) -> Callable[[], kvjax.Cache] | str:
    """Makes an empty cache of a row; or why there can be none."""
    spec = checkpoint.model.spec(batch=1, capacity=round_capacity(len(tokens) + max_new_tokens))
    row = check_row(row, spec, checkpoint.config)
    policies = row.policies
    if policies is None:
        return row.refused
    return partial(kvjax.init, policies, spec, layers=checkpoint.config.layers)


def _first(answers: Sequence[Answer], otherwise: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens of the first answer."""
    return next((answer.token_ids for answer in answers if not answer.refused), otherwise)


def _drafts(draft: Draft | None, made: Callable[[], kvjax.Cache]) -> bool:
    """True if such a cache can draft."""
    try:
        drafts.check_draft(draft, jax.eval_shape(made))
    except ValueError:
        return False
    return draft is not None
