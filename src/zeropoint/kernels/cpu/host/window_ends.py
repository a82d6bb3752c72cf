"""Scale candidates of the search kernels, and schemes they lack."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ....formats import FloatFormat, RoundingMode
from ....formats.torch_dtypes import format_of
from ....ops.integer_fits import FITS, fits_codes, fits_of
from ....ops.lowering import How, Kind, Narrow, Rounded, element_of, rule_of
from ....ops.window_search import reach_of
from ....params.ladder import Ladder
from ....params.scale_windows import window_of
from ....schemes import Scheme
from ..least_error.integer_scales import MOST_RATIOS, Fitting, fitted_rows
from ..least_error.windows import MOST, Candidates, searched_rows
from ..machine.named_records import pack
from .views import View

_UNIT = 16
"""Blocks are whole multiples of so many values."""
_E8M0_LAST = 254
_FEW_BITS, _SHORT, _APART, _LONG, _FAR_APART = 5, 32, 4, 64, 8
"""Of how many bits, and of blocks of which lengths, scales are tried first that lie how far apart: measured.
More bits leave errors too small to tell scales apart, and lists of scales take longer than short blocks."""


def window_search(scheme: Scheme, view: View, dtype: torch.dtype) -> tuple[Any, ...] | None:
    """Kernel that searches scales, and what it tries; None: torch searches."""
    windows, fits = _candidates(scheme, view, dtype), _fitting(scheme, view, dtype)
    if windows is not None:
        return searched_rows, pack(windows)
    return None if fits is None else (fitted_rows, pack(fits), fits.ratios)


def _candidates(scheme: Scheme, view: View, dtype: torch.dtype) -> Candidates | None:
    """Window of scales that can be best; None: plain torch searches."""
    search, layout = scheme.search, view.layout
    assert search is not None
    rule = rule_of(scheme, dtype)
    multiply = rule.how is How.POWER and isinstance(scheme.element, FloatFormat)
    element, block = element_of(scheme, dtype, multiply=multiply), layout.block
    whole = in_whole_blocks(view)
    known = element.kind is not Kind.CODEBOOK and element.quotient is Narrow.NONE and not rule.unsigned
    known = known and element.rounding is Rounded.HALF_EVEN
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
    return Candidates(
        halving=window.halving,
        empty=window.empty,
        doubling=window.doubling,
        most=window.most,
        last=last,
        doubled=doubled,
        normal=normal,
    )


def _fitting(scheme: Scheme, view: View, dtype: torch.dtype) -> Fitting | None:
    """Scales that the kernel fits to codes; None: torch searches."""
    search, rule = scheme.search, rule_of(scheme, dtype)
    assert search is not None
    plain = rule.how is How.LINEAR and not rule.unsigned and fits_codes(scheme)
    plain = plain and scheme.rounding.mode is RoundingMode.HALF_EVEN
    if search.factor or search.power != 2 or not (plain and in_whole_blocks(view)):
        return None
    tried = tried_fits(scheme, view.layout.block, dtype)
    assert tried.ratios.size <= MOST_RATIOS, "the kernel has room for fewer scales"
    return tried


def tried_fits(scheme: Scheme, block: int, dtype: torch.dtype) -> Fitting:
    """Scales that are fitted to codes of blocks of so many values."""
    fits, ladder = fits_of(scheme, block), Ladder.of(scheme.scales[0], dtype)
    reach = reach_of(window_of(scheme, block, 2.0))
    return Fitting(
        places=fits.places,
        first=fits.first,
        least=fits.least,
        reach=reach,
        smallest=ladder.least,
        largest=ladder.most,
        fits=FITS,
        apart=_apart(scheme.element.bits, block),
        ratios=np.array(fits.ratios, np.float32),
    )


def _apart(bits: int, block: int) -> int:
    """Distance between scales tried first, a power of two."""
    if bits > _FEW_BITS or block < _SHORT:
        return 1
    return _APART if block < _LONG else _FAR_APART


def in_whole_blocks(view: View) -> bool:
    """Whether rows are whole blocks of lengths the searches know."""
    block, cols = view.layout.block, view.layout.cols
    return block % _UNIT == 0 and block <= int(MOST) and cols % block == 0
