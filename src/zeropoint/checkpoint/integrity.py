"""Check every byte of an output against the SHA-256 hashes of its manifest, naming tensor or file.

The manifest comes with the output and proves nothing against who can write both; it finds what disks, memory
and copies change. Its own last member is the SHA-256 of all text before it, so that damage to the manifest is
told apart from damage to what it is about. Its layout is that of manifest.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError, printable
from .documents import MANIFEST
from .entries import TensorEntry
from .problems import Problem
from .proofs import Check, OpenFiles
from .quantize import Scratch
from .safetensors_file import unique_keys
from .source import MAX_JSON_BYTES, Source
from .storage import OpenFile, exists, read_small

_SEAL = b'"sha256": "'
_SMALL_BUFFER = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Bytes of a file that have one hash. begin: the first of them."""

    begin: int
    size: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What the manifest says of a file: its size, and the hash of a shard's header or of all its parts."""

    size: int
    header: str | None
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The hashes of a manifest: files by name, and by tensor its file with its parts."""

    files: Mapping[str, FileRecord]
    tensors: Mapping[str, tuple[str, tuple[Part, ...]]]


def read_manifest(source: Source) -> Manifest | None:
    """Return the manifest of a checkpoint, or None where there is none.

    Raises CheckpointError where it is damaged, which its own hash tells, or is none.
    """
    path = source.root / MANIFEST
    if not exists(path):
        return None
    raw = read_small(path, limit=MAX_JSON_BYTES)[0]
    try:
        table = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
        seal = raw.rindex(_SEAL)
        if table["sha256"] != hashlib.sha256(raw[:seal]).hexdigest():
            raise CheckpointError("its text is not the one that its last member, sha256, is the hash of")
        files = {name: _file(record) for name, record in table["files"].items()}
        tensors = {name: (_text(t["file"]), _parts(t["parts"])) for name, t in table["tensors"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error) if isinstance(error, CheckpointError) else f"{error!r:.200}"
        raise CheckpointError(f"it is damaged: {reason}") from error
    return Manifest(files=files, tensors=tensors)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not a string")
    return value


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r:.40} is not a number of bytes")
    return value


def _parts(found: Iterable[Sequence[object]]) -> tuple[Part, ...]:
    return tuple(
        Part(begin=_count(begin), size=_count(size), digest=_text(digest)) for begin, size, digest in found
    )


def _file(record: Mapping[str, Any]) -> FileRecord:
    header = record.get("header")
    parts = () if header is not None else _parts(record["parts"])
    return FileRecord(size=_count(record["size"]), header=header and _text(header), parts=parts)


class Digest(Check):
    """Hash some bytes of a file, in pieces that fit the thread's memory."""

    def __init__(self, name: str, part: Part, file: OpenFile, place: str) -> None:
        super().__init__(name, part.size)
        self.part = part
        self.file = file
        self.place = place

    def run(self, scratch: Scratch) -> None:
        """See :class:`Task`."""
        found, done = hashlib.sha256(), 0
        while done < self.part.size:
            piece = memoryview(scratch.buffer)[: self.part.size - done]
            self.file.read_into(piece, self.part.begin + done)
            found.update(piece)
            done += len(piece)
        if found.hexdigest() != self.part.digest:
            end = self.part.begin + self.part.size
            self.report(
                f"{self.place}bytes {self.part.begin} to {end} are not those that were written (SHA-256)"
            )


def hash_checks(
    source: Source, manifest: Manifest, files: OpenFiles
) -> tuple[list[Problem], dict[str, list[Check]]]:
    """Return contradictions, and the checks by tensor and then by file, whose header or content they hash.

    No name of the manifest becomes a path: files are looked for among those of the checkpoint.
    """
    present = {*source.shards, *_beside(source)}
    # What somebody put beside the checkpoint, such as a README, is nobody's damage.
    expected = {name for name in present if name in source.shards or name in manifest.files}
    problems = _unmatched(expected, manifest.files) + _unmatched(source.entries, manifest.tensors)
    checks: dict[str, list[Check]] = {}
    for name, record in manifest.tensors.items():
        if name in source.entries:
            found, checks[name] = _tensor(source.entries[name], record, files)
            problems += found
    headers = {name: manifest.files[name].size for name in source.shards if name in manifest.files}
    for entry in source.entries.values():
        headers[entry.file.name] = min(entry.begin, headers.get(entry.file.name, entry.begin))
    for name, file in manifest.files.items():
        if name in present:
            found, more = _content(name, file, files[source.root / name], headers.get(name))
            problems += found
            checks.setdefault(name, []).extend(more)
    return problems, checks


def _beside(source: Source) -> set[str]:
    """Return the names of all files of a checkpoint but its shards and the manifest."""
    paths = {str(path) for path in (*source.companions, *source.left_out)}
    return (paths | ({source.index} if source.index else set())) - {MANIFEST}


def damaged_files(source: Source) -> list[Problem]:
    """Return what is wrong with the files beside the shards, which explains why nothing else can be read."""
    try:
        manifest = read_manifest(source)
    except CheckpointError as error:
        return [Problem(where=MANIFEST, what=str(error))]
    with contextlib.ExitStack() as stack:
        files = OpenFiles(stack)
        present = _beside(source)
        named = {} if manifest is None else {n: r for n, r in manifest.files.items() if n in present}
        checks = [_content(name, record, files[source.root / name], None) for name, record in named.items()]
        scratch = Scratch(bytearray(_SMALL_BUFFER))
        for task in [task for _, tasks in checks for task in tasks]:
            task.run(scratch)
    return [
        problem
        for found, tasks in checks
        for problem in (*found, *(problem for task in tasks for problem in task.problems))
    ]


def _unmatched(present: Iterable[str], named: Iterable[str]) -> list[Problem]:
    here, there = set(present), set(named)
    return [
        *(Problem(where=name, what="the manifest does not name it") for name in sorted(here - there)),
        *(Problem(where=name, what="it is missing, but in the manifest") for name in sorted(there - here)),
    ]


def _content(
    name: str, record: FileRecord, file: OpenFile, header: int | None
) -> tuple[list[Problem], list[Check]]:
    """Return the checks of a shard's header, of so many bytes, or of all of another file."""
    if file.stamp.size != record.size:
        what = f"it has {file.stamp.size} bytes, but was written with {record.size}"
        return [Problem(where=name, what=what)], []
    parts = record.parts
    if header is not None:
        parts = (Part(begin=0, size=header, digest=record.header or ""),)
    elif not _covers(parts, 0, record.size):
        return [Problem(where=name, what="the parts of the manifest do not cover it")], []
    return [], [Digest(name, part, file, "") for part in parts]


def _tensor(
    entry: TensorEntry, record: tuple[str, tuple[Part, ...]], files: OpenFiles
) -> tuple[list[Problem], list[Check]]:
    """Return the checks of the bytes of a tensor."""
    shard, parts = record
    if shard != entry.file.name:
        what = f"it lies in {printable(entry.file.name)}, but was written to {printable(shard)}"
        return [Problem(where=entry.name, what=what)], []
    if not _covers(parts, entry.begin, entry.nbytes):
        return [Problem(where=entry.name, what="the parts of the manifest do not cover it")], []
    place = f"{printable(shard)}: "
    return [], [Digest(entry.name, part, files[entry.file], place) for part in parts]


def _covers(parts: Sequence[Part], begin: int, size: int) -> bool:
    """Return whether parts follow each other from ``begin`` on without a hole, ``size`` bytes in all."""
    at = begin
    for part in parts:
        if part.begin != at:
            return False
        at += part.size
    return at == begin + size
