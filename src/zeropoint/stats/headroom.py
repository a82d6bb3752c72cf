"""Range of NVFP4 inputs with room above the values of calibration.

    amax = max(rho * anchor, upper)

NVFP4 has a float8 scale for each 16 values, and one scale of the tensor that places these between the
smallest normal float8_e4m3fn, 2**-6, and the largest, 448. The largest magnitude of calibration puts the
largest block at 448, so that any larger input saturates. Here a small block, the anchor, is put near the low
end instead, and what is left above the largest block is room for other inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch.nn.functional import pad

from ..errors import RangeError, SchemeError
from ..formats import get_format
from .accumulator import State
from .histogram import ClipRule, Histogram
from .histogram_counts import HistogramCounts
from .statistic import TENSOR

BLOCK = 16
"""Values of a block of NVFP4, along the last axis."""
_SCALES = get_format("float8_e4m3fn")
NORMAL_RANGE = float(_SCALES.max) / _SCALES.facts["smallest_normal"]
"""Largest over smallest normal float8_e4m3fn."""
_ANCHOR, _UPPER = Fraction(1, 100), Fraction(9999, 10000)
_FLOOR = 1e-6
"""Blocks below this share of the upper one are no anchor."""


@dataclass(frozen=True, kw_only=True)
class Headroom:
    """Symmetric range above a low percentile of block maxima.

    The formula is NVIDIA ModelOpt's (0.47, ``NVFP4ActHeadroomCalibrator``): ``upper`` is the 99.99th
    percentile of the maxima, and ``anchor`` the first percentile of all that are at least a millionth of
    ``upper``. Zeros are left out. Both are upper edges of bins, and never past the largest.

    Args:
        rho: the end of the range over the anchor, below 28672; less leaves more room for small blocks.

    Raises:
        RangeError: for other ``rho``.
    """

    rho: float = 16384.0

    def __post_init__(self) -> None:
        if not 0 < self.rho < NORMAL_RANGE:
            raise RangeError(f"rho (={self.rho}) must lie above 0 and below {NORMAL_RANGE:.0f}")

    def pick(self, block: HistogramCounts) -> tuple[float, float]:
        """Return the range that follows from the counts.

        Args:
            block: counts of the maxima.
        """
        counts, ends = block.positive.copy(), np.minimum(block.edges[1:], block.maximum)
        counts[0] = 0
        amax = block.maximum
        if counts.any():
            upper = ends[_bin(counts, _UPPER)]
            counts[ends < upper * _FLOOR] = 0
            amax = max(self.rho * float(ends[_bin(counts, _ANCHOR)]), float(upper))
        return -amax, amax


@dataclass(frozen=True, kw_only=True)
class BlockMaxima(Histogram):
    """Histogram of the largest magnitudes of blocks of 16 values.

    Blocks lie along the last axis, the last one of a row padded with zeros. A block with NaN or Inf counts as
    one value that is left out.

    Args:
        rule: how a range follows from the counts; :class:`Headroom` by default.

    Raises:
        SchemeError: for a granularity other than ``tensor``.

    Example:
        >>> statistic = BlockMaxima()
        >>> state = statistic.update(statistic.start(), torch.ones(2, 64))
        >>> statistic.range(state)
        (tensor([-16384.], dtype=torch.float64), tensor([16384.], dtype=torch.float64))
    """

    rule: ClipRule = Headroom()
    mantissa_bits: int = 7

    def __post_init__(self) -> None:
        if self.granularity != TENSOR:
            raise SchemeError(f"headroom is a range of a whole tensor, not one per {self.granularity}")
        super().__post_init__()

    def measure(self, x: torch.Tensor) -> State:
        """Return the state of one batch, by its blocks."""
        self.check(x)
        rows = x.detach().abs().reshape(-1, x.shape[-1] if x.ndim else 1)
        rows = pad(rows, (0, -rows.shape[-1] % BLOCK))
        return super().measure(rows.reshape(len(rows), -1, BLOCK).amax(-1) if rows.numel() else rows)


def _bin(counts: np.ndarray[tuple[int], np.dtype[np.int64]], share: Fraction) -> int:
    """Return the bin of one order statistic: ``ceil(n * share)`` of n."""
    rank = math.ceil(share * int(counts.sum()))
    return int(np.searchsorted(np.cumsum(counts), rank))
