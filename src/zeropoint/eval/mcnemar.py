"""McNemar's exact test of equal accuracy of two models."""

from __future__ import annotations

import math
from fractions import Fraction


def mcnemar(lost: int, gained: int) -> float:
    """Return the two-sided p-value of the exact test.

    Of the answers that only one of two models has right, each is equally likely to be of either if they are
    equally good: p = min(1, 2 P(X <= min(lost, gained))) with X of a binomial distribution of 1/2.

    Args:
        lost: questions that the first alone answers right.
        gained: questions that the second alone answers right.

    Example:
        >>> mcnemar(5, 0), mcnemar(3, 3)
        (0.0625, 1.0)

    Source: Q. McNemar, Note on the sampling error of the difference between correlated proportions,
    Psychometrika 12 (1947), with binomial tails in the place of the normal approximation.
    """
    number = lost + gained
    tail = sum(math.comb(number, k) for k in range(min(lost, gained) + 1))
    return float(min(Fraction(1), Fraction(2 * tail, 2**number)))
