"""Windows of scales that can be best for a block, with proofs.

Let V be the values of the codes in use, with 0 among them, S a scale, d(x) the distance from x to the
closest number of V, and E(S) the sum over a block of ``(S d(x / S)) ** p``, its error under S. Let amax be
the largest magnitude of the block and n its length.

**Upper end.** Let B be the middle between two neighbors of V, such that for each v below it 2 v is in V, too.
If ``amax <= B S``, all numbers of the block take values v S below it, and v S = (2 v) (S / 2) is a value
under S / 2 as well: ``E(S / 2) <= E(S)``. Doubling only 0, half the smallest magnitude of V is such a B, for
which all numbers become 0 and E(S) is the sum of their own powers, which no scale exceeds. So scales from
``amax / B`` on need no trial; where half of S cannot be stored, only those from twice ``amax`` over the
smallest magnitude on.

**Lower end.** Let ``g(y) = d(y) ** p - (2 d(y / 2)) ** p``, by which a number at y = x / S loses under S
against 2 S, and m its smallest value. Past the ends of 2 V, g grows without a limit for p > 1. Let A be such
that ``g(y) >= (n - 1) |m|`` wherever ``|y| >= A``. If ``amax >= A S``, then

    (E(S) - E(2 S)) / S ** p  >=  g(amax / S) + (n - 1) m  >=  0,

so that S is no better than 2 S, which can be stored but at the end of its format. Between two neighbors among
the numbers of V and 2 V and the middles of theirs, g is monotone, for both distances grow or shrink at rates
that keep their order, or one grows while the other shrinks: its extremes are at these points.

**Any weights of the errors** leave the upper end as it is, and no lower one. There, and besides, this holds:
what is clipped bounds the error, ``E(S) >= sum max(|x| - S max|V|, 0) ** p``.

Of V without 0, the first scale of all that lie apart by at most a factor of 2 above ``amax`` over the
smallest magnitude is the last to be tried: from there on all errors grow. That holds with the same numbers.

For NVFP4 (e2m1 under e4m3, n = 16) B is 3.5 and A 7.9: at most three codes below the code of ``amax / 6`` and
seven above it, as ScaleSweep found; for MXFP4 one or two powers of two of three remain for each block.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from ..formats import Format, Overflow
from ..formats.codes import decode
from ..schemes import Scheme, ZeroPoint

STEP = 1.05
"""How far below its lower end a window is left, at most, by scales that are tried in steps of a factor."""
SHRINKING = 4.0
"""What part of its start a scale keeps, at least, where no window is known: such as one with a zero point."""
_ENUMERATED_BITS = 8
"""Most bits of elements whose values are all looked at."""
_MARGIN = 1 + 2.0**-20
"""Outweighs the roundings of float64 and what thresholds of codebooks are off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Candidate scales of a block, as ratios of its largest magnitude.

    halving: B; scales with ``scale * halving >= amax`` are no better than their halves.
    empty: the same for scales whose half cannot be stored.
    doubling: A; scales with ``scale * doubling <= amax`` are no better than their doubles.
    most: largest magnitude of a value.
    """

    halving: float
    empty: float
    doubling: float
    most: float


@functools.lru_cache(maxsize=256)
def window_of(scheme: Scheme, count: int, power: float) -> Window:
    """Return the window for blocks of ``count`` values."""
    ends = scheme.ends
    values = [v for v in _values(scheme.element) if ends[0] <= v <= ends[1]]
    sides = [sorted({abs(v) for v in values if v * sign >= 0}) for sign in (1, -1)]
    sides = [side for side in sides if side and side[-1] > 0]
    off = scheme.element.boundary_error
    most, least = max(side[-1] for side in sides), min(v for side in sides for v in side if v > 0)
    gaps = [_loss(sorted(values), power, sign) for sign in (1, -1)]
    lost = max(0.0, *(-min(loss) for _, loss in gaps)) * (count - 1) * _MARGIN
    used = [gap for gap, sign in zip(gaps, (1, -1), strict=True) if any(v * sign > 0 for v in values)]
    return Window(
        halving=max(least / 2, min(_doubled(side) for side in sides)) - off,
        empty=least / 2 - off,
        # Any larger A will do; in blocks of one value, the end that represents it exactly stays inside.
        doubling=max(most, *(_reached(points, loss, lost, power) for points, loss in used)) * _MARGIN,
        most=most,
    )


def has_window(scheme: Scheme) -> bool:
    """Return whether the scheme's window of finest scales is known."""
    single = scheme.element.per_code == 1
    plain = single and scheme.zero_point is ZeroPoint.NONE and scheme.chained is None
    closest = scheme.rounding.mode.to_nearest and scheme.overflow is Overflow.SATURATE
    return plain and closest and scheme.element.bits <= _ENUMERATED_BITS


def block_length(scheme: Scheme, shape: tuple[int, ...]) -> int:
    """Return the number of values in a full block."""
    return math.prod(scheme.granularity.block_shape(shape))


def _values(fmt: Format) -> list[float]:
    codes = torch.arange(fmt.code_count, dtype=torch.int32, device="cpu")
    values = decode(codes, fmt, torch.float64)
    return sorted(set(values[torch.isfinite(values)].tolist()))


def _doubled(side: list[float]) -> float:
    """Return B for rising magnitudes of one sign, 0 without zero."""
    if side[0] != 0:
        return 0.0
    known = set(side)
    first = next(index for index, v in enumerate(side) if 2 * v not in known)
    return (side[first - 1] + side[first]) / 2


def _loss(values: list[float], power: float, sign: int) -> tuple[list[float], list[float]]:
    """Return points of one sign, rising in magnitude, and g at them."""
    once = torch.tensor(values, dtype=torch.float64, device="cpu")
    twice = 2 * once
    points = torch.cat([once, twice, *((v[1:] + v[:-1]) / 2 for v in (once, twice)), once.new_zeros(1)])
    points = torch.unique(points[points * sign >= 0].abs())
    near, far = (torch.amin((points[:, None] * sign - v).abs(), 1) for v in (once, twice))
    return points.tolist(), (near**power - far**power).tolist()


def _reached(points: list[float], loss: list[float], wanted: float, power: float) -> float:
    """Return A for one sign, rounded up: where g reaches ``wanted``."""
    if loss[-1] < wanted:
        if power == 1:
            return math.inf
        end, most = points[-1], points[-1] / 2
        while (end - most) ** power - (end - 2 * most) ** power < wanted:
            end *= 2
        return end if power != 2 else points[-1] + (wanted - loss[-1]) / (2 * most)
    last = max((index for index, value in enumerate(loss) if value < wanted), default=-1)
    if last < 0:
        return points[0]
    if power != 2:
        return points[last + 1]
    part = (wanted - loss[last]) / (loss[last + 1] - loss[last])
    return points[last] + part * (points[last + 1] - points[last])
