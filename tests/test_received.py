"""Files of strangers: whatever is in them, an error is one sentence that names the file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvjax import models, received
from kvjax.evaluate.store import read_cell
from kvjax.models.config import Fields
from kvjax.policies.shared import _in_file
from kvjax.presets.head_files import Heads
from tests.checkpoint import config, write_checkpoint

READERS: dict[str, Callable[[Path], Any]] = {
    "config.json": Fields.read,
    "heads.json": Heads.load,
    "anchors.json": lambda path: _in_file(str(path)),
    "cell.json": read_cell,
}
CONTENTS = {
    "nothing": b"",
    "no JSON": b"{'a': 1}",
    "cut off": b'{"layers": [1, 2',
    "a list": b"[1, 2]",
    "a number": b"5",
    "null": b"null",
    "no UTF-8": b'{"a": "\xff"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "brackets": b"[" * 100_000,
    "objects": b'{"a":' * 100_000,
    "a number of 5000 digits": b'{"kv_heads": ' + b"1" * 5000 + b"}",
    "a number of 5000 digits with a minus": b'{"heads": -' + b"1" * 5000 + b"}",
}


def is_one_sentence(error: BaseException, path: Path) -> None:
    assert "\n" not in str(error)
    assert len(str(error)) < 600
    assert path.name in str(error)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", READERS)
def test_any_content_is_one_sentence_with_the_name(
    tmp_path: Path, name: str, content: str
) -> None:
    path = tmp_path / name
    path.write_bytes(CONTENTS[content])
    with pytest.raises(ValueError, match=name) as error:
        READERS[name](path)
    is_one_sentence(error.value, path)


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "nothing", "too large"])
@pytest.mark.parametrize("name", READERS)
def test_only_a_regular_file_of_a_sane_size_is_opened(
    tmp_path: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to(Path(os.devnull).with_name("zero"))
    elif kind == "too large":
        path.write_text("{}" + " " * 50)
        monkeypatch.setattr(received, "MOST_BYTES", 50)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        READERS[name](path)
    is_one_sentence(error.value, path)


NUMBERS = [
    "rms_norm_eps",
    "rope_theta",
    "initializer_range",
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
]
NUMBERS += [
    "max_position_embeddings",
    "head_dim",
    "num_key_value_heads",
    "intermediate_size",
    "num_attention_heads",
]


@pytest.mark.parametrize(
    "value",
    ["NaN", "Infinity", "-Infinity", "1e999", "-1", "1" * 400, '"1"', "true", "[]", "{}"],
)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_a_config_is_finite_and_in_range_or_names_its_field(
    tmp_path: Path, name: str, value: str
) -> None:
    text = json.dumps({**config(), name: "HERE"}).replace('"HERE"', value)
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(
        ValueError, match=name.removeprefix("rms_").removeprefix("rope_")
    ) as error:
        models.load(tmp_path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("factor", ["NaN", "Infinity", "1e999", "0", "-2", '"4"', "true"])
@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_a_factor_of_rope_is_finite_and_above_0(tmp_path: Path, kind: str, factor: str) -> None:
    text = json.dumps(config(rope_scaling={"type": kind, "factor": "HERE"})).replace(
        '"HERE"', factor
    )
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="factor"):
        models.load(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["generation_config.json", "tokenizer_config.json", "tokenizer.json", "added_tokens.json"],
)
def test_a_pipe_in_a_checkpoint_is_refused_and_not_waited_for(
    tmp_path: Path, name: str
) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} is no regular file; remove it"):
        models.load(tmp_path)
