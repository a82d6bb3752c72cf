"""Means with standard errors, of token values and paired differences."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number, and its standard error.

    Args:
        value: the number.
        error: its standard error, or None for a number that has none here, such as a percentile.
    """

    value: float
    error: float | None = None

    def __str__(self) -> str:
        return f"{self.value:.6g}" if self.error is None else f"{self.value:.6g} ± {self.error:.2g}"


def mean_of(values: Floats) -> Estimate:
    """Return the mean of numbers with its standard error.

        mean = sum x / n,  error = sqrt((sum x^2 / n - mean^2) / (n - 1))

    Args:
        values: (n,), at least one; the error of a single number is 0.

    Example:
        >>> mean_of(np.array([1.0, 2.0, 3.0]))
        Estimate(value=2.0, error=0.57735...)
    """
    mean = float(values.mean())
    if len(values) < 2:
        return Estimate(value=mean, error=0.0)
    variance = float(np.square(values - mean).mean())
    return Estimate(value=mean, error=math.sqrt(variance / (len(values) - 1)))


def covariance_of(a: Floats, b: Floats) -> float:
    """Return the covariance of the means of paired numbers.

    a: (n,). b: (n,).
    """
    if len(a) < 2:
        return 0.0
    return float(((a - a.mean()) * (b - b.mean())).mean()) / (len(a) - 1)


def proportion_of(successes: int, trials: int) -> Estimate:
    """Return a share with standard error, sqrt(p(1-p)/(n-1)).

    successes: how many of them. trials: how many there were, at least one.

    >>> proportion_of(50, 101).error
    0.04999...
    """
    p = successes / trials
    return Estimate(value=p, error=math.sqrt(p * (1 - p) / max(1, trials - 1)))


def percentile_of(ordered: Floats, fraction: float) -> float:
    """Return a percentile, linear between the two nearest of the numbers.

    ordered: (n,), at least one, in rising order. fraction: from 0, the least, to 1, the largest.

    >>> percentile_of(np.array([0.0, 10.0, 20.0]), 0.75)
    15.0
    """
    place = fraction * (len(ordered) - 1)
    low = min(int(place), len(ordered) - 1)
    high, part = min(low + 1, len(ordered) - 1), place - low
    return float((1 - part) * ordered[low] + part * ordered[high])
