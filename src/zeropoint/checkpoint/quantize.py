"""Quantize some rows of a weight so that the bytes are those of the whole weight, whatever the rows."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field

import torch

from ..formats.torch_dtypes import wide_dtype
from ..functional import quantize
from ..layout.blocks import reduce_blocks
from ..params import QuantizationParams
from ..params.arithmetic import Ranges, scales_from_ranges
from ..schemes import Granularity, Scheme
from ..tensor import QuantizedTensor


def needs_extremes(scheme: Scheme) -> bool:
    """Return whether some scale is one for the whole tensor, all of which must be seen first."""
    return any(level.granularity == Granularity.tensor() for level in scheme.scales)


@dataclass(slots=True)
class Extremes:
    """The smallest and largest value of a set of weights, gathered from parts by several threads."""

    pending: int
    low: float = math.inf
    high: float = -math.inf
    done: threading.Event = field(default_factory=threading.Event)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def add(self, x: torch.Tensor) -> None:
        """Take in one part, which may hold NaN: quantizing that part will say where."""
        low, high = (float(v) for v in torch.aminmax(x))
        with self._guard:
            self.low, self.high = _least(self.low, low), -_least(-self.high, -high)
            self.pending -= 1
            if not self.pending:
                self.done.set()


def _least(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else min(a, b)


def quantize_part(x: torch.Tensor, scheme: Scheme, extremes: tuple[float, float] | None) -> QuantizedTensor:
    """Return rows ``x`` of a matrix in codes; ``extremes`` are those of the whole, where they are needed.

    Raises NonFiniteError, RangeError.
    """
    if extremes is None:
        return quantize(x, scheme)
    shape, wide = tuple(x.shape), wide_dtype(x.dtype)
    lows, highs = [], []
    for level in scheme.scales:
        if level.granularity == Granularity.tensor():
            grid = level.granularity.grid(shape)
            lows.append(torch.full(grid, extremes[0], dtype=wide))
            highs.append(torch.full(grid, extremes[1], dtype=wide))
        else:
            lows.append(reduce_blocks(x, level.granularity, "amin", math.inf).to(wide))
            highs.append(reduce_blocks(x, level.granularity, "amax", -math.inf).to(wide))
    ranges = Ranges(minimum=tuple(lows), maximum=tuple(highs), dtype=x.dtype, shape=shape)
    scales, zero_point = scales_from_ranges(scheme, ranges)
    params = QuantizationParams(
        scheme=scheme, shape=shape, scales=scales, zero_point=zero_point, dtype=x.dtype
    )
    return quantize(x, params)
