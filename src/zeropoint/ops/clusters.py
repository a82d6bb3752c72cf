"""One-dimensional k-means: codebook values of least weighted squared error.

    minimize over t:   sum_i w_i min_j (t_j - u_i)^2

Clusters of numbers are runs of the sorted ones, so that dynamic programming finds the optimum: the least
error of the first j numbers in k runs is the least over i of the error of the first i in k - 1 runs plus the
error of the run from i to j. The best i rises with j (the errors of runs satisfy the quadrangle inequality),
which halves the search at each step: O(k n log n). Up to `EXACT` different numbers this is exact, in float64.
More are merged into as many runs of neighbors of equal count first, and the table is then refined by Lloyd's
iteration on all numbers, which never makes it worse.

Source: Wu, Optimal quantization by matrix searching, 1991; Grønlund et al., arXiv:1701.07204; Lloyd, 1982.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

EXACT = 1 << 14
"""Most different numbers of an exact optimum; more are merged."""
_ROUNDS = 200
Floats = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Points:
    """Distinct rising numbers, with prefix sums of weights and moments.

    values: (n,). sums: (3, n + 1), sums of weights, weighted numbers and weighted squares of the first 0, 1,
    ... n numbers.
    """

    values: Floats
    sums: Floats

    @staticmethod
    def of(numbers: Floats, weights: Floats) -> Points:
        """Return numbers in any order, equal ones once.

        numbers, weights: (n,) float64, weights at least 0.
        """
        values, where = np.unique(numbers, return_inverse=True)
        weight: Floats = np.bincount(where, weights, len(values)).astype(np.float64)
        return Points._summed(values, weight, weight * values, weight * values * values)

    def merged(self, count: int) -> Points:
        """Return ``count`` runs of neighbors as one point each, at their means."""
        ends = np.linspace(0, len(self.values), count + 1).astype(np.int64)
        sums = self.sums[:, ends]
        weight, first, _ = np.diff(sums, axis=1)
        middles = self.values[(ends[:-1] + ends[1:]) // 2]
        values = np.divide(first, weight, out=middles.copy(), where=weight > 0)
        return Points(values=values, sums=sums)

    def error(self, first: Places, last: Places) -> Floats:
        """Return the weighted squared errors of runs around their means."""
        weight, total, square = self.sums[:, last] - self.sums[:, first]
        mean_part = np.divide(total * total, weight, out=np.zeros_like(weight), where=weight > 0)
        found: Floats = np.maximum(square - mean_part, 0.0)
        return found

    def means(self, ends: Places) -> Floats:
        """Return the weighted means of runs; without weight, the middle."""
        weight, total, _ = np.diff(self.sums[:, ends], axis=1)
        middles = self.values[np.minimum((ends[:-1] + ends[1:]) // 2, len(self.values) - 1)]
        found: Floats = np.divide(total, weight, out=middles.copy(), where=weight > 0)
        return found

    @staticmethod
    def _summed(values: Floats, *numbers: Floats) -> Points:
        sums = np.zeros((len(numbers), len(values) + 1))
        np.cumsum(numbers, axis=1, out=sums[:, 1:])
        return Points(values=values, sums=sums)


def fitted(numbers: Floats, weights: Floats, count: int) -> Floats:
    """Return the ``count`` rising values of least weighted squared error.

    Fewer where fewer numbers differ. numbers, weights: (n,) float64, n at least 1.

    >>> fitted(np.array([0.0, 1.0, 10.0, 11.0]), np.array([1.0, 3.0, 1.0, 1.0]), 2)
    array([ 0.75, 10.5 ])
    """
    points = Points.of(numbers, weights)
    if len(points.values) <= count:
        return points.values
    if len(points.values) <= EXACT:
        return points.means(best_ends(points, count))
    few = points.merged(EXACT)
    return _refined(points, few.means(best_ends(few, count)))


def best_ends(points: Points, count: int) -> Places:
    """Return the boundaries of the best clusters, ``count + 1`` places."""
    total = len(points.values)
    places = np.arange(total + 1)
    least, choices = points.error(np.zeros_like(places), places), list[Places]()
    for runs in range(2, count + 1):
        least, choice = _one_more(points, least, runs)
        choices.append(choice)
    ends = [total]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    return np.array([0, *reversed(ends)])


def _one_more(points: Points, least: Floats, runs: int) -> tuple[Floats, Places]:
    """Return least errors of prefixes in ``runs`` runs, and the last starts.

    least: the errors in one run less. Places whose neighbors at twice the distance are known are decided at
        once.
    """
    total = len(points.values)
    found, choice = np.full(total + 1, np.inf), np.full(total + 1, runs - 1, dtype=np.int64)
    known = np.zeros(total + 1, dtype=bool)
    step = 1 << total.bit_length()
    while step:
        places = np.arange(step, total + 1, step)
        places = places[(places >= runs) & ~known[places]]
        if len(places):
            low = choice[np.maximum(places - step, 0)]
            above = places + step
            top = np.where(above <= total, choice[np.minimum(above, total)], total)
            found[places], choice[places] = _least(points, least, places, (low, np.minimum(top, places - 1)))
            known[places] = True
        step >>= 1
    return found, choice


def _least(
    points: Points, least: Floats, places: Places, between: tuple[Places, Places]
) -> tuple[Floats, Places]:
    """Return each place's least error, and the last run's first best start."""
    low, top = between
    counts = top - low + 1
    starts = np.cumsum(counts) - counts
    begin = np.arange(counts.sum()) - np.repeat(starts - low, counts)
    errors = least[begin] + points.error(begin, np.repeat(places, counts))
    best = np.minimum.reduceat(errors, starts)
    hits = np.flatnonzero(errors == np.repeat(best, counts))
    return best, begin[hits[np.searchsorted(hits, starts)]]


def _refined(points: Points, table: Floats) -> Floats:
    """Return ``table`` after Lloyd's iterations on all points."""
    before = None
    for _ in range(_ROUNDS):
        inner = np.searchsorted(points.values, (table[1:] + table[:-1]) / 2, side="right")
        ends = np.array([0, *inner, len(points.values)])
        if before is not None and np.array_equal(ends, before):
            break
        table, before = points.means(ends), ends
    return table
