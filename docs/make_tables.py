"""Tables of the names that schemes and recipes take: presets, roundings, dialects, methods and steps."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path

from zeropoint.formats import RoundingMode
from zeropoint.methods.registry import methods, steps
from zeropoint.schemes import PRESETS
from zeropoint.schemes.dialects import DIALECTS, ZEROPOINT

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "zeropoint"
NUMBER = re.compile(r"(?:[*]{2})?[-+]?\d[\d,.]*(?: ± [\d.]+)?(?: %| s)?(?:[*]{2})?|")
"""A cell of a column that is aligned to the right: a number with its error and unit, or nothing."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    r"""Return a Markdown table; a bar in a cell is escaped, columns of numbers end alike.

    >>> table(["a", "b"], [["1", "x|y"]])
    '| a | b |\n|---:|---|\n| 1 | x\\|y |\n'
    """
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in (head, *cells)]
    numeric = [all(NUMBER.fullmatch(row[column]) for row in cells) for column in range(len(head))]
    lines.insert(1, "|" + "".join("---:|" if right else "---|" for right in numeric))
    return "\n".join(line.replace("|  |", "| |") for line in lines) + "\n"


def code(text: str | None) -> str:
    """Return text as code, or nothing where there is none."""
    return f"`{text}`" if text else ""


def preset_table() -> str:
    """Return the presets: the schemes of weight, input and output, and what replaces one without data."""
    rows = [
        (
            code(name),
            code(preset.weight),
            code(preset.input) + (" from calibration" if preset.input and preset.static else ""),
            code(preset.without_data),
        )
        for name, preset in PRESETS.items()
    ]
    return table(("Preset", "Weight", "Input", "Without data"), rows)


def rounding_table() -> str:
    """Return the rounding modes with what their docstrings say."""
    body = ast.parse(inspect.getsource(RoundingMode)).body[0]
    assert isinstance(body, ast.ClassDef)
    said = {
        node.targets[0].id: after.value.value
        for node, after in zip(body.body, body.body[1:], strict=False)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }
    rows = [(code(mode.value), str(said[mode.name])) for mode in RoundingMode]
    return table(("Mode", "A value between two codes becomes"), rows)


def _choices(value: object, default: object, prefix: str = "") -> list[str]:
    """Return the fields in which a dialect differs from the default, as ``name=value``."""
    found: list[str] = []
    for field in fields(default):  # type: ignore[arg-type]
        mine, usual = getattr(value, field.name), getattr(default, field.name)
        if mine == usual or field.name == "name":
            continue
        if is_dataclass(usual):
            found += _choices(mine, usual, f"{field.name}.")
        else:
            shown = mine.value if isinstance(mine, Enum) else mine
            found.append(f"{prefix}{field.name} = {shown}")
    return found


def dialect_table() -> str:
    """Return the dialects, each with the choices in which it differs from the default."""
    rows = [
        (code(name), ", ".join(map(code, _choices(value, ZEROPOINT))) or "the default")
        for name, value in DIALECTS.items()
    ]
    return table(("Dialect", "Differs from the default in"), rows)


def method_table() -> str:
    """Return the methods: formula, statistics that they need, source."""
    rows = [
        (
            code(name),
            method.formula,
            ", ".join(method.needs) or " or ".join([*method.takes, "nothing"]),
            method.source,
        )
        for name, method in methods().items()
    ]
    return table(("Method", "Computes", "Needs", "Source"), rows)


def step_table() -> str:
    """Return the steps of a chain in the order in which they stand."""
    found = sorted(steps().items(), key=lambda item: (item[1].rank, item[0]))
    return table(("Step", "Computes", "Source"), [(code(n), step.formula, step.source) for n, step in found])


def part(name: str) -> str:
    """Return what a method or a step says of itself, as a list."""
    found = methods()[name] if name in methods() else steps()[name]
    needs = ", ".join(getattr(found, "needs", ())) or " or ".join([*getattr(found, "takes", ()), "nothing"])
    return f"- Computes: {code(found.formula)}\n- Statistics: {needs}\n- Source: {found.source}\n"


TOUR = (
    "formats/spec.py", "schemes/presets.py", "schemes/scheme.py", "params/arithmetic.py", "ops/reference.py",
    "functional.py", "methods/mse.py", "codecs/awq.py", "checkpoint/plan/checkpoint_plan.py",
    "checkpoint/run/loop.py", "checkpoint/run/work.py", "kernels/cpu/encode/rows.py",
)  # fmt: skip
"""Modules that show the library, in the order to read them."""


def title_of(module: Path) -> str:
    """Return the first line of a module's docstring, without roles."""
    said = (ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or "").partition("\n")[0]
    return re.sub(r":\w+:(`[^`]+`)", r"\1", said)


def tour_table() -> str:
    """Return the modules of the tour, with what their docstrings say."""
    rows = [
        (str(number), f"[`{name}`](../src/zeropoint/{name})", title_of(SOURCE / name))
        for number, name in enumerate(TOUR, 1)
    ]
    return table(("", "File", "Owns"), rows)


def layer_table() -> str:
    """Return the layers of the library in the order of imports, with what their docstrings say."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = next(each["layers"] for each in contracts["contracts"] if each["id"] == "layers")
    rows = []
    for name in re.findall(r"\w+", " ".join(layers)):
        folder = SOURCE / name
        module = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        rows.append((code(f"{name}/" if folder.is_dir() else f"{name}.py"), title_of(module)))
    return table(("Layer", "Owns"), rows)
