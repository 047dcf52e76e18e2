r"""EleutherAI's lm-evaluation-harness on a kvjax checkpoint, decoding through any cache.

    import lm_eval
    from kvjax.evaluate.harness import KvjaxLM

    model = KvjaxLM(kvjax.models.load("directory"), cache="fier:budget=256")
    lm_eval.simple_evaluate(model=model, tasks=["gsm8k"])

or from a shell, with the harness's own options:

    python -m kvjax.evaluate.harness run --model kvjax --tasks gsm8k \
        --model_args pretrained=directory,cache=fier:budget=256

Every scored token comes from a decode step: a context is prefilled except for its last token,
which is fed through the cache like the tokens of the continuation. Needs the extra `harness`:
`pip install lm_eval pytablewriter`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows
except ImportError as error:
    raise ImportError(
        "kvjax.evaluate.harness needs lm_eval: pip install lm_eval pytablewriter"
    ) from error

from kvjax import models
from kvjax.cache.cache import Cache, raise_on_overflow
from kvjax.evaluate.accuracy import cut, question_columns
from kvjax.evaluate.caches import check_rows, make_rows
from kvjax.evaluate.plan import Answer, Plan, feed, prepare, run
from kvjax.evaluate.tasks import Example
from kvjax.models import Checkpoint
from kvjax.models.template import parse_settings
from kvjax.serve import Engine
from kvjax.spec import padded_capacity, require_int

BATCH = 8
MOST_TOKENS = 256  # of an answer
# Settings of a task that limit the tokens of an answer; the first one counts, as in the
# harness.
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class Scored(NamedTuple):
    """A context and its continuation as token ids; the continuation is scored."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class _Requests:
    """A task made of texts to score."""

    given: tuple[Example, ...]
    max_new_tokens = 0
    stop = ()

    name = "requests"
    metric = "none"
    chat = False

    def key(self) -> Mapping[str, Any]:
        return {"task": self.name}

    def examples(self, tokenizer: Any) -> list[Example]:
        return list(self.given)

    def score(self, example: Example, answer: str) -> float:
        return 0.0


@register_model("kvjax")
class KvjaxLM(TemplateLM):
    """A checkpoint as lm-evaluation-harness drives it: `generate_until` and `loglikelihood`
    through one cache.

    Args:
      checkpoint: from `kvjax.models.load`.
      cache: a policy, or text such as "fier:budget=256".
      dense_layers: number of first layers that attend to everything, unless the cache's text
        sets it; None: the preset's own.
      batch: requests decoded together; the slots of a `kvjax.Engine`.
      max_gen_toks: maximum new tokens of an answer, unless the task sets it.
      template: settings of the chat template, such as {"enable_thinking": False}, for runs with
        --apply_chat_template; or their text, "enable_thinking=false" or a JSON object.

    Raises:
      ValueError: a wrong cache or size, or a setting that the chat template does not use.

    **Source:** the interface of lm-evaluation-harness 0.4.9 and later. **Differs** from its
    Hugging Face model: a context's last token and all of a continuation are decoded one by one,
    and a prompt that is too long is an error.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        cache: Any = "full",
        *,
        dense_layers: int | None = None,
        batch: int = BATCH,
        max_gen_toks: int = MOST_TOKENS,
        template: Mapping[str, Any] | str | None = None,
    ) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.batch = require_int("KvjaxLM(batch=...)", batch, at_least=1)
        self.max_gen_toks = require_int("KvjaxLM(max_gen_toks=...)", max_gen_toks, at_least=1)
        self.rows = make_rows(
            cache if isinstance(cache, str) else {"cache": cache}, dense_layers=dense_layers
        )
        self.template = _template(template)
        checkpoint.chat_template.check_used(self.template, where="template")

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> KvjaxLM:
        """From `--model_args pretrained=DIRECTORY,cache=...`; the shipped model without
        `pretrained`.
        """
        more = {} if additional_config is None else dict(additional_config)
        settings = {**arg_dict}
        directory = settings.pop("pretrained", None)
        dtype = settings.pop("dtype", None)
        size = settings.pop("batch_size", more.get("batch_size"))
        if size is not None:
            settings["batch"] = require_int("batch_size", _int(size), at_least=1)
        for name in ("dense_layers", "batch", "max_gen_toks"):
            if name in settings:
                settings[name] = _int(settings[name])
        template = settings.pop("template", None)
        unknown = settings.keys() - {"cache", "dense_layers", "batch", "max_gen_toks"}
        if unknown:
            raise ValueError(
                f"--model_args got {', '.join(sorted(unknown))}; kvjax takes pretrained, cache, dtype, dense_layers, "
                "batch_size, max_gen_toks and template. For a cache of several settings write "
                """--model_args 'cache="fier:budget=256,group=16"'"""
            )
        checkpoint = models.load(directory or models.shipped(), dtype=dtype or None)
        return cls(
            checkpoint,
            settings.get("cache", "full"),
            dense_layers=settings.get("dense_layers"),
            batch=settings.get("batch", BATCH),
            max_gen_toks=settings.get("max_gen_toks", MOST_TOKENS),
            template=template,
        )

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> KvjaxLM:
        """`create_from_arg_obj` from the text of `--model_args`."""
        pairs = (part.partition("=") for part in arg_string.split(",") if part)
        return cls.create_from_arg_obj(
            {name: value for name, _, value in pairs}, additional_config
        )

    # -------------------------------------------------------------------------------------------- the harness's methods

    @property
    def tokenizer(self) -> Any:
        return self.checkpoint.tokenizer

    @property
    def tokenizer_name(self) -> str:
        """The checkpoint's directory, by which the harness caches tokenized requests."""
        return str(self.checkpoint.directory)

    @property
    def max_length(self) -> int:
        """Tokens of a window of `loglikelihood_rolling`."""
        return self.checkpoint.config.max_positions or 1 << 20

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        for end in (self.tokenizer.eos_token_id, *self.checkpoint.stop_tokens):
            if end is not None:
                return int(end)
        where = self.checkpoint.directory / "generation_config.json"
        raise ValueError(
            f"the model names no token that begins or ends a text; set eos_token_id in {where}"
        )

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: BOS if the tokenizer has one, else the token
        that ends texts.
        """
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text, up to the answer; without `add_generation_prompt`, up to the
        end of what the last message says, for the model to continue."""
        return self.checkpoint.render_chat(
            chat_history,
            answer=add_generation_prompt,
            continue_last=not add_generation_prompt,
            template=self.template,
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        begin = self.tokenizer.bos_token
        if add_special_tokens is None:  # a chat template may already have added BOS
            add_special_tokens = not (begin and string.startswith(begin))
        ids = self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False)[
            "input_ids"
        ]
        return [int(i) for i in ids]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The greedy answer to each request, up to the first of its stop texts.

        Raises:
          ValueError: a request that asks for sampling, or whose prompt does not fit the model's
            positions.
        """
        if not requests:
            return []
        asked = [
            (self.tok_encode(request.args[0]), *self._ends(request.args[1]))
            for request in requests
        ]
        config = self.checkpoint.config
        decode = self.checkpoint.tokenizer.decode
        capacity = padded_capacity(max(len(prompt) + limit for prompt, limit, _ in asked))
        spec = self.checkpoint.model.spec(batch=1, capacity=capacity)
        (row,) = check_rows(self.rows, spec, config)
        # Prompts are read whole, and so exactly: an answer shows what the cache's method loses
        # in decoding.
        engine = Engine(
            self.checkpoint,
            row.policies,
            slots=min(self.batch, len(asked)),
            capacity=capacity,
            chunk=None,
            prompt_tokens=capacity,
            max_waiting=len(asked),
        )
        stops = {
            request: stop
            for prompt, limit, stop in asked
            for request in engine.submit(
                prompt, max_new_tokens=limit, stop_tokens=self.checkpoint.stop_tokens
            )
        }
        answers = dict.fromkeys(stops, "")
        while any(not request.done for request in stops):
            for request in engine.step():
                answers[request], ended = cut(
                    decode(request.tokens, skip_special_tokens=True), stops[request]
                )
                if ended:
                    engine.cancel(request)
                if request.error is not None:
                    raise request.error
        return list(answers.values())

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Log probability of each whole text, in windows of the model's positions."""
        windows = []
        owner = []
        for i, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            for context, scored in get_rolling_token_windows(
                tokens, self.prefix_token_id, self.max_length, 1
            ):
                # `context` also has the scored tokens, except the last
                split = len(context) - len(scored) + 1
                windows.append(Scored(tuple(context[:split]), tuple(scored)))
                owner.append(i)
        totals = [0.0] * len(requests)
        for i, (total, _) in zip(owner, self._score(windows), strict=True):
            totals[i] += total
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        return self._score(
            [Scored(tuple(context), tuple(rest)) for _, context, rest in requests]
        )

    # ----------------------------------------------------------------------------------------------------------- parts

    def _ends(self, settings: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
        """The number of tokens and the texts that end an answer."""
        # If a task leaves it out, the harness goes by the temperature.
        sampled = settings.get("do_sample")
        if sampled is not False and settings.get("temperature", 1.0 if sampled else 0.0) > 0:
            raise ValueError(
                f"the task asks for sampling ({dict(settings)}), and kvjax answers greedily here; give the task "
                "--gen_kwargs do_sample=false"
            )
        until = settings.get("until") or []
        stop = (until,) if isinstance(until, str) else tuple(text for text in until if text)
        given = {name: settings[name] for name in LIMITS if settings.get(name) is not None}
        name, limit = next(iter(given.items()), ("max_gen_toks", self.max_gen_toks))
        return require_int(name, int(limit), at_least=1), stop

    def _run(self, task: _Requests, each: Answer) -> dict[int, dict[str, Any]]:
        plan = prepare(
            self.checkpoint, task, self.rows, dtype=self.checkpoint.model.dtype, model="harness"
        )
        (cell,) = run(self.checkpoint, plan, each, batch=self.batch)
        return {int(example["id"]): example for example in cell.examples}

    def _score(self, pairs: Sequence[Scored]) -> list[tuple[float, bool]]:
        """Log probability of each continuation after its context, and whether each of its
        tokens is the likeliest.

        All tokens of a context but the last are prefilled, and at least one, as a cache begins
        with a prompt.
        """
        if not pairs:
            return []
        given = []
        for i, (context, rest) in enumerate(pairs):
            if not context or not rest:
                raise ValueError(
                    f"request {i} has {len(context)} tokens of context and {len(rest)} to score; each must be at least "
                    "1"
                )
            cut = max(1, len(context) - 1)
            given.append(Example(str(i), context[:cut], (), {}, (*context[cut:], *rest)[:-1]))

        def score(
            checkpoint: Checkpoint,
            cache: Cache,
            logits: Array,
            plan: Plan,
            asked: Sequence[str | None],
        ) -> tuple[Mapping[str, dict[str, Any]], list[float], int]:
            fed = [() if i is None else plan.fed[i] for i in asked]
            wanted = [() if i is None else pairs[int(i)].continuation for i in asked]
            # 1 where the prompt's own logits score the first token.
            skip = [len(w) - len(f) for w, f in zip(wanted, fed, strict=True)]
            first = np.asarray(jax.nn.log_softmax(logits, axis=-1))
            targets = [w[s:] for w, s in zip(wanted, skip, strict=True)]
            room = question_columns(max(1, *map(len, fed)))
            done = feed(checkpoint, cache, logits, fed, targets, room=room)
            raise_on_overflow(done.cache)
            nll = np.asarray(done.nll, np.float64)
            greedy = np.asarray(done.greedy)
            found = {}
            for row, i in enumerate(asked):
                if i is None:
                    continue
                size = len(fed[row])
                total = -nll[row, :size].sum()
                likeliest = bool(greedy[row, :size].all())
                if skip[row]:
                    token = wanted[row][0]
                    total = total + first[row, token]
                    likeliest = likeliest and int(first[row].argmax()) == token
                found[i] = {"logprob": float(total), "greedy": likeliest}
            return found, np.asarray(done.attended).tolist(), int(done.steps)

        results = self._run(_Requests(tuple(given)), score)
        return [(results[i]["logprob"], results[i]["greedy"]) for i in range(len(pairs))]


def _template(given: Mapping[str, Any] | str | None) -> dict[str, Any] | None:
    """Settings of the chat template, which a shell gives as text."""
    if given is None:
        return None
    return parse_settings([given] if isinstance(given, str) else given, where="template")


def _int(value: Any) -> Any:
    """Converts a number that a shell gave as text; returns anything else as it is, for
    `require_int` to refuse.
    """
    return int(value) if isinstance(value, str) and value.lstrip("-").isdigit() else value


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    sys.exit(cli_evaluate())
