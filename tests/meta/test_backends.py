"""What the layer contract cannot see: modules imported by name, and questions about the machine.

Each rule is a function from source text to the lines that break it, tested on planted ones and on the tree.
"""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from zeropoint.ops.registry import MODULES

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src/zeropoint"
COMPILED = SOURCES / "kernels/cpu"
IMPORTED_BY_NAME = {
    "__init__.py": "public names are imported when they are first used",
    "cli/main.py": "the command line catches signals before it imports what takes long",
    "deferred_names.py": "commands and searches import only what they call",
    "ops/registry.py": "the table of backends, which nothing else imports",
    "kernels/triton/backend.py": "triton, which is optional, and whose version decides",
    "kernels/triton/starts.py": "programs, which are loaded where a tensor lies on a GPU",
    "declared_models.py": "transformers, which is optional",
    "loaded_names.py": "transformers, which is optional",
    "codecs/registry.py": "each module of codecs/ is looked at",
    "methods/registry.py": "the modules of its own package, each of which is a method",
    "checkpoint/model/parameter_names.py": "transformers, which is optional",
    "checkpoint/read/object_store.py": "file systems of others, which are optional",
    "models/dequantize.py": "transformers, which is optional",
    "shown.py": "reports, which know every type, when one is shown",
    "progress.py": "rich, needed only where progress is shown",
}
"""Files that import by name, with the reason."""
MACHINES = frozenset({"cpu", "cuda", "mps", "xpu", "triton"})


def imports_by_name(source: str) -> list[int]:
    """Return the lines that import a module through its name in a string."""
    loaders = {"import_module", "__import__"}
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in loaders
    ]


def questions_about_the_machine(source: str) -> list[int]:
    """Return the lines that ask which device or backend there is."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in {"is_cpu", "is_cuda"}:
            found.append(node.lineno)
        if isinstance(node, ast.Compare):
            constants = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
            found += [node.lineno] * bool(MACHINES & constants)
    return found


def compiled_functions(source: str) -> list[int]:
    """Return the lines of functions that Numba compiles."""
    compilers = {"device", "inlined", "kernel", "over_rows", "bundled", "primitive", "instruction"}
    compilers |= {"njit", "overload", "intrinsic"}
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if ast.unparse(decorator).partition("(")[0].rpartition(".")[2] in compilers
    ]


Rule = Callable[[str], list[int]]


def broken(rule: Rule, folder: Path) -> dict[str, list[int]]:
    """Return the files below ``folder`` that break a rule, with the lines."""
    found = {str(p.relative_to(folder)): rule(p.read_text("utf-8")) for p in sorted(folder.rglob("*.py"))}
    assert found, folder
    return {name: lines for name, lines in found.items() if lines}


def test_modules_are_imported_by_name_where_there_is_a_reason() -> None:
    assert set(broken(imports_by_name, SOURCES)) == set(IMPORTED_BY_NAME)


DEVICES = "ops/devices.py"
"""Reads the words that users have for devices, and sets what a GPU alone has settings for."""


def test_only_kernels_ask_which_machine_it_is() -> None:
    found = broken(questions_about_the_machine, SOURCES)
    assert [name for name in found if not name.startswith("kernels/")] == [DEVICES]
    assert any(name.startswith("kernels/") for name in found), "the rule finds nothing"


def test_the_host_side_of_the_kernels_has_nothing_to_compile() -> None:
    assert broken(compiled_functions, COMPILED / "host") == {}
    assert len(broken(compiled_functions, COMPILED)) > 10, "the rule finds nothing"


def test_the_table_of_backends_names_all_that_there_are() -> None:
    folders = {path.parent.name for path in (SOURCES / "kernels").glob("*/__init__.py")}
    assert {name for name in MODULES if name != "reference"} == folders


@pytest.mark.parametrize(
    ("rule", "planted"),
    [
        (imports_by_name, "import importlib\nimportlib.import_module('zeropoint.kernels.cpu')"),
        (imports_by_name, "from importlib import import_module\nx = import_module('.cli', 'zeropoint')"),
        (questions_about_the_machine, "if x.is_cpu:\n    pass"),
        (questions_about_the_machine, "fast = x.device.type == 'cpu'"),
        (questions_about_the_machine, "here = only in (None, 'cpu')"),
        (compiled_functions, "@kernel\ndef f(x):\n    pass"),
        (compiled_functions, "@numba.njit(nogil=True)\ndef f(x):\n    pass"),
    ],
)
def test_a_planted_violation_is_found(rule: Rule, planted: str) -> None:
    assert len(rule(planted)) == 1


@pytest.mark.parametrize(
    ("rule", "clean"),
    [
        (imports_by_name, "import importlib.util\nimportlib.util.find_spec('triton')"),
        (questions_about_the_machine, "x = torch.zeros(1, device='cpu')\nmeta = x.device.type == 'meta'"),
        (compiled_functions, "@functools.cache\ndef f(x):\n    pass"),
    ],
)
def test_a_clean_text_is_accepted(rule: Rule, clean: str) -> None:
    assert rule(clean) == []
