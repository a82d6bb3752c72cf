"""Mergeable histograms with fixed bins, read from the bits of float32.

    bin of x = sign, exponent and the first ``mantissa_bits`` bits of the mantissa

Bins are logarithmic, and linear within each power of two: 2 ** -mantissa_bits of that power of two wide,
whatever the data. There is no range to guess, nothing to rebin, and no order of batches that matters. This
module counts; which range follows from the counts is for the rules of :mod:`zeropoint.stats.clipping` and its
neighbors to say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch

from ..errors import RangeError, ShapeError
from ..layout.runs import runs_of
from ..ops.library import counter_for
from ..ops.registry import Extremes
from ..ops.threads import gradual_underflow
from .accumulator import State
from .clipping import NO_CLIPPING
from .float_bits import EXPONENTS, signed_bits
from .histogram_counts import HistogramCounts
from .statistic import Batch, Statistic

_FRACTION_BITS = 23
_PIECE = 1 << 18
"""Elements that are counted at once: their temporaries stay in cache."""
MAX_BYTES = 1 << 29
"""Largest histogram of all blocks together; more would take the memory of the model that is observed."""


class ClipRule(Protocol):
    """Which range follows from the counts of one block."""

    def pick(self, block: HistogramCounts) -> tuple[float, float]:
        """Return the range, minimum and maximum.

        Args:
            block: the counts of one block.
        """


@lru_cache(maxsize=16)
def bin_edges(mantissa_bits: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the float64 edges of positive bins: ``edges[k] <= x < edges[k+1]``.

    >>> bool((bin_edges(5)[127 * 32 : 127 * 32 + 2] == (1.0, 1 + 1 / 32)).all())
    True
    """
    bits = np.arange(EXPONENTS << mantissa_bits, dtype=np.uint32) << (_FRACTION_BITS - mantissa_bits)
    with gradual_underflow():
        edges = np.append(bits.view(np.float32).astype(np.float64), 2.0 ** (EXPONENTS - 127))
    edges.setflags(write=False)
    return edges


@dataclass(frozen=True, kw_only=True)
class Histogram(Statistic, batch_free=True):
    """Counts of each block's finite numbers in fixed bins, and extremes.

    Numbers of float64 are rounded to float32 to find their bin.

    Args:
        rule: how a range follows: NoClipping, Percentile, LeastError or LeastDivergence. A state does not
            depend on it, so that one histogram answers for several rules.
        mantissa_bits: 0 to 10. With 5, a bin is at most 1/32 of its numbers wide, and a block takes 128 KiB;
            with 7, every bfloat16 number has a bin of its own, for 510 KiB.

    Raises:
        RangeError: for other ``mantissa_bits``.
        ShapeError: when all blocks together would take more than 512 MiB.

    Example:
        >>> statistic = Histogram()
        >>> state = statistic.update(statistic.start(), torch.arange(1000.0))
        >>> statistic.range(state)
        (tensor([0.], dtype=torch.float64), tensor([999.], dtype=torch.float64))
    """

    rule: ClipRule = NO_CLIPPING
    mantissa_bits: int = 5

    def __post_init__(self) -> None:
        if not 0 <= self.mantissa_bits <= 10:
            raise RangeError(f"mantissa_bits (={self.mantissa_bits}) must lie in 0..10")
        size = math.prod(self.grid) * 2 * self.bins * 8
        if size > MAX_BYTES:
            raise ShapeError(
                f"histograms of {math.prod(self.grid)} blocks ({size >> 20} MiB) must take at most "
                f"{MAX_BYTES >> 20} MiB; use a coarser granularity, fewer mantissa_bits or MinMax"
            )

    @property
    def bins(self) -> int:
        """Bins of one sign."""
        return EXPONENTS << self.mantissa_bits

    def empty(self) -> State:
        """Return int64 zeros of shape (grid, 2, bins): positive, then negative."""
        return {"counts": torch.zeros((*self.grid, 2, self.bins), dtype=torch.int64)}

    def scan(self, x: torch.Tensor) -> tuple[Extremes, State | None]:
        """Return extremes and counts of one batch, if possible in one read."""
        runs, counter = runs_of(self.granularity, tuple(x.shape)), counter_for(x)
        if runs is None or counter is None:
            return super().scan(x)
        found, counts = counter.bins(x, runs, self.mantissa_bits)
        return found, {"counts": counts.reshape(*self.grid, 2, self.bins)}

    def take(self, batch: Batch) -> State:
        """Return the counts of one batch."""
        values, grid, bins = batch.values(), self.grid, self.bins
        blocks, stride = math.prod(grid), 256 << self.mantissa_bits
        owner = batch.blocks() if blocks > 1 else None
        counts = torch.zeros(blocks * 2 * stride, dtype=torch.int64, device=values.device)
        piece = max(_PIECE, len(counts))
        for start in range(0, len(values), piece):
            # The sign is the top bit, so negative numbers land past all positive ones.
            bits = signed_bits(values[start : start + piece])
            index = (bits >> (_FRACTION_BITS - self.mantissa_bits)) & (2 * stride - 1)
            if owner is None:
                counts += torch.bincount(index, minlength=len(counts))
            else:
                index = index + owner[start : start + piece] * (2 * stride)
                counts.index_add_(0, index, torch.ones_like(index))
        return {"counts": counts.reshape(*grid, 2, stride)[..., :bins].contiguous()}

    def range(self, state: State) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the range that the rule picks for each block."""
        picked = [self.rule.pick(block) for block in self.counted(state)]
        low, high = torch.tensor(picked, dtype=torch.float64, device=state["counts"].device).unbind(1)
        return low.reshape(self.grid), high.reshape(self.grid)

    def counted(self, state: State) -> list[HistogramCounts]:
        """Return the histogram of each block.

        Args:
            state: a state of this accumulator.
        """
        counts = state["counts"].reshape(-1, 2, self.bins).cpu().numpy()
        lows, highs = (state[name].reshape(-1).tolist() for name in ("minimum", "maximum"))
        edges = bin_edges(self.mantissa_bits)
        return [
            HistogramCounts(positive=both[0], negative=both[1], edges=edges, minimum=low, maximum=high)
            for both, low, high in zip(counts, lows, highs, strict=True)
        ]
