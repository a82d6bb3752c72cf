"""The checkpoint that was quantized, as what the result is compared with: floats by module and name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..codecs.safetensors_dtypes import TORCH_DTYPES
from .experts import matrices
from .origin import Floats, Origin, as_floats
from .selection import is_fused_experts, module_of
from .source import Source, open_source
from .storage import OpenFile, Place
from .stored import Known, StoredLayer, configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalWeight:
    """Some whole rows of a tensor of floats: one matrix of those that it holds. first: its first row."""

    origin: Origin
    first: int
    shape: tuple[int, int]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of floats."""
        return self.shape[1] * self.origin.dtype.itemsize

    def read(self, files: Mapping[Place, OpenFile], start: int, rows: int, buffer: bytearray) -> torch.Tensor:
        """Return rows from row ``start`` of the matrix on, in ``buffer``."""
        return self.origin.read(files, self.first + start, rows, buffer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Original:
    """A checkpoint seen as floats.

    source: as it lies in its files. floats: seen as if it were not quantized. matrices: by module, every
    matrix that may have been quantized. fused: by module, all experts of a layer, one below the other.
    """

    source: Source
    floats: Floats
    matrices: Mapping[str, OriginalWeight]
    fused: Mapping[str, OriginalWeight]

    def weight_of(self, layer: StoredLayer) -> OriginalWeight | None:
        """Return what a layer was quantized from, or None where nothing has its name and shape."""
        weight = (self.matrices if layer.experts is None else self.fused).get(layer.module)
        rows, columns = (layer.experts or 1) * layer.shape[0], layer.shape[1]
        return weight if weight is not None and weight.shape == (rows, columns) else None

    def known(self) -> dict[str, Known]:
        """Return shape and dtype of each weight by module."""
        return {
            module: Known(shape=weight.shape, dtype=weight.origin.dtype)
            for module, weight in self.matrices.items()
        }


def open_original(path: Place | str) -> Original:
    """Open the checkpoint that was quantized, be it of floats or itself of codes that are read here.

    Raises CheckpointError, UnsupportedError.
    """
    source = open_source(path)
    if configuration(source) is None:
        seen = Floats(source=source, origins={}, config=None)
    else:
        seen = as_floats(source)
    found: dict[str, OriginalWeight] = {}
    fused: dict[str, OriginalWeight] = {}
    for entry in seen.source.entries.values():
        if entry.dtype not in TORCH_DTYPES or not (len(entry.shape) == 2 or is_fused_experts(entry)):
            continue
        origin = seen.origin(entry)
        row_bytes = max(1, entry.shape[-1] * origin.dtype.itemsize)
        if is_fused_experts(entry):
            shape = (entry.nbytes // row_bytes, entry.shape[-1])
            fused[module_of(entry.name)] = OriginalWeight(origin=origin, first=0, shape=shape)
        for matrix in matrices(entry):
            first = (matrix.begin - entry.begin) // row_bytes
            found[matrix.module] = OriginalWeight(origin=origin, first=first, shape=matrix.shape)
    return Original(source=source, floats=seen, matrices=found, fused=fused)
