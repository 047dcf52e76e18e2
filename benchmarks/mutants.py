"""Mutation tests of a room: which small faults, planted one at a time, its own tests find.

    pip install cosmic-ray==8.7.0 coverage pytest-cov
    python benchmarks/mutants.py serve --only engine --sample 40 --seed 0

mutates a copy of the tree, a number drawn at random. It first runs the tests of the module once,
to see which of them reach which line, and then runs on each mutant those that reach its line,
the fastest first. It lists each mutant that lives as a diff. --again runs all tests of the room
on those that lived.

A line of JSON for each mutant goes to --out, and a run that stops goes on from there. --record
writes what came of them to a file of results. Whether a mutant that lives is equivalent is for a
person to say: "equivalent" in that file holds the reason, and stays when the file is written
again.

This takes seconds a mutant that is found and minutes for one that lives, so it is for a
maintainer, and not for CI. mutmut is no choice here: it forks a process that has run the tests,
and jax does not survive a fork.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Boundaries, signs, flags and numbers by one, and calls that are left out; not the replacement of
# each operator by all others.
OPERATORS = re.compile(
    r"calls/.*|core/(ReplaceComparisonOperator_(Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Lt_GtE|Gt_LtE|Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is)"
    r"|ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_Add|Mul_FloorDiv|FloorDiv_Mul|Div_Mul|Mod_FloorDiv|BitAnd_BitOr"
    r"|BitOr_BitAnd)|ReplaceUnaryOperator_(Delete_USub|Delete_Invert|Delete_Not)|NumberReplacer|AddNot"
    r"|Replace(TrueWithFalse|FalseWithTrue|AndWithOr|OrWithAnd|BreakWithContinue|ContinueWithBreak))"
)
# What holds for the parts of all rooms.
SETTINGS = "tests/test_settings.py tests/test_bytes.py tests/test_first_mistakes.py"
CONTEXT = "tests/devices/test_context.py"  # in a process of its own, of 8 devices
ENGINE = "tests/serve/test_engine.py"
KEPT = "tests/serve/test_kept_prefixes.py"
SPLIT = f"{CONTEXT}::test_tokens_on_several_devices_are_read_as_on_one"
DEVICES = "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=8"
# For each room: its modules, separated by spaces, the tests of all of it, and by module those
# that come first.
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
            "beginnings": f"tests/serve/test_beginnings.py {KEPT} {ENGINE}",
            "engine": f"{ENGINE} {KEPT}",
            "keeping": f"{KEPT} {ENGINE}",
            "kept_files": KEPT,
            "prefixes": "tests/serve/test_prefixes.py",
            "requests": ENGINE,
            "scheduler": f"tests/serve/test_scheduler.py {ENGINE}",
            "slots": f"tests/serve/test_beginnings.py {ENGINE} {KEPT} tests/serve/test_prefixes.py",
        },
    ),
    "evictors": (
        "kvjax/evictors/*.py",
        f"tests/evictors tests/policies tests/contrib tests/laws {SETTINGS}",
        {
            "base": "tests/evictors/test_whole_step.py tests/policies/test_bounds.py tests/policies/test_evicting.py",
            "keys": "tests/policies/test_bounds.py tests/policies/test_evicting.py tests/evictors",
            "queries": "tests/evictors tests/policies/test_own_weights.py",
            "scores": "tests/policies/test_bounds.py tests/policies/test_evicting.py",
        },
    ),
    "drafts": (
        "kvjax/generation/drafts.py kvjax/generation/kept_selections.py kvjax/policies/kept.py",
        "tests/generation tests/serve/test_self_draft.py tests/models/test_hybrid.py",
        {
            "drafts": "tests/generation/test_drafts.py tests/generation/test_self_draft.py",
            "kept": "tests/generation/test_kept_selections.py",
        },
    ),
    "sparse": (
        "kvjax/ops/key_blocks.py",
        "tests/generation/test_sparse_prompt.py tests/ops",
        {"key_blocks": "tests/ops/test_key_blocks.py tests/generation/test_sparse_prompt.py"},
    ),
    "prompts": (
        "kvjax/generation/staging.py kvjax/policies/staged.py",
        "tests/generation tests/policies tests/serve tests/laws",
        {
            "staged": "tests/generation/test_cut_of_prompt.py",
            "staging": f"tests/generation/test_cut_of_prompt.py {ENGINE}",
        },
    ),
    "sinks": (
        "kvjax/numerics/partial.py kvjax/call.py",
        "tests/numerics tests/ops tests/test_attention.py tests/test_attention_variants.py tests/test_shapes.py",
        {
            "partial": "tests/numerics/test_partial.py tests/test_attention_variants.py tests/ops",
            "call": "tests/test_attention_variants.py tests/test_shapes.py tests/test_attention.py",
        },
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


@dataclass(frozen=True)
class Reach:
    """Which tests reach which lines of a module, by one run of them."""

    seconds: dict[str, float]  # by test
    tests: dict[int, list[str]]  # by line

    def of(self, line: int, most: float) -> list[str]:
        """The tests that reach a line, the fastest first, as many as take `most` seconds."""
        chosen, total = list[str](), 0.0
        for test in sorted(self.tests.get(line, ()), key=self._seconds_of):
            total += self._seconds_of(test)
            if chosen and total > most:
                break
            chosen.append(test)
        return chosen

    def _seconds_of(self, test: str) -> float:
        return self.seconds.get(test, 0.0)


def measured_reach(module: Path, tests: str, run: str) -> Reach:
    """Runs tests, and notes which lines of a module each of them reaches."""
    from coverage import CoverageData

    # By its folder: to find a package, coverage imports it, and jax does not bear a second import.
    measuring = f"--cov={module.parent} --cov-context=test --cov-report= --durations=0 -vv"
    done = subprocess.run(
        [*run.split(), *measuring.split(), *tests.split()],
        env=os.environ | {"COVERAGE_FILE": f".coverage.{module.stem}"},
        capture_output=True,
        text=True,
    )
    told = done.stdout
    if done.returncode:  # each mutant would count as found
        raise SystemExit(
            f"{tests} fails before {module} is mutated; mend that first:\n{told[-2000:]}{done.stderr[-2000:]}"
        )
    seconds = defaultdict[str, float](float)
    for took, test in re.findall(r"^([0-9.]+)s (?:call|setup) +(\S.*)$", told, re.MULTILINE):
        seconds[test] += float(took)
    data = CoverageData(f".coverage.{module.stem}")
    data.read()
    (path,) = [file for file in data.measured_files() if file.endswith(str(module))] or [""]
    by_line = {
        line: sorted({context.split("|")[0] for context in contexts if context})
        for line, contexts in data.contexts_by_lineno(path).items()
    }
    return Reach(dict(seconds), by_line)


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


def leave_out_calls() -> None:
    """Gives cosmic-ray one more operator: a call whose result nobody takes is left out."""
    import parso
    from cosmic_ray import plugins
    from cosmic_ray.operators.operator import Operator

    class LeaveOutCall(Operator):  # type: ignore[misc]
        def mutation_positions(self, node: Any) -> Iterator[Any]:
            if node.type == "expr_stmt" or node.type not in ("power", "atom_expr"):
                return
            alone = node.parent.type == "simple_stmt" and node.get_last_leaf().value == ")"
            if alone:
                yield node.start_pos, node.end_pos

        def mutate(self, node: Any, index: int) -> Any:
            return parso.python.tree.Keyword(
                "pass", node.start_pos, node.get_first_leaf().prefix
            )

        @classmethod
        def examples(cls) -> tuple[()]:
            return ()

    plugins.OPERATOR_PROVIDERS["calls"] = {"LeaveOutCall": LeaveOutCall}


def mutants(room: str, only: Iterable[str]) -> list[Any]:
    """All mutants of a room, or of some of its modules, in order."""
    from cosmic_ray.commands.init import _all_work_items

    found = []
    modules = sorted(path for glob in ROOMS[room][0].split() for path in Path().glob(glob))
    for path in modules:
        if path.name == "__init__.py" or (only and path.stem not in only):
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


def copied_tree(folder: str) -> Path:
    copy = Path(folder) / "tree"
    shutil.copytree(
        ROOT,
        copy,
        symlinks=True,
        ignore=shutil.ignore_patterns(".git", ".venv*", "__pycache__"),
    )
    return copy


class Trial:
    """Runs tests on mutants of the tree in the working directory."""

    def __init__(self, room: str, python: str, *, seconds: int, most: float) -> None:
        self._room = room
        self._pytest = f"{python} -m pytest -x -q --no-header --tb=line -p no:cacheprovider"
        self._seconds = seconds
        self._most = most
        self._reaches = dict[Path, Reach]()

    def by_line(self, one: Any) -> Any:
        """The outcome by the tests that reach the line of a mutant; by all first tests of its
        module if none does, as for a constant.
        """
        first = first_tests(self._room, one.module_path)
        if one.module_path not in self._reaches:
            run = self._pytest.replace(" -x", "")
            self._reaches[one.module_path] = measured_reach(one.module_path, first, run)
        reached = self._reaches[one.module_path].of(one.start_pos[0], self._most)
        return self.by_tests(one, reached or first.split())

    def by_room(self, one: Any) -> Any:
        """The outcome by all tests of the room."""
        return self.by_tests(one, ROOMS[self._room][1].split())

    def by_tests(self, one: Any, tests: list[str]) -> Any:
        from cosmic_ray.mutating import mutate_and_test

        split = [path for path in tests if path.startswith("tests/devices")]
        whole = [path for path in tests if path not in split]
        commands = [" ".join([self._pytest, *map(shlex.quote, whole)])] if whole else []
        if split:
            commands.append(f"env 'XLA_FLAGS={DEVICES}' {self._pytest} {' '.join(split)}")
        return mutate_and_test(
            [one], f"bash -c {shlex.quote(' && '.join(commands))}", self._seconds
        )


def record(done: Iterable[dict[str, Any]], path: Path, seed: int, tree: Path) -> None:
    """Writes what came of mutants of a tree to a file of results, beside what it has of others;
    without those of a module that has changed since.
    """
    before = json.loads(path.read_text()) if path.exists() else {"modules": {}, "mutants": []}
    sources = {one["module"]: digest_of(tree / one["module"]) for one in done}
    unchanged = {
        module: told["source"]
        for module, told in before["modules"].items()
        if sources.get(module, told["source"]) == told["source"]
    }
    known = {key_of(one): one for one in before["mutants"] if one["module"] in unchanged}
    for one in done:
        known[key_of(one)] = entry_of(one, seed, known.get(key_of(one), {}))
    entries = sorted(known.values(), key=lambda one: (one["module"], one["line"], key_of(one)))
    told = {
        "what": "small faults planted one at a time in a module, and whether its tests find them; lived_before: the "
        "test that finds it was written for it; equivalent: why no test can find it",
        "command": "python benchmarks/mutants.py ROOM --only MODULE --seed SEED --record THIS_FILE",
        "date": date.today().isoformat(),
        "modules": by_module(entries, unchanged | sources),
    }
    rows = ",\n    ".join(json.dumps(one) for one in entries)
    path.write_text(
        f'{json.dumps(told, indent=2)[:-2]},\n  "mutants": [\n    {rows}\n  ]\n}}\n'
    )


def entry_of(one: dict[str, Any], seed: int, before: dict[str, Any]) -> dict[str, Any]:
    """What the results say of a mutant."""
    entry = {key: one[key] for key in ("module", "line", "operator", "occurrence", "outcome")}
    entry["seed"] = before.get("seed", seed)
    lived = one["outcome"] == "survived"
    lived_before = before.get("lived_before") or before.get("outcome") == "survived"
    if lived or lived_before:
        entry["change"] = changed_lines(one["diff"])
    if lived:
        entry["equivalent"] = before.get("equivalent")
    elif lived_before:
        entry["lived_before"] = True
    return entry


def by_module(
    entries: list[dict[str, Any]], sources: dict[str, str]
) -> dict[str, dict[str, int | str]]:
    """How many mutants of each module were tried, are found, are found by a test that was written
    for one, and are equivalent.
    """
    counts = dict[str, dict[str, int | str]]()
    for module in sorted({one["module"] for one in entries}):
        own = [one for one in entries if one["module"] == module]
        counts[module] = {
            "tried": len(own),
            "found": sum(one["outcome"] != "survived" for one in own),
            "lived_before": sum("lived_before" in one for one in own),
            "equivalent": sum(bool(one.get("equivalent")) for one in own),
            "source": sources[module],
        }
    return counts


def digest_of(module: Path) -> str:
    return hashlib.sha256(module.read_bytes()).hexdigest()[:12]


def key_of(one: dict[str, Any]) -> tuple[str, str, int]:
    return one["module"], one["operator"], one["occurrence"]


def place_of(mutant: Any) -> dict[str, Any]:
    return {
        "module": str(mutant.module_path),
        "operator": mutant.operator_name,
        "occurrence": mutant.occurrence,
        "line": mutant.start_pos[0],
    }


def lived(mutants: Iterable[Any], results: Path) -> list[Any]:
    """Those that lived and are not known to be equivalent, by a file of results."""
    keys = {
        key_of(one)
        for one in json.loads(results.read_text())["mutants"]
        if one["outcome"] == "survived" and not one["equivalent"]
    }
    return [one for one in mutants if key_of(place_of(one)) in keys]


def changed_lines(diff: str) -> list[str]:
    """The lines of a diff that differ."""
    return [
        line
        for line in diff.splitlines()
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("room", choices=ROOMS)
    parser.add_argument("--only", nargs="+", default=(), help="modules of the room, by name")
    parser.add_argument(
        "--sample", type=int, default=40, help="mutants, drawn at random; 0 for all"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument(
        "--record", type=Path, help="a file of results, such as benchmarks/results/mutants.json"
    )
    parser.add_argument(
        "--python", default=sys.executable, help="of the environment in which the tests run"
    )
    parser.add_argument("--prefix", default="nice -n 19", help="before each command")
    parser.add_argument("--seconds", type=int, default=900, help="limit of a run of tests")
    parser.add_argument(
        "--tests-seconds",
        type=float,
        default=120,
        help="of tests that reach a line, the fastest that take so long",
    )
    parser.add_argument(
        "--lived", action="store_true", help="try those that lived, by the file of results"
    )
    parser.add_argument(
        "--again", action="store_true", help="run the tests of the room on mutants that live"
    )
    return parser.parse_args()


def main() -> None:
    given = arguments()
    leave_out_calls()
    out = given.out.resolve()
    results = given.record and given.record.resolve()
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    known = {key_of(one) for one in done}
    with tempfile.TemporaryDirectory() as folder:
        copy = copied_tree(folder)
        os.chdir(copy)
        more = os.environ.get("PYTHONPATH", "")
        os.environ.update(PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=f"{copy}:{more}".rstrip(":"))
        whole = mutants(given.room, given.only)
        drawn = random.Random(given.seed).sample(
            whole, min(given.sample or len(whole), len(whole))
        )
        if given.lived:
            drawn = lived(whole, results)
        print(
            f"{given.room}: {len(drawn)} of {len(whole)} mutants, seed {given.seed}", flush=True
        )
        trial = Trial(
            given.room,
            f"{given.prefix} {given.python}",
            seconds=given.seconds,
            most=given.tests_seconds,
        )
        for one in drawn:
            told = place_of(one) | {"room": given.room}
            if key_of(told) in known:
                continue
            result = trial.by_line(one)
            if given.again and result.test_outcome == "survived":
                result = trial.by_room(one)
            told |= {
                "outcome": str(result.test_outcome.value),
                "said": (result.output or "").strip().splitlines()[-1:],
                "diff": result.diff,
            }
            with out.open("a") as file:
                file.write(json.dumps(told) + "\n")
            done.append(told)
            print(
                f"{told['outcome']:9} {told['module']}:{told['line']} {told['operator']} {told['said']}",
                flush=True,
            )
    own = [one for one in done if one["room"] == given.room]
    print(dict(Counter(one["outcome"] for one in own)))
    for one in own:
        if one["outcome"] == "survived":
            print(one["diff"])
    if results:
        record(own, results, given.seed, ROOT)


if __name__ == "__main__":
    main()
