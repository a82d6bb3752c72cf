"""Which scales the kernel that searches them tries, and which schemes it does not know."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ....formats import FloatFormat
from ....formats.torch_dtypes import format_of
from ....ops.integer_fits import FITS, fits_codes, fits_of
from ....ops.lowering import How, Kind, Narrow, element_of, rule_of
from ....ops.window_search import reach_of
from ....params.ladder import Ladder
from ....params.scale_windows import window_of
from ....schemes import Scheme
from ..search.integer_scales import MOST_RATIOS
from ..search.windows import MOST
from .views import View

_UNIT = 16
"""Blocks are whole multiples of so many values."""
_E8M0_LAST = 254
_FEW_BITS, _SHORT, _APART, _LONG, _FAR_APART = 5, 32, 4, 64, 8
"""Of how many bits, and of blocks of which lengths, scales are tried first that lie how far apart: measured.
More bits leave errors too small to tell scales apart, and lists of scales take longer than short blocks."""


def candidates(scheme: Scheme, view: View, dtype: torch.dtype) -> tuple[Any, Any] | None:
    """Return what the kernel knows of scales that can be best, or None where plain torch searches.

    It is (4,) float32 and (3,) uint32, as :class:`..search.windows.Candidates` has them.
    """
    search, layout = scheme.search, view.layout
    assert search is not None
    rule = rule_of(scheme, dtype)
    element = element_of(scheme, dtype, multiply=_multiplies(scheme, dtype))
    block = int(layout.block)
    whole = in_whole_blocks(view)
    known = element.kind is not Kind.CODEBOOK and element.quotient is Narrow.NONE and not rule.unsigned
    stored = rule.how is (How.POWER if len(scheme.scales) == 1 else How.MINIFLOAT)
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


def fitting(scheme: Scheme, view: View, dtype: torch.dtype) -> tuple[Any, Any, Any] | None:
    """Return what the kernel that fits scales to codes tries, or None where plain torch searches.

    It is float32, (5,) float64 and (3,) uint64, as :class:`..search.integer_scales.Fitting` has them.
    """
    search, rule = scheme.search, rule_of(scheme, dtype)
    assert search is not None
    plain = rule.how is How.LINEAR and not rule.unsigned and fits_codes(scheme)
    if search.factor or search.power != 2 or not (plain and in_whole_blocks(view)):
        return None
    tried = tried_fits(scheme, int(view.layout.block), dtype)
    assert tried[0].size <= MOST_RATIOS, "the kernel has room for fewer scales"
    return tried


def tried_fits(scheme: Scheme, block: int, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """Return what is tried for blocks of so many values; see :func:`fitting`."""
    fits, ladder = fits_of(scheme, block), Ladder.of(scheme.scales[0], dtype)
    reach = reach_of(window_of(scheme, block, 2.0))
    numbers = fits.first, fits.least, reach, ladder.least, ladder.most
    counts = fits.places, FITS, _apart(scheme.element.bits, block)
    return np.array(fits.ratios, np.float32), np.array(numbers, np.float64), np.array(counts, np.uint64)


def _apart(bits: int, block: int) -> int:
    """Return how far apart scales are that are tried first, a power of two."""
    if bits > _FEW_BITS or block < _SHORT:
        return 1
    return _APART if block < _LONG else _FAR_APART


def in_whole_blocks(view: View) -> bool:
    """Return whether rows are whole blocks of lengths that kernels which search know."""
    block, cols = int(view.layout.block), int(view.layout.cols)
    return block % _UNIT == 0 and block <= int(MOST) and cols % block == 0


def _multiplies(scheme: Scheme, dtype: torch.dtype) -> bool:
    return rule_of(scheme, dtype).how is How.POWER and isinstance(scheme.element, FloatFormat)
