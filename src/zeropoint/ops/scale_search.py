"""Search of scales and zero points of least error.

    minimize over s, z:   sum_i w_i |dequantize(quantize(x_i; s, z)) - x_i| ** p        for each block

Rules that search and methods of least squares use it. Each block is searched by itself, from the scale of the
rule's start, and changed only where its error gets smaller. Errors are computed from decoded values in the
wide dtype, as float64, and their powers are added pairwise
(:func:`zeropoint.layout.blocks.pairwise_sums`): the order follows from the block alone, so that every
tile, thread count and backend finds the same scales. Of equal errors the start wins, else the smallest scale.

:mod:`.window_search` tries all scales that can be best, where they are positive and have no zero point;
:mod:`.stepwise_search` searches the others. Offsets, and an outer scale of the whole tensor, stay as they
are: rows are independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import EllipsisType

import torch

from ..formats.torch_dtypes import wide_dtype
from ..layout.blocks import reduce_blocks, spread_grid
from ..params import QuantizationParams
from ..params.arithmetic import finest_scales
from ..params.effective import effective_scale
from ..params.scale_windows import has_window
from ..params.tensors import granularities
from ..schemes import Granularity, Scheme
from .block_errors import Decode, Piece
from .stepwise_search import StepwiseSearch
from .window_search import WindowSearch, picked

WHOLE_BYTES = 48
"""Memory of each value where one scale is shared by all of them, which are then searched at once."""
PIECE = 1 << 16
"""Values that are searched at once, whose temporaries stay in cache."""
_ALL = 1 << 62
"""Height of a block that has all rows of any weight."""


def chosen(
    x: torch.Tensor, scheme: Scheme, stored: Sequence[torch.Tensor], decode: Decode
) -> list[torch.Tensor]:
    """Return the parameters that the scheme's rule picks, from its start."""
    rule, params = scheme.search, QuantizationParams.of(scheme, tuple(x.shape), x.dtype, list(stored))
    if rule is None or x.numel() == 0:
        return list(stored)
    if rule.factor:
        return list(_better_of_two(Piece(x=x, importance=None, decode=decode), params, rule.factor).stored)
    return list(searched(x, params, decode, power=rule.power).stored)


def searched(
    x: torch.Tensor,
    start: QuantizationParams,
    decode: Decode,
    *,
    importance: torch.Tensor | None = None,
    power: float = 2.0,
) -> QuantizationParams:
    """Return parameters of least error for ``x`` that are found from ``start``.

    importance: weights of the errors, float64, broadcast against ``x``; all alike if None.
    """
    if x.numel() == 0:
        return start
    weights = None if importance is None else importance.expand(x.shape)
    with torch.no_grad():
        found = [
            _of_piece(
                Piece(
                    x=values,
                    importance=None if weights is None else weights[rows],
                    decode=decode,
                    power=power,
                ),
                params,
            )
            for rows, values, params in _pieces(x.detach(), start)
        ]
    return _joined(start, found)


def best_of(
    x: torch.Tensor,
    candidates: Sequence[QuantizationParams],
    decode: Decode,
    *,
    importance: torch.Tensor | None = None,
) -> QuantizationParams:
    """Return each block's best finest scale, of equals the first.

    importance: as of :func:`searched`.
    """
    found, weights = [], None if importance is None else importance.expand(x.shape)
    with torch.no_grad():
        for pieces in zip(*(_pieces(x.detach(), params) for params in candidates), strict=True):
            rows, values, _ = pieces[0]
            own = None if weights is None else weights[rows]
            piece = Piece(x=values, importance=own, decode=decode)
            found.append(_best_of_piece(piece, [params for _, _, params in pieces]))
    return _joined(candidates[0], found)


def searched_levels(scheme: Scheme) -> list[int]:
    """Return the searched levels, coarsest first, without an outer tensor scale."""
    last = len(scheme.scales) - 1
    fixed = last > 0 and scheme.scales[last].granularity == Granularity.tensor()
    count = last if fixed else last + 1
    return [0] if scheme.search is not None else list(reversed(range(count)))


def _of_piece(piece: Piece, params: QuantizationParams) -> QuantizationParams:
    for index in searched_levels(params.scheme):
        windowed = index == 0 and has_window(params.scheme)
        params = WindowSearch(piece, params).run() if windowed else StepwiseSearch(piece, params, index).run()
    return params


def _better_of_two(piece: Piece, params: QuantizationParams, factor: float) -> QuantizationParams:
    """Return ``params`` with scales ``factor`` times larger where that is better."""
    scheme, x, blocks = params.scheme.start, piece.x, params.scheme.granularity
    coarser = None
    if len(scheme.scales) > 1:
        tail = replace(scheme, scales=scheme.scales[1:])
        coarser = effective_scale(tail, params.scales[1:], params.shape, x.dtype)
        assert coarser is not None
        coarser = spread_grid(coarser, tail.granularity, blocks, params.shape)
    amax = reduce_blocks(x.abs(), blocks, "amax", 0.0).to(wide_dtype(x.dtype))
    other = finest_scales(scheme, amax, coarser, x.dtype, factor=factor)
    return _best_of_piece(piece, [params, replace(params, scales=(other, *params.scales[1:]))])


def _best_of_piece(piece: Piece, candidates: Sequence[QuantizationParams]) -> QuantizationParams:
    best, blocks = candidates[0], candidates[0].scheme.granularity
    least = piece.errors(best, blocks)
    for params in candidates[1:]:
        error = piece.errors(params, blocks)
        scale = picked(error < least, params.scales[0], best.scales[0])
        best, least = replace(best, scales=(scale, *best.scales[1:])), torch.minimum(error, least)
    return best


def _heights(scheme: Scheme, shape: tuple[int, ...]) -> list[int]:
    """Return each parameter's block height along the first axis, or _ALL."""
    return [blocks.block_shape((_ALL, *shape[1:]))[0] for blocks in granularities(scheme)]


def _pieces(
    x: torch.Tensor, params: QuantizationParams
) -> Iterator[tuple[slice | EllipsisType, torch.Tensor, QuantizationParams]]:
    """Yield slices of the first axis, parts of whole blocks, and parameters."""
    shape, scheme = tuple(x.shape), params.scheme
    if not shape:
        yield ..., x, params
        return
    heights = _heights(scheme, shape)
    step = math.lcm(*(heights[index] for index in searched_levels(scheme)))
    step *= max(1, PIECE // max(1, step * math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])

        def own(tensor: torch.Tensor, height: int, start: int = start, stop: int = stop) -> torch.Tensor:
            return tensor if height == _ALL else tensor[start // height : -(-stop // height)]

        stored = list(map(own, params.stored, heights))
        part = QuantizationParams.of(scheme, (stop - start, *shape[1:]), params.dtype, stored)
        yield slice(start, stop), x[start:stop], part


def _joined(whole: QuantizationParams, parts: list[QuantizationParams]) -> QuantizationParams:
    """Return a tensor's parameters from its pieces."""
    if len(parts) == 1:
        return parts[0]
    heights = _heights(whole.scheme, whole.shape)
    stored = [
        values if height == _ALL else torch.cat([part.stored[index] for part in parts])
        for index, (values, height) in enumerate(zip(whole.stored, heights, strict=True))
    ]
    return QuantizationParams.of(whole.scheme, whole.shape, whole.dtype, stored)
