"""The model that comes with the package: small, complete, and able to find what is hidden."""

import json
import random

import numpy as np
import pytest

from kvjax import models, presets
from kvjax.cache.cache import init
from kvjax.evaluate.tasks.generated import FORMS
from kvjax.evaluate.tasks.haystack import weave
from kvjax.generation import generate

LENGTH = 512
TEXT = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
)


@pytest.fixture(scope="module")
def checkpoint():
    return models.load(models.shipped(), dtype="float32")


def test_it_is_below_60_mb_in_files_below_16(checkpoint):
    sizes = [file.stat().st_size for file in checkpoint.directory.iterdir()]
    assert sum(sizes) < 60e6
    assert max(sizes) < 16e6


def test_its_heads_are_those_that_the_methods_are_made_for(checkpoint):
    config = checkpoint.config
    assert config.head_dim == 64
    assert config.q_heads == 4 * config.kv_heads
    assert config.max_positions == 16384


def test_its_card_tells_what_it_saw_and_what_it_can_do(checkpoint):
    card = (checkpoint.directory / "README.md").read_text()
    settings = json.loads((models.shipped() / "config.json").read_text())
    assert f"vocabulary {settings['vocab_size']}" in card
    for told in (
        "license:",
        "## Data",
        "SHA-256",
        "Held out: War And Peace",
        "| needles |",
        "| perplexity |",
    ):
        assert told in card


@pytest.mark.thorough  # README's first command asks it through FIER, tests/cli/test_cli.py with all tokens
@pytest.mark.parametrize(
    "policy", [presets.fier(budget=128), presets.full()], ids=["fier", "full"]
)
def test_it_finds_what_is_hidden(checkpoint, policy):
    rng = random.Random(0)
    sizes = {
        "needles": {"hidden": 4},
        "key_value": {"pairs": 8},
        "variables": {"chains": 4, "hops": 1},
    }
    made = [FORMS[form](rng, **sizes.get(form, {})) for form in ("pass_key", *sizes)]
    prompts = [
        weave(checkpoint.tokenizer, TEXT * 40, LENGTH, hidden, rng).ids for hidden in made
    ]
    cache = init(
        policy, checkpoint.model.spec(len(prompts), LENGTH + 8), layers=checkpoint.config.layers
    )
    tokens = np.asarray(generate(checkpoint.model, cache, prompts, max_new_tokens=5).tokens)
    found = [checkpoint.tokenizer.decode(row).strip() for row in tokens]
    assert found == [one.answers[0] for one in made]
