"""The range whose quantized numbers are nearest to the data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..schemes import Scheme, ZeroPoint
from .candidates import Ends, ends, magnitudes, quantized
from .histogram_counts import HistogramCounts

_PER_OCTAVE = 256
"""Numbers that represent the data from one power of two to the next: int8 has at most 64 codes there."""

_SWEEPS = 4
"""Turns of each end at most; two are usual."""


@dataclass(frozen=True, kw_only=True)
class LeastError:
    """Range with the scheme's least mean squared error, rounding and clipping included.

        minimize  sum_k count_k * (fake_quantize(x_k; range) - x_k) ** 2

    The magnitude at which numbers are clipped shrinks in steps of 2 ** (1/32), or through the powers of two
    where scales are such. With a zero point, both ends also shrink by the same share, as in the
    mean-squared-error observer of llm-compressor, and from the best of both each end moves alone, in turns,
    until neither gains.

    Args:
        scheme: the scheme that the range is for; each block is judged alone.

    Example:
        >>> import torch
        >>> from zeropoint.stats import Histogram
        >>> statistic = Histogram(rule=LeastError(scheme=Scheme.parse("int4:tensor")))
        >>> noise = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
        >>> float(statistic.range(statistic.update(statistic.start(), noise))[1]) < float(noise.max())
        True
    """

    scheme: Scheme

    def pick(self, block: HistogramCounts) -> tuple[float, float]:
        """Return the best range; of equals, the widest.

        Args:
            block: the counts of one block.
        """
        if block.amax == 0 or not self.scheme.scales:
            return block.minimum, block.maximum
        reach = magnitudes(self.scheme, block.amax)
        low, high = ends(block, reach, self.scheme)
        if self.scheme.zero_point is ZeroPoint.NONE:
            return self._best(block, low, high)
        return self._best_of_two_ends(block, low, high, reach / block.amax)

    def _best_of_two_ends(
        self, block: HistogramCounts, low: Ends, high: Ends, shares: Ends
    ) -> tuple[float, float]:
        lows, highs = block.minimum * shares, block.maximum * shares
        best = self._best(block, np.concatenate((low, lows)), np.concatenate((high, highs)))
        for _ in range(_SWEEPS):
            before = best
            best = self._best(block, np.append(best[0], lows), np.full(len(lows) + 1, best[1]))
            best = self._best(block, np.full(len(highs) + 1, best[0]), np.append(best[1], highs))
            if best == before:
                break
        return best

    def _best(self, block: HistogramCounts, low: Ends, high: Ends) -> tuple[float, float]:
        best = int(np.argmin(squared_errors(block, low, high, self.scheme)))
        return float(low[best]), float(high[best])


def squared_errors(block: HistogramCounts, low: Ends, high: Ends, scheme: Scheme) -> NDArray[np.float64]:
    """Return each range's mean squared error; too small ranges are omitted."""
    points, weights = block.points(_PER_OCTAVE)
    error = quantized(points, low, high, scheme) - points
    # Squared in units of the largest magnitude, whose own square could leave float64.
    result: NDArray[np.float64] = (error / block.amax) ** 2 @ (weights / weights.sum()) * block.amax**2
    return result
