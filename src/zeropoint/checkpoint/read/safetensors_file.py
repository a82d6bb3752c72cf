"""One safetensors file: strict header parser, and new headers.

Byte layout: 8 bytes, the header's length N as an unsigned little-endian integer; N bytes of JSON,
`{"__metadata__": {str: str}, NAME: {"dtype": str, "shape": [int], "data_offsets": [begin, end]}, ...}`;
then the data, with the offsets counted from its first byte. The tensors cover the data from end to end,
without hole or overlap.

This module owns what one file may say. It knows nothing of directories, torch or quantization, nor where the
bytes come from (storage.py).

It accepts what safetensors 0.8.0 accepts, but for these, which that library takes and this module refuses:
a tensor name or metadata key that appears twice (it keeps the last), keys of a tensor besides the three
(their meaning is unknown), a tensor written as an array or a dtype written as an object, a shape whose
overflow of 63 bits is hidden by a 0, and a name above `MAX_NAME_BYTES`.

Source: https://github.com/huggingface/safetensors, README (section Format) and safetensors/src/tensor.rs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from zeropoint.checkpoint.read.json_stream import JsonError, JsonStream
from zeropoint.checkpoint.read.object_store import Stamp
from zeropoint.checkpoint.read.storage import OpenFile, Place, opened, place, read_bytes, shown
from zeropoint.checkpoint.read.tensor_entries import Entries, TensorEntry
from zeropoint.codecs.containers.protocol import Metadata
from zeropoint.codecs.containers.safetensors import (
    DAMAGED,
    MAX_BYTES,
    MAX_HEADER_BYTES,
    METADATA,
    brief,
    check_metadata,
    check_name,
    data_bytes,
    tensor_error,
)
from zeropoint.errors import CheckpointError, printable

# What one tensor says takes some hundred characters; a longer text is no tensor, and is never made a value.
_MAX_SPEC = 1 << 16
# Published files have a few dozen; a million of them would take a gigabyte.
_MAX_METADATA_KEYS = 100_000
PIECE = 1 << 20
"""Bytes of a text that are read at once."""

_TENSOR_KEYS = frozenset(("dtype", "shape", "data_offsets"))
_CONVERT = "convert it to safetensors first, with software that you trust; zeropoint never unpickles"
LFS_MAGIC = b"version https://git-lfs"
_LFS = ("Git LFS pointer, the small text in place of a file", "run `git lfs pull`, or download the real file")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Header of one file: tensors in file order, metadata, and stamp.

    `config`: the model's configuration, where the file says itself what it is. `graph`: what else it says of
    the model, and `others`: the state of files next to it with tensors of its. `inside`: tensors of
    the graph.
    """

    table: Entries
    metadata: Metadata
    stamp: Stamp
    config: Mapping[str, Any] | None = None
    graph: bytes = b""
    others: Mapping[Place, Stamp] = field(default_factory=dict)
    inside: Sequence[str] = ()

    @property
    def entries(self) -> Sequence[TensorEntry]:
        """The tensors in file order."""
        return self.table.values()


@dataclass(frozen=True, slots=True)
class _NotACount:
    """A JSON number that is no unsigned integer, as spelled."""

    text: str

    def __repr__(self) -> str:
        return self.text


def foreign_magic(head: bytes) -> tuple[str, str] | None:
    """Return the kind and remedy of a foreign file, or None.

    >>> foreign_magic(b"GGUF" + bytes(28))
    ('GGUF file', 'pass the safetensors checkpoint that it was made from')
    """
    return next(((what, remedy) for magic, what, remedy in _MAGICS if head.startswith(magic)), None)


def parse_header(path: Place | str) -> Header:
    """Read and validate the header of a safetensors file, without data.

    The time is linear in the header, and nothing is allocated for a length that the file does not have.
    Raises CheckpointError, with the tensor and the remedy, where the file is no well-formed safetensors file.
    """
    path = place(path)
    with opened(path) as file:
        length = _header_length(file, path)
        table, metadata = _decode(file, path, length)
    table = table.in_file_order()
    _check_cover(table.values(), path, 8 + length, file_size=file.stamp.size)
    return Header(table=table, metadata=metadata, stamp=file.stamp)


def _not_safetensors(path: Place, head: bytes, problem: str) -> CheckpointError:
    """Build the error of an unreadable header, with the format if known.

    The magic is asked only after the header failed: `80 02` and others also begin a valid header's length.
    """
    foreign = foreign_magic(head)
    if foreign is None:
        return CheckpointError(f"{shown(path)} is not a safetensors file: {problem}; {DAMAGED}")
    what, remedy = foreign
    return CheckpointError(f"{shown(path)} is not a safetensors file but a {what}; {remedy}")


def pieces(file: OpenFile, begin: int, size: int) -> Iterator[bytes]:
    """Yield ``size`` bytes of a file from ``begin`` on, in pieces."""
    for at in range(0, size, PIECE):
        yield bytes(read_bytes(file, begin + at, min(PIECE, size - at)))


def _header_length(file: OpenFile, path: Place) -> int:
    """Return the checked length of the header's JSON in bytes."""
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
    """Build a JSON object's dict; raises ValueError for a duplicate key."""
    table = dict(pairs)
    if len(table) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{printable(twice)} appears twice in one object")
    return table


def _count(text: str) -> int | _NotACount:
    # 20 digits hold 2**64 - 1. Python's int() is quadratic in the digits and itself refuses above 4300.
    return int(text) if len(text) <= 20 and text[0] != "-" else _NotACount(text)


def _decode(file: OpenFile, path: Place, length: int) -> tuple[Entries, Mapping[str, str]]:
    """Return validated tensors, except their places, and the metadata."""
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
            f"{shown(path)}: in the header, {error}, but each name must be unique; {DAMAGED}"
        ) from error


def _walk(file: OpenFile, path: Place, length: int) -> tuple[Entries, Mapping[str, str]]:
    stream = JsonStream(
        pieces(file, 8, length),
        object_pairs_hook=unique_keys,
        parse_int=_count,
        parse_float=_NotACount,
        parse_constant=_NotACount,
    )
    if not stream.is_object:
        found = stream.value(_MAX_SPEC)
        stream.end()
        problem = f"the header is a JSON {type(found).__name__}, but must be an object"
        raise _not_safetensors(path, _head(file), problem)
    table, metadata = Entries(), None
    for name in stream.members():
        if name == METADATA:
            if metadata is not None:
                raise ValueError(f"{printable(name)} appears twice in one object")
            metadata = _read_metadata(stream, path)
        elif not table.add(_entry(name, stream.value(_MAX_SPEC), path, 8 + length)):
            raise ValueError(f"{printable(name)} appears twice in one object")
    stream.end()
    return table, metadata or MappingProxyType({})


def _read_metadata(stream: JsonStream, path: Place) -> Mapping[str, str]:
    """Return the content of ``__metadata__``; null counts as absent."""
    if not stream.is_object:
        return check_metadata(stream.value(_MAX_SPEC), path)
    found: dict[str, Any] = {}
    for key in stream.members():
        if key in found:
            raise ValueError(f"{printable(key)} appears twice in one object")
        found[key] = stream.value() if stream.is_text else stream.value(_MAX_SPEC)
        if len(found) > _MAX_METADATA_KEYS:
            rule = f"more than {_MAX_METADATA_KEYS} keys, above the limit"
            raise CheckpointError(f"{shown(path)}: {METADATA} has {rule}; {DAMAGED}")
    return check_metadata(found, path)


def _entry(name: str, spec: object, path: Place, data_begin: int) -> TensorEntry:
    """Validate one tensor of the header, except its place among others."""
    check_name(path, name)
    if not isinstance(spec, dict):
        raise tensor_error(path, name, f"is {brief(spec)}, but must be an object")
    if spec.keys() != _TENSOR_KEYS:
        missing, unknown = sorted(_TENSOR_KEYS - spec.keys()), sorted(spec.keys() - _TENSOR_KEYS)
        problem = f"lacks the keys {missing}" if missing else f"has the unknown keys {brief(unknown)}"
        raise tensor_error(path, name, f"{problem}, but must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = spec["dtype"], spec["shape"], spec["data_offsets"]
    if not isinstance(shape, list):
        raise tensor_error(path, name, f"has the shape {brief(shape)}, but it must be an array")
    nbytes = data_bytes(path, name, dtype, shape)
    if not isinstance(offsets, list) or [type(offset) for offset in offsets] != [int, int]:
        problem = f"has the data_offsets {brief(offsets)}, but they must be two unsigned integers"
        raise tensor_error(path, name, problem)
    begin, end = offsets
    if end < begin:
        raise tensor_error(path, name, f"has the data_offsets [{begin}, {end}], which end before they begin")
    if end - begin != nbytes:
        problem = f"has {end - begin} bytes of data, but {dtype} of shape {brief(shape)} takes {nbytes}"
        raise tensor_error(path, name, problem)
    if data_begin + end > MAX_BYTES:
        raise tensor_error(path, name, f"has the data_offsets {brief(offsets)}, which overflow 63 bits")
    return TensorEntry(
        name=name, dtype=dtype, shape=tuple(shape), begin=data_begin + begin, nbytes=nbytes, file=path
    )


def _check_cover(entries: Sequence[TensorEntry], path: Place, data_begin: int, *, file_size: int) -> None:
    """Refuse overlapping tensors, holes, and a wrong file end."""
    expected = data_begin
    for index, entry in enumerate(entries):
        if entry.begin != expected:
            gap = entry.begin - expected
            before = f"tensor {printable(entries[index - 1].name)}" if index else "the header"
            what = f"leaves a hole of {gap} bytes after" if gap > 0 else f"overlaps by {-gap} bytes with"
            problem = f"begins at data offset {entry.begin - data_begin}, which {what} {before}"
            raise tensor_error(path, entry.name, problem)
        expected = entry.begin + entry.nbytes
        if expected > file_size:
            problem = f"ends at byte {expected}, but the file has {file_size}: it is truncated"
            raise tensor_error(path, entry.name, problem, remedy="download it again")
    if expected < file_size:
        trailing = f"{file_size - expected} trailing bytes after the data of its last tensor"
        raise CheckpointError(f"{shown(path)} has {trailing}, but must end there; {DAMAGED}")
