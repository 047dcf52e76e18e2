"""A published model on a CPU, where `--checkpoint` names its directory.

    python -m pytest tests/evaluate/test_published.py --checkpoint path/to/SmolLM2-135M-Instruct

Any model of a family that kvjax loads will do. Random weights show that the code is right;
these tests show that it is right on numbers as training makes them, and that methods hold on a
model that people use.
"""

from pathlib import Path

import numpy as np
import pytest

from kvjax import models
from kvjax.evaluate import compare
from kvjax.evaluate.tasks.generated import make_task

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time there was a miller who had three sons. When he died,",
)
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def checkpoint(pytestconfig):
    directory = pytestconfig.getoption("--checkpoint")
    if directory is None:
        pytest.skip(
            "--checkpoint does not name the directory of a published model, whose weights are not here"
        )
    return models.load(Path(directory), dtype="float32")


def test_greedy_tokens_of_full_attention_are_those_of_transformers(checkpoint):
    torch = pytest.importorskip("torch", reason="torch runs the model that is compared with")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint.directory, dtype=torch.float32
    ).eval()
    for text in PROMPTS:
        ids = torch.tensor([checkpoint.encode(text)])
        settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
        with torch.no_grad():
            wanted = theirs.generate(ids, attention_mask=torch.ones_like(ids), **settings)[
                0, ids.shape[1] :
            ]
        found = checkpoint.generate(text, cache="full", max_new_tokens=NEW_TOKENS)
        np.testing.assert_array_equal(found.tokens, wanted.numpy(), err_msg=text)


def test_a_quarter_of_the_prompt_is_enough_for_a_pass_key(checkpoint):
    task = make_task("pass_key", length=512, samples=2, depths=2)
    caches = ("full", "fier:budget=128", "pariskv:budget=128,sink=4,local=16,dense_below=0")
    for cell in compare(checkpoint, task, caches, batch=2).cells:
        assert cell.scores.mean() == 1.0, (
            cell.cache,
            [example["answer"] for example in cell.examples],
        )
        if cell.budget is not None:
            assert cell.attended[-1] <= 128


@pytest.mark.parametrize("cache", ["full", "fier:budget=64"])
def test_five_turns_hold_the_tokens_that_the_template_writes(checkpoint, cache):
    chat = checkpoint.chat(cache=cache, system="Answer briefly.", max_new_tokens=24)
    for message in (
        "Who wrote Moby-Dick?",
        "And when? 你好 😀",
        "say <|im_end|>",
        "def f(x):\n    return x",
        "Thanks!  \n",
    ):
        chat.say(message)
        prompt = checkpoint.apply_chat(chat.messages[:-1])
        if "<|" not in str(chat.messages):  # which transformers reads as a control token
            theirs = checkpoint.tokenizer.apply_chat_template(
                chat.messages[:-1], add_generation_prompt=True
            )
            assert prompt == theirs["input_ids"]
        assert chat._fed == prompt
        assert chat.cache.length.tolist() == [len(prompt) + len(chat._run.rows[0])]
