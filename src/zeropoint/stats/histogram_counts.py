"""One block's histogram, as input of the clipping rules."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .float_bits import EXPONENTS


@dataclass(frozen=True, kw_only=True, eq=False)
class HistogramCounts:
    """How many numbers of one block lie in each bin.

    Args:
        positive, negative: int64 counts by magnitude; zeros lie in the first bin of their sign.
        edges: float64, one more than bins: bin ``k`` holds ``edges[k] <= magnitude < edges[k + 1]``.
        minimum, maximum: exact extremes.
    """

    positive: NDArray[np.int64]
    negative: NDArray[np.int64]
    edges: NDArray[np.float64]
    minimum: float
    maximum: float

    @property
    def total(self) -> int:
        """Numbers counted."""
        return int(self.positive.sum() + self.negative.sum())

    @property
    def amax(self) -> float:
        """Largest magnitude."""
        return max(abs(self.minimum), abs(self.maximum))

    def clipped(self, low: float, high: float) -> tuple[float, float]:
        """Return a range without the parts in which no number lies.

        Args:
            low: lower end of the range.
            high: upper end of the range.
        """
        return max(low, self.minimum), min(high, self.maximum)

    def points(self, per_octave: int) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        """Return numbers that represent the data, and how many values each represents.

        They are spread evenly over every bin that holds numbers, ``per_octave`` of them from one power of two
        to the next where bins are wider than that, and cut to the extremes.

        Args:
            per_octave: points from one power of two to the next.
        """
        each = max(1, per_octave * EXPONENTS // len(self.positive))
        steps = (np.arange(each) + 0.5) / each
        values, weights = [], []
        for sign, counts in ((1.0, self.positive), (-1.0, self.negative)):
            used = np.flatnonzero(counts)
            low, width = self.edges[used], np.diff(self.edges)[used]
            values.append(sign * (low[:, None] + width[:, None] * steps).reshape(-1))
            weights.append(np.repeat(counts[used] / each, each))
        top = float(np.finfo(np.float32).max)
        inside = np.concatenate(values).clip(max(self.minimum, -top), min(self.maximum, top))
        return inside.astype(np.float32), np.concatenate(weights)
