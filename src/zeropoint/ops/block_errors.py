"""How errors of blocks are measured while their scales are searched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..layout.blocks import pairwise_sums
from ..params import QuantizationParams
from ..schemes import Granularity

Decode = Callable[[torch.Tensor, QuantizationParams], torch.Tensor]
"""From values and parameters to what their codes decode to, in the wide dtype."""
_FRACTION_BITS = 10
"""Binary places of a power: square roots, which every machine rounds alike, make it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """Values whose scales are searched at once, and how errors are measured.

    x: the values. importance: weights of their errors, float64 in the shape of ``x``; all alike if None.
    """

    x: torch.Tensor
    importance: torch.Tensor | None
    decode: Decode
    power: float = 2.0

    @property
    def wide(self) -> torch.Tensor:
        """The values as float64."""
        return self.x.double()

    def decoded(self, params: QuantizationParams) -> torch.Tensor:
        """Return the float64 values of the codes under parameters."""
        return self.decode(self.x, params).double()

    def errors(self, params: QuantizationParams, blocks: Granularity) -> torch.Tensor:
        """Return the error of each block."""
        return self.sums(powers(self.decoded(params) - self.wide, self.power), blocks)

    def sums(self, values: torch.Tensor, blocks: Granularity) -> torch.Tensor:
        """Return the sum over each block, each value times its importance."""
        return pairwise_sums(values if self.importance is None else values * self.importance, blocks)


def powers(x: torch.Tensor, power: float) -> torch.Tensor:
    """Return ``|x| ** power`` of float64 by products and square roots alone.

    >>> powers(torch.tensor([-4.0, 0.0], dtype=torch.float64), 2.5)
    tensor([32.,  0.], dtype=torch.float64)
    """
    _, squares, odd, part = factors_of(power)
    root = x.abs()
    result = root if odd else torch.ones_like(root)
    for _ in range(squares):
        result = result * (x * x)
    for place in reversed(range(_FRACTION_BITS if part else 0)):
        root = root.sqrt()
        if part >> place & 1:
            result = result * root
    return result


def factors_of(power: float) -> tuple[float, int, bool, int]:
    """Split a power for :func:`powers`: exponent, squarings, odd factor, remainder in 1024ths.

    >>> factors_of(3.25)
    (3.25, 1, True, 256)
    """
    whole, part = divmod(round(power * (1 << _FRACTION_BITS)), 1 << _FRACTION_BITS)
    return whole + part / (1 << _FRACTION_BITS), whole // 2, bool(whole % 2), part
