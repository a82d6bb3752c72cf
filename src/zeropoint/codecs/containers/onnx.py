"""ONNX models: a graph file, with tensor data inside or nearby.

Layout of what is written:

    NAME.onnx        ModelProto, whose tensors say where their numbers lie: location, offset and length
    NAME.onnx.data   the numbers of one tensor after the other, in the order of their names, each from a
                     multiple of 4096 bytes on, so that it can be mapped; bytes between them are 0

In what is read, tensors lie in the file itself or in any files of its directory. Nodes Constant become
initializers. Tensors whose numbers are few, or stand one by one in fields of the graph, stay there. Of codes
of 4 and 2 bits, the low bits come first, and the last byte is filled up.

Source: onnx 1.22, docs/ExternalData.md and onnx.proto.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ...errors import CheckpointError, near_misses, printable
from .onnx_graph import Initializer, constants, initializers, inlined, lifted, parsed
from .onnx_running import layer_inputs
from .onnx_session import session_error
from .onnx_wire import INLINE, without_numbers
from .protocol import Container, Found, GraphFiles, Head, Metadata, Read, Row, Samples, Use


class _DataType(NamedTuple):
    """A tensor type: its number in TensorProto, and bits per value."""

    number: int
    bits: int


DATA_TYPES: Mapping[str, _DataType] = MappingProxyType({
    "F32": _DataType(1, 32), "U8": _DataType(2, 8), "I8": _DataType(3, 8), "U16": _DataType(4, 16),
    "I16": _DataType(5, 16), "I32": _DataType(6, 32), "I64": _DataType(7, 64), "BOOL": _DataType(9, 8),
    "F16": _DataType(10, 16), "F64": _DataType(11, 64), "U32": _DataType(12, 32), "U64": _DataType(13, 64),
    "C64": _DataType(14, 64), "C128": _DataType(15, 128), "BF16": _DataType(16, 16),
    "F8_E4M3": _DataType(17, 8), "F8_E4M3FNUZ": _DataType(18, 8), "F8_E5M2": _DataType(19, 8),
    "F8_E5M2FNUZ": _DataType(20, 8), "U4": _DataType(21, 4), "I4": _DataType(22, 4), "F4": _DataType(23, 4),
    "F8_E8M0": _DataType(24, 8), "U2": _DataType(25, 2), "I2": _DataType(26, 2),
})  # fmt: skip
"""Types by the names of safetensors, or such as these."""
DATA_NAMES = {found.number: name for name, found in DATA_TYPES.items()}
_ALIGNMENT = 4096
_FEW_BYTES = 128
"""Numbers that stay in the graph: shapes and constants, which runtimes look at when they load it."""
_MAX_AXES, _MAX_BYTES = 64, 2**63 - 1
_AGAIN = "export it again, with raw data in the file or next to it"


@dataclass(frozen=True)
class OnnxFiles(Container):
    """See the module and :class:`Container`."""

    name = "onnx"
    suffix = ".onnx"
    indexed = False
    has_graph = True

    def files(self, shards: Sequence[str]) -> list[str]:
        """See :class:`Container`: one data file; the graph's shard comes first."""
        return [f"{shards[0]}.data"] * len(shards)

    def nbytes(self, dtype: str, shape: tuple[int, ...]) -> int:
        if dtype not in DATA_TYPES:
            raise CheckpointError(f"dtype {dtype} has no type in ONNX; {near_misses(dtype, DATA_TYPES)}")
        return -(-math.prod(shape) * DATA_TYPES[dtype].bits // 8)

    def order(self, dtype: str) -> int:
        """See :class:`Container`: tensors lie by name."""
        return 0

    def graph(self, read: Read, size: int) -> bytes:
        """See :class:`Container`: the model without its large tensor data.

        Local functions are inlined, so that what they multiply with is a weight, too.
        """
        try:
            model = inlined(parsed(without_numbers(read, size)))
            for tensor in lifted(model, lambda tensor: _inline(tensor)[1] > _FEW_BYTES):
                _restore(tensor, read)
            for each in initializers(model)[0]:
                if _inline(each.tensor)[1] <= _FEW_BYTES and each.use.part is None:
                    _restore(each.tensor, read)
            return bytes(model.SerializeToString(deterministic=True))
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {_AGAIN}") from error

    def parse(self, read: Read, size: int) -> tuple[list[Found], dict[str, str]]:
        """See :class:`Container`: the tensors of all files."""
        found, _ = initializers(parsed(self.graph(read, size)))
        try:
            return [_found(each, size) for each in found if each.tensor.data_location == 1], {}
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {_AGAIN}") from error

    def inside(self, graph: bytes) -> list[str]:
        """See :class:`Container`: small or inline tensors, and node tensors."""
        model = parsed(graph)
        held = [each.name for each in initializers(model)[0] if each.tensor.data_location != 1]
        return held + [name for name, _ in constants(model)]

    def load_error(self, file: Path) -> str | None:
        """See :class:`Container`: the load error of onnxruntime."""
        return session_error(file)

    def layer_inputs(
        self, files: GraphFiles, modules: Collection[str], samples: Samples, require: Callable[[int], None]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """See :class:`Container`: onnxruntime runs the model."""
        return layer_inputs(files, modules, samples, require)

    def head(self, rows: Iterable[Row], metadata: Metadata) -> Head:
        """See :class:`Container`: numbers alone."""
        begins, at = array("q"), 0
        for row in rows:
            begins.append(at)
            at += row.nbytes + -row.nbytes % _ALIGNMENT
        return Head(data=b"", begins=begins, size=at)


ONNX = OnnxFiles()


def _inline(tensor: Any) -> tuple[int, int]:
    """Return offset and length of a tensor's data in its own file."""
    data = {entry.key: entry.value for entry in tensor.external_data if tensor.data_location == 1}
    if data.get("location") != INLINE:
        return 0, 0
    return _number(data, "offset"), _number(data, "length")


def _restore(tensor: Any, read: Read) -> None:
    """Put numbers into the graph where they lie in its own file."""
    begin, length = _inline(tensor)
    if length:
        del tensor.external_data[:]
        tensor.ClearField("data_location")
        tensor.raw_data = read(begin, length)


def _number(data: Mapping[str, str], key: str, default: str = "") -> int:
    """Return a byte count in external data; raises CheckpointError otherwise."""
    text = data.get(key, default)
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(_MAX_BYTES))):
        raise CheckpointError(f"has the {key} {printable(repr(text))}, but it must be a number of bytes")
    return int(text)


def _found(each: Initializer, size: int) -> Found:
    """Return the place of an initializer's data in a file."""
    try:
        dtype = DATA_NAMES.get(each.tensor.data_type)
        if dtype is None:
            raise CheckpointError(f"has the type {each.tensor.data_type}, whose numbers are not read here")
        nbytes = _nbytes(dtype, each.dims)
        data = each.data
        begin, location = _number(data, "offset", "0"), data.get("location", "")
        length = _number(data, "length", str(nbytes))
        if length != nbytes:
            shape = list(each.dims)
            raise CheckpointError(f"has {length} bytes, but {dtype} of shape {shape} takes {nbytes}")
        if begin + nbytes > _MAX_BYTES or (location == INLINE and begin + nbytes > size):
            raise CheckpointError(f"ends at byte {begin + nbytes}, which is not there")
        if not location:
            raise CheckpointError("has numbers in another file, but does not say in which")
    except CheckpointError as error:
        raise CheckpointError(f"tensor {printable(each.name)} {error}") from error
    row = Row(each.name, dtype, shape_of(each.dims, each.use), nbytes)
    return Found(row, begin, "" if location == INLINE else location, each.use)


def shape_of(dims: tuple[int, ...], use: Use) -> tuple[int, ...]:
    """Return the shape of a tensor here; weights are (outputs, inputs)."""
    if use.reason is not None or use.kind == "Other":
        return dims
    sides = math.prod(dims[: use.axis + use.transposed]), math.prod(dims[use.axis + use.transposed :])
    return sides[::-1] if use.transposed else sides


def _nbytes(dtype: str, dims: tuple[int, ...]) -> int:
    extent = DATA_TYPES[dtype].bits
    if len(dims) > _MAX_AXES:
        raise CheckpointError(f"has {len(dims)} axes, above the limit of {_MAX_AXES}")
    for side in dims:
        if side < 0:
            raise CheckpointError(f"has the shape {list(dims)}, but each size must be an unsigned integer")
        extent *= side
        if extent > 8 * _MAX_BYTES:
            raise CheckpointError(f"has the shape {list(dims)}, whose size in bytes overflows 63 bits")
    return -(-extent // 8)
