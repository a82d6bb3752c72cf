"""torch's integer matrix product, where it is exact and fast.

``torch._int_mm`` goes through oneDNN where the processor multiplies bytes (VNNI), and through plain loops, 10
times slower than float32, where it does not. Products of oneDNN may move int8 to uint8 and add pairs in 16
bits where a machine has nothing better, and two products of 255 by 127 do not fit. So it is tried once, on
operands at the ends of their range and in shapes that leave remainders, and compared with int64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows, k) and (columns, k), both int8, to (rows, columns) of exact sums, int32 or float32."""

_SHAPES = ((1, 256, 8), (16, 256, 32), (17, 37, 9), (5, 4096, 33), (33, 1030, 16))
"""Rows, k and columns that are tried: one row, remainders of 4, 16 and 32, long sums."""


def int_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return torch's product; RuntimeError where torch lacks it."""
    return torch._int_mm(a, b.t())


@functools.cache
def refusal() -> str | None:
    """Return why torch's product is not used on this machine, or None.

    >>> refusal() in (None, "not exact here", "slow without VNNI")
    True
    """
    if not torch.cpu._is_vnni_supported():
        return "slow without VNNI"
    return None if is_exact(int_mm) else "not exact here"


def is_exact(product: Product) -> bool:
    """Return whether a product is exact at the ends of int8.

    >>> is_exact(lambda a, b: (a.long() @ b.long().t()).clamp(-32768, 32767))
    False
    """
    generator = torch.Generator().manual_seed(0)
    for rows, k, columns in _SHAPES:
        mixed = [
            torch.randint(-128, 128, (count, k), generator=generator, device="cpu").to(torch.int8)
            for count in (rows, columns)
        ]
        for ends in (None, (127, 127), (-128, 127), (-128, -128)):
            left, right = (
                mixed if ends is None else (torch.full_like(t, e) for t, e in zip(mixed, ends, strict=True))
            )
            try:
                found = product(left, right)
            except (RuntimeError, AttributeError):
                return False  # torch was built without it, or not for this machine
            if not torch.equal(found.long(), left.long() @ right.long().t()):
                return False
    return True
