"""Quality of a published model when layers share selections: answers and perplexity, by how
many layers share.

    python benchmarks/shared_quality.py MODEL --text book.txt --calibrate other-book.txt \\
        [--methods fier,pariskv,quest]

First `calibrate.py` finds, for each method and share, the layers that select and the KV heads
that serve those of others, on a separate text. Then `kvjax eval` asks for needles and pass
keys, with the question decoded, and `kvjax perplexity` scores a text: for every n-th layer
("fier:share=4") and for the layers found ("fier:anchors=FILE"), at one budget. Every command is
printed, and continues where it was interrupted. The folder of `--out` has a file for each pair
of method and share, and the folders of results of the two commands.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from named import names_of

from kvjax.presets import REGISTRY

TASKS = ("needles", "pass_key")
DENSE = 2  # first layers that attend to everything, as in the two commands


def caches(methods: Sequence[str], shares: Sequence[int], folder: Path) -> list[str]:
    """The caches that are compared, without their budgets."""
    own = [
        name
        for method in methods
        for share in shares
        for name in (
            [method]
            if share == 1
            else [f"{method}:share={share}", f"{method}:anchors={plan(folder, method, share)}"]
        )
    ]
    return ["full", *own]


def plan(folder: Path, method: str, share: int) -> Path:
    return folder / f"calibrate_{method}_{share}.json"


def start(*words: object) -> subprocess.Popen[bytes]:
    """Begins a module of Python with its arguments, and prints the command."""
    command = [sys.executable, "-m", *(str(word) for word in words)]
    print("$", shlex.join(command), flush=True)
    return subprocess.Popen(command)


def end(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Waits for all, and ends with the exit status of the first that failed."""
    for code in [one.wait() for one in running]:
        if code:
            sys.exit(code)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path, help="a model in the format of Hugging Face")
    parser.add_argument(
        "--text", type=Path, required=True, help="UTF-8 file to hide needles in, and to score"
    )
    parser.add_argument(
        "--calibrate", type=Path, required=True, help="UTF-8 file of another text"
    )
    parser.add_argument("--methods", type=names_of(REGISTRY), default="fier,pariskv,quest")
    parser.add_argument("--shares", default="1,2,4,8")
    parser.add_argument(
        "--length",
        type=int,
        default=16384,
        help="tokens of a prompt, and of the context of a text",
    )
    parser.add_argument(
        "--share-of-length", type=float, default=0.11, help="budget, as a share of the length"
    )
    parser.add_argument("--calibrate-length", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--batch", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=256, help="tokens that are scored in each of 8 passages"
    )
    parser.add_argument(
        "--parallel", type=int, default=8, help="caches that decode at the same time"
    )
    parser.add_argument("--dtype")
    parser.add_argument(
        "--out", type=Path, default=Path("shared"), help="folder of all results"
    )
    parser.add_argument(
        "--quick", action="store_true", help="short prompts, one of each: only whether it runs"
    )
    given = parser.parse_args(args)
    if given.quick:
        given.length, given.calibrate_length, given.samples, given.batch, given.steps = (
            320,
            320,
            1,
            1,
            4,
        )
        given.share_of_length, given.parallel = 0.5, 2
    methods, shares = (
        given.methods,
        [int(share) for share in given.shares.split(",")],
    )
    budget = int(given.length * given.share_of_length)
    dtype = ["--dtype", given.dtype] if given.dtype else []
    given.out.mkdir(parents=True, exist_ok=True)
    found = []
    for method in methods:
        for share in shares:
            file = plan(given.out, method, share)
            if share > 1 and not file.is_file():
                own = int(given.calibrate_length * given.share_of_length)
                what = [
                    "--cache",
                    f"{method}:budget={own},dense_layers={DENSE}",
                    "--share",
                    share,
                    "--length",
                    given.calibrate_length,
                ]
                text = ["--text", given.calibrate, "--steps", 4 if given.quick else 16]
                found.append(
                    start(
                        "benchmarks.calibrate",
                        given.model_dir,
                        *text,
                        *what,
                        *dtype,
                        "--out",
                        file,
                    )
                )
    end(found)
    compared = [
        word for cache in caches(methods, shares, given.out) for word in ("--cache", cache)
    ]
    same = [
        "--text",
        given.text,
        "--length",
        given.length,
        "--parallel",
        given.parallel,
        *dtype,
        *compared,
    ]
    tasks = [word for task in TASKS for word in ("--task", task)]
    sizes = ["--samples", given.samples, "--batch", given.batch, "--budget", budget]
    end(
        [
            start(
                "kvjax.cli",
                "eval",
                given.model_dir,
                *tasks,
                *same,
                *sizes,
                "--out",
                given.out / "eval",
            )
        ]
    )
    passages = 1 if given.quick else 8
    sizes = ["--passages", passages, "--batch", min(4, passages), "--steps", given.steps]
    sizes += ["--share", given.share_of_length]
    end(
        [
            start(
                "kvjax.cli",
                "perplexity",
                given.model_dir,
                *same,
                *sizes,
                "--out",
                given.out / "perplexity",
            )
        ]
    )


if __name__ == "__main__":
    main()
