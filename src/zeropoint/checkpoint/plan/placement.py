"""Placements: the action and output place of a tensor, matrix or file."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch

from ...codecs.protocol import LayerScheme
from ...codecs.tensor_fields import COLUMNS, ROWS, TensorSpec
from ...methods import NEAREST, OF_CODES, Scope, method_named
from ...tensor import QuantizedTensor
from ..read.storage import OpenFile, Place
from ..read.tensor_entries import TensorEntry
from .code_columns import columns_alignment, read_code_columns
from .limits import value_bytes
from .origin import Origin

Files = Mapping[Place, OpenFile]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """An output tensor: ``nbytes`` bytes of ``shard`` from the absolute offset ``begin``."""

    name: str
    spec: TensorSpec
    shard: str
    begin: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Action and place of one tensor, matrix or file.

    It is quantized, written as floats, or copied. module: the module of a matrix that is quantized, else the
    name of the tensor or file. shape: rows and columns; of a copy, its bytes and 1. outputs: what it becomes,
    one tensor unless it is quantized. to: what it is quantized to, or None. first, step: row i is row
    ``first + i * step`` of the origin. share: name of the set
    whose members take one tensor scale together, or None. method: name of the method that quantizes it.
    """

    module: str
    origin: Origin
    shape: tuple[int, int]
    outputs: tuple[Placed, ...]
    to: LayerScheme | None = None
    first: int = 0
    step: int = 1
    share: str | None = None
    method: str = NEAREST

    @staticmethod
    def written(origin: Origin, placed: Placed) -> Placement:
        """Return the placement that writes ``origin`` unquantized: floats or bytes."""
        values, columns = (
            (placed.nbytes, 1) if origin.copied else (math.prod(origin.entry.shape), origin.width)
        )
        return Placement(
            module=placed.name, origin=origin, shape=(values // max(1, columns), columns), outputs=(placed,)
        )

    @staticmethod
    def of_file(name: str, place: Place, size: int) -> Placement:
        """Return the placement that copies a file without tensors."""
        spec = TensorSpec(suffix="", dtype="U8", shape=(size,))
        placed = Placed(name=name, spec=spec, shard=name, begin=0, nbytes=size)
        entry = TensorEntry(name=name, dtype="U8", shape=(size,), begin=0, nbytes=size, file=place)
        return Placement.written(Origin(entry=entry), placed)

    @property
    def layer(self) -> LayerScheme:
        """Target scheme of a quantized placement."""
        assert self.to is not None
        return self.to

    @property
    def copied(self) -> bool:
        """Whether its bytes are taken as they are."""
        return self.to is None and self.origin.copied

    @property
    def stamps(self) -> tuple[str, ...]:
        """Names under which the stamps of its source files are kept."""
        # No tensor begins where its file does.
        whole = self.copied and self.source.begin == 0
        return (self.module,) if whole else tuple(place.name for place in self.origin.files)

    @property
    def kind(self) -> Hashable:
        """Key of placements with equal tile costs."""
        old, new, like = self.origin.layer, self.to, (self.shape, self.dtype, self.method)
        form = self.origin.form
        order = None if form is None else form.columns
        return like, new and new.weight, old and (old.weight, old.dtype), self.origin.block_rows, order

    @property
    def source(self) -> TensorEntry:
        """The tensor of the source that holds it, as floats."""
        return self.origin.entry

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its numbers."""
        return self.origin.dtype

    @property
    def axis(self) -> int:
        """Axis along which it is cut, given by its codec."""
        return ROWS if self.to is None else self.layer.codec.axis(self.layer)

    @property
    def extent(self) -> int:
        """Rows, columns or bytes, whatever it is cut into."""
        return self.shape[self.axis]

    @property
    def line_values(self) -> int:
        """Values of one of these rows or columns."""
        return self.shape[1 - self.axis]

    @property
    def line_bytes(self) -> int:
        """Bytes of one of them, as floats where it is not copied."""
        return 1 if self.copied else self.line_values * self.dtype.itemsize

    @property
    def value_bytes(self) -> int:
        """Memory that each number of a tile takes."""
        if self.to is None:
            return self.origin.value_bytes
        skipped = (self.step - 1) * self.origin.value_bytes
        part = self.layer.codec.with_mean(self.layer, 0.0).weight
        quantizing = value_bytes(part, self.dtype) + method_named(self.method).value_bytes(part)
        return quantizing + self.origin.value_bytes - self.dtype.itemsize + skipped

    @property
    def alignment(self) -> int:
        """Row or column multiple at which parts are processed and written alone."""
        if self.to is None:
            return self.origin.written_alignment
        own, layer = self.layer.codec.alignment(self.layer, self.shape), self.origin.layer
        if self.of_codes and self.axis == COLUMNS and layer is not None and layer.experts is None:
            return math.lcm(own, columns_alignment(layer))
        scope = method_named(self.method).scope(self.layer.weight)
        if scope is not Scope.BLOCKS and (scope is not Scope.ROWS or self.axis != ROWS):
            return max(1, self.extent)
        return math.lcm(own, self.origin.alignment, self.code_rows) if self.axis == ROWS else own

    @property
    def of_codes(self) -> bool:
        """Whether it converts codes of its origin instead of quantizing floats."""
        return self.method in OF_CODES and self.origin.layer is not None

    @property
    def code_rows(self) -> int:
        """Rows of the blocks of the codes that it is made of."""
        layer = self.origin.layer
        if layer is None or not self.of_codes or layer.codec.axis(layer.layer) != ROWS:
            return 1
        return layer.codec.alignment(layer.layer, layer.shape)

    def codes(self, files: Files, rows: range, columns: range) -> QuantizedTensor:
        """Return some rows and columns in the codes of the origin."""
        every = self._of_origin(rows)
        if len(columns) == self.shape[1]:
            return self.origin.codes(files, every)
        return read_code_columns(self.origin, files, every, (columns.start, len(columns)))

    def read(self, files: Files, rows: range, columns: range, buffer: bytearray) -> torch.Tensor:
        """Return the floats of some rows and columns, in ``buffer``."""
        every = self._of_origin(rows)
        if len(columns) == self.shape[1]:
            return self.origin.read(files, every.start, len(every), buffer, step=self.step)
        return self.origin.read_columns(files, every, (columns.start, len(columns)), buffer)

    def _of_origin(self, rows: range) -> range:
        """Return the numbers that rows have in the origin."""
        first = self.first + rows.start * self.step
        return range(first, first + len(rows) * self.step, self.step)
