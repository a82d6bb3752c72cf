"""Rows, columns and joins of matrices in codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ...errors import UnsupportedError
from ...layout.packing import packed_length
from ...params import QuantizationParams
from ...params.tensors import granularities
from ...schemes import Granularity, Scheme
from ...tensor import QuantizedTensor


def extents(scheme: Scheme, shape: tuple[int, int], axis: int) -> list[int]:
    """Return the block lengths of all split parameters along an axis."""
    found = (each for each in granularities(scheme) if each.grid(shape)[axis] > 1)
    return [each.block_shape(shape)[axis] for each in found]


def rows_of(q: QuantizedTensor, rows: torch.Tensor) -> QuantizedTensor:
    """Return some rows of codes; raises UnsupportedError for shared parameters."""
    if any(len(numbers) not in (1, q.shape[0]) for numbers in q.params.stored):
        raise UnsupportedError(f"rows in another order than in the file share a scale in {q.scheme}")
    stored = [numbers if len(numbers) == 1 else numbers[rows] for numbers in q.params.stored]
    params = QuantizationParams.of(q.scheme, (len(rows), q.shape[1]), q.params.dtype, stored)
    return replace(q, data=q.data[rows], params=params, shape=(len(rows), q.shape[1]))


def under_one_scale(q: QuantizedTensor) -> QuantizedTensor:
    """Replace the equal block scales of codes by one tensor scale."""
    (level,) = q.scheme.scales
    scheme = replace(q.scheme, scales=(replace(level, granularity=Granularity.tensor()),))
    scale = q.params.stored[0].flatten()[:1].clone()
    return replace(q, params=QuantizationParams.of(scheme, q.shape, q.params.dtype, [scale]))


def columns_of(q: QuantizedTensor, start: int, count: int) -> QuantizedTensor:
    """Return columns of whole blocks and bytes of a matrix in codes."""
    bits, (rows, _), stored = q.scheme.bits, q.shape, []
    for found, numbers in zip(granularities(q.scheme), q.params.stored, strict=True):
        grid, width = found.grid(q.shape), found.block_shape(q.shape)[1]
        whole = numbers.reshape(grid)
        stored.append(whole[:, start // width : -(-(start + count) // width)] if grid[1] > 1 else whole)
    data = q.data.view(rows, -1)[:, packed_length(start, bits) : packed_length(start + count, bits)]
    params = QuantizationParams.of(q.scheme, (rows, count), q.params.dtype, stored)
    return replace(q, data=data, params=params, shape=(rows, count))


def stacked(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Return matrices of codes, in whole blocks, joined along the rows."""
    first = parts[0]
    shape = (sum(part.shape[0] for part in parts), first.shape[1])
    stored = [
        _joined(several) if found.grid(shape)[0] > 1 else several[0].contiguous()
        for found, several in zip(
            granularities(first.scheme),
            zip(*(part.params.stored for part in parts), strict=True),
            strict=True,
        )
    ]
    params = QuantizationParams.of(first.scheme, shape, first.params.dtype, stored)
    return replace(first, data=_joined([part.data for part in parts]), params=params, shape=shape)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the rows of all parts; 8-bit floats are joined as bytes."""
    dtype = parts[0].dtype
    if dtype.itemsize > 1:
        return torch.cat(list(parts))
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts]).view(dtype)
