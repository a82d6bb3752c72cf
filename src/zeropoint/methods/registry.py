"""Methods by name: each module of this package that defines ``METHOD``."""

from __future__ import annotations

import functools
import pkgutil
import re
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
    found = _method(text)
    if found is None:
        offered = [each for each in methods() if not (of_files and each in OF_MODELS)]
        near = near_misses(text, offered)
        data = "; of these, mse_weighted takes data, for which random tokens are enough"
        raise RecipeError(f"method {name!r} is unknown; {near}{'' if near.endswith('?') else data}")
    return found


@functools.lru_cache(maxsize=256)
def _method(text: str) -> Method | None:
    """Return the method that ``text`` names or spells, or None."""
    plain = plain_method(text)
    if plain is not None:
        return plain
    readers = (getattr(each, "spelled", None) for each in (_module_of("chain"), _module_of(text)))
    return next((found for read in readers if read is not None and (found := read(text)) is not None), None)


def plain_method(name: str) -> Method | None:
    """Return the method of a plain name, or None.

    Args:
        name: of the method.

    >>> plain_method("gptq").name, plain_method("shift+gptq")
    ('gptq', None)
    """
    found: Method | None = getattr(_module_of(name), "METHOD", None)
    return None if found is None or found.name != name else found


def step_named(text: str) -> Step | Rescaling | Correction | ModelRotation | None:
    """Return the step of a name, possibly with a number, or None.

    Args:
        text: of the name.

    >>> step_named("lowrank16").name, step_named("gptq")
    ('lowrank16', None)
    """
    step = getattr(_module_of(text), "STEP", None)
    if step is None or step.name == text:
        return step
    read = getattr(step, "spelled", None)
    return None if read is None else read(text)


def _module_of(text: str) -> Any:
    """Return the module whose name a text begins with, or None."""
    package, word = import_module(__name__.rpartition(".")[0]), re.match("[a-z_]*", text)
    assert word is not None
    known = {found.name for found in pkgutil.iter_modules(package.__path__)}
    return import_module(f"{package.__name__}.{word[0]}") if word[0] in known else None
