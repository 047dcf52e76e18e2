"""The site: every exported name has a page, links are checked, and the whole is built where
Sphinx is installed.
"""

import doctest
import importlib.util
import inspect
import re
from importlib import import_module
from pkgutil import iter_modules

import pytest

import kvjax
from docs import docstrings, support, website
from kvjax import contrib


def test_every_exported_name_has_a_page():
    listed = list(website.documented().values())
    for name in kvjax.__all__:
        thing = getattr(kvjax, name)
        assert inspect.ismodule(thing) or thing in listed, name


def test_every_part_stands_on_its_page():
    """A selector, store, evictor, policy or preset that is added is listed by hand, under its
    role.
    """
    listed = list(website.documented().values())
    for module in (
        kvjax.policies,
        kvjax.selectors,
        kvjax.stores,
        kvjax.evictors,
        kvjax.presets,
        kvjax.generation,
        kvjax.serve,
        *(
            import_module(f"kvjax.contrib.{file.name}")
            for file in iter_modules(contrib.__path__)
        ),
    ):
        for name in module.__all__:
            thing = getattr(module, name)
            assert not callable(thing) or name == "Pooling" or thing in listed, (
                f"{module.__name__}.{name}"
            )


def test_every_exported_name_stands_on_a_page_that_one_reads():
    pages = [website.ROOT / "README.md", *(website.ROOT / "docs").rglob("*.md")]
    text = "".join(page.read_text() for page in pages)
    assert not [
        name for name in kvjax.__all__ if not re.search(rf"\bkvjax\.{name}\b|`{name}\b", text)
    ]


def test_every_name_that_the_docs_use_stands_on_a_page_of_the_api():
    """A name that a reader copies is public, and public is what the API pages list."""
    listed = list(website.documented().values())
    for page in [website.ROOT / "README.md", *(website.ROOT / "docs").rglob("*.md")]:
        text = page.read_text()
        names = {
            f"kvjax.{name}"
            for name in re.findall(r"\bkvjax\.((?:[a-z_]\w*\.)*[A-Za-z]\w*)", text)
        }
        for module, imported in re.findall(
            r"^from (kvjax[\w.]*) import (.+)$", text, re.MULTILINE
        ):
            names |= {f"{module}.{name.strip()}" for name in imported.split(",")}
        for name in names:
            try:
                thing = website._resolve(name)
            except (ImportError, AttributeError):  # a module, a file, or a method
                continue
            assert not inspect.isroutine(thing) or thing in listed, f"{page.name}: {name}"
            assert not inspect.isclass(thing) or thing in listed, f"{page.name}: {name}"


def test_every_method_has_a_page(tmp_path):
    website.stage(tmp_path)
    for name in kvjax.presets.REGISTRY:
        page = (tmp_path / "docs" / "methods" / f"{name}.md").read_text()
        assert page.startswith(f"# {name}\n")
        assert "**Not for.**" in page
        assert f"methods/{name}.md" in (tmp_path / "docs" / "methods.md").read_text()


@pytest.mark.parametrize(
    ("text", "fetches"),
    [
        ('<script defer src="https://cdn.example/x.js"></script>', True),
        ('<link href="https://cdn.example/x.css" rel="stylesheet">', True),
        ('<link rel="canonical" href="https://example.org">', False),
        ('<a href="https://example.org"><img src="x.svg">', False),
    ],
)
def test_a_page_that_loads_from_the_network_is_found(tmp_path, text, fetches):
    (tmp_path / "a.html").write_text(text)
    assert len(list(website.loaded(tmp_path))) == fetches


def test_numbers_of_tables_stay_on_one_line():
    text = "Of 3 (4) or more.\n\n| 8192 x 1 | 16.8 (7.8), 1.28x | +3.5 ± 1.3 % | two words |\n"
    row = "| 8192~x~1 | 16.8~(7.8), 1.28x | +3.5~±~1.3~% | two words |\n".replace("~", "\u00a0")
    assert website.unbroken(text) == f"Of 3 (4) or more.\n\n{row}"


def test_refusals_name_policies_without_their_settings():
    long = (
        "rollback needs another than Evicting(evictor=Sliding(sink=2), budget=26) (see\nroom)"
    )
    assert support.in_short(long) == "rollback needs another than Evicting (see room)"


def test_docstrings_become_markup():
    assert not doctest.testmod(docstrings).failed


@pytest.mark.thorough  # .ci/run builds it in a stage of its own
@pytest.mark.skipif(
    importlib.util.find_spec("sphinx_book_theme") is None, reason="needs kvjax[docs]"
)
def test_the_site_builds_without_warnings(tmp_path):
    website.build(tmp_path / "site")
    assert (tmp_path / "site" / "index.html").exists()
    for name in (
        "attention",
        "Info",
    ):  # the list of pages, which names of a page share, marks each
        page = (tmp_path / "site" / "docs" / "api" / f"kvjax.{name}.html").read_text()
        assert re.findall(r'"current reference internal" href="#">([^<]+)<', page) == [name]
    script = (tmp_path / "site" / "_static" / "copybutton.js").read_text()
    *_, how = re.findall(
        r"formatCopyText\(text, (.*)\)", script
    )  # prompts go, and a line that goes on is whole
    assert how == r"'\\$ |>>> |\\.\\.\\. ', true, true, true, true, '\\', ''"
    tokens = (tmp_path / "site" / "docs" / "api" / "kvjax.evictors.Tokens.html").read_text()
    assert "i32[B, K, L] -1 where there is no token" in tokens  # the comment beside a field
    for page in (tmp_path / "site").rglob("*.html"):  # what is wider than a phone may break
        article = page.read_text().partition("<article")[2].partition("</article>")[0]
        assert "Alias for field number" not in article, page.name
        for kind, text in re.findall(r'<code class="([^"]*)">(.*?)</code>', article, re.DOTALL):
            wide = re.search(r'<span class="pre">(?:&\w+;|[^<&]){29,}<', text)
            assert not wide or "long" in kind.split(), f"{page.name}: {wide[0]}"
