"""What a plan promises about its numbers; tests hold all of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..formats.torch_dtypes import wide_dtype
from ..ops.registry import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Guarantee:
    """The numerical promise of a plan.

    deterministic: the same input gives the same bytes in every run; stochastic rounding draws from its seed.
    bit_stable: neither the number of threads nor the backend changes a byte.
    arithmetic: dtype in which quotients and products are computed; steps are rounded without loss in it or in
        a wider one.

    The first two hold of every plan.

    >>> Guarantee(arithmetic=torch.float32).bit_stable
    True
    """

    deterministic: ClassVar[bool] = True
    bit_stable: ClassVar[bool] = True
    arithmetic: torch.dtype


def guarantee_of(request: Request) -> Guarantee:
    """Return the promise for ``request``, which holds of every backend.

    Computation is in float64 when the values or the tensor that was quantized are, else in float32.
    """
    wide = {wide_dtype(request.dtype), wide_dtype(request.own_dtype)}
    arithmetic = torch.float64 if torch.float64 in wide else torch.float32
    return Guarantee(arithmetic=arithmetic)
