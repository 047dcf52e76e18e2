"""A draft model chooses the tokens of a prompt that are read: which ones, where they are put,
and what is refused.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax import presets
from kvjax.cli import main
from kvjax.generation import SpecPrefill, generate, prefill
from kvjax.generation.spec_prefill import best_chunks, importance, kept
from kvjax.models import Decoder, DecoderConfig
from kvjax.serve.prefixes import fork
from tests.checkpoint import write_checkpoint

CONFIG = DecoderConfig(
    vocab_size=40, hidden_size=32, intermediate_size=48, layers=4, q_heads=4, kv_heads=2, head_dim=8,
    initializer_range=0.3, max_position_embeddings=4096,
)  # fmt: skip
LENGTHS = np.array([1300, 900])
PROMPT = np.random.default_rng(0).integers(40, size=(2, 1300)).astype(np.int32)
PROMPT[1, 900:] = 0
FIER = kvjax.Retrieval(
    selector=kvjax.Fier(group=8),
    budget=200,
    sink=4,
    local=32,
    demote=kvjax.Fifo(leave=16),
    dense_below=0,
)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return Decoder(CONFIG, rngs=nnx.Rngs(3))


def empty(
    model: Decoder, policy: Any = None, rows: int = 2, capacity: int = 1400
) -> kvjax.Cache:
    return kvjax.init(
        kvjax.Full() if policy is None else policy, model.spec(rows, capacity), layers=4
    )


# --------------------------------------------------------------------------------------------- the method, in numpy


class Text:
    """A text that a model reads, in float64: the queries and keys of each layer after RoPE, and
    the next token.
    """

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.weights = jax.tree.map(
            lambda a: np.asarray(a, np.float64), nnx.to_pure_dict(nnx.state(model))
        )

    def read(self, tokens: list[int]) -> tuple[list[tuple[np.ndarray, np.ndarray]], int]:
        w, config, seen = self.weights, self.model.config, []
        x = w["embedding"][np.array(tokens)]
        T, D = len(tokens), config.head_dim
        frequency = 10000.0 ** (-np.arange(D // 2) / (D // 2))
        angle = np.arange(T)[:, None] * frequency

        def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
            return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + config.norm_eps) * scale

        def turned(x: np.ndarray) -> np.ndarray:
            a, b = np.split(x.reshape(T, -1, D), 2, axis=-1)
            cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

        for i in range(config.layers):
            layer = w["layers"][i]
            h = norm(x, layer["attention_norm"]["scale"])
            q, k = (turned(h @ layer["attention"][n]["kernel"]) for n in "qk")
            v = (h @ layer["attention"]["v"]["kernel"]).reshape(T, -1, D)
            out = np.zeros_like(q)
            for n in range(q.shape[1]):
                g = n * k.shape[1] // q.shape[1]
                logits = np.where(
                    np.tri(T, dtype=bool), q[:, n] @ k[:, g].T / np.sqrt(D), -np.inf
                )
                p = np.exp(logits - logits.max(1, keepdims=True))
                out[:, n] = p / p.sum(1, keepdims=True) @ v[:, g]
            x = x + out.reshape(T, -1) @ layer["attention"]["out"]["kernel"]
            h, mlp = norm(x, layer["mlp_norm"]["scale"]), layer["mlp"]
            gate = h @ mlp["gate"]["kernel"]
            x = (
                x
                + (gate / (1 + np.exp(-gate)) * (h @ mlp["up"]["kernel"]))
                @ mlp["down"]["kernel"]
            )
            seen.append((q, k))
        head = w["head"]["kernel"] if "head" in w else w["embedding"].T
        return seen, int(np.argmax(norm(x[-1:], w["norm"]["scale"]) @ head))


def scores(model: Decoder, prompt: list[int], look_ahead: int) -> np.ndarray:
    text, tokens, M = Text(model), list(prompt), len(prompt)
    by_step = []
    _, token = text.read(tokens)
    for _ in range(look_ahead):
        tokens.append(token)
        seen, token = text.read(tokens)
        best = np.zeros(M)
        for q, k in seen:
            for n in range(q.shape[1]):
                logits = k[:M, n * k.shape[1] // q.shape[1]] @ q[-1, n] / np.sqrt(q.shape[2])
                p = np.exp(logits - logits.max())
                p /= p.sum()
                for j in range(M):
                    best[j] = max(
                        best[j], sum(p[i] for i in range(j - 6, j + 7) if 0 <= i < M) / 13
                    )
        by_step.append(best)
    return np.mean(by_step, axis=0)


def test_scores_are_those_of_the_paper(model: Decoder) -> None:
    lengths = np.array([90, 61])
    found = np.asarray(importance(model, PROMPT[:, :90], lengths, look_ahead=3))
    for row, length in enumerate(lengths):
        wanted = scores(model, PROMPT[row, :length].tolist(), 3)
        np.testing.assert_allclose(found[row, :length], wanted, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("M", [1, 31, 32, 33, 544, 545, 1000, 4001])
@pytest.mark.parametrize("keep", [0.1, 0.3, 0.9, 1.0])
def test_the_best_chunks_are_read_beside_the_first_and_the_last_sixteen(
    M: int, keep: float
) -> None:
    values = np.random.default_rng(M).random(M).astype(np.float32)
    chunks = [list(range(at, min(at + 32, M))) for at in range(0, M, 32)]
    always = {0, *range(max(len(chunks) - 16, 0), len(chunks))}
    others = sorted(
        set(range(len(chunks))) - always,
        key=lambda c: (-np.mean(values[chunks[c]], dtype=np.float64), c),
    )
    share = next(n for n in range(len(chunks) + 1) if n >= len(chunks) * keep - 1e-6)
    wanted = sorted(always | set(others[:share]))
    found = best_chunks(values, keep)
    assert found.tolist() == [i for c in wanted for i in chunks[c]]
    assert kept(M, keep) == len(found)
    assert found[-1] == M - 1


# ------------------------------------------------------------------------------------------------------------- laws


@pytest.mark.parametrize(
    "policy", [kvjax.Full(), FIER, presets.h2o(200).rest], ids=["full", "fier", "h2o"]
)
def test_a_share_of_one_reads_the_prompt_to_the_bit(model: Decoder, policy: Any) -> None:
    lengths = np.array([600, 555])
    whole, cache = prefill(model, empty(model, policy), PROMPT[:, :600], lengths)
    logits, same = SpecPrefill(model, keep=1.0).prefill(
        model, empty(model, policy), PROMPT[:, :600], lengths
    )
    np.testing.assert_array_equal(logits, whole)
    every = np.broadcast_to(np.arange(600), (2, 600))
    by_place, placed = prefill(
        model, empty(model, policy), PROMPT[:, :600], lengths, positions=every
    )
    np.testing.assert_array_equal(by_place, whole)
    assert placed.skipped.tolist() == [0, 0]
    jax.tree.map(np.testing.assert_array_equal, placed.layers, cache.layers)
    jax.tree.map(np.testing.assert_array_equal, same.layers, cache.layers)


def test_kept_tokens_have_their_own_positions_and_the_text_goes_on_after_all(
    model: Decoder,
) -> None:
    """Keys of the first layer depend on a token and its position alone."""
    draft = SpecPrefill(model.first_layers(2), keep=0.1, look_ahead=2)
    positions, counts = draft.choose(PROMPT, LENGTHS)
    assert counts.tolist() == [draft.kept(n) for n in LENGTHS]
    _, whole = prefill(model, empty(model), np.pad(PROMPT, ((0, 0), (0, 2))), LENGTHS + 2)
    found = generate(model, empty(model), PROMPT, LENGTHS, max_new_tokens=2, spec_prefill=draft)
    cache = found.cache
    assert cache.length.tolist() == (counts + 2).tolist()
    assert cache.position.tolist() == (LENGTHS + 2).tolist()
    dense, own = whole.layers[0].state.tokens.k, cache.layers[0].state.tokens.k
    for row, count in enumerate(counts):
        np.testing.assert_array_equal(
            own[row, :, :count], dense[row][:, positions[row, :count]]
        )
        text = np.append(PROMPT[row, : LENGTHS[row]], found.rows[row])[None]
        _, after = prefill(model, empty(model, rows=1), text)
        new = after.layers[0].state.tokens.k[0, :, LENGTHS[row] : LENGTHS[row] + 2]
        np.testing.assert_allclose(own[row, :, count : count + 2], new, atol=1e-5)


def test_read_layer_by_layer_or_at_once_tokens_have_the_same_positions(model: Decoder) -> None:
    positions = np.sort(np.random.default_rng(2).choice(3000, (1, 100), replace=False)).astype(
        np.int32
    )
    logits, cache = prefill(model, empty(model, rows=1), PROMPT[:1, :100], positions=positions)
    at_once = jax.jit(
        lambda model, cache: model(
            PROMPT[:1, :100], cache, last_logits=True, positions=positions
        )
    )
    wanted, same = at_once(model, empty(model, rows=1))
    np.testing.assert_allclose(logits, wanted, atol=1e-4)
    assert cache.position.tolist() == same.position.tolist() == [positions[0, -1] + 1]
    assert kvjax.take_rows(cache, [0, 0]).position.tolist() == cache.position.tolist() * 2


def test_an_answer_is_taken_back_and_not_a_part_of_a_prompt_with_gaps(model: Decoder) -> None:
    """The position of a token before the last gap is not known any more."""
    positions = np.arange(200, 500, 3, dtype=np.int32)[None]
    _, cache = prefill(model, empty(model, rows=1), PROMPT[:1, :100], positions=positions)
    _, cache = prefill(model, cache, PROMPT[:1, :3])
    for length, position in ((103, 501), (100, 498), (0, 0)):
        assert kvjax.rollback(cache, [length]).position.tolist() == [position]
    for length in (1, 99):
        with pytest.raises(
            ValueError,
            match=r"would cut prompts that were read in part.*of \[100\] tokens; keep all",
        ):
            kvjax.rollback(cache, [length])
    same = jax.jit(kvjax.rollback)(cache, jnp.array([99]))
    assert same.position.tolist() == [501]
    with pytest.raises(RuntimeError, match="out of reach"):
        kvjax.raise_on_overflow(same)


def test_a_planted_chunk_is_read(model: Decoder) -> None:
    """All heads of the first layer look for the token 7: its keys are large, and so are all
    queries along them.
    """
    plain = Decoder(
        DecoderConfig(**{**vars(CONFIG), "unrotated": tuple(range(4))}), rngs=nnx.Rngs(3)
    )
    first: Any = plain.layers[0]
    first.attention.q.kernel[...] = jnp.zeros((32, 32))
    first.attention.k.kernel[...] = jnp.zeros((32, 16))
    table = plain.embedding[...]
    # channel 1: every token; channel 0: token 7
    table = table.at[:, 0].set(0.0).at[:, 1].set(30.0).at[7, 0].set(60.0)
    plain.embedding[...] = table
    first.attention.q.kernel[...] = first.attention.q.kernel[...].at[1, ::8].set(5.0)
    first.attention.k.kernel[...] = first.attention.k.kernel[...].at[0, ::8].set(5.0)
    prompt = np.where(PROMPT == 7, 8, PROMPT)
    prompt[0, 350], prompt[1, 170] = 7, 7
    positions, counts = SpecPrefill(plain, keep=0.1, look_ahead=1).choose(prompt, LENGTHS)
    assert 350 in positions[0, : counts[0]]
    assert 170 in positions[1, : counts[1]]


@pytest.mark.parametrize(
    "name",
    [
        "fier",
        "h2o",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("freekv", "mikv")),
    ],
)
def test_methods_go_on_from_a_prompt_with_gaps(model: Decoder, name: str) -> None:
    """The text is that of the tokens that were read, at their positions, and drafts of its
    tokens change nothing.
    """
    policy = presets.parse(f"{name}:budget=320")
    draft = SpecPrefill(model.first_layers(1), keep=0.3, look_ahead=1)
    row, length = PROMPT[:1], LENGTHS[:1]
    found = generate(
        model, empty(model, policy, 1), row, length, max_new_tokens=4, spec_prefill=draft
    )
    positions, counts = draft.choose(row, length)
    tokens = np.take_along_axis(row, positions, axis=1)
    logits, cache = prefill(model, empty(model, policy, 1), tokens, counts, positions=positions)
    assert kvjax.generation.decode(model, cache, logits, max_new_tokens=4).rows == found.rows
    if name == "fier":
        lookup = kvjax.PromptLookup(ngram=2, tokens=3)
        settings: Any = {"max_new_tokens": 4, "spec_prefill": draft, "draft": lookup}
        assert (
            generate(model, empty(model, policy, 1), row, length, **settings).rows == found.rows
        )


def test_a_cache_needs_room_only_for_what_is_read(model: Decoder) -> None:
    draft = SpecPrefill(model.first_layers(1), keep=0.1, look_ahead=1)
    most = draft.kept(1300)
    found = generate(
        model,
        empty(model, rows=1, capacity=most + 2),
        PROMPT[:1],
        max_new_tokens=2,
        spec_prefill=draft,
    )
    assert found.cache.length.tolist() == [most + 2]
    with pytest.raises(
        ValueError, match=rf"{most} prompt \+ 3 new tokens do not fit in the cache's capacity"
    ):
        generate(
            model,
            empty(model, rows=1, capacity=most + 2),
            PROMPT[:1],
            max_new_tokens=3,
            spec_prefill=draft,
        )


def test_the_command_line_and_a_checkpoint_read_the_same_part(
    tmp_path: Path, capsys: Any
) -> None:
    directory = write_checkpoint(tmp_path / "model", max_position_embeddings=2048)
    text = "".join(
        chr(97 + int(i) % 26) for i in np.random.default_rng(1).integers(26, size=1000)
    )
    (tmp_path / "prompt.txt").write_text(text)
    asked = [
        "generate",
        str(directory),
        "--prompt-file",
        str(tmp_path / "prompt.txt"),
        "--max-new-tokens",
        "3",
        "--json",
    ]
    assert main([*asked, "--draft", str(directory), "--keep", "0.1"]) == 0
    said = json.loads(capsys.readouterr().out)
    checkpoint = kvjax.models.load(directory)
    part = SpecPrefill(checkpoint.model, keep=0.1)
    found = checkpoint.generate(text, max_new_tokens=3, spec_prefill=part)
    assert found.tokens == said["token_ids"]
    assert said["prompt_tokens"] == found.prompt_lengths[0] >= 1000
    assert found.cache.length.tolist() == [part.kept(found.prompt_lengths[0]) + 3]
    with pytest.raises(ValueError, match="slots and spec_prefill"):
        checkpoint.generate(text, slots=1, spec_prefill=part)


# --------------------------------------------------------------------------------------------------------- refusals

WINDOWED = DecoderConfig(**{**vars(CONFIG), "windows": (8, None, 8, None)})
MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))


def run(model: Decoder, policy: Any = None, draft: Any = None, **settings: Any) -> Any:
    draft = (
        SpecPrefill(model.first_layers(1), keep=0.5, look_ahead=1) if draft is None else draft
    )
    cache = empty(model, policy)
    return generate(
        model, cache, PROMPT[:, :40], max_new_tokens=1, spec_prefill=draft, **settings
    )


REFUSED = {
    "window": (lambda m: run(Decoder(WINDOWED)), "for models without sliding windows"),
    "streaming_llm": (lambda m: run(m, presets.streaming_llm(64, rope_theta=1e4)), r"Sliding\(rope=...\) turns keys"),
    "shadowkv": (lambda m: run(m, presets.shadowkv(600, rope_theta=1e4)), r"LowRank\(rope=...\) turns keys"),
    "expected": (lambda m: run(m, presets.evict(64, rule="expected", rope_theta=1e4)), "turns keys"),
    "vocabulary": (
        lambda m: run(m, draft=SpecPrefill(Decoder(DecoderConfig(**{**vars(CONFIG), "vocab_size": 5})))),
        "the draft model has a vocabulary of 5 tokens",
    ),
    "model": (lambda m: run(m, draft=m), r"spec_prefill must be a SpecPrefill, got .*; write"),
    "keep": (lambda m: SpecPrefill(m, keep=0.0), r"SpecPrefill\(keep=...\) must be a share of the prompt"),
    "percent": (lambda m: SpecPrefill(m, keep=20), "above 0 and at most 1; got 20"),
    "look_ahead": (lambda m: SpecPrefill(m, look_ahead=0), "look_ahead"),
    "path": (lambda m: SpecPrefill("directory"), "load it first"),
    "draft of windows": (
        lambda m: importance(
            Decoder(DecoderConfig(**{**vars(CONFIG), "windows": (8,) * 4})), PROMPT[:, :40], np.array([40, 40])
        ),
        "every layer of the draft has a sliding window",
    ),
    "positions of the draft": (
        lambda m: importance(
            Decoder(DecoderConfig(**{**vars(CONFIG), "max_position_embeddings": 45})), PROMPT[:, :40], np.array([40, 9])
        ),
        r"the draft model: 40 prompt \+ 8 new tokens do not fit in the model's 45 positions",
    ),
    "shape": (lambda m: prefill(m, empty(m), PROMPT[:, :3], positions=[[1, 2, 3]]), r"must be integers \[2, 3\]"),
    "order": (
        lambda m: prefill(m, empty(m), PROMPT[:, :3], positions=[[1, 2, 3], [5, 4, 6]]),
        "positions of row 1 must increase, from 0 on",
    ),
    "placement": (
        lambda m: prefill(
            m,
            kvjax.init(kvjax.Full(), m.spec(2, 64), layers=4, placement=kvjax.Placement(mesh=MESH, heads="model")),
            PROMPT[:, :3],
            positions=[[1, 2, 3]] * 2,
        ),
        "this one has a placement",
    ),
    "other model": (
        lambda m: prefill(
            lambda tokens, cache, *, lengths, active=None, last_logits, first_chunk: None,  # type: ignore[arg-type, misc]
            empty(m), PROMPT[:, :3], positions=[[1, 2, 3]] * 2,
        ),
        "the model takes no positions",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_words(model: Decoder, case: str) -> None:
    call, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        call(model)


def test_a_cache_with_gaps_refuses_what_needs_a_whole_prompt(
    model: Decoder, tmp_path: Path
) -> None:
    positions = np.array([[1, 2, 3, 9]])
    _, cache = prefill(model, empty(model, rows=1), PROMPT[:1, :4], positions=positions)
    words = "tokens of this one's prompt were left out"
    for verb in (
        lambda: kvjax.truncate(cache, [2]),
        lambda: kvjax.insert(empty(model), cache, 0),
        lambda: fork(cache, 2, new_tokens=4),
        lambda: kvjax.save(tmp_path / "cache", cache),
    ):
        with pytest.raises(ValueError, match=words):
            verb()
    assert kvjax.rollback(cache, [0]).position.tolist() == [0]
    grown = kvjax.grow(cache, 2000)
    assert grown.position.tolist() == [10]
    with pytest.raises(
        ValueError, match=re.escape("the cache holds 4 tokens before this prompt")
    ):
        generate(model, grown, [[1, 2]], max_new_tokens=1, spec_prefill=SpecPrefill(model))
