"""What the table for people of other tools says to type is what commands and functions take."""

from __future__ import annotations

import csv
import itertools
import re
import shlex
from pathlib import Path

import pytest
import torch
import typer

import zeropoint as zp
from zeropoint.checkpoint.plan.recipe import RecipeText, codec_for, require_blocks
from zeropoint.cli.app import app

TABLE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "tables" / "what_you_typed.csv"
ROWS = list(csv.reader(TABLE.read_text(encoding="utf-8").splitlines()))[1:]
NOW = [now for _, _, now in ROWS]
SPANS = [span for cell in NOW for span in re.findall(r"`([^`]+)`", cell)]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_the_table_is_read() -> None:
    tools = {tool for tool, _, _ in ROWS}
    assert {"torch.ao", "torchao", "bitsandbytes", "llm-compressor", "auto-round"} <= tools
    assert {"llama-quantize", "optimum"} <= tools
    assert len(NOW) >= 15


@pytest.mark.parametrize("line", [span for span in SPANS if span.startswith("zeropoint ") and "--" in span])
def test_commands_have_these_options_and_schemes(line: str) -> None:
    _, command, *words = shlex.split(line)
    known = {name for parameter in COMMANDS[command].params for name in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known
    options = dict(itertools.pairwise(words))
    codec = codec_for(options.get("--format"), options["--to"])
    if RecipeText.of(options["--to"]).mixture(codec) is None:
        require_blocks(options["--to"], codec)


@pytest.mark.parametrize("code", [span for span in SPANS if span.startswith("zp.")])
def test_functions_run(code: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(256, 128))
    if "convert(" in code:
        model = zp.prepare(model, "w8a8")
    assert eval(code, {"zp": zp, "model": model, "x": torch.randn(8, 128)}) is not None
