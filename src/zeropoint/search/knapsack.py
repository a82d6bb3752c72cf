"""Exact solver of the multiple-choice knapsack: one option per group.

    minimize  sum_g loss[g][c_g]    subject to  sum_g size[g][c_g] <= budget

For any multiplier m >= 0, ``sum_g min_c (loss + m size) - m budget`` bounds every allocation from below
(Lagrange). An option whose ``loss + m size`` exceeds the least of its group by r adds r to that bound, so all
that exceed the gap to the best allocation known are ruled out. Few are left where there are many groups,
and a dynamic program over these, without dominated states, finds the best and proves it.

Losses are compared as integers: each is rounded to 2**-61 of the sum of the largest ones. The multiplier
comes from the continuous relaxation (Sinha and Zoltners, "The multiple-choice knapsack problem", 1979); the
order in which groups are taken in is Pisinger's core ("A minimal algorithm for the multiple-choice knapsack
problem", 1995). This module knows sizes and losses alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ..errors import RangeError

Groups = Sequence[Sequence[tuple[int, float]]]
"""For each group its options, each a size in bytes and a loss."""
_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]
_BITS = 61
"""Bits of the sum of the largest losses, so that sums of integer losses and their differences fit int64."""
_SLACK = float(1 << 26)
"""What float64 may be off in sums of some thousand of these integers; pruning allows for it."""
_FIRST, _STATES, _KEPT = 256, 1 << 18, 1 << 26
"""States after each group in the first pass, which finds a good allocation, and at most in the second; states
of all groups together, whose origins are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One option of each group.

    choice: index of the option of each group. size, loss: their sums. bound: no allocation within the budget
    has a smaller loss; equal to ``loss`` where the search was complete.
    """

    choice: tuple[int, ...]
    size: int
    loss: float
    bound: float

    @property
    def optimal(self) -> bool:
        """Whether no allocation within the budget has a smaller loss."""
        return self.bound >= self.loss


@dataclass(frozen=True, slots=True)
class _Group:
    """Undominated options of a group, by rising size and falling loss."""

    index: _Ints
    size: _Ints
    loss: _Ints


def solve(groups: Groups, budget: int) -> Allocation:
    """Return the allocation of least loss within ``budget``; ties: any one.

    Raises RangeError where no allocation is so small, for a group without options, a negative size and a loss
    that is negative or not finite.

    >>> solve([[(4, 1.0), (8, 0.0)], [(4, 3.0), (8, 0.5)]], 12).choice
    (0, 1)
    """
    shift = _shift(groups)
    table = [_undominated(options, shift) for options in groups]
    least, most = (sum(int(group.size[at]) for group in table) for at in (0, -1))
    if least > budget:
        raise RangeError(f"budget (={budget} bytes) is less than the smallest allocation, {least} bytes")
    if most <= budget:
        return _allocation(groups, [int(group.index[-1]) for group in table], None)
    search = _Search.of(table, budget)
    search.run(_FIRST)
    complete = search.run(min(_STATES, _KEPT // max(1, len(search.core))))
    chosen = [int(group.index[at]) for group, at in zip(table, search.best, strict=True)]
    return _allocation(groups, chosen, None if complete is None else math.ldexp(complete, -shift))


def frontier(groups: Groups) -> list[tuple[int, float]]:
    """Return optimal allocations by rising size: (size, loss) of each.

    They are the vertices of the continuous relaxation; between two of them others may be best.

    >>> frontier([[(4, 1.0), (8, 0.0)], [(4, 3.0), (8, 0.5)]])
    [(8, 4.0), (12, 1.5), (16, 0.5)]
    """
    shift = _shift(groups)
    table = [_undominated(options, shift) for options in groups]
    size, loss = sum(int(g.size[0]) for g in table), sum(int(g.loss[0]) for g in table)
    found = [(size, math.ldexp(loss, -shift))]
    for _, number, before, after in _steps(table):
        group = table[number]
        size += int(group.size[after] - group.size[before])
        loss += int(group.loss[after] - group.loss[before])
        found.append((size, math.ldexp(loss, -shift)))
    return found


def _shift(groups: Groups) -> int:
    """Return the power of two by which losses become integers."""
    for options in groups:
        if not options:
            raise RangeError("a group has no options; give it at least one")
        for size, loss in options:
            if size < 0 or not loss >= 0 or math.isinf(loss):
                raise RangeError(f"option (size {size}, loss {loss}) must have numbers from 0 on")
    total = math.fsum(max(loss for _, loss in options) for options in groups)
    return _BITS - math.frexp(total)[1] if total else 0


def _undominated(options: Sequence[tuple[int, float]], shift: int) -> _Group:
    ordered = sorted((size, round(math.ldexp(loss, shift)), at) for at, (size, loss) in enumerate(options))
    kept = [ordered[0]]
    for option in ordered[1:]:
        if option[1] < kept[-1][1]:
            kept.append(option)
    sizes, losses, index = (np.array(column, dtype=np.int64) for column in zip(*kept, strict=True))
    return _Group(index, sizes, losses)


def _allocation(groups: Groups, chosen: list[int], bound: float | None) -> Allocation:
    picked = [options[at] for options, at in zip(groups, chosen, strict=True)]
    loss = math.fsum(loss for _, loss in picked)
    return Allocation(
        choice=tuple(chosen),
        size=sum(size for size, _ in picked),
        loss=loss,
        bound=loss if bound is None else min(loss, bound),
    )


def _hull(group: _Group) -> list[int]:
    """Return the lower convex hull of loss over size."""
    hull: list[int] = []
    size, loss = group.size.tolist(), group.loss.tolist()
    for at in range(len(size)):
        while len(hull) > 1:
            a, b = hull[-2:]
            # Exact: Python's integers do not overflow.
            if (loss[b] - loss[a]) * (size[at] - size[b]) < (loss[at] - loss[b]) * (size[b] - size[a]):
                break
            hull.pop()
        hull.append(at)
    return hull


def _steps(table: Sequence[_Group]) -> list[tuple[float, int, int, int]]:
    """Return all hull steps, steepest first: slope, group, before, after."""
    found = []
    for number, group in enumerate(table):
        for before, after in pairwise(_hull(group)):
            fall = int(group.loss[before] - group.loss[after])
            found.append((-fall / int(group.size[after] - group.size[before]), number, before, after))
    found.sort()
    return found


@dataclass(frozen=True, slots=True)
class _Core:
    """Alternative options of an open group, with changes and excess."""

    number: int
    at: _Ints
    size: _Ints
    loss: _Ints
    excess: _Floats

    @property
    def up(self) -> float:
        """Least excess of a byte more."""
        more = self.size > 0
        return float((self.excess[more] / self.size[more]).min(initial=math.inf))

    @property
    def down(self) -> float:
        """Least excess of a byte less."""
        less = self.size < 0
        return float((self.excess[less] / -self.size[less]).min(initial=math.inf))


def _spread(bounds: _Floats, width: int) -> _Ints:
    """Return ``width`` state numbers of low bounds, spread among ties.

    States lie by size, so that kept sums are close to each other.
    """
    cut = float(np.partition(bounds, width)[width])
    below, even = np.flatnonzero(bounds < cut - _SLACK), np.flatnonzero(np.abs(bounds - cut) <= _SLACK)
    some = even[np.linspace(0, len(even) - 1, width - len(below)).astype(np.int64)]
    return np.union1d(below, some)


@dataclass(slots=True)
class _Search:
    """Search over all groups, from the Lagrangian choice of each.

    The choice is the option of least ``loss + multiplier size``. table, budget: the problem. slope,
    multiplier: Lagrange's, exact and rounded. base: option of each group.
    slack: bytes that the base leaves of the budget, negative where it exceeds it.
    bound: Lagrange's lower bound. core: groups with other options. best: options of the best allocation
        known.
    total: its loss.
    """

    table: Sequence[_Group]
    budget: int
    base: list[int]
    loss: int
    slack: int
    slope: Fraction
    multiplier: float
    bound: float
    core: list[_Core]
    best: list[int]
    total: int
    _states: tuple[_Ints, _Ints, _Floats] = field(init=False)

    @staticmethod
    def of(table: Sequence[_Group], budget: int) -> _Search:
        """Return a search with the relaxation's multiplier and first allocation."""
        at, size = [0] * len(table), sum(int(group.size[0]) for group in table)
        slope, blocked = Fraction(0), [False] * len(table)
        for _, number, before, after in _steps(table):
            more = int(table[number].size[after] - table[number].size[before])
            if size + more > budget:
                slope = slope or Fraction(int(table[number].loss[before] - table[number].loss[after]), more)
                blocked[number] = True
            elif not blocked[number]:
                at[number], size = after, size + more
        multiplier = float(slope)
        priced = [group.loss + multiplier * group.size for group in table]
        base = [int(np.argmin(prices)) for prices in priced]
        core = []
        for number, (group, prices) in enumerate(zip(table, priced, strict=True)):
            own = base[number]
            others = np.flatnonzero(np.arange(len(prices)) != own)
            if len(others):
                core.append(_Core(
                    number, others, group.size[others] - group.size[own],
                    group.loss[others] - group.loss[own], np.maximum(prices[others] - prices[own], 0.0),
                ))  # fmt: skip
        core.sort(key=lambda found: min(found.up, found.down))
        bound = math.fsum(float(p[a]) for p, a in zip(priced, base, strict=True)) - multiplier * budget
        return _Search(
            table=table, budget=budget, slope=slope, base=base, multiplier=multiplier, bound=bound, core=core,
            loss=sum(int(g.loss[a]) for g, a in zip(table, base, strict=True)),
            slack=budget - sum(int(g.size[a]) for g, a in zip(table, base, strict=True)), best=at,
            total=sum(int(g.loss[a]) for g, a in zip(table, at, strict=True)),
        )  # fmt: skip

    def run(self, width: int) -> float | None:
        """Improve the best allocation; return None if proven, else a bound.

        width: most states that are kept after a group.
        """
        up, down = self._later()
        self._states = np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1)
        origins: list[tuple[_Ints, _Ints] | None] = []
        found, dropped = self._better(-1), math.inf
        for step, group in enumerate(self.core):
            gap = self._gap
            options = np.flatnonzero(group.excess <= gap)
            if not len(options):
                origins.append(None)
                continue
            parents, chosen, bounds = self._extend(group, options, (up[step + 1], down[step + 1]), gap)
            if len(parents) > width:
                kept = _spread(bounds, width)
                dropped = min(dropped, float(np.delete(bounds, kept).min()))
                parents, chosen = parents[kept], chosen[kept]
                sizes, losses, excess = self._states
                self._states = sizes[kept], losses[kept], excess[kept]
            origins.append((parents, chosen))
            found = self._better(step) or found
            if not len(parents):
                break
        if found is not None:
            self.best = self._traced(found, origins)
        if dropped > self._gap or self.total - self._exact_bound() < 1:
            return None
        return self.bound + dropped - _SLACK

    def _exact_bound(self) -> Fraction:
        """Return the bound of Lagrange without rounding."""
        m, total = self.slope, Fraction(0)
        for group in self.table:
            pairs = zip(group.size.tolist(), group.loss.tolist(), strict=True)
            total += min(loss + m * size for size, loss in pairs)
        return total - m * self.budget

    @property
    def _gap(self) -> float:
        return self.total - self.bound + _SLACK

    def _later(self) -> tuple[list[float], list[float]]:
        """Return the least excess per byte up and down, by group."""
        up, down = [self.multiplier], [math.inf]
        for group in reversed(self.core):
            up.append(min(up[-1], group.up))
            down.append(min(down[-1], group.down))
        return up[::-1], down[::-1]

    def _extend(
        self, group: _Core, options: _Ints, rates: tuple[float, float], gap: float
    ) -> tuple[_Ints, _Ints, _Floats]:
        """Add a group; return new states' origins, options (-1: base), bounds.

        rates: least excess of a byte more, and less, in groups to come.
        """
        sizes, losses, excess = self._states
        of = np.concatenate(([-1], options))

        zero = np.zeros(1, np.int64)
        size = (sizes + np.concatenate((zero, group.size[options]))[:, None]).ravel()
        loss = (losses + np.concatenate((zero, group.loss[options]))[:, None]).ravel()
        over = (excess + np.concatenate((np.zeros(1), group.excess[options]))[:, None]).ravel()
        left = self.slack - size
        fill = np.where(left > 0, left * rates[0], 0.0)
        if math.isfinite(rates[1]):
            fill += np.where(left < 0, -left * rates[1], 0.0)
        else:
            fill[left < 0] = math.inf
        bound = over + fill
        kept = np.flatnonzero(bound <= gap)
        kept = kept[np.lexsort((loss[kept], size[kept]))]
        ordered = loss[kept]
        lowest = np.minimum.accumulate(ordered)
        new = np.ones(len(kept), bool)
        new[1:] = ordered[1:] < lowest[:-1]
        kept = kept[new]
        self._states = size[kept], loss[kept], over[kept]
        return kept % len(sizes), of[kept // len(sizes)], bound[kept]

    def _better(self, step: int) -> tuple[int, int] | None:
        """Return the place of a better state within the budget, or None."""
        sizes, losses, _ = self._states
        fits = np.flatnonzero(sizes <= self.slack)
        if not len(fits):
            return None
        at = int(fits[np.argmin(losses[fits])])
        total = self.loss + int(losses[at])
        if total >= self.total:
            return None
        self.total = total
        return step, at

    def _traced(self, found: tuple[int, int], origins: Sequence[tuple[_Ints, _Ints] | None]) -> list[int]:
        """Return the options of a state."""
        chosen, (step, at) = list(self.base), found
        for number in range(step, -1, -1):
            origin = origins[number]
            if origin is not None:
                option = int(origin[1][at])
                if option >= 0:
                    group = self.core[number]
                    chosen[group.number] = int(group.at[option])
                at = int(origin[0][at])
        return chosen
