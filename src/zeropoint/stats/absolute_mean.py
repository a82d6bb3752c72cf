"""The mean of ``|x|``, summed without rounding: integers, one for each exponent of float32."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..errors import RangeError
from ..layout.runs import runs_of
from ..ops.library import counter_for
from .float_bits import EXPONENTS, SMALLEST_EXPONENT, magnitude_bits
from .statistic import Batch, State, Statistic

_FRACTION_BITS = 23
_PIECE = 1 << 20
"""Elements that are summed at once, so that their temporaries stay in cache."""


@dataclass(frozen=True, kw_only=True)
class AbsoluteMean(Statistic):
    """The running mean of ``|x|`` over the finite numbers of each block; the range is +-``factor`` of it.

    factor: 1 for BitNet's absmean weights (arXiv:2402.17764, equation 3: the scale of ternary codes is the
        mean itself), ``2 * sqrt(qmax)`` for the first step size of LSQ (arXiv:1902.08153, section 2.1).

    A magnitude is ``mantissa * 2 ** exponent`` with a mantissa below 2**24: one int64 sum of mantissas for
    each of the 255 exponents is exact for up to 2**39 numbers: batches, orders and processes give the same
    sum. Numbers of float64 are rounded to float32 first.

    Raises RangeError for a factor that is not positive.

    >>> statistic = AbsoluteMean()
    >>> state = statistic.update(statistic.start(), torch.tensor([-1.0, 2.0, 3.0, torch.inf]))
    >>> statistic.mean(state)
    tensor([2.], dtype=torch.float64)
    """

    factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise RangeError(f"factor (={self.factor}) must be positive and finite")

    def empty(self) -> State:
        """Return sums of nothing: one for each block and exponent, and the count of each block."""
        return {
            "mantissas": torch.zeros((*self.grid, EXPONENTS), dtype=torch.int64),
            "counts": torch.zeros(self.grid, dtype=torch.int64),
        }

    def scan(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, State | None]:
        """Return extremes and sums of one batch, from one read where there is a kernel."""
        runs, counter = runs_of(self.granularity, tuple(x.shape)), counter_for(x)
        if runs is None or counter is None:
            return super().scan(x)
        (low, high), mantissas, counts = counter.mantissas(x, runs)
        own = {"mantissas": mantissas.reshape(*self.grid, EXPONENTS), "counts": counts.reshape(self.grid)}
        return low, high, own

    def take(self, batch: Batch) -> State:
        """Return the sums of one batch."""
        values, grid = batch.values(), self.grid
        blocks = math.prod(grid)
        owner = batch.blocks() if blocks > 1 else None
        mantissas = torch.zeros(blocks * EXPONENTS, dtype=torch.int64, device=values.device)
        counts = torch.zeros(blocks, dtype=torch.int64, device=values.device)
        for start in range(0, len(values), _PIECE):
            bits = magnitude_bits(values[start : start + _PIECE])
            exponent = bits >> _FRACTION_BITS
            # Subnormal numbers have no leading one, and the exponent of the smallest normal ones.
            lead = (exponent > 0).to(torch.int32) << _FRACTION_BITS
            mantissa = (bits & ((1 << _FRACTION_BITS) - 1)) | lead
            if owner is None:
                counts += len(bits)
            else:
                piece = owner[start : start + _PIECE]
                exponent = exponent + piece * EXPONENTS
                counts += torch.bincount(piece, minlength=blocks)
            mantissas.index_add_(0, exponent, mantissa.to(torch.int64))
        return {"mantissas": mantissas.reshape(*grid, EXPONENTS), "counts": counts.reshape(grid)}

    def mean(self, state: State) -> torch.Tensor:
        """Return the mean of ``|x|`` of each block, float64 on the grid: the exact sum, then one division."""
        sums = state["mantissas"].reshape(-1, EXPONENTS).tolist()
        counts = state["counts"].reshape(-1).tolist()
        units = [max(1, count) << -SMALLEST_EXPONENT for count in counts]
        means = [_exact(row) / unit for row, unit in zip(sums, units, strict=True)]
        return torch.tensor(means, dtype=torch.float64, device=state["counts"].device).reshape(self.grid)

    def range(self, state: State) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``-factor * mean`` and ``factor * mean``."""
        reach = self.factor * self.mean(state)
        return -reach, reach


def _exact(mantissas: list[int]) -> int:
    """Return the sum in units of the smallest subnormal number, as Python's unbounded integer."""
    return sum(mantissa << max(0, field - 1) for field, mantissa in enumerate(mantissas))
