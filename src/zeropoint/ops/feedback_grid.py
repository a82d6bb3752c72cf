"""Records of error feedback: rounding grid and matrix factors."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from ..errors import RangeError, ShapeError

LARGEST_EXPONENT = 60
"""Products of numbers below two to this power, and sums of 64 of them, fit float32."""
MOST_LEVELS = 1 << 16


@dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """Rounding of a matrix under fixed parameters.

        u = (t - offset) / scale + zero        value = (level - zero) * scale + offset

    ``u`` is computed in float64, and zero where the scale is; the level nearest to it is taken. The value is
    computed in the dtype of the scale, each operation rounded, as dequantizing does.

    Args:
        levels: values of elements, (levels,) float64, ascending.
        scale: of each block of each row, (rows, blocks) float32 or float64.
        block_of: the block of each column, (columns,) int64.
        ties_up: whether the upper of two neighbors takes a tie, (levels - 1,) uint8; None for consecutive
            integers, whose ties are rounded to even.
        offset: (rows, blocks), of the dtype of the scale, or None.
        zero: zero points in units of levels, (rows, blocks), of the dtype of the scale, or None.

    Raises:
        ShapeError: for tensors that do not fit each other.
        RangeError: for levels that are not ascending, or have ties that nothing decides.
    """

    levels: torch.Tensor
    scale: torch.Tensor
    block_of: torch.Tensor
    ties_up: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    zero: torch.Tensor | None = None

    def __post_init__(self) -> None:
        count = len(self.levels)
        if not 1 <= count <= MOST_LEVELS or bool((self.levels.diff() <= 0).any()):
            raise RangeError(f"levels ({count} numbers) must ascend and be 1 to {MOST_LEVELS}")
        if self.ties_up is None and not self.has_steps:
            raise RangeError("levels must be consecutive integers where ties_up is None; give ties_up")
        if self.ties_up is not None and tuple(self.ties_up.shape) != (count - 1,):
            raise ShapeError(f"ties_up (shape {tuple(self.ties_up.shape)}) must have shape ({count - 1},)")
        for name in ("offset", "zero"):
            each = getattr(self, name)
            if each is not None and each.shape != self.scale.shape:
                raise ShapeError(
                    f"{name} (shape {tuple(each.shape)}) must have the shape of scale "
                    f"{tuple(self.scale.shape)}"
                )

    @functools.cached_property
    def has_steps(self) -> bool:
        """Whether levels are consecutive integers, and ties are rounded to even."""
        return self.ties_up is None and bool(
            (self.levels.diff() == 1).all() & (self.levels == self.levels.round()).all()
        )

    @functools.cached_property
    def bounds(self) -> torch.Tensor:
        """Numbers above which the next level is taken, (levels - 1,) float64."""
        middles = (self.levels[1:] + self.levels[:-1]) / 2
        if self.ties_up is None:
            return middles
        below = torch.nextafter(middles, middles.new_tensor(-math.inf))
        return torch.where(self.ties_up.bool(), below, middles)

    @property
    def all_offsets(self) -> torch.Tensor:
        """The offsets, or -0, which changes no number it is added to."""
        return torch.full_like(self.scale, -0.0) if self.offset is None else self.offset

    @property
    def all_zeros(self) -> torch.Tensor:
        """The zero points, 0 where there are none."""
        return torch.zeros_like(self.scale) if self.zero is None else self.zero


@dataclass(frozen=True, kw_only=True, eq=False)
class TriangularFactors:
    """Factors of ``h = m diag(d) m^T``, or the failed column.

    Columns are eliminated from the last to the first; the pivot of ``failed`` is not positive, and the
    columns before it are not done.
    """

    m: torch.Tensor
    d: torch.Tensor
    failed: int | None = None


def float32_exponent(x: torch.Tensor) -> int:
    """Return the exponent of a divisor that keeps float32 products finite."""
    if x.numel() == 0:
        return 0
    low, high = (float(end) for end in torch.aminmax(x.detach()))
    return max(0, math.frexp(max(-low, high))[1] - LARGEST_EXPONENT)
