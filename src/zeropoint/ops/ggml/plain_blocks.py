"""Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, TQ2_0, Q2_0: float16 scale and minimum."""

from __future__ import annotations

import torch

from ...formats.division import divided
from .block_columns import SUPER, Importance, Stored, columns, halves, patterns, weighted
from .float_steps import extremes, half_away, inverse, largest, truncated
from .searches import IMPORTANT, scale_and_minimum, signed_scale

BLOCK = 32


def symmetric(x: torch.Tensor, importance: Importance, top: int) -> Stored:
    """Q4_0 and Q5_0: largest magnitude has code ``-top``, or a search."""
    blocks = columns(x, BLOCK)
    if importance is None:
        scale = divided(largest(blocks)[1], -top)
        codes = (truncated(blocks * inverse(scale) + (top + 0.5)) & 0xFF).clamp(max=2 * top - 1) - top
    else:
        scale, codes = signed_scale(blocks, weighted(x, importance, BLOCK, x.shape[1]), top)
    return patterns(codes, len(x), 2 * top - 1), [halves(scale, len(x))]


def affine(x: torch.Tensor, importance: Importance, top: int) -> Stored:
    """Q4_1 and Q5_1: codes from minimum to maximum, or a search."""
    blocks = columns(x, BLOCK)
    if importance is None:
        minimum, maximum = extremes(blocks)
        scale = divided(maximum - minimum, top)
        codes = (truncated((blocks - minimum) * inverse(scale) + 0.5) & 0xFF).clamp(max=top)
    else:
        weights = weighted(x, importance, BLOCK, x.shape[1])
        scale, negated, codes = scale_and_minimum(blocks, weights, IMPORTANT._replace(top=top))
        minimum = -negated
    return patterns(codes, len(x), top), [halves(scale, len(x)), halves(minimum, len(x))]


def eight_bits(x: torch.Tensor, _importance: Importance) -> Stored:
    """Q8_0: the largest magnitude has the code 127."""
    blocks = columns(x, BLOCK)
    scale = divided(blocks.abs().amax(0), 127)
    codes = truncated(half_away(blocks * inverse(scale)))
    return patterns(codes, len(x), 0xFF), [halves(scale, len(x))]


def ternary(x: torch.Tensor, _importance: Importance, block: int = SUPER) -> Stored:
    """TQ2_0, and 64-value Q2_0: the largest magnitude has code ±1."""
    blocks = columns(x, block)
    scale = blocks.abs().amax(0)
    codes = half_away(blocks * inverse(scale))
    codes = torch.where(codes.isfinite(), codes, 0.0).to(torch.int32) + 1
    return patterns(codes, len(x), 3), [halves(scale, len(x))]
