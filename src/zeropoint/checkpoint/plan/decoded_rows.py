"""Decode rows of codes to floats, expert by expert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ...functional import dequantize
from ..read.decoding import alignment, read_rows
from ..read.quantized_layers import StoredLayer
from ..read.storage import OpenFile, Place


def bytes_of(out: torch.Tensor) -> memoryview:
    """Return the bytes of rows, which are written through."""
    return memoryview(out.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def by_expert(start: int, out: torch.Tensor, height: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield each expert from row ``start``, its first row, its output rows."""
    done = 0
    while done < len(out):
        expert, first = divmod(start + done, height)
        count = min(len(out) - done, height - first)
        yield expert, first, out[done : done + count]
        done += count


def decode(layer: StoredLayer, files: Mapping[Place, OpenFile], start: int, out: torch.Tensor) -> None:
    """Fill ``out`` with the decoded rows from ``start`` on."""
    height, step = layer.shape[0], alignment(layer)
    for expert, first, part in by_expert(start, out, height):
        begin, end = first // step * step, min(height, -(-(first + len(part)) // step) * step)
        q = read_rows(layer, files, begin, end - begin, expert=expert)
        if end - begin == len(part):
            dequantize(q, out=part)
        else:
            part.copy_(q.dequantize(out.dtype)[first - begin : first - begin + len(part)])
