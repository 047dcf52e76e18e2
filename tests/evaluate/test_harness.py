"""lm-evaluation-harness drives a checkpoint through a cache."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip(
    "lm_eval", reason="lm-evaluation-harness is not installed: pip install 'kvjax[harness]'"
)

from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table

from kvjax import models
from kvjax.evaluate.harness import KvjaxLM
from kvjax.models import Checkpoint
from tests.checkpoint import write_checkpoint

GUIDES = Path(__file__).parents[2] / "docs" / "guides" / "extend.md"
KEY = "The pass key is {0}. Remember it.\nWhat is the pass key? The pass key is "


@pytest.fixture(scope="module")
def shipped() -> Checkpoint:
    return models.load(models.shipped(), dtype="float32")


def request(*args: Any) -> SimpleNamespace:
    return SimpleNamespace(args=args)


def by_forward(model: KvjaxLM, context: str, rest: str) -> tuple[float, bool]:
    """Log probability of the text after the context by one pass of the model, and whether
    greedy decoding gives it.
    """
    head, tail = (
        model._encode_pair(context, rest)
        if context
        else ([model.prefix_token_id], model.tok_encode(rest, False))
    )
    logits = model.checkpoint.model(np.array([head + tail]), None)[0]
    table = np.asarray(jax.nn.log_softmax(logits, axis=-1))[0, len(head) - 1 : -1]
    greedy = all(int(row.argmax()) == token for row, token in zip(table, tail, strict=True))
    return float(sum(table[i, token] for i, token in enumerate(tail))), greedy


def test_continuations_have_the_models_own_probability(shipped: Checkpoint) -> None:
    model = KvjaxLM(shipped, "full", batch=2)
    asked = KEY.format(71432) + "7143"
    pairs = [(asked, "2"), (asked, "3"), ("", "The")]
    found = model.loglikelihood([request(*pair) for pair in pairs], disable_tqdm=True)
    for (context, rest), (logprob, greedy) in zip(pairs, found, strict=True):
        want, best = by_forward(model, context, rest)
        assert logprob == pytest.approx(want, rel=1e-3, abs=1e-3)
        assert greedy == best
    assert found[0][1]
    assert not found[1][1]
    (rolled,) = model.loglikelihood_rolling([request("The")], disable_tqdm=True)
    assert rolled == pytest.approx(found[2][0], abs=1e-4)


def test_a_cache_that_drops_the_key_is_seen(shipped: Checkpoint) -> None:
    text = KEY.format(71432).replace(
        "\n", "\n" + "The river was wide and the road was long. " * 30 + "\n"
    )
    pair = request(text, "71432")
    ((full, _),) = KvjaxLM(shipped, "full").loglikelihood([pair], disable_tqdm=True)
    ((dropped, _),) = KvjaxLM(shipped, "streaming_llm:budget=16,dense_layers=0").loglikelihood(
        [pair], disable_tqdm=True
    )
    assert full - dropped > 5


def test_the_harness_scores_a_task_of_local_files(shipped: Checkpoint, tmp_path: Path) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    keys = ["71432", "20518"]
    (tmp_path / "keys.jsonl").write_text(
        "".join(json.dumps({"prompt": KEY.format(k), "key": k}) + "\n" for k in keys)
    )
    (tmp_path / "keys.yaml").write_text(
        f"""task: local_keys
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/keys.jsonl}}, cache_dir: {tmp_path}/cache}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{key}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 6, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
filter_list: [{{name: first, filter: [{{function: regex, regex_pattern: "^([0-9]{{5}})"}}, {{function: take_first}}]}}]
"""
    )
    results = lm_eval.simple_evaluate(
        model=KvjaxLM(shipped, "fier:budget=64", batch=2),
        tasks=["local_keys"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    assert results["results"]["local_keys"]["exact_match,first"] == 1.0
    heads = make_table(results).partition("\n")[0]
    assert re.findall(r"\w[\w-]*", heads)[:2] == ["Tasks", "Version"], heads


def test_mmlu_is_scored_from_local_files(shipped: Checkpoint, tmp_path: Path) -> None:
    """Four choices by the probability of their letters, with the task as in the guide."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    (guide,) = re.findall(r"```yaml\n(task: mmlu_local\n.*?)```", GUIDES.read_text(), re.DOTALL)
    asked = {
        "What is the pass key?": list("7143"),
        "Which is a colour?": ["red", "two", "run", "of"],
    }
    model, says = KvjaxLM(shipped, "fier:budget=64", batch=4), []
    for question, choices in asked.items():
        lines = "".join(
            f"{letter}. {choice}\n" for letter, choice in zip("ABCD", choices, strict=True)
        )
        says.append(
            int(
                np.argmax(
                    [
                        by_forward(model, f"{question}\n{lines}Answer:", f" {x}")[0]
                        for x in "ABCD"
                    ]
                )
            )
        )
    answers = [says[0], (says[1] + 1) % 4]  # one that it gets right, and one that it does not
    rows = [
        {"question": q, "choices": asked[q], "answer": a}
        for q, a in zip(asked, answers, strict=True)
    ]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mmlu.yaml").write_text(guide.replace("path/to", str(tmp_path)))
    results = lm_eval.simple_evaluate(
        model=model,
        tasks=["mmlu_local"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    assert results["results"]["mmlu_local"]["acc,none"] == 0.5


def test_answers_end_at_the_settings_of_a_task(shipped: Checkpoint) -> None:
    model = KvjaxLM(shipped, batch=1)
    for settings, answer in (
        ({"until": ["", "."], "max_gen_toks": 3}, "714"),  # an empty text ends nothing
        ({"until": "4", "max_tokens": 3}, "71"),
        (
            {"until": [], "max_completion_tokens": 2, "do_sample": False, "temperature": 0.7},
            "71",
        ),
    ):
        assert model.generate_until([request(KEY.format(71432), settings)]) == [answer]


def test_beginning_of_an_answer_is_left_open_in_a_chat(
    shipped: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    monkeypatch.setattr(shipped.tokenizer, "chat_template", template)
    model, asked = KvjaxLM(shipped), {"role": "user", "content": "Which key?"}
    assert model.apply_chat_template([asked]) == "[user]Which key?[end][assistant]"
    begun = [asked, {"role": "assistant", "content": "The key is"}]
    assert model.apply_chat_template(begun, add_generation_prompt=False) == (
        "[user]Which key?[end][assistant]The key is"
    )


def test_long_text_is_scored_in_the_windows_of_the_harness(tmp_path: Path) -> None:
    """Windows of as many tokens as the model has positions, as the harness's own models have
    them.
    """
    write_checkpoint(tmp_path)
    model = KvjaxLM(models.load(tmp_path, dtype="float32"), batch=2)
    text = "It was the best of times, it was the worst of times. " * 11
    tokens = model.tok_encode(text, add_special_tokens=False)
    assert model.max_length < len(tokens) < 1.5 * model.max_length
    windows = get_rolling_token_windows(tokens, model.prefix_token_id, model.max_length, 1)
    total = 0.0
    for head, tail in map(make_disjoint_window, windows):
        logits = model.checkpoint.model(np.array([[*head, *tail][:-1]]), None)[0]
        table = np.asarray(jax.nn.log_softmax(logits, axis=-1))[0, len(head) - 1 :]
        total += table[np.arange(len(tail)), tail].sum()
    (found,) = model.loglikelihood_rolling([request(text)], disable_tqdm=True)
    assert found == pytest.approx(total, rel=1e-5)


def test_texts_without_a_token_have_probability_1(shipped: Checkpoint) -> None:
    model = KvjaxLM(shipped)
    assert model.loglikelihood_rolling([request("")], disable_tqdm=True) == [0]
    assert model.loglikelihood([], disable_tqdm=True) == []


def test_a_model_whose_texts_have_no_ends_is_told_what_it_lacks(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, eos_token_id=None)
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    model = KvjaxLM(models.load(tmp_path, dtype="float32"))
    assert len(model.generate_until([request("a", {"max_gen_toks": 3})])) == 1
    with pytest.raises(
        ValueError, match=r"names no token that begins or ends a text.*set eos_token_id in"
    ):
        model.loglikelihood_rolling([request("a text")], disable_tqdm=True)


def test_what_the_adapter_refuses(shipped: Checkpoint) -> None:
    model = KvjaxLM(shipped)
    with pytest.raises(ValueError, match="asks for sampling"):
        model.generate_until([request("a", {"do_sample": True, "temperature": 0.7})])
    with pytest.raises(ValueError, match="asks for sampling"):
        model.generate_until([request("a", {"temperature": 0.7})])
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        model.generate_until([request("a", {"max_tokens": 0})])
    with pytest.raises(ValueError, match="kvjax takes pretrained, cache"):
        KvjaxLM.create_from_arg_string("cash=fier")


def test_settings_of_the_chat_template_reach_it(
    shipped: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if quiet %}[quiet]{% endif %}"
    )
    monkeypatch.setattr(shipped.tokenizer, "chat_template", template)
    monkeypatch.setattr(models, "load", lambda *given, **how: shipped)
    asked = [{"role": "user", "content": "Which key?"}]
    for given in ({"quiet": True}, "quiet=true", '{"quiet": true}'):
        model = KvjaxLM.create_from_arg_obj({"template": given})
        assert model.apply_chat_template(asked) == "Which key?[quiet]"
    assert KvjaxLM(shipped).apply_chat_template(asked) == "Which key?"
    text = KvjaxLM.create_from_arg_string("cache=full,template=quiet=true")
    assert text.apply_chat_template(asked) == "Which key?[quiet]"
    with pytest.raises(ValueError, match=r"template quite: .* did you mean 'quiet'\?"):
        KvjaxLM(shipped, template="quite=true")


def test_a_file_of_longbench_is_scored_as_the_harness_scores_it(
    shipped: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt and the score are those of lm-evaluation-harness, with the task as in the guide."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    # The file of its scores imports these, which only Chinese, code and summaries need.
    for name, has in (("jieba", ()), ("fuzzywuzzy", ("fuzz",)), ("rouge", ("Rouge",))):
        module = ModuleType(name)
        for one in has:
            setattr(module, one, None)
        monkeypatch.setitem(sys.modules, name, module)
    (guide,) = re.findall(r"```yaml\n(include: .*?)```", GUIDES.read_text(), re.DOTALL)
    guide = guide.replace("path/to/lm_eval", *lm_eval.__path__)
    (tmp_path / "task.yaml").write_text(guide.replace("path/to", str(tmp_path)))

    question = "What is the pass key? The pass key is "
    context = "The pass key is 71432. Remember it."
    asked = (
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        f"The following are some examples.\n\n{context}\n{question}"
    )
    model = KvjaxLM(shipped, "fier:budget=64", batch=2)
    (said,) = model.generate_until(
        [request(asked, {"until": ["\n"], "max_gen_toks": 32, "do_sample": False})]
    )
    assert said.startswith("71432")
    answers = [["something else", said], ["nothing of this"]]
    rows = [{"context": context, "question": question, "answers": given} for given in answers]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = lm_eval.simple_evaluate(
        model=model,
        tasks=["triviaqa_local"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    assert results["results"]["triviaqa_local"]["qa_f1_score,none"] == 0.5
