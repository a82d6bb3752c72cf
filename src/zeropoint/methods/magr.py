r"""MagR: shrink each block's largest numbers where other columns compensate.

    minimize over V:   (V - W) H (V - W)^T / (2 |H|) + s sum_blocks m |V_block|_inf        m: the largest of W
    V <- prox(V - (V - W) H / |H|),        prox(v) = v - (the projection of v on the L1 ball of radius s m)

H is the Gram matrix of the inputs, damped, |H| its Frobenius norm, and a block the columns under one scale. A
block whose largest number is smaller has a smaller step. The strength s is the one of `STRENGTHS`, zero among
them, whose codes by ``gptq`` have the least error on vectors that are held out, of `ROWS` rows; zero without
such vectors.

Source: Zhang et al., MagR, arXiv:2406.00800, algorithm 1, with a strength that is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

import torch

from ..ops.feedback import product
from ..schemes import Scheme
from ..stats import GramMatrix
from .factored import factored
from .gptq import METHOD as GPTQ
from .input_statistics import statistics_of
from .method import GRAM, LayerData, Needs
from .step import Moved

STRENGTHS, STEPS, ROWS = (0.0, 0.0001, 0.0005, 0.002), 30, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrink:
    """Shrink the largest numbers of blocks."""

    name: ClassVar[str] = "magr"
    rank: ClassVar[int] = 3
    reason: ClassVar[str] = "it chooses among weights of the same outputs, and others change outputs"
    formula: ClassVar[str] = "argmin over V of (V - W) H (V - W)^T / (2 |H|) + s sum m |V|_inf over blocks"
    source: ClassVar[str] = "MagR (arXiv:2406.00800), with a strength chosen on held-out vectors"
    takes: ClassVar[Needs] = MappingProxyType({GRAM: lambda features: GramMatrix(features=features)})

    def __call__(self, weight: torch.Tensor, target: torch.Tensor, data: LayerData, scheme: Scheme) -> Moved:
        """Return the shrunk target; raises CalibrationError without statistics."""
        h = factored(statistics_of(weight, data, GRAM, GramMatrix, self.name)).damped
        if data.held_out is None:
            return Moved(target=target, note="strength 0, as nothing is held out")
        width = scheme.granularity.block_shape(tuple(weight.shape))[-1]
        few = weight[:ROWS]
        wanted = product(few.double(), data.held_out.floats.T)
        known, best, least = replace(data, extremes=None), 0.0, float("inf")
        for strength in STRENGTHS:
            moved = shrunk(target[:ROWS], h, width, strength)
            values = GPTQ.solve(few, moved, scheme, known).q.dequantize().double()
            loss = float((wanted - product(values, data.held_out.inputs.T)).square().sum())
            if loss < least:
                best, least = strength, loss
        return Moved(target=shrunk(target, h, width, best), note=f"strength {best:g}")


STEP = Shrink()


def shrunk(target: torch.Tensor, h: torch.Tensor, width: int, strength: float) -> torch.Tensor:
    """Return numbers with smaller block ends and nearly the same outputs.

    target: (rows, columns) float64. h: the damped Gram matrix. width: of a block.
    """
    if not strength:
        return target
    columns = target.shape[1]
    unit = h / h.square().sum(1).sum().sqrt()
    padded = torch.nn.functional.pad(target, (0, -columns % width)).reshape(len(target), -1, width)
    radius = strength * padded.abs().amax(-1, keepdim=True)
    found = target
    for _ in range(STEPS):
        stepped = found - product(found - target, unit)
        blocks = torch.nn.functional.pad(stepped, (0, -columns % width)).reshape(len(target), -1, width)
        found = (blocks - _on_ball(blocks, radius)).reshape(len(target), -1)[:, :columns]
    return found


def _on_ball(x: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    """Return the closest numbers whose absolute sum is at most ``radius``.

    Source: Duchi et al., Efficient projections onto the L1 ball, 2008.
    """
    size = x.abs()
    falling = size.sort(-1, descending=True).values
    over = (falling.cumsum(-1) - radius) / torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device)
    count = (falling > over).sum(-1, keepdim=True).clamp_min(1)
    cut = over.gather(-1, count - 1).clamp_min(0.0)
    return x.sign() * (size - cut).clamp_min(0.0)
