"""Candidate ranges of one block, and the quantized numbers in each."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import RangeError
from ..formats import Overflow
from ..functional import fake_quantize
from ..params import QuantizationParams
from ..schemes import Granularity, Scheme
from .histogram_counts import HistogramCounts

Ends = NDArray[np.float64]

PER_OCTAVE = 32
"""Candidates for each halving of the range: as fine as a histogram of 5 mantissa bits."""
OCTAVES = 10
"""A range is cut to at least 1/1024 of the extremes."""
_PIECE = 1 << 22
"""Numbers that are quantized at once, which bounds the memory of a search."""


def magnitudes(scheme: Scheme, amax: float) -> NDArray[np.float64]:
    """Return the magnitudes to try, largest first.

    Where scales are powers of two, these are the powers of two up to the one past ``amax``, which give each
    scale once under every such rule; otherwise ``amax * 2 ** (-k / 32)``.
    """
    if scheme.scales and scheme.scales[0].rule.power_of_two:
        top = math.frexp(amax)[1]
        return np.ldexp(1.0, np.arange(top, top - OCTAVES - 2, -1))
    steps = np.arange(OCTAVES * PER_OCTAVE + 1)
    fractions: NDArray[np.float64] = amax * np.exp2(-steps / PER_OCTAVE)
    return fractions


def ends(block: HistogramCounts, reach: Ends, scheme: Scheme) -> tuple[Ends, Ends]:
    """Return the range that clips at each magnitude, trimmed to the data.

    Powers of two are kept whole: cut to the extremes, they would give other scales.
    """
    if scheme.scales[0].rule.power_of_two:
        return reach * -float(block.minimum < 0), reach * float(block.maximum > 0)
    return np.maximum(-reach, block.minimum), np.minimum(reach, block.maximum)


@lru_cache(maxsize=64)
def in_rows(scheme: Scheme) -> Scheme:
    """Return the scheme with one saturating block a row, a candidate each."""
    rows = Granularity.channel(0)
    levels = tuple(replace(level, granularity=rows) for level in scheme.scales)
    return replace(scheme, scales=levels, overflow=Overflow.SATURATE)


def quantized(
    points: NDArray[np.float32], low: NDArray[np.float64], high: NDArray[np.float64], scheme: Scheme
) -> NDArray[np.float64]:
    """Return ``points`` quantized in each range, (ranges, points), float64.

    points: (points,) for every range, or (ranges, points). Ranges so small that their scale does not fit its
    format are left out from the end; raises RangeError when that leaves none.
    """
    rows, width = in_rows(scheme), points.shape[-1]
    step, done = max(1, _PIECE // max(1, width)), []
    for start in range(0, len(low), step):
        part = slice(start, min(start + step, len(low)))
        fitting = _params(rows, low[part], high[part], width)
        if fitting is None:
            break
        count = fitting.shape[0]
        own = points if points.ndim == 1 else points[part][:count]
        data = torch.from_numpy(np.array(np.broadcast_to(own, (count, width))))
        done.append(fake_quantize(data, fitting).numpy().astype(np.float64))
        if count < part.stop - part.start:
            break
    if not done:
        _params_of(rows, low[:1], high[:1], width)
    return np.concatenate(done)


def _params(
    rows: Scheme, low: NDArray[np.float64], high: NDArray[np.float64], width: int
) -> QuantizationParams | None:
    """Return parameters of the longest prefix, halving until scales fit."""
    count = len(low)
    while count:
        try:
            return _params_of(rows, low[:count], high[:count], width)
        except RangeError:
            count //= 2
    return None


def _params_of(
    rows: Scheme, low: NDArray[np.float64], high: NDArray[np.float64], width: int
) -> QuantizationParams:
    ends = (torch.from_numpy(np.ascontiguousarray(end)) for end in (low, high))
    return QuantizationParams.from_range(rows, *ends, shape=(len(low), width))
