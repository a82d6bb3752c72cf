"""Powers of two as scales: which exponent a rule asks for, and what it allows a block to hold.

Exponents come from the bits of a magnitude, never from a float log2.
"""

from __future__ import annotations

import functools

import torch

from ..formats import Format
from ..schemes import Scheme
from ..schemes.scale_rules import CEIL, EVEN, FLOOR, RCEIL, ScaleRule


@functools.lru_cache(maxsize=64)
def exponents_of(fmt: Format, device: torch.device) -> torch.Tensor:
    """Return the exponents of the powers of two that a format holds, rising."""
    assert fmt.exponents is not None
    return torch.tensor(fmt.exponents, dtype=torch.int64, device=device)


def quiet_below(scheme: Scheme) -> float:
    """Return below which magnitude float16, rounded as the even rule does, has an exponent field of zero."""
    return float(torch.finfo(torch.float16).tiny) - 2.0 ** -(15 + scheme.even_bits)


def scale_exponent(amax: torch.Tensor, scheme: Scheme, rule: ScaleRule) -> torch.Tensor:
    """Return the exponent of the power-of-two scale of each ``amax``, int64, before it is fitted to a format.

    Zero gives a number below every exponent that a format has.
    """
    element = scheme.element
    mantissa, exponent = torch.frexp(amax)
    floor = exponent.to(torch.int64) - 1
    lead = 2 * mantissa
    if rule == EVEN:
        floor = floor + (lead + 2.0 ** -(scheme.even_bits + 1) >= 2).to(torch.int64)
    elif rule == CEIL:
        floor = floor + (lead > 1).to(torch.int64)
    elif rule == RCEIL:
        top = scheme.divisor / 2.0**element.emax
        floor = floor + (lead > top).to(torch.int64)
    return torch.where(amax == 0, -(1 << 14), floor - element.emax)


def reach(scheme: Scheme) -> float:
    """Return the largest ``amax / scale`` that the rules of all levels allow, before a scale is rounded."""
    return max(_rule_reach(scheme, level.rule) for level in scheme.scales)


def _rule_reach(scheme: Scheme, rule: ScaleRule) -> float:
    top = 2.0 ** min(scheme.element.emax, 1023)
    if rule == FLOOR:
        return 2 * top
    if rule == EVEN:
        return top * (2 - 2.0 ** -(scheme.even_bits + 1))
    return top if rule == CEIL else scheme.divisor
