"""Pages for people of other tools: commands and functions there are taken, and what is named exists."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest
import torch
from tests.architectures.trial import save
from tests.architectures.zoo import ZOO
from tests.docs.page_commands import DOCS, OPTIONS, commands, run_command
from tests.oracles import tiny_models

import zeropoint as zp
from zeropoint.checkpoint.plan.recipe import RecipeText, codec_for, require_blocks
from zeropoint.methods import method_named
from zeropoint.names_elsewhere import _PAGES

pytestmark = pytest.mark.filterwarnings("ignore")  # torch says that what it quantizes with is deprecated
PAGES = {path.stem: path for path in sorted((DOCS / "migration").glob("*.md"))}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in PAGES.items()}
SPANS = [
    (name, span)
    for name, text in TEXTS.items()
    for row in re.findall(r"^\| .* \| (.*) \|$", text.partition("\n## ")[0], flags=re.MULTILINE)
    for span in re.findall(r"`([^`]+)`", row)
]
CASES = [f"{name} {n}" for name, path in PAGES.items() for n, _ in enumerate(commands(path), 1)]
QUICK = ("bitsandbytes 1", "torchao 3")


def test_each_tool_has_a_page() -> None:
    tools = {
        "gptqmodel",
        "autoawq",
        "llama-quantize",
        "bitsandbytes",
        "torchao",
        "llm-compressor",
        "auto-round",
    }
    assert PAGES.keys() == tools | {"torch"}
    assert _PAGES.keys() <= PAGES.keys()
    assert set(QUICK) < set(CASES)


@pytest.mark.parametrize("name", PAGES)
def test_blocks_of_python_run_and_tests_that_are_named_exist(name: str) -> None:
    for code in re.findall(r"^```python\n(.*?)^```$", TEXTS[name], flags=re.DOTALL | re.MULTILINE):
        exec(compile(code, name, "exec"), {})
    named = re.findall(r"`((?:tests|docs|benchmarks)/[^`]+)`", TEXTS[name])
    assert len(named) >= 2
    assert [path for path in named if not (DOCS.parent / path).is_file()] == []


def words_of(span: str) -> list[str]:
    """Return the words behind the command of a span, or an empty list for one that is no command line."""
    words = shlex.split(span) if span.startswith(("zeropoint ", "--")) else []
    return words[1:] if words[:1] == ["zeropoint"] else words


@pytest.mark.parametrize("span", sorted({span for _, span in SPANS if words_of(span)}))
def test_commands_have_these_options_schemes_and_methods(span: str) -> None:
    words = words_of(span)
    known = OPTIONS[words[0]] if words[0] in OPTIONS else OPTIONS["quantize"]
    assert {word for word in words if word.startswith("--")} <= known
    options = dict(itertools.pairwise(words))
    if "--method" in options:
        assert method_named(options["--method"], of_files=True)
    if "--to" in options and words[0] != "plan":
        codec = codec_for(options.get("--format"), options["--to"])
        if RecipeText.of(options["--to"]).mixture(codec) is None:
            require_blocks(options["--to"], codec)


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_a_command_runs(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, _, number = case.partition(" ")
    monkeypatch.chdir(tmp_path)
    if name == "llama-quantize":
        tiny_models.write(tmp_path / "MODEL", "llama3")
    else:
        save(next(animal for animal in ZOO if animal.name == "Llama"), tmp_path / "MODEL", torch.bfloat16)
    lines = commands(PAGES[name])
    run_command(lines, int(number))
    words = lines[int(number) - 1]
    if words[0] == "quantize":
        assert zp.verify_checkpoint(words[2], "MODEL").ok
