"""Ranges from counts: all of the data, or without the tails."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ..errors import RangeError
from .histogram_counts import HistogramCounts


@dataclass(frozen=True, kw_only=True)
class NoClipping:
    """Clip nothing: the exact extremes."""

    def pick(self, block: HistogramCounts) -> tuple[float, float]:
        """Return the extremes.

        Args:
            block: the counts of one block.
        """
        return block.minimum, block.maximum


NO_CLIPPING = NoClipping()


@dataclass(frozen=True, kw_only=True)
class Percentile:
    """Clip the tails: ``100 - percent`` of the numbers at each end.

    Of n numbers in order, the range ends in the bins of the ``ceil(n * percent / 100)``-th from below and
    from above (numpy's method ``inverted_cdf``), at the outer edge of the bin and never past an extreme. With
    percent = 100 these are the extremes. ``percent`` is read in decimal, so that 99.9 of 1000 is the 999th.

    Args:
        percent: of the numbers up to each end of the range, above 50 and at most 100.

    Raises:
        RangeError: unless ``percent`` lies above 50 and at most at 100.
    """

    percent: float

    def __post_init__(self) -> None:
        if not 50 < self.percent <= 100:
            raise RangeError(f"percent (={self.percent}) must be above 50 and at most 100")

    def pick(self, block: HistogramCounts) -> tuple[float, float]:
        """Return the ends of the bins that hold the two order statistics.

        Args:
            block: the counts of one block.
        """
        rank = math.ceil(Fraction(str(self.percent)) / 100 * block.total)
        # Ends of the bins from the most negative one up, outer in the eyes of each end.
        upper = np.concatenate((-block.edges[:-1][::-1], block.edges[1:]))
        counts = np.concatenate((block.negative[::-1], block.positive))
        high = upper[np.searchsorted(np.cumsum(counts), rank)]
        lower = np.concatenate((block.edges[:-1][::-1], -block.edges[1:]))
        low = lower[np.searchsorted(np.cumsum(counts[::-1]), rank)]
        return block.clipped(float(low), float(high))
