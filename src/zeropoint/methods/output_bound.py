r"""Bound on the output error, known before a weight is rounded.

    (t - q) H (t - q)^T = sum_j D_j (t'_j - q_j)^2 <= sum_j D_j (gap_j / 2)^2,      H = M diag(D) M^T

t is the target, t'_j the number that error feedback rounds in column j, and gap_j the widest distance of two
values of its block. The equation holds for all values q. The bound holds for the values of feedback, in each
row where no t'_j is past the last value, and so for values of less error. H is damped: X^T X / n plus a
diagonal that is nowhere negative, so that the error on the statistics themselves is no larger. After steps
the target is theirs and not the weight, whose error has no bound.

Source: QuIP, arXiv:2307.13304, section 3; the bound of Babai's nearest plane, arXiv:2507.18553.
"""

from __future__ import annotations

import hashlib

import torch

from ..ops.feedback import Grid, feed_back, output_errors
from ..stats import Statistics
from ..tensor import QuantizedTensor
from .factored import Factored, factored
from .method import OutputError
from .rounding_grid import grid_of


def output_error(target: torch.Tensor, losses: torch.Tensor, gram: Statistics, grid: Grid) -> OutputError:
    """Return the output error of values, and its bound under a grid.

    target: (rows, columns) of floats, before rounding. losses: (rows,) float64, squared output errors of
    rounded values (:func:`zeropoint.ops.feedback.output_errors`). gram: statistics of the inputs. grid:
    rounding grid of the stored scales.
    """
    whole = factored(gram)
    squares = feed_back(target, whole.upper, whole.pivots, whole.order, _zeros(target))[1]
    bounds = _bounds(whole, grid)
    total = max(float(squares.sum()), torch.finfo(torch.float64).tiny)
    return OutputError(
        loss=float(losses.sum()) / total,
        bound=float(bounds.sum()) / total,
        over=int((losses > bounds * _ROUNDED).sum()),
        statistics=statistics_digest(gram),
    )


def statistics_digest(gram: Statistics) -> str:
    """Return the SHA-256 of the sums of a Gram matrix."""
    return hashlib.sha256(gram["gram"].cpu().numpy().tobytes()).hexdigest()


_ROUNDED = 1 + 2.0**-20
"""Values are rounded to float32 after the nearest one was chosen."""


def proven(weight: torch.Tensor, q: QuantizedTensor, gram: Statistics) -> tuple[OutputError, tuple[int, ...]]:
    """Return the output error of stored codes, and rows beyond feedback's bound.

    In such a row the error is more than its bound, and more than the error of feedback under the same scales:
    no clipping explains it. weight: the float weight, (rows, columns). q: its codes, by a method of this
    bound without steps. gram: statistics of the inputs that the codes were chosen on.
    """
    whole, grid = factored(gram), grid_of(q.params)
    rows = weight.to(torch.promote_types(weight.dtype, torch.float32))
    values = q.dequantize(grid.scale.dtype)
    losses = output_errors(rows, values, whole.upper, whole.pivots, whole.order)
    _, fed = feed_back(rows, whole.upper, whole.pivots, whole.order, grid)
    wrong = (losses > _bounds(whole, grid) * _ROUNDED) & (losses > fed * _ROUNDED)
    return output_error(rows, losses, gram, grid), tuple(wrong.nonzero()[:, 0].tolist())


def _zeros(target: torch.Tensor) -> Grid:
    """Return a grid whose one value is 0."""
    return Grid(
        levels=torch.zeros(1, dtype=torch.float64, device=target.device),
        scale=torch.ones(len(target), 1, device=target.device),
        block_of=torch.zeros(target.shape[-1], dtype=torch.int64, device=target.device),
    )


def _bounds(whole: Factored, grid: Grid) -> torch.Tensor:
    """Return the bound of each row, float64."""
    pivots = torch.empty_like(whole.pivots)
    pivots[whole.order] = whole.pivots
    gap = float(grid.levels.diff().max()) if len(grid.levels) > 1 else 0.0
    shares = pivots.new_zeros(grid.scale.shape[1]).index_add_(0, grid.block_of, pivots)
    found = pivots.new_zeros(len(grid.scale))
    for share, scale in zip(shares, grid.scale.T, strict=True):
        found += share * (gap / 2 * scale.double()).square()
    return found
