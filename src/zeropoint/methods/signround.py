r"""SignRound: joint rounding of a block's weights, by signs of gradients.

    minimize over v:   |f(X~; q) - f(X; w)|^2 / |f(X; w)|^2      f: the block, w its weights
    q = high where u + v >= 1/2, else low,   -1/2 <= v <= 1/2    low, high: neighboring values
    v <- v - (1 - i / n) / n  mean(g) / sqrt(mean(g^2)),         g: the gradient by q in step i of n

X are the inputs of the block in the float model, X~ the inputs behind the blocks that are quantized already.
Codes start as the codes of error feedback, under its scales: one of the two values is the code's, the other
its neighbor on the side of the weight, and u is where between them the weight lies. Feedback also takes codes
that are not the nearest: there u is as far on the other side of 1/2, so that the start is kept. The driver of
a model runs the block and takes the steps (:mod:`zeropoint.models.block_rounding`).

The paper steps by sign(g). Where windows disagree about the sign, the quotient of running means of Adam is a
smaller step: on two blocks it left 10 to 20 % less error (docs/methods/signround.md). In the paper codes
start as the nearest ones, and ends of ranges move, too.

Source: Cheng et al., SignRound, arXiv:2309.05516; Kingma and Ba, Adam, arXiv:1412.6980.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import CalibrationError
from ..ops.feedback_grid import Grid
from ..schemes import Scheme
from ..tensor import QuantizedTensor
from ..training.slope_means import SlopeMeans
from .channels import needs_model
from .gptq import METHOD as GPTQ
from .gptq import ErrorFeedback, coded, ungridded
from .method import NO_DATA, Bound, LayerData, LayerResult, Method, Needs, Scope
from .rounding_grid import grid_of


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRounding(Method):
    """Joint rounding of a block's weights; start: the method of initial codes."""

    name: ClassVar[str] = "signround"
    formula: ClassVar[str] = (
        "gptq, then min over q in {low, high} of |f(X~; q) - f(X; w)|^2, f a block of the model"
    )
    source: ClassVar[str] = "SignRound (arXiv:2309.05516), from the codes of GPTQ"
    start: ErrorFeedback = GPTQ

    @property
    def needs(self) -> Needs:
        """Return the statistics that its start needs."""
        return self.start.needs

    def scope(self, scheme: Scheme) -> Scope:  # noqa: ARG002 (as the protocol)
        """Return all layers of a block of the model."""
        return Scope.BLOCK

    def refusal(self, scheme: Scheme) -> str | None:
        """Refuse what error feedback refuses."""
        return ungridded(self.name, scheme)

    def bound(self, scheme: Scheme) -> Bound:  # noqa: ARG002 (as the protocol)
        """Return none: codes are chosen for the output of a block."""
        return Bound.NONE

    def value_bytes(self, scheme: Scheme) -> int:
        """Return the memory of its start; the driver counts its own."""
        return self.start.value_bytes(scheme)

    def quantize(
        self,
        weight: torch.Tensor,  # noqa: ARG002 (as the protocol)
        scheme: Scheme,
        data: LayerData = NO_DATA,  # noqa: ARG002
    ) -> LayerResult:
        """Raise CalibrationError: a weight alone has no block."""
        raise CalibrationError(needs_model(self, scheme))


METHOD = BlockRounding()


class Sides:
    """The two candidate values of each number, and the current choice.

    weight: (rows, columns), of which ``q`` are codes. q: the initial codes; scales stay as they are.
    """

    NUMBER_BYTES: ClassVar[int] = 4 * 4 + SlopeMeans.NUMBER_BYTES + 2
    """Memory of a number of a weight: both values, where it lies and how far it moved, and two sides."""

    def __init__(self, weight: torch.Tensor, q: QuantizedTensor) -> None:
        self._params, grid = q.params, grid_of(q.params)
        level, unit = _levels(q, grid), _units(weight, grid)
        above = unit >= grid.levels[level]
        low, high = torch.where(above, level, level - 1), torch.where(above, level + 1, level)
        low, high = low.clamp_min(0), high.clamp_max(len(grid.levels) - 1)
        self._low, self._high = _values(grid, low), _values(grid, high)
        gap = grid.levels[high] - grid.levels[low]
        away = (unit - grid.levels[level]).abs() / gap.where(gap > 0, 1.0)
        # Error feedback moved numbers whose code is not the nearest, and more the farther they are from it.
        away = torch.where(away > 0.5, (1 - away).clamp_min(0.0), away).clamp_max(_UNDER_HALF)
        self._where = torch.where(above, away, 1 - away).float()
        self._moved, self._means = torch.zeros_like(self._where), SlopeMeans(self._where)

    @property
    def goes_up(self) -> torch.Tensor:
        """Which numbers take the higher of their two values, (rows, columns) bool."""
        return self._where + self._moved >= 0.5

    def values(self, goes_up: torch.Tensor) -> torch.Tensor:
        """Return the values of some sides.

        goes_up: the numbers that take the higher one.
        """
        return torch.where(goes_up, self._high, self._low)

    def step(self, slope: torch.Tensor, size: float) -> None:
        """Move numbers against the slope, fully while its sign is steady.

        slope: the gradient of the objective by the values, (rows, columns). size: in distances of the two
        values.
        """
        self._moved.sub_(self._means.direction(slope), alpha=size).clamp_(-0.5, 0.5)

    def codes(self, goes_up: torch.Tensor) -> QuantizedTensor:
        """Return the weight in codes.

        goes_up: the numbers that take the higher value.
        """
        return coded(self.values(goes_up), self._params)


_UNDER_HALF = 0.5 - 2.0**-20
"""Where a number is at most that takes the value which it is closer to: sums with it are exact in float32."""


def _levels(q: QuantizedTensor, grid: Grid) -> torch.Tensor:
    """Return the index of each code's level."""
    unit = _units(q.dequantize(grid.scale.dtype), grid)
    middles = (grid.levels[1:] + grid.levels[:-1]) / 2
    return torch.searchsorted(middles, unit.contiguous())


def _units(weight: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return a float64 weight in level units; 0 under zero scales."""
    scale, zero = grid.scale[:, grid.block_of].double(), grid.all_zeros[:, grid.block_of].double()
    offset = grid.all_offsets[:, grid.block_of].double()
    return torch.where(scale == 0, 0.0, (weight.reshape(scale.shape).double() - offset) / scale) + zero


def _values(grid: Grid, level: torch.Tensor) -> torch.Tensor:
    """Return the values of levels as dequantizing computes them."""
    at = grid.block_of
    whole = (grid.levels[level] - grid.all_zeros[:, at].double()).to(grid.scale.dtype)
    return whole * grid.scale[:, at] + grid.all_offsets[:, at]
