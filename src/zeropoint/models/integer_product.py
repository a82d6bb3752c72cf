"""The integer matrix products that torch ships, used only where they are exact on this machine.

Some move int8 to uint8 and add pairs of products in 16 bits where a machine has nothing better (oneDNN's
quantized linear without VNNI), and two products of 255 by 127 do not fit. So a product is tried once on the
worst operands and compared with int64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows, k) and (columns, k), both int8, to (rows, columns) of exact sums, int32 or float32."""


def _int_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch._int_mm(a, b.t())


PRODUCTS: dict[str, Product] = {"torch._int_mm": _int_mm}
"""By name, in the order in which they are tried."""


@functools.cache
def integer_product() -> tuple[str, Product] | None:
    """Return the name and function of the first product that is exact here, or None when none is.

    >>> integer_product() is None or integer_product()[0] in PRODUCTS
    True
    """
    return next(((name, product) for name, product in PRODUCTS.items() if is_exact(product)), None)


def is_exact(product: Product) -> bool:
    """Return whether ``product`` gives the sums of int64 on operands at the ends of their range."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randint(-128, 128, (16, 256), generator=generator).to(torch.int8)
    for a, b in ((torch.full((16, 256), 127), torch.full((32, 256), 127)), (mixed, mixed.repeat(2, 1))):
        left, right = a.to(torch.int8), b.to(torch.int8)
        try:
            found = product(left, right)
        except (RuntimeError, NotImplementedError, AttributeError):
            return False  # torch was built without it, or not for this machine
        if not torch.equal(found.long(), left.long() @ right.long().t()):
            return False
    return True
