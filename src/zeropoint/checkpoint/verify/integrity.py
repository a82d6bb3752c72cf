"""Check of every output byte against the manifest's SHA-256 hashes.

The manifest comes with the output and proves nothing against who can write both; it finds what disks, memory
and copies change. Its own last member is the SHA-256 of all text before it, so that damage to the manifest is
distinguished from damage to what it describes. run/manifest.py has its layout.
"""

from __future__ import annotations

import functools
import hashlib
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...columns import StringTable
from ...errors import CheckpointError, printable
from ...libraries import reading
from ...methods import NEAREST
from ...methods.method import OutputError
from ..measure.tiles import Scratch
from ..plan.config_and_index import MANIFEST
from ..plan.selection import WEIGHT, module_of
from ..read.json_stream import JsonStream
from ..read.problems import Problem
from ..read.safetensors_file import pieces, unique_keys
from ..read.source import Source, is_weights
from ..read.storage import OpenFile, OpenFiles, exists, opened
from ..read.tensor_entries import TensorEntry
from .proofs import Check

_SEAL = b'"sha256": "'
_SMALL_BUFFER = 1 << 20
_TAIL_BYTES = 1 << 12
"""So many of the last bytes hold the seal, which takes a hundred."""
_MAX_RECORD = 1 << 26
"""Characters of what is said of one tensor: 100 for each of its units of 16 MiB or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedPart:
    """Bytes of a file with one hash, from ``begin`` on."""

    begin: int
    size: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file's size and hashes in the manifest: header, or all parts."""

    size: int
    header: str | None
    parts: tuple[HashedPart, ...]


class Manifest:
    """The manifest of a checkpoint: identity, files, and parts of tensors.

    kept: reasons for tensors that are not quantized, by name. problems: names that only one side has, and
    tensors in another file. nbytes: of all parts of tensors.
    outputs: what it says of the outputs of solved weights, by module.
    """

    def __init__(self, source: Source) -> None:
        self.identity: dict[str, str] = {}
        self.kept: dict[str, str] = {}
        self.files: dict[str, FileRecord] = {}
        self.problems: list[Problem] = []
        self.nbytes = 0
        self._entries = source.entries
        self._indexed = source.container.indexed
        self._others: dict[str, str] = {}
        self._first = array("q", [-1]) * len(source.entries)
        self._count = array("I", [0]) * len(source.entries)
        self._begins, self._sizes, self._digests = array("q"), array("q"), bytearray()
        self._surplus = StringTable()
        self._modules: dict[str, StringTable] = {}
        self.outputs: dict[str, OutputError] = {}

    def add(self, name: str, record: Mapping[str, Any]) -> None:
        """Add a tensor of the manifest; raises ValueError for a duplicate name."""
        shard, parts = _text(record["file"]), _parts(record["parts"])
        number = self._entries.number(name)
        if number is None and parts and not self._indexed:
            own = self._by_place.get((shard, parts[0].begin))
            if own is not None:
                self._others[name], number = own, self._entries.number(own)
        if number is None:
            if self._surplus.add(name) is None:
                raise ValueError(f"{printable(name)} appears twice in one object")
            self.problems.append(Problem(where=name, what="it is missing, but in the manifest"))
            return
        if self._first[number] >= 0:
            raise ValueError(f"{printable(name)} appears twice in one object")
        self._first[number] = len(self._begins)
        file = self._entries.at(number).file.name
        if shard != file:
            what = f"it lies in {printable(file)}, but was written to {printable(shard)}"
            self.problems.append(Problem(where=name, what=what))
            return
        for part in parts:
            self._begins.append(part.begin)
            self._sizes.append(part.size)
            self._digests += bytes.fromhex(part.digest)
            self.nbytes += part.size
        self._count[number] = len(parts)

    def parts(self, name: str) -> tuple[HashedPart, ...] | None:
        """Return the hashed parts of a tensor, or None without any."""
        number = self._entries.number(name)
        if number is None or self._first[number] < 0:
            return None
        first, count = self._first[number], self._count[number]
        return tuple(
            HashedPart(
                begin=self._begins[n], size=self._sizes[n], digest=self._digests[32 * n : 32 * n + 32].hex()
            )
            for n in range(first, first + count)
        )

    @functools.cached_property
    def _by_place(self) -> Mapping[tuple[str, int], str]:
        """Names of tensors by file and first byte.

        Files with names of their own are read under one of the names that models have for a tensor, and the
        manifest has the source's.
        """
        return {(entry.file.name, entry.begin): entry.name for entry in self._entries.values()}

    def own(self, name: str) -> str:
        """Return the name under which a tensor of the source is read."""
        return self._others.get(name, name)

    def add_weight(self, module: str, record: Mapping[str, Any]) -> None:
        """Take in what the manifest says of the weight of a module."""
        self._modules.setdefault(_text(record.get("method", NEAREST)), StringTable()).add(module)
        if "outputs" in record:
            self.outputs[module] = _outputs(record["outputs"])

    def method(self, module: str) -> str | None:
        """Return the method of a module's weight in the manifest, or None."""
        return next((m for m, names in self._modules.items() if names.number(module) is not None), None)

    def unnamed(self) -> Iterator[str]:
        """Yield the tensors that it does not name."""
        return (name for name, first in zip(self._entries, self._first, strict=True) if first < 0)


def read_manifest(source: Source, records: dict[str, Mapping[str, Any]] | None = None) -> Manifest | None:
    """Return the manifest of a checkpoint, or None where there is none.

    It is read as a stream, however long it is. records: takes what it says of each weight, by module. Raises
    CheckpointError where it is damaged, which its own hash tells, or is none.
    """
    path = source.root / MANIFEST
    if not exists(path):
        return None
    with opened(path) as file:
        found = Manifest(source)
        try:
            with reading("it holds what no manifest does", "write the output again"):
                _read(file, found, records)
        except CheckpointError as error:
            raise CheckpointError(f"it is damaged: {error}") from error
    return found


def manifest_or_problem(source: Source) -> tuple[Manifest | None, list[Problem]]:
    """Return the manifest, if any, and its problems."""
    try:
        return read_manifest(source), []
    except CheckpointError as error:
        return None, [Problem(where=MANIFEST, what=str(error))]


def _read(file: OpenFile, found: Manifest, records: dict[str, Mapping[str, Any]] | None) -> None:
    size = file.stamp.size
    tail = b"".join(pieces(file, max(0, size - _TAIL_BYTES), min(size, _TAIL_BYTES)))
    sealed = max(0, size - _TAIL_BYTES) + tail.rindex(_SEAL)
    hashed = hashlib.sha256()
    stream = JsonStream(_hashing(file, sealed, hashed), object_pairs_hook=unique_keys)
    seen: dict[str, Any] = {}
    for key in stream.members():
        if key in seen:
            raise ValueError(f"{printable(key)} appears twice in one object")
        seen[key] = None
        if key == "tensors":
            for name in stream.members():
                found.add(name, stream.value(_MAX_RECORD))
        elif key == "files":
            for name in stream.members():
                if name in found.files:
                    raise ValueError(f"{printable(name)} appears twice in one object")
                found.files[name] = _file(stream.value(_MAX_RECORD))
        elif key == "weights":
            for name in stream.members():
                record, module = stream.value(_MAX_RECORD), module_of(found.own(name + WEIGHT))
                found.add_weight(module, record)
                if records is not None:
                    records[module] = record
        else:
            seen[key] = stream.value(_MAX_RECORD)
    stream.end()
    if "tensors" not in seen or "files" not in seen:
        raise CheckpointError("it names no tensors or no files")
    if seen["sha256"] != hashed.hexdigest():
        raise CheckpointError("its text was changed: its SHA-256 is not the value of its last member, sha256")
    if isinstance(seen.get("identity"), dict):
        found.identity = {name: _text(value) for name, value in seen["identity"].items()}
    if isinstance(seen.get("kept"), dict):
        found.kept = {found.own(name): _text(value) for name, value in seen["kept"].items()}


def _hashing(file: OpenFile, sealed: int, hashed: hashlib._Hash) -> Iterator[bytes]:
    """Yield a file in pieces, and hash its first ``sealed`` bytes."""
    for piece in pieces(file, 0, sealed):
        hashed.update(piece)
        yield piece
    yield from pieces(file, sealed, file.stamp.size - sealed)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not a string")
    return value


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r:.40} is not a number of bytes")
    return value


def _outputs(record: Mapping[str, Any]) -> OutputError:
    loss, bound = (float(record[name]) for name in ("loss", "bound"))
    digest = _digest(record["statistics"])
    return OutputError(loss=loss, bound=bound, over=_count(record["over"]), statistics=digest)


def _digest(value: object) -> str:
    text = _text(value)
    if not _DIGEST.fullmatch(text):
        raise ValueError(f"{text!r:.80} is no SHA-256")
    return text


_DIGEST = re.compile("[0-9a-f]{64}")


def _parts(found: Iterable[Sequence[object]]) -> tuple[HashedPart, ...]:
    return tuple(
        HashedPart(begin=_count(begin), size=_count(size), digest=_digest(digest))
        for begin, size, digest in found
    )


def _file(record: Mapping[str, Any]) -> FileRecord:
    header = record.get("header")
    parts = () if header is not None else _parts(record["parts"])
    return FileRecord(size=_count(record["size"]), header=header and _text(header), parts=parts)


class Uncovered(Check):
    """Say that the parts of a tensor leave bytes of it out."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 0)

    def run(self, scratch: Scratch) -> None:  # noqa: ARG002 (there is nothing to read)
        """See :class:`Task`."""
        self.report("the parts of the manifest do not cover it")


class Digest(Check):
    """Hash bytes of a file, in pieces that fit the thread's memory."""

    def __init__(self, name: str, part: HashedPart, file: OpenFile, place: str) -> None:
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


def file_checks(source: Source, manifest: Manifest, files: OpenFiles) -> tuple[list[Problem], list[Check]]:
    """Return contradictions, and checks of shard headers and other files.

    No name of the manifest becomes a path: files are looked for in the checkpoint.
    """
    present = {*source.shards, *_other_files(source)}
    # A README that was put next to the checkpoint is no damage; what loaders read or run is.
    expected = {
        name for name in present if name in source.shards or name in manifest.files or is_loaded(name)
    }
    problems = [
        *_unmatched(expected, manifest.files),
        *(Problem(where=name, what="the manifest does not name it") for name in manifest.unnamed()),
        *manifest.problems,
    ]
    headers = {name: record.size for name, record in manifest.files.items() if name in source.shards}
    for entry in source.entries.values():
        headers[entry.file.name] = min(entry.begin, headers.get(entry.file.name, entry.begin))
    checks: list[Check] = []
    for name, record in manifest.files.items():
        if name in present:
            found, more = _content(name, record, files[source.root / name], headers.get(name))
            problems += found
            checks += more
    return problems, checks


def is_loaded(name: str) -> bool:
    """Return whether loaders read weights from a file, or run it.

    >>> [is_loaded(name) for name in ("pytorch_model.bin", "modeling_x.py", "README.md", "a/weights.bin")]
    [True, True, False, False]
    """
    return name.endswith(".py") or ("/" not in name and is_weights(name))


def tensor_checks(entry: TensorEntry, manifest: Manifest | None, files: OpenFiles) -> Iterator[Check]:
    """Yield a tensor's hash checks, or the problem of incomplete parts."""
    parts = None if manifest is None else manifest.parts(entry.name)
    if parts is None:
        return
    if not _covers(parts, entry.begin, entry.nbytes):
        yield Uncovered(entry.name)
        return
    place = f"{printable(entry.file.name)}: "
    for part in parts:
        yield Digest(entry.name, part, files[entry.file], place)


def _other_files(source: Source) -> set[str]:
    """Return the names of all files except shards and manifest."""
    paths = {str(path) for path in (*source.companions, *source.left_out)}
    return (paths | ({source.index} if source.index else set())) - {MANIFEST}


def damaged_files(source: Source) -> list[Problem]:
    """Return the damage to files next to shards, for unreadable checkpoints."""
    try:
        manifest = read_manifest(source)
    except CheckpointError as error:
        return [Problem(where=MANIFEST, what=str(error))]
    with OpenFiles() as files:
        present = _other_files(source)
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
    """Return the checks of a shard's header, or a whole file."""
    if file.stamp.size != record.size:
        what = f"it has {file.stamp.size} bytes, but was written with {record.size}"
        return [Problem(where=name, what=what)], []
    parts = record.parts
    if header is not None and record.header is not None:
        parts = (HashedPart(begin=0, size=header, digest=record.header or ""),)
    elif not _covers(parts, 0, record.size):
        return [Problem(where=name, what="the parts of the manifest do not cover it")], []
    return [], [Digest(name, part, file, "") for part in parts]


def _covers(parts: Sequence[HashedPart], begin: int, size: int) -> bool:
    """Return whether parts cover ``size`` bytes from ``begin`` without a hole."""
    at = begin
    for part in parts:
        if part.begin != at:
            return False
        at += part.size
    return at == begin + size
