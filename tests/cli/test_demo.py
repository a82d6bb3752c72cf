"""The demonstration: it uses what users import, and says how many schemes there are."""

import ast
from pathlib import Path

import pytest
from tests.cli.conftest import Call

import zeropoint as zp
from zeropoint.cli import demonstration

TREE = ast.parse(
    (Path(__file__).resolve().parents[2] / "src/zeropoint/cli/demonstration.py").read_text(encoding="utf-8")
)


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


def test_a_missing_package_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demonstration, "find_spec", lambda _: None)
    with pytest.raises(zp.UnsupportedError, match=r"package transformers, .*pip install 'zeropoint\[demo\]'"):
        demonstration.demonstrate(Path("page.html"), overwrite=False)


def test_a_page_that_is_there_stays_unless_asked(call: Call, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("mine")
    called = call("demo", "-o", tmp_path / "page.html")
    assert (called.status, "page.html exists; name another page" in called.err) == (1, True)
    assert (tmp_path / "page.html").read_text() == "mine"
    nowhere = call("demo", "-o", tmp_path / "page.html" / "other.html")
    assert (nowhere.status, "the page cannot be written to" in nowhere.err) == (1, True)
