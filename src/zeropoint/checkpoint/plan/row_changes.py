"""Readers of transposed, strided, converted or reordered rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ...codecs.stored_forms import MODEL_FORM, StoredForm, places
from ...errors import UnsupportedError, printable
from ...tensor import QuantizedTensor
from ..read.storage import Files
from .row_reader import Buffer, RowReader, by_expert, columns_of_codes, read_range, read_rows_of, with_dtype
from .tensor_matrices import WeightMatrix

_NARROW = ("BF16", "F16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transposed(RowReader):
    """Rows of matrices that ``of`` has as (in, out)."""

    of: RowReader

    @property
    def columns(self) -> int:
        return self.entry.shape[-2]

    @property
    def copied(self) -> bool:
        return self.of.copied

    @property
    def copies(self) -> tuple[int, int]:
        return 2, self.of.copies[1]

    def read(self, files: Files, start: int, rows: int, buffer: Buffer) -> torch.Tensor:
        out = self.view(buffer, rows)
        for expert, first, part in by_expert(start, out, self.entry.shape[-1]):
            part.copy_(self._band(files, expert, range(self.columns), range(first, first + len(part))))
        return out

    def read_as_written(self, files: Files, start: int, rows: int, buffer: bytearray) -> torch.Tensor:
        return self.of.read(files, start, rows, buffer)

    def read_columns(
        self, files: Files, rows: range, columns: tuple[int, int], buffer: bytearray
    ) -> torch.Tensor:
        left, width = columns
        expert, first = divmod(rows.start, self.entry.shape[-1])
        every = range(first, first + rows[-1] + 1 - rows.start)
        band = self._band(files, expert, range(left, left + width), every)
        return self.view(buffer, len(rows), width).copy_(band[:: rows.step])

    def _band(self, files: Files, expert: int, inputs: range, outputs: range) -> torch.Tensor:
        """Return some outputs of some inputs of an expert, (outputs, inputs)."""
        begin = expert * self.columns
        rows = range(begin + inputs.start, begin + inputs.stop)
        buffer = bytearray(len(rows) * len(outputs) * self.dtype.itemsize)
        return self.of.read_columns(files, rows, (outputs.start, len(outputs)), buffer).t()


@dataclass(frozen=True, slots=True, kw_only=True)
class Strided(RowReader):
    """``count`` rows of ``of``: ``first``, ``first + step``, ..."""

    of: RowReader
    first: int = 0
    step: int = 1
    count: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.count, self.columns

    @property
    def place(self) -> tuple[str, int, int]:
        return (*self.of.place[:2], self.first)

    @property
    def copies(self) -> tuple[int, int]:
        copies, beneath = self.of.copies
        return self.step * copies, self.step * beneath

    def read(self, files: Files, start: int, rows: int, buffer: Buffer) -> torch.Tensor:
        return read_range(self.of, files, self._rows(range(start, start + rows)), buffer)

    def read_columns(
        self, files: Files, rows: range, columns: tuple[int, int], buffer: bytearray
    ) -> torch.Tensor:
        return self.of.read_columns(files, self._rows(rows), columns, buffer)

    def codes(self, files: Files, rows: torch.Tensor) -> QuantizedTensor:
        return self.of.codes(files, self.first + rows * self.step)

    def code_columns(self, files: Files, rows: range, columns: tuple[int, int]) -> QuantizedTensor:
        return self.of.code_columns(files, self._rows(rows), columns)

    def _rows(self, rows: range) -> range:
        first = self.first + rows.start * self.step
        return range(first, first + len(rows) * self.step, self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reordered(RowReader):
    """Rows in the order and dtype of a file's form.

    target: the order, and the values that follow from the model's. entry: has the dtype.
    """

    of: RowReader
    target: StoredForm = MODEL_FORM

    @property
    def form(self) -> StoredForm:
        return self.target

    @property
    def in_order(self) -> bool:
        """Whether the order and values beneath are the target's already."""
        return self.of.form.same_values(self.target)

    @property
    def _same(self) -> bool:
        return self.in_order and self.of.entry.dtype == self.entry.dtype

    @property
    def copied(self) -> bool:
        return self._same and self.of.copied

    @property
    def copies(self) -> tuple[int, int]:
        copies, beneath = self.of.copies
        return copies if self._same else 3 * copies, beneath

    @property
    def alignment(self) -> int:
        orders = (self.of.form.rows, self.target.rows)
        own = () if orders[0] == orders[1] else (o.alignment for o in orders if o is not None)
        return math.lcm(self.of.alignment, *own)

    @property
    def written_alignment(self) -> int:
        return self.of.written_alignment if self._same else self.alignment

    def read(self, files: Files, start: int, rows: int, buffer: Buffer) -> torch.Tensor:
        if self._same:
            return self.of.read(files, start, rows, buffer)
        before, after = self.of.form, self.target
        x = read_rows_of(self.of, files, self._places(torch.arange(start, start + rows)))
        if not self.in_order:
            x = after.stored(before.restored(x.to(self.dtype)))
        if before.columns != after.columns:
            x = x[:, places(torch.arange(x.shape[1]), before.columns, after.columns)]
        return self.view(buffer, rows).copy_(x)

    def read_as_written(self, files: Files, start: int, rows: int, buffer: bytearray) -> torch.Tensor:
        read = self.of.read_as_written if self._same else self.read
        return read(files, start, rows, buffer)

    def read_columns(
        self, files: Files, rows: range, columns: tuple[int, int], buffer: bytearray
    ) -> torch.Tensor:
        if self._same:
            return self.of.read_columns(files, rows, columns, buffer)
        return RowReader.read_columns(self, files, rows, columns, buffer)

    def codes(self, files: Files, rows: torch.Tensor) -> QuantizedTensor:
        """See :class:`RowReader`; raises UnsupportedError for columns in another order."""
        if self.of.form.columns != self.target.columns:
            raise UnsupportedError(
                f"{printable(self.entry.name)} has inputs in another order in files of the layout that is "
                "written, and groups of codes stay as they are; quantize the original checkpoint"
            )
        if self.in_order or self.layer is None:
            return self.of.codes(files, rows)
        height = self.layer.shape[0]
        first = int(rows.min()) // height * height
        return self.of.codes(files, first + self._places(rows - first))

    def code_columns(self, files: Files, rows: range, columns: tuple[int, int]) -> QuantizedTensor:
        if self._same:
            return self.of.code_columns(files, rows, columns)
        return columns_of_codes(self, files, rows, columns)

    def _places(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows beneath that hold rows of the target order."""
        return places(rows, self.of.form.rows, self.target.rows)


def matrix_rows(reader: RowReader, matrix: WeightMatrix) -> RowReader:
    """Return the reader of one matrix of a tensor."""
    if matrix.shape == reader.shape:
        return reader
    return Strided(entry=reader.entry, of=reader, first=matrix.first, step=matrix.step, count=matrix.shape[0])


def in_model_form(reader: RowReader) -> RowReader:
    """Return a reader of rows in the order of the model."""
    return reader if reader.form.same_values(MODEL_FORM) else Reordered(entry=reader.entry, of=reader)


def in_form(reader: RowReader, form: StoredForm) -> RowReader:
    """Return a reader in a file's form, float32 where it asks."""
    if isinstance(reader, Strided):
        return replace(reader, of=in_form(reader.of, form))
    entry, of = reader.entry, reader.of if isinstance(reader, Reordered) else reader
    # What a file of this format has in another dtype, its engine reads in that.
    narrow = entry.dtype in _NARROW and not (form.float16 and entry.dtype == "F16")
    if reader.layer is None and entry.form is None and form.float32 and narrow:
        entry = with_dtype(entry, "F32")
    return Reordered(entry=entry, of=of, target=form)


def decoded_to(reader: RowReader, dtype: str) -> RowReader:
    """Return a reader that decodes codes to another dtype."""
    of = None if reader.of is None else decoded_to(reader.of, dtype)
    return replace(reader, entry=with_dtype(reader.entry, dtype), of=of)
