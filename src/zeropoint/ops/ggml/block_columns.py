"""Rows of blocks as columns and back, and importance weights.

A function for a type takes rows of whole blocks, float32 (rows, columns), and the importance of columns or
None, and returns what the type stores: patterns of codes, uint8 (rows, columns), and the numbers of each
level of the scheme, (rows, blocks), uint8 patterns or float16, in the order of :attr:`Scheme.levels`.
"""

from __future__ import annotations

import torch

from ...formats.division import divided
from .float_steps import root, total

Importance = torch.Tensor | None
Stored = tuple[torch.Tensor, list[torch.Tensor]]
SUPER = 256
"""Values in a super-block of the K-quants."""


def columns(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return runs of ``size`` numbers as columns."""
    return x.reshape(-1, size).T.contiguous()


def patterns(codes: torch.Tensor, rows: int, mask: int) -> torch.Tensor:
    """Return the patterns of integers that are columns, uint8 (rows, ...)."""
    return (codes.T & mask).to(torch.uint8).reshape(rows, -1)


def halves(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return numbers of blocks as they are stored in float16, (rows, ...)."""
    return x.to(torch.float16).reshape(rows, -1)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return numbers as float16 stores them, in float32."""
    return x.to(torch.float16).float()


def weighted(
    x: torch.Tensor, importance: torch.Tensor, size: int, run: int, factor: float = 1.0
) -> torch.Tensor:
    """Return weights ``importance * sqrt(m + x^2)`` of blocks as columns.

    m: the mean square of the ``run`` values of which a block is a part, times ``factor``.
    """
    values = columns(x, run)
    mean = divided(factor * total(values * values), run).repeat_interleave(run // size)
    blocks = columns(x, size)
    return columns(importance.expand(x.shape), size) * root(mean + blocks * blocks)
