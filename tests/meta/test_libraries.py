"""Calls into libraries that read files of others stand behind one door (libraries.py)."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from zeropoint import libraries

SOURCE = Path(libraries.__file__).parent
LIBRARIES = frozenset(("transformers", "tokenizers", "onnx", "gguf", "yaml", "safetensors", "sentencepiece"))
DOOR = "reading"
OURS = {
    "onnx.defs.get_schema": "a table of the library",
    "onnx.defs.has": "a table of the library",
    "onnx.helper.make_attribute": "writes an attribute of ours",
    "onnx.helper.make_node": "writes a node of ours",
    "onnx.helper.tensor_dtype_to_np_dtype": "a table of the library",
    "onnx.helper.make_tensor_value_info": "writes a value of ours",
    "onnx.ModelProto": "an empty message",
    "transformers.CompressedTensorsConfig": "options of ours",
    "transformers.cache_utils.DynamicCache": "an empty cache",
    "transformers.pytorch_utils.Conv1D": "a layer of ours",
    "transformers.utils.logging.disable_progress_bar": "a switch",
    "transformers.utils.logging.set_verbosity_error": "a switch",
}
"""Calls that read nothing, with the reason."""


def names_of(tree: ast.AST) -> dict[str, str]:
    """Return the names of what is of a library, each with its path."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in LIBRARIES:
                    found[alias.asname or alias.name.partition(".")[0]] = (
                        alias.name if alias.asname else alias.name.partition(".")[0]
                    )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in LIBRARIES:
            if not node.level:
                found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            module = imported(node.value)
            found |= {t.id: module for t in targets if module is not None and isinstance(t, ast.Name)}
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            for target, value in zip(getattr(node.targets[0], "elts", ()), node.value.elts, strict=False):
                module = imported(value) if isinstance(value, ast.Call) else None
                found |= {} if module is None else {target.id: module}
    return found


def imported(call: ast.Call) -> str | None:
    """Return the module of a library that a call imports, or None."""
    name = ast.unparse(call.func).rpartition(".")[2]
    if name == "transformers_package":
        return "transformers"
    given = call.args[0] if name == "import_module" and call.args else None
    if isinstance(given, ast.Constant) and str(given.value).partition(".")[0] in LIBRARIES:
        return str(given.value)
    return None


def meaning(function: ast.expr, names: dict[str, str]) -> str | None:
    """Return what a called function is of a library, with its path, or None."""
    path: list[str] = []
    while isinstance(function, ast.Attribute):
        path.insert(0, function.attr)
        function = function.value
    if isinstance(function, ast.Name) and function.id in names:
        return ".".join((names[function.id], *path))
    if isinstance(function, ast.Call) and path and imported(function) is not None:
        return ".".join((str(imported(function)), *path))
    return None


def outside(text: str) -> Iterator[str]:
    """Yield the calls into libraries that are inside of no ``with reading(...)``, and of no ``@reading``."""
    tree = ast.parse(text)
    names = names_of(tree)

    def is_door(node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == DOOR

    def visit(node: ast.AST, *, guarded: bool) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            inside = guarded
            if isinstance(child, ast.With):
                inside |= any(is_door(item.context_expr) for item in child.items)
            if isinstance(child, ast.FunctionDef):
                inside = any(map(is_door, child.decorator_list))
            if isinstance(child, ast.Call) and not guarded:
                called = meaning(child.func, names)
                if called is not None and called not in OURS:
                    yield f"line {child.lineno}: {called}"
            yield from visit(child, guarded=inside)

    return visit(tree, guarded=False)


def test_no_call_goes_round_the_door() -> None:
    found = {
        f"{path.relative_to(SOURCE)}, {call}"
        for path in sorted(SOURCE.rglob("*.py"))
        for call in outside(path.read_text(encoding="utf-8"))
    }
    assert found == set()


@pytest.mark.parametrize(
    "text",
    [
        "import yaml\nyaml.compose('')",
        "from safetensors import safe_open as opened\nwith opened('a') as file:\n    pass",
        "import importlib\nloading = importlib.import_module('transformers.core_model_loading')\nloading.f()",
        "tokenizer = transformers_package().AutoTokenizer.from_pretrained('a')",
        "import onnx.checker\nonnx.checker.check_model(1)",
        "import yaml\nwith reading('a', 'b'):\n    def later():\n        yaml.load('')",
    ],
)
def test_a_call_outside_of_the_door_is_found(text: str) -> None:
    assert len(list(outside(text))) == 1


def test_a_call_behind_the_door_is_not_found() -> None:
    assert list(outside("import yaml\nwith reading('a', 'b'):\n    yaml.compose('')")) == []
    assert list(outside("import yaml\n@reading('a', 'b')\ndef f():\n    yaml.compose('')")) == []
    assert list(outside("import json\njson.loads('')")) == []
