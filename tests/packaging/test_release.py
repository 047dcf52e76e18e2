"""`.ci/release.py`: what a tag may release."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def release(tmp_path: Path) -> ModuleType:
    """The script, over a repository of version 1.2.0 without a changelog."""
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ROOT = tmp_path
    (tmp_path / "kvjax").mkdir()
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (tmp_path / "kvjax" / "__init__.py").write_text('__version__ = "1.2.0"\n')
    (tmp_path / "CITATION.cff").write_text("version: 1.2.0\n")
    return module


def write_changelog(folder: Path, before: str) -> None:
    text = f"# Changelog\n\n{before}## 1.2.0 (2026-01-02)\n\n- An old entry.\n"
    (folder / "CHANGELOG.md").write_text(text)


@pytest.mark.parametrize("before", ["", "## Unreleased\n\n"])
def test_a_tag_whose_entries_are_all_released_passes(release, tmp_path, before):
    write_changelog(tmp_path, before)
    assert release.check_versions("v1.2.0") == "1.2.0"


@pytest.mark.parametrize(
    "entries",
    ["- A fix.\n- Another.\n\n", "**Part**\n\n- A fix.\n  Its end.\n\n- Another.\n\n"],
)
def test_a_tag_with_unreleased_entries_is_refused(release, tmp_path, entries):
    write_changelog(tmp_path, f"## Unreleased\n\n{entries}")
    with pytest.raises(SystemExit, match=r"^CHANGELOG.md has 2 entries under Unreleased; move"):
        release.check_versions("v1.2.0")
    assert release.check_versions(None) == "1.2.0"


def test_a_tag_of_another_version_is_refused(release, tmp_path):
    write_changelog(tmp_path, "")
    with pytest.raises(SystemExit, match=r"the tag has 1\.3\.0"):
        release.check_versions("v1.3.0")


def test_pages_for_an_index_link_to_the_files_of_the_tag(release):
    text = (ROOT / "README.md").read_text()
    page = release.with_whole_links(text, "REPOSITORY", "v1.2.0", Path("."))
    kinds = re.findall(r"\]\((REPOSITORY/(\w+)/v1\.2\.0/([^)#]+)[^)]*)\)", page)
    assert len(kinds) == len(re.findall(r"\]\((?!https?:)", text)) > 9
    assert not re.findall(r"\]\((?!REPOSITORY/)", page)
    for _, kind, name in kinds:
        assert (ROOT / name).is_file()
        assert kind == ("raw" if name.endswith(".svg") else "blob")
    page = release.with_whole_links("[a](../b.md#c) [d](#e)", "H", "v1.2.0", Path("x/y"))
    assert page == "[a](H/blob/v1.2.0/x/b.md#c) [d](#e)"


def test_no_page_links_to_what_a_release_renames():
    """A release gives "Unreleased" its number."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert not [page.name for page in pages if "CHANGELOG.md#unreleased" in page.read_text()]
