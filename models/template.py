"""Chat templates: a conversation as text and token ids, and the tokens that end a turn.

A template writes the control tokens of a conversation, such as the marks around a turn. The
text of users must not: a message that spells such a token is read as its characters, unless the
message is the system's or the model's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from kvjax.validation import check_utf8, cut, naming_absent, nearest, short_repr

Messages: TypeAlias = Sequence[Mapping[str, Any]]  # {"role": ..., "content": ...} of each turn

TRUSTED = ("system", "developer", "assistant")  # roles whose messages may hold control tokens
OURS = (
    "conversation",
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "return_dict",
    # Transformers' function takes these for token ids that it makes; here they change nothing.
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)
FIRST_MARK = 0xE000  # of the characters of Unicode that mean nothing
# Names that transformers gives to every template, beside the tokenizer's special tokens.
GIVEN = ("raise_exception", "strftime_now")
# Transformers' own statement, around what the model says; jinja2 alone does not know it.
GENERATION = re.compile(r"{%-?\s*(end)?generation\s*-?%}")
EXAMPLE = "enable_thinking=false"


class Template:
    """The chat template of a tokenizer.

    `settings` are what the template itself takes, such as {"enable_thinking": False} or
    {"tools": [...]}.
    """

    def __init__(self, tokenizer: Any, directory: Any) -> None:
        self._tokenizer = tokenizer
        self._directory = directory

    def render(self, messages: Messages, settings: Mapping[str, Any] | None, **how: Any) -> str:
        """The text of a conversation.

        Raises:
          ValueError: no chat template, one that refuses the messages, or settings that it
            cannot have.
        """
        if self._tokenizer.chat_template is None:
            raise ValueError(
                f"the tokenizer in {self._directory} has no chat template, so this is not a chat model; give another "
                "directory, or the text itself as the prompt (of `kvjax generate`, or of a server's /v1/completions)"
            )
        settings = {} if settings is None else settings
        if not isinstance(settings, Mapping) or not all(
            isinstance(name, str) for name in settings
        ):
            raise ValueError(
                f'template must be the settings of the chat template, such as {{"enable_thinking": False}}, got '
                f"{short_repr(settings)}"
            )
        if taken := [name for name in OURS if name in settings]:
            raise ValueError(
                f"template sets {', '.join(taken)}, which kvjax sets itself; leave it out"
            )
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tokenize=False, **settings, **how
                )
            )
        except Exception as error:
            raise ValueError(
                f"the chat template in {self._directory} refuses the messages: {error}"
            ) from error

    def check_used(self, settings: Mapping[str, Any] | None, *, where: str) -> None:
        """Raises ValueError for a setting that the template never looks at, so that it would
        change nothing. A template that cannot be read without transformers passes.
        """
        used = self._names() if settings else None
        if not settings or used is None:
            return
        tokens = set(self._tokenizer.special_tokens_map)
        known = sorted(used - tokens - set(OURS))
        for name in settings:
            if name in used or name in OURS:  # `render` refuses those of kvjax
                continue
            takes = f"it takes {', '.join(known)}" if known else "it takes no settings"
            near = nearest(name, known)
            cure = f"did you mean {near!r}?" if near else f"{takes}; leave it out"
            raise ValueError(
                f"{where} {name}: the chat template in {self._directory} does not use it; {cure}"
            )

    def _names(self) -> set[str] | None:
        """The names that the template looks up; None if it is no text that jinja2 can read."""
        with naming_absent("a chat template"):
            from jinja2 import TemplateError
            from jinja2.meta import find_undeclared_variables
            from jinja2.sandbox import ImmutableSandboxedEnvironment

        source = self._tokenizer.chat_template
        several = source.values() if isinstance(source, Mapping) else [source]
        environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
        found: set[str] = set()
        try:
            for text in several:
                tree = environment.parse(GENERATION.sub("", text))
                found |= find_undeclared_variables(tree)
        except (TemplateError, TypeError, RecursionError):
            return None
        return found - set(environment.globals) - set(GIVEN)

    def encode(
        self, messages: Messages, settings: Mapping[str, Any] | None, **how: Any
    ) -> list[int]:
        """Token ids of `render`; control tokens that a user spells are read as text."""
        mark = _unused(messages)
        names = sorted(self.control_tokens, key=len, reverse=True)
        safe = [_with_marks(message, names, mark) for message in messages]
        ids = []
        for part in self.render(safe, settings, **how).split(mark):
            ids += self.read(part) if part else []
        return ids

    def read(self, text: str) -> list[int]:
        """Token ids of rendered text."""
        return tokenise(self._tokenizer, text, self._directory, add_special_tokens=False)

    def after(
        self,
        held: Sequence[int],
        messages: Messages,
        ids: Sequence[int],
        settings: Mapping[str, Any] | None,
    ) -> list[int]:
        """Tokens of the text of a conversation after the text of `held`; none if it does not
        begin with that text.

        `ids` are those of the whole conversation, with the opening of an answer.
        """
        begin = self._tokenizer.decode(list(held), skip_special_tokens=False)
        text = self.render(messages, settings, add_generation_prompt=True)
        # A user spells control tokens.
        if not text.startswith(begin) or self.read(text) != list(ids):
            return []
        return self.read(text[len(begin) :])

    @property
    def control_tokens(self) -> dict[str, int]:
        """The spellings of tokens that are no text, such as `<|im_end|>`, and their ids."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        found = {
            str(token): int(i) for i, token in added.items() if getattr(token, "special", False)
        }
        named = zip(
            self._tokenizer.all_special_tokens, self._tokenizer.all_special_ids, strict=True
        )
        return {
            spelling: i for spelling, i in {**found, **dict(named)}.items() if len(spelling) > 1
        }

    def ends(self, settings: Mapping[str, Any] | None = None) -> set[int]:
        """The tokens that end an answer: the tokenizer's own, and the one that the template
        writes after it.
        """
        end = self._tokenizer.eos_token_id
        found = set() if end is None else {int(end)}
        answer = "kvjax stands here for an answer"
        talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": answer}]
        try:
            _, rendered, after = self.render(
                talk, settings, add_generation_prompt=False
            ).rpartition(answer)
        except ValueError:  # it wants other messages
            return found
        by_id = {i: spelling for spelling, i in self.control_tokens.items()}
        for i in self.read(after) if rendered else ():
            if i in by_id:
                return found | {i}
            if self._tokenizer.decode([i]).strip():
                break
        return found


def parse_settings(given: Sequence[str] | Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Settings of a chat template, each written as NAME=VALUE or all as a JSON object.

    A value is JSON, or else text; true, false and none may begin with a capital, as in Python.
    `where` begins an error message.

    >>> parse_settings(["enable_thinking=False", "effort=high"], where="template")
    {'enable_thinking': False, 'effort': 'high'}
    >>> parse_settings(['{"tools": [{"name": "search"}]}'], where="template")
    {'tools': [{'name': 'search'}]}

    Raises:
      ValueError: text that is neither, a name that is given twice, or text that is not UTF-8.
    """
    if isinstance(given, Mapping):
        return dict(given)
    settings: dict[str, Any] = {}
    for text in given:
        for name, value in _pairs(text, where):
            if name in settings:
                raise ValueError(f"{where}: {name} is given twice; give it once")
            settings[name] = value
    return settings


def _pairs(text: str, where: str) -> Iterable[tuple[str, Any]]:
    """The names and values of NAME=VALUE, or of a JSON object."""
    check_utf8(f"{where} {short_repr(text)}", text)
    wanted = (
        f'NAME=VALUE such as {EXAMPLE}, or a JSON object such as {{"enable_thinking": false}}'
    )
    if text.lstrip().startswith("{"):
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{where} takes {wanted}; got {short_repr(text)}: {error}"
            ) from error
        return list(value.items())
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not name:
        raise ValueError(f"{where} takes {wanted}; got {short_repr(text)}")
    return [(name, _value(value))]


def _value(text: str) -> Any:
    """A value of a setting: JSON, true, false or none as Python writes them, or text."""
    plain: dict[str, Any] = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in plain:
        return plain[text.lower()]
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def tokenise(tokenizer: Any, text: str, directory: Any, **how: Any) -> list[int]:
    """Token ids of a text.

    Raises:
      ValueError: the tokenizer fails on the text, such as by an expression of its own that
        never ends.
    """
    try:
        return [int(i) for i in tokenizer(text, **how)["input_ids"]]
    except BaseException as error:
        # An error of tokenizers, which is no Exception.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(
                f"the tokenizer in {directory} fails on the text: {cut(str(error))}"
            ) from None
        raise


def _unused(messages: Messages) -> str:
    """A character that no message holds."""
    text = repr([dict(message) for message in messages])
    return next(
        mark
        for mark in map(chr, range(FIRST_MARK, FIRST_MARK + 6400))
        if repr(mark)[1:-1] not in text
    )


def _with_marks(value: Any, names: Iterable[str], mark: str) -> Any:
    """A message of a user with a mark within each control token, at which the text is cut
    before it is tokenised.
    """
    if isinstance(value, Mapping):
        if value.get("role") in TRUSTED:
            return dict(value)
        return {
            name: part if name == "role" else _with_marks(part, names, mark)
            for name, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [_with_marks(part, names, mark) for part in value]
    if isinstance(value, str):
        for name in names:  # longest first: one may begin another
            value = value.replace(name, name[:1] + mark + name[1:])
    return value
