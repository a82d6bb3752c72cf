"""Matrix products with rounded factors, where models run on data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def narrow_products() -> Iterator[None]:
    """Round factors of float32 products to bfloat16, where the processor can.

    Sums are float32. Releases of torch before 2.9 have no such setting, and multiply in float32.
    """
    matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)
    if matmul is None:
        yield
        return
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
