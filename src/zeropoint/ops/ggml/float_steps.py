"""Steps of ggml's float32 arithmetic without a torch operator, on columns."""

from __future__ import annotations

import numpy as np
import torch

from ...formats.division import over

LEAST = 1e-15
"""Blocks whose largest magnitude is below this are zeros to llama.cpp (GROUP_MAX_EPS)."""
_MAGIC = 12582912.0
_NO_INTEGER = -(1 << 31)


def single(value: float) -> float:
    """Return a number rounded to float32, like C's suffix f."""
    return float(np.float32(value))


def stepped(base: float, step: float, count: int) -> float:
    """Return ``base + step * count`` with each operation rounded to float32."""
    return float(np.float32(base) + np.float32(step) * np.float32(count))


def total(terms: torch.Tensor, start: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sum of rows, added to ``start`` one by one."""
    result = torch.zeros_like(terms[0]) if start is None else start
    for row in terms:
        result = result + row
    return result


def nearest(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` rounded half to even, int32, by the magic sum.

    Adding 1.5 * 2**23 leaves the integer in the low 23 bits of the sum: exact up to 2**22, and past it
    whatever the bits give, as in ggml.
    """
    return ((x + _MAGIC).view(torch.int32) & 0x7FFFFF) - 0x400000


def truncated(x: torch.Tensor) -> torch.Tensor:
    """Return the int64 integer part; overflow and NaN give -2**31 (x86-64)."""
    inside = x.abs() < -_NO_INTEGER  # false for NaN
    return torch.where(inside, x, float(_NO_INTEGER)).to(torch.int64)


def half_away(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` rounded half away from zero, as roundf does."""
    whole = x.trunc()
    return torch.where((x - whole).abs() >= 0.5, whole + x.sign(), whole)


def largest(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each column's largest magnitude, and the first value with it."""
    amax = torch.zeros_like(x[0])
    value = torch.zeros_like(x[0])
    for row in x:
        above = row.abs() > amax
        amax = torch.where(above, row.abs(), amax)
        value = torch.where(above, row, value)
    return amax, value


def root(x: torch.Tensor) -> torch.Tensor:
    """Return the correctly rounded float32 square root; torch's MKL one differs."""
    return x.double().sqrt().float()


def inverse(x: torch.Tensor) -> torch.Tensor:
    """Return ``1 / x``, or zero for zero."""
    return torch.where(x != 0, over(1.0, x), 0.0)


def extremes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each column's smallest and largest number, first of signed zeros."""
    low = high = x[0]
    for row in x[1:]:
        low, high = torch.where(row < low, row, low), torch.where(row > high, row, high)
    return low, high


def ratio(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a / b`` where ``b`` is positive, else zero."""
    return torch.where(b > 0, a / b, 0.0)
