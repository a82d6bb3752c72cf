"""What several files of tests need stands once, in a module of its topic, such as tests/tensors.py.

Helpers are compared by their bodies: names of functions, docstrings, annotations and decorators are left out.
A body of one statement may stand in three files, since an import is hardly shorter.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable

from .test_house import ROOT, TESTS, read

MOST_FILES = {1: 3}
"""Statements of a body -> in how many files it may stand; one for others."""


def body_of(function: ast.FunctionDef) -> tuple[ast.arguments, list[ast.stmt]]:
    """Return the parameters and statements of a function, without annotations and docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    bare = ast.parse(ast.unparse(function)).body[0]
    assert isinstance(bare, ast.FunctionDef)
    for node in ast.walk(bare):
        if isinstance(node, ast.arg):
            node.annotation = None
    return bare.args, body


def repeated_helpers(files: Iterable[tuple[str, str]]) -> list[str]:
    """Return the helpers at the top of test files whose body stands in more files than it may."""
    places: dict[tuple[int, str], list[str]] = defaultdict(list)
    for name, source in files:
        for function in ast.parse(source).body:
            if isinstance(function, ast.FunctionDef) and not function.name.startswith("test"):
                arguments, body = body_of(function)
                text = ast.dump(arguments) + "".join(map(ast.dump, body))
                places[len(body), text].append(f"{name}::{function.name}")
    return [
        f"{', '.join(found)}: one body"
        for (count, _), found in places.items()
        if len(found) > MOST_FILES.get(count, 1)
    ]


LONG = "def f(x):\n    y = x + 1\n    return y\n"
SHORT = "def f(x):\n    return x + 1\n"
SAME = 'def g(x: int) -> int:\n    """More."""\n    y = x + 1\n    return y\n'


def test_a_body_that_stands_twice_is_found() -> None:
    assert repeated_helpers([("a.py", LONG), ("b.py", SAME)]) == ["a.py::f, b.py::g: one body"]
    assert len(repeated_helpers([(f"{n}.py", SHORT) for n in range(4)])) == 1


def test_other_bodies_and_short_ones_are_not() -> None:
    assert repeated_helpers([("a.py", LONG), ("b.py", LONG.replace("1", "2"))]) == []
    assert repeated_helpers([(f"{n}.py", SHORT) for n in range(3)]) == []
    assert repeated_helpers([("a.py", LONG.replace("f(", "test_f(")), ("b.py", LONG)]) == []


def test_what_several_files_of_tests_need_stands_once() -> None:
    assert repeated_helpers((str(path.relative_to(ROOT)), read(path)) for path in TESTS) == []
