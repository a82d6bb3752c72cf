"""Public docstrings have Google sections: each parameter under Args, what is returned, and each own error.

As Google's guide has it, a docstring that begins with "Return" or "Yield" says so what is returned. A method
that overrides one of a base of ours takes its docstring's sections from there, and a property needs none. A
class says once what several methods take alike, in a paragraph that begins "Of methods".
"""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from docs.make_api_reference import MODULES, public_names

SECTION = r"^{}:\n((?:    .*\n|\n(?=    ))*)"
NAMES = re.compile(r"^    ([*\w][\w*, .]*): ", re.MULTILINE)

EXCUSED: dict[str, str] = {}
"""Public name -> why its docstring may lack something. One that excuses nothing is an error."""


def named(docstring: str, section: str) -> set[str]:
    """Return the names that a section lists."""
    found = re.search(SECTION.format(section), docstring + "\n", re.MULTILINE)
    return {name for names in NAMES.findall(found[1]) for name in re.split(r", ?", names)} if found else set()


def named_by_class(cls: type) -> set[str]:
    """Return the parameters of methods that a class or a base says once for all."""
    texts = [inspect.getdoc(each) or "" for each in cls.__mro__ if each.__module__.startswith("zeropoint")]
    said = [text for each in texts for text in re.findall(r"^Of methods, [^\n]*(?:\n[^\n]+)*", each, re.M)]
    return {name for text in said for name in re.findall(r"``(\w+)``", text)}


def own_errors(function: Callable[..., Any]) -> set[str]:
    """Return the names of the errors that the body of a function raises itself."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = (
        n.exc.func if isinstance(n.exc, ast.Call) else n.exc
        for n in ast.walk(tree)
        if isinstance(n, ast.Raise)
    )
    names = {ast.unparse(call).rpartition(".")[2] for call in calls if call is not None}
    return {name for name in names if name.endswith("Error")}


def parameters(function: Callable[..., Any]) -> set[str]:
    """Return the names of a function's public parameters."""
    names = inspect.signature(function).parameters
    return {name for name in names if name not in ("self", "cls") and not name.startswith("_")}


def lacks(function: Callable[..., Any], docstring: str) -> list[str]:
    """Return what a docstring of a function or method does not say."""
    found = [f"Args: {name}" for name in sorted(parameters(function) - named(docstring, "Args"))]
    found += [f"Raises: {e}" for e in sorted(own_errors(function)) if not re.search(rf"\b{e}\b", docstring)]
    returned = str(inspect.signature(function).return_annotation)
    says = re.match(r"Return|Yield", docstring) is not None or "Returns:\n" in docstring
    return found if says or returned in ("None", "NoReturn") else [*found, "Returns"]


def class_lacks(cls: type) -> Iterator[tuple[str, str]]:
    """Yield ``(member, what is missing)`` of a class; the empty member is the class itself."""
    bases = [base for base in cls.__mro__[1:] if base.__module__.startswith("zeropoint")]
    if (
        "__init__" in vars(cls)
        and not issubclass(cls, BaseException)
        and not getattr(cls, "_is_protocol", False)
    ):
        missing = parameters(cls) - named(inspect.getdoc(cls) or "", "Args")
        for base in bases:
            missing -= named(inspect.getdoc(base) or "", "Args")
        yield from (("", f"Args: {name}") for name in sorted(missing))
    for name, value in vars(cls).items():
        inner = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        if name.startswith("_") or not inspect.isfunction(inner) or any(name in vars(base) for base in bases):
            continue
        once = {f"Args: {parameter}" for parameter in named_by_class(cls)}
        found = lacks(inner, inspect.getdoc(inner) or "")
        yield from ((f".{name}", what) for what in found if what not in once)


def public() -> Iterator[tuple[str, Any]]:
    """Yield every class and function of the reference, by name."""
    seen = set()
    for page in MODULES:
        module = importlib.import_module(page)
        for name in public_names(module):
            thing = getattr(module, name)
            inner = inspect.unwrap(thing) if callable(thing) else thing
            is_own = getattr(inner, "__module__", "").startswith("zeropoint")
            if is_own and (inspect.isclass(inner) or inspect.isfunction(inner)) and id(inner) not in seen:
                seen.add(id(inner))
                yield f"{page}.{name}", inner


def all_lacking() -> dict[str, list[str]]:
    """Return what each public docstring lacks, by name."""
    found: dict[str, list[str]] = {}
    for name, thing in public():
        if inspect.isclass(thing):
            for member, what in class_lacks(thing):
                found.setdefault(name + member, []).append(what)
        elif missing := lacks(thing, inspect.getdoc(thing) or ""):
            found[name] = missing
    return found


def test_public_docstrings_name_parameters_results_and_errors() -> None:
    found = all_lacking()
    assert {name: what for name, what in found.items() if name not in EXCUSED} == {}
    assert sorted(EXCUSED.keys() - found.keys()) == [], "excuses that excuse nothing"


def planted(x: int, y: int) -> int:
    """Compute a sum.

    Args:
        x: a number.
    """
    if x > y:
        raise ValueError("x (={x}) must be at most y")
    return x + y


@pytest.mark.parametrize("what", ["Args: y", "Raises: ValueError", "Returns"])
def test_what_is_missing_is_found(what: str) -> None:
    assert what in lacks(planted, inspect.getdoc(planted) or "")
