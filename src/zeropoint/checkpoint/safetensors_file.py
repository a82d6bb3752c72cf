"""Read and lay out one safetensors file: the strict parse of its header, and the header bytes of a new one.

Byte layout: 8 bytes, the header's length N as an unsigned little-endian integer; N bytes of JSON,
`{"__metadata__": {str: str}, NAME: {"dtype": str, "shape": [int], "data_offsets": [begin, end]}, ...}`;
then the data, with the offsets counted from its first byte. The tensors cover the data from end to end,
without hole or overlap.

This module owns what one file may say. It knows nothing of directories, torch or quantization, nor where the
bytes come from (storage.py).

It accepts what safetensors 0.8.0 accepts, but for these, which that library takes and this module refuses:
a tensor name or metadata key that stands twice (it keeps the last), keys of a tensor beside the three (their
meaning is unknown), a tensor written as an array or a dtype written as an object, a shape whose overflow of
63 bits is hidden by a 0, and a name above `MAX_NAME_BYTES`.

Source: https://github.com/huggingface/safetensors, README (section Format) and safetensors/src/tensor.rs.
"""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zeropoint.checkpoint.columns import Names
from zeropoint.checkpoint.entries import Entries, TensorEntry
from zeropoint.checkpoint.json_stream import JsonError, JsonStream
from zeropoint.checkpoint.object_store import Stamp
from zeropoint.checkpoint.storage import OpenFile, Place, open_file, place, shown
from zeropoint.errors import CheckpointError, near_misses, printable

# The library's own limit (MAX_HEADER_SIZE in tensor.rs); a larger header would load nowhere.
MAX_HEADER_BYTES = 100_000_000
# Ten times the longest name seen in published models; a longer one only floods logs and reports.
MAX_NAME_BYTES = 4096
# What one tensor says takes some hundred characters; a longer text is no tensor, and is never made a value.
_MAX_SPEC = 1 << 16
# Published files have a few dozen; a million of them would take a gigabyte.
_MAX_METADATA_KEYS = 100_000
PIECE = 1 << 20
"""Bytes of a text that are read at once."""
# File offsets are signed 64-bit integers, and so are torch's sizes.
_MAX_BYTES = 2**63 - 1

DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {
        name: bits
        for bits, names in (
            (4, "F4"),
            (6, "F6_E2M3 F6_E3M2"),
            (8, "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ"),
            (16, "I16 U16 F16 BF16"),
            (32, "I32 U32 F32"),
            (64, "C64 F64 I64 U64"),
        )
        for name in names.split()
    }
)
"""Bits an element, for each dtype of safetensors 0.8.0 (`enum Dtype` in tensor.rs)."""

_METADATA = "__metadata__"
_TENSOR_KEYS = frozenset(("dtype", "shape", "data_offsets"))
_CONVERT = "convert it to safetensors first, with software that you trust; zeropoint never unpickles"
LFS_MAGIC = b"version https://git-lfs"
_LFS = (
    "Git LFS pointer, the small text that stands for a file",
    "run `git lfs pull`, or download the real file",
)
# The first bytes of what people pass by mistake: (magic, what it is, remedy).
_MAGICS: tuple[tuple[bytes, str, str], ...] = (
    (LFS_MAGIC, *_LFS),
    *((bytes((0x80, p)), "Python pickle (.bin, .pt or .ckpt)", _CONVERT) for p in range(2, 6)),
    (
        b"PK\x03\x04",
        "zip archive, such as torch.save and numpy.savez write (.bin, .pt, .ckpt, .npz)",
        _CONVERT,
    ),
    (b"PK\x05\x06", "empty zip archive", "pass a safetensors file"),
    (b"GGUF", "GGUF file", "pass the safetensors checkpoint that it was made from"),
    (b"\x1f\x8b", "gzip archive", "unpack it first"),
    (b"\x28\xb5\x2f\xfd", "zstd archive", "unpack it first"),
    (b"\xfd7zXZ\x00", "xz archive", "unpack it first"),
    (b"BZh", "bzip2 archive", "unpack it first"),
    (b"\x93NUMPY", "numpy array file", _CONVERT),
    (b"\x89HDF\r\n\x1a\n", "HDF5 file", "convert it to safetensors first"),
    (b"<!DOCTYPE", "HTML page, perhaps a download's error message", "download the file again"),
    (b"<html", "HTML page, perhaps a download's error message", "download the file again"),
)
# Long enough for each magic above.
_MAGIC_BYTES = 32
_DAMAGED = "the file is damaged or was not written as safetensors; download or export it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Hold what one file says: tensors in file order, metadata, and the state of the file."""

    table: Entries
    metadata: Mapping[str, str]
    data_begin: int
    file_size: int
    stamp: Stamp

    @property
    def entries(self) -> Sequence[TensorEntry]:
        """The tensors in file order."""
        return self.table.values()


@dataclass(frozen=True, slots=True)
class _NotACount:
    """Stand for a JSON number that is no unsigned integer, in its own spelling, until its place is known."""

    text: str

    def __repr__(self) -> str:
        return self.text


def foreign_magic(head: bytes) -> tuple[str, str] | None:
    """Return what a file that begins with `head` is and the remedy, or None where no known magic matches.

    >>> foreign_magic(b"GGUF" + bytes(28))
    ('GGUF file', 'pass the safetensors checkpoint that it was made from')
    """
    return next(((what, remedy) for magic, what, remedy in _MAGICS if head.startswith(magic)), None)


def parse_header(path: Place | str) -> Header:
    """Read and validate the header of the safetensors file at `path`; the data itself is not read.

    The time is linear in the header, and nothing is allocated for a length that the file does not have.
    Raises CheckpointError, with the tensor and the remedy, where the file is no well-formed safetensors file.
    """
    path = place(path)
    file = open_file(path)
    try:
        length = _header_length(file, path)
        table, metadata = _decode(file, path, length)
    finally:
        file.close()
    table = table.in_file_order()
    _check_cover(table.values(), path, 8 + length, file_size=file.stamp.size)
    return Header(
        table=table, metadata=metadata, data_begin=8 + length, file_size=file.stamp.size, stamp=file.stamp
    )


def _not_safetensors(path: Place, head: bytes, problem: str) -> CheckpointError:
    """Build the error of an unreadable header, which names the format where the first bytes tell it.

    The magic is asked only after the header failed: `80 02` and others also begin a valid header's length.
    """
    foreign = foreign_magic(head)
    if foreign is None:
        return CheckpointError(f"{shown(path)} is not a safetensors file: {problem}; {_DAMAGED}")
    what, remedy = foreign
    return CheckpointError(f"{shown(path)} is not a safetensors file but a {what}; {remedy}")


def pieces(file: OpenFile, begin: int, size: int) -> Iterator[bytes]:
    """Yield ``size`` bytes of a file from the absolute offset ``begin`` on, a piece at a time."""
    for at in range(0, size, PIECE):
        buffer = bytearray(min(PIECE, size - at))
        file.read_into(memoryview(buffer), begin + at)
        yield bytes(buffer)


def _header_length(file: OpenFile, path: Place) -> int:
    """Return the bytes of the header's JSON, after it was compared with the limit and the file."""
    size, head = file.stamp.size, _head(file)
    if size < 8:
        raise _not_safetensors(
            path, head, f"{size} bytes are too small for a header, which takes 8 bytes or more"
        )
    length = int.from_bytes(head[:8], "little")
    if length > MAX_HEADER_BYTES:
        rule = (
            f"its first 8 bytes say that the header has {length} bytes, above the limit of {MAX_HEADER_BYTES}"
        )
        raise _not_safetensors(path, head, rule)
    if length > size - 8:
        rule = f"the header has {length} bytes, but only {size - 8} follow its length: the file is truncated"
        raise _not_safetensors(path, head, rule)
    return length


def _head(file: OpenFile) -> bytes:
    return b"".join(pieces(file, 0, min(file.stamp.size, _MAGIC_BYTES)))


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object's dict, for `object_pairs_hook`; raises ValueError where a key stands twice."""
    table = dict(pairs)
    if len(table) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{printable(twice)} stands twice in one object")
    return table


def _count(text: str) -> int | _NotACount:
    # 20 digits hold 2**64 - 1. Python's int() is quadratic in the digits and itself refuses above 4300.
    return int(text) if len(text) <= 20 and text[0] != "-" else _NotACount(text)


def _decode(file: OpenFile, path: Place, length: int) -> tuple[Entries, Mapping[str, str]]:
    """Return the tensors in the order of the header, each validated but for its place, and the metadata."""
    problem: str
    try:
        return _walk(file, path, length)
    except CheckpointError:
        raise
    except UnicodeDecodeError as error:
        problem = f"the header is not UTF-8 at its byte {error.start}"
        raise _not_safetensors(path, _head(file), problem) from error
    except JsonError as error:
        raise _not_safetensors(path, _head(file), f"the header is not JSON: {error}") from error
    except RecursionError as error:
        problem = "the header is nested deeper than 3 levels"
        raise _not_safetensors(path, _head(file), problem) from error
    except ValueError as error:
        raise CheckpointError(
            f"{shown(path)}: in the header, {error}, but each name must be unique; {_DAMAGED}"
        ) from error


def _walk(file: OpenFile, path: Place, length: int) -> tuple[Entries, Mapping[str, str]]:
    stream = JsonStream(
        pieces(file, 8, length), object_pairs_hook=unique_keys, parse_int=_count, parse_float=_NotACount,
        parse_constant=_NotACount,
    )  # fmt: skip
    if not stream.is_object:
        found = stream.value(_MAX_SPEC)
        stream.end()
        problem = f"the header is a JSON {type(found).__name__}, but must be an object"
        raise _not_safetensors(path, _head(file), problem)
    table, metadata = Entries(), None
    for name in stream.members():
        if name == _METADATA:
            if metadata is not None:
                raise ValueError(f"{printable(name)} stands twice in one object")
            metadata = _read_metadata(stream, path)
        elif not table.add(_entry(name, stream.value(_MAX_SPEC), path, 8 + length)):
            raise ValueError(f"{printable(name)} stands twice in one object")
    stream.end()
    return table, metadata or MappingProxyType({})


def _read_metadata(stream: JsonStream, path: Place) -> Mapping[str, str]:
    """Return what ``__metadata__`` says; null counts as absent, as in the library."""
    if not stream.is_object:
        return _check_metadata(stream.value(_MAX_SPEC), path)
    found: dict[str, Any] = {}
    for key in stream.members():
        if key in found:
            raise ValueError(f"{printable(key)} stands twice in one object")
        found[key] = stream.value() if stream.is_text else stream.value(_MAX_SPEC)
        if len(found) > _MAX_METADATA_KEYS:
            rule = f"more than {_MAX_METADATA_KEYS} keys, above the limit"
            raise CheckpointError(f"{shown(path)}: {_METADATA} has {rule}; {_DAMAGED}")
    return _check_metadata(found, path)


def _check_metadata(metadata: object, path: Place) -> Mapping[str, str]:
    if metadata is None:
        return MappingProxyType({})
    place = f"{shown(path)}: {_METADATA}"
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{place} is {_brief(metadata)}, but must be an object of strings; {_DAMAGED}")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise CheckpointError(
                f"{place}: {printable(key)} is {_brief(value)}, but must be a string; {_DAMAGED}"
            )
        if not _is_unicode(key) or not _is_unicode(value):
            raise CheckpointError(f"{place}: {printable(key)} holds half a surrogate pair; {_DAMAGED}")
    return MappingProxyType(metadata)


def _is_unicode(text: str) -> bool:
    """Say whether `text` can be written as UTF-8, which half a surrogate pair from an escape cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _brief(value: object) -> str:
    # reprlib bounds depth and length: repr() of what a hostile header nests would recurse or fill the memory.
    text = printable(value, limit=80) if isinstance(value, str) else reprlib.repr(value)
    return text.encode("ascii", "backslashreplace").decode()


def _tensor_error(path: Place | None, name: str, problem: str, *, remedy: str = _DAMAGED) -> CheckpointError:
    place = "" if path is None else f"{shown(path)}: "
    return CheckpointError(f"{place}tensor {printable(name)} {problem}; {remedy}")


def _check_name(path: Place | None, name: str) -> None:
    """Refuse a name that no file can hold or no log should; any other is fine, and never becomes a path."""
    if not name.isascii() and not _is_unicode(name):
        raise _tensor_error(path, name, "has half a surrogate pair in its name, which is no Unicode text")
    size = len(name) if name.isascii() else len(name.encode("utf-8"))
    if size > MAX_NAME_BYTES:
        problem = f"has a name of {size} bytes, above the limit of {MAX_NAME_BYTES}"
        raise _tensor_error(path, name, problem, remedy="rename it")


def _data_bytes(path: Place | None, name: str, dtype: object, shape: Sequence[object]) -> int:
    """Return the bytes that dtype and shape ask for; raises CheckpointError where no tensor can have them."""
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        known = near_misses(_brief(dtype), DTYPE_BITS)
        problem = f"has the unknown dtype {_brief(dtype)}, so its bytes cannot be read or copied"
        raise _tensor_error(path, name, problem, remedy=known)
    # Zeros count as 1 here: a reader that multiplies in another order overflows before it meets the 0.
    extent, empty = bits, False
    for size in shape:
        if type(size) is not int or size < 0:
            problem = f"has the shape {_brief(shape)}, but each size must be an unsigned integer"
            raise _tensor_error(path, name, problem)
        extent *= size or 1
        empty = empty or size == 0
        if extent > 8 * _MAX_BYTES:
            problem = f"has the shape {_brief(shape)}, whose size in bytes overflows 63 bits"
            raise _tensor_error(path, name, problem)
    if empty:
        return 0
    if extent % 8:
        problem = f"takes {extent} bits ({dtype} of shape {_brief(shape)}), but must end on a whole byte"
        raise _tensor_error(path, name, problem)
    return extent // 8


def _entry(name: str, spec: object, path: Place, data_begin: int) -> TensorEntry:
    """Validate one tensor of the header, all but its place among the others."""
    _check_name(path, name)
    if not isinstance(spec, dict):
        raise _tensor_error(path, name, f"is {_brief(spec)}, but must be an object")
    if spec.keys() != _TENSOR_KEYS:
        missing, unknown = sorted(_TENSOR_KEYS - spec.keys()), sorted(spec.keys() - _TENSOR_KEYS)
        problem = f"lacks the keys {missing}" if missing else f"has the unknown keys {_brief(unknown)}"
        raise _tensor_error(path, name, f"{problem}, but must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = spec["dtype"], spec["shape"], spec["data_offsets"]
    if not isinstance(shape, list):
        raise _tensor_error(path, name, f"has the shape {_brief(shape)}, but it must be an array")
    nbytes = _data_bytes(path, name, dtype, shape)
    if not isinstance(offsets, list) or [type(offset) for offset in offsets] != [int, int]:
        problem = f"has the data_offsets {_brief(offsets)}, but they must be two unsigned integers"
        raise _tensor_error(path, name, problem)
    begin, end = offsets
    if end < begin:
        raise _tensor_error(path, name, f"has the data_offsets [{begin}, {end}], which end before they begin")
    if end - begin != nbytes:
        problem = f"has {end - begin} bytes of data, but {dtype} of shape {_brief(shape)} takes {nbytes}"
        raise _tensor_error(path, name, problem)
    if data_begin + end > _MAX_BYTES:
        raise _tensor_error(path, name, f"has the data_offsets {_brief(offsets)}, which overflow 63 bits")
    return TensorEntry(
        name=name, dtype=dtype, shape=tuple(shape), begin=data_begin + begin, nbytes=nbytes, file=path
    )


def _check_cover(entries: Sequence[TensorEntry], path: Place, data_begin: int, *, file_size: int) -> None:
    """Refuse tensors that overlap, leave a hole, or do not end where the file ends."""
    expected = data_begin
    for index, entry in enumerate(entries):
        if entry.begin != expected:
            gap = entry.begin - expected
            before = f"tensor {printable(entries[index - 1].name)}" if index else "the header"
            what = f"leaves a hole of {gap} bytes after" if gap > 0 else f"overlaps by {-gap} bytes with"
            problem = f"begins at data offset {entry.begin - data_begin}, which {what} {before}"
            raise _tensor_error(path, entry.name, problem)
        expected = entry.begin + entry.nbytes
        if expected > file_size:
            problem = f"ends at byte {expected}, but the file has {file_size}: it is truncated"
            raise _tensor_error(path, entry.name, problem, remedy="download it again")
    if expected < file_size:
        trailing = f"{file_size - expected} trailing bytes after the data of its last tensor"
        raise CheckpointError(f"{shown(path)} has {trailing}, but must end there; {_DAMAGED}")


def header_bytes(
    entries: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> bytes:
    r"""Return the length and header of a file whose tensors lie one after the other in the given order.

    `entries`: (name, dtype, shape, nbytes) of each tensor. The header is padded with spaces to a multiple of
    8, so that the data begins aligned; tensors stay aligned among themselves where the caller orders them by
    falling dtype size. Empty metadata is left out. Raises CheckpointError where a name stands twice or is
    `__metadata__`, where dtype, shape and nbytes contradict each other, and where the header would exceed the
    limit that loaders set.

    >>> header_bytes([("w", "BF16", (2, 2), 8)], {})[8:]
    b'{"w":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]}}       '
    """
    names, begin = Names(), 0
    text = bytearray(b"{")
    if metadata:
        checked = dict(_check_metadata(dict(metadata), Path("output")))
        text += f'"{_METADATA}":{_compact(checked)},'.encode()
    for name, dtype, shape, nbytes in entries:
        _check_name(None, name)
        if name == _METADATA or names.add(name) is None:
            rule = "is reserved for the metadata" if name == _METADATA else "stands twice in one file"
            raise _tensor_error(None, name, f"cannot be written: the name {rule}", remedy="rename the tensor")
        expected = _data_bytes(None, name, dtype, shape)
        if expected != nbytes:
            problem = f"has {nbytes} bytes, but {dtype} of shape {list(shape)} takes {expected}"
            raise _tensor_error(None, name, problem, remedy="pass matching ones")
        spec = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + nbytes]}
        text += f"{_compact(name)}:{_compact(spec)},".encode()
        begin += nbytes
    text[-1 if text.endswith(b",") else 1 :] = b"}"
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        problem = f"the header of {len(names)} tensors has {len(text)} bytes"
        rule = f"above the limit of {MAX_HEADER_BYTES} that loaders set"
        raise CheckpointError(f"{problem}, {rule}; write more, smaller shards")
    return len(text).to_bytes(8, "little") + text


_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
