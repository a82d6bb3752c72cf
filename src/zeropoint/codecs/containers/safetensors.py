"""Safetensors files with an index: headers, dtypes, and tensor order.

Byte layout: see checkpoint/read/safetensors_file.py, which reads them strictly. Tensors lie by falling dtype,
then by name, as safetensors' own writer puts them, one after the other.
"""

from __future__ import annotations

import json
import math
import reprlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType

import torch

from ...columns import StringTable
from ...errors import CheckpointError, near_misses, printable
from .protocol import Container, Head, Metadata, Row

# The library's own limit (MAX_HEADER_SIZE in tensor.rs); a larger header would load nowhere.
MAX_HEADER_BYTES = 100_000_000
# Ten times the longest name seen in published models; a longer one only floods logs and reports.
MAX_NAME_BYTES = 4096
# File offsets are signed 64-bit integers, and so are torch's sizes.
MAX_BYTES = 2**63 - 1

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

TORCH_DTYPES: MappingProxyType[str, torch.dtype] = MappingProxyType({
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
})  # fmt: skip
"""Name in a safetensors header to torch dtype; F4 and F6 have none."""

FILE_DTYPES: MappingProxyType[torch.dtype, str] = MappingProxyType({v: k for k, v in TORCH_DTYPES.items()})
"""torch dtype to the name in a safetensors header."""

METADATA = "__metadata__"
DAMAGED = "the file is damaged or was not written as safetensors; download or export it again"


def torch_name(dtype: str) -> str:
    """Return torch's name of a file's dtype, as schemes have it.

    >>> torch_name("BF16")
    'bfloat16'
    """
    return str(TORCH_DTYPES[dtype]).removeprefix("torch.")


def check_metadata(metadata: object, path: object) -> Mapping[str, str]:
    """Return checked ``__metadata__``; raises CheckpointError unless it is texts."""
    if metadata is None:
        return MappingProxyType({})
    place = f"{_shown(path)}: {METADATA}"
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{place} is {brief(metadata)}, but must be an object of strings; {DAMAGED}")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise CheckpointError(
                f"{place}: {printable(key)} is {brief(value)}, but must be a string; {DAMAGED}"
            )
        if not is_unicode(key) or not is_unicode(value):
            raise CheckpointError(f"{place}: {printable(key)} holds half a surrogate pair; {DAMAGED}")
    return MappingProxyType(metadata)


def is_unicode(text: str) -> bool:
    """Return whether `text` has a UTF-8 form: no half surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def brief(value: object) -> str:
    """Return a value for a message, whatever it nests."""
    # reprlib bounds depth and length: repr() of what a hostile header nests would recurse or fill the memory.
    text = printable(value, limit=80) if isinstance(value, str) else reprlib.repr(value)
    return text.encode("ascii", "backslashreplace").decode()


def tensor_error(path: object, name: str, problem: str, *, remedy: str = DAMAGED) -> CheckpointError:
    """Return the error of a tensor, with its file, if any."""
    place = "" if path is None else f"{_shown(path)}: "
    return CheckpointError(f"{place}tensor {printable(name)} {problem}; {remedy}")


def check_name(path: object, name: str) -> None:
    """Refuse names that no file or log can hold; never a path."""
    if not name.isascii() and not is_unicode(name):
        raise tensor_error(path, name, "has half a surrogate pair in its name, which is no Unicode text")
    size = len(name) if name.isascii() else len(name.encode("utf-8"))
    if size > MAX_NAME_BYTES:
        problem = f"has a name of {size} bytes, above the limit of {MAX_NAME_BYTES}"
        raise tensor_error(path, name, problem, remedy="rename it")


def data_bytes(path: object, name: str, dtype: object, shape: Sequence[object]) -> int:
    """Return the bytes of a dtype and shape; raises CheckpointError otherwise."""
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        known = near_misses(brief(dtype), DTYPE_BITS)
        problem = f"has the unknown dtype {brief(dtype)}, so its bytes cannot be read or copied"
        raise tensor_error(path, name, problem, remedy=known)
    # Zeros count as 1 here: a reader that multiplies in another order overflows before it meets the 0.
    extent, empty = bits, False
    for size in shape:
        if type(size) is not int or size < 0:
            problem = f"has the shape {brief(shape)}, but each size must be an unsigned integer"
            raise tensor_error(path, name, problem)
        extent *= size or 1
        empty = empty or size == 0
        if extent > 8 * MAX_BYTES:
            problem = f"has the shape {brief(shape)}, whose size in bytes overflows 63 bits"
            raise tensor_error(path, name, problem)
    if empty:
        return 0
    if extent % 8:
        problem = f"takes {extent} bits ({dtype} of shape {brief(shape)}), but must end on a whole byte"
        raise tensor_error(path, name, problem)
    return extent // 8


def header_bytes(
    entries: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> bytes:
    r"""Return length and header of a file of adjacent tensors.

    `entries`: (name, dtype, shape, nbytes) of each tensor. The header is padded with spaces to a multiple of
    8, so that the data begins aligned; tensors stay aligned among themselves where the caller orders them by
    falling dtype size. Empty metadata is left out. Raises CheckpointError where a name appears twice or is
    `__metadata__`, where dtype, shape and nbytes contradict each other, and where the header would exceed the
    limit that loaders set.

    >>> header_bytes([("w", "BF16", (2, 2), 8)], {})[8:]
    b'{"w":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]}}       '
    """
    names, begin = StringTable(), 0
    text = bytearray(b"{")
    if metadata:
        checked = dict(check_metadata(dict(metadata), Path("output")))
        text += f'"{METADATA}":{_compact(checked)},'.encode()
    for name, dtype, shape, nbytes in entries:
        check_name(None, name)
        if name == METADATA or names.add(name) is None:
            rule = "is reserved for the metadata" if name == METADATA else "appears twice in one file"
            raise tensor_error(None, name, f"cannot be written: the name {rule}", remedy="rename the tensor")
        expected = data_bytes(None, name, dtype, shape)
        if expected != nbytes:
            problem = f"has {nbytes} bytes, but {dtype} of shape {list(shape)} takes {expected}"
            raise tensor_error(None, name, problem, remedy="pass matching ones")
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


def _shown(path: object) -> str:
    return printable(str(path), limit=1000)


_ORDER = {name: order for order, name in enumerate(DTYPE_BITS)}


@dataclass(frozen=True)
class Safetensors(Container):
    """See the module and :class:`Container`."""

    name = "safetensors"
    suffix = ".safetensors"
    indexed = True

    def files(self, shards: Sequence[str]) -> list[str]:
        """See :class:`Container`: the source's names, or one for a graph."""
        if any(shard.endswith(self.suffix) for shard in shards):
            return list(shards)
        return [f"{Path(shards[0]).stem}{self.suffix}"] * len(shards)

    def nbytes(self, dtype: str, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * DTYPE_BITS[dtype] // 8

    def order(self, dtype: str) -> int:
        return -_ORDER[dtype]

    def head(self, rows: Iterable[Row], metadata: Metadata) -> Head:
        sizes = array("q")

        def counted() -> Iterator[tuple[str, str, tuple[int, ...], int]]:
            for row in rows:
                sizes.append(row.nbytes)
                yield row[:4]

        data = header_bytes(counted(), {key: str(value) for key, value in metadata.items()})
        begins = array("q", accumulate(sizes, initial=len(data)))
        return Head(data=data, begins=begins[:-1], size=begins[-1])


SAFETENSORS = Safetensors()
