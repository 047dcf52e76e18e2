"""A tokenizer from its tokenizer.json alone, by the library `tokenizers`.

transformers takes seconds to import, and most prompts need only what that file says.
`FileTokenizer` encodes and decodes by it and loads transformers' tokenizer for everything else,
such as chat templates, which transformers runs in a sandbox that it has hardened.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.validation import naming_absent

# Classes that read tokenizer.json as it is. Others change it while loading, such as Llama's,
# which adds or drops <s>.
AS_IN_THE_FILE = (
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
    "Qwen2Tokenizer",
    "Qwen2TokenizerFast",
)
# Files that may add tokens where tokenizer_config.json does not list them; transformers reads
# them only then.
ADDING = ("special_tokens_map.json", "added_tokens.json")
NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

# Characters of a text that is encoded by the call that lets other threads run meanwhile.
LONG = 4096


class Encoded(dict[str, Any]):
    """Token ids as {"input_ids": ...}."""

    @property
    def input_ids(self) -> Any:
        return self["input_ids"]


class FileTokenizer:
    """The tokenizer of a directory whose tokenizer.json says all: see `read`. `whole` loads
    that of transformers.
    """

    def __init__(
        self, tokenizer: Any, config: dict[str, Any], whole: Callable[[], Any]
    ) -> None:
        self._tokenizer = tokenizer
        self._load = whole
        self.chat_template: Any = config.get("chat_template")
        self._read_template = self.chat_template
        self.clean_up_tokenization_spaces = False  # as transformers has it for BPE
        for name in NAMED:
            token = config.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            setattr(self, name, token)
            setattr(self, f"{name}_id", None if token is None else tokenizer.token_to_id(token))

    @cached_property
    def _whole(self) -> Any:
        return self._load()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._whole, name)

    def __call__(
        self,
        text: Any = None,
        *more: Any,
        add_special_tokens: bool = True,
        verbose: bool = True,
        **named: Any,
    ) -> Any:
        several = isinstance(text, list) and all(isinstance(one, str) for one in text)
        if more or named or not (several or isinstance(text, str)):
            return self._whole(
                text, *more, add_special_tokens=add_special_tokens, verbose=verbose, **named
            )
        if several:
            found = self._tokenizer.encode_batch(text, add_special_tokens=add_special_tokens)
            return Encoded(input_ids=[one.ids for one in found])
        if len(text) <= LONG:
            found = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            (found,) = self._tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        return Encoded(input_ids=found.ids)

    def decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **named: Any,
    ) -> Any:
        """The text of one id or of a sequence, or a list of texts of several; arrays of any
        kind may hold them.
        """
        ids = token_ids["input_ids"] if isinstance(token_ids, Mapping) else token_ids
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        if named or isinstance(ids, str):
            return self._whole.decode(ids, skip_special_tokens, **named)
        ids = [ids] if isinstance(ids, int) else list(ids)
        if ids and np.ndim(ids[0]):
            return [self.decode(one, skip_special_tokens) for one in ids]
        return self._tokenizer.decode(
            [index(i) for i in ids], skip_special_tokens=skip_special_tokens
        )

    def apply_chat_template(self, conversation: Any, *more: Any, **named: Any) -> Any:
        """As transformers', by `chat_template` if that was set since the files were read."""
        if self.chat_template is not self._read_template:
            named.setdefault("chat_template", self.chat_template)
        return self._whole.apply_chat_template(conversation, *more, **named)

    def get_vocab(self) -> dict[str, int]:
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)


def read(directory: Path, whole: Callable[[], Any]) -> FileTokenizer | None:
    """The tokenizer of tokenizer.json, if transformers would read the file as it is; None if it
    might not.

    `whole` loads the tokenizer of transformers.
    """
    with naming_absent("a tokenizer"):
        from tokenizers import Tokenizer
    file = directory / "tokenizer.json"
    settings = directory / "tokenizer_config.json"
    try:
        config = json.loads(settings.read_text(encoding="utf-8"))
        if not isinstance(config, dict) or config.get("tokenizer_class") not in AS_IN_THE_FILE:
            return None
        if "added_tokens_decoder" not in config and any(
            (directory / name).exists() for name in ADDING
        ):
            return None
        if (template := directory / "chat_template.jinja").is_file():
            config["chat_template"] = template.read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_file(str(file))
        # Transformers may change what others decode.
        if type(tokenizer.model).__name__ != "BPE":
            return None
    except Exception:  # a damaged file: transformers says what is wrong
        return None
    made = FileTokenizer(tokenizer, config, whole)
    known = tokenizer.get_added_tokens_decoder()
    added = config.get("added_tokens_decoder", {})
    spelt = all(
        int(i) in known and known[int(i)].content == token.get("content")
        for i, token in added.items()
    )
    named = all(
        getattr(made, name) is None or getattr(made, f"{name}_id") in known for name in NAMED
    )
    around = [
        getattr(made, f"{name}_token_id")
        for name in ("bos", "eos")
        if config.get(f"add_{name}_token")
    ]
    asked = "add_bos_token" in config or "add_eos_token" in config
    if not spelt or not named or (asked and tokenizer.encode("").ids != around):
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return made
