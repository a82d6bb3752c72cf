"""Blocks of a tensor: reductions over each, and broadcasts back to elements.

Plain torch, any device. This module knows granularities and nothing of what the values mean.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import ShapeError
from ..schemes import Granularity


def reduce_blocks(x: torch.Tensor, granularity: Granularity, kind: str, fill: float) -> torch.Tensor:
    """Return "amax" or "amin" of each block, shaped like the grid.

    ``fill`` pads the last, short block of an axis and must be neutral for ``kind``.
    """
    split, axes = _split(x, granularity, fill)
    if not axes or split.numel() == 0:
        return split.reshape(granularity.grid(tuple(x.shape)))
    return torch.amax(split, axes) if kind == "amax" else torch.amin(split, axes)


def sum_blocks(x: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """Return the sum of each block, shaped like the grid.

    >>> sum_blocks(torch.ones(2, 5), Granularity.group(3))
    tensor([[3., 2.],
            [3., 2.]])
    """
    split, axes = _split(x, granularity, 0.0)
    return split.sum(axes) if axes else x


def pairwise_sums(x: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """Return block sums in an order that follows from the block alone.

    ``torch.sum`` may add in another order in a tensor of more blocks, or on more threads; here the two halves
    of a block are added, then the halves of the result.

    >>> pairwise_sums(torch.ones(2, 5), Granularity.group(3))
    tensor([[3., 2.],
            [3., 2.]])
    """
    split, axes = _split(x, granularity, 0.0)
    grid = granularity.grid(tuple(x.shape))
    if not axes or split.numel() == 0:
        return split.sum(axes).reshape(grid) if axes else split.reshape(grid)
    values = split.movedim(axes, tuple(range(-len(axes), 0))).reshape(*grid, -1)
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        rest = values[..., 2 * half :]
        values = values[..., :half] + values[..., half : 2 * half]
        if rest.shape[-1]:
            values = torch.cat((values, rest), -1)
    return values[..., 0]


def block_rows(x: torch.Tensor, granularity: Granularity, fill: float) -> torch.Tensor:
    """Return blocks as rows, (blocks, block size), padded with ``fill``.

    >>> block_rows(torch.arange(5), Granularity.group(3), -1)
    tensor([[ 0,  1,  2],
            [ 3,  4, -1]])
    """
    split, axes = _split(x, granularity, fill)
    if not axes:
        return split.reshape(1, 1)
    inner = tuple(range(-len(axes), 0))
    return split.movedim(axes, inner).reshape(math.prod(granularity.grid(tuple(x.shape))), -1)


def from_block_rows(rows: torch.Tensor, granularity: Granularity, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of ``shape`` from its blocks; the inverse of :func:`block_rows`."""
    if not shape:
        return rows.reshape(())
    grid, whole = granularity.grid(shape), granularity.block_shape(shape)
    extents = [min(extent, max(1, length)) for extent, length in zip(whole, shape, strict=True)]
    inner = tuple(range(-len(shape), 0))
    split = rows.reshape(*grid, *extents).movedim(inner, tuple(range(1, 2 * len(shape), 2)))
    result = split.reshape([count * extent for count, extent in zip(grid, extents, strict=True)])
    return result[tuple(slice(length) for length in shape)]


def _split(x: torch.Tensor, granularity: Granularity, fill: float) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the padded tensor with axes cut into blocks, and inner axes."""
    shape = tuple(x.shape)
    # A block may be larger than its axis; it is not padded past the axis' own length.
    whole, grid = granularity.block_shape(shape), granularity.grid(shape)
    extents = [min(extent, max(1, length)) for extent, length in zip(whole, shape, strict=True)]
    padding = [extent * count - length for length, extent, count in zip(shape, extents, grid, strict=True)]
    if any(padding):
        x = torch.nn.functional.pad(x, [p for pad in reversed(padding) for p in (0, pad)], value=fill)
    split = [side for count, extent in zip(grid, extents, strict=True) for side in (count, extent)]
    return x.reshape(split), tuple(range(1, 2 * len(shape), 2))


def spread_blocks(values: torch.Tensor, granularity: Granularity, shape: tuple[int, ...]) -> torch.Tensor:
    """Return block values that broadcast against a tensor of ``shape``."""
    extents, grid = granularity.block_shape(shape), granularity.grid(shape)
    result = values.reshape(grid)
    for axis, (length, extent, count) in enumerate(zip(shape, extents, grid, strict=True)):
        if extent > 1 and count > 1:
            result = result.repeat_interleave(extent, axis).narrow(axis, 0, length)
    return result


def spread_grid(
    values: torch.Tensor, coarse: Granularity, fine: Granularity, shape: tuple[int, ...]
) -> torch.Tensor:
    """Return one value a fine block, from the coarse block around it.

    Raises ShapeError unless coarse blocks are unions of fine ones.
    """
    result = values.reshape(coarse.grid(shape))
    wide, narrow, counts = coarse.block_shape(shape), fine.block_shape(shape), fine.grid(shape)
    for axis, (big, small, count) in enumerate(zip(wide, narrow, counts, strict=True)):
        if result.shape[axis] > 1:
            if big % small:
                raise _not_nested(coarse, fine, shape)
            result = result.repeat_interleave(-(-big // small), axis).narrow(axis, 0, count)
    return result.expand(counts)


def blocks_of_blocks(coarse: Granularity, fine: Granularity, shape: tuple[int, ...]) -> Granularity:
    """Return coarse blocks as blocks of the grid of fine ones.

    Raises ShapeError unless coarse blocks are unions of fine ones.
    """
    wide, narrow, counts = coarse.block_shape(shape), fine.block_shape(shape), coarse.grid(shape)
    if any(count > 1 and big % small for big, small, count in zip(wide, narrow, counts, strict=True)):
        raise _not_nested(coarse, fine, shape)
    sides = zip(wide, narrow, strict=True)
    return Granularity.block(*(-(-big // small) for big, small in sides)) if shape else Granularity.tensor()


def _not_nested(coarse: Granularity, fine: Granularity, shape: tuple[int, ...]) -> ShapeError:
    return ShapeError(
        f"blocks of {coarse} must be made of whole blocks of {fine} in a tensor of shape {shape}"
    )


def signed_largest(x: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """Return each block's number of largest magnitude, the first of equals.

    >>> signed_largest(torch.tensor([1.0, -3.0, 3.0, 2.0]), Granularity.group(2))
    tensor([-3.,  3.])
    """
    shape, flat = tuple(x.shape), x.reshape(-1)
    if not flat.numel():
        return reduce_blocks(x, granularity, "amax", 0.0)
    largest = reduce_blocks(x.abs(), granularity, "amax", 0.0)
    place = torch.arange(flat.numel(), device=x.device).reshape(shape)
    place = torch.where(x.abs() == spread_blocks(largest, granularity, shape), place, flat.numel() - 1)
    return flat[reduce_blocks(place, granularity, "amin", flat.numel() - 1).reshape(-1)].reshape(
        largest.shape
    )


def mean_blocks(x: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """Return the float64 mean of each block, from exact, order-independent sums."""
    grid = granularity.grid(tuple(x.shape))
    if x.numel() == 0:
        return torch.zeros(grid, dtype=torch.float64, device=x.device)
    counts = block_rows(torch.ones_like(x, dtype=torch.float64), granularity, 0.0).sum(1).tolist()
    rows = block_rows(x.double(), granularity, 0.0).cpu().numpy()
    means = [_mean(row, count) for row, count in zip(rows, counts, strict=True)]
    return torch.tensor(means, dtype=torch.float64, device=x.device).reshape(grid)


def _mean(row: npt.NDArray[Any], count: float) -> float:
    """Return the mean of a row's first numbers; the rest is zero."""
    total = exact_sum(row)
    if math.isinf(total) and np.isfinite(row).all():  # the mean of numbers is no larger than they are
        return float(sum(map(Fraction, row)) / int(count))
    return total / count


def exact_sum(values: npt.NDArray[Any]) -> float:
    """Return the sum of float32 or float64 numbers, rounded once; overflow: Inf.

    Sums of 4096 numbers of which each is a multiple of the same power of two, and below 2 ** 41 times it, are
    exact in float64: float32 numbers within sixteen binary orders of magnitude are.
    """
    with np.errstate(over="ignore"):
        short = values.dtype == np.float32 or bool((values.astype(np.float32) == values).all())
    if len(values) <= _FEW or not short:
        parts = values
    else:
        size, cuts = np.abs(values), np.arange(0, len(values), _FEW)
        least = size.min() or size.min(where=size > 0, initial=np.inf)
        band = np.zeros(1, np.int64) if size.max() < least * 2.0**15 else np.frexp(values)[1] >> 4
        kept = (values if band.size == 1 else np.where(band == each, values, 0.0) for each in np.unique(band))
        parts = np.concatenate([np.add.reduceat(part, cuts, dtype=np.float64) for part in kept])
    try:
        return math.fsum(parts)
    except OverflowError:
        return math.inf


_FEW = 4096


def row_mapping(
    lead: tuple[int, ...], extents: tuple[int, ...], grid: tuple[int, ...]
) -> tuple[int, int] | None:
    """Return div and mod that map rows to parameter rows, or None."""
    rows = math.prod(lead)
    shared = [axis for axis, count in enumerate(grid) if count > 1]
    if not shared:
        return max(1, rows), 1
    first, last = shared[0], shared[-1]
    for axis in range(first, last + 1):
        split = extents[axis] > 1
        if split and (
            axis != last or (lead[axis] % extents[axis] and axis != 0 and math.prod(lead[:axis]) > 1)
        ):
            return None
    return math.prod(lead[last + 1 :]) * extents[last], math.prod(grid[first : last + 1])
