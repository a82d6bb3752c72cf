"""Kernels on int8 codes whose blocks are whole rows, or several: quantize and dequantize.

    code  = clamp(round(x / scale), low, high)        value = code * scale

Quotients are IEEE's (``div_rn``), rounding is half to even, and nothing is contracted: kernels are launched
with ``enable_fp_fusion=False``. Element ``i`` lies in row ``i // cols``, whose scale is number
``row // row_div % row_mod``; offsets are of 64 bits, so that tensors may have more than 2**31 elements.

A bfloat16 tensor is passed as its int16 bits and converted here: Triton's interpreter (3.7) cuts float32 off
instead of rounding it.
"""

from typing import Any

import triton
import triton.language as tl

BLOCK = 1024
"""Elements of a program."""
# Added and taken away, 1.5 * 2**23 leaves of a float32 below 2**22 the nearest integer, ties to even.
_WHOLE = tl.constexpr(12582912.0)


@triton.jit
def _float32(value: Any) -> Any:
    """Return float32 from float32, float16, or the bits of bfloat16."""
    if value.dtype == tl.int16:
        return (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:  # noqa: RET505 (Triton compiles one of the two)
        return value.to(tl.float32)


@triton.jit
def _rounded(value: Any, like: tl.constexpr) -> Any:
    """Return float32 rounded half to even to ``like``: float32, float16, or int16 for bits of bfloat16."""
    if like == tl.int16:
        bits = value.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(value != value, 0x7FC0, nearest).to(tl.int16)
    else:  # noqa: RET505
        return value.to(like)


@triton.jit
def quantize_rows(
    x: Any, scales: Any, codes: Any, bad: Any, count: Any, cols: Any, row_div: Any, row_mod: Any, low: Any,
    high: Any, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the codes of ``x``, and 1 to ``bad`` where a value is not finite.

    x: (count,) float32, float16, or int16 bits of bfloat16. scales: (row_mod,) float32. codes: (count,) int8.
    bad: (1,) int32.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = _float32(tl.load(x + at, mask=inside, other=0))
    scale = tl.load(scales + at // cols // row_div % row_mod, mask=inside, other=1.0)
    # A block whose scale was lost, 0 or Inf, holds zeros.
    lost = (scale == 0.0) | (scale == float("inf"))
    ratio = tl.where(lost, 0.0, tl.div_rn(value, tl.where(lost, 1.0, scale)))
    clamped = tl.minimum(tl.maximum(ratio, low), high)
    steps = (clamped + _WHOLE) - _WHOLE
    tl.store(codes + at, steps.to(tl.int8), mask=inside)
    finite = tl.abs(value) < float("inf")
    tl.store(bad + at * 0, 1, mask=inside & (finite == 0))


@triton.jit
def dequantize_rows(
    codes: Any, scales: Any, out: Any, count: Any, cols: Any, row_div: Any, row_mod: Any, BLOCK: tl.constexpr
) -> None:
    """Write the values of codes: (count,) float32, float16, or int16 bits of bfloat16."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    code = tl.load(codes + at, mask=inside, other=0).to(tl.float32)
    scale = tl.load(scales + at // cols // row_div % row_mod, mask=inside, other=1.0)
    tl.store(out + at, _rounded(code * scale, out.dtype.element_ty), mask=inside)
