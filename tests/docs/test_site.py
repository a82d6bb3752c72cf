"""The site builds strictly: every page is in it, every link leads somewhere, and nothing is fetched."""

import re
import tomllib
from pathlib import Path

import pytest
from docs.make_pages import FOLDER, pages

from docs import make_site

STUBS = {
    name: f"# {name}\n"
    for name in ("reference/command_line.md", "reference/errors.md", "reference/api/README.md")
}
"""Pages made from the code, without what is in them: their making has tests of its own."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_site, "made_pages", lambda: STUBS)
        result = make_site.build(work)
    assert result.returncode == 0, result.stdout + result.stderr
    return work / "site"


def test_every_page_of_the_repository_is_built_and_in_the_navigation(built: Path) -> None:
    settings = tomllib.loads((built.parent / "zensical.toml").read_text(encoding="utf-8"))
    named = list(make_site.places(settings["project"]["nav"]))
    assert sorted(named) == sorted({*named})
    for page in pages():
        place = page.relative_to(FOLDER).as_posix()
        html = place.replace("README.md", "index.md").removesuffix(".md") + ".html"
        assert (built / html).is_file(), place
        assert place in named


def test_no_page_asks_another_host(built: Path) -> None:
    asked = re.compile(r"""(?:src|href)=["']?https?://[^"'> ]+(?:\.css|\.js|\.woff2?)|fonts\.g""")
    assert [
        page.name for page in built.rglob("*.html") if asked.search(page.read_text(encoding="utf-8"))
    ] == []


def test_tables_of_measurements_are_on_their_pages(built: Path) -> None:
    assert "mse_weighted, random tokens" in (built / "evidence" / "quality.html").read_text(encoding="utf-8")


def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site.toml").write_text(
        'navigation = ["a.md"]\n[project]\nsite_name = "a"\n', encoding="utf-8"
    )
    (tmp_path / "pages").mkdir()
    monkeypatch.setattr(make_site, "CONFIGURATION", tmp_path / "site.toml")
    for link, status in (("a.md", 0), ("absent.md", 1)):

        def page(pages: Path, link: str = link) -> None:
            pages.mkdir(exist_ok=True)
            (pages / "a.md").write_text(f"# A\n[a]({link})\n", encoding="utf-8")

        monkeypatch.setattr(make_site, "gather", page)
        assert make_site.build(tmp_path).returncode == status


def test_links_out_of_the_pages_become_paths(tmp_path: Path) -> None:
    page, target = make_site.DOCS / "start" / "x.md", make_site.DOCS / "README.md"
    places = {page.resolve(): Path("start/x.md"), target.resolve(): Path("README.md")}
    text = "[home](../README.md#a) [rules](../../Makefile) [tests/conftest.py](../../tests/conftest.py) [b](https://x.y/z.md)"
    assert make_site.with_links(text, page, places) == (
        "[home](../README.md#a) rules (`Makefile`) `tests/conftest.py` [b](https://x.y/z.md)"
    )


def test_settings_are_those_of_an_offline_site() -> None:
    settings = tomllib.loads(make_site.CONFIGURATION.read_text(encoding="utf-8"))
    assert settings["project"]["theme"]["font"] is False


@pytest.mark.slow
def test_the_whole_site_builds_strictly(tmp_path: Path) -> None:
    result = make_site.build(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "zeropoint quantize" in (tmp_path / "site" / "reference" / "command_line.html").read_text(
        encoding="utf-8"
    )
