"""Type checks of calls against signatures, with one sentence per argument."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import types
from collections.abc import Callable, Collection
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import OptionError, option

P = ParamSpec("P")
R = TypeVar("R")
_NUMBERS: dict[object, type] = {int: Integral, float: Real}
"""Classes of numbers of other libraries, such as numpy, that count as the built-in ones."""


def by_signature(function: Callable[P, R], *, but: Collection[str] = ()) -> Callable[P, R]:
    """Check the types of arguments against annotations before each call.

    but: names of arguments that the function checks by itself. Raises OptionError for another type.

    >>> @by_signature
    ... def repeat(text: str, times: int | None = None) -> str:
    ...     return text * (times or 2)
    >>> repeat("a", times="3")
    Traceback (most recent call last):
    zeropoint.errors.OptionError: times= is of type str; pass int or None
    """
    signature = inspect.signature(function)
    hints = functools.cache(lambda: get_type_hints(function))

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            given = {}  # names that are missing or unknown: the call itself says which, and of what function
        for name, value in given.items():
            if name not in but and not fits(value, hints()[name]):
                raise OptionError(
                    f"{option(name)} is of type {type(value).__name__}; pass {_listed(_words(hints()[name]))}"
                )
        return function(*args, **kwargs)

    return checked


def fits(value: object, kind: Any) -> bool:
    """Return whether a value fits an annotation, items included.

    >>> (
    ...     fits(["a"], Collection[str]),
    ...     fits([5], Collection[str]),
    ...     fits(True, int),
    ...     fits(print, Callable[[], None]),
    ... )
    (True, False, False, True)
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if kind is Any:
        return True
    if kind is None or kind is type(None):
        return value is None
    if origin is not None and inner and isinstance(value, Collection):
        return isinstance(value, origin) and all(fits(item, inner[0]) for item in value)
    wanted = origin or kind
    if isinstance(value, bool):
        return wanted is bool
    return isinstance(value, _NUMBERS.get(wanted, wanted))


def _listed(words: list[str]) -> str:
    """Return words as alternatives of a sentence."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _words(kind: Any) -> list[str]:
    """Return an annotation's types as words, None last."""
    if get_origin(kind) in (Union, types.UnionType):
        words = dict.fromkeys(word for one in get_args(kind) for word in _words(one))
        return sorted(words, key="None".__eq__)
    if kind is type(None):
        return ["None"]
    if get_origin(kind) is collections.abc.Callable:
        return ["a function"]
    inner = [" or ".join(_words(one)) for one in get_args(kind)]
    return [f"{(get_origin(kind) or kind).__name__}[{', '.join(inner)}]" if inner else kind.__name__]
