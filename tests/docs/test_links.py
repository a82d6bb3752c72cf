"""Links between the pages lead to files and headings that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    bare = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", found.lower()).replace(" ", "-") for found in HEADING.findall(bare)}


def broken(page: Path) -> list[str]:
    """Return the links of a page that lead nowhere."""
    found = []
    for path, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            found.append(f"{path}#{anchor}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_to_a_heading_that_exists(page: Path) -> None:
    assert broken(page) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](#one) [b](#two) [c](absent.md) [d](page.md#one)\n", encoding="utf-8")
    assert broken(page) == ["#two", "absent.md#"]


@pytest.mark.parametrize("word", ["vLLM", "GPU", "CUDA", "Windows", "macOS", "hf download"])
def test_a_user_finds_the_word_that_is_looked_for_first(word: str) -> None:
    assert word in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_file_that_the_architecture_names_is_there() -> None:
    text = (ROOT / "docs" / "contributing" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_]+/(?:[a-z_]+/)*(?:[a-z_]+\.py)?)`", text)
    assert len(named) > 30
    assert [name for name in named if not (ROOT / "src" / "zeropoint" / name).exists()] == []


def test_every_page_that_sources_and_contributors_name_is_there() -> None:
    texts = [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py"), ROOT / "CONTRIBUTING.md"]
    named = {
        found
        for path in texts
        for found in re.findall(r"(?<![\w/])docs/[\w/-]+\.(?:md|csv|py)", path.read_text(encoding="utf-8"))
    }
    # Pages of other projects, which codecs cite as their sources.
    theirs = {"docs/gguf.md", "docs/Operators.md", "docs/ContribOperators.md", "docs/ExternalData.md"}
    assert len(named - theirs) > 5
    assert [name for name in sorted(named - theirs) if not (ROOT / name).exists()] == []
