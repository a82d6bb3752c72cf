"""Numbers in their stored format: rounding, storing, loading."""

from __future__ import annotations

import math

import torch

from ..formats import Format, RoundingMode
from ..formats.codes import decode, encode
from ..formats.torch_dtypes import dtype_of, storage_dtype

LEAST_NORMAL = torch.finfo(torch.float32).tiny
IEEE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes to which torch itself rounds to nearest."""


def store(values: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return representable values in the storage dtype of ``fmt``."""
    dtype = storage_dtype(fmt)
    if dtype in IEEE:
        return values.to(dtype)
    return encode(values, fmt, RoundingMode.HALF_EVEN).to(torch.uint8).view(dtype)


def load_scale(stored: torch.Tensor, fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of stored scales in ``dtype``; the inverse of :func:`store`."""
    if stored.dtype in IEEE:
        return stored.to(dtype)
    return decode(stored.view(torch.uint8), fmt, dtype)


def round_to(values: torch.Tensor, fmt: Format, *, up: bool) -> torch.Tensor:
    """Round to ``fmt`` within the wide dtype, saturating; ``up``: positive numbers upward."""
    native = dtype_of(fmt)
    if native in IEEE and not up:
        return values.to(native).to(values.dtype)
    mode = RoundingMode.CEIL if up else RoundingMode.HALF_EVEN
    return decode(encode(values, fmt, mode), fmt, values.dtype)


def through(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Round ``x`` to ``dtype`` and widen it again."""
    return x if dtype is None else x.to(dtype).to(x.dtype)


def smallest(fmt: Format) -> float:
    """Return the smallest positive value of ``fmt``."""
    return float(fmt.smallest)


def top(fmt: Format, *, up: bool) -> float:
    """Return the largest number that rounds into ``fmt``."""
    if up:
        return float(fmt.max)
    # torch's own casts yield Inf past that point.
    return math.inf if dtype_of(fmt) in IEEE else float(fmt.ceiling)
