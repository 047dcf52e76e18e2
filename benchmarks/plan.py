"""The commands that `python -m benchmarks.run` runs, in order: what a GPU is asked, in pieces
of a few minutes.

A cell is one command. It writes its rows as they come, so it is small where a command can be
split by method or length.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("kernels", "steps", "prompts", "hosts", "methods", "devices", "checkpoint")
INPUTS = (
    "checkpoint",
    "text",
    "other",
    "code",
    "docs",
    "gsm8k",
)  # that a command may name in braces, beside {out}
WARMED = (
    "decode_step.py",
    "decode_tokens.py",
    "shared.py",
    "host_steps.py",
    "compared.py",
    "prefill.py",
)
WARMING = "--calls 2"
UNTIMED = (
    *("pytest", "kvjax.cli eval", "kvjax.cli perplexity"),
    *("benchmarks.claims", "benchmarks.gsm8k", "hit_rates.py"),
)
UNTIMED += ("long_generation.py", "shared_quality.py")
BESIDE_OTHERS = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false"
}  # a process takes no more of the GPU's memory than it needs


@dataclass(frozen=True)
class Cell:
    """A command of the plan, with its limit."""

    part: str
    name: str
    command: str  # of python: a script of this folder, or -m and a module; {out} is the folder of results
    smoke: str  # options after these, for --smoke
    seconds: int  # that it may take
    env: dict[str, str] = field(default_factory=dict)
    smoke_env: dict[str, str] = field(default_factory=dict)
    resumes: bool = False  # the command goes on where a cut run of it stopped

    @property
    def needs(self) -> list[str]:
        """The inputs that the command names."""
        return [name for name in INPUTS if f"{{{name}}}" in self.command]

    @property
    def kind(self) -> str:
        """What it shares with cells that differ by method, length or data alone."""
        first, *rest = shlex.split(self.command)
        if first == "-m":
            return " ".join(rest[:2] if rest[0] == "kvjax.cli" else rest[:1])
        return f"{first} {rest[0]}" if first == "host_rows.py" else first

    @property
    def warms(self) -> bool:
        """Whether it may be compiled beside others: `WARMING` ends it soon, and it leaves them
        room on the GPU.
        """
        return shlex.split(self.command)[0] in WARMED

    @property
    def timed(self) -> bool:
        """Whether it measures times, so that nothing may run beside it."""
        return self.kind not in UNTIMED

    def words(self, places: dict[str, str], more: str = "") -> list[str]:
        """The arguments of the command, with the options of `more` instead of its own of those
        names, and with `places` for the names in braces.
        """
        words = _replaced(shlex.split(self.command), shlex.split(more))
        for name, place in places.items():
            words = [word.replace(f"{{{name}}}", place) for word in words]
        return words if words[0] == "-m" else [str(ROOT / "benchmarks" / words[0]), *words[1:]]


def _replaced(words: list[str], later: list[str]) -> list[str]:
    """`words` with the options `later` instead of those of the same names."""
    names = {word for word in later if word.startswith("--")}
    kept = []
    drops = False
    for word in words:
        if word.startswith("--"):
            drops = word in names
        if not drops:
            kept.append(word)
    return [*kept, *later]


def cells() -> list[Cell]:
    """All cells, each of another name."""
    parts: tuple[Callable[[], Iterator[Cell]], ...] = (
        _kernels, _steps, _prompts, _hosts, _methods, _devices, _checkpoint,
    )  # fmt: skip
    return [cell for part in parts for cell in part()]


NO_GPU = (
    "aot",
    "refusals",
    "tuned",
    "simulate",
    "kernels",
)  # of tests/kernels, what asks nothing of one


def _kernels() -> Iterator[Cell]:
    files = sorted((ROOT / "tests" / "kernels").glob("test_*.py"))
    asked = [
        str(file.relative_to(ROOT))
        for file in files
        if file.stem.removeprefix("test_") not in NO_GPU
    ]
    command = (
        f"-m pytest {' '.join(asked)} --thorough -q -n 6 --dist worksteal -p no:cacheprovider"
    )
    env = {
        "JAX_PLATFORMS": "cuda",
        "XLA_FLAGS": "",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".15",
        **BESIDE_OTHERS,
    }
    yield Cell(
        "kernels", "tests", command, "-n 0 --collect-only", 480, env, {"JAX_PLATFORMS": "cpu"}
    )


SMALL_STEP = "--quick --lengths 320 --batches 1 --calls 2 --budget 160"


def _steps() -> Iterator[Cell]:
    for length in (131072, 32768, 8192):
        for method in ("fier", "quest", "pariskv", "logquant", "full"):
            command = f"decode_step.py --methods cudnn,{method} --lengths {length} --implementations default"
            yield Cell(
                "steps",
                f"decode_step {method} {length}",
                f"{command} --out {{out}}/decode_step.json",
                SMALL_STEP,
                120,
            )
    for method in ("full", "fier", "quest", "pariskv", "logquant"):
        command = (
            f"decode_tokens.py --methods {method} --tokens 1,8 --out {{out}}/decode_tokens.json"
        )
        yield Cell(
            "steps", f"decode_tokens {method}", command, f"{SMALL_STEP} --tokens 1,2", 120
        )
    for sweep in ("top_k", "select_pages"):
        yield Cell("steps", sweep, f"{sweep}.py --out {{out}}/{sweep}.json", "--quick", 300)
    for method in ("cudnn", "full", "fier", "quest", "pariskv", "logquant", "freekv"):
        command = f"end_to_end.py --methods {method} --lengths 8192,32768,131072 --out {{out}}/end_to_end.json"
        yield Cell(
            "steps", f"end_to_end {method}", command,
            "--quick --lengths 300 --batches 1 --steps 8 --block 4 --budget 288", 300, resumes=True,
        )  # fmt: skip
    for method in ("fier", "quest"):
        command = f"shared.py --methods {method} --out {{out}}/shared.json"
        yield Cell("steps", f"shared {method}", command, f"{SMALL_STEP} --shares 1,2", 200)


POOL = {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "100"}


def _prompts() -> Iterator[Cell]:
    ttft = "ttft.py --out {out}/ttft.json"
    yield Cell("prompts", "ttft floor", f"{ttft} --methods floor", "--quick", 150)
    for method in (
        "full",
        "fier",
        "quest",
        "pariskv",
        "logquant",
        "kivi",
        "fier:host",
        "pariskv:host",
        "freekv",
    ):
        yield Cell("prompts", f"ttft {method}", f"{ttft} --methods {method}", "--quick", 200)
    million = "million.py --out {out}/million.json"
    for method in ("full", "fier", "quest", "pariskv", "logquant"):
        yield Cell(
            "prompts", f"million {method}", f"{million} --methods {method}", "--quick", 240
        )
    for method in ("fier:host", "pariskv:host", "freekv"):
        command = f"{million} --methods {method} --length 524288"
        yield Cell("prompts", f"half a million {method}", command, "--quick", 300, POOL)
    yield Cell("prompts", "pinned", "pinned.py --out {out}/pinned.json", "--quick", 200)
    for method in ("fier", "quest", "pariskv", "logquant", "kivi"):
        command = f"prefill.py --methods full,{method} --out {{out}}/prefill.json"
        small = "--quick --lengths 320 --batches 1 --calls 2"
        yield Cell("prompts", f"prefill {method}", command, small, 120)


def _hosts() -> Iterator[Cell]:
    small = (
        "--quick --lengths 512 --budget 160 --hot 256 --calls 2 --layers 1 --correlations 0.9"
    )
    steps = "host_steps.py --out {out}/host_steps.json"
    for method in ("fier", "quest", "pariskv"):
        yield Cell("hosts", f"host_steps {method}", f"{steps} --methods {method}", small, 240)
    grown = "--shape qwen --lengths 262144,786432 --hot 0 --correlations 0 --layers 2"
    yield Cell("hosts", "host_steps growth", f"{steps} {grown}", f"{small} --hot 0", 240)
    for what in ("host_rows", "host_append", "footprint"):
        yield Cell(
            "hosts", f"host_rows {what}", f"host_rows.py {what} --out {{out}}", "--quick", 300
        )
    yield Cell("hosts", "hot_pages", "hot_pages.py --out {out}", "--quick", 300)
    memory = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".95",
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "82",
    }
    float8 = "--float8 --rows 48 --hot 8192 --host-bytes 82e9"
    for steady, how in itertools.product(("0.9", "0", "1"), ("", float8)):
        command = f"host_batch.py --steady {steady} {how} --out {{out}}/host_batch.json"
        small = "--quick --length 512 --budget 160 --hot 256 --steps 8 --block 4 --rows 1"
        name = f"host_batch {'float8 ' if how else ''}{steady}"
        yield Cell("hosts", name, command, small, 400, memory)


COMPARED = (
    "full",
    "fier",
    "pariskv",
    "quest",
    "freekv",
    "logquant",
    "kivi",
    "exact",
    "shadowkv",
)
COMPARED += ("shadowkv:host=false", "mikv", "adakv", "snapkv", "arkvale", "pqcache", "magicpig")
COMPARED += (
    "streaming_llm",
    "logevict",
    "h2o",
    "tova",
    "raas",
    "razorattention",
    "duoattention",
)


def _methods() -> Iterator[Cell]:
    for length in (32768, 131072):
        for method in COMPARED:
            command = f"compared.py --methods cudnn,{method} --lengths {length} --out {{out}}/compared.json"
            small = "--quick --lengths 1024 --budget 480 --calls 2 --chunk 512"
            yield Cell("methods", f"{method} {length}", command, small, 150)


def _devices() -> Iterator[Cell]:
    two = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    for method in ("full", "fier", "quest", "pariskv"):
        command = f"devices.py --methods {method} --out {{out}}/devices.json --seconds 300"
        yield Cell(
            "devices", method, command, "--quick --placements data=2", 400, smoke_env=two
        )
    command = "devices.py --methods full --no-check --prompt 32768 --out {out}/devices.json --seconds 300"
    small = "--quick --prompt 64 --placements model=2"
    yield Cell("devices", "prompt", command, small, 400, smoke_env=two)


# As in docs/real_models.md: settings with which a method has budget for more than its sink and
# window.
SELECTING = ("fier", "pariskv:sink=4,local=16", "quest", "freekv:sink=0,local=32,page=16")
WHOLE = ("full", "logquant", "kivi")
EVICTING = ("snapkv", "streaming_llm")
# Presets that no other table of the page has, but for those that need settings of the model.
OTHERS = ("exact", "tova", "logevict", "adakv", "mikv", "h2o", "raas", "pqcache:local=16")
OTHERS += ("magicpig:local=16,chunk=32", "arkvale:sink=0,local=32,page=16")
# The papers' settings, at the budgets that fit them; 1000000 is the theta of Qwen2.5, and 40 a
# rank of 16 %.
PAPERS = {
    "freekv": ("full", "freekv:dense_layers=1"),
    "arkvale": ("arkvale", "arkvale:per=layer,topk=1024"),
    "shadowkv": ("shadowkv:rope_theta=1000000,rank=40,sink=0",),
    "pariskv": ("pariskv:dense_layers=0",),
    "pqcache": ("pqcache:dense_layers=0",),
    "magicpig": ("magicpig:dense_layers=1",),
}
PAPERS_SMALL = "--length 448 --samples 1 --batch 1 --dtype float32 --budget 512"


def _checkpoint() -> Iterator[Cell]:
    small = "--length 192 --samples 1 --batch 1 --dtype float32"

    def scored(
        name: str, out: str, options: str, caches: Sequence[str], budgets: str, small: str
    ) -> Iterator[Cell]:
        """A process reads each prompt once for all of its caches, whose programs compile beside
        one another.
        """
        every = " ".join(f"--cache {cache}" for cache in caches)
        command = (
            f"-m kvjax.cli eval {{checkpoint}} {options} {every} --budget {budgets} "
            f"--parallel 8 --out {{out}}/{out}"
        )
        smoke = small if "--budget" in small else f"{small} --budget 64"
        yield Cell("checkpoint", name, command, smoke, 480, resumes=True)

    needles = (
        "--task needles --task pass_key --length 16384 --samples 100 --batch 5 --text {text}"
    )
    caches = (*WHOLE, *SELECTING, *EVICTING)
    yield from scored(
        "needles", "needles", needles, caches, "32,64,128,256,512,1024,2048", small
    )
    yield from scored("needles of others", "needles", needles, OTHERS, "256,1024", small)
    for name, caches in PAPERS.items():
        yield from scored(
            f"needles, {name} at its paper's",
            "needles",
            needles,
            caches,
            "1024,2048",
            PAPERS_SMALL,
        )
    command = (
        "shared_quality.py {checkpoint} --text {text} --calibrate {other} --out {out}/shared"
    )
    few = "--quick --methods fier --shares 1,2 --dtype float32"
    yield Cell("checkpoint", "shared selections", command, few, 480, resumes=True)
    for length in (4096, 8192, 16384, 32768):
        ruler = f"--task {{ruler_task}} --length {length} --samples 100 --batch {163840 // length} --text {{text}}"
        caches = ("full", "exact", *SELECTING[:3])
        yield from scored(
            f"ruler {length}", "ruler", ruler, caches, "1024", small.replace("192", "448")
        )
        caches = (SELECTING[3], *WHOLE[1:], "snapkv")
        yield from scored(
            f"ruler of others {length}",
            "ruler",
            ruler,
            caches,
            "1024",
            small.replace("192", "448"),
        )
    short = tuple(
        cache.replace("pariskv:sink=4,local=16", "pariskv:sink=4,local=16,dense_below=0")
        for cache in SELECTING
    )
    caches = (*WHOLE, "logquant:bits=4", "kivi:bits=4", *short, "streaming_llm")
    every = " ".join(f"--cache {cache}" for cache in caches)
    command = f"-m benchmarks.gsm8k {{checkpoint}} --data {{gsm8k}} --shots 0 --chat --batch 132 --parallel 5 {every}"
    few = "--samples 1 --batch 1 --budget 64 --max-new-tokens 8 --dtype float32"
    command = f"{command} --budget 64,128,256,512 --out {{out}}/gsm8k"
    yield Cell("checkpoint", "gsm8k", command, few, 480, resumes=True)
    every = " ".join(f"--cache {cache}" for cache in (*WHOLE, *short, *EVICTING))
    every = every.replace("freekv:sink=0,local=32,page=16", "freekv:sink=16,local=128,page=16")
    few = "--length 320 --steps 4 --passages 1 --batch 1 --budget 256 --dtype float32"
    for kind, length in (*itertools.product(("text", "code"), (4096, 16384)), ("docs", 4096)):
        options = f"--text {{{kind}}} --length {length} --steps 256 --passages 8 --batch 4 --budget 1024 {every}"
        command = f"-m kvjax.cli perplexity {{checkpoint}} {options} --parallel 8 --out {{out}}/perplexity_{kind}"
        yield Cell("checkpoint", f"perplexity {kind} {length}", command, few, 480, resumes=True)
    live = "--length 192 --steps 4 --budget 32 --dtype float32"
    for what, length in (
        ("groups", 16384),
        ("queries", 16384),
        ("logquant", 8192),
        ("drift", 4096),
        ("paris", 4096),
    ):
        more = " --new-tokens 2048" if what in ("drift", "paris") else ""
        command = f"-m benchmarks.claims {{checkpoint}} --text {{text}} --what {what} --length {length}{more}"
        smoke = f"{live} --new-tokens 32" if what in ("drift", "paris") else live
        yield Cell(
            "checkpoint", f"claims {what}", f"{command} --out {{out}}/claims", smoke, 480
        )
    for what in ("recall", "group_reduce"):
        command = f"-m benchmarks.claims {{checkpoint}} --text {{text}} --what {what} --length 4K,16K --budget 1024"
        smoke = "--length 160 --steps 4 --budget 64 --dtype float32"
        yield Cell(
            "checkpoint", f"measure {what}", f"{command} --out {{out}}/measure", smoke, 480
        )
    command = "hit_rates.py {checkpoint} --text {text} --length 16384 --budget 1024 --out {out}/hit_rates.json"
    yield Cell(
        "checkpoint",
        "hit_rates",
        command,
        "--length 128 --steps 8 --budget 64 --dtype float32",
        480,
    )
    command = "speculation.py {checkpoint} --text {text} --out {out}/speculation.json"
    few = "--prompts 1 --tokens 64 --new-tokens 4 --dtype float32 --methods full"
    yield Cell("checkpoint", "drafts", command, few, 480)
    command = "long_generation.py {checkpoint} --text {text} --out {out}/long_generation.json"
    few = (
        "--rows 1 --prompt 64 --new-tokens 8 --budget 32 --dtype float32 --methods 'full fier'"
    )
    yield Cell("checkpoint", "long generation", command, few, 540, resumes=True)
    for size in (
        "16384x1",
        "16384x8",
        "4096x1",
        "32768x1",
        "4096x8",
        "32768x8",
        "4096x32",
        "16384x32",
        "32768x32",
    ):
        command = f"real_speed.py {{checkpoint}} --text {{text}} --sizes {size} --out {{out}}/real_speed.json"
        few = "--sizes 64x1 --steps 4 --block 2 --budget 32 --dtype float32 --cudnn xla --methods 'cudnn fier'"
        yield Cell("checkpoint", f"speed {size}", command, few, 480, resumes=True)
    command = (
        "real_speed.py {checkpoint} --text {text} --sizes 16384x1,4096x1,16384x8,32768x1,4096x8 "
        "--out {out}/real_speed_others.json"
    )
    others = " ".join(("full", *OTHERS, "streaming_llm"))
    few = "--sizes 256x1 --steps 4 --block 2 --budget 64 --dtype float32 --methods 'exact h2o'"
    yield Cell(
        "checkpoint",
        "speed of others",
        f"{command} --methods '{others}'",
        few,
        480,
        resumes=True,
    )
