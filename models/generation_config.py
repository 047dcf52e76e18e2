"""The greedy text that a checkpoint asks for in generation_config.json: stop tokens, and rules
that change logits.

transformers applies these rules by default, so that a checkpoint loaded here does too. Fields
that concern draws are not read: without a temperature, text is greedy.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from kvjax.generation.processors import Processors

from .config import Fields

NAME = "generation_config.json"

# Fields that change greedy text and that nothing here applies, with the values that change
# nothing.
NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "constraints": ([],),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_decoder_ids": ([],),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "min_length": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": ([], {}),
    "stop_strings": ([], ""),
    "watermarking_config": ({},),
}


def read_stop_tokens(directory: Path, fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """Reads eos_token_id, one or several, from generation_config.json, or else from
    config.json.

    Ids outside of the vocabulary, which some configs have, are never generated and are left
    out.
    """
    sources = [asked] if (asked := _read(directory)) is not None else []
    source = next((s for s in (*sources, fields) if s.given("eos_token_id")), None)
    if source is None:
        return ()
    ids = source.raw["eos_token_id"]
    ids = ids if isinstance(ids, list) else [ids]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise source.error("eos_token_id", "a token id or a list of them")
    return tuple(dict.fromkeys(i for i in ids if 0 <= i < vocab_size))


def read_processors(directory: Path) -> Processors:
    """Reads the rules that generation_config.json asks for, and warns of fields that nothing
    here applies.

    Raises:
      ValueError: a rule whose value means nothing; the message names the field.
    """
    asked = _read(directory)
    if asked is None:
        return Processors()
    if ignored := [
        name
        for name, harmless in NOT_APPLIED.items()
        if asked.raw.get(name) not in (None, *harmless)
    ]:
        warnings.warn(
            f"{asked.source} asks for {', '.join(ignored)}, which kvjax does not apply: greedy text may differ from "
            "that of transformers",
            stacklevel=4,
        )
    penalty = asked.number("repetition_penalty", 1.0)
    if penalty <= 0:
        raise asked.error("repetition_penalty", "above 0")
    return Processors(
        repetition_penalty=penalty,
        no_repeat_ngram_size=asked.integer("no_repeat_ngram_size", 0, at_least=0),
        min_new_tokens=asked.integer("min_new_tokens", 0, at_least=0),
        suppress_tokens=_ids(asked, "suppress_tokens"),
        begin_suppress_tokens=_ids(asked, "begin_suppress_tokens"),
    )


def _read(directory: Path) -> Fields | None:
    file = directory / NAME
    return Fields.read(file) if file.is_file() else None


def _ids(fields: Fields, name: str) -> tuple[int, ...]:
    ids = fields.raw.get(name)
    ids = [] if ids is None else ids
    if not isinstance(ids, list) or not all(
        isinstance(i, int) and not isinstance(i, bool) for i in ids
    ):
        raise fields.error(name, "a list of token ids")
    return tuple(i for i in ids if 0 <= i < 2**31)  # transformers takes -1 for none
