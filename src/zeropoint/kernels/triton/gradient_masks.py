"""The gradient of fake quantization: passed where a value, rounded, lies within the codes.

Gradients are moved as the bits they are, so that NaN keeps its own: see :class:`.backward_launch.Backward`
for what the kernel takes.
"""

import triton
import triton.language as tl

from ...ops.lowering import Kind, Narrow, ScaleBy, ZeroPlace
from .element_codes import float32, stored

_INTEGER = tl.constexpr(int(Kind.INTEGER))
_BFLOAT16, _FLOAT16 = tl.constexpr(int(Narrow.BFLOAT16)), tl.constexpr(int(Narrow.FLOAT16))
_AFTER, _INSIDE = tl.constexpr(int(ZeroPlace.AFTER)), tl.constexpr(int(ZeroPlace.INSIDE))
_RECIPROCAL = tl.constexpr(int(ScaleBy.RECIPROCAL))
# 1.5 * 2**23: added to a float32 below 2**22 and subtracted again, it leaves the nearest integer.
_WHOLE = tl.constexpr(12582912.0)


@triton.jit
def _narrowed(ratio, k: tl.constexpr):
    """Return float32 rounded to the dtype in which the scheme computes quotients, and widened again."""
    if k.element.quotient == _BFLOAT16:
        return float32(stored(ratio, tl.int16))
    elif k.element.quotient == _FLOAT16:  # noqa: RET505 (Triton compiles one of them)
        return float32(stored(ratio, tl.float16))
    else:
        return ratio


@triton.jit
def _within(ratio, zero, low, high, k: tl.constexpr):
    """Return where quotients, (many, size), round to a code without being clipped; NaN does not."""
    if k.element.kind == _INTEGER:
        first, last = zero * 0 + low, zero * 0 + high
        if k.element.zero_place == _AFTER:
            first, last = first - zero, last - zero
        elif k.element.zero_place == _INSIDE:
            ratio = _narrowed(ratio + zero, k)
        # Past a code more than the ends nothing changes, and below 2**22 the sum rounds to an integer.
        near = tl.minimum(tl.maximum(ratio, first - 1.0), last + 1.0)
        near = (near + _WHOLE) - _WHOLE
        return (near >= first) & (near <= last) & (ratio == ratio)
    else:  # noqa: RET505
        return (ratio >= low) & (ratio <= high)


@triton.jit
def pass_within(
    x, grad, factors, zeros, out, cut, low, high, exact: tl.constexpr, k: tl.constexpr
):  # fmt: skip
    """Write the gradients of values that are not clipped, and zeros of the others' signs.

    grad, out: integers of the gradients' bits. factors: what values are divided by, Inf where a scale was
    lost. low, high: the smallest and the largest integer, or quotient that is not clipped. exact: whether
    reciprocals of factors are. The other arguments are those of :mod:`.segments`.
    """
    t = tl.program_id(0).to(tl.int64) * k.many + tl.arange(0, k.many)
    there, inside = t < cut.segments, tl.arange(0, k.size)[None, :]
    row = t // cut.per_row
    first = (t - row * cut.per_row) * cut.length
    if k.flat:
        at, mask = t[:, None] * k.size + inside, there[:, None]
    else:
        at = (row * cut.cols + first)[:, None] + inside
        mask = there[:, None] & (inside < tl.minimum(cut.cols - first, cut.length)[:, None])
    block = row // cut.row_div % cut.row_mod * cut.row_blocks + first // cut.block
    if k.own:
        block = t
    factor = tl.load(factors + block, mask=there, other=1.0)[:, None]
    zero = tl.zeros_like(factor)
    if k.element.zero_place:
        zero = tl.load(zeros + block, mask=there, other=0.0)[:, None]
    value = float32(tl.load(x + at, mask=mask, other=0))
    gradient = tl.load(grad + at, mask=mask, other=0)
    if exact or k.element.scaling == _RECIPROCAL:
        ratio = value * tl.div_rn(1.0, factor)
    else:
        ratio = tl.div_rn(value, factor)
    kept = _within(_narrowed(ratio, k), zero, low, high, k)
    sign: tl.constexpr = -(1 << (gradient.dtype.primitive_bitwidth - 1))
    tl.store(out + at, tl.where(kept, gradient, gradient & sign), mask=mask)
