"""Equality of two tensors, in bits or in values, and their distance.

Pure functions of two tensors in memory, whatever files they come from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .tensor_error import TensorError, exact_sum

_VALUES = 1 << 15
"""Values whose float64 temporaries stay in cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Equality:
    """Equality of two tensors' values.

    values: how many were compared. unequal: those that differ; NaN equals NaN. signs: zeros on both sides, of
    different signs.
    """

    values: int
    unequal: int = 0
    signs: int = 0

    @property
    def of_bits(self) -> bool:
        """Whether all values are equal bit for bit."""
        return not self.unequal and not self.signs

    @staticmethod
    def merge(items: Iterable[Equality]) -> Equality:
        """Return the joint equality of several tensors, or parts of one."""
        found = [(item.values, item.unequal, item.signs) for item in items]
        values, unequal, signs = map(sum, zip((0, 0, 0), *found, strict=True))
        return Equality(values=values, unequal=unequal, signs=signs)


def equality(a: torch.Tensor, b: torch.Tensor) -> Equality:
    """Count the equal values of tensors with one shape and dtype.

    >>> equality(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([-0.0, 1.0, 3.0]))
    Equality(values=3, unequal=1, signs=1)
    """
    if torch.equal(_bits(a), _bits(b)):
        return Equality(values=a.numel())
    equal = a == b
    signs = equal & (_bits(a) != _bits(b))
    unequal = ~equal & ~(torch.isnan(a) & torch.isnan(b))
    return Equality(values=a.numel(), unequal=int(unequal.sum()), signs=int(signs.sum()))


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Return values as integers of their width."""
    return x.view({4: torch.int32, 8: torch.int64}[x.element_size()]) if x.is_floating_point() else x


def apart(a: torch.Tensor, b: torch.Tensor) -> tuple[Equality, TensorError]:
    """Return the equality of two matrices, and ``b``'s error against ``a``.

    a, b: (rows, columns), of one dtype: float32, float64 or int64. Where one of two different values is not
    finite, they are infinitely far apart. Each row is summed alone, so other rows do not change the result.
    """
    equalities, squares, errors, largest = [], [0.0], [0.0], 0.0
    step = max(1, _VALUES // max(1, a.shape[1]))
    for x, y in zip(torch.split(a, step), torch.split(b, step), strict=True):
        equalities.append(equality(x, y))
        reference = x.double()
        squares += _squares(reference)
        if equalities[-1].unequal:
            off = _distances(reference, y)
            errors += off.square().sum(1).tolist()
            largest = max(largest, float(off.max()))
    found = Equality.merge(equalities)
    sums = exact_sum(squares), exact_sum(errors)
    return found, TensorError(values=found.values, squares=sums[0], errors=sums[1], largest=largest)


def _squares(reference: torch.Tensor) -> list[float]:
    """Return the sum of the squares of each row's finite values."""
    found = reference.square().sum(1)
    if not bool(torch.isfinite(found).all()):
        found = torch.where(torch.isfinite(reference), reference, 0.0).square_().sum(1)
    return list(map(float, found.tolist()))


def _distances(reference: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the absolute differences from ``reference``, in float64."""
    off = (y.double() - reference).abs_()
    same = (y == reference) | (torch.isnan(y) & torch.isnan(reference))
    return torch.where(same, 0.0, off).nan_to_num_(nan=math.inf, posinf=math.inf)
