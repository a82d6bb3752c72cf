"""Which scales the kernel that searches them tries, and which schemes it does not know."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ....formats import FloatFormat
from ....formats.torch_dtypes import format_of
from ....ops.lowering import How, Kind, Narrow, element_of, rule_of
from ....params.scale_windows import window_of
from ....schemes import Scheme
from ..search.windows import MOST
from .views import View

_UNIT = 16
"""Blocks are whole multiples of so many values."""
_E8M0_LAST = 254


def candidates(scheme: Scheme, view: View, dtype: torch.dtype) -> tuple[Any, Any] | None:
    """Return what the kernel knows of scales that can be best, or None where plain torch searches.

    It is (4,) float32 and (3,) uint32, as :class:`..search.windows.Candidates` has them.
    """
    search, layout = scheme.search, view.layout
    assert search is not None
    rule = rule_of(scheme, dtype)
    element = element_of(scheme, dtype, multiply=_multiplies(scheme, dtype))
    block, cols = int(layout.block), int(layout.cols)
    whole = block % _UNIT == 0 and block <= int(MOST) and cols % block == 0
    known = element.kind is not Kind.CODEBOOK and element.quotient is Narrow.NONE and not rule.unsigned
    stored = rule.how in (How.POWER, How.MINIFLOAT)
    if search.factor or search.power != 2 or not (whole and known and stored):
        return None
    window = window_of(scheme, block, search.power)
    last, doubled, normal = _E8M0_LAST, _E8M0_LAST - 1, 1
    if rule.how is How.MINIFLOAT:
        fmt = scheme.scales[0].format_for(format_of(dtype))
        assert isinstance(fmt, FloatFormat)
        octave = 1 << fmt.mantissa_bits
        last, doubled, normal = fmt.max_code, fmt.max_code - octave, 2 * octave
    ratios = window.halving, window.empty, window.doubling, window.most
    return np.array(ratios, np.float32), np.array((last, doubled, normal), np.uint32)


def _multiplies(scheme: Scheme, dtype: torch.dtype) -> bool:
    return rule_of(scheme, dtype).how is How.POWER and isinstance(scheme.element, FloatFormat)
