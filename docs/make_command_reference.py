"""The page of the command line, from the commands themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer
from docs.make_tables import code, table

from zeropoint.cli.app import app


def _described(text: str) -> list[str]:
    """Return the help of a command as Markdown: paragraphs, and its examples as a block."""
    text, _, examples = text.replace("\b", "").partition("Examples:")
    lines = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text.strip())]
    found = [line for part in lines for line in (_plain(part), "")]
    block = [line.strip() for line in examples.strip().splitlines()]
    return [*found, *(["```sh", *block, "```", ""] if block else [])]


def _plain(text: str) -> str:
    """Return a sentence of help with what Markdown would take for markup kept as text."""
    return re.sub(r"([*_<])", r"\\\1", text)


def _option(parameter: Any, context: Any) -> str:
    """Return how an option is written, such as ``--to SCHEME``."""
    return str(parameter.get_help_record(context)[0])


def _groups(command: Any) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield arguments, then options under the headings of ``--help``, each with its help."""
    groups: dict[str, list[tuple[str, str]]] = {}
    context = typer.Context(command)
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        is_argument = parameter.param_type_name == "argument"
        title = "Argument" if is_argument else getattr(parameter, "rich_help_panel", None) or "Option"
        name = parameter.metavar or parameter.name.upper() if is_argument else _option(parameter, context)
        groups.setdefault(title, []).append((code(name), _plain(parameter.help or "")))
    yield from groups.items()


def page() -> str:
    """Return the page: each command with its help, arguments, options and examples."""
    top = typer.main.get_command(app)
    lines = [
        "# Command line",
        "",
        "`zeropoint COMMAND --help` prints the same text. Each command ends with exit status",
    ]
    lines += [
        "0, 1 for an error, 2 for a wrong command line, 130 after Ctrl-C and 143 after SIGTERM. With `--json`"
    ]
    lines += ['it writes one JSON document to stdout, for an error `{"error": ...}`.', ""]
    for name, command in sorted(top.commands.items()):  # type: ignore[attr-defined]
        if command.hidden:
            continue
        lines += [f"## zeropoint {name}", "", *_described(command.help or command.short_help or "")]
        for title, rows in _groups(command):
            lines += [table((title, ""), rows)]
    return "\n".join(lines)
