"""The index of error messages: each sentence that the library raises, by its exception."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from docs.make_tables import table

from zeropoint import errors

SOURCE = Path(errors.__file__).parent
ABOUT = """\
All exceptions are subclasses of `zeropoint.ZeropointError`, which is a `ValueError`. A message names the
argument, its value, the rule and a remedy; … is what a message fills in. Search this page for the words of a
message to find where it comes from."""
CLASSES = {
    name: found
    for name, found in vars(errors).items()
    if inspect.isclass(found) and issubclass(found, errors.ZeropointError)
}


def _text(node: ast.expr) -> str | None:
    """Return a message with an ellipsis for what is filled in, or None where it is no literal."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        return None if left is None or right is None else left + right
    return None


def messages() -> Iterator[tuple[str, str, str]]:
    """Yield the class, the message and the file of each error that is raised with a literal."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            call = node.exc if isinstance(node, ast.Raise) else None
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or not call.args:
                continue
            text = _text(call.args[0])
            if call.func.id in CLASSES and text and len(text.replace("…", "").split()) > 1:
                yield call.func.id, " ".join(text.split()), path.relative_to(SOURCE).as_posix()


def page() -> str:
    """Return the page: a table of messages for each class, in order."""
    lines = ["# Errors", "", ABOUT, ""]
    said = list(messages())
    for name, found in CLASSES.items():
        rows = sorted({(text, file) for kind, text, file in said if kind == name})
        about = (inspect.getdoc(found) or "").split("\n")[0]
        lines += [f"## {name}", "", about, ""]
        if rows:
            lines += [table(("Message", "Raised in"), [(_cell(text), f"`{file}`") for text, file in rows])]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Return a message as code, in which nothing is markup."""
    return f"`{text.replace('`', chr(39))}`"
