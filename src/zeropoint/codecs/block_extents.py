"""Blocks of a matrix under a scheme, as layouts spell them."""

from __future__ import annotations

import functools
from dataclasses import replace

from ..schemes import Granularity, Scheme

_LARGE = 1 << 40
_KNOWN = 4096
"""Answers that are kept: a checkpoint of many tensors has few schemes."""


@functools.lru_cache(maxsize=_KNOWN)
def blocks(scheme: Scheme) -> tuple[int, int]:
    """Return the finest blocks' rows and columns, 0 for whole axes.

    >>> blocks(Scheme.parse("int4:g128")), blocks(Scheme.parse("int8:channel"))
    ((1, 128), (1, 0))
    """
    rows, columns = scheme.granularity.block_shape((_LARGE, _LARGE))
    return rows % _LARGE, columns % _LARGE


def no_matrix(shape: tuple[int, ...]) -> str | None:
    """Return why a shape is no non-empty matrix, or None."""
    if len(shape) != 2:
        return f"has {len(shape)} axes, and the layout stores matrices"
    return "is empty" if 0 in shape else None


def partial_group(scheme: Scheme, shape: tuple[int, ...], what: str = "the group") -> str | None:
    """Return why a matrix has partial groups of columns, or None.

    what: what messages call a group.

    >>> partial_group(Scheme.parse("int4:g128"), (8, 200))
    'last axis 200 is not a multiple of the group, 128'
    """
    rows, group = blocks(scheme)
    short = rows == 1 and group and shape[1] % group
    return f"last axis {shape[1]} is not a multiple of {what}, {group}" if short else None


def by_column(scheme: Scheme) -> Scheme:
    """Return ``scheme`` under act-order: a scale for each column.

    >>> str(by_column(Scheme.parse("int4:g128")))
    'int4:g1'
    """
    return replace(scheme, scales=(replace(scheme.scales[0], granularity=Granularity.group(1)),))
