"""The original of a quantized checkpoint as floats, by module."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from ...codecs.records import Known
from ...codecs.safetensors_dtypes import TORCH_DTYPES
from ..choose.converted_layers import same_inputs
from ..choose.decisions import TensorDecision
from ..choose.expert_matrices import WeightMatrix, matrices
from ..choose.expert_stacks import with_stacks
from ..choose.selection import WEIGHT, Why, is_fused_experts
from ..plan.carried_scales import replacements
from ..plan.float_view import Floats, as_floats
from ..plan.origin import Origin
from ..plan.rescaled import folds_of, folds_text, rescaled_floats
from ..plan.rotated import rotated_floats, saved_rotation
from ..read.quantized_layers import StoredLayer, StoredLayers, configuration
from ..read.source import Source, open_source
from ..read.storage import OpenFile, Place
from ..read.tensor_entries import TensorEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalWeight:
    """Rows of a float tensor: every ``step``-th from ``first``."""

    origin: Origin
    shape: tuple[int, int]
    first: int = 0
    step: int = 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of floats."""
        return self.shape[1] * self.origin.dtype.itemsize

    def read(
        self, files: Mapping[Place, OpenFile], start: int, rows: int, buffer: bytearray | memoryview
    ) -> torch.Tensor:
        """Return rows from row ``start`` of the matrix on, in ``buffer``."""
        return self.origin.read(files, self.first + start * self.step, rows, buffer, step=self.step)

    def read_columns(
        self, files: Mapping[Place, OpenFile], start: int, count: int, buffer: bytearray
    ) -> torch.Tensor:
        """Return columns from column ``start`` of the matrix on, in ``buffer``."""
        rows = range(self.first, self.first + self.shape[0] * self.step, self.step)
        return self.origin.read_columns(files, rows, (start, count), buffer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Original:
    """A checkpoint seen as floats.

    source: as it lies in its files. floats: seen as if it were not quantized. carried: what goes with
    its layers where they were converted, by name.
    """

    source: Source
    floats: Floats
    carried: Mapping[str, Origin] = field(default_factory=dict)

    def converted(self, stored: StoredLayers) -> Original:
        """Return the original with scales and biases converted as in ``stored``."""
        made = {}
        for layer in stored.layers:
            weight, wanted = self.weight_of(layer), stored.reader.input_of(layer.module)
            found = None if weight is None else self.floats.quantized(weight.origin.entry.name)
            if weight is None or found is None:
                continue
            static = wanted is not None and found[1] is not None and same_inputs(found[1], wanted)
            made[weight.origin.entry.name] = TensorDecision(
                entry=self.floats.source.entries[weight.origin.entry.name],
                layer=replace(layer.layer, input=wanted if static else None),
                why=Why.LINEAR,
                reason="",
            )
        if not made:
            return self
        codec = stored.layers[0].codec
        more = replacements(self.floats, list(made.values()), codec, requantize=True)
        floats = self.floats.without(more.gone)
        return replace(self, floats=floats, carried={origin.entry.name: origin for origin in more.added})

    def changed(self, source: Source) -> Original:
        """Return the original with the rotation and rescaling of ``source``."""
        floats, own = self.floats, self.source
        rotation, folds = saved_rotation(source), folds_of(source)
        if rotation is not None and saved_rotation(own) is None:
            floats = rotated_floats(floats, rotation)
            own = replace(own, config=floats.source.config, config_text=floats.source.config_text)
        if folds and folds_text(folds) != folds_text(folds_of(self.source)):
            floats = rescaled_floats(floats, folds)
        return replace(self, source=own, floats=floats)

    def matrix(self, module: str) -> OriginalWeight | None:
        """Return the matrix of a module or an expert, or None."""
        for name in (f"{module}{WEIGHT}", module):
            entry = self.floats.source.entries.get(name)
            if entry is not None and len(entry.shape) == 2 and entry.dtype in TORCH_DTYPES:
                shape = (entry.shape[0], entry.shape[1])
                return OriginalWeight(origin=self.floats.origin(entry), shape=shape)
        found = OF_EXPERT.fullmatch(module)
        if found is None:
            return None
        fused = self.stack(found["holder"], found["part"])
        matrix = None if fused is None else _by_module(fused).get(module)
        return None if fused is None or matrix is None else self._weight(fused, matrix)

    def weight_of(self, layer: StoredLayer) -> OriginalWeight | None:
        """Return the original weight of a layer, or None without equal shape.

        Codes are decoded to float32, which holds each of their values that the layer may hold, too.
        """
        if layer.experts is None:
            weight = self.matrix(layer.module)
        else:
            entry = self._fused(layer.module)
            whole = [] if entry is None else matrices(entry, fused=True)
            weight = self._weight(entry, whole[0]) if entry is not None and whole else None
        rows, columns = (layer.experts or 1) * layer.shape[0], layer.shape[1]
        if weight is None or weight.shape != (rows, columns):
            return None
        form, origin = layer.codes.form, weight.origin
        if origin.layer is not None:
            entry = replace(origin.entry, dtype="F32", nbytes=rows * columns * torch.float32.itemsize)
            origin = replace(origin, entry=entry)
        return replace(weight, origin=origin if form is None else origin.in_form(form))

    def known(self, module: str) -> Known | None:
        """Return shape and dtype of the weight of a module."""
        weight = self.matrix(module)
        return None if weight is None else Known(shape=weight.shape, dtype=weight.origin.dtype)

    def stack(self, holder: str | None, part: str) -> TensorEntry | None:
        """Return the tensor with a part of all experts, or None."""
        entries = self.floats.source.entries
        name = entries.stacks.get((holder or "", part))
        return None if name is None or entries[name].dtype not in TORCH_DTYPES else entries[name]

    def _fused(self, module: str) -> TensorEntry | None:
        for name in (module, f"{module}{WEIGHT}"):
            entry = self.floats.source.entries.get(name)
            if entry is not None and is_fused_experts(entry) and entry.dtype in TORCH_DTYPES:
                return entry
        return None

    def _weight(self, entry: TensorEntry, matrix: WeightMatrix) -> OriginalWeight:
        return OriginalWeight(
            origin=self.floats.origin(entry), shape=matrix.shape, first=matrix.first, step=matrix.step
        )


OF_EXPERT = re.compile(r"(?:(?P<holder>.*)\.)?\d+\.(?P<part>[^.]+)", re.DOTALL)


@functools.lru_cache(maxsize=8)
def _by_module(entry: TensorEntry) -> dict[str, WeightMatrix]:
    return {matrix.module: matrix for matrix in matrices(entry)}


def open_original(path: Place | str) -> Original:
    """Open the original checkpoint, of floats or readable codes.

    Raises CheckpointError, UnsupportedError.
    """
    source = open_source(path)
    if configuration(source) is None:
        return Original(source=source, floats=Floats(source=with_stacks(source), origins={}, config=None))
    return Original(source=source, floats=as_floats(source))
