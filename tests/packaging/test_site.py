"""The site: every exported name has a page, links are checked, and the whole is built where Sphinx is installed."""

import doctest
import importlib.util
import inspect
import re

import pytest

import kvjax
from docs import docstrings, support, website


def test_every_exported_name_has_a_page():
    found = {name for names in website.exported().values() for name in names}
    modules = {"memory", "presets"}
    assert {f"kvjax.{name}" for name in kvjax.__all__ if name not in modules} <= found


def test_every_exported_name_stands_on_a_page_that_one_reads():
    pages = [website.ROOT / "README.md", *(website.ROOT / "docs").glob("*.md")]
    text = "".join(page.read_text() for page in pages)
    assert not [name for name in kvjax.__all__ if not re.search(rf"\bkvjax\.{name}\b|`{name}\b", text)]
    assert len(kvjax.__all__) <= 45


def test_every_name_that_the_docs_use_stands_on_a_page_of_the_api():
    """A name that a reader copies is public, and public is what the API pages list."""
    listed = [website._resolve(name) for names in website.exported().values() for name in names]
    for page in [website.ROOT / "README.md", *(website.ROOT / "docs").glob("*.md")]:
        text = page.read_text()
        names = {f"kvjax.{name}" for name in re.findall(r"\bkvjax\.((?:[a-z_]\w*\.)*[A-Za-z]\w*)", text)}
        for module, imported in re.findall(r"^from (kvjax[\w.]*) import (.+)$", text, re.MULTILINE):
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
    ("text", "told"),
    [
        ('<a href="b.html">', "no such file"),
        ('<a href="#gone">', "no such heading"),
        ('<script src="https://cdn.example/x.js"></script>', "from the network"),
        ('<a href="#here">', None),
        ('<a href="https://example.org">', None),
    ],
)
def test_a_broken_link_is_found(tmp_path, text, told):
    (tmp_path / "a.html").write_text(f'<h1 id="here">A</h1>{text}')
    found = list(website.broken_links(tmp_path))
    assert len(found) == (told is not None)
    assert all(told in line for line in found)


def test_numbers_of_tables_stay_on_one_line():
    text = "Of 3 (4) or more.\n\n| 8192 x 1 | 16.8 (7.8), 1.28x | +3.5 ± 1.3 % | two words |\n"
    row = "| 8192~x~1 | 16.8~(7.8), 1.28x | +3.5~±~1.3~% | two words |\n".replace("~", "\u00a0")
    assert website.unbroken(text) == f"Of 3 (4) or more.\n\n{row}"


def test_refusals_name_policies_without_their_settings():
    long = "rollback needs another than Evicting(evictor=Sliding(sink=2), budget=26) (see\nroom)"
    assert support.in_short(long) == "rollback needs another than Evicting (see room)"


def test_docstrings_become_markup():
    assert not doctest.testmod(docstrings).failed


@pytest.mark.thorough  # .ci/run builds it in a stage of its own
@pytest.mark.skipif(importlib.util.find_spec("sphinx_book_theme") is None, reason="needs kvjax[docs]")
def test_the_site_builds_without_warnings(tmp_path):
    website.build(tmp_path / "site")
    assert (tmp_path / "site" / "index.html").exists()
