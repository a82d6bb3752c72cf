"""Tensors of files, and decoded rows or columns of quantized layers."""

from __future__ import annotations

import math

import torch

from ...codecs.containers.safetensors import TORCH_DTYPES
from ...codecs.tensor_fields import ROWS, WeightPart
from ...errors import UnsupportedError, printable
from ...schemes import ZeroPoint
from ...tensor import QuantizedTensor
from .quantized_layers import StoredLayer
from .storage import Files, read_bytes, read_pieces
from .tensor_entries import TensorEntry


def read_tensor(entry: TensorEntry, files: Files) -> torch.Tensor:
    """Return a tensor of a file; raises UnsupportedError for foreign dtypes."""
    if entry.dtype not in TORCH_DTYPES:
        raise UnsupportedError(f"{printable(entry.name)} is {entry.dtype}, which torch has no dtype for")
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
    buffer = read_bytes(files[entry.file], entry.begin, entry.nbytes)
    return torch.frombuffer(buffer, dtype=TORCH_DTYPES[entry.dtype]).reshape(entry.shape)


def read_lines(
    layer: StoredLayer, files: Files, start: int, rows: int, *, expert: int = 0
) -> dict[str, torch.Tensor]:
    """Return, by part, the lines that hold ``rows`` rows from ``start`` on.

    They are columns where the codec cuts weights along these. Lines that belong to several rows come whole,
    even where only some of these rows were asked for. files: all its files, open. expert: the matrix to
    read, of fused experts. Raises CheckpointError when a file is shorter than its header said.
    """
    found = {}
    for spec in layer.codec.tensors(layer.layer, layer.shape, layer.dtype):
        entry = layer.tensors.get(spec.suffix)
        if entry is None:  # one that may be left out
            continue
        size = entry.nbytes // (layer.experts or 1)
        line = size // max(1, spec.height)
        first, count = spec.span(start, rows)
        offset = entry.begin + expert * size + first * line
        buffer = read_bytes(files[entry.file], offset, count * line)
        # Blocks that hold codes and scales are bytes, which the codec takes apart.
        lines = torch.frombuffer(buffer, dtype=TORCH_DTYPES.get(entry.dtype, torch.uint8))
        found[spec.suffix] = lines.view(count, *(spec.shape[1:] if entry.dtype in TORCH_DTYPES else (-1,)))
    return found


def read_rows(layer: StoredLayer, files: Files, start: int, rows: int, *, expert: int = 0) -> QuantizedTensor:
    """Return rows of a layer in codes; parameters are not judged here.

    With zero points, ``start`` and ``rows`` are multiples of :func:`alignment`, unless the rows are the last.
    Rows that begin inside a block take its scale as one of their own.
    """
    along = layer.codec.axis(layer.layer) == ROWS
    if along:
        lines = read_lines(layer, files, start, rows, expert=expert)
    else:
        lines = _read_across(layer, files, range(start, start + rows), expert=expert)
    shape = (rows, layer.shape[1])
    return layer.codec.decode(layer.layer, lines, WeightPart(start if along else 0, shape, layer.dtype))


def read_columns(
    layer: StoredLayer, files: Files, start: int, columns: int, *, expert: int = 0
) -> QuantizedTensor:
    """Return columns of a layer cut along rows; see :func:`read_rows`."""
    lines = _read_across(layer, files, range(start, start + columns), expert=expert)
    shape = (layer.shape[0], columns)
    return layer.codec.decode(layer.layer, lines, WeightPart(0, shape, layer.dtype))


def read_part(layer: StoredLayer, files: Files, rows: range, columns: range) -> QuantizedTensor:
    """Return rows and columns, of whole blocks and words, cut along columns."""
    lines = _read_across(layer, files, rows, along=columns)
    shape = (len(rows), len(columns))
    return layer.codec.decode(layer.layer, lines, WeightPart(columns.start, shape, layer.dtype))


def _read_across(
    layer: StoredLayer, files: Files, rows: range, *, expert: int = 0, along: range | None = None
) -> dict[str, torch.Tensor]:
    """Return, by part, the rows' share of every line.

    They are columns of a weight that is cut along rows. along: the lines' values, all unless given.
    """
    found = {}
    for spec in layer.codec.tensors(layer.layer, layer.shape, layer.dtype):
        entry = layer.tensors.get(spec.suffix)
        if entry is None:
            continue
        # Blocks that hold codes and scales are bytes, which the codec takes apart.
        file, dtype = files[entry.file], TORCH_DTYPES.get(entry.dtype, torch.uint8)
        lines, per = spec.across
        # One line of a vector; of a matrix whose numbers may be runs of bytes, one for each of its rows.
        height, width, *run = spec.shape if len(spec.shape) > 1 else (1, math.prod(spec.shape))
        if entry.dtype not in TORCH_DTYPES:
            width = entry.nbytes // (layer.experts or 1) // height
        item = dtype.itemsize * math.prod(run)
        begin = entry.begin + expert * (entry.nbytes // (layer.experts or 1))
        first, count = (
            (rows.start // per * lines, -(-len(rows) // per) * lines) if len(spec.shape) > 1 else (0, width)
        )
        if along is not None and len(spec.shape) > 1:
            top, height = spec.span(along.start, len(along))
            begin += top * width * item
        elif along is not None:
            first, count = spec.span(along.start, len(along))
        size = min(count, width - first) * item
        buffer = bytearray(height * size)
        read_pieces(file, memoryview(buffer), begin + first * item, size=size, stride=width * item)
        shape = (height, -1, *run) if len(spec.shape) > 1 else spec.shape and (-1,)
        found[spec.suffix] = torch.frombuffer(buffer, dtype=dtype).view(shape)
    return found


def alignment_across(layer: StoredLayer) -> int:
    """Return the multiple for parts along the axis that is not cut."""
    specs = layer.codec.tensors(layer.layer, layer.shape, layer.dtype)
    return math.lcm(*(spec.across[1] for spec in specs))


def alignment(layer: StoredLayer) -> int:
    """Return the row multiple for decoding without other rows."""
    if layer.codec.axis(layer.layer) != ROWS:
        return alignment_across(layer)
    if layer.weight.zero_point is ZeroPoint.NONE:
        return 1
    return min(layer.codec.alignment(layer.layer, layer.shape), layer.shape[0])
