"""Power-of-two scales: the exponent of each rule, and the resulting reach.

Exponents come from the bits of a magnitude, never from a float log2.
"""

from __future__ import annotations

import functools

import torch

from ..formats import Format
from ..formats.codes import times_power_of_two
from ..schemes import Scheme
from ..schemes.scale_rules import CEIL, EVEN, FLOOR, RCEIL, Ceiling, ScaleRule


@functools.lru_cache(maxsize=64)
def exponents_of(fmt: Format, device: torch.device) -> torch.Tensor:
    """Return the exponents of a format's powers of two, rising."""
    assert fmt.exponents is not None
    return torch.tensor(fmt.exponents, dtype=torch.int64, device=device)


def quiet_below(scheme: Scheme) -> float:
    """Return the magnitude below which float16, rounded evenly, is subnormal."""
    return float(torch.finfo(torch.float16).tiny) - 2.0 ** -(15 + scheme.even_bits)


def scale_exponent(amax: torch.Tensor, scheme: Scheme, rule: ScaleRule) -> torch.Tensor:
    """Return the int64 exponent of each power-of-two scale, before fitting.

    Zero gives a number below every exponent that a format has.
    """
    emax = scheme.element.emax
    limit = rule.limit if isinstance(rule, Ceiling) else scheme.divisor
    top = limit / 2.0**emax if rule == RCEIL or isinstance(rule, Ceiling) else 1.0
    return number_exponent(amax, rule, even_bits=scheme.even_bits, top=top) - emax


def number_exponent(
    numbers: torch.Tensor, rule: ScaleRule, *, even_bits: int = 0, top: float = 1.0
) -> torch.Tensor:
    """Return the int64 exponent of each number's power of two.

    even_bits: the mantissa width to which the even rule rounds first. top: the largest mantissa, of 1 to 2,
    that rceil, and a rule with a limit of its own, do not round up.
    """
    mantissa, exponent = torch.frexp(numbers)
    floor = exponent.to(torch.int64) - 1
    lead = 2 * mantissa
    if rule == EVEN:
        floor = floor + (lead + 2.0 ** -(even_bits + 1) >= 2).to(torch.int64)
    elif rule in (CEIL, RCEIL) or isinstance(rule, Ceiling):
        floor = floor + (lead.double() > top).to(torch.int64)
    return torch.where(numbers == 0, -(1 << 14), floor)


def fitted_powers(
    exponent: torch.Tensor, fmt: Format, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a format's powers at or above exponents, and an overflow mask."""
    allowed = exponents_of(fmt, exponent.device)
    slot = torch.bucketize(exponent, allowed)
    fitted = allowed[slot.clamp(max=len(allowed) - 1)]
    ones = torch.ones_like(fitted, dtype=torch.float64)
    return times_power_of_two(ones, fitted).to(dtype), slot == len(allowed)


def reach(scheme: Scheme) -> float:
    """Return the largest ``amax / scale`` over all levels' rules, before rounding."""
    return max(rule_reach(scheme, level.rule) for level in scheme.scales)


def rule_reach(scheme: Scheme, rule: ScaleRule) -> float:
    """Return the largest ``amax / scale`` under a rule of finest scales."""
    if isinstance(rule, Ceiling):
        return rule.limit
    top = 2.0 ** min(scheme.element.emax, 1023)
    if rule == FLOOR:
        return 2 * top
    if rule == EVEN:
        return top * (2 - 2.0 ** -(scheme.even_bits + 1))
    return top if rule == CEIL else scheme.divisor
