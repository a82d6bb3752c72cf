"""Smaller groups for inputs that a scheme's group does not divide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Generic, TypeVar

from ..architectures import fused_set
from .granularity import Granularity
from .scheme import Scheme

SMALLEST = 32
"""The smallest group that is chosen: vLLM's GPU kernels (Marlin, Triton) take none below."""
_LARGE = 1 << 40


def group_of(scheme: Scheme) -> int:
    """Return the columns of a scheme's group; 0 for other blocks.

    >>> [group_of(Scheme.parse(text)) for text in ("int4:g128", "int8:channel")]
    [128, 0]
    """
    rows, columns = scheme.granularity.block_shape((2, _LARGE))
    return columns if rows == 1 and columns < _LARGE else 0


def halved(scheme: Scheme) -> Scheme | None:
    """Return a scheme with half the group, or None for several levels.

    >>> halved(Scheme.parse("int4:g128")) == Scheme.parse("int4:g64")
    True
    """
    group = group_of(scheme)
    if not group or group % 2 or len(scheme.levels) > 1:
        return None
    finest = replace(scheme.scales[0], granularity=Granularity.group(group // 2))
    return replace(scheme, scales=(finest,))


def smaller_groups(scheme: Scheme) -> Iterator[Scheme]:
    """Yield a scheme with repeatedly halved groups, down to SMALLEST."""
    half = halved(scheme)
    while half is not None and group_of(half) >= SMALLEST:
        yield half
        half = halved(half)


T = TypeVar("T")


class SmallerGroups(Generic[T]):
    """Replacements of schemes by smaller groups, one for each fused set.

    scheme: returns the scheme of weights of what a layer was to have, such as an assignment.
    """

    def __init__(self, scheme: Callable[[T], Scheme]) -> None:
        self._scheme = scheme
        self._found: dict[tuple[str, T], T] = {}

    def add(self, module: str, asked: T, fitting: T | None) -> None:
        """Take what fits a layer; its set gets the smallest group."""
        best = self.of(module, asked)
        if fitting is not None and group_of(self._scheme(fitting)) < group_of(self._scheme(best)):
            self._found[_set_of(module), asked] = fitting

    def of(self, module: str, asked: T) -> T:
        """Return the replacement for a layer, after all were added."""
        return self._found.get((_set_of(module), asked), asked)


def _set_of(module: str) -> str:
    return fused_set(module) or module
