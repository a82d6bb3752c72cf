"""Readers of a tensor's rows as floats.

A reader of files (:class:`StoredFloats`, :class:`~.decoded.Decoded`, :class:`~.gathered.Gathered`) may have
others around it, each with one change (row_changes.py, folded.py).
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ...codecs.containers.safetensors import FILE_DTYPES, TORCH_DTYPES
from ...codecs.stored_forms import MODEL_FORM, StoredForm
from ...layout.packing import flat_bytes
from ...tensor import QuantizedTensor
from ..read.quantized_layers import StoredLayer
from ..read.storage import Files, Place, read_pieces
from ..read.tensor_entries import TensorEntry
from .code_columns import columns_of, extents, stacked

Buffer = bytearray | memoryview
_BAND_VALUES = 1 << 18
"""Values of whole rows that are read at once to cut columns out of them."""
_CODES = 1 << 20
"""Likewise of codes."""
_FEW_RUNS = 8
"""Rows of a run from which on runs are read alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReader(ABC):
    """Reader of a tensor's rows as floats.

    All axes but the input axis count as rows. entry: name, dtype and shape. of: the reader whose rows are
    changed; None for a reader of files.
    """

    entry: TensorEntry
    of: RowReader | None = None

    @abstractmethod
    def read(self, files: Files, start: int, rows: int, buffer: Buffer) -> torch.Tensor:
        """Return ``rows`` rows from ``start`` on: (rows, columns), in the reader's dtype.

        They lie in ``buffer``. files: of :attr:`files`, open. Raises CheckpointError when a file is shorter
        than its header said.
        """

    def read_as_written(self, files: Files, start: int, rows: int, buffer: bytearray) -> torch.Tensor:
        """Return rows in the shape of a file of floats; see :meth:`read`."""
        return self.read(files, start, rows, buffer)

    def read_columns(
        self, files: Files, rows: range, columns: tuple[int, int], buffer: bytearray
    ) -> torch.Tensor:
        """Return a band of columns, (first, count), of some rows, in ``buffer``.

        Whole rows are read and cut, except in local files of floats. Of transposed experts, all rows belong
        to one.
        """
        left, width = columns
        out = self.view(buffer, len(rows), width)
        step = max(1, _BAND_VALUES // max(1, self.columns) // self.alignment) * self.alignment
        piece = bytearray(step * self.row_bytes)
        for at in range(0, len(rows), step):
            part = read_range(self, files, rows[at : at + step], piece)
            out[at : at + len(part)] = part[:, left : left + width]
        return out

    def codes(self, files: Files, rows: torch.Tensor) -> QuantizedTensor:
        """Return some rows of one matrix, numbered over all, in codes."""
        assert self.of is not None
        return self.of.codes(files, rows)

    def code_columns(self, files: Files, rows: range, columns: tuple[int, int]) -> QuantizedTensor:
        """Return a band of columns, (first, count), of some rows in codes.

        The first is a multiple of :func:`~.decoded.columns_alignment`, and so is the count unless they are
        the last.
        """
        assert self.of is not None
        return self.of.code_columns(files, rows, columns)

    def view(self, buffer: Buffer, rows: int, columns: int | None = None) -> torch.Tensor:
        """View the begin of a buffer as rows of floats."""
        columns = self.columns if columns is None else columns
        return torch.frombuffer(buffer, dtype=self.dtype, count=rows * columns).view(rows, columns)

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensor, and of those that it is read from."""
        return frozenset((self.entry.name,)).union(() if self.of is None else self.of.names)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the floats."""
        return TORCH_DTYPES[self.entry.dtype]

    @property
    def width(self) -> int:
        """Values per row in a file of floats; 1 for vectors."""
        return self.entry.shape[-1] if len(self.entry.shape) > 1 else 1

    @property
    def columns(self) -> int:
        """The inputs of its matrices."""
        return self.width if self.of is None else self.of.columns

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of all its matrices."""
        return math.prod(self.entry.shape) // max(1, self.columns), self.columns

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of floats."""
        return self.columns * self.dtype.itemsize

    @property
    def form(self) -> StoredForm:
        """Order of the rows and columns that it gives."""
        return (self.entry.form or MODEL_FORM) if self.of is None else self.of.form

    @property
    def layer(self) -> StoredLayer | None:
        """Codes that it is decoded from, or None."""
        return None if self.of is None else self.of.layer

    @property
    def quantized_tensors(self) -> tuple[TensorEntry, ...]:
        """Tensors of its codes, with the scales of their inputs."""
        return () if self.layer is None else (*self.layer.tensors.values(), *self.input_scales)

    @property
    def input_scales(self) -> tuple[TensorEntry, ...]:
        """Tensors that make sense only with the codes."""
        return () if self.of is None else self.of.input_scales

    @property
    def files(self) -> tuple[Place, ...]:
        """The files that are read, each once."""
        return (self.entry.file,) if self.of is None else self.of.files

    @property
    def place(self) -> tuple[str, int, int]:
        """File name, offset of the first byte or code, first row."""
        return (self.entry.file.name, self.entry.begin, 0) if self.of is None else self.of.place

    @property
    def copied(self) -> bool:
        """Whether its bytes are copied from the file."""
        return False

    @property
    def alignment(self) -> int:
        """Row multiple at which parts can be read without other rows."""
        return 1 if self.of is None else self.of.alignment

    @property
    def written_alignment(self) -> int:
        """The same of :meth:`read_as_written`."""
        return self.alignment

    @property
    def block_rows(self) -> int:
        """Rows that are rotated together."""
        return 1 if self.of is None else self.of.block_rows

    @property
    def copies(self) -> tuple[int, int]:
        """Copies of a tile during reading, and bytes per value beneath them."""
        return (1, 0) if self.of is None else self.of.copies

    @property
    def value_bytes(self) -> int:
        """Memory per value of a tile during reading, the value included."""
        copies, beneath = self.copies
        return self.dtype.itemsize * copies + beneath


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFloats(RowReader):
    """Floats as they lie in a file."""

    @property
    def copied(self) -> bool:
        return True

    def read(self, files: Files, start: int, rows: int, buffer: Buffer) -> torch.Tensor:
        out = self.view(buffer, rows)
        offset = self.entry.begin + start * self.width * out.itemsize
        files[self.entry.file].read_into(bytes_of(out), offset)
        return out

    def read_columns(
        self, files: Files, rows: range, columns: tuple[int, int], buffer: bytearray
    ) -> torch.Tensor:
        """See :class:`RowReader`; an object store is asked for whole rows."""
        file, (left, width) = files[self.entry.file], columns
        if file.descriptor is None:
            return RowReader.read_columns(self, files, rows, columns, buffer)
        out = self.view(buffer, len(rows), width)
        item, stride = out.itemsize, self.width * out.itemsize
        offset = self.entry.begin + left * item + rows.start * stride
        read_pieces(file, bytes_of(out), offset, size=width * item, stride=rows.step * stride)
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Literal(RowReader):
    """Bytes in memory, written next to what ``entry`` names."""

    data: bytes

    @property
    def files(self) -> tuple[Place, ...]:
        return ()

    @property
    def copied(self) -> bool:
        return True

    def read(self, files: Files, start: int, rows: int, buffer: Buffer) -> torch.Tensor:
        out = self.view(buffer, rows)
        begin = start * self.width * out.itemsize
        bytes_of(out)[:] = self.data[begin : begin + out.nbytes]
        return out


def with_dtype(entry: TensorEntry, dtype: str) -> TensorEntry:
    """Return an entry with another dtype, as safetensors spells it."""
    return replace(entry, dtype=dtype, nbytes=math.prod(entry.shape) * TORCH_DTYPES[dtype].itemsize)


def read_range(reader: RowReader, files: Files, rows: range, buffer: Buffer) -> torch.Tensor:
    """Return rows at a distance from each other, in ``buffer``."""
    if rows.step == 1:
        return reader.read(files, rows.start, len(rows), buffer)
    count = (len(rows) - 1) * rows.step + 1
    every = reader.read(files, rows.start, count, bytearray(count * reader.row_bytes))
    return reader.view(buffer, len(rows)).copy_(every[:: rows.step])


def read_rows_of(reader: RowReader, files: Files, rows: torch.Tensor) -> torch.Tensor:
    """Return some rows in any order, (len(rows), columns).

    Few runs are read alone, and many with all that lies between.
    """
    begin, end = int(rows.min()), int(rows.max()) + 1
    ends = torch.nonzero(rows.diff() != 1).flatten().add(1).tolist()
    many = len(ends) * _FEW_RUNS > len(rows)
    bounds = itertools.pairwise([0, *ends, len(rows)])
    runs = [(begin, end)] if many else [(int(rows[a]), int(rows[b - 1]) + 1) for a, b in bounds]
    found = [
        reader.read(files, left, right - left, bytearray((right - left) * reader.row_bytes))
        for left, right in runs
    ]
    return found[0][rows - begin] if many else torch.cat(found)


def columns_of_codes(
    reader: RowReader, files: Files, rows: range, columns: tuple[int, int]
) -> QuantizedTensor:
    """Return a band of columns in codes, cut from whole rows."""
    layer = reader.layer
    assert layer is not None
    height = math.lcm(reader.alignment, *extents(layer.weight, layer.shape, 0))
    step = max(1, _CODES // max(1, layer.shape[1]) // height) * height
    parts = (rows[at : at + step] for at in range(0, len(rows), step))
    return stacked([columns_of(reader.codes(files, numbers(part)), *columns) for part in parts])


def numbers(rows: range) -> torch.Tensor:
    """Return row numbers as int64."""
    return torch.arange(rows.start, rows.stop, rows.step)


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


class NewTensor(NamedTuple):
    """A new tensor: its name, the tensor before it, and its numbers."""

    name: str
    near: TensorEntry
    value: torch.Tensor

    @property
    def reader(self) -> Literal:
        """Reader of its bytes."""
        value, near = self.value.detach().cpu().contiguous(), self.near
        entry = TensorEntry(
            name=self.name,
            dtype=FILE_DTYPES[value.dtype],
            shape=tuple(value.shape),
            begin=near.begin,
            nbytes=value.nbytes,
            file=near.file,
        )
        return Literal(entry=entry, data=flat_bytes(value).numpy().tobytes())
