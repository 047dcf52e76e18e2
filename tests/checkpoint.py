"""A tiny random checkpoint in Hugging Face format, written without torch."""

import json
import shutil

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from kvjax import models

VOCAB, LAYERS, WIDTH, N, K, D, POSITIONS = 258, 3, 32, 4, 2, 8, 512
BOS, EOS = 256, 257
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[reply]"


def config(**changes):
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": N,
        "num_key_value_heads": K,
        "head_dim": D,
        "hidden_act": "silu",
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        **changes,
    }


def weights(vocab=VOCAB):
    rng = np.random.default_rng(0)

    def matrix(rows, columns):
        return rng.normal(size=(rows, columns)).astype(np.float32) * columns**-0.5

    found = {
        "model.embed_tokens.weight": matrix(vocab, WIDTH),
        "model.norm.weight": np.ones(WIDTH, np.float32),
    }
    for i in range(LAYERS):
        parts = {
            "self_attn.q_proj": matrix(N * D, WIDTH) * 3,
            "self_attn.k_proj": matrix(K * D, WIDTH) * 3,
            "self_attn.v_proj": matrix(K * D, WIDTH),
            "self_attn.o_proj": matrix(WIDTH, N * D),
            "mlp.gate_proj": matrix(48, WIDTH),
            "mlp.up_proj": matrix(48, WIDTH),
            "mlp.down_proj": matrix(WIDTH, 48),
            "input_layernorm": np.ones(WIDTH, np.float32),
            "post_attention_layernorm": np.ones(WIDTH, np.float32),
        }
        found |= {f"model.layers.{i}.{name}.weight": value for name, value in parts.items()}
    return found


def write_checkpoint(directory, **changes):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config(**changes)))
    save_file(weights(), directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(directory)
    return directory


def write_stand_in(directory, *, chats=False):
    """Writes a tiny checkpoint with the tokenizer, the special tokens and the positions of the
    model that ships, so that a text has as many tokens as for users. With `chats` it has a chat
    template too, as that model has not.
    """
    shipped = models.shipped()
    real = json.loads((shipped / "config.json").read_text())
    same = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id")
    write_checkpoint(directory, **{name: real[name] for name in same})
    tensors = weights(real["vocab_size"])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shipped / name, directory)
    if chats:
        file = directory / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return directory


def write_tokenizer(directory, order=1):
    """Writes a tokenizer with a vocabulary of VOCAB tokens; with order -1, their ids reversed."""
    # Bytes as byte-level BPE spells them, without merges: one token a byte.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[::order]
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "chat_template": TEMPLATE,
            }
        )
    )
