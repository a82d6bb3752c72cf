"""Float32 bit patterns, from which statistics read exponents and bins exactly."""

from __future__ import annotations

import torch

EXPONENTS = 255
"""Exponent fields of finite float32 numbers."""
SMALLEST_EXPONENT = -149
"""The smallest subnormal number is 2 ** -149."""
LIMB_BITS = 32
LIMBS = 10
"""Limbs of an exact sum in units of the smallest subnormal number: room for 2**43 of the largest number."""


def as_float32(x: torch.Tensor) -> torch.Tensor:
    """Return finite ``x`` as float32, clamped to its largest."""
    if x.dtype == torch.float64:
        top = torch.finfo(torch.float32).max
        x = x.clamp(-top, top)
    return x.to(torch.float32)


def signed_bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of finite ``x`` as float32, int32."""
    return as_float32(x).view(torch.int32)


def magnitude_bits(x: torch.Tensor) -> torch.Tensor:
    """Return the int32 bits of float32 ``|x|``, ordered as magnitudes."""
    return signed_bits(x) & 0x7FFFFFFF


def carried(limbs: torch.Tensor) -> torch.Tensor:
    """Return sums with carries propagated, each limb but the last below 2**32.

    limbs: int64, not negative, one sum along the last axis, least significant first. Equal sums then have
    equal limbs.
    """
    if limbs.numel() == LIMBS:
        return torch.tensor(_carried(limbs.reshape(-1).tolist()), device=limbs.device).reshape(limbs.shape)
    over = limbs.narrow(-1, 0, LIMBS - 1) >> LIMB_BITS
    while over.max().item():
        limbs = limbs.clone()
        lower = limbs.narrow(-1, 0, LIMBS - 1).bitwise_and_((1 << LIMB_BITS) - 1)
        limbs.narrow(-1, 1, LIMBS - 1).add_(over)
        over = lower >> LIMB_BITS
    return limbs


def _carried(limbs: list[int]) -> list[int]:
    """Return one sum's carried limbs, as Python integers, which are faster."""
    over, result = 0, []
    for limb in limbs[:-1]:
        total = limb + over
        result.append(total & ((1 << LIMB_BITS) - 1))
        over = total >> LIMB_BITS
    return [*result, limbs[-1] + over]
