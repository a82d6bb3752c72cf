"""Methods by name: each module of this package that defines ``METHOD``."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..errors import RecipeError, near_misses
from ..method_names import OF_MODELS
from .method import Method
from .step import Correction, Step

if TYPE_CHECKING:  # it loads statistics
    from .rescaling import Rescaling
    from .rotate import ModelRotation

NEAREST = "nearest"
"""The method where none is named."""


def _modules() -> Iterator[Any]:
    package = __name__.rpartition(".")[0]
    folder = import_module(package).__path__
    return (import_module(f"{package}.{found.name}") for found in pkgutil.iter_modules(folder))


DISTILLED = "distill"
"""What a manifest names as the method of weights whose scales were trained after they were quantized."""


@functools.cache
def methods() -> Mapping[str, Method]:
    """Return all methods by name, in the order of their names.

    >>> [name for name in methods() if name == "nearest"]
    ['nearest']
    """
    found = (module.METHOD for module in _modules() if hasattr(module, "METHOD"))
    return MappingProxyType({method.name: method for method in sorted(found, key=lambda m: str(m.name))})


@functools.cache
def steps() -> Mapping[str, Step | Rescaling | Correction | ModelRotation]:
    """Return all steps by name, from the modules that define ``STEP``.

    >>> [name for name in steps() if name == "shift"]
    ['shift']
    """
    found = (module.STEP for module in _modules() if hasattr(module, "STEP"))
    return MappingProxyType({step.name: step for step in found})


def method_named(name: str, *, of_files: bool = False) -> Method:
    """Return a method by name, or raise RecipeError with the closest names.

    Args:
        name: of a method, such as ``"mse"``, or what one is spelled as, such as ``"hadamard128+mse"``.
        of_files: whether the closest names are limited to methods that checkpoints take.

    Example:
        >>> method_named("nearest").needs
        mappingproxy({})
    """
    text = str(name)  # of anything, a list too, which is no key of a mapping
    found = _of_module(text) or methods().get(text) or _spelled(text)
    if found is None:
        offered = [each for each in methods() if not (of_files and each in OF_MODELS)]
        near = near_misses(text, offered)
        data = "; of these, mse_weighted takes data, for which random tokens are enough"
        raise RecipeError(f"method {name!r} is unknown; {near}{'' if near.endswith('?') else data}")
    return found


@functools.lru_cache(maxsize=256)
def _of_module(text: str) -> Method | None:
    """Return the method of one module, without loading others, or None."""
    package = __name__.rpartition(".")[0]
    if text not in {found.name for found in pkgutil.iter_modules(import_module(package).__path__)}:
        return None
    return getattr(import_module(f"{package}.{text}"), "METHOD", None)


@functools.lru_cache(maxsize=256)
def _spelled(text: str) -> Method | None:
    """Return the method that a module parses from a text, or None."""
    readers = (module.spelled for module in _modules() if hasattr(module, "spelled"))
    return next((found for read in readers if (found := read(text)) is not None), None)
