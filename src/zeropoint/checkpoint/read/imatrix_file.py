"""Importance matrices of llama.cpp: mean squares of each weight's inputs.

The older layout, .dat (all little-endian):

    i32 number of weights
    of each    i32 bytes of its name, the name, i32 number of calls, i32 numbers, float32 sums
    the rest   the last chunk and the data set, which are not read

The newer one is GGUF with general.type "imatrix" and for each weight ``X`` two float32 tensors: ``X.in_sum2``
(matrices, columns), sums of squares, and ``X.counts`` (matrices, 1), of how many inputs.

A sum is divided by its count in float32, as llama-quantize does; it takes 1 for a matrix that saw no input.
Source: ggml-org/llama.cpp, tools/imatrix/imatrix.cpp and tools/quantize/quantize.cpp.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...codecs.containers.gguf import GGUF
from ...codecs.containers.protocol import Found
from ...errors import CheckpointError, printable
from .storage import opened, read_bytes, shown

Floats = npt.NDArray[np.float32]
_MAGIC, _SUMS, _COUNTS = b"GGUF", ".in_sum2", ".counts"
_MAX_BYTES, _MAX_NAME = 1 << 30, 4096


def read_imatrix(path: Path) -> dict[str, Floats]:
    """Return each weight's column importance, (matrices * columns,), by its file name.

    Raises CheckpointError for a file that is neither layout, is cut off, has a name twice, or numbers that
    are not finite or negative.
    """
    with opened(path) as file:
        size = file.stamp.size
        if size > _MAX_BYTES:
            raise CheckpointError(f"{shown(path)} has {size} bytes, too many for an importance matrix")
        raw = read_bytes(file, 0, size)
    found: dict[str, Floats] = {}
    try:
        for name, values in _of_gguf(raw) if raw[:4] == _MAGIC else _of_dat(raw):
            if name in found:
                raise CheckpointError(f"it names {printable(name)} twice")
            if not np.isfinite(values).all() or (values < 0).any():
                raise CheckpointError(f"{printable(name)} has numbers that are no mean squares")
            found[name] = values
        if not found:
            raise CheckpointError("it names no weight")
    except CheckpointError as error:
        raise CheckpointError(
            f"{shown(path)} is not read as an importance matrix of llama.cpp: {error}; make it again with "
            "llama-imatrix"
        ) from error
    return found


def _of_dat(raw: bytearray) -> Iterator[tuple[str, Floats]]:
    at = 0

    def take(count: int, what: str) -> memoryview:
        nonlocal at
        if not 0 <= count <= len(raw) - at:
            raise CheckpointError(f"{what} takes {count} bytes, and {len(raw) - at} are left")
        at += count
        return memoryview(raw)[at - count : at]

    def number(what: str) -> int:
        (value,) = struct.unpack("<i", take(4, what))
        return int(value)

    for _ in range(number("the number of weights")):
        length = number("the length of a name")
        if length > _MAX_NAME:
            raise CheckpointError(f"a name has {length} bytes, above the limit of {_MAX_NAME}")
        name = _text(bytes(take(length, "a name")))
        calls, count = number("the calls of a weight"), number("the size of a weight")
        if count < 1:
            raise CheckpointError(f"{printable(name)} has {count} numbers")
        sums = np.frombuffer(take(4 * count, printable(name)), "<f4").astype(np.float32)
        with np.errstate(invalid="ignore"):  # of a NaN, which is refused
            means = sums / np.float32(calls) if calls > 0 else sums
        yield name, means


def _text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError("a name is not UTF-8") from error


def _of_gguf(raw: bytearray) -> Iterator[tuple[str, Floats]]:
    tensors, _ = GGUF.parse(lambda at, count: bytes(raw[at : at + count]), len(raw))
    held = {found.row.name: found for found in tensors}
    for name, found in held.items():
        if name.endswith(_SUMS):
            weight = name.removesuffix(_SUMS)
            counts = held.get(weight + _COUNTS)
            if counts is None:
                raise CheckpointError(f"{printable(weight)} has no {_COUNTS.removeprefix('.')}")
            yield weight, _means(_numbers(raw, found), _numbers(raw, counts), weight)


def _numbers(raw: bytearray, found: Found) -> Floats:
    if found.row.dtype != "F32":
        raise CheckpointError(f"tensor {printable(found.row.name)} is {found.row.dtype}, not F32")
    return np.frombuffer(raw, "<f4", found.row.nbytes // 4, found.begin).astype(np.float32)


def _means(sums: Floats, counts: Floats, name: str) -> Floats:
    if not len(counts) or len(sums) % len(counts):
        raise CheckpointError(f"{printable(name)} has {len(sums)} sums for {len(counts)} counts")
    whole = np.isfinite(counts) & (counts >= 0)
    if not whole.all():
        raise CheckpointError(f"{printable(name)} has a count that is no number of inputs")
    rows, each = sums.reshape(len(counts), -1), counts[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        means = np.where(each > 0, rows / np.where(each > 0, each, 1), 1)
    return means.astype(np.float32).reshape(-1)
