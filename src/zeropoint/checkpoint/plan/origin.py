"""Sources of a weight's rows: floats or codes in the files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ...codecs.act_order import group_index
from ...codecs.safetensors_dtypes import FILE_DTYPES, TORCH_DTYPES
from ...codecs.stored_forms import MODEL_FORM, StoredForm, places
from ...errors import UnsupportedError, printable
from ...functional import dequantize
from ...layout.packing import flat_bytes
from ...params import QuantizationParams
from ...schemes import Granularity, Scheme
from ...tensor import QuantizedTensor
from ..read.decoding import alignment, alignment_across, read_columns, read_rows
from ..read.quantized_layers import StoredLayer
from ..read.storage import OpenFile, Place, read_pieces
from ..read.tensor_entries import TensorEntry
from .folded import Folded, FoldedChannels, FoldedNorm
from .gathered import Gathered, read_rows_of
from .limits import decoding_bytes

_NARROW = ("BF16", "F16")
_BAND_VALUES = 1 << 18
"""Values of whole rows that are read at once to cut columns out of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A tensor of floats whose rows can be read.

    entry: its name, dtype and shape; and its bytes, where nothing else says where they come from. layer: the
    codes that it is decoded from; ``entry.file`` is then the file of the codes, and ``entry.begin`` 0.
    input_scales: tensors that make sense only with the codes, such as the scale of quantized inputs.
    transposed: whether ``entry`` has fused experts whose matrices are (in, out); rows are outputs all the
    same, but for :meth:`read_as_written`. data: the bytes of a tensor that lies in no file; ``entry`` then
    says next to what it is written. raw: floats of another dtype that it is converted from. form: target
    row order, if it differs from the model's. step: the distance of its numbers in the file,
    of a vector that others lie between. one_scale: whether each matrix of fused experts has one scale.
    folded: what is folded into a tensor of floats. gathered: where its rows come from, of a tensor that lies
    in no file.
    """

    entry: TensorEntry
    layer: StoredLayer | None = None
    input_scales: tuple[TensorEntry, ...] = ()
    transposed: bool = False
    data: bytes | None = None
    raw: TensorEntry | None = None
    form: StoredForm | None = None
    step: int = 1
    one_scale: bool = False
    folded: Folded | FoldedNorm | FoldedChannels | None = None
    gathered: Gathered | None = None

    def in_form(self, form: StoredForm) -> Origin:
        """Return the tensor in a file's form, in float32 where it asks."""
        whole = replace(self, form=form)
        # What a file of this format has in another dtype, its engine reads in that.
        if (
            self.layer is not None
            or self.entry.form is not None
            or not form.float32
            or self.entry.dtype not in _NARROW
        ):
            return whole
        size = math.prod(self.entry.shape) * torch.float32.itemsize
        return replace(whole, entry=replace(self.entry, dtype="F32", nbytes=size), raw=self.raw or self.entry)

    @property
    def stored_form(self) -> StoredForm:
        """Form of its rows in the source file."""
        return (self.entry if self.layer is None else self.layer.codes).form or MODEL_FORM

    @property
    def same(self) -> bool:
        """Whether file order is already the target order."""
        return self.stored_form.same_values(self.form or MODEL_FORM)

    @property
    def copied(self) -> bool:
        """Whether its bytes are copied from the file."""
        plain = self.layer is None and self.raw is None and self.folded is None and self.gathered is None
        return plain and self.same and self.step == 1

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the floats."""
        return TORCH_DTYPES[self.entry.dtype]

    @property
    def files(self) -> tuple[Place, ...]:
        """The files that are read, each once."""
        if self.data is not None:
            return ()
        if self.gathered is not None:
            return tuple(dict.fromkeys(file for each in self.gathered.sources for file in each.files))
        if self.layer is None:
            norm = None if self.folded is None else self.folded.norm
            return tuple(dict.fromkeys(entry.file for entry in (self.entry, norm) if entry is not None))
        return tuple(dict.fromkeys(entry.file for entry in self.layer.tensors.values()))

    @property
    def place(self) -> tuple[str, int]:
        """File name and offset of its first byte or code."""
        if self.gathered is not None:
            return self.gathered.sources[0].place
        entry = self.entry if self.layer is None else self.layer.codes
        return entry.file.name, entry.begin

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        """Tensors of its source files, with its input scales."""
        if self.gathered is not None:
            return tuple(entry for each in self.gathered.sources for entry in each.stored)
        return (self.entry,) if self.layer is None else (*self.layer.tensors.values(), *self.input_scales)

    @property
    def value_bytes(self) -> int:
        """Memory per value of a tile during reading, the value included."""
        own = self.dtype.itemsize * (2 if self.transposed else 1)
        # What is converted, and rows in another order, are copies.
        own *= 1 if self.same and self.raw is None else 3
        own += (self.step - 1) * own
        if self.gathered is not None:
            return own + max(each.value_bytes + each.dtype.itemsize for each in self.gathered.sources)
        if self.layer is None:
            return own
        return own + decoding_bytes(self.layer.weight, self.layer.dtype, self.dtype)

    @property
    def alignment(self) -> int:
        """Row multiple at which parts can be read without other rows."""
        own = 1 if self.layer is None else alignment(self.layer)
        own = math.lcm(own, self.block_rows)
        orders = (self.stored_form.rows, (self.form or MODEL_FORM).rows)
        return (
            own if orders[0] == orders[1] else math.lcm(own, *(o.alignment for o in orders if o is not None))
        )

    @property
    def block_rows(self) -> int:
        """Rows that are rotated together."""
        return 1 if self.folded is None else self.folded.block_rows

    @property
    def written_alignment(self) -> int:
        """The same of :meth:`read_as_written`."""
        return alignment_across(self.layer) if self.transposed and self.layer is not None else self.alignment

    @property
    def columns(self) -> int:
        """The inputs of its matrices."""
        return self.entry.shape[-2] if self.transposed else self.width

    @property
    def width(self) -> int:
        """Values per row in a file of floats; 1 for vectors."""
        return self.entry.shape[-1] if len(self.entry.shape) > 1 else 1

    def read(
        self,
        files: Mapping[Place, OpenFile],
        start: int,
        rows: int,
        buffer: bytearray | memoryview,
        *,
        step: int = 1,
    ) -> torch.Tensor:
        """Return ``rows`` rows from ``start`` on: (rows, columns), in the origin's dtype.

        They lie in ``buffer``. All axes but the input axis count as rows. files: of :attr:`files`, open.
        step: the distance of rows. Raises CheckpointError when a file is shorter than its header said.
        """
        out = torch.frombuffer(buffer, dtype=self.dtype, count=rows * self.columns).view(rows, self.columns)
        if step > 1:
            count = (rows - 1) * step + 1
            every = self.read(files, start, count, bytearray(count * self.columns * self.dtype.itemsize))
            return out.copy_(every[::step])
        if self.folded is not None and self.same:
            self._fold(files, start, out)
        elif not self.same or self.raw is not None:
            self._convert(files, start, out)
        elif self.layer is not None:
            decode(self.layer, files, start, out)
        elif self.gathered is not None and not self.transposed:
            self.gathered.fill(files, start, out)
        elif self.transposed:
            height = self.entry.shape[-1]
            for expert, first, part in by_expert(start, out, height):
                inputs = range(expert * self.columns, (expert + 1) * self.columns)
                part.copy_(self._band(files, inputs, (first, len(part))).t())
        else:
            self._read_floats(files, start, out)
        return out

    def read_as_written(
        self, files: Mapping[Place, OpenFile], start: int, rows: int, buffer: bytearray
    ) -> torch.Tensor:
        """Return rows in the shape of a file of floats; see :meth:`read`."""
        if not self.transposed or self.layer is None:
            return self.read(files, start * self.step, rows, buffer, step=self.step)
        width = self.entry.shape[-1]
        out = torch.frombuffer(buffer, dtype=self.dtype, count=rows * width).view(rows, width)
        for expert, first, part in by_expert(start, out, self.columns):
            q = read_columns(self.layer, files, first, len(part), expert=expert)
            part.copy_(q.dequantize(out.dtype).t())
        return out

    def codes(self, files: Mapping[Place, OpenFile], rows: range) -> QuantizedTensor:
        """Return some rows of one matrix in codes, numbered over all matrices."""
        assert self.layer is not None
        if self.stored_form.columns != (self.form or MODEL_FORM).columns:
            raise UnsupportedError(
                f"{printable(self.entry.name)} has inputs in another order in files of the layout that is "
                "written, and groups of codes stay as they are; quantize the original checkpoint"
            )
        expert, first = divmod(rows.start, self.layer.shape[0])
        wanted = self._places(torch.arange(first, first + rows[-1] + 1 - rows.start, rows.step))
        begin, end = int(wanted.min()), int(wanted.max()) + 1
        q = read_rows(self.layer, files, begin, end - begin, expert=expert)
        found = q if rows.step == 1 and self.same else rows_of(q, wanted - begin)
        found = replace(found, dtype=self.dtype)
        return under_one_scale(found) if self.one_scale else found

    @property
    def stored_scheme(self) -> Scheme:
        """The scheme of its codes as its file has them."""
        assert self.layer is not None
        return self.layer.weight

    def groups(self, files: Mapping[Place, OpenFile]) -> torch.Tensor:
        """Return the group of each input, (columns,) int32, under act-order."""
        assert self.layer is not None
        entry = self.layer.tensors[str(group_index(self.layer.layer))]
        buffer = bytearray(entry.nbytes)
        files[entry.file].read_into(memoryview(buffer), entry.begin)
        return torch.frombuffer(buffer, dtype=torch.int32)

    def _places(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the file positions of rows in the wanted order."""
        return places(rows, self.stored_form.rows, (self.form or MODEL_FORM).rows)

    def _convert(self, files: Mapping[Place, OpenFile], start: int, out: torch.Tensor) -> None:
        """Fill ``out`` with rows from ``start`` on, converted in dtype and form."""
        plain = replace(self, entry=self.raw or self.entry, raw=None, form=self.stored_form)
        wanted = self._places(torch.arange(start, start + len(out)))
        x = read_rows_of(plain, files, wanted).to(self.dtype)
        before, after = self.stored_form, self.form or MODEL_FORM
        if not self.same:
            x = after.stored(before.restored(x))
        if before.columns != after.columns:
            x = x[:, places(torch.arange(x.shape[1]), before.columns, after.columns)]
        out.copy_(x)

    def _fold(self, files: Mapping[Place, OpenFile], start: int, out: torch.Tensor) -> None:
        """Fill ``out`` with rows from ``start`` on, folded."""
        folded = self.folded
        assert folded is not None
        plain = replace(self, entry=self.raw or self.entry, raw=None, folded=None)
        same, weight = plain.dtype == self.dtype, None
        space = bytes_of(out) if same else bytearray(out.numel() * plain.dtype.itemsize)
        x = plain.read(files, start, len(out), space)
        if folded.norm is not None:
            weight = Origin(entry=folded.norm).read(files, 0, self.columns, bytearray(folded.norm.nbytes))
        # A form widens what the model has in its own dtype; another dtype alone is one that was asked for.
        folded.fill(x if self.form is not None else out, x, start, weight)
        if self.form is not None and not same:
            out.copy_(x)

    def read_columns(
        self, files: Mapping[Place, OpenFile], rows: range, columns: tuple[int, int], buffer: bytearray
    ) -> torch.Tensor:
        """Return a band of columns (first, count) of some rows.

        It lies in ``buffer``. A local file is asked for each row's part; from an object store, and where
        codes are decoded, whole rows are read and cut. Of transposed experts, all rows belong to one.
        """
        left, width = columns
        out = torch.frombuffer(buffer, dtype=self.dtype, count=len(rows) * width).view(len(rows), width)
        if self.layer is not None or not self.transposed:
            return self._fill_band(files, rows, left, out)
        expert, first = divmod(rows.start, self.entry.shape[-1])
        inputs = range(expert * self.columns + left, expert * self.columns + left + width)
        return out.copy_(self._band(files, inputs, (first, rows[-1] + 1 - rows.start)).t()[:: rows.step])

    def _read_floats(self, files: Mapping[Place, OpenFile], start: int, out: torch.Tensor) -> None:
        """Fill ``out`` with whole rows of the file."""
        offset = self.entry.begin + start * self.width * self.dtype.itemsize
        files[self.entry.file].read_into(bytes_of(out), offset)

    def _band(self, files: Mapping[Place, OpenFile], rows: range, columns: tuple[int, int]) -> torch.Tensor:
        """Return a band of columns of rows in a file of floats."""
        out = torch.empty(len(rows), columns[1], dtype=self.dtype)
        return replace(self, transposed=False)._fill_band(files, rows, columns[0], out)

    def _fill_band(
        self, files: Mapping[Place, OpenFile], rows: range, left: int, out: torch.Tensor
    ) -> torch.Tensor:
        """Fill ``out`` with some rows from a column on, and return it."""
        (height, width), item = out.shape, self.dtype.itemsize
        file = None if self.layer is not None or self.gathered is not None else files[self.entry.file]
        if file is not None and file.descriptor is not None and self.copied:
            offset, stride = self.entry.begin + left * item, self.columns * item
            read_pieces(
                file,
                bytes_of(out),
                offset + rows.start * stride,
                size=width * item,
                stride=rows.step * stride,
            )
            return out
        step = max(1, _BAND_VALUES // max(1, self.columns) // self.alignment) * self.alignment
        piece = bytearray(step * self.columns * item)
        for at in range(0, height, step):
            part = self.read(files, rows[at], min(step, height - at), piece, step=rows.step)
            out[at : at + len(part)] = part[:, left : left + width]
        return out


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


def rows_of(q: QuantizedTensor, rows: torch.Tensor) -> QuantizedTensor:
    """Return some rows of codes; raises UnsupportedError for shared parameters."""
    if any(len(numbers) not in (1, q.shape[0]) for numbers in q.params.stored):
        raise UnsupportedError(f"rows in another order than in the file share a scale in {q.scheme}")
    stored = [numbers if len(numbers) == 1 else numbers[rows] for numbers in q.params.stored]
    params = QuantizationParams.of(q.scheme, (len(rows), q.shape[1]), q.params.dtype, stored)
    return replace(q, data=q.data[rows], params=params, shape=(len(rows), q.shape[1]))


def under_one_scale(q: QuantizedTensor) -> QuantizedTensor:
    """Replace the equal block scales of codes by one tensor scale."""
    (level,) = q.scheme.scales
    scheme = replace(q.scheme, scales=(replace(level, granularity=Granularity.tensor()),))
    scale = q.params.stored[0].flatten()[:1].clone()
    return replace(q, params=QuantizationParams.of(scheme, q.shape, q.params.dtype, [scale]))


class NewTensor(NamedTuple):
    """A new tensor: its name, the tensor before it, and its numbers."""

    name: str
    near: TensorEntry
    value: torch.Tensor

    @property
    def origin(self) -> Origin:
        """Origin that writes it."""
        value, near = self.value.detach().cpu().contiguous(), self.near
        entry = TensorEntry(
            name=self.name, dtype=FILE_DTYPES[value.dtype], shape=tuple(value.shape), begin=near.begin,
            nbytes=value.nbytes, file=near.file,
        )  # fmt: skip
        return Origin(entry=entry, data=flat_bytes(value).numpy().tobytes())
