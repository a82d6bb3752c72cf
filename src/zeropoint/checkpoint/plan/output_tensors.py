"""Outputs: action, place and cut of a tensor, matrix or file.

Units follow from the plan alone, tiles from the memory limit. A unit is some rows, or columns where the
layout is cut so, with all of their codes and parameters. A tile is some rows of a unit; where units are
columns, a tile yields a part of every line, which is buffered until the other parts are there.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...codecs.act_order import group_index
from ...codecs.protocol import LayerScheme
from ...codecs.tensor_fields import COLUMNS, ROWS, TensorSpec
from ...errors import UnsupportedError, printable
from ...methods import NEAREST, OF_CODES, Scope, method_named
from ...methods.method import MEAN_SQUARE
from ...tensor import QuantizedTensor
from ..read.storage import Files, Place
from ..read.tensor_entries import TensorEntry
from .decoded import columns_alignment
from .limits import Limits, value_bytes
from .row_reader import RowReader, StoredFloats, numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTensor:
    """An output tensor: ``nbytes`` bytes of ``shard`` from the absolute offset ``begin``."""

    name: str
    spec: TensorSpec
    shard: str
    begin: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Action and place of one tensor, matrix or file.

    It is quantized, written as floats, or copied. module: the module of a matrix that is quantized, else the
    name of the tensor or file. shape: rows and columns; of a copy, its bytes and 1. tensors: what it becomes,
    one tensor unless it is quantized. to: what it is quantized to, or None. share: name of the set whose
    members take one tensor scale together, or None. method: name of the method that quantizes it.
    """

    module: str
    reader: RowReader
    shape: tuple[int, int]
    tensors: tuple[OutputTensor, ...]
    to: LayerScheme | None = None
    share: str | None = None
    method: str = NEAREST

    @staticmethod
    def written(reader: RowReader, tensor: OutputTensor) -> Output:
        """Return the output that writes ``reader`` unquantized: floats or bytes."""
        values, columns = (
            (tensor.nbytes, 1) if reader.copied else (math.prod(reader.entry.shape), reader.width)
        )
        return Output(
            module=tensor.name, reader=reader, shape=(values // max(1, columns), columns), tensors=(tensor,)
        )

    @staticmethod
    def of_file(name: str, place: Place, size: int) -> Output:
        """Return the output that copies a file without tensors."""
        spec = TensorSpec(suffix="", dtype="U8", shape=(size,))
        tensor = OutputTensor(name=name, spec=spec, shard=name, begin=0, nbytes=size)
        entry = TensorEntry(name=name, dtype="U8", shape=(size,), begin=0, nbytes=size, file=place)
        return Output.written(StoredFloats(entry=entry), tensor)

    @property
    def layer(self) -> LayerScheme:
        """Target scheme of a quantized output."""
        assert self.to is not None
        return self.to

    @property
    def copied(self) -> bool:
        """Whether its bytes are taken as they are."""
        return self.to is None and self.reader.copied

    @property
    def stamps(self) -> tuple[str, ...]:
        """Names under which the stamps of its source files are kept."""
        # No tensor begins where its file does.
        whole = self.copied and self.source.begin == 0
        return (self.module,) if whole else tuple(place.name for place in self.reader.files)

    @property
    def kind(self) -> Hashable:
        """Key of outputs with equal tile costs."""
        old, new, like = self.reader.layer, self.to, (self.shape, self.dtype, self.method)
        return (
            like,
            new and new.weight,
            old and (old.weight, old.dtype),
            self.reader.block_rows,
            self.reader.form.columns,
        )

    @property
    def source(self) -> TensorEntry:
        """The tensor of the source that holds it, as floats."""
        return self.reader.entry

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its numbers."""
        return self.reader.dtype

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
            return self.reader.value_bytes
        part = self.layer.codec.with_mean(self.layer, 0.0).weight
        quantizing = value_bytes(part, self.dtype) + method_named(self.method).value_bytes(part)
        return quantizing + self.reader.value_bytes - self.dtype.itemsize

    @property
    def alignment(self) -> int:
        """Row or column multiple at which parts are processed and written alone."""
        if self.to is None:
            return self.reader.written_alignment
        own, layer = self.layer.codec.alignment(self.layer, self.shape), self.reader.layer
        if self.of_codes and self.axis == COLUMNS and layer is not None and layer.experts is None:
            return math.lcm(own, columns_alignment(layer))
        scope = method_named(self.method).scope(self.layer.weight)
        if scope is not Scope.BLOCKS and (scope is not Scope.ROWS or self.axis != ROWS):
            return max(1, self.extent)
        return math.lcm(own, self.reader.alignment, self.code_rows) if self.axis == ROWS else own

    @property
    def of_codes(self) -> bool:
        """Whether it converts codes of its reader instead of quantizing floats."""
        return self.method in OF_CODES and self.reader.layer is not None

    @property
    def code_rows(self) -> int:
        """Rows of the blocks of the codes that it is made of."""
        layer = self.reader.layer
        if layer is None or not self.of_codes or layer.codec.axis(layer.layer) != ROWS:
            return 1
        return layer.codec.alignment(layer.layer, layer.shape)

    def require_order(self) -> None:
        """Raise UnsupportedError for Gram matrix methods on reordered inputs."""
        if self.to is None or self.reader.form.columns is None:
            return
        if method_named(self.method).needs.keys() - {MEAN_SQUARE}:
            raise UnsupportedError(
                f"method {self.method} learns of the inputs of {printable(self.module)} together, which "
                f"files of {self.layer.codec.title} have in another order; give it method ggml by a rule"
            )

    def codes(self, files: Files, rows: range, columns: range) -> QuantizedTensor:
        """Return some rows and columns in the codes of its reader."""
        if len(columns) == self.shape[1]:
            return self.reader.codes(files, numbers(rows))
        return self.reader.code_columns(files, rows, (columns.start, len(columns)))

    def read(self, files: Files, rows: range, columns: range, buffer: bytearray) -> torch.Tensor:
        """Return the floats of some rows and columns, in ``buffer``."""
        if len(columns) == self.shape[1]:
            return self.reader.read(files, rows.start, len(rows), buffer)
        return self.reader.read_columns(files, rows, (columns.start, len(columns)), buffer)


UNIT_VALUES = 1 << 23
"""Values of a unit, about a tenth of a second of work. An interruption loses one unit a worker."""
_WIDER = 2
"""Size of units of columns over units of rows: they read a piece of each row."""


class Tile(NamedTuple):
    """Rows and columns of a matrix that are worked on at once."""

    rows: range
    columns: range


def unit_lines(item: Output) -> int:
    """Return the rows, or columns, of a unit of ``item``."""
    alignment, most = item.alignment, UNIT_VALUES * (1 if item.axis == ROWS else _WIDER)
    return max(alignment, most // max(1, item.line_values) // alignment * alignment)


def tile_shape(item: Output, limits: Limits) -> tuple[int, int]:
    """Return the rows and columns of a tile of ``item``.

    Raises CheckpointError where memory is too little for the least that can be.
    """
    if item.axis == ROWS:
        alignment = min(item.alignment, max(1, item.extent))
        return limits.rows(item.line_values, alignment, item.value_bytes), item.shape[1]
    rows = limits.rows(_columns(item), _height(item), item.value_bytes, kept=_kept_bytes(item))
    return min(rows, item.shape[0]), _columns(item)


def tile_bytes(item: Output, limits: Limits) -> int:
    """Return the memory for a tile and buffered results of others."""
    return math.prod(tile_shape(item, limits)) * item.value_bytes + _kept_bytes(item)


def tiles(item: Output, limits: Limits, start: int, count: int) -> list[Tile]:
    """Return the tiles of ``count`` rows or columns from ``start`` on."""
    whole = range(start, start + count)
    rows, columns = (whole, range(item.shape[1])) if item.axis == ROWS else (range(item.shape[0]), whole)
    step = tile_shape(item, limits)[0]
    return [Tile(rows[at : at + step], columns) for at in range(0, len(rows), step)]


def _columns(item: Output) -> int:
    """Return the columns of a unit of a weight cut along columns."""
    return min(unit_lines(item), item.shape[1])


def _kept_bytes(item: Output) -> int:
    """Return the bytes of a unit buffered until its last tile."""
    if item.axis == ROWS:
        return 0
    return -(-sum(tensor.nbytes for tensor in item.tensors) * _columns(item) // item.shape[1])


def _height(item: Output) -> int:
    """Return the row multiple of tiles in a unit of columns.

    It covers whole blocks, whole words across lines, and whole rows of the source; all rows, where no part of
    them can be processed alone.
    """
    specs, weight = [tensor.spec for tensor in item.tensors], item.layer.weight
    scope = method_named(item.method).scope(weight)
    apart = all(spec.axis is None or len(spec.shape) > 1 for spec in specs)
    if not apart or scope not in (Scope.BLOCKS, Scope.ROWS) or group_index(item.layer) is not None:
        return item.shape[0]
    cut = weight.granularity.grid(item.shape)[0] > 1
    block = weight.granularity.block_shape(item.shape)[0] if cut else 1
    least = math.lcm(block, item.reader.alignment, item.code_rows, *(spec.across[1] for spec in specs))
    return min(least, item.shape[0])
