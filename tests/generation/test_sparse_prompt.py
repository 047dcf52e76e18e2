"""Prompts whose blocks attend to a share of what is stored: where it holds, where it is exact,
and what is refused.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax import presets
from kvjax.cli import main
from kvjax.generation import prefill
from kvjax.generation.prefilling import check_sparse, chunks_of, steps_of
from kvjax.models import Decoder, DecoderConfig
from kvjax.numerics.partial import Logits
from kvjax.ops import chunk, key_blocks
from kvjax.ops.key_blocks import sparse_prompts
from kvjax.ops.op import say_once
from tests.checkpoint import write_checkpoint

CONFIG = DecoderConfig(
    vocab_size=40, hidden_size=32, intermediate_size=48, layers=2, q_heads=4, kv_heads=2, head_dim=8,
    initializer_range=0.4, max_position_embeddings=8192,
)  # fmt: skip
LEAST = 4  # blocks that a list has; 16 outside of these tests, for which prompts are longer
LENGTHS = np.array([1500, 1300])
PROMPT = np.random.default_rng(0).integers(40, size=(2, 1500)).astype(np.int32)
PROMPT[1, 1300:] = 0
MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))


@pytest.fixture(scope="module", autouse=True)
def short_lists() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_blocks, "LEAST", LEAST)
        yield


@pytest.fixture(scope="module")
def model() -> Decoder:
    return Decoder(CONFIG, rngs=nnx.Rngs(3))


def empty(model: Decoder, policy: Any = None, rows: int = 2, **how: Any) -> kvjax.Cache:
    return kvjax.init(
        kvjax.Full() if policy is None else policy, model.spec(rows, 1600), layers=2, **how
    )


def read(
    model: Decoder, share: float | None, rows: slice = slice(2), policy: Any = None
) -> tuple[Any, Any]:
    cache = empty(model, policy, len(LENGTHS[rows]))
    return prefill(model, cache, PROMPT[rows], LENGTHS[rows], sparse_prompt=share)


def keys(cache: kvjax.Cache, layer: int) -> np.ndarray:
    return np.asarray(cache.layers[layer].state.tokens.k)


def test_a_share_changes_later_layers_alone_and_a_row_as_if_it_were_alone(
    model: Decoder,
) -> None:
    exact, dense = read(model, None)
    found, sparse = read(model, 0.5)
    np.testing.assert_array_equal(keys(sparse, 0), keys(dense, 0))
    same = np.abs(keys(sparse, 1) - keys(dense, 1)).max(axis=(0, 1, 3))
    assert same[:768].max() < 1e-4  # at most 4 blocks were stored before their chunks
    assert same[768:].max() > 1e-3
    assert 1e-3 < np.abs(found - exact).max() < np.abs(exact).max()
    alone, _ = read(model, 0.5, slice(1, 2))
    np.testing.assert_allclose(found[1:], alone, atol=1e-4)


@jax.jit
def read_chunk(model: Decoder, part: np.ndarray, cache: kvjax.Cache) -> Any:
    return model(part, cache, last_logits=True)


ENDS = np.array([1279, 1280, 1281])  # of rows: before, at and after the end of a chunk


@pytest.mark.parametrize("width", [1281, 1400])
def test_the_last_chunk_of_each_row_is_exact(model: Decoder, width: int) -> None:
    prompts = np.random.default_rng(5).integers(40, size=(3, width)).astype(np.int32)
    found, _ = prefill(model, empty(model, rows=3), prompts, ENDS, chunk=256, sparse_prompt=0.1)
    for row, end in enumerate(ENDS.tolist()):
        cache = empty(model, rows=1)
        last = (end - 1) // 256 * 256
        with sparse_prompts(0.1):
            for start in range(0, last, 256):
                part = prompts[row : row + 1, start : start + 256]
                _, cache = read_chunk(model, part, cache)
        exact, _ = prefill(model, cache, prompts[row : row + 1, last:end])
        np.testing.assert_allclose(found[row : row + 1], exact, atol=1e-4)


def test_a_sparse_prompt_needs_to_know_where_rows_end(model: Decoder) -> None:
    @jax.jit
    def run(lengths: jax.Array) -> jax.Array:
        return prefill(model, empty(model), PROMPT, lengths, sparse_prompt=0.5)[0]

    with pytest.raises(ValueError, match="where each row ends"):
        run(LENGTHS)


def test_the_whole_share_is_the_exact_prompt(model: Decoder) -> None:
    np.testing.assert_array_equal(read(model, 1.0)[0], read(model, None)[0])


@pytest.mark.parametrize("name", [pytest.param("fier", marks=pytest.mark.thorough), "quest"])
def test_methods_with_an_index_read_their_history_sparsely(model: Decoder, name: str) -> None:
    policy = presets.parse(f"{name}:budget=320").rest
    exact, _ = read(model, None, policy=policy)
    found, cache = read(model, 0.5, policy=policy)
    assert 1e-3 < np.abs(found - exact).max() < np.abs(exact).max()
    assert cache.length.tolist() == LENGTHS.tolist()


def test_no_chunk_sees_later_tokens(model: Decoder) -> None:
    other = PROMPT.copy()
    other[:, 1100:] = 7
    caches = [
        prefill(model, empty(model), p, LENGTHS, sparse_prompt=0.5)[1] for p in (PROMPT, other)
    ]
    # Queries of one block choose together, so that only the block of the first change may
    # differ.
    np.testing.assert_array_equal(
        keys(caches[0], 1)[:, :, :1024], keys(caches[1], 1)[:, :, :1024]
    )


def test_the_chunks_of_a_sparse_prompt_on_a_gpu(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    cache = jax.eval_shape(lambda: kvjax.init(kvjax.Full(), model.spec(1, 131072), layers=2))
    for tokens in (131072, 100000, 4097, 5000):
        sizes = [size for size, _ in chunks_of(cache, tokens, empty=True, sparse=True)]
        assert set(sizes) <= {4096, 512}
        assert sizes[-1] == 512
        assert 0 <= sum(sizes) - tokens < 512
        assert sizes == sorted(sizes, reverse=True)
    assert chunks_of(cache, 4000, empty=True, sparse=True) == chunks_of(cache, 4000, empty=True)


@pytest.mark.parametrize(
    ("cudnn", "kernel", "sparse"),
    [(True, None, True), (True, "no wgmma", False), (False, "no wgmma", True)],
)
def test_a_gpu_without_the_kernel_reads_everything_and_says_so(
    model: Decoder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
    cudnn: bool,
    kernel: str | None,
    sparse: bool,
) -> None:
    monkeypatch.setattr(chunk, "takes_cudnn", lambda *_: cudnn)
    monkeypatch.setattr(chunk, "_takes", lambda *_: False)  # cuDNN itself cannot be traced here
    monkeypatch.setattr(chunk, "why_no_kernel", lambda *_, **__: kernel)
    say_once.cache_clear()
    shapes = jax.eval_shape(lambda: empty(model))
    steps = steps_of(CONFIG, shapes)
    assert check_sparse(shapes, 0.5, steps) == sparse
    assert [r.getMessage() for r in caplog.records] == (
        []
        if sparse
        else [
            "sparse_prompt is ignored, and prompts attend to everything, which is faster here: no wgmma"
        ]
    )
    assert not check_sparse(shapes, 1.0, steps)
    if not sparse:
        np.testing.assert_array_equal(read(model, 0.5)[0], read(model, None)[0])


def test_a_model_with_a_soft_cap_reads_a_part_where_nothing_reads_everything_faster(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(chunk, "takes_cudnn", lambda *_: True)  # but of no soft cap
    monkeypatch.setattr(chunk, "_takes", lambda *_: False)
    monkeypatch.setattr(chunk, "why_no_kernel", lambda *_, **__: "no wgmma")
    say_once.cache_clear()
    capped = Decoder(dataclasses.replace(CONFIG, soft_cap=2.0), rngs=nnx.Rngs(3))
    exact, _ = read(capped, None, slice(1))
    found, _ = read(capped, 0.5, slice(1))
    assert np.abs(found - exact).max() > 1e-3
    assert not caplog.records


def test_layers_attend_as_the_config_of_their_model_says(model: Decoder) -> None:
    cache = jax.eval_shape(lambda: empty(model))
    assert [step.logits for step in steps_of(CONFIG, cache)] == [Logits(8**-0.5)] * 2
    config = dataclasses.replace(CONFIG, query_scale=0.25, soft_cap=2.0, windows=(16, None))
    steps = steps_of(config, cache)
    assert [step.logits for step in steps] == [Logits(0.25, 2.0)] * 2
    assert [step.window for step in steps] == [16, None]
    assert steps_of(None, cache) == steps_of(CONFIG, cache)  # a model without a config


def test_generate_a_checkpoint_and_the_command_line_read_the_same(
    tmp_path: Path, capsys: Any
) -> None:
    directory = write_checkpoint(tmp_path / "model", max_position_embeddings=2048)
    text = "".join(
        chr(97 + int(i) % 26) for i in np.random.default_rng(1).integers(26, size=1300)
    )
    (tmp_path / "prompt.txt").write_text(text)
    asked = [
        "generate",
        str(directory),
        "--prompt-file",
        str(tmp_path / "prompt.txt"),
        "--max-new-tokens",
        "3",
    ]
    assert main([*asked, "--json", "--sparse-prompt", "0.1"]) == 0
    said = json.loads(capsys.readouterr().out)
    checkpoint = kvjax.models.load(directory)
    found = checkpoint.generate(text, max_new_tokens=3, sparse_prompt=0.1)
    assert found.tokens == said["token_ids"]
    run = checkpoint.stream(text, max_new_tokens=3, sparse_prompt=0.1)
    list(run)
    assert run.rows == found.rows
    with pytest.raises(ValueError, match="slots and sparse_prompt"):
        checkpoint.generate(text, slots=1, sparse_prompt=0.1)


# --------------------------------------------------------------------------------------------------------- refusals


def run(model: Decoder, policy: Any = None, share: Any = 0.5, **how: Any) -> Any:
    return prefill(model, empty(model, policy, **how), PROMPT[:, :40], sparse_prompt=share)


REFUSED = {
    "none": (
        lambda m: run(m, share=0),
        "sparse_prompt must be a share of what is stored, above 0 and at most 1; got 0",
    ),
    "percent": (lambda m: run(m, share=10), "above 0 and at most 1; got 10"),
    "text": (lambda m: run(m, share="x"), "sparse_prompt must be a finite number, got 'x'"),
    "whole prompts": (
        lambda m: run(m, presets.parse("h2o:budget=64")),
        "which reads a whole prompt at once",
    ),
    "codes": (
        lambda m: run(m, presets.parse("kivi")),
        "sparse_prompt reads stored keys in place",
    ),
    "host": (
        lambda m: run(m, presets.parse("fier:budget=64,store=host").rest),
        "sparse_prompt reads stored keys in place",
    ),
    "placement": (
        lambda m: run(m, placement=kvjax.Placement(mesh=MESH, heads="model")),
        "sparse_prompt is for a cache on one device",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_words(model: Decoder, case: str) -> None:
    call, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        call(model)
