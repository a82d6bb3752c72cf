r"""GPTQ with coordinate descent: each code is chosen again, others fixed.

    minimize over q_j:  (w - q) H (w - q)^T    =>    q_j = nearest(q_j + ((w - q) H)_j / H_jj)

H is the Gram matrix of the inputs. Error feedback chooses a code before it knows those that follow; a sweep
over all columns does know them, and no step makes the error larger. It ends after `SWEEPS` sweeps, or when
one changes nothing.

Source: coordinate descent on the least squares problem of GPTQ, as in QuantEase, arXiv:2309.01885.
"""

from __future__ import annotations

import torch

from ..ops.feedback import Grid, descend
from .factored import Factored
from .gptq import ErrorFeedback

SWEEPS = 4


def _swept(target: torch.Tensor, values: torch.Tensor, whole: Factored, grid: Grid) -> torch.Tensor:
    """Return values of less error, after some sweeps."""
    return descend(target, values, whole.damped, whole.order, grid, sweeps=SWEEPS)[0]


METHOD = ErrorFeedback(
    name="descent",
    formula="gptq, then q_j = nearest(q_j + ((w - q) H)_j / H_jj) for each column, four times",
    source="QuantEase (arXiv:2309.01885), from the codes of GPTQ",
    refine=_swept,
)
