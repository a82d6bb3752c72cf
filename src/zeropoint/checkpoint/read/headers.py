"""What one file of weights says of its tensors, whatever kind of file it is."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from ...codecs.containers import container_of
from ...codecs.containers.protocol import Found
from ...codecs.model_format import FileModel
from ...codecs.registry import codec_of
from ...errors import CheckpointError, printable
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
        model = codec_of(container.name).model_format.read(found, metadata, read)
        table = _entries(path, found, model)
    except CheckpointError as error:
        raise CheckpointError(f"{shown(path)} cannot be read: {error}") from error
    finally:
        file.close()
    begin = min((each.begin for each in found), default=file.stamp.size)
    return Header(
        table=table, metadata=MappingProxyType(metadata), data_begin=begin, file_size=file.stamp.size,
        stamp=file.stamp, config=None if model is None else model.config,
    )  # fmt: skip


def _entries(path: Place, found: Sequence[Found], model: FileModel | None) -> Entries:
    """Return the tensors of a file, under the names of the model where the file says what it is."""
    forms = [(each.row.name, None) for each in found] if model is None else model.forms
    entries = Entries()
    for (row, begin), known in zip(found, forms, strict=True):
        if known is None:
            continue
        name, form = known
        entry = TensorEntry(
            name=name, dtype=row.dtype, shape=row.shape, begin=begin, nbytes=row.nbytes, file=path, form=form
        )
        if not entries.add(entry):
            raise CheckpointError(f"two tensors of it are {printable(name)} of the model; export it again")
    return entries
