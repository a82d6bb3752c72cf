"""Rows of a quantized layer, decoded or in codes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ...codecs.act_order import group_index
from ...codecs.stored_forms import MODEL_FORM, StoredForm
from ...codecs.tensor_fields import COLUMNS
from ...functional import dequantize
from ...tensor import QuantizedTensor
from ..read.decoding import alignment, alignment_across, read_columns, read_part, read_rows
from ..read.quantized_layers import StoredLayer
from ..read.storage import Files, Place, read_bytes
from ..read.tensor_entries import TensorEntry
from .code_columns import extents, rows_of, under_one_scale
from .limits import decoding_bytes
from .row_reader import Buffer, RowReader, by_expert, columns_of_codes

_WHOLE_BYTES = 8
"""Codes of any number of bits that end where a byte ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded(RowReader):
    """Rows of a quantized layer.

    entry: the floats, in the file of the codes, with ``begin`` 0. scales: of quantized inputs.
    inputs_first: whether files of floats have its matrices as (in, out). one_scale: whether each matrix has
    one scale.
    """

    quantized: StoredLayer
    scales: tuple[TensorEntry, ...] = ()
    inputs_first: bool = False
    one_scale: bool = False

    @property
    def layer(self) -> StoredLayer:
        return self.quantized

    @property
    def form(self) -> StoredForm:
        return self.layer.codes.form or MODEL_FORM

    @property
    def input_scales(self) -> tuple[TensorEntry, ...]:
        return self.scales

    @property
    def columns(self) -> int:
        return self.layer.shape[1]

    @property
    def files(self) -> tuple[Place, ...]:
        return tuple(dict.fromkeys(entry.file for entry in self.layer.tensors.values()))

    @property
    def place(self) -> tuple[str, int, int]:
        return self.layer.codes.file.name, self.layer.codes.begin, 0

    @property
    def alignment(self) -> int:
        return alignment(self.layer)

    @property
    def written_alignment(self) -> int:
        if not self.inputs_first:
            return self.alignment
        return 1 if self.layer.experts is None else alignment_across(self.layer)

    @property
    def copies(self) -> tuple[int, int]:
        beneath = decoding_bytes(self.layer.weight, self.layer.dtype, self.dtype)
        return 2 if self.inputs_first else 1, beneath

    def read(self, files: Files, start: int, rows: int, buffer: Buffer) -> torch.Tensor:
        out = self.view(buffer, rows)
        height, step = self.layer.shape[0], alignment(self.layer)
        for expert, first, part in by_expert(start, out, height):
            begin, end = first // step * step, min(height, -(-(first + len(part)) // step) * step)
            q = read_rows(self.layer, files, begin, end - begin, expert=expert)
            if end - begin == len(part):
                dequantize(q, out=part)
            else:
                part.copy_(q.dequantize(out.dtype)[first - begin : first - begin + len(part)])
        return out

    def read_as_written(self, files: Files, start: int, rows: int, buffer: bytearray) -> torch.Tensor:
        if not self.inputs_first:
            return self.read(files, start, rows, buffer)
        out = self.view(buffer, rows, self.width)
        if self.layer.experts is None:
            band = bytearray(out.numel() * out.itemsize)
            return out.copy_(self.read_columns(files, range(self.layer.shape[0]), (start, rows), band).t())
        for expert, first, part in by_expert(start, out, self.columns):
            q = read_columns(self.layer, files, first, len(part), expert=expert)
            part.copy_(q.dequantize(out.dtype).t())
        return out

    def codes(self, files: Files, rows: torch.Tensor) -> QuantizedTensor:
        expert, begin = divmod(int(rows.min()), self.layer.shape[0])
        count = int(rows.max()) + 1 - int(rows.min())
        q = read_rows(self.layer, files, begin, count, expert=expert)
        wanted = rows - rows.min()
        in_order = torch.equal(wanted, torch.arange(count))
        found = replace(q if in_order else rows_of(q, wanted), dtype=self.dtype)
        return under_one_scale(found) if self.one_scale else found

    def code_columns(self, files: Files, rows: range, columns: tuple[int, int]) -> QuantizedTensor:
        if not _cut_so(self.layer) or rows.step > 1:
            return columns_of_codes(self, files, rows, columns)
        first, count = columns
        return replace(read_part(self.layer, files, rows, range(first, first + count)), dtype=self.dtype)


def columns_alignment(layer: StoredLayer) -> int:
    """Return the multiple for bands of columns: whole blocks and bytes."""
    own = layer.codec.alignment(layer.layer, layer.shape) if _cut_so(layer) else 1
    return math.lcm(_WHOLE_BYTES, own, *extents(layer.weight, layer.shape, COLUMNS))


def _cut_so(layer: StoredLayer) -> bool:
    """Return whether the file cuts a layer along its columns."""
    return layer.codec.axis(layer.layer) == COLUMNS


def read_groups(layer: StoredLayer, files: Files) -> torch.Tensor:
    """Return the group of each input, (columns,) int32, under act-order."""
    entry = layer.tensors[str(group_index(layer.layer))]
    return torch.frombuffer(read_bytes(files[entry.file], entry.begin, entry.nbytes), dtype=torch.int32)
