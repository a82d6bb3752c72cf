"""Bands of columns of a matrix in codes.

A file that is cut along rows is read some rows at a time, and the other columns are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ...codecs.tensor_fields import COLUMNS
from ...layout.packing import packed_length
from ...params import QuantizationParams
from ...params.tensors import granularities
from ...tensor import QuantizedTensor
from ..read.decoding import read_part
from ..read.quantized_layers import StoredLayer
from ..read.storage import OpenFile, Place
from .origin import Origin

_VALUES = 1 << 20
"""Values of whole rows that are read at once, of which columns are kept."""
_WHOLE_BYTES = 8
"""Codes of any number of bits that end where a byte ends."""


def columns_alignment(layer: StoredLayer) -> int:
    """Return the multiple for bands of columns: whole blocks and bytes."""
    own = layer.codec.alignment(layer.layer, layer.shape) if _cut_so(layer) else 1
    return math.lcm(_WHOLE_BYTES, own, *_extents(layer, COLUMNS))


def read_code_columns(
    origin: Origin, files: Mapping[Place, OpenFile], rows: range, columns: tuple[int, int]
) -> QuantizedTensor:
    """Return a band of columns, (first, count), of rows in codes.

    See :meth:`Origin.codes`. The first is a multiple of :func:`columns_alignment`, and so is the count unless
    they are the last.
    """
    layer, (start, count) = origin.layer, columns
    assert layer is not None
    if _cut_so(layer) and origin.same and rows.step == 1:
        return replace(read_part(layer, files, rows, range(start, start + count)), dtype=origin.dtype)
    height = math.lcm(origin.alignment, *_extents(layer, 0))
    step = max(1, _VALUES // max(1, layer.shape[1]) // height) * height
    pieces = (origin.codes(files, rows[at : at + step]) for at in range(0, len(rows), step))
    return _stacked([_columns_of(piece, start, count) for piece in pieces])


def _cut_so(layer: StoredLayer) -> bool:
    """Return whether the file cuts a layer along its columns."""
    return layer.codec.axis(layer.layer) == COLUMNS


def _extents(layer: StoredLayer, axis: int) -> list[int]:
    """Return the block lengths of all split parameters along an axis."""
    every = granularities(layer.weight)
    return [found.block_shape(layer.shape)[axis] for found in every if found.grid(layer.shape)[axis] > 1]


def _columns_of(q: QuantizedTensor, start: int, count: int) -> QuantizedTensor:
    """Return columns of whole blocks and bytes of a matrix in codes."""
    bits, (rows, _), stored = q.scheme.bits, q.shape, []
    for found, numbers in zip(granularities(q.scheme), q.params.stored, strict=True):
        grid, width = found.grid(q.shape), found.block_shape(q.shape)[1]
        whole = numbers.reshape(grid)
        stored.append(whole[:, start // width : -(-(start + count) // width)] if grid[1] > 1 else whole)
    data = q.data.view(rows, -1)[:, packed_length(start, bits) : packed_length(start + count, bits)]
    params = QuantizationParams.of(q.scheme, (rows, count), q.params.dtype, stored)
    return replace(q, data=data, params=params, shape=(rows, count))


def _stacked(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
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
