"""Builds the site: `python -m docs.website OUT` writes its HTML; `--execute` runs the notebooks and shows their output.

The pages are staged in a temporary tree with the repository's own folders, so that links of README.md and docs/ work
both on a code host and on the site. Each section of docs/methods.md about a method becomes a page. The pages of the API
are generated from the package's exports. A warning of Sphinx, a link without a target and a resource on the network are
errors.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlparse

ROOT = Path(__file__).resolve().parents[1]

COPIED = (
    "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "MAINTAINING.md", "SECURITY.md",
    "benchmarks/NOTES.md", "benchmarks/README.md", "training/README.md", "kvjax/data/kvjax-26m/README.md",
)  # fmt: skip
CONTENTS = {  # caption -> pages; of the guides, methods, notebooks and API below
    "Start": ["docs/getting_started", "docs/concepts", "docs/faq"],
    "Methods": ["docs/methods", "docs/gallery", "docs/support"],
    "Guides": ["docs/guides"],
    "Notebooks": [],
    "Measurements": [
        "docs/performance",
        "docs/real_models",
        "docs/claims",
        "docs/scaling",
        "benchmarks/README",
        "benchmarks/NOTES",
    ],
    "API": [],
    "Project": [
        "docs/glossary",
        "CHANGELOG",
        "CONTRIBUTING",
        "MAINTAINING",
        "SECURITY",
        "docs/citation",
        "kvjax/data/kvjax-26m/README",
        "training/README",
    ],
}
API = {  # page -> title, modules whose exported names stand on it
    "attention": (
        "Make and call a cache",
        (
            "kvjax.attention",
            "kvjax.steps",
            "kvjax.cache.cache",
            "kvjax.cache.flushing",
            "kvjax.cache.editing",
            "kvjax.cache.growing",
            "kvjax.spec",
            "kvjax.ops.chunk",
        ),
    ),
    "generation": ("Generate", ("kvjax.generation", "kvjax.generation.sampling", "kvjax.generation.prompt_inputs")),
    "saving": ("Save and restore", ("kvjax.cache.saving",)),
    "devices": ("Several devices", ("kvjax.sharding",)),
    "policies": (
        "Policies",
        (
            *(
                f"kvjax.policies.{name}"
                for name in ("policy", "full", "retrieval", "compressed", "evicting", "speculative")
            ),
            "kvjax.policies",
        ),
    ),
    "selectors": ("Selectors", ("kvjax.selectors", "kvjax.numerics.selection")),
    "stores": ("Stores and demotions", ("kvjax.stores",)),
    "evictors": ("Evictors", ("kvjax.evictors",)),
    "partial": ("Partial attention", ("kvjax.numerics.partial",)),
    "operations": ("Operations and kernels", ("kvjax.ops",)),
    "more": ("More", ("kvjax",)),  # names that are in no other module
}
SPACES = {  # modules that users name: page -> title, module
    "generation": ("Generate", "kvjax.generation"),
    "presets": ("Presets", "kvjax.presets"),
    "policies": ("Policies", "kvjax.policies"),
    "selectors": ("Selectors", "kvjax.selectors"),
    "stores": ("Stores and demotions", "kvjax.stores"),
    "evictors": ("Evictors", "kvjax.evictors"),
    "partial": ("Partial attention", "kvjax.numerics.partial"),
    "models": ("Models", "kvjax.models"),
    "evaluate": ("Evaluate", "kvjax.evaluate"),
    "testing": ("Test a policy", "kvjax.testing"),
    "memory": ("Memory", "kvjax.memory"),
}

NAMED = {  # page -> names that the guides use and that stand in none of these lists
    "attention": ("kvjax.cache.cache.any_full", "kvjax.cache.prefixes.fork"),
    "generation": (
        "kvjax.generation.prefilling.Layered",
        "kvjax.generation.sampling.sampling",
        "kvjax.generation.processors.Processors",
        "kvjax.generation.drafts.DraftModel",
        "kvjax.generation.drafts.PromptLookup",
        "kvjax.use_compilation_cache",
    ),
    "saving": ("kvjax.cache.saving.describe",),
    "devices": ("kvjax.sharding.placement.mean_over_heads",),
    "selectors": ("kvjax.numerics.blocks.write",),
    "operations": ("kvjax.ops.explain", "kvjax.ops.explained"),
    "presets": ("kvjax.presets.evicting.pyramid",),
    "evaluate": ("kvjax.evaluate.side_by_side.side_by_side", "kvjax.evaluate.heads.retrieval_heads"),
}


def stage(folder: Path) -> None:
    """Writes the sources of the site into an empty folder."""
    from kvjax.presets import REGISTRY

    for name in COPIED:
        _put(folder / name, (ROOT / name).read_text())
    for path in (ROOT / "docs").rglob("*"):
        if path.suffix in (".md", ".svg", ".png"):
            target = folder / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    for path in (ROOT / "benchmarks" / "results").glob("*.svg"):
        _put(folder / path.relative_to(ROOT), path.read_text())
    own = list(REGISTRY)
    _put(folder / "docs" / "gallery.md", gallery(own))
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    for path in notebooks:
        (folder / "notebooks").mkdir(exist_ok=True)
        shutil.copyfile(path, folder / "notebooks" / path.name)

    contents = {
        caption: [page for page in pages if (folder / f"{page}.md").exists()] for caption, pages in CONTENTS.items()
    }
    contents["Notebooks"] = [f"notebooks/{path.stem}" for path in notebooks]
    contents["API"] = [f"docs/api/{page}" for page in api_pages(folder / "docs" / "api")]
    split_methods(folder / "docs", own)
    readme = (ROOT / "README.md").read_text()
    trees = "".join(_tree(pages, caption) for caption, pages in contents.items())
    _put(folder / "index.md", f"{readme}\n{trees}")
    for page in (*folder.rglob("*.md"), *folder.rglob("*.ipynb")):
        link = re.compile(rf"\]\(((?:\.\./|docs/)*)methods\.md#({'|'.join(own)})\)")
        text = link.sub(r"](\1methods/\2.md)", page.read_text()).replace("../README.md", "../index.md")
        _put(page, unbroken(text) if page.suffix == ".md" else text)


def unbroken(text: str) -> str:
    """The text, with non-breaking spaces inside the numbers of its tables, as in "3.5 ± 1.3 %"."""
    return re.sub(
        r"^\|.*", lambda row: re.sub(r"(?<=[\d±x]) (?=[\d.(±%x])", "\u00a0", row[0]), text, flags=re.MULTILINE
    )


def _tree(pages: list[str], caption: str = "", options: str = ":hidden:") -> str:
    title = f":caption: {caption}\n" if caption else ""
    return f"```{{toctree}}\n{options}\n{title}\n" + "\n".join(f"/{page}" for page in pages) + "\n```\n\n"


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def gallery(own: list[str]) -> str:
    """A page with the picture of what each decode step reads, of each method that has one."""
    shown = "\n\n".join(
        f"[![{name}](pictures/reads_{name}.svg)](methods.md#{name})\n[`{name}`](methods.md#{name})"
        for name in own
        if (ROOT / "docs" / "pictures" / f"reads_{name}.svg").exists()
    )
    return (
        "# What a step reads\n\nEach picture is one cache, drawn from what `kvjax.attention_info` returned: a row is a "
        f"decode step, a column a token of the text.\n\n:::::{{container}} gallery\n{shown}\n:::::\n"
    )


def split_methods(docs: Path, own: list[str]) -> None:
    """A page for each method in place of its section of methods.md."""
    head, *parts = re.split(r"^## ", (docs / "methods.md").read_text(), flags=re.MULTILINE)
    rest = []
    for part in parts:
        name, _, body = part.partition("\n")
        if name.strip() not in own:
            rest.append(f"## {part}")
            continue
        body = re.sub(r"\]\((?!https?:|#)([^)]+)\)", r"](../\1)", body)
        body = re.sub(r"\]\(#([^)]+)\)", r"](../methods.md#\1)", body)
        body = re.sub(r"(?<=[^\n])\n(?=\*\*[\w ]+\.\*\*)", "\n\n", body)  # each answer is a paragraph
        picture = f"pictures/reads_{name}.svg"
        shown = f"\n![What each decode step of {name} reads](../{picture})\n" if (docs / picture).exists() else ""
        signature = f"\n## Signature\n\n```{{eval-rst}}\n.. autofunction:: kvjax.presets.{name}\n   :no-index:\n```\n"
        _put(docs / "methods" / f"{name}.md", f"# {name}\n{shown}{body}{signature}")
    _put(docs / "methods.md", "".join((head, *rest)) + "\n" + _tree([f"docs/methods/{name}" for name in own]))


def exported() -> dict[str, list[str]]:
    """The names that kvjax exports, by their page of the API."""
    kvjax = import_module("kvjax")
    pages: dict[str, list[str]] = {page: [] for page in API}
    for name in kvjax.__all__:
        thing = getattr(kvjax, name)
        if inspect.ismodule(thing):
            continue
        module = getattr(thing, "__module__", "kvjax")
        fits = [(len(m), page) for page, (_, ms) in API.items() for m in ms if f"{module}.".startswith(f"{m}.")]
        pages[max(fits)[1]].append(f"kvjax.{name}")
    for page, (_, module) in SPACES.items():
        space = import_module(module)
        names = getattr(space, "__all__", None) or [
            n for n, thing in vars(space).items()
            if not n.startswith("_") and getattr(thing, "__module__", None) == module and callable(thing)
        ]  # fmt: skip
        listed = {id(_resolve(name)) for name in pages.get(page, ())}  # a part that stands at the front door too
        others = (f"{module}.{name}" for name in names if id(getattr(space, name)) not in listed)
        pages[page] = [*pages.get(page, ()), *others]
    for page, more in NAMED.items():
        pages[page] += more
    return {page: sorted(names, key=lambda name: _place(page, name)) for page, names in pages.items() if names}


def _place(page: str, name: str) -> tuple[bool, bool, int, int]:
    """Sorts names of `kvjax` itself first, functions before classes, the modules of a page in their order there, and
    names as in their source."""
    thing: Any = _resolve(name)
    modules, module = API.get(page, ("", ()))[1], getattr(thing, "__module__", "")
    first = next((i for i, own in enumerate(modules) if f"{module}.".startswith(f"{own}.")), len(modules))
    try:
        line = inspect.getsourcelines(thing)[1]
    except (TypeError, OSError):
        line = 0
    return name.count(".") > 1, inspect.isclass(thing), first, line


def api_pages(folder: Path) -> list[str]:
    """Writes the pages of the API, and returns their names."""
    found = exported()
    for page, names in found.items():
        title, module = SPACES.get(page, (API.get(page, ("",))[0], "kvjax"))
        entries = []
        for name in names:
            thing = _resolve(name)
            if not callable(thing):
                continue
            kind = "autoclass" if inspect.isclass(thing) else "autofunction"
            members = "   :members:\n" if kind == "autoclass" else ""
            entries.append(f"```{{eval-rst}}\n.. {kind}:: {name}\n{members}```\n")
        _put(folder / f"{page}.md", f"# {title}\n\n`import {module}`\n\n" + "\n".join(entries))
    return list(found)


def _resolve(name: str) -> object:
    module, _, last = name.rpartition(".")
    return getattr(import_module(module), last)


# --------------------------------------------------------------------------------------------------------------- links


class _Page(HTMLParser):
    """Links, resources and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []  # what a browser fetches by itself
        self.anchors: set[str] = {"", "top"}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") in ("stylesheet", "preload", "icon") and "href" in given:
            self.loaded.append(given["href"])
        elif tag in ("script", "img", "iframe", "source") and "src" in given:
            self.loaded.append(given["src"])


def broken_links(site: Path) -> Iterator[str]:
    """Links and resources of the site's pages that do not exist."""
    pages = {path.resolve(): _Page(path.read_text()) for path in site.rglob("*.html") if "_static" not in path.parts}
    for path, page in pages.items():
        where = path.relative_to(site.resolve())
        for address in page.loaded:
            if urlparse(address).scheme in ("http", "https"):
                yield f"{where} loads {address} from the network"
        for address in (*page.links, *page.loaded):
            if urlparse(address).scheme:
                continue
            file, anchor = urldefrag(address)
            target = (path.parent / unquote(file.partition("?")[0])).resolve() if file else path
            if not target.exists():
                yield f"{where} links to {address}: no such file"
            elif target in pages and unquote(anchor) not in pages[target].anchors:
                yield f"{where} links to {address}: no such heading"


def _outputs() -> Path:
    """The folder that keeps the outputs of notebooks, which another text of the library's code makes stale."""
    code = hashlib.sha256()
    for path in sorted(
        path for folder in ("kvjax", "models", "kernels_pallas") for path in (ROOT / folder).rglob("*.py")
    ):
        code.update(path.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return cache / "kvjax" / "notebooks" / code.hexdigest()[:16]


def build(out: Path, *, execute: bool = False) -> None:
    """Writes the site to `out`.

    With `execute`, a notebook shows the outputs of its last run here if neither it nor the library has changed since.

    Raises:
      RuntimeError: Sphinx warned, or a link is broken.
    """
    from sphinx.cmd.build import main

    if execute:
        os.environ["KVJAX_SITE_EXECUTE"] = str(_outputs())
    with tempfile.TemporaryDirectory() as folder:
        stage(Path(folder))
        status = main(["-q", "-W", "--keep-going", "-b", "html", "-c", str(ROOT / "docs"), folder, str(out)])
    if status:
        raise RuntimeError("the site has warnings, which are listed above")
    found = sorted(set(broken_links(out)))
    if found:
        raise RuntimeError("\n".join(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder for the HTML")
    parser.add_argument("--execute", action="store_true", help="run the notebooks, to show their outputs")
    given = parser.parse_args()
    try:
        build(given.out, execute=given.execute)
    except RuntimeError as error:
        sys.exit(str(error))
