"""A loaded checkpoint: the model, its tokenizer, and text in and out.

    checkpoint = kvjax.models.load("directory")
    checkpoint.generate("Once upon a time", cache="fier:budget=256", max_new_tokens=40).text

`generate` and `stream` fill in what the functions of the same names in `kvjax` need: the
capacity for a prompt, the layers, the stop tokens. Python code in a checkpoint is never run.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import Array
from jax.typing import DTypeLike

import kvjax
from kvjax import presets
from kvjax.cache.cache import Cache, LayerCache
from kvjax.generation import Generation, Stream, drafts, generate, stream
from kvjax.generation.drafts import Draft, Speculation
from kvjax.generation.processors import Processors
from kvjax.generation.prompt_inputs import check_fit
from kvjax.generation.sampling import Sampling, requested_sampling, row_keys
from kvjax.generation.text import Detokenizer
from kvjax.memory import free_bytes, making_on, places_of
from kvjax.policies import PerLayer, Policy
from kvjax.sharding.placement import Placement
from kvjax.spec import require_int, round_capacity
from kvjax.validation import naming_absent, short_repr

from . import tokenizer
from .chat import Chat, default_new_tokens
from .config import DecoderConfig, Fields
from .decoder import Decoder
from .template import Messages, Template, tokenise

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer.tiktoken")

Prompt: TypeAlias = str | Messages

MOST_OF_MEMORY = 0.8  # of the free memory of a device, that caches of many prompts take; the rest is for their prefill


@dataclass(frozen=True, repr=False)
class Completion:
    """The result of `Checkpoint.generate`: the new text and tokens of each prompt, and the
    cache that holds them.
    """

    texts: list[str]  # new text of each prompt
    prompt_lengths: list[int]  # tokens of each prompt
    rows: list[list[int]]  # new token ids of each prompt
    _generation: Generation | None = None  # None if the prompts took turns

    @property
    def text(self) -> str:
        """The new text of the one prompt.

        Raises:
          ValueError: there were several; use `texts`.
        """
        return self._only(self.texts, "texts")

    @property
    def tokens(self) -> list[int]:
        """The new token ids of the one prompt, a stop token included; `rows` has those of
        several.
        """
        return self._only(self.rows, "rows")

    @property
    def generation(self) -> Generation:
        """The result of `kvjax.generate`.

        Raises:
          ValueError: the prompts took turns in the rows of a smaller cache.
        """
        if self._generation is None:
            raise ValueError(
                "the prompts took turns in fewer slots, so no cache holds them all; give fewer of them"
            )
        return self._generation

    @property
    def cache(self) -> Cache:
        """Holds the prompts and all new tokens."""
        return self.generation.cache

    @property
    def attended(self) -> np.ndarray:
        """Tokens that a decode step attended to, mean over steps and KV heads, of each layer:
        f32[L].
        """
        assert self.generation.attended is not None
        return self.generation.attended

    @property
    def speculation(self) -> Speculation | None:
        """The success of the drafts: acceptance, tokens per step; None without `speculate`."""
        return self.generation.speculation

    def _only(self, found: list[Any], plural: str) -> Any:
        if len(found) != 1:
            raise ValueError(
                f"there were {len(found)} prompts; use .{plural}, which has an entry for each"
            )
        return found[0]

    def __repr__(self) -> str:
        short = [text if len(text) <= 60 else f"{text[:57]}..." for text in self.texts[:4]]
        more = f", and {len(self.texts) - 4} more" if len(self.texts) > 4 else ""
        read = (
            ""
            if self._generation is None
            else f", {float(np.mean(self.attended)):.1f} attended per step"
        )
        return f"Completion({', '.join(map(repr, short))}{more}; {sum(map(len, self.rows))} new tokens{read})"


@dataclass(frozen=True)
class Checkpoint:
    """A model that was loaded from a directory, and the directory's tokenizer, chat template
    and stop tokens.
    """

    model: Decoder
    config: DecoderConfig
    # Ids that end a text: from generation_config.json, else from config.json.
    stop_tokens: tuple[int, ...]
    directory: Path
    placement: Placement | None = None  # of the model, and of the caches that it makes
    processors: Processors = Processors()  # rules that generation_config.json asks for

    def __repr__(self) -> str:
        sizes = (
            f"{self.config.layers} layers, {self.config.max_positions or 'unlimited'} positions"
        )
        return f"Checkpoint({str(self.directory)!r}; {sizes})"

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer: by `tokenizers` if tokenizer.json says all of it, else by
        transformers, on first use.

        Raises:
          FileNotFoundError: the directory has no tokenizer files.
          ValueError: transformers cannot read them, or they ask to run the checkpoint's own
            code.
        """
        if not any((self.directory / name).is_file() for name in TOKENIZER_FILES):
            raise FileNotFoundError(
                f"{self.directory} has no tokenizer ({', '.join(TOKENIZER_FILES)}); copy tokenizer.json and "
                "tokenizer_config.json of the model there, or pass token ids"
            )
        _refuse_own_code(self.directory)
        return tokenizer.read(self.directory, self._whole_tokenizer) or self._whole_tokenizer()

    def _whole_tokenizer(self) -> Any:
        with _without_advice():
            with naming_absent(f"the tokenizer in {self.directory}"):
                from transformers import AutoTokenizer

            try:
                return AutoTokenizer.from_pretrained(
                    str(self.directory), local_files_only=True, trust_remote_code=False
                )
            except Exception as error:
                raise ValueError(
                    f"transformers cannot read the tokenizer in {self.directory} (it reads config.json too): {error}"
                ) from error

    def apply_chat(
        self,
        messages: Prompt,
        *,
        answer: bool = True,
        template: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation in the model's chat template; a string is one message of
        the user.

        With `answer`, the ids end with the opening of the model's turn. `template` has what the
        template itself takes, such as {"enable_thinking": False} or {"tools": [...]}. Control
        tokens that a message of the user or of a tool spells, such as `<|im_end|>`, are read as
        text.

        Raises:
          ValueError: the tokenizer has no chat template, or the template refuses the messages.
        """
        return self.chat_template.encode(
            _as_messages(messages), template, add_generation_prompt=answer
        )

    def render_chat(
        self,
        messages: Prompt,
        *,
        answer: bool = True,
        continue_last: bool = False,
        template: Mapping[str, Any] | None = None,
    ) -> str:
        """`apply_chat` as text.

        With `continue_last`, and without `answer`, the text ends where the content of the last
        message does, so that the model continues this message.
        """
        how = {"add_generation_prompt": answer, "continue_final_message": continue_last}
        return self.chat_template.render(_as_messages(messages), template, **how)

    @cached_property
    def chat_stop_tokens(self) -> tuple[int, ...]:
        """`stop_tokens`, and those by which the tokenizer and the chat template end an answer."""
        ends = sorted(self.chat_template.ends())
        return tuple(
            dict.fromkeys((*self.stop_tokens, *(i for i in ends if i < self.config.vocab_size)))
        )

    @property
    def chat_template(self) -> Template:
        """The chat template of the tokenizer."""
        return Template(self.tokenizer, self.directory)

    def encode(self, prompt: Prompt, *, template: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer puts around it, or of
        chat messages.

        Raises:
          ValueError: the prompt has no tokens; or see `apply_chat`.
        """
        if isinstance(prompt, str):
            self._check_length(prompt)
            ids = tokenise(self.tokenizer, prompt, self.directory)
        else:
            ids = self.apply_chat(prompt, template=template)
        if not ids:
            raise ValueError(
                "the prompt is empty: the tokenizer makes no token of it; give at least one character"
            )
        return ids

    def _check_length(self, text: str) -> None:
        """Refuses a text that is too long under any tokenization, before minutes are spent on
        one.
        """
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise ValueError(
                "the prompt cannot be encoded as UTF-8: it has half a character (a surrogate)"
            ) from None
        positions = self.config.max_positions
        if positions is None or size <= positions * 16:
            return
        # Bytes: a character has at most 4.
        longest = 4 * max(map(len, self.tokenizer.get_vocab()))
        if size > positions * longest:
            raise ValueError(
                f"the prompt of {size} bytes has more than {positions} tokens (none of the model's is longer than "
                f"{longest} bytes), but the model has {positions} positions; shorten it to some {positions * 4} bytes"
            )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        text = Detokenizer(self.tokenizer)
        return text.push(ids) + text.finish()

    def init_cache(
        self,
        cache: str | Policy | PerLayer | Sequence[Policy] = "full",
        *,
        capacity: int,
        batch: int = 1,
        dtype: DTypeLike | None = None,
    ) -> Cache:
        """An empty cache for this model; `cache` is a policy, or text as `kvjax.presets.parse`
        reads it.
        """
        if isinstance(cache, Cache | LayerCache):
            raise ValueError(
                f"cache is a policy, or text such as 'fier:budget=256', got a {type(cache).__name__}; to go on from a "
                "cache, kvjax.generate(checkpoint.model, cache, [checkpoint.encode(text)], max_new_tokens=...)"
            )
        policies = presets.parse(cache) if isinstance(cache, str) else cache
        if isinstance(policies, PerLayer):
            name = cache if isinstance(cache, str) else "the policy"
            presets.check_reaches(policies, self.config.attention_layers, name)
        spec = self.model.spec(batch=batch, capacity=capacity, dtype=dtype)
        with making_on(places_of(self.model)):
            made = kvjax.init(
                policies, spec, layers=self.config.layers, placement=self.placement
            )
        self.config.check_cache(made)
        return made

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        cache: str | Policy | PerLayer | Sequence[Policy] = "full",
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        key: Array | None = None,
        stop_tokens: Sequence[int] | None = None,
        capacity: int | None = None,
        speculate: str | Draft | None = None,
        sparse_prompt: float | None = None,
        template: Mapping[str, Any] | None = None,
        processors: Processors | None = None,
        slots: int | None = None,
    ) -> Completion:
        """Continues a text or answers chat messages, or a list of either, decoding through a KV
        cache.

        >>> from kvjax import models
        >>> checkpoint = models.load(models.shipped())
        >>> text = "The pass key is 71432. Remember it.\\nWhat is the pass key? The pass key is "
        >>> checkpoint.generate(text, max_new_tokens=5).text
        '71432'

        Args:
          prompt: text · chat messages, each with "role" and "content" · a list of texts or of
            such conversations.
          cache: a policy such as `kvjax.presets.fier(256)`, or its text: "fier:budget=256".
          max_new_tokens: 128 by default, or fewer if the model's positions leave fewer.
          temperature, top_k, top_p, min_p: greedy without a temperature; see
            `kvjax.generation.sampling`.
          seed, key: for sampling, one of the two; seed 0 by default.
          stop_tokens: `stop_tokens` of the checkpoint by default, or `chat_stop_tokens` after
            chat messages.
          capacity: tokens that the cache can hold; by default what this call needs, on the
            ladder of `kvjax.spec.round_capacity`, whose few sizes share compiled programs.
          speculate: a draft: `kvjax.PromptLookup()`, `kvjax.DraftModel(small.model)` or
            "prompt-lookup:3,8". The model verifies several drafted tokens at a time. The text
            stays the same; `speculation` has the acceptance. "self", or `kvjax.SelfDraft()`,
            drafts by the selection of `cache`, and the text is that of "full".
          sparse_prompt: 0.1 lets blocks of a long prompt attend to a tenth of what is stored,
            on a cache with keys on the device. The text changes.
          template: settings of the chat template: {"enable_thinking": False}, {"tools": [...]}.
          processors: rules that change the logits, such as a repetition penalty; by default
            those that the checkpoint asks for in generation_config.json, as in transformers.
            `Processors()` has none.
          slots: most prompts that decode at the same time; the others take turns in their rows
            (`kvjax.Engine`). By default all, or as many as the free memory of the device has
            room for. The tokens are the same.

        Raises:
          ValueError: an unknown cache, a prompt that does not fit, chat messages without a chat
            template.
        """
        prompts = _as_list(prompt)
        run = self._request(
            prompts,
            cache,
            max_new_tokens,
            capacity,
            stop_tokens,
            template,
            processors,
        )
        draw, key = _draws(temperature, top_k, top_p, min_p, seed, key)
        draft = drafts.parse(speculate) if isinstance(speculate, str) else speculate
        counts = [len(row) for row in run.rows]
        if slots is not None and draft is not None:
            raise ValueError(
                "slots and speculate cannot be given together: prompts that take turns draft no tokens"
            )
        if slots is not None and sparse_prompt is not None:
            raise ValueError(
                "slots and sparse_prompt cannot be given together: prompts that take turns are read in whole"
            )
        together = draft is not None or sparse_prompt is not None
        places = len(counts) if together else self._slots(cache, run, slots)
        if places < len(counts):
            rows = self._take_turns(cache, run, places, draw, key)
            return Completion([self.decode(row) for row in rows], counts, rows)
        run.settings |= {
            "sampling": draw,
            "key": key,
            "measure": True,
            "draft": draft,
            "sparse_prompt": sparse_prompt,
        }
        made = self.init_cache(cache, capacity=run.capacity, batch=len(counts))
        done = generate(self.model, made, run.rows, **run.settings)
        return Completion([self.decode(row) for row in done.rows], counts, done.rows, done)

    def stream(
        self,
        prompt: Prompt,
        *,
        cache: str | Policy | PerLayer | Sequence[Policy] = "full",
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        key: Array | None = None,
        stop_tokens: Sequence[int] | None = None,
        capacity: int | None = None,
        speculate: str | Draft | None = None,
        sparse_prompt: float | None = None,
        template: Mapping[str, Any] | None = None,
        processors: Processors | None = None,
    ) -> Stream:
        """`generate` of one prompt as an iterator over pieces of text, which never cut a
        character.

        The prompt is read by this call, so errors come before the first piece. Between pieces
        the returned `kvjax.generation.Stream` has the current `rows`, `cache` and `attended`.
        """
        prompts = _as_list(prompt)
        if len(prompts) != 1:
            raise ValueError(
                f"stream takes one prompt, got {len(prompts)}; call generate for several"
            )
        run = self._request(
            prompts,
            cache,
            max_new_tokens,
            capacity,
            stop_tokens,
            template,
            processors,
        )
        draw, key = _draws(temperature, top_k, top_p, min_p, seed, key)
        draft = drafts.parse(speculate) if isinstance(speculate, str) else speculate
        run.settings |= {
            "sampling": draw,
            "key": key,
            "measure": True,
            "draft": draft,
            "sparse_prompt": sparse_prompt,
            "tokenizer": self.tokenizer,
        }
        return stream(
            self.model, self.init_cache(cache, capacity=run.capacity), run.rows, **run.settings
        )

    def chat(
        self,
        *,
        system: str | None = None,
        cache: str | Policy | PerLayer | Sequence[Policy] = "full",
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        key: Array | None = None,
        capacity: int | None = None,
        speculate: str | Draft | None = None,
        template: Mapping[str, Any] | None = None,
        processors: Processors | None = None,
    ) -> Chat:
        """A conversation whose cache is kept between turns, so that each turn feeds only its
        own tokens.

        `system` is the message that opens it, `max_new_tokens` those of an answer. Without a
        `capacity` the cache grows as the conversation does. The other arguments are those of
        `generate`.

        Some templates rewrite earlier turns, for example drop the thinking of earlier answers.
        The cache is then cut where the tokens differ, and read again from there; a policy that
        cannot `truncate` reads the whole conversation again.

        Raises:
          ValueError: the tokenizer has no chat template, or an argument that `generate` would
            refuse.
        """
        if isinstance(cache, str):
            presets.parse(cache)
        # Raises early if the model has no template.
        self.render_chat("hello", template=template)
        draw, key = _draws(temperature, top_k, top_p, min_p, seed, key)
        return Chat(
            self,
            lambda capacity: self.init_cache(cache, capacity=capacity),
            system=system,
            max_new_tokens=_given("max_new_tokens", max_new_tokens),
            sampling=draw,
            key=key,
            capacity=_given("capacity", capacity),
            draft=drafts.parse(speculate) if isinstance(speculate, str) else speculate,
            template=template,
            processors=self.processors if processors is None else processors,
        )

    def _request(
        self,
        prompts: list[Prompt],
        cache: str | Policy | PerLayer | Sequence[Policy],
        max_new_tokens: int | None,
        capacity: int | None,
        stop_tokens: Sequence[int] | None,
        template: Mapping[str, Any] | None,
        processors: Processors | None,
    ) -> _Request:
        if isinstance(cache, str):
            presets.parse(cache)  # its errors come before the tokenizer is loaded
        capacity = _given("capacity", capacity)
        max_new_tokens = _given("max_new_tokens", max_new_tokens)
        rows = [self.encode(prompt, template=template) for prompt in prompts]
        longest = max(map(len, rows))
        positions = self.config.max_positions
        new = (
            default_new_tokens(longest, positions) if max_new_tokens is None else max_new_tokens
        )
        check_fit(0, longest, new, capacity, positions)
        if capacity is None:
            capacity = round_capacity(longest + new, rows=len(rows), positions=positions)
        if stop_tokens is None:
            texts = all(isinstance(prompt, str) for prompt in prompts)
            stop_tokens = self.stop_tokens if texts else self.chat_stop_tokens
        rules = self.processors if processors is None else processors
        settings = {"max_new_tokens": new, "stop_tokens": stop_tokens, "processors": rules}
        return _Request(rows, capacity, settings)

    def _slots(self, cache: Any, run: _Request, slots: int | None) -> int:
        """How many prompts decode at the same time."""
        if slots is not None:
            return require_int("slots", slots, at_least=1)
        free = free_bytes()
        if free is None or len(run.rows) == 1:
            return len(run.rows)
        one = jax.eval_shape(lambda: self.init_cache(cache, capacity=run.capacity))
        return max(
            1, min(len(run.rows), int(MOST_OF_MEMORY * free / max(one.nbytes.device, 1)) - 1)
        )

    def _take_turns(
        self, cache: Any, run: _Request, slots: int, draw: Sampling, key: Array | None
    ) -> list[list[int]]:
        """The tokens of each prompt, from an engine; they draw as the rows of one batch would."""
        stop = run.settings["stop_tokens"]
        new = run.settings["max_new_tokens"]
        by: Any = {
            "slots": slots,
            "capacity": run.capacity,
            "max_waiting": len(run.rows),
            "stop_tokens": stop,
        }
        by |= {"processors": run.settings["processors"], "prompt_tokens": run.capacity}
        engine = kvjax.Engine(self, cache, **by)
        keys = None if draw.greedy else row_keys(key, len(run.rows))
        requests = []
        for i, row in enumerate(run.rows):
            own: Any = jax.tree.map(lambda a: np.ravel(a)[i] if np.ndim(a) else a, draw)  # noqa: B023
            requests += engine.submit(
                row,
                max_new_tokens=new,
                sampling=own,
                key=None if keys is None else keys[i : i + 1],
            )
        engine.run()
        for i, request in enumerate(requests):
            if request.error is not None:
                raise ValueError(f"prompt {i}: {request.error}") from request.error
        return [request.tokens for request in requests]


@dataclasses.dataclass
class _Request:
    rows: list[list[int]]  # token ids of the prompts
    capacity: int
    settings: dict[str, Any]


def _given(name: str, value: int | None) -> int | None:
    """A number of tokens, at least 1, or None if it is left out."""
    return None if value is None else require_int(name, value, at_least=1)


def _draws(
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int | None,
    key: Array | None,
) -> tuple[Sampling, Array | None]:
    draw = requested_sampling(temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    if seed is not None and key is not None:
        raise ValueError("seed and key both say how to draw; give one of them")
    if draw.greedy or key is not None:
        return draw, key
    return draw, jax.random.key(
        require_int("seed", 0 if seed is None else seed, at_least=0, at_most=2**32 - 1)
    )


def _as_messages(prompt: Prompt) -> Messages:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _as_list(prompt: Any) -> list[Prompt]:
    """The prompts of text, messages, or a list of either."""
    if _is_prompt(prompt):
        return [prompt]
    if isinstance(prompt, list | tuple) and prompt and all(map(_is_prompt, prompt)):
        return list(prompt)
    what = (
        "an empty list"
        if isinstance(prompt, list | tuple) and not prompt
        else short_repr(prompt)
    )
    if isinstance(prompt, list | tuple) and prompt:
        what = f"a list that begins with {short_repr(prompt[0])}"
    raise ValueError(
        f'prompt must be text, chat messages [{{"role": "user", "content": "..."}}], or a list of either; got {what}; '
        "for token ids call kvjax.generate"
    )


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return True
    messages = isinstance(value, list | tuple) and len(value) > 0
    return messages and all(isinstance(m, Mapping) and "role" in m for m in value)


def _refuse_own_code(directory: Path) -> None:
    """Raises ValueError if the tokenizer's settings name Python code in the checkpoint."""
    for name in ("tokenizer_config.json", "config.json"):
        file = directory / name
        named = Fields.read(file).raw.get("auto_map") if file.is_file() else None
        if name == "config.json" and not (isinstance(named, dict) and "AutoTokenizer" in named):
            continue  # code of the model itself is ignored
        if named:
            raise ValueError(
                f"{file} asks for the checkpoint's own Python code (auto_map: {json.dumps(named)[:200]}), which kvjax "
                "never runs; use a checkpoint whose tokenizer.json needs no code, or remove auto_map if the tokenizer "
                "works without it"
            )


@contextmanager
def _without_advice() -> Iterator[None]:
    """Silences notices that do not matter here: transformers' on missing torch, and tqdm's on
    missing widgets.
    """
    logger = logging.getLogger("transformers")

    def keep(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    logger.addFilter(keep)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "IProgress not found")
            yield
    finally:
        logger.removeFilter(keep)
