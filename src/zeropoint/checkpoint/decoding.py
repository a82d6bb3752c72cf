"""Some rows of a quantized layer, read from its file and decoded."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import torch

from ..codecs.compressed_tensors import SCALE, WORD_BITS, blocks, decode, tensor_specs
from ..codecs.safetensors_dtypes import TORCH_DTYPES
from ..schemes import Granularity, Scheme, ZeroPoint
from ..tensor import QuantizedTensor
from .storage import OpenFile, Place
from .stored import StoredLayer


def read_lines(
    layer: StoredLayer, files: Mapping[Place, OpenFile], start: int, rows: int, *, expert: int = 0
) -> dict[str, torch.Tensor]:
    """Return, by suffix, the lines of a layer's tensors that touch ``rows`` rows from row ``start`` on.

    Lines that belong to several rows come whole, even where only some of these rows were asked for. files:
    all its files, open. expert: the matrix to read, of fused experts. Raises CheckpointError when a file is
    shorter than its header said.
    """
    found = {}
    for spec in tensor_specs(layer.weight, layer.layout, layer.shape, layer.dtype):
        entry = layer.tensors[spec.suffix]
        size = entry.nbytes // (layer.experts or 1)
        line = size // max(1, spec.shape[0])
        first, count = 0, spec.shape[0]
        if spec.lines:
            first = start // spec.rows * spec.lines
            count = min(spec.shape[0], -(-(start + rows) // spec.rows) * spec.lines) - first
        buffer = bytearray(count * line)
        offset = entry.begin + expert * size + first * line
        files[entry.file].read_into(memoryview(buffer), offset)
        lines = torch.frombuffer(buffer, dtype=TORCH_DTYPES[entry.dtype]).view(count, *spec.shape[1:])
        found[spec.suffix] = lines.to(TORCH_DTYPES[spec.dtype])
    return found


def read_rows(
    layer: StoredLayer, files: Mapping[Place, OpenFile], start: int, rows: int, *, expert: int = 0
) -> QuantizedTensor:
    """Return rows of a layer in codes; parameters are not judged here.

    With zero points, ``start`` and ``rows`` are multiples of :func:`alignment`, unless the rows are the last.
    Rows that begin inside a block take its scale as one of their own.
    """
    lines, weight = read_lines(layer, files, start, rows, expert=expert), layer.weight
    height = blocks(weight)[0]
    if height > 1:
        each = lines[SCALE].repeat_interleave(height, 0)
        lines[SCALE] = each[start % height : start % height + rows]
        weight = _by_row(weight)
    return decode(layer.layout, lines, weight, shape=(rows, layer.shape[1]), dtype=layer.dtype)


@functools.lru_cache(maxsize=64)
def _by_row(weight: Scheme) -> Scheme:
    """Return the scheme under which each row of a block has a scale of its own."""
    rows = Granularity.group(blocks(weight)[1])
    return replace(weight, scales=(replace(weight.scales[0], granularity=rows),))


def alignment(layer: StoredLayer) -> int:
    """Return the rows of which a part must be a multiple to be decoded without others beside it."""
    return min(WORD_BITS, layer.shape[0]) if layer.weight.zero_point is not ZeroPoint.NONE else 1
