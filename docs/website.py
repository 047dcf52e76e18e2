"""Builds the site: `python -m docs.website OUT` writes its HTML. Notebooks show the outputs that
their files have, with `--execute` those of a run.

The pages are staged in a temporary tree with the repository's own folders, so that links of
README.md and docs/ work both on a code host and on the site. Each section of docs/methods.md
about a method becomes a page. The pages of the API list names by role, of which Sphinx makes a
page each. A warning of Sphinx, as for a link without a target, and a resource on the network
are errors.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

COPIED = (
    "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "MAINTAINING.md", "SECURITY.md",
    "benchmarks/NOTES.md", "benchmarks/README.md", "training/README.md", "kvjax/data/kvjax-26m/README.md",
)  # fmt: skip
CONTENTS = {  # caption -> pages; of the guides, methods, notebooks and API below
    "Start": ["docs/getting_started", "docs/concepts", "docs/faq"],
    "Methods": ["docs/methods", "docs/gallery", "docs/support"],
    "Guides": [
        "docs/guides",
        "docs/guides/checkpoint",
        "docs/guides/own_model",
        "docs/guides/serve",
        "docs/guides/memory",
        "docs/guides/devices",
        "docs/guides/extend",
    ],
    "Notebooks": [],
    "Measurements": [
        "docs/performance",
        "docs/real_models",
        "docs/board",
        "docs/beside",
        "docs/claims",
        "docs/scaling",
        "benchmarks/README",
        "benchmarks/NOTES",
    ],
    "API": [
        "docs/api/attention",
        "docs/api/generation",
        "docs/api/presets",
        "docs/api/models",
        "docs/api/saving",
        "docs/api/devices",
        "docs/api/policies",
        "docs/api/selectors",
        "docs/api/stores",
        "docs/api/contrib",
        "docs/api/evictors",
        "docs/api/partial",
        "docs/api/operations",
        "docs/api/evaluate",
        "docs/api/testing",
        "docs/api/memory",
    ],
    "Project": [
        "docs/stability",
        "docs/glossary",
        "CHANGELOG",
        "CONTRIBUTING",
        "MAINTAINING",
        "SECURITY",
        "docs/citation",
        "docs/note",
        "kvjax/data/kvjax-26m/README",
        "training/README",
    ],
}


def stage(folder: Path) -> None:
    """Writes the sources of the site into an empty folder."""
    from kvjax.presets import REGISTRY

    for name in COPIED:
        _put(folder / name, (ROOT / name).read_text())
    for path in (ROOT / "docs").rglob("*"):
        if path.suffix in (".md", ".rst", ".svg", ".png"):
            target = folder / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    for path in (ROOT / "benchmarks" / "results").glob("*.svg"):
        _put(folder / path.relative_to(ROOT), path.read_text())
    own = list(REGISTRY)
    _put(folder / "docs" / "gallery.md", gallery(own))
    found = (ROOT / "notebooks").glob("*.ipynb")
    notebooks = sorted(found, key=lambda path: int(path.stem.partition("_")[0]))
    for path in notebooks:
        (folder / "notebooks").mkdir(exist_ok=True)
        shutil.copyfile(path, folder / "notebooks" / path.name)

    for (
        name,
        thing,
    ) in documented().items():  # autosummary would look up all members of each first
        module, _, last = name.rpartition(".")
        kind = (
            "function"
            if not isinstance(thing, type)
            else "exception"
            if issubclass(thing, Exception)
            else "class"
        )
        text = f"{last}\n{'=' * len(last)}\n\n.. currentmodule:: {module}\n\n.. auto{kind}:: {last}\n"
        _put(
            folder / "docs" / "api" / f"{name}.rst", text + "   :members:\n" * (kind == "class")
        )

    contents = {caption: list(pages) for caption, pages in CONTENTS.items()}
    contents["Notebooks"] = [f"notebooks/{path.stem}" for path in notebooks]
    split_methods(folder / "docs", own)
    readme = (ROOT / "README.md").read_text()
    trees = "".join(_tree(pages, caption) for caption, pages in contents.items())
    _put(folder / "index.md", f"{readme}\n{trees}")
    for page in (*folder.rglob("*.md"), *folder.rglob("*.ipynb")):
        link = re.compile(rf"\]\(((?:\.\./|docs/)*)methods\.md#({'|'.join(own)})\)")
        text = link.sub(r"](\1methods/\2.md)", page.read_text()).replace(
            "../README.md", "../index.md"
        )
        _put(page, unbroken(text) if page.suffix == ".md" else text)


def unbroken(text: str) -> str:
    """The text, with non-breaking spaces inside the numbers of its tables, as in "3.5 ± 1.3 %"."""
    return re.sub(
        r"^\|.*",
        lambda row: re.sub(r"(?<=[\d±x]) (?=[\d.(±%x])", "\u00a0", row[0]),
        text,
        flags=re.MULTILINE,
    )


def _tree(pages: list[str], caption: str = "", options: str = ":hidden:") -> str:
    title = f":caption: {caption}\n" if caption else ""
    return (
        f"```{{toctree}}\n{options}\n{title}\n"
        + "\n".join(f"/{page}" for page in pages)
        + "\n```\n\n"
    )


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
        body = re.sub(
            r"(?<=[^\n])\n(?=\*\*[\w ]+\.\*\*)", "\n\n", body
        )  # each answer is a paragraph
        picture = f"pictures/reads_{name}.svg"
        shown = (
            f"\n![What each decode step of {name} reads](../{picture})\n"
            if (docs / picture).exists()
            else ""
        )
        signature = f"\n## Signature\n\n```{{eval-rst}}\n.. autofunction:: kvjax.presets.{name}\n   :no-index:\n```\n"
        _put(docs / "methods" / f"{name}.md", f"# {name}\n{shown}{body}{signature}")
    _put(
        docs / "methods.md",
        "".join((head, *rest)) + "\n" + _tree([f"docs/methods/{name}" for name in own]),
    )


def documented() -> dict[str, object]:
    """What the pages of the API list, by its full name."""
    listed = {}
    for path in sorted((ROOT / "docs" / "api").glob("*.rst")):
        text = path.read_text()
        module = re.search(r"^\.\. currentmodule:: (.+)$", text, re.MULTILINE)
        for name in re.findall(r"^   ([A-Za-z][\w.]*)$", text, re.MULTILINE):
            full = f"{module[1] if module else 'kvjax'}.{name}"
            listed[full] = _resolve(full)
    return listed


def _resolve(name: str) -> object:
    module, _, last = name.rpartition(".")
    return getattr(import_module(module), last)


LOADED = re.compile(
    r"""<(?:(?:script|img|iframe|source)\b[^>]*\bsrc|link\b(?=[^>]*\brel="(?:stylesheet|preload|icon)")[^>]*\bhref)"""
    r"""="(https?:[^"]*)"""
)


def loaded(site: Path) -> Iterator[str]:
    """What a browser would fetch from the network by itself. Sphinx checks the links."""
    for path in site.rglob("*.html"):
        for address in LOADED.findall(path.read_text()):
            yield f"{path.relative_to(site)} loads {address} from the network"


def _outputs() -> Path:
    """The folder that keeps the outputs of notebooks, which another text of the library's code
    makes stale.
    """
    code = hashlib.sha256()
    for path in sorted(
        path
        for folder in ("kvjax", "models", "kernels_pallas")
        for path in (ROOT / folder).rglob("*.py")
    ):
        code.update(path.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return cache / "kvjax" / "notebooks" / code.hexdigest()[:16]


def build(out: Path, *, execute: bool = False, online: bool = False) -> None:
    """Writes the site to `out`.

    With `execute`, a notebook shows the outputs of its last run here if neither it nor the
    library has changed since. With `online`, names of other libraries link to their sites, and
    links to the network are checked.

    Raises:
      RuntimeError: Sphinx warned, or a page would load something from the network.
    """
    from sphinx.cmd.build import main

    gc.set_threshold(
        100_000, 50, 50
    )  # pages are trees of small objects, which a collection would look through often
    if execute:
        os.environ["KVJAX_SITE_EXECUTE"] = str(_outputs())
    if online:
        os.environ["KVJAX_SITE_ONLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        stage(Path(folder))
        given = ["-q", "-W", "--keep-going", "-c", str(ROOT / "docs"), folder]
        status = main(["-b", "html", *given, str(out)])
        if online and not status:
            status = main(["-b", "linkcheck", *given, str(Path(folder) / "_links")])
    if status:
        raise RuntimeError("the site has warnings, which are listed above")
    found = sorted(set(loaded(out)))
    if found:
        raise RuntimeError("\n".join(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder for the HTML")
    parser.add_argument(
        "--execute", action="store_true", help="run the notebooks, and show these outputs"
    )
    parser.add_argument(
        "--online",
        action="store_true",
        help="link to other libraries' sites, and check all links",
    )
    given = parser.parse_args()
    try:
        build(given.out, execute=given.execute, online=given.online)
    except RuntimeError as error:
        sys.exit(str(error))
