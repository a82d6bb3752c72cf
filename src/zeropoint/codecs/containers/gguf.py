"""GGUF files, version 3: metadata, a tensor directory, and data.

Byte layout (all little-endian; a string is a u64 of its bytes and these in UTF-8):

    "GGUF", u32 version 3, u64 number of tensors, u64 number of values
    values      string key, u32 type, value; an array is a u32 type, a u64 count and its values
    tensors     string name, u32 number of axes, u64 extent of each, the innermost first, u32 type, u64 offset
    data        from the next multiple of general.alignment (32) on, from which offsets count; each tensor
                begins at such a multiple, and bytes between them are 0

Source: ggml-org/ggml, docs/gguf.md; gguf-py 0.19. What is read must cover the file: tensors neither overlap
nor leave holes, and padding is 0.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from ...errors import CheckpointError, near_misses, printable
from .protocol import Container, Found, Head, Metadata, Read, Row, Scalar, Value


class _Type(NamedTuple):
    """A type of ggml: its number, and values and bytes per block."""

    number: int
    block: int
    nbytes: int


TYPES: MappingProxyType[str, _Type] = MappingProxyType({
    "F32": _Type(0, 1, 4), "F16": _Type(1, 1, 2), "Q4_0": _Type(2, 32, 18), "Q4_1": _Type(3, 32, 20),
    "Q5_0": _Type(6, 32, 22), "Q5_1": _Type(7, 32, 24), "Q8_0": _Type(8, 32, 34), "Q8_1": _Type(9, 32, 40),
    "Q2_K": _Type(10, 256, 84), "Q3_K": _Type(11, 256, 110), "Q4_K": _Type(12, 256, 144),
    "Q5_K": _Type(13, 256, 176), "Q6_K": _Type(14, 256, 210), "Q8_K": _Type(15, 256, 292),
    "IQ2_XXS": _Type(16, 256, 66), "IQ2_XS": _Type(17, 256, 74), "IQ3_XXS": _Type(18, 256, 98),
    "IQ1_S": _Type(19, 256, 50), "IQ4_NL": _Type(20, 32, 18), "IQ3_S": _Type(21, 256, 110),
    "IQ2_S": _Type(22, 256, 82), "IQ4_XS": _Type(23, 256, 136), "I8": _Type(24, 1, 1), "I16": _Type(25, 1, 2),
    "I32": _Type(26, 1, 4), "I64": _Type(27, 1, 8), "F64": _Type(28, 1, 8), "IQ1_M": _Type(29, 256, 56),
    "BF16": _Type(30, 1, 2), "TQ1_0": _Type(34, 256, 54), "TQ2_0": _Type(35, 256, 66),
    "MXFP4": _Type(39, 32, 17), "NVFP4": _Type(40, 64, 36), "Q1_0": _Type(41, 128, 18),
    "Q2_0": _Type(42, 64, 18),
})  # fmt: skip
"""Types by name; types of one value per block have safetensors' names."""
_NAMES = {found.number: name for name, found in TYPES.items()}
_MAGIC, _VERSION, _ALIGNMENT = b"GGUF", 3, 32
ALIGNMENT = "general.alignment"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U8, _U32, _I32, _F32, _BOOL, _STRING, _ARRAY, _U64, _I64 = 0, 4, 5, 6, 7, 8, 9, 10, 11
_MAX_AXES, _MAX_NAME, _MAX_KEYS, _MAX_TEXT, _MAX_ITEMS = 4, 4096, 100_000, 1 << 20, 1 << 24
_PIECE = 1 << 20
_MAX_TENSORS = 1 << 18
"""Rows of some 500 bytes each in memory; a model of 61 layers with 256 experts apart has 46,000."""
_DAMAGED = "the file is damaged or was not written as GGUF; download or export it again"


@dataclass(frozen=True)
class GgufFile(Container):
    """See the module and :class:`Container`."""

    name = "gguf"
    suffix = ".gguf"
    indexed = False
    keeps_order = True

    def files(self, shards: Sequence[str]) -> list[str]:
        """See :class:`Container`: one file has all."""
        return ["model.gguf"] * len(shards)

    def nbytes(self, dtype: str, shape: tuple[int, ...]) -> int:
        return _nbytes(dtype, shape)

    def order(self, dtype: str) -> int:
        """See :class:`Container`: tensors lie by name."""
        return 0

    def parse(self, read: Read, size: int) -> tuple[list[Found], dict[str, GgufValue]]:
        try:
            return _parse(_Cursor(read, size), read, size)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {_DAMAGED}") from error

    def head(self, rows: Iterable[Row], metadata: Metadata) -> Head:
        offsets, directory, first = array("q"), bytearray(), bytearray()
        at, alignment = 0, _alignment(metadata)
        for row in rows:
            if len(row.shape) > _MAX_AXES:
                raise CheckpointError(
                    f"tensor {printable(row.name)} has {len(row.shape)} axes, and GGUF holds {_MAX_AXES}; "
                    f"keep it out"
                )
            extents = row.shape[::-1] or (1,)
            directory += _string(row.name) + struct.pack(f"<I{len(extents)}Q", len(extents), *extents)
            directory += struct.pack("<IQ", TYPES[row.dtype].number, at)
            offsets.append(at)
            at += row.nbytes + -row.nbytes % alignment
            if row.data:
                first += row.data + bytes(-len(row.data) % alignment)
        data = bytearray(_MAGIC + struct.pack("<IQQ", _VERSION, len(offsets), len(metadata)))
        for key, value in metadata.items():
            data += _string(key) + GgufValue.of(value).data
        data += directory
        data += bytes(-len(data) % alignment)
        begins = array("q", (len(data) + offset for offset in offsets))
        return Head(data=bytes(data + first), begins=begins, size=len(data) + at)


GGUF = GgufFile()


@dataclass(frozen=True, slots=True)
class GgufValue:
    """A value of the metadata as stored: its type and bytes."""

    data: bytes

    @staticmethod
    def of(value: Scalar | Sequence[Scalar] | Value) -> GgufValue:
        """Return a value as stored: integers as u32, in arrays as i32."""
        if isinstance(value, GgufValue):
            return value
        if isinstance(value, bytes):
            return GgufValue(struct.pack("<IIQ", _ARRAY, _U8, len(value)) + value)
        if isinstance(value, str | bool | int | float):
            kind = _kind(value)
            return GgufValue(struct.pack("<I", kind) + _packed(kind, [value]))
        assert isinstance(value, Sequence), value
        items: Sequence[Scalar] = value
        kind = _kind(items[0]) if items else _STRING
        kind = _I32 if kind == _U32 else kind
        return GgufValue(struct.pack("<IIQ", _ARRAY, kind, len(items)) + _packed(kind, items))

    def get(self) -> Scalar | list[Scalar]:
        """Return it as a Python value."""
        kind, at = struct.unpack_from("<I", self.data)[0], 4
        if kind != _ARRAY:
            return self._items(kind, 1, at)[0]
        inner, count = struct.unpack_from("<IQ", self.data, at)
        return self._items(inner, count, at + 12)

    def _items(self, kind: int, count: int, at: int) -> list[Scalar]:
        if kind in _SCALARS:
            return list(struct.unpack_from(f"<{count}{_SCALARS[kind]}", self.data, at))
        found: list[Scalar] = []
        for _ in range(count):
            (size,) = struct.unpack_from("<Q", self.data, at)
            # Tokens of some files are bytes that are no text alone.
            found.append(self.data[at + 8 : at + 8 + size].decode("utf-8", "replace"))
            at += 8 + size
        return found


def _kind(value: Scalar) -> int:
    """Return the type that a value is written in."""
    if isinstance(value, str):
        return _STRING
    if isinstance(value, bool | float):
        return _BOOL if isinstance(value, bool) else _F32
    if value < 0:
        return _I32 if value >= -(1 << 31) else _I64
    return _U32 if value < 1 << 32 else _U64


def _packed(kind: int, items: Sequence[Scalar]) -> bytes:
    if kind == _STRING:
        return b"".join(_string(str(item)) for item in items)
    return struct.pack(f"<{len(items)}{_SCALARS[kind]}", *items)


def _string(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _nbytes(dtype: str, shape: Sequence[int]) -> int:
    if dtype not in TYPES:
        raise CheckpointError(f"dtype {dtype} has no type in GGUF; {near_misses(dtype, TYPES)}")
    found, columns = TYPES[dtype], shape[-1] if shape else 1
    if columns % found.block:
        raise CheckpointError(
            f"a row of {columns} values does not fill blocks of {found.block}, as {dtype} has them"
        )
    return math.prod(shape) // found.block * found.nbytes


class _Cursor:
    """Reads a file sequentially; raises CheckpointError at its end."""

    def __init__(self, read: Read, size: int) -> None:
        self.at = 0
        self._read, self._size = read, size
        self._piece, self._begin = b"", 0

    def take(self, count: int) -> bytes:
        if count > self._size - self.at:
            raise CheckpointError(f"it ends at byte {self._size}, before its head does: it is truncated")
        begin = self.at - self._begin
        if begin + count > len(self._piece):
            self._begin, begin = self.at, 0
            self._piece = self._read(self.at, min(max(count, _PIECE), self._size - self.at))
        self.at += count
        return self._piece[begin : begin + count]

    def number(self, form: str) -> int:
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return int(value)

    def text(self, limit: int) -> str:
        try:
            return self.string(limit).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError("a text of its head is not UTF-8") from error

    def string(self, limit: int) -> bytes:
        size = self.number("<Q")
        if size > limit:
            raise CheckpointError(f"a text of its head has {size} bytes, above the limit of {limit}")
        return self.take(size)

    def value(self) -> GgufValue:
        """Return the type of a value and its bytes."""
        kind = self.number("<I")
        head = struct.pack("<I", kind)
        if kind != _ARRAY:
            return GgufValue(head + self.items(kind, 1))
        inner, count = self.number("<I"), self.number("<Q")
        if count > _MAX_ITEMS or inner == _ARRAY:
            raise CheckpointError(
                f"an array of its head has {count} items of type {inner}, which is not read"
            )
        return GgufValue(head + struct.pack("<IQ", inner, count) + self.items(inner, count))

    def items(self, kind: int, count: int) -> bytes:
        """Return the bytes of some values of one type."""
        if kind in _SCALARS:
            return self.take(count * struct.calcsize(_SCALARS[kind]))
        if kind != _STRING:
            raise CheckpointError(f"a value of its head has the unknown type {kind}")
        data = bytearray()
        for _ in range(count):
            text = self.string(_MAX_TEXT)
            data += struct.pack("<Q", len(text)) + text
        return bytes(data)


def _parse(cursor: _Cursor, read: Read, size: int) -> tuple[list[Found], dict[str, GgufValue]]:
    if cursor.take(4) != _MAGIC or cursor.number("<I") != _VERSION:
        raise CheckpointError(f"it does not begin as a GGUF file of version {_VERSION}")
    tensors, keys = cursor.number("<Q"), cursor.number("<Q")
    if keys > _MAX_KEYS or tensors > min(size // 32, _MAX_TENSORS):
        raise CheckpointError(f"its head names {tensors} tensors and {keys} values, which it has no room for")
    metadata: dict[str, GgufValue] = {}
    for _ in range(keys):
        key = cursor.text(_MAX_NAME)
        if key in metadata:
            raise CheckpointError(f"the key {printable(key)} appears twice")
        metadata[key] = cursor.value()
    alignment = _alignment(metadata)
    rows: dict[str, tuple[Row, int]] = {}
    for _ in range(tensors):
        row, offset = _row(cursor)
        if row.name in rows:
            raise CheckpointError(f"a tensor's name appears twice: {printable(row.name)}")
        rows[row.name] = row, offset
    begin = cursor.at + -cursor.at % alignment
    found = sorted((Found(row, begin + offset) for row, offset in rows.values()), key=lambda each: each.begin)
    _check_cover(found, read, (cursor.at, alignment, size))
    return found, metadata


def _alignment(metadata: Metadata) -> int:
    """Return the number of which multiples tensors begin at."""
    found = GgufValue.of(metadata[ALIGNMENT]).get() if ALIGNMENT in metadata else _ALIGNMENT
    if not isinstance(found, int) or found < 1 or found % 8:
        raise CheckpointError(f"{ALIGNMENT} is {found!r:.40}, but must be a multiple of 8")
    return found


def _row(cursor: _Cursor) -> tuple[Row, int]:
    name, axes = cursor.text(_MAX_NAME), cursor.number("<I")
    if axes > _MAX_AXES:
        raise CheckpointError(f"tensor {printable(name)} has {axes} axes, above the limit of {_MAX_AXES}")
    shape = tuple(cursor.number("<Q") for _ in range(axes))[::-1]
    kind, offset = cursor.number("<I"), cursor.number("<Q")
    if kind not in _NAMES:
        raise CheckpointError(f"tensor {printable(name)} has the type {kind}, which is unknown here")
    try:
        nbytes = _nbytes(_NAMES[kind], shape)
    except CheckpointError as error:
        raise CheckpointError(f"tensor {printable(name)}: {error}") from error
    return Row(name, _NAMES[kind], shape, nbytes), offset


def _check_cover(found: Sequence[Found], read: Read, place: tuple[int, int, int]) -> None:
    """Refuse overlaps, holes, unaligned tensors, and nonzero padding."""
    at, alignment, size = place
    for row, begin, *_ in (*found, Found(Row("the end", "I8", (0,), 0), size)):
        if begin + row.nbytes > size:
            raise CheckpointError(
                f"tensor {printable(row.name)} ends at byte {begin + row.nbytes}, but the file at byte "
                f"{size}: it is truncated"
            )
        gap = begin - at
        last = row.nbytes == 0 and begin == size
        if gap < 0 or gap >= alignment or (begin % alignment and not last):
            raise CheckpointError(
                f"tensor {printable(row.name)} lies at byte {begin}, but what comes before it ends at {at}, "
                f"and the file has {size}"
            )
        if any(read(at, gap)):
            raise CheckpointError(f"the padding before {printable(row.name)} is not 0")
        at = begin + row.nbytes
