"""Files below a directory, reached by relative names that lead nowhere else.

This is the second of two walls: a name is checked again where a file is opened to write, renamed or removed,
and each folder on the way to it is opened from the one before, without following a link. The last part of a
name is never followed either.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ...errors import CheckpointError
from ..read.file_names import is_inside
from ..read.problems import ObstacleError
from ..read.storage import OpenFile, shown

_FALLBACK_CHUNK = 1 << 20
_NO_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Folder:
    """A directory; ``path`` has no link in it.

    Its methods raise OSError, and ObstacleError for a link.
    """

    path: Path

    def open(self, name: str, flags: int) -> int:
        """Return a descriptor of the file ``name``, which is no link."""
        with self._reached(name) as (at, folder):
            return os.open(at, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=folder)

    def state(self, name: str) -> os.stat_result | None:
        """Return the state of a name, or None where nothing has it."""
        try:
            with self._reached(name) as (at, folder):
                return os.stat(at, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def file(self, name: str) -> os.stat_result | None:
        """Return a file's state or None; raises ObstacleError for other objects."""
        found = self.state(name)
        if found is not None and not stat.S_ISREG(found.st_mode):
            raise ObstacleError(
                f"{shown(self.path / name)} exists and is not a regular file; move it away, or choose "
                "another output"
            )
        return found

    def unlink(self, name: str) -> None:
        """Remove a file."""
        with self._reached(name) as (at, folder):
            os.unlink(at, dir_fd=folder)

    def rename(self, name: str, to: str) -> None:
        """Give a file another name in the same folder."""
        assert PurePosixPath(name).parent == PurePosixPath(to).parent, (name, to)
        with self._reached(name) as (at, folder), self._reached(to) as (new, _):
            os.rename(at, new, src_dir_fd=folder, dst_dir_fd=folder)

    def make(self, name: str) -> list[str]:
        """Make the missing folders of a file; return them, the outermost first."""
        made = []
        for parent in reversed(PurePosixPath(name).parents[:-1]):
            with self._reached(str(parent)) as (at, folder), contextlib.suppress(FileExistsError):
                os.mkdir(at, dir_fd=folder)
                made.append(str(parent))
        return made

    def remove(self, folder: str) -> None:
        """Remove a folder that is empty."""
        with self._reached(folder) as (at, parent):
            os.rmdir(at, dir_fd=parent)

    @contextlib.contextmanager
    def _reached(self, name: str) -> Iterator[tuple[str, int | None]]:
        """Give a file's path, or its name and its folder's descriptor."""
        if not is_inside(name):
            rule = "do not trust where it comes from"
            raise CheckpointError(f"{shown(name)} leads out of {shown(self.path)}; {rule}")
        *folders, last = name.split("/")
        if not folders:
            yield str(self.path / last), None
            return
        with contextlib.ExitStack() as stack:
            at = os.open(self.path, _FOLDER)
            stack.callback(os.close, at)
            for folder in folders:
                at = self._step(folder, at)
                stack.callback(os.close, at)
            yield last, at

    def _step(self, name: str, at: int) -> int:
        try:
            return os.open(name, _FOLDER, dir_fd=at)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            raise ObstacleError(
                f"{shown(self.path / name)} is not a folder, or is a link to one, but the output has files "
                "in it; move it away, or choose another output"
            ) from error


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``, bytes, at ``offset``; short writes are resumed."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def copy_range(source: OpenFile, target: int, *, begin: int, to: int, size: int) -> None:
    """Copy ``size`` bytes from ``begin`` in ``source`` to ``to`` in ``target``.

    In the kernel where it can; blocks are shared on file systems that know how. Raises CheckpointError when
    the source ends before.
    """
    done = 0
    while done < size and source.descriptor is not None:
        try:
            count = os.copy_file_range(source.descriptor, target, size - done, begin + done, to + done)
        except AttributeError:  # not on Linux
            break
        except OSError as error:
            if error.errno not in _NO_COPY:
                raise
            break
        if count == 0:
            break  # the file is shorter, which reading reports, or the file system has no such call
        done += count
    buffer = bytearray(min(_FALLBACK_CHUNK, size - done))
    while done < size:
        part = memoryview(buffer)[: size - done]
        source.read_into(part, begin + done)
        write_at(target, part, to + done)
        done += len(part)
