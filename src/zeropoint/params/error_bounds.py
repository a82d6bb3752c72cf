"""Error bounds of parameters by their kind, and of tables.

A value of a table is off by half the widest gap of its table at most, where it lies between the ends,

    |x - table[code]| <= max over j of (table[j + 1] - table[j]) / 2,    or how far x lies past either end,

and the roundings of boundaries and results. Tables of the scheme's own rule hold all numbers of their block
(:mod:`.scale_tables`); tables of a method may clip.
"""

from __future__ import annotations

import math

import torch

from ..formats.torch_dtypes import wide_dtype
from ..schemes import Scheme
from .bounds import BlockErrors, Extremes, UnitRoundoff
from .chain_bounds import ChainedErrors
from .scale_tables import tables_of
from .tensors import Params


class TableErrors:
    """Error bounds of a tensor whose scales are tables.

    params: as they are stored.
    """

    def __init__(self, scheme: Scheme, params: Params, *, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._wide = UnitRoundoff.of(wide_dtype(dtype))
        self._tables = tables_of(
            scheme, params, shape=shape, own_dtype=dtype, dtype=wide_dtype(dtype)
        ).double()

    def representable(self) -> Extremes:
        """Return the ends of the tables, between which nothing is clipped."""
        return self._tables[..., 0], self._tables[..., -1]

    def implied(self) -> Extremes:
        """Return the extremes of data for which the rule chooses these tables."""
        return self.representable()

    def bound(self, extremes: Extremes, out_dtype: torch.dtype) -> torch.Tensor:
        """Return each block's bound for numbers within ``extremes``, decoded to ``out_dtype``."""
        out, wide = UnitRoundoff.of(out_dtype), self._wide
        low, high = self.representable()
        largest = torch.maximum(low.abs(), high.abs())
        inside = self._tables.diff(dim=-1).amax(-1) / 2 + largest * wide.relative + 2 * wide.least
        clipped = torch.maximum(low - extremes[0], extremes[1] - high)
        decoding = (wide.relative + out.relative) * largest + wide.least + out.least
        result = (torch.maximum(inside, clipped) + decoding) * (1 + 2.0**-22)
        lost = ~torch.isfinite((largest * (1 + 4 * wide.relative)).to(out_dtype))
        return torch.where(lost, math.inf, result)


def errors_of(
    scheme: Scheme, params: Params, *, shape: tuple[int, ...], dtype: torch.dtype
) -> BlockErrors | ChainedErrors | TableErrors:
    """Return the error bounds of a tensor from its stored parameters."""
    if scheme.element.per_scale > 1:
        return TableErrors(scheme, params, shape=shape, dtype=dtype)
    kind = BlockErrors if scheme.chained is None else ChainedErrors
    return kind(scheme, params, shape=shape, dtype=dtype)
