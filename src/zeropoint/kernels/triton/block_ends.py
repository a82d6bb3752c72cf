"""Extremes of blocks, from a kernel on segments of rows."""

from __future__ import annotations

import math

import torch

from ...errors import NonFiniteError
from ...layout.blocks import reduce_blocks, signed_largest
from ...ops import reference
from ...params.arithmetic import Ranges
from ...schemes import Granularity
from .segmentation import Segments, segments_of
from .specialization import of_extremes
from .starts import Start, bits

Ends = tuple[float, float] | None
"""Extremes of the tensor that a tensor is a part of."""
_Range = tuple[torch.Tensor, torch.Tensor]


def block_ends(x: torch.Tensor, granularity: Granularity, extremes: Ends) -> _Range:
    """Return the extremes of each block, float32; raises NonFiniteError."""
    whole = reference.whole_range(x, granularity, extremes)
    if whole is not None:
        return whole
    shape = tuple(x.shape)
    # A block that spans rows has a segment in each row; torch reduces their extremes.
    *lead, block = granularity.block_shape(shape) or (1,)
    cut = segments_of(Granularity.block(*[1] * len(lead), block), shape, 8)
    assert isinstance(cut, Segments)
    low, high = torch.empty((2, cut.cut.segments), dtype=torch.float32, device=x.device)
    Start("segments.segment_extremes", cut, of_extremes(cut.shape, x.device))(bits(x), low, high)
    if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
        reference.require_finite(x)
        raise NonFiniteError("statistics of a finite tensor are not finite")
    return _over(low, shape, granularity, cut, "amin"), _over(high, shape, granularity, cut, "amax")


def _over(
    values: torch.Tensor, shape: tuple[int, ...], granularity: Granularity, cut: Segments, kind: str
) -> torch.Tensor:
    """Reduce the extremes of segments to extremes of blocks."""
    fill = math.inf if kind == "amin" else -math.inf
    if not shape:
        return values.reshape(())
    parts = -(-cut.cut.block // cut.cut.length)  # segments of a block along the row
    lead = granularity.block_shape(shape)[:-1]
    return reduce_blocks(
        values.reshape(*shape[:-1], cut.cut.per_row), Granularity.block(*lead, parts), kind, fill
    )


def ranges_of(found: list[_Range], x: torch.Tensor, largest: torch.Tensor | None = None) -> Ranges:
    """Return the extremes of the blocks of all levels, finest first."""
    lows, highs = zip(*found, strict=True)
    return Ranges(
        minimum=tuple(lows), maximum=tuple(highs), dtype=x.dtype, shape=tuple(x.shape), largest=largest
    )


def largest_of(x: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """Find each block's number of largest magnitude, float32, first of equals."""
    shape = tuple(x.shape)
    cut = segments_of(granularity, shape, 8)
    if isinstance(cut, str) or not cut.own:
        return signed_largest(x, granularity).float()
    found = torch.empty(granularity.grid(shape), dtype=torch.float32, device=x.device)
    Start("segments.segment_largest", cut, of_extremes(cut.shape, x.device))(bits(x), found)
    return found
