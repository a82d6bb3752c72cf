"""Largest NVFP4 block scales, which tell how they were chosen.

Below a scale for the tensor that is fitted to the largest magnitude, the block of that magnitude has the
largest scale of the format. Four over six (arXiv:2512.02010) leaves room for scales that are half as large
again, so that it is 256 there, and no scale is above 384.
"""

from __future__ import annotations

import contextlib
import itertools
import math

import torch

from ...schemes.scale_rules import FOUR_OVER_SIX
from ..read.quantized_layers import StoredLayer, StoredLayers
from ..read.tensor_entries import TensorEntry
from .proofs import OpenFiles

_LAYERS, _BYTES = 16, 1 << 26
"""Layers whose scales are looked at, and most bytes of these; layers that share one lie close together."""
_ROOM = FOUR_OVER_SIX.factor
_USUAL = torch.finfo(torch.float8_e4m3fn).max
_LEAST = 2.0 ** math.floor(math.log2(_USUAL / _ROOM))


def room_left(stored: StoredLayers) -> str | None:
    """Return a sentence for scales with four over six's room, or None."""
    scales = list(itertools.islice(filter(None, map(_block_scales, stored.layers)), _LAYERS))
    if not scales or sum(entry.nbytes for entry in scales) > _BYTES:
        return None
    with contextlib.ExitStack() as stack:
        files = OpenFiles(stack)
        largest = max(_largest(entry, files) for entry in scales)
    if not _LEAST <= largest <= _LEAST * _ROOM:
        return None
    return (
        f"scales of NVFP4 blocks are at most {largest:g} of {_USUAL:g}, which leaves the room of four over "
        "six (scale=four_over_six)"
    )


def _block_scales(layer: StoredLayer) -> TensorEntry | None:
    """Return a layer's block scales under a tensor scale, or None."""
    if len(layer.weight.scales) < 2:
        return None
    found = (e for e in layer.tensors.values() if e.dtype == "F8_E4M3" and e is not layer.codes)
    return next((entry for entry in found if entry.nbytes), None)


def _largest(entry: TensorEntry, files: OpenFiles) -> float:
    raw = bytearray(entry.nbytes)
    files[entry.file].read_into(memoryview(raw), entry.begin)
    return float(torch.frombuffer(raw, dtype=torch.float8_e4m3fn).float().max())
