"""Collection imports every test file, so that packages which take long to import are left to the tests.

`tests/peers.py` has what imports them at first use.
"""

import ast

import pytest

from .test_house import ROOT, TESTS, read

SLOW = (
    "accelerate", "boto3", "compressed_tensors", "examples", "moto", "onnxruntime.quantization", "ray",
    "scipy", "sklearn", "torch._dynamo", "torch._inductor", "torchao", "transformers",
)  # fmt: skip
ALLOWED = {
    "tests/examples/test_digits.py": "cases of the example are those of the tests, and it is quick to import",
    "tests/oracle/test_torchao.py": "where it is not installed, all of the file is skipped",
}
"""Files that import such a package at once, with a reason."""


def slow_imports(name: str, source: str) -> list[str]:
    """Return the imports at the top of a file that make collection wait."""
    found = []
    for node in ast.parse(source).body:
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules = [node.module]
        if isinstance(node, ast.Assign | ast.Expr) and "importorskip(" in ast.unparse(node):
            modules = [text.value for text in ast.walk(node) if is_text(text)]
        found += [
            f"{name}: imports {module} on line {node.lineno}"
            for module in modules
            if any(f"{module}.".startswith(f"{slow}.") for slow in SLOW)
        ]
    return found


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@pytest.mark.parametrize(
    "text",
    [
        "import transformers as tf",
        "from scipy.stats import norm",
        "t = pytest.importorskip('transformers')",
        "import torch._dynamo.utils",
    ],
)
def test_a_slow_import_is_found(text: str) -> None:
    assert len(slow_imports("a.py", text)) == 1


@pytest.mark.parametrize(
    "text", ["import torch", "def f():\n    import scipy", "x = Peer('transformers')", "import onnxruntime"]
)
def test_other_imports_are_not(text: str) -> None:
    assert slow_imports("a.py", text) == []


def test_collection_does_not_wait_for_other_packages() -> None:
    found = [each for path in TESTS for each in slow_imports(str(path.relative_to(ROOT)), read(path))]
    assert [each for each in found if each.partition(":")[0] not in ALLOWED] == []
    assert ALLOWED.keys() == {each.partition(":")[0] for each in found} & ALLOWED.keys()
