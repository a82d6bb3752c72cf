"""Where the numbers of a weight come from: rows of floats, whether its checkpoint holds floats or codes.

A checkpoint that is quantized already is seen through its origins as if it were not: each quantized layer
is one tensor of floats, with a name, a dtype and a shape, that lies in no file. Everything that plans with
names and shapes works on that view; what reads rows asks the origin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from ...codecs.known import ACTIVATION_SCALES, CONFIG_KEYS, TOOL_FILES
from ...codecs.safetensors_dtypes import FILE_DTYPES, TORCH_DTYPES
from ...errors import CheckpointError, UnsupportedError
from ...functional import dequantize
from ..choose.selection import require_unquantized
from ..read.config_text import WEIGHTS_ONLY_CONFIG, without_keys
from ..read.decoding import alignment, read_rows
from ..read.quantized_layers import StoredLayer, StoredLayers, configuration, find_layers
from ..read.source import Source
from ..read.storage import OpenFile, Place, shown
from ..read.tensor_entries import Entries, TensorEntry
from .limits import decoding_bytes

_LISTED = 10
_OF_QUANTIZATION = frozenset((WEIGHTS_ONLY_CONFIG, *TOOL_FILES))
"""Files that say how a checkpoint is quantized, which its floats are not."""
_BAND_VALUES = 1 << 18
"""Values of whole rows that are read at once to cut columns out of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A tensor of floats whose rows can be read.

    entry: its name, dtype and shape; and its bytes, where ``layer`` is None. layer: the codes that it is
    decoded from; ``entry.file`` is then the file of the codes, and ``entry.begin`` 0. input_scales: tensors
    that make sense only with the codes, such as the scale of quantized inputs.
    """

    entry: TensorEntry
    layer: StoredLayer | None = None
    input_scales: tuple[TensorEntry, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the floats."""
        return TORCH_DTYPES[self.entry.dtype]

    @property
    def files(self) -> tuple[Place, ...]:
        """The files that are read, each once."""
        if self.layer is None:
            return (self.entry.file,)
        return tuple(dict.fromkeys(entry.file for entry in self.layer.tensors.values()))

    @property
    def place(self) -> tuple[str, int]:
        """File name and offset of its first byte, or of its first code."""
        entry = self.entry if self.layer is None else self.layer.codes
        return entry.file.name, entry.begin

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        """The tensors of the files that it is made of, with its input scales."""
        return (self.entry,) if self.layer is None else (*self.layer.tensors.values(), *self.input_scales)

    @property
    def value_bytes(self) -> int:
        """Memory that each number of a tile takes while it is read, itself included."""
        if self.layer is None:
            return self.dtype.itemsize
        return self.dtype.itemsize + decoding_bytes(self.layer.weight, self.layer.dtype, self.dtype)

    @property
    def alignment(self) -> int:
        """Rows of which a part holds a multiple so that no other rows need to be read."""
        return 1 if self.layer is None else alignment(self.layer)

    def read(self, files: Mapping[Place, OpenFile], start: int, rows: int, buffer: bytearray) -> torch.Tensor:
        """Return ``rows`` rows from row ``start`` on, in ``buffer``: (rows, columns), in the origin's dtype.

        All axes but the last count as rows. files: those of :attr:`files`, open. Raises
        CheckpointError when a file is shorter than its header said.
        """
        columns = self.entry.shape[-1]
        size = rows * columns * self.dtype.itemsize
        if self.layer is None:
            offset = self.entry.begin + start * columns * self.dtype.itemsize
            files[self.entry.file].read_into(memoryview(buffer)[:size], offset)
        out = torch.frombuffer(buffer, dtype=self.dtype, count=rows * columns).view(rows, columns)
        if self.layer is not None:
            _decode_rows(self.layer, files, start, out)
        return out

    def read_columns(
        self,
        files: Mapping[Place, OpenFile],
        rows: tuple[int, int],
        columns: tuple[int, int],
        buffer: bytearray,
    ) -> torch.Tensor:
        """Return a band of columns in ``buffer``: (count of rows, count of columns), each as (first, count).

        A local file is asked for each row's part; from an object store, and where codes are decoded, whole
        rows are read and cut.
        """
        (top, height), (left, width) = rows, columns
        item = self.dtype.itemsize
        out = torch.frombuffer(buffer, dtype=self.dtype, count=height * width).view(height, width)
        file = None if self.layer is not None else files[self.entry.file]
        if file is not None and file.descriptor is not None:
            view, size, stride = memoryview(buffer), width * item, self.entry.shape[-1] * item
            for row in range(height):
                offset = self.entry.begin + (top + row) * stride + left * item
                file.read_into(view[row * size : (row + 1) * size], offset)
            return out
        step = max(1, _BAND_VALUES // max(1, self.entry.shape[-1]) // self.alignment) * self.alignment
        piece = bytearray(step * self.entry.shape[-1] * item)
        for row in range(0, height, step):
            part = self.read(files, top + row, min(step, height - row), piece)
            out[row : row + len(part)] = part[:, left : left + width]
        return out


def _decode_rows(layer: StoredLayer, files: Mapping[Place, OpenFile], start: int, out: torch.Tensor) -> None:
    """Fill ``out`` with the values of the rows from ``start`` on, expert by expert."""
    height, step = layer.shape[0], alignment(layer)
    done = 0
    while done < len(out):
        expert, first = divmod(start + done, height)
        count = min(len(out) - done, height - first)
        begin, end = first // step * step, min(height, -(-(first + count) // step) * step)
        q = read_rows(layer, files, begin, end - begin, expert=expert)
        part = out[done : done + count]
        if end - begin == count:
            dequantize(q, out=part)
        else:
            part.copy_(q.dequantize(out.dtype)[first - begin : first - begin + count])
        done += count


@dataclass(frozen=True, slots=True, kw_only=True)
class Floats:
    """A checkpoint seen as if it were not quantized.

    source: with one tensor of floats for each quantized layer, and no configuration of quantization. origins:
    by name, of what it holds as codes. config: what its configuration said of quantization, or None.
    """

    source: Source
    origins: Mapping[str, Origin]
    config: Mapping[str, Any] | None

    def origin(self, entry: TensorEntry) -> Origin:
        """Return where the rows of one of its tensors come from."""
        return self.origins.get(entry.name) or Origin(entry=entry)


def unquantized(source: Source) -> Floats:
    """Return a checkpoint that is not quantized; raises CheckpointError for one that is."""
    require_unquantized(list(source.entries.values()), source.config, shown(source.root))
    return Floats(source=source, origins=MappingProxyType({}), config=None)


def as_floats(source: Source, *, dtype: torch.dtype | None = None) -> Floats:
    """Return a checkpoint, quantized or not, as if it were not.

    dtype: of the floats; by default that which the configuration names, or bfloat16. Raises CheckpointError
    or UnsupportedError when codes cannot be read, listing what is wrong with which layer.
    """
    config = configuration(source)
    if config is None:
        return unquantized(source)
    place = shown(source.root)
    try:
        stored = find_layers(source)
    except UnsupportedError as error:
        raise UnsupportedError(f"{place} cannot be dequantized: {error}") from error
    if stored.problems:
        listed = "; ".join(map(str, stored.problems[:_LISTED]))
        raise CheckpointError(f"{place} cannot be dequantized: {listed}; pass the original checkpoint")
    origins = _origins(source, stored, dtype or _declared_dtype(source))
    floats = replace(
        source, entries=_float_entries(source, origins),
        companions=tuple(path for path in source.companions if str(path) not in _OF_QUANTIZATION),
        config=source.config and {k: v for k, v in source.config.items() if k not in CONFIG_KEYS},
        config_text=source.config_text if source.config is None else without_keys(source.config_text or ""),
    )  # fmt: skip
    require_unquantized(list(floats.entries.values()), floats.config, place)
    return Floats(source=floats, origins=MappingProxyType(origins), config=config)


def _origins(source: Source, stored: StoredLayers, dtype: torch.dtype) -> dict[str, Origin]:
    origins = {}
    for layer in stored.layers:
        joint = "." if layer.experts is None else "_"
        scales = (source.entries.get(f"{layer.module}{joint}{name}") for name in ACTIVATION_SCALES)
        shape = layer.shape if layer.experts is None else (layer.experts, *layer.shape)
        entry = TensorEntry(
            name=layer.name, dtype=FILE_DTYPES[dtype], shape=shape, begin=0,
            nbytes=layer.values * dtype.itemsize, file=layer.codes.file,
        )  # fmt: skip
        origins[entry.name] = Origin(entry=entry, layer=layer, input_scales=tuple(filter(None, scales)))
    return origins


def _float_entries(source: Source, origins: Mapping[str, Origin]) -> Entries:
    """Return the entries of ``source``, in their order, with those of each layer replaced by one."""
    if not origins:
        return source.entries
    floats = {o.layer.codes.name: o.entry for o in origins.values() if o.layer is not None}
    gone = {entry.name for origin in origins.values() for entry in origin.stored}
    return Entries(
        floats.get(name, entry)
        for name, entry in zip(source.entries, source.entries.values(), strict=True)
        if name in floats or name not in gone
    )


def _declared_dtype(source: Source) -> torch.dtype:
    """Return the dtype that the configuration names for weights, or bfloat16."""
    config = source.config or {}
    text = config.get("text_config")
    for table in (config, text if isinstance(text, dict) else {}):
        named = str(table.get("dtype", table.get("torch_dtype")))
        if named in _DTYPES:
            return _DTYPES[named]
    return torch.bfloat16


_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
