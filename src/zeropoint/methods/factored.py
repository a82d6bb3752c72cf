"""Factors of a damped Gram matrix, shared by layers of equal inputs.

    H = X^T X / n + damping mean(diag) I          H[order][:, order] = M diag(D) M^T,  M unit upper triangular

Columns run in descending order of the diagonal, ties by their number. An input that is always zero gets the
mean of the diagonal: nothing is fed into its column, whose weights are rounded as they are.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import CalibrationError, RangeError
from ..ops.feedback import factor
from ..stats import Statistics

DAMPING, _TRIES = 0.01, 4
"""Share of the mean of the diagonal that is added to it, tenfold each time where that is too little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factored:
    """A factored Gram matrix, its columns in processing order.

    damped: the matrix, its columns in their original order. upper, pivots: M and D. order: numbers of
    original columns. costs: the pivots by original column, the cost of an error after later columns
    compensate; 0 for inputs that are always zero.
    """

    costs: torch.Tensor
    damped: torch.Tensor
    upper: torch.Tensor
    pivots: torch.Tensor
    order: torch.Tensor


_LOCK = threading.Lock()
_KNOWN: Any = WeakIdKeyDictionary()
"""By the Gram matrix that it was made of."""


def factored(gram: Statistics) -> Factored:
    """Return the factored matrix, which is kept as long as ``gram`` is.

    Raises CalibrationError for a matrix that no damping makes positive definite.
    """
    key = gram["gram"]
    with _LOCK:  # weights that read the same inputs wait for one factorization
        known = _KNOWN.get(key)
        if known is None:
            known = _KNOWN[key] = _factored(key.double() / int(gram["vectors"]))
    found: Factored = known
    return found


def _factored(mean: torch.Tensor) -> Factored:
    diagonal = mean.diagonal().clone()
    middle = float(diagonal.mean())
    if not middle > 0:
        mean, diagonal, middle = torch.eye(len(mean)).to(mean), torch.ones_like(diagonal), 1.0
    order = torch.argsort(diagonal, descending=True, stable=True)
    dead = diagonal == 0
    damping = DAMPING
    for _ in range(_TRIES):
        damped = mean.clone()
        damped.diagonal()[dead] = middle
        damped.diagonal().add_(damping * middle)
        try:
            upper, pivots = factor(damped[order][:, order])
        except RangeError:
            damping *= 10
            continue
        costs = torch.empty_like(pivots)
        costs[order] = pivots
        costs[dead] = 0.0
        return Factored(costs=costs, damped=damped, upper=upper, pivots=pivots, order=order)
    raise CalibrationError(
        "the Gram matrix of the inputs is not positive definite, whatever is added to its diagonal: its "
        "numbers lie too far apart; give the layer method mse_weighted"
    )
