r"""Journal of a run: records of durable units, from which it resumes.

``OUT/.zeropoint.journal`` is a line a record:

    LLLLLLLL CCCCCCCC {JSON}\n

with the bytes of the JSON and their CRC-32, both in hexadecimal. Each CRC begins from the CRC of the line
before, so a line that was changed, moved, doubled or taken from another journal ends what counts; the lines
before it stand. The first record says what is made of what (plan/identity.py). A record is written after
the bytes that it is about are on disk; even so nothing is believed of them until they hash to what it says
(resume.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import CheckpointError
from ..read.file_names import is_inside, is_own
from ..read.problems import ObstacleError
from ..read.storage import shown

_PREFIX = len("LLLLLLLL CCCCCCCC ")
_MAX_RECORD = 1 << 28
"""Bytes of the longest record; the first one names every shard, a few hundred bytes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalHeader:
    """The first record: identity of the run, source stamps, output files."""

    identity: Mapping[str, str]
    stamps: Mapping[str, str]
    files: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return it as values that JSON holds; ``JournalHeader(**document)`` is the inverse."""
        return {"identity": dict(self.identity), "stamps": dict(self.stamps), "files": list(self.files)}

    @staticmethod
    def parse(document: Mapping[str, Any]) -> JournalHeader:
        """Return the header in a document; raises CheckpointError otherwise."""
        files = document.get("files")
        if document.keys() != {"identity", "stamps", "files"} or not isinstance(files, list):
            raise CheckpointError("its first record does not say what is made of what")
        for name in files:
            require_output(name)
        return JournalHeader(
            identity=texts(document["identity"]), stamps=texts(document["stamps"]), files=tuple(files)
        )


def require_output(name: object) -> None:
    """Raise CheckpointError unless a record's ``name`` can be an output file."""
    if not is_inside(name) or any(map(is_own, str(name).split("/"))):
        raise CheckpointError(f"it names {shown(repr(name))}, which is no file of an output")


def texts(found: object) -> dict[str, str]:
    """Return a table of texts; raises CheckpointError for anything else."""
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise CheckpointError(f"it has {shown(repr(found)[:80])} where a table of texts belongs")
    return found


class Journal:
    """A journal open for appending; :meth:`append` returns with its record on disk.

    head: what the file begins with, before its records. records: those that were there, in order; what
    follows the last good one is cut off. Raises OSError, and ObstacleError when it is no file, begins with
    something else, or has another name too, whose bytes are not ours to change.
    """

    def __init__(self, path: Path, head: bytes = b"") -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        found = os.fstat(self._descriptor)
        if (
            not stat.S_ISREG(found.st_mode)
            or found.st_nlink > 1
            or os.pread(self._descriptor, len(head), 0) != head
        ):
            self.close()
            raise ObstacleError(
                f"{shown(path)} is not a journal of a run: it is not a regular file, or has another name "
                "too; move it away"
            )
        self.records: list[dict[str, Any]] = []
        self._end, self._crc = len(head), zlib.crc32(head)
        with open(self._descriptor, "rb", closefd=False) as file:
            for record, end, crc in _good_lines(file, head):
                self.records.append(record)
                self._end, self._crc = end, crc
        self._count = len(self.records)
        if os.fstat(self._descriptor).st_size != self._end:
            os.ftruncate(self._descriptor, self._end)

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write records behind the others, and wait until they are on disk."""
        lines, crc = [], self._crc
        for record in records:
            line, crc = _line(record, crc)
            lines.append(line)
        data = b"".join(lines)
        end = self._end
        while data:
            count = os.pwrite(self._descriptor, data, end)
            data, end = data[count:], end + count
        os.fdatasync(self._descriptor)
        self._count += len(lines)
        self._end, self._crc = end, crc

    def __len__(self) -> int:
        """Return the number of records on disk."""
        return self._count

    def close(self) -> None:
        """Close the file, ignoring failures: records are durable already. Idempotent."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1


def journal_bytes(head: bytes, record: Mapping[str, Any]) -> bytes:
    """Return the content of a journal with this head and one record."""
    return head + _line(record, zlib.crc32(head))[0]


def first_record(path: Path, head: bytes) -> dict[str, Any] | None:
    """Return a file's first record after ``head``, or None; cut nothing."""
    with open(path, "rb") as file:
        return next((record for record, *_ in _good_lines(file, head)), None)


def _line(record: Mapping[str, Any], crc: int) -> tuple[bytes, int]:
    body = json.dumps(record, separators=(",", ":")).encode("ascii")
    crc = zlib.crc32(body, crc)
    return b"%08x %08x %s\n" % (len(body), crc, body), crc


def _good_lines(file: BinaryIO, head: bytes) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Yield each intact record from the start, its end and its CRC."""
    end, crc = len(head), zlib.crc32(head)
    file.seek(end)
    while len(prefix := file.read(_PREFIX)) == _PREFIX:
        try:
            length, expected = int(prefix[:8], 16), int(prefix[9:17], 16)
        except ValueError:
            return
        body = file.read(length + 1) if 0 <= length <= _MAX_RECORD else b""
        crc = zlib.crc32(body[:-1], crc)
        # The CRC is of the body alone: a last line whose length is too large would end what follows it later.
        if (
            len(body) != length + 1
            or crc != expected
            or body[-1:] != b"\n"
            or prefix != b"%08x %08x " % (length, crc)
        ):
            return
        try:
            record = json.loads(body)
        except (ValueError, RecursionError):  # an empty line, whose CRC equals the line before's
            return
        if not isinstance(record, dict):
            return
        end += len(prefix) + len(body)
        yield record, end, crc
