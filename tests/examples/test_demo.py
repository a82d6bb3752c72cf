"""The demonstration: it uses what users import, and its page says how many schemes there are."""

from __future__ import annotations

import ast
from pathlib import Path

TREE = ast.parse((Path(__file__).resolve().parents[2] / "examples/demo.py").read_text(encoding="utf-8"))


def test_the_demo_imports_the_public_page_alone() -> None:
    names = [alias.name for node in ast.walk(TREE) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(TREE) if isinstance(node, ast.ImportFrom)]
    assert [name for name in names if name.partition(".")[0] == "zeropoint"] == ["zeropoint"]


def test_the_demo_says_how_many_schemes_it_compares() -> None:
    (schemes,) = [
        node.value.elts
        for node in ast.walk(TREE)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and [ast.unparse(target) for target in node.targets] == ["SCHEMES"]
    ]
    assert len(schemes) == 6
    assert "in six ways" in (ast.get_docstring(TREE) or "")
