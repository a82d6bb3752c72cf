"""Spelling of numbers and names in tables. This module knows no tensors."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from ..codecs.registry import DEFAULT
from ..errors import printable
from ..formats.spec import exponent_of, power_of_two

_NUMBERED = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")
_LONGEST = 12
"""Characters of a decimal that still reads better than a power of two."""
_LARGEST_FACTOR = 1 << 10


def decibels(value: float) -> str:
    """Return a ratio in decibels; without noise it is infinite.

    >>> decibels(31.416), decibels(float("inf"))
    ('31.4', 'exact')
    """
    return "exact" if value == math.inf else f"{value:.1f}"


def share(value: float) -> str:
    """Return a share in percent, where zero is distinguished from very little.

    >>> share(0.0), share(0.25), share(1e-7)
    ('0', '25.00%', '<0.01%')
    """
    if value == 0:
        return "0"
    return "<0.01%" if value < 1e-4 else f"{value:.2%}"


def shape(extents: tuple[int, ...]) -> str:
    """Return a shape as it is spoken.

    >>> shape((384, 1536)), shape(())
    ('384 x 1536', 'scalar')
    """
    return " x ".join(map(str, extents)) or "scalar"


def name(text: str) -> str:
    r"""Return a tensor's name without terminal control characters.

    >>> name("a.weight"), name("a\x1b[31mb")
    ('a.weight', "'a\\x1b[31mb'")
    """
    quoted = printable(text)
    return text if quoted == f"'{text}'" else quoted


def pattern(text: str) -> str:
    """Return the name pattern of a model's layers, numbers replaced.

    >>> pattern("model.layers.11.mlp.experts.3.up_proj.weight")
    'model.layers.*.mlp.experts.*.up_proj.weight'
    """
    return _NUMBERED.sub("*", text)


def short_scheme(text: str) -> str:
    """Return a scheme without the default choices of all weights.

    >>> short_scheme("int4:g128:scale=input"), short_scheme("int4:g128:dialect=torch")
    ('int4:g128', 'int4:g128:dialect=torch')
    """
    for key, value in DEFAULT.defaults.items():
        text = text.replace(f":{key}={value}", "")
    return text


def exact(value: Fraction) -> str:
    """Return a format's exact value, as short decimal or powers of two.

    Entries of a codebook are float32 numbers, and the nine digits that identify one are written.

    >>> exact(Fraction(3, 2)), exact(Fraction(2) ** -16), exact(Fraction(3, 2**17)), exact(Fraction(0.1))
    ('1.5', '2^-16', '3*2^-17', '0.1')
    """
    if value < 0:
        return f"-{exact(-value)}"
    if value == 0:
        return "0"
    exponent = exponent_of(value)
    if value == power_of_two(exponent) and exponent not in range(-3, 16):
        return f"2^{exponent}"
    decimal = f"{float(value):.12g}"
    if "e" not in decimal and len(decimal) <= _LONGEST and Fraction(decimal) == value:
        return decimal
    lowest = (value.numerator & -value.numerator).bit_length() - value.denominator.bit_length()
    odd = int(value / power_of_two(lowest))
    if odd < _LARGEST_FACTOR:
        return f"{odd}*2^{lowest}"
    if value == power_of_two(exponent + 1) - power_of_two(lowest):  # all bits of the significand are ones
        return f"2^{exponent + 1} - " + (f"2^{lowest}" if lowest else "1")
    return f"{float(value):.9g}"
