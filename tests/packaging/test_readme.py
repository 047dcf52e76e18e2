"""README and docs/: their Python runs, their commands are CI's, their tables are the results,
names and links exist.
"""

import ast
import importlib
import re
import subprocess
from functools import reduce
from importlib.util import find_spec
from pathlib import Path

import pytest

from docs import pictures, tables
from kvjax import models
from kvjax.cli.prompts import EXAMPLE
from kvjax.presets import REGISTRY
from tests.checkpoint import write_stand_in

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
GUIDES = [page for page in DOCS if page.startswith("docs/guides/")]
PAGES = ["README.md", *DOCS]
NO_TEMPLATE = "chat template, which the shipped model does not have"  # what a page says then


def read(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(text: str, language: str) -> list[tuple[int, str]]:
    """(first line, text) of each fenced block."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(text.count("\n", 0, m.start(1)), m[1]) for m in found]


def sections(text: str) -> dict[str, str]:
    """The text below each heading of the second level."""
    return {
        part.partition("\n")[0].strip("` "): part
        for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    }


# ---------------------------------------------------------------------------------------------------------------- code


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(read(page), "python")])
def test_python_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch, capsys):
    # The weights that ship are asked elsewhere, and take minutes to compile for all pages.
    small = write_stand_in(tmp_path / "model", chats=NO_TEMPLATE in read(page))
    monkeypatch.setattr(models, "shipped", lambda: small)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for line, text in blocks(read(page), "python"):
        exec(compile("\n" * line + text, str(ROOT / page), "exec"), names)
    if page == "README.md":
        assert "[301] [[64. 64.]]" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES)
def test_a_python_block_that_does_not_run_says_why(page):
    """Blocks that are fenced as `python` run; any other fence of Python follows a comment with
    the reason.
    """
    text = read(page)
    for block in re.finditer(r"^```(?:py|python3|pycon|Python)\n", text, re.MULTILINE):
        assert re.search(r"<!-- not run: [^>]+ -->\n$", text[: block.start()]), (
            f"{page}: fence it as python, so that the suite runs it, or say above it why it cannot run"
        )


IMPORTS = {
    "jax": "import jax",
    "jnp": "import jax.numpy as jnp",
    "np": "import numpy as np",
    "kvjax": "import kvjax",
    "nnx": "from flax import nnx",
    "partial": "from functools import partial",
    "dataclass": "from dataclasses import dataclass",
}


@pytest.mark.parametrize("page", GUIDES)
def test_a_section_of_a_guide_imports_what_it_uses(page):
    """A reader who comes by a link copies one section."""
    for title, text in sections(read(page)).items():
        bound = set()
        for _, block in blocks(text, "python"):
            tree = ast.parse(block)
            for node in ast.walk(tree):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    bound |= {
                        (alias.asname or alias.name).partition(".")[0] for alias in node.names
                    }
            used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            assert not (used & set(IMPORTS)) - bound, title


def test_getting_started_writes_the_prompt_that_is_built_in(tmp_path):
    """Byte for byte; its answer is that of README's command, which CI reads."""
    console = next(
        text
        for _, text in blocks(read("docs/getting_started.md"), "console")
        if "prompt.txt" in text
    )
    lines = [line.removeprefix("$ ") for line in console.splitlines() if line.startswith("$ ")]
    subprocess.run(["bash", "-c", "\n".join(lines[:-1])], cwd=tmp_path, check=True)
    assert (tmp_path / "prompt.txt").read_text() == EXAMPLE
    assert lines[-1].startswith("kvjax generate --prompt-file prompt.txt")


def test_ci_runs_the_two_commands_of_readme():
    """CI takes the shell blocks from README itself, so there must be two and it must spell
    neither.
    """
    setup, test = (text for _, text in blocks(README, "sh"))
    assert "-c constraints.txt" in setup
    assert "-e . &&" in setup, "the quickstart needs no torch"
    assert "-e '.[dev]' &&" in test
    assert "kvjax generate --example" in setup
    assert README.count("<!-- .ci/run runs the next block -->\n```sh\n") == 2
    script = (ROOT / ".ci" / "run").read_text()
    assert "readme_block 1" in script
    assert "readme_block 2" in script
    assert "pip install" not in script
    assert "pytest" in test
    assert "-m pytest" not in script


# ------------------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("page", PAGES)
def test_tables_of_a_page_say_what_the_results_say(page):
    assert tables.fill(read(page)) == read(page), "run python -m docs.tables"


def test_a_run_names_the_pages_that_it_writes(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text(README.replace(tables.TABLES["quality"](), ""))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "PAGES", [page])
    monkeypatch.setattr(tables, "PICTURE", tmp_path / "picture.svg")
    monkeypatch.setattr(tables, "PICTURES", {})
    tables.main()
    assert capsys.readouterr().out == "wrote page.md\nwrote picture.svg\n"
    assert page.read_text() == README
    tables.main()
    assert capsys.readouterr().out == "all 1 pages and the pictures say what the results say\n"


def test_every_table_of_results_stands_on_a_page():
    assert {name for page in PAGES for _, name, _ in tables.PLACE.findall(read(page))} == set(
        tables.TABLES
    )


@pytest.mark.parametrize("page", PAGES)
def test_no_table_of_numbers_is_typed_by_hand(page):
    typed = tables.PLACE.sub("", read(page))
    for row in re.findall(r"^\|.*\|$", typed, re.MULTILINE):
        row = row.replace("Qwen3.5", "Qwen")  # a name
        assert not re.search(r"\d*\.\d|\| *\d+ *\|", row), row


def test_the_picture_shows_what_the_results_say():
    assert tables.PICTURE.read_text() == tables.picture(), "run python -m docs.tables"


def test_words_of_the_picture_end_inside_it():
    """Browsers choose the font: a letter of DejaVu Sans, which is a wide one, takes 0.54 of the
    size of the font.
    """
    text = tables.picture()
    width, size = (
        float(re.search(rf' {name}="(\d+)"', text)[1]) for name in ("width", "font-size")
    )
    for start, words in re.findall(
        r'<text x="([\d.]+)"[^>]* text-anchor="start"[^>]*>([^<]+)<', text
    ):
        assert float(start) + 0.54 * size * len(words) <= width, words


def test_pictures_of_the_concepts_are_as_their_code_draws_them():
    for name, draw in pictures.CONCEPTS.items():
        assert (pictures.FOLDER / f"{name}.svg").read_text() == draw().svg(), (
            "run python -m docs.pictures"
        )


def test_every_method_that_can_be_drawn_has_a_picture():
    drawn = {name for name in REGISTRY if (pictures.FOLDER / f"reads_{name}.svg").exists()}
    assert drawn == set(REGISTRY) - set(pictures.NOT_DRAWN), "run python -m docs.pictures"


@pytest.mark.parametrize("name", REGISTRY)
def test_every_method_has_a_size_that_pictures_and_the_support_matrix_can_take(name):
    pictures.small(REGISTRY[name])


def test_a_changed_number_is_found():
    assert tables.fill(README) == README
    name = "quality"
    changed = README.replace(tables.TABLES[name](), tables.TABLES[name]().replace(".66", ".67"))
    assert changed != README
    assert tables.fill(changed) == README


# -------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("page", GUIDES)
def test_contents_of_a_guide_name_every_section(page):
    head = read(page).partition("\n## ")[0]
    assert set(re.findall(r"\[([^\]]+)\]\(#", head)) >= set(sections(read(page)))


def test_first_page_of_the_guides_names_every_page():
    links = re.findall(r"\]\((guides/\w+\.md)\)", read("docs/guides.md"))
    assert sorted(f"docs/{link}" for link in links) == GUIDES


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "MAINTAINING.md", "CHANGELOG.md"])
def test_names_files_and_links_of_a_page_exist(page):
    text = re.sub(r"^```.*?^```$", "", read(page), flags=re.DOTALL | re.MULTILINE)
    folder = (ROOT / page).parent
    for link, anchor in re.findall(r"\]\(([^)#:\s]*)#?([^):\s]*)\)", text):
        target = folder / link if link else ROOT / page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text()), f"{link}#{anchor}"
    for name in re.findall(
        r"`((?:kvjax|tests|models|kernels_pallas|benchmarks|docs|\.ci|\.github)/[\w/.]*)`", text
    ):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`kvjax\.([\w.]+)", read(page)):
        first, *rest = name.rstrip(".").split(".")
        if rest and find_spec(f"kvjax.{first}") and is_module(f"kvjax.{first}.{rest[0]}"):
            continue  # it may need an extra
        try:
            thing = importlib.import_module(f"kvjax.{first}")
        except ModuleNotFoundError:
            thing = getattr(importlib.import_module("kvjax"), first)
        reduce(getattr, rest, thing)


def is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # what stands before the last dot is no package
        return False


def anchors(text: str) -> set[str]:
    """The anchors that a code host makes from headings."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles
    }


def test_suite_reads_nothing_outside_the_repository():
    """No absolute path, home directory or address in any string of the tests (JAX events and
    /nowhere excepted).
    """
    outside = re.compile(r"^(/(?!jax/|nowhere/)\w+/|~/|[a-z]+://)")
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not outside.match(node.value), (
                    f"{path.relative_to(ROOT)}:{node.lineno}: {node.value!r}"
                )


def test_every_preset_has_a_section_that_answers_the_same_questions():
    found = sections(read("docs/methods.md"))
    for preset in REGISTRY.values():
        text = found[preset.name]
        for question in (
            "**Idea.**",
            "**Preset.**",
            "**Cost.**",
            "**Differs.**",
            "**Not for.**",
        ):
            assert question in text, (preset.name, question)
        assert f"`kvjax.presets.{preset.name}(" in text
        if preset.paper != "-":
            cited = re.search(
                rf"^\*\*Paper\.\*\* {preset.paper.split()[0]}.*", text, re.MULTILINE
            )
            assert cited, preset.name
            assert "](https://" in cited[0], "link the paper, or its code"


def test_glossary_defines_each_word_once():
    words = re.findall(r"^\| ([^|]+?) \| ", read("docs/glossary.md"), re.MULTILINE)[2:]
    assert len(words) >= 25
    assert len(set(words)) == len(words)


def test_version_is_the_same_wherever_it_is_written():
    import kvjax

    version = kvjax.__version__
    assert re.search(
        rf'^version = "{re.escape(version)}"$',
        (ROOT / "pyproject.toml").read_text(),
        re.MULTILINE,
    )
    assert re.search(
        rf"^version: {re.escape(version)}$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE
    )
    assert version in read("CHANGELOG.md")
