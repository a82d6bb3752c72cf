"""Local files and remote objects, read by one set of operations.

Both are the same few operations: open, read a range into a buffer, ask size and identity, list a folder.
Local files are read with `pread` and never mapped, because a file that is truncated while mapped kills the
process. Objects go through fsspec (object_store.py), which is loaded for a URL only. This module knows
nothing of what the bytes mean.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias
from urllib.parse import unquote, urlsplit

from zeropoint.checkpoint.read import object_store
from zeropoint.checkpoint.read.file_names import LONGEST_NAME
from zeropoint.checkpoint.read.object_store import RemotePath, Stamp
from zeropoint.errors import CheckpointError, printable

# Linux reads at most this many bytes a call (man 2 read); other systems fail above 2**31 - 1.
MAX_READ_BYTES = 0x7FFF_F000
_PIECES, _GAP = 512, 1 << 14
"""Pieces that one call reads (Linux takes 1024 buffers), and bytes between two that are read with them."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

Place = Path | RemotePath
"""Place of a file or a folder; both kinds know `name`, `parent` and `/`."""


class OpenFile(Protocol):
    """A file or object open for reading, by any number of threads."""

    @property
    def stamp(self) -> Stamp:
        """Its state when it was opened."""

    @property
    def descriptor(self) -> int | None:
        """The descriptor of a local file, for calls of the operating system."""

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from absolute `offset`; raises CheckpointError on failure."""

    def close(self) -> None:
        """Close it; nothing is read afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One name in a folder, and whether it is a folder itself."""

    name: str
    is_folder: bool


def place(text: str | Place) -> Place:
    """Return the path, or the remote object or folder, of `text`.

    Raises CheckpointError for a URL whose scheme is none of those that are read, for no text at all, which a
    path would take for the current directory, and for a path that no file can have.

    >>> place("models/a"), str(place("s3://bucket/a/"))
    (PosixPath('models/a'), 's3://bucket/a')
    """
    if isinstance(text, RemotePath):
        return text
    if isinstance(text, Path):
        return _possible(text)
    if not text:
        raise CheckpointError("the path is empty; name a directory, or write . for the current one")
    if not _URL.match(text):
        return _possible(Path(text))
    if text.lower().startswith("file://"):
        return _possible(Path(unquote(urlsplit(text).path)))
    return RemotePath.parse(text)


def _possible(path: Path) -> Path:
    """Return a path; raises CheckpointError for one that no file system has."""
    if "\0" in str(path):
        raise CheckpointError(f"{shown(path)} has a NUL character, which no path has; choose another one")
    longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
    if longest > LONGEST_NAME:
        raise CheckpointError(
            f"{shown(path)} has a name of {longest} bytes, and file systems take {LONGEST_NAME}; choose a "
            "shorter one"
        )
    return path


def shown(path: Place | str) -> str:
    """Return a path for a message: quoted, escaped and of bounded length.

    >>> shown("a/model.safetensors")
    "'a/model.safetensors'"
    """
    return printable(str(path), limit=1000)


def open_file(path: Place) -> OpenFile:
    """Open a regular file or object for reading; the caller closes it.

    Raises CheckpointError where it is missing, unreadable, or not a regular file.
    """
    if isinstance(path, RemotePath):
        return object_store.RemoteFile(path)
    return LocalFile(path)


def opened(path: Place) -> closing[OpenFile]:
    """Return a file or object, open for the block; raises as :func:`open_file`."""
    return closing(open_file(path))


def read_bytes(file: OpenFile, begin: int, size: int) -> bytearray:
    """Return bytes of an open file; raises as its ``read_into``."""
    buffer = bytearray(size)
    file.read_into(memoryview(buffer), begin)
    return buffer


class OpenFiles(dict[Place, OpenFile]):
    """Files that are opened on first use, and closed after a block."""

    def __missing__(self, path: Place) -> OpenFile:
        self[path] = file = open_file(path)
        return file

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *failure: object) -> None:
        for file in self.values():
            file.close()


Files: TypeAlias = Mapping[Place, OpenFile]
"""Open files by path."""


def read_small(path: Place, *, limit: int) -> tuple[bytes, Stamp]:
    """Return the content of a small file, and its stamp.

    limit: most bytes that it may have. Raises CheckpointError where it is larger, missing, unreadable or no
    regular file.
    """
    with opened(path) as file:
        if file.stamp.size > limit:
            rule = f"has {file.stamp.size} bytes, above the limit of {limit} for a JSON file"
            raise CheckpointError(f"{shown(path)} {rule}; check that it is the right file")
        return bytes(read_bytes(file, 0, file.stamp.size)), file.stamp


def stamp(path: Place) -> Stamp:
    """Return a file's stamp; raises one of `failures` without a file."""
    if isinstance(path, RemotePath):
        return object_store.stamp(path)
    return stamp_of(os.stat(path))


def failures(path: Place) -> tuple[type[BaseException], ...]:
    """Return the exceptions of a path's file system or store."""
    return object_store.failures(path) if isinstance(path, RemotePath) else (OSError,)


def exists(path: Place) -> bool:
    """Return whether anything exists at `path`, dangling links included."""
    if isinstance(path, RemotePath):
        return object_store.exists(path)
    return os.path.lexists(path)


def is_folder(path: Place) -> bool:
    """Return whether `path` is a directory or a prefix of objects."""
    if isinstance(path, RemotePath):
        return object_store.is_folder(path)
    return path.is_dir()


def listing(folder: Place) -> Sequence[Listed]:
    """Return a folder's content, unordered; raises CheckpointError on failure."""
    if isinstance(folder, RemotePath):
        return [Listed(name=name, is_folder=inner) for name, inner in object_store.listing(folder)]
    try:
        with os.scandir(folder) as found:
            return [Listed(name=e.name, is_folder=e.is_dir(follow_symlinks=False)) for e in found]
    except OSError as error:
        problem = f"{shown(folder)} cannot be listed: {error.strerror}"
        raise CheckpointError(f"{problem}; check the path and its permissions") from error


class LocalFile:
    """A regular file, open by descriptor."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = open_regular(path)
        self.stamp = stamp_of(os.fstat(self._descriptor))

    @property
    def descriptor(self) -> int:
        """See `OpenFile`."""
        return self._descriptor

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """See `OpenFile`."""
        read_into(self._descriptor, buffer, offset, path=self._path)

    def close(self) -> None:
        """See `OpenFile`."""
        os.close(self._descriptor)


def open_regular(path: Path) -> int:
    """Open a regular file for reading; the caller closes the descriptor.

    Raises CheckpointError where the file is missing, unreadable, or not a regular file: a FIFO would block
    for ever, and a device may act on being opened. The kind is asked before the open, and again of the open
    descriptor, since another process may have replaced the file in between.
    """
    try:
        _require_regular(path, os.stat(path).st_mode)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        if isinstance(error, CheckpointError):
            raise
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointError(
            f"{shown(path)} cannot be opened: {reason}; check the path and its permissions"
        ) from error
    try:
        _require_regular(path, os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "directory", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}
        kind = kinds.get(stat.S_IFMT(mode), "device")
        raise CheckpointError(
            f"{shown(path)} is a {kind}, but must be a regular file; remove it or pass another path"
        )


def stamp_of(result: os.stat_result) -> Stamp:
    """Return the stamp of an `os.stat` result."""
    return Stamp(
        size=result.st_size,
        mtime_ns=result.st_mtime_ns,
        ctime_ns=result.st_ctime_ns,
        inode=result.st_ino,
        device=result.st_dev,
    )


def read_into(fd: int, buffer: memoryview, offset: int, *, path: Place | str = "the file") -> None:
    """Fill `buffer` with the file's bytes from absolute `offset` on.

    Short reads and interrupted calls are resumed. `path` is for messages. Raises CheckpointError where the
    file ends before the buffer is full, which means that it changed after its header was read, or where the
    device fails.
    """
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(fd, [buffer[done : done + MAX_READ_BYTES]], offset + done)
        except InterruptedError:
            continue
        except OSError as error:
            problem = f"{shown(path)} cannot be read at byte {offset + done}: {error.strerror}"
            raise CheckpointError(f"{problem}; check the disk or mount, and retry") from error
        if count == 0:
            raise CheckpointError(
                f"{shown(path)} ends at byte {offset + done}, but {len(buffer)} bytes from byte {offset} on "
                "were there when its header was read: the file changed while reading; stop what writes to it "
                "and start again"
            )
        done += count


def read_pieces(file: OpenFile, buffer: memoryview, offset: int, *, size: int, stride: int) -> None:
    """Fill `buffer` with pieces of `size` bytes, `stride` bytes apart.

    The first lies at `offset`. What lies between pieces is read as well where that is little: calls cost more
    than it. Raises what `read_into` of the file raises.
    """
    if size == stride or len(buffer) <= size:
        return file.read_into(buffer, offset)
    gap = memoryview(bytearray(stride - size if stride - size <= _GAP else 0))
    step = _PIECES * size if gap and file.descriptor is not None else size
    for at in range(0, len(buffer), step):
        pieces = [buffer[begin : begin + size] for begin in range(at, min(at + step, len(buffer)), size)]
        begin = offset + at // size * stride
        if len(pieces) > 1 and _read_at_once(file, pieces, gap, begin):
            continue
        for number, piece in enumerate(pieces):
            file.read_into(piece, begin + number * stride)
    return None


def _read_at_once(file: OpenFile, pieces: list[memoryview], gap: memoryview, offset: int) -> bool:
    """Return whether one call filled all pieces, gaps included."""
    assert file.descriptor is not None
    into = [gap] * (2 * len(pieces) - 1)
    into[::2] = pieces
    try:
        return os.preadv(file.descriptor, into, offset) == sum(map(len, into))
    except OSError:
        return False
