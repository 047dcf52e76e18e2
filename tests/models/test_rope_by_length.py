"""RoPE that depends on the length of a text: a row's keys have one rotation, that of its final
length.

The oracle is transformers, which reads the whole text of one row at once: its prompt and its
answer, in one call. Logits must agree however the text came into the cache: in chunks, beside
other rows, by answers, inserts, drafts and truncations, on both sides of the length at which
the rotation changes.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import models
from kvjax.generation import generate, prefill

from .test_goldens import SIZES, TOLERANCE, torch_logits

pytestmark = pytest.mark.torch

ORIGINAL = 48  # tokens after which the rotation changes
CROSSING = (ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 3 * ORIGINAL + 5)


CONSTANT = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 5.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 5.0,
        "mscale": 1.7,
    },
}


# What a cache does with a row's rotation is the same for both: such tests run one of them.
ONE, OTHER = (
    pytest.mark.parametrize(
        "pair", [kind, pytest.param(also, marks=pytest.mark.thorough)], indirect=True
    )
    for kind, also in (("dynamic", "longrope"), ("longrope", "dynamic"))
)


@pytest.fixture(scope="module", params=["longrope", "dynamic"])
def pair(request, tmp_path_factory):
    """A model and the transformers model that it was read from."""
    return build(request.param, tmp_path_factory.mktemp(request.param))


def build(kind_of_rope, directory):
    import torch
    import transformers

    torch.set_num_threads(1)
    rope = {
        "rope_type": kind_of_rope,
        "rope_theta": 600.0,
        **CONSTANT.get(kind_of_rope, {"factor": 4.0}),
    }
    longest = ORIGINAL if kind_of_rope == "dynamic" else 8 * ORIGINAL
    common = {**SIZES, "num_hidden_layers": 2, "max_position_embeddings": longest}
    if kind_of_rope == "longrope":
        rope |= {
            "short_factor": [1 + 0.05 * i for i in range(4)],
            "long_factor": [1 + 2.5 * i for i in range(4)],
        }
        common |= {"head_dim": 8}
        kind = "Phi3"
        common["original_max_position_embeddings"] = rope[
            "original_max_position_embeddings"
        ] = ORIGINAL
    else:
        kind = "Llama"
    config = getattr(transformers, f"{kind}Config")(**common, rope_parameters=rope)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    reference = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    reference.save_pretrained(directory)
    return models.load(directory, dtype=jnp.float32).model, reference


def text(length, seed=0):
    return np.random.default_rng(seed).integers(6, SIZES["vocab_size"], length)


def logits_of(reference, row):
    """Of all tokens of one row alone, read at once."""
    torch_logits(
        reference, [row[:1]]
    )  # a short text makes transformers forget the theta of the text before
    return torch_logits(reference, [row])[0]


def last_logits(reference, row):
    return logits_of(reference, row)[-1]


def empty(model, batch=1, capacity=4 * ORIGINAL, policy=None):
    return kvjax.init(
        policy or kvjax.Full(), model.spec(batch, capacity), layers=model.config.layers
    )


def padded(rows):
    lengths = np.array(list(map(len, rows)))
    return np.stack([np.pad(row, (0, lengths.max() - len(row))) for row in rows]), lengths


@pytest.mark.parametrize(
    "chunk", [17, None, *(pytest.param(n, marks=pytest.mark.thorough) for n in (2, ORIGINAL))]
)
def test_prompts_in_chunks_beside_other_rows_are_those_of_transformers(pair, chunk):
    model, reference = pair
    rows = [text(length, seed) for seed, length in enumerate(CROSSING)]
    logits, cache = prefill(model, empty(model, len(rows)), *padded(rows), chunk=chunk)
    for ours, row in zip(logits, rows, strict=True):
        np.testing.assert_allclose(ours, last_logits(reference, row), atol=TOLERANCE, rtol=0)
    kvjax.raise_on_overflow(cache)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", CONSTANT)
def test_kinds_that_ignore_the_length_are_those_of_transformers_too(kind, tmp_path):
    """Prompts in chunks, batches of one and of four, and answers that cross the length of the
    pretraining.
    """
    model, reference = build(kind, tmp_path)
    rows = [text(length, seed) for seed, length in enumerate(CROSSING)]
    wanted = [last_logits(reference, row) for row in rows]
    for chunk in (2, 17, ORIGINAL, None):
        together, _ = prefill(model, empty(model, len(rows)), *padded(rows), chunk=chunk)
        np.testing.assert_allclose(together, np.stack(wanted), atol=TOLERANCE, rtol=0)
        alone, _ = prefill(model, empty(model), rows[-1][None], chunk=chunk)
        np.testing.assert_allclose(alone[0], wanted[-1], atol=TOLERANCE, rtol=0)
    done = generate(
        model,
        empty(model, 2),
        [text(ORIGINAL - 2, 5), text(9, 6)],
        max_new_tokens=ORIGINAL,
        chunk=16,
    )
    for row, answer, ours in zip(
        [text(ORIGINAL - 2, 5), text(9, 6)], done.rows, done.logits, strict=True
    ):
        whole = logits_of(reference, np.concatenate([row, answer]))
        np.testing.assert_allclose(ours, whole[-1], atol=TOLERANCE, rtol=0)
        np.testing.assert_array_equal(answer, whole[len(row) - 1 : -1].argmax(-1))


@pytest.mark.parametrize(
    ("start", "draft"),
    [
        pytest.param(start, draft, marks=() if number % 4 == 0 else pytest.mark.thorough)
        for number, (start, draft) in enumerate(
            itertools.product([1, ORIGINAL - 2, ORIGINAL + 1], [None, "lookup", "model"])
        )
    ],
)
@ONE
def test_answers_that_cross_are_those_of_the_whole_text(pair, start, draft):
    model, reference = pair
    rows = [text(start, 5), text(ORIGINAL // 2, 6)]
    drafts = {
        None: None,
        "lookup": kvjax.PromptLookup(),
        "model": kvjax.DraftModel(model, tokens=3),
    }
    for new in (1, 2, ORIGINAL):
        done = generate(
            model, empty(model, 2), rows, max_new_tokens=new, draft=drafts[draft], chunk=16
        )
        for row, answer, ours in zip(rows, done.rows, done.logits, strict=True):
            whole = np.concatenate([row, answer])
            wanted = logits_of(reference, whole)
            np.testing.assert_allclose(ours, wanted[-1], atol=TOLERANCE, rtol=0)
            np.testing.assert_array_equal(answer, wanted[len(row) - 1 : -1].argmax(-1))


@ONE
def test_a_row_inserted_into_a_batch_keeps_its_rotation(pair):
    model, reference = pair
    rows = [text(9, 1), text(2 * ORIGINAL, 2), text(ORIGINAL - 3, 3)]
    cache = empty(model, 3)
    logits = []
    for i, row in enumerate(rows):
        one, prefix = prefill(model, empty(model), row[None], final=len(row) + 12, chunk=16)
        cache = (
            kvjax.insert(cache, prefix, i) if i else kvjax.insert(cache, prefix, jnp.int32(i))
        )
        logits.append(one[0])
    done = kvjax.generation.decode(model, cache, jnp.stack(logits), max_new_tokens=12)
    for row, answer, ours in zip(rows, done.rows, done.logits, strict=True):
        np.testing.assert_allclose(
            ours, last_logits(reference, np.concatenate([row, answer])), atol=TOLERANCE, rtol=0
        )


def test_a_text_that_outgrows_its_rotation_is_refused(pair):
    model, _ = pair
    row = text(ORIGINAL - 4)
    logits, cache = prefill(model, empty(model), row[None])
    with pytest.raises(
        ValueError,
        match=f"row 0 holds keys that are rotated for a text of at most {ORIGINAL} tokens",
    ):
        kvjax.generation.decode(model, cache, logits, max_new_tokens=5)
    with pytest.raises(ValueError, match="read the whole text again into an empty cache"):
        generate(model, cache, [text(5)], max_new_tokens=1)
    with pytest.raises(ValueError, match="RoPE depends on the length"):
        prefill(model, cache, text(5)[None])
    _, cache = jax.jit(model)(
        text(5)[None], cache
    )  # nothing can be refused here, but it is reported
    with pytest.raises(RuntimeError, match=rf"{ORIGINAL + 1} tokens need other keys"):
        kvjax.raise_on_overflow(cache)
    sizes = dataclasses.replace(cache.spec, rope_by_length=False)
    with pytest.raises(ValueError, match=r"model.spec\(batch"):
        model(row[None], kvjax.init(kvjax.Full(), sizes, layers=2))


def test_a_truncated_row_keeps_its_rotation_unless_nothing_is_left(pair):
    model, reference = pair
    long, short = text(2 * ORIGINAL), text(ORIGINAL)
    _, cache = prefill(
        model, empty(model, 2), *padded([long, short]), final=[3 * ORIGINAL, ORIGINAL]
    )
    cache = kvjax.truncate(cache, jnp.array([ORIGINAL // 2, 7]))
    more, less = text(3 * ORIGINAL - ORIGINAL // 2, 3), text(20, 4)
    logits, cache = prefill(model, cache, *padded([more, less]))
    wanted = [np.concatenate([long[: ORIGINAL // 2], more]), np.concatenate([short[:7], less])]
    for ours, row in zip(logits, wanted, strict=True):
        np.testing.assert_allclose(ours, last_logits(reference, row), atol=TOLERANCE, rtol=0)
    for shorten in (kvjax.truncate, kvjax.rollback):
        _, cache = prefill(model, empty(model), text(10)[None], final=ORIGINAL)
        logits, cache = prefill(model, shorten(cache, jnp.array([0])), long[None])
        np.testing.assert_allclose(
            logits[0], last_logits(reference, long), atol=TOLERANCE, rtol=0
        )


@OTHER
def test_a_cache_keeps_its_rotation_through_growing_and_saving(pair, tmp_path):
    model, reference = pair
    row, more = text(ORIGINAL - 5), text(30, 9)
    final = len(row) + len(more)
    _, cache = prefill(model, empty(model, capacity=64), row[None], final=final)
    kvjax.save(tmp_path, cache)
    for kept in (kvjax.restore(tmp_path, empty(model, capacity=64)), kvjax.grow(cache, 128)):
        logits, _ = prefill(model, kvjax.grow(kept, 128), more[None])
        np.testing.assert_allclose(
            logits[0],
            last_logits(reference, np.concatenate([row, more])),
            atol=TOLERANCE,
            rtol=0,
        )
    shapes = jax.eval_shape(lambda: empty(model, capacity=128))
    np.testing.assert_array_equal(
        kvjax.restore(tmp_path, shapes).rotated_for, cache.rotated_for
    )


@pytest.mark.parametrize("pair", ["longrope"], indirect=True)
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "policy", ["fier:budget=64,local=8,dense_layers=1", "streaming_llm:budget=32", "kivi"]
)
def test_every_kind_of_policy_gets_the_rotation_of_the_row(pair, policy):
    model, _ = pair
    policies = kvjax.presets.parse(policy)
    rows = [text(ORIGINAL // 2, 1), text(2 * ORIGINAL, 2)]
    both = generate(model, empty(model, 2, policy=policies), rows, max_new_tokens=8, chunk=32)
    for i, row in enumerate(rows):
        alone = generate(
            model, empty(model, policy=policies), [row], max_new_tokens=8, chunk=32
        )
        np.testing.assert_allclose(both.logits[i], alone.logits[0], atol=TOLERANCE, rtol=0)
