"""Sphinx settings of the site that docs/website.py builds."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from docutils import nodes
from sphinx import addnodes
from sphinx.errors import PycodeError
from sphinx.pycode import ModuleAnalyzer
from sphinx.search.en import SearchEnglish

import kvjax
from docs import website
from docs.docstrings import fields, to_rst

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"][
    "Repository"
]


def _names() -> dict[str, str]:
    """Full names of what the pages of the API list, by the words that pages use for them."""
    full = list(website.documented())
    classes = [name for name in full if name.rpartition(".")[2][0].isupper()]
    lasts = Counter(name.rpartition(".")[2] for name in classes)
    return {name: name for name in full} | {
        last: name for name in classes if lasts[last := name.rpartition(".")[2]] == 1
    }


NAMES = _names()
LISTS: dict[Any, str] = {}
PLAIN = '<li class="toctree-l2"><a class="reference internal" href="{}.html">'
MARKED = '<li class="toctree-l2 current active"><a class="current reference internal" href="#">'

project = "kvjax"
author = "the kvjax authors"
copyright = "the kvjax authors, Apache-2.0"
version = release = kvjax.__version__

extensions = [
    "myst_nb", "sphinx_copybutton", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.intersphinx",
    "sphinx.ext.linkcode", "sphinx.ext.napoleon",
]  # fmt: skip
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_line_continuation_character = "\\"  # else the rest of a command is not copied
nb_execution_mode = "cache" if os.environ.get("KVJAX_SITE_EXECUTE") else "off"
nb_execution_cache_path = os.environ.get(
    "KVJAX_SITE_EXECUTE", ""
)  # a folder of outputs, by the text of a notebook
nb_execution_timeout = 1200  # a cell takes less than a minute, and longer on a busy machine
nb_execution_raise_on_error = True
nb_merge_streams = True

html_theme = "sphinx_book_theme"
html_title = "kvjax"
html_static_path = [str(Path(__file__).parent / "static")]
html_css_files = ["kvjax.css"]
html_logo = html_favicon = str(Path(__file__).parent / "static" / "favicon.svg")
templates_path = ["templates"]
html_sidebars = {"**": ["navbar-logo.html", "search-button-field.html", "pages.html"]}
html_theme_options = {
    "logo": {"text": "kvjax"},
    "show_toc_level": 2,
    "repository_url": REPOSITORY,  # to clone from
    "use_repository_button": True,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navbar_persistent": [],  # one search field is enough
    "pygments_light_style": "a11y-high-contrast-light",
}
html_copy_source = False
smartquotes = False
html_show_sphinx = False
pygments_style = "default"
# nothing comes from the network; a page with a formula is a broken link
mathjax_path = "not-shipped.js"

intersphinx_mapping = {  # the network is used only by `docs.website --online`
    "python": ("https://docs.python.org/3", None),
    "numpy": ("https://numpy.org/doc/stable", None),
    "jax": ("https://docs.jax.dev/en/latest", None),
    "flax": ("https://flax.readthedocs.io/en/latest", None),
} if os.environ.get("KVJAX_SITE_ONLINE") else {}  # fmt: skip

autosummary_generate = False  # docs/website.py writes the pages of names
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_type_aliases = {
    "ArrayLike": "ArrayLike",
    "DTypeLike": "DTypeLike",
}  # and not all that they stand for
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 90
napoleon_numpy_docstring = False
# fields are no targets, as many classes share a name; the signature has their types
napoleon_use_ivar = True
default_role = "literal"


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """The address of a name's source in the repository."""
    thing: Any = (
        importlib.import_module(info["module"]) if domain == "py" and info["module"] else None
    )
    for part in info["fullname"].split("."):
        thing = getattr(thing, part, None)
    thing = inspect.unwrap(thing)
    try:  # autodoc has parsed the module, which takes a tenth of the time of inspect.getsourcelines for each name
        source = ModuleAnalyzer.for_module(thing.__module__)
        _, first, last = source.find_tags()[thing.__qualname__]
    except (AttributeError, KeyError, PycodeError):  # a field, or what is not of Python
        return None
    file = Path(source.srcname).resolve()
    return (
        f"{REPOSITORY}/blob/main/{file.relative_to(ROOT)}#L{first}-L{last}"
        if file.is_relative_to(ROOT)
        else None
    )


def _process(
    app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    told = _fields(thing) if what == "class" and "Attributes:" not in lines else {}
    if told:
        lines += [
            "",
            "Attributes:",
            *(f"  {field}: {text}" for field, text in told.items()),
            "",
        ]
    lines[:] = to_rst(lines)


def _fields(thing: Any) -> dict[str, str]:
    try:
        return fields(inspect.getsource(thing)) if thing.__module__.startswith("kvjax") else {}
    except (OSError, TypeError):  # made without a source
        return {}


def _skip(app: Any, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out what `_fields` lists: "Alias for field number 0", and a default that is a class."""
    alias = (getattr(thing, "__doc__", None) or "").startswith("Alias for field number")
    foreign = inspect.isclass(thing) and not thing.__module__.startswith("kvjax")
    return True if alias or foreign else None


def _sign(
    app: Any,
    what: str,
    name: str,
    thing: Any,
    options: Any,
    signature: str | None,
    returns: str | None,
) -> Any:
    plain = [
        text and re.sub(r"TypeAliasForwardRef\('([\w.]+)'\)", r"\1", text)
        for text in (signature, returns)
    ]
    return tuple(plain)


def _link(app: Any, doctree: nodes.document) -> None:
    """Makes a link of each literal in running text that is a name of the API, and marks what
    may break on a phone.
    """
    for node in list(doctree.findall(nodes.literal)):
        node["classes"] += ["long"] * any(len(word) > 28 for word in node.astext().split())
        name = NAMES.get(node.astext().removesuffix("()"))
        inside = (nodes.reference, nodes.title, addnodes.pending_xref)
        if name and not any(
            isinstance(each, inside) for each in (node.parent, node.parent.parent)
        ):
            where = dict(
                refdomain="py",
                reftype="obj",
                reftarget=name,
                refdoc=app.env.docname,
                refexplicit=True,
            )
            link = addnodes.pending_xref("", **where)
            node.replace_self(link)
            link += node


def _list_pages(
    app: Any, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Gives pages.html the list of pages, drawn once for all that stand below one page, as only
    their marks differ.
    """
    folder, _, name = pagename.rpartition("/")
    above = (folder, context["parents"][-1]["link"]) if context.get("parents") else pagename

    def listed(draw: Any) -> str:
        if above not in LISTS:  # drawing takes a third of the time of a page
            text = str(
                draw(
                    startdepth=0,
                    kind="sidebar",
                    collapse=True,
                    includehidden=True,
                    titles_only=True,
                )
            )
            LISTS[above] = text.replace(MARKED, PLAIN.format(name))
        return LISTS[above].replace(PLAIN.format(name), MARKED)

    context["listed"] = listed


def _settle(app: Any) -> None:
    # no template changes while the site is built
    app.builder.templates.environment.auto_reload = False
    SearchEnglish.stem = cache(SearchEnglish.stem)  # pages share most of their words


def setup(app: Any) -> None:
    app.connect("builder-inited", _settle)
    app.connect("doctree-read", _link)
    app.connect("html-page-context", _list_pages)
    app.connect("autodoc-process-docstring", _process, priority=100)  # before napoleon
    app.connect("autodoc-process-signature", _sign)
    app.connect("autodoc-skip-member", _skip)
