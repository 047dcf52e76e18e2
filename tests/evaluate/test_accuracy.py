"""The runner, on a random checkpoint: its answers are generate's, and its files hold what made them."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

import kvjax
from kvjax import models, presets
from kvjax.evaluate import Example, accuracy
from kvjax.evaluate.accuracy import evaluate, prepare
from kvjax.evaluate.store import interval, read_cell
from kvjax.generation import generate
from tests.checkpoint import LAYERS, POSITIONS, write_checkpoint

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 4
NEW = 40  # more than a piece
CACHES = {"full": presets.full(), "snapkv@40": presets.snapkv(40, window=8, dense_layers=1)}


@dataclasses.dataclass(frozen=True)
class Copy:
    """Prompts of different lengths; right is what the model says with a full cache."""

    lengths: tuple[int, ...] = (200, 256, 230, 250, 220)
    right: tuple[str, ...] = ("?",) * 5
    name: str = "copy"
    metric: str = "exact match"
    max_new_tokens: int = NEW
    stop: tuple[str, ...] = ()
    chat: bool = False
    truncate: bool = False
    version: int = 0

    def key(self):
        return {"lengths": self.lengths, "version": self.version}

    def examples(self, tokenizer):
        return [
            Example(f"e{i}", tuple(tokenizer(TEXT[i : i + n])["input_ids"]), (right,), {"odd": i % 2})
            for i, (n, right) in enumerate(zip(self.lengths, self.right, strict=True))
        ]

    def score(self, example, answer):
        return float(answer == example.answers[0])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return models.load(write_checkpoint(tmp_path_factory.mktemp("checkpoint")), dtype="float32")


def generated(checkpoint, policy):
    """What `generate` answers to each prompt alone."""
    found = []
    for example in Copy().examples(checkpoint.tokenizer):
        cache = kvjax.init(policy, checkpoint.model.spec(batch=1, capacity=384), layers=LAYERS)
        ask = {"max_new_tokens": NEW, "stop_tokens": checkpoint.stop_tokens, "chunk": 256}
        done = generate(checkpoint.model, cache, [example.prompt], **ask)
        found.append(checkpoint.tokenizer.decode(done.rows[0], skip_special_tokens=True))
    return found


@pytest.fixture(scope="module")
def expected(checkpoint):
    return {name: generated(checkpoint, policy) for name, policy in CACHES.items()}


@pytest.fixture(scope="module")
def task(expected):
    return Copy(right=tuple(expected["full"]))


def whole_run(checkpoint, task, out, **settings):
    return {cell.cache: cell for cell in evaluate(checkpoint, task, CACHES, batch=2, out=out, **settings)}


@pytest.fixture(scope="module")
def finished(checkpoint, task, tmp_path_factory):
    out = tmp_path_factory.mktemp("results")
    return out, whole_run(checkpoint, task, out)


def answers(cell):
    return {example["id"]: example["answer"] for example in cell.examples}


# ----------------------------------------------------------------------------------------- what it computes


def test_answers_are_those_of_generate_for_every_cache(finished, expected):
    for name, cell in finished[1].items():
        assert answers(cell) == {f"e{i}": answer for i, answer in enumerate(expected[name])}
    assert expected["full"] != expected["snapkv@40"], "the caches must differ for this to say something"


@pytest.mark.thorough
@pytest.mark.parametrize("name", presets.REGISTRY)
def test_answers_are_those_of_generate_for_every_preset(checkpoint, name):
    sizes = {
        "logquant": {"group": 8},
        "kivi": {"group": 8},
        "pariskv": {"local": 16},
        "freekv": {"sink": 8, "local": 8},
    }
    budget = {"budget": 64} if presets.REGISTRY[name].has_budget else {}
    policy = presets.REGISTRY[name].make(**budget, **sizes.get(name, {}))
    (cell,) = evaluate(checkpoint, Copy(), {name: policy}, batch=3)
    assert answers(cell) == {f"e{i}": answer for i, answer in enumerate(generated(checkpoint, policy))}


def test_scores_lengths_and_fields_are_those_of_the_examples(finished, expected, task):
    cells = finished[1]
    assert cells["full"].summary()["mean"] == 1
    assert cells["full"].summary()["n"] == 5
    right = np.mean([a == b for a, b in zip(expected["snapkv@40"], expected["full"], strict=True)])
    assert cells["snapkv@40"].summary()["mean"] == right < 1
    assert {e["id"]: e["prompt_tokens"] for e in cells["full"].examples} == {
        f"e{i}": n for i, n in enumerate(task.lengths)
    }
    assert {e["id"]: e["fields"]["odd"] for e in cells["full"].examples} == {f"e{i}": i % 2 for i in range(5)}


def test_tokens_attended_are_the_mean_over_steps(finished, task):
    cells = finished[1]
    tokens = {e["id"]: e["new_tokens"] for e in cells["full"].examples}
    assert max(tokens.values()) == NEW, "some answer must go on over several pieces"
    order = [task.lengths[int(i[1])] for i in tokens]
    seen = [n + step for n, new in zip(order, tokens.values(), strict=True) for step in range(1, new + 1)]
    np.testing.assert_allclose(cells["full"].attended, np.mean(seen), rtol=1e-5)
    np.testing.assert_allclose(cells["snapkv@40"].attended[1:], 40, rtol=1e-5)
    assert cells["snapkv@40"].attended[0] > 200  # dense
    assert cells["snapkv@40"].budget == 40
    assert cells["full"].budget is None


def test_a_stop_text_cuts_the_answer_and_ends_the_decoding(checkpoint, task, expected):
    whole = expected["full"][1]
    stop = next(c for c in whole if c.isalnum())
    at = whole.index(stop)
    assert 0 < at < NEW / 2
    stopping = dataclasses.replace(task, stop=("no such text", stop))
    (cell,) = evaluate(checkpoint, stopping, {"full": CACHES["full"]}, batch=2)
    example = next(e for e in cell.examples if e["id"] == "e1")
    assert example["answer"] == whole[:at]
    assert example["new_tokens"] == NEW / 2, "two even pieces, of which the second is not needed"


def test_intervals():
    assert interval(np.zeros(0)) == (None, None)
    np.testing.assert_allclose(interval(np.array([1.0] * 45 + [0.0] * 5)), (0.7864, 0.9565), atol=1e-4)  # Wilson's
    low, high = interval(np.ones(128))
    assert 0.97 < low < 0.975
    assert high == 1
    scores = np.random.default_rng(1).uniform(size=400)
    low, high = interval(scores)
    reach = 1.96 * scores.std() / 20
    np.testing.assert_allclose((low, high), (scores.mean() - reach, scores.mean() + reach), atol=0.005)


# ------------------------------------------------------------------------------------------------ its files


def test_a_killed_run_goes_on_where_it_stopped(checkpoint, task, finished, tmp_path, monkeypatch):
    calls = []
    decode = accuracy._decode

    def counting(checkpoint, cache, logits, task, active):
        if len(calls) == 3:  # between the two caches of the second batch
            raise KeyboardInterrupt
        calls.append(int(active.sum()))
        return decode(checkpoint, cache, logits, task, active)

    monkeypatch.setattr(accuracy, "_decode", counting)
    with pytest.raises(KeyboardInterrupt):
        whole_run(checkpoint, task, tmp_path)
    assert calls == [2, 2, 2]
    calls[:] = [0] * 4  # past the trap
    cells = whole_run(checkpoint, task, tmp_path)
    assert calls[4:] == [2, 1, 1], "the rest, and no more"
    for name, cell in finished[1].items():
        assert answers(cells[name]) == answers(cell)
        np.testing.assert_allclose(cells[name].attended, cell.attended, rtol=1e-6)
    monkeypatch.setattr(accuracy.prompt, "read", lambda *args: pytest.fail("a finished run prefills nothing"))
    assert whole_run(checkpoint, task, tmp_path)["full"].summary() == cells["full"].summary()


def test_plans_may_share_a_capacity(checkpoint, task, monkeypatch):
    seen = []

    def decode(checkpoint, cache, logits, task, active):
        seen.append(cache.spec.capacity)
        return [("", 1)] * len(active), [1.0] * LAYERS, 1

    monkeypatch.setattr(accuracy, "_decode", decode)
    plan = prepare(checkpoint, task, {"full": CACHES["full"]}, dtype="float32")
    assert plan.capacity == 384
    accuracy.run(checkpoint, plan, batch=2)
    assert set(seen) == {384}
    plan = prepare(checkpoint, task, {"full": CACHES["full"]}, dtype="float32")
    accuracy.run(checkpoint, plan, batch=2, capacity=512)
    assert set(seen) == {384, 512}


def test_of_a_batch_that_is_known_in_part_only_the_rest_is_decoded(checkpoint, task, finished, tmp_path):
    raw = json.loads(finished[1]["full"].path.read_text())
    lost = raw["batches"][1]["examples"].pop()
    (tmp_path / finished[1]["full"].path.name).write_text(json.dumps(raw))
    (cell,) = evaluate(checkpoint, task, {"full": CACHES["full"]}, batch=2, out=tmp_path)
    assert [e["id"] for e in cell.batches[-1]["examples"]] == [lost["id"]]
    assert answers(cell) == answers(finished[1]["full"])


def test_a_file_says_what_made_it_and_reads_back(finished):
    out, cells = finished
    files = sorted(out.iterdir())
    assert len(files) == len(cells)
    for cell in cells.values():
        raw = json.loads(cell.path.read_text())
        assert raw["summary"]["mean"] == cell.summary()["mean"]
        assert raw["key"]["policy"] == repr(CACHES[cell.cache])
        assert {"model", "dtype", "versions", "source", "backend", "examples", "task"} <= set(raw["key"])
        assert {"date", "model", "budget"} <= set(raw)
        assert cell.digest[:16] in cell.path.name
        again = read_cell(cell.path)
        assert (again.digest, again.examples, again.method) == (cell.digest, cell.examples, cell.cache.split("@")[0])


def test_scores_of_an_old_file_are_made_anew_by_the_task(checkpoint, task, finished, tmp_path):
    shutil.copy(finished[1]["full"].path, tmp_path)
    strict = dataclasses.replace(task)
    object.__setattr__(strict, "score", lambda example, answer: 0.25)
    (cell,) = evaluate(checkpoint, strict, {"full": CACHES["full"]}, out=tmp_path)
    assert cell.summary()["mean"] == 0.25


def test_the_key_changes_with_everything_that_could_change_an_answer(checkpoint, task, tmp_path, monkeypatch):
    fier = presets.fier(16)

    def digest(checkpoint=checkpoint, task=task, policy=fier, dtype="float32"):
        return prepare(checkpoint, task, {"x": policy}, dtype=dtype).cells["x"].digest

    other = write_checkpoint(tmp_path / "other", rms_norm_eps=1e-4)
    keys = {
        "nothing": digest(),
        "policy": digest(policy=presets.fier(17)),
        "group_reduce": digest(policy=presets.fier(16, group_reduce="per_head")),
        "dense layers": digest(policy=presets.fier(16, dense_layers=1)),
        "dtype": digest(dtype="bfloat16"),
        "task's key": digest(task=dataclasses.replace(task, version=1)),
        "new tokens": digest(task=dataclasses.replace(task, max_new_tokens=NEW - 1)),
        "stop": digest(task=dataclasses.replace(task, stop=("x",))),
        "answers": digest(task=dataclasses.replace(task, right=("other",) * 5)),
        "model": digest(checkpoint=dataclasses.replace(checkpoint, directory=other)),
        "stop tokens": digest(checkpoint=dataclasses.replace(checkpoint, stop_tokens=(3,))),
    }
    made = accuracy.provenance()
    for name, value in {"source": "x", "versions": {"jax": "0"}, "backend": "gpu", "device": "x"}.items():
        monkeypatch.setattr(accuracy, "provenance", lambda name=name, value=value: {**made, name: value})
        keys[name] = digest()
    assert len(set(keys.values())) == len(keys), keys
    monkeypatch.setattr(accuracy, "provenance", lambda: {**made, "date": "another"})
    assert digest() == keys["nothing"]


def test_a_damaged_file_is_named_and_not_overwritten(checkpoint, task, finished, tmp_path):
    file = tmp_path / finished[1]["full"].path.name
    for text, message in (("{", "is no result of kvjax"), ('{"a": 1}', "is no result of kvjax")):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            evaluate(checkpoint, task, {"full": CACHES["full"]}, out=tmp_path)
        assert file.read_text() == text
    raw = json.loads(finished[1]["full"].path.read_text())
    raw["key"]["dtype"] = "bfloat16"
    file.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="was changed by hand"):
        evaluate(checkpoint, task, {"full": CACHES["full"]}, out=tmp_path)


# ------------------------------------------------------------------------------- what it checks beforehand


def long_task(**changes):
    return dataclasses.replace(Copy(), lengths=(200, POSITIONS - NEW + 1), right=("?",) * 2, **changes)


@pytest.fixture
def long_text(monkeypatch):
    monkeypatch.setattr("tests.evaluate.test_accuracy.TEXT", "".join(map(chr, range(97, 123))) * 40)


def test_a_prompt_without_room_is_refused_before_anything_runs(checkpoint, long_text):
    with pytest.raises(ValueError, match=r"copy, example e1: 473 prompt . 40 new tokens do not fit in the model's 512"):
        prepare(checkpoint, long_task(), CACHES, dtype="float32")


@pytest.mark.parametrize("as_text", [False, True])
def test_a_task_that_says_so_loses_the_middle_of_its_prompts(checkpoint, long_text, as_text):
    task = long_task(truncate=True)
    tokenizer = checkpoint.tokenizer
    examples = task.examples(tokenizer)
    if as_text:
        examples = [dataclasses.replace(e, prompt=tokenizer.decode(e.prompt)) for e in examples]
        object.__setattr__(task, "examples", lambda tokenizer: examples)
    plan = prepare(checkpoint, task, CACHES, dtype="float32")
    whole = examples[1].prompt if as_text else tokenizer.decode(examples[1].prompt)
    room = POSITIONS - NEW
    assert tokenizer.decode(plan.prompts["e1"]) == whole[: room // 2] + whole[-room // 2 :]
    assert tokenizer.decode(plan.prompts["e0"]) == (
        examples[0].prompt if as_text else tokenizer.decode(examples[0].prompt)
    )


def test_text_prompts_go_through_the_tokenizer_and_chat_through_the_template(checkpoint):
    examples = [Example("a", "hello", ("?",))]
    for chat, wanted in ((False, "hello"), (True, "[user]hello[reply]")):
        task = Copy(chat=chat)
        object.__setattr__(task, "examples", lambda tokenizer: examples)
        plan = prepare(checkpoint, task, CACHES, dtype="float32")
        assert checkpoint.tokenizer.decode(plan.prompts["a"]) == wanted


def test_a_chat_prompt_is_cut_so_that_the_template_fits_too(checkpoint):
    task = Copy(chat=True, truncate=True)
    object.__setattr__(task, "examples", lambda tokenizer: [Example("a", "abcdefgh" * 100, ("?",))])
    (ids,) = prepare(checkpoint, task, CACHES, dtype="float32").prompts.values()
    text = checkpoint.tokenizer.decode(ids)
    assert text.startswith("[user]abcdefgh")
    assert text.endswith("abcdefgh[reply]")
    assert POSITIONS - NEW - 4 <= len(ids) <= POSITIONS - NEW


def test_ids_must_differ_and_caches_must_be(checkpoint, task):
    twice = dataclasses.replace(task)
    object.__setattr__(twice, "examples", lambda tokenizer: task.examples(tokenizer)[:1] * 2)
    with pytest.raises(ValueError, match="2 examples with 1 ids"):
        prepare(checkpoint, twice, CACHES, dtype="float32")
    with pytest.raises(ValueError, match="at least one cache"):
        prepare(checkpoint, task, {}, dtype="float32")
    with pytest.raises(ValueError, match="key_group=3"):
        prepare(checkpoint, task, {"kivi": presets.kivi(group=3)}, dtype="float32")
