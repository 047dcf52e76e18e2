"""The runner, on a random checkpoint: its answers are generate's, and its files have their
provenance.
"""

import dataclasses
import json
import re
import shutil
import threading
import weakref
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx

import kvjax
import kvjax.evaluate
from kvjax import models, presets
from kvjax.evaluate import Example, accuracy, plan, prompt, report
from kvjax.evaluate.caches import make_rows
from kvjax.evaluate.store import interval, read_cell
from kvjax.generation import decode, decode_step, generate, prefill
from tests.checkpoint import LAYERS, POSITIONS, write_checkpoint

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 4
NEW = 40  # more than a piece
NET = models.GatedDelta(key_heads=1, value_heads=2, key_dim=8, value_dim=8)
CACHES = {
    "full": presets.full(),
    "snapkv@40": presets.snapkv(40, window=8, layers=presets.Layers(dense=1)),
}


def prepare(checkpoint, task, caches, **settings):
    return plan.prepare(checkpoint, task, make_rows(caches) if caches else [], **settings)


def evaluate(checkpoint, task, caches, *, out=None, **how):
    made = prepare(checkpoint, task, caches, dtype=checkpoint.model.dtype, out=out)
    return plan.run(checkpoint, made, accuracy.answer, **how)


@dataclasses.dataclass(frozen=True)
class Copy:
    """Prompts of different lengths; the right answer is the model's with a full cache."""

    lengths: tuple[int, ...] = (200, 256, 230, 250, 220)
    right: tuple[str, ...] = ("?",) * 5
    name: str = "copy"
    metric: str = "exact match"
    max_new_tokens: int = NEW
    stop: tuple[str, ...] = ()
    chat: bool = False
    version: int = 0

    def key(self):
        return {"lengths": self.lengths, "version": self.version}

    def examples(self, tokenizer):
        return [
            Example(
                f"e{i}",
                tuple(tokenizer(TEXT[i : i + n])["input_ids"]),
                (right,),
                {"odd": i % 2},
            )
            for i, (n, right) in enumerate(zip(self.lengths, self.right, strict=True))
        ]

    def score(self, example, answer):
        return float(answer == example.answers[0])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return models.load(write_checkpoint(tmp_path_factory.mktemp("checkpoint")), dtype="float32")


def generated(checkpoint, policy):
    """The answer of `generate` to each prompt alone."""
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
    return {
        cell.cache: cell
        for cell in evaluate(checkpoint, task, CACHES, batch=2, out=out, **settings)
    }


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
    assert expected["full"] != expected["snapkv@40"], (
        "the caches must differ for this to say something"
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", presets.REGISTRY)
def test_answers_are_those_of_generate_for_every_preset(checkpoint, name):
    sizes = {
        "logquant": {"group": 8},
        "kivi": {"group": 8},
        "pariskv": {"local": 16},
        "freekv": {"sink": 8, "local": 8},
        "arkvale": {"sink": 8, "local": 8, "dense_layers": 0},
        "magicpig": {"chunk": 16, "local": 8},
        "pyramidkv": {"layers": 3},
        "pqcache": {"bits": 4, "learn": 16, "local": 8},
        "duoattention": {"sink": 8},
        "shadowkv": {"rank": 12, "outliers": 2, "learn": 16, "local": 8},
        "mikv": {"group": 8, "chunk": 16},
    }
    budget = {"budget": 64} if presets.REGISTRY[name].has_budget else {}
    policy = presets.REGISTRY[name].policies(**budget, **sizes.get(name, {}))
    (cell,) = evaluate(checkpoint, Copy(), {name: policy}, batch=3)
    assert answers(cell) == {
        f"e{i}": answer for i, answer in enumerate(generated(checkpoint, policy))
    }


def test_scores_lengths_and_fields_are_those_of_the_examples(finished, expected, task):
    cells = finished[1]
    assert report.score(cells["full"])["mean"] == 1
    assert report.score(cells["full"])["n"] == 5
    right = np.mean(
        [a == b for a, b in zip(expected["snapkv@40"], expected["full"], strict=True)]
    )
    assert report.score(cells["snapkv@40"])["mean"] == right < 1
    assert {e["id"]: e["prompt_tokens"] for e in cells["full"].examples} == {
        f"e{i}": n for i, n in enumerate(task.lengths)
    }
    assert {e["id"]: e["fields"]["odd"] for e in cells["full"].examples} == {
        f"e{i}": i % 2 for i in range(5)
    }


def test_tokens_attended_are_the_mean_over_steps(finished, task):
    cells = finished[1]
    tokens = {e["id"]: e["new_tokens"] for e in cells["full"].examples}
    assert max(tokens.values()) == NEW, "some answer must go on over several pieces"
    order = [task.lengths[int(i[1])] for i in tokens]
    seen = [
        n + step
        for n, new in zip(order, tokens.values(), strict=True)
        for step in range(1, new + 1)
    ]
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
    assert example["new_tokens"] == NEW / 2, (
        "two even pieces, of which the second is not needed"
    )


def test_intervals():
    assert interval(np.zeros(0)) == (None, None)
    np.testing.assert_allclose(
        interval(np.array([1.0] * 45 + [0.0] * 5)), (0.7864, 0.9565), atol=1e-4
    )  # Wilson's
    low, high = interval(np.ones(128))
    assert 0.97 < low < 0.975
    assert high == 1
    scores = np.random.default_rng(1).uniform(size=400)
    low, high = interval(scores)
    reach = 1.96 * scores.std() / 20
    np.testing.assert_allclose(
        (low, high), (scores.mean() - reach, scores.mean() + reach), atol=0.005
    )


# ------------------------------------------------------------------------------------------------ its files


def test_a_killed_run_goes_on_where_it_stopped(
    checkpoint, task, finished, tmp_path, monkeypatch
):
    calls = []
    real = accuracy._decode

    def counting(checkpoint, cache, logits, task, active, *how):
        if len(calls) == 3:  # between the two caches of the second batch
            raise KeyboardInterrupt
        calls.append(int(active.sum()))
        return real(checkpoint, cache, logits, task, active, *how)

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
    monkeypatch.setattr(
        plan.prompt, "read", lambda *args: pytest.fail("a finished run prefills nothing")
    )
    assert report.score(whole_run(checkpoint, task, tmp_path)["full"]) == report.score(
        cells["full"]
    )


def test_two_runs_of_one_folder_lose_no_result(
    checkpoint, task, finished, tmp_path, monkeypatch
):
    """The first run has answered one batch of two when another one, with the same folder,
    answers all the rest.
    """
    real, calls = accuracy._decode, []

    def beside(checkpoint, cache, logits, plan, active, *how):
        calls.append(active)
        if len(calls) == 2:  # in the second batch of the first run
            monkeypatch.setattr(accuracy, "_decode", real)
            evaluate(checkpoint, task, {"full": CACHES["full"]}, batch=1, out=tmp_path)
            monkeypatch.setattr(accuracy, "_decode", beside)
        return real(checkpoint, cache, logits, plan, active, *how)

    monkeypatch.setattr(accuracy, "_decode", beside)
    (cell,) = evaluate(checkpoint, task, {"full": CACHES["full"]}, batch=2, out=tmp_path)
    assert len(calls) == 2, "what the other run answered is not answered again"
    assert answers(cell) == answers(read_cell(cell.path)) == answers(finished[1]["full"])
    again = prepare(
        checkpoint, task, {"full": CACHES["full"]}, dtype="float32", out=tmp_path, resume=False
    )
    plan.run(checkpoint, again, accuracy.answer, batch=2)
    assert len(calls) == 5, "a run that replaces its files takes nothing over"


def test_caches_beside_one_another_answer_as_each_alone(checkpoint, task, finished, tmp_path):
    cells = whole_run(checkpoint, task, tmp_path, parallel=3)
    for name, cell in finished[1].items():
        assert answers(cells[name]) == answers(cell)
        np.testing.assert_allclose(cells[name].attended, cell.attended, rtol=1e-6)


def test_groups_of_caches_answer_as_all_together(
    checkpoint, task, finished, tmp_path, monkeypatch
):
    monkeypatch.setattr(plan, "CPU_LAYERS", 2 * checkpoint.config.layers)
    real, reads = plan.prompt.read, []
    monkeypatch.setattr(plan.prompt, "read", lambda *args: reads.append(1) or real(*args))
    cells = whole_run(checkpoint, task, tmp_path)
    batches = len(cells["full"].batches)
    assert len(reads) == -(-len(finished[1]) // 2) * batches
    for name, cell in finished[1].items():
        assert answers(cells[name]) == answers(cell)


def test_an_error_beside_others_ends_the_run_and_keeps_what_was_done(
    checkpoint, task, finished, tmp_path, monkeypatch
):
    real, seen = accuracy._decode, []

    def failing(checkpoint, cache, *args):
        first = not seen
        seen.append(cache)
        if first:
            return real(checkpoint, cache, *args)
        raise MemoryError("no room")

    monkeypatch.setattr(accuracy, "_decode", failing)
    with pytest.raises(MemoryError, match="no room"):
        whole_run(checkpoint, task, tmp_path, parallel=2)
    assert len(seen) <= 3, "nothing begins after an error but what was about to"
    monkeypatch.setattr(accuracy, "_decode", real)
    cells = whole_run(checkpoint, task, tmp_path)
    assert all(answers(cells[name]) == answers(cell) for name, cell in finished[1].items())


def test_an_error_does_not_wait_for_the_caches_before_it():
    freed, ended = threading.Event(), []

    def one(name):
        if name == "waits":
            freed.wait(timeout=60)
        elif name == "fails":
            raise MemoryError("no room")
        ended.append(name)
        return name

    try:
        with pytest.raises(MemoryError, match="no room"):
            list(plan._map(one, ["waits", "fails"], 2))
        assert not ended
    finally:
        freed.set()
    assert list(plan._map(one, ["waits", "b", "c"], 2)) == ["waits", "b", "c"]


def test_plans_may_share_a_capacity(checkpoint, task, monkeypatch):
    seen = []

    def decode(checkpoint, cache, logits, task, active, *how):
        seen.append(cache.spec.capacity)
        return [("", 1)] * len(active), [1.0] * LAYERS, 1

    monkeypatch.setattr(accuracy, "_decode", decode)
    made = prepare(checkpoint, task, {"full": CACHES["full"]}, dtype="float32")
    assert made.capacity == 384
    plan.run(checkpoint, made, accuracy.answer, batch=2)
    assert set(seen) == {384}
    made = prepare(checkpoint, task, {"full": CACHES["full"]}, dtype="float32")
    plan.run(checkpoint, made, accuracy.answer, batch=2, capacity=512)
    assert set(seen) == {384, 512}


def test_prompts_are_dropped_before_the_next_ones_are_read(checkpoint, task, monkeypatch):
    seen, real = [], prompt.read

    def read(checkpoint, rows, new_tokens):
        assert all(one() is None for one in seen), "two batches of prompts are held at a time"
        logits, cache = real(checkpoint, rows, new_tokens)
        seen.extend(map(weakref.ref, jax.tree.leaves(cache)))
        return logits, cache

    monkeypatch.setattr(prompt, "read", read)
    for parallel in (1, 2):
        made = prepare(
            checkpoint,
            task,
            {"full": CACHES["full"], "snapkv@40": CACHES["snapkv@40"]},
            dtype="float32",
        )
        plan.run(checkpoint, made, accuracy.answer, batch=2, parallel=parallel)
    assert len(seen) > 8


def test_of_a_batch_that_is_known_in_part_only_the_rest_is_decoded(
    checkpoint, task, finished, tmp_path
):
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
        assert raw["tokens_read"] == pytest.approx(np.mean(cell.attended))
        assert raw["key"]["policy"] == repr(CACHES[cell.cache])
        assert {"model", "dtype", "kvjax", "task", "policy"} <= set(raw["key"])
        assert {"made", "model", "budget", "dense_layers"} <= set(raw)
        assert {"date", "versions", "source", "backend"} <= set(raw["made"][0])
        assert cell.digest[:16] in cell.path.name
        again = read_cell(cell.path)
        assert (again.digest, again.examples, again.method) == (
            cell.digest,
            cell.examples,
            cell.cache.split("@")[0],
        )


def test_scores_of_an_old_file_are_made_anew_by_the_task(checkpoint, task, finished, tmp_path):
    shutil.copy(finished[1]["full"].path, tmp_path)
    strict = dataclasses.replace(task)
    object.__setattr__(strict, "score", lambda example, answer: 0.25)
    (cell,) = evaluate(checkpoint, strict, {"full": CACHES["full"]}, out=tmp_path)
    assert report.score(cell)["mean"] == 0.25


def test_the_key_changes_with_everything_that_could_change_an_answer(
    checkpoint, task, tmp_path, monkeypatch
):
    fier = presets.fier(16)

    def digest(checkpoint=checkpoint, task=task, policy=fier, dtype="float32"):
        return prepare(checkpoint, task, {"x": policy}, dtype=dtype).cells["x"].digest

    other = write_checkpoint(tmp_path / "other", rms_norm_eps=1e-4)
    keys = {
        "nothing": digest(),
        "policy": digest(policy=presets.fier(17)),
        "group_reduce": digest(policy=presets.fier(16, group_reduce="per_head")),
        "dense layers": digest(policy=presets.fier(16, layers=presets.Layers(dense=1))),
        "dtype": digest(dtype="bfloat16"),
        "task's key": digest(task=dataclasses.replace(task, version=1)),
        "new tokens": digest(task=dataclasses.replace(task, max_new_tokens=NEW - 1)),
        "stop": digest(task=dataclasses.replace(task, stop=("x",))),
        "answers": digest(task=dataclasses.replace(task, right=("other",) * 5)),
        "model": digest(checkpoint=dataclasses.replace(checkpoint, directory=other)),
        "stop tokens": digest(checkpoint=dataclasses.replace(checkpoint, stop_tokens=(3,))),
    }
    real = plan.provenance()
    newer = {**real, "versions": {**real["versions"], "kvjax": "9"}}
    monkeypatch.setattr(plan, "provenance", lambda: newer)
    keys["version of kvjax"] = digest()
    assert len(set(keys.values())) == len(keys), keys
    # A changed comment, another machine or a newer jax are provenance: they do not forget
    # answers.
    versions = {**real["versions"], "jax": "0"}
    for changes in (
        {"date": "x"},
        {"source": "x"},
        {"versions": versions},
        {"backend": "gpu"},
        {"device": "x"},
    ):
        monkeypatch.setattr(plan, "provenance", lambda changes=changes: {**real, **changes})
        assert digest() == keys["nothing"]
    (tmp_path / "other" / "README.md").write_text("words")
    assert digest(checkpoint=dataclasses.replace(checkpoint, directory=other)) == keys["model"]


def test_a_file_names_all_that_made_its_results(
    checkpoint, task, finished, tmp_path, monkeypatch
):
    raw = json.loads(finished[1]["full"].path.read_text())
    raw["batches"][1]["examples"].pop()
    (tmp_path / finished[1]["full"].path.name).write_text(json.dumps(raw))
    real = plan.provenance()
    monkeypatch.setattr(plan, "provenance", lambda: {**real, "source": "other"})
    (cell,) = evaluate(checkpoint, task, {"full": CACHES["full"]}, batch=2, out=tmp_path)
    assert [made["source"] for made in cell.head["made"]] == [real["source"], "other"]


def test_a_damaged_file_is_named_and_not_overwritten(checkpoint, task, finished, tmp_path):
    file = tmp_path / finished[1]["full"].path.name
    whole = json.loads(finished[1]["full"].path.read_text())
    doubled = {**whole, "batches": [*whole["batches"], whole["batches"][0]]}
    unknown = json.loads(json.dumps(whole))
    unknown["batches"][0]["examples"][0]["id"] = "nobody"
    for text in ("{", '{"a": 1}', "[]", "3", '"x"', json.dumps(doubled), json.dumps(unknown)):
        file.write_text(text)
        with pytest.raises(
            ValueError, match=r"is no result of kvjax .*move it away or delete it"
        ):
            evaluate(checkpoint, task, {"full": CACHES["full"]}, out=tmp_path)
        assert file.read_text() == text
    raw = json.loads(finished[1]["full"].path.read_text())
    raw["key"]["dtype"] = "bfloat16"
    file.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="was changed by hand"):
        evaluate(checkpoint, task, {"full": CACHES["full"]}, out=tmp_path)


# ------------------------------------------------------------------------------- what it checks beforehand


def long_task(**changes):
    return dataclasses.replace(
        Copy(), lengths=(200, POSITIONS - NEW + 1), right=("?",) * 2, **changes
    )


@pytest.fixture
def long_text(monkeypatch):
    monkeypatch.setattr(
        "tests.evaluate.test_accuracy.TEXT", "".join(map(chr, range(97, 123))) * 40
    )


def test_a_prompt_without_room_is_refused_before_anything_runs(checkpoint, long_text):
    with pytest.raises(
        ValueError,
        match=r"copy, example e1: 473 prompt . 40 new tokens do not fit in the model's 512",
    ):
        prepare(checkpoint, long_task(), CACHES, dtype="float32")


def test_text_prompts_go_through_the_tokenizer_and_chat_through_the_template(checkpoint):
    examples = [Example("a", "hello", ("?",))]
    for chat, wanted in ((False, "hello"), (True, "[user]hello[reply]")):
        task = Copy(chat=chat)
        object.__setattr__(task, "examples", lambda tokenizer: examples)
        made = prepare(checkpoint, task, CACHES, dtype="float32")
        assert checkpoint.tokenizer.decode(made.prompts["a"]) == wanted


def test_ids_must_differ_and_caches_must_be(checkpoint, task):
    twice = dataclasses.replace(task)
    object.__setattr__(twice, "examples", lambda tokenizer: task.examples(tokenizer)[:1] * 2)
    with pytest.raises(ValueError, match="2 examples with 1 ids"):
        prepare(checkpoint, twice, CACHES, dtype="float32")
    with pytest.raises(ValueError, match="at least one cache"):
        prepare(checkpoint, task, {}, dtype="float32")
    with pytest.raises(ValueError, match="key_group=3"):
        prepare(checkpoint, task, {"kivi": presets.kivi(group=3)}, dtype="float32")


# ------------------------------------------------------------------------------------------ a question that comes late


@dataclasses.dataclass(frozen=True)
class Late(Copy):
    """The last 20 tokens of each prompt are fed one at a time."""

    name: str = "late"

    def examples(self, tokenizer):
        cut = [(e.prompt[:-20], e.prompt[-20:]) for e in super().examples(tokenizer)]
        whole = super().examples(tokenizer)
        return [
            dataclasses.replace(e, prompt=a, question=b)
            for e, (a, b) in zip(whole, cut, strict=True)
        ]


def test_plans_may_share_the_room_of_questions(checkpoint, expected, monkeypatch):
    seen, real, task = [], accuracy.feed, Late(right=tuple(expected["full"]))

    def feed(*args, room):
        seen.append(room)
        return real(*args, room=room)

    monkeypatch.setattr(accuracy, "feed", feed)
    found = []
    for more in ({}, {"room": 128}, {"room": 1}):
        made = prepare(checkpoint, task, {"full": CACHES["full"]}, dtype="float32")
        found += plan.run(
            checkpoint, made, partial(accuracy.answer, **more), batch=len(made.prompts)
        )
    assert seen[1] == 128
    assert seen[0] == seen[2] < 128
    assert answers(found[0]) == answers(found[1]) == answers(found[2])


def test_a_question_is_decoded_through_the_cache_and_full_attention_does_not_mind(
    checkpoint, expected
):
    caches = {
        "full": CACHES["full"],
        "window": presets.streaming_llm(40, layers=presets.Layers(dense=1)),
    }
    right = tuple(expected["full"])
    late = {c.cache: c for c in evaluate(checkpoint, Late(right=right), caches, batch=2)}
    assert answers(late["full"]) == {
        f"e{i}": answer for i, answer in enumerate(expected["full"])
    }
    assert {e["id"]: e["prompt_tokens"] for e in late["full"].examples} == {
        f"e{i}": n for i, n in enumerate(Copy().lengths)
    }
    # By hand: the prompt without its question, then one token at a time.
    for i, example in enumerate(Late().examples(checkpoint.tokenizer)[:2]):
        cache = kvjax.init(
            caches["window"], checkpoint.model.spec(batch=1, capacity=384), layers=LAYERS
        )
        logits, cache = prefill(checkpoint.model, cache, [example.prompt], chunk=256)
        for token in example.question:
            logits, cache = decode_step(checkpoint.model, cache, np.array([token], np.int32))
        ask = {"max_new_tokens": NEW, "stop_tokens": checkpoint.stop_tokens}
        done = decode(checkpoint.model, cache, logits, **ask)
        assert answers(late["window"])[f"e{i}"] == checkpoint.tokenizer.decode(
            done.rows[0], skip_special_tokens=True
        )


# ------------------------------------------------------------------------------------------------- rows of a comparison


def test_dense_layers_are_those_of_all_rows_and_a_rows_own_wins_and_is_shown():
    rows = {
        row.name: row
        for row in make_rows(["full", "fier", "snapkv", "h2o:dense_layers=0"], budgets=[64])
    }
    assert list(rows) == ["full", "fier@64", "snapkv@64", "h2o:dense_layers=0@64"]
    assert [row.dense_layers for row in rows.values()] == [None, 2, 2, 0]
    assert [len(row.policies.first) for row in rows.values()] == [0, 2, 2, 0]
    assert [
        row.dense_layers for row in make_rows(["fier", "pariskv", "kivi"], dense_layers=1)
    ] == [1, 1, 1]
    assert [
        len(row.policies.first) for row in make_rows(["fier", "freekv"], dense_layers=None)
    ] == [2, 1]


MINE = kvjax.Retrieval(selector=kvjax.Fier(group=16), budget=48, sink=4, local=16)


@pytest.mark.parametrize(
    ("caches", "names"),
    [
        (["full", MINE], ["full", "Retrieval(Fier)"]),
        (MINE, ["Retrieval(Fier)"]),
        (kvjax.Full(), ["Full"]),
        (presets.fier(64), ["Retrieval(Fier)"]),
        ({"whole": "full", "mine": MINE}, ["whole", "mine"]),
        (
            {"one": lambda budget: replace(MINE, budget=budget), "two": "fier:group=16"},
            ["one@64", "one@96", "two@64", "two@96"],
        ),
        ([presets.quest, MINE], ["quest@64", "quest@96", "Retrieval(Fier)"]),
        ("fier", ["fier@64", "fier@96"]),
        (["fier", "fier"], ["fier@64", "fier@96"]),
    ],
)
def test_names_policies_and_functions_of_a_budget_mix(caches, names):
    swept = any("@" in name for name in names)
    rows = make_rows(caches, budgets=[64, 96] if swept else None)
    assert [row.name for row in rows] == names
    assert not [row.refused for row in rows if row.refused]


def test_dense_layers_apply_to_one_policy_for_all_layers_alone():
    caches = {
        "alike": MINE,
        "function": lambda budget: replace(MINE, budget=budget),
        "each": [MINE] * 4,
        "own": presets.fier(64, layers=presets.Layers(dense=1)),
    }
    rows = make_rows(caches, budgets=[64], dense_layers=2)
    assert [row.dense_layers for row in rows] == [2, 2, 0, 1]
    assert make_rows({"alike": MINE}, dense_layers=None)[0].policies.first == ()


@pytest.mark.parametrize(
    ("caches", "message"),
    [
        (["full", 3], "caches must be names of presets, .*: int must be a policy, .*, got 3"),
        ([], "a comparison needs at least one cache"),
        (
            [MINE, replace(MINE, budget=64)],
            r"two caches would both be called 'Retrieval\(Fier\)'",
        ),
        (lambda budget: None, r"<lambda>\(\) returned None, where a policy, .* is wanted"),
        (
            {"mine": lambda budget, group: None},
            "mine is called with .*, so it cannot take group",
        ),
        ({"mine": lambda budget: 1 / 0}, r"mine\(budget=64\) raised ZeroDivisionError"),
    ],
)
def test_what_is_no_method_is_refused(caches, message):
    with pytest.raises(ValueError, match=message):
        make_rows(
            caches, budgets=[64] if callable(caches) or isinstance(caches, dict) else None
        )


def test_what_a_comparison_cannot_take_is_named(checkpoint, tmp_path):
    with pytest.raises(
        ValueError, match=r"must be a Checkpoint, got a Decoder; kvjax\.models\.load"
    ):
        kvjax.evaluate.compare(checkpoint.model, "pass_key", ["full"])
    with pytest.raises(
        ValueError,
        match=r"lengths=\.\.\.\) must be a list of integers, as \[512, 1024\], got 512",
    ):
        kvjax.evaluate.compare(checkpoint, "pass_key", ["full"], lengths=512)
    with pytest.raises(ValueError, match="parallel must be at least 1, got 0"):
        evaluate(checkpoint, Copy(), {"full": CACHES["full"]}, parallel=0)
    with pytest.raises(ValueError, match=r"nothing\.txt: there is no such file"):
        kvjax.evaluate.compare(
            checkpoint, "pass_key", ["full"], text=str(tmp_path / "nothing.txt")
        )


def test_every_method_that_shares_a_selection_takes_every_group_rule():
    takers = [n for n, p in presets.REGISTRY.items() if "group_reduce" in p.settings]
    assert {"fier", "quest", "pariskv", "freekv", "arkvale", "pqcache", "exact"} <= set(takers)
    rules = ("mean_query", "max_softmax")
    rows = make_rows([*takers, "h2o"], budgets=[2048], group_reduces=rules)
    assert [row.name for row in rows] == [
        f"{n}:group_reduce={r}@2048" for n in takers for r in rules
    ] + ["h2o@2048"]
    assert not [row.refused for row in rows if row.refused]


@pytest.mark.parametrize("setting", [{"budgets": [64]}, {"group_reduces": ["max_score"]}])
def test_settings_that_no_given_policy_takes_are_refused(setting):
    with pytest.raises(
        ValueError, match=r"applies to no cache, as none .*: mine; leave it out"
    ):
        make_rows({"mine": presets.fier(64)}, **setting)


def test_a_budget_that_one_cache_cannot_hold_stops_that_row_alone(checkpoint):
    rows = make_rows(["pariskv", "fier"], budgets=[64, 512])
    refused = {row.name: row.refused for row in rows if row.refused}
    assert list(refused) == ["pariskv@64"]
    assert "below sink + local" in refused["pariskv@64"]
    made = plan.prepare(checkpoint, Copy(), rows, dtype="float32")
    assert list(made.policies) == ["pariskv@512", "fier@64", "fier@512"]
    assert made.cells["pariskv@64"].refused
    with pytest.raises(ValueError, match="below sink"):
        plan.prepare(checkpoint, Copy(), make_rows(["pariskv"], budgets=[64]), dtype="float32")


def test_a_row_whose_layers_are_all_dense_is_refused(checkpoint):
    made = plan.prepare(
        checkpoint, Copy(), make_rows(["full", f"fier:dense_layers={LAYERS}"]), dtype="float32"
    )
    assert list(made.policies) == ["full"]
    assert "so no layer uses it" in made.cells[f"fier:dense_layers={LAYERS}@1024"].refused


def test_budgets_of_whole_pages_say_what_they_are_rounded_to():
    rows = {
        row.name: row
        for row in make_rows(["quest", "quest:newest=select", "freekv"], budgets=[40, 64, 330])
    }
    assert re.search(
        "room for 1 pages of 16 .*at least 2; use a budget of at least 48",
        rows["quest@40"].refused,
    )
    assert re.search(
        "room for 2 pages of 16 .*at least 3; use a budget of at least 48",
        rows["quest:newest=select@40"].refused,
    )
    assert (
        rows["quest:newest=select@64"].note
        == "reads up to 65: 4 pages of 16 tokens and 1 other token"
    )
    assert rows["quest@64"].note == ""
    assert (
        rows["quest@330"].note == "reads up to 320: 19 pages of 16 tokens and 16 other tokens"
    )
    assert (
        rows["freekv@330"].note == "reads up to 320: 2 pages of 32 tokens and 256 other tokens"
    )


@pytest.mark.parametrize("budget", [16, 31])
def test_a_budget_without_room_for_a_page_is_an_error_of_the_preset(budget):
    with pytest.raises(
        ValueError,
        match=rf"quest\(budget={budget}\) has room for 0 pages of 16 tokens.*at least 48",
    ):
        presets.quest(budget)
    assert presets.quest(budget, least_pages=1, newest="select").rest.budget == 16 + 1
    with pytest.raises(ValueError, match="use at least 288"):
        presets.freekv(256 + budget)
    assert presets.quest(48).rest.budget == 48


def test_a_setting_that_no_budget_mends_stops_the_comparison():
    with pytest.raises(ValueError, match=r"Fier\(group=...\) must be an integer"):
        make_rows(["full", "fier:group=x"], budgets=[64])
    with pytest.raises(ValueError, match="unknown cache 'fire'"):
        make_rows(["full", "fire"])


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"query_scale": 2.0},
        {"soft_cap": 1.0},
        {"sinks": True},
        {"recurrent": (0,), "mixer": NET},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "cache", ["snapkv:budget=24,window=8,dense_layers=0", "tova:budget=24,dense_layers=0"]
)
def test_a_stored_prompt_is_the_one_that_the_model_stores(cache, model):
    config = models.DecoderConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        layers=2,
        q_heads=4,
        kv_heads=2,
        head_dim=16,
        **model,
    )
    decoder = models.Decoder(
        dataclasses.replace(config, initializer_range=0.5), rngs=nnx.Rngs(0)
    )
    checkpoint = models.Checkpoint(decoder, config, (), None)
    tokens, policy = np.random.default_rng(0).integers(64, size=(1, 96)), presets.parse(cache)
    _, recorded = prompt.read(checkpoint, tokens.tolist())
    empty = kvjax.init(policy, decoder.spec(1, 128), layers=2)
    want = prefill(decoder, empty, tokens, chunk=prompt.WHOLE, first_chunk=True)[1]
    found = prompt.store(checkpoint, recorded.layers, policy, 128)
    same = np.testing.assert_array_equal
    if config.sinks:  # two programs then add up the weights of votes in another order
        same = partial(np.testing.assert_allclose, rtol=1e-4)
    jax.tree.map(same, found, want)
