"""The command lines on pages, and what runs them on a tiny model, with random tokens as the text."""

import re
import shlex
from pathlib import Path

import typer

from zeropoint.cli.app import app
from zeropoint.cli.main import main

DOCS = Path(__file__).resolve().parents[2] / "docs"
OPTIONS = {
    name: {option for parameter in command.params for option in parameter.opts}
    for name, command in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
}
"""Command to its options."""


def commands(page: Path) -> list[list[str]]:
    """Return the words of each command line in the shell blocks of a page."""
    blocks = re.findall(
        r"^```sh\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("zeropoint ")]
    return [shlex.split(line)[1:] for line in lines]


def run_command(lines: list[list[str]], number: int) -> None:
    """Run one command of a page in the current folder, after the one that writes what it reads."""
    words = lines[number - 1]
    if words[1] != "MODEL":
        run_command(lines, next(n for n, line in enumerate(lines, 1) if line[2:3] == words[1:2]))
    given = ["random" if word == "TEXT.txt" else word for word in words]
    given += ["--samples", "2", "--length", "16"] if "random" in given else []
    assert main(given) == 0
