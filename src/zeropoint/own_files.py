"""Atomically written files next to an output: recipes, plots, plans, caches, states.

One rule holds for all of them. A file has its old content or the new one, whatever happens, and what
zeropoint did not write is not replaced: each kind of file has a mark near its begin, by which its own files
are known. Nothing is written into the folder of a checkpoint that is read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import CheckpointError, printable

Bytes = bytes | memoryview
_HEAD = 4096
"""Bytes in which a mark stands."""
_PIECE = 1 << 20
_TO_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
"""What a file system says that has no files without a name (man 2 open, O_TMPFILE)."""


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file that zeropoint writes.

    noun: its name in messages. mark: what the first bytes of each such file hold; empty for a kind of which
    any file may be replaced, as the caller says.
    """

    noun: str
    mark: bytes = b""


@dataclass(frozen=True, slots=True)
class OwnFile:
    """A file of a kind at a path.

    apart: files and folders of checkpoints that are read, in which nothing is written.
    """

    path: Path
    kind: FileKind
    apart: Sequence[Path] = ()

    def require_free(self, *, overwrite: bool) -> None:
        """Raise CheckpointError where :meth:`write` would refuse whatever the content is.

        overwrite: whether a file of this kind may be replaced.
        """
        with self._io():
            self._require_apart()
            if self._is_ours() is False and overwrite:
                rule = f"{self.kind.noun} of zeropoint" if self.kind.mark else "regular file"
                raise CheckpointError(f"{self} exists and is no {rule}; move it away, or name another file")
            if not overwrite and os.path.lexists(self.path):
                raise CheckpointError(f"{self} exists; name a new file, or move it away")

    def write(self, pieces: Sequence[Bytes], *, overwrite: bool) -> None:
        """Write the file; it is on disk under its name afterwards.

        pieces: its content; a file of it that is there stays. overwrite: whether another file of this kind
        may be replaced. Raises CheckpointError for anything else that has the name, and where the system
        cannot write.
        """
        with self._io():
            if self._is_ours() and self._holds(pieces):
                self._require_apart()
                return
            self.require_free(overwrite=overwrite)
            folder = self.path.parent
            with _draft(folder) as (descriptor, draft):
                for piece in pieces:
                    _write_all(descriptor, memoryview(piece))
                os.fsync(descriptor)
                named = os.path.lexists(draft)
                if not overwrite and not named:
                    _link(descriptor, self.path)  # fails where something has the name by now
                else:
                    if not named:
                        _link(descriptor, draft)
                    self.require_free(overwrite=overwrite)
                    os.rename(draft, self.path)
            _sync(folder)

    def remove(self) -> None:
        """Remove the file where it is one of this kind."""
        with self._io():
            if self._is_ours():
                os.unlink(self.path)
                _sync(self.path.parent)

    def _is_ours(self) -> bool | None:
        """Return whether the path has this kind; None if absent."""
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(found.st_mode):
            return False
        if not self.kind.mark or not found.st_size:
            return True
        with open(os.open(self.path, _TO_READ), "rb") as file:
            return self.kind.mark in file.read(_HEAD)

    def _holds(self, pieces: Sequence[Bytes]) -> bool:
        """Return whether the file that is there has this content."""
        views = (memoryview(piece).cast("B") for piece in pieces)  # one in memory at a time
        with open(os.open(self.path, _TO_READ), "rb") as file:
            parts = (view[at : at + _PIECE] for view in views for at in range(0, len(view), _PIECE))
            return all(file.read(len(part)) == part for part in parts) and not file.read(1)

    def _require_apart(self) -> None:
        folder = Path(os.path.realpath(self.path.parent))
        above = [each for each in (folder, *folder.parents) if each.exists()]
        for place in self.apart:
            inner = [self.path, *above] if place.is_dir() else [self.path]
            if any(each.exists() and os.path.samefile(each, place) for each in inner):
                raise CheckpointError(f"{self} lies in the checkpoint that is read; write elsewhere")

    @contextlib.contextmanager
    def _io(self) -> Iterator[None]:
        """Turn what the system says inside the block into a sentence."""
        try:
            yield
        except CheckpointError:
            raise
        except FileExistsError as error:
            raise CheckpointError(f"{self} exists; name a new file, or move it away") from error
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise CheckpointError(
                f"{self} cannot be written: {reason_of(error)}; choose another place"
            ) from error

    def __str__(self) -> str:
        return f"{self.kind.noun} {printable(str(self.path), limit=1000)}"


def reason_of(error: BaseException) -> str:
    """Return the system's reason, without an OSError's path and number.

    >>> reason_of(FileNotFoundError(2, "No such file or directory", "a"))
    'No such file or directory'
    """
    return str(getattr(error, "strerror", None) or error)


@contextlib.contextmanager
def _draft(folder: Path) -> Iterator[tuple[int, Path]]:
    """Create an unnamed draft in a folder, and an unpredictable name.

    Where the file system knows files without a name, one that is not finished leaves nothing behind.
    """
    draft = folder / f".zeropoint.{secrets.token_hex(8)}"
    try:
        descriptor = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o666)
    except (AttributeError, OSError) as error:  # AttributeError: not on Linux
        if isinstance(error, OSError) and error.errno not in _NO_NAMELESS:
            raise
        descriptor = os.open(draft, _NEW, 0o666)
    try:
        yield descriptor, draft
    finally:
        with contextlib.suppress(OSError):
            os.unlink(draft)  # before the file is closed, which may fail
        os.close(descriptor)


def _link(descriptor: int, path: Path) -> None:
    """Give a file without a name one, which nothing else has."""
    folder = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Of a descriptor the link is followed (man 2 open, O_TMPFILE), which os.link does from a folder only.
        os.link(str(descriptor), path, src_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def _write_all(descriptor: int, data: memoryview) -> None:
    data = data.cast("B")
    while data:
        data = data[os.write(descriptor, data[: 1 << 30]) :]


def _sync(folder: Path) -> None:
    """Wait until a folder's names are on disk, where supported."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)
