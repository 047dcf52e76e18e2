"""Pieces of text join to all characters of the ids, however the ids are cut."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvjax.generation.text import Detokenizer

WORDS = ["▁a", "b", "▁", "▁wor", "ld", "é", "▁日本"]


def byte_fallback() -> Any:
    """Bytes as tokens, and a decoder that makes U+FFFD of every byte of a run that is no text,
    as Llama 2 and Mistral have it."""
    vocab = {
        "<unk>": 0,
        **{f"<0x{i:02X}>": 1 + i for i in range(256)},
        **{w: 257 + i for i, w in enumerate(WORDS)},
    }
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def byte_level() -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def bytes_in(tokenizer: Any, content: bytes) -> list[int]:
    if tokenizer.token_to_id("<0x00>") is not None:
        return [1 + byte for byte in content]
    # The alphabet of byte-level BPE: printable bytes stand for themselves, and the others
    # follow from U+0100.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return [
        tokenizer.token_to_id(chr(b if b in printable else 256 + others.index(b)))
        for b in content
    ]


TOKENIZERS = {"byte-fallback": byte_fallback(), "byte-level": byte_level()}
FACE = "😀".encode()
TAILS = {  # bytes that end before their character does, and the text of their whole characters
    "three emojis and half of one": (FACE * 3 + FACE[:2], "😀😀😀"),
    "one emoji and one byte": (FACE + FACE[:1], "😀"),
    "text and half of a letter": ("naïve caf".encode() + "é".encode()[:1], "naïve caf"),
    "letters of three bytes": ("日本語".encode() + "語".encode()[:2], "日本語"),
    "a flag, joined of two": ("🇫🇷".encode() + "🇫".encode()[:3], "🇫🇷"),
    "half of one alone": (FACE[:3], ""),
}


@pytest.mark.parametrize("cut", [1, 2, 3, 1000], ids="{} at a time".format)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_whole_characters_are_kept_when_the_last_one_is_cut(
    kind: str, tail: str, cut: int
) -> None:
    tokenizer, (content, whole) = TOKENIZERS[kind], TAILS[tail]
    ids, text = bytes_in(tokenizer, content), Detokenizer(tokenizer)
    pieces = [text.push(ids[i : i + cut]) for i in range(0, len(ids), cut)]
    assert "".join(pieces) == whole
    rest = text.finish()
    assert set(rest) == {"�"}
    assert len(rest) <= len(content) - len(whole.encode())


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_broken_character_within_a_text_costs_only_its_own_bytes(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    text = Detokenizer(tokenizer)
    found = text.push(bytes_in(tokenizer, FACE + FACE[:2] + b"ab" + FACE)) + text.finish()
    assert found.replace("�", "") == "😀ab😀"
    assert 1 <= found.count("�") <= 2


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pieces_of_any_cut_join_to_the_text(kind: str) -> None:
    tokenizer, draw = TOKENIZERS[kind], random.Random(0)
    for _ in range(300):
        words = draw.choices(
            ["a", " ", "é", "日", "😀", "\n", "👩‍👩‍👧", " wor"], k=draw.randint(1, 12)
        )
        ids = bytes_in(tokenizer, "".join(words).encode())
        if kind == "byte-fallback" and draw.random() < 0.5:
            ids.insert(draw.randrange(len(ids)), draw.randint(257, 256 + len(WORDS)))
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        if "�" in whole:  # a word fell inside of a character
            continue
        text, pieces, rest = Detokenizer(tokenizer), [], ids
        while rest:
            n = draw.randint(1, 5)
            pieces.append(text.push(rest[:n]))
            rest = rest[n:]
        assert "".join(pieces) + text.finish() == whole
