"""The header of a weights file, in any container."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from ...codecs.containers import container_of
from ...codecs.containers.protocol import Found
from ...codecs.model_format import FileModel
from ...codecs.registry import STACKS, codec_of, parts_of
from ...codecs.stored_forms import StoredForm
from ...errors import CheckpointError, printable
from .file_names import is_own, is_plain
from .object_store import RemotePath, Stamp
from .safetensors_file import Header, parse_header
from .storage import Place, opened, read_bytes, shown
from .tensor_entries import Entries, TensorEntry


def read_header(path: Place, name: str | None = None) -> Header:
    """Read and validate the header of the file at ``path``, without data.

    name: tells what kind of file it is, where the path has another. Raises CheckpointError for a file that is
    not well-formed.
    """
    container = container_of(name or path.name)
    if container.indexed:
        return parse_header(path)
    with opened(path) as file:

        def read(begin: int, count: int) -> bytes:
            return bytes(read_bytes(file, begin, count))

        try:
            found, metadata = container.parse(read, file.stamp.size)
            model = codec_of(container.name, metadata).model_format.read(found, metadata, read)
            table = _entries(path, found, model)
            graph = container.graph(read, file.stamp.size)
            inside = container.inside(graph)
            others = _others(path, found)
        except CheckpointError as error:
            raise CheckpointError(f"{shown(path)} cannot be read: {error}") from error
    return Header(
        table=table, metadata=MappingProxyType(metadata), stamp=file.stamp,
        config=None if model is None else model.config, graph=graph, others=others, inside=inside,
    )  # fmt: skip


def _entries(path: Place, found: Sequence[Found], model: FileModel | None) -> Entries:
    """Return the tensors of a file, under model names where known."""
    forms = [((each.row.name, None),) for each in found] if model is None else model.forms
    entries = Entries()
    for (row, begin, other, use), parts in zip(found, forms, strict=True):
        whole = TensorEntry(
            name=row.name,
            dtype=row.dtype,
            shape=row.shape,
            begin=begin,
            nbytes=row.nbytes,
            file=path.parent / other if other else path,
            use=use,
        )
        for entry in _split(whole, parts):
            if not entries.add(entry):
                twice = printable(entry.name)
                raise CheckpointError(f"two tensors of it are {twice} of the model; export it again")
    return entries


def by_parts(entries: Entries) -> Entries:
    """Return model tensors of safetensors files, split where one holds several.

    Raises CheckpointError where two have one name.
    """
    held = [name for name in entries if any(mark in name for mark in STACKS)]
    parts = {name: found for name in held if (found := parts_of(name, entries[name].shape))}
    if not parts:
        return entries
    whole = Entries()
    for entry in itertools.chain.from_iterable(
        _split(e, parts[e.name]) if e.name in parts else (e,) for e in entries.values()
    ):
        if not whole.add(entry):
            raise CheckpointError(
                f"{printable(entry.name)} is there twice, alone and among all experts; keep one"
            )
    return whole


def _split(entry: TensorEntry, parts: Sequence[tuple[str, StoredForm | None]]) -> Iterator[TensorEntry]:
    """Yield the model tensors that one tensor of a file holds."""
    nbytes = entry.nbytes // max(1, len(parts))
    for at, (name, form) in enumerate(parts):
        shape = entry.shape if form is None else form.model_shape(entry.shape)
        yield replace(
            entry, name=name, shape=shape, begin=entry.begin + at * nbytes, nbytes=nbytes, form=form
        )


def inside(root: Place, name: Path | str) -> Place:
    """Return `root / name`, unopened, if it stays inside, links followed."""
    if isinstance(root, RemotePath):
        return root / name
    path = root / name
    real, home = Path(os.path.realpath(path)), Path(os.path.realpath(root))
    caches = (each.parent.parent for each in (root, *root.parents) if each.parent.name == "snapshots")
    if not real.is_relative_to(home) and not any(real.parent == cache / "blobs" for cache in caches):
        raise CheckpointError(
            f"{shown(path)} is a symbolic link to {shown(real)}, outside of the checkpoint's directory; put "
            "the file itself there, or pass the directory that holds it"
        )
    return path


def _others(path: Place, found: Iterable[Found]) -> dict[Place, Stamp]:
    """Return other data files' stamps; raises CheckpointError outside of the directory."""
    others: dict[Place, Stamp] = {}
    for each in found:
        name, where = each.file, f"tensor {printable(each.row.name)}"
        if not name:
            continue
        if not is_plain(name) or is_own(name) or name == path.name:
            raise CheckpointError(
                f"{where} lies in {printable(repr(name))}, but other files must lie in the same directory "
                "under plain names; do not trust this model, or save it again with its data in one file"
            )
        other = path.parent / name
        if other not in others:
            with opened(inside(path.parent, name)) as file:
                others[other] = file.stamp
        end, size = each.begin + each.row.nbytes, others[other].size
        if end > size:
            raise CheckpointError(
                f"{where} ends at byte {end} of {shown(other)}, but that has {size}: it is truncated, or "
                "belongs to another model; download both again"
            )
    return others
