"""The command line, in process, on a random checkpoint in Hugging Face format that the test
writes.
"""

import inspect
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
from rich.progress import Progress
from safetensors.numpy import save_file

from kvjax import CacheSpec, generation, models, presets
from kvjax.cli import _GROUPS, _one_line
from kvjax.cli.ahead import Ahead
from kvjax.cli.answer import in_layers
from kvjax.cli.methods import entries, meanings
from kvjax.cli.options import implementations, in_short, make_policy
from kvjax.cli.prompts import EXAMPLE
from kvjax.cli.terminal import show_markdown, write_json
from kvjax.numerics.partial import Logits
from kvjax.presets.head_files import Heads
from kvjax.presets.parsing import field_names
from tests.checkpoint import (
    LAYERS,
    POSITIONS,
    D,
    K,
    config,
    weights,
    write_checkpoint,
    write_tokenizer,
)

TEXT = "Call me Ishmael — some years ago. " * 4


@pytest.fixture
def run_json(kvjax, checkpoint):
    def run(*args):
        code, out, err = kvjax("generate", checkpoint, *args, "--json")
        assert (code, err) == (0, "")
        assert out.count("\n") == 1
        return json.loads(out)

    return run


# ----------------------------------------------------------------------------------------- what it says


def test_json_reports_what_a_run_did(run_json):
    report = run_json(
        "--prompt", TEXT, "--max-new-tokens", 20, "--cache", "fier", "--budget", 16
    )
    n, new = len(TEXT.encode()), len(report["token_ids"])
    assert report["prompt_tokens"] == n
    assert 1 <= new <= 20
    assert report["prefill_tokens_per_second"] > 0
    assert report["decode_tokens_per_second"] > 0
    assert report["cache_bytes_device"] > 2 * LAYERS * K * D * 4 * n
    assert report["cache_bytes_host"] == 0
    dense = n + (new + 1) / 2  # a step sees its own token too
    np.testing.assert_allclose(
        report["attended_tokens_by_layer"], [dense, dense, 16], rtol=1e-5
    )
    np.testing.assert_allclose(
        report["attended_tokens_per_step"], (2 * dense + 16) / 3, rtol=1e-5
    )
    assert (report["cache"], report["budget"], report["backend"], report["dtype"]) == (
        "fier",
        16,
        "cpu",
        "float32",
    )
    assert {"score_1bit", "top_k"} <= set(report["implementations"])
    assert all(why.startswith("xla: ") for why in report["implementations"].values())


def test_a_cache_takes_settings_of_its_preset():
    policy, budget = make_policy("fier:group=16,group_reduce=per_head", 64)
    assert (policy, budget) == (presets.fier(64, group=16, group_reduce="per_head"), 64)
    assert make_policy("quest") == (presets.quest(), 1024)
    assert make_policy("full") == (presets.full(), None)


def test_operations_that_store_are_told_of_too():
    sizes = {"batch": 1, "q_heads": 2, "kv_heads": 1, "head_dim": 16, "capacity": 256}
    spec, logits = CacheSpec(**sizes), Logits(0.25)
    found = implementations(presets.freekv(64, page=16, sink=16, local=32), spec, logits)
    assert {"put_token", "select_pages", "host_rows_first", "host_append"} <= set(found)
    assert "put_token" in implementations(presets.h2o(64), spec, logits)
    assert in_short({}) == "the whole step runs as plain XLA"


def test_operations_are_those_of_the_models_own_logits(run_json, monkeypatch):
    asked = []

    def record(policy, spec, logits):
        asked.append(logits)
        return implementations(policy, spec, logits)

    monkeypatch.setattr("kvjax.cli.answer.implementations", record)
    run_json("--prompt", TEXT, "--max-new-tokens", 2, "--cache", "fier:budget=32")
    assert asked == [Logits(D**-0.5)]


def test_operations_with_the_same_answer_share_its_words():
    shown = in_short({"score_1bit": "xla: no GPU", "top_k": "xla: no GPU", "attend": "mosaic"})
    assert shown == "score_1bit, top_k: xla (no GPU); attend: mosaic"


def test_json_text_is_the_decoded_new_tokens_and_equals_the_streamed_text(
    run_json, kvjax, checkpoint, monkeypatch
):
    from transformers import AutoTokenizer

    args = ("--prompt", TEXT, "--max-new-tokens", 20)
    report = run_json(*args)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert report["text"] == tokenizer.decode(report["token_ids"], skip_special_tokens=True)
    code, out, err = kvjax("generate", checkpoint, *args, "--verbose")
    assert code == 0
    assert out == report["text"] + "\n"
    summary, *rows, ran = err.splitlines()
    steps = (
        "start, imports",
        "tokenizer",
        "weights",
        "empty cache",
        "programs in threads",
        "prompt",
        "new tokens",
    )
    times = [re.match(r" *(\S+) to +(\S+) s  ", row) for row in rows]
    assert len(rows) == len(steps)
    assert all(any(word in row for row in rows) for word in steps)
    assert all(match and 0 <= float(match[1]) <= float(match[2]) for match in times)
    assert any("weights" in row and "GB/s" in row for row in rows)
    # as with a GPU, for the programs of the prompt alone where that is a question:
    wait = Ahead.wait
    monkeypatch.setattr(
        Ahead, "wait", lambda ahead, **asked: wait(ahead, prompt_only=bool(asked))
    )
    code, again, err = kvjax("generate", checkpoint, *args)
    assert (code, again) == (0, out)
    assert err.count("\n") == 1  # kernels for GPUs are no news on a CPU
    assert f"{len(TEXT.encode())} prompt tokens" in summary
    assert ran == in_short(report["implementations"])
    assert "put_token" in report["implementations"]
    assert (report["cache"], report["budget"]) == ("full", None)


def test_a_cache_without_memory_beside_the_weights_is_made_again(
    kvjax, checkpoint, monkeypatch
):
    ask = ("generate", checkpoint, "--prompt", TEXT, "--max-new-tokens", 4)
    real, tries = Ahead._empty, []

    def scarce(ahead):
        tries.append(ahead)
        if len(tries) <= fails:
            raise RuntimeError(
                "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes"
            )
        return real(ahead)

    monkeypatch.setattr(Ahead, "_empty", scarce)
    fails = 0
    code, out, _ = kvjax(*ask)
    assert (code, len(tries)) == (0, 1)
    tries.clear()
    fails = 1
    assert kvjax(*ask)[:2] == (0, out)
    assert len(tries) == 2
    fails = 9
    assert_one_line(kvjax(*ask), "out of memory; use", code=1)


def test_prompt_file_drops_one_newline_at_its_end(run_json, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(TEXT + "\n", encoding="utf-8")
    args = ("--max-new-tokens", 5)
    assert (
        run_json("--prompt-file", file, *args)["token_ids"]
        == run_json("--prompt", TEXT, *args)["token_ids"]
    )


def test_a_prompt_comes_from_a_file_with_a_mark_a_pipe_or_stdin(
    run_json, tmp_path, monkeypatch
):
    wanted = run_json("--prompt", TEXT, "--max-new-tokens", 3)
    file = tmp_path / "marked.txt"
    file.write_bytes(b"\xef\xbb\xbf" + TEXT.encode() + b"\r\n")
    given = {"file": file, "stdin": "-", "pipe": tmp_path / "pipe"}
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode() + b"\n"), encoding="latin-1")
    )
    os.mkfifo(given["pipe"])
    writer = threading.Thread(
        target=lambda: given["pipe"].write_text(TEXT, encoding="utf-8"), daemon=True
    )
    writer.start()
    for what, path in given.items():
        report = run_json("--prompt-file", path, "--max-new-tokens", 3)
        assert report["token_ids"] == wanted["token_ids"], what
        assert report["prompt_tokens"] == wanted["prompt_tokens"], what


def test_draws_follow_the_seed(run_json):
    def run(*more):
        return run_json("--prompt", "abc", "--max-new-tokens", 16, *more)["token_ids"]

    warm = ("--temperature", 1, "--top-k", 200, "--top-p", 0.9, "--min-p", 0.001)
    assert run(*warm, "--seed", 1) == run(*warm, "--seed", 1)
    assert run(*warm, "--seed", 1) != run(*warm, "--seed", 2)
    assert run("--temperature", 1, "--top-k", 1, "--top-p", 0.9, "--min-p", 0.001) == run()


def test_chat_wraps_the_prompt_in_the_template(run_json):
    plain = run_json("--prompt", "[user]hello[reply]", "--max-new-tokens", 4)
    assert (
        run_json("--prompt", "hello", "--chat", "--max-new-tokens", 4)["token_ids"]
        == plain["token_ids"]
    )


def test_new_tokens_default_to_what_the_positions_leave(run_json):
    report = run_json("--prompt", "x" * (POSITIONS - 3))
    assert 1 <= len(report["token_ids"]) <= 3


def test_methods_lists_every_preset(kvjax):
    from kvjax.presets import REGISTRY

    code, out, err = kvjax("methods")
    assert (code, err) == (0, "")
    for preset in REGISTRY.values():
        row = next(line for line in out.splitlines() if f" {preset.name} " in line)
        assert preset.keeps in row
        assert preset.paper in row
    assert "4,096" in out  # Llama-3.1-8B: 2 * 8 heads * 128 * 2 bytes
    assert "Llama-3.1-8B" in out


def test_a_method_tells_its_settings(kvjax):
    code, out, err = kvjax("methods", "quest")
    assert (code, err) == (0, "")
    assert "Quest 2024" in out
    rows = {line.split()[1]: line for line in out.splitlines() if line.startswith("│")}
    assert "16" in rows["page"].split()
    assert "tokens of a page" in rows["page"]
    assert "quest:budget=1024" in out
    assert kvjax("methods", "full")[1].endswith("It has no settings.\n")
    code, out, _ = kvjax("methods", "quest", "--json")
    told = json.loads(out)
    assert (told["name"], told["budget"], told["settings"]["page"]) == ("quest", True, "16")
    assert len(kvjax("methods", "--json")[1].splitlines()) == len(presets.REGISTRY)
    assert_one_line(kvjax("methods", "QEST"), "unknown cache 'QEST'; did you mean 'quest'?")


def test_the_papers_setting_of_an_own_method_is_written_as_a_command_takes_it(kvjax, tmp_path):
    own = tmp_path / "mine.py"
    own.write_text(
        "import kvjax\n"
        "from kvjax.presets.preset import published\n"
        "@published('all', paper='Mine 2026', paper_setting='budget=64')\n"
        "def mine(budget: int = 32):\n"
        "    return kvjax.Retrieval(selector=kvjax.Fier(), budget=budget)\n"
    )
    _, out, _ = kvjax("methods", f"{own}:mine")
    assert f"The paper's setting: {own}:mine:budget=64." in " ".join(out.split())


def test_a_method_says_whether_its_cache_grows_with_the_text(kvjax):
    assert (
        "4,096 bytes per token in each layer of a Llama-3.1-8B" in kvjax("methods", "full")[1]
    )
    assert "as large as its budget" in kvjax("methods", "h2o")[1]


@pytest.mark.parametrize("name", presets.REGISTRY)
def test_a_presets_docstring_explains_each_setting_once_in_order(name):
    preset = presets.REGISTRY[name]
    told, parameters = meanings(preset), inspect.signature(preset.make).parameters
    own = entries(preset.make.__doc__, "Args")
    assert list(own) == [name for name in parameters if name in own], (
        "other settings, or in another order"
    )
    assert own.items().isdisjoint(entries(presets.__doc__, "Args").items()), (
        "explained for all presets already"
    )
    fields = [name for p in parameters.values() for name in field_names(p.default) or ()]
    assert list(told) == [*parameters, *fields]
    assert all(told.values())
    assert "**" not in "".join(told.values()), "a paragraph was read as a setting"


def test_help_has_groups_with_every_command(kvjax):
    _, out, _ = kvjax("--help")
    panels = dict.fromkeys(re.findall(r"╭─ (\w+) ─", out))
    assert {"Answer", "Quality", "Tune"} <= set(panels)
    assert "Commands" not in panels, "a command without a group"


def test_a_shell_completes_commands_and_methods(kvjax, monkeypatch):
    monkeypatch.setenv("_KVJAX_COMPLETE", "complete_bash")
    for words, wanted in (
        ("kvjax meth", ["methods"]),
        ("kvjax generate --cache stre", ["streaming_llm"]),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        code, out, _ = kvjax()
        assert (code, out.split()) == (0, wanted)


def test_help_names_the_commands(kvjax):
    code, out, _ = kvjax("--help")
    assert code == 0
    assert "generate" in out
    assert "methods" in out
    assert kvjax()[0] == 0


# An answer loads none of these. ALONE is `kvjax`, and then a line of those that it did load.
HEAVY = {"orbax", "tensorstore", "transformers", "torch", "matplotlib"}
ALONE = f"""
import sys
from kvjax_command import main

code = main()
print(*sorted({HEAVY} & set(sys.modules)))
sys.exit(code)
"""


def test_the_command_runs_alone_and_loads_and_writes_nothing_but_its_answer(checkpoint):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TRANSFORMERS", "TF_CPP"))}
    command = [
        sys.executable,
        "-c",
        ALONE,
        "generate",
        checkpoint,
        "--prompt",
        "abc",
        "--cache",
        "fier",
        "--json",
    ]
    done = subprocess.run(
        [*command, "--max-new-tokens", "2"],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    answer, loaded = done.stdout.split("\n", 1)
    assert len(json.loads(answer)["token_ids"]) <= 2
    assert loaded.split() == []


# Small work for every command, and some keys of its JSON. FILES stands for the folder that
# `files` writes, OUT for an empty one.
WORK = [
    ("generate --prompt abc --max-new-tokens 2", {"text", "token_ids", "cache_bytes_device"}),
    (
        "compare --prompt abc --cache full --cache streaming_llm:budget=64 --max-new-tokens 2",
        {"cache", "text", "same"},
    ),
    ("methods quest", {"name", "keeps", "settings"}),
    (
        "eval --task pass_key:depths=1 --length 300 --samples 1 --cache full --out OUT",
        {"results", "model"},
    ),
    ("perplexity --text FILES/long --length 40 --steps 2 --cache full", {"rows", "model"}),
    ("heads --length 16 --repeats 2", {"kv_heads", "layers"}),
]


@pytest.mark.parametrize(("line", "keys"), WORK, ids=[line.split()[0] for line, _ in WORK])
def test_every_command_has_progress_a_table_and_json(
    kvjax, checkpoint, files, monkeypatch, tmp_path, line, keys
):
    counted = []
    monkeypatch.setattr(Progress, "update", lambda self, task, **given: counted.append(given))
    command, *args = (
        word.replace("FILES", str(files)).replace("OUT", str(tmp_path)) for word in line.split()
    )
    if command != "methods":
        args.append(checkpoint)
    code, shown, err = kvjax(command, *args)
    assert code == 0, err
    assert not shown.startswith("{")
    if command != "generate":
        assert re.search(r"^[|│]", shown, re.MULTILINE), "a table"
    code, out, err = kvjax(command, *args, "--json")
    assert code == 0, err
    if command != "methods":
        assert any(one["total"] and one["completed"] <= one["total"] for one in counted), (
            "how much is done of how much"
        )
    for text in out.splitlines():
        found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert keys <= set(found), set(found)


def test_every_command_stands_in_the_table_of_work():
    names = {name for group in _GROUPS.values() for name in group}
    assert {line.split()[0] for line, _ in WORK} == names - {
        "bench",
        "chat",
        "warm",
    }  # tests/evaluate/test_kernels.py, tests/cli/test_many.py


def test_tables_are_columns_on_a_terminal_and_markdown_in_a_pipe(monkeypatch, capsys):
    table = "| cache | score |\n| --- | ---: |\n| `full` | 1.00 |\n"
    show_markdown(table)
    assert capsys.readouterr().out == table
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show_markdown(table)
    assert capsys.readouterr().out == "cache  score\nfull    1.00\n"


def test_numbers_that_are_not_known_are_null_in_json(capsys):
    write_json({"recall": float("nan"), "rows": [1.5, float("inf")]})
    assert capsys.readouterr().out == '{"recall": null, "rows": [1.5, null]}\n'


# ----------------------------------------------------------------------------------------- what it refuses


def assert_one_line(result, message, code=2):
    assert result[0] == code, result
    assert result[1] == ""
    assert result[2].startswith("error: "), result[2]
    assert result[2].count("\n") == 1, result[2]
    assert message in result[2]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "give one of --prompt TEXT, --prompt-file FILE (- for stdin)"),
        (
            ("--prompt", "a", "--prompt-file", "b"),
            "give only one of --prompt TEXT, --prompt-file FILE (- for stdin) and --example",
        ),
        (
            ("--prompt", "a", "--example"),
            "give only one of --prompt TEXT, --prompt-file FILE (- for stdin) and --example",
        ),
        (("--example",), "7914 prompt + 5 new tokens do not fit in the model's 512 positions"),
        (("--prompt", ""), "the prompt is empty"),
        (
            ("--prompt-file", "/nowhere/p.txt"),
            "--prompt-file /nowhere/p.txt: there is no such file",
        ),
        (("--prompt", "a", "--cache", "fire"), "unknown cache 'fire'; did you mean 'fier'?"),
        (
            ("--prompt", "a", "--cache", "fier:grup=16"),
            "'grup=16' is not a setting of fier; write NAME=VALUE, of budget, gr",
        ),
        (("--prompt", "a", "--cache", "fier:group"), "'group' is not a setting of fier"),
        (
            ("--prompt", "a", "--cache", "fier:group=x"),
            "Fier(group=...) must be an integer, got 'x'",
        ),
        (
            ("--prompt", "a", "--budget", 64),
            "the cache 'full' has no budget; leave it out, or use one of fier",
        ),
        (
            ("--prompt", "a", "--cache", "fier", "--budget", 0),
            "--budget takes one whole number from 1, such as 8192, 8K or 1M; got '0'",
        ),
        (
            ("--prompt", "a", "--cache", "fier", "--budget", -5),
            "from 1, such as 8192, 8K or 1M; got '-5'",
        ),
        (
            ("--prompt", "a", "--temperature", "nan"),
            "temperature must be a finite number of at least 0, got nan",
        ),
        (
            ("--prompt", "a", "--top-p", 0.9),
            "top_p=0.9 filters draws, but without a temperature nothing is drawn",
        ),
        (("--prompt", "a", "--min-p", 0.1), "min_p=0.1 filters draws"),
        (("--prompt", "a", "--cache", "FIER"), "unknown cache 'FIER'; did you mean 'fier'?"),
        (("--prompt", "a", "--cache", "lru"), "unknown cache 'lru'; there are full, fier"),
        (
            ("--prompt", "a", "--cache", "shadowkv:host=maybe"),
            "host must be true or false, got 'maybe'",
        ),
        (
            ("--prompt", "a", "--cache", "fier:dense_layers=3"),
            "keeps the first 3 layers full and the model has 3, so no",
        ),
        (
            ("--prompt", "a", "--cache", "fier", "--budget", 2**40),
            "must be at most 2147483647, got 1099511627776",
        ),
        (
            ("--prompt", "a", "--cache", "fier:local=3000000000"),
            "must be at most 2147483647, got 3000000000",
        ),
        (
            ("--prompt", "a", "--cache", "fier:budget=8", "--budget", 9),
            "set two budgets; give one",
        ),
        (("--prompt", "caf\udce9"), "--prompt is not UTF-8; set a UTF-8 locale"),
        (
            ("--prompt-file", "/tmp"),
            "--prompt-file /tmp is a folder; give a file with the prompt",
        ),
        (("--prompt", "a" * 100_000), "the prompt of 100000 bytes has more than 512 tokens"),
        (("--prompt", "a", "--temperature", -1), "temperature must be a finite number"),
        (("--prompt", "a", "--temperature", 1, "--top-k", 0), "top_k must be at least 1"),
        (("--prompt", "a", "--temperature", 1, "--top-p", 1.5), "top_p must be in (0, 1]"),
        (("--prompt", "a", "--temperature", 1, "--min-p", "nan"), "min_p must be in [0, 1)"),
        (
            ("--prompt", "a", "--dtype", "int8"),
            "a cache cannot hold dtype int8; use one of bfloat16",
        ),
        (("--prompt", "a", "--dtype", "floaty"), "a cache cannot hold dtype 'floaty'"),
        (("--prompt", "a", "--seed", 2**32), "--seed must be in [0, 2**32), got 4294967296"),
        (
            ("--prompt", "a", "--max-new-tokens", 0),
            "--max-new-tokens must be at least 1, got 0",
        ),
        (
            ("--prompt", "a" * 512),
            "512 prompt + 1 new tokens do not fit in the model's 512 positions",
        ),
        (("--prompt", "a" * 500, "--max-new-tokens", 20), "ask for at most 12 new tokens"),
    ],
    ids=lambda value: " ".join(map(str, value))[:60] if isinstance(value, tuple) else None,
)
def test_bad_options_are_one_line(kvjax, checkpoint, args, message):
    assert_one_line(kvjax("generate", checkpoint, *args), message)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("generate", "--prompt"), "--prompt"),
        (("generate", "--promt", "x"), "--promt"),
        (("generate", "--budget", "many"), "--budget"),
        (("nothing",), "nothing"),
        (
            ("methods", "fier", "quest"),
            "unexpected extra argument(s) (quest); see kvjax methods --help",
        ),
        (
            ("compare", "one two"),
            "there is no directory 'one two'; a prompt is given as --prompt TEXT",
        ),
        (
            ("generate", "model", "hello"),
            "(hello): give the prompt as --prompt TEXT; see kvjax generate --help",
        ),
        (
            ("compare", "model", "hello"),
            "(hello): give the prompt as --prompt TEXT; see kvjax compare --help",
        ),
        (("perplexity", "--text", "x", "--steps", "0"), "--steps must be at least 1, got 0"),
        (("methods", "fier:budget=3"), "unknown cache 'fier:budget=3'; did you mean 'fier'?"),
        (("compare", "--prompt", ""), "the prompt is empty; give at least one character"),
    ],
    ids=str,
)
def test_bad_usage_is_one_line(kvjax, args, message):
    assert_one_line(kvjax(*args), message, code=2)


def test_a_prompt_file_that_is_not_utf8_is_named_with_the_byte(kvjax, checkpoint, tmp_path):
    file = tmp_path / "latin.txt"
    file.write_bytes("né".encode("latin-1"))
    assert_one_line(
        kvjax("generate", checkpoint, "--prompt-file", file), "is not UTF-8: byte 0xe9 at 1"
    )


def test_a_prompt_file_without_text_is_empty(kvjax, checkpoint, tmp_path):
    file = tmp_path / "empty.txt"
    file.write_text("\n")
    assert_one_line(kvjax("generate", checkpoint, "--prompt-file", file), "the prompt is empty")


def test_a_directory_that_is_no_checkpoint_is_refused(kvjax, tmp_path):
    ask = ("--prompt", "a")
    assert_one_line(
        kvjax("generate", tmp_path / "none", *ask),
        "none does not exist; give a directory with config.json",
    )
    assert_one_line(kvjax("generate", tmp_path, *ask), "has no config.json")
    (tmp_path / "config.json").write_text("{")
    assert_one_line(kvjax("generate", tmp_path, *ask), "config.json")
    (tmp_path / "config.json").write_text(
        json.dumps(config(architectures=["MambaForCausalLM"], model_type="mamba"))
    )
    assert_one_line(kvjax("generate", tmp_path, *ask), "amba")
    (tmp_path / "config.json").write_text(json.dumps(config()))
    assert_one_line(kvjax("generate", tmp_path, *ask), "tokenizer")


def test_a_name_of_the_hub_is_told_how_to_download_it(kvjax, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = kvjax("generate", "Qwen/Qwen3-0.6B", "--prompt", "a")
    assert_one_line(result, "Qwen/Qwen3-0.6B does not exist; give a directory with config.json")
    assert "`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B` makes one" in result[2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, "nests brackets too deeply"),
        (json.dumps(config(num_hidden_layers=10**6)), "is 1000000, more than any model has"),
        (
            json.dumps(config(quantization_config={"quant_method": "awq"})),
            "is of a checkpoint that is quantised by awq",
        ),
        ('{"a": 1} é'.encode("latin-1"), "is not valid JSON"),
    ],
    ids=["brackets", "layers", "quantised", "latin-1"],
)
def test_a_config_that_would_hang_or_crash_is_one_line(
    kvjax, checkpoint, tmp_path, content, message
):
    (tmp_path / "config.json").write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )
    assert_one_line(kvjax("generate", tmp_path, "--prompt", "a"), message)


def test_a_prompt_of_66_megabytes_is_refused_before_it_is_tokenized(
    kvjax, checkpoint, tmp_path, monkeypatch
):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"word " * 13_200_000)
    monkeypatch.setattr(
        "kvjax.models.load", lambda *args, **settings: pytest.fail("weights were read")
    )
    result = kvjax("generate", checkpoint, "--prompt-file", file)
    assert_one_line(
        result,
        "the prompt of 66000000 bytes has more than 512 tokens (none of the model's is longer than",
    )


def test_the_model_that_ships_answers_the_built_in_prompt(kvjax, monkeypatch):
    """Without a directory and options; with less filler, as CI asks the whole of it by README's
    command.
    """
    first, *_, last = EXAMPLE.splitlines()
    monkeypatch.setattr("kvjax.cli.prompts.EXAMPLE", f"{first}\n{last}")
    monkeypatch.setattr("kvjax.cli.ahead.SILENCE", 0.0)
    real = generation.compile_ahead

    def slow(*args, **settings):  # than reading the weights, which it goes beside
        return [lambda job=job: (time.sleep(2), job())[1] for job in real(*args, **settings)]

    monkeypatch.setattr(generation, "compile_ahead", slow)
    code, out, err = kvjax("generate", "--example")
    assert (code, out) == (0, "71432\n")
    lines = err.splitlines()
    announced = next(
        i
        for i, line in enumerate(lines)
        if line == "Continuing 29 prompt tokens by 5 new ones; the answer follows."
    )
    assert not any(line.startswith("compiling") for line in lines[:announced])
    assert (
        "\ncompiling 6 programs, for a prompt of 29 tokens and for decode steps of 8 layers, takes about 4 s\n"
        in err
    )
    assert err.endswith("a step read 32 of 32 tokens\n")


def test_compiling_with_a_draft_is_expected_to_take_longer():
    """What compiles when it first runs is counted by the layers of both models."""

    def expected(layers, draft):
        config = types.SimpleNamespace(layers=layers)
        job = types.SimpleNamespace(
            checkpoint=types.SimpleNamespace(config=config),
            draft_directory=draft,
            short=True,
        )
        return Ahead(job, block=1, silent=True)._expected()

    assert (
        1.5 * expected(30, None) < expected(30, Path("small")) > 2 * expected(8, Path("small"))
    )


@pytest.mark.parametrize(
    ("attended", "words"),
    [
        ([2832] * 2 + [256] * 6, "256 of 2832 tokens in 6 layers, 2832 in 2"),
        ([2832, 2832, 256.4], "256 of 2832 tokens in 1 layer, 2832 in 2"),
        ([256] * 8, "256 of 2832 tokens"),
        ([300, 200, 100], "100 to 300 of 2832 tokens, by layer"),
    ],
)
def test_the_summary_says_what_a_step_read_of_how_much(attended, words):
    assert in_layers(np.array(attended), 2829, 5) == words


def test_damaged_weights_are_one_line(kvjax, tmp_path):
    directory = write_checkpoint(tmp_path)
    file = directory / "model.safetensors"
    whole = file.read_bytes()
    ask = ("generate", directory, "--prompt", "a", "--max-new-tokens", 1)
    for damaged in (whole[: len(whole) // 2], b"\xff" * 64, b""):
        file.write_bytes(damaged)
        assert_one_line(kvjax(*ask), "model.safetensors")
    file.unlink()
    assert_one_line(kvjax(*ask), "safetensors")
    save_file({k: v for k, v in weights().items() if "layers.1.mlp" not in k}, file)
    assert_one_line(kvjax(*ask), "model.layers.1.mlp.up_proj.weight")


def test_chat_without_a_template_is_refused(kvjax, tmp_path):
    directory = write_checkpoint(tmp_path)
    file = directory / "tokenizer_config.json"
    file.write_text(
        json.dumps(
            {k: v for k, v in json.loads(file.read_text()).items() if k != "chat_template"}
        )
    )
    assert_one_line(
        kvjax("generate", directory, "--prompt", "a", "--chat"), "has no chat template"
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_end_in_one_line(kvjax, tmp_path, monkeypatch, bad):
    monkeypatch.setattr(
        "kvjax.cli.ahead.SILENCE", 600.0
    )  # else a busy machine says first that it compiles
    directory = write_checkpoint(tmp_path)
    tensors = weights()
    tensors["model.norm.weight"][3] = bad
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for more in ((), ("--json",)):
        result = kvjax("generate", directory, "--prompt", "abc", "--max-new-tokens", 3, *more)
        assert_one_line(
            result, "the model's logits of row 0 are not finite before the first token", code=1
        )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_measurements_of_a_model_that_is_not_finite_end_in_one_line(kvjax, tmp_path, bad):
    directory, tensors, text = (
        write_checkpoint(tmp_path / "bad"),
        weights(),
        tmp_path / "text.txt",
    )
    tensors["model.norm.weight"][3] = bad
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    text.write_text(TEXT * 2)
    ask = (
        "perplexity",
        directory,
        "--text",
        text,
        "--length",
        40,
        "--steps",
        2,
        "--cache",
        "full",
    )
    assert_one_line(
        kvjax(*ask), "logits of row 0 are not finite after the tokens that are scored", code=1
    )
    tensors |= {
        "model.embed_tokens.weight": np.full_like(tensors["model.embed_tokens.weight"], bad)
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    result = kvjax("heads", directory, "--length", 16, "--repeats", 2)
    assert_one_line(result, "the model's queries or keys are not finite", code=1)


def test_compare_shows_answers_side_by_side(kvjax, checkpoint, tmp_path):
    text = tmp_path / "prompt.txt"
    text.write_text(TEXT + "\n")
    caches = (
        "--cache",
        "full",
        "--cache",
        "streaming_llm:budget=4096",
        "--cache",
        "fier:budget=10",
    )
    args = (*caches, "--max-new-tokens", 3, "--dense-layers", 0)
    code, out, err = kvjax("compare", checkpoint, "--prompt-file", text, *args, "--json")
    told = [line for line in err.splitlines() if not line.startswith("comparing: ")]
    assert (code, told) == (0, [])  # on a busy machine it says how far it is
    full, streaming, fier = map(json.loads, out.splitlines())
    assert full["cache"] == "full"
    assert full["same"] == len(full["token_ids"]) == 3
    assert streaming["token_ids"] == full["token_ids"]  # a budget of more than there is
    assert (
        fier["attended"] < full["attended"] == len(TEXT.encode()) + 2
    )  # the mean of 1, 2 and 3 more
    assert full["device_bytes"] > 0
    assert all(answer["decode_tokens_per_second"] > 0 for answer in (full, streaming, fier))


def test_heads_are_found_and_saved_for_the_caches_that_take_them(kvjax, checkpoint, tmp_path):
    ask = (
        "heads",
        checkpoint,
        "--length",
        16,
        "--repeats",
        2,
        "--induction",
        0.5,
        "--dtype",
        "float32",
    )
    code, out, err = kvjax(*ask, "--out", tmp_path / "heads.json")
    assert (code, out.count("\n| ")) == (0, 4), err
    found = Heads.load(tmp_path / "heads.json")
    assert f"{found.count} of {found.kv_heads * 3} KV heads" in out
    assert f"--cache razorattention:heads={tmp_path / 'heads.json'}" in out


def test_codes_of_keys_with_biases_are_warned_of(kvjax, tmp_path):
    directory, tensors = (
        write_checkpoint(
            tmp_path,
            model_type="qwen2",
            architectures=["Qwen2ForCausalLM"],
            num_hidden_layers=1,
        ),
        {
            name: tensor
            for name, tensor in weights().items()
            if not re.search("layers.[12]", name)
        },
    )
    for name, size in (("q", 32), ("k", 16), ("v", 16)):
        tensors[f"model.layers.0.self_attn.{name}_proj.bias"] = np.zeros(size, np.float32)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    cache = ("--cache", "logquant:window=8,group=8,key_axis=token", "--max-new-tokens", 2)
    for command in (("generate", directory), ("compare", directory, "--dense-layers", 0)):
        with pytest.warns(UserWarning, match=r'biases to keys.*use key_axis="channel"'):
            assert kvjax(*command, "--prompt", "abc", *cache)[0] == 0


def test_compare_refuses_what_it_cannot_run(kvjax, checkpoint):
    code, _, err = kvjax(
        "compare", checkpoint, "--prompt", TEXT, "--cache", "pariskv", "--budget", 5
    )
    assert code == 2
    assert "budget" in err
    code, _, err = kvjax(
        "compare",
        checkpoint,
        "--prompt",
        TEXT,
        "--cache",
        "streaming_llm:budget=9,rope_theta=500",
    )
    assert code == 2
    assert "set rope_theta=10000.0" in err


# The model directory is the tiny checkpoint; FILES stands for the folder of the files that
# `files` writes.
REFUSED = [
    # generate
    (
        "generate --prompt a --cache fier:anchors=2+99",
        "anchors name layer 99, and the model has layers 0 to 2",
    ),
    (
        "generate --prompt a --cache full:budget=3",
        "'budget=3' is not a setting of full; it has no settings",
    ),
    (
        "generate --prompt a --cache streaming_llm:rope_theta=x",
        "streaming_llm(rope_theta=...) must be a finite number, got 'x'",
    ),
    (
        "generate --prompt a --cache razorattention:heads=3",
        "takes a kvjax.presets.Heads or a file of them, got 3",
    ),
    (
        "generate --prompt a --cache razorattention:heads=/no",
        "/no is not a file of a model's heads; kvjax.presets.Heads",
    ),
    (
        "generate --prompt a --cache streaming_llm:budget=9,rope_theta=500",
        "Sliding(rope=Default(theta=500.0)) turns keys by another RoPE than layer 0 of this model, which has "
        "Default(theta=10000.0) in 8 of 8 channels: set rope_theta=10000.0",
    ),
    (
        "generate --prompt a --cache magicpig:tables=100000",
        "takes at most 32 bits and 4096 tables",
    ),
    ("generate --prompt a --cache magicpig:bits=40", "takes at most 32 bits and 4096 tables"),
    (
        "generate --prompt a --cache pqcache:parts=3",
        "does not divide head_dim=8; use a divisor of 8",
    ),
    ("generate --prompt a --cache freekv:tau=x", "Speculative(tau='x') must be a number"),
    (
        "generate --prompt a --cache full --cache fier",
        "--cache is given 2 times (full, fier), and generate takes one",
    ),
    (
        "generate --prompt a --slots 4",
        "--slots is for the answers to --prompts; leave it out for a single prompt",
    ),
    ("generate --prompt a --mesh data", "--mesh takes data=N"),
    ("generate --prompt a --mesh model=x", "--mesh takes data=N"),
    ("generate --prompt a --mesh data=1,data=1", "--mesh takes data=N"),
    (
        "generate --prompt a --selection share",
        "--selection share needs tokens over devices: --mesh ctx=N",
    ),
    (
        "generate --prompt a --mesh ctx=1 --selection local",
        "--selection must be exact or share, got 'local'",
    ),
    ("generate --prompt a --mesh model=99", "--mesh model=99 asks for 99 devices; there are 1"),
    (
        "generate --prompt a --speculate x",
        "speculate='x' must be self or self:TOKENS such as self:4, prompt-lookup, or prompt-lookup:NGRAM,TOKENS",
    ),
    (
        "generate --prompt a --speculate prompt-lookup:0,4",
        "PromptLookup(ngram=...) must be at least 1, got 0",
    ),
    (
        "generate --prompt a --speculate prompt-lookup:3,16",
        "PromptLookup(tokens=...) must be at most 15, got 16",
    ),
    (
        "generate --prompt a --speculate prompt-lookup --cache h2o",
        "drafts need a cache that can take back tokens",
    ),
    (
        "generate --prompt a --speculate prompt-lookup --draft /no",
        "--speculate and --draft each say how to draft",
    ),
    (
        "generate --prompt a --draft /no",
        "/no does not exist; give a directory with config.json",
    ),
    (
        "generate --prompt a --draft FILES/other",
        "the draft model's tokenizer gives",
    ),
    (
        "generate --prompt a --sparse-prompt 10",
        "--sparse-prompt must be a share of what is stored, above 0 and at most 1; got 10",
    ),
    (
        "generate --prompt a --sparse-prompt 0.1 --cache h2o:budget=8",
        "which reads a whole prompt at once",
    ),
    (
        "generate --prompt a --sparse-prompt 0.1 --cache kivi",
        "sparse_prompt reads stored keys in place",
    ),
    ("generate --prompt-file FILES", "is a folder; give a file with the prompt"),
    ("generate --prompt-file FILES/binary", "is not UTF-8: byte 0x80 at 128; convert it first"),
    ("generate --prompt-file /dev/null", "the prompt is empty"),
    # compare: all before the weights
    ("compare --prompt a --cache nothing", "unknown cache 'nothing'"),
    ("compare --prompt a --cache fier --budget 0", "--budget takes whole numbers from 1"),
    (
        "compare --prompt a --cache full --budget 64",
        "none has a budget: full; leave it out, or add one of fier",
    ),
    ("compare --prompt a --max-new-tokens 0", "--max-new-tokens must be at least 1, got 0"),
    ("compare --prompt a --max-new-tokens 9999", "do not fit in the model's 512 positions"),
    (
        "compare --prompt a --cache fier:budget=8 --budget 9",
        "--budget 9 applies to no cache, as fier:budget=8 set their own; leave",
    ),
    (
        "compare --prompt a --cache fier@8",
        "unknown cache 'fier@8'; did you mean 'fier:budget=8'?",
    ),
    (
        "compare --prompt a --cache fier,quest",
        "unknown cache 'fier,quest'; give one cache at a time; there are full, fier",
    ),
    ("compare --prompt-file FILES", "is a folder; give a file with the prompt"),
    ("compare --prompt-file FILES/binary", "--prompt-file FILES/binary is not UTF-8"),
    ("compare --prompt-file prompt.txt", "there is no such file"),
    ("generate --prompt a --prompt=", "the prompt is empty; give at least one character"),
    (
        "generate --prompt a --prompt b --chat",
        "several --prompt and --chat cannot be given together",
    ),
    (
        "generate --prompt a --prompt b --prompts c",
        "--prompts and --prompt cannot be given together",
    ),
    # heads: before the weights
    ("heads --out /no/x.json", "--out /no/x.json: there is no such folder"),
    ("heads --length 256 --repeats 4", "are 1024 tokens, and the model has"),
    # eval and perplexity
    ("eval --cache full,quest:budget=64 --budget 8", "give one cache at a time"),
    (
        "eval --cache fier:budget=64 --budget 8,16",
        "--budget 8,16 applies to no cache, as fier:budget=64 set their own",
    ),
    (
        "eval --quick --cache full --length 9999",
        "ask for shorter examples",
    ),  # --quick's budget applies to no cache
    ("eval --quick --cache fier:budget=16 --length 9999", "ask for shorter examples"),
    (
        "perplexity --text FILES/long --cache full --budget 8 --length 200",
        "none has a budget: full; leave it out",
    ),
    (
        "perplexity --text FILES/long --cache fier:budget=9 --budget 8 --length 200",
        "as fier:budget=9 set their own",
    ),
    ("eval --samples 0", "needles(samples=...) must be at least 1, got 0"),
    ("eval --question x", "must be one of decoded, prefilled"),
    ("eval --group-reduce x", "must be one of mean_query, mean_score"),
    ("eval --length 0", "--length takes whole numbers from 1, such as 8192, 8K or 1M"),
    ("eval --parallel 0", "Invalid value for '--parallel'"),
    ("eval --task=", "--task '': unknown; there are pass_key, needle"),
    ("eval --task needles:hidden=x", "needles(hidden=...) must be an integer, got 'x'"),
    ("eval --text FILES", "--text FILES is a folder; give a UTF-8 file"),
    ("eval --text FILES/binary", "binary is not UTF-8 (byte 128)"),
    ("perplexity --text FILES/binary", "binary is not UTF-8 (byte 128)"),
    ("perplexity --text FILES/none", "none is not there; --text takes a UTF-8 file"),
    ("perplexity --text FILES/long --passages 0", "--passages must be at least 1, got 0"),
    ("perplexity --text FILES/long --steps 99999999999", "--steps must be at most 2147483647"),
    ("heads --length 1", "--length must be at least 2, got 1"),
    ("heads --length x", "--length takes one whole number from 1, such as 8192, 8K or 1M"),
    ("heads --seed -1", "--seed must be in [0, 2**32), got -1"),
    ("heads --echo nan", "Invalid value for '--echo'"),
    ("warm --capacity=", "--capacity takes one whole number from 1, such as 8192, 8K or 1M"),
    ("generate --prompts FILES", "is a folder; give a file with a prompt in each line"),
    ("generate --prompts FILES/binary", "--prompts FILES/binary is not UTF-8 text"),
    ("generate --prompt a --budget 1e3 --cache fier", "such as 8192, 8K or 1M; got '1e3'"),
    ("generate --prompt a --cache fier:budget=1.5", "must be an integer, got 1.5"),
    ("generate --prompt a --mesh ,", "--mesh takes data=N"),
    ("generate --prompt a --speculate self:99", "must be at most 15, got 99"),
    ("generate --prompt a --sparse-prompt nan", "must be a finite number, got nan"),
    ("generate --prompt a --max-new-tokens 99999999999999", "do not fit in the model's"),
    ("eval --batch 0", "--batch must be at least 1, got 0"),
    ("eval --seed -1", "--seed must be at least 0, got -1"),
    ("eval --out FILES/short", "is a file; give the path of a folder"),
    (
        "eval --cache fier --dense-layers 3 --length 480 --samples 1",
        "keeps the first 3 layers full and the model has 3",
    ),
    ("perplexity --text FILES/long --out FILES/short", "is a file; give the path of a folder"),
    ("perplexity --text FILES/long --share nan", "share must be in (0, 1], got nan"),
    (
        "perplexity --text FILES/long --share 0.2 --budget 8",
        "got budget=8 and share=0.2; give only one",
    ),
    (
        "perplexity --text FILES/long --cache full --cache fier:budget=9 --share 0.2 --length 200",
        "share=0.2 applies to no cache: full, fier:budget=9 have no budget or set their own; leave it out",
    ),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "binary").write_bytes(bytes(range(256)))
    (folder / "short").write_text("a few words")
    (folder / "long").write_text("It was the best of times, it was the worst of times. " * 60)
    (folder / "other").mkdir()
    (folder / "other" / "config.json").write_text(
        json.dumps(config(vocab_size=99, bos_token_id=1, eos_token_id=2))
    )
    write_tokenizer(folder / "other", order=-1)
    return folder


@pytest.mark.parametrize(
    ("line", "message", "more"),
    [(*row, "")[:3] for row in REFUSED],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_done_is_one_line_before_the_weights(
    kvjax, checkpoint, files, monkeypatch, tmp_path, line, message, more
):
    monkeypatch.setattr(
        "kvjax.models.load", lambda *args, **settings: pytest.fail("weights were read")
    )
    monkeypatch.chdir(tmp_path)
    command, *args = (word.replace("FILES", str(files)) for word in f"{line} {more}".split())
    result = kvjax(command, checkpoint, *args)
    assert_one_line(result, message.replace("FILES", str(files)))
    assert not list(tmp_path.iterdir()), "something was written"


def test_help_and_version_have_their_usual_names(kvjax):
    from kvjax import __version__

    assert kvjax("--version") == (0, f"kvjax {__version__}\n", "")
    assert kvjax("-h")[:2] == kvjax("--help")[:2]
    assert kvjax("generate", "-h")[:2] == kvjax("generate", "--help")[:2]


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "kvjax", "--version"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout[:6]) == (0, "kvjax "), done.stderr


def test_a_reader_that_leaves_ends_the_command_with_141():
    command = [sys.executable, "-m", "kvjax.cli", "methods"]
    read, wrote = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=wrote, stderr=subprocess.PIPE, text=True, check=False)
    os.close(wrote)
    assert done.returncode == 141, done.stderr
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr


def test_an_interrupt_leaves_no_traceback(kvjax, checkpoint, monkeypatch):
    def interrupt(*args, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvjax.generation.stream", interrupt)
    code, out, err = kvjax("generate", checkpoint, "--prompt", "a")
    assert (code, out) == (130, "")
    assert "Traceback" not in err


def test_weights_are_not_read_before_what_is_cheap_is_checked(kvjax, checkpoint, monkeypatch):
    monkeypatch.setattr(
        "kvjax.models.load", lambda *args, **settings: pytest.fail("weights were read")
    )
    assert_one_line(kvjax("generate", checkpoint, "--prompt", "a" * 600), "shorten the prompt")


@pytest.mark.parametrize("kind", [FileNotFoundError, PermissionError])
def test_a_path_that_the_system_refuses_is_told_with_what_to_do(kind):
    told = _one_line(kind(1, "It is refused", "a/b"))
    assert told == "a/b: It is refused; give a path that exists and that you may use"


def test_the_command_answers_where_keys_are_rotated_by_the_length(kvjax, tmp_path):
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    directory = write_checkpoint(tmp_path, rope_parameters=rope, max_position_embeddings=32)
    code, out, err = kvjax(
        "generate", directory, "--prompt", TEXT, "--max-new-tokens", 8, "--json"
    )
    assert (code, err) == (0, "")
    assert (
        json.loads(out)["token_ids"]
        == models.load(directory).generate(TEXT, max_new_tokens=8).tokens
    )


def test_the_command_takes_the_text_of_a_model_that_sees_images(kvjax, checkpoint, tmp_path):
    text = {
        name: value
        for name, value in config(model_type="mistral").items()
        if name != "architectures"
    }
    outer = {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": text,
    }
    directory = tmp_path / "images"
    write_checkpoint(directory)
    (directory / "config.json").write_text(json.dumps(outer))
    ask = ("--prompt", TEXT, "--max-new-tokens", 3)
    assert kvjax("generate", directory, *ask)[:2] == kvjax("generate", checkpoint, *ask)[:2]


def test_nothing_is_said_to_compile_after_the_first_text(kvjax, checkpoint, monkeypatch):
    monkeypatch.setattr("kvjax.cli.ahead.SILENCE", 60.0)
    args = ("--prompt", TEXT, "--max-new-tokens", 3, "--speculate", "prompt-lookup")
    assert kvjax("generate", checkpoint, *args)[0] == 0
    timers = (one for one in threading.enumerate() if isinstance(one, threading.Timer))
    ticking = [one for one in timers if one.interval == 60.0 and not one.finished.is_set()]
    assert not ticking


def test_a_method_that_drafts_gives_the_text_of_full_attention(kvjax, checkpoint):
    args = ("--prompt", TEXT, "--max-new-tokens", 8)
    full = kvjax("generate", checkpoint, *args, "--cache", "full")
    drafted = kvjax(
        "generate", checkpoint, *args, "--cache", "fier:budget=8", "--speculate", "self"
    )
    assert drafted[:2] == full[:2]
    assert "drafted tokens accepted" in drafted[2]


def test_compare_counts_what_drafts_would_be_right(kvjax, checkpoint):
    args = ("--cache", "full", "--cache", "fier:budget=8", "--max-new-tokens", 12)
    found = kvjax(
        "compare",
        checkpoint,
        "--prompt",
        TEXT,
        *args,
        "--speculate",
        "self",
        "--drafts",
        "--json",
    )
    full, fier = map(json.loads, found[1].splitlines())
    assert full["accepted"] == 8
    assert 0 <= fier["accepted"] <= 8
    assert fier["same"] == len(full["token_ids"])
    assert full["tokens_per_step"] is None
    assert fier["tokens_per_step"] >= 1


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ((), ["_start_devices", "_only_cache", "make_placement"]),
        (
            ("--distributed",),
            ["_only_cache", "join_processes", "_start_devices", "make_placement"],
        ),
    ],
)
def test_a_driver_starts_before_imports_but_after_processes_have_joined(
    kvjax, monkeypatch, options, wanted
):
    order = []

    def note(name, result=None):
        def noted(*given):
            order.append(name)
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(f"kvjax.cli.generate.{name}", noted)

    note("_only_cache", "full")
    note("_start_devices")
    note("join_processes")
    note("make_placement", ValueError("far enough"))
    assert kvjax("generate", "--prompt", "a", *options)[0] == 2
    assert order == wanted
