"""Budgets: bits for each weight, or bytes of all files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from ..errors import POWERS, SIZE, RangeError, printable, size_of

_BITS = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)\s*(?:bpw|bits?)", re.ASCII | re.IGNORECASE)
_LEAST = 1 << 10
"""Bytes below which a number alone is one of bits whose unit was forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A budget of weights: average ``bits``, or ``nbytes`` of all files.

    Scales and zero points count. Bits belong to the weights that the search decides about. Raises RangeError
    unless exactly one is given, and it is positive.
    """

    bits: Fraction | None = None
    nbytes: int | None = None

    def __post_init__(self) -> None:
        if (self.bits is None) == (self.nbytes is None):
            raise RangeError("a budget has bits or nbytes, one of them; write Budget.parse('4.5bpw')")
        if (self.bits or self.nbytes or 0) <= 0:
            raise RangeError(f"budget (={self}) must be positive, for example 4.5bpw or 3.2G")

    @staticmethod
    def parse(text: str) -> Budget:
        """Return the budget of a text: ``4.5bpw``, or bytes like ``3.2G``.

        K, M, G and T are powers of 1024. Raises RangeError for anything else, and for a small number without
        a unit.

        >>> str(Budget.parse("4.50bpw")), str(Budget.parse("3.5GB"))
        ('4.5bpw', '3.5 GiB')
        """
        bits, nbytes = _BITS.fullmatch(text.strip()), SIZE.fullmatch(text.strip())
        if bits is not None and Fraction(bits[1]):
            return Budget(bits=Fraction(bits[1]))
        found = 0 if nbytes is None else int(Fraction(nbytes[1]) * (1 << POWERS[nbytes[2].upper()]))
        if found and found < _LEAST and nbytes is not None and not nbytes[2]:
            raise RangeError(
                f"budget {printable(text)} has no unit; write {nbytes[1]}bpw for bits of each weight, or a "
                "size such as 3.2G for bytes of all files"
            )
        if not found:
            raise RangeError(
                f"budget {printable(text)} must be bits for each weight or bytes of all files, for example "
                "4.5bpw or 3.2G"
            )
        return Budget(nbytes=found)

    def __str__(self) -> str:
        return f"{float(self.bits):g}bpw" if self.bits is not None else size_of(self.nbytes or 0)
