"""Files for people who find the project: they say what is so, and forms ask for what helps."""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.docs.page_commands import DOCS, OPTIONS, commands

from zeropoint import __version__

ROOT = Path(__file__).resolve().parents[2]
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FIRST = DOCS / "how-to" / "first-answer.md"
TWO_SCREENS = 100
"""Lines of a terminal."""


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_for_doctor_and_inspect(path: Path) -> None:
    form: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= form.keys()
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids))
    text = path.read_text(encoding="utf-8")
    assert "zeropoint doctor" in text
    assert re.search(r"zeropoint inspect (PATH )?--json", text)


def test_the_citation_has_the_version_and_license_of_the_package() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= found.keys()
    assert (found["version"], found["license"]) == (PROJECT["version"], PROJECT["license"])
    assert PROJECT["version"] == __version__


def test_classifiers_name_the_version_of_python_that_tests_run_on_and_no_other() -> None:
    named = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert named == [f"{sys.version_info.major}.{sys.version_info.minor}"]
    assert PROJECT["requires-python"] == f">={named[0]}"
    assert "Operating System :: POSIX :: Linux" in PROJECT["classifiers"]


def test_the_first_release_fits_on_two_screens() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert releases[0].startswith("[Unreleased]\n")
    assert releases[-1].startswith(f"[{__version__}]")
    assert len(releases[-1].splitlines()) <= TWO_SCREENS / 2
    assert len(text.splitlines()) <= TWO_SCREENS


def test_hooks_run_the_programs_of_the_environment() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0][
        "hooks"
    ]
    programs = {hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in hooks}
    assert programs == {"ruff", "mypy", "lint-imports", "python"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(f"$(BIN)/{program}" in makefile for program in programs)


def test_the_readme_is_short_before_its_tables_of_what_is_supported() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.partition("## What it supports")[0].split()) < 500
    assert {"report.png", "divergence.svg"} <= set(re.findall(r"\(docs/images/([\w.-]+)\)", text))
    assert "GB/s" not in text


def test_links_of_the_files_at_the_root_lead_somewhere() -> None:
    for name in ("SECURITY.md", "CHANGELOG.md", "CHANGELOG-history.md", "CONTRIBUTING.md"):
        links = re.findall(r"\]\((?!https?://)([^)#\s]+)", (ROOT / name).read_text(encoding="utf-8"))
        assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_first_answer_takes_five_commands_whose_options_exist() -> None:
    text = FIRST.read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    assert [len(block.splitlines()) for block in blocks] == [5, 5]
    for words in commands(FIRST):
        assert {word for word in words if word.startswith("--")} <= OPTIONS[words[0]]
