"""Loading: the tensors of the files reach the model, nothing else does, and all errors are
reported at once.
"""

import dataclasses
import itertools
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tracemalloc
import warnings
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from kvjax import models
from kvjax.evaluate.provenance import model_digest
from kvjax.models import tensor_files

from .conftest import CONFIG, tensors_of


@pytest.fixture
def no_reading(monkeypatch):
    """Errors must come before the first tensor is read."""
    monkeypatch.setattr(
        models.weights, "place", lambda *args: pytest.fail("a tensor was read before the error")
    )


# ------------------------------------------------------------------------------------------------------ what is loaded


@pytest.mark.parametrize("stored", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("wanted", "shards"), [("float32", 0), ("bfloat16", 3), ("float16", 2)]
)
def test_tensors_reach_the_model_in_the_wanted_dtype(write, stored, wanted, shards):
    model = models.load(write(dtype=stored, shards=shards), dtype=wanted).model
    files = tensors_of(CONFIG, stored)
    assert model.dtype == jnp.dtype(wanted)
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype(wanted)}
    for ours, name, transposed in (
        (model.embedding, "model.embed_tokens.weight", False),
        (model.head.kernel, "lm_head.weight", True),
        (model.norm.scale, "model.norm.weight", False),
        (model.layers[1].attention.k.kernel, "model.layers.1.self_attn.k_proj.weight", True),
        (model.layers[0].mlp.down.kernel, "model.layers.0.mlp.down_proj.weight", True),
    ):
        theirs = files[name].astype(np.float32).astype(wanted)
        np.testing.assert_array_equal(ours[...], theirs.T if transposed else theirs)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_loading_holds_a_few_tensors_beside_the_model(write, monkeypatch, platform):
    """Of the files, it holds what `AHEAD` allows, and no copy of a tensor once its parameter is
    there.
    """
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "vocab_size": 512,
    }
    directory = write(shards=2, **sizes)
    largest, alive, most = 512 * 256 * 4, [], []
    real = tensor_files._send

    def send(part, default):
        if platform == "gpu":  # which gets the bytes as the file has them
            found = jax.device_put(part.view)
            alive.append(weakref.ref(found))
        else:
            found = real(part, default)
        most.append(sum(ref() is not None for ref in alive))
        return found

    monkeypatch.setattr(tensor_files, "_send", send)
    monkeypatch.setattr(tensor_files, "AHEAD", largest)
    models.load(directory, "bfloat16")  # compiles the conversions
    peaks = []
    for _ in range(3):
        model = None
        most.clear()
        before = sum(a.nbytes for a in jax.live_arrays())
        tracemalloc.start()
        model = models.load(directory, dtype=jnp.bfloat16).model
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(most) == 2 + 1 + 9 * 6
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    # All host memory of Python and numpy, which on a CPU has the model; the files hold 17 MB.
    assert min(peaks) < (held if platform == "cpu" else 0) + 2 * largest + 5e5
    assert max(most) <= 2 + 12  # small tensors and the largest one
    assert sum(a.nbytes for a in jax.live_arrays()) - before == held


@pytest.mark.parametrize(
    "shape", [(5,), (1, 7), (128, 256), (129, 257), (300, 40), (2, 40, 300)], ids=str
)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_cpu_writes_what_a_gpu_converts(shape, transposed):
    numbers = np.random.default_rng(0).normal(size=shape) * np.float64(
        1e5
    )  # some exceed float16
    for stored, wanted in itertools.product(
        [*tensor_files.FLOATS.values()], ["float32", "bfloat16", "float16"]
    ):
        with np.errstate(over="ignore"):
            array = numbers.astype(np.float32).astype(stored)
        found = tensor_files.write(array, jnp.dtype(wanted), transposed=transposed)
        made = tensor_files._convert(array, dtype=jnp.dtype(wanted), transposed=transposed)
        np.testing.assert_array_equal(found.view(np.uint8), np.asarray(made).view(np.uint8))


def test_a_part_of_mxfp4_is_that_part_of_the_whole():
    """Also where it begins or ends inside a block of 32, as on devices that share an expert."""
    rng = np.random.default_rng(0)
    blocks, scales = (
        rng.integers(0, 256, (3, 5, 4, 16), np.uint8),
        rng.integers(1, 254, (3, 5, 4), np.uint8),
    )
    packed = tensor_files.Mxfp4(blocks, scales)
    whole = np.asarray(packed)
    at = 2, 4, 3, 9  # a number by hand
    code = int(blocks[at[:3]][at[3] // 2]) >> 4 * (at[3] % 2) & 15
    wanted = tensor_files.E2M1[code] * 2.0 ** (int(scales[at[:3]]) - 127)
    assert float(whole[at[0], at[1], at[2] * 32 + at[3]]) == wanted
    for last in (slice(0, 128), slice(20, 70), slice(64, 96), slice(127, 128)):
        part = packed[slice(1, 3), slice(0, 4), last]
        assert part.nbytes == np.asarray(part).nbytes
        np.testing.assert_array_equal(np.asarray(part), whole[1:3, :4, last])


def test_parameters_that_a_step_donates_leave_the_files_as_they_are(write):
    directory = write()
    step = jax.jit(lambda model: jax.tree.map(lambda x: x * 0, model), donate_argnums=0)
    step(models.load(directory, "float32").model)
    table = models.load(directory, "float32").model.embedding[...]
    np.testing.assert_array_equal(table, tensors_of(CONFIG)["model.embed_tokens.weight"])


def test_loaded_and_random_decoders_share_a_trace(write):
    loaded = models.load(write(), dtype=jnp.float32)
    traces = []

    @jax.jit
    def run(model, tokens):
        traces.append(1)
        return model(tokens)[0]

    run(loaded.model, jnp.ones((1, 3), jnp.int32))
    run(models.Decoder(loaded.config), jnp.ones((1, 3), jnp.int32))
    assert len(traces) == 1


@pytest.mark.parametrize("kept", ["both", "embedding", "head"])
def test_a_tied_head_is_the_embedding_table(write, kept):
    def change(tensors):
        if kept != "embedding":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        if kept == "head":
            del tensors["model.embed_tokens.weight"]

    checkpoint = models.load(write(tie_word_embeddings=True, change=change), dtype=jnp.float32)
    wanted = tensors_of({**CONFIG, "tie_word_embeddings": True})["model.embed_tokens.weight"]
    np.testing.assert_array_equal(checkpoint.model.embedding[...], wanted)
    assert checkpoint.model.head is None


@pytest.mark.parametrize("shards", [0, 3])
def test_a_head_that_differs_from_the_table_is_not_tied_to_it(write, shards):
    """As transformers reads a fine-tuned checkpoint whose config says that they are tied."""
    head = np.random.default_rng(1).normal(size=(50, 24)).astype(np.float32)
    directory = write(
        tie_word_embeddings=True,
        change=lambda tensors: tensors.update({"lm_head.weight": head}),
        shards=shards,
    )
    checkpoint = models.load(directory, dtype=jnp.float32)
    np.testing.assert_array_equal(checkpoint.model.head.kernel[...], head.T)
    assert not checkpoint.config.tied_head


def test_a_misshapen_head_beside_a_tied_table_is_said(write, no_reading):
    change = {"lm_head.weight": np.zeros((49, 24), np.float32)}
    with pytest.raises(
        ValueError, match=r"misshapen: lm_head\.weight\[49, 24\], wanted \[50, 24\]"
    ):
        models.load(
            write(tie_word_embeddings=True, change=lambda tensors: tensors.update(change))
        )


def test_frequencies_that_old_files_hold_are_ignored(write):
    def change(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
        tensors["model.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    models.load(write(change=change))


@pytest.mark.parametrize(
    ("generation", "config", "wanted"),
    [
        (None, {"eos_token_id": 7}, (7,)),
        (None, {"eos_token_id": [7, 9, 7]}, (7, 9)),
        ({"eos_token_id": [3, 4]}, {"eos_token_id": 7}, (3, 4)),
        ({"eos_token_id": 0}, {"eos_token_id": 7}, (0,)),
        ({"temperature": 0.6}, {"eos_token_id": 7}, (7,)),
        ({"eos_token_id": None}, {"eos_token_id": None}, ()),
        (None, {"eos_token_id": [-1, 7, 50]}, (7,)),  # the vocabulary has 50
    ],
)
def test_stop_tokens_are_those_of_the_generation_config_first(
    write, generation, config, wanted
):
    files = {} if generation is None else {"generation_config.json": generation}
    assert models.load(write(files=files, **config)).stop_tokens == wanted


def test_neither_importing_nor_loading_needs_torch_or_transformers(write):
    program = (
        "import sys; sys.modules['torch'] = None; from kvjax import models; "
        f"models.load({str(write())!r}); print('transformers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


# ------------------------------------------------------------------------------------------------------ what is refused


def test_all_problems_of_tensors_are_listed_in_one_error(write, no_reading):
    def change(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
        tensors["model.layers.2.input_layernorm.weight"] = np.zeros(24, np.float32)
        tensors["lm_head.weight"] = np.zeros((50, 23), np.float32)
        tensors["model.layers.0.self_attn.v_proj.weight"] = np.zeros(
            (24, 16), np.float32
        )  # not transposed silently
        tensors["model.embed_tokens.weight"] = np.zeros((50, 24), np.int8)

    with pytest.raises(ValueError, match="7 problems") as error:
        models.load(write(change=change))
    for line in (
        "missing: model.norm.weight[24]",
        "missing: model.layers.1.mlp.up_proj.weight[40, 24]",
        "unexpected: model.layers.0.self_attn.q_proj.bias[32]",
        "unexpected: model.layers.2.input_layernorm.weight[24]",
        "misshapen: lm_head.weight[50, 23], wanted [50, 24]",
        "misshapen: model.layers.0.self_attn.v_proj.weight[24, 16], wanted [16, 24]",
        "not a float of 16 bits or more: model.embed_tokens.weight is I8",
    ):
        assert line in str(error.value)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_weights_of_8_bit_floats_are_refused_with_the_mend(write, dtype, no_reading):
    """As files without a `quantization_config` may have them; their scales, if any, are other
    tensors.
    """
    directory = write()
    tensors = load_file(directory / "model.safetensors")
    header, data = {}, b""
    for name, tensor in tensors.items():
        part = bytes(tensor.size) if "q_proj" in name else tensor.tobytes()
        kind = dtype if "q_proj" in name else "F32"
        header[name] = {
            "dtype": kind,
            "shape": tensor.shape,
            "data_offsets": [len(data), len(data) + len(part)],
        }
        data += part
    head = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data)
    wanted = rf"q_proj.weight is {dtype}; load and save it with transformers in bfloat16"
    with pytest.raises(ValueError, match=wanted):
        models.load(directory)


def test_an_untied_model_without_a_head_lacks_it(write, no_reading):
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight\[50, 24\]"):
        models.load(write(change=lambda tensors: tensors.pop("lm_head.weight")))


def test_a_directory_that_is_none_is_said(write, tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist; give a directory"):
        models.load(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="is a file; give a directory"):
        models.load(write() / "config.json")
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        models.load(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"model_type": ', "not valid JSON"),
        ("[1]", "must hold a JSON object, got list"),
        ("{}", "neither model_type"),
    ],
)
def test_a_config_that_is_none_is_said(write, text, said, no_reading):
    directory = write(files={})
    (directory / "config.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        models.load(directory)


@pytest.mark.parametrize(
    "damage", ["truncated", "empty", "text", "pointer", "header", "longer"]
)
@pytest.mark.parametrize("shards", [0, 2])
def test_a_damaged_file_is_named(write, damage, shards, no_reading):
    directory = write(shards=shards)
    file = sorted(directory.glob("*.safetensors"))[-1]
    whole = file.read_bytes()
    file.write_bytes(
        {
            "truncated": whole[:-100],
            "empty": b"",
            "text": b"<html>Not found</html>" * 20,
            "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n",
            "header": whole[:8] + b"x" * 50 + whole[58:],
            "longer": whole + b"0",
        }[damage]
    )
    said = "Git LFS pointer" if damage == "pointer" else "truncated or no safetensors file"
    with pytest.raises(ValueError, match=rf"{file.name} is .*{said}.*download it again"):
        models.load(directory)


def test_a_shard_that_is_not_there_is_named(write, no_reading):
    directory = write(shards=3)
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"lacks model-00002-of-00003\.safetensors, which model\.safe"
    ):
        models.load(directory)


def test_an_index_is_checked_for_what_is_needed_alone(write):
    """As in transformers: it may list what no file has, if the model does not need it."""
    directory = write(shards=2, tie_word_embeddings=True)
    index = directory / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"]
    first = min(where.values())
    unneeded = {
        "lm_head.weight": first,
        "model.layers.0.self_attn.rotary_emb.inv_freq": first,
        "model.extra": first,
    }
    index.write_text(json.dumps({"weight_map": {**where, **unneeded}}))
    assert models.load(directory).config.tied_head
    del where["model.norm.weight"]  # stored, but not listed
    index.write_text(json.dumps({"weight_map": where}))
    models.load(directory)


@pytest.mark.parametrize("shards", [0, 2])
def test_names_without_their_prefix_are_read(write, shards):
    """As a model without a head is saved."""

    def change(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    directory = write(shards=shards, change=change, tie_word_embeddings=True)
    short = models.load(directory).model
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    wanted = models.load(write(shards=shards, tie_word_embeddings=True)).model
    for ours, theirs in zip(jax.tree.leaves(short), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_an_index_that_disagrees_with_its_files_is_said(write, no_reading):
    directory = write(shards=2)
    index = directory / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"]
    first, second = sorted(set(where.values()))
    wrong = {
        name: second if name == "model.embed_tokens.weight" else file
        for name, file in where.items()
    }
    index.write_text(json.dumps({"weight_map": {**wrong, "model.extra": first}}))
    with pytest.raises(ValueError, match="lacks tensors where") as error:
        models.load(directory)
    assert f"model.embed_tokens.weight ({second})" in str(error.value)
    assert "model.extra" in str(error.value)
    shutil.copy(directory / first, directory / second)
    index.write_text(json.dumps({"weight_map": where}))
    with pytest.raises(ValueError, match=f"twice, in {first} and {second}"):
        models.load(directory)
    index.write_text("{}")
    with pytest.raises(ValueError, match="must have a weight_map"):
        models.load(directory)


@pytest.mark.parametrize(
    "name", ["../{0}", "/nowhere/{0}", "sub/{0}", ".{0}", "..", "", "a\\{0}", "C:{0}"]
)
def test_a_shard_outside_of_the_directory_is_refused(write, name, no_reading):
    directory = write(shards=2)
    index = directory / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"]
    first = min(where.values())
    shutil.copy(directory / first, directory.parent / first)  # it could be read
    index.write_text(
        json.dumps(
            {"weight_map": {n: name.format(f) if f == first else f for n, f in where.items()}}
        )
    )
    with pytest.raises(ValueError, match="names files that are not in its directory") as error:
        models.load(directory)
    assert "\n" not in str(error.value)


def test_the_digest_changes_with_every_file_that_decides_an_answer(write):
    directory = write(shards=2)
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "README.md").write_text("a")
    before = model_digest(directory)
    read = {name for name in os.listdir(directory) if name != "README.md"}
    assert len([name for name in read if name.endswith(".safetensors")]) == 2
    for name in read:
        file = directory / name
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert model_digest(directory) != before, name
        file.write_bytes(whole)
    (directory / "README.md").write_text("b")
    assert model_digest(directory) == before


def test_more_layers_than_tensors_are_refused_before_a_model_is_made(
    write, no_reading, monkeypatch
):
    directory = write(files={"config.json": {**CONFIG, "num_hidden_layers": 1000}})
    monkeypatch.setattr(
        models.weights, "Decoder", lambda *args, **settings: pytest.fail("a model was made")
    )
    with pytest.raises(
        ValueError,
        match=r"num_hidden_layers in .* is 1000, but the files hold only \d+ tensors",
    ):
        models.load(directory)


@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", "model.safetensors.index.json"]
)
def test_endless_brackets_are_one_sentence(write, file, no_reading):
    directory = write(shards=2)
    (directory / file).write_text('{"a": ' + "[" * 100_000)
    with pytest.raises(
        ValueError, match=r"nests brackets too deeply|is not valid JSON"
    ) as error:
        models.load(directory)
    assert len(str(error.value)) < 300
    assert "\n" not in str(error.value)


def test_a_name_of_the_hub_is_told_how_to_download_it():
    with pytest.raises(FileNotFoundError, match="does not exist; give a directory") as error:
        models.load("Qwen/Qwen3-0.6B")
    assert "`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`" in str(error.value)


def test_pickled_weights_are_refused_with_how_to_convert_them(write):
    directory = write()
    (directory / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        models.load(directory)
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps("boom"))
    with pytest.raises(
        ValueError,
        match=r"only pickled weights \(pytorch_model\.bin\).*safe_serialization=True",
    ):
        models.load(directory)


def test_an_architecture_that_is_not_supported_names_those_that_are(write, no_reading):
    for config in (
        {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"architectures": ["LlamaModel"]},
        {"architectures": ["MistralForCausalLM"]},  # with model_type llama
        {"architectures": None, "model_type": "qwen2_vl"},
        {"architectures": ["DeepseekV3ForCausalLM"], "model_type": ...},
    ):
        with pytest.raises(ValueError, match="not supported; supported are") as error:
            models.load(write(**config))
        for name in (
            "LlamaForCausalLM",
            "MistralForCausalLM",
            "Qwen2ForCausalLM",
            "Qwen3ForCausalLM",
        ):
            assert name in str(error.value)
        assert str(error.value).endswith("or call kvjax.attention in a model of your own")


def test_a_family_of_ones_own_is_read(write, monkeypatch):
    own = {"model_type": "mine", "architectures": ["MineForCausalLM"]}
    with pytest.raises(
        ValueError, match=r"add a kvjax\.models\.Family to kvjax\.models\.FAMILIES"
    ):
        models.load(write(**own))
    mine = dataclasses.replace(
        models.FAMILIES["llama"],
        model_type="mine",
        architecture="MineForCausalLM",
        weights=tuple(
            dataclasses.replace(row, name=row.name.replace("q_proj", "query"))
            for row in models.FAMILIES["llama"].weights
        ),
    )
    monkeypatch.setitem(models.FAMILIES, "mine", mine)

    def rename(tensors):
        for name in [name for name in tensors if "q_proj" in name]:
            tensors[name.replace("q_proj", "query")] = tensors.pop(name)

    found, wanted = models.load(write(change=rename, **own)).model, models.load(write()).model
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_of_a_model_that_sees_images_is_read(write, prefix):
    """As Mistral Small 3.1 and Gemma 3 have it; tensors of the part that sees images are left
    out.
    """
    wanted = jax.tree.leaves(
        models.load(write(model_type="mistral", architectures=["MistralForCausalLM"])).model
    )

    def rename(tensors):
        for name in list(tensors):
            head = "language_model." + name if prefix.startswith("language") else name
            tensors[head if name == "lm_head.weight" else prefix + name[len("model.") :]] = (
                tensors.pop(name)
            )
        tensors["vision_tower.patch.weight"] = np.zeros((3, 4), np.float32)

    text = {name: value for name, value in CONFIG.items() if name != "architectures"} | {
        "model_type": "mistral"
    }
    outer = {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": text,
    }
    found = models.load(write(change=rename, **outer))
    assert found.stop_tokens == (1,)
    for a, b in zip(jax.tree.leaves(found.model), wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="quantised by fp8"):
        models.load(write(change=rename, **outer, quantization_config={"quant_method": "fp8"}))


@pytest.mark.parametrize(
    "config", [{"architectures": None}, {"model_type": ...}, {"architectures": []}]
)
def test_either_of_model_type_and_architectures_is_enough(write, config):
    models.load(write(**config))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float64", "half a byte"])
def test_a_dtype_that_a_model_cannot_have_is_refused(write, dtype, no_reading):
    with pytest.raises(ValueError, match="use one of bfloat16, float16, float32"):
        models.load(write(), dtype=dtype)


# --------------------------------------------------------------------------------------------------------------- text

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


def add_tokenizer(directory, *, template=TEMPLATE):
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    words = ["<unk>", "<s>", "user", "assistant", "system", "hello", "world"]
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "chat_template": template,
    }
    (directory / "tokenizer_config.json").write_text(
        json.dumps({k: v for k, v in config.items() if v})
    )


def test_an_error_lists_the_first_tensors_and_counts_the_others(write):
    with pytest.raises(ValueError, match=r"21 problems:(\n  misshapen: .*){12}\n  and 9 more$"):
        models.load(
            write(
                change=lambda tensors: tensors.update(
                    {n: t[..., :-1] for n, t in tensors.items()}
                )
            )
        )


def test_the_default_dtype_is_that_of_the_platform(write, monkeypatch):
    directory = write()
    assert models.load(directory).model.dtype == np.float32  # of a CPU, on which the suite runs
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert models.load(directory).model.dtype == jnp.bfloat16


def test_a_cache_in_place_of_a_policy_is_told_how_to_go_on(write):
    checkpoint = models.load(write())
    with pytest.raises(
        ValueError,
        match=r"got a Cache; to go on from a cache, kvjax\.generate\(checkpoint\.model",
    ):
        checkpoint.init_cache(checkpoint.init_cache(capacity=64), capacity=64)


def test_keys_with_biases_that_are_coded_by_token_are_warned_of(write):
    def biases(tensors):
        for i, (name, size) in itertools.product(range(2), (("q", 32), ("k", 16), ("v", 16))):
            tensors[f"model.layers.{i}.self_attn.{name}_proj.bias"] = np.zeros(size, np.float32)

    by_token = "logquant:window=8,group=8,key_axis=token"
    models.load(write()).init_cache(by_token, capacity=64)
    checkpoint = models.load(
        write(change=biases, model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    )
    with pytest.warns(UserWarning, match=r'biases to keys.*use key_axis="channel"'):
        checkpoint.init_cache(by_token, capacity=64)
    for cache in ("logquant:window=8,group=8", "kivi:residual=32,group=8"):
        checkpoint.init_cache(cache, capacity=64)


def test_tokenizer_and_chat_template_are_those_of_the_directory(write):
    checkpoint = models.load(write())
    add_tokenizer(checkpoint.directory)
    assert checkpoint.tokenizer("hello world").input_ids == [5, 6]
    assert checkpoint.tokenizer is checkpoint.tokenizer
    assert checkpoint.apply_chat("hello") == [2, 5, 3]
    talk = [{"role": "system", "content": "world"}, {"role": "user", "content": "hello"}]
    assert checkpoint.apply_chat(talk) == [4, 6, 2, 5, 3]
    assert checkpoint.apply_chat(talk, answer=False) == [4, 6, 2, 5]


def test_a_tokenizer_that_is_not_there_or_cannot_be_read_is_said_when_used(write):
    checkpoint = models.load(write())
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer .*copy tokenizer\.json"):
        checkpoint.apply_chat("hello")
    (checkpoint.directory / "tokenizer.json").write_text("{")
    with pytest.raises(
        ValueError,
        match=r"transformers cannot read the tokenizer in .* \(it reads config.json too\)",
    ):
        _ = checkpoint.tokenizer


def test_a_tokenizer_without_a_chat_template_says_so(write):
    checkpoint = models.load(write())
    add_tokenizer(checkpoint.directory, template=None)
    with pytest.raises(ValueError, match="has no chat template"):
        checkpoint.apply_chat("hello")


def test_a_template_that_refuses_the_messages_says_why(write):
    checkpoint = models.load(write())
    add_tokenizer(checkpoint.directory, template="{{ raise_exception('only one turn') }}")
    with pytest.raises(ValueError, match="refuses the messages: only one turn"):
        checkpoint.apply_chat("hello")


def test_error_messages_are_one_line_but_for_the_list_of_tensors(write):
    with pytest.raises(ValueError, match=re.escape("hidden_act")) as error:
        models.load(write(hidden_act="swoosh"))
    assert "\n" not in str(error.value)


def test_reading_a_tokenizer_says_nothing_of_a_notebook_without_widgets(recwarn):
    with models.checkpoint._without_advice():
        warnings.warn(
            "IProgress not found. Please update jupyter and ipywidgets.", stacklevel=1
        )
    assert not recwarn.list
