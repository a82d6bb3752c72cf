"""The mean of ``|x|``, from an exact 320-bit integer sum."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..errors import RangeError
from ..layout.runs import runs_of
from ..ops.library import counter_for
from ..ops.registry import Extremes
from .accumulator import State
from .float_bits import LIMB_BITS, LIMBS, SMALLEST_EXPONENT, carried, magnitude_bits
from .statistic import Batch, Statistic

_FRACTION_BITS = 23
_PIECE = 1 << 20
"""Elements that are summed at once, so that their temporaries stay in cache."""


@dataclass(frozen=True, kw_only=True)
class AbsoluteMean(Statistic, batch_free=True):
    """Running mean of ``|x|`` over each block's finite numbers.

    The range is +-``factor`` of the mean. A sum is an integer, in units of the smallest subnormal float32, in
    limbs of 32 bits: exact, so that batches, orders and processes give the same one. Numbers of float64 are
    rounded to float32 first.

    Args:
        factor: 1 for BitNet's absmean weights (arXiv:2402.17764, equation 3: the scale of ternary codes is
            the mean itself), ``2 * sqrt(qmax)`` for the first step size of LSQ (arXiv:1902.08153, section
            2.1).

    Raises:
        RangeError: for a factor that is not positive.

    Example:
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
        """Return sums of nothing: the limbs and the count of each block."""
        return {
            "limbs": torch.zeros((*self.grid, LIMBS), dtype=torch.int64),
            "counts": torch.zeros(self.grid, dtype=torch.int64),
        }

    def scan(self, x: torch.Tensor) -> tuple[Extremes, State | None]:
        """Return extremes and sums of one batch, if possible in one read."""
        runs, counter = runs_of(self.granularity, tuple(x.shape)), counter_for(x)
        if runs is None or counter is None:
            return super().scan(x)
        found, limbs, counts = counter.sums(x, runs)
        limbs = carried(limbs.reshape(*self.grid, LIMBS))
        return found, {"limbs": limbs, "counts": counts.reshape(self.grid)}

    def take(self, batch: Batch) -> State:
        """Return the sums of one batch."""
        values, grid = batch.values(), self.grid
        blocks = math.prod(grid)
        owner = batch.blocks() if blocks > 1 else None
        limbs = torch.zeros(blocks * LIMBS, dtype=torch.int64, device=values.device)
        counts = torch.zeros(blocks, dtype=torch.int64, device=values.device)
        for start in range(0, len(values), _PIECE):
            limb, low, high = _limbs_of(magnitude_bits(values[start : start + _PIECE]))
            if owner is None:
                counts += len(limb)
            else:
                piece = owner[start : start + _PIECE]
                limb = limb + piece * LIMBS
                counts += torch.bincount(piece, minlength=blocks)
            limbs.index_add_(0, limb, low).index_add_(0, limb + 1, high)
            limbs = carried(limbs.reshape(blocks, LIMBS)).reshape(-1)
        return {"limbs": limbs.reshape(*grid, LIMBS), "counts": counts.reshape(grid)}

    def join(self, a: State, b: State) -> State:
        """Return the sums of two sets of data together."""
        return {"limbs": carried(a["limbs"] + b["limbs"]), "counts": a["counts"] + b["counts"]}

    def mean(self, state: State) -> torch.Tensor:
        """Return each block's mean of ``|x|``, float64: exact sum, one division.

        Args:
            state: a state of this accumulator.
        """
        sums = state["limbs"].reshape(-1, LIMBS).tolist()
        counts = state["counts"].reshape(-1).tolist()
        units = [max(1, count) << -SMALLEST_EXPONENT for count in counts]
        means = [_exact(row) / unit for row, unit in zip(sums, units, strict=True)]
        return torch.tensor(means, dtype=torch.float64, device=state["counts"].device).reshape(self.grid)

    def range(self, state: State) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``-factor * mean`` and ``factor * mean``."""
        reach = self.factor * self.mean(state)
        return -reach, reach


def _limbs_of(bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the limb index of magnitude bits, and two limb summands.

    A magnitude is ``mantissa << (field - 1)``; subnormal numbers have no leading one, and the exponent of the
    smallest normal ones.
    """
    field = bits >> _FRACTION_BITS
    lead = (field > 0).to(torch.int32) << _FRACTION_BITS
    mantissa = ((bits & ((1 << _FRACTION_BITS) - 1)) | lead).to(torch.int64)
    position = (field.to(torch.int64) - 1).clamp_(min=0)
    wide = mantissa << position % LIMB_BITS
    return position // LIMB_BITS, wide & ((1 << LIMB_BITS) - 1), wide >> LIMB_BITS


def _exact(limbs: list[int]) -> int:
    """Return a sum in subnormal units, as Python's unbounded integer."""
    return sum(limb << LIMB_BITS * i for i, limb in enumerate(limbs))
