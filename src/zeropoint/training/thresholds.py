"""Initial thresholds: largest magnitude, three standard deviations, or KL-J search.

Table 2 of TQT (arXiv:1903.08066) takes the second for weights and the third for activations.
"""

from __future__ import annotations

import enum
import math

import torch

from ..errors import RangeError, SchemeError
from ..layout.blocks import reduce_blocks, spread_blocks, sum_blocks
from ..schemes import Granularity, Scheme


class ThresholdRule(enum.Enum):
    """The rule of a block's first threshold, under Quark's names too.

    Example:
        >>> ThresholdRule("_3SD")
        <ThresholdRule.THREE_SD: '3sd'>
    """

    MAX = "max"
    """The largest magnitude: nothing is clipped."""
    THREE_SD = "3sd"
    """``|mean| + 3 sd``: three standard deviations (of the population) to the farther side."""
    KL_J = "kl_j"
    """The threshold of the smallest J-distance of distributions, see :func:`kl_j_threshold`."""

    @classmethod
    def _missing_(cls, value: object) -> ThresholdRule | None:
        return {"_3SD": cls.THREE_SD, "_LL_J": cls.KL_J, "_KL_J": cls.KL_J}.get(str(value))


def threshold(x: torch.Tensor, scheme: Scheme, rule: ThresholdRule) -> torch.Tensor:
    """Return each block's first threshold, float64, on the grid.

    A block of zeros has threshold 0. Raises SchemeError for the KL-J search of more than one block, or for a
    rule that is no ThresholdRule; RangeError for an empty tensor.

    >>> threshold(torch.tensor([1.0, -3.0]), Scheme.parse("int8"), ThresholdRule.THREE_SD)
    tensor([7.], dtype=torch.float64)
    """
    if not isinstance(rule, ThresholdRule):
        raise SchemeError(
            f"rule (={rule!r}) must be a ThresholdRule; ThresholdRule('_3SD') makes one of Quark's name"
        )
    if x.numel() == 0:
        raise RangeError(f"x (shape {tuple(x.shape)}) must hold elements to find a threshold")
    granularity, wide = scheme.granularity, x.detach().double()
    if rule is ThresholdRule.MAX:
        return reduce_blocks(wide.abs(), granularity, "amax", 0.0)
    if rule is ThresholdRule.THREE_SD:
        return _three_sd(wide, granularity)
    if granularity.block_count(tuple(x.shape)) != 1:
        raise SchemeError(
            f"scheme (={scheme}) must have one block for the KL-J search, which looks at one histogram; "
            "take the rule 3sd"
        )
    element = scheme.element
    negative = element.is_integer and element.signed
    found = kl_j_threshold(wide, 1 << (scheme.bits - int(negative)))
    return torch.full(granularity.grid(tuple(x.shape)), found, dtype=torch.float64, device=x.device)


def _three_sd(x: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    count = sum_blocks(torch.ones_like(x), granularity)
    mean = sum_blocks(x, granularity) / count
    centered = x - spread_blocks(mean, granularity, tuple(x.shape))
    return mean.abs() + 3 * torch.sqrt(sum_blocks(centered.square(), granularity) / count)


def kl_j_threshold(x: torch.Tensor, levels: int) -> float:
    """Return the threshold of least J-distance after quantizing ``|x|``.

    |x| is counted in k equal bins over 0..max|x|, of width at most (max|x| - min|x|) / sqrt(numel), which
    gives a cumulative distribution P_1..P_k. A candidate threshold at bin i (levels < i <= k) saturates:
    P^i is P with 1 from position i on; its first i numbers are then interpolated linearly at as many points
    as there are levels, and back: Q^i. The threshold (i + 1/2) * width of the smallest

        J(P, Q) = sum_j (P_j - Q_j) log2(P_j / Q_j)      over P_j > 0, Q_j > 0

    is returned, the first among equals; max|x| when there are too few bins for a search.
    Source: Algorithm 1 of arXiv:1805.07941, which TQT names KL-J; bins as numpy's ``sqrt``.

    x: finite, not empty. levels: codes that are not negative, at least 2.
    """
    magnitude = x.detach().double().abs().reshape(-1).cpu()
    top = float(magnitude.max())
    width = (top - float(magnitude.min())) / math.sqrt(magnitude.numel())
    bins = math.ceil(top / width) if width > 0.0 else 1
    if top == 0.0 or levels + 1 > bins:
        return top
    counts = torch.histc(magnitude, bins, 0.0, top)
    reference = torch.cumsum(counts / counts.sum(), 0)
    distances = [_distance(reference, end, levels) for end in range(levels + 1, bins + 1)]
    best = min(range(len(distances)), key=distances.__getitem__)
    return (best + levels + 1 + 0.5) * top / bins


def _distance(reference: torch.Tensor, length: int, levels: int) -> float:
    clipped = reference.clone()
    clipped[length - 1 :] = 1.0
    quantized = clipped.clone()
    quantized[:length] = _resample(_resample(clipped[:length], levels), length)
    both = (reference > 0) & (quantized > 0)
    p, q = reference[both], quantized[both]
    return float(((p - q) * torch.log2(p / q)).sum())


def _resample(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return ``values`` interpolated linearly at ``count`` points of 0..1."""
    shape = (1, 1, -1)
    return torch.nn.functional.interpolate(
        values.reshape(shape), size=count, mode="linear", align_corners=True
    ).reshape(-1)
