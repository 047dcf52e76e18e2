"""Mutation tests of a room: which small faults, planted one at a time, its own tests find.

    pip install cosmic-ray==8.7.0
    python benchmarks/mutants.py policies --sample 40 --seed 0

mutates a copy of the tree, a number drawn at random, and runs the tests of the mutated module,
then those of the room on mutants that live. It lists each mutant that lives as a diff; a person
says which of them are equivalent. A line of JSON for each mutant goes to --out, and a run that
stops goes on from there. This takes seconds a mutant that is found and minutes for one that
lives, so it is for a maintainer, and not for CI. mutmut is no choice here: it forks a process
that has run the tests, and jax does not survive a fork.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Boundaries, signs, flags and numbers by one; not the replacement of each operator by all
# others.
OPERATORS = re.compile(
    r"core/(ReplaceComparisonOperator_(Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Lt_GtE|Gt_LtE|Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is)"
    r"|ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_Add|Mul_FloorDiv|FloorDiv_Mul|Div_Mul|Mod_FloorDiv|BitAnd_BitOr"
    r"|BitOr_BitAnd)|ReplaceUnaryOperator_(Delete_USub|Delete_Invert|Delete_Not)|NumberReplacer|AddNot"
    r"|Replace(TrueWithFalse|FalseWithTrue|AndWithOr|OrWithAnd|BreakWithContinue|ContinueWithBreak))"
)
# What holds for the parts of all rooms.
SETTINGS = "tests/test_settings.py tests/test_bytes.py tests/test_first_mistakes.py"
CONTEXT = "tests/devices/test_context.py"  # in a process of its own, of 8 devices
SPLIT = f"{CONTEXT}::test_tokens_on_several_devices_are_read_as_on_one"
DEVICES = "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=8"
# For each room: its modules, the tests of all of it, and by module those that come first.
ROOMS: dict[str, tuple[str, str, dict[str, str]]] = {
    "policies": (
        "kvjax/policies/*.py",
        f"tests/policies tests/laws tests/test_attention.py tests/cache {SETTINGS} {CONTEXT}",
        {
            "zones": "tests/policies/test_boundaries.py tests/policies/test_zones.py tests/selectors/test_fier.py",
            "retrieval": "tests/policies/test_boundaries.py tests/selectors/test_fier.py",
            "full": f"tests/policies/test_boundaries.py tests/test_attention.py {SPLIT}",
            "compressed": "tests/policies/test_reports.py tests/policies/test_logquant.py",
            "per_head": "tests/policies/test_reports.py tests/presets/test_heads.py",
            "speculative": "tests/policies/test_speculative.py tests/cache/test_capacity.py",
            "selected": "tests/policies/test_zones.py tests/selectors/test_fier.py",
            "policy": "tests/test_attention.py tests/policies/test_boundaries.py",
        },
    ),
    "selectors": (
        "kvjax/selectors/*.py",
        f"tests/selectors tests/laws tests/contrib/test_arkvale.py {SETTINGS} {CONTEXT}",
        {
            "pages": "tests/selectors/test_pending.py tests/selectors/test_pages.py",
            "fier": "tests/selectors/test_fier.py tests/test_bytes.py",
            "paris": f"tests/selectors/test_paris.py tests/test_settings.py {SPLIT}",
            "pending": "tests/selectors/test_pending.py tests/selectors/test_pages.py tests/selectors/test_fier.py",
            "selector": "tests/selectors/test_pages.py tests/selectors/test_fier.py",
            "exact": "tests/selectors/test_fier.py tests/selectors/test_pages.py tests/test_bytes.py",
        },
    ),
    "contrib": (
        "kvjax/contrib/*.py",
        f"tests/contrib tests/laws tests/test_oracles.py {SETTINGS} {CONTEXT}",
        {
            "magicpig": f"tests/contrib/test_magicpig.py tests/policies/test_reports.py {SPLIT}",
            "razorattention": "tests/contrib/test_adakv.py tests/presets/test_heads.py",
        },
    ),
    "stores": (
        "kvjax/stores/*.py",
        "tests/stores tests/laws tests/policies/test_zones.py tests/policies/test_boundaries.py "
        f"tests/policies/test_speculative.py tests/serve/test_prefixes.py {SETTINGS} {CONTEXT}",
        {
            "demotion": "tests/policies/test_boundaries.py tests/policies/test_logquant.py",
            "dense": "tests/policies/test_boundaries.py tests/selectors/test_fier.py",
            "store": "tests/stores/test_host.py tests/policies/test_speculative.py tests/stores/test_quantized.py",
            "host": "tests/stores/test_host.py tests/test_settings.py",
            "prefixed": "tests/serve/test_prefixes.py",
        },
    ),
    "serve": (
        "kvjax/serve/*.py",
        "tests/serve tests/cache tests/test_attention_variants.py",
        {
            "beginnings": "tests/serve/test_kept_prefixes.py tests/serve/test_engine.py",
            "kept_files": "tests/serve/test_kept_prefixes.py",
            "requests": "tests/serve/test_engine.py",
            "slots": "tests/serve/test_engine.py tests/serve/test_kept_prefixes.py",
        },
    ),
    "evictors": (
        "kvjax/evictors/*.py",
        f"tests/evictors tests/policies tests/contrib tests/laws {SETTINGS}",
        {
            "base": "tests/policies/test_bounds.py tests/policies/test_evicting.py",
            "keys": "tests/policies/test_bounds.py tests/policies/test_evicting.py tests/evictors",
            "queries": "tests/policies/test_evicting.py tests/evictors",
            "scores": "tests/policies/test_bounds.py tests/policies/test_evicting.py",
        },
    ),
    "drafts": (
        "kvjax/generation/drafts.py",
        "tests/generation tests/serve/test_self_draft.py tests/models/test_hybrid.py",
        {"drafts": "tests/generation/test_drafts.py tests/generation/test_self_draft.py"},
    ),
    "sparse": (
        "kvjax/ops/key_blocks.py",
        "tests/generation/test_sparse_prompt.py tests/ops",
        {"key_blocks": "tests/generation/test_sparse_prompt.py"},
    ),
    "sampling": (
        "kvjax/generation/sampling.py",
        "tests/generation tests/models/test_text.py tests/test_settings.py",
        {},
    ),
    "saving": (
        "kvjax/cache/saving.py",
        f"tests/cache {CONTEXT}",
        {"saving": "tests/cache/test_saving.py tests/cache/test_damaged_saves.py"},
    ),
    "rope": (
        "models/rope.py",
        "tests/models/test_rope.py tests/models/test_rope_by_length.py tests/models/test_goldens.py",
        {},
    ),
    "chat": (
        "models/chat.py",
        "tests/models/test_chat.py tests/models/test_published_templates.py",
        {},
    ),
}


def first_tests(room: str, module: Path) -> str:
    _, whole, by_module = ROOMS[room]
    own = [path for path in (ROOT / "tests").rglob(f"test_{module.stem}.py")]
    return by_module.get(module.stem) or (str(own[0].relative_to(ROOT)) if own else whole)


def annotations(source: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Where annotations are: a fault there changes nothing."""
    for node in ast.walk(ast.parse(source)):
        noted = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        for part in noted:
            if isinstance(part, ast.AST):
                yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)  # type: ignore[attr-defined]


def mutants(room: str) -> list[Any]:
    """All mutants of a room, in order."""
    from cosmic_ray.commands.init import _all_work_items

    found = []
    for path in sorted(Path().glob(ROOMS[room][0])):
        if path.name == "__init__.py":
            continue
        source = path.read_text()
        outside, lines = list(annotations(source)), source.splitlines(keepends=True)
        for item in _all_work_items([path], {}):
            (one,) = item.mutations
            noted = any(first <= one.start_pos < last for first, last in outside)
            row, column = one.start_pos
            before = "".join(
                [*lines[max(row - 3, 0) : row - 1], lines[row - 1][:column]]
            ).rstrip()
            # `*, x` in arguments is no product
            star = "Operator_Mul" in one.operator_name and before[-1] in "([{,=:"
            if OPERATORS.fullmatch(one.operator_name) and not noted and not star:
                found.append(one)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("room", choices=ROOMS)
    parser.add_argument(
        "--sample", type=int, default=40, help="mutants, drawn at random; 0 for all"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument(
        "--python", default=sys.executable, help="of the environment in which the tests run"
    )
    parser.add_argument("--prefix", default="nice -n 19", help="before each command")
    parser.add_argument("--seconds", type=int, default=900, help="limit of a run of tests")
    parser.add_argument(
        "--again", action="store_true", help="run the tests of the room on mutants that live"
    )
    given = parser.parse_args()
    from cosmic_ray.mutating import mutate_and_test

    out = given.out.resolve()
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    known = {(one["module"], one["operator"], one["occurrence"]) for one in done}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(
            ROOT,
            copy,
            symlinks=True,
            ignore=shutil.ignore_patterns(".git", ".venv*", "__pycache__"),
        )
        os.chdir(copy)
        os.environ.update(PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=str(copy))
        whole = mutants(given.room)
        drawn = random.Random(given.seed).sample(
            whole, min(given.sample or len(whole), len(whole))
        )
        print(
            f"{given.room}: {len(drawn)} of {len(whole)} mutants, seed {given.seed}", flush=True
        )

        def run(one: Any, tests: str) -> Any:
            pytest = f"{given.prefix} {given.python} -m pytest -x -q --no-header --tb=line -p no:cacheprovider"
            split = [path for path in tests.split() if path.startswith("tests/devices")]
            whole = [path for path in tests.split() if path not in split]
            commands = [" ".join([pytest, *whole])] if whole else []
            commands += (
                [" ".join(["env", f"'XLA_FLAGS={DEVICES}'", pytest, *split])] if split else []
            )
            return mutate_and_test(
                [one], f"bash -c {shlex.quote(' && '.join(commands))}", given.seconds
            )

        for one in drawn:
            key = str(one.module_path), one.operator_name, one.occurrence
            if key in known:
                continue
            result = run(one, first_tests(given.room, one.module_path))
            if given.again and result.test_outcome == "survived":
                result = run(one, ROOMS[given.room][1])
            said = (result.output or "").strip().splitlines()[-1:]
            told = {
                "room": given.room,
                "outcome": str(result.test_outcome.value),
                "said": said,
                "diff": result.diff,
            }
            told |= {
                "module": key[0],
                "operator": key[1],
                "occurrence": key[2],
                "line": one.start_pos[0],
            }
            with out.open("a") as file:
                file.write(json.dumps(told) + "\n")
            done.append(told)
            print(f"{told['outcome']:9} {key[0]}:{told['line']} {key[1]} {said}", flush=True)
    counts = Counter(one["outcome"] for one in done if one["room"] == given.room)
    print(dict(counts))
    for one in done:
        if one["room"] == given.room and one["outcome"] == "survived":
            print(one["diff"])


if __name__ == "__main__":
    main()
