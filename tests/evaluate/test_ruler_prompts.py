"""Needles and RULER's tasks beside their definitions in lm-evaluation-harness: settings are equal,
and wording differs only as docs/board.md says.

The definitions are read as text: importing them would download word lists.
"""

from __future__ import annotations

import ast
import random
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvjax.evaluate.tasks.generated import FORMS, RULER
from kvjax.evaluate.tasks.needles import needles
from kvjax.evaluate.tasks.variables import assigned_variables
from kvjax.presets.parsing import read_settings, settings_of

if find_spec("lm_eval") is None:
    pytest.skip(
        "lm-evaluation-harness is not installed: pip install 'kvjax[harness]'",
        allow_module_level=True,
    )
FOLDER = Path(next(iter(find_spec("lm_eval").submodule_search_locations))) / "tasks" / "ruler"
NIAH = {
    "needle": "niah_single_2",
    "needle:kind=uuid": "niah_single_3",
    "needles:hidden=4": "niah_multikey_1",
    "needle_lines": "niah_multikey_2",
    "needle_lines:kind=uuid": "niah_multikey_3",
    "needles:hidden=4,values=4": "niah_multivalue",
    "needles:hidden=4,asked=4": "niah_multiquery",
}


def tree(file: str) -> ast.Module:
    return ast.parse((FOLDER / file).read_text())


def constant(file: str, name: str) -> Any:
    """The value that a file assigns to a name."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"{file} has no {name}")


def defaults(file: str, function: str) -> dict[str, Any]:
    """The defaults of a function's arguments."""
    (found,) = (
        node
        for node in ast.walk(tree(file))
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    arguments = found.args.args
    pairs = zip(reversed(arguments), reversed(found.args.defaults), strict=False)
    return {argument.arg: ast.literal_eval(value) for argument, value in pairs}


def niah(task: str) -> dict[str, Any]:
    """The settings that a task of needles passes to `generate_samples`."""
    (function,) = (
        node
        for node in tree("niah_utils.py").body
        if isinstance(node, ast.FunctionDef) and node.name == task
    )
    (call,) = (
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "generate_samples"
    )
    return {
        keyword.arg: keyword.value.value
        for keyword in call.keywords
        if isinstance(keyword.value, ast.Constant)
    }


def test_every_task_of_ruler_that_is_generated_is_compared() -> None:
    others = {"assigned_variables", "common_words", "frequent_words"}
    assert set(RULER) == {*NIAH, *others}


@pytest.mark.parametrize(("ours", "theirs"), NIAH.items())
def test_needles_have_the_numbers_of_the_harness(ours: str, theirs: str) -> None:
    form = "needle_lines" if ours.startswith("needle_lines") else "needles"
    one = {"hidden": 1} if ours.partition(":")[0] == "needle" else {}
    own = settings_of(FORMS[form]) | one
    own |= read_settings(ours, own, where="--task")
    wanted = niah(theirs)
    assert own["kind"] == wanted["type_needle_v"].removesuffix("s")
    haystack = "needle" if form == "needle_lines" else "essay"
    assert wanted["type_haystack"] == haystack
    if form == "needles":
        asked = wanted.get("num_needle_q", 1)
        assert own["values"] == wanted.get("num_needle_v", 1)
        assert own["asked"] == asked
        # Of several values, the harness hides one key, and three more stand beside it here.
        others = 3 if theirs == "niah_multivalue" else 0
        assert own["hidden"] == max(wanted.get("num_needle_k", 1), asked) + others


def test_words_and_variables_have_the_numbers_of_the_harness() -> None:
    common = settings_of(FORMS["common_words"])
    wanted = defaults("cwe_utils.py", "generate_input_output")
    assert common["asked"] == wanted["num_cw"]
    assert (common["often"], common["rarely"]) == (wanted["freq_cw"], wanted["freq_ucw"])
    frequent = settings_of(FORMS["frequent_words"])
    wanted = defaults("fwe_utils.py", "generate_input_output")
    assert frequent["alpha"] == wanted["alpha"]
    assert frequent["asked"] == 3
    chains = settings_of(FORMS["assigned_variables"])
    wanted = defaults("vt_utils.py", "sys_vartrack_w_noise_random")
    assert (chains["chains"], chains["hops"]) == (wanted["num_chains"], wanted["num_hops"])


def test_the_line_of_a_needle_is_that_of_the_harness_where_a_key_has_several_values() -> None:
    line = constant("prepare_niah.py", "NEEDLE")
    for values, same in ((4, True), (1, False)):
        made = needles(random.Random(0), hidden=4, values=values)
        key, value = re.fullmatch(r".* for (\w+) is: (\d+)\.", made.lines[0]).groups()
        theirs = line.format(type_needle_v="numbers", key=key, value=value)
        assert (made.lines[0] == theirs) is same
        several = made.lines[0].replace(
            "The special magic number ", "One of the special magic numbers "
        )
        assert several == theirs
        assert len(value) == 5
    assert defaults("prepare_niah.py", "generate_random_number") == {"num_digits": 7}


def test_questions_differ_in_what_stands_around_the_words_asked_for() -> None:
    template = constant("niah_utils.py", "TEMPLATE")
    assert template.startswith("Some special magic {type_needle_v} are hidden")
    assert template.endswith(
        "What are all the special magic {type_needle_v} for {query} mentioned in the provided text?"
    )
    ours = needles(random.Random(0), hidden=4, asked=4).question
    assert re.fullmatch(
        r"What are the special magic numbers for (.+)\? The special magic numbers for \1 are: ",
        ours,
    )


def test_variables_are_words_here_and_letters_there() -> None:
    config = constant("vt_utils.py", "CONFIG")["variable_tracking"]
    assert "Find all variables that are assigned the value {query}" in config["template"]
    made = assigned_variables(random.Random(0))
    assert re.fullmatch(r"VAR [a-z]+ = \d{5}", made.lines[0])
    assert re.fullmatch(r"VAR [a-z]+ = [a-z]+", made.lines[1]), "the harness writes VAR again"
