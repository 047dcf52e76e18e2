"""Training: the smoke run learns and resumes exactly; rows have their stated form; the export
is the trained model.
"""

import importlib.util
import json
import random
import re
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import models
from kvjax.evaluate.provenance import digest
from kvjax.evaluate.tasks.generated import FORMS
from kvjax.generation import generate

ROOT = Path(__file__).parent.parent
_spec = importlib.util.spec_from_file_location("training_train", ROOT / "training" / "train.py")
train = sys.modules["training_train"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(train)
data, step = train.data, sys.modules["step"]

SMOKE = json.loads((ROOT / "training" / "smoke.json").read_text())
SETTINGS = {**SMOKE, "phases": {"128": 1.0}}  # each length compiles a program
STEPS, CUT = 24, 9


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Texts to train on: sources of kvjax, which hold still while they are copied."""
    found = tmp_path_factory.mktemp("sources")
    for kind, files in (
        ("books", sorted((ROOT / "kvjax").glob("*.py"))),
        ("code", [ROOT / "kvjax" / "models" / "rope.py"]),
    ):
        (found / kind).mkdir()
        for file in files:
            shutil.copy(file, found / kind)
    return {kind: found / kind for kind in ("books", "code")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, sources):
    """Two runs of the same steps, one of them interrupted and resumed; they share their
    programs.
    """
    whole, cut = (tmp_path_factory.mktemp(name) for name in ("whole", "cut"))
    made = {}

    class Programs(train.Programs):
        def __init__(self, step, state, lengths, tokens):
            if not made:
                super().__init__(step, state, lengths, tokens)
                made.update(self._programs)

        def __getitem__(self, length):
            return made[length].result()

        def close(self):
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "Programs", Programs)
        train.train(SETTINGS, whole, **sources, steps=STEPS)
        shutil.copytree(whole / "corpus", cut / "corpus")
        train.train(SETTINGS, cut, books=None, code=None, steps=STEPS, stop_after=CUT)
        with (cut / "log.jsonl").open(
            "a"
        ) as file:  # a killed run went on from its last checkpoint, up to half a line
            file.write(f'{{"step": {CUT + 1}, "text": 0.0}}\n{{"step": {CUT + 2}, "te')
        train.train(SETTINGS, cut, books=None, code=None, steps=STEPS, resume=True)
        with pytest.raises(FileExistsError, match="has a run with checkpoints; give --resume"):
            train.train(SETTINGS, cut, books=None, code=None, steps=STEPS)
        with pytest.raises(ValueError, match="has other settings"):
            train.train(
                {**SETTINGS, "clip": 2.0}, cut, books=None, code=None, steps=STEPS, resume=True
            )
        with pytest.raises(ValueError, match="has come to its end"):
            train.train(SETTINGS, cut, books=None, code=None, steps=STEPS, resume=True)
    return whole, cut


@pytest.fixture(scope="module")
def corpus(runs):
    return data.Corpus(runs[0] / "corpus")


def log(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_the_smoke_run_lowers_the_loss(runs):
    text = [line["text"] for line in log(runs[0])]
    assert len(text) == STEPS
    assert (
        np.mean(text[-5:]) < text[0] - 0.8
    )  # about 1.0, by what the sources say that it is trained on


def test_a_run_that_was_cut_off_and_resumed_is_the_uninterrupted_one(runs):
    whole, cut = map(log, runs)
    assert [line["step"] for line in cut] == list(range(1, STEPS + 1))
    for a, b in zip(whole, cut, strict=True):
        a.pop("tokens_per_second"), b.pop("tokens_per_second")
        assert a == b
    for a, b in zip(
        *(sorted((out / "model").glob("*.safetensors")) for out in runs), strict=True
    ):
        assert a.read_bytes() == b.read_bytes()


@pytest.fixture(scope="module")
def exported(runs):
    return models.load(runs[0] / "model", dtype="float32")


def test_the_export_is_read_by_kvjax_and_its_card_says_what_it_saw(exported, corpus, sources):
    assert exported.config == step.decoder_config(SETTINGS)
    assert exported.stop_tokens == (exported.tokenizer.eos_token_id,)
    ids = exported.tokenizer("VAR zebra = 10203")["input_ids"]
    assert ids == corpus.tokenizer("VAR zebra = 10203")["input_ids"]
    assert ids[0] == exported.tokenizer.bos_token_id
    assert exported.tokenizer.decode(ids[1:]) == "VAR zebra = 10203"
    assert [exported.tokenizer.decode(i) for i in ids[-5:]] == list("10203")
    card = (exported.directory / "README.md").read_text()
    assert all((digest(p) in card) == (p.name != "spec.py") for p in sources["books"].iterdir())
    assert f"Trained {STEPS} steps" in card
    assert "license: apache-2.0" in card


@pytest.mark.thorough  # by default, tests/models/test_save.py shows as much of smaller models
@pytest.mark.torch
def test_the_export_is_read_by_transformers_with_the_same_logits(exported):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(exported.directory)("The pass key is 71432.")[
        "input_ids"
    ]
    theirs = AutoModelForCausalLM.from_pretrained(exported.directory, dtype=torch.float32)
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits.numpy()
    ours, _ = jax.jit(lambda model, ids: model(ids))(exported.model, jnp.array([ids]))
    np.testing.assert_allclose(ours, wanted, atol=1e-4 * np.abs(wanted).max())


# ---------------------------------------------------------------------------------------------------------------- rows


def mixture(**changes):
    return data.Mixture(**{**SETTINGS["mixture"], **changes})


def test_a_batch_follows_from_seed_and_step_alone(corpus):
    make = [
        data.make_batch(data.Corpus(corpus.directory), mixture(), 512, 4, 7) for _ in range(2)
    ]
    for a, b in zip(*make, strict=True):
        np.testing.assert_array_equal(a, b)
    for other in (
        data.make_batch(corpus, mixture(), 512, 4, 8),
        data.make_batch(corpus, mixture(seed=1), 512, 4, 7),
    ):
        assert not np.array_equal(make[0][0], other[0])


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_batches_are_those_of_their_steps_whoever_makes_them(corpus, workers):
    plan = lambda step: None if step >= 9 else 256 if step < 6 else 512  # noqa: E731
    batches = data.Batches(
        corpus, mixture(), plan, tokens=1024, first=4, workers=workers, ahead=2
    )
    found = list(batches)
    batches.close()
    assert [length for length, _, _ in found] == [256, 256, 512, 512, 512]
    for step, (length, tokens, kinds) in enumerate(found, 4):
        wanted = data.make_batch(corpus, mixture(), length, 1024 // length, step)
        np.testing.assert_array_equal(tokens, wanted[0])
        np.testing.assert_array_equal(kinds, wanted[1])


@pytest.mark.parametrize("length", [128, 1000, 4096])
def test_every_row_has_its_length_and_begins_with_bos(corpus, length):
    tokens, kinds = data.make_batch(corpus, mixture(synthetic=0.9), length, 60, 0)
    assert tokens.shape == kinds.shape == (60, length)
    assert tokens.dtype == np.uint16
    assert kinds.dtype == np.uint8
    assert set(tokens[:, 0]) == {0}
    assert tokens.max() < SETTINGS["model"]["vocab_size"]
    assert set(np.unique(kinds)) == set(range(5))


LAST = r"(\d{5}(?:, \d{5})*)$"
QUESTIONS = {
    "pass_key": (
        r"^What is the pass key\? The pass key is ()",
        r"^The pass key is {0}()(\d{{5}})\. Remember it\.$",
    ),
    "needles": (
        r"^What (?:is|are) the special magic numbers? for .*\? The special magic numbers? for (.*) (?:is|are): ",
        r"^The special magic number for ({0}) is: (\d{{5}})\.$",
    ),
    "key_value": (r'^Key: "(\w+)" Value: "', r'"({0})": "(\d{{5}})"'),
    "variables": (r"^The value of (\w+) is ", r"^VAR ({0}) = (\w+)$"),
}


@pytest.mark.parametrize("form", QUESTIONS)
@pytest.mark.parametrize("single", [0.0, 1.0])
def test_what_a_row_asks_it_tells_once_before_and_the_answers_are_its_last_word(
    corpus, form, single
):
    question, told = QUESTIONS[form]
    make = mixture(
        synthetic=1.0, repeat=0.0, words=0.0, programs=0.0, single=single, forms={form: 1.0}
    )
    tokens, kinds = data.make_batch(corpus, make, 3000, 12, 3)
    asked = 0
    for row, kind in zip(tokens, kinds, strict=True):
        text = corpus.tokenizer.inner.decode(row.tolist())
        pairs = re.findall(question + LAST, text, re.MULTILINE)
        assert pairs
        assert text.endswith(pairs[-1][1])
        for names, answers in pairs:
            for name, answer in zip(
                re.split(", | and ", names), answers.split(", "), strict=True
            ):
                value = name
                while not value.isdigit() or value == name:  # through the chain of a variable
                    ((_, value),) = re.findall(told.format(value), text, re.MULTILINE)
                assert value == answer
        asked += len(pairs)
        weighed = corpus.tokenizer.inner.decode(row[kind != data.NONE].tolist())
        assert weighed == "".join(answers for _, answers in pairs)
        assert set(kind) <= (
            {data.NONE, data.ANSWER, data.CHAIN}
            if form == "variables"
            else {data.NONE, data.ANSWER}
        )
    assert asked == 12 if single or form == "pass_key" else asked > 24


def test_a_program_asks_for_what_its_variables_stand_for(corpus):
    make = mixture(synthetic=1.0, repeat=0.0, programs=1.0)
    tokens, kinds = data.make_batch(corpus, make, 2000, 12, 3)
    hops_seen = set()
    for row, kind in zip(tokens, kinds, strict=True):
        told, asked = {}, []
        for line in corpus.tokenizer.inner.decode(row.tolist()).split("\n"):
            if assigned := re.fullmatch(r"VAR (\w+) = (\w+)", line):
                told[assigned[1]] = assigned[2]
            elif question := re.match(r"The value of (\w+) is (\d{5})", line):
                value, hops = told[question[1]], 0
                while not value.isdigit():
                    value, hops = told[value], hops + 1
                assert value == question[2]
                asked.append((value, data.CHAIN if hops else data.ANSWER))
                hops_seen.add(hops)
        assert len(asked) > 10
        for wanted in (data.ANSWER, data.CHAIN):
            weighed = corpus.tokenizer.inner.decode(row[kind == wanted].tolist())
            assert weighed.startswith("".join(value for value, of in asked if of == wanted))
    assert hops_seen >= {0, 1, 2, 3}


def test_a_repeated_passage_was_there_before(corpus):
    tokens, kinds = data.make_batch(corpus, mixture(synthetic=1.0, repeat=1.0), 600, 8, 0)
    for row, kind in zip(tokens, kinds, strict=True):
        (at,) = np.nonzero(kind == data.REPEAT)
        passage = row[at]
        assert np.array_equal(at, np.arange(at[0], at[0] + len(at)))
        before = np.lib.stride_tricks.sliding_window_view(row[: at[0]], len(passage))
        assert (before == passage).all(axis=1).any()


def test_a_corpus_of_other_texts_is_refused(corpus, sources, tmp_path):
    make = {"vocab_size": SETTINGS["model"]["vocab_size"], **SETTINGS["corpus"]}
    assert data.prepare(corpus.directory, **sources, **make).card == corpus.card
    with pytest.raises(ValueError, match="corpus of other texts or another vocabulary"):
        data.prepare(corpus.directory, books=sources["books"], code=sources["books"], **make)
    with pytest.raises(FileNotFoundError, match="has no corpus yet; give --books and --code"):
        data.prepare(tmp_path / "corpus", None, None, **make)
    with pytest.raises(FileNotFoundError, match="no texts for held_out"):
        data.prepare(
            tmp_path / "corpus", **sources, **{**make, "held_out": ["war-and-peace.txt"]}
        )


# ---------------------------------------------------------------------------------------------------------------- step


def test_the_loss_by_chunks_has_the_gradients_of_the_plain_one():
    keys = jax.random.split(jax.random.key(0), 4)
    x, table = jax.random.normal(keys[0], (24, 16)), jax.random.normal(keys[1], (50, 16))
    targets = jax.random.randint(keys[2], (24,), 0, 50)
    weights = jax.random.uniform(keys[3], (24,))

    def plain(x, table):
        logits = x @ table.T
        return -jnp.sum(
            weights * jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], 1)[:, 0]
        )

    def ours(x, table):
        loss, each, right = step.cross_entropy(x, table, targets, weights, 8)
        return 3.0 * loss, (each, right)

    with jax.default_matmul_precision("highest"):
        wanted, (d_x, d_table) = jax.jit(jax.value_and_grad(plain, (0, 1)))(x, table)
        (loss, (each, right)), grads = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True))(
            x, table
        )
        alone, (same, _) = jax.jit(ours)(x, table)
    np.testing.assert_allclose(loss, 3 * wanted, rtol=1e-5)
    np.testing.assert_allclose(grads[0], 3 * d_x, atol=1e-5)
    np.testing.assert_allclose(grads[1], 3 * d_table, atol=1e-5)
    np.testing.assert_allclose(np.sum(each * weights), wanted, rtol=1e-5)
    np.testing.assert_array_equal(right, np.argmax(x @ table.T, axis=-1) == targets)
    np.testing.assert_allclose(alone, loss, rtol=1e-6)
    np.testing.assert_allclose(same, each, rtol=1e-6)


def test_stacked_parameters_are_the_decoder():
    model = models.Decoder(step.decoder_config(SETTINGS))
    params = step.stack(model)
    again = step.unstack(params, step.shapes(model.config))
    assert jax.tree.structure(again) == jax.tree.structure(model)
    assert all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True)
    )
    matrices = sum(
        a.size for name, a in params.items() if a.ndim == 3 or name == step.EMBEDDING
    )
    # layers, passes, two products, multiply and add, width, half the tokens
    attention = 2 * 3 * 2 * 2 * 32 * 100 / 2
    assert step.flops_per_token(model.config, 100) == 6 * matrices + attention


def test_rate_and_length_follow_the_share_of_the_run():
    settings = {"rate": 2.0, "warmup": 0.1, "decay": 0.5, "phases": {"128": 0.6, "256": 0.4}}
    rates = [train.rate_at(p, settings) for p in (0.0, 0.05, 0.1, 0.4, 0.5, 0.75, 1.0, 1.1)]
    np.testing.assert_allclose(rates, [0.02, 1.02, 2, 2, 2, 1, 0, 0])
    left = [train.lengths_left(p, settings) for p in (0.0, 0.59, 0.6, 0.99, 1.0)]
    assert left == [[128, 256], [128, 256], [256], [256], []]
    clock = train.Clock(None, deadline=train.time.monotonic() + 50, done=0.5)
    assert clock.progress(3) == 0.5  # until the first step
    clock.start = clock.deadline - 100
    assert 0.74 < clock.progress(3) < 0.76  # half of the time, and so half of what was left


@pytest.mark.thorough
def test_the_card_has_what_the_evaluation_found(runs):
    found = train.judge(runs[0])
    card = (runs[0] / "model" / "README.md").read_text()
    assert f"| perplexity | {found['perplexity']['256']:.1f} |" in card
    assert 1 < found["perplexity"]["256"] < SETTINGS["model"]["vocab_size"] / 2
    assert found["exact_match"] == {"pass_key": {"256": 0.0}}
    assert f"| pass_key | {0:.3f} |" in card


@pytest.mark.thorough
def test_an_answer_counts_as_right_if_greedy_decoding_gives_it(exported, corpus):
    settings = {**SETTINGS, "compute": "float32"}
    hidden = FORMS["pass_key"](random.Random(0))
    tokens, kinds = data.asking(
        corpus, corpus.tokens("held_out"), 128, [hidden], random.Random(1)
    )
    (answer,) = np.nonzero(kinds == data.ANSWER)
    cache = kvjax.init(kvjax.Full(), exported.model.spec(1, 128), layers=exported.config.layers)
    decoded = generate(
        exported.model, cache, [tokens[: answer[0]].tolist()], max_new_tokens=len(answer)
    ).tokens[0]
    params, like = step.stack(exported.model), step.shapes(exported.config)
    for change, wanted in ((0, True), (1, False)):
        tokens[answer] = decoded
        tokens[answer[2]] += change
        _, (_, right, kind) = step.losses(
            params, tokens[None], kinds[None], like=like, settings=settings
        )
        assert np.all(np.asarray(right)[np.asarray(kind) == data.ANSWER]) == wanted
