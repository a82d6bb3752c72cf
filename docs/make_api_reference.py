"""The reference of the public names, from their signatures and docstrings; the site holds its pages."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

SOURCE = Path(__file__).resolve().parents[1] / "src"
MODULES = {
    "zeropoint": "tensors, models and checkpoints: the names of `import zeropoint as zp`",
    "zeropoint.schemes": "how a tensor is quantized",
    "zeropoint.formats": "number formats",
    "zeropoint.models": "layers, calibration and conversion of models",
    "zeropoint.models.graph": "exported graphs",
    "zeropoint.training": "quantization-aware training",
    "zeropoint.stats": "observers and statistics",
    "zeropoint.eval": "quality of models next to a reference",
    "zeropoint.methods": "methods that choose codes",
    "zeropoint.recipes": "which layer gets which scheme",
    "zeropoint.codecs.protocol": "file layouts, as a protocol",
    "zeropoint.codecs.records": "file layouts: what a codec reads",
    "zeropoint.codecs.registry": "file layouts by name",
}
WIDTH = 100
SECTION = re.compile(r"^(Args|Returns|Raises|Example|Yields):\n", re.MULTILINE)
ENTRY = re.compile(r"^    ([*\w][\w*., ]*): ", re.MULTILINE)


def public_names(module: ModuleType) -> list[str]:
    """Return what a module exports: ``__all__``, or its own classes and functions."""
    own = [n for n, o in vars(module).items() if getattr(o, "__module__", None) == module.__name__]
    names: list[str] = getattr(module, "__all__", own)
    return sorted(name for name in names if not name.startswith("_"))


def markdown(text: str) -> str:
    """Return reStructuredText of a docstring as Markdown.

    >>> markdown("``x`` of :class:`~zeropoint.Scheme` and :meth:`run`")
    '`x` of `Scheme` and `run`'
    """
    text = re.sub(r":\w+:`~(?:\w+\.)*(\w+)`", r"`\1`", text)
    text = re.sub(r":\w+:(`[^`]+`)", r"\1", text).replace("``", "`")
    return re.sub(r"(?<!`)\b__(\w+)__", r"\\_\\_\1\\_\\_", text)


def entries(text: str) -> list[str]:
    r"""Return the list items of a section of names: ``x: what it is``.

    >>> entries("    x: a number\n        of any size.\n    y: another.")
    ['- `x`: a number of any size.', '- `y`: another.']
    """
    starts = [*ENTRY.finditer(text), None]
    return [
        f"- `{at[1]}`: {markdown(' '.join(text[at.end() : then.start() if then else len(text)].split()))}"
        for at, then in itertools.pairwise(starts)
        if at is not None
    ]


def body(docstring: str) -> list[str]:
    """Return the Markdown lines of a docstring: paragraphs, formulas, sections and examples."""
    parts = SECTION.split(docstring)
    lines = _prose(parts[0])
    for title, text in zip(parts[1::2], parts[2::2], strict=True):
        inner, _, after = _section(text)
        if title in ("Args", "Raises"):
            lines += [f"**{'Arguments' if title == 'Args' else title}**", "", *entries(inner), ""]
        elif title == "Example":
            lines += ["```pycon", *textwrap.dedent(inner).rstrip().splitlines(), "```", ""]
        else:
            lines += [f"**{title}** {markdown(' '.join(inner.split()))}", ""]
        lines += _prose(after)
    return lines


def _section(text: str) -> tuple[str, str, str]:
    """Split what follows a section's title into its indented lines and the rest."""
    end = re.search(r"^\S", text, re.MULTILINE)
    return (text, "", "") if end is None else (text[: end.start()], "", text[end.start() :])


def _prose(text: str) -> list[str]:
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        if paragraph.startswith("    "):
            block = textwrap.dedent(paragraph).replace("``", "")
            lines += ["```text", *block.splitlines(), "```", ""]
        elif paragraph:
            lines += [*markdown(paragraph).splitlines(), ""]
    return lines


def _parameter(parameter: inspect.Parameter) -> str:
    """Return a parameter as it is written, functions as defaults by their names."""
    default = parameter.default
    text = str(parameter).replace("'", "")
    if default is parameter.empty or isinstance(default, (str, int, float, tuple, type(None))):
        return str(parameter) if isinstance(default, str) and not parameter.annotation else text
    named = f"{type(default).__name__}.{default.name}" if isinstance(default, enum.Enum) else "..."
    value = str(default) if isinstance(default, torch.dtype) else getattr(default, "__name__", named)
    return f"{text.partition(' = ')[0]} = {value}"


def signature(name: str, thing: Any) -> list[str]:
    """Return a code block with the signature, a parameter per line where it is long."""
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return []
    kinds = [parameter.kind for parameter in found.parameters.values()]
    shown = [_parameter(parameter) for parameter in found.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        shown.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    returned = found.return_annotation
    tail = ")" if returned is found.empty or inspect.isclass(thing) else f") -> {returned}".replace("'", "")
    text = f"{name}({', '.join(shown)}{tail}"
    if len(text) > WIDTH:
        text = f"{name}(\n" + "".join(f"    {part},\n" for part in shown) + tail
    return ["```python", text, "```", ""]


def members(cls: type) -> Iterator[tuple[str, Any, str]]:
    """Yield name, function and docstring of what a class defines itself, in its order."""
    for name, value in vars(cls).items():
        inner = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        documented = inspect.getdoc(inner.fget if isinstance(inner, property) else inner)
        if (
            not name.startswith("_")
            and documented
            and (inspect.isfunction(inner) or isinstance(inner, property))
        ):
            yield name, value, documented


def constant(name: str, module: ModuleType) -> list[str]:
    """Return the docstring below the assignment of a constant, where its module or one below has it."""
    for path in [Path(str(module.__file__)), *sorted(Path(str(module.__file__)).parent.glob("*.py"))]:
        nodes = ast.parse(path.read_text(encoding="utf-8")).body
        for node, after in itertools.pairwise(nodes):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                return body(inspect.cleandoc(str(after.value.value))) if is_text else []
    return []


def class_members(name: str, cls: type) -> list[str]:
    """Return a table of the properties of a class, and an entry for each of its methods."""
    found = list(members(cls))
    rows = [
        f"| `{member}` | {markdown(' '.join(text.split())).replace('|', chr(92) + '|')} |"
        for member, value, text in found
        if isinstance(value, property)
    ]
    lines = ["| Property | |", "|---|---|", *rows, ""] if rows else []
    for member, value, text in found:
        if not isinstance(value, property):
            lines += [f"### {name}.{member}", "", *signature(member, getattr(cls, member)), *body(text)]
    return lines


def entry(name: str, thing: Any, module: ModuleType) -> list[str]:
    """Return the lines of one public name."""
    lines = [f"## {name}", ""]
    is_class = inspect.isclass(thing) and hasattr(thing, "__module__")
    if not (is_class or inspect.isfunction(inspect.unwrap(thing))):
        return lines + constant(name, module)
    is_error = is_class and issubclass(thing, BaseException)
    lines += [] if is_error else signature(name, thing)
    lines += body(inspect.getdoc(thing) or "")
    lines += class_members(name, thing) if is_class else []
    owner = Path(sys.modules[thing.__module__].__file__ or "")
    if owner.is_relative_to(SOURCE):
        lines += [f"Source: `{owner.relative_to(SOURCE.parent).as_posix()}`", ""]
    return lines


def pages() -> dict[str, str]:
    """Return the text of each page by its file; a name of several modules is described under the first."""
    index = ["# Python", "", "| Module | What is in it |", "|---|---|"]
    index += [f"| [`{name}`]({name}.md) | {about} |" for name, about in MODULES.items()]
    made, seen = {"README.md": "\n".join(index) + "\n"}, dict[str, str]()
    for name, about in MODULES.items():
        module = importlib.import_module(name)
        lines = [f"# {name}", "", f"{about[0].upper()}{about[1:]}.", ""]
        for public in public_names(module):
            thing = getattr(module, public)
            first = seen.setdefault(f"{getattr(thing, '__module__', name)}.{public}", name)
            link = f"See [{first}.{public}]({first}.md#{public.lower()})."
            lines += entry(public, thing, module) if first == name else [f"## {public}", "", link, ""]
        made[f"{name}.md"] = "\n".join(lines).rstrip() + "\n"
    return made
