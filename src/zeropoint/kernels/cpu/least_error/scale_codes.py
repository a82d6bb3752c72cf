"""Scale codes of super-blocks, one by one; arrays are float32 and int32."""

from typing import Any

import numpy as np

from ..machine.intrinsics import device
from .lanes import LEAST, nearest

_TENTH = np.float32(0.1)
_PASSES = 5


@device
def by_largest(numbers: Any, begin: Any, count: Any, top: Any, codes: Any) -> Any:
    """Write codes whose largest number has ``top``; return the scale."""
    high = np.float32(0)
    for i in range(count):
        high = max(high, numbers[begin + i])
    inverse = np.float32(top / high) if high > 0 else np.float32(0)
    for i in range(count):
        codes[i] = min(nearest(np.float32(inverse * numbers[begin + i])), np.int32(top))
    return np.float32(high / top)


@device
def _error(numbers: Any, begin: Any, weights: Any, count: Any, inverse: Any, top: Any) -> Any:
    """Weighted squared error of codes; top: largest, or -1 for bytes."""
    scale, total = np.float32(np.float32(1) / inverse), np.float32(0)
    for i in range(count):
        code = nearest(np.float32(inverse * numbers[begin + i]))
        code = code & np.int32(0xFF) if top < 0 else min(code, top)
        off = np.float32(numbers[begin + i] - np.float32(scale * np.float32(code)))
        total = np.float32(total + np.float32(np.float32(weights[begin + i] * off) * off))
    return total


@device
def search_positive(numbers: Any, begin: Any, weights: Any, count: Any, top: Any, codes: Any) -> Any:
    """Write codes of non-negative numbers; return the scale. See ``positive_scale``."""
    high = np.float32(0)
    for i in range(count):
        high = max(high, numbers[begin + i])
        codes[i] = np.int32(0)
    if high < LEAST:
        return np.float32(0)
    most = np.int32(top)
    inverse = np.float32(top / high)
    best = _error(numbers, begin, weights, count, inverse, np.int32(-1))
    for n in range(8):
        step = np.float32(n - 4 if n < 4 else n - 3)
        near = np.float32(np.float32(np.float32(_TENTH * step) + top) / high)
        error = _error(numbers, begin, weights, count, near, most)
        if error < best:
            best, inverse = error, near
    products, squares = np.float32(0), np.float32(0)
    for i in range(count):
        number, weight = numbers[begin + i], weights[begin + i]
        code = min(nearest(np.float32(inverse * number)), most)
        codes[i] = code & np.int32(0xFF)
        value = np.float32(code)
        products = np.float32(products + np.float32(np.float32(weight * number) * value))
        squares = np.float32(squares + np.float32(np.float32(weight * value) * value))
    for _ in range(_PASSES):
        moved = False
        for i in range(count):
            number, weight, value = numbers[begin + i], weights[begin + i], np.float32(codes[i])
            left = np.float32(products - np.float32(np.float32(weight * number) * value))
            rest = np.float32(squares - np.float32(np.float32(weight * value) * value))
            if left > 0 and rest > 0:
                code = min(nearest(np.float32(np.float32(number * rest) / left)), most)
                if code != codes[i]:
                    value = np.float32(code)
                    left = np.float32(left + np.float32(np.float32(weight * number) * value))
                    rest = np.float32(rest + np.float32(np.float32(weight * value) * value))
                    gain = np.float32(np.float32(left * left) * squares)
                    if gain > np.float32(np.float32(products * products) * rest):
                        codes[i], products, squares, moved = code & np.int32(0xFF), left, rest, True
        if not moved:
            break
    return np.float32(products / squares) if squares > 0 else np.float32(0)


@device
def by_signed_largest(numbers: Any, count: Any, end: Any, least: Any, codes: Any) -> Any:
    """Write codes whose largest magnitude has ``end``; return the scale.

    Codes are int8, at most 127. Where all numbers are below ``least``, they and the scale are 0.
    """
    amax, value = np.float32(0), np.float32(0)
    for i in range(count):
        codes[i] = np.int32(0)
        if abs(numbers[i]) > amax:
            amax, value = abs(numbers[i]), numbers[i]
    if amax < least or value == 0:
        return np.float32(0)
    inverse = np.float32(end / value)
    for i in range(count):
        codes[i] = np.int32(np.int8(min(nearest(np.float32(inverse * numbers[i])), np.int32(127))))
    return np.float32(np.float32(1) / inverse)
