r"""Low-rank part of a weight in two narrow matrices next to codes.

    W ~ A B + Q,     A B = the matrix of rank r with the least (W - A B) H (W - A B)^T
    H = R R^T,  W R = U S V^T:     A = U_r S_r^1/2,   B = S_r^1/2 V_r^T R^-1

H is the damped Gram matrix of the inputs, so that the product holds the part that moves outputs most. Steps
that follow, and the method, work on W - A B, whose range is smaller; the layer adds ``(x B^T) A^T`` to its
product. A and B have the dtype of the weight, and are rounded to it before they are subtracted. The
decomposition is torch's, whose last bits differ between processors.

Source: Li et al., SVDQuant, arXiv:2411.05007; Zhang et al., LQER, arXiv:2402.02446 (a rank for the rest).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch

from ..errors import RecipeError
from ..ops.feedback import solve
from ..schemes import Scheme
from ..stats import GramMatrix
from .factored import factored
from .input_statistics import statistics_of
from .method import GRAM, LayerData, LowRank, Needs
from .step import Moved

RANK = 32
"""The rank of SVDQuant."""
_SPELLED = re.compile(r"lowrank(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankStep:
    """Keep a product of two narrow matrices.

    width: the rank, at most.
    """

    width: int = RANK
    rank: ClassVar[int] = 4
    reason: ClassVar[str] = "steps that follow compensate for what its codes will lose"
    formula: ClassVar[str] = "W - A B, with A B of rank r and the least (W - A B) H (W - A B)^T"
    source: ClassVar[str] = "SVDQuant (arXiv:2411.05007), LQER (arXiv:2402.02446)"
    keeps: ClassVar[str] = "a product of two narrow matrices next to codes"
    takes: ClassVar[Needs] = MappingProxyType({GRAM: lambda features: GramMatrix(features=features)})

    @property
    def name(self) -> str:
        """Return the spelling."""
        return "lowrank" if self.width == RANK else f"lowrank{self.width}"

    @staticmethod
    def spelled(text: str) -> LowRankStep | None:
        """Return the step of a text, or None; RecipeError for rank 0.

        >>> LowRankStep.spelled("lowrank16").name, LowRankStep.spelled("lowrank32").name
        ('lowrank16', 'lowrank')
        """
        found = _SPELLED.fullmatch(text)
        if found is None:
            return None
        if not int(found[1]):
            raise RecipeError(f"step {text!r} keeps nothing; give it a rank, such as lowrank{RANK}")
        return LowRankStep(width=int(found[1]))

    def __call__(
        self,
        weight: torch.Tensor,
        target: torch.Tensor,
        data: LayerData,
        scheme: Scheme,  # noqa: ARG002 (as the protocol)
    ) -> Moved:
        """Return the weight without the product; CalibrationError without statistics."""
        whole = factored(statistics_of(weight, data, GRAM, GramMatrix, self.name))
        scaled = whole.upper * whole.pivots.sqrt()
        u, s, v = torch.linalg.svd(target[:, whole.order] @ scaled, full_matrices=False)
        width, root = min(self.width, len(s)), s.sqrt()
        left = (u * root)[:, :width]
        # B R = root V^T, and so B = (B R R^T) H^-1.
        ordered = (root[:, None] * v)[:width] @ scaled.T
        seen = torch.empty_like(ordered)
        seen[:, whole.order] = ordered
        right = solve(seen, whole.upper, whole.pivots, whole.order)
        kept = LowRank(left=left.to(weight.dtype), right=right.to(weight.dtype))
        return Moved(target=target - kept.product(torch.float64), note=f"rank {width}", low_rank=kept)


STEP = LowRankStep()
