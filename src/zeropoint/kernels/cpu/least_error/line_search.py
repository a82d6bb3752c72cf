"""The searches of :mod:`zeropoint.ops.ggml.searches` on 16 blocks at once.

Arrays are float32: number i of block b at ``16 * i + b``. Gain over one block after the other: a sum over a
block has one order, which a vector along the block would not keep.
"""

from typing import Any, NamedTuple

import numpy as np

from ....ops.lowering import Flag, Float32, UInt64
from ..machine.intrinsics import device
from ..machine.vector import above, floats_of, larger, load_lanes, smaller, store_lanes, words_of
from .lanes import LANES, LEAST, divided, magnitudes, negative, rounded, rounded_within, where
from .super_block import ZERO

_TENTH, ONE = np.float32(0.1), np.float32(1)


class Tries(NamedTuple):
    """The inverse scales that are tried; see :class:`zeropoint.ops.ggml.searches.Line`."""

    top: Float32
    first: Float32
    step: Float32
    steps: UInt64
    magnitudes: Flag


@device
def fit_minima(x: Any, w: Any, size: Any, line: Tries, tried: Any, found: Any) -> None:
    """Find scales and minima of ``size`` numbers a block.

    tried: room for codes. found: (64,) takes for each block the scale, the minimum negated, and the inverse
    scale and minimum of its codes.
    """
    zero, none, top = floats_of(np.float32(0)), words_of(np.uint32(0)), words_of(np.uint32(line.top))
    low = high = load_lanes(x, ZERO)
    sum_w = load_lanes(w, ZERO)
    sum_x = sum_w * low
    for i in range(np.uint64(1), size):
        value, weight = load_lanes(x, i * LANES), load_lanes(w, i * LANES)
        low, high = smaller(value, low), larger(value, high)
        sum_w, sum_x = sum_w + weight, sum_x + weight * value
    low = where(above(low, zero), zero, low)
    start, ranged = low, above(high, low)
    inverse = divided(np.float32(line.top), high - low)
    scale = divided(ONE, inverse)
    best = zero
    for i in range(size):
        value, weight = load_lanes(x, i * LANES), load_lanes(w, i * LANES)
        off = scale * rounded(inverse * (value - low), none, top) + low - value
        best = best + weight * (magnitudes(off) if line.magnitudes else off * off)
    code_inverse, code_low = inverse, low
    for n in range(line.steps + np.uint64(1)):
        number = np.float32(np.float32(line.first + np.float32(line.step * np.float32(n))) + line.top)
        inverse = divided(number, high - low)
        sum_l, sum_l2, sum_xl = zero, zero, zero
        for i in range(size):
            value, weight = load_lanes(x, i * LANES), load_lanes(w, i * LANES)
            code = rounded(inverse * (value - low), none, top)
            store_lanes(tried, i * LANES, code)
            weighted = weight * code
            sum_l, sum_l2, sum_xl = sum_l + weighted, sum_l2 + weighted * code, sum_xl + weighted * value
        det = sum_w * sum_l2 - sum_l * sum_l
        near = (sum_w * sum_xl - sum_x * sum_l) / det
        minimum = (sum_l2 * sum_x - sum_l * sum_xl) / det
        positive = above(minimum, zero)
        near, minimum = where(positive, sum_xl / sum_l2, near), where(positive, zero, minimum)
        error = zero
        for i in range(size):
            value, weight = load_lanes(x, i * LANES), load_lanes(w, i * LANES)
            off = near * load_lanes(tried, i * LANES) + minimum - value
            error = error + weight * (magnitudes(off) if line.magnitudes else off * off)
        better = above(det, zero) & above(best, error)
        code_inverse, code_low = where(better, inverse, code_inverse), where(better, low, code_low)
        best, scale, low = where(better, error, best), where(better, near, scale), where(better, minimum, low)
    store_lanes(found, ZERO, where(ranged, scale, zero))
    store_lanes(found, LANES, negative(where(ranged, low, start)))
    store_lanes(found, LANES + LANES, where(ranged, code_inverse, zero))
    store_lanes(found, LANES + LANES + LANES, code_low)


@device
def fit_signed(x: Any, w: Any, size: Any, top: Any, found: Any) -> None:
    """Find scales of codes from ``-top`` to ``top - 1``.

    found: (32,) takes the scale and the inverse scale of the codes, zero for blocks of zeros.
    """
    zero, least, most = (
        floats_of(np.float32(0)),
        floats_of(np.float32(-top)),
        floats_of(np.float32(top - ONE)),
    )
    value, amax = zero, zero
    for i in range(size):
        number = load_lanes(x, i * LANES)
        beyond = above(magnitudes(number), amax)
        value, amax = where(beyond, number, value), where(beyond, magnitudes(number), amax)
    code_inverse = zero
    scale, best = zero, zero
    for n in range(19):
        # The first try, with n = 0, is the scale of the largest magnitude itself.
        offset = np.float32(n - 10 if n < 10 else n - 9)
        near = top if n == 0 else np.float32(top + np.float32(_TENTH * offset))
        inverse = divided(np.float32(-near), value)
        products, squares = zero, zero
        for i in range(size):
            number, weight = load_lanes(x, i * LANES), load_lanes(w, i * LANES)
            code = rounded_within(inverse * number, least, most)
            products, squares = products + weight * number * code, squares + weight * code * code
        ratio = products / squares
        if n == 0:
            scale = where(above(squares, zero), ratio, zero)
            best, code_inverse = scale * products, inverse
        else:
            better = above(squares, zero) & above(products * products, best * squares)
            scale, code_inverse = where(better, ratio, scale), where(better, inverse, code_inverse)
            best = where(better, scale * products, best)
    empty = above(floats_of(LEAST), amax)
    store_lanes(found, ZERO, where(empty, zero, scale))
    store_lanes(found, LANES, where(empty, zero, code_inverse))
