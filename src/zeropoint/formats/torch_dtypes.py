"""Formats and torch dtypes: mapping, and storage of codes and scales."""

from __future__ import annotations

import torch

from ..errors import DtypeError
from .catalog import get_format
from .spec import Format

_DTYPES: tuple[tuple[str, torch.dtype], ...] = (
    ("float64", torch.float64),
    ("float32", torch.float32),
    ("bfloat16", torch.bfloat16),
    ("float16", torch.float16),
    ("float8_e4m3fn", torch.float8_e4m3fn),
    ("float8_e5m2", torch.float8_e5m2),
    ("float8_e4m3fnuz", torch.float8_e4m3fnuz),
    ("float8_e5m2fnuz", torch.float8_e5m2fnuz),
    ("float8_e8m0fnu", torch.float8_e8m0fnu),
    ("int8", torch.int8),
    ("uint8", torch.uint8),
    ("int16", torch.int16),
    ("uint16", torch.uint16),
    ("int32", torch.int32),
    ("uint32", torch.uint32),
)
_FROM_DTYPE = {dtype: get_format(name) for name, dtype in _DTYPES}
# NVFP4 block scales are e4m3 without a sign, and every file and engine keeps them in the signed dtype.
_TO_DTYPE = {fmt: dtype for dtype, fmt in _FROM_DTYPE.items()} | {get_format("ue4m3"): torch.float8_e4m3fn}

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of tensors that can be quantized."""


def format_of(dtype: torch.dtype) -> Format:
    """Return the format of a dtype, or raise DtypeError."""
    if dtype not in _FROM_DTYPE:
        raise DtypeError(
            f"dtype {dtype} has no number format; use one of {', '.join(str(d) for d in _FROM_DTYPE)}"
        )
    return _FROM_DTYPE[dtype]


def dtype_of(fmt: Format) -> torch.dtype | None:
    """Return the torch dtype whose bytes are the format's codes, or None."""
    return _TO_DTYPE.get(fmt)


def storage_dtype(fmt: Format) -> torch.dtype:
    """Return the dtype that stores scales of a format."""
    return _TO_DTYPE.get(fmt, code_dtype(fmt.bits))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the compute dtype: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def code_dtype(bits: int) -> torch.dtype:
    """Return the dtype of unpacked code patterns of ``bits`` bits."""
    if bits <= 8:
        return torch.uint8
    return torch.int32 if bits <= 16 else torch.int64
