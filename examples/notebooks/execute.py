"""Execute the notebooks of this folder, and write what their cells show into them.

    python examples/notebooks/execute.py [NAME.ipynb ...]

Cells run in this process, in one namespace, as Jupyter runs them: the value of a last expression is shown by
its ``_repr_html_`` and ``_repr_svg_``, and by its ``repr``. The tests do the same and compare.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SHOWN = {"text/html": "_repr_html_", "image/svg+xml": "_repr_svg_"}


def executed(path: Path, folder: Path) -> dict[str, Any]:
    """Return a notebook with the outputs of its cells, which run in ``folder``."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    number = 0
    with contextlib.chdir(folder):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                number += 1
                cell["execution_count"] = number
                cell["outputs"] = list(_outputs("".join(cell["source"]), names, number))
    return notebook


def _outputs(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Run a cell and return what it prints, then what its last expression shows."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    found: list[dict[str, Any]] = []
    if printed.getvalue():
        found.append({"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())})
    if value is not None:
        texts = {kind: getattr(value, name)() for kind, name in SHOWN.items() if hasattr(value, name)}
        data = {kind: _lines(text) for kind, text in {**texts, "text/plain": repr(value)}.items()}
        found.append(
            {"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"}
        )
    return found


def _lines(text: str) -> list[str]:
    """Return lines as notebooks keep them; the folder in which cells ran is the reader's own."""
    return text.replace(str(Path.cwd()), ".").splitlines(keepends=True)


def text_of(notebook: dict[str, Any]) -> str:
    """Return the text of a notebook's file."""
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def main(names: list[str]) -> None:
    """Execute the notebooks of these names, or all."""
    for path in [HERE / name for name in names] or sorted(HERE.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            text = text_of(executed(path, Path(folder).resolve()))
        path.write_text(text, encoding="utf-8")
        print(f"{path.name}: {len(text):,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
