"""Names of a module that are imported on first use (PEP 562).

Such a module lists them once, as imports below ``if TYPE_CHECKING``, and calls :func:`imported` from its
``__getattr__``. The list is read from its source at the first use of a name.
"""

import ast
import functools
import sys
from importlib import import_module
from pathlib import Path


@functools.cache
def deferred_names(module: str) -> dict[str, tuple[str, str]]:
    """Owners of deferred names, relative to the package, and the names there."""
    file = sys.modules[module].__file__
    assert file is not None
    tree = ast.parse(Path(file).read_bytes())
    blocks = (node.body for node in tree.body if isinstance(node, ast.If) and _is_for_types(node.test))
    imports = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom)]
    return {
        alias.asname or alias.name: ("." * node.level + (node.module or ""), alias.name)
        for node in imports
        for alias in node.names
    }


def _is_for_types(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def imported(module: str, name: str) -> object:
    """Import and keep a deferred name; raises AttributeError for others."""
    if name not in deferred_names(module):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    owner, own = deferred_names(module)[name]
    value: object = getattr(import_module(owner, sys.modules[module].__package__), own)
    setattr(sys.modules[module], name, value)
    return value
