"""Some rows of a quantized layer, read from its file and decoded."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..codecs.compressed_tensors import decode, row_alignment, tensor_specs
from ..codecs.safetensors_dtypes import TORCH_DTYPES
from ..tensor import QuantizedTensor
from .storage import OpenFile, Place
from .stored import StoredLayer


def read_lines(
    layer: StoredLayer, files: Mapping[Place, OpenFile], start: int, rows: int, *, expert: int = 0
) -> dict[str, torch.Tensor]:
    """Return, by suffix, the lines of a layer's tensors that belong to ``rows`` rows from row ``start`` on.

    files: all its files, open. start: a multiple of the scheme's row alignment, as ``rows`` is
    unless they are the last. expert: the matrix to read, of fused experts. Raises CheckpointError when a file
    is shorter than its header said.
    """
    found = {}
    for spec in tensor_specs(layer.weight, layer.layout, layer.shape, layer.dtype):
        entry = layer.tensors[spec.suffix]
        size = entry.nbytes // (layer.experts or 1)
        line = size // max(1, spec.shape[0])
        first, count = 0, spec.shape[0]
        if spec.lines:
            first, count = start // spec.rows * spec.lines, -(-rows * spec.lines // spec.rows)
        buffer = bytearray(count * line)
        offset = entry.begin + expert * size + first * line
        files[entry.file].read_into(memoryview(buffer), offset)
        lines = torch.frombuffer(buffer, dtype=TORCH_DTYPES[entry.dtype]).view(count, *spec.shape[1:])
        found[spec.suffix] = lines.to(TORCH_DTYPES[spec.dtype])
    return found


def read_rows(
    layer: StoredLayer, files: Mapping[Place, OpenFile], start: int, rows: int, *, expert: int = 0
) -> QuantizedTensor:
    """Return rows of a layer in codes, aligned as :func:`read_lines` says; parameters are not judged here."""
    lines = read_lines(layer, files, start, rows, expert=expert)
    return decode(layer.layout, lines, layer.weight, shape=(rows, layer.shape[1]), dtype=layer.dtype)


def alignment(layer: StoredLayer) -> int:
    """Return the rows of which a part must be a multiple to be read without others beside it."""
    return min(row_alignment(layer.weight), layer.shape[0])
