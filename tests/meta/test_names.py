"""One word, one meaning: no file and no class of the package has the name of another.

A reader who finds ``Plan`` or ``decisions.py`` in a search must know which one it is. Names begin with an
underscore where they matter to one file only; these may repeat.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import PurePosixPath

from .test_house import ROOT, SOURCES, read

FILES = {
    "__init__.py": "every package has one",
    "awq.py": "the step, and the codec of the layout that it gave its name",
    "backend.py": "the BACKEND of a folder of kernels",
    "calibrate.py": "for modules and for graphs",
    "compare.py": "the command, and what it does",
    "convert.py": "for modules and for graphs",
    "fold.py": "for modules and for graphs",
    "gguf.py": "the container, and the codec of its blocks",
    "gptq.py": "the method, and the codec of the layout that it gave its name",
    "linear.py": "the linear layer: the operator and the module",
    "onnx.py": "the container, and the codec of its DequantizeLinear",
    "plan.py": "the command, and the plan of one call",
    "prepare.py": "for modules and for graphs",
    "protocol.py": "what each codec, or each container, must answer",
    "registry.py": "the table of what a package offers",
    "rows.py": "kernels along rows, each way and on each machine",
    "steps.py": "whole steps of 32 codes, each way",
    "straight_through.py": "gradients that pass through rounding, of operators and of what is learned",
}
"""Names of files that mean the same thing in each of their packages, and what."""
CLASSES = {"QuantizationParams": "params/torsh.py offers the object of ToRSh under its name"}
"""Names of classes that mean the same thing twice, and what."""


def files_of(paths: Iterable[PurePosixPath]) -> dict[str, list[str]]:
    """Return where each name of a file stands."""
    found = defaultdict(list)
    for path in paths:
        found[path.name].append(path.as_posix())
    return found


def classes_of(texts: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return where each name of a class stands that does not begin with an underscore, nested ones too."""
    found = defaultdict(list)
    for name, text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(name)
    return found


def repeated(places: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the names that stand in more than one place."""
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


@cache
def found_files() -> dict[str, list[str]]:
    return repeated(files_of(PurePosixPath(p.relative_to(ROOT).as_posix()) for p in SOURCES))


@cache
def found_classes() -> dict[str, list[str]]:
    return repeated(classes_of((p.relative_to(ROOT).as_posix(), read(p)) for p in SOURCES))


def test_no_two_files_have_one_name() -> None:
    assert {name: where for name, where in found_files().items() if name not in FILES} == {}


def test_no_two_classes_have_one_name() -> None:
    assert {name: where for name, where in found_classes().items() if name not in CLASSES} == {}


def test_each_name_that_may_repeat_does() -> None:
    assert FILES.keys() - found_files().keys() == set()
    assert CLASSES.keys() - found_classes().keys() == set()


def test_a_name_that_repeats_is_found() -> None:
    paths = map(PurePosixPath, ("a/plan.py", "a/b/plan.py", "b/plans.py"))
    assert repeated(files_of(paths)) == {"plan.py": ["a/plan.py", "a/b/plan.py"]}
    texts = [
        ("a.py", "class Plan: ..."),
        ("b.py", "def f():\n    class Plan: ..."),
        ("c.py", "class _P: ..."),
    ]
    assert repeated(classes_of([*texts, ("d.py", "class _P: ...")])) == {"Plan": ["a.py", "b.py"]}
