"""A tokenizer read from tokenizer.json alone equals that of transformers, or is not used."""

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax import models
from kvjax.models import tokenizer

SPELT = ("<s>", "</s>", "<unk>", " n't", " .", "\n\n", "é", "漢", "🙂", "0123", "\x00", "  ")
TEXTS = st.lists(st.one_of(st.sampled_from(SPELT), st.text(max_size=8)), max_size=12).map("".join)


@pytest.fixture(scope="module")
def both():
    from transformers import AutoTokenizer

    whole = AutoTokenizer.from_pretrained(str(models.shipped()))
    return tokenizer.read(models.shipped(), lambda: whole), whole


@given(text=TEXTS)
def test_it_encodes_and_decodes_as_transformers_does(both, text):
    one, whole = both
    for special in (True, False):
        ids = whole(text, add_special_tokens=special)["input_ids"]
        assert one(text, add_special_tokens=special)["input_ids"] == ids
        for skip in (True, False):
            got = one.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert got == whole.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert one([text, text]).input_ids == whole([text, text]).input_ids


def test_its_tokens_are_those_of_transformers(both):
    one, whole = both
    for name in tokenizer.NAMED:
        assert getattr(one, name) == getattr(whole, name)
        assert getattr(one, f"{name}_id") == getattr(whole, f"{name}_id")
    assert one.get_vocab() == whole.get_vocab()
    assert len(one) == len(whole)
    assert one.chat_template == whole.chat_template
    assert one.all_special_tokens == whole.all_special_tokens  # by transformers


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer_class": "LlamaTokenizerFast"},
        {"tokenizer_class": None},
        {"add_bos_token": False},
        {"add_eos_token": True},
        {"bos_token": "<not there>"},
        {"added_tokens_decoder": {"0": {"content": "<other>"}}},
        {"added_tokens_decoder": {"4095": {"content": "<more>"}}},
    ],
    ids=str,
)
def test_a_config_that_may_change_the_file_leaves_it_to_transformers(tmp_path, change):
    shutil.copy(models.shipped() / "tokenizer.json", tmp_path)
    config = json.loads((models.shipped() / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config}))
    assert tokenizer.read(tmp_path, lambda: None) is not None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, **change}))
    assert tokenizer.read(tmp_path, lambda: None) is None


@pytest.mark.parametrize("name", tokenizer.ELSEWHERE)
def test_files_that_may_add_tokens_leave_it_to_transformers(tmp_path, name):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models.shipped() / file, tmp_path)
    (tmp_path / name).write_text("{}")
    assert tokenizer.read(tmp_path, lambda: None) is None


def test_a_damaged_file_is_left_to_transformers(tmp_path):
    shutil.copy(models.shipped() / "tokenizer_config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    assert tokenizer.read(tmp_path, lambda: None) is None
