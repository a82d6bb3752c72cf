"""Scale tables of blocks, one number per code, for elements like ``table4``.

    value[i] = table[b(i)][code[i]],    code[i] = the first j of which x[i] <= (table[j] + table[j + 1]) / 2

A boundary is rounded to the wide dtype, and a number on it goes down, as with codebooks. Unless a method
chooses them, tables go from the smallest to the largest number of their block in equal steps, the ends
rounded away from each other, so that nothing is clipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import RangeError
from ..formats import Format
from ..formats.torch_dtypes import format_of
from ..schemes import Scheme
from .stored import load_scale, round_to, store
from .tensors import Params, parameter_grids

if TYPE_CHECKING:
    from .arithmetic import Ranges


def tables_of(
    scheme: Scheme, params: Params, *, shape: tuple[int, ...], own_dtype: torch.dtype, dtype: torch.dtype
) -> torch.Tensor:
    """Return a tensor's tables, (*grid, numbers) in ``dtype``."""
    values = load_scale(params[0], _format(scheme, own_dtype), dtype)
    return values.reshape(parameter_grids(scheme, shape)[0])


def boundaries(tables: torch.Tensor) -> torch.Tensor:
    """Return rounded midpoints of neighboring numbers, (..., numbers - 1)."""
    halves = tables.double() / 2
    return (halves[..., 1:] + halves[..., :-1]).to(tables.dtype)


def even_tables(scheme: Scheme, ranges: Ranges) -> torch.Tensor:
    """Return stored tables of equal steps over each block's range.

    Raises RangeError for numbers past the largest of their format.
    """
    fmt = _format(scheme, ranges.dtype)
    low, high = ranges.minimum[0] + 0.0, ranges.maximum[0] + 0.0
    _require_held(scheme, torch.maximum(-low, high), fmt)
    ends = -round_to(-low, fmt, up=True), round_to(high, fmt, up=True)
    first, last = low.double()[..., None], high.double()[..., None]
    # Over 256, so that no product overflows.
    part = torch.arange(scheme.element.per_scale, dtype=torch.float64, device=low.device) / 256
    steps = (first * (part[-1] - part) + last * part) / part[-1]
    inner = round_to(torch.minimum(torch.maximum(steps, first), last).to(low.dtype), fmt, up=False)
    # Products of float64 may fall out of order by a rounding.
    values = torch.cat((ends[0][..., None], inner[..., 1:-1], ends[1][..., None]), -1).sort(-1).values
    return store(values + 0.0, fmt)


def stored_tables(scheme: Scheme, tables: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float64 tables as stored, each number rounded to nearest.

    Raises RangeError for numbers past the largest of their format.
    """
    fmt = _format(scheme, dtype)
    _require_held(scheme, tables.abs().amax(-1), fmt)
    return store(round_to(tables + 0.0, fmt, up=False), fmt)


def _format(scheme: Scheme, dtype: torch.dtype) -> Format:
    return scheme.scales[0].format_for(format_of(dtype))


def _require_held(scheme: Scheme, largest: torch.Tensor, fmt: Format) -> None:
    past = largest.double() > float(fmt.max)
    if bool(past.any()):
        where = tuple(torch.nonzero(past)[0].tolist())
        raise RangeError(
            f"table of block {where} (up to {float(largest[where]):g}) does not fit {scheme.scales[0]}; "
            "use scale=float32"
        )
