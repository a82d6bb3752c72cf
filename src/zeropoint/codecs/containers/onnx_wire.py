"""Parser of ONNX files that skips tensor data.

An ONNX file is one message of protocol buffers: fields, each a varint ``number << 3 | wire type`` and a
value. Of these messages a few hold others that matter here:

    ModelProto      7 graph: GraphProto
    GraphProto      1 node: NodeProto, 5 initializer: TensorProto
    NodeProto       5 attribute: AttributeProto
    AttributeProto  5 t: TensorProto, 6 g: GraphProto, 11 graphs: GraphProto
    TensorProto     4 float_data, 9 raw_data, 10 double_data: the numbers, little-endian
                    13 external_data: StringStringEntryProto, 14 data_location: 1 is EXTERNAL

Everything is copied but numbers; in their place stands where they lie, as external data of the location
:data:`INLINE`.

Source: onnx 1.22, onnx/onnx.proto; protobuf.dev, Encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ...errors import CheckpointError
from .protocol import Read

INLINE = "\0"
"""The location of numbers that lie in the file itself, which is the name of no file."""
MAX_GRAPH_BYTES = 1 << 28
"""Published graphs without their numbers have up to 30 MB."""
_MAX_DEPTH = 32
_PIECE = 1 << 16
_MODEL, _GRAPH, _NODE, _ATTRIBUTE, _TENSOR = "model", "graph", "node", "attribute", "tensor"
_INNER: Mapping[tuple[str, int], str] = MappingProxyType({
    (_MODEL, 7): _GRAPH, (_GRAPH, 1): _NODE, (_GRAPH, 5): _TENSOR, (_NODE, 5): _ATTRIBUTE,
    (_ATTRIBUTE, 5): _TENSOR, (_ATTRIBUTE, 6): _GRAPH, (_ATTRIBUTE, 11): _GRAPH,
})  # fmt: skip
_NUMBERS: Mapping[int, tuple[str, tuple[int, ...]]] = MappingProxyType(
    {4: ("float_data", (1, 14)), 9: ("raw_data", ()), 10: ("double_data", (11, 15))}
)
"""Fields of numbers, and the types that they are for; raw_data are for all."""
_DATA_TYPE = 2
_EXTERNAL_DATA, _DATA_LOCATION = 13, 14
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def without_numbers(read: Read, size: int) -> bytes:
    """Return a file with its tensor data replaced by places.

    Raises CheckpointError for what is no well-formed message, nested too deeply, or too large.
    """
    if not size:
        raise CheckpointError("it is empty")
    return bytes(_Walk(read, size).message(_MODEL, (0, size), 0))


class _Walk:
    """Reads the messages of a file."""

    def __init__(self, read: Read, size: int) -> None:
        self._read, self._size = read, size
        self._piece, self._begin = b"", 0
        self._kept = 0

    def message(self, kind: str, span: tuple[int, int], depth: int) -> bytearray:
        """Return a message without its numbers, which lies between two offsets."""
        if depth > _MAX_DEPTH:
            raise CheckpointError(f"its graphs are nested deeper than {_MAX_DEPTH} messages")
        out = bytearray()

        def keep(field: int, begin: int, value: int, end: int) -> None:
            inner = None if value < 0 else _INNER.get((kind, field))
            if inner is None:
                out.extend(self._copied(begin, end))
            elif inner == _TENSOR:
                out.extend(_framed(field, self._tensor(value, end)))
            else:
                out.extend(_framed(field, self.message(inner, (value, end), depth + 1)))

        self._fields(span, keep)
        return out

    def _tensor(self, begin: int, end: int) -> bytearray:
        """Return a tensor that says where its numbers lie."""
        out, found, external, kind = bytearray(), [], False, 0

        def keep(field: int, begin: int, value: int, end: int) -> None:
            nonlocal external, kind
            if field == _DATA_TYPE and value < 0:
                kind, _ = self._varint(begin + 1, end)
            elsewhere = field == _DATA_LOCATION and self._bytes(end - 1, 1) != b"\0"
            external = external or elsewhere or field == _EXTERNAL_DATA
            if field in _NUMBERS and value >= 0 and end > value:
                found.append((field, value, end - value))
            else:
                out.extend(self._copied(begin, end))

        self._fields((begin, end), keep)
        if len(found) > 1 or (found and external):
            raise CheckpointError("a tensor has its numbers in two places")
        for field, offset, length in found:
            name, kinds = _NUMBERS[field]
            if kinds and kind not in kinds:
                raise CheckpointError(f"a tensor of type {kind} has {name}, which is for other types")
            for key, text in (("location", INLINE), ("offset", str(offset)), ("length", str(length))):
                entry = _framed(1, key.encode()) + _framed(2, text.encode())
                out += _framed(_EXTERNAL_DATA, entry)
            out += bytes((_DATA_LOCATION << 3 | _VARINT, 1))
        return out

    def _fields(self, span: tuple[int, int], take: Callable[[int, int, int, int], None]) -> None:
        """Call ``take`` with each field's number, begin, value and end.

        The value's begin is -1 where there are no bytes.
        """
        at, stop = span
        while at < stop:
            begin, value = at, -1
            key, at = self._varint(at, stop)
            field, wire = key >> 3, key & 7
            if wire == _VARINT:
                _, at = self._varint(at, stop)
            elif wire == _BYTES:
                length, value = self._varint(at, stop)
                at = value + length
            elif wire in (_FIXED32, _FIXED64):
                at += 4 if wire == _FIXED32 else 8
            else:
                raise CheckpointError(f"byte {begin} begins no field of a message")
            if not field or at > stop:
                raise CheckpointError(
                    f"the field at byte {begin} ends at byte {at}, but its message at {stop}: it is "
                    "truncated or damaged"
                )
            take(field, begin, value, at)

    def _varint(self, at: int, stop: int) -> tuple[int, int]:
        value = 0
        for shift in range(0, 70, 7):
            if at >= stop:
                raise CheckpointError(f"a message ends at byte {stop}, within a number: it is truncated")
            byte = self._bytes(at, 1)[0]
            value |= (byte & 127) << shift
            at += 1
            if byte < 128:
                return value, at
        raise CheckpointError(f"the number before byte {at} has more than 64 bits")

    def _copied(self, begin: int, end: int) -> bytes:
        self._kept += end - begin
        if self._kept > MAX_GRAPH_BYTES:
            raise CheckpointError(
                f"its graph has more than {MAX_GRAPH_BYTES} bytes besides numbers, above the limit; save it "
                "with raw_data"
            )
        return self._bytes(begin, end - begin)

    def _bytes(self, at: int, count: int) -> bytes:
        begin = at - self._begin
        if begin < 0 or begin + count > len(self._piece):
            self._begin, begin = at, 0
            self._piece = self._read(at, min(max(count, _PIECE), self._size - at))
        return self._piece[begin : begin + count]


def _framed(field: int, data: bytes | bytearray) -> bytes:
    """Return a field that holds bytes."""
    return _number(field << 3 | _BYTES) + _number(len(data)) + bytes(data)


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
