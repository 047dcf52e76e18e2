"""Chats of five turns under published templates: what the cache was fed is the template's own
render, token for token.

    python -m pytest tests/models/test_published_templates.py --thorough --checkpoint DIR

also takes the tokenizer and the template of a published model; its weights are not read.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from kvjax import models
from tests.checkpoint import WIDTH, write_checkpoint

# As the models' repositories have them, less what no test here reaches.
TEMPLATES = {
    "SmolLM2": "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' "
    "%}<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
    "Face<|im_end|>\n{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + "
    "'\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "Llama-3": "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + "
    "'<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if "
    "add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "Phi-3": "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}{% "
    "if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    "Mistral, moved system": "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] "
    "%}{% set loop_messages = messages[1:] %}{% else %}{% set loop_messages = messages %}{% endif "
    "%}{{ bos_token }}{% for m in loop_messages %}{% if m['role'] == 'user' %}{% if loop.last and "
    "system is defined %}{{ '[INST] ' + system + '\n\n' + m['content'] + '[/INST]' }}{% else %}{{ "
    "'[INST] ' + m['content'] + '[/INST]' }}{% endif %}{% else %}{{ ' ' + m['content'] | trim + "
    "eos_token }}{% endif %}{% endfor %}",
    "Qwen3, no old thinking": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == "
    "'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1].lstrip('\n') }}{% else "
    "%}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\n' }}{% if enable_thinking is defined and enable_thinking is false %}{{ "
    "'<think>\n\n</think>\n\n' }}{% endif %}{% endif %}",
    "Gemma": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not "
    "supported') }}{% endif %}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == "
    "'assistant' else m['role']) + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if "
    "add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
}
CONTROL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|user|>",
    "<|end|>",
]
CONTROL += [
    "<|assistant|>",
    "<|system|>",
    "[INST]",
    "[/INST]",
    "<start_of_turn>",
    "<end_of_turn>",
]
MESSAGES = [
    "Who wrote Moby-Dick?",
    "And when? 你好 😀",
    "def f(x):\n    return x",
    "  so </think> that?  \n",
    "Thanks!",
]


def with_random_weights(
    directory: Path, tokens: int, positions: int = 4096
) -> models.Checkpoint:
    """The checkpoint of a tokenizer with so many tokens: its model says anything."""
    changes = {"vocab_size": tokens, "max_position_embeddings": positions}
    config = directory / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    tensors = load_file(directory / "model.safetensors")
    table = np.random.default_rng(0).normal(size=(tokens, WIDTH)).astype(np.float32) * 0.2
    save_file(
        {**tensors, "model.embed_tokens.weight": table},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    return models.load(directory, dtype=jnp.float32)


def five_turns(
    checkpoint: models.Checkpoint, cache: str, *, cuts: bool = True, **settings: Any
) -> None:
    """With a cache that cannot be cut, a model's unusual spelling of an answer is kept: then
    the texts are compared.
    """
    chat = checkpoint.chat(cache=cache, max_new_tokens=9, **settings)
    for message in MESSAGES:
        chat.say(message)
        asked = chat.messages[:-1]
        template = settings.get("template") or {}
        own = checkpoint.tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, tokenize=True, return_dict=False, **template
        )
        if cuts:
            assert chat._fed == list(own)
        assert checkpoint.tokenizer.decode(chat._fed) == checkpoint.tokenizer.decode(own)
        assert chat._run is not None
        assert chat.cache is not None
        assert chat.cache.length.tolist() == [len(chat._fed) + len(chat._run.rows[0])]


@pytest.mark.sample(1)
@pytest.mark.parametrize("cache", ["full", "snapkv:budget=128"])
@pytest.mark.parametrize("name", sorted(TEMPLATES, key=lambda name: "," not in name))
def test_the_cache_was_fed_the_template_s_own_render(
    tmp_path: Path, name: str, cache: str
) -> None:
    file = write_checkpoint(tmp_path) / "tokenizer_config.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATES[name]})
    )
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens(CONTROL)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings: dict[str, Any] = {"cuts": not cache.startswith("snapkv")}
    if name != "Gemma":  # which takes no system prompt
        settings["system"] = "Answer briefly."
    if name.startswith("Qwen3"):
        settings["template"] = {"enable_thinking": False}
    five_turns(with_random_weights(tmp_path, tokenizer.get_vocab_size()), cache, **settings)


@pytest.mark.thorough
@pytest.mark.parametrize("cache", ["full", "fier:budget=64", "snapkv:budget=128"])
def test_a_published_tokenizer_and_template_do_as_well(
    tmp_path: Path, checkpoint: str | None, cache: str
) -> None:
    if checkpoint is None:
        pytest.skip("--checkpoint does not name the directory of a published model")
    write_checkpoint(tmp_path, bos_token_id=None, eos_token_id=None)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(checkpoint) / name, tmp_path / name)
    tokens = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size()
    model = with_random_weights(tmp_path, tokens)
    five_turns(model, cache, cuts=not cache.startswith("snapkv"), system="Answer briefly.")
