"""Zero points: from the smallest number of each block and its scale.

zero_point = round(qmin - low / scale),    or another formula of :class:`.ZeroPointFormula`
"""

from __future__ import annotations

import torch

from ..errors import RangeError
from ..schemes import Scheme, ZeroPoint
from ..schemes.dialects import ZeroPointFormula
from .stored import through
from .tensors import zero_point_dtype


def zero_points(
    scheme: Scheme,
    low: torch.Tensor,
    scale: torch.Tensor,
    *,
    empty: torch.Tensor,
    narrow: torch.dtype | None = None,
) -> torch.Tensor:
    """Return each block's stored zero point; real ones keep ``low``'s dtype.

    low: the smallest number of the range. scale: with which elements are encoded. empty: where the range is a
    point. narrow: the dtype that intermediates are rounded to. Raises RangeError for a real one that is not
    finite.
    """
    unit = float(scheme.element_step)
    quotient = through(low / scale, narrow)
    formula = scheme.dialect.zero_points.formula
    if formula is ZeroPointFormula.OF_ROUNDED and scheme.zero_point is ZeroPoint.INTEGER:
        quotient = unit * torch.round(quotient / unit)
    offset = through(scheme.qmin * unit - quotient, narrow) / unit
    if not scheme.formula_zero_point:
        offset = torch.where(empty, float(max(scheme.qmin, 0)), offset)
    if scheme.zero_point is ZeroPoint.REAL:
        _require_finite(offset, low, scheme)
        return offset
    # In float64, which holds the ends of 32-bit codes.
    wide = offset.double()
    rounded = torch.trunc(wide) if formula is ZeroPointFormula.TRUNCATED else torch.round(wide)
    return rounded.clamp(scheme.qmin, scheme.qmax).to(zero_point_dtype(scheme))


def _require_finite(offset: torch.Tensor, low: torch.Tensor, scheme: Scheme) -> None:
    """Raise RangeError unless every real zero point is finite."""
    bad = ~torch.isfinite(offset)
    if bool(bad.any()):
        where = tuple(torch.nonzero(bad)[0].tolist())
        raise RangeError(
            f"zero point of block {where}, whose smallest number is {float(low[where])}, overflows the "
            f"arithmetic of {scheme}; use asym, whose range contains 0, or float32"
        )
