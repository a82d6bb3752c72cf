"""The range of least Kullback-Leibler divergence between clipped and quantized data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..schemes import Scheme, ZeroPoint
from .candidates import ends, magnitudes, quantized
from .histogram_counts import HistogramCounts

CELLS = 2048
"""Cells of each distribution; the number of bins in the source's own example."""
_ROWS = 64
"""Thresholds that are judged at once, which bounds the memory of a search."""

Rows = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LeastDivergence:
    """Threshold on ``|x|`` whose quantized distribution diverges least.

        P(T)  magnitudes below T in 2048 cells; larger ones are added to the last cell
        Q(T)  the same without larger ones, each code's share spread evenly over its nonempty cells
        minimize  KL(P || Q) = sum P * log(P / Q),  both normalized

    Args:
        scheme: the scheme that the range is for; its own rounding says which cells share a code. The range is
            -T..T without the parts in which no number lies.

    Source: S. Migacz, 8-bit Inference with TensorRT, GTC 2017, slides 38 and 39. We deviate in two ways: the
    thresholds are ``amax * 2 ** (-k / 32)``, or the powers of two where scales are such, and cells divide
    each threshold's own range, so that all are judged at one resolution and an outlier does not coarsen the
    rest; and numbers are taken as spread evenly within each bin of the histogram, which smooths what bins
    that are wider than a cell hold.
    """

    scheme: Scheme

    def pick(self, block: HistogramCounts) -> tuple[float, float]:
        """Return the best range; of equals, the widest.

        Args:
            block: the counts of one block.
        """
        if block.amax == 0 or not self.scheme.scales:
            return block.minimum, block.maximum
        thresholds = magnitudes(self.scheme, block.amax)
        best = int(np.argmin(divergences(block, thresholds, self.scheme)))
        low, high = ends(block, thresholds, self.scheme)
        return float(low[best]), float(high[best])


def divergences(
    block: HistogramCounts, thresholds: NDArray[np.float64], scheme: Scheme
) -> NDArray[np.float64]:
    """Return KL divergences in nats, infinite where only P is positive.

    Thresholds too small for their scale's format are left out from the end.
    """
    parts = [
        _divergences(block, thresholds[start : start + _ROWS], scheme)
        for start in range(0, len(thresholds), _ROWS)
    ]
    return np.concatenate(parts)


def _divergences(
    block: HistogramCounts, thresholds: NDArray[np.float64], scheme: Scheme
) -> NDArray[np.float64]:
    cells = thresholds[:, None] * (np.arange(CELLS + 1) / CELLS)
    below, total = _cumulative(block, cells)
    # The largest magnitude itself lies in the last cell of its own threshold, not above it.
    below[thresholds >= block.amax, -1] = total
    inside = np.diff(below, axis=1)
    centers = ((cells[:, 1:] + cells[:, :-1]) / 2).astype(np.float32)
    values = quantized(_side(block, scheme) * centers, *ends(block, thresholds, scheme), scheme)
    inside = inside[: len(values)]
    clipped = inside.copy()
    clipped[:, -1] += total - below[: len(values), -1]
    return _kullback_leibler(clipped, _shared(inside, values))


def _cumulative(block: HistogramCounts, at: Rows) -> tuple[Rows, float]:
    """Return the interpolated count of magnitudes below each number, and the total."""
    counts = (block.positive + block.negative).astype(np.float64)
    used = int(np.flatnonzero(counts)[-1]) + 1
    edges = block.edges[: used + 1].copy()
    # The last bin ends at the largest magnitude, or just past its lower edge when it holds that alone.
    edges[-1] = max(block.amax, edges[-2] * (1 + 2.0**-30))
    below = np.concatenate(([0.0], np.cumsum(counts[:used])))
    return np.interp(at, edges, below), float(below[-1])


def _shared(inside: Rows, values: Rows) -> Rows:
    """Return rows whose totals per code are spread over nonempty cells."""
    rows, cells = inside.shape
    fresh = np.ones((rows, cells), dtype=np.int64)
    fresh[:, 1:] = values[:, 1:] != values[:, :-1]
    group = np.cumsum(fresh.reshape(-1)) - 1
    held = (inside > 0).reshape(-1)
    totals = np.bincount(group, weights=inside.reshape(-1))
    counts = np.bincount(group, weights=held)
    shares = totals / np.maximum(counts, 1)
    result: Rows = np.where(held, shares[group], 0.0).reshape(rows, cells)
    return result


def _kullback_leibler(p: Rows, q: Rows) -> NDArray[np.float64]:
    totals = q.sum(axis=1, keepdims=True)
    p = p / p.sum(axis=1, keepdims=True)
    q = q / np.where(totals > 0, totals, 1.0)
    with np.errstate(divide="ignore"):
        ratio = np.log(np.where(p > 0, p, 1.0)) - np.log(np.where(p > 0, q, 1.0))
    result: NDArray[np.float64] = (p * ratio).sum(axis=1)
    return result


def _side(block: HistogramCounts, scheme: Scheme) -> np.float32:
    """Return the sign of the numbers with the largest magnitude."""
    below = scheme.element.signed or scheme.zero_point is not ZeroPoint.NONE
    return np.float32(-1 if below and -block.minimum > block.maximum else 1)
