"""The first answer of a process: wall and CPU seconds from its start, with an empty and a
filled cache of programs.

    python benchmarks/first_answer.py  # the shipped model, by this machine's JAX
    # random weights, written to DIR first (16 GB)
    python benchmarks/first_answer.py --shape llama-3.1-8b --folder DIR

Every row is a whole process: `kvjax generate` as a user types it, or `transformers` with the
same directory, prompt and number of new tokens. `first_seconds` is the time to the first byte
of the answer, `seconds` the time to the end, `cpu_seconds` those of all threads, user and
system. `programs` says whether the folder of compiled programs was empty ("cold") or filled by
the cold row ("warm"). Rows are written as they come, those of transformers last.

`timeline` has the lines of `kvjax generate --verbose`: what ran from start to answer, and when.

The rows `load` are `kvjax.models.load` alone, beside the seconds in which the same files are
read into a buffer, once as they were and once more from the system's cache; `host_bytes` is
what the peak memory of the process grew by, which on a CPU has the model. With --loads these
are the only rows.

The rows `lengths` are one process that answers prompts of several lengths, one after the other:
`seconds` is that of the last length, which nothing was compiled for by name, and
`steady_seconds` the median of AGAIN answers to the same prompt. On a CPU it is one and a half
times the length before, and `products_seconds` is its bound: its matrix products, those of
causal attention among them, at the rate of one large product.

With --beside DIR, a checkout of another state of kvjax, the rows are those of both, one after
the other and back: `answer` from an empty and from a filled cache, `job` (README's command, on
a CPU) and `lengths`, whose first process fills a cache of programs for the others. `by` is
"kvjax" or "kvjax at NAME", numbers are medians of --runs processes, and `runs` has each of
them. A row is written again after each process.

The rows `padding` say which share of the CPU seconds of a prompt goes to the tokens that pad
its last chunk: beside the same chunks of which the last has the size of what is left. The
lengths are those that are padded most, and the usual one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

HELD = "XLA_PYTHON_CLIENT_PREALLOCATE"
NOT_THEIRS = (
    HELD,
    "PYTHONDONTWRITEBYTECODE",
)  # not of the processes that are timed: users keep compiled modules
if (
    HELD not in os.environ
):  # this process names the device, and leaves its memory to those that it starts
    os.environ[HELD] = "false"

import jax  # noqa: E402
import named  # noqa: E402
from layers import out_of, save, show  # noqa: E402

FILLER = "The grass is green. The sky is blue. The sun is yellow.\n"
KEY, QUESTION = (
    "The pass key is 71432. Remember it.\n",
    "What is the pass key? The pass key is ",
)
ROOT = Path(__file__).resolve().parents[1]
JOB = ["--example", "--cache", "fier", "--budget", "256"]  # of README
KEY_OF_A_ROW = ("shape", "platform", "work", "by", "cache", "new_tokens", "programs", "tokens")
PADDED = "65,257,513,1862,2829"  # tokens: of those near them the most padded ones, by the chunks for a CPU
AGAIN = 5  # answers to the prompt of the last length
TILE = 1 << 24  # random numbers of a checkpoint, repeated

TRANSFORMERS = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
directory, prompt, new = sys.argv[1], open(sys.argv[2]).read(), int(sys.argv[3])
gpu = torch.cuda.is_available()
tokenizer = AutoTokenizer.from_pretrained(directory)
model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16 if gpu else torch.float32)
model = model.to("cuda" if gpu else "cpu")
ids = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
streamer = TextStreamer(tokenizer, skip_prompt=True)
with torch.no_grad():
    model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, streamer=streamer)
"""

LOAD = """
import json, resource, sys, time
from pathlib import Path
import jax
from kvjax import models
jax.block_until_ready(jax.numpy.zeros(1))
files, buffer = sorted(Path(sys.argv[1]).glob("*.safetensors")), bytearray(1 << 24)
def read():
    begin = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.perf_counter() - begin
size = sum(file.stat().st_size for file in files)
first, again = read(), read()
print("x", flush=True)
before, cpu = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
begin = time.perf_counter()
checkpoint = models.load(sys.argv[1], **json.loads(sys.argv[2]))
jax.block_until_ready(jax.tree.leaves(checkpoint.model))
found = {"load_seconds": time.perf_counter() - begin, "load_cpu_seconds": time.process_time() - cpu}
found |= {"bytes": size, "read_seconds": first, "read_again_seconds": again}
found["host_bytes"] = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
print(json.dumps(found))
"""

LENGTHS = """
import json, sys, time
import jax, jax.numpy as jnp
import numpy as np
from kvjax import models
checkpoint = models.load(sys.argv[1])
cache, lengths, new = sys.argv[2], [int(n) for n in sys.argv[3].split(",")], int(sys.argv[4])
capacity = int(sys.argv[5]) or None
ids = checkpoint.encode(open(sys.argv[6]).read())
def answer(n):
    begin = time.perf_counter()
    checkpoint.generate(checkpoint.decode(ids[:n]), cache=cache, max_new_tokens=new, capacity=capacity, stop_tokens=())
    return time.perf_counter() - begin
print("x", flush=True)
each = [answer(n) for n in lengths]
again = [answer(lengths[-1]) for _ in range(int(sys.argv[7]))]
found = {"by_length": each, "seconds": each[-1], "steady_seconds": float(np.median(again)), "steady": again}
if jax.default_backend() == "cpu":
    c, n, left = checkpoint.config, lengths[-1], jnp.ones((1024, 2048))
    product = jax.jit(lambda x: x @ jnp.ones((2048, 2048)))
    product(left).block_until_ready()
    begin = time.perf_counter()
    for _ in range(20):
        product(left).block_until_ready()
    rate = 20 * 2 * 1024 * 2048**2 / (time.perf_counter() - begin)
    layer = c.hidden_size * (2 * c.q_heads + 2 * c.kv_heads) * c.head_dim + 3 * c.hidden_size * c.intermediate_size
    flops = c.layers * (2 * n * layer + 2 * n * n * c.q_heads * c.head_dim)
    found |= {"products_gflop": flops / 1e9, "products_seconds": flops / rate}
print(json.dumps(found))
"""

PADDING = """
import json, sys, time
import jax, numpy as np
import kvjax
from kvjax import models, presets
from kvjax.generation import prefilling
from kvjax.spec import round_capacity
model = models.load(sys.argv[1]).model
lengths, own = [int(n) for n in sys.argv[3].split(",")], prefilling.chunks_of
capacity = round_capacity(max(lengths) + 1)
def exact(cache, tokens, *args, **how):
    *full, last = own(cache, tokens, *args, **how)
    return [*full, (tokens - sum(size for size, _ in full), last[1])]
def cpu_seconds(n):
    cache = kvjax.init(presets.parse(sys.argv[2]), model.spec(batch=1, capacity=capacity), layers=model.config.layers)
    prompt = np.random.default_rng(n).integers(3, model.config.vocab_size, (1, n))
    jax.block_until_ready(cache)
    begin = time.process_time()
    jax.block_until_ready(prefilling.prefill(model, cache, prompt))
    return time.process_time() - begin
print("x", flush=True)
found = {"padded_tokens": [], "padded_cpu_seconds": [], "exact_cpu_seconds": [], "padded_share": []}
for n in lengths:
    ways = {"padded": own, "exact": exact}
    best = dict.fromkeys(ways, 1e9)
    for _ in range(6):  # side by side, of which the first compiles
        for name, way in ways.items():
            prefilling.chunks_of = way
            best[name] = min(best[name], cpu_seconds(n))
    cache = jax.eval_shape(lambda: kvjax.init(presets.parse(sys.argv[2]), model.spec(1, capacity), layers=8))
    found["padded_tokens"].append(sum(size for size, _ in own(cache, n, empty=True)) - n)
    for name in ways:
        found[name + "_cpu_seconds"].append(best[name])
    found["padded_share"].append(1 - best["exact"] / best["padded"])
print(json.dumps(found))
"""


def timed(
    command: Sequence[str], tree: Path | None = None, **env: str
) -> tuple[dict[str, Any], str]:
    """Runs a command to its end: seconds to the first byte of its stdout and to the end, CPU
    seconds, and what it said of its own times. It imports kvjax from `tree`, if that is given.
    """
    if tree is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with tempfile.TemporaryFile("w+") as told:
        env = {
            name: value for name, value in os.environ.items() if name not in NOT_THEIRS
        } | env
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=told, env=env, cwd=tree
        )
        assert process.stdout is not None
        first = process.stdout.read(1)
        to_first = time.perf_counter() - begin
        text = (first + process.stdout.read()).decode(errors="replace")
        code = process.wait()
        told.seek(0)
        said = told.read()
        if code:
            raise RuntimeError(f"{' '.join(command)[:200]} failed: {said[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = sum(getattr(after, name) - getattr(before, name) for name in ("ru_utime", "ru_stime"))
    row = {
        "first_seconds": to_first,
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": cpu,
    }
    lines = [
        line.strip()
        for line in said.splitlines()
        if re.match(r" *[0-9.]+ to +[0-9.]+ s ", line)
    ]
    return row | ({"timeline": lines} if lines else {}), text


def write_random(directory: Path, shape: str) -> None:
    """A checkpoint of random bf16 weights, with the tokenizer of the shipped model.

    Rows of the head for ids that the tokenizer lacks are zero, so that every answer has text.
    """
    import ml_dtypes
    import throughput
    from safetensors.numpy import save_file

    from kvjax import models
    from kvjax.models.weights import describe

    config = throughput.SHAPES[shape]
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models.shipped() / name, directory)
    _, fields = describe(config)
    (directory / "config.json").write_text(json.dumps({**fields, "dtype": "bfloat16"}))
    tile = np.random.default_rng(0).standard_normal(TILE, np.float32) * 0.02
    tile = tile.astype(ml_dtypes.bfloat16)
    hidden, inner, D = config.hidden_size, config.intermediate_size, config.head_dim
    known = json.loads((models.shipped() / "config.json").read_text())["vocab_size"]

    def weight(*sizes: int) -> np.ndarray:
        return np.resize(tile, sizes)

    head = weight(config.vocab_size, hidden)
    head[known:] = 0
    ends = {
        "model.embed_tokens.weight": weight(config.vocab_size, hidden),
        "model.norm.weight": np.ones(hidden, ml_dtypes.bfloat16),
        "lm_head.weight": head,
    }
    files = [ends]
    for i in range(config.layers):
        layer = f"model.layers.{i}."
        sizes = {
            "self_attn.q_proj": (config.q_heads * D, hidden),
            "self_attn.k_proj": (config.kv_heads * D, hidden),
            "self_attn.v_proj": (config.kv_heads * D, hidden),
            "self_attn.o_proj": (hidden, config.q_heads * D),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        norms = ("input_layernorm", "post_attention_layernorm")
        files.append(
            {f"{layer}{name}.weight": weight(*size) for name, size in sizes.items()}
            | {f"{layer}{name}.weight": np.ones(hidden, ml_dtypes.bfloat16) for name in norms}
        )
    where = {}
    for i, tensors in enumerate(files, 1):
        file = f"model-{i:05}-of-{len(files):05}.safetensors"
        save_file(tensors, directory / file, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_prompt(path: Path, directory: Path, tokens: int) -> int:
    """A text of about `tokens` tokens of the directory's tokenizer; returns their number."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    line = len(tokenizer.encode(FILLER, add_special_tokens=False).ids)
    lines = max(1, (tokens - len(tokenizer.encode(KEY + QUESTION).ids)) // line)
    path.write_text(KEY + FILLER * lines + QUESTION)
    return len(tokenizer.encode(path.read_text()).ids)


def _programs(work: Path, name: str, tree: Path | None) -> Path:
    """The folder of compiled programs of a command in `tree`."""
    return work / "programs" / (name if tree is None else f"{name}_{tree.name}")


def middle(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A row of several runs: medians of their numbers, and what each of them was."""
    one = runs[len(runs) // 2]
    numbers = {name for name, value in one.items() if isinstance(value, float)}
    row = {name: value for name, value in one.items() if name not in numbers}
    row |= {name: median(run[name] for run in runs) for name in numbers}
    return row | {"runs": [{name: run[name] for name in numbers} for run in runs]}


def in_turns(
    trees: dict[str, Path], runs: int, run: Callable[[Path], dict[str, Any]]
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """`runs` results of each tree: one after the other, then back. Yields the name of the tree
    that ran, and all of its results so far.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    for i in range(runs):
        order = list(trees) if i % 2 == 0 else list(reversed(trees))
        for name in order:
            found[name].append(run(trees[name]))
            yield name, found[name]


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", default=None, help="a shape of benchmarks/throughput.py, with random weights"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=None,
        help="where these are written; default: a temporary one",
    )
    parser.add_argument(
        "--tokens", type=int, default=None, help="of the prompt: 2829, or 32768 with a shape"
    )
    parser.add_argument("--new", default=None, help="numbers of new tokens, such as 5,128")
    parser.add_argument(
        "--caches", type=named.caches(), default=None, help="methods, with spaces between"
    )
    parser.add_argument("--lengths", default=None, help="of the prompts of one process")
    parser.add_argument("--without-transformers", action="store_true")
    parser.add_argument("--loads", action="store_true", help="the rows `load` alone")
    parser.add_argument(
        "--beside", type=Path, default=None, help="a checkout of another state, to compare with"
    )
    parser.add_argument("--beside-name", default="before", help="what rows call that state")
    parser.add_argument(
        "--works", default="answer,job,lengths", help="the rows of --beside, in their order"
    )
    parser.add_argument("--runs", type=int, default=3, help="processes of each with --beside")
    parser.add_argument("--quick", action="store_true", help="keep no results")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="no row starts after so many"
    )
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args(args)
    large, begin = given.shape is not None, time.perf_counter()
    work = given.folder or Path(tempfile.mkdtemp(prefix="first_answer"))
    work.mkdir(parents=True, exist_ok=True)
    tokens = given.tokens or (32768 if large else 2829)
    news = [int(n) for n in (given.new or ("128" if large else "5,128")).split(",")]
    caches = given.caches or ["full", f"fier:budget={2048 if large else 256}"]
    lengths = given.lengths or ("9000,20000,13000" if large else "300,900,1886,2829")

    from kvjax import models

    directory = models.shipped()
    if large:
        directory = work / given.shape
        if not (directory / "model.safetensors.index.json").is_file():
            write_random(directory, given.shape)
            show({"wrote": str(given.shape), "seconds": time.perf_counter() - begin})
    prompt = work / "prompt.txt"
    count = write_prompt(prompt, directory, tokens)

    def measure(what: dict[str, Any], run: Callable[[], dict[str, Any]]) -> None:
        if time.perf_counter() - begin > 60 * given.minutes:
            return
        try:
            found = run()
        except RuntimeError as error:
            found = {"failed": str(error)[-300:]}
        empty = dict.fromkeys(KEY_OF_A_ROW)
        row = {
            **empty,
            "shape": given.shape or "shipped",
            "platform": jax.default_backend(),
            "tokens": count,
        }
        row |= {**what, **found}
        show(row)
        save(
            out_of(given, "first_answer.json"),
            "whole processes, from start to answer",
            [row],
            KEY_OF_A_ROW,
        )

    def folder(name: str, state: str, tree: Path | None) -> str:
        """The folder of compiled programs of a command in `tree`, "cold" or "warm"."""
        found = _programs(work, name, tree)
        if state == "cold":
            shutil.rmtree(found, ignore_errors=True)
        return str(found)

    def generate(cache: str, new: int, state: str, tree: Path | None = None) -> dict[str, Any]:
        programs = folder(f"{cache.replace(':', '_')}_{new}", state, tree)
        command = [
            sys.executable,
            "-m",
            "kvjax",
            "generate",
            str(directory),
            "--prompt-file",
            str(prompt),
        ]
        command += ["--cache", cache, "--max-new-tokens", str(new), "--verbose"]
        return timed(command, tree, KVJAX_COMPILATION_CACHE=programs)[0]

    def job(state: str, tree: Path) -> dict[str, Any]:
        command = [sys.executable, "-m", "kvjax", "generate", *JOB]
        programs = folder("job", state, tree)
        on_cpu = {"JAX_PLATFORMS": "cpu"}
        return timed(command, tree, KVJAX_COMPILATION_CACHE=programs, **on_cpu)[0]

    def load(settings: dict[str, str]) -> dict[str, Any]:
        _, text = timed([sys.executable, "-c", LOAD, str(directory), json.dumps(settings)])
        return json.loads(text.splitlines()[-1])

    def several(cache: str, tree: Path | None = None) -> dict[str, Any]:
        capacity = 0 if not large else 36864
        command = [
            sys.executable,
            "-c",
            LENGTHS,
            str(directory),
            cache,
            lengths,
            "16",
            str(capacity),
            str(prompt),
            str(AGAIN),
        ]
        kept = {}
        if tree is not None:  # JAX's own folder, so that one of several processes compiles
            kept["JAX_COMPILATION_CACHE_DIR"] = folder("lengths", "warm", tree)
            kept["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
        _, text = timed(command, tree, KVJAX_COMPILATION_CACHE="off", **kept)
        return {"lengths": lengths, **json.loads(text.splitlines()[-1])}

    def both(what: dict[str, Any], runs: int, run: Callable[[Path], dict[str, Any]]) -> None:
        """A row of this state, and one of the state beside it."""
        trees = {f"kvjax at {given.beside_name}": given.beside.resolve(), "kvjax": ROOT}
        for by, found in in_turns(trees, runs, run):
            measure({**what, "by": by}, lambda found=found: middle(found))

    def beside() -> None:
        cache, new = caches[-1], news[0]
        works = given.works.split(",")
        if "answer" in works:
            for state, runs in (("cold", 1), ("warm", given.runs)):
                what = {
                    "work": "answer",
                    "cache": cache,
                    "new_tokens": new,
                    "programs": state,
                }
                both(what, runs, partial(generate, cache, new, state))
        if "job" in works:
            own = {"work": "job", "shape": "shipped", "platform": "cpu", "tokens": None}
            for state, runs in (("cold", 1), ("warm", given.runs)):
                both({**own, "programs": state}, runs, partial(job, state))
        if "lengths" in works:
            what = {"work": "lengths", "cache": cache}
            both(what, given.runs, partial(several, cache))

    def padding(cache: str) -> dict[str, Any]:
        _, text = timed(
            [sys.executable, "-c", PADDING, str(directory), cache, PADDED],
            KVJAX_COMPILATION_CACHE="off",
        )
        return {"lengths": PADDED, **json.loads(text.splitlines()[-1])}

    def answers(cache: str, state: str) -> None:
        for new in news:
            what = {
                "work": "answer",
                "by": "kvjax",
                "cache": cache,
                "new_tokens": new,
                "programs": state,
            }
            measure(what, lambda new=new: generate(cache, new, state))

    if given.beside is not None:
        beside()
        return
    if not given.loads:
        for cache in caches:
            answers(cache, "cold")
        for cache in reversed(caches):
            answers(cache, "warm")
            measure(
                {"work": "lengths", "by": "kvjax", "cache": cache},
                lambda cache=cache: several(cache),
            )
            if not large:
                measure(
                    {"work": "padding", "by": "kvjax", "cache": cache},
                    lambda cache=cache: padding(cache),
                )
    for dtype in ("bfloat16",) if large else ("bfloat16", "float32"):
        what = {"work": "load", "by": "kvjax", "cache": dtype}
        measure(what, lambda dtype=dtype: load({"dtype": dtype}))
    if not given.without_transformers and not given.loads:
        for new in news:
            command = [
                sys.executable,
                "-c",
                TRANSFORMERS,
                str(directory),
                str(prompt),
                str(new),
            ]
            what = {"work": "answer", "by": "transformers", "new_tokens": new}
            measure(what, lambda command=command: timed(command)[0])
    if given.folder is None:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
