"""Dense products of error feedback in plain torch, in defined order."""

from __future__ import annotations

import torch

from .feedback_grid import Grid, TriangularFactors, float32_exponent

CHUNK = 64
"""Tokens whose products are summed in float32."""
_TINY = 2.0**-60
_DROPPED = 12
"""Bits of the 24 of float32 that are rounded away, so that products are exact."""


def squares(x: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """See :class:`zeropoint.ops.registry.Dense`."""
    sums = into.clone()
    for row in x:
        sums += row.double().square()
    return sums


def _rounded(x: torch.Tensor, exponent: int) -> torch.Tensor:
    """Return scaled numbers rounded to 12 significant bits; tiny ones zero."""
    near = (x.double() * 2.0**-exponent).float()
    bits = near.contiguous().view(torch.int32)
    odd = (bits >> _DROPPED) & 1
    kept = (bits + ((1 << (_DROPPED - 1)) - 1) + odd) & -(1 << _DROPPED)
    return torch.where(near.abs() >= _TINY, kept.view(torch.float32), 0.0)


def gram(x: torch.Tensor, y: torch.Tensor | None, into: torch.Tensor) -> torch.Tensor:
    """See :class:`zeropoint.ops.registry.Dense`."""
    shifts = float32_exponent(x), float32_exponent(x if y is None else y)
    left = _rounded(x, shifts[0])
    right = left if y is None else _rounded(y, shifts[1])
    sums = into.clone() if sum(shifts) == 0 else torch.zeros_like(into)
    for start in range(0, len(x), CHUNK):
        part = torch.zeros(into.shape, dtype=torch.float32, device=x.device)
        for a, b in zip(left[start : start + CHUNK], right[start : start + CHUNK], strict=True):
            part += a[:, None] * b[None, :]
        sums += part.double()
    return sums if sum(shifts) == 0 else into + sums * 2.0 ** shifts[0] * 2.0 ** shifts[1]


def factor(h: torch.Tensor) -> TriangularFactors:
    """See :class:`zeropoint.ops.registry.Dense`."""
    m, d = h.clone(), h.new_zeros(len(h))
    for k in reversed(range(len(h))):
        pivot = m[k, k].clone()
        if not bool(pivot > 0):
            return TriangularFactors(m=m, d=d, failed=k)
        d[k], column = pivot, m[:k, k].clone()
        m[:k, k] = column / pivot
        m[:k, :k] -= m[:k, k, None] * column[None, :]
    m = m.triu(1)
    m.diagonal().fill_(1.0)
    return TriangularFactors(m=m, d=d)


def _values(t: torch.Tensor, grid: Grid, column: int) -> torch.Tensor:
    """Return the values nearest to the numbers of one column, (rows,) float64."""
    block = grid.block_of[column]
    scale, offset, zero = (each[:, block] for each in (grid.scale, grid.all_offsets, grid.all_zeros))
    wide = scale.double()
    u = torch.where(wide == 0, 0.0, (t - offset.double()) / wide) + zero.double()
    if grid.has_steps:
        levels = u.clamp(grid.levels[0], grid.levels[-1]).round() + 0.0
    else:
        levels = grid.levels[torch.searchsorted(grid.bounds, u)]
    return ((levels - zero.double()).to(scale.dtype) * scale + offset).double()


def feed_back(
    weight: torch.Tensor, m: torch.Tensor, d: torch.Tensor, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :class:`zeropoint.ops.registry.Dense`."""
    own = weight.double()
    targets, values, losses = own.clone(), torch.empty_like(own), own.new_zeros(len(own))
    for j in range(own.shape[1]):
        t = targets[:, j]
        values[:, j] = _values(t, grid, j)
        missed, error = t - values[:, j], own[:, j] - values[:, j]
        losses += missed * missed * d[j]
        targets[:, j + 1 :] += error[:, None] * m[j, j + 1 :]
    return values, losses


def substitute(y: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """See :class:`zeropoint.ops.registry.Dense`."""
    found = y.clone()
    for j in range(found.shape[1]):
        found[:, j + 1 :] += -found[:, j, None] * m[j, j + 1 :]
    return found


def descend(
    weight: torch.Tensor, values: torch.Tensor, h: torch.Tensor, grid: Grid, sweeps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :class:`zeropoint.ops.registry.Dense`."""
    found, products = values.double().clone(), torch.zeros(weight.shape, dtype=torch.float64, device=h.device)
    errors, moved = weight.double() - found, torch.zeros(sweeps, dtype=torch.int64)
    for j in range(len(h)):
        products += errors[:, j, None] * h[j]
    for sweep in range(sweeps):
        for j in range(len(h)):
            before = found[:, j].clone()
            found[:, j] = _values(before + products[:, j] / h[j, j], grid, j)
            move = before - found[:, j]
            moved[sweep] += int((move != 0).sum())
            products += move[:, None] * h[j]
        if not moved[sweep]:
            break
    return found, moved
