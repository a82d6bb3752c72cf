"""Some rows of a quantized layer, read from its file and decoded."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..codecs.safetensors_dtypes import TORCH_DTYPES
from ..schemes import ZeroPoint
from ..tensor import QuantizedTensor
from .storage import OpenFile, Place
from .stored import StoredLayer


def read_lines(
    layer: StoredLayer, files: Mapping[Place, OpenFile], start: int, rows: int, *, expert: int = 0
) -> dict[str, torch.Tensor]:
    """Return, by part, the lines of a layer's tensors that touch ``rows`` rows from row ``start`` on.

    Lines that belong to several rows come whole, even where only some of these rows were asked for. files:
    all its files, open. expert: the matrix to read, of fused experts. Raises CheckpointError when a file is
    shorter than its header said.
    """
    found = {}
    for spec in layer.codec.tensors(layer.layer, layer.shape, layer.dtype):
        entry = layer.tensors[spec.suffix]
        size = entry.nbytes // (layer.experts or 1)
        line = size // max(1, spec.shape[0])
        first, count = 0, spec.shape[0]
        if spec.axis is not None:
            first = start // spec.per * spec.lines
            count = min(spec.shape[0], -(-(start + rows) // spec.per) * spec.lines) - first
        buffer = bytearray(count * line)
        offset = entry.begin + expert * size + first * line
        files[entry.file].read_into(memoryview(buffer), offset)
        lines = torch.frombuffer(buffer, dtype=TORCH_DTYPES[entry.dtype])
        found[spec.suffix] = lines.view(count, *spec.shape[1:])
    return found


def read_rows(
    layer: StoredLayer, files: Mapping[Place, OpenFile], start: int, rows: int, *, expert: int = 0
) -> QuantizedTensor:
    """Return rows of a layer in codes; parameters are not judged here.

    With zero points, ``start`` and ``rows`` are multiples of :func:`alignment`, unless the rows are the last.
    Rows that begin inside a block take its scale as one of their own.
    """
    lines, shape = read_lines(layer, files, start, rows, expert=expert), (rows, layer.shape[1])
    return layer.codec.decode(layer.layer, lines, start=start, shape=shape, dtype=layer.dtype)


def alignment(layer: StoredLayer) -> int:
    """Return the rows of which a part must be a multiple to be decoded without others beside it."""
    if layer.weight.zero_point is ZeroPoint.NONE:
        return 1
    return min(layer.codec.alignment(layer.layer, layer.shape), layer.shape[0])
