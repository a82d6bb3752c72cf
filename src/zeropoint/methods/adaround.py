r"""AdaRound on Gram matrices: soft rounding of whole rows that hardens.

    value = low + h (high - low),    0 <= h <= 1        low, high: the values on either side of the weight
    minimize over h:   (w - value) H (w - value)^T + lambda sum_j c_j (1 - (2 h_j - 1)^beta)

H is the Gram matrix of the inputs, and c_j = H_jj (high - low)^2 the cost of a whole step. Adam follows the
gradient for `STEPS` steps, lambda grows and beta falls from 16 to 2, so that h comes to 0 or 1, and is
rounded at the end. A row keeps the nearest values where these have less error.

The paper has h as a sigmoid, stretched and clipped. Here it is the variable itself, clipped after each step:
with additions, products, quotients and roots alone, and sums in a fixed order, the number of threads changes
no byte.

Source: Nagel et al., AdaRound, arXiv:2004.10568, equations 21 to 24.
"""

from __future__ import annotations

import torch

from ..ops.feedback import Grid, gram, output_errors
from .factored import Factored
from .gptq import ErrorFeedback
from .method import Bound

STEPS = 200
_RATE, _MOMENTUM, _SQUARES = 0.05, 0.9, 0.99
_POWERS = (16, 8, 4, 2)
"""Values of beta, each for as many steps."""
_HARDENING = 1.0
"""The largest lambda."""


def _softly(
    target: torch.Tensor,
    values: torch.Tensor,  # noqa: ARG001 (as gptq.Refine)
    whole: Factored,
    grid: Grid,
) -> torch.Tensor:
    """Return jointly rounded values next to the target, ignoring feedback's values."""
    nearest, low, high = _sides(target, grid)
    wide, gap = target.double(), high - low
    cost = (whole.damped.diagonal() * gap * gap).clamp_min(1e-300)
    soft = ((wide - low) / gap.where(gap > 0, 1.0)).clamp(0.0, 1.0)
    moments = torch.zeros_like(soft), torch.zeros_like(soft)
    for step in range(STEPS):
        missed = low + soft * gap - wide
        slope = 2.0 * gap * gram(missed.T.contiguous(), whole.damped) / cost
        power, share = _POWERS[step * len(_POWERS) // STEPS], step / STEPS
        side = 2.0 * soft - 1.0
        slope -= _HARDENING * share * 2.0 * power * _power(side, power - 1)
        soft = _stepped(soft, slope, moments, step)
    found = torch.where(soft >= 0.5, high, low).to(grid.scale.dtype)
    factors = whole.upper, whole.pivots, whole.order
    worse = output_errors(target, found, *factors) > output_errors(target, nearest, *factors)
    return torch.where(worse[:, None], nearest, found)


def _stepped(
    soft: torch.Tensor, slope: torch.Tensor, moments: tuple[torch.Tensor, torch.Tensor], step: int
) -> torch.Tensor:
    """Return ``soft`` after a step of Adam, whose moments are updated."""
    first, second = moments
    first.mul_(_MOMENTUM).add_(slope * (1 - _MOMENTUM))
    second.mul_(_SQUARES).add_(slope * slope * (1 - _SQUARES))
    mean = first / (1 - _MOMENTUM ** (step + 1))
    spread = (second / (1 - _SQUARES ** (step + 1))).sqrt()
    return (soft - _RATE * mean / (spread + 1e-8)).clamp(0.0, 1.0)


def _power(x: torch.Tensor, power: int) -> torch.Tensor:
    """Return a power by products, whose rounding is the same everywhere."""
    found = x
    for _ in range(power - 1):
        found = found * x
    return found


def _sides(target: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the nearest value and both neighbors, equal beyond the ends.

    nearest: of the dtype of the grid's scale; the others are float64.
    """
    own, zeros, offsets = (each[:, grid.block_of] for each in (grid.scale, grid.all_zeros, grid.all_offsets))
    scale, zero, offset = own.double(), zeros.double(), offsets.double()
    unit = torch.where(scale == 0, 0.0, (target.double() - offset) / scale) + zero
    level = torch.searchsorted(grid.levels, unit.contiguous(), right=True)
    last = len(grid.levels) - 1
    below, above = (level - 1).clamp(0, last), level.clamp(0, last)
    if grid.has_steps:
        near = (unit.clamp(grid.levels[0], grid.levels[-1]).round() - grid.levels[0]).long()
    else:
        near = torch.searchsorted(grid.bounds, unit.contiguous())

    def value(at: torch.Tensor) -> torch.Tensor:
        whole = (grid.levels[at] - zero).to(grid.scale.dtype)
        return whole * own + offsets

    return value(near), value(below).double(), value(above).double()


METHOD = ErrorFeedback(
    name="adaround",
    formula="min over h in [0, 1] of (w - q) H (w - q)^T + pull of h to 0 or 1, q = low + h (high - low)",
    source="AdaRound (arXiv:2004.10568), on the Gram matrix of the inputs",
    refine=_softly,
    limit=Bound.NONE,
)
