"""Tables of codes that kernels read."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from ..formats import CodebookFormat, IntFormat
from ..formats.codes import decode
from ..schemes import Scheme
from .lowering import THRESHOLDS


@functools.lru_cache(maxsize=256)
def code_order(scheme: Scheme) -> Any:
    """Return the code of each rank of a codebook, or the identity."""
    order = np.arange(THRESHOLDS + 1, dtype=np.uint8)
    if isinstance(scheme.element, CodebookFormat):
        order[: len(scheme.element.order)] = scheme.element.order
    return order


@functools.lru_cache(maxsize=256)
def value_table(scheme: Scheme) -> Any:
    """Return all codes' values as 256 float32, integers in steps."""
    table = np.zeros(256, np.float32)
    fmt = scheme.element
    count = 1 << fmt.bits
    codes = np.arange(count, dtype=np.int32)
    if isinstance(fmt, IntFormat):
        table[:count] = codes - (codes >> (fmt.bits - 1) << fmt.bits) if fmt.signed else codes
    else:
        table[:count] = decode(torch.from_numpy(codes), fmt, torch.float32).numpy()
    return table
