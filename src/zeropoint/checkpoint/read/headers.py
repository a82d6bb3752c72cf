"""What one file of weights says of its tensors, whatever kind of file it is."""

from __future__ import annotations

from types import MappingProxyType

from ...codecs.containers import container_of
from ...errors import CheckpointError
from .safetensors_file import Header, parse_header
from .storage import Place, open_file, shown
from .tensor_entries import Entries, TensorEntry


def read_header(path: Place, name: str | None = None) -> Header:
    """Read and validate what the file at ``path`` says; the bytes of tensors are not read.

    name: that tells what kind of file it is, where the path has another. Raises CheckpointError for a file
    that is not well-formed.
    """
    container = container_of(name or path.name)
    if container.indexed:
        return parse_header(path)
    file = open_file(path)

    def read(begin: int, count: int) -> bytes:
        buffer = bytearray(count)
        file.read_into(memoryview(buffer), begin)
        return bytes(buffer)

    try:
        found, metadata = container.parse(read, file.stamp.size)
    except CheckpointError as error:
        raise CheckpointError(f"{shown(path)} cannot be read: {error}") from error
    finally:
        file.close()
    table = Entries(
        TensorEntry(
            name=row.name, dtype=row.dtype, shape=row.shape, begin=begin, nbytes=row.nbytes, file=path
        )
        for row, begin in found
    )
    begin = min((each.begin for each in found), default=file.stamp.size)
    return Header(
        table=table, metadata=MappingProxyType(metadata), data_begin=begin, file_size=file.stamp.size,
        stamp=file.stamp,
    )  # fmt: skip
