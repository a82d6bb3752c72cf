"""Requests that special kernels take, recognized before these are imported.

Values of codes that are looked up, codes of digits, chained levels, and blocks of llama.cpp's types that need
no search.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from ....formats import DigitsFormat, Format, get_format
from ....ops.ggml import block_types
from ....ops.registry import Op, Request
from ....params import arithmetic
from ....schemes import ScaleLevel, Scheme, ZeroPoint
from ....schemes.dialects import ZEROPOINT
from ..machine.descriptor import LONGEST_CODE
from .views import KINDS

_BYTE = 8
_DIGITS = (3, 5)
"""Base and digits of codes that kernels know."""
_ROUNDED = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
"""Types of llama.cpp whose scales follow from extremes."""


def is_looked_up(request: Request) -> bool:
    """Whether values or codes are looked up, or single digits quantized."""
    scheme, shape, element = request.scheme, request.shape, request.scheme.element
    if request.dtype not in KINDS or request.own_dtype not in KINDS or not shape or 0 in shape:
        return False
    *lead, _ = scheme.granularity.block_shape(shape)
    if set(lead) - {1} or scheme.bits > _BYTE:
        return False
    if request.op is Op.DEQUANTIZE:
        looked_up = element.per_code > 1 or element.per_scale > 1 or element.reads_sign
        return looked_up and element.per_code <= LONGEST_CODE and not scheme.offsets
    if element.per_scale > 1:
        return request.op in (Op.QUANTIZE, Op.QUANTIZE_DYNAMIC) and _ends_on_bytes(scheme, shape)
    return digits_request(request) is not None


def digits_request(request: Request) -> Request | None:
    """Request for single digits of codes, or None without digits.

    A search compares whole codes.
    """
    scheme = request.scheme
    if not isinstance(scheme.element, DigitsFormat) or scheme.search is not None:
        return None
    if request.op is not Op.QUANTIZE_DYNAMIC:
        return None
    narrow = scheme.bits == _BYTE and scheme.element.digit.bits < _BYTE
    asked = replace(request, scheme=digits_of(scheme))
    return asked if narrow and _ends_on_bytes(asked.scheme, request.shape) else None


def _ends_on_bytes(scheme: Scheme, shape: tuple[int, ...]) -> bool:
    """Whether blocks of codes end on bytes, and are written separately."""
    block = scheme.row_block(shape)
    return block * scheme.bits % _BYTE == 0 or block >= shape[-1]


@functools.lru_cache(maxsize=64)
def digits_of(scheme: Scheme) -> Scheme:
    """Return the scheme of the digits of codes, each by itself."""
    element = scheme.element
    assert isinstance(element, DigitsFormat)
    return replace(scheme, element=element.digit)


def has_five_digits(element: Format) -> bool:
    """Whether codes are five base-3 digits."""
    return isinstance(element, DigitsFormat) and (element.base, element.count) == _DIGITS


@functools.lru_cache(maxsize=256)
def single_level(scheme: Scheme) -> Scheme | None:
    """Scheme of the same codes under one float32 level, or None."""
    element = scheme.element
    if scheme.chained is None or element.reads_sign or scheme.zero_point is ZeroPoint.REAL:
        return None
    level = ScaleLevel(granularity=scheme.granularity, format=get_format("float32"))
    # Scales of zero are Inf to the kernel of codes, whatever the dialect has them be.
    small = ZEROPOINT.small_scales
    dialect = replace(scheme.dialect, small_scales=small)
    single = replace(scheme, scales=(level,), offsets=(), center=None, dialect=dialect)
    return single if arithmetic.multiplies(single) == arithmetic.multiplies(scheme) else None


def codes_request(request: Request) -> Request | None:
    """Request for codes alone under one level, or None."""
    single = single_level(request.scheme)
    if single is None or request.op is not Op.QUANTIZE_DYNAMIC or 0 in request.shape:
        return None  # without blocks there is nothing for a kernel to do
    wide = torch.float32
    return replace(request, op=Op.QUANTIZE, scheme=single, dtype=wide, own_dtype=wide)


@functools.lru_cache(maxsize=256)
def _is_rounded(scheme: Scheme) -> bool:
    name = block_types.type_of(scheme)
    return name in _ROUNDED and scheme == Scheme.parse(name)


def rounds_blocks(request: Request) -> bool:
    """Whether the kernels round the blocks of a request, without a search."""
    return (
        request.op is Op.QUANTIZE_DYNAMIC
        and request.dtype in KINDS
        and request.own_dtype in KINDS
        and _is_rounded(request.scheme)
        and block_types.refusal(request.scheme, request.shape) is None
    )
