"""A tokenizer read from tokenizer.json alone equals that of transformers, or is not used."""

import json
import re
import shutil
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax import models
from kvjax.generation.prefilling import on_auto_axes
from kvjax.generation.text import Detokenizer
from kvjax.models import tokenizer

SPELT = ("<s>", "</s>", "<unk>", " n't", " .", "\n\n", "é", "漢", "🙂", "0123", "\x00", "  ")
TEXTS = st.lists(st.one_of(st.sampled_from(SPELT), st.text(max_size=8)), max_size=12).map(
    "".join
)


@pytest.fixture(scope="module")
def both():
    from transformers import AutoTokenizer

    whole = AutoTokenizer.from_pretrained(str(models.shipped()))
    return tokenizer.read(models.shipped(), lambda: whole), whole


@pytest.mark.parametrize("length", [tokenizer.LONG, tokenizer.LONG + 1])
def test_long_texts_are_encoded_as_short_ones(both, length):
    one, whole = both
    text = ("漢é n't 🙂" * length)[:length]
    for special in (True, False):
        ids = whole(text, add_special_tokens=special)["input_ids"]
        assert one(text, add_special_tokens=special)["input_ids"] == ids


def test_other_threads_run_while_a_long_text_is_encoded(both):
    """A server streams the tokens of others meanwhile. A thread that held the interpreter's lock
    would let this one run once or twice, before it begins.
    """
    text, started, done = (
        "What is the pass key? " * 50_000,
        threading.Event(),
        threading.Event(),
    )

    def encode():
        started.set()
        both[0](text)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    started.wait()
    turns = 0
    while not done.is_set():
        time.sleep(0.001)
        turns += 1
    thread.join()
    assert turns > 10


@given(text=TEXTS)
def test_it_encodes_and_decodes_as_transformers_does(both, text):
    one, whole = both
    for special in (True, False):
        ids = whole(text, add_special_tokens=special)["input_ids"]
        assert one(text, add_special_tokens=special)["input_ids"] == ids
        for skip in (True, False):
            got = one.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert got == whole.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
    assert one([text, text]).input_ids == whole([text, text]).input_ids


@pytest.mark.parametrize(
    "ids",
    [
        *(5, np.int32(5), np.array(5), jnp.int32(5)),
        *(
            [],
            [5, 6],
            (5, 6),
            range(3, 5),
            [np.int64(5)],
            [jnp.int32(5)],
            np.zeros(0, int),
            jnp.array([5, 6]),
        ),
        *(
            [[]],
            ((5, 6), [7]),
            [np.array([5, 6])],
            np.array([[5, 6], [7, 8]]),
            jnp.array([[5, 6], [7, 8]]),
        ),
        {"input_ids": [5, 6]},
    ],
    ids=lambda ids: repr(ids).replace("\n", ""),
)
def test_it_decodes_whatever_transformers_does(both, ids):
    one, whole = both
    try:
        wanted = whole.decode(ids)
    except (
        TypeError
    ):  # transformers takes no arrays of jax inside of a list, and no list of arrays
        wanted = whole.decode(np.asarray(ids).tolist())
    assert one.decode(ids) == wanted
    assert one.decode(token_ids=ids, skip_special_tokens=True) == wanted


@pytest.mark.parametrize("ids", [[5.0], "12", None, np.array([5.0]), {5.0}], ids=repr)
def test_what_transformers_does_not_decode_is_refused(both, ids):
    for each in both:
        with pytest.raises(TypeError):
            each.decode(ids)


@pytest.mark.parametrize("text", ["a b", ["a", "b c"], ("a", "b c")], ids=repr)
def test_it_takes_the_texts_that_transformers_takes(both, text):
    one, whole = both
    try:
        wanted = whole(text)["input_ids"]
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error)[:60])):
            one(text)
        return
    assert one(text)["input_ids"] == one(text=text)["input_ids"] == wanted


def test_what_is_asked_beside_is_left_to_transformers(both):
    one, whole = both
    assert (
        one("a", "b").input_ids
        == one(text="a", text_pair="b").input_ids
        == whole("a", "b").input_ids
    )
    assert one.encode("a b") == whole.encode("a b")
    assert one.batch_decode([[5, 6], [7]]) == whole.batch_decode([[5, 6], [7]])
    np.testing.assert_array_equal(
        *(each("a b", return_tensors="np").input_ids for each in both)
    )


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
    write(tmp_path)
    assert tokenizer.read(tmp_path, lambda: None) is not None
    write(tmp_path, **change)
    assert tokenizer.read(tmp_path, lambda: None) is None


def write(directory, **config):
    """The shipped tokenizer with other settings; returns them."""
    shutil.copy(models.shipped() / "tokenizer.json", directory)
    config = json.loads((models.shipped() / "tokenizer_config.json").read_text()) | config
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return config


@pytest.mark.parametrize("name", tokenizer.ADDING)
def test_files_that_may_add_tokens_leave_it_to_transformers(tmp_path, name):
    write(tmp_path)
    (tmp_path / name).write_text("{}")
    assert tokenizer.read(tmp_path, lambda: None) is None


def test_files_beside_a_config_that_lists_all_tokens_change_nothing(tmp_path):
    """As in the directories of Llama 3 and Qwen, which hold such files."""
    from transformers import AutoTokenizer

    token = {
        "content": "<s>",
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
    }
    known = json.loads((models.shipped() / "tokenizer.json").read_text())["added_tokens"]
    listed = {
        str(one["id"]): {**token, "content": one["content"], "special": True} for one in known
    }
    write(tmp_path, added_tokens_decoder=listed, eos_token="</s>")
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "</s>", "pad_token": "<more>"})
    )
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<other>": 4095}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    one, whole = (
        tokenizer.read(tmp_path, lambda: None),
        AutoTokenizer.from_pretrained(str(tmp_path)),
    )
    assert one is not None
    assert [getattr(one, name) for name in tokenizer.NAMED] == [
        getattr(whole, name) for name in tokenizer.NAMED
    ]
    assert one.chat_template == whole.chat_template == "{{ messages[0].content }}"
    assert one.get_vocab() == whole.get_vocab()
    text = "<s>a <other> b</s><more>"
    assert one(text).input_ids == whole(text).input_ids


def test_generation_does_not_load_transformers():
    one = tokenizer.read(models.shipped(), lambda: pytest.fail("transformers was loaded"))
    on_auto_axes(lambda *args, **kwargs: None)(one, tokenizer=one)
    text = Detokenizer(one)
    assert (
        text.push(one("a b c", add_special_tokens=False).input_ids) + text.finish() == "a b c"
    )


def test_a_damaged_file_is_left_to_transformers(tmp_path):
    shutil.copy(models.shipped() / "tokenizer_config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    assert tokenizer.read(tmp_path, lambda: None) is None


def test_a_template_that_is_set_later_is_used(both):
    one, whole = both
    turns = [{"role": "user", "content": "Hello"}]
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    one.chat_template = template
    try:
        assert one.apply_chat_template(turns, tokenize=False) == "[user]Hello"
        assert (
            one.apply_chat_template(turns, tokenize=False, chat_template="another") == "another"
        )
    finally:
        one.chat_template = whole.chat_template
    with pytest.raises(ValueError, match="chat_template is not set"):
        one.apply_chat_template(turns, tokenize=False)
