"""Counts of the tree that its size and language are judged by: ``python -m tests.meta.counts``.

``--json`` prints them for programs. ``--record`` writes ``counts.csv``; ``test_counts.py`` then fails when
a count of STATIC rises. Three calls are traced: a warm quantization of a tensor to int4 and to nvfp4, and
``zeropoint quantize`` of a checkpoint of two layers with one worker.
"""

import argparse
import ast
import contextlib
import csv
import inspect
import io
import itertools
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from tests.our_files import files_below

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src/zeropoint"
TABLE = Path(__file__).with_name("counts.csv")
MOST_PARAMETERS, MOST_WORDS, SMALL = 8, 12, 60
"""Parameters of a function, words of a first line, lines of a module that one neighbor imports."""

STATIC: dict[str, str] = {
    "parameters": f"functions with more than {MOST_PARAMETERS} parameters",
    "parameters outside kernels": "the same, without src/zeropoint/kernels",
    "fmt: skip": "lines that the formatter skips",
    "return what": 'docstrings that begin "Return what"',
    "that of": '"that of" and "those of", in any case',
    "long first lines": f"docstrings whose first line has more than {MOST_WORDS} words",
    "small modules": f"modules under {SMALL} lines with one importer, which is in their package",
}
"""Counts of src that may only fall -> what is counted."""

Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield a module and all statements in it: expressions hold neither definitions nor imports."""
    yield tree
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(tree, field, ()):
            yield from statements(child)


def first_line(definition: Definition) -> str:
    """First line of a docstring; empty without one."""
    docstring = ast.get_docstring(definition, clean=False)
    return docstring.strip().partition("\n")[0] if docstring else ""


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Number of parameters, ``self`` and ``cls`` not counted."""
    a = function.args
    names = [p.arg for p in (*a.posonlyargs, *a.args)]
    return (
        len(names)
        + len(a.kwonlyargs)
        + (a.vararg is not None)
        + (a.kwarg is not None)
        - (names[:1] in (["self"], ["cls"]))
    )


def imported(node: ast.AST, package: str, modules: set[str]) -> Iterator[str]:
    """Yield the modules of a tree that an import statement in a package names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in modules)
    elif isinstance(node, ast.ImportFrom):
        parts = package.split(".")
        base = ".".join(parts[: len(parts) + 1 - node.level]) if node.level else ""
        origin = ".".join(part for part in (base, node.module) if part)
        for alias in node.names:
            name = f"{origin}.{alias.name}"
            yield from [name] if name in modules else [origin] if origin in modules else []


def static_counts(sources: dict[str, str]) -> dict[str, int]:
    """Counts of STATIC over texts by path, ``zeropoint/room/module.py``."""
    found = dict.fromkeys(STATIC, 0)
    paths = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in sources}
    importers: dict[str, set[str]] = defaultdict(set)
    for module, path in paths.items():
        text = sources[path]
        found["fmt: skip"] += len(re.findall("fmt: skip", text))
        found["that of"] += len(re.findall(r"\b(?:that|those) of\b", text, re.IGNORECASE))
        package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
        for node in statements(ast.parse(text)):
            if isinstance(node, Definition):
                line = first_line(node)
                found["return what"] += line.startswith("Return what ")
                found["long first lines"] += len(line.split()) > MOST_WORDS
            if (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                and parameters(node) > MOST_PARAMETERS
            ):
                found["parameters"] += 1
                found["parameters outside kernels"] += "/kernels/" not in path
            for name in imported(node, package, paths.keys()):
                importers[name].add(package if path.endswith("__init__.py") else module)
    for module, by in importers.items():
        is_module = not paths[module].endswith("__init__.py")
        if is_module and len(by - {module}) == 1 and sources[paths[module]].count("\n") < SMALL:
            (importer,) = by - {module}
            home = importer if paths[importer].endswith("__init__.py") else importer.rpartition(".")[0]
            found["small modules"] += home == module.rpartition(".")[0]
    return found


def read_sources() -> dict[str, str]:
    """Texts of the package by path below ``src``."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(ROOT / "src").as_posix(): path.read_text(encoding="utf-8") for path in paths}


def line_counts(sources: dict[str, str]) -> dict[str, int]:
    """Lines of src, of tests, and of each room of the package."""
    rooms: Counter[str] = Counter()
    for path, text in sources.items():
        parts = path.split("/")
        rooms[parts[1] if len(parts) > 2 else "modules"] += text.count("\n")
    ours = (path for path in files_below(ROOT / "tests") if path.suffix == ".py")
    tests = sum(path.read_bytes().count(b"\n") for path in ours)
    sums = {"lines src": rooms.total(), "lines tests": tests}
    return sums | {f"lines {room}": lines for room, lines in sorted(rooms.items())}


def traced(act: Callable[[], object]) -> dict[str, int]:
    """Calls of the package's functions, their files, and the changes of file between calls."""
    files: list[str] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        # The bodies of modules and classes, which run when they are imported, are no functions.
        is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
        if event == "call" and is_function and code.co_filename.startswith(str(PACKAGE)):
            files.append(code.co_filename)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    switches = sum(a != b for a, b in itertools.pairwise(files))
    return {"calls": len(files), "files": len(set(files)), "switches": switches}


def trace_tensor(scheme: str) -> dict[str, int]:
    """Counts of one warm ``zp.quantize``."""
    import torch

    import zeropoint as zp

    tensor = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        zp.quantize(tensor, scheme)
    return traced(lambda: zp.quantize(tensor, scheme))


def trace_command() -> dict[str, int]:
    """Counts of ``zeropoint quantize`` of a Llama of two layers, with one worker, imports and all."""
    from tests.cli.checkpoints import write_llama

    from zeropoint.cli.main import main

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        model, result = str(write_llama(Path(folder, "model"))), str(Path(folder, "result"))
        counts = traced(lambda: main(["quantize", model, result, "--to", "w4a16", "--workers", "1"]))
        if not Path(result, "config.json").is_file():
            raise SystemExit("zeropoint quantize failed")
    return counts


TRACED: dict[str, Callable[[], dict[str, int]]] = {
    "int4:g128": lambda: trace_tensor("int4:g128"),
    "nvfp4": lambda: trace_tensor("nvfp4"),
    "zeropoint quantize": trace_command,
}


def traced_counts() -> dict[str, int]:
    """Counts of TRACED, each in a process of its own, so that none finds the modules of another loaded."""
    found = {}
    for name in TRACED:
        call = [sys.executable, "-m", __spec__.name, "--trace", name]
        counts = json.loads(subprocess.run(call, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
        found |= {f"{name} {what}": number for what, number in counts.items()}
    return found


def recorded(table: Path = TABLE) -> dict[str, int]:
    """Counts of the table."""
    with table.open(newline="", encoding="utf-8") as file:
        return {row["count"]: int(row["number"]) for row in csv.DictReader(file)}


def main() -> None:
    """Print the counts, or record them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--record", action="store_true", help=f"write {TABLE.name}")
    parser.add_argument("--static", action="store_true", help="keep the recorded counts of traced calls")
    parser.add_argument("--trace", choices=TRACED, help="print the counts of one traced call as JSON")
    options = parser.parse_args()
    if options.trace:
        sys.stdout.write(json.dumps(TRACED[options.trace]()))
        return
    sources = read_sources()
    before = recorded() if TABLE.is_file() else {}
    kept = {name: number for name, number in before.items() if name.startswith(tuple(TRACED))}
    traced = kept if options.static else traced_counts()
    counts = static_counts(sources) | traced | line_counts(sources)
    if options.record:
        rows = [f"{name},{number}\n" for name, number in counts.items()]
        TABLE.write_text("count,number\n" + "".join(rows), encoding="utf-8")
    lines = []
    for name, number in counts.items():
        change = number - before.get(name, number)
        lines.append(f"{number:9,}  {f'{change:+,}' if change else '':>8}  {STATIC.get(name, name)}\n")
    sys.stdout.write(json.dumps(counts, indent=1) + "\n" if options.json else "".join(lines))


if __name__ == "__main__":
    main()
