"""Build the documentation site in build/site: ``python -m docs.make_site``.

The pages below docs/ are copied to build/pages, with what only the site has: the command line, the Python API
and the index of errors, made from the code; tables of CSV files after the links to them; CONTRIBUTING.md and
CHANGELOG.md. Zensical then builds them strictly: a link that leads nowhere is an error. Nothing is fetched.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import docs.make_api_reference
import docs.make_command_reference
import docs.make_error_index
from docs.make_tables import table

DOCS = Path(__file__).parent
ROOT = DOCS.parent
CONFIGURATION = DOCS / "site.toml"
CSV_LINK = re.compile(r"^\[([^\]\n]*)\]\(([^)\s]+\.csv)\)$", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\((?!https?://|#)([^)#\s]+)(#[^)\s]*)?\)")
HEADING = re.compile(r"^# (.+)$", re.MULTILINE)
HOME = "README.md"
COPIED = {"CONTRIBUTING.md": "contributing/rules.md", "CHANGELOG.md": "contributing/changelog.md"}
"""Pages of the root -> where the site has them."""


def csv_table(path: Path) -> str:
    """Return a CSV file as a Markdown table; its cells are Markdown."""
    head, *rows = csv.reader(path.read_text(encoding="utf-8").splitlines())
    return table(head, rows)


def with_tables(text: str, folder: Path) -> str:
    """Return a page in which a line that is a link to a CSV file is followed by its table."""
    return CSV_LINK.sub(lambda found: f"{found[0]}\n\n{csv_table(folder / found[2])}", text)


def with_links(text: str, page: Path, targets: Mapping[Path, Path]) -> str:
    """Return a page whose links work on the site: what it does not hold is named as code, with its path.

    Args:
        text: of the page, with links that are relative to ``page``.
        page: where the text comes from.
        targets: files of the repository -> where the site has them, relative to it.
    """

    def link(found: re.Match[str]) -> str:
        aim = (page.parent / found[2]).resolve()
        if aim in targets:
            here = targets[page.resolve()].parent
            up = "../" * len(here.parts)
            return f"[{found[1]}]({up}{targets[aim].as_posix()}{found[3] or ''})"
        if aim.is_relative_to(ROOT) and aim.exists():
            name = aim.relative_to(ROOT).as_posix()
            shown = found[1].strip("`")
            return f"`{name}`" if shown in (name, aim.name, "Source") else f"{found[1]} (`{name}`)"
        return found[0]

    return LINK.sub(link, text)


def title(path: Path) -> str:
    """Return the first heading of a page."""
    found = HEADING.search(path.read_text(encoding="utf-8"))
    return found[1] if found else path.stem


def navigation(entries: Sequence[object], pages: Path, named: frozenset[str]) -> list[object]:
    """Return the navigation with titles; an entry that ends in a slash is all other pages of a folder.

    Args:
        entries: paths, or mappings of a title to more entries; a heading without pages is left out.
        pages: the folder of the pages.
        named: all paths of the navigation.
    """
    found: list[object] = []
    for entry in entries:
        if isinstance(entry, str) and entry.endswith("/"):
            names = {f"{entry}{path.name}" for path in (pages / entry).glob("*.md")} - named
            ordered = sorted(names, key=lambda name: (not name.endswith("README.md"), name))
            found += [{title(pages / name): name} for name in ordered]
        elif isinstance(entry, str):
            found.append({"Home" if entry == HOME else title(pages / entry): entry})
        elif isinstance(entry, Mapping):
            for heading, inner in entry.items():
                if inside := navigation(inner, pages, named):
                    found.append({heading: inside})
    return found


def places(entries: Sequence[object]) -> Iterator[str]:
    """Yield all paths of a navigation."""
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, Mapping):
            for inner in entry.values():
                yield from places([inner] if isinstance(inner, str) else inner)


def toml(value: object) -> str:
    """Return a value of strings, booleans, lists and mappings as TOML on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml(key)} = {toml(inner)}" for key, inner in value.items()) + "}"
    assert isinstance(value, Sequence)
    return "[" + ", ".join(map(toml, value)) + "]"


def made_pages() -> dict[str, str]:
    """Return the pages that only the site has, by their places in it."""
    api = docs.make_api_reference.pages()
    return {
        "reference/command_line.md": docs.make_command_reference.page(),
        "reference/errors.md": docs.make_error_index.page(),
        **{f"reference/api/{name}": text for name, text in api.items()},
    }


def gather(pages: Path) -> None:
    """Write all pages of the site, and its pictures, to a folder."""
    sources = {path.resolve(): path.relative_to(DOCS) for path in sorted(DOCS.rglob("*")) if _is_page(path)}
    targets = sources | {(ROOT / name).resolve(): Path(place) for name, place in COPIED.items()}
    for path, place in targets.items():
        (pages / place).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text = with_tables(path.read_text(encoding="utf-8"), path.parent)
            (pages / place).write_text(with_links(text, path, targets), encoding="utf-8")
        else:
            shutil.copyfile(path, pages / place)
    for place, text in made_pages().items():
        (pages / place).parent.mkdir(parents=True, exist_ok=True)
        (pages / place).write_text(text, encoding="utf-8")


def _is_page(path: Path) -> bool:
    """Tell whether the site holds a file: pages, pictures, tables and styles."""
    return path.is_file() and path.suffix in {".md", ".svg", ".png", ".csv", ".css", ".ipynb"}


def build(work: Path) -> subprocess.CompletedProcess[str]:
    """Build the site in ``site`` of a folder; the exit status is 1 where a link leads nowhere.

    Args:
        work: where the pages and the configuration are written, too.
    """
    for name in ("pages", "site"):
        shutil.rmtree(work / name, ignore_errors=True)
    gather(work / "pages")
    settings = tomllib.loads(CONFIGURATION.read_text(encoding="utf-8"))
    entries = settings["navigation"]
    nav = navigation(entries, work / "pages", frozenset(places(entries)))
    project = settings["project"] | {"docs_dir": "pages", "site_dir": "site", "nav": nav}
    lines = ["[project]", *(f"{key} = {toml(value)}" for key, value in project.items())]
    (work / "zensical.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=work)


if __name__ == "__main__":
    result = build(ROOT / "build")
    sys.stdout.write(result.stdout)
    sys.stderr.write(result.stderr)
    sys.exit(result.returncode)
