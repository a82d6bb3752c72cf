"""Methods by name: each module of this package that defines ``METHOD``."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from ..errors import RecipeError, near_misses
from .method import Method

NEAREST = "nearest"
"""The method where none is named."""
LOSSLESS, LOSSLESS_OR_NEAREST = "lossless", "lossless_or_nearest"
OF_CODES = (LOSSLESS, LOSSLESS_OR_NEAREST)
"""Methods that convert the codes which a weight has."""
OF_TABLES = ("kmeans",)
"""Methods whose codes have a format that is fitted to the weight: no file layout holds it."""


@functools.cache
def methods() -> Mapping[str, Method]:
    """Return all methods by name, in the order of their names.

    >>> [name for name in methods() if name == "nearest"]
    ['nearest']
    """
    package = __name__.rpartition(".")[0]
    folder = import_module(package).__path__
    modules = (import_module(f"{package}.{found.name}") for found in pkgutil.iter_modules(folder))
    found = (module.METHOD for module in modules if hasattr(module, "METHOD"))
    return MappingProxyType({method.name: method for method in sorted(found, key=lambda m: str(m.name))})


def method_named(name: str) -> Method:
    """Return the method called ``name``; raises RecipeError, with the closest names, when there is none.

    Args:
        name: of a method, such as ``"mse"``.

    Example:
        >>> method_named("nearest").needs
        mappingproxy({})
    """
    known = methods()
    text = str(name)  # of anything, a list too, which is no key of a mapping
    if text not in known:
        raise RecipeError(f"method {name!r} is unknown; {near_misses(text, known)}")
    return known[text]
